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

/// Bytes that the libraries of a payload may always have, uncompressed and with the check. Larger payloads may have
/// twice their own length. Without a limit, a payload of 7 MB would take gigabytes.
const LIBRARIES_MIN: usize = 64 << 20;

/// The router's error for [`Refusal::TooLarge`].
pub(crate) const TOO_LARGE: &str = "ERR Switchyard: the libraries are too large uncompressed; restore fewer at a time, or load each with FUNCTION LOAD";

/// Reason why a payload is not written again.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal<E> {
    /// The payload is damaged, or has other content than libraries.
    Damaged,
    /// The libraries take too much memory.
    TooLarge,
    /// A library cannot be changed.
    Code(E),
}

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

/// Reads a string of at most `max` bytes.
fn string<E>(rest: &mut &[u8], max: usize) -> Result<Vec<u8>, Refusal<E>> {
    match length(rest).ok_or(Refusal::Damaged)? {
        Ok(len) => Ok(take(rest, len).ok_or(Refusal::Damaged)?.to_vec()),
        Err(3) => {
            let mut number = || length(rest)?.ok();
            let (packed, len) = (number().ok_or(Refusal::Damaged)?, number().ok_or(Refusal::Damaged)?);
            let packed = take(rest, packed).ok_or(Refusal::Damaged)?;
            if len > max {
                return Err(Refusal::TooLarge);
            }
            decompress(packed, len).ok_or(Refusal::Damaged)
        }
        Err(_) => Err(Refusal::Damaged),
    }
}

/// Returns the payload with changed library code.
pub(crate) fn with_code<E>(
    payload: &[u8],
    mut change: impl FnMut(&[u8]) -> Result<Vec<u8>, E>,
) -> Result<Vec<u8>, Refusal<E>> {
    let parts = payload.len().checked_sub(10).and_then(|at| payload.split_at_checked(at));
    let (body, footer) = parts.ok_or(Refusal::Damaged)?;
    let (signed, sum) = payload.split_at(payload.len() - 8);
    if CRC.checksum(signed).to_le_bytes() != *sum {
        return Err(Refusal::Damaged);
    }
    let max = (2 * payload.len()).max(LIBRARIES_MIN);
    let mut out = Vec::with_capacity(payload.len());
    let mut rest = body;
    while let Some((&kind, after)) = rest.split_first() {
        rest = after;
        if kind != LIBRARY {
            return Err(Refusal::Damaged);
        }
        let code = change(&string(&mut rest, max - out.len())?).map_err(Refusal::Code)?;
        if out.len() + 6 + code.len() > max {
            return Err(Refusal::TooLarge);
        }
        out.extend_from_slice(&[LIBRARY, 0x80]);
        out.extend_from_slice(&u32::try_from(code.len()).map_err(|_| Refusal::TooLarge)?.to_be_bytes());
        out.extend_from_slice(&code);
    }
    out.extend_from_slice(&footer[..2]);
    let sum = CRC.checksum(&out);
    out.extend_from_slice(&sum.to_le_bytes());
    Ok(out)
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
        let changed = with_code(&payload, |code| Ok::<_, ()>([b"<", code, b">"].concat())).expect("whole");
        assert_eq!(changed[..13], *b"\xf5\x80\0\0\0\x05<abc>\x0a\0");
        let mut seen = Vec::new();
        assert!(
            with_code(&changed, |code| {
                seen.push(code.to_vec());
                Err::<Vec<u8>, _>("no")
            }) == Err(Refusal::Code("no"))
        );
        assert_eq!(seen, [b"<abc>"]);
        for at in 0..payload.len() {
            let mut damaged = payload.clone();
            damaged[at] ^= 1;
            assert_eq!(with_code(&damaged, |code| Ok::<_, ()>(code.to_vec())), Err(Refusal::Damaged));
            assert_eq!(with_code(&payload[..at], |code| Ok::<_, ()>(code.to_vec())), Err(Refusal::Damaged));
        }
    }

    #[test]
    fn libraries_that_are_large_only_uncompressed_are_refused() {
        // LZF: "a", then 264 copies of it for each three bytes.
        let copies = 100_000;
        let mut packed = vec![0, b'a'];
        (0..copies).for_each(|_| packed.extend([0xe0, 0xff, 0]));
        let mut library = vec![LIBRARY, 0xc3, 0x80];
        library.extend((packed.len() as u32).to_be_bytes());
        library.push(0x80);
        library.extend((1 + copies * 264_u32).to_be_bytes());
        library.extend(packed);
        let restored = |libraries: usize| {
            let mut payload = library.repeat(libraries);
            payload.extend([10, 0]);
            payload.extend(CRC.checksum(&payload).to_le_bytes());
            with_code(&payload, |code| Ok::<_, ()>(code.to_vec())).map(|payload| payload.len())
        };
        assert_eq!(restored(2), Ok(2 * (6 + 1 + 264 * copies as usize) + 10));
        assert_eq!(restored(3), Err(Refusal::TooLarge));
    }
}
