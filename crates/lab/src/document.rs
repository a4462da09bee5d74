//! Documents with hand-written text and generated sections between two marks; and the date of a measurement.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};

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
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let (year, month, day) = civil_date((seconds / 86_400) as i64);
    format!("{year}-{month:02}-{day:02}")
}

/// Year, month and day of the Gregorian calendar for a number of days since 1970-01-01 (counting from March, so that
/// leap days come last).
fn civil_date(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468; // since 0000-03-01
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
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

    #[test]
    fn dates() {
        assert_eq!(civil_date(0), (1970, 1, 1));
        assert_eq!(civil_date(19_782), (2024, 2, 29));
        assert_eq!(civil_date(20_777), (2026, 11, 20));
        assert_eq!(civil_date(11_016), (2000, 2, 29));
    }
}
