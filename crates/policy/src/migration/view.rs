//! Routing of commands whose keys are in transit: destination, wait, and messages to movers. Each worker decides by
//! itself, from the topology and the published state of each leg ([`LegView`]).
//!
//! - **Destination**: [`LegView::place`] for a key. [`moved`] returns the topology for commands whose keys are all
//!   committed, so later code need not know of moves.
//! - **Decision**: [`KeyLookup`] finds the missing keys of a command, and returns its [`Decision`].
//! - **Wait**: [`Waits`] holds a command until its missing keys are committed.
//! - **Messages**: [`Waits::begin`] returns the requests to movers, each once. [`observed`] finds the move to notify of
//!   a write while keys are being listed.
//!
//! A command whose keys are all committed costs no allocation here. This module is not called while no slot is in
//! transit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::injected::{Bug, InjectedBug};
use super::published::Rules;
use super::tracker::State;
use super::{DoubleRead, Fingerprint, FingerprintSet, Fingerprinter, Key, Side, is_temporary};
use crate::topology::{MoveId, NodeId, Slot, Stage, Topology, Transit};

/// The committed keys of a leg. Only its mover adds keys, and none is ever removed. A worker that does not yet see a
/// commit only sends a superfluous request.
pub trait Committed {
    /// Whether a key is committed.
    fn has(&self, key: Fingerprint) -> bool;

    /// Whether all keys are committed, also keys never listed.
    fn has_all(&self) -> bool;

    /// State of a group in the switch's tracker. Used only by published protocols.
    fn state(&self, _group: Fingerprint) -> State {
        State::NotStarted
    }

    /// Registers the worker as a waiter: the next commit notifies it, once. Checks after this call see all earlier
    /// commits.
    fn will_wait(&self, worker: usize);
}

/// The keys of a leg that does not move whole slots.
#[derive(Debug)]
pub struct Scope {
    keys: Vec<Key>,
    fingerprints: FingerprintSet,
}

impl Scope {
    /// Creates a scope of sorted keys.
    #[must_use]
    pub fn new(keys: Vec<Key>, fingerprints: Fingerprinter) -> Self {
        debug_assert!(keys.is_sorted());
        let set = keys.iter().map(|key| fingerprints.of(key)).collect();
        Self { keys, fingerprints: set }
    }

    /// Sorted keys.
    #[must_use]
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// Whether the scope contains a key.
    #[must_use]
    pub fn contains_name(&self, key: &[u8]) -> bool {
        self.keys.binary_search_by(|known| known[..].cmp(key)).is_ok()
    }

    fn has(&self, key: Fingerprint) -> bool {
        self.fingerprints.contains(&key)
    }
}

/// Place of use of a key of a leg.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// The key does not move: its present owner.
    Owner,
    /// This side.
    At(Side),
    /// No side, until the key is committed.
    Uncommitted,
}

/// Destination of a command for a key, by a protocol as published.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The source.
    Source,
    /// The target.
    Target,
    /// Both, for a read: the target's reply if it has the key, otherwise the source's.
    Both,
    /// The target, for a read. A key that it lacks is fetched, and the read is sent again.
    Pull,
}

/// A leg, as published to workers.
#[derive(Debug)]
pub struct LegView<C> {
    committed: Arc<C>,
    /// If the leg goes back: keys that have to return. All others are at the source.
    away: Option<Arc<BTreeSet<Fingerprint>>>,
    /// The keys that move, if not whole slots.
    scope: Option<Arc<Scope>>,
    /// Permits reads of uncommitted keys at both sides, under its condition.
    double_read: Option<Arc<DoubleRead>>,
    /// Routing rules of a protocol as published.
    published: Option<Rules>,
    fingerprints: Fingerprinter,
}

/// Published legs, by move and leg number.
pub type Legs<C> = BTreeMap<(MoveId, u32), LegView<C>>;

impl<C> Clone for LegView<C> {
    fn clone(&self) -> Self {
        self.with_direction(self.committed.clone(), self.away.clone(), self.double_read.clone())
    }
}

impl<C> LegView<C> {
    /// Creates a view of a leg to its target, without committed keys.
    #[must_use]
    pub const fn new(committed: Arc<C>, scope: Option<Arc<Scope>>, fingerprints: Fingerprinter) -> Self {
        Self { committed, away: None, scope, double_read: None, published: None, fingerprints }
    }

    /// Sets the rules of a protocol as published.
    #[must_use]
    pub fn as_published(self, rules: Option<Rules>) -> Self {
        Self { published: rules, ..self }
    }

    /// Returns the view after a change of direction: back, for the keys `away`, or to the target. Earlier commits no
    /// longer apply.
    #[must_use]
    pub fn with_direction(
        &self,
        committed: Arc<C>,
        away: Option<Arc<BTreeSet<Fingerprint>>>,
        double_read: Option<Arc<DoubleRead>>,
    ) -> Self {
        Self {
            committed,
            away,
            scope: self.scope.clone(),
            double_read,
            published: self.published,
            fingerprints: self.fingerprints,
        }
    }

    /// Whether the leg uses a protocol as published.
    #[must_use]
    pub const fn is_published(&self) -> bool {
        self.published.is_some()
    }

    /// Committed keys of the leg.
    #[must_use]
    pub const fn committed(&self) -> &Arc<C> {
        &self.committed
    }

    /// The keys that move, if not whole slots.
    #[must_use]
    pub fn scope(&self) -> Option<&Arc<Scope>> {
        self.scope.as_ref()
    }

    /// Workers use committed keys at this side.
    #[must_use]
    pub const fn to(&self) -> Side {
        if self.away.is_some() { Side::Source } else { Side::Target }
    }
}

impl<C: Committed> LegView<C> {
    /// Returns the place of a key of the leg's slots that lives at the source. No other code decides this.
    #[must_use]
    pub fn place(&self, key: Fingerprint) -> Place {
        if self.scope.as_ref().is_some_and(|scope| !scope.has(key)) {
            return Place::Owner;
        }
        let never_left = self.away.as_ref().is_some_and(|away| !away.contains(&key));
        if never_left || self.committed.has_all() || self.committed.has(key) {
            Place::At(self.to())
        } else {
            Place::Uncommitted
        }
    }

    /// Returns the destination of a command for a key, by a protocol as published.
    fn way(&self, rules: &Rules, key: Fingerprint, writes: bool) -> Way {
        if self.committed.has_all() {
            return Way::Target;
        }
        match rules.route(self.committed.state(rules.group(key)), writes) {
            // The key has been pulled.
            Way::Pull if self.committed.has(key) => Way::Target,
            // The key has been fetched as one of a sample.
            Way::Both if rules.fetches_one_in() > 0 && self.committed.has(key) => Way::Target,
            way => way,
        }
    }

    /// Whether a command need not wait for a key; `None`: for the whole leg.
    fn is_available(&self, key: Option<Fingerprint>) -> bool {
        key.map_or_else(
            || self.committed.has_all(),
            |key| self.place(key) != Place::Uncommitted || self.is_elsewhere(key),
        )
    }

    /// Whether the repaired tracker places a key at the source.
    fn is_elsewhere(&self, key: Fingerprint) -> bool {
        self.published.is_some_and(|rules| rules.repairs() && self.way(&rules, key, false) == Way::Source)
    }
}

/// Returns the topology for commands whose keys are all committed: moving keys are handed over in it. `None` if no slot
/// is moving.
#[must_use]
pub fn moved<C>(topology: &Topology, legs: &Legs<C>) -> Option<Topology> {
    moved_by(topology, legs, |_| true)
}

/// Returns the topology in which the moving keys of the selected legs are handed over, and those of unpublished legs.
fn moved_by<C>(topology: &Topology, legs: &Legs<C>, selects: impl Fn(&LegView<C>) -> bool) -> Option<Topology> {
    if topology.is_settled() {
        return None;
    }
    let mut slots_to: Vec<(NodeId, Vec<Slot>)> = Vec::new();
    let mut keys_to: BTreeMap<(MoveId, u32), (NodeId, &Scope, Vec<Slot>)> = BTreeMap::new();
    for slot in Slot::numbers() {
        let Some(transit) = topology.transit(slot) else { continue };
        let Stage::Moving { leg } = transit.stage else { continue };
        let view = legs.get(&(transit.move_id, leg));
        if view.is_some_and(|view| !selects(view)) {
            continue;
        }
        let goes_back = view.is_some_and(|view| view.to() == Side::Source);
        if transit.keys_only {
            if let Some(scope) = view.and_then(|view| view.scope.as_deref()).filter(|_| !goes_back) {
                keys_to
                    .entry((transit.move_id, leg))
                    .or_insert_with(|| (transit.target, scope, Vec::new()))
                    .2
                    .push(slot);
            }
            continue;
        }
        let node = if goes_back { transit.source } else { transit.target };
        match slots_to.iter_mut().find(|(to, _)| *to == node) {
            Some((_, slots)) => slots.push(slot),
            None => slots_to.push((node, vec![slot])),
        }
    }
    if slots_to.is_empty() && keys_to.is_empty() {
        return None;
    }
    let mut next = topology.clone();
    for (node, scope, slots) in keys_to.into_values() {
        next = next.keys_handed_over(&slots, scope.keys(), node);
    }
    for (node, slots) in slots_to {
        next = next.handed_over(&slots, node);
    }
    Some(next)
}

/// Returns the move that is listing a key and must be notified of a write at this node.
#[must_use]
pub fn observed<'t>(topology: &'t Topology, key: &[u8], node: NodeId) -> Option<&'t Transit> {
    let transit = topology.transit(topology.slot_of(key)).filter(|transit| transit.stage == Stage::Observed)?;
    // A key with a placement override does not move with its slot. Temporary keys are gone when their command ends.
    (transit.source == node && topology.lives_at(key) == node && !is_temporary(key)).then_some(transit)
}

/// Returns the move that must be notified of a late write at this node, by a protocol as published: the key is at the
/// source, and its group may have started since.
#[must_use]
pub fn is_late<'t, C>(topology: &'t Topology, legs: &Legs<C>, key: &[u8], node: NodeId) -> Option<&'t Transit> {
    let transit = topology.transit(topology.slot_of(key))?;
    let Stage::Moving { leg } = transit.stage else { return None };
    let view = legs.get(&(transit.move_id, leg))?;
    (view.published.is_some() && transit.source == node && topology.lives_at(key) == node && !is_temporary(key))
        .then_some(transit)
}

/// A key or leg that a command waits for.
#[derive(Debug)]
struct Wait<C> {
    of: (MoveId, u32),
    view: LegView<C>,
    /// Key; `None`: the whole leg.
    key: Option<(Key, Fingerprint)>,
}

impl<C> Wait<C> {
    fn fingerprint(&self) -> Option<Fingerprint> {
        self.key.as_ref().map(|(_, fingerprint)| *fingerprint)
    }

    /// Unique while this wait is held: a turned leg has another set of committed keys.
    fn identity(&self) -> (usize, Option<Fingerprint>) {
        (Arc::as_ptr(&self.view.committed).addr(), self.fingerprint())
    }
}

impl<C: Committed> Wait<C> {
    fn is_over(&self) -> bool {
        self.view.is_available(self.fingerprint())
    }
}

/// Decision about a command while slots are in transit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Decision {
    /// Execute it by the current topology: none of its keys moves, or all are at the source.
    Settled,
    /// Execute it by the topology of [`moved`].
    Moved,
    /// Execute it by this topology, in which its keys at a target are handed over, and those at the source of a
    /// published protocol are not. A command that can be split may have keys at both.
    Split(Arc<Topology>),
    /// Send it to the target, or to source and target: a read of one key, by a published protocol.
    Ask(Vec<NodeId>),
    /// Send it to source and target if these processes are connected, otherwise wait: a read of one key.
    DoubleRead([NodeId; 2], Arc<DoubleRead>),
    /// Wait for its keys, with [`Waits::begin`].
    Wait,
}

/// Result of checking a command's keys.
#[derive(Debug)]
pub struct KeyLookup<C> {
    has_keys_there: bool,
    /// Whether a key is committed at the target of a leg that uses no published protocol.
    has_committed: bool,
    is_moving: bool,
    /// The leg is not published.
    is_unknown: bool,
    waits: Vec<Wait<C>>,
    /// Destination of each key, by a protocol as published.
    ways: Vec<(Key, Way)>,
    /// Whether the command may write any of these keys.
    writes: bool,
    /// With such a protocol: the leg, and the fetch rate of its double reads (every n-th).
    sampled: Option<((MoveId, u32), u32)>,
    planted: InjectedBug,
}

impl<C> Default for KeyLookup<C> {
    fn default() -> Self {
        Self {
            has_keys_there: false,
            has_committed: false,
            is_moving: false,
            is_unknown: false,
            waits: Vec::new(),
            ways: Vec::new(),
            writes: false,
            sampled: None,
            planted: InjectedBug::default(),
        }
    }
}

impl<C: Committed> KeyLookup<C> {
    /// Injects a bug, for tests of the simulator.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with(mut self, bug: Option<Bug>) -> Self {
        self.planted = InjectedBug::new(bug);
        self
    }

    /// Checks a declared key. `writes`: whether the command may write it; `undeclared`: whether it may use other keys
    /// of the slot.
    pub fn key(
        &mut self,
        topology: &Topology,
        legs: &Legs<C>,
        key: &[u8],
        writes: bool,
        undeclared: impl FnOnce() -> bool,
    ) {
        let Some(transit) = topology.transit(topology.slot_of(key)) else { return };
        let Stage::Moving { leg } = transit.stage else { return };
        let of = (transit.move_id, leg);
        // A key with a placement override does not move with its slot, but other keys of the slot do.
        if topology.lives_at(key) != transit.source {
            if undeclared() {
                self.is_moving = true;
                match legs.get(&of) {
                    Some(view) if view.is_available(None) => {}
                    Some(view) => self.waits.push(Wait { of, view: view.clone(), key: None }),
                    None => self.is_unknown = true,
                }
            }
            return;
        }
        self.is_moving = true;
        let Some(view) = legs.get(&of) else {
            self.is_unknown = true;
            return;
        };
        let fingerprint = view.fingerprints.of(key);
        if let Some(rules) = &view.published {
            let way = view.way(rules, fingerprint, writes);
            self.ways.push((key.into(), way));
            self.writes |= writes;
            self.sampled = Some((of, rules.fetches_one_in())).filter(|(_, one_in)| way == Way::Both && *one_in > 0);
            match way {
                Way::Pull => self.waits.push(Wait { of, view: view.clone(), key: Some((key.into(), fingerprint)) }),
                Way::Source | Way::Target | Way::Both => self.has_keys_there = true,
            }
            return;
        }
        match view.place(fingerprint) {
            Place::Uncommitted => {
                self.waits.push(Wait { of, view: view.clone(), key: Some((key.into(), fingerprint)) })
            }
            Place::At(side) => {
                self.has_keys_there = true;
                self.has_committed |= side == Side::Target;
            }
            Place::Owner => self.has_keys_there = true,
        }
        if !view.is_available(None) && undeclared() && !self.planted.is(Bug::UndeclaredNotAwaited) {
            self.waits.push(Wait { of, view: view.clone(), key: None });
        }
    }

    /// Decides about the command with the checked keys. `topology` and `legs`: those of the checks. `splits`: the
    /// command can be split by key. `may_ask`: whether it may be sent to several nodes, because it only reads one key
    /// and has neither waited nor been sent before.
    ///
    /// By a protocol as published, any other read whose keys may be at either node waits until they are fetched. A
    /// command of several keys that can be split is sent key by key, each to the target of its own move. All others go
    /// to the source if all their keys do, otherwise to the target: the papers have no transactions and no scripts.
    /// Keys that other moves have committed are used at the targets of these in either case.
    #[must_use]
    pub fn decide(
        &mut self,
        topology: &Topology,
        legs: &Legs<C>,
        splits: bool,
        may_ask: impl Fn() -> bool,
    ) -> Decision {
        let transit = self.ways.first().and_then(|(key, _)| topology.transit(topology.slot_of(key)));
        let way = transit.and_then(|transit| self.way().map(|way| (way, transit)));
        match way {
            Some((Way::Pull, transit)) if may_ask() => return Decision::Ask(vec![transit.target]),
            Some((Way::Both, transit)) if may_ask() => return Decision::Ask(vec![transit.source, transit.target]),
            _ => self.add_fetches(topology, legs),
        }
        if !self.is_over() {
            let double_read = self.double_read(topology).filter(|_| may_ask());
            return double_read.map_or(Decision::Wait, |(nodes, read)| Decision::DoubleRead(nodes, read.clone()));
        }
        match way {
            _ if !self.is_moving => Decision::Settled,
            Some((Way::Source, _)) if !self.has_committed => Decision::Settled,
            Some((way, _)) if splits || way == Way::Source => Decision::Split(self.moved_by_key(topology, legs)),
            _ => Decision::Moved,
        }
    }

    /// Returns source, target and required processes, if one key is missing and both may be read.
    fn double_read(&self, topology: &Topology) -> Option<([NodeId; 2], &Arc<DoubleRead>)> {
        let [Wait { view, key: Some((key, _)), .. }] = &self.waits[..] else { return None };
        let transit = topology.transit(topology.slot_of(key)).filter(|_| !self.has_keys_there && !self.is_unknown)?;
        Some(([transit.source, transit.target], view.double_read.as_ref()?))
    }

    /// Whether the n-th double read (from 1) fetches its key, although no client waits for it.
    #[must_use]
    pub fn is_sampled(&self, topology: &Topology, number: u64) -> bool {
        self.sampled.is_some_and(|(_, one_in)| number.is_multiple_of(u64::from(one_in)))
            || self.double_read(topology).is_some_and(|(_, read)| read.fetches(number))
    }

    /// Destination of the whole command, by a protocol as published. Commands with several keys go to the target unless
    /// all are at the source.
    fn way(&self) -> Option<Way> {
        match &self.ways[..] {
            [] => None,
            [(_, way)] => Some(*way),
            ways => Some(if ways.iter().all(|(_, way)| *way == Way::Source) { Way::Source } else { Way::Target }),
        }
    }

    /// Returns the move whose source executes the command by this decision, by a protocol as published: the move of the
    /// first key that is read or written there.
    #[must_use]
    pub fn move_of_source(&self, topology: &Topology, decision: &Decision) -> Option<MoveId> {
        let there = match decision {
            Decision::Settled | Decision::Split(_) => Way::Source,
            Decision::Ask(_) => Way::Both,
            Decision::Moved | Decision::DoubleRead(..) | Decision::Wait => return None,
        };
        let (key, _) = self.ways.iter().find(|(_, way)| *way == there)?;
        Some(topology.transit(topology.slot_of(key))?.move_id)
    }

    /// Returns the topology in which the keys are handed over that are not at the source.
    fn moved_by_key(&self, topology: &Topology, legs: &Legs<C>) -> Arc<Topology> {
        let mut by_target: BTreeMap<NodeId, Vec<&Key>> = BTreeMap::new();
        for (key, _) in self.ways.iter().filter(|(_, way)| *way != Way::Source) {
            if let Some(transit) = topology.transit(topology.slot_of(key)) {
                by_target.entry(transit.target).or_default().push(key);
            }
        }
        let others = if self.has_committed { moved_by(topology, legs, |view| !view.is_published()) } else { None };
        let start = others.unwrap_or_else(|| topology.clone());
        Arc::new(by_target.into_iter().fold(start, |next, (target, keys)| next.keys_handed_over(&[], keys, target)))
    }

    /// Adds waits for keys that may be at either node, for a read that is not sent to both: they are fetched first.
    fn add_fetches(&mut self, topology: &Topology, legs: &Legs<C>) {
        for (key, _) in self.ways.iter().filter(|(_, way)| *way == Way::Both && !self.writes) {
            let Some(Transit { move_id, stage: Stage::Moving { leg }, .. }) = topology.transit(topology.slot_of(key))
            else {
                continue;
            };
            let of = (*move_id, *leg);
            if let Some(view) = legs.get(&of) {
                let fingerprint = view.fingerprints.of(key);
                if !view.is_available(Some(fingerprint)) {
                    self.waits.push(Wait { of, view: view.clone(), key: Some((key.clone(), fingerprint)) });
                }
            }
        }
    }

    /// Returns the key of a double read, to be fetched although no client waits for it.
    #[must_use]
    pub fn fetched(&self) -> Option<((MoveId, u32), Key)> {
        if let (Some((of, _)), [(key, _)]) = (self.sampled, &self.ways[..]) {
            return Some((of, key.clone()));
        }
        let [Wait { of, key: Some((key, _)), .. }] = &self.waits[..] else { return None };
        Some((*of, key.clone()))
    }

    /// Whether the command need not wait.
    fn is_over(&self) -> bool {
        let enough = self.waits.is_empty() || self.has_keys_there && self.planted.is(Bug::OneKeyIsEnough);
        enough && !self.is_unknown
    }
}

/// Keys requested from a mover by waiting clients.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// These keys.
    Keys(Vec<Key>),
    /// The whole leg. The mover then ends it at full speed.
    Whole,
}

/// A command that waits for keys.
#[derive(Debug)]
pub struct Waits<C> {
    /// The movers have received requests for these.
    waits: Vec<Wait<C>>,
}

impl<C> Default for Waits<C> {
    fn default() -> Self {
        Self { waits: Vec::new() }
    }
}

impl<C: Committed> Waits<C> {
    /// Waits for the missing keys. Returns the requests for the movers, by leg; `None`: the keys have arrived, and the
    /// command must be checked again.
    #[must_use]
    pub fn begin(&mut self, look: KeyLookup<C>, worker: usize) -> Option<Vec<((MoveId, u32), Wanted)>> {
        let mut told: BTreeSet<_> = self.waits.iter().map(Wait::identity).collect();
        let before = std::mem::replace(&mut self.waits, look.waits);
        self.register_again(worker);
        // Checked after the registration, so that no commit in between is missed.
        if !look.is_unknown && self.is_over() {
            self.waits = before;
            return None;
        }
        let mut wanted: Vec<((MoveId, u32), Wanted)> = Vec::new();
        for wait in &self.waits {
            if !told.insert(wait.identity()) {
                continue;
            }
            let Some((key, _)) = &wait.key else {
                wanted.push((wait.of, Wanted::Whole));
                continue;
            };
            match wanted.iter_mut().find(|(of, what)| *of == wait.of && *what != Wanted::Whole) {
                Some((_, Wanted::Keys(keys))) => keys.push(key.clone()),
                _ => wanted.push((wait.of, Wanted::Keys(vec![key.clone()]))),
            }
        }
        Some(wanted)
    }

    /// Registers the worker again. A notification comes once per registration; check the keys after this call.
    pub fn register_again(&self, worker: usize) {
        self.waits.iter().for_each(|wait| wait.view.committed.will_wait(worker));
    }

    /// Whether the command need not wait any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.waits.iter().all(Wait::is_over)
    }
}

impl<C> Waits<C> {
    /// First move that the command waits for.
    #[must_use]
    pub fn first_move(&self) -> Option<MoveId> {
        self.waits.first().map(|wait| wait.of.0)
    }

    /// Whether the command waits for one of these keys of a move; `None`: for any key.
    #[must_use]
    pub fn concerns(&self, move_id: MoveId, keys: Option<&[Fingerprint]>) -> bool {
        let is_one = |wait: &Wait<C>| keys.is_none_or(|keys| wait.fingerprint().is_none_or(|key| keys.contains(&key)));
        self.waits.iter().any(|wait| wait.of.0 == move_id && is_one(wait))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;
    use crate::topology::crc16_slot;

    #[derive(Default)]
    struct Known {
        keys: RefCell<BTreeSet<Fingerprint>>,
        all: Cell<bool>,
        /// Committed while a worker registers.
        late: Cell<Option<Fingerprint>>,
        waiting: Cell<u32>,
        state: Cell<Option<State>>,
    }

    impl Committed for Known {
        fn has(&self, key: Fingerprint) -> bool {
            self.keys.borrow().contains(&key)
        }

        fn has_all(&self) -> bool {
            self.all.get()
        }

        fn state(&self, _group: Fingerprint) -> State {
            self.state.get().unwrap_or(State::NotStarted)
        }

        fn will_wait(&self, _worker: usize) {
            self.waiting.set(self.waiting.get() + 1);
            self.keys.borrow_mut().extend(self.late.take());
        }
    }

    const MAKE: Fingerprinter = Fingerprinter::new(7);

    fn topology(keys_only: bool) -> Topology {
        let names: Vec<String> = (0..2).map(|node| format!("127.0.0.1:700{node}")).collect();
        let all: Vec<Slot> = Slot::all().collect();
        let even = Topology::even(&names).expect("two nodes").handed_over(&all, NodeId(0));
        let transit = Transit {
            move_id: MoveId(1),
            source: NodeId(0),
            target: NodeId(1),
            stage: Stage::Moving { leg: 3 },
            keys_only,
        };
        even.with_transits([(transit, &[crc16_slot(b"{t}")][..])]).expect("one")
    }

    fn look(topology: &Topology, legs: &Legs<Known>, keys: &[&[u8]], undeclared: bool) -> KeyLookup<Known> {
        let mut look = KeyLookup::default();
        keys.iter().for_each(|key| look.key(topology, legs, key, true, || undeclared));
        look
    }

    #[test]
    fn a_turned_leg_has_all_keys_that_are_not_away() {
        let (one, two) = (MAKE.of(b"1"), MAKE.of(b"2"));
        let (there, back) = (Arc::<Known>::default(), Arc::<Known>::default());
        let forward = LegView::new(there.clone(), None, MAKE);
        there.keys.borrow_mut().insert(one);
        assert_eq!([one, two].map(|key| forward.place(key)), [Place::At(Side::Target), Place::Uncommitted]);
        let turned = forward.with_direction(back.clone(), Some(Arc::new([one].into())), None);
        assert_eq!(
            [one, two].map(|key| turned.place(key)),
            [Place::Uncommitted, Place::At(Side::Source)],
            "earlier commits no longer apply"
        );
        back.keys.borrow_mut().insert(one);
        assert_eq!(turned.place(one), Place::At(Side::Source));
        assert!(!turned.is_available(None));
        there.all.set(true);
        assert!(forward.place(MAKE.of(b"9")) == Place::At(Side::Target) && forward.is_available(None));
    }

    #[test]
    fn keys_outside_the_scope_stay_with_their_owner() {
        let known: Arc<Known> = Arc::default();
        let scope = Arc::new(Scope::new(vec![b"{t}1"[..].into()], MAKE));
        let legs: Legs<Known> = [((MoveId(1), 3), LegView::new(known, Some(scope), MAKE))].into();
        let topology = topology(true);
        assert!(look(&topology, &legs, &[b"{t}2"], false).is_over());
        assert!(!look(&topology, &legs, &[b"{t}2", b"{t}1"], false).is_over());
        let moved = moved(&topology, &legs).expect("one moves");
        assert_eq!([&b"{t}1"[..], b"{t}2"].map(|key| moved.lives_at(key)), [NodeId(1), NodeId(0)]);
    }

    #[test]
    fn keys_are_requested_once_per_direction_of_a_leg() {
        let (known, back) = (Arc::<Known>::default(), Arc::<Known>::default());
        let mut legs: Legs<Known> = [((MoveId(1), 3), LegView::new(known, None, MAKE))].into();
        let topology = topology(false);
        let of = (MoveId(1), 3);
        let mut waits = Waits::default();
        let keys = |names: &[&[u8]]| Wanted::Keys(names.iter().map(|name| Key::from(*name)).collect());
        let told = waits.begin(look(&topology, &legs, &[b"{t}1", b"{t}2", b"{t}1"], false), 0);
        assert_eq!(told, Some(vec![(of, keys(&[b"{t}1", b"{t}2"]))]));
        assert_eq!(waits.begin(look(&topology, &legs, &[b"{t}1"], true), 0), Some(vec![(of, Wanted::Whole)]));
        assert_eq!(waits.begin(look(&topology, &legs, &[b"{t}1"], true), 0), Some(vec![]));
        assert_eq!(waits.begin(look(&topology, &Legs::new(), &[b"{t}1"], true), 0), Some(vec![]), "its mover is gone");
        assert!(!waits.concerns(MoveId(1), None));
        assert_eq!(
            waits.begin(look(&topology, &legs, &[b"{t}1"], true), 0),
            Some(vec![(of, keys(&[b"{t}1"])), (of, Wanted::Whole)])
        );
        assert!(waits.concerns(MoveId(1), Some(&[])), "a wait for the whole leg includes each key");
        let turned = legs[&of].with_direction(back, Some(Arc::new([MAKE.of(b"{t}1")].into())), None);
        legs.insert(of, turned);
        assert_eq!(
            waits.begin(look(&topology, &legs, &[b"{t}1", b"{t}2"], false), 0),
            Some(vec![(of, keys(&[b"{t}1"]))])
        );
        assert!(
            waits.concerns(MoveId(1), Some(&[MAKE.of(b"{t}1")]))
                && !waits.concerns(MoveId(1), Some(&[MAKE.of(b"{t}2")]))
        );
        assert!(!waits.concerns(MoveId(2), None));
    }

    #[test]
    fn a_commit_during_registration_is_not_missed() {
        let known: Arc<Known> = Arc::default();
        let legs: Legs<Known> = [((MoveId(1), 3), LegView::new(known.clone(), None, MAKE))].into();
        let look = look(&topology(false), &legs, &[b"{t}1"], false);
        assert!(look.is_moving && !look.is_over());
        known.late.set(Some(MAKE.of(b"{t}1")));
        assert_eq!(Waits::default().begin(look, 0), None);
        assert_eq!(known.waiting.get(), 1);
    }

    #[test]
    fn a_read_of_a_missing_key_is_sent_to_two_nodes_only_once() {
        let read = Arc::new(DoubleRead { source: "s".into(), target: "t".into(), fetches_one_in: 0 });
        let view = LegView::new(Arc::<Known>::default(), None, MAKE);
        let view = view.with_direction(Arc::default(), None, Some(read.clone()));
        let (topology, legs) = (topology(false), [((MoveId(1), 3), view)].into());
        let decide = |keys: &[&[u8]], may_ask: bool| {
            look(&topology, &legs, keys, false).decide(&topology, &legs, false, || may_ask)
        };
        assert_eq!(decide(&[b"{t}1"], true), Decision::DoubleRead([NodeId(0), NodeId(1)], read));
        assert_eq!(decide(&[b"{t}1"], false), Decision::Wait);
        assert_eq!(decide(&[b"{t}1", b"{t}2"], true), Decision::Wait, "two nodes have no common moment");
        assert_eq!(decide(&[b"other"], true), Decision::Settled);
        legs[&(MoveId(1), 3)].committed.all.set(true);
        assert_eq!(decide(&[b"{t}1"], true), Decision::Moved);
    }

    #[cfg(feature = "research")]
    #[test]
    fn published_reads_are_sent_to_one_node_only_once_their_keys_are_fetched() {
        let known: Arc<Known> = Arc::default();
        let netmigrate = crate::migration::Protocol::NetMigrate;
        let paper = crate::migration::published::Paper::of(netmigrate).expect("it has a published mode");
        let rules = paper.rules(netmigrate, MoveId(1));
        let view = LegView::new(known.clone(), None, MAKE).as_published(Some(rules));
        let (topology, legs) = (topology(false), [((MoveId(1), 3), view)].into());
        let decide = |writes: bool, splits: bool, may_ask: bool| {
            let mut look = KeyLookup::default();
            look.key(&topology, &legs, b"{t}1", writes, || false);
            look.decide(&topology, &legs, splits, || may_ask)
        };
        assert_eq!(decide(false, false, true), Decision::Settled);
        known.state.set(Some(State::Complete));
        assert_eq!(decide(false, false, true), Decision::Ask(vec![NodeId(1)]));
        assert_eq!(decide(false, false, false), Decision::Wait);
        // A filter may report a group as in progress whose key was just missing at the target.
        known.state.set(Some(State::InProgress));
        assert_eq!(decide(false, false, true), Decision::Ask(vec![NodeId(0), NodeId(1)]));
        assert_eq!(decide(false, false, false), Decision::Wait);
        assert_eq!(decide(true, false, false), Decision::Moved, "writes go to the target at once");
        known.keys.borrow_mut().insert(MAKE.of(b"{t}1"));
        assert_eq!(decide(false, false, false), Decision::Moved);
        let Decision::Split(by_key) = decide(false, true, false) else { panic!("it can be split") };
        assert_eq!([&b"{t}1"[..], b"{t}2"].map(|key| by_key.lives_at(key)), [NodeId(1), NodeId(0)]);
    }

    #[cfg(feature = "research")]
    #[test]
    fn commands_executed_at_the_source_are_attributed_to_their_move() {
        let known: Arc<Known> = Arc::default();
        let netmigrate = crate::migration::Protocol::NetMigrate;
        let paper = crate::migration::published::Paper::of(netmigrate).expect("it has a published mode");
        let view = LegView::new(known.clone(), None, MAKE).as_published(Some(paper.rules(netmigrate, MoveId(1))));
        let (topology, legs) = (topology(false), [((MoveId(1), 3), view)].into());
        let of = |key: &[u8], writes: bool, splits: bool| {
            let mut look = KeyLookup::default();
            look.key(&topology, &legs, key, writes, || false);
            let decision = look.decide(&topology, &legs, splits, || true);
            look.move_of_source(&topology, &decision)
        };
        for (state, read, write) in [
            (State::NotStarted, Some(MoveId(1)), Some(MoveId(1))),
            (State::InProgress, Some(MoveId(1)), None),
            (State::Complete, None, None),
        ] {
            known.state.set(Some(state));
            assert_eq!((of(b"{t}1", false, false), of(b"{t}1", true, true)), (read, write), "{state:?}");
            assert_eq!(of(b"other", false, false), None, "its slot does not move");
        }
    }

    #[cfg(feature = "research")]
    #[test]
    fn committed_keys_of_other_moves_never_follow_keys_of_a_published_one() {
        let (published, ordinary) = (Arc::<Known>::default(), Arc::<Known>::default());
        let netmigrate = crate::migration::Protocol::NetMigrate;
        let rules = crate::migration::published::Paper::of(netmigrate).expect("published").rules(netmigrate, MoveId(1));
        let scope = Arc::new(Scope::new(vec![b"{u}1"[..].into()], MAKE));
        let legs: Legs<Known> = [
            ((MoveId(1), 3), LegView::new(published.clone(), None, MAKE).as_published(Some(rules))),
            ((MoveId(2), 4), LegView::new(ordinary.clone(), Some(scope), MAKE)),
        ]
        .into();
        // The slot of {t} moves from node 0 to node 1. A key of {u} moves from node 1 to node 0.
        let (slot, other) = ([crc16_slot(b"{t}")], [crc16_slot(b"{u}")]);
        let transit = |id, source, target, leg, keys_only| Transit {
            move_id: MoveId(id),
            source: NodeId(source),
            target: NodeId(target),
            stage: Stage::Moving { leg },
            keys_only,
        };
        let topology = topology(false)
            .handed_over(&other, NodeId(1))
            .with_transits([(transit(1, 0, 1, 3, false), &slot[..]), (transit(2, 1, 0, 4, true), &other[..])])
            .expect("two");
        let decide = |splits: bool| {
            let mut look = KeyLookup::default();
            [&b"{t}1"[..], b"{u}1"].iter().for_each(|key| look.key(&topology, &legs, key, true, || false));
            look.decide(&topology, &legs, splits, || false)
        };
        assert_eq!(decide(false), Decision::Wait, "the key of the ordinary move is missing");
        ordinary.keys.borrow_mut().insert(MAKE.of(b"{u}1"));
        for (state, node) in [(State::NotStarted, NodeId(0)), (State::Complete, NodeId(1))] {
            published.state.set(Some(state));
            for splits in [false, true] {
                let used = match decide(splits) {
                    Decision::Split(by_key) => by_key,
                    Decision::Moved => Arc::new(moved(&topology, &legs).expect("both move")),
                    other => panic!("{other:?}"),
                };
                assert_eq!(
                    [&b"{t}1"[..], b"{u}1"].map(|key| used.lives_at(key)),
                    [node, NodeId(0)],
                    "{state:?}, {splits}"
                );
                assert_eq!(used.lives_at(b"{u}2"), NodeId(1), "the other keys of its slot stay");
            }
        }
    }

    #[cfg(feature = "research")]
    #[test]
    fn sampled_keys_of_published_fulva_are_read_at_the_target_alone() {
        use crate::migration::Protocol::{Fulva, NetMigrate};
        for (protocol, redirects) in [(Fulva, true), (NetMigrate, false)] {
            let known: Arc<Known> = Arc::default();
            known.state.set(Some(State::InProgress));
            let rules = crate::migration::published::Paper::of(protocol).expect("published").rules(protocol, MoveId(1));
            let view = LegView::new(known.clone(), None, MAKE).as_published(Some(rules));
            let (topology, legs) = (topology(false), [((MoveId(1), 3), view)].into());
            let decide = |key: &[u8]| {
                let mut look = KeyLookup::default();
                look.key(&topology, &legs, key, false, || false);
                look.decide(&topology, &legs, false, || true)
            };
            let both = Decision::Ask(vec![NodeId(0), NodeId(1)]);
            assert_eq!(decide(b"{t}1"), both);
            known.keys.borrow_mut().insert(MAKE.of(b"{t}1"));
            let expected = if redirects { Decision::Moved } else { both.clone() };
            assert_eq!(decide(b"{t}1"), expected, "NetMigrate's switch knows only groups");
            assert_eq!(decide(b"{t}2"), both, "keys outside the sample");
        }
    }

    #[test]
    fn keys_of_an_unpublished_leg_wait_without_requests() {
        let (topology, legs) = (topology(false), Legs::<Known>::new());
        let look = look(&topology, &legs, &[b"{t}1"], false);
        assert!(!look.is_over());
        assert_eq!(Waits::default().begin(look, 0), Some(vec![]));
        assert!(
            moved(&topology, &legs).is_some_and(|moved| moved.lives_at(b"{t}1") == NodeId(1)),
            "other commands go to the target"
        );
    }
}
