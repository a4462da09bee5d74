//! Every planted bug is found: a simulator that finds nothing may be one that sees nothing.
//!
//! Run with `cargo test -p switchyard-sim --features planted-bugs --test planted`; `-- --nocapture` prints the seeds.

#![cfg(feature = "planted-bugs")]

use switchyard_sim::{Planted, Scenario, sweep};

/// Seeds tried in each scenario until the bug is found.
const SEEDS: u64 = 10_000;

#[test]
fn each_bug_is_found_within_ten_thousand_seeds() {
    std::panic::set_hook(Box::new(|_| {}));
    let scenarios: Vec<Scenario> = ["rough", "forgetful", "calm"].iter().filter_map(|name| Scenario::built_in(name)).collect();
    let mut missed = Vec::new();
    for planted in Planted::ALL {
        let found = scenarios.iter().find_map(|scenario| {
            let run = sweep(scenario, Some(*planted), 0, SEEDS, 2, |_| {})?;
            Some((scenario.name.clone(), run))
        });
        match found {
            Some((scenario, run)) => {
                let what = run.violation.unwrap_or_default();
                println!("{planted:?}: {scenario}, seed {}: {}", run.seed, what.lines().next().unwrap_or_default());
            }
            None => {
                println!("{planted:?}: NOT FOUND");
                missed.push(planted);
            }
        }
    }
    let _ = std::panic::take_hook();
    assert!(missed.is_empty(), "not found: {missed:?}");
}
