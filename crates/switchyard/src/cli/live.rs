//! Display of a running load: bars on a terminal, otherwise a line per second.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use switchyard_bench::load::Tally;
use switchyard_bench::numbers::{millis, thousands};

/// Redraw interval on a terminal: often enough to look alive, but each snapshot slows the load a little.
const REDRAW: Duration = Duration::from_millis(250);
/// Interval of lines without a terminal.
const LINE: Duration = Duration::from_secs(1);

pub(super) struct Live {
    duration: Duration,
    bars: Option<Bars>,
}

struct Bars {
    all: MultiProgress,
    time: ProgressBar,
    numbers: ProgressBar,
}

impl Live {
    /// Starts the display of a load with this duration.
    pub(super) fn start(duration: Duration) -> Self {
        let bars = std::io::stdout().is_terminal().then(|| Bars::new(duration));
        Self { duration, bars }
    }

    /// Interval between calls of [`Self::update`].
    pub(super) fn period(&self) -> Duration {
        if self.bars.is_some() { REDRAW } else { LINE }
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
        match &self.bars {
            Some(bars) => {
                bars.time.set_position(elapsed.as_millis() as u64);
                bars.numbers.set_message(numbers);
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

    /// Removes the bars, before the result is printed.
    pub(super) fn finish(self) {
        if let Some(bars) = self.bars {
            bars.time.finish_and_clear();
            bars.numbers.finish_and_clear();
            let _ = bars.all.clear(); // fails only if the terminal is gone
        }
    }
}

impl Bars {
    fn new(duration: Duration) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stdout());
        let style = |template: &str| {
            ProgressStyle::with_template(template)
                .unwrap_or_else(|_| ProgressStyle::default_bar())
                .progress_chars("=> ")
        };
        let time = all.add(ProgressBar::new(duration.as_millis() as u64));
        time.set_style(style("load       {elapsed_precise} [{bar:40}] {percent}%"));
        let numbers = all.add(ProgressBar::new_spinner());
        numbers.set_style(style("           {msg}"));
        Self { all, time, numbers }
    }
}
