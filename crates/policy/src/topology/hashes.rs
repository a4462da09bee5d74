//! twemproxy's hash functions, bit for bit as computed by `nutcracker`.
//!
//! Implemented from the published definitions, with nutcracker's deviations: bytes are signed where it hashes plain
//! `char`s, its CRC-16 never drops the upper bits, its CRC-32 keeps fifteen bits, and its 64-bit FNV hashes keep the
//! lower half. A library would compute the correct hash and so map keys to other servers. MD5 has no deviation, so it
//! comes from a library.

use md5::{Digest, Md5};

/// A 32-bit hash of a key, its position on a continuum.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hash {
    /// Jenkins's one-at-a-time.
    OneAtATime,
    /// First four bytes of MD5.
    Md5,
    /// CRC-16 (XMODEM) without dropping the upper bits.
    Crc16,
    /// Fifteen bits of CRC-32, as in libmemcached.
    Crc32,
    /// Standard CRC-32.
    Crc32a,
    /// Lower half of 64-bit FNV-1.
    #[serde(rename = "fnv1_64")]
    Fnv1_64,
    /// Lower half of 64-bit FNV-1a. nutcracker's default.
    #[default]
    #[serde(rename = "fnv1a_64")]
    Fnv1a64,
    /// 32-bit FNV-1.
    #[serde(rename = "fnv1_32")]
    Fnv1_32,
    /// 32-bit FNV-1a.
    #[serde(rename = "fnv1a_32")]
    Fnv1a32,
    /// Paul Hsieh's SuperFastHash.
    Hsieh,
    /// MurmurHash2 by Austin Appleby, with a seed derived from the length.
    Murmur,
    /// Bob Jenkins's lookup3.
    Jenkins,
}

impl Hash {
    /// All hashes, in nutcracker's order.
    pub const ALL: [Self; 12] = [
        Self::OneAtATime,
        Self::Md5,
        Self::Crc16,
        Self::Crc32,
        Self::Crc32a,
        Self::Fnv1_64,
        Self::Fnv1a64,
        Self::Fnv1_32,
        Self::Fnv1a32,
        Self::Hsieh,
        Self::Murmur,
        Self::Jenkins,
    ];

    /// Name in twemproxy's configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::OneAtATime => "one_at_a_time",
            Self::Md5 => "md5",
            Self::Crc16 => "crc16",
            Self::Crc32 => "crc32",
            Self::Crc32a => "crc32a",
            Self::Fnv1_64 => "fnv1_64",
            Self::Fnv1a64 => "fnv1a_64",
            Self::Fnv1_32 => "fnv1_32",
            Self::Fnv1a32 => "fnv1a_32",
            Self::Hsieh => "hsieh",
            Self::Murmur => "murmur",
            Self::Jenkins => "jenkins",
        }
    }

    /// Hash with this name.
    #[must_use]
    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| hash.name() == name)
    }

    /// Hash of these bytes. 0 for an empty input with every function, because nutcracker calls none.
    #[must_use]
    pub fn of(self, bytes: &[u8]) -> u32 {
        if bytes.is_empty() {
            return 0;
        }
        match self {
            Self::OneAtATime => one_at_a_time(bytes),
            Self::Md5 => md5_words(bytes)[0],
            Self::Crc16 => bytes
                .iter()
                .fold(0, |crc: u32, byte| (crc << 8) ^ u32::from(CRC16[usize::from((crc >> 8) as u8 ^ byte)])),
            Self::Crc32 => (crc32(bytes) >> 16) & 0x7fff,
            Self::Crc32a => crc32(bytes),
            // The lower half of a product modulo 2^64 depends only on the lower halves.
            Self::Fnv1_64 => fnv1(FNV_64_INIT_LOW, FNV_64_PRIME_LOW, bytes),
            Self::Fnv1a64 => fnv1a(FNV_64_INIT_LOW, FNV_64_PRIME_LOW, bytes),
            Self::Fnv1_32 => fnv1(FNV_32_INIT, FNV_32_PRIME, bytes),
            Self::Fnv1a32 => fnv1a(FNV_32_INIT, FNV_32_PRIME, bytes),
            Self::Hsieh => hsieh(bytes),
            Self::Murmur => murmur(bytes),
            Self::Jenkins => jenkins(bytes),
        }
    }
}

/// MD5 as four little-endian numbers: the four points that ketama derives from a name.
pub(super) fn md5_words(bytes: &[u8]) -> [u32; 4] {
    let digest: [u8; 16] = Md5::digest(bytes).into();
    let (words, _) = digest.as_chunks::<4>();
    [0, 1, 2, 3].map(|i| u32::from_le_bytes(words[i]))
}

const FNV_64_INIT_LOW: u32 = 0x8422_2325;
const FNV_64_PRIME_LOW: u32 = 0x1b3;
const FNV_32_INIT: u32 = 2_166_136_261;
const FNV_32_PRIME: u32 = 16_777_619;

/// Converts a byte like C's `char` on x86-64: the sign fills the upper bits.
#[inline]
const fn signed(byte: u8) -> u32 {
    byte.cast_signed() as i32 as u32
}

fn fnv1(init: u32, prime: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(init, |hash, byte| hash.wrapping_mul(prime) ^ signed(*byte))
}

fn fnv1a(init: u32, prime: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(init, |hash, byte| (hash ^ signed(*byte)).wrapping_mul(prime))
}

fn one_at_a_time(bytes: &[u8]) -> u32 {
    let mut hash = bytes.iter().fold(0_u32, |hash, byte| {
        let hash = hash.wrapping_add(signed(*byte));
        let hash = hash.wrapping_add(hash << 10);
        hash ^ (hash >> 6)
    });
    hash = hash.wrapping_add(hash << 3);
    hash ^= hash >> 11;
    hash.wrapping_add(hash << 15)
}

/// CRC-32 (ISO-HDLC), reflected.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| (crc >> 8) ^ CRC32[usize::from(crc as u8 ^ byte)])
}

static CRC32: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 != 0 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

static CRC16: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn hsieh(bytes: &[u8]) -> u32 {
    let half = |pair: [u8; 2]| u32::from(u16::from_le_bytes(pair));
    let (words, rest) = bytes.as_chunks::<4>();
    let mut hash = words.iter().fold(0_u32, |hash, &[a, b, c, d]| {
        let hash = hash.wrapping_add(half([a, b]));
        let mixed = (half([c, d]) << 11) ^ hash;
        let hash = (hash << 16) ^ mixed;
        hash.wrapping_add(hash >> 11)
    });
    match *rest {
        [a, b, c] => {
            hash = hash.wrapping_add(half([a, b]));
            hash ^= hash << 16;
            hash ^= signed(c) << 18;
            hash = hash.wrapping_add(hash >> 11);
        }
        [a, b] => {
            hash = hash.wrapping_add(half([a, b]));
            hash ^= hash << 11;
            hash = hash.wrapping_add(hash >> 17);
        }
        [a] => {
            hash = hash.wrapping_add(u32::from(a));
            hash ^= hash << 10;
            hash = hash.wrapping_add(hash >> 1);
        }
        _ => {}
    }
    hash ^= hash << 3;
    hash = hash.wrapping_add(hash >> 5);
    hash ^= hash << 4;
    hash = hash.wrapping_add(hash >> 17);
    hash ^= hash << 25;
    hash.wrapping_add(hash >> 6)
}

fn murmur(bytes: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let length = bytes.len() as u32;
    let (words, rest) = bytes.as_chunks::<4>();
    let mut hash = words.iter().fold(0xdead_beef_u32.wrapping_mul(length) ^ length, |hash, word| {
        let mut mixed = u32::from_le_bytes(*word).wrapping_mul(M);
        mixed ^= mixed >> 24;
        hash.wrapping_mul(M) ^ mixed.wrapping_mul(M)
    });
    if !rest.is_empty() {
        let last = rest.iter().rev().fold(0, |word, byte| (word << 8) | u32::from(*byte));
        hash = (hash ^ last).wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^ (hash >> 15)
}

fn jenkins(bytes: &[u8]) -> u32 {
    const INIT: u32 = 13;
    let start = 0xdead_beef_u32.wrapping_add(bytes.len() as u32).wrapping_add(INIT);
    let (mut a, mut b, mut c) = (start, start, start);
    // The last block is mixed differently, even if it is complete.
    let last = (bytes.len() - 1) / 12 * 12;
    let word =
        |block: &[u8; 12], at: usize| u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    for block in bytes[..last].as_chunks::<12>().0 {
        a = a.wrapping_add(word(block, 0));
        b = b.wrapping_add(word(block, 4));
        c = c.wrapping_add(word(block, 8));
        a = a.wrapping_sub(c) ^ c.rotate_left(4);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(6);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(8);
        b = b.wrapping_add(a);
        a = a.wrapping_sub(c) ^ c.rotate_left(16);
        c = c.wrapping_add(b);
        b = b.wrapping_sub(a) ^ a.rotate_left(19);
        a = a.wrapping_add(c);
        c = c.wrapping_sub(b) ^ b.rotate_left(4);
        b = b.wrapping_add(a);
    }
    let mut block = [0; 12];
    block[..bytes.len() - last].copy_from_slice(&bytes[last..]);
    a = a.wrapping_add(word(&block, 0));
    b = b.wrapping_add(word(&block, 4));
    c = c.wrapping_add(word(&block, 8));
    c = (c ^ b).wrapping_sub(b.rotate_left(14));
    a = (a ^ c).wrapping_sub(c.rotate_left(11));
    b = (b ^ a).wrapping_sub(a.rotate_left(25));
    c = (c ^ b).wrapping_sub(b.rotate_left(16));
    a = (a ^ c).wrapping_sub(c.rotate_left(4));
    b = (b ^ a).wrapping_sub(a.rotate_left(14));
    (c ^ b).wrapping_sub(b.rotate_left(24))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_empty_input_are_zero_and_names_are_unique() {
        assert!(Hash::ALL.iter().all(|hash| hash.of(b"") == 0));
        assert!(Hash::ALL.iter().all(|hash| Hash::by_name(hash.name()) == Some(*hash)));
        assert_eq!(Hash::by_name("random"), None);
    }

    /// Expected values for "apple" from the tests of libmemcached (`tests/hash_results.h`), the origin of nutcracker's
    /// functions.
    #[test]
    fn hashes_match_the_test_results_of_libmemcached() {
        for (hash, result) in [
            (Hash::OneAtATime, 2_297_466_611_u32),
            (Hash::Md5, 3_195_025_439),
            (Hash::Crc32, 10_542),
            (Hash::Fnv1_64, 473_199_127),
            (Hash::Fnv1a64, 1_488_911_807),
            (Hash::Fnv1_32, 67_176_023),
            (Hash::Fnv1a32, 280_767_167),
            (Hash::Hsieh, 3_738_850_110),
            (Hash::Murmur, 4_142_305_122),
            (Hash::Jenkins, 1_442_444_624),
        ] {
            assert_eq!(hash.of(b"apple"), result, "{}", hash.name());
        }
        assert_eq!(Hash::Crc32a.of(b"123456789"), 0xcbf4_3926);
        assert_eq!(Hash::Crc16.of(b"123456789") & 0xffff, 0x31c3);
    }
}
