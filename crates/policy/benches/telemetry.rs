//! Cost of telemetry per command: `cargo bench -p switchyard-policy`. The minimum of several rounds, because other
//! programs can only add time.

use std::hint::black_box;
use std::time::Instant;

use switchyard_policy::telemetry::{AccessKind, Identity, KeyAccess, Recent, Segment};

const COMMANDS: usize = 1 << 18;
const ROUNDS: usize = 15;

fn mixed(number: u64) -> u64 {
    let mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 29).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// Hashes of keys by Zipf's law over `keys` keys; 0: all different.
fn hashes(keys: usize, skew: f64) -> Vec<u64> {
    let mut sum = 0.0;
    let sums: Vec<f64> = (1..=keys)
        .map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        })
        .collect();
    let draw = |number: u64| {
        let at = (mixed(number) >> 11) as f64 / (1_u64 << 53) as f64 * sum;
        if keys == 0 { mixed(number ^ 1 << 40) } else { mixed(sums.partition_point(|below| *below < at) as u64) }
    };
    (0..COMMANDS as u64).map(draw).collect()
}

/// Nanoseconds per command.
#[expect(clippy::disallowed_methods, reason = "what runs here is measured, and not replayed")]
fn least(hashes: &[u64], mut run: impl FnMut(u64)) -> f64 {
    let round = |_| {
        let start = Instant::now();
        hashes.iter().for_each(|hash| run(black_box(*hash)));
        start.elapsed().as_secs_f64() * 1e9 / hashes.len() as f64
    };
    (0..ROUNDS).map(round).fold(f64::MAX, f64::min)
}

fn main() {
    println!("{:<32}{:>12}{:>12}", "ns for each command", "segment", "recent");
    for (what, keys, skew) in [
        ("one key", 1, 1.0),
        ("Zipf 0.99, 10,000 keys", 10_000, 0.99),
        ("Zipf 0.99, 1,000,000 keys", 1_000_000, 0.99),
        ("all different", 0, 0.0),
    ] {
        let hashes = hashes(keys, skew);
        let (mut segment, mut recent) = (Segment::new(256), Recent::for_workers(1));
        let counted = least(&hashes, |hash| {
            segment.note(Identity::new(hash, 0, b"user:1234567890"), KeyAccess { how: AccessKind::Read, bytes: 40 })
        });
        let noticed = least(&hashes, |hash| {
            black_box(recent.note(hash));
        });
        println!("{what:<32}{counted:>12.1}{noticed:>12.1}");
    }
}
