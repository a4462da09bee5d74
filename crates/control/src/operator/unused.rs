//! Returns keys that no client uses to their slots' owners, if the directory of placement overrides is nearly full.
//!
//! The planner's thread does this, but in any mode of the planner: its own moves are about load. Without it, a full
//! directory would refuse moves until an operator returns keys. `switchyard automation off` stops it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::migration::{Key, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Topology, UnusedOverrides};
use switchyard_resp::units::counted;
use tracing::{info, warn};

use super::Operator;
use super::keys::{order, without_shared_slots};
use crate::admin::{MoveOptionsRequest, OperationError};

/// Duration of one visit of all slots, while the directory has room.
const UNUSED: Duration = Duration::from_secs(600);

/// Minimum interval between steps.
const STEP: Duration = Duration::from_secs(5);

/// State of the search for unused keys.
#[derive(Debug, Default)]
pub(super) struct UnusedKeys(Mutex<Search>);

#[derive(Debug, Default)]
struct Search {
    overrides: UnusedOverrides,
    /// Time of the last step.
    since: Option<Instant>,
    /// Moves of the last keys, which the directory has until these moves end. A move may be queued for hours.
    begun: Vec<MoveId>,
    /// Last reason why keys could not return. Logged once.
    refused: Option<String>,
}

impl Operator {
    /// Continues the search for unused keys, and starts moves of those found.
    pub(super) fn return_unused_keys(&self, topology: &Topology, now: Instant) {
        let mut search = self.unused.0.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = search.since.map(|since| now.saturating_duration_since(since));
        if elapsed.is_some_and(|elapsed| elapsed < STEP) {
            return;
        }
        search.since = Some(now);
        let open = self.moves.open_ids();
        let waits = search.begun.iter().any(|id| open.contains(id)) || self.moves.colocations().are_paused();
        if !topology.has_overrides() || topology.is_adopting() || waits {
            return;
        }
        let share = elapsed.unwrap_or_default().as_secs_f64() / UNUSED.as_secs_f64();
        let (slots, nodes) = (self.moves.open_slots(), self.moves.nodes_of_long_moves());
        let is_busy = |slot: Slot, node: NodeId| {
            slots.contains(&slot) || nodes.contains(&node) || nodes.contains(&topology.owner(slot))
        };
        let found = search.overrides.advance(topology, share, is_busy);
        if found.is_empty() || self.planner.is_off() {
            return;
        }
        let outcome = self.return_keys(topology, found);
        let refused = outcome.as_ref().err().map(|refused| refused.text().to_owned());
        if let Some(why) = refused.as_ref().filter(|why| search.refused.as_ref() != Some(*why)) {
            warn!("the directory of placement overrides is nearly full, and unused keys cannot return: {why}");
        }
        search.refused = refused;
        if let Ok((count, begun)) = outcome {
            search.begun = begun;
            info!(
                "the directory of placement overrides is nearly full: {} not used recently return to their slots' owners",
                counted(count, "key")
            );
        }
    }

    /// Starts moves of these keys, each at this node. Returns the number of keys, and the moves.
    fn return_keys(
        &self,
        topology: &Topology,
        found: Vec<(Key, NodeId)>,
    ) -> Result<(usize, Vec<MoveId>), OperationError> {
        let how =
            self.moves.how(&MoveOptionsRequest { goal: Some("gentle".to_owned()), ..MoveOptionsRequest::default() })?;
        let mut by_pair: BTreeMap<(NodeId, NodeId), BTreeSet<Key>> = BTreeMap::new();
        for (key, node) in found {
            by_pair.entry((node, topology.owner_of(&key))).or_default().insert(key);
        }
        let placement = topology.placement();
        let orders: Vec<MoveOrder> = by_pair
            .into_iter()
            .filter_map(|((source, target), keys)| order(placement, source, target, keys, None, how))
            .collect();
        let (orders, _) = without_shared_slots(placement, orders);
        let count = orders.iter().filter_map(|order| Some(order.keys.as_ref()?.len())).sum();
        let _one = self.plan();
        let begun = self.moves.accept(topology, orders)?;
        Ok((count, begun.moves.iter().filter_map(|planned| planned.id).map(MoveId).collect()))
    }
}
