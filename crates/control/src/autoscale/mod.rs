//! Adjusts the number of nodes to the load: the target number is stored, and a loop closes the gap.
//!
//! [`switchyard_policy::autoscale`] decides, and a [`Provisioner`] starts and stops servers. Nodes join, drain and
//! leave through the operators' commands, with the same checks. This module executes the change in progress, which is
//! recorded before each step. So the router may be killed at any point: the loop resumes at the recorded step, and each
//! step first checks whether it is already done.
//!
//! There is one change at a time, with a number that is never reused. The number identifies the started server, so that
//! it is found after a restart and not started twice.

mod actions;
mod command;
mod history;
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
pub(crate) use intent::{Event, StartedServer};
pub use local::{default_directory, former_directory};
pub(crate) use messages::reason_text;
pub(crate) use reconcile::{Autoscaler, Autoscaling, is_same};
use removal::Proof;
pub use removal::kept_directories;
pub(crate) use removal::{Evidence, Inspected};
pub use thread::AutoscaleThread;

/// All policies, with their names in the configuration.
pub const POLICIES: [(Policy, &str); 5] = [
    (Policy::Threshold, "threshold"),
    (Policy::Static, "static"),
    (Policy::Model, "model"),
    (Policy::Learned, "learned"),
    (Policy::Predictive, "predictive"),
];

/// Kind of provisioner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProvisionerKind {
    /// Processes on the router's machine.
    Local,
    /// Running servers that wait for use.
    Standby,
    /// Servers started by a program.
    Command,
}

impl ProvisionerKind {
    /// Name in the configuration.
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
    /// Whether the autoscaler acts.
    pub mode: Mode,
    /// Settings of the policy.
    pub knobs: Knobs,
    /// Settings of local servers.
    pub local: LocalConfig,
    /// Addresses of standby servers.
    pub standby: Vec<String>,
    /// Program that starts servers.
    pub command: CommandConfig,
    /// Command line that receives each event as JSON.
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

/// Servers on the router's own machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalConfig {
    /// Command line, with `{port}` and `{dir}` for the server's port and directory. Empty: no local servers.
    pub command: Vec<String>,
    /// First and last usable port.
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
    /// Command line. Empty: no program.
    pub run: Vec<String>,
    /// Maximum run time.
    pub timeout: Duration,
}

impl Default for CommandConfig {
    fn default() -> Self {
        Self { run: Vec::new(), timeout: Duration::from_secs(300) }
    }
}

impl AutoscaleConfig {
    /// Configured kind of provisioner, if any.
    ///
    /// # Errors
    /// If several kinds are configured.
    pub fn provisioner(&self) -> Result<Option<ProvisionerKind>, String> {
        let ways = [
            (ProvisionerKind::Local, !self.local.command.is_empty()),
            (ProvisionerKind::Standby, !self.standby.is_empty()),
            (ProvisionerKind::Command, !self.command.run.is_empty()),
        ];
        let given: Vec<ProvisionerKind> =
            ways.into_iter().filter(|(_, is_given)| *is_given).map(|(way, _)| way).collect();
        match given.as_slice() {
            [] => Ok(None),
            [way] => Ok(Some(*way)),
            several => Err(format!(
                "{} provisioners are configured, but only one is allowed: keep one of [autoscale.{}]",
                several.len(),
                several.iter().map(|way| way.name()).collect::<Vec<_>>().join("], [autoscale.")
            )),
        }
    }

    /// Kind of provisioner for a new server.
    fn configured_provisioner(&self) -> Result<ProvisionerKind, String> {
        self.provisioner()?.ok_or_else(|| {
            "no provisioner is configured: add [autoscale.local], [autoscale.standby] or [autoscale.command] (docs/autoscaling.md)"
                .to_owned()
        })
    }

    /// Creates a provisioner, even one that is no longer configured: it may have servers to stop. `site` distinguishes
    /// this router from others.
    fn provision(&self, way: ProvisionerKind, state: &Path, site: &str) -> Result<Box<dyn Provisioner>, String> {
        match way {
            ProvisionerKind::Local => Ok(Box::new(local::Local::new(self.local.clone(), state))),
            ProvisionerKind::Standby => Ok(Box::new(Standby(
                self.standby.iter().map(|server| parse_endpoint(server)).collect::<Result<_, _>>()?,
            ))),
            ProvisionerKind::Command => Ok(Box::new(command::Program::new(self.command.clone(), site.to_owned()))),
        }
    }
}

/// Location of a new server, recorded before the start.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ServerLocation {
    address: String,
    /// Directory of a local server.
    home: Option<PathBuf>,
    /// Machine of a local server.
    host: Option<String>,
}

/// Process of a started server, as far as the provisioner can observe it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Process {
    /// Running, and listening at the recorded port.
    Listens,
    /// Running, without a listener at its port.
    NotListening,
    /// Ended, without a listener at its port.
    Ended,
    /// Description of the foreign process at its port.
    Foreign(String),
    /// Started on another machine, so not observable here.
    OtherHost,
    /// The provisioner cannot observe processes.
    Unknown,
}

/// Function of a server's address. Returns configuration lines with the router's credentials.
type ServerSettings<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// Starts and stops servers. A call that a restart interrupted may be repeated.
trait Provisioner {
    /// Chooses the location of a server, if there is a choice. `taken`: addresses in use.
    ///
    /// # Errors
    /// If no location is left.
    fn choose(&self, number: u64, taken: &BTreeSet<String>) -> Result<Option<ServerLocation>, String>;

    /// Starts the server with this number, or finds it running. Returns its address.
    ///
    /// # Errors
    /// If it cannot be started. The next call tries again.
    fn start(
        &self,
        number: u64,
        chosen: Option<(&str, &StartedServer)>,
        settings: ServerSettings<'_>,
    ) -> Result<String, String>;

    /// State of a server's process.
    fn process(&self, _started: &StartedServer, _address: &str) -> Process {
        Process::Unknown
    }

    /// Identifier of this machine, if servers are local processes.
    fn host(&self) -> Option<String> {
        None
    }

    /// Stops a server, and removes its directory. Returns a note for the history, if any.
    ///
    /// # Errors
    /// Unless the server has certainly stopped. The next call needs a new proof.
    fn stop(&self, _started: &StartedServer, _address: &str, _proof: Proof) -> Result<Option<String>, String> {
        Ok(None)
    }

    /// Restarts a server that should run but has ended. `None`: it runs, or this provisioner does not manage it.
    fn revive(
        &self,
        _started: &StartedServer,
        _address: &str,
        _settings: ServerSettings<'_>,
    ) -> Option<Result<(), String>> {
        None
    }
}

/// Running servers that wait for use.
struct Standby(Vec<String>);

/// Has no `stop`, because these servers are never stopped.
impl Provisioner for Standby {
    /// Starts the search at a different server for each number, so that one that cannot join does not block the others.
    fn choose(&self, number: u64, taken: &BTreeSet<String>) -> Result<Option<ServerLocation>, String> {
        let first = number as usize % self.0.len().max(1);
        let free = self.0.iter().cycle().skip(first).take(self.0.len()).find(|server| !taken.contains(*server));
        free.map(|server| Some(ServerLocation { address: server.clone(), home: None, host: None }))
            .ok_or_else(|| format!("all {} servers of [autoscale.standby] are in use", self.0.len()))
    }

    fn start(
        &self,
        _number: u64,
        chosen: Option<(&str, &StartedServer)>,
        _settings: ServerSettings<'_>,
    ) -> Result<String, String> {
        chosen.map(|(address, _)| address.to_owned()).ok_or_else(|| "no standby server was chosen".to_owned())
    }
}
