//! Seeded random numbers (SplitMix64): a failing run is repeated with its seed.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

#[derive(Clone, Debug)]
pub(crate) struct Random(SplitMix64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(SplitMix64::seed_from_u64(seed))
    }

    /// Seeds of a randomized test: the fixed ones and a new one, or only `SWITCHYARD_E2E_SEED` if set.
    pub(crate) fn seeds(fixed: &[u64]) -> Vec<u64> {
        if let Ok(seed) = std::env::var("SWITCHYARD_E2E_SEED") {
            return vec![seed.parse().expect("SWITCHYARD_E2E_SEED must be a number")];
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock after 1970");
        fixed.iter().copied().chain([now.as_nanos() as u64]).collect()
    }

    /// Returns 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Returns a number from `low` up to, but not including, `high`.
    pub(crate) fn range(&mut self, low: i64, high: i64) -> i64 {
        low + (self.bits() % (high - low) as u64) as i64
    }

    /// Returns true with probability 1/n.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// Returns a random element.
    pub(crate) fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }

    /// Returns random bytes.
    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.bits().to_le_bytes());
        }
        out.truncate(len);
        out
    }
}
