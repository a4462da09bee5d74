//! `switchyard bench capacity`: the highest request rate of a server within a response time, as the threshold T of
//! Makris et al. (figure 1).

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use switchyard_bench::client::Client;
use switchyard_bench::load::{self, Mix, Pace, Sharing, Skew, ValueSizes};
use switchyard_bench::numbers::{millis, thousands, time_flag};
use switchyard_bench::table::Table;

use super::bench::own_prefix;

/// Ratio of the rates of consecutive steps.
const STEP: f64 = 1.25;

/// Connection names of a router at its nodes start with `ROUTER`. `OTHERS` are exceptions.
const ROUTER: &str = "switchyard-";
const OTHERS: [&str; 2] = ["switchyard-doctor", "switchyard-standby"];

/// Find how many requests per second a server answers in time
#[derive(Debug, Args)]
#[command(
    long_about = "Find how many requests per second a server answers in time. The rate is raised step by step, in an open loop, until the mean response time exceeds the limit; the \
        last rate within it is the server's capacity, for `capacity` of its [[node]] (docs/planner.md).\n\n\
        The server is overloaded on purpose, so a server behind a router is refused. Keys are removed at the end.",
    after_long_help = "Examples:\n  \
        switchyard bench capacity 127.0.0.1:7001\n  \
        switchyard bench capacity 127.0.0.1:7001 --limit 500us --mix get=90,set=10\n\n\
        Exit codes: 0 measured; 1 not measurable, or a router serves the server"
)]
pub(super) struct Arguments {
    /// The server
    #[arg(value_name = "HOST:PORT")]
    target: String,

    /// Limit of the mean response time
    #[arg(long, value_name = "TIME", default_value = "1ms", value_parser = time_flag)]
    limit: Duration,

    /// Duration of each step
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time_flag)]
    step: Duration,

    /// First rate, in requests per second
    #[arg(long, value_name = "N", default_value_t = 1000.0)]
    from: f64,

    /// Number of connections
    #[arg(long, value_name = "N", default_value_t = 16)]
    connections: usize,

    /// Commands by weight
    #[arg(long, value_name = "MIX", default_value_t = Mix::default())]
    mix: Mix,

    /// Value sizes in bytes, by weight (BYTES or BYTES:WEIGHT,...)
    #[arg(long, value_name = "SIZES", default_value = "64")]
    sizes: ValueSizes,
}

pub(super) fn run(arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
    let Arguments { target, limit, step, from, connections, mix, sizes } = arguments;
    let address: SocketAddr = target
        .to_socket_addrs()
        .ok()
        .and_then(|mut addresses| addresses.next())
        .with_context(|| format!("\"{target}\" is not an address: HOST:PORT is needed"))?;
    refuse_if_served(target, address)?;
    ensure!(from.is_finite() && *from > 0.0, "the first rate must be above 0 requests per second, not {from}");
    switchyard_bench::process::raise_file_limit();
    let prefix = own_prefix();
    let mut table = Table::new(["requests/s sent", "answered", "mean", "p99"]);
    let (mut rate, mut capacity) = (*from, None);
    let outcome = loop {
        let settings = load::Settings {
            target: address,
            threads: 1,
            connections: *connections,
            pipeline: 1000,
            pace: Pace::Open { rate },
            duration: *step,
            mix: *mix,
            sizes: sizes.clone(),
            keys: 10_000,
            skew: Skew::Uniform,
            sharing: Sharing::Shared,
            prefix: prefix.clone(),
            doubt: load::Doubt::Lasting,
            seed: 1,
        };
        let run = load::start(&settings)?;
        while !run.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
            if stop.load(Ordering::Relaxed) {
                run.stop();
            }
        }
        let summary = run.finish()?;
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        let answered = summary.total.replies as f64 / summary.elapsed.as_secs_f64();
        let mean = summary.total.mean();
        table.row([
            thousands(rate as u64),
            thousands(answered as u64),
            millis(mean),
            millis(summary.total.quantile(0.99)),
        ]);
        eprintln!("{} requests/s: mean {}", thousands(rate as u64), millis(mean));
        ensure!(summary.total.errors == 0, "the server replies with errors: {}", summary.complaints.join("; "));
        // Requests without a reply by the end of the step count as late.
        if mean > *limit || answered < rate * 0.9 {
            break capacity;
        }
        capacity = Some(rate);
        rate *= STEP;
    };
    remove(address, &prefix)?;
    print!("{}", table.to_text());
    let Some(capacity) = outcome else {
        bail!(
            "even {} requests/s take more than {} on average: start with a lower rate (--from), or raise the limit (--limit)",
            thousands(*from as u64),
            millis(*limit)
        );
    };
    println!(
        "capacity: {} requests/s within {} on average\nin the configuration, for this node: capacity = {capacity:.0}",
        thousands(capacity as u64),
        millis(*limit)
    );
    Ok(())
}

/// Refuses a server behind a router, because this load would delay the router's clients.
fn refuse_if_served(target: &str, address: SocketAddr) -> anyhow::Result<()> {
    let list = Client::connect(address)?.text(&[b"CLIENT", b"LIST"])?;
    let names = list.split_whitespace().filter_map(|field| field.strip_prefix("name="));
    let mut routers =
        names.filter(|name| name.starts_with(ROUTER) && !OTHERS.iter().any(|other| name.starts_with(other)));
    match routers.next() {
        Some(name) => {
            bail!(
                "a router serves {target} ({name} is connected to it): its clients would wait. Measure a similar server without clients"
            )
        }
        None => Ok(()),
    }
}

/// Deletes the keys that the load has written.
fn remove(address: SocketAddr, prefix: &str) -> anyhow::Result<()> {
    let mut client = Client::connect(address)?;
    let script = b"local c = '0' repeat local r = redis.call('SCAN', c, 'MATCH', ARGV[1], 'COUNT', 1000) c = r[1] \
        for _, k in ipairs(r[2]) do redis.call('UNLINK', k) end until c == '0' return 0";
    client.integer(&[b"EVAL", script, b"0", format!("{prefix}*").as_bytes()])?;
    Ok(())
}
