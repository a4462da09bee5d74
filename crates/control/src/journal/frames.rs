//! Format of the journal: a header, then one frame per group of entries that became durable together.
//!
//! A group has one checksum, because a power cut tears at most one group: the next group is written only when this one
//! is on disk. So bytes that do not match their checksum are a torn end if nothing valid follows; no client was
//! promised such entries. If something valid follows, they are damage. The checksum is keyed by the journal's identity,
//! so frames of another journal, or of an earlier file in the same blocks, do not match.

use switchyard_policy::migration::Fingerprinter;

/// Format version that this program writes.
pub(super) const FORMAT: u32 = 1;

const MAGIC: [u8; 8] = *b"SWYMOVES";
pub(super) const FRAME: [u8; 4] = *b"SYf1";

/// Bytes before the first frame.
pub(super) const HEADER: usize = 8 + 4 + 16 + 8;

/// Bytes of a frame before its entries: magic, length, number, checksum.
pub(super) const FRAME_HEADER: usize = 4 + 4 + 8 + 8;

/// Reason why a file is not this journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum FormatError {
    /// Not a journal, or a damaged one.
    Damaged(String),
    /// A journal of a later format.
    Newer(u32),
    /// The journal of another state directory.
    Foreign,
}

/// Parsed journal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Scanned {
    pub(super) entries: Vec<Vec<u8>>,
    /// The number of the next frame.
    pub(super) next: u64,
    /// Length of the valid part, in bytes.
    pub(super) valid: usize,
}

fn checksum(identity: u128, parts: [&[u8]; 2]) -> u64 {
    Fingerprinter::new(identity).of(&parts.concat()).0 as u64
}

/// Returns the header of a journal.
pub(super) fn header(identity: u128) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&FORMAT.to_le_bytes());
    out.extend_from_slice(&identity.to_le_bytes());
    let sum = checksum(identity, [&out, &[]]);
    out.extend_from_slice(&sum.to_le_bytes());
    out
}

pub(super) fn frame<'e>(identity: u128, number: u64, entries: impl IntoIterator<Item = &'e [u8]>, out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(&FRAME);
    out.extend_from_slice(&[0; FRAME_HEADER - 4]);
    for entry in entries {
        out.extend_from_slice(&(entry.len() as u32).to_le_bytes());
        out.extend_from_slice(entry);
    }
    seal(identity, number, start, out);
}

/// Completes the header of the frame at `start`, which ends with `out`.
pub(super) fn seal(identity: u128, number: u64, start: usize, out: &mut [u8]) {
    let length = (out.len() - start - FRAME_HEADER) as u32;
    out[start + 4..start + 8].copy_from_slice(&length.to_le_bytes());
    out[start + 8..start + 16].copy_from_slice(&number.to_le_bytes());
    let sum = checksum(identity, [&out[start + 4..start + 16], &out[start + FRAME_HEADER..]]);
    out[start + 16..start + 24].copy_from_slice(&sum.to_le_bytes());
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

/// Parses the frame at `at`. Returns its number, the bytes of its entries, and its end.
fn frame_at(bytes: &[u8], at: usize, identity: u128) -> Option<(u64, &[u8], usize)> {
    if number::<4>(bytes, at)? != FRAME {
        return None;
    }
    let length = u32::from_le_bytes(number(bytes, at + 4)?) as usize;
    let end = at + FRAME_HEADER + length;
    let body = bytes.get(at + FRAME_HEADER..end)?;
    let sum = u64::from_le_bytes(number(bytes, at + 16)?);
    (checksum(identity, [&bytes[at + 4..at + 16], body]) == sum).then_some(())?;
    Some((u64::from_le_bytes(number(bytes, at + 8)?), body, end))
}

/// Parses a journal.
pub(super) fn scan(bytes: &[u8], identity: u128) -> Result<Scanned, FormatError> {
    if bytes.len() < HEADER || bytes[..8] != MAGIC {
        return Err(FormatError::Damaged("it does not begin as a journal".into()));
    }
    let format = number(bytes, 8).map_or(0, u32::from_le_bytes);
    if format > FORMAT {
        return Err(FormatError::Newer(format));
    }
    let found = number(bytes, 12).map_or(0, u128::from_le_bytes);
    if bytes[..HEADER] != header(found) {
        return Err(FormatError::Damaged("its first bytes do not fit their checksum".into()));
    }
    if found != identity {
        return Err(FormatError::Foreign);
    }
    let mut scanned = Scanned { entries: Vec::new(), next: 0, valid: HEADER };
    while let Some((number, body, end)) = frame_at(bytes, scanned.valid, identity) {
        if number != scanned.next {
            return Err(FormatError::Damaged(format!(
                "at byte {} is group {number} instead of {}",
                scanned.valid, scanned.next
            )));
        }
        entries(body, &mut scanned.entries).ok_or_else(|| {
            FormatError::Damaged(format!("the group at byte {} is not a list of entries", scanned.valid))
        })?;
        scanned.next += 1;
        scanned.valid = end;
    }
    let behind = (scanned.valid + 1..bytes.len()).find(|at| frame_at(bytes, *at, identity).is_some());
    match behind {
        None => Ok(scanned),
        Some(next) => Err(FormatError::Damaged(format!(
            "bytes {} to {next} do not match their checksum, but later bytes do: a part in the middle was lost",
            scanned.valid
        ))),
    }
}

fn entries(mut body: &[u8], into: &mut Vec<Vec<u8>>) -> Option<()> {
    while !body.is_empty() {
        let length = u32::from_le_bytes(number(body, 0)?) as usize;
        into.push(body.get(4..4 + length)?.to_vec());
        body = &body[4 + length..];
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: u128 = 0x1234_5678_9abc_def0_0fed_cba9_8765_4321;

    fn journal(groups: &[&[&str]]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = header(ID);
        let mut ends = vec![bytes.len()];
        for (i, group) in groups.iter().enumerate() {
            frame(ID, i as u64, group.iter().map(|e| e.as_bytes()), &mut bytes);
            ends.push(bytes.len());
        }
        (bytes, ends)
    }

    fn words(scanned: &Scanned) -> Vec<String> {
        scanned.entries.iter().map(|e| String::from_utf8_lossy(e).into_owned()).collect()
    }

    #[test]
    fn a_journal_cut_anywhere_keeps_the_groups_before_the_cut() {
        let (bytes, ends) = journal(&[&["a", "bc"], &[""], &["d"]]);
        for cut in HEADER..=bytes.len() {
            let scanned = scan(&bytes[..cut], ID).expect("a torn end is no damage");
            let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
            assert_eq!(scanned.valid, ends[whole], "cut at {cut}");
            assert_eq!(words(&scanned), ["a", "bc", "", "d"][..[0, 2, 3, 4][whole]], "cut at {cut}");
        }
        let mut zeros = bytes.clone();
        zeros.resize(bytes.len() + 4096, 0);
        assert_eq!(scan(&zeros, ID).expect("space that was never written").valid, bytes.len());
    }

    #[test]
    fn a_changed_byte_before_the_last_group_is_damage() {
        let (bytes, ends) = journal(&[&["first", "second"], &["third"], &["last"]]);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x20;
            match scan(&changed, ID) {
                Err(FormatError::Damaged(_)) => assert!(at < ends[2], "byte {at}"),
                Err(FormatError::Newer(_)) => assert!((8..12).contains(&at), "byte {at}"),
                Ok(scanned) => {
                    assert!(at >= ends[2], "the change of byte {at} was not detected");
                    assert_eq!(words(&scanned), ["first", "second", "third"]);
                }
                Err(FormatError::Foreign) => panic!("byte {at}: a damaged header is not another's"),
            }
        }
        assert_eq!(scan(&bytes, ID + 1), Err(FormatError::Foreign));
        assert!(matches!(scan(b"", ID), Err(FormatError::Damaged(_))));
    }

    #[test]
    fn a_group_left_out_is_damage() {
        let (bytes, ends) = journal(&[&["first"], &["second"], &["third"]]);
        let gap = [&bytes[..ends[1]], &bytes[ends[2]..]].concat();
        assert!(matches!(scan(&gap, ID), Err(FormatError::Damaged(_))));
    }
}
