//! Servers that keep what they acknowledge, and a router: killed, started again at the same place, stopped and
//! continued.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::wire::Reply;

/// How long a process may take to serve again.
const PATIENCE: Duration = Duration::from_secs(30);

/// One process, and how to start it again.
struct Place {
    name: String,
    address: SocketAddr,
    command: Command,
    process: Option<Process>,
    starts: u32,
}

impl Place {
    fn start(&mut self, folder: &Path) -> Result<()> {
        self.starts += 1;
        // A log of its own for each start: the last words before a kill are worth keeping.
        let mut process = Process::start(&format!("{}-{}", self.name, self.starts), &self.command, folder)?;
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = process.ended() {
                bail!("{} ended at once ({status}); the end of its output:\n{}", self.name, process.log_tail());
            }
            // A server that loads its file answers LOADING, and a router whose nodes are away an error: both are up.
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

/// All that runs in a cycle.
pub struct Site {
    router: Place,
    admin: SocketAddr,
    nodes: Vec<Place>,
    folder: PathBuf,
}

impl Site {
    /// Starts so many servers, and the router (that binary) before them.
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
            let mut place = Place { name: format!("node{i}"), address, command, process: None, starts: 0 };
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
        let mut router = Place { name: "router".to_owned(), address: entry, command, process: None, starts: 0 };
        router.start(folder)?;
        Ok(Self { router, admin, nodes: places, folder: folder.to_owned() })
    }

    /// Where clients of the router connect.
    pub fn entry(&self) -> SocketAddr {
        self.router.address
    }

    /// Where its admin API listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// Where a server listens.
    pub fn node(&self, index: usize) -> SocketAddr {
        self.nodes[index].address
    }

    /// Keys that a node has, by its own count.
    pub fn keys_of(&self, index: usize) -> Result<u64> {
        let mut node = Client::connect(self.node(index))?;
        // Beginnings of big keys that a killed router has left end by themselves, or with the next move of slots; they
        // are nobody's keys.
        let count: [&[u8]; 4] = [b"EVAL", b"return #redis.call('KEYS', ARGV[1])", b"0", b"switchyard:temporary:*"];
        let (all, temporary) = (node.integer(&[b"DBSIZE"])?, node.integer(&count)?);
        Ok((all - temporary).unsigned_abs())
    }

    /// The process of a server, where it runs.
    pub fn node_process(&self, index: usize) -> Option<u32> {
        self.nodes[index].id()
    }

    /// The process of the router, where it runs.
    pub fn router_process(&self) -> Option<u32> {
        self.router.id()
    }

    /// SIGKILL, a pause, and a start from what is on disk.
    pub fn restart_node(&mut self, index: usize, pause: Duration) -> Result<()> {
        self.nodes[index].process = None; // dropped: killed
        std::thread::sleep(pause);
        self.nodes[index].start(&self.folder)
    }

    /// The same for the router.
    pub fn restart_router(&mut self, pause: Duration) -> Result<()> {
        self.router.process = None;
        std::thread::sleep(pause);
        self.router.start(&self.folder)
    }

    /// SIGSTOP, a pause, SIGCONT.
    pub fn hold(&self, process: Option<u32>, pause: Duration) -> Result<()> {
        freeze(process)?;
        std::thread::sleep(pause);
        thaw(process)
    }
}

/// SIGSTOP: it does nothing until [`thaw`], and its clients wait.
pub fn freeze(process: Option<u32>) -> Result<()> {
    signal(process, Signal::STOP)
}

/// SIGCONT: it goes on where it was.
pub fn thaw(process: Option<u32>) -> Result<()> {
    signal(process, Signal::CONT)
}

fn signal(process: Option<u32>, signal: Signal) -> Result<()> {
    let pid = process.and_then(|id| Pid::from_raw(id as i32)).context("there is no process to stop or to continue")?;
    kill_process(pid, signal).context("cannot stop or continue a process")
}
