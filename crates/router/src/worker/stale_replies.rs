//! `INFO` and `COMMAND`, which clients send when they connect, do not wait for a silent node: otherwise clients would
//! consider the router dead.
//!
//! A node that has not answered its oldest command for [`TIMEOUT_US`] is not queried, and a node queried before is
//! then left out. INFO shows the figures from the last health check of such a node, at most a second old. COMMAND
//! returns an earlier answer. `HELLO`, `AUTH` and `CLIENT` need no node.

use switchyard_policy::topology::NodeId;
use switchyard_resp::encode;

use super::context::Context;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::{Aggregation, Gather, Gathers};
use super::invocation::Invocation;
use super::silent_nodes::{SILENT_US, is_silent, timeout_after_writes, timeout_of};
use crate::lane::Lane;
use crate::shared::Shared;
use crate::slab::Handle;

const LATE: &[u8] = b"-NODETIMEOUT no node answers now\r\n";

impl Gather {
    /// Returns the substitute for the answer of a late node. For INFO this is an error, but the last figures of the
    /// node count.
    fn known_answer(&mut self, shared: &Shared, node: NodeId, resp3: bool) -> Option<Vec<u8>> {
        if let Some(request) = self.commands_request() {
            return shared.command_replies.answer(resp3, request);
        }
        self.add_info(&shared.last_info(node)?);
        Some(LATE.to_vec())
    }
}

impl Gathers {
    /// Sends COMMAND or a subcommand to any node that answers.
    #[cold]
    pub(super) fn query_commands(&mut self, cx: &mut Context, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let class = command.class() as u8;
        let timeout_us = timeout_of(&cx.turn, &cx.down, handle);
        let talks = |node: &NodeId| cx.up.links().is_up(*node) && !is_silent(&cx.turn, &cx.up, *node, timeout_us);
        let talking = routing.topology.nodes().map(|node| node.id).find(talks);
        let Some(node) = talking.or_else(|| cx.up.choose_node(&cx.turn, routing)) else {
            return cx.down.refuse_all_down(&cx.turn, handle, class);
        };
        let Some(client) = cx.down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let resp3 = client.resp3();
        if talking.is_none()
            && let Some(answer) = cx.turn.shared().command_replies.answer(resp3, raw)
        {
            cx.down.answer(&cx.turn, handle, class, &answer);
            return Flow::Next;
        }
        let Some(gather) = self.begin_gather(
            &cx.turn,
            &mut cx.down,
            handle,
            class,
            1,
            Aggregation::Commands { request: raw.to_vec() },
        ) else {
            return Flow::Close;
        };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().collect::<Vec<_>>());
        self.send_parts(cx, gather, 0, node, Lane::Main, &[&request], class);
        Flow::Next
    }

    /// Answers INFO and COMMAND from known data if nodes have not answered in time.
    pub(super) fn tick_timeout(&mut self, cx: &mut Context) {
        let waited = |gather: &Gather| cx.turn.now_us().saturating_sub(gather.began_us());
        let late: Vec<(Handle, bool)> = self
            .iter()
            .filter(|(_, gather)| {
                gather.is_impatient()
                    && cx
                        .down
                        .get(gather.client())
                        .is_none_or(|client| waited(gather) > timeout_after_writes(client, cx.turn.now_us()))
            })
            .map(|(handle, gather)| (handle, waited(gather) > SILENT_US))
            .collect();
        for (handle, is_silent) in late {
            for (part, node) in self.get(handle).map(Gather::missing).unwrap_or_default() {
                let known = self.get_mut(handle).and_then(|gather| {
                    let resp3 = cx.down.get(gather.client())?.resp3();
                    gather.known_answer(cx.turn.shared(), node, resp3)
                });
                if known.is_some() || is_silent {
                    self.gather_part(cx, handle, part, &known.unwrap_or_else(|| LATE.to_vec()));
                }
            }
        }
    }
}
