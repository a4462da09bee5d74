//! Memory budget of the process (`memory-max`): above it, clients are disconnected, biggest first.
//!
//! The allocator counts the used memory ([`crate::memory`]), so nothing is missed. The holders of memory are only
//! determined above half of the budget: a worker sums up its clients, their commands at connections and gathers, and
//! replies of nodes without a waiting client.
//!
//! - **Checks**: at every tick, and after an event if the worker has grown by its share of the remaining budget (at
//!   least [`STEP`]) since the last check. One event reads at most 128 KiB from one socket, but may copy a buffered
//!   reply or request, or reallocate its buffer to twice the size. So each worker exceeds the budget by at most
//!   [`STEP`] and the effect of one event. All buffers together are within the budget before, so the used memory never
//!   exceeds twice the budget, and with many clients stays far below that.
//! - **Victims**: clients without a login first, because otherwise they could displace applications. One worker at a
//!   time evicts, and stops when the total is below the budget. If another worker has a bigger client, that worker is
//!   notified. This one waits while the excess is below 1/8 of the budget ([`EXCESS_DIVISOR`]), or below 1/2 if its own
//!   biggest client is small in comparison. Before a client of last resort (CLIENT NO-EVICT), all other workers are
//!   notified first, because they publish the sizes of their clients only periodically.
//! - **Exempt**: requests in flight of disconnected clients. Nodes may still execute them, so they are kept until the
//!   reply, and not counted as used.
//!
//! There is no limit per client: a client may use much memory while enough is free.

use std::collections::HashMap;

use tracing::{error, warn};

use super::downstreams::Downstreams;
use super::gather::Gathers;
use super::log_throttle::LogThrottle;
use super::tracking::Tracking;
use super::turn::Turn;
use super::upstreams::pending::{Pending, Purpose};
use super::upstreams::{Link, Upstreams};
use super::{TICK, Worker};
use crate::lock::lock;
use crate::memory;
use crate::shared::Message;
use crate::slab::Handle;

/// Minimum growth of a worker before a check.
const STEP: i64 = 1 << 20;

/// Minimum size of a victim. Evicting smaller ones would disconnect many clients and free little.
const VICTIM_MIN: usize = 16 << 10;

/// Minimum size of a partial reply without a waiting client for which its connection is closed.
const UNAWAITED_MIN: usize = 1 << 20;

/// Maximum capacity of reused buffers.
const REUSED_MAX: usize = 1 << 20;

/// Delay before the next attempt of a worker that has found no victim, microseconds.
const RETRY_US: u64 = 200_000;

/// Divisor: up to an excess of 1/8 of the budget, a worker leaves eviction to a worker with a bigger client.
const EXCESS_DIVISOR: usize = 8;

/// Divisor: a client below 1/4 of another worker's biggest is small. It is only evicted before that one if the other
/// worker is very late.
const SMALL_DIVISOR: u64 = 4;

/// Maximum wait for other workers to release memory before a client of last resort is evicted, microseconds.
const NOTIFIED_WAIT_US: u64 = 500_000;

/// Age after which the other workers must be notified again, microseconds.
const NOTIFIED_STALE_US: u64 = 1_000_000;

/// State of the memory checks of a worker.
#[derive(Debug, Default)]
pub(super) struct MemoryWatch {
    /// Balance of the thread's account above which the next check is due, bytes.
    mark: i64,
    /// End of the pause after notifying another worker or finding no victim, us.
    rest_until_us: u64,
    /// Time of the last notification of all other workers, us, and the number of answers when all have answered. Sent
    /// if this worker has only clients of last resort.
    notified_all: Option<(u64, u64)>,
    cut_log: LogThrottle,
    short_log: LogThrottle,
}

/// Whether other workers have released memory before this one evicts a client of last resort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OtherWorkers {
    /// Not notified yet, or too long ago.
    NotNotified,
    /// Notified recently.
    Notified,
    /// All have answered, or the maximum wait has passed.
    Done,
}

impl MemoryWatch {
    /// `answers`: number of answers so far.
    fn others(&self, now_us: u64, answers: u64) -> OtherWorkers {
        match self.notified_all.map(|(asked_us, all)| (now_us.saturating_sub(asked_us), answers >= all)) {
            Some((ago_us, _)) if ago_us >= NOTIFIED_STALE_US => OtherWorkers::NotNotified,
            Some((ago_us, all_answered)) if all_answered || ago_us >= NOTIFIED_WAIT_US => OtherWorkers::Done,
            Some(_) => OtherWorkers::Notified,
            None => OtherWorkers::NotNotified,
        }
    }
}

/// Kind of holder of memory that can be released.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Holder {
    Client,
    /// A connection to a node, with a reply without a waiting client.
    Link,
    /// Record of the keys read by clients with CLIENT TRACKING: all are invalidated.
    Reads,
}

/// Order of victims before their size. The last rank is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Rank {
    /// CLIENT NO-EVICT.
    NoEvict,
    Ordinary,
    /// Without a login.
    Unauthenticated,
}

/// Memory use of a holder.
#[derive(Clone, Copy, Debug)]
struct Holding {
    rank: Rank,
    bytes: usize,
    /// Part of `bytes` that stays until nodes have replied.
    kept: usize,
    holder: Holder,
    handle: Handle,
}

impl Worker {
    /// Checks the budget if the worker has grown enough. Call it only while no client or connection is borrowed.
    #[inline]
    pub(super) fn check_memory_after_growth(&mut self) {
        if memory::thread_balance() > self.memory.mark {
            let (used, budget) = self.memory.used_and_budget(&self.cx.turn);
            if used > budget && (used > tolerated_use(budget) || self.cx.turn.now_us() >= self.memory.rest_until_us) {
                self.evict(budget);
            }
        }
    }

    /// Checks the budget at a tick.
    pub(super) fn check_memory_at_tick(&mut self) {
        let (used, budget) = self.memory.used_and_budget(&self.cx.turn);
        if used > budget && self.cx.turn.now_us() >= self.memory.rest_until_us {
            self.evict(budget);
        }
    }

    /// Handles the request of another worker to evict.
    pub(super) fn on_evict_request(&mut self) {
        let (used, budget) = self.memory.used_and_budget(&self.cx.turn);
        if used > budget {
            self.evict(budget);
        }
        self.cx.turn.counters().memory_answers.add(1);
    }

    /// Publishes the size of the biggest client for other workers, and shrinks buffers after a burst. Called at client
    /// ticks.
    pub(super) fn tick_memory(&mut self) {
        // `memory_leaving` lowers the computed usage, so it must be updated even if that is low.
        let near = memory_in_use(&self.cx.turn) > self.cx.turn.routing().live.memory_max / 2
            || self.cx.turn.counters().memory_leaving.get() > 0;
        let holdings = if near {
            holdings(&self.cx.turn, &self.cx.up, &mut self.cx.down, &mut self.gathers, &mut self.tracking)
        } else {
            Vec::new()
        };
        publish_biggest(&self.cx.turn, &holdings);
        if self.cx.hooks.keys.capacity() * size_of::<u32>() > REUSED_MAX {
            self.cx.hooks.keys = Vec::new();
        }
        for buffer in [self.pubsub.reused(), self.monitors.reused()] {
            if buffer.capacity() > REUSED_MAX {
                *buffer = Vec::new();
            }
        }
    }

    #[cold]
    fn evict(&mut self, budget: usize) {
        self.cx.hooks.clear(&self.cx.turn);
        let mut holdings =
            holdings(&self.cx.turn, &self.cx.up, &mut self.cx.down, &mut self.gathers, &mut self.tracking);
        publish_biggest(&self.cx.turn, &holdings);
        let shared = self.cx.turn.shared().clone();
        // One worker at a time, so that not more is freed than necessary.
        let _turn = lock(&shared.evicting);
        loop {
            let used = memory_in_use(&self.cx.turn);
            if used <= budget {
                self.memory.notified_all = None;
                break;
            }
            let elsewhere = shared.counters.iter().enumerate().filter(|(worker, _)| *worker != self.cx.turn.index());
            let elsewhere = elsewhere.map(|(worker, counters)| (counters.memory_biggest.get(), worker)).max();
            let own = biggest(&holdings);
            if let Some((bytes, worker)) = elsewhere
                && leaves_it_to(bytes, own, used, budget)
            {
                shared.mailboxes.send(worker, Message::Evict);
                self.memory.rest_until_us = self.cx.turn.now_us() + TICK.as_micros() as u64;
                break;
            }
            if holdings.last().is_some_and(|holding| holding.rank == Rank::NoEvict) && shared.counters.len() > 1 {
                let others = || (0..shared.counters.len()).filter(|worker| *worker != self.cx.turn.index());
                let answers: u64 = others().map(|worker| shared.counters[worker].memory_answers.get()).sum();
                let standing = self.memory.others(self.cx.turn.now_us(), answers);
                if standing == OtherWorkers::NotNotified {
                    self.memory.notified_all = Some((self.cx.turn.now_us(), answers + others().count() as u64));
                    others().for_each(|worker| shared.mailboxes.send(worker, Message::Evict));
                }
                if standing != OtherWorkers::Done {
                    self.memory.rest_until_us = self.cx.turn.now_us() + TICK.as_micros() as u64;
                    break;
                }
            }
            let Some(holding) = holdings.pop() else {
                if let Some(suppressed) = self.memory.short_log.allow(self.cx.turn.now_us()) {
                    error!(
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "memory use exceeds memory-max, and no client uses much of it: raise memory-max, or reduce the load"
                    );
                }
                self.memory.rest_until_us = self.cx.turn.now_us() + RETRY_US;
                break;
            };
            self.release_holding(holding, used, budget);
            publish_biggest(&self.cx.turn, &holdings);
        }
        self.memory.mark = memory::thread_balance() + STEP;
    }

    fn release_holding(&mut self, holding: Holding, used: usize, budget: usize) {
        let Holding { rank, bytes, kept, holder, handle } = holding;
        match holder {
            Holder::Client => {
                let Some(client) = self.cx.down.get(handle) else { return };
                let id = client.identity().id();
                self.cx.turn.counters().evicted.add(1);
                if let Some(suppressed) = self.memory.cut_log.allow(self.cx.turn.now_us()) {
                    warn!(
                        client = id,
                        stranger = rank == Rank::Unauthenticated,
                        bytes,
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "disconnecting the client that uses the most memory (memory-max)"
                    );
                }
                self.cx.down.close_client(&self.cx.turn, handle);
                self.cx.turn.counters().memory_leaving.add(kept as u64);
                self.drop_replies_of(handle);
            }
            Holder::Link => {
                self.cx.up.break_link(&self.cx.turn, handle, "its reply needs more memory than memory-max leaves")
            }
            Holder::Reads => {
                if let Some(suppressed) = self.memory.cut_log.allow(self.cx.turn.now_us()) {
                    warn!(
                        bytes,
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "clients with CLIENT TRACKING get an invalidation of all keys (memory-max)"
                    );
                }
                self.tracking.forget_tracked_reads(&self.cx.turn, &mut self.cx.down);
            }
        }
        // A closed client holds its memory until then.
        self.settle_events();
    }

    /// Drops data collected for a disconnected client: parts of gathers become errors, and partial replies are
    /// discarded.
    fn drop_replies_of(&mut self, client: Handle) {
        for (_, gather) in self.gathers.iter_mut().filter(|(_, gather)| gather.client() == client) {
            gather.drop_parts();
        }
        let collecting: Vec<Handle> = self
            .cx
            .up
            .links()
            .iter()
            .filter(|(_, link)| link.incoming().is_collecting() && link.incoming().memory() >= VICTIM_MIN)
            .filter(|(_, link)| self.gathers.head_owner(link) == Some(client))
            .map(|(handle, _)| handle)
            .collect();
        for handle in collecting {
            self.read_again(handle);
        }
    }
}

/// Returns the usage up to which a worker leaves eviction to a worker with a bigger client.
fn tolerated_use(budget: usize) -> usize {
    budget.saturating_add(budget / EXCESS_DIVISOR)
}

/// Whether a worker waits for another worker to evict its bigger client. The other worker may be busy with one event,
/// or have no CPU. Evicting a small client in the meantime would free too little.
fn leaves_it_to(elsewhere: u64, own: u64, used: usize, budget: usize) -> bool {
    let is_small = own < elsewhere / SMALL_DIVISOR;
    elsewhere > own
        && (own == 0 || used <= tolerated_use(budget) || is_small && used <= budget.saturating_add(budget / 2))
}

/// Returns the size of the first victim, for comparison with other workers. Any client without a login ranks above all
/// others. 0 if only clients of last resort remain.
fn biggest(holdings: &[Holding]) -> u64 {
    const STRANGER: u64 = 1 << 48;
    holdings.last().map_or(0, |h| match h.rank {
        Rank::NoEvict => 0,
        Rank::Ordinary => h.bytes as u64,
        Rank::Unauthenticated => h.bytes as u64 + STRANGER,
    })
}

/// Used bytes, without requests of disconnected clients.
fn memory_in_use(turn: &Turn) -> usize {
    let leaving: u64 = turn.shared().counters.iter().map(|w| w.memory_leaving.get()).sum();
    memory::heap_used().saturating_sub(leaving as usize)
}

fn publish_biggest(turn: &Turn, holdings: &[Holding]) {
    turn.counters().memory_biggest.set(biggest(holdings));
}

impl MemoryWatch {
    /// Returns the used bytes and the budget. Sets the balance for the next check.
    fn used_and_budget(&mut self, turn: &Turn) -> (usize, usize) {
        let budget = turn.routing().live.memory_max;
        let used = memory_in_use(turn);
        if used <= budget {
            // Forget the answers: they were for an earlier excess.
            self.notified_all = None;
        }
        // All workers together cannot use up the remaining budget before one of them checks again.
        let share = budget.saturating_sub(used) / (4 * turn.shared().counters.len());
        self.mark = memory::thread_balance() + STEP.max(i64::try_from(share).unwrap_or(i64::MAX / 2));
        (used, budget)
    }
}

impl Gathers {
    /// Returns the client that waits for the reply to a command on a connection.
    fn owner_of(&self, pending: &Pending) -> Option<Handle> {
        match pending.purpose {
            Purpose::Client
            | Purpose::ClientHealed
            | Purpose::Exec
            | Purpose::ExecWithoutMulti
            | Purpose::Watch
            | Purpose::Wait
            | Purpose::Sync => Some(pending.who),
            Purpose::Gather => self.get(pending.who).map(|gather| gather.client()),
            _ => None,
        }
    }

    /// Returns the clients that wait for the replies to these pending commands, newest command first: commands of a
    /// transaction and inserted ones (SELECT) belong to the client of the command after them.
    pub(super) fn owners<'a>(
        &'a self,
        pending: impl DoubleEndedIterator<Item = &'a Pending>,
    ) -> impl Iterator<Item = (Option<Handle>, &'a Pending)> {
        let mut owner = None;
        pending.rev().map(move |pending| {
            if !matches!(pending.purpose, Purpose::Queued | Purpose::Discarded) || pending.who != Handle::NONE {
                owner = self.owner_of(pending);
            }
            (owner, pending)
        })
    }

    fn head_owner(&self, link: &Link) -> Option<Handle> {
        link.head().and_then(|pending| self.owner_of(pending))
    }

    /// Whether a client still waits for the reply at the head of a connection.
    pub(super) fn is_awaited(&self, down: &Downstreams, pending: &Pending) -> bool {
        self.owner_of(pending).is_some_and(|owner| down.get(owner).is_some())
    }
}

/// Returns all holders with their memory, first victim last. Also updates the bytes kept for disconnected clients.
fn holdings(
    turn: &Turn,
    up: &Upstreams,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    tracking: &mut Tracking,
) -> Vec<Holding> {
    let mut clients: HashMap<Handle, (usize, usize)> = down.iter().map(|(h, c)| (h, (c.memory(), 0))).collect();
    for (_, gather) in gathers.iter() {
        if let Some((bytes, _)) = clients.get_mut(&gather.client()) {
            *bytes += gather.memory();
        }
    }
    let mut holdings = Vec::new();
    let mut leaving = 0;
    for (handle, link) in up.links().iter() {
        for (owner, pending) in gathers.owners(link.requests().pending()).filter(|_| !link.lane().is_exclusive()) {
            match owner.and_then(|owner| clients.get_mut(&owner)) {
                Some((bytes, kept)) => {
                    *bytes += pending.len as usize;
                    *kept += pending.len as usize;
                }
                None => leaving += pending.len as usize,
            }
        }
        let unsent = if link.lane().is_exclusive() { link.requests().memory() } else { 0 };
        let owner = if link.lane().is_exclusive() { Some(link.holder()) } else { gathers.head_owner(link) };
        let bytes = link.incoming().memory() + unsent;
        match owner.and_then(|owner| clients.get_mut(&owner)) {
            Some((sum, _)) => *sum += bytes,
            None if link.incoming().len() >= UNAWAITED_MIN => {
                holdings.push(Holding { rank: Rank::Ordinary, bytes, kept: 0, holder: Holder::Link, handle });
            }
            None => {}
        }
    }
    turn.counters().memory_leaving.set(leaving as u64);
    holdings.push(Holding {
        rank: Rank::Ordinary,
        bytes: tracking.memory(),
        kept: 0,
        holder: Holder::Reads,
        handle: Handle::NONE,
    });
    let rank = |handle| match down.get(handle) {
        Some(client) if !client.identity().is_authenticated() => Rank::Unauthenticated,
        Some(client) if client.identity().is_kept() => Rank::NoEvict,
        _ => Rank::Ordinary,
    };
    let of_clients = clients.into_iter().map(|(handle, (bytes, kept))| Holding {
        rank: rank(handle),
        bytes,
        kept,
        holder: Holder::Client,
        handle,
    });
    holdings.extend(of_clients);
    holdings.retain(|h| h.bytes >= VICTIM_MIN);
    holdings.sort_unstable_by_key(|h| (h.rank, h.bytes, h.holder, h.handle.index));
    holdings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_clients_are_not_evicted_before_bigger_ones_elsewhere() {
        let mb = |count: u64| count << 20;
        let leaves = |elsewhere, own, used| leaves_it_to(mb(elsewhere), mb(own), (used as usize) << 20, 128 << 20);
        assert!(leaves(60, 50, 130) && !leaves(60, 50, 150), "waits for a bigger client while the excess is small");
        assert!(leaves(60, 4, 150) && leaves(60, 4, 190), "waits longer if the own client is small");
        assert!(!leaves(60, 4, 200) && !leaves(50, 60, 130), "neither indefinitely, nor for a smaller client");
        assert!(leaves(60, 0, 1000), "no client to evict here");
    }

    #[test]
    fn other_workers_are_notified_again_after_a_while() {
        let mut watch = MemoryWatch::default();
        assert_eq!(watch.others(5, 7), OtherWorkers::NotNotified);
        watch.notified_all = Some((5, 9));
        assert_eq!(watch.others(5, 8), OtherWorkers::Notified);
        assert_eq!(watch.others(5, 9), OtherWorkers::Done, "all have answered");
        assert_eq!(watch.others(4 + NOTIFIED_WAIT_US, 8), OtherWorkers::Notified);
        assert_eq!(watch.others(5 + NOTIFIED_WAIT_US, 8), OtherWorkers::Done, "one worker is too busy");
        assert_eq!(watch.others(5 + NOTIFIED_STALE_US, 9), OtherWorkers::NotNotified);
    }
}
