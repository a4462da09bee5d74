//! Records the operations of clients, so that a checker can decide whether one server could have replied like that.
//!
//! Many clients share a few keys and work concurrently. Each operation is recorded with the times of its call and
//! return, and its reply. An operation without a reply may have been executed at any time after its call, or never; it
//! is recorded without a return. `tests-clients/history-check` (Porcupine) then searches an order in which a single
//! Redis could have executed all operations.
//!
//! The search is exponential in the number of concurrent operations. A key therefore has at most eight clients, and is
//! replaced after 2,000 operations, or when too many outcomes are unknown. Replaced keys are read again at the end, to
//! find values that were lost or came back.
//!
//! Plain threads, one per client, because a client only waits for its reply before the next request.

pub(crate) mod connection;
mod record;
mod workload;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use switchyard_bench::random::{Rng, mix};

use self::connection::{Connection, Outcome, error_text};
use self::record::{Entry, Record};
pub use self::workload::Kind;
use self::workload::Plan;

/// Clients that share objects. More make the search for an order too expensive.
const GROUP: usize = 8;
/// Number of unknown outcomes after which an object is replaced.
const UNKNOWN_MAX: u32 = 8;
/// Time limit of the last reads, so that a server that returns late is still read.
const LAST_READS: Duration = Duration::from_secs(60);
/// Pause after a failed operation, so that a dead server does not fill the history with failures.
const AFTER_FAILURE: Duration = Duration::from_millis(20);

/// Settings of a history.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Addresses of the same database, used by the clients in turn.
    pub targets: Vec<SocketAddr>,
    /// Duration of the run.
    pub duration: Duration,
    /// Number of clients.
    pub clients: usize,
    /// Kinds of histories.
    pub kinds: Vec<Kind>,
    /// Time-out of a reply, after which the outcome is unknown.
    pub timeout: Duration,
    /// Mean pause of a client between two operations.
    pub pause: Duration,
    /// Seed of the clients' choices. The history also depends on timing.
    pub seed: u64,
    /// Prefix of the keys. No such keys may exist.
    pub prefix: String,
    /// Folder for the files, one for each kind.
    pub folder: PathBuf,
    /// Whether the keys are deleted at the end.
    pub clean: bool,
}

/// Counts of a run.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Recorded operations.
    pub operations: u64,
    /// Recorded operations with unknown outcome.
    pub unknown: u64,
    /// Failed operations that change nothing: not recorded.
    pub reads_failed: u64,
    /// Transactions that a watch aborted.
    pub aborted: u64,
    /// Operations that could not be sent.
    pub not_sent: u64,
    /// Error replies by their first word: count, and first text.
    pub errors: BTreeMap<String, (u64, String)>,
    /// Objects used.
    pub objects: u64,
    /// Objects that could not be read at the end.
    pub unread: u64,
}

impl Tally {
    /// Number of error replies.
    pub fn error_replies(&self) -> u64 {
        self.errors.values().map(|(n, _)| n).sum()
    }

    /// Whether every operation was answered, and none with an error.
    pub fn is_clean(&self) -> bool {
        self.unknown == 0 && self.reads_failed == 0 && self.not_sent == 0 && self.errors.is_empty() && self.unread == 0
    }
}

/// A finished history.
#[derive(Debug)]
pub struct Summary {
    /// The files, one per kind.
    pub files: Vec<PathBuf>,
    /// Counts of the run.
    pub tally: Tally,
}

/// An object that clients share at the moment.
#[derive(Debug)]
struct Object {
    name: String,
    kind: Kind,
    operations: u32,
    unknown: u32,
}

/// State shared by all clients of a run.
struct Shared {
    settings: Settings,
    started: Instant,
    stop: AtomicBool,
    /// Objects in use: one list for each group of clients.
    groups: Vec<Mutex<Vec<Object>>>,
    /// Replaced objects.
    left: Mutex<Vec<(Kind, String)>>,
    named: AtomicU64,
    tags: AtomicU64,
    tally: Mutex<Tally>,
    records: BTreeMap<Kind, Record>,
}

/// A history in progress.
pub struct Recording {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the clients.
pub fn start(settings: &Settings) -> Result<Recording> {
    ensure!(
        !settings.targets.is_empty() && settings.clients > 0 && !settings.kinds.is_empty(),
        "a history needs a target, a client and a workload"
    );
    std::fs::create_dir_all(&settings.folder)
        .with_context(|| format!("cannot create {}", settings.folder.display()))?;
    let mut records = BTreeMap::new();
    for kind in &settings.kinds {
        records.insert(*kind, Record::create(settings.folder.join(format!("{kind}.jsonl")))?);
    }
    let groups = settings.clients.div_ceil(GROUP);
    let mut shared = Shared {
        settings: settings.clone(),
        started: Instant::now(),
        stop: AtomicBool::new(false),
        groups: Vec::new(),
        left: Mutex::new(Vec::new()),
        named: AtomicU64::new(0),
        tags: AtomicU64::new(0),
        tally: Mutex::new(Tally::default()),
        records,
    };
    for _ in 0..groups {
        let objects = settings.kinds.iter().flat_map(|kind| std::iter::repeat_n(*kind, kind.objects()));
        let objects = objects.map(|kind| shared.fresh(kind)).collect();
        shared.groups.push(Mutex::new(objects));
    }
    let shared = Arc::new(shared);
    let mut clients = Vec::new();
    for number in 0..settings.clients {
        let shared = shared.clone();
        let thread = std::thread::Builder::new()
            .name(format!("history-{number}"))
            .spawn(move || Client::new(&shared, number).run());
        clients.push(thread.context("cannot start a thread for a client")?);
    }
    Ok(Recording { shared, clients })
}

impl Recording {
    /// Counts so far.
    pub fn tally(&self) -> Tally {
        lock(&self.shared.tally).clone()
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.shared.started.elapsed()
    }

    /// Ends the run early.
    pub fn stop(&self) {
        self.shared.stop.store(true, Ordering::Relaxed);
    }

    /// Whether all clients have ended; the last reads come in [`Self::finish`].
    pub fn is_finished(&self) -> bool {
        self.clients.iter().all(JoinHandle::is_finished)
    }

    /// Waits for the clients, reads every object once more, and closes the files.
    pub fn finish(self) -> Result<Summary> {
        for client in self.clients {
            client.join().map_err(|_| anyhow::anyhow!("a client of the history panicked"))?;
        }
        let shared = &self.shared;
        let mut objects = std::mem::take(&mut *lock(&shared.left));
        for group in &shared.groups {
            objects.extend(lock(group).drain(..).map(|o| (o.kind, o.name)));
        }
        // A separate client, because it comes after all others.
        let mut reader = Client::new(shared, shared.settings.clients);
        let end = Instant::now() + LAST_READS;
        let unread = objects.iter().filter(|(kind, name)| !reader.read_object(*kind, name, end)).count() as u64;
        if shared.settings.clean {
            for (kind, name) in &objects {
                for key in kind.keys(name) {
                    reader.connection.call(&[vec!["DEL".to_owned(), key]]);
                }
            }
        }
        let mut tally = lock(&shared.tally).clone();
        tally.objects = objects.len() as u64;
        tally.unread = unread;
        let files = shared.records.values().map(Record::close).collect::<Result<_>>()?;
        Ok(Summary { files, tally })
    }
}

impl Shared {
    fn fresh(&self, kind: Kind) -> Object {
        let number = self.named.fetch_add(1, Ordering::Relaxed);
        Object { name: format!("{}{kind}:{number}", self.settings.prefix), kind, operations: 0, unknown: 0 }
    }

    /// Picks an object for the next operation, and replaces it after enough use.
    fn pick(&self, group: usize, rng: &mut Rng) -> (usize, Kind, String) {
        let mut objects = lock(&self.groups[group]);
        // The lower of two positions: some objects are more popular than others.
        let count = objects.len() as u64;
        let at = rng.below(count).min(rng.below(count)) as usize;
        let object = &mut objects[at];
        if object.operations >= object.kind.operations_max() || object.unknown >= UNKNOWN_MAX {
            let old = std::mem::replace(object, self.fresh(object.kind));
            lock(&self.left).push((old.kind, old.name));
        }
        object.operations += 1;
        (at, object.kind, object.name.clone())
    }

    fn note_unknown(&self, group: usize, at: usize, name: &str) {
        if let Some(object) = lock(&self.groups[group]).get_mut(at).filter(|o| o.name == name) {
            object.unknown += 1;
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

/// Result of an operation, for the client's next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Answered,
    Failed,
    /// A change may have been made.
    Unknown,
}

struct Client<'a> {
    shared: &'a Shared,
    number: usize,
    connection: Connection,
    rng: Rng,
}

impl<'a> Client<'a> {
    fn new(shared: &'a Shared, number: usize) -> Self {
        let settings = &shared.settings;
        let connection = Connection::new(settings.targets[number % settings.targets.len()], settings.timeout);
        Self { shared, number, connection, rng: Rng::new(mix(settings.seed ^ mix(number as u64 + 1))) }
    }

    fn run(mut self) {
        let group = self.number / GROUP;
        let pause = self.shared.settings.pause.as_nanos() as u64;
        while self.shared.started.elapsed() < self.shared.settings.duration && !self.shared.stop.load(Ordering::Relaxed)
        {
            let (at, kind, name) = self.shared.pick(group, &mut self.rng);
            let keys = kind.keys(&name);
            let tag = format!("{name}/{}.{}", self.number, self.shared.tags.fetch_add(1, Ordering::Relaxed));
            let end = match workload::next(kind, &keys, &tag, &mut self.rng) {
                Plan::Single(command) => self.single(kind, &name, command),
                Plan::Together(commands) => self.transaction(kind, &name, None, commands),
                Plan::Watched(key, commands) => self.watched(kind, &name, &key, commands),
            };
            if end == End::Unknown {
                self.shared.note_unknown(group, at, &name);
            }
            if end != End::Answered {
                std::thread::sleep(AFTER_FAILURE);
            } else if pause > 0 {
                std::thread::sleep(Duration::from_nanos(self.rng.below(2 * pause)));
            }
        }
    }

    /// Reads an object at the end, repeatedly until it is answered.
    fn read_object(&mut self, kind: Kind, name: &str, end: Instant) -> bool {
        for command in workload::read_commands(kind, &kind.keys(name)) {
            while self.single(kind, name, command.clone()) != End::Answered {
                if Instant::now() > end {
                    return false;
                }
                std::thread::sleep(AFTER_FAILURE);
            }
        }
        true
    }

    fn single(&mut self, kind: Kind, name: &str, command: Vec<String>) -> End {
        let reads = workload::only_reads(&command);
        let call = self.shared.now();
        let outcome = self.connection.call(std::slice::from_ref(&command));
        let mut entry = Entry {
            object: name,
            client: self.number,
            call,
            back: None,
            condition: None,
            commands: vec![command],
            got: None,
        };
        let end = match outcome {
            Outcome::NotSent => {
                lock(&self.shared.tally).not_sent += 1;
                return End::Failed;
            }
            Outcome::Replies(replies) => match replies.iter().find_map(error_text) {
                None => {
                    entry.back = Some(self.shared.now());
                    entry.got = Some(replies);
                    End::Answered
                }
                Some(text) => {
                    self.note_error(text);
                    if was_refused(text) {
                        return End::Failed;
                    }
                    End::Unknown
                }
            },
            Outcome::Unknown => End::Unknown,
        };
        self.write(kind, &entry, end, reads)
    }

    /// Sends WATCH and GET, then a transaction that must fail if the key has changed in between.
    fn watched(&mut self, kind: Kind, name: &str, key: &str, commands: Vec<Vec<String>>) -> End {
        let call = self.shared.now();
        let asked = [vec!["WATCH".to_owned(), key.to_owned()], vec!["GET".to_owned(), key.to_owned()]];
        let read = match self.connection.call(&asked) {
            Outcome::Replies(mut replies) => match replies.iter().find_map(error_text).map(str::to_owned) {
                None => replies.pop().unwrap_or(Value::Null),
                Some(text) => {
                    self.note_error(&text);
                    self.connection.forget(); // it may be watching
                    lock(&self.shared.tally).reads_failed += 1;
                    return End::Failed;
                }
            },
            Outcome::NotSent => {
                lock(&self.shared.tally).not_sent += 1;
                return End::Failed;
            }
            Outcome::Unknown => {
                lock(&self.shared.tally).reads_failed += 1;
                return End::Failed;
            }
        };
        let back = Some(self.shared.now());
        let get = vec![vec!["GET".to_owned(), key.to_owned()]];
        let entry = Entry {
            object: name,
            client: self.number,
            call,
            back,
            condition: None,
            commands: get,
            got: Some(vec![read.clone()]),
        };
        self.write(kind, &entry, End::Answered, true);
        // Time for other clients to change the key.
        std::thread::sleep(Duration::from_micros(self.rng.below(4000)));
        self.transaction(kind, name, Some((key.to_owned(), read)), commands)
    }

    fn transaction(
        &mut self,
        kind: Kind,
        name: &str,
        condition: Option<(String, Value)>,
        commands: Vec<Vec<String>>,
    ) -> End {
        let one = |word: &str| vec![word.to_owned()];
        let asked: Vec<_> = [one("MULTI")].into_iter().chain(commands.iter().cloned()).chain([one("EXEC")]).collect();
        let reads = commands.iter().all(|c| workload::only_reads(c));
        let call = self.shared.now();
        let outcome = if self.rng.below(4) == 0 { self.step_by_step(&asked) } else { self.connection.call(&asked) };
        let mut entry = Entry { object: name, client: self.number, call, back: None, condition, commands, got: None };
        let end = match outcome {
            Outcome::NotSent => {
                lock(&self.shared.tally).not_sent += 1;
                return End::Failed;
            }
            Outcome::Unknown => End::Unknown,
            Outcome::Replies(mut replies) => {
                entry.back = Some(self.shared.now());
                let last = replies.pop().unwrap_or(Value::Null);
                match last {
                    Value::Null => {
                        lock(&self.shared.tally).aborted += 1;
                        entry.got = None;
                        End::Answered
                    }
                    Value::Array(got) if !got.iter().any(|v| error_text(v).is_some()) => {
                        entry.got = Some(got);
                        End::Answered
                    }
                    other => {
                        let inner = other.as_array().and_then(|a| a.iter().find_map(error_text));
                        match error_text(&other).or(inner) {
                            Some(text) => {
                                self.note_error(text);
                                self.connection.forget(); // it may be inside MULTI still
                                if text.starts_with("EXECABORT") || was_refused(text) && inner.is_none() {
                                    return End::Failed;
                                }
                                entry.back = None;
                                End::Unknown
                            }
                            // A reply that EXEC cannot return: left for the checker to refuse.
                            None => {
                                entry.got = Some(vec![other; entry.commands.len()]);
                                End::Answered
                            }
                        }
                    }
                }
            }
        };
        self.write(kind, &entry, end, reads)
    }

    /// Sends each command separately, like some client libraries.
    fn step_by_step(&mut self, commands: &[Vec<String>]) -> Outcome {
        let mut all = Vec::new();
        for (i, command) in commands.iter().enumerate() {
            let last = i + 1 == commands.len();
            match self.connection.call(std::slice::from_ref(command)) {
                Outcome::Replies(replies) => all.extend(replies),
                // Without EXEC nothing is executed.
                Outcome::NotSent | Outcome::Unknown if !last => {
                    self.connection.forget();
                    return Outcome::NotSent;
                }
                other => return other,
            }
        }
        Outcome::Replies(all)
    }

    fn write(&self, kind: Kind, entry: &Entry<'_>, end: End, reads: bool) -> End {
        let mut tally = lock(&self.shared.tally);
        if end == End::Unknown {
            if reads {
                tally.reads_failed += 1;
                return End::Failed;
            }
            tally.unknown += 1;
        }
        tally.operations += 1;
        drop(tally);
        if let Some(record) = self.shared.records.get(&kind) {
            record.write(entry);
        }
        end
    }

    fn note_error(&self, text: &str) {
        let word = text.split(' ').next().unwrap_or_default().to_owned();
        lock(&self.shared.tally).errors.entry(word).or_insert_with(|| (0, text.to_owned())).0 += 1;
    }
}

/// Whether the error means that a Redis server has not executed the command.
fn was_refused(text: &str) -> bool {
    ["LOADING ", "OOM ", "MISCONF ", "READONLY ", "BUSY ", "NOAUTH "].iter().any(|word| text.starts_with(word))
}
