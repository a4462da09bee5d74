//! `switchyard-lab sim`: runs the simulator of moves. Also repeats a seed that a sweep has found, with all events.

use std::path::Path;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use switchyard_sim::scenario::BUILT_IN;
use switchyard_sim::{Scenario, run as run_one, sweep};

/// Moves in a simulated world, where anything breaks.
#[derive(Debug, Args)]
#[command(
    long_about = "Simulated moves: the state machines of this program, model nodes, a network that loses and delays messages, killed and stopped processes, and a \
        checker of the clients' histories. A seed and a scenario always give the same run.",
    after_long_help = "Examples:\n  \
        switchyard-lab sim sweep --seeds 10000                      search for a run that fails\n  \
        switchyard-lab sim run --seed 42 --scenario rough --trace   every event of one run"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Repeat one run by its seed and scenario, and report its result
    #[command(after_long_help = "Examples:\n  \
        switchyard-lab sim run --seed 42                              the run of that seed, with all faults of `rough`\n  \
        switchyard-lab sim run --seed 42 --scenario lost --trace      every event of a run in which a node is lost for good\n\n\
        Exit codes: 0 the run was correct; 1 it failed, or there is no such scenario")]
    Run {
        /// Seed that determines all random choices of the run
        #[arg(long)]
        seed: u64,
        /// Scenario: a built-in name, or a file
        #[arg(long, default_value = "rough")]
        scenario: String,
        /// Print every event, one per line, in simulated time
        #[arg(long)]
        trace: bool,
    },
    /// Many runs, until one fails.
    Sweep {
        /// Number of seeds in each scenario.
        #[arg(long, default_value_t = 10_000)]
        seeds: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
        /// Scenarios: built-in names, or files [default: all built-in ones].
        #[arg(long)]
        scenario: Vec<String>,
        /// Number of threads [default: number of processors].
        #[arg(long)]
        threads: Option<usize>,
    },
}

fn scenario(name: &str) -> anyhow::Result<Scenario> {
    if let Some(scenario) = Scenario::built_in(name) {
        return Ok(scenario);
    }
    let known: Vec<&str> = BUILT_IN.iter().map(|(name, _)| *name).collect();
    let text = std::fs::read_to_string(Path::new(name))
        .with_context(|| format!("{name} is neither a scenario of the program ({}) nor a file", known.join(", ")))?;
    Scenario::parse(name, &text).with_context(|| name.to_owned())
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.action {
        Action::Run { seed, scenario: name, trace } => {
            let run = run_one(*seed, &scenario(name)?, None, *trace);
            for line in &run.trace {
                println!("{line}");
            }
            println!(
                "seed {seed} of {name}: {} ms of its time, {} actions of movers, legs: {}",
                run.took_us / 1000,
                run.actions,
                run.outcomes.join(", ")
            );
            match run.violation {
                None => Ok(()),
                Some(what) => Err(anyhow!("seed {seed} of {name} fails: {what}")),
            }
        }
        Action::Sweep { seeds, from, scenario: names, threads } => {
            let names = if names.is_empty() {
                BUILT_IN.iter().map(|(name, _)| (*name).to_owned()).collect()
            } else {
                names.clone()
            };
            let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
            for name in names {
                let scenario = scenario(&name)?;
                let bar = ProgressBar::new(*seeds).with_prefix(name.clone());
                if let Ok(style) =
                    ProgressStyle::with_template("{prefix:14} [{bar:40}] {pos}/{len} seeds  {per_sec}  {eta}")
                {
                    bar.set_style(style.progress_chars("=> "));
                }
                let found = sweep(&scenario, None, *from, *seeds, threads, |_| bar.inc(1));
                bar.finish_and_clear();
                if let Some(run) = found {
                    let (seed, what) = (run.seed, run.violation.unwrap_or_default());
                    return Err(anyhow!(
                        "seed {seed} of {name} fails: {what}\nRepeat it with: switchyard-lab sim run --seed {seed} --scenario {name} --trace"
                    ));
                }
                println!("{name}: {seeds} seeds from {from}, no failure found");
            }
            Ok(())
        }
    }
}
