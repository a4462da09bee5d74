//! A client of a history: one request at a time, with a definite report whether it was executed.
//!
//! Not [`switchyard_bench::client::Client`], where a lost connection ends the run: here it is a result, and the next
//! request connects again. A request without a reply may be executed at any later time, so its connection is never used
//! again.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use switchyard_bench::wire::{self, Reply};

/// Result of a request.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// One reply for each command.
    Replies(Vec<Value>),
    /// No byte was sent.
    NotSent,
    /// Sent, without all replies.
    Unknown,
}

/// One client's connection, opened when needed.
#[derive(Debug)]
pub(crate) struct Connection {
    address: SocketAddr,
    timeout: Duration,
    stream: Option<TcpStream>,
    buf: Vec<u8>,
}

impl Connection {
    /// Creates a connection with this time-out for replies.
    pub(crate) fn new(address: SocketAddr, timeout: Duration) -> Self {
        Self { address, timeout, stream: None, buf: Vec::new() }
    }

    /// Sends `commands` in one write and waits for all their replies.
    pub(crate) fn call(&mut self, commands: &[Vec<String>]) -> Outcome {
        if self.stream.is_none() && self.connect().is_err() {
            return Outcome::NotSent;
        }
        let mut out = Vec::new();
        for command in commands {
            let args: Vec<_> = command.iter().map(String::as_bytes).collect();
            wire::encode(&mut out, &args);
        }
        let outcome = self.exchange(&out, commands.len());
        if !matches!(outcome, Outcome::Replies(_)) {
            self.forget();
        }
        outcome
    }

    /// Closes the connection, which ends MULTI and WATCH at the server.
    pub(crate) fn forget(&mut self) {
        self.stream = None;
        self.buf.clear();
    }

    fn connect(&mut self) -> std::io::Result<()> {
        let stream = TcpStream::connect_timeout(&self.address, self.timeout)?;
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(self.timeout))?;
        self.stream = Some(stream);
        Ok(())
    }

    fn exchange(&mut self, out: &[u8], replies: usize) -> Outcome {
        let Some(stream) = &mut self.stream else { return Outcome::NotSent };
        if stream.write_all(out).is_err() {
            return Outcome::Unknown; // a part of it may have arrived
        }
        let end = Instant::now() + self.timeout;
        let mut got = Vec::with_capacity(replies);
        let mut at = 0;
        let mut chunk = [0_u8; 16 * 1024];
        while got.len() < replies {
            match wire::parse(&self.buf[at..]) {
                Ok(Some((reply, taken))) => {
                    got.push(value(&reply));
                    at += taken;
                    continue;
                }
                Ok(None) => {}
                // Bytes that are not a reply are recorded as one that the checker cannot explain.
                Err(e) => {
                    got.push(json!({ "malformed": e.to_string() }));
                    self.forget();
                    got.resize(replies, Value::Null);
                    return Outcome::Replies(got);
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
                return Outcome::Unknown;
            }
            match stream.read(&mut chunk) {
                Ok(0) => return Outcome::Unknown,
                Ok(n) => self.buf.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Outcome::Unknown,
            }
        }
        self.buf.drain(..at);
        if !self.buf.is_empty() {
            // Surplus bytes: a reply to another client's request.
            got[0] = json!({ "surplus": self.buf.escape_ascii().to_string() });
        }
        Outcome::Replies(got)
    }
}

/// Converts a reply for the history. Errors and statuses become objects, so that no string is mistaken for one.
fn value(reply: &Reply<'_>) -> Value {
    match reply {
        Reply::Status(text) => json!({ "status": String::from_utf8_lossy(text) }),
        Reply::Error(text) => json!({ "error": String::from_utf8_lossy(text) }),
        Reply::Integer(n) => json!(n),
        Reply::Bulk(bytes) => json!(String::from_utf8_lossy(bytes)),
        Reply::Nil => Value::Null,
        Reply::Array(items) => Value::Array(items.iter().map(value).collect()),
    }
}

/// The text of an error reply.
pub(crate) fn error_text(value: &Value) -> Option<&str> {
    value.get("error")?.as_str()
}
