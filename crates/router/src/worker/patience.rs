//! What clients ask when they connect (`INFO`, `COMMAND`) waits for no silent node: they would take the router for dead.
//!
//! A node that has not answered its oldest command for [`SILENT_US`] is not asked, and who was asked before that is left out then: INFO says what the other nodes
//! say, and COMMAND what the router has heard before. `HELLO`, `AUTH` and `CLIENT` need no node.

use switchyard_policy::topology::NodeId;
use switchyard_resp::command::Command;
use switchyard_resp::encode;
use switchyard_resp::request::Args;

use super::dispatch::Flow;
use super::gather::Whole;
use super::upstream::{Lane, Phase};
use super::{Stall, Worker};
use crate::shared::Plan;
use crate::slab::Handle;

/// A node that does not answer for so long is not waited for.
const SILENT_US: u64 = 1_000_000;

impl Worker {
    /// Whether a node has not answered for longer than whoever connects waits.
    pub(super) fn is_silent(&self, node: NodeId) -> bool {
        let is_old = |sent_us: u32| u64::from((self.now_us as u32).wrapping_sub(sent_us)) > SILENT_US;
        let main = self.links.main(node).and_then(|main| self.links.get(main));
        main.is_some_and(|link| link.phase == Phase::Up && link.head().is_some_and(|head| is_old(head.sent_us)))
    }

    /// COMMAND and its subcommands: any node that answers.
    #[cold]
    pub(super) fn ask_for_commands(&mut self, plan: &Plan, handle: Handle, command: &Command, raw: &[u8], args: &Args<'_>) -> Flow {
        let class = command.class() as u8;
        let talks = |worker: &Self, node: NodeId| worker.links.is_up(node) && !worker.is_silent(node);
        let talking = plan.topology.nodes().map(|node| node.id).find(|node| talks(self, *node));
        let Some(node) = talking.or_else(|| self.choose_node(plan)) else { return self.refuse_all_down(handle, class) };
        let Some(client) = self.clients.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Main) {
            return Flow::Stall(Stall::Barrier);
        }
        let resp3 = client.resp3;
        if talking.is_none()
            && let Some(answer) = self.shared.heard.answer(resp3, raw)
        {
            self.answer(handle, class, &answer);
            return Flow::Next;
        }
        let Some(gather) = self.begin_gather(handle, class, 1, Whole::Commands { request: raw.to_vec() }) else { return Flow::Close };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().collect::<Vec<_>>());
        self.send_part(gather, 0, node, Lane::Main, &request, class);
        Flow::Next
    }

    /// Whoever has asked what needs no answer of a certain node waits no longer for those that are silent.
    pub(super) fn tick_patience(&mut self) {
        let late: Vec<(Handle, Vec<u32>)> = self
            .gathers
            .iter()
            .filter(|(_, gather)| gather.is_impatient() && self.now_us.saturating_sub(gather.began_us()) > SILENT_US)
            .map(|(handle, gather)| (handle, gather.missing()))
            .collect();
        for (handle, parts) in late {
            let asked = self.gathers.get(handle).and_then(|gather| Some((gather.client(), gather.asks_for_commands()?.to_vec())));
            let known = asked.and_then(|(client, request)| {
                let resp3 = self.clients.get(client)?.resp3;
                self.shared.heard.answer(resp3, &request)
            });
            let answer = known.unwrap_or_else(|| b"-NODETIMEOUT no node answers now\r\n".to_vec());
            for part in parts {
                self.gather_part(handle, part, &answer);
            }
        }
    }
}
