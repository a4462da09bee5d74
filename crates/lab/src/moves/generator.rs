//! Load during moves: GET and SET of existing keys, at one address or as a client of Redis Cluster.
//!
//! Not [`switchyard_bench::load`], which knows one address: the comparison is with a cluster whose slots move, and its
//! clients follow MOVED and ASK. One generator serves both, so that servers and not generators are compared. A closed
//! loop measures the capacity; in an open loop the latency of a request counts from its scheduled time.
//!
//! A key has one connection, so its commands are executed in order: each GET must return a value between the last one
//! acknowledged when it was sent and the last one sent. A lost key or an older value is a wrong reply. Behind one
//! address this is exact. A cluster's client that pipelines over redirections has no order, so only the key's name in
//! the value is checked.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::event::{Timespec, epoll};
use switchyard_bench::load::Tally;
use switchyard_bench::random::{Popularity, Rng};
use switchyard_bench::wire::{self, Reply};

use super::slot::{SLOTS, slot_of};

/// For [`Settings::in_flight_max`]: above the queue length of a responsive server.
pub(crate) const IN_FLIGHT_MAX: usize = 2000;
/// Time-out of the last replies.
const LAST_REPLIES: Duration = Duration::from_secs(10);
/// Maximum number of stored complaints; the first ones suffice.
const COMPLAINTS: usize = 5;

/// Settings of a load.
#[derive(Debug, Clone)]
pub struct Settings {
    /// One address, or the nodes of a cluster.
    pub nodes: Vec<SocketAddr>,
    /// Whether the nodes are a cluster: requests go to the slot owner, and redirections are followed.
    pub cluster: bool,
    /// Total number of connections.
    pub connections: usize,
    /// Requests per second; `None` for a closed loop with [`Self::pipeline`] requests at a time.
    pub rate: Option<f64>,
    /// Requests in flight per connection, in a closed loop.
    pub pipeline: usize,
    /// Maximum requests in flight per connection, in an open loop. Further ones wait, and their clocks run.
    pub in_flight_max: usize,
    /// Keys, which all exist.
    pub keys: Arc<Keys>,
    /// Popularity of the keys.
    pub popularity: Popularity,
    /// Share of writes, 0 to 1.
    pub writes: f64,
    /// Share of requests that are dropped before they are sent, 0 to 1, in an open loop.
    pub drops: f64,
    /// Seed of the requests.
    pub seed: u64,
}

/// Existing keys, with the last version written to each. Survives several runs of the generator.
#[derive(Debug)]
pub struct Keys {
    /// Numbers of the keys, by position.
    numbers: Vec<u64>,
    layout: Arc<Layout>,
    /// Bytes of a value.
    size: usize,
    versions: Mutex<Vec<Versions>>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Versions {
    sent: u32,
    acknowledged: u32,
}

/// Slots of the keys: the same number at the beginning of each half, equally full. A slot costs
/// `redis-cli --cluster reshard` some round trips regardless of its keys, so few keys in each of many slots would
/// measure only these.
#[derive(Debug)]
pub struct Layout {
    /// Start of the names for each slot, first half first.
    starts: Vec<String>,
}

impl Layout {
    /// Creates a layout with `each` slots per half.
    pub fn new(each: u16) -> Self {
        let each = usize::from(each.clamp(1, SLOTS / 2));
        let mut tags = vec![String::new(); 2 * each];
        let mut missing = tags.len();
        for n in 0_u64.. {
            if missing == 0 {
                break;
            }
            let tag = format!("t{n}");
            let slot = usize::from(slot_of(tag.as_bytes()));
            let (half, within) = (slot / usize::from(SLOTS / 2), slot % usize::from(SLOTS / 2));
            if within < each && tags[half * each + within].is_empty() {
                tags[half * each + within] = tag;
                missing -= 1;
            }
        }
        Self { starts: tags.iter().map(|tag| format!("key:{{{tag}}}:")).collect() }
    }

    /// Creates a layout of names without hash tags, as BullMQ makes them for a number of queues. Their slots are
    /// random.
    pub fn of_queues(queues: u16) -> Self {
        Self { starts: (0..queues.max(1)).map(|queue| format!("bull:q{queue}:")).collect() }
    }

    /// Number of slots in each half.
    pub fn each(&self) -> u16 {
        (self.starts.len() / 2) as u16
    }

    /// Whether this key is in the first half.
    pub fn is_in_first_half(&self, number: u64) -> bool {
        (number % self.starts.len() as u64) < self.starts.len() as u64 / 2
    }

    /// Returns the name of a key.
    pub fn name(&self, number: u64) -> String {
        format!("{}{number:09}", self.starts[(number % self.starts.len() as u64) as usize])
    }
}

impl Keys {
    /// Creates keys with values of `size` bytes, at least 32.
    pub fn new(numbers: Vec<u64>, size: usize, layout: &Arc<Layout>) -> Self {
        let versions = Mutex::new(vec![Versions::default(); numbers.len()]);
        Self { numbers, layout: layout.clone(), size: size.max(32), versions }
    }

    fn name(&self, at: usize) -> String {
        self.layout.name(self.numbers[at])
    }

    /// Number of keys.
    pub fn count(&self) -> usize {
        self.numbers.len()
    }

    /// Bytes of a value.
    pub fn size(&self) -> usize {
        self.size
    }

    fn value(&self, at: usize, version: u32) -> Vec<u8> {
        let mut value = format!("{}:{version}:", self.numbers[at]).into_bytes();
        value.resize(self.size, b'x');
        value
    }

    /// Writes each key once, at the address from `owner`.
    pub fn fill(&self, owner: impl Fn(u16) -> SocketAddr, tick: &dyn Fn(u64)) -> Result<()> {
        let mut by_owner: std::collections::BTreeMap<SocketAddr, Vec<usize>> = std::collections::BTreeMap::new();
        for at in 0..self.numbers.len() {
            by_owner.entry(owner(slot_of(self.name(at).as_bytes()))).or_default().push(at);
        }
        let batch = (64 * 1024 / (self.size + 64)).clamp(1, 256);
        for (address, keys) in by_owner {
            let mut client = switchyard_bench::client::Client::connect(address)?;
            for chunk in keys.chunks(batch) {
                let mut out = Vec::new();
                for &at in chunk {
                    wire::encode(&mut out, &[b"SET", self.name(at).as_bytes(), &self.value(at, 0)]);
                }
                client.send(&out)?;
                for _ in chunk {
                    client.reply(|reply| match reply {
                        Reply::Status(b"OK") => Ok(()),
                        other => bail!("{address} replied {other} to SET while it was filled"),
                    })??;
                }
                tick(chunk.len() as u64);
            }
        }
        let mut versions = lock(&self.versions);
        versions.iter_mut().for_each(|v| *v = Versions::default());
        Ok(())
    }

    /// Reads every key at the address from `owner`. Counts the keys with a value older than the last acknowledged one,
    /// or none.
    pub fn count_wrong(&self, owner: impl Fn(u16) -> SocketAddr) -> Result<u64> {
        let versions = lock(&self.versions).clone();
        let mut clients: std::collections::BTreeMap<SocketAddr, switchyard_bench::client::Client> =
            std::collections::BTreeMap::new();
        let mut wrong = 0;
        let all: Vec<usize> = (0..self.numbers.len()).collect();
        for chunk in all.chunks((256 * 1024 / (self.size + 64)).clamp(1, 256)) {
            let mut by_owner: std::collections::BTreeMap<SocketAddr, Vec<usize>> = std::collections::BTreeMap::new();
            for &at in chunk {
                by_owner.entry(owner(slot_of(self.name(at).as_bytes()))).or_default().push(at);
            }
            for (address, keys) in by_owner {
                let client = match clients.entry(address) {
                    std::collections::btree_map::Entry::Occupied(e) => e.into_mut(),
                    std::collections::btree_map::Entry::Vacant(e) => {
                        e.insert(switchyard_bench::client::Client::connect(address)?)
                    }
                };
                let mut out = Vec::new();
                keys.iter().for_each(|&at| wire::encode(&mut out, &[b"GET", self.name(at).as_bytes()]));
                client.send(&out)?;
                for at in keys {
                    let Versions { sent, acknowledged } = versions[at];
                    let right = client.reply(|reply| match reply {
                        // A write without a reply may have been executed.
                        Reply::Bulk(value) => named(value)
                            .is_some_and(|(n, v)| n == self.numbers[at] && (acknowledged..=sent).contains(&v)),
                        _ => false,
                    })?;
                    wrong += u64::from(!right);
                }
            }
        }
        Ok(wrong)
    }
}

/// Returns the key and the version in a value.
fn named(value: &[u8]) -> Option<(u64, u32)> {
    let mut parts = value.split(|b| *b == b':');
    let mut number = || std::str::from_utf8(parts.next()?).ok()?.parse::<u64>().ok();
    let key = number()?;
    Some((key, u32::try_from(number()?).ok()?))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts besides [`Tally`].
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Replies, errors, latencies.
    pub tally: Tally,
    /// Followed redirections (MOVED and ASK).
    pub redirections: u64,
    /// Wrong replies to reads that found nothing.
    pub missing: u64,
    /// Dropped requests.
    pub dropped: u64,
    /// Longest time between two replies without an error; the first may be of the previous interval.
    pub longest_gap: Duration,
}

impl Counts {
    /// Adds the counts of the next interval.
    pub fn add(&mut self, later: &Self) {
        self.tally.add(&later.tally);
        self.redirections += later.redirections;
        self.missing += later.missing;
        self.dropped += later.dropped;
        self.longest_gap = self.longest_gap.max(later.longest_gap);
    }
}

#[derive(Debug, Default)]
struct Ledger {
    counts: Counts,
    /// Time of the last reply without an error.
    last_served: Option<Instant>,
    complaints: Vec<String>,
}

/// A load in progress.
#[derive(Debug)]
pub struct Run {
    thread: Option<JoinHandle<Result<()>>>,
    ledger: Arc<Mutex<Ledger>>,
    stop: Arc<AtomicBool>,
}

impl Run {
    /// Connects and starts a load, which runs until [`Self::finish`].
    pub fn start(settings: &Settings) -> Result<Self> {
        let ledger = Arc::new(Mutex::new(Ledger::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let mut driver = Driver::connect(settings, ledger.clone())?;
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("load".to_owned()).spawn(move || driver.drive(&stopped));
        Ok(Self { thread: Some(thread.context("cannot start a thread for the load")?), ledger, stop })
    }

    /// Returns the counts since the last call. The current wait for a reply counts so far.
    pub fn take(&self) -> Counts {
        let mut ledger = lock(&self.ledger);
        let mut counts = std::mem::take(&mut ledger.counts);
        counts.longest_gap = counts.longest_gap.max(ledger.last_served.map_or(Duration::ZERO, |last| last.elapsed()));
        counts
    }

    /// Stops sending, and waits for the requests in flight. Returns the counts since the last [`Self::take`], and the
    /// first complaints.
    pub fn finish(mut self) -> Result<(Counts, Vec<String>)> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.join().map_err(|_| anyhow::anyhow!("the load generator panicked"))??;
        }
        let mut ledger = lock(&self.ledger);
        Ok((std::mem::take(&mut ledger.counts), std::mem::take(&mut ledger.complaints)))
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Get {
        least: u32,
    },
    Set {
        version: u32,
    },
    /// `ASKING`, before a request that was redirected once.
    Asking,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    at: u32,
    operation: Operation,
    meant: Instant,
}

struct Connection {
    stream: TcpStream,
    out: Vec<u8>,
    sent: usize,
    input: Vec<u8>,
    pending: VecDeque<Request>,
    wants_write: bool,
    lost: bool,
}

struct Driver {
    settings: Settings,
    epoll: OwnedFd,
    connections: Vec<Connection>,
    /// Address of each node, and its connections.
    nodes: Vec<(SocketAddr, Vec<usize>)>,
    owner: Vec<u16>,
    slots: Vec<u16>,
    rng: Rng,
    ledger: Arc<Mutex<Ledger>>,
    versions: Vec<Versions>,
}

impl Driver {
    fn connect(settings: &Settings, ledger: Arc<Mutex<Ledger>>) -> Result<Self> {
        let keys = &settings.keys;
        let mut driver = Self {
            settings: settings.clone(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC).context("cannot create an epoll instance")?,
            connections: Vec::new(),
            nodes: Vec::new(),
            owner: vec![0; usize::from(SLOTS)],
            slots: if settings.cluster {
                (0..keys.count()).map(|at| slot_of(keys.name(at).as_bytes())).collect()
            } else {
                Vec::new()
            },
            rng: Rng::new(settings.seed),
            ledger,
            versions: lock(&settings.keys.versions).clone(),
        };
        let each = settings.connections.div_ceil(settings.nodes.len()).max(1);
        for address in &settings.nodes {
            let mut of_node = Vec::new();
            for _ in 0..each {
                let stream = TcpStream::connect_timeout(address, Duration::from_secs(5))
                    .with_context(|| format!("cannot connect to {address}"))?;
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                let index = driver.connections.len();
                epoll::add(&driver.epoll, &stream, epoll::EventData::new_u64(index as u64), epoll::EventFlags::IN)?;
                of_node.push(index);
                let (out, input, pending) = (Vec::new(), Vec::new(), VecDeque::new());
                driver.connections.push(Connection {
                    stream,
                    out,
                    sent: 0,
                    input,
                    pending,
                    wants_write: false,
                    lost: false,
                });
            }
            driver.nodes.push((*address, of_node));
        }
        if settings.cluster {
            driver.fetch_owners()?;
        }
        Ok(driver)
    }

    fn fetch_owners(&mut self) -> Result<()> {
        let first = self.settings.nodes[0];
        let ranges = switchyard_bench::client::Client::connect(first)?.call(&[b"CLUSTER", b"SLOTS"], |reply| {
            let Reply::Array(ranges) = reply else { return Vec::new() };
            let read = |range: &Reply<'_>| {
                let Reply::Array(parts) = range else { return None };
                let (Reply::Integer(from), Reply::Integer(to), Reply::Array(node)) =
                    (parts.first()?, parts.get(1)?, parts.get(2)?)
                else {
                    return None;
                };
                let Reply::Integer(port) = node.get(1)? else { return None };
                Some((usize::try_from(*from).ok()?, usize::try_from(*to).ok()?, u16::try_from(*port).ok()?))
            };
            ranges.iter().filter_map(read).collect::<Vec<_>>()
        })?;
        for (from, to, port) in ranges {
            let node = self
                .nodes
                .iter()
                .position(|(a, _)| a.port() == port)
                .with_context(|| format!("the cluster names a node at port {port}"))?;
            self.owner[from..=to].fill(node as u16);
        }
        Ok(())
    }

    fn drive(&mut self, stop: &AtomicBool) -> Result<()> {
        let outcome = self.run(stop);
        *lock(&self.settings.keys.versions) = std::mem::take(&mut self.versions);
        outcome
    }

    fn run(&mut self, stop: &AtomicBool) -> Result<()> {
        let start = Instant::now();
        let interval = self.settings.rate.map(|rate| Duration::from_secs_f64(1.0 / rate));
        let mut due = start;
        // open loop: a request whose connection is full delays the next ones, as in a client
        let mut waiting: Option<Request> = None;
        let mut read_buf = vec![0_u8; 64 * 1024];
        let mut events = Vec::with_capacity(256);
        let mut stopped_at = None;
        loop {
            let now = Instant::now();
            if stop.load(Ordering::Relaxed) {
                let since = *stopped_at.get_or_insert(now);
                if self.connections.iter().all(|c| c.pending.is_empty() || c.lost) || now > since + LAST_REPLIES {
                    break;
                }
            } else if let Some(interval) = interval {
                while due <= now {
                    if self.settings.drops > 0.0 && self.rng.unit() < self.settings.drops {
                        lock(&self.ledger).counts.dropped += 1;
                        due += interval;
                        continue;
                    }
                    let request = waiting.take().unwrap_or_else(|| self.draw(due));
                    let connection = self.connection_of(request.at as usize);
                    if self.connections[connection].pending.len() >= self.settings.in_flight_max {
                        waiting = Some(request);
                        break;
                    }
                    self.send(connection, request);
                    due += interval;
                }
            } else {
                let under_way: usize = self.connections.iter().map(|c| c.pending.len()).sum();
                for _ in under_way..self.settings.pipeline * self.connections.len() {
                    let request = self.draw(now);
                    self.send(self.connection_of(request.at as usize), request);
                }
            }
            for index in 0..self.connections.len() {
                let c = &self.connections[index];
                if c.sent < c.out.len() && !c.wants_write && !c.lost {
                    self.flush(index);
                }
            }
            let wait = match interval {
                Some(_) if stopped_at.is_none() && waiting.is_none() => {
                    due.saturating_duration_since(Instant::now()).max(Duration::from_micros(50))
                }
                _ => Duration::from_millis(2),
            };
            let timeout =
                Timespec { tv_sec: 0, tv_nsec: i64::from(wait.min(Duration::from_millis(20)).subsec_nanos()) };
            events.clear();
            match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e).context("epoll_wait failed"),
            }
            for event in &events {
                let (index, flags) = (event.data.u64() as usize, event.flags); // copied: the kernel's struct is packed
                if self.connections[index].lost {
                    continue;
                }
                if flags.contains(epoll::EventFlags::OUT) {
                    self.flush(index);
                }
                if flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::HUP | epoll::EventFlags::ERR) {
                    self.receive(index, &mut read_buf);
                }
            }
            if self.connections.iter().all(|c| c.lost) {
                bail!("all connections of the load are lost: {}", lock(&self.ledger).complaints.join("; "));
            }
        }
        let unanswered: usize = self.connections.iter().map(|c| c.pending.len()).sum();
        lock(&self.ledger).counts.tally.unanswered += unanswered as u64;
        Ok(())
    }

    fn draw(&mut self, meant: Instant) -> Request {
        let at = (self.settings.popularity.next(&mut self.rng) as usize).min(self.settings.keys.count() - 1);
        let ask = if self.rng.unit() < self.settings.writes {
            self.versions[at].sent += 1;
            Operation::Set { version: self.versions[at].sent }
        } else {
            Operation::Get { least: self.versions[at].acknowledged }
        };
        Request { at: at as u32, operation: ask, meant }
    }

    fn connection_of(&self, at: usize) -> usize {
        let node = if self.settings.cluster { usize::from(self.owner[usize::from(self.slots[at])]) } else { 0 };
        self.connection_at(node, at)
    }

    fn connection_at(&self, node: usize, at: usize) -> usize {
        let of_node = &self.nodes[node].1;
        of_node[switchyard_bench::random::mix(at as u64) as usize % of_node.len()]
    }

    fn send(&mut self, connection: usize, request: Request) {
        let keys = self.settings.keys.clone();
        let at = request.at as usize;
        if let Operation::Get { .. } | Operation::Set { .. } = request.operation {
            let key = keys.name(at);
            let out = &mut self.connections[connection].out;
            match request.operation {
                Operation::Set { version } => wire::encode(out, &[b"SET", key.as_bytes(), &keys.value(at, version)]),
                _ => wire::encode(out, &[b"GET", key.as_bytes()]),
            }
        } else {
            wire::encode(&mut self.connections[connection].out, &[b"ASKING"]);
        }
        self.connections[connection].pending.push_back(request);
    }

    fn flush(&mut self, index: usize) {
        let c = &mut self.connections[index];
        while c.sent < c.out.len() {
            match c.stream.write(&c.out[c.sent..]) {
                Ok(n) => c.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return self.lose(index, &e.to_string()),
            }
        }
        let wants_write = c.sent < c.out.len();
        if !wants_write {
            c.out.clear();
            c.sent = 0;
        }
        if wants_write != c.wants_write {
            c.wants_write = wants_write;
            let flags =
                if wants_write { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
            if let Err(e) = epoll::modify(&self.epoll, &c.stream, epoll::EventData::new_u64(index as u64), flags) {
                self.lose(index, &format!("cannot change its epoll events: {e}"));
            }
        }
    }

    fn receive(&mut self, index: usize, buf: &mut [u8]) {
        let c = &mut self.connections[index];
        let n = match c.stream.read(buf) {
            Ok(0) => return self.lose(index, "closed by the peer"),
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => return,
            Err(e) => return self.lose(index, &e.to_string()),
        };
        let now = Instant::now();
        let mut input = std::mem::take(&mut c.input);
        input.extend_from_slice(&buf[..n]);
        let ledger = self.ledger.clone();
        let mut ledger = lock(&ledger);
        let mut at = 0;
        loop {
            match wire::parse(&input[at..]) {
                Ok(None) => break,
                Ok(Some((reply, taken))) => {
                    at += taken;
                    let Some(request) = self.connections[index].pending.pop_front() else {
                        ledger.counts.tally.wrong += 1;
                        ledger.complain(format!("a reply without a request: {reply}"));
                        continue;
                    };
                    self.judge(request, &reply, now, &mut ledger);
                }
                Err(e) => {
                    ledger.counts.tally.wrong += 1;
                    drop(ledger);
                    return self.lose(index, &e.to_string());
                }
            }
        }
        input.drain(..at);
        self.connections[index].input = input;
    }

    fn judge(&mut self, request: Request, reply: &Reply<'_>, now: Instant, ledger: &mut Ledger) {
        if let Operation::Asking = request.operation {
            return;
        }
        let at = request.at as usize;
        if let Reply::Error(text) = reply
            && self.settings.cluster
            && let Some((once, node)) = self.redirection(text)
        {
            ledger.counts.redirections += 1;
            let connection = self.connection_at(node, at);
            if once {
                self.send(connection, Request { operation: Operation::Asking, ..request });
            } else {
                self.owner[usize::from(self.slots[at])] = node as u16;
            }
            self.send(connection, request);
            return;
        }
        if !matches!(reply, Reply::Error(_)) {
            let gap =
                ledger.last_served.replace(now).map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
            ledger.counts.longest_gap = ledger.counts.longest_gap.max(gap);
        }
        ledger.counts.missing += u64::from(matches!((request.operation, reply), (Operation::Get { .. }, Reply::Nil)));
        let tally = &mut ledger.counts.tally;
        tally.replies += 1;
        tally.latency.saturating_record(now.saturating_duration_since(request.meant).as_nanos() as u64);
        let number = self.settings.keys.numbers[at];
        let complaint = match (request.operation, reply) {
            (Operation::Asking, _) => None,
            (_, Reply::Error(text)) => {
                tally.errors += 1;
                Some(format!("the reply to {} was -{}", self.settings.keys.name(at), String::from_utf8_lossy(text)))
            }
            (Operation::Set { version }, Reply::Status(b"OK")) => {
                let acknowledged = &mut self.versions[at].acknowledged;
                *acknowledged = version.max(*acknowledged);
                None
            }
            (Operation::Get { least }, Reply::Bulk(value)) => match named(value) {
                Some((n, v))
                    if n == number && (self.settings.cluster || (least..=self.versions[at].sent).contains(&v)) =>
                {
                    None
                }
                _ => {
                    tally.wrong += 1;
                    Some(format!("{}: expected version {least} or later, got {reply}", self.settings.keys.name(at)))
                }
            },
            _ => {
                tally.wrong += 1;
                Some(format!("{}: {reply}", self.settings.keys.name(at)))
            }
        };
        if let Some(text) = complaint {
            ledger.complain(text);
        }
    }

    /// Returns whether the redirection is for one request only, and its node.
    fn redirection(&self, text: &[u8]) -> Option<(bool, usize)> {
        let text = std::str::from_utf8(text).ok()?;
        let mut words = text.split(' ');
        let once = match words.next()? {
            "ASK" => true,
            "MOVED" => false,
            _ => return None,
        };
        let port: u16 = words.nth(1)?.rsplit(':').next()?.parse().ok()?;
        Some((once, self.nodes.iter().position(|(a, _)| a.port() == port)?))
    }

    fn lose(&mut self, index: usize, why: &str) {
        let c = &mut self.connections[index];
        c.lost = true;
        let _ = epoll::delete(&self.epoll, &c.stream); // already gone if the kernel closed it
        let mut ledger = lock(&self.ledger);
        ledger.counts.tally.disconnects += 1;
        ledger.complain(format!("a connection was lost with {} requests in flight: {why}", c.pending.len()));
    }
}

impl Ledger {
    fn complain(&mut self, text: String) {
        if self.complaints.len() < COMPLAINTS {
            self.complaints.push(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_in_the_slots_of_the_layout() {
        let layout = Layout::new(16);
        let mut seen = std::collections::BTreeMap::new();
        for number in 0..320 {
            let slot = slot_of(layout.name(number).as_bytes());
            assert_eq!(layout.is_in_first_half(number), slot < SLOTS / 2);
            *seen.entry(slot).or_insert(0) += 1;
        }
        let expected = (0..16).chain(SLOTS / 2..SLOTS / 2 + 16).map(|slot| (slot, 10)).collect();
        assert_eq!(seen, expected);
    }

    #[test]
    fn values_name_their_key_and_version() {
        let keys = Keys::new(vec![7, 123_456], 64, &Arc::new(Layout::new(4)));
        let value = keys.value(1, 9);
        assert_eq!(value.len(), 64);
        assert_eq!(named(&value), Some((123_456, 9)));
        assert_eq!(named(b"7"), None);
        assert_eq!(named(b"x:1:"), None);
    }
}
