//! Tables for terminals and Markdown.

/// Rows of text with a header. The first column is left-aligned (names), the others right-aligned (numbers), unless the
/// table has only text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
    has_numbers: bool,
}

impl Table {
    /// Creates a table without rows.
    pub fn new<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { head: head.into_iter().map(Into::into).collect(), rows: Vec::new(), has_numbers: true }
    }

    /// Creates a table without rows, with text in each column.
    pub fn of_text<S: Into<String>>(head: impl IntoIterator<Item = S>) -> Self {
        Self { has_numbers: false, ..Self::new(head) }
    }

    fn is_left(&self, column: usize) -> bool {
        column == 0 || !self.has_numbers
    }

    /// Adds a row. Missing cells at the end are empty.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let mut cells: Vec<_> = cells.into_iter().map(Into::into).collect();
        cells.resize(self.head.len(), String::new());
        self.rows.push(cells);
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Formats the table with columns aligned by spaces.
    pub fn to_text(&self) -> String {
        let widths = self.widths();
        let line = |cells: &[String]| {
            let mut out = String::new();
            for (i, (cell, width)) in cells.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                out.push_str(if i == 0 { "" } else { "  " });
                out.push_str(&if self.is_left(i) { format!("{cell}{gap}") } else { format!("{gap}{cell}") });
            }
            format!("{}\n", out.trim_end())
        };
        let rule = format!("{}\n", "-".repeat(widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1)));
        std::iter::once(line(&self.head)).chain([rule]).chain(self.rows.iter().map(|r| line(r))).collect()
    }

    /// Formats the table as Markdown with aligned source.
    pub fn to_markdown(&self) -> String {
        let escaped = Self {
            head: self.head.iter().map(|c| c.replace('|', "\\|")).collect(),
            rows: self.rows.iter().map(|r| r.iter().map(|c| c.replace('|', "\\|")).collect()).collect(),
            has_numbers: self.has_numbers,
        };
        let widths: Vec<_> = escaped.widths().into_iter().map(|w| w.max(3)).collect();
        let line = |cells: &[String]| {
            let cells = cells.iter().zip(&widths).enumerate().map(|(i, (cell, width))| {
                let gap = " ".repeat(width - cell.chars().count());
                if self.is_left(i) { format!(" {cell}{gap} |") } else { format!(" {gap}{cell} |") }
            });
            format!("|{}\n", cells.collect::<String>())
        };
        let rule = widths.iter().enumerate().map(|(i, w)| {
            if self.is_left(i) { format!(" {} |", "-".repeat(*w)) } else { format!(" {}: |", "-".repeat(w - 1)) }
        });
        let rule = format!("|{}\n", rule.collect::<String>());
        std::iter::once(line(&escaped.head)).chain([rule]).chain(escaped.rows.iter().map(|r| line(r))).collect()
    }

    fn widths(&self) -> Vec<usize> {
        (0..self.head.len())
            .map(|i| std::iter::once(&self.head).chain(&self.rows).map(|r| r[i].chars().count()).max().unwrap_or(0))
            .collect()
    }
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
    fn markdown_is_a_table_for_any_cell_content() {
        let expected = "\
| proxy        |   µs |   x |
| ------------ | ---: | --: |
| a            | 12.5 |   1 |
| longer\\|name |    3 |     |
";
        assert_eq!(table().to_markdown(), expected);
        let mut table = Table::of_text(["place", "x"]);
        table.row(["a", "b"]);
        assert_eq!(table.to_markdown(), "| place | x   |\n| ----- | --- |\n| a     | b   |\n");
    }
}
