//! A blocking client that sends exactly the given bytes and returns replies unchanged.
//!
//! Not a client library, because these tests check what a library hides: bytes, order, closes.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::value::{Framer, Value, parse};

/// Timeout in tests, long enough for a busy machine with two cores. Reaching it is a failure.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(120);

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    stream: TcpStream,
    buf: Vec<u8>,
    /// Number of bytes of `buf` that were already returned.
    taken: usize,
    framer: Framer,
}

/// Encodes a command like a client library.
pub(crate) fn encode<A: AsRef<[u8]>>(args: &[A]) -> Vec<u8> {
    let mut out = format!("*{}\r\n", args.len()).into_bytes();
    for arg in args {
        let arg = arg.as_ref();
        out.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
        out.extend_from_slice(arg);
        out.extend_from_slice(b"\r\n");
    }
    out
}

/// Splits a line into words like a shell: `SET k "two words\x00"`. Only for literals in tests.
pub(crate) fn words(line: &str) -> Vec<Vec<u8>> {
    let mut out: Vec<Vec<u8>> = Vec::new();
    let mut bytes = line.bytes().peekable();
    loop {
        while bytes.next_if(|b| b.is_ascii_whitespace()).is_some() {}
        let Some(&first) = bytes.peek() else {
            return out;
        };
        let mut word = Vec::new();
        if first == b'"' {
            bytes.next();
            loop {
                match bytes.next().unwrap_or_else(|| panic!("unbalanced quotes in {line}")) {
                    b'"' => break,
                    b'\\' => match bytes.next().expect("an escape") {
                        b'n' => word.push(b'\n'),
                        b'r' => word.push(b'\r'),
                        b't' => word.push(b'\t'),
                        b'x' => {
                            let hex = [bytes.next().expect("hex"), bytes.next().expect("hex")];
                            word.push(u8::from_str_radix(std::str::from_utf8(&hex).expect("hex"), 16).expect("hex"));
                        }
                        other => word.push(other),
                    },
                    b => word.push(b),
                }
            }
        } else {
            while let Some(b) = bytes.next_if(|b| !b.is_ascii_whitespace()) {
                word.push(b);
            }
        }
        out.push(word);
    }
}

impl Client {
    /// Connects, or panics.
    #[track_caller]
    pub(crate) fn connect(address: SocketAddr) -> Client {
        Client::try_connect(address).unwrap_or_else(|e| panic!("cannot connect to {address}: {e}"))
    }

    pub(crate) fn try_connect(address: SocketAddr) -> io::Result<Client> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Client { stream, buf: Vec::new(), taken: 0, framer: Framer::default() })
    }

    /// The underlying socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// Sets the read timeout.
    pub(crate) fn timeout(&self, limit: Duration) {
        self.stream.set_read_timeout(Some(limit)).expect("timeout");
    }

    /// Writes raw bytes.
    #[track_caller]
    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap_or_else(|e| panic!("cannot write {} bytes: {e}", bytes.len()));
    }

    /// Writes raw bytes. The peer may be gone.
    pub(crate) fn try_write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// Sends a command without waiting for the reply.
    #[track_caller]
    pub(crate) fn send<A: AsRef<[u8]>>(&mut self, args: &[A]) {
        self.write(&encode(args));
    }

    /// Sends a command line without waiting for the reply.
    #[track_caller]
    pub(crate) fn post(&mut self, line: &str) {
        self.send(&words(line));
    }

    /// Sends a command line, ignoring errors: if the peer has closed, the next read fails.
    pub(crate) fn post_quietly(&mut self, line: &str) {
        let _ = self.stream.write_all(&encode(&words(line)));
    }

    /// Sends a command and returns its reply.
    #[track_caller]
    pub(crate) fn call<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Value {
        self.send(args);
        self.reply()
    }

    /// Sends a command line and returns its reply.
    #[track_caller]
    pub(crate) fn cmd(&mut self, line: &str) -> Value {
        self.post(line);
        match self.try_reply() {
            Ok(value) => value,
            Err(e) => panic!("no reply to {line}: {e}"),
        }
    }

    /// Returns the next reply.
    #[track_caller]
    pub(crate) fn reply(&mut self) -> Value {
        self.try_reply()
            .unwrap_or_else(|e| panic!("no reply: {e}; bytes so far: {:?}", self.rest().escape_ascii().to_string()))
    }

    /// Returns the next reply, or an error.
    pub(crate) fn try_reply(&mut self) -> io::Result<Value> {
        Ok(parse(&self.try_raw()?))
    }

    /// Returns the bytes of the next reply.
    #[track_caller]
    pub(crate) fn raw(&mut self) -> Vec<u8> {
        self.try_raw()
            .unwrap_or_else(|e| panic!("no reply: {e}; bytes so far: {:?}", self.rest().escape_ascii().to_string()))
    }

    /// Returns the bytes of the next reply, or an error.
    pub(crate) fn try_raw(&mut self) -> io::Result<Vec<u8>> {
        loop {
            if let Some(len) = self.framer.end(&self.buf[self.taken..]) {
                let raw = self.buf[self.taken..self.taken + len].to_vec();
                self.taken += len;
                if self.taken == self.buf.len() {
                    self.buf.clear();
                    self.taken = 0;
                }
                return Ok(raw);
            }
            self.fill()?;
        }
    }

    /// Received bytes that were not returned yet.
    pub(crate) fn rest(&self) -> &[u8] {
        &self.buf[self.taken..]
    }

    fn fill(&mut self) -> io::Result<()> {
        if self.taken > 0 && self.taken >= self.buf.len() / 2 {
            self.buf.drain(..self.taken);
            self.taken = 0;
        }
        let mut chunk = [0; 64 * 1024];
        match self.stream.read(&mut chunk) {
            Ok(0) => Err(io::Error::new(ErrorKind::UnexpectedEof, "the connection was closed")),
            Ok(n) => {
                self.buf.extend_from_slice(&chunk[..n]);
                Ok(())
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                Err(io::Error::new(ErrorKind::TimedOut, "nothing came in time"))
            }
            Err(e) => Err(e),
        }
    }

    /// Sends a pipeline, and returns the bytes of `count` replies. Writes concurrently with reading, because a peer
    /// that cannot write its replies stops reading.
    #[track_caller]
    pub(crate) fn pipeline(&mut self, bytes: &[u8], count: usize) -> Vec<Vec<u8>> {
        let mut writer = self.stream.try_clone().expect("a second handle");
        std::thread::scope(|scope| {
            let sender = scope.spawn(move || writer.write_all(bytes));
            let replies = (0..count)
                .map(|i| match self.try_raw() {
                    Ok(raw) => raw,
                    Err(e) => {
                        let _ = self.stream.shutdown(Shutdown::Both);
                        panic!("reply {i} of {count} did not come: {e}")
                    }
                })
                .collect();
            sender.join().expect("the writer").unwrap_or_else(|e| panic!("cannot send the pipeline: {e}"));
            replies
        })
    }

    /// Reads until the peer closes, or until no bytes arrive for `quiet`. Returns the bytes, and whether the peer
    /// closed.
    pub(crate) fn listen(&mut self, quiet: Duration) -> (Vec<u8>, bool) {
        self.timeout(quiet);
        let closed = loop {
            match self.fill() {
                Ok(()) => {}
                Err(e) if e.kind() == ErrorKind::TimedOut => break false,
                Err(_) => break true,
            }
        };
        self.timeout(TIMEOUT);
        let bytes = self.buf.split_off(self.taken);
        self.buf.clear();
        self.taken = 0;
        (bytes, closed)
    }

    /// Discards input until the peer closes. Returns false after `limit`.
    pub(crate) fn closed_within(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            self.timeout(Duration::from_millis(50));
            match self.fill() {
                Ok(()) => self.buf.clear(),
                Err(e) if e.kind() == ErrorKind::TimedOut => {}
                Err(_) => return true,
            }
        }
        false
    }

    /// Closes the sending direction.
    pub(crate) fn finish_sending(&self) {
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    /// Closes the connection abruptly (with RST if there are unread bytes).
    pub(crate) fn cut(&self) {
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
