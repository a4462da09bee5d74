//! The module `published` of a build without the feature `research`: refuses requests for protocols
//! that lose keys, and stored moves that use one.

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::MoveOptions;
use switchyard_policy::migration::published::Paper;

use super::messages::NO_RESEARCH;
use crate::admin::{MoveOptionsRequest, OperationError, invalid};

/// Fails if the request contains options of a published protocol, or permits the loss of keys.
pub(super) fn paper(request: &MoveOptionsRequest, _how: &MoveOptions) -> Result<Option<Paper>, OperationError> {
    if request.paper.is_some() || request.allow_key_loss {
        return Err(invalid(NO_RESEARCH));
    }
    Ok(None)
}

/// Refuses a limit of the source: it is a policy of published protocols.
pub(crate) fn source_ops_max(_text: &str, _capacity: Option<u64>) -> Result<u32, OperationError> {
    Err(invalid(NO_RESEARCH))
}

/// Refuses a limit of the source.
pub(super) fn check_source_ops(_how: &MoveOptions) -> Result<(), OperationError> {
    Err(invalid(NO_RESEARCH))
}

/// Stored options of a published protocol. Reads all fields of the other build and ignores them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PaperOptions {}

impl PaperOptions {
    pub(super) fn of(paper: Paper) -> Self {
        match paper {}
    }

    pub(super) fn paper(&self) -> Result<Paper, &'static str> {
        Err(NO_RESEARCH)
    }
}
