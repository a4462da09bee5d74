//! The old process: starts the new one, and hands its sockets over.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::process::Child;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::process::Pid;
use sd_notify::NotifyState;
use switchyard_control::Running;
use switchyard_control::admin::{OperationError, UpgradePort, UpgradeReport};
use tokio::sync::mpsc;
use tracing::{error, info, warn};

use super::wire::{Channel, Message, Sockets};
use super::{HELPER, OPEN_MAX, READY_MAX, start};
use crate::serve::notify;

/// Interval between checks whether the helper has ended.
const HELPER_PERIOD: Duration = Duration::from_millis(2);

/// Replaces this process by a new one on request.
#[derive(Debug)]
pub(in crate::serve) struct Upgrades {
    running: Arc<Running>,
    state: Mutex<State>,
    /// Configured address of the admin port, and its socket. `None` after the hand-over.
    admin: Mutex<Option<(SocketAddr, OwnedFd)>>,
    drain_max: Mutex<Duration>,
    /// Receives the reason to stop accepting.
    replaced: mpsc::Sender<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Serving,
    /// The new process starts.
    Upgrading,
    /// The process with this id accepts the clients.
    Replaced(u32),
    /// The process stops.
    Stopping,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Upgrades {
    /// `replaced` receives the reason to stop accepting, after a new process has started to accept.
    pub(in crate::serve) fn new(
        running: Arc<Running>,
        admin: (SocketAddr, OwnedFd),
        drain_max: Duration,
        replaced: mpsc::Sender<String>,
    ) -> Arc<Self> {
        Arc::new(Self {
            running,
            state: Mutex::new(State::Serving),
            admin: Mutex::new(Some(admin)),
            drain_max: Mutex::new(drain_max),
            replaced,
        })
    }

    /// Maximum time for which this process serves its clients after it is replaced.
    pub(in crate::serve) fn drain_max(&self) -> Duration {
        *lock(&self.drain_max)
    }

    /// Applies a changed configuration.
    pub(in crate::serve) fn set_drain_max(&self, drain_max: Duration) {
        *lock(&self.drain_max) = drain_max;
    }

    /// Refuses upgrades from now on. Returns the process that has replaced this one already.
    pub(in crate::serve) fn stop(&self) -> Option<Pid> {
        drop(lock(&self.admin).take());
        match &mut *lock(&self.state) {
            State::Replaced(pid) => i32::try_from(*pid).ok().and_then(Pid::from_raw),
            state => {
                *state = State::Stopping;
                None
            }
        }
    }

    fn begin(&self) -> Result<(), OperationError> {
        let mut state = lock(&self.state);
        let why = match *state {
            State::Serving => {
                *state = State::Upgrading;
                return Ok(());
            }
            State::Upgrading => return Err(OperationError::Conflict("another upgrade is in progress".to_owned())),
            State::Replaced(pid) => format!("process {pid} has replaced this one"),
            State::Stopping => "this process is stopping".to_owned(),
        };
        Err(OperationError::Unavailable(why))
    }

    fn replace(&self) -> anyhow::Result<UpgradeReport> {
        // The end of the container's first process ends all others.
        if std::process::id() == 1 {
            bail!("this is the first process of its container, so no other can replace it: replace the container");
        }
        let until = Instant::now() + READY_MAX;
        let sockets = self.sockets()?;
        let (channel, theirs) = Channel::pair().context("cannot create a pair of sockets")?;
        let helper = start(HELPER, theirs)?;
        // The packets fit into the buffer of the socket, or are read by the new process.
        let offered = channel.offer(&sockets);
        drop(sockets);
        wait_for_helper(helper, until)?;
        let ready = receive(&channel, until);
        if ready.is_err() {
            offered.context("cannot send the listening sockets")?;
        }
        let Message::Ready { pid, version } = ready? else { bail!(UNEXPECTED) };
        channel.send(&Message::Open).context(ENDED_EARLY)?;
        if receive(&channel, Instant::now() + OPEN_MAX)? != Message::Opened {
            bail!(UNEXPECTED);
        }
        self.commit(&channel, pid)?;
        drop(lock(&self.admin).take());
        let left = self.running.with(|router| (router.leave_listeners(), router.status().clients));
        let (left, clients) = left.unwrap_or((Ok(()), 0));
        if let Err(error) = left {
            warn!("a worker may still accept clients: {error}");
        }
        let drain_max = self.drain_max();
        let why = format!(
            "process {pid} ({version}) has replaced this one (process {}), which serves its clients until they leave, for \
             at most {drain_max:?}; clients now: {clients}",
            std::process::id()
        );
        info!("upgrade: {why}");
        // The receiver is gone only if the process ends.
        let _ = self.replaced.try_send(why);
        let old_pid = std::process::id();
        Ok(UpgradeReport { pid, version, old_pid, clients, drain_max_seconds: drain_max.as_secs() })
    }

    /// Returns copies of all listening sockets.
    fn sockets(&self) -> anyhow::Result<Sockets> {
        let no_copies = "cannot copy the listening sockets";
        let admin = lock(&self.admin);
        let (address, socket) = admin.as_ref().context("the sockets are handed over already")?;
        let listeners = self.running.with(switchyard_router::Router::listening_sockets);
        Ok(Sockets {
            admin: (*address, socket.try_clone().context(no_copies)?),
            listeners: listeners.context("the router does not serve")?.context(no_copies)?,
        })
    }

    /// Leaves the clients to the new process, which accepts already, unless this process stops. It cannot be undone.
    fn commit(&self, channel: &Channel, pid: u32) -> anyhow::Result<()> {
        let mut state = lock(&self.state);
        if *state != State::Upgrading {
            bail!("this process is stopping");
        }
        // First, because systemd ignores notifications of the new process before this one.
        notify(&[NotifyState::MainPid(pid)]);
        if let Err(error) = channel.send(&Message::Go) {
            notify(&[NotifyState::MainPid(std::process::id())]);
            return Err(anyhow::Error::new(error).context(ENDED_EARLY));
        }
        *state = State::Replaced(pid);
        Ok(())
    }
}

impl UpgradePort for Upgrades {
    fn upgrade(&self) -> Result<UpgradeReport, OperationError> {
        self.begin()?;
        info!("upgrade: starting a new process");
        self.replace().map_err(|error| {
            let mut state = lock(&self.state);
            if *state == State::Upgrading {
                *state = State::Serving;
            }
            drop(state);
            let why = format!("not upgraded, the old process serves as before: {error:#}");
            error!("{why}");
            OperationError::Failed(why)
        })
    }
}

const ENDED_EARLY: &str = "the new process ended early; see its lines in the log";
const UNEXPECTED: &str = "the new process has sent an unexpected message";

/// Receives the next message of the new process. An error is the reason why this process serves as before.
fn receive(channel: &Channel, until: Instant) -> anyhow::Result<Message> {
    match channel.receive(until) {
        Ok(Message::Refused { why }) => bail!("the new process has failed: {why}"),
        Ok(message) => Ok(message),
        Err(error) => Err(match error.kind() {
            ErrorKind::UnexpectedEof => anyhow!(ENDED_EARLY),
            ErrorKind::TimedOut => anyhow!("the new process was not ready in time"),
            _ => anyhow::Error::new(error).context("the new process has sent no usable message"),
        }),
    }
}

/// Waits until the helper has started the new process.
fn wait_for_helper(mut helper: Child, until: Instant) -> anyhow::Result<()> {
    loop {
        match helper.try_wait().context("cannot wait for the new process")? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => bail!("the new process ended early ({status}); see its lines in the log"),
            None if Instant::now() < until => std::thread::sleep(HELPER_PERIOD),
            None => {
                // Of an old version that knows no helper, for example.
                let _ = helper.kill();
                let _ = helper.wait();
                bail!("the new process was not ready within {READY_MAX:?}");
            }
        }
    }
}
