//! Fills: the connections for them, and the handling of their replies.

use switchyard_policy::hot_copies::{Discarded, Filled};
use switchyard_policy::topology::NodeId;

use super::encode;
use crate::injected::Bug;
use crate::node::Reply;
use crate::world::{Owner, What, World, say};

impl World {
    pub(super) fn dial_fill(&mut self, ix: usize, node: usize) {
        if self.workers[ix].hot.links[node].conn.is_none() {
            let conn = self.connect(node, Owner::Filling(ix));
            let link = &mut self.workers[ix].hot.links[node];
            (link.conn, link.ready) = (Some(conn), false);
        }
    }

    pub(crate) fn fill_answered(&mut self, ix: usize, conn: u32, what: What, reply: Reply) {
        let node = self.conns[conn as usize].node;
        match (what, reply) {
            (What::Hello, Reply::Hello(process, _)) => {
                self.hot_meets(node, process);
                self.workers[ix].hot.links[node].ready = true;
            }
            (What::FillTtl(number), Reply::Number(ms)) => {
                if !self.bug(Bug::LifeForgotten) {
                    self.workers[ix].hot.copies.on_ttl_reply(number, ms);
                }
            }
            (What::Beat, _) => self.workers[ix].hot.copies.beats().replied(NodeId(node as u16)),
            (What::Fill(number), reply) => self.filled(ix, node, number, &reply),
            (what, reply) => self.violated(format!("worker {ix}: {reply:?} as the reply to {what:?}")),
        }
    }

    fn filled(&mut self, ix: usize, node: usize, number: u32, reply: &Reply) {
        let filled = self.end_fill(ix, node, number, reply);
        say!(self, "worker {ix}: fill {number} ends with {reply:?}: {filled:?}");
        self.hot.kept += u64::from(filled.is_ok());
        // A reply to an earlier read is invalid for a read that joined later, unless nothing was written in between.
        let is_answer = matches!(filled, Ok(()) | Err(Discarded::Large | Discarded::Refused))
            || self.bug(Bug::WaitersAreToldThePast);
        if is_answer {
            let waiting = self.workers[ix].hot.fills.remove(&number).map(|(_, waiting)| waiting);
            waiting.into_iter().flatten().for_each(|op| self.on_reply(op, node, reply.clone()));
        } else {
            self.dispatch_fill_waiters(ix, number);
        }
    }

    fn end_fill(&mut self, ix: usize, node: usize, number: u32, reply: &Reply) -> Filled {
        let (now, at) = ((self.turn(), self.now), NodeId(node as u16));
        let (kept_beside, on_its_way) = (self.bug(Bug::KeptBesideAWrite), self.bug(Bug::ServedOnItsWay));
        let serves_observed = self.hot.serves_observed;
        let worker = &mut self.workers[ix];
        let mut copies = std::mem::take(&mut worker.hot.copies);
        let (worker, gates, bytes) = (&*worker, worker.hot.gates.clone(), encode(reply));
        let lives_at = |key: &[u8]| if on_its_way { Some(at) } else { worker.place_of_copies(key, serves_observed) };
        let mut filled = copies.end(&*gates, number, &bytes, None, now, |key, _| lives_at(key));
        if kept_beside
            && filled == Err(Discarded::Written)
            && let Some((key, _)) = worker.hot.fills.get(&number)
        {
            let (name, database) = (&self.keys[*key], (*key / self.scenario.keys as usize) as u32);
            let hash = self.hot.hash(name);
            let asked =
                super::ReadRequest { hash, key: name, database, request: super::REQUEST, node: at, resp3: true };
            if let Some(again) = copies.begin(&*gates, asked, now) {
                filled = copies.end(&*gates, again, &bytes, None, now, |key, _| lives_at(key));
            }
        }
        self.workers[ix].hot.copies = copies;
        filled
    }

    /// Dispatches the reads that waited for a fill to the node.
    pub(super) fn dispatch_fill_waiters(&mut self, ix: usize, number: u32) {
        let waiting = self.workers[ix].hot.fills.remove(&number).map(|(_, waiting)| waiting);
        for op in waiting.into_iter().flatten() {
            if let Some(command) = self.ops.get_mut(&op) {
                command.fill_failed = true;
                self.look(op);
            }
        }
    }

    pub(crate) fn fill_broke(&mut self, ix: usize, conn: u32) {
        let node = self.conns[conn as usize].node;
        let lost = self.close(conn);
        let of = &mut self.workers[ix].hot;
        if of.links[node].conn == Some(conn) {
            of.links[node] = super::FillLink::default();
        }
        of.copies.lost(NodeId(node as u16), Discarded::Lost);
        for pending in lost {
            if let What::Fill(number) = pending.what {
                let of = &mut self.workers[ix].hot;
                let gates = of.gates.clone();
                let ended = of.copies.end(&*gates, number, b"-", None, (self.now, self.now), |_, _| None);
                debug_assert!(ended.is_err(), "its connection is lost");
                self.dispatch_fill_waiters(ix, number);
            }
        }
    }
}
