//! Cost of keys of several nodes in one command: of the first use, which brings them to one node, and of later uses.
//!
//! Plain names are compared with names that a hash tag keeps together, which is what an application would have to use
//! instead. Both alternate in one run. A first use ends with a record on the disk, so the table also shows the time of
//! `fdatasync` in the same folder.

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use switchyard_bench::client::Client;
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;
use switchyard_bench::wire::{self, Reply};

use crate::document::{replace_between_marks, today};
use crate::moves::admin;
use crate::moves::site::{Programs, Routed, version_of};
use crate::moves::slot::{SLOTS, slot_of};
use crate::procfs::{CpuReading, describe_machine};
use crate::reproduce::spread::Spread;

const MARK: &str = "bench-together";
/// Connections of a load.
const CONNECTIONS: u64 = 8;
/// Operations that a connection sends at once.
const BATCH: u64 = 16;
/// Keys of a group.
const GROUP: u64 = 10;
/// Groups of the mixed load.
const GROUPS: u64 = 1000;
/// Pause between first uses, so that each finds an idle router.
const PAUSE: Duration = Duration::from_millis(20);

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// First uses to time.
    pub pairs: u64,
    /// Groups of ten keys for the measured rate of first uses.
    pub groups: u64,
    /// Duration of each measured load, and of half of the load before it, seconds.
    pub seconds: u64,
    /// Rounds. Each has all ways.
    pub rounds: usize,
    /// The document whose section is rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// Names of the keys that are used together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Names {
    /// Any names: the router brings the keys together.
    Plain,
    /// A hash tag keeps them together.
    Tagged,
}

impl Names {
    fn key(self, group: u64, number: u64) -> String {
        match self {
            Self::Plain => format!("group:{group}:key:{number}"),
            Self::Tagged => format!("{{group:{group}}}:key:{number}"),
        }
    }
}

/// Results of a run.
#[derive(Debug, Default)]
struct Results {
    fdatasync: Vec<Duration>,
    first_uses: Vec<Duration>,
    /// CPU of the router for later uses, to that with hash tags.
    later_uses: Vec<f64>,
    keys_per_second: Vec<f64>,
    /// Operations per second of the mixed load, to those with hash tags.
    mixed: Vec<f64>,
    /// Keys that still move during the mixed load, per second.
    still_moving: Vec<f64>,
}

/// Measures, prints, and rewrites the section of the document.
///
/// # Errors
/// If a server is missing, a command fails, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let programs = Programs::find(&settings.switchyard, None)?;
    let folder = tempfile::Builder::new()
        .prefix("switchyard-together-")
        .tempdir()
        .context("cannot create a temporary folder")?;
    let bench = Bench { settings, programs: &programs, folder: folder.path() };
    let mut results = Results { fdatasync: fdatasync_times(folder.path(), settings.pairs)?, ..Results::default() };
    let site = bench.site("pairs")?;
    let version = version_of(site.addresses[0])?;
    results.first_uses = bench.first_uses(&site)?;
    eprintln!("first uses: median {:.1} ms", quantile(&results.first_uses, 0.5));
    results.later_uses = bench.later_uses(&site)?;
    drop(site);
    for round in 0..settings.rounds {
        results.keys_per_second.push(bench.rate_of_first_uses(round)?);
        // The order rotates, so that a machine whose speed changes favours no way.
        let ways = if round % 2 == 0 { [Names::Plain, Names::Tagged] } else { [Names::Tagged, Names::Plain] };
        let mut rates = [0.0; 2];
        for names in ways {
            let (rate, moved) = bench.mixed(names, round)?;
            eprintln!("round {}: {names:?}: {rate:.0} operations/s, {moved:.1} keys/s move", round + 1);
            match names {
                Names::Plain => {
                    rates[0] = rate;
                    results.still_moving.push(moved);
                }
                Names::Tagged => rates[1] = rate,
            }
        }
        results.mixed.push(rates[0] / rates[1]);
    }
    let table = table(&results);
    print!("{}", table.to_text());
    let Some(out) = &settings.out else { return Ok(()) };
    let section = format!(
        "Measured on {} by `{}` on: {}. Servers: {version}. {} first uses of two keys; otherwise median (range) of {} rounds.\n\n{}",
        today(),
        settings.command_line,
        describe_machine(),
        settings.pairs,
        settings.rounds,
        table.to_markdown()
    );
    let document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    let document = replace_between_marks(&document, MARK, &section)
        .with_context(|| format!("cannot rewrite {}", out.display()))?;
    fs::write(out, document).with_context(|| format!("cannot write {}", out.display()))
}

/// A run, with its programs and folder.
struct Bench<'a> {
    settings: &'a Settings,
    programs: &'a Programs,
    folder: &'a Path,
}

impl Bench<'_> {
    /// Starts two servers behind the router.
    fn site(&self, name: &str) -> Result<Routed> {
        self.check_stop()?;
        Routed::start_many(self.programs, &[], 2, name, self.folder)
    }

    fn check_stop(&self) -> Result<()> {
        ensure!(!self.settings.stop.load(Ordering::Relaxed), "interrupted; nothing was written");
        Ok(())
    }

    /// Renames a key to a name of the other node, once per pair. Returns the times.
    fn first_uses(&self, site: &Routed) -> Result<Vec<Duration>> {
        let mut client = Client::connect(site.entry)?;
        let mut times = Vec::new();
        for pair in 0..self.settings.pairs {
            self.check_stop()?;
            let [from, to] = pair_apart(pair);
            client.ok(&[b"SET", from.as_bytes(), b"value"])?;
            client.ok(&[b"SET", to.as_bytes(), b"value"])?;
            std::thread::sleep(PAUSE);
            let begun = Instant::now();
            client.ok(&[b"RENAME", from.as_bytes(), to.as_bytes()])?;
            times.push(begun.elapsed());
            // Both exist again for later uses.
            client.ok(&[b"SET", from.as_bytes(), b"value"])?;
        }
        Ok(times)
    }

    /// Renames keys that are together to and fro. Returns the ratio of the router's CPU to that for keys with a hash tag,
    /// by rounds.
    fn later_uses(&self, site: &Routed) -> Result<Vec<f64>> {
        let pairs = self.settings.pairs;
        let mut client = Client::connect(site.entry)?;
        let names = |names: Names, pair: u64| match names {
            Names::Plain => pair_apart(pair),
            Names::Tagged => [names.key(pair, 0), names.key(pair, 1)],
        };
        for pair in 0..pairs {
            client.ok(&[b"SET", names(Names::Tagged, pair)[0].as_bytes(), b"value"])?;
        }
        let mut ratios = Vec::new();
        for round in 0..self.settings.rounds.max(1) * 2 {
            self.check_stop()?;
            let mut used = [Duration::ZERO; 2];
            for turn in 0..2 {
                let at = (round + turn) % 2;
                let way = [Names::Plain, Names::Tagged][at];
                let before = CpuReading::of(site.router.id())?;
                let until = Instant::now() + Duration::from_secs(self.settings.seconds);
                let mut uses = 0;
                for pair in (0..pairs).cycle() {
                    if Instant::now() > until {
                        break;
                    }
                    let [one, other] = names(way, pair);
                    let mut requests = Vec::new();
                    for _ in 0..BATCH {
                        wire::encode(&mut requests, &[b"RENAME", one.as_bytes(), other.as_bytes()]);
                        wire::encode(&mut requests, &[b"RENAME", other.as_bytes(), one.as_bytes()]);
                    }
                    client.send(&requests)?;
                    expect_replies(&mut client, 2 * BATCH)?;
                    uses += 2 * BATCH as u32;
                }
                used[at] = CpuReading::of(site.router.id())?.since(&before) / uses.max(1);
            }
            ratios.push(used[0].as_secs_f64() / used[1].as_secs_f64());
        }
        Ok(ratios)
    }

    /// Reads the keys of each group in one transaction. Returns keys per second.
    fn rate_of_first_uses(&self, round: usize) -> Result<f64> {
        let site = self.site(&format!("rate{round}"))?;
        let groups = self.settings.groups;
        fill(site.entry, groups, Names::Plain)?;
        let begun = Instant::now();
        let each = |connection: u64| -> Result<()> {
            let mut client = Client::connect(site.entry)?;
            for group in (connection..groups).step_by(CONNECTIONS as usize) {
                self.check_stop()?;
                let mut requests = Vec::new();
                wire::encode(&mut requests, &[b"MULTI"]);
                for number in 0..GROUP {
                    wire::encode(&mut requests, &[b"GET", Names::Plain.key(group, number).as_bytes()]);
                }
                wire::encode(&mut requests, &[b"EXEC"]);
                client.send(&requests)?;
                expect_replies(&mut client, GROUP + 2)?;
            }
            Ok(())
        };
        on_all_connections(each)?;
        Ok((groups * GROUP) as f64 / begun.elapsed().as_secs_f64())
    }

    /// Reads and writes single keys of groups, and in every fifth operation two keys of a group in one transaction. Returns
    /// operations per second, and keys per second that still move to other nodes.
    fn mixed(&self, names: Names, round: usize) -> Result<(f64, f64)> {
        let site = self.site(&format!("mixed{round}-{names:?}"))?;
        fill(site.entry, GROUPS, names)?;
        self.drive(&site, names, 2 * self.settings.seconds)?;
        let before = overrides(&site)?;
        let rate = self.drive(&site, names, self.settings.seconds)?;
        let moved = overrides(&site)?.saturating_sub(before) as f64 / self.settings.seconds as f64;
        Ok((rate, moved))
    }

    /// Returns operations per second of the mixed load.
    fn drive(&self, site: &Routed, names: Names, seconds: u64) -> Result<f64> {
        let length = Duration::from_secs(seconds);
        let begun = Instant::now();
        let each = |connection: u64| -> Result<u64> {
            let (mut client, mut random) = (Client::connect(site.entry)?, Rng::new(connection));
            let mut operations = 0;
            while begun.elapsed() < length {
                self.check_stop()?;
                let (mut requests, mut replies) = (Vec::new(), 0);
                for _ in 0..BATCH {
                    let group = random.below(GROUPS);
                    let mut key = || names.key(group, random.below(GROUP));
                    let (one, other) = (key(), key());
                    match random.below(10) {
                        0 | 1 => {
                            wire::encode(&mut requests, &[b"MULTI"]);
                            wire::encode(&mut requests, &[b"SET", one.as_bytes(), b"value"]);
                            wire::encode(&mut requests, &[b"SET", other.as_bytes(), b"value"]);
                            wire::encode(&mut requests, &[b"EXEC"]);
                            replies += 4;
                        }
                        2..=5 => {
                            wire::encode(&mut requests, &[b"SET", one.as_bytes(), b"value"]);
                            replies += 1;
                        }
                        _ => {
                            wire::encode(&mut requests, &[b"GET", one.as_bytes()]);
                            replies += 1;
                        }
                    }
                }
                client.send(&requests)?;
                expect_replies(&mut client, replies)?;
                operations += BATCH;
            }
            Ok(operations)
        };
        let operations: u64 = on_all_connections(each)?.into_iter().sum();
        Ok(operations as f64 / begun.elapsed().as_secs_f64())
    }
}

/// Runs `each` for all connections at the same time.
fn on_all_connections<R: Send>(each: impl Fn(u64) -> Result<R> + Sync) -> Result<Vec<R>> {
    std::thread::scope(|scope| {
        let each = &each;
        let threads: Vec<_> = (0..CONNECTIONS).map(|connection| scope.spawn(move || each(connection))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no connection panics")).collect()
    })
}

/// Returns two names: one in the first half of the slots, and one in the second half.
fn pair_apart(pair: u64) -> [String; 2] {
    let name = |is_upper: bool| {
        let mut names = (0_u64..).map(|number| format!("pair:{pair}:{}:{number}", u8::from(is_upper)));
        names.find(|name| (slot_of(name.as_bytes()) >= SLOTS / 2) == is_upper).unwrap_or_default()
    };
    [name(false), name(true)]
}

fn fill(entry: SocketAddr, groups: u64, names: Names) -> Result<()> {
    let key = |number: u64| names.key(number / GROUP, number % GROUP);
    switchyard_bench::client::fill(entry, groups * GROUP, b"value", key)
}

fn expect_replies(client: &mut Client, count: u64) -> Result<()> {
    for _ in 0..count {
        let error = client.reply(|reply| match reply {
            Reply::Error(text) => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        })?;
        if let Some(error) = error {
            bail!("the router replied: {error}");
        }
    }
    Ok(())
}

/// Number of keys that live elsewhere than their slots.
fn overrides(site: &Routed) -> Result<u64> {
    let nodes = admin::get(site.admin, "/api/v1/nodes")?;
    let nodes = nodes["nodes"].as_array().context("the report of the nodes has no list")?;
    Ok(nodes.iter().filter_map(|node| node["overrides"].as_u64()).sum())
}

/// Times of a write of 512 bytes and `fdatasync`.
fn fdatasync_times(folder: &Path, count: u64) -> Result<Vec<Duration>> {
    let mut file = fs::File::create(folder.join("fdatasync")).context("cannot create a file")?;
    let mut times = Vec::new();
    for _ in 0..count {
        std::thread::sleep(PAUSE / 10);
        let begun = Instant::now();
        file.write_all(&[0; 512]).and_then(|()| file.sync_data()).context("cannot write to a file")?;
        times.push(begun.elapsed());
    }
    Ok(times)
}

/// Returns this share of the sorted times, in milliseconds.
fn quantile(times: &[Duration], share: f64) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = ((sorted.len() as f64 * share) as usize).min(sorted.len().saturating_sub(1));
    sorted.get(at).map_or(f64::NAN, |time| time.as_secs_f64() * 1e3)
}

fn table(results: &Results) -> Table {
    let mut table = Table::of_text(["", "goal", "result"]);
    let spread = |values: &[f64], digits: usize| {
        let spread = Spread::of(values.iter().copied());
        spread.map_or("-".to_owned(), |spread| spread.text(|value| format!("{value:.digits$}")))
    };
    let sync = quantile(&results.fdatasync, 0.5);
    table.row(["`fdatasync` in the same folder, median".to_owned(), String::new(), format!("{sync:.1} ms")]);
    table.row([
        "first use of two small keys, median".to_owned(),
        format!("at most {:.1} ms: `fdatasync` and 1 ms", sync + 1.0),
        format!("{:.1} ms", quantile(&results.first_uses, 0.5)),
    ]);
    table.row([
        "first use of two small keys, p99".to_owned(),
        "at most 15 ms".to_owned(),
        format!("{:.1} ms", quantile(&results.first_uses, 0.99)),
    ]);
    table.row([
        "CPU of the router per later use, to that with a hash tag".to_owned(),
        "at most 1.02".to_owned(),
        spread(&results.later_uses, 2),
    ]);
    table.row([
        "first uses in groups of ten, keys/s".to_owned(),
        "at least 30,000".to_owned(),
        spread(&results.keys_per_second, 0),
    ]);
    table.row([
        "20 % transactions of two keys, 1,000 groups of ten: operations/s to those with hash tags".to_owned(),
        "at least 0.9".to_owned(),
        spread(&results.mixed, 2),
    ]);
    table.row([
        "keys that still move then, per second".to_owned(),
        "below 1".to_owned(),
        spread(&results.still_moving, 1),
    ]);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_has_keys_of_both_halves_of_the_slots() {
        for pair in 0..20 {
            let [one, other] = pair_apart(pair);
            assert!(slot_of(one.as_bytes()) < SLOTS / 2 && slot_of(other.as_bytes()) >= SLOTS / 2);
        }
        let slots = [0, 9].map(|number| slot_of(Names::Tagged.key(3, number).as_bytes()));
        assert_eq!(slots[0], slots[1]);
    }

    #[test]
    fn results_are_shown_beside_their_goals() {
        let results = Results {
            fdatasync: vec![Duration::from_millis(2)],
            first_uses: (1..=100).map(Duration::from_millis).collect(),
            later_uses: vec![1.0, 1.01, 1.03],
            ..Results::default()
        };
        let text = table(&results).to_text();
        for part in ["at most 3.0 ms", "51.0 ms", "100.0 ms", "1.01 (1.00 to 1.03)"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
