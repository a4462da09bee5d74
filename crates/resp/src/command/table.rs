//! The rows of the command table.
//!
//! One line each: name, arity, flags, where the keys are, who answers. Arity, flags and keys are what Redis 7.0 to 8 and Valkey 7.2 to 9
//! say in `COMMAND`; the row is there whether or not today's node has the command, because the node's own error is the best one.
//! `tests/command_table/` holds the rows against real servers and finds commands that are missing here.
//!
//! How the handling was chosen where it is not obvious:
//! - What describes one server (`LATENCY GRAPH`, `LATENCY HISTOGRAM`) is refused: an answer of any one node would mislead.
//! - What tools poll is merged: `LATENCY LATEST`, `SLOWLOG LEN`, `DBSIZE`. `LATENCY RESET` and `SLOWLOG RESET` reach every node.
//! - `FLUSHALL` is not slow although it may take long: it must keep its place among the commands of its client.
//! - `MOVE` and `COPY ... DB` pass by their keys: the other database is the same node's.
//! - `HELP` of a container is any node's; its text does not matter to routing.

use super::{Flags, Handling, Keys, Local, Merge, Split};

use Handling::{Any, Every, Keyed, Refused};

pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) arity: i16,
    pub(super) flags: Flags,
    pub(super) keys: Keys,
    pub(super) handling: Handling,
}

// Why something is refused, and what to do instead.
const PLACEMENT: &str = "Switchyard places the slots. Change its list of nodes instead";
const DEBUGGING: &str = "it is for debugging one server. Call it at the node itself";
const STOPPING: &str = "it would stop a node under all its clients. Stop the node itself, or Switchyard by SIGTERM";
const REPLICATION: &str = "replication is arranged between nodes. Call it at the node itself";
const CONFIGURING: &str = "what CONFIG SET changes is written nowhere. Change Switchyard's configuration file (SIGHUP reloads it), and call CONFIG REWRITE at each node";
const MODULES: &str = "modules are loaded at the nodes. Load it at every node; Switchyard then learns its commands";
const PERSISTENCE: &str = "it would stop every node until its file is written. Use BGSAVE";
const MIGRATING: &str = "where a key lives is the router's business, and a key that left behind its back would be lost to clients";
const RESTORING: &str = "it is for moves between nodes of a cluster. Use RESTORE";
const SWAPPING: &str = "databases of several nodes cannot be swapped at one instant";
const ONE_NODE: &str = "it describes one server, and any one node's answer would mislead. Call it at the node itself";
const IMPORTING: &str = "it marks a connection to one server for imports. Call it at the node itself";

macro_rules! rows {
    ($($name:literal $arity:literal [$($flag:ident)*] $keys:ident => $handling:expr;)*) => {
        /// All of them; a container stands with its subcommands, in any order.
        pub(super) static ROWS: &[Row] = &[$(Row {
            name: $name,
            arity: $arity,
            flags: Flags(0 $(| Flags::$flag.0)*),
            keys: Keys::$keys,
            handling: $handling,
        }),*];
    };
}

rows! {
    // Strings
    "APPEND"                     3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "DECR"                       2 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "DECRBY"                     3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "DELEX"                     -2 [WRITE FAST]                          FIRST             => Keyed;
    "DELIFEQ"                    3 [WRITE FAST]                          FIRST             => Keyed;
    "DIGEST"                     2 [READONLY FAST]                       FIRST             => Keyed;
    "GET"                        2 [READONLY FAST]                       FIRST             => Keyed;
    "GETDEL"                     2 [WRITE FAST]                          FIRST             => Keyed;
    "GETEX"                     -2 [WRITE FAST]                          FIRST             => Keyed;
    "GETRANGE"                   4 [READONLY]                            FIRST             => Keyed;
    "GETSET"                     3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "INCR"                       2 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "INCRBY"                     3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "INCRBYFLOAT"                3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "LCS"                       -3 [READONLY SLOW]                       FIRST_TWO         => Keyed;
    "MGET"                      -2 [READONLY FAST]                       ALL               => Handling::Split(Split::Values);
    "MSET"                      -3 [WRITE DENY_OOM]                      PAIRS             => Handling::Split(Split::Pairs);
    "MSETEX"                    -4 [WRITE DENY_OOM MOVABLE_KEYS]         NUMBERED_PAIRS    => Keyed;
    "MSETNX"                    -3 [WRITE DENY_OOM]                      PAIRS             => Keyed;
    "PSETEX"                     4 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "SET"                       -3 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "SETEX"                      4 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "SETNX"                      3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "SETRANGE"                   4 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "STRLEN"                     2 [READONLY FAST]                       FIRST             => Keyed;
    "SUBSTR"                     4 [READONLY]                            FIRST             => Keyed;

    // Bitmaps
    "BITCOUNT"                  -2 [READONLY]                            FIRST             => Keyed;
    "BITFIELD"                  -2 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "BITFIELD_RO"               -2 [READONLY FAST]                       FIRST             => Keyed;
    "BITOP"                     -4 [WRITE DENY_OOM SLOW]                 FROM_SECOND       => Keyed;
    "BITPOS"                    -3 [READONLY]                            FIRST             => Keyed;
    "GETBIT"                     3 [READONLY FAST]                       FIRST             => Keyed;
    "SETBIT"                     4 [WRITE DENY_OOM]                      FIRST             => Keyed;

    // HyperLogLogs
    "PFADD"                     -2 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "PFCOUNT"                   -2 [READONLY]                            ALL               => Keyed;
    "PFDEBUG"                    3 [WRITE DENY_OOM ADMIN]                SECOND            => Refused(DEBUGGING);
    "PFMERGE"                   -2 [WRITE DENY_OOM SLOW]                 ALL               => Keyed;
    "PFSELFTEST"                 1 [ADMIN]                               NONE              => Refused(DEBUGGING);

    // Hashes
    "HDEL"                      -3 [WRITE FAST]                          FIRST             => Keyed;
    "HEXISTS"                    3 [READONLY FAST]                       FIRST             => Keyed;
    "HEXPIRE"                   -6 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HEXPIREAT"                 -6 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HEXPIRETIME"               -5 [READONLY FAST]                       FIRST             => Keyed;
    "HGET"                       3 [READONLY FAST]                       FIRST             => Keyed;
    "HGETALL"                    2 [READONLY]                            FIRST             => Keyed;
    "HGETDEL"                   -5 [WRITE FAST]                          FIRST             => Keyed;
    "HGETEX"                    -5 [WRITE FAST]                          FIRST             => Keyed;
    "HINCRBY"                    4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HINCRBYFLOAT"               4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HKEYS"                      2 [READONLY]                            FIRST             => Keyed;
    "HLEN"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "HMGET"                     -3 [READONLY FAST]                       FIRST             => Keyed;
    "HMSET"                     -4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HPERSIST"                  -5 [WRITE FAST]                          FIRST             => Keyed;
    "HPEXPIRE"                  -6 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HPEXPIREAT"                -6 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HPEXPIRETIME"              -5 [READONLY FAST]                       FIRST             => Keyed;
    "HPTTL"                     -5 [READONLY FAST]                       FIRST             => Keyed;
    "HRANDFIELD"                -2 [READONLY]                            FIRST             => Keyed;
    "HSCAN"                     -3 [READONLY]                            FIRST             => Keyed;
    "HSET"                      -4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HSETEX"                    -6 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HSETNX"                     4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "HSTRLEN"                    3 [READONLY FAST]                       FIRST             => Keyed;
    "HTTL"                      -5 [READONLY FAST]                       FIRST             => Keyed;
    "HVALS"                      2 [READONLY]                            FIRST             => Keyed;

    // Lists
    "BLMOVE"                     6 [WRITE DENY_OOM BLOCKING]             FIRST_TWO         => Keyed;
    "BLMPOP"                    -5 [WRITE BLOCKING MOVABLE_KEYS]         POP_AFTER_TIMEOUT => Keyed;
    "BLPOP"                     -3 [WRITE BLOCKING]                      ALL_BUT_LAST      => Keyed;
    "BRPOP"                     -3 [WRITE BLOCKING]                      ALL_BUT_LAST      => Keyed;
    "BRPOPLPUSH"                 4 [WRITE DENY_OOM BLOCKING]             FIRST_TWO         => Keyed;
    "LINDEX"                     3 [READONLY]                            FIRST             => Keyed;
    "LINSERT"                    5 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "LLEN"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "LMOVE"                      5 [WRITE DENY_OOM]                      FIRST_TWO         => Keyed;
    "LMPOP"                     -4 [WRITE MOVABLE_KEYS]                  POP               => Keyed;
    "LPOP"                      -2 [WRITE FAST]                          FIRST             => Keyed;
    "LPOS"                      -3 [READONLY]                            FIRST             => Keyed;
    "LPUSH"                     -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "LPUSHX"                    -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "LRANGE"                     4 [READONLY]                            FIRST             => Keyed;
    "LREM"                       4 [WRITE]                               FIRST             => Keyed;
    "LSET"                       4 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "LTRIM"                      4 [WRITE]                               FIRST             => Keyed;
    "RPOP"                      -2 [WRITE FAST]                          FIRST             => Keyed;
    "RPOPLPUSH"                  3 [WRITE DENY_OOM]                      FIRST_TWO         => Keyed;
    "RPUSH"                     -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "RPUSHX"                    -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;

    // Sets
    "SADD"                      -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "SCARD"                      2 [READONLY FAST]                       FIRST             => Keyed;
    "SDIFF"                     -2 [READONLY SLOW]                       ALL               => Keyed;
    "SDIFFSTORE"                -3 [WRITE DENY_OOM SLOW]                 ALL               => Keyed;
    "SINTER"                    -2 [READONLY SLOW]                       ALL               => Keyed;
    "SINTERCARD"                -3 [READONLY MOVABLE_KEYS SLOW]          SETS              => Keyed;
    "SINTERSTORE"               -3 [WRITE DENY_OOM SLOW]                 ALL               => Keyed;
    "SISMEMBER"                  3 [READONLY FAST]                       FIRST             => Keyed;
    "SMEMBERS"                   2 [READONLY]                            FIRST             => Keyed;
    "SMISMEMBER"                -3 [READONLY FAST]                       FIRST             => Keyed;
    "SMOVE"                      4 [WRITE FAST]                          FIRST_TWO         => Keyed;
    "SPOP"                      -2 [WRITE FAST]                          FIRST             => Keyed;
    "SRANDMEMBER"               -2 [READONLY]                            FIRST             => Keyed;
    "SREM"                      -3 [WRITE FAST]                          FIRST             => Keyed;
    "SSCAN"                     -3 [READONLY]                            FIRST             => Keyed;
    "SUNION"                    -2 [READONLY SLOW]                       ALL               => Keyed;
    "SUNIONSTORE"               -3 [WRITE DENY_OOM SLOW]                 ALL               => Keyed;

    // Sorted sets
    "BZMPOP"                    -5 [WRITE BLOCKING MOVABLE_KEYS]         POP_AFTER_TIMEOUT => Keyed;
    "BZPOPMAX"                  -3 [WRITE FAST BLOCKING]                 ALL_BUT_LAST      => Keyed;
    "BZPOPMIN"                  -3 [WRITE FAST BLOCKING]                 ALL_BUT_LAST      => Keyed;
    "ZADD"                      -4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "ZCARD"                      2 [READONLY FAST]                       FIRST             => Keyed;
    "ZCOUNT"                     4 [READONLY FAST]                       FIRST             => Keyed;
    "ZDIFF"                     -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             => Keyed;
    "ZDIFFSTORE"                -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       => Keyed;
    "ZINCRBY"                    4 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "ZINTER"                    -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             => Keyed;
    "ZINTERCARD"                -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             => Keyed;
    "ZINTERSTORE"               -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       => Keyed;
    "ZLEXCOUNT"                  4 [READONLY FAST]                       FIRST             => Keyed;
    "ZMPOP"                     -4 [WRITE MOVABLE_KEYS]                  POP               => Keyed;
    "ZMSCORE"                   -3 [READONLY FAST]                       FIRST             => Keyed;
    "ZPOPMAX"                   -2 [WRITE FAST]                          FIRST             => Keyed;
    "ZPOPMIN"                   -2 [WRITE FAST]                          FIRST             => Keyed;
    "ZRANDMEMBER"               -2 [READONLY]                            FIRST             => Keyed;
    "ZRANGE"                    -4 [READONLY]                            FIRST             => Keyed;
    "ZRANGEBYLEX"               -4 [READONLY]                            FIRST             => Keyed;
    "ZRANGEBYSCORE"             -4 [READONLY]                            FIRST             => Keyed;
    "ZRANGESTORE"               -5 [WRITE DENY_OOM]                      FIRST_TWO         => Keyed;
    "ZRANK"                     -3 [READONLY FAST]                       FIRST             => Keyed;
    "ZREM"                      -3 [WRITE FAST]                          FIRST             => Keyed;
    "ZREMRANGEBYLEX"             4 [WRITE]                               FIRST             => Keyed;
    "ZREMRANGEBYRANK"            4 [WRITE]                               FIRST             => Keyed;
    "ZREMRANGEBYSCORE"           4 [WRITE]                               FIRST             => Keyed;
    "ZREVRANGE"                 -4 [READONLY]                            FIRST             => Keyed;
    "ZREVRANGEBYLEX"            -4 [READONLY]                            FIRST             => Keyed;
    "ZREVRANGEBYSCORE"          -4 [READONLY]                            FIRST             => Keyed;
    "ZREVRANK"                  -3 [READONLY FAST]                       FIRST             => Keyed;
    "ZSCAN"                     -3 [READONLY]                            FIRST             => Keyed;
    "ZSCORE"                     3 [READONLY FAST]                       FIRST             => Keyed;
    "ZUNION"                    -3 [READONLY MOVABLE_KEYS SLOW]          ZSETS             => Keyed;
    "ZUNIONSTORE"               -4 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    ZSETS_STORE       => Keyed;

    // Geo
    "GEOADD"                    -5 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "GEODIST"                   -4 [READONLY]                            FIRST             => Keyed;
    "GEOHASH"                   -2 [READONLY]                            FIRST             => Keyed;
    "GEOPOS"                    -2 [READONLY]                            FIRST             => Keyed;
    "GEORADIUS"                 -6 [WRITE DENY_OOM MOVABLE_KEYS]         GEO_STORE         => Keyed;
    "GEORADIUSBYMEMBER"         -5 [WRITE DENY_OOM MOVABLE_KEYS]         GEO_STORE_BY_MEMBER => Keyed;
    "GEORADIUSBYMEMBER_RO"      -5 [READONLY]                            FIRST             => Keyed;
    "GEORADIUS_RO"              -6 [READONLY]                            FIRST             => Keyed;
    "GEOSEARCH"                 -7 [READONLY]                            FIRST             => Keyed;
    "GEOSEARCHSTORE"            -8 [WRITE DENY_OOM]                      FIRST_TWO         => Keyed;

    // Streams
    "XACK"                      -4 [WRITE FAST]                          FIRST             => Keyed;
    "XACKDEL"                   -6 [WRITE FAST]                          FIRST             => Keyed;
    "XADD"                      -5 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "XAUTOCLAIM"                -6 [WRITE FAST]                          FIRST             => Keyed;
    "XCFGSET"                   -2 [WRITE FAST]                          FIRST             => Keyed;
    "XCLAIM"                    -6 [WRITE FAST]                          FIRST             => Keyed;
    "XDEL"                      -3 [WRITE FAST]                          FIRST             => Keyed;
    "XDELEX"                    -5 [WRITE FAST]                          FIRST             => Keyed;
    "XGROUP"                    -2 []                                    NONE              => Any;
    "XGROUP|CREATE"             -5 [WRITE DENY_OOM]                      SECOND            => Keyed;
    "XGROUP|CREATECONSUMER"      5 [WRITE DENY_OOM]                      SECOND            => Keyed;
    "XGROUP|DELCONSUMER"         5 [WRITE]                               SECOND            => Keyed;
    "XGROUP|DESTROY"             4 [WRITE]                               SECOND            => Keyed;
    "XGROUP|HELP"                2 []                                    NONE              => Any;
    "XGROUP|SETID"              -5 [WRITE]                               SECOND            => Keyed;
    "XINFO"                     -2 []                                    NONE              => Any;
    "XINFO|CONSUMERS"            4 [READONLY]                            SECOND            => Keyed;
    "XINFO|GROUPS"               3 [READONLY]                            SECOND            => Keyed;
    "XINFO|HELP"                 2 []                                    NONE              => Any;
    "XINFO|STREAM"              -3 [READONLY]                            SECOND            => Keyed;
    "XLEN"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "XPENDING"                  -3 [READONLY]                            FIRST             => Keyed;
    "XRANGE"                    -4 [READONLY]                            FIRST             => Keyed;
    "XREAD"                     -4 [READONLY BLOCKING MOVABLE_KEYS]      STREAMS           => Keyed;
    "XREADGROUP"                -7 [WRITE BLOCKING MOVABLE_KEYS]         STREAMS           => Keyed;
    "XREVRANGE"                 -4 [READONLY]                            FIRST             => Keyed;
    "XSETID"                    -3 [WRITE DENY_OOM FAST]                 FIRST             => Keyed;
    "XTRIM"                     -4 [WRITE]                               FIRST             => Keyed;

    // Vector sets (Redis 8)
    "VADD"                      -5 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "VCARD"                      2 [READONLY FAST]                       FIRST             => Keyed;
    "VDIM"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "VEMB"                      -3 [READONLY FAST]                       FIRST             => Keyed;
    "VGETATTR"                   3 [READONLY FAST]                       FIRST             => Keyed;
    "VINFO"                      2 [READONLY FAST]                       FIRST             => Keyed;
    "VISMEMBER"                  3 [READONLY FAST]                       FIRST             => Keyed;
    "VLINKS"                    -3 [READONLY FAST]                       FIRST             => Keyed;
    "VRANDMEMBER"               -2 [READONLY FAST]                       FIRST             => Keyed;
    "VRANGE"                    -4 [READONLY]                            FIRST             => Keyed;
    "VREM"                       3 [WRITE]                               FIRST             => Keyed;
    "VSETATTR"                   4 [WRITE FAST]                          FIRST             => Keyed;
    "VSIM"                      -4 [READONLY]                            FIRST             => Keyed;

    // Keys of any type
    "COPY"                      -3 [WRITE DENY_OOM]                      FIRST_TWO         => Keyed;
    "DEL"                       -2 [WRITE]                               ALL               => Handling::Split(Split::Count);
    "DUMP"                       2 [READONLY]                            FIRST             => Keyed;
    "EXISTS"                    -2 [READONLY FAST]                       ALL               => Handling::Split(Split::Count);
    "EXPIRE"                    -3 [WRITE FAST]                          FIRST             => Keyed;
    "EXPIREAT"                  -3 [WRITE FAST]                          FIRST             => Keyed;
    "EXPIRETIME"                 2 [READONLY FAST]                       FIRST             => Keyed;
    "KEYS"                       2 [READONLY SLOW]                       NONE              => Every(Merge::Concat);
    "MIGRATE"                   -6 [WRITE MOVABLE_KEYS]                  MIGRATE           => Refused(MIGRATING);
    "MOVE"                       3 [WRITE FAST]                          FIRST             => Keyed;
    "OBJECT"                    -2 []                                    NONE              => Any;
    "OBJECT|ENCODING"            3 [READONLY]                            SECOND            => Keyed;
    "OBJECT|FREQ"                3 [READONLY]                            SECOND            => Keyed;
    "OBJECT|HELP"                2 []                                    NONE              => Any;
    "OBJECT|IDLETIME"            3 [READONLY]                            SECOND            => Keyed;
    "OBJECT|REFCOUNT"            3 [READONLY]                            SECOND            => Keyed;
    "PERSIST"                    2 [WRITE FAST]                          FIRST             => Keyed;
    "PEXPIRE"                   -3 [WRITE FAST]                          FIRST             => Keyed;
    "PEXPIREAT"                 -3 [WRITE FAST]                          FIRST             => Keyed;
    "PEXPIRETIME"                2 [READONLY FAST]                       FIRST             => Keyed;
    "PTTL"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "RANDOMKEY"                  1 [READONLY]                            NONE              => Handling::Local(Local::RandomKey);
    "RENAME"                     3 [WRITE]                               FIRST_TWO         => Keyed;
    "RENAMENX"                   3 [WRITE FAST]                          FIRST_TWO         => Keyed;
    "RESTORE"                   -4 [WRITE DENY_OOM]                      FIRST             => Keyed;
    "SCAN"                      -2 [READONLY]                            NONE              => Handling::Local(Local::Scan);
    "SORT"                      -2 [WRITE DENY_OOM MOVABLE_KEYS SLOW]    SORT              => Keyed;
    "SORT_RO"                   -2 [READONLY MOVABLE_KEYS SLOW]          SORT_RO           => Keyed;
    "TOUCH"                     -2 [READONLY FAST]                       ALL               => Handling::Split(Split::Count);
    "TTL"                        2 [READONLY FAST]                       FIRST             => Keyed;
    "TYPE"                       2 [READONLY FAST]                       FIRST             => Keyed;
    "UNLINK"                    -2 [WRITE FAST]                          ALL               => Handling::Split(Split::Count);
    "WAIT"                       3 [BLOCKING]                            NONE              => Handling::Local(Local::Wait);
    "WAITAOF"                    4 [BLOCKING]                            NONE              => Handling::Local(Local::Wait);

    // Scripts and functions
    "EVAL"                      -3 [MOVABLE_KEYS SCRIPT SLOW]            SCRIPT            => Keyed;
    "EVALSHA"                   -3 [MOVABLE_KEYS SCRIPT SLOW]            SCRIPT            => Keyed;
    "EVALSHA_RO"                -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   SCRIPT            => Keyed;
    "EVAL_RO"                   -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   SCRIPT            => Keyed;
    "FCALL"                     -3 [MOVABLE_KEYS SCRIPT SLOW]            FUNCTION          => Keyed;
    "FCALL_RO"                  -3 [READONLY MOVABLE_KEYS SCRIPT SLOW]   FUNCTION          => Keyed;
    "FUNCTION"                  -2 []                                    NONE              => Any;
    "FUNCTION|DELETE"            3 [WRITE]                               NONE              => Every(Merge::Same);
    "FUNCTION|DUMP"              2 []                                    NONE              => Any;
    "FUNCTION|FLUSH"            -2 [WRITE]                               NONE              => Every(Merge::Same);
    "FUNCTION|HELP"              2 []                                    NONE              => Any;
    "FUNCTION|KILL"              2 []                                    NONE              => Every(Merge::AnyOk);
    "FUNCTION|LIST"             -2 []                                    NONE              => Any;
    "FUNCTION|LOAD"             -3 [WRITE DENY_OOM]                      NONE              => Every(Merge::Same);
    "FUNCTION|RESTORE"          -3 [WRITE DENY_OOM]                      NONE              => Every(Merge::Same);
    "FUNCTION|STATS"             2 []                                    NONE              => Any;
    "SCRIPT"                    -2 []                                    NONE              => Any;
    "SCRIPT|DEBUG"               3 []                                    NONE              => Refused(DEBUGGING);
    "SCRIPT|EXISTS"             -3 []                                    NONE              => Every(Merge::AllOnes);
    "SCRIPT|FLUSH"              -2 []                                    NONE              => Every(Merge::Same);
    "SCRIPT|HELP"                2 []                                    NONE              => Any;
    "SCRIPT|KILL"                2 []                                    NONE              => Every(Merge::AnyOk);
    "SCRIPT|LOAD"                3 []                                    NONE              => Every(Merge::Same);
    "SCRIPT|SHOW"                3 []                                    NONE              => Any;

    // Transactions
    "DISCARD"                    1 [FAST]                                NONE              => Handling::Local(Local::Discard);
    "EXEC"                       1 []                                    NONE              => Handling::Local(Local::Exec);
    "MULTI"                      1 [FAST]                                NONE              => Handling::Local(Local::Multi);
    "UNWATCH"                    1 [FAST]                                NONE              => Handling::Local(Local::Unwatch);
    "WATCH"                     -2 [FAST]                                ALL               => Handling::Local(Local::Watch);

    // Pub/sub
    "PSUBSCRIBE"                -2 [PUBSUB]                              NONE              => Handling::Local(Local::Psubscribe);
    "PUBLISH"                    3 [FAST PUBSUB]                         NONE              => Handling::Local(Local::Publish);
    "PUBSUB"                    -2 []                                    NONE              => Any;
    "PUBSUB|CHANNELS"           -2 [PUBSUB]                              NONE              => Handling::Local(Local::PubsubChannels);
    "PUBSUB|HELP"                2 []                                    NONE              => Any;
    "PUBSUB|NUMPAT"              2 [PUBSUB]                              NONE              => Handling::Local(Local::PubsubNumpat);
    "PUBSUB|NUMSUB"             -2 [PUBSUB]                              NONE              => Handling::Local(Local::PubsubNumsub);
    "PUBSUB|SHARDCHANNELS"      -2 [PUBSUB]                              NONE              => Handling::Local(Local::PubsubShardchannels);
    "PUBSUB|SHARDNUMSUB"        -2 [PUBSUB]                              NONE              => Handling::Local(Local::PubsubShardnumsub);
    "PUNSUBSCRIBE"              -1 [PUBSUB]                              NONE              => Handling::Local(Local::Punsubscribe);
    "SPUBLISH"                   3 [FAST PUBSUB]                         FIRST             => Handling::Local(Local::Spublish);
    "SSUBSCRIBE"                -2 [PUBSUB]                              ALL               => Handling::Local(Local::Ssubscribe);
    "SUBSCRIBE"                 -2 [PUBSUB]                              NONE              => Handling::Local(Local::Subscribe);
    "SUNSUBSCRIBE"              -1 [PUBSUB]                              ALL               => Handling::Local(Local::Sunsubscribe);
    "UNSUBSCRIBE"               -1 [PUBSUB]                              NONE              => Handling::Local(Local::Unsubscribe);

    // Connections
    "AUTH"                      -2 [FAST NO_AUTH]                        NONE              => Handling::Local(Local::Auth);
    "CLIENT"                    -2 []                                    NONE              => Any;
    "CLIENT|CACHING"             3 []                                    NONE              => Handling::Local(Local::ClientCaching);
    "CLIENT|CAPA"               -3 []                                    NONE              => Handling::Local(Local::ClientCapa);
    "CLIENT|GETNAME"             2 []                                    NONE              => Handling::Local(Local::ClientGetname);
    "CLIENT|GETREDIR"            2 []                                    NONE              => Handling::Local(Local::ClientGetredir);
    "CLIENT|HELP"                2 []                                    NONE              => Handling::Local(Local::ClientHelp);
    "CLIENT|ID"                  2 []                                    NONE              => Handling::Local(Local::ClientId);
    "CLIENT|IMPORT-SOURCE"       3 []                                    NONE              => Refused(IMPORTING);
    "CLIENT|INFO"                2 []                                    NONE              => Handling::Local(Local::ClientInfo);
    "CLIENT|KILL"               -3 [ADMIN]                               NONE              => Handling::Local(Local::ClientKill);
    "CLIENT|LIST"               -2 [ADMIN]                               NONE              => Handling::Local(Local::ClientList);
    "CLIENT|NO-EVICT"            3 [ADMIN]                               NONE              => Handling::Local(Local::ClientNoEvict);
    "CLIENT|NO-TOUCH"            3 []                                    NONE              => Handling::Local(Local::ClientNoTouch);
    "CLIENT|PAUSE"              -3 [ADMIN]                               NONE              => Handling::Local(Local::ClientPause);
    "CLIENT|REPLY"               3 []                                    NONE              => Handling::Local(Local::ClientReply);
    "CLIENT|SETINFO"             4 []                                    NONE              => Handling::Local(Local::ClientSetinfo);
    "CLIENT|SETNAME"             3 []                                    NONE              => Handling::Local(Local::ClientSetname);
    "CLIENT|TRACKING"           -3 []                                    NONE              => Handling::Local(Local::ClientTracking);
    "CLIENT|TRACKINGINFO"        2 []                                    NONE              => Handling::Local(Local::ClientTrackinginfo);
    "CLIENT|UNBLOCK"            -3 [ADMIN]                               NONE              => Handling::Local(Local::ClientUnblock);
    "CLIENT|UNPAUSE"             2 [ADMIN]                               NONE              => Handling::Local(Local::ClientUnpause);
    "ECHO"                       2 [FAST]                                NONE              => Handling::Local(Local::Echo);
    "HELLO"                     -1 [FAST NO_AUTH]                        NONE              => Handling::Local(Local::Hello);
    "PING"                      -1 [FAST]                                NONE              => Handling::Local(Local::Ping);
    "QUIT"                      -1 [FAST NO_AUTH]                        NONE              => Handling::Local(Local::Quit);
    "RESET"                      1 [FAST NO_AUTH]                        NONE              => Handling::Local(Local::Reset);
    "SELECT"                     2 [FAST]                                NONE              => Handling::Local(Local::Select);

    // Servers
    "ACL"                       -2 []                                    NONE              => Any;
    "ACL|CAT"                   -2 []                                    NONE              => Handling::Local(Local::AclCat);
    "ACL|DELUSER"               -3 [ADMIN]                               NONE              => Handling::Local(Local::AclChange);
    "ACL|DRYRUN"                -4 [ADMIN]                               NONE              => Handling::Local(Local::AclDryrun);
    "ACL|GENPASS"               -2 []                                    NONE              => Handling::Local(Local::AclGenpass);
    "ACL|GETUSER"                3 [ADMIN]                               NONE              => Handling::Local(Local::AclGetuser);
    "ACL|HELP"                   2 []                                    NONE              => Any;
    "ACL|LIST"                   2 [ADMIN]                               NONE              => Handling::Local(Local::AclList);
    "ACL|LOAD"                   2 [ADMIN]                               NONE              => Handling::Local(Local::AclChange);
    "ACL|LOG"                   -2 [ADMIN]                               NONE              => Handling::Local(Local::AclLog);
    "ACL|SAVE"                   2 [ADMIN]                               NONE              => Handling::Local(Local::AclChange);
    "ACL|SETUSER"               -3 [ADMIN]                               NONE              => Handling::Local(Local::AclChange);
    "ACL|USERS"                  2 [ADMIN]                               NONE              => Handling::Local(Local::AclUsers);
    "ACL|WHOAMI"                 2 []                                    NONE              => Handling::Local(Local::AclWhoami);
    "BGREWRITEAOF"               1 [ADMIN]                               NONE              => Every(Merge::Same);
    "BGSAVE"                    -1 [ADMIN]                               NONE              => Every(Merge::Same);
    "COMMAND"                   -1 []                                    NONE              => Any;
    "COMMAND|COUNT"              2 []                                    NONE              => Any;
    "COMMAND|DOCS"              -2 []                                    NONE              => Any;
    "COMMAND|GETKEYS"           -3 []                                    NONE              => Any;
    "COMMAND|GETKEYSANDFLAGS"   -3 []                                    NONE              => Any;
    "COMMAND|HELP"               2 []                                    NONE              => Any;
    "COMMAND|INFO"              -2 []                                    NONE              => Any;
    "COMMAND|LIST"              -2 []                                    NONE              => Any;
    "CONFIG"                    -2 []                                    NONE              => Any;
    "CONFIG|GET"                -3 [ADMIN]                               NONE              => Handling::Local(Local::ConfigGet);
    "CONFIG|HELP"                2 []                                    NONE              => Any;
    "CONFIG|RESETSTAT"           2 [ADMIN]                               NONE              => Handling::Local(Local::ConfigResetstat);
    "CONFIG|REWRITE"             2 [ADMIN]                               NONE              => Refused(CONFIGURING);
    "CONFIG|SET"                -4 [ADMIN]                               NONE              => Handling::Local(Local::ConfigSet);
    "DBSIZE"                     1 [READONLY FAST]                       NONE              => Every(Merge::Sum);
    "DEBUG"                     -2 [ADMIN]                               NONE              => Refused(DEBUGGING);
    "FAILOVER"                  -1 [ADMIN]                               NONE              => Refused(REPLICATION);
    "FLUSHALL"                  -1 [WRITE]                               NONE              => Every(Merge::Same);
    "FLUSHDB"                   -1 [WRITE]                               NONE              => Every(Merge::Same);
    "INFO"                      -1 []                                    NONE              => Handling::Local(Local::Info);
    "LASTSAVE"                   1 [FAST]                                NONE              => Every(Merge::Least);
    "LATENCY"                   -2 []                                    NONE              => Any;
    "LATENCY|DOCTOR"             2 [ADMIN]                               NONE              => Every(Merge::Texts);
    "LATENCY|GRAPH"              3 [ADMIN]                               NONE              => Refused(ONE_NODE);
    "LATENCY|HELP"               2 []                                    NONE              => Any;
    "LATENCY|HISTOGRAM"         -2 [ADMIN]                               NONE              => Refused(ONE_NODE);
    "LATENCY|HISTORY"            3 [ADMIN]                               NONE              => Every(Merge::Concat);
    "LATENCY|LATEST"             2 [ADMIN]                               NONE              => Every(Merge::Concat);
    "LATENCY|RESET"             -2 [ADMIN]                               NONE              => Every(Merge::Sum);
    "LOLWUT"                    -1 [READONLY FAST]                       NONE              => Handling::Local(Local::Lolwut);
    "MEMORY"                    -2 []                                    NONE              => Any;
    "MEMORY|DOCTOR"              2 []                                    NONE              => Every(Merge::Texts);
    "MEMORY|HELP"                2 []                                    NONE              => Any;
    "MEMORY|MALLOC-STATS"        2 []                                    NONE              => Every(Merge::Texts);
    "MEMORY|PURGE"               2 []                                    NONE              => Every(Merge::Same);
    "MEMORY|STATS"               2 []                                    NONE              => Every(Merge::Figures);
    "MEMORY|USAGE"              -3 [READONLY]                            SECOND            => Keyed;
    "MODULE"                    -2 []                                    NONE              => Any;
    "MODULE|HELP"                2 []                                    NONE              => Any;
    "MODULE|LIST"                2 [ADMIN]                               NONE              => Any;
    "MODULE|LOAD"               -3 [ADMIN]                               NONE              => Refused(MODULES);
    "MODULE|LOADEX"             -3 [ADMIN]                               NONE              => Refused(MODULES);
    "MODULE|UNLOAD"              3 [ADMIN]                               NONE              => Refused(MODULES);
    "MONITOR"                    1 [ADMIN]                               NONE              => Handling::Local(Local::Monitor);
    "PSYNC"                     -3 [ADMIN]                               NONE              => Refused(REPLICATION);
    "REPLCONF"                  -1 [ADMIN]                               NONE              => Refused(REPLICATION);
    "REPLICAOF"                  3 [ADMIN]                               NONE              => Refused(REPLICATION);
    "RESTORE-ASKING"            -4 [WRITE DENY_OOM]                      FIRST             => Refused(RESTORING);
    "ROLE"                       1 [FAST]                                NONE              => Handling::Local(Local::Role);
    "SAVE"                       1 [ADMIN]                               NONE              => Refused(PERSISTENCE);
    "SHUTDOWN"                  -1 [ADMIN]                               NONE              => Refused(STOPPING);
    "SLAVEOF"                    3 [ADMIN]                               NONE              => Refused(REPLICATION);
    "SLOWLOG"                   -2 []                                    NONE              => Any;
    "SLOWLOG|GET"               -2 [ADMIN]                               NONE              => Handling::Local(Local::SlowlogGet);
    "SLOWLOG|HELP"               2 []                                    NONE              => Any;
    "SLOWLOG|LEN"                2 [ADMIN]                               NONE              => Handling::Local(Local::SlowlogLen);
    "SLOWLOG|RESET"              2 [ADMIN]                               NONE              => Handling::Local(Local::SlowlogReset);
    "SWAPDB"                     3 [WRITE FAST]                          NONE              => Refused(SWAPPING);
    "SYNC"                       1 [ADMIN]                               NONE              => Refused(REPLICATION);
    "TIME"                       1 [FAST]                                NONE              => Handling::Local(Local::Time);

    // Cluster
    "ASKING"                     1 [FAST]                                NONE              => Handling::Local(Local::ClusterMode);
    "CLUSTER"                   -2 []                                    NONE              => Any;
    "CLUSTER|ADDSLOTS"          -3 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|ADDSLOTSRANGE"     -4 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|BUMPEPOCH"          2 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|COUNT-FAILURE-REPORTS"   3 [ADMIN]                               NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|COUNTKEYSINSLOT"    3 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|DELSLOTS"          -3 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|DELSLOTSRANGE"     -4 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|FAILOVER"          -2 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|FLUSHSLOTS"         2 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|FORGET"             3 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|GETKEYSINSLOT"      4 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|HELP"               2 []                                    NONE              => Any;
    "CLUSTER|INFO"               2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|KEYSLOT"            3 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|LINKS"              2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|MEET"              -4 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|MYID"               2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|MYSHARDID"          2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|NODES"              2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|REPLICAS"           3 [ADMIN]                               NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|REPLICATE"          3 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|RESET"             -2 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|SAVECONFIG"         2 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|SET-CONFIG-EPOCH"   3 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|SETSLOT"           -4 [ADMIN]                               NONE              => Refused(PLACEMENT);
    "CLUSTER|SHARDS"             2 []                                    NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|SLAVES"             3 [ADMIN]                               NONE              => Handling::Local(Local::Cluster);
    "CLUSTER|SLOT-STATS"        -4 []                                    NONE              => Refused(PLACEMENT);
    "CLUSTER|SLOTS"              2 []                                    NONE              => Handling::Local(Local::Cluster);
    "READONLY"                   1 [FAST]                                NONE              => Handling::Local(Local::ClusterMode);
    "READWRITE"                  1 [FAST]                                NONE              => Handling::Local(Local::ClusterMode);

    // Ours
    "SWITCHYARD"                -1 [ADMIN]                               NONE              => Handling::Local(Local::Switchyard);
}
