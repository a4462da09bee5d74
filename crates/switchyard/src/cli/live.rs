//! A running load as a person sees it: bars where there is a terminal, a line a second where there is none.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use switchyard_bench::load::Tally;
use switchyard_bench::numbers::{millis, thousands};

/// How often a terminal is redrawn: often enough to look alive, and each look costs the load something.
const REDRAW: Duration = Duration::from_millis(250);
/// How often a line is written where there is no terminal.
const LINE: Duration = Duration::from_secs(1);

/// Shows a load while it runs.
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
    /// Begins to show a load that shall take `duration`.
    pub(super) fn start(duration: Duration) -> Self {
        let bars = std::io::stdout().is_terminal().then(|| Bars::new(duration));
        Self { duration, bars }
    }

    /// How often [`Self::update`] wants to be called.
    pub(super) fn period(&self) -> Duration {
        if self.bars.is_some() { REDRAW } else { LINE }
    }

    /// Shows what happened in the last `period`, `elapsed` after the start.
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
                // A pipe that nobody reads any more is no reason to end a load.
                let _ = writeln!(
                    std::io::stdout(),
                    "{:>3.0}/{:.0} s  {numbers}",
                    elapsed.as_secs_f64(),
                    self.duration.as_secs_f64()
                );
            }
        }
    }

    /// Takes the bars away: what is printed next says how it went.
    pub(super) fn finish(self) {
        if let Some(bars) = self.bars {
            bars.time.finish_and_clear();
            bars.numbers.finish_and_clear();
            let _ = bars.all.clear(); // the terminal may be gone; there is nothing to take away then
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
