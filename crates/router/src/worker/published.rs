//! Late writes of moves by a protocol as published ([`switchyard_policy::migration::published`]): a worker notifies the
//! mover of writes at the source.

use std::collections::BTreeMap;

use switchyard_policy::migration::{Key, LegView, is_late};
use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::command::Command;
use switchyard_resp::request::Args;

use super::command::writes;
use crate::shared::RoutingSnapshot;

/// Returns the keys that a command may write at the source of such moves, by move. Costs a single check while there is
/// no such move.
pub(super) fn late_writes(
    routing: &RoutingSnapshot,
    node: NodeId,
    command: &Command,
    args: &Args<'_>,
    places: &[u32],
) -> BTreeMap<MoveId, Vec<Key>> {
    let mut late: BTreeMap<MoveId, Vec<Key>> = BTreeMap::new();
    if !routing.moves.legs.values().any(LegView::is_published) || !writes(command) {
        return late;
    }
    for key in places.iter().filter_map(|place| args.get(*place as usize)) {
        if let Some(transit) = is_late(&routing.topology, &routing.moves.legs, key, node) {
            late.entry(transit.move_id).or_default().push(key.into());
        }
    }
    late
}
