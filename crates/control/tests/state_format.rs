//! State directories of earlier versions, unmodified: this version must read them.
//!
//! `fixtures/state/VERSION/` contains `state.redb`, `moves.journal` and `facts`, which were true when they were made.
//! Every release adds a directory, and existing ones are never regenerated:
//!
//! ```sh
//! cargo test -p switchyard-control --test state_format -- --ignored make
//! ```

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use switchyard_control::journal::Sync;
use switchyard_control::ledger::{Ledger, OpenedLedger};
use switchyard_control::store::{RedbStore, Store};
use switchyard_policy::failover;
use switchyard_policy::migration::{Durability, Fingerprint, Process, Protocol, Record, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/state")
}

fn slots(range: std::ops::Range<u16>) -> Vec<Slot> {
    range.filter_map(Slot::new).collect()
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{name}.invalid:6379")).collect()
}

fn process(name: &str, client_id: u64) -> Process {
    Process { run_id: name.repeat(40), client_id }
}

/// Records of an ended move, and of a move in the middle of its second leg.
fn records() -> Vec<Record> {
    let (one, two) = (MoveId(1), MoveId(2));
    let begun = |move_id, source, target, slots, protocol| Record::Begun {
        move_id,
        source,
        target,
        slots,
        protocol,
        durability: Durability::Aof,
    };
    let leg = |move_id, leg, slots| Record::LegBegun {
        move_id,
        leg,
        slots,
        source: process("a", 7),
        target: process("b", 9),
    };
    let keys = |first: u128| (first..first + 3).map(Fingerprint).collect::<Vec<_>>();
    vec![
        begun(one, NodeId(0), NodeId(1), slots(0..100), Protocol::Switchyard),
        leg(one, 1, slots(0..100)),
        Record::LegMoving { move_id: one, leg: 1 },
        Record::Moved { move_id: one, leg: 1, keys: keys(1) },
        Record::LegEnded { move_id: one, leg: 1, owner: Side::Target },
        Record::Ended { move_id: one },
        begun(two, NodeId(1), NodeId(3), slots(6000..6040), Protocol::Switchyard),
        leg(two, 1, slots(6000..6020)),
        Record::LegMoving { move_id: two, leg: 1 },
        Record::LegEnded { move_id: two, leg: 1, owner: Side::Target },
        leg(two, 2, slots(6020..6040)),
        Record::Met { move_id: two, leg: 2, side: Side::Target, process: process("c", 11) },
        Record::LegMoving { move_id: two, leg: 2 },
        Record::Moved { move_id: two, leg: 2, keys: keys(100) },
        Record::RolledBack { move_id: two, leg: 2, why: "the target is full".to_owned() },
        Record::Returned { move_id: two, leg: 2, keys: keys(100)[..1].to_vec() },
    ]
}

fn record(ledger: &Ledger, records: Vec<Record>) {
    let (told, outcome) = mpsc::channel();
    ledger.record(records, Box::new(move |result| told.send(result).expect("the test waits")));
    outcome.recv().expect("told").expect("durable");
}

fn primary() -> failover::Record<SocketAddr> {
    failover::Record {
        primary: "127.0.0.1:6379".parse().expect("an address"),
        config_epoch: 5,
        replication_id: Some("r".repeat(40)),
    }
}

/// Writes everything that a directory of this version can contain.
fn write(directory: &Path) {
    let store = RedbStore::open(directory).expect("opens");
    let first = Topology::even(&names(&["a", "b", "c"])).expect("nodes");
    store.save_topology(&first).expect("saves");
    let owned: Vec<Slot> = Slot::all().filter(|slot| first.owner(*slot) == NodeId(2)).collect();
    let drained = first.handed_over(&owned, NodeId(1)).handed_over(&slots(0..100), NodeId(1));
    let key = |name: &str| Arc::<[u8]>::from(name.as_bytes());
    let parted = drained.keys_handed_over(&[], [&key("{a}1"), &key("{a}\u{fc}")], NodeId(0));
    let changed = Topology::place(Some(&parted), &names(&["a", "b", "d"])).expect("c owns nothing").topology;
    store.save_topology(&changed.handed_over(&slots(6000..6020), NodeId(3))).expect("saves");
    store.save_primary("a.invalid:6379", &primary()).expect("saves");
    for _ in 0..3 {
        store.next_incarnation().expect("counts");
    }
    let OpenedLedger { ledger, .. } = Ledger::open(directory, &store, Sync::Always).expect("opens");
    for record_ in records() {
        record(&ledger, vec![record_]);
    }
}

/// Returns facts about a directory, one per line. A later version may know more facts, so facts missing in a fixture
/// are ignored.
fn facts(directory: &Path) -> Vec<String> {
    let store = RedbStore::open(directory).expect("opens");
    let topology = store.load_topology().expect("reads").expect("there is one");
    let mut facts =
        vec![format!("epoch {}", topology.epoch()), format!("next number of a node {}", topology.next_id())];
    for node in topology.nodes() {
        facts.push(format!("node {} is {} and owns {:?}", node.id.0, node.name, topology.ranges_of(node.id)));
    }
    for (key, node) in topology.placement_overrides() {
        facts.push(format!("the key {} lives at {}", key.escape_ascii(), node.0));
    }
    let primary = store.load_primary("a.invalid:6379").expect("reads").expect("there is one");
    facts.push(format!(
        "the primary of a is {} at {} with {:?}",
        primary.primary, primary.config_epoch, primary.replication_id
    ));
    facts.push(format!("the next start is number {}", store.next_incarnation().expect("counts")));
    let OpenedLedger { ledger, replay, torn } = Ledger::open(directory, &store, Sync::Always).expect("opens");
    facts.push(format!("{torn} torn bytes"));
    facts.push(format!("a fingerprint is {:x}", ledger.fingerprinter().of(b"key").0));
    facts.push(format!("the next move is number {}", ledger.next_move().0));
    let numbers = |slots: &[Slot]| slots.iter().map(|slot| slot.number().to_string()).collect::<Vec<_>>().join(",");
    for node in topology.nodes() {
        facts.push(format!(
            "keys of these slots may be left at {}: {}",
            node.id.0,
            numbers(&ledger.leftover_slots(node.id))
        ));
    }
    for (id, open) in &replay.open {
        let named = [("its slots are", &open.slots), ("of these are handed over", &open.handed_over)];
        facts.push(format!(
            "move {} goes from {} to {} by {:?}, {:?}",
            id.0, open.source.0, open.target.0, open.protocol, open.durability
        ));
        facts.extend(named.map(|(what, slots)| format!("move {}: {what} {}", id.0, numbers(slots))));
        let Some(leg) = &open.leg else { continue };
        facts.push(format!(
            "leg {} of move {}: {}, moving {}, turned back {:?}",
            leg.leg,
            id.0,
            numbers(&leg.slots),
            leg.moving,
            leg.rolled_back
        ));
        facts.push(format!("leg {} is between {} and {}", leg.leg, leg.source.run_id, leg.target.run_id));
        facts.push(format!("leg {} has away {:?}", leg.leg, leg.away.keys().map(|key| key.0).collect::<Vec<_>>()));
    }
    facts
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a directory");
    for name in ["state.redb", "moves.journal"] {
        fs::copy(from.join(name), to.path().join(name)).expect("copies");
    }
    to
}

#[test]
fn directories_of_every_version_are_read() {
    let mut versions = 0;
    for fixture in fs::read_dir(fixtures()).expect("there are fixtures") {
        let fixture = fixture.expect("readable").path();
        let found = facts(copy(&fixture).path());
        let kept = fs::read_to_string(fixture.join("facts")).expect("facts");
        for fact in kept.lines() {
            assert!(found.iter().any(|one| one == fact), "{}: no longer true: {fact}\n{found:#?}", fixture.display());
        }
        assert!(kept.lines().count() > 15, "{}: {kept}", fixture.display());
        versions += 1;
    }
    assert!(versions > 0);
}

#[test]
fn there_is_a_directory_of_this_version() {
    let own = fixtures().join(env!("CARGO_PKG_VERSION"));
    assert!(own.join("facts").exists(), "make {}: see the top of this file", own.display());
}

#[test]
#[ignore = "writes the fixture of this version, once per release"]
fn make() {
    let own = fixtures().join(env!("CARGO_PKG_VERSION"));
    assert!(!own.exists(), "{} is kept as it is", own.display());
    let directory = tempfile::tempdir().expect("a directory");
    write(directory.path());
    fs::create_dir_all(&own).expect("a directory");
    for name in ["state.redb", "moves.journal"] {
        fs::copy(directory.path().join(name), own.join(name)).expect("copies");
    }
    fs::write(own.join("facts"), facts(directory.path()).join("\n") + "\n").expect("writes");
}
