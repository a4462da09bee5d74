//! Nodes come and go with the load: the wanted number is stored, and a loop closes the gap.
//!
//! [`switchyard_policy::autoscale`] decides; a [`Provisioner`] starts and stops servers; the operator's own verbs let
//! them join, drain and leave, with the checks that people meet. Here is what lies between: the change that is under
//! way, on record before each of its steps. So the loop may be killed at any point: it goes on with the step that is on
//! record, and each step first looks whether it is done.
//!
//! One change at a time, and each has a number that is never used again. A server that was started has the number with
//! it, so it is found again and not started twice.

mod actions;
mod command;
mod intent;
mod local;
mod messages;
mod notify;
mod reconcile;
mod removal;
mod thread;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
pub use switchyard_policy::autoscale::Schedule;
use switchyard_policy::autoscale::{Knobs, Policy};

use crate::nodes::parse_endpoint;
use crate::planner::Mode;

pub(crate) use actions::{FleetActions, OpenMoves};
pub(crate) use intent::{Event, Started};
pub use local::{default_directory, former_directory};
pub(crate) use messages::reason_text;
pub(crate) use reconcile::{Autoscaler, Autoscaling, is_same};
use removal::Proof;
pub use removal::kept_directories;
pub(crate) use removal::{Evidence, Inspected};
pub use thread::AutoscaleThread;

/// All policies, with their names in the configuration.
pub const POLICIES: [(Policy, &str); 3] =
    [(Policy::Threshold, "threshold"), (Policy::Static, "static"), (Policy::Model, "model")];

/// The way in which servers come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// They are processes on the router's machine.
    Local,
    /// They run already, and wait.
    Standby,
    /// A program starts them.
    Command,
}

impl Way {
    /// Its name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Standby => "standby",
            Self::Command => "command",
        }
    }
}

/// Settings of the autoscaler.
#[derive(Clone, Debug, PartialEq)]
pub struct AutoscaleConfig {
    /// Whether it acts.
    pub mode: Mode,
    /// How it decides.
    pub knobs: Knobs,
    /// Settings of servers on this machine.
    pub local: LocalConfig,
    /// Servers that wait for use.
    pub standby: Vec<String>,
    /// A program that starts servers.
    pub command: CommandConfig,
    /// A program that is given each event, as JSON.
    pub notify: Vec<String>,
}

impl Default for AutoscaleConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Off,
            knobs: Knobs::default(),
            local: LocalConfig::default(),
            standby: Vec::new(),
            command: CommandConfig::default(),
            notify: Vec::new(),
        }
    }
}

/// Servers that are started on the router's own machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalConfig {
    /// The command line; `{port}` and `{dir}` stand for the server's port and directory. Empty: none are started.
    pub command: Vec<String>,
    /// Ports that it may use: the first and the last.
    pub ports: (u16, u16),
    /// Folder of the servers' directories. `None`: [`default_directory`].
    pub directory: Option<PathBuf>,
}

impl Default for LocalConfig {
    fn default() -> Self {
        Self { command: Vec::new(), ports: (7101, 7199), directory: None }
    }
}

/// A program that starts and stops servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandConfig {
    /// Its command line. Empty: there is none.
    pub run: Vec<String>,
    /// The longest that it may take.
    pub timeout: Duration,
}

impl Default for CommandConfig {
    fn default() -> Self {
        Self { run: Vec::new(), timeout: Duration::from_secs(300) }
    }
}

impl AutoscaleConfig {
    /// The way in which servers come, if there is one.
    ///
    /// # Errors
    /// If there is more than one.
    pub fn provisioner(&self) -> Result<Option<Way>, String> {
        let ways = [
            (Way::Local, !self.local.command.is_empty()),
            (Way::Standby, !self.standby.is_empty()),
            (Way::Command, !self.command.run.is_empty()),
        ];
        let given: Vec<Way> = ways.into_iter().filter(|(_, is_given)| *is_given).map(|(way, _)| way).collect();
        match given.as_slice() {
            [] => Ok(None),
            [way] => Ok(Some(*way)),
            several => Err(format!(
                "servers are started in one way, and here are {}: keep one of [autoscale.{}]",
                several.len(),
                several.iter().map(|way| way.name()).collect::<Vec<_>>().join("], [autoscale.")
            )),
        }
    }

    /// The way for a new server.
    fn way(&self) -> Result<Way, String> {
        self.provisioner()?.ok_or_else(|| {
            "no provisioner is configured: add [autoscale.local], [autoscale.standby] or [autoscale.command] (docs/autoscaling.md)"
                .to_owned()
        })
    }

    /// Makes a provisioner, also one that the configuration names no longer: it may have servers to stop. `site`:
    /// distinguishes this router from others.
    fn provision(&self, way: Way, state: &Path, site: &str) -> Result<Box<dyn Provisioner>, String> {
        match way {
            Way::Local => Ok(Box::new(local::Local::new(self.local.clone(), state))),
            Way::Standby => Ok(Box::new(Standby(
                self.standby.iter().map(|server| parse_endpoint(server)).collect::<Result<_, _>>()?,
            ))),
            Way::Command => Ok(Box::new(command::Program::new(self.command.clone(), site.to_owned()))),
        }
    }
}

/// The place of a new server: on record before anything is started.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chosen {
    address: String,
    /// Directory of a local server.
    home: Option<PathBuf>,
    /// Machine of a local server.
    host: Option<String>,
}

/// The process of a server that was started, as far as the provisioner sees processes.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Process {
    /// Running, and listening at the recorded port.
    Listens,
    /// Running, without a listener at its port.
    Silent,
    /// Ended, without a listener at its port.
    Ended,
    /// Description of the foreign process at its port.
    Foreign(String),
    /// Started on another machine, which alone sees its process.
    OtherHost,
    /// The provisioner does not see processes.
    Unknown,
}

/// Returns the lines of configuration that make the server at an address accept the router's credentials.
type Settings<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// Starts and stops servers. Each call may be made again after a restart, with the same result.
trait Provisioner {
    /// Chooses the place of the server of this number, if there is a choice. `taken`: addresses in use.
    ///
    /// # Errors
    /// If none is left.
    fn choose(&self, number: u64, taken: &BTreeSet<String>) -> Result<Option<Chosen>, String>;

    /// Starts the server of this number, or finds it. Returns its address.
    ///
    /// # Errors
    /// If it cannot be started. The next call tries again.
    fn start(&self, number: u64, chosen: Option<(&str, &Started)>, settings: Settings<'_>) -> Result<String, String>;

    /// The state of a server's process.
    fn process(&self, _started: &Started, _address: &str) -> Process {
        Process::Unknown
    }

    /// This machine, if servers are processes on it.
    fn host(&self) -> Option<String> {
        None
    }

    /// Stops a server, and removes its directory. Returns a note for the history, if there is one.
    ///
    /// # Errors
    /// If it is not known to have stopped. The next call needs a proof of its own.
    fn stop(&self, _started: &Started, _address: &str, _proof: Proof) -> Result<Option<String>, String> {
        Ok(None)
    }

    /// Starts a server again that should run and does not. `None`: all is well, or it is not this provisioner's
    /// business.
    fn revive(&self, _started: &Started, _address: &str, _settings: Settings<'_>) -> Option<Result<(), String>> {
        None
    }
}

/// Servers that run already and wait for use.
struct Standby(Vec<String>);

/// Without a `stop`: servers that run already are never stopped.
impl Provisioner for Standby {
    /// Each number begins at another server, so one that cannot join does not hinder the others.
    fn choose(&self, number: u64, taken: &BTreeSet<String>) -> Result<Option<Chosen>, String> {
        let first = number as usize % self.0.len().max(1);
        let free = self.0.iter().cycle().skip(first).take(self.0.len()).find(|server| !taken.contains(*server));
        free.map(|server| Some(Chosen { address: server.clone(), home: None, host: None }))
            .ok_or_else(|| format!("all {} servers of [autoscale.standby] are in use", self.0.len()))
    }

    fn start(&self, _number: u64, chosen: Option<(&str, &Started)>, _settings: Settings<'_>) -> Result<String, String> {
        chosen.map(|(address, _)| address.to_owned()).ok_or_else(|| "no standby server was chosen".to_owned())
    }
}
