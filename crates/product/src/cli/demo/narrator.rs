//! Output of the demo: a line for each event, decision and action, and a live line with the current load.

use std::io::Write as _;
use std::time::{Duration, Instant};

use super::super::live_lines::LiveLines;

/// Redraw interval on a terminal.
const REDRAW: Duration = Duration::from_millis(250);
/// Interval of load lines without a terminal.
const LINE: Duration = Duration::from_secs(1);
/// Characters per line, and width of the prefix before the text.
const WIDTH: usize = 104;
const MARGIN: usize = 16;

/// Kind of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Title of an act.
    Act,
    /// An observed event.
    Seen,
    /// A decision of the router.
    Decided,
    /// A completed action.
    Done,
    /// An expected event that did not happen.
    Missed,
    /// Current load.
    Load,
    /// Final result.
    Verdict,
    Plain,
    /// A hint for this machine only, omitted from the picture.
    Aside,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Seen => "seen",
            Self::Decided => "decided",
            Self::Done => "done",
            Self::Missed => "MISSED",
            Self::Load => "load",
            Self::Verdict => "verdict",
            Self::Act | Self::Plain | Self::Aside => "",
        }
    }

    fn escape(self) -> &'static str {
        match self {
            Self::Act => "\x1b[1m",
            Self::Seen => "\x1b[36m",
            Self::Decided => "\x1b[33m",
            Self::Done => "\x1b[32m",
            Self::Missed => "\x1b[31m",
            Self::Verdict => "\x1b[1;32m",
            Self::Load => "\x1b[2m",
            Self::Plain | Self::Aside => "",
        }
    }
}

/// A line as displayed.
#[derive(Clone, Debug)]
pub(super) struct Line {
    pub(super) kind: Kind,
    /// Time and kind.
    pub(super) head: String,
    pub(super) text: String,
}

/// Prints the lines.
pub(super) struct Narrator {
    started: Instant,
    live: Option<LiveLines>,
    is_coloured: bool,
    lines: Vec<Line>,
}

impl Narrator {
    pub(super) fn start() -> Self {
        let live = LiveLines::on_terminal();
        let is_coloured = live.is_some() && std::env::var_os("NO_COLOR").is_none();
        Self { started: Instant::now(), live, is_coloured, lines: Vec::new() }
    }

    /// Interval between calls of [`Self::show`].
    pub(super) fn period(&self) -> Duration {
        if self.live.is_some() { REDRAW } else { LINE }
    }

    /// Replaces the live line.
    pub(super) fn show(&mut self, numbers: &str) {
        match &mut self.live {
            Some(live) => live.show(vec![numbers.to_owned()]),
            None => {
                let line = Line { kind: Kind::Load, head: self.head(Kind::Load), text: numbers.to_owned() };
                self.print(&line);
            }
        }
    }

    /// Prints a permanent line.
    pub(super) fn narrate(&mut self, kind: Kind, text: &str) {
        if kind == Kind::Act {
            self.put(Line { kind: Kind::Plain, head: String::new(), text: String::new() });
        }
        let (mut head, width) = match kind {
            Kind::Act | Kind::Plain => (String::new(), WIDTH),
            // Not wrapped, so that it can be copied in one piece.
            Kind::Aside => (String::new(), usize::MAX),
            _ => (self.head(kind), WIDTH - MARGIN),
        };
        for part in wrapped(text, width) {
            let next = " ".repeat(head.len());
            self.put(Line { kind, head: std::mem::replace(&mut head, next), text: part });
        }
    }

    /// All permanent lines.
    pub(super) fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Removes the live line.
    pub(super) fn finish(&mut self) {
        if let Some(live) = &mut self.live {
            live.clear();
        }
    }

    fn head(&self, kind: Kind) -> String {
        let seconds = self.started.elapsed().as_secs();
        format!("{:>3}:{:02}  {:<8}", seconds / 60, seconds % 60, kind.word())
    }

    fn put(&mut self, line: Line) {
        self.print(&line);
        if line.kind != Kind::Aside {
            self.lines.push(line);
        }
    }

    fn print(&mut self, line: &Line) {
        let Line { kind, head, text } = line;
        let text = match (self.is_coloured, kind) {
            (true, Kind::Act | Kind::Verdict | Kind::Missed | Kind::Load) => {
                format!("{}{head}{text}\x1b[0m", kind.escape())
            }
            (true, Kind::Seen | Kind::Decided | Kind::Done) => format!("{}{head}\x1b[0m{text}", kind.escape()),
            _ => format!("{head}{text}"),
        };
        match &mut self.live {
            Some(live) => live.print_above(&text),
            // A closed pipe must not end a load.
            None => drop(writeln!(std::io::stdout(), "{text}")),
        }
    }
}

/// Wraps a text at `width` characters. Leading spaces are kept.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let indent = text.len() - text.trim_start().len();
    let mut lines = vec![text[..indent].to_owned()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().map(|last| (last.chars().count(), last));
        match last {
            Some((length, last)) if length + 1 + word.chars().count() <= width || length <= indent => {
                if length > indent {
                    last.push(' ');
                }
                last.push_str(word);
            }
            _ => lines.push(format!("{}{word}", &text[..indent])),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_between_words() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("  one two", 5), ["  one", "  two"]);
        assert_eq!(wrapped("unbreakable", 3), ["unbreakable"]);
        assert_eq!(wrapped("", 3), [""]);
    }
}
