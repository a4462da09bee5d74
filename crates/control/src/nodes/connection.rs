//! A blocking connection to a node, with one command at a time, for rare operations outside the data plane.
//!
//! Not the router's own connections: those belong to its workers, and the doctor must also work without a router.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_resp::reply::{ReplyScan, ReplyScanner};
use switchyard_resp::{encode, reply};
use switchyard_router::{NodeAccess, NodeTls, node_failure};

/// Maximum size of a reply. Only a dump of all functions may be large.
const REPLY_MAX: usize = 256 << 20;

/// A socket, encrypted or not.
trait Stream: Read + Write + Send {}
impl<S: Read + Write + Send> Stream for S {}

/// An authenticated connection to a node.
pub struct NodeConnection {
    stream: Box<dyn Stream>,
    /// Handle of the stream's socket, for setting its timeouts.
    tcp: TcpStream,
    input: Vec<u8>,
    answer_max: usize,
}

/// A reply as its bytes.
pub struct Answer(pub Vec<u8>);

impl Answer {
    /// Error message, suitable for logs and reports.
    pub fn error(&self) -> Option<String> {
        reply::is_error(&self.0).then(|| reply::redacted_error(&self.0))
    }

    /// Text of a string or a simple reply.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(reply::text(&self.0).unwrap_or_default()).into_owned()
    }

    /// Elements of an array.
    pub fn items(&self) -> Vec<Answer> {
        reply::elements(&self.0).map(|e| Answer(e.to_vec())).collect()
    }

    /// Value of an integer.
    pub fn number(&self) -> Option<i64> {
        reply::integer(&self.0)
    }

    /// Whether the reply is null.
    pub fn is_null(&self) -> bool {
        reply::is_null(&self.0)
    }

    /// Content as in [`Answer::text`], as bytes.
    pub fn bytes(&self) -> &[u8] {
        reply::text(&self.0).unwrap_or_default()
    }
}

/// Rewords a socket error: names the timeout, which the system calls a temporarily unavailable resource, and adds the
/// remedy for a TLS failure.
fn describe_error(tcp: &TcpStream, error: io::Error) -> io::Error {
    let timeout = tcp.read_timeout().ok().flatten();
    match (error.kind(), timeout, tls_failure(&error)) {
        (kind, _, Some(why)) => io::Error::new(kind, why),
        (io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut, Some(timeout), None) => {
            io::Error::new(io::ErrorKind::TimedOut, format!("nothing was received within {timeout:?}"))
        }
        _ => error,
    }
}

/// Describes a TLS failure within a socket error, with the remedy.
pub(crate) fn tls_failure(error: &io::Error) -> Option<String> {
    error.get_ref().and_then(|inner| inner.downcast_ref()).map(node_failure)
}

/// A server without TLS reads the handshake as an unfinished command and never replies.
fn handshake(tls: &NodeTls, address: SocketAddr, mut tcp: TcpStream) -> Result<impl Stream + use<>, String> {
    let mut session = rustls::ClientConnection::new(Arc::clone(&tls.config), tls.name_at(address))
        .map_err(|e| format!("TLS: {e}"))?;
    while session.is_handshaking() {
        session.complete_io(&mut tcp).map_err(|error| match tls_failure(&error) {
            Some(why) => format!("makes no TLS connection: {why}"),
            None => format!(
                "makes no TLS connection ({}): is this its TLS port, and is tls right for this node?",
                describe_error(&tcp, error)
            ),
        })?;
    }
    Ok(rustls::StreamOwned::new(session, tcp))
}

impl NodeConnection {
    /// Connects and authenticates like the router.
    pub fn open(access: &NodeAccess, timeout: Duration) -> Result<Self, String> {
        let Some(address) = access.address else {
            let why = access.unresolved.as_ref().map(|why| format!("cannot be reached: {why}"));
            return Err(why.unwrap_or_else(|| "has no known primary".into()));
        };
        let tcp = TcpStream::connect_timeout(&address, timeout).map_err(|e| format!("cannot be reached: {e}"))?;
        let bounded = tcp.set_read_timeout(Some(timeout)).and_then(|()| tcp.set_write_timeout(Some(timeout)));
        bounded.and_then(|()| tcp.set_nodelay(true)).map_err(|e| e.to_string())?;
        let socket = tcp.try_clone().map_err(|error| error.to_string())?;
        let stream: Box<dyn Stream> = match &access.tls {
            None => Box::new(tcp),
            Some(tls) => Box::new(handshake(tls, address, tcp)?),
        };
        let mut connection = Self { stream, tcp: socket, input: Vec::new(), answer_max: REPLY_MAX };
        if let Some(password) = &access.password {
            let answer = match &access.username {
                Some(user) => connection.call(&["AUTH", user, &password.0]),
                None => connection.call(&["AUTH", &password.0]),
            };
            if let Some(error) = answer.map_err(|e| format!("does not answer: {e}"))?.error() {
                return Err(format!("refuses our user or password: {error}"));
            }
        }
        let hello = connection.call(&["PING"]).map_err(|e| format!("does not answer: {e}"))?;
        match hello.error() {
            Some(error) if error.starts_with("NOAUTH") || error.starts_with("NOPERM") => {
                Err(format!("refuses us: {error}"))
            }
            _ => Ok(connection),
        }
    }

    /// Limits the size of replies, in bytes, for servers of unknown kind.
    pub fn with_answers_up_to(mut self, bytes: usize) -> Self {
        self.answer_max = bytes;
        self
    }

    /// Sets the timeout of replies. A server may execute a command for longer than it may take to connect.
    pub fn set_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.tcp.set_read_timeout(Some(timeout))
    }

    /// Sends a command, and waits for the reply.
    pub fn call<A: AsRef<[u8]>>(&mut self, args: &[A]) -> io::Result<Answer> {
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().map(AsRef::as_ref));
        self.send(&request)?;
        self.receive()
    }

    /// Sends commands together, and waits for all replies.
    pub fn call_all<A: AsRef<[u8]>>(&mut self, commands: &[Vec<A>]) -> io::Result<Vec<Answer>> {
        let mut request = Vec::new();
        for args in commands {
            encode::command(&mut request, args.iter().map(AsRef::as_ref));
        }
        self.send(&request)?;
        commands.iter().map(|_| self.receive()).collect()
    }

    fn send(&mut self, request: &[u8]) -> io::Result<()> {
        self.stream
            .write_all(request)
            .and_then(|()| self.stream.flush())
            .map_err(|error| describe_error(&self.tcp, error))
    }

    fn receive(&mut self) -> io::Result<Answer> {
        let mut scanner = ReplyScanner::default();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match scanner.scan(&self.input) {
                Ok(ReplyScan::Complete(len)) => return Ok(Answer(self.input.drain(..len).collect())),
                Ok(ReplyScan::Incomplete(_)) if self.input.len() < self.answer_max => {}
                Ok(ReplyScan::Incomplete(_)) => return Err(io::Error::other("the reply is too large")),
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
            match self.stream.read(&mut buffer).map_err(|error| describe_error(&self.tcp, error))? {
                0 => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has closed the connection")),
                count => self.input.extend_from_slice(&buffer[..count]),
            }
        }
    }

    /// Passes each line of MONITOR to `each` until the given time. Returns false if it ended earlier: after `bytes_max`
    /// bytes, or by the node. Skips lines longer than `line_max`. The connection is unusable afterwards.
    pub fn monitor(
        &mut self,
        until: Instant,
        bytes_max: usize,
        line_max: usize,
        each: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, String> {
        let answer = self.call(&["MONITOR"]).map_err(|error| format!("does not answer MONITOR: {error}"))?;
        if let Some(error) = answer.error() {
            return Err(format!("refuses MONITOR: {error}"));
        }
        let mut buffer = vec![0; 64 << 10];
        let (mut read, mut looked_at, mut is_too_long) = (0, 0, false);
        loop {
            let mut begin = 0;
            while let Some(end) =
                self.input[looked_at..].iter().position(|byte| *byte == b'\n').map(|at| looked_at + at)
            {
                if !std::mem::take(&mut is_too_long) {
                    each(self.input[begin..end].trim_ascii_end());
                }
                begin = end + 1;
                looked_at = begin;
            }
            self.input.drain(..begin);
            if self.input.len() > line_max {
                self.input.clear();
                is_too_long = true;
            }
            looked_at = self.input.len();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || read >= bytes_max {
                return Ok(left.is_zero());
            }
            // 0 would mean no timeout.
            self.tcp.set_read_timeout(Some(left.max(Duration::from_millis(1)))).map_err(|error| error.to_string())?;
            match self.stream.read(&mut buffer) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    read += count;
                    self.input.extend_from_slice(&buffer[..count]);
                }
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut | io::ErrorKind::Interrupted
                    ) => {}
                Err(_) => return Ok(false),
            }
        }
    }
}
