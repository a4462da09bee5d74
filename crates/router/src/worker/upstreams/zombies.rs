//! Broken connections whose commands a node may still execute.
//!
//! Each counts as in flight until the node has answered a `CLIENT KILL ID` for it on a later connection, or until
//! another process has replaced the node's.

use switchyard_policy::topology::{NodeId, Topology};

use crate::connections::Connection;
use crate::slab::Handle;
use crate::worker::turn::Turn;

/// A broken connection.
#[derive(Clone, Debug)]
pub(in crate::worker) struct Zombie {
    number: u32,
    connection: Connection,
    /// Epoch of its oldest command.
    epoch: u64,
    /// Low bits of the generation of cacheable keys of its oldest command.
    cacheable: u32,
    /// The link on which the kill was sent.
    killer: Handle,
}

impl Zombie {
    pub(in crate::worker) fn epoch(&self) -> u64 {
        self.epoch
    }

    pub(in crate::worker) fn cacheable(&self) -> u32 {
        self.cacheable
    }

    pub(in crate::worker) fn node(&self) -> NodeId {
        self.connection.node
    }
}

/// The zombies of a worker.
#[derive(Debug, Default)]
pub(in crate::worker) struct Zombies {
    all: Vec<Zombie>,
    last: u32,
}

impl Zombies {
    pub(in crate::worker) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(in crate::worker) fn iter(&self) -> impl Iterator<Item = &Zombie> {
        self.all.iter()
    }

    /// Number of zombies of a node.
    pub(in crate::worker) fn count_at(&self, node: NodeId) -> u64 {
        self.all.iter().filter(|z| z.node() == node).count() as u64
    }

    pub(super) fn publish_count(&self, turn: &Turn, node: NodeId) {
        turn.counters().node(node).unconfirmed.set(self.count_at(node));
    }

    /// Adds a broken connection with commands in flight.
    pub(in crate::worker) fn add(&mut self, connection: Connection, epoch: u64, armed: u32) {
        self.last += 1;
        self.all.push(Zombie { number: self.last, connection, epoch, cacheable: armed, killer: Handle::NONE });
    }

    /// Returns the zombies of the node to kill over `link`: numbers and client IDs. Zombies of other processes are
    /// dropped: a process that returns is checked before it is used ([`Connections`](crate::connections::Connections)).
    pub(super) fn take_due(&mut self, node: NodeId, link: Handle, run_id: Option<&str>) -> Vec<(u32, u64)> {
        self.all.retain(|z| z.node() != node || z.connection.run_id.as_deref() == run_id);
        let due = self.all.iter_mut().filter(|z| z.node() == node);
        due.map(|zombie| {
            zombie.killer = link;
            (zombie.number, zombie.connection.client_id)
        })
        .collect()
    }

    /// Whether no kill was sent for a zombie of a node.
    pub(super) fn lacks_killer(&self, node: NodeId) -> bool {
        self.all.iter().any(|z| z.node() == node && z.killer == Handle::NONE)
    }

    /// Resets kills sent over a link that is gone.
    pub(super) fn forget_killer(&mut self, link: Handle) {
        for zombie in self.all.iter_mut().filter(|z| z.killer == link) {
            zombie.killer = Handle::NONE;
        }
    }

    /// Removes a zombie that the node has ended.
    pub(super) fn end(&mut self, number: u32) -> Option<Connection> {
        let at = self.all.iter().position(|zombie| zombie.number == number)?;
        Some(self.all.remove(at).connection)
    }

    /// Drops zombies of nodes that are no longer in the topology.
    pub(super) fn forget_foreign(&mut self, topology: &Topology) {
        self.all.retain(|z| topology.node(z.node()).is_some());
    }
}
