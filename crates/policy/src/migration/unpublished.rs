//! The module `published` of a build without the feature `research`. Its types have no values, so a
//! move as published cannot exist, and the compiler removes the code that would serve one.
//!
//! Types without values rather than conditional fields and match arms, because routing, movers and orders refer to a
//! published protocol in many places.

use super::record::OpenLeg;
use super::tracker::{State, Tracker};
use super::{Fingerprint, Fingerprinter, LegOrder, Machine, Protocol};
use crate::topology::MoveId;

pub use super::view::Way;

/// Settings of a published protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Paper {}

impl Paper {
    /// Returns the routing rules of a move.
    #[must_use]
    pub const fn rules(&self, _protocol: Protocol, _move_id: MoveId) -> Rules {
        match *self {}
    }

    /// Creates an empty tracker.
    #[must_use]
    pub fn tracker(&self) -> Box<dyn Tracker> {
        match *self {}
    }

    /// Creates the machine of a leg.
    pub(super) fn machine(
        &self,
        _protocol: Protocol,
        _orders: LegOrder,
        _fingerprints: Fingerprinter,
        _resume: Option<&OpenLeg>,
    ) -> Box<dyn Machine> {
        match *self {}
    }
}

/// Routing rules of a published protocol.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rules {}

impl Rules {
    /// Whether errors found in the tracker are corrected.
    #[must_use]
    pub const fn repairs(&self) -> bool {
        match *self {}
    }

    /// Returns the group of a key.
    #[must_use]
    pub fn group(&self, _key: Fingerprint) -> Fingerprint {
        match *self {}
    }

    /// Returns n: the router fetches the key of each n-th double read. 0: of none.
    #[must_use]
    pub const fn fetches_one_in(&self) -> u32 {
        match *self {}
    }

    /// Returns the destination of a command for a key of a group.
    #[must_use]
    pub const fn route(&self, _state: State, _writes: bool) -> Way {
        match *self {}
    }
}
