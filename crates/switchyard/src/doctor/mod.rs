//! What a person on call wants to know of the nodes before clients find it out: `switchyard doctor`, and the same look
//! at start.
//!
//! `look` asks, `checks` judges. So every judgement is a function of answers, and is tested without servers.

mod application;
mod checks;
mod look;

pub(crate) use application::examine_commands;
pub(crate) use checks::examine;
pub(crate) use look::look;

use serde::Serialize;
use switchyard_control::nodes::{DirectClient, Functions};

/// How bad something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Level {
    /// It should be known.
    Note,
    /// It will hurt one day.
    Warning,
    /// It hurts: commands fail, or data is at risk.
    Error,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Finding {
    pub(crate) level: Level,
    /// The node; `None`: it concerns several.
    pub(crate) node: Option<String>,
    /// What was looked at, in a word.
    pub(crate) check: &'static str,
    pub(crate) found: String,
    /// What to do.
    pub(crate) advice: String,
}

/// What is asked of the nodes as the configuration has it.
#[derive(Clone, Debug)]
pub(crate) struct Needs {
    /// Connections that the router keeps to a node, at least and at most.
    pub(crate) connections: (usize, usize),
    /// Largest argument that clients may send.
    pub(crate) argument_max: usize,
    /// Whether libraries of functions are to have the router's check.
    pub(crate) check_scripts: bool,
    /// Whether hot copies answer.
    pub(crate) hot_copies: bool,
}

/// What a node said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) name: String,
    pub(crate) loopback: bool,
    pub(crate) authenticates: bool,
    /// For a replica: the primary that it should follow.
    pub(crate) replica_of: Option<std::net::SocketAddr>,
    /// Why nothing else is known.
    pub(crate) failure: Option<String>,
    /// Fields of INFO.
    pub(crate) info: std::collections::BTreeMap<String, String>,
    /// Settings, where CONFIG GET is allowed.
    pub(crate) config: std::collections::BTreeMap<String, String>,
    pub(crate) config_error: Option<String>,
    /// Its clock minus ours, and how long the question took, ms.
    pub(crate) clock: Option<(i64, i64)>,
    /// Commands that it does not have by these names.
    pub(crate) missing: Vec<String>,
    /// Commands that our user may not use, with the error.
    pub(crate) refused: Vec<(String, String)>,
    /// Libraries of functions, by name; `None`: it does not say.
    pub(crate) functions: Option<Functions>,
    pub(crate) modules: Vec<String>,
    /// Clients that use its keys past the router.
    pub(crate) direct: Vec<DirectClient>,
    /// Routers that are connected to it, each by what names its state directory there.
    pub(crate) routers: std::collections::BTreeSet<String>,
}
