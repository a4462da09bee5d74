//! Upgrade in front of a cluster: a new process takes over the listening sockets, and the old one serves its clients
//! until they leave.
//!
//! The old process starts the new one: the program at its own path, with its own arguments. They share a pair of Unix
//! sockets, one of which is the standard input of the new process, so no other process can take part, and no file needs
//! protection. The order of messages makes each failure harmless:
//!
//! 1. *Offer*: the old process sends copies of its listening sockets. Both processes hold the same sockets from now on.
//! 2. *Ready*: the new process has read its configuration and the map, and is connected to the members. It does not
//!    accept.
//! 3. *Open*: the old process requests that the new one accepts.
//! 4. *Opened*: the new process accepts. Both do, for a moment.
//! 5. *Go*: the old process has named the new one to systemd, and closes its sockets.
//!
//! A failure before *Opened* is reported instead, and the old process serves as before.
//!
//! The new process is started by a helper that ends at once, so that systemd becomes its parent, and notices its end
//! while the old process still serves clients.

mod new;
mod old;
mod wire;

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context;

pub(super) use new::{Role, Successor, wait_for_members};
pub(super) use old::Upgrades;

/// Environment variable with the role of a started process.
const ROLE: &str = "SWITCHYARD_UPGRADE_ROLE";

/// Role of the process that starts the new one, and ends.
const HELPER: &str = "helper";

/// Role of the new process.
const SUCCESSOR: &str = "successor";

/// Maximum time from the start of the new process until it is ready. The command line waits for a minute.
const READY_MAX: Duration = Duration::from_secs(45);

/// Maximum time until the new process accepts. Its workers have 5 s.
const OPEN_MAX: Duration = Duration::from_secs(8);

/// Returns the program to start. Its path is the one by which this process was started, so that a replaced file or link
/// is followed.
fn program() -> io::Result<PathBuf> {
    let called = env::args_os().next().filter(|name| !name.is_empty());
    called.map_or_else(env::current_exe, |name| Ok(PathBuf::from(name)))
}

/// Starts a process with the arguments of this one. `input`: its standard input.
fn start(role: &str, input: OwnedFd) -> anyhow::Result<Child> {
    let program = program().context("cannot find the program")?;
    let arguments: Vec<OsString> = env::args_os().skip(1).collect();
    Command::new(&program)
        .args(arguments)
        .env(ROLE, role)
        // Otherwise the new process would send no keep-alives, because they are expected of the old one only.
        .env_remove("WATCHDOG_PID")
        .stdin(Stdio::from(input))
        .spawn()
        .with_context(|| format!("cannot start {}", program.display()))
}
