//! All decisions of Switchyard as pure code: no sockets, clock, threads, or random source.
//!
//! The router and the simulator run the same functions and differ only in the source of events.

pub mod autoscale;
pub mod balance;
pub mod cluster;
pub mod colocate;
pub mod data_loss;
pub mod eject;
pub mod failover;
pub mod hot_copies;
mod injected;
pub mod limits;
pub mod load;
pub mod migration;
pub mod ownership;
pub mod planner;
pub mod routing;
pub mod scan;
pub mod script_keys;
pub mod telemetry;
pub mod together;
pub mod topology;
pub mod twemproxy;
pub mod wait_queue;
