//! Listed keys of a move, by slot. In memory while they are few, otherwise in files.
//!
//! A scan of a node returns the keys of all slots in no order, but legs need them by slot. So each key is appended to
//! the *part* of its slot, and a leg reads the parts of its slots. Duplicates are possible and harmless.
//!
//! Only the first `written` bytes of a file count. Bytes of a failed write are overwritten by the next write.

use std::collections::BTreeSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::PathBuf;

use switchyard_policy::migration::Key;
use switchyard_policy::topology::{SLOT_NUMBERS, Slot};

/// Slots per part.
const PART_SLOTS: usize = 64;

/// Maximum bytes of all parts in memory. Above it the largest parts are written out.
const MEMORY_MAX: usize = 64 << 20;

/// Chunk size of a part. A single growing vector would be copied repeatedly and reserve up to twice its size.
const PIECE: usize = 4 << 10;

#[derive(Debug)]
pub(super) struct Spool {
    directory: PathBuf,
    parts: Vec<Part>,
    bytes: usize,
    /// Maximum bytes in memory. Above it the largest parts are written out.
    memory_max: usize,
    /// Size in bytes for the next attempt after a failed write.
    try_again_at: Option<usize>,
    /// Listed keys per slot.
    counts: Vec<u32>,
}

#[derive(Debug, Default)]
struct Part {
    /// Entries of slot, length and key. Each is within one chunk.
    pieces: Vec<Vec<u8>>,
    bytes: usize,
    file: Option<PathBuf>,
    /// Valid bytes of the file.
    written: u64,
}

/// Failure to write the list.
#[derive(Debug)]
pub(super) struct MissingKeys {
    pub(super) error: io::Error,
    /// Slots with missing keys, which must be listed from the node. The keys of all other slots are complete.
    pub(super) slots: BTreeSet<Slot>,
}

impl Part {
    fn add(&mut self, slot: Slot, len: u32, key: &[u8]) {
        let size = 6 + key.len();
        if self.pieces.last().is_none_or(|piece| piece.len() + size > piece.capacity()) {
            self.pieces.push(Vec::with_capacity(PIECE.max(size)));
        }
        let Some(piece) = self.pieces.last_mut() else { return };
        piece.extend_from_slice(&slot.number().to_le_bytes());
        piece.extend_from_slice(&len.to_le_bytes());
        piece.extend_from_slice(key);
        self.bytes += size;
    }
}

impl Spool {
    /// Creates an empty spool. The directory is created when it is needed.
    pub(super) fn new(directory: PathBuf) -> Self {
        let parts = (0..SLOT_NUMBERS / PART_SLOTS).map(|_| Part::default()).collect();
        Self { directory, parts, bytes: 0, memory_max: MEMORY_MAX, try_again_at: None, counts: vec![0; SLOT_NUMBERS] }
    }

    /// Adds a key of a slot. If writes fail, keys stay in memory, up to twice the normal limit.
    pub(super) fn add(&mut self, slot: Slot, key: &[u8]) -> Result<(), MissingKeys> {
        self.add_by(slot, key, |file, bytes, at| file.write_all_at(bytes, at))
    }

    fn add_by(
        &mut self,
        slot: Slot,
        key: &[u8],
        write: impl FnMut(&File, &[u8], u64) -> io::Result<()>,
    ) -> Result<(), MissingKeys> {
        let Ok(len) = u32::try_from(key.len()) else {
            return Err(MissingKeys { error: io::Error::other("a key of more than 4 GiB"), slots: [slot].into() });
        };
        self.parts[slot.index() / PART_SLOTS].add(slot, len, key);
        self.bytes += key.len() + 6;
        self.counts[slot.index()] += 1;
        if self.bytes <= self.try_again_at.unwrap_or(self.memory_max) {
            return Ok(());
        }
        let outcome = self.write_out(write).map_err(|error| MissingKeys { error, slots: self.drop_largest_parts() });
        self.try_again_at = outcome.is_err().then_some(self.bytes + self.memory_max / 16);
        outcome
    }

    /// Number of keys added to a slot.
    pub(super) fn count_in_slot(&self, slot: Slot) -> u32 {
        self.counts[slot.index()]
    }

    /// Writes out the largest parts until half of the memory is free.
    fn write_out(&mut self, mut write: impl FnMut(&File, &[u8], u64) -> io::Result<()>) -> io::Result<()> {
        // Key names are private. Directories that systemd creates for `StateDirectory=` are readable by all users.
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
        while self.bytes > self.memory_max / 2 {
            let Some((number, part)) = self.parts.iter_mut().enumerate().max_by_key(|(_, part)| part.bytes) else {
                break;
            };
            let path = self.directory.join(format!("{number}.keys"));
            let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
            let mut end = part.written;
            for piece in &part.pieces {
                write(&file, piece, end)?;
                end += piece.len() as u64;
            }
            (part.file, part.written) = (Some(path), end);
            self.bytes -= part.bytes;
            (part.pieces, part.bytes) = (Vec::new(), 0);
        }
        Ok(())
    }

    /// Drops keys to stay within the memory limit when writes fail. Returns their slots.
    fn drop_largest_parts(&mut self) -> BTreeSet<Slot> {
        let mut slots = BTreeSet::new();
        let every = vec![true; SLOT_NUMBERS];
        while self.bytes > 2 * self.memory_max {
            let Some(part) = self.parts.iter_mut().max_by_key(|part| part.bytes) else { break };
            let mut note = |slot, _: &[u8]| {
                slots.insert(slot);
            };
            part.pieces.iter().for_each(|piece| take(piece, &every, &mut note));
            self.bytes -= part.bytes;
            (part.pieces, part.bytes) = (Vec::new(), 0);
        }
        slots
    }

    /// Returns the leading slots that share one part. `slots` is sorted.
    pub(super) fn leading_part(slots: &[Slot]) -> &[Slot] {
        let part = |slot: &Slot| slot.index() / PART_SLOTS;
        let count = slots.iter().take_while(|slot| part(slot) == part(&slots[0])).count();
        &slots[..count]
    }

    /// Returns the keys of these slots. They stay until [`Spool::forget`].
    pub(super) fn keys(&self, slots: &[Slot]) -> io::Result<Vec<Key>> {
        let mut keys = Vec::new();
        self.for_each(slots, |_, key| keys.push(Key::from(key)))?;
        Ok(keys)
    }

    pub(super) fn for_each(&self, slots: &[Slot], mut with: impl FnMut(Slot, &[u8])) -> io::Result<()> {
        let mut wanted = vec![false; SLOT_NUMBERS];
        for slot in slots {
            wanted[slot.index()] = true;
        }
        let mut numbers: Vec<usize> = slots.iter().map(|slot| slot.index() / PART_SLOTS).collect();
        numbers.sort_unstable();
        numbers.dedup();
        for number in numbers {
            let part = &self.parts[number];
            if let Some(path) = &part.file {
                let mut written = Vec::new();
                File::open(path)?.take(part.written).read_to_end(&mut written)?;
                if written.len() as u64 != part.written {
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "a file of keys is truncated"));
                }
                take(&written, &wanted, &mut with);
            }
            part.pieces.iter().for_each(|piece| take(piece, &wanted, &mut with));
        }
        Ok(())
    }

    /// Drops the keys of slots that were handed over. Frees the memory of parts without other keys.
    pub(super) fn forget(&mut self, slots: &[Slot]) {
        for slot in slots {
            self.counts[slot.index()] = 0;
        }
        let mut numbers: Vec<usize> = slots.iter().map(|slot| slot.index() / PART_SLOTS).collect();
        numbers.dedup();
        for number in numbers {
            if self.counts[number * PART_SLOTS..][..PART_SLOTS].iter().all(|count| *count == 0) {
                let part = &mut self.parts[number];
                self.bytes -= part.bytes;
                (part.pieces, part.bytes) = (Vec::new(), 0);
            }
        }
    }
}

fn take(mut entries: &[u8], wanted: &[bool], with: &mut impl FnMut(Slot, &[u8])) {
    while let Some((slot, rest)) = entries.split_first_chunk::<2>()
        && let Some((len, rest)) = rest.split_first_chunk::<4>()
        && let Some((key, rest)) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)
    {
        if let Some(slot) = Slot::new(u16::from_le_bytes(*slot))
            && wanted[slot.index()]
        {
            with(slot, key);
        }
        entries = rest;
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        if self.parts.iter().any(|part| part.file.is_some()) {
            // After a failure, the next start removes the rest.
            let _ = std::fs::remove_dir_all(&self.directory);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use switchyard_policy::topology::crc16_slot;

    use super::*;

    #[test]
    fn keys_are_read_by_slot_from_memory_and_files() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut spool = Spool::new(dir.path().join("move-1"));
        let large = vec![b'x'; 1 << 20];
        let mut slots = std::collections::BTreeSet::new();
        for number in 0..100 {
            let mut key = format!("{{{number}}}").into_bytes();
            key.extend_from_slice(&large);
            slots.insert(crc16_slot(&key));
            spool.add(crc16_slot(&key), &key).expect("added");
        }
        let directory = dir.path().join("move-1");
        let files = std::fs::read_dir(&directory).expect("100 MB do not stay in memory");
        let modes: Vec<u32> = files
            .map(|file| file.and_then(|file| file.metadata()).expect("a file").permissions().mode() & 0o777)
            .collect();
        assert!(!modes.is_empty() && modes.iter().all(|mode| *mode == 0o600), "{modes:?}");
        assert_eq!(std::fs::metadata(&directory).expect("there").permissions().mode() & 0o777, 0o700);
        let slots: Vec<Slot> = slots.into_iter().collect();
        assert_eq!(spool.keys(&slots).expect("read").len(), 100);
        let one = crc16_slot(b"{7}");
        let found = spool.keys(&[one]).expect("read");
        assert!(found.iter().any(|k| k.starts_with(b"{7}")) && found.iter().all(|k| crc16_slot(k) == one));
        assert_eq!(spool.count_in_slot(one) as usize, found.len());
        let (mut left, mut by_parts) = (&slots[..], 0);
        while !left.is_empty() {
            let first = Spool::leading_part(left);
            by_parts += spool.keys(first).expect("read").len();
            left = &left[first.len()..];
        }
        assert_eq!(by_parts, 100, "part by part");
        spool.forget(&slots);
        assert_eq!((spool.bytes, spool.count_in_slot(one)), (0, 0), "nothing of it stays in memory");
        drop(spool);
        assert!(!dir.path().join("move-1").exists());
    }
    /// Returns a number below `bound`.
    fn draw(state: &mut u64, bound: u64) -> u64 {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % bound
    }

    #[test]
    fn partial_writes_lose_no_key() {
        let (mut torn, mut dropped) = (0, 0);
        for seed in 0..40 {
            let dir = tempfile::tempdir().expect("a directory");
            let mut spool = Spool::new(dir.path().join("move-1"));
            spool.memory_max = 64 << 10;
            let mut state = seed;
            let mut unlisted = BTreeSet::new();
            let mut keys = BTreeSet::new();
            // In some runs the disk stays full for long.
            let failing = [0, 20, 300, 999][seed as usize % 4];
            for number in 0..6000 {
                let key = format!("{{{}}}{number}{}", draw(&mut state, 200), "x".repeat(draw(&mut state, 60) as usize))
                    .into_bytes();
                let added = spool.add_by(crc16_slot(&key), &key, |file, bytes, at| {
                    if draw(&mut state, 1000) >= failing {
                        return file.write_all_at(bytes, at);
                    }
                    torn += 1;
                    let some = draw(&mut state, bytes.len() as u64) as usize;
                    file.write_all_at(&bytes[..some], at)?;
                    Err(io::ErrorKind::StorageFull.into())
                });
                if let Err(why) = added {
                    dropped += why.slots.len();
                    unlisted.extend(why.slots);
                }
                keys.insert(key);
                assert!(spool.bytes <= 3 * spool.memory_max, "memory has its bounds: {}", spool.bytes);
            }
            let slots: Vec<Slot> =
                keys.iter().map(|key| crc16_slot(key)).collect::<BTreeSet<_>>().into_iter().collect();
            let listed: BTreeSet<Vec<u8>> = spool.keys(&slots).expect("read").iter().map(|key| key.to_vec()).collect();
            assert!(listed.is_subset(&keys), "seed {seed}: nothing is listed that was not added");
            let missing = keys.difference(&listed).find(|key| !unlisted.contains(&crc16_slot(key)));
            assert_eq!(missing, None, "seed {seed}: a missing key is not reported");
        }
        assert!(torn > 100 && dropped > 0, "both occur: {torn} torn writes, {dropped} dropped slots");
    }
}
