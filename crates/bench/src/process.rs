//! Child processes that do not outlive their parent: found on PATH, started on free ports with output to a file,
//! stopped by handle.
//!
//! Each child has its own process group, so that Ctrl-C in a terminal reaches only the parent, which stops the children
//! in order. Otherwise children would end at the same time, and the last second of every run would look like a failure.

use std::collections::VecDeque;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::client::Client;

/// Timeout for a server's first reply. Envoy needs about a second on a busy machine.
const START_TIMEOUT: Duration = Duration::from_secs(15);

/// Returns a loopback port that was free a moment ago, and that none of the last 64 calls returned.
///
/// The kernel may assign a port again as soon as its listener is closed, so two calls in a row could return the same
/// port before the first caller has bound it.
pub fn free_port() -> Result<u16> {
    static RECENT: Mutex<VecDeque<u16>> = Mutex::new(VecDeque::new());
    let mut recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot bind a port on 127.0.0.1")?;
        let port = listener.local_addr()?.port();
        if !recent.contains(&port) {
            recent.push_back(port);
            if recent.len() > 64 {
                recent.pop_front();
            }
            return Ok(port);
        }
    }
}

/// Returns a loopback address with a port that was free a moment ago.
pub fn free_address() -> Result<SocketAddr> {
    Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?)))
}

/// Returns the first of `names` that is executable: on PATH, or in `sbin`, where Debian installs servers and which a
/// user's PATH often lacks.
pub fn find_program(names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<_> =
        std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from)).collect();
    names
        .iter()
        .flat_map(|name| folders.iter().map(move |folder| folder.join(name)))
        .find(|p| is_executable(p))
        .and_then(|p| std::path::absolute(p).ok()) // PATH may be relative, and children get other folders
}

/// Whether `path` is an executable file.
pub fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

/// Raises the limit of open files, for this process and its children, to the hard limit. Returns the new limit.
pub fn raise_file_limit() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Permitted up to the hard limit; on an error the old limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// A running child process, killed when dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output in `folder/name.log`.
    pub fn start(name: &str, command: &Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let out = File::create(&log).with_context(|| format!("cannot create {}", log.display()))?;
        let err = out.try_clone()?;
        let child = with_death_signal(command)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {name} ({})", command.get_program().display()))?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Name passed to [`Self::start`].
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Path of the output file.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Exit status, if the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Waits until the process replies to a command at `address`. Any reply is sufficient, because a proxy may refuse
    /// PING.
    pub fn wait_ready(&mut self, address: SocketAddr) -> Result<()> {
        let end = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(status) = self.ended() {
                bail!("{} ended at once ({status}); the end of its output:\n{}", self.name, self.log_tail());
            }
            // Not [`Client::connect`] alone: a socket accepts connections before its process reads, and a proxy may
            // close the connection on PING.
            let answered = TcpStream::connect_timeout(&address, Duration::from_millis(200)).is_ok()
                && Client::connect(address).and_then(|mut c| c.call(&[b"GET", b"switchyard:ready?"], |_| ())).is_ok();
            if answered {
                return Ok(());
            }
            if Instant::now() > end {
                bail!(
                    "{} did not answer at {address} within {START_TIMEOUT:?}; the end of its output:\n{}",
                    self.name,
                    self.log_tail()
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Last lines of the output, for error messages.
    pub fn log_tail(&self) -> String {
        let text = std::fs::read(&self.log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(8)..].iter().map(|l| format!("  | {l}\n")).collect()
    }

    /// Sends SIGTERM, and kills the process if it does not end within `grace`. Returns the exit status, or `None` if
    /// killed.
    pub fn stop(&mut self, grace: Duration) -> Option<ExitStatus> {
        if let Some(status) = self.ended() {
            return Some(status);
        }
        let pid = rustix::process::Pid::from_child(&self.child);
        // fails only if the process has just ended
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let end = Instant::now() + grace;
        while Instant::now() < end {
            if let Some(status) = self.ended() {
                return Some(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.kill();
        None
    }

    /// Kills the process with SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // fails only if the process has ended
        let _ = self.child.wait();
    }
}

/// Returns the command such that the kernel kills it if the parent is killed, if util-linux's `setpriv` is installed. A
/// direct system call would need unsafe code between fork and exec. The signal is sent when the *thread* that started
/// the child ends.
fn with_death_signal(command: &Command) -> Command {
    let Some(setpriv) = find_program(&["setpriv"]).filter(|_| is_found(command)) else {
        return copied(command, Command::new(command.get_program()));
    };
    let mut tied = Command::new(setpriv);
    tied.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program());
    copied(command, tied)
}

/// Whether the program exists. If not, the error of a direct start is clearer than that of `setpriv`.
fn is_found(command: &Command) -> bool {
    let program = command.get_program();
    is_executable(Path::new(program)) || program.to_str().is_some_and(|p| find_program(&[p]).is_some())
}

fn copied(from: &Command, mut to: Command) -> Command {
    to.args(from.get_args());
    if let Some(folder) = from.get_current_dir() {
        to.current_dir(folder);
    }
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
    to
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Returns the path of redis-server, or else valkey-server.
pub fn find_redis_server() -> Result<PathBuf> {
    find_program(&["redis-server", "valkey-server"]).context(
        "found neither redis-server nor valkey-server on PATH; install one (Debian, Ubuntu: sudo apt-get install redis-server; \
         Fedora: sudo dnf install valkey) and try again",
    )
}

/// Starts a redis-server without persistence on a free port, with its files in `folder`.
pub fn start_redis(program: &Path, name: &str, folder: &Path) -> Result<(Process, SocketAddr)> {
    start_redis_with(program, name, folder, &["--appendonly", "no"])
}

/// Starts a redis-server with additional arguments on a free port, with its files in `folder`.
pub fn start_redis_with(
    program: &Path,
    name: &str,
    folder: &Path,
    arguments: &[&str],
) -> Result<(Process, SocketAddr)> {
    // Another process may take the port before it is bound; try another port then.
    for attempt in 1.. {
        let address = free_address()?;
        match start_redis_at(address, program, name, folder, arguments) {
            Ok(process) => return Ok((process, address)),
            Err(e) if attempt == 3 => return Err(e),
            Err(_) => {}
        }
    }
    unreachable!("the third attempt returns")
}

/// Starts a redis-server at this address, with the files of an earlier one of this name in `folder`.
pub fn start_redis_at(
    address: SocketAddr,
    program: &Path,
    name: &str,
    folder: &Path,
    arguments: &[&str],
) -> Result<Process> {
    let home = folder.join(name);
    std::fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
    let port = address.port().to_string();
    let mut command = Command::new(program);
    command.current_dir(&home).args(["--bind", "127.0.0.1", "--port", &port, "--save", ""]).args(arguments);
    let mut process = Process::start(name, &command, folder)?;
    process.wait_ready(address)?;
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_by_the_first_name_that_exists() {
        let found = find_program(&["no-such-program-here", "sh"]).expect("every machine has sh");
        assert!(found.ends_with("sh"));
        assert!(find_program(&["no-such-program-here"]).is_none());
    }

    #[test]
    fn a_dropped_process_is_gone() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let process = Process::start("sleep", Command::new("sleep").arg("600"), dir.path()).expect("sleep starts");
        let stat = PathBuf::from(format!("/proc/{}", process.id()));
        assert!(stat.exists());
        drop(process);
        assert!(!stat.exists());
    }

    #[test]
    fn a_server_that_exits_immediately_is_reported_with_its_output() {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let mut process =
            Process::start("sad", Command::new("sh").args(["-c", "echo no such luck; exit 3"]), dir.path())
                .expect("sh starts");
        let error = process.wait_ready(free_address().expect("a port")).expect_err("it does not listen").to_string();
        assert!(error.contains("no such luck") && error.contains("3"), "{error}");
    }
}
