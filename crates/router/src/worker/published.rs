//! What a worker does with a command of a move by a protocol as published ([`switchyard_policy::migration::published`]): it sends it where the switch's rules say, and
//! tells the mover of writes at the source.
//!
//! A read of one key may be asked of both nodes, or of the target and then again when its key was fetched ([`super::double_read`] does that). A command of several
//! keys that can be split is sent key by key. All others go to the source if all their keys do, and else to the target: the papers know no transactions and no
//! scripts.

use std::sync::Arc;

use switchyard_policy::migration::published::Way;
use switchyard_policy::migration::{Key, Look, is_late};
use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::command::{Command, Handling};
use switchyard_resp::request::Args;

use super::Worker;
use super::double_read::{Asks, reads_one_key};
use super::keyed::writes;
use super::transit::Transit;
use crate::mover::SharedLeg;
use crate::shared::Plan;
use crate::slab::Handle;

/// What a command is to do. `None`: it waits for what was pulled, or its keys are in no such move.
pub(super) fn as_published(
    worker: &Worker,
    plan: &Arc<Plan>,
    handle: Handle,
    command: &Command,
    args: &Args<'_>,
    look: &Look<SharedLeg>,
) -> Option<Transit> {
    let way = look.way()?;
    let [source, target] = look.published_nodes(&plan.topology)?;
    let is_read = || reads_one_key(worker, handle, command, args);
    let has_waited = worker.clients.get(handle).is_some_and(|client| client.moving.is_some());
    Some(match way {
        Way::Source => Transit::Settled,
        Way::Pull if has_waited => return None,
        Way::Both if !has_waited && is_read() => Transit::Ask(Asks { nodes: vec![source, target], as_published: true }),
        Way::Pull if is_read() => Transit::Ask(Asks { nodes: vec![target], as_published: true }),
        _ if matches!(command.handling, Handling::Split(_)) => {
            let moved = look.ways().iter().filter(|(_, way)| *way != Way::Source).map(|(key, _)| key);
            let topology = Arc::new(plan.topology.keys_handed_over(&[], moved, target));
            Transit::Moved(Arc::new(Plan { topology, ..(**plan).clone() }))
        }
        Way::Target | Way::Both | Way::Pull => Transit::Moved(worker.plan_of_moved().clone()),
    })
}

/// The keys that a command may write at the source of such a move.
pub(super) fn late_writes(plan: &Plan, node: NodeId, command: &Command, args: &Args<'_>, places: &[u32]) -> Option<(MoveId, Vec<Key>)> {
    if plan.topology.is_settled() || !writes(command) {
        return None;
    }
    let keys = places.iter().filter_map(|place| args.get(*place as usize));
    let mut late = keys.filter_map(|key| Some((is_late(&plan.topology, &plan.moves.legs, key, node)?.move_id, Key::from(key)))).peekable();
    let (move_id, _) = late.peek()?;
    Some((*move_id, late.map(|(_, key)| key).collect()))
}
