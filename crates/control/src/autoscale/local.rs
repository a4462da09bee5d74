//! Servers on the router's own machine, each with a directory that also contains its output.
//!
//! A server outlives the router. It is found again by its output: a process group, not the router's own, that writes to
//! that directory. A PID file would be missing if the router was killed before writing it, and wrong after a reboot. A
//! directory's name contains a random token, because a router that has lost its store starts again with number 0. A
//! server that has served is only stopped if the group also holds the listening socket of the recorded port.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, getpgid, kill_process_group};

use super::removal::Proof;
use super::{LocalConfig, Process, Provisioner, ServerLocation, ServerSettings, StartedServer};
use crate::sockets;

/// Maximum time for a server to stop before it is killed. It has no keys any more.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Part of a server's output that an error shows, in bytes.
const LOG_TAIL_BYTES: usize = 300;

/// Name of a server's output file. Rotated files begin with the same name.
pub(super) const LOG: &str = "server.log";

/// Default folder of local servers: next to the state directory, so that a disk quota or the removal of one does not
/// affect the other.
#[must_use]
pub fn default_directory(state: &Path) -> PathBuf {
    let state = std::path::absolute(state).unwrap_or_else(|_| state.to_owned());
    match state.file_name() {
        Some(name) => state.with_file_name(format!("{}-servers", name.to_string_lossy())),
        None => state.join("servers"),
    }
}

/// Folder of local servers in earlier versions.
#[must_use]
pub fn former_directory(state: &Path) -> PathBuf {
    state.join("autoscale")
}

/// Provisioner of local servers.
pub(super) struct Local {
    config: LocalConfig,
    state: PathBuf,
    /// Identifier of this machine.
    host: String,
}

impl Local {
    pub(super) fn new(config: LocalConfig, state: &Path) -> Self {
        Self { config, state: state.to_owned(), host: this_host() }
    }

    fn server_directory(&self, started: &StartedServer) -> PathBuf {
        started.home.clone().unwrap_or_else(|| former_directory(&self.state).join(started.number.to_string()))
    }

    /// Process groups that write to this directory.
    fn groups(home: &Path) -> HashSet<Pid> {
        let (Ok(home), Ok(own)) = (fs::canonicalize(home), getpgid(None)) else { return HashSet::new() };
        let pids = fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let writers = pids.filter_map(Pid::from_raw).filter(|pid| {
            let out = Path::new("/proc").join(pid.as_raw_nonzero().to_string()).join("fd/1");
            // The file's name may differ, because logs are rotated.
            fs::read_link(out).is_ok_and(|out| out.parent() == Some(&*home))
        });
        writers.filter_map(|pid| getpgid(Some(pid)).ok()).filter(|group| *group != own).collect()
    }

    /// Returns the group that holds every socket listening at this port, or `None` if there is no listener. Fails if
    /// another process holds one of them.
    fn listener(port: u16, groups: &HashSet<Pid>) -> Result<Option<Pid>, String> {
        let inodes = sockets::listener_inodes(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let holders = sockets::holders(&inodes);
        let group_of = |pid: &u32| {
            getpgid(Some(Pid::from_raw(i32::try_from(*pid).ok()?)?)).ok().filter(|group| groups.contains(group))
        };
        // A socket without a visible holder counts as foreign.
        let of = |inode: &u64| -> Option<Vec<Pid>> { holders.get(inode)?.iter().map(group_of).collect() };
        let found: Option<Vec<Vec<Pid>>> = inodes.iter().map(of).collect();
        let found: Option<HashSet<Pid>> = found.map(|found| found.into_iter().flatten().collect());
        match found {
            Some(found) if found.len() <= 1 => Ok(found.into_iter().next()),
            _ => Err(format!("a process that the router did not start listens at port {port}")),
        }
    }

    /// Starts the server and checks that it stays alive: with a wrong command line it ends at once.
    fn launch(&self, home: &Path, address: &str, settings: ServerSettings<'_>) -> Result<(), String> {
        let port = port_of(address)?;
        self.spawn(home, port, &settings(address)?)?;
        std::thread::sleep(Duration::from_millis(200));
        let groups = Self::groups(home);
        match Self::listener(port, &groups) {
            _ if !groups.is_empty() => Ok(()),
            Ok(None) => Err(format!("the server ended at once: {}", last_log_line(home))),
            _ => Err(format!(
                "the server at port {port} went to the background, and the router cannot find it: stop it, and keep it in the foreground (\"daemonize no\")"
            )),
        }
    }

    /// Spawns the server. It reads `settings` from its standard input, because other users of this machine could read a
    /// password among its arguments.
    fn spawn(&self, home: &Path, port: u16, settings: &str) -> Result<(), String> {
        if self.config.command.is_empty() {
            return Err("[autoscale.local] has no command: restore the previous one".to_owned());
        }
        let failed = |what: &str, error: std::io::Error| format!("{what}: {error}");
        // The server starts in this directory, so a relative path would name another place.
        let home = fs::canonicalize(home).map_err(|error| failed(&format!("cannot use {}", home.display()), error))?;
        let log = home.join(LOG);
        let out = File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&log)
            .map_err(|error| failed(&format!("cannot write {}", log.display()), error))?;
        let err = out.try_clone().map_err(|error| failed("cannot share a file", error))?;
        let words = self.config.command.iter();
        let mut words =
            words.map(|word| word.replace("{port}", &port.to_string()).replace("{dir}", &home.to_string_lossy()));
        let program = words.next().unwrap_or_default();
        let mut child = Command::new(&program)
            .args(words)
            .current_dir(&home)
            .stdin(Stdio::piped())
            .stdout(out)
            .stderr(err)
            // These systemd variables are meant for the router.
            .env_remove("NOTIFY_SOCKET")
            .env_remove("WATCHDOG_USEC")
            // Isolates the server from signals of the router's terminal, and identifies it later.
            .process_group(0)
            .spawn()
            .map_err(|error| failed(&format!("cannot start {program}"), error))?;
        // The write fails only if the process has ended. It never blocks: the settings fit into the pipe.
        drop(child.stdin.take().map(|mut input| input.write_all(settings.as_bytes())));
        // Reaps the process.
        std::thread::Builder::new()
            .name("server".to_owned())
            .spawn(move || drop(child.wait()))
            .map(drop)
            .map_err(|error| failed("cannot start a thread", error))
    }

    /// Terminates a group, and waits for its end.
    fn end(group: Pid, home: &Path) -> Result<(), String> {
        let runs = || Self::groups(home).contains(&group);
        // Signal the whole group, because a shell around the server would not forward the signal.
        let _ = kill_process_group(group, Signal::TERM);
        let end = Instant::now() + STOP_TIMEOUT;
        while runs() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(50));
        }
        if runs() {
            let _ = kill_process_group(group, Signal::KILL);
            std::thread::sleep(Duration::from_millis(200));
        }
        if runs() { Err(format!("the processes of group {} do not end", group.as_raw_nonzero())) } else { Ok(()) }
    }
}

/// Creates a directory and its parents for this user only, because it contains clients' keys. An earlier version may
/// have created it for all users.
fn make_private(home: &Path) -> std::io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(home)?;
    fs::set_permissions(home, Permissions::from_mode(0o700))
}

/// Returns configuration lines with the router's credentials: a password for the user `default`, or another user with
/// all rights as the only one. `default` exists already, and defining it again is an error.
pub(super) fn credentials(user: Option<&str>, password: &str) -> String {
    match user.filter(|user| *user != "default") {
        None => format!("requirepass {}\n", quoted(password)),
        Some(user) => {
            format!("user {} on {} ~* &* +@all\nuser default off\n", quoted(user), quoted(&format!(">{password}")))
        }
    }
}

/// Quotes text for a Redis configuration file.
fn quoted(text: &str) -> String {
    let plain = |byte: u8| (byte.is_ascii_graphic() || byte == b' ') && !matches!(byte, b'"' | b'\\');
    let escaped: String = text
        .bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("\\x{byte:02x}") })
        .collect();
    format!("\"{escaped}\"")
}

/// Last line of a server's output.
fn last_log_line(home: &Path) -> String {
    let text = fs::read(home.join(LOG)).unwrap_or_default();
    let end = String::from_utf8_lossy(&text[text.len().saturating_sub(LOG_TAIL_BYTES)..]);
    end.lines().last().unwrap_or("no output").trim().to_owned()
}

/// Contents of `/etc/machine-id`, or the host name if it is missing, as in some containers.
fn this_host() -> String {
    let read =
        |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    read("/etc/machine-id")
        .or_else(|| read("/proc/sys/kernel/hostname").map(|name| format!("host name {name}")))
        .unwrap_or_default()
}

/// 64 random bits in hexadecimal.
fn token() -> Result<String, String> {
    let bits = getrandom::u64().map_err(|error| format!("the system has no random bytes: {error}"))?;
    Ok(format!("{bits:016x}"))
}

fn port_of(address: &str) -> Result<u16, String> {
    address.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).ok_or_else(|| format!("{address} has no port"))
}

impl Provisioner for Local {
    fn choose(&self, number: u64, taken: &BTreeSet<String>) -> Result<Option<ServerLocation>, String> {
        let (first, last) = self.config.ports;
        let is_free = |port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok();
        let address = |port: u16| format!("127.0.0.1:{port}");
        let free = (first..=last).find(|port| !taken.contains(&address(*port)) && is_free(port));
        let port = free.ok_or_else(|| format!("all ports {first}-{last} of [autoscale.local] are in use"))?;
        let folder = self.config.directory.clone().unwrap_or_else(|| default_directory(&self.state));
        let home = folder.join(format!("{number}-{}", token()?));
        Ok(Some(ServerLocation { address: address(port), home: Some(home), host: Some(self.host.clone()) }))
    }

    fn start(
        &self,
        _number: u64,
        chosen: Option<(&str, &StartedServer)>,
        settings: ServerSettings<'_>,
    ) -> Result<String, String> {
        let (address, started) = chosen.ok_or("no port was chosen")?;
        let home = self.server_directory(started);
        match self.process(started, address) {
            Process::Listens | Process::NotListening => {}
            Process::Ended => {
                make_private(&home).map_err(|error| format!("cannot make {}: {error}", home.display()))?;
                self.launch(&home, address, settings)?;
            }
            Process::Foreign(why) => return Err(why),
            Process::OtherHost | Process::Unknown => return Err(format!("{address} was chosen for another machine")),
        }
        Ok(address.to_owned())
    }

    fn process(&self, started: &StartedServer, address: &str) -> Process {
        let port = match port_of(address) {
            Ok(port) => port,
            Err(why) => return Process::Foreign(why),
        };
        let groups = Self::groups(&self.server_directory(started));
        match (Self::listener(port, &groups), &started.host) {
            (_, Some(host)) if *host != self.host => Process::OtherHost,
            (Err(why), _) => Process::Foreign(why),
            (Ok(Some(_)), _) => Process::Listens,
            // An earlier version did not record the machine, and another machine may share the directory.
            (Ok(None), None) => Process::OtherHost,
            (Ok(None), Some(_)) if groups.is_empty() => Process::Ended,
            (Ok(None), Some(_)) => Process::NotListening,
        }
    }

    fn host(&self) -> Option<String> {
        Some(self.host.clone())
    }

    fn stop(&self, started: &StartedServer, address: &str, proof: Proof) -> Result<Option<String>, String> {
        let home = self.server_directory(started);
        if proof.covers_process() {
            let groups = Self::groups(&home);
            let group = match Self::listener(port_of(address)?, &groups)? {
                Some(group) => Some(group),
                None if proof.needs_listener() => None,
                None => groups.iter().next().copied().filter(|_| groups.len() == 1),
            };
            Self::end(group.ok_or("its process has changed since it was checked")?, &home)?;
        }
        let kept = proof.remove_directory(&home)?;
        Ok(kept.map(|kept| format!("its directory may contain keys and is kept as {}", kept.display())))
    }

    fn revive(
        &self,
        started: &StartedServer,
        address: &str,
        settings: ServerSettings<'_>,
    ) -> Option<Result<(), String>> {
        let home = self.server_directory(started);
        if !Self::groups(&home).is_empty() {
            return None;
        }
        match self.process(started, address) {
            Process::Listens | Process::NotListening | Process::Unknown => None,
            Process::Foreign(why) => Some(Err(why)),
            Process::OtherHost => Some(Err(
                "it was started on another machine, or by a version that did not record the machine".to_owned(),
            )),
            Process::Ended if !home.is_dir() => {
                Some(Err(format!("its directory {} is gone, and with it its keys", home.display())))
            }
            Process::Ended => Some(self.launch(&home, address, settings)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::ProvisionerKind;
    use super::super::removal::{Evidence, Inspected, prove};
    use super::*;

    fn local(directory: &Path, command: &[&str]) -> Local {
        let command = command.iter().map(|&word| word.to_owned()).collect();
        Local::new(LocalConfig { command, ports: (1, 1), directory: None }, &directory.join("state"))
    }

    /// Returns an unused port, and a record of a server there.
    fn record(local: &Local, number: u64) -> (String, StartedServer) {
        let port =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|bound| bound.local_addr()).expect("a port").port();
        let home = default_directory(&local.state).join(format!("{number}-{}", token().expect("random bits")));
        (
            format!("127.0.0.1:{port}"),
            StartedServer {
                home: Some(home),
                host: Some(this_host()),
                ..StartedServer::new(number, ProvisionerKind::Local)
            },
        )
    }

    fn none(_: &str) -> Result<String, String> {
        Ok(String::new())
    }

    struct Nothing;

    impl Evidence for Nothing {
        fn claim(&self, _: &str) -> Option<String> {
            None
        }

        fn inspect(&self, _: &str) -> Result<Inspected, String> {
            Err("does not reply".to_owned())
        }
    }

    fn stop(local: &Local, address: &str, started: &StartedServer) -> Result<Option<String>, String> {
        let proof = prove(Some(started), address, &Nothing, local).map_err(|kept| kept.to_string())?;
        local.stop(started, address, proof)
    }

    fn wait_for(process: &Process, local: &Local, address: &str, started: &StartedServer) {
        while local.process(started, address) != *process {
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_server_is_found_again_and_stopped() {
        let dir = tempfile::tempdir().expect("a directory");
        // The shell stays as the parent of `sleep`, and does not forward signals.
        let command = ["sh", "-c", "echo at {port} in {dir}; sleep 60; true"];
        let first = local(dir.path(), &command);
        let (address, started) = record(&first, 7);
        assert_eq!(first.start(7, Some((&address, &started)), &none), Ok(address.clone()));
        let home = first.server_directory(&started);
        let groups = Local::groups(&home);
        assert_eq!((groups.len(), first.process(&started, &address)), (1, Process::NotListening));
        // Stands for another router with the same state directory.
        let second = local(dir.path(), &command);
        assert_eq!(second.start(7, Some((&address, &started)), &none), Ok(address.clone()));
        assert_eq!(Local::groups(&home), groups, "not started twice");
        assert!(fs::read_to_string(home.join(LOG)).is_ok_and(|log| log.starts_with("at ")));
        let mode = |path: &Path| fs::metadata(path).map(|about| about.permissions().mode() & 0o777).ok();
        let modes = [home.parent().and_then(mode), mode(&home), mode(&home.join(LOG))];
        assert_eq!(modes, [Some(0o700), Some(0o700), Some(0o600)], "no other user may read keys");
        assert!(second.revive(&started, &address, &none).is_none());
        fs::rename(home.join(LOG), home.join("server.log.1")).expect("renamed");
        assert_eq!(Local::groups(&home), groups, "found by a rotated log");
        kill_process_group(*groups.iter().next().expect("it runs"), Signal::KILL).expect("killed");
        wait_for(&Process::Ended, &second, &address, &started);
        assert_eq!(second.revive(&started, &address, &none), Some(Ok(())));
        assert_eq!(stop(&second, &address, &started), Ok(None));
        assert!(Local::groups(&home).is_empty() && !home.exists());
        assert_eq!(stop(&second, &address, &started), Ok(None), "a second stop is no error");
        assert!(
            second
                .revive(&started, &address, &none)
                .is_some_and(|revived| revived.is_err_and(|why| why.contains("is gone")))
        );
    }

    #[test]
    fn a_server_of_another_machine_is_neither_started_nor_stopped() {
        let dir = tempfile::tempdir().expect("a directory");
        let here = local(dir.path(), &["sleep", "60"]);
        let (address, started) = record(&here, 1);
        for host in [Some("another".to_owned()), None] {
            let started = StartedServer { host, ..started.clone() };
            fs::create_dir_all(here.server_directory(&started)).expect("made");
            assert_eq!(here.process(&started, &address), Process::OtherHost);
            assert!(
                here.revive(&started, &address, &none)
                    .is_some_and(|revived| revived.is_err_and(|why| why.contains("another machine")))
            );
            assert!(stop(&here, &address, &started).is_err_and(|why| why.contains("another machine")));
            assert!(Local::groups(&here.server_directory(&started)).is_empty());
        }
    }

    #[test]
    fn a_listener_of_another_process_is_foreign() {
        let dir = tempfile::tempdir().expect("a directory");
        let here = local(dir.path(), &["sleep", "60"]);
        let (_, started) = record(&here, 1);
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = taken.local_addr().expect("an address").to_string();
        fs::create_dir_all(here.server_directory(&started)).expect("made");
        here.spawn(&here.server_directory(&started), port_of(&address).expect("a port"), "").expect("started");
        assert!(matches!(here.process(&started, &address), Process::Foreign(_)));
        assert!(stop(&here, &address, &started).is_err_and(|why| why.contains("not the process")));
        drop(taken);
        wait_for(&Process::NotListening, &here, &address, &started);
        assert_eq!(stop(&here, &address, &started), Ok(None));
    }

    #[test]
    fn servers_that_end_at_once_are_reported_with_the_reason() {
        let dir = tempfile::tempdir().expect("a directory");
        let start = |local: &Local| {
            let (address, started) = record(local, 1);
            local.start(1, Some((&address, &started)), &none).expect_err("it has ended")
        };
        let why = start(&local(dir.path(), &["sh", "-c", "echo no such option; exit 1"]));
        assert!(why.contains("no such option"), "{why}");
        let why = start(&local(dir.path(), &["/no/such/program"]));
        assert!(why.contains("cannot start /no/such/program"), "{why}");
    }

    #[test]
    fn passwords_are_quoted_for_the_servers_configuration() {
        assert_eq!(credentials(None, "a b\"\\\n#"), "requirepass \"a b\\x22\\x5c\\x0a#\"\n");
        assert_eq!(credentials(Some("default"), "x"), credentials(None, "x"));
        assert_eq!(credentials(Some("app"), "x"), "user \"app\" on \">x\" ~* &* +@all\nuser default off\n");
    }

    #[test]
    fn ports_in_use_are_left_out() {
        let dir = tempfile::tempdir().expect("a directory");
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let port = taken.local_addr().expect("an address").port();
        let of = |first, last| {
            Local::new(LocalConfig { command: Vec::new(), ports: (first, last), directory: None }, dir.path())
        };
        assert!(of(port, port).choose(1, &BTreeSet::new()).is_err_and(|why| why.contains("in use")));
        drop(taken);
        let address = format!("127.0.0.1:{port}");
        let chosen = || of(port, port).choose(1, &BTreeSet::new()).expect("free").expect("chosen");
        assert_eq!(chosen().address, address);
        assert_ne!(chosen().home, chosen().home, "servers with the same number have different directories");
        assert!(of(port, port).choose(1, &BTreeSet::from([address])).is_err());
    }
}
