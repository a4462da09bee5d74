//! Tables, for a terminal and for Markdown, and putting generated text between two marks of a document that people also edit.

use anyhow::{Result, bail};

/// Rows of text under a head. The first column is left-aligned (names), the others right-aligned (numbers).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new() }
    }

    /// Adds a row; one with fewer cells than the head ends in empty ones.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<_> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Columns aligned by spaces.
    pub fn to_text(&self) -> String {
        let widths = self.widths();
        let line = |cells: &[String]| {
            let mut out = String::new();
            for (i, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                if i == 0 {
                    out.push_str(cell);
                    out.push_str(&gap);
                } else {
                    out.push_str("  ");
                    out.push_str(&gap);
                    out.push_str(cell);
                }
            }
            format!("{}\n", out.trim_end())
        };
        let rule = format!("{}\n", "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)));
        std::iter::once(line(&self.head)).chain([rule]).chain(self.rows.iter().map(|r| line(r))).collect()
    }

    /// A Markdown table whose source is aligned too.
    pub fn to_markdown(&self) -> String {
        let escaped = Self {
            head: self.head.iter().map(|c| c.replace('|', "\\|")).collect(),
            rows: self.rows.iter().map(|r| r.iter().map(|c| c.replace('|', "\\|")).collect()).collect(),
        };
        let widths: Vec<_> = escaped.widths().into_iter().map(|w| w.max(3)).collect();
        let line = |cells: &[String]| {
            let cells = cells.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
                let gap = " ".repeat(width - cell.chars().count());
                if i == 0 { format!(" {cell}{gap} |") } else { format!(" {gap}{cell} |") }
            });
            format!("|{}\n", cells.collect::<String>())
        };
        let rule = widths
            .iter()
            .enumerate()
            .map(|(i, w)| if i == 0 { format!(" {} |", "-".repeat(*w)) } else { format!(" {}: |", "-".repeat(w - 1)) });
        let rule = format!("|{}\n", rule.collect::<String>());
        std::iter::once(line(&escaped.head)).chain([rule]).chain(escaped.rows.iter().map(|r| line(r))).collect()
    }

    fn widths(&self) -> Vec<usize> {
        (0..self.head.len())
            .map(|i| std::iter::once(&self.head).chain(&self.rows).map(|r| r[i].chars().count()).max().unwrap_or(0))
            .collect()
    }
}

/// `document` with what stands between its marks `<!-- NAME:begin -->` and `<!-- NAME:end -->` replaced by `text`.
pub fn replace_between_marks(document: &str, name: &str, text: &str) -> Result<String> {
    let (begin, end) = (format!("<!-- {name}:begin -->"), format!("<!-- {name}:end -->"));
    let (Some(from), Some(to)) = (document.find(&begin), document.find(&end)) else {
        bail!("the marks \"{begin}\" and \"{end}\" are not both there; put them where the tables belong");
    };
    if document.matches(&begin).count() > 1 || document.matches(&end).count() > 1 || to < from {
        bail!("the marks \"{begin}\" and \"{end}\" must stand there once each, in this order");
    }
    Ok(format!("{}\n\n{}\n\n{}", &document[..from + begin.len()], text.trim(), &document[to..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(["proxy", "µs", "x"]);
        table.row(["a", "12.5", "1"]);
        table.row(["longer|name", "3"]);
        table
    }

    #[test]
    fn text_is_aligned() {
        let expected = "proxy          µs  x\n---------------------\na            12.5  1\nlonger|name     3\n";
        assert_eq!(table().to_text(), expected.replace("---------------------", &"-".repeat(20)));
    }

    #[test]
    fn markdown_is_a_table_whatever_the_cells_hold() {
        let expected = "\
| proxy        |   µs |   x |
| ------------ | ---: | --: |
| a            | 12.5 |   1 |
| longer\\|name |    3 |     |
";
        assert_eq!(table().to_markdown(), expected);
    }

    #[test]
    fn only_what_is_between_the_marks_changes() {
        let document = "# Head\n<!-- t:begin -->\nold\n<!-- t:end -->\ntail\n";
        let once = replace_between_marks(document, "t", "new\n").expect("both marks");
        assert_eq!(once, "# Head\n<!-- t:begin -->\n\nnew\n\n<!-- t:end -->\ntail\n");
        assert_eq!(replace_between_marks(&once, "t", "new").expect("both marks"), once);
    }

    #[test]
    fn missing_or_doubled_marks_are_an_error_not_a_lost_document() {
        assert!(replace_between_marks("no marks", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:begin -->", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:end --><!-- t:begin -->", "t", "x").is_err());
        assert!(replace_between_marks("<!-- t:begin --><!-- t:end --><!-- t:end -->", "t", "x").is_err());
    }
}
