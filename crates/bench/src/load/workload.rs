//! Requests of the load, and checks of the replies.
//!
//! Each connection has a script: the next request and its expected reply. In [`Sharing::Owned`] every key belongs to
//! one connection. Redis and the router execute a connection's commands for one key in order, so each reply is known
//! exactly, even within a pipeline. A write that is lost, repeated, reordered, or answered to another client causes a
//! wrong value. In [`Sharing::Shared`] connections compete for keys. A value must still have been written *to that key*
//! (values contain key and version), which detects exchanged replies but not lost writes.
//!
//! In [`Sharing::OneWriter`] one connection writes and the others read ([`super::board`]), which detects stale copies
//! at any reader.
//!
//! After an error reply or a lost connection, it is unknown whether and when the command was executed: [`super::doubt`]
//! tracks the possible states. Errors count as errors, and not additionally as wrong values.

use std::collections::HashMap;
use std::sync::Arc;

use switchyard_resp::encode::decimal;

use super::board::Board;
use super::doubt::{Doubt, Effect, Executed, States, may_be};
use super::mix::{LIST_LIMIT, MGET_KEYS, Mix, Op, ValueSizes};
use crate::random::{Popularity, Rng, mix};
use crate::wire::{self, Reply};

const HASH_FIELDS: u64 = 16;
const ZSET_MEMBERS: u64 = 32;

/// Assignment of keys to connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Each key belongs to one connection, so every reply is known exactly. Requires a key space that is empty at the
    /// start.
    Owned,
    /// All connections use all keys.
    Shared,
    /// The first connection writes all keys (SET), the others read them (GET), whatever the mix. A read must return a
    /// version at least as new as any acknowledged or read before it was sent. Requires a key space that is empty at
    /// the start.
    OneWriter,
}

/// Shared state of all scripts of a run.
#[derive(Debug)]
pub struct Workload {
    /// Frequencies of commands.
    pub mix: Mix,
    /// Sizes of strings.
    pub sizes: ValueSizes,
    /// Assignment of keys to connections.
    pub sharing: Sharing,
    /// Popularity of a script's keys: all keys if shared, one connection's keys if owned.
    pub popularity: Popularity,
    /// Prefix of all keys.
    pub prefix: String,
    /// Possible execution time of a command without a reply.
    pub doubt: Doubt,
    /// Versions written and read, for [`Sharing::OneWriter`]; otherwise empty.
    pub board: Board,
}

/// Expected reply.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Expect {
    Ok,
    Integer(i64),
    Value(Known),
    Values(Box<[Known]>),
    /// A version of this key ([`Sharing::OneWriter`]), at least as new as this one.
    AtLeast(u64, u32),
}

/// Expected version of a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    id: u64,
    /// `None`: any version or nil. `Some(0)`: nil.
    version: Option<u32>,
}

/// A request in flight.
#[derive(Debug)]
pub struct Pending {
    /// Command.
    pub op: Op,
    expect: Expect,
    /// Entry of the model that the command reads or writes. Unused for MGET, whose keys are in `expect`.
    entry: usize,
    /// State of the entry before the command, if known.
    before: u32,
    effect: Effect,
}

/// Result of the check of a reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected.
    Good,
    /// An error reply.
    Error(String),
    /// A reply impossible for a correct server.
    Wrong(String),
    /// An earlier value of the key, which is impossible for a correct server too.
    Stale(String),
}

/// Reason why a value is wrong.
enum Mismatch {
    /// A value that the key never had; contains the expected value.
    Other(String),
    /// An earlier value; contains the expected value.
    Older(String),
}

/// Expected state of one key. Strings: version, 0 = absent. Counters and lists: number. Hashes and sorted sets:
/// existing fields, one bit each.
#[derive(Debug, Clone, Copy)]
struct Entry {
    state: u32,
    /// Permanently false after a command with an unknown result.
    known: bool,
}

const FRESH: Entry = Entry { state: 0, known: true };

/// Kinds of keys, each with a separate key space: no command meets a key of another type.
#[derive(Debug, Clone, Copy)]
enum Kind {
    String,
    Counter,
    Hash,
    List,
    Zset,
}

const KINDS: [Kind; 5] = [Kind::String, Kind::Counter, Kind::Hash, Kind::List, Kind::Zset];

/// Generates the requests of one connection and checks the replies.
#[derive(Debug)]
pub struct Script {
    workload: Arc<Workload>,
    rng: Rng,
    /// Keys of this script: `first`, `first + step`, ...
    first: u64,
    step: u64,
    /// All kinds x keys in [`Sharing::Owned`], otherwise empty.
    model: Vec<Entry>,
    /// Possible states of keys with an unknown state.
    uncertain: HashMap<usize, States>,
    /// Whether this is the writer in [`Sharing::OneWriter`].
    is_writer: bool,
    keys: usize,
    version: u32,
    key: Vec<u8>,
    value: Vec<u8>,
    check: Vec<u8>,
}

impl Script {
    /// Creates the script of connection `index` of `of`, over `keys` keys in total.
    pub fn new(workload: Arc<Workload>, seed: u64, index: u64, of: u64, keys: u64) -> Self {
        let owned = workload.sharing == Sharing::Owned;
        let own_keys = keys_of_each(workload.sharing, of, keys) as usize;
        Self {
            rng: Rng::new(mix(seed ^ mix(index + 1))),
            first: if owned { index } else { 0 },
            step: if owned { of } else { 1 },
            model: if owned { vec![FRESH; own_keys * 5] } else { Vec::new() },
            uncertain: HashMap::new(),
            is_writer: index == 0,
            keys: own_keys,
            // Versions differ between connections, so that a shared value identifies its writer.
            version: (index as u32) << 20,
            key: Vec::new(),
            value: Vec::new(),
            check: Vec::new(),
            workload,
        }
    }

    /// Appends the next request to `out`.
    pub fn next(&mut self, out: &mut Vec<u8>) -> Pending {
        let op = match (self.workload.sharing, self.is_writer) {
            (Sharing::OneWriter, true) => Op::Set,
            (Sharing::OneWriter, false) => Op::Get,
            _ => self.workload.mix.pick(&mut self.rng),
        };
        match op {
            Op::Get => {
                let index = self.choose();
                let expect = match self.workload.sharing {
                    Sharing::OneWriter => Expect::AtLeast(self.id(index), self.workload.board.seen(index)),
                    _ => Expect::Value(self.known(index)),
                };
                self.command(out, Kind::String, index, b"GET", &[]);
                self.pending(op, expect, Kind::String, index, Effect::None)
            }
            Op::Mget => self.mget(out),
            Op::Set => {
                let index = self.choose();
                self.version = self.version.wrapping_add(1).max(1); // 0 means absent
                let version = self.version;
                let mut value = std::mem::take(&mut self.value);
                write_value(&mut value, self.id(index), version, &self.workload.sizes);
                self.command(out, Kind::String, index, b"SET", &[&value]);
                self.value = value;
                self.workload.board.begin(index, version);
                let pending = self.pending(op, Expect::Ok, Kind::String, index, Effect::Set(version));
                self.store(Kind::String, index, version);
                pending
            }
            Op::Del => {
                let index = self.choose();
                let existed = self.peek(Kind::String, index).map(|version| i64::from(version != 0));
                self.command(out, Kind::String, index, b"DEL", &[]);
                let pending = self.pending_integer(op, existed, Kind::String, index, Effect::Clear);
                self.store(Kind::String, index, 0);
                pending
            }
            Op::Expire => {
                let index = self.choose();
                let exists = self.peek(Kind::String, index).map(|version| i64::from(version != 0));
                self.command(out, Kind::String, index, b"EXPIRE", &[b"3600"]);
                self.pending_integer(op, exists, Kind::String, index, Effect::Touch)
            }
            Op::Incr => {
                let index = self.choose();
                let count = self.peek(Kind::Counter, index).map(|n| n + 1);
                self.command(out, Kind::Counter, index, b"INCR", &[]);
                let pending = self.pending_integer(op, count.map(i64::from), Kind::Counter, index, Effect::Count);
                if let Some(n) = count {
                    self.store(Kind::Counter, index, n);
                }
                pending
            }
            Op::Hset => {
                let index = self.choose();
                let bit = self.rng.below(HASH_FIELDS);
                let field = [b'f', b'a' + bit as u8];
                self.command(out, Kind::Hash, index, b"HSET", &[&field, b"switchyard"]);
                self.add_bit(op, Kind::Hash, index, bit)
            }
            Op::Zadd => {
                let index = self.choose();
                let bit = self.rng.below(ZSET_MEMBERS);
                let member = [b'm', b'A' + bit as u8];
                let mut score = Vec::with_capacity(3);
                decimal(&mut score, self.rng.below(1000));
                self.command(out, Kind::Zset, index, b"ZADD", &[&score, &member]);
                self.add_bit(op, Kind::Zset, index, bit)
            }
            Op::Lpush => {
                let index = self.choose();
                let length = self.peek(Kind::List, index);
                let full = match length {
                    Some(n) => n >= LIST_LIMIT,
                    // The length is unknown: delete at random.
                    None => self.rng.below(u64::from(LIST_LIMIT)) == 0,
                };
                if full {
                    self.command(out, Kind::List, index, b"DEL", &[]);
                    let pending =
                        self.pending_integer(op, length.map(|n| i64::from(n != 0)), Kind::List, index, Effect::Clear);
                    self.store(Kind::List, index, 0);
                    return pending;
                }
                self.command(out, Kind::List, index, b"LPUSH", &[b"switchyard"]);
                let pending =
                    self.pending_integer(op, length.map(|n| i64::from(n) + 1), Kind::List, index, Effect::Count);
                if let Some(n) = length {
                    self.store(Kind::List, index, n + 1);
                }
                pending
            }
        }
    }

    fn mget(&mut self, out: &mut Vec<u8>) -> Pending {
        let mut known = Vec::with_capacity(MGET_KEYS);
        let mut keys: [Vec<u8>; MGET_KEYS] = Default::default();
        for key in &mut keys {
            let index = self.choose();
            known.push(self.known(index));
            self.write_key(Kind::String, index);
            key.extend_from_slice(&self.key);
        }
        let args = [&b"MGET"[..], &keys[0], &keys[1], &keys[2], &keys[3]];
        wire::encode(out, &args);
        Pending {
            op: Op::Mget,
            expect: Expect::Values(known.into()),
            entry: usize::MAX,
            before: 0,
            effect: Effect::None,
        }
    }

    /// Checks the reply to a request. Replies must be passed in the order of the requests.
    pub fn check(&mut self, pending: &Pending, reply: &Reply<'_>) -> Verdict {
        if let Reply::Error(text) = reply {
            self.doubt(pending, may_be(self.workload.doubt, text));
            return Verdict::Error(format!(
                "the reply to {} was -{}",
                pending.op.name(),
                String::from_utf8_lossy(text)
            ));
        }
        let name = pending.op.name();
        let wrong = |expected: String| Verdict::Wrong(format!("{name}: expected {expected}, got {reply}"));
        let judged = |unlike: Option<Mismatch>| match unlike {
            None => Verdict::Good,
            Some(Mismatch::Other(expected)) => wrong(expected),
            Some(Mismatch::Older(expected)) => Verdict::Stale(format!("{name}: expected {expected}, got {reply}")),
        };
        match (&pending.expect, reply) {
            (Expect::Ok, Reply::Status(b"OK")) => {
                if let Effect::Set(version) = pending.effect {
                    self.workload.board.see(self.index_of(pending), version);
                }
                // The write has replaced any earlier state.
                if let Some(states) = self.uncertain.get_mut(&pending.entry) {
                    states.answered(pending.effect, None);
                }
                Verdict::Good
            }
            (Expect::Ok, _) => wrong("+OK".to_owned()),
            (Expect::Integer(n), Reply::Integer(got)) if self.is_known(pending.entry) && *n != ANY => match n == got {
                true => Verdict::Good,
                false => wrong(format!(":{n}")),
            },
            (Expect::Integer(_), Reply::Integer(got)) => {
                let states = self.uncertain.get_mut(&pending.entry);
                match states.is_none_or(|states| states.answered(pending.effect, Some(*got))) {
                    true => Verdict::Good,
                    false => wrong("an integer of one of the possible states".to_owned()),
                }
            }
            (Expect::Integer(_), _) => wrong("an integer".to_owned()),
            (Expect::Value(known), _) => judged(self.check_value(*known, reply)),
            (Expect::AtLeast(id, floor), _) => judged(self.check_seen(self.index_of(pending), *id, *floor, reply)),
            (Expect::Values(knowns), Reply::Array(items)) if items.len() == knowns.len() => {
                judged(knowns.iter().zip(items).find_map(|(known, item)| self.check_value(*known, item)))
            }
            (Expect::Values(_), _) => wrong(format!("an array of {MGET_KEYS}")),
        }
    }

    /// Returns `None` if the value is right, or else the error.
    fn check_value(&mut self, known: Known, reply: &Reply<'_>) -> Option<Mismatch> {
        let entry = self.entry_of_id(known.id);
        let exact = known.version.filter(|_| self.is_known(entry));
        let got = match self.version_of(known.id, reply) {
            Ok(got) => got,
            Err(expected) => return Some(Mismatch::Other(expected)),
        };
        let (fits, newest) = match (exact, self.uncertain.get_mut(&entry)) {
            (Some(exact), _) => (got == exact, Some(exact)),
            (None, Some(states)) => (states.read(got), states.newest()),
            (None, None) => (true, None),
        };
        let expected = || match newest {
            Some(0) => format!("nil for key {}", known.id),
            Some(newest) => format!("version {newest} of key {}", known.id),
            None => format!("a value written to key {}", known.id),
        };
        match fits {
            true => None,
            false if got != 0 && newest.is_some_and(|newest| got < newest) => Some(Mismatch::Older(expected())),
            false => Some(Mismatch::Other(expected())),
        }
    }

    /// Like [`Self::check_value`], for a key written by another connection.
    fn check_seen(&mut self, index: usize, id: u64, floor: u32, reply: &Reply<'_>) -> Option<Mismatch> {
        let got = match self.version_of(id, reply) {
            Ok(got) => got,
            Err(expected) => return Some(Mismatch::Other(expected)),
        };
        let begun = self.workload.board.begun(index);
        match got {
            got if got > begun => Some(Mismatch::Other(format!("at most version {begun} of key {id}"))),
            0 if floor > 0 => Some(Mismatch::Other(format!("version {floor} of key {id} or a newer one"))),
            got if got < floor => Some(Mismatch::Older(format!("version {floor} of key {id} or a newer one"))),
            got => {
                self.workload.board.see(index, got);
                None
            }
        }
    }

    /// Version in a reply; 0: nil. Otherwise the expected value as an error.
    fn version_of(&mut self, id: u64, reply: &Reply<'_>) -> Result<u32, String> {
        match reply {
            Reply::Nil => Ok(0),
            Reply::Bulk(bytes) => {
                let version = named_version(bytes).ok_or_else(|| format!("a value written to key {id}"))?;
                write_value(&mut self.check, id, version, &self.workload.sizes);
                match *bytes == self.check.as_slice() {
                    true => Ok(version),
                    false => Err(format!("version {version} of key {id}, {} bytes", self.check.len())),
                }
            }
            _ => Err("a value or nil".to_owned()),
        }
    }

    /// Records that it is unknown whether and when the request was executed: its keys are unchecked from now on.
    pub fn give_up(&mut self, pending: &Pending) {
        self.doubt(pending, Executed::MaybeLater);
    }

    fn doubt(&mut self, pending: &Pending, executed: Executed) {
        // A lost MGET has changed nothing, and its `entry` is not in the model.
        let Some(entry) = self.model.get_mut(pending.entry) else { return };
        let before = States::one(pending.before);
        let states = self.uncertain.entry(pending.entry).or_insert(before);
        entry.known = false;
        states.unanswered(pending.effect, executed);
    }

    /// Keys of a request.
    pub fn keys_of(&mut self, pending: &Pending) -> Vec<Vec<u8>> {
        let of_each = |script: &mut Self, kind, index| {
            script.write_key(kind, index);
            script.key.clone()
        };
        if let Expect::Values(knowns) = &pending.expect {
            return knowns.iter().map(|known| of_each(self, Kind::String, self.index_of_id(known.id))).collect();
        }
        let kind = KINDS[(pending.entry / self.keys).min(KINDS.len() - 1)];
        vec![of_each(self, kind, self.index_of(pending))]
    }

    fn index_of(&self, pending: &Pending) -> usize {
        pending.entry % self.keys
    }

    fn index_of_id(&self, id: u64) -> usize {
        ((id - self.first) / self.step) as usize
    }

    fn is_known(&self, entry: usize) -> bool {
        self.model.get(entry).is_some_and(|e| e.known)
    }

    fn choose(&mut self) -> usize {
        (self.workload.popularity.next(&mut self.rng) as usize).min(self.keys - 1)
    }

    fn id(&self, index: usize) -> u64 {
        self.first + index as u64 * self.step
    }

    fn entry(&self, kind: Kind, index: usize) -> usize {
        kind as usize * self.keys + index
    }

    fn entry_of_id(&self, id: u64) -> usize {
        self.entry(Kind::String, self.index_of_id(id))
    }

    /// State of a key, if known.
    fn peek(&self, kind: Kind, index: usize) -> Option<u32> {
        self.model.get(self.entry(kind, index)).filter(|e| e.known).map(|e| e.state)
    }

    fn known(&self, index: usize) -> Known {
        Known { id: self.id(index), version: self.peek(Kind::String, index) }
    }

    /// Sets the expected state of a key after the new command.
    fn store(&mut self, kind: Kind, index: usize, state: u32) {
        let entry = self.entry(kind, index);
        if let Some(entry) = self.model.get_mut(entry) {
            entry.state = state;
        }
    }

    /// Sets one field's bit. The reply is 1 for a new field, otherwise 0.
    fn add_bit(&mut self, op: Op, kind: Kind, index: usize, bit: u64) -> Pending {
        let state = self.peek(kind, index);
        let mask = 1 << bit;
        let pending =
            self.pending_integer(op, state.map(|state| i64::from(state & mask == 0)), kind, index, Effect::Add(mask));
        if let Some(state) = state {
            self.store(kind, index, state | mask);
        }
        pending
    }

    /// Must be called before the command's new state is stored.
    fn pending(&self, op: Op, expect: Expect, kind: Kind, index: usize, effect: Effect) -> Pending {
        let before = self.peek(kind, index).unwrap_or(0);
        Pending { op, expect, entry: self.entry(kind, index), before, effect }
    }

    fn pending_integer(&self, op: Op, expected: Option<i64>, kind: Kind, index: usize, effect: Effect) -> Pending {
        self.pending(op, Expect::Integer(expected.unwrap_or(ANY)), kind, index, effect)
    }

    fn write_key(&mut self, kind: Kind, index: usize) {
        let id = self.id(index);
        self.key.clear();
        self.key.extend_from_slice(self.workload.prefix.as_bytes());
        self.key.extend_from_slice(match kind {
            Kind::String => b"s:",
            Kind::Counter => b"c:",
            Kind::Hash => b"h:",
            Kind::List => b"l:",
            Kind::Zset => b"z:",
        });
        decimal(&mut self.key, id);
    }

    fn command(&mut self, out: &mut Vec<u8>, kind: Kind, index: usize, name: &[u8], rest: &[&[u8]]) {
        self.write_key(kind, index);
        match rest {
            [] => wire::encode(out, &[name, &self.key]),
            [a] => wire::encode(out, &[name, &self.key, a]),
            [a, b, ..] => wire::encode(out, &[name, &self.key, a, b]),
        }
    }
}

/// Any integer: no command of the mix returns this one.
const ANY: i64 = i64::MIN;

/// Number of keys per connection.
pub fn keys_of_each(sharing: Sharing, connections: u64, keys: u64) -> u64 {
    match sharing {
        Sharing::Owned => keys.div_ceil(connections.max(1)).max(1),
        Sharing::Shared | Sharing::OneWriter => keys.max(1),
    }
}

/// Writes `ID:VERSION:` and a filler determined by both. The filler starts at a varying place in the pattern, so that
/// two values of equal length differ throughout.
fn write_value(out: &mut Vec<u8>, id: u64, version: u32, sizes: &ValueSizes) {
    const PATTERN: &[u8; 64] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_";
    let len = sizes.of(id, version);
    out.clear();
    decimal(out, id);
    out.push(b':');
    decimal(out, u64::from(version));
    out.push(b':');
    let mut at = (mix(id ^ u64::from(version)) % 64) as usize;
    while out.len() < len {
        let chunk = &PATTERN[at..(at + len - out.len()).min(64)];
        out.extend_from_slice(chunk);
        at = 0;
    }
    out.truncate(len);
}

/// Version contained in a value.
fn named_version(value: &[u8]) -> Option<u32> {
    let mut parts = value.splitn(3, |b| *b == b':');
    parts.next()?;
    std::str::from_utf8(parts.next()?).ok()?.parse().ok().filter(|v| *v != 0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn workload(sharing: Sharing, keys: u64) -> Arc<Workload> {
        Arc::new(Workload {
            mix: Mix::default(),
            sizes: "64:3,200:1".parse().expect("sizes"),
            sharing,
            popularity: Popularity::zipfian(keys, 0.99),
            prefix: "t:".to_owned(),
            doubt: Doubt::Lasting,
            board: Board::new(if sharing == Sharing::OneWriter { keys } else { 0 }),
        })
    }

    /// A naive Redis for the commands of the mix.
    #[derive(Default)]
    struct Model {
        strings: HashMap<Vec<u8>, Vec<u8>>,
        sets: HashMap<Vec<u8>, Vec<Vec<u8>>>,
        numbers: HashMap<Vec<u8>, i64>,
    }

    enum Answer {
        Ok,
        Integer(i64),
        Value(Option<Vec<u8>>),
        Values(Vec<Option<Vec<u8>>>),
    }

    impl Answer {
        fn reply(&self) -> Reply<'_> {
            let value = |v: &'_ Option<Vec<u8>>| -> Reply<'static> {
                v.as_ref().map_or(Reply::Nil, |v| Reply::Bulk(Box::leak(v.clone().into_boxed_slice())))
            };
            match self {
                Self::Ok => Reply::Status(b"OK"),
                Self::Integer(i) => Reply::Integer(*i),
                Self::Value(v) => value(v),
                Self::Values(v) => Reply::Array(v.iter().map(value).collect()),
            }
        }
    }

    impl Model {
        fn execute(&mut self, request: &[u8]) -> Answer {
            let Ok(Some((Reply::Array(args), taken))) = wire::parse(request) else { panic!("not one request") };
            assert_eq!(taken, request.len());
            let args: Vec<Vec<u8>> = args
                .into_iter()
                .map(|a| match a {
                    Reply::Bulk(b) => b.to_vec(),
                    other => panic!("{other}"),
                })
                .collect();
            let key = args[1].clone();
            match &args[0][..] {
                b"GET" => Answer::Value(self.strings.get(&key).cloned()),
                b"MGET" => Answer::Values(args[1..].iter().map(|k| self.strings.get(k).cloned()).collect()),
                b"SET" => {
                    self.strings.insert(key, args[2].clone());
                    Answer::Ok
                }
                b"DEL" => Answer::Integer(i64::from(
                    self.strings.remove(&key).is_some() | self.numbers.remove(&key).is_some(),
                )),
                b"EXPIRE" => Answer::Integer(i64::from(self.strings.contains_key(&key))),
                b"INCR" | b"LPUSH" => {
                    let n = self.numbers.entry(key).or_default();
                    *n += 1;
                    Answer::Integer(*n)
                }
                b"HSET" | b"ZADD" => {
                    let field = if args[0] == b"HSET" { &args[2] } else { &args[3] };
                    let set = self.sets.entry(key).or_default();
                    let new = !set.contains(field);
                    if new {
                        set.push(field.clone());
                    }
                    Answer::Integer(i64::from(new))
                }
                other => panic!("{}", other.escape_ascii()),
            }
        }
    }

    /// A correct server never fails the checks, with pipelines of 8.
    #[test]
    fn a_correct_server_passes_all_checks() {
        for sharing in [Sharing::Owned, Sharing::Shared] {
            let (connections, keys) = (3, 60);
            let workload = workload(sharing, keys_of_each(sharing, connections, keys));
            let mut scripts: Vec<_> =
                (0..connections).map(|i| Script::new(workload.clone(), 1, i, connections, keys)).collect();
            let mut server = Model::default();
            for _ in 0..2000 {
                for script in &mut scripts {
                    let mut replies = Vec::new();
                    for _ in 0..8 {
                        let mut out = Vec::new();
                        let pending = script.next(&mut out);
                        replies.push((pending, server.execute(&out)));
                    }
                    for (pending, answer) in replies {
                        assert_eq!(script.check(&pending, &answer.reply()), Verdict::Good, "{sharing:?}");
                    }
                }
            }
        }
    }

    /// Detects a lost write, a repeated write, and exchanged replies.
    #[test]
    fn wrong_servers_are_caught() {
        type CorruptReply<'a> = &'a dyn Fn(usize, &Pending, Answer, &mut Model, &[u8]) -> Answer;
        let run = |spoil: CorruptReply<'_>| {
            let workload = workload(Sharing::Owned, 50);
            let mut script = Script::new(workload, 1, 0, 1, 50);
            let mut server = Model::default();
            (0..5000)
                .filter(|&i| {
                    let mut out = Vec::new();
                    let pending = script.next(&mut out);
                    let answer = server.execute(&out);
                    let answer = spoil(i, &pending, answer, &mut server, &out);
                    script.check(&pending, &answer.reply()) != Verdict::Good
                })
                .count()
        };
        assert_eq!(run(&|_, _, answer, _, _| answer), 0);
        // Loses one SET in a hundred.
        let lost = |i: usize, p: &Pending, answer, server: &mut Model, request: &[u8]| {
            if i.is_multiple_of(100) && p.op == Op::Set {
                let Ok(Some((Reply::Array(args), _))) = wire::parse(request) else { panic!() };
                let Reply::Bulk(key) = args[1] else { panic!() };
                server.strings.remove(key);
            }
            answer
        };
        assert!(run(&lost) > 0);
        // A counter counts twice.
        let doubled = |i: usize, p: &Pending, answer, server: &mut Model, request: &[u8]| {
            if i.is_multiple_of(50) && p.op == Op::Incr {
                server.execute(request);
            }
            answer
        };
        assert!(run(&doubled) > 0);
        // A GET returns another key's value.
        let swapped = |_, p: &Pending, answer, server: &mut Model, _: &[u8]| match answer {
            Answer::Value(Some(v)) if p.op == Op::Get => {
                Answer::Value(server.strings.values().find(|o| **o != v).cloned().or(Some(v)))
            }
            other => other,
        };
        assert!(run(&swapped) > 100);
    }

    #[test]
    fn a_value_of_another_shared_key_is_detected() {
        let workload = workload(Sharing::Shared, 50);
        let mut script = Script::new(workload.clone(), 1, 0, 2, 50);
        let value = |id, version| {
            let mut v = Vec::new();
            write_value(&mut v, id, version, &workload.sizes);
            v
        };
        let (right, other) = (value(7, 9), value(8, 9));
        let known = Known { id: 7, version: None };
        assert!(script.check_value(known, &Reply::Bulk(&right)).is_none());
        assert!(script.check_value(known, &Reply::Nil).is_none());
        assert!(script.check_value(known, &Reply::Bulk(&other)).is_some());
        assert!(script.check_value(known, &Reply::Bulk(&right[..right.len() - 1])).is_some());
        assert!(script.check_value(known, &Reply::Integer(1)).is_some());
    }

    /// After an error, both the state with and without the command are correct; another key's value is not.
    #[test]
    fn an_error_does_not_count_as_a_wrong_value() {
        let mut script = Script::new(workload(Sharing::Owned, 2), 1, 0, 1, 2);
        let mut server = Model::default();
        let (mut wrong, mut caught) = (0, 0);
        for i in 0..5000 {
            let mut out = Vec::new();
            let pending = script.next(&mut out);
            if i < 100 && i % 3 == 0 {
                if i % 2 == 0 {
                    server.execute(&out);
                }
                assert!(matches!(script.check(&pending, &Reply::Error(b"ERR node lost")), Verdict::Error(_)));
                continue;
            }
            let answer = server.execute(&out);
            wrong += u32::from(script.check(&pending, &answer.reply()) != Verdict::Good);
            if pending.op == Op::Get {
                caught += u32::from(script.check(&pending, &Reply::Bulk(b"77:1:another key's value")) != Verdict::Good);
            }
        }
        assert_eq!(wrong, 0);
        assert!(caught > 1000, "{caught}");
    }

    /// A server that ends has executed a command or never will. Afterwards only these two states are correct.
    #[test]
    fn a_brief_doubt_leaves_exactly_two_states() {
        let workload = Workload { doubt: Doubt::Brief, ..Arc::into_inner(workload(Sharing::Owned, 2)).expect("one") };
        let mut script = Script::new(workload.into(), 1, 0, 1, 2);
        let mut server = Model::default();
        let (mut wrong, mut spoilt, mut caught) = (0, 0, 0);
        for i in 0..20_000 {
            let mut out = Vec::new();
            let pending = script.next(&mut out);
            if i % 7 == 0 {
                let text = match i % 3 {
                    0 => &b"NODEDOWN a:1 cannot be reached: refused"[..],
                    _ => b"NODELOST connection to a:1 was lost: reset; the command may have been executed",
                };
                if i % 3 == 1 {
                    server.execute(&out);
                }
                assert!(matches!(script.check(&pending, &Reply::Error(text)), Verdict::Error(_)));
                continue;
            }
            let answer = server.execute(&out);
            if pending.op == Op::Incr && i % 5 == 0 {
                let Answer::Integer(count) = answer else { panic!() };
                spoilt += 1;
                caught += usize::from(script.check(&pending, &Reply::Integer(count + 2)) != Verdict::Good);
                script.give_up(&pending);
                continue;
            }
            wrong += usize::from(script.check(&pending, &answer.reply()) != Verdict::Good);
        }
        assert_eq!(wrong, 0);
        // One error per counter, because the state is unknown afterwards.
        assert!(spoilt > 2 && caught == 2, "{caught} of {spoilt}");
    }

    #[test]
    fn an_old_copy_is_stale() {
        let workload = workload(Sharing::OneWriter, 1);
        let mut writer = Script::new(workload.clone(), 1, 0, 2, 1);
        let mut reader = Script::new(workload, 1, 1, 2, 1);
        let mut out = Vec::new();
        let mut write = |server: &mut Model| {
            out.clear();
            let pending = writer.next(&mut out);
            assert_eq!(pending.op, Op::Set);
            let answer = server.execute(&out);
            assert_eq!(writer.check(&pending, &answer.reply()), Verdict::Good);
        };
        let (mut server, mut request) = (Model::default(), Vec::new());
        let early = reader.next(&mut request);
        write(&mut server);
        let old = server.execute(&request);
        write(&mut server);
        assert_eq!(reader.check(&early, &Reply::Nil), Verdict::Good, "it was sent before the first write");
        let late = reader.next(&mut request);
        assert!(matches!(reader.check(&late, &old.reply()), Verdict::Stale(_)));
        assert!(matches!(reader.check(&late, &Reply::Nil), Verdict::Wrong(_)));
        assert!(matches!(reader.check(&late, &Reply::Bulk(b"0:77:never")), Verdict::Wrong(_)));
        request.clear();
        let now = reader.next(&mut request);
        assert_eq!(reader.check(&now, &server.execute(&request).reply()), Verdict::Good);
    }
}
