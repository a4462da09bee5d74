//! Linearizability of keys that several clients use during faults.
//!
//! Short runs, recorded and checked here without tools in another language. The checker is the simulator's
//! (`switchyard_sim::linear`), which only uses requests, replies and times. The lab's tests (`crates/lab/tests`) and
//! `make soak` have longer runs, with another checker.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use switchyard_sim::linear::{Act, Operation, UNKNOWN, Verdict, check};

use crate::support::{Client, Node, NodeOptions, Random, Value, encode};

/// Maximum number of operations per key: checking is exponential in it.
const OPERATIONS: usize = 40;

/// Maximum number of operations per key with an unknown result.
const UNKNOWNS: usize = 4;

/// Initial value of existing keys, as a value, a count, or the only element.
const FIRST: u32 = 0;

/// Number of concurrent keys and clients.
const KEYS: usize = 9;
const CLIENTS: usize = 5;

/// Pause between operations of a client, so that other clients' operations interleave, and a small machine suffices.
const PAUSE: Duration = Duration::from_millis(2);

/// Servers' clocks have a resolution of milliseconds, and are read once per turn.
const CLOCK: Duration = Duration::from_millis(20);

/// Longer than all timeouts of the router.
const TIMEOUT: Duration = Duration::from_secs(4);

/// Type of a key, which determines its operations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// SET, also with a time to live, GET, DEL.
    Register,
    /// INCR alone, in a transaction and in a script; GET.
    Counter,
    List,
}

#[derive(Debug)]
struct Key {
    name: String,
    kind: Kind,
    /// The key starts with [`FIRST`].
    is_made: bool,
    begun: AtomicU64,
    operations: Mutex<Vec<Operation>>,
}

/// Results of all operations.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) answered: u64,
    pub(crate) unknown: u64,
    /// First words of errors, each with the first full text.
    pub(crate) errors: BTreeMap<String, String>,
    /// Number of connections that broke or timed out.
    pub(crate) broken: u64,
}

#[derive(Debug)]
struct Shared {
    addresses: Vec<SocketAddr>,
    name: fn(u64) -> String,
    is_made: fn(u64) -> bool,
    began: Instant,
    stop: AtomicBool,
    numbers: AtomicU64,
    in_use: Mutex<Vec<Arc<Key>>>,
    left: Mutex<Vec<Arc<Key>>>,
    tally: Mutex<Tally>,
}

/// Running clients.
#[derive(Debug)]
pub(crate) struct Recording {
    shared: Arc<Shared>,
    clients: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no client panicked")
}

impl Recording {
    /// Starts the clients. `name` returns key names by number. Clients use the addresses in turn.
    pub(crate) fn start(addresses: &[SocketAddr], name: fn(u64) -> String) -> Recording {
        Self::start_with(addresses, name, |_| false)
    }

    /// Starts clients. Keys with `is_made` already exist, as created by [`made`].
    pub(crate) fn start_with(addresses: &[SocketAddr], name: fn(u64) -> String, is_made: fn(u64) -> bool) -> Recording {
        let shared = Arc::new(Shared {
            addresses: addresses.to_vec(),
            name,
            is_made,
            began: Instant::now(),
            stop: AtomicBool::new(false),
            numbers: AtomicU64::new(0),
            in_use: Mutex::default(),
            left: Mutex::default(),
            tally: Mutex::default(),
        });
        for _ in 0..KEYS {
            let key = shared.fresh();
            lock(&shared.in_use).push(key);
        }
        let clients = (0..CLIENTS).map(|number| {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || shared.work(number))
        });
        Recording { clients: clients.collect(), shared }
    }

    pub(crate) fn tally(&self) -> Tally {
        lock(&self.shared.tally).clone()
    }

    /// Waits for this many further operations.
    #[track_caller]
    pub(crate) fn wait_for(&self, operations: u64) {
        let (end, from) = (Instant::now() + Duration::from_secs(60), self.tally().answered);
        while self.tally().answered < from + operations {
            assert!(Instant::now() < end, "clients get no answers: {:?}", self.tally());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Stops the clients, reads every key again, and checks the history. Returns the counts and keys, or a violation.
    pub(crate) fn finish(self) -> Result<(Tally, Vec<String>), String> {
        self.shared.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.join().map_err(|_| "a client saw half a transaction, or an answer to something else".to_owned())?;
        }
        let shared = &self.shared;
        let mut keys = std::mem::take(&mut *lock(&shared.left));
        keys.append(&mut lock(&shared.in_use));
        let mut reader = None;
        let end = Instant::now() + Duration::from_secs(60);
        for key in &keys {
            while !shared.perform(&mut reader, CLIENTS, key, &key.kind.read()) {
                if Instant::now() > end {
                    return Err(format!("{} cannot be read: {:?}", key.name, lock(&shared.tally)));
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        for key in &keys {
            let operations = lock(&key.operations);
            match check(&operations, key.is_made.then(|| vec![FIRST]), 0) {
                Verdict::Fine => {}
                Verdict::TooMany => {
                    return Err(format!("{}: too many possibilities:\n{}", key.name, shown(&operations)));
                }
                Verdict::Broken(fitting) => {
                    return Err(format!(
                        "{}: fits no order, {fitting} at most can be in one:\n{}",
                        key.name,
                        shown(&operations)
                    ));
                }
            }
        }
        let tally = lock(&shared.tally).clone();
        Ok((tally, keys.iter().map(|key| key.name.clone()).collect()))
    }
}

fn shown(operations: &[Operation]) -> String {
    let mut text = String::new();
    for Operation { invoked_us, returned_us, act, by } in operations {
        let returned = if *returned_us == UNKNOWN { "?".to_owned() } else { returned_us.to_string() };
        text.push_str(&format!("    {invoked_us:>9} .. {returned:>9}  {by}: {act:?}\n"));
    }
    text
}

/// Commands sent together, and the meaning of the last reply.
struct Plan {
    commands: Vec<Vec<String>>,
    act: Act,
}

fn plan(act: Act, commands: &[&[&str]]) -> Plan {
    Plan { commands: commands.iter().map(|words| words.iter().map(|w| (*w).to_owned()).collect()).collect(), act }
}

/// Returns the command that creates a key before recording starts.
pub(crate) fn made(number: u64, name: &str) -> Vec<u8> {
    let command = if Kind::of(number) == Kind::List { "RPUSH" } else { "SET" };
    encode(&[command, name, &FIRST.to_string()])
}

impl Kind {
    fn of(number: u64) -> Kind {
        [Kind::Register, Kind::Counter, Kind::List][number as usize % 3]
    }

    fn read(self) -> Plan {
        // `$` stands for the key.
        match self {
            Kind::List => plan(Act::Read(None), &[&["LRANGE", "$", "0", "-1"]]),
            _ => plan(Act::Read(None), &[&["GET", "$"]]),
        }
    }

    fn next(self, number: u32, random: &mut Random) -> Plan {
        let value = number.to_string();
        match (self, random.below(20)) {
            (Kind::Register, 0..7) | (Kind::Counter, 0..8) | (Kind::List, 0..7) => self.read(),
            (Kind::Register, 7..14) => plan(Act::Write(number, None), &[&["SET", "$", &value]]),
            (Kind::Register, 14..16) => {
                let ms = 50 + random.below(800) as u64;
                plan(Act::Write(number, Some(ms * 1000)), &[&["SET", "$", &value, "PX", &ms.to_string()]])
            }
            (Kind::Register | Kind::List, 16..18) => plan(Act::Remove(None), &[&["DEL", "$"]]),
            (Kind::Register, _) => plan(Act::Read(None), &[&["MULTI"], &["GET", "$"], &["GET", "$"], &["EXEC"]]),
            (Kind::Counter, 8..14) => plan(Act::Count(None), &[&["INCR", "$"]]),
            (Kind::Counter, 14..17) => plan(Act::Count(None), &[&["MULTI"], &["INCR", "$"], &["EXEC"]]),
            (Kind::Counter, _) => plan(Act::Count(None), &[&["EVAL", "return redis.call('INCR', KEYS[1])", "1", "$"]]),
            (Kind::List, 7..13) => plan(Act::Push(number, None), &[&["RPUSH", "$", &value]]),
            (Kind::List, _) => plan(Act::Take(None), &[&["LPOP", "$"]]),
        }
    }
}

impl Shared {
    fn fresh(&self) -> Arc<Key> {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (name, is_made) = ((self.name)(number), (self.is_made)(number));
        Arc::new(Key { name, kind: Kind::of(number), is_made, begun: AtomicU64::new(0), operations: Mutex::default() })
    }

    fn now_us(&self) -> u64 {
        self.began.elapsed().as_micros() as u64
    }

    fn pick(&self, random: &mut Random) -> Arc<Key> {
        let mut in_use = lock(&self.in_use);
        let key = &mut in_use[random.below(KEYS)];
        let unknown = lock(&key.operations).iter().filter(|o| o.returned_us == UNKNOWN).count();
        if key.begun.fetch_add(1, Ordering::Relaxed) >= OPERATIONS as u64 || unknown >= UNKNOWNS {
            lock(&self.left).push(std::mem::replace(key, self.fresh()));
        }
        Arc::clone(key)
    }

    fn work(&self, number: usize) {
        let mut random = Random::new(number as u64 + 1);
        let mut connection = None;
        let mut values = 1;
        while !self.stop.load(Ordering::Relaxed) {
            let key = self.pick(&mut random);
            // Values are unique.
            values += 1;
            let plan = key.kind.next(values * 10 + number as u32, &mut random);
            let answered = self.perform(&mut connection, number, &key, &plan);
            std::thread::sleep(if answered { PAUSE } else { PAUSE * 10 });
        }
    }

    /// Executes and records an operation. Returns false on an error or without a reply.
    fn perform(&self, connection: &mut Option<Client>, number: usize, key: &Key, plan: &Plan) -> bool {
        if connection.is_none() {
            *connection = Client::try_connect(self.addresses[number % self.addresses.len()]).ok();
        }
        let Some(client) = connection.as_mut() else { return false };
        client.timeout(TIMEOUT);
        let mut bytes = Vec::new();
        for command in &plan.commands {
            let words: Vec<&str> =
                command.iter().map(|word| if word == "$" { key.name.as_str() } else { word }).collect();
            bytes.extend(encode(&words));
        }
        let invoked_us = self.now_us();
        let replies: std::io::Result<Vec<Value>> =
            client.try_write(&bytes).and_then(|()| plan.commands.iter().map(|_| client.try_reply()).collect());
        let returned_us = self.now_us();
        // A member of a cluster did not execute the command. An ordinary client of clusters sends it to the named member.
        if let Some((word, owner)) = replies.as_ref().ok().and_then(|replies| redirect(replies)) {
            lock(&self.tally).errors.entry(word.clone()).or_insert(word);
            *connection = owner.and_then(|address| Client::try_connect(address).ok());
            return false;
        }
        let (told, error) = match replies {
            Ok(replies) => {
                let error = replies.iter().find_map(|reply| reply.error().map(str::to_owned));
                (replies.into_iter().next_back().filter(|_| error.is_none()), error)
            }
            Err(error) => {
                *connection = None;
                lock(&self.tally).broken += 1;
                (None, Some(format!("BROKEN {error}")))
            }
        };
        {
            let mut tally = lock(&self.tally);
            tally.answered += u64::from(told.is_some());
            tally.unknown += u64::from(told.is_none());
            if let Some(error) = error.filter(|error| !error.starts_with("BROKEN ")) {
                tally.errors.entry(error.split(' ').next().unwrap_or_default().to_owned()).or_insert(error);
            }
        }
        let is_answered = told.is_some();
        let act = match (&plan.act, told) {
            (Act::Read(_), None) => return false,
            (act, None) => act.clone(),
            (act, Some(told)) => seen(act, &told),
        };
        // A time to live starts by the server's clock.
        let slack = if matches!(act, Act::Write(_, Some(_))) { CLOCK.as_micros() as u64 } else { 0 };
        let operation = Operation {
            invoked_us: invoked_us.saturating_sub(slack),
            returned_us: if is_answered { returned_us + slack } else { UNKNOWN },
            act,
            by: format!("client {number}, {}", plan.commands[0][0]),
        };
        lock(&key.operations).push(operation);
        is_answered
    }
}

/// Returns the first word of the error of a member that does not serve the key now, and the owner if it is MOVED.
fn redirect(replies: &[Value]) -> Option<(String, Option<SocketAddr>)> {
    let error = replies.iter().find_map(Value::error)?;
    let words: Vec<&str> = error.split(' ').collect();
    match words[..] {
        [word @ "MOVED", _, address] => Some((word.to_owned(), address.parse().ok())),
        [word @ ("ASK" | "TRYAGAIN"), ..] => Some((word.to_owned(), None)),
        _ => None,
    }
}

/// Converts a reply to the checker's form.
fn seen(act: &Act, told: &Value) -> Act {
    let number = |value: &Value| value.text().parse().expect("a number");
    match (act, told) {
        (Act::Read(_), Value::Nil) => Act::Read(None),
        (Act::Read(_), Value::Bulk(_)) => Act::Read(Some(vec![number(told)])),
        // A transaction that reads twice: two different values are converted to a value that was never written.
        (Act::Read(_), Value::Array(items)) if items.as_slice() == [Value::Nil, Value::Nil] => Act::Read(None),
        (Act::Read(_), Value::Array(items)) if items.len() == 2 && items[0] == items[1] => {
            Act::Read(Some(vec![number(&items[0])]))
        }
        (Act::Read(_), Value::Array(items)) if items.is_empty() => Act::Read(None),
        (Act::Read(_), Value::Array(items)) => Act::Read(Some(items.iter().map(number).collect())),
        (Act::Count(_), Value::Int(count)) => Act::Count(Some(Some(*count))),
        (Act::Count(_), Value::Array(items)) => Act::Count(Some(Some(items[0].int()))),
        (Act::Remove(_), Value::Int(removed)) => Act::Remove(Some(*removed)),
        (Act::Push(value, _), Value::Int(length)) => Act::Push(*value, Some(*length)),
        // An empty pop is equivalent to an empty read.
        (Act::Take(_), Value::Nil) => Act::Read(None),
        (Act::Take(_), Value::Bulk(_)) => Act::Take(Some(number(told))),
        (Act::Write(..), Value::Simple(_)) => act.clone(),
        (act, told) => panic!("{act:?} was answered with {told:?}"),
    }
}

/// Clients alternate between two servers. If the checker misses this violation, it would miss others.
#[test]
fn two_servers_are_not_taken_for_one() {
    let nodes = [Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default())];
    let addresses = nodes.each_ref().map(Node::address);
    let recording = Recording::start(&addresses, |number| format!("h:{number}"));
    recording.wait_for(500);
    let why = recording.finish().expect_err("two servers");
    assert!(why.contains("fits no order"), "{why}");
    // A single server is linearizable.
    let recording = Recording::start(&addresses[..1], |number| format!("one:{number}"));
    recording.wait_for(2000);
    let (tally, keys) = recording.finish().expect("one server");
    assert!(tally.unknown == 0 && tally.errors.is_empty() && keys.len() > 20, "{tally:?}");
}
