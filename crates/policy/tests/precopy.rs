//! Tests of the pre-copy protocol: the order of requests, and the record that decides the owner.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use switchyard_policy::migration::record::{OpenLeg, ProcessGenerations, Replay, StaleCopies};
use switchyard_policy::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprinter, Io, Key, LegOrder, Machine, Outcome, Precopy, Process,
    Protocol, Record, Side, Stored, UnexpectedKeys,
};
use switchyard_policy::topology::{MoveId, NodeId, crc16_slot};

const FINGERPRINTS: Fingerprinter = Fingerprinter::new(7);

fn key(name: &str) -> Key {
    Key::from(name.as_bytes())
}

fn process(run_id: &str) -> Process {
    Process { run_id: run_id.to_owned(), client_id: 1 }
}

fn orders() -> LegOrder {
    LegOrder {
        move_id: MoveId(1),
        leg: 0,
        source: NodeId(0),
        target: NodeId(1),
        slots: vec![crc16_slot(b"{t}")],
        durability: Durability::Memory,
        drain_timeout_us: 40_000,
    }
}

/// A leg. Records are durable immediately, and node requests succeed unless a test intercepts them.
struct Driven {
    leg: Precopy,
    now_us: u64,
    records: Vec<Record>,
    actions: Vec<Action>,
    /// Keys missing at the source.
    gone: Vec<Key>,
    listed: Vec<Key>,
    /// Batches copied and not yet stored.
    is_held: bool,
    /// Keys evicted by the target.
    evicted: u64,
}

impl Driven {
    fn new(leg: Precopy, listed: &[&str]) -> Self {
        let listed = listed.iter().copied().map(key).collect();
        let mut driven = Self {
            leg,
            now_us: 0,
            records: Vec::new(),
            actions: Vec::new(),
            gone: Vec::new(),
            listed,
            is_held: false,
            evicted: 5,
        };
        driven.step(Event::Met { source: process("a"), target: process("b") });
        driven
    }

    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            self.now_us += 10;
            let mut actions = Vec::new();
            self.leg.step(event, self.now_us, &mut actions);
            for action in &actions {
                match action {
                    Action::Record { number, record } => {
                        self.records.push(record.clone());
                        events.insert(0, Event::Recorded(*number));
                    }
                    Action::Purge { .. } => events.insert(0, Event::Purged),
                    Action::List { .. } => {
                        events.insert(0, Event::Listed { keys: std::mem::take(&mut self.listed), end: true });
                    }
                    Action::Confirm { side } => {
                        events.insert(0, Event::Confirmed { side: *side, evicted: self.evicted })
                    }
                    Action::HandOver { .. } => events.insert(0, Event::HandedOver),
                    Action::Io(Io::Copy { batch, keys, .. }) if !self.is_held => {
                        let outcome =
                            |key| if self.gone.contains(key) { Copied::Absent } else { Copied::Taken { bytes: 1 } };
                        events.insert(0, Event::Copied { batch: *batch, outcomes: keys.iter().map(outcome).collect() });
                    }
                    Action::Io(Io::Overwrite { batch, keys, .. }) => {
                        events.insert(0, Event::Stored { batch: *batch, outcomes: vec![Stored::Stored; keys.len()] });
                    }
                    Action::Io(Io::Remove { batch, .. }) => events.insert(0, Event::Removed { batch: *batch }),
                    _ => {}
                }
            }
            self.actions.extend(actions);
        }
    }

    fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    fn copied(&mut self) -> Vec<Key> {
        let of = |action: Action| if let Action::Io(Io::Copy { keys, .. }) = action { keys } else { Vec::new() };
        self.take().into_iter().flat_map(of).collect()
    }
}

fn written(count: usize) -> Event {
    Event::Written { keys: (0..count).map(|n| key(&format!("{{t}}{n}"))).collect() }
}

#[test]
fn written_keys_are_copied_again_after_earlier_commands_complete() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a"]);
    assert!(driven.take().contains(&Action::Observe), "earlier commands are drained first");
    driven.step(written(100));
    assert_eq!(driven.copied(), [], "nothing is read during the drain");
    driven.step(Event::Drained);
    let said = driven.take();
    assert!(said.iter().any(|action| matches!(action, Action::Io(Io::Copy { keys, .. }) if keys == &[key("{t}a")])));
    assert!(said.ends_with(&[Action::Observe, Action::Confirm { side: Side::Target }]), "then the next round");
    driven.step(written(30));
    driven.step(Event::Drained);
    assert_eq!(driven.copied().len(), 100, "later writes are not settled");
    driven.step(Event::Drained);
    assert_eq!(driven.copied().len(), 30);
    assert!(
        !driven.actions.contains(&Action::Announce { double_read: None }) && driven.records.len() == 1,
        "{:?}",
        driven.records
    );
}

#[test]
fn clients_wait_for_the_last_keys_and_one_record_sets_the_owner() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a"]);
    driven.gone.push(key("{t}0"));
    driven.step(Event::Drained);
    assert!(driven.take().contains(&Action::Announce { double_read: None }), "nothing was written");
    driven.step(written(2));
    assert_eq!(driven.copied(), []);
    driven.step(Event::Drained);
    let said = driven.take();
    let at =
        |wanted: &dyn Fn(&Action) -> bool| said.iter().position(wanted).unwrap_or_else(|| panic!("not in {said:?}"));
    let removed = at(
        &|action| matches!(action, Action::Io(Io::Remove { from: Side::Target, keys, .. }) if keys == &[key("{t}0")]),
    );
    let cut = at(&|action| matches!(action, Action::Record { record: Record::CutOver { .. }, .. }));
    let serves = at(&|action| *action == Action::CommitAll);
    let purged = at(&|action| matches!(action, Action::Purge { side: Side::Source, .. }));
    let ended =
        at(&|action| matches!(action, Action::Record { record: Record::LegEnded { owner: Side::Target, .. }, .. }));
    assert!(removed < cut && cut < serves && serves < purged && purged < ended);
    assert_eq!(said.last(), Some(&Action::Io(Io::End(Outcome::Moved))));
}

#[test]
fn a_new_process_of_a_node_voids_the_copies() {
    for (side, begun) in [(Side::Source, false), (Side::Target, false), (Side::Source, true), (Side::Target, true)] {
        let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a", "{t}b"]);
        driven.is_held = true;
        driven.step(Event::Drained);
        driven.is_held = begun;
        if begun {
            // The initial copy is done; the node is lost during the copy of the last keys.
            driven.step(Event::Copied { batch: BatchId(1), outcomes: vec![Copied::Taken { bytes: 1 }; 2] });
            driven.step(written(1));
            driven.step(Event::Drained);
        }
        driven.take();
        driven.step(Event::Lost { side });
        driven.step(Event::Reconnected { side, process: process("another") });
        driven.step(Event::Drained);
        let said = driven.take();
        let Some(Action::Io(Io::End(outcome))) = said.last() else { panic!("{side:?}, {begun}: {said:?}") };
        assert_eq!(matches!(outcome, Outcome::Returned { .. }), begun, "{side:?}: {outcome:?}");
        assert_eq!(matches!(outcome, Outcome::NotBegun { .. }), !begun);
        assert!(!driven.records.iter().any(|record| matches!(record, Record::CutOver { .. })));
    }
}

#[test]
fn the_cut_over_record_decides_after_a_crash() {
    for (cut_over, given_up) in [(false, None), (true, None), (false, Some(Side::Source)), (true, Some(Side::Source))] {
        let open = OpenLeg {
            leg: 0,
            slots: orders().slots,
            moving: true,
            rolled_back: None,
            given_up,
            cut_over,
            behind: StaleCopies::NONE,
            source: process("a"),
            target: process("b"),
            eras: ProcessGenerations { source: 0, target: 0 },
            away: BTreeMap::new(),
        };
        let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, Some(open)), &[]);
        let goes_on = cut_over || given_up.is_some();
        assert_eq!(
            driven.take().contains(&Action::Announce { double_read: None }),
            goes_on,
            "workers know nothing of it"
        );
        driven.step(Event::Drained);
        let owner = if goes_on { Side::Target } else { Side::Source };
        let said = driven.take();
        assert_eq!(said.contains(&Action::CommitAll), cut_over);
        assert!(said.contains(&Action::HandOver { to: owner }), "{cut_over}, {given_up:?}: {said:?}");
        let purges = |side: Side| {
            said.iter().any(|action| matches!(action, Action::Purge { side: purged, .. } if *purged == side))
        };
        assert_eq!(purges(Side::Source), cut_over && given_up.is_none());
        assert_eq!(purges(Side::Target), !goes_on);
    }
}

#[test]
fn old_copies_are_not_served_after_a_crash_with_the_source_lost() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}0", "{t}a"]);
    driven.step(Event::Drained);
    driven.step(written(2));
    driven.is_held = true;
    driven.step(Event::Drained);
    let behind = driven
        .records
        .iter()
        .find_map(|record| if let Record::Behind { keys, .. } = record { Some(keys.clone()) } else { None });
    let Some(StaleCopies::These(behind)) = behind else { panic!("{:?}", driven.records) };
    let of = |name: &str| FINGERPRINTS.of(&key(name));
    assert_eq!(BTreeSet::from_iter(behind.iter().copied()), BTreeSet::from([of("{t}0"), of("{t}1")]));
    for (rewritten, wrong) in [
        (false, UnexpectedKeys::These(Arc::new(behind.iter().copied().collect()))),
        (true, UnexpectedKeys::AllBut(Arc::default())),
    ] {
        let keys = if rewritten { StaleCopies::Any } else { StaleCopies::These(behind.clone()) };
        // Left by an earlier router: the source was restarted, and the operator gives it up.
        let records = [
            Record::Begun {
                move_id: MoveId(1),
                source: NodeId(0),
                target: NodeId(1),
                slots: orders().slots,
                protocol: Protocol::Source,
                durability: Durability::Memory,
            },
            Record::LegBegun {
                move_id: MoveId(1),
                leg: 0,
                slots: orders().slots,
                source: process("a"),
                target: process("b"),
            },
            Record::LegMoving { move_id: MoveId(1), leg: 0 },
            Record::Behind { move_id: MoveId(1), leg: 0, keys },
        ];
        let open = Replay::of(&records).expect("no contradiction").open.remove(&MoveId(1)).and_then(|open| open.leg);
        let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, open), &[]);
        driven.step(Event::Lost { side: Side::Source });
        driven.step(Event::GiveUp { side: Side::Source });
        driven.step(Event::Drained);
        let said = driven.take();
        let at = |wanted: &Action| said.iter().position(|action| action == wanted);
        let removed = at(&Action::Purge { side: Side::Target, wrong });
        assert!(removed.is_some() && removed < at(&Action::HandOver { to: Side::Target }), "{said:?}");
    }
}

/// All keys are copied again, which is correct for any state of the source.
#[test]
fn copies_older_than_an_unnamed_write_are_void_until_removed() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a"]);
    driven.step(Event::Drained);
    driven.step(Event::Rewritten);
    driven.step(Event::Drained);
    let behind: Vec<&Record> = driven.records.iter().filter(|record| matches!(record, Record::Behind { .. })).collect();
    let of = |keys| Record::Behind { move_id: MoveId(1), leg: 0, keys };
    assert_eq!(behind, [&of(StaleCopies::Any), &of(StaleCopies::NONE)]);
}

#[test]
fn a_target_that_evicts_keys_before_the_cut_over_gets_nothing() {
    for begun in [false, true] {
        let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a"]);
        driven.step(Event::Drained);
        assert!(
            driven.take().contains(&Action::Announce { double_read: None }),
            "what it evicted before was none of them"
        );
        driven.evicted += u64::from(begun);
        driven.step(Event::Drained);
        if !begun {
            assert_eq!(driven.take().last(), Some(&Action::Io(Io::End(Outcome::Moved))));
            continue;
        }
        driven.step(Event::Drained);
        let said = driven.take();
        let Some(Action::Io(Io::End(Outcome::Returned { why }))) = said.last() else { panic!("{said:?}") };
        assert!(why.contains("has evicted keys since copying started (1)"), "{why}");
        assert!(!driven.records.iter().any(|record| matches!(record, Record::CutOver { .. })));
    }
}

#[test]
fn a_lost_source_is_not_waited_for_after_the_cut_over() {
    let open = OpenLeg {
        leg: 0,
        slots: orders().slots,
        moving: true,
        rolled_back: None,
        given_up: None,
        cut_over: true,
        behind: StaleCopies::NONE,
        source: process("a"),
        target: process("b"),
        eras: ProcessGenerations { source: 0, target: 0 },
        away: BTreeMap::new(),
    };
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, Some(open)), &[]);
    driven.step(Event::Lost { side: Side::Source });
    driven.step(Event::Drained);
    assert_eq!(driven.take().last(), Some(&Action::CommitAll), "the target serves");
    driven.now_us += 2_900_000;
    driven.step(Event::Tick);
    assert_eq!(driven.take(), []);
    driven.now_us += 200_000;
    driven.step(Event::Tick);
    let said = driven.take();
    assert!(said.contains(&Action::HandOver { to: Side::Target }), "{said:?}");
    assert_eq!(said.last(), Some(&Action::Io(Io::End(Outcome::Moved))));
}

/// A slow command that delays the drain must not cause another full copy.
#[test]
fn a_slow_drain_is_tried_again_after_another_round() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}a"]);
    driven.step(Event::Drained);
    driven.take();
    driven.now_us += 41_000;
    driven.step(Event::Tick);
    assert_eq!(driven.take(), [Action::Withdraw, Action::Observe, Action::Confirm { side: Side::Target }]);
    driven.step(written(1));
    driven.step(Event::Drained);
    assert_eq!(driven.take(), [Action::Announce { double_read: None }]);
    driven.now_us += 79_000;
    driven.step(Event::Tick);
    assert_eq!(driven.take(), [], "it has twice the time");
    driven.step(Event::Drained);
    assert_eq!(driven.copied().len(), 1);
}

/// A copy made before the last write of a key does not match the replies to its clients.
#[test]
fn no_stale_key_is_served_if_the_source_is_lost() {
    let mut driven = Driven::new(Precopy::new(orders(), true, FINGERPRINTS, None), &["{t}0", "{t}a"]);
    driven.step(Event::Drained);
    driven.step(written(2));
    driven.is_held = true;
    for _ in 0..3 {
        driven.step(Event::Drained);
    }
    assert!(
        driven
            .take()
            .iter()
            .any(|action| matches!(action, Action::Io(Io::Copy { keys, .. }) if keys.contains(&key("{t}0"))))
    );
    driven.step(Event::Lost { side: Side::Source });
    driven.step(Event::GiveUp { side: Side::Source });
    driven.step(Event::Tick);
    let said = driven.take();
    let removed = |action: &Action| matches!(action, Action::Io(Io::Remove { from: Side::Target, keys, .. }) if *keys == [key("{t}0"), key("{t}1")]);
    assert!(said.iter().any(removed), "{said:?}");
    assert!(
        matches!(driven.records.last(), Some(Record::LegEnded { owner: Side::Target, .. })),
        "{:?}",
        driven.records
    );
}
