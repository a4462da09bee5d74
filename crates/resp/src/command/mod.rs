//! The command table: one row per command or subcommand with arity, flags, key positions, and handling.
//!
//! - `table.rs` has the rows. To add a command, add a row.
//! - `lookup.rs` finds a row by the client's name for the command, for every request.
//! - `access.rs` has the properties for access rules: categories, read and write access.
//! - `keys.rs` finds the keys among a command's arguments.
//! - `learn.rs` adds commands of the nodes' modules, as `COMMAND` describes them.
//! - `touched.rs` finds the elements of a large value that a command may change.
//! - `errors.rs` has Redis's errors for whole commands.
//!
//! Arity, flags, and key positions are Redis's own (<https://redis.io/docs/latest/develop/reference/key-specs/>). A
//! test compares them with `COMMAND` and `COMMAND GETKEYS` of real servers. `handling` is specific to a switch for many
//! servers. If versions of Redis and Valkey differ, the row has the more permissive one, because the node validates its
//! own commands.

use std::borrow::Cow;

mod access;
pub mod errors;
mod keys;
mod learn;
mod lookup;
mod table;
mod touched;

pub use access::{Access, CATEGORIES, Categories};
pub use keys::{Begin, Find, KeyError, KeySpec, Keys, NumkeysError, StreamOptions, is_option, stream_options};
pub use learn::{LearntCommand, parse_command_reply};
pub use lookup::{CommandTable, Lookup};
pub use table::{covers, members_expire, why_not_covered};
pub use touched::Touched;

use crate::request::Args;

/// Properties of a command, as a bit set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flags(pub u32);

impl Flags {
    /// May change data. EVAL and FCALL have neither this nor [`Flags::READONLY`]; treat them as writes, because their
    /// effect is unknown.
    pub const WRITE: Flags = Flags(1);
    /// Never changes data: may be sent again.
    pub const READONLY: Flags = Flags(1 << 1);
    /// Constant or logarithmic time at the node.
    pub const FAST: Flags = Flags(1 << 2);
    /// May block at the node (BLPOP and similar).
    pub const BLOCKING: Flags = Flags(1 << 3);
    /// For operators.
    pub const ADMIN: Flags = Flags(1 << 4);
    /// Concerns channels, not keys.
    pub const PUBSUB: Flags = Flags(1 << 5);
    /// Runs a script or a function.
    pub const SCRIPT: Flags = Flags(1 << 6);
    /// May take long at the node (KEYS, SORT, EVAL, set algebra): uses the slow lane, so that it does not delay
    /// pipelines. Not a flag of Redis.
    pub const SLOW: Flags = Flags(1 << 7);
    /// Allowed before authentication.
    pub const NO_AUTH: Flags = Flags(1 << 8);
    /// The keys cannot be described by one (first, last, step) triple.
    pub const MOVABLE_KEYS: Flags = Flags(1 << 9);
    /// May use memory: rejected by a node that is out of memory.
    pub const DENY_OOM: Flags = Flags(1 << 10);

    /// Continues an earlier call by a cursor that only one server understands (HSCAN and similar). Not a flag of Redis.
    pub const CURSOR: Flags = Flags(1 << 11);

    /// Reads one key, with a reply that depends only on the key and its expiry, so that hot copies may store it.
    /// Excludes commands that are random or depend on time or metadata (RANDFIELD, TTL, OBJECT). Not a flag of Redis.
    pub const COPYABLE: Flags = Flags(1 << 12);

    /// Whether `self` includes all of `other`.
    #[inline]
    pub const fn has(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }

    /// Union of the sets.
    pub const fn and(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// Combination of replies from several nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Merge {
    /// Adds integers (DBSIZE, DEL).
    Sum,
    /// Minimum of integers (LASTSAVE).
    Least,
    /// Maps of numbers: adds counts, and computes ratios from the sums (MEMORY STATS).
    Figures,
    /// Texts, each under the name of its node (MEMORY DOCTOR).
    Texts,
    /// Equal replies: the first error wins, else the first reply (FLUSHALL, SCRIPT LOAD).
    Same,
    /// Concatenates arrays in node order (KEYS).
    Concat,
    /// Arrays of 0 or 1: 1 only if every node returns 1 (SCRIPT EXISTS).
    AllOnes,
    /// One success is sufficient: the first reply without error, else the first error (SCRIPT KILL, which fails at
    /// nodes without a running script).
    AnyOk,
}

/// Split of a command with many keys over nodes, and combination of the replies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// MGET: values in the order of the keys.
    Values,
    /// MSET: pairs of key and value; every part must return OK.
    Pairs,
    /// DEL, UNLINK, EXISTS, TOUCH: adds integers.
    Count,
}

/// Commands with an implementation in the router.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // named after the commands
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
    ClientCapa,
    ClientUnblock,
    Multi,
    Exec,
    Discard,
    Watch,
    Unwatch,
    Wait,
    AclWhoami,
    AclList,
    AclUsers,
    AclGetuser,
    AclCat,
    AclDryrun,
    /// SETUSER, DELUSER, SAVE, LOAD.
    AclChange,
    AclLog,
    AclGenpass,
    Info,
    Role,
    ConfigGet,
    ConfigResetstat,
    ConfigSet,
    Scan,
    RandomKey,
    SlowlogGet,
    SlowlogLen,
    SlowlogReset,
    Cluster,
    ClusterMode,
    Script,
    Lolwut,
    Monitor,
    ClientTracking,
    ClientCaching,
    ClientTrackinginfo,
    ClientGetredir,
    ClientPause,
    ClientUnpause,
    Subscribe,
    Unsubscribe,
    Psubscribe,
    Punsubscribe,
    Ssubscribe,
    Sunsubscribe,
    Publish,
    Spublish,
    PubsubChannels,
    PubsubNumsub,
    PubsubNumpat,
    PubsubShardchannels,
    PubsubShardnumsub,
    Switchyard,
}

/// Destination of a command, or its refusal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// Forwarded to the owner of its keys, which must share a slot. A call without keys (EVAL with `numkeys` 0) goes to
    /// any node.
    Keyed,
    /// Split over the owners of its keys.
    Split(Split),
    /// Sent to every node; the replies are merged.
    Every(Merge),
    /// Any node that is up can reply (COMMAND DOCS).
    Any,
    /// Answered by the router.
    Local(Local),
    /// Executed by the only node. With several nodes, refused for the reason in the text.
    OnlyNode(&'static str),
    /// Refused for the reason in the text.
    Refused(&'static str),
}

/// Class of a command in metrics. Few classes, because each is a time series per node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommandClass {
    /// Reads keys at one node.
    Read,
    /// Writes keys at one node.
    Write,
    /// Runs a script or function.
    Script,
    /// May block at a node, so its duration is not a measure of the node.
    Blocking,
    /// Split over nodes, or sent to every node.
    Many,
    /// Answered by the router.
    Local,
    /// All others: commands for operators, and refused ones.
    Admin,
}

impl CommandClass {
    /// Number of classes, for arrays indexed by class.
    pub const COUNT: usize = Self::ALL.len();

    /// All classes, in the order of their discriminants.
    pub const ALL: [CommandClass; 7] =
        [Self::Read, Self::Write, Self::Script, Self::Blocking, Self::Many, Self::Local, Self::Admin];

    /// Label in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Script => "script",
            Self::Blocking => "blocking",
            Self::Many => "many",
            Self::Local => "local",
            Self::Admin => "admin",
        }
    }
}

/// A command or subcommand.
#[derive(Clone, Debug)]
pub struct Command {
    /// Upper case; a subcommand with its container: `CONFIG|GET`.
    pub name: Cow<'static, str>,
    /// Index in the table, dense from 0, for arrays indexed by command.
    pub id: u16,
    /// Number of arguments including the name; if negative, the minimum number.
    pub arity: i16,
    /// Properties.
    pub flags: Flags,
    /// Key positions.
    pub keys: Keys,
    /// Destination or refusal.
    pub handling: Handling,
    categories: Categories,
    /// Access to the first key, and to the rest.
    access: (Access, Access),
    /// Whether the command has subcommands.
    container: bool,
}

impl Command {
    /// Whether the command accepts `count` arguments, including the name.
    #[inline]
    pub fn arity_ok(&self, count: usize) -> bool {
        let wanted = usize::from(self.arity.unsigned_abs());
        if self.arity < 0 { count >= wanted } else { count == wanted }
    }

    /// Whether the command is from the builtin table rather than learnt from a node.
    pub fn is_builtin(&self) -> bool {
        matches!(self.name, Cow::Borrowed(_))
    }

    /// Whether the command has subcommands.
    pub fn is_container(&self) -> bool {
        self.container
    }

    /// Whether this call may block at the node. XREAD and XREADGROUP block only with BLOCK.
    pub fn blocks(&self, args: &Args<'_>) -> bool {
        self.flags.has(Flags::BLOCKING) && (!matches!(self.keys, Keys::Streams) || keys::stream_options(args).block)
    }

    /// Maximum time that this call blocks at the node, in microseconds. `None`: unlimited or unknown. An invalid
    /// timeout does not block, because the node returns an error immediately.
    pub fn waits_us(&self, args: &Args<'_>) -> Option<u64> {
        let (timeout, unit_us) = match &*self.name {
            "BLPOP" | "BRPOP" | "BZPOPMIN" | "BZPOPMAX" | "BLMOVE" | "BRPOPLPUSH" => (args.get(args.len() - 1), 1e6),
            "BLMPOP" | "BZMPOP" => (args.get(1), 1e6),
            "XREAD" | "XREADGROUP" => (keys::stream_options(args).timeout.and_then(|at| args.get(at)), 1e3),
            _ => return None,
        };
        let timeout: f64 = timeout.and_then(|t| std::str::from_utf8(t).ok()?.parse().ok()).unwrap_or(1.0);
        (timeout != 0.0).then_some((timeout * unit_us) as u64)
    }

    /// Class in metrics.
    #[inline]
    pub fn class(&self) -> CommandClass {
        match self.handling {
            Handling::Keyed if self.flags.has(Flags::SCRIPT) => CommandClass::Script,
            Handling::Keyed if self.flags.has(Flags::BLOCKING) && !matches!(self.keys, Keys::Streams) => {
                CommandClass::Blocking
            }
            Handling::Local(Local::Wait) => CommandClass::Blocking,
            Handling::Keyed if self.flags.has(Flags::READONLY) => CommandClass::Read,
            Handling::Keyed => CommandClass::Write,
            Handling::Split(_) | Handling::Every(_) => CommandClass::Many,
            Handling::Local(_) => CommandClass::Local,
            Handling::Any | Handling::OnlyNode(_) | Handling::Refused(_) => CommandClass::Admin,
        }
    }
}
