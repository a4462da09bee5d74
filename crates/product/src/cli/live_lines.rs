//! Lines at the end of a terminal that are replaced in place.
//!
//! Not with a progress library: the few lines here need neither threads nor templates.

use std::io::{IsTerminal as _, Write as _, stdout};

/// Width of a bar, in characters.
const BAR: usize = 40;

/// Lines on the terminal, below all permanent ones.
#[derive(Debug, Default)]
pub(super) struct LiveLines {
    lines: Vec<String>,
}

impl LiveLines {
    /// `None` if stdout is no terminal.
    pub(super) fn on_terminal() -> Option<Self> {
        stdout().is_terminal().then(Self::default)
    }

    /// Replaces the lines.
    pub(super) fn show(&mut self, lines: Vec<String>) {
        self.replace("", lines);
    }

    /// Prints a permanent line above the lines.
    pub(super) fn print_above(&mut self, text: &str) {
        let lines = self.lines.clone();
        self.replace(&format!("{text}\n"), lines);
    }

    /// Removes the lines.
    pub(super) fn clear(&mut self) {
        self.replace("", Vec::new());
    }

    fn replace(&mut self, above: &str, lines: Vec<String>) {
        let columns = rustix::termios::tcgetwinsize(stdout()).map_or(0, |size| usize::from(size.ws_col));
        let text = redrawn(self.lines.len(), above, &lines, if columns == 0 { 80 } else { columns });
        self.lines = lines;
        // A closed terminal must not end the command.
        let _ = stdout().write_all(text.as_bytes()).and_then(|()| stdout().flush());
    }
}

/// Text that replaces the last `count` lines of a terminal. A line is cut at the terminal's width: wrapped, it would
/// take two rows.
fn redrawn(count: usize, above: &str, lines: &[String], columns: usize) -> String {
    let mut text = if count > 0 { format!("\x1b[{count}A\r\x1b[J{above}") } else { above.to_owned() };
    for line in lines {
        text.extend(line.chars().take(columns));
        text.push('\n');
    }
    text
}

/// A bar for a fraction from 0 to 1, such as `[====>     ]`.
pub(super) fn bar(fraction: f64) -> String {
    let filled = ((fraction.clamp(0.0, 1.0) * BAR as f64) as usize).min(BAR);
    let head = if filled < BAR { ">" } else { "" };
    format!("[{:<BAR$}]", format!("{}{head}", "=".repeat(filled)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_fill_from_the_left() {
        assert_eq!(bar(0.0), format!("[>{}]", " ".repeat(39)));
        assert_eq!(bar(0.5), format!("[{}>{}]", "=".repeat(20), " ".repeat(19)));
        assert_eq!(bar(1.0), format!("[{}]", "=".repeat(40)));
        assert_eq!(bar(f64::NAN).len(), 42);
    }

    #[test]
    fn new_lines_replace_the_shown_ones() {
        let lines = ["wide line".to_owned(), "b".to_owned()];
        assert_eq!(redrawn(0, "", &lines, 4), "wide\nb\n");
        assert_eq!(redrawn(2, "kept\n", &lines[1..], 80), "\x1b[2A\r\x1b[Jkept\nb\n");
        assert_eq!(redrawn(2, "", &[], 80), "\x1b[2A\r\x1b[J");
    }
}
