//! Tests of published protocols: destinations of commands, and actions of the movers.

use switchyard_policy::migration::published::{Paper, Published, Rules, Way};
use switchyard_policy::migration::record::{OpenLeg, ProcessGenerations, StaleCopies};
use switchyard_policy::migration::tracker::{Kind, Pair, State};
use switchyard_policy::migration::{
    Action, BatchId, Copied, Durability, Event, Fingerprint, Fingerprinter, Io, Key, LegOrder, Machine, Outcome, Pace,
    Process, Protocol, Record, Side, Stored,
};
use switchyard_policy::topology::{MoveId, NodeId, crc16_slot};

fn rules(protocol: Protocol) -> (Paper, Rules) {
    let paper = Paper::of(protocol).expect("it is published");
    (paper, Rules::new(protocol, &paper, Pair(1)))
}

#[test]
fn each_state_has_its_destination() {
    use State::{Complete, InProgress, NotStarted, Unsure};
    use Way::{Both, Pull, Source, Target};
    for (protocol, reads, writes) in [
        // S1 to S4, as in NetMigrate's table.
        (Protocol::NetMigrate, [Source, Both, Pull, Both], [Source, Target, Target, Target]),
        (Protocol::Rocksteady, [Pull, Pull, Pull, Pull], [Target, Target, Target, Target]),
        (Protocol::Fulva, [Both, Both, Target, Both], [Target, Target, Target, Target]),
        (Protocol::Bloom, [Source, Source, Target, Source], [Source, Source, Target, Source]),
    ] {
        let (paper, rules) = rules(protocol);
        let of = |writes: bool| [NotStarted, InProgress, Complete, Unsure].map(|state| rules.route(state, writes));
        assert_eq!((of(false), of(true)), (reads, writes), "{protocol:?}");
        let unfiltered = Rules::new(protocol, &Paper { forwards: false, ..paper }, Pair(1));
        assert_eq!(unfiltered.route(NotStarted, false), if protocol == Protocol::Bloom { Target } else { reads[0] });
    }
    assert!(
        [Protocol::Switchyard, Protocol::StopAndCopy, Protocol::Source]
            .into_iter()
            .all(|protocol| Paper::of(protocol).is_none())
    );
}

#[test]
fn groups_are_ranges_of_hashes_of_one_size() {
    let (paper, rules) = rules(Protocol::NetMigrate);
    let fingerprints = Fingerprinter::new(7);
    let mut sizes = vec![0_u32; paper.groups as usize];
    for n in 0..100 * paper.groups {
        let key = fingerprints.of(n.to_string().as_bytes());
        let number = rules.number(key);
        assert_eq!(rules.group(key), rules.range(number));
        sizes[number as usize] += 1;
    }
    assert!(sizes.iter().all(|size| (40..180).contains(size)), "{sizes:?}");
    // Pairs share a filter, but no group.
    assert_ne!(rules.range(3), Rules::new(Protocol::NetMigrate, &paper, Pair(2)).range(3));
    let by_key = self::rules(Protocol::Bloom).1;
    assert_ne!(by_key.group(fingerprints.of(b"a")), by_key.group(fingerprints.of(b"b")));
}

/// Excluded by the paper: no state returns to S1.
#[test]
fn a_group_that_has_taken_a_write_goes_back_to_its_source() {
    let (paper, rules) = rules(Protocol::NetMigrate);
    let paper = Paper { groups: 1 << 13, ..paper };
    let mut tracker = paper.tracker.tracker(paper.geometry());
    let waiting: Vec<Fingerprint> = (1 << 12..1 << 13).map(|number| rules.range(number)).collect();
    let mut regressed = 0;
    for number in 0..1 << 10 {
        tracker.start(rules.range(number));
        let written: Vec<_> =
            waiting.iter().filter(|group| rules.route(tracker.state(**group), true) == Way::Target).collect();
        tracker.complete(rules.range(number));
        regressed += written.iter().filter(|group| rules.route(tracker.state(***group), false) == Way::Source).count();
    }
    assert!(regressed > 0, "a key written at the target is read at the source");
    let mut exact = Kind::Exact.tracker(paper.geometry());
    exact.start(rules.range(0));
    assert!(waiting.iter().all(|group| rules.route(exact.state(*group), true) == Way::Source));
}

const MAKE: Fingerprinter = Fingerprinter::new(7);

/// A mover of a published protocol. Records are durable, announcements known, and node requests done immediately.
struct Driven {
    leg: Published,
    now_us: u64,
    listed: Vec<Key>,
    actions: Vec<Action>,
    records: Vec<Record>,
    /// Keys refused by the target.
    refused: Vec<Key>,
    /// Announcements remain unanswered.
    holds_announcements: bool,
    /// A client creates another key at the source for each stored batch.
    creates: bool,
}

impl Driven {
    fn new(protocol: Protocol, paper: Paper, listed: &[&str], resume: Option<&OpenLeg>) -> Self {
        let orders = LegOrder {
            move_id: MoveId(1),
            leg: 0,
            source: NodeId(0),
            target: NodeId(1),
            slots: vec![crc16_slot(b"{t}")],
            durability: Durability::Memory,
            drain_timeout_us: 40_000,
        };
        let leg = Published::new(orders, &paper, Rules::new(protocol, &paper, Pair(1)), MAKE, resume);
        let listed = listed.iter().map(|name| Key::from(name.as_bytes())).collect();
        Self {
            leg,
            now_us: 0,
            listed,
            actions: Vec::new(),
            records: Vec::new(),
            refused: Vec::new(),
            holds_announcements: false,
            creates: false,
        }
    }

    fn meet(&mut self) {
        let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id: 1 };
        self.step(Event::Met { source: process("a"), target: process("b") });
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
                    Action::Announce { .. } if !self.holds_announcements => events.insert(0, Event::Drained),
                    Action::List { .. } => {
                        events.insert(0, Event::Listed { keys: std::mem::take(&mut self.listed), end: true })
                    }
                    Action::Purge { .. } => events.insert(0, Event::Purged),
                    Action::HandOver { .. } => events.insert(0, Event::HandedOver),
                    Action::Io(Io::Copy { batch, keys, .. }) => {
                        let outcomes = keys.iter().map(|_| Copied::Taken { bytes: 1 }).collect();
                        events.insert(0, Event::Copied { batch: *batch, outcomes });
                    }
                    Action::Io(Io::Store { batch, keys, .. } | Io::Overwrite { batch, keys, .. }) => {
                        let stored = |key: &Key| {
                            if self.refused.contains(key) { Stored::Refused("OOM".to_owned()) } else { Stored::Stored }
                        };
                        events.insert(0, Event::Stored { batch: *batch, outcomes: keys.iter().map(stored).collect() });
                        if self.creates {
                            events.insert(
                                0,
                                Event::Written { keys: vec![Key::from(format!("new{}", batch.0).into_bytes())] },
                            );
                        }
                    }
                    // From here on, clients are sent to the target.
                    Action::CommitAll => self.creates = false,
                    Action::Io(Io::Remove { batch, .. }) => events.insert(0, Event::Removed { batch: *batch }),
                    _ => {}
                }
            }
            self.actions.extend(actions);
        }
    }

    /// Advances time until the move ends; false if it never does.
    fn is_over(&mut self) -> bool {
        for _ in 0..10_000 {
            if self.outcome().is_some() {
                return true;
            }
            self.now_us += 20_000;
            self.step(Event::Tick);
        }
        false
    }

    fn outcome(&self) -> Option<&Outcome> {
        self.actions
            .iter()
            .find_map(|action| if let Action::Io(Io::End(outcome)) = action { Some(outcome) } else { None })
    }

    fn place(&self, is: impl Fn(&Action) -> bool) -> Option<usize> {
        self.actions.iter().position(is)
    }

    fn reports(&self) -> Vec<&str> {
        self.actions
            .iter()
            .filter_map(|action| if let Action::Io(Io::Report { text }) = action { Some(&text[..]) } else { None })
            .collect()
    }
}

fn paper(protocol: Protocol) -> Paper {
    Paper { groups: 8, ..Paper::of(protocol).expect("it is published") }
}

fn key(name: &str) -> Key {
    Key::from(name.as_bytes())
}

/// The filter of Bloom telemetry contains only keys at the target: five pairs of a thousand numbers each would fill it.
#[test]
fn only_groups_of_listed_keys_are_tracked() {
    let mut driven =
        Driven::new(Protocol::Bloom, Paper { groups: 1000, ..paper(Protocol::Bloom) }, &["{t}1", "{t}2", "{t}3"], None);
    driven.meet();
    assert!(driven.is_over());
    let tracked = |action: &Action| {
        if let Action::Io(Io::Track { groups, complete }) = action { Some((groups.len(), *complete)) } else { None }
    };
    let tracked: Vec<_> = driven.actions.iter().filter_map(tracked).collect();
    assert_eq!(tracked, [(3, true)]);
}

/// Clients keep creating keys at the source while the filter lacks them, which never changes.
#[test]
fn a_move_ends_although_keys_are_created_endlessly() {
    let mut driven = Driven::new(Protocol::Bloom, paper(Protocol::Bloom), &["{t}1"], None);
    driven.creates = true;
    driven.meet();
    assert!(driven.is_over());
    assert_eq!(driven.outcome(), Some(&Outcome::Moved));
}

/// Endless reads of keys that exist nowhere cause endless pulls.
#[test]
fn a_move_ends_although_keys_are_pulled_endlessly() {
    let mut driven = Driven::new(Protocol::Rocksteady, paper(Protocol::Rocksteady), &["{t}1"], None);
    driven.meet();
    for number in 0..1000 {
        driven.step(Event::Wanted { keys: vec![key(&format!("{{t}}none{number}"))] });
        driven.now_us += 7000;
        driven.step(Event::Tick);
    }
    assert_eq!(driven.outcome(), Some(&Outcome::Moved));
}

/// If a router ends while the source is being emptied, the next one does not copy the remaining keys again.
#[test]
fn the_complete_copy_is_recorded_before_the_source_is_emptied() {
    let mut driven = Driven::new(Protocol::NetMigrate, paper(Protocol::NetMigrate), &["{t}1"], None);
    driven.meet();
    assert!(driven.is_over());
    let cut = driven
        .place(|action| matches!(action, Action::Record { record: Record::CutOver { .. }, .. }))
        .expect("on record");
    let all = driven.place(|action| *action == Action::CommitAll).expect("clients use the target");
    let purge = driven.place(|action| matches!(action, Action::Purge { side: Side::Source, .. })).expect("emptied");
    assert!(cut < all && all < purge);
    // The move continues in this state.
    let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id: 1 };
    let open = OpenLeg {
        leg: 0,
        slots: vec![crc16_slot(b"{t}")],
        moving: true,
        rolled_back: None,
        given_up: None,
        cut_over: true,
        behind: StaleCopies::NONE,
        source: process("a"),
        target: process("b"),
        eras: ProcessGenerations { source: 0, target: 0 },
        away: std::collections::BTreeMap::new(),
    };
    let mut driven = Driven::new(Protocol::NetMigrate, paper(Protocol::NetMigrate), &["{t}left"], Some(&open));
    driven.meet();
    assert!(driven.is_over());
    assert!(
        driven.place(|action| matches!(action, Action::Io(Io::Copy { .. }))).is_none(),
        "remaining keys of the source are void"
    );
    assert!(driven.place(|action| matches!(action, Action::Purge { side: Side::Source, .. })).is_some());
}

#[test]
fn a_rollback_is_possible_until_keys_are_in_transit() {
    for is_announced in [false, true] {
        let mut driven = Driven::new(Protocol::NetMigrate, paper(Protocol::NetMigrate), &["{t}1"], None);
        if is_announced {
            driven.holds_announcements = true;
            driven.meet();
        }
        driven.step(Event::RollBack);
        assert!(matches!(driven.outcome(), Some(Outcome::NotBegun { .. })), "{is_announced}");
        assert_eq!(driven.place(|action| *action == Action::Withdraw).is_some(), is_announced);
    }
    let mut driven = Driven::new(Protocol::NetMigrate, paper(Protocol::NetMigrate), &["{t}1"], None);
    driven.step(Event::Pace(Pace { batch_keys: 1, batches: 0, interval_us: 0 }));
    driven.meet();
    driven.step(Event::RollBack);
    assert!(driven.outcome().is_none() && driven.reports()[0].contains("no rollback"));
}

/// A node may be lost permanently before any key has moved.
#[test]
fn a_side_can_be_given_up_before_keys_are_in_transit() {
    let mut driven = Driven::new(Protocol::NetMigrate, paper(Protocol::NetMigrate), &["{t}1"], None);
    driven.holds_announcements = true;
    driven.meet();
    driven.step(Event::Lost { side: Side::Target });
    driven.step(Event::GiveUp { side: Side::Target });
    assert!(matches!(driven.outcome(), Some(Outcome::NotBegun { .. })));
    assert!(
        !driven.records.iter().any(|record| matches!(record, Record::GivenUp { .. })),
        "replay rejects this for an unstarted leg"
    );
}

#[test]
fn a_repeatedly_refused_key_does_not_delay_the_move() {
    for protocol in [Protocol::NetMigrate, Protocol::Bloom] {
        let mut driven = Driven::new(protocol, paper(protocol), &["{t}1", "{t}2"], None);
        driven.refused = vec![key("{t}1")];
        driven.meet();
        assert!(driven.is_over());
        assert_eq!(
            driven.reports().into_iter().filter(|text| text.contains("1 keys are lost")).count(),
            1,
            "{:?}",
            driven.reports()
        );
    }
}

/// A value written by a client at the target is newer than a pulled one.
#[test]
fn a_pulled_key_does_not_overwrite_an_existing_one() {
    let mut driven = Driven::new(Protocol::Rocksteady, paper(Protocol::Rocksteady), &["{t}1"], None);
    driven.step(Event::Pace(Pace { batch_keys: 1, batches: 0, interval_us: 0 }));
    driven.meet();
    driven.step(Event::Wanted { keys: vec![key("{t}1")] });
    driven.now_us += 200_000;
    driven.step(Event::Tick);
    let stored = |action: &Action| matches!(action, Action::Io(Io::Store { batch: BatchId(1), .. }));
    assert!(
        driven.place(stored).is_some()
            && driven.place(|action| matches!(action, Action::Io(Io::Overwrite { .. }))).is_none()
    );
}

#[test]
fn an_adaptive_tracker_receives_its_errors() {
    let found = |driven: &Driven| {
        let found = |action: &Action| {
            if let Action::Io(Io::CorrectTracker { truth, .. }) = action { Some(*truth) } else { None }
        };
        driven.actions.iter().filter_map(found).collect::<Vec<_>>()
    };
    for (tracker, told) in [(Kind::Adaptive, vec![State::NotStarted]), (Kind::Bloom, vec![])] {
        let mut driven = Driven::new(Protocol::Bloom, Paper { tracker, ..paper(Protocol::Bloom) }, &["{t}1"], None);
        driven.step(Event::Pace(Pace { batch_keys: 1, batches: 0, interval_us: 0 }));
        driven.meet();
        driven.step(Event::Wanted { keys: vec![key("{t}1")] });
        assert_eq!(found(&driven), told, "{tracker:?}");
    }
    // Once the key has moved, the filter is right.
    let mut driven =
        Driven::new(Protocol::Bloom, Paper { tracker: Kind::Adaptive, ..paper(Protocol::Bloom) }, &["{t}1"], None);
    driven.listed.push(key("{t}2"));
    driven.meet();
    driven.step(Event::Wanted { keys: vec![key("{t}1")] });
    assert_eq!(found(&driven), []);
    let rules = Rules::new(Protocol::Bloom, &Paper { tracker: Kind::Adaptive, ..paper(Protocol::Bloom) }, Pair(1));
    assert_eq!([rules.route(State::Complete, false), rules.route(State::Complete, true)], [Way::Pull, Way::Target]);
}

#[test]
fn the_counting_filter_has_the_requested_size() {
    let published = Paper::of(Protocol::NetMigrate).expect("it is published");
    let counters = |paper: Paper| paper.geometry().under_way.map(|filter| filter.cells);
    assert_eq!(counters(published), Some(64), "16 for each of four groups");
    assert_eq!(counters(Paper { at_once: 8, ..published }), Some(128));
    for bytes in [128, 64, 32, 16] {
        let paper = Paper { counting_bytes: Some(bytes), ..published };
        assert_eq!(counters(paper), Some(u64::from(bytes)), "rows of Table 2");
        assert_eq!(paper.geometry().complete, published.geometry().complete);
    }
}
