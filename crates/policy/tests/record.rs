//! Tests of move records: encoding, hostile bytes, and replay of a journal.

use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use proptest::prop_assert_eq;
use switchyard_policy::migration::record::{Record, Replay, StaleCopies};
use switchyard_policy::migration::{Durability, Fingerprint, Key, Process, Protocol, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot};

fn slots() -> impl Strategy<Value = Vec<Slot>> {
    prop::collection::btree_set(0_u16..16384, 0..200)
        .prop_map(|numbers| numbers.into_iter().filter_map(Slot::new).collect())
}

fn process() -> impl Strategy<Value = Process> {
    (".{0,50}", any::<u64>()).prop_map(|(run_id, client_id)| Process { run_id, client_id })
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::Source), Just(Side::Target)]
}

fn record() -> impl Strategy<Value = Record> {
    let keys = || prop::collection::vec(any::<u128>().prop_map(Fingerprint), 0..50);
    let head = || (any::<u64>().prop_map(MoveId), any::<u32>());
    prop_oneof![
        (
            any::<u64>(),
            any::<(u16, u16)>(),
            slots(),
            prop::sample::select(Protocol::ALL.map(|(protocol, _)| protocol).to_vec()),
            prop_oneof![Just(Durability::Memory), Just(Durability::Aof), Just(Durability::Replica)],
        )
            .prop_map(|(id, (source, target), slots, protocol, durability)| Record::Begun {
                move_id: MoveId(id),
                source: NodeId(source),
                target: NodeId(target),
                slots,
                protocol,
                durability,
            }),
        (head(), slots(), process(), process()).prop_map(|((move_id, leg), slots, source, target)| Record::LegBegun {
            move_id,
            leg,
            slots,
            source,
            target
        }),
        head().prop_map(|(move_id, leg)| Record::LegMoving { move_id, leg }),
        (head(), side(), process()).prop_map(|((move_id, leg), side, process)| Record::Met {
            move_id,
            leg,
            side,
            process
        }),
        (head(), keys()).prop_map(|((move_id, leg), keys)| Record::Moved { move_id, leg, keys }),
        (head(), keys()).prop_map(|((move_id, leg), keys)| Record::Committed { move_id, leg, keys }),
        (head(), ".{0,50}").prop_map(|((move_id, leg), why)| Record::RolledBack { move_id, leg, why }),
        (head(), keys()).prop_map(|((move_id, leg), keys)| Record::Returned { move_id, leg, keys }),
        (head(), side()).prop_map(|((move_id, leg), side)| Record::GivenUp { move_id, leg, side }),
        head().prop_map(|(move_id, leg)| Record::CutOver { move_id, leg }),
        (head(), keys(), any::<bool>()).prop_map(|((move_id, leg), keys, any)| {
            let keys = if any { StaleCopies::Any } else { StaleCopies::These(keys) };
            Record::Behind { move_id, leg, keys }
        }),
        (head(), side()).prop_map(|((move_id, leg), owner)| Record::LegEnded { move_id, leg, owner }),
        any::<u64>().prop_map(|id| Record::Ended { move_id: MoveId(id) }),
        (any::<u64>(), prop::collection::btree_set(prop::collection::vec(any::<u8>(), 0..20), 0..50)).prop_map(
            |(id, names)| Record::Keys { move_id: MoveId(id), keys: names.into_iter().map(Key::from).collect() }
        ),
    ]
}

proptest! {
    #[test]
    fn records_survive_encoding_and_decoding(record in record()) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        prop_assert_eq!(Record::decode(&bytes), Ok(record));
    }

    #[test]
    fn a_truncated_record_is_rejected(record in record(), keep in 0.0..1.0_f64) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        bytes.truncate((bytes.len() as f64 * keep) as usize);
        prop_assert_eq!(Record::decode(&bytes).ok(), None);
    }

    /// Decoding is exact: hostile bytes neither become another record nor cause a panic.
    #[test]
    fn hostile_bytes_decode_to_their_record_or_an_error(mut bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0_u8..10) {
        if let Some(first) = bytes.first_mut() {
            *first = 1;
        }
        if let Some(second) = bytes.get_mut(1) {
            *second = kind;
        }
        let _ = Record::decode(&bytes);
    }

    #[test]
    fn a_changed_byte_never_panics(record in record(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = Record::decode(&bytes);
    }
}

#[test]
fn a_key_costs_sixteen_bytes() {
    let mut bytes = Vec::new();
    let keys = vec![Fingerprint(u128::MAX); 1000];
    Record::Moved { move_id: MoveId(3), leg: 7, keys }.encode(&mut bytes);
    assert_eq!(bytes.len(), 1000 * 16 + 6);
}

fn met(run_id: &str, client_id: u64) -> Process {
    Process { run_id: run_id.to_owned(), client_id }
}

fn journal() -> Vec<Record> {
    let slots: Vec<Slot> = (5..8).filter_map(Slot::new).collect();
    let (move_id, leg) = (MoveId(4), 0);
    vec![
        Record::Begun {
            move_id,
            source: NodeId(1),
            target: NodeId(2),
            slots: slots.clone(),
            protocol: Protocol::Switchyard,
            durability: Durability::Memory,
        },
        Record::LegBegun { move_id, leg, slots: slots[..1].to_vec(), source: met("a", 1), target: met("b", 2) },
        Record::LegMoving { move_id, leg },
        Record::Moved { move_id, leg, keys: vec![Fingerprint(9), Fingerprint(3)] },
        Record::Met { move_id, leg, side: Side::Source, process: met("a", 7) },
        Record::Met { move_id, leg, side: Side::Target, process: met("c", 1) },
        Record::Moved { move_id, leg, keys: vec![Fingerprint(9)] },
    ]
}

#[test]
fn replay_finds_a_leg_in_progress() {
    let replay = Replay::of(&journal()).expect("a journal");
    assert_eq!(replay.last, 4);
    let open = &replay.open[&MoveId(4)];
    assert_eq!((open.next_leg, open.handed_over.len()), (1, 0));
    let leg = open.leg.as_ref().expect("under way");
    assert!(leg.moving && leg.rolled_back.is_none());
    assert_eq!((&leg.source, &leg.target), (&met("a", 7), &met("c", 1)));
    assert_eq!((leg.eras.source, leg.eras.target), (0, 1));
    let away: Vec<(u128, u32)> = leg.away.iter().map(|(key, eras)| (key.0, eras.target)).collect();
    assert_eq!(away, [(3, 0), (9, 1)], "the last record of a key counts");
}

#[test]
fn replay_finds_returned_and_moved_legs() {
    let (move_id, leg) = (MoveId(4), 0);
    let mut records = journal();
    records.push(Record::RolledBack { move_id, leg, why: "OOM".into() });
    records.push(Record::Returned { move_id, leg, keys: vec![Fingerprint(9)] });
    let replay = Replay::of(&records).expect("a journal");
    let open = replay.open[&move_id].leg.as_ref().expect("under way");
    assert_eq!(open.rolled_back.as_deref(), Some("OOM"));
    assert_eq!(open.away.keys().map(|key| key.0).collect::<Vec<_>>(), [3]);
    // The source is lost permanently: a return is impossible.
    let given_up =
        Replay::of(records.iter().chain([&Record::GivenUp { move_id, leg, side: Side::Source }])).expect("a journal");
    let open = given_up.open[&move_id].leg.as_ref().expect("under way");
    assert_eq!((open.given_up, open.rolled_back.as_deref()), (Some(Side::Source), None));
    records.push(Record::LegEnded { move_id, leg, owner: Side::Source });
    let slots: Vec<Slot> = (6..7).filter_map(Slot::new).collect();
    // A leg that fails to start, and then starts.
    for _ in 0..2 {
        records.push(Record::LegBegun {
            move_id,
            leg: 1,
            slots: slots.clone(),
            source: met("a", 1),
            target: met("b", 2),
        });
    }
    records.push(Record::LegBegun { move_id, leg: 2, slots: slots.clone(), source: met("a", 1), target: met("b", 2) });
    records.push(Record::LegMoving { move_id, leg: 2 });
    records.push(Record::LegEnded { move_id, leg: 2, owner: Side::Target });
    let open = Replay::of(&records).expect("a journal").open[&move_id].clone();
    assert_eq!((open.handed_over, open.leg, open.next_leg), (slots, None, 3));
    records.push(Record::Ended { move_id });
    let replay = Replay::of(&records).expect("a journal");
    assert!(replay.open.is_empty());
    assert_eq!(replay.last, 4);
}

#[test]
fn a_move_of_keys_records_them_before_its_first_leg() {
    let mut records = journal();
    let names = |names: &[&str]| names.iter().map(|name| Key::from(name.as_bytes())).collect::<Vec<_>>();
    let keys = Record::Keys { move_id: MoveId(4), keys: names(&["a", "b"]) };
    records.insert(1, keys.clone());
    let open = &Replay::of(&records).expect("a journal").open[&MoveId(4)];
    assert_eq!(open.keys.as_deref(), Some(&names(&["a", "b"])[..]));
    assert!(Replay::of(&[&records[..2], std::slice::from_ref(&keys)].concat()).is_err(), "told twice");
    assert!(Replay::of(&[journal(), vec![keys]].concat()).is_err(), "recorded too late");
    let mut bytes = Vec::new();
    Record::Keys { move_id: MoveId(4), keys: names(&["b", "a"]) }.encode(&mut bytes);
    assert!(Record::decode(&bytes).is_err(), "not in order");
}

#[test]
fn records_that_fit_no_move_are_errors() {
    let (move_id, leg) = (MoveId(4), 0);
    let misfits = [
        Record::Begun {
            move_id,
            source: NodeId(1),
            target: NodeId(2),
            slots: Vec::new(),
            protocol: Protocol::Switchyard,
            durability: Durability::Memory,
        },
        Record::Ended { move_id: MoveId(5) },
        // The location of the leg's keys is no longer recorded.
        Record::Ended { move_id },
        Record::LegMoving { move_id, leg: 1 },
        Record::LegBegun { move_id, leg: 1, slots: Vec::new(), source: met("a", 1), target: met("b", 2) },
        Record::Returned { move_id, leg, keys: Vec::new() },
        Record::LegEnded { move_id: MoveId(9), leg, owner: Side::Source },
    ];
    for misfit in misfits {
        let mut records = journal();
        records.push(misfit.clone());
        assert!(Replay::of(&records).is_err(), "{misfit:?}");
    }
    assert!(Replay::of(&[Record::LegMoving { move_id, leg }]).is_err());
    let early = Record::Moved { move_id, leg, keys: Vec::new() };
    assert!(Replay::of(journal()[..2].iter().chain([&early])).is_err(), "keys that move before the drain");
}
