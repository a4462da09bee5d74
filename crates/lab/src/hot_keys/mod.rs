//! The gain from hot copies: one hot key, a skewed fleet, many keys that become hot at once, and no hot keys.
//!
//! Compared results come from one run with interleaved rounds, so that a machine that slows down affects all alike. CPU
//! is counted for the measured process alone. Requests per second mean little if the load generator is the bottleneck.

mod fleet;
mod idle;
mod one;
mod surge;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};

use crate::document::{replace_between_marks, today};
use crate::procfs::describe_machine;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// One key that all clients read.
    One,
    /// Three capped servers, and a few keys with most of the reads.
    Fleet,
    /// Many keys become hot at once.
    Surge,
    /// No key is hot.
    Idle,
}

/// Settings of a run.
#[derive(Debug)]
pub struct Settings {
    /// Path of the router's binary.
    pub switchyard: PathBuf,
    /// Measurements to make.
    pub parts: Vec<Part>,
    /// Few and short rounds.
    pub quick: bool,
    /// The document whose sections are rewritten.
    pub out: Option<PathBuf>,
    /// Command line of this run, for the document.
    pub command_line: String,
    /// Set to end the run early.
    pub stop: Arc<AtomicBool>,
}

/// Measures, prints, and rewrites the document.
///
/// # Errors
///
/// Fails if a program cannot be started, a file cannot be read, or the run is interrupted.
pub fn run(settings: &Settings) -> Result<()> {
    for part in &settings.parts {
        let folder = tempfile::tempdir().context("cannot make a folder")?;
        let (name, text) = match part {
            Part::One => ("one", one::measure(settings, folder.path())?),
            Part::Fleet => ("fleet", fleet::measure(settings, folder.path())?),
            Part::Surge => ("surge", surge::measure(settings, folder.path())?),
            Part::Idle => ("idle", idle::measure(settings, folder.path())?),
        };
        println!("{text}\n");
        let Some(out) = &settings.out else { continue };
        let document = std::fs::read_to_string(out).with_context(|| format!("cannot read {}", out.display()))?;
        let text =
            format!("Measured on {} ({}), with `{}`.\n\n{text}", today(), describe_machine(), settings.command_line);
        std::fs::write(out, replace_between_marks(&document, name, &text)?)
            .with_context(|| format!("cannot write {}", out.display()))?;
    }
    Ok(())
}

impl Settings {
    fn check_interrupted(&self) -> Result<()> {
        ensure!(!self.stop.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }
}

/// A router in front of these servers.
struct Router {
    process: Process,
    entry: std::net::SocketAddr,
    admin: std::net::SocketAddr,
}

impl Router {
    fn start(
        settings: &Settings,
        name: &str,
        nodes: &[std::net::SocketAddr],
        args: &[&str],
        folder: &Path,
    ) -> Result<Self> {
        let (entry, admin) = (process::free_address()?, process::free_address()?);
        let mut command = Command::new(&settings.switchyard);
        command.args(["serve", "--listen", &entry.to_string(), "--admin", &admin.to_string(), "--workers", "1"]);
        command.arg("--state-dir").arg(folder.join(format!("{name}-state"))).args(args);
        for node in nodes {
            command.args(["--node", &node.to_string()]);
        }
        let mut process = Process::start(name, &command, folder)?;
        process.wait_ready(entry)?;
        Ok(Self { process, entry, admin })
    }

    /// Reads a metric of the router.
    fn metric(&self, name: &str) -> Result<f64> {
        use std::io::{Read as _, Write as _};
        let mut stream = std::net::TcpStream::connect(self.admin).context("cannot read the router's metrics")?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let line = text.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with([' ', '{']));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .with_context(|| format!("the router has no metric {name}"))
    }
}

/// Reads a key through the router for this time, so that copies serve it.
fn warm_up(entry: std::net::SocketAddr, key: &[u8], most: Duration) -> Result<()> {
    let mut client = Client::connect(entry)?;
    let end = Instant::now() + most;
    while Instant::now() < end {
        for _ in 0..200 {
            client.call(&[b"GET", key], |_| ())?;
        }
    }
    Ok(())
}
