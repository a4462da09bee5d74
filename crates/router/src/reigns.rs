//! Counts processes of nodes, so that WAIT detects that a node's process has been replaced since a client wrote there.
//!
//! A count per node rather than its run id: it is compared for every WAIT, is kept for nodes that have left the fleet,
//! and needs no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::topology::NodeId;

/// A node's bit among 64: nodes whose numbers are equal modulo 64 share one.
#[inline]
pub(crate) fn bit_of(node: NodeId) -> u64 {
    1 << (node.index() & 63)
}

/// Reigns of processes, over all nodes.
#[derive(Debug)]
pub(crate) struct ProcessReplacements {
    /// Reigns so far.
    count: AtomicU64,
    /// By bit of a node: the number of its newest reign.
    newest: [AtomicU64; 64],
}

impl Default for ProcessReplacements {
    fn default() -> Self {
        Self { count: AtomicU64::new(0), newest: [const { AtomicU64::new(0) }; 64] }
    }
}

impl ProcessReplacements {
    /// Returns the number of reigns so far.
    #[inline]
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Acquire)
    }

    /// Records that another process serves a node. To be called before anything is sent to that process.
    pub(crate) fn begin(&self, node: NodeId) {
        let number = self.count.fetch_add(1, Ordering::AcqRel) + 1;
        self.newest[node.index() & 63].fetch_max(number, Ordering::AcqRel);
    }

    /// Whether a reign at one of these nodes (as bits) has begun since there were `count` reigns.
    pub(crate) fn has_replacement_since(&self, nodes: u64, count: u64) -> bool {
        (0..64).filter(|bit| nodes >> bit & 1 == 1).any(|bit| self.newest[bit].load(Ordering::Acquire) > count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reign_counts_for_its_node_from_its_start() {
        let reigns = ProcessReplacements::default();
        let (node, other) = (NodeId(3), NodeId(4));
        reigns.begin(node);
        let count = reigns.count();
        assert!(reigns.has_replacement_since(bit_of(node), 0) && !reigns.has_replacement_since(bit_of(node), count));
        reigns.begin(other);
        assert!(
            !reigns.has_replacement_since(bit_of(node), count)
                && reigns.has_replacement_since(bit_of(node) | bit_of(other), count)
        );
    }
}
