//! A node as the protocol knows it: keys with times to live, processes that die and come back with what their disk
//! kept, and commands that are executed one after the other in the order in which each connection delivers them.
//!
//! Values are lists of numbers, whatever the command: a register has one, a counter's is counted up, `RPUSH` adds one.
//! A hash is a list, too, of numbers that say so and have the field in them ([`part`]). So the checker has one model
//! for all.

use std::collections::BTreeMap;

use switchyard_policy::migration::staging::Renamed;

/// A key, by its number.
pub type KeyIx = usize;

/// Keys from this number on are staging keys.
pub const STAGING: KeyIx = 1_000_000;

/// How long a staging key lives without being written to, microseconds.
const STAGING_LIFE_US: u64 = 150_000;

const IS_PART: u32 = 1 << 31;

/// A field of a hash with its value, as a number of a list.
#[must_use]
pub const fn part(field: u32, value: u32) -> u32 {
    IS_PART | field << 24 | value & 0x00ff_ffff
}

/// The field of a part.
#[must_use]
pub const fn field_of(part: u32) -> u32 {
    (part & !IS_PART) >> 24
}

/// Whether a value is a hash.
#[must_use]
pub fn is_hash(value: &[u32]) -> bool {
    value.first().is_some_and(|first| first & IS_PART != 0)
}

/// Gives a hash a field. True where it is new.
pub fn put(value: &mut Vec<u32>, new: u32) -> bool {
    match value.iter().position(|old| field_of(*old) >= field_of(new)) {
        Some(at) if field_of(value[at]) == field_of(new) => {
            value[at] = new;
            false
        }
        Some(at) => {
            value.insert(at, new);
            true
        }
        None => {
            value.push(new);
            true
        }
    }
}

/// What a key holds.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// Its value.
    pub value: Vec<u32>,
    /// When it ends, microseconds.
    pub expires_us: Option<u64>,
}

/// All keys of a node.
pub type Keys = BTreeMap<KeyIx, Entry>;

/// What a node keeps when it is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Persistence {
    /// Everything answered (`appendfsync always`).
    Always,
    /// What was there at the last snapshot.
    Snapshots,
}

/// What a client asks of one key or several.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// GET
    Get(KeyIx),
    /// SET, with a time to live in microseconds
    Set(KeyIx, u32, Option<u64>),
    /// INCR
    Incr(KeyIx),
    /// DEL
    Del(KeyIx),
    /// RPUSH
    Push(KeyIx, u32),
    /// BLPOP without end
    Pop(KeyIx),
    /// HSET of one field
    Put(KeyIx, u32, u32),
    /// HDEL of one field
    Cut(KeyIx, u32),
    /// PEXPIRE, in microseconds
    Expire(KeyIx, u64),
    /// MGET, MSET, or MULTI ... EXEC
    Several(Vec<Op>),
    /// A script that the node may not have yet.
    Script(Box<Op>),
    /// A function that names this key and uses another.
    Function(KeyIx, Box<Op>),
    /// FLUSHALL
    Flush,
    /// WATCH
    Watch(KeyIx),
    /// MULTI, SET, EXEC of who watches the key.
    Exec(KeyIx, Watched),
    /// RENAME; the number tells it from others.
    Rename(KeyIx, KeyIx, u32),
}

/// What a client relies on that watches a key, and what it makes of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Watched {
    /// When it was told that the key is watched, microseconds.
    pub since_us: u64,
    /// What it has read since.
    pub seen: Option<Vec<u32>>,
    /// What it writes.
    pub value: u32,
}

impl Op {
    /// Which fields of which keys it may change; `None`: anything of the key. As `switchyard_resp` has it of the real
    /// commands.
    pub fn touches(&self, out: &mut Vec<(KeyIx, Option<Vec<u32>>)>) {
        match self {
            Self::Get(_) | Self::Watch(_) | Self::Expire(..) | Self::Flush => {}
            Self::Put(key, field, _) | Self::Cut(key, field) => out.push((*key, Some(vec![*field]))),
            Self::Several(ops) => ops.iter().for_each(|op| op.touches(out)),
            Self::Script(op) if op.is_read() => {}
            _ => {
                let mut keys = Vec::new();
                self.keys(&mut keys);
                out.extend(keys.into_iter().map(|key| (key, None)));
            }
        }
    }

    /// The keys that it names.
    pub fn keys(&self, out: &mut Vec<KeyIx>) {
        match self {
            Self::Get(key)
            | Self::Set(key, ..)
            | Self::Incr(key)
            | Self::Del(key)
            | Self::Push(key, _)
            | Self::Pop(key)
            | Self::Put(key, ..)
            | Self::Cut(key, _)
            | Self::Expire(key, _)
            | Self::Watch(key)
            | Self::Exec(key, _)
            | Self::Function(key, _) => out.push(*key),
            Self::Rename(from, to, _) => out.extend([*from, *to]),
            Self::Several(ops) => ops.iter().for_each(|op| op.keys(out)),
            Self::Script(op) => op.keys(out),
            Self::Flush => {}
        }
    }

    /// The keys that it uses.
    pub fn uses(&self, out: &mut Vec<KeyIx>) {
        match self {
            Self::Function(_, op) => op.keys(out),
            _ => self.keys(out),
        }
    }

    /// Whether it may use other keys than it names.
    #[must_use]
    pub const fn uses_undeclared(&self) -> bool {
        matches!(self, Self::Function(..))
    }

    /// Whether it changes nothing.
    #[must_use]
    pub fn is_read(&self) -> bool {
        match self {
            Self::Get(_) | Self::Watch(_) => true,
            Self::Several(ops) => ops.iter().all(Self::is_read),
            Self::Script(op) | Self::Function(_, op) => op.is_read(),
            _ => false,
        }
    }
}

/// What is sent to a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cmd {
    /// The handshake: tells the process and the connection's number.
    Hello,
    /// CLIENT KILL ID
    Kill(Vec<u64>),
    /// CLIENT KILL of all connections of routers before this one, found by their names
    KillOlder(u32),
    /// CLIENT UNBLOCK id ERROR
    Unblock(u64),
    /// A client's.
    Client(Op),
    /// The same after SCRIPT LOAD.
    Loaded(Op),
    /// SCAN: keys from this number on, so many, up to this one.
    Scan(KeyIx, usize, KeyIx),
    /// DUMP and PEXPIRETIME
    Dump(KeyIx),
    /// RESTORE ABSTTL
    Restore(KeyIx, Entry),
    /// RESTORE ABSTTL REPLACE
    Replace(KeyIx, Entry),
    /// UNLINK
    Unlink(KeyIx),
    /// PTTL
    Pttl(KeyIx),
    /// PING
    Ping,
    /// WAITAOF 1 0
    WaitAof,
    /// MIGRATE to the other node.
    Migrate(Vec<KeyIx>),
    /// TYPE, and HLEN or LLEN
    Look(KeyIx),
    /// HSCAN or LRANGE: of a hash or a list, from here on, so many.
    Piece(KeyIx, bool, u32, u32),
    /// HMGET
    Fields(KeyIx, Vec<u32>),
    /// PEXPIRETIME, HLEN or LLEN, HMGET
    Tail(KeyIx, bool, Vec<u32>),
    /// Writes a piece to a staging key, which is new or is not; in one transaction.
    Stage(KeyIx, bool, Elements),
    /// Writes the last piece to a staging key, and counts: EXISTS of the key first; in one transaction.
    Count(KeyIx, KeyIx, Elements),
    /// PEXPIREAT or PERSIST, and RENAMENX; in one transaction.
    Rename(KeyIx, KeyIx, Option<u64>),
}

/// Elements of a hash, or of a list, to be written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Elements {
    /// Parts to be there, or elements to be added.
    pub there: Vec<u32>,
    /// Fields not to be there.
    pub gone: Vec<u32>,
}

impl Elements {
    /// Whether there is nothing to be written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.there.is_empty() && self.gone.is_empty()
    }
}

/// What it answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// The process (by its number) and the connection's number.
    Hello(u32, u64),
    /// +OK
    Ok,
    /// A value or nil.
    Value(Option<Vec<u32>>),
    /// A number.
    Number(i64),
    /// Several.
    Several(Vec<Reply>),
    /// Keys, and where to go on.
    Scanned(Vec<KeyIx>, Option<KeyIx>),
    /// A value or nil, with its end.
    Dumped(Option<Entry>),
    /// -BUSYKEY
    BusyKey,
    /// -OOM
    Oom,
    /// -NOSCRIPT
    NoScript,
    /// -UNBLOCKED
    Unblocked,
    /// Whether it is a hash, and how many elements it has, if it is there.
    Looked(Option<(bool, usize)>),
    /// Elements, and where to go on.
    Piece(Vec<u32>, Option<u32>),
    /// Fields as they are.
    Fields(Vec<Option<u32>>),
    /// If it is there: when it ends, its elements, and fields as they are.
    Tail(Option<(Option<u64>, usize, Vec<Option<u32>>)>),
    /// Whether the staging key was there.
    Staged(bool),
    /// Whether the key was there, whether the staging key was, and how many elements that has.
    Counted(bool, bool, usize),
    /// What came of it.
    Renamed(Renamed),
    /// -WRONGTYPE or the like: nothing was done.
    Error,
}

/// A key that a connection watches.
#[derive(Debug)]
struct Watch {
    conn: u32,
    key: KeyIx,
    /// What it was when last looked at.
    entry: Option<Entry>,
    /// It was changed.
    dirty: bool,
}

/// The model of a node.
#[derive(Debug)]
pub struct Node {
    /// Which process runs, or ran last.
    pub process: u32,
    /// Whether one runs.
    pub up: bool,
    /// It is stopped (SIGSTOP).
    pub stopped: bool,
    /// It refuses what needs memory.
    pub full: bool,
    /// Its clock is ahead by so much.
    pub ahead_us: u64,
    /// What it has.
    pub keys: Keys,
    /// What its disk has.
    pub disk: Keys,
    /// What it keeps.
    pub persistence: Persistence,
    /// It has been told the script.
    pub script: bool,
    /// Connections that wait in BLPOP: connection, request, key; oldest first.
    pub blocked: Vec<(u32, u64, KeyIx)>,
    /// Keys that are watched.
    watches: Vec<Watch>,
    /// The number of the next connection.
    pub next_client: u64,
}

/// Most elements that INCR works on.
const ONE: usize = 1;

impl Node {
    /// An empty one.
    #[must_use]
    pub fn new(persistence: Persistence, process: u32) -> Self {
        Self {
            process,
            up: true,
            stopped: false,
            full: false,
            ahead_us: 0,
            keys: Keys::new(),
            disk: Keys::new(),
            persistence,
            script: false,
            blocked: Vec::new(),
            watches: Vec::new(),
            next_client: 1,
        }
    }

    /// kill -9
    pub fn kill(&mut self) {
        self.up = false;
        self.stopped = false;
        self.blocked.clear();
        self.watches.clear();
        self.script = false;
        if self.persistence == Persistence::Always {
            self.disk = std::mem::take(&mut self.keys);
        } else {
            self.keys.clear();
        }
    }

    /// The next process, with what the disk kept.
    pub fn start(&mut self, process: u32, now_us: u64) {
        self.up = true;
        self.process = process;
        self.keys = self.disk.clone();
        self.expire(now_us);
        // Numbers begin anew: those of an earlier process say nothing.
        self.next_client = 1;
    }

    /// Keys whose time is over are gone.
    pub fn expire(&mut self, now_us: u64) {
        self.keys.retain(|_, entry| entry.expires_us.is_none_or(|end| end > now_us));
    }

    /// A client's command, executed. `None`: it waits.
    pub fn execute(&mut self, op: &Op, now_us: u64) -> Option<Reply> {
        let reply = match op {
            Op::Get(key) => Reply::Value(self.keys.get(key).map(|entry| entry.value.clone())),
            Op::Set(..) | Op::Incr(_) | Op::Push(..) | Op::Put(..) if self.full => Reply::Oom,
            Op::Set(key, value, ttl_us) => {
                let expires_us = ttl_us.map(|ttl| now_us + ttl);
                self.keys.insert(*key, Entry { value: vec![*value], expires_us });
                Reply::Ok
            }
            Op::Incr(key) => {
                let entry = self.keys.entry(*key).or_insert(Entry { value: vec![0], expires_us: None });
                if entry.value.len() == ONE && !is_hash(&entry.value) {
                    entry.value[0] += 1;
                    Reply::Number(entry.value[0].into())
                } else {
                    Reply::Error
                }
            }
            Op::Del(key) => Reply::Number(self.keys.remove(key).is_some().into()),
            Op::Push(key, value) => {
                let entry = self.keys.entry(*key).or_insert(Entry { value: Vec::new(), expires_us: None });
                if is_hash(&entry.value) {
                    return Some(Reply::Error);
                }
                entry.value.push(*value);
                Reply::Number(entry.value.len() as i64)
            }
            Op::Put(key, field, value) => {
                let entry = self.keys.entry(*key).or_insert(Entry { value: Vec::new(), expires_us: None });
                if !entry.value.is_empty() && !is_hash(&entry.value) {
                    return Some(Reply::Error);
                }
                Reply::Number(put(&mut entry.value, part(*field, *value)).into())
            }
            Op::Cut(key, field) => {
                let Some(entry) = self.keys.get_mut(key) else { return Some(Reply::Number(0)) };
                if !is_hash(&entry.value) {
                    return Some(Reply::Error);
                }
                let before = entry.value.len();
                entry.value.retain(|part| field_of(*part) != *field);
                let left = entry.value.len();
                if left == 0 {
                    self.keys.remove(key);
                }
                Reply::Number((before - left) as i64)
            }
            Op::Expire(key, ttl_us) => match self.keys.get_mut(key) {
                Some(entry) => {
                    entry.expires_us = Some(now_us + ttl_us);
                    Reply::Number(1)
                }
                None => Reply::Number(0),
            },
            Op::Pop(key) => {
                let entry = self.keys.get_mut(key)?;
                if is_hash(&entry.value) {
                    return Some(Reply::Error);
                }
                let first = entry.value.remove(0);
                if entry.value.is_empty() {
                    self.keys.remove(key);
                }
                Reply::Value(Some(vec![first]))
            }
            // What waits does not wait in a transaction.
            Op::Several(ops) => {
                if self.full && !op.is_read() {
                    return Some(Reply::Oom);
                }
                Reply::Several(ops.iter().map(|op| self.execute(op, now_us).unwrap_or(Reply::Value(None))).collect())
            }
            Op::Function(_, op) => return self.execute(op, now_us),
            Op::Script(op) => return if self.script { self.execute(op, now_us) } else { Some(Reply::NoScript) },
            Op::Flush => {
                self.keys.clear();
                Reply::Ok
            }
            Op::Rename(from, to, _) => match self.keys.remove(from) {
                Some(entry) => {
                    self.keys.insert(*to, entry.clone());
                    Reply::Dumped(Some(entry))
                }
                None => Reply::Error,
            },
            // Without the watch: see `watched`.
            Op::Watch(_) => Reply::Ok,
            Op::Exec(key, watched) => return self.execute(&Op::Set(*key, watched.value, None), now_us),
        };
        Some(reply)
    }

    /// PTTL
    #[must_use]
    pub fn pttl(&self, key: KeyIx, now_us: u64) -> i64 {
        match self.keys.get(&key) {
            Some(Entry { expires_us: Some(end), .. }) => end.saturating_sub(now_us).div_ceil(1_000) as i64,
            Some(_) => -1,
            None => -2,
        }
    }

    /// WATCH, or EXEC of a connection that watches. `None`: it is neither.
    pub fn execute_watched(&mut self, conn: u32, op: &Op, now_us: u64) -> Option<Reply> {
        match op {
            Op::Watch(key) => {
                let entry = self.keys.get(key).cloned();
                self.watches.push(Watch { conn, key: *key, entry, dirty: false });
                Some(Reply::Ok)
            }
            Op::Exec(..) => {
                let dirty = self
                    .watches
                    .extract_if(.., |watch| watch.conn == conn)
                    .fold(false, |dirty, watch| dirty | watch.dirty);
                if dirty { Some(Reply::Value(None)) } else { self.execute(op, now_us) }
            }
            _ => None,
        }
    }

    /// Watches of keys that are others now become dirty, and those of `named`, which a command may have changed and
    /// changed back.
    pub fn touch(&mut self, named: &[KeyIx]) {
        let keys = &self.keys;
        for watch in self.watches.iter_mut().filter(|watch| !watch.dirty) {
            watch.dirty = named.contains(&watch.key) || watch.entry.as_ref() != keys.get(&watch.key);
        }
    }

    /// RESTORE
    pub fn restore(&mut self, key: KeyIx, entry: Entry, replace: bool, now_us: u64) -> Reply {
        if self.full {
            return Reply::Oom;
        }
        if !replace && self.keys.contains_key(&key) {
            return Reply::BusyKey;
        }
        if entry.expires_us.is_none_or(|end| end > now_us) {
            self.keys.insert(key, entry);
        } else {
            self.keys.remove(&key);
        }
        Reply::Ok
    }

    /// SCAN: keys that are there from its beginning to its end are shown, others may be.
    #[must_use]
    pub fn scan(&self, from: KeyIx, count: usize, end: KeyIx) -> Reply {
        // Whoever asks passes over staging keys.
        let keys: Vec<KeyIx> = self.keys.range(from..end.min(from + count)).map(|(key, _)| *key).collect();
        let next = self.keys.range((from + count).min(end)..end).next().map(|_| from + count);
        Reply::Scanned(keys, next)
    }

    /// What is asked for copying in pieces. `None`: it is something else.
    pub fn in_pieces(&mut self, cmd: &Cmd, now_us: u64) -> Option<Reply> {
        Some(match cmd {
            Cmd::Look(key) => Reply::Looked(self.keys.get(key).map(|entry| (is_hash(&entry.value), entry.value.len()))),
            Cmd::Piece(key, of_hash, from, count) => {
                let value = self.keys.get(key).map(|entry| entry.value.as_slice()).unwrap_or_default();
                if !value.is_empty() && is_hash(value) != *of_hash {
                    return Some(Reply::Error);
                }
                let end = from + count;
                if *of_hash {
                    let piece = value.iter().copied().filter(|part| (*from..end).contains(&field_of(*part))).collect();
                    Reply::Piece(piece, value.iter().any(|part| field_of(*part) >= end).then_some(end))
                } else {
                    let piece: Vec<u32> = value.iter().copied().skip(*from as usize).take(*count as usize).collect();
                    let next = (piece.len() == *count as usize).then_some(end);
                    Reply::Piece(piece, next)
                }
            }
            Cmd::Fields(key, fields) => match self.fields(*key, fields) {
                Some(fields) => Reply::Fields(fields),
                None => Reply::Error,
            },
            Cmd::Tail(key, of_hash, fields) => {
                let Some(entry) = self.keys.get(key) else { return Some(Reply::Tail(None)) };
                let fields = if fields.is_empty() { Some(Vec::new()) } else { self.fields(*key, fields) };
                match fields.filter(|_| is_hash(&entry.value) == *of_hash) {
                    Some(fields) => Reply::Tail(Some((entry.expires_us, entry.value.len(), fields))),
                    None => Reply::Error,
                }
            }
            Cmd::Stage(..) | Cmd::Count(..) if self.full => Reply::Oom,
            Cmd::Stage(name, afresh, elements) => {
                if *afresh {
                    self.keys.remove(name);
                }
                let was_there = self.keys.contains_key(name);
                self.write_staged(*name, elements, now_us);
                Reply::Staged(was_there)
            }
            Cmd::Count(name, key, elements) => {
                let (key_was_there, was_there) = (self.keys.contains_key(key), self.keys.contains_key(name));
                self.write_staged(*name, elements, now_us);
                Reply::Counted(key_was_there, was_there, self.keys.get(name).map_or(0, |entry| entry.value.len()))
            }
            Cmd::Rename(name, key, expires_us) => Reply::Renamed(match self.keys.remove(name) {
                None => Renamed::Gone,
                Some(_) if expires_us.is_some_and(|end| end <= now_us) => Renamed::TimeIsOver,
                Some(entry) => {
                    let is_there = self.keys.contains_key(key);
                    let (name, expires_us) =
                        if is_there { (*name, Some(now_us + STAGING_LIFE_US)) } else { (*key, *expires_us) };
                    self.keys.insert(name, Entry { expires_us, ..entry });
                    if is_there { Renamed::KeyIsThere } else { Renamed::Yes }
                }
            }),
            _ => return None,
        })
    }

    /// `None`: it is no hash.
    fn fields(&self, key: KeyIx, fields: &[u32]) -> Option<Vec<Option<u32>>> {
        let value = self.keys.get(&key).map(|entry| entry.value.as_slice()).unwrap_or_default();
        let of = |field: &u32| value.iter().copied().find(|part| field_of(*part) == *field);
        (value.is_empty() || is_hash(value)).then(|| fields.iter().map(of).collect())
    }

    fn write_staged(&mut self, name: KeyIx, elements: &Elements, now_us: u64) {
        let entry = self.keys.entry(name).or_insert(Entry { value: Vec::new(), expires_us: None });
        for element in &elements.there {
            if is_hash(&[*element]) {
                put(&mut entry.value, *element);
            } else {
                entry.value.push(*element);
            }
        }
        entry.value.retain(|part| !is_hash(&[*part]) || !elements.gone.contains(&field_of(*part)));
        entry.expires_us = Some(now_us + STAGING_LIFE_US);
        if entry.value.is_empty() {
            self.keys.remove(&name);
        }
    }

    /// The first connection that waits for this key, and what it gets.
    pub fn wake(&mut self, key: KeyIx, now_us: u64) -> Option<(u32, u64, Reply)> {
        let at = self.blocked.iter().position(|(_, _, waits_for)| *waits_for == key)?;
        let reply = self.execute(&Op::Pop(key), now_us)?;
        let (conn, request, _) = self.blocked.remove(at);
        Some((conn, request, reply))
    }
}
