//! MONITOR: every command of every client of the router, like one large server.
//!
//! The list of monitors is shared ([`crate::shared::Shared::monitors`]). Each worker has a copy, and writes a line for
//! each command as it takes effect: to its own monitors at once, to monitors of other workers once per turn. Without
//! monitors a command only checks one flag. Secrets are never shown, and administrative commands (`ADMIN`) are omitted,
//! as in Redis.

use std::io::Write;
use std::sync::Arc;

use switchyard_resp::command::{Command, Flags, Handling, Local};

use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::{Aggregation, Gathers};
use super::invocation::Invocation;
use super::turn::Turn;
use crate::lane::Lane;
use crate::lock::lock;
use crate::shared::Message;
use crate::slab::Handle;

/// State of monitors in a worker.
#[derive(Debug, Default)]
pub(super) struct Monitors {
    /// Worker and client of each monitor.
    list: Vec<(usize, Handle)>,
    /// Lines of this turn for monitors of other workers.
    lines: Vec<u8>,
    scratch: Vec<u8>,
}

impl Monitors {
    /// Returns the buffer that may have grown in a burst.
    pub(super) fn reused(&mut self) -> &mut Vec<u8> {
        &mut self.scratch
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }
}

/// State for hiding secret arguments of a command.
struct Secrets {
    everything: bool,
    hello: bool,
    left: usize,
}

impl Secrets {
    fn of(command: &Command) -> Self {
        Self { everything: &*command.name == "AUTH", hello: &*command.name == "HELLO", left: 0 }
    }

    fn hides(&mut self, index: usize, arg: &[u8]) -> bool {
        if index == 0 {
            return false;
        }
        if self.left > 0 {
            self.left -= 1;
            return true;
        }
        if self.hello && arg.eq_ignore_ascii_case(b"AUTH") {
            self.left = 2;
        }
        self.everything
    }
}

/// Appends an argument, quoted like Redis.
fn quote(out: &mut Vec<u8>, arg: &[u8]) {
    out.push(b'"');
    for byte in arg {
        match byte {
            b'\\' | b'"' => out.extend_from_slice(&[b'\\', *byte]),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            7 => out.extend_from_slice(b"\\a"),
            8 => out.extend_from_slice(b"\\b"),
            b' '..=b'~' => out.push(*byte),
            other => out.extend_from_slice(format!("\\x{other:02x}").as_bytes()),
        }
    }
    out.push(b'"');
}

/// Removes a client from the monitors.
pub(super) fn end_monitor(turn: &Turn, handle: Handle) {
    lock(&turn.shared().monitors).retain(|m| *m != (turn.index(), handle));
    for mailbox in turn.shared().mailboxes.iter() {
        mailbox.send(Message::Refresh { from: turn.index(), gather: Handle::NONE, part: 0, settled: false });
    }
}

/// Refuses commands that a monitor may not use. `None`: the command may proceed.
pub(super) fn gate_monitor(turn: &Turn, down: &mut Downstreams, handle: Handle, command: &Command) -> Option<Flow> {
    down.get(handle).filter(|c| c.is_monitor())?;
    let keyspace = command.flags.has(Flags::WRITE) || command.flags.has(Flags::READONLY);
    let publishes = matches!(command.handling, Handling::Local(Local::Publish | Local::Spublish));
    if !keyspace && !publishes && !command.flags.has(Flags::SCRIPT) {
        return None;
    }
    Some(down.refuse(turn, handle, command.class() as u8, "ERR Replica can't interact with the keyspace"))
}

impl Gathers {
    /// Starts MONITOR. The reply comes when every worker reports its commands.
    pub(super) fn monitor(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, class: u8) -> Flow {
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.is_monitor() {
            return Flow::Next; // as in Redis, without a reply
        }
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        // All other commands wait for the reply.
        client.replies_mut().take_lane(Lane::Pubsub);
        lock(&turn.shared().monitors).push((turn.index(), handle));
        self.refresh_workers(turn, down, handle, class, Aggregation::Monitor, false)
    }

    /// Makes every worker adopt shared state. The reply comes when all have.
    pub(super) fn refresh_workers(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        class: u8,
        whole: Aggregation,
        settled: bool,
    ) -> Flow {
        let workers = turn.shared().mailboxes.len();
        let Some(gather) = self.begin_gather(turn, down, handle, class, workers, whole) else { return Flow::Close };
        for (part, mailbox) in turn.shared().mailboxes.iter().enumerate() {
            mailbox.send(Message::Refresh { from: turn.index(), gather, part: part as u32, settled });
        }
        Flow::Next
    }
}

impl Monitors {
    pub(super) fn refresh_monitors(&mut self, turn: &Turn, down: &mut Downstreams) {
        let mut list = lock(&turn.shared().monitors);
        // A client may disconnect before its request is known here.
        list.retain(|(worker, client)| *worker != turn.index() || down.get(*client).is_some());
        self.list.clone_from(&list);
    }

    /// Reports a command that has taken effect.
    #[cold]
    pub(super) fn feed_monitors(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) {
        let Invocation { handle, command, args, .. } = *call;
        if self.is_empty() || command.flags.has(Flags::ADMIN) || matches!(command.handling, Handling::Refused(_)) {
            return;
        }
        let Some(client) = down.get(handle) else { return };
        // A pending SELECT is shown with its new database.
        let selected = if &*command.name == "SELECT" { args.get(1).and_then(parse) } else { None };
        let database: u32 = selected.unwrap_or(client.database());
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let mut line = std::mem::take(&mut self.scratch);
        line.clear();
        // Writing to a Vec does not fail.
        let _ = write!(line, "+{}.{:06} [{} ", now.as_secs(), now.subsec_micros(), database);
        let _ = match (client.identity().peer(), client.identity().unix()) {
            (Some(peer), _) => write!(line, "{peer}]"),
            (None, Some(path)) => write!(line, "unix:{}]", path.display()),
            (None, None) => write!(line, "?]"),
        };
        let mut secrets = Secrets::of(command);
        for (index, arg) in args.iter().enumerate() {
            line.extend_from_slice(b" ");
            if secrets.hides(index, arg) {
                line.extend_from_slice(b"\"(redacted)\"");
            } else {
                quote(&mut line, arg);
            }
        }
        line.extend_from_slice(b"\r\n");
        self.show(turn, down, &line);
        if self.list.iter().any(|(worker, _)| *worker != turn.index()) {
            self.lines.extend_from_slice(&line);
        }
        self.scratch = line;
    }

    /// Sends lines to this worker's own monitors.
    pub(super) fn show(&mut self, turn: &Turn, down: &mut Downstreams, lines: &[u8]) {
        for place in 0..self.list.len() {
            let (worker, client) = self.list[place];
            // Not before the reply to MONITOR.
            if worker == turn.index() && down.get(client).is_some_and(|c| c.is_monitor()) {
                down.push(turn, client, lines);
            }
        }
    }

    /// Passes the lines of this turn to the other workers.
    pub(super) fn flush_monitors(&mut self, turn: &Turn) {
        if self.lines.is_empty() {
            return;
        }
        let lines: Arc<[u8]> = std::mem::take(&mut self.lines).into();
        let mut workers: Vec<usize> =
            self.list.iter().map(|(worker, _)| *worker).filter(|w| *w != turn.index()).collect();
        workers.sort_unstable();
        workers.dedup();
        for worker in workers {
            turn.shared().mailboxes[worker].send(Message::Lines(lines.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::quote;

    #[test]
    fn arguments_cannot_break_a_line() {
        let mut out = Vec::new();
        quote(&mut out, b"a \\\"\r\n\t\x07\x08\x00\xff~");
        assert_eq!(out, br#""a \\\"\r\n\t\a\b\x00\xff~""#);
    }
}
