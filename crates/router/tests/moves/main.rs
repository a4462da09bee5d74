//! Moves of a router between real servers, with a host that keeps everything in memory: what clients see while keys
//! change servers.
//!
//! Beside the end-to-end tests, because here a test can look into the journal and hold things up where it wants.

mod big;
mod clients;
mod colocate;
mod double_read;
mod durability;
mod faults;
mod fleet;
mod functions;
mod moments;
mod precopy;
mod primaries;
mod published;
mod relay;
mod seam;
mod serving;
mod several;
mod versions;
mod waiting;
