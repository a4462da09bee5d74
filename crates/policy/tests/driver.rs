//! Tests of the driver of a leg: key sources, purges, and the final commit.

use std::sync::Arc;

use switchyard_policy::migration::{
    Begin, Copied, DoubleRead, Driver, DriverAction, DriverEvent, Durability, Event, Fingerprinter, Io, Key, LegOrder,
    Outcome, Process, Protocol, Side,
};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology, crc16_slot};

fn key(name: &str) -> Key {
    Key::from(name.as_bytes())
}

fn slot() -> Slot {
    crc16_slot(b"{t}")
}

fn begin(protocol: Protocol) -> Begin {
    Begin {
        protocol,
        paper: None,
        orders: LegOrder {
            move_id: MoveId(1),
            leg: 0,
            source: NodeId(0),
            target: NodeId(1),
            slots: vec![slot()],
            durability: Durability::Memory,
            drain_timeout_us: 40_000,
        },
        fingerprints: Fingerprinter::new(7),
        resume: None,
        keys: None,
        databases: vec![0],
        listed_run_id: Some("a".to_owned()),
        target_is_clean: true,
    }
}

/// A driver with a clock, and its actions since the last check.
struct Driven {
    driver: Driver,
    now_us: u64,
    actions: Vec<DriverAction>,
}

impl Driven {
    fn new(begin: Begin) -> Self {
        let mut driven = Self { driver: Driver::new(begin), now_us: 0, actions: Vec::new() };
        let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id: 1 };
        driven.step(Event::Met { source: process("a"), target: process("b") });
        driven
    }

    fn step(&mut self, what: impl Into<DriverEvent>) {
        self.now_us += 1000;
        self.driver.step(what.into(), self.now_us, &mut self.actions);
    }

    fn take(&mut self) -> Vec<DriverAction> {
        std::mem::take(&mut self.actions)
    }

    /// Confirms the last record as durable.
    fn record(&mut self) {
        let numbers = self.actions.iter().rev().find_map(|what| match what {
            DriverAction::Record { numbers, .. } => Some(numbers.clone()),
            _ => None,
        });
        self.take();
        self.step(DriverEvent::Recorded(numbers.expect("something was recorded")));
    }

    /// Drains until keys may move.
    fn drain(&mut self) {
        self.record();
        assert_eq!(self.take(), [DriverAction::View { away: None, double_read: None }, DriverAction::Publish]);
        self.step(DriverEvent::Published(None));
        assert_eq!(self.driver.barrier(), None, "workers do not know yet");
        self.now_us += 50_000 - 10_000;
        for _ in 0..20 {
            self.step(DriverEvent::Tick);
        }
        assert_eq!(self.take(), [DriverAction::Publish], "it is tried again, once");
        self.step(DriverEvent::Published(Some(9)));
        assert_eq!(self.driver.barrier().map(|barrier| (barrier.epoch, barrier.side)), Some((9, Side::Source)));
        self.step(DriverEvent::Drained { databases: vec![0] });
        self.record();
    }
}

fn patient(protocol: Protocol) -> Begin {
    let begun = begin(protocol);
    Begin { orders: LegOrder { drain_timeout_us: 1_000_000, ..begun.orders.clone() }, ..begun }
}

#[test]
fn keys_are_taken_from_the_list_as_required() {
    let mut driven = Driven::new(patient(Protocol::Switchyard));
    driven.drain();
    assert_eq!(driven.take(), [DriverAction::TakeListed]);
    driven.step(DriverEvent::Taken(Some((vec![key("{t}1")], false))));
    assert_eq!(driven.take(), [DriverAction::TakeListed], "until there are enough keys");
    driven.step(DriverEvent::Taken(Some((vec![key("{t}2")], true))));
    let copied: Vec<usize> = driven
        .take()
        .iter()
        .filter_map(|what| if let DriverAction::Io(Io::Copy { keys, .. }) = what { Some(keys.len()) } else { None })
        .collect();
    assert_eq!(copied, [2]);
}

#[test]
fn a_list_that_is_unreadable_or_of_another_process_is_ignored() {
    let walks =
        |driven: &mut Driven| matches!(driven.take()[..], [DriverAction::Scan { side: Side::Source, database: 0, .. }]);
    let mut driven = Driven::new(Begin { listed_run_id: Some("another".to_owned()), ..patient(Protocol::Switchyard) });
    driven.drain();
    assert!(walks(&mut driven));
    let mut driven = Driven::new(patient(Protocol::Switchyard));
    driven.drain();
    driven.take();
    driven.step(DriverEvent::Taken(None));
    assert!(walks(&mut driven));
}

#[test]
fn keys_with_overrides_are_neither_purged_nor_moved() {
    let topology =
        Topology::even(&["0".to_owned(), "1".to_owned()]).expect("two nodes").handed_over(&[slot()], NodeId(0));
    let apart = key("{t}apart");
    let topology = topology.keys_handed_over(&[slot()], [&apart], NodeId(1));
    let mut driven = Driven::new(Begin { target_is_clean: false, ..patient(Protocol::Switchyard) });
    driven.record();
    let said = driven.take();
    let [DriverAction::Scan { walk, side: Side::Target, .. }] = said[..] else {
        panic!("it looks at the target first: {said:?}")
    };
    let found: [&[u8]; 4] = [b"{t}left over", &apart, b"of another slot", b"switchyard:temporary:{t}"];
    driven.driver.scanned(walk, b"0", found.into_iter(), &topology, driven.now_us, &mut driven.actions);
    assert_eq!(
        driven.take(),
        [DriverAction::Unlink { walk, side: Side::Target, database: 0, keys: vec![key("{t}left over")] }]
    );
    driven.step(DriverEvent::Unlinked { walk: walk + 1 });
    assert_eq!(driven.take(), [], "another walk's");
    driven.step(DriverEvent::Unlinked { walk });
    assert_eq!(driven.take(), [DriverAction::View { away: None, double_read: None }, DriverAction::Publish]);
}

/// Regression: a protocol that rolls back without publishing to workers committed all keys, and workers used them at
/// the target.
#[test]
fn all_keys_are_committed_only_at_the_side_workers_use() {
    for back in [false, true] {
        let mut driven = Driven::new(patient(Protocol::StopAndCopy));
        driven.drain();
        if back {
            driven.step(Event::RollBack);
            driven.record();
            for what in driven.take() {
                if let DriverAction::Scan { walk, side, .. } = what {
                    assert_eq!(side, Side::Target);
                    let topology = Topology::even(&["0".to_owned(), "1".to_owned()]).expect("two nodes");
                    driven.driver.scanned(walk, b"0", [].into_iter(), &topology, driven.now_us, &mut driven.actions);
                }
            }
        } else {
            driven.step(DriverEvent::Taken(Some((Vec::new(), true))));
        }
        let to = if back { Side::Source } else { Side::Target };
        assert!(driven.take().contains(&DriverAction::Confirm { side: to }));
        driven.step(Event::Confirmed { side: to, evicted: 0 });
        driven.record();
        let said = driven.take();
        assert_eq!(said.contains(&DriverAction::CommitAll), !back, "back: {back}, {said:?}");
        assert!(said.contains(&DriverAction::CatchUp { side: to }));
        driven.step(DriverEvent::CaughtUp);
        assert_eq!(driven.take(), [DriverAction::HandOver { to }]);
        driven.step(DriverEvent::HandedOver(false));
        driven.now_us += 500_000;
        driven.step(DriverEvent::Tick);
        assert_eq!(driven.take(), [DriverAction::HandOver { to }], "to the same side");
        driven.step(DriverEvent::HandedOver(true));
        let outcome =
            if back { Outcome::Returned { why: "it was aborted by the user".to_owned() } } else { Outcome::Moved };
        assert_eq!(driven.take(), [DriverAction::Io(Io::End(outcome))]);
    }
}

#[test]
#[should_panic(expected = "records of a leg are durable in their order")]
fn a_record_durable_out_of_order_is_a_bug() {
    let mut driven = Driven::new(begin(Protocol::Switchyard));
    driven.step(DriverEvent::Recorded(2..=2));
}

/// A read of a key in transit may go to both nodes, while they are the processes met by the leg and until it rolls
/// back.
#[test]
fn netmigrate_reads_at_both_nodes() {
    let mut driven = Driven::new(patient(Protocol::NetMigrate));
    driven.record();
    let double_read =
        |fetches_one_in| Some(Arc::new(DoubleRead { source: "a".to_owned(), target: "b".to_owned(), fetches_one_in }));
    assert_eq!(driven.take(), [DriverAction::View { away: None, double_read: double_read(0) }, DriverAction::Publish]);
    let mut driven = Driven::new(patient(Protocol::Fulva));
    driven.record();
    assert_eq!(
        driven.take(),
        [DriverAction::View { away: None, double_read: double_read(100) }, DriverAction::Publish]
    );
}

#[test]
fn a_sample_of_double_reads_is_fetched() {
    let one_in = |fetches_one_in| DoubleRead { source: "a".to_owned(), target: "b".to_owned(), fetches_one_in };
    assert_eq!((1..=1000).filter(|number| one_in(100).fetches(*number)).count(), 10);
    assert!(!(0..1000).any(|number| one_in(0).fetches(number)));
}

/// Rocksteady as in NetMigrate's agents: batches of sixteen missing keys, or all of a tenth of a second.
#[test]
fn rocksteady_fetches_missing_keys_together() {
    let wanted = |numbers: std::ops::Range<u32>| Event::Wanted {
        keys: numbers.map(|number| key(&format!("{{t}}{number}"))).collect(),
    };
    let copied = |driven: &mut Driven| -> Vec<usize> {
        driven
            .take()
            .iter()
            .filter_map(|what| if let DriverAction::Io(Io::Copy { keys, .. }) = what { Some(keys.len()) } else { None })
            .collect()
    };
    let mut driven = Driven::new(patient(Protocol::Rocksteady));
    driven.drain();
    driven.step(wanted(0..3));
    assert_eq!(copied(&mut driven), []);
    driven.now_us += 98_000;
    driven.step(DriverEvent::Tick);
    assert_eq!(copied(&mut driven), []);
    driven.step(wanted(2..4));
    assert_eq!(copied(&mut driven), [4], "the first has waited for a tenth of a second; none twice");
    driven.step(wanted(10..30));
    assert_eq!(copied(&mut driven), [16]);
    driven.now_us += 100_000;
    driven.step(DriverEvent::Tick);
    assert_eq!(copied(&mut driven), [4]);
    let mut driven = Driven::new(patient(Protocol::Switchyard));
    driven.drain();
    driven.step(wanted(0..3));
    assert_eq!(copied(&mut driven), [3], "at once");
}

/// Regression: a leg rolled back while its target was away, and keys that clients had written there in a new database
/// remained.
#[test]
fn keys_of_a_node_are_unknown_while_it_is_away() {
    let mut driven = Driven::new(patient(Protocol::Switchyard));
    driven.drain();
    driven.step(DriverEvent::Taken(Some((vec![key("{t}1")], true))));
    let said = driven.take();
    let Some(DriverAction::Io(Io::Copy { batch, .. })) = said.last() else { panic!("{said:?}") };
    let batch = *batch;
    driven.step(Event::Copied { batch, outcomes: vec![Copied::Absent] });
    let said = driven.take();
    assert!(
        said.iter().all(|what| !matches!(what, DriverAction::Record { .. })),
        "first what the target may have of it is removed: {said:?}"
    );
    driven.step(Event::Removed { batch });
    driven.record();
    driven.take();
    // Clients now use the key at the target, in database 3. Then the target is disconnected, and the leg must roll
    // back.
    driven.step(DriverEvent::Lost { side: Side::Target });
    driven.step(Event::RollBack);
    driven.record();
    driven.take();
    driven.step(DriverEvent::Published(Some(10)));
    driven.step(DriverEvent::Drained { databases: Vec::new() });
    driven.take();
    let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id: 2 };
    driven.step(DriverEvent::Restored { side: Side::Source, process: process("a"), databases: vec![3] });
    driven.step(DriverEvent::Restored { side: Side::Target, process: process("b"), databases: vec![3] });
    driven.record();
    let said = driven.take();
    assert!(
        said.iter().any(|what| matches!(what, DriverAction::Scan { side: Side::Target, database: 3, .. })),
        "{said:?}"
    );
}

/// Regression: a leg without keys ended at a target that had restarted since its purge and had its old keys again.
#[test]
fn a_leg_ends_only_if_the_purged_process_confirms() {
    let mut driven = Driven::new(patient(Protocol::Switchyard));
    let end = |driven: &mut Driven| driven.take().iter().any(|what| matches!(what, DriverAction::Record { .. }));
    driven.drain();
    driven.step(DriverEvent::Taken(Some((Vec::new(), true))));
    assert!(driven.take().contains(&DriverAction::Confirm { side: Side::Target }));
    for _ in 0..3 {
        driven.step(DriverEvent::Tick);
    }
    driven.step(Event::Confirmed { side: Side::Source, evicted: 0 });
    assert_eq!(driven.take(), [], "one request is sent, without a reply yet");
    driven.step(DriverEvent::Lost { side: Side::Target });
    driven.step(Event::Confirmed { side: Side::Target, evicted: 0 });
    assert!(!end(&mut driven), "an answer of the connection that was lost");
    let process = Process { run_id: "c".to_owned(), client_id: 2 };
    driven.step(DriverEvent::Restored { side: Side::Target, process, databases: vec![0] });
    driven.record();
    let said = driven.take();
    let [DriverAction::Scan { walk, side: Side::Target, .. }] = said[..] else {
        panic!("it is purged first: {said:?}")
    };
    let topology = Topology::even(&["0".to_owned(), "1".to_owned()]).expect("two nodes");
    driven.driver.scanned(walk, b"0", [].into_iter(), &topology, driven.now_us, &mut driven.actions);
    assert_eq!(driven.take(), [DriverAction::Confirm { side: Side::Target }]);
    driven.step(Event::Wanted { keys: vec![key("{t}1")] });
    driven.take();
    driven.step(Event::Confirmed { side: Side::Target, evicted: 0 });
    assert!(!end(&mut driven), "there is something to do again");
}
