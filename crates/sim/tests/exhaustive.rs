//! Searches every order of events in a leg of one or two keys, for one key also with faults: no state has a violation.
//! `planted.rs` searches with planted bugs.
//!
//! `cargo test -p switchyard-sim --test exhaustive -- --nocapture` prints the numbers of states.

use switchyard_sim::explore::{Bounds, explore};

/// More than any of these searches needs.
const STATES_MAX: usize = 3_000_000;

fn clean(name: &str, bounds: Bounds) {
    let searched = explore(bounds, None, STATES_MAX);
    if let Some((what, way)) = searched.violation {
        panic!("{name}: {what}\n    {}", way.join("\n    "));
    }
    println!("{name}: {} states, {} of them ends", searched.states, searched.ends);
    assert!(!searched.unfinished, "{name}: all states are visited");
    assert!(searched.states > 100 && searched.ends > 0, "{name}: a leg was moved");
}

#[test]
fn one_key() {
    let base = Bounds { keys: 1, ..Bounds::default() };
    clean("one key", base);
    clean("one key, a connection breaks", Bounds { cuts: 1, ..base });
    clean("one key, a node restarts", Bounds { restarts: 1, ..base });
    clean("one key, the router is killed", Bounds { crashes: 1, ..base });
    clean("one key, the leg goes back", Bounds { turns: 1, ..base });
    clean("one key, a connection breaks and the leg goes back", Bounds { cuts: 1, turns: 1, ..base });
}

#[test]
fn two_keys() {
    let base = Bounds { keys: 2, ..Bounds::default() };
    clean("two keys", base);
}
