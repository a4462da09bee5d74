//! Cost of placement rules per key: `cargo bench -p switchyard-policy --bench rules`. The minimum of several rounds,
//! because other programs can only add time.

use std::hint::black_box;
use std::time::Instant;

use switchyard_policy::topology::{Placement, Rule, RuleSet};

const KEYS: usize = 1 << 14;
const ROUNDS: usize = 200;

/// Returns nanoseconds per key.
#[expect(clippy::disallowed_methods, reason = "what runs here is measured, and not replayed")]
fn least(placement: &Placement, keys: &[String]) -> f64 {
    let round = |_| {
        let start = Instant::now();
        for key in keys {
            black_box(placement.slot_of(black_box(key.as_bytes())));
        }
        start.elapsed().as_secs_f64() * 1e9 / keys.len() as f64
    };
    (0..ROUNDS).map(round).fold(f64::MAX, f64::min)
}

fn main() {
    // Half of the rules share their first bytes.
    let prefix = |n: usize| if n.is_multiple_of(2) { format!("app:{n}:") } else { format!("{n}jobs:") };
    let rule = |n| Rule { keys: vec![format!("{}{{name}}:*", prefix(n))], tag: None };
    let placement = |count| RuleSet::new((0..count).map(rule).collect()).map(Placement::by_rules).expect("valid rules");
    let keys = |count: usize| (0..KEYS).map(|n| format!("{}q{n}:wait", prefix(n % count))).collect::<Vec<_>>();
    println!("{:<12}{:>20}{:>20}{:>20}", "ns per key", "keys of one rule", "keys of 50 rules", "keys of no rule");
    for count in [0, 1, 50] {
        let (placement, other) = (placement(count), (0..KEYS).map(|n| format!("user:{n}:name")).collect::<Vec<_>>());
        let [one, many, none] = [keys(1), keys(50), other].map(|keys| least(&placement, &keys));
        println!("{:<12}{one:>20.1}{many:>20.1}{none:>20.1}", format!("{count} rules"));
    }
}
