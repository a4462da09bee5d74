//! Routing of commands whose keys are in transit: destination, wait, and messages to movers. Each worker decides by
//! itself, from the topology and the published state of each leg ([`LegView`]).
//!
//! - **Destination**: [`LegView::place`] for a key. [`moved`] returns the topology for commands whose keys are all
//!   committed, so later code need not know of moves.
//! - **Wait**: [`KeyLookup`] finds the missing keys of a command, and [`Waits`] holds it until they are committed.
//! - **Messages**: [`Waits::begin`] returns the requests to movers, each once. [`observed`] finds the move to notify of
//!   a write while keys are being listed.
//!
//! A command whose keys are all committed costs no allocation here. This module is not called while no slot is in
//! transit.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::injected::{Bug, InjectedBug};
use super::published::{Rules, Way};
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
    if topology.is_settled() {
        return None;
    }
    let mut slots_to: Vec<(NodeId, Vec<Slot>)> = Vec::new();
    let mut keys_to: BTreeMap<(MoveId, u32), (NodeId, &Scope, Vec<Slot>)> = BTreeMap::new();
    for slot in Slot::all() {
        let Some(transit) = topology.transit(slot) else { continue };
        let Stage::Moving { leg } = transit.stage else { continue };
        let view = legs.get(&(transit.move_id, leg));
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

/// Result of checking a command's keys.
#[derive(Debug)]
pub struct KeyLookup<C> {
    has_keys_there: bool,
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
        // A key with a placement override does not move with its slot.
        if topology.lives_at(key) != transit.source {
            return;
        }
        let Stage::Moving { leg } = transit.stage else { return };
        self.is_moving = true;
        let of = (transit.move_id, leg);
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
            Place::At(_) | Place::Owner => self.has_keys_there = true,
        }
        if !view.is_available(None) && undeclared() && !self.planted.is(Bug::UndeclaredNotAwaited) {
            self.waits.push(Wait { of, view: view.clone(), key: None });
        }
    }

    /// Whether the command has keys in moving slots.
    #[must_use]
    pub const fn is_moving(&self) -> bool {
        self.is_moving
    }

    /// Returns source, target and required processes, if one key is missing and both may be read.
    #[must_use]
    pub fn double_read(&self, topology: &Topology) -> Option<([NodeId; 2], &DoubleRead)> {
        let [Wait { view, key: Some((key, _)), .. }] = &self.waits[..] else { return None };
        let transit = topology.transit(topology.slot_of(key)).filter(|_| !self.has_keys_there && !self.is_unknown)?;
        Some(([transit.source, transit.target], view.double_read.as_deref()?))
    }

    /// Whether the n-th double read (from 1) fetches its key, although no client waits for it.
    #[must_use]
    pub fn is_sampled(&self, topology: &Topology, number: u64) -> bool {
        self.sampled.is_some_and(|(_, one_in)| number.is_multiple_of(u64::from(one_in)))
            || self.double_read(topology).is_some_and(|(_, read)| read.fetches(number))
    }

    /// Destination of each key, by a protocol as published; empty otherwise.
    #[must_use]
    pub fn ways(&self) -> &[(Key, Way)] {
        &self.ways
    }

    /// Destination of the whole command, by such a protocol. Commands with several keys go to the target unless all are
    /// at the source.
    #[must_use]
    pub fn way(&self) -> Option<Way> {
        match &self.ways[..] {
            [] => None,
            [(_, way)] => Some(*way),
            ways => Some(if ways.iter().all(|(_, way)| *way == Way::Source) { Way::Source } else { Way::Target }),
        }
    }

    /// Source and target of the keys, by such a protocol.
    #[must_use]
    pub fn published_nodes(&self, topology: &Topology) -> Option<[NodeId; 2]> {
        let (key, _) = self.ways.first()?;
        topology.transit(topology.slot_of(key)).map(|transit| [transit.source, transit.target])
    }

    /// Returns the keys by the target they move to, without keys at the source.
    #[must_use]
    pub fn moved_to(&self, topology: &Topology) -> BTreeMap<NodeId, Vec<Key>> {
        let mut moved: BTreeMap<NodeId, Vec<Key>> = BTreeMap::new();
        for (key, _) in self.ways.iter().filter(|(_, way)| *way != Way::Source) {
            if let Some(transit) = topology.transit(topology.slot_of(key)) {
                moved.entry(transit.target).or_default().push(key.clone());
            }
        }
        moved
    }

    /// Adds waits for keys that may be at either node, for a read that cannot be sent to both: they are fetched first.
    /// Returns whether the command waits.
    pub fn fetches_first(&mut self, topology: &Topology, legs: &Legs<C>) -> bool {
        if self.writes {
            return false;
        }
        for (key, _) in self.ways.iter().filter(|(_, way)| *way == Way::Both) {
            let Some(Transit { move_id, stage: Stage::Moving { leg }, .. }) = topology.transit(topology.slot_of(key))
            else {
                continue;
            };
            let of = (*move_id, *leg);
            if let Some(view) = legs.get(&of) {
                let fingerprint = view.fingerprints.of(key);
                self.waits.push(Wait { of, view: view.clone(), key: Some((key.clone(), fingerprint)) });
            }
        }
        !self.waits.is_empty()
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
    #[must_use]
    pub fn is_over(&self) -> bool {
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
    }

    impl Committed for Known {
        fn has(&self, key: Fingerprint) -> bool {
            self.keys.borrow().contains(&key)
        }

        fn has_all(&self) -> bool {
            self.all.get()
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
        assert!(look.is_moving() && !look.is_over());
        known.late.set(Some(MAKE.of(b"{t}1")));
        assert_eq!(Waits::default().begin(look, 0), None);
        assert_eq!(known.waiting.get(), 1);
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
