//! The six acts: each changes the load or kills a server, and waits for the router's reaction.
//!
//! The planner, the hot copies and the autoscaler decide on their own. The narrator prints the decisions from their
//! histories. If one of them does not act in time, the narrator reports that, and the demo fails.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use switchyard_bench::load::{Failure, Tally};
use switchyard_bench::numbers::{millis, thousands};
use switchyard_control::admin::{
    DecisionReport, HistoryReport, HotCopiesReport, HotKeysReport, LinkReport, MovesReport, SlotsReport, StatusReport,
};

use super::Arguments;
use super::loads::{Loads, Part};
use super::narrator::{Kind, Narrator};
use super::stage::{Stage, program};

/// Maximum wait for any reaction, generous for slow machines.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Interval between queries of the router's histories.
const POLL_INTERVAL: Duration = Duration::from_millis(400);
/// Minimum slots of a node that has its share, of three nodes.
const SHARE_MIN: u64 = 4000;
/// The node that is killed.
const VICTIM: usize = 2;

/// Error if the demo was interrupted by a signal.
#[derive(Debug)]
struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Runs the story.
pub(super) fn run(
    stage: &mut Stage,
    narrator: &mut Narrator,
    arguments: &Arguments,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    let loads = Loads::new(stage.address, arguments.connections, arguments.rate);
    let mut story = Story {
        stage,
        narrator,
        loads,
        rate: arguments.rate,
        stop,
        shown: Instant::now(),
        polled_at: Instant::now(),
        numbers: String::new(),
        reader: String::new(),
        decisions: BTreeMap::new(),
        events: BTreeSet::new(),
        missed: Vec::new(),
        excused: 0,
        suspects: Vec::new(),
    };
    let told = story.acts();
    let is_whole = match &told {
        Err(error) if error.is::<Interrupted>() => false,
        Err(_) => return told,
        Ok(()) => true,
    };
    story.verdict(is_whole)?;
    if arguments.hold && is_whole {
        story.hold()?;
    } else if is_whole {
        story.suggest_next()?;
    }
    ensure!(story.missed.is_empty(), "the demo failed: {}", story.missed.join("; "));
    Ok(())
}

struct Story<'s> {
    stage: &'s mut Stage,
    narrator: &'s mut Narrator,
    loads: Loads,
    rate: u32,
    stop: &'s AtomicBool,
    shown: Instant,
    polled_at: Instant,
    numbers: String,
    /// Node of the hot key.
    reader: String,
    /// Displayed planner decisions, with their outcomes.
    decisions: BTreeMap<u64, Option<String>>,
    /// Events of the autoscaler that were shown.
    events: BTreeSet<(u64, String)>,
    missed: Vec<String>,
    /// Errors for keys of the killed node.
    excused: u64,
    /// All other errors.
    suspects: Vec<Failure>,
}

impl Story<'_> {
    fn acts(&mut self) -> anyhow::Result<()> {
        self.skewed_load()?;
        self.read_key()?;
        self.written_key()?;
        self.more_load()?;
        self.killed_node()?;
        self.less_load()
    }

    fn narrate(&mut self, kind: Kind, text: &str) {
        let text = self.stage.with_names(text);
        self.narrator.narrate(kind, &text);
    }

    fn miss(&mut self, text: &str) {
        self.narrate(Kind::Missed, text);
        self.missed.push(text.to_owned());
    }

    /// Shows the load and the router's decisions until `found` returns a value. `None` on a timeout.
    fn watch<T>(
        &mut self,
        timeout: Duration,
        mut found: impl FnMut(&mut Self) -> anyhow::Result<Option<T>>,
    ) -> anyhow::Result<Option<T>> {
        let end = Instant::now() + timeout;
        loop {
            std::thread::sleep(Duration::from_millis(20));
            if self.stop.load(Ordering::Relaxed) {
                bail!(Interrupted);
            }
            self.stage.check_router()?;
            if self.shown.elapsed() >= self.narrator.period() {
                self.show();
            }
            let is_last = Instant::now() >= end;
            if is_last || self.polled_at.elapsed() >= POLL_INTERVAL {
                self.polled_at = Instant::now();
                self.print_news()?;
                if let Some(found) = found(self)? {
                    return Ok(Some(found));
                }
            }
            if is_last {
                return Ok(None);
            }
        }
    }

    /// Keeps the load running for a while.
    fn pause(&mut self, time: Duration) -> anyhow::Result<()> {
        self.watch(time, |_| Ok(None::<()>)).map(drop)
    }

    fn show(&mut self) {
        let period = self.shown.elapsed();
        self.shown = Instant::now();
        let interval = self.loads.look();
        self.numbers = numbers(period, &interval, &self.loads.total());
        self.narrator.show(&self.numbers);
    }

    /// Prints the load at the end of an act.
    fn note_load(&mut self) {
        let numbers = self.numbers.clone();
        self.narrator.narrate(Kind::Load, &numbers);
    }

    /// Prints new decisions and actions of the planner and the autoscaler.
    fn print_news(&mut self) -> anyhow::Result<()> {
        let history: HistoryReport = self.stage.get("/api/v1/plan/history")?;
        for decision in history.decisions.iter().rev() {
            self.narrate_decision(decision);
        }
        let scale = self.stage.scale()?;
        for event in scale.events.iter().rev() {
            if self.events.insert((event.at, event.text.clone())) {
                let kind = if event.kind == "decided" { Kind::Decided } else { Kind::Done };
                self.narrate(kind, &format!("autoscaler: {}", event.text));
            }
        }
        Ok(())
    }

    fn narrate_decision(&mut self, decision: &DecisionReport) {
        let Some(id) = decision.id else { return };
        if let Entry::Vacant(place) = self.decisions.entry(id) {
            place.insert(None);
            self.narrate(Kind::Decided, &format!("{}, decision {id}: {}", decision.by, decision.message));
            let keys: Vec<_> = decision.steps.iter().filter(|step| step.key.is_some()).collect();
            if let Some(first) = keys.first() {
                let key = first.key.as_deref().unwrap_or_default();
                let more = if keys.len() > 1 { format!(", and {} more", keys.len() - 1) } else { String::new() };
                self.narrate(
                    Kind::Decided,
                    &format!("  the key {key} moves from {} to {}{more}", first.from, first.to),
                );
            }
        }
        // The outcome of a decision in progress starts with this text.
        let outcome = decision.outcome.as_ref().filter(|outcome| !outcome.starts_with("in progress"));
        if let Some(outcome) = outcome.filter(|outcome| self.decisions.get(&id) != Some(&Some((*outcome).clone()))) {
            self.decisions.insert(id, Some(outcome.clone()));
            self.narrate(Kind::Done, &format!("{}, decision {id}: {outcome}", decision.by));
        }
    }

    /// Requests per node, as counted by the router.
    fn shares(&self) -> anyhow::Result<String> {
        let report: HotKeysReport = self.stage.get("/api/v1/hotkeys")?;
        let of_each = |requests: f64| thousands(requests.round().max(0.0) as u64);
        let each = report
            .nodes
            .iter()
            .map(|node| format!("{} {}", node.node, of_each(node.requests_per_second.unwrap_or_default())));
        Ok(each.collect::<Vec<_>>().join(", "))
    }

    fn skewed_load(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "1. A load on two nodes, with some keys used far more than others");
        self.loads.begin(Part::Daily, "shop:")?;
        let rate = thousands(u64::from(self.rate));
        self.narrate(
            Kind::Seen,
            &format!(
                "{rate} requests/s of nine commands start, by clients that know one address; keys are Zipfian (0.99)"
            ),
        );
        self.pause(Duration::from_secs(4))?;
        let shares = self.shares()?;
        self.narrate(Kind::Seen, &format!("requests/s: {shares}"));
        self.note_load();
        Ok(())
    }

    fn read_key(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "2. A key that every client reads");
        let key = "news:s:0";
        let before: HotCopiesReport = self.stage.get("/api/v1/hot-copies")?;
        self.loads.begin(Part::Read, "news:")?;
        let places = self.stage.places(&[key.as_bytes().to_vec()])?;
        let node = places.first().map_or_else(String::new, |place| place.node.clone());
        self.reader.clone_from(&node);
        let rate = thousands(Part::Read.rate(self.rate) as u64);
        self.narrate(
            Kind::Seen,
            &format!("{rate} requests/s for the key {key} of {node}; one client writes it, and no reader may see an old value"),
        );
        let wanted = Part::Read.rate(self.rate) / 2.0;
        let answered = self.watch(TIMEOUT, |story| {
            let hot: HotKeysReport = story.stage.get("/api/v1/hotkeys")?;
            let own = hot.nodes.iter().flat_map(|node| &node.keys).find(|hot| hot.key.as_deref() == Some(key));
            Ok(own.filter(|own| own.hits_per_second >= wanted).map(|own| (own.hits_per_second, own.reads_per_second)))
        })?;
        match answered {
            None => self.miss("hot copies do not serve the key that every client reads"),
            Some((hits, reads)) => {
                let now: HotCopiesReport = self.stage.get("/api/v1/hot-copies")?;
                let (more, fills) = (now.hits - before.hits, now.fills - before.fills);
                self.narrate(
                    Kind::Decided,
                    &format!("hot copies: {key} is read so often that the router serves it from copies"),
                );
                let (hits, more, fills, reads) =
                    (thousands(hits as u64), thousands(more), thousands(fills), thousands(reads as u64));
                self.narrate(Kind::Done, &format!("{more} reads were answered from copies, now {hits} in a second; {reads} in a second reach {node}, and {fills} copies were read from it"));
            }
        }
        self.pause(Duration::from_secs(2))?;
        self.note_load();
        Ok(())
    }

    fn written_key(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "3. Two keys of the same node that are written all the time");
        let node = self.reader.clone();
        let (prefix, keys) = self.two_keys_of(&node)?;
        self.loads.begin(Part::Written, &prefix)?;
        let rate = thousands(Part::Written.rate(self.rate) as u64);
        let names = keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect::<Vec<_>>();
        self.narrate(
            Kind::Seen,
            &format!("{rate} INCR/s for the keys {} and {} of {}: no copy helps", names[0], names[1], node),
        );
        let relocated =
            self.watch(TIMEOUT, |story| Ok(story.stage.places(&keys)?.into_iter().find(|place| place.relocated)))?;
        match relocated {
            None => self.miss("the planner moves neither of the keys that are written all the time"),
            Some(place) => {
                let history: HistoryReport = self.stage.get("/api/v1/plan/history")?;
                let moves_it = |decision: &&DecisionReport| {
                    decision.by == "planner"
                        && decision
                            .steps
                            .iter()
                            .any(|step| step.key.as_deref() == Some(place.key.as_str()) && step.to == place.node)
                };
                match history.decisions.iter().find(moves_it).and_then(|decision| decision.id) {
                    None => self.miss("the planner has no decision for the key that was moved"),
                    Some(id) => {
                        let text = format!(
                            "override: {} is at {}, though its slot {} belongs to {} (decision {id} of the planner)",
                            place.key, place.node, place.slot, place.owner
                        );
                        self.narrate(Kind::Done, &text);
                    }
                }
            }
        }
        self.pause(Duration::from_secs(3))?;
        let shares = self.shares()?;
        self.narrate(Kind::Seen, &format!("requests/s: {shares}"));
        self.note_load();
        Ok(())
    }

    /// Returns a prefix with which this node owns both counters of [`Part::Written`].
    fn two_keys_of(&self, node: &str) -> anyhow::Result<(String, Vec<Vec<u8>>)> {
        for at in 1..1000 {
            let prefix = format!("stock{at}:");
            let keys = [0, 1].map(|key| format!("{prefix}c:{key}").into_bytes()).to_vec();
            if self.stage.places(&keys)?.iter().all(|place| place.owner == node) {
                return Ok((prefix, keys));
            }
        }
        bail!("no two test keys belong to {node}")
    }

    fn more_load(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "4. More load than two nodes can serve");
        self.loads.begin(Part::Rush, "rush:")?;
        let (rate, capacity) = (thousands(Part::Rush.rate(self.rate) as u64), thousands(u64::from(self.rate / 2 * 5)));
        self.narrate(
            Kind::Seen,
            &format!("{rate} requests/s more; the configured capacity of a node is {capacity}, and a fifth of that must stay free"),
        );
        let joined = self.watch(TIMEOUT, |story| {
            let scale = story.stage.scale()?;
            Ok((scale.nodes == 3 && scale.change.is_none() && scale.started.len() == 1)
                .then(|| scale.started[0].clone()))
        })?;
        match joined {
            None => self.miss("the autoscaler adds no node"),
            Some(address) => {
                let keys = thousands(self.stage.keys(&address)?);
                let status: StatusReport = self.stage.get("/api/v1/status")?;
                let slots = status.nodes.iter().find(|node| node.address == address).map_or(0, |node| node.slots);
                match slots >= SHARE_MIN {
                    true => {
                        let text = format!(
                            "a third redis-server was started as {address}, joined, and got {slots} of 16384 slots with {keys} keys, all under load"
                        );
                        self.narrate(Kind::Done, &text);
                    }
                    false => self.miss("the new node did not get its share of the slots"),
                }
            }
        }
        self.pause(Duration::from_secs(3))?;
        let shares = self.shares()?;
        self.narrate(Kind::Seen, &format!("requests/s: {shares}"));
        self.note_load();
        Ok(())
    }

    fn killed_node(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "5. A node is killed, and returns");
        // Wait for moves to end: a key in transit may be at either node.
        self.watch(TIMEOUT, |story| {
            Ok(story.stage.get::<MovesReport>("/api/v1/moves")?.moves.is_empty().then_some(()))
        })?;
        let (victim, map) = (self.stage.name(VICTIM), self.stage.get::<SlotsReport>("/api/v1/slots")?);
        let early = self.loads.take_failures();
        self.suspects.extend(early);
        let keys = thousands(self.stage.keys(&victim)?);
        self.stage.kill(VICTIM);
        let killed = Instant::now();
        self.narrate(Kind::Seen, &format!("{victim} was killed (SIGKILL); it had {keys} keys"));
        let failed = self.watch(TIMEOUT, |story| Ok((story.errors() > 0).then_some(())))?;
        if failed.is_none() {
            self.miss("no request fails although a node is down");
        }
        self.narrate(Kind::Seen, "requests for its keys get an error that names it; all other keys are served");
        self.pause(Duration::from_secs(2))?;
        self.note_load();
        self.stage.start_again(VICTIM)?;
        self.narrate(Kind::Done, &format!("{victim} was started again; it reads its append-only file"));
        let mut last = (self.errors(), Instant::now());
        let back = self.watch(TIMEOUT, |story| {
            let status: StatusReport = story.stage.get("/api/v1/status")?;
            let is_up = status.nodes.iter().any(|node| node.address == victim && node.link == LinkReport::Up);
            let errors = story.errors();
            if errors != last.0 || !is_up {
                last = (errors, Instant::now());
            }
            Ok((last.1.elapsed() >= Duration::from_secs(1)).then_some(()))
        })?;
        if back.is_none() {
            self.miss("the node that was killed is not served again");
        }
        let failures = self.loads.take_failures();
        let (seconds, errors) = ((killed.elapsed().as_secs_f64() - 1.0).max(0.0), failures.len() as u64);
        let words = self.excuse_failures(failures, &victim, &map)?;
        let keys = thousands(self.stage.keys(&victim)?);
        let words: Vec<String> = words.iter().map(|(word, count)| format!("{} {word}", thousands(*count))).collect();
        self.narrate(
            Kind::Seen,
            &format!(
                "{victim} is back after {seconds:.0} s with {keys} keys; {} errors ({})",
                thousands(errors),
                words.join(", ")
            ),
        );
        let text = match self.suspects.len() {
            0 => format!(
                "each of these errors is for a key of {victim}; a write in doubt left either the old or the new value"
            ),
            wrong => format!("{} of these errors were not for a key of {victim}", thousands(wrong as u64)),
        };
        self.narrate(if self.suspects.is_empty() { Kind::Done } else { Kind::Missed }, &text);
        self.pause(Duration::from_secs(2))?;
        self.note_load();
        Ok(())
    }

    fn errors(&mut self) -> u64 {
        if self.shown.elapsed() >= POLL_INTERVAL {
            self.show();
        }
        self.loads.total().errors
    }

    /// Excuses failures for keys that the killed node has, or had in `map`. Keeps all others as suspects. Returns
    /// counts by the first word of the error.
    fn excuse_failures(
        &mut self,
        failures: Vec<Failure>,
        victim: &str,
        map: &SlotsReport,
    ) -> anyhow::Result<BTreeMap<String, u64>> {
        let keys: BTreeSet<Vec<u8>> = failures.iter().flat_map(|failure| failure.keys.iter().cloned()).collect();
        let keys: Vec<Vec<u8>> = keys.into_iter().collect();
        let owned = |slot: u16| {
            map.ranges.iter().any(|range| range.node == victim && (range.first..=range.last).contains(&slot))
        };
        let places = self.stage.places(&keys)?;
        let of_victim: BTreeSet<&[u8]> = keys
            .iter()
            .zip(&places)
            .filter(|(_, place)| place.node == victim || owned(place.slot))
            .map(|(key, _)| &**key)
            .collect();
        let mut words: BTreeMap<String, u64> = BTreeMap::new();
        for failure in failures {
            // A server that reads its file replies LOADING, without its name.
            let is_of_victim = failure.text.contains(victim) || failure.text.starts_with("LOADING ");
            let is_excused = is_of_victim && failure.keys.iter().any(|key| of_victim.contains(&**key));
            let word = failure.text.split(' ').next().unwrap_or_default().to_owned();
            *words.entry(word).or_default() += 1;
            match is_excused {
                true => self.excused += 1,
                false => self.suspects.push(failure),
            }
        }
        Ok(words)
    }

    fn less_load(&mut self) -> anyhow::Result<()> {
        self.narrator.narrate(Kind::Act, "6. The load falls");
        for part in [Part::Rush, Part::Written, Part::Read] {
            self.loads.end(part)?;
        }
        self.narrate(Kind::Seen, &format!("{} requests/s remain", thousands(u64::from(self.rate))));
        let gone = self.watch(TIMEOUT, |story| {
            let scale = story.stage.scale()?;
            Ok((scale.nodes == 2 && scale.change.is_none() && scale.started.is_empty()).then_some(()))
        })?;
        match gone {
            None => self.miss("the autoscaler removes no node"),
            Some(()) => {
                let joined = self.stage.joined().join(", ");
                self.narrate(Kind::Done, &format!("{joined} has left, and its keys are at the other nodes"));
            }
        }
        self.pause(Duration::from_secs(1))?;
        self.note_load();
        Ok(())
    }

    /// Prints the result of all checks.
    fn verdict(&mut self, is_whole: bool) -> anyhow::Result<()> {
        self.loads.end_all()?;
        let late = self.loads.take_failures();
        self.suspects.extend(late);
        let total = self.loads.total();
        self.narrator.narrate(Kind::Act, if is_whole { "The end" } else { "Ended early" });
        let unexcused = total.errors.saturating_sub(self.excused);
        let errors = match (self.excused, unexcused) {
            (excused, 0) if excused > 0 => format!("{} errors, all for keys of the killed node", thousands(excused)),
            (_, 0) => "0 errors".to_owned(),
            (excused, other) => {
                format!("{} errors for keys of the killed node, {} others", thousands(excused), thousands(other))
            }
        };
        let (wrong, stale) = (thousands(total.wrong - total.stale), thousands(total.stale));
        self.narrate(
            Kind::Verdict,
            &format!(
                "{} requests, every reply checked: {wrong} wrong, {stale} stale; {errors}",
                thousands(total.replies)
            ),
        );
        let keys = if is_whole && self.missed.is_empty() { Some(self.stage.check_keys()?) } else { None };
        let keys = keys.map_or_else(String::new, |keys| {
            format!("; {} keys through the router, and the same number at the nodes", thousands(keys))
        });
        let (p50, p99) = (millis(total.quantile(0.5)), millis(total.quantile(0.99)));
        self.narrate(Kind::Plain, &format!("overall: p50 {p50}, p99 {p99}{keys}"));
        for complaint in self
            .suspects
            .iter()
            .map(|failure| &failure.text)
            .take(5)
            .chain(self.loads.complaints())
            .filter(|_| unexcused + total.wrong > 0)
        {
            self.narrator.narrate(Kind::Plain, &format!("  {complaint}"));
        }
        let is_clean = total.wrong == 0
            && total.unanswered == 0
            && total.disconnects == 0
            && unexcused == 0
            && self.suspects.is_empty();
        ensure!(
            is_clean,
            "the load has failed: {unexcused} errors for keys of running nodes, {} wrong replies, {} of them stale, {} requests without a reply, \
             {} connections lost",
            total.wrong,
            total.stale,
            total.unanswered,
            total.disconnects
        );
        Ok(())
    }

    fn suggest_next(&mut self) -> anyhow::Result<()> {
        let program = program()?.display().to_string();
        self.narrator.narrate(Kind::Aside, "");
        self.narrator.narrate(Kind::Aside, "Next, to keep everything running and try it yourself:");
        self.narrator.narrate(Kind::Aside, &format!("  {program} demo --hold"));
        self.narrator.narrate(Kind::Aside, "or in front of your own server, which keeps its data:");
        self.narrator.narrate(Kind::Aside, &format!("  {program} serve --node 127.0.0.1:6379"));
        Ok(())
    }

    fn hold(&mut self) -> anyhow::Result<()> {
        let (port, admin, program) = (self.stage.address.port(), self.stage.admin, program()?.display().to_string());
        let folder = self.stage.folder().display().to_string();
        let lines = [
            String::new(),
            "Everything keeps running until Ctrl-C. Try it from another terminal:".to_owned(),
            String::new(),
            format!("  redis-cli -p {port} set greeting hello"),
            format!("  redis-cli -p {port} info switchyard"),
            format!("  redis-benchmark -p {port} -t get,set -P 16 -q"),
            format!("  {program} status --admin {admin}"),
            format!("  {program} hotkeys --admin {admin}"),
            format!("  {program} plan history --admin {admin}"),
            format!("  {program} autoscale set-nodes 3 --admin {admin}"),
            format!("  {program} autoscale history --admin {admin}"),
            format!("  curl -s http://{admin}/metrics"),
            String::new(),
            format!("Configuration: {folder}/switchyard.toml; logs: {folder}"),
        ];
        for line in lines {
            self.narrator.narrate(Kind::Aside, &line);
        }
        self.narrator.finish();
        while !self.stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
            self.stage.check_router()?;
        }
        println!("\nending");
        Ok(())
    }
}

/// Formats the load of an interval, and the total number of errors.
fn numbers(period: Duration, interval: &Tally, total: &Tally) -> String {
    format!(
        "{} requests/s, p99 {}, {} errors, {} wrong, {} stale",
        thousands((interval.replies as f64 / period.as_secs_f64()) as u64),
        millis(interval.quantile(0.99)),
        thousands(total.errors + total.unanswered),
        thousands(total.wrong - total.stale),
        thousands(total.stale),
    )
}
