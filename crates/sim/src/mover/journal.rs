//! State that outlives the mover: the journal, the recovery after a crash of the router, and facts for the checker.
//! Also FLUSHALL, which stops the movers.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::rc::Rc;

use switchyard_policy::migration::record::{Kind, OpenLeg, OpenMove, Queue, Record, RecordGroup, Replay};
use switchyard_policy::migration::{DriverEvent, Durability, Event, Outcome, Process};
use switchyard_policy::topology::MoveId;

use super::staging::WorkerMessage;
use super::{Fleet, Flush, Lane, List, SlotView, Stage};
use crate::history::Place;
use crate::injected::{Bug, Planted};
use crate::node::{KeyIx, Op, STAGING};
use crate::worker::Worker;
use crate::world::{Ev, World, say};

/// Records that are submitted to the journal together.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(super) records: Vec<Record>,
    /// Move and leg of the driver, and its record numbers.
    numbers: Option<(u64, u32, RangeInclusive<u64>)>,
}

impl World {
    // The journal.

    pub(super) fn write(&mut self, lane: Lane, numbers: Option<RangeInclusive<u64>>, records: Vec<Record>) {
        let m = &self.movers[lane];
        let Some(of) = records.first().map(Record::move_id) else { return };
        let kind = Kind::of(&records);
        let numbers = numbers.map(|numbers| (m.move_id, m.leg, numbers));
        let given_up = self.fleet.queue.push(RecordGroup { of, kind, records: Entry { records, numbers } });
        if !given_up.is_empty() {
            say!(self, "never written: {given_up:?}");
        }
        self.sync();
    }

    fn sync(&mut self) {
        if self.fleet.syncing {
            return;
        }
        let is_full = self.fleet.disk_is_full;
        let room = self.fleet.queue.select_next(|_| if is_full { Err(()) } else { Ok(()) });
        for given in room.refused.into_iter().flat_map(|(refused, ())| refused) {
            let Some(lane) = self.lane_of_move(given.of) else { continue };
            // The operator requests the move again.
            self.movers[lane].moves_left += 1;
            self.movers[lane].stage = Stage::Idle;
            let when = self.random.between(1_000, 20_000);
            self.after(when, Ev::NextMove { lane });
        }
        if !self.fleet.queue.writing().is_empty() {
            self.fleet.syncing = true;
            // Some disk writes are slow.
            let slow = self.random.chance(100);
            let delay = if slow { self.random.between(2_000, 30_000) } else { self.random.between(100, 1_500) };
            self.after(delay, Ev::Synced);
        }
    }

    pub(crate) fn synced(&mut self) {
        if self.fleet.disk_is_broken {
            let again = self.random.between(500, 3_000);
            self.after(again, Ev::Synced);
            return;
        }
        self.fleet.syncing = false;
        let mut durable = Vec::new();
        let mut accepted = Vec::new();
        for given in self.fleet.queue.written() {
            given.records.records.iter().for_each(|record| self.keep(record));
            let Some(lane) = self.lane_of_move(given.of) else { continue };
            accepted.extend((given.kind == Kind::StartsMove).then_some(lane));
            let of_leg = (self.movers[lane].move_id, self.movers[lane].leg);
            let numbers = given.records.numbers.filter(|(of, leg, _)| (*of, *leg) == of_leg);
            durable.extend(numbers.map(|(.., numbers)| (lane, numbers)));
        }
        self.sync();
        for lane in accepted {
            if self.movers[lane].stage == Stage::Accepting {
                self.live(lane, None);
            }
        }
        for (lane, numbers) in durable {
            self.on_mover_event(lane, DriverEvent::Recorded(numbers));
        }
    }

    /// Repairs the disk of the journal.
    pub(crate) fn disk_is_well(&mut self) {
        (self.fleet.disk_is_full, self.fleet.disk_is_broken) = (false, false);
        if self.router_up {
            self.sync();
        }
    }

    /// Returns the mover of a current or previous move.
    pub(super) fn lane_of_move(&self, id: MoveId) -> Option<Lane> {
        self.movers.iter().position(|mover| mover.move_id == id.0)
    }

    /// Journal state of the current move.
    pub(super) fn open_move(&self, lane: Lane) -> Option<&OpenMove> {
        self.fleet.durable.open.get(&MoveId(self.movers[lane].move_id))
    }

    /// Journal state of the current leg.
    pub(super) fn open_leg(&self, lane: Lane) -> Option<&OpenLeg> {
        self.open_move(lane).and_then(|open| open.leg.as_ref())
    }

    fn keep(&mut self, record: &Record) {
        if let Record::LegEnded { owner, move_id, .. } = record
            && let Some(lane) = self.lane_of_move(*move_id)
        {
            self.note_lost(lane, *owner);
        }
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        self.fleet.journal.push(bytes);
        if let Err(error) = self.fleet.durable.apply(record) {
            self.violated(format!("the journal contradicts itself: {error}"));
        }
    }

    // A crash of the router, and the recovery.

    pub(crate) fn mover_killed(&mut self) {
        // Some unsynced data is on the disk. Records submitted together are there together.
        let writing = std::mem::replace(&mut self.fleet.queue, queue(self.planted)).written();
        let kept = self.random.below(writing.len() as u64 + 1);
        for given in writing.into_iter().take(kept as usize) {
            given.records.records.iter().for_each(|record| self.keep(record));
        }
        let planted = self.planted;
        let fleet = &mut self.fleet;
        fleet.syncing = false;
        fleet.flush = None;
        fleet.flushes.clear();
        fleet.broken = Default::default();
        fleet.cleared.clear();
        for m in &mut self.movers {
            (m.life, m.step) = (None, None);
            m.turn += 1;
            m.driver = None;
            m.shown = SlotView::Nothing;
            m.view = None;
            m.inbox.clear();
            m.pumping = false;
            m.batches.clear();
            m.late.clear();
            m.list = List::default();
            m.barrier = None;
            m.links = Default::default();
            m.stager.forget_all(planted);
            m.stage = Stage::Idle;
        }
    }

    pub(crate) fn recover(&mut self) {
        let records: Result<Vec<Record>, _> = self.fleet.journal.iter().map(|bytes| Record::decode(bytes)).collect();
        let replay = match records {
            Ok(records) => Replay::of(&records),
            Err(error) => {
                self.violated(error.to_string());
                return;
            }
        };
        let replay = match replay {
            Ok(replay) => replay,
            Err(error) => {
                self.violated(error.to_string());
                return;
            }
        };
        for m in &mut self.movers {
            m.resume = None;
        }
        if self.bug(Bug::TopologyDecides) {
            for move_id in self.fleet.durable.open.keys().copied().collect::<Vec<_>>() {
                let lane = self.lane_of_move(move_id).unwrap_or_default();
                self.write(lane, None, vec![Record::Ended { move_id }]);
            }
        } else {
            let most = if self.bug(Bug::FirstMoveTakenUp) { 1 } else { usize::MAX };
            replay.open.into_iter().take(most).for_each(|(id, open)| self.resume_move(id, open));
        }
        for lane in 0..self.movers.len() {
            let m = &mut self.movers[lane];
            m.databases.clear();
            let goes_on = m.resume.as_ref().and_then(|open| open.leg.as_ref()).is_some_and(|leg| leg.moving);
            m.shown = if goes_on { SlotView::Moving } else { SlotView::Nothing };
            if !goes_on {
                m.watched.unnoticed.clear();
                m.watched.in_hand.clear();
            }
        }
        self.fleet.epoch += 1;
        let view = Rc::new(self.view(None));
        self.workers = (0..self.workers.len()).map(|_| Worker::new(view.clone())).collect();
        self.hot_begins();
        for lane in 0..self.movers.len() {
            let when = self.random.between(100, 3_000);
            self.after(when, Ev::NextMove { lane });
        }
    }

    /// Resumes a move.
    fn resume_move(&mut self, id: MoveId, open: OpenMove) {
        let lane = self.lane_of_slot(open.slots[0]);
        let names = open.keys.as_ref().map(|keys| Rc::new(keys.iter().map(|key| self.key_ix(key)).collect()));
        let m = &mut self.movers[lane];
        m.scope = names;
        m.move_id = id.0;
        m.source = usize::from(open.source.0);
        m.target = usize::from(open.target.0);
        m.leg = open.next_leg;
        let (source, target) = (m.source, m.target);
        m.slots = open.slots.iter().copied().filter(|slot| !open.handed_over.contains(slot)).collect();
        if !open.handed_over.is_empty() {
            // Apply the legs that have ended to the map.
            m.leg_slots.clone_from(&open.handed_over);
            self.fleet.map = self.map_with_leg_at(lane, target);
        }
        let m = &mut self.movers[lane];
        if m.slots.is_empty() {
            self.write(lane, None, vec![Record::Ended { move_id: id }]);
            return;
        }
        m.leg_slots.clone_from(&m.slots);
        if let Some(leg) = &open.leg {
            m.leg = leg.leg;
            m.leg_slots.clone_from(&leg.slots);
            for (node, process) in [(source, &leg.source), (target, &leg.target)] {
                let broken = process.run_id.parse().ok().map(|number: u32| (number, process.client_id));
                self.fleet.broken[node].extend(broken);
            }
        }
        self.movers[lane].resume = Some(open);
        self.fleet.map = self.map_with_leg_at(lane, source);
    }

    // FLUSHALL.

    pub(crate) fn on_flush_request(&mut self, op: u64) {
        if self.fleet.flush.is_some() {
            self.fleet.flushes.push_back(op);
            return;
        }
        self.fleet.flush = Some(Flush { op, sent: false, reply_count: 0, quiet: BTreeSet::new() });
        for lane in 0..self.movers.len() {
            self.movers[lane].stager.notify(WorkerMessage::Flush);
            if self.movers[lane].protocol.copies_first() && self.movers[lane].driver.is_some() {
                self.mover_event(lane, Event::Rewritten);
            }
            self.mover_event(lane, Event::Quiesce);
        }
    }

    /// Records that a mover has quiesced until the FLUSHALL ends.
    pub(super) fn on_quiesced(&mut self, lane: Lane) {
        let Some(flush) = &mut self.fleet.flush else { return };
        flush.quiet.insert(lane);
        let are_quiet = flush.quiet.len() == self.movers.len();
        if are_quiet || self.bug(Bug::FlushWaitsForOne) {
            self.flush_goes();
        }
    }

    fn flush_goes(&mut self) {
        if let Some(flush) = self.fleet.flush.as_mut().filter(|flush| !flush.sent) {
            flush.sent = true;
            let op = flush.op;
            self.flush_everywhere(op);
        }
    }

    pub(crate) fn on_flush_reply(&mut self, op: u64) {
        let both = match self.fleet.flush.as_mut().filter(|flush| flush.op == op) {
            Some(flush) => {
                flush.reply_count += 1;
                flush.reply_count == 2
            }
            None => true,
        };
        if both {
            self.flush_done(op);
        }
    }

    /// Ends a FLUSHALL that is no longer in flight.
    pub(crate) fn flush_landed(&mut self, op: u64) {
        if self.fleet.flush.as_ref().is_none_or(|flush| flush.op != op) {
            if self.ops.get(&op).is_some_and(|command| command.op == Op::Flush) {
                self.flush_done(op);
            }
            return;
        }
        self.fleet.flush = None;
        if !self.bug(Bug::FlushHalfAwaited) {
            self.flush_done(op);
        }
        (0..self.movers.len()).for_each(|lane| self.mover_event(lane, Event::Resume));
        if let Some(next) = self.fleet.flushes.pop_front() {
            self.on_flush_request(next);
        }
    }

    // For the checker.

    /// Records keys left at an unreachable target by a rollback of a protocol that copies first. They stay until keys
    /// move there again.
    pub(super) fn note_left_at_target(&mut self, lane: Lane, outcome: &Outcome) {
        let m = &self.movers[lane];
        if m.protocol.copies_first() && matches!(outcome, Outcome::Returned { .. }) && !m.links[1].ready {
            let own: Vec<KeyIx> = (0..self.keys.len()).filter(|key| self.is_own(lane, *key)).collect();
            let target = self.movers[lane].target;
            self.fleet.left_at[target].extend(own);
        }
    }

    /// Checks for a single owner: after a leg, the side that lost the slots has no key of them, if its process is the
    /// one that the machine knew at the end.
    pub(super) fn check_keys_left(&mut self, lane: Lane, outcome: &Outcome) {
        let side = match outcome {
            Outcome::Moved => 0,
            Outcome::Returned { .. } => 1,
            Outcome::NotBegun { .. } => return,
        };
        let left_at = &self.fleet.left_at[self.movers[lane].node_of(side)];
        let node = &self.nodes[self.movers[lane].node_of(side)];
        let known = self.movers[lane].watched.met_at_end[side] == Some(node.process);
        let now = self.clock(self.movers[lane].node_of(side));
        let left = node
            .keys
            .range(..STAGING)
            .filter(|(_, entry)| entry.expires_us.is_none_or(|end| end > now))
            .map(|(key, _)| *key);
        let apart = &self.movers[lane].watched.apart;
        let left: Vec<KeyIx> =
            left.filter(|key| self.is_own(lane, *key) && !apart.contains(key) && !left_at.contains(key)).collect();
        if node.up && known && !left.is_empty() {
            self.violated(format!(
                "the leg has ended ({outcome:?}), but the side without the slots still has keys {left:?}"
            ));
        }
    }

    /// Records keys that may move again after both nodes were killed in a leg: the key is on record, still at the
    /// source and missing at the target. The machine reports it.
    pub(crate) fn note_keys_that_may_move_again(&mut self, node: usize) {
        (0..self.movers.len()).for_each(|lane| self.note_keys_that_may_move_again_by(lane, node));
    }

    fn note_keys_that_may_move_again_by(&mut self, lane: Lane, node: usize) {
        self.movers[lane].watched.killed[node] = true;
        let m = &self.movers[lane];
        if m.watched.killed != [true; 2] || m.durability != Durability::Memory {
            return;
        }
        let Some(leg) = self.open_leg(lane).filter(|leg| leg.moving) else { return };
        let has = |ix: usize, key: KeyIx| {
            let node = &self.nodes[ix];
            if node.up { node.keys.get(&key).cloned() } else { node.disk.get(&key).cloned() }
        };
        let mut again = Vec::new();
        for key in 0..self.keys.len() {
            let eras = leg.away.get(&self.fleet.fingerprints.of(&self.keys[key]));
            let entry = has(m.source, key).filter(|_| eras.is_some()).map(|entry| self.in_time(m.source, entry));
            // Both processes differ from the record: the key moves again and replaces the value of a target that
            // restarts once more.
            let is_doubtful = eras.is_some_and(|eras| eras.source != leg.eras.source && eras.target != leg.eras.target);
            // An expired key is gone at the target, too.
            let there = has(m.target, key).filter(|_| !is_doubtful).map(|entry| self.in_time(m.target, entry));
            let gone_us = there.map_or(Some(self.now), |there| there.expires_us.map(|end| end.max(self.now)));
            again.extend(entry.zip(gone_us).map(|(entry, gone_us)| (key, entry, gone_us)));
        }
        for (key, entry, gone_us) in again {
            self.history.reverts(key, Some(entry), gone_us, Place::Doubtful);
        }
    }

    /// Whether the current move may end without a request to its source for a key: it is connected to the listed
    /// process, and the list lacks the key. A restart may then go unnoticed, and the key keeps its state, whatever the
    /// restarted node has.
    fn passes_over(&self, lane: Lane, key: KeyIx) -> bool {
        let m = &self.movers[lane];
        let is_listed = m.list.of.is_some() && m.list.of == m.links[0].process.map(|(process, _)| process);
        is_listed
            && m.list.of == Some(self.nodes[m.source].process)
            && self.is_left(lane, key)
            && !m.list.keys.contains(&key)
    }

    /// Returns the location of a key by the journal when a node loses data.
    pub(crate) fn place_of(&self, key: KeyIx, node: usize, had: bool) -> Place {
        let lane = self.lane_of(key);
        let m = &self.movers[lane];
        let slot = self.slot_of(key);
        let fingerprint = self.fleet.fingerprints.of(&self.keys[key]);
        let name = &self.keys[key];
        // Whether the move concerns this key, for a move of slots or of keys.
        let is_about = |keys: Option<&[switchyard_policy::migration::Key]>| {
            keys.map_or_else(
                || self.fleet.map.placement_override(name).is_none(),
                |keys| keys.binary_search(name).is_ok(),
            )
        };
        let lives_at = usize::from(self.fleet.map.lives_at(name).0);
        let of_move = self.open_move(lane);
        let of_this = || self.fleet.pending().filter(|record| record.move_id() == MoveId(m.move_id));
        let open = of_move.filter(|open| open.leg.as_ref().is_some_and(|leg| leg.moving && leg.slots.contains(&slot)));
        if open.is_some_and(|open| !is_about(open.keys.as_deref())) {
            return if node == lives_at { Place::Here } else { Place::Elsewhere };
        }
        let Some(leg) = open.and_then(|open| open.leg.as_ref()) else {
            // A leg that has ended by the journal, whatever the topology is.
            let ended = of_move.filter(|open| open.handed_over.contains(&slot));
            let owner =
                ended.filter(|open| is_about(open.keys.as_deref())).map_or(lives_at, |open| usize::from(open.target.0));
            let is_of_leg = m.leg_slots.contains(&slot);
            let pending = is_of_leg && of_this().any(|record| matches!(record, Record::LegMoving { .. }));
            return if pending || node == owner && self.passes_over(lane, key) {
                Place::Doubtful
            } else if node == owner {
                Place::Here
            } else if is_of_leg && node == m.target && m.driver.is_some() {
                // The leg may send no further request to it until its end.
                Place::UntilNoticed
            } else {
                Place::Elsewhere
            };
        };
        if open.is_some_and(|open| open.protocol.copies_first()) {
            // One record decides for all keys. Until it is submitted, the source may receive another request.
            let is_decided = leg.cut_over && !of_this().any(|record| matches!(record, Record::LegEnded { .. }));
            return match (node == m.target, leg.cut_over) {
                (true, true) if is_decided => Place::Here,
                (false, true) => Place::Elsewhere,
                (true, false) if !of_this().any(|record| matches!(record, Record::CutOver { .. })) => {
                    Place::UntilNoticed
                }
                _ => Place::Doubtful,
            };
        }
        let pending = of_this().any(|record| match record {
            Record::Moved { keys, .. } | Record::Committed { keys, .. } | Record::Returned { keys, .. } => {
                keys.contains(&fingerprint)
            }
            Record::LegEnded { .. } => true,
            _ => false,
        });
        let there = |ix: usize| {
            self.nodes[ix].keys.contains_key(&key) || self.nodes[ix].disk.contains_key(&key) && !self.nodes[ix].up
        };
        // The process has changed or will change, though that is not on record.
        let is_gone = |met: &Process, ix: usize| !self.nodes[ix].up || self.nodes[ix].process.to_string() != met.run_id;
        if let Some(eras) = leg.away.get(&fingerprint) {
            if node == m.target {
                // A copy that was read from it may outlive the node.
                let read = m.watched.in_hand.contains(&(key % self.names()));
                // A leg that rolls back may have seen that the key is missing, which is recorded only with the end of
                // the leg.
                let seen_absent = leg.rolled_back.is_some() && !had;
                if pending || read || there(m.source) || seen_absent { Place::Doubtful } else { Place::Here }
            } else if pending
                || eras.source == leg.eras.source && (eras.target != leg.eras.target || is_gone(&leg.target, m.target))
            {
                // Its removal may not have been executed. Then the key moves again.
                Place::Doubtful
            } else {
                // After a rollback, keys return to it. A node that loses data, restarts, and goes unnoticed until the
                // end of the leg shows its earlier keys.
                Place::UntilNoticed
            }
        } else if node == m.source || pending || had {
            Place::Doubtful
        } else {
            Place::UntilNoticed
        }
    }
}

impl Fleet {
    /// Records submitted to the journal and not yet durable.
    pub(super) fn pending(&self) -> impl Iterator<Item = &Record> {
        self.queue.all().flat_map(|given| &given.records.records)
    }
}

#[cfg(feature = "planted-bugs")]
pub(super) fn queue(planted: Option<Planted>) -> Queue<Entry> {
    match planted {
        Some(Planted::Machine(bug)) => Queue::default().with(Some(bug)),
        _ => Queue::default(),
    }
}

#[cfg(not(feature = "planted-bugs"))]
pub(super) fn queue(_planted: Option<Planted>) -> Queue<Entry> {
    Queue::default()
}
