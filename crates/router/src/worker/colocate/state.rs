//! Wait of a client for the return of keys to their slot owner.

use std::sync::Arc;

/// Wait of a command for the return of keys.
#[derive(Debug)]
pub(in crate::worker) struct ColocateWait {
    /// Command number within its client.
    pub(super) number: u32,
    pub(super) since_us: u64,
    /// A request is pending.
    pub(super) is_requested: bool,
    /// Reason for a refusal.
    pub(super) refusal: Option<Arc<str>>,
    /// Error for the client if the keys do not return.
    pub(super) text: String,
}
