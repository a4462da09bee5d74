//! Writes of a client that WAIT concerns, and a WAIT in progress.

use switchyard_policy::topology::NodeId;

use crate::reigns::bit_of;
use crate::shared::{RoutingSnapshot, Shared};

/// The moment of a write, in reigns of processes and epochs of the topology.
#[derive(Clone, Copy, Debug)]
pub(in crate::worker) struct Since {
    pub(super) reigns: u64,
    pub(super) epoch: u64,
}

impl Since {
    #[inline]
    pub(in crate::worker) fn now(shared: &Shared, routing: &RoutingSnapshot) -> Self {
        Self { reigns: shared.reigns.count(), epoch: routing.topology.epoch() }
    }
}

/// Writes of a client that WAIT concerns.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::worker) enum Written {
    #[default]
    Nothing,
    /// Writes to these nodes (as bits), since the first of them.
    At { nodes: u64, since: Since },
    /// A process that has a write may have been replaced, and the client has received 0 for it. Later replies are 0
    /// too, until the next write.
    Lost,
}

impl Written {
    /// Records that a write is sent to a node.
    #[inline]
    pub(in crate::worker) fn add(&mut self, node: NodeId, now: Since) {
        match self {
            Self::At { nodes, .. } => *nodes |= bit_of(node),
            Self::Nothing | Self::Lost => *self = Self::At { nodes: bit_of(node), since: now },
        }
    }

    /// Whether WAIT may query a node. Without writes it queries every node.
    pub(in crate::worker) fn concerns(self, node: NodeId) -> bool {
        match self {
            Self::Nothing => true,
            Self::At { nodes, .. } => nodes & bit_of(node) != 0,
            Self::Lost => false,
        }
    }
}

/// The writes that a WAIT in progress is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct About {
    /// Nodes that may have had them.
    pub(super) nodes: u64,
    /// The first of them.
    pub(super) since: Since,
    /// The beginning of the WAIT.
    pub(super) began: Since,
    /// Nodes with keys are queried once more if keys change their node in the meantime.
    pub(super) may_repeat: bool,
}

/// A WAIT or WAITAOF in progress.
#[derive(Debug)]
pub(in crate::worker) struct Wait {
    /// The arguments without the timeout, which is the last one.
    pub(super) args: Vec<Vec<u8>>,
    /// End of the timeout, us; `None`: never.
    pub(super) until_us: Option<u64>,
    /// Remaining nodes, the next one last.
    pub(super) nodes: Vec<NodeId>,
    /// `None`: the client has written nothing.
    pub(super) about: Option<About>,
    /// The smallest answers so far: one number for WAIT, two for WAITAOF.
    pub(super) least: Vec<i64>,
    /// No query is in flight: the next one can be sent.
    pub(super) due: bool,
    pub(super) seq: u32,
    pub(super) class: u8,
}
