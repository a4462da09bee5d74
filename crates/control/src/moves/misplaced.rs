//! Removes misplaced keys: keys at servers where twemproxy's list of servers does not place them
//! (`serve --misplaced-keys remove`).
//!
//! Changes of the list leave such keys over the years. No command reads them, so they only take memory; but their
//! values may be older or newer than the fleet's, and an operator may need them. So they are removed only on request,
//! once after a start. As [copies that moves have left](super::copies), the thread `maintenance` removes them a little
//! at a time, while no keys move. Workers cannot do this, because they only know keys that clients name.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use switchyard_policy::migration::{Key, is_temporary};
use switchyard_policy::topology::{NodeId, Slot, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{Link, Router};
use tracing::info;

use super::Moves;
use super::copies::{ProbeConnection, Reasons};
use crate::processes::is_misplaced;

/// SCAN `COUNT`, and pages read from a node at a time, up to 10,000 keys.
const PAGE: &[u8] = b"500";
const PAGES_AT_ONCE: usize = 20;

/// Progress at each node.
#[derive(Debug)]
pub(crate) struct MisplacedKeys {
    /// Database of the pool. Other databases do not belong to it.
    database: u32,
    nodes: BTreeMap<NodeId, Removal>,
    reasons: Reasons,
}

#[derive(Debug)]
enum Removal {
    /// Scanning this server process, up to this cursor.
    Begun {
        run_id: String,
        cursor: Vec<u8>,
        removed: usize,
    },
    Done,
}

impl MisplacedKeys {
    pub(crate) fn of(database: u32) -> Self {
        Self { database, nodes: BTreeMap::new(), reasons: Reasons::default() }
    }
}

impl Moves {
    /// Removes some misplaced keys of each node that is not done yet.
    pub(crate) fn remove_misplaced(&self, misplaced: &mut MisplacedKeys) {
        let Some((status, access)) = self.running.with(|router| (router.status(), router.node_access())) else {
            return;
        };
        let is_left = |node: &NodeId| !matches!(misplaced.nodes.get(node), Some(Removal::Done));
        let up: Vec<NodeId> =
            status.nodes.iter().filter(|node| node.link == Link::Up).map(|node| node.id).filter(is_left).collect();
        for node in up {
            let Some(turn) = self.reserve_for_removal(node) else { continue };
            // Read the map only now, because keys might have arrived until the reservation. While others move, keys in
            // transit look misplaced, and each node is scanned only once.
            let topology = self.placement.topology();
            let topology = topology.filter(|topology| {
                !topology.placement().is_crc16() && topology.nodes().len() > 1 && topology.is_settled()
            });
            let (Some(topology), Some(access)) = (topology, access.get(&node)) else { continue };
            let left = self.left_at(node);
            let done = self.connect(access).and_then(|(mut asked, process)| {
                let done = misplaced.go_on(&mut asked, (node, &process.run_id), &left, &topology);
                if done.is_err() {
                    // The node may still execute the command. No other node relies on this one before the end of the
                    // connection is confirmed.
                    self.running.with(|router: &Router| router.note_broken_connection(node, process));
                }
                done
            });
            if let Err(why) = done {
                misplaced.reasons.note(node, "misplaced keys", why);
            }
            drop(turn);
        }
    }
}

impl MisplacedKeys {
    /// Continues the scan of a node. `left`: slots whose keys moves have left at the node, in the numbers of the present
    /// list of servers ([`crate::ledger::Ledger::split`]). These keys are not misplaced, and one of them may be the last
    /// copy; `copies` removes unused copies.
    fn go_on(
        &mut self,
        asked: &mut ProbeConnection<'_>,
        (id, process): (NodeId, &str),
        left: &[Slot],
        topology: &Topology,
    ) -> Result<(), String> {
        let begun = || Removal::Begun { run_id: process.to_owned(), cursor: b"0".to_vec(), removed: 0 };
        let removal = match self.nodes.entry(id) {
            Entry::Vacant(entry) => entry.insert(begun()),
            Entry::Occupied(entry) => entry.into_mut(),
        };
        if matches!(removal, Removal::Begun { run_id, .. } if run_id != process) {
            *removal = begun();
        }
        let Removal::Begun { cursor, removed, .. } = removal else { return Ok(()) };
        asked.select(self.database)?;
        for _ in 0..PAGES_AT_ONCE {
            let answer = asked.query(&[b"SCAN", cursor, b"COUNT", PAGE])?;
            let [next, page] = &answer.items()[..] else {
                return Err(format!("node {}: a reply to SCAN of unknown form", asked.node.name));
            };
            let keys: Vec<Key> = page.items().iter().map(|key| Key::from(key.bytes())).collect();
            let misplaced: Vec<&Key> =
                keys.iter().filter(|key| !is_temporary(key) && is_misplaced(topology, id, left, key)).collect();
            if !misplaced.is_empty() {
                asked.unlink(self.database, &misplaced)?;
                *removed += misplaced.len();
            }
            *cursor = next.bytes().to_vec();
            if cursor == b"0" {
                info!(
                    "node {}: removed {} of other servers (--misplaced-keys remove)",
                    asked.node.name,
                    counted(*removed, "key")
                );
                *removal = Removal::Done;
                break;
            }
        }
        Ok(())
    }
}
