//! Fuzz target: journals with valid checksums, cut and changed anywhere, and any bytes as a record.

use switchyard_policy::migration::Record;

use super::frames::{FRAME, FRAME_HEADER, FormatError, HEADER, Scanned, frame, header, scan, seal};

const IDENTITY: u128 = 0x1234_5678_9abc_def0_0fed_cba9_8765_4321;

/// Builds a journal of the input: groups separated by 0xff, their entries by 0xfe. Checks that a cut journal has the
/// groups before the cut, that a changed byte is damage or part of a torn end, and that decoded records are encoded to
/// the same records.
///
/// # Panics
/// If one of these is wrong.
pub fn journal(input: &[u8]) {
    let Some((&[a, b, c], rest)) = input.split_first_chunk::<3>() else { return };
    let place = usize::from(u16::from_le_bytes([a, b]));
    let _ = scan(rest, IDENTITY);

    let mut bytes = header(IDENTITY);
    let mut ends = vec![(bytes.len(), 0)];
    let mut all = Vec::new();
    for (number, group) in rest.split(|byte| *byte == 0xff).enumerate() {
        let entries: Vec<&[u8]> = group.split(|byte| *byte == 0xfe).collect();
        frame(IDENTITY, number as u64, entries.iter().copied(), &mut bytes);
        all.extend(entries.iter().map(|entry| entry.to_vec()));
        ends.push((bytes.len(), all.len()));
        entries.into_iter().for_each(check_record);
    }
    let whole = Scanned { entries: all.clone(), next: ends.len() as u64 - 1, valid: bytes.len() };
    assert_eq!(scan(&bytes, IDENTITY), Ok(whole));

    let cut = HEADER + place % (bytes.len() - HEADER);
    let groups = ends.iter().filter(|(end, _)| *end <= cut).count() - 1;
    let (valid, entries) = ends[groups];
    let kept = Scanned { entries: all[..entries].to_vec(), next: groups as u64, valid };
    assert_eq!(scan(&bytes[..cut], IDENTITY), Ok(kept), "cut at {cut}");

    let at = place % bytes.len();
    let mut changed = bytes.clone();
    changed[at] ^= c.max(1);
    let (last, before) = ends[ends.len() - 2];
    match scan(&changed, IDENTITY) {
        Ok(torn) => {
            assert!(at >= last, "the change of byte {at} was not detected");
            assert_eq!(torn.entries, all[..before]);
        }
        Err(FormatError::Damaged(_)) => assert!(at < last, "byte {at} is in the torn end"),
        Err(FormatError::Newer(_)) => assert!((8..12).contains(&at)),
        Err(FormatError::Foreign) => panic!("byte {at}: a damaged header is not another's"),
    }

    // Entries that do not fill their group, with a valid checksum.
    let mut bytes = header(IDENTITY);
    bytes.extend_from_slice(&FRAME);
    bytes.resize(HEADER + FRAME_HEADER, 0);
    bytes.extend_from_slice(rest);
    seal(IDENTITY, 0, HEADER, &mut bytes);
    match scan(&bytes, IDENTITY) {
        Ok(scanned) => {
            let len: usize = scanned.entries.iter().map(|entry| entry.len() + 4).sum();
            assert_eq!(len, rest.len());
        }
        Err(error) => assert!(matches!(error, FormatError::Damaged(_))),
    }
}

fn check_record(bytes: &[u8]) {
    match Record::decode(bytes) {
        Ok(record) => {
            let mut again = Vec::new();
            record.encode(&mut again);
            assert!(again.len() <= bytes.len(), "longer than the bytes that it was decoded from");
            assert_eq!(Record::decode(&again), Ok(record));
        }
        Err(damaged) => assert!(damaged.at <= bytes.len()),
    }
}
