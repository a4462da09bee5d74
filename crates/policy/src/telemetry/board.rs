//! What all workers have counted, weighed over time: SwitchKV's periodic report, `L = a f + (1 - a) L'` for each
//! segment.

use std::collections::BTreeMap;

use super::{Counted, Counts, Name};
use crate::topology::NodeId;

/// How segments are weighed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Weights {
    /// Share of the newest segment in what is reported. The paper leaves it open: half means that a key which is not
    /// used any more has an eighth of its load after three segments.
    pub newest: f64,
    /// Keys of each node that are remembered.
    pub keys_max: usize,
}

impl Default for Weights {
    fn default() -> Self {
        Self { newest: 0.5, keys_max: 4096 }
    }
}

/// Less than one use in a quarter of an hour is none.
const LEAST: f64 = 1e-3;

/// Uses in a second, weighed.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Rates {
    /// Of commands that only read, at the node.
    pub reads: f64,
    /// Of those that hot copies answered.
    pub hits: f64,
    /// Of all others.
    pub writes: f64,
    /// Of bytes of the commands.
    pub bytes: f64,
    /// Of bytes of what answered them.
    pub reply_bytes: f64,
    /// Of seconds that the node had them, from sending to the answer: so many are there at a time, on average.
    pub busy: f64,
}

impl Rates {
    /// The load of the key: commands in a second, whoever answers.
    #[must_use]
    pub fn commands(&self) -> f64 {
        self.reads + self.writes + self.hits
    }

    /// Its share of that of the node.
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

/// A key that is used much.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hot {
    /// Its hash.
    pub hash: u64,
    /// The database that it is in.
    pub database: u32,
    /// Its name.
    pub name: Name,
    /// It has been among the keys that are known for so many seconds.
    pub seconds: f64,
    /// How much it is used, never more than was seen.
    pub rates: Rates,
}

/// The keys of a node that are used most.
#[derive(Clone, PartialEq, Debug)]
pub struct HotNode {
    /// The node.
    pub node: NodeId,
    /// Uses of its keys in a second that went there.
    pub uses: f64,
    /// Those that hot copies answered.
    pub hits: f64,
    /// A use that was counted stands for at most so many: a rate of few times that is a guess.
    pub one_in: u32,
    /// The keys, the hottest first.
    pub keys: Vec<Hot>,
}

#[derive(Clone, Debug, Default)]
struct NodeKeys {
    uses: f64,
    hits: f64,
    one_in: u32,
    keys: BTreeMap<u64, Hot>,
}

/// The keys of all nodes that are used most.
#[derive(Clone, Debug, Default)]
pub struct Board {
    weights: Weights,
    nodes: BTreeMap<NodeId, NodeKeys>,
}

impl Board {
    /// An empty one.
    #[must_use]
    pub fn new(weights: Weights) -> Self {
        Self { weights, nodes: BTreeMap::new() }
    }

    /// A segment of `us` microseconds has ended: the uses in it, scaled to all. A node without any was not used.
    pub fn segment(&mut self, mut counts: BTreeMap<NodeId, Counts>, us: u64) {
        for node in self.nodes.keys() {
            counts.entry(*node).or_default();
        }
        let scale = 1e6 / us.max(1) as f64;
        for (node, counts) in counts {
            self.nodes.entry(node).or_default().segment(counts, self.weights, scale, us as f64 / 1e6);
        }
        self.nodes.retain(|_, node| node.uses + node.hits > LEAST);
    }

    /// The nodes that are used, in the order of their numbers, each with so many keys.
    pub fn nodes(&self, keys: usize) -> impl Iterator<Item = HotNode> {
        self.nodes.iter().map(move |(id, node)| {
            let NodeKeys { uses, hits, one_in, .. } = *node;
            HotNode { node: *id, uses, hits, one_in, keys: node.hottest(keys) }
        })
    }
}

impl NodeKeys {
    fn segment(&mut self, counts: Counts, weights: Weights, scale: f64, seconds: f64) {
        let weight = weights.newest.clamp(0.0, 1.0);
        let weighed = |load: f64, count: u64| load * (1.0 - weight) + weight * count as f64 * scale;
        (self.uses, self.hits) = (weighed(self.uses, counts.uses), weighed(self.hits, counts.hits));
        if counts.one_in > 0 {
            self.one_in = counts.one_in;
        }
        for hot in self.keys.values_mut() {
            hot.rates = Rates::default().weighed(1.0 - weight, |_, other| other, hot.rates);
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
                self.keys.entry(hash).or_insert(Hot { hash, database, name, seconds: 0.0, rates: Rates::default() });
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

    fn hottest(&self, keys: usize) -> Vec<Hot> {
        let mut all: Vec<Hot> = self.keys.values().copied().collect();
        all.sort_unstable_by(|one, other| {
            other.rates.commands().total_cmp(&one.rates.commands()).then(one.hash.cmp(&other.hash))
        });
        all.truncate(keys);
        all
    }
}
