//! Processes of the demo: two servers, the router, and a third server started by the router.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use serde::de::DeserializeOwned;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_control::admin::{AutoscaleReport, KeyReport, WhereReport};
use tempfile::TempDir;

use super::Arguments;
use super::narrator::{Kind, Narrator};
use crate::cli::admin_client::{AdminClient, encoded};
use crate::config::{ADMIN_PORT, DATA_PORT};

/// Time for a process to end.
const GRACE: Duration = Duration::from_secs(10);

/// A write reaches the server's file before its reply. Only a crash of the machine would lose writes.
const DURABLE: [&str; 6] = ["--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"];

/// Maximum number of keys in a request for their places, limited by the request line.
const KEYS_PER_REQUEST: usize = 100;

/// A server started by the demo.
struct Node {
    process: Process,
    address: SocketAddr,
}

/// All started processes. Fields are dropped in order: the processes must end before the folder is removed.
pub(super) struct Stage {
    router: Process,
    pub(super) address: SocketAddr,
    pub(super) admin: SocketAddr,
    client: AdminClient,
    nodes: Vec<Node>,
    /// Servers started by the autoscaler, in the order of discovery.
    joined: Vec<String>,
    server: PathBuf,
    folder: TempDir,
}

impl Stage {
    pub(super) fn set(arguments: &Arguments, narrator: &mut Narrator) -> anyhow::Result<Self> {
        let server = process::find_redis_server()?;
        let folder = tempfile::Builder::new()
            .prefix("switchyard-demo-")
            .tempdir()
            .context("cannot create a temporary folder")?;
        process::raise_file_limit();
        let mut nodes = Vec::new();
        let name = server.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        for number in 1..=2 {
            let (process, address) =
                process::start_redis_with(&server, &format!("node{number}"), folder.path(), &DURABLE)?;
            narrator.narrate(Kind::Plain, &format!("node {number}: {name} at {address}, with an append-only file"));
            nodes.push(Node { process, address });
        }
        let address = choose_address(arguments.port, DATA_PORT, narrator)?;
        let admin = choose_address(arguments.admin_port, ADMIN_PORT, narrator)?;
        let config = folder.path().join("switchyard.toml");
        let addresses: Vec<SocketAddr> = nodes.iter().map(|node| node.address).collect();
        std::fs::write(&config, configuration(&server, &addresses, arguments.rate)?)
            .with_context(|| format!("cannot write {}", config.display()))?;
        let mut command = Command::new(program()?);
        command.arg("serve").arg("--config").arg(&config).arg("--state-dir").arg(folder.path().join("state"));
        command.args([
            "--listen",
            &address.to_string(),
            "--admin",
            &admin.to_string(),
            "--workers",
            &arguments.workers.to_string(),
        ]);
        let mut router = Process::start("router", &command, folder.path())?;
        router.wait_ready(address)?;
        narrator.narrate(Kind::Plain, &format!("router: at {address}, one address for all of them"));
        let client = AdminClient::local(admin.port())?;
        Ok(Self { router, address, admin, client, nodes, joined: Vec::new(), server, folder })
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns an error if the router has ended.
    pub(super) fn check_router(&mut self) -> anyhow::Result<()> {
        match self.router.ended() {
            None => Ok(()),
            Some(status) => bail!("the router ended ({status}); the end of its output:\n{}", self.router.log_tail()),
        }
    }

    /// Returns the admin API's response at a path, including key names.
    pub(super) fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        self.client.read(&self.client.get_all(path)?)
    }

    /// Returns the nodes of keys, whether they exist or not.
    pub(super) fn places(&self, keys: &[Vec<u8>]) -> anyhow::Result<Vec<KeyReport>> {
        let mut places = Vec::new();
        for some in keys.chunks(KEYS_PER_REQUEST) {
            let query: Vec<String> =
                some.iter().map(|key| format!("key={}", encoded(&String::from_utf8_lossy(key)))).collect();
            places.extend(self.get::<WhereReport>(&format!("/api/v1/where?{}", query.join("&")))?.keys);
        }
        Ok(places)
    }

    /// Returns the autoscaler's report. Names its new servers.
    pub(super) fn scale(&mut self) -> anyhow::Result<AutoscaleReport> {
        let report: AutoscaleReport = self.get("/api/v1/autoscale")?;
        for address in &report.started {
            if !self.joined.contains(address) {
                self.joined.push(address.clone());
            }
        }
        Ok(report)
    }

    /// Servers started by the autoscaler.
    pub(super) fn joined(&self) -> &[String] {
        &self.joined
    }

    /// Name of a node in the router: its address.
    pub(super) fn name(&self, number: usize) -> String {
        self.nodes[number - 1].address.to_string()
    }

    /// Replaces addresses by `node N`.
    pub(super) fn with_names(&self, text: &str) -> String {
        let own = self.nodes.iter().map(|node| node.address.to_string());
        own.chain(self.joined.iter().cloned())
            .enumerate()
            .fold(text.to_owned(), |text, (at, address)| text.replace(&address, &format!("node {}", at + 1)))
    }

    /// Kills a server abruptly.
    pub(super) fn kill(&mut self, number: usize) {
        self.nodes[number - 1].process.kill();
    }

    /// Restarts a server with the data in its file.
    pub(super) fn start_again(&mut self, number: usize) -> anyhow::Result<()> {
        let address = self.nodes[number - 1].address;
        let process =
            process::start_redis_at(address, &self.server, &format!("node{number}"), self.folder.path(), &DURABLE)?;
        self.nodes[number - 1].process = process;
        Ok(())
    }

    /// Number of keys at an address.
    pub(super) fn keys(&self, address: &str) -> anyhow::Result<u64> {
        Ok(u64::try_from(Client::connect(address.parse()?)?.integer(&[b"DBSIZE"])?)?)
    }

    /// Checks that the router counts all keys of the nodes. Returns the number.
    pub(super) fn check_keys(&self) -> anyhow::Result<u64> {
        let through = self.keys(&self.address.to_string())?;
        let each: Vec<u64> =
            self.nodes.iter().map(|node| self.keys(&node.address.to_string())).collect::<Result<_, _>>()?;
        let sum: u64 = each.iter().sum();
        ensure!(through == sum, "the router counts {through} keys, but the nodes hold {sum}");
        Ok(sum)
    }

    /// Ends everything, the router first: it would log errors about nodes that end.
    pub(super) fn strike(&mut self) -> anyhow::Result<()> {
        // The autoscaler's servers outlive the router.
        let known = self.scale();
        let status = self.router.stop(GRACE);
        for address in self.joined.iter().filter_map(|address| address.parse().ok()) {
            // Errors are ignored: a stopped server cannot be reached, and a server that ends does not reply.
            let _ = Client::connect(address).and_then(|mut client| client.ok(&[b"SHUTDOWN", b"NOSAVE"]));
        }
        for node in &mut self.nodes {
            node.process.stop(GRACE);
        }
        match status {
            Some(status) if status.success() => known.map(drop),
            Some(status) => bail!("the router ended with {status}; the end of its output:\n{}", self.router.log_tail()),
            None => bail!("the router did not stop within {GRACE:?}, and was killed"),
        }
    }
}

/// Path of this program.
pub(super) fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("cannot find the path of this program to start the router")
}

/// Configuration of the router. Its loops have short pauses, so that the story fits into a minute.
fn configuration(server: &Path, nodes: &[SocketAddr], rate: u32) -> anyhow::Result<String> {
    // With setpriv, the kernel kills a server of the autoscaler together with the router, even if the demo itself is
    // killed.
    let tied = process::find_program(&["setpriv"])
        .map(|setpriv| vec![setpriv.display().to_string(), "--pdeathsig".into(), "KILL".into(), "--".into()]);
    let mut command = tied.unwrap_or_default();
    command.push(server.display().to_string());
    command.extend(["--bind", "127.0.0.1", "--port", "{port}", "--dir", "{dir}", "--save", ""].map(str::to_owned));
    command.extend(DURABLE.map(str::to_owned));
    let command: Vec<String> = command.iter().map(|word| format!("{word:?}")).collect();
    let port = process::free_port()?;
    let nodes: String = nodes.iter().map(|address| format!("\n[[node]]\naddress = \"{address}\"\n")).collect();
    Ok(format!(
        "# Written by `switchyard demo`. The pauses are short, so that its story fits into a minute.\n\
         [planner]\nmode = \"on\"\ninterval = \"500ms\"\nwindow = \"2s\"\nheadroom = 25\nmin-requests = {least}\n\n\
         [hot-copies]\nmode = \"auto\"\n\n\
         [telemetry]\nsample = 4\n\n\
         [autoscale]\nmode = \"on\"\npolicy = \"model\"\ncapacity = {capacity}   # requests per second of each node\nmin-nodes = 2\nmax-nodes = 3\n\
         up-after = \"2s\"\ndown-after = \"5s\"\nup-cooldown = \"1s\"\ndown-cooldown = \"3s\"\n\n\
         [autoscale.local]\ncommand = [{command}]\nports = \"{port}-{last}\"\n{nodes}",
        // Below the load of a node before a key is hot: a Zipfian distribution alone must not overload a node.
        least = rate / 4 * 3,
        capacity = rate / 2 * 5,
        command = command.join(", "),
        last = port.saturating_add(9),
    ))
}

/// Returns the address with the requested port. Without one, uses the usual port, or a free one if that is in use.
fn choose_address(asked: Option<u16>, usual: u16, narrator: &mut Narrator) -> anyhow::Result<SocketAddr> {
    let at = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    match asked {
        Some(port) => Ok(at(port)),
        None if TcpListener::bind(at(usual)).is_ok() => Ok(at(usual)),
        None => {
            let free = process::free_address()?;
            narrator.narrate(Kind::Plain, &format!("port {usual} is taken; using {} instead", free.port()));
            Ok(free)
        }
    }
}
