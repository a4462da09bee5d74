//! Decisions as text and numbers.

use switchyard_policy::planner::{
    Advice, Alternative, Name, Need, Outlook, OverLimitNode, OverLimitReason, Plan, Policy, Price, Step, StepSubject,
    Verdict, Way,
};
use switchyard_policy::topology::NodeId;
use switchyard_resp::units::{counted, describe_size};

use super::{Decision, POLICIES};
use crate::admin::{AlternativeReport, DecisionReport, NodeOutlookReport, PriceReport, StepReport};
use crate::operator::text_of;

/// Formats decisions.
pub(crate) struct Words<'w> {
    /// Returns the name of a node.
    pub(crate) name: &'w dyn Fn(NodeId) -> String,
    /// Whether the client may read names of keys.
    pub(crate) named: bool,
}

impl Words<'_> {
    /// Converts a stored decision to a report.
    pub(crate) fn decision(&self, id: u64, decision: &Decision) -> DecisionReport {
        let of_plan = self.plan(&decision.plan, decision.problem.knobs.policy);
        let outcome = decision.outcome.clone().or_else(|| {
            let moves = decision.moves.as_ref()?;
            let moves: Vec<String> = moves.iter().map(u64::to_string).collect();
            Some(format!("in progress as moves {}", moves.join(", ")))
        });
        DecisionReport { id: Some(id), at: decision.at, by: decision.by.clone(), outcome, ..of_plan }
    }

    /// Converts a plan to a report.
    pub(crate) fn plan(&self, plan: &Plan, policy: Policy) -> DecisionReport {
        let outlook = |node: &Outlook| NodeOutlookReport {
            node: (self.name)(node.node),
            requests_per_second: node.before,
            after_per_second: node.after,
            limit_per_second: node.limit,
        };
        DecisionReport {
            policy: POLICIES.iter().find(|(known, _)| *known == policy).map_or("", |(_, name)| name).to_owned(),
            verdict: verdict(plan.verdict).to_owned(),
            message: self.explain(plan),
            nodes: plan.nodes.iter().map(outlook).collect(),
            steps: plan.steps.iter().map(|step| self.step(step)).collect(),
            price: price(plan.price),
            alternatives: plan.alternatives.iter().map(alternative).collect(),
            advice: plan.advice.iter().map(|advice| self.advice(advice)).collect(),
            ..DecisionReport::default()
        }
    }

    fn key(&self, key: &Name) -> String {
        if self.named { format!("the key {:?}", key.escape_ascii().to_string()) } else { "a key".to_owned() }
    }

    fn step(&self, step: &Step) -> StepReport {
        let (what, key, slots) = match &step.what {
            StepSubject::Key { key, slot, is_cold } => {
                let key = self.named.then(|| key.escape_ascii().to_string());
                (if *is_cold { "key home" } else { "key" }, key, slot.number().to_string())
            }
            StepSubject::Slots(slots) => ("slots", None, text_of(slots)),
        };
        StepReport {
            what: what.to_owned(),
            key,
            slots,
            from: (self.name)(step.from),
            to: (self.name)(step.to),
            requests_per_second: step.load,
            bytes: step.bytes,
        }
    }

    /// Problem and remedy in one sentence.
    fn explain(&self, plan: &Plan) -> String {
        match self.memory(plan) {
            Some(memory)
                if plan.steps.iter().all(|step| step.need == Need::Memory) && !plan.nodes.iter().any(is_over) =>
            {
                memory
            }
            Some(memory) => format!("{}; {memory}", self.load(plan)),
            None => self.load(plan),
        }
    }

    /// Nodes with too little memory, and the relief.
    fn memory(&self, plan: &Plan) -> Option<String> {
        let full = |node: &Outlook| node.memory.filter(|(used, limit)| used > limit);
        let relieved: Vec<&Step> = plan.steps.iter().filter(|step| step.need == Need::Memory).collect();
        let fullest = plan.nodes.iter().filter(|node| full(node).is_some()).max_by_key(|node| node.memory)?;
        let (used, limit) = fullest.memory?;
        let wrong = format!(
            "{} uses {} of memory, and its limit is {}",
            (self.name)(fullest.node),
            describe_size(used),
            describe_size(limit)
        );
        if relieved.is_empty() {
            return Some(wrong);
        }
        let slots: usize =
            relieved.iter().map(|step| if let StepSubject::Slots(slots) = &step.what { slots.len() } else { 0 }).sum();
        let bytes = describe_size(relieved.iter().map(|step| step.bytes).sum());
        Some(format!("{wrong}: moving {} ({bytes}) to nodes with room helps", counted(slots, "slot")))
    }

    /// Nodes with too many requests, and the relief.
    fn load(&self, plan: &Plan) -> String {
        let fullest = plan
            .nodes
            .iter()
            .filter(|node| is_over(node))
            .max_by(|one, other| (one.before / one.limit).total_cmp(&(other.before / other.limit)));
        let wrong = match fullest {
            None => "no node is over its limit".to_owned(),
            Some(node) => {
                format!(
                    "{} has {:.0} requests in a second, and its limit is {:.0}",
                    (self.name)(node.node),
                    node.before,
                    node.limit
                )
            }
        };
        let Price { bytes, keys, slots, .. } = plan.price;
        let mut what = Vec::new();
        if keys > 0 {
            what.push(counted(keys, "key"));
        }
        if slots > 0 {
            what.push(counted(slots, "slot"));
        }
        let what = format!("{} ({})", what.join(" and "), describe_size(bytes));
        let relieved = fullest.and_then(|fullest| plan.nodes.iter().find(|node| node.node == fullest.node));
        let after = relieved.map_or_else(String::new, |node| format!(", which leaves it {:.0}", node.after));
        // Only a leaving node moves its load away without having a limit.
        let has_no_limit = |id: NodeId| plan.nodes.iter().any(|node| node.node == id && node.limit <= 0.0);
        let leaver = plan.steps.iter().find(|step| plan.verdict != Verdict::Fine && has_no_limit(step.from));
        if let Some(leaver) = leaver.map(|step| (self.name)(step.from)) {
            return match plan.verdict {
                Verdict::Relieved => {
                    format!("moving {what} leaves {leaver} empty, and every other node under its limit")
                }
                _ => format!(
                    "moving {what} leaves something at {leaver} or a node over its limit: not everything fits elsewhere now"
                ),
            };
        }
        match (plan.verdict, plan.steps.is_empty()) {
            (Verdict::Fine, true) => wrong,
            (Verdict::Fine, false) => format!("{wrong}; {what} that are cold return to the slot owners"),
            (Verdict::Relieved, true) if fullest.is_none() => format!("{wrong}, and nothing has to move"),
            (Verdict::Relieved, true) => format!("{wrong}; hot copies take the rest"),
            (Verdict::Relieved, false) if fullest.is_none() => {
                format!("{wrong} now: moving {what} brings the overloaded nodes to their goal")
            }
            (Verdict::Relieved, false) => format!("{wrong}: moving {what} brings every node under its limit{after}"),
            (Verdict::Partly, _) => {
                format!("{wrong}: moving {what} helps{after}, but does not bring every node under its limit")
            }
            (Verdict::NoneFound, _) => format!("{wrong}, and no plan was found"),
        }
    }

    /// Nodes that stay above their limit, each with the reason.
    pub(crate) fn held(&self, held: &[OverLimitNode]) -> Vec<String> {
        let why = |why: OverLimitReason| match why {
            OverLimitReason::Down => "it is down".to_owned(),
            OverLimitReason::Busy => "it takes part in a move, or has just refused one (`switchyard moves`)".to_owned(),
            OverLimitReason::Floor(least) => format!("it has fewer than {least:.0} requests/s (planner.min-requests)"),
            OverLimitReason::Brief => {
                "its excess is too short or too small to differ from noise (planner.window)".to_owned()
            }
            OverLimitReason::Unsplittable => "a single key or slot exceeds the limit".to_owned(),
            OverLimitReason::Cooldown => {
                "the keys or slots that would help have just moved, and stay for one or five minutes".to_owned()
            }
            OverLimitReason::Budget => {
                "the budget is spent (planner.max-keys-per-minute, max-bytes-per-hour)".to_owned()
            }
            OverLimitReason::NoRoom => "nothing that may move fits elsewhere".to_owned(),
            OverLimitReason::NoMemory => {
                "no other node has memory for its slots: add a node, or raise maxmemory".to_owned()
            }
        };
        held.iter().map(|held| format!("{} stays over its limit: {}", (self.name)(held.node), why(held.why))).collect()
    }

    fn advice(&self, advice: &Advice) -> String {
        match advice {
            Advice::AddNode { missing } => {
                format!(
                    "all nodes together lack room for {missing:.0} requests in a second: add a node (`switchyard nodes add`)"
                )
            }
            Advice::RemoveNode { node } => {
                format!(
                    "the others have enough room without {0}: it could be removed (`switchyard nodes drain {0}`)",
                    (self.name)(*node)
                )
            }
            Advice::Unsplittable { key, slot, is_slot, at, load } => {
                let slot = slot.map_or_else(|| "a slot".to_owned(), |slot| format!("slot {}", slot.number()));
                let at = (self.name)(*at);
                match (key, is_slot) {
                    (Some(key), false) => format!(
                        "{} ({slot}) at {at} has {load:.0} requests/s, more than any node may have, and a key cannot be split: nothing moves away from {at}. \
                         Let hot copies answer its reads, spread its writes over several keys, or use a faster server for it",
                        self.key(key)
                    ),
                    (key, _) => {
                        let tag = key
                            .as_ref()
                            .map_or_else(String::new, |key| format!(" (the hash tag of {})", self.key(key)));
                        format!(
                            "the keys of {slot}{tag} at {at} have {load:.0} requests/s together, more than any node may have, and a slot cannot be split: nothing \
                             moves away from {at}. Use several hash tags for these keys, or none, or a faster server for them"
                        )
                    }
                }
            }
            Advice::Copies { key, reads } => {
                format!("hot copies are about to answer {reads:.0} reads in a second of {}, so it stays", self.key(key))
            }
        }
    }
}

fn is_over(node: &Outlook) -> bool {
    node.before > node.limit && node.limit > 0.0
}

fn verdict(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Fine => "fine",
        Verdict::Relieved => "relieved",
        Verdict::Partly => "partly",
        Verdict::NoneFound => "none-found",
    }
}

fn price(price: Price) -> PriceReport {
    PriceReport { bytes: price.bytes, keys: price.keys as u64, slots: price.slots as u64, total: price.total }
}

fn alternative(other: &Alternative) -> AlternativeReport {
    let way = match other.way {
        Way::KeysFirst => "keys-first",
        Way::Cheapest => "cheapest",
        Way::Slots => "slots",
        Way::CheapSlots => "cheap-slots",
        Way::Search => "search",
    };
    AlternativeReport {
        way: way.to_owned(),
        relieves: other.relieves,
        price: price(other.price),
        fullest_percent: other.fullest * 100.0,
    }
}
