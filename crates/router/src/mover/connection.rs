//! A mover's connection to a node: plain or TLS, pipelined.
//!
//! Unlike a worker's link it has a single user. Connecting and the handshake are one blocking step with a timeout,
//! because a mover has no other work then. Later only [`Connection::call`] blocks.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use switchyard_policy::migration::Process;
use switchyard_policy::ownership::OwnershipStatus;
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply::{ReplyScan, ReplyScanner};
use switchyard_resp::{encode, reply};

use crate::fences::foreign_connections;
use crate::ownership::{Admission, FleetOwnership, refusal_reason};
use crate::settings::NodeAccess;
use crate::worker::transport::{self, Received, Tls};

const READ_SIZE: usize = 128 << 10;

/// Maximum size of a reply: a whole value, or a batch of values.
const REPLY_MAX: usize = 1 << 30;

/// Maximum size of a reply during the handshake.
const GREETING_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) fd: OwnedFd,
    tls: Option<Box<Tls>>,
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    scanner: ReplyScanner,
    /// Maximum size of a reply. A longer reply fails the connection.
    reply_max: usize,
    buffer: Vec<u8>,
    database: u32,
    /// Commands without a reply so far.
    pub(super) unanswered: usize,
    /// Time of the last received bytes, or of the first command in flight if later.
    pub(super) last_reply: Instant,
    pub(super) process: Process,
    pub(super) address: SocketAddr,
    /// Configured access to the node at the time of connecting.
    pub(super) access: NodeAccess,
    /// Reason, if the connection counts as lost.
    lost: Option<String>,
    /// `redis_version`: major, minor.
    pub(super) version: (u32, u32),
}

/// Returns the value of a field of INFO.
pub(super) fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Checks that the reply to ROLE is that of a primary.
pub(super) fn check_role(answer: &[u8]) -> Result<(), String> {
    match reply::elements(answer).next().and_then(reply::text) {
        Some(role) if role != b"master" => Err("the server at its address is now a replica".to_owned()),
        _ => Ok(()),
    }
}

/// Returns the text of a reply to INFO with this section.
pub(super) fn info_text(section: &str, answer: &[u8]) -> Result<String, String> {
    if reply::is_error(answer) {
        return Err(format!("INFO {section}: {}", error_text(answer)));
    }
    Ok(String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned())
}

/// Returns the text of an error reply, redacted for logs and reports.
pub(super) fn error_text(answer: &[u8]) -> String {
    reply::redacted_error(answer)
}

impl Connection {
    /// Connects to `address` and performs the handshake as `name`, within `timeout`.
    pub(super) fn open(
        access: &NodeAccess,
        address: SocketAddr,
        name: &str,
        timeout: Duration,
    ) -> Result<Self, String> {
        let until = Instant::now() + timeout;
        let stream = TcpStream::connect_timeout(&address, timeout).map_err(|e| e.to_string())?;
        stream.set_nodelay(true).map_err(|e| e.to_string())?;
        stream.set_nonblocking(true).map_err(|e| e.to_string())?;
        let tls = access.tls.as_ref().map(|tls| Tls::connect(tls.config.clone(), tls.name_at(address))).transpose();
        let mut connection = Self {
            fd: OwnedFd::from(stream),
            tls: tls.map_err(|e| format!("TLS: {e}"))?,
            out: Vec::new(),
            sent: 0,
            input: Vec::new(),
            scanner: ReplyScanner::default(),
            reply_max: GREETING_MAX,
            buffer: vec![0; READ_SIZE],
            database: 0,
            unanswered: 0,
            last_reply: Instant::now(),
            process: Process { run_id: String::new(), client_id: 0 },
            version: (0, 0),
            address,
            access: access.clone(),
            lost: None,
        };
        let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if let Some(password) = &access.password {
            let answer = match &access.username {
                Some(user) => connection.call(&[b"AUTH", user.as_bytes(), password.0.as_bytes()], left())?,
                None => connection.call(&[b"AUTH", password.0.as_bytes()], left())?,
            };
            if reply::is_error(&answer) {
                return Err(format!("it refuses our user or password: {}", error_text(&answer)));
            }
        }
        // The name serves operators, and lets a later router find connections of an earlier one. A node may refuse it.
        connection.call(&[b"CLIENT", b"SETNAME", name.as_bytes()], left())?;
        let answer = connection.call(&[b"CLIENT", b"ID"], left())?;
        let client_id = reply::integer(&answer).and_then(|id| u64::try_from(id).ok());
        let client_id = client_id.ok_or_else(|| format!("it does not answer CLIENT ID: {}", error_text(&answer)))?;
        let info = connection.info("server", left())?;
        let run_id = field(&info, "run_id").ok_or("INFO names no run_id")?.to_owned();
        let mut numbers = field(&info, "redis_version").unwrap_or("0").split('.').map(|n| n.parse().unwrap_or(0));
        connection.version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        connection.process = Process { run_id, client_id };
        check_role(&connection.call(&[b"ROLE"], left())?)?;
        connection.reply_max = REPLY_MAX;
        Ok(connection)
    }

    /// Marks the connection as lost because the server is no longer the node's primary.
    pub(super) fn abandon(&mut self) {
        self.mark_lost("it is no longer the node's primary".to_owned());
    }

    /// Marks the connection as lost. The first reason is kept.
    pub(super) fn mark_lost(&mut self, why: String) {
        self.lost.get_or_insert(why);
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Kills another connection at the node, and waits for the confirmation.
    pub(super) fn kill(&mut self, client_id: u64, timeout: Duration) -> Result<(), String> {
        let answer = self.call(&[b"CLIENT", b"KILL", b"ID", client_id.to_string().as_bytes()], timeout)?;
        if reply::is_error(&answer) && !answer.starts_with(b"-ERR No such") {
            return Err(format!(
                "it refuses CLIENT KILL ID, so an earlier connection may still execute commands: {}",
                error_text(&answer)
            ));
        }
        Ok(())
    }

    /// Kills connections of earlier router processes at the node.
    pub(super) fn kill_foreign_connections(
        &mut self,
        site: &str,
        incarnation: &str,
        timeout: Duration,
    ) -> Result<(), String> {
        let list = self.call(&[b"CLIENT", b"LIST"], timeout)?;
        if reply::is_error(&list) {
            let why = error_text(&list);
            return Err(format!(
                "it refuses CLIENT LIST, so connections of an earlier router may still execute commands: {why}"
            ));
        }
        let list = String::from_utf8_lossy(reply::text(&list).unwrap_or_default()).into_owned();
        foreign_connections(&list, site, incarnation).into_iter().try_for_each(|id| self.kill(id, timeout))
    }

    /// Claims the node for this router. Fails if another router owns it.
    pub(super) fn claim_ownership(
        &mut self,
        ownership: &FleetOwnership,
        node: &str,
        ours: (&str, &str),
        timeout: Duration,
    ) -> Result<(), String> {
        let asks = |connection: &mut Self| {
            let answer = connection.call_words(&ownership.question(), timeout)?;
            let standing = ownership.check_reply(node, &answer);
            refusal_reason(standing).map_or(Ok(standing), Err)
        };
        if asks(self)? != OwnershipStatus::Free {
            return Ok(());
        }
        // A node that refuses the claim stores no ownership record.
        if reply::is_error(&self.call_words(&ownership.claim(), timeout)?) {
            return Ok(());
        }
        self.kill_foreign_connections(ours.0, ours.1, timeout)?;
        match asks(self)? {
            OwnershipStatus::Free => Err("it did not store this router's ownership record".to_owned()),
            _ => Ok(()),
        }
    }

    /// Waits until the node may be used: an earlier router may still serve its hot copies.
    pub(super) fn wait_for_earlier_router(
        &mut self,
        seat: &FleetOwnership,
        node: NodeId,
        timeout: Duration,
    ) -> Result<(), String> {
        loop {
            match seat.admission(node, &self.process.run_id) {
                Admission::Admitted => return Ok(()),
                Admission::Waits(until) => std::thread::sleep(until.saturating_duration_since(Instant::now())),
                Admission::Unmet => {
                    let mark = self.call_words(&seat.question(), timeout)?;
                    seat.admit_process(node, &self.process.run_id, &mark);
                }
            }
        }
    }

    fn call_words(&mut self, words: &[String], timeout: Duration) -> Result<Vec<u8>, String> {
        self.call(&words.iter().map(|word| word.as_bytes()).collect::<Vec<_>>(), timeout)
    }

    /// Records a successful SELECT.
    pub(super) fn set_database(&mut self, database: u32) {
        self.database = database;
    }

    /// Makes the next selection of a database send a SELECT.
    pub(super) fn forget_database(&mut self) {
        self.database = u32::MAX;
    }

    /// Returns the selected database.
    pub(super) fn database(&self) -> u32 {
        self.database
    }

    /// Returns a section of INFO.
    pub(super) fn info(&mut self, section: &str, timeout: Duration) -> Result<String, String> {
        info_text(section, &self.call(&[b"INFO", section.as_bytes()], timeout)?)
    }

    /// Sends a command and waits for the reply. Requires an idle connection. After a timeout the connection counts as
    /// lost: a late reply would be taken for the next command's reply.
    pub(super) fn call(&mut self, args: &[&[u8]], timeout: Duration) -> Result<Vec<u8>, String> {
        self.call_alone(args, timeout).inspect_err(|why| self.mark_lost(why.clone()))
    }

    fn call_alone(&mut self, args: &[&[u8]], timeout: Duration) -> Result<Vec<u8>, String> {
        self.begin(args)?;
        self.reply(timeout)
    }

    /// Appends a command to the output of an idle connection.
    fn begin(&mut self, args: &[&[u8]]) -> Result<(), String> {
        if let Some(why) = &self.lost {
            return Err(why.clone());
        }
        if self.unanswered != 0 {
            debug_assert!(false, "a call needs an idle connection");
            // The reply would be matched to the wrong command. A new connection has no pending replies.
            return Err("another command is in flight there".to_owned());
        }
        self.push(args);
        Ok(())
    }

    /// Sends a command whose reply [`Self::receive_reply`] returns. Requires an idle connection.
    pub(super) fn send(&mut self, args: &[&[u8]]) -> Result<(), String> {
        self.begin(args).and_then(|()| self.flush()).inspect_err(|why| self.mark_lost(why.clone()))
    }

    /// Waits for the reply to a command sent by [`Self::send`]. Errors are those of [`Self::call`].
    pub(super) fn receive_reply(&mut self, timeout: Duration) -> Result<Vec<u8>, String> {
        self.reply(timeout).inspect_err(|why| self.mark_lost(why.clone()))
    }

    fn reply(&mut self, timeout: Duration) -> Result<Vec<u8>, String> {
        let until = Instant::now() + timeout;
        let mut answers = Vec::new();
        loop {
            self.exchange(&mut answers)?;
            if let Some(answer) = answers.pop() {
                return Ok(answer);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(format!("it did not answer within {timeout:?}"));
            }
            let mut fds = [self.poll_fd()];
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(io::Error::from(error).to_string()),
            }
        }
    }

    /// Returns the socket with the events to wait for.
    pub(super) fn poll_fd(&self) -> PollFd<'_> {
        let writes = self.sent < self.out.len() || self.tls.as_ref().is_some_and(|tls| tls.has_unsent());
        PollFd::new(&self.fd, if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN })
    }

    /// Appends a command to the output.
    pub(super) fn push(&mut self, args: &[&[u8]]) {
        if self.unanswered == 0 {
            self.last_reply = Instant::now();
        }
        encode::command(&mut self.out, args.iter().copied());
        self.unanswered += 1;
    }

    /// Appends a command with many arguments to the output.
    pub(super) fn push_all<'a>(&mut self, command: &'a [u8], args: impl ExactSizeIterator<Item = &'a [u8]>) {
        if self.unanswered == 0 {
            self.last_reply = Instant::now();
        }
        encode::header(&mut self.out, b'*', args.len() + 1);
        encode::bulk(&mut self.out, command);
        args.for_each(|arg| encode::bulk(&mut self.out, arg));
        self.unanswered += 1;
    }

    /// Selects a database for the following commands. Returns whether a command was added.
    pub(super) fn select(&mut self, database: u32) -> bool {
        if self.database == database {
            return false;
        }
        self.push(&[b"SELECT", database.to_string().as_bytes()]);
        self.database = database;
        true
    }

    /// Sends and receives without blocking. Appends complete replies to `answers`.
    pub(super) fn exchange(&mut self, answers: &mut Vec<Vec<u8>>) -> Result<(), String> {
        self.flush()?;
        loop {
            match transport::receive(&self.fd, &mut self.tls, &mut self.buffer) {
                Ok(Received { count: 0, .. }) => return Err("the node closed the connection".to_owned()),
                Ok(Received { count, more }) => {
                    self.last_reply = Instant::now();
                    self.input.extend_from_slice(&self.buffer[..count]);
                    self.take_replies(answers)?;
                    if !more {
                        break;
                    }
                }
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.failure(error)),
            }
        }
        Ok(())
    }

    /// Returns the reason of a failed system call.
    fn failure(&self, error: Errno) -> String {
        let why = self.tls.as_ref().and_then(|tls| tls.failure()).map(|why| format!("TLS: {why}"));
        why.unwrap_or_else(|| io::Error::from(error).to_string())
    }

    /// Sends as much output as the socket accepts.
    fn flush(&mut self) -> Result<(), String> {
        if let Some(why) = &self.lost {
            return Err(why.clone());
        }
        while self.sent < self.out.len() || self.tls.as_ref().is_some_and(|tls| tls.has_unsent()) {
            match transport::send(&self.fd, &mut self.tls, &self.out[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(error) => return Err(self.failure(error)),
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.out.shrink_to(1 << 20);
            self.sent = 0;
        }
        Ok(())
    }

    fn take_replies(&mut self, answers: &mut Vec<Vec<u8>>) -> Result<(), String> {
        let mut at = 0;
        while at < self.input.len() {
            match self.scanner.scan(&self.input[at..]) {
                Ok(ReplyScan::Complete(len)) => {
                    if self.unanswered == 0 {
                        return Err("it sent a reply without a command".to_owned());
                    }
                    self.unanswered -= 1;
                    answers.push(self.input[at..at + len].to_vec());
                    at += len;
                }
                Ok(ReplyScan::Incomplete(need)) if need.max(self.input.len() - at) > self.reply_max => {
                    return Err(format!("it sends a reply of more than {} bytes", self.reply_max));
                }
                Ok(ReplyScan::Incomplete(_)) => break,
                Err(error) => return Err(error.to_string()),
            }
        }
        self.input.drain(..at);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_late_reply_is_not_matched_to_another_command() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let (go, gone) = (mpsc::channel::<()>(), mpsc::channel::<()>());
        let node = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("accepted");
            let info = "run_id:abc\r\nredis_version:7.0.15\r\n";
            let info = format!("${}\r\n{info}\r\n", info.len());
            for answer in ["+OK\r\n", ":7\r\n", &info, "*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"] {
                assert!(stream.read(&mut [0; 1000]).expect("asked") > 0);
                stream.write_all(answer.as_bytes()).expect("answered");
            }
            assert!(stream.read(&mut [0; 1000]).expect("asked") > 0);
            go.1.recv().expect("told");
            stream.write_all(b"$4\r\nlate\r\n").expect("answered");
            gone.0.send(()).expect("heard");
        });
        let access = NodeAccess {
            name: "n".into(),
            address: Some(address),
            unresolved: None,
            username: None,
            password: None,
            tls: None,
        };
        let mut connection = Connection::open(&access, address, "test", Duration::from_secs(30)).expect("greeted");
        let why = connection.call(&[b"GET", b"key"], Duration::from_millis(1)).expect_err("no answer");
        assert!(why.contains("did not answer"), "{why}");
        go.0.send(()).expect("it waits");
        gone.1.recv().expect("sent");
        node.join().expect("done");
        let mut answers = Vec::new();
        assert_eq!(connection.exchange(&mut answers), Err(why.clone()));
        assert!(answers.is_empty() && connection.is_lost());
        assert_eq!(connection.send(&[b"PING"]), Err(why.clone()), "a lost connection accepts no command");
        assert_eq!(connection.receive_reply(Duration::from_secs(1)), Err(why));
    }

    #[test]
    fn endless_replies_fail_the_connection() {
        for (head, more) in [("$100000000000\r\n", "x"), ("*1000000000\r\n", ":1\r\n"), ("+", "x"), ("$", "1")] {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("its address");
            let node = std::thread::spawn(move || {
                let (mut stream, _) = listener.accept().expect("accepted");
                let _ = stream.write_all(head.as_bytes());
                let piece = more.repeat(20_000);
                let mut sent = 0;
                while sent < 200 << 20 && stream.write_all(piece.as_bytes()).is_ok() {
                    sent += piece.len();
                }
                sent
            });
            let access = NodeAccess {
                name: "n".into(),
                address: Some(address),
                unresolved: None,
                username: None,
                password: None,
                tls: None,
            };
            let why = Connection::open(&access, address, "test", Duration::from_secs(60)).expect_err("no greeting");
            assert!(why.contains("more than 1048576 bytes") || why.contains("not RESP"), "{why}");
            assert!(node.join().expect("done") < 100 << 20, "{head}");
        }
    }
}
