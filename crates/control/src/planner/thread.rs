//! The thread that has the planner look at the load again and again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};

use anyhow::Context;
use tracing::error;

use crate::operator::Operator;

/// The running thread; it ends when this is dropped.
#[derive(Debug)]
pub struct PlannerThread {
    _stop: mpsc::Sender<()>,
}

impl PlannerThread {
    /// Starts it.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(operator: Arc<Operator>) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel::<()>();
        let run = move || {
            while matches!(stopped.recv_timeout(operator.planner_interval()), Err(RecvTimeoutError::Timeout)) {
                // Keys follow a new list of servers before anything else is planned.
                operator.follow_list();
                // Its moves are exact whatever it decides, so an error in deciding is no reason to stop serving.
                if catch_unwind(AssertUnwindSafe(|| operator.look_and_plan())).is_err() {
                    error!("the planner met an error of its own, and rests until the router is started anew: please report it");
                    operator.planner_has_failed();
                }
            }
        };
        std::thread::Builder::new().name("planner".to_owned()).spawn(run).context("cannot start a thread")?;
        Ok(Self { _stop: stop })
    }
}
