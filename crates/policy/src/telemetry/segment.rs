//! Space-saving (Metwally et al., ICDT 2005), as used by SwitchKV: finds the most used keys in bounded memory.
//!
//! Keys with equal counts share a bucket, oldest first, and buckets are ordered by count. A use moves its key to the
//! end of the next bucket. A new key replaces the oldest key of the lowest bucket and inherits its count, because it
//! may have been used as often before. A count is therefore never too low, and too high by at most the total uses
//! divided by the number of keys.
//!
//! Uses *seen* since a key entered the table are counted separately and never too high. Reports use these: among many
//! keys used once each, all counts are high although nothing was seen.

use super::{Identity, Name};

const NONE: u16 = u16::MAX;

/// Kind of use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AccessKind {
    /// Read forwarded to the node.
    Read,
    /// Any other command.
    Write,
    /// Read served from a hot copy. The node does not see it.
    Hit,
}

/// One use of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeyAccess {
    /// Kind of use.
    pub how: AccessKind,
    /// Size of the command, in bytes.
    pub bytes: u32,
}

/// Counters of a key in a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Counted {
    /// Hash of [`Identity`].
    pub hash: u64,
    /// Database of the key.
    pub database: u32,
    /// Key name, if short enough.
    pub name: Name,
    /// Reads seen at the node.
    pub reads: u32,
    /// Reads served from hot copies.
    pub hits: u32,
    /// All other uses.
    pub writes: u32,
    /// Bytes of commands.
    pub bytes: u64,
    /// Bytes of replies.
    pub reply_bytes: u64,
    /// Total time from sending to reply, in microseconds.
    pub us: u64,
    /// Maximum number of uses before the key entered the table.
    pub error: u32,
}

impl Counted {
    /// Number of uses seen.
    #[must_use]
    pub const fn seen(&self) -> u32 {
        self.reads + self.writes + self.hits
    }

    fn new(key: Identity<'_>, error: u32) -> Self {
        let Identity { hash, database, key } = key;
        Self {
            hash,
            database,
            name: Name::of(key),
            reads: 0,
            hits: 0,
            writes: 0,
            bytes: 0,
            reply_bytes: 0,
            us: 0,
            error,
        }
    }
}

/// Counters of a node in a segment.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// Uses at the node, over all keys.
    pub uses: u64,
    /// Hits instead of uses at the node, over all keys.
    pub hits: u64,
    /// Keys in the tables. A key occurs once per worker that has it.
    pub keys: Vec<Counted>,
    /// Maximum sampling factor: each counted use stands for up to this many.
    pub one_in: u32,
}

impl Counts {
    /// Estimates the total from a sample of one in `one_in`.
    #[must_use]
    pub fn scaled(mut self, one_in: u32) -> Self {
        let of_key = |count: u32| count.saturating_mul(one_in);
        self.one_in = one_in;
        let one_in = u64::from(one_in);
        (self.uses, self.hits) = (self.uses * one_in, self.hits * one_in);
        for key in &mut self.keys {
            let Counted { reads, hits, writes, error, .. } = *key;
            (key.reads, key.hits, key.writes, key.error) = (of_key(reads), of_key(hits), of_key(writes), of_key(error));
            (key.bytes, key.reply_bytes, key.us) = (key.bytes * one_in, key.reply_bytes * one_in, key.us * one_in);
        }
        self
    }

    /// Adds the counts of another worker at the same node.
    pub fn add(&mut self, other: Self) {
        self.uses += other.uses;
        self.hits += other.hits;
        self.keys.extend(other.keys);
        self.one_in = self.one_in.max(other.one_in);
    }
}

#[derive(Clone, Debug)]
struct Entry {
    counted: Counted,
    bucket: u16,
    /// Within the bucket.
    older: u16,
    newer: u16,
}

/// Keys with equal counts.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    count: u32,
    oldest: u16,
    newest: u16,
    lower: u16,
    higher: u16,
}

/// Uses by one worker at one node in one segment.
#[derive(Clone, Debug)]
pub struct Segment {
    entries: Vec<Entry>,
    keys_max: usize,
    buckets: Vec<Bucket>,
    free: Vec<u16>,
    lowest: u16,
    /// Index of entries by hash, with linear probing.
    index: Vec<u16>,
    uses: u64,
    hits: u64,
}

impl Segment {
    /// Creates an empty segment for up to `keys_max` keys, from 1 to 16,384.
    #[must_use]
    pub fn new(keys_max: usize) -> Self {
        let keys_max = keys_max.clamp(1, 1 << 14);
        Self {
            entries: Vec::new(),
            keys_max,
            buckets: Vec::new(),
            free: Vec::new(),
            lowest: NONE,
            index: vec![NONE; (4 * keys_max).next_power_of_two()],
            uses: 0,
            hits: 0,
        }
    }

    /// Records a use. Constant cost, no allocation.
    #[inline]
    pub fn note(&mut self, key: Identity<'_>, used: KeyAccess) {
        let is_hit = used.how == AccessKind::Hit;
        self.uses += u64::from(!is_hit);
        self.hits += u64::from(is_hit);
        let at = match self.find(key.hash) {
            Ok(at) => {
                self.raise(at);
                at
            }
            Err(place) if self.entries.len() < self.keys_max => self.add(place, key),
            Err(_) => self.replace(key),
        };
        let counted = &mut self.entries[usize::from(at)].counted;
        counted.reads += u32::from(used.how == AccessKind::Read);
        counted.writes += u32::from(used.how == AccessKind::Write);
        counted.hits += u32::from(is_hit);
        counted.bytes += u64::from(used.bytes);
    }

    /// Records the reply to a use: its size, and the time since sending in microseconds. Ignored if the key has been
    /// replaced in the meantime.
    pub fn answered(&mut self, hash: u64, bytes: u64, us: u64) {
        if let Ok(at) = self.find(hash) {
            let counted = &mut self.entries[usize::from(at)].counted;
            counted.reply_bytes += bytes;
            counted.us += us;
        }
    }

    /// Uses at the node, over all keys.
    #[must_use]
    pub const fn uses(&self) -> u64 {
        self.uses
    }

    /// Hits over all keys.
    #[must_use]
    pub const fn hits(&self) -> u64 {
        self.hits
    }

    /// Maximum number of uses of a key that is not in the table.
    #[must_use]
    pub fn floor(&self) -> u32 {
        if self.entries.len() < self.keys_max { 0 } else { self.buckets[usize::from(self.lowest)].count }
    }

    /// Ends the segment and returns its keys, in no particular order. The segment is empty afterwards.
    pub fn take(&mut self) -> Counts {
        let keys = self.entries.drain(..).map(|entry| entry.counted).collect();
        self.buckets.clear();
        self.free.clear();
        self.lowest = NONE;
        self.index.fill(NONE);
        Counts { uses: std::mem::take(&mut self.uses), hits: std::mem::take(&mut self.hits), keys, one_in: 1 }
    }

    /// Returns the entry of a key, or the place in the index for a new one.
    #[inline]
    fn find(&self, hash: u64) -> Result<u16, usize> {
        let mask = self.index.len() - 1;
        let mut place = hash as usize & mask;
        loop {
            match self.index[place] {
                NONE => return Err(place),
                at if self.entries[usize::from(at)].counted.hash == hash => return Ok(at),
                _ => place = (place + 1) & mask,
            }
        }
    }

    fn add(&mut self, place: usize, key: Identity<'_>) -> u16 {
        let at = self.entries.len() as u16;
        self.entries.push(Entry { counted: Counted::new(key, 0), bucket: NONE, older: NONE, newer: NONE });
        self.index[place] = at;
        let is_there = self.lowest != NONE && self.buckets[usize::from(self.lowest)].count == 1;
        let bucket = if is_there { self.lowest } else { self.new_bucket(1, NONE, self.lowest) };
        self.append(at, bucket);
        at
    }

    fn replace(&mut self, key: Identity<'_>) -> u16 {
        let Bucket { oldest: at, count, .. } = self.buckets[usize::from(self.lowest)];
        self.forget(self.entries[usize::from(at)].counted.hash);
        self.entries[usize::from(at)].counted = Counted::new(key, count);
        if let Err(place) = self.find(key.hash) {
            self.index[place] = at;
        }
        self.raise(at);
        at
    }

    /// Removes a hash from the index. Later entries of the probe sequence move up.
    fn forget(&mut self, hash: u64) {
        let mask = self.index.len() - 1;
        let mut hole = hash as usize & mask;
        while self.index[hole] != NONE && self.entries[usize::from(self.index[hole])].counted.hash != hash {
            hole = (hole + 1) & mask;
        }
        let mut next = (hole + 1) & mask;
        while self.index[next] != NONE {
            let own = self.entries[usize::from(self.index[next])].counted.hash as usize & mask;
            // Whether the entry's own place is at or before the hole in probe order.
            if (next.wrapping_sub(own) & mask) >= (next.wrapping_sub(hole) & mask) {
                self.index[hole] = self.index[next];
                hole = next;
            }
            next = (next + 1) & mask;
        }
        self.index[hole] = NONE;
    }

    /// Moves a key to the next higher count.
    #[inline]
    fn raise(&mut self, at: u16) {
        let from = self.entries[usize::from(at)].bucket;
        let Bucket { count, oldest, newest, higher, .. } = self.buckets[usize::from(from)];
        let is_next = higher != NONE && self.buckets[usize::from(higher)].count == count + 1;
        if oldest == newest && !is_next {
            // The only key of its bucket: raise the bucket's count.
            self.buckets[usize::from(from)].count += 1;
            return;
        }
        let to = if is_next { higher } else { self.new_bucket(count + 1, from, higher) };
        self.detach(at, from);
        self.append(at, to);
    }

    fn new_bucket(&mut self, count: u32, lower: u16, higher: u16) -> u16 {
        let bucket = Bucket { count, oldest: NONE, newest: NONE, lower, higher };
        let number = self.free.pop().unwrap_or(self.buckets.len() as u16);
        match self.buckets.get_mut(usize::from(number)) {
            Some(place) => *place = bucket,
            None => self.buckets.push(bucket),
        }
        match lower {
            NONE => self.lowest = number,
            lower => self.buckets[usize::from(lower)].higher = number,
        }
        if higher != NONE {
            self.buckets[usize::from(higher)].lower = number;
        }
        number
    }

    fn append(&mut self, at: u16, to: u16) {
        let bucket = &mut self.buckets[usize::from(to)];
        let older = std::mem::replace(&mut bucket.newest, at);
        if older == NONE {
            bucket.oldest = at;
        } else {
            self.entries[usize::from(older)].newer = at;
        }
        let entry = &mut self.entries[usize::from(at)];
        (entry.bucket, entry.older, entry.newer) = (to, older, NONE);
    }

    fn detach(&mut self, at: u16, from: u16) {
        let Entry { older, newer, .. } = self.entries[usize::from(at)];
        match older {
            NONE => self.buckets[usize::from(from)].oldest = newer,
            older => self.entries[usize::from(older)].newer = newer,
        }
        match newer {
            NONE => self.buckets[usize::from(from)].newest = older,
            newer => self.entries[usize::from(newer)].older = older,
        }
        let Bucket { oldest, lower, higher, .. } = self.buckets[usize::from(from)];
        if oldest != NONE {
            return;
        }
        match lower {
            NONE => self.lowest = higher,
            lower => self.buckets[usize::from(lower)].higher = higher,
        }
        if higher != NONE {
            self.buckets[usize::from(higher)].lower = lower;
        }
        self.free.push(from);
    }

    /// Checks the invariants, for tests.
    ///
    /// # Panics
    /// If one is violated.
    pub fn check(&self) {
        let (mut bucket, mut lower, mut known, mut counts) = (self.lowest, NONE, 0, 0_u64);
        while bucket != NONE {
            let found = self.buckets[usize::from(bucket)];
            assert_eq!(found.lower, lower, "buckets link to the lower bucket");
            assert!(lower == NONE || self.buckets[usize::from(lower)].count < found.count, "buckets are in order");
            let (mut at, mut older) = (found.oldest, NONE);
            assert_ne!(at, NONE, "no bucket is empty");
            while at != NONE {
                let entry = &self.entries[usize::from(at)];
                assert_eq!((entry.bucket, entry.older), (bucket, older), "an entry knows its place");
                assert_eq!(self.find(entry.counted.hash), Ok(at), "it is found");
                assert_eq!(entry.counted.seen() + entry.counted.error, found.count, "seen and not seen are the count");
                (known, counts) = (known + 1, counts + u64::from(found.count));
                (older, at) = (at, entry.newer);
            }
            assert_eq!(found.newest, older, "a bucket knows its last");
            (lower, bucket) = (bucket, found.higher);
        }
        assert_eq!(known, self.entries.len(), "each entry is in a bucket");
        assert_eq!(counts, self.uses + self.hits, "counts are all uses");
        assert_eq!(self.index.iter().filter(|at| **at != NONE).count(), known, "the index has each once");
    }
}
