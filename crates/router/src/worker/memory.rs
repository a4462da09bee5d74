//! Memory budget of the process (`memory-max`): above it, clients are disconnected, biggest first.
//!
//! The allocator counts the used memory ([`crate::memory`]), so nothing is missed. The users of memory are only
//! determined above the budget: a worker sums up its clients, their commands at connections and gathers, and replies of
//! nodes without a waiting client.
//!
//! - **Checks**: at every tick, and after each event in which the worker has grown by its share of the remaining budget
//!   ([`STEP`] at least). One event reads at most 128 KiB from one socket. So the workers together exceed the budget by
//!   [`STEP`] each, and by the effect of one event on a buffered reply or request: a copy of it, or twice its buffer
//!   while that grows. All buffers together are within the budget before, so the used memory never exceeds twice the
//!   budget, and with many clients stays far below that.
//! - **Victims**: clients without a login first, because otherwise they could displace applications. One worker at a
//!   time evicts, and stops when the total is below the budget. If another worker has a bigger client, that worker is
//!   notified without waiting for it: above [`PATIENCE`] of the budget, each worker evicts its own biggest client;
//!   above one and a half budgets, also if it is small compared with the other one. Before a client of last resort
//!   (CLIENT NO-EVICT), all other workers are notified first, because they publish the sizes of their clients only
//!   periodically.
//! - **Exempt**: requests kept until they are answered. They may be executed even if their client is gone; they end
//!   with the reply, and are not counted as an excess again.
//!
//! There is no limit per client: a client may use much while there is enough.

use std::collections::HashMap;

use tracing::{error, warn};

use super::hot_copies::clear;
use super::log_throttle::LogThrottle;
use super::upstream::{Body, Link, Pending, Purpose};
use super::{TICK, Worker};
use crate::memory;
use crate::shared::{Message, lock};
use crate::slab::Handle;

/// Minimum growth of a worker before a check.
const STEP: i64 = 1 << 20;

/// Minimum size of a victim. Smaller ones would cost many clients and free little.
const TAKES_MIN: usize = 16 << 10;

/// Minimum size of an unwanted partial reply to close its connection.
const NOBODYS_MIN: usize = 1 << 20;

/// Maximum capacity of reused buffers.
const REUSED_MAX: usize = 1 << 20;

/// Delay of the next attempt of a worker that has found no victim, microseconds.
const REST_US: u64 = 200_000;

/// Fraction of the budget (1/8) above it, up to which a worker leaves eviction to a worker with a bigger client.
const PATIENCE: usize = 8;

/// A client below this fraction (1/4) of the biggest one is small: it is only evicted in its place if the other worker
/// is very late.
const SMALL: u64 = 4;

/// Maximum wait for busy workers to release other memory before a client of last resort is evicted, microseconds.
const OTHERS_US: u64 = 500_000;

/// Maximum age of these answers, microseconds.
const OTHERS_STALE_US: u64 = 1_000_000;

/// Time of the next check.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Balance of the worker's account for the next check.
    mark: i64,
    /// Not before this time, after notifying another worker or finding no victim, us.
    rest_until_us: u64,
    /// Time of the last notification of all workers, because this worker has only clients of last resort, us; and the
    /// number of answers when all have answered.
    queried_all: Option<(u64, u64)>,
    cut_log: LogThrottle,
    short_log: LogThrottle,
}

/// Whether other workers have released their memory before a client of last resort.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Others {
    /// Not notified yet.
    Unqueried,
    /// Notified recently.
    Queried,
    /// Answered, or out of time.
    Done,
}

impl Watch {
    /// `answers`: number of answers so far.
    fn others(&self, now_us: u64, answers: u64) -> Others {
        match self.queried_all.map(|(asked_us, all)| (now_us.saturating_sub(asked_us), answers >= all)) {
            Some((ago_us, _)) if ago_us >= OTHERS_STALE_US => Others::Unqueried,
            Some((ago_us, all_answered)) if all_answered || ago_us >= OTHERS_US => Others::Done,
            Some(_) => Others::Queried,
            None => Others::Unqueried,
        }
    }
}

/// Something that can be released.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Holder {
    Client,
    /// A connection to a node, with a reply without a waiting client.
    Link,
    /// Keys read by clients with CLIENT TRACKING: all are invalidated.
    Reads,
}

/// Order of victims regardless of size. The last is evicted first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Rank {
    /// CLIENT NO-EVICT.
    Spared,
    Ordinary,
    /// Without a login.
    Stranger,
}

/// Memory use of a holder.
#[derive(Clone, Copy, Debug)]
struct Holding {
    rank: Rank,
    bytes: usize,
    /// Part of it that stays until nodes have replied.
    kept: usize,
    holder: Holder,
    handle: Handle,
}

impl Worker {
    /// Checks the budget if the worker has grown by much. Call it only while no client or connection is borrowed.
    #[inline]
    pub(super) fn watch_memory(&mut self) {
        if memory::thread_balance() > self.memory.mark {
            let (used, budget) = self.weigh();
            if used > budget && (used > patience(budget) || self.now_us >= self.memory.rest_until_us) {
                self.evict(budget);
            }
        }
    }

    /// Checks the budget at a tick.
    pub(super) fn look_at_memory(&mut self) {
        let (used, budget) = self.weigh();
        if used > budget && self.now_us >= self.memory.rest_until_us {
            self.evict(budget);
        }
    }

    /// Handles the message of another worker that the biggest client is here.
    pub(super) fn on_evict_request(&mut self) {
        let (used, budget) = self.weigh();
        if used > budget {
            self.evict(budget);
        }
        self.counters.memory_answers.add(1);
    }

    /// Returns the used bytes and the budget. Sets the balance for the next check.
    fn weigh(&mut self) -> (usize, usize) {
        let budget = self.routing.live.memory_max;
        let used = self.memory_in_use();
        if used <= budget {
            // Answers of other workers were for the last excess.
            self.memory.queried_all = None;
        }
        // All workers together cannot use up the remaining budget before one of them checks again.
        let share = budget.saturating_sub(used) / (4 * self.shared.counters.len());
        self.memory.mark = memory::thread_balance() + STEP.max(i64::try_from(share).unwrap_or(i64::MAX / 2));
        (used, budget)
    }

    /// At a client tick: publishes the size of the biggest client for other workers, and shrinks buffers after a burst.
    pub(super) fn tick_memory(&mut self) {
        // Bytes subtracted for disconnected clients must be updated, also if they make the usage appear low.
        let near = self.memory_in_use() > self.routing.live.memory_max / 2 || self.counters.memory_leaving.get() > 0;
        let holdings = if near { self.holdings() } else { Vec::new() };
        self.log_largest_holders(&holdings);
        if self.keys.capacity() * size_of::<u32>() > REUSED_MAX {
            self.keys = Vec::new();
        }
        for buffer in [self.pubsub.reused(), self.monitors.reused()] {
            if buffer.capacity() > REUSED_MAX {
                *buffer = Vec::new();
            }
        }
    }

    /// Used bytes without requests of evicted clients.
    fn memory_in_use(&self) -> usize {
        let leaving: u64 = self.shared.counters.iter().map(|w| w.memory_leaving.get()).sum();
        memory::heap_used().saturating_sub(leaving as usize)
    }

    fn log_largest_holders(&self, holdings: &[Holding]) {
        self.counters.memory_biggest.set(biggest(holdings));
    }

    #[cold]
    fn evict(&mut self, budget: usize) {
        clear(self);
        let mut holdings = self.holdings();
        self.log_largest_holders(&holdings);
        let shared = self.shared.clone();
        // One worker at a time, so that not more is freed than necessary.
        let _turn = lock(&shared.evicting);
        loop {
            let used = self.memory_in_use();
            if used <= budget {
                self.memory.queried_all = None;
                break;
            }
            let elsewhere = shared.counters.iter().enumerate().filter(|(worker, _)| *worker != self.index);
            let elsewhere = elsewhere.map(|(worker, counters)| (counters.memory_biggest.get(), worker)).max();
            let own = biggest(&holdings);
            if let Some((bytes, worker)) = elsewhere
                && leaves_it_to(bytes, own, used, budget)
            {
                shared.mailboxes.send(worker, Message::Evict);
                self.memory.rest_until_us = self.now_us + TICK.as_micros() as u64;
                break;
            }
            if holdings.last().is_some_and(|holding| holding.rank == Rank::Spared) && shared.counters.len() > 1 {
                let others = || (0..shared.counters.len()).filter(|worker| *worker != self.index);
                let answers: u64 = others().map(|worker| shared.counters[worker].memory_answers.get()).sum();
                let standing = self.memory.others(self.now_us, answers);
                if standing == Others::Unqueried {
                    self.memory.queried_all = Some((self.now_us, answers + others().count() as u64));
                    others().for_each(|worker| shared.mailboxes.send(worker, Message::Evict));
                }
                if standing != Others::Done {
                    self.memory.rest_until_us = self.now_us + TICK.as_micros() as u64;
                    break;
                }
            }
            let Some(holding) = holdings.pop() else {
                if let Some(suppressed) = self.memory.short_log.allow(self.now_us) {
                    error!(
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "memory use exceeds memory-max, and no client uses much of it: raise memory-max, or reduce the load"
                    );
                }
                self.memory.rest_until_us = self.now_us + REST_US;
                break;
            };
            self.give_up(holding, used, budget);
            self.log_largest_holders(&holdings);
        }
        self.memory.mark = memory::thread_balance() + STEP;
    }

    fn give_up(&mut self, holding: Holding, used: usize, budget: usize) {
        let Holding { rank, bytes, kept, holder, handle } = holding;
        match holder {
            Holder::Client => {
                let Some(client) = self.clients.get(handle) else { return };
                let id = client.details.id;
                self.counters.evicted.add(1);
                if let Some(suppressed) = self.memory.cut_log.allow(self.now_us) {
                    warn!(
                        client = id,
                        stranger = rank == Rank::Stranger,
                        bytes,
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "disconnecting the client that uses the most memory (memory-max)"
                    );
                }
                self.close_client(handle);
                self.counters.memory_leaving.add(kept as u64);
                self.drop_replies_of(handle);
            }
            Holder::Link => self.break_link(handle, "what it sends takes more memory than memory-max leaves"),
            Holder::Reads => {
                if let Some(suppressed) = self.memory.cut_log.allow(self.now_us) {
                    warn!(
                        bytes,
                        used,
                        budget,
                        suppressed = suppressed.count(),
                        "clients with CLIENT TRACKING get an invalidation of all keys (memory-max)"
                    );
                }
                self.forget_tracked_reads();
            }
        }
    }

    /// Returns all holders with their memory, first victim last. Also updates the bytes kept for disconnected clients.
    fn holdings(&mut self) -> Vec<Holding> {
        let mut clients: HashMap<Handle, (usize, usize)> =
            self.clients.iter().map(|(h, c)| (h, (c.memory(), 0))).collect();
        for (_, gather) in self.gathers.iter() {
            if let Some((bytes, _)) = clients.get_mut(&gather.client()) {
                *bytes += gather.memory();
            }
        }
        let mut holdings = Vec::new();
        let mut leaving = 0;
        for (handle, link) in self.links.iter() {
            let mut owner = None;
            for pending in link.pending().rev() {
                // Commands of a transaction or part before its last command belong to the client of the last one.
                if !matches!(pending.purpose, Purpose::Queued | Purpose::Discarded) || pending.who != Handle::NONE {
                    owner = self.owner_of(pending);
                }
                if link.lane.is_exclusive() {
                    continue;
                }
                match owner.and_then(|owner| clients.get_mut(&owner)) {
                    Some((bytes, kept)) => {
                        *bytes += pending.len as usize;
                        *kept += pending.len as usize;
                    }
                    None => leaving += pending.len as usize,
                }
            }
            let unsent = if link.lane.is_exclusive() { link.request_memory() } else { 0 };
            let owner = if link.lane.is_exclusive() { Some(link.holder()) } else { self.head_owner(link) };
            let bytes = link.input.capacity() + unsent;
            match owner.and_then(|owner| clients.get_mut(&owner)) {
                Some((sum, _)) => *sum += bytes,
                None if link.input.len() >= NOBODYS_MIN => {
                    holdings.push(Holding { rank: Rank::Ordinary, bytes, kept: 0, holder: Holder::Link, handle });
                }
                None => {}
            }
        }
        self.counters.memory_leaving.set(leaving as u64);
        holdings.push(Holding {
            rank: Rank::Ordinary,
            bytes: self.tracking.memory(),
            kept: 0,
            holder: Holder::Reads,
            handle: Handle::NONE,
        });
        let rank = |handle| match self.clients.get(handle) {
            Some(client) if !client.authenticated => Rank::Stranger,
            Some(client) if client.details.no_evict => Rank::Spared,
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
        holdings.retain(|h| h.bytes >= TAKES_MIN);
        holdings.sort_unstable_by_key(|h| (h.rank, h.bytes, h.holder, h.handle.index));
        holdings
    }

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
            Purpose::Gather => self.gathers.get(pending.who).map(|gather| gather.client()),
            _ => None,
        }
    }

    fn head_owner(&self, link: &Link) -> Option<Handle> {
        link.head().and_then(|pending| self.owner_of(pending))
    }

    /// Whether a client still waits for the reply at the head of a connection.
    pub(super) fn is_awaited(&self, pending: &Pending) -> bool {
        self.owner_of(pending).is_some_and(|owner| self.clients.get(owner).is_some())
    }

    /// Drops data collected for a disconnected client: parts of gathers become errors, and partial replies are
    /// discarded.
    fn drop_replies_of(&mut self, client: Handle) {
        for (_, gather) in self.gathers.iter_mut().filter(|(_, gather)| gather.client() == client) {
            gather.drop_parts();
        }
        let collecting: Vec<Handle> = self
            .links
            .iter()
            .filter(|(_, link)| matches!(link.body, Body::Whole(_)) && link.input.capacity() >= TAKES_MIN)
            .filter(|(_, link)| self.head_owner(link) == Some(client))
            .map(|(handle, _)| handle)
            .collect();
        for handle in collecting {
            self.read_again(handle);
        }
    }
}

/// Returns the usage up to which a worker leaves eviction to a worker with a bigger client.
fn patience(budget: usize) -> usize {
    budget.saturating_add(budget / PATIENCE)
}

/// Whether a worker waits for another worker to evict its bigger client. The other worker may be busy with one event,
/// or without a CPU. Evicting a small client in the meantime would free too little, out of order.
fn leaves_it_to(elsewhere: u64, own: u64, used: usize, budget: usize) -> bool {
    let is_small = own < elsewhere / SMALL;
    elsewhere > own && (own == 0 || used <= patience(budget) || is_small && used <= budget.saturating_add(budget / 2))
}

/// Returns the size of the first victim, for comparison with other workers. A client without a login ranks above all
/// others. 0 if only clients of last resort remain.
fn biggest(holdings: &[Holding]) -> u64 {
    const STRANGER: u64 = 1 << 48;
    holdings.last().map_or(0, |h| match h.rank {
        Rank::Spared => 0,
        Rank::Ordinary => h.bytes as u64,
        Rank::Stranger => h.bytes as u64 + STRANGER,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_client_is_not_cut_because_a_worker_is_late() {
        let mb = |count: u64| count << 20;
        let leaves = |elsewhere, own, used| leaves_it_to(mb(elsewhere), mb(own), (used as usize) << 20, 128 << 20);
        assert!(leaves(60, 50, 130) && !leaves(60, 50, 150), "it waits a little for a bigger one");
        assert!(leaves(60, 4, 150) && leaves(60, 4, 190), "and longer if little is here");
        assert!(!leaves(60, 4, 200) && !leaves(50, 60, 130), "not indefinitely, and not for a smaller one");
        assert!(leaves(60, 0, 1000), "no client is here");
    }

    #[test]
    fn before_a_client_that_goes_last_all_others_are_asked_each_time_anew() {
        let mut watch = Watch::default();
        assert_eq!(watch.others(5, 7), Others::Unqueried);
        watch.queried_all = Some((5, 9));
        assert_eq!(watch.others(5, 8), Others::Queried);
        assert_eq!(watch.others(5, 9), Others::Done, "all have answered");
        assert_eq!(watch.others(4 + OTHERS_US, 8), Others::Queried);
        assert_eq!(watch.others(5 + OTHERS_US, 8), Others::Done, "one is too busy");
        assert_eq!(watch.others(5 + OTHERS_STALE_US, 9), Others::Unqueried);
    }
}
