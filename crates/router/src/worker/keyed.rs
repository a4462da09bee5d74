//! The seam: the one place that every command passes when it is handed to a connection, and once more when it is over.
//!
//! Features that must know which keys are read or written where attach here, and nowhere else: moves do, and taps. A connection takes a request
//! only as a [`Request`] and gives it back as an [`Ended`]. Both are made and opened only here and in `upstream`, so no way to a node leads around
//! this file. It knows plain commands, parts of split ones, transactions, scripts, blocking commands, uploads, rounds, repeats and recalled commands
//! alike.
//!
//! Three points:
//! - **sent**: [`Worker::pass`]. None of the bytes has been sent, because a turn of the loop sends at its end.
//! - **certain**: the node has answered. What a transaction has queued is over when its EXEC is.
//! - **never**: the connection was lost before, the request was taken back, or the transaction was discarded. Of a connection that was lost after the
//!   request was sent that is in doubt, until the zombie has ended.
//!
//! Where nobody listens a command pays one predicted branch at each end. Its keys are looked for when somebody asks for them, in the command and
//! arguments that dispatch has found anyway, or in the bytes.
//!
//! Not a list of hearers behind a trait: each is called by name, in an order that can be read here.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::migration::Key;
use switchyard_policy::topology::{MoveId, NodeId};
use switchyard_resp::command::{Command, Flags, Handling, Local};
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use super::Worker;
use super::published::late_writes;
use super::transit::parsed;
use super::upstream::{EXEC, Pending};
use crate::mover::Told;
use crate::shared::Plan;
use crate::tap::{Outcome, SentCommand, Tap};

/// What is executed: where its keys are found.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call<'a> {
    /// A client's command, as dispatch has found it. What is sent may be other bytes with the same keys (a script that is checked).
    Found(&'a Command, &'a Args<'a>),
    /// What the router has kept or made.
    Bytes(&'a [u8]),
}

/// A command on its way to a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keyed<'a> {
    pub(super) call: Call<'a>,
    pub(super) node: NodeId,
    pub(super) database: u32,
}

/// The number of a command whose end somebody wants to hear of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct EndNumber(u32);

impl EndNumber {
    /// Nobody does.
    pub(super) const NONE: Self = Self(0);
}

/// A request as a connection takes it.
#[must_use = "it is sent by a link"]
#[derive(Debug)]
pub(super) struct Request<'a> {
    bytes: &'a [u8],
    database: u32,
    pending: Pending,
}

impl<'a> Request<'a> {
    /// One of the router's own, without keys.
    pub(super) fn of_ours(bytes: &'a [u8], database: u32, pending: Pending) -> Self {
        Self { bytes, database, pending: Pending { end: EndNumber::NONE, ..pending } }
    }

    /// For the connection that takes it.
    #[inline]
    pub(super) fn into_parts(self) -> (&'a [u8], u32, Pending) {
        (self.bytes, self.database, self.pending)
    }
}

/// A request that a connection has given back, with what became of it.
#[must_use = "those who wait for its end are told by `Worker::over`"]
#[derive(Debug)]
pub(super) struct Ended {
    pending: Pending,
    outcome: Outcome,
    /// Whoever waited has been told of a time-out already.
    pub(super) is_expired: bool,
}

impl Ended {
    #[inline]
    pub(super) fn new(pending: Pending, outcome: Outcome, is_expired: bool) -> Self {
        Self { pending, outcome, is_expired }
    }
}

/// Who listens.
#[derive(Debug, Default)]
pub(super) struct Hearers {
    /// Anybody does: keys are on their way, or there is a tap. Looked at once per command.
    any: bool,
    tap: Option<Arc<dyn Tap>>,
    last: EndNumber,
    /// What the transaction that is being handed over has queued, as far as somebody wants to hear of it.
    queued: Vec<EndNumber>,
    /// The same of those under way, by the number of their EXEC.
    transactions: BTreeMap<EndNumber, Vec<EndNumber>>,
    /// Writes at the source of a move by a protocol as published: its mover hears of their end.
    late: BTreeMap<EndNumber, (MoveId, Vec<Key>)>,
}

impl Hearers {
    /// Another plan.
    pub(super) fn adopt(&mut self, plan: &Plan, tap: Option<&Arc<dyn Tap>>) {
        self.tap = tap.cloned();
        self.any = self.tap.is_some() || !plan.topology.is_settled();
    }

    fn next(&mut self) -> EndNumber {
        self.last = EndNumber(self.last.0.wrapping_add(1).max(1));
        self.last
    }
}

/// Whether a command may change the keys that it names.
pub(super) fn writes(command: &Command) -> bool {
    !command.flags.has(Flags::READONLY) && command.handling != Handling::Local(Local::Watch)
}

impl Worker {
    /// A command is handed to a connection: makes its request.
    #[inline]
    pub(super) fn pass<'r>(&mut self, keyed: Keyed<'_>, bytes: &'r [u8], pending: Pending) -> Request<'r> {
        let end = if self.hearers.any { self.tell_sent(keyed) } else { EndNumber::NONE };
        Request { bytes, database: keyed.database, pending: Pending { end, ..pending } }
    }

    /// The same of a command that its node queues: it is over when EXEC is.
    pub(super) fn pass_queued<'r>(&mut self, keyed: Keyed<'_>, bytes: &'r [u8], pending: Pending) -> Request<'r> {
        let request = self.pass(keyed, bytes, pending);
        self.hearers.queued.extend(Some(request.pending.end).filter(|end| *end != EndNumber::NONE));
        Request::of_ours(bytes, keyed.database, pending)
    }

    /// EXEC of the commands that were handed over since.
    pub(super) fn pass_exec(&mut self, database: u32, pending: Pending) -> Request<'static> {
        let mut request = Request::of_ours(EXEC, database, pending);
        if !self.hearers.queued.is_empty() {
            let end = self.hearers.next();
            let queued = std::mem::take(&mut self.hearers.queued);
            self.hearers.transactions.insert(end, queued);
            request.pending.end = end;
        }
        request
    }

    /// A command waits at its node while the map changes: what it may still do counts as sent now.
    pub(super) fn pass_again(&mut self, keyed: Keyed<'_>) {
        if self.hearers.any {
            self.with_keys(keyed.call, |worker, plan, command, args, places| worker.note_sent(plan, keyed.node, command, args, places));
        }
    }

    /// A connection has given a request back; with the node's answer, where there is one.
    #[inline]
    pub(super) fn over(&mut self, ended: Ended, answer: &[u8]) -> Pending {
        if ended.pending.end != EndNumber::NONE {
            self.tell_ended(&ended, answer);
        }
        ended.pending
    }

    #[cold]
    fn tell_ended(&mut self, ended: &Ended, answer: &[u8]) {
        let Ended { pending, outcome, .. } = ended;
        let queued = self.hearers.transactions.remove(&pending.end);
        let is_discarded = *outcome == Outcome::Certain && (reply::is_null(answer) || answer.starts_with(b"-EXECABORT"));
        let outcome = if queued.is_some() && is_discarded { Outcome::Never } else { *outcome };
        for end in queued.unwrap_or_else(|| vec![pending.end]) {
            let late = self.hearers.late.remove(&end).filter(|_| outcome != Outcome::Never);
            if let Some((mover, keys)) = late.and_then(|(id, keys)| Some((self.plan.moves.by_id.get(&id)?, keys))) {
                mover.note(Told::Written(keys));
            }
            if let Some(tap) = &self.hearers.tap {
                tap.ended((self.index, end.0), outcome);
            }
        }
    }

    #[cold]
    fn tell_sent(&mut self, keyed: Keyed<'_>) -> EndNumber {
        let end = self.with_keys(keyed.call, |worker, plan, command, args, places| {
            worker.note_sent(plan, keyed.node, command, args, places);
            let end = worker.tell_tap(keyed, command, args, places);
            let Some(late) = late_writes(plan, keyed.node, command, args, places) else { return end };
            let end = if end == EndNumber::NONE { worker.hearers.next() } else { end };
            worker.hearers.late.insert(end, late);
            end
        });
        end.unwrap_or(EndNumber::NONE)
    }

    fn tell_tap(&mut self, keyed: Keyed<'_>, command: &Command, args: &Args<'_>, places: &[u32]) -> EndNumber {
        let Some(tap) = self.hearers.tap.clone() else { return EndNumber::NONE };
        let end = self.hearers.next();
        let keys: Vec<&[u8]> = places.iter().filter_map(|place| args.get(*place as usize)).collect();
        let (number, Keyed { node, database, .. }) = ((self.index, end.0), keyed);
        tap.sent(&SentCommand { number, node, database, command: &command.name, keys: &keys, writes: writes(command) });
        end
    }

    /// Calls `with` with the command and the places of its keys, where it has some. A channel is no key.
    fn with_keys<R>(&mut self, call: Call<'_>, with: impl FnOnce(&mut Self, &Plan, &Command, &Args<'_>, &[u32]) -> R) -> Option<R> {
        let plan = self.plan.clone();
        let find = |command: &Command, args: &Args<'_>| {
            let mut places = std::mem::take(&mut self.keys);
            places.clear();
            let found = !command.flags.has(Flags::PUBSUB) && command.find_keys(args, &mut places).is_ok() && !places.is_empty();
            let result = found.then(|| with(self, &plan, command, args, &places));
            self.keys = places;
            result
        };
        match call {
            Call::Found(command, args) => find(command, args),
            Call::Bytes(request) => parsed(&plan, request, find).flatten(),
        }
    }
}
