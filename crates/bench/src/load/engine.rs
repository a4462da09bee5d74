//! A thread of the load generator, with its connections, epoll, and clock.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{Timespec, epoll};

use super::{Ledger, MAX_LATENCY_NS, Pace, Pending, Script, Settings, Verdict, lock};
use crate::wire::{self, Reply};

/// Timeout of the first connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum wait for replies after the last request.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a reconnection, to avoid a reconnection loop while the server is down.
const RECONNECT_DELAY: Duration = Duration::from_millis(100);
/// Buffer for one read: a pipeline of small replies, or a good part of a large one.
const READ_BUFFER: usize = 64 * 1024;

struct Connection {
    /// `Err`: disconnected, with the time of the next attempt.
    stream: Result<TcpStream, Instant>,
    script: Script,
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    pending: VecDeque<(Instant, Pending)>,
    wants_write: bool,
}

/// One thread's share of the load.
pub(super) struct Driver {
    target: SocketAddr,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    pipeline: usize,
    duration: Duration,
    /// Open loop: interval between requests of this thread, and delay of its first one.
    interval: Option<(Duration, Duration)>,
}

impl Driver {
    pub(super) fn connect(
        settings: &Settings,
        scripts: impl Iterator<Item = Script>,
        thread: usize,
        threads: usize,
    ) -> Result<Self> {
        let interval = match settings.pace {
            Pace::Closed => None,
            Pace::Open { rate } => {
                let each = Duration::from_secs_f64(threads as f64 / rate);
                Some((each, each.mul_f64(thread as f64 / threads as f64))) // staggers the threads
            }
        };
        let mut driver = Self {
            target: settings.target,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot create an epoll instance")?,
            connections: Vec::new(),
            pipeline: settings.pipeline,
            duration: settings.duration,
            interval,
        };
        for script in scripts {
            driver.connections.push(Connection {
                stream: Err(Instant::now()),
                script,
                out: Vec::new(),
                sent: 0,
                input: Vec::new(),
                pending: VecDeque::new(),
                wants_write: false,
            });
            let last = driver.connections.len() - 1;
            driver.open(last).with_context(|| format!("cannot connect to {}", settings.target))?;
        }
        Ok(driver)
    }

    fn open(&mut self, index: usize) -> io::Result<()> {
        let stream = TcpStream::connect_timeout(&self.target, CONNECT_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        epoll::add(&self.epoll, &stream, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
        self.connections[index].stream = Ok(stream);
        Ok(())
    }

    /// Runs the load to its end.
    pub(super) fn run(mut self, ledger: &Mutex<Ledger>, stop: &AtomicBool) -> Result<()> {
        let start = Instant::now();
        let end = start + self.duration;
        let mut due = self.interval.map(|(each, first)| (each, start + first));
        let mut turn = 0; // open loop: index of the next connection
        let mut read_buf = vec![0_u8; READ_BUFFER];
        let mut events = Vec::with_capacity(1024);
        let mut sent_all = None;
        loop {
            let now = Instant::now();
            // An open loop must send every request due before the end, even if a slow server delays it.
            let owing = due.map_or(now < end, |(_, due)| due < end && now < end + DRAIN_TIMEOUT);
            let stopped = stop.load(Ordering::Relaxed);
            if owing && !stopped && sent_all.is_none() {
                self.reconnect(now, ledger);
                match &mut due {
                    None => {
                        for connection in self.connections.iter_mut().filter(|c| c.stream.is_ok()) {
                            while connection.pending.len() < self.pipeline {
                                connection.send_next(now);
                            }
                        }
                    }
                    Some((each, due)) => {
                        while *due <= now && *due < end {
                            // Full connections are skipped. If all are full, the request waits, and its latency counts
                            // from its due time.
                            let count = self.connections.len();
                            let free = (turn..turn + count).map(|i| i % count).find(|&i| {
                                let c = &self.connections[i];
                                c.stream.is_ok() && c.pending.len() < self.pipeline
                            });
                            let Some(free) = free else { break };
                            self.connections[free].send_next(*due);
                            turn = free + 1;
                            *due += *each;
                        }
                    }
                }
            } else {
                let since = *sent_all.get_or_insert(now);
                let answered = self.connections.iter().all(|c| c.pending.is_empty());
                if answered || now > since + DRAIN_TIMEOUT {
                    break;
                }
            }
            for index in 0..self.connections.len() {
                if self.connections[index].has_unsent() && !self.connections[index].wants_write {
                    self.flush(index, ledger);
                }
            }
            let wait = match &due {
                _ if sent_all.is_some() => Duration::from_millis(20),
                None => end.saturating_duration_since(now),
                Some((_, due)) => due.saturating_duration_since(Instant::now()).max(Duration::from_micros(20)),
            };
            let wait = wait.min(Duration::from_millis(50)); // maximum delay of `stop` and of reconnections
            let timeout = Timespec { tv_sec: 0, tv_nsec: i64::from(wait.subsec_nanos()) };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).context("epoll_wait failed"),
            }
            for event in &events {
                let (index, flags) = (event.data.u64() as usize, event.flags); // copied: the kernel's struct is packed
                if flags.contains(epoll::EventFlags::OUT) {
                    self.flush(index, ledger);
                }
                if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                    self.receive(index, &mut read_buf, ledger);
                }
            }
        }
        let mut ledger = lock(ledger);
        if let Some((each, due)) = due
            && !stop.load(Ordering::Relaxed)
        {
            let never_sent = end.saturating_duration_since(due).as_nanos() / each.as_nanos().max(1);
            ledger.interval.unanswered += never_sent as u64;
        }
        for connection in &self.connections {
            ledger.interval.unanswered += connection.pending.len() as u64;
            if let Some((asked, pending)) = connection.pending.front() {
                ledger.complain(format!("no reply to {} within {:.1?}", pending.op.name(), asked.elapsed()));
            }
        }
        Ok(())
    }

    fn reconnect(&mut self, now: Instant, ledger: &Mutex<Ledger>) {
        for index in 0..self.connections.len() {
            if matches!(self.connections[index].stream, Err(retry) if retry <= now)
                && let Err(e) = self.open(index)
            {
                self.connections[index].stream = Err(now + RECONNECT_DELAY);
                lock(ledger).complain(format!("cannot connect to {}: {e}", self.target));
            }
        }
    }

    fn flush(&mut self, index: usize, ledger: &Mutex<Ledger>) {
        let connection = &mut self.connections[index];
        let Ok(stream) = &mut connection.stream else {
            return;
        };
        while connection.sent < connection.out.len() {
            match stream.write(&connection.out[connection.sent..]) {
                Ok(n) => connection.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return self.disconnect(index, &e.to_string(), ledger),
            }
        }
        let wants_write = connection.sent < connection.out.len();
        if !wants_write {
            connection.out.clear();
            connection.sent = 0;
        }
        if wants_write != connection.wants_write {
            connection.wants_write = wants_write;
            let flags =
                if wants_write { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            if let Err(e) = epoll::modify(&self.epoll, stream, epoll::EventData::new_u64(index as u64), flags) {
                self.disconnect(index, &format!("cannot change its epoll events: {e}"), ledger);
            }
        }
    }

    fn receive(&mut self, index: usize, buf: &mut [u8], ledger: &Mutex<Ledger>) {
        let connection = &mut self.connections[index];
        let Ok(stream) = &mut connection.stream else {
            return;
        };
        let n = match stream.read(buf) {
            Ok(0) => return self.disconnect(index, "closed by the peer", ledger),
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => return,
            Err(e) => return self.disconnect(index, &e.to_string(), ledger),
        };
        let now = Instant::now();
        let mut input = std::mem::take(&mut connection.input);
        // Usually no partial reply is left over, and the bytes are parsed in place.
        let bytes = if input.is_empty() {
            &buf[..n]
        } else {
            input.extend_from_slice(&buf[..n]);
            &input
        };
        let mut at = 0;
        let mut broken = None;
        {
            let mut ledger = lock(ledger);
            loop {
                match wire::parse(&bytes[at..]) {
                    Ok(None) => break,
                    Ok(Some((reply, taken))) => {
                        at += taken;
                        let Some((asked, pending)) = connection.pending.pop_front() else {
                            broken = Some(format!("a reply without a request: {reply}"));
                            ledger.interval.wrong += 1;
                            break;
                        };
                        ledger.interval.replies += 1;
                        let waited =
                            u64::try_from(now.saturating_duration_since(asked).as_nanos()).unwrap_or(MAX_LATENCY_NS);
                        ledger.interval.latency.saturating_record(waited);
                        match connection.script.check(&pending, &reply) {
                            Verdict::Good => {}
                            Verdict::Error(text) => {
                                ledger.interval.errors += 1;
                                if let Reply::Error(bytes) = reply {
                                    ledger.fail(bytes, || connection.script.keys_of(&pending));
                                }
                                ledger.complain(text);
                            }
                            Verdict::Stale(text) => {
                                ledger.interval.wrong += 1;
                                ledger.interval.stale += 1;
                                ledger.complain(format!("stale reply to {text}"));
                            }
                            Verdict::Wrong(text) => {
                                ledger.interval.wrong += 1;
                                ledger.complain(format!("wrong reply to {text}"));
                            }
                        }
                    }
                    Err(e) => {
                        broken = Some(e.to_string());
                        ledger.interval.wrong += 1;
                        break;
                    }
                }
            }
        }
        if let Some(why) = broken {
            return self.disconnect(index, &why, ledger);
        }
        if input.is_empty() {
            input.extend_from_slice(&buf[at..n]);
        } else {
            input.drain(..at);
        }
        self.connections[index].input = input;
    }

    fn disconnect(&mut self, index: usize, why: &str, ledger: &Mutex<Ledger>) {
        let connection = &mut self.connections[index];
        connection.stream = Err(Instant::now() + RECONNECT_DELAY); // dropping closes it and removes it from the epoll
        connection.out.clear();
        connection.sent = 0;
        connection.input.clear();
        connection.wants_write = false;
        let mut ledger = lock(ledger);
        ledger.interval.disconnects += 1;
        ledger.interval.unanswered += connection.pending.len() as u64;
        ledger.complain(format!(
            "connection to {} lost with {} requests in flight: {why}",
            self.target,
            connection.pending.len()
        ));
        for (_, pending) in connection.pending.drain(..) {
            connection.script.give_up(&pending);
        }
    }
}

impl Connection {
    fn send_next(&mut self, meant: Instant) {
        let pending = self.script.next(&mut self.out);
        self.pending.push_back((meant, pending));
    }

    fn has_unsent(&self) -> bool {
        self.sent < self.out.len()
    }
}
