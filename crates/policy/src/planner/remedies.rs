//! Several greedy ways to relieve nodes, each with a fit test. The cheapest sufficient one wins.
//!
//! Greedy, because each choice then has a short explanation: the hottest key that fits. Unnecessary keys and slots are
//! returned at the end.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    Alternative, Bug, Fleet, KeyAt, Name, Need, Place, Plan, Previous, Price, Problem, SlotAt, State, Step,
    StepSubject, Verdict, Way, advice, memory, unsplittable,
};
use crate::topology::{NodeId, Slot};

/// Overhead of a placement override in bytes: in the directory, at each worker, and in the state directory.
const EXCEPTION: f64 = 512.0;

/// Overhead of a slot in bytes: records, and the wait of its commands.
const SLOT: f64 = 4096.0;

/// Cost in bytes to scan one key of a node whose slots move.
const SCAN_COST: f64 = 16.0;

/// Minimum load of a slot to move, relative to the required relief.
const GRAIN: f64 = 1e-4;

/// Minimum load of a key to move, relative to the node's limit.
const KEY_GRAIN: f64 = 0.005;

/// Maximum remaining load, as a fraction, for a plan that leaves a node over its limit.
const MAX_REMAINING: f64 = 0.98;

/// Bounds of a search: largest keys or slots, roomiest targets, steps.
const SEARCHED_PIECES: usize = 24;
const SEARCHED_TARGETS: usize = 8;
const STEPS: u32 = 20_000;

/// A key or slot that could move.
#[derive(Clone, Copy)]
enum Piece<'p> {
    Key(&'p KeyAt),
    /// With the load of its listed keys, which move along.
    Slot(&'p SlotAt, f64),
}

impl Piece<'_> {
    fn load(&self) -> f64 {
        match self {
            Self::Key(key) => key.load(),
            Self::Slot(_, load) => *load,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Key(key) => key.bytes,
            Self::Slot(slot, _) => slot.bytes,
        }
    }

    fn price(&self) -> f64 {
        match self {
            Self::Key(key) => key.bytes as f64 + EXCEPTION,
            Self::Slot(slot, _) => slot.bytes as f64 + SLOT,
        }
    }

    fn slot(&self) -> Slot {
        match self {
            Self::Key(key) => key.slot,
            Self::Slot(slot, _) => slot.slot,
        }
    }

    fn worth(&self) -> f64 {
        self.load() / self.price()
    }
}

/// A key or slot with its move.
#[derive(Clone, Copy)]
struct Shift<'p> {
    piece: Piece<'p>,
    from: NodeId,
    to: NodeId,
}

/// Result of one way.
struct Attempt<'p> {
    way: Way,
    shifts: Vec<Shift<'p>>,
    price: Price,
    relieves: bool,
    /// Load of the fullest node afterwards, relative to its limit.
    fullest: f64,
    /// Sum of the excess of all nodes, relative to their limits.
    excess: f64,
}

pub(super) fn solve(problem: &Problem, previous: &Previous, fleet: &Fleet<'_>, over: &[NodeId]) -> Plan {
    // A node with an unsplittable load stays over its limit, whatever else moves away.
    let is_hopeless =
        |id: &&NodeId| fleet.nodes[*id].node.state != State::Leaving && unsplittable(problem, fleet, **id).is_some();
    let (hopeless, relievable): (Vec<&NodeId>, Vec<&NodeId>) = over.iter().partition(is_hopeless);
    let relievable: Vec<NodeId> = relievable.into_iter().copied().collect();
    let mut attempts = if relievable.is_empty() { Vec::new() } else { attempts(problem, previous, fleet, &relievable) };
    let alternatives = attempts.iter().skip(1).map(|attempt| Alternative {
        way: attempt.way,
        relieves: attempt.relieves,
        price: attempt.price,
        fullest: attempt.fullest,
    });
    let alternatives = alternatives.collect();
    let (shifts, mut price, relieves) = match attempts.is_empty() {
        true => (Vec::new(), Price::default(), true),
        false => {
            let Attempt { shifts, price, relieves, .. } = attempts.swap_remove(0);
            (shifts, price, relieves)
        }
    };
    assert_no_harm(problem, previous, fleet, &shifts);
    let mut steps = steps_of(&shifts);
    let memory = memory::relieve(problem, previous, fleet, &steps);
    for step in &memory.steps {
        let slots = if let StepSubject::Slots(slots) = &step.what { slots.len() } else { 0 };
        (price.bytes, price.slots, price.total) =
            (price.bytes + step.bytes, price.slots + slots, price.total + step.bytes as f64);
    }
    steps.extend(memory.steps);
    let verdict = match (relieves && hopeless.is_empty() && memory.is_complete, steps.is_empty()) {
        (true, true) if over.is_empty() => Verdict::Fine,
        (true, _) => Verdict::Relieved,
        (false, false) => Verdict::Partly,
        (false, true) => Verdict::NoneFound,
    };
    let at_work: BTreeSet<NodeId> = steps.iter().flat_map(|step| [step.from, step.to]).collect();
    for step in return_cold_keys(problem, previous, fleet, over, price) {
        if !at_work.contains(&step.from) && !at_work.contains(&step.to) {
            price.add_key(step.bytes);
            steps.push(step);
        }
    }
    let (nodes, advice) = (fleet.outlook(&steps), advice(problem, fleet, over));
    Plan { verdict, steps, price, nodes, alternatives, advice }
}

/// All ways to relieve these nodes, best first.
fn attempts<'p>(problem: &'p Problem, previous: &Previous, fleet: &Fleet<'p>, over: &[NodeId]) -> Vec<Attempt<'p>> {
    let mut attempts: Vec<Attempt<'_>> = [Way::KeysFirst, Way::Cheapest, Way::Slots, Way::CheapSlots]
        .map(|way| attempt(problem, previous, fleet, over, way))
        .into();
    if !attempts.iter().any(|attempt| attempt.relieves) {
        attempts.push(attempt(problem, previous, fleet, over, Way::Search));
    }
    attempts.sort_by(|one, other| {
        let order =
            |attempt: &Attempt<'_>| if attempt.relieves { (0, attempt.price.total) } else { (1, attempt.excess) };
        let ((one_kind, one), (other_kind, other)) = (order(one), order(other));
        one_kind.cmp(&other_kind).then(one.total_cmp(&other))
    });
    attempts
}

/// Asserts the conditions of each plan, for every way.
fn assert_no_harm(problem: &Problem, previous: &Previous, fleet: &Fleet<'_>, shifts: &[Shift<'_>]) {
    let mut loads: BTreeMap<NodeId, f64> = fleet.nodes.iter().map(|(id, place)| (*id, place.load)).collect();
    let mut bytes: BTreeMap<NodeId, u64> = BTreeMap::new();
    for shift in shifts {
        *loads.entry(shift.from).or_default() -= shift.piece.load();
        *loads.entry(shift.to).or_default() += shift.piece.load();
        *bytes.entry(shift.to).or_default() += shift.piece.bytes();
        let stays = match shift.piece {
            Piece::Key(key) => key.stays.is_some() || previous.keys.contains(&key.key),
            Piece::Slot(slot, _) => previous.slots.contains(&slot.slot),
        };
        assert!(!stays || fleet.nodes[&shift.from].node.state == State::Leaving, "pinned keys and slots do not move");
    }
    for shift in shifts {
        let (from, to) = (&fleet.nodes[&shift.from], &fleet.nodes[&shift.to]);
        let after = to.fullness(loads[&shift.to]);
        assert!(
            after <= 1.0 + 1e-9 && after <= from.fullness_before() + 1e-9,
            "no target ends worse than the node that it relieves"
        );
        assert!(to.has_memory(0, bytes[&shift.to]), "moved data fits into memory");
    }
    let keys = shifts.iter().filter(|shift| matches!(shift.piece, Piece::Key(_))).count();
    assert!(
        keys <= problem.knobs.keys_max && bytes.values().sum::<u64>() <= problem.knobs.bytes_max,
        "no more moves than may"
    );
}

/// State of an attempt.
struct Filling<'p, 'f> {
    fleet: &'f Fleet<'p>,
    loads: BTreeMap<NodeId, f64>,
    taken: BTreeMap<NodeId, u64>,
    keys_left: usize,
    bytes_left: u64,
    /// No two moves share a slot.
    slots: BTreeSet<Slot>,
    /// Number of keys and slots per node being removed; all must move.
    leaving: BTreeMap<NodeId, usize>,
    shifts: Vec<Shift<'p>>,
}

fn attempt<'p>(problem: &'p Problem, previous: &Previous, fleet: &Fleet<'p>, over: &[NodeId], way: Way) -> Attempt<'p> {
    let mut filling = Filling {
        fleet,
        loads: fleet.nodes.iter().map(|(id, place)| (*id, place.load)).collect(),
        taken: BTreeMap::new(),
        keys_left: problem.knobs.keys_max,
        bytes_left: problem.knobs.bytes_max,
        slots: BTreeSet::new(),
        leaving: BTreeMap::new(),
        shifts: Vec::new(),
    };
    let forgets = |_: &&Previous| !fleet.planted.is(Bug::ForgottenCooldown);
    let lately = Some(previous).filter(forgets);
    let recent_keys: BTreeSet<&Name> = lately.iter().flat_map(|previous| &previous.keys).collect();
    let recent_slots: BTreeSet<Slot> = lately.iter().flat_map(|previous| previous.slots.iter().copied()).collect();
    let mut by_node: BTreeMap<NodeId, Vec<Piece<'p>>> = over.iter().map(|id| (*id, Vec::new())).collect();
    let is_left = |id: NodeId| fleet.nodes[&id].node.state == State::Leaving;
    let takes_keys = |id: NodeId| is_left(id) || matches!(way, Way::KeysFirst | Way::Cheapest | Way::Search);
    let is_worth_it = |key: &KeyAt| key.load() > 0.0 && key.load() >= fleet.nodes[&key.at].limit * KEY_GRAIN;
    let keys = problem.keys.iter().filter(|key| takes_keys(key.at) && fleet.nodes.contains_key(&key.at));
    for key in
        keys.filter(|key| is_left(key.at) || key.stays.is_none() && !recent_keys.contains(&key.key) && is_worth_it(key))
    {
        // On a node being removed, a key at its slot owner moves with the slot.
        if let Some(pieces) = by_node.get_mut(&key.at).filter(|_| !(is_left(key.at) && key.at == key.home)) {
            pieces.push(Piece::Key(key));
        }
    }
    let mut of_keys: BTreeMap<Slot, f64> = BTreeMap::new();
    let mut pinned = recent_slots;
    for key in problem.keys.iter().filter(|key| key.at == key.home) {
        *of_keys.entry(key.slot).or_default() += key.load();
        if recent_keys.contains(&key.key) {
            pinned.insert(key.slot);
        }
    }
    for slot in &problem.slots {
        let load = slot.load + of_keys.get(&slot.slot).copied().unwrap_or_default();
        if let Some(pieces) =
            by_node.get_mut(&slot.at).filter(|_| is_left(slot.at) || !pinned.contains(&slot.slot) && load > 0.0)
        {
            pieces.push(Piece::Slot(slot, load));
        }
    }
    filling.leaving = by_node.iter().filter(|(id, _)| is_left(**id)).map(|(id, pieces)| (*id, pieces.len())).collect();
    let by_load = |one: &Piece<'_>, other: &Piece<'_>| other.load().total_cmp(&one.load());
    if way == Way::Search {
        let of_node = |(id, pieces): (NodeId, Vec<Piece<'p>>)| pieces.into_iter().map(move |piece| (id, piece));
        let mut pieces: Vec<(NodeId, Piece<'p>)> = by_node.into_iter().flat_map(of_node).collect();
        pieces.sort_by(|(_, one), (_, other)| by_load(one, other));
        pieces.truncate(SEARCHED_PIECES);
        filling.search(over, &pieces);
        return filling.ended(way, over);
    }
    for id in over {
        let mut pieces = by_node.remove(id).unwrap_or_default();
        let by_worth = |one: &Piece<'_>, other: &Piece<'_>| other.worth().total_cmp(&one.worth());
        let is_slot = |piece: &Piece<'_>| matches!(piece, Piece::Slot(..));
        // A stable sort: equal keys and slots keep the order of the problem.
        match way {
            Way::KeysFirst => pieces.sort_by(|one, other| {
                is_slot(one)
                    .cmp(&is_slot(other))
                    .then_with(|| if is_slot(one) { by_worth(one, other) } else { by_load(one, other) })
            }),
            Way::Cheapest | Way::CheapSlots => pieces.sort_by(by_worth),
            Way::Slots | Way::Search => pieces.sort_by(by_load),
        }
        filling.relieve(*id, &pieces, way);
    }
    filling.ended(way, over)
}

impl<'p> Filling<'p, '_> {
    /// Moves keys and slots away from a node, in order, until it is at its goal.
    fn relieve(&mut self, id: NodeId, pieces: &[Piece<'p>], way: Way) {
        let place = &self.fleet.nodes[&id];
        let is_left = place.node.state == State::Leaving;
        let first = self.shifts.len();
        for piece in pieces {
            let need = self.loads[&id] - place.goal;
            if !is_left && need <= 0.0 {
                break;
            }
            // Slots are too expensive for the hysteresis alone.
            if way == Way::KeysFirst && !is_left && matches!(piece, Piece::Slot(..)) && self.loads[&id] <= place.limit {
                break;
            }
            if !is_left && piece.load() < need * GRAIN {
                continue;
            }
            let is_key = matches!(piece, Piece::Key(_));
            if piece.bytes() > self.bytes_left || (is_key && self.keys_left == 0) || self.slots.contains(&piece.slot())
            {
                continue;
            }
            let Some(to) = self.target(id, piece) else { continue };
            self.take(Shift { piece: *piece, from: id, to });
        }
        if is_left {
            return;
        }
        // Returns unnecessary keys and slots, most expensive first.
        let mut order: Vec<usize> = (first..self.shifts.len()).collect();
        order.sort_by(|one, other| self.shifts[*other].piece.price().total_cmp(&self.shifts[*one].piece.price()));
        let mut back = BTreeSet::new();
        if self.loads[&id] <= place.goal {
            for at in order {
                let shift = self.shifts[at];
                if self.loads[&id] + shift.piece.load() <= place.goal {
                    back.insert(at);
                    self.undo_take(shift);
                }
            }
        }
        let mut at = 0;
        self.shifts.retain(|_| {
            at += 1;
            !back.contains(&(at - 1))
        });
    }

    /// Searches places for some of these keys and slots (largest first) so that all of these nodes are at their goals,
    /// or else at their limits. Leaves nodes being removed, and many nodes at once, to the greedy ways.
    fn search(&mut self, over: &[NodeId], pieces: &[(NodeId, Piece<'p>)]) {
        if over.len() > SEARCHED_TARGETS || over.iter().any(|id| self.fleet.nodes[id].node.state == State::Leaving) {
            return;
        }
        let room = |id: &NodeId| self.fleet.nodes[id].goal - self.loads[id];
        let mut targets: Vec<NodeId> =
            self.loads.keys().copied().filter(|id| over.contains(id) || room(id) > 0.0).collect();
        targets.sort_by(|one, other| room(other).total_cmp(&room(one)).then(one.cmp(other)));
        targets.truncate(SEARCHED_TARGETS);
        for most in [|place: &Place<'_>| place.goal, |place: &Place<'_>| place.limit] {
            if self.search_on(over, &targets, pieces, most, &mut { STEPS }) {
                // A piece that fitted at first may not fit in the end: other sources have added to the target.
                let fullness = |id: &NodeId| self.fleet.nodes[id].fullness(self.loads[id]);
                if self.shifts.iter().any(|shift| fullness(&shift.to) > self.fleet.nodes[&shift.from].fullness_before())
                {
                    for shift in std::mem::take(&mut self.shifts) {
                        self.undo_take(shift);
                    }
                }
                return;
            }
        }
    }

    fn search_on(
        &mut self,
        over: &[NodeId],
        targets: &[NodeId],
        pieces: &[(NodeId, Piece<'p>)],
        most: fn(&Place<'_>) -> f64,
        steps: &mut u32,
    ) -> bool {
        if *steps == 0 {
            return false;
        }
        *steps -= 1;
        let need = |filling: &Self, id: &NodeId| filling.loads[id] - most(&filling.fleet.nodes[id]);
        if over.iter().all(|id| need(self, id) <= 0.0) {
            return true;
        }
        let rest = |id: &NodeId| pieces.iter().filter(|(at, _)| at == id).map(|(_, piece)| piece.load()).sum::<f64>();
        let Some(((id, piece), others)) =
            pieces.split_first().filter(|_| over.iter().all(|id| need(self, id) <= rest(id)))
        else {
            return false;
        };
        let is_key = matches!(piece, Piece::Key(_));
        let may =
            piece.bytes() <= self.bytes_left && (!is_key || self.keys_left > 0) && !self.slots.contains(&piece.slot());
        if may && need(self, id) > 0.0 {
            for to in targets {
                if self.fits(&self.fleet.nodes[id], piece, &self.fleet.nodes[to], self.loads[to]) {
                    self.take(Shift { piece: *piece, from: *id, to: *to });
                    if self.search_on(over, targets, others, most, steps) {
                        return true;
                    }
                    self.shifts.pop();
                    self.undo_take(Shift { piece: *piece, from: *id, to: *to });
                }
            }
        }
        self.search_on(over, targets, others, most, steps)
    }

    fn take(&mut self, shift: Shift<'p>) {
        self.bytes_left -= shift.piece.bytes();
        self.keys_left -= usize::from(matches!(shift.piece, Piece::Key(_)));

        *self.loads.entry(shift.from).or_default() -= shift.piece.load();
        *self.loads.entry(shift.to).or_default() += shift.piece.load();
        *self.taken.entry(shift.to).or_default() += shift.piece.bytes();
        self.slots.insert(shift.piece.slot());
        self.shifts.push(shift);
    }

    /// Reverses [`Self::take`], except for the list of shifts.
    fn undo_take(&mut self, Shift { piece, from, to }: Shift<'p>) {
        self.loads.entry(from).and_modify(|load| *load += piece.load());
        self.loads.entry(to).and_modify(|load| *load -= piece.load());
        self.taken.entry(to).and_modify(|bytes| *bytes -= piece.bytes());
        self.bytes_left += piece.bytes();
        self.slots.remove(&piece.slot());
        self.keys_left += usize::from(matches!(piece, Piece::Key(_)));
    }

    /// Whether a piece of `source` may go to `place`, whose load is `load`.
    fn fits(&self, source: &Place<'_>, piece: &Piece<'_>, place: &Place<'_>, load: f64) -> bool {
        let (after, to) = (load + piece.load(), place.node.id);
        to != source.node.id
            && place.node.state == State::Ready
            && place.limit > 0.0
            && (self.fleet.planted.is(Bug::WorseThanBefore)
                || (after <= place.goal || source.node.state == State::Leaving && after <= place.limit)
                    && place.fullness(after) <= source.fullness_before())
            && place.has_memory(self.taken.get(&to).copied().unwrap_or_default(), piece.bytes())
    }

    /// Target of a piece: of the nodes where it fits, the least full one afterwards.
    fn target(&self, from: NodeId, piece: &Piece<'_>) -> Option<NodeId> {
        let source = &self.fleet.nodes[&from];
        // The slot owner is the cheapest target of a key: the return removes a placement override. Slots have no such
        // target.
        let home = match piece {
            Piece::Key(key) if key.at != key.home => Some(key.home),
            _ => None,
        };
        if let Some(home) = home.filter(|home| self.fits(source, piece, &self.fleet.nodes[home], self.loads[home])) {
            return Some(home);
        }
        // Iterates both maps together rather than by lookup: there may be thousands of both nodes and pieces.
        let places = self.fleet.nodes.values().zip(self.loads.values());
        let fitting = places.filter(|(place, load)| self.fits(source, piece, place, **load));
        let fullness = |(place, load): &(&Place<'_>, &f64)| place.fullness(*load + piece.load());
        fitting.min_by(|one, other| fullness(one).total_cmp(&fullness(other))).map(|(place, _)| place.node.id)
    }

    fn ended(mut self, way: Way, over: &[NodeId]) -> Attempt<'p> {
        let relieves =
            over.iter().all(|id| self.excess(*id) <= 0.0) || self.fleet.planted.is(Bug::InfeasibleTakenForFeasible);
        if !relieves {
            self.retain_helpful(over);
        }
        let mut sources: BTreeMap<NodeId, f64> = BTreeMap::new();
        let mut price = Price::default();
        for shift in &self.shifts {
            price.bytes += shift.piece.bytes();
            price.total += shift.piece.price();
            match shift.piece {
                Piece::Key(_) => price.keys += 1,
                Piece::Slot(..) => {
                    price.slots += 1;
                    sources.insert(shift.from, self.fleet.nodes[&shift.from].node.keys as f64 * SCAN_COST);
                }
            }
        }
        price.total += sources.values().sum::<f64>();
        let fullest =
            over.iter().filter(|id| !self.leaving.contains_key(id)).map(|id| self.fullness(*id)).fold(0.0, f64::max);
        let excess = over.iter().map(|id| self.excess(*id)).sum();
        Attempt { way, relieves, fullest, excess, price, shifts: self.shifts }
    }

    fn fullness(&self, id: NodeId) -> f64 {
        self.fleet.nodes[&id].fullness(self.loads[&id].max(0.0))
    }

    /// Excess of a node over its limit, as a fraction. For a node being removed: the fraction of its keys and slots
    /// that stay.
    fn excess(&self, id: NodeId) -> f64 {
        match self.leaving.get(&id) {
            Some(pieces) => {
                (pieces - self.shifts.iter().filter(|shift| shift.from == id).count()) as f64 / (*pieces).max(1) as f64
            }
            None => (self.fullness(id) - 1.0).max(0.0),
        }
    }

    /// Returns moves that do not help their source, because they are not worth their price. One node that cannot be
    /// helped must not prevent the relief of the others.
    fn retain_helpful(&mut self, over: &[NodeId]) {
        let helps = |id: NodeId| {
            let is_lower = || self.fullness(id) <= (self.fleet.nodes[&id].fullness_before() * MAX_REMAINING).max(1.0);
            // Other nodes may have relied on the room that the node made.
            self.leaving.contains_key(&id) || is_lower() || self.shifts.iter().any(|shift| shift.to == id)
        };
        let useless: BTreeSet<NodeId> = over.iter().copied().filter(|id| !helps(*id)).collect();
        let (kept, back) =
            std::mem::take(&mut self.shifts).into_iter().partition(|shift| !useless.contains(&shift.from));
        self.shifts = kept;
        let back: Vec<Shift<'p>> = back;
        back.into_iter().for_each(|shift| self.undo_take(shift));
    }
}

/// Combines slots with equal source and target in one step.
fn steps_of(shifts: &[Shift<'_>]) -> Vec<Step> {
    let mut steps = Vec::new();
    let mut slots: BTreeMap<(NodeId, NodeId), (Vec<Slot>, f64, u64)> = BTreeMap::new();
    for Shift { piece, from, to } in shifts {
        let (load, bytes) = (piece.load(), piece.bytes());
        match piece {
            Piece::Key(key) => {
                let what = StepSubject::Key { key: key.key.clone(), slot: key.slot, is_cold: false };
                steps.push(Step { what, from: *from, to: *to, load, bytes, need: Need::Requests });
            }
            Piece::Slot(slot, _) => {
                let all = slots.entry((*from, *to)).or_default();
                all.0.push(slot.slot);
                (all.1, all.2) = (all.1 + load, all.2 + bytes);
            }
        }
    }
    steps.extend(slots.into_iter().map(|((from, to), (mut slots, load, bytes))| {
        slots.sort_unstable();
        Step { what: StepSubject::Slots(slots), from, to, load, bytes, need: Need::Requests }
    }));
    steps
}

/// Moves cold keys back to their slot owner if it has room, within the budget left by other moves.
fn return_cold_keys(
    problem: &Problem,
    previous: &Previous,
    fleet: &Fleet<'_>,
    over: &[NodeId],
    spent: Price,
) -> Vec<Step> {
    let (keys_max, mut bytes_left) =
        (problem.knobs.keys_max.saturating_sub(spent.keys), problem.knobs.bytes_max.saturating_sub(spent.bytes));
    let recent: BTreeSet<&Name> = previous.keys.iter().collect();
    let mut taken: BTreeMap<NodeId, u64> = BTreeMap::new();
    let mut loads: BTreeMap<NodeId, f64> = BTreeMap::new();
    let may = |key: &&KeyAt| {
        let is_ready = |id: &NodeId| fleet.nodes.get(id).is_some_and(|place| place.node.state == State::Ready);
        key.is_cold
            && key.at != key.home
            && key.stays != Some(super::PinnedReason::Moving)
            && is_ready(&key.at)
            && is_ready(&key.home)
            && !over.contains(&key.home)
            && !recent.contains(&key.key)
    };
    let mut steps = Vec::new();
    for key in problem.keys.iter().filter(may) {
        if steps.len() >= keys_max {
            break;
        }
        let place = &fleet.nodes[&key.home];
        let load = loads.entry(key.home).or_insert(place.load);
        let bytes = taken.entry(key.home).or_default();
        if (*load + key.load() > place.goal && key.load() > 0.0)
            || !place.has_memory(*bytes, key.bytes)
            || key.bytes > bytes_left
        {
            continue;
        }
        bytes_left -= key.bytes;
        (*load, *bytes) = (*load + key.load(), *bytes + key.bytes);
        let what = StepSubject::Key { key: key.key.clone(), slot: key.slot, is_cold: true };
        steps.push(Step { what, from: key.at, to: key.home, load: key.load(), bytes: key.bytes, need: Need::Requests });
    }
    steps
}
