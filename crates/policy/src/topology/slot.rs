//! Slots of keys as in Redis Cluster: CRC16 (XMODEM) of the key or its hash tag, modulo 16384.
//!
//! The servers' own function, because they may be in cluster mode, and because users already choose hash tags for it.
//! Runs once per key of every command. The checksum therefore takes eight bytes per step ("slicing by 8": eight tables
//! of 256 entries, 4 KiB, which stay in the first-level cache) rather than one as in Redis, and so does the search for
//! the brace. Hardware carry-less multiplication would need `unsafe` and is faster only for keys far longer than usual.

use super::NodeId;

/// Number of slots of Redis Cluster; a power of two.
pub const SLOT_COUNT: usize = 16384;

/// Number of slot numbers; a power of two. Those from [`SLOT_COUNT`] are passages: keys have them only during an
/// adoption of rules ([`super::Ruled`]).
pub const SLOT_NUMBERS: usize = 2 * SLOT_COUNT;

/// Number of passages.
pub(super) const PASSAGES: usize = SLOT_NUMBERS - SLOT_COUNT;

/// Owner, without meaning, of passages that are not in use.
pub(super) const UNUSED_OWNER: NodeId = NodeId(0);

/// A hash slot: a number below [`SLOT_NUMBERS`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub struct Slot(u16);

impl TryFrom<u16> for Slot {
    type Error = String;

    fn try_from(number: u16) -> Result<Self, String> {
        Self::new(number).ok_or_else(|| format!("{number} is no slot: there are {SLOT_NUMBERS}"))
    }
}

impl From<Slot> for u16 {
    fn from(slot: Slot) -> Self {
        slot.0
    }
}

impl Slot {
    /// The lowest slot.
    pub const FIRST: Self = Self(0);

    /// Slot with this number, if below [`SLOT_NUMBERS`].
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if (number as usize) < SLOT_NUMBERS { Some(Self(number)) } else { None }
    }

    /// Index into an array of [`SLOT_NUMBERS`] elements.
    #[inline]
    #[must_use]
    pub const fn index(self) -> usize {
        // The mask has no effect on the value; it lets the compiler omit bounds checks for such arrays.
        (self.0 & (SLOT_NUMBERS as u16 - 1)) as usize
    }

    /// Slot number.
    #[inline]
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// Whether this is a passage: keys have such slots only during an adoption of rules.
    #[inline]
    #[must_use]
    pub const fn is_passage(self) -> bool {
        self.index() >= SLOT_COUNT
    }

    /// All slots of Redis Cluster in order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..SLOT_COUNT as u16).map(Self)
    }

    /// All slot numbers in order, with those of passages.
    pub fn numbers() -> impl Iterator<Item = Self> {
        (0..SLOT_NUMBERS as u16).map(Self)
    }
}

/// Slot of a key in Redis Cluster, and so in a fleet with the usual [placement](super::Placement). For the slot in a
/// given fleet, use its topology. If the key has a non-empty hash tag, between its first `{` and the next `}`, only the
/// tag counts, so that keys with the same tag share a slot.
#[inline]
#[must_use]
pub fn crc16_slot(key: &[u8]) -> Slot {
    part_slot(tagged_part(key, b'{', b'}'))
}

/// Slot of the part of a key that determines it.
#[inline]
pub(super) fn part_slot(part: &[u8]) -> Slot {
    Slot(crc16(part) & MASK)
}

/// Slot of a number known to be below [`SLOT_NUMBERS`].
pub(super) fn slot_at(number: usize) -> Slot {
    debug_assert!(number < SLOT_NUMBERS, "a slot has a number");
    Slot::new(number as u16).unwrap_or(Slot::FIRST)
}

/// Passage with this number, below [`PASSAGES`].
pub(super) fn passage(number: usize) -> Slot {
    slot_at(SLOT_COUNT + number)
}

const MASK: u16 = SLOT_COUNT as u16 - 1;

/// The part between the first `open` and the next `close`, or the whole key if there is none or it is empty.
#[inline]
pub(super) fn tagged_part(key: &[u8], open: u8, close: u8) -> &[u8] {
    let Some(open) = find(open, key) else {
        return key;
    };
    let after = &key[open + 1..];
    match find(close, after) {
        Some(length) if length > 0 => &after[..length],
        _ => key,
    }
}

/// Position of the first `byte`. The test of eight bytes at once finds the lowest match exactly. The borrow of the
/// subtraction may flag higher bytes wrongly, which does not matter.
#[inline]
pub(super) fn find(byte: u8, bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const HIGHS: u64 = 0x8080_8080_8080_8080;
    let pattern = ONES * u64::from(byte);
    let (chunks, rest) = bytes.as_chunks::<8>();
    for (i, chunk) in chunks.iter().enumerate() {
        let difference = u64::from_le_bytes(*chunk) ^ pattern;
        let zeros = difference.wrapping_sub(ONES) & !difference & HIGHS;
        if zeros != 0 {
            return Some(i * 8 + zeros.trailing_zeros() as usize / 8);
        }
    }
    rest.iter().position(|&b| b == byte).map(|i| chunks.len() * 8 + i)
}

/// `TABLES[k][b]` is the checksum of byte `b` followed by `k` zero bytes: the contribution of a byte with `k` bytes
/// after it in the step. The checksum is linear, so a step is the exclusive or of its bytes' contributions.
static TABLES: [[u16; 256]; 8] = tables();

const POLYNOMIAL: u16 = 0x1021;

const fn tables() -> [[u16; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ POLYNOMIAL } else { crc << 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut zeros = 1;
    while zeros < 8 {
        let mut byte = 0;
        while byte < 256 {
            let crc = tables[zeros - 1][byte];
            tables[zeros][byte] = (crc << 8) ^ tables[0][(crc >> 8) as usize];
            byte += 1;
        }
        zeros += 1;
    }
    tables
}

#[inline]
fn crc16(bytes: &[u8]) -> u16 {
    let t = &TABLES;
    let mut crc = 0_u16;
    let (chunks, mut rest) = bytes.as_chunks::<8>();
    for c in chunks {
        let [high, low] = crc.to_be_bytes();
        crc = t[7][(c[0] ^ high) as usize]
            ^ t[6][(c[1] ^ low) as usize]
            ^ t[5][c[2] as usize]
            ^ t[4][c[3] as usize]
            ^ t[3][c[4] as usize]
            ^ t[2][c[5] as usize]
            ^ t[1][c[6] as usize]
            ^ t[0][c[7] as usize];
    }
    // Keys are short, so the remaining zero to seven bytes are often half of the work: 4 + 2 + 1 takes three dependent
    // steps rather than seven.
    if let Some((c, after)) = rest.split_first_chunk::<4>() {
        let [high, low] = crc.to_be_bytes();
        crc = t[3][(c[0] ^ high) as usize] ^ t[2][(c[1] ^ low) as usize] ^ t[1][c[2] as usize] ^ t[0][c[3] as usize];
        rest = after;
    }
    if let Some((c, after)) = rest.split_first_chunk::<2>() {
        let [high, low] = crc.to_be_bytes();
        crc = t[1][(c[0] ^ high) as usize] ^ t[0][(c[1] ^ low) as usize];
        rest = after;
    }
    if let [byte] = rest {
        let [high, low] = crc.to_be_bytes();
        crc = (u16::from(low) << 8) ^ t[0][(byte ^ high) as usize];
    }
    crc
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};
    use proptest::{prop_assert_eq, prop_oneof, strategy::Strategy};

    use super::*;

    /// Bitwise definition without tables.
    fn crc16_by_definition(bytes: &[u8]) -> u16 {
        bytes.iter().fold(0_u16, |crc, &byte| {
            (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| {
                if crc & 0x8000 != 0 { (crc << 1) ^ POLYNOMIAL } else { crc << 1 }
            })
        })
    }

    /// Hash tag rule of the cluster specification, byte by byte.
    fn slot_by_definition(key: &[u8]) -> u16 {
        let open = key.iter().position(|&b| b == b'{');
        let close = open.and_then(|open| key.iter().enumerate().position(|(i, &b)| i > open && b == b'}'));
        let hashed = match (open, close) {
            (Some(open), Some(close)) if close > open + 1 => &key[open + 1..close],
            _ => key,
        };
        crc16_by_definition(hashed) % 16384
    }

    #[test]
    fn golden_vectors() {
        assert_eq!(crc16(b""), 0);
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in [
            (&b""[..], 0),
            (b"foo", 12182),
            (b"bar", 5061),
            (b"hello", 866),
            (b"123456789", 12739),
            (b"somekey", 11058),
            (b"foo{hash_tag}", 2515),
            (b"bar{hash_tag}", 2515),
            (b"{user1000}.following", 3443),
            (b"{user1000}.followers", 3443),
            (b"user1000", 3443),
        ] {
            assert_eq!(crc16_slot(key).number(), slot, "{}", key.escape_ascii());
        }
    }

    #[test]
    fn hash_tags_as_in_the_cluster_specification() {
        let same = |a: &[u8], b: &[u8]| {
            assert_eq!(crc16_slot(a), crc16_slot(b), "{} and {}", a.escape_ascii(), b.escape_ascii())
        };
        same(b"foo{{bar}}zap", b"{bar"); // first brace to first closing one
        same(b"foo{bar}{zap}", b"bar"); // only the first pair counts
        same(b"}{a}", b"a"); // a closing brace before does not matter
        for whole in [&b"foo{}{bar}"[..], b"foo{bar", b"foo}bar{", b"{}", b"{", b"}", b"{}x}"] {
            assert_eq!(crc16_slot(whole).number(), crc16_by_definition(whole) % 16384, "{}", whole.escape_ascii());
        }
    }

    #[test]
    fn every_length_and_position_of_a_brace() {
        // Lengths around the steps of 8, 4, 2 and 1, with the tag at every place.
        for length in 0..40_usize {
            let plain: Vec<u8> = (0..length).map(|i| (i * 37 + 200) as u8).collect();
            assert_eq!(crc16_slot(&plain).number(), slot_by_definition(&plain), "{length}");
            for open in 0..length {
                for close in 0..length {
                    let mut key = plain.clone();
                    key[open] = b'{';
                    key[close] = b'}';
                    assert_eq!(crc16_slot(&key).number(), slot_by_definition(&key), "{}", key.escape_ascii());
                }
            }
        }
    }

    #[test]
    fn numbers_of_slots() {
        assert_eq!(Slot::new(16384).map(Slot::index), Some(16384));
        assert_eq!(Slot::new(32767).map(Slot::index), Some(32767));
        assert_eq!(Slot::new(32768), None);
        assert_eq!((Slot::all().count(), Slot::numbers().count()), (SLOT_COUNT, SLOT_NUMBERS));
        assert!(Slot::numbers().all(|slot| slot.index() == usize::from(slot.number())));
    }

    proptest! {
        #[test]
        fn slots_match_the_definition(key in prop::collection::vec(prop_oneof![
            any::<u8>(),
            prop::sample::select(b"{}z|\x7a\x7b\x7c\x7d\xfb\xfd\x00".to_vec()),
        ].boxed(), 0..80)) {
            prop_assert_eq!(crc16(&key), crc16_by_definition(&key));
            prop_assert_eq!(crc16_slot(&key).number(), slot_by_definition(&key));
        }
    }
}
