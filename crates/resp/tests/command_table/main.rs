//! The command table, held against real servers.

mod absent;
mod globs;
mod keys;
mod page;
mod rows;
mod server;
