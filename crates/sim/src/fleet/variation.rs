//! Random variations of the load of the whole fleet: noise, drift, unusual days, and anomalies.
//!
//! Drawn from streams of their own, and anomalies before the run, so they are the same for all policies.

use std::ops::Range;

use super::draw::{Draws, Stream};
use super::load::strength;
use super::scenario::{Event, Noise, Scenario};

/// A week, in seconds.
const WEEK: f64 = 604_800.0;

/// Variations of one run.
#[derive(Clone, Debug)]
pub(super) struct Variation {
    noise: Noise,
    /// Length of a day, in seconds.
    day: f64,
    /// Relative deviation of this period, of the drift, and of this day.
    period: f64,
    drift: f64,
    of_day: f64,
    next_day: f64,
    /// Anomalies with a factor.
    events: Vec<Event>,
    /// Times without measures for the autoscaler.
    silences: Vec<Range<f64>>,
}

impl Variation {
    /// Draws the anomalies of a run: each one once per week.
    pub(super) fn new(scenario: &Scenario, seed: u64) -> Self {
        let mut draws = Draws::new(seed, Stream::Anomalies);
        let (mut events, mut silences) = (Vec::new(), Vec::new());
        for week in 0..(scenario.duration / WEEK).ceil() as u32 {
            for anomaly in &scenario.anomalies {
                let at = f64::from(week) * WEEK + draws.unit() * (WEEK - anomaly.lasts - anomaly.ramp);
                let until = at + anomaly.lasts;
                if anomaly.silent {
                    silences.push(at..until);
                }
                events.push(Event {
                    at,
                    until: Some(until),
                    ramp: anomaly.ramp,
                    factor: anomaly.factor,
                    share: 0.0,
                    keys: 0,
                    writes: None,
                    node: None,
                });
            }
        }
        Self {
            noise: scenario.noise,
            day: scenario.load.day,
            period: 0.0,
            drift: 0.0,
            of_day: 0.0,
            next_day: 0.0,
            events,
            silences,
        }
    }

    /// Draws the deviations of the period that begins at `at`.
    pub(super) fn next_period(&mut self, at: f64, draws: &mut Draws) {
        let Noise { total, drift, drift_time, days, period, .. } = self.noise;
        if total > 0.0 {
            self.period = total * draws.normal();
        }
        if drift > 0.0 {
            // An Ornstein-Uhlenbeck process, whose standard deviation is `drift`.
            let part = (period / drift_time).min(1.0);
            self.drift += -self.drift * part + drift * (part * (2.0 - part)).sqrt() * draws.normal();
        }
        if days > 0.0 && at >= self.next_day - 1e-6 {
            self.next_day += self.day;
            self.of_day = days * draws.normal();
        }
    }

    /// Load at this time relative to the load without variations.
    pub(super) fn factor(&self, at: f64) -> f64 {
        let of_events: f64 = self.events.iter().map(|event| 1.0 + (event.factor - 1.0) * strength(event, at)).product();
        ((1.0 + self.period) * (1.0 + self.drift) * (1.0 + self.of_day)).max(0.0) * of_events
    }

    /// Whether the autoscaler gets no measures at this time.
    pub(super) fn is_silent(&self, at: f64) -> bool {
        self.silences.iter().any(|silence| silence.contains(&at))
    }
}

#[cfg(test)]
mod tests {
    use super::super::scenario::Anomaly;
    use super::*;

    fn scenario() -> Scenario {
        let anomaly = |factor, silent| Anomaly { lasts: 7200.0, ramp: 600.0, factor, silent };
        Scenario {
            duration: 3.0 * WEEK,
            anomalies: vec![anomaly(2.0, false), anomaly(1.0, true)],
            ..Scenario::built_in("weekly").expect("a scenario")
        }
    }

    #[test]
    fn each_anomaly_comes_once_per_week() {
        let variation = Variation::new(&scenario(), 1);
        for week in 0..3 {
            let minutes = (0..10_080).map(|minute| f64::from(week) * WEEK + f64::from(minute) * 60.0);
            let (doubled, silent) = minutes.fold((0, 0), |(doubled, silent), at| {
                (doubled + u32::from(variation.factor(at) > 1.99), silent + u32::from(variation.is_silent(at)))
            });
            assert!((109..=111).contains(&doubled) && (119..=121).contains(&silent), "{doubled} and {silent} minutes");
        }
        let other = Variation::new(&scenario(), 2);
        assert!(variation.silences == Variation::new(&scenario(), 1).silences && variation.silences != other.silences);
    }

    #[test]
    fn a_drift_has_its_deviation_and_fades_in_its_time() {
        let mut scenario = scenario();
        scenario.anomalies.clear();
        scenario.noise = Noise { drift: 0.1, drift_time: 3600.0, period: 60.0, ..Noise::default() };
        let (mut variation, mut draws) = (Variation::new(&scenario, 1), Draws::new(1, Stream::Noise));
        let drift = |minute: u32| {
            variation.next_period(f64::from(minute) * 60.0, &mut draws);
            variation.factor(f64::from(minute) * 60.0) - 1.0
        };
        let drifts: Vec<f64> = (0..100_000).map(drift).collect();
        let products = |lag: usize| drifts.iter().zip(&drifts[lag..]).map(|(one, other)| one * other).sum::<f64>();
        assert!((products(0) / 1e5).sqrt() / 0.1 - 1.0 < 0.1);
        let after_an_hour = products(60) / products(0);
        assert!((0.25..0.5).contains(&after_an_hour), "{after_an_hour} of the deviation remains");
    }
}
