//! Both sides of a worker: its connections to nodes, and its clients.
//!
//! The only type that reaches both, besides the worker. A function that needs one side takes that side. A feature keeps
//! its own state, and takes this as an argument; so no feature can change another feature.

use super::downstreams::Downstreams;
use super::keyed::CommandHooks;
use super::turn::Turn;
use super::upstreams::Upstreams;

#[derive(Debug)]
pub(super) struct Context {
    pub(super) turn: Turn,
    pub(super) up: Upstreams,
    pub(super) down: Downstreams,
    pub(super) hooks: CommandHooks,
}
