//! Moves of a router between real servers, with a host that keeps everything in memory: behaviour seen by clients while
//! keys change servers.
//!
//! Separate from the end-to-end tests, because these tests read the journal and delay operations at chosen points.

mod big;
mod clients;
mod colocate;
mod command_hook;
mod double_read;
mod durability;
mod faults;
mod fleet;
mod functions;
mod moments;
#[path = "../../../../tests/ports.rs"]
mod ports;
mod precopy;
mod primaries;
#[cfg(feature = "research")]
mod published;
mod relay;
mod serving;
mod several;
mod versions;
mod waiting;
