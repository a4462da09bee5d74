//! Transactions on connections: watched keys, errors of queued commands, and nodes that refuse transactions.

use super::kind::Task;
use super::link::{Pending, Phase};
use super::{Event, Link, Origin, Upstreams};
use crate::slab::Handle;
use crate::worker::transactions::no_multi_text;
use crate::worker::turn::Turn;
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;

impl Upstreams {
    /// Whether the node still watches on this connection for this client.
    pub(in crate::worker) fn is_watching(&self, handle: Handle, link: Handle, node: NodeId) -> bool {
        let is_up = |l: &Link| l.phase == Phase::Up && l.node == node && !l.is_head_expired();
        let watches = |l: &Link| is_up(l) && l.task() == Task::Watching && l.holder() == handle;
        self.get(link).is_some_and(watches)
    }

    /// After a shared connection has come up to a node that refuses transactions: refuses waiting transactions as a
    /// whole. If sent, their commands would be executed individually.
    pub(super) fn refuse_waiting_transactions(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get_mut(handle) else { return };
        let (Some(why), node) = (link.no_multi.clone(), link.node) else { return };
        let ended = link.take_transactions();
        if !ended.is_empty() {
            let origin = Origin { link: handle, node, lane: Some(link.lane), is_up: true };
            let text = no_multi_text(turn, node, &why);
            self.emit(Event::Failed { origin, ended, in_flight: 0, text: Some(text) });
        }
    }

    /// Handles the node's answer to MULTI, or to a command after it. After an error, EXEC will return EXECABORT.
    pub(in crate::worker) fn on_queued(&mut self, link: Handle, pending: Pending, refused: bool, answer: &[u8]) {
        let Some(link) = self.get_mut(link) else { return };
        if pending.seq == 0 {
            link.refused = None;
        }
        if refused {
            let text = reply::text(answer).unwrap_or_default();
            link.refused.get_or_insert(text.into());
            if pending.seq == 0 {
                link.is_not_queued(text);
            }
        }
    }
}
