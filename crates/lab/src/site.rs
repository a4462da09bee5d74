//! Servers that persist every write, and a router: killed, restarted at the same place, stopped and continued.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::wire::Reply;

/// Maximum time until a process serves.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A process, and the command that restarts it.
struct ManagedProcess {
    name: String,
    address: SocketAddr,
    command: Command,
    process: Option<Process>,
    starts: u32,
}

impl ManagedProcess {
    fn start(&mut self, folder: &Path) -> Result<()> {
        self.starts += 1;
        // A separate log for each start, because the last lines before a kill matter.
        let mut process = Process::start(&format!("{}-{}", self.name, self.starts), &self.command, folder)?;
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = process.ended() {
                bail!("{} ended at once ({status}); the end of its output:\n{}", self.name, process.log_tail());
            }
            // Not ready: a loading server replies LOADING, and a router without nodes an error.
            let asked = Client::connect(self.address)
                .and_then(|mut c| c.call(&[b"PING"], |reply| matches!(reply, Reply::Status(b"PONG"))));
            if asked.unwrap_or(false) {
                self.process = Some(process);
                return Ok(());
            }
            if Instant::now() > end {
                bail!(
                    "{} does not answer at {}; the end of its output:\n{}",
                    self.name,
                    self.address,
                    process.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn id(&self) -> Option<u32> {
        self.process.as_ref().map(Process::id)
    }
}

/// Processes of a cycle.
pub struct Site {
    router: ManagedProcess,
    admin: SocketAddr,
    nodes: Vec<ManagedProcess>,
    folder: PathBuf,
}

impl Site {
    /// Starts `nodes` servers and the router in front of them.
    pub fn start(switchyard: &Path, serve_args: &[String], nodes: usize, folder: &Path) -> Result<Self> {
        let server = process::find_redis_server()?;
        let mut places = Vec::new();
        for i in 0..nodes {
            let address = process::free_address()?;
            let home = folder.join(format!("node{i}"));
            std::fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
            let mut command = Command::new(&server);
            command.current_dir(&home).args([
                "--bind",
                "127.0.0.1",
                "--port",
                &address.port().to_string(),
                "--save",
                "",
            ]);
            command.args(["--appendonly", "yes", "--appendfsync", "always"]);
            let mut place = ManagedProcess { name: format!("node{i}"), address, command, process: None, starts: 0 };
            place.start(folder)?;
            places.push(place);
        }
        let (entry, admin) = (process::free_address()?, process::free_address()?);
        let mut command = Command::new(switchyard);
        command
            .args(["serve", "--listen", &entry.to_string(), "--admin", &admin.to_string()])
            .arg("--state-dir")
            .arg(folder.join("state"));
        for place in &places {
            command.args(["--node", &place.address.to_string()]);
        }
        command.args(serve_args);
        let mut router =
            ManagedProcess { name: "router".to_owned(), address: entry, command, process: None, starts: 0 };
        router.start(folder)?;
        Ok(Self { router, admin, nodes: places, folder: folder.to_owned() })
    }

    /// Address for clients.
    pub fn entry(&self) -> SocketAddr {
        self.router.address
    }

    /// Address of the admin API.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Address of a server.
    pub fn node(&self, index: usize) -> SocketAddr {
        self.nodes[index].address
    }

    /// Returns the number of keys of a node, without staging keys.
    pub fn keys_of(&self, index: usize) -> Result<u64> {
        let mut node = Client::connect(self.node(index))?;
        // Staging keys that a killed router has left expire, or are removed by the next move of slots.
        let count: [&[u8]; 4] = [b"EVAL", b"return #redis.call('KEYS', ARGV[1])", b"0", b"switchyard:temporary:*"];
        let (all, temporary) = (node.integer(&[b"DBSIZE"])?, node.integer(&count)?);
        Ok((all - temporary).unsigned_abs())
    }

    /// Process id of a server, if it runs.
    pub fn node_process(&self, index: usize) -> Option<u32> {
        self.nodes[index].id()
    }

    /// Process id of the router, if it runs.
    pub fn router_process(&self) -> Option<u32> {
        self.router.id()
    }

    /// Kills a server, pauses, and restarts it from its disk.
    pub fn restart_node(&mut self, index: usize, pause: Duration) -> Result<()> {
        self.nodes[index].process = None; // dropped: killed
        std::thread::sleep(pause);
        self.nodes[index].start(&self.folder)
    }

    /// Kills the router, pauses, and restarts it.
    pub fn restart_router(&mut self, pause: Duration) -> Result<()> {
        self.router.process = None;
        std::thread::sleep(pause);
        self.router.start(&self.folder)
    }

    /// Stops a process for a while (SIGSTOP, SIGCONT).
    pub fn hold(&self, process: Option<u32>, pause: Duration) -> Result<()> {
        freeze(process)?;
        std::thread::sleep(pause);
        thaw(process)
    }
}

/// Stops a process (SIGSTOP) until [`thaw`]. Its clients wait.
pub fn freeze(process: Option<u32>) -> Result<()> {
    signal(process, Signal::STOP)
}

/// Continues a process (SIGCONT).
pub fn thaw(process: Option<u32>) -> Result<()> {
    signal(process, Signal::CONT)
}

fn signal(process: Option<u32>, signal: Signal) -> Result<()> {
    let pid = process.and_then(|id| Pid::from_raw(id as i32)).context("there is no process to stop or to continue")?;
    kill_process(pid, signal).context("cannot stop or continue a process")
}
