//! The payload of FUNCTION DUMP: libraries as a node stores them, read and written again with other code.
//!
//! FUNCTION RESTORE must be one step at a node, like the client's command. So the router adds its check to the
//! libraries in the payload before any node receives them, and no function ever runs without it.
//!
//! The format is that of RDB files: per library a byte and a string, then two bytes with the RDB version and a CRC-64.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use crc::{CRC_64_REDIS, Crc, Table};

/// Opcode before a library.
const LIBRARY: u8 = 245;

/// Redis's error for a payload that it rejects.
pub(crate) const DAMAGED: &str = "ERR DUMP payload version or checksum are wrong";

/// Maximum size of a library, uncompressed, in bytes.
const UNPACKED_MAX: usize = 512 << 20;

/// Redis's checksum, 16 bytes at a time.
static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_REDIS);

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (front, back) = rest.split_at_checked(count)?;
    *rest = back;
    Some(front)
}

/// Reads a length. `Err` has the number of a special encoding.
fn length(rest: &mut &[u8]) -> Option<Result<usize, u8>> {
    let first = *take(rest, 1)?.first()?;
    let low = first & 0x3f;
    Some(match first >> 6 {
        0 => Ok(usize::from(low)),
        1 => Ok(usize::from(low) << 8 | usize::from(*take(rest, 1)?.first()?)),
        2 if low == 0 => Ok(u32::from_be_bytes(take(rest, 4)?.try_into().ok()?) as usize),
        2 if low == 1 => Ok(usize::try_from(u64::from_be_bytes(take(rest, 8)?.try_into().ok()?)).ok()?),
        3 => Err(low),
        _ => return None,
    })
}

/// Decompresses LZF, as used in RDB files.
fn decompress(packed: &[u8], len: usize) -> Option<Vec<u8>> {
    if len > UNPACKED_MAX {
        return None;
    }
    let mut out: Vec<u8> = Vec::new();
    let mut rest = packed;
    while let Some((&control, after)) = rest.split_first() {
        rest = after;
        if control < 32 {
            out.extend_from_slice(take(&mut rest, usize::from(control) + 1)?);
        } else {
            let mut count = usize::from(control >> 5);
            if count == 7 {
                count += usize::from(*take(&mut rest, 1)?.first()?);
            }
            let back = (usize::from(control & 0x1f) << 8 | usize::from(*take(&mut rest, 1)?.first()?)) + 1;
            let from = out.len().checked_sub(back)?;
            // Source and destination may overlap.
            for at in from..from + count + 2 {
                out.push(*out.get(at)?);
            }
        }
        if out.len() > len {
            return None;
        }
    }
    (out.len() == len).then_some(out)
}

fn string(rest: &mut &[u8]) -> Option<Vec<u8>> {
    match length(rest)? {
        Ok(len) => Some(take(rest, len)?.to_vec()),
        Err(3) => {
            let (packed, len) = (length(rest)?.ok()?, length(rest)?.ok()?);
            decompress(take(rest, packed)?, len)
        }
        Err(_) => None,
    }
}

/// Returns the payload with changed library code. `None` if it is damaged or has other content.
pub(crate) fn with_code<E>(
    payload: &[u8],
    mut change: impl FnMut(&[u8]) -> Result<Vec<u8>, E>,
) -> Option<Result<Vec<u8>, E>> {
    let (body, footer) = payload.split_at_checked(payload.len().checked_sub(10)?)?;
    let (signed, sum) = payload.split_at(payload.len() - 8);
    if CRC.checksum(signed).to_le_bytes() != *sum {
        return None;
    }
    let mut out = Vec::with_capacity(payload.len());
    let mut rest = body;
    while let Some((&kind, after)) = rest.split_first() {
        rest = after;
        if kind != LIBRARY {
            return None;
        }
        match change(&string(&mut rest)?) {
            Ok(code) => {
                out.extend_from_slice(&[LIBRARY, 0x80]);
                out.extend_from_slice(&u32::try_from(code.len()).ok()?.to_be_bytes());
                out.extend_from_slice(&code);
            }
            Err(why) => return Some(Err(why)),
        }
    }
    out.extend_from_slice(&footer[..2]);
    let sum = CRC.checksum(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    Some(Ok(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_one_of_redis() {
        assert_eq!(CRC.checksum(b"123456789"), 0xe9c6_d914_c4b8_d9ca);
    }

    #[test]
    fn packed_text_is_unpacked() {
        // "aaaaaaaaaa": one byte, then nine copied from one place back.
        assert_eq!(decompress(&[0, b'a', 7 << 5, 0, 0], 10).as_deref(), Some(&b"aaaaaaaaaa"[..]));
        assert_eq!(decompress(&[0, b'a', 7 << 5, 0, 0], 9), None);
        assert_eq!(decompress(&[0, b'a', 7 << 5, 0, 1], 10), None, "from before the beginning");
        assert_eq!(decompress(&[5, b'a'], 6), None);
    }

    #[test]
    fn code_is_changed_and_damage_is_found() {
        let mut payload = vec![LIBRARY, 3, b'a', b'b', b'c', 10, 0];
        payload.extend(CRC.checksum(&payload).to_le_bytes());
        let changed =
            with_code(&payload, |code| Ok::<_, ()>([b"<", code, b">"].concat())).expect("whole").expect("changed");
        assert_eq!(changed[..13], *b"\xf5\x80\0\0\0\x05<abc>\x0a\0");
        let mut seen = Vec::new();
        assert!(
            with_code(&changed, |code| {
                seen.push(code.to_vec());
                Err::<Vec<u8>, _>("no")
            }) == Some(Err("no"))
        );
        assert_eq!(seen, [b"<abc>"]);
        for at in 0..payload.len() {
            let mut damaged = payload.clone();
            damaged[at] ^= 1;
            assert_eq!(with_code(&damaged, |code| Ok::<_, ()>(code.to_vec())), None);
            assert_eq!(with_code(&payload[..at], |code| Ok::<_, ()>(code.to_vec())), None);
        }
    }
}
