//! Random numbers and key popularity: seeded for repeatable runs, and Zipfian exactly as in YCSB, so that a skew of
//! 0.99 has the same meaning as in papers.
//!
//! The available Zipf distributions use other sampling methods, with other results for a given seed and constant.

use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{Rng as _, SeedableRng as _};

/// SplitMix64: one addition and three mixes per number, passes BigCrush, every seed is suitable.
#[derive(Debug, Clone)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Creates a generator from a seed.
    pub fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    /// Returns the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `n` (0 if `n` is 0). The remainder bias of 64 bits is negligible for any `n` used here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    /// Returns a number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// SplitMix64's finalizer: spreads a number over 64 bits.
pub fn mix(n: u64) -> u64 {
    // The generator adds this number before it mixes.
    SplitMix64::seed_from_u64(n.wrapping_sub(0x9E37_79B9_7F4A_7C15)).next_u64()
}

/// YCSB's `ZIPFIAN_CONSTANT`.
pub const YCSB_THETA: f64 = 0.99;
/// YCSB's `ScrambledZipfianGenerator.ITEM_COUNT`: ranks are drawn from this many items, then hashed to the actual ones.
const SCRAMBLED_ITEMS: u64 = 10_000_000_000;
/// YCSB's `ScrambledZipfianGenerator.ZETAN`: zeta(10^10, 0.99), which would take minutes to compute.
const SCRAMBLED_ZETA: f64 = 26.469_028_201_783_02;

/// YCSB's `ZipfianGenerator` (after Gray et al., "Quickly generating billion-record synthetic databases"): item 0 is
/// the hottest.
#[derive(Debug, Clone, Copy)]
pub struct Zipfian {
    items: u64,
    theta: f64,
    zeta_n: f64,
    alpha: f64,
    eta: f64,
}

impl Zipfian {
    /// Creates a distribution over `items` items (at least 1). Sums `items` terms once: milliseconds per million.
    pub fn new(items: u64, theta: f64) -> Self {
        let items = items.max(1);
        Self::with_zeta(items, theta, zeta(items, theta))
    }

    fn with_zeta(items: u64, theta: f64, zeta_n: f64) -> Self {
        let eta = (1.0 - (2.0 / items as f64).powf(1.0 - theta)) / (1.0 - zeta(2, theta) / zeta_n);
        Self { items, theta, zeta_n, alpha: 1.0 / (1.0 - theta), eta }
    }

    /// Returns the rank of the next item; 0 is the hottest.
    pub fn next(&self, rng: &mut Rng) -> u64 {
        let u = rng.unit();
        let uz = u * self.zeta_n;
        if uz < 1.0 {
            return 0;
        }
        if uz < 1.0 + 0.5_f64.powf(self.theta) {
            return 1.min(self.items - 1);
        }
        let rank = (self.items as f64 * (self.eta * u - self.eta + 1.0).powf(self.alpha)) as u64;
        rank.min(self.items - 1) // u close to 1 may round up to `items`
    }
}

fn zeta(n: u64, theta: f64) -> f64 {
    (1..=n).map(|i| (i as f64).powf(-theta)).sum()
}

/// YCSB's `Utils.fnvhash64`.
fn fnv_hash64(value: u64) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325_u64;
    for octet in value.to_le_bytes() {
        hash ^= u64::from(octet);
        hash = hash.wrapping_mul(1_099_511_628_211);
    }
    (hash as i64).unsigned_abs() // Java's Math.abs
}

/// Popularity of keys.
#[derive(Debug, Clone, Copy)]
pub enum Popularity {
    /// All keys are equally popular.
    Uniform {
        /// Number of keys.
        keys: u64,
    },
    /// Key 0 is the hottest, key 1 the next.
    Zipfian(Zipfian),
    /// Hot keys are scattered over the key space, as in YCSB's workloads A-D.
    Scrambled {
        /// Number of keys.
        keys: u64,
        /// Ranks before hashing.
        ranks: Zipfian,
    },
}

impl Popularity {
    /// Equally popular keys.
    pub fn uniform(keys: u64) -> Self {
        Self::Uniform { keys: keys.max(1) }
    }

    /// Zipfian with exponent `theta` (0 < theta < 1); key 0 is the hottest.
    pub fn zipfian(keys: u64, theta: f64) -> Self {
        Self::Zipfian(Zipfian::new(keys, theta))
    }

    /// Zipfian with YCSB's constant and scattered hot keys.
    pub fn scrambled(keys: u64) -> Self {
        Self::Scrambled { keys: keys.max(1), ranks: Zipfian::with_zeta(SCRAMBLED_ITEMS, YCSB_THETA, SCRAMBLED_ZETA) }
    }

    /// Returns the key of the next request.
    pub fn next(&self, rng: &mut Rng) -> u64 {
        match self {
            Self::Uniform { keys } => rng.below(*keys),
            Self::Zipfian(z) => z.next(rng),
            Self::Scrambled { keys, ranks } => fnv_hash64(ranks.next(rng)) % keys,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_numbers_fill_their_range() {
        let mut rng = Rng::new(7);
        let mut seen = [0_u32; 10];
        for _ in 0..100_000 {
            seen[rng.below(10) as usize] += 1;
        }
        // Binomial with standard deviation 95: six of them.
        assert!(seen.iter().all(|&n| n.abs_diff(10_000) < 570), "{seen:?}");
        assert_eq!(rng.below(0), 0);
        assert!((0..1000).map(|_| rng.unit()).all(|u| (0.0..1.0).contains(&u)));
    }

    #[test]
    fn equal_seeds_give_equal_numbers() {
        let draw = |seed| {
            let (mut rng, z) = (Rng::new(seed), Popularity::scrambled(1000));
            (0..100).map(|_| z.next(&mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
    }

    /// YCSB's `fnvhash64` with different arithmetic: octets by shifting, absolute value by comparison.
    #[test]
    fn fnv_matches_ycsb() {
        let naive = |mut value: u64| {
            let mut hash = 0xCBF2_9CE4_8422_2325_u64 as i64;
            for _ in 0..8 {
                hash = (hash ^ (value & 0xff) as i64).wrapping_mul(1_099_511_628_211);
                value >>= 8;
            }
            if hash < 0 { hash.wrapping_neg() as u64 } else { hash as u64 }
        };
        for value in [0, 1, 2, 255, 256, 9_999_999_999, u64::MAX] {
            assert_eq!(fnv_hash64(value), naive(value));
        }
    }

    /// The two hottest ranks are exact by construction; the others follow Gray's approximation closely.
    #[test]
    fn zipfian_has_the_shares_of_its_formula() {
        let (items, draws) = (1000_u64, 400_000);
        let z = Zipfian::new(items, YCSB_THETA);
        let mut rng = Rng::new(1);
        let mut seen = vec![0_u64; items as usize];
        for _ in 0..draws {
            seen[z.next(&mut rng) as usize] += 1;
        }
        let zeta_n = zeta(items, YCSB_THETA);
        for rank in [0, 1] {
            let share = seen[rank] as f64 / draws as f64;
            let expected = (rank as f64 + 1.0).powf(-YCSB_THETA) / zeta_n;
            assert!((share - expected).abs() < 0.004, "rank {rank}: {share} for {expected}");
        }
        let head = |n: usize| seen[..n].iter().sum::<u64>() as f64 / draws as f64;
        for n in [10, 100, 500] {
            let expected = zeta(n as u64, YCSB_THETA) / zeta_n;
            assert!((head(n) - expected).abs() < 0.02, "first {n}: {} for {expected}", head(n));
        }
        assert!(seen.iter().all(|&n| n > 0), "every item occurs");
    }

    #[test]
    fn scrambled_keeps_the_skew_and_scatters_it() {
        let (keys, draws) = (1000_u64, 200_000);
        let popularity = Popularity::scrambled(keys);
        let mut rng = Rng::new(1);
        let mut seen = vec![0_u64; keys as usize];
        for _ in 0..draws {
            seen[popularity.next(&mut rng) as usize] += 1;
        }
        let hottest = (0..keys as usize).max_by_key(|&k| seen[k]).expect("1000 keys");
        assert_eq!(hottest as u64, fnv_hash64(0) % keys);
        // Rank 0 has 1/zeta of all draws, and its key also gets a few of other colliding ranks.
        let share = seen[hottest] as f64 / draws as f64;
        assert!((1.0 / SCRAMBLED_ZETA - 0.003..1.0 / SCRAMBLED_ZETA + 0.01).contains(&share), "{share}");
    }

    #[test]
    fn tiny_key_spaces_stay_in_range() {
        let mut rng = Rng::new(5);
        for keys in [1, 2, 3] {
            for popularity in [Popularity::uniform(keys), Popularity::zipfian(keys, 0.99), Popularity::scrambled(keys)]
            {
                assert!((0..1000).all(|_| popularity.next(&mut rng) < keys));
            }
        }
    }
}
