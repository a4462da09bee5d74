//! Properties of the scanners: encoded messages are found for any split of the bytes, and no bytes cause a panic or a
//! read past the buffer.

use proptest::prelude::*;
use switchyard_resp::encode;
use switchyard_resp::reply::{ReplyFollower, ReplyScan, ReplyScanner, elements};
use switchyard_resp::request::{Follower, Limits, Scan, Scanner, inline_to_multibulk};

const LIMITS: Limits = Limits { argument_max: 1 << 20, large: usize::MAX, authenticated: true };

fn commands() -> impl Strategy<Value = Vec<Vec<Vec<u8>>>> {
    prop::collection::vec(prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 1..8), 1..6)
}

/// Nested replies of any kind.
fn reply() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        "[a-zA-Z0-9 ]{0,20}".prop_map(|s| format!("+{s}\r\n").into_bytes()),
        "[A-Z]{1,8} [a-z ]{0,20}".prop_map(|s| format!("-{s}\r\n").into_bytes()),
        any::<i64>().prop_map(|n| format!(":{n}\r\n").into_bytes()),
        any::<i64>().prop_map(|n| format!("({n}\r\n").into_bytes()),
        any::<f64>().prop_map(|n| format!(",{n}\r\n").into_bytes()),
        prop::collection::vec(any::<u8>(), 0..50).prop_map(|b| {
            let mut out = Vec::new();
            encode::bulk(&mut out, &b);
            out
        }),
        Just(b"$-1\r\n".to_vec()),
        Just(b"*-1\r\n".to_vec()),
        Just(b"_\r\n".to_vec()),
        Just(b"#t\r\n".to_vec()),
        Just(b"=7\r\ntxt:abc\r\n".to_vec()),
    ];
    leaf.prop_recursive(4, 64, 6, |inner| {
        (prop::sample::select(vec![b'*', b'~', b'>', b'%']), prop::collection::vec(inner, 0..6)).prop_map(
            |(kind, mut parts)| {
                if kind == b'%' && parts.len() % 2 == 1 {
                    parts.pop();
                }
                let mut out = Vec::new();
                encode::header(&mut out, kind, if kind == b'%' { parts.len() / 2 } else { parts.len() });
                out.extend(parts.concat());
                out
            },
        )
    })
}

proptest! {
    #[test]
    fn every_command_of_a_stream_is_found_for_any_split(commands in commands(), cuts in prop::collection::vec(1usize..64, 1..50)) {
        let mut stream = Vec::new();
        for args in &commands {
            encode::command(&mut stream, args.iter().map(Vec::as_slice));
        }
        let mut scanner = Scanner::default();
        let mut found: Vec<Vec<Vec<u8>>> = Vec::new();
        let (mut start, mut end) = (0, 0);
        let mut cuts = cuts.iter().cycle();
        while start < stream.len() {
            match scanner.scan(&stream[start..end], &LIMITS) {
                Ok(Scan::Complete { len, canonical }) => {
                    prop_assert!(canonical);
                    found.push(scanner.args(&stream[start..]).iter().map(<[u8]>::to_vec).collect());
                    scanner.reset();
                    start += len;
                }
                Ok(Scan::Incomplete) => {
                    prop_assert!(end < stream.len(), "all bytes are there");
                    end = (end + cuts.next().copied().unwrap_or(1)).min(stream.len());
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
        prop_assert_eq!(found, commands);
    }

    #[test]
    fn no_bytes_make_the_request_scanner_panic(bytes in prop::collection::vec(prop_oneof![Just(b'*'), Just(b'$'), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'-'), any::<u8>()], 0..200), authenticated: bool, large in 0usize..64) {
        let mut scanner = Scanner::default();
        let limits = Limits { argument_max: 512 << 20, large, authenticated };
        match scanner.scan(&bytes, &limits) {
            Ok(Scan::Complete { len, .. } | Scan::Empty { len }) => prop_assert!(len <= bytes.len()),
            Ok(Scan::Inline { len }) => {
                prop_assert!(len <= bytes.len());
                let mut out = Vec::new();
                let _ = inline_to_multibulk(&bytes[..len], &mut out);
            }
            Ok(Scan::Large { data, len, after }) => {
                prop_assert!(data <= bytes.len());
                if let Ok((taken, done)) = Follower::new(len, after).follow(&bytes[data..], &limits) {
                    prop_assert!(taken <= bytes.len() - data);
                    prop_assert!(!done || taken > 0);
                }
            }
            Ok(Scan::Incomplete) | Err(_) => {}
        }
        prop_assert!(scanner.args(&bytes).iter().all(|a| a.len() <= bytes.len()));
    }

    #[test]
    fn every_reply_is_found_and_followed_for_any_split(reply in reply(), cut in any::<prop::sample::Index>()) {
        let stream = [&reply[..], b"+NEXT\r\n"].concat();
        let cut = cut.index(reply.len());
        let mut scanner = ReplyScanner::default();
        prop_assert!(matches!(scanner.scan(&stream[..cut]), Ok(ReplyScan::Incomplete(_))));
        prop_assert_eq!(scanner.scan(&stream), Ok(ReplyScan::Complete(reply.len())));
        let mut follower = ReplyFollower::default();
        let (first, done) = follower.follow(&stream[..cut]).expect("well-formed");
        prop_assert!(!done && first <= cut);
        prop_assert_eq!(follower.follow(&stream[first..]), Ok((reply.len() - first, true)));
        let parts: usize = elements(&reply).map(<[u8]>::len).sum();
        prop_assert!(parts < reply.len());
    }

    #[test]
    fn no_bytes_make_the_reply_scanner_panic(bytes in prop::collection::vec(prop_oneof![Just(b'*'), Just(b'$'), Just(b'%'), Just(b'\r'), Just(b'\n'), Just(b'1'), Just(b'-'), any::<u8>()], 0..200)) {
        if let Ok(ReplyScan::Complete(len)) = ReplyScanner::default().scan(&bytes) {
            prop_assert!(len <= bytes.len());
            // A reply complete for one is followed to the same end by the other.
            prop_assert_eq!(ReplyFollower::default().follow(&bytes), Ok((len, true)));
        }
        if let Ok((taken, _)) = ReplyFollower::default().follow(&bytes) {
            prop_assert!(taken <= bytes.len());
        }
        let _ = elements(&bytes).count();
    }
}

proptest! {
    #[test]
    fn a_converted_reply_is_one_complete_reply(answer in reply(), shape in 0usize..15) {
        use switchyard_resp::translate::{Shape, to_resp3};
        let shapes = [
            Shape::Plain, Shape::Map, Shape::Set, Shape::Double, Shape::Doubles, Shape::Scored, Shape::ScoredFlat, Shape::Pairs,
            Shape::LastScore, Shape::KeyScored, Shape::Positions, Shape::Places, Shape::Streams, Shape::Maps, Shape::StreamFull,
        ];
        let mut up = Vec::new();
        to_resp3(&answer, shapes[shape], &mut up);
        prop_assert_eq!(ReplyScanner::default().scan(&up), Ok(ReplyScan::Complete(up.len())), "{} as {:?}", answer.escape_ascii(), shapes[shape]);
    }
}
