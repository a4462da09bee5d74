//! The new process: receives the listening sockets, and reports when it is ready.

use std::env;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use switchyard_control::Running;
use switchyard_router::ListeningSockets;

use super::wire::{Channel, Message};
use super::{HELPER, ROLE, SUCCESSOR, start};
use crate::cli::Failure;

/// Maximum time until the old process has sent its sockets, and until each of its replies. It waits for nothing else.
const REPLY_MAX: Duration = Duration::from_secs(20);

/// Maximum time for the connections to members, before clients are accepted. A member that is down makes commands wait
/// at the old process, too.
const CONNECT_MAX: Duration = Duration::from_secs(5);

/// Interval between checks of these connections.
const CONNECT_PERIOD: Duration = Duration::from_millis(5);

/// Maximum length of a reason of a failure, in bytes.
const REASON_MAX: usize = 8 << 10;

/// Part of a process that runs `switchyard serve` in an upgrade.
#[derive(Debug)]
pub(in crate::serve) enum Role {
    /// There is no upgrade.
    None,
    /// The process has started the new one, and ends.
    Helper,
    /// The process replaces another process.
    Successor(Successor),
}

impl Role {
    /// Returns the role of this process. Starts the new process as a helper, or receives the sockets as that process.
    pub(in crate::serve) fn of_process() -> Result<Self, Failure> {
        let input = || {
            io::stdin().as_fd().try_clone_to_owned().with_context(|| format!("{ROLE} is set, but there is no input"))
        };
        match env::var(ROLE).ok().as_deref() {
            None => Ok(Self::None),
            Some(HELPER) => {
                // The child becomes one of systemd's when this process ends.
                drop(start(SUCCESSOR, input()?)?);
                Ok(Self::Helper)
            }
            Some(SUCCESSOR) => Ok(Self::Successor(Successor::receive(input()?)?)),
            Some(_) => Err(Failure::Failed(anyhow!("{ROLE} is set by a router that starts its successor: unset it"))),
        }
    }
}

/// A process that replaces another process. That one serves until this one is ready.
#[derive(Debug)]
pub(in crate::serve) struct Successor {
    channel: Channel,
    /// Configured address and socket of the admin port.
    admin: Option<(SocketAddr, OwnedFd)>,
    listeners: Vec<ListeningSockets>,
    /// Whether the old process waits for this one.
    is_awaited: bool,
}

impl Successor {
    fn receive(input: OwnedFd) -> anyhow::Result<Self> {
        let no_socket = || format!("{ROLE} is set, but standard input is not the socket of another router: unset it");
        let channel = Channel::new(input).with_context(no_socket)?;
        match channel.receive_offer(Instant::now() + REPLY_MAX) {
            Ok(sockets) => {
                let (admin, listeners) = (Some(sockets.admin), sockets.listeners);
                Ok(Self { channel, admin, listeners, is_awaited: true })
            }
            Err(error) => {
                let error = anyhow::Error::new(error).context("cannot receive the sockets of the old process");
                let _ = channel.send(&Message::Refused { why: format!("{error:#}") });
                Err(error)
            }
        }
    }

    /// Returns the socket of the admin port, if it has this address at the old process.
    pub(in crate::serve) fn take_admin(&mut self, address: SocketAddr) -> Option<OwnedFd> {
        self.admin.take().filter(|(of, _)| *of == address).map(|(_, socket)| socket)
    }

    /// Returns the listening sockets of the old process.
    pub(in crate::serve) fn take_listeners(&mut self) -> Vec<ListeningSockets> {
        std::mem::take(&mut self.listeners)
    }

    /// Reports that this process can accept clients, and waits until it must.
    ///
    /// # Errors
    /// If the old process continues to serve instead.
    pub(in crate::serve) fn wait_for_open(&self) -> anyhow::Result<()> {
        let version = format!("{} ({})", env!("CARGO_PKG_VERSION"), crate::COMMIT);
        self.exchange(&Message::Ready { pid: std::process::id(), version }, &Message::Open)
    }

    /// Reports that this process accepts clients, and waits until the old one does not.
    ///
    /// # Errors
    /// If the old process continues to serve instead.
    pub(in crate::serve) fn wait_for_go(&mut self) -> anyhow::Result<()> {
        self.exchange(&Message::Opened, &Message::Go)?;
        self.is_awaited = false;
        Ok(())
    }

    fn exchange(&self, message: &Message, expected: &Message) -> anyhow::Result<()> {
        let given_up = "the old process does not wait for this one any more, and serves as before";
        self.channel.send(message).context(given_up)?;
        let reply = self.channel.receive(Instant::now() + REPLY_MAX).context(given_up)?;
        if reply == *expected { Ok(()) } else { Err(anyhow!(given_up)) }
    }

    /// Reports the reason why this process ends, unless it has already replaced the old one.
    pub(in crate::serve) fn report(&self, failure: &Failure) {
        if self.is_awaited {
            let mut why = failure.to_string();
            why.truncate(why.floor_char_boundary(REASON_MAX));
            // If it has ended, the reason is in the log.
            let _ = self.channel.send(&Message::Refused { why });
        }
    }
}

/// Waits until the workers are connected to all members, for a bounded time.
pub(in crate::serve) fn wait_for_members(running: &Running) {
    let end = Instant::now() + CONNECT_MAX;
    let is_connected = || {
        running.with(|router| router.status().nodes.iter().all(|node| router.is_served(&node.name))).unwrap_or(false)
    };
    while !is_connected() && Instant::now() < end {
        std::thread::sleep(CONNECT_PERIOD);
    }
}
