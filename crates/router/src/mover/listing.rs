//! Before the first leg: the keys of the slots are listed at the source, and their sizes asked; at the target is looked whether it has any.
//!
//! Both nodes are walked through at the same time, a page of each per round. With the goal `fast` the next round is asked for before what the last
//! one brought is worked through, so that neither the nodes nor the mover wait for the other; else the mover rests between rounds, because a
//! SCAN holds up everybody at its node.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Goal, Key, Side, is_temporary};
use switchyard_policy::topology::{SLOT_COUNT, Slot, slot_of};
use switchyard_resp::reply;
use tracing::info;

use super::connection::error_text;
use super::run::{Halt, Mover};

/// How far the walk through a node is.
struct Walk {
    /// Databases to be walked through; the last one is under way.
    databases: Vec<u32>,
    cursor: Vec<u8>,
}

impl Walk {
    fn new(databases: &[u32]) -> Self {
        Self { databases: databases.iter().rev().copied().collect(), cursor: b"0".to_vec() }
    }

    fn database(&self) -> Option<u32> {
        self.databases.last().copied()
    }

    /// A SCAN was answered: its place, for as much as has to be known to ask on.
    fn take(&mut self, answer: &[u8]) -> Option<u32> {
        let database = self.database()?;
        self.cursor = reply::elements(answer).next().and_then(reply::text)?.to_vec();
        if self.cursor == b"0" {
            self.databases.pop();
        }
        Some(database)
    }
}

/// Keys of the move that a SCAN brought, and whose sizes are to be asked.
struct Page {
    database: u32,
    answer: Arc<Vec<u8>>,
    keys: Vec<(Slot, Range<usize>)>,
}

impl Page {
    fn keys(&self) -> impl Iterator<Item = (Slot, &[u8])> {
        self.keys.iter().map(|(slot, at)| (*slot, &self.answer[at.clone()]))
    }
}

/// What was asked in a round, in this order: sizes of a page, a SCAN at the source; a SCAN at the target.
#[derive(Default)]
struct Round {
    /// Replies to a SELECT and the sizes before the SCAN of the source.
    sizes_behind: usize,
    sizes: Option<Page>,
    source_behind: usize,
    source: bool,
    target_behind: usize,
    target: bool,
}

/// What a round brought.
#[derive(Default)]
struct Brought {
    sizes: Option<(Page, Vec<Vec<u8>>)>,
    source: Option<(u32, Vec<u8>)>,
    target: Option<(u32, Vec<u8>)>,
}

/// What was found on the way, and needs questions of its own.
#[derive(Default)]
struct Found {
    temporary: Vec<(Side, u32, Key)>,
    /// At the target, of slots that it does not own.
    stale: Vec<(u32, Key)>,
    foreign: u64,
    removed: u64,
}

impl Mover {
    /// Lists the keys of the slots at the source, in one pass, and sees to it that the target has none.
    pub(super) fn list(&mut self) -> Result<(), Halt> {
        self.doing = "waiting for commands sent earlier, before listing keys".to_owned();
        self.observe()?;
        self.doing = "listing keys".to_owned();
        self.listed = 0;
        // If the connection breaks all is listed anew.
        self.listed_of = self.source.connection.as_ref().map(|c| c.process.run_id.clone());
        let mut is_ours = vec![false; SLOT_COUNT];
        self.slots_left.iter().for_each(|slot| is_ours[slot.index()] = true);
        self.big_limit_now = self.big_limit();
        let was_refused = self.sizes_are_refused();
        let databases = self.databases_in_use()?;
        let (mut source, mut target) = (Walk::new(&databases), Walk::new(&databases));
        let (mut page, mut brought, mut found) = (None, None, Found::default());
        loop {
            let asked = Instant::now();
            let round = self.ask_round(&source, &target, page.take());
            let is_last = round.sizes.is_none() && !round.source && !round.target;
            let mut answers = (Vec::new(), Vec::new());
            if !is_last && self.goal == Goal::Fast {
                self.exchange_both(&mut answers.0, &mut answers.1)?;
            }
            match brought.take() {
                Some(brought) => page = self.take_brought(brought, &is_ours, &mut found),
                None if is_last => break,
                None => {}
            }
            if is_last {
                continue;
            }
            self.collect_into(&mut answers.0, &mut answers.1)?;
            let of_round = self.take_round(round, answers, &mut source, &mut target)?;
            if self.goal == Goal::Fast {
                brought = Some(of_round);
            } else {
                page = self.take_brought(of_round, &is_ours, &mut found);
            }
            self.clear(&mut found, target.databases.is_empty() && brought.is_none())?;
            self.while_paused()?;
            if self.is_aborted() {
                return Err(Halt::Stop("stopped by the user while its keys were listed".to_owned()));
            }
            let taken = asked.elapsed();
            match self.goal {
                Goal::Fast => {}
                Goal::Balanced => self.rest(taken)?,
                Goal::Gentle => self.rest(taken * 4)?,
            }
        }
        self.clear(&mut found, true)?;
        if found.removed > 0 {
            info!(move_id = self.order.id.0, keys = found.removed, "removed what was left over at the target");
        }
        self.say_if_sizes_are_refused(was_refused);
        self.target_is_clean = true;
        self.is_listed = true;
        Ok(())
    }

    /// Asks for a round: what is left to be asked.
    fn ask_round(&mut self, source: &Walk, target: &Walk, page: Option<Page>) -> Round {
        let mut round = Round::default();
        let sized = self.big_limit_now.is_some() && !self.sizes_are_refused();
        let (Some(at_source), Some(at_target)) = (&mut self.source.connection, &mut self.target.connection) else { return round };
        if let Some(page) = page.filter(|page| sized && !page.keys.is_empty()) {
            round.sizes_behind = usize::from(at_source.select(page.database));
            page.keys().for_each(|(_, key)| at_source.push(&[b"MEMORY", b"USAGE", key]));
            round.sizes = Some(page);
        }
        if let Some(database) = source.database() {
            round.source_behind = usize::from(at_source.select(database));
            at_source.push(&[b"SCAN", &source.cursor, b"COUNT", b"1000"]);
            round.source = true;
        }
        if let Some(database) = target.database() {
            round.target_behind = usize::from(at_target.select(database));
            at_target.push(&[b"SCAN", &target.cursor, b"COUNT", b"1000"]);
            round.target = true;
        }
        round
    }

    /// Sorts the answers of a round, and moves the walks on.
    fn take_round(
        &self,
        round: Round,
        (at_source, at_target): (Vec<Vec<u8>>, Vec<Vec<u8>>),
        source: &mut Walk,
        target: &mut Walk,
    ) -> Result<Brought, Halt> {
        let mut brought = Brought::default();
        let (mut at_source, mut at_target) = (at_source.into_iter(), at_target.into_iter());
        let selected =
            |answers: &mut dyn Iterator<Item = Vec<u8>>, count: usize, side| match answers.take(count).find(|a| reply::is_error(a)) {
                Some(error) => Err(Halt::Stop(format!("{} refuses a database: {}", self.name(self.end(side).node), error_text(&error)))),
                None => Ok(()),
            };
        let scanned = |walk: &mut Walk, answer: Vec<u8>, side| match walk.take(&answer) {
            Some(database) => Ok(Some((database, answer))),
            None => Err(Halt::Stop(format!("{} refuses SCAN: {}", self.name(self.end(side).node), error_text(&answer)))),
        };
        if let Some(page) = round.sizes {
            selected(&mut at_source, round.sizes_behind, Side::Source)?;
            let count = page.keys.len();
            brought.sizes = Some((page, at_source.by_ref().take(count).collect()));
        }
        if round.source {
            selected(&mut at_source, round.source_behind, Side::Source)?;
            brought.source = scanned(source, at_source.next().unwrap_or_default(), Side::Source)?;
        }
        if round.target {
            selected(&mut at_target, round.target_behind, Side::Target)?;
            brought.target = scanned(target, at_target.next().unwrap_or_default(), Side::Target)?;
        }
        Ok(brought)
    }

    /// Works through what a round brought: sizes, keys of the source, which are the next page, and what the target should not have.
    fn take_brought(&mut self, brought: Brought, is_ours: &[bool], found: &mut Found) -> Option<Page> {
        if let Some((page, sizes)) = brought.sizes {
            let limit = self.big_limit_now.unwrap_or(u64::MAX);
            for ((slot, key), answer) in page.keys().zip(&sizes) {
                self.big.note_listed(slot, key, page.database, answer, limit);
            }
        }
        let topology = self.shared.plan().topology.clone();
        if let Some((database, answer)) = brought.target {
            for key in keys_of(&answer) {
                if is_temporary(key) {
                    found.temporary.push((Side::Target, database, key.into()));
                } else if let slot = slot_of(key)
                    && is_ours[slot.index()]
                    // A key that lives there although its slot does not is where it belongs; one that lives at a third node left this one.
                    && let lives_at = topology.exception(key)
                    && lives_at != Some(self.order.target)
                {
                    if lives_at.is_some() || self.may_be_removed(key) {
                        found.stale.push((database, key.into()));
                    } else {
                        found.foreign += 1;
                    }
                }
            }
        }
        let (database, answer) = brought.source?;
        let answer = Arc::new(answer);
        let mut page = Page { database, answer: answer.clone(), keys: Vec::new() };
        for key in keys_of(&answer) {
            if is_temporary(key) {
                found.temporary.push((Side::Source, database, key.into()));
                continue;
            }
            let slot = slot_of(key);
            // What is left over of a key that lives elsewhere does not move with its slot.
            if is_ours[slot.index()] && topology.exception(key).is_none() {
                self.spool_key(slot, key);
                self.listed += 1;
                let at = key.as_ptr().addr() - answer.as_ptr().addr();
                page.keys.push((slot, at..at + key.len()));
            }
        }
        Some(page)
    }

    /// Removes what was found and is nobody's, with nothing else under way. `looked`: the target has been walked through.
    fn clear(&mut self, found: &mut Found, looked: bool) -> Result<(), Halt> {
        for (side, database, key) in std::mem::take(&mut found.temporary) {
            if self.select(side, database)? {
                self.sweep(side, &[key])?;
            }
        }
        for (database, key) in std::mem::take(&mut found.stale) {
            if self.select(Side::Target, database)? {
                self.unlink(Side::Target, &[key])?;
                found.removed += 1;
            }
        }
        if looked && found.foreign > 0 {
            return Err(Halt::Stop(format!(
                "{} has {} keys of these slots, which it does not own, and which no move of ours has left there. Look at them, and remove them there or let the move do it (--purge-target)",
                self.name(self.order.target),
                found.foreign
            )));
        }
        Ok(())
    }

    /// Has the workers tell what they write from now on, and waits until what they sent before is answered.
    pub(super) fn observe(&mut self) -> Result<(), Halt> {
        let epoch = loop {
            match self.publish_observed() {
                Ok(epoch) => break epoch,
                Err(why) => {
                    self.doing = format!("the topology cannot be changed now: {why}");
                    self.rest(Duration::from_millis(200))?;
                }
            }
        };
        while !self.shared.drained_source(epoch, self.order.source) {
            self.shared.want_drained(epoch);
            self.pump()?;
            if self.is_aborted() {
                return Err(Halt::Stop("stopped by the user before anything was moved".to_owned()));
            }
            self.wait(Duration::from_millis(5));
        }
        Ok(())
    }
}

/// The keys that a SCAN brought.
fn keys_of(answer: &[u8]) -> impl Iterator<Item = &[u8]> {
    reply::elements(reply::elements(answer).nth(1).unwrap_or_default()).filter_map(reply::text)
}
