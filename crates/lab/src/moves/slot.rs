//! Slot of a key, as computed by a client of Redis Cluster.
//!
//! A separate bitwise CRC16, although `policy` has a fast one: code that checks the router shares nothing with it.

/// Number of slots of a cluster.
pub const SLOTS: u16 = 16_384;

/// Returns the slot of a key, by its hash tag if it has one.
pub fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&b| b == b'{').and_then(|open| {
        let rest = &key[open + 1..];
        let close = rest.iter().position(|&b| b == b'}')?;
        (close > 0).then(|| &rest[..close])
    });
    crc16(tag.unwrap_or(key)) % SLOTS
}

/// CRC16-XMODEM: polynomial 0x1021, nothing reflected, from 0.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0x31C3 is from the specification of Redis Cluster; the others are from a server's CLUSTER KEYSLOT.
    #[test]
    fn slots_match_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in [("foo", 12_182), ("{user1000}.following", 3443), ("{user1000}.followers", 3443), ("", 0)] {
            assert_eq!(slot_of(key.as_bytes()), slot, "{key}");
        }
        assert_eq!(slot_of(b"foo{}{bar}"), slot_of_whole(b"foo{}{bar}"));
        assert_eq!(slot_of(b"foo{{bar}}zap"), slot_of_whole(b"{bar"));
    }

    fn slot_of_whole(key: &[u8]) -> u16 {
        crc16(key) % SLOTS
    }
}
