//! Every decision that Switchyard takes, as pure code: no sockets, no clock, no threads, no random source of its own.
//!
//! Router and simulator run the same functions; what they differ in is who supplies the events.

pub mod autoscale;
pub mod balance;
pub mod colocate;
pub mod eject;
pub mod empty_return;
pub mod failover;
pub mod hot_copies;
pub mod limits;
pub mod load;
pub mod migration;
pub mod planner;
mod planted;
pub mod routing;
pub mod scan;
pub mod seat;
pub mod telemetry;
pub mod topology;
pub mod twemproxy;
pub mod wait_queue;
