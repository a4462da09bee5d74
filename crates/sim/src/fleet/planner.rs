//! The planner of the fleet: the cycle of `policy`, with the cadence of `control::planner`.
//!
//! Moves start at once; none is refused. With slices longer than the planner's interval it steps once per slice.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use switchyard_policy::load::ObservedLoad;
use switchyard_policy::planner::{
    Author, Bug, Cycle, FleetContext, KEY_COOLDOWN, Name, Next, Plan, Previous, Problem, Review, SLOT_COOLDOWN,
    Started, Step, StepSubject, fullest_at, nodes_of, solve,
};
use switchyard_policy::topology::{NodeId, Slot, Topology};

use super::moves::{Moves, orders_of};
use super::scenario::{Planner as Settings, seconds};

/// A key or slot that the planner has moved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Moved {
    Key(Name),
    Slot(Slot),
}

/// Counts of decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Decisions {
    /// Plans that were carried out.
    pub(super) made: u64,
    /// Plans that revert a failed one.
    pub(super) reverts: u64,
    /// Plans that did not help.
    pub(super) failed: u64,
    /// Keys and slots that moved back to their former node within their cooldown.
    pub(super) reversals: u64,
}

/// The planner.
#[derive(Debug)]
pub(super) struct Planner {
    cycle: Cycle,
    interval: f64,
    next_at: f64,
    bug: Option<Bug>,
    decisions: Decisions,
    /// Former node and time of the last move of a key or slot.
    moved: BTreeMap<Moved, (NodeId, Duration)>,
    /// Time spent in `solve`.
    solving: Duration,
}

fn solve_with(problem: &Problem, previous: &Previous, bug: Option<Bug>) -> Plan {
    #[cfg(feature = "planted-bugs")]
    if let Some(bug) = bug {
        return switchyard_policy::planner::solve_wrongly(problem, previous, bug);
    }
    let _ = bug;
    solve(problem, previous)
}

impl Planner {
    pub(super) fn new(settings: &Settings, bug: Option<Bug>) -> Self {
        let mut cycle = Cycle::default();
        cycle.tune(&settings.config());
        Self {
            cycle,
            interval: settings.interval,
            next_at: settings.interval,
            bug,
            decisions: Decisions::default(),
            moved: BTreeMap::new(),
            solving: Duration::ZERO,
        }
    }

    pub(super) fn decisions(&self) -> Decisions {
        self.decisions
    }

    pub(super) fn solving(&self) -> Duration {
        self.solving
    }

    /// Whether the next step is due at this time.
    pub(super) fn is_due(&mut self, at: f64) -> bool {
        // Sums of slices are inexact.
        let is_due = at >= self.next_at - 1e-6;
        if is_due {
            self.next_at = (self.next_at + self.interval).max(at);
        }
        is_due
    }

    /// Performs a step, and orders its moves.
    pub(super) fn step(
        &mut self,
        at: f64,
        topology: &Topology,
        load: &ObservedLoad,
        context: &FleetContext,
        moves: &mut Moves,
    ) {
        let now = seconds(at);
        self.cycle.note(now, topology, load);
        self.cycle.keep_relocated(|key| topology.placement_override(key));
        if self.cycle.is_idle() {
            return;
        }
        let (problem, previous) = self.cycle.problem(now, topology, load, context);
        let (bug, solving) = (self.bug, &mut self.solving);
        let solve = |problem: &Problem, previous: &Previous| {
            let began = Instant::now();
            let plan = solve_with(problem, previous, bug);
            *solving += began.elapsed();
            plan
        };
        let (ended, next) = self.cycle.step(now, &problem, &previous, |id| moves.is_open(id), solve);
        let failed = ended.iter().filter(|ended| matches!(ended.review, Some(Review::Unhelpful(_)))).count();
        self.decisions.failed += failed as u64;
        let Next::Begin(author, plan) = next else { return };
        let ids = moves.order(orders_of(&plan.steps, topology));
        self.decisions.made += 1;
        self.decisions.reverts += u64::from(author == Author::Revert);
        plan.steps.iter().for_each(|step| self.note_moved(now, step));
        let before = fullest_at(&problem, &nodes_of(&plan.steps));
        let decision = self.decisions.made;
        self.cycle.begun(now, Started { decision, author, plan, before, moves: ids });
    }

    fn note_moved(&mut self, now: Duration, step: &Step) {
        let (all, cooldown) = match &step.what {
            StepSubject::Key { key, .. } => (vec![Moved::Key(key.clone())], KEY_COOLDOWN),
            StepSubject::Slots(slots) => (slots.iter().map(|slot| Moved::Slot(*slot)).collect(), SLOT_COOLDOWN),
        };
        for moved in all {
            let before = self.moved.insert(moved, (step.from, now));
            let is_reversed = before.is_some_and(|(from, at)| from == step.to && now - at < cooldown);
            self.decisions.reversals += u64::from(is_reversed);
        }
    }
}
