//! Staging: copies big keys in pieces, while their slots are observed and the source serves all commands.
//!
//! Decisions (which key to copy, which elements to read again and when, which staging is unusable) are in
//! `switchyard_policy::migration::staging`, which the simulator shares. This file has the I/O, the formats of pieces,
//! and the pace.
//!
//! # Leftovers
//! Staging keys have names that no client uses, and a TTL that each piece renews, so the leftovers of a crash expire.
//! The next move at the same node removes them earlier.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use switchyard_policy::migration::dirty_elements::Element;
use switchyard_policy::migration::staging::{self, Action, Endpoints, Event, Inspection, Part, Place, Wrote};
use switchyard_policy::migration::{Fingerprint, Goal, Key, Process, Protocol, Side, TEMPORARY};
use switchyard_policy::topology::{Placement, Slot};
use switchyard_resp::command::{members_expire, why_not_covered};
use switchyard_resp::reply;
use tracing::{info, warn};

use super::big::BigKey;
use super::connection::{Connection, error_text};
use super::pieces::{Cursor, Kind, Piece};
use super::run::{Mover, MoverExit};
use super::side::SideConnection;

/// TTL of a staging key after its last write, milliseconds.
pub(super) const LIFE_MS: &[u8] = b"3600000";
/// Longer pieces get smaller.
const LONG_PIECE: Duration = Duration::from_millis(16);
/// Minimum interval between barriers while pieces are read. Each barrier makes every worker check its commands in
/// flight.
const BARRIER_REST: Duration = Duration::from_millis(50);

/// Activity shown during the copy.
const COPYING: &str = "copying big keys in pieces";

#[derive(Debug)]
pub(super) struct Staged {
    pub(super) kind: Kind,
    /// Name of the staging key.
    pub(super) name: Vec<u8>,
    /// Start of the next piece. `None`: the whole value has been read.
    cursor: Option<Cursor>,
    /// Read and not yet written: the last piece, and elements that were read again.
    piece: Option<Piece>,
    again: Option<Piece>,
    /// Elements (or bytes) per piece: current and initial.
    count: u64,
    count_first: u64,
    /// Bytes at the source, and bytes written.
    bytes: u64,
    pub(super) copied: u64,
}

/// All staged keys of a move.
#[derive(Debug, Default)]
pub(super) struct Staging {
    machine: staging::Staging,
    all: BTreeMap<Place, Staged>,
    /// Staging keys to remove.
    pub(super) discarded: Vec<(u32, Vec<u8>)>,
    /// Earliest time of the next barrier while pieces are read.
    rests_until: Option<Instant>,
    /// Whether hash fields at the source can have a TTL. `None` if unknown.
    field_ttls_supported: Option<bool>,
}

impl Staging {
    pub(super) fn new(placement: Placement) -> Self {
        Self { machine: staging::Staging::new(placement), ..Self::default() }
    }

    /// Passes an event to the state machine. Performs the local actions and returns the others.
    fn step(&mut self, event: Event) -> Vec<Action> {
        self.taken(|machine, actions| machine.step(event, actions))
    }

    fn taken(&mut self, step: impl FnOnce(&mut staging::Staging, &mut Vec<Action>)) -> Vec<Action> {
        let mut actions = Vec::new();
        step(&mut self.machine, &mut actions);
        actions.retain(|action| {
            let Action::Drop { place } = action else { return true };
            if let Some(staged) = self.all.remove(place) {
                self.discarded.push((place.1, staged.name));
            }
            false
        });
        actions
    }

    /// Passes an event that has only local actions.
    fn note(&mut self, event: Event) {
        let actions = self.step(event);
        debug_assert!(actions.is_empty(), "nothing follows from it: {actions:?}");
    }

    pub(super) fn is_empty(&self) -> bool {
        self.machine.is_empty()
    }

    /// Returns a staged key and its dirty elements, to be read in the leg.
    pub(super) fn last_of(&self, place: &Place) -> Option<(&Staged, Vec<Element>)> {
        self.all.get(place).zip(self.machine.tail(place))
    }

    /// Discards the staging of a key in all databases. Returns the number of discarded staging keys.
    pub(super) fn drop_key(&mut self, key: &Key) -> u64 {
        let before = self.all.len();
        self.note(Event::Unneeded { key: key.clone() });
        (before - self.all.len()) as u64
    }

    pub(super) fn drop_all(&mut self) {
        self.note(Event::AllUnneeded);
    }

    /// Records that a command may touch these elements. `None`: the whole value. Call before it is sent.
    pub(super) fn touched(&mut self, key: &Key, elements: Option<Vec<Element>>) {
        self.note(Event::Touched { key: key.clone(), elements });
    }

    /// Records a write reported by a worker that did not know yet that the key is staged.
    pub(super) fn written(&mut self, key: &Key) {
        if !self.is_empty() {
            self.note(Event::Written { key: key.clone() });
        }
    }

    /// Records that any key of a slot may be written.
    pub(super) fn touched_slot(&mut self, slot: Slot) {
        self.note(Event::TouchedSlot(slot));
    }

    /// Records that all keys may be removed.
    pub(super) fn touched_all(&mut self) {
        self.note(Event::Flush);
    }

    /// Returns database and name of staging keys that may be at the target.
    pub(super) fn names(&self) -> Vec<(u32, Vec<u8>)> {
        let used = self
            .all
            .iter()
            .filter(|(place, _)| self.machine.is_written(place))
            .map(|(place, staged)| (place.1, staged.name.clone()));
        used.chain(self.discarded.iter().cloned()).collect()
    }

    /// Returns the bytes copied of all staged keys.
    pub(super) fn copied(&self) -> u64 {
        self.all.values().map(|staged| staged.copied).sum()
    }

    pub(super) fn shown(&self) -> Vec<BigKey> {
        let one = |(place, staged): (&Place, &Staged)| BigKey {
            kind: staged.kind.name(),
            bytes: staged.bytes,
            copied: staged.copied,
            is_read: staged.cursor.is_none(),
            restarts: self.machine.starts(place).saturating_sub(1),
        };
        self.all.iter().take(32).map(one).collect()
    }
}

/// Replies of one connection, in order.
type Replies = Vec<Vec<u8>>;

impl Mover {
    /// Sends the pending commands on both connections and waits for all replies.
    pub(super) fn collect(&mut self) -> Result<(Replies, Replies), MoverExit> {
        let (mut source, mut target) = (Vec::new(), Vec::new());
        self.collect_into(&mut source, &mut target)?;
        Ok((source, target))
    }

    /// Sends and receives on both connections without waiting.
    pub(super) fn exchange_both(&mut self, source: &mut Replies, target: &mut Replies) -> Result<(), MoverExit> {
        let timeout = self.timeout();
        for (side, answers) in [(Side::Source, source), (Side::Target, target)] {
            let Some(connection) = &mut self.end_mut(side).connection else {
                return self.on_lost(side, "not connected");
            };
            let outcome = connection.exchange(answers);
            let silent = connection.unanswered > 0 && connection.last_reply.elapsed() > timeout;
            if let Err(why) = outcome {
                return self.on_lost(side, &why);
            }
            if silent {
                return self.on_lost(side, &format!("it did not answer within {timeout:?}"));
            }
        }
        Ok(())
    }

    /// Like [`Mover::collect`], but appends to earlier replies.
    pub(super) fn collect_into(&mut self, source: &mut Replies, target: &mut Replies) -> Result<(), MoverExit> {
        loop {
            if self.is_stopped() {
                return Err(MoverExit::RouterStops);
            }
            self.exchange_both(source, target)?;
            let connections = || [&self.source, &self.target].into_iter().filter_map(|end| end.connection.as_ref());
            if connections().all(|connection| connection.unanswered == 0) {
                return Ok(());
            }
            let mut fds: Vec<_> = connections().map(Connection::poll_fd).collect();
            // Errors surface at the next use of the sockets.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        }
    }

    /// Drops a lost side, and the other side if it has pending commands.
    fn on_lost<T>(&mut self, side: Side, why: &str) -> Result<T, MoverExit> {
        let name = self.name(self.end(side).node);
        warn!(move_id = self.id.0, node = name, reason = why, "a mover has lost its connection");
        self.shown.set_activity(format!("waiting for {name}: {why}"));
        self.end_mut(side).fail();
        let other = self.end_mut(side.other());
        if other.connection.as_ref().is_some_and(|connection| connection.unanswered > 0) {
            other.fail();
        }
        Err(MoverExit::Lost)
    }

    /// Copies the big keys of these slots in pieces, if possible. Afterwards only dirty elements are missing at the
    /// target.
    pub(super) fn stage(&mut self, slots: &[Slot]) -> Result<(), MoverExit> {
        self.discard()?;
        self.measure_written(slots)?;
        let Some(ends) = self.ends() else { return Err(MoverExit::Lost) };
        let big = match self.life.order().how.protocol {
            _ if self.life.order().how.paper.is_some() => Vec::new(),
            Protocol::Switchyard => {
                self.big.of(slots).filter(|(_, found)| found.whole.is_none()).map(|(place, _)| place.clone()).collect()
            }
            Protocol::StopAndCopy
            | Protocol::Source
            | Protocol::FreezeAndCopy
            | Protocol::Rocksteady
            | Protocol::NetMigrate
            | Protocol::Fulva
            | Protocol::Bloom => Vec::new(),
        };
        self.on_staging(Event::Begin { big, ends });
        self.discard()?;
        self.copy_pieces()
    }

    /// Passes an event to the staging state machine. Returns the actions for nodes and workers.
    pub(super) fn on_staging(&mut self, event: Event) -> Vec<Action> {
        let mut actions = self.staging.step(event);
        self.note_staging(&mut actions);
        actions
    }

    /// Performs the actions on the list of big keys.
    fn note_staging(&mut self, actions: &mut Vec<Action>) {
        actions.retain(|action| match action {
            Action::Forget { place } => {
                self.big.forget(self.placement.slot_of(&place.0), place);
                false
            }
            Action::Whole { place, why } => {
                info!(move_id = self.id.0, reason = why, "a big key cannot be copied in pieces");
                if let Some(found) = self.big.get_mut(self.placement.slot_of(&place.0), place) {
                    found.whole = Some(why.clone());
                }
                false
            }
            _ => true,
        });
    }

    /// Returns the processes of both connections.
    fn ends(&self) -> Option<Endpoints> {
        let process = |side| self.end(side).connection.as_ref().map(|c| c.process.clone());
        let (source, target): (Process, Process) = process(Side::Source).zip(process(Side::Target))?;
        Some(Endpoints { source, target })
    }

    /// Publishes the staged keys to the workers.
    fn share_staged(&self) {
        let fingerprints: Vec<Fingerprint> =
            self.staging.machine.places().map(|(key, _)| self.fingerprints.of(key)).collect();
        self.own.share_staged(fingerprints);
    }

    fn copy_pieces(&mut self) -> Result<(), MoverExit> {
        if !self.staging.is_empty() {
            self.shown.set_activity(COPYING);
        }
        loop {
            // The order matters: messages from before the barrier must be handled before the barrier counts as reached.
            let reached = self
                .staging
                .machine
                .pending_epoch()
                .filter(|epoch| self.shared.drained_source(*epoch, self.life.order().source));
            self.while_paused()?;
            if let Some(epoch) = reached {
                self.staging.note(Event::Reached { epoch });
                self.staging.rests_until = Some(Instant::now() + BARRIER_REST);
            }
            let rests = self.staging.rests_until.is_some_and(|until| Instant::now() < until);
            let mut to_do = self.on_staging(Event::Next { barrier: !rests });
            if to_do.contains(&Action::Ready) {
                self.share_staged();
                return self.discard();
            }
            let before = to_do.len();
            to_do.retain(|action| *action != Action::Barrier);
            if to_do.len() < before {
                self.set_barrier();
            }
            let idle = to_do.is_empty();
            while !to_do.is_empty() {
                let happened = self.perform_at_nodes(to_do)?;
                to_do = happened.into_iter().flat_map(|event| self.on_staging(event)).collect();
            }
            self.discard()?;
            if idle {
                if let Some(epoch) = self.staging.machine.pending_epoch() {
                    self.shared.want_drained(epoch);
                }
                self.wait(Duration::from_millis(2));
            }
        }
    }

    /// Checks whether a big key still exists and can be staged, and prepares its staging.
    fn check_big(&mut self, place: &Place, number: u64) -> Result<Inspection, MoverExit> {
        self.shown.set_activity(COPYING);
        let (seen, staged) = self.query_big(place)?;
        if let Some(mut staged) = staged {
            let name = format!("switchyard:temporary:{}:staging-{}-{number}", self.shared.incarnation, self.id.0);
            staged.name = name.into_bytes();
            self.staging.all.insert(place.clone(), staged);
        }
        Ok(seen)
    }

    fn query_big(&mut self, place: &Place) -> Result<(Inspection, Option<Staged>), MoverExit> {
        let unfit = |why: String| Ok((Inspection::Unfit(why), None));
        if self.life.order().how.direct_clients {
            return unfit("clients use the nodes directly, so their writes are unknown".to_owned());
        }
        let uncovered = |node| self.shared.with_facts(node, |facts| why_not_covered(facts.flavour, &facts.version));
        if let Some(why) = self.life.order().nodes().into_iter().find_map(uncovered) {
            return unfit(why);
        }
        let (key, database) = place;
        self.select(Side::Source, *database)?;
        let kind = self.call(Side::Source, &[b"TYPE", key])?;
        let kind = match reply::text(&kind).unwrap_or_default() {
            b"none" => return Ok((Inspection::Gone, None)),
            name => match Kind::named(name) {
                Some(kind) => kind,
                None => return unfit(format!("a {} is not copied in pieces", String::from_utf8_lossy(name))),
            },
        };
        let has_mortal_members =
            |node| self.shared.with_facts(node, |facts| members_expire(facts.flavour, &facts.version));
        if kind == Kind::Set && has_mortal_members(self.source.node) {
            return unfit("its members may have a time to live".to_owned());
        }
        let length = self.call(Side::Source, &[kind.length(), key])?;
        let size = self.call(Side::Source, &[b"MEMORY", b"USAGE", key])?;
        let number = |answer: &[u8]| reply::integer(answer).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        let (length, bytes) = (number(&length), number(&size));
        if length == 0 || bytes < self.big.limit() {
            return Ok((Inspection::Gone, None));
        }
        let piece_bytes: u64 = match self.life.order().how.goal {
            Goal::Fast => 256 << 10,
            Goal::Balanced => 64 << 10,
            Goal::Gentle => 16 << 10,
        };
        let count = if kind == Kind::String { piece_bytes } else { (piece_bytes * length / bytes).clamp(1, 4096) };
        let cursor = Some(kind.begin());
        let staged = Staged {
            kind,
            name: Vec::new(),
            cursor,
            piece: None,
            again: None,
            count,
            count_first: count,
            bytes,
            copied: 0,
        };
        Ok((Inspection::Fit, Some(staged)))
    }

    /// Publishes the staged keys to the workers and starts a barrier: it is reached when all earlier commands have
    /// replies.
    fn set_barrier(&mut self) {
        self.share_staged();
        // If the topology cannot be changed now, a later call retries.
        let Ok(epoch) = self.publish_observed() else { return };
        self.shared.want_drained(epoch);
        self.staging.note(Event::Published { epoch });
    }

    /// Performs the actions for one key at both nodes concurrently. Returns the resulting events.
    fn perform_at_nodes(&mut self, to_do: Vec<Action>) -> Result<Vec<Event>, MoverExit> {
        // Commands that need an idle connection go first.
        for action in &to_do {
            match action {
                Action::Inspect { place, number } => {
                    let seen = self.check_big(place, *number)?;
                    return Ok(vec![Event::Inspected { place: place.clone(), seen }]);
                }
                Action::Read { place } | Action::ReadAgain { place, .. } => self.select(Side::Source, place.1)?,
                Action::Write { place, .. } => self.select(Side::Target, place.1)?,
                _ => continue,
            };
        }
        let began = Instant::now();
        let (mut bytes, mut is_piece) = (0, false);
        for action in &to_do {
            let (Some(source), Some(target)) = (&mut self.source.connection, &mut self.target.connection) else {
                return Err(MoverExit::Lost);
            };
            match action {
                Action::Read { place } => {
                    let Some(staged) = self.staging.all.get(place) else { continue };
                    let Some(cursor) = &staged.cursor else { continue };
                    staged.kind.request_piece(source, &place.0, cursor, staged.count);
                    is_piece = true;
                }
                Action::ReadAgain { place, elements } => {
                    let Some(staged) = self.staging.all.get(place) else { continue };
                    staged.kind.request_elements(source, &place.0, elements);
                }
                Action::Write { place, part, is_new: afresh } => {
                    let Some(staged) = self.staging.all.get_mut(place) else { continue };
                    let piece = match part {
                        Part::Piece => staged.piece.take(),
                        Part::Again => staged.again.take(),
                    };
                    let piece = piece.unwrap_or_default();
                    if *part == Part::Piece {
                        (bytes, is_piece) = (piece.bytes(), true);
                    }
                    write(target, staged, &piece, *afresh);
                }
                _ => {}
            }
        }
        let (read, wrote) = self.collect()?;
        let taken = began.elapsed();
        let read = read.last().map(Vec::as_slice).unwrap_or_default();
        let mut happened = Vec::new();
        for action in to_do {
            happened.push(match action {
                Action::Read { place } => Event::Read { piece: self.take_piece(&place, read, taken)?, place },
                Action::ReadAgain { place, elements } => {
                    let staged = self.staging.all.get_mut(&place);
                    let same_type = staged.is_some_and(|staged| {
                        staged.again = staged.kind.take_elements(&elements, read);
                        staged.again.is_some()
                    });
                    Event::ReadAgain { place, same_type }
                }
                Action::Write { place, is_new: afresh, .. } => {
                    Event::Wrote { wrote: self.wrote(&place, &wrote, bytes, afresh)?, place }
                }
                _ => continue,
            });
        }
        if is_piece {
            self.rest_after_piece(taken, bytes)?;
        }
        Ok(happened)
    }

    /// Takes a piece and adapts the size of the next piece.
    fn take_piece(&mut self, place: &Place, answer: &[u8], took: Duration) -> Result<staging::Piece, MoverExit> {
        let Some(staged) = self.staging.all.get_mut(place) else { return Ok(staging::Piece::OtherType) };
        let taken = staged.cursor.take().and_then(|cursor| staged.kind.take(&cursor, staged.count, answer));
        let Some((piece, next)) = taken else { return Ok(staging::Piece::OtherType) };
        let (is_empty, is_last) = (piece.is_empty(), next.is_none());
        (staged.piece, staged.cursor) = (Some(piece), next);
        if took > LONG_PIECE {
            staged.count = (staged.count / 2).max(staged.count_first / 16).max(1);
        } else if took < LONG_PIECE / 4 {
            staged.count = (staged.count * 2).min(staged.count_first);
        }
        if self.has_mortal_fields(place)? {
            return Ok(staging::Piece::Unfit("its fields have a time to live".to_owned()));
        }
        Ok(staging::Piece::Taken { is_empty, is_last })
    }

    /// Rests after a piece so that other clients are served, and to stay below the maximum rate.
    fn rest_after_piece(&mut self, taken: Duration, bytes: u64) -> Result<(), MoverExit> {
        let rest = match self.life.order().how.goal {
            Goal::Fast => Duration::ZERO,
            Goal::Balanced => taken,
            Goal::Gentle => taken * 4,
        };
        let rate = self.life.order().how.max_rate.map_or(Duration::ZERO, |max| {
            Duration::from_secs_f64(bytes as f64 / max.max(1) as f64).saturating_sub(taken)
        });
        if rest.max(rate) > Duration::ZERO { self.rest(rest.max(rate)) } else { Ok(()) }
    }

    /// Whether fields of the last piece of a hash have a TTL (Redis 7.4, Valkey 9). Such hashes are not staged.
    fn has_mortal_fields(&mut self, place: &Place) -> Result<bool, MoverExit> {
        let is_hash = self.staging.all.get(place).is_some_and(|staged| staged.kind == Kind::Hash);
        if !is_hash || !self.fields_may_be_mortal()? {
            return Ok(false);
        }
        let Some(piece) = self.staging.all.get(place).and_then(|staged| staged.piece.as_ref()) else {
            return Ok(false);
        };
        let fields: Vec<Vec<u8>> = piece.present.iter().step_by(2).cloned().collect();
        if fields.is_empty() {
            return Ok(false);
        }
        let count = fields.len().to_string();
        let mut args: Vec<&[u8]> = vec![b"HPEXPIRETIME", &place.0, b"FIELDS", count.as_bytes()];
        args.extend(fields.iter().map(Vec::as_slice));
        let answer = self.call(Side::Source, &args)?;
        Ok(reply::is_error(&answer) || reply::elements(&answer).any(|at| reply::integer(at).is_some_and(|at| at >= 0)))
    }

    fn fields_may_be_mortal(&mut self) -> Result<bool, MoverExit> {
        if let Some(known) = self.staging.field_ttls_supported {
            return Ok(known);
        }
        let answer = self.call(Side::Source, &[b"COMMAND", b"INFO", b"HPEXPIRETIME"])?;
        let known = reply::is_error(&answer) || reply::elements(&answer).next().is_some_and(|row| !reply::is_null(row));
        self.staging.field_ttls_supported = Some(known);
        Ok(known)
    }

    /// Returns the result of writing a piece.
    fn wrote(&mut self, place: &Place, answers: &[Vec<u8>], bytes: u64, afresh: bool) -> Result<Wrote, MoverExit> {
        let wrote = outcome(answers, afresh);
        let name = || self.name(self.life.order().target);
        match wrote {
            Wrote::Refused(why) if why.starts_with("OOM") => {
                Err(MoverExit::Stop(format!("{} has no room for a big key: {why}", name())))
            }
            Wrote::Refused(why) => Ok(Wrote::Refused(format!("{} refuses its pieces: {why}", name()))),
            Wrote::Yes => {
                if let Some(staged) = self.staging.all.get_mut(place) {
                    staged.copied += bytes;
                }
                Ok(Wrote::Yes)
            }
            Wrote::Vanished => Ok(Wrote::Vanished),
        }
    }

    /// Discards the staging of slots that have left.
    pub(super) fn forget_staged(&mut self, slots: &[Slot]) {
        let of_slots = self.staging.machine.places().filter(|(key, _)| slots.contains(&self.placement.slot_of(key)));
        let keys: Vec<Key> = of_slots.map(|(key, _)| key.clone()).collect();
        if !keys.is_empty() {
            for key in &keys {
                self.staging.drop_key(key);
            }
            self.share_staged();
        }
    }

    /// Discards unusable staging. Call it before keys are read in a leg.
    pub(super) fn drop_unusable(&mut self, is_ours: &[bool]) {
        let run_id = |end: &SideConnection| end.connection.as_ref().map(|c| c.process.run_id.clone());
        let (source, target) = (run_id(&self.source), run_id(&self.target));
        let placement = self.placement.clone();
        let is_ours = |(key, _): &Place| is_ours.get(placement.slot_of(key).index()).is_some_and(|ours| *ours);
        let mut actions = self
            .staging
            .taken(|machine, actions| machine.drop_unusable(source.as_deref(), target.as_deref(), is_ours, actions));
        self.note_staging(&mut actions);
    }

    /// Marks the staging of a key as unusable, so that the key is moved whole.
    pub(super) fn unusable(&mut self, place: &Place, why: &str) {
        self.on_staging(Event::Unfit { place: place.clone(), why: why.to_owned() });
    }

    /// Removes unused staging keys.
    pub(super) fn discard(&mut self) -> Result<(), MoverExit> {
        while let Some((database, name)) = self.staging.discarded.last().cloned() {
            self.select(Side::Target, database)?;
            self.call(Side::Target, &[b"UNLINK", &name])?;
            self.staging.discarded.pop();
        }
        Ok(())
    }

    /// Removes all staging keys at the end of the move, if the target is reachable.
    pub(super) fn discard_all(&mut self) {
        self.staging.drop_all();
        self.staging.discarded.append(&mut self.target.not_discarded);
        self.own.share_staged(Vec::new());
        let may_ask = self.target.is_idle()
            && self.target.connection.as_ref().is_some_and(|connection| connection.unanswered == 0);
        if self.staging.discarded.is_empty() || !may_ask {
            return;
        }
        if self.discard().is_err() {
            info!(move_id = self.id.0, "temporary keys at the target are removed by the next move there, or expire");
        }
    }

    /// Removes staging keys of earlier moves or earlier routers.
    pub(super) fn remove_stale_staging_keys(&mut self, side: Side, keys: &[Key]) -> Result<(), MoverExit> {
        let stale: Vec<Key> = keys.iter().filter(|key| self.is_left_over(key)).cloned().collect();
        if stale.is_empty() {
            return Ok(());
        }
        info!(move_id = self.id.0, keys = stale.len(), "removed temporary keys of an earlier move");
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(stale.iter().map(|key| &key[..]));
        self.call(side, &args).map(|_| ())
    }

    /// Whether a staging key belongs to another router or to a move that has ended.
    fn is_left_over(&self, key: &[u8]) -> bool {
        let Some((incarnation, rest)) = key
            .strip_prefix(TEMPORARY)
            .and_then(|rest| std::str::from_utf8(rest).ok())
            .and_then(|rest| rest.split_once(":staging-"))
        else {
            return false;
        };
        let Some(number) = rest.split('-').next().and_then(|number| number.parse::<u64>().ok()) else { return false };
        let is_ours = number == self.id.0 && self.staging.all.values().any(|staged| staged.name == key);
        let is_anothers = number != self.id.0 && self.shared.routing().moves.by_id.keys().any(|id| id.0 == number);
        incarnation != self.shared.incarnation || !(is_ours || is_anothers)
    }
}

/// Writes a piece to the staging key and renews its TTL. `afresh`: first remove the old key.
fn write(target: &mut Connection, staged: &Staged, piece: &Piece, afresh: bool) {
    target.push(&[b"MULTI"]);
    if afresh {
        target.push(&[b"UNLINK", &staged.name]);
    } else {
        target.push(&[b"PEXPIRE", &staged.name, LIFE_MS]);
    }
    staged.kind.write(target, &staged.name, piece);
    // Also needed if the key was missing and is created by this write: it must expire.
    target.push(&[b"PEXPIRE", &staged.name, LIFE_MS]);
    target.push(&[b"EXEC"]);
}

/// Returns the result of [`write`].
fn outcome(answers: &[Vec<u8>], afresh: bool) -> Wrote {
    let exec = answers.last().map(Vec::as_slice).unwrap_or_default();
    if let Some(error) =
        answers.iter().map(Vec::as_slice).chain(reply::elements(exec)).find(|answer| reply::is_error(answer))
    {
        return Wrote::Refused(error_text(error));
    }
    // The write has created a key that lacks the earlier pieces.
    if !afresh && reply::elements(exec).next().and_then(reply::integer) != Some(1) {
        return Wrote::Vanished;
    }
    Wrote::Yes
}
