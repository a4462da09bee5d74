//! The rows of the command table.
//!
//! One line per command: name, arity, flags, key positions, key access, categories, handling. Arity, flags, and keys
//! are those of `COMMAND` in Redis 7.0 to 8 and Valkey 7.2 to 9. Access and categories are those of Redis 7.0, or
//! Valkey if Redis 7.0 lacks the command; categories implied by flags are omitted. A row exists whether or not the
//! connected nodes have the command, because the node's own error is the best one. `tests/command_table/` compares the
//! rows with real servers and finds missing commands.
//!
//! Reasons for the less obvious handlings:
//! - Descriptions of one server (`LATENCY GRAPH`, `LATENCY HISTOGRAM`) are refused: the reply of any one node would
//!   mislead.
//! - Commands polled by tools are merged: `LATENCY LATEST`, `SLOWLOG LEN`, `DBSIZE`. `LATENCY RESET` and
//!   `SLOWLOG RESET` reach every node.
//! - `FLUSHALL` is not slow although it may take long: it must keep its order among the client's commands.
//! - `MOVE` and `COPY ... DB` are routed by their keys: both databases are at the same node.
//! - `HELP` of a container goes to any node; its text does not depend on routing.

use super::access::{Access, Categories};
use super::{Flags, Handling, Keys};

use super::{Local::*, Merge::*, Split::*};
use Handling::{Any, Every, Keyed, Local, OnlyNode, Refused, Split};

/// Newest covered minor versions of Redis and Valkey, as (major, minor). Commands of newer versions may change keys in
/// unknown ways.
const REDIS_COVERED: (u32, u32) = (8, 12);
/// See [`REDIS_COVERED`].
const VALKEY_COVERED: (u32, u32) = (9, 1);

/// Major and minor number of a version; `None` for another format.
fn minor_of(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Whether the table covers a server of this version; `flavour` is `redis` or `valkey`. Versions in another format are
/// not covered.
#[must_use]
pub fn covers(flavour: &str, version: &str) -> bool {
    let newest = if flavour == "valkey" { VALKEY_COVERED } else { REDIS_COVERED };
    minor_of(version).is_some_and(|version| version <= newest)
}

/// Reason why a server of this version has no hot copies and no piecewise moves, if it is not covered.
#[must_use]
pub fn why_not_covered(flavour: &str, version: &str) -> Option<String> {
    (!covers(flavour, version)).then(|| {
        let ((redis, minor), (valkey, valkey_minor)) = (REDIS_COVERED, VALKEY_COVERED);
        format!(
            "{flavour} {version} is newer than the command table, which covers Redis up to {redis}.{minor} and Valkey up to {valkey}.{valkey_minor}: it gets no hot copies, and big \
             keys move whole"
        )
    })
}

/// Whether set members may have their own expiry in this version: Redis after 8.4, or a version in another format.
#[must_use]
pub fn members_expire(flavour: &str, version: &str) -> bool {
    match minor_of(version) {
        Some(version) if flavour == "valkey" => version > VALKEY_COVERED,
        Some(version) => version > (8, 4),
        None => true,
    }
}

pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) arity: i16,
    pub(super) flags: Flags,
    pub(super) keys: Keys,
    /// Access to the first key, and to the rest.
    pub(super) access: (Access, Access),
    /// Categories not implied by the flags.
    categories: Categories,
    pub(super) handling: Handling,
}

impl Row {
    /// All categories: listed ones, and those implied by the flags according to Redis.
    pub(super) fn categories(&self) -> Categories {
        let implied = [
            (Flags::WRITE, Categories::of("write")),
            (
                Flags::READONLY,
                if self.flags.has(Flags::SCRIPT) { Categories::of("scripting") } else { Categories::of("read") },
            ),
            (Flags::SCRIPT, Categories::of("scripting")),
            (Flags::ADMIN, Categories::of("admin").and(Categories::of("dangerous"))),
            (Flags::PUBSUB, Categories::of("pubsub")),
            // In Redis 7.0, WAIT is not blocking.
            (
                Flags::BLOCKING,
                if self.name == "WAIT" { Categories::of("connection") } else { Categories::of("blocking") },
            ),
        ];
        let speed = if self.flags.has(Flags::FAST) { Categories::of("fast") } else { Categories::of("slow") };
        implied
            .iter()
            .filter(|(flag, _)| self.flags.has(*flag))
            .fold(self.categories.and(speed), |all, (_, one)| all.and(*one))
    }
}

/// Rows without keys list no access; rows with equal access to all keys list one.
const fn access(listed: &[Access]) -> (Access, Access) {
    match *listed {
        [] => (Access::NO, Access::NO),
        [all] => (all, all),
        [first, rest, ..] => (first, rest),
    }
}

// Reasons for a refusal, with alternatives.
const PLACEMENT: &str = "Switchyard places the slots. Change its list of nodes instead";
const DEBUGGING: &str = "it is for debugging one server. Call it at the node itself";
const STOPPING: &str = "it would stop a node that all clients share. Stop the node itself, or Switchyard by SIGTERM";
const REPLICATION: &str = "replication is configured at the nodes. Call it at the node itself";
const CONFIGURING: &str = "changes by CONFIG SET are not stored. Change Switchyard's configuration file (SIGHUP reloads it), and call CONFIG REWRITE at each node";
const MODULES: &str = "modules are loaded at the nodes. Load it at every node; Switchyard then learns its commands";
const PERSISTENCE: &str = "it would stop every node until its file is written. Use BGSAVE";
const MIGRATING: &str = "the router places the keys, and clients would not find a key moved by this command";
const RESTORING: &str = "it is for moves between nodes of a cluster. Use RESTORE";
const SWAPPING: &str = "databases of several nodes cannot be swapped atomically";
const BLESSING: &str = "DUMP omits its effect, so a move of the key to another node would lose it";
const ONE_NODE: &str = "it describes one server, and the reply of one node would mislead. Call it at the node itself";
const IMPORTING: &str = "it marks a connection to one server for imports. Call it at the node itself";

macro_rules! rows {
    ($($name:literal $arity:literal [$($flag:ident)*] $keys:ident [$($access:ident)*] [$($category:ident)*] => $handling:expr;)*) => {
        /// All rows; containers and their subcommands in any order.
        pub(super) static ROWS: &[Row] = &[$(Row {
            name: $name,
            arity: $arity,
            flags: Flags(0 $(| Flags::$flag.0)*),
            keys: Keys::$keys,
            access: access(&[$(Access::$access),*]),
            categories: Categories(0 $(| Categories::of(stringify!($category)).0)*),
            handling: $handling,
        }),*];
    };
}

rows! {
    // Strings
    "APPEND"                     3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [string]              => Keyed;
    "DECR"                       2 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "DECRBY"                     3 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "DELEX"                     -2 [WRITE FAST]                          FIRST             [RW]   [string]              => Keyed;
    "DELIFEQ"                    3 [WRITE FAST]                          FIRST             [RW]   [string]              => Keyed;
    "DIGEST"                     2 [READONLY FAST]                       FIRST             [R]    [string]              => Keyed;
    "GET"                        2 [READONLY FAST COPYABLE]              FIRST             [R]    [string]              => Keyed;
    "GETDEL"                     2 [WRITE FAST]                          FIRST             [RW]   [string]              => Keyed;
    "GETEX"                     -2 [WRITE FAST]                          FIRST             [RW]   [string]              => Keyed;
    "GETRANGE"                   4 [READONLY COPYABLE]                   FIRST             [R]    [string]              => Keyed;
    "GETSET"                     3 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "INCR"                       2 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "INCRBY"                     3 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "INCRBYFLOAT"                3 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [string]              => Keyed;
    "LCS"                       -3 [READONLY SLOW]                       FIRST_TWO         [R]    [string]              => Keyed;
    "MGET"                      -2 [READONLY FAST]                       ALL               [R]    [string]              => Split(Values);
    "MSET"                      -3 [WRITE DENY_OOM]                      PAIRS             [W]    [string]              => Split(Pairs);
    "MSETEX"                    -4 [WRITE DENY_OOM MOVABLE_KEYS]         NUMBERED_PAIRS    [RW]   [string]              => Keyed;
    "MSETNX"                    -3 [WRITE DENY_OOM]                      PAIRS             [W]    [string]              => Keyed;
    "PSETEX"                     4 [WRITE DENY_OOM]                      FIRST             [W]    [string]              => Keyed;
    "SET"                       -3 [WRITE DENY_OOM]                      FIRST             [RW]   [string]              => Keyed;
    "SETEX"                      4 [WRITE DENY_OOM]                      FIRST             [W]    [string]              => Keyed;
    "SETNX"                      3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [string]              => Keyed;
    "SETRANGE"                   4 [WRITE DENY_OOM]                      FIRST             [W]    [string]              => Keyed;
    "STRLEN"                     2 [READONLY FAST COPYABLE]              FIRST             [NO]   [string]              => Keyed;
    "SUBSTR"                     4 [READONLY COPYABLE]                   FIRST             [R]    [string]              => Keyed;

    // Bitmaps
    "BITCOUNT"                  -2 [READONLY COPYABLE]                   FIRST             [R]    [bitmap]              => Keyed;
    "BITFIELD"                  -2 [WRITE DENY_OOM]                      FIRST             [RW]   [bitmap]              => Keyed;
    "BITFIELD_RO"               -2 [READONLY FAST]                       FIRST             [R]    [bitmap]              => Keyed;
    "BITOP"                     -4 [WRITE DENY_OOM SLOW]                 FROM_SECOND       [W R]  [bitmap]              => Keyed;
    "BITPOS"                    -3 [READONLY COPYABLE]                   FIRST             [R]    [bitmap]              => Keyed;
    "BITRANGEINTARRAY"           -2 [READONLY]                           FIRST             [R]    [bitmap]               => Keyed;
    "GETBIT"                     3 [READONLY FAST COPYABLE]              FIRST             [R]    [bitmap]              => Keyed;
    "SETBIT"                     4 [WRITE DENY_OOM]                      FIRST             [RW]   [bitmap]              => Keyed;

    // HyperLogLogs
    "PFADD"                     -2 [WRITE DENY_OOM FAST]                 FIRST             [W]    [hyperloglog]         => Keyed;
    "PFCOUNT"                   -2 [READONLY]                            ALL               [R]    [hyperloglog]         => Keyed;
    "PFDEBUG"                    3 [WRITE DENY_OOM ADMIN]                SECOND            [R]    [hyperloglog]         => Refused(DEBUGGING);
    "PFMERGE"                   -2 [WRITE DENY_OOM SLOW]                 ALL               [RW R] [hyperloglog]         => Keyed;
    "PFSELFTEST"                 1 [ADMIN]                               NONE              []     [hyperloglog]         => Refused(DEBUGGING);

    // Hashes
    "HDEL"                      -3 [WRITE FAST]                          FIRST             [W]    [hash]                => Keyed;
    "HEXISTS"                    3 [READONLY FAST COPYABLE]              FIRST             [NO]   [hash]                => Keyed;
    "HEXPIRE"                   -6 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HEXPIREAT"                 -6 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HEXPIRETIME"               -5 [READONLY FAST]                       FIRST             [R]    [hash]                => Keyed;
    "HGET"                       3 [READONLY FAST COPYABLE]              FIRST             [R]    [hash]                => Keyed;
    "HGETALL"                    2 [READONLY COPYABLE]                   FIRST             [R]    [hash]                => Keyed;
    "HGETDEL"                   -5 [WRITE FAST]                          FIRST             [RW]   [hash]                => Keyed;
    "HGETEX"                    -5 [WRITE FAST]                          FIRST             [RW]   [hash]                => Keyed;
    "HINCRBY"                    4 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HINCRBYFLOAT"               4 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HKEYS"                      2 [READONLY COPYABLE]                   FIRST             [R]    [hash]                => Keyed;
    "HLEN"                       2 [READONLY FAST COPYABLE]              FIRST             [NO]   [hash]                => Keyed;
    "HMGET"                     -3 [READONLY FAST COPYABLE]              FIRST             [R]    [hash]                => Keyed;
    "HMSET"                     -4 [WRITE DENY_OOM FAST]                 FIRST             [W]    [hash]                => Keyed;
    "HPERSIST"                  -5 [WRITE FAST]                          FIRST             [RW]   [hash]                => Keyed;
    "HPEXPIRE"                  -6 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HPEXPIREAT"                -6 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HPEXPIRETIME"              -5 [READONLY FAST]                       FIRST             [R]    [hash]                => Keyed;
    "HPTTL"                     -5 [READONLY FAST]                       FIRST             [R]    [hash]                => Keyed;
    "HRANDFIELD"                -2 [READONLY]                            FIRST             [R]    [hash]                => Keyed;
    "HSCAN"                     -3 [READONLY CURSOR]                     FIRST             [R]    [hash]                => Keyed;
    "HSET"                      -4 [WRITE DENY_OOM FAST]                 FIRST             [W]    [hash]                => Keyed;
    "HSETEX"                    -6 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [hash]                => Keyed;
    "HSETNX"                     4 [WRITE DENY_OOM FAST]                 FIRST             [W]    [hash]                => Keyed;
    "HSTRLEN"                    3 [READONLY FAST COPYABLE]              FIRST             [NO]   [hash]                => Keyed;
    "HTTL"                      -5 [READONLY FAST]                       FIRST             [R]    [hash]                => Keyed;
    "HVALS"                      2 [READONLY COPYABLE]                   FIRST             [R]    [hash]                => Keyed;

    // Lists
    "BLMOVE"                     6 [WRITE DENY_OOM BLOCKING]             FIRST_TWO         [RW W] [list]                => Keyed;
    "BLMOVEM"                    -6 [WRITE DENY_OOM BLOCKING]            FIRST_TWO         [RW W] [list]                 => Keyed;
    "BLMPOP"                    -5 [WRITE BLOCKING MOVABLE_KEYS]         POP_AFTER_TIMEOUT [RW]   [list]                => Keyed;
    "BLPOP"                     -3 [WRITE BLOCKING]                      ALL_BUT_LAST      [RW]   [list]                => Keyed;
    "BRPOP"                     -3 [WRITE BLOCKING]                      ALL_BUT_LAST      [RW]   [list]                => Keyed;
    "BRPOPLPUSH"                 4 [WRITE DENY_OOM BLOCKING]             FIRST_TWO         [RW W] [list]                => Keyed;
    "LINDEX"                     3 [READONLY COPYABLE]                   FIRST             [R]    [list]                => Keyed;
    "LINSERT"                    5 [WRITE DENY_OOM]                      FIRST             [W]    [list]                => Keyed;
    "LLEN"                       2 [READONLY FAST COPYABLE]              FIRST             [NO]   [list]                => Keyed;
    "LMOVE"                      5 [WRITE DENY_OOM]                      FIRST_TWO         [RW W] [list]                => Keyed;
    "LMOVEM"                     -5 [WRITE DENY_OOM]                     FIRST_TWO         [RW W] [list]                 => Keyed;
    "LMPOP"                     -4 [WRITE MOVABLE_KEYS]                  POP               [RW]   [list]                => Keyed;
    "LPOP"                      -2 [WRITE FAST]                          FIRST             [RW]   [list]                => Keyed;
    "LPOS"                      -3 [READONLY COPYABLE]                   FIRST             [R]    [list]                => Keyed;
    "LPUSH"                     -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [list]                => Keyed;
    "LPUSHX"                    -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [list]                => Keyed;
    "LRANGE"                     4 [READONLY COPYABLE]                   FIRST             [R]    [list]                => Keyed;
    "LREM"                       4 [WRITE]                               FIRST             [W]    [list]                => Keyed;
    "LSET"                       4 [WRITE DENY_OOM]                      FIRST             [W]    [list]                => Keyed;
    "LTRIM"                      4 [WRITE]                               FIRST             [W]    [list]                => Keyed;
    "RPOP"                      -2 [WRITE FAST]                          FIRST             [RW]   [list]                => Keyed;
    "RPOPLPUSH"                  3 [WRITE DENY_OOM]                      FIRST_TWO         [RW W] [list]                => Keyed;
    "RPUSH"                     -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [list]                => Keyed;
    "RPUSHX"                    -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [list]                => Keyed;

    // Sets
    "SADD"                      -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [set]                 => Keyed;
    "SADDEX"                     -4 [WRITE DENY_OOM FAST]                FIRST             [RW]   [set]                  => Keyed;
    "SCARD"                      2 [READONLY FAST COPYABLE]              FIRST             [NO]   [set]                 => Keyed;
    "SDIFF"                     -2 [READONLY SLOW]                       ALL               [R]    [set]                 => Keyed;
    "SDIFFSTORE"                -3 [WRITE DENY_OOM SLOW]                 ALL               [W R]  [set]                 => Keyed;
    "SEXPIRE"                    -4 [WRITE DENY_OOM FAST]                FIRST             [RW]   [set]                  => Keyed;
    "SEXPIREAT"                  -4 [WRITE DENY_OOM FAST]                FIRST             [RW]   [set]                  => Keyed;
    "SEXPIRETIME"                -3 [READONLY FAST]                      FIRST             [R]    [set]                  => Keyed;
    "SINTER"                    -2 [READONLY SLOW]                       ALL               [R]    [set]                 => Keyed;
    "SINTERCARD"                -3 [READONLY MOVABLE_KEYS SLOW]          SETS              [R]    [set]                 => Keyed;
    "SINTERSTORE"               -3 [WRITE DENY_OOM SLOW]                 ALL               [W R]  [set]                 => Keyed;
    "SISMEMBER"                  3 [READONLY FAST COPYABLE]              FIRST             [NO]   [set]                 => Keyed;
    "SMEMBERS"                   2 [READONLY COPYABLE]                   FIRST             [R]    [set]                 => Keyed;
    "SMISMEMBER"                -3 [READONLY FAST COPYABLE]              FIRST             [R]    [set]                 => Keyed;
    "SMOVE"                      4 [WRITE FAST]                          FIRST_TWO         [RW W] [set]                 => Keyed;
    "SPERSIST"                   -3 [WRITE FAST]                         FIRST             [RW]   [set]                  => Keyed;
    "SPEXPIRE"                   -4 [WRITE DENY_OOM FAST]                FIRST             [RW]   [set]                  => Keyed;
    "SPEXPIREAT"                 -4 [WRITE DENY_OOM FAST]                FIRST             [RW]   [set]                  => Keyed;
    "SPEXPIRETIME"               -3 [READONLY FAST]                      FIRST             [R]    [set]                  => Keyed;
    "SPOP"                      -2 [WRITE FAST]                          FIRST             [RW]   [set]                 => Keyed;
    "SPTTL"                      -3 [READONLY FAST]                      FIRST             [R]    [set]                  => Keyed;
    "SRANDMEMBER"               -2 [READONLY]                            FIRST             [R]    [set]                 => Keyed;
    "SREM"                      -3 [WRITE FAST]                          FIRST             [W]    [set]                 => Keyed;
    "SSCAN"                     -3 [READONLY CURSOR]                     FIRST             [R]    [set]                 => Keyed;
    "STTL"                       -3 [READONLY FAST]                      FIRST             [R]    [set]                  => Keyed;
    "SUNION"                    -2 [READONLY SLOW]                       ALL               [R]    [set]                 => Keyed;
    "SUNIONSTORE"               -3 [WRITE DENY_OOM SLOW]                 ALL               [W R]  [set]                 => Keyed;

    // Sorted sets
    "BZMPOP"                    -5 [WRITE BLOCKING MOVABLE_KEYS]         POP_AFTER_TIMEOUT [RW]   [sortedset]           => Keyed;
    "BZMOVE"                     -4 [WRITE DENY_OOM BLOCKING]            FIRST_TWO         [RW W] [sortedset]            => Keyed;
    "BZMOVEMEMBER"               -4 [WRITE DENY_OOM BLOCKING]            FIRST_TWO         [RW W] [sortedset]            => Keyed;
    "BZPOPMAX"                  -3 [WRITE FAST BLOCKING]                 ALL_BUT_LAST      [RW]   [sortedset]           => Keyed;
    "BZPOPMIN"                  -3 [WRITE FAST BLOCKING]                 ALL_BUT_LAST      [RW]   [sortedset]           => Keyed;
    "ZADD"                      -4 [WRITE DENY_OOM FAST]                 FIRST             [W]    [sortedset]           => Keyed;
    "ZCARD"                      2 [READONLY FAST COPYABLE]              FIRST             [NO]   [sortedset]           => Keyed;
    "ZCOUNT"                     4 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZDIFF"                     -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             [R]    [sortedset]           => Keyed;
    "ZDIFFSTORE"                -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       [W R]  [sortedset]           => Keyed;
    "ZINCRBY"                    4 [WRITE DENY_OOM FAST]                 FIRST             [RW]   [sortedset]           => Keyed;
    "ZINTER"                    -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             [R]    [sortedset]           => Keyed;
    "ZINTERCARD"                -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             [R]    [sortedset]           => Keyed;
    "ZINTERSTORE"               -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       [W R]  [sortedset]           => Keyed;
    "ZLEXCOUNT"                  4 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZMOVE"                      -3 [WRITE DENY_OOM]                     FIRST_TWO         [RW W] [sortedset]            => Keyed;
    "ZMOVEMEMBER"                -3 [WRITE DENY_OOM]                     FIRST_TWO         [RW W] [sortedset]            => Keyed;
    "ZMPOP"                     -4 [WRITE MOVABLE_KEYS]                  POP               [RW]   [sortedset]           => Keyed;
    "ZMSCORE"                   -3 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZPOPMAX"                   -2 [WRITE FAST]                          FIRST             [RW]   [sortedset]           => Keyed;
    "ZPOPMIN"                   -2 [WRITE FAST]                          FIRST             [RW]   [sortedset]           => Keyed;
    "ZRANDMEMBER"               -2 [READONLY]                            FIRST             [R]    [sortedset]           => Keyed;
    "ZRANGE"                    -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZRANGEBYLEX"               -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZRANGEBYSCORE"             -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZRANGESTORE"               -5 [WRITE DENY_OOM]                      FIRST_TWO         [W R]  [sortedset]           => Keyed;
    "ZRANK"                     -3 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZREM"                      -3 [WRITE FAST]                          FIRST             [W]    [sortedset]           => Keyed;
    "ZREMRANGEBYLEX"             4 [WRITE]                               FIRST             [W]    [sortedset]           => Keyed;
    "ZREMRANGEBYRANK"            4 [WRITE]                               FIRST             [W]    [sortedset]           => Keyed;
    "ZREMRANGEBYSCORE"           4 [WRITE]                               FIRST             [W]    [sortedset]           => Keyed;
    "ZREVRANGE"                 -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZREVRANGEBYLEX"            -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZREVRANGEBYSCORE"          -4 [READONLY COPYABLE]                   FIRST             [R]    [sortedset]           => Keyed;
    "ZREVRANK"                  -3 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZSCAN"                     -3 [READONLY CURSOR]                     FIRST             [R]    [sortedset]           => Keyed;
    "ZSCORE"                     3 [READONLY FAST COPYABLE]              FIRST             [R]    [sortedset]           => Keyed;
    "ZUNION"                    -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             [R]    [sortedset]           => Keyed;
    "ZUNIONSTORE"               -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       [W R]  [sortedset]           => Keyed;

    // Geo
    "GEOADD"                    -5 [WRITE DENY_OOM]                      FIRST             [W]    [geo]                 => Keyed;
    "GEODIST"                   -4 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEOHASH"                   -2 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEOPOS"                    -2 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEORADIUS"                 -6 [WRITE DENY_OOM MOVABLE_KEYS]         GEO_STORE         [R W]  [geo]                 => Keyed;
    "GEORADIUSBYMEMBER"         -5 [WRITE DENY_OOM MOVABLE_KEYS]         GEO_STORE_BY_MEMBER [R W]  [geo]                 => Keyed;
    "GEORADIUSBYMEMBER_RO"      -5 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEORADIUS_RO"              -6 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEOSEARCH"                 -7 [READONLY]                            FIRST             [R]    [geo]                 => Keyed;
    "GEOSEARCHSTORE"            -8 [WRITE DENY_OOM]                      FIRST_TWO         [W R]  [geo]                 => Keyed;

    // Streams
    "XACK"                      -4 [WRITE FAST]                          FIRST             [W]    [stream]              => Keyed;
    "XACKDEL"                   -6 [WRITE FAST]                          FIRST             [RW]   [stream]              => Keyed;
    "XADD"                      -5 [WRITE DENY_OOM FAST]                 FIRST             [W]    [stream]              => Keyed;
    "XAUTOCLAIM"                -6 [WRITE FAST]                          FIRST             [W]    [stream]              => Keyed;
    "XCFGSET"                   -2 [WRITE FAST]                          FIRST             [RW]   [stream]              => Keyed;
    "XCLAIM"                    -6 [WRITE FAST]                          FIRST             [W]    [stream]              => Keyed;
    "XDEL"                      -3 [WRITE FAST]                          FIRST             [W]    [stream]              => Keyed;
    "XDELEX"                    -5 [WRITE FAST]                          FIRST             [RW]   [stream]              => Keyed;
    "XGROUP"                    -2 []                                    NONE              []     []                    => Any;
    "XGROUP|CREATE"             -5 [WRITE DENY_OOM]                      SECOND            [W]    [stream]              => Keyed;
    "XGROUP|CREATECONSUMER"      5 [WRITE DENY_OOM]                      SECOND            [W]    [stream]              => Keyed;
    "XGROUP|DELCONSUMER"         5 [WRITE]                               SECOND            [W]    [stream]              => Keyed;
    "XGROUP|DESTROY"             4 [WRITE]                               SECOND            [W]    [stream]              => Keyed;
    "XGROUP|HELP"                2 []                                    NONE              []     [stream]              => Any;
    "XGROUP|SETID"              -5 [WRITE]                               SECOND            [W]    [stream]              => Keyed;
    "XINFO"                     -2 []                                    NONE              []     []                    => Any;
    "XINFO|CONSUMERS"            4 [READONLY]                            SECOND            [R]    [stream]              => Keyed;
    "XINFO|GROUPS"               3 [READONLY]                            SECOND            [R]    [stream]              => Keyed;
    "XINFO|HELP"                 2 []                                    NONE              []     [stream]              => Any;
    "XINFO|STREAM"              -3 [READONLY]                            SECOND            [R]    [stream]              => Keyed;
    "XLEN"                       2 [READONLY FAST COPYABLE]              FIRST             [NO]   [stream]              => Keyed;
    "XPENDING"                  -3 [READONLY]                            FIRST             [R]    [stream]              => Keyed;
    "XRANGE"                    -4 [READONLY COPYABLE]                   FIRST             [R]    [stream]              => Keyed;
    "XREAD"                     -4 [READONLY BLOCKING MOVABLE_KEYS]      STREAMS           [R]    [stream]              => Keyed;
    "XREADGROUP"                -7 [WRITE BLOCKING MOVABLE_KEYS]         STREAMS           [R]    [stream]              => Keyed;
    "XREVRANGE"                 -4 [READONLY COPYABLE]                   FIRST             [R]    [stream]              => Keyed;
    "XSETID"                    -3 [WRITE DENY_OOM FAST]                 FIRST             [W]    [stream]              => Keyed;
    "XTRIM"                     -4 [WRITE]                               FIRST             [W]    [stream]              => Keyed;

    // Vector sets (Redis 8)
    "VADD"                      -5 [WRITE DENY_OOM]                      FIRST             [RW]   []                    => Keyed;
    "VCARD"                      2 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VDIM"                       2 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VEMB"                      -3 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VGETATTR"                   3 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VINFO"                      2 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VISMEMBER"                  3 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VLINKS"                    -3 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VRANDMEMBER"               -2 [READONLY FAST]                       FIRST             [R]    []                    => Keyed;
    "VRANGE"                    -4 [READONLY]                            FIRST             [R]    []                    => Keyed;
    "VREM"                       3 [WRITE]                               FIRST             [RW]   []                    => Keyed;
    "VSETATTR"                   4 [WRITE FAST]                          FIRST             [RW]   []                    => Keyed;
    "VSIM"                      -4 [READONLY]                            FIRST             [R]    []                    => Keyed;

    // Keys of any type
    "BLESS"                      -2 [WRITE]                              FIRST             [RW]   [keyspace]             => OnlyNode(BLESSING);
    "COPY"                      -3 [WRITE DENY_OOM]                      FIRST_TWO         [R W]  [keyspace]            => Keyed;
    "DEL"                       -2 [WRITE]                               ALL               [W]    [keyspace]            => Split(Count);
    "DUMP"                       2 [READONLY]                            FIRST             [R]    [keyspace]            => Keyed;
    "EXISTS"                    -2 [READONLY FAST COPYABLE]              ALL               [NO]   [keyspace]            => Split(Count);
    "EXPIRE"                    -3 [WRITE FAST]                          FIRST             [W]    [keyspace]            => Keyed;
    "EXPIREAT"                  -3 [WRITE FAST]                          FIRST             [W]    [keyspace]            => Keyed;
    "EXPIRETIME"                 2 [READONLY FAST]                       FIRST             [R]    [keyspace]            => Keyed;
    "KEYS"                       2 [READONLY SLOW]                       NONE              []     [dangerous keyspace]  => Every(Concat);
    "MIGRATE"                   -6 [WRITE MOVABLE_KEYS]                  MIGRATE           [RW]   [dangerous keyspace]  => Refused(MIGRATING);
    "MOVE"                       3 [WRITE FAST]                          FIRST             [RW]   [keyspace]            => Keyed;
    "OBJECT"                    -2 []                                    NONE              []     []                    => Any;
    "OBJECT|ENCODING"            3 [READONLY]                            SECOND            [NO]   [keyspace]            => Keyed;
    "OBJECT|FREQ"                3 [READONLY]                            SECOND            [NO]   [keyspace]            => Keyed;
    "OBJECT|HELP"                2 []                                    NONE              []     [keyspace]            => Any;
    "OBJECT|IDLETIME"            3 [READONLY]                            SECOND            [NO]   [keyspace]            => Keyed;
    "OBJECT|REFCOUNT"            3 [READONLY]                            SECOND            [NO]   [keyspace]            => Keyed;
    "PERSIST"                    2 [WRITE FAST]                          FIRST             [W]    [keyspace]            => Keyed;
    "PEXPIRE"                   -3 [WRITE FAST]                          FIRST             [W]    [keyspace]            => Keyed;
    "PEXPIREAT"                 -3 [WRITE FAST]                          FIRST             [W]    [keyspace]            => Keyed;
    "PEXPIRETIME"                2 [READONLY FAST]                       FIRST             [R]    [keyspace]            => Keyed;
    "PTTL"                       2 [READONLY FAST]                       FIRST             [R]    [keyspace]            => Keyed;
    "RANDOMKEY"                  1 [READONLY]                            NONE              []     [keyspace]            => Local(RandomKey);
    "RENAME"                     3 [WRITE]                               FIRST_TWO         [RW W] [keyspace]            => Keyed;
    "RENAMENX"                   3 [WRITE FAST]                          FIRST_TWO         [RW W] [keyspace]            => Keyed;
    "RESTORE"                   -4 [WRITE DENY_OOM]                      FIRST             [W]    [dangerous keyspace]  => Keyed;
    "SCAN"                      -2 [READONLY]                            NONE              []     [keyspace]            => Local(Scan);
    "SORT"                      -2 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    SORT              [R W]  [dangerous list set sortedset] => Keyed;
    "SORT_RO"                   -2 [READONLY MOVABLE_KEYS SLOW]          SORT_RO           [R]    [dangerous list set sortedset] => Keyed;
    "TOUCH"                     -2 [READONLY FAST]                       ALL               [NO]   [keyspace]            => Split(Count);
    "TTL"                        2 [READONLY FAST]                       FIRST             [R]    [keyspace]            => Keyed;
    "TYPE"                       2 [READONLY FAST COPYABLE]              FIRST             [NO]   [keyspace]            => Keyed;
    "UNLINK"                    -2 [WRITE FAST]                          ALL               [W]    [keyspace]            => Split(Count);
    "WAIT"                       3 [BLOCKING]                            NONE              []     [connection]          => Local(Wait);
    "WAITAOF"                    4 [BLOCKING]                            NONE              []     [connection]          => Local(Wait);

    // Scripts and functions
    "EVAL"                      -3 [MOVABLE_KEYS SCRIPT SLOW]            SCRIPT            [RW]   []                    => Keyed;
    "EVALSHA"                   -3 [MOVABLE_KEYS SCRIPT SLOW]            SCRIPT            [RW]   []                    => Keyed;
    "EVALSHA_RO"                -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   SCRIPT            [R]    []                    => Keyed;
    "EVAL_RO"                   -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   SCRIPT            [R]    []                    => Keyed;
    "FCALL"                     -3 [MOVABLE_KEYS SCRIPT SLOW]            FUNCTION          [RW]   []                    => Keyed;
    "FCALL_RO"                  -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   FUNCTION          [R]    []                    => Keyed;
    "FUNCTION"                  -2 []                                    NONE              []     []                    => Any;
    "FUNCTION|DELETE"            3 [WRITE]                               NONE              []     [scripting]           => Every(Same);
    "FUNCTION|DUMP"              2 []                                    NONE              []     [scripting]           => Any;
    "FUNCTION|FLUSH"            -2 [WRITE SLOW]                          NONE              []     [scripting]           => Every(Same);
    "FUNCTION|HELP"              2 []                                    NONE              []     [scripting]           => Any;
    "FUNCTION|KILL"              2 []                                    NONE              []     [scripting]           => Every(AnyOk);
    "FUNCTION|LIST"             -2 []                                    NONE              []     [scripting]           => Any;
    "FUNCTION|LOAD"             -3 [WRITE DENY_OOM]                      NONE              []     [scripting]           => Every(Same);
    "FUNCTION|RESTORE"          -3 [WRITE DENY_OOM]                      NONE              []     [scripting]           => Every(Same);
    "FUNCTION|STATS"             2 []                                    NONE              []     [scripting]           => Any;
    "SCRIPT"                    -2 []                                    NONE              []     []                    => Any;
    "SCRIPT|DEBUG"               3 []                                    NONE              []     [scripting]           => Refused(DEBUGGING);
    "SCRIPT|EXISTS"             -3 []                                    NONE              []     [scripting]           => Every(AllOnes);
    "SCRIPT|FLUSH"              -2 [SLOW]                                NONE              []     [scripting]           => Every(Same);
    "SCRIPT|HELP"                2 []                                    NONE              []     [scripting]           => Any;
    "SCRIPT|KILL"                2 []                                    NONE              []     [scripting]           => Every(AnyOk);
    "SCRIPT|LOAD"                3 [SLOW]                                NONE              []     [scripting]           => Every(Same);
    "SCRIPT|SHOW"                3 []                                    NONE              []     [scripting]           => Any;

    // Transactions
    "DISCARD"                    1 [FAST]                                NONE              []     [transaction]         => Local(Discard);
    "EXEC"                       1 []                                    NONE              []     [transaction]         => Local(Exec);
    "MULTI"                      1 [FAST]                                NONE              []     [transaction]         => Local(Multi);
    "UNWATCH"                    1 [FAST]                                NONE              []     [transaction]         => Local(Unwatch);
    "WATCH"                     -2 [FAST]                                ALL               [NO]   [transaction]         => Local(Watch);

    // Pub/sub
    "PSUBSCRIBE"                -2 [PUBSUB]                              NONE              []     []                    => Local(Psubscribe);
    "PUBLISH"                    3 [FAST PUBSUB]                         NONE              []     []                    => Local(Publish);
    "PUBSUB"                    -2 []                                    NONE              []     []                    => Any;
    "PUBSUB|CHANNELS"           -2 [PUBSUB]                              NONE              []     []                    => Local(PubsubChannels);
    "PUBSUB|HELP"                2 []                                    NONE              []     []                    => Any;
    "PUBSUB|NUMPAT"              2 [PUBSUB]                              NONE              []     []                    => Local(PubsubNumpat);
    "PUBSUB|NUMSUB"             -2 [PUBSUB]                              NONE              []     []                    => Local(PubsubNumsub);
    "PUBSUB|SHARDCHANNELS"      -2 [PUBSUB]                              NONE              []     []                    => Local(PubsubShardchannels);
    "PUBSUB|SHARDNUMSUB"        -2 [PUBSUB]                              NONE              []     []                    => Local(PubsubShardnumsub);
    "PUNSUBSCRIBE"              -1 [PUBSUB]                              NONE              []     []                    => Local(Punsubscribe);
    "SPUBLISH"                   3 [FAST PUBSUB]                         FIRST             [NO]   []                    => Local(Spublish);
    "SSUBSCRIBE"                -2 [PUBSUB]                              ALL               [NO]   []                    => Local(Ssubscribe);
    "SUBSCRIBE"                 -2 [PUBSUB]                              NONE              []     []                    => Local(Subscribe);
    "SUNSUBSCRIBE"              -1 [PUBSUB]                              ALL               [NO]   []                    => Local(Sunsubscribe);
    "UNSUBSCRIBE"               -1 [PUBSUB]                              NONE              []     []                    => Local(Unsubscribe);

    // Connections
    "AUTH"                      -2 [FAST NO_AUTH]                        NONE              []     [connection]          => Local(Auth);
    "CLIENT"                    -2 []                                    NONE              []     []                    => Any;
    "CLIENT|CACHING"             3 []                                    NONE              []     [connection]          => Local(ClientCaching);
    "CLIENT|CAPA"               -3 []                                    NONE              []     [connection]          => Local(ClientCapa);
    "CLIENT|GETNAME"             2 []                                    NONE              []     [connection]          => Local(ClientGetname);
    "CLIENT|GETREDIR"            2 []                                    NONE              []     [connection]          => Local(ClientGetredir);
    "CLIENT|HELP"                2 []                                    NONE              []     [connection]          => Local(ClientHelp);
    "CLIENT|ID"                  2 []                                    NONE              []     [connection]          => Local(ClientId);
    "CLIENT|IMPORT-SOURCE"       3 []                                    NONE              []     [connection]          => Refused(IMPORTING);
    "CLIENT|INFO"                2 []                                    NONE              []     [connection]          => Local(ClientInfo);
    "CLIENT|KILL"               -3 [ADMIN]                               NONE              []     [connection]          => Local(ClientKill);
    "CLIENT|LIST"               -2 [ADMIN]                               NONE              []     [connection]          => Local(ClientList);
    "CLIENT|NO-EVICT"            3 [ADMIN]                               NONE              []     [connection]          => Local(ClientNoEvict);
    "CLIENT|NO-TOUCH"            3 []                                    NONE              []     [connection]          => Local(ClientNoTouch);
    "CLIENT|PAUSE"              -3 [ADMIN]                               NONE              []     [connection]          => Local(ClientPause);
    "CLIENT|REPLY"               3 []                                    NONE              []     [connection]          => Local(ClientReply);
    "CLIENT|SETINFO"             4 []                                    NONE              []     [connection]          => Local(ClientSetinfo);
    "CLIENT|SETNAME"             3 []                                    NONE              []     [connection]          => Local(ClientSetname);
    "CLIENT|TRACKING"           -3 []                                    NONE              []     [connection]          => Local(ClientTracking);
    "CLIENT|TRACKINGINFO"        2 []                                    NONE              []     [connection]          => Local(ClientTrackinginfo);
    "CLIENT|UNBLOCK"            -3 [ADMIN]                               NONE              []     [connection]          => Local(ClientUnblock);
    "CLIENT|UNPAUSE"             2 [ADMIN]                               NONE              []     [connection]          => Local(ClientUnpause);
    "ECHO"                       2 [FAST]                                NONE              []     [connection]          => Local(Echo);
    "HELLO"                     -1 [FAST NO_AUTH]                        NONE              []     [connection]          => Local(Hello);
    "PING"                      -1 [FAST]                                NONE              []     [connection]          => Local(Ping);
    "QUIT"                      -1 [FAST NO_AUTH]                        NONE              []     [connection]          => Local(Quit);
    "RESET"                      1 [FAST NO_AUTH]                        NONE              []     [connection]          => Local(Reset);
    "SELECT"                     2 [FAST]                                NONE              []     [connection]          => Local(Select);

    // Servers
    "ACL"                       -2 []                                    NONE              []     []                    => Any;
    "ACL|CAT"                   -2 []                                    NONE              []     []                    => Local(AclCat);
    "ACL|DELUSER"               -3 [ADMIN]                               NONE              []     []                    => Local(AclChange);
    "ACL|DRYRUN"                -4 [ADMIN]                               NONE              []     []                    => Local(AclDryrun);
    "ACL|GENPASS"               -2 []                                    NONE              []     []                    => Local(AclGenpass);
    "ACL|GETUSER"                3 [ADMIN]                               NONE              []     []                    => Local(AclGetuser);
    "ACL|HELP"                   2 []                                    NONE              []     []                    => Any;
    "ACL|LIST"                   2 [ADMIN]                               NONE              []     []                    => Local(AclList);
    "ACL|LOAD"                   2 [ADMIN]                               NONE              []     []                    => Local(AclChange);
    "ACL|LOG"                   -2 [ADMIN]                               NONE              []     []                    => Local(AclLog);
    "ACL|SAVE"                   2 [ADMIN]                               NONE              []     []                    => Local(AclChange);
    "ACL|SETUSER"               -3 [ADMIN]                               NONE              []     []                    => Local(AclChange);
    "ACL|USERS"                  2 [ADMIN]                               NONE              []     []                    => Local(AclUsers);
    "ACL|WHOAMI"                 2 []                                    NONE              []     []                    => Local(AclWhoami);
    "BGREWRITEAOF"               1 [ADMIN SLOW]                          NONE              []     []                    => Every(Same);
    "BGSAVE"                    -1 [ADMIN SLOW]                          NONE              []     []                    => Every(Same);
    "COMMAND"                   -1 []                                    NONE              []     [connection]          => Any;
    "COMMAND|COUNT"              2 []                                    NONE              []     [connection]          => Any;
    "COMMAND|DOCS"              -2 []                                    NONE              []     [connection]          => Any;
    "COMMAND|GETKEYS"           -3 []                                    NONE              []     [connection]          => Any;
    "COMMAND|GETKEYSANDFLAGS"   -3 []                                    NONE              []     [connection]          => Any;
    "COMMAND|HELP"               2 []                                    NONE              []     [connection]          => Any;
    "COMMAND|INFO"              -2 []                                    NONE              []     [connection]          => Any;
    "COMMAND|LIST"              -2 []                                    NONE              []     [connection]          => Any;
    "CONFIG"                    -2 []                                    NONE              []     []                    => Any;
    "CONFIG|GET"                -3 [ADMIN]                               NONE              []     []                    => Local(ConfigGet);
    "CONFIG|HELP"                2 []                                    NONE              []     []                    => Any;
    "CONFIG|RESETSTAT"           2 [ADMIN]                               NONE              []     []                    => Local(ConfigResetstat);
    "CONFIG|REWRITE"             2 [ADMIN]                               NONE              []     []                    => Refused(CONFIGURING);
    "CONFIG|SET"                -4 [ADMIN]                               NONE              []     []                    => Local(ConfigSet);
    "DBSIZE"                     1 [READONLY FAST]                       NONE              []     [keyspace]            => Every(Sum);
    "DEBUG"                     -2 [ADMIN]                               NONE              []     []                    => Refused(DEBUGGING);
    "FAILOVER"                  -1 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "FLUSHALL"                  -1 [WRITE]                               NONE              []     [dangerous keyspace]  => Every(Same);
    "FLUSHDB"                   -1 [WRITE]                               NONE              []     [dangerous keyspace]  => Every(Same);
    "INFO"                      -1 []                                    NONE              []     [dangerous]           => Local(Info);
    "LASTSAVE"                   1 [FAST]                                NONE              []     [admin dangerous]     => Every(Least);
    "LATENCY"                   -2 []                                    NONE              []     []                    => Any;
    "LATENCY|DOCTOR"             2 [ADMIN]                               NONE              []     []                    => Every(Texts);
    "LATENCY|GRAPH"              3 [ADMIN]                               NONE              []     []                    => Refused(ONE_NODE);
    "LATENCY|HELP"               2 []                                    NONE              []     []                    => Any;
    "LATENCY|HISTOGRAM"         -2 [ADMIN]                               NONE              []     []                    => Refused(ONE_NODE);
    "LATENCY|HISTORY"            3 [ADMIN]                               NONE              []     []                    => Every(Concat);
    "LATENCY|LATEST"             2 [ADMIN]                               NONE              []     []                    => Every(Concat);
    "LATENCY|RESET"             -2 [ADMIN]                               NONE              []     []                    => Every(Sum);
    "LOLWUT"                    -1 [READONLY FAST]                       NONE              []     []                    => Local(Lolwut);
    "MEMORY"                    -2 []                                    NONE              []     []                    => Any;
    "MEMORY|DOCTOR"              2 []                                    NONE              []     []                    => Every(Texts);
    "MEMORY|HELP"                2 []                                    NONE              []     []                    => Any;
    "MEMORY|MALLOC-STATS"        2 []                                    NONE              []     []                    => Every(Texts);
    "MEMORY|PURGE"               2 [SLOW]                                NONE              []     []                    => Every(Same);
    "MEMORY|STATS"               2 []                                    NONE              []     []                    => Every(Figures);
    "MEMORY|USAGE"              -3 [READONLY]                            SECOND            [NO]   []                    => Keyed;
    "MODULE"                    -2 []                                    NONE              []     []                    => Any;
    "MODULE|HELP"                2 []                                    NONE              []     []                    => Any;
    "MODULE|LIST"                2 [ADMIN]                               NONE              []     []                    => Any;
    "MODULE|LOAD"               -3 [ADMIN]                               NONE              []     []                    => Refused(MODULES);
    "MODULE|LOADEX"             -3 [ADMIN]                               NONE              []     []                    => Refused(MODULES);
    "MODULE|UNLOAD"              3 [ADMIN]                               NONE              []     []                    => Refused(MODULES);
    "MONITOR"                    1 [ADMIN]                               NONE              []     []                    => Local(Monitor);
    "PSYNC"                     -3 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "REPLCONF"                  -1 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "REPLICAOF"                  3 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "RESTORE-ASKING"            -4 [WRITE DENY_OOM]                      FIRST             [W]    [dangerous keyspace]  => Refused(RESTORING);
    "ROLE"                       1 [FAST]                                NONE              []     [admin dangerous]     => Local(Role);
    "SAVE"                       1 [ADMIN]                               NONE              []     []                    => Refused(PERSISTENCE);
    "SHUTDOWN"                  -1 [ADMIN]                               NONE              []     []                    => Refused(STOPPING);
    "SLAVEOF"                    3 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "SLOWLOG"                   -2 []                                    NONE              []     []                    => Any;
    "SLOWLOG|GET"               -2 [ADMIN]                               NONE              []     []                    => Local(SlowlogGet);
    "SLOWLOG|HELP"               2 []                                    NONE              []     []                    => Any;
    "SLOWLOG|LEN"                2 [ADMIN]                               NONE              []     []                    => Local(SlowlogLen);
    "SLOWLOG|RESET"              2 [ADMIN]                               NONE              []     []                    => Local(SlowlogReset);
    "SWAPDB"                     3 [WRITE FAST]                          NONE              []     [dangerous keyspace]  => OnlyNode(SWAPPING);
    "SYNC"                       1 [ADMIN]                               NONE              []     []                    => Refused(REPLICATION);
    "TIME"                       1 [FAST]                                NONE              []     []                    => Local(Time);

    // Cluster
    "ASKING"                     1 [FAST]                                NONE              []     [connection]          => Local(ClusterMode);
    "CLUSTER"                   -2 []                                    NONE              []     []                    => Any;
    "CLUSTER|ADDSLOTS"          -3 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|ADDSLOTSRANGE"     -4 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|BUMPEPOCH"          2 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|COUNT-FAILURE-REPORTS"  3 [ADMIN]                               NONE              []     []                    => Local(Cluster);
    "CLUSTER|COUNTKEYSINSLOT"    3 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|DELSLOTS"          -3 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|DELSLOTSRANGE"     -4 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|FAILOVER"          -2 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|FLUSHSLOTS"         2 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|FORGET"             3 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|GETKEYSINSLOT"      4 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|HELP"               2 []                                    NONE              []     []                    => Any;
    "CLUSTER|INFO"               2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|KEYSLOT"            3 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|LINKS"              2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|MEET"              -4 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|MYID"               2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|MYSHARDID"          2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|NODES"              2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|REPLICAS"           3 [ADMIN]                               NONE              []     []                    => Local(Cluster);
    "CLUSTER|REPLICATE"          3 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|RESET"             -2 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|SAVECONFIG"         2 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|SET-CONFIG-EPOCH"   3 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|SETSLOT"           -4 [ADMIN]                               NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|SHARDS"             2 []                                    NONE              []     []                    => Local(Cluster);
    "CLUSTER|SLAVES"             3 [ADMIN]                               NONE              []     []                    => Local(Cluster);
    "CLUSTER|SLOT-STATS"        -4 []                                    NONE              []     []                    => Refused(PLACEMENT);
    "CLUSTER|SLOTS"              2 []                                    NONE              []     []                    => Local(Cluster);
    "READONLY"                   1 [FAST]                                NONE              []     [connection]          => Local(ClusterMode);
    "READWRITE"                  1 [FAST]                                NONE              []     [connection]          => Local(ClusterMode);

    // Ours
    "SWITCHYARD"                -1 [ADMIN]                               NONE              []     []                    => Local(Switchyard);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_newer_minor_version_is_not_covered() {
        for (flavour, version, is_covered, has_mortal_members) in [
            ("redis", "7.0.15", true, false),
            ("redis", "8.4.0", true, false),
            ("redis", "8.12.3", true, true),
            ("redis", "8.13.0", false, true),
            ("redis", "9.0.0", false, true),
            ("valkey", "9.1.2", true, false),
            ("valkey", "9.2.0", false, true),
            ("redis", "unstable", false, true),
            ("redis", "", false, true),
        ] {
            assert_eq!(
                (covers(flavour, version), members_expire(flavour, version)),
                (is_covered, has_mortal_members),
                "{flavour} {version}"
            );
            assert_eq!(why_not_covered(flavour, version).is_none(), is_covered);
        }
        let redis = why_not_covered("redis", "8.13.0").expect("a reason");
        assert!(
            redis.starts_with("redis 8.13.0 is newer than the command table, which covers Redis up to 8.12"),
            "{redis}"
        );
    }
}
