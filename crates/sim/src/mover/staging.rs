//! Big keys: I/O for the machine that copies in pieces (`switchyard_policy::migration::staging`). Reads and writes
//! pieces, and processes the writes that workers report. The leg begins when only dirty elements are missing
//! ([`super::batches`]).

use std::collections::{BTreeMap, BTreeSet};

use switchyard_policy::migration::dirty_elements::Element;
use switchyard_policy::migration::life::StepResult;
use switchyard_policy::migration::staging::{self, Action, Endpoints, Event, Inspection, Piece, Place, Staging, Wrote};
use switchyard_policy::migration::{Event as OfLeg, Key, Process, Protocol};
use switchyard_policy::topology::MoveId;

use super::{Lane, SlotView, Stage, What};
use crate::injected::{Bug, Planted};
use crate::node::{Cmd, Elements, KeyIx, Reply, STAGING};
use crate::world::{Ev, World, say};

/// Minimum number of elements of a big key.
const BIG: usize = 3;
/// Elements per piece.
const PIECE: u32 = 2;
/// Maximum delays of the next step, normally and after a rest, in microseconds.
const SOON_US: u64 = 400;
const REST_US: u64 = 4_000;

/// A request for staging.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    Looked(KeyIx),
    Read(KeyIx),
    /// Whether the staging key is new.
    Wrote(KeyIx, bool),
    Fields(KeyIx, Vec<u32>),
    Discarded,
}

/// Writes reported by workers, processed at the mover's next step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum WorkerMessage {
    Touched(KeyIx, Option<Vec<u32>>),
    Written(KeyIx),
    Flush,
}

#[derive(Debug)]
struct Copying {
    of_hash: bool,
    name: KeyIx,
    /// Start of the next piece.
    cursor: Option<u32>,
    /// Read and not yet written: the last piece, and elements that were read again.
    piece: Elements,
    again: Elements,
}

/// State of copying in pieces.
#[derive(Debug, Default)]
pub(crate) struct Stager {
    machine: Staging,
    copies: BTreeMap<KeyIx, Copying>,
    /// Staged keys that workers know.
    shared: BTreeSet<KeyIx>,
    messages: Vec<WorkerMessage>,
    discarded: Vec<KeyIx>,
    /// Keys that this leg moves whole.
    wholes: BTreeSet<KeyIx>,
    /// Number of assigned names, over all routers.
    names: KeyIx,
    /// Whether the next step is scheduled.
    is_due: bool,
    /// For a planted bug: dirty elements before the leg.
    early: BTreeMap<KeyIx, Vec<Element>>,
    pub(crate) in_pieces: u64,
    pub(crate) whole: u64,
}

impl Stager {
    /// Creates the stager of a mover. No two movers assign the same names.
    pub(super) fn of(lane: Lane) -> Self {
        Self { names: lane * 10_000, ..Self::default() }
    }

    pub(super) fn notify(&mut self, what: WorkerMessage) {
        self.messages.push(what);
    }

    /// Prepares another leg, or another attempt.
    pub(super) fn begin_leg(&mut self, planted: Option<Planted>) {
        self.wholes.clear();
        if self.machine.is_empty() {
            self.machine = machine(planted);
        }
    }

    /// Drops all state after a crash of the router.
    pub(super) fn forget_all(&mut self, planted: Option<Planted>) {
        let Self { names, in_pieces, whole, .. } = *self;
        *self = Self { machine: machine(planted), names, in_pieces, whole, ..Self::default() };
    }

    /// Returns the staging key of a staged key.
    pub(super) fn name_of(&self, key: KeyIx) -> Option<KeyIx> {
        self.copies.get(&key).map(|copying| copying.name)
    }
}

fn fields_of(elements: &[Element]) -> Vec<u32> {
    elements.iter().map(|element| element.first().copied().unwrap_or_default().into()).collect()
}

/// Converts current fields to elements to write.
pub(super) fn elements_of(fields: &[u32], values: &[Option<u32>]) -> Elements {
    let gone = fields.iter().zip(values).filter(|(_, value)| value.is_none()).map(|(field, _)| *field).collect();
    Elements { there: values.iter().copied().flatten().collect(), gone }
}

impl World {
    pub(super) fn place(&self, key: KeyIx) -> Place {
        (self.keys[key].clone(), 0)
    }

    pub(super) fn stager_step(&mut self, lane: Lane, event: Event) -> Vec<Action> {
        say!(self, "staging <- {event:?}");
        self.stager_steps(lane, |machine, actions| machine.step(event, actions))
    }

    fn stager_steps(&mut self, lane: Lane, step: impl FnOnce(&mut Staging, &mut Vec<Action>)) -> Vec<Action> {
        let mut actions = Vec::new();
        step(&mut self.movers[lane].stager.machine, &mut actions);
        for action in &actions {
            say!(self, "staging -> {action:?}");
            let key = |place: &Place| self.key_ix(&place.0);
            match action {
                Action::Drop { place } => {
                    let key = key(place);
                    let stager = &mut self.movers[lane].stager;
                    stager.discarded.extend(stager.copies.remove(&key).map(|copying| copying.name));
                }
                Action::Whole { place, .. } => {
                    let key = key(place);
                    self.movers[lane].stager.wholes.insert(key);
                    self.movers[lane].stager.whole += 1;
                }
                _ => {}
            }
        }
        actions
    }

    // Reports of workers.

    /// Reports the keys of a write to the mover, before the command is sent.
    pub(crate) fn notify_mover(&mut self, move_id: MoveId, op: u64, keys: &[KeyIx], undeclared: bool) {
        // The move may have ended: the worker has an older view.
        let Some(lane) = self.lane_of_move(move_id) else { return };
        if undeclared && !self.bug(Bug::AnythingNotNoted) {
            let slots: Vec<_> = keys.iter().map(|key| self.slot_of(*key)).collect();
            self.movers[lane].list.anything.extend(slots);
        }
        if self.movers[lane].how().copies_while_served() && self.movers[lane].driver.is_some() {
            let names = keys.iter().filter(|key| self.is_own(lane, **key)).map(|key| self.keys[*key].clone()).collect();
            self.mover_event(lane, OfLeg::Written { keys: names });
            if undeclared {
                self.mover_event(lane, OfLeg::Rewritten);
            }
        }
        let shared = &self.movers[lane].stager.shared;
        let (staged, others): (Vec<KeyIx>, Vec<KeyIx>) = keys.iter().copied().partition(|key| shared.contains(key));
        self.mover_notes(lane, &others);
        let stager = &mut self.movers[lane].stager;
        stager.messages.extend(others.into_iter().map(WorkerMessage::Written));
        let mut touched = Vec::new();
        if let Some(command) = self.ops.get(&op) {
            command.op.touches(&mut touched);
        }
        let touched = touched.into_iter().filter(|(key, _)| staged.contains(key));
        stager.messages.extend(touched.map(|(key, fields)| WorkerMessage::Touched(key, fields)));
    }

    /// Processes the writes that workers reported.
    pub(super) fn apply_staging_messages(&mut self, lane: Lane) {
        for told in std::mem::take(&mut self.movers[lane].stager.messages) {
            let event = match told {
                WorkerMessage::Touched(key, fields) => {
                    let elements =
                        fields.map(|fields| fields.into_iter().map(|field| Element::from([field as u8])).collect());
                    Event::Touched { key: self.keys[key].clone(), elements }
                }
                WorkerMessage::Written(key) => Event::Written { key: self.keys[key].clone() },
                WorkerMessage::Flush => Event::Flush,
            };
            if !self.movers[lane].stager.machine.is_empty() {
                self.stager_step(lane, event);
            }
        }
    }

    // Before the leg.

    /// Copies the big keys of the next leg in pieces, if the protocol does.
    pub(super) fn stage_big(&mut self, lane: Lane) -> Option<StepResult> {
        if self.scenario.parts == 0 || self.movers[lane].protocol != Protocol::Switchyard {
            return Some(StepResult::Done);
        }
        self.movers[lane].stage = Stage::Staging;
        let own: Vec<KeyIx> = (0..self.keys.len()).filter(|key| self.is_own(lane, *key)).collect();
        let big = own
            .into_iter()
            .filter(|key| !self.movers[lane].stager.wholes.contains(key))
            .map(|key| self.place(key))
            .collect();
        let process = |side: usize| {
            let (process, client_id) = self.movers[lane].links[side].process.unwrap_or_default();
            Process { run_id: process.to_string(), client_id }
        };
        let ends = Endpoints { source: process(0), target: process(1) };
        self.stager_step(lane, Event::Begin { big, ends });
        // Not before the step has begun.
        self.staging_later(lane, SOON_US);
        None
    }

    /// Handles a connection that broke during staging. Closes the other one, too: replies to its old requests must not
    /// be taken for replies to new ones.
    pub(super) fn staging_broke(&mut self, lane: Lane, side: usize) {
        if self.movers[lane].stage != Stage::Staging {
            return;
        }
        self.release_link(lane, 1 - side);
        self.on_step_result(lane, StepResult::Lost);
    }

    fn staging_later(&mut self, lane: Lane, at_most_us: u64) {
        if !std::mem::replace(&mut self.movers[lane].stager.is_due, true) {
            let delay = self.random.between(50, at_most_us);
            self.after(delay, Ev::Staging { lane });
        }
    }

    pub(crate) fn staging_is_due(&mut self, lane: Lane) {
        self.movers[lane].stager.is_due = false;
        self.continue_staging(lane);
    }

    fn continue_staging(&mut self, lane: Lane) {
        if self.movers[lane].stage != Stage::Staging || self.movers[lane].stager.machine.is_busy() {
            return;
        }
        if self.fleet.flush.is_some() {
            self.on_quiesced(lane);
            self.staging_later(lane, SOON_US);
            return;
        }
        let awaited = self.movers[lane].stager.machine.pending_epoch();
        let reached = awaited.filter(|epoch| self.workers.iter().all(|worker| worker.has_drained(*epoch, true)));
        self.apply_staging_messages(lane);
        if let Some(epoch) = reached {
            self.stager_step(lane, Event::Reached { epoch });
        }
        let barrier = self.random.chance(500);
        let actions = self.stager_step(lane, Event::Next { barrier });
        let asks = |action: &Action| {
            matches!(
                action,
                Action::Inspect { .. } | Action::Read { .. } | Action::ReadAgain { .. } | Action::Write { .. }
            )
        };
        let is_idle = !actions.iter().any(asks);
        if actions.contains(&Action::Ready) {
            self.share_staged(lane);
            self.note_early_tails(lane);
            self.discard_staged(lane);
            self.on_step_result(lane, StepResult::Done);
            return;
        }
        self.act_on_staging(lane, actions);
        self.discard_staged(lane);
        if is_idle {
            self.staging_later(lane, SOON_US);
        }
    }

    fn act_on_staging(&mut self, lane: Lane, actions: Vec<Action>) {
        for action in actions {
            self.count_action();
            match action {
                Action::Inspect { place, .. } => {
                    let key = self.key_ix(&place.0);
                    self.demand(lane, 0, Cmd::Look(key), What::Staging(Part::Looked(key)));
                }
                Action::Barrier => {
                    self.share_staged(lane);
                    let epoch = self.publish(lane, SlotView::Observed);
                    self.stager_step(lane, Event::Published { epoch });
                }
                Action::Read { place } => {
                    let key = self.key_ix(&place.0);
                    let Some(copying) = self.movers[lane].stager.copies.get(&key) else { continue };
                    let cmd = Cmd::Piece(key, copying.of_hash, copying.cursor.unwrap_or_default(), PIECE);
                    self.demand(lane, 0, cmd, What::Staging(Part::Read(key)));
                }
                Action::ReadAgain { place, elements } => {
                    let key = self.key_ix(&place.0);
                    let fields = fields_of(&elements);
                    self.demand(lane, 0, Cmd::Fields(key, fields.clone()), What::Staging(Part::Fields(key, fields)));
                }
                Action::Write { place, part, is_new: afresh } => {
                    let key = self.key_ix(&place.0);
                    let Some(copying) = self.movers[lane].stager.copies.get_mut(&key) else { continue };
                    let elements = std::mem::take(match part {
                        staging::Part::Piece => &mut copying.piece,
                        staging::Part::Again => &mut copying.again,
                    });
                    let cmd = Cmd::Stage(copying.name, afresh, elements);
                    self.demand(lane, 1, cmd, What::Staging(Part::Wrote(key, afresh)));
                }
                // Nothing to do, or an action of the leg.
                _ => {}
            }
        }
    }

    fn share_staged(&mut self, lane: Lane) {
        let shared = self.movers[lane].stager.machine.places().map(|place| self.key_ix(&place.0)).collect();
        self.movers[lane].stager.shared = shared;
    }

    fn note_early_tails(&mut self, lane: Lane) {
        let machine = &self.movers[lane].stager.machine;
        let early = machine.places().filter_map(|place| Some((self.key_ix(&place.0), machine.tail(place)?))).collect();
        self.movers[lane].stager.early = early;
    }

    pub(super) fn staging_answered(&mut self, lane: Lane, part: Part, reply: Reply) {
        let event = match part {
            Part::Discarded => return,
            Part::Looked(key) => {
                let of_hash = match reply {
                    Reply::Looked(Some((of_hash, length))) if length >= BIG => Some(of_hash),
                    _ => None,
                };
                let stager = &mut self.movers[lane].stager;
                if let Some(of_hash) = of_hash {
                    stager.names += 1;
                    let name = STAGING + stager.names;
                    let nothing = Elements::default;
                    stager
                        .copies
                        .insert(key, Copying { of_hash, name, cursor: Some(0), piece: nothing(), again: nothing() });
                }
                let seen = if of_hash.is_some() { Inspection::Fit } else { Inspection::Gone };
                Event::Inspected { place: self.place(key), seen }
            }
            Part::Read(key) => {
                let piece = match (reply, self.movers[lane].stager.copies.get_mut(&key)) {
                    (Reply::Piece(there, next), Some(copying)) => {
                        let (is_empty, is_last) = (there.is_empty(), next.is_none());
                        (copying.piece, copying.cursor) = (Elements { there, ..Elements::default() }, next);
                        Piece::Taken { is_empty, is_last }
                    }
                    _ => Piece::OtherType,
                };
                Event::Read { place: self.place(key), piece }
            }
            Part::Fields(key, fields) => {
                let same_type = match (reply, self.movers[lane].stager.copies.get_mut(&key)) {
                    (Reply::Fields(values), Some(copying)) => {
                        copying.again = elements_of(&fields, &values);
                        true
                    }
                    _ => false,
                };
                Event::ReadAgain { place: self.place(key), same_type }
            }
            Part::Wrote(key, afresh) => Event::Wrote { place: self.place(key), wrote: written(&reply, afresh) },
        };
        let actions = self.stager_step(lane, event);
        self.act_on_staging(lane, actions);
        // Clients are served between two pieces, for longer than a barrier takes.
        if self.random.chance(300) {
            self.staging_later(lane, REST_US);
        } else {
            self.continue_staging(lane);
        }
    }

    // In the leg.

    /// Drops unusable staged copies, before keys are read.
    pub(super) fn drop_unusable(&mut self, lane: Lane) {
        let run_id = |side: usize| {
            let link = &self.movers[lane].links[side];
            link.process.filter(|_| link.conn.is_some()).map(|(process, _)| process.to_string())
        };
        let (source, target) = (run_id(0), run_id(1));
        self.stager_steps(lane, |machine, actions| {
            machine.drop_unusable(source.as_deref(), target.as_deref(), |_| true, actions)
        });
    }

    pub(super) fn unusable(&mut self, lane: Lane, place: Place, why: &str) {
        self.stager_step(lane, Event::Unfit { place, why: why.to_owned() });
    }

    /// Returns the request for the dirty elements of a staged key, and their fields.
    pub(super) fn tail_of(&self, lane: Lane, key: KeyIx) -> Option<(Cmd, Vec<u32>)> {
        let stager = &self.movers[lane].stager;
        let copying = stager.copies.get(&key)?;
        let early = stager.early.get(&key).filter(|_| self.bug(Bug::TailReadBeforeTheLeg));
        let elements = early.cloned().or_else(|| stager.machine.tail(&self.place(key)))?;
        let fields = fields_of(&elements);
        Some((Cmd::Tail(key, copying.of_hash, fields.clone()), fields))
    }

    /// Ends the staging of committed keys: a staging key is unneeded, or has become the key.
    pub(super) fn staged_are_moved(&mut self, lane: Lane, keys: &[Key]) {
        for key in keys {
            let key = self.key_ix(key);
            if self.movers[lane].stager.copies.contains_key(&key) {
                self.movers[lane].stager.in_pieces += 1;
                let key = self.keys[key].clone();
                self.stager_step(lane, Event::Unneeded { key });
            }
        }
        self.discard_staged(lane);
    }

    /// Ends staging at a rollback or at the end of the leg.
    pub(super) fn staging_is_over(&mut self, lane: Lane) {
        self.stager_step(lane, Event::AllUnneeded);
        self.discard_staged(lane);
        self.movers[lane].stager.shared.clear();
    }

    fn discard_staged(&mut self, lane: Lane) {
        if self.movers[lane].links[1].ready {
            for name in std::mem::take(&mut self.movers[lane].stager.discarded) {
                self.demand(lane, 1, Cmd::Unlink(name), What::Staging(Part::Discarded));
            }
        }
    }
}

/// Converts the reply to a written piece.
fn written(reply: &Reply, afresh: bool) -> Wrote {
    match reply {
        Reply::Staged(was_there) if afresh || *was_there => Wrote::Yes,
        Reply::Staged(_) => Wrote::Vanished,
        other => Wrote::Refused(format!("{other:?}")),
    }
}

#[cfg(feature = "planted-bugs")]
pub(super) fn machine(planted: Option<Planted>) -> Staging {
    match planted {
        Some(Planted::Machine(bug)) => Staging::default().with(Some(bug)),
        _ => Staging::default(),
    }
}

#[cfg(not(feature = "planted-bugs"))]
pub(super) fn machine(_planted: Option<Planted>) -> Staging {
    Staging::default()
}
