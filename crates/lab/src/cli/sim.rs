//! `switchyard-lab sim`: runs the simulators of moves and of fleets. Also repeats a seed that a sweep has found, with all
//! events.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use switchyard_bench::interrupt;
use switchyard_lab::{fleet, product, validate};
use switchyard_sim::scenario::BUILT_IN;
use switchyard_sim::{Scenario, run as run_one, sweep};

use super::typed;

/// Moves in a simulated world, where anything breaks; and policies in simulated fleets.
#[derive(Debug, Args)]
#[command(
    long_about = "Simulated moves: the state machines of this program, model nodes, a network that loses and delays messages, killed and stopped processes, and a \
        checker of the clients' histories. And simulated fleets: the planner, the autoscaler and the admission of hot copies under a \
        load over hours or weeks. A seed and a scenario always give the same run.",
    after_long_help = "Examples:\n  \
        switchyard-lab sim sweep --seeds 10000                      search for a run that fails\n  \
        switchyard-lab sim run --seed 42 --scenario rough --trace   every event of one run\n  \
        switchyard-lab sim fleet diurnal                            a fleet over a day\n  \
        switchyard-lab sim validate                                 simulated fleets compared with real servers"
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
    /// A fleet over hours or weeks, with one or several policies
    #[command(
        long_about = "Simulate a fleet with the production code of the telemetry, the admission of hot copies, the planner and the \
            autoscaler. Prints a table with the mean and the range over seeds.\n\n\
            Scenarios: step, diurnal, weekly, hot-in, hot-out, random-replacement, flash-crowd, slow-growth, noise; day and large take \
            minutes. The file format: crates/sim/src/fleet/scenario.rs.",
        after_long_help = "Examples:\n  \
            switchyard-lab sim fleet step --svg step.svg\n  \
            switchyard-lab sim fleet step --policy planner=off,planner=makris-safe,planner=switchyard --seeds 5\n  \
            switchyard-lab sim fleet flash-crowd --policy copies=off+autoscale=model,copies=both+autoscale=model\n  \
            switchyard-lab sim fleet day --nodes 128 --out docs/results/fleet.md\n\n\
            Exit codes: 0 all goals of the scenario were reached; 1 one was missed, or there is no such scenario"
    )]
    Fleet(FleetArguments),
    /// The simulator of fleets compared with real servers, at the same load
    #[command(
        long_about = "Three scenarios on four limited servers behind the router, and in the simulator with the measured service rate: skewed reads, the same with \
            hot copies, and a step of the load that the planner balances. Prints throughput, hits and time to balance of both.\n\n\
            Takes about six minutes. Nothing else should run on the machine. Limits on servers use cgroups, which need root.",
        after_long_help = "Examples:\n  \
            switchyard-lab sim validate --out docs/results/fleet.md\n  \
            switchyard-lab sim validate --smoke       a functional check of a few seconds (its numbers mean nothing)"
    )]
    Validate(ValidateArguments),
}

#[derive(Debug, Args)]
struct ValidateArguments {
    /// Rounds; the tables show mean, minimum and maximum
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,
    /// Share of a processor for each server
    #[arg(long, value_name = "SHARE", default_value_t = 0.1)]
    cpu: f64,
    /// One short round, also on a machine without limits
    #[arg(long)]
    smoke: bool,
    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,
    /// Rewrite the section in this document, and its figure
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct FleetArguments {
    /// Scenario: a built-in name, or a file
    scenario: String,
    /// Policies to compare, separated by commas; each is planner=, copies= or autoscale= with a name or off, joined by + [default:
    /// those of the scenario]
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    policy: Vec<String>,
    /// Number of seeds, from 1 on [default: that of the scenario]
    #[arg(long, value_name = "N")]
    seeds: Option<u64>,
    /// Number of nodes; load and router grow with it [default: that of the scenario]
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
    /// Number of threads [default: number of processors]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Draw the first seed over time into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Rewrite the section of this scenario in this document, and its figure
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
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

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    match &arguments.action {
        Action::Fleet(arguments) => fleet::run(&fleet::Settings {
            scenario: arguments.scenario.clone(),
            policies: arguments.policy.clone(),
            seeds: arguments.seeds,
            nodes: arguments.nodes,
            threads: arguments.threads.unwrap_or_else(processors),
            svg: arguments.svg.clone(),
            out: arguments.out.clone(),
            command_line: typed(),
        }),
        Action::Validate(arguments) => validate::run(&validate::Settings {
            switchyard: product::find(arguments.switchyard.as_deref())?,
            repeat: if arguments.smoke { 1 } else { arguments.repeat },
            cpu: arguments.cpu,
            is_smoke: arguments.smoke,
            out: arguments.out.clone(),
            command_line: typed(),
            stop: interrupt::flag()?,
        }),
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
            let threads = threads.unwrap_or_else(processors);
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
