//! The command table as data: one row per command (or subcommand), with arity, flags, where its keys are, and who
//! answers it.
//!
//! - `table.rs` has the rows. They are the source: to add a command, add a row.
//! - `lookup.rs` finds a row by the name a client sent, on the path of every request.
//! - `access.rs` has the words of access rules: categories, and reading and writing.
//! - `keys.rs` finds the keys among a command's arguments.
//! - `learn.rs` adds commands of the nodes' modules, as `COMMAND` describes them.
//! - `touched.rs` says which elements of a large value a command may change.
//! - `errors.rs` has the errors that Redis gives about a command as a whole.
//!
//! Arity, flags and key positions are Redis's own (<https://redis.io/docs/latest/develop/reference/key-specs/>), and a
//! test holds them against `COMMAND` and `COMMAND GETKEYS` of a real server. `handling` is ours: what a switch in front
//! of many servers does. Where versions of Redis and Valkey differ, the row takes the more permissive: the node has the
//! last word on its own commands.

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

/// Properties of a command, as a set of bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Flags(pub u32);

impl Flags {
    /// May change data. EVAL and FCALL have neither this nor [`Flags::READONLY`]: what they do is not known, so take
    /// them as writing.
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
    /// May take long at the node (KEYS, SORT, EVAL, set algebra): travels in the slow lane, so that it holds up no
    /// pipeline. Ours, not Redis's.
    pub const SLOW: Flags = Flags(1 << 7);
    /// Allowed before authentication.
    pub const NO_AUTH: Flags = Flags(1 << 8);
    /// Key positions cannot be given as one (first, last, step) triple.
    pub const MOVABLE_KEYS: Flags = Flags(1 << 9);
    /// May use memory: refused by a node that is out of memory.
    pub const DENY_OOM: Flags = Flags(1 << 10);

    /// Goes on where an earlier call has ended, by a cursor that one server only understands (HSCAN and relatives).
    /// Ours, not Redis's.
    pub const CURSOR: Flags = Flags(1 << 11);

    /// Reads one key, and says the same as long as the key and its time to live are the same: its reply may be kept.
    /// Not every command that only reads does: what is random, or about time (RANDFIELD, TTL, OBJECT), does not. Ours,
    /// not Redis's.
    pub const COPYABLE: Flags = Flags(1 << 12);

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
    /// The smallest integer (LASTSAVE).
    Least,
    /// Maps of figures: counts are added, ratios made anew of the sums (MEMORY STATS).
    Figures,
    /// Texts for people, each under the name of its node (MEMORY DOCTOR).
    Texts,
    /// All should answer the same: the first error wins, else the first reply (FLUSHALL, SCRIPT LOAD).
    Same,
    /// Arrays are concatenated in node order (KEYS).
    Concat,
    /// Arrays of 0/1: 1 only where every node says 1 (SCRIPT EXISTS).
    AllOnes,
    /// One success is enough: the first reply that is no error, else the first error (SCRIPT KILL, which fails where
    /// nothing runs).
    AnyOk,
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

/// Who answers a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Handling {
    /// Forwarded to the owner of its keys, which must share a slot. A form without any key (EVAL with `numkeys` 0) goes
    /// to any node.
    Keyed,
    /// Split over the owners of its keys.
    Split(Split),
    /// Sent to every node; the replies are merged.
    Every(Merge),
    /// Any one node that is up can answer (COMMAND DOCS).
    Any,
    /// The router answers.
    Local(Local),
    /// The only node executes it; where there are several it is refused for a reason, which is the text.
    OnlyNode(&'static str),
    /// Refused for a reason, which is the text.
    Refused(&'static str),
}

/// What a command counts as in metrics. Few, because each is a time series per node.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CommandClass {
    /// Reads keys of one node.
    Read,
    /// Writes keys of one node.
    Write,
    /// Runs a script or function.
    Script,
    /// May wait at a node: its time says nothing of the node.
    Blocking,
    /// Split over nodes, or sent to each.
    Many,
    /// Answered by the router.
    Local,
    /// Everything else: an operator's command, or one that is refused.
    Admin,
}

impl CommandClass {
    /// Number of classes, for arrays with one place per class.
    pub const COUNT: usize = Self::ALL.len();

    /// All of them, in the order of their discriminants.
    pub const ALL: [CommandClass; 7] =
        [Self::Read, Self::Write, Self::Script, Self::Blocking, Self::Many, Self::Local, Self::Admin];

    /// The name in metrics.
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

/// One command or subcommand.
#[derive(Clone, Debug)]
pub struct Command {
    /// Upper case; a subcommand with its container: `CONFIG|GET`.
    pub name: Cow<'static, str>,
    /// Place in the table, dense from 0: an index for arrays with one place per command.
    pub id: u16,
    /// Number of arguments with the name; negative: at least so many.
    pub arity: i16,
    /// Its properties.
    pub flags: Flags,
    /// Where its keys are.
    pub keys: Keys,
    /// Who answers it.
    pub handling: Handling,
    categories: Categories,
    /// What it does with its first key, and with the rest.
    access: (Access, Access),
    /// True where subcommands follow.
    container: bool,
}

impl Command {
    /// True where `count` arguments (the name included) are as many as the command takes.
    #[inline]
    pub fn arity_ok(&self, count: usize) -> bool {
        let wanted = usize::from(self.arity.unsigned_abs());
        if self.arity < 0 { count >= wanted } else { count == wanted }
    }

    /// True for a command of this crate's own table; false for one that was learnt from a node, as those of modules
    /// are.
    pub fn is_builtin(&self) -> bool {
        matches!(self.name, Cow::Borrowed(_))
    }

    /// True where subcommands follow its name.
    pub fn is_container(&self) -> bool {
        self.container
    }

    /// True where this call may wait at the node. XREAD and XREADGROUP wait only with BLOCK.
    pub fn blocks(&self, args: &Args<'_>) -> bool {
        self.flags.has(Flags::BLOCKING) && (!matches!(self.keys, Keys::Streams) || keys::stream_options(args).block)
    }

    /// How long this call may wait at the node, in microseconds: `None` without end, and also where that cannot be
    /// told. A timeout that makes no sense is none: the node answers an error at once.
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

    /// What it counts as in metrics.
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
