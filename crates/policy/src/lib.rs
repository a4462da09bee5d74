//! All decisions of Switchyard as pure code: no sockets, clock, threads, or random source.
//!
//! The router and the simulator run the same functions and differ only in the source of events.

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
