//! State of a worker and of its clients for keys in transit.

use std::collections::VecDeque;
use std::sync::Arc;

use switchyard_policy::migration::{Key, Waits};
use switchyard_policy::topology::MoveId;

use crate::mover::SharedLeg;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Maximum delay of keyspace events caused by a move, for their distinction from others.
const LATE_EVENTS_US: u64 = 1_000_000;

/// State of a worker for keys in transit.
#[derive(Debug, Default)]
pub(in crate::worker) struct InTransit {
    /// The snapshot for commands whose keys have all moved already; `None` if no slot is moving.
    pub(super) moved: Option<Arc<RoutingSnapshot>>,
    /// The previous snapshot, if slots were in transit in it; and the time until which effects of its moves may arrive,
    /// us.
    before: Option<(Arc<RoutingSnapshot>, u64)>,
    /// Keys that commands of this turn may write in slots whose keys are being listed.
    pub(super) written: Vec<(MoveId, Vec<Key>)>,
    /// Clients that wait for the limit of a source, in their order of arrival, with the move.
    pub(super) for_source: VecDeque<(MoveId, Handle)>,
    /// Time of the last publication of the drain barrier by request, us.
    pub(super) published_us: u64,
}

impl InTransit {
    /// Stores a replaced snapshot: effects of its moves at nodes may still arrive for a while.
    pub(in crate::worker) fn keep_before(&mut self, routing: Arc<RoutingSnapshot>, now_us: u64) {
        if !routing.moves.by_id.is_empty() {
            self.before = Some((routing, now_us + LATE_EVENTS_US));
        }
    }

    pub(in crate::worker) fn forget_before(&mut self, now_us: u64) {
        self.before.take_if(|(_, until_us)| *until_us < now_us);
    }

    /// Returns the previous snapshot, as long as effects of its moves may arrive.
    pub(in crate::worker) fn before(&self, now_us: u64) -> Option<&RoutingSnapshot> {
        self.before.as_ref().filter(|(_, until_us)| now_us < *until_us).map(|(routing, _)| &**routing)
    }
}

/// A client's command that waits for keys, or for the limit of a source.
#[derive(Debug)]
pub(in crate::worker) struct Moving {
    pub(super) since_us: u64,
    pub(super) move_id: Option<MoveId>,
    /// If it waits for the limit of a source: whether it may be sent there now.
    pub(super) turn_at_source: Option<bool>,
    pub(super) waits: Waits<SharedLeg>,
    /// Error for the client, once the wait has ended.
    pub(super) refusal: Option<Arc<str>>,
}

impl Moving {
    pub(super) fn is_over(&self) -> bool {
        self.refusal.is_some() || self.waits.is_over()
    }
}
