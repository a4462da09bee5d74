//! What the load asks for, and what the answers must be.
//!
//! Each connection writes a script: the next request, and what its reply must be. In [`Sharing::Owned`] every key belongs to one
//! connection. Redis (and the router's promise) executes one connection's commands to one key in the order they were sent, so the script
//! knows each reply exactly, also in the middle of a pipeline: a write that is lost, doubled, reordered or answered to another client
//! shows as a wrong value. In [`Sharing::Shared`] connections race for keys; then a value read must still be one that was written *to
//! that key* (values name their key and version), which catches mixed-up replies but not lost writes.
//!
//! After an error reply or a lost connection nobody knows whether the command was executed, nor when: bytes that a hanging server has
//! received may be executed after everything that is sent later. From then on the key is checked as a shared one is: errors are counted
//! as errors, not once more as wrong values.

use std::sync::Arc;

use switchyard_resp::encode::decimal;

use super::mix::{LIST_LIMIT, MGET_KEYS, Mix, Op, ValueSizes};
use crate::random::{Popularity, Rng, mix};
use crate::wire::{self, Reply};

const HASH_FIELDS: u64 = 16;
const ZSET_MEMBERS: u64 = 32;

/// Who may touch a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Each key belongs to one connection; every reply is known exactly. Needs a key space that is empty at the start.
    Owned,
    /// All connections use all keys.
    Shared,
}

/// All that the scripts of one run have in common.
#[derive(Debug, Clone)]
pub struct Workload {
    /// Which commands.
    pub mix: Mix,
    /// How large strings are.
    pub sizes: ValueSizes,
    /// Who may touch a key.
    pub sharing: Sharing,
    /// Which of a script's keys is asked for: over all keys if shared, over one connection's part if owned.
    pub popularity: Popularity,
    /// Keys start with this.
    pub prefix: String,
}

/// What the reply must be.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Expect {
    Ok,
    Integer(i64),
    Value(Known),
    Values(Box<[Known]>),
}

/// What is known of a string when it is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    id: u64,
    /// `None`: any version, or none at all. `Some(0)`: must be nil.
    version: Option<u32>,
}

/// A request under way.
#[derive(Debug)]
pub struct Pending {
    /// Which command.
    pub op: Op,
    expect: Expect,
    /// The entry of the model that it reads or writes; MGET's are told by what it expects.
    entry: usize,
}

/// What a reply turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected.
    Good,
    /// An error reply.
    Error(String),
    /// A reply that no correct server could give.
    Wrong(String),
}

/// State of one key as this connection has left it. Strings: version, 0 = absent. Counters and lists: their number. Hashes and sorted
/// sets: which fields exist, one bit each.
#[derive(Debug, Clone, Copy)]
struct Entry {
    state: u32,
    /// False for good once a command's outcome could not be told.
    known: bool,
}

const FRESH: Entry = Entry { state: 0, known: true };

/// Kinds of keys, each with a key space of its own: a command never meets a key of another type.
#[derive(Debug, Clone, Copy)]
enum Kind {
    String,
    Counter,
    Hash,
    List,
    Zset,
}

/// Writes one connection's requests and checks the replies.
#[derive(Debug)]
pub struct Script {
    workload: Arc<Workload>,
    rng: Rng,
    /// This script's keys are `first`, `first + step`, ...
    first: u64,
    step: u64,
    /// Five kinds x keys in [`Sharing::Owned`], else empty.
    model: Vec<Entry>,
    keys: usize,
    version: u32,
    key: Vec<u8>,
    value: Vec<u8>,
    check: Vec<u8>,
}

impl Script {
    /// The script of connection `index` of `of`, over `keys` keys in all.
    pub fn new(workload: Arc<Workload>, seed: u64, index: u64, of: u64, keys: u64) -> Self {
        let owned = workload.sharing == Sharing::Owned;
        let own_keys = keys_of_each(workload.sharing, of, keys) as usize;
        Self {
            rng: Rng::new(mix(seed ^ mix(index + 1))),
            first: if owned { index } else { 0 },
            step: if owned { of } else { 1 },
            model: if owned { vec![FRESH; own_keys * 5] } else { Vec::new() },
            keys: own_keys,
            // Versions of different connections differ, so that in shared mode a value tells who wrote it.
            version: (index as u32) << 20,
            key: Vec::new(),
            value: Vec::new(),
            check: Vec::new(),
            workload,
        }
    }

    /// Appends the next request to `out`.
    pub fn next(&mut self, out: &mut Vec<u8>) -> Pending {
        let op = self.workload.mix.pick(&mut self.rng);
        match op {
            Op::Get => {
                let index = self.choose();
                let known = self.known(index);
                self.command(out, Kind::String, index, b"GET", &[]);
                self.pending(op, Expect::Value(known), Kind::String, index)
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
                self.store(Kind::String, index, version);
                self.pending(op, Expect::Ok, Kind::String, index)
            }
            Op::Del => {
                let index = self.choose();
                let existed = self.peek(Kind::String, index).map(|version| i64::from(version != 0));
                self.command(out, Kind::String, index, b"DEL", &[]);
                self.store(Kind::String, index, 0);
                self.pending_integer(op, existed, Kind::String, index)
            }
            Op::Expire => {
                let index = self.choose();
                let exists = self.peek(Kind::String, index).map(|version| i64::from(version != 0));
                self.command(out, Kind::String, index, b"EXPIRE", &[b"3600"]);
                self.pending_integer(op, exists, Kind::String, index)
            }
            Op::Incr => {
                let index = self.choose();
                let count = self.peek(Kind::Counter, index).map(|n| n + 1);
                self.command(out, Kind::Counter, index, b"INCR", &[]);
                if let Some(n) = count {
                    self.store(Kind::Counter, index, n);
                }
                self.pending_integer(op, count.map(i64::from), Kind::Counter, index)
            }
            Op::Hset => {
                let index = self.choose();
                let bit = self.rng.below(HASH_FIELDS);
                let added = self.add_bit(Kind::Hash, index, bit);
                let field = [b'f', b'a' + bit as u8];
                self.command(out, Kind::Hash, index, b"HSET", &[&field, b"switchyard"]);
                self.pending_integer(op, added, Kind::Hash, index)
            }
            Op::Zadd => {
                let index = self.choose();
                let bit = self.rng.below(ZSET_MEMBERS);
                let added = self.add_bit(Kind::Zset, index, bit);
                let member = [b'm', b'A' + bit as u8];
                let mut score = Vec::with_capacity(3);
                decimal(&mut score, self.rng.below(1000));
                self.command(out, Kind::Zset, index, b"ZADD", &[&score, &member]);
                self.pending_integer(op, added, Kind::Zset, index)
            }
            Op::Lpush => {
                let index = self.choose();
                let length = self.peek(Kind::List, index);
                let full = match length {
                    Some(n) => n >= LIST_LIMIT,
                    // Nobody counts: by chance.
                    None => self.rng.below(u64::from(LIST_LIMIT)) == 0,
                };
                if full {
                    self.command(out, Kind::List, index, b"DEL", &[]);
                    self.store(Kind::List, index, 0);
                    return self.pending_integer(op, length.map(|n| i64::from(n != 0)), Kind::List, index);
                }
                self.command(out, Kind::List, index, b"LPUSH", &[b"switchyard"]);
                if let Some(n) = length {
                    self.store(Kind::List, index, n + 1);
                }
                self.pending_integer(op, length.map(|n| i64::from(n) + 1), Kind::List, index)
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
        Pending { op: Op::Mget, expect: Expect::Values(known.into()), entry: usize::MAX }
    }

    /// Judges the reply to a request. Replies must be handed over in the order of the requests.
    pub fn check(&mut self, pending: &Pending, reply: &Reply<'_>) -> Verdict {
        if let Reply::Error(text) = reply {
            self.give_up(pending);
            return Verdict::Error(format!("{} was answered -{}", pending.op.name(), String::from_utf8_lossy(text)));
        }
        let wrong = |expected: String| Verdict::Wrong(format!("{}: expected {expected}, got {reply}", pending.op.name()));
        let trusted = self.is_known(pending.entry);
        match (&pending.expect, reply) {
            (Expect::Ok, Reply::Status(b"OK")) => Verdict::Good,
            (Expect::Ok, _) => wrong("+OK".to_owned()),
            (Expect::Integer(n), Reply::Integer(got)) if *n == ANY || n == got || !trusted => Verdict::Good,
            (Expect::Integer(n), _) => wrong(if *n == ANY { "an integer".to_owned() } else { format!(":{n}") }),
            (Expect::Value(known), _) => {
                let known = Known { version: known.version.filter(|_| trusted), ..*known };
                self.check_value(known, reply).map_or(Verdict::Good, wrong)
            }
            (Expect::Values(knowns), Reply::Array(items)) if items.len() == knowns.len() => {
                for (known, item) in knowns.iter().zip(items) {
                    let trusted = self.is_known(self.entry_of_id(known.id));
                    let known = Known { version: known.version.filter(|_| trusted), ..*known };
                    if let Some(expected) = self.check_value(known, item) {
                        return wrong(format!("{expected} in an array"));
                    }
                }
                Verdict::Good
            }
            (Expect::Values(_), _) => wrong(format!("an array of {MGET_KEYS}")),
        }
    }

    /// `None` where the value is right, else what was expected.
    fn check_value(&mut self, known: Known, reply: &Reply<'_>) -> Option<String> {
        let version = match (reply, known.version) {
            (Reply::Nil, None | Some(0)) => return None,
            (Reply::Nil, Some(version)) => {
                return Some(format!("version {version} of key {}", known.id));
            }
            (Reply::Bulk(_), Some(0)) => return Some(format!("nil for key {}", known.id)),
            (Reply::Bulk(_), Some(version)) => version,
            (Reply::Bulk(bytes), None) => match named_version(bytes) {
                Some(version) => version,
                None => return Some(format!("a value written to key {}", known.id)),
            },
            _ => return Some("a value or nil".to_owned()),
        };
        let Reply::Bulk(bytes) = reply else {
            return Some("a value".to_owned());
        };
        write_value(&mut self.check, known.id, version, &self.workload.sizes);
        (*bytes != self.check.as_slice()).then(|| format!("version {version} of key {}, {} bytes", known.id, self.check.len()))
    }

    /// Nobody knows whether this request was executed: its keys are unchecked from here on.
    pub fn give_up(&mut self, pending: &Pending) {
        // A lost MGET has changed nothing, and its `entry` is none of the model's.
        if let Some(entry) = self.model.get_mut(pending.entry) {
            entry.known = false;
        }
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
        self.entry(Kind::String, ((id - self.first) / self.step) as usize)
    }

    /// The state of a key where it is known.
    fn peek(&self, kind: Kind, index: usize) -> Option<u32> {
        self.model.get(self.entry(kind, index)).filter(|e| e.known).map(|e| e.state)
    }

    fn known(&self, index: usize) -> Known {
        Known { id: self.id(index), version: self.peek(Kind::String, index) }
    }

    /// What the key's state is once the command now written has been executed.
    fn store(&mut self, kind: Kind, index: usize, state: u32) {
        let entry = self.entry(kind, index);
        if let Some(entry) = self.model.get_mut(entry) {
            entry.state = state;
        }
    }

    /// Sets one field's bit; 1 where that is new, 0 where not, `None` where nobody knows.
    fn add_bit(&mut self, kind: Kind, index: usize, bit: u64) -> Option<i64> {
        let entry = self.entry(kind, index);
        let entry = self.model.get_mut(entry).filter(|e| e.known)?;
        let added = entry.state & (1 << bit) == 0;
        entry.state |= 1 << bit;
        Some(i64::from(added))
    }

    fn pending(&self, op: Op, expect: Expect, kind: Kind, index: usize) -> Pending {
        Pending { op, expect, entry: self.entry(kind, index) }
    }

    fn pending_integer(&self, op: Op, expected: Option<i64>, kind: Kind, index: usize) -> Pending {
        self.pending(op, Expect::Integer(expected.unwrap_or(ANY)), kind, index)
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

/// Stands for "any integer": no command of the mix answers it.
const ANY: i64 = i64::MIN;

/// How many keys each of `connections` has.
pub fn keys_of_each(sharing: Sharing, connections: u64, keys: u64) -> u64 {
    match sharing {
        Sharing::Owned => keys.div_ceil(connections.max(1)).max(1),
        Sharing::Shared => keys.max(1),
    }
}

/// `ID:VERSION:` and a filler that both determine. The filler's place in the pattern moves with them, so that two values of one length
/// differ everywhere.
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

/// The version that a value says it is.
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
        })
    }

    /// A naive Redis, for the mix's commands.
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
                b"DEL" => Answer::Integer(i64::from(self.strings.remove(&key).is_some() | self.numbers.remove(&key).is_some())),
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

    /// A correct server never looks wrong, with requests pipelined 8 deep.
    #[test]
    fn a_correct_server_is_never_accused() {
        for sharing in [Sharing::Owned, Sharing::Shared] {
            let (connections, keys) = (3, 60);
            let workload = workload(sharing, keys_of_each(sharing, connections, keys));
            let mut scripts: Vec<_> = (0..connections).map(|i| Script::new(workload.clone(), 1, i, connections, keys)).collect();
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

    /// Each way of being wrong is seen: a lost write, a doubled one, replies swapped between two requests.
    #[test]
    fn wrong_servers_are_caught() {
        type Spoil<'a> = &'a dyn Fn(usize, &Pending, Answer, &mut Model, &[u8]) -> Answer;
        let run = |spoil: Spoil<'_>| {
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
        // A SET is forgotten once in a hundred.
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
        // A GET gets another key's value.
        let swapped = |_, p: &Pending, answer, server: &mut Model, _: &[u8]| match answer {
            Answer::Value(Some(v)) if p.op == Op::Get => Answer::Value(server.strings.values().find(|o| **o != v).cloned().or(Some(v))),
            other => other,
        };
        assert!(run(&swapped) > 100);
    }

    #[test]
    fn shared_keys_still_tell_another_keys_value() {
        let workload = workload(Sharing::Shared, 50);
        let mut script = Script::new(workload.clone(), 1, 0, 2, 50);
        let value = |id, version| {
            let mut v = Vec::new();
            write_value(&mut v, id, version, &workload.sizes);
            v
        };
        let (right, other) = (value(7, 9), value(8, 9));
        let known = Known { id: 7, version: None };
        assert_eq!(script.check_value(known, &Reply::Bulk(&right)), None);
        assert_eq!(script.check_value(known, &Reply::Nil), None);
        assert!(script.check_value(known, &Reply::Bulk(&other)).is_some());
        assert!(script.check_value(known, &Reply::Bulk(&right[..right.len() - 1])).is_some());
        assert!(script.check_value(known, &Reply::Integer(1)).is_some());
    }

    /// An error leaves open whether the command was executed: either way is right afterwards, another key's value is not.
    #[test]
    fn an_error_is_not_counted_as_a_wrong_value_too() {
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
}
