//! Requests per second over time: mean, day, week, growth, events, and the sender.

use super::scenario::{Event, Load, Sender};

/// Loss per slice between which an adaptive sender keeps its rate.
const LOSS: (f64, f64) = (0.005, 0.01);

/// Increase of its rate after a slice with less loss.
const FASTER: f64 = 1.01;

/// Least factor of its rate after a slice with more loss.
const SLOWER: f64 = 0.5;

/// Clients of the fleet.
#[derive(Clone, Debug)]
pub(super) struct Clients<'s> {
    load: &'s Load,
    events: &'s [Event],
    /// Factor of an adaptive sender.
    factor: f64,
}

/// Days of the weekly profile.
const DAYS: f64 = 7.0;

/// Part of an event that is in effect at this time, 0 to 1.
pub(super) fn strength(event: &Event, at: f64) -> f64 {
    let ramp =
        |since: f64| if event.ramp > 0.0 { (since / event.ramp).clamp(0.0, 1.0) } else { f64::from(since >= 0.0) };
    let ended = event.until.map_or(0.0, |until| ramp(at - until));
    ramp(at - event.at) - ended
}

/// Value of a profile at this part of its period, between equidistant points.
fn profile(points: &[f64], part: f64) -> f64 {
    let at = part.fract() * points.len() as f64;
    let (before, between) = (at as usize % points.len(), at.fract());
    points[before] * (1.0 - between) + points[(before + 1) % points.len()] * between
}

impl<'s> Clients<'s> {
    pub(super) fn new(load: &'s Load, events: &'s [Event]) -> Self {
        Self { load, events, factor: 1.0 }
    }

    /// Requests per second at this time.
    pub(super) fn rate(&self, at: f64) -> f64 {
        let Load { rate, daily, day, weekly, growth, .. } = self.load;
        let daily = if daily.is_empty() { 1.0 } else { profile(daily, at / day) };
        let weekly = match weekly.is_empty() {
            true => 1.0,
            false => weekly[(at / day).rem_euclid(DAYS) as usize % weekly.len()],
        };
        let events: f64 = self.events.iter().map(|event| 1.0 + (event.factor - 1.0) * strength(event, at)).product();
        rate * daily * weekly * (1.0 + growth * at / 3600.0) * events * self.factor
    }

    /// Part of all requests that each event's keys get at this time.
    pub(super) fn shares(&self, at: f64) -> Vec<f64> {
        self.events.iter().map(|event| event.share * strength(event, at)).collect()
    }

    /// Reacts to the part of the last slice's requests that was lost.
    pub(super) fn react(&mut self, lost: f64) {
        match self.load.sender {
            Sender::Open => {}
            Sender::Adaptive if lost > LOSS.1 => {
                self.factor *= (1.0 - (lost - f64::midpoint(LOSS.0, LOSS.1))).max(SLOWER);
            }
            Sender::Adaptive if lost < LOSS.0 => self.factor *= FASTER,
            Sender::Adaptive => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load {
            rate: 1000.0,
            sender: Sender::Open,
            daily: vec![0.5, 1.5],
            day: 100.0,
            weekly: vec![1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0],
            growth: 0.0,
        }
    }

    #[test]
    fn days_weeks_and_events_multiply() {
        let event = Event {
            at: 10.0,
            until: Some(20.0),
            ramp: 2.0,
            factor: 3.0,
            share: 0.4,
            keys: 1,
            writes: None,
            node: None,
        };
        let (load, events) = (load(), [event]);
        let clients = Clients::new(&load, &events);
        let rates = [0.0, 25.0, 50.0, 75.0, 100.0, 525.0, 650.0].map(|at| clients.rate(at));
        assert_eq!(rates, [500.0, 1000.0, 1500.0, 1000.0, 500.0, 500.0, 0.0]);
        let shares = [9.0, 11.0, 12.0, 20.0, 21.0, 22.0].map(|at| clients.shares(at)[0]);
        assert_eq!(shares, [0.0, 0.2, 0.4, 0.4, 0.2, 0.0]);
        assert!((clients.rate(15.0) / clients.rate(115.0) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn an_adaptive_sender_finds_the_rate_of_the_bound() {
        let load = Load { sender: Sender::Adaptive, daily: Vec::new(), weekly: Vec::new(), ..load() };
        let mut clients = Clients::new(&load, &[]);
        let mut lost = |_: usize| {
            let rate = clients.rate(0.0);
            let lost = (1.0 - 7000.0 / rate).max(0.0);
            clients.react(lost);
            lost
        };
        let last: Vec<f64> = (0..400).map(&mut lost).skip(300).collect();
        assert!(last.iter().all(|lost| (0.004..0.011).contains(lost)), "{last:?}");
    }
}
