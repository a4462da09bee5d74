//! `switchyard doctor`: finds problems of the nodes before clients meet them. The same checks run at the start.
//!
//! `look` queries, `checks` evaluates. Checks are functions of replies, so tests need no servers.

mod application;
mod checks;
mod cluster;
mod look;

pub(crate) use application::examine_commands;
pub(crate) use checks::examine;
pub(crate) use cluster::examine_cluster;
pub(crate) use look::look;

use serde::Serialize;
use switchyard_control::nodes::{DirectClient, Functions};

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// Information only.
    Note,
    /// A problem in the future.
    Warning,
    /// A problem now: commands fail, or data is at risk.
    Error,
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// The node. `None` if the finding concerns several.
    pub(crate) node: Option<String>,
    /// Name of the check, in one word.
    pub(crate) check: &'static str,
    pub(crate) found: String,
    /// Recommended action.
    pub(crate) advice: String,
}

/// Requirements of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Minimum and maximum number of connections from the router to a node.
    pub(crate) connections: (usize, usize),
    /// Largest argument that clients may send.
    pub(crate) argument_max: usize,
    /// Whether the router adds its check to function libraries.
    pub(crate) check_scripts: bool,
    /// Whether hot copies are enabled.
    pub(crate) hot_copies: bool,
}

/// Data collected from a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeFacts {
    pub(crate) name: String,
    pub(crate) loopback: bool,
    pub(crate) authenticates: bool,
    /// For a replica: its expected primary.
    pub(crate) replica_of: Option<std::net::SocketAddr>,
    /// Error that prevented the queries.
    pub(crate) failure: Option<String>,
    /// Fields of INFO.
    pub(crate) info: std::collections::BTreeMap<String, String>,
    /// Settings, if CONFIG GET is allowed.
    pub(crate) config: std::collections::BTreeMap<String, String>,
    pub(crate) config_error: Option<String>,
    /// Clock of the node minus ours, and duration of the query, both in milliseconds.
    pub(crate) clock: Option<(i64, i64)>,
    /// Commands that the node does not have under these names.
    pub(crate) missing: Vec<String>,
    /// Commands that our user may not run, with the error.
    pub(crate) refused: Vec<(String, String)>,
    /// Function libraries by name. `None` if the node did not report them.
    pub(crate) functions: Option<Functions>,
    pub(crate) modules: Vec<String>,
    /// Clients that bypass the router.
    pub(crate) direct: Vec<DirectClient>,
    /// Routers connected to the node, each by the identifier of its state directory.
    pub(crate) routers: std::collections::BTreeSet<String>,
}
