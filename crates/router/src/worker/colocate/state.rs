//! Wait of a client until the keys of its command are at one node.

use std::sync::Arc;

/// Wait of a command for its keys.
#[derive(Debug)]
pub(in crate::worker) struct ColocateWait {
    /// Command number within its client.
    pub(super) number: u32,
    pub(super) since_us: u64,
    /// Exists while the command waits: its keys stay where they are when they are together.
    pub(super) wait: Arc<()>,
    /// A request is pending.
    pub(super) is_requested: bool,
    /// Reason for a refusal.
    pub(super) refusal: Option<Arc<str>>,
    /// Error for the client if the keys do not come together.
    pub(super) text: String,
}
