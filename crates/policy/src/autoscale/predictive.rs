//! The predictive policy (P-Store, SIGMOD 2018): the sequence of changes of minimum cost for the next hours, by dynamic
//! programming over the forecast, the capacity of a node and the durations of changes.
//!
//! Cost is the time that nodes run. A minute with too few nodes costs more than any number of nodes, and a change has a
//! price, so that noise does not move data. Only the first change is started, and each minute has a new plan: later
//! changes are planned with a newer forecast.
//!
//! Differences from the paper: a change is one node (decision 24), so it has a duration instead of a number of parallel
//! moves. A joining node counts only when it has its share, rather than by the part that it has.

use super::advice::{Changes, Present, Step};
use super::forecast::Forecast;
use super::history::MINUTE;
use super::{Outlook, minimum};

/// Length of the plan, in minutes. Long enough for tens of changes in sequence.
const HORIZON: usize = 240;

/// Price of a missing node for a minute, in minutes of a node: above the cost of any plan with one node more.
const MISSING: u64 = 1000;

/// Price of a change, in minutes of a node: a node that is not needed for a shorter time stays.
const CHANGE: u64 = 20;

/// Returns the first step of the cheapest plan, and the outlook that explains it.
pub(super) fn advise(forecast: &Forecast, present: &Present<'_>) -> (Step, Outlook) {
    let (count, now) = (present.count(), present.minute());
    let deviation = forecast.deviation(present.history, now);
    let change = present.changes.startup as u64;
    let loads: Vec<f64> =
        (0..HORIZON as u64).map(|lead| forecast.upper(now, deviation.unwrap_or(0.0), lead, change)).collect();
    let need = |(lead, load): (u64, &f64)| {
        let scheduled = minimum(present.knobs, present.observed.now.wall + lead * MINUTE).0;
        present.nodes_for(load / present.room).max(scheduled).min(present.knobs.nodes_max)
    };
    let needs: Vec<usize> = (0..).zip(&loads).map(need).collect();
    let step = match first_step(count, &needs, &present.changes) {
        // Without telemetry, nothing proves that the load follows the forecast.
        Step::Remove if deviation.is_none() => Step::Stay,
        step => step,
    };
    let enough = if step == Step::Remove { count - 1 } else { count };
    let until = needs.iter().position(|need| *need > enough).unwrap_or(HORIZON);
    let minutes = if step == Step::Add && until < HORIZON { until..until + 1 } else { 0..until.max(1) };
    let outlook = Outlook {
        requests: loads[minutes.clone()].iter().copied().fold(0.0, f64::max),
        nodes: needs[minutes.clone()].iter().copied().max().unwrap_or(count),
        from: minutes.start as u64 * MINUTE,
        to: minutes.end as u64 * MINUTE,
        ..present.outlook()
    };
    (step, outlook)
}

/// Expected need of nodes at `lead` minutes from now, with the margin. For [`Coverage`](super::advice::Coverage).
pub(super) fn predicted(forecast: &Forecast, present: &Present<'_>, lead: u64) -> Option<f64> {
    let deviation = forecast.deviation(present.history, present.minute())?;
    Some(forecast.upper(present.minute(), deviation, lead, present.changes.startup as u64) / present.room)
}

/// First step of the cheapest plan. `needs`: nodes needed in each minute from now.
fn first_step(count: usize, needs: &[usize], changes: &Changes) -> Step {
    let horizon = needs.len();
    // Numbers of nodes that a plan can reach, and that serve a need.
    let reach = horizon / changes.after_add.min(changes.after_remove).max(1) + 1;
    let (lowest, highest) = needs.iter().fold((count, count), |(low, high), need| (low.min(*need), high.max(*need)));
    let least = count.saturating_sub(reach).max(lowest).max(1);
    let most = (count + reach).min(highest);
    let numbers = least..=most;
    let missing = Missing::new(needs, least, most);
    let width = numbers.clone().count();
    // Cost of the cheapest plan from each minute on, by number of nodes.
    let mut costs = vec![vec![0_u64; width]; horizon + 1];
    let options = |costs: &[Vec<u64>], at: usize, nodes: usize| -> [Option<u64>; 3] {
        let until = |minutes: usize| (at + minutes).min(horizon);
        let rest = |at: usize, nodes: usize| costs[at][nodes - least];
        let run = |nodes: usize, from: usize, to: usize| nodes as u64 * (to - from) as u64;
        let stay = run(nodes, at, at + 1) + missing.cost(nodes, at, at + 1) + rest(at + 1, nodes);
        let add = (nodes < most).then(|| {
            // The new node runs from the start of the change, and serves at its end.
            let (serves, next) = (until(changes.startup), until(changes.after_add));
            let short = missing.cost(nodes, at, serves) + missing.cost(nodes + 1, serves, next);
            CHANGE + run(nodes + 1, at, next) + short + rest(next, nodes + 1)
        });
        let remove = (nodes > least).then(|| {
            // The node serves less from the start of the change, and runs until its end.
            let (ends, next) = (until(changes.drain), until(changes.after_remove));
            let runs = run(nodes, at, ends) + run(nodes - 1, ends, next);
            CHANGE + runs + missing.cost(nodes - 1, at, next) + rest(next, nodes - 1)
        });
        [Some(stay), add, remove]
    };
    for at in (0..horizon).rev() {
        for nodes in numbers.clone() {
            costs[at][nodes - least] = options(&costs, at, nodes).into_iter().flatten().min().unwrap_or(0);
        }
    }
    let [stay, add, remove] = if horizon > 0 { options(&costs, 0, count) } else { [Some(0), None, None] };
    let is_best = |cost: Option<u64>, others: [Option<u64>; 2]| {
        cost.is_some_and(|cost| others.into_iter().flatten().all(|other| cost < other))
    };
    match () {
        () if is_best(add, [stay, remove]) => Step::Add,
        () if is_best(remove, [stay, add]) => Step::Remove,
        () => Step::Stay,
    }
}

/// Cost of missing nodes, as sums from the first minute, by number of nodes.
struct Missing {
    least: usize,
    sums: Vec<Vec<u64>>,
}

impl Missing {
    fn new(needs: &[usize], least: usize, most: usize) -> Self {
        let sums = |nodes: usize| {
            let costs = needs.iter().scan(0, |sum, need| {
                *sum += need.saturating_sub(nodes) as u64 * MISSING;
                Some(*sum)
            });
            [0].into_iter().chain(costs).collect()
        };
        Self { least, sums: (least..=most).map(sums).collect() }
    }

    fn cost(&self, nodes: usize, from: usize, to: usize) -> u64 {
        let sums = &self.sums[nodes - self.least];
        sums[to] - sums[from]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Durations in minutes.
    fn changes(startup: usize, drain: usize, cooldown: usize) -> Changes {
        Changes { startup, drain, after_add: startup + cooldown, after_remove: drain + cooldown }
    }

    /// Follows the plan for these needs, with a new plan each minute. Returns the nodes that serve in each minute, and
    /// the number of changes.
    fn follow(mut count: usize, needs: &[usize], changes: &Changes) -> (Vec<usize>, usize) {
        let (mut serving, mut started) = (Vec::new(), 0);
        let mut at = 0;
        while at < needs.len() {
            let ahead = &needs[at..needs.len().min(at + HORIZON)];
            let step = first_step(count, ahead, changes);
            started += usize::from(step != Step::Stay);
            let (next, during) = match step {
                Step::Stay => (count, vec![count]),
                Step::Add => {
                    let (joining, paused) = (changes.startup, changes.after_add - changes.startup);
                    (count + 1, [vec![count; joining], vec![count + 1; paused]].concat())
                }
                Step::Remove => (count - 1, vec![count - 1; changes.after_remove]),
            };
            count = next;
            at += during.len();
            serving.extend(during);
        }
        serving.truncate(needs.len());
        (serving, started)
    }

    #[test]
    fn nodes_are_added_before_a_ramp_that_is_steeper_than_changes() {
        // A node takes ten minutes, and the ramp needs one every five: the plan must start early.
        let needs: Vec<usize> = (0..600_usize).map(|minute| 4 + (minute.saturating_sub(120) / 5).min(12)).collect();
        let (serving, _) = follow(4, &needs, &changes(10, 10, 0));
        assert!(serving.iter().zip(&needs).all(|(nodes, need)| nodes >= need), "{serving:?}");
        // And not earlier than necessary: the twelfth node is needed in minute 180, so the first one starts in minute 60.
        assert_eq!(serving.iter().position(|nodes| *nodes > 4), Some(70));
    }

    #[test]
    fn a_short_dip_removes_no_node_and_a_long_one_does() {
        let dip = |minutes: usize| [vec![6; 60], vec![4; minutes], vec![6; 240]].concat();
        assert_eq!(follow(6, &dip(20), &changes(4, 4, 1)).1, 0);
        let (serving, started) = follow(6, &dip(180), &changes(4, 4, 1));
        assert_eq!(started, 4, "two nodes leave and return");
        assert!(serving.iter().zip(dip(180)).all(|(nodes, need)| *nodes >= need));
    }

    #[test]
    fn a_plan_without_a_way_out_adds_at_once() {
        assert_eq!(first_step(2, &[9; 240], &changes(5, 5, 1)), Step::Add);
        assert_eq!(first_step(2, &[], &changes(5, 5, 1)), Step::Stay);
        assert_eq!(first_step(1, &[1; 240], &changes(5, 5, 1)), Step::Stay, "the last node stays");
    }

    proptest! {
        /// If changes can be fast enough, there are never too few nodes, and rarely more than necessary.
        #[test]
        fn no_minute_has_too_few_nodes(
            steps in prop::collection::vec((0..3_usize, 30..90_usize), 2..10),
            startup in 1..12_usize,
            drain in 1..12_usize,
            cooldown in 0..3_usize,
        ) {
            let mut needs = vec![5; 60];
            for (way, minutes) in steps {
                let last = *needs.last().expect("not empty");
                needs.extend(vec![(last + way).saturating_sub(1).max(1); minutes]);
            }
            let (serving, _) = follow(5, &needs, &changes(startup, drain, cooldown));
            for (minute, (nodes, need)) in serving.iter().zip(&needs).enumerate() {
                prop_assert!(nodes >= need, "{nodes} of {need} nodes in minute {minute}");
            }
            let (run, needed) = (serving.iter().sum::<usize>(), needs.iter().sum::<usize>());
            let settled = needs.len() * 2;
            prop_assert!(run <= needed + settled, "{run} minutes of nodes for {needed}");
        }
    }
}
