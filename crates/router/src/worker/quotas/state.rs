//! Accounts of a worker for limits.

use std::collections::HashMap;
use std::sync::Arc;

use crate::limits::{KeySlices, Part};

/// This worker's parts of the accounts.
#[derive(Debug, Default)]
pub(in crate::worker) struct Accounts {
    /// Parts of accounts by name.
    pub(super) parts: HashMap<String, Arc<Part>>,
    /// Parts of key limits, in their order.
    pub(super) of_prefixes: Vec<Arc<Part>>,
    /// Slices of rates of single keys.
    pub(super) of_keys: KeySlices,
}
