//! RESP3 clients in front of a node that does not speak RESP3.
//!
//! A connection for RESP3 clients whose node refuses `HELLO 3` (Redis before 6, a renamed or forbidden command) stays
//! in RESP2 and is marked ([`crate::worker::upstreams::link::Link::downgraded`]); its replies are converted to their RESP3 form.
//! Nothing else about the connection differs, so no other code depends on it. The next connection to the node tries
//! RESP3 again.

use switchyard_resp::command::Lookup;
use switchyard_resp::request::{Limits, Scanner};
use switchyard_resp::translate::{Shape, to_resp3};
use switchyard_resp::{encode, reply};

use super::Link;
use super::kind::Checkout;
use super::pending::Purpose;
use crate::worker::turn::Turn;

/// Whether an error reply to `HELLO 3` means that the node cannot, or may not, use RESP3, and not that our credentials
/// are wrong. Services that provide clusters have texts of their own for commands that they refuse.
pub(super) fn refuses_resp3(error: &str, is_of_cluster: bool) -> bool {
    let is_of_service = is_of_cluster && error.starts_with("ERR ") && !error.starts_with("ERR max number of clients");
    is_of_service || ["ERR unknown command", "NOPROTO", "NOPERM"].iter().any(|start| error.starts_with(start))
}

/// Returns the RESP3 shape of the reply to a request. For an upload, only the beginning of the request is
/// available.
pub(in crate::worker) fn shape_of(turn: &Turn, request: &[u8]) -> Shape {
    let mut scanner = Scanner::default();
    let _ = scanner.scan(request, &Limits::NONE);
    let args = scanner.args(request);
    match turn.routing().commands.find(&args) {
        Lookup::Command(command) => Shape::of(&command.name, &args),
        _ => Shape::Plain,
    }
}

/// Returns the reply at the head of a downgraded connection in RESP3; `None` if it is the same.
pub(in crate::worker) fn raised(turn: &Turn, link: &mut Link, answer: &[u8]) -> Option<Vec<u8>> {
    let purpose = link.head()?.purpose;
    if purpose == Purpose::Queued && link.lane.is_exclusive() {
        return None; // see `note_transaction`
    }
    if purpose == Purpose::Queued {
        // Part of a transaction: its reply comes with EXEC's. MULTI itself is the first part, without a reply
        // there.
        let shape = (answer != b"+OK\r\n").then(|| shape_of(turn, link.requests.head_request()));
        link.transaction.add_shape(shape);
        return None;
    }
    let parts = if purpose == Purpose::Exec { link.transaction.take_shapes() } else { Vec::new() };
    if !matches!(answer.first(), Some(b'$' | b'*')) {
        return None;
    }
    let elements = reply::elements(answer);
    if purpose == Purpose::Exec && !reply::is_null(answer) && elements.remaining() == parts.len() as u64 {
        let mut out = Vec::with_capacity(answer.len() + 16);
        encode::header(&mut out, b'*', parts.len());
        elements.zip(parts).for_each(|(element, shape)| to_resp3(element, shape, &mut out));
        return Some(out);
    }
    let shape = link.checkout().map_or_else(|| shape_of(turn, link.requests.head_request()), Checkout::shape);
    if answer[0] == b'$' && shape != Shape::Double && !reply::is_null(answer) {
        return None;
    }
    let mut out = Vec::with_capacity(answer.len() + 16);
    to_resp3(answer, shape, &mut out);
    Some(out)
}

/// For a transaction on a connection that keeps no requests: records the shapes of its replies. `lengths`: of the
/// commands.
pub(in crate::worker) fn note_transaction(
    turn: &Turn,
    link: &mut Link,
    queue: &[u8],
    lengths: impl Iterator<Item = usize>,
) {
    if !link.downgraded || !link.lane.is_exclusive() {
        return;
    }
    let mut rest = queue;
    let mut shapes = Vec::new();
    for length in lengths {
        let (command, behind) = rest.split_at(length.min(rest.len()));
        shapes.push(shape_of(turn, command));
        rest = behind;
    }
    link.transaction.set_shapes(shapes);
    link.checkout_mut().into_iter().for_each(Checkout::is_transaction);
}
