//! Forecast of the load with a daily and a weekly season.
//!
//! Load is the product of a level, a daily and a weekly season, and a deviation that fades: the logarithm is decomposed
//! by MSTL (Bandara, Hyndman and Bergmeir 2021). The present deviation from the pattern is carried into the future by a
//! factor per lead time, as the second term of P-Store's forecast (SPAR) does. The factors, and the margins that cover
//! most errors, are measured on the last week, by a pattern of the weeks before it: errors of data that a pattern was
//! fitted to would be too small.
//!
//! MSTL by the crate `stlrs`: `augurs`, which wraps it, converts loads to 32 bits and adds tracing to a pure crate. Not
//! ETS or ARIMA, because they have one season.

use std::ops::Range;

use stlrs::Mstl;

use super::history::{DAY, History, WEEK};

/// Resolution of the pattern, in minutes: a weekly season of single minutes would be mostly noise.
const BUCKET: u64 = 5;

/// Buckets of a day and a week.
const DAILY: usize = (DAY / BUCKET) as usize;
const WEEKLY: usize = (WEEK / BUCKET) as usize;

/// Lead times with a measured factor and margin, in minutes. Others are interpolated.
const LEADS: [u64; 6] = [5, 15, 30, 60, 120, 240];

/// Fraction of the loads of single minutes that a margin covers.
pub(super) const COVERED: f64 = 0.95;

/// Minutes whose mean is the present deviation from the pattern, and the minimum of known ones.
const RECENT: u64 = 10;
const RECENT_MIN: usize = 3;

/// Interval of the measurements of errors, in buckets.
const MEASURED_EVERY: usize = 3;

/// Minimum of measured errors per lead time.
const ERRORS_MIN: usize = 100;

/// Maximum distance of the logarithm from the other weeks: a third. Beyond it is an anomaly.
const UNUSUAL: f64 = 0.3;

/// Buckets before and after the same time in another week that are compared.
const ALIKE: usize = 2;

/// Lowest load in the logarithm, as a fraction of the mean: an idle minute is not infinitely far from a busy one.
const FLOOR: f64 = 0.001;

/// Shortest history in minutes: two weekly seasons, and a day to measure errors.
pub(super) const FORECAST_MIN: u64 = 2 * WEEK + DAY;

/// Seasons of the logarithm of the load.
#[derive(Clone, Debug)]
struct Pattern {
    level: f64,
    /// By bucket of the day and of the week, both counted since 1970.
    daily: Vec<f64>,
    weekly: Vec<f64>,
}

impl Pattern {
    /// Decomposes logarithms of loads. `first`: number of the first bucket.
    fn fit(first: u64, series: &[f64]) -> Option<Self> {
        let parts = Mstl::fit(series, &[DAILY, WEEKLY]).ok()?;
        let last_cycle = |season: &[f64], period: usize| {
            let mut cycle = vec![0.0; period];
            let last = (0_u64..).zip(season).skip(season.len() - period);
            last.for_each(|(at, value)| cycle[(first + at) as usize % period] = *value);
            cycle
        };
        let [daily, weekly] = parts.seasonal() else { return None };
        let pattern =
            Self { level: *parts.trend().last()?, daily: last_cycle(daily, DAILY), weekly: last_cycle(weekly, WEEKLY) };
        let is_finite = pattern.daily.iter().chain(&pattern.weekly).all(|value| value.is_finite());
        (is_finite && pattern.level.is_finite()).then_some(pattern)
    }

    /// Expected logarithm of the load in a minute, interpolated between the middles of buckets.
    fn at(&self, minute: u64) -> f64 {
        let bucket = |number: u64| self.daily[number as usize % DAILY] + self.weekly[number as usize % WEEKLY];
        let place = (minute as f64 + 0.5) / BUCKET as f64 - 0.5;
        let (before, part) = (place.max(0.0).floor(), place.max(0.0).fract());
        self.level + (1.0 - part) * bucket(before as u64) + part * bucket(before as u64 + 1)
    }
}

/// A trained forecast.
#[derive(Clone, Debug)]
pub(super) struct Forecast {
    pattern: Pattern,
    /// Lowest load that the logarithm takes.
    floor: f64,
    /// Fraction of the present deviation that remains after each lead time.
    carried: [f64; LEADS.len()],
    /// Margin above the expected logarithm, by lead time.
    margin: [f64; LEADS.len()],
}

impl Forecast {
    /// Trains a forecast. `None` if the history is too short.
    pub(super) fn fit(history: &History) -> Option<Self> {
        let range = history.range();
        let first = range.start.div_ceil(BUCKET);
        let count = (range.end / BUCKET).checked_sub(first)? as usize;
        let held_out = count.checked_sub(2 * WEEKLY)?.min(WEEKLY);
        let mean = history.mean(range).filter(|mean| *mean > 0.0)?;
        let floor = mean * FLOOR;
        let series = without_anomalies(&series(history, first, count, floor));
        let trial = Self {
            pattern: Pattern::fit(first, &series[..count - held_out])?,
            floor,
            carried: [0.0; LEADS.len()],
            margin: [0.0; LEADS.len()],
        };
        let (mut carried, mut margin) = (trial.carried, trial.margin);
        for (at, lead) in LEADS.into_iter().enumerate() {
            (carried[at], margin[at]) =
                trial.measure(history, first + (count - held_out) as u64..first + count as u64, lead)?;
        }
        Some(Self { pattern: Pattern::fit(first, &series)?, carried, margin, ..trial })
    }

    /// Measures the fraction of a deviation that remains after a lead time, and the margin that covers most errors, in
    /// these buckets.
    fn measure(&self, history: &History, buckets: Range<u64>, lead: u64) -> Option<(f64, f64)> {
        let mut errors: Vec<(f64, f64)> = Vec::new();
        for now in buckets.step_by(MEASURED_EVERY).map(|bucket| bucket * BUCKET) {
            let Some(deviation) = self.deviation(history, now) else { continue };
            let later = (now + lead..now + lead + BUCKET).filter_map(|minute| {
                Some((deviation, self.logarithm(history.requests(minute)?) - self.pattern.at(minute)))
            });
            errors.extend(later);
        }
        if errors.len() < ERRORS_MIN {
            return None;
        }
        // Bounded, so that an anomaly has the weight of a large deviation.
        let bounded = |error: f64| error.clamp(-1.0, 1.0);
        let (products, squares) = errors.iter().fold((0.0, 1e-9), |(products, squares), (before, after)| {
            (products + bounded(*before) * bounded(*after), squares + bounded(*before).powi(2))
        });
        let carried = (products / squares).clamp(0.0, 1.0);
        let rest = errors.into_iter().map(|(before, after)| after - carried * before);
        Some((carried, quantile(rest.collect(), COVERED).max(0.0)))
    }

    fn logarithm(&self, load: f64) -> f64 {
        load.max(self.floor).ln()
    }

    /// Mean deviation of the logarithm from the pattern in the minutes before `now`. `None`: unknown.
    pub(super) fn deviation(&self, history: &History, now: u64) -> Option<f64> {
        let known = |minute: u64| Some(self.logarithm(history.requests(minute)?) - self.pattern.at(minute));
        let recent: Vec<f64> = (now.saturating_sub(RECENT)..now).filter_map(known).collect();
        (recent.len() >= RECENT_MIN).then(|| recent.iter().sum::<f64>() / recent.len() as f64)
    }

    /// Expected requests per second `lead` minutes after `now`, without margin.
    fn expected(&self, now: u64, deviation: f64, lead: u64) -> f64 {
        (self.pattern.at(now + lead) + interpolated(&self.carried, lead) * deviation).exp()
    }

    /// Requests per second that will rarely be exceeded `lead` minutes after `now`. `change`: time until a decision has
    /// an effect, in minutes. The margin is that of the next change, because later errors are met by later changes.
    pub(super) fn upper(&self, now: u64, deviation: f64, lead: u64, change: u64) -> f64 {
        self.expected(now, deviation, lead) * interpolated(&self.margin, lead.min(change)).exp()
    }
}

/// Value at a lead time, between the measured ones.
fn interpolated(values: &[f64; LEADS.len()], lead: u64) -> f64 {
    let after = LEADS.iter().position(|known| *known >= lead).unwrap_or(LEADS.len() - 1);
    let before = after.saturating_sub(1);
    let (from, to) = (LEADS[before] as f64, LEADS[after] as f64);
    let part = if to > from { ((lead as f64 - from) / (to - from)).clamp(0.0, 1.0) } else { 1.0 };
    values[before] + part * (values[after] - values[before])
}

/// The value that this fraction of the values does not exceed. 0 without values.
pub(super) fn quantile(mut values: Vec<f64>, fraction: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let place = ((values.len() - 1) as f64 * fraction).round() as usize;
    *values.select_nth_unstable_by(place, f64::total_cmp).1
}

/// Logarithms of the loads of buckets. A missing bucket has the load of a week or a day earlier, or of its neighbour.
fn series(history: &History, first: u64, count: usize, floor: f64) -> Vec<f64> {
    let load = |bucket: u64| history.mean(bucket * BUCKET..(bucket + 1) * BUCKET).map(|load| load.max(floor).ln());
    let known: Vec<Option<f64>> = (first..first + count as u64).map(load).collect();
    let any = known.iter().flatten().next().copied().unwrap_or(0.0);
    let mut filled: Vec<f64> = Vec::with_capacity(count);
    for at in 0..count {
        let earlier = |buckets: usize| at.checked_sub(buckets).map(|at| filled[at]);
        let later = || known.get(at + WEEKLY).copied().flatten();
        let value = known[at].or_else(|| earlier(WEEKLY)).or_else(later).or_else(|| earlier(DAILY));
        let value = value.or_else(|| earlier(1)).unwrap_or(any);
        filled.push(value);
    }
    filled
}

/// Bounds values that are far from the same time in other weeks, so that an anomaly does not become part of a season.
/// The weights of MSTL for outliers do not exclude them, because a weekly season has few values per bucket. Levels of
/// weeks are compared first, because a lasting change is no anomaly.
fn without_anomalies(series: &[f64]) -> Vec<f64> {
    // Median of the week around each day.
    let days = series.len().div_ceil(DAILY);
    let around = |day: usize| &series[day.saturating_sub(3) * DAILY..((day + 4) * DAILY).min(series.len())];
    let levels: Vec<f64> = (0..days).map(|day| quantile(around(day).to_vec(), 0.5)).collect();
    let relative = |at: usize| series[at] - levels[at / DAILY];
    let usual = |at: usize| {
        let same_time = (at % WEEKLY..series.len()).step_by(WEEKLY).filter(|other| *other != at);
        let alike = same_time.flat_map(|other| other.saturating_sub(ALIKE)..(other + ALIKE + 1).min(series.len()));
        quantile(alike.map(relative).collect(), 0.5)
    };
    let bounded = |at: usize| {
        let usual = usual(at);
        levels[at / DAILY] + relative(at).clamp(usual - UNUSUAL, usual + UNUSUAL)
    };
    (0..series.len()).map(bounded).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::history::tests::{START, history};
    use super::*;

    /// Load with a daily and a weekly season, a slow growth and some noise. Its mean is about 16,000 per second.
    pub(crate) fn seasonal(minute: u64) -> f64 {
        let hour = (minute % DAY) as f64 / 60.0;
        let bump = (1.0 + (std::f64::consts::TAU * (hour - 20.0) / 24.0).cos()) / 2.0;
        let weekend = if (minute - START) / DAY % 7 >= 5 { 0.7 } else { 1.0 };
        let growth = 1.0 + (minute - START) as f64 / (100.0 * WEEK as f64);
        16_000.0 * (0.35 + 2.15 * bump.powi(3)) * weekend * growth * (1.0 + noise(minute))
    }

    /// Uniform noise within 5 percent, the same in each run.
    fn noise(minute: u64) -> f64 {
        let mixed = (minute ^ 0x9e37_79b9).wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40;
        (mixed as f64 / f64::from(1 << 24) - 0.5) / 10.0
    }

    /// Root of the mean squared error of a prediction of the logarithm over the week after the history.
    fn error(predicted: impl Fn(u64) -> f64, lead: u64, weeks: u64) -> f64 {
        let from = START + weeks * WEEK;
        let errors = (from..from + WEEK).step_by(37).map(|now| (predicted(now) / seasonal(now + lead)).ln().powi(2));
        (errors.clone().sum::<f64>() / errors.count() as f64).sqrt()
    }

    #[test]
    fn a_forecast_of_a_seasonal_load_beats_the_last_value() {
        let weeks = 5;
        let known = history((START..START + weeks * WEEK).map(seasonal));
        let forecast = Forecast::fit(&known).expect("five weeks");
        let future = history((START..START + (weeks + 1) * WEEK).map(seasonal));
        for (lead, most) in [(15, 0.6), (60, 0.3), (240, 0.2)] {
            let ours = error(
                |now| forecast.expected(now, forecast.deviation(&future, now).expect("known"), lead),
                lead,
                weeks,
            );
            let last = error(|now| future.requests(now - 1).expect("known"), lead, weeks);
            assert!(ours < last * most && ours < 0.08, "{lead} minutes ahead: error {ours}, last value {last}");
        }
        // The margin covers most minutes, without being useless.
        let covered = |now: u64| {
            let deviation = forecast.deviation(&future, now).expect("known");
            forecast.upper(now, deviation, 15, 15) >= seasonal(now + 15)
        };
        let from = START + weeks * WEEK;
        let share = (from..from + WEEK).filter(|now| covered(*now)).count() as f64 / WEEK as f64;
        assert!(share > 0.85 && share < 0.999, "{share} of the minutes are covered");
    }

    #[test]
    fn gaps_and_anomalies_do_not_become_seasons() {
        let weeks = 4;
        let spoiled = |minute: u64| {
            let (day, hour) = ((minute - START) / DAY, minute % DAY / 60);
            match (day, hour) {
                // A flash crowd, an outage, and a day without telemetry.
                (17, 9) => 4.0 * seasonal(minute),
                (20, 20) => 0.05 * seasonal(minute),
                (11, _) => f64::NAN,
                _ => seasonal(minute),
            }
        };
        let clean = Forecast::fit(&history((START..START + weeks * WEEK).map(seasonal))).expect("four weeks");
        let other = Forecast::fit(&history((START..START + weeks * WEEK).map(spoiled))).expect("four weeks");
        let from = START + weeks * WEEK;
        let worst = (from..from + WEEK).map(|minute| (clean.pattern.at(minute) - other.pattern.at(minute)).abs());
        let worst = worst.fold(0.0, f64::max);
        assert!(worst < 0.15, "the pattern differs by {worst}");
    }

    #[test]
    fn a_short_history_gives_no_forecast() {
        let fit = |minutes: u64| Forecast::fit(&history((START..START + minutes).map(seasonal)));
        assert!(fit(FORECAST_MIN - DAY).is_none() && fit(0).is_none());
        assert!(fit(FORECAST_MIN).is_some());
        assert!(Forecast::fit(&history((0..FORECAST_MIN).map(|_| 0.0))).is_none(), "without load there is no pattern");
    }
}
