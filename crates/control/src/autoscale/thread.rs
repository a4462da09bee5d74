//! Thread of the autoscaler. Separate from the planner's, because starting a server may take minutes.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use switchyard_router::{Repeating, Threads};

use crate::operator::Operator;

/// Interval between steps.
const INTERVAL: Duration = Duration::from_millis(500);

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct AutoscaleThread {
    _thread: Repeating,
}

impl AutoscaleThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(threads: &Threads, operator: Arc<Operator>) -> anyhow::Result<Self> {
        let body = move || {
            // Take the next step at once after a completed one, because an overloaded node waits for the whole change.
            while operator.scale_step() {}
            ControlFlow::Continue(())
        };
        let thread = threads.repeat("autoscaler", || INTERVAL, body).context("cannot start a thread")?;
        Ok(Self { _thread: thread })
    }
}
