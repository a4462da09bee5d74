//! One side of a move: the connection to its node, the pending requests, and the fencing of lost connections.
//!
//! A *job* is a request of several commands whose replies are interpreted together. Jobs complete in order, because
//! they share one connection.

mod answers;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::pace::keys_that_fit;
use switchyard_policy::migration::staging::{Place, Step};
use switchyard_policy::migration::{BatchId, Copied, Durability, Key, Stored};
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;

pub(in crate::mover) use self::answers::{DurabilityResult, OneByOne, copied, scanned, secured, stored};
use crate::fences::Fences;
use crate::mover::connection::{Connection, field, info_text};
use crate::mover::last_piece::{self, DirtyRead, MissingElements};
use crate::mover::sizes::Page;
use crate::mover::staging::Staging;
use crate::settings::NodeAccess;

/// Delay between two attempts to reach a node.
const RETRY: Duration = Duration::from_millis(200);

/// Maximum number of times that the command timeout is doubled.
const SLOW_MAX: u32 = 7;

/// Timeout of WAITAOF, milliseconds.
const SECURE_MS: &[u8] = b"2000";

/// Timeout of WAIT, milliseconds, and maximum number of attempts. A replica may disconnect, so each attempt counts the
/// replicas again.
const REPLICAS_MS: &[u8] = b"200";
pub(in crate::mover) const REPLICAS_TRIES: u32 = 10;

/// Timeout of MIGRATE at the source, milliseconds.
const MIGRATE_MS: &[u8] = b"1000";

/// Maximum keys per MGET or MSETNX. A larger command would delay other clients of the node.
const TOGETHER_MAX: usize = 50;

/// Minimum keys for an MGET. With separate GETs, missing keys are known at once.
const TOGETHER_MIN: usize = 16;

/// Approximate bytes of values per such command.
const TOGETHER_BYTES: usize = 64 << 10;

/// Usage data of a key to preserve.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::mover) enum UsageKind {
    /// `OBJECT FREQ`
    Frequency,
    /// `OBJECT IDLETIME`
    Idle,
}

/// Form in which a value is read and stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::mover) enum Form {
    /// `DUMP` and `RESTORE`. Works for all types.
    Serialised,
    /// `GET` and `SET NX`, at a third of the cost: no serialization, compression or checksum. `MGET` and `MSETNX` halve
    /// that for many small values. Other types reply WRONGTYPE (or null to `MGET`) and are read again.
    Plain,
    /// Staged key: only the dirty elements are read.
    Staged,
}

/// A value as part of a reply, so that a reply with many values need not be copied.
#[derive(Clone, Debug, Default)]
pub(in crate::mover) struct Payload {
    reply: Arc<Vec<u8>>,
    at: Range<usize>,
}

impl Payload {
    /// Returns the payload of `part`, a slice of `reply`.
    fn within(reply: &Arc<Vec<u8>>, part: &[u8]) -> Self {
        let start = part.as_ptr().addr() - reply.as_ptr().addr();
        Self { reply: reply.clone(), at: start..start + part.len() }
    }
}

impl Deref for Payload {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.reply[self.at.clone()]
    }
}

/// Value of a key in one database.
#[derive(Debug)]
pub(in crate::mover) struct Content {
    pub(in crate::mover) database: u32,
    pub(in crate::mover) form: Form,
    pub(in crate::mover) payload: Payload,
    /// Dirty elements, for a staged value.
    pub(in crate::mover) last: Option<Box<MissingElements>>,
    /// Expiry, Unix time in milliseconds. 0: never.
    pub(in crate::mover) expires_ms: i64,
    pub(in crate::mover) usage: Option<i64>,
}

/// Kind of a request to a node.
#[derive(Debug)]
pub(in crate::mover) enum NodeRequest {
    Copy {
        batch: BatchId,
        reading: Reading,
    },
    /// Store keys. Has the meaning of each reply, and the outcomes so far.
    Store {
        batch: BatchId,
        places: Vec<Placed>,
        so_far: Vec<Stored>,
        /// Overwrite existing keys.
        over: bool,
    },
    Secure {
        batch: BatchId,
        durability: Durability,
        /// Number of earlier attempts.
        tried: u32,
    },
    Remove {
        batch: BatchId,
    },
    Migrate {
        batch: BatchId,
    },
    /// Check the process of the connection.
    Confirm,
    /// Replication offset.
    Position,
    /// A SCAN, possibly after a SELECT.
    Scan {
        walk: u32,
    },
    /// Removal of keys found by a scan.
    Purge {
        walk: u32,
    },
    /// Write dirty elements to staging keys and count the elements, or rename the staging keys.
    Finish {
        batch: BatchId,
        step: Step,
        items: Vec<last_piece::Item>,
    },
    /// Remove staging keys, given with their databases.
    Discard(Vec<(u32, Vec<u8>)>),
    /// CPU use of the node.
    Look,
    /// Sizes of keys, possibly after a SELECT.
    Sizes {
        page: Page,
        selected: bool,
    },
}

/// Meaning of a reply to [`NodeRequest::Store`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::mover) enum Placed {
    /// A SELECT.
    Selected,
    /// Key at this place in the batch.
    One(usize),
    /// Keys of this database at these places. Either all were stored or none.
    Together(u32, Vec<usize>),
    /// Overwritten keys at these places.
    Over(Vec<usize>),
    /// Removal of a key from a database in which it no longer exists.
    Cleared,
}

/// Keys to read, and the form of the read.
#[derive(Debug)]
pub(in crate::mover) struct Reading {
    keys: Vec<Key>,
    databases: Vec<DatabaseCommands>,
    usage: Option<UsageKind>,
    /// The node reports absolute expiry times, not only remaining times.
    absolute: bool,
    form: Form,
    /// Set for a repeated read of keys with unusable staging, without an action of the state machine.
    pub(in crate::mover) again: Option<Vec<Place>>,
    /// Staged keys, whose dirty elements are read.
    staged: BTreeMap<Place, DirtyRead>,
    /// Result of the first read, if this one repeats keys that are not strings.
    first: Option<Box<Read>>,
}

/// Commands sent for one database.
#[derive(Clone, Copy, Debug)]
struct DatabaseCommands {
    database: u32,
    /// A SELECT was sent first.
    selected: bool,
    /// Expiry times were requested.
    expiry: bool,
    /// Keys per MGET. 1: a GET for each key.
    together: usize,
}

/// Result of a read: outcome and values of each key.
#[derive(Debug, Default)]
pub(in crate::mover) struct Read {
    pub(in crate::mover) keys: Vec<Key>,
    pub(in crate::mover) outcomes: Vec<Copied>,
    pub(in crate::mover) contents: Vec<Vec<Content>>,
    /// Places of keys that were read as strings and have another type.
    not_strings: Vec<usize>,
    /// Keys with unreadable dirty elements. Their staging keys are unusable.
    pub(in crate::mover) unusable: Vec<Place>,
    /// The node refuses MGET.
    pub(in crate::mover) only_one_by_one: bool,
}

/// Context of a read.
#[derive(Clone, Copy, Debug)]
pub(in crate::mover) struct ReadContext<'k> {
    /// Databases to read.
    pub(in crate::mover) databases: &'k [u32],
    /// Databases without expiring keys.
    pub(in crate::mover) lasting: &'k [u32],
    /// Staged keys, if they can be used.
    pub(in crate::mover) staged: Option<&'k Staging>,
}

impl Read {
    /// Whether at least 90 % of the values are strings.
    pub(in crate::mover) fn are_strings(&self) -> bool {
        let all = self.contents.iter().flatten();
        // A serialized value begins with its type. Type 0 is a string.
        let strings = all.clone().filter(|c| kind_of(c) == "string").count();
        strings > 0 && strings * 10 >= all.count() * 9
    }

    /// Retains only leading keys if all values together are too large for one store.
    pub(in crate::mover) fn cut(&mut self) {
        let bytes = |outcome: &Copied| if let Copied::Taken { bytes } = outcome { *bytes } else { 0 };
        let fit = keys_that_fit(self.outcomes.iter().map(bytes));
        self.keys.truncate(fit);
        self.outcomes.truncate(fit);
        self.contents.truncate(fit);
    }

    /// Returns the average size of a value.
    pub(in crate::mover) fn bytes_per_key(&self) -> usize {
        let all = self.contents.iter().flatten();
        all.clone().map(|content| content.payload.len()).sum::<usize>() / all.count().max(1)
    }
}

/// Returns the type of a value. A serialized value begins with its RDB type byte.
pub(in crate::mover) fn kind_of(content: &Content) -> &'static str {
    match (content.form, content.payload.first()) {
        (Form::Plain, _) | (Form::Serialised, Some(0)) => "string",
        (Form::Serialised, Some(1 | 10 | 14 | 18)) => "list",
        (Form::Serialised, Some(2 | 11 | 20)) => "set",
        (Form::Serialised, Some(3 | 5 | 12 | 17)) => "zset",
        (Form::Serialised, Some(4 | 9 | 13 | 16 | 22..=25)) => "hash",
        (Form::Serialised, Some(15 | 19 | 21 | 26)) => "stream",
        _ => "value",
    }
}

/// Databases with keys, and whether any of their keys expire.
pub(in crate::mover) type Databases = Vec<(u32, bool)>;

/// A completed job with its replies.
pub(in crate::mover) type Answered = (NodeRequest, Vec<Vec<u8>>);

#[derive(Debug)]
struct Job {
    request: NodeRequest,
    replies: usize,
}

/// State of one side.
#[derive(Debug)]
pub(in crate::mover) struct SideConnection {
    pub(in crate::mover) node: NodeId,
    pub(in crate::mover) connection: Option<Connection>,
    jobs: VecDeque<Job>,
    /// Staging keys whose removal was requested and not confirmed.
    pub(in crate::mover) not_discarded: Vec<(u32, Vec<u8>)>,
    answers: Vec<Vec<u8>>,
    /// Records broken connections.
    fences: Arc<Fences>,
    /// Time of the next attempt to connect.
    pub(in crate::mover) next_try: Option<Instant>,
    /// Writes are on disk when the node replies (`appendfsync always`).
    pub(in crate::mover) always_synced: bool,
    /// Number of connected replicas at the last query. All must acknowledge, because a failover may promote any of
    /// them.
    pub(in crate::mover) replicas: u32,
    pub(in crate::mover) policy: String,
    /// CPU seconds used, and the time of that report.
    work: Option<(f64, Instant)>,
    /// Keyspace notifications are or may be enabled. A RESTORE is identifiable as ours, a SET is not.
    pub(in crate::mover) notifies_changes: bool,
    /// Number of timeouts in this leg. Each doubles the timeout, because a key may be large.
    pub(in crate::mover) slow: u32,
    /// Average size of the values of the last read, bytes.
    pub(in crate::mover) bytes_per_key: usize,
    /// The node refuses MGET or MSETNX.
    pub(in crate::mover) only_one_by_one: bool,
    /// Bounds (min, max) of the node's clock minus ours, microseconds. The spread is the round trip of the query.
    pub(in crate::mover) ahead_us: Option<(i64, i64)>,
}

impl SideConnection {
    pub(in crate::mover) fn new(node: NodeId, fences: Arc<Fences>) -> Self {
        Self {
            node,
            connection: None,
            jobs: VecDeque::new(),
            not_discarded: Vec::new(),
            answers: Vec::new(),
            fences,
            next_try: None,
            always_synced: false,
            replicas: 1,
            policy: String::new(),
            work: None,
            notifies_changes: true,
            slow: 0,
            bytes_per_key: 0,
            only_one_by_one: false,
            ahead_us: None,
        }
    }

    pub(in crate::mover) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Whether it is connected, nothing is in flight, and no staging keys are left to remove.
    pub(in crate::mover) fn is_unused(&self) -> bool {
        let is_unused = |connection: &Connection| !connection.is_lost() && connection.unanswered == 0;
        self.connection.as_ref().is_some_and(is_unused) && self.is_idle() && self.not_discarded.is_empty()
    }

    /// Drops the connection. The results of pending jobs are unknown.
    pub(in crate::mover) fn fail(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.fences.add_broken(self.node, connection.process);
        }
        let discards = self
            .jobs
            .drain(..)
            .filter_map(|job| if let NodeRequest::Discard(names) = job.request { Some(names) } else { None });
        self.not_discarded.extend(discards.flatten());
        self.answers.clear();
        self.next_try = Some(Instant::now());
    }

    /// Drops the connection at the end of the move if commands are pending: they may still be executed.
    pub(in crate::mover) fn release(&mut self) {
        if self.connection.as_ref().is_some_and(|connection| connection.unanswered > 0) {
            self.fail();
        }
    }

    pub(in crate::mover) fn try_later(&mut self) {
        self.next_try = Some(Instant::now() + RETRY);
    }

    /// Sends and receives. Returns the completed jobs.
    pub(in crate::mover) fn exchange(&mut self, timeout: Duration) -> Result<Vec<Answered>, String> {
        let Some(connection) = &mut self.connection else { return Ok(Vec::new()) };
        connection.exchange(&mut self.answers)?;
        // With a constant timeout, a retry of a slow command would never finish.
        let timeout = timeout.saturating_mul(1 << self.slow.min(SLOW_MAX));
        if connection.unanswered > 0 && connection.last_reply.elapsed() > timeout {
            self.slow += 1;
            return Err(format!("it did not answer within {timeout:?}"));
        }
        let mut done = Vec::new();
        while let Some(job) = self.jobs.front() {
            if self.answers.len() < job.replies {
                break;
            }
            let rest = self.answers.split_off(job.replies);
            let answers = std::mem::replace(&mut self.answers, rest);
            if let Some(job) = self.jobs.pop_front() {
                done.push((job.request, answers));
            }
        }
        Ok(done)
    }

    fn send(&mut self, ask: NodeRequest, replies: usize) {
        self.jobs.push_back(Job { request: ask, replies });
    }

    /// Reads keys.
    pub(in crate::mover) fn copy(
        &mut self,
        batch: BatchId,
        keys: Vec<Key>,
        known: ReadContext<'_>,
        form: Form,
        usage: Option<UsageKind>,
    ) {
        self.read(batch, keys, known, form, usage, None);
    }

    /// Reads the whole values of keys with unusable staging.
    pub(in crate::mover) fn copy_again(&mut self, batch: BatchId, places: Vec<Place>, known: ReadContext<'_>) {
        let mut keys: Vec<Key> = places.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_unstable();
        keys.dedup();
        self.read(batch, keys, known, Form::Serialised, None, None);
        if let Some(Job { request: NodeRequest::Copy { reading, .. }, .. }) = self.jobs.back_mut() {
            reading.again = Some(places);
        }
    }

    /// Reads the keys that are not strings again. Without such keys, returns the result.
    pub(in crate::mover) fn copy_others(
        &mut self,
        batch: BatchId,
        mut read: Read,
        known: ReadContext<'_>,
    ) -> Option<Read> {
        if read.not_strings.is_empty() {
            return Some(read);
        }
        let keys =
            std::mem::take(&mut read.not_strings).iter().filter_map(|place| read.keys.get(*place).cloned()).collect();
        self.read(batch, keys, known, Form::Serialised, None, Some(Box::new(read)));
        None
    }

    fn read(
        &mut self,
        batch: BatchId,
        keys: Vec<Key>,
        known: ReadContext<'_>,
        form: Form,
        usage: Option<UsageKind>,
        first: Option<Box<Read>>,
    ) {
        let Some(connection) = &mut self.connection else { return };
        let absolute = connection.version >= (7, 0);
        let before = connection.unanswered;
        if !absolute {
            connection.push(&[b"TIME"]);
        }
        let mut asked = Vec::new();
        let mut tails = BTreeMap::new();
        let small = (TOGETHER_BYTES / self.bytes_per_key.max(1)).min(TOGETHER_MAX);
        let staging = known.staged.filter(|staging| !staging.is_empty());
        let one_by_one = form != Form::Plain || self.only_one_by_one || staging.is_some();
        let together = if one_by_one || keys.len() < TOGETHER_MIN || small < 2 { 1 } else { small };
        for database in known.databases.iter().copied() {
            let of = DatabaseCommands {
                database,
                selected: connection.select(database),
                expiry: !known.lasting.contains(&database),
                together,
            };
            asked.push(of);
            if together > 1 {
                for some in keys.chunks(together) {
                    if of.expiry {
                        some.iter()
                            .for_each(|key| connection.push(&[if absolute { b"PEXPIRETIME" } else { b"PTTL" }, key]));
                    }
                    connection.push_all(b"MGET", some.iter().map(|key| &key[..]));
                }
                continue;
            }
            for key in &keys {
                if let Some(staging) = staging
                    && let place = (key.clone(), database)
                    && let Some((staged, elements)) = staging.last_of(&place)
                {
                    connection.push(&[if absolute { b"PEXPIRETIME" } else { b"PTTL" }, key]);
                    let read = last_piece::request_dirty_elements(connection, key, staged, elements);
                    tails.insert(place, read);
                    continue;
                }
                // The usage data must be read before the value, because reading counts as a use.
                match usage {
                    Some(UsageKind::Frequency) => connection.push(&[b"OBJECT", b"FREQ", key]),
                    Some(UsageKind::Idle) => connection.push(&[b"OBJECT", b"IDLETIME", key]),
                    None => {}
                }
                if of.expiry {
                    connection.push(&[if absolute { b"PEXPIRETIME" } else { b"PTTL" }, key]);
                }
                connection.push(&[if form == Form::Plain { b"GET" } else { b"DUMP" }, key]);
            }
        }
        let replies = connection.unanswered - before;
        self.send(
            NodeRequest::Copy {
                batch,
                reading: Reading { keys, databases: asked, usage, absolute, form, again: None, staged: tails, first },
            },
            replies,
        );
    }

    /// Stores keys that do not exist.
    pub(in crate::mover) fn store(
        &mut self,
        batch: BatchId,
        contents: &[(&Key, &[Content])],
        usage: Option<UsageKind>,
    ) {
        self.write(batch, contents, usage, None, None, vec![Stored::Stored; contents.len()]);
    }

    /// Stores keys and overwrites existing ones, in all these databases.
    pub(in crate::mover) fn overwrite(
        &mut self,
        batch: BatchId,
        contents: &[(&Key, &[Content])],
        usage: Option<UsageKind>,
        databases: &[u32],
    ) {
        self.write(batch, contents, usage, None, Some(databases), vec![Stored::Stored; contents.len()]);
    }

    /// Stores these keys one by one after a combined store found an existing key. `so_far`: outcomes of the other keys.
    pub(in crate::mover) fn store_one_by_one(
        &mut self,
        batch: BatchId,
        contents: &[(&Key, &[Content])],
        these: &[OneByOne],
        so_far: Vec<Stored>,
    ) {
        self.write(batch, contents, None, Some(these), None, so_far);
    }

    fn write(
        &mut self,
        batch: BatchId,
        contents: &[(&Key, &[Content])],
        usage: Option<UsageKind>,
        only: Option<&[OneByOne]>,
        over: Option<&[u32]>,
        so_far: Vec<Stored>,
    ) {
        let Some(connection) = &mut self.connection else { return };
        let of_contents = contents.iter().flat_map(|(_, c)| c.iter()).map(|c| c.database);
        let mut databases: Vec<u32> = of_contents.chain(over.unwrap_or_default().iter().copied()).collect();
        databases.sort_unstable();
        databases.dedup();
        let mut places = Vec::new();
        let mut scratch = (String::new(), String::new());
        for database in databases {
            if connection.select(database) {
                places.push(Placed::Selected);
            }
            if over.is_some() {
                for (key, _) in
                    contents.iter().filter(|(_, of_key)| of_key.iter().all(|content| content.database != database))
                {
                    places.push(Placed::Cleared);
                    connection.push(&[b"UNLINK", key]);
                }
            }
            let all = contents
                .iter()
                .enumerate()
                .flat_map(|(place, (key, of_key))| of_key.iter().map(move |c| (place, *key, c)));
            let mut together = Together { over: over.is_some(), ..Together::default() };
            for (place, key, content) in all.filter(|(_, _, content)| content.database == database) {
                if content.form == Form::Staged || only.is_some_and(|only| !only.contains(&(place, database))) {
                    continue; // staged keys are finished later
                }
                if content.form == Form::Plain && content.expires_ms == 0 && only.is_none() && !self.only_one_by_one {
                    if !together.takes(content.payload.len()) {
                        places.extend(together.push(connection, database));
                    }
                    together.add(place, key, &content.payload);
                    continue;
                }
                places.push(Placed::One(place));
                if content.form == Form::Plain {
                    set(connection, key, &content.payload, content.expires_ms, over.is_some());
                    continue;
                }
                scratch.0 = content.expires_ms.to_string();
                let mut args: Vec<&[u8]> = vec![b"RESTORE", key, scratch.0.as_bytes(), &content.payload, b"ABSTTL"];
                args.extend(over.map(|_| &b"REPLACE"[..]));
                if let (Some(usage), Some(value)) = (usage, content.usage) {
                    scratch.1 = value.to_string();
                    args.push(if usage == UsageKind::Frequency { b"FREQ" } else { b"IDLETIME" });
                    args.push(scratch.1.as_bytes());
                }
                connection.push(&args);
            }
            places.extend(together.push(connection, database));
        }
        let replies = places.len();
        self.send(NodeRequest::Store { batch, places, so_far, over: over.is_some() }, replies);
    }

    /// Performs a step for staged keys.
    pub(in crate::mover) fn finish(
        &mut self,
        batch: BatchId,
        step: Step,
        mut items: Vec<last_piece::Item>,
        lasts: &[&MissingElements],
    ) {
        let Some(connection) = &mut self.connection else { return };
        let before = connection.unanswered;
        for (item, last) in items.iter_mut().zip(lasts) {
            let from = connection.unanswered;
            connection.select(item.place.1);
            last_piece::push(connection, step, item, last);
            item.replies = connection.unanswered - from;
        }
        let replies = connection.unanswered - before;
        self.send(NodeRequest::Finish { batch, step, items }, replies);
    }

    /// Removes staging keys.
    pub(in crate::mover) fn discard(&mut self, names: Vec<(u32, Vec<u8>)>) {
        let Some(connection) = &mut self.connection else { return };
        let before = connection.unanswered;
        for (database, name) in &names {
            connection.select(*database);
            connection.push(&[b"UNLINK", name]);
        }
        let replies = connection.unanswered - before;
        self.send(NodeRequest::Discard(names), replies);
    }

    /// Requests durability of the stored keys. `tried`: number of earlier attempts. Returns false if no command is
    /// needed.
    pub(in crate::mover) fn secure(&mut self, batch: BatchId, durability: Durability, tried: u32) -> bool {
        let Some(connection) = &mut self.connection else { return true };
        let before = connection.unanswered;
        match durability {
            Durability::Memory => return false,
            Durability::Aof if self.always_synced => return false,
            Durability::Aof => connection.push(&[b"WAITAOF", b"1", b"0", SECURE_MS]),
            Durability::Replica => {
                connection.push(&[b"INFO", b"replication"]);
                connection.push(&[b"WAIT", self.replicas.to_string().as_bytes(), REPLICAS_MS]);
            }
        }
        let replies = connection.unanswered - before;
        self.send(NodeRequest::Secure { batch, durability, tried }, replies);
        true
    }

    /// Requests the number of evicted keys. Any reply confirms that the process is the same.
    pub(in crate::mover) fn confirm(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.push(&[b"INFO", b"stats"]);
        self.send(NodeRequest::Confirm, 1);
    }

    /// Requests the replication offset after all earlier commands. Returns false without a connection.
    pub(in crate::mover) fn query_position(&mut self) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        connection.push(&[b"INFO", b"replication"]);
        self.send(NodeRequest::Position, 1);
        true
    }

    /// Sends the removal of keys. Returns the number of replies, or `None` without a connection.
    fn unlink(&mut self, keys: &[Key], databases: &[u32]) -> Option<usize> {
        let connection = self.connection.as_mut()?;
        let before = connection.unanswered;
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(keys.iter().map(|key| &key[..]));
        for database in databases {
            connection.select(*database);
            connection.push(&args);
        }
        Some(connection.unanswered - before)
    }

    /// Removes keys from all these databases.
    pub(in crate::mover) fn remove(&mut self, batch: BatchId, keys: &[Key], databases: &[u32]) {
        // Not without a connection: a job without replies would complete as soon as a new connection exists.
        if let Some(replies) = self.unlink(keys, databases) {
            self.send(NodeRequest::Remove { batch }, replies);
        }
    }

    /// Makes the node migrate keys to the server of `access`.
    pub(in crate::mover) fn migrate(
        &mut self,
        batch: BatchId,
        keys: &[Key],
        databases: &[u32],
        address: SocketAddr,
        access: &NodeAccess,
    ) {
        let Some(connection) = &mut self.connection else { return };
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let before = connection.unanswered;
        for database in databases {
            connection.select(*database);
            let number = database.to_string();
            let mut args: Vec<&[u8]> =
                vec![b"MIGRATE", host.as_bytes(), port.as_bytes(), b"", number.as_bytes(), MIGRATE_MS];
            match (&access.username, &access.password) {
                (Some(user), Some(password)) => args.extend([&b"AUTH2"[..], user.as_bytes(), password.0.as_bytes()]),
                (None, Some(password)) => args.extend([&b"AUTH"[..], password.0.as_bytes()]),
                _ => {}
            }
            args.push(b"KEYS");
            args.extend(keys.iter().map(|key| &key[..]));
            connection.push(&args);
        }
        let replies = connection.unanswered - before;
        self.send(NodeRequest::Migrate { batch }, replies);
    }

    /// Removes keys that should not be in this database.
    pub(in crate::mover) fn purge(&mut self, walk: u32, keys: &[Key], database: u32) {
        if let Some(replies) = self.unlink(keys, &[database]) {
            self.send(NodeRequest::Purge { walk }, replies);
        }
    }

    pub(in crate::mover) fn scan(&mut self, walk: u32, database: u32, cursor: &[u8]) {
        let Some(connection) = &mut self.connection else { return };
        let selected = connection.select(database);
        connection.push(&[b"SCAN", cursor, b"COUNT", b"1000"]);
        self.send(NodeRequest::Scan { walk }, 1 + usize::from(selected));
    }

    /// Requests the CPU use of the node.
    pub(in crate::mover) fn request_load(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.push(&[b"INFO", b"cpu"]);
        self.send(NodeRequest::Look, 1);
    }

    /// Requests the sizes of keys.
    pub(in crate::mover) fn query_sizes(&mut self, page: Page) {
        let Some(connection) = &mut self.connection else { return };
        let selected = page.request(connection);
        let replies = page.len() + usize::from(selected);
        self.send(NodeRequest::Sizes { page, selected }, replies);
    }

    /// Returns the CPU share of the node's main thread since the last report. `None` for the first report.
    pub(in crate::mover) fn cpu_share(&mut self, answers: &[Vec<u8>]) -> Option<f64> {
        let info = String::from_utf8_lossy(reply::text(answers.first()?)?).into_owned();
        let seconds = |name: &str| field(&info, name)?.parse::<f64>().ok();
        // Before Redis 6.2 there is only the sum over all threads.
        let main = seconds("used_cpu_user_main_thread").zip(seconds("used_cpu_sys_main_thread"));
        let (user, system) = main.or_else(|| seconds("used_cpu_user").zip(seconds("used_cpu_sys")))?;
        let now = (user + system, Instant::now());
        let before = self.work.replace(now)?;
        let elapsed = now.1.duration_since(before.1).as_secs_f64();
        // A lower value is from a new process.
        (elapsed > 0.05 && now.0 >= before.0).then(|| (now.0 - before.0) / elapsed)
    }

    /// Requests the databases with keys. Returns false if the node is not connected or has pending jobs.
    pub(in crate::mover) fn request_databases(&mut self) -> bool {
        let is_idle = self.is_idle();
        let Some(connection) = self.connection.as_mut().filter(|_| is_idle) else { return false };
        // After an error the connection counts as lost, and there is no reply.
        let _ = connection.send(&[b"INFO", b"keyspace"]);
        true
    }

    /// Returns the requested databases with keys.
    pub(in crate::mover) fn databases(&mut self, timeout: Duration) -> Result<Databases, String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        let reply = connection.receive_reply(timeout)?;
        // The caller continues without this connection and queries again after a reconnect.
        let info = info_text("keyspace", &reply).inspect_err(|why| connection.mark_lost(why.clone()))?;
        let database = |line: &str| {
            let (number, counts) = line.strip_prefix("db")?.split_once(':')?;
            // A missing count does not mean zero.
            let expires = counts
                .split(',')
                .find_map(|count| count.strip_prefix("expires="))
                .is_none_or(|count| count.trim() != "0");
            Some((number.parse().ok()?, expires))
        };
        Ok(info.lines().filter_map(database).collect())
    }

    /// Queries the eviction policy, the durability settings and keyspace notifications.
    pub(in crate::mover) fn query_settings(&mut self, timeout: Duration) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        let memory = connection.info("memory", timeout)?;
        self.policy = field(&memory, "maxmemory_policy").unwrap_or_default().to_owned();
        let setting = |answer: &[u8]| {
            String::from_utf8_lossy(reply::elements(answer).nth(1).and_then(reply::text).unwrap_or_default())
                .into_owned()
        };
        // If CONFIG is refused, WAITAOF is used.
        let fsync = connection.call(&[b"CONFIG", b"GET", b"appendfsync"], timeout)?;
        let aof = connection.call(&[b"CONFIG", b"GET", b"appendonly"], timeout)?;
        let events = connection.call(&[b"CONFIG", b"GET", b"notify-keyspace-events"], timeout)?;
        self.notifies_changes = reply::is_error(&events) || !setting(&events).is_empty();
        self.always_synced = setting(&fsync) == "always" && setting(&aof) == "yes";
        Ok(())
    }
}

/// Strings without expiry that are collected for one command.
#[derive(Default)]
struct Together<'c> {
    places: Vec<usize>,
    args: Vec<&'c [u8]>,
    bytes: usize,
    /// Overwrite existing keys.
    over: bool,
}

impl<'c> Together<'c> {
    fn takes(&self, bytes: usize) -> bool {
        self.places.is_empty() || (self.places.len() < TOGETHER_MAX && self.bytes + bytes <= TOGETHER_BYTES)
    }

    fn add(&mut self, place: usize, key: &'c [u8], value: &'c [u8]) {
        self.places.push(place);
        self.args.extend([key, value]);
        self.bytes += value.len();
    }

    /// Sends the collected keys.
    fn push(&mut self, connection: &mut Connection, database: u32) -> Option<Placed> {
        self.bytes = 0;
        let args = std::mem::take(&mut self.args);
        match std::mem::take(&mut self.places)[..] {
            [] => None,
            [place] => {
                set(connection, args[0], args[1], 0, self.over);
                Some(Placed::One(place))
            }
            ref places if self.over => {
                connection.push_all(b"MSET", args.into_iter());
                Some(Placed::Over(places.to_vec()))
            }
            ref places => {
                connection.push_all(b"MSETNX", args.into_iter());
                Some(Placed::Together(database, places.to_vec()))
            }
        }
    }
}

/// Stores a string. `over`: overwrite an existing key.
fn set(connection: &mut Connection, key: &[u8], value: &[u8], expires_ms: i64, over: bool) {
    let until = expires_ms.to_string();
    let mut args: Vec<&[u8]> = vec![b"SET", key, value];
    args.extend((!over).then_some(&b"NX"[..]));
    if expires_ms != 0 {
        args.extend([b"PXAT", until.as_bytes()]);
    }
    connection.push(&args);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_job_is_queued_without_a_connection() {
        let mut end = SideConnection::new(NodeId(0), Arc::default());
        let keys = [Key::from(&b"a"[..])];
        end.remove(BatchId(0), &keys, &[0]);
        end.purge(0, &keys, 0);
        end.discard(vec![(0, b"a".to_vec())]);
        end.scan(0, 0, b"0");
        end.request_load();
        assert!(end.is_idle() && !end.query_position());
    }
}
