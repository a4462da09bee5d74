//! Cost of placement overrides: `cargo bench -p switchyard-policy --bench directory`. The minimum of several rounds,
//! because other programs can only add time.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use switchyard_policy::topology::{NodeId, OVERRIDES_MAX, Topology};

/// Keys of a round. Their names do not fit into the first-level cache.
const KEYS: usize = 1 << 16;
const ROUNDS: usize = 25;

/// Returns nanoseconds per item.
#[expect(clippy::disallowed_methods, reason = "what runs here is measured, and not replayed")]
fn least<T, R>(items: &[T], mut run: impl FnMut(&T) -> R) -> f64 {
    let round = |_| {
        let start = Instant::now();
        items.iter().for_each(|item| drop(black_box(run(black_box(item)))));
        start.elapsed().as_secs_f64() * 1e9 / items.len() as f64
    };
    (0..ROUNDS).map(round).fold(f64::MAX, f64::min)
}

fn mixed(number: usize) -> usize {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

fn name(kind: &str, number: usize) -> Arc<[u8]> {
    format!("{kind}:{number:010}:profile").into_bytes().into()
}

fn main() {
    let names: Vec<String> = (0..3).map(|node| format!("127.0.0.1:700{node}")).collect();
    let empty = Topology::even(&names).expect("three nodes");
    let without: Vec<Arc<[u8]>> = (0..KEYS).map(|number| name("user", number)).collect();
    let owner = least(&without, |key| empty.owner_of(key));
    println!("slot and owner of a key: {owner:.1} ns");
    let columns = ["no entry, ns", "own entry, ns", "change, µs", "load, ms", "comparison, µs"];
    println!("{:<12}{}", "entries", columns.map(|column| format!("{column:>16}")).concat());
    for count in [0, 1, 1_000, 65_536, OVERRIDES_MAX] {
        let elsewhere = |key: &[u8]| NodeId((empty.owner_of(key).0 + 1) % 3);
        let keys: Vec<Arc<[u8]>> = (0..count).map(|number| name("moved", number)).collect();
        let stored: Vec<_> = keys.iter().map(|key| (Arc::clone(key), elsewhere(key))).collect();
        let mut full = empty.clone();
        let load = least(&[()], |()| {
            full = empty.clone().with_stored_overrides(stored.iter().cloned()).expect("valid");
        });
        let none = least(&without, |key| full.lives_at(key));
        let with: Vec<&Arc<[u8]>> = (0..KEYS).filter_map(|number| keys.get(mixed(number) % count.max(1))).collect();
        let own = if with.is_empty() { f64::NAN } else { least(&with, |key| full.lives_at(key)) };
        // One key more, as at the end of a move, and the list of changes for the store.
        let added: Vec<Arc<[u8]>> = (0..200).map(|number| name("added", number)).collect();
        let change = least(&added, |key| full.keys_handed_over(&[], [key], elsewhere(key)));
        let next: Vec<Topology> = added.iter().map(|key| full.keys_handed_over(&[], [key], elsewhere(key))).collect();
        let comparison = least(&next, |next| next.overrides_since(&full));
        println!(
            "{count:<12}{none:>16.1}{own:>16.1}{:>16.1}{:>16.1}{:>16.1}",
            change / 1e3,
            load / 1e6,
            comparison / 1e3
        );
    }
}
