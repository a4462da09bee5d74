//! Bytes of a client: however they are cut, the scanner finds the same commands, and a command is canonical exactly if
//! an encoder would write the same bytes.

use switchyard_resp::encode;
use switchyard_resp::request::{Follower, Limits, ProtocolError, Scan, Scanner, inline_to_multibulk};

/// Results of one scan over the stream, with the arguments of each whole command, and the error.
type Found = (Vec<(usize, Scan, Vec<Vec<u8>>)>, Option<ProtocolError>);

/// Scans `bytes` as if received in pieces of `piece` bytes.
fn scan_in_pieces(bytes: &[u8], piece: usize, limits: &Limits) -> Found {
    let mut found = Vec::new();
    let mut scanner = Scanner::default();
    let (mut start, mut there) = (0, 0);
    loop {
        let buf = &bytes[start..there];
        match scanner.scan(buf, limits) {
            Err(error) => return (found, Some(error)),
            Ok(Scan::Incomplete | Scan::Large { .. }) => {
                // An argument costs at least `$0\r
                // \r
                // `; declared arguments cost nothing.
                assert!(scanner.args(buf).known() * 6 <= buf.len());
                if there == bytes.len() {
                    return (found, None);
                }
                there = (there + piece).min(bytes.len());
            }
            Ok(scan @ (Scan::Complete { len, .. } | Scan::Empty { len } | Scan::Inline { len })) => {
                assert!(len > 0 && len <= buf.len());
                let args = match scan {
                    Scan::Complete { .. } => scanner.args(buf).iter().map(<[u8]>::to_vec).collect(),
                    _ => Vec::new(),
                };
                found.push((start, scan, args));
                start += len;
                scanner.reset();
            }
        }
    }
}

fn encoded(args: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    encode::command(&mut out, args.iter().map(Vec::as_slice));
    out
}

/// Forwards the large argument of the command at the start of `bytes` as it arrives, like the router.
fn follow(
    bytes: &[u8],
    data: usize,
    len: usize,
    after: usize,
    piece: usize,
    limits: &Limits,
) -> Result<Option<usize>, ProtocolError> {
    let mut follower = Follower::new(len, after);
    let (mut pos, mut there) = (data, data);
    loop {
        let (taken, done) = follower.follow(&bytes[pos..there], limits)?;
        assert!(taken <= there - pos);
        pos += taken;
        if done {
            return Ok(Some(pos));
        }
        if there == bytes.len() {
            return Ok(None);
        }
        there = (there + piece).min(bytes.len());
    }
}

pub(crate) fn request(input: &[u8]) {
    let Some((&[control, piece], bytes)) = input.split_first_chunk::<2>() else { return };
    let limits = Limits { argument_max: 512 << 20, large: usize::MAX, authenticated: control & 1 == 0 };
    let piece = usize::from(piece) + 1;

    let (found, error) = scan_in_pieces(bytes, bytes.len().max(1), &limits);
    assert_eq!(scan_in_pieces(bytes, piece, &limits), (found.clone(), error), "pieces of {piece}");

    for (start, scan, args) in &found {
        match *scan {
            Scan::Complete { len, canonical } => {
                let rewritten = encoded(args);
                assert_eq!(
                    canonical,
                    rewritten == bytes[*start..start + len],
                    "forwarded as it is only if it is what we would write"
                );
            }
            Scan::Inline { len } => {
                let mut out = Vec::new();
                if inline_to_multibulk(&bytes[*start..start + len], &mut out).is_ok() && !out.is_empty() {
                    let (again, error) = scan_in_pieces(&out, out.len(), &Limits { authenticated: true, ..limits });
                    assert!(error.is_none() && again.len() == 1);
                    assert_eq!(again[0].1, Scan::Complete { len: out.len(), canonical: true });
                }
            }
            _ => {}
        }
    }

    // A large argument forwarded as it arrives: the command ends at the same place as in memory.
    let streaming = Limits { large: 1 + usize::from(control >> 1), ..limits };
    let mut scanner = Scanner::default();
    if let Ok(Scan::Large { data, len, after }) = scanner.scan(&bytes[..(piece + 4).min(bytes.len())], &streaming) {
        let whole = scan_in_pieces(bytes, bytes.len(), &limits);
        let whole = whole.0.first().map(|(_, scan, _)| *scan);
        match (follow(bytes, data, len, after, piece, &limits), whole) {
            (Ok(Some(end)), Some(Scan::Complete { len, .. })) => assert_eq!(end, len),
            (Ok(Some(end)), other) => panic!("streamed to {end}, in memory {other:?}"),
            (Ok(None) | Err(_), Some(Scan::Complete { canonical: true, len })) => {
                panic!("ends at {len} in memory, not streamed")
            }
            _ => {}
        }
    }
}
