//! The planner's thread, and the one that makes keys follow a new list of servers. Two, so that an error in planning
//! does not stop a list from being followed.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::Context;
use switchyard_router::{Repeating, Threads};

use crate::operator::Operator;

/// Name of the planner's thread.
pub(crate) const PLANNER: &str = "planner";

/// The running threads; they end when this is dropped.
#[derive(Debug)]
pub struct PlannerThread {
    _planner: Repeating,
    _list: Repeating,
}

impl PlannerThread {
    /// Starts them.
    ///
    /// # Errors
    /// If the system has no thread.
    pub fn start(threads: &Threads, operator: &Arc<Operator>) -> anyhow::Result<Self> {
        let repeat = |name, look: fn(&Operator)| {
            let (paced, operator) = (Arc::clone(operator), Arc::clone(operator));
            let body = move || {
                look(&operator);
                ControlFlow::Continue(())
            };
            threads.repeat(name, move || paced.planner_interval(), body).context("cannot start a thread")
        };
        Ok(Self {
            _list: repeat("server-list", Operator::follow_list)?,
            _planner: repeat(PLANNER, Operator::look_and_plan)?,
        })
    }
}
