//! A 16-byte hash that replaces a key's name in the journal and in the set of committed keys.
//!
//! SipHash-2-4 with a 128-bit output, keyed with a secret of the state directory. Two keys with the same fingerprint
//! would lose a key, so it must not be possible to search for such a pair. The hasher of the standard library has 64
//! bits, and its algorithm may change.

#[expect(clippy::disallowed_types, reason = "with a hasher of our own their order is the same in every run")]
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hasher};

use siphasher::sip128::SipHasher24;

/// Keyed hash of a key's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Fingerprint(pub u128);

/// Uses the bits of a fingerprint as its hash, since they are a keyed hash already. The iteration order is the same in
/// every run.
#[derive(Clone, Copy, Default, Debug)]
pub struct FingerprintHasher(u64);

impl Hasher for FingerprintHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn write_u128(&mut self, fingerprint: u128) {
        self.0 = fingerprint as u64;
    }
}

/// Map from keys to values. Nothing may depend on its order.
#[expect(clippy::disallowed_types, reason = "a tree of a leg's keys took a quarter of the mover's time")]
pub type FingerprintMap<V> = HashMap<Fingerprint, V, BuildHasherDefault<FingerprintHasher>>;

/// Set of keys. Nothing may depend on its order.
#[expect(clippy::disallowed_types, reason = "as above")]
pub type FingerprintSet = HashSet<Fingerprint, BuildHasherDefault<FingerprintHasher>>;

/// Computes fingerprints. The secret must stay the same as long as a journal is read.
#[derive(Clone, Copy)]
pub struct Fingerprinter {
    k0: u64,
    k1: u64,
}

impl std::fmt::Debug for Fingerprinter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Fingerprinter(***)")
    }
}

impl Fingerprinter {
    /// Creates a fingerprinter from a secret: random, created once per state directory.
    #[must_use]
    pub const fn new(secret: u128) -> Self {
        Self { k0: secret as u64, k1: (secret >> 64) as u64 }
    }

    /// Returns the fingerprint of a key.
    #[must_use]
    pub fn of(&self, key: &[u8]) -> Fingerprint {
        let hash = SipHasher24::new_with_keys(self.k0, self.k1).hash(key);
        Fingerprint(u128::from(hash.h2) << 64 | u128::from(hash.h1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the reference implementation's `vectors_sip128`: key 00..0f, input 00, 01, ... of each length.
    #[test]
    fn fingerprints_match_the_siphash_reference_vectors() {
        let secret = u128::from_le_bytes(std::array::from_fn(|i| i as u8));
        let expected: [[u8; 16]; 3] = [
            [0xa3, 0x81, 0x7f, 0x04, 0xba, 0x25, 0xa8, 0xe6, 0x6d, 0xf6, 0x72, 0x14, 0xc7, 0x55, 0x02, 0x93],
            [0xda, 0x87, 0xc1, 0xd8, 0x6b, 0x99, 0xaf, 0x44, 0x34, 0x76, 0x59, 0x11, 0x9b, 0x22, 0xfc, 0x45],
            [0x81, 0x77, 0x22, 0x8d, 0xa4, 0xa4, 0x5d, 0xc7, 0xfc, 0xa3, 0x8b, 0xde, 0xf6, 0x0a, 0xff, 0xe4],
        ];
        let input: Vec<u8> = (0..3).collect();
        for (length, wanted) in expected.iter().enumerate() {
            assert_eq!(Fingerprinter::new(secret).of(&input[..length]).0.to_le_bytes(), *wanted, "{length} bytes");
        }
    }

    #[test]
    fn keys_of_different_lengths_have_different_fingerprints() {
        let make = Fingerprinter::new(7);
        let zeros = [0_u8; 300];
        let all: std::collections::BTreeSet<Fingerprint> = (0..300).map(|n| make.of(&zeros[..n])).collect();
        assert_eq!(all.len(), 300);
    }
}
