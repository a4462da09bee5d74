//! The budget of memory of the process (`memory-max`): beyond it clients are cut, those that take the most first.
//!
//! How much is in use the allocator counts ([`crate::memory`]), so nothing is forgotten. Who takes it is found out only
//! when it is too much: a worker walks over its clients, what their commands hold at connections and gathers, and what
//! nodes send that is nobody's.
//!
//! - **When it is looked at**: at every tick, and after each event in which the worker grew by its share of what is
//!   left ([`STEP`] at least). One event reads at most 128 KiB from one socket. So the workers together exceed the
//!   budget by [`STEP`] each, and by what one event makes of a reply or request that is already in memory: a copy of
//!   it, or its buffer twice while that grows. All buffers together are within the budget before, so what is used never
//!   exceeds twice the budget, and with many clients comes nowhere near it.
//! - **Who goes**: those who have not logged in before all others, or they could have applications cut. One worker at a
//!   time evicts, and stops as soon as the whole is below. Where another worker has a bigger client it is asked to, but
//!   not waited for: from [`PATIENCE`] of the budget on, each worker takes its own biggest; from half a budget more on
//!   also one that is small beside the other's. Before a client that is to go last (CLIENT NO-EVICT) all others are
//!   asked first: how much their clients take they say only now and then.
//! - **What stays**: requests kept until they are answered. What was sent may be executed, also if its client is gone;
//!   they end with the answer, and are not taken for an excess a second time.
//!
//! Not a bound for each client: whoever needs much may have it while there is enough.

use std::collections::HashMap;

use tracing::{error, warn};

use super::hot_copies::clear;
use super::log_throttle::LogThrottle;
use super::upstream::{Body, Link, Pending, Purpose};
use super::{TICK, Worker};
use crate::memory;
use crate::shared::{Message, lock};
use crate::slab::Handle;

/// Growth of a worker that is looked at, where there is not much left.
const STEP: i64 = 1 << 20;

/// Who takes less is not cut: that would cost many clients and gain little.
const TAKES_MIN: usize = 16 << 10;

/// A connection is not given up for less than this of a reply that no client waits for.
const NOBODYS_MIN: usize = 1 << 20;

/// Buffers that are reused are given back above this.
const REUSED_MAX: usize = 1 << 20;

/// A worker that found nobody to cut looks again after so long.
const REST_US: u64 = 200_000;

/// Part of the budget beyond it from which on a worker does not leave it to another one to cut its bigger client.
const PATIENCE: usize = 8;

/// A client with less than this part of the biggest one is small: it is cut in its place only where that one's worker
/// is very late.
const SMALL: u64 = 4;

/// How long others may take to give up what goes before a client that goes last, where one of them is busy.
const OTHERS_US: u64 = 500_000;

/// What they have answered says nothing any more after so long.
const OTHERS_STALE_US: u64 = 1_000_000;

/// When the worker looks again.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// At this size of its account.
    mark: i64,
    /// Not before, where it has asked another worker or found nobody, us.
    rest_until_us: u64,
    /// When all others were asked last, because this worker has only clients that go last, us; and how many answers
    /// there are once all have answered.
    queried_all: Option<(u64, u64)>,
    cut_log: LogThrottle,
    short_log: LogThrottle,
}

/// Whether other workers have given up what goes before a client that is to go last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Others {
    /// That has to be asked.
    Unqueried,
    /// They were asked just now.
    Queried,
    /// They have had their time.
    Done,
}

impl Watch {
    /// `answers`: how many there are by now.
    fn others(&self, now_us: u64, answers: u64) -> Others {
        match self.queried_all.map(|(asked_us, all)| (now_us.saturating_sub(asked_us), answers >= all)) {
            Some((ago_us, _)) if ago_us >= OTHERS_STALE_US => Others::Unqueried,
            Some((ago_us, all_answered)) if all_answered || ago_us >= OTHERS_US => Others::Done,
            Some(_) => Others::Queried,
            None => Others::Unqueried,
        }
    }
}

/// Something that can be given up to get memory back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Holder {
    Client,
    /// A connection to a node, with a reply on it that no client waits for.
    Link,
    /// What clients with CLIENT TRACKING have read: they are told to forget everything.
    Reads,
}

/// Who goes before whom, whatever they take; the last goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Rank {
    /// CLIENT NO-EVICT.
    Spared,
    Ordinary,
    /// It has not logged in.
    Stranger,
}

/// What it takes.
#[derive(Clone, Copy, Debug)]
struct Holding {
    rank: Rank,
    bytes: usize,
    /// Of these, what stays until nodes have answered.
    kept: usize,
    holder: Holder,
    handle: Handle,
}

impl Worker {
    /// Looks at the budget if the worker has grown by much. To be called where no client and no connection is in
    /// anybody's hands.
    #[inline]
    pub(super) fn watch_memory(&mut self) {
        if memory::own() > self.memory.mark {
            let (used, budget) = self.weigh();
            if used > budget && (used > patience(budget) || self.now_us >= self.memory.rest_until_us) {
                self.evict(budget);
            }
        }
    }

    /// Looks at the budget at a tick.
    pub(super) fn look_at_memory(&mut self) {
        let (used, budget) = self.weigh();
        if used > budget && self.now_us >= self.memory.rest_until_us {
            self.evict(budget);
        }
    }

    /// Another worker says that the biggest client is here.
    pub(super) fn on_evict_request(&mut self) {
        let (used, budget) = self.weigh();
        if used > budget {
            self.evict(budget);
        }
        self.counters.memory_answers.add(1);
    }

    /// Bytes in use, and how many may be. Also sets the mark.
    fn weigh(&mut self) -> (usize, usize) {
        let budget = self.plan.live.memory_max;
        let used = self.memory_in_use();
        if used <= budget {
            // What others have answered was for this time.
            self.memory.queried_all = None;
        }
        // All workers together cannot grow by more than what is left before one of them looks again.
        let share = budget.saturating_sub(used) / (4 * self.shared.counters.len());
        self.memory.mark = memory::own() + STEP.max(i64::try_from(share).unwrap_or(i64::MAX / 2));
        (used, budget)
    }

    /// At a tick for clients: says who takes the most here, so that another worker knows whom to ask, and gives back
    /// what a burst has left.
    pub(super) fn tick_memory(&mut self) {
        // What is taken off for those who have gone must be found out anew, also where it makes that little is in use.
        let near = self.memory_in_use() > self.plan.live.memory_max / 2 || self.counters.memory_leaving.get() > 0;
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

    /// Bytes in use, without those of requests whose clients were cut already.
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
        // One at a time: what another worker frees meanwhile need not be freed here.
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
                if let Some(untold) = self.memory.short_log.allow(self.now_us) {
                    error!(
                        used,
                        budget,
                        untold = untold.count(),
                        "more memory is in use than memory-max allows, and no client takes much of it: raise it, or give the process less to do"
                    );
                }
                self.memory.rest_until_us = self.now_us + REST_US;
                break;
            };
            self.give_up(holding, used, budget);
            self.log_largest_holders(&holdings);
        }
        self.memory.mark = memory::own() + STEP;
    }

    fn give_up(&mut self, holding: Holding, used: usize, budget: usize) {
        let Holding { rank, bytes, kept, holder, handle } = holding;
        match holder {
            Holder::Client => {
                let Some(client) = self.clients.get(handle) else { return };
                let id = client.details.id;
                self.counters.evicted.add(1);
                if let Some(untold) = self.memory.cut_log.allow(self.now_us) {
                    warn!(
                        client = id,
                        stranger = rank == Rank::Stranger,
                        bytes,
                        used,
                        budget,
                        untold = untold.count(),
                        "cutting the client that takes the most memory (memory-max)"
                    );
                }
                self.close_client(handle);
                self.counters.memory_leaving.add(kept as u64);
                self.drop_replies_of(handle);
            }
            Holder::Link => self.break_link(handle, "what it sends takes more memory than memory-max leaves"),
            Holder::Reads => {
                if let Some(untold) = self.memory.cut_log.allow(self.now_us) {
                    warn!(
                        bytes,
                        used,
                        budget,
                        untold = untold.count(),
                        "clients with CLIENT TRACKING are told to forget what they have read (memory-max)"
                    );
                }
                self.forget_tracked_reads();
            }
        }
    }

    /// Who takes how much, whoever goes first last. Also finds out anew what is kept for clients that have gone.
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
                // What a transaction or a part sends before its last command belongs to that one's client.
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

    /// The client that waits for the reply to a command on a connection.
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

    /// Whether somebody still waits for the reply at the head of a connection.
    pub(super) fn is_awaited(&self, pending: &Pending) -> bool {
        self.owner_of(pending).is_some_and(|owner| self.clients.get(owner).is_some())
    }

    /// What was collected for a client that has gone: parts of gathers become errors, and what has come of a reply is
    /// thrown away.
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

/// Up to this a worker leaves it to another one to cut its bigger client.
fn patience(budget: usize) -> usize {
    budget.saturating_add(budget / PATIENCE)
}

/// Whether a worker waits until another one has cut its bigger client. That one may be in the middle of one event, or
/// have no processor just now. To cut somebody small meanwhile frees too little, and it is not their turn.
fn leaves_it_to(elsewhere: u64, own: u64, used: usize, budget: usize) -> bool {
    let is_small = own < elsewhere / SMALL;
    elsewhere > own && (own == 0 || used <= patience(budget) || is_small && used <= budget.saturating_add(budget / 2))
}

/// How big the one is that goes first, to compare it with those of other workers: a stranger is bigger than whoever has
/// logged in. 0 for who is spared.
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
        assert!(leaves(60, 50, 130) && !leaves(60, 50, 150), "a bigger one is waited for a little");
        assert!(leaves(60, 4, 150) && leaves(60, 4, 190), "and longer where little is here");
        assert!(!leaves(60, 4, 200) && !leaves(50, 60, 130), "not for ever, and not for a smaller one");
        assert!(leaves(60, 0, 1000), "there is nobody here");
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
