//! Tests of a leg's state machine with restarts in the middle of a batch. The simulator (`crates/sim`) shows that all
//! rules together preserve client writes. These tests need three faults at once, which few seeds reach.

use switchyard_policy::migration::record::{OpenLeg, ProcessGenerations, Replay, StaleCopies};
use switchyard_policy::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprinter, Io, Key, Leg, LegOrder, Machine, Outcome, Process,
    Protocol, Record, Side, Stored, UnexpectedKeys,
};
use switchyard_policy::topology::{MoveId, NodeId, Slot};

const BATCH: BatchId = BatchId(0);

fn key(name: &str) -> Key {
    Key::from(name.as_bytes())
}

fn process(run_id: &str) -> Process {
    Process { run_id: run_id.to_owned(), client_id: 1 }
}

fn orders(durability: Durability) -> LegOrder {
    LegOrder {
        move_id: MoveId(1),
        leg: 0,
        source: NodeId(0),
        target: NodeId(1),
        slots: vec![Slot::new(7).expect("a slot")],
        durability,
        drain_timeout_us: 1_000_000,
    }
}

/// A leg and its last actions. Records are durable immediately, and confirmations arrive immediately.
struct Driven {
    leg: Leg,
    actions: Vec<Action>,
}

impl Driven {
    /// A moving leg with a batch of these keys being copied.
    fn moving(durability: Durability, keys: &[Key]) -> Self {
        let mut driven = Self { leg: Leg::new(orders(durability), Fingerprinter::new(7), None), actions: Vec::new() };
        driven.step(Event::Met { source: process("s1"), target: process("t1") });
        driven.step(Event::Purged);
        driven.step(Event::Drained);
        driven.take_all();
        driven.step(Event::Wanted { keys: keys.to_vec() });
        assert_eq!(
            driven.take_all(),
            vec![Action::Io(Io::Copy { batch: BATCH, from: Side::Source, keys: keys.to_vec() })]
        );
        driven
    }

    fn step(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.leg.step(event, 0, &mut actions);
        let last = actions
            .iter()
            .rev()
            .find_map(|action| if let Action::Record { number, .. } = action { Some(*number) } else { None });
        let asked =
            actions.iter().find_map(|action| if let Action::Confirm { side } = action { Some(*side) } else { None });
        self.actions.extend(actions);
        if let Some(number) = last {
            self.step(Event::Recorded(number));
        }
        if let Some(side) = asked {
            self.step(Event::Confirmed { side, evicted: 0 });
        }
    }

    /// Returns the node requests and commits since the last call.
    fn take_all(&mut self) -> Vec<Action> {
        let said = std::mem::take(&mut self.actions).into_iter();
        said.filter(|action| {
            matches!(
                action,
                Action::Io(Io::Copy { .. })
                    | Action::Io(Io::Store { .. })
                    | Action::Io(Io::Remove { .. })
                    | Action::Io(Io::Commit { .. })
            )
        })
        .collect()
    }

    /// The connection breaks, and a new process answers.
    fn restart(&mut self, side: Side, run_id: &str) {
        self.step(Event::Lost { side });
        self.step(Event::Reconnected { side, process: process(run_id) });
    }
}

#[test]
fn old_keys_of_a_copied_batch_are_removed_at_a_restarted_source() {
    let (there, absent) = (key("there"), key("absent"));
    let mut driven = Driven::moving(Durability::Memory, &[there.clone(), absent.clone()]);
    driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }, Copied::Absent] });
    assert_eq!(
        driven.take_all(),
        vec![Action::Io(Io::Remove { batch: BATCH, from: Side::Target, keys: vec![absent.clone()] })]
    );
    // The last snapshot may contain the absent key.
    driven.restart(Side::Source, "s2");
    driven.step(Event::Removed { batch: BATCH });
    assert_eq!(
        driven.take_all(),
        vec![Action::Io(Io::Store { batch: BATCH, to: Side::Target, keys: vec![there.clone()] })]
    );
    driven.step(Event::Stored { batch: BATCH, outcomes: vec![Stored::Stored] });
    assert_eq!(
        driven.take_all(),
        vec![Action::Io(Io::Remove { batch: BATCH, from: Side::Source, keys: vec![there.clone(), absent.clone()] })]
    );
    driven.step(Event::Removed { batch: BATCH });
    assert_eq!(driven.take_all(), vec![Action::Io(Io::Commit { keys: vec![there, absent] })]);
}

#[test]
fn keys_that_did_not_fit_into_a_batch_come_in_the_next_ones() {
    let keys = ["one", "two", "three"].map(key);
    let mut driven = Driven::moving(Durability::Memory, &keys);
    driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 4 << 20 }] });
    let (next, rest) = (BatchId(1), keys[1..].to_vec());
    let store = Action::Io(Io::Store { batch: BATCH, to: Side::Target, keys: keys[..1].to_vec() });
    let copy = Action::Io(Io::Copy { batch: next, from: Side::Source, keys: rest.clone() });
    let said = driven.take_all();
    assert!(said.len() == 2 && said.contains(&store) && said.contains(&copy), "{said:?}");
    driven.step(Event::Stored { batch: BATCH, outcomes: vec![Stored::Stored] });
    driven.step(Event::Removed { batch: BATCH });
    driven.take_all();
    // They are still requested, and no other keys of the leg are in flight.
    driven.step(Event::Copied { batch: next, outcomes: vec![Copied::Taken { bytes: 1 }; 2] });
    assert_eq!(driven.take_all(), vec![Action::Io(Io::Store { batch: next, to: Side::Target, keys: rest })]);
}

#[test]
fn copied_keys_are_stored_again_after_both_sides_restart() {
    let there = key("there");
    let mut driven = Driven::moving(Durability::Memory, std::slice::from_ref(&there));
    driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }] });
    driven.restart(Side::Source, "s2");
    driven.restart(Side::Target, "t2");
    driven.take_all();
    driven.step(Event::Purged);
    // Not copied again: the restarted source has an older value.
    assert_eq!(driven.take_all(), vec![Action::Io(Io::Store { batch: BATCH, to: Side::Target, keys: vec![there] })]);
}

#[test]
fn a_target_that_keeps_its_stored_keys_is_not_cleared() {
    for (durability, cleared) in [(Durability::Memory, true), (Durability::Aof, false)] {
        let there = key("there");
        let mut driven = Driven::moving(durability, std::slice::from_ref(&there));
        driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }] });
        driven.step(Event::Lost { side: Side::Source });
        driven.step(Event::Stored { batch: BATCH, outcomes: vec![Stored::Stored] });
        driven.step(Event::Secured { batch: BATCH, refused: None });
        // The keys are recorded. The target restarts, then the source returns as the same process.
        driven.restart(Side::Target, "t2");
        driven.step(Event::Purged);
        driven.take_all();
        driven.step(Event::Reconnected { side: Side::Source, process: process("s1") });
        let removed =
            driven.take_all().contains(&Action::Io(Io::Remove { batch: BATCH, from: Side::Target, keys: vec![there] }));
        assert_eq!(removed, cleared, "{durability:?}");
    }
}

#[test]
fn committed_keys_are_recorded_again_when_the_target_restarts() {
    let there = key("there");
    let mut driven = Driven::moving(Durability::Memory, std::slice::from_ref(&there));
    driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }] });
    driven.step(Event::Stored { batch: BATCH, outcomes: vec![Stored::Stored] });
    driven.step(Event::Removed { batch: BATCH });
    assert_eq!(driven.take_all().last(), Some(&Action::Io(Io::Commit { keys: vec![there.clone()] })));
    driven.restart(Side::Target, "t2");
    let records: Vec<&Record> = driven
        .actions
        .iter()
        .filter_map(|action| if let Action::Record { record, .. } = action { Some(record) } else { None })
        .collect();
    let fingerprint = Fingerprinter::new(7).of(&there);
    assert!(
        matches!(records.as_slice(), [Record::Met { side: Side::Target, .. }, Record::Committed { keys, .. }] if *keys == [fingerprint]),
        "{records:?}"
    );
    let is_told = |action: &Action| matches!(action, Action::Io(Io::Report { text }) if text.contains("Of 1 keys moved to the previous one"));
    assert!(driven.actions.iter().any(is_told), "durability memory does not wait, and the operator is informed");
}

/// Both nodes restarted with old data, and the router ended before the purge of the source.
#[test]
fn the_next_router_purges_committed_keys_at_a_restarted_source() {
    let there = Fingerprinter::new(7).of(b"there");
    let (move_id, leg, keys) = (MoveId(1), 0, vec![there]);
    let LegOrder { source, target, slots, durability, .. } = orders(Durability::Memory);
    let met = |side, run_id| Record::Met { move_id, leg, side, process: process(run_id) };
    let records = [
        Record::Begun { move_id, source, target, slots: slots.clone(), protocol: Protocol::Switchyard, durability },
        Record::LegBegun { move_id, leg, slots, source: process("s1"), target: process("t1") },
        Record::LegMoving { move_id, leg },
        Record::Moved { move_id, leg, keys: keys.clone() },
        met(Side::Source, "s2"),
        met(Side::Target, "t2"),
        Record::Committed { move_id, leg, keys },
    ];
    let open = Replay::of(&records).expect("a journal").open[&move_id].leg.clone();
    let mut driven =
        Driven { leg: Leg::new(orders(Durability::Memory), Fingerprinter::new(7), open), actions: Vec::new() };
    driven.step(Event::Met { source: process("s2"), target: process("t2") });
    driven.step(Event::Purged);
    let wrong = UnexpectedKeys::These(std::sync::Arc::new([there].into()));
    assert!(driven.actions.contains(&Action::Purge { side: Side::Source, wrong }), "{:?}", driven.actions);
}

#[test]
fn nothing_is_committed_before_workers_know_of_the_rollback() {
    let there = key("there");
    let mut driven = Driven::moving(Durability::Memory, std::slice::from_ref(&there));
    let open = OpenLeg {
        leg: 0,
        slots: vec![Slot::new(7).expect("a slot")],
        moving: true,
        given_up: None,
        cut_over: false,
        behind: StaleCopies::NONE,
        rolled_back: Some("it was aborted by the user".to_owned()),
        source: process("s1"),
        target: process("t1"),
        eras: ProcessGenerations { source: 0, target: 0 },
        away: Default::default(),
    };
    // The next router resumes the leg.
    driven.leg = Leg::new(orders(Durability::Memory), Fingerprinter::new(7), Some(open));
    driven.leg.step(Event::Met { source: process("s1"), target: process("t1") }, 0, &mut Vec::new());
    driven.step(Event::Wanted { keys: vec![there] });
    assert_eq!(driven.take_all(), vec![]);
}

#[test]
fn a_key_that_the_target_has_before_it_was_stored_rolls_the_leg_back() {
    let (strange, other) = (key("strange"), key("other"));
    let stored = || Event::Stored { batch: BATCH, outcomes: vec![Stored::Exists, Stored::Stored] };
    let read =
        || Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }, Copied::Taken { bytes: 1 }] };
    let mut driven = Driven::moving(Durability::Memory, &[strange.clone(), other.clone()]);
    driven.step(read());
    driven.take_all();
    driven.step(stored());
    driven.step(Event::Tick);
    let records: Vec<&Record> = driven
        .actions
        .iter()
        .filter_map(|action| if let Action::Record { record, .. } = action { Some(record) } else { None })
        .collect();
    assert!(matches!(records.as_slice(), [Record::RolledBack { .. }, ..]), "{records:?}");
    let turned = driven.actions.clone();
    let removed = driven.take_all().into_iter().any(|action| {
        matches!(action, Action::Io(Io::Remove { from: Side::Source, .. }) | Action::Io(Io::Commit { .. }))
    });
    assert!(!removed, "both keys stay where they are");
    // Only the key stored by the leg is removed at the target; the other key belongs to a client.
    let purges: Vec<&Action> = turned.iter().filter(|action| matches!(action, Action::Purge { .. })).collect();
    let wrong = UnexpectedKeys::These(std::sync::Arc::new([Fingerprinter::new(7).of(&other)].into()));
    assert_eq!(purges, [&Action::Purge { side: Side::Target, wrong }]);
    // After an attempt with unknown result, the key counts as stored by the leg.
    let mut driven = Driven::moving(Durability::Memory, &[strange.clone(), other.clone()]);
    driven.step(read());
    driven.step(Event::Lost { side: Side::Target });
    driven.step(Event::Reconnected { side: Side::Target, process: process("t1") });
    driven.take_all();
    driven.step(stored());
    assert_eq!(
        driven.take_all(),
        vec![Action::Io(Io::Remove { batch: BATCH, from: Side::Source, keys: vec![strange, other] })]
    );
}

/// A leg with one key moved that has lost a side.
fn one_has_moved(there: &Key, lost: Side) -> Driven {
    let mut driven = Driven::moving(Durability::Memory, std::slice::from_ref(there));
    driven.step(Event::Copied { batch: BATCH, outcomes: vec![Copied::Taken { bytes: 1 }] });
    driven.step(Event::Stored { batch: BATCH, outcomes: vec![Stored::Stored] });
    driven.step(Event::Removed { batch: BATCH });
    driven.step(Event::GiveUp { side: lost });
    let is_report = |action: &Action| matches!(action, Action::Io(Io::Report { text }) if text.contains("replies, so it is not abandoned"));
    assert!(driven.actions.iter().any(is_report) && driven.leg.progress().given_up.is_none(), "{:?}", driven.actions);
    driven.step(Event::Lost { side: lost });
    driven.actions.clear();
    driven
}

/// Records and slot actions since the last call.
fn decided(driven: &mut Driven) -> Vec<Action> {
    let is_decision = |action: &Action| {
        let moves =
            Action::Record { number: 0, record: Record::Moved { move_id: MoveId(1), leg: 0, keys: Vec::new() } };
        let is_record = std::mem::discriminant(action) == std::mem::discriminant(&moves);
        is_record
            || matches!(
                action,
                Action::RollBack { .. }
                    | Action::Announce { .. }
                    | Action::Lost { .. }
                    | Action::HandOver { .. }
                    | Action::Io(Io::End(_))
            )
    };
    let number_0 =
        |action| if let Action::Record { record, .. } = action { Action::Record { number: 0, record } } else { action };
    std::mem::take(&mut driven.actions).into_iter().filter(is_decision).map(number_0).collect()
}

fn record(record: Record) -> Action {
    Action::Record { number: 0, record }
}

#[test]
fn a_leg_without_its_target_ends_at_the_source_after_the_drain() {
    let there = key("there");
    let mut driven = one_has_moved(&there, Side::Target);
    let (move_id, leg) = (MoveId(1), 0);
    let fingerprint = Fingerprinter::new(7).of(&there);
    driven.step(Event::GiveUp { side: Side::Target });
    let why = "the target was abandoned by the user".to_owned();
    assert_eq!(
        decided(&mut driven),
        vec![
            record(Record::GivenUp { move_id, leg, side: Side::Target }),
            record(Record::RolledBack { move_id, leg, why: why.clone() }),
            Action::RollBack { why: why.clone(), away: std::sync::Arc::new([fingerprint].into()) },
        ]
    );
    // The target returns too late.
    driven.step(Event::Reconnected { side: Side::Target, process: process("t1") });
    driven.step(Event::Tick);
    assert_eq!(decided(&mut driven), vec![]);
    driven.step(Event::Drained);
    assert_eq!(
        decided(&mut driven),
        vec![
            Action::Lost { keys: vec![fingerprint] },
            record(Record::LegEnded { move_id, leg, owner: Side::Source }),
            Action::HandOver { to: Side::Source },
        ]
    );
    driven.step(Event::HandedOver);
    assert_eq!(decided(&mut driven), vec![Action::Io(Io::End(Outcome::Returned { why }))]);
}

#[test]
fn a_leg_without_its_source_ends_at_the_target_with_copied_keys() {
    let (there, read) = (key("there"), key("read"));
    let mut driven = one_has_moved(&there, Side::Target);
    driven.step(Event::Reconnected { side: Side::Target, process: process("t1") });
    driven.step(Event::Wanted { keys: vec![read.clone()] });
    driven.step(Event::Copied { batch: BatchId(1), outcomes: vec![Copied::Taken { bytes: 1 }] });
    driven.step(Event::Lost { side: Side::Source });
    driven.actions.clear();
    driven.step(Event::GiveUp { side: Side::Source });
    let (move_id, leg) = (MoveId(1), 0);
    assert_eq!(
        decided(&mut driven),
        vec![record(Record::GivenUp { move_id, leg, side: Side::Source })],
        "copied keys are being stored"
    );
    driven.step(Event::Stored { batch: BatchId(1), outcomes: vec![Stored::Stored] });
    let keys = vec![Fingerprinter::new(7).of(&read)];
    assert_eq!(
        decided(&mut driven),
        vec![
            record(Record::Moved { move_id, leg, keys }),
            Action::Lost { keys: vec![] },
            record(Record::LegEnded { move_id, leg, owner: Side::Target }),
            Action::HandOver { to: Side::Target },
        ]
    );
    driven.step(Event::HandedOver);
    assert_eq!(decided(&mut driven), vec![Action::Io(Io::End(Outcome::Moved))]);
}

#[test]
fn a_quiesce_request_is_confirmed_while_or_after_a_leg_ends() {
    let mut driven =
        Driven { leg: Leg::new(orders(Durability::Memory), Fingerprinter::new(7), None), actions: Vec::new() };
    driven.step(Event::Met { source: process("s1"), target: process("t1") });
    driven.step(Event::Purged);
    let mut actions = Vec::new();
    // Commands sent to the source earlier are not answered in time: the leg gives up in the same step as the quiesce
    // request.
    driven.leg.step(Event::Quiesce, 5_000_000, &mut actions);
    let has = |actions: &[Action], what: fn(&Io) -> bool| {
        actions.iter().any(|action| matches!(action, Action::Io(io) if what(io)))
    };
    assert!(
        has(&actions, |io| matches!(io, Io::End(Outcome::NotBegun { .. }))) && has(&actions, |io| *io == Io::Quiet),
        "{actions:?}"
    );
    actions.clear();
    driven.leg.step(Event::Quiesce, 5_000_000, &mut actions);
    assert_eq!(actions, [Action::Io(Io::Quiet)]);
}
