//! SLOWLOG of the router, in which every entry has the client that sent the command.
//!
//! SLOWLOG GET has exactly the six fields of Redis, because some clients count them. SWITCHYARD SLOWLOG adds the user,
//! the node, and the parts of the duration.

pub(super) mod entries;

use std::sync::TryLockError;

use switchyard_policy::limits::Rate;
use switchyard_resp::command::Local;
use switchyard_resp::encode;
use switchyard_resp::request::{Args, Limits, Scanner};
use tracing::info;

use super::command::parse;
use super::downstreams::Downstreams;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::turn::Turn;
use super::upstreams::Link;
use super::upstreams::kind::Checkout;
use super::upstreams::pending::{Pending, Purpose};
use crate::lane::Lane;
use crate::lock::lock;
use crate::slab::Handle;
use crate::slow_log::{SlowEntry, shorten_truncated, shortened};

/// Default count of SLOWLOG GET.
const SHOWN: usize = 10;

/// Maximum number of entries of a worker per second, and of a burst after a quiet second.
const PER_SECOND: Rate = Rate { per_second: 100 };

impl CommandHooks {
    /// Logs a slow command at the head of a shared connection, with its reply received.
    #[cold]
    pub(super) fn note_slow(&mut self, turn: &Turn, down: &Downstreams, gathers: &Gathers, link: &Link) {
        if !matches!(link.lane(), Lane::Main | Lane::Slow | Lane::Replica) {
            return;
        }
        let Some(pending) = link.head().copied() else { return };
        if !is_logged(pending.purpose) || !self.may_enter(turn) {
            return;
        }
        let took = (turn.now_us() as u32).wrapping_sub(pending.sent_us);
        let request = link.requests().head_request();
        let mut scanner = Scanner::default();
        if scanner.scan(request, &Limits::NONE).is_err() {
            return;
        }
        let mut args = scanner.args(request).iter().collect::<Vec<_>>();
        // Also rehearsals of transactions. The router's argument is not shown, because it may have the secret of the worker.
        if args.first().is_some_and(|name| name.to_ascii_uppercase().starts_with(b"EVAL")) {
            self.scripts_met.restore(&mut args);
        }
        let args = shortened(args.into_iter());
        self.enter(turn, down, gathers, link, pending, (took, args));
    }

    /// Logs an answered command on an exclusive connection if it was slow. Blocking at the node (BLPOP) does not count,
    /// as in Redis; waiting in line for a connection does.
    pub(super) fn note_slow_exclusive(
        &mut self,
        turn: &Turn,
        down: &Downstreams,
        gathers: &Gathers,
        link: &Link,
        pending: Pending,
    ) {
        if !self.slow.is_on() {
            return;
        }
        let mut took = (turn.now_us() as u32).wrapping_sub(pending.sent_us);
        if link.lane() == Lane::Blocking {
            let grace_us = turn.routing().live.command_timeout.as_micros() as u64;
            let asked_until_us = link.checkout().map_or(0, Checkout::waits_until_us).saturating_sub(grace_us);
            took = took.min(u32::try_from(turn.now_us().saturating_sub(asked_until_us)).unwrap_or(u32::MAX));
        }
        if !self.slow.is_slow(took.saturating_add(held_us(down, pending))) {
            return;
        }
        if !is_logged(pending.purpose) || !self.may_enter(turn) {
            return;
        }
        let args = match pending.purpose {
            Purpose::Exec | Purpose::ExecWithoutMulti => vec![b"EXEC".to_vec()],
            _ => shorten_truncated(link.checkout().map_or(&[], Checkout::command_start)),
        };
        self.enter(turn, down, gathers, link, pending, (took, args));
    }

    /// Adds an entry. `(took, args)`: time until the reply, us, and the shortened command.
    fn enter(
        &mut self,
        turn: &Turn,
        down: &Downstreams,
        gathers: &Gathers,
        link: &Link,
        pending: Pending,
        (took, mut args): (u32, Vec<Vec<u8>>),
    ) {
        let handle = match pending.purpose {
            Purpose::Client | Purpose::ClientHealed | Purpose::Exec | Purpose::ExecWithoutMulti => pending.who,
            Purpose::Gather => gathers.get(pending.who).map_or(Handle::NONE, |g| g.client()),
            _ => return,
        };
        // The client may be gone, but its command was slow.
        let client = down.get(handle);
        let queue = link.queued_us(pending.sent_us, took);
        let held = held_us(down, pending);
        if !turn.routing().live.slowlog_arguments {
            args.truncate(1);
        }
        let node = turn.node_name(link.node());
        let entry = SlowEntry {
            id: 0,
            at_s: std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs(),
            total_us: u64::from(held) + u64::from(took),
            held_us: u64::from(held),
            queue_us: u64::from(queue),
            node_us: u64::from(took - queue),
            args,
            address: client.and_then(|c| c.identity().peer()).map_or_else(|| "?:0".into(), |a| a.to_string()),
            name: client.map(|c| c.identity().name().to_owned()).unwrap_or_default(),
            user: client.map_or("default", |c| c.identity().user().name()).into(),
            node: link.replica().map_or(node.clone(), |replica| format!("{node} replica {replica}")),
        };
        self.slow.waiting.push(entry);
        self.enter_waiting(turn);
    }
}

/// Whether commands of this kind are logged: those of clients.
fn is_logged(purpose: Purpose) -> bool {
    matches!(
        purpose,
        Purpose::Client | Purpose::ClientHealed | Purpose::Exec | Purpose::ExecWithoutMulti | Purpose::Gather
    )
}

fn arguments(out: &mut Vec<u8>, entry: &SlowEntry) {
    encode::header(out, b'*', entry.args.len());
    for arg in &entry.args {
        encode::bulk(out, arg);
    }
}

/// Number of requested entries: 10 by default, all for -1.
fn count(arg: Option<&[u8]>) -> Result<Option<usize>, ()> {
    match arg.map(parse::<i64>) {
        None => Ok(Some(SHOWN)),
        Some(Some(-1)) => Ok(None),
        Some(Some(count)) => usize::try_from(count).map(Some).map_err(|_| ()),
        Some(None) => Err(()),
    }
}

/// SWITCHYARD SLOWLOG [count]: all details of the entries.
pub(super) fn slowlog_details(turn: &Turn, args: &Args<'_>, resp3: bool, out: &mut Vec<u8>) {
    let entries = lock(&turn.shared().slow_log).latest(count(args.get(2)).unwrap_or(Some(SHOWN)));
    encode::header(out, b'*', entries.len());
    for entry in entries {
        encode::map(out, 11, resp3);
        let numbers = [
            ("id", entry.id),
            ("time", entry.at_s),
            ("total_us", entry.total_us),
            ("held_us", entry.held_us),
            ("queue_us", entry.queue_us),
            ("node_us", entry.node_us),
        ];
        for (name, value) in numbers {
            encode::bulk(out, name.as_bytes());
            encode::integer(out, value as i64);
        }
        encode::bulk(out, b"command");
        arguments(out, &entry);
        for (name, value) in
            [("client", &entry.address), ("name", &entry.name), ("user", &entry.user), ("node", &entry.node)]
        {
            encode::bulk(out, name.as_bytes());
            encode::bulk(out, value.as_bytes());
        }
    }
}

/// Time that a command was held before its dispatch.
fn held_us(down: &Downstreams, pending: Pending) -> u32 {
    let client = down.get(pending.who).filter(|_| pending.purpose == Purpose::Client);
    client.map_or(0, |client| client.waits().held_us(pending.seq))
}

impl CommandHooks {
    /// Whether one more entry may be made now. If a node stalls for a moment, all commands in flight are slow, and
    /// entries for all of them would delay the next ones.
    fn may_enter(&mut self, turn: &Turn) -> bool {
        match PER_SECOND.take(self.slow.full_at_ns, turn.now_us() * 1000) {
            Ok(full_at_ns) => {
                self.slow.full_at_ns = full_at_ns;
                true
            }
            Err(_) => {
                turn.counters().slow_not_entered.add(1);
                if let Some(suppressed) = self.slow.log.allow(turn.now_us()) {
                    info!(
                        worker = turn.index(),
                        suppressed = suppressed.count(),
                        "rate limit of the slow log exceeded (the metric slowlog_dropped counts the others)"
                    );
                }
                false
            }
        }
    }

    /// Adds entries that could not be added while the log was being read.
    pub(super) fn enter_waiting(&mut self, turn: &Turn) {
        if self.slow.waiting.is_empty() {
            return;
        }
        let mut log = match turn.shared().slow_log.try_lock() {
            Ok(log) => log,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Do not wait for the lock: the next tick tries again.
            Err(TryLockError::WouldBlock) => return,
        };
        for entry in self.slow.waiting.drain(..) {
            log.add(entry, turn.routing().live.slowlog_max_len);
        }
    }
}

pub(super) fn slowlog(
    turn: &Turn,
    down: &mut Downstreams,
    hooks: &mut CommandHooks,
    call: &Invocation<'_>,
    local: Local,
) -> Flow {
    let Invocation { handle, args, .. } = *call;
    let class = call.class();
    let mut out = Vec::new();
    match local {
        Local::SlowlogLen => encode::integer(&mut out, lock(&turn.shared().slow_log).len() as i64),
        Local::SlowlogReset => {
            hooks.slow.waiting.clear();
            lock(&turn.shared().slow_log).clear();
            out.extend_from_slice(b"+OK\r\n");
        }
        _ => {
            let Ok(count) = count(args.get(2)) else {
                return down.refuse(turn, handle, class, "ERR count should be greater than or equal to -1");
            };
            let entries = lock(&turn.shared().slow_log).latest(count);
            encode::header(&mut out, b'*', entries.len());
            for entry in entries {
                encode::header(&mut out, b'*', 6);
                encode::integer(&mut out, entry.id as i64);
                encode::integer(&mut out, entry.at_s as i64);
                encode::integer(&mut out, entry.total_us as i64);
                arguments(&mut out, &entry);
                encode::bulk(&mut out, entry.address.as_bytes());
                encode::bulk(&mut out, entry.name.as_bytes());
            }
        }
    }
    down.answer(turn, handle, class, &out);
    Flow::Next
}
