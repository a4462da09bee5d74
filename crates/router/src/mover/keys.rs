//! Moves of single keys, which leave their slots: differences to moves of slots.
//!
//! The keys are fixed when the move is accepted, so nothing is scanned: the listing and the checks before and after the
//! legs look up these names only. A command of such a slot waits if one of these keys is not at the target yet; other
//! commands are served at the source.

use std::sync::Arc;

use switchyard_policy::migration::{Key, Scope, Side};
use switchyard_policy::topology::{Slot, Stage, Transit};
use switchyard_resp::reply;

use super::connection::error_text;
use super::orphaned_keys::OrphanedKeys;
use super::run::{Mover, MoverExit};

/// Keys per query.
const AT_ONCE: usize = 1000;

impl Mover {
    /// Returns the transit to publish for slots of this move.
    pub(super) fn transit(&self, stage: Stage) -> Transit {
        let order = self.life.order();
        Transit { move_id: self.id, source: order.source, target: order.target, stage, keys_only: order.keys.is_some() }
    }

    /// Returns the keys of a leg of these slots, for a move of single keys.
    pub(super) fn scope_of(&self, slots: &[Slot]) -> Option<Arc<Scope>> {
        let keys = self.life.order().keys.as_ref()?;
        let of_leg = keys.iter().filter(|key| slots.binary_search(&self.placement.slot_of(key)).is_ok());
        Some(Arc::new(Scope::new(of_leg.cloned().collect(), self.fingerprints)))
    }

    /// Retains the keys that this move concerns.
    pub(super) fn keep_own(&self, keys: &mut Vec<Key>) {
        match &self.life.order().keys {
            Some(own) => keys.retain(|key| own.binary_search(key).is_ok()),
            None => {
                let topology = self.shared.routing().topology.clone();
                if topology.has_overrides() {
                    keys.retain(|key| topology.placement_override(key).is_none());
                }
            }
        }
    }

    /// Returns the keys of the remaining slots, in pages.
    fn remaining_keys(&self) -> Vec<Vec<Key>> {
        let keys = self.life.order().keys.iter().flat_map(|keys| keys.iter());
        let left: Vec<Key> =
            keys.filter(|key| self.life.slots_left().contains(&self.placement.slot_of(key))).cloned().collect();
        left.chunks(AT_ONCE).map(<[Key]>::to_vec).collect()
    }

    /// Returns the keys that a node has in its selected database.
    pub(super) fn existing_keys(&mut self, side: Side, keys: &[Key]) -> Result<Vec<Key>, MoverExit> {
        let mut args: Vec<&[u8]> = vec![b"EXISTS"];
        args.extend(keys.iter().map(|key| &key[..]));
        let answer = self.call(side, &args)?;
        let refused = |mover: &Self, answer: &[u8]| {
            MoverExit::Stop(format!("{} refuses EXISTS: {}", mover.name(mover.end(side).node), error_text(answer)))
        };
        match reply::integer(&answer) {
            None => return Err(refused(self, &answer)),
            Some(0) => return Ok(Vec::new()),
            Some(count) if usize::try_from(count) == Ok(keys.len()) => return Ok(keys.to_vec()),
            Some(_) => {}
        }
        let mut there = Vec::new();
        for key in keys {
            match reply::integer(&self.call(side, &[b"EXISTS", key])?) {
                Some(0) => {}
                Some(_) => there.push(key.clone()),
                None => return Err(refused(self, b"-ERR its reply to EXISTS is not a number\r\n")),
            }
            self.handle_messages_when_quiesced()?;
        }
        Ok(there)
    }

    /// Removes stale keys from the target, lists the keys, and queries their sizes.
    pub(super) fn list_named(&mut self) -> Result<(), MoverExit> {
        if self.is_resumed {
            // Names of staging keys of an earlier mover are only known to the node.
            self.walk(Side::Target, [], |_, _, _| Ok(()))?;
        }
        self.clear_target_of_keys()?;
        self.shown.set_activity("waiting for earlier commands, before listing keys");
        self.observe()?;
        self.shown.set_activity("listing keys");
        self.begin_list();
        let was_refused = self.sizes_are_refused();
        let named = self.remaining_keys();
        for key in named.iter().flatten() {
            self.list.add_listed(self.placement.slot_of(key), key);
        }
        for database in self.databases_in_use()? {
            self.select(Side::Source, database)?;
            for page in &named {
                if page.iter().filter(|key| self.query_size(key)).count() > 0 {
                    let (answers, _) = self.collect()?;
                    for (key, answer) in page.iter().zip(answers) {
                        self.big.note_size(self.placement.slot_of(key), (key.clone(), database), &answer);
                    }
                }
                self.while_paused()?;
            }
        }
        self.log_refused_sizes(was_refused);
        self.list.end();
        Ok(())
    }

    /// Removes stale keys from the target. Fails if it has other copies of the keys.
    fn clear_target_of_keys(&mut self) -> Result<(), MoverExit> {
        self.shown.set_activity("searching the target for leftovers");
        let (mut left_over, mut foreign) = (OrphanedKeys::default(), 0_usize);
        let named = self.remaining_keys();
        for database in self.databases_in_use()? {
            self.select(Side::Target, database)?;
            for page in &named {
                let there = self.existing_keys(Side::Target, page)?;
                let (stale, others): (Vec<Key>, Vec<Key>) =
                    there.into_iter().partition(|key| self.is_removable(database, key));
                foreign += others.len();
                self.remove_left_over(&mut left_over, database, &stale)?;
                self.handle_messages_when_quiesced()?;
            }
        }
        self.end_left_over(left_over)?;
        if foreign > 0 {
            return Err(MoverExit::Stop(format!(
                "{} has {foreign} of these keys, which do not belong there, and which no move of this router left there. A client bypassed the router, or the server \
                 was restored from a snapshot older than the rollback of an earlier move. Check them, then remove them there or let the move do it (--purge-target)",
                self.name(self.life.order().target)
            )));
        }
        self.list.set_target_is_clean(true);
        Ok(())
    }

    /// Finds keys that are still at the source, and removes or moves each one if this is certainly right.
    pub(super) fn look_behind_keys(&mut self) -> Result<(), MoverExit> {
        self.shown.set_activity("searching the source for late keys");
        let unchanged = self.is_first_source();
        let all = self.life.order().keys.clone().unwrap_or_default();
        for database in self.databases_in_use()? {
            for page in all.chunks(AT_ONCE) {
                self.select(Side::Source, database)?;
                for key in self.existing_keys(Side::Source, page)? {
                    self.select(Side::Source, database)?;
                    self.handle_late_key(database, &key, unchanged)?;
                }
                self.handle_messages_when_quiesced()?;
            }
        }
        self.log_late_keys();
        Ok(())
    }
}
