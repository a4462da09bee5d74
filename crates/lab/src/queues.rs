//! Throughput of BullMQ behind the router: with the placement rule of its preset, with hash tags in the names of all
//! keys, and on one node.
//!
//! The library itself runs, because its scripts and blocking commands decide the result. All ways have the same queues
//! and jobs, and alternate in one run. A queue has the same slot by the rule and by its hash tag.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use switchyard_bench::table::Table;

use crate::document::{replace_between_marks, today};
use crate::moves::site::{Programs, Routed, version_of};
use crate::procfs::describe_machine;
use crate::reproduce::spread::Spread;

const MARK: &str = "bench-queues";
const SCRIPT: &str = "bullmq_speed.mjs";
/// Node.js processes at the same time, each with its own queues.
const PROCESSES: usize = 2;

/// Settings of a run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Folder of the script and of the package's lock file.
    pub programs: PathBuf,
    /// Queues of each process.
    pub queues: usize,
    /// Jobs of each process.
    pub jobs: usize,
    /// Rounds. Each has all ways.
    pub rounds: usize,
    /// The document whose section is rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Rule,
    Braces,
    OneNode,
}

impl Way {
    const ALL: [Self; 3] = [Self::Rule, Self::Braces, Self::OneNode];

    fn title(self) -> &'static str {
        match self {
            Self::Rule => "two nodes, by the preset `bullmq`",
            Self::Braces => "two nodes, with a `{prefix}` for each queue",
            Self::OneNode => "one node",
        }
    }

    fn nodes(self) -> usize {
        if self == Self::OneNode { 1 } else { 2 }
    }
}

/// Output of the script.
#[derive(Debug, Deserialize)]
struct Finished {
    jobs: f64,
    seconds: f64,
}

/// Measures, prints, and rewrites the section of the document.
///
/// # Errors
/// If Node.js, the packages or a server are missing, a job fails, or the user interrupts.
pub fn run(settings: &Settings) -> Result<()> {
    let programs = Programs::find(&settings.switchyard, None)?;
    let folder =
        tempfile::Builder::new().prefix("switchyard-queues-").tempdir().context("cannot create a temporary folder")?;
    install(&settings.programs, folder.path())?;
    let mut rates: [Vec<f64>; 3] = Default::default();
    let mut version = String::new();
    for round in 0..settings.rounds {
        // The order rotates, so that a machine whose speed changes favours no way.
        for turn in 0..Way::ALL.len() {
            let at = (round + turn) % Way::ALL.len();
            ensure!(!settings.stop.load(Ordering::Relaxed), "interrupted; nothing was written");
            let way = Way::ALL[at];
            let name = format!("round{round}-{at}");
            let (rate, server) = measure(settings, &programs, way, &name, folder.path())?;
            eprintln!("round {}: {}: {rate:.0} jobs/s", round + 1, way.title());
            rates[at].push(rate);
            version = server;
        }
    }
    let table = table(&rates);
    print!("{}", table.to_text());
    let Some(out) = &settings.out else { return Ok(()) };
    let section = format!(
        "Measured on {} by `{}` on: {}. Servers: {version}. {PROCESSES} processes of Node.js with {} queues and {} jobs each; median \
         (range) of {} rounds.\n\n{}",
        today(),
        settings.command_line,
        describe_machine(),
        settings.queues,
        settings.jobs,
        settings.rounds,
        table.to_markdown()
    );
    let document = fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
    let document = replace_between_marks(&document, MARK, &section)
        .with_context(|| format!("cannot rewrite {}", out.display()))?;
    fs::write(out, document).with_context(|| format!("cannot write {}", out.display()))
}

/// Installs the script and the locked packages into a folder.
fn install(programs: &Path, folder: &Path) -> Result<()> {
    for file in ["package.json", "package-lock.json", ".npmrc", SCRIPT] {
        let from = programs.join(file);
        fs::copy(&from, folder.join(file)).with_context(|| format!("cannot read {}", from.display()))?;
    }
    let status = Command::new("npm")
        .args(["ci", "--ignore-scripts", "--silent"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .status()
        .context("cannot run npm (Debian: apt-get install npm)")?;
    ensure!(status.success(), "npm ci failed ({status}): it needs the package registry");
    Ok(())
}

/// Returns jobs per second, and the version of the servers.
fn measure(settings: &Settings, programs: &Programs, way: Way, name: &str, folder: &Path) -> Result<(f64, String)> {
    let file = folder.join(format!("{name}.toml"));
    let rules = if way == Way::Rule { "[[placement.rule]]\npreset = \"bullmq\"\n" } else { "" };
    fs::write(&file, rules).with_context(|| format!("cannot write {}", file.display()))?;
    let arguments = ["--config".to_owned(), file.to_string_lossy().into_owned()];
    let site = Routed::start_many(programs, &arguments, way.nodes(), name, folder)?;
    let names = if way == Way::Braces { "braces" } else { "plain" };
    let mut running = Vec::new();
    for process in 0..PROCESSES {
        let numbers = [process * settings.queues, settings.queues, settings.jobs].map(|number| number.to_string());
        let child = Command::new("node")
            .arg(folder.join(SCRIPT))
            .arg(site.entry.to_string())
            .args(numbers)
            .arg(names)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run node (Debian: apt-get install nodejs)")?;
        running.push(child);
    }
    let mut rate = 0.0;
    for child in running {
        let output = child.wait_with_output().context("cannot wait for node")?;
        ensure!(output.status.success(), "node failed ({}), {}", output.status, way.title());
        let finished: Finished = serde_json::from_slice(&output.stdout).context("unexpected output of node")?;
        rate += finished.jobs / finished.seconds;
    }
    Ok((rate, version_of(site.addresses[0])?))
}

fn table(rates: &[Vec<f64>; 3]) -> Table {
    let mut table = Table::new(["", "jobs/s", "ratio to `{prefix}`", "ratio to one node"]);
    let ratio = |at: usize, to: Way| {
        let to = &rates[Way::ALL.iter().position(|way| *way == to).unwrap_or_default()];
        let spread = Spread::of(rates[at].iter().zip(to).map(|(rate, to)| rate / to));
        spread.map_or("-".to_owned(), |spread| spread.text(|value| format!("{value:.2}")))
    };
    for (at, way) in Way::ALL.into_iter().enumerate() {
        let Some(rate) = Spread::of(rates[at].iter().copied()) else { continue };
        table.row([
            way.title().to_owned(),
            rate.text(|value| format!("{value:.0}")),
            ratio(at, Way::Braces),
            ratio(at, Way::OneNode),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_medians_of_the_rounds() {
        let text = table(&[vec![90.0, 100.0, 120.0], vec![100.0; 3], vec![200.0; 3]]).to_text();
        for part in ["100 (90 to 120)", "1.00 (0.90 to 1.20)", "0.50 (0.45 to 0.60)"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
