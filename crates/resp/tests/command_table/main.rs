//! The command table, held against real servers.

mod keys;
mod rows;
mod server;
