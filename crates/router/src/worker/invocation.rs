//! A command of a client while the worker dispatches it.

use std::sync::Arc;

use switchyard_resp::command::Command;
use switchyard_resp::request::Args;

use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// A complete command of a client, and the snapshot for its execution.
#[derive(Clone, Copy)]
pub(super) struct Invocation<'a> {
    pub(super) routing: &'a Arc<RoutingSnapshot>,
    pub(super) handle: Handle,
    pub(super) command: &'a Command,
    /// Bytes of the command, for forwarding.
    pub(super) raw: &'a [u8],
    pub(super) args: &'a Args<'a>,
}

impl Invocation<'_> {
    /// Class of the command, for counters.
    #[inline]
    pub(super) fn class(&self) -> u8 {
        self.command.class() as u8
    }
}
