//! Model of a node: keys with expiry, processes that die and return with the state of their disk, and commands executed
//! one at a time, in the order of each connection.
//!
//! Every value is a list of numbers: a register and a counter have one, `RPUSH` appends one. A hash is a sorted list of
//! tagged numbers with field and value ([`part`]). The checker therefore needs only one model.

use std::collections::BTreeMap;

use switchyard_policy::migration::staging::Renamed;

/// Index of a key.
pub type KeyIx = usize;

/// First index of staging keys.
pub const STAGING: KeyIx = 1_000_000;

/// Lifetime of a staging key after its last write, in microseconds.
const STAGING_LIFE_US: u64 = 150_000;

const IS_PART: u32 = 1 << 31;

/// Encodes a field of a hash and its value as a list element.
#[must_use]
pub const fn part(field: u32, value: u32) -> u32 {
    IS_PART | field << 24 | value & 0x00ff_ffff
}

/// Returns the field of a [`part`].
#[must_use]
pub const fn field_of(part: u32) -> u32 {
    (part & !IS_PART) >> 24
}

/// Whether a value is a hash.
#[must_use]
pub fn is_hash(value: &[u32]) -> bool {
    value.first().is_some_and(|first| first & IS_PART != 0)
}

/// Sets a field of a hash. Returns whether the field is new.
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

/// Value and expiry of a key.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// List elements; see the module documentation.
    pub value: Vec<u32>,
    /// Expiry by the node's clock, in microseconds.
    pub expires_us: Option<u64>,
}

/// All keys of a node.
pub type Keys = BTreeMap<KeyIx, Entry>;

/// Data that survives a kill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Persistence {
    /// Every acknowledged write (`appendfsync always`).
    Always,
    /// The last snapshot.
    Snapshots,
}

/// A client's command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// GET.
    Get(KeyIx),
    /// SET, with a time to live in microseconds.
    Set(KeyIx, u32, Option<u64>),
    /// INCR.
    Incr(KeyIx),
    /// DEL.
    Del(KeyIx),
    /// RPUSH.
    Push(KeyIx, u32),
    /// BLPOP without timeout.
    Pop(KeyIx),
    /// HSET of one field.
    Put(KeyIx, u32, u32),
    /// HDEL of one field.
    Cut(KeyIx, u32),
    /// PEXPIRE, in microseconds.
    Expire(KeyIx, u64),
    /// MGET, MSET, or MULTI ... EXEC.
    Several(Vec<Op>),
    /// A script that the node may not have yet.
    Script(Box<Op>),
    /// A function that names this key and uses another.
    Function(KeyIx, Box<Op>),
    /// FLUSHALL.
    Flush,
    /// WATCH.
    Watch(KeyIx),
    /// MULTI, SET, EXEC of a client that watches the key.
    Exec(KeyIx, Watched),
    /// RENAME, with a unique number.
    Rename(KeyIx, KeyIx, u32),
}

/// Assumption of a client that watches a key, and its write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Watched {
    /// Time at which the client received the reply to WATCH, in microseconds.
    pub since_us: u64,
    /// Value that the client has read since.
    pub seen: Option<Vec<u32>>,
    /// Value that EXEC writes.
    pub value: u32,
}

impl Op {
    /// Collects the keys that the command may change, with the fields; `None` stands for the whole key. Mirrors
    /// `switchyard_resp` for the real commands.
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

    /// Collects the declared keys.
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

    /// Collects the keys that the command really uses.
    pub fn uses(&self, out: &mut Vec<KeyIx>) {
        match self {
            Self::Function(_, op) => op.keys(out),
            _ => self.keys(out),
        }
    }

    /// Whether the command may use undeclared keys.
    #[must_use]
    pub const fn uses_undeclared(&self) -> bool {
        matches!(self, Self::Function(..))
    }

    /// Whether the command changes nothing.
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

/// A request to a node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Cmd {
    /// Handshake: returns the process and the connection's client id.
    Hello,
    /// CLIENT KILL ID.
    Kill(Vec<u64>),
    /// CLIENT KILL of all connections of earlier routers, found by name.
    KillOlder(u32),
    /// CLIENT UNBLOCK id ERROR.
    Unblock(u64),
    /// A client's command.
    Client(Op),
    /// A client's command after SCRIPT LOAD.
    Loaded(Op),
    /// SCAN: first key, maximum number of keys, end (excluded).
    Scan(KeyIx, usize, KeyIx),
    /// DUMP and PEXPIRETIME.
    Dump(KeyIx),
    /// RESTORE ABSTTL.
    Restore(KeyIx, Entry),
    /// RESTORE ABSTTL REPLACE.
    Replace(KeyIx, Entry),
    /// UNLINK.
    Unlink(KeyIx),
    /// PTTL.
    Pttl(KeyIx),
    /// PING.
    Ping,
    /// WAITAOF 1 0.
    WaitAof,
    /// MIGRATE to the other node.
    Migrate(Vec<KeyIx>),
    /// TYPE, and HLEN or LLEN.
    Look(KeyIx),
    /// HSCAN or LRANGE: key, whether it is a hash, first element, maximum number of elements.
    Piece(KeyIx, bool, u32, u32),
    /// HMGET.
    Fields(KeyIx, Vec<u32>),
    /// PEXPIRETIME, HLEN or LLEN, HMGET.
    Tail(KeyIx, bool, Vec<u32>),
    /// Writes a piece to a staging key, after deleting it if the flag is set, in one transaction.
    Stage(KeyIx, bool, Elements),
    /// EXISTS of the key, write of the last piece to the staging key, and its length, in one transaction.
    Count(KeyIx, KeyIx, Elements),
    /// PEXPIREAT or PERSIST, and RENAMENX, in one transaction.
    Rename(KeyIx, KeyIx, Option<u64>),
}

/// Elements of a hash or a list to write.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Elements {
    /// Hash parts to set, or list elements to append.
    pub there: Vec<u32>,
    /// Fields to delete.
    pub gone: Vec<u32>,
}

impl Elements {
    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.there.is_empty() && self.gone.is_empty()
    }
}

/// A node's reply.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reply {
    /// Process number and client id of the connection.
    Hello(u32, u64),
    /// +OK.
    Ok,
    /// A value or nil.
    Value(Option<Vec<u32>>),
    /// Integer reply.
    Number(i64),
    /// Replies of a compound command.
    Several(Vec<Reply>),
    /// Keys, and the cursor of the next call.
    Scanned(Vec<KeyIx>, Option<KeyIx>),
    /// A value or nil, with its expiry.
    Dumped(Option<Entry>),
    /// -BUSYKEY.
    BusyKey,
    /// -OOM.
    Oom,
    /// -NOSCRIPT.
    NoScript,
    /// -UNBLOCKED.
    Unblocked,
    /// Whether the key is a hash, and its number of elements; `None` if missing.
    Looked(Option<(bool, usize)>),
    /// Elements, and the cursor of the next call.
    Piece(Vec<u32>, Option<u32>),
    /// Current values of the fields.
    Fields(Vec<Option<u32>>),
    /// Expiry, number of elements, and current values of the fields; `None` if missing.
    Tail(Option<(Option<u64>, usize, Vec<Option<u32>>)>),
    /// Whether the staging key existed.
    Staged(bool),
    /// Whether the key existed, whether the staging key existed, and the length of the staging key.
    Counted(bool, bool, usize),
    /// Result of a staged rename.
    Renamed(Renamed),
    /// -WRONGTYPE or similar, without an effect.
    Error,
}

/// A key that a connection watches.
#[derive(Debug)]
struct Watch {
    conn: u32,
    key: KeyIx,
    /// Last seen state.
    entry: Option<Entry>,
    /// Changed since WATCH.
    dirty: bool,
}

/// Model of a node.
#[derive(Debug)]
pub struct Node {
    /// Number of the current or last process.
    pub process: u32,
    /// Whether a process runs.
    pub up: bool,
    /// Stopped by SIGSTOP.
    pub stopped: bool,
    /// Whether commands that need memory fail with OOM.
    pub full: bool,
    /// Offset of the clock, in microseconds.
    pub ahead_us: u64,
    /// Keys in memory.
    pub keys: Keys,
    /// Keys on disk.
    pub disk: Keys,
    /// Data that survives a kill.
    pub persistence: Persistence,
    /// Whether the script is loaded.
    pub script: bool,
    /// Connections blocked in BLPOP: connection, request, key; oldest first.
    pub blocked: Vec<(u32, u64, KeyIx)>,
    watches: Vec<Watch>,
    /// Client id of the next connection, unique within a process.
    pub next_client: u64,
}

/// Length of a value that INCR accepts.
const ONE: usize = 1;

impl Node {
    /// Creates an empty node.
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

    /// Kills the process, like `kill -9`.
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

    /// Starts the next process with the keys on disk.
    pub fn start(&mut self, process: u32, now_us: u64) {
        self.up = true;
        self.process = process;
        self.keys = self.disk.clone();
        self.expire(now_us);
        // Client ids restart with each process.
        self.next_client = 1;
    }

    /// Removes expired keys.
    pub fn expire(&mut self, now_us: u64) {
        self.keys.retain(|_, entry| entry.expires_us.is_none_or(|end| end > now_us));
    }

    /// Executes a client's command. `None` if it blocks.
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
            // Commands do not block in a transaction.
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
            // The watch itself is in `execute_watched`.
            Op::Watch(_) => Reply::Ok,
            Op::Exec(key, watched) => return self.execute(&Op::Set(*key, watched.value, None), now_us),
        };
        Some(reply)
    }

    /// Executes PTTL.
    #[must_use]
    pub fn pttl(&self, key: KeyIx, now_us: u64) -> i64 {
        match self.keys.get(&key) {
            Some(Entry { expires_us: Some(end), .. }) => end.saturating_sub(now_us).div_ceil(1_000) as i64,
            Some(_) => -1,
            None => -2,
        }
    }

    /// Executes WATCH, or EXEC of a connection that watches. `None` for other commands.
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

    /// Marks watches as dirty if their key has changed, or is in `named`: a command may have changed it and changed it
    /// back.
    pub fn touch(&mut self, named: &[KeyIx]) {
        let keys = &self.keys;
        for watch in self.watches.iter_mut().filter(|watch| !watch.dirty) {
            watch.dirty = named.contains(&watch.key) || watch.entry.as_ref() != keys.get(&watch.key);
        }
    }

    /// Executes RESTORE.
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

    /// Executes SCAN: returns at least the keys that exist during the whole iteration.
    #[must_use]
    pub fn scan(&self, from: KeyIx, count: usize, end: KeyIx) -> Reply {
        // Callers skip staging keys.
        let keys: Vec<KeyIx> = self.keys.range(from..end.min(from + count)).map(|(key, _)| *key).collect();
        let next = self.keys.range((from + count).min(end)..end).next().map(|_| from + count);
        Reply::Scanned(keys, next)
    }

    /// Executes a command for copies in pieces. `None` for other commands.
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
                Some(_) if expires_us.is_some_and(|end| end <= now_us) => Renamed::Expired,
                Some(entry) => {
                    let is_there = self.keys.contains_key(key);
                    let (name, expires_us) =
                        if is_there { (*name, Some(now_us + STAGING_LIFE_US)) } else { (*key, *expires_us) };
                    self.keys.insert(name, Entry { expires_us, ..entry });
                    if is_there { Renamed::KeyExists } else { Renamed::Yes }
                }
            }),
            _ => return None,
        })
    }

    /// Returns the values of fields; `None` if the key is not a hash.
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

    /// Executes BLPOP for the first connection that waits for the key. Returns the connection, request and reply.
    pub fn wake(&mut self, key: KeyIx, now_us: u64) -> Option<(u32, u64, Reply)> {
        let at = self.blocked.iter().position(|(_, _, waits_for)| *waits_for == key)?;
        let reply = self.execute(&Op::Pop(key), now_us)?;
        let (conn, request, _) = self.blocked.remove(at);
        Some((conn, request, reply))
    }
}
