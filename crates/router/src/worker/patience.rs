//! What clients ask when they connect (`INFO`, `COMMAND`) waits for no silent node: they would take the router for dead.
//!
//! A node that has not answered its oldest command for [`SILENT_US`] is not asked, and who was asked before that is left out then: INFO says what the other nodes
//! say, and COMMAND what this worker has heard before. `HELLO`, `AUTH` and `CLIENT` need no node.

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

/// Answers that are kept, and the bytes of one, at most.
const HEARD_MAX: usize = 8;
const HEARD_BYTES_MAX: usize = 2 << 20;

/// Answers to COMMAND: they say the same as long as a node's process runs, and differ little between nodes.
#[derive(Debug, Default)]
pub(super) struct Heard(Vec<(bool, Vec<u8>, Vec<u8>)>);

impl Heard {
    /// A node has answered this request, in RESP3 or not.
    pub(super) fn note(&mut self, resp3: bool, request: &[u8], answer: &[u8]) {
        self.0.retain(|(protocol, known, _)| *protocol != resp3 || known != request);
        if request.len() + answer.len() <= HEARD_BYTES_MAX {
            if self.0.len() >= HEARD_MAX {
                self.0.remove(0);
            }
            self.0.push((resp3, request.to_vec(), answer.to_vec()));
        }
    }

    fn answer(&self, resp3: bool, request: &[u8]) -> Option<&[u8]> {
        self.0.iter().find(|(protocol, known, _)| *protocol == resp3 && known == request).map(|(.., answer)| &answer[..])
    }
}

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
            && let Some(answer) = self.heard.answer(resp3, raw).map(<[u8]>::to_vec)
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
                self.heard.answer(resp3, &request).map(<[u8]>::to_vec)
            });
            let answer = known.unwrap_or_else(|| b"-NODETIMEOUT no node answers now\r\n".to_vec());
            for part in parts {
                self.gather_part(handle, part, &answer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_kept_by_request_and_protocol_and_few() {
        let mut heard = Heard::default();
        heard.note(false, b"COMMAND", b"old");
        heard.note(false, b"COMMAND", b"new");
        heard.note(true, b"COMMAND", b"resp3");
        assert_eq!((heard.answer(false, b"COMMAND"), heard.answer(true, b"COMMAND")), (Some(&b"new"[..]), Some(&b"resp3"[..])));
        for number in 0..HEARD_MAX {
            heard.note(false, &[number as u8], b"x");
        }
        assert_eq!((heard.0.len(), heard.answer(false, b"COMMAND")), (HEARD_MAX, None));
        heard.note(false, b"large", &vec![0; HEARD_BYTES_MAX]);
        assert_eq!(heard.answer(false, b"large"), None);
    }
}
