//! `switchyard bench`: measurements against any server.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use clap::{Args, Subcommand};
use switchyard_bench::interrupt;
use switchyard_bench::load::{self, Mix, Pace, Sharing, Skew, ValueSizes};
use switchyard_bench::numbers::{millis, thousands, time_flag};
use switchyard_bench::table::Table;

use super::{Failure, capacity, live::Live};

/// Measure a server with a load
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Load(LoadArguments),
    Capacity(capacity::Arguments),
}

/// Drive a load against any Redis-compatible server, and check its replies
#[derive(Debug, Args)]
#[command(
    long_about = "Drive a mixed load against any Redis-compatible server, and check its replies.\n\n\
        Closed loop by default: each connection keeps a pipeline full. With --rate an open loop: requests are sent at that rate \
        regardless of the server, and latency counts from the scheduled time of each request.",
    after_long_help = "Examples:\n  \
        switchyard bench load --target 127.0.0.1:6380 --duration 1m\n  \
        switchyard bench load --mix get=95,set=5 --sizes 100:9,10000:1 --rate 50000\n\n\
        Keys start with --prefix. Unless --shared is given, no keys with that prefix may exist at the start, and no other client may \
        write them, so that every expected reply is known.\n\n\
        Exit codes: 0 every reply was correct; 1 otherwise"
)]
struct LoadArguments {
    /// Target server
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:6380")]
    target: String,

    /// Duration of the load
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_flag)]
    duration: Duration,

    /// Number of connections
    #[arg(long, value_name = "N", default_value_t = 50)]
    connections: usize,

    /// Number of threads
    #[arg(long, value_name = "N", default_value_t = 1)]
    threads: usize,

    /// Requests in flight per connection [default: 1; with --rate: 1000]
    #[arg(long, value_name = "N")]
    pipeline: Option<usize>,

    /// Open loop: requests per second
    #[arg(long, value_name = "N")]
    rate: Option<f64>,

    /// Commands by weight
    #[arg(long, value_name = "MIX", default_value_t = Mix::default())]
    mix: Mix,

    /// Value sizes in bytes, by weight (BYTES or BYTES:WEIGHT,...)
    #[arg(long, value_name = "SIZES", default_value = "64")]
    sizes: ValueSizes,

    /// Number of keys of each type
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    keys: u64,

    /// Zipfian exponent of the keys' popularity (0: uniform)
    #[arg(long, value_name = "THETA", default_value_t = switchyard_bench::random::YCSB_THETA)]
    zipf: f64,

    /// Use all keys on all connections; replies are then checked less strictly
    #[arg(long)]
    shared: bool,

    /// Prefix of the keys [default: unique to this run]
    #[arg(long)]
    prefix: Option<String>,

    /// Seed: the same seed gives the same requests
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs the chosen subcommand.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let stop = interrupt::flag()?;
    match &arguments.what {
        What::Load(arguments) => load(arguments, &stop)?,
        What::Capacity(arguments) => capacity::run(arguments, &stop)?,
    }
    Ok(())
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
        doubt: load::Doubt::Lasting,
        seed: arguments.seed,
    };
    switchyard_bench::process::raise_file_limit();
    let mut run = load::start(&settings)?;
    let started = Instant::now();
    let mut last = started;
    let mut live = Live::start(arguments.duration);
    while !run.is_finished() {
        std::thread::sleep(Duration::from_millis(20));
        if stop.load(Ordering::Relaxed) {
            run.stop();
        }
        let period = last.elapsed();
        if period >= live.period() {
            last = Instant::now();
            let interval = run.take_interval();
            live.update(started.elapsed(), period, &interval, run.total());
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
    table.row(["requests without a reply".to_owned(), thousands(total.unanswered)]);
    table.row(["connections lost".to_owned(), thousands(total.disconnects)]);
    print!("{}", table.to_text());
    for complaint in &summary.complaints {
        println!("  {complaint}");
    }
    ensure!(total.is_clean(), "not every reply was correct");
    Ok(())
}

/// Returns a prefix that no earlier run used. Otherwise every reply would look wrong.
pub(super) fn own_prefix() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
    format!("load:{:x}:", now ^ u128::from(std::process::id()))
}
