//! Commands of moves by a protocol as published ([`switchyard_policy::migration::published`]): a worker sends them by
//! the rules of the switch, and notifies the mover of writes at the source.
//!
//! A read of one key may be sent to both nodes, or to the target and again after its key was fetched
//! ([`super::double_read`] does this). Any other read whose keys may be at either node waits until they are fetched. A
//! command of several keys that can be split is sent key by key, each to the target of its own move. All others go to
//! the source if all their keys do, otherwise to the target: the papers have no transactions and no scripts.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::migration::published::Way;
use switchyard_policy::migration::{Key, KeyLookup, LegView, is_late};
use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::command::{Command, Handling};
use switchyard_resp::request::Args;

use super::double_read::Asks;
use super::downstreams::Client;
use super::keyed::{CommandHooks, writes};
use super::large::LargeKeys;
use super::transit::Transit;
use super::turn::Turn;
use crate::mover::SharedLeg;
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

impl LargeKeys {
    /// Returns the action for a command. `None`: it waits for keys to be fetched, or its keys are in no such move.
    pub(super) fn as_published(
        &self,
        turn: &Turn,
        hooks: &CommandHooks,
        routing: &Arc<RoutingSnapshot>,
        client: &Client,
        command: &Command,
        args: &Args<'_>,
        look: &mut KeyLookup<SharedLeg>,
    ) -> Option<Transit> {
        let way = look.way()?;
        let [source, target] = look.published_nodes(&routing.topology)?;
        let has_waited = client.moving.is_some();
        let asks = |nodes: Vec<NodeId>| Some(Transit::Ask(Asks { nodes, as_published: true }));
        match way {
            Way::Source => return Some(Transit::Settled),
            Way::Pull if has_waited => return None,
            Way::Pull if self.reads_one_key(client, command, args) => return asks(vec![target]),
            Way::Both if !has_waited && self.reads_one_key(client, command, args) => {
                return asks(vec![source, target]);
            }
            _ => {}
        }
        if !has_waited && look.fetches_first(&routing.topology, &routing.moves.legs) {
            return None;
        }
        if !matches!(command.handling, Handling::Split(_)) {
            return Some(Transit::Moved(hooks.routing_of_moved(turn).clone()));
        }
        let moved = look.moved_to(&routing.topology).into_iter();
        let topology = moved.fold((*routing.topology).clone(), |topology, (target, keys)| {
            topology.keys_handed_over(&[], &keys, target)
        });
        Some(Transit::Moved(Arc::new(RoutingSnapshot { topology: Arc::new(topology), ..(**routing).clone() })))
    }
}
