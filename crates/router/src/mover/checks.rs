//! Checks before the first leg: whether the move is possible, and the functions and scripts that the target needs.

use std::time::Duration;

use switchyard_policy::migration::{Durability, Key, Side, is_temporary};
use switchyard_policy::topology::{SLOT_NUMBERS, Slot};
use switchyard_resp::reply;

use super::connection::{error_text, field};
use super::run::{Mover, MoverExit};
use super::side;
use crate::function_turns::CopyTurn;
use crate::lock::lock;
use crate::lua::{LibraryForm, renewed_library};

/// Maximum difference of the two clocks, microseconds. TTLs are moved as absolute times.
const SKEW_MAX_US: i64 = 1_000_000;

/// Name of a library that may use undeclared keys, and its checked code or the reason why it cannot be checked.
type Unchecked = (String, Result<Vec<u8>, String>);

impl Mover {
    /// Checks versions, clocks, durability, databases and libraries of both nodes.
    pub(super) fn check(&mut self) -> Result<(), MoverExit> {
        if self.checks.as_ref().is_some_and(|checks| checks.is_earlier) {
            // An earlier move compared these processes. Libraries depend on placement rules, which may have changed.
            return self.check_libraries();
        }
        self.shown.set_activity("checking both nodes");
        let (source, target) = (self.name(self.life.order().source), self.name(self.life.order().target));
        let versions = (self.version_of_dump(Side::Source)?, self.version_of_dump(Side::Target)?);
        if versions.0 > versions.1 {
            return Err(MoverExit::Stop(format!(
                "{target} is older than {source} and cannot read its DUMP format (RDB version {} and {}). Upgrade {target} first",
                versions.0, versions.1
            )));
        }
        self.check_clocks()?;
        let durability = self.life.order().how.durability;
        if durability == Durability::Aof && !self.target.always_synced {
            let answer = self.call(Side::Target, &[b"WAITAOF", b"1", b"0", b"1"])?;
            if reply::is_error(&answer) {
                return Err(MoverExit::Stop(format!(
                    "{target} cannot confirm that its append-only file is synced: {}",
                    error_text(&answer)
                )));
            }
        }
        if durability == Durability::Replica {
            let answer = self.call(Side::Target, &[b"INFO", b"replication"])?;
            let info = String::from_utf8_lossy(reply::text(&answer).unwrap_or_default()).into_owned();
            if field(&info, "connected_slaves").is_none_or(|n| n == "0") {
                return Err(MoverExit::Stop(format!(
                    "{target} has no replica, but moved keys must be stored at one (durability = \"replica\")"
                )));
            }
        }
        // The target needs as many databases as the source: after a refused SELECT, keys would go to the wrong
        // database.
        let answer = self.call(Side::Source, &[b"CONFIG", b"GET", b"databases"])?;
        let count = reply::elements(&answer)
            .nth(1)
            .and_then(reply::text)
            .and_then(|n| std::str::from_utf8(n).ok()?.parse::<u32>().ok());
        let in_use = self.databases_in_use()?.last().copied().unwrap_or(0);
        let highest = count.map_or(in_use, |count| count.saturating_sub(1).max(in_use));
        if !self.select(Side::Target, highest)? {
            return Err(MoverExit::Stop(format!(
                "{target} has fewer databases than {source}, which has {}",
                highest + 1
            )));
        }
        self.check_libraries()
    }

    /// Returns the version of the node's DUMP format, from a temporary key, or from FUNCTION DUMP if the node is out of
    /// memory.
    fn version_of_dump(&mut self, side: Side) -> Result<u16, MoverExit> {
        let name = format!("switchyard:temporary:{}:mover-{}", self.shared.incarnation, self.id.0);
        let key = name.as_bytes();
        let mut refused = None;
        for command in [&[&b"MULTI"[..]][..], &[b"SET", key, b"1", b"PX", b"10000"], &[b"DUMP", key], &[b"UNLINK", key]]
        {
            let answer = self.call(side, command)?;
            refused = refused.or(reply::is_error(&answer).then(|| error_text(&answer)));
        }
        let answer = self.call(side, &[b"EXEC"])?;
        let functions = if refused.as_ref().is_some_and(|why| why.starts_with("OOM")) {
            self.call(side, &[b"FUNCTION", b"DUMP"])?
        } else {
            Vec::new()
        };
        // The last ten bytes are the version and a checksum.
        let dump = reply::elements(&answer).nth(1).and_then(reply::text).or_else(|| reply::text(&functions));
        match dump.and_then(|dump| dump.len().checked_sub(10).map(|at| &dump[at..])) {
            Some([low, high, ..]) => Ok(u16::from_le_bytes([*low, *high])),
            _ => {
                let why = refused.or_else(|| reply::is_error(&answer).then(|| error_text(&answer)));
                let why = why.or_else(|| reply::elements(&answer).find(|a| reply::is_error(a)).map(error_text));
                Err(MoverExit::Stop(format!(
                    "{} does not store and DUMP a key: {}",
                    self.name(self.end(side).node),
                    why.unwrap_or_default()
                )))
            }
        }
    }

    /// Queries the clock of a side.
    pub(super) fn query_clock(&mut self, side: Side) -> Result<(), MoverExit> {
        self.end_mut(side).ahead_us = None;
        let before_us = self.now_us() as i64;
        let answer = self.call(side, &[b"TIME"])?;
        let after_us = self.now_us() as i64;
        let parts: Vec<i64> =
            reply::elements(&answer).filter_map(|n| std::str::from_utf8(reply::text(n)?).ok()?.parse().ok()).collect();
        let [seconds, micros] = parts[..] else {
            return Err(MoverExit::Stop(format!("{} refuses TIME", self.name(self.end(side).node))));
        };
        let time_us = seconds * 1_000_000 + micros;
        self.end_mut(side).ahead_us = Some((time_us - after_us, time_us - before_us));
        Ok(())
    }

    /// Returns an error text if the two clocks, as last queried, differ too much.
    pub(super) fn clocks_differ(&self) -> Option<String> {
        let skew_us = skew_us(self.source.ahead_us?, self.target.ahead_us?);
        (skew_us.abs() > SKEW_MAX_US).then(|| {
            format!(
                "the clocks of {} and {} differ by {:.1} s, and keys would expire at a wrong time. Set the clocks right first",
                self.name(self.life.order().source),
                self.name(self.life.order().target),
                skew_us as f64 / 1e6
            )
        })
    }

    /// Queries both clocks. Called before a move and before each leg, because clocks are adjusted and nodes change
    /// machines.
    pub(super) fn check_clocks(&mut self) -> Result<(), MoverExit> {
        self.query_clock(Side::Source)?;
        self.query_clock(Side::Target)?;
        self.clocks_differ().map_or(Ok(()), |why| Err(MoverExit::Stop(why)))
    }

    /// Scans the keys of some slots at a node. Calls `with` for each page, with the database.
    pub(super) fn walk(
        &mut self,
        side: Side,
        slots: impl IntoIterator<Item = Slot>,
        mut with: impl FnMut(&mut Self, u32, Vec<Key>) -> Result<(), MoverExit>,
    ) -> Result<(), MoverExit> {
        let mut is_ours = vec![false; SLOT_NUMBERS];
        slots.into_iter().for_each(|slot| is_ours[slot.index()] = true);
        for database in self.databases_in_use()? {
            let mut cursor = b"0".to_vec();
            loop {
                self.select(side, database)?;
                let answer = self.call(side, &[b"SCAN", &cursor, b"COUNT", b"1000"])?;
                let Some((next, keys)) = side::scanned(&answer) else {
                    return Err(MoverExit::Stop(format!(
                        "{} refuses SCAN: {}",
                        self.name(self.end(side).node),
                        error_text(&answer)
                    )));
                };
                let (temporary, keys): (Vec<&[u8]>, Vec<&[u8]>) = keys.into_iter().partition(|key| is_temporary(key));
                // A key with a placement override for this node is where it belongs.
                let (topology, node) = (self.shared.routing().topology.clone(), self.end(side).node);
                let is_wrong = |key: &&[u8]| {
                    is_ours[topology.slot_of(key).index()] && topology.placement_override(key) != Some(node)
                };
                let keys: Vec<Key> = keys.into_iter().filter(is_wrong).map(Key::from).collect();
                if !temporary.is_empty() {
                    let temporary: Vec<Key> = temporary.into_iter().map(Key::from).collect();
                    self.remove_stale_staging_keys(side, &temporary)?;
                }
                if !keys.is_empty() {
                    with(self, database, keys)?;
                }
                cursor = next;
                if cursor == b"0" {
                    break;
                }
                self.handle_messages_when_quiesced()?;
            }
        }
        Ok(())
    }

    pub(super) fn unlink(&mut self, side: Side, keys: &[Key]) -> Result<(), MoverExit> {
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(keys.iter().map(|key| &key[..]));
        let answer = self.call(side, &args)?;
        if reply::is_error(&answer) {
            return Err(MoverExit::Stop(format!(
                "{} refuses to remove keys: {}",
                self.name(self.end(side).node),
                error_text(&answer)
            )));
        }
        Ok(())
    }

    /// Copies functions and known scripts to the target before it serves clients.
    pub(super) fn copy_functions(&mut self) -> Result<(), MoverExit> {
        let (known, hashes) = {
            let scripts = lock(&self.shared.scripts);
            let has_all = self.checks.as_ref().is_some_and(|checks| checks.scripts == Some(scripts.changes()));
            (scripts.changes(), if has_all { Vec::new() } else { scripts.hashes() })
        };
        for sha in hashes {
            let Some(body) = lock(&self.shared.scripts).text(&sha) else { continue };
            self.call(Side::Target, &[b"SCRIPT", b"LOAD", &body])?;
            self.handle_messages_when_quiesced()?;
        }
        if let Some(checks) = &mut self.checks {
            checks.scripts = Some(known);
        }
        // The turn blocks changes of functions until the target has this dump.
        let turn = self.turn_to_copy()?;
        if let Some((name, _)) = self.unchecked_libraries()?.into_iter().next() {
            return Err(MoverExit::Stop(format!(
                "library {name} was loaded at {} during the move, and not checked: start the move again",
                self.name(self.life.order().source)
            )));
        }
        let theirs = self.call(Side::Source, &[b"FUNCTION", b"DUMP"])?;
        if reply::is_error(&theirs) {
            return Ok(()); // no functions before Redis 7.0
        }
        let ours = self.call(Side::Target, &[b"FUNCTION", b"DUMP"])?;
        let (Some(theirs), Some(ours)) = (reply::text(&theirs), reply::text(&ours)) else { return Ok(()) };
        if theirs == ours {
            return Ok(());
        }
        let theirs = theirs.to_vec();
        match self.store_functions(Side::Target, &[b"FUNCTION", b"RESTORE", &theirs, b"REPLACE"], turn)? {
            Ok(_) => Ok(()),
            Err(why) => Err(MoverExit::Stop(format!(
                "{} refuses the functions of {}: {why}",
                self.name(self.life.order().target),
                self.name(self.life.order().source),
            ))),
        }
    }

    /// Rewrites the source's libraries so that functions use only declared keys. A single node allows any key; with
    /// several nodes each function must keep to the keys of its caller.
    fn check_libraries(&mut self) -> Result<(), MoverExit> {
        if self.unchecked_libraries()?.is_empty() {
            return Ok(());
        }
        let mut turn = self.turn_to_copy()?;
        let source = self.name(self.life.order().source);
        for (name, checked) in self.unchecked_libraries()? {
            let refused = |why: String| {
                MoverExit::Stop(format!(
                    "library {name} of {source} may use undeclared keys ({why}): delete it, or see scripts.undeclared-keys"
                ))
            };
            let code = checked.map_err(refused)?;
            turn = self
                .store_functions(Side::Source, &[b"FUNCTION", b"LOAD", b"REPLACE", &code], turn)?
                .map_err(refused)?;
        }
        Ok(())
    }

    /// Returns libraries of the source that may use undeclared keys, with their checked code.
    fn unchecked_libraries(&mut self) -> Result<Vec<Unchecked>, MoverExit> {
        let routing = self.shared.routing();
        let form = routing.required_library_form();
        if !matches!(form, LibraryForm::Checked(_)) {
            return Ok(Vec::new());
        }
        // Before Redis 7.0 this is an error.
        let list = self.call(Side::Source, &[b"FUNCTION", b"LIST", b"WITHCODE"])?;
        let unchecked = |library: &[u8]| {
            let fields: Vec<&[u8]> =
                reply::elements(library).map(|field| reply::text(field).unwrap_or_default()).collect();
            let of =
                |name: &[u8]| fields.iter().position(|field| *field == name).and_then(|at| fields.get(at + 1).copied());
            let checked = renewed_library(of(b"library_code")?, &form, &routing.commands)?;
            Some((String::from_utf8_lossy(of(b"library_name").unwrap_or_default()).into_owned(), checked))
        };
        Ok(if reply::is_error(&list) { Vec::new() } else { reply::elements(&list).filter_map(unchecked).collect() })
    }

    /// Stores functions at a node. Returns the turn, or the node's refusal.
    fn store_functions(
        &mut self,
        side: Side,
        args: &[&[u8]],
        turn: CopyTurn,
    ) -> Result<Result<CopyTurn, String>, MoverExit> {
        let node = self.end(side).node;
        let Some(process) = self.end(side).connection.as_ref().map(|connection| connection.process.clone()) else {
            return Err(MoverExit::Lost);
        };
        match self.call(side, args) {
            Ok(answer) if reply::is_error(&answer) => Ok(Err(error_text(&answer))),
            Ok(_) => Ok(Ok(turn)),
            Err(halt) => {
                // The node may still execute the command after this move has ended.
                self.shared.fences.add_broken_with_functions(node, process, turn);
                Err(halt)
            }
        }
    }

    /// Waits for exclusive access to functions, held until the turn is dropped. First waits for pending stores at both
    /// nodes.
    fn turn_to_copy(&mut self) -> Result<CopyTurn, MoverExit> {
        let turn = loop {
            let free = self.shared.functions.begin_copy().filter(|_| {
                let left = self.shared.fences.with_functions();
                left.iter().all(|(node, _)| *node != self.life.order().source && *node != self.life.order().target)
            });
            match free {
                Some(turn) => break turn,
                None => {
                    self.shown.set_activity("waiting for another copy of functions");
                    self.wait(Duration::from_millis(5));
                }
            }
            self.handle_messages_when_quiesced()?;
        };
        while !turn.is_alone() {
            self.wait(Duration::from_millis(5));
            self.handle_messages_when_quiesced()?;
        }
        Ok(turn)
    }

    /// Checks that the target has enough memory for these slots.
    pub(super) fn has_room(&mut self, slots: &[Slot]) -> Result<(), MoverExit> {
        let info = |mover: &mut Self, side, section: &[u8]| -> Result<String, MoverExit> {
            let answer = mover.call(side, &[b"INFO", section])?;
            Ok(String::from_utf8_lossy(reply::text(&answer).unwrap_or_default()).into_owned())
        };
        let target = info(self, Side::Target, b"memory")?;
        let number = |info: &str, name: &str| field(info, name).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        let (limit, used) = (number(&target, "maxmemory"), number(&target, "used_memory"));
        if limit == 0 {
            return Ok(());
        }
        let source = info(self, Side::Source, b"memory")?;
        let keyspace = info(self, Side::Source, b"keyspace")?;
        let keys_there: u64 = keyspace
            .lines()
            .filter(|line| line.starts_with("db"))
            .filter_map(|line| line.split_once("keys=")?.1.split(',').next()?.parse::<u64>().ok())
            .sum();
        let keys: u64 = slots.iter().map(|slot| u64::from(self.list.count_in_slot(*slot))).sum();
        let needed = number(&source, "used_memory_dataset").saturating_mul(keys.min(keys_there)) / keys_there.max(1);
        // An average hides big keys. Staged data is already part of the used memory.
        let big: u64 = slots.iter().map(|slot| self.big.bytes_of(*slot)).sum();
        let staged = self.staging.copied();
        let needed = needed.max(big).saturating_sub(staged);
        if used.saturating_add(needed) > limit {
            return Err(MoverExit::Stop(format!(
                "{} has no room: {keys} keys need about {needed} bytes, it uses {used}, and its maxmemory is {limit}",
                self.name(self.life.order().target)
            )));
        }
        Ok(())
    }

    /// Whether an unexpected key at the target, in a slot of the move, may be removed. For pools, other databases of
    /// the server are off limits.
    pub(super) fn is_removable(&self, database: u32, key: &[u8]) -> bool {
        let is_own = || self.placement.is_crc16() || database == self.shared.routing().live.database;
        self.life.order().how.purge_target && is_own()
            || self.leftovers.binary_search(&self.placement.slot_of(key)).is_ok()
    }
}

/// Minimum distance between two clocks, signed. Each argument is a clock's lead over a third clock (min, max).
fn skew_us(one: (i64, i64), other: (i64, i64)) -> i64 {
    let (at_least, at_most) = (one.0 - other.1, one.1 - other.0);
    if at_least > 0 { at_least } else { at_most.min(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_skew_is_a_lower_bound() {
        assert_eq!(skew_us((5_000, 5_010), (1_000, 1_020)), 3_980);
        assert_eq!(skew_us((1_000, 1_020), (5_000, 5_010)), -3_980);
        assert_eq!(skew_us((0, 4_000), (1_000, 1_020)), 0, "a slow reply is inaccurate");
    }
}
