//! Display of a running load: a bar on a terminal, otherwise a line per second.

use std::io::Write as _;
use std::time::Duration;

use switchyard_bench::load::Tally;
use switchyard_bench::numbers::{millis, thousands};

use super::live_lines::{LiveLines, bar};

/// Redraw interval on a terminal: often enough to look alive, but each snapshot slows the load a little.
const REDRAW: Duration = Duration::from_millis(250);
/// Interval of lines without a terminal.
const LINE: Duration = Duration::from_secs(1);

pub(super) struct Live {
    duration: Duration,
    lines: Option<LiveLines>,
}

impl Live {
    /// Starts the display of a load with this duration.
    pub(super) fn start(duration: Duration) -> Self {
        Self { duration, lines: LiveLines::on_terminal() }
    }

    /// Interval between calls of [`Self::update`].
    pub(super) fn period(&self) -> Duration {
        if self.lines.is_some() { REDRAW } else { LINE }
    }

    /// Shows the counts of the last `period`, `elapsed` after the start.
    pub(super) fn update(&mut self, elapsed: Duration, period: Duration, interval: &Tally, total: &Tally) {
        let elapsed = elapsed.min(self.duration);
        let numbers = format!(
            "{} requests/s  p50 {}  p99 {}  errors {}  wrong {}",
            thousands((interval.replies as f64 / period.as_secs_f64()) as u64),
            millis(interval.quantile(0.5)),
            millis(interval.quantile(0.99)),
            thousands(total.errors + total.unanswered),
            thousands(total.wrong),
        );
        match &mut self.lines {
            Some(lines) => {
                let fraction = elapsed.as_secs_f64() / self.duration.as_secs_f64();
                let seconds = elapsed.as_secs();
                lines.show(vec![
                    format!(
                        "load       {}:{:02} {} {:.0}%",
                        seconds / 60,
                        seconds % 60,
                        bar(fraction),
                        fraction * 100.0
                    ),
                    format!("           {numbers}"),
                ]);
            }
            None => {
                // A closed pipe must not end the load.
                let _ = writeln!(
                    std::io::stdout(),
                    "{:>3.0}/{:.0} s  {numbers}",
                    elapsed.as_secs_f64(),
                    self.duration.as_secs_f64()
                );
            }
        }
    }

    /// Removes the bar, before the result is printed.
    pub(super) fn finish(self) {
        if let Some(mut lines) = self.lines {
            lines.clear();
        }
    }
}
