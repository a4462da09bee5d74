//! Real servers for the tests of the command table, with a client.
//!
//! `redis-server` must be installed; `valkey-server` is used if it is on the PATH. Tests do not assume a version.
//! Servers listen on sockets in their own directories, so that ports cannot conflict.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use switchyard_resp::command::{Command, KeyError, LearntCommand, parse_command_reply};
use switchyard_resp::request::{Args, Span};
use switchyard_resp::{encode, reply};

/// A server on a socket in a temporary directory.
pub(crate) struct Server {
    process: Child,
    directory: tempfile::TempDir,
    pub(crate) program: &'static str,
}

impl Server {
    /// `None` if the program is not installed.
    pub(crate) fn start(program: &'static str) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let process = Process::new(program)
            .args(["--port", "0", "--save", "", "--unixsocket", "server.sock"])
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        let server = Self { process, directory, program };
        let deadline = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(server.socket()).is_err() {
            assert!(Instant::now() < deadline, "{program} does not listen on {}", server.socket().display());
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }

    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("server.sock")
    }

    pub(crate) fn client(&self) -> Client {
        Client { stream: UnixStream::connect(self.socket()).expect("a connection"), buf: Vec::new() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) struct Client {
    stream: UnixStream,
    buf: Vec<u8>,
}

impl Client {
    pub(crate) fn call<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Vec<u8> {
        self.buf.clear();
        encode::command(&mut self.buf, args.iter().map(AsRef::as_ref));
        self.stream.write_all(&self.buf).expect("a server that reads");
        self.buf.clear();
        let mut scanner = reply::ReplyScanner::default();
        loop {
            if !self.buf.is_empty()
                && let reply::ReplyScan::Complete(len) = scanner.scan(&self.buf).expect("a well-formed reply")
            {
                assert_eq!(len, self.buf.len(), "more than one reply");
                return std::mem::take(&mut self.buf);
            }
            let mut piece = [0; 16 * 1024];
            let len = self.stream.read(&mut piece).expect("a server that answers");
            assert!(len > 0, "the server closed the connection after {}", shown(args));
            self.buf.extend_from_slice(&piece[..len]);
        }
    }

    pub(crate) fn commands(&mut self) -> Vec<LearntCommand> {
        let commands = parse_command_reply(&self.call(&["COMMAND"]));
        assert!(commands.len() > 300, "only {} commands", commands.len());
        commands
    }

    /// Keys found by the server, or its error.
    pub(crate) fn getkeys<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Vec<Vec<u8>>, String> {
        let mut call: Vec<&[u8]> = vec![b"COMMAND", b"GETKEYS"];
        call.extend(args.iter().map(AsRef::as_ref));
        let answer = self.call(&call);
        match error_text(&answer) {
            Some(text) => Err(text),
            None => Ok(reply::elements(&answer).map(|e| reply::text(e).expect("a key").to_vec()).collect()),
        }
    }
}

pub(crate) fn error_text(answer: &[u8]) -> Option<String> {
    reply::is_error(answer).then(|| String::from_utf8_lossy(&answer[1..answer.len() - 2]).into_owned())
}

pub(crate) fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    args.iter().map(|a| format!("\"{}\"", a.as_ref().escape_ascii())).collect::<Vec<_>>().join(" ")
}

/// Owns the bytes of an [`Args`].
pub(crate) struct Arguments {
    pub(crate) buf: Vec<u8>,
    pub(crate) spans: Vec<Span>,
}

impl Arguments {
    pub(crate) fn new<A: AsRef<[u8]>>(args: &[A]) -> Self {
        let mut buf = Vec::new();
        let spans = args
            .iter()
            .map(|arg| {
                let start = buf.len() as u32;
                buf.extend_from_slice(arg.as_ref());
                Span { start, len: arg.as_ref().len() as u32 }
            })
            .collect();
        Self { buf, spans }
    }

    pub(crate) fn all(&self) -> Args<'_> {
        Args::new(&self.buf, &self.spans)
    }

    pub(crate) fn first(&self, known: usize) -> Args<'_> {
        Args::partial(&self.buf, &self.spans[..known], self.spans.len())
    }
}

pub(crate) fn find_keys(command: &Command, args: &Args<'_>) -> Result<Vec<u32>, KeyError> {
    let mut keys = Vec::new();
    command.find_keys(args, &mut keys).map(|()| keys)
}

pub(crate) fn servers() -> Vec<Server> {
    let redis = Server::start("redis-server")
        .expect("redis-server is not on the PATH: `make test` installs it, or `apt install redis-server`");
    let valkey = Server::start("valkey-server");
    if valkey.is_none() {
        eprintln!("valkey-server is not on the PATH: checked against redis-server only");
    }
    std::iter::once(redis).chain(valkey).collect()
}
