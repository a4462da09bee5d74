//! A tap: an observer of every command with keys that is sent to a node, and of its outcome.
//!
//! Tests compare it with the commands executed by nodes. Without a tap, commands do no extra work.

use switchyard_policy::topology::NodeId;

/// A command with keys that is passed to a connection. No byte of it has been sent yet.
#[derive(Debug)]
pub struct SentCommand<'a> {
    /// Worker, and command number within this worker.
    pub number: (usize, u64),
    /// Destination node. The command may be read at a replica of it.
    pub node: NodeId,
    /// Database in which the command is executed.
    pub database: u32,
    /// Upper case; a subcommand with its container (`OBJECT|ENCODING`).
    pub command: &'a str,
    /// Keys as the node receives them, in the order of the arguments.
    pub keys: &'a [&'a [u8]],
    /// Whether the command may change any of them.
    pub writes: bool,
}

/// Outcome of a request that was passed to a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The node has replied, so its effect is final.
    Certain,
    /// The node never received all of it, so it has no effect.
    Never,
    /// The connection was lost. The node may execute the request until it confirms that the connection is dead.
    Doubtful,
}

/// Observer for [`Router::tap`](crate::Router::tap). Called by workers, so it must be fast.
pub trait Tap: Send + Sync {
    /// Called when a command is passed to a connection.
    fn sent(&self, command: &SentCommand<'_>);
    /// Called once per command, with its outcome.
    fn ended(&self, number: (usize, u64), outcome: Outcome);
}
