//! Socket of a connection to a node, with TLS if configured.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;

use crate::poll::Token;
use crate::slab::Handle;
use crate::worker::transport::{self, Received, Tls};
use crate::worker::turn::Turn;

/// Socket, or none while there is no connection.
#[derive(Debug, Default)]
pub(super) struct Socket {
    fd: Option<OwnedFd>,
    tls: Option<Box<Tls>>,
    readable: bool,
    /// The node has closed its side; the end has to be read.
    hangup: bool,
    writable: bool,
    /// Time when the connection came up, or last accepted bytes again after it had been full: earlier commands had to
    /// wait.
    flowed_us: u64,
}

impl Socket {
    /// Uses a socket that is connecting.
    pub(super) fn open(&mut self, turn: &Turn, handle: Handle, fd: OwnedFd, tls: Option<Box<Tls>>) -> io::Result<()> {
        self.tls = tls;
        (self.readable, self.hangup, self.writable) = (false, false, false);
        let added = turn.poll().add(&fd, Token::Link(handle));
        self.fd = Some(fd);
        added
    }

    /// Closes the socket. Returns whether there was one.
    pub(super) fn close(&mut self, turn: &Turn) -> bool {
        self.tls = None;
        let fd = self.fd.take();
        fd.as_ref().into_iter().for_each(|fd| turn.poll().remove(fd));
        fd.is_some()
    }

    /// Closes the socket of a connection that was up: the node is notified if it uses TLS.
    pub(super) fn close_with_notice(&mut self, turn: &Turn) {
        if let (Some(fd), Some(tls)) = (&self.fd, &mut self.tls) {
            tls.notify_close(fd);
        }
        self.close(turn);
    }

    /// Result of a TCP connect. `None` without a socket.
    pub(super) fn connected(&self) -> Option<Result<(), Errno>> {
        self.fd.as_ref().map(|fd| rustix::net::sockopt::socket_error(fd).and_then(|result| result))
    }

    /// Whether TLS is used.
    pub(super) fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// Continues the TLS handshake. Returns whether it has finished; `None` without one.
    pub(super) fn secure(&mut self) -> Option<Result<bool, Errno>> {
        let (Some(fd), Some(tls)) = (&self.fd, &mut self.tls) else { return None };
        Some(tls.drive(fd).map(|()| !tls.is_handshaking()))
    }

    /// Records whether the node has closed its side.
    pub(super) fn note_hangup(&mut self, hangup: bool) {
        self.hangup |= hangup;
    }

    /// Records that it accepts bytes.
    pub(super) fn is_free(&mut self) {
        self.writable = true;
    }

    /// Records the time since when no command waits for the socket.
    pub(super) fn flows_since(&mut self, now_us: u64) {
        self.flowed_us = now_us;
    }

    /// Time that a command waited for the socket, of the `took_us` until its reply.
    pub(super) fn queued_us(&self, sent_us: u32, took_us: u32) -> u32 {
        let flowed = (self.flowed_us as u32).wrapping_sub(sent_us);
        if self.flowed_us > 0 && flowed <= took_us { flowed } else { 0 }
    }

    /// Whether TLS has encrypted bytes that the socket has not accepted.
    #[inline]
    pub(super) fn has_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_unsent())
    }

    /// Returns it if it is writable, without TLS.
    #[inline]
    pub(super) fn plain(&self) -> Option<BorrowedFd<'_>> {
        let fd = self.fd.as_ref().filter(|_| self.writable && self.tls.is_none())?;
        Some(fd.as_fd())
    }

    /// Records that it accepts no more bytes.
    #[inline]
    pub(super) fn is_full(&mut self) {
        self.writable = false;
    }

    /// Sends as much as the socket accepts, if it accepts any. Returns the count; `None`: it is full.
    #[inline]
    pub(super) fn send(&mut self, bytes: &[u8]) -> Result<Option<usize>, Errno> {
        let Some(fd) = self.fd.as_ref().filter(|_| self.writable) else { return Ok(None) };
        loop {
            match transport::send(fd, &mut self.tls, bytes) {
                Ok(count) => return Ok(Some(count)),
                Err(Errno::AGAIN) => {
                    self.writable = false;
                    return Ok(None);
                }
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends bytes on an idle connection, which accepts them as a whole if they are few.
    pub(super) fn send_first(&mut self, bytes: &[u8]) -> Option<Result<usize, Errno>> {
        self.fd.as_ref().map(|fd| transport::send(fd, &mut self.tls, bytes))
    }

    /// Keeps in mind that there may be data, although it is not read now.
    #[inline]
    pub(super) fn postpone(&mut self) {
        self.readable = true;
    }

    /// Whether the socket may have more data.
    #[inline]
    pub(super) fn is_readable(&self) -> bool {
        self.readable
    }

    /// Reads once. Returns 0 if the node has closed the connection; `None` without a socket.
    #[inline]
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> Option<Result<usize, Errno>> {
        let received = transport::receive(self.fd.as_ref()?, &mut self.tls, buffer);
        Some(match received {
            Ok(Received { count, more }) => {
                self.readable = count == 0 || more || self.hangup;
                Ok(count)
            }
            Err(error) => {
                self.readable = error != Errno::AGAIN;
                Err(error)
            }
        })
    }

    /// Returns the text of an error.
    pub(super) fn error_text(&self, error: Errno) -> String {
        let why = self.tls.as_ref().and_then(|tls| tls.failure()).map(|why| format!("TLS: {why}"));
        why.unwrap_or_else(|| io::Error::from(error).to_string())
    }
}
