//! Translated replies of a node: for any reply and any assumed shape, the result is one whole reply.

use switchyard_resp::reply::{ReplyScan, ReplyScanner};
use switchyard_resp::translate::{Shape, to_resp3};

const SHAPES: &[Shape] = &[
    Shape::Plain,
    Shape::Map,
    Shape::Set,
    Shape::Double,
    Shape::Doubles,
    Shape::Scored,
    Shape::ScoredFlat,
    Shape::Pairs,
    Shape::LastScore,
    Shape::KeyScored,
    Shape::Positions,
    Shape::Places,
    Shape::Streams,
    Shape::Maps,
    Shape::StreamFull,
];

pub(crate) fn translate(bytes: &[u8]) {
    let Ok(ReplyScan::Complete(len)) = ReplyScanner::default().scan(bytes) else { return };
    let answer = &bytes[..len];
    let whole = |out: &[u8]| {
        assert_eq!(ReplyScanner::default().scan(out), Ok(ReplyScan::Complete(out.len())), "{}", out.escape_ascii())
    };
    let mut out = Vec::new();
    for shape in SHAPES {
        out.clear();
        to_resp3(answer, *shape, &mut out);
        whole(&out);
    }
}
