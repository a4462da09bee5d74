//! `switchyard demo`: real servers, the real router and a real load, on this machine, with nothing to set up.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use switchyard_bench::client::Client;
use switchyard_bench::interrupt;
use switchyard_bench::load::{self, Mix, Pace, Sharing, Skew, Summary};
use switchyard_bench::numbers::{millis, thousands, time_flag};
use switchyard_bench::process::{self, Process};
use switchyard_bench::table::Table;
use tempfile::TempDir;

use super::Failure;
use super::live::{Live, NodeKeys};
use crate::config::{ADMIN_PORT, DATA_PORT};

/// Start local Redis servers and the router, and drive a real load through it
#[derive(Debug, Args)]
#[command(
    long_about = "Start local Redis (or Valkey) servers and the router in a temporary folder, drive a mixed load through the \
        router, and show what happens: requests per second, latency, keys on each server.\n\n\
        Every reply is checked: each connection owns its keys, so it knows what each reply must be. One error or one wrong \
        value and the demo fails. Nothing is left behind: the servers end with the demo, and their folder is removed.",
    after_long_help = "Examples:\n  \
        switchyard demo                          twenty seconds of load over three servers\n  \
        switchyard demo --nodes 5 --duration 1m  more of both\n  \
        switchyard demo --hold                   keep it up afterwards, to try it with redis-cli\n\n\
        Exit codes: 0 every reply was right; 1 something was not, or could not be started"
)]
pub(crate) struct Arguments {
    /// Keep servers and router up after the load, until Ctrl-C
    #[arg(long)]
    hold: bool,

    /// How long the load runs
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = time_flag)]
    duration: Duration,

    /// How many Redis servers
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,

    /// Port of the router [default: 6380, or a free one where that is taken]
    #[arg(long, value_name = "PORT")]
    port: Option<u16>,

    /// Port of the router's admin API [default: 6381, or a free one where that is taken]
    #[arg(long, value_name = "PORT")]
    admin_port: Option<u16>,

    /// Worker threads of the router
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    workers: u16,

    /// Connections of the load
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    connections: u16,
}

/// Requests under way per connection: as a client library that pipelines a little.
const PIPELINE: usize = 4;
/// Keys of each type; with five types up to half a million keys, which take a few hundred bytes each.
const KEYS: u64 = 100_000;
/// How long the router may take to end when asked to.
const GRACE: Duration = Duration::from_secs(10);

/// Runs the demo.
pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let stop = interrupt::flag()?;
    let mut stage = Stage::set(arguments)?;
    let result = stage.perform(arguments, &stop);
    // Also after a failure: the router's last words may be the reason.
    let ended = stage.strike();
    result?;
    ended?;
    Ok(())
}

/// Everything that was started. Processes come before the folder: they must be gone when it is removed.
struct Stage {
    router: Process,
    address: SocketAddr,
    admin: SocketAddr,
    nodes: Vec<(Process, SocketAddr)>,
    folder: TempDir,
}

impl Stage {
    fn set(arguments: &Arguments) -> anyhow::Result<Self> {
        let server = process::find_redis_server()?;
        let folder = tempfile::Builder::new().prefix("switchyard-demo-").tempdir().context("cannot create a temporary folder")?;
        process::raise_file_limit();
        let mut nodes = Vec::new();
        for i in 1..=arguments.nodes {
            let (node, address) = process::start_redis(&server, &format!("node{i}"), folder.path())?;
            println!("node {i}: {} at {address}", name_of(&server));
            nodes.push((node, address));
        }
        let address = choose_address(arguments.port, DATA_PORT)?;
        let admin = choose_address(arguments.admin_port, ADMIN_PORT)?;
        let program = std::env::current_exe().context("cannot tell where this program is, to start the router from it")?;
        let mut command = Command::new(program);
        command.args(["serve", "--listen", &address.to_string(), "--admin", &admin.to_string()]);
        command.args(["--workers", &arguments.workers.to_string()]).arg("--state-dir").arg(folder.path().join("state"));
        for (_, node) in &nodes {
            command.args(["--node", &node.to_string()]);
        }
        let mut router = Process::start("router", &command, folder.path())?;
        router.wait_ready(address)?;
        println!("router: at {address}, one address for all of them\n");
        Ok(Self { router, address, admin, nodes, folder })
    }

    fn perform(&mut self, arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<()> {
        let summary = self.load(arguments, stop)?;
        self.report(&summary)?;
        if arguments.hold && !stop.load(Ordering::Relaxed) {
            self.hold(stop)?;
        }
        ensure!(
            summary.total.is_clean(),
            "the load did not go well: {} error replies, {} wrong replies, {} requests without an answer, {} connections lost",
            summary.total.errors,
            summary.total.wrong,
            summary.total.unanswered,
            summary.total.disconnects
        );
        Ok(())
    }

    fn load(&mut self, arguments: &Arguments, stop: &AtomicBool) -> anyhow::Result<Summary> {
        let settings = load::Settings {
            target: self.address,
            threads: 1, // more would take from the router what they measure: machines that run demos are small
            connections: usize::from(arguments.connections),
            pipeline: PIPELINE,
            pace: Pace::Closed,
            duration: arguments.duration,
            mix: Mix::default(),
            sizes: "64:80,512:15,4096:5".parse()?,
            keys: KEYS,
            skew: Skew::Zipfian(switchyard_bench::random::YCSB_THETA),
            sharing: Sharing::Owned,
            prefix: "demo:".to_owned(),
            seed: 1,
        };
        println!("{} connections, {PIPELINE} requests under way on each, Zipfian keys, every reply checked", arguments.connections);
        println!("commands by weight: {}\n", settings.mix);
        let mut run = load::start(&settings)?;
        let started = Instant::now();
        let mut live = Live::start(arguments.duration, self.nodes.len());
        let mut last = started;
        let mut watchers: Vec<_> = self.nodes.iter().map(|(_, address)| Client::connect(*address).ok()).collect();
        while !run.is_finished() {
            std::thread::sleep(Duration::from_millis(20));
            if stop.load(Ordering::Relaxed) {
                run.stop();
            }
            if let Some(status) = self.router.ended() {
                live.finish();
                bail!("the router ended in the middle of the load ({status}); the end of its output:\n{}", self.router.log_tail());
            }
            let period = last.elapsed();
            if period >= live.period() {
                last = Instant::now();
                let interval = run.take_interval();
                live.update(started.elapsed(), period, &interval, run.total(), &self.keys(&mut watchers));
            }
        }
        live.finish();
        run.finish()
    }

    fn keys(&self, watchers: &mut [Option<Client>]) -> Vec<NodeKeys> {
        let one = |(i, watcher): (usize, &mut Option<Client>)| {
            let keys = watcher.as_mut().and_then(|w| w.integer(&[b"DBSIZE"]).ok()).and_then(|k| u64::try_from(k).ok());
            NodeKeys { name: format!("node {}", i + 1), keys }
        };
        watchers.iter_mut().enumerate().map(one).collect()
    }

    fn report(&self, summary: &Summary) -> anyhow::Result<()> {
        let total = &summary.total;
        let seconds = summary.elapsed.as_secs_f64();
        let mut table = Table::new(["load", ""]);
        table.row(["requests answered".to_owned(), thousands(total.replies)]);
        table.row(["requests/s".to_owned(), thousands((total.replies as f64 / seconds) as u64)]);
        for (name, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("slowest", 1.0)] {
            table.row([format!("latency {name}"), millis(total.quantile(share))]);
        }
        table.row(["error replies".to_owned(), thousands(total.errors)]);
        table.row(["wrong replies".to_owned(), thousands(total.wrong)]);
        table.row(["requests without an answer".to_owned(), thousands(total.unanswered)]);
        println!("{}", table.to_text());
        for complaint in &summary.complaints {
            println!("  {complaint}");
        }

        let mut table = Table::new(["node", "address", "keys", "share", "commands"]);
        let mut counts = Vec::new();
        for (_, address) in &self.nodes {
            let mut client = Client::connect(*address)?;
            let keys = u64::try_from(client.integer(&[b"DBSIZE"])?)?;
            let stats = client.text(&[b"INFO", b"stats"])?;
            let commands = stats.lines().find_map(|l| l.strip_prefix("total_commands_processed:")?.trim().parse::<u64>().ok());
            counts.push((keys, commands));
        }
        let sum: u64 = counts.iter().map(|(keys, _)| keys).sum();
        for (i, ((_, address), (keys, commands))) in self.nodes.iter().zip(&counts).enumerate() {
            let share = format!("{:.1} %", *keys as f64 * 100.0 / sum.max(1) as f64);
            let commands = commands.map_or("?".to_owned(), thousands);
            table.row([format!("{}", i + 1), address.to_string(), thousands(*keys), share, commands]);
        }
        println!("{}", table.to_text());
        let through_router = Client::connect(self.address)?.integer(&[b"DBSIZE"])?;
        println!(
            "DBSIZE through the router: {} keys, the sum over the nodes: {}",
            thousands(through_router.unsigned_abs()),
            thousands(sum)
        );
        ensure!(u64::try_from(through_router) == Ok(sum), "the router says that there are {through_router} keys, and the nodes hold {sum}");
        Ok(())
    }

    fn hold(&mut self, stop: &AtomicBool) -> anyhow::Result<()> {
        let (port, admin) = (self.address.port(), self.admin);
        println!("\nEverything stays up until Ctrl-C. Try it from another terminal:\n");
        println!("  redis-cli -p {port} set greeting hello        through the router, as one server");
        println!("  redis-cli -p {port} get greeting");
        println!("  redis-cli -p {port} info switchyard           what the router says of itself");
        println!("  redis-benchmark -p {port} -t get,set -P 16 -q");
        println!("  switchyard status --admin {admin}     nodes, slots, workers");
        println!("  curl -s http://{admin}/metrics              for Prometheus");
        for (i, (_, address)) in self.nodes.iter().enumerate() {
            println!("  redis-cli -p {} dbsize                        node {} itself", address.port(), i + 1);
        }
        println!("\nFiles and logs: {}", self.folder.path().display());
        while !stop.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
            if let Some(status) = self.router.ended() {
                bail!("the router ended ({status}); the end of its output:\n{}", self.router.log_tail());
            }
        }
        println!("\nending");
        Ok(())
    }

    /// Ends everything, the router first: nodes that vanish under it would fill its log with troubles that are none.
    fn strike(&mut self) -> anyhow::Result<()> {
        let status = self.router.stop(GRACE);
        for (node, _) in &mut self.nodes {
            node.stop(GRACE);
        }
        match status {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("the router ended with {status}; the end of its output:\n{}", self.router.log_tail()),
            None => {
                bail!("the router did not end within {GRACE:?} of being asked to, and was killed")
            }
        }
    }
}

/// The port that was asked for; else the usual one; else, where that is taken, a free one.
fn choose_address(asked: Option<u16>, usual: u16) -> anyhow::Result<SocketAddr> {
    let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match asked {
        Some(port) => Ok(at(port)),
        None if TcpListener::bind(at(usual)).is_ok() => Ok(at(usual)),
        None => {
            let free = process::free_address()?;
            println!("port {usual} is taken; using {} instead", free.port());
            Ok(free)
        }
    }
}

fn name_of(program: &Path) -> String {
    program.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
}
