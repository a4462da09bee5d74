//! SwitchKV's system: computed throughputs, a burst of new hot keys with stored results, and a bug that it finds.
//!
//! After an intended change, increase `MODEL`, write the results again and review the difference:
//! `SWITCHYARD_REWRITE_GOLDEN=1 cargo nextest run -p switchyard-sim --test switchkv`.

use std::fmt::Write as _;
use std::path::PathBuf;

use switchyard_sim::fleet::switchkv::{Admission, Changes, Outcome, Pattern, Settings, Updates, run};

/// Figure 18 at a quarter of its size: cold keys become the hottest ones, for as many rule updates as the switch makes
/// in one and a half seconds.
fn burst() -> Settings {
    let admission = Admission { per_second: 100, ..Admission::PUBLISHED };
    let updates = Updates { rules_per_second: Some(100.0), ..Updates::reports(true, true, admission) };
    Settings {
        backends: 32,
        backend_limit: 25_000.0,
        items: 2_500,
        changes: Some(Changes { pattern: Pattern::HotIn, keys: 150, first: 1.0, every: 60.0 }),
        updates: Some(updates),
        seconds: 9,
        ..Settings::default()
    }
}

/// Time until most of the new keys are cached, in seconds.
fn filled(outcome: &Outcome) -> f64 {
    outcome.filled[0].unwrap_or(f64::INFINITY)
}

fn golden(outcome: &Outcome) -> String {
    let mut text = String::new();
    for (name, value) in [
        ("throughput", outcome.throughput),
        ("by cache", outcome.by_cache),
        ("hits", outcome.hits),
        ("rules per second", outcome.rules),
        ("keys added per second", outcome.added),
        ("seconds until the new keys are cached", filled(outcome)),
    ] {
        let _ = writeln!(text, "{name}: {value}");
    }
    for (second, points) in outcome.served.chunks(10).enumerate() {
        let rates: Vec<String> = points.iter().map(ToString::to_string).collect();
        let _ = writeln!(text, "second {second}: {}", rates.join(" "));
    }
    text
}

#[test]
fn burst_keeps_its_stored_results() {
    let found = golden(&run(&burst(), 1, None));
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("scenarios/switchkv/burst.txt");
    if std::env::var_os("SWITCHYARD_REWRITE_GOLDEN").is_some() {
        std::fs::write(&path, &found).expect("the results are written");
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, stored, "the results differ from {} (see the head of this test)", path.display());
}

#[test]
fn a_seed_determines_a_run() {
    let settings = Settings { seconds: 2, ..burst() };
    let [one, again, other] = [1, 1, 2].map(|seed| run(&settings, seed, None));
    assert!(one == again && one != other);
}

/// Values computed from table 2 of the paper, by the loss of the sender.
#[test]
fn steady_throughput_is_as_computed() {
    let of = |items| run(&Settings { items, ..Settings::default() }, 1, None);
    let (without, with) = (of(0), of(10_000));
    assert!((with.hits - 0.386).abs() < 0.001, "{}", with.hits);
    assert!((2.6e6..=3.1e6).contains(&without.throughput), "{}", without.throughput);
    assert!((20.4e6..=21.6e6).contains(&with.throughput), "{}", with.throughput);
}

#[cfg(feature = "planted-bugs")]
mod planted {
    use switchyard_policy::hot_copies::Bug;
    use switchyard_sim::fleet::Planted;

    use super::*;

    #[test]
    fn planted_removals_before_additions_delay_a_burst() {
        let bug = Some(Planted::Admission(Bug::EvictionsFirst));
        let (with, without) = (run(&burst(), 1, bug), run(&burst(), 1, None));
        println!("{} s with the bug, {} s without", filled(&with), filled(&without));
        assert!(filled(&with) > 1.5 * filled(&without));
    }
}
