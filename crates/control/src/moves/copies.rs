//! Removes unused copies: keys that a move, by a protocol that copies first, left at a node that was down when they
//! should have been removed.
//!
//! No command reads them, but DBSIZE and KEYS count them. The move has ended, and neither of its nodes waits for the
//! other, so the thread `maintenance` removes them rather than the mover: a little at a time, while no move involves
//! the node. If the owner of a key has it as well, the copy is removed. A copy that the owner lacks is a key that
//! clients have deleted since; it is removed too, unless there are many, which an operator must examine first (as
//! before a move).

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Key, Process, is_temporary};
use switchyard_policy::topology::{NodeId, Slot, Topology};
use switchyard_resp::reply;
use switchyard_resp::units::counted;
use switchyard_router::{Link, NodeAccess, Router, may_be_only_copies, refusal_reason, site_of_record_user};
use tracing::{info, warn};

use super::Moves;
use crate::nodes::holdings::databases;
use crate::nodes::{Action, Answer, NodeConnection, direct_clients, routers, settled_list};

/// Timeout for a node's reply. Short, because other nodes wait for it.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum duration of one step, because moves wait in the meantime.
const AT_ONCE: Duration = Duration::from_millis(100);

/// Maximum number of key names collected before the decision about them.
const REMEMBERED_MAX: usize = 100_000;

/// Progress at each node.
#[derive(Debug, Default)]
pub(crate) struct CopyRemoval {
    nodes: BTreeMap<NodeId, Removal>,
    reasons: Reasons,
}

/// Reasons why keys of nodes cannot be removed now. Each reason is logged once per node.
#[derive(Debug, Default)]
pub(super) struct Reasons(BTreeMap<NodeId, String>);

impl Reasons {
    pub(super) fn note(&mut self, node: NodeId, what: &str, why: String) {
        if self.0.get(&node) != Some(&why) {
            warn!("{what} are removed later: {why}");
            self.0.insert(node, why);
        }
    }
}

#[derive(Debug)]
struct Removal {
    /// Id of the set of copies ([`crate::ledger::Ledger::copies`]).
    number: u64,
    run_id: String,
    /// Remaining databases. The first is in progress.
    databases: VecDeque<u32>,
    cursor: Vec<u8>,
    removed: usize,
    /// Keys that their owners lack, with their database.
    only_copies: Vec<(u32, Key)>,
}

/// Reserves nodes: none of their moves starts until this is dropped.
pub(crate) struct NodeReservation<'m>(&'m Moves);

impl Drop for NodeReservation<'_> {
    fn drop(&mut self) {
        self.0.state().reserved.clear();
        self.0.wake();
    }
}

/// A connection to a node, and the access data for ending it after an error.
pub(super) struct ProbeConnection<'a> {
    pub(super) node: &'a NodeAccess,
    connection: NodeConnection,
    database: Option<u32>,
}

impl<'a> ProbeConnection<'a> {
    fn open(node: &'a NodeAccess) -> Result<Self, String> {
        let connection = NodeConnection::open(node, TIMEOUT).map_err(|why| format!("node {} {why}", node.name))?;
        Ok(Self { node, connection, database: None })
    }

    pub(super) fn query(&mut self, args: &[&[u8]]) -> Result<crate::nodes::Answer, String> {
        let answer = self.connection.call(args).map_err(|error| format!("node {}: {error}", self.node.name))?;
        match answer.error() {
            Some(error) => Err(format!("node {}: {error}", self.node.name)),
            None => Ok(answer),
        }
    }

    pub(super) fn select(&mut self, database: u32) -> Result<(), String> {
        if self.database != Some(database) {
            self.query(&[b"SELECT", database.to_string().as_bytes()])?;
            self.database = Some(database);
        }
        Ok(())
    }

    /// Ends an earlier connection at the same server process, so that no command sent on it is executed afterwards.
    pub(super) fn kill_connection(&mut self, earlier: &Process, process: &Process) -> Result<(), String> {
        if earlier.run_id != process.run_id {
            return Ok(());
        }
        let killed = self.query(&[b"CLIENT", b"KILL", b"ID", earlier.client_id.to_string().as_bytes()]);
        killed.map(drop).or_else(|why| if why.contains("ERR No such") { Ok(()) } else { Err(why) })
    }

    /// Verifies, as far as the node shows it, that no other router has keys there and that no client uses the node
    /// directly. Otherwise a key that seems unused may be live.
    fn serves_no_others(&mut self, site: &str) -> Result<(), String> {
        let name = &self.node.name;
        let answer = |error: std::io::Error| format!("node {name}: {error}");
        // A node that refuses ACL has no router's record.
        let users = self.connection.call(&["ACL", "USERS"]).map_err(answer)?;
        let others = |user: &String| site_of_record_user(user).is_some_and(|other| other != site);
        if let Some(user) = users.items().iter().map(Answer::text).find(others) {
            return Err(format!(
                "node {name}: another router has an ownership record there, so keys may be its own, and none is removed. Give each router servers of its own. If that \
                 router is gone for good, remove its record: `redis-cli ACL DELUSER {user}` at the node"
            ));
        }
        let list = settled_list(Action::Removal, || self.query(&[b"CLIENT", b"LIST"]).map(|list| list.text()))?;
        let name = &self.node.name;
        if routers(&list).iter().any(|other| other != site) {
            return Err(format!(
                "node {name}: another router uses it, so keys may be its own, and none is removed. Give each router servers of its own"
            ));
        }
        match direct_clients(&list, Action::Removal).first() {
            None => Ok(()),
            Some(client) => Err(format!(
                "node {name}: a client uses it past this router ({client}), so keys may be its own, and none is removed. Let it use the router, or end its connection"
            )),
        }
    }

    pub(super) fn unlink(&mut self, database: u32, keys: &[&Key]) -> Result<(), String> {
        self.select(database)?;
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(keys.iter().map(|key| &key[..]));
        self.query(&args).map(drop)
    }
}

impl Moves {
    /// Removes some of the unused copies.
    pub(crate) fn remove_copies(&self, copies: &mut CopyRemoval) {
        let left = self.ledger.copies();
        copies.nodes.retain(|node, removal| left.get(node).is_some_and(|(number, _)| *number == removal.number));
        if left.is_empty() {
            return;
        }
        let Some((status, access)) = self.running.with(|router| (router.status(), router.node_access())) else {
            return;
        };
        for (node, (number, slots)) in left {
            let is_up = status.nodes.iter().any(|of| of.id == node && of.link == Link::Up);
            let Some(turn) = self.reserve_for_removal(node).filter(|_| is_up && access.contains_key(&node)) else {
                continue;
            };
            // Read the map only now: a move that ended in the meantime could have changed it.
            let Some(topology) = self.placement.topology() else { continue };
            if slots.iter().any(|slot| topology.transit(*slot).is_some()) {
                continue;
            }
            match self.go_on(copies, node, (number, &slots), &access, &topology) {
                Ok(true) => {
                    copies.nodes.remove(&node);
                    self.ledger.clear_copies(node, number);
                }
                Ok(false) => {}
                // The next call tries again.
                Err(why) => copies.reasons.note(node, "copies left by moves", why),
            }
            drop(turn);
        }
    }

    /// Database of clients that select none.
    pub(super) fn own_database(&self) -> u32 {
        self.running.with(Router::own_database).unwrap_or_default()
    }

    pub(super) fn reserve_for_removal(&self, node: NodeId) -> Option<NodeReservation<'_>> {
        self.turn([node].into(), [node])
    }

    /// Reserves a node before its ejection, together with its stand-ins. Until the result is dropped, none of their
    /// moves starts, and no other thread removes keys by a map that the ejection is about to change. `None`: a removal
    /// is in progress, or a stand-in takes part in a move.
    pub(crate) fn reserve_for_ejection(
        &self,
        node: NodeId,
        stand_ins: &BTreeMap<NodeId, Vec<Slot>>,
    ) -> Option<NodeReservation<'_>> {
        self.turn(stand_ins.keys().copied().chain([node]).collect(), stand_ins.keys().copied())
    }

    /// Reserves nodes, unless others are reserved or a node of `idle` takes part in a move.
    fn turn(&self, nodes: BTreeSet<NodeId>, idle: impl IntoIterator<Item = NodeId>) -> Option<NodeReservation<'_>> {
        let is_reserved = self.state().reserve(nodes, idle);
        // Construct this only if reserved: its drop releases whichever nodes are reserved, under the same lock.
        is_reserved.then(|| NodeReservation(self))
    }

    /// Returns true if no copies are left.
    fn go_on(
        &self,
        copies: &mut CopyRemoval,
        id: NodeId,
        (number, slots): (u64, &[Slot]),
        access: &BTreeMap<NodeId, NodeAccess>,
        topology: &Topology,
    ) -> Result<bool, String> {
        let (mut asked, process) = self.connect(access.get(&id).ok_or("it is gone")?)?;
        let run_id = process.run_id.clone();
        if copies.nodes.get(&id).is_none_or(|removal| removal.run_id != run_id) {
            let keyspace = asked.query(&[b"INFO", b"keyspace"])?.text();
            // A pool owns only one database of its servers.
            let own = (!topology.placement().is_crc16()).then(|| self.own_database());
            let databases = databases(&keyspace)
                .map(|(database, _)| database)
                .filter(|database| own.is_none_or(|own| own == *database))
                .collect();
            let begun =
                Removal { number, run_id, databases, cursor: b"0".to_vec(), removed: 0, only_copies: Vec::new() };
            copies.nodes.insert(id, begun);
        }
        let removal = copies.nodes.get_mut(&id).ok_or("it has not started")?;
        let done = removal.go_on(&mut asked, id, slots, access, topology);
        if done.is_err() {
            // The node may still execute the command. No other node relies on this one before the end of the connection
            // is confirmed.
            self.running.with(|router: &Router| router.note_broken_connection(id, process));
            copies.nodes.remove(&id);
        }
        done
    }

    /// Connects to a node that this router may still modify. Returns the connection and its identity.
    pub(super) fn connect<'a>(&self, node: &'a NodeAccess) -> Result<(ProbeConnection<'a>, Process), String> {
        let mut asked = ProbeConnection::open(node)?;
        // A router that takes over ends the connection by this name.
        if let Some(name) = self.running.with(|router| router.connection_name("maintenance")) {
            asked.query(&[b"CLIENT", b"SETNAME", name.as_bytes()])?;
        }
        let client_id = asked.query(&[b"CLIENT", b"ID"])?;
        let client_id = reply::integer(&client_id.0)
            .and_then(|id| u64::try_from(id).ok())
            .ok_or("it does not reply to CLIENT ID")?;
        let server = asked.query(&[b"INFO", b"server"])?.text();
        let run_id =
            server.lines().find_map(|line| line.strip_prefix("run_id:")).map(str::trim).unwrap_or_default().to_owned();
        if let Some(seat) = self.running.ownerships().map(|seats| seats.seat()) {
            let words = seat.question();
            let answer = asked.connection.call(&words).map_err(|error| format!("node {}: {error}", node.name))?;
            refusal_reason(seat.check_reply(&node.name, &answer.0)).map_or(Ok(()), Err)?;
        }
        asked.serves_no_others(&self.site())?;
        Ok((asked, Process { run_id, client_id }))
    }
}

impl Removal {
    fn go_on(
        &mut self,
        asked: &mut ProbeConnection<'_>,
        node: NodeId,
        slots: &[Slot],
        access: &BTreeMap<NodeId, NodeAccess>,
        topology: &Topology,
    ) -> Result<bool, String> {
        let until = Instant::now() + AT_ONCE;
        let mut owners: BTreeMap<NodeId, ProbeConnection<'_>> = BTreeMap::new();
        while let Some(database) = self.databases.front().copied() {
            asked.select(database)?;
            let answer = asked.query(&[b"SCAN", &self.cursor, b"COUNT", b"500"])?;
            let [next, page] = &answer.items()[..] else {
                return Err(format!("node {}: a reply to SCAN of unknown form", asked.node.name));
            };
            let mut twice = Vec::new();
            for key in page.items() {
                let key = Key::from(key.bytes());
                let owner = topology.lives_at(&key);
                if is_temporary(&key) || owner == node || slots.binary_search(&topology.slot_of(&key)).is_err() {
                    continue;
                }
                let at = match owners.entry(owner) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(unknown) => {
                        unknown.insert(ProbeConnection::open(access.get(&owner).ok_or("an owner has no address")?)?)
                    }
                };
                at.select(database)?;
                match at.query(&[b"EXISTS", &key])?.text() == "1" {
                    true => twice.push(key),
                    false => self.only_copies.push((database, key)),
                }
            }
            if !twice.is_empty() {
                asked.unlink(database, &twice.iter().collect::<Vec<_>>())?;
                self.removed += twice.len();
            }
            self.cursor = next.bytes().to_vec();
            if self.cursor == b"0" {
                self.databases.pop_front();
            }
            if self.only_copies.len() >= REMEMBERED_MAX {
                break;
            }
            if Instant::now() >= until && !self.databases.is_empty() {
                return Ok(false);
            }
        }
        // An ejection may have made the node their owner in the meantime.
        self.only_copies.retain(|(_, key)| topology.lives_at(key) != node);
        if may_be_only_copies(self.only_copies.len(), self.removed) {
            warn!(
                "node {} still has {} of slots that it does not own, and their owners lack them: clients have deleted them since, or servers were restored from \
                 snapshots of different times (docs/backup.md). They stay there until a move brings these slots to it (--purge-target)",
                asked.node.name,
                counted(self.only_copies.len(), "key")
            );
            return Ok(true);
        }
        for of_database in std::mem::take(&mut self.only_copies).chunk_by(|(one, _), (other, _)| one == other) {
            let keys: Vec<&Key> = of_database.iter().map(|(_, key)| key).collect();
            for keys in keys.chunks(500) {
                asked.unlink(of_database[0].0, keys)?;
                self.removed += keys.len();
            }
        }
        if self.removed > 0 && self.databases.is_empty() {
            info!("node {}: removed copies left by a move ({})", asked.node.name, counted(self.removed, "key"));
        }
        Ok(self.databases.is_empty())
    }
}
