//! The autoscaler's thread. Starting a server may take minutes, so it is not the planner's.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use switchyard_router::{Repeating, Threads};

use crate::operator::Operator;

/// The time between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub struct AutoscaleThread {
    _thread: Repeating,
}

impl AutoscaleThread {
    /// Starts it.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(threads: &Threads, operator: Arc<Operator>) -> anyhow::Result<Self> {
        let body = move || {
            // A step that is done leads to the next one at once: a node with too much to do waits for all of them.
            while operator.look_and_scale() {}
            ControlFlow::Continue(())
        };
        let thread = threads.repeat("autoscaler", || INTERVAL, body).context("cannot start a thread")?;
        Ok(Self { _thread: thread })
    }
}
