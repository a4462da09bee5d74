//! Determines the router that serves a fleet, from records at the nodes, and when a standby takes over.
//!
//! Each node holds one ownership record per fleet: the router, its *term*, and the version of the state directory. A
//! router that takes over names its connection, reads the record, writes its own with a higher term, closes all
//! connections of the fleet's other routers, and reads again. A router that read an older record had named its
//! connection before, so the connection is among those closed. A router that names its connection later reads the new
//! record. So only one router at a time sends commands to a node, and a router that was suspended finds out with its
//! first new connection.
//!
//! Writers may add words without reading the record first (a worker's claim), or replace all (the owner, once a
//! second). A word may therefore occur several times, and the highest counts.

/// Ownership record of a fleet at a node.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct OwnershipRecord {
    /// Fencing token: increases with each router that serves the fleet.
    pub term: u64,
    /// Identity of the router.
    pub holder: String,
    /// Version of the state directory.
    pub version: u64,
    /// Whether keys were in transit: then only the state directory itself has their locations, and no copy does.
    pub is_moving: bool,
    /// Increases while the router lives.
    pub beat: u64,
    /// Names of the nodes that had keys of the fleet, to detect a first start over fewer nodes.
    pub nodes: Vec<String>,
    /// Whether the router has stopped: its workers have ended, and it has no hot copies.
    pub is_stopped: bool,
}

const HOLDER: &str = "holder:";
const VERSION: &str = "version:";
const MOVING: &str = "moving:";
const BEAT: &str = "beat:";
const NODE: &str = "node:";
const STOPPED: &str = "stopped:";

impl OwnershipRecord {
    /// Parses the words of a record; `None` if they name no router. Unknown words are ignored.
    pub fn read<'a>(words: impl IntoIterator<Item = &'a str>) -> Option<OwnershipRecord> {
        let mut found: Option<OwnershipRecord> = None;
        let (mut version, mut beat, mut is_moving, mut nodes, mut stopped) = (0, 0, false, Vec::new(), Vec::new());
        let number = |text: &str| text.parse::<u64>().unwrap_or(0);
        for word in words {
            if let Some((term, holder)) = word.strip_prefix(HOLDER).and_then(|rest| rest.split_once(':')) {
                let term = number(term);
                // With equal terms the first one wins.
                if found.as_ref().is_none_or(|found| found.term < term) {
                    found = Some(OwnershipRecord { term, holder: holder.to_owned(), ..OwnershipRecord::default() });
                }
            } else if let Some(rest) = word.strip_prefix(VERSION) {
                version = number(rest).max(version);
            } else if let Some(rest) = word.strip_prefix(BEAT) {
                beat = number(rest).max(beat);
            } else if let Some(node) = word.strip_prefix(NODE) {
                nodes.push(node.to_owned());
            } else if let Some(holder) = word.strip_prefix(STOPPED) {
                stopped.push(holder);
            } else if word.strip_prefix(MOVING).is_some() {
                is_moving = true;
            }
        }
        found.map(|mark| OwnershipRecord {
            version,
            beat,
            is_moving,
            nodes,
            is_stopped: stopped.contains(&mark.holder.as_str()),
            ..mark
        })
    }

    /// The words that represent the record.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let mut words = vec![format!("{HOLDER}{}:{}", self.term, self.holder), format!("{VERSION}{}", self.version)];
        if self.is_moving {
            words.push(format!("{MOVING}1"));
        }
        if self.beat > 0 {
            words.push(format!("{BEAT}{}", self.beat));
        }
        words.extend(self.nodes.iter().map(|node| format!("{NODE}{node}")));
        if self.is_stopped {
            words.push(format!("{STOPPED}{}", self.holder));
        }
        words
    }

    /// Returns the nodes of the record that are not listed. A slot map without them would return nil for their keys.
    #[must_use]
    pub fn missing(&self, listed: &[&str]) -> Vec<String> {
        self.nodes.iter().filter(|node| !listed.contains(&node.as_str())).cloned().collect()
    }

    /// Compares this record at a node with the record that a router would write.
    #[must_use]
    pub fn standing(&self, own: &OwnershipRecord) -> OwnershipStatus {
        match self.term.cmp(&own.term) {
            std::cmp::Ordering::Equal if self.holder == own.holder => OwnershipStatus::Ours,
            std::cmp::Ordering::Equal | std::cmp::Ordering::Greater => OwnershipStatus::Replaced { term: self.term },
            std::cmp::Ordering::Less if self.version > own.version => OwnershipStatus::Behind { version: self.version },
            std::cmp::Ordering::Less => OwnershipStatus::Free,
        }
    }
}

/// Time for which a router sends no command to a node after it has ended the connections of an earlier router there,
/// microseconds: the lease of hot copies ([`LEASE_US`](crate::hot_copies::LEASE_US)), and a tenth for clocks that run
/// at different rates.
pub const TAKE_OVER_WAIT_US: u64 = crate::hot_copies::LEASE_US / 10 * 11;

/// The router that used the state directory before this one.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum Predecessor {
    /// None: the fleet has had no router.
    #[default]
    None,
    /// The router with this [`OwnershipRecord::holder`]. Its process has provably ended.
    Ended(String),
    /// A router that may still run.
    Unknown,
}

impl Predecessor {
    /// Whether an earlier router may still serve hot copies of a node. `words` are from the node's record, read after
    /// the node has confirmed that all connections of other routers are closed; `own` is the holder of this router.
    /// `is_inherited`: an earlier router may have served the node, and this one has not yet.
    pub fn may_have_copies<'a>(&self, words: impl IntoIterator<Item = &'a str>, own: &str, is_inherited: bool) -> bool {
        let (mut others, mut stopped) = (Vec::new(), Vec::new());
        for word in words {
            if let Some((_, holder)) = word.strip_prefix(HOLDER).and_then(|rest| rest.split_once(':')) {
                others.extend((holder != own).then_some(holder));
            } else {
                stopped.extend(word.strip_prefix(STOPPED));
            }
        }
        let has_ended =
            |holder: &&str| stopped.contains(holder) || matches!(self, Self::Ended(ended) if ended == holder);
        match self {
            Self::None => false,
            // The node has restarted since it was served, and has lost the record: nothing proves that the last holder
            // has ended.
            _ if others.is_empty() => is_inherited,
            _ => !others.iter().all(has_ended),
        }
    }
}

/// Permission of a router at a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OwnershipStatus {
    /// The router owns the node.
    Ours,
    /// The router may take over.
    Free,
    /// A later router has taken over: nothing more may be sent.
    Replaced {
        /// Term of the later router.
        term: u64,
    },
    /// The node was served with a later version of the state directory: with this one, keys would not be found.
    Behind {
        /// Version in the record.
        version: u64,
    },
    /// The node keeps no ownership records.
    Unmarked,
}

/// Observation of a node by a standby.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Observation {
    /// The node did not reply.
    Unreachable,
    /// The node replied.
    Seen {
        /// Ownership record, if any.
        mark: Option<OwnershipRecord>,
        /// Connections of the fleet's routers.
        connections: usize,
    },
}

/// Time without a change of the records after which their router counts as lost, in microseconds.
pub const SILENCE_US: u64 = 10_000_000;

/// Time without connections of the fleet's routers at a node after which they count as lost, in microseconds: longer
/// than a restart of the node.
pub const ABSENCE_US: u64 = 2_000_000;

/// Decides when a standby takes over. Only the time is decided here: the takeover itself ends all commands of the old
/// router.
#[derive(Debug)]
pub struct StandbyMonitor {
    nodes: Vec<Seen>,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    is_reached: bool,
    mark: Option<OwnershipRecord>,
    /// Time of the last change of the record.
    unchanged_since_us: Option<u64>,
    /// Time since which the node has no connection of the fleet's routers.
    unconnected_since_us: Option<u64>,
}

/// Decision of a standby.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TakeoverDecision {
    /// A router serves the fleet.
    Wait,
    /// At most half of the nodes are reachable: this machine may be isolated.
    CutOff {
        /// Number of reachable nodes.
        reached: usize,
    },
    /// No router serves the fleet.
    Now,
}

impl StandbyMonitor {
    /// Creates a monitor of `nodes` nodes.
    #[must_use]
    pub fn new(nodes: usize) -> Self {
        Self { nodes: vec![Seen::default(); nodes] }
    }

    /// Records an observation of a node.
    pub fn observe(&mut self, node: usize, look: Observation, now_us: u64) {
        let Some(seen) = self.nodes.get_mut(node) else { return };
        let Observation::Seen { mark, connections } = look else {
            seen.is_reached = false;
            return;
        };
        if seen.unchanged_since_us.is_none() || seen.mark != mark {
            seen.unchanged_since_us = Some(now_us);
        }
        (seen.is_reached, seen.mark) = (true, mark);
        seen.unconnected_since_us = if connections > 0 { None } else { seen.unconnected_since_us.or(Some(now_us)) };
    }

    /// Decides whether to take over now.
    #[must_use]
    pub fn turn(&self, now_us: u64) -> TakeoverDecision {
        let reached = self.nodes.iter().filter(|seen| seen.is_reached).count();
        let is_over = |since: Option<u64>, bound| since.is_some_and(|since| now_us.saturating_sub(since) >= bound);
        // Connections without a record belong to a version that writes none and has no beat: wait until they close.
        let is_silent = |seen: &Seen| seen.mark.is_some() && is_over(seen.unchanged_since_us, SILENCE_US);
        let is_served = |seen: &Seen| !is_over(seen.unconnected_since_us, ABSENCE_US) && !is_silent(seen);
        if self.nodes.iter().any(|seen| seen.is_reached && is_served(seen)) {
            TakeoverDecision::Wait
        } else if reached * 2 <= self.nodes.len() {
            TakeoverDecision::CutOff { reached }
        } else {
            TakeoverDecision::Now
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(term: u64, holder: &str, version: u64) -> OwnershipRecord {
        OwnershipRecord { term, holder: holder.to_owned(), version, ..OwnershipRecord::default() }
    }

    #[test]
    fn a_record_is_restored_from_its_words() {
        let nodes = vec!["redis-a:6379".to_owned(), "[::1]:7001".to_owned()];
        let full = OwnershipRecord { is_moving: true, beat: 12, nodes, is_stopped: true, ..record(3, "1f-a0", 7) };
        assert_eq!(full.missing(&["[::1]:7001", "b:1"]), ["redis-a:6379"]);
        for mark in [record(1, "a", 0), full] {
            let words = mark.words();
            assert_eq!(OwnershipRecord::read(words.iter().map(String::as_str)), Some(mark));
        }
        assert_eq!(OwnershipRecord::read(["version:3", "allkeys", "holder:x"]), None);
    }

    #[test]
    fn the_highest_words_win_and_of_equal_terms_the_first() {
        let words = ["holder:2:old", "version:9", "beat:4", "holder:3:first", "version:5", "holder:3:second"];
        assert_eq!(OwnershipRecord::read(words), Some(OwnershipRecord { beat: 4, ..record(3, "first", 9) }));
    }

    #[test]
    fn a_successor_waits_unless_every_earlier_holder_has_provably_ended() {
        let stopped = OwnershipRecord { is_stopped: true, ..record(1, "old", 0) }.words();
        let silent = record(1, "old", 0).words();
        let claim = record(2, "me", 0).words();
        let waits = |before: &Predecessor, words: &[&Vec<String>], is_inherited| {
            before.may_have_copies(words.iter().copied().flatten().map(String::as_str), "me", is_inherited)
        };
        let (ended, other) = (Predecessor::Ended("old".to_owned()), Predecessor::Ended("other".to_owned()));
        assert!(waits(&Predecessor::Unknown, &[&silent, &claim], true) && waits(&other, &[&silent, &claim], false));
        assert!(!waits(&ended, &[&silent, &claim], true) && !waits(&Predecessor::Unknown, &[&stopped, &claim], true));
        let third = record(1, "third", 0).words();
        assert!(waits(&ended, &[&third, &silent, &claim], true), "the third router may still run");
        assert!(
            waits(&Predecessor::Unknown, &[&claim], true) && !waits(&Predecessor::Unknown, &[&claim], false),
            "the ownership record is lost"
        );
        assert!(!waits(&Predecessor::None, &[&claim], true), "the first router of a fleet");
    }

    #[test]
    fn a_router_takes_over_only_from_earlier_terms_and_versions() {
        let own = record(5, "me", 7);
        for (found, standing) in [
            (record(5, "me", 9), OwnershipStatus::Ours),
            (record(5, "other", 1), OwnershipStatus::Replaced { term: 5 }),
            (record(6, "other", 1), OwnershipStatus::Replaced { term: 6 }),
            (record(4, "other", 7), OwnershipStatus::Free),
            (record(4, "other", 8), OwnershipStatus::Behind { version: 8 }),
        ] {
            assert_eq!(found.standing(&own), standing, "{found:?}");
        }
    }

    #[test]
    fn a_standby_waits_while_a_router_beats_at_any_node() {
        let mut watch = StandbyMonitor::new(3);
        let seen = |beat, connections| Observation::Seen {
            mark: Some(OwnershipRecord { beat, ..record(1, "a", 0) }),
            connections,
        };
        for second in 0..20 {
            let now_us = second * 1_000_000;
            watch.observe(0, seen(1, 3), now_us);
            watch.observe(1, Observation::Unreachable, now_us);
            watch.observe(2, seen(second, 3), now_us);
            assert_eq!(watch.turn(now_us), TakeoverDecision::Wait, "{second}");
        }
        for second in 20..40 {
            let now_us = second * 1_000_000;
            watch.observe(0, seen(1, 3), now_us);
            watch.observe(2, seen(19, 3), now_us);
            assert_eq!(watch.turn(now_us) == TakeoverDecision::Now, second >= 29, "{second}: silent since 19");
        }
        // Another router has taken over.
        watch.observe(2, Observation::Seen { mark: Some(record(2, "b", 0)), connections: 3 }, 41_000_000);
        assert_eq!(watch.turn(41_000_000), TakeoverDecision::Wait);
    }

    #[test]
    fn a_standby_need_not_wait_for_silence_without_connections() {
        let mut watch = StandbyMonitor::new(1);
        let seen = |connections| Observation::Seen { mark: Some(record(1, "a", 0)), connections };
        watch.observe(0, seen(3), 0);
        watch.observe(0, seen(0), 1_000_000);
        assert_eq!(watch.turn(2_900_000), TakeoverDecision::Wait, "the node may have restarted");
        watch.observe(0, seen(2), 2_900_000);
        watch.observe(0, seen(0), 3_000_000);
        assert_eq!(watch.turn(4_900_000), TakeoverDecision::Wait, "it was only away");
        assert_eq!(watch.turn(5_000_000), TakeoverDecision::Now);
    }

    #[test]
    fn a_router_without_a_record_is_not_considered_silent() {
        let mut watch = StandbyMonitor::new(1);
        let seen = |connections| Observation::Seen { mark: None, connections };
        watch.observe(0, seen(3), 0);
        watch.observe(0, seen(3), 60_000_000);
        assert_eq!(watch.turn(60_000_000), TakeoverDecision::Wait);
        watch.observe(0, seen(0), 61_000_000);
        assert_eq!(watch.turn(63_000_000), TakeoverDecision::Now);
    }

    #[test]
    fn a_standby_that_reaches_at_most_half_of_the_nodes_waits() {
        let mut watch = StandbyMonitor::new(2);
        watch.observe(0, Observation::Seen { mark: None, connections: 0 }, 0);
        assert_eq!(watch.turn(60_000_000), TakeoverDecision::CutOff { reached: 1 });
        watch.observe(1, Observation::Seen { mark: None, connections: 0 }, 60_000_000);
        assert_eq!(watch.turn(62_000_000), TakeoverDecision::Now);
        assert_eq!(StandbyMonitor::new(1).turn(60_000_000), TakeoverDecision::CutOff { reached: 0 });
    }
}
