//! What access rules say about commands: their categories (`@read`, `@dangerous`), and whether each of their keys is read or written.
//!
//! Redis's own data, row by row as `COMMAND` of Redis 7.0 has it (Valkey's source where Redis 7.0 lacks the command); a test asks a real
//! server's `ACL DRYRUN` about every command. A table beside `table.rs` and not columns of it, because nothing on the path of a
//! command needs it where users are not restricted.
//!
//! A command's keys are at most of two kinds, in the order in which `find_keys` gives them: the first, and the rest. What depends on the
//! options (`SET ... GET`, `BITFIELD` without a write) is in [`Command::key_access`].

use super::{Command, Keys, is_option};
use crate::request::Args;

/// What a command does with a key, or a rule permits: reading, writing, both or neither (`EXISTS` needs no permission on the value).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access(pub u8);

impl Access {
    /// Neither: only whether the key is there, or what it is.
    pub const NO: Access = Access(0);
    /// Its value is returned, copied or decides what happens.
    pub const R: Access = Access(1);
    /// It is changed or deleted.
    pub const W: Access = Access(2);
    /// Both.
    pub const RW: Access = Access(3);

    /// True where everything of `other` is in `self`.
    #[inline]
    pub const fn covers(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A set of categories.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Categories(pub u32);

/// The categories by name, in the order in which Redis lists them; the place is the bit.
pub const CATEGORIES: [&str; 21] = [
    "keyspace",
    "read",
    "write",
    "set",
    "sortedset",
    "list",
    "hash",
    "string",
    "bitmap",
    "hyperloglog",
    "geo",
    "stream",
    "pubsub",
    "admin",
    "fast",
    "slow",
    "blocking",
    "dangerous",
    "connection",
    "transaction",
    "scripting",
];

impl Categories {
    /// The category of that name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        CATEGORIES.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|bit| Self(1 << bit))
    }

    /// True where the two have one in common.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both together.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
    const KEYSPACE: Categories = Categories(1 << 0);
    const READ: Categories = Categories(1 << 1);
    const WRITE: Categories = Categories(1 << 2);
    const SET: Categories = Categories(1 << 3);
    const SORTEDSET: Categories = Categories(1 << 4);
    const LIST: Categories = Categories(1 << 5);
    const HASH: Categories = Categories(1 << 6);
    const STRING: Categories = Categories(1 << 7);
    const BITMAP: Categories = Categories(1 << 8);
    const HYPERLOGLOG: Categories = Categories(1 << 9);
    const GEO: Categories = Categories(1 << 10);
    const STREAM: Categories = Categories(1 << 11);
    const PUBSUB: Categories = Categories(1 << 12);
    const ADMIN: Categories = Categories(1 << 13);
    const FAST: Categories = Categories(1 << 14);
    const SLOW: Categories = Categories(1 << 15);
    const BLOCKING: Categories = Categories(1 << 16);
    const DANGEROUS: Categories = Categories(1 << 17);
    const CONNECTION: Categories = Categories(1 << 18);
    const TRANSACTION: Categories = Categories(1 << 19);
    const SCRIPTING: Categories = Categories(1 << 20);
}

/// What the table says of one command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) categories: Categories,
    pub(super) first: Access,
    pub(super) rest: Access,
}

/// The row of a builtin command.
pub(super) fn row(name: &str) -> Option<&'static Row> {
    ROWS.binary_search_by(|row| row.name.cmp(name)).ok().map(|at| &ROWS[at])
}

impl Command {
    /// What the command does with the key that [`Command::find_keys`] found as number `place`.
    pub fn key_access(&self, args: &Args<'_>, place: usize) -> Access {
        match &*self.name {
            "SET" => {
                let asks = (3..args.len()).any(|i| args.get(i).is_none_or(|arg| is_option(arg, b"get")));
                if asks { Access::RW } else { Access::W }
            }
            "BITFIELD" if bitfield_only_reads(args) => Access::R,
            _ => match &self.keys {
                Keys::Specs(specs) => specs.iter().filter(|spec| !spec.not_key).fold(Access::NO, |all, spec| Access(all.0 | spec.access.0)),
                _ if place == 0 => self.access.0,
                _ => self.access.1,
            },
        }
    }

    /// The categories it is in.
    pub fn categories(&self) -> Categories {
        self.categories
    }
}

/// As Redis's `bitfieldGetKeys`: what is no option it knows counts as writing.
fn bitfield_only_reads(args: &Args<'_>) -> bool {
    let mut index = 2;
    while index < args.len() {
        let Some(arg) = args.get(index) else { return false };
        let rest = args.len() - index - 1;
        if is_option(arg, b"get") && rest >= 2 {
            index += 3;
        } else if is_option(arg, b"overflow") && rest >= 1 {
            index += 2;
        } else {
            return false;
        }
    }
    true
}

macro_rules! rows {
    ($($name:literal [$($category:ident)*] $first:ident $rest:ident;)*) => {
        /// All of them, sorted by name.
        static ROWS: &[Row] = &[$(Row {
            name: $name,
            categories: Categories(0 $(| Categories::$category.0)*),
            first: Access::$first,
            rest: Access::$rest,
        }),*];
    };
}

rows! {
    "ACL"                            [SLOW]                                         NO NO;
    "ACL|CAT"                        [SLOW]                                         NO NO;
    "ACL|DELUSER"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|DRYRUN"                     [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|GENPASS"                    [SLOW]                                         NO NO;
    "ACL|GETUSER"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|HELP"                       [SLOW]                                         NO NO;
    "ACL|LIST"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|LOAD"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|LOG"                        [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|SAVE"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|SETUSER"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|USERS"                      [ADMIN DANGEROUS SLOW]                         NO NO;
    "ACL|WHOAMI"                     [SLOW]                                         NO NO;
    "APPEND"                         [FAST STRING WRITE]                            W  W;
    "ASKING"                         [CONNECTION FAST]                              NO NO;
    "AUTH"                           [CONNECTION FAST]                              NO NO;
    "BGREWRITEAOF"                   [ADMIN DANGEROUS SLOW]                         NO NO;
    "BGSAVE"                         [ADMIN DANGEROUS SLOW]                         NO NO;
    "BITCOUNT"                       [BITMAP READ SLOW]                             R  R;
    "BITFIELD"                       [BITMAP SLOW WRITE]                            RW RW;
    "BITFIELD_RO"                    [BITMAP FAST READ]                             R  R;
    "BITOP"                          [BITMAP SLOW WRITE]                            W  R;
    "BITPOS"                         [BITMAP READ SLOW]                             R  R;
    "BLMOVE"                         [BLOCKING LIST SLOW WRITE]                     RW W;
    "BLMPOP"                         [BLOCKING LIST SLOW WRITE]                     RW RW;
    "BLPOP"                          [BLOCKING LIST SLOW WRITE]                     RW RW;
    "BRPOP"                          [BLOCKING LIST SLOW WRITE]                     RW RW;
    "BRPOPLPUSH"                     [BLOCKING LIST SLOW WRITE]                     RW W;
    "BZMPOP"                         [BLOCKING SLOW SORTEDSET WRITE]                RW RW;
    "BZPOPMAX"                       [BLOCKING FAST SORTEDSET WRITE]                RW RW;
    "BZPOPMIN"                       [BLOCKING FAST SORTEDSET WRITE]                RW RW;
    "CLIENT"                         [SLOW]                                         NO NO;
    "CLIENT|CACHING"                 [CONNECTION SLOW]                              NO NO;
    "CLIENT|CAPA"                    [CONNECTION SLOW]                              NO NO;
    "CLIENT|GETNAME"                 [CONNECTION SLOW]                              NO NO;
    "CLIENT|GETREDIR"                [CONNECTION SLOW]                              NO NO;
    "CLIENT|HELP"                    [CONNECTION SLOW]                              NO NO;
    "CLIENT|ID"                      [CONNECTION SLOW]                              NO NO;
    "CLIENT|IMPORT-SOURCE"           [CONNECTION SLOW]                              NO NO;
    "CLIENT|INFO"                    [CONNECTION SLOW]                              NO NO;
    "CLIENT|KILL"                    [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLIENT|LIST"                    [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLIENT|NO-EVICT"                [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLIENT|NO-TOUCH"                [CONNECTION SLOW]                              NO NO;
    "CLIENT|PAUSE"                   [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLIENT|REPLY"                   [CONNECTION SLOW]                              NO NO;
    "CLIENT|SETINFO"                 [CONNECTION SLOW]                              NO NO;
    "CLIENT|SETNAME"                 [CONNECTION SLOW]                              NO NO;
    "CLIENT|TRACKING"                [CONNECTION SLOW]                              NO NO;
    "CLIENT|TRACKINGINFO"            [CONNECTION SLOW]                              NO NO;
    "CLIENT|UNBLOCK"                 [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLIENT|UNPAUSE"                 [ADMIN CONNECTION DANGEROUS SLOW]              NO NO;
    "CLUSTER"                        [SLOW]                                         NO NO;
    "CLUSTER|ADDSLOTS"               [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|ADDSLOTSRANGE"          [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|BUMPEPOCH"              [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|COUNT-FAILURE-REPORTS"  [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|COUNTKEYSINSLOT"        [SLOW]                                         NO NO;
    "CLUSTER|DELSLOTS"               [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|DELSLOTSRANGE"          [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|FAILOVER"               [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|FLUSHSLOTS"             [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|FORGET"                 [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|GETKEYSINSLOT"          [SLOW]                                         NO NO;
    "CLUSTER|HELP"                   [SLOW]                                         NO NO;
    "CLUSTER|INFO"                   [SLOW]                                         NO NO;
    "CLUSTER|KEYSLOT"                [SLOW]                                         NO NO;
    "CLUSTER|LINKS"                  [SLOW]                                         NO NO;
    "CLUSTER|MEET"                   [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|MYID"                   [SLOW]                                         NO NO;
    "CLUSTER|MYSHARDID"              [SLOW]                                         NO NO;
    "CLUSTER|NODES"                  [SLOW]                                         NO NO;
    "CLUSTER|REPLICAS"               [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|REPLICATE"              [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|RESET"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|SAVECONFIG"             [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|SET-CONFIG-EPOCH"       [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|SETSLOT"                [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|SHARDS"                 [SLOW]                                         NO NO;
    "CLUSTER|SLAVES"                 [ADMIN DANGEROUS SLOW]                         NO NO;
    "CLUSTER|SLOT-STATS"             [SLOW]                                         NO NO;
    "CLUSTER|SLOTS"                  [SLOW]                                         NO NO;
    "COMMAND"                        [CONNECTION SLOW]                              NO NO;
    "COMMAND|COUNT"                  [CONNECTION SLOW]                              NO NO;
    "COMMAND|DOCS"                   [CONNECTION SLOW]                              NO NO;
    "COMMAND|GETKEYS"                [CONNECTION SLOW]                              NO NO;
    "COMMAND|GETKEYSANDFLAGS"        [CONNECTION SLOW]                              NO NO;
    "COMMAND|HELP"                   [CONNECTION SLOW]                              NO NO;
    "COMMAND|INFO"                   [CONNECTION SLOW]                              NO NO;
    "COMMAND|LIST"                   [CONNECTION SLOW]                              NO NO;
    "CONFIG"                         [SLOW]                                         NO NO;
    "CONFIG|GET"                     [ADMIN DANGEROUS SLOW]                         NO NO;
    "CONFIG|HELP"                    [SLOW]                                         NO NO;
    "CONFIG|RESETSTAT"               [ADMIN DANGEROUS SLOW]                         NO NO;
    "CONFIG|REWRITE"                 [ADMIN DANGEROUS SLOW]                         NO NO;
    "CONFIG|SET"                     [ADMIN DANGEROUS SLOW]                         NO NO;
    "COPY"                           [KEYSPACE SLOW WRITE]                          R  W;
    "DBSIZE"                         [FAST KEYSPACE READ]                           NO NO;
    "DEBUG"                          [ADMIN DANGEROUS SLOW]                         NO NO;
    "DECR"                           [FAST STRING WRITE]                            RW RW;
    "DECRBY"                         [FAST STRING WRITE]                            RW RW;
    "DEL"                            [KEYSPACE SLOW WRITE]                          W  W;
    "DELEX"                          [FAST STRING WRITE]                            RW RW;
    "DELIFEQ"                        [FAST STRING WRITE]                            RW RW;
    "DIGEST"                         [FAST READ STRING]                             R  R;
    "DISCARD"                        [FAST TRANSACTION]                             NO NO;
    "DUMP"                           [KEYSPACE READ SLOW]                           R  R;
    "ECHO"                           [CONNECTION FAST]                              NO NO;
    "EVAL"                           [SCRIPTING SLOW]                               RW RW;
    "EVALSHA"                        [SCRIPTING SLOW]                               RW RW;
    "EVALSHA_RO"                     [SCRIPTING SLOW]                               R  R;
    "EVAL_RO"                        [SCRIPTING SLOW]                               R  R;
    "EXEC"                           [SLOW TRANSACTION]                             NO NO;
    "EXISTS"                         [FAST KEYSPACE READ]                           NO NO;
    "EXPIRE"                         [FAST KEYSPACE WRITE]                          W  W;
    "EXPIREAT"                       [FAST KEYSPACE WRITE]                          W  W;
    "EXPIRETIME"                     [FAST KEYSPACE READ]                           R  R;
    "FAILOVER"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "FCALL"                          [SCRIPTING SLOW]                               RW RW;
    "FCALL_RO"                       [SCRIPTING SLOW]                               R  R;
    "FLUSHALL"                       [DANGEROUS KEYSPACE SLOW WRITE]                NO NO;
    "FLUSHDB"                        [DANGEROUS KEYSPACE SLOW WRITE]                NO NO;
    "FUNCTION"                       [SLOW]                                         NO NO;
    "FUNCTION|DELETE"                [SCRIPTING SLOW WRITE]                         NO NO;
    "FUNCTION|DUMP"                  [SCRIPTING SLOW]                               NO NO;
    "FUNCTION|FLUSH"                 [SCRIPTING SLOW WRITE]                         NO NO;
    "FUNCTION|HELP"                  [SCRIPTING SLOW]                               NO NO;
    "FUNCTION|KILL"                  [SCRIPTING SLOW]                               NO NO;
    "FUNCTION|LIST"                  [SCRIPTING SLOW]                               NO NO;
    "FUNCTION|LOAD"                  [SCRIPTING SLOW WRITE]                         NO NO;
    "FUNCTION|RESTORE"               [SCRIPTING SLOW WRITE]                         NO NO;
    "FUNCTION|STATS"                 [SCRIPTING SLOW]                               NO NO;
    "GEOADD"                         [GEO SLOW WRITE]                               W  W;
    "GEODIST"                        [GEO READ SLOW]                                R  R;
    "GEOHASH"                        [GEO READ SLOW]                                R  R;
    "GEOPOS"                         [GEO READ SLOW]                                R  R;
    "GEORADIUS"                      [GEO SLOW WRITE]                               R  W;
    "GEORADIUSBYMEMBER"              [GEO SLOW WRITE]                               R  W;
    "GEORADIUSBYMEMBER_RO"           [GEO READ SLOW]                                R  R;
    "GEORADIUS_RO"                   [GEO READ SLOW]                                R  R;
    "GEOSEARCH"                      [GEO READ SLOW]                                R  R;
    "GEOSEARCHSTORE"                 [GEO SLOW WRITE]                               W  R;
    "GET"                            [FAST READ STRING]                             R  R;
    "GETBIT"                         [BITMAP FAST READ]                             R  R;
    "GETDEL"                         [FAST STRING WRITE]                            RW RW;
    "GETEX"                          [FAST STRING WRITE]                            RW RW;
    "GETRANGE"                       [READ SLOW STRING]                             R  R;
    "GETSET"                         [FAST STRING WRITE]                            RW RW;
    "HDEL"                           [FAST HASH WRITE]                              W  W;
    "HELLO"                          [CONNECTION FAST]                              NO NO;
    "HEXISTS"                        [FAST HASH READ]                               NO NO;
    "HEXPIRE"                        [FAST HASH WRITE]                              RW RW;
    "HEXPIREAT"                      [FAST HASH WRITE]                              RW RW;
    "HEXPIRETIME"                    [FAST HASH READ]                               R  R;
    "HGET"                           [FAST HASH READ]                               R  R;
    "HGETALL"                        [HASH READ SLOW]                               R  R;
    "HGETDEL"                        [FAST HASH WRITE]                              RW RW;
    "HGETEX"                         [FAST HASH WRITE]                              RW RW;
    "HINCRBY"                        [FAST HASH WRITE]                              RW RW;
    "HINCRBYFLOAT"                   [FAST HASH WRITE]                              RW RW;
    "HKEYS"                          [HASH READ SLOW]                               R  R;
    "HLEN"                           [FAST HASH READ]                               NO NO;
    "HMGET"                          [FAST HASH READ]                               R  R;
    "HMSET"                          [FAST HASH WRITE]                              W  W;
    "HPERSIST"                       [FAST HASH WRITE]                              RW RW;
    "HPEXPIRE"                       [FAST HASH WRITE]                              RW RW;
    "HPEXPIREAT"                     [FAST HASH WRITE]                              RW RW;
    "HPEXPIRETIME"                   [FAST HASH READ]                               R  R;
    "HPTTL"                          [FAST HASH READ]                               R  R;
    "HRANDFIELD"                     [HASH READ SLOW]                               R  R;
    "HSCAN"                          [HASH READ SLOW]                               R  R;
    "HSET"                           [FAST HASH WRITE]                              W  W;
    "HSETEX"                         [FAST HASH WRITE]                              RW RW;
    "HSETNX"                         [FAST HASH WRITE]                              W  W;
    "HSTRLEN"                        [FAST HASH READ]                               NO NO;
    "HTTL"                           [FAST HASH READ]                               R  R;
    "HVALS"                          [HASH READ SLOW]                               R  R;
    "INCR"                           [FAST STRING WRITE]                            RW RW;
    "INCRBY"                         [FAST STRING WRITE]                            RW RW;
    "INCRBYFLOAT"                    [FAST STRING WRITE]                            RW RW;
    "INFO"                           [DANGEROUS SLOW]                               NO NO;
    "KEYS"                           [DANGEROUS KEYSPACE READ SLOW]                 NO NO;
    "LASTSAVE"                       [ADMIN DANGEROUS FAST]                         NO NO;
    "LATENCY"                        [SLOW]                                         NO NO;
    "LATENCY|DOCTOR"                 [ADMIN DANGEROUS SLOW]                         NO NO;
    "LATENCY|GRAPH"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "LATENCY|HELP"                   [SLOW]                                         NO NO;
    "LATENCY|HISTOGRAM"              [ADMIN DANGEROUS SLOW]                         NO NO;
    "LATENCY|HISTORY"                [ADMIN DANGEROUS SLOW]                         NO NO;
    "LATENCY|LATEST"                 [ADMIN DANGEROUS SLOW]                         NO NO;
    "LATENCY|RESET"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "LCS"                            [READ SLOW STRING]                             R  R;
    "LINDEX"                         [LIST READ SLOW]                               R  R;
    "LINSERT"                        [LIST SLOW WRITE]                              W  W;
    "LLEN"                           [FAST LIST READ]                               NO NO;
    "LMOVE"                          [LIST SLOW WRITE]                              RW W;
    "LMPOP"                          [LIST SLOW WRITE]                              RW RW;
    "LOLWUT"                         [FAST READ]                                    NO NO;
    "LPOP"                           [FAST LIST WRITE]                              RW RW;
    "LPOS"                           [LIST READ SLOW]                               R  R;
    "LPUSH"                          [FAST LIST WRITE]                              W  W;
    "LPUSHX"                         [FAST LIST WRITE]                              W  W;
    "LRANGE"                         [LIST READ SLOW]                               R  R;
    "LREM"                           [LIST SLOW WRITE]                              W  W;
    "LSET"                           [LIST SLOW WRITE]                              W  W;
    "LTRIM"                          [LIST SLOW WRITE]                              W  W;
    "MEMORY"                         [SLOW]                                         NO NO;
    "MEMORY|DOCTOR"                  [SLOW]                                         NO NO;
    "MEMORY|HELP"                    [SLOW]                                         NO NO;
    "MEMORY|MALLOC-STATS"            [SLOW]                                         NO NO;
    "MEMORY|PURGE"                   [SLOW]                                         NO NO;
    "MEMORY|STATS"                   [SLOW]                                         NO NO;
    "MEMORY|USAGE"                   [READ SLOW]                                    NO NO;
    "MGET"                           [FAST READ STRING]                             R  R;
    "MIGRATE"                        [DANGEROUS KEYSPACE SLOW WRITE]                RW RW;
    "MODULE"                         [SLOW]                                         NO NO;
    "MODULE|HELP"                    [SLOW]                                         NO NO;
    "MODULE|LIST"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "MODULE|LOAD"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "MODULE|LOADEX"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "MODULE|UNLOAD"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "MONITOR"                        [ADMIN DANGEROUS SLOW]                         NO NO;
    "MOVE"                           [FAST KEYSPACE WRITE]                          RW RW;
    "MSET"                           [SLOW STRING WRITE]                            W  W;
    "MSETEX"                         [SLOW STRING WRITE]                            RW RW;
    "MSETNX"                         [SLOW STRING WRITE]                            W  W;
    "MULTI"                          [FAST TRANSACTION]                             NO NO;
    "OBJECT"                         [SLOW]                                         NO NO;
    "OBJECT|ENCODING"                [KEYSPACE READ SLOW]                           NO NO;
    "OBJECT|FREQ"                    [KEYSPACE READ SLOW]                           NO NO;
    "OBJECT|HELP"                    [KEYSPACE SLOW]                                NO NO;
    "OBJECT|IDLETIME"                [KEYSPACE READ SLOW]                           NO NO;
    "OBJECT|REFCOUNT"                [KEYSPACE READ SLOW]                           NO NO;
    "PERSIST"                        [FAST KEYSPACE WRITE]                          W  W;
    "PEXPIRE"                        [FAST KEYSPACE WRITE]                          W  W;
    "PEXPIREAT"                      [FAST KEYSPACE WRITE]                          W  W;
    "PEXPIRETIME"                    [FAST KEYSPACE READ]                           R  R;
    "PFADD"                          [FAST HYPERLOGLOG WRITE]                       W  W;
    "PFCOUNT"                        [HYPERLOGLOG READ SLOW]                        R  R;
    "PFDEBUG"                        [ADMIN DANGEROUS HYPERLOGLOG SLOW WRITE]       R  R;
    "PFMERGE"                        [HYPERLOGLOG SLOW WRITE]                       RW R;
    "PFSELFTEST"                     [ADMIN DANGEROUS HYPERLOGLOG SLOW]             NO NO;
    "PING"                           [CONNECTION FAST]                              NO NO;
    "PSETEX"                         [SLOW STRING WRITE]                            W  W;
    "PSUBSCRIBE"                     [PUBSUB SLOW]                                  NO NO;
    "PSYNC"                          [ADMIN DANGEROUS SLOW]                         NO NO;
    "PTTL"                           [FAST KEYSPACE READ]                           R  R;
    "PUBLISH"                        [FAST PUBSUB]                                  NO NO;
    "PUBSUB"                         [SLOW]                                         NO NO;
    "PUBSUB|CHANNELS"                [PUBSUB SLOW]                                  NO NO;
    "PUBSUB|HELP"                    [SLOW]                                         NO NO;
    "PUBSUB|NUMPAT"                  [PUBSUB SLOW]                                  NO NO;
    "PUBSUB|NUMSUB"                  [PUBSUB SLOW]                                  NO NO;
    "PUBSUB|SHARDCHANNELS"           [PUBSUB SLOW]                                  NO NO;
    "PUBSUB|SHARDNUMSUB"             [PUBSUB SLOW]                                  NO NO;
    "PUNSUBSCRIBE"                   [PUBSUB SLOW]                                  NO NO;
    "QUIT"                           [CONNECTION FAST]                              NO NO;
    "RANDOMKEY"                      [KEYSPACE READ SLOW]                           NO NO;
    "READONLY"                       [CONNECTION FAST]                              NO NO;
    "READWRITE"                      [CONNECTION FAST]                              NO NO;
    "RENAME"                         [KEYSPACE SLOW WRITE]                          RW W;
    "RENAMENX"                       [FAST KEYSPACE WRITE]                          RW W;
    "REPLCONF"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "REPLICAOF"                      [ADMIN DANGEROUS SLOW]                         NO NO;
    "RESET"                          [CONNECTION FAST]                              NO NO;
    "RESTORE"                        [DANGEROUS KEYSPACE SLOW WRITE]                W  W;
    "RESTORE-ASKING"                 [DANGEROUS KEYSPACE SLOW WRITE]                W  W;
    "ROLE"                           [ADMIN DANGEROUS FAST]                         NO NO;
    "RPOP"                           [FAST LIST WRITE]                              RW RW;
    "RPOPLPUSH"                      [LIST SLOW WRITE]                              RW W;
    "RPUSH"                          [FAST LIST WRITE]                              W  W;
    "RPUSHX"                         [FAST LIST WRITE]                              W  W;
    "SADD"                           [FAST SET WRITE]                               W  W;
    "SAVE"                           [ADMIN DANGEROUS SLOW]                         NO NO;
    "SCAN"                           [KEYSPACE READ SLOW]                           NO NO;
    "SCARD"                          [FAST READ SET]                                NO NO;
    "SCRIPT"                         [SLOW]                                         NO NO;
    "SCRIPT|DEBUG"                   [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|EXISTS"                  [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|FLUSH"                   [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|HELP"                    [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|KILL"                    [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|LOAD"                    [SCRIPTING SLOW]                               NO NO;
    "SCRIPT|SHOW"                    [SCRIPTING SLOW]                               NO NO;
    "SDIFF"                          [READ SET SLOW]                                R  R;
    "SDIFFSTORE"                     [SET SLOW WRITE]                               W  R;
    "SELECT"                         [CONNECTION FAST]                              NO NO;
    "SET"                            [SLOW STRING WRITE]                            RW RW;
    "SETBIT"                         [BITMAP SLOW WRITE]                            RW RW;
    "SETEX"                          [SLOW STRING WRITE]                            W  W;
    "SETNX"                          [FAST STRING WRITE]                            W  W;
    "SETRANGE"                       [SLOW STRING WRITE]                            W  W;
    "SHUTDOWN"                       [ADMIN DANGEROUS SLOW]                         NO NO;
    "SINTER"                         [READ SET SLOW]                                R  R;
    "SINTERCARD"                     [READ SET SLOW]                                R  R;
    "SINTERSTORE"                    [SET SLOW WRITE]                               W  R;
    "SISMEMBER"                      [FAST READ SET]                                NO NO;
    "SLAVEOF"                        [ADMIN DANGEROUS SLOW]                         NO NO;
    "SLOWLOG"                        [SLOW]                                         NO NO;
    "SLOWLOG|GET"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "SLOWLOG|HELP"                   [SLOW]                                         NO NO;
    "SLOWLOG|LEN"                    [ADMIN DANGEROUS SLOW]                         NO NO;
    "SLOWLOG|RESET"                  [ADMIN DANGEROUS SLOW]                         NO NO;
    "SMEMBERS"                       [READ SET SLOW]                                R  R;
    "SMISMEMBER"                     [FAST READ SET]                                R  R;
    "SMOVE"                          [FAST SET WRITE]                               RW W;
    "SORT"                           [DANGEROUS LIST SET SLOW SORTEDSET WRITE]      R  W;
    "SORT_RO"                        [DANGEROUS LIST READ SET SLOW SORTEDSET]       R  R;
    "SPOP"                           [FAST SET WRITE]                               RW RW;
    "SPUBLISH"                       [FAST PUBSUB]                                  NO NO;
    "SRANDMEMBER"                    [READ SET SLOW]                                R  R;
    "SREM"                           [FAST SET WRITE]                               W  W;
    "SSCAN"                          [READ SET SLOW]                                R  R;
    "SSUBSCRIBE"                     [PUBSUB SLOW]                                  NO NO;
    "STRLEN"                         [FAST READ STRING]                             NO NO;
    "SUBSCRIBE"                      [PUBSUB SLOW]                                  NO NO;
    "SUBSTR"                         [READ SLOW STRING]                             R  R;
    "SUNION"                         [READ SET SLOW]                                R  R;
    "SUNIONSTORE"                    [SET SLOW WRITE]                               W  R;
    "SUNSUBSCRIBE"                   [PUBSUB SLOW]                                  NO NO;
    "SWAPDB"                         [DANGEROUS FAST KEYSPACE WRITE]                NO NO;
    "SWITCHYARD"                     [ADMIN DANGEROUS SLOW]                                    NO NO;
    "SYNC"                           [ADMIN DANGEROUS SLOW]                         NO NO;
    "TIME"                           [FAST]                                         NO NO;
    "TOUCH"                          [FAST KEYSPACE READ]                           NO NO;
    "TTL"                            [FAST KEYSPACE READ]                           R  R;
    "TYPE"                           [FAST KEYSPACE READ]                           NO NO;
    "UNLINK"                         [FAST KEYSPACE WRITE]                          W  W;
    "UNSUBSCRIBE"                    [PUBSUB SLOW]                                  NO NO;
    "UNWATCH"                        [FAST TRANSACTION]                             NO NO;
    "VADD"                           [SLOW WRITE]                                   RW RW;
    "VCARD"                          [FAST READ]                                    R  R;
    "VDIM"                           [FAST READ]                                    R  R;
    "VEMB"                           [FAST READ]                                    R  R;
    "VGETATTR"                       [FAST READ]                                    R  R;
    "VINFO"                          [FAST READ]                                    R  R;
    "VISMEMBER"                      [FAST READ]                                    R  R;
    "VLINKS"                         [FAST READ]                                    R  R;
    "VRANDMEMBER"                    [FAST READ]                                    R  R;
    "VRANGE"                         [READ SLOW]                                    R  R;
    "VREM"                           [SLOW WRITE]                                   RW RW;
    "VSETATTR"                       [FAST WRITE]                                   RW RW;
    "VSIM"                           [READ SLOW]                                    R  R;
    "WAIT"                           [CONNECTION SLOW]                              NO NO;
    "WAITAOF"                        [BLOCKING CONNECTION SLOW]                     NO NO;
    "WATCH"                          [FAST TRANSACTION]                             NO NO;
    "XACK"                           [FAST STREAM WRITE]                            W  W;
    "XACKDEL"                        [FAST STREAM WRITE]                            RW RW;
    "XADD"                           [FAST STREAM WRITE]                            W  W;
    "XAUTOCLAIM"                     [FAST STREAM WRITE]                            W  W;
    "XCFGSET"                        [FAST STREAM WRITE]                            RW RW;
    "XCLAIM"                         [FAST STREAM WRITE]                            W  W;
    "XDEL"                           [FAST STREAM WRITE]                            W  W;
    "XDELEX"                         [FAST STREAM WRITE]                            RW RW;
    "XGROUP"                         [SLOW]                                         NO NO;
    "XGROUP|CREATE"                  [SLOW STREAM WRITE]                            W  W;
    "XGROUP|CREATECONSUMER"          [SLOW STREAM WRITE]                            W  W;
    "XGROUP|DELCONSUMER"             [SLOW STREAM WRITE]                            W  W;
    "XGROUP|DESTROY"                 [SLOW STREAM WRITE]                            W  W;
    "XGROUP|HELP"                    [SLOW STREAM]                                  NO NO;
    "XGROUP|SETID"                   [SLOW STREAM WRITE]                            W  W;
    "XINFO"                          [SLOW]                                         NO NO;
    "XINFO|CONSUMERS"                [READ SLOW STREAM]                             R  R;
    "XINFO|GROUPS"                   [READ SLOW STREAM]                             R  R;
    "XINFO|HELP"                     [SLOW STREAM]                                  NO NO;
    "XINFO|STREAM"                   [READ SLOW STREAM]                             R  R;
    "XLEN"                           [FAST READ STREAM]                             NO NO;
    "XPENDING"                       [READ SLOW STREAM]                             R  R;
    "XRANGE"                         [READ SLOW STREAM]                             R  R;
    "XREAD"                          [BLOCKING READ SLOW STREAM]                    R  R;
    "XREADGROUP"                     [BLOCKING SLOW STREAM WRITE]                   R  R;
    "XREVRANGE"                      [READ SLOW STREAM]                             R  R;
    "XSETID"                         [FAST STREAM WRITE]                            W  W;
    "XTRIM"                          [SLOW STREAM WRITE]                            W  W;
    "ZADD"                           [FAST SORTEDSET WRITE]                         W  W;
    "ZCARD"                          [FAST READ SORTEDSET]                          NO NO;
    "ZCOUNT"                         [FAST READ SORTEDSET]                          R  R;
    "ZDIFF"                          [READ SLOW SORTEDSET]                          R  R;
    "ZDIFFSTORE"                     [SLOW SORTEDSET WRITE]                         W  R;
    "ZINCRBY"                        [FAST SORTEDSET WRITE]                         RW RW;
    "ZINTER"                         [READ SLOW SORTEDSET]                          R  R;
    "ZINTERCARD"                     [READ SLOW SORTEDSET]                          R  R;
    "ZINTERSTORE"                    [SLOW SORTEDSET WRITE]                         W  R;
    "ZLEXCOUNT"                      [FAST READ SORTEDSET]                          R  R;
    "ZMPOP"                          [SLOW SORTEDSET WRITE]                         RW RW;
    "ZMSCORE"                        [FAST READ SORTEDSET]                          R  R;
    "ZPOPMAX"                        [FAST SORTEDSET WRITE]                         RW RW;
    "ZPOPMIN"                        [FAST SORTEDSET WRITE]                         RW RW;
    "ZRANDMEMBER"                    [READ SLOW SORTEDSET]                          R  R;
    "ZRANGE"                         [READ SLOW SORTEDSET]                          R  R;
    "ZRANGEBYLEX"                    [READ SLOW SORTEDSET]                          R  R;
    "ZRANGEBYSCORE"                  [READ SLOW SORTEDSET]                          R  R;
    "ZRANGESTORE"                    [SLOW SORTEDSET WRITE]                         W  R;
    "ZRANK"                          [FAST READ SORTEDSET]                          R  R;
    "ZREM"                           [FAST SORTEDSET WRITE]                         W  W;
    "ZREMRANGEBYLEX"                 [SLOW SORTEDSET WRITE]                         W  W;
    "ZREMRANGEBYRANK"                [SLOW SORTEDSET WRITE]                         W  W;
    "ZREMRANGEBYSCORE"               [SLOW SORTEDSET WRITE]                         W  W;
    "ZREVRANGE"                      [READ SLOW SORTEDSET]                          R  R;
    "ZREVRANGEBYLEX"                 [READ SLOW SORTEDSET]                          R  R;
    "ZREVRANGEBYSCORE"               [READ SLOW SORTEDSET]                          R  R;
    "ZREVRANK"                       [FAST READ SORTEDSET]                          R  R;
    "ZSCAN"                          [READ SLOW SORTEDSET]                          R  R;
    "ZSCORE"                         [FAST READ SORTEDSET]                          R  R;
    "ZUNION"                         [READ SLOW SORTEDSET]                          R  R;
    "ZUNIONSTORE"                    [SLOW SORTEDSET WRITE]                         W  R;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::CommandTable;

    #[test]
    fn every_builtin_command_has_its_row() {
        assert!(ROWS.is_sorted_by(|a, b| a.name < b.name));
        let table = CommandTable::builtin();
        for command in table.iter() {
            assert!(row(&command.name).is_some(), "{} has no row; what are its categories?", command.name);
        }
        for row in ROWS {
            assert!(table.by_name(row.name).is_some(), "{} is no command", row.name);
        }
    }

    #[test]
    fn categories_by_name() {
        assert_eq!(Categories::named("Read"), Some(Categories::READ));
        assert_eq!(Categories::named("scripting"), Some(Categories::SCRIPTING));
        assert_eq!(Categories::named("all"), None);
    }
}
