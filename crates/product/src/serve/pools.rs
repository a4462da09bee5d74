//! Several twemproxy pools: a child process for each, supervised by this process.
//!
//! A pool has its own listener, admin port and state directory, like a separate router. Processes rather than threads,
//! so that a pool that fails or is full does not affect the others. The children report to this process with systemd's
//! notification protocol, which they implement anyway. systemd itself sees only this process.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use sd_notify::NotifyState;
use tokio::net::UnixDatagram;
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use super::logs::Logs;
use super::twemproxy_stats::{ShownPools, StatsPort};
use super::{SignalWait, Signals, notify, stop_signal};
use crate::cli::Failure;
use crate::config::{Config, counted};

/// Environment variable with the id of the parent process.
const PARENT: &str = "SWITCHYARD_POOLS_PROCESS";

/// Prefix in a ready notification: the address of the admin port, which the system may have chosen.
const ADMIN: &str = "X_SWITCHYARD_ADMIN=";

/// Initial delay before a pool is restarted. Doubles with each failure, up to `PAUSE_MAX`.
const PAUSE: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Run time after which the delay is reset.
const STEADY: Duration = Duration::from_secs(60);

/// Maximum size of a notification, in bytes.
const REPORT_MAX: usize = 4096;

/// If this is a pool's process, lets it end with its parent.
pub(super) fn end_with_parent() -> Result<(), Failure> {
    let Some(parent) = std::env::var_os(PARENT) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::TERM))
        .context("cannot bind the life of this process to its parent")?;
    let lives = getppid().is_some_and(|pid| *pid.as_raw_nonzero().to_string() == *parent);
    if lives { Ok(()) } else { Err(Failure::Failed(anyhow!("the process of all pools has ended"))) }
}

/// Whether this is a pool's process with a supervising parent.
pub(super) fn is_supervised() -> bool {
    std::env::var_os(PARENT).is_some()
}

/// Reports readiness to systemd or the parent process. The parent also receives the admin address.
pub(super) fn report_ready(admin: SocketAddr) {
    let admin = format!("{ADMIN}{admin}");
    let ready = [NotifyState::Ready, NotifyState::Custom(&admin)];
    notify(if is_supervised() { &ready } else { &ready[..1] });
}

/// Runs a process for each pool until SIGTERM or SIGINT. `stats` is the address of twemproxy's stats port. `listed`
/// returns the names now in the file.
pub(super) fn run(
    pools: Vec<(String, Config)>,
    stats: Option<&str>,
    listed: impl Fn() -> Vec<String>,
) -> Result<(), Failure> {
    let Some((_, config)) = pools.first() else { return Ok(()) };
    let mut common = config.clone();
    common.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
    let _logs = Logs::start(common.log_format, &common.log_level, None)?;
    let names: Vec<String> = pools.iter().map(|(name, _)| name.clone()).collect();
    let shown = ShownPools::new(pools);
    if let Some(stats) = StatsPort::bind(stats)? {
        stats.serve(shown.clone())?;
    }
    let SignalWait { runtime, mut signals, .. } = SignalWait::new()?;
    let reports = tempfile::Builder::new()
        .prefix("switchyard-")
        .tempdir()
        .context("cannot make a directory for the reports of pools")?;
    runtime.block_on(watch(&names, &listed, &shown, reports.path(), &mut signals))
}

/// Event from a pool's task.
enum PoolEvent {
    /// The pool serves, with this admin address.
    Ready(usize, Option<SocketAddr>),
    /// The process could not be started, or has ended.
    Ended(usize, std::io::Result<ExitStatus>),
}

/// Process of a pool.
struct Pool {
    name: String,
    is_ready: bool,
    /// Sends signals to the pool's task. `None` without a process.
    signals: Option<mpsc::UnboundedSender<Signal>>,
    started: Instant,
    pause: Duration,
    /// Time of the next restart.
    restart_at: Option<Instant>,
}

impl Pool {
    fn start(&mut self, number: usize, reports: &Path, news: &mpsc::UnboundedSender<PoolEvent>) -> anyhow::Result<()> {
        let socket = reports.join(format!("{number}"));
        // The socket of the previous process may remain.
        let _ = std::fs::remove_file(&socket);
        let reports = UnixDatagram::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let (signals, wanted) = mpsc::unbounded_channel();
        let child = Command::new("/proc/self/exe")
            .arg0("switchyard")
            .args(arguments(&self.name))
            .env("NOTIFY_SOCKET", &socket)
            .env(PARENT, std::process::id().to_string())
            .env_remove("WATCHDOG_USEC")
            .env_remove("WATCHDOG_PID")
            // A Ctrl-C at a terminal must reach only the parent, which then stops each pool once.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start a process for pool {}", self.name))?;
        (self.signals, self.started, self.restart_at) = (Some(signals), Instant::now(), None);
        tokio::spawn(supervise(number, child, reports, wanted, news.clone()));
        Ok(())
    }

    fn signal(&self, signal: Signal) {
        if let Some(signals) = &self.signals {
            // If the task has ended, its event is already queued.
            let _ = signals.send(signal);
        }
    }
}

/// Arguments of this process, for a single pool.
fn arguments(pool: &str) -> impl Iterator<Item = OsString> {
    std::env::args_os().skip(1).chain(["--twemproxy-pool".into(), pool.into()])
}

/// Supervises the process of a pool until it ends.
async fn supervise(
    number: usize,
    mut child: Child,
    reports: UnixDatagram,
    mut wanted: mpsc::UnboundedReceiver<Signal>,
    news: mpsc::UnboundedSender<PoolEvent>,
) {
    let mut report = [0; REPORT_MAX];
    let mut is_asked = true;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status,
            Ok(length) = reports.recv(&mut report) => {
                let report = String::from_utf8_lossy(&report[..length]);
                if report.lines().any(|line| line == "READY=1") {
                    let admin = report.lines().find_map(|line| line.strip_prefix(ADMIN)?.parse().ok());
                    let _ = news.send(PoolEvent::Ready(number, admin));
                }
            }
            signal = wanted.recv(), if is_asked => match signal {
                Some(signal) => {
                    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
                    // The process was not reaped yet, so its id is still valid.
                    let _ = pid.map(|pid| kill_process(pid, signal));
                }
                None => is_asked = false,
            },
        }
    };
    let _ = news.send(PoolEvent::Ended(number, status));
}

async fn watch(
    names: &[String],
    listed: &impl Fn() -> Vec<String>,
    shown: &ShownPools,
    reports: &Path,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let (news, mut heard) = mpsc::unbounded_channel();
    let mut pools: Vec<Pool> = Vec::new();
    for (number, name) in names.iter().enumerate() {
        let mut pool = Pool {
            name: name.clone(),
            is_ready: false,
            signals: None,
            started: Instant::now(),
            pause: PAUSE,
            restart_at: None,
        };
        pool.start(number, reports, &news)?;
        pools.push(pool);
    }
    // Until all pools have been ready once, the end of a pool is a failed start.
    let mut were_ready = false;
    let mut outcome: Option<Result<(), Failure>> = None;
    let watchdog = sd_notify::watchdog_enabled();
    let mut tick =
        tokio::time::interval(watchdog.map_or(PAUSE, |period| PAUSE.min(period / 2)).max(Duration::from_millis(10)));
    loop {
        if outcome.is_some() && pools.iter().all(|pool| pool.signals.is_none()) {
            return outcome.unwrap_or(Ok(()));
        }
        let stop = tokio::select! {
            Some(news) = heard.recv() => match news {
                PoolEvent::Ready(number, admin) => {
                    pools[number].is_ready = true;
                    // A reload reports readiness again, without the address.
                    admin.into_iter().for_each(|admin| shown.note(number, Some(admin)));
                    if !were_ready && pools.iter().all(|pool| pool.is_ready) {
                        were_ready = true;
                        info!("ready: {} of twemproxy's configuration {} served; Ctrl-C stops", counted(pools.len(), "pool"), if pools.len() == 1 { "is" } else { "are" });
                        notify(&[NotifyState::Ready]);
                    }
                    None
                }
                PoolEvent::Ended(number, status) => {
                    let pool = &mut pools[number];
                    (pool.signals, pool.is_ready) = (None, false);
                    shown.note(number, None);
                    let how = match status {
                        Ok(status) => described(status),
                        Err(error) => error.to_string(),
                    };
                    match (&outcome, were_ready) {
                        (Some(_), _) => None,
                        (None, false) => Some(Err(Failure::Failed(anyhow!("pool {} did not start ({how}), so none is served; see its own log lines", pool.name)))),
                        // A restart would fail again, or the two routers would end each other in turn.
                        (None, true) if how == "exit code 2" || how == "exit code 3" => {
                            error!("pool {}: its process ended ({how}) and is not started again; see its own log lines", pool.name);
                            let is_over = pools.iter().all(|pool| pool.signals.is_none() && pool.restart_at.is_none());
                            is_over.then(|| Err(Failure::Failed(anyhow!("no pool is served"))))
                        }
                        (None, true) => {
                            pool.pause = if pool.started.elapsed() >= STEADY { PAUSE } else { pool.pause };
                            error!("pool {}: its process ended ({how}) and starts again in {:?}", pool.name, pool.pause);
                            pool.restart_at = Some(Instant::now() + pool.pause);
                            pool.pause = (pool.pause * 2).min(PAUSE_MAX);
                            None
                        }
                    }
                }
            },
            _ = signals.hangup.recv() => {
                for name in listed().iter().filter(|name| !names.contains(name)) {
                    warn!("pool {name} is new in the file and not served yet: it needs a restart");
                }
                // SIGHUP would end a process that is not ready.
                pools.iter().filter(|pool| pool.is_ready).for_each(|pool| pool.signal(Signal::HUP));
                None
            }
            name = stop_signal(&mut signals.terminate, &mut signals.interrupt) => {
                let again = if outcome.is_some() { " again: at once" } else { "" };
                info!("{name}{again}: all pools stop");
                Some(Ok(()))
            }
            _ = tick.tick() => {
                if watchdog.is_some() {
                    notify(&[NotifyState::Watchdog]);
                }
                let due = |pool: &Pool| pool.restart_at.is_some_and(|at| at <= Instant::now());
                for (number, pool) in pools.iter_mut().enumerate().filter(|(_, pool)| outcome.is_none() && due(pool)) {
                    if let Err(error) = pool.start(number, reports, &news) {
                        warn!("{error:#}");
                        pool.restart_at = Some(Instant::now() + pool.pause);
                    }
                }
                None
            }
        };
        if let Some(stop) = stop {
            notify(&[NotifyState::Stopping]);
            pools.iter().for_each(|pool| pool.signal(Signal::TERM));
            outcome = outcome.or(Some(stop));
        }
    }
}

fn described(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}
