//! Bytes of a node: scanner, follower and element readers agree on the end of a reply, however it is cut.

use switchyard_resp::command::parse_command_reply;
use switchyard_resp::reply::{self, ReplyError, ReplyFollower, ReplyScan, ReplyScanner};

fn scan_in_pieces(bytes: &[u8], piece: usize) -> Result<ReplyScan, ReplyError> {
    let mut scanner = ReplyScanner::default();
    let mut there = 0;
    loop {
        let scan = scanner.scan(&bytes[..there])?;
        if let ReplyScan::Incomplete(least) = scan {
            assert!(least > there, "requests bytes that it has");
        }
        if there == bytes.len() || matches!(scan, ReplyScan::Complete(_)) {
            return Ok(scan);
        }
        there = (there + piece).min(bytes.len());
    }
}

fn follow_in_pieces(bytes: &[u8], piece: usize) -> Result<Option<usize>, ReplyError> {
    let mut follower = ReplyFollower::default();
    let (mut pos, mut there) = (0, 0);
    loop {
        let (taken, done) = follower.follow(&bytes[pos..there])?;
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

/// Checks that the elements of the whole reply at `bytes` fill it exactly; a few levels deep, because this recurses and
/// the code does not.
fn check_elements(bytes: &[u8], depth: usize) {
    let _ = (reply::text(bytes), reply::integer(bytes), reply::is_error(bytes), reply::is_null(bytes));
    let mut elements = reply::elements(bytes);
    let declared = elements.remaining();
    if declared == 0 {
        return;
    }
    let header = bytes.iter().position(|b| *b == b'\n').map_or(0, |at| at + 1);
    let (mut len, mut count) = (header, 0);
    for element in elements.by_ref() {
        len += element.len();
        count += 1;
        if depth < 4 {
            check_elements(element, depth + 1);
        }
    }
    assert_eq!((len, count), (bytes.len(), declared), "elements of a whole reply");
}

pub(crate) fn reply(input: &[u8]) {
    let Some((&piece, bytes)) = input.split_first() else { return };
    let piece = usize::from(piece) + 1;
    let whole = ReplyScanner::default().scan(bytes);
    let pieces = scan_in_pieces(bytes, piece);
    match whole {
        Ok(ReplyScan::Complete(len)) => {
            assert!(len > 0 && len <= bytes.len());
            assert_eq!(pieces, Ok(ReplyScan::Complete(len)), "pieces of {piece}");
            assert_eq!(follow_in_pieces(bytes, piece), Ok(Some(len)), "followed in pieces of {piece}");
            for cut in 0..len.min(64) {
                if let ReplyScan::Incomplete(least) =
                    ReplyScanner::default().scan(&bytes[..cut]).expect("a part of a reply")
                {
                    assert!(least > cut && least <= len, "{least} of {len} at {cut}");
                } else {
                    panic!("complete at {cut} of {len}");
                }
            }
            check_elements(&bytes[..len], 0);
        }
        Ok(ReplyScan::Incomplete(least)) => {
            assert!(least > bytes.len());
            assert!(matches!(pieces, Ok(ReplyScan::Incomplete(_))));
            assert!(
                !matches!(follow_in_pieces(bytes, piece), Ok(Some(_))),
                "followed to the end of a reply that is not all there"
            );
        }
        Err(error) => assert_eq!(pieces, Err(error)),
    }
    // Replies are parsed only when whole, but any bytes of a node must be harmless.
    let _ = parse_command_reply(bytes);
    reply::elements(bytes).take(1000).for_each(|element| assert!(element.len() <= bytes.len()));
}
