//! Kinds of connections of a worker to a node, also named in messages between workers.

/// Lanes: the kinds of connections of a worker to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Lane {
    /// Pipelined, shared by all clients.
    Main,
    /// Like `Main`, for commands that may take long.
    Slow,
    /// Exclusive, for large values.
    Large,
    /// No connection: the lane of a client during a command of several steps, so that none of its other commands is
    /// sent.
    Rounds,
    /// Exclusive, from WATCH to EXEC. Also for transactions while the shared connection is down.
    Watch,
    /// Exclusive, for a blocking command.
    Blocking,
    /// Reads from a replica: pipelined, shared by all clients.
    Replica,
    /// Fills of hot copies. The node reports changes of keys read here.
    Fills,
    /// Only subscriptions. For a client: its commands in flight change subscriptions.
    Pubsub,
}

impl Lane {
    /// Index of the pool of exclusive connections. `None` for shared lanes.
    #[inline]
    pub(crate) fn pool(self) -> Option<usize> {
        match self {
            Lane::Main | Lane::Slow | Lane::Rounds | Lane::Pubsub | Lane::Replica | Lane::Fills => None,
            Lane::Large => Some(0),
            Lane::Watch => Some(1),
            Lane::Blocking => Some(2),
        }
    }

    /// Whether connections of this lane are exclusive.
    #[inline]
    pub(crate) fn is_exclusive(self) -> bool {
        self.pool().is_some()
    }
}
