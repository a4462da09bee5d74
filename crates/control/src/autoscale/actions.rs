//! The autoscaler's interface to a fleet: facts about it, and the orders that change it.
//!
//! A trait, so that the loop does not depend on the operator, which implements it with the checks that apply to people.

use std::collections::{BTreeMap, BTreeSet};

use switchyard_policy::autoscale::Observed;
use switchyard_policy::topology::NodeId;

use super::intent::Started;
use super::removal::Evidence;
use crate::nodes::NodeAddress;

/// Moves that have not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum OpenMoves {
    /// Moves of the change itself, none of them paused.
    Own,
    /// A move of others, or a paused one, in words.
    Other(String),
}

/// The loop's view of a fleet, and its hands.
pub(crate) trait FleetActions: Evidence {
    /// All nodes.
    fn nodes(&self) -> Vec<(NodeId, String)>;
    /// The addresses of all nodes and of their replicas.
    fn addresses(&self) -> BTreeSet<String>;
    /// The load. `started`: nodes that may go.
    fn observed(&self, started: &BTreeMap<String, Started>) -> Observed;
    /// The `run_id` of each node's process, by name, as far as the router knows it.
    fn run_ids(&self) -> BTreeMap<String, String>;
    /// Whether an operator has switched all automation off.
    fn is_automation_off(&self) -> bool;
    /// Whether a node owns slots or keys.
    fn owns(&self, node: &str) -> bool;
    /// Whether a node owns slots.
    fn owns_slots(&self, node: &str) -> bool;
    /// The open moves. `own`: the moves of the change itself. None: no move is open, and the next one can begin.
    fn open_moves(&self, own: &[u64]) -> Option<OpenMoves>;
    /// The part of a node's share that is missing, now that these moves have ended.
    fn missing_share(&self, node: &str, moves: &[u64]) -> Option<String>;
    /// Returns address and credentials that the router would use for a server.
    fn place(&self, address: &str) -> Result<NodeAddress, String>;
    /// Lets a server join.
    fn join(&self, address: &str) -> Result<(), String>;
    /// The reason why a server that has not joined must stay: it is a node, or belongs to another router.
    fn in_use(&self, address: &str) -> Option<String>;
    /// Starts the moves that give each node its share, and returns these. `is_urgent`: as fast as the nodes can.
    fn fill(&self, is_urgent: bool) -> Result<Vec<u64>, String>;
    /// Moves everything away from a node. Returns the moves.
    fn drain(&self, node: &str) -> Result<Vec<u64>, String>;
    /// Lets a node that was drained get slots again.
    fn undrain(&self, node: &str);
    /// Lets a node go that owns nothing.
    fn leave(&self, node: &str) -> Result<(), String>;
}
