//! The seam: the one place that every command passes when it is handed to a connection, and once more when it is over.
//!
//! Features that must know which keys are read or written where attach here, and nowhere else: moves do, and taps. A
//! connection takes a request only as a [`Request`] and gives it back as an [`FinishedRequest`]. Both are made and opened only
//! here and in `upstream`, so no way to a node leads around this file. It knows plain commands, parts of split ones,
//! transactions, scripts, blocking commands, uploads, rounds, repeats and recalled commands alike.
//!
//! Three points:
//! - **sent**: [`Worker::pass`]. None of the bytes has been sent, because a turn of the loop sends at its end.
//! - **certain**: the node has answered. What a transaction has queued is over when its EXEC is.
//! - **never**: the connection was lost before, the request was taken back, or the transaction was discarded. Of a
//!   connection that was lost after the request was sent that is in doubt, until the zombie has ended.
//!
//! Where nobody listens a command pays one predicted branch at each end. Its keys are looked for when somebody asks for
//! them, in the command and arguments that dispatch has found anyway, or in the bytes.
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
use super::away::note_written;
use super::changes::Changes;
use super::hot_copies::{HotCopyStore, hold, noticed};
use super::published::late_writes;
use super::telemetry::Telemetry;
use super::transit::parsed;
use super::upstream::{EXEC, Pending, Purpose};
use crate::mover::MoverMessage;
use crate::shared::RoutingSnapshot;
use crate::tap::{Outcome, SentCommand, Tap};

/// What is executed: where its keys are found.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call<'a> {
    /// A client's command, as dispatch has found it. What is sent may be other bytes with the same keys (a script that
    /// is checked).
    Found(&'a Command, &'a Args<'a>),
    /// What the router has kept or made.
    Bytes(&'a [u8]),
}

/// A command on its way to a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyedCommand<'a> {
    pub(super) call: Call<'a>,
    pub(super) node: NodeId,
    pub(super) database: u32,
}

/// The number of a command whose end somebody wants to hear of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct CommandSeq(u64);

impl CommandSeq {
    /// Nobody does.
    pub(super) const NONE: Self = Self(0);

    /// Of numbers of which only telemetry wants to hear.
    const COUNTED: u64 = 1 << 63;

    /// The number after it, which no command has had: one may wait at its node while any number of others pass.
    const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    /// Its place among so many.
    pub(super) fn slot(self, places: usize) -> usize {
        self.0 as usize % places
    }

    /// As a number.
    pub(super) fn number(self) -> u64 {
        self.0
    }

    #[cfg(test)]
    pub(super) fn of(number: u64) -> Self {
        Self(number)
    }
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
        Self { bytes, database, pending: Pending { end: CommandSeq::NONE, ..pending } }
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
pub(super) struct FinishedRequest {
    pending: Pending,
    outcome: Outcome,
    /// Bytes of the answer that were passed on as they came.
    streamed: u64,
    /// Whoever waited has been told of a time-out already.
    pub(super) is_expired: bool,
}

impl FinishedRequest {
    #[inline]
    pub(super) fn new(pending: Pending, outcome: Outcome, is_expired: bool) -> Self {
        Self { pending, outcome, streamed: 0, is_expired }
    }

    #[cfg(test)]
    pub(super) fn outcome(&self) -> Outcome {
        self.outcome
    }

    /// The answer was passed on as it came: so many bytes.
    pub(super) fn streamed(self, bytes: u64) -> Self {
        Self { streamed: bytes, ..self }
    }
}

/// What a transaction has queued.
#[derive(Debug, Default)]
struct Queued {
    commands: u32,
    /// Those whose end somebody wants to hear of.
    ends: Vec<CommandSeq>,
}

/// Who listens.
#[derive(Debug)]
pub(super) struct CommandObservers {
    /// Any does: keys are on their way or away from an ejected node, or there is a tap. One branch for each command.
    any: bool,
    tap: Option<Arc<dyn Tap>>,
    /// It counts what may add or remove keys.
    changes: Changes,
    /// It hears some commands, whatever else there is.
    pub(super) telemetry: Telemetry,
    /// It hears writes of keys that are armed.
    pub(super) hot: HotCopyStore,
    last: CommandSeq,
    /// The transaction that is being handed over.
    queued: Queued,
    /// Those under way of which somebody wants to hear, by the number of their EXEC.
    transactions: BTreeMap<CommandSeq, Queued>,
    /// Writes at the source of a move by a protocol as published: its mover hears of their end.
    late: BTreeMap<CommandSeq, BTreeMap<MoveId, Vec<Key>>>,
}

impl CommandObservers {
    pub(super) fn new(changes: Changes, telemetry: Telemetry, hot: HotCopyStore) -> Self {
        Self {
            any: false,
            tap: None,
            changes,
            telemetry,
            hot,
            last: CommandSeq::NONE,
            queued: Queued::default(),
            transactions: BTreeMap::new(),
            late: BTreeMap::new(),
        }
    }

    /// Another plan.
    pub(super) fn adopt(&mut self, plan: &RoutingSnapshot, tap: Option<&Arc<dyn Tap>>) {
        self.tap = tap.cloned();
        self.telemetry.adopt(plan.live.telemetry.sample);
        self.any = self.tap.is_some() || !plan.topology.is_settled() || !plan.moves.away.is_empty();
    }

    /// The number of another command.
    pub(super) fn next(&mut self) -> CommandSeq {
        self.last = self.last.next();
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
    pub(super) fn pass<'r>(&mut self, keyed: KeyedCommand<'_>, bytes: &'r [u8], pending: Pending) -> Request<'r> {
        self.observers.changes.note(&self.plan.commands, keyed);
        let followed = if self.observers.telemetry.is_due() {
            self.observers.telemetry.note(&self.plan, keyed, bytes.len())
        } else {
            None
        };
        if self.observers.telemetry.is_instant()
            && let Some((key, count)) = self.observers.telemetry.notice(keyed)
        {
            noticed(self, key, count);
        }
        let mut end = if self.observers.any { self.on_sent(keyed) } else { CommandSeq::NONE };
        if self.observers.hot.is_armed() {
            end = hold(self, keyed, end);
        }
        if let Some(followed) = followed {
            if end == CommandSeq::NONE {
                end = CommandSeq(self.observers.next().0 | CommandSeq::COUNTED);
            }
            self.observers.telemetry.follow(end, followed);
        }
        let armed = self.observers.hot.generation() as u32;
        Request { bytes, database: keyed.database, pending: Pending { end, armed, ..pending } }
    }

    /// The same of a command that its node queues: it is over when EXEC is.
    pub(super) fn pass_queued<'r>(
        &mut self,
        keyed: KeyedCommand<'_>,
        bytes: &'r [u8],
        pending: Pending,
    ) -> Request<'r> {
        let request = self.pass(keyed, bytes, pending);
        self.observers.queued.commands += 1;
        self.observers.queued.ends.extend(Some(request.pending.end).filter(|end| *end != CommandSeq::NONE));
        Request::of_ours(bytes, keyed.database, pending)
    }

    /// EXEC of the commands that were handed over since.
    pub(super) fn pass_exec(&mut self, database: u32, pending: Pending) -> Request<'static> {
        let mut request = Request::of_ours(EXEC, database, pending);
        let queued = std::mem::take(&mut self.observers.queued);
        if !queued.ends.is_empty() {
            let end = self.observers.next();
            self.observers.transactions.insert(end, queued);
            request.pending.end = end;
        }
        request
    }

    /// A command waits at its node while the map changes: what it may still do counts as sent now.
    pub(super) fn pass_again(&mut self, keyed: KeyedCommand<'_>) {
        if self.observers.any {
            self.with_keys(keyed.call, |worker, plan, command, args, places| {
                worker.note_sent(plan, keyed.node, command, args, places)
            });
        }
    }

    /// A connection has given a request back; with the node's answer, where there is one.
    #[inline]
    pub(super) fn over(&mut self, ended: FinishedRequest, answer: &[u8]) -> Pending {
        if ended.pending.end != CommandSeq::NONE {
            self.on_finished(&ended, answer);
        }
        ended.pending
    }

    #[cold]
    fn on_finished(&mut self, ended: &FinishedRequest, answer: &[u8]) {
        let FinishedRequest { pending, outcome, streamed, .. } = ended;
        let queued = self.observers.transactions.remove(&pending.end);
        // One whose MULTI was refused has been executed, whatever EXEC says.
        let is_discarded = *outcome == Outcome::Certain
            && pending.purpose != Purpose::ExecWithoutMulti
            && (reply::is_null(answer) || answer.starts_with(b"-EXECABORT"));
        let outcome = if queued.is_some() && is_discarded { Outcome::Never } else { *outcome };
        // What a transaction has queued has even shares of the answer and of the time.
        let alone = [pending.end];
        let (commands, ends) = queued.as_ref().map_or((1, &alone[..]), |queued| (queued.commands, &queued.ends));
        let share = |whole: u64| whole / u64::from(commands.max(1));
        let (bytes, us) = (
            share(answer.len() as u64 + streamed),
            share(u64::from((self.now_us as u32).wrapping_sub(pending.sent_us))),
        );
        for &end in ends {
            if outcome == Outcome::Certain {
                self.observers.telemetry.answered(end, bytes, us);
            }
            self.observers.hot.over(end, outcome);
            if end.0 & CommandSeq::COUNTED != 0 {
                continue;
            }
            let late = self.observers.late.remove(&end).filter(|_| outcome != Outcome::Never);
            for (move_id, keys) in late.into_iter().flatten() {
                if let Some(mover) = self.plan.moves.by_id.get(&move_id) {
                    mover.note(MoverMessage::Written(keys));
                }
            }
            if let Some(tap) = &self.observers.tap {
                tap.ended((self.index, end.0), outcome);
            }
        }
    }

    #[cold]
    fn on_sent(&mut self, keyed: KeyedCommand<'_>) -> CommandSeq {
        if !self.plan.moves.away.is_empty() {
            note_written(self, keyed);
        }
        let end = self.with_keys(keyed.call, |worker, plan, command, args, places| {
            worker.note_sent(plan, keyed.node, command, args, places);
            let end = worker.notify_tap(keyed, command, args, places);
            let late = late_writes(plan, keyed.node, command, args, places);
            if late.is_empty() {
                return end;
            }
            let end = if end == CommandSeq::NONE { worker.observers.next() } else { end };
            worker.observers.late.insert(end, late);
            end
        });
        end.unwrap_or(CommandSeq::NONE)
    }

    fn notify_tap(
        &mut self,
        keyed: KeyedCommand<'_>,
        command: &Command,
        args: &Args<'_>,
        places: &[u32],
    ) -> CommandSeq {
        let Some(tap) = self.observers.tap.clone() else { return CommandSeq::NONE };
        let end = self.observers.next();
        let keys: Vec<&[u8]> = places.iter().filter_map(|place| args.get(*place as usize)).collect();
        let (number, KeyedCommand { node, database, .. }) = ((self.index, end.0), keyed);
        tap.sent(&SentCommand { number, node, database, command: &command.name, keys: &keys, writes: writes(command) });
        end
    }

    /// Calls `with` with the command and the places of its keys, where it has some. A channel is no key.
    fn with_keys<R>(
        &mut self,
        call: Call<'_>,
        with: impl FnOnce(&mut Self, &RoutingSnapshot, &Command, &Args<'_>, &[u32]) -> R,
    ) -> Option<R> {
        let plan = self.plan.clone();
        let find = |command: &Command, args: &Args<'_>| {
            let mut places = std::mem::take(&mut self.keys);
            places.clear();
            let found =
                !command.flags.has(Flags::PUBSUB) && command.find_keys(args, &mut places).is_ok() && !places.is_empty();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_does_not_come_again_while_a_command_waits() {
        let (waits, long_after) = (CommandSeq(1), CommandSeq(u64::from(u32::MAX)));
        assert!(waits < long_after.next() && waits.number() != long_after.next().next().number());
        assert_eq!(size_of::<Pending>(), 40, "many are kept: wider numbers must not cost memory");
    }
}
