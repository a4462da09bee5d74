//! Compares the command table with real servers.

mod absent;
mod globs;
mod keys;
mod page;
mod rows;
mod server;
