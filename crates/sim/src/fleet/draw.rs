//! Random numbers of the fleet. Independent streams, so that two policies get the same load, whatever they decide.

use crate::Random;

/// Purpose of a stream.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stream {
    /// Assignment of the aggregated keys to slots.
    Tail = 1,
    /// Variations of the load.
    Noise = 2,
    /// Changes of the hottest keys.
    Churn = 3,
    /// Samples of commands.
    Samples = 4,
    /// Times of anomalies.
    Anomalies = 5,
    /// Observations that the autoscaler lacks.
    Losses = 6,
}

/// A stream of random numbers. Apart from one `exp`, only operations that are exact on every processor.
#[derive(Clone, Debug)]
pub(super) struct Draws(Random);

/// Mean from which on a Poisson distribution is drawn as a normal one.
const MANY: f64 = 16.0;

impl Draws {
    pub(super) fn new(seed: u64, stream: Stream) -> Self {
        Self(Random::new(seed.wrapping_mul(16).wrapping_add(stream as u64)))
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound as u64) as usize
    }

    /// Returns a number from 0 to 1, without 1.
    pub(super) fn unit(&mut self) -> f64 {
        (self.0.number() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns an approximately normal number with mean 0 and variance 1: the sum of four uniform ones, which is between
    /// -3.5 and 3.5.
    pub(super) fn normal(&mut self) -> f64 {
        let number = self.0.number();
        let sum: u64 = [0, 16, 32, 48].into_iter().map(|shift| number >> shift & 0xffff).sum();
        ((sum as f64 + 2.0) / 65_536.0 - 2.0) * 3.0_f64.sqrt()
    }

    /// Returns the number of events of a Poisson process with this mean.
    pub(super) fn poisson(&mut self, mean: f64) -> u64 {
        if mean <= 0.0 {
            return 0;
        }
        if mean >= MANY {
            return (mean + self.normal() * mean.sqrt()).round().max(0.0) as u64;
        }
        let (limit, mut product, mut count) = ((-mean).exp(), self.unit(), 0);
        while product > limit {
            product *= self.unit();
            count += 1;
        }
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distributions_have_their_mean_and_variance() {
        let mut draws = Draws::new(3, Stream::Samples);
        let mut check = |draw: &mut dyn FnMut(&mut Draws) -> f64, mean: f64, variance: f64| {
            let values: Vec<f64> = (0..40_000).map(|_| draw(&mut draws)).collect();
            let found = values.iter().sum::<f64>() / 40_000.0;
            let spread = values.iter().map(|value| (value - found).powi(2)).sum::<f64>() / 40_000.0;
            assert!((found - mean).abs() < 5.0 * (variance / 40_000.0).sqrt(), "{found} for {mean}");
            assert!((spread / variance - 1.0).abs() < 0.05, "{spread} for {variance}");
        };
        check(&mut Draws::normal, 0.0, 1.0);
        for mean in [0.2, 3.0, 15.9, 16.1, 400.0] {
            check(&mut |draws| draws.poisson(mean) as f64, mean, mean);
        }
        assert_eq!(draws.poisson(0.0), 0);
    }
}
