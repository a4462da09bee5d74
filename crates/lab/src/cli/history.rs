//! `switchyard-lab history`: records operations on any Redis-compatible server, for a linearizability checker.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use switchyard_bench::numbers::{thousands, time_flag};
use switchyard_lab::history::{self, Kind, Settings, Tally};

/// Record operations of many clients on the same few keys, to check that one server could have replied so
#[derive(Debug, Args)]
#[command(
    long_about = "Record the operations of many concurrent clients on the same few keys: registers, counters, lists, \
        hashes, keys that expire, transactions with and without WATCH. Each operation is recorded with the times of its call and \
        return, and its reply; tests-clients/history-check (a Go program, Porcupine) then checks whether a single Redis server \
        could have replied so: whether the history is linearizable.",
    after_long_help = "Examples:\n  \
        (cd tests-clients/history-check && go build -o /tmp/history-check .)\n  \
        switchyard-lab history --target 127.0.0.1:6380 --time 10s --out /tmp/h --checker /tmp/history-check\n  \
        switchyard-lab history --target 127.0.0.1:6380 --workload register,transaction --out /tmp/h\n\n\
        Exit codes: 0 recorded, and linearizable if --checker is given; 1 otherwise"
)]
pub(super) struct Arguments {
    /// Addresses of one database, used by the clients in turn
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6380", value_delimiter = ',')]
    target: Vec<String>,

    /// Duration of the run
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_flag)]
    time: Duration,

    /// Clients; eight share their keys
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: u16,

    /// Kinds: all, or some of register, counter, list, hash, expiry, transaction
    #[arg(long, value_name = "NAMES", default_value = "all", value_delimiter = ',')]
    workload: Vec<String>,

    /// Time-out of a reply, after which the outcome is unknown
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time_flag)]
    timeout: Duration,

    /// Mean pause of a client between two operations
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time_flag)]
    pause: Duration,

    /// Same seed, same choices
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Folder for the files, one for each workload
    #[arg(long, value_name = "DIR")]
    out: PathBuf,

    /// Do not delete the keys at the end
    #[arg(long)]
    keep: bool,

    /// The checker to run afterwards
    #[arg(long, value_name = "PATH")]
    checker: Option<PathBuf>,
}

/// Records, and runs the checker if one is given.
pub(super) fn run(arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let address = |text: &String| -> anyhow::Result<SocketAddr> {
        let found = text.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
        found.with_context(|| format!("\"{text}\" is not an address: HOST:PORT is needed"))
    };
    let all = arguments.workload.iter().any(|name| name == "all");
    let named = || arguments.workload.iter().map(|name| name.parse()).collect::<anyhow::Result<Vec<Kind>>>();
    let mut kinds = if all { Kind::ALL.to_vec() } else { named()? };
    kinds.sort_unstable();
    kinds.dedup();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    let settings = Settings {
        targets: arguments.target.iter().map(address).collect::<anyhow::Result<_>>()?,
        duration: arguments.time,
        clients: usize::from(arguments.clients),
        kinds,
        timeout: arguments.timeout,
        pause: arguments.pause,
        seed: arguments.seed,
        prefix: format!("history:{:x}:", now ^ u128::from(std::process::id())),
        folder: arguments.out.clone(),
        clean: !arguments.keep,
    };
    let recording = history::start(&settings)?;
    let bar = ProgressBar::new(arguments.time.as_millis() as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    while !recording.is_finished() {
        std::thread::sleep(Duration::from_millis(100));
        if stop.load(Ordering::Relaxed) {
            recording.stop();
        }
        bar.set_position(recording.elapsed().as_millis() as u64);
        let tally = recording.tally();
        bar.set_message(format!("{} operations, {} unknown", thousands(tally.operations), thousands(tally.unknown)));
    }
    bar.set_message("reading every key once more");
    let summary = recording.finish()?;
    bar.finish_and_clear();
    show(&summary.tally);
    for file in &summary.files {
        println!("  {}", file.display());
    }
    ensure!(summary.tally.unread == 0, "{} objects could not be read at the end", summary.tally.unread);
    if let Some(checker) = &arguments.checker {
        let status = Command::new(checker).arg("-pictures").arg(&arguments.out).args(&summary.files).status();
        let status = status.with_context(|| format!("cannot run the checker {}", checker.display()))?;
        ensure!(status.success(), "the checker did not find the history linearizable ({status})");
    }
    Ok(())
}

fn show(tally: &Tally) {
    println!(
        "{} operations on {} objects, {} with an unknown outcome, {} transactions aborted by a watch",
        thousands(tally.operations),
        thousands(tally.objects),
        thousands(tally.unknown),
        thousands(tally.aborted)
    );
    if tally.reads_failed + tally.not_sent > 0 {
        println!(
            "left out: {} reads without a reply, {} operations that could not be sent",
            tally.reads_failed, tally.not_sent
        );
    }
    for (count, text) in tally.errors.values() {
        println!("{} times: -{text}", thousands(*count));
    }
}
