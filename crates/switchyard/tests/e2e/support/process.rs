//! Child processes that cannot outlive the test that started them.
//!
//! Two mechanisms: the guard kills the child when dropped, even if a panic unwinds. And the kernel kills it when the
//! test process dies (`PR_SET_PDEATHSIG`, set by util-linux's `setpriv`, so that no unsafe `pre_exec` is needed). The
//! kernel sends this signal when the *thread* ends that spawned the child, and the test harness uses a thread per test.
//! So a separate thread that never ends spawns all children.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

type Order = (Command, Sender<io::Result<Child>>);

/// Spawns on a thread that lives as long as the test process.
fn spawn_on_lasting_thread(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = channel::<Order>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                while let Ok((mut command, answer)) = inbox.recv() {
                    let _ = answer.send(command.spawn());
                }
            })
            .expect("a thread for spawning");
        Mutex::new(orders)
    });
    let (answer, outcome) = channel();
    spawner.lock().expect("spawner").send((command, answer)).expect("spawner lives");
    outcome.recv().expect("spawner answers")
}

/// Returns a command that dies with the test process, if `setpriv` exists.
pub(crate) fn tied(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let setpriv = Path::new("/usr/bin/setpriv");
    if setpriv.exists() {
        let mut command = Command::new(setpriv);
        command.args(["--pdeathsig", "KILL", "--"]).arg(program);
        command
    } else {
        Command::new(program)
    }
}

/// Whether `program` is on PATH.
pub(crate) fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()))
}

/// A running child, killed when dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    name: String,
    log: PathBuf,
    ended: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with stdout and stderr in `log`.
    pub(crate) fn start(name: &str, mut command: Command, log: &Path) -> Process {
        let out = File::options().create(true).append(true).open(log).expect("log file");
        command.stdin(Stdio::null()).stdout(out.try_clone().expect("log file")).stderr(out);
        let line = format!("{command:?}");
        let child = spawn_on_lasting_thread(command).unwrap_or_else(|e| panic!("cannot start {name}: {e}\n  {line}"));
        Process { child, name: name.to_owned(), log: log.to_owned(), ended: None }
    }

    /// Process id. `setpriv` replaces itself, so this is the id of the program.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a pid");
        kill_process(pid, signal).unwrap_or_else(|e| panic!("cannot signal {}: {e}", self.name));
        if signal == Signal::STOP {
            // Threads continue until the first of them handles the signal, which takes a while on a busy machine.
            let end = Instant::now() + Duration::from_secs(30);
            while !self.stands_still() {
                assert!(Instant::now() < end, "{} does not stop", self.name);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Whether all threads are stopped.
    fn stands_still(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("its threads");
        tasks.flatten().all(|task| {
            // A thread may end in the meantime. The state follows the name, which may contain any character.
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('T'))
        })
    }

    /// Exit status, if the process has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        if self.ended.is_none() {
            self.ended = self.child.try_wait().expect("wait");
        }
        self.ended
    }

    /// Waits for the end, or panics with the log.
    pub(crate) fn wait(&mut self, limit: Duration) -> ExitStatus {
        if self.ended().is_none() {
            let process =
                pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).expect("a handle of the process");
            let limit = Timespec::try_from(limit).expect("a time");
            while poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&limit)) == Err(Errno::INTR) {}
        }
        let status = self.ended();
        status.unwrap_or_else(|| panic!("{} has not ended after {limit:?}; its log:\n{}", self.name, self.log()))
    }

    /// Kills the process with SIGKILL, and waits for its end.
    pub(crate) fn kill(&mut self) {
        if self.ended().is_none() {
            let _ = self.child.kill();
            self.ended = self.child.wait().ok();
        }
    }

    /// Output so far.
    pub(crate) fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until the log has all texts. A separate thread of the router writes the log with a delay.
    #[track_caller]
    pub(crate) fn expect_log(&self, texts: &[&str]) -> String {
        super::until(&format!("{} has logged {texts:?}", self.name), || {
            let log = self.log();
            texts.iter().all(|text| log.contains(text)).then_some(log)
        })
    }

    /// Returns a field of `/proc/PID/status` in KiB (`VmRSS`, `VmHWM`).
    pub(crate) fn memory_kib(&self, field: &str) -> u64 {
        let path = format!("/proc/{}/status", self.pid());
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|e| panic!("{path}: {e}; log of {}:\n{}", self.name, self.log()));
        text.lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':')?.trim().split(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("{path} has no {field}"))
    }

    /// Resets the peak of resident memory (`VmHWM`) to the current value.
    pub(crate) fn reset_peak_memory(&self) {
        std::fs::write(format!("/proc/{}/clear_refs", self.pid()), "5").expect("reset of VmHWM");
    }

    /// Number of open file descriptors.
    pub(crate) fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).map(Iterator::count).unwrap_or(0)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let died_early = self.ended().is_some_and(|status| !status.success());
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(if died_early { 60 } else { 15 }).collect();
            eprintln!("--- {} (last lines, {}) ---", self.name, self.ended.map(|s| s.to_string()).unwrap_or_default());
            for line in tail.iter().rev() {
                eprintln!("{line}");
            }
        }
    }
}
