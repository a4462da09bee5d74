//! State of hot copies in a worker, as kept by the command hook. Separate from hits and fills, which need connections and
//! clients.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use switchyard_policy::hot_copies::{Copies, GateId, TurnBudget, WriteHolds, WriteOutcome};
use switchyard_policy::migration::Fingerprinter;
use switchyard_policy::ownership::OwnershipStatus;
use switchyard_policy::topology::NodeId;
use switchyard_resp::translate::Shape;
use tracing::warn;

use crate::hot_copies::{HotCopies, Published, Table};
use crate::slab::Handle;
use crate::tap::Outcome;
use crate::worker::command::CommandSeq;
use crate::worker::turn::Turn;

/// A fill in progress: waiting clients, and the form of its reply.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    pub(super) shape: Shape,
    pub(super) clients: Vec<Handle>,
}

/// Clock of hits. Each hit needs a reading after its command was received and before its reply is passed on. A reading
/// at the start of the turn would be too early: the process can be stopped between that time and a read of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub(super) enum HitClock {
    /// Each hit reads the clock.
    #[default]
    Each,
    /// All commands of the run were received before it began, so its hits share one reading.
    Run(Option<u64>),
}

impl HitClock {
    #[inline]
    pub(super) fn read(&mut self) -> u64 {
        match self {
            Self::Each => exact_us(),
            Self::Run(reading) => *reading.get_or_insert_with(exact_us),
        }
    }
}

/// State of hot copies in a worker.
#[derive(Debug)]
pub(in crate::worker) struct HotCopyStore {
    pub(super) copies: Copies,
    pub(super) holds: WriteHolds,
    pub(super) gates: Arc<Table>,
    pub(super) generation: u64,
    /// Every key that is read becomes cacheable.
    pub(super) all: bool,
    /// There are cacheable keys: writes raise gates.
    pub(super) is_cacheable: bool,
    fingerprints: Fingerprinter,
    pub(super) waiting: BTreeMap<u32, Waiting>,
    /// Budget of hits in this turn.
    pub(super) share: TurnBudget,
    pub(super) clock: HitClock,
    /// Nodes with an overdue fill: clients do not wait for another fill there.
    pub(super) slow_nodes: Vec<NodeId>,
    /// By node number: types whose elements may expire without a notification.
    pub(super) expire: Vec<Elements>,
    /// Nodes with possible unseen writes of others: no fills.
    pub(super) uncacheable_nodes: Vec<NodeId>,
    /// Nodes that have refused PTTL since the last query.
    pub(super) refusing: Vec<NodeId>,
    /// Last published value: oldest generation in flight by node.
    pub(super) drained: Vec<u64>,
    pub(super) found: Vec<GateId>,
    pub(super) sweeps_at_us: u64,
}

impl HotCopyStore {
    pub(in crate::worker) fn new(shared: &HotCopies, fingerprints: Fingerprinter) -> Self {
        let Published { gates, .. } = shared.published();
        Self {
            copies: Copies::default(),
            holds: WriteHolds::default(),
            gates,
            generation: 0,
            all: false,
            is_cacheable: false,
            fingerprints,
            waiting: BTreeMap::new(),
            share: TurnBudget::default(),
            clock: HitClock::default(),
            slow_nodes: Vec::new(),
            expire: Vec::new(),
            uncacheable_nodes: Vec::new(),
            refusing: Vec::new(),
            drained: Vec::new(),
            found: Vec::new(),
            sweeps_at_us: 0,
        }
    }

    /// Whether commands may be answered here.
    #[inline]
    pub(in crate::worker) const fn is_used(&self) -> bool {
        self.is_cacheable || self.all
    }

    /// Starts a run of commands of a client. `now_us`: start of the turn.
    #[inline]
    pub(in crate::worker) fn begin_run(&mut self, now_us: u64) {
        self.share.begin(now_us);
        self.clock = HitClock::Run(None);
    }

    /// Ends the run: commands dispatched later may not have been received yet.
    #[inline]
    pub(in crate::worker) fn end_run(&mut self) {
        self.clock = HitClock::Each;
    }

    /// Whether writes raise gates.
    #[inline]
    pub(in crate::worker) const fn is_cacheable(&self) -> bool {
        self.is_cacheable
    }

    /// Generation of the adopted set, whose gates are raised.
    #[inline]
    pub(in crate::worker) const fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether there are any copies.
    pub(in crate::worker) fn has_copies(&self) -> bool {
        self.copies.sizes().copies > 0
    }

    pub(super) fn hash(&self, key: &[u8]) -> u64 {
        self.fingerprints.of(key).0 as u64
    }

    /// Handles the end of an observed command.
    pub(in crate::worker) fn over(&mut self, end: CommandSeq, outcome: Outcome) {
        let how = if outcome == Outcome::Doubtful { WriteOutcome::Doubtful } else { WriteOutcome::Certain };
        self.holds.over(&*self.gates, end.number(), how);
    }
}

/// Types whose elements may have their own TTL.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(in crate::worker) struct Elements {
    /// Hash fields.
    pub(in crate::worker) of_hash: bool,
    /// Set members.
    pub(in crate::worker) of_set: bool,
}

impl Elements {
    /// Returns the types that a command with this name may read. A key disappears with its last element, also if a read
    /// expires it.
    pub(super) fn read_by(name: &str) -> Self {
        let any = matches!(name, "EXISTS" | "TYPE");
        Self {
            of_hash: any || name.starts_with('H'),
            of_set: any || matches!(name, "SCARD" | "SISMEMBER" | "SMEMBERS" | "SMISMEMBER"),
        }
    }

    /// Whether both have a type in common.
    pub(super) const fn meets(self, other: Self) -> bool {
        self.of_hash && other.of_hash || self.of_set && other.of_set
    }
}

/// Returns the clock for the age of copies, in microseconds: keys continue to age at their nodes while this host is
/// suspended.
pub(super) fn exact_us() -> u64 {
    let time = clock_gettime(ClockId::Boottime);
    time.tv_sec as u64 * 1_000_000 + time.tv_nsec as u64 / 1_000
}

/// Properties of a node, from its handshake.
#[derive(Debug)]
pub(in crate::worker) struct About {
    pub(in crate::worker) expire: Elements,
    /// The command table covers its version.
    pub(in crate::worker) is_covered: bool,
    pub(in crate::worker) run_id: Option<Arc<str>>,
    pub(in crate::worker) standing: OwnershipStatus,
}

/// Disables copies of a node that refuses a required command.
pub(in crate::worker) fn refused(turn: &Turn, node: NodeId, why: &str) {
    if turn.shared().hot.refused(node, Some(why.to_owned())) {
        warn!(node = %turn.node_name(node), reason = why, "no hot copies of this node's keys: it refuses a required command (CLIENT TRACKING, PTTL, CLIENT LIST, ACL SETUSER)");
    }
}
