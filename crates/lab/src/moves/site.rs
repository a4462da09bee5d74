//! Two servers with half of the slots each: plain servers behind the router, or a Redis Cluster; and moves of slots in
//! both.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::wire::Reply;

use super::admin::{self, MoveState, Order};
use super::slot::SLOTS;
use super::{Layout, TIMEOUT};

/// Maximum time until both nodes of a cluster know each other.
const CLUSTER_TIMEOUT: Duration = Duration::from_secs(30);
/// Interval between polls of a move.
const POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Arguments of a server without persistence.
const PLAIN: [&str; 2] = ["--appendonly", "no"];
/// The first slot of the second node.
pub(crate) const HALF: u16 = SLOTS / 2;

/// Durability of journal records during a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Journal {
    /// The router waits until the record is on the disk.
    Durable,
    /// The router does not wait. Only to measure the cost of waiting.
    Unsynced,
}

/// Paths of the needed programs.
#[derive(Debug, Clone)]
pub(crate) struct Programs {
    /// redis-server.
    pub(crate) server: PathBuf,
    /// redis-cli.
    pub(crate) cli: PathBuf,
    /// The router.
    pub(crate) switchyard: PathBuf,
}

/// A way to move slots within a Redis Cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClusterMove {
    /// `redis-cli --cluster reshard` with this `--cluster-pipeline`: MIGRATE of keys.
    Reshard { pipeline: u32 },
    /// `CLUSTER MIGRATESLOTS` of Valkey 9: the source forks, and sends the slots and later writes like a primary to a
    /// replica (<https://valkey.io/commands/cluster-migrateslots/>).
    MigrateSlots,
}

impl std::fmt::Display for ClusterMove {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Reshard { pipeline } => write!(f, "redis-cli reshard, pipeline {pipeline}"),
            Self::MigrateSlots => f.write_str("CLUSTER MIGRATESLOTS"),
        }
    }
}

impl Programs {
    /// Finds the programs. `server` is the server program, if not the installed one.
    pub(crate) fn find(switchyard: &Path, server: Option<&Path>) -> Result<Self> {
        let cli = process::find_program(&["redis-cli", "valkey-cli"]).context(
            "redis-cli is not on PATH, but its `--cluster reshard` is the reference (Debian: apt-get install redis-tools)",
        )?;
        let server = server.map_or_else(process::find_redis_server, |path| Ok(path.to_owned()))?;
        Ok(Self { server, cli, switchyard: switchyard.to_owned() })
    }

    /// Whether the server has `CLUSTER MIGRATESLOTS`.
    pub(crate) fn has_migrateslots(&self, folder: &Path) -> Result<bool> {
        let (_server, address) = process::start_redis(&self.server, "probe", folder)?;
        let names = |reply: Reply<'_>| matches!(reply, Reply::Array(ref info) if matches!(info[..], [Reply::Array(_)]));
        Client::connect(address)?.call(&[b"COMMAND", b"INFO", b"cluster|migrateslots"], names)
    }
}

/// A Redis Cluster of two nodes: slots 0-8191 and 8192-16383.
#[derive(Debug)]
pub(crate) struct Cluster {
    nodes: Vec<Process>,
    /// Addresses of the nodes.
    pub(crate) addresses: Vec<SocketAddr>,
    ids: Vec<String>,
}

impl Cluster {
    pub(crate) fn start(programs: &Programs, name: &str, folder: &Path) -> Result<Self> {
        let mut cluster = Self { nodes: Vec::new(), addresses: Vec::new(), ids: Vec::new() };
        let mut buses = Vec::new();
        for i in 0..2 {
            let (address, bus) = (process::free_address()?, process::free_port()?);
            let home = folder.join(format!("{name}-{i}"));
            std::fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
            let mut command = Command::new(&programs.server);
            command.current_dir(&home).args(["--bind", "127.0.0.1", "--port", &address.port().to_string()]);
            command.args([
                "--save",
                "",
                "--appendonly",
                "no",
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                &bus.to_string(),
            ]);
            // Otherwise the node that loses its last slot would become a replica of the other, and copy everything back
            // during the measurement.
            command.args(["--cluster-allow-replica-migration", "no"]);
            let mut node = Process::start(&format!("{name}-{i}"), &command, folder)?;
            node.wait_ready(address)?;
            let (from, to) = if i == 0 { (0, HALF - 1) } else { (HALF, SLOTS - 1) };
            let mut client = Client::connect(address)?;
            client.ok(&[b"CLUSTER", b"ADDSLOTSRANGE", from.to_string().as_bytes(), to.to_string().as_bytes()])?;
            cluster.ids.push(client.text(&[b"CLUSTER", b"MYID"])?);
            cluster.nodes.push(node);
            cluster.addresses.push(address);
            buses.push(bus);
        }
        let mut client = Client::connect(cluster.addresses[0])?;
        let port = cluster.addresses[1].port().to_string();
        // Different epochs, because two nodes with the same one would dispute slots.
        Client::connect(cluster.addresses[1])?.ok(&[b"CLUSTER", b"SET-CONFIG-EPOCH", b"2"])?;
        client.ok(&[b"CLUSTER", b"SET-CONFIG-EPOCH", b"1"])?;
        client.ok(&[b"CLUSTER", b"MEET", b"127.0.0.1", port.as_bytes(), buses[1].to_string().as_bytes()])?;
        let end = Instant::now() + CLUSTER_TIMEOUT;
        loop {
            let mut ready = true;
            for address in &cluster.addresses {
                let info = Client::connect(*address)?.text(&[b"CLUSTER", b"INFO"])?;
                ready &= info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:2");
            }
            if ready {
                return Ok(cluster);
            }
            ensure!(Instant::now() < end, "two nodes did not become a cluster within {CLUSTER_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    pub(crate) fn owner(&self, slot: u16) -> SocketAddr {
        self.addresses[usize::from(slot >= HALF)]
    }

    /// Moves the first `slots` slots of the first node to the second. Returns the duration, until the source has no key
    /// of them.
    pub(crate) fn relocate(
        &self,
        programs: &Programs,
        way: ClusterMove,
        slots: u16,
        folder: &Path,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<Duration> {
        let begun = Instant::now();
        match way {
            ClusterMove::Reshard { pipeline } => {
                let mut reshard = self.reshard(programs, slots, pipeline, folder)?;
                wait_for(&mut reshard, begun, TIMEOUT, tick)
            }
            ClusterMove::MigrateSlots => {
                let mut source = Client::connect(self.addresses[0])?;
                let last = (slots - 1).to_string();
                let target = self.ids[1].as_bytes();
                source.ok(&[b"CLUSTER", b"MIGRATESLOTS", b"SLOTSRANGE", b"0", last.as_bytes(), b"NODE", target])?;
                loop {
                    match state_of_migration(&mut source)?.as_str() {
                        "success" if source.integer(&[b"DBSIZE"])? == 0 => return Ok(begun.elapsed()),
                        state @ ("failed" | "canceled") => bail!("CLUSTER MIGRATESLOTS: {state}"),
                        _ => {}
                    }
                    ensure!(begun.elapsed() < TIMEOUT, "CLUSTER MIGRATESLOTS did not end within {TIMEOUT:?}");
                    tick()?;
                    std::thread::sleep(POLL_INTERVAL);
                }
            }
        }
    }

    /// Starts `redis-cli --cluster reshard`, which takes slots in ascending order.
    fn reshard(&self, programs: &Programs, slots: u16, pipeline: u32, folder: &Path) -> Result<Process> {
        let mut command = Command::new(&programs.cli);
        command.args(["--cluster", "reshard", &self.addresses[0].to_string()]);
        command.args([
            "--cluster-from",
            &self.ids[0],
            "--cluster-to",
            &self.ids[1],
            "--cluster-slots",
            &slots.to_string(),
        ]);
        command.args(["--cluster-yes", "--cluster-pipeline", &pipeline.to_string(), "--cluster-timeout", "60000"]);
        Process::start("reshard", &command, folder)
    }

    pub(crate) fn process_ids(&self) -> Vec<u32> {
        self.nodes.iter().map(Process::id).collect()
    }
}

/// Servers behind a router.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Servers<'a> {
    /// Number of servers.
    pub(crate) count: usize,
    /// Arguments of the servers.
    pub(crate) arguments: &'a [&'a str],
    /// `capacity` of each, in the router's configuration.
    pub(crate) capacity: Option<u64>,
}

impl Servers<'_> {
    /// Servers without persistence, and without a configured capacity.
    pub(crate) fn plain(count: usize) -> Self {
        Self { count, arguments: &PLAIN, capacity: None }
    }
}

/// Plain servers behind the router, which gives each an equal share of the slots.
#[derive(Debug)]
pub(crate) struct Routed {
    /// The router; dropped first.
    pub(crate) router: Process,
    /// Address for clients.
    pub(crate) entry: SocketAddr,
    pub(crate) admin: SocketAddr,
    nodes: Vec<Process>,
    /// Addresses of the servers.
    pub(crate) addresses: Vec<SocketAddr>,
}

impl Routed {
    pub(crate) fn start(programs: &Programs, serve_args: &[String], name: &str, folder: &Path) -> Result<Self> {
        Self::start_with(programs, serve_args, Journal::Durable, name, folder)
    }

    /// Starts `count` servers. The first listed server has slot 0.
    pub(crate) fn start_many(
        programs: &Programs,
        serve_args: &[String],
        count: usize,
        name: &str,
        folder: &Path,
    ) -> Result<Self> {
        Self::start_all(programs, serve_args, Journal::Durable, &Servers::plain(count), name, folder)
    }

    /// Starts these servers.
    pub(crate) fn start_servers(
        programs: &Programs,
        serve_args: &[String],
        servers: &Servers<'_>,
        name: &str,
        folder: &Path,
    ) -> Result<Self> {
        Self::start_all(programs, serve_args, Journal::Durable, servers, name, folder)
    }

    pub(crate) fn start_with(
        programs: &Programs,
        serve_args: &[String],
        journal: Journal,
        name: &str,
        folder: &Path,
    ) -> Result<Self> {
        Self::start_all(programs, serve_args, journal, &Servers::plain(2), name, folder)
    }

    fn start_all(
        programs: &Programs,
        serve_args: &[String],
        journal: Journal,
        servers: &Servers<'_>,
        name: &str,
        folder: &Path,
    ) -> Result<Self> {
        let Servers { count, arguments, capacity } = *servers;
        let mut nodes = Vec::new();
        let mut addresses = Vec::new();
        for i in 0..count {
            let (node, address) =
                process::start_redis_with(&programs.server, &format!("{name}-{i}"), folder, arguments)?;
            nodes.push(node);
            addresses.push(address);
        }
        let (entry, admin) = (process::free_address()?, process::free_address()?);
        let state = folder.join(format!("{name}-state"));
        let mut command = Command::new(&programs.switchyard);
        command
            .args(["serve", "--listen", &entry.to_string(), "--admin", &admin.to_string()])
            .arg("--state-dir")
            .arg(&state);
        for address in &addresses {
            command.args(["--node", &address.to_string()]);
        }
        if let Some(capacity) = capacity {
            let file = folder.join(format!("{name}.toml"));
            let tables: String = addresses
                .iter()
                .map(|address| format!("[[node]]\naddress = \"{address}\"\ncapacity = {capacity}\n"))
                .collect();
            std::fs::write(&file, tables).with_context(|| format!("cannot write {}", file.display()))?;
            command.arg("-c").arg(file);
        }
        command.args(serve_args);
        if journal == Journal::Unsynced {
            command.env("SWITCHYARD_BENCH_UNSAFE_JOURNAL", "1");
        }
        let mut router = Process::start(&format!("{name}-router"), &command, folder)?;
        router.wait_ready(entry)?;
        // The router assigns the slots: the server that receives a key of slot 0 is the first.
        let probe = Layout::new(1).name(0);
        let mut client = Client::connect(entry)?;
        client.ok(&[b"SET", probe.as_bytes(), b"probe"])?;
        let mut first = 0;
        while Client::connect(addresses[first])?.integer(&[b"EXISTS", probe.as_bytes()])? == 0 {
            first += 1;
            ensure!(first < count, "no server has the key {probe}, which was written through the router");
        }
        addresses.swap(0, first);
        nodes.swap(0, first);
        client.integer(&[b"DEL", probe.as_bytes()])?;
        Ok(Self { router, entry, admin, nodes, addresses })
    }

    /// Moves slots between two nodes and waits for the end. Returns the duration, and the router's final report of the
    /// move.
    pub(crate) fn move_slots(
        &self,
        programs: &Programs,
        between: (usize, usize),
        goal: &str,
        slots: &str,
        timeout: Duration,
        mut tick: impl FnMut() -> Result<()>,
    ) -> Result<(Duration, Value)> {
        let (from, to) = between;
        let more = ["--goal".to_owned(), goal.to_owned()];
        let order =
            Order { from: self.addresses[from], to: self.addresses[to], slots: Some(slots), keys: None, more: &more };
        let begun = Instant::now();
        let id = admin::begin(&programs.switchyard, self.admin, &order)?;
        loop {
            let report = admin::report(self.admin)?;
            match admin::state_of(&report, id)? {
                MoveState::Done => {
                    let took = begun.elapsed();
                    return Ok((took, admin::find(&report, id).cloned().unwrap_or_default()));
                }
                MoveState::Stopped(why) => bail!("the move stopped: {why}"),
                MoveState::Open => {}
            }
            ensure!(begun.elapsed() < timeout, "the move did not end within {timeout:?}");
            tick()?;
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the bytes and disk syncs of the journal since the start of the router.
    pub(crate) fn journal(&self) -> Result<(u64, u64)> {
        let report = admin::report(self.admin)?;
        let number = |name: &str| {
            report["journal"][name].as_u64().with_context(|| format!("the report names no journal.{name}"))
        };
        Ok((number("bytes")?, number("syncs")?))
    }

    pub(crate) fn process_ids(&self) -> Vec<u32> {
        self.nodes.iter().map(Process::id).collect()
    }
}

/// Returns the state of the newest migration of slots, such as `success`, from `CLUSTER GETSLOTMIGRATIONS`.
fn state_of_migration(source: &mut Client) -> Result<String> {
    let state = source.call(&[b"CLUSTER", b"GETSLOTMIGRATIONS"], |reply| {
        let Reply::Array(migrations) = reply else { return None };
        let Some(Reply::Array(fields)) = migrations.first() else { return None };
        fields.chunks(2).find_map(|field| match field {
            [Reply::Bulk(b"state"), Reply::Bulk(state)] => Some(String::from_utf8_lossy(state).into_owned()),
            _ => None,
        })
    })?;
    state.context("CLUSTER GETSLOTMIGRATIONS names no state of a migration")
}

/// Waits for a program that moves slots. Returns the time since `begun`, or an error if the program fails or takes
/// longer than `timeout`.
fn wait_for(
    mover: &mut Process,
    begun: Instant,
    timeout: Duration,
    mut tick: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    loop {
        if let Some(status) = mover.ended() {
            ensure!(
                status.success(),
                "{} failed ({status}); the end of its output:\n{}",
                mover.name(),
                mover.log_tail()
            );
            return Ok(begun.elapsed());
        }
        if begun.elapsed() > timeout {
            bail!("{} did not end within {timeout:?}; the end of its output:\n{}", mover.name(), mover.log_tail());
        }
        tick()?;
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns the number of keys of a server.
pub(crate) fn keys_at(address: SocketAddr) -> Result<i64> {
    Client::connect(address)?.integer(&[b"DBSIZE"])
}

/// Returns a section of a server's INFO.
pub(crate) fn info(address: SocketAddr, section: &str) -> Result<String> {
    Client::connect(address)?.call(&[b"INFO", section.as_bytes()], |reply| match reply {
        Reply::Bulk(text) => String::from_utf8_lossy(text).into_owned(),
        _ => String::new(),
    })
}

/// Returns a number in a section of a server's INFO; `field` ends with its colon.
pub(crate) fn info_number(address: SocketAddr, section: &str, field: &str) -> Result<u64> {
    let text = info(address, section)?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.trim().parse().ok());
    value.with_context(|| format!("{address} names no {field} in INFO {section}"))
}

/// Returns the version that a server reports.
pub(crate) fn version_of(address: SocketAddr) -> Result<String> {
    let info = info(address, "server")?;
    let field = |name: &str| info.lines().find_map(|l| l.strip_prefix(name)).map(|v| v.trim().to_owned());
    Ok(match field("valkey_version:") {
        Some(version) => format!("Valkey {version}"),
        None => format!("Redis {}", field("redis_version:").unwrap_or_default()),
    })
}
