//! Servers on the router's own machine: each has a directory with the number of its change, and its output is a file there.
//!
//! A server outlives the router. It is found again by its output: a group of processes, not the router's own, that writes into that directory. No file with a process id is
//! needed. It would be missing if the router was killed before writing it, and would lie after a reboot.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgid, kill_process_group};

use super::{LocalConfig, Provisioner};

/// A server may take so long to stop before it is killed. It has no keys any more.
const STOPPING: Duration = Duration::from_secs(10);

/// The end of its output that an error shows, bytes.
const SHOWN: usize = 300;

/// Starts servers here.
pub(super) struct Local {
    config: LocalConfig,
    directory: PathBuf,
}

impl Local {
    pub(super) fn new(config: LocalConfig, directory: PathBuf) -> Self {
        Self { config, directory }
    }

    fn directory_of(&self, number: u64) -> PathBuf {
        self.directory.join(number.to_string())
    }

    fn log_of(&self, number: u64) -> PathBuf {
        self.directory_of(number).join("server.log")
    }

    /// The group of processes that is the server of this number, if one of them runs.
    fn running(&self, number: u64) -> Option<Pid> {
        let directory = fs::canonicalize(self.directory_of(number)).ok()?;
        let own = getpgid(None).ok()?;
        let pids = fs::read_dir("/proc").ok()?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let mut pids = pids.filter_map(Pid::from_raw).filter(|pid| {
            let out = Path::new("/proc").join(pid.as_raw_nonzero().to_string()).join("fd/1");
            // Its name does not count: logs are rotated.
            fs::read_link(out).is_ok_and(|out| out.parent() == Some(&*directory))
        });
        pids.find_map(|pid| getpgid(Some(pid)).ok().filter(|group| *group != own))
    }

    /// Starts it, and looks whether it stays: a command line that is wrong ends at once.
    fn launch(&self, number: u64, address: &str) -> Result<(), String> {
        self.spawn(number, port_of(address)?)?;
        std::thread::sleep(Duration::from_millis(200));
        match self.running(number) {
            Some(_) => Ok(()),
            None if TcpStream::connect(address).is_ok() => Err(format!(
                "the server at {address} went to the background, where it is not found again: stop it, and have it stay (\"daemonize no\")"
            )),
            None => Err(format!("the server ended at once: {}", self.last_words(number))),
        }
    }

    fn spawn(&self, number: u64, port: u16) -> Result<(), String> {
        if self.config.command.is_empty() {
            return Err("[autoscale.local] names no command: put back the one that was there".to_owned());
        }
        let directory = self.directory_of(number);
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        // The server starts in it, so a relative path would mean another place.
        let made = fs::create_dir_all(&directory).and_then(|()| fs::canonicalize(&directory));
        let directory = made.map_err(|error| failed(&format!("cannot make {}", directory.display()), error))?;
        let log = self.log_of(number);
        let out = File::options()
            .create(true)
            .append(true)
            .open(&log)
            .map_err(|error| failed(&format!("cannot write {}", log.display()), error))?;
        let err = out.try_clone().map_err(|error| failed("cannot share a file", error))?;
        let words = self.config.command.iter();
        let mut words = words.map(|word| word.replace("{port}", &port.to_string()).replace("{dir}", &directory.to_string_lossy()));
        let program = words.next().unwrap_or_default();
        let mut child = Command::new(&program)
            .args(words)
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(err)
            // These variables of systemd are meant for the router.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            // Signals of the router's terminal do not reach it, and it is found by this.
            .process_group(0)
            .spawn()
            .map_err(|error| failed(&format!("cannot start {program}"), error))?;
        // Somebody has to take note of its end. The thread ends with it.
        std::thread::Builder::new()
            .name("server".to_owned())
            .spawn(move || drop(child.wait()))
            .map(drop)
            .map_err(|error| failed("cannot start a thread", error))
    }

    /// The end of what it has written.
    fn last_words(&self, number: u64) -> String {
        let text = fs::read(self.log_of(number)).unwrap_or_default();
        let end = String::from_utf8_lossy(&text[text.len().saturating_sub(SHOWN)..]);
        end.lines().last().unwrap_or("it has written nothing").trim().to_owned()
    }
}

fn port_of(address: &str) -> Result<u16, String> {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).ok_or_else(|| format!("{address} has no port"))
}

impl Provisioner for Local {
    fn choose(&self, _number: u64, taken: &BTreeSet<String>) -> Result<Option<String>, String> {
        let (first, last) = self.config.ports;
        let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let address = |port: u16| format!("127.0.0.1:{port}");
        let free = (first..=last).find(|port| !taken.contains(&address(*port)) && is_free(port));
        free.map(|port| Some(address(port))).ok_or_else(|| format!("all ports {first}-{last} of [autoscale.local] are in use"))
    }

    fn start(&self, number: u64, chosen: Option<&str>) -> Result<String, String> {
        let address = chosen.ok_or("no port was chosen")?;
        if self.running(number).is_none() {
            self.launch(number, address)?;
        }
        Ok(address.to_owned())
    }

    fn stop(&self, number: u64, _address: &str) -> Result<(), String> {
        if let Some(group) = self.running(number) {
            // To all of them: a shell around the server does not pass it on.
            let _ = kill_process_group(group, Signal::TERM);
            let end = Instant::now() + STOPPING;
            while self.running(number).is_some() && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(50));
            }
            if self.running(number).is_some() {
                let _ = kill_process_group(group, Signal::KILL);
                std::thread::sleep(Duration::from_millis(200));
            }
            if self.running(number).is_some() {
                return Err(format!("the processes of group {} do not end", group.as_raw_nonzero()));
            }
        }
        match fs::remove_dir_all(self.directory_of(number)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(format!("cannot remove {}: {error}", self.directory_of(number).display()))
            }
            _ => Ok(()),
        }
    }

    fn revive(&self, number: u64, address: &str) -> Option<Result<(), String>> {
        if self.running(number).is_some() {
            return None;
        }
        Some(self.launch(number, address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(directory: &Path, command: &[&str]) -> Local {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        Local::new(LocalConfig { command, ports: (1, 1) }, directory.to_owned())
    }

    #[test]
    fn a_server_is_found_again_and_stopped() {
        let dir = tempfile::tempdir().expect("a directory");
        // The shell stays, and does not pass signals on.
        let command = ["sh", "-c", "echo at {port} in {dir}; sleep 60; true"];
        let first = local(dir.path(), &command);
        assert_eq!(first.start(7, Some("127.0.0.1:7")), Ok("127.0.0.1:7".to_owned()));
        let pid = first.running(7).expect("it runs");
        // Another router of the same state directory.
        let second = local(dir.path(), &command);
        assert_eq!(second.start(7, Some("127.0.0.1:7")), Ok("127.0.0.1:7".to_owned()));
        assert_eq!(second.running(7), Some(pid), "not started twice");
        assert!(fs::read_to_string(second.log_of(7)).is_ok_and(|log| log.starts_with("at 7 in ")));
        assert!(second.revive(7, "127.0.0.1:7").is_none());
        fs::rename(second.log_of(7), second.directory_of(7).join("server.log.1")).expect("renamed");
        assert_eq!(second.running(7), Some(pid), "found by a log that was rotated");
        kill_process_group(pid, Signal::KILL).expect("killed");
        while second.running(7).is_some() {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(second.revive(7, "127.0.0.1:7"), Some(Ok(())));
        assert_eq!(second.stop(7, "127.0.0.1:7"), Ok(()));
        assert!(second.running(7).is_none() && !second.directory_of(7).exists());
        assert_eq!(second.stop(7, "127.0.0.1:7"), Ok(()), "once more is no error");
    }

    #[test]
    fn a_server_that_ends_at_once_says_why() {
        let dir = tempfile::tempdir().expect("a directory");
        let why = local(dir.path(), &["sh", "-c", "echo no such option; exit 1"]).start(1, Some("127.0.0.1:7")).expect_err("it has ended");
        assert!(why.contains("no such option"), "{why}");
        let why = local(dir.path(), &["/no/such/program"]).start(1, Some("127.0.0.1:7")).expect_err("it is not there");
        assert!(why.contains("cannot start /no/such/program"), "{why}");
    }

    #[test]
    fn ports_in_use_are_left_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let of = |first, last| Local::new(LocalConfig { command: Vec::new(), ports: (first, last) }, dir.path().to_owned());
        assert!(of(port, port).choose(1, &BTreeSet::new()).is_err_and(|why| why.contains("in use")));
        drop(taken);
        let address = format!("127.0.0.1:{port}");
        assert_eq!(of(port, port).choose(1, &BTreeSet::new()), Ok(Some(address.clone())));
        assert!(of(port, port).choose(1, &BTreeSet::from([address])).is_err());
    }
}
