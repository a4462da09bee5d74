//! Report of the most used keys and the load of each node.

use std::collections::BTreeMap;

use switchyard_policy::load::NodeLoad;
use switchyard_policy::telemetry::{HotKey, HotNode};
use switchyard_policy::topology::{Node, NodeId, Topology};

use super::{Operator, observed};
use crate::admin::{HotKeyReport, HotKeysReport, HotNodeReport, OperationError};
use crate::running::Running;

impl Operator {
    /// Returns up to `keys` keys per node. `named`: with their names, which only some clients may read.
    pub(super) fn hot_keys(&self, keys: usize, named: bool) -> Result<HotKeysReport, OperationError> {
        let topology = self.moves.topology_now()?;
        Ok(hot_keys_report(&self.running, &topology, keys, named))
    }
}

/// Most used keys of each node.
pub(crate) fn hot_keys_report(running: &Running, topology: &Topology, keys: usize, named: bool) -> HotKeysReport {
    let hot = running.with(|router| router.hot_keys(keys)).unwrap_or_default();
    let mut hot: BTreeMap<NodeId, HotNode> = hot.into_iter().map(|hot| (hot.node, hot)).collect();
    let loads = observed(running, topology, 0).nodes;
    // A node without used keys may be busy all the same.
    let of_node = |node: &Node| {
        let (uses, hits, keys) =
            hot.remove(&node.id).map_or((0.0, 0.0, Vec::new()), |hot| (hot.uses, hot.hits, hot.keys));
        let NodeLoad { requests, answers, cpu, memory, memory_max, .. } =
            loads.get(&node.id).copied().unwrap_or_default();
        HotNodeReport {
            node: node.name.clone(),
            uses_per_second: uses,
            hits_per_second: hits,
            requests_per_second: requests,
            answer_us: answers.map(|answers| answers.mean_us),
            cpu_percent: cpu.map(|cpu| cpu * 100.0),
            memory_bytes: memory,
            memory_max_bytes: memory_max,
            keys: keys.iter().map(|key| of_key(key, uses, named)).collect(),
        }
    };
    HotKeysReport { nodes: topology.nodes().map(of_node).collect() }
}

fn of_key(hot: &HotKey, uses: f64, named: bool) -> HotKeyReport {
    let HotKey { rates, .. } = hot;
    let per = |sum: f64, all: f64| if all > 0.0 { sum / all } else { 0.0 };
    HotKeyReport {
        key: hot.name.key().filter(|_| named).map(|key| key.escape_ascii().to_string()),
        fingerprint: format!("{:016x}", hot.hash),
        database: hot.database,
        reads_per_second: rates.reads,
        writes_per_second: rates.writes,
        hits_per_second: rates.hits,
        bytes_per_second: rates.bytes,
        reply_bytes_per_second: rates.reply_bytes,
        wait_us: per(rates.busy * 1e6, rates.at_node()),
        since_seconds: hot.seconds,
        percent: (per(rates.at_node(), uses) * 100.0).min(100.0),
    }
}
