//! Plans moves of slots by load: which slots should leave a busy member. The plan is advice, unless the mode is `act`.
//!
//! The load of slots comes from `CLUSTER SLOT-STATS` (Valkey 8), which counts the commands of all clients. Otherwise it
//! comes from this router's sample, which has its own clients only.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::thread::sleep;
use std::time::{Duration, Instant};

use switchyard_policy::cluster::reshard::Survey;
use switchyard_policy::load::{Expected, SlotLoad};
use switchyard_policy::planner::{Knobs, Node, Plan, Policy, Previous, Problem, SlotAt, State, StepSubject, solve};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot};
use tracing::{info, warn};

use super::members::{Members, topology_of};
use super::mover::Shift;
use super::moves::{ClusterMoves, check_options};
use crate::admin::{DecisionReport, MoveOptionsRequest, OperationError, PlanReport, PlanRequest, conflict, invalid};
use crate::loads::field;
use crate::nodes::Answer;
use crate::planner::{Mode, PlannerConfig, Words};

/// Time between the two readings of a rate.
const BETWEEN: Duration = Duration::from_secs(1);

/// Interval of plans in the mode `act`.
pub(super) const PERIOD: Duration = Duration::from_secs(10);

/// Time for which a member must be over its limit before the planner acts, by default. A migration costs more than a
/// move between standalone nodes, because the servers serve nothing while they send keys.
const WINDOW: Duration = Duration::from_secs(60);

/// Number of slots of a member that are considered, the busiest first.
const SLOTS: usize = 1024;

/// State of the planner in the mode `act`.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    /// First plan with some member over its limit, and the members that have been so in all plans since.
    since: Option<(Instant, Vec<String>)>,
}

impl Evidence {
    /// Adds the members that a plan relieves. Returns the members that all plans of the last `window` would relieve.
    fn add(&mut self, now: Instant, sources: Vec<String>, window: Duration) -> Vec<String> {
        let (since, lasting) = match self.since.take() {
            Some((since, before)) => (since, before.into_iter().filter(|id| sources.contains(id)).collect()),
            None => (now, sources),
        };
        if lasting.is_empty() || now.saturating_duration_since(since) >= window {
            return lasting;
        }
        self.since = Some((since, lasting));
        Vec::new()
    }
}

/// Measured load of one member's server.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct ServerLoad {
    commands: f64,
    memory: u64,
}

/// Load and keys of a slot, according to its owner.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct SlotStats {
    cpu_us: Option<u64>,
    keys: u64,
}

/// A plan, and the members by number.
struct Solved {
    ids: Vec<String>,
    names: Vec<String>,
    plan: Plan,
}

impl Solved {
    fn report(&self) -> DecisionReport {
        let name = |node: NodeId| self.names.get(node.index()).cloned().unwrap_or_default();
        Words { name: &name, named: false }.plan(&self.plan, Policy::Switchyard)
    }

    /// Moves of the plan: all slots with the same source and target together.
    fn shifts(&self) -> Vec<Shift> {
        let mut slots: BTreeMap<(NodeId, NodeId), Vec<Slot>> = BTreeMap::new();
        for step in &self.plan.steps {
            if let StepSubject::Slots(some) = &step.what {
                slots.entry((step.from, step.to)).or_default().extend(some);
            }
        }
        let id = |node: NodeId| self.ids.get(node.index()).cloned();
        let shift = |((from, to), mut slots): ((NodeId, NodeId), Vec<Slot>)| {
            slots.sort_unstable();
            Some(Shift { source: id(from)?, target: id(to)?, slots })
        };
        slots.into_iter().filter_map(shift).collect()
    }
}

impl ClusterMoves {
    /// Adopts the planner's settings.
    pub fn tune_planner(&self, config: &PlannerConfig) {
        *self.planner.write().unwrap_or_else(PoisonError::into_inner) = config.clone();
    }

    fn planner_config(&self) -> PlannerConfig {
        self.planner.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Makes a plan, and starts its moves if requested.
    pub(super) fn plan(&self, request: &PlanRequest) -> Result<DecisionReport, OperationError> {
        if request.undo.is_some() {
            return Err(invalid(
                "a router in front of a cluster stores no decisions: move the slots back with `switchyard move`",
            ));
        }
        if request.policy.as_deref().is_some_and(|policy| policy != "switchyard") {
            return Err(invalid("policy: other policies move single keys, which cannot leave their slot in a cluster"));
        }
        let times = request.load.unwrap_or(1.0);
        if !(0.0..=1000.0).contains(&times) {
            return Err(invalid(format!("load: {times} is not between 0 and 1000")));
        }
        let _one = self.ordering();
        let mut members = self.members();
        let survey = self.agreed(&mut members)?;
        let solved = self.solved(&mut members, &survey, times, request.without.as_deref(), None)?;
        let shifts = solved.shifts();
        if !request.apply {
            let mut report = solved.report();
            if !shifts.is_empty() {
                match self.order(&mut members, &survey, shifts, true, Vec::new()) {
                    Ok(planned) => report.advice.extend(planned.notes),
                    Err(refused) => report.held.push(format!("nothing can move now: {}", refused.text())),
                }
            }
            return Ok(report);
        }
        if shifts.is_empty() {
            return Err(conflict(format!("nothing to do: {}", solved.report().message)));
        }
        let applied = self.order(&mut members, &survey, shifts, false, Vec::new())?;
        Ok(DecisionReport { applied: Some(applied), ..solved.report() })
    }

    /// Moves slots from members above their share of the load to members below.
    pub(super) fn balance_by_load(
        &self,
        how: &MoveOptionsRequest,
        dry_run: bool,
    ) -> Result<PlanReport, OperationError> {
        check_options(how)?;
        let _one = self.ordering();
        let mut members = self.members();
        let survey = self.agreed(&mut members)?;
        let solved = self.solved(&mut members, &survey, 1.0, None, None)?;
        let notes = vec![solved.report().message];
        self.order(&mut members, &survey, solved.shifts(), dry_run, notes)
    }

    /// Plans in the mode `act`, and starts the moves once a member has been over its limit for long enough.
    pub(super) fn plan_step(&self, evidence: &mut Evidence) {
        let config = self.planner_config();
        if config.mode != Mode::On || self.has_moves() {
            *evidence = Evidence::default();
            return;
        }
        let _one = self.ordering();
        let mut members = self.members();
        let survey = match self.agreed(&mut members) {
            Ok(survey) => survey,
            Err(_) => return *evidence = Evidence::default(),
        };
        let solved = match self.solved(&mut members, &survey, 1.0, None, Some(&config)) {
            Ok(solved) => solved,
            Err(_) => return *evidence = Evidence::default(),
        };
        let shifts = solved.shifts();
        let sources: Vec<String> = shifts.iter().map(|shift| shift.source.clone()).collect();
        let lasting = evidence.add(Instant::now(), sources, config.window.unwrap_or(WINDOW));
        if lasting.is_empty() {
            return;
        }
        let shifts = shifts.into_iter().filter(|shift| lasting.contains(&shift.source)).collect();
        let message = solved.report().message;
        match self.order(&mut members, &survey, shifts, false, Vec::new()) {
            Ok(plan) => info!(moves = plan.moves.len(), reason = message, "the planner moves slots"),
            Err(refused) => warn!(plan = message, reason = refused.text(), "the planner cannot move slots"),
        }
    }

    /// Measures the load, and makes a plan. `config`: bounds of the planner's own moves.
    fn solved(
        &self,
        members: &mut Members,
        survey: &Survey,
        times: f64,
        without: Option<&str>,
        config: Option<&PlannerConfig>,
    ) -> Result<Solved, OperationError> {
        let (topology, ids) = topology_of(members, survey).map_err(conflict)?;
        let names: Vec<String> = ids.iter().map(|id| members.name(id)).collect();
        let leaving = match without {
            None => None,
            Some(name) => Some(names.iter().position(|known| known == name).ok_or_else(|| {
                invalid(format!("without: the cluster has no primary {name:?}; it has {}", names.join(", ")))
            })?),
        };
        let servers: Vec<ServerLoad> = ids.iter().map(|id| server_load(members, id)).collect();
        let (rates, keys) = self.slot_loads(members, &ids, &servers);
        let settings = self.planner_config();
        let mut problem = Problem {
            knobs: Knobs {
                policy: Policy::Switchyard,
                headroom: settings.headroom as f64 / 100.0,
                least_set: settings.least.map(|least| least as f64),
                keys_max: 0,
                bytes_max: config.map_or(u64::MAX, |config| config.bytes_per_hour as u64),
            },
            ..Problem::default()
        };
        let numbered = |number: usize| u16::try_from(number).map(NodeId);
        let mut of_members: Vec<Vec<Slot>> = vec![Vec::new(); ids.len()];
        for slot in topology.slots() {
            if let Some(slots) = of_members.get_mut(topology.owner(slot).index()) {
                slots.push(slot);
            }
        }
        let rate = |slot: &Slot| rates.get(slot.index()).copied().unwrap_or_default() * times;
        for (number, slots) in of_members.iter().enumerate() {
            let Ok(id) = numbered(number) else { break };
            let load = slots.iter().map(rate).sum();
            let is_leaving = leaving == Some(number);
            problem.nodes.push(Node {
                id,
                load,
                lasting: load,
                weight: u32::from(!is_leaving),
                capacity: None,
                memory: None,
                keys: slots.iter().filter_map(|slot| keys.get(slot.index())).sum(),
                state: if is_leaving { State::Leaving } else { State::Ready },
            });
        }
        let mean = problem.nodes.iter().map(|node| node.load).sum::<f64>() / problem.nodes.len().max(1) as f64;
        for (number, slots) in of_members.into_iter().enumerate() {
            let Some(node) = problem.nodes.get(number) else { break };
            let is_leaving = node.state == State::Leaving;
            if node.load <= mean && !is_leaving {
                continue;
            }
            let all_keys = node.keys.max(1) as f64;
            let memory = servers.get(number).map_or(0, |server| server.memory) as f64;
            let bytes = |slot: Slot| (memory * keys.get(slot.index()).copied().unwrap_or(0) as f64 / all_keys) as u64;
            let at = node.id;
            let mut own: Vec<SlotAt> = slots
                .into_iter()
                .map(|slot| SlotAt { slot, at, load: rate(&slot), bytes: bytes(slot) })
                .filter(|slot| is_leaving || slot.load > 0.0)
                .collect();
            if !is_leaving {
                own.sort_by(|one, other| other.load.total_cmp(&one.load).then(one.slot.cmp(&other.slot)));
                own.truncate(SLOTS);
            }
            problem.slots.extend(own);
        }
        problem.slots.sort_unstable_by_key(|slot| slot.slot);
        let plan = solve(&problem, &Previous::default());
        Ok(Solved { ids, names, plan })
    }

    /// Load of each slot in requests per second, and its number of keys (0 if the members do not show it).
    fn slot_loads(&self, members: &mut Members, ids: &[String], servers: &[ServerLoad]) -> (Vec<f64>, Vec<u64>) {
        let before = slot_stats(members, ids);
        let keys =
            before.as_ref().map_or_else(|| vec![0; SLOT_COUNT], |stats| stats.iter().map(|of| of.keys).collect());
        let has_cpu = before.as_ref().is_some_and(|stats| stats.iter().any(|of| of.cpu_us.is_some()));
        let after = if has_cpu {
            sleep(BETWEEN);
            slot_stats(members, ids)
        } else {
            None
        };
        let commands = servers.iter().map(|server| server.commands).sum();
        let by_cpu = before.zip(after).and_then(|(before, after)| by_cpu(&before, &after, commands));
        (by_cpu.unwrap_or_else(|| sampled(&self.slot_sample())), keys)
    }
}

/// Distributes the commands of all members over the slots by the CPU time that each used between two readings. `None` if
/// no slot used any.
fn by_cpu(before: &[SlotStats], after: &[SlotStats], commands: f64) -> Option<Vec<f64>> {
    let used: Vec<f64> = before
        .iter()
        .zip(after)
        .map(|(before, after)| match (before.cpu_us, after.cpu_us) {
            (Some(before), Some(after)) => after.saturating_sub(before) as f64,
            _ => 0.0,
        })
        .collect();
    let all: f64 = used.iter().sum();
    (all > 0.0 && commands > 0.0).then(|| used.into_iter().map(|used| used / all * commands).collect())
}

/// Expected loads from the router's sample.
fn sampled(loads: &[SlotLoad]) -> Vec<f64> {
    let loads = &loads[..loads.len().min(SLOT_COUNT)];
    let expected = Expected::of(loads.iter().map(|slot| (slot.commands, slot.noise)));
    let all: f64 = loads.iter().map(|slot| slot.commands).sum();
    let promised: f64 = loads.iter().map(|slot| expected.load(slot.commands)).sum();
    let scale = (all / promised.max(1e-9)).min(1.0);
    loads.iter().map(|slot| expected.load(slot.commands) * scale).collect()
}

fn server_load(members: &mut Members, id: &str) -> ServerLoad {
    let info = members.call(id, &["INFO"]).ok().filter(|answer| answer.error().is_none());
    let info = info.map(|answer| answer.text()).unwrap_or_default();
    let number = |name: &str| field(&info, name).and_then(|value| value.parse::<u64>().ok()).unwrap_or(0);
    ServerLoad { commands: number("instantaneous_ops_per_sec") as f64, memory: number("used_memory") }
}

/// Reads `CLUSTER SLOT-STATS` of all members. `None` if one of them does not have it.
fn slot_stats(members: &mut Members, ids: &[String]) -> Option<Vec<SlotStats>> {
    let mut all = vec![SlotStats::default(); SLOT_COUNT];
    for id in ids {
        let last = (SLOT_COUNT - 1).to_string();
        let answer = members.call(id, &["CLUSTER", "SLOT-STATS", "SLOTSRANGE", "0", &last]).ok()?;
        if answer.error().is_some() {
            return None;
        }
        for entry in answer.items() {
            let (slot, stats) = slot_stats_of(&entry)?;
            *all.get_mut(slot.index())? = stats;
        }
    }
    Some(all)
}

/// Parses an entry: a slot, and names with numbers by turns.
fn slot_stats_of(entry: &Answer) -> Option<(Slot, SlotStats)> {
    let parts = entry.items();
    let slot = parts.first()?.number().and_then(|slot| u16::try_from(slot).ok()).and_then(Slot::new)?;
    let fields = parts.get(1)?.items();
    let value = |name: &str| {
        let pair = fields.chunks_exact(2).find(|pair| pair[0].text() == name)?;
        u64::try_from(pair[1].number()?).ok()
    };
    Some((slot, SlotStats { cpu_us: value("cpu-usec"), keys: value("key-count").unwrap_or(0) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_slots_are_parsed() {
        let entry = |text: &str| slot_stats_of(&Answer(text.replace(' ', "\r\n").into_bytes()));
        let all = "*2 :7 *4 $9 key-count :12 $8 cpu-usec :500 ";
        let slot = Slot::new(7).expect("a slot");
        assert_eq!(entry(all), Some((slot, SlotStats { cpu_us: Some(500), keys: 12 })));
        // The CPU time is not counted by default.
        assert_eq!(entry("*2 :7 *2 $9 key-count :12 "), Some((slot, SlotStats { cpu_us: None, keys: 12 })));
        for wrong in ["*0 ", "+OK ", "*2 :99999 *0 ", "*1 :7 "] {
            assert_eq!(entry(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_planner_acts_on_lasting_excess_only() {
        let (start, window) = (Instant::now(), Duration::from_secs(60));
        let ids = |ids: &[&str]| -> Vec<String> { ids.iter().map(|id| (*id).to_owned()).collect() };
        let mut evidence = Evidence::default();
        let mut at = |seconds, over: &[&str]| evidence.add(start + Duration::from_secs(seconds), ids(over), window);
        assert_eq!((at(0, &["a", "b"]), at(30, &["a"]), at(60, &["a", "b"])), (ids(&[]), ids(&[]), ids(&["a"])));
        // The time begins again after a plan, and after a pause of the excess.
        assert_eq!((at(70, &["b"]), at(100, &[]), at(130, &["b"]), at(189, &["b"])), Default::default());
        assert_eq!(at(190, &["b"]), ids(&["b"]));
    }

    #[test]
    fn commands_are_distributed_by_processor_time() {
        let stats = |cpu_us: &[u64]| -> Vec<SlotStats> {
            cpu_us.iter().map(|cpu_us| SlotStats { cpu_us: Some(*cpu_us), keys: 0 }).collect()
        };
        assert_eq!(by_cpu(&stats(&[0, 100, 100]), &stats(&[300, 200, 100]), 1000.0), Some(vec![750.0, 250.0, 0.0]));
        // A restarted member counts from zero.
        assert_eq!(by_cpu(&stats(&[500, 100]), &stats(&[5, 200]), 1000.0), Some(vec![0.0, 1000.0]));
        assert_eq!(by_cpu(&stats(&[5]), &stats(&[5]), 1000.0), None);
    }

    #[test]
    fn a_sample_promises_no_more_than_its_sum() {
        let load = |commands: f64| SlotLoad { commands, noise: commands, ..SlotLoad::default() };
        let loads: Vec<SlotLoad> = (0..100).map(|slot| load(if slot == 0 { 5000.0 } else { 10.0 })).collect();
        let expected = sampled(&loads);
        assert!(expected[0] > 4000.0 && expected.iter().sum::<f64>() <= 5990.1, "{expected:?}");
        assert!(sampled(&vec![SlotLoad::default(); SLOT_COUNT]).iter().all(|load| *load == 0.0));
    }
}
