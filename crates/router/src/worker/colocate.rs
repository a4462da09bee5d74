//! Commands that need keys together of which some live elsewhere than their slot: they wait until these are home.
//!
//! The worker asks for it ([`crate::colocate`]), once per command, and looks at the command again when there is another
//! topology: nothing is kept of the command but that it waits. So what it needs by then is found out by then, and its
//! client's order is that of its connection.
//!
//! Not a queue at whoever moves the keys: a client that goes away, or whose time is over, would have to be looked for
//! there.

use std::sync::Arc;

use switchyard_policy::colocate::ColocationRequest;

use super::dispatch::Flow;
use super::downstream::Client;
use super::{Stall, Worker};
use crate::colocate::ColocateRequest;
use crate::slab::Handle;

/// A command that waits for keys to come home.
#[derive(Debug)]
pub(super) struct ColocateWait {
    /// Its number among its client's.
    number: u32,
    since_us: u64,
    /// It has been asked, and the answer is not there.
    is_requested: bool,
    /// Why they do not come.
    refusal: Option<Arc<str>>,
    /// The error for its client, should they not come.
    text: String,
}

impl Client {
    /// Whether the command that is looked at next waits for keys to come home.
    pub(super) fn waits_for_colocation(&self) -> bool {
        self.colocate_wait.as_ref().is_some_and(|wait| wait.number == self.next_seq())
    }
}

impl Worker {
    /// Has a command wait until what it needs lives together. `Err`: it does not wait (any more), and this is the error
    /// for its client. `text`: the error that says where the keys are.
    #[cold]
    pub(super) fn wait_for_colocation(
        &mut self,
        handle: Handle,
        command: &str,
        wanted: ColocationRequest,
        text: String,
    ) -> Result<Flow, String> {
        let limit = self.plan.live.bring_home_timeout;
        let (now_us, worker) = (self.now_us, self.index);
        let Some(client) = self.clients.get_mut(handle) else { return Ok(Flow::Close) };
        let Some(port) = self.shared.ports.colocate.as_ref().filter(|_| !limit.is_zero()) else { return Err(text) };
        let number = client.next_seq();
        if !client.waits_for_colocation() {
            self.counters.colocate_waits.add(1);
            client.colocate_wait = Some(Box::new(ColocateWait {
                number,
                since_us: now_us,
                is_requested: false,
                refusal: None,
                text: String::new(),
            }));
        }
        let Some(wait) = client.colocate_wait.as_mut() else { return Err(text) };
        // Where it ends here its client gets an answer, and the number is that of no command any more.
        if let Some(why) = wait.refusal.take() {
            self.counters.colocate_refused.add(1);
            return Err(format!("{text}. It was not brought home by itself: {why}"));
        }
        if now_us.saturating_sub(wait.since_us) > limit.as_micros() as u64 {
            self.counters.colocate_refused.add(1);
            return Err(self.late_text(&text));
        }
        if !wait.is_requested {
            wait.is_requested = true;
            port.colocate(ColocateRequest::new(
                wanted,
                command,
                limit,
                self.shared.mailboxes.clone(),
                worker,
                (handle, number),
            ));
        }
        wait.text = text;
        Ok(Flow::Stall(Stall::Home))
    }

    fn late_text(&self, text: &str) -> String {
        format!(
            "{text}. It was not home within {:?} (moves.bring-home-timeout); see switchyard moves",
            self.plan.live.bring_home_timeout
        )
    }

    /// The answer to a request. That the keys are home is seen by the topology: a command that finds them parted even
    /// so asks again, after a tick.
    pub(super) fn on_home(&mut self, handle: Handle, number: u32, refusal: Option<Arc<str>>) {
        let Some(client) = self.clients.get_mut(handle).filter(|client| client.waits_for_colocation()) else { return };
        let Some(wait) = client.colocate_wait.as_mut().filter(|wait| wait.number == number) else { return };
        wait.is_requested = false;
        wait.refusal = refusal;
        if wait.refusal.is_some() && client.stall == Stall::Home {
            self.unstall(handle);
        }
    }

    /// Has those look again who have waited for too long, or whose question was answered; with another topology all.
    pub(super) fn settle_colocate_waits(&mut self, all: bool) {
        let limit_us = self.plan.live.bring_home_timeout.as_micros() as u64;
        let is_late = |worker: &Self, wait: &ColocateWait| worker.now_us.saturating_sub(wait.since_us) > limit_us;
        for handle in self.clients.stalled(Stall::Home) {
            let wait = self.clients.get(handle).and_then(|client| client.colocate_wait.as_ref());
            if wait.is_some_and(|wait| all || !wait.is_requested || is_late(self, wait)) {
                self.unstall(handle);
            }
        }
        // Where the move that brings them has begun, that holds the command by itself.
        for handle in self.clients.stalled(Stall::Keys) {
            let Some(client) = self.clients.get(handle).filter(|client| client.waits_for_colocation()) else {
                continue;
            };
            if let Some(wait) = client.colocate_wait.as_ref().filter(|wait| is_late(self, wait)) {
                let text = self.late_text(&wait.text);
                self.counters.colocate_refused.add(1);
                self.refuse_held(handle, text);
            }
        }
    }
}
