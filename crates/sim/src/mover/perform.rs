//! Executes the actions of a leg's driver, and passes the results to it.

use std::rc::Rc;

use switchyard_policy::migration::record::Record;
use switchyard_policy::migration::{DriverAction, DriverEvent, Event, Fingerprint, Io};
use switchyard_policy::topology::{MoveId, Topology};

use super::batches::Kind;
use super::{Lane, SCAN_KEYS, SlotView, Stage, What, ix};
use crate::injected::Bug;
use crate::node::{Cmd, KeyIx};
use crate::world::{Ev, World, say};

impl World {
    pub(crate) fn mover_event(&mut self, lane: Lane, event: Event) {
        self.on_mover_event(lane, event.into());
    }

    pub(crate) fn on_mover_event(&mut self, lane: Lane, what: DriverEvent) {
        if self.movers[lane].driver.is_none() {
            // During staging this is checked between two pieces.
            if what == DriverEvent::Of(Event::Quiesce) && self.movers[lane].stage != Stage::Staging {
                self.on_quiesced(lane);
            }
            return;
        }
        // Writes reported before the drain are processed before the dirty elements are read, which waits for the record
        // of the drain.
        if !matches!(what, DriverEvent::Drained { .. }) && !self.bug(Bug::ToldNotTakenInTheLeg) {
            self.apply_staging_messages(lane);
        }
        self.movers[lane].inbox.push_back(what);
        self.pump(lane);
    }

    fn pump(&mut self, lane: Lane) {
        if std::mem::replace(&mut self.movers[lane].pumping, true) {
            return;
        }
        while let Some(what) = self.movers[lane].inbox.pop_front() {
            if what != DriverEvent::Tick {
                say!(self, "driver <- {what:?}");
            }
            let now = self.now;
            let Some(driver) = &mut self.movers[lane].driver else { break };
            let mut to_do = Vec::new();
            driver.step(what, now, &mut to_do);
            for what in to_do {
                self.perform(lane, what);
            }
        }
        self.movers[lane].pumping = false;
    }

    pub(super) fn perform_all(&mut self, lane: Lane, to_do: Vec<DriverAction>) {
        self.movers[lane].pumping = true;
        for what in to_do {
            self.perform(lane, what);
        }
        self.movers[lane].pumping = false;
        self.pump(lane);
    }

    /// Notifies the workers with waiting clients of committed keys.
    fn wake_workers(&mut self, lane: Lane) {
        for worker in self.movers[lane].view.as_ref().map(|view| view.committed().take_waiting()).unwrap_or_default() {
            let delay = self.random.delay_us();
            self.after(delay, Ev::Committed { worker });
        }
    }

    fn perform(&mut self, lane: Lane, what: DriverAction) {
        say!(self, "driver -> {what:?}");
        self.count_action();
        match what {
            DriverAction::Record { numbers, records } => {
                if records.iter().any(|record| matches!(record, Record::LegEnded { .. })) {
                    self.about_to_end();
                    self.movers[lane].watched.is_ending = true;
                    let owner = records.iter().find_map(|record| match record {
                        Record::LegEnded { owner, .. } => Some(self.movers[lane].node_of(ix(*owner))),
                        _ => None,
                    });
                    // The leg should have noticed these restarts.
                    self.noticed_if(lane, |unnoticed| Some(unnoticed.node) == owner && !unnoticed.is_late);
                    self.movers[lane].watched.met_at_end =
                        std::array::from_fn(|side| self.movers[lane].links[side].process.map(|(process, _)| process));
                }
                if self.bug(Bug::JournalNotSynced) {
                    self.after(20, Ev::Mover(lane, DriverEvent::Recorded(numbers)));
                    self.write(lane, None, records);
                } else {
                    self.write(lane, Some(numbers), records);
                }
            }
            DriverAction::View { away, double_read } => {
                let kept = self.bug(Bug::CommittedKept);
                if let Some(view) = &mut self.movers[lane].view {
                    let committed = if kept { view.committed().clone() } else { view.committed().without_commits() };
                    *view = view.with_direction(committed, away, double_read);
                }
            }
            DriverAction::Publish => {
                // Sometimes the topology cannot be changed.
                let epoch = if self.random.chance(20) { None } else { Some(self.publish(lane, SlotView::Moving)) };
                self.on_mover_event(lane, DriverEvent::Published(epoch));
            }
            DriverAction::Observe => {
                let epoch = if self.random.chance(20) { None } else { Some(self.publish(lane, SlotView::Observed)) };
                self.on_mover_event(lane, DriverEvent::Published(epoch));
            }
            DriverAction::Withdraw => {
                self.publish(lane, SlotView::Observed);
            }
            DriverAction::Scan { walk, side, database, cursor } => {
                let first = database as usize * self.names();
                let from: KeyIx =
                    String::from_utf8(cursor).ok().and_then(|digits| digits.parse().ok()).unwrap_or_default();
                self.demand(
                    lane,
                    ix(side),
                    Cmd::Scan(from.max(first), SCAN_KEYS, first + self.names()),
                    What::Scan(walk),
                );
            }
            DriverAction::Unlink { walk, side, database, keys } => {
                let first = database as usize * self.names();
                for (at, key) in keys.iter().enumerate() {
                    let last = (at + 1 == keys.len()).then_some(walk);
                    self.demand(lane, ix(side), Cmd::Unlink(first + self.key_ix(key)), What::PurgeRemove(last));
                }
            }
            DriverAction::TakeListed => {
                let taken = self.take_listed(lane);
                self.on_mover_event(lane, DriverEvent::Taken(taken));
            }
            DriverAction::Io(Io::Copy { batch, from, keys }) => {
                let read: Vec<KeyIx> = keys.iter().map(|key| self.key_ix(key)).collect();
                self.movers[lane].watched.in_hand.extend(read);
                self.begin_batch(lane, batch, from, &keys, Kind::Dump);
            }
            DriverAction::Io(Io::Store { batch, to, keys }) => self.begin_batch(lane, batch, to, &keys, Kind::Restore),
            DriverAction::Io(Io::Overwrite { batch, to, keys }) => {
                self.begin_batch(lane, batch, to, &keys, Kind::Overwrite)
            }
            DriverAction::Io(Io::Secure { batch, at, .. }) => self.begin_batch(lane, batch, at, &[], Kind::Secure),
            DriverAction::Io(Io::Remove { batch, from, keys }) => {
                self.begin_batch(lane, batch, from, &keys, Kind::Remove)
            }
            DriverAction::Io(Io::Migrate { batch, from, keys }) => {
                self.begin_batch(lane, batch, from, &keys, Kind::Migrate)
            }
            DriverAction::Io(Io::Commit { keys }) => {
                for key in &keys {
                    let key = self.key_ix(key);
                    self.movers[lane].watched.in_hand.remove(&key);
                }
                self.staged_are_moved(lane, &keys);
                let fingerprints = keys.iter().map(|key| self.fleet.fingerprints.of(key));
                self.movers[lane].view.iter().for_each(|view| view.committed().commit(fingerprints.clone()));
                self.wake_workers(lane);
            }
            DriverAction::Io(Io::Track { groups, complete }) => {
                self.movers[lane].view.iter().for_each(|view| view.committed().track(groups.clone(), complete))
            }
            DriverAction::Io(Io::CorrectTracker { group, truth }) => {
                self.movers[lane].view.iter().for_each(|view| view.committed().found(group, truth));
                self.wake_workers(lane);
            }
            DriverAction::CommitAll => {
                self.movers[lane].view.iter().for_each(|view| view.committed().commit_all());
                self.wake_workers(lane);
            }
            DriverAction::Io(Io::Refuse { keys, .. }) => {
                let move_id = MoveId(self.movers[lane].move_id);
                let keys: Option<Rc<Vec<Fingerprint>>> =
                    keys.map(|keys| Rc::new(keys.iter().map(|key| self.fleet.fingerprints.of(key)).collect()));
                for worker in 0..self.workers.len() {
                    let delay = self.random.delay_us();
                    self.after(delay, Ev::Refused { worker, move_id, keys: keys.clone() });
                }
            }
            DriverAction::Confirm { side } => self.demand(lane, ix(side), Cmd::Ping, What::Confirm),
            DriverAction::Reconnect { side } => {
                let delay = self.random.between(300, 3_000);
                self.after(delay, Ev::DialMover { lane, side: ix(side) });
            }
            DriverAction::CatchUp { .. } => {
                let delay = self.random.below(300);
                self.after(delay, Ev::Mover(lane, DriverEvent::CaughtUp));
            }
            DriverAction::HandOver { to } => {
                let owner = self.movers[lane].node_of(ix(to));
                let delay = self.random.between(100, 1_500);
                let before = self.bug(Bug::MapMadeBefore).then(|| Box::new(self.map_with_leg_at(lane, owner)));
                self.after(delay, Ev::Stored { lane, owner, before });
            }
            DriverAction::RollBack { .. } => self.staging_is_over(lane),
            DriverAction::Io(Io::Quiet) => self.on_quiesced(lane),
            DriverAction::Lost { .. } => self.is_lost(lane),
            DriverAction::Io(Io::Report { .. }) => {}
            DriverAction::Io(Io::End(outcome)) => self.leg_ended(lane, &outcome),
        }
    }

    /// Stores the topology.
    pub(crate) fn stored(&mut self, lane: Lane, owner: usize, before: Option<Box<Topology>>) {
        // Sometimes that fails.
        let is_done = !self.random.chance(20);
        if is_done {
            self.fleet.map = before.map_or_else(|| self.map_with_leg_at(lane, owner), |map| *map);
            self.publish(lane, SlotView::Rest);
        }
        self.on_mover_event(lane, DriverEvent::HandedOver(is_done));
    }
}
