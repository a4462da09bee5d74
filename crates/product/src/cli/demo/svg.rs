//! Renders the story as a picture of a terminal: plain text in SVG, one element per line.
//!
//! Own code, because one element per line suffices. Crates that draw terminals read escape codes, which would have to
//! be produced first.

use std::fmt::Write as _;

use super::narrator::{Kind, Line};

const LINE: usize = 18;
const LETTER: f64 = 8.0;
const EDGE: usize = 18;
const STYLE: &str = "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d6dbe0;white-space:pre}\
    .act,.verdict{font-weight:bold;fill:#fff}.seen{fill:#5fc9d8}.decided{fill:#e5c07b}.done{fill:#8cc570}.missed{fill:#e06c75}.load{fill:#7d8590}";

/// Renders the lines.
pub(super) fn picture(lines: &[Line]) -> String {
    let letters =
        lines.iter().map(|line| (line.head.chars().count() + line.text.chars().count()) as f64).fold(80.0, f64::max);
    let (width, height) = ((letters * LETTER) as usize + 2 * EDGE, (lines.len() + 1) * LINE + 2 * EDGE);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" role=\"img\" \
         aria-label=\"make demo\">\n<style>{STYLE}</style>\n<rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#14181d\"/>\n"
    );
    let all = std::iter::once((None, "", "$ make demo"))
        .chain(lines.iter().map(|line| (Some(line.kind), &*line.head, &*line.text)));
    for (at, (kind, head, text)) in all.enumerate() {
        let y = EDGE + LINE * at + 12;
        let class = kind.map_or("", class);
        // The kind colours the prefix. In short lines it colours the whole line.
        let (of_head, of_text) = match kind {
            Some(Kind::Seen | Kind::Decided | Kind::Done) => (class, ""),
            _ => (class, class),
        };
        let span = |class: &str, text: &str| match (text.is_empty(), class.is_empty()) {
            (true, _) => String::new(),
            (false, true) => escaped(text),
            (false, false) => format!("<tspan class=\"{class}\">{}</tspan>", escaped(text)),
        };
        if !(head.is_empty() && text.is_empty()) {
            // Writing to a string does not fail.
            let _ = writeln!(
                out,
                "<text x=\"{EDGE}\" y=\"{y}\" xml:space=\"preserve\">{}{}</text>",
                span(of_head, head),
                span(of_text, text)
            );
        }
    }
    out.push_str("</svg>\n");
    out
}

fn class(kind: Kind) -> &'static str {
    match kind {
        Kind::Act => "act",
        Kind::Seen => "seen",
        Kind::Decided => "decided",
        Kind::Done => "done",
        Kind::Missed => "missed",
        Kind::Load => "load",
        Kind::Verdict => "verdict",
        Kind::Plain | Kind::Aside => "",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_each_line_and_no_markup_of_theirs() {
        let line = |kind, text: &str| Line { kind, head: "0:01  ".to_owned(), text: text.to_owned() };
        let picture = picture(&[line(Kind::Seen, "a < b & c"), line(Kind::Verdict, "0 wrong")]);
        assert!(
            picture.contains("a &lt; b &amp; c</text>") && picture.contains("class=\"verdict\">0 wrong"),
            "{picture}"
        );
        assert_eq!(picture.matches("<text ").count(), 3, "{picture}");
    }
}
