//! Rehearsals: a script with undeclared keys is executed twice by its node, within one call. First without effects, to
//! find the keys that it touches. If some of them live elsewhere, the call ends with their names, and the router brings
//! them to the node and calls the script again. Otherwise the script is executed.
//!
//! In a rehearsal, reads are executed. Writes are not: tables in Lua have their effects, which later reads of the same
//! keys show as far as `rehearsal.lua` knows the commands. A script that depends on other effects may touch other keys when
//! it is executed. It then gets an error, as without a rehearsal. So a wrong result costs an error at most.
//!
//! Not a run that ends at the first foreign key: the next one may follow after a write. Not an analysis of the text: most
//! names depend on values.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::LazyLock;

use switchyard_resp::command::{CommandTable, Flags};

use super::rules::rule;
use super::split_shebang;
use super::syntax::Facts;

/// Members of `redis` without an effect in a rehearsal.
pub(super) const SILENT: [&str; 5] = ["breakpoint", "debug", "log", "replicate_commands", "set_repl"];

/// Maximum calls of a rehearsal. A loop until a key is empty may not end, because the key is not changed. Beyond them,
/// calls return no value, and the same number later they fail.
const CALLS_MAX: usize = 10_000;

/// Commands that a rehearsal does not execute, and reads that show their effects, by types of values.
static SECTIONS: LazyLock<Vec<Section>> = LazyLock::new(|| {
    let mut sections = Vec::new();
    for line in include_str!("rehearsal.lua").lines().map(str::trim) {
        if line.starts_with("-- section ") {
            sections.push(Section::default());
        }
        let Some(section) = sections.last_mut().filter(|_| !line.starts_with("--")) else { continue };
        if let Some((name, _)) = line.strip_prefix("h.").and_then(|rest| rest.split_once('=')) {
            section.commands.push((name.to_owned(), String::new()));
        }
        let text = section.commands.last_mut().map_or(&mut section.common, |(_, text)| text);
        text.push_str(line);
        text.push(' ');
    }
    sections
});

/// A part of the Lua code.
#[derive(Debug, Default)]
struct Section {
    /// Functions that its commands use.
    common: String,
    /// Names of commands, with their functions.
    commands: Vec<(String, String)>,
}

/// Start of the text of a checked script: effects of rehearsed writes, by types of values.
pub(super) const EFFECTS: &str = "local W={} ";

/// Writes that return nothing, as for absent keys.
const RETURN_NOTHING: &str = "lmpop xautoclaim xclaim xreadgroup zmpop";

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
    out.push_str("local h local function H0() h={} for k in string.gmatch('vlszh','.') do W[k]=W[k] or {} end ");
    for (index, section) in SECTIONS.iter().enumerate() {
        let mut used = section.commands.iter().filter(|(name, _)| is_used(name)).peekable();
        // The first section has what all others use.
        if index == 0 || used.peek().is_some() {
            out.push_str(&section.common);
        }
        used.for_each(|(_, function)| out.push_str(function));
    }
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
        "end local u=0 local function w(C,n,...) u=u+1 if u>{CALLS_MAX} then if u>{} then E('') end return false end \
         n=O(n) if x then C=K0 end if h[n] then return h[n](C,...) end local m=' '..n..' ' if F('{reads}',m,1,true) then return C(n,...) end \
         if F(' {RETURN_OK} ',m,1,true) then return {{ok='OK'}} end if F(' {RETURN_NOTHING} ',m,1,true) then return false end return 1 end;\
         local function z() return q and (u>{0} or #y>=1000 or (y[0] or 0)>1000000) end;",
        2 * CALLS_MAX
    );
    out
}

/// Returns `Y`, which executes the text of a script: with a token, after a rehearsal. The result of a rehearsal with foreign
/// keys is an error with the token and the names in hexadecimal; after `!`, it always is. `uses_setresp`: the text may have changed the protocol.
pub(super) fn run(uses_setresp: bool) -> String {
    let reset = if uses_setresp { "if R.setresp then R.setresp(2) end " } else { "" };
    format!(
        "local function Y(b) if r=='' then return b(KEYS,ARGV) end local k,a={{}},{{}} for i=1,#KEYS do k[i]=KEYS[i] end for i=1,#ARGV do a[i]=ARGV[i] end \
         local o=L(r,1,1)=='!' if o then r=L(r,2) end \
         local m=math.random(2147483647) math.randomseed(m) q=true H0() pcall(b,k,a) q=false {reset}if o or y[1] then for i=1,#y do \
         y[i]=','..string.gsub(y[i],'.',function(c) return string.format('%02x',string.byte(c)) end) end \
         return {{err='ERR {FOREIGN}'..r..':'..table.concat(y)}} end math.randomseed(m) return b(KEYS,ARGV) end;"
    )
}

/// Returns replacements of functions that catch errors: none of them catches the error that ends a rehearsal, since a loop
/// would not end.
pub(super) fn uncaught(facts: &Facts<'_>) -> String {
    let mut out = String::new();
    let is_used = |name: &str| facts.globals.contains(name.as_bytes());
    for name in ["pcall", "xpcall"].into_iter().filter(|name| is_used(name)) {
        let _ = write!(
            out,
            "local {name}=(function() local c,e,z={name},error,Z local function r(...) if z() then e('',0) end return ... end \
             return function(...) return r(c(...)) end end)() "
        );
    }
    if is_used("coroutine") {
        out.push_str(
            "local coroutine=(function() local c,e,z=coroutine,error,Z local function r(...) if z() then e('',0) end return ... end \
             return setmetatable({resume=function(...) return r(c.resume(...)) end},{__index=c}) end)() ",
        );
    }
    out
}

/// Returns a member that has no effect in a rehearsal, as a field of a table.
pub(super) fn silent(member: &str) -> String {
    format!(",{member}=function(...) if q then return true end return R.{member}(...) end")
}

/// Start of the script that rehearses several scripts.
const SEVERAL: &str = "local W,f={},{} ";

/// Whether a script is one of [`rehearse_several`].
pub(crate) fn rehearses_several(text: &[u8]) -> bool {
    text.starts_with(SEVERAL.as_bytes())
}

/// Returns the part of a checked script that [`rehearse_several`] needs. `None`: it is no script that can be rehearsed.
pub(crate) fn part_for_several(text: &[u8]) -> Option<&[u8]> {
    split_shebang(text).1.strip_prefix(EFFECTS.as_bytes())
}

/// Returns a script that only rehearses calls of scripts, each with the effects of those before. Its arguments are, for each
/// call: index of the script from 1, numbers of keys and of arguments, keys, arguments. Its result has the error of each
/// rehearsal.
pub(crate) fn rehearse_several<'p>(parts: impl Iterator<Item = &'p [u8]>) -> Vec<u8> {
    let mut out = SEVERAL.as_bytes().to_vec();
    for part in parts {
        out.extend_from_slice(b"f[#f+1]=function(KEYS,ARGV) ");
        out.extend_from_slice(part);
        out.extend_from_slice(b"\nend ");
    }
    out.extend_from_slice(
        b"local o,i={},1 while ARGV[i] do local c,n,m,k,a=f[tonumber(ARGV[i])],tonumber(ARGV[i+1]),tonumber(ARGV[i+2]),{},{} i=i+3 \
        for j=1,n do k[j]=ARGV[i] i=i+1 end for j=1,m do a[j]=ARGV[i] i=i+1 end \
        local s,e=pcall(c,k,a) o[#o+1]=s and type(e)=='table' and e.err and {err=e.err} or '' end return o",
    );
    out
}

/// Start of the error of a rehearsal, before the token.
pub(crate) const FOREIGN: &str = "switchyard-keys:";
