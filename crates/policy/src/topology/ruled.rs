//! Placement by a rule set, and the live adoption of the next set.
//!
//! During an adoption each key whose node changes has a *passage*: a slot number above those of Redis Cluster, for one
//! pair of nodes. A passage first belongs to the node where its keys are, and moves to the other one like any slot: by
//! the same legs, journal and recovery. Publishing the start and the end of an adoption moves no key. Two keys with equal
//! tags by both sets share a slot at any time.
//!
//! Rejected: a bit per old slot and target node for the keys that have moved. It needs moves of a part of a slot,
//! and each feature that works by slots would need both.

use std::fmt;
use std::sync::Arc;

use super::rules::{Rule, RuleError, RuleMatch, RuleSet};
use super::slot::{self, PASSAGES, part_slot};
use super::{NodeId, Placement, SLOT_COUNT, Slot, Topology};

/// Maximum number of slot owners during an adoption: each pair of them needs a passage.
pub const ADOPTION_OWNERS_MAX: usize = 128;

/// Maximum number of passages per pair of nodes. A leg of a move has at least one of them.
const PASSAGES_PER_PAIR: usize = 64;

/// Placement by rules: the hash tag in the name determines the slot of a key, or else its tag by the rules, or else its
/// name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Ruled {
    number: u64,
    rules: RuleSet,
    adoption: Option<Adoption>,
}

/// Replacement of a rule set.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Adoption {
    next: RuleSet,
    goal: AdoptionGoal,
    /// Owners of slots when the adoption started, ascending.
    owners: Vec<NodeId>,
    /// Place in `owners` of the owner of each slot of Redis Cluster. Constant during the adoption.
    owner_of: Box<[u8; SLOT_COUNT]>,
}

/// The set that is in force when the adoption ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdoptionGoal {
    /// The next set.
    Next,
    /// The present set: the adoption is abandoned.
    Present,
}

/// Rules and state of an adoption, for the store.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoredRules {
    /// Number of the present set.
    number: u64,
    /// The present set.
    rules: Vec<Rule>,
    /// Adoption in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    adoption: Option<StoredAdoption>,
}

#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredAdoption {
    next: Vec<Rule>,
    goal: AdoptionGoal,
    owners: Vec<NodeId>,
    /// Number of consecutive slots, and place of their owner.
    owner_of: Vec<(u16, u8)>,
}

/// Stored rules that cannot be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum StoredRulesError {
    /// A rule is invalid.
    Rule(RuleError),
    /// The owners of an adoption do not fit.
    Owners,
}

impl fmt::Display for StoredRulesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rule(error) => write!(f, "rule {error}"),
            Self::Owners => f.write_str("the owners of slots of an adoption of rules are contradictory"),
        }
    }
}

impl std::error::Error for StoredRulesError {}

impl From<RuleError> for StoredRulesError {
    fn from(error: RuleError) -> Self {
        Self::Rule(error)
    }
}

impl Adoption {
    /// Number of passages per pair of owners.
    const fn per_pair(&self) -> usize {
        let pairs = self.owners.len() * self.owners.len();
        let most = PASSAGES / if pairs == 0 { 1 } else { pairs };
        if most < PASSAGES_PER_PAIR { most } else { PASSAGES_PER_PAIR }
    }

    /// Slot of a key with these slots by the present and the next set.
    fn slot_of(&self, present: Slot, next: Slot) -> Slot {
        let [from, to] = [present, next].map(|slot| usize::from(self.owner_of[slot.index()]));
        if from == to {
            return next;
        }
        let pair = from * self.owners.len() + to;
        slot::passage(pair * self.per_pair() + next.index() % self.per_pair())
    }

    /// All passages, each with the node of its keys by the present and by the next set.
    fn passages(&self) -> impl Iterator<Item = (Slot, NodeId, NodeId)> {
        let (count, per_pair) = (self.owners.len(), self.per_pair());
        (0..count * count * per_pair).map(move |number| {
            let pair = number / per_pair;
            (slot::passage(number), self.owners[pair / count], self.owners[pair % count])
        })
    }
}

impl Ruled {
    /// Creates the placement of a fleet without keys, by its first rule set.
    #[must_use]
    pub fn first(rules: RuleSet) -> Self {
        Self { number: 1, rules, adoption: None }
    }

    /// Slot of a key.
    #[must_use]
    pub fn slot_of(&self, key: &[u8]) -> Slot {
        let own = slot::tagged_part(key, b'{', b'}');
        if own.len() < key.len() {
            return part_slot(own);
        }
        let present = part_slot(self.rules.tag(key).unwrap_or(key));
        match &self.adoption {
            None => present,
            Some(adoption) => {
                let next = part_slot(adoption.next.tag(key).unwrap_or(key));
                adoption.slot_of(present, next)
            }
        }
    }

    /// The part of a key that determines its slot: its own hash tag, or its tag by the rules. During an adoption, by the
    /// set in force afterwards.
    #[must_use]
    pub fn tag<'k>(&'k self, key: &'k [u8]) -> Option<&'k [u8]> {
        let own = slot::tagged_part(key, b'{', b'}');
        if own.len() < key.len() { Some(own) } else { self.goal_rules().tag(key) }
    }

    /// The pattern that gives a key its tag, by the set in force after an adoption. `None` for a key with its own hash
    /// tag.
    #[must_use]
    pub fn matching<'k>(&'k self, key: &'k [u8]) -> Option<RuleMatch<'k>> {
        let is_tagged = slot::tagged_part(key, b'{', b'}').len() < key.len();
        if is_tagged { None } else { self.goal_rules().matching(key) }
    }

    /// Number of the present set. Increases with each adoption.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The present set.
    #[must_use]
    pub const fn rules(&self) -> &RuleSet {
        &self.rules
    }

    /// The next set and the goal of the adoption in progress.
    #[must_use]
    pub fn adoption(&self) -> Option<(&RuleSet, AdoptionGoal)> {
        self.adoption.as_ref().map(|adoption| (&adoption.next, adoption.goal))
    }

    /// The set in force after the adoption in progress, if any.
    #[must_use]
    pub const fn goal_rules(&self) -> &RuleSet {
        match &self.adoption {
            Some(Adoption { next, goal: AdoptionGoal::Next, .. }) => next,
            _ => &self.rules,
        }
    }

    /// Number of slots that can have keys.
    #[must_use]
    pub fn slots(&self) -> usize {
        let passages = self.adoption.as_ref().map_or(0, |a| a.owners.len() * a.owners.len() * a.per_pair());
        SLOT_COUNT + passages
    }

    /// Form for the store.
    #[must_use]
    pub fn stored(&self) -> StoredRules {
        let adoption = self.adoption.as_ref().map(|adoption| StoredAdoption {
            next: adoption.next.rules().to_vec(),
            goal: adoption.goal,
            owners: adoption.owners.clone(),
            owner_of: adoption.owner_of.chunk_by(|a, b| a == b).map(|run| (run.len() as u16, run[0])).collect(),
        });
        StoredRules { number: self.number, rules: self.rules.rules().to_vec(), adoption }
    }
}

impl TryFrom<StoredRules> for Ruled {
    type Error = StoredRulesError;

    fn try_from(stored: StoredRules) -> Result<Self, StoredRulesError> {
        let adoption = match stored.adoption {
            None => None,
            Some(StoredAdoption { next, goal, owners, owner_of }) => {
                let places: Vec<u8> = owner_of
                    .iter()
                    .take(SLOT_COUNT)
                    .flat_map(|(count, place)| std::iter::repeat_n(*place, usize::from(*count)))
                    .collect();
                let is_sorted = owners.is_sorted_by(|a, b| a < b) && !owners.is_empty();
                let is_known = places.iter().all(|place| usize::from(*place) < owners.len());
                let places: Option<Box<[u8; SLOT_COUNT]>> = places.into_boxed_slice().try_into().ok();
                let Some(owner_of) = places.filter(|_| is_sorted && is_known && owners.len() <= ADOPTION_OWNERS_MAX)
                else {
                    return Err(StoredRulesError::Owners);
                };
                Some(Adoption { next: RuleSet::new(next)?, goal, owners, owner_of })
            }
        };
        Ok(Self { number: stored.number, rules: RuleSet::new(stored.rules)?, adoption })
    }
}

/// An adoption that cannot start or end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AdoptionError {
    /// The fleet places keys by a continuum.
    Continuum,
    /// Slots are in transit.
    Moving,
    /// An adoption is in progress.
    InProgress,
    /// No adoption is in progress.
    None,
    /// More than [`ADOPTION_OWNERS_MAX`] nodes own slots.
    Owners(usize),
    /// Keys of this number of passages are not at their goal.
    NotThere(usize),
}

impl fmt::Display for AdoptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Continuum => {
                f.write_str("the keys of a twemproxy pool are placed by its list of servers, without rules")
            }
            Self::Moving => f.write_str("a move is in progress, and rules change between moves (`switchyard moves`)"),
            Self::InProgress => f.write_str("an adoption of rules is in progress (`switchyard rules list`)"),
            Self::None => f.write_str("no adoption of rules is in progress"),
            Self::Owners(count) => write!(
                f,
                "{count} nodes own slots, and rules can change with at most {ADOPTION_OWNERS_MAX}: drain some nodes first"
            ),
            Self::NotThere(count) => write!(f, "{count} groups of keys have not moved yet"),
        }
    }
}

impl std::error::Error for AdoptionError {}

impl Topology {
    /// Placement by rules, if the fleet has had any.
    #[must_use]
    pub const fn ruled(&self) -> Option<&Arc<Ruled>> {
        match &self.placement {
            Placement::Ruled(ruled) => Some(ruled),
            Placement::Crc16 | Placement::Continuum(_) => None,
        }
    }

    /// Whether an adoption of rules is in progress. Slots of Redis Cluster keep their owners until it ends.
    #[must_use]
    pub fn is_adopting(&self) -> bool {
        self.ruled().is_some_and(|ruled| ruled.adoption.is_some())
    }

    /// Returns the topology of a first start with its first rule set, if this moves no key: the nodes have no
    /// keys, or one node owns all slots. Otherwise the topology stays as it is, and the set can be adopted later.
    #[must_use]
    pub fn with_first_rules(self, rules: RuleSet, has_keys: bool) -> Self {
        let is_one_owner = self.owners[..SLOT_COUNT].iter().all(|owner| *owner == self.owners[0]);
        if rules.is_empty() || !matches!(self.placement, Placement::Crc16) || has_keys && !is_one_owner {
            return self;
        }
        self.with_stored_placement(Placement::by_rules(rules))
    }

    /// Returns the next topology, one epoch higher, in which an adoption of a rule set has started. Each key stays at
    /// its node.
    ///
    /// # Errors
    /// If slots are in transit, an adoption is in progress, too many nodes own slots, or the fleet has a continuum.
    pub fn with_adoption(&self, next: RuleSet) -> Result<Self, AdoptionError> {
        let present = match &self.placement {
            Placement::Crc16 => Arc::default(),
            Placement::Ruled(ruled) => Arc::clone(ruled),
            Placement::Continuum(_) => return Err(AdoptionError::Continuum),
        };
        if present.adoption.is_some() {
            return Err(AdoptionError::InProgress);
        }
        if !self.is_settled() {
            return Err(AdoptionError::Moving);
        }
        let by_slot = &self.owners[..SLOT_COUNT];
        let mut owners = by_slot.to_vec();
        owners.sort_unstable();
        owners.dedup();
        if owners.len() > ADOPTION_OWNERS_MAX {
            return Err(AdoptionError::Owners(owners.len()));
        }
        let mut owner_of = Box::new([0; SLOT_COUNT]);
        for (place, owner) in owner_of.iter_mut().zip(by_slot) {
            *place = owners.binary_search(owner).unwrap_or_default() as u8;
        }
        let adoption = Adoption { next, goal: AdoptionGoal::Next, owners, owner_of };
        let mut topology = Self { epoch: self.epoch + 1, ..self.clone() };
        for (slot, from, _) in adoption.passages() {
            topology.owners[slot.index()] = from;
        }
        topology.placed_by(Ruled { adoption: Some(adoption), ..Ruled::clone(&present) });
        Ok(topology)
    }

    /// Returns the next topology, one epoch higher, in which the adoption in progress ends with this set. Each key stays
    /// at its node.
    ///
    /// # Errors
    /// If no adoption is in progress.
    pub fn with_adoption_goal(&self, goal: AdoptionGoal) -> Result<Self, AdoptionError> {
        let ruled = self.ruled().ok_or(AdoptionError::None)?;
        let adoption = ruled.adoption.clone().ok_or(AdoptionError::None)?;
        let mut topology = Self { epoch: self.epoch + 1, ..self.clone() };
        topology.placed_by(Ruled { adoption: Some(Adoption { goal, ..adoption }), ..Ruled::clone(ruled) });
        Ok(topology)
    }

    /// Passages that are not at the node of their goal, ascending, each with that node.
    #[must_use]
    pub fn adoption_moves(&self) -> Vec<(Slot, NodeId)> {
        let Some(adoption) = self.ruled().and_then(|ruled| ruled.adoption.as_ref()) else { return Vec::new() };
        let goal = |(slot, from, to)| (slot, if adoption.goal == AdoptionGoal::Next { to } else { from });
        adoption.passages().map(goal).filter(|(slot, node)| self.owner(*slot) != *node).collect()
    }

    /// Number of passages whose keys change nodes by the adoption.
    #[must_use]
    pub fn passages_that_move(&self) -> usize {
        let adoption = self.ruled().and_then(|ruled| ruled.adoption.as_ref());
        adoption.map_or(0, |adoption| adoption.passages().filter(|(_, from, to)| from != to).count())
    }

    /// Returns the next topology, one epoch higher, after the end of the adoption: the set of its goal is in force. Each
    /// key stays at its node.
    ///
    /// # Errors
    /// If no adoption is in progress, slots are in transit, or a passage is not at the node of its goal.
    pub fn with_adoption_ended(&self) -> Result<Self, AdoptionError> {
        let ruled = self.ruled().ok_or(AdoptionError::None)?;
        let adoption = ruled.adoption.as_ref().ok_or(AdoptionError::None)?;
        if !self.is_settled() {
            return Err(AdoptionError::Moving);
        }
        match self.adoption_moves().len() {
            0 => {}
            left => return Err(AdoptionError::NotThere(left)),
        }
        let mut topology = Self { epoch: self.epoch + 1, ..self.clone() };
        for (slot, ..) in adoption.passages() {
            topology.owners[slot.index()] = slot::UNUSED_OWNER;
        }
        topology.placed_by(Ruled { number: ruled.number + 1, rules: ruled.goal_rules().clone(), adoption: None });
        Ok(topology)
    }

    fn placed_by(&mut self, ruled: Ruled) {
        self.placement = Placement::Ruled(Arc::new(ruled));
        self.rebuild_overrides();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};
    use proptest::{prop_assert, prop_assert_eq};

    use super::*;
    use crate::topology::{MoveId, Stage, Transit, crc16_slot};

    fn rules(patterns: &[(&str, Option<&str>)]) -> RuleSet {
        let rule =
            |(keys, tag): &(&str, Option<&str>)| Rule { keys: vec![(*keys).to_owned()], tag: tag.map(str::to_owned) };
        RuleSet::new(patterns.iter().map(rule).collect()).expect("valid rules")
    }

    fn fleet(nodes: u16) -> Topology {
        let names: Vec<String> = (0..nodes).map(|node| format!("10.1.0.{node}:6379")).collect();
        Topology::even(&names).expect("a topology")
    }

    fn finish(mut topology: Topology) -> Topology {
        for (slot, node) in topology.adoption_moves() {
            topology = topology.handed_over(&[slot], node);
        }
        topology.with_adoption_ended().expect("all keys are there")
    }

    #[test]
    fn own_hash_tags_win_over_rules() {
        let ruled = Ruled::first(rules(&[("bull:{queue}:*", None), ("rq:*", Some("rq"))]));
        let same =
            |key: &str, tag: &str| assert_eq!(ruled.slot_of(key.as_bytes()), crc16_slot(tag.as_bytes()), "{key}");
        same("bull:mail:wait", "mail");
        same("bull:{mail}:wait", "mail");
        same("bull:mail:{7}", "7");
        same("rq:queue:default", "rq");
        same("other", "other");
        assert_eq!(ruled.tag(b"rq:{a}"), Some(&b"a"[..]));
        assert_eq!(ruled.tag(b"bull:mail:wait"), Some(&b"mail"[..]));
        assert_eq!((ruled.tag(b"other"), ruled.matching(b"rq:{a}")), (None, None));
    }

    #[test]
    fn an_adoption_moves_only_matching_keys_to_their_new_nodes() {
        let before = fleet(3);
        let next = rules(&[("bull:{queue}:*", None)]);
        let during = before.with_adoption(next.clone()).expect("it starts");
        assert_eq!(during.epoch(), before.epoch() + 1);
        assert!(during.is_adopting() && during.slots().count() > SLOT_COUNT);
        let key = |n: usize| format!("bull:mail:{n}").into_bytes();
        let goal = before.owner(crc16_slot(b"mail"));
        assert!((0..99).all(|n| during.owner_of(&key(n)) == before.owner_of(&key(n))));
        assert!((0..99).any(|n| during.owner_of(&key(n)) != goal));
        assert_eq!(during.slot_of(b"other"), before.slot_of(b"other"));
        assert_eq!(during.with_adoption(next).unwrap_err(), AdoptionError::InProgress);
        assert!(matches!(during.with_adoption_ended(), Err(AdoptionError::NotThere(_))));
        let after = finish(during);
        assert!((0..99).all(|n| after.owner_of(&key(n)) == goal && after.slot_of(&key(n)) == crc16_slot(b"mail")));
        let ruled = after.ruled().expect("rules");
        assert_eq!((ruled.number(), ruled.adoption(), after.slots().count()), (1, None, SLOT_COUNT));
    }

    #[test]
    fn first_rules_apply_at_once_only_if_no_key_moves() {
        let set = || rules(&[("rq:*", Some("rq"))]);
        let is_ruled = |topology: Topology, has_keys| topology.with_first_rules(set(), has_keys).ruled().is_some();
        assert!(is_ruled(fleet(3), false) && is_ruled(fleet(1), true));
        assert!(!is_ruled(fleet(3), true));
        let all: Vec<Slot> = Slot::all().collect();
        assert!(is_ruled(fleet(3).handed_over(&all, NodeId(2)), true));
        assert!(fleet(1).with_first_rules(RuleSet::default(), false).ruled().is_none());
    }

    #[test]
    fn an_abandoned_adoption_returns_keys_to_their_nodes() {
        let before = fleet(2);
        let during = before.with_adoption(rules(&[("a*", Some("a"))])).expect("it starts");
        let half: Vec<(Slot, NodeId)> = during.adoption_moves().into_iter().step_by(2).collect();
        let moved = half.iter().fold(during.clone(), |topology, (slot, node)| topology.handed_over(&[*slot], *node));
        assert!(moved.adoption_moves().len() < during.adoption_moves().len());
        let back = moved.with_adoption_goal(AdoptionGoal::Present).expect("it is in progress");
        let goals: Vec<Slot> = back.adoption_moves().into_iter().map(|(slot, _)| slot).collect();
        assert_eq!(goals, half.iter().map(|(slot, _)| *slot).collect::<Vec<_>>(), "only moved keys return");
        let after = finish(back);
        let keys = (0..99).map(|n| format!("a{n}"));
        assert!(keys.into_iter().all(|key| after.slot_of(key.as_bytes()) == before.slot_of(key.as_bytes())));
        assert!(after.ruled().is_some_and(|ruled| ruled.rules().is_empty()));
    }

    #[test]
    fn an_adoption_needs_settled_slots_and_at_most_128_owners() {
        let two = fleet(2);
        let slot = crc16_slot(b"a");
        let (source, target) = (two.owner(slot), NodeId(1 - two.owner(slot).0));
        let transit = Transit { move_id: MoveId(1), source, target, stage: Stage::Observed, keys_only: false };
        let moving = two.with_transits([(transit, &[slot][..])]).expect("one");
        assert_eq!(moving.with_adoption(RuleSet::default()).unwrap_err(), AdoptionError::Moving);
        assert_eq!(fleet(129).with_adoption(RuleSet::default()).unwrap_err(), AdoptionError::Owners(129));
        assert_eq!(two.with_adoption_ended().unwrap_err(), AdoptionError::None);
        let many = fleet(128).with_adoption(RuleSet::default()).expect("it starts");
        assert_eq!(many.slots().count(), super::super::SLOT_NUMBERS);
    }

    proptest! {
        /// No key changes its node when an adoption starts, changes its goal or ends, and keys with equal tags by both
        /// sets always share a slot.
        #[test]
        fn keys_stay_at_their_nodes_unless_a_passage_moves(
            nodes in 1_u16..5,
            first in prop::sample::subsequence(vec![("a:{x}:*", None), ("b*", Some("t")), ("{x}:c", None)], 0..=3),
            second in prop::sample::subsequence(vec![("a*", Some("u")), ("b:{x...}:*", None), ("{x}:c", None)], 0..=3),
            keys in prop::collection::vec("[ab]:[a-d:]{0,4}:?[cd{}]{0,3}", 2..30),
            moves in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
            is_abandoned in any::<bool>(),
            alone in any::<prop::sample::Index>(),
        ) {
            let start = fleet(nodes);
            let place = |topology: &Topology| keys.iter().map(|key| topology.lives_at(key.as_bytes())).collect::<Vec<_>>();
            let alone: Arc<[u8]> = alone.get(&keys).as_bytes().into();
            let start = finish(start.with_adoption(rules(&first)).expect("it starts"));
            let start = start.keys_handed_over(&[], [&alone], NodeId(nodes - 1));
            let during = start.with_adoption(rules(&second)).expect("it starts");
            prop_assert_eq!(place(&during), place(&start));
            let (present, next) = (rules(&first), rules(&second));
            let tags = |key: &String| {
                let key = key.as_bytes();
                let own = slot::tagged_part(key, b'{', b'}');
                if own.len() < key.len() { return [own.to_vec(), own.to_vec()]; }
                [&present, &next].map(|set| set.tag(key).unwrap_or(key).to_vec())
            };
            let mut now = during;
            for index in moves {
                let left = now.adoption_moves();
                if left.is_empty() { break; }
                let (slot, node) = *index.get(&left);
                now = now.handed_over(&[slot], node);
                for (one, other) in keys.iter().zip(&keys[1..]) {
                    prop_assert!(tags(one) != tags(other) || now.slot_of(one.as_bytes()) == now.slot_of(other.as_bytes()));
                }
            }
            let stored = Ruled::try_from(now.ruled().expect("rules").stored());
            prop_assert_eq!(stored.as_ref().ok(), now.ruled().map(|ruled| &**ruled));
            if is_abandoned {
                let before = place(&now);
                now = now.with_adoption_goal(AdoptionGoal::Present).expect("it is in progress");
                prop_assert_eq!(place(&now), before);
            }
            for (slot, node) in now.adoption_moves() {
                now = now.handed_over(&[slot], node);
            }
            let before = place(&now);
            let after = now.with_adoption_ended().expect("all keys are there");
            prop_assert_eq!(place(&after), before);
            let set = if is_abandoned { &present } else { &next };
            for key in keys.iter().filter(|key| key.as_bytes() != &*alone) {
                prop_assert_eq!(after.lives_at(key.as_bytes()), start.owner(Ruled::first(set.clone()).slot_of(key.as_bytes())));
            }
        }
    }
}
