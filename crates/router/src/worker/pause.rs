//! CLIENT PAUSE and UNPAUSE: all workers hold commands for a time.
//!
//! The state is shared ([`crate::shared::Shared::pause`]); each worker has a copy. PAUSE is answered when every worker
//! holds commands *and* has the replies to all commands sent before: as with one server, nothing changes after the OK.

use std::time::Duration;

use switchyard_resp::command::Command;
use switchyard_resp::command::Handling;
use switchyard_resp::command::Local;

use super::command::{may_write, parse, with_parsed_command};
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::{Aggregation, Gathers};
use super::invocation::Invocation;
use super::monitor::Monitors;
use super::transactions::session::Session;
use super::turn::Turn;
use super::upstreams::{Link, Upstreams};
use crate::lane::Lane;
use crate::lock::lock;
use crate::shared::{Message, Pause, RoutingSnapshot};
use crate::slab::Handle;

/// A PAUSE that has not been answered yet.
#[derive(Debug)]
pub(super) struct Settling {
    from: usize,
    gather: Handle,
    part: u32,
    since_us: u64,
}

/// The pause in force, and commands that wait for it to take effect.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    now: Option<Pause>,
    settling: Vec<Settling>,
}

impl Pauses {
    /// Whether clients are paused.
    #[inline]
    pub(super) fn is_any(&self) -> bool {
        self.now.is_some()
    }
}

/// Whether a queued command of a client may write.
fn queue_may_write(clients: &Downstreams, routing: &RoutingSnapshot, handle: Handle) -> bool {
    let session = clients.get(handle).and_then(|client| client.state::<Session>());
    let queue = session.map(|session| session.multi.requests()).unwrap_or_default();
    queue.iter().any(|request| with_parsed_command(routing, request, |command, _| may_write(command)).unwrap_or(true))
}

/// Whether all commands sent to nodes by this time have been answered.
fn has_settled(turn: &Turn, up: &Upstreams, by_us: u64) -> bool {
    let timeout = turn.routing().live.command_timeout.as_micros() as u64;
    let old = |sent_us: u32| (sent_us.wrapping_sub(by_us as u32) as i32) <= 0;
    // A blocking command may wait for a push that the pause holds. An upload does not end either, because the rest
    // of it is held.
    let waits = |l: &Link| l.lane() == Lane::Blocking || l.is_only_uploading();
    let in_flight = up.links().iter().any(|(_, l)| !waits(l) && l.head().is_some_and(|p| old(p.sent_us)));
    // The end of a broken connection's commands may stay unconfirmed while its node is unreachable.
    !in_flight && up.zombies().is_empty() || turn.now_us().saturating_sub(by_us) > 2 * timeout
}

/// Resumes clients whose commands are no longer held. A command that still is returns to its stall.
fn end_pauses(turn: &Turn, down: &mut Downstreams) {
    let held: Vec<Handle> = down.iter().filter(|(_, c)| c.stall() == Stall::Paused).map(|(handle, _)| handle).collect();
    for client in held {
        down.unstall(turn, client);
    }
}

pub(super) fn pause(
    turn: &Turn,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    pauses: &mut Pauses,
    call: &Invocation<'_>,
) -> Flow {
    let Invocation { handle, args, .. } = *call;
    let class = call.class();
    if args.len() > 4 {
        return down.refuse(
            turn,
            handle,
            class,
            "ERR unknown subcommand or wrong number of arguments for 'PAUSE'. Try CLIENT HELP.",
        );
    }
    let all = match args.get(3) {
        None => true,
        Some(mode) if mode.eq_ignore_ascii_case(b"ALL") => true,
        Some(mode) if mode.eq_ignore_ascii_case(b"WRITE") => false,
        Some(_) => return down.refuse(turn, handle, class, "ERR CLIENT PAUSE mode must be WRITE or ALL"),
    };
    let Some(time_ms) = args.get(2).and_then(parse::<i64>) else {
        return down.refuse(turn, handle, class, "ERR timeout is not an integer or out of range");
    };
    let Ok(time_ms) = u64::try_from(time_ms) else {
        return down.refuse(turn, handle, class, "ERR timeout is negative");
    };
    let until_us = turn.now_us().saturating_add(time_ms.saturating_mul(1000));
    // Overlapping pauses combine to the stricter class and the later end.
    let mut pause = lock(&turn.shared().pause);
    let before = pause.filter(|p| p.until_us > turn.now_us());
    *pause = Some(Pause {
        until_us: before.map_or(until_us, |b| b.until_us.max(until_us)),
        all: all || before.is_some_and(|b| b.all),
    });
    // In force here from now on, also for the rest of the pipeline.
    pauses.now = *pause;
    drop(pause);
    tracing::warn!(time = ?Duration::from_millis(time_ms), all, "clients are paused (CLIENT PAUSE)");
    gathers.refresh_workers(turn, down, handle, class, Aggregation::Merged(switchyard_resp::command::Merge::Same), true)
}

impl Gathers {
    pub(super) fn unpause(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, class: u8) -> Flow {
        *lock(&turn.shared().pause) = None;
        self.refresh_workers(
            turn,
            down,
            handle,
            class,
            Aggregation::Merged(switchyard_resp::command::Merge::Same),
            false,
        )
    }
}

impl Pauses {
    fn answer_refresh(&mut self, turn: &Turn, which: impl Fn(&Settling) -> bool) {
        for done in self.settling.extract_if(.., |s| which(s)).collect::<Vec<_>>() {
            if done.gather != Handle::NONE {
                let answer = Message::Answer { gather: done.gather, part: done.part, reply: b"+OK\r\n".to_vec() };
                turn.shared().mailboxes[done.from].send(answer);
            }
        }
    }

    /// Whether a command is held now, depending on whether it may write.
    pub(super) fn holds_back(&self, writes: bool) -> bool {
        self.now.is_some_and(|pause| pause.all || writes)
    }

    /// Whether the pause holds this command of a client. `WRITE` holds commands that may write; for a transaction the
    /// queued commands decide.
    pub(super) fn is_held_back(&self, turn: &Turn, down: &Downstreams, handle: Handle, command: &Command) -> bool {
        match command.handling {
            Handling::Local(Local::ClientUnpause) => false,
            Handling::Local(Local::Exec) => self.holds_back(queue_may_write(down, turn.routing(), handle)),
            _ => self.holds_back(may_write(command)),
        }
    }
}

/// Adopts the shared state and confirms it: at once, or when all commands sent before have been answered.
pub(super) fn refresh(
    turn: &Turn,
    up: &Upstreams,
    down: &mut Downstreams,
    monitors: &mut Monitors,
    pauses: &mut Pauses,
    from: usize,
    gather: Handle,
    part: u32,
    settled: bool,
) {
    monitors.refresh_monitors(turn, down);
    pauses.now = lock(&turn.shared().pause).filter(|p| p.until_us > turn.now_us());
    end_pauses(turn, down);
    pauses.settling.push(Settling { from, gather, part, since_us: turn.now_us() });
    if !settled || has_settled(turn, up, turn.now_us()) {
        pauses.answer_refresh(turn, |s| s.gather == gather && s.part == part);
    }
}

impl Pauses {
    pub(super) fn tick_pause(&mut self, turn: &Turn, up: &Upstreams, down: &mut Downstreams) {
        if !self.settling.is_empty() {
            let done: Vec<u64> =
                self.settling.iter().map(|s| s.since_us).filter(|since| has_settled(turn, up, *since)).collect();
            self.answer_refresh(turn, |s| done.contains(&s.since_us));
        }
        if self.now.is_some_and(|p| p.until_us <= turn.now_us()) {
            self.now = None;
            end_pauses(turn, down);
        }
    }
}
