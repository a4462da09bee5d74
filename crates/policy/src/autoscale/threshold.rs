//! The threshold policy: adds a node if mean response time, CPU, or memory of the fleet exceeds a limit; removes one if
//! all would stay far below with one node fewer.
//!
//! The scaler of the report uses only the response time and never removes. CPU indicates load before replies become
//! slow, and memory fills without any load. Removal is judged by the load of the remaining nodes, so that it never
//! causes an addition.

use super::{Judgement, Knobs, Observed, Reason};

pub(super) fn judge(observed: &Observed, knobs: &Knobs) -> Judgement {
    let nodes = observed.nodes.len().max(1) as f64;
    let (mean_us, cpu, memory) = (observed.mean_us(), observed.cpu(), observed.memory());
    if mean_us.is_none() && cpu.is_none() && memory.is_none() {
        return Judgement::Fine(vec![Reason::Unmeasured]);
    }
    let part = |(used, most): (u64, u64)| used as f64 / most as f64;
    let mut above = Vec::new();
    above.extend(mean_us.filter(|mean| *mean > knobs.response_us).map(|mean| Reason::Slow(mean, knobs.response_us)));
    above.extend(cpu.map(|cpu| cpu / nodes).filter(|cpu| *cpu > knobs.cpu).map(|cpu| Reason::Busy(cpu, knobs.cpu)));
    above.extend(memory.map(part).filter(|part| *part > knobs.memory).map(|part| Reason::Full(part, knobs.memory)));
    if !above.is_empty() {
        return Judgement::TooMuch(above);
    }
    // The remaining nodes would share the load. The increase of response times is unknown, so they are compared
    // unchanged.
    let grows = nodes / (nodes - 1.0).max(1.0);
    let is_calm = mean_us.is_some_and(|mean| mean < knobs.response_us * knobs.calm)
        && cpu.is_none_or(|cpu| cpu / nodes * grows < knobs.cpu * knobs.calm)
        && memory.is_none_or(|memory| part(memory) * grows < knobs.memory * knobs.calm);
    match nodes > 1.0 && is_calm {
        true => Judgement::TooLittle(vec![Reason::Calm(knobs.calm)]),
        false => Judgement::Fine(vec![Reason::Fine]),
    }
}
