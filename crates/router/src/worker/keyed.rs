//! The command hook: the one place that every command passes when it is given to a connection, and once more at its
//! end.
//!
//! Features that observe reads and writes of keys attach only here, for example moves and taps. A connection accepts a
//! request only as a [`Request`] and returns it as an [`FinishedRequest`]. Both are created and opened only here and in
//! `upstream`, so no path to a node bypasses this file. It covers plain commands, parts of split ones, transactions,
//! scripts, blocking commands, uploads, multi-step commands, repeats and reissued commands.
//!
//! Three events:
//! - **sent**: [`Worker::pass`]. No byte has been sent yet, because a turn of the loop sends at its end.
//! - **certain**: the node has replied. Queued commands of a transaction end with its EXEC.
//! - **never**: the connection was lost before the request was sent, the request was withdrawn, or the transaction was
//!   discarded. If the connection was lost later, the outcome is in doubt until the zombie has ended.
//!
//! Without observers, a command costs two predicted branches. Its keys are only located for an observer, in the command
//! and arguments from dispatch, or in the bytes.
//!
//! Observers are called by name rather than from a list of trait objects, so that their order is visible here.

use std::collections::BTreeMap;
use std::sync::Arc;

use switchyard_policy::migration::Key;
use switchyard_policy::topology::{MoveId, Placement};
use switchyard_resp::command::{Command, Flags, KeyError};
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use super::changes::Changes;
use super::command::{Call, CommandSeq, KeyedCommand, with_parsed_command, writes};
use super::hot_copies::store::HotCopyStore;
use super::published::late_writes;
use super::scripts::met::ScriptsMet;
use super::scripts::rehearsed::OwnCall;
use super::slowlog::entries::SlowCommands;
use super::telemetry::Telemetry;
use super::transit::state::InTransit;
use super::turn::Turn;
use super::upstreams::pending::{EXEC, Pending, Purpose};
use crate::mover::MoverMessage;
use crate::shared::RoutingSnapshot;
use crate::single_node_usage::Tally;
use crate::tap::{Outcome, SentCommand, Tap};
use crate::used_together::GroupSample;

/// A request for a connection.
#[must_use = "it is sent by a link"]
#[derive(Debug)]
pub(super) struct Request<'a> {
    bytes: &'a [u8],
    database: u32,
    pending: Pending,
}

impl<'a> Request<'a> {
    /// Creates a request of the router, without keys.
    pub(super) fn of_ours(bytes: &'a [u8], database: u32, pending: Pending) -> Self {
        Self { bytes, database, pending: Pending { end: CommandSeq::NONE, ..pending } }
    }

    pub(super) fn pending(&self) -> Pending {
        self.pending
    }

    /// Returns the content for the connection.
    #[inline]
    pub(super) fn into_parts(self) -> (&'a [u8], u32, Pending) {
        (self.bytes, self.database, self.pending)
    }
}

/// A request returned by a connection, with its outcome.
#[must_use = "those who wait for its end are told by `Worker::over`"]
#[derive(Debug)]
pub(super) struct FinishedRequest {
    pending: Pending,
    outcome: Outcome,
    /// Bytes of the reply that were streamed.
    streamed: u64,
    /// The waiting client has already received a timeout error.
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

    /// Class of the command.
    pub(super) fn class(&self) -> u8 {
        self.pending.class
    }

    /// Sets the number of streamed bytes of the reply.
    pub(super) fn streamed(self, bytes: u64) -> Self {
        Self { streamed: bytes, ..self }
    }
}

/// Queued commands of a transaction.
#[derive(Debug, Default)]
struct Queued {
    commands: u32,
    /// Numbers of commands with an observed end.
    ends: Vec<CommandSeq>,
}

/// Observers of commands.
#[derive(Debug)]
pub(super) struct CommandHooks {
    /// Whether any observer needs all commands: keys are in transit or away from an ejected node, or there is a tap.
    /// One branch per command.
    any: bool,
    tap: Option<Arc<dyn Tap>>,
    /// Counts commands that may add or remove keys.
    changes: Changes,
    /// Samples commands.
    pub(super) telemetry: Telemetry,
    /// Observes writes of cacheable keys.
    pub(super) hot: HotCopyStore,
    last: CommandSeq,
    /// The transaction being sent.
    queued: Queued,
    /// Observed transactions in flight, by the number of their EXEC.
    transactions: BTreeMap<CommandSeq, Queued>,
    /// Writes at the source of a move with a published protocol: their end is reported to the mover.
    late: BTreeMap<CommandSeq, BTreeMap<MoveId, Vec<Key>>>,
    pub(super) transit: InTransit,
    pub(super) scripts_met: ScriptsMet,
    /// Positions of the keys of a command, for reuse.
    pub(super) keys: Vec<u32>,
    /// Counts of commands that only work because there is a single node.
    pub(super) tally: Tally,
    /// Keys used together, not yet added to the shared sample.
    pub(super) groups: GroupSample,
    pub(super) slow: SlowCommands,
    /// The current command is executed by the snapshot of moved keys.
    pub(super) detour: bool,
    /// The current call of a script, if the router has changed it.
    pub(super) script: Option<OwnCall>,
}

/// Finds the keys of a command that is routed by them. With placement rules, the name of a sorted key need not determine
/// its slot.
pub(super) fn find_routed_keys(
    placement: &Placement,
    command: &Command,
    args: &Args<'_>,
    out: &mut Vec<u32>,
) -> Result<(), KeyError> {
    command.find_keys(args, out)?;
    match placement {
        Placement::Ruled(_) => {
            command.sorts_by_whole_name(args).map_or(Ok(()), |option| Err(KeyError::SortPattern(option)))
        }
        Placement::Crc16 | Placement::Continuum(_) => Ok(()),
    }
}

impl CommandHooks {
    pub(super) fn new(changes: Changes, telemetry: Telemetry, hot: HotCopyStore, slow: SlowCommands) -> Self {
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
            transit: InTransit::default(),
            scripts_met: ScriptsMet::default(),
            keys: Vec::new(),
            tally: Tally::default(),
            groups: GroupSample::default(),
            slow,
            detour: false,
            script: None,
        }
    }

    /// Adopts a new snapshot.
    pub(super) fn adopt_routing(&mut self, routing: &RoutingSnapshot, tap: Option<&Arc<dyn Tap>>) {
        self.tap = tap.cloned();
        self.telemetry.adopt(routing.live.telemetry.sample);
        self.any = self.tap.is_some() || !routing.topology.is_settled() || !routing.moves.away.is_empty();
    }

    /// Returns a number for the next command.
    pub(super) fn next(&mut self) -> CommandSeq {
        self.last = self.last.next();
        self.last
    }
}

impl CommandHooks {
    /// Creates the request of a command that is given to a connection.
    #[inline]
    pub(super) fn pass<'r>(
        &mut self,
        turn: &Turn,
        keyed: KeyedCommand<'_>,
        bytes: &'r [u8],
        pending: Pending,
    ) -> Request<'r> {
        self.changes.note(&turn.routing().commands, keyed);
        let followed =
            if self.telemetry.is_due() { self.telemetry.note(turn.routing(), keyed, bytes.len()) } else { None };
        if self.telemetry.is_instant()
            && let Some((key, count)) = self.telemetry.notice(keyed)
        {
            self.noticed(turn, key, count);
        }
        let mut end = if self.any { self.on_sent(turn, keyed) } else { CommandSeq::NONE };
        if self.hot.is_cacheable() {
            end = self.hold(turn, keyed, end);
        }
        if let Some(followed) = followed {
            if end == CommandSeq::NONE {
                end = self.next().counted();
            }
            self.telemetry.follow(end, followed);
        }
        let armed = turn.cacheable();
        Request { bytes, database: keyed.database, pending: Pending { end, cacheable: armed, ..pending } }
    }

    /// Like `pass`, for a command that its node queues: it ends with EXEC.
    pub(super) fn pass_queued<'r>(
        &mut self,
        turn: &Turn,
        keyed: KeyedCommand<'_>,
        bytes: &'r [u8],
        pending: Pending,
    ) -> Request<'r> {
        let request = self.pass(turn, keyed, bytes, pending);
        self.queued.commands += 1;
        self.queued.ends.extend(Some(request.pending.end).filter(|end| *end != CommandSeq::NONE));
        Request::of_ours(bytes, keyed.database, pending)
    }

    /// Creates the EXEC of the commands passed since the last one.
    pub(super) fn pass_exec(&mut self, database: u32, pending: Pending) -> Request<'static> {
        let mut request = Request::of_ours(EXEC, database, pending);
        let queued = std::mem::take(&mut self.queued);
        if !queued.ends.is_empty() {
            let end = self.next();
            self.transactions.insert(end, queued);
            request.pending.end = end;
        }
        request
    }

    /// Reports a command that blocks at its node while the map changes: its later effect counts as sent now.
    pub(super) fn pass_again(&mut self, turn: &Turn, keyed: KeyedCommand<'_>) {
        if self.any {
            self.with_keys(turn, keyed.call, |hooks, routing, command, args, places| {
                hooks.note_sent(turn, routing, keyed.node, command, args, places)
            });
        }
    }

    /// Handles the end of a request, with the node's reply if any.
    #[inline]
    pub(super) fn over(&mut self, turn: &Turn, ended: FinishedRequest, answer: &[u8]) -> Pending {
        if ended.pending.end != CommandSeq::NONE {
            self.on_finished(turn, &ended, answer);
        }
        ended.pending
    }

    #[cold]
    fn on_finished(&mut self, turn: &Turn, ended: &FinishedRequest, answer: &[u8]) {
        let FinishedRequest { pending, outcome, streamed, .. } = ended;
        let queued = self.transactions.remove(&pending.end);
        // After a refused MULTI, the commands were executed, whatever EXEC returns.
        let is_discarded = *outcome == Outcome::Certain
            && pending.purpose != Purpose::ExecWithoutMulti
            && (reply::is_null(answer) || answer.starts_with(b"-EXECABORT"));
        let outcome = if queued.is_some() && is_discarded { Outcome::Never } else { *outcome };
        // Commands of a transaction share the reply size and time equally.
        let alone = [pending.end];
        let (commands, ends) = queued.as_ref().map_or((1, &alone[..]), |queued| (queued.commands, &queued.ends));
        let share = |whole: u64| whole / u64::from(commands.max(1));
        let (bytes, us) = (
            share(answer.len() as u64 + streamed),
            share(u64::from((turn.now_us() as u32).wrapping_sub(pending.sent_us))),
        );
        for &end in ends {
            if outcome == Outcome::Certain {
                self.telemetry.answered(end, bytes, us);
            }
            self.hot.over(end, outcome);
            if end.number() & CommandSeq::COUNTED != 0 {
                continue;
            }
            let late = self.late.remove(&end).filter(|_| outcome != Outcome::Never);
            for (move_id, keys) in late.into_iter().flatten() {
                if let Some(mover) = turn.routing().moves.by_id.get(&move_id) {
                    mover.send_without_wake(MoverMessage::Written(keys));
                }
            }
            if let Some(tap) = &self.tap {
                tap.ended((turn.index(), end.number()), outcome);
            }
        }
    }

    #[cold]
    fn on_sent(&mut self, turn: &Turn, keyed: KeyedCommand<'_>) -> CommandSeq {
        if !turn.routing().moves.away.is_empty() {
            self.note_written(turn, keyed);
        }
        let end = self.with_keys(turn, keyed.call, |hooks, routing, command, args, places| {
            hooks.note_sent(turn, routing, keyed.node, command, args, places);
            let end = hooks.notify_tap(turn, keyed, command, args, places);
            let late = late_writes(routing, keyed.node, command, args, places);
            if late.is_empty() {
                return end;
            }
            let end = if end == CommandSeq::NONE { hooks.next() } else { end };
            hooks.late.insert(end, late);
            end
        });
        end.unwrap_or(CommandSeq::NONE)
    }

    fn notify_tap(
        &mut self,
        turn: &Turn,
        keyed: KeyedCommand<'_>,
        command: &Command,
        args: &Args<'_>,
        places: &[u32],
    ) -> CommandSeq {
        let Some(tap) = self.tap.clone() else { return CommandSeq::NONE };
        let end = self.next();
        let keys: Vec<&[u8]> = places.iter().filter_map(|place| args.get(*place as usize)).collect();
        let (number, KeyedCommand { node, database, .. }) = ((turn.index(), end.number()), keyed);
        tap.sent(&SentCommand { number, node, database, command: &command.name, keys: &keys, writes: writes(command) });
        end
    }

    /// Calls `with` with the command and the places of its keys, if it has any. A channel is not a key.
    fn with_keys<R>(
        &mut self,
        turn: &Turn,
        call: Call<'_>,
        with: impl FnOnce(&mut Self, &RoutingSnapshot, &Command, &Args<'_>, &[u32]) -> R,
    ) -> Option<R> {
        let routing = turn.routing().clone();
        let find = |command: &Command, args: &Args<'_>| {
            let mut places = std::mem::take(&mut self.keys);
            places.clear();
            let found =
                !command.flags.has(Flags::PUBSUB) && command.find_keys(args, &mut places).is_ok() && !places.is_empty();
            let result = found.then(|| with(self, &routing, command, args, &places));
            self.keys = places;
            result
        };
        match call {
            Call::Found(command, args) => find(command, args),
            Call::Bytes(request) => with_parsed_command(&routing, request, find).flatten(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_does_not_come_again_while_a_command_waits() {
        let (waits, long_after) = (CommandSeq::of(1), CommandSeq::of(u64::from(u32::MAX)));
        assert!(waits < long_after.next() && waits.number() != long_after.next().next().number());
        assert_eq!(size_of::<Pending>(), 40, "many are kept: wider numbers must not cost memory");
    }
}
