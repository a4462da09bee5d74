//! Limit of the client commands that a source serves of keys in transit: NetMigrate's policies (section 4.4), for moves by
//! a protocol as published.
//!
//! A command that would be sent to the source takes a token of the move's bucket. Without one its client waits, and so
//! do the client's later commands. Each tick grants the tokens of that time to the clients of this worker in their order
//! of arrival; then a command is checked again from its beginning, because its keys may have moved. A command counts
//! once, also a transaction, and a read of both nodes. Commands that are sent again after a lost connection do not count.

use switchyard_policy::migration::Waits;
use switchyard_policy::topology::MoveId;

use super::end_hold;
use super::state::{InTransit, Moving};
use crate::slab::Handle;
use crate::worker::downstreams::Downstreams;
use crate::worker::downstreams::waits::Stall;
use crate::worker::turn::Turn;

/// Ends a client's wait for the limit of a source. Returns whether its command may be sent there now.
pub(super) fn take_turn(turn: &Turn, down: &mut Downstreams, handle: Handle) -> bool {
    let moving = down.get(handle).and_then(|client| client.state::<Moving>());
    let Some(has_turn) = moving.and_then(|moving| moving.turn_at_source) else { return false };
    end_hold(turn, down, handle);
    has_turn
}

/// Counts a command for the source of a move. Returns whether it exceeds the limit; its client then waits for its turn.
#[cold]
pub(super) fn is_over_limit(
    turn: &Turn,
    down: &mut Downstreams,
    transit: &mut InTransit,
    handle: Handle,
    move_id: MoveId,
) -> bool {
    let Some(limit) = turn.routing().moves.source_ops.get(&move_id) else { return false };
    let is_first = !transit.for_source.iter().any(|(of, _)| *of == move_id);
    if is_first && limit.take(turn.now_us()) {
        return false;
    }
    let Some(client) = down.get_mut(handle) else { return false };
    client.set_state(Moving {
        since_us: turn.now_us(),
        move_id: Some(move_id),
        turn_at_source: Some(false),
        waits: Waits::default(),
        refusal: None,
    });
    transit.for_source.push_back((move_id, handle));
    true
}

/// Resumes clients for whose commands the source has capacity again, or whose move has no limit any more.
pub(in crate::worker) fn tick_source_ops(turn: &Turn, down: &mut Downstreams, transit: &mut InTransit) {
    let mut exhausted: Vec<MoveId> = Vec::new();
    for (move_id, handle) in std::mem::take(&mut transit.for_source) {
        let Some(client) = down.get_mut(handle).filter(|client| client.stall() == Stall::SourceOps) else { continue };
        let is_exhausted = exhausted.contains(&move_id);
        let limit = turn.routing().moves.source_ops.get(&move_id);
        let has_turn = limit.map(|limit| !is_exhausted && limit.take(turn.now_us()));
        if has_turn == Some(false) {
            exhausted.extend((!is_exhausted).then_some(move_id));
            transit.for_source.push_back((move_id, handle));
            continue;
        }
        if let Some(moving) = client.state_mut::<Moving>() {
            moving.turn_at_source = Some(has_turn.is_some());
        }
        if turn.routing().topology.is_settled() {
            // No slot is in transit any more, so its keys will not be checked again.
            end_hold(turn, down, handle);
        }
        down.unstall(turn, handle);
    }
}
