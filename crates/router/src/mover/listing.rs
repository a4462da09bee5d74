//! Before the first leg: lists the keys of the slots at the source, with their sizes ([`super::sizes`]), and searches
//! the target for such keys.
//!
//! Both nodes are scanned concurrently, page by page. With the goal `fast`, the next SCAN is sent before the keys of
//! the last page are processed, so that nodes and mover work in parallel. Otherwise the mover rests between pages,
//! because a SCAN blocks all clients of its node.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Goal, Key, Side, is_temporary};
use switchyard_policy::topology::SLOT_NUMBERS;
use switchyard_resp::reply;
use switchyard_resp::units::counted;

use super::connection::error_text;
use super::orphaned_keys::OrphanedKeys;
use super::returning::Returning;
use super::run::{Mover, MoverExit, big_limit};
use super::sizes::Page;

/// Progress of the scan of a node, and its pending replies.
struct Walk {
    /// Remaining databases. The last one is being scanned.
    databases: Vec<u32>,
    cursor: Vec<u8>,
    /// A SCAN is in flight.
    scanning: bool,
    /// Pending queries, oldest first.
    pending: VecDeque<Query>,
    /// Replies not processed yet.
    answers: Vec<Vec<u8>>,
}

/// Kind of a query. `Sizes` has several replies.
enum Query {
    Database,
    Scan,
    Sizes(Page),
}

impl Walk {
    fn new(databases: &[u32]) -> Self {
        let databases = databases.iter().rev().copied().collect();
        Self { databases, cursor: b"0".to_vec(), scanning: false, pending: VecDeque::new(), answers: Vec::new() }
    }

    /// Advances the cursor with a SCAN reply. Returns the scanned database, or `None` if the reply is no cursor.
    fn take(&mut self, answer: &[u8]) -> Option<u32> {
        let database = self.databases.last().copied()?;
        self.cursor = reply::elements(answer).next().and_then(reply::text)?.to_vec();
        self.scanning = false;
        if self.cursor == b"0" {
            self.databases.pop();
        }
        Some(database)
    }
}

/// The scan of both nodes.
struct Pass {
    is_ours: Vec<bool>,
    source: Walk,
    target: Walk,
    /// Pages with unknown sizes.
    pages: Vec<Page>,
    /// Sizes are queried during the scan.
    sized: bool,
    found: Found,
    /// Refusal of a node. Pending replies are awaited, then the scan ends.
    refused: Option<MoverExit>,
}

/// Keys found during the scan that need commands of their own.
#[derive(Default)]
struct Found {
    temporary: Vec<(Side, u32, Key)>,
    /// Keys at the target, of slots that it does not own: copies of keys that live at a third node, and leftovers of
    /// earlier moves.
    elsewhere: Vec<(u32, Key)>,
    left_over: Vec<(u32, Key)>,
    left: OrphanedKeys,
    foreign: u64,
}

impl Found {
    fn needs_clearing(&self) -> bool {
        !(self.temporary.is_empty() && self.elsewhere.is_empty() && self.left_over.is_empty())
    }
}

impl Mover {
    /// Lists the keys of the slots at the source in one pass, and removes stale keys of these slots from the target.
    pub(super) fn list(&mut self) -> Result<(), MoverExit> {
        self.shown.set_activity("waiting for earlier commands, before listing keys");
        self.observe()?;
        self.shown.set_activity("listing keys");
        self.begin_list();
        self.returning.iter_mut().for_each(Returning::begin);
        let was_refused = self.sizes_are_refused();
        let databases = self.databases_in_use()?;
        let mut pass = Pass {
            is_ours: vec![false; SLOT_NUMBERS],
            source: Walk::new(&databases),
            target: Walk::new(&databases),
            pages: Vec::new(),
            sized: self.sizes_with_listing(&databases),
            found: Found::default(),
            refused: None,
        };
        self.life.slots_left().iter().for_each(|slot| pass.is_ours[slot.index()] = true);
        loop {
            let is_to_rest = self.poll_messages()?;
            let asked = Instant::now();
            // Other queries need an idle connection. Do not sleep with unread replies.
            let ends = self.life.is_cut_short() || pass.refused.is_some();
            let pauses = ends || is_to_rest || pass.found.needs_clearing();
            if !pauses {
                self.send_requests(&mut pass);
            }
            if pass.source.pending.is_empty() && pass.target.pending.is_empty() {
                if let Some(why) = pass.refused {
                    return Err(why);
                }
                if ends {
                    return Err(MoverExit::Aborted);
                }
                if !pauses {
                    break;
                }
                self.while_paused()?;
                self.clear(&mut pass.found, false)?;
                continue;
            }
            let fast = self.life.order().how.goal == Goal::Fast;
            if fast {
                self.exchange_both(&mut pass.source.answers, &mut pass.target.answers)?;
                if pass.source.answers.is_empty() && pass.target.answers.is_empty() {
                    self.wait(Duration::from_millis(10));
                    continue;
                }
            } else {
                self.collect_into(&mut pass.source.answers, &mut pass.target.answers)?;
            }
            let brought = [Side::Source, Side::Target].map(|side| self.take_answered(&mut pass, side));
            if fast && !pauses {
                self.send_requests(&mut pass);
                self.exchange_both(&mut pass.source.answers, &mut pass.target.answers)?;
            }
            let [of_source, of_target] = brought;
            of_source.into_iter().for_each(|(database, answer)| self.take_keys(&mut pass, database, answer));
            of_target.into_iter().for_each(|(database, answer)| self.check_target_keys(&mut pass, database, &answer));
            let taken = asked.elapsed();
            match self.life.order().how.goal {
                Goal::Fast => {}
                Goal::Balanced => self.rest(taken)?,
                Goal::Gentle => self.rest(taken * 4)?,
            }
        }
        let mut found = pass.found;
        self.clear(&mut found, true)?;
        self.end_left_over(found.left)?;
        self.log_refused_sizes(was_refused);
        self.list.set_target_is_clean(true);
        self.list.end();
        Ok(())
    }

    /// Starts the list. After a lost connection the listing starts again.
    pub(super) fn begin_list(&mut self) {
        let of = self.source.connection.as_ref().map(|connection| connection.process.run_id.clone());
        self.list.begin(of, self.shown.before().keys_moved);
        self.big.set_limit(big_limit(&self.shared));
    }

    /// Sends the queries that are possible now: the next page of each node, and sizes of pages of the source.
    fn send_requests(&mut self, pass: &mut Pass) {
        let sized = pass.sized && !self.sizes_are_refused();
        let (Some(at_source), Some(at_target)) = (&mut self.source.connection, &mut self.target.connection) else {
            return;
        };
        for (connection, walk) in [(&mut *at_source, &mut pass.source), (at_target, &mut pass.target)] {
            let Some(database) = walk.databases.last().copied().filter(|_| !walk.scanning) else { continue };
            if connection.select(database) {
                walk.pending.push_back(Query::Database);
            }
            connection.push(&[b"SCAN", &walk.cursor, b"COUNT", b"1000"]);
            walk.pending.push_back(Query::Scan);
            walk.scanning = true;
        }
        for page in std::mem::take(&mut pass.pages) {
            if !sized || page.len() == 0 {
                continue;
            }
            let page = self.sizes.lengths.choose(page);
            if page.request(at_source) {
                pass.source.pending.push_back(Query::Database);
            }
            pass.source.pending.push_back(Query::Sizes(page));
        }
    }

    /// Processes the replies of a node: advances its scan and records sizes. Returns the SCAN replies with their
    /// databases.
    fn take_answered(&mut self, pass: &mut Pass, side: Side) -> Vec<(u32, Vec<u8>)> {
        let walk = if side == Side::Source { &mut pass.source } else { &mut pass.target };
        let mut brought = Vec::new();
        for answer in std::mem::take(&mut walk.answers) {
            let refused = match walk.pending.front_mut() {
                Some(Query::Sizes(page)) => {
                    page.take(&answer, &mut self.sizes.lengths, &mut self.big);
                    if page.is_answered()
                        && let Some(Query::Sizes(page)) = walk.pending.pop_front()
                    {
                        pass.pages.extend(page.rest());
                    }
                    continue;
                }
                Some(Query::Scan) => match walk.take(&answer) {
                    Some(database) => {
                        brought.push((database, answer));
                        None
                    }
                    None => Some(format!("SCAN: {}", error_text(&answer))),
                },
                Some(Query::Database) => {
                    reply::is_error(&answer).then(|| format!("a database: {}", error_text(&answer)))
                }
                None => None,
            };
            walk.pending.pop_front();
            if let Some(what) = refused {
                let node = if side == Side::Source { self.source.node } else { self.target.node };
                let name = self.name(node);
                pass.refused.get_or_insert(MoverExit::Stop(format!("{name} refuses {what}")));
            }
        }
        brought
    }

    /// Lists the keys of a page of the source, and queues the page for the size queries.
    fn take_keys(&mut self, pass: &mut Pass, database: u32, answer: Vec<u8>) {
        let topology = self.shared.routing().topology.clone();
        let answer = Arc::new(answer);
        let mut keys = Vec::new();
        for key in keys_of(&answer) {
            if is_temporary(key) {
                pass.found.temporary.push((Side::Source, database, key.into()));
                continue;
            }
            let slot = topology.slot_of(key);
            // Leftover copies of keys with a placement override do not move with the slot.
            if pass.is_ours[slot.index()] && topology.placement_override(key).is_none() {
                self.list.add_listed(slot, key);
                let at = key.as_ptr().addr() - answer.as_ptr().addr();
                keys.push((slot, at..at + key.len()));
            }
        }
        if pass.sized {
            pass.pages.push(Page::new(database, answer, keys));
        }
    }

    /// Collects keys that the target should not have.
    fn check_target_keys(&mut self, pass: &mut Pass, database: u32, answer: &[u8]) {
        let topology = self.shared.routing().topology.clone();
        for key in keys_of(answer) {
            if is_temporary(key) {
                pass.found.temporary.push((Side::Target, database, key.into()));
            } else if let slot = topology.slot_of(key)
                && pass.is_ours[slot.index()]
                // A key with a placement override for the target belongs there. With an override for a third node, this
                // copy is left over.
                && let lives_at = topology.placement_override(key)
                && lives_at != Some(self.life.order().target)
            {
                match lives_at {
                    Some(_) => pass.found.elsewhere.push((database, key.into())),
                    None if self.may_stay(slot, key) => {}
                    None if self.is_removable(database, key) => pass.found.left_over.push((database, key.into())),
                    None => pass.found.foreign += 1,
                }
            }
        }
    }

    /// Removes stale keys, on idle connections. `looked`: the scan of the target is complete.
    fn clear(&mut self, found: &mut Found, looked: bool) -> Result<(), MoverExit> {
        for (side, database, key) in std::mem::take(&mut found.temporary) {
            if self.select(side, database)? {
                self.remove_stale_staging_keys(side, &[key])?;
            }
        }
        for (database, key) in std::mem::take(&mut found.elsewhere) {
            if self.select(Side::Target, database)? {
                self.unlink(Side::Target, &[key])?;
            }
        }
        let left_over = std::mem::take(&mut found.left_over);
        for of_database in left_over.chunk_by(|(one, _), (other, _)| one == other) {
            let keys: Vec<Key> = of_database.iter().map(|(_, key)| key.clone()).collect();
            self.remove_left_over(&mut found.left, of_database[0].0, &keys)?;
        }
        if looked && found.foreign > 0 {
            return Err(MoverExit::Stop(format!(
                "{} has {} of these slots, which it does not own, and which no move of this router left there. A client bypassed the router, or the server was \
                 restored from a snapshot older than the rollback of an earlier move. Check these keys, then remove them there or let the move do it (--purge-target)",
                self.name(self.life.order().target),
                counted(found.foreign, "key")
            )));
        }
        Ok(())
    }

    /// Makes the workers report written keys from now on, and waits for the replies of all earlier commands.
    pub(super) fn observe(&mut self) -> Result<(), MoverExit> {
        let epoch = loop {
            match self.publish_observed() {
                Ok(epoch) => break epoch,
                Err(why) => {
                    self.shown.set_activity(format!("the topology cannot be changed now: {why}"));
                    self.rest(Duration::from_millis(200))?;
                }
            }
        };
        let since = Instant::now();
        while !self.shared.drained_source(epoch, self.life.order().source) {
            self.shared.want_drained(epoch);
            self.handle_messages_when_quiesced()?;
            self.wait(Duration::from_millis(5));
        }
        self.life.drained(since.elapsed().as_micros() as u64);
        Ok(())
    }
}

/// Returns the keys of a SCAN reply.
fn keys_of(answer: &[u8]) -> impl Iterator<Item = &[u8]> {
    reply::elements(reply::elements(answer).nth(1).unwrap_or_default()).filter_map(reply::text)
}
