//! The control plane: what is remembered between runs, and what people and their tools talk to.
//!
//! - [`store`]: the state directory.
//! - [`journal`]: what moves make durable, and [`ledger`]: what it says.
//! - [`admin`]: metrics, health and status over HTTP.
//!
//! It never sees the router: both speak the types of `switchyard_policy`, and the binary connects them (through
//! [`admin::Source`], for one). So neither can reach into the other while a move is under way.

pub mod admin;
pub mod journal;
pub mod ledger;
pub mod store;

/// The version of this program, as errors and the state directory name it.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
