//! State of a client for transactions and WAIT.

use std::collections::VecDeque;

use switchyard_policy::topology::{NodeId, Slot};

use crate::lane::Lane;
use crate::single_node_usage::Limit;
use crate::slab::Handle;
use crate::worker::multi_local::state::LocalInMulti;
use crate::worker::pubsub::Kind;
use crate::worker::wait::state::Wait;

/// Larger queues are not reused for the next transaction.
const KEPT_MAX: usize = 16 << 10;

/// A PUBLISH or SPUBLISH in a transaction: EXEC's reply replaces the node's count by ours.
#[derive(Debug)]
pub(in crate::worker) struct Published {
    /// Index among the commands.
    pub(in crate::worker) place: usize,
    pub(in crate::worker) kind: Kind,
    pub(in crate::worker) channel: Box<[u8]>,
}

/// Rehearsal of the scripts of a transaction, which finds their undeclared keys.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::worker) enum Rehearsal {
    /// No script needs one.
    #[default]
    None,
    /// All of its scripts are trusted. EXEC rehearses them only if keys of their slots live at several nodes.
    Trusted,
    /// EXEC rehearses the scripts, when all declared keys are at one node. The number of earlier rounds.
    Due(u32),
    /// The queued calls declare the keys.
    Done,
}

/// The commands since MULTI.
#[derive(Debug, Default)]
pub(in crate::worker) struct Multi {
    /// Concatenated requests.
    pub(in crate::worker) queue: Vec<u8>,
    /// Length and class of each.
    pub(in crate::worker) commands: Vec<(u32, u8)>,
    /// Slot of the first key.
    pub(in crate::worker) slot: Option<Slot>,
    /// The keys, or these and the watched ones, are in several slots.
    pub(in crate::worker) are_apart: bool,
    pub(in crate::worker) slow: bool,
    pub(in crate::worker) writes: bool,
    /// A command is executed only while there is one node, because of this limit.
    pub(in crate::worker) alone: Option<Limit>,
    /// The placement of keys decided whether a command was accepted, or which checks its script has.
    pub(in crate::worker) has_checks_by_placement: bool,
    /// Rehearsal of its scripts.
    pub(in crate::worker) rehearsal: Rehearsal,
    /// Indexes of the calls of scripts that are checked while they run.
    pub(in crate::worker) checked_calls: Vec<usize>,
    /// A command was refused, so EXEC will be, too.
    pub(in crate::worker) aborted: bool,
    /// The databases that it selects.
    pub(in crate::worker) selects: Vec<u32>,
    /// Whether it selects a database.
    pub(in crate::worker) has_select: bool,
    /// Commands that the router answers.
    pub(in crate::worker) own: LocalInMulti,
    /// Scripts called by their SHA-1.
    pub(in crate::worker) scripts: Vec<[u8; 40]>,
    pub(in crate::worker) published: Vec<Published>,
}

impl Multi {
    pub(in crate::worker) fn count(&self) -> usize {
        self.commands.len()
    }

    pub(in crate::worker) fn bytes(&self) -> usize {
        self.queue.len() + self.own.bytes()
    }

    /// Used bytes.
    pub(in crate::worker) fn memory(&self) -> usize {
        let published: usize = self.published.iter().map(|p| size_of::<Published>() + p.channel.len()).sum();
        self.own.bytes()
            + self.queue.capacity()
            + self.commands.capacity() * size_of::<(u32, u8)>()
            + self.scripts.capacity() * 40
            + published
    }

    /// Returns the commands.
    pub(in crate::worker) fn requests(&self) -> Vec<Vec<u8>> {
        let mut at = 0;
        let request = |(len, _): &(u32, u8)| {
            let from = at;
            at += *len as usize;
            self.queue[from..at].to_vec()
        };
        self.commands.iter().map(request).collect()
    }

    /// Replaces the commands by as many others of the same classes.
    pub(in crate::worker) fn replace(&mut self, requests: Vec<Vec<u8>>) {
        debug_assert_eq!(requests.len(), self.commands.len(), "each command has a class");
        self.queue.clear();
        for ((len, _), request) in self.commands.iter_mut().zip(requests) {
            *len = request.len() as u32;
            self.queue.extend_from_slice(&request);
        }
    }

    pub(in crate::worker) fn clear(&mut self) {
        let mut queue = std::mem::take(&mut self.queue);
        let mut commands = std::mem::take(&mut self.commands);
        queue.clear();
        commands.clear();
        *self = Self::default();
        if queue.capacity() <= KEPT_MAX && commands.capacity() <= KEPT_MAX / 8 {
            self.queue = queue;
            self.commands = commands;
        }
    }
}

/// State of a client beyond single commands. Separate from the client, because most clients need none of it.
#[derive(Debug, Default)]
pub(in crate::worker) struct Session {
    pub(in crate::worker) multi: Multi,
    /// Transactions in flight whose reply differs from the node's: numbers of their EXEC.
    pub(super) under_way: VecDeque<(u32, UnderWay)>,
    pub(in crate::worker) watch: Option<Watch>,
    /// A WATCH has failed: EXEC answers nil.
    pub(super) watch_failed: bool,
    /// The database selected by the transaction in flight.
    pub(super) select: Option<u32>,
    pub(in crate::worker) wait: Option<Wait>,
}

impl Session {
    /// Returns the databases selected by a transaction, queued or in progress.
    pub(in crate::worker) fn selects(&self) -> impl Iterator<Item = u32> {
        self.multi.selects.iter().copied().chain(self.select)
    }
}

/// A transaction in flight: additions to the node's answer to EXEC, and its commands if it may be redirected.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    pub(super) published: Vec<Published>,
    pub(super) own: LocalInMulti,
    /// With members of a cluster.
    pub(super) resend: Option<Box<Resend>>,
}

/// Commands of a transaction in flight, to send it again after a redirect.
#[derive(Debug)]
pub(in crate::worker) struct Resend {
    pub(super) queue: Vec<u8>,
    /// Length and class of each.
    pub(super) commands: Vec<(u32, u8)>,
    /// Scripts called by their SHA-1.
    pub(super) scripts: Vec<[u8; 40]>,
    pub(super) slot: Slot,
    pub(super) slow: bool,
    /// After WATCH, a transaction is not sent again, because the watch has ended.
    pub(super) is_watched: bool,
}

impl Resend {
    /// Lane of its connection.
    pub(in crate::worker) fn lane(&self) -> Lane {
        if self.slow { Lane::Slow } else { Lane::Main }
    }

    /// Slot of its keys.
    pub(in crate::worker) fn slot(&self) -> Slot {
        self.slot
    }
}

impl Session {
    /// Whether the client is between WATCH and EXEC.
    pub(in crate::worker) fn is_watching(&self) -> bool {
        self.watch.is_some()
    }

    /// Whether the reply to the EXEC of this number has answers of the router, so that it must be whole.
    pub(in crate::worker) fn has_own_answers(&self, exec: u32) -> bool {
        self.under_way.iter().any(|(seq, under_way)| *seq == exec && !under_way.own.is_empty())
    }

    /// Returns the transaction in flight whose EXEC has this number. Those before `first` have been answered. With
    /// redirects, a later transaction may be answered before an earlier one.
    pub(super) fn take_under_way(&mut self, seq: u32, first: u32) -> Option<UnderWay> {
        self.under_way.retain(|(exec, _)| exec.wrapping_sub(first) as i32 >= 0);
        let place = self.under_way.iter().position(|(exec, _)| *exec == seq)?;
        self.under_way.remove(place).map(|(_, under_way)| under_way)
    }

    /// Takes the commands of a transaction in flight, to send it again.
    pub(super) fn take_resend(&mut self, seq: u32) -> Option<Box<Resend>> {
        self.under_way.iter_mut().find(|(exec, _)| *exec == seq)?.1.resend.take()
    }

    /// Keeps the commands of a transaction that is sent again.
    pub(super) fn note_resend(&mut self, seq: u32, transaction: Box<Resend>) {
        if let Some((_, under_way)) = self.under_way.iter_mut().find(|(exec, _)| *exec == seq) {
            under_way.resend = Some(transaction);
        }
    }
}

/// Watched keys of a client.
#[derive(Debug)]
pub(in crate::worker) struct Watch {
    /// Slot of the first key.
    pub(in crate::worker) slot: Slot,
    /// The keys are in several slots.
    pub(super) are_apart: bool,
    pub(super) node: NodeId,
    /// The watched keys: a key may move to another node without its slot.
    pub(in crate::worker) keys: Vec<Box<[u8]>>,
    /// The connection with the watch.
    pub(in crate::worker) link: Handle,
}
