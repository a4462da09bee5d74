//! Tests of the steps of a move, for all step results.

use std::collections::BTreeMap;

use switchyard_policy::migration::life::{
    Begin, LegSlots, ListedKeys, MoveEnd, MoveStateMachine, Step, StepResult, UserRequest,
};
use switchyard_policy::migration::record::{OpenLeg, OpenMove, ProcessGenerations, StaleCopies};
use switchyard_policy::migration::{Cause, Durability, MoveOptions, MoveOrder, Outcome, Process, Protocol, Side};
use switchyard_policy::topology::{NodeId, Slot};

const ABORTED: &str = "aborted by the user";

fn slots(numbers: &[u16]) -> Vec<Slot> {
    numbers.iter().map(|number| Slot::new(*number).expect("a slot")).collect()
}

fn order() -> MoveOrder {
    let (source, target) = (NodeId(0), NodeId(1));
    MoveOrder {
        source,
        target,
        slots: slots(&[1, 2, 3]),
        keys: None,
        how: MoveOptions::default(),
        cause: Cause::Requested(None),
    }
}

fn begin() -> Begin {
    Begin {
        order: order(),
        names: ["left".to_owned(), "right".to_owned()],
        resume: None,
        aborted: false,
        give_up: None,
    }
}

/// The router ended in leg 4 with slot 2; slot 1 had moved.
fn resumed() -> Begin {
    let process = Process { run_id: "r".to_owned(), client_id: 7 };
    let leg = OpenLeg {
        leg: 4,
        slots: slots(&[2]),
        moving: true,
        rolled_back: None,
        given_up: None,
        cut_over: false,
        behind: StaleCopies::NONE,
        source: process.clone(),
        target: process,
        eras: ProcessGenerations { source: 0, target: 0 },
        away: BTreeMap::new(),
    };
    let order = order();
    let resume = OpenMove {
        source: order.source,
        target: order.target,
        slots: order.slots,
        protocol: Protocol::Switchyard,
        durability: Durability::Memory,
        keys: None,
        handed_over: slots(&[1]),
        leg: Some(leg),
        next_leg: 5,
    };
    Begin { resume: Some(resume), ..begin() }
}

fn open(begin: &mut Begin) -> &mut OpenLeg {
    begin.resume.as_mut().and_then(|resume| resume.leg.as_mut()).expect("an open leg")
}

/// A move with a clock and the current step.
struct Moving {
    life: MoveStateMachine,
    step: Step,
    now_us: u64,
}

impl Moving {
    fn new(begin: Begin) -> Self {
        let (life, step) = MoveStateMachine::begin(begin, 0);
        Self { life, step, now_us: 0 }
    }

    fn came(&mut self, came: StepResult) -> &Step {
        self.now_us += 1000;
        self.step = self.life.on_result(came, self.now_us);
        &self.step
    }

    /// Completes the current step successfully: legs of one slot.
    fn succeed(&mut self) -> &Step {
        let came = match &self.step {
            Step::Measure => StepResult::Cut(self.life.slots_left().iter().copied().take(1).collect()),
            Step::Leg(_) => StepResult::Ended(Outcome::Moved),
            _ => StepResult::Done,
        };
        self.came(came)
    }

    /// Advances to the step with this name.
    fn until(mut self, name: &str) -> Self {
        for _ in 0..100 {
            if self.name() == name {
                return self;
            }
            self.succeed();
        }
        panic!("{name} does not come");
    }

    /// Name of the step without its fields.
    fn name(&self) -> String {
        let text = format!("{:?}", self.step);
        text.split([' ', '(', '{']).next().unwrap_or_default().to_owned()
    }

    fn run_to_end(&mut self) -> (Vec<String>, MoveEnd) {
        let mut names = Vec::new();
        for _ in 0..1000 {
            if let Step::End(end) = &self.step {
                return (names, end.clone());
            }
            names.push(self.name());
            self.succeed();
        }
        panic!("it does not end: {names:?}");
    }

    /// Duration, reason, and next step of a rest.
    fn rest(&self) -> (u64, &str, &Step) {
        let Step::Rest { us, activity: doing, then } = &self.step else { panic!("{:?} is no rest", self.step) };
        (*us, doing, then)
    }
}

fn stopped(why: &str) -> Step {
    Step::End(MoveEnd::Stopped(why.to_owned()))
}

fn leg(number: u32, of: &[u16]) -> LegSlots {
    LegSlots { number, slots: slots(of) }
}

const BEFORE: [&str; 6] = ["Connect", "Connect", "Check", "LearnWaits", "List", "Functions"];
const A_LEG: [&str; 6] = ["HandleRequests", "Measure", "Clocks", "Room", "Stage", "Leg"];

#[test]
fn an_undisturbed_move_runs_its_steps_in_order() {
    let (names, end) = Moving::new(begin()).run_to_end();
    let expected: Vec<&str> = [&BEFORE[..], &A_LEG, &A_LEG, &A_LEG, &["CheckSource"]].concat();
    assert_eq!((names, end), (expected.iter().map(|name| (*name).to_owned()).collect(), MoveEnd::Done));
}

#[test]
fn legs_are_numbered_and_moved_slots_are_not_left() {
    let mut moving = Moving::new(begin()).until("Leg");
    assert_eq!(moving.step, Step::Leg(leg(0, &[1])));
    moving.succeed();
    assert_eq!(moving.life.slots_left().iter().copied().collect::<Vec<_>>(), slots(&[2, 3]));
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(1, &[2])));
}

#[test]
fn an_abort_ends_the_move_at_every_step_before_all_has_moved() {
    for name in BEFORE.iter().chain(A_LEG.iter().filter(|name| **name != "Leg")) {
        let mut moving = Moving::new(begin()).until(name);
        assert!(!moving.life.is_cut_short());
        moving.life.on_user_request(UserRequest::Abort);
        assert!(moving.life.is_cut_short(), "{name}");
        assert_eq!(*moving.came(StepResult::Aborted), stopped(ABORTED), "{name}");
    }
}

#[test]
fn an_abort_in_a_leg_ends_the_move_with_the_leg() {
    let aborted = || {
        let mut moving = Moving::new(begin()).until("Leg");
        moving.life.on_user_request(UserRequest::Abort);
        moving
    };
    let why = "the user asks for it".to_owned();
    assert_eq!(*aborted().came(StepResult::Ended(Outcome::Returned { why: why.clone() })), stopped(&why));
    assert_eq!(*aborted().came(StepResult::Ended(Outcome::Moved)), stopped(ABORTED));
    // A leg that has not started is not tried again.
    let mut moving = aborted();
    moving.came(StepResult::Ended(Outcome::NotBegun { why }));
    assert!(moving.name() == "Rest" && moving.life.is_cut_short());
    assert_eq!(*moving.came(StepResult::Aborted), stopped(ABORTED));
}

#[test]
fn a_completely_moved_move_is_not_aborted() {
    let mut moving = Moving::new(begin()).until("CheckSource");
    moving.life.on_user_request(UserRequest::Abort);
    assert!(!moving.life.is_cut_short());
    // The move does not wait for a node either.
    moving.came(StepResult::Lost);
    assert_eq!(*moving.came(StepResult::Refused("refused".to_owned())), stopped("waiting for left: refused"));
    // The last leg was in progress.
    let mut last = Moving::new(Begin { order: MoveOrder { slots: slots(&[1]), ..order() }, ..begin() }).until("Leg");
    last.life.on_user_request(UserRequest::Abort);
    assert_eq!(last.run_to_end().1, MoveEnd::Done);
}

#[test]
fn a_step_repeats_after_a_lost_node_when_both_are_reached() {
    for name in ["Check", "LearnWaits", "List", "Functions", "Measure", "Clocks", "Room", "Stage", "CheckSource"] {
        let mut moving = Moving::new(begin()).until(name);
        let before = moving.step.clone();
        moving.came(StepResult::Lost);
        assert_eq!(moving.step, Step::Connect { side: Side::Source, then: Box::new(before.clone()) });
        // The source is reached at the second attempt.
        moving.came(StepResult::Refused("refused".to_owned()));
        let again = moving.rest().2.clone();
        assert_eq!(
            (moving.rest().1, &again),
            ("waiting for left: refused", &Step::Connect { side: Side::Source, then: Box::new(before.clone()) })
        );
        moving.succeed();
        moving.succeed();
        assert_eq!(moving.step, Step::Connect { side: Side::Target, then: Box::new(before.clone()) });
        assert_eq!(*moving.succeed(), before, "{name}");
    }
}

#[test]
fn a_leg_is_cut_again_if_its_node_is_lost_before_the_start() {
    let mut moving = Moving::new(begin()).until("Leg");
    moving.came(StepResult::Lost);
    assert_eq!(moving.step, Step::Connect { side: Side::Source, then: Box::new(Step::HandleRequests) });
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(0, &[1])), "it is the same one still");
}

#[test]
fn a_refusal_by_a_node_ends_the_move() {
    for name in ["Check", "List", "Functions", "Measure", "Clocks", "Room", "Stage", "CheckSource"] {
        let mut moving = Moving::new(begin()).until(name);
        assert_eq!(*moving.came(StepResult::Refused("it has no room".to_owned())), stopped("it has no room"), "{name}");
    }
}

#[test]
fn an_unstarted_leg_is_tried_again_when_the_source_is_fast() {
    let mut moving = Moving::new(begin()).until("Leg");
    moving.life.drained(50_000);
    assert_eq!(moving.life.drain_timeout_us(), 100_000);
    moving.came(StepResult::Ended(Outcome::NotBegun { why: "no drain".to_owned() }));
    assert_eq!(moving.rest(), (800_000, "trying again: no drain", &Step::Observe));
    moving.succeed();
    // The drain takes longer than clients may be delayed.
    moving.life.drained(3_500_000);
    moving.came(StepResult::Done);
    assert_eq!(moving.rest(), (250_000, "waiting for left: earlier commands took 3 s", &Step::Observe));
    moving.succeed();
    moving.life.drained(1_500_000);
    assert_eq!(*moving.came(StepResult::Done), Step::HandleRequests);
    assert_eq!(moving.life.drain_timeout_us(), 2_000_000, "no longer than that");
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(1, &[1])));
}

#[test]
fn the_drain_time_is_unknown_at_first() {
    let mut moving = Moving::new(begin()).until("Leg");
    assert_eq!(moving.life.drain_timeout_us(), 40_000);
    moving.came(StepResult::Ended(Outcome::NotBegun { why: "no drain".to_owned() }));
    assert_eq!(moving.rest().0, 320_000);
    // A source that answers one request in time may not answer two.
    moving.succeed();
    let mut moving = moving.until("Leg");
    assert_eq!(moving.life.drain_timeout_us(), 80_000);
    moving.came(StepResult::Ended(Outcome::Moved));
    assert_eq!(moving.life.drain_timeout_us(), 40_000);
}

#[test]
fn a_paused_move_begins_no_leg() {
    let mut moving = Moving::new(begin()).until("Leg");
    moving.life.on_user_request(UserRequest::Pause);
    moving.succeed();
    assert_eq!(moving.step, Step::HandleRequests);
    for _ in 0..3 {
        moving.succeed();
        assert_eq!(moving.rest(), (50_000, "paused", &Step::HandleRequests));
        moving.succeed();
    }
    moving.life.on_user_request(UserRequest::Resume);
    assert_eq!(*moving.succeed(), Step::Measure);
    // An aborted move does not wait for a pause to end.
    moving.life.on_user_request(UserRequest::Pause);
    moving.life.on_user_request(UserRequest::Abort);
    assert!(!moving.life.is_paused());
}

#[test]
fn an_open_leg_comes_first() {
    let mut moving = Moving::new(resumed());
    let left: Vec<Slot> = moving.life.slots_left().iter().copied().collect();
    assert_eq!((left, moving.life.open().map(|open| open.leg)), (slots(&[2, 3]), Some(4)));
    let (names, end) = moving.run_to_end();
    let expected = [&["Connect", "Connect", "Clocks", "Leg"][..], &BEFORE[2..], &A_LEG, &["CheckSource"]].concat();
    assert_eq!((names, end), (expected.iter().map(|name| (*name).to_owned()).collect(), MoveEnd::Done));
}

#[test]
fn an_open_leg_can_end_each_way() {
    let open = || Moving::new(resumed()).until("Leg");
    assert_eq!(open().step, Step::Leg(leg(4, &[2])));
    let mut moving = open();
    assert_eq!(*moving.came(StepResult::Ended(Outcome::Moved)), Step::Check);
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(5, &[3])));
    for outcome in [Outcome::Returned { why: "full".to_owned() }, Outcome::NotBegun { why: "full".to_owned() }] {
        let mut moving = open();
        assert_eq!(*moving.came(StepResult::Ended(outcome)), stopped("full"));
        assert!(moving.life.open().is_none());
    }
}

#[test]
fn an_unstarted_leg_is_not_open() {
    let mut begin = resumed();
    open(&mut begin).moving = false;
    let moving = Moving::new(begin);
    assert!(moving.life.open().is_none());
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(5, &[2])), "its number was used");
}

#[test]
fn an_open_leg_is_not_aborted_but_is_the_last() {
    let mut moving = Moving::new(Begin { aborted: true, ..resumed() });
    assert!(moving.life.is_aborted() && !moving.life.is_cut_short());
    moving = moving.until("Leg");
    assert!(!moving.life.is_cut_short());
    assert_eq!(*moving.came(StepResult::Ended(Outcome::Moved)), stopped(ABORTED));
    // If the leg is the rest of the move, the move is done.
    let mut begin = resumed();
    begin.order.slots = slots(&[1, 2]);
    assert_eq!(Moving::new(Begin { aborted: true, ..begin }).run_to_end().1, MoveEnd::Done);
}

#[test]
fn an_open_leg_waits_for_clocks_that_agree() {
    let mut moving = Moving::new(resumed()).until("Clocks");
    let clocks = moving.step.clone();
    moving.came(StepResult::Refused("they differ".to_owned()));
    assert_eq!(moving.rest(), (300_000, "waiting: they differ", &clocks));
    assert_eq!(*moving.succeed(), clocks);
    // The leg handles another loss of a side.
    assert_eq!(*moving.came(StepResult::Lost), Step::Leg(leg(4, &[2])));
    // If the leg could not start, all steps repeat.
    moving.came(StepResult::Lost);
    assert_eq!((moving.rest().0, moving.rest().1), (300_000, "resuming the open leg"));
    assert_eq!(moving.until("Leg").step, Step::Leg(leg(4, &[2])));
}

/// Returns the wait of an open leg for its absent nodes, in seconds, and the last reported activity.
fn waits_for(begin: Begin, absent: &[Side]) -> (Option<u64>, String) {
    let mut moving = Moving::new(begin);
    let mut told = String::new();
    while moving.now_us < 10_000_000 {
        match moving.step.clone() {
            Step::Connect { side, .. } if absent.contains(&side) => {
                moving.came(StepResult::Refused("refused".to_owned()))
            }
            Step::Rest { us, activity: doing, .. } => {
                (moving.now_us, told) = (moving.now_us + us, doing);
                moving.came(StepResult::Done)
            }
            Step::Clocks(_) => return (Some(moving.now_us / 1_000_000), told),
            _ => moving.came(StepResult::Done),
        };
    }
    (None, told)
}

#[test]
fn an_open_leg_continues_without_its_target_and_waits_for_source() {
    let told = |side: &str| format!("waiting for {side}: refused");
    assert_eq!(waits_for(resumed(), &[]), (Some(0), String::new()));
    assert_eq!(waits_for(resumed(), &[Side::Target]), (Some(3), told("right")));
    assert_eq!(waits_for(resumed(), &[Side::Source]), (None, told("left")));
    assert_eq!(waits_for(resumed(), &[Side::Source, Side::Target]), (None, told("right")));
}

#[test]
fn an_open_leg_that_is_at_its_target_needs_no_source() {
    let mut begin = resumed();
    open(&mut begin).cut_over = true;
    assert_eq!(waits_for(begin, &[Side::Source]).0, Some(0), "clients wait for its keys, and they are there");
}

#[test]
fn an_open_leg_continues_without_a_source_that_is_given_up() {
    let told = "waiting for left: refused".to_owned();
    let given_up = |side| Begin { aborted: true, give_up: Some(side), ..resumed() };
    assert_eq!(waits_for(given_up(Side::Source), &[Side::Source]), (Some(3), told));
    assert_eq!(waits_for(given_up(Side::Target), &[Side::Source]).0, None);
    assert_eq!(waits_for(given_up(Side::Source), &[Side::Source, Side::Target]).0, None);
    // The operator gives up the source during the wait.
    let mut moving = Moving::new(resumed());
    moving.now_us = 4_000_000;
    moving.came(StepResult::Refused("refused".to_owned()));
    moving.came(StepResult::Done);
    assert_eq!(moving.name(), "Rest");
    moving.life.on_user_request(UserRequest::GiveUp(Side::Source));
    moving.came(StepResult::Done);
    moving.came(StepResult::Refused("refused".to_owned()));
    assert_eq!(*moving.came(StepResult::Done), Step::Clocks(leg(4, &[2])));
}

#[test]
fn a_side_given_up_in_the_journal_is_not_contacted() {
    for (side, other) in [(Side::Source, Side::Target), (Side::Target, Side::Source)] {
        let mut begin = resumed();
        open(&mut begin).given_up = Some(side);
        let mut moving = Moving::new(begin);
        assert!(matches!(moving.step, Step::Connect { side, .. } if side == other));
        assert_eq!(*moving.came(StepResult::Done), Step::Clocks(leg(4, &[2])));
    }
}

#[test]
fn a_move_ends_with_a_leg_that_ended_without_one_side() {
    let lost = |side, keys, outcome| {
        let mut moving = Moving::new(begin()).until("Leg");
        moving.life.on_user_request(UserRequest::GiveUp(side));
        assert_eq!((moving.life.give_up(), moving.life.is_aborted()), (Some(side), true));
        moving.life.record_loss(side, keys);
        assert_eq!(moving.life.keys_lost(), keys);
        moving.came(StepResult::Ended(outcome)).clone()
    };
    let returned = || Outcome::Returned { why: "the target was abandoned by the user".to_owned() };
    assert_eq!(
        lost(Side::Target, 1, returned()),
        stopped("right was abandoned: at most 1 key moved there before are lost")
    );
    assert_eq!(
        lost(Side::Target, 12, returned()),
        stopped("right was abandoned: at most 12 keys moved there before are lost")
    );
    let of_source = "left was abandoned: its keys of the moving slots are lost";
    assert_eq!(lost(Side::Source, 0, Outcome::Moved), stopped(of_source));
}

/// Number of keys, bytes of big keys, and whether the list is incomplete, by slot.
struct Known(BTreeMap<u16, (u32, u64, bool)>);

impl ListedKeys for Known {
    fn keys(&self, slot: Slot) -> u32 {
        self.0[&slot.number()].0
    }

    fn big_bytes(&self, slot: Slot) -> u64 {
        self.0[&slot.number()].1
    }

    fn lacks_some(&self, slot: Slot) -> bool {
        self.0[&slot.number()].2
    }
}

#[test]
fn a_leg_has_as_many_whole_slots_as_fit() {
    let life = Moving::new(begin()).life;
    let cut = |of_slots: [(u32, u64, bool); 3], without: &[u16]| {
        let known = Known((1..).zip(of_slots).collect());
        let is_ours: Vec<bool> = (0..4).map(|slot| without.contains(&slot)).collect();
        life.cut(&known, 100, &is_ours).iter().map(|slot| slot.number()).collect::<Vec<_>>()
    };
    let keys = |keys| (keys, 0, false);
    assert_eq!(cut([keys(50), keys(50), keys(1)], &[]), [1, 2]);
    assert_eq!(cut([keys(50), keys(51), keys(1)], &[]), [1]);
    assert_eq!(cut([keys(500), keys(0), keys(1)], &[]), [1], "one at least");
    assert_eq!(cut([keys(50), keys(50), keys(1)], &[1]), [2, 3], "a slot in progress is not cut again");
    let big = |bytes| (1, bytes, false);
    assert_eq!(cut([big(400 << 20), big(200 << 20), keys(1)], &[]), [1]);
    assert_eq!(cut([big(400 << 20), keys(1), big(100 << 20)], &[]), [1, 2, 3]);
    assert_eq!(cut([big(4 << 30), keys(1), big(1)], &[]), [1, 2], "after a large slot come slots without big keys");
    let unsure = (1, 0, true);
    assert_eq!(cut([unsure, keys(1), unsure], &[]), [2], "slots to list again come last");
    assert_eq!(cut([unsure, keys(1), unsure], &[2]), [1, 3], "and together");
}
