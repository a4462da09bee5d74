//! Threads of the planner, of the list of servers and of the placement rules, separate so that an error in planning does
//! not prevent keys from following a new list or new rules.

use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::Context;
use switchyard_router::{Repeating, Threads};

use crate::operator::Operator;

/// Name of the planner's thread.
pub(crate) const PLANNER: &str = "planner";

/// The running threads. Dropping it ends them.
#[derive(Debug)]
pub struct PlannerThread {
    _planner: Repeating,
    _list: Repeating,
    _rules: Repeating,
}

impl PlannerThread {
    /// Starts the threads.
    ///
    /// # Errors
    /// If no thread can be started.
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
            _rules: repeat("placement-rules", Operator::follow_rules)?,
            _planner: repeat(PLANNER, Operator::plan_step)?,
        })
    }
}
