//! A Redis or Valkey Cluster of three primaries with a replica each, and proxies in front of it.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::wire::Reply;

use crate::moves::site::Programs;
use crate::peers::envoy_config;

/// Primaries. Each has a replica.
pub(super) const PRIMARIES: usize = 3;
/// Maximum time until the members form a cluster, and for each change of it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time without a reply after which members count as failed.
const NODE_TIMEOUT_MS: &str = "2000";

/// The members.
#[derive(Debug)]
pub(super) struct Members {
    /// Primaries at the start, and then the replica of each.
    pub(super) servers: Vec<Process>,
    pub(super) addresses: Vec<SocketAddr>,
}

impl Members {
    pub(super) fn start(programs: &Programs, folder: &Path) -> Result<Self> {
        let (mut servers, mut addresses) = (Vec::new(), Vec::new());
        for number in 0..2 * PRIMARIES {
            let bus = process::free_port()?.to_string();
            let arguments =
                ["--cluster-enabled", "yes", "--cluster-node-timeout", NODE_TIMEOUT_MS, "--cluster-port", &bus];
            let name = format!("member-{number}");
            let (server, address) = process::start_redis_with(&programs.server, &name, folder, &arguments)?;
            servers.push(server);
            addresses.push(address);
        }
        let mut create = Command::new(&programs.cli);
        create.args(["--cluster", "create"]).args(addresses.iter().map(ToString::to_string));
        let made =
            create.args(["--cluster-replicas", "1", "--cluster-yes"]).output().context("cannot run redis-cli")?;
        ensure!(made.status.success(), "redis-cli made no cluster: {}", String::from_utf8_lossy(&made.stdout));
        let mut members = Self { servers, addresses };
        wait("every replica has its data", || {
            let is_ready = |address: &SocketAddr| -> Result<bool> {
                let text = Client::connect(*address)?.text(&[b"INFO", b"replication"])?;
                let is_primary = text.contains("role:master") && text.contains("connected_slaves:1");
                Ok(is_primary || text.contains("master_link_status:up"))
            };
            members.addresses.iter().map(is_ready).try_fold(true, |all, is| Ok(all && is?))
        })?;
        members.sort()?;
        Ok(members)
    }

    /// Puts each replica three places after its primary.
    fn sort(&mut self) -> Result<()> {
        let mut order: Vec<usize> = Vec::new();
        let is_primary = |at: &usize| is_primary(self.addresses[*at]);
        for at in 0..self.addresses.len() {
            if is_primary(&at)? {
                order.push(at);
            }
        }
        ensure!(order.len() == PRIMARIES, "the cluster has {} primaries", order.len());
        for primary in order.clone() {
            let port = format!("master_port:{}\r", self.addresses[primary].port());
            let all = 0..self.addresses.len();
            let mut replicas = all.filter(|at| !order[..PRIMARIES].contains(at));
            let replica = replicas.find(|at| {
                let info = Client::connect(self.addresses[*at]).and_then(|mut at| at.text(&[b"INFO", b"replication"]));
                info.is_ok_and(|info| info.contains(&port))
            });
            order.push(replica.context("a primary has no replica")?);
        }
        let addresses = order.iter().map(|at| self.addresses[*at]).collect();
        let mut servers: Vec<Option<Process>> = self.servers.drain(..).map(Some).collect();
        self.servers = order.iter().filter_map(|at| servers[*at].take()).collect();
        self.addresses = addresses;
        Ok(())
    }

    /// Moves this many slots from the first primary to the second, with `redis-cli --cluster reshard`.
    pub(super) fn reshard(&self, programs: &Programs, slots: u32) -> Result<()> {
        let id = |at: usize| Client::connect(self.addresses[at])?.text(&[b"CLUSTER", b"MYID"]);
        let (from, to, slots) = (id(0)?, id(1)?, slots.to_string());
        let mut command = Command::new(&programs.cli);
        command.args(["--cluster", "reshard", &self.addresses[0].to_string(), "--cluster-yes"]);
        command.args(["--cluster-from", &from, "--cluster-to", &to, "--cluster-slots", &slots]);
        let done = command.output().context("cannot run redis-cli")?;
        ensure!(done.status.success(), "the reshard failed: {}", String::from_utf8_lossy(&done.stdout));
        Ok(())
    }

    /// Makes the replica of a primary the primary.
    pub(super) fn fail_over(&self, primary: usize) -> Result<()> {
        let replica = self.addresses[primary + PRIMARIES];
        Client::connect(replica)?.ok(&[b"CLUSTER", b"FAILOVER"])?;
        wait("the replica is the primary", || is_primary(replica))
    }

    /// Kills a primary, and returns the time of its replica's promotion.
    pub(super) fn kill(&mut self, primary: usize) -> Result<Instant> {
        let replica = self.addresses[primary + PRIMARIES];
        let mut client = Client::connect(replica)?;
        self.servers[primary].kill();
        let end = Instant::now() + TIMEOUT;
        while !has_role_of_primary(&mut client)? {
            ensure!(Instant::now() < end, "no replica was promoted within {TIMEOUT:?}");
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(Instant::now())
    }
}

fn is_primary(address: SocketAddr) -> Result<bool> {
    has_role_of_primary(&mut Client::connect(address)?)
}

fn has_role_of_primary(client: &mut Client) -> Result<bool> {
    client.call(
        &[b"ROLE"],
        |reply| matches!(reply, Reply::Array(ref parts) if matches!(parts.first(), Some(Reply::Bulk(b"master")))),
    )
}

fn wait(what: &str, mut is_over: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + TIMEOUT;
    loop {
        match is_over() {
            Ok(true) => return Ok(()),
            Err(error) if Instant::now() > end => return Err(error).with_context(|| format!("waiting until {what}")),
            Ok(false) if Instant::now() > end => bail!("not within {TIMEOUT:?}: {what}"),
            _ => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// A proxy with one worker thread, and its address.
#[derive(Debug)]
pub(super) struct Proxy {
    pub(super) process: Process,
    pub(super) address: SocketAddr,
    /// Admin port of the router.
    admin: Option<SocketAddr>,
    successors: Vec<Successor>,
}

impl Proxy {
    /// Starts the router. `storage`: its flags for the nodes or members.
    pub(super) fn switchyard(programs: &Programs, name: &str, storage: &[String], folder: &Path) -> Result<Self> {
        let (address, admin) = (process::free_address()?, process::free_address()?);
        let home = folder.join(name);
        std::fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
        let mut command = Command::new(&programs.switchyard);
        command.args(["serve", "--workers", "1", "--listen", &address.to_string(), "--admin", &admin.to_string()]);
        command.args(storage).env("XDG_RUNTIME_DIR", &home);
        Ok(Self { admin: Some(admin), ..Self::started(name, &command, address, folder)? })
    }

    /// Starts Envoy in front of the cluster.
    pub(super) fn envoy(program: &Path, members: &Members, folder: &Path) -> Result<Self> {
        let address = process::free_address()?;
        let file = folder.join("envoy.yaml");
        std::fs::write(&file, envoy_config(address, &members.addresses[..PRIMARIES], true))
            .with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = Command::new(program);
        command.arg("-c").arg(file).args(["--concurrency", "1", "--disable-hot-restart", "-l", "error"]);
        Self::started("envoy", &command, address, folder)
    }

    fn started(name: &str, command: &Command, address: SocketAddr, folder: &Path) -> Result<Self> {
        let mut process = Process::start(name, command, folder)?;
        process.wait_ready(address)?;
        Ok(Self { process, address, admin: None, successors: Vec::new() })
    }

    /// Replaces the router's process by `switchyard upgrade`. The former process serves its clients until they leave.
    pub(super) fn upgrade(&mut self, programs: &Programs) -> Result<()> {
        let admin = self.admin.context("only the router can be upgraded")?;
        let mut command = Command::new(&programs.switchyard);
        command.args(["upgrade", "--json", "--admin", &admin.to_string()]);
        let done = command.output().context("cannot run the router's program")?;
        ensure!(done.status.success(), "the upgrade failed: {}", String::from_utf8_lossy(&done.stderr));
        let report: Value = serde_json::from_slice(&done.stdout).context("the report of the upgrade is no JSON")?;
        let pid = report["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).and_then(Pid::from_raw);
        let pid = pid.context("the report of the upgrade has no process id")?;
        let process = pidfd_open(pid, PidfdFlags::empty()).context("the new process has ended")?;
        self.successors.push(Successor(process));
        Ok(())
    }
}

/// A process that has replaced another process of the router, killed when dropped. By its descriptor, because it is no
/// child of this process.
#[derive(Debug)]
struct Successor(OwnedFd);

impl Drop for Successor {
    fn drop(&mut self) {
        // Fails only if it has ended.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}
