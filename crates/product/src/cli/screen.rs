//! `--watch` on a terminal: each frame replaces the previous one and fits the window.
//!
//! Long and surplus lines are cut rather than wrapped: in a frame that scrolls, the most important lines leave the
//! window.

use std::io::{IsTerminal as _, Write as _, stdout};

use rustix::termios::tcgetwinsize;

/// Assumed size if the system does not know it.
const USUAL: Window = Window { rows: 24, columns: 80 };

/// Size of a window, in characters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Window {
    pub(super) rows: usize,
    columns: usize,
}

impl Window {
    /// Window of stdout. `None` if it is not a terminal.
    pub(super) fn of_stdout() -> Option<Self> {
        let stdout = stdout();
        if !stdout.is_terminal() {
            return None;
        }
        let known = tcgetwinsize(&stdout).ok().filter(|size| size.ws_row > 0 && size.ws_col > 0);
        Some(known.map_or(USUAL, |size| Self { rows: size.ws_row.into(), columns: size.ws_col.into() }))
    }

    /// Replaces the current frame.
    pub(super) fn show(self, text: &str) {
        let mut out = stdout();
        // If the terminal is gone, the next frame ends the process.
        let _ = out.write_all(self.frame(text).as_bytes()).and_then(|()| out.flush());
    }

    /// Bytes of a frame, for a single write: clears the window and fills it from the top left. No line break after the
    /// last line, since that would scroll. Wrapping is disabled during the frame, because a character may be wider than
    /// one column.
    fn frame(self, text: &str) -> String {
        let lines = text.lines().take(self.rows).map(|line| line.chars().take(self.columns).collect::<String>());
        format!("\x1b[?7l\x1b[H\x1b[J{}\x1b[?7h", lines.collect::<Vec<_>>().join("\r\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_fits_its_window_and_does_not_scroll() {
        let window = Window { rows: 2, columns: 4 };
        assert_eq!(window.frame("12345\nab\nthird\n"), "\x1b[?7l\x1b[H\x1b[J1234\r\nab\x1b[?7h");
        assert_eq!(window.frame("äöüßx"), "\x1b[?7l\x1b[H\x1b[Jäöüß\x1b[?7h");
    }
}
