//! Commands that need keys together of which some live elsewhere than their slot: they wait until these are home.
//!
//! The worker asks for it ([`crate::homeward`]), once per command, and looks at the command again when there is another topology: nothing is
//! kept of the command but that it waits. So what it needs by then is found out by then, and its client's order is that of its connection.
//!
//! Not a queue at whoever moves the keys: a client that goes away, or whose time is over, would have to be looked for there.

use std::sync::Arc;

use switchyard_policy::homecoming::Wanted;

use super::dispatch::Flow;
use super::downstream::Client;
use super::{Stall, Worker};
use crate::homeward::HomeWish;
use crate::slab::Handle;

/// A command that waits for keys to come home.
#[derive(Debug)]
pub(super) struct Homing {
    /// Its number among its client's.
    number: u32,
    since_us: u64,
    /// It has been asked, and the answer is not there.
    is_asked: bool,
    /// Why they do not come.
    refusal: Option<Arc<str>>,
    /// The error for its client, should they not come.
    text: String,
}

/// The clients of a worker that wait for keys to come home.
#[derive(Debug, Default)]
pub(super) struct HomeWaits {
    clients: Vec<Handle>,
}

impl Client {
    /// Whether the command that is looked at next waits for keys to come home.
    pub(super) fn waits_for_home(&self) -> bool {
        self.homing.as_ref().is_some_and(|homing| homing.number == self.next_seq())
    }
}

impl Worker {
    /// Has a command wait until what it needs lives together. `Err`: it does not wait (any more), and this is the error for its client. `text`: the
    /// error that says where the keys are.
    #[cold]
    pub(super) fn wait_for_home(&mut self, handle: Handle, command: &str, wanted: Wanted, text: String) -> Result<Flow, String> {
        let limit = self.plan.live.bring_home_timeout;
        let (now_us, worker) = (self.now_us, self.index);
        let Some(client) = self.clients.get_mut(handle) else { return Ok(Flow::Close) };
        let Some(port) = self.shared.home.get().filter(|_| !limit.is_zero()) else { return Err(text) };
        let number = client.next_seq();
        if !client.waits_for_home() {
            // One that waited before is on the list as long as it is not looked at there.
            if client.homing.is_none() {
                self.home_waits.clients.push(handle);
            }
            self.counters.homing.add(1);
            client.homing = Some(Box::new(Homing { number, since_us: now_us, is_asked: false, refusal: None, text: String::new() }));
        }
        let Some(homing) = client.homing.as_mut() else { return Err(text) };
        // Where it ends here its client gets an answer, and the number is that of no command any more.
        if let Some(why) = homing.refusal.take() {
            self.counters.not_home.add(1);
            return Err(format!("{text}. It was not brought home by itself: {why}"));
        }
        if now_us.saturating_sub(homing.since_us) > limit.as_micros() as u64 {
            self.counters.not_home.add(1);
            return Err(self.late_text(&text));
        }
        if !homing.is_asked {
            homing.is_asked = true;
            port.bring_home(HomeWish::new(wanted, command, limit, self.shared.mailboxes.clone(), worker, (handle, number)));
        }
        homing.text = text;
        Ok(Flow::Stall(Stall::Moving))
    }

    fn late_text(&self, text: &str) -> String {
        format!("{text}. It was not home within {:?} (moves.bring-home-timeout); see switchyard moves", self.plan.live.bring_home_timeout)
    }

    /// The answer to a wish. That the keys are home is seen by the topology: a command that finds them parted even so asks again, after a tick.
    pub(super) fn on_home(&mut self, handle: Handle, number: u32, refusal: Option<Arc<str>>) {
        let Some(client) = self.clients.get_mut(handle).filter(|client| client.waits_for_home()) else { return };
        let Some(homing) = client.homing.as_mut().filter(|homing| homing.number == number) else { return };
        homing.is_asked = false;
        homing.refusal = refusal;
        if homing.refusal.is_some() && client.stall == Stall::Moving && client.moving.is_none() {
            self.unstall(handle);
        }
    }

    /// Another topology: those who wait look again where their keys are.
    pub(super) fn look_home_again(&mut self) {
        self.settle_homing(true);
    }

    /// Nobody waits longer than is allowed.
    pub(super) fn tick_homing(&mut self) {
        if !self.home_waits.clients.is_empty() {
            self.settle_homing(false);
        }
    }

    fn settle_homing(&mut self, all: bool) {
        let mut homing_clients = std::mem::take(&mut self.home_waits.clients);
        homing_clients.retain(|handle| match self.clients.get_mut(*handle) {
            Some(client) if client.waits_for_home() => true,
            Some(client) => {
                client.homing = None;
                false
            }
            None => false,
        });
        let limit_us = self.plan.live.bring_home_timeout.as_micros() as u64;
        for handle in &homing_clients {
            let Some(client) = self.clients.get(*handle).filter(|client| client.stall == Stall::Moving) else { continue };
            let Some(homing) = &client.homing else { continue };
            let is_late = self.now_us.saturating_sub(homing.since_us) > limit_us;
            if client.moving.is_some() {
                // The move that brings them has begun, and holds the command by itself.
                if is_late {
                    let text = self.late_text(&homing.text);
                    self.counters.not_home.add(1);
                    self.refuse_held(*handle, text);
                }
            } else if all || is_late || !homing.is_asked {
                self.unstall(*handle);
            }
        }
        self.home_waits.clients = homing_clients;
    }
}
