//! Tests of the policies that look ahead, with a history of three weeks. The simulator judges them
//! (`switchyard-lab sim fleet six-weeks`).

use std::f64::consts::TAU;

use switchyard_policy::autoscale::{
    Advice, Advisor, HISTORY_DAYS, Knobs, Node, Now, Observed, Outlook, Policy, Progress, Reason, Step,
};
use switchyard_policy::topology::NodeId;

const MINUTE: u64 = 60_000;
const HOUR: u64 = 60;
const DAY: u64 = 24 * HOUR;
const WEEK: u64 = 7 * DAY;

/// Start of the history, a Monday, in minutes since 1970; and its end.
const START: u64 = 20_773 * DAY;
const END: u64 = START + 3 * WEEK;

/// Requests per second that a node should serve.
const ROOM: f64 = 8000.0;

/// Time to add a node, in minutes.
const STARTUP: u64 = 15;

/// Nodes during the history.
const NODES: usize = 100;

const AHEAD: [Policy; 2] = [Policy::Learned, Policy::Predictive];

fn knobs(policy: Policy) -> Knobs {
    Knobs { policy, nodes_max: 128, capacity: Some(ROOM / 0.8), headroom: 0.2, ..Knobs::default() }
}

/// Uniform from 0 to 1, the same in each run.
fn mixed(number: u64) -> f64 {
    ((number ^ 0x9e37_79b9).wrapping_mul(0x2545_f491_4f6c_dd1d) >> 40) as f64 / f64::from(1 << 24)
}

/// Requests per second with a peak in the afternoon, a quiet weekend, and noise within 3 percent.
fn load(minute: u64) -> f64 {
    let hour = (minute % DAY) as f64 / HOUR as f64;
    let bump = ((1.0 + (TAU * (hour - 13.0) / 24.0).cos()) / 2.0).powi(3);
    let weekend = if (minute - START) / DAY % 7 >= 5 { 0.75 } else { 1.0 };
    let noise = (mixed(minute) - 0.5) * 0.06;
    250_000.0 * weekend * (0.32 + 2.18 * bump) * (1.0 + noise)
}

/// Observation of a number of nodes. `load`: `None` without telemetry.
fn observed(minute: u64, load: Option<f64>, nodes: usize) -> Observed {
    let each = load.map(|load| load / nodes as f64);
    let node = |id| Node {
        id: NodeId(id),
        requests: each,
        mean_us: each.map(|_| 200.0),
        cpu: each.map(|each| each / 10_000.0),
        memory: Some((1 << 20, 100 << 20)),
        is_up: true,
        may_go: true,
    };
    let at = minute * MINUTE;
    Observed { now: Now { run: at, wall: at }, nodes: (0..nodes as u16).map(node).collect() }
}

/// Returns an advisor after three weeks, in which one node was added.
fn experienced() -> Advisor {
    let mut advisor = Advisor::default();
    for minute in START..END {
        let (progress, nodes) = match minute - START {
            0..HOUR => (Progress::Idle, NODES - 1),
            passed if passed < HOUR + STARTUP => (Progress::Adding, NODES - 1),
            _ => (Progress::Idle, NODES),
        };
        advisor.observe(&observed(minute, Some(load(minute)), nodes), progress);
    }
    // Ends the last minute.
    advisor.observe(&observed(END, None, NODES), Progress::Idle);
    advisor
}

/// Advice for the load of a minute, observed with this number of nodes.
fn advise(advisor: &mut Advisor, policy: Policy, minute: u64, load: Option<f64>, nodes: usize) -> Advice {
    let now = observed(minute, load, nodes);
    advisor.observe(&now, Progress::Idle);
    advisor.advise(&now, &knobs(policy)).expect("the policy looks ahead")
}

#[test]
fn a_rise_is_met_by_a_node_and_a_fall_is_not() {
    for policy in AHEAD {
        let mut advisor = experienced();
        // Nodes for the present load with 8 % of reserve, on the steepest part of the morning and of the evening.
        let mut advice_at = |hour: u64| {
            let from = END + hour * HOUR;
            let nodes = (load(from) * 1.08 / ROOM).ceil() as usize;
            let at = |advisor: &mut Advisor, minute| advise(advisor, policy, minute, Some(load(minute)), nodes);
            for minute in END + (hour - 1) * HOUR..from {
                at(&mut advisor, minute);
            }
            (at(&mut advisor, from), nodes)
        };
        let (rise, nodes) = advice_at(9);
        let Advice::Step(Step::Add, Reason::Learned(outlook) | Reason::Forecast(outlook)) = rise else {
            panic!("{policy:?} in the morning: {rise:?}");
        };
        let Outlook { requests, startup, confidence, .. } = outlook;
        assert!(outlook.nodes > nodes && requests > load(END + 9 * HOUR), "{policy:?}: {outlook:?}");
        assert!(startup == STARTUP * MINUTE && (0.9..=1.0).contains(&confidence), "{policy:?}: {outlook:?}");
        let (fall, _) = advice_at(17);
        assert!(!matches!(fall, Advice::Step(Step::Add, _)), "{policy:?} in the evening: {fall:?}");
    }
}

#[test]
fn a_restart_continues_with_the_same_advice() {
    let before = experienced();
    // The documents of a day replace those of an earlier one.
    let mut documents = vec![None; HISTORY_DAYS as usize];
    before.unsaved().for_each(|(day, bytes)| documents[(day % HISTORY_DAYS) as usize] = Some(bytes));
    let size: u64 = documents.iter().flatten().map(|bytes| bytes.len() as u64).sum();
    assert!(size <= 17 * 3 * WEEK, "{size} bytes for three weeks");
    for policy in AHEAD {
        let (mut restarted, illegible) = Advisor::restore(documents.iter().flatten().cloned(), END * MINUTE);
        assert_eq!(illegible, 0);
        let mut running = experienced();
        let advice = advise(&mut running, policy, END, Some(load(END)), NODES);
        assert!(matches!(advice, Advice::Step(..)), "{policy:?}: {advice:?}");
        assert_eq!(advise(&mut restarted, policy, END, Some(load(END)), NODES), advice, "{policy:?}");
    }
}

#[test]
fn a_load_that_leaves_its_pattern_is_left_to_threshold() {
    for policy in AHEAD {
        let mut advisor = experienced();
        let mut unreliable = |minutes: std::ops::Range<u64>, load: &dyn Fn(u64) -> f64| {
            let advices = minutes.map(|minute| advise(&mut advisor, policy, minute, Some(load(minute)), NODES));
            let is_unreliable =
                |advice: &Advice| matches!(advice, Advice::Unavailable(Reason::Unreliable(share)) if *share < 0.7);
            advices.filter(is_unreliable).count()
        };
        // For a day, the load jumps every eleven minutes.
        let wild = |minute: u64| 50_000.0 * (1.0 + 9.0 * mixed(minute / 11));
        assert!(unreliable(END..END + DAY, &wild) > 0, "{policy:?} is confident");
        // Afterwards it recovers.
        unreliable(END + DAY..END + 2 * DAY, &load);
        assert_eq!(unreliable(END + 2 * DAY..END + 3 * DAY, &load), 0, "{policy:?}");
    }
}

#[test]
fn lost_telemetry_removes_no_node() {
    for policy in AHEAD {
        let mut advisor = experienced();
        // From the peak on, the load falls, and a removal is advised with telemetry.
        let (peak, mut removed) = (END + 13 * HOUR, 0);
        for minute in peak - HOUR..peak + 6 * HOUR {
            let known = (minute < peak).then(|| load(minute));
            let advice = advise(&mut advisor, policy, minute, known, NODES);
            let is_removal = matches!(advice, Advice::Step(Step::Remove, _));
            removed += u32::from(is_removal);
            assert!(!is_removal || minute < peak + HOUR / 4, "{policy:?}: {advice:?}");
        }
        let minute = peak + 6 * HOUR;
        (minute..minute + HOUR / 4).for_each(|minute| {
            let advice = advise(&mut advisor, policy, minute, Some(load(minute)), NODES);
            removed += u32::from(matches!(advice, Advice::Step(Step::Remove, _)));
        });
        assert!(removed > 0, "{policy:?} never advises a removal");
    }
}
