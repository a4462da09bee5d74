//! EXEC, and its reply.

use std::sync::Arc;

use switchyard_policy::cluster::Redirect;
use switchyard_policy::topology::NodeId;
use switchyard_resp::{encode, reply};

use super::place::node_of_exec;
use super::session::{Session, UnderWay};
use super::{ABORTED, discard, exec_after_colocation, exec_alone, is_dirty, send_transaction, with_counts};
use crate::lane::Lane;
use crate::shared::RoutingSnapshot;
use crate::single_node_usage::Limit;
use crate::slab::Handle;
use crate::worker::Worker;
use crate::worker::context::Context;
use crate::worker::downstreams::waits::Stall;
use crate::worker::flow::Flow;
use crate::worker::multi_local::state::LocalInMulti;
use crate::worker::scripts::rehearsed::touched_key;
use crate::worker::transactions::after_exec;
use crate::worker::upstreams::Link;
use crate::worker::upstreams::kind::Checkout;
use crate::worker::upstreams::link::{Phase, UNSENT_HIGH};
use crate::worker::upstreams::pending::{Pending, Purpose};

impl Worker {
    pub(in crate::worker) fn exec(&mut self, routing: &Arc<RoutingSnapshot>, handle: Handle, class: u8) -> Flow {
        let Some(client) = self.cx.down.get(handle) else { return Flow::Close };
        let resp3 = client.resp3();
        let Some(session) = client.state::<Session>() else { return Flow::Close };
        let (multi, watch) = (&session.multi, session.watch.as_ref());
        if multi.aborted {
            discard(&mut self.cx.down, handle);
            return self.cx.down.refuse(&self.cx.turn, handle, class, ABORTED);
        }
        let is_limited = watch.is_some_and(|watch| watch.are_apart) && !routing.colocates();
        let alone = multi.alone.or(is_limited.then_some(Limit::Slots));
        if let Some(limit) = alone.filter(|_| routing.topology.only_node().is_none()) {
            discard(&mut self.cx.down, handle);
            return self.cx.down.refuse(&self.cx.turn, handle, class, limit.aborted());
        }
        let is_watching = watch.is_some();
        if let Some(flow) = self.query_before_exec(routing, handle) {
            return flow;
        }
        let Some(client) = self.cx.down.get(handle) else { return Flow::Close };
        let Some(session) = client.state::<Session>() else { return Flow::Close };
        let (multi, watch) = (&session.multi, session.watch.as_ref());
        if is_watching && client.in_flight() > 0 {
            // Not before the node has confirmed the watch.
            return Flow::Stall(Stall::Barrier);
        }
        if is_dirty(&self.cx.turn, &self.cx.up, &self.cx.hooks, handle, client) {
            discard(&mut self.cx.down, handle);
            self.cx.down.answer(&self.cx.turn, handle, class, if resp3 { b"_\r\n" } else { b"*-1\r\n" });
            return Flow::Next;
        }
        if let Some(watch) = watch {
            let (link, slot, node) = (watch.link, watch.slot, watch.node);
            let Context { turn, down, hooks, .. } = &mut self.cx;
            if let Err(apart) = node_of_exec(turn, down, hooks, routing, handle, slot) {
                return exec_after_colocation(turn, down, handle, class, apart);
            }
            if let Some(flow) = self.rehearse_before_exec(routing, handle, node, class) {
                return flow;
            }
            if let Some(client) = self.cx.down.get_mut(handle) {
                client.may_take(Lane::Watch);
                client.hold(link);
                client.state_or_default::<Session>().watch = None;
            }
            self.cx.up.get_mut(link).and_then(Link::checkout_mut).into_iter().for_each(Checkout::end_task);
            return send_transaction(&mut self.cx, handle, link, class, true);
        }
        if multi.commands.is_empty() {
            let own = self
                .cx
                .down
                .get_mut(handle)
                .map(|client| std::mem::take(&mut client.state_or_default::<Session>().multi.own))
                .unwrap_or_default();
            discard(&mut self.cx.down, handle);
            let reply = self.with_own_answers(handle, own, b"*0\r\n");
            self.cx.down.answer(&self.cx.turn, handle, class, &reply);
            return Flow::Next;
        }
        let node = match multi.slot {
            Some(slot) => {
                let Context { turn, down, hooks, .. } = &mut self.cx;
                match node_of_exec(turn, down, hooks, routing, handle, slot) {
                    Ok(node) => Some(node),
                    Err(apart) => return exec_after_colocation(turn, down, handle, class, apart),
                }
            }
            None => self.cx.up.choose_node(&self.cx.turn, routing),
        };
        let Some(node) = node else {
            discard(&mut self.cx.down, handle);
            return self.cx.down.refuse_all_down(&self.cx.turn, handle, class);
        };
        if let Some(flow) = self.rehearse_before_exec(routing, handle, node, class) {
            return flow;
        }
        let Some(client) = self.cx.down.get(handle) else { return Flow::Close };
        let Some(multi) = client.state::<Session>().map(|s| &s.multi) else { return Flow::Close };
        let lane = if multi.slow { Lane::Slow } else { Lane::Main };
        if multi.queue.len() > routing.live.large_value {
            return exec_alone(&mut self.cx, handle, node, Lane::Large, class);
        }
        if !client.replies().can_take(lane) {
            return Flow::Stall(Stall::Barrier);
        }
        let link_handle = self.cx.up.shared_link(&self.cx.turn, node, lane, resp3);
        let Some(link) = self.cx.up.get(link_handle) else { return Flow::Close };
        if link.phase() != Phase::Up {
            // Nothing may be sent before it is known whether the node supports transactions.
            return exec_alone(&mut self.cx, handle, node, Lane::Watch, class);
        }
        if !link.has_room(UNSENT_HIGH) && self.cx.up.is_full(link_handle, handle, UNSENT_HIGH) {
            return Flow::Stall(Stall::Upstream);
        }
        if let Some(client) = self.cx.down.get_mut(handle) {
            client.may_take(lane);
        }
        send_transaction(&mut self.cx, handle, link_handle, class, false)
    }

    /// Handles the node's answer to EXEC.
    pub(in crate::worker) fn on_exec(&mut self, link: Handle, pending: Pending, answer: &[u8]) {
        let Some(link) = self.cx.up.get_mut(link) else { return };
        let (refused, no_multi, node) = (link.take_refusal(), link.no_multi().map(str::to_owned), link.node());
        let executed = answer.starts_with(b"*") && !reply::is_null(answer);
        let is_refused = answer.starts_with(b"-EXECABORT");
        if !executed && self.cx.turn.routing().topology.is_of_cluster() {
            let reason = if is_refused { refused.as_deref() } else { reply::text(answer) };
            if reason.is_some_and(|reason| self.send_again(node, pending, reason)) {
                return;
            }
        }
        if executed {
            reply::elements(answer)
                .filter(|element| reply::is_error(element))
                .for_each(|error| self.cx.turn.counters().errors.count(error));
            reply::elements(answer)
                .filter(|element| reply::is_error(element) && touched_key(element).is_some())
                .for_each(|error| self.cx.hooks.scripts_met.note_foreign(error));
        }
        let (mut text, mut own) = (Vec::new(), LocalInMulti::default());
        if let Some(client) = self.cx.down.get_mut(pending.who) {
            after_exec(client, executed);
            let first = client.replies().first();
            let under_way =
                client.state_mut::<Session>().and_then(|s| s.take_under_way(pending.seq, first)).filter(|_| executed);
            if let Some(UnderWay { published, own: others, .. }) = under_way {
                if !published.is_empty() {
                    text = with_counts(&self.cx.turn, node, &published, answer);
                }
                own = others;
            }
        }
        match (refused, no_multi) {
            // Also for EXECABORT, from a server that refuses EXEC, too: nothing was discarded.
            (_, Some(why)) if pending.purpose == Purpose::ExecWithoutMulti => encode::error(
                &mut text,
                &format!(
                    "ERR the node refused MULTI ({why}): the commands were executed one by one. Allow MULTI to Switchyard's user there"
                ),
            ),
            (Some(why), _) if is_refused => {
                encode::line(&mut text, b'-', &[b"EXECABORT Transaction discarded because of: ", &why[..]].concat());
            }
            _ => {}
        }
        let answer = if text.is_empty() { answer } else { &text };
        let shown = if executed { self.cx.hooks.scripts_met.with_own_shas(answer) } else { None };
        let shown = shown.as_deref().unwrap_or(answer);
        if own.is_empty() {
            return self.cx.down.deliver(&self.cx.turn, pending.who, pending.seq, shown);
        }
        let whole = self.with_own_answers(pending.who, own, shown);
        self.cx.down.deliver(&self.cx.turn, pending.who, pending.seq, &whole);
    }

    /// Sends a transaction again that a member of a cluster has refused for this reason. Returns false if it is no
    /// redirect. A transaction after WATCH is not executed: the watched keys have moved.
    fn send_again(&mut self, from: NodeId, pending: Pending, reason: &[u8]) -> bool {
        if Redirect::of(reason).is_none() {
            return false;
        }
        let Some(client) = self.cx.down.get_mut(pending.who) else { return false };
        let resp3 = client.resp3();
        let Some(session) = client.state_mut::<Session>() else { return false };
        let Some(transaction) = session.take_resend(pending.seq) else { return false };
        if transaction.is_watched {
            after_exec(client, false);
            let nothing: &[u8] = if resp3 { b"_\r\n" } else { b"*-1\r\n" };
            self.cx.down.deliver(&self.cx.turn, pending.who, pending.seq, nothing);
            return true;
        }
        self.redirects.follow_transaction(&mut self.cx, from, reason, pending, transaction)
    }
}
