//! Load of the fleet as one value, for reports and for the planner.

use std::time::Instant;

use switchyard_policy::load::{NodeLoad, ObservedLoad, SlotLoad};
use switchyard_policy::topology::{Slot, Topology};

use super::Operator;
use crate::admin::{LoadReport, NodeLoadReport, OperationError, SlotLoadReport};
use crate::running::Running;

impl Operator {
    /// Load of the last seconds, with up to `keys` keys per node.
    pub(crate) fn observed(&self, topology: &Topology, keys: usize) -> ObservedLoad {
        observed(&self.running, topology, keys)
    }

    pub(super) fn load(&self) -> Result<LoadReport, OperationError> {
        let topology = self.moves.topology_now()?;
        Ok(load_report(&self.running, &topology))
    }
}

/// Load of the last seconds, with up to `keys` keys per node.
pub(crate) fn observed(running: &Running, topology: &Topology, keys: usize) -> ObservedLoad {
    let (loads, now) = (running.loads(), Instant::now());
    ObservedLoad {
        nodes: topology.nodes().map(|node| (node.id, loads.of(node.id, now))).collect(),
        slots: loads.slots(),
        keys: running.with(|router| router.hot_keys(keys)).unwrap_or_default(),
    }
}

/// Load of nodes, and of the slots that are used most.
pub(crate) fn load_report(running: &Running, topology: &Topology) -> LoadReport {
    let load = observed(running, topology, 0);
    let mut slots: Vec<(Slot, SlotLoad)> =
        Slot::numbers().map(|slot| (slot, load.slot(slot))).filter(|(_, load)| load.commands >= 0.5).collect();
    slots.sort_unstable_by(|(_, one), (_, other)| other.commands.total_cmp(&one.commands));
    slots.truncate(LoadReport::SLOTS);
    let name = |node| topology.node(node).map(|node| node.name.clone()).unwrap_or_default();
    LoadReport {
        nodes: topology
            .nodes()
            .map(|node| of_node(node.name.clone(), load.nodes.get(&node.id).copied().unwrap_or_default()))
            .collect(),
        slots: slots
            .into_iter()
            .map(|(slot, SlotLoad { commands, writes, bytes, .. })| SlotLoadReport {
                slot: slot.number(),
                node: name(topology.owner(slot)),
                commands_per_second: commands,
                writes_per_second: writes,
                bytes_per_second: bytes,
            })
            .collect(),
    }
}

fn of_node(node: String, load: NodeLoad) -> NodeLoadReport {
    let NodeLoad { requests, answers, in_flight, cpu, memory, memory_max, keys, evictions, clients, replica_lag } =
        load;
    NodeLoadReport {
        node,
        requests_per_second: requests,
        answer_us: answers.map(|answers| answers.mean_us),
        p50_us: answers.map(|answers| answers.p50_us),
        p99_us: answers.map(|answers| answers.p99_us),
        in_flight,
        cpu_percent: cpu.map(|cpu| cpu * 100.0),
        memory_bytes: memory,
        memory_max_bytes: memory_max,
        keys,
        evictions_per_second: evictions,
        clients,
        replica_lag_bytes: replica_lag,
    }
}
