//! Nodes that do not answer in the time that INFO and COMMAND wait for them.

use switchyard_policy::topology::NodeId;

use super::downstreams::{Client, Downstreams};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::link::Phase;
use crate::slab::Handle;

/// Maximum wait of a connecting client for a node if an earlier answer is known.
const TIMEOUT_US: u64 = 100_000;

/// Maximum wait if no answer is known.
pub(super) const SILENT_US: u64 = 1_000_000;

/// A client with recent writes waits longer, because an earlier INFO may not show them.
pub(super) fn timeout_after_writes(client: &Client, now_us: u64) -> u64 {
    let has_written = client.replies().wrote_us().is_some_and(|us| now_us < us + 2 * SILENT_US);
    if has_written { SILENT_US } else { TIMEOUT_US }
}

/// Time that a client waits for a node, us.
pub(super) fn timeout_of(turn: &Turn, down: &Downstreams, client: Handle) -> u64 {
    down.get(client).map_or(TIMEOUT_US, |client| timeout_after_writes(client, turn.now_us()))
}

/// Whether an answer of a node has been pending for longer than this client waits.
pub(super) fn is_silent(turn: &Turn, up: &Upstreams, node: NodeId, timeout_us: u64) -> bool {
    let is_old = |sent_us: u32| u64::from((turn.now_us() as u32).wrapping_sub(sent_us)) > timeout_us;
    let main = up.links().main(node).and_then(|main| up.get(main));
    main.is_some_and(|link| link.phase() == Phase::Up && link.head().is_some_and(|head| is_old(head.sent_us)))
}
