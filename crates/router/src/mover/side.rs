//! One side of a move: the connection to its node, what is being asked there, and what a lost connection may still do.
//!
//! What was asked of a node is a *job*: some commands in one piece, and what their replies mean together. Jobs are answered in the order in which they
//! were asked, because they travel on one connection.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use switchyard_policy::migration::{BatchId, Copied, Durability, Key, Process, Stored};
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;

use super::big::Place;
use super::connection::{Connection, error_text, field};
use super::last_piece::{self, Last, LastRead};
use super::staging::Staged;
use crate::settings::NodeAccess;

/// Between two attempts to reach a node.
const RETRY: Duration = Duration::from_millis(200);

/// Its time is doubled so often at most.
const SLOW_MAX: u32 = 7;

/// How long a node may take to make something safe, milliseconds.
const SECURE_MS: &[u8] = b"2000";

/// How long the target may take in a MIGRATE, milliseconds.
const MIGRATE_MS: &[u8] = b"1000";

/// What is known of how lately or often a key was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Use {
    /// `OBJECT FREQ`
    Frequency,
    /// `OBJECT IDLETIME`
    Idle,
}

/// How a batch is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// `DUMP`, and stored by `RESTORE`: whatever it is.
    Serialised,
    /// `GET`, and stored by `SET NX`: nothing is serialised, compressed or summed up, and it costs a third. What is no string answers
    /// WRONGTYPE, and is read once more.
    Plain,
    /// It is staged: only its tail.
    Staged,
}

/// A key in one database, as it was read.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) database: u32,
    pub(super) form: Form,
    pub(super) payload: Vec<u8>,
    /// What a staged value lacks.
    pub(super) last: Option<Box<Last>>,
    /// Unix time in milliseconds; 0: never.
    pub(super) expires_ms: i64,
    pub(super) usage: Option<i64>,
}

/// Something asked of a node.
#[derive(Debug)]
pub(super) enum Ask {
    /// Read keys.
    Copy {
        batch: BatchId,
        reading: Reading,
    },
    /// Store; per reply the key's place, `None` for a SELECT. `count` keys.
    Store {
        batch: BatchId,
        places: Vec<Option<usize>>,
        count: usize,
    },
    Secure {
        batch: BatchId,
        durability: Durability,
    },
    Remove {
        batch: BatchId,
    },
    Migrate {
        batch: BatchId,
    },
    /// A SCAN of a walk, behind a SELECT or not.
    Scan {
        purges: bool,
    },
    /// UNLINK of a purge.
    Purge,
    /// Give staging keys what they lack, and count; then rename them.
    Finish {
        batch: BatchId,
        step: last_piece::Step,
        items: Vec<last_piece::Item>,
    },
    /// Remove staging keys.
    Discard,
    /// How much it has worked.
    Look,
}

/// What is read of which keys.
#[derive(Debug)]
pub(super) struct Reading {
    keys: Vec<Key>,
    databases: Vec<AskedOf>,
    usage: Option<Use>,
    /// The node tells when a key expires, not only in how long.
    absolute: bool,
    form: Form,
    /// Not because the machine asks for it: what was staged of these keys is worth nothing.
    pub(super) again: bool,
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
}

/// What was read: per key an outcome and its content.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) keys: Vec<Key>,
    pub(super) outcomes: Vec<Copied>,
    pub(super) contents: Vec<Vec<Content>>,
    /// Those that are no strings, and were asked for as such.
    others: Vec<usize>,
    /// Keys of which the tail cannot be read: what is staged of them is worth nothing.
    pub(super) unusable: Vec<Place>,
}

/// What is known of keys that are read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known<'k> {
    /// The databases that are asked.
    pub(super) databases: &'k [u32],
    /// Those in which no key expires.
    pub(super) lasting: &'k [u32],
    /// Keys of which all but the tail is at the target.
    pub(super) staged: &'k BTreeMap<Place, Staged>,
}

impl Read {
    /// Whether nearly all that is there are strings.
    pub(super) fn are_strings(&self) -> bool {
        let all = self.contents.iter().flatten();
        // A serialised value begins with its type, and strings are type 0.
        let strings = all.clone().filter(|c| kind_of(c) == "string").count();
        strings > 0 && strings * 10 >= all.count() * 9
    }
}

/// The type of a value: of a serialised one the first byte is the type, as in RDB files.
pub(super) fn kind_of(content: &Content) -> &'static str {
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
pub(super) type Databases = Vec<(u32, bool)>;

/// A job that is done, and the replies.
pub(super) type Answered = (Ask, Vec<Vec<u8>>);

#[derive(Debug)]
struct Job {
    ask: Ask,
    replies: usize,
}

/// A side.
#[derive(Debug)]
pub(super) struct End {
    pub(super) node: NodeId,
    pub(super) connection: Option<Connection>,
    jobs: VecDeque<Job>,
    answers: Vec<Vec<u8>>,
    /// Connections that broke and whose end is not confirmed.
    pub(super) dead: Vec<Process>,
    /// When to try to reach it again.
    pub(super) next_try: Option<Instant>,
    /// `appendfsync always`: what is answered is on disk.
    pub(super) always_synced: bool,
    pub(super) policy: String,
    /// Seconds of a processor that it had used, and when it said so.
    work: Option<(f64, Instant)>,
    /// Subscribers may hear of what is stored here: a RESTORE is ours, a SET could be anybody's.
    pub(super) tells_changes: bool,
    /// How often it has not answered in time in this leg: it may have more time then, because a key may be large.
    pub(super) slow: u32,
}

impl End {
    pub(super) fn new(node: NodeId) -> Self {
        Self {
            node,
            connection: None,
            jobs: VecDeque::new(),
            answers: Vec::new(),
            dead: Vec::new(),
            next_try: None,
            always_synced: false,
            policy: String::new(),
            work: None,
            tells_changes: true,
            slow: 0,
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// The connection is given up: whatever was asked is not known.
    pub(super) fn fail(&mut self) {
        if let Some(connection) = self.connection.take() {
            self.dead.push(connection.process);
        }
        self.jobs.clear();
        self.answers.clear();
        self.next_try = Some(Instant::now());
    }

    pub(super) fn try_later(&mut self) {
        self.next_try = Some(Instant::now() + RETRY);
    }

    /// What was asked and is answered now.
    pub(super) fn exchange(&mut self, patience: Duration) -> Result<Vec<Answered>, String> {
        let Some(connection) = &mut self.connection else { return Ok(Vec::new()) };
        connection.exchange(&mut self.answers)?;
        // Asked again for something that takes longer than that, it would never be done.
        let patience = patience.saturating_mul(1 << self.slow.min(SLOW_MAX));
        if connection.unanswered > 0 && connection.heard.elapsed() > patience {
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
                done.push((job.ask, answers));
            }
        }
        Ok(done)
    }

    fn ask(&mut self, ask: Ask, replies: usize) {
        self.jobs.push_back(Job { ask, replies });
    }

    /// Reads keys.
    pub(super) fn copy(&mut self, batch: BatchId, keys: Vec<Key>, known: Known<'_>, form: Form, usage: Option<Use>) {
        self.read(batch, keys, known, form, usage, None);
    }

    /// Reads keys whole, of which what was staged is worth nothing.
    pub(super) fn copy_again(&mut self, batch: BatchId, keys: Vec<Key>, known: Known<'_>) {
        self.read(batch, keys, known, Form::Serialised, None, None);
        if let Some(Job { ask: Ask::Copy { reading, .. }, .. }) = self.jobs.back_mut() {
            reading.again = true;
        }
    }

    /// Reads what turned out to be no string. Without such keys what was read is given back.
    pub(super) fn copy_others(&mut self, batch: BatchId, mut read: Read, known: Known<'_>) -> Option<Read> {
        if read.others.is_empty() {
            return Some(read);
        }
        let keys = std::mem::take(&mut read.others).iter().filter_map(|place| read.keys.get(*place).cloned()).collect();
        self.read(batch, keys, known, Form::Serialised, None, Some(Box::new(read)));
        None
    }

    fn read(&mut self, batch: BatchId, keys: Vec<Key>, known: Known<'_>, form: Form, usage: Option<Use>, first: Option<Box<Read>>) {
        let Some(connection) = &mut self.connection else { return };
        let absolute = connection.version >= (7, 0);
        let before = connection.unanswered;
        if !absolute {
            connection.push(&[b"TIME"]);
        }
        let mut asked = Vec::new();
        let mut tails = BTreeMap::new();
        for database in known.databases.iter().copied() {
            let of = AskedOf { database, selected: connection.select(database), expiry: !known.lasting.contains(&database) };
            asked.push(of);
            for key in &keys {
                if !known.staged.is_empty()
                    && let place = (key.clone(), database)
                    && let Some(staged) = known.staged.get(&place)
                {
                    connection.push(&[if absolute { b"PEXPIRETIME" } else { b"PTTL" }, key]);
                    let read = last_piece::ask(connection, key, staged);
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
        self.ask(
            Ask::Copy { batch, reading: Reading { keys, databases: asked, usage, absolute, form, again: false, staged: tails, first } },
            replies,
        );
    }

    /// Stores what was read of each of the keys.
    pub(super) fn store(&mut self, batch: BatchId, contents: &[(&Key, &[Content])], usage: Option<Use>) {
        let Some(connection) = &mut self.connection else { return };
        let mut databases: Vec<u32> = contents.iter().flat_map(|(_, c)| c.iter()).map(|c| c.database).collect();
        databases.sort_unstable();
        databases.dedup();
        let mut places = Vec::new();
        let mut scratch = (String::new(), String::new());
        for database in databases {
            if connection.select(database) {
                places.push(None);
            }
            let all = contents.iter().enumerate().flat_map(|(place, (key, of_key))| of_key.iter().map(move |c| (place, *key, c)));
            for (place, key, content) in all.filter(|(_, _, content)| content.database == database) {
                if content.form == Form::Staged {
                    continue; // it is finished afterwards
                }
                scratch.0 = content.expires_ms.to_string();
                places.push(Some(place));
                if content.form == Form::Plain {
                    let until: &[&[u8]] = if content.expires_ms == 0 { &[] } else { &[b"PXAT", scratch.0.as_bytes()] };
                    let args = [&[b"SET", &key[..], &content.payload, b"NX"], until].concat();
                    connection.push(&args);
                    continue;
                }
                let mut args: Vec<&[u8]> = vec![b"RESTORE", key, scratch.0.as_bytes(), &content.payload, b"ABSTTL"];
                if let (Some(usage), Some(value)) = (usage, content.usage) {
                    scratch.1 = value.to_string();
                    args.push(if usage == Use::Frequency { b"FREQ" } else { b"IDLETIME" });
                    args.push(scratch.1.as_bytes());
                }
                connection.push(&args);
            }
        }
        let replies = places.len();
        self.ask(Ask::Store { batch, places, count: contents.len() }, replies);
    }

    /// Does a step of finishing what is staged.
    pub(super) fn finish(&mut self, batch: BatchId, step: last_piece::Step, mut items: Vec<last_piece::Item>, lasts: &[&Last]) {
        let Some(connection) = &mut self.connection else { return };
        let before = connection.unanswered;
        for (item, last) in items.iter_mut().zip(lasts) {
            let from = connection.unanswered;
            connection.select(item.place.1);
            last_piece::push(connection, step, item, last);
            item.replies = connection.unanswered - from;
        }
        let replies = connection.unanswered - before;
        self.ask(Ask::Finish { batch, step, items }, replies);
    }

    /// Removes staging keys.
    pub(super) fn discard(&mut self, names: Vec<(u32, Vec<u8>)>) {
        let Some(connection) = &mut self.connection else { return };
        let before = connection.unanswered;
        for (database, name) in names {
            connection.select(database);
            connection.push(&[b"UNLINK", &name]);
        }
        let replies = connection.unanswered - before;
        self.ask(Ask::Discard, replies);
    }

    /// Makes what was stored on this connection safe. False where it is as safe as that already.
    pub(super) fn secure(&mut self, batch: BatchId, durability: Durability) -> bool {
        let Some(connection) = &mut self.connection else { return true };
        match durability {
            Durability::Memory => return false,
            Durability::Aof if self.always_synced => return false,
            Durability::Aof => connection.push(&[b"WAITAOF", b"1", b"0", SECURE_MS]),
            Durability::Replica => connection.push(&[b"WAIT", b"1", SECURE_MS]),
        }
        self.ask(Ask::Secure { batch, durability }, 1);
        true
    }

    fn unlink(&mut self, keys: &[Key], databases: &[u32]) -> usize {
        let Some(connection) = &mut self.connection else { return 0 };
        let before = connection.unanswered;
        let mut args: Vec<&[u8]> = vec![b"UNLINK"];
        args.extend(keys.iter().map(|key| &key[..]));
        for database in databases {
            connection.select(*database);
            connection.push(&args);
        }
        connection.unanswered - before
    }

    /// Removes keys, of all these databases.
    pub(super) fn remove(&mut self, batch: BatchId, keys: &[Key], databases: &[u32]) {
        let replies = self.unlink(keys, databases);
        self.ask(Ask::Remove { batch }, replies);
    }

    /// Has the node migrate keys itself to where `access` leads.
    pub(super) fn migrate(&mut self, batch: BatchId, keys: &[Key], databases: &[u32], address: SocketAddr, access: &NodeAccess) {
        let Some(connection) = &mut self.connection else { return };
        let (host, port) = (address.ip().to_string(), address.port().to_string());
        let before = connection.unanswered;
        for database in databases {
            connection.select(*database);
            let number = database.to_string();
            let mut args: Vec<&[u8]> = vec![b"MIGRATE", host.as_bytes(), port.as_bytes(), b"", number.as_bytes(), MIGRATE_MS];
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
        self.ask(Ask::Migrate { batch }, replies);
    }

    /// Removes keys of a database that should not be there.
    pub(super) fn purge(&mut self, keys: &[Key], database: u32) {
        let replies = self.unlink(keys, &[database]);
        self.ask(Ask::Purge, replies);
    }

    pub(super) fn scan(&mut self, database: u32, cursor: &[u8], purges: bool) {
        let Some(connection) = &mut self.connection else { return };
        let selected = connection.select(database);
        connection.push(&[b"SCAN", cursor, b"COUNT", b"1000"]);
        self.ask(Ask::Scan { purges }, 1 + usize::from(selected));
    }

    /// Asks how much the node has worked.
    pub(super) fn look(&mut self) {
        let Some(connection) = &mut self.connection else { return };
        connection.push(&[b"INFO", b"cpu"]);
        self.ask(Ask::Look, 1);
    }

    /// What of a processor the thread that executes commands has used since it last said so: a share, or `None` at first.
    pub(super) fn worked(&mut self, answers: &[Vec<u8>]) -> Option<f64> {
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
    pub(super) fn databases(&mut self, patience: Duration) -> Result<Databases, String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        // Who asks goes on with what is lost, and looks here again when it is back.
        let info = connection.info("keyspace", patience).inspect_err(|why| connection.give_up(why.clone()))?;
        let database = |line: &str| {
            let (number, counts) = line.strip_prefix("db")?.split_once(':')?;
            // Not told is not none.
            let expires = counts.split(',').find_map(|count| count.strip_prefix("expires=")).is_none_or(|count| count.trim() != "0");
            Some((number.parse().ok()?, expires))
        };
        Ok(info.lines().filter_map(database).collect())
    }

    /// Learns how the node evicts, syncs, and whether it tells of changes.
    pub(super) fn learn(&mut self, patience: Duration) -> Result<(), String> {
        let Some(connection) = &mut self.connection else { return Err("not connected".to_owned()) };
        let memory = connection.info("memory", patience)?;
        self.policy = field(&memory, "maxmemory_policy").unwrap_or_default().to_owned();
        let setting =
            |answer: &[u8]| String::from_utf8_lossy(reply::elements(answer).nth(1).and_then(reply::text).unwrap_or_default()).into_owned();
        // Where CONFIG is refused, WAITAOF decides.
        let fsync = connection.call(&[b"CONFIG", b"GET", b"appendfsync"], patience)?;
        let aof = connection.call(&[b"CONFIG", b"GET", b"appendonly"], patience)?;
        let events = connection.call(&[b"CONFIG", b"GET", b"notify-keyspace-events"], patience)?;
        self.tells_changes = reply::is_error(&events) || !setting(&events).is_empty();
        self.always_synced = setting(&fsync) == "always" && setting(&aof) == "yes";
        Ok(())
    }
}

/// What came of a [`Ask::Copy`].
pub(super) fn copied(reading: Reading, answers: Vec<Vec<u8>>) -> Result<Read, String> {
    let Reading { keys, databases, usage, absolute, form, staged, first, .. } = reading;
    let mut unusable = Vec::new();
    let mut answers = answers.into_iter();
    let mut next = || answers.next().unwrap_or_default();
    let now_ms = if absolute {
        0
    } else {
        let time = next();
        let time: Vec<i64> = reply::elements(&time).filter_map(|n| std::str::from_utf8(reply::text(n)?).ok()?.parse().ok()).collect();
        let [seconds, micros] = time[..] else { return Err("it does not tell its TIME".to_owned()) };
        seconds * 1000 + micros / 1000
    };
    let mut contents: Vec<Vec<Content>> = keys.iter().map(|_| Vec::new()).collect();
    let mut refused: Vec<Option<String>> = vec![None; keys.len()];
    let mut others = Vec::new();
    for AskedOf { database, selected, expiry } in databases {
        if selected {
            let answer = next();
            if reply::is_error(&answer) {
                return Err(format!("SELECT {database}: {}", error_text(&answer)));
            }
        }
        for (place, of_key) in contents.iter_mut().enumerate() {
            if !staged.is_empty()
                && let staging = (keys[place].clone(), database)
                && let Some(read) = staged.get(&staging)
            {
                let expiry = reply::integer(&next());
                match (expiry.filter(|expiry| *expiry != -2), read.take(&mut next)) {
                    (None, _) => {}
                    (Some(_), None) => unusable.push(staging),
                    (Some(expiry), Some(last)) => {
                        let expires_ms = if expiry < 0 { 0 } else { (now_ms + expiry).max(1) };
                        let last = Some(Box::new(last));
                        of_key.push(Content { database, form: Form::Staged, payload: Vec::new(), last, expires_ms, usage: None });
                    }
                }
                continue;
            }
            let used = usage.and_then(|_| reply::integer(&next()));
            let expiry = expiry.then(&mut next);
            let mut value = next();
            if form == Form::Plain && value.starts_with(b"-WRONGTYPE") {
                others.push(place);
                continue;
            }
            if let Some(error) = [Some(&value), expiry.as_ref()].into_iter().flatten().find(|answer| reply::is_error(answer)) {
                refused[place] = Some(error_text(error));
                continue;
            }
            let expiry = expiry.map_or(Some(-1), |answer| reply::integer(&answer));
            let length = reply::text(&value).filter(|_| !reply::is_null(&value)).map(<[u8]>::len);
            let (Some(expiry), Some(length)) = (expiry, length) else { continue };
            let expires_ms = match expiry {
                // Gone in between, or so between two questions: then it is gone.
                -2 => continue,
                ..0 => 0,
                at => now_ms + at,
            };
            // 0 would be for ever.
            let expires_ms = if expiry >= 0 { expires_ms.max(1) } else { 0 };
            // `$<length>CRLF<payload>CRLF`
            value.truncate(value.len().saturating_sub(2));
            value.drain(..value.len() - length);
            of_key.push(Content { database, form, payload: value, last: None, expires_ms, usage: used });
        }
    }
    let outcome = |(of_key, refused): (&Vec<Content>, Option<String>)| match refused {
        Some(why) => Copied::Refused(why),
        None if of_key.is_empty() => Copied::Absent,
        None => Copied::Taken { bytes: of_key.iter().map(|c| c.last.as_ref().map_or(c.payload.len() as u64, |last| last.bytes)).sum() },
    };
    let outcomes = contents.iter().zip(refused).map(outcome).collect();
    others.sort_unstable();
    others.dedup();
    let read = Read { keys, outcomes, contents, others, unusable };
    Ok(match first {
        Some(first) => together(*first, read),
        None => read,
    })
}

/// What was read first, and of those that are no strings what was read then: of all databases, in the same order.
fn together(mut first: Read, then: Read) -> Read {
    let mut at = 0;
    first.unusable.extend(then.unusable);
    for ((key, outcome), content) in then.keys.into_iter().zip(then.outcomes).zip(then.contents) {
        let Some(place) = first.keys[at..].iter().position(|k| Arc::ptr_eq(k, &key)).map(|found| at + found) else { break };
        first.outcomes[place] = outcome;
        first.contents[place] = content;
        at = place + 1;
    }
    first
}

/// What came of a [`Ask::Store`]: an outcome per key.
pub(super) fn stored(places: &[Option<usize>], count: usize, answers: &[Vec<u8>]) -> Result<Vec<Stored>, String> {
    let mut outcomes = vec![Stored::Stored; count];
    for (place, answer) in places.iter().zip(answers) {
        let is_error = reply::is_error(answer);
        match place {
            None if is_error => return Err(format!("it refuses a database: {}", error_text(answer))),
            // RESTORE says so, and SET NX that it did nothing.
            Some(place) if answer.starts_with(b"-BUSYKEY") || reply::is_null(answer) => {
                let so_far = std::mem::replace(&mut outcomes[*place], Stored::Exists);
                if matches!(so_far, Stored::Refused(_)) {
                    outcomes[*place] = so_far;
                }
            }
            Some(place) if is_error => outcomes[*place] = Stored::Refused(error_text(answer)),
            _ => {}
        }
    }
    Ok(outcomes)
}

/// What came of a [`Ask::Secure`]: why not, where not.
pub(super) fn secured(durability: Durability, answer: &[u8]) -> Option<String> {
    if reply::is_error(answer) {
        return Some(error_text(answer));
    }
    let count = reply::integer(answer).or_else(|| reply::elements(answer).next().and_then(reply::integer)).unwrap_or(0);
    let what = match durability {
        Durability::Aof => "its append-only file was not synced within 2 s",
        _ => "no replica acknowledged it within 2 s",
    };
    (count < 1).then(|| what.to_owned())
}

/// A node's answer to SCAN: the next cursor, and keys.
pub(super) fn scanned(answer: &[u8]) -> Option<(Vec<u8>, Vec<&[u8]>)> {
    let mut pair = reply::elements(answer);
    let cursor = pair.next().and_then(reply::text)?.to_vec();
    Some((cursor, reply::elements(pair.next()?).filter_map(reply::text).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(texts: &[&str]) -> Vec<Vec<u8>> {
        texts.iter().map(|t| t.as_bytes().to_vec()).collect()
    }

    fn reading(keys: &[&str], databases: &[(u32, bool)], absolute: bool, form: Form) -> Reading {
        let databases = databases.iter().map(|(database, selected)| AskedOf { database: *database, selected: *selected, expiry: true });
        let keys = keys.iter().map(|key| Key::from(key.as_bytes())).collect();
        Reading { keys, databases: databases.collect(), usage: None, absolute, form, again: false, staged: BTreeMap::new(), first: None }
    }

    #[test]
    fn a_key_is_what_it_is_in_all_databases() {
        let replies = answers(&[
            ":-1\r\n",
            "$2\r\nxx\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":5000\r\n",
            "-OOM no\r\n",
            "+OK\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":7\r\n",
            "$1\r\ny\r\n",
        ]);
        let of = reading(&["a", "b", "c"], &[(0, false), (3, true)], true, Form::Serialised);
        let Read { outcomes, contents, .. } = copied(of, replies).expect("understood");
        assert_eq!(outcomes, [Copied::Taken { bytes: 2 }, Copied::Absent, Copied::Refused("OOM no".into())]);
        assert_eq!((contents[0].len(), contents[2][0].database, contents[2][0].expires_ms), (1, 3, 7));
        assert_eq!((&contents[0][0].payload[..], &contents[2][0].payload[..]), (&b"xx"[..], &b"y"[..]));
    }

    #[test]
    fn what_is_no_string_is_read_once_more() {
        let replies = answers(&[
            ":-1\r\n",
            "$2\r\nxx\r\n",
            ":90\r\n",
            "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":-1\r\n",
            "$0\r\n\r\n",
        ]);
        let of = reading(&["a", "b", "c", "d"], &[(0, false)], true, Form::Plain);
        let first = copied(of, replies).expect("understood");
        assert_eq!(first.others, [1]);
        let then = Reading { first: Some(Box::new(first)), ..reading(&[], &[(0, false)], true, Form::Serialised) };
        let b = then.first.as_ref().map(|first| first.keys[1].clone()).expect("it is there");
        let read = copied(Reading { keys: vec![b], ..then }, answers(&[":90\r\n", "$3\r\n\u{4}zz\r\n"])).expect("understood");
        let taken = |bytes| Copied::Taken { bytes };
        assert_eq!(read.outcomes, [taken(2), taken(3), Copied::Absent, taken(0)]);
        assert_eq!((read.contents[1][0].form, read.contents[1][0].expires_ms), (Form::Serialised, 90));
        assert!(!read.are_strings(), "one of three is none");
    }

    #[test]
    fn an_older_node_tells_how_long_and_what_time_it_is() {
        let replies = answers(&["*2\r\n$2\r\n10\r\n$6\r\n500000\r\n", ":250\r\n", "$1\r\ny\r\n"]);
        let read = copied(reading(&["a"], &[(0, false)], false, Form::Serialised), replies).expect("understood");
        assert_eq!(read.contents[0][0].expires_ms, 10_750);
    }

    #[test]
    fn a_refusal_counts_more_than_a_key_that_exists() {
        let replies = answers(&["+OK\r\n", "-BUSYKEY Target key name already exists.\r\n", "+OK\r\n", "-OOM no\r\n"]);
        let outcomes = stored(&[Some(0), Some(1), None, Some(1)], 2, &replies).expect("understood");
        assert_eq!(outcomes, [Stored::Stored, Stored::Refused("OOM no".into())]);
        assert_eq!(stored(&[Some(0)], 1, &answers(&["$-1\r\n"])), Ok(vec![Stored::Exists]));
        assert!(stored(&[None], 1, &answers(&["-ERR DB index is out of range\r\n"])).is_err());
    }
}
