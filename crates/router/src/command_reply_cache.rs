//! Cached replies to COMMAND, for clients that connect while no node replies ([`crate::worker`], its `timeout`).
//!
//! Not generated from the command table: it has no documentation of commands, and client libraries expect the reply of
//! a specific server version.

use std::sync::Mutex;

use crate::lock::lock;

/// Maximum number of cached replies, and maximum bytes of one.
const REPLIES_MAX: usize = 8;
const REPLY_BYTES_MAX: usize = 2 << 20;

/// Replies to COMMAND. Constant for a server process, and similar on all nodes.
#[derive(Debug, Default)]
pub(crate) struct CommandReplyCache(Mutex<Vec<Known>>);

/// Whether RESP3, the request, and the reply.
type Known = (bool, Vec<u8>, Vec<u8>);

impl CommandReplyCache {
    /// Stores a node's reply to this request.
    pub(crate) fn note(&self, resp3: bool, request: &[u8], answer: &[u8]) {
        let mut known = lock(&self.0);
        known.retain(|(protocol, of, _)| *protocol != resp3 || of != request);
        if request.len() + answer.len() <= REPLY_BYTES_MAX {
            if known.len() >= REPLIES_MAX {
                known.remove(0);
            }
            known.push((resp3, request.to_vec(), answer.to_vec()));
        }
    }

    /// Returns the last reply to this request.
    pub(crate) fn answer(&self, resp3: bool, request: &[u8]) -> Option<Vec<u8>> {
        lock(&self.0)
            .iter()
            .find(|(protocol, of, _)| *protocol == resp3 && of == request)
            .map(|(.., answer)| answer.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_replies_are_keyed_by_request_and_protocol_and_bounded() {
        let heard = CommandReplyCache::default();
        heard.note(false, b"COMMAND", b"old");
        heard.note(false, b"COMMAND", b"new");
        heard.note(true, b"COMMAND", b"resp3");
        assert_eq!(
            (heard.answer(false, b"COMMAND"), heard.answer(true, b"COMMAND")),
            (Some(b"new".to_vec()), Some(b"resp3".to_vec()))
        );
        for number in 0..REPLIES_MAX {
            heard.note(false, &[number as u8], b"x");
        }
        let kept = lock(&heard.0).len();
        assert_eq!((kept, heard.answer(false, b"COMMAND")), (REPLIES_MAX, None));
        heard.note(false, b"large", &vec![0; REPLY_BYTES_MAX]);
        assert_eq!(heard.answer(false, b"large"), None);
    }
}
