//! Tables for display: aligned columns, with numbers to the right.

use switchyard_bench::numbers::thousands;

/// Title of a column, and whether it has numbers.
pub(super) struct Column {
    title: &'static str,
    number: bool,
}

pub(super) fn text(title: &'static str) -> Column {
    Column { title, number: false }
}

pub(super) fn number(title: &'static str) -> Column {
    Column { title, number: true }
}

/// Lays out rows below titles. Lines have no trailing spaces, so that they can be copied.
pub(super) fn table(columns: &[Column], rows: &[Vec<String>]) -> String {
    let width = |i: usize| {
        let cells = rows.iter().filter_map(|row| row.get(i)).map(|cell| cell.chars().count());
        cells.chain([columns[i].title.len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut out = String::new();
    let titles: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    for row in [&titles].into_iter().chain(rows) {
        let mut line = String::new();
        for ((cell, column), width) in row.iter().zip(columns).zip(&widths) {
            let width = *width;
            line.push_str(&if column.number { format!("{cell:>width$}") } else { format!("{cell:<width$}") });
            line.push_str("  ");
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
    out
}

/// A count with separated thousands: `1 234 567`.
pub(super) fn count(number: u64) -> String {
    thousands(number).replace(',', " ")
}

/// Shortens a list of ranges to `width` characters. Long lists are of no use in a table, and `--json` has all ranges.
pub(super) fn shortened(ranges: &str, width: usize) -> String {
    match ranges.char_indices().nth(width) {
        None => ranges.to_owned(),
        Some((at, _)) => format!("{}...", ranges[..at].rsplit_once(',').map_or(&ranges[..at], |(whole, _)| whole)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let columns = [text("NODE"), number("SLOTS")];
        let rows = [vec!["127.0.0.1:7001".to_owned(), "8 192".to_owned()], vec!["b".to_owned(), "0".to_owned()]];
        assert_eq!(table(&columns, &rows), "NODE            SLOTS\n127.0.0.1:7001  8 192\nb                   0\n");
    }

    #[test]
    fn thousands_are_separated() {
        for (number, text) in [(0, "0"), (999, "999"), (1000, "1 000"), (1_234_567, "1 234 567")] {
            assert_eq!(count(number), text);
        }
    }
}
