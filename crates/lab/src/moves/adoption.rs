//! Adoption of placement rules: speed without load, and effect on clients.
//!
//! The keys of each queue are spread over both servers by their names, and the rules of the preset `bullmq` bring them
//! to the node of the queue. So about half of the keys change nodes, in both directions at once.

use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::site::{Routed, keys_at};
use super::{Bench, Keys, Layout, LoadedMove, TIMEOUT, admin, stopped};
use crate::reproduce::spread::Spread;

/// Number of queues.
const QUEUES: u16 = 1000;
/// Bytes of a value.
const SIZE: usize = 64;
/// Adoptions without load for each goal.
const ROUNDS: usize = 3;
/// Interval between polls of an adoption.
const POLL_INTERVAL: Duration = Duration::from_millis(25);

/// Adoptions without load.
#[derive(Debug, Clone)]
pub(super) struct Adoptions {
    pub(super) goal: String,
    pub(super) keys: u64,
    /// Keys that changed nodes, and the duration, of each adoption.
    pub(super) all: Vec<(u64, Duration)>,
}

impl Adoptions {
    fn of(&self, value: impl Fn(u64, Duration) -> f64) -> Option<Spread> {
        Spread::of(self.all.iter().map(|(moved, took)| value(*moved, *took)))
    }

    /// Durations in seconds.
    pub(super) fn seconds(&self) -> Option<Spread> {
        self.of(|_, took| took.as_secs_f64())
    }

    /// Moved keys per second.
    pub(super) fn rate(&self) -> Option<Spread> {
        self.of(|moved, took| moved as f64 / took.as_secs_f64())
    }
}

impl Bench<'_> {
    pub(super) fn adoption(&mut self) -> Result<()> {
        let goal = self.settings.goal.clone();
        for goal in ["fast".to_owned(), goal.clone()] {
            let mut adoptions = Adoptions { goal: goal.clone(), keys: self.settings.keys, all: Vec::new() };
            for _ in 0..ROUNDS {
                let outcome = self.adoption_unloaded(&goal);
                adoptions.all.extend(self.attempt(&format!("adoption, {goal}"), outcome)?);
            }
            self.results.adoptions.push(adoptions);
        }
        let unloaded = self.results.adoptions.last().and_then(Adoptions::seconds);
        let outcome = self.adoption_under_load(&goal, unloaded.map(|spread| Duration::from_secs_f64(spread.median)));
        let noticed = self.attempt("adoption under load", outcome)?;
        self.results.noticed.extend(noticed);
        Ok(())
    }

    fn start_adoption_site(&mut self) -> Result<(Routed, Arc<Keys>)> {
        let layout = Arc::new(Layout::of_queues(QUEUES));
        let name = self.name("routed");
        let site = Routed::start(&self.programs, &self.settings.serve_args, &name, self.folder)?;
        self.note_version(site.addresses[0])?;
        let data = Arc::new(Keys::new((0..self.settings.keys).collect(), SIZE, &layout));
        self.fill(&data, |_| site.entry, &name)?;
        Ok((site, data))
    }

    fn adoption_unloaded(&mut self, goal: &str) -> Result<(u64, Duration)> {
        let (site, data) = self.start_adoption_site()?;
        self.print(format!("adoption, {goal}: {} keys", data.count()));
        let moved_and_took = adopt(&self.programs.switchyard, &site, goal, || self.stopped())?;
        self.adopted(&site, &data)?;
        Ok(moved_and_took)
    }

    /// Checks that no key is lost, changed or doubled. Returns the number of wrong keys.
    fn adopted(&self, site: &Routed, data: &Keys) -> Result<u64> {
        let held: i64 = site.addresses.iter().map(|address| keys_at(*address)).sum::<Result<i64>>()?;
        ensure!(held == data.count() as i64, "after the adoption the nodes have {held} of {} keys", data.count());
        let wrong = data.count_wrong(|_| site.entry)?;
        ensure!(wrong == 0, "{wrong} keys were lost or changed by the adoption");
        Ok(wrong)
    }

    fn adoption_under_load(&mut self, goal: &str, unloaded: Option<Duration>) -> Result<LoadedMove> {
        let (site, data) = self.start_adoption_site()?;
        let load = self.load(vec![site.entry], false, &data);
        let (switchyard, stop) = (self.programs.switchyard.clone(), self.settings.stop.clone());
        let way = format!("switchyard rules adopt --goal {goal}");
        let mut noticed =
            self.under_load(way, load, None, unloaded, site.process_ids(), Some(site.router.id()), || {
                adopt(&switchyard, &site, goal, || stopped(&stop)).map(|(_, took)| took)
            })?;
        noticed.wrong_after = self.adopted(&site, &data)?;
        Ok(noticed)
    }
}

/// Adopts the rules and waits for the end. Returns the number of moved keys, and the duration.
fn adopt(
    switchyard: &std::path::Path,
    site: &Routed,
    goal: &str,
    mut tick: impl FnMut() -> Result<()>,
) -> Result<(u64, Duration)> {
    let begun = Instant::now();
    let output = Command::new(switchyard)
        .args(["rules", "adopt", "--preset", "bullmq", "--goal", goal, "--admin", &site.admin.to_string()])
        .output()
        .context("cannot run `switchyard rules adopt`")?;
    ensure!(
        output.status.success(),
        "`switchyard rules adopt` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    while !admin::get(site.admin, "/api/v1/rules")?["adoption"].is_null() {
        ensure!(begun.elapsed() < TIMEOUT, "the adoption did not end within {TIMEOUT:?}");
        tick()?;
        std::thread::sleep(POLL_INTERVAL);
    }
    let took = begun.elapsed();
    let report = admin::report(site.admin)?;
    let moves = report["ended"].as_array().context("the report has no ended moves")?;
    let moved = moves.iter().filter_map(|one| one["keys_moved"].as_u64()).sum();
    ensure!(moved > 0, "the adoption moved no keys");
    Ok((moved, took))
}
