//! Finds misplaced keys at the nodes of a running fleet: clients wrote them past the router, and no client finds them.
//!
//! The router itself must check, because only it knows which keys moves have left behind, and which are in transit
//! during the check.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use switchyard_policy::topology::NodeId;
use switchyard_router::Router;

use super::Operator;
use crate::admin::{MisplacedReport, NodeMisplacedReport, OperationError};
use crate::nodes::holdings::SAMPLE;
use crate::processes::{is_misplaced, samples};

impl Operator {
    /// Checks a sample of each node that replies.
    pub(super) fn misplaced(&self) -> Result<MisplacedReport, OperationError> {
        let topology = self.moves.topology_now()?;
        let stopping = || OperationError::Unavailable("the router is stopping".to_owned());
        let access = self.running.with(Router::node_access).ok_or_else(stopping)?;
        let nodes: Vec<_> = access.into_values().collect();
        let (seen, left) = (Mutex::new(Vec::<(NodeId, Vec<u8>)>::new()), |node| self.moves.left_at(node));
        let is_elsewhere = |node: NodeId, left: &[_], key: &[u8]| {
            let is = is_misplaced(&topology, node, left, key);
            if is {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push((node, key.to_vec()));
            }
            is
        };
        let looked = samples(&topology, &nodes, self.moves.timeout(), None, Some(SAMPLE), left, is_elsewhere);
        // Keys that arrived or left in the meantime are now at the right node.
        let now = self.moves.topology_now()?;
        let mut elsewhere: BTreeMap<NodeId, u64> = BTreeMap::new();
        for (node, key) in seen.into_inner().unwrap_or_else(PoisonError::into_inner) {
            *elsewhere.entry(node).or_default() += u64::from(is_misplaced(&now, node, &left(node), &key));
        }
        let of =
            |name: &str| now.nodes().find(|node| node.name == name).and_then(|node| elsewhere.get(&node.id)).copied();
        let report = |(name, sampled): (&str, crate::nodes::holdings::Sampled)| NodeMisplacedReport {
            node: name.to_owned(),
            keys: sampled.sample.keys,
            elsewhere: of(name).unwrap_or_default(),
        };
        Ok(MisplacedReport { nodes: looked.into_iter().map(report).collect() })
    }
}
