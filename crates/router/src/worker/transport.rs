//! Transport of a connection: plain, or TLS. The only place where sockets of clients and nodes are read and written.
//!
//! A plain connection costs one branch that is always predicted. TLS is rustls' buffered `Connection` on the same
//! non-blocking socket. Its buffers are bounded: a read accepts only as much ciphertext as fits into the caller's
//! buffer as plaintext, and a write accepts at most [`CHUNK`] of plaintext before its ciphertext is on the socket. So
//! the backpressure rules of plain connections apply.
//!
//! rustls' unbuffered API is not used: it saves one copy and costs a state machine of our own in the place where a
//! mistake is worst.

use std::cell::RefCell;
use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection};

use crate::tls::{client_failure, node_failure};

/// Plaintext that is encrypted before it is written: four records. More would only wait in rustls' buffer.
const CHUNK: usize = 64 << 10;

/// Maximum ciphertext per read.
const SEALED_READ: usize = 64 << 10;

/// Room for the rest of an earlier read in rustls: less than one record of the largest size.
const RECORD_MAX: usize = (16 << 10) + 2048;

thread_local! {
    /// Ciphertext between the socket and rustls. One per worker: it is empty between calls.
    static SEALED: RefCell<Vec<u8>> = RefCell::new(vec![0; SEALED_READ]);
}

/// A TLS session on a connection.
pub(crate) struct Tls {
    session: Connection,
    /// The peer has sent close_notify.
    ended: bool,
    /// Bytes of ciphertext written to sockets.
    written: u64,
    /// Error of the session, if it has failed.
    failure: Option<rustls::Error>,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls")
            .field("handshaking", &self.session.is_handshaking())
            .field("failure", &self.failure)
            .finish()
    }
}

/// Result of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Received {
    /// Bytes at the start of the buffer; 0 means that the peer has closed its side.
    pub(crate) count: usize,
    /// Whether there may be more to read now.
    pub(crate) more: bool,
}

/// Reads once. Returns `Errno::AGAIN` if there is no data.
#[inline]
pub(crate) fn receive(fd: &OwnedFd, tls: &mut Option<Box<Tls>>, buffer: &mut [u8]) -> Result<Received, Errno> {
    match tls {
        None => {
            let (_, count) = rustix::net::recv(fd, &mut *buffer, RecvFlags::empty())?;
            Ok(Received { count, more: count == buffer.len() })
        }
        Some(tls) => tls.receive(fd, buffer),
    }
}

/// Writes as much as the socket accepts. Returns `Errno::AGAIN` if it accepts nothing.
#[inline]
pub(crate) fn send(fd: &OwnedFd, tls: &mut Option<Box<Tls>>, bytes: &[u8]) -> Result<usize, Errno> {
    match tls {
        None => rustix::net::send(fd, bytes, SendFlags::NOSIGNAL),
        Some(tls) => tls.send(&mut Socket(fd), bytes),
    }
}

/// Like [`send`], for the last bytes: they may be delayed until [`finish`], and are sent in one packet with the end of
/// the connection. A client that has read them then notices the end as well, and sends nothing more; many clients check
/// only data that has arrived.
pub(crate) fn send_last(fd: &OwnedFd, tls: &mut Option<Box<Tls>>, bytes: &[u8]) -> Result<usize, Errno> {
    match tls {
        None => rustix::net::send(fd, bytes, SendFlags::NOSIGNAL | SendFlags::MORE),
        Some(tls) => tls.send(&mut Socket(fd), bytes),
    }
}

/// Sends the end, and closes our side of the connection.
pub(crate) fn finish(fd: &OwnedFd, tls: &mut Option<Box<Tls>>) {
    if let Some(tls) = tls {
        tls.notify_close(fd);
    }
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
}

impl Tls {
    /// The server side of a session, with a client that has just connected.
    pub(crate) fn accept(config: Arc<ServerConfig>) -> Result<Box<Self>, rustls::Error> {
        Ok(Self::new(ServerConnection::new(config)?.into()))
    }

    /// The client side of a session, with a node.
    pub(crate) fn connect(config: Arc<ClientConfig>, name: ServerName<'static>) -> Result<Box<Self>, rustls::Error> {
        Ok(Self::new(ClientConnection::new(config, name)?.into()))
    }

    fn new(mut session: Connection) -> Box<Self> {
        session.set_buffer_limit(Some(2 * CHUNK));
        Box::new(Self { session, ended: false, written: 0, failure: None })
    }

    /// Whether the handshake is in progress.
    pub(crate) fn is_handshaking(&self) -> bool {
        self.session.is_handshaking()
    }

    /// Whether ciphertext waits for the socket.
    #[inline]
    pub(crate) fn has_unsent(&self) -> bool {
        self.session.wants_write()
    }

    /// Returns the error of the session, if it has failed, and the remedy.
    pub(crate) fn failure(&self) -> Option<String> {
        self.failure.as_ref().map(match self.session {
            Connection::Client(_) => node_failure,
            Connection::Server(_) => client_failure,
        })
    }

    /// Starts or continues the handshake without data: sends our first message.
    pub(crate) fn drive(&mut self, fd: &OwnedFd) -> Result<(), Errno> {
        match self.flush(&mut Socket(fd)) {
            Ok(()) | Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn receive(&mut self, fd: &OwnedFd, buffer: &mut [u8]) -> Result<Received, Errno> {
        let mut count = self.take_plaintext(buffer);
        loop {
            if self.failure.is_some() {
                return if count > 0 { Ok(Received { count, more: true }) } else { Err(Errno::PROTO) };
            }
            if self.ended {
                // The end is returned by a separate read.
                return Ok(Received { count, more: count > 0 });
            }
            // Plaintext is shorter than its ciphertext, so this read fits.
            let room = buffer.len().saturating_sub(count + RECORD_MAX).min(SEALED_READ);
            if room == 0 {
                return Ok(Received { count, more: true });
            }
            let read = SEALED.with_borrow_mut(|sealed| {
                let (_, read) = rustix::net::recv(fd, &mut sealed[..room], RecvFlags::empty())?;
                count += self.open(&sealed[..read], &mut buffer[count..]);
                Ok(read)
            });
            // The answer of a handshake, or an alert.
            let flushed = self.flush(&mut Socket(fd));
            match (read, flushed) {
                (Ok(0), _) => self.ended = true,
                (Ok(read), Ok(()) | Err(Errno::AGAIN)) if read < room && self.failure.is_none() && !self.ended => {
                    return if count > 0 { Ok(Received { count, more: false }) } else { Err(Errno::AGAIN) };
                }
                (Ok(_), Ok(()) | Err(Errno::AGAIN)) => {}
                (Err(Errno::AGAIN), _) if count > 0 => return Ok(Received { count, more: false }),
                // Earlier data still counts; the error comes again with the next read.
                (Ok(_), Err(error)) | (Err(error), _) => {
                    return if count > 0 { Ok(Received { count, more: true }) } else { Err(error) };
                }
            }
        }
    }

    /// Passes ciphertext to the session, and returns the number of plaintext bytes received.
    pub(crate) fn open(&mut self, mut sealed: &[u8], buffer: &mut [u8]) -> usize {
        let mut count = 0;
        while !sealed.is_empty() {
            let read = match self.session.read_tls(&mut sealed) {
                Ok(read) => read,
                Err(error) => {
                    self.failure = Some(rustls::Error::General(error.to_string()));
                    return count;
                }
            };
            match self.session.process_new_packets() {
                Ok(_) => count += self.take_plaintext(&mut buffer[count..]),
                Err(error) => {
                    self.failure = Some(error);
                    return count;
                }
            }
            if read == 0 {
                break; // after close_notify nothing is taken
            }
        }
        count
    }

    fn take_plaintext(&mut self, buffer: &mut [u8]) -> usize {
        let mut count = 0;
        while count < buffer.len() {
            match self.session.reader().read(&mut buffer[count..]) {
                Ok(0) => {
                    self.ended = true;
                    break;
                }
                Ok(read) => count += read,
                Err(_) => break, // nothing more for now
            }
        }
        count
    }

    /// An error means that no byte of `bytes` was sent. If some were before the connection failed, all encrypted ones
    /// count as sent, because the peer may execute them: the error comes again with the next call.
    fn send(&mut self, socket: &mut impl Write, bytes: &[u8]) -> Result<usize, Errno> {
        let (mut taken, mut written_before) = (0, self.written);
        loop {
            match self.flush(socket) {
                Ok(()) => {}
                Err(Errno::AGAIN) if taken > 0 => return Ok(taken),
                Err(_) if taken > 0 && self.written > written_before => return Ok(taken),
                Err(error) => return Err(error),
            }
            if taken == bytes.len() {
                return Ok(taken);
            }
            if taken == 0 {
                // So far only ciphertext of earlier calls was written.
                written_before = self.written;
            }
            let end = bytes.len().min(taken + CHUNK);
            match self.session.writer().write(&bytes[taken..end]) {
                // The handshake is in progress and its buffer is full.
                Ok(0) => return if taken > 0 { Ok(taken) } else { Err(Errno::AGAIN) },
                Ok(count) => taken += count,
                Err(_) => return Err(Errno::PIPE),
            }
        }
    }

    /// Writes ciphertext until none is left.
    fn flush(&mut self, socket: &mut impl Write) -> Result<(), Errno> {
        while self.session.wants_write() {
            match self.session.write_tls(socket) {
                Ok(count) => self.written += count as u64,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO)),
            }
        }
        Ok(())
    }

    /// Sends close_notify, as far as the socket accepts it.
    pub(crate) fn notify_close(&mut self, fd: &OwnedFd) {
        self.session.send_close_notify();
        let _ = self.flush(&mut Socket(fd));
    }
}

/// The socket as rustls writes to it.
struct Socket<'f>(&'f OwnedFd);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(self.0, bytes, SendFlags::NOSIGNAL)?)
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut space: [MaybeUninit<u8>; 0] = [];
        Ok(rustix::net::sendmsg(self.0, bytes, &mut SendAncillaryBuffer::new(&mut space), SendFlags::NOSIGNAL)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use rustls::RootCertStore;
    use rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// The client side of a session.
    fn session() -> Box<Tls> {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let key = PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
        let server = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key)
            .expect("a pair");
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).expect("a root");
        let client = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let mut ours =
            Tls::connect(Arc::new(client), ServerName::try_from("localhost").expect("a name")).expect("a session");
        let mut theirs = Tls::accept(Arc::new(server)).expect("a session");
        let (here, there) = UnixStream::pair().expect("a pair");
        here.set_nonblocking(true).and(there.set_nonblocking(true)).expect("they do not block");
        let (here, there) = (OwnedFd::from(here), OwnedFd::from(there));
        let mut buffer = vec![0; 128 << 10];
        while ours.is_handshaking() || theirs.is_handshaking() {
            ours.drive(&here).and(theirs.drive(&there)).expect("it continues");
            assert_eq!(theirs.receive(&there, &mut buffer), Err(Errno::AGAIN));
            assert_eq!(ours.receive(&here, &mut buffer), Err(Errno::AGAIN));
        }
        ours
    }

    /// A socket that breaks after this many bytes.
    struct Breaks(usize);

    impl Write for Breaks {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.0);
            self.0 -= count;
            if count == 0 { Err(Errno::PIPE.into()) } else { Ok(count) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Otherwise a command that a node may have executed would be reported as not executed.
    #[test]
    fn bytes_accepted_by_a_broken_socket_count_as_sent() {
        let bytes = vec![b'x'; 200_000];
        for takes in [1, 1000, 70_000, 150_000] {
            let (mut tls, mut socket) = (session(), Breaks(takes));
            let sent = tls.send(&mut socket, &bytes).expect("some of it went out");
            assert!(sent > 0 && sent + 1000 > takes, "{sent} of {takes}");
            assert_eq!(tls.send(&mut socket, &bytes[sent..]), Err(Errno::PIPE), "the error comes again");
        }
        assert_eq!(session().send(&mut Breaks(0), &bytes), Err(Errno::PIPE), "nothing went out");
    }
}
