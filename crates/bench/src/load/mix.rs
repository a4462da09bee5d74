//! Frequencies of commands and sizes of values, as configured by a user.

use std::{fmt, str::FromStr};

use anyhow::{Context as _, Result, bail};

use crate::random::{Rng, mix};

/// Commands of the mix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads a string.
    Get,
    /// Writes a string.
    Set,
    /// Increments a counter.
    Incr,
    /// Writes a field of a hash.
    Hset,
    /// Pushes to a list, or deletes the list at [`LIST_LIMIT`] items.
    Lpush,
    /// Adds a member to a sorted set.
    Zadd,
    /// Reads [`MGET_KEYS`] strings at any nodes.
    Mget,
    /// Deletes a string.
    Del,
    /// Sets the expiry of a string to one hour.
    Expire,
}

impl Op {
    /// All commands, in the order of [`Mix`].
    pub const ALL: [Self; 9] =
        [Self::Get, Self::Set, Self::Incr, Self::Hset, Self::Lpush, Self::Zadd, Self::Mget, Self::Del, Self::Expire];

    /// Redis command name in lower case.
    pub fn name(self) -> &'static str {
        ["get", "set", "incr", "hset", "lpush", "zadd", "mget", "del", "expire"][self as usize]
    }
}

/// Keys per MGET: enough that they are rarely at one node.
pub const MGET_KEYS: usize = 4;
/// Maximum list length: at this length the list is deleted, so that memory does not grow with the duration of a run.
pub const LIST_LIMIT: u32 = 64;
/// Frequencies of commands, as weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mix([u32; 9]);

impl Default for Mix {
    /// Mostly reads, as in most caches; all others often enough to occur every second.
    fn default() -> Self {
        Self([50, 20, 6, 5, 5, 4, 4, 3, 3])
    }
}

impl FromStr for Mix {
    type Err = anyhow::Error;

    /// Parses `get=80,set=20`. Omitted commands are not sent.
    fn from_str(s: &str) -> Result<Self> {
        let names = || Op::ALL.map(Op::name).join(", ");
        let mut weights = [0; 9];
        for part in s.split(',') {
            let (name, weight) = part
                .split_once('=')
                .with_context(|| format!("\"{part}\" in a mix must read command=weight, e.g. get=80"))?;
            let op = Op::ALL.iter().find(|op| op.name().eq_ignore_ascii_case(name.trim()));
            let op = op.with_context(|| format!("no command \"{name}\" in a mix; available: {}", names()))?;
            weights[*op as usize] =
                weight.trim().parse().with_context(|| format!("the weight of \"{part}\" must be a whole number"))?;
        }
        if weights.iter().map(|w| u64::from(*w)).sum::<u64>() == 0 {
            bail!("the mix \"{s}\" sends nothing; available: {}", names());
        }
        Ok(Self(weights))
    }
}

impl fmt::Display for Mix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<_> =
            Op::ALL.iter().zip(self.0).filter(|(_, w)| *w > 0).map(|(op, w)| format!("{}={w}", op.name())).collect();
        f.write_str(&parts.join(","))
    }
}

impl Mix {
    /// Selects the next command.
    pub(super) fn pick(&self, rng: &mut Rng) -> Op {
        let mut at = rng.below(self.0.iter().map(|w| u64::from(*w)).sum());
        for (op, weight) in Op::ALL.into_iter().zip(self.0) {
            match at.checked_sub(u64::from(weight)) {
                None => return op,
                Some(rest) => at = rest,
            }
        }
        Op::Get // not reached: `at` is below the sum
    }
}

/// Sizes of values, as weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueSizes(Vec<(usize, u32)>);

/// Minimum size: values contain their key and version.
const MIN_VALUE: usize = 24;
const MAX_VALUE: usize = 512 << 20;

impl ValueSizes {
    /// Values of one size.
    pub fn fixed(bytes: usize) -> Self {
        Self(vec![(bytes.max(MIN_VALUE), 1)])
    }

    /// Size of a version of a key. Deterministic, so that the checker can compute it too.
    pub(super) fn of(&self, id: u64, version: u32) -> usize {
        let total: u64 = self.0.iter().map(|(_, w)| u64::from(*w)).sum();
        let mut at = mix(id.rotate_left(32) ^ u64::from(version)) % total;
        for (bytes, weight) in &self.0 {
            match at.checked_sub(u64::from(*weight)) {
                None => return *bytes,
                Some(rest) => at = rest,
            }
        }
        MIN_VALUE // not reached: `at` is below the sum
    }
}

impl FromStr for ValueSizes {
    type Err = anyhow::Error;

    /// Parses `64` or `64:90,1024:9,16384:1` (bytes:weight).
    fn from_str(s: &str) -> Result<Self> {
        let mut sizes = Vec::new();
        for part in s.split(',') {
            let (bytes, weight) = part.split_once(':').unwrap_or((part, "1"));
            let bytes: usize = bytes
                .trim()
                .parse()
                .with_context(|| format!("\"{part}\" in value sizes must read bytes or bytes:weight"))?;
            let weight: u32 =
                weight.trim().parse().with_context(|| format!("the weight of \"{part}\" must be a whole number"))?;
            if !(MIN_VALUE..=MAX_VALUE).contains(&bytes) {
                bail!(
                    "value sizes must lie between {MIN_VALUE} (a value names its key and version) and {MAX_VALUE} bytes, not {bytes}"
                );
            }
            if weight > 0 {
                sizes.push((bytes, weight));
            }
        }
        if sizes.is_empty() {
            bail!("the value sizes \"{s}\" have no weight at all");
        }
        Ok(Self(sizes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_and_sizes_are_parsed_or_refused() {
        let mix: Mix = "get=80, SET=20".parse().expect("a mix");
        assert_eq!(mix.to_string(), "get=80,set=20");
        let mut rng = Rng::new(1);
        let gets = (0..10_000).filter(|_| mix.pick(&mut rng) == Op::Get).count();
        assert!((7800..8200).contains(&gets), "{gets}");
        for bad in ["", "get", "got=1", "get=x", "get=0"] {
            assert!(bad.parse::<Mix>().is_err(), "{bad}");
        }
        let sizes: ValueSizes = "64:9,1024:1".parse().expect("sizes");
        let large = (0..10_000).filter(|i| sizes.of(*i, 1) == 1024).count();
        assert!((850..1150).contains(&large), "{large}");
        for bad in ["", "1", "64:x", "64:0", "999999999999"] {
            assert!(bad.parse::<ValueSizes>().is_err(), "{bad}");
        }
    }
}
