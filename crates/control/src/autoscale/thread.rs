//! The thread that has the autoscaler look at the fleet again and again. Starting a server may take minutes, so it is not the planner's.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::Context;

use crate::operator::Operator;

/// The time between two looks.
const INTERVAL: Duration = Duration::from_millis(500);

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub struct AutoscaleThread {
    _stop: mpsc::Sender<()>,
}

impl AutoscaleThread {
    /// Starts it.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(operator: Arc<Operator>) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let run = move || {
            while matches!(stopped.recv_timeout(INTERVAL), Err(RecvTimeoutError::Timeout)) {
                // A step that is done leads to the next one at once: a node with too much to do waits for all of them.
                while operator.look_and_scale() {}
            }
        };
        std::thread::Builder::new().name("autoscaler".to_owned()).spawn(run).context("cannot start a thread")?;
        Ok(Self { _stop: stop })
    }
}
