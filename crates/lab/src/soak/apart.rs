//! Clients whose commands have keys of several nodes: bank transfers, moves between lists, and locks of two keys.
//!
//! The names have no hash tag, so the router brings the keys together, while slots and single keys move and processes
//! fail. A request without a reply may have been executed, so the checks hold in both cases: the sum of all accounts is
//! constant, each list element exists once, and a counter has one increment for each holder of its lock. The histories
//! ([`crate::history`]) check the order of operations, with keys of one slot.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use switchyard_bench::random::{Rng, mix};

use crate::history::connection::{Connection, Outcome, error_text};

const CLIENTS: u64 = 4;
/// 64 keys in all.
const ACCOUNTS: u64 = 25;
const LISTS: u64 = 24;
const LOCKS: u64 = 5;
/// Initial balance of each account.
const BALANCE: i64 = 1000;
/// Initial elements of each list.
const ELEMENTS: u64 = 4;

/// Adds to the second account what it takes from the first.
const TRANSFER: &str = "redis.call('DECRBY', KEYS[1], ARGV[1]) return redis.call('INCRBY', KEYS[2], ARGV[1])";
/// Releases a lock that has this token.
const RELEASE: &str =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1], KEYS[2]) end return 0";

/// Arguments of a command.
type Words = Vec<String>;

/// Running clients.
#[derive(Debug)]
pub(super) struct ApartClients {
    entry: SocketAddr,
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<Result<Counts>>>,
}

/// Results of a client.
#[derive(Debug, Default)]
struct Counts {
    steps: u64,
    /// Increments by counter: those with a reply, and those without.
    increments: [(i64, i64); LOCKS as usize],
}

fn account(n: u64) -> String {
    format!("apart:account:{n}")
}

fn list(n: u64) -> String {
    format!("apart:list:{n}")
}

fn lock(n: u64) -> [String; 2] {
    ["a", "b"].map(|half| format!("apart:lock:{n}:{half}"))
}

fn counter(n: u64) -> String {
    format!("apart:counter:{n}")
}

fn words<const N: usize>(words: [&str; N]) -> Words {
    words.map(str::to_owned).to_vec()
}

/// Returns MULTI, these commands, EXEC.
fn transaction(commands: impl IntoIterator<Item = Words>) -> Vec<Words> {
    std::iter::once(words(["MULTI"])).chain(commands).chain([words(["EXEC"])]).collect()
}

/// Returns two different numbers below `bound`.
fn two(rng: &mut Rng, bound: u64) -> (u64, u64) {
    let one = rng.below(bound);
    (one, (one + 1 + rng.below(bound - 1)) % bound)
}

/// Returns the elements of the reply to EXEC, which is the last of these.
fn executed(replies: &[Value]) -> Result<&[Value]> {
    let reply = replies.last().and_then(Value::as_array).with_context(|| format!("EXEC has {replies:?}"))?;
    match reply.iter().find_map(error_text) {
        Some(error) => bail!("a part of a transaction failed: {error}"),
        None => Ok(reply),
    }
}

fn check_sum(balances: &[Value]) -> Result<()> {
    let sum: Option<i64> = balances.iter().map(|balance| balance.as_str()?.parse::<i64>().ok()).sum();
    let expected = BALANCE * ACCOUNTS as i64;
    ensure!(sum == Some(expected), "the accounts have {sum:?} together instead of {expected}: {balances:?}");
    Ok(())
}

fn check_elements(lists: &[Value]) -> Result<()> {
    let found: Vec<&str> = lists.iter().filter_map(Value::as_array).flatten().filter_map(Value::as_str).collect();
    let different: BTreeSet<&str> = found.iter().copied().collect();
    let expected = (LISTS * ELEMENTS) as usize;
    ensure!(
        found.len() == expected && different.len() == expected,
        "the lists have {} elements, {} different ones, instead of {expected}: {lists:?}",
        found.len(),
        different.len()
    );
    Ok(())
}

fn balances() -> Vec<Words> {
    transaction((0..ACCOUNTS).map(|n| words(["GET", &account(n)])))
}

fn contents() -> Vec<Words> {
    transaction((0..LISTS).map(|n| words(["LRANGE", &list(n), "0", "-1"])))
}

impl ApartClients {
    /// Creates the keys and starts the clients. `has_faults`: errors and missing replies are no violations.
    pub(super) fn start(entry: SocketAddr, seed: u64, has_faults: bool) -> Result<Self> {
        let mut first = Client::new(entry, false, seed);
        for n in 0..ACCOUNTS {
            first.call(&[words(["SET", &account(n), &BALANCE.to_string()])])?;
        }
        for n in 0..LISTS {
            let elements = (0..ELEMENTS).map(|element| format!("{n}-{element}"));
            first.call(&[["RPUSH".to_owned(), list(n)].into_iter().chain(elements).collect()])?;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let start = |n: u64| {
            let (mut client, stop) = (Client::new(entry, has_faults, mix(seed ^ n)), Arc::clone(&stop));
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    client.step(n == 0)?;
                    client.counts.steps += 1;
                }
                Ok(client.counts)
            })
        };
        Ok(Self { entry, clients: (0..CLIENTS).map(start).collect(), stop })
    }

    /// Whether all clients continue. A client that has found a violation has ended.
    pub(super) fn all_continue(&self) -> bool {
        !self.clients.iter().any(JoinHandle::is_finished)
    }

    /// Ends the clients, checks all keys, and removes them. Returns the number of steps.
    pub(super) fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Counts::default();
        for client in self.clients {
            let counts = client.join().map_err(|_| anyhow!("a client has panicked"))??;
            all.steps += counts.steps;
            for ((sure, unsure), (more, more_unsure)) in all.increments.iter_mut().zip(counts.increments) {
                *sure += more;
                *unsure += more_unsure;
            }
        }
        let mut last = Client::new(self.entry, true, 0);
        check_sum(executed(&last.until_done(&balances())?)?)?;
        check_elements(executed(&last.until_done(&contents())?)?)?;
        for (n, (sure, unsure)) in all.increments.into_iter().enumerate() {
            let replies = last.until_done(&[words(["GET", &counter(n as u64)])])?;
            let value = replies[0].as_str().map_or(Ok(0), str::parse::<i64>)?;
            ensure!(
                (sure..=sure + unsure).contains(&value),
                "counter {n} has {value} instead of {sure} and at most {unsure} more: two clients had its lock"
            );
        }
        let plain = (0..ACCOUNTS).map(account).chain((0..LISTS).map(list)).chain((0..LOCKS).map(counter));
        for key in plain.chain((0..LOCKS).flat_map(lock)) {
            last.until_done(&[words(["DEL", &key])])?;
        }
        Ok(all.steps)
    }
}

struct Client {
    connection: Connection,
    has_faults: bool,
    rng: Rng,
    counts: Counts,
}

impl Client {
    fn new(entry: SocketAddr, has_faults: bool, seed: u64) -> Self {
        let timeout = if has_faults { Duration::from_secs(2) } else { Duration::from_secs(30) };
        Self { connection: Connection::new(entry, timeout), has_faults, rng: Rng::new(seed), counts: Counts::default() }
    }

    /// Sends commands in one write. `None`: a fault has prevented the replies or caused errors.
    fn call(&mut self, commands: &[Words]) -> Result<Option<Vec<Value>>> {
        let failure = match self.connection.call(commands) {
            Outcome::Replies(replies) => match replies.iter().find_map(error_text) {
                None => return Ok(Some(replies)),
                Some(error) => error.to_owned(),
            },
            Outcome::NotSent => "no connection".to_owned(),
            Outcome::Unknown => "no reply".to_owned(),
        };
        // The soak counts the keys of nodes on direct connections, and no keys are brought together in the meantime.
        let is_expected = self.has_faults || failure.contains("used past this router");
        ensure!(is_expected, "{failure}, without a fault: {commands:?}");
        // Ends an open transaction.
        self.connection.forget();
        std::thread::sleep(Duration::from_millis(10));
        Ok(None)
    }

    /// Repeats idempotent commands until they succeed.
    fn until_done(&mut self, commands: &[Words]) -> Result<Vec<Value>> {
        let end = Instant::now() + super::RECOVERY;
        loop {
            if let Some(replies) = self.call(commands)? {
                return Ok(replies);
            }
            ensure!(Instant::now() < end, "no reply within {:?}: {commands:?}", super::RECOVERY);
        }
    }

    /// Performs a random step. `reads_all`: checks of all accounts or lists are among the steps. They bring all of these
    /// to one node.
    fn step(&mut self, reads_all: bool) -> Result<()> {
        match self.rng.below(100) {
            0..20 => self.transfer_by_transaction(),
            20..35 => self.transfer_by_script(),
            35..50 => self.transfer_by_watch(),
            50..80 => self.move_element(),
            80 if reads_all => self.check_all(),
            _ => self.increment_in_lock(),
        }
    }

    fn transfer_by_transaction(&mut self) -> Result<()> {
        let ((from, to), amount) = (two(&mut self.rng, ACCOUNTS), self.rng.below(9).to_string());
        let steps = [words(["DECRBY", &account(from), &amount]), words(["INCRBY", &account(to), &amount])];
        if let Some(replies) = self.call(&transaction(steps))? {
            executed(&replies)?;
        }
        Ok(())
    }

    fn transfer_by_script(&mut self) -> Result<()> {
        let ((from, to), amount) = (two(&mut self.rng, ACCOUNTS), self.rng.below(9).to_string());
        self.call(&[words(["EVAL", TRANSFER, "2", &account(from), &account(to), &amount])]).map(drop)
    }

    fn transfer_by_watch(&mut self) -> Result<()> {
        let ((from, to), amount) = (two(&mut self.rng, ACCOUNTS), self.rng.below(9) as i64);
        let (from, to) = (account(from), account(to));
        let reads = [words(["WATCH", &from, &to]), words(["GET", &from]), words(["GET", &to])];
        let Some(replies) = self.call(&reads)? else { return Ok(()) };
        let balance = |reply: &Value| reply.as_str().and_then(|text| text.parse::<i64>().ok());
        let (Some(had), Some(other_had)) = (balance(&replies[1]), balance(&replies[2])) else {
            bail!("accounts {from} and {to} have {replies:?}");
        };
        let set = |key: &str, value: i64| words(["SET", key, &value.to_string()]);
        let steps = transaction([set(&from, had - amount), set(&to, other_had + amount)]);
        match self.call(&steps)? {
            // Another client has changed an account.
            Some(replies) if replies.last() == Some(&Value::Null) => Ok(()),
            Some(replies) => executed(&replies).map(drop),
            None => Ok(()),
        }
    }

    fn move_element(&mut self) -> Result<()> {
        let (from, to) = two(&mut self.rng, LISTS);
        let mut side = || if self.rng.below(2) == 0 { "LEFT" } else { "RIGHT" };
        let command = words(["LMOVE", &list(from), &list(to), side(), side()]);
        self.call(&[command]).map(drop)
    }

    fn check_all(&mut self) -> Result<()> {
        let reads_balances = self.rng.below(2) == 0;
        let commands = if reads_balances { balances() } else { contents() };
        let Some(replies) = self.call(&commands)? else { return Ok(()) };
        let found = executed(&replies)?;
        if reads_balances { check_sum(found) } else { check_elements(found) }
    }

    /// Increments a counter by a read and a write, in a lock. If the outcome of a step is unknown, the lock stays.
    fn increment_in_lock(&mut self) -> Result<()> {
        let n = self.rng.below(LOCKS);
        let ([one, other], counter) = (lock(n), counter(n));
        let token = format!("{:x}", self.rng.next_u64());
        let Some(replies) = self.call(&[words(["MSETNX", &one, &token, &other, &token])])? else { return Ok(()) };
        if replies[0] != json!(1) {
            return Ok(());
        }
        let Some(replies) = self.call(&[words(["GET", &counter])])? else { return Ok(()) };
        let value = replies[0].as_str().map_or(Ok(0), str::parse::<i64>)?;
        let count = &mut self.counts.increments[n as usize];
        count.1 += 1;
        if self.call(&[words(["SET", &counter, &(value + 1).to_string()])])?.is_none() {
            return Ok(());
        }
        let count = &mut self.counts.increments[n as usize];
        *count = (count.0 + 1, count.1 - 1);
        match self.call(&[words(["EVAL", RELEASE, "2", &one, &other, &token])])? {
            Some(replies) if replies[0] != json!(2) => bail!("lock {n} has lost its holder: {replies:?}"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_find_wrong_sums_and_lost_or_doubled_elements() {
        let mut balances = vec![json!(BALANCE.to_string()); ACCOUNTS as usize];
        assert!(check_sum(&balances).is_ok());
        balances[3] = json!((BALANCE - 1).to_string());
        assert!(check_sum(&balances).is_err());
        balances[3] = Value::Null;
        assert!(check_sum(&balances).is_err());
        let mut lists: Vec<Value> = (0..LISTS)
            .map(|n| Value::Array((0..ELEMENTS).map(|element| json!(format!("{n}-{element}"))).collect()))
            .collect();
        assert!(check_elements(&lists).is_ok());
        let element = lists[0].as_array_mut().and_then(Vec::pop).expect("an element");
        assert!(check_elements(&lists).is_err(), "lost");
        lists[1].as_array_mut().expect("a list").push(element);
        assert!(check_elements(&lists).is_ok(), "moved");
        lists[2].as_array_mut().expect("a list")[0] = json!("1-0");
        assert!(check_elements(&lists).is_err(), "doubled");
    }

    #[test]
    fn failed_parts_of_transactions_are_violations() {
        let replies = |exec: Value| [json!({ "status": "OK" }), json!({ "status": "QUEUED" }), exec];
        assert!(executed(&replies(json!([1, "2"]))).is_ok());
        assert!(executed(&replies(json!([1, { "error": "WRONGTYPE" }]))).is_err());
        assert!(executed(&replies(Value::Null)).is_err());
    }
}
