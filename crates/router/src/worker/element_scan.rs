//! `HSCAN`, `SSCAN`, `ZSCAN`: their cursors are only valid at the server that returned them, because each server has
//! its own hash seed. So cursors for clients include the node. If the key has moved in the meantime, the iteration
//! restarts at its new node: elements may be returned twice, as always with these commands, and none is missed.
//!
//! The cursor has room for the node, so no table of iterations is needed, whose end would be unknown. Inside MULTI and
//! in scripts clients see the node's cursors; these are accepted unchanged.

use switchyard_policy::topology::NodeId;
use switchyard_resp::{encode, reply};

use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;

/// Bits of a server's cursor. It is below the number of buckets of the value, which is far smaller.
const CURSOR_BITS: u32 = 48;

fn cursor_at(cursor: u64, node: NodeId) -> u64 {
    if cursor == 0 || cursor >> CURSOR_BITS > 0 { cursor } else { cursor | (u64::from(node.0) + 1) << CURSOR_BITS }
}

fn meant(told: u64, node: NodeId) -> u64 {
    match told >> CURSOR_BITS {
        0 => told,
        of if of == u64::from(node.0) + 1 => told & ((1 << CURSOR_BITS) - 1),
        _ => 0,
    }
}

/// Translates the cursor of a page for the client.
#[derive(Debug)]
struct Page {
    node: NodeId,
}

impl MultiStepCommand for Page {
    fn next(&mut self, _: &Turn, _: &Upstreams, _: bool, mut parts: Vec<Vec<u8>>) -> Next {
        let page = parts.pop().unwrap_or_default();
        let mut elements = reply::elements(&page);
        let cursor = elements.next().and_then(reply::integer).and_then(|cursor| u64::try_from(cursor).ok());
        let (Some(cursor), Some(found), None) = (cursor, elements.next(), elements.next()) else {
            return Next::Done(page);
        };
        let mut out = Vec::with_capacity(page.len() + 16);
        encode::header(&mut out, b'*', 2);
        encode::bulk(&mut out, cursor_at(cursor, self.node).to_string().as_bytes());
        out.extend_from_slice(found);
        Next::Done(out)
    }
}

impl Gathers {
    /// Requests a page from the key's node. `None`: the node replies to the command as it is.
    pub(super) fn element_scan(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        call: &Invocation<'_>,
        node: NodeId,
    ) -> Option<Flow> {
        let Invocation { handle, command, raw, args, .. } = *call;
        let cursor: Option<u64> = args.get(2).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok());
        // The node will reply with an error.
        let cursor = cursor?;
        let Some(client) = down.get_mut(handle) else { return Some(Flow::Close) };
        if !client.may_take(Lane::Main) {
            return Some(Flow::Stall(Stall::Barrier));
        }
        let meant = meant(cursor, node);
        let mut request = Vec::with_capacity(raw.len());
        if meant == cursor {
            request.extend_from_slice(raw);
        } else {
            encode::header(&mut request, b'*', args.len());
            for (at, arg) in args.iter().enumerate() {
                if at == 2 {
                    encode::bulk(&mut request, meant.to_string().as_bytes())
                } else {
                    encode::bulk(&mut request, arg)
                }
            }
        }
        Some(self.begin_rounds(
            turn,
            down,
            handle,
            command.class() as u8,
            Box::new(Page { node }),
            vec![StepRequest { node, lane: Lane::Main, requests: vec![request] }],
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_that_of_one_node() {
        let [one, other] = [NodeId(0), NodeId(41)];
        for cursor in [1, 7, 1 << 40] {
            assert_eq!(meant(cursor_at(cursor, one), one), cursor);
            assert_eq!(meant(cursor_at(cursor, other), other), cursor);
            assert_eq!(meant(cursor_at(cursor, one), other), 0, "from the beginning");
            assert_eq!(meant(cursor, one), cursor, "a node's own");
            assert!(i64::try_from(cursor_at(cursor, other)).is_ok(), "clients may read it as a signed number");
        }
        assert_eq!((cursor_at(0, other), meant(0, other)), (0, 0));
    }
}
