//! The command table as data: one row per command (or subcommand), with arity, flags, where its keys are, and who answers it.
//!
//! Rows live in `table.rs`; how keys are found from a row's key specification lives in `keys.rs`.
//! Arity, flags and key specifications are Redis's own (<https://redis.io/docs/latest/develop/reference/key-specs/>), and a test
//! holds them against `COMMAND` and `COMMAND GETKEYS` of a real server. `handling` is ours: what a switch in front of many servers does.

/// Properties of a command, as a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flags(pub u32);

impl Flags {
    /// May change data.
    pub const WRITE: Flags = Flags(1);
    /// Never changes data: it may be asked twice.
    pub const READONLY: Flags = Flags(1 << 1);
    /// Constant or logarithmic time at the node.
    pub const FAST: Flags = Flags(1 << 2);
    /// May wait at the node (BLPOP and relatives).
    pub const BLOCKING: Flags = Flags(1 << 3);
    /// An operator's command.
    pub const ADMIN: Flags = Flags(1 << 4);
    /// Concerns channels, not keys.
    pub const PUBSUB: Flags = Flags(1 << 5);
    /// Runs a script or a function.
    pub const SCRIPT: Flags = Flags(1 << 6);
    /// May take long at the node (KEYS, SORT, EVAL, set algebra): travels in the slow lane, so that it holds up no pipeline. Ours, not Redis's.
    pub const SLOW: Flags = Flags(1 << 7);
    /// Allowed before authentication.
    pub const NO_AUTH: Flags = Flags(1 << 8);
    /// Key positions cannot be given as one (first, last, step) triple.
    pub const MOVABLE_KEYS: Flags = Flags(1 << 9);
    /// May use memory: refused by a node that is out of memory.
    pub const DENY_OOM: Flags = Flags(1 << 10);

    /// True where every bit of `other` is set.
    #[inline]
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets together.
    pub const fn and(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// How the replies of several nodes become one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Merge {
    /// Integers are added (DBSIZE, DEL).
    Sum,
    /// All should answer the same: the first error wins, else the first reply (FLUSHALL, SCRIPT LOAD).
    Same,
    /// Arrays are concatenated in node order (KEYS).
    Concat,
    /// Arrays of 0/1: 1 only where every node says 1 (SCRIPT EXISTS).
    AllOnes,
}

/// How a command on many keys is split over nodes and its replies put together again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// MGET: values come back in the order asked.
    Values,
    /// MSET: key value pairs; every part must say OK.
    Pairs,
    /// DEL, UNLINK, EXISTS, TOUCH: integers are added.
    Count,
}

/// Commands that the router answers by itself, or by a procedure of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // the names are the commands' names
pub enum Local {
    Ping,
    Echo,
    Time,
    Select,
    Hello,
    Auth,
    Quit,
    Reset,
    ClientId,
    ClientGetname,
    ClientSetname,
    ClientSetinfo,
    ClientList,
    ClientInfo,
    ClientKill,
    ClientReply,
    ClientNoEvict,
    ClientNoTouch,
    ClientHelp,
    Info,
    Role,
    ConfigGet,
    ConfigResetstat,
    Scan,
    RandomKey,
    SlowlogGet,
    Script,
    Lolwut,
    Switchyard,
}

/// Who answers a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// Forwarded to the owner of its keys, which must share a slot. A form without any key (EVAL with `numkeys` 0) goes to any node.
    Keyed,
    /// Split over the owners of its keys.
    Split(Split),
    /// Sent to every node; the replies are merged.
    Every(Merge),
    /// Any one node that is up can answer (COMMAND DOCS).
    Any,
    /// The router answers.
    Local(Local),
    /// Not there yet; the text names the feature ("transactions").
    Later(&'static str),
    /// Refused for a reason, which is the text.
    Refused(&'static str),
}
