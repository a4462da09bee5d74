//! Computes the slot of a key, without the router's own code, which it checks.

/// CRC16 (XMODEM), bit by bit.
fn crc16(bytes: &[u8]) -> u16 {
    let mut crc = 0u16;
    for &byte in bytes {
        crc ^= u16::from(byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 != 0 { (crc << 1) ^ 0x1021 } else { crc << 1 };
        }
    }
    crc
}

/// Slot of a key: hashes the text between the first `{` and the next `}`, unless that is empty.
pub(crate) fn slot(key: &[u8]) -> u16 {
    let hashed = key
        .iter()
        .position(|&b| b == b'{')
        .and_then(|open| {
            let inside = &key[open + 1..];
            let close = inside.iter().position(|&b| b == b'}')?;
            (close > 0).then(|| &inside[..close])
        })
        .unwrap_or(key);
    crc16(hashed) % 16384
}

#[test]
fn slots_match_the_cluster_specification() {
    assert_eq!(crc16(b"123456789"), 0x31c3);
    assert_eq!(slot(b"foo"), 12182);
    assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
    assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
    assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
}
