//! The baseline: the source's own `MIGRATE`, key by key of a leg, while commands for the leg's keys wait until it is
//! over.
//!
//! So `redis-cli --cluster reshard` moves a slot, with the difference that clients wait here where there they are sent
//! back and forth (`ASK`) and commands of several keys fail (`TRYAGAIN`). Drain, purge and journal are those of the
//! default protocol: without them it would be a different comparison. What it cannot have is what `MIGRATE` lacks: when
//! its own connection to the target times out, what it sent may still be executed there later, and nobody can end that
//! connection but the source. And a key is gone from the source before that is on record.

use std::collections::BTreeSet;

use super::leg::{LegCore, Work};
use super::{Action, BatchId, Copied, Event, Fingerprint, Io, Key, Orders, Record, Side};

/// A batch that is refused is tried so often before the leg goes back.
const TRIES: u32 = 5;
/// Between two tries, microseconds.
const REST_US: u64 = 100_000;

/// What is asked about the one batch under way.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Step {
    Migrate,
    /// Where it goes there is a key already: look which keys the node still has.
    Look,
    /// Those that it still has are removed where they were to go.
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

/// The work of a leg that stops and copies: one batch at a time.
#[derive(Clone, Default)]
pub struct StopAndCopy {
    batch: Option<Batch>,
    last: u32,
}

impl StopAndCopy {
    fn fingerprints(&self, leg: &LegCore) -> Vec<Fingerprint> {
        self.batch.iter().flat_map(|batch| &batch.keys).map(|key| leg.fingerprints.of(key)).collect()
    }

    /// Where its keys are is not known, and stays so.
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
        // Keys that are wanted wait until the leg is over.
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
                let Orders { move_id, leg: number, .. } = leg.orders;
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
        // What the node did with the other one is unknown. To migrate again is harmless: what is gone stays gone.
        if let Some(batch) = self.batch.as_mut().filter(is_asked_there) {
            batch.go_to(Step::Migrate);
            leg.progress.repeated += 1;
        }
        false
    }

    fn restarted(&mut self, leg: &mut LegCore, _side: Side) {
        // They may be there and nowhere else, and are not to be purged.
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
