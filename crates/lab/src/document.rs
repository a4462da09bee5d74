//! Documents with hand-written text and generated sections between two marks; and the date of a measurement.

use anyhow::{Result, bail};
use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Returns `document` with the text between its marks `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced by `text`.
pub(crate) fn replace_between_marks(document: &str, name: &str, text: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let (Some(from), Some(to)) = (document.find(&begin), document.find(&end)) else {
        bail!("the marks \"{begin}\" and \"{end}\" are missing; add them where the tables belong");
    };
    if document.matches(&begin).count() > 1 || document.matches(&end).count() > 1 || to < from {
        bail!("the marks \"{begin}\" and \"{end}\" must occur once each, in this order");
    }
    Ok(format!("{}\n\n{}\n\n{}", &document[..from + begin.len()], text.trim(), &document[to..]))
}

/// Current date, in UTC.
pub(crate) fn today() -> String {
    Timestamp::now().to_zoned_datetime(TimeZone::UTC).date().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_text_between_the_marks_changes() {
        let document = "# Head\n<!-- t:begin -->\nold\n<!-- t:end -->\ntail\n";
        let once = replace_between_marks(document, "t", "new\n").expect("both marks");
        assert_eq!(once, "# Head\n<!-- t:begin -->\n\nnew\n\n<!-- t:end -->\ntail\n");
        assert_eq!(replace_between_marks(&once, "t", "new").expect("both marks"), once);
    }

    #[test]
    fn missing_or_repeated_marks_are_an_error() {
        assert!(replace_between_marks("no marks", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:begin -->", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:end --><!-- t:begin -->", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:begin --><!-- t:end --><!-- t:end -->", "t", "x").is_err());
    }
}
