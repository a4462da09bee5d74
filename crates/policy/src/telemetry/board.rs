//! Load per node and key, aggregated over workers and smoothed over time: SwitchKV's periodic report,
//! `L = a f + (1 - a) L'` for each segment.

use std::collections::{BTreeMap, BTreeSet};

use super::{Counted, Counts, Name};
use crate::injected::InjectedBug;
use crate::topology::NodeId;

/// Parameters of the smoothing.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Weights {
    /// Weight of the newest segment, 0 to 1. The paper gives no value. With one half, an unused key has an eighth of
    /// its load after three segments.
    pub newest: f64,
    /// Maximum number of keys per node.
    pub keys_max: usize,
}

impl Default for Weights {
    fn default() -> Self {
        Self { newest: 0.5, keys_max: 4096 }
    }
}

/// Minimum rate: less than one use in a quarter of an hour counts as unused.
const LEAST: f64 = 1e-3;

/// Smoothed rates, per second.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Rates {
    /// Reads forwarded to the node.
    pub reads: f64,
    /// Reads served from hot copies.
    pub hits: f64,
    /// All other commands.
    pub writes: f64,
    /// Bytes of commands.
    pub bytes: f64,
    /// Bytes of replies.
    pub reply_bytes: f64,
    /// Seconds between sending and reply: on average, this many commands are in flight.
    pub busy: f64,
}

impl Rates {
    /// Commands for the key per second, including hits.
    #[must_use]
    pub fn commands(&self) -> f64 {
        self.reads + self.writes + self.hits
    }

    /// Commands at the node per second.
    #[must_use]
    pub fn at_node(&self) -> f64 {
        self.reads + self.writes
    }

    fn weighed(self, weight: f64, by: impl Fn(f64, f64) -> f64, other: Self) -> Self {
        let one = |own: f64, other: f64| by(own, weight * other);
        Self {
            reads: one(self.reads, other.reads),
            hits: one(self.hits, other.hits),
            writes: one(self.writes, other.writes),
            bytes: one(self.bytes, other.bytes),
            reply_bytes: one(self.reply_bytes, other.reply_bytes),
            busy: one(self.busy, other.busy),
        }
    }
}

/// A hot key.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct HotKey {
    /// Hash of [`Identity`](super::Identity).
    pub hash: u64,
    /// Database of the key.
    pub database: u32,
    /// Key name, if short enough.
    pub name: Name,
    /// Time since the key was first counted, in seconds.
    pub seconds: f64,
    /// Observed rates. Never above the true rates.
    pub rates: Rates,
}

/// The hottest keys of a node.
#[derive(Clone, PartialEq, Debug)]
pub struct HotNode {
    /// The node.
    pub node: NodeId,
    /// Commands at the node per second, over all keys.
    pub uses: f64,
    /// Hits per second, over all keys.
    pub hits: f64,
    /// Maximum sampling factor: each counted use stands for up to this many. A rate of a few times this is a guess.
    pub one_in: u32,
    /// The keys, hottest first.
    pub keys: Vec<HotKey>,
}

#[derive(Clone, Debug, Default)]
struct NodeKeys {
    uses: f64,
    hits: f64,
    one_in: u32,
    keys: BTreeMap<u64, HotKey>,
}

/// A bug of the board that tests can inject, to show that they would detect it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(feature = "planted-bugs"), allow(unreachable_pub))]
pub enum Bug {
    /// The rates of a key that is no longer used stay as they were.
    NoDecay,
}

/// The hottest keys of all nodes.
#[derive(Clone, Debug, Default)]
pub struct Board {
    weights: Weights,
    nodes: BTreeMap<NodeId, NodeKeys>,
    planted: InjectedBug<Bug>,
}

impl Board {
    /// Creates an empty board.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self { weights, nodes: BTreeMap::new(), planted: InjectedBug::default() }
    }

    /// Creates an empty board with an injected bug.
    #[cfg(feature = "planted-bugs")]
    #[must_use]
    pub fn with_bug(weights: Weights, bug: Option<Bug>) -> Self {
        Self { planted: InjectedBug::new(bug), ..Self::new(weights) }
    }

    /// Adds a segment of `us` microseconds with scaled counts. Nodes without counts had no use.
    pub fn segment(&mut self, mut counts: BTreeMap<NodeId, Counts>, us: u64) {
        for node in self.nodes.keys() {
            counts.entry(*node).or_default();
        }
        let scale = 1e6 / us.max(1) as f64;
        for (node, counts) in counts {
            self.nodes.entry(node).or_default().segment(counts, self.weights, scale, us as f64 / 1e6, self.planted);
        }
        self.nodes.retain(|_, node| node.uses + node.hits > LEAST);
    }

    /// Nodes in use by id, each with up to `keys` of its hottest keys.
    pub fn nodes(&self, keys: usize) -> impl Iterator<Item = HotNode> {
        self.nodes.iter().map(move |(id, node)| {
            let NodeKeys { uses, hits, one_in, .. } = *node;
            HotNode { node: *id, uses, hits, one_in, keys: node.hottest(keys) }
        })
    }
}

impl NodeKeys {
    fn segment(&mut self, counts: Counts, weights: Weights, scale: f64, seconds: f64, planted: InjectedBug<Bug>) {
        let weight = weights.newest.clamp(0.0, 1.0);
        let weighed = |load: f64, count: u64| load * (1.0 - weight) + weight * count as f64 * scale;
        (self.uses, self.hits) = (weighed(self.uses, counts.uses), weighed(self.hits, counts.hits));
        if counts.one_in > 0 {
            self.one_in = counts.one_in;
        }
        let used: BTreeSet<u64> = match planted.is(Bug::NoDecay) {
            true => counts.keys.iter().map(|key| key.hash).collect(),
            false => BTreeSet::new(),
        };
        for (hash, hot) in &mut self.keys {
            if !planted.is(Bug::NoDecay) || used.contains(hash) {
                hot.rates = Rates::default().weighed(1.0 - weight, |_, other| other, hot.rates);
            }
            hot.seconds += seconds;
        }
        for counted in counts.keys {
            let Counted { hash, database, name, .. } = counted;
            let seen = Rates {
                reads: f64::from(counted.reads) * scale,
                hits: f64::from(counted.hits) * scale,
                writes: f64::from(counted.writes) * scale,
                bytes: counted.bytes as f64 * scale,
                reply_bytes: counted.reply_bytes as f64 * scale,
                busy: counted.us as f64 * scale / 1e6,
            };
            let hot =
                self.keys.entry(hash).or_insert(HotKey { hash, database, name, seconds: 0.0, rates: Rates::default() });
            hot.rates = hot.rates.weighed(weight, |own, other| own + other, seen);
        }
        if self.keys.len() > weights.keys_max {
            let coldest = self.hottest(usize::MAX).split_off(weights.keys_max);
            coldest.iter().for_each(|hot| {
                self.keys.remove(&hot.hash);
            });
        }
        self.keys.retain(|_, hot| hot.rates.commands() > LEAST);
    }

    fn hottest(&self, keys: usize) -> Vec<HotKey> {
        let mut all: Vec<HotKey> = self.keys.values().copied().collect();
        all.sort_unstable_by(|one, other| {
            other.rates.commands().total_cmp(&one.rates.commands()).then(one.hash.cmp(&other.hash))
        });
        all.truncate(keys);
        all
    }
}
