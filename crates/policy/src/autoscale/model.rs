//! The model policy: the capacity of one node was measured (`switchyard bench capacity`: the rate at which answers
//! become too slow), and the number of nodes follows from the load.
//!
//! Answers are in time as long as no node has more than its capacity, so the objective of latency is in that number. No
//! queueing formula: the measurement has the queue in it.

use super::{Judgement, Knobs, Observed, Reason};

/// A node goes only if the rest have this part of their room free then: the load that asked for it may not come back at
/// once.
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
