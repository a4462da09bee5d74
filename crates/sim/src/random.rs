//! The only random source of a run. A seed yields the same numbers on every machine (SplitMix64).

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

/// A seeded random number generator.
#[derive(Clone, Debug)]
pub struct Random(SplitMix64);

impl Random {
    /// Creates a generator. Adjacent seeds yield unrelated numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut random = Self(SplitMix64::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed));
        random.number();
        random
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.number() % bound.max(1)
    }

    /// Returns a number from `low` to `high`, both included.
    pub fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns true with a probability of `per_mille` / 1000.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1000) < per_mille
    }

    /// Delay of a network or kernel operation, in microseconds: mostly short, sometimes long.
    pub fn delay_us(&mut self) -> u64 {
        match self.below(100) {
            0 => self.between(1_000, 8_000),
            1..=9 => self.between(200, 1_500),
            _ => self.between(20, 150),
        }
    }
}
