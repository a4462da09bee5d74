//! A node as the protocol knows it: keys with times to live, processes that die and come back with what their disk kept, and commands that are
//! executed one after the other in the order in which each connection delivers them.
//!
//! Values are lists of numbers, whatever the command: a register has one, a counter's is counted up, `RPUSH` adds one. So every command has a
//! meaning for every key, and the checker has one model for all.

use std::collections::BTreeMap;

/// A key, by its number.
pub type KeyIx = usize;

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
    /// MGET, MSET, or MULTI ... EXEC
    Several(Vec<Op>),
    /// A script that the node may not have yet.
    Script(Box<Op>),
    /// FLUSHALL
    Flush,
    /// WATCH
    Watch(KeyIx),
    /// MULTI, SET, EXEC of who watches the key.
    Exec(KeyIx, Watched),
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
    /// Its keys.
    pub fn keys(&self, out: &mut Vec<KeyIx>) {
        match self {
            Self::Get(key)
            | Self::Set(key, ..)
            | Self::Incr(key)
            | Self::Del(key)
            | Self::Push(key, _)
            | Self::Pop(key)
            | Self::Watch(key)
            | Self::Exec(key, _) => out.push(*key),
            Self::Several(ops) => ops.iter().for_each(|op| op.keys(out)),
            Self::Script(op) => op.keys(out),
            Self::Flush => {}
        }
    }

    /// Whether it changes nothing.
    #[must_use]
    pub fn is_read(&self) -> bool {
        match self {
            Self::Get(_) | Self::Watch(_) => true,
            Self::Several(ops) => ops.iter().all(Self::is_read),
            Self::Script(op) => op.is_read(),
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
    /// SCAN: keys from this number on, so many.
    Scan(KeyIx, usize),
    /// DUMP and PEXPIRETIME
    Dump(KeyIx),
    /// RESTORE ABSTTL
    Restore(KeyIx, Entry),
    /// RESTORE ABSTTL REPLACE
    Replace(KeyIx, Entry),
    /// UNLINK
    Unlink(KeyIx),
    /// WAITAOF 1 0
    WaitAof,
    /// MIGRATE to the other node.
    Migrate(Vec<KeyIx>),
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
            Op::Set(..) | Op::Incr(_) | Op::Push(..) if self.full => Reply::Oom,
            Op::Set(key, value, ttl_us) => {
                let expires_us = ttl_us.map(|ttl| now_us + ttl);
                self.keys.insert(*key, Entry { value: vec![*value], expires_us });
                Reply::Ok
            }
            Op::Incr(key) => {
                let entry = self.keys.entry(*key).or_insert(Entry { value: vec![0], expires_us: None });
                if entry.value.len() == ONE {
                    entry.value[0] += 1;
                    Reply::Number(entry.value[0].into())
                } else {
                    Reply::Error
                }
            }
            Op::Del(key) => Reply::Number(self.keys.remove(key).is_some().into()),
            Op::Push(key, value) => {
                let entry = self.keys.entry(*key).or_insert(Entry { value: Vec::new(), expires_us: None });
                entry.value.push(*value);
                Reply::Number(entry.value.len() as i64)
            }
            Op::Pop(key) => {
                let entry = self.keys.get_mut(key)?;
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
            Op::Script(op) => return if self.script { self.execute(op, now_us) } else { Some(Reply::NoScript) },
            Op::Flush => {
                self.keys.clear();
                Reply::Ok
            }
            // Without the watch: see `watched`.
            Op::Watch(_) => Reply::Ok,
            Op::Exec(key, watched) => return self.execute(&Op::Set(*key, watched.value, None), now_us),
        };
        Some(reply)
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
                let dirty = self.watches.extract_if(.., |watch| watch.conn == conn).fold(false, |dirty, watch| dirty | watch.dirty);
                if dirty { Some(Reply::Value(None)) } else { self.execute(op, now_us) }
            }
            _ => None,
        }
    }

    /// Watches of keys that are others now become dirty, and those of `named`, which a command may have changed and changed back.
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
    pub fn scan(&self, from: KeyIx, count: usize) -> Reply {
        let keys: Vec<KeyIx> = self.keys.range(from..from + count).map(|(key, _)| *key).collect();
        let next = self.keys.range(from + count..).next().map(|_| from + count);
        Reply::Scanned(keys, next)
    }

    /// The first connection that waits for this key, and what it gets.
    pub fn wake(&mut self, key: KeyIx, now_us: u64) -> Option<(u32, u64, Reply)> {
        let at = self.blocked.iter().position(|(_, _, waits_for)| *waits_for == key)?;
        let reply = self.execute(&Op::Pop(key), now_us)?;
        let (conn, request, _) = self.blocked.remove(at);
        Some((conn, request, reply))
    }
}
