//! `switchyard-lab soak`: cycles of moves with faults under clients whose histories are checked.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use switchyard_bench::numbers::{thousands, time_flag};
use switchyard_lab::product;
use switchyard_lab::soak::{self, Fault, Settings, Tally};

use super::words;

/// Repeat moves with faults, under clients whose histories must be linearizable
#[derive(Debug, Args)]
#[command(
    long_about = "Cycles of: three Redis servers with durable writes, the router, clients that record histories, slots that \
        move (in some cycles a fourth server joins and leaves, placement rules are adopted, or some clients use keys of several nodes together), and processes that are killed or stopped. After each cycle the histories must be linearizable, every key that \
        no client changed must exist once, and no deleted key may exist again. The first cycle that fails ends the run; its files are \
        kept.",
    after_long_help = "Examples:\n  \
        make soak TIME=600\n  \
        switchyard-lab soak --checker /tmp/history-check --time 10m\n  \
        switchyard-lab soak --checker /tmp/history-check --seed 17 --cycles 1 --faults kill-target\n  \
        switchyard-lab soak --checker /tmp/history-check --adoptions --cycle 20s --cycles 20 --time 1h\n  \
        switchyard-lab soak --checker /tmp/history-check --apart --cycle 20s --cycles 50 --time 1h\n\n\
        Exit codes: 0 all cycles passed; 1 a cycle failed"
)]
pub(super) struct Arguments {
    /// Path of the built tests-clients/history-check
    #[arg(long, value_name = "PATH")]
    checker: PathBuf,

    /// Time after which no new cycle begins
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = time_flag)]
    time: Duration,

    /// Maximum number of cycles
    #[arg(long, value_name = "N", default_value_t = u64::MAX, hide_default_value = true)]
    cycles: u64,

    /// Duration of the clients' work in a cycle
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = time_flag)]
    cycle: Duration,

    /// Kinds of faults, one for each cycle in turn [default: none and all others]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    faults: Vec<String>,

    /// No moves: only faults
    #[arg(long)]
    no_moves: bool,

    /// Adopt and remove placement rules between moves in every cycle, not only in some
    #[arg(long, conflicts_with = "no_moves")]
    adoptions: bool,

    /// Use keys of several nodes together in every cycle, not only in some
    #[arg(long)]
    apart: bool,

    /// Number of keys that no client changes
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    keys: u64,

    /// Clients; eight share their keys
    #[arg(long, value_name = "N", default_value_t = 16)]
    clients: u16,

    /// Further flags of `serve`
    #[arg(long, value_name = "FLAGS", default_value = "", hide_default_value = true, allow_hyphen_values = true)]
    serve_args: String,

    /// Further flags of `move`
    #[arg(long, value_name = "FLAGS", default_value = "--goal fast", allow_hyphen_values = true)]
    move_args: String,

    /// Seed of the first cycle, incremented for each next one
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    /// Folder for the files of a failed cycle [default: the temporary folder]
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,

    /// The router to test [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,
}

/// Runs cycles.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let fault = |name: &String| {
        let found = Fault::ALL.iter().find(|(_, n)| n == name).map(|(fault, _)| *fault);
        found.with_context(|| format!("no fault \"{name}\"; available: {}", Fault::ALL.map(|(_, n)| n).join(", ")))
    };
    let faults = arguments.faults.iter().map(fault).collect::<anyhow::Result<Vec<_>>>()?;
    let interrupted = Arc::clone(&stop);
    let settings = Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        checker: std::path::absolute(&arguments.checker)?,
        time: arguments.time,
        cycles: arguments.cycles,
        cycle: arguments.cycle,
        faults: if faults.is_empty() { Fault::ALL.map(|(fault, _)| fault).to_vec() } else { faults },
        moves: !arguments.no_moves,
        adoptions: arguments.adoptions,
        apart: arguments.apart,
        keys: arguments.keys,
        clients: usize::from(arguments.clients.max(1)),
        serve_args: words(&arguments.serve_args),
        move_args: words(&arguments.move_args),
        seed: arguments.seed,
        keep: arguments.keep.clone().unwrap_or_else(std::env::temp_dir),
        stop,
    };
    let bar = ProgressBar::new(settings.time.as_millis() as u64);
    let style = ProgressStyle::with_template("{elapsed_precise} [{bar:20}] {msg}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    let show = |what: &str, total: &Tally| {
        bar.set_position((bar.elapsed().as_millis() as u64).min(settings.time.as_millis() as u64));
        bar.set_message(format!("{what} ({} cycles done)", total.cycles));
    };
    let outcome = soak::run(&settings, &show);
    bar.finish_and_clear();
    let total = outcome?;
    println!(
        "{} cycles without a violation: {} moves done, {} ended early, {} keys moved in pieces, {} servers joined and left, {} adoptions of rules, {} steps with keys of several nodes, {} faults, {} operations ({} without a known outcome)",
        thousands(total.cycles),
        thousands(total.moves),
        thousands(total.moves_stopped),
        thousands(total.in_pieces),
        thousands(total.visits),
        thousands(total.adoptions),
        thousands(total.apart),
        thousands(total.faults),
        thousands(total.operations),
        thousands(total.unknown),
    );
    anyhow::ensure!(!interrupted.load(Ordering::Relaxed), "interrupted");
    Ok(())
}
