//! One side of a move: the connection to its node, what is being asked there, and what a lost connection may still do.
//!
//! What was asked of a node is a *job*: some commands in one piece, and what their replies mean together. Jobs are
//! answered in the order in which they were asked, because they travel on one connection.

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
use crate::mover::connection::{Connection, field};
use crate::mover::last_piece::{self, Last, LastRead};
use crate::mover::sizes::Page;
use crate::mover::staging::Staging;
use crate::settings::NodeAccess;

/// Between two attempts to reach a node.
const RETRY: Duration = Duration::from_millis(200);

/// Its time is doubled so often at most.
const SLOW_MAX: u32 = 7;

/// How long a node may take to make something safe, milliseconds.
const SECURE_MS: &[u8] = b"2000";

/// The same of replicas, of which one may be gone meanwhile: they are counted anew after so long, and so often in all.
const REPLICAS_MS: &[u8] = b"200";
pub(in crate::mover) const REPLICAS_TRIES: u32 = 10;

/// How long the target may take in a MIGRATE, milliseconds.
const MIGRATE_MS: &[u8] = b"1000";

/// Keys of one MGET or MSETNX, at most: a command of more would hold up the others at its node.
const TOGETHER_MAX: usize = 50;

/// Of fewer keys each is asked for by itself: which of them is not there is known without asking once more.
const TOGETHER_MIN: usize = 16;

/// Bytes of the values of one such command, about.
const TOGETHER_BYTES: usize = 64 << 10;

/// What is known of how lately or often a key was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::mover) enum Use {
    /// `OBJECT FREQ`
    Frequency,
    /// `OBJECT IDLETIME`
    Idle,
}

/// How a batch is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::mover) enum Form {
    /// `DUMP`, and stored by `RESTORE`: whatever it is.
    Serialised,
    /// `GET`, and stored by `SET NX`: nothing is serialised, compressed or summed up, and it costs a third. Many small
    /// ones at once, by `MGET` and `MSETNX`, cost half of that. What is no string answers WRONGTYPE (or as if it were
    /// not there), and is read once more.
    Plain,
    /// It is staged: only its tail.
    Staged,
}

/// A value as it was read: a part of a reply, so that a reply of many values need not be copied into as many pieces.
#[derive(Clone, Debug, Default)]
pub(in crate::mover) struct Payload {
    reply: Arc<Vec<u8>>,
    at: Range<usize>,
}

impl Payload {
    /// The text of a reply, or of a part of it; `part` lies within `reply`.
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

/// A key in one database, as it was read.
#[derive(Debug)]
pub(in crate::mover) struct Content {
    pub(in crate::mover) database: u32,
    pub(in crate::mover) form: Form,
    pub(in crate::mover) payload: Payload,
    /// What a staged value lacks.
    pub(in crate::mover) last: Option<Box<Last>>,
    /// Unix time in milliseconds; 0: never.
    pub(in crate::mover) expires_ms: i64,
    pub(in crate::mover) usage: Option<i64>,
}

/// Something asked of a node.
#[derive(Debug)]
pub(in crate::mover) enum NodeRequest {
    /// Read keys.
    Copy {
        batch: BatchId,
        reading: Reading,
    },
    /// Store; what each reply is about, and what is known of the keys so far.
    Store {
        batch: BatchId,
        places: Vec<Placed>,
        so_far: Vec<Stored>,
        /// In the place of what was there.
        over: bool,
    },
    Secure {
        batch: BatchId,
        durability: Durability,
        /// How often replicas were asked before.
        tried: u32,
    },
    Remove {
        batch: BatchId,
    },
    Migrate {
        batch: BatchId,
    },
    /// Whether it is the process that it was.
    Confirm,
    /// How far its replication stream is.
    Position,
    /// A SCAN of a walk, behind a SELECT or not.
    Scan {
        walk: u32,
    },
    /// Removal of what a walk has found.
    Purge {
        walk: u32,
    },
    /// Give staging keys what they lack, and count; then rename them.
    Finish {
        batch: BatchId,
        step: Step,
        items: Vec<last_piece::Item>,
    },
    /// Remove staging keys.
    /// With their databases.
    Discard(Vec<(u32, Vec<u8>)>),
    /// How much it has worked.
    Look,
    /// The sizes of keys, behind a SELECT or not.
    Sizes {
        page: Page,
        selected: bool,
    },
}

/// What a reply to a [`NodeRequest::Store`] is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::mover) enum Placed {
    /// A SELECT.
    Selected,
    /// The key at this place.
    One(usize),
    /// Keys of this database at these places: all of them were stored, or none.
    Together(u32, Vec<usize>),
    /// Keys at these places, in the place of what was there.
    Over(Vec<usize>),
    /// What a key had in a database in which it is not any more.
    Cleared,
}

/// What is read of which keys.
#[derive(Debug)]
pub(in crate::mover) struct Reading {
    keys: Vec<Key>,
    databases: Vec<AskedOf>,
    usage: Option<Use>,
    /// The node tells when a key expires, not only in how long.
    absolute: bool,
    form: Form,
    /// Not because the machine asks for it: what was staged of these is worth nothing.
    pub(in crate::mover) again: Option<Vec<Place>>,
    /// Those of which only the tail is read.
    staged: BTreeMap<Place, LastRead>,
    /// What was read before, where this is about those of its keys that are no strings.
    first: Option<Box<Read>>,
}

/// A database, and what was asked there.
#[derive(Clone, Copy, Debug)]
struct AskedOf {
    database: u32,
    /// A SELECT goes before it.
    selected: bool,
    /// When keys expire.
    expiry: bool,
    /// Keys of one MGET; 1: each is asked for by itself.
    together: usize,
}

/// What was read: per key an outcome and its content.
#[derive(Debug, Default)]
pub(in crate::mover) struct Read {
    pub(in crate::mover) keys: Vec<Key>,
    pub(in crate::mover) outcomes: Vec<Copied>,
    pub(in crate::mover) contents: Vec<Vec<Content>>,
    /// Those that are no strings, and were asked for as such.
    others: Vec<usize>,
    /// Keys of which the tail cannot be read: what is staged of them is worth nothing.
    pub(in crate::mover) unusable: Vec<Place>,
    /// The node refuses MGET.
    pub(in crate::mover) only_one_by_one: bool,
}

/// What is known of keys that are read.
#[derive(Clone, Copy, Debug)]
pub(in crate::mover) struct Known<'k> {
    /// The databases that are asked.
    pub(in crate::mover) databases: &'k [u32],
    /// Those in which no key expires.
    pub(in crate::mover) lasting: &'k [u32],
    /// Keys of which all but the tail is at the target.
    pub(in crate::mover) staged: Option<&'k Staging>,
}

impl Read {
    /// Whether nearly all that is there are strings.
    pub(in crate::mover) fn are_strings(&self) -> bool {
        let all = self.contents.iter().flatten();
        // A serialised value begins with its type, and strings are type 0.
        let strings = all.clone().filter(|c| kind_of(c) == "string").count();
        strings > 0 && strings * 10 >= all.count() * 9
    }

    /// Keeps the first keys, if all are too much to be stored in one go.
    pub(in crate::mover) fn cut(&mut self) {
        let bytes = |outcome: &Copied| if let Copied::Taken { bytes } = outcome { *bytes } else { 0 };
        let fit = keys_that_fit(self.outcomes.iter().map(bytes));
        self.keys.truncate(fit);
        self.outcomes.truncate(fit);
        self.contents.truncate(fit);
    }

    /// Bytes of a value, on average.
    pub(in crate::mover) fn bytes_per_key(&self) -> usize {
        let all = self.contents.iter().flatten();
        all.clone().map(|content| content.payload.len()).sum::<usize>() / all.count().max(1)
    }
}

/// The type of a value: of a serialised one the first byte is the type, as in RDB files.
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

/// The databases that have keys, and whether some of them expire.
pub(in crate::mover) type Databases = Vec<(u32, bool)>;

/// A job that is done, and the replies.
pub(in crate::mover) type Answered = (NodeRequest, Vec<Vec<u8>>);

#[derive(Debug)]
struct Job {
    request: NodeRequest,
    replies: usize,
}

/// A side.
#[derive(Debug)]
pub(in crate::mover) struct SideConnection {
    pub(in crate::mover) node: NodeId,
    pub(in crate::mover) connection: Option<Connection>,
    jobs: VecDeque<Job>,
    /// Temporary keys whose removal was asked for and not confirmed.
    pub(in crate::mover) not_discarded: Vec<(u32, Vec<u8>)>,
    answers: Vec<Vec<u8>>,
    /// Takes note of connections that break.
    fences: Arc<Fences>,
    /// When to try to reach it again.
    pub(in crate::mover) next_try: Option<Instant>,
    /// `appendfsync always`: what is answered is on disk.
    pub(in crate::mover) always_synced: bool,
    /// The replicas that it has, when last asked: nobody knows which of them a failover would promote, so all must have
    /// what is to be safe.
    pub(in crate::mover) replicas: u32,
    pub(in crate::mover) policy: String,
    /// Seconds of a processor that it had used, and when it said so.
    work: Option<(f64, Instant)>,
    /// Subscribers may hear of what is stored here: a RESTORE is ours, a SET could be anybody's.
    pub(in crate::mover) notifies_changes: bool,
    /// How often it has not answered in time in this leg: it may have more time then, because a key may be large.
    pub(in crate::mover) slow: u32,
    /// Bytes of the values that were read there last, on average.
    pub(in crate::mover) bytes_per_key: usize,
    /// It refuses MGET or MSETNX.
    pub(in crate::mover) only_one_by_one: bool,
    /// By how much its clock is ahead of ours, microseconds, at least and at most: its answer was under way for a
    /// while.
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

    /// The connection is given up: whatever was asked is not known.
    pub(in crate::mover) fn fail(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.fences.broke(self.node, connection.process);
        }
        let discards = self
            .jobs
            .drain(..)
            .filter_map(|job| if let NodeRequest::Discard(names) = job.request { Some(names) } else { None });
        self.not_discarded.extend(discards.flatten());
        self.answers.clear();
        self.next_try = Some(Instant::now());
    }

    /// The move is over: what is under way is nobody's any more, and may still be executed.
    pub(in crate::mover) fn release(&mut self) {
        if self.connection.as_ref().is_some_and(|connection| connection.unanswered > 0) {
            self.fail();
        }
    }

    pub(in crate::mover) fn try_later(&mut self) {
        self.next_try = Some(Instant::now() + RETRY);
    }

    /// What was asked and is answered now.
    pub(in crate::mover) fn exchange(&mut self, patience: Duration) -> Result<Vec<Answered>, String> {
        let Some(connection) = &mut self.connection else { return Ok(Vec::new()) };
        connection.exchange(&mut self.answers)?;
        // Asked again for something that takes longer than that, it would never be done.
        let patience = patience.saturating_mul(1 << self.slow.min(SLOW_MAX));
        if connection.unanswered > 0 && connection.last_reply.elapsed() > patience {
            self.slow += 1;
            return Err(format!("it did not answer within {patience:?}"));
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
        known: Known<'_>,
        form: Form,
        usage: Option<Use>,
    ) {
        self.read(batch, keys, known, form, usage, None);
    }

    /// Reads keys whole, of which what was staged is worth nothing.
    pub(in crate::mover) fn copy_again(&mut self, batch: BatchId, places: Vec<Place>, known: Known<'_>) {
        let mut keys: Vec<Key> = places.iter().map(|(key, _)| key.clone()).collect();
        keys.sort_unstable();
        keys.dedup();
        self.read(batch, keys, known, Form::Serialised, None, None);
        if let Some(Job { request: NodeRequest::Copy { reading, .. }, .. }) = self.jobs.back_mut() {
            reading.again = Some(places);
        }
    }

    /// Reads what turned out to be no string. Without such keys what was read is given back.
    pub(in crate::mover) fn copy_others(&mut self, batch: BatchId, mut read: Read, known: Known<'_>) -> Option<Read> {
        if read.others.is_empty() {
            return Some(read);
        }
        let keys = std::mem::take(&mut read.others).iter().filter_map(|place| read.keys.get(*place).cloned()).collect();
        self.read(batch, keys, known, Form::Serialised, None, Some(Box::new(read)));
        None
    }

    fn read(
        &mut self,
        batch: BatchId,
        keys: Vec<Key>,
        known: Known<'_>,
        form: Form,
        usage: Option<Use>,
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
            let of = AskedOf {
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
                // First how it was used, because reading it is a use.
                match usage {
                    Some(Use::Frequency) => connection.push(&[b"OBJECT", b"FREQ", key]),
                    Some(Use::Idle) => connection.push(&[b"OBJECT", b"IDLETIME", key]),
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

    /// Stores what was read of each of the keys.
    pub(in crate::mover) fn store(&mut self, batch: BatchId, contents: &[(&Key, &[Content])], usage: Option<Use>) {
        self.write(batch, contents, usage, None, None, vec![Stored::Stored; contents.len()]);
    }

    /// The same in the place of what is there, in all these databases.
    pub(in crate::mover) fn overwrite(
        &mut self,
        batch: BatchId,
        contents: &[(&Key, &[Content])],
        usage: Option<Use>,
        databases: &[u32],
    ) {
        self.write(batch, contents, usage, None, Some(databases), vec![Stored::Stored; contents.len()]);
    }

    /// Of what was to be stored together something was there: these, by place and database, one by one. `so_far` is
    /// known of the others.
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
        usage: Option<Use>,
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
                    continue; // a staged one is finished afterwards
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
                    args.push(if usage == Use::Frequency { b"FREQ" } else { b"IDLETIME" });
                    args.push(scratch.1.as_bytes());
                }
                connection.push(&args);
            }
            places.extend(together.push(connection, database));
        }
        let replies = places.len();
        self.send(NodeRequest::Store { batch, places, so_far, over: over.is_some() }, replies);
    }

    /// Does a step of finishing what is staged.
    pub(in crate::mover) fn finish(
        &mut self,
        batch: BatchId,
        step: Step,
        mut items: Vec<last_piece::Item>,
        lasts: &[&Last],
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

    /// Makes what was stored on this connection safe; replicas were asked so often before. False where it is as safe as
    /// that already.
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

    /// Asks it how many keys it has evicted. Whatever it answers, it is the process that it was.
    pub(in crate::mover) fn confirm(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.push(&[b"INFO", b"stats"]);
        self.send(NodeRequest::Confirm, 1);
    }

    /// Asks how far its replication stream is, behind all that was asked before. False where there is no connection.
    pub(in crate::mover) fn query_position(&mut self) -> bool {
        let Some(connection) = &mut self.connection else { return false };
        connection.push(&[b"INFO", b"replication"]);
        self.send(NodeRequest::Position, 1);
        true
    }

    /// How many replies there will be; `None`: there is no connection, so nothing is asked.
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

    /// Removes keys, of all these databases.
    pub(in crate::mover) fn remove(&mut self, batch: BatchId, keys: &[Key], databases: &[u32]) {
        // The loss of a connection is heard of behind what came before it. A job that awaits no reply would be done as
        // soon as there is another.
        if let Some(replies) = self.unlink(keys, databases) {
            self.send(NodeRequest::Remove { batch }, replies);
        }
    }

    /// Has the node migrate keys itself to where `access` leads.
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

    /// Removes keys of a database that should not be there.
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

    /// Asks how much the node has worked.
    pub(in crate::mover) fn look(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.push(&[b"INFO", b"cpu"]);
        self.send(NodeRequest::Look, 1);
    }

    /// Asks for the sizes of keys.
    pub(in crate::mover) fn query_sizes(&mut self, page: Page) {
        let Some(connection) = &mut self.connection else { return };
        let selected = page.request(connection);
        let replies = page.len() + usize::from(selected);
        self.send(NodeRequest::Sizes { page, selected }, replies);
    }

    /// What of a processor the thread that executes commands has used since it last said so: a share, or `None` at
    /// first.
    pub(in crate::mover) fn worked(&mut self, answers: &[Vec<u8>]) -> Option<f64> {
        let info = String::from_utf8_lossy(reply::text(answers.first()?)?).into_owned();
        let seconds = |name: &str| field(&info, name)?.parse::<f64>().ok();
        // Before 6.2 there is only the sum over all threads.
        let main = seconds("used_cpu_user_main_thread").zip(seconds("used_cpu_sys_main_thread"));
        let (user, system) = main.or_else(|| seconds("used_cpu_user").zip(seconds("used_cpu_sys")))?;
        let now = (user + system, Instant::now());
        let before = self.work.replace(now)?;
        let elapsed = now.1.duration_since(before.1).as_secs_f64();
        // Less than before is another process.
        (elapsed > 0.05 && now.0 >= before.0).then(|| (now.0 - before.0) / elapsed)
    }

    /// The databases that have keys.
    pub(in crate::mover) fn databases(&mut self, patience: Duration) -> Result<Databases, String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        // Who asks goes on with what is lost, and looks here again when it is back.
        let info = connection.info("keyspace", patience).inspect_err(|why| connection.give_up(why.clone()))?;
        let database = |line: &str| {
            let (number, counts) = line.strip_prefix("db")?.split_once(':')?;
            // Not told is not none.
            let expires = counts
                .split(',')
                .find_map(|count| count.strip_prefix("expires="))
                .is_none_or(|count| count.trim() != "0");
            Some((number.parse().ok()?, expires))
        };
        Ok(info.lines().filter_map(database).collect())
    }

    /// Learns how the node evicts, syncs, and whether it tells of changes.
    pub(in crate::mover) fn learn(&mut self, patience: Duration) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        let memory = connection.info("memory", patience)?;
        self.policy = field(&memory, "maxmemory_policy").unwrap_or_default().to_owned();
        let setting = |answer: &[u8]| {
            String::from_utf8_lossy(reply::elements(answer).nth(1).and_then(reply::text).unwrap_or_default())
                .into_owned()
        };
        // Where CONFIG is refused, WAITAOF decides.
        let fsync = connection.call(&[b"CONFIG", b"GET", b"appendfsync"], patience)?;
        let aof = connection.call(&[b"CONFIG", b"GET", b"appendonly"], patience)?;
        let events = connection.call(&[b"CONFIG", b"GET", b"notify-keyspace-events"], patience)?;
        self.notifies_changes = reply::is_error(&events) || !setting(&events).is_empty();
        self.always_synced = setting(&fsync) == "always" && setting(&aof) == "yes";
        Ok(())
    }
}

/// Strings without an end, on their way into one command.
#[derive(Default)]
struct Together<'c> {
    places: Vec<usize>,
    args: Vec<&'c [u8]>,
    bytes: usize,
    /// In the place of what is there.
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

    /// Asks for what has been collected.
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

/// Stores a string where there is none, or in the place of what is there.
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
    fn without_a_connection_nothing_is_asked_that_would_be_done_when_there_is_another() {
        let mut end = SideConnection::new(NodeId(0), Arc::default());
        let keys = [Key::from(&b"a"[..])];
        end.remove(BatchId(0), &keys, &[0]);
        end.purge(0, &keys, 0);
        end.discard(vec![(0, b"a".to_vec())]);
        end.scan(0, 0, b"0");
        end.look();
        assert!(end.is_idle() && !end.query_position());
    }
}
