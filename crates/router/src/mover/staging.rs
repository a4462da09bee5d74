//! Staging: copying big keys in pieces, while their slots are observed and the source serves everything.
//!
//! A big key is copied under another name at the target, its *staging key*, before its leg begins. In the leg, when nobody writes any more, only its
//! *tail* is read (what commands have touched since it was read), written to the staging key, and that is renamed. So what commands wait for is
//! short, however large the value. The leg's machine knows nothing of it: for a staged key "copy" and "store" are done in another way.
//!
//! # Why nothing is lost
//! Workers tell the elements that a command may touch before they send it ([`Told::Touched`]). The copy begins behind a drain barrier: what was sent
//! before the workers knew that the key is staged has been answered. So every element at the source was either read by the scan and not touched
//! since, or told. What was told is read again behind a later barrier ([`Tail`]). A command that does not name its elements makes the copy begin
//! again; after some times the key is moved whole, and that is reported.
//!
//! What only *removes* without being told (expiry, eviction) is found by counting: all elements of the source are in the staging key, with
//! their values, so if both have as many, both have the same. If not, the key is moved whole.
//!
//! # What is left over
//! Staging keys have names that no client uses, and a time to live that is renewed with every piece: what a crash leaves ends by itself. Before that,
//! the next move at the same node removes it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustix::event::{Timespec, poll};
use switchyard_policy::migration::tail::{Element, Tail};
use switchyard_policy::migration::{Fingerprint, Goal, Key, Protocol, Side, TEMPORARY};
use switchyard_policy::topology::{Slot, slot_of};
use switchyard_resp::reply;
use tracing::{info, warn};

use super::big::{BigKey, Place};
use super::connection::{Connection, error_text};
use super::pieces::{Cursor, Kind, Piece};
use super::run::{Halt, Mover};

/// How long a staging key lives without being written to, milliseconds.
pub(super) const LIFE_MS: &[u8] = b"3600000";
/// A copy begins so often at most, before the key is moved whole.
const STARTS_MAX: u32 = 5;
/// The leg begins when no more elements than these have to be read in it, or after so many rounds.
const FEW: usize = 200;
const ROUNDS_MAX: u32 = 50;
/// Pieces that take longer get smaller.
const LONG_PIECE: Duration = Duration::from_millis(16);
/// Between two barriers while pieces are read: each makes every worker look at what it has in flight.
const BARRIER_REST: Duration = Duration::from_millis(50);
/// Elements that are read again in one go.
const TAIL_AT_ONCE: usize = 500;
/// Bytes of big keys that are staged for one leg, about.
pub(super) const LEG_BYTES: u64 = 512 << 20;

/// A big key that is being copied, or has been.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) kind: Kind,
    /// Its staging key.
    pub(super) name: Vec<u8>,
    pub(super) tail: Tail,
    /// Where the next piece begins; `None`: all has been read.
    cursor: Option<Cursor>,
    /// Read, and not written.
    piece: Option<Piece>,
    /// Elements (or bytes) of a piece: now, and at first.
    count: u64,
    count_first: u64,
    /// The barrier behind which the copy may begin.
    since: Option<u64>,
    ready: bool,
    begun: bool,
    written: bool,
    /// Size at the source, and bytes written.
    bytes: u64,
    pub(super) copied: u64,
    starts: u32,
    /// The mover's connections when it began.
    clients: (u64, u64),
    /// The processes.
    pub(super) processes: (String, String),
}

/// What is staged.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pub(super) all: BTreeMap<Place, Staged>,
    /// Staging keys to be removed.
    pub(super) discarded: Vec<(u32, Vec<u8>)>,
    named: u64,
    /// The epoch that is waited for.
    barrier: Option<u64>,
    /// While pieces are read, another barrier is not set before this.
    rests_until: Option<Instant>,
}

impl Staging {
    /// The place of a key is known, or was lost: its staging key is not used any more.
    pub(super) fn drop_place(&mut self, place: &Place) {
        if let Some(staged) = self.all.remove(place) {
            self.discarded.push((place.1, staged.name));
        }
    }

    pub(super) fn drop_all(&mut self) {
        for (place, staged) in std::mem::take(&mut self.all) {
            self.discarded.push((place.1, staged.name));
        }
        self.barrier = None;
    }

    /// Those in any database.
    fn of_mut<'s>(&'s mut self, key: &Key) -> impl Iterator<Item = &'s mut Staged> + use<'s> {
        self.all.range_mut((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(_, staged)| staged)
    }

    /// A command is about to be sent that may touch these elements; `None`: anything of the key.
    pub(super) fn touched(&mut self, key: &Key, elements: Option<Vec<Element>>) {
        match elements {
            Some(elements) => self.of_mut(key).for_each(|staged| staged.tail.touch(elements.iter().cloned())),
            None => self.of_mut(key).for_each(|staged| staged.tail.touch_everything()),
        }
    }

    pub(super) fn places_of(&self, key: &Key) -> Vec<Place> {
        self.all.range((key.clone(), 0)..=(key.clone(), u32::MAX)).map(|(place, _)| place.clone()).collect()
    }

    /// A worker that did not know yet that the key is staged has said that it writes it: before the copy begins that is answered.
    pub(super) fn written(&mut self, key: &Key) {
        if !self.all.is_empty() {
            self.of_mut(key).filter(|staged| staged.begun).for_each(|staged| staged.tail.touch_everything());
        }
    }

    /// The same for any key of a slot.
    pub(super) fn touched_slot(&mut self, slot: Slot) {
        for (_, staged) in self.all.iter_mut().filter(|((key, _), _)| slot_of(key) == slot) {
            staged.tail.touch_everything();
        }
    }

    /// The same for all of them.
    pub(super) fn touched_all(&mut self) {
        self.all.values_mut().for_each(|staged| staged.tail.touch_everything());
    }

    /// Names of staging keys that may be at the target, with their databases.
    pub(super) fn names(&self) -> Vec<(u32, Vec<u8>)> {
        let used = self.all.iter().filter(|(_, staged)| staged.written).map(|(place, staged)| (place.1, staged.name.clone()));
        used.chain(self.discarded.iter().cloned()).collect()
    }

    pub(super) fn shown(&self) -> Vec<BigKey> {
        let one = |staged: &Staged| BigKey {
            kind: staged.kind.name(),
            bytes: staged.bytes,
            copied: staged.copied,
            is_read: staged.cursor.is_none(),
            restarts: staged.starts.saturating_sub(1),
        };
        self.all.values().take(32).map(one).collect()
    }
}

/// Of one connection, in order.
type Replies = Vec<Vec<u8>>;

/// What came of writing a piece.
enum Written {
    Yes,
    /// The staging key was gone.
    Vanished,
    Refused(String),
}

impl Mover {
    /// Sends what was asked for on both connections, and waits until all is answered.
    pub(super) fn collect(&mut self) -> Result<(Replies, Replies), Halt> {
        let (mut source, mut target) = (Vec::new(), Vec::new());
        self.collect_into(&mut source, &mut target)?;
        Ok((source, target))
    }

    /// Sends what was asked for on both connections, and takes what is answered by now.
    pub(super) fn exchange_both(&mut self, source: &mut Replies, target: &mut Replies) -> Result<(), Halt> {
        let patience = self.patience();
        for (side, answers) in [(Side::Source, source), (Side::Target, target)] {
            let Some(connection) = &mut self.end_mut(side).connection else { return self.lost_both(side, "not connected") };
            let outcome = connection.exchange(answers);
            let silent = connection.unanswered > 0 && connection.heard.elapsed() > patience;
            if let Err(why) = outcome {
                return self.lost_both(side, &why);
            }
            if silent {
                return self.lost_both(side, &format!("it did not answer within {patience:?}"));
            }
        }
        Ok(())
    }

    /// As [`Mover::collect`], behind what was answered before.
    pub(super) fn collect_into(&mut self, source: &mut Replies, target: &mut Replies) -> Result<(), Halt> {
        loop {
            if self.is_stopped() {
                return Err(Halt::RouterStops);
            }
            self.exchange_both(source, target)?;
            let connections = || [&self.source, &self.target].into_iter().filter_map(|end| end.connection.as_ref());
            if connections().all(|connection| connection.unanswered == 0) {
                return Ok(());
            }
            let mut fds: Vec<_> = connections().map(Connection::poll_fd).collect();
            // A failure shows where the sockets are used.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        }
    }

    /// One side is lost; of the other nothing may stay unanswered.
    fn lost_both<T>(&mut self, side: Side, why: &str) -> Result<T, Halt> {
        let name = self.name(self.end(side).node);
        warn!(move_id = self.order.id.0, node = name, why, "a mover has lost its connection");
        self.doing = format!("waiting for {name}: {why}");
        self.end_mut(side).fail();
        let other = self.end_mut(side.other());
        if other.connection.as_ref().is_some_and(|connection| connection.unanswered > 0) {
            other.fail();
        }
        Err(Halt::Lost)
    }

    /// Copies the big keys of these slots in pieces, as far as that can be done. When it returns, what is staged lacks only its tail.
    pub(super) fn stage(&mut self, slots: &[Slot]) -> Result<(), Halt> {
        self.drop_if_reconnected();
        self.discard()?;
        self.measure_written(slots)?;
        let fresh: Vec<Place> = self
            .big
            .of(slots)
            .filter(|(place, found)| found.whole.is_none() && !self.staging.all.contains_key(*place))
            .map(|(place, _)| place.clone())
            .collect();
        for place in fresh {
            self.begin_staging(&place, 1)?;
        }
        if self.staging.all.is_empty() {
            return Ok(());
        }
        self.doing = "copying big keys in pieces".to_owned();
        self.copy_pieces()
    }

    /// What was copied over another connection is copied again: what that had sent last is not known.
    fn drop_if_reconnected(&mut self) {
        let now = self.clients();
        if self.staging.all.values().any(|staged| Some(staged.clients) != now) {
            self.staging.drop_all();
            self.share_staged();
        }
    }

    fn clients(&self) -> Option<(u64, u64)> {
        let id = |side| self.end(side).connection.as_ref().map(|c| c.process.client_id);
        id(Side::Source).zip(id(Side::Target))
    }

    pub(super) fn processes(&self) -> Option<(String, String)> {
        let id = |side| self.end(side).connection.as_ref().map(|c| c.process.run_id.clone());
        id(Side::Source).zip(id(Side::Target))
    }

    /// A key is moved whole, and why; reported when it is done.
    fn move_whole(&mut self, place: &Place, why: &str) {
        info!(move_id = self.order.id.0, why, "a big key cannot be copied in pieces");
        self.staging.drop_place(place);
        if let Some(found) = self.big.get_mut(slot_of(&place.0), place) {
            found.whole = Some(why.to_owned());
        }
    }

    /// Has the workers know what is staged.
    fn share_staged(&self) {
        let fingerprints: Vec<Fingerprint> = self.staging.all.keys().map(|(key, _)| self.order.fingerprints.of(key)).collect();
        self.own.share_staged(fingerprints);
    }

    fn begin_staging(&mut self, place: &Place, starts: u32) -> Result<(), Halt> {
        if self.order.protocol != Protocol::Switchyard {
            return Ok(());
        }
        if self.order.direct_clients {
            self.move_whole(place, "clients use the nodes directly, and what they write is not known");
            return Ok(());
        }
        if starts > STARTS_MAX {
            self.move_whole(place, "commands changed it as a whole, again and again, while it was copied");
            return Ok(());
        }
        let (key, database) = place;
        self.select(Side::Source, *database)?;
        let kind = self.call(Side::Source, &[b"TYPE", key])?;
        let kind = match reply::text(&kind).unwrap_or_default() {
            b"none" => {
                self.forget_big(place);
                return Ok(());
            }
            name => match Kind::named(name) {
                Some(kind) => kind,
                None => {
                    let why = format!("a {} is not copied in pieces", String::from_utf8_lossy(name));
                    self.move_whole(place, &why);
                    return Ok(());
                }
            },
        };
        let length = self.call(Side::Source, &[kind.length(), key])?;
        let size = self.call(Side::Source, &[b"MEMORY", b"USAGE", key])?;
        let number = |answer: &[u8]| reply::integer(answer).and_then(|n| u64::try_from(n).ok()).unwrap_or(0);
        let (length, bytes) = (number(&length), number(&size));
        if length == 0 || bytes < self.big_limit_now.unwrap_or(u64::MAX) {
            self.forget_big(place);
            return Ok(());
        }
        let piece_bytes: u64 = match self.goal {
            Goal::Fast => 256 << 10,
            Goal::Balanced => 64 << 10,
            Goal::Gentle => 16 << 10,
        };
        let count = if kind == Kind::String { piece_bytes } else { (piece_bytes * length / bytes).clamp(1, 4096) };
        let (Some(clients), Some(processes)) = (self.clients(), self.processes()) else { return Err(Halt::Lost) };
        self.staging.named += 1;
        let name = format!("switchyard:temporary:{}:staging-{}-{}", self.shared.incarnation, self.order.id.0, self.staging.named);
        let staged = Staged {
            kind,
            name: name.into_bytes(),
            tail: Tail::default(),
            cursor: Some(kind.begin()),
            piece: None,
            count,
            count_first: count,
            since: None,
            ready: false,
            begun: false,
            written: false,
            bytes,
            copied: 0,
            starts,
            clients,
            processes,
        };
        self.staging.all.insert(place.clone(), staged);
        Ok(())
    }

    /// It is gone, or not big any more.
    fn forget_big(&mut self, place: &Place) {
        self.staging.drop_place(place);
        self.big.forget(slot_of(&place.0), place);
    }

    fn copy_pieces(&mut self) -> Result<(), Halt> {
        let mut rounds = 0;
        let mut is_read = false;
        loop {
            // In this order: what was told before the barrier was reached is taken after it was.
            let reached = self.staging.barrier.filter(|epoch| self.shared.drained_source(*epoch, self.order.source));
            self.while_paused()?;
            if self.is_aborted() {
                return Ok(());
            }
            self.begin_again()?;
            if self.staging.all.is_empty() {
                return Ok(());
            }
            if let Some(epoch) = reached
                && self.staging.barrier == Some(epoch)
            {
                self.staging.barrier = None;
                for staged in self.staging.all.values_mut() {
                    staged.ready |= staged.since.is_some_and(|since| since <= epoch);
                    if !staged.begun {
                        staged.tail.drop_old();
                    }
                }
                self.staging.rests_until = Some(Instant::now() + BARRIER_REST);
                self.read_tails()?;
                let all_read = |staged: &Staged| staged.cursor.is_none() && staged.piece.is_none() && !staged.tail.is_everything();
                is_read = self.staging.all.values().all(all_read);
                if is_read {
                    rounds += 1;
                    let left: usize = self.staging.all.values().map(|staged| staged.tail.len()).sum();
                    if left <= FEW || rounds >= ROUNDS_MAX {
                        return Ok(());
                    }
                }
            }
            let rests = self.staging.rests_until.is_some_and(|until| Instant::now() < until);
            let waits = self.staging.all.values().any(|staged| staged.since.is_none()) || is_read;
            if self.staging.barrier.is_none() && (waits || !rests) {
                self.set_barrier();
            }
            let next =
                self.staging.all.iter().find(|(_, s)| s.ready && (s.cursor.is_some() || s.piece.is_some()) && !s.tail.is_everything());
            if let Some(place) = next.map(|(place, _)| place.clone()) {
                self.copy_piece(&place)?;
            } else {
                if let Some(epoch) = self.staging.barrier {
                    self.shared.want_drained(epoch);
                }
                self.wait(Duration::from_millis(2));
            }
        }
    }

    /// Copies begin again that a command has changed as a whole, or end.
    fn begin_again(&mut self) -> Result<(), Halt> {
        let all = self.staging.all.iter();
        let places: Vec<(Place, u32)> = all.filter(|(_, s)| s.tail.is_everything()).map(|(place, s)| (place.clone(), s.starts)).collect();
        for (place, starts) in places {
            self.staging.drop_place(&place);
            self.begin_staging(&place, starts + 1)?;
        }
        self.discard()
    }

    /// Has the workers know what is staged, and asks for the moment at which all that was sent before is answered.
    fn set_barrier(&mut self) {
        self.share_staged();
        self.staging.all.values_mut().for_each(|staged| staged.tail.begin_round());
        // If the topology cannot be changed now, it is tried again.
        let Ok(epoch) = self.publish_observed() else { return };
        self.shared.want_drained(epoch);
        self.staging.barrier = Some(epoch);
        for staged in self.staging.all.values_mut() {
            staged.since.get_or_insert(epoch);
        }
    }

    /// Reads the next piece of a key, and writes the one before.
    fn copy_piece(&mut self, place: &Place) -> Result<(), Halt> {
        let (key, database) = place;
        self.select(Side::Source, *database)?;
        self.select(Side::Target, *database)?;
        let began = Instant::now();
        let Some(staged) = self.staging.all.get_mut(place) else { return Ok(()) };
        let (Some(source), Some(target)) = (&mut self.source.connection, &mut self.target.connection) else { return Err(Halt::Lost) };
        staged.begun = true;
        if let Some(cursor) = &staged.cursor {
            staged.kind.ask(source, key, cursor, staged.count);
        }
        let piece = staged.piece.take().filter(|piece| !piece.is_empty());
        let bytes = piece.as_ref().map_or(0, Piece::bytes);
        if let Some(piece) = &piece {
            write(target, staged, piece);
        }
        let (read, wrote) = self.collect()?;
        if piece.is_some() && !self.written(place, &wrote, bytes)? {
            return Ok(());
        }
        let Some(staged) = self.staging.all.get_mut(place) else { return Ok(()) };
        if let Some(cursor) = &staged.cursor {
            match staged.kind.take(cursor, staged.count, read.last().map(Vec::as_slice).unwrap_or_default()) {
                Some((piece, next)) => {
                    staged.cursor = next;
                    staged.piece = Some(piece);
                }
                // It is of another type by now.
                None => staged.tail.touch_everything(),
            }
        }
        if self.has_mortal_fields(place)? {
            self.move_whole(place, "its fields have times to live of their own");
            return Ok(());
        }
        let taken = began.elapsed();
        if let Some(staged) = self.staging.all.get_mut(place) {
            if taken > LONG_PIECE {
                staged.count = (staged.count / 2).max(staged.count_first / 16).max(1);
            } else if taken < LONG_PIECE / 4 {
                staged.count = (staged.count * 2).min(staged.count_first);
            }
        }
        self.rest_after_piece(taken, bytes)
    }

    /// Others are served between two pieces, and no more bytes are copied than may be.
    fn rest_after_piece(&mut self, taken: Duration, bytes: u64) -> Result<(), Halt> {
        let rest = match self.goal {
            Goal::Fast => Duration::ZERO,
            Goal::Balanced => taken,
            Goal::Gentle => taken * 4,
        };
        let rate = self
            .order
            .bytes_per_second_max
            .map_or(Duration::ZERO, |max| Duration::from_secs_f64(bytes as f64 / max.max(1) as f64).saturating_sub(taken));
        if rest.max(rate) > Duration::ZERO { self.rest(rest.max(rate)) } else { Ok(()) }
    }

    /// Whether fields of the last piece of a hash have times to live (Redis 7.4, Valkey 9): those are not copied.
    fn has_mortal_fields(&mut self, place: &Place) -> Result<bool, Halt> {
        let is_hash = self.staging.all.get(place).is_some_and(|staged| staged.kind == Kind::Hash);
        if !is_hash || !self.fields_may_be_mortal()? {
            return Ok(false);
        }
        let Some(piece) = self.staging.all.get(place).and_then(|staged| staged.piece.as_ref()) else { return Ok(false) };
        let fields: Vec<Vec<u8>> = piece.there.iter().step_by(2).cloned().collect();
        if fields.is_empty() {
            return Ok(false);
        }
        let count = fields.len().to_string();
        let mut args: Vec<&[u8]> = vec![b"HPEXPIRETIME", &place.0, b"FIELDS", count.as_bytes()];
        args.extend(fields.iter().map(Vec::as_slice));
        let answer = self.call(Side::Source, &args)?;
        Ok(reply::is_error(&answer) || reply::elements(&answer).any(|at| reply::integer(at).is_some_and(|at| at >= 0)))
    }

    fn fields_may_be_mortal(&mut self) -> Result<bool, Halt> {
        if let Some(known) = self.mortal_fields {
            return Ok(known);
        }
        let answer = self.call(Side::Source, &[b"COMMAND", b"INFO", b"HPEXPIRETIME"])?;
        let known = reply::is_error(&answer) || reply::elements(&answer).next().is_some_and(|row| !reply::is_null(row));
        self.mortal_fields = Some(known);
        Ok(known)
    }

    /// Takes the answers to a piece that was written. False where the copy does not go on.
    fn written(&mut self, place: &Place, answers: &[Vec<u8>], bytes: u64) -> Result<bool, Halt> {
        let Some(staged) = self.staging.all.get_mut(place) else { return Ok(false) };
        match outcome(answers, !staged.written) {
            Written::Yes => {
                staged.written = true;
                staged.copied += bytes;
                Ok(true)
            }
            Written::Vanished => {
                staged.tail.touch_everything();
                Ok(false)
            }
            Written::Refused(why) if why.starts_with("OOM") => {
                let name = self.name(self.order.target);
                Err(Halt::Stop(format!("{name} has no room for a big key: {why}")))
            }
            Written::Refused(why) => {
                let name = self.name(self.order.target);
                self.move_whole(place, &format!("{name} refuses its pieces: {why}"));
                Ok(false)
            }
        }
    }

    /// Reads again what was touched before the barrier that has been reached.
    fn read_tails(&mut self) -> Result<(), Halt> {
        let places: Vec<Place> = self.staging.all.keys().cloned().collect();
        for place in places {
            while let Some(staged) = self.staging.all.get_mut(&place) {
                let elements = staged.tail.take(TAIL_AT_ONCE);
                if elements.is_empty() {
                    break;
                }
                let (kind, before) = (staged.kind, staged.piece.take());
                self.select(Side::Source, place.1)?;
                self.select(Side::Target, place.1)?;
                let Some(source) = &mut self.source.connection else { return Err(Halt::Lost) };
                kind.ask_elements(source, &place.0, &elements);
                let (read, _) = self.collect()?;
                let Some(piece) = kind.take_elements(&elements, read.last().map(Vec::as_slice).unwrap_or_default()) else {
                    // It is of another type by now.
                    if let Some(staged) = self.staging.all.get_mut(&place) {
                        staged.tail.touch_everything();
                    }
                    break;
                };
                // What was read before is written before.
                for piece in before.into_iter().chain([piece]).filter(|piece| !piece.is_empty()) {
                    let Some(staged) = self.staging.all.get_mut(&place) else { break };
                    let Some(target) = &mut self.target.connection else { return Err(Halt::Lost) };
                    write(target, staged, &piece);
                    let (_, wrote) = self.collect()?;
                    if !self.written(&place, &wrote, 0)? {
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// These slots have left.
    pub(super) fn forget_staged(&mut self, slots: &[Slot]) {
        let places: Vec<Place> = self.staging.all.keys().filter(|(key, _)| slots.contains(&slot_of(key))).cloned().collect();
        for place in &places {
            self.staging.drop_place(place);
        }
        if !places.is_empty() {
            self.share_staged();
        }
    }

    /// Whether what is staged of a key may be used: all of it was read, it was not changed as a whole since, and both nodes are who they were.
    fn is_usable(&self, staged: &Staged) -> bool {
        let same = |side, process: &String| self.end(side).connection.as_ref().is_none_or(|c| c.process.run_id == *process);
        let complete = staged.cursor.is_none() && staged.piece.is_none() && staged.written && !staged.tail.is_everything();
        complete && same(Side::Source, &staged.processes.0) && same(Side::Target, &staged.processes.1)
    }

    /// Before keys are read in a leg: what is staged of them and is worth nothing is forgotten.
    pub(super) fn drop_unusable(&mut self, is_ours: &[bool]) {
        let of_leg = self.staging.all.iter().filter(|((key, _), _)| is_ours.get(slot_of(key).index()).is_some_and(|ours| *ours));
        let places: Vec<Place> = of_leg.filter(|(_, staged)| !self.is_usable(staged)).map(|(place, _)| place.clone()).collect();
        for place in places {
            self.unusable(&place, "it was changed as a whole, or a node was started again, after it had been copied in pieces");
        }
    }

    /// What is staged of a key is worth nothing: it is moved whole.
    pub(super) fn unusable(&mut self, place: &Place, why: &str) {
        self.move_whole(place, why);
    }

    /// Removes staging keys that are not used any more.
    pub(super) fn discard(&mut self) -> Result<(), Halt> {
        while let Some((database, name)) = self.staging.discarded.last().cloned() {
            self.select(Side::Target, database)?;
            self.call(Side::Target, &[b"UNLINK", &name])?;
            self.staging.discarded.pop();
        }
        Ok(())
    }

    /// The move is over: nothing of ours stays, if the target can be asked.
    pub(super) fn discard_all(&mut self) {
        self.staging.drop_all();
        self.own.share_staged(Vec::new());
        let may_ask = self.target.is_idle() && self.target.connection.as_ref().is_some_and(|connection| connection.unanswered == 0);
        if self.staging.discarded.is_empty() || !may_ask {
            return;
        }
        if self.discard().is_err() {
            info!(move_id = self.order.id.0, "temporary keys at the target are removed by the next move there, or end by themselves");
        }
    }

    /// What an earlier move, or an earlier router, has left of its temporary keys.
    pub(super) fn sweep(&mut self, side: Side, keys: &[Key]) -> Result<(), Halt> {
        let stale: Vec<Key> = keys.iter().filter(|key| self.is_left_over(key)).cloned().collect();
        if stale.is_empty() {
            return Ok(());
        }
        info!(move_id = self.order.id.0, keys = stale.len(), "removed temporary keys that an earlier move left");
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(stale.iter().map(|key| &key[..]));
        self.call(side, &args).map(|_| ())
    }

    /// Whether a temporary key is nobody's: of another router, or of a move that has ended.
    fn is_left_over(&self, key: &[u8]) -> bool {
        let Some((incarnation, rest)) =
            key.strip_prefix(TEMPORARY).and_then(|rest| std::str::from_utf8(rest).ok()).and_then(|rest| rest.split_once(":staging-"))
        else {
            return false;
        };
        let Some(number) = rest.split('-').next().and_then(|number| number.parse::<u64>().ok()) else { return false };
        let is_ours = number == self.order.id.0 && self.staging.all.values().any(|staged| staged.name == key);
        let is_anothers = number != self.order.id.0 && self.shared.plan().moves.by_id.keys().any(|id| id.0 == number);
        incarnation != self.shared.incarnation || !(is_ours || is_anothers)
    }
}

/// Writes a piece to the staging key, and renews its life.
fn write(target: &mut Connection, staged: &Staged, piece: &Piece) {
    target.push(&[b"MULTI"]);
    if staged.written {
        target.push(&[b"PEXPIRE", &staged.name, LIFE_MS]);
    } else {
        target.push(&[b"UNLINK", &staged.name]);
    }
    staged.kind.write(target, &staged.name, piece);
    if !staged.written {
        target.push(&[b"PEXPIRE", &staged.name, LIFE_MS]);
    }
    target.push(&[b"EXEC"]);
}

/// What the answers to [`write`] mean.
fn outcome(answers: &[Vec<u8>], is_first: bool) -> Written {
    let exec = answers.last().map(Vec::as_slice).unwrap_or_default();
    if let Some(error) = answers.iter().map(Vec::as_slice).chain(reply::elements(exec)).find(|answer| reply::is_error(answer)) {
        return Written::Refused(error_text(error));
    }
    // What is not there any more was written anew, and is not whole.
    if !is_first && reply::elements(exec).next().and_then(reply::integer) != Some(1) {
        return Written::Vanished;
    }
    Written::Yes
}
