//! Keys that clients use together, and placement rules that keep them in one slot.
//!
//! The router samples the keys of commands, transactions and scripts whose keys are in several slots. From such groups
//! [`propose`] derives rules: a capture of the part that the keys of each group share and that differs between groups,
//! or else one tag for all of them. A rule is not proposed if one of its tags would have more than half of a node's fair
//! share of the load or of the bytes.
//!
//! Names are split at separators rather than learned letter by letter, because applications build names from parts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::{Arc, LazyLock};

use crate::topology::{PRESETS, Placement, Preset, Rule, RuleSet, Ruled};

/// Maximum number of groups in a sample.
pub const GROUPS_MAX: usize = 4096;

/// Maximum number of keys of a group.
pub const GROUP_KEYS_MAX: usize = 16;

/// Maximum length of a key in a sample, in bytes.
const KEY_BYTES_MAX: usize = 256;

/// Maximum length of the literal start of a pattern in an error, in bytes.
const ERROR_PREFIX_MAX: usize = 64;

/// Minimum number of different sampled keys that match a pattern of an application rather than the name of a key.
const PATTERN_KEYS_MIN: usize = 8;

/// Share of the groups that rules should keep in one slot.
pub const COVERAGE: f64 = 0.95;

/// Bytes that separate the parts of a name.
const SEPARATORS: &[u8] = b":/.-_|";

/// Keys used together.
pub type Group = Arc<[Box<[u8]>]>;

/// The latest groups, sampled.
#[derive(Clone, Debug, Default)]
pub struct Groups(VecDeque<Group>);

impl Groups {
    /// Adds a group. Ignores a group with fewer than two different keys, and further keys of a large group.
    pub fn note<'k>(&mut self, keys: impl IntoIterator<Item = &'k [u8]>) {
        let keys: BTreeSet<Box<[u8]>> = keys
            .into_iter()
            .filter(|key| !key.is_empty() && key.len() <= KEY_BYTES_MAX)
            .take(GROUP_KEYS_MAX)
            .map(Box::from)
            .collect();
        if keys.len() < 2 {
            return;
        }
        self.push(keys.into_iter().collect());
    }

    fn push(&mut self, group: Group) {
        if self.0.len() == GROUPS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(group);
    }

    /// Adds the groups of another sample.
    pub fn append(&mut self, other: Self) {
        other.0.into_iter().for_each(|group| self.push(group));
    }

    /// Whether each pattern of a rule matches many keys of the sample. Other patterns may be names of keys.
    #[must_use]
    pub fn has_many_keys_of(&self, rule: &Rule) -> bool {
        let keys: BTreeSet<&[u8]> = self.iter().flat_map(|group| group.iter().map(|key| &**key)).collect();
        rule.keys.iter().all(|pattern| {
            let alone = Rule { keys: vec![pattern.clone()], tag: rule.tag.clone() };
            RuleSet::new(vec![alone])
                .is_ok_and(|set| keys.iter().filter(|key| set.tag(key).is_some()).count() >= PATTERN_KEYS_MIN)
        })
    }

    /// The groups, oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &Group> {
        self.0.iter()
    }
}

/// Proposed rules.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Proposal {
    /// The present rules, and the proposed ones after them.
    pub rules: Vec<Rule>,
    /// Number of the proposed rules, the last ones of `rules`.
    pub proposed: usize,
    /// Number of groups in the sample.
    pub groups: usize,
    /// Number of groups in one slot now.
    pub together_now: usize,
    /// Number of groups in one slot with the rules.
    pub together_then: usize,
    /// Rules that are not proposed, because one of their tags would be too large for a node.
    pub too_large: Vec<TooLarge>,
}

/// Keys, each with its part of a quantity.
pub type Weighed<'k> = [(&'k [u8], f64)];

/// A quantity that a node shares fairly with the others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Quantity {
    /// Requests.
    Load,
    /// Memory of keys and values.
    Bytes,
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Load => "load",
            Self::Bytes => "bytes",
        })
    }
}

/// A rule with a tag that would have more than half of a node's fair share of a quantity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TooLarge {
    /// The rule.
    pub rule: Rule,
    /// The tag.
    pub tag: String,
    /// The quantity.
    pub of: Quantity,
    /// Share of the tag in it, in percent, rounded.
    pub percent: u32,
}

impl Proposal {
    /// Whether the rules keep enough groups in one slot.
    #[must_use]
    pub fn is_enough(&self) -> bool {
        self.together_then as f64 >= COVERAGE * self.groups as f64
    }
}

/// A capture that keeps groups together.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Capture<'k> {
    prefix: &'k [u8],
    separator: u8,
}

impl<'k> Capture<'k> {
    /// Captures that all keys of a group share, with the captured text. `first`, `last`: the smallest and the largest
    /// key, which have the least in common.
    fn of(first: &'k [u8], last: &'k [u8]) -> Vec<(Self, &'k [u8])> {
        let common = first.iter().zip(last.iter()).take_while(|(a, b)| a == b).count();
        let mut captures = Vec::new();
        let mut start = 0;
        for (at, byte) in first[..common].iter().enumerate().filter(|(_, byte)| SEPARATORS.contains(byte)) {
            let part = &first[start..at];
            // A pattern that begins with a capture would match names of other applications.
            if start > 0 && !part.is_empty() && !part.contains(&b'}') {
                captures.push((Self { prefix: &first[..start], separator: *byte }, part));
            }
            start = at + 1;
        }
        captures
    }

    fn rule(&self) -> Option<Rule> {
        let prefix = std::str::from_utf8(self.prefix).ok()?;
        let separator = char::from(self.separator);
        let is_literal = !prefix.contains(['{', '}', '*']);
        is_literal.then(|| Rule { keys: vec![format!("{prefix}{{name}}{separator}*")], tag: None })
    }
}

/// Literal patterns for keys without a common part: everything up to the first separator, or the whole name.
fn stem(key: &[u8]) -> Option<String> {
    let end = key.iter().position(|byte| SEPARATORS.contains(byte));
    let text = std::str::from_utf8(end.map_or(key, |end| &key[..=end])).ok()?;
    let is_literal = !text.contains(['{', '}', '*']);
    is_literal.then(|| if end.is_some() { format!("{text}*") } else { text.to_owned() })
}

fn is_together(placement: &Placement, group: &Group) -> bool {
    let mut slots = group.iter().map(|key| placement.slot_of(key));
    let first = slots.next();
    slots.all(|slot| Some(slot) == first)
}

/// Proposes rules for keys used together. `load`, `bytes`: keys with their parts of these quantities, empty if unknown.
/// `nodes`: number of nodes; fewer than 2 count as 2.
#[must_use]
pub fn propose(present: &[Rule], groups: &Groups, load: &Weighed<'_>, bytes: &Weighed<'_>, nodes: usize) -> Proposal {
    let placed = |rules: &[Rule]| RuleSet::new(rules.to_vec()).map_or(Placement::Crc16, Placement::by_rules);
    let apart = |rules: &[Rule]| -> Vec<&Group> {
        let placement = placed(rules);
        groups.iter().filter(|group| !is_together(&placement, group)).collect()
    };
    let all = groups.iter().count();
    let mut proposal = Proposal { rules: present.to_vec(), groups: all, ..Proposal::default() };
    let mut left = apart(&proposal.rules);
    proposal.together_now = all - left.len();
    let mut refused: BTreeSet<Vec<String>> = BTreeSet::new();
    while ((all - left.len()) as f64) < COVERAGE * all as f64 {
        let next = best_capture(&left, &refused).or_else(|| best_tag(&left, &refused));
        let Some(rule) = next else { break };
        let rules: Vec<Rule> = proposal.rules.iter().cloned().chain([rule.clone()]).collect();
        let then = apart(&rules);
        let limit = 0.5 / nodes.max(2) as f64;
        let too_large = [(Quantity::Load, load), (Quantity::Bytes, bytes)]
            .into_iter()
            .filter_map(|(of, weighed)| Some((of, largest_tag(&rule, weighed)?)))
            .find(|(_, (_, share))| *share > limit);
        match too_large {
            Some((of, (tag, share))) => {
                let percent = (share * 100.0).round() as u32;
                refused.insert(rule.keys.clone());
                proposal.too_large.push(TooLarge { rule, tag, of, percent });
            }
            None if then.len() == left.len() => drop(refused.insert(rule.keys)),
            None => {
                proposal.rules = rules;
                proposal.proposed += 1;
                left = then;
            }
        }
    }
    proposal.together_then = all - left.len();
    proposal
}

/// Presets with their rules.
static OF_PRESETS: LazyLock<Vec<(&str, Ruled)>> = LazyLock::new(|| {
    let ruled = |preset: &Preset| Some((preset.name, Ruled::first(RuleSet::new(preset.rules()).ok()?)));
    PRESETS.iter().filter_map(ruled).collect()
});

/// Returns a rule that would keep these keys in one slot, for an error: `preset = "NAME"`, or `the pattern TEXT`. None if
/// the keys have no common part, or if rules or hash tags place some of them.
#[must_use]
pub fn rule_for<'k>(present: Option<&Ruled>, keys: impl Iterator<Item = &'k [u8]> + Clone) -> Option<String> {
    let is_placed = |key: &[u8]| key.contains(&b'{') || present.is_some_and(|ruled| ruled.matching(key).is_some());
    if keys.clone().any(is_placed) {
        return None;
    }
    let first = keys.clone().next()?;
    let is_of = |ruled: &Ruled| {
        keys.clone().all(|key| ruled.matching(key).is_some() && ruled.slot_of(key) == ruled.slot_of(first))
    };
    if let Some((name, _)) = OF_PRESETS.iter().find(|(_, ruled)| is_of(ruled)) {
        return Some(format!("preset = \"{name}\""));
    }
    let (capture, _) = Capture::of(keys.clone().min()?, keys.max()?).into_iter().next()?;
    // An error is one line.
    let is_printable = capture.prefix.len() <= ERROR_PREFIX_MAX && capture.prefix.iter().all(u8::is_ascii_graphic);
    let pattern = capture.rule().filter(|_| is_printable)?.keys.pop()?;
    Some(format!("the pattern {pattern}"))
}

/// The capture that keeps most groups together, and of several such captures the one with most different texts.
fn best_capture(groups: &[&Group], refused: &BTreeSet<Vec<String>>) -> Option<Rule> {
    let mut found: BTreeMap<Capture<'_>, (usize, BTreeSet<&[u8]>)> = BTreeMap::new();
    for group in groups {
        let (Some(first), Some(last)) = (group.first(), group.last()) else { continue };
        for (capture, text) in Capture::of(first, last) {
            let (count, texts) = found.entry(capture).or_default();
            *count += 1;
            texts.insert(text);
        }
    }
    let most = found.values().map(|(count, _)| *count).max()?;
    found
        .into_iter()
        .filter(|(_, (count, _))| *count as f64 >= COVERAGE * most as f64)
        .filter_map(|(capture, (count, texts))| Some((texts.len(), count, capture.rule()?)))
        .filter(|(.., rule)| !refused.contains(&rule.keys))
        .max_by_key(|(texts, count, _)| (*texts, *count))
        .map(|(.., rule)| rule)
}

/// One tag for the largest set of stems that groups connect.
fn best_tag(groups: &[&Group], refused: &BTreeSet<Vec<String>>) -> Option<Rule> {
    let mut sets: Vec<(BTreeSet<String>, usize)> = Vec::new();
    for group in groups {
        let Some(mut stems) = group.iter().map(|key| stem(key)).collect::<Option<BTreeSet<String>>>() else { continue };
        let mut count = 1;
        let (touching, others) = sets.into_iter().partition(|(set, _)| !set.is_disjoint(&stems));
        sets = others;
        for (set, more) in touching as Vec<(BTreeSet<String>, usize)> {
            stems.extend(set);
            count += more;
        }
        sets.push((stems, count));
    }
    let rule = |stems: BTreeSet<String>| {
        let name = stems.first()?.trim_end_matches('*').trim_end_matches(|c: char| SEPARATORS.contains(&(c as u8)));
        let tag = Some(name.to_owned()).filter(|name| !name.is_empty())?;
        Some(Rule { keys: stems.into_iter().collect(), tag: Some(tag) })
    };
    sets.into_iter()
        .filter_map(|(stems, count)| Some((count, rule(stems)?)))
        .filter(|(_, rule)| !refused.contains(&rule.keys))
        .max_by_key(|(count, _)| *count)
        .map(|(_, rule)| rule)
}

/// The tag of a rule with the largest share of a quantity, and this share.
fn largest_tag(rule: &Rule, weighed: &Weighed<'_>) -> Option<(String, f64)> {
    let ruled = Ruled::first(RuleSet::new(vec![rule.clone()]).ok()?);
    let mut by_tag: BTreeMap<&[u8], f64> = BTreeMap::new();
    for (key, weight) in weighed {
        if let Some(found) = ruled.matching(key) {
            *by_tag.entry(found.tag).or_default() += weight;
        }
    }
    let all: f64 = weighed.iter().map(|(_, weight)| weight).sum();
    let (tag, weight) = by_tag.into_iter().max_by(|a, b| a.1.total_cmp(&b.1))?;
    (all > 0.0).then(|| (String::from_utf8_lossy(tag).into_owned(), weight / all))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn groups(all: &[&[&str]]) -> Groups {
        let mut groups = Groups::default();
        all.iter().for_each(|keys| groups.note(keys.iter().map(|key| key.as_bytes())));
        groups
    }

    fn proposed(all: &[&[&str]]) -> Vec<(Vec<String>, Option<String>)> {
        let proposal = propose(&[], &groups(all), &[], &[], 2);
        proposal.rules.into_iter().map(|rule| (rule.keys, rule.tag)).collect()
    }

    #[test]
    fn errors_name_a_rule_for_keys_of_a_library_or_with_a_common_part() {
        let rule = |keys: &[&str]| rule_for(None, keys.iter().map(|key| key.as_bytes()));
        for (keys, expected) in [
            (&["job:7:b", "job:7:a:x"][..], "the pattern job:{name}:*"),
            (&["user:7:cart:a", "user:7:cart:b"], "the pattern user:{name}:*"),
            (&["bull:mail:7:processed", "bull:mail:7:dependencies"], "preset = \"bullmq\""),
            (&["rq:queues", "rq:job:1"], "preset = \"rq\""),
            (&["queue:low", "queues"], "preset = \"sidekiq\""),
            (&["celery", "unacked"], "preset = \"celery\""),
        ] {
            assert_eq!(rule(keys).as_deref(), Some(expected));
        }
        for apart in
            [&["job:7:a", "job:8:a"][..], &["a", "b"], &["job:7:{a}", "job:7:b"], &["j\r\n:7:a", "j\r\n:7:b"], &[]]
        {
            assert_eq!(rule(apart), None, "{apart:?}");
        }
        let present = RuleSet::new(vec![Rule { keys: vec!["job:{id...}:*".to_owned()], tag: None }]).map(Ruled::first);
        let keys = [&b"job:7:b"[..], b"job:7:a:x"].into_iter();
        assert_eq!(rule_for(present.as_ref().ok(), keys), None);
    }

    #[test]
    fn the_part_that_differs_between_groups_is_captured() {
        let all: [&[&str]; 3] = [
            &["bull:mail:wait", "bull:mail:active", "bull:mail:7"],
            &["bull:sms:wait", "bull:sms:9"],
            &["bull:push:wait", "bull:push:meta"],
        ];
        assert_eq!(proposed(&all), [(vec!["bull:{name}:*".to_owned()], None)]);
        let proposal = propose(&[], &groups(&all), &[], &[], 3);
        assert_eq!((proposal.groups, proposal.together_now, proposal.together_then), (3, 0, 3));
        assert!(proposal.is_enough());
    }

    #[test]
    fn keys_without_a_common_part_get_one_tag() {
        let all: [&[&str]; 2] = [&["queue:default", "queues"], &["queue:low", "schedule"]];
        let keys = ["queue:*", "queues", "schedule"].map(str::to_owned).to_vec();
        assert_eq!(proposed(&all), [(keys, Some("queue".to_owned()))]);
    }

    #[test]
    fn groups_with_hash_tags_and_single_keys_need_no_rule() {
        assert!(proposed(&[&["{a}1", "{a}2"], &["alone"], &["twice", "twice"]]).is_empty());
        assert_eq!(propose(&[], &Groups::default(), &[], &[], 2), Proposal::default());
    }

    #[test]
    fn a_tag_above_half_of_a_fair_share_is_not_proposed() {
        let all: [&[&str]; 2] = [&["a:1:x", "a:1:y"], &["a:2:x", "a:2:y"]];
        let loads = |busy: f64| vec![(&b"a:1:x"[..], busy), (b"a:2:x", 1.0), (b"other", 10.0)];
        let keys = |proposal: &Proposal| proposal.rules.iter().flat_map(|rule| rule.keys.clone()).collect::<Vec<_>>();
        let light = propose(&[], &groups(&all), &loads(1.0), &loads(1.0), 2);
        assert_eq!(keys(&light), ["a:{name}:*"]);
        for (load, bytes, of) in [(10.0, 1.0, Quantity::Load), (1.0, 10.0, Quantity::Bytes)] {
            let heavy = propose(&[], &groups(&all), &loads(load), &loads(bytes), 2);
            assert!(keys(&heavy).is_empty() && !heavy.is_enough(), "{heavy:?}");
            let found = &heavy.too_large[0];
            assert_eq!((found.tag.as_str(), found.of, found.percent), ("1", of, 48));
        }
    }

    #[test]
    fn present_rules_stay_first() {
        let present = vec![Rule { keys: vec!["rq:*".to_owned()], tag: Some("rq".to_owned()) }];
        let all: [&[&str]; 2] = [&["rq:1", "rq:2"], &["a:1:x", "a:1:y"]];
        let proposal = propose(&present, &groups(&all), &[], &[], 2);
        assert_eq!((proposal.rules.len(), proposal.proposed, proposal.together_now), (2, 1, 1));
        assert_eq!(proposal.rules[0], present[0]);
    }

    #[test]
    fn the_sample_is_bounded() {
        let mut groups = Groups::default();
        for number in 0..GROUPS_MAX + 10 {
            let keys: Vec<String> = (0..40).map(|key| format!("g{number}:{key}")).collect();
            groups.note(keys.iter().map(|key| key.as_bytes()));
        }
        assert_eq!(groups.iter().count(), GROUPS_MAX);
        assert!(groups.iter().all(|group| group.len() <= GROUP_KEYS_MAX));
        let long = "x".repeat(KEY_BYTES_MAX + 1);
        let mut groups = Groups::default();
        groups.note([long.as_bytes(), b"a"]);
        assert_eq!(groups.iter().count(), 0);
    }
}
