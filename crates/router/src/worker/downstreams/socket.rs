//! Socket of a client, and the bytes that wait for it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::poll::{Poll, Token};
use crate::slab::Handle;
use crate::worker::transport::{self, Received, Tls};

#[derive(Debug)]
pub(in crate::worker) struct Socket {
    fd: OwnedFd,
    tls: Option<Box<Tls>>,
    out: Vec<u8>,
    sent: usize,
    is_writable: bool,
    /// Whether the client is in the list of clients to flush.
    is_marked: bool,
    /// Time since which queued messages exceed `push_soft_limit`. 0: they do not.
    behind_since_us: u64,
    /// The client writes its whole pipeline before it reads. It is not stalled for unread output, only disconnected at
    /// its limit.
    writes_first: bool,
    last_used_us: u64,
}

impl Socket {
    pub(super) fn new(fd: OwnedFd, tls: Option<Box<Tls>>, now_us: u64) -> Self {
        Self {
            fd,
            tls,
            out: Vec::new(),
            sent: 0,
            is_writable: true,
            is_marked: false,
            behind_since_us: 0,
            writes_first: false,
            last_used_us: now_us,
        }
    }

    /// Registers it for events.
    pub(in crate::worker) fn register(&self, poll: &Poll, handle: Handle) -> io::Result<()> {
        poll.add(&self.fd, Token::Client(handle))
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    // ---- input ----

    /// Reads once.
    #[inline]
    pub(in crate::worker) fn receive(&mut self, buffer: &mut [u8], now_us: u64) -> Result<Received, Errno> {
        self.last_used_us = now_us;
        transport::receive(&self.fd, &mut self.tls, buffer)
    }

    /// Reads and discards input, below TLS. Returns the number of bytes; 0 at the end of the connection.
    pub(super) fn discard(&self, buffer: &mut [u8]) -> Result<usize, Errno> {
        rustix::net::recv(&self.fd, &mut *buffer, RecvFlags::empty()).map(|(_, count)| count)
    }

    /// Whether the TLS handshake is incomplete.
    pub(in crate::worker) fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// Reason of a failed TLS handshake.
    pub(in crate::worker) fn tls_failure(&self) -> Option<String> {
        self.tls.as_ref().and_then(|tls| tls.failure())
    }

    // ---- output ----

    /// Bytes for the socket. The caller appends to them.
    #[inline]
    pub(super) fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Number of bytes in the buffer, also if sent.
    pub(super) fn buffered(&self) -> usize {
        self.out.len()
    }

    /// Bytes waiting for the socket. Unwritten TLS records count as one byte, because rustls does not report their
    /// size.
    #[inline]
    pub(super) fn unsent(&self) -> usize {
        self.out.len() - self.sent + self.tls.as_ref().map_or(0, |tls| usize::from(tls.has_unsent()))
    }

    /// Whether it can send at once.
    #[inline]
    pub(super) fn is_free(&self) -> bool {
        self.is_writable && self.unsent() == 0
    }

    #[inline]
    pub(super) fn note_writable(&mut self) {
        self.is_writable = true;
    }

    /// Returns its output if the socket is writable, without TLS.
    #[inline]
    pub(in crate::worker) fn plain_output(&self) -> Option<(BorrowedFd<'_>, &[u8])> {
        let sends = self.tls.is_none() && self.is_writable && self.unsent() > 0;
        sends.then(|| (self.fd.as_fd(), &self.out[self.sent..]))
    }

    /// Records that the socket has accepted `count` bytes of the output.
    #[inline]
    pub(super) fn note_sent(&mut self, count: usize, now_us: u64) {
        self.sent += count;
        self.last_used_us = now_us;
        if self.unsent() > 0 {
            // A short write means a full socket; epoll reports when it is writable.
            self.is_writable = false;
        }
    }

    /// Sends bytes that follow all output. Returns how many were accepted.
    pub(super) fn send_directly(&mut self, bytes: &[u8], now_us: u64) -> Option<usize> {
        let sent = transport::send(&self.fd, &mut self.tls, bytes).ok()?;
        self.last_used_us = now_us;
        self.is_writable = sent == bytes.len();
        Some(sent)
    }

    /// Sends output once. `None`: the socket does not accept any. `is_last`: the connection is closed after it.
    pub(super) fn send(&mut self, is_last: bool) -> Option<Result<usize, Errno>> {
        if !self.is_writable || self.unsent() == 0 {
            return None;
        }
        let bytes = &self.out[self.sent..];
        let sent = if is_last {
            transport::send_last(&self.fd, &mut self.tls, bytes)
        } else {
            transport::send(&self.fd, &mut self.tls, bytes)
        };
        self.is_writable &= sent != Err(Errno::AGAIN);
        Some(sent)
    }

    /// Frees memory of sent bytes. `is_idle`: no reply is pending.
    pub(super) fn trim(&mut self, is_idle: bool) {
        if self.unsent() == 0 {
            self.out.clear();
            self.sent = 0;
            if self.out.capacity() > QUIET_CAPACITY && is_idle {
                self.out = Vec::new();
            }
        } else if self.sent > OUTPUT_HIGH {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Marks or unmarks it as having output. Returns whether it was marked.
    #[inline]
    pub(super) fn mark(&mut self, is_marked: bool) -> bool {
        std::mem::replace(&mut self.is_marked, is_marked)
    }

    pub(in crate::worker) fn writes_first(&self) -> bool {
        self.writes_first
    }

    pub(in crate::worker) fn set_writes_first(&mut self, writes_first: bool) {
        self.writes_first = writes_first;
    }

    /// Records since when more than `soft` bytes of messages are unread.
    pub(in crate::worker) fn note_behind(&mut self, soft: usize, now_us: u64) {
        if self.unsent() > soft && self.behind_since_us == 0 {
            self.behind_since_us = now_us.max(1);
        }
    }

    /// Whether more than `soft` bytes of messages are still unread after `soft_us`. `None`: this time has not passed, or
    /// the client was not behind.
    pub(in crate::worker) fn is_still_behind(&self, soft: usize, soft_us: u64, now_us: u64) -> Option<bool> {
        let is_more = self.unsent() > soft;
        let is_long = now_us.saturating_sub(self.behind_since_us) > soft_us;
        (self.behind_since_us > 0 && (!is_more || is_long)).then_some(is_more)
    }

    /// Records that the client has read its messages.
    pub(in crate::worker) fn catches_up(&mut self) {
        self.behind_since_us = 0;
    }

    /// Time since the last byte in either direction, us.
    pub(in crate::worker) fn quiet_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.last_used_us)
    }

    // ---- end ----

    /// Ends the output, and reads the input that has arrived: closing with unread input would reset the connection
    /// before the client has read the last reply.
    pub(super) fn finish(&mut self) {
        transport::finish(&self.fd, &mut self.tls);
        let mut sink = [0u8; 4096];
        for _ in 0..256 {
            if !matches!(self.discard(&mut sink), Ok(1..)) {
                break;
            }
        }
    }

    /// Ends TLS and the events.
    pub(super) fn close(&mut self, poll: &Poll) {
        if let Some(tls) = &mut self.tls {
            tls.notify_close(&self.fd);
        }
        poll.remove(&self.fd);
    }

    /// Memory in bytes.
    pub(super) fn memory(&self) -> usize {
        self.out.capacity()
    }
}

/// Maximum buffer capacity of an idle client.
pub(super) const QUIET_CAPACITY: usize = 4 << 10;

/// Maximum unread output of a client before its commands are stalled.
pub(in crate::worker) const OUTPUT_HIGH: usize = 1 << 20;
