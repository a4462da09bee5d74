//! The baseline: the source's own `MIGRATE`, batch by batch, while commands for the leg's keys wait for its end.
//!
//! `redis-cli --cluster reshard` moves a slot in the same way, except that it redirects clients (`ASK`) rather than let
//! them wait, and commands with several keys fail (`TRYAGAIN`). Drain, purge and journal are those of the default
//! protocol, to keep the comparison fair. Two guarantees are impossible with `MIGRATE`: after a time-out of the
//! source's own connection to the target, commands may still execute there, and only the source can close that
//! connection; and a key leaves the source before that is on record.

use std::collections::BTreeSet;

use super::leg::{LegCore, Work};
use super::{Action, BatchId, Copied, Event, Fingerprint, Io, Key, LegOrder, Record, Side};

/// Number of attempts of a refused batch before the leg goes back.
const TRIES: u32 = 5;
/// Interval between attempts, microseconds.
const REST_US: u64 = 100_000;

/// Step of the one batch in flight.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Step {
    Migrate,
    /// A key exists at the destination: check which keys the origin still has.
    Look,
    /// Remove the keys that the origin still has at the destination.
    Clear(Vec<Key>),
    Record,
    Recorded(u64),
}

#[derive(Clone, Debug)]
struct Batch {
    id: BatchId,
    keys: Vec<Key>,
    step: Step,
    is_requested: bool,
    not_before_us: u64,
    tries: u32,
}

impl Batch {
    fn go_to(&mut self, step: Step) {
        (self.step, self.is_requested) = (step, false);
    }
}

/// Work of a stop-and-copy leg: one batch at a time.
#[derive(Clone, Default)]
pub struct StopAndCopy {
    batch: Option<Batch>,
    last: u32,
}

impl StopAndCopy {
    fn fingerprints(&self, leg: &LegCore) -> Vec<Fingerprint> {
        self.batch.iter().flat_map(|batch| &batch.keys).map(|key| leg.fingerprints.of(key)).collect()
    }

    /// Drops the batch. The location of its keys stays unknown.
    fn give_up(&mut self, leg: &mut LegCore) {
        leg.left.extend(self.fingerprints(leg));
        self.batch = None;
    }

    fn migrated(&mut self, leg: &mut LegCore, refused: Option<String>, now_us: u64, actions: &mut Vec<Action>) {
        let Some(batch) = &mut self.batch else { return };
        match refused {
            None => batch.go_to(Step::Record),
            Some(why) if why.starts_with("BUSYKEY") => batch.go_to(Step::Look),
            Some(why) => {
                batch.go_to(Step::Migrate);
                batch.tries += 1;
                batch.not_before_us = now_us + REST_US;
                if batch.tries >= TRIES && !leg.rolls_back {
                    self.give_up(leg);
                    leg.roll_back(format!("the source could not migrate keys: {why}"), actions);
                }
            }
        }
    }
}

impl Work for StopAndCopy {
    const SERVES: bool = false;

    fn step(&mut self, leg: &mut LegCore, event: Event, now_us: u64, actions: &mut Vec<Action>) {
        // Requested keys wait for the end of the leg.
        let (Event::Migrated { batch: id, .. } | Event::Copied { batch: id, .. } | Event::Removed { batch: id }) =
            event
        else {
            return;
        };
        let Some(batch) = self.batch.as_mut().filter(|batch| batch.is_requested && batch.id == id) else { return };
        match (event, &batch.step) {
            (Event::Migrated { refused, .. }, Step::Migrate) => self.migrated(leg, refused, now_us, actions),
            (Event::Copied { outcomes, .. }, Step::Look) => {
                let there = batch.keys.iter().zip(&outcomes).filter(|(_, outcome)| !matches!(outcome, Copied::Absent));
                let there = there.map(|(key, _)| key.clone()).collect();
                batch.go_to(Step::Clear(there));
            }
            (Event::Removed { .. }, Step::Clear(_)) => batch.go_to(Step::Migrate),
            _ => {}
        }
    }

    fn go_on(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>) {
        let usable = leg.usable(Side::Source) && leg.usable(Side::Target);
        let keys = self.fingerprints(leg);
        let Some(batch) =
            self.batch.as_mut().filter(|batch| usable && !batch.is_requested && batch.not_before_us <= now_us)
        else {
            return;
        };
        batch.is_requested = true;
        let from = leg.from();
        match &batch.step {
            Step::Migrate => actions.push(Action::Io(Io::Migrate { batch: batch.id, from, keys: batch.keys.clone() })),
            Step::Look => actions.push(Action::Io(Io::Copy { batch: batch.id, from, keys: batch.keys.clone() })),
            Step::Clear(keys) => {
                actions.push(Action::Io(Io::Remove { batch: batch.id, from: from.other(), keys: keys.clone() }))
            }
            Step::Record => {
                let LegOrder { move_id, leg: number, .. } = leg.orders;
                let record = match leg.rolls_back {
                    true => Record::Returned { move_id, leg: number, keys },
                    false => Record::Moved { move_id, leg: number, keys },
                };
                batch.step = Step::Recorded(leg.record(record, actions));
            }
            Step::Recorded(_) => {}
        }
    }

    fn start(&mut self, leg: &mut LegCore, now_us: u64, actions: &mut Vec<Action>) {
        let is_paused = leg.pace.batches == 0 || !leg.usable(Side::Source) || !leg.usable(Side::Target);
        if is_paused || self.batch.is_some() {
            return;
        }
        let most = leg.pace.batch_keys as usize;
        if leg.listed.is_empty() {
            if !leg.list_ended && leg.lists == leg.lists_old {
                leg.lists += 1;
                actions.push(Action::List { count: leg.pace.batch_keys.saturating_mul(10) });
            }
            return;
        }
        let keys: BTreeSet<Key> = leg.listed.drain(..most.min(leg.listed.len())).collect();
        self.last = self.last.wrapping_add(1);
        let (id, keys) = (BatchId(self.last), keys.into_iter().collect());
        self.batch = Some(Batch { id, keys, step: Step::Migrate, is_requested: false, not_before_us: 0, tries: 0 });
        self.go_on(leg, now_us, actions);
    }

    fn recorded(&mut self, leg: &mut LegCore, number: u64) {
        if !self.batch.as_ref().is_some_and(|batch| matches!(batch.step, Step::Recorded(record) if record <= number)) {
            return;
        }
        let keys = self.fingerprints(leg);
        self.batch = None;
        leg.progress.keys_moved += keys.len() as u64;
        let eras = leg.eras();
        match leg.rolls_back {
            true => leg.away.retain(|key, _| !keys.contains(key)),
            false => leg.away.extend(keys.into_iter().map(|key| (key, eras))),
        }
    }

    fn lost(&mut self, leg: &mut LegCore, side: Side) -> bool {
        let from = leg.from();
        let is_asked_there = |batch: &&mut Batch| match batch.step {
            Step::Migrate | Step::Look => batch.is_requested && side == from,
            Step::Clear(_) => batch.is_requested && side != from,
            Step::Record | Step::Recorded(_) => false,
        };
        // The result of the broken connection is unknown. Repeating `MIGRATE` is harmless: moved keys are absent.
        if let Some(batch) = self.batch.as_mut().filter(is_asked_there) {
            batch.go_to(Step::Migrate);
            leg.progress.repeated += 1;
        }
        false
    }

    fn restarted(&mut self, leg: &mut LegCore, _side: Side) {
        // The keys may exist only there, so the purge must spare them.
        leg.left.extend(self.fingerprints(leg));
    }

    fn drop_without_target(&mut self, leg: &mut LegCore) -> BTreeSet<Fingerprint> {
        if leg.is_given_up(Side::Target) {
            self.drop_without(leg, true);
        }
        BTreeSet::new()
    }

    fn drop_without(&mut self, leg: &mut LegCore, _all: bool) {
        if self.batch.as_ref().is_some_and(|batch| !batch.is_requested) {
            self.give_up(leg);
        }
    }

    fn is_idle(&self) -> bool {
        self.batch.is_none()
    }

    fn keys(&self) -> usize {
        self.batch.as_ref().map_or(0, |batch| batch.keys.len())
    }
}
