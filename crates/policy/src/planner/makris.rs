//! The policies of Makris, Tserpes, Anagnostopoulos and Altmann (2017): single keys of overloaded nodes move and
//! override hashing.
//!
//! The paper's printed loop differs from its text. The loop moves the most popular key of an overloaded node to the
//! node with the least load, without a fit test, so the target may become overloaded and pass the key on. The text
//! describes first fit decreasing over remaining capacity. Both are implemented for comparison, the loop only with the
//! feature `research`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Fleet, KeyAt, Need, Plan, Policy, Previous, Price, Problem, State, Step, StepSubject, Verdict, advice};
use crate::topology::NodeId;

pub(super) fn solve(
    problem: &Problem,
    previous: &Previous,
    fleet: &Fleet<'_>,
    over: &[NodeId],
    policy: Policy,
) -> Plan {
    let recent: BTreeSet<&[u8]> = previous.keys.iter().map(|key| &**key).collect();
    let mut loads: BTreeMap<NodeId, f64> = fleet.nodes.iter().map(|(id, place)| (*id, place.load)).collect();
    let (mut steps, mut price) = (Vec::new(), Price::default());
    let is_printed = ![Policy::Switchyard, Policy::MakrisFfd, Policy::MakrisSafe].contains(&policy);
    for node in over {
        // The cooldown is an addition: without it, a key circulates in the printed loop.
        let may =
            |key: &&KeyAt| key.at == *node && key.stays.is_none() && !recent.contains(&*key.key) && key.load() > 0.0;
        let mut keys: Vec<&KeyAt> = problem.keys.iter().filter(may).collect();
        keys.sort_by(|one, other| other.load().total_cmp(&one.load()).then(one.key.cmp(&other.key)));
        let may_take =
            |id: &NodeId| *id != *node && fleet.nodes[id].node.state == State::Ready && fleet.nodes[id].limit > 0.0;
        for key in keys {
            if steps.len() >= problem.knobs.keys_max || (!is_printed && loads[node] <= fleet.nodes[node].limit) {
                break;
            }
            let room = |id: &NodeId| fleet.nodes[id].limit - loads[id];
            let fits = || loads.keys().copied().filter(may_take).find(|id| room(id) >= key.load());
            let roomiest = || {
                loads
                    .keys()
                    .copied()
                    .filter(may_take)
                    .max_by(|one, other| room(one).total_cmp(&room(other)).then(other.cmp(one)))
            };
            let to = match policy {
                #[cfg(feature = "research")]
                Policy::MakrisPrinted => idlest(fleet, may_take),
                Policy::MakrisFfd => fits().or_else(roomiest),
                Policy::MakrisSafe | Policy::Switchyard => fits(),
            };
            let Some(to) = to.filter(|_| price.bytes + key.bytes <= problem.knobs.bytes_max) else { continue };
            price.add_key(key.bytes);
            *loads.entry(*node).or_default() -= key.load();
            *loads.entry(to).or_default() += key.load();
            let what = StepSubject::Key { key: key.key.clone(), slot: key.slot, is_cold: false };
            steps.push(Step { what, from: *node, to, load: key.load(), bytes: key.bytes, need: Need::Requests });
            if is_printed {
                break;
            }
        }
    }
    let nodes = fleet.outlook(&steps);
    let is_relieved = nodes.iter().all(|node| node.after <= node.limit || !over.contains(&node.node));
    let verdict = match (over.is_empty(), steps.is_empty(), is_relieved) {
        (true, ..) => Verdict::Fine,
        (_, true, _) => Verdict::NoneFound,
        (.., true) => Verdict::Relieved,
        (.., false) => Verdict::Partly,
    };
    Plan { verdict, steps, price, nodes, alternatives: Vec::new(), advice: advice(problem, fleet, over) }
}

/// Returns the node with the least load of the last interval, so that two overloaded nodes choose the same target.
#[cfg(feature = "research")]
fn idlest(fleet: &Fleet<'_>, may_take: impl Fn(&NodeId) -> bool) -> Option<NodeId> {
    let load = |id: &NodeId| fleet.nodes[id].load;
    let ids = fleet.nodes.keys().copied().filter(|id| may_take(id));
    ids.min_by(|one, other| load(one).total_cmp(&load(other)).then(one.cmp(other)))
}
