//! Two policies that no router can have, as bounds for the others: perfect foresight, and enough nodes for every peak.

use super::load::Clients;
use super::record::{Point, Run};
use super::scenario::{Bound, Scenario};
use super::servers::Queue;
use super::world::World;

/// Simulates a bound with one seed.
pub(super) fn run(scenario: &Scenario, bound: Bound, seed: u64) -> Run {
    match bound {
        Bound::Foresight => foresight(scenario, seed),
        Bound::StaticPeak => World::new(&static_peak(scenario), seed, None).run(),
    }
}

/// Returns the scenario with enough nodes for the highest load without variations, up to the autoscaler's limit of
/// the utilization.
fn static_peak(scenario: &Scenario) -> Scenario {
    let clients = Clients::new(&scenario.load, &[]);
    let slices = (scenario.duration / scenario.slice) as u64;
    let peak = (0..slices).map(|slice| clients.rate(slice as f64 * scenario.slice)).fold(0.0, f64::max);
    let limit = scenario.autoscale.clone().unwrap_or_default().max_cpu;
    let mut fixed = Scenario { autoscale: None, ..scenario.clone() };
    fixed.nodes.count = (peak / (scenario.nodes.service_rate * limit)).ceil() as usize;
    fixed
}

/// The fewest nodes that keep the objective, if the load of the next start-up time is known and any number of nodes
/// changes at once. Computed from the load rather than simulated, because the moves of such changes have no model.
fn foresight(scenario: &Scenario, seed: u64) -> Run {
    let alone = Scenario {
        autoscale: None,
        planner: None,
        copies: None,
        bin: scenario.slice,
        warm_up: 0.0,
        ..scenario.clone()
    };
    let settings = scenario.autoscale.clone().unwrap_or_default();
    let nodes = &scenario.nodes;
    // Utilization whose mean response time is the objective, by M/M/1.
    let service_us = 1e6 / nodes.service_rate;
    let utilization = (1.0 - service_us / (nodes.objective_us - nodes.base_us)).clamp(0.1, 1.0);
    let needed = |load: f64| ((load / (nodes.service_rate * utilization)).ceil() as usize).max(settings.min_nodes);
    let loads = World::new(&alone, seed, None).run().points;
    let lead = (settings.start_up / scenario.slice).ceil() as usize;
    let counts = (0..loads.len()).map(|at| {
        let ahead = &loads[at..loads.len().min(at + lead + 1)];
        ahead.iter().map(|point| needed(point.offered)).max().unwrap_or(settings.min_nodes)
    });
    let bytes = scenario.keys.count * scenario.keys.bytes;
    let (mut points, mut resizes, mut before) = (Vec::new(), 0, None);
    for (load, count) in loads.iter().zip(counts) {
        if load.at <= scenario.warm_up + scenario.slice / 2.0 {
            continue;
        }
        let changed = before.replace(count).map_or(0, |before| count.abs_diff(before));
        resizes += changed as u64;
        let each = load.offered / count as f64 * scenario.slice;
        let served = Queue::new(nodes.service_rate, nodes.queue).serve(each, scenario.slice, 0.0);
        points.push(Point {
            served: load.offered,
            lost: 0.0,
            max_over_mean: 1.0,
            response_us: served.mean_us + nodes.base_us,
            nodes: count as f64,
            moved_bytes: bytes * changed as f64 / (count + changed) as f64,
            ..*load
        });
    }
    Run { points, bin: scenario.slice, objective_us: nodes.objective_us, resizes, ..Run::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario() -> Scenario {
        let mut scenario = Scenario::built_in("weekly").expect("a scenario");
        (scenario.duration, scenario.warm_up, scenario.bin) = (86_400.0, 0.0, 60.0);
        scenario
    }

    #[test]
    fn foresight_has_the_fewest_nodes_that_keep_the_objective() {
        let run = foresight(&scenario(), 1);
        let busy = |point: &Point| point.offered / point.nodes / scenario().nodes.service_rate;
        assert!(run.points.iter().all(|point| point.response_us <= scenario().nodes.objective_us && busy(point) < 1.0));
        // The load of an hour that one node less could not serve.
        let tight = run.points.iter().filter(|point| point.offered / (point.nodes - 1.0) > 50_000.0 * 0.99).count();
        assert!(tight > run.points.len() / 3, "{tight} of {} minutes", run.points.len());
    }

    #[test]
    fn a_static_peak_serves_the_highest_load() {
        // 150,000 requests per second times 1.6, at 60 % of 50,000 per node.
        assert_eq!(static_peak(&scenario()).nodes.count, 8);
        let run = run(&scenario(), Bound::StaticPeak, 1);
        assert!(run.resizes == 0 && run.points.iter().all(|point| point.nodes == 8.0 && point.lost == 0.0));
    }
}
