//! The command table, held against real servers.

mod keys;
mod page;
mod rows;
mod server;
