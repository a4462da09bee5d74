//! Moves one big hash while it is read and written: measures the longest command, and checks every acknowledged write
//! afterwards.
//!
//! A closed loop with few connections, because the question is how long a single command is held, not how many are. One
//! connection uses other keys of the same node, which shows delays of the whole node.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use switchyard_bench::client::Client;
use switchyard_bench::wire::{Reply, encode};

use super::generator::Layout;
use super::site::Routed;
use super::{Bench, TIMEOUT};

/// Bytes of a value.
const VALUE: usize = 100;
/// Connections that read and write the hash, each with its own fields.
const USERS: u64 = 4;

/// Latencies of commands.
#[derive(Debug, Clone, Default)]
pub(super) struct Times {
    pub(super) commands: usize,
    pub(super) p99: Duration,
    pub(super) p999: Duration,
    pub(super) longest: Duration,
}

impl Times {
    fn of(mut all: Vec<Duration>) -> Self {
        all.sort_unstable();
        let at = |share: f64| all.get((all.len() as f64 * share) as usize).or(all.last()).copied().unwrap_or_default();
        Self { commands: all.len(), p99: at(0.99), p999: at(0.999), longest: at(1.0) }
    }
}

/// Results of the move.
#[derive(Debug, Clone, Default)]
pub(super) struct BigMove {
    pub(super) fields: u64,
    /// MEMORY USAGE at the source.
    pub(super) bytes: i64,
    pub(super) took: Duration,
    /// Commands on the hash, without and with the move.
    pub(super) control: Times,
    pub(super) moving: Times,
    /// Commands on other keys of the node.
    pub(super) control_others: Times,
    pub(super) moving_others: Times,
    /// Keys moved in pieces, and whole.
    pub(super) in_pieces: u64,
    pub(super) whole: u64,
    pub(super) hold_max: Duration,
    /// Fields without their last value, and failed commands.
    pub(super) wrong: u64,
    pub(super) errors: u64,
}

/// Phases: warm-up, control, move, end.
const WARM: u8 = 0;
const CONTROL: u8 = 1;
const MOVING: u8 = 2;
const OVER: u8 = 3;

/// Results of one user.
#[derive(Debug, Default)]
struct Seen {
    control: Vec<Duration>,
    moving: Vec<Duration>,
    errors: u64,
    wrong: u64,
    /// Last acknowledged version of each written field.
    last: std::collections::HashMap<u64, u64>,
}

fn field(number: u64) -> String {
    format!("field:{number:09}")
}

fn value(number: u64, version: u64) -> String {
    format!("{number}:{version}:{:x<width$}", "", width = VALUE - 24)
}

/// Reads and writes until the end: fields `user`, `user + USERS`, ... of the hash, or keys of another slot.
fn user(
    site: std::net::SocketAddr,
    key: Option<&str>,
    other: &str,
    user: u64,
    fields: u64,
    phase: &AtomicU8,
) -> Result<Seen> {
    let mut client = Client::connect(site)?;
    let mut seen = Seen::default();
    let mut state = user.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1;
    for version in 1_u64.. {
        let now = phase.load(Ordering::Relaxed);
        if now == OVER {
            break;
        }
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let number = (state >> 33) % (fields / USERS) * USERS + user;
        let (name, own) = (field(number), format!("{other}:{}", number % 1000));
        let written = value(number, version);
        let args: Vec<&[u8]> = match (key, version % 2) {
            (Some(key), 0) => vec![b"HSET", key.as_bytes(), name.as_bytes(), written.as_bytes()],
            (Some(key), _) => vec![b"HGET", key.as_bytes(), name.as_bytes()],
            (None, 0) => vec![b"SET", own.as_bytes(), written.as_bytes()],
            (None, _) => vec![b"GET", own.as_bytes()],
        };
        let expected = key.map(|_| value(number, seen.last.get(&number).copied().unwrap_or(0)));
        let begun = Instant::now();
        let (is_error, is_wrong) = client.call(&args, |reply| match reply {
            Reply::Error(_) => (true, false),
            Reply::Bulk(bytes) => (false, expected.as_ref().is_some_and(|expected| bytes != expected.as_bytes())),
            Reply::Nil => (false, key.is_some()),
            _ => (false, false),
        })?;
        let took = begun.elapsed();
        seen.errors += u64::from(is_error);
        seen.wrong += u64::from(is_wrong);
        if version.is_multiple_of(2) && key.is_some() && !is_error {
            seen.last.insert(number, version);
        }
        match now {
            CONTROL => seen.control.push(took),
            MOVING => seen.moving.push(took),
            _ => {}
        }
    }
    Ok(seen)
}

impl Bench<'_> {
    /// Moves a hash with one field for each configured key.
    pub(super) fn big(&mut self) -> Result<()> {
        let name = self.name("routed");
        let site = Routed::start(&self.programs, &self.settings.serve_args, &name, self.folder)?;
        self.note_version(site.addresses[0])?;
        let layout = Layout::new(2);
        let (key, other) = (layout.name(0), layout.name(1));
        let fields = self.settings.keys;
        self.print(format!("a hash of {fields} fields"));
        let mut client = Client::connect(site.entry)?;
        for from in (0..fields).step_by(200) {
            self.stopped()?;
            let all: Vec<(String, String)> =
                (from..(from + 200).min(fields)).map(|n| (field(n), value(n, 0))).collect();
            let mut args: Vec<&[u8]> = vec![b"HSET", key.as_bytes()];
            args.extend(all.iter().flat_map(|(field, value)| [field.as_bytes(), value.as_bytes()]));
            let mut out = Vec::new();
            encode(&mut out, &args);
            client.send(&out)?;
            client.reply(|reply| matches!(reply, Reply::Integer(_)))?;
        }
        let bytes = client.integer(&[b"MEMORY", b"USAGE", key.as_bytes()]).unwrap_or(0);
        let phase = Arc::new(AtomicU8::new(WARM));
        let failed = Arc::new(AtomicBool::new(false));
        let mut users = Vec::new();
        for number in 0..=USERS {
            let (entry, phase, failed) = (site.entry, Arc::clone(&phase), Arc::clone(&failed));
            let (key, other) = ((number < USERS).then(|| key.clone()), other.clone());
            users.push(std::thread::spawn(move || {
                let seen = user(entry, key.as_deref(), &other, number % USERS, fields, &phase);
                failed.fetch_or(seen.is_err(), Ordering::Relaxed);
                seen
            }));
        }
        self.print("the hash is used, without a move".to_owned());
        let outcome = self.pause(Duration::from_secs(1)).and_then(|()| {
            phase.store(CONTROL, Ordering::Relaxed);
            self.pause(self.settings.control)?;
            phase.store(MOVING, Ordering::Relaxed);
            self.print("the hash moves".to_owned());
            let moved = site.move_slots(&self.programs, (0, 1), &self.settings.goal, "0", TIMEOUT, || {
                ensure!(!failed.load(Ordering::Relaxed), "a connection failed");
                self.stopped()
            })?;
            self.pause(Duration::from_millis(500))?;
            Ok(moved)
        });
        phase.store(OVER, Ordering::Relaxed);
        let mut seen = Vec::new();
        for user in users {
            seen.push(user.join().map_err(|_| anyhow::anyhow!("a user panicked"))??);
        }
        let (took, report) = outcome?;
        let others = seen.pop().context("no user with other keys")?;
        let mut wrong = seen.iter().map(|s| s.wrong).sum::<u64>();
        ensure!(
            client.integer(&[b"HLEN", key.as_bytes()])? == fields as i64,
            "the number of fields of the hash has changed"
        );
        for number in 0..fields {
            let version = seen.iter().find_map(|s| s.last.get(&number)).copied().unwrap_or(0);
            wrong +=
                u64::from(client.text(&[b"HGET", key.as_bytes(), field(number).as_bytes()])? != value(number, version));
        }
        let number = |name: &str| report[name].as_u64().unwrap_or(0);
        self.results.big = Some(BigMove {
            fields,
            bytes,
            took,
            control: Times::of(seen.iter().flat_map(|s| s.control.iter().copied()).collect()),
            moving: Times::of(seen.iter().flat_map(|s| s.moving.iter().copied()).collect()),
            control_others: Times::of(others.control),
            moving_others: Times::of(others.moving),
            in_pieces: number("big_in_pieces"),
            whole: number("big_whole"),
            hold_max: Duration::from_micros(number("hold_max_us")),
            wrong,
            errors: seen.iter().map(|s| s.errors).sum::<u64>() + others.errors,
        });
        Ok(())
    }
}
