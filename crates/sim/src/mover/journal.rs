//! What outlives the mover: the journal, what follows from it after a crash of the router, and what the checker must know of it. And FLUSHALL, which
//! stops the mover.

use std::ops::RangeInclusive;
use std::rc::Rc;

use switchyard_policy::migration::record::{Given, Kind, Queue, Record, Replay};
use switchyard_policy::migration::{Durability, Event, Happened, Outcome};
use switchyard_policy::topology::{MoveId, Stage as SlotStage};

use super::staging::Told;
use super::{Flush, Mover, Stage};
use crate::history::Place;
use crate::node::{KeyIx, Op, STAGING};
use crate::planted::{Bug, Planted};
use crate::worker::Worker;
use crate::world::{Ev, World, say};

/// What the journal is given at once.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(super) records: Vec<Record>,
    /// Of the driver of which leg of which move, and their numbers.
    numbers: Option<(u64, u32, RangeInclusive<u64>)>,
}

impl World {
    // The journal.

    pub(super) fn write(&mut self, numbers: Option<RangeInclusive<u64>>, records: Vec<Record>) {
        let m = &mut self.mover;
        let Some(of) = records.first().map(Record::move_id) else { return };
        let kind = Kind::of(&records);
        let numbers = numbers.map(|numbers| (m.move_id, m.leg, numbers));
        let given_up = m.queue.give(Given { of, kind, what: Entry { records, numbers } });
        if !given_up.is_empty() {
            say!(self, "never written: {given_up:?}");
        }
        self.sync();
    }

    fn sync(&mut self) {
        if self.mover.syncing {
            return;
        }
        let is_full = self.mover.disk_is_full;
        let room = self.mover.queue.decide(|_| if is_full { Err(()) } else { Ok(()) });
        if room.refused.is_some() {
            // Whoever wants the move asks again.
            self.mover.moves_left += 1;
            self.mover.stage = Stage::Idle;
            let when = self.random.between(1_000, 20_000);
            self.after(when, Ev::NextLeg);
        }
        if !self.mover.queue.writing().is_empty() {
            self.mover.syncing = true;
            // A disk is slow now and then.
            let slow = self.random.chance(100);
            let delay = if slow { self.random.between(2_000, 30_000) } else { self.random.between(100, 1_500) };
            self.after(delay, Ev::Synced);
        }
    }

    pub(crate) fn synced(&mut self) {
        if self.mover.disk_is_broken {
            let again = self.random.between(500, 3_000);
            self.after(again, Ev::Synced);
            return;
        }
        self.mover.syncing = false;
        let mut durable = Vec::new();
        let mut accepted = false;
        for given in self.mover.queue.written() {
            accepted |= given.kind == Kind::Begins;
            given.what.records.iter().for_each(|record| self.keep(record));
            let of_leg = (self.mover.move_id, self.mover.leg);
            durable.extend(given.what.numbers.filter(|(of, leg, _)| (*of, *leg) == of_leg).map(|(.., numbers)| numbers));
        }
        self.sync();
        if accepted && self.mover.stage == Stage::Accepting {
            self.mover.begun = true;
            self.mover.stage = Stage::Idle;
            self.next_leg();
        }
        for numbers in durable {
            self.mover_hears(Happened::Recorded(numbers));
        }
    }

    /// The disk of the journal has room again, and works.
    pub(crate) fn disk_is_well(&mut self) {
        (self.mover.disk_is_full, self.mover.disk_is_broken) = (false, false);
        if self.router_up {
            self.sync();
        }
    }

    fn keep(&mut self, record: &Record) {
        if let Record::LegEnded { owner, .. } = record {
            self.note_lost(*owner);
        }
        let mut bytes = Vec::new();
        record.encode(&mut bytes);
        self.mover.journal.push(bytes);
        if let Err(error) = self.mover.durable.apply(record) {
            self.violated(format!("the journal contradicts itself: {error}"));
        }
    }

    // A crash of the router, and what comes after.

    pub(crate) fn mover_killed(&mut self) {
        // Some of what was written and not synced is on the disk all the same. What is given together is there together.
        let writing = std::mem::replace(&mut self.mover.queue, queue(self.planted)).written();
        let kept = self.random.below(writing.len() as u64 + 1);
        for given in writing.into_iter().take(kept as usize) {
            given.what.records.iter().for_each(|record| self.keep(record));
        }
        let planted = self.planted;
        let m = &mut self.mover;
        m.syncing = false;
        m.aborted = false;
        m.driver = None;
        m.view = None;
        m.inbox.clear();
        m.pumping = false;
        m.batches.clear();
        m.list.clear();
        (m.listed_of, m.anything) = (None, false);
        m.barrier = None;
        m.flush = None;
        m.flushes.clear();
        m.links = Default::default();
        m.broken = Default::default();
        m.cleared.clear();
        m.stager.forget_all(planted);
        m.stage = Stage::Idle;
    }

    pub(crate) fn recover(&mut self) {
        let records: Result<Vec<Record>, _> = self.mover.journal.iter().map(|bytes| Record::decode(bytes)).collect();
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
        self.mover.resume = None;
        self.mover.begun = false;
        let mut view = None;
        if let Some((id, open)) = replay.open.into_iter().next().filter(|_| !self.bug(Bug::TopologyDecides)) {
            let names = open.keys.as_ref().map(|keys| Rc::new(keys.iter().map(|key| self.key_ix(key)).collect()));
            let m = &mut self.mover;
            m.scope = names;
            m.begun = true;
            m.move_id = id.0;
            m.source = usize::from(open.source.0);
            m.target = usize::from(open.target.0);
            m.leg = open.next_leg;
            if !open.handed_over.is_empty() {
                m.begun = false;
                let target = m.target;
                self.mover.map = self.map_with_leg_at(target);
                self.write(None, vec![Record::Ended { move_id: id }]);
            } else if let Some(leg) = open.leg {
                m.leg = leg.leg;
                for (node, process) in [(m.source, &leg.source), (m.target, &leg.target)] {
                    m.broken[node].extend(process.run_id.parse().ok().map(|process_number: u32| (process_number, process.client_id)));
                }
                if leg.moving {
                    view = Some(SlotStage::Moving { leg: m.leg });
                }
                m.resume = Some(leg);
                let source = m.source;
                self.mover.map = self.map_with_leg_at(source);
            } else {
                let source = m.source;
                self.mover.map = self.map_with_leg_at(source);
            }
        } else if self.bug(Bug::TopologyDecides) {
            let open: Vec<MoveId> = self.mover.durable.open.keys().copied().collect();
            for move_id in open {
                self.write(None, vec![Record::Ended { move_id }]);
            }
        }
        if view.is_none() {
            self.mover.unnoticed.clear();
            self.mover.in_hand.clear();
        }
        self.mover.epoch += 1;
        let view = Rc::new(self.view(self.mover.epoch, view));
        self.workers = (0..self.workers.len()).map(|_| Worker::new(view.clone())).collect();
        let when = self.random.between(100, 3_000);
        self.after(when, Ev::NextLeg);
    }

    // FLUSHALL.

    pub(crate) fn flush_asked(&mut self, op: u64) {
        if self.mover.flush.is_some() {
            self.mover.flushes.push_back(op);
            return;
        }
        self.mover.flush = Some(Flush { op, sent: false, told: 0 });
        self.mover.stager.tell(Told::Flush);
        self.mover_event(Event::Quiesce);
    }

    pub(super) fn flush_goes(&mut self) {
        if let Some(flush) = self.mover.flush.as_mut().filter(|flush| !flush.sent) {
            flush.sent = true;
            let op = flush.op;
            self.flush_everywhere(op);
        }
    }

    pub(crate) fn flush_told(&mut self, op: u64) {
        let both = match self.mover.flush.as_mut().filter(|flush| flush.op == op) {
            Some(flush) => {
                flush.told += 1;
                flush.told == 2
            }
            None => true,
        };
        if both {
            self.flush_done(op);
        }
    }

    /// It is in flight nowhere any more.
    pub(crate) fn flush_landed(&mut self, op: u64) {
        if self.mover.flush.is_none_or(|flush| flush.op != op) {
            if self.ops.get(&op).is_some_and(|command| command.op == Op::Flush) {
                self.flush_done(op);
            }
            return;
        }
        self.mover.flush = None;
        if !self.bug(Bug::FlushHalfAwaited) {
            self.flush_done(op);
        }
        self.mover_event(Event::Resume);
        if let Some(next) = self.mover.flushes.pop_front() {
            self.flush_asked(next);
        }
    }

    // For the checker.

    /// One owner: when a leg ends nothing of its slots is left at the side that they leave, if the process there is still the one that
    /// the machine knew when it said so.
    pub(super) fn look_for_what_is_left(&mut self, outcome: &Outcome) {
        let side = match outcome {
            Outcome::Moved => 0,
            Outcome::Returned { .. } => 1,
            Outcome::NotBegun { .. } => return,
        };
        let left_at = &self.mover.left_at[self.node_of(side)];
        let node = &self.nodes[self.node_of(side)];
        let known = self.mover.met_at_end[side] == Some(node.process);
        let now = self.now;
        let left = node.keys.range(..STAGING).filter(|(_, entry)| entry.expires_us.is_none_or(|end| end > now)).map(|(key, _)| *key);
        let left: Vec<KeyIx> = left.filter(|key| self.is_own(*key) && !left_at.contains(key)).collect();
        if node.up && known && !left.is_empty() {
            self.violated(format!("the leg has ended ({outcome:?}), and keys {left:?} are left at the side that the slots have left"));
        }
    }

    /// Both nodes have been killed since the leg began: what is on record, the source still shows, and the target has not, may be moved again (the machine
    /// reports it).
    pub(crate) fn note_moved_again(&mut self, node: usize) {
        self.mover.killed[node] = true;
        let m = &self.mover;
        if m.killed != [true; 2] || m.durability != Durability::Memory {
            return;
        }
        let Some(leg) = m.durable.open.values().find_map(|open| open.leg.as_ref()).filter(|leg| leg.moving) else { return };
        let has = |ix: usize, key: KeyIx| {
            let node = &self.nodes[ix];
            if node.up { node.keys.get(&key).cloned() } else { node.disk.get(&key).cloned() }
        };
        let mut again = Vec::new();
        for key in 0..self.keys.len() {
            let eras = leg.away.get(&m.fingerprints.of(&self.keys[key]));
            let entry = has(m.source, key).filter(|_| eras.is_some());
            // Both are other processes than those of its record: it is moved again, and what it is then replaces what a target shows that restarts once more.
            let is_doubtful = eras.is_some_and(|eras| eras.source != leg.eras.source && eras.target != leg.eras.target);
            // One whose time is over is gone at the target, too.
            let there = has(m.target, key).filter(|_| !is_doubtful);
            let gone_us = there.map_or(Some(self.now), |there| there.expires_us.map(|end| end.max(self.now)));
            again.extend(entry.zip(gone_us).map(|(entry, gone_us)| (key, entry, gone_us)));
        }
        for (key, entry, gone_us) in again {
            self.history.reverts(key, Some(entry), gone_us, Place::Doubtful);
        }
    }

    /// Where a key is, by the journal, when a node forgets.
    pub(crate) fn place_of(&self, key: KeyIx, node: usize, had: bool) -> Place {
        let m = &self.mover;
        let fingerprint = m.fingerprints.of(&self.keys[key]);
        let name = &self.keys[key];
        // Of a move of a slot as of one of keys: whether it is about this key.
        let is_about = |keys: Option<&[switchyard_policy::migration::Key]>| {
            keys.map_or_else(|| m.map.exception(name).is_none(), |keys| keys.binary_search(name).is_ok())
        };
        let lives_at = usize::from(m.map.lives_at(name).0);
        let open = m.durable.open.values().find(|open| open.leg.as_ref().is_some_and(|leg| leg.moving));
        if open.is_some_and(|open| !is_about(open.keys.as_deref())) {
            return if node == lives_at { Place::Here } else { Place::Elsewhere };
        }
        let Some(leg) = open.and_then(|open| open.leg.as_ref()) else {
            // A leg that has ended, by the journal, whatever the topology says.
            let ended = m.durable.open.values().rfind(|open| !open.handed_over.is_empty());
            let owner = ended.filter(|open| is_about(open.keys.as_deref())).map_or(lives_at, |open| usize::from(open.target.0));
            let pending = m.pending().any(|record| matches!(record, Record::LegMoving { .. }));
            return if pending {
                Place::Doubtful
            } else if node == owner {
                Place::Here
            } else if node == m.target && m.driver.is_some() {
                // Until the end of the leg it may be asked for nothing more.
                Place::UntilNoticed
            } else {
                Place::Elsewhere
            };
        };
        let pending = m.pending().any(|record| match record {
            Record::Moved { keys, .. } | Record::Returned { keys, .. } => keys.contains(&fingerprint),
            Record::LegEnded { .. } => true,
            _ => false,
        });
        let there = |ix: usize| self.nodes[ix].keys.contains_key(&key) || self.nodes[ix].disk.contains_key(&key) && !self.nodes[ix].up;
        if let Some(eras) = leg.away.get(&fingerprint) {
            if node == m.target {
                // What was read of it may outlive the node.
                let read = m.in_hand.contains(&key);
                if pending || read || there(m.source) { Place::Doubtful } else { Place::Here }
            } else if pending || eras.source == leg.eras.source && eras.target != leg.eras.target {
                // Its removal may not have been done; then it is moved as if it had not been.
                Place::Doubtful
            } else {
                // If the leg goes back keys come to it again. A node that forgets, comes back, and is not noticed before the leg ends shows what it
                // showed before.
                Place::UntilNoticed
            }
        } else if node == m.source || pending || had {
            Place::Doubtful
        } else {
            Place::UntilNoticed
        }
    }
}

impl Mover {
    /// What was given to the journal and is not durable.
    pub(super) fn pending(&self) -> impl Iterator<Item = &Record> {
        self.queue.all().flat_map(|given| &given.what.records)
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
