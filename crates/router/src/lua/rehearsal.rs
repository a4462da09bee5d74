//! Rehearsals: a script with undeclared keys is executed twice by its node, within one call. First without effects, to
//! find the keys that it touches. If some of them live elsewhere, the call ends with their names, and the router brings
//! them to the node and calls the script again. Otherwise the script is executed.
//!
//! In a rehearsal, reads are executed. Writes are not, and return what they would return, as far as reads of their keys
//! show it ([`WRITES`]). A script that depends on its own writes may touch other keys when it is executed. It then gets
//! an error, as without a rehearsal. So a wrong result of a write costs an error at most.
//!
//! Not a run that ends at the first foreign key: the next one may follow after a write. Not an analysis of the text: most
//! names depend on values.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::LazyLock;

use switchyard_resp::command::{CommandTable, Flags};

use super::rules::rule;
use super::syntax::Facts;

/// Members of `redis` without an effect in a rehearsal.
pub(super) const SILENT: [&str; 5] = ["breakpoint", "debug", "log", "replicate_commands", "set_repl"];

/// Maximum calls of a rehearsal. A loop until a key is empty would not end, because the key is not changed. Beyond them,
/// calls return no value, and the same number later they fail.
const CALLS_MAX: usize = 1000;

/// Results of writes that have not been executed. `C` is the server's `call` or `pcall`, and returns nothing for a foreign
/// key.
const WRITES: [(&str, &str); 41] = [
    ("incr", "function(C,k) return (tonumber(C('get',k)) or 0)+1 end"),
    ("decr", "function(C,k) return (tonumber(C('get',k)) or 0)-1 end"),
    ("incrby", "function(C,k,n) return (tonumber(C('get',k)) or 0)+n end"),
    ("decrby", "function(C,k,n) return (tonumber(C('get',k)) or 0)-n end"),
    ("incrbyfloat", "function(C,k,n) return tostring((tonumber(C('get',k)) or 0)+n) end"),
    ("hincrby", "function(C,k,f,n) return (tonumber(C('hget',k,f)) or 0)+n end"),
    ("hincrbyfloat", "function(C,k,f,n) return tostring((tonumber(C('hget',k,f)) or 0)+n) end"),
    ("zincrby", "function(C,k,n,m) return tostring((tonumber(C('zscore',k,m)) or 0)+n) end"),
    (
        "set",
        "function(C,k,v,...) local n,g for i=1,select('#',...) do local o=O((select(i,...))) if o=='get' then g=true \
      elseif o=='nx' or o=='xx' then n=o end end if g then return C('get',k) end \
      if n and (C('exists',k)==1)~=(n=='xx') then return false end return {ok='OK'} end",
    ),
    ("setnx", "function(C,k) return 1-C('exists',k) end"),
    ("getset", "function(C,k) return C('get',k) end"),
    ("getdel", "function(C,k) return C('get',k) end"),
    ("getex", "function(C,k) return C('get',k) end"),
    ("del", "function(C,...) return C('exists',...) end"),
    ("unlink", "function(C,...) return C('exists',...) end"),
    ("expire", "function(C,k) return C('exists',k) end"),
    ("pexpire", "function(C,k) return C('exists',k) end"),
    ("persist", "function(C,k) return C('exists',k) end"),
    ("hset", "function(C,k,f) return 1-C('hexists',k,f) end"),
    ("hsetnx", "function(C,k,f) return 1-C('hexists',k,f) end"),
    ("hdel", "function(C,k,f) return C('hexists',k,f) end"),
    ("sadd", "function(C,k,m) return 1-C('sismember',k,m) end"),
    ("srem", "function(C,k,m) return C('sismember',k,m) end"),
    ("smove", "function(C,k,_,m) return C('sismember',k,m) end"),
    ("spop", "function(C,k,n) if n then return C('srandmember',k,n) end return C('srandmember',k) end"),
    ("zrem", "function(C,k,m) return C('zscore',k,m) and 1 or 0 end"),
    ("zpopmin", "function(C,k,n) return C('zrange',k,0,(n or 1)-1,'withscores') end"),
    ("zpopmax", "function(C,k,n) return C('zrevrange',k,0,(n or 1)-1,'withscores') end"),
    ("lpush", "function(C,k,...) return C('llen',k)+select('#',...) end"),
    ("rpush", "function(C,k,...) return C('llen',k)+select('#',...) end"),
    ("lpop", "function(C,k,n) return l(C,k,1,n) end"),
    ("rpop", "function(C,k,n) return l(C,k,2,n) end"),
    ("blpop", "function(C,k) local v=l(C,k,1) return v and {k,v} end"),
    ("brpop", "function(C,k) local v=l(C,k,2) return v and {k,v} end"),
    ("rpoplpush", "function(C,k) return l(C,k,2) end"),
    ("lmove", "function(C,k,_,s) return l(C,k,O(s)=='left' and 1 or 2) end"),
    ("llen", "function(C,k) local p=s[k] or {0,0} return math.max(C('llen',k)-p[1]-p[2],0) end"),
    (
        "sort",
        "function(C,...) for i=2,select('#',...) do local o=select(i,...) if T(o)=='string' and O(o)=='store' then return 0 end end \
      return C('sort',...) end",
    ),
    ("publish", "function() return 0 end"),
    ("spublish", "function() return 0 end"),
    ("xadd", "function() return '0-1' end"),
];

/// Takes an element from the start (1) or the end (2) of a list, or `n` of them. `s` has the number of those taken before.
const POP: &str = "local s={} local function l(C,k,e,n) local p=s[k] or {0,0} s[k]=p if n then local v={} \
    local t=e==1 and C('lrange',k,p[1],p[1]+n-1) or C('lrange',k,-n-p[2],-1-p[2]) for i=1,#t do v[i]=e==1 and t[i] or t[#t+1-i] end \
    p[e]=p[e]+#v return #v>0 and v end local v=C('lindex',k,e==1 and p[1] or -1-p[2]) p[e]=p[e]+1 return v end;";

/// Writes that return nothing, as for absent keys.
const RETURN_NOTHING: &str = "blmpop bzmpop bzpopmax bzpopmin lmpop xautoclaim xclaim xreadgroup zmpop";

/// Writes that return `OK`. All others return 1.
const RETURN_OK: &str = "hmset lset ltrim mset pfmerge psetex rename restore select setex xgroup";

/// Reads that return an integer, or an array. All others return no value for an absent key.
const INTEGERS: &str =
    "bitcount exists getbit hexists hlen hstrlen llen pfcount scard sismember strlen touch xlen zcard zcount zlexcount";
const ARRAYS: &str = "hgetall hkeys hmget hrandfield hvals lrange mget sdiff sinter smembers smismember sort sunion xrange xrevrange zdiff zinter \
     zmscore zrandmember zrange zrangebylex zrangebyscore zrevrange zrevrangebylex zrevrangebyscore zunion";

/// Names of all commands that only read, each between spaces.
static READS: LazyLock<String> = LazyLock::new(|| {
    let table = CommandTable::builtin();
    let reads = table.iter().filter(|c| c.flags.has(Flags::READONLY) && rule(c).is_some() && !c.name.contains('|'));
    let names: BTreeSet<String> = reads.map(|c| c.name.to_ascii_lowercase()).collect();
    let containers = ["command", "echo", "memory", "object", "ping", "time", "xinfo"].map(str::to_owned);
    names.into_iter().chain(containers).fold(" ".to_owned(), |all, name| all + &name + " ")
});

/// Returns `w`, which replaces `call` and `pcall` in a rehearsal: for the literal commands of a script, or for `any`.
/// `x`: the call has a foreign key.
pub(super) fn simulation(facts: &Facts<'_>, any: bool) -> String {
    let is_used = |name: &str| any || facts.commands.contains(name);
    let mut out = format!(
        "local function K0(n) n=' '..n..' ' if F(' {INTEGERS} ',n,1,true) then return 0 elseif F(' {ARRAYS} ',n,1,true) then return {{}} \
         elseif n==' ttl ' or n==' pttl ' then return -2 elseif n==' type ' then return {{ok='none'}} end return false end;"
    );
    if ["blpop", "brpop", "llen", "lmove", "lpop", "rpop", "rpoplpush"].into_iter().any(is_used) {
        out.push_str(POP);
    }
    out.push_str("local h local function H0() h={");
    let written = WRITES.iter().filter(|(name, _)| is_used(name));
    written.for_each(|(name, function)| {
        let _ = write!(out, "{name}={function},");
    });
    let reads = if any {
        READS.clone()
    } else {
        facts
            .commands
            .iter()
            .filter(|name| READS.contains(&format!(" {name} ")))
            .fold(" ".to_owned(), |all, name| all + name + " ")
    };
    let _ = write!(
        out,
        "}} end local u=0 local function w(C,n,...) u=u+1 if u>{CALLS_MAX} then if u>{} then E('') end return false end \
         n=O(n) if x then C=K0 end if h[n] then return h[n](C,...) end local m=' '..n..' ' if F('{reads}',m,1,true) then return C(n,...) end \
         if F(' {RETURN_OK} ',m,1,true) then return {{ok='OK'}} end if F(' {RETURN_NOTHING} ',m,1,true) then return false end return 1 end;",
        2 * CALLS_MAX
    );
    out
}

/// Returns `Y`, which executes the text of a script: with a token, after a rehearsal. The result of a rehearsal with foreign
/// keys is an error with the token and the names in hexadecimal; after `!`, it always is. `uses_setresp`: the text may have changed the protocol.
pub(super) fn run(uses_setresp: bool) -> String {
    let reset = if uses_setresp { "if R.setresp then R.setresp(2) end " } else { "" };
    format!(
        "local function Y(b) if r=='' then return b() end local e,f,k,a=KEYS,ARGV,{{}},{{}} for i=1,#e do k[i]=e[i] end for i=1,#f do a[i]=f[i] end \
         local o=L(r,1,1)=='!' if o then r=L(r,2) end \
         local m=math.random(2147483647) math.randomseed(m) q=true H0() pcall(b) q=false {reset}if o or y[1] then for i=1,#y do \
         y[i]=','..string.gsub(y[i],'.',function(c) return string.format('%02x',string.byte(c)) end) end \
         return {{err='ERR {FOREIGN}'..r..':'..table.concat(y)}} end \
         for i in pairs(e) do e[i]=nil end for i in pairs(f) do f[i]=nil end for i=1,#k do e[i]=k[i] end for i=1,#a do f[i]=a[i] end \
         if KEYS~=e then KEYS=e end if ARGV~=f then ARGV=f end math.randomseed(m) return b() end;"
    )
}

/// Returns a member that has no effect in a rehearsal, as a field of a table.
pub(super) fn silent(member: &str) -> String {
    format!(",{member}=function(...) if q then return true end return R.{member}(...) end")
}

/// Start of the error of a rehearsal, before the token.
pub(crate) const FOREIGN: &str = "switchyard-keys:";
