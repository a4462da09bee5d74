//! Input of a client: received bytes that are no complete command, and the state of the receiving side.

use switchyard_resp::request::Scanner;

use super::socket::QUIET_CAPACITY;
use crate::poll::Ready;

#[derive(Debug)]
pub(in crate::worker) struct Input {
    /// Received bytes, unparsed from `at` on.
    bytes: Vec<u8>,
    at: usize,
    /// State of the scan of an incomplete command with many arguments.
    scanner: Option<Box<Scanner>>,
    /// A large request must be complete before it can be split or routed.
    collects_large: bool,
    /// The socket may be readable.
    is_readable: bool,
    /// The client has closed its side; the end must still be read.
    hangup: bool,
    /// The client will send nothing more. Close after all pending replies are sent.
    has_ended: bool,
    /// Close after the output is sent. Ignore further input.
    is_closing: bool,
}

impl Input {
    pub(super) fn new() -> Self {
        Self {
            bytes: Vec::new(),
            at: 0,
            scanner: None,
            collects_large: false,
            is_readable: true,
            hangup: false,
            has_ended: false,
            is_closing: false,
        }
    }

    /// Records readiness of the socket.
    #[inline]
    pub(super) fn note_ready(&mut self, event: Ready) {
        self.hangup |= event.hangup;
    }

    /// Records whether the socket may be readable.
    #[inline]
    pub(in crate::worker) fn note_readable(&mut self, is_readable: bool) {
        self.is_readable = is_readable;
    }

    /// Records a read, with `more` to read. Returns whether the socket must be read again.
    #[inline]
    pub(in crate::worker) fn note_read(&mut self, more: bool) -> bool {
        self.is_readable = more || self.hangup;
        self.is_readable
    }

    #[inline]
    pub(in crate::worker) fn is_readable(&self) -> bool {
        self.is_readable
    }

    /// Whether the client has closed its side, perhaps with unread input.
    #[inline]
    pub(in crate::worker) fn has_hung_up(&self) -> bool {
        self.hangup
    }

    /// Whether the client has closed its side, and all of its input was read.
    #[inline]
    pub(in crate::worker) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// Records that all input was read.
    pub(in crate::worker) fn end(&mut self) {
        self.has_ended = true;
    }

    /// Whether further input is ignored, and the connection closes after the output.
    #[inline]
    pub(in crate::worker) fn is_closing(&self) -> bool {
        self.is_closing
    }

    /// Whether the connection closes when all is sent.
    #[inline]
    pub(super) fn is_last(&self) -> bool {
        self.is_closing || self.has_ended
    }

    /// Discards the input and ignores further input.
    pub(super) fn close(&mut self) {
        self.is_closing = true;
        self.bytes = Vec::new();
        self.at = 0;
    }

    #[inline]
    pub(in crate::worker) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether bytes are unparsed.
    pub(in crate::worker) fn has_unparsed(&self) -> bool {
        self.at < self.bytes.len()
    }

    /// Unparsed bytes, and free bytes of the buffer, for CLIENT LIST.
    pub(super) fn used_and_free(&self) -> (usize, usize) {
        (self.bytes.len() - self.at, self.bytes.capacity() - self.bytes.len())
    }

    /// Keeps the rest of received bytes.
    pub(in crate::worker) fn keep(&mut self, rest: &[u8]) {
        debug_assert!(self.bytes.is_empty());
        self.bytes.extend_from_slice(rest);
        self.at = 0;
    }

    /// Appends received bytes to the kept ones.
    pub(in crate::worker) fn append(&mut self, bytes: &[u8]) {
        let missing = self.scanner.as_ref().map_or(0, |scanner| scanner.missing(&self.bytes[self.at..]));
        make_room(&mut self.bytes, bytes.len(), missing);
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the kept bytes, and the place from which on they are unparsed.
    pub(in crate::worker) fn take(&mut self) -> (Vec<u8>, usize) {
        (std::mem::take(&mut self.bytes), std::mem::take(&mut self.at))
    }

    /// Returns the buffer, which was parsed up to `at`.
    pub(in crate::worker) fn put_back(&mut self, mut bytes: Vec<u8>, mut at: usize) {
        if at == bytes.len() {
            bytes.clear();
            if bytes.capacity() > QUIET_CAPACITY {
                bytes = Vec::new();
            }
            at = 0;
        } else if at > 64 << 10 && at * 2 > bytes.len() {
            bytes.drain(..at);
            at = 0;
        }
        (self.bytes, self.at) = (bytes, at);
    }

    /// Puts a command before the unparsed bytes.
    pub(in crate::worker) fn put_first(&mut self, command: &[u8]) {
        // The scan of the command that was the first one starts again.
        self.scanner = None;
        self.collects_large = false;
        self.bytes.splice(..self.at, command.iter().copied());
        self.at = 0;
    }

    /// Takes the state of the scan of an incomplete command.
    #[inline]
    pub(in crate::worker) fn take_scanner(&mut self) -> Option<Box<Scanner>> {
        self.scanner.take()
    }

    /// Keeps the state of the scan of an incomplete command.
    pub(in crate::worker) fn keep_scanner(&mut self, scanner: Scanner) {
        self.scanner = Some(Box::new(scanner));
    }

    /// Whether a large request is collected whole.
    #[inline]
    pub(in crate::worker) fn collects_large(&self) -> bool {
        self.collects_large
    }

    /// Collects the current request, although it is large.
    pub(in crate::worker) fn collect_large(&mut self) {
        self.collects_large = true;
    }

    /// Records that a command was taken from the input.
    #[inline]
    pub(in crate::worker) fn command_taken(&mut self) {
        self.collects_large = false;
    }

    /// Memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.bytes.capacity() + self.scanner.as_ref().map_or(0, |scanner| scanner.memory())
    }
}

/// Reserves space for `more` bytes in a buffer that collects a request with `missing` declared bytes left. A vector
/// that grows on its own doubles: a request of 80 MB would use up to 160 MB, and its client would appear bigger than it
/// is (`memory-max`).
fn make_room(buffer: &mut Vec<u8>, more: usize, missing: usize) {
    if missing > 0 && buffer.capacity() - buffer.len() < more {
        // Not all at once, because declared bytes may never arrive. Not too little, because each step may copy
        // everything.
        buffer.reserve_exact(missing.clamp(buffer.len() / 4, buffer.len()).max(more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collected_request_needs_little_extra_memory_and_few_copies() {
        let declared = 80 << 20;
        for first in [45, 1000, 16 << 10, 64_000, 82_000, 128 << 10] {
            let (mut buffer, mut grown) = (Vec::with_capacity(first), 0);
            buffer.resize(first, 0u8);
            while buffer.len() < declared {
                let piece = (128 << 10).min(declared - buffer.len());
                let (before, missing) = (buffer.capacity(), declared - buffer.len());
                make_room(&mut buffer, piece, missing);
                buffer.resize(buffer.len() + piece, 0);
                grown += usize::from(buffer.capacity() != before);
                assert!(
                    buffer.capacity() <= (2 * buffer.len()).max(first + (128 << 10)),
                    "{} for {}",
                    buffer.capacity(),
                    buffer.len()
                );
            }
            assert!(buffer.capacity() <= declared + declared / 4, "{} after {first}", buffer.capacity());
            assert!(grown <= 25, "copied {grown} times after {first}");
        }
    }

    #[test]
    fn a_command_that_is_put_first_precedes_the_unparsed_bytes() {
        let mut input = Input::new();
        input.keep(b"PING GET");
        let (bytes, _) = input.take();
        input.put_back(bytes, 5);
        input.keep_scanner(Scanner::default());
        input.put_first(b"EVAL ");
        assert_eq!(input.take(), (b"EVAL GET".to_vec(), 0));
        assert!(input.take_scanner().is_none());
    }

    #[test]
    fn input_that_is_being_processed_counts_as_empty() {
        let mut input = Input::new();
        input.keep(b"PING PING");
        let (bytes, _) = input.take();
        input.put_back(bytes, 5);
        assert_eq!(input.take().1, 5);
        assert_eq!(input.used_and_free(), (0, 0));
    }
}
