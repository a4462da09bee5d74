//! The model policy: derives the number of nodes from the load and the measured capacity of one node
//! (`switchyard bench capacity`: the rate at which replies become too slow).
//!
//! Replies are in time while no node exceeds its capacity, so the capacity implies the latency target. Without a
//! queueing formula, because the measurement includes queueing.

use super::{Judgement, Knobs, Observed, Reason};

/// Fraction of their capacity that the other nodes must have free after a removal, so that an addition does not follow
/// immediately.
const SPARE: f64 = 0.1;

pub(super) fn judge(observed: &Observed, knobs: &Knobs) -> Judgement {
    let Some(capacity) = knobs.capacity.filter(|capacity| *capacity > 0.0) else {
        return Judgement::Fine(vec![Reason::NoCapacity]);
    };
    let Some(requests) = observed.requests() else {
        return Judgement::Fine(vec![Reason::Unmeasured]);
    };
    let (room, count) = (capacity * (1.0 - knobs.headroom.clamp(0.0, 0.9)), observed.nodes.len());
    let needed = |room: f64| ((requests / room).ceil() as usize).max(1);
    let (now, spare) = (needed(room), needed(room * (1.0 - SPARE)));
    match () {
        () if now > count => Judgement::TooMuch(vec![Reason::Short(requests, now)]),
        () if spare < count => Judgement::TooLittle(vec![Reason::Ample(requests, spare)]),
        () => Judgement::Fine(vec![Reason::Fine]),
    }
}
