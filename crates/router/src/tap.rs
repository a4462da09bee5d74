//! A tap: whoever wants to see every command with keys that goes to a node, and how it ended.
//!
//! Tests compare what a tap saw with what nodes say that they executed. Where nobody listens a command does not notice.

use std::fmt::Debug;

use switchyard_policy::topology::NodeId;

/// A command with keys that is handed to a connection to a node. None of its bytes has been sent yet.
#[derive(Debug)]
pub struct SentCommand<'a> {
    /// The worker that sends it, and the number that it gave it.
    pub number: (usize, u64),
    /// Where it goes. It may be read at a replica of this node.
    pub node: NodeId,
    /// The database that it is executed in.
    pub database: u32,
    /// Upper case; a subcommand with its container (`OBJECT|ENCODING`).
    pub command: &'a str,
    /// The keys, as the node will see them, in the order of the arguments.
    pub keys: &'a [&'a [u8]],
    /// Whether it may change any of them.
    pub writes: bool,
}

/// How a request ended that was handed to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The node has answered: what it has done is done.
    Certain,
    /// The node never had all of it, so it never does anything.
    Never,
    /// Its connection was lost. The node may execute it until it has confirmed that the connection is dead.
    Doubtful,
}

/// See [`Router::tap`](crate::Router::tap). Called by the workers themselves, so it must be quick.
pub trait Tap: Debug + Send + Sync {
    /// A command is handed to a connection.
    fn sent(&self, command: &SentCommand<'_>);
    /// What became of the command of this number. Once for each.
    fn ended(&self, number: (usize, u64), outcome: Outcome);
}
