//! The autoscaler's interface to a fleet: facts about it, and the orders that change it.
//!
//! A trait, so that the loop does not depend on the operator, which implements it with the checks of operators'
//! commands.

use std::collections::{BTreeMap, BTreeSet};

use switchyard_policy::autoscale::Observed;
use switchyard_policy::topology::NodeId;

use super::intent::StartedServer;
use super::removal::Evidence;
use crate::nodes::NodeAddress;

/// Moves that have not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpenMoves {
    /// Moves of this change, none of them paused.
    Own,
    /// A move of others, or a paused one, as text.
    Other(String),
}

/// Observations of a fleet, and actions on it.
pub(crate) trait FleetActions: Evidence {
    fn nodes(&self) -> Vec<(NodeId, String)>;
    /// Addresses of all nodes and their replicas.
    fn addresses(&self) -> BTreeSet<String>;
    /// Load of the fleet. `started`: nodes that may be removed.
    fn observed(&self, started: &BTreeMap<String, StartedServer>) -> Observed;
    /// `run_id` of each node's process, by name, as far as the router knows it.
    fn run_ids(&self) -> BTreeMap<String, String>;
    /// Whether an operator has switched all automation off.
    fn is_automation_off(&self) -> bool;
    /// Whether a node owns slots or keys.
    fn owns(&self, node: &str) -> bool;
    /// Whether a node owns slots.
    fn owns_slots(&self, node: &str) -> bool;
    /// Open moves. `own`: moves of this change. `None`: no move is open, and the next one can start.
    fn open_moves(&self, own: &[u64]) -> Option<OpenMoves>;
    /// Returns the missing part of a node's share, after these moves have ended.
    fn missing_share(&self, node: &str, moves: &[u64]) -> Option<String>;
    /// Returns the address and credentials that the router would use for a server.
    fn place(&self, address: &str) -> Result<NodeAddress, String>;
    /// Adds a server as a node.
    fn join(&self, address: &str) -> Result<(), String>;
    /// Reason why a server that has not joined must stay: it is a node, or belongs to another router.
    fn in_use(&self, address: &str) -> Option<String>;
    /// Starts the moves of each node's share, and returns their ids. `is_urgent`: as fast as the nodes can.
    fn fill(&self, is_urgent: bool) -> Result<Vec<u64>, String>;
    /// Starts moves of everything away from a node, and returns their ids.
    fn drain(&self, node: &str) -> Result<Vec<u64>, String>;
    /// Lets a drained node receive slots again.
    fn undrain(&self, node: &str);
    /// Removes a node that owns nothing.
    fn leave(&self, node: &str) -> Result<(), String>;
}

/// Returns the name of a node for a message.
pub(super) fn name_of(hands: &dyn FleetActions, node: NodeId) -> String {
    let found = hands.nodes().into_iter().find(|(id, _)| *id == node);
    found.map_or_else(|| format!("{node:?}"), |(_, name)| name)
}
