//! Lua preludes for the run-time check of scripts and libraries: they replace `redis` by a table with checked
//! functions.
//!
//! Inserted before the text, so that the text cannot undo it: it cannot reach the locals of an earlier function. A
//! single line, so that line numbers in errors stay correct. The server's own tables (`string`, `bit`) are read-only
//! since Redis 6.2.7 and 7.0; functions used by every call are held in locals nevertheless.
//!
//! The text of a script becomes a function, which the prelude can execute twice: first as a rehearsal ([`rehearsal`]).

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, LazyLock};

use switchyard_policy::topology::{CaptureEnd, Pattern, Ruled};
use switchyard_resp::command::{CommandTable, Handling, Keys, Local};

use super::UndeclaredKeys;
use super::rehearsal;
use super::rules::{entries, entry};
use super::syntax::Facts;

/// Members of `redis` that touch no keys.
pub(super) const HARMLESS: &str = "log sha1hex error_reply status_reply setresp replicate_commands set_repl breakpoint debug LOG_DEBUG LOG_VERBOSE LOG_NOTICE \
     LOG_WARNING REPL_ALL REPL_AOF REPL_SLAVE REPL_REPLICA REPL_NONE REDIS_VERSION REDIS_VERSION_NUM SERVER_NAME SERVER_VERSION \
     SERVER_VERSION_NUM VALKEY_VERSION VALKEY_VERSION_NUM";

/// Start of the check. `K` is the table of declared keys, `E` raises an error, `C` and `Q` are the server's `call` and
/// `pcall`; `T`, `F`, `L` and `O` are Lua functions. `X` refuses, `Z` refuses a command. `A` returns the part of a key
/// that determines its slot. `D` checks a key; `h` is its probable index in `K`. An error is a table since Redis 7.0,
/// and a text before: older nodes would drop the message of a table. The presence of `acl_check_cmd` distinguishes
/// them.
///
/// `G` has the declared keys whose slots are at this node as a whole, and `B` the names of keys there that live elsewhere. In a
/// rehearsal (`q`), `D` adds a key that it does not permit to `y`, sets `x` and returns true.
const KEYS: [&str; 5] = [
    "local function X(t) t='ERR Switchyard: '..t E(R.acl_check_cmd and {err=t} or t,0) end;\
    local function Z(c) X('a script may not call '..c..' (which commands it may, docs/commands.md says)') end;",
    "local function S(k) local b,x,l,c=string.byte,bit.bxor,bit.lshift,0 for i=1,#k do c=x(c,l(b(k,i),8)) for _=1,8 do c=l(c,1) \
    if c>=65536 then c=x(c,69665) end end end return c%16384 end;\
    local function D(k,h) if k~=nil and K[h or 1]==k then return end local t=T(k) if t=='number' then \
    if k%1~=0 or k>=1e15 or k<=-1e15 or k==0 and 1/k<0 then X('the script names a key by a number that not every server writes alike') end \
    k=string.format('%.0f',k) elseif t~='string' then return end for i=1,#K do if K[i]==k then return end end ",
    // Omitted if slots do not depend on hash tags: then only declared keys are allowed.
    "local a=A(k) for i=1,#G do if A(G[i])==a then return end end \
    if G[1] then local s,o=S(a) for i=1,#G do local b=A(G[i]) if b~=o then o=b if S(b)==s then return end end end end ",
    "if q then x=true if not y[k] then y[k]=true y[#y+1]=L(k,1,1000000) y[0]=(y[0] or 0)+#k if #y>=1000 or y[0]>1000000 then E('') end end return true end ",
    "X('the script touches the key \\''..L(k,1,128)..'\\', which it neither declares in KEYS nor has in the slot of one that it declares') end;",
];

/// Takes the router's argument, the last one, from `ARGV` ([`crate::script_argument`]). `r` is the token of a rehearsal or
/// empty. The last `n` of `KEYS` are the router's, and removed. `%COPY%` stands for the condition of a copy of `KEYS`.
const TAKE_ARGUMENT: &str = "local q,x,y,r,n,g,H=false,false,{},string.match(ARGV[#ARGV],'^([^:]*):(%d+):([^:]*):(.*)$') ARGV[#ARGV]=nil n=tonumber(n) \
    local K=KEYS if %COPY% then K={} for i=1,#KEYS do K[i]=KEYS[i] end for i=#KEYS,#KEYS-n+1,-1 do KEYS[i]=nil end end;";

/// Reads `G` and `B` from the router's argument.
const TAKE_PLACES: &str = "local G,B=K,{} if g~='*' then G={} for i in string.gmatch(g,'%d+') do G[#G+1]=K[tonumber(i)] end end \
    do local i=1 while i<=#H do local _,b,l=F(H,'^(%d+):',i) B[L(H,b+1,b+l)]=true i=b+l+1 end end;";

/// `Y` checks a name that no rehearsal may add to the keys: a shard channel, which lives at the owner of its slot. `P` checks
/// the literal start of a pattern of `SORT`.
const NOT_REHEARSED: &str = "local function Y(k) local w=q q=false local o,e=pcall(D,k) q=w if not o then E(e,0) end end;\
    local function P(p) Y(p) for k in pairs(B) do if L(k,1,#p)==p then X('the script sorts by a pattern of keys that live at several nodes') end end end;";

/// Start of `A`: returns the hash tag in the name, if any.
const OWN_TAG: &str =
    "local function A(k) local a=F(k,'{',1,true) if a then local b=F(k,'}',a+1,true) if b and b>a+1 then ";

/// Returns the definition of `A`. During an adoption of rules, its results are equal if the tags by both sets are equal,
/// so that the keys share a slot. `S` knows no passages, so `D` does not compare slots then.
fn tag_function(rules: Option<&Ruled>) -> String {
    let mut out = OWN_TAG.to_owned();
    match rules.map(|ruled| (ruled.rules(), ruled.adoption())) {
        Some((present, Some((next, _)))) => {
            out.push_str("local t=L(k,a+1,b-1) return #t..':'..t..t end end local x,y=k,k ");
            for (name, set) in [("x", present), ("y", next)] {
                out.push_str("repeat ");
                set.patterns()
                    .iter()
                    .for_each(|pattern| match_of(pattern, |tag| format!("{name}={tag} break"), &mut out));
                out.push_str("until true ");
            }
            out.push_str("return #x..':'..x..y end;");
        }
        found => {
            out.push_str("return L(k,a+1,b-1) end end ");
            for pattern in found.iter().flat_map(|(set, _)| set.patterns()) {
                match_of(pattern, |tag| format!("return {tag}"), &mut out);
            }
            out.push_str("return k end;");
        }
    }
    out
}

/// Appends the test of a pattern. `found` formats the statement for a match, given the expression of the tag.
fn match_of(pattern: &Pattern, found: impl Fn(&str) -> String, out: &mut String) {
    let Pattern { prefix, capture, suffix, is_open, tag, .. } = pattern;
    let quoted = |bytes: &[u8]| {
        let digits = bytes.iter().fold(String::new(), |all, byte| match byte {
            b if b.is_ascii_alphanumeric() => all + &char::from(*b).to_string(),
            b => all + &format!("\\{b:03}"),
        });
        format!("'{digits}'")
    };
    let (start, length) = (quoted(prefix), prefix.len());
    let _ = match capture {
        None if *is_open => write!(out, "if L(k,1,{length})=={start} then {} end ", found(&quoted(tag))),
        None => write!(out, "if k=={start} then {} end ", found(&quoted(tag))),
        Some(end) => {
            let byte = quoted(suffix.get(..1).unwrap_or_default());
            let end = match end {
                CaptureEnd::Name => "local e=#r+1 ".to_owned(),
                CaptureEnd::First => format!("local e=F(r,{byte},1,true) "),
                CaptureEnd::Last => {
                    format!("local e,f=nil,F(r,{byte},1,true) while f do e=f f=F(r,{byte},f+1,true) end ")
                }
            };
            let fits = if *is_open {
                format!("L(r,e,e+{})=={}", suffix.len() as i64 - 1, quoted(suffix))
            } else {
                format!("L(r,e)=={}", quoted(suffix))
            };
            write!(
                out,
                "if L(k,1,{length})=={start} then local r=L(k,{}) {end}if e and e>1 and {fits} then local c=L(r,1,e-1) \
                 local f=F(c,'}}',1,true) if f then c=L(c,1,f-1) end if c~='' then {} end end end ",
                length + 1,
                found("c")
            )
        }
    };
}

/// Returns the check of undeclared keys by the tags and slots of `G`.
fn check_beside(rules: Option<&Ruled>) -> String {
    let [_, _, undeclared, ..] = KEYS;
    let (by_tag, by_slot) = undeclared.split_at(undeclared.find("if G[1]").unwrap_or(undeclared.len()));
    let by_slot = if rules.is_some_and(|ruled| ruled.adoption().is_some()) { "" } else { by_slot };
    [by_tag, by_slot].concat()
}

/// Returns the check of keys in a script.
fn script_key_check(beside: &UndeclaredKeys) -> String {
    let [refusals, declared, _, rehearsed, end] = KEYS;
    match beside {
        UndeclaredKeys::Nothing => [refusals, "local B={} ", declared, rehearsed, end].concat(),
        UndeclaredKeys::Slot(rules) => {
            let rules = rules.as_deref();
            let beside = format!("if not B[k] then {}end ", check_beside(rules));
            [refusals, TAKE_PLACES, &tag_function(rules), declared, &beside, rehearsed, end].concat()
        }
    }
}

/// Returns the check of keys in a library, whose functions are not rehearsed.
fn library_key_check(rules: Option<&Ruled>) -> String {
    let [refusals, declared, _, _, end] = KEYS;
    let beside = check_beside(rules).replace("G[", "K[").replace("#G", "#K");
    [refusals, &tag_function(rules), declared, &beside, end].concat()
}

/// Start of the check of a call. `I` finds the entry of a command, in the format of [`entry`]; `U` checks an unlisted
/// command.
const JUDGE: &str = "local function V(c,...) if T(c)~='string' then if T(c)=='number' then Z(c) end return end c=O(c) local e=I(c) \
    if e=='1' then return D((...)) end if e=='0' then return end if not e then e=U(c) if not e then return end end ";

/// Check of `SPUBLISH`.
const CHANNEL: &str = "if e=='Y' then return Y(a[1]) end ";

/// Checks of commands with other entries. Options are cut at a NUL byte, like servers do.
const OTHERS: [(&str, &str); 8] = [
    (
        "",
        "local a,n={...},select('#',...) local function W(a) return T(a)=='string' and O(string.match(a,'^%Z*')) end ",
    ),
    ("Y", CHANNEL),
    (
        "C",
        "if e=='C' then local s=a[1] if s==nil then return end if T(s)~='string' then Z(c) end s=O(s) \
         e=I(c..'|'..s) if not e then Z(c..' '..s) end if e=='1' then return D(a[1]) end end ",
    ),
    (
        "R",
        "if L(e,1,1)=='R' then local f,l,s=string.match(e,'^R(%d+),(-?%d+),(%d+)$') f,l,s=tonumber(f),tonumber(l),tonumber(s) \
         if l<0 then l=n+1+l end for i=f,l,s do D(a[i],(i-f)/s+1) end return end ",
    ),
    (
        "N",
        "if L(e,1,1)=='N' then local d,k,s=string.match(e,'^N(%d),(%d+),(%d+)$') k,s=tonumber(k),tonumber(s) local m=tonumber(a[k]) \
         if d=='1' then D(a[1]) end if not m or m%1~=0 or m<1 then return end m=k+m*s if m>n then m=n end \
         for i=k+1,m,s do D(a[i],(i-k-1)/s+1) end return end ",
    ),
    (
        "S",
        "if e=='S' then D(a[1]) for i=2,n-1 do local w=W(a[i]) if w=='store' then D(a[i+1]) elseif w=='by' or w=='get' then \
         local p=a[i+1] local t=T(p)=='string' and F(p,'*',1,true) if t then p=L(p,1,t-1) \
         local a=F(p,'{',1,true) local b=a and F(p,'}',a+1,true) \
         if not b or b==a+1 then X('the script sorts by a pattern whose keys may be in any slot') end P(p) end end end return end ",
    ),
    (
        "G",
        "if L(e,1,1)=='G' then D(a[1]) for i=tonumber(L(e,2)),n-1 do local w=W(a[i]) if w=='store' or w=='storedist' then D(a[i+1]) end end return end ",
    ),
    (
        "X",
        "if e=='X' then local i=1 while i<=n do local w=W(a[i]) if w=='streams' then n=n-i for j=i+1,i+(n-n%2)/2 do D(a[j],j-i) end return \
         elseif w=='block' or w=='count' or w=='claim' then i=i+2 elseif w=='group' then i=i+3 elseif w=='noack' then i=i+1 else break end end \
         X('the script calls '..c..' in a form that Switchyard does not understand') end ",
    ),
];

/// Refuses all remaining calls.
const NOTHING_ELSE: &str = "Z(c) end;";

/// Returns the check for calls of commands with these entries.
fn call_check<'c>(codes: impl Iterator<Item = &'c str> + Clone) -> String {
    let mut out = JUDGE.to_owned();
    let needed = |kind: &str| codes.clone().any(|code| code.starts_with(kind) && !matches!(code, "0" | "1" | "-"));
    OTHERS.iter().filter(|(kind, _)| needed(kind)).for_each(|(_, text)| out.push_str(text));
    out + NOTHING_ELSE
}

/// `U` if a text may call any command. Unknown commands are left for the node to refuse. Commands with keys at fixed
/// positions are checked by these positions.
const UNLISTED: &str = "local function U(c) if F(c,'[^%w%._%-]') then Z(c) end local i=Q('COMMAND','INFO',c) if T(i)~='table' or i.err then Z(c) end \
    i=i[1] if not i then return end if T(i)~='table' or T(i[3])~='table' then Z(c) end \
    for a,b in pairs(i[3].set or i[3]) do if T(a)=='table' then b=a end if T(b)=='table' then b=b.ok end if b=='movablekeys' then Z(c) end end \
    if T(i[4])~='number' or i[4]<1 or i[6]<1 then Z(c) end return 'R'..i[4]..','..i[5]..','..i[6] end;";

/// Replacement of `call`.
const CALL: &str = "local function c(...) V(...) return C(...) end;";

/// Replacement of `call` in a script. For a command of `N` with one key, only this key is checked.
const CALL_LISTED: &str = "local function c(...) x=false local n,k=... if N[n]=='1' then if not M[k] then D(k) end else V(...) end \
    if q then return w(C,...) end return C(...) end;";

/// Remembers in `M` the keys that a script may use, up to a number that bounds the memory. A key that has passed the
/// check stays allowed, because its slot does not change while the script runs.
const REMEMBER: &str = "local M,m,J={},0,D local function D(k,h) if M[k] or J(k,h) then return end \
    if m<1000 and T(k)=='string' then m=m+1 M[k]=true end end;";

/// Replacement of `pcall` in a script.
const PCALL_LISTED: &str = "local function p(...) x=false local o,e=pcall(V,...) if not o then if T(e)~='table' then e={err=e} end return e end \
    if q then o,e=pcall(w,Q,...) if o then return e end if z() then E('') end return T(e)=='table' and e or {err=tostring(e)} end return Q(...) end;";

/// Replacement of `pcall`.
const PCALL: &str = "local function p(...) local o,e=pcall(V,...) if not o then if T(e)~='table' then e={err=e} end return e end return Q(...) end;";

/// Nodes know the router's user, not the client's.
const ACL_CHECK_CMD: &str = "acl_check_cmd=function() X('a script may not call redis.acl_check_cmd: the node would not answer for the user of the client') end";

/// The metatable of strings is shared by all scripts, and writable before Redis 8.2.2: a text gets a copy.
const GETMETATABLE: &str = "local getmetatable=(function() local g,t=getmetatable,type return function(...) \
    if t((...))=='string' then return {__index=string} end return g(...) end end)() ";

/// Makes our `redis` read-only like the server's, although it has a metatable for that.
const RAWSET: &str = "local rawset=(function() local s,e,r=rawset,error,redis return function(t,...) \
    if t==r then e('Attempt to modify a readonly table',0) end return s(t,...) end end)() ";

/// Prelude of unparsable text: a server reports the syntax errors, and executes nothing.
pub(super) const NOT_UNDERSTOOD: &str = "do return {err='ERR Switchyard does not understand this script'} end ";

/// Returns the metatable of a `redis` that may be used in any way: `R` is the server's table, `own` finds our members.
fn guard(own: &str) -> String {
    format!(
        "{{__index=function(_,n) return {own}T(n)=='string' and F(' {} ',' '..n..' ',1,true) and R[n] or nil end,\
         __newindex=function() E('Attempt to modify a readonly table',2) end,__metatable=false}}",
        HARMLESS
    )
}

/// All commands in one string, for searches.
static LISTED: LazyLock<String> =
    LazyLock::new(|| entries().into_iter().fold(" ".to_owned(), |all, (name, code)| all + &name + ":" + &code + " "));

static JUDGES_ALL: LazyLock<String> = LazyLock::new(|| call_check(entries().iter().map(|(_, code)| code.as_str())));

/// Check for a script that may call any command, after the table `N` of its literal commands.
static CALLS_ANY: LazyLock<String> = LazyLock::new(|| {
    format!(
        "local j='{}' local function I(c) local e=N[c] if e then return e end local _,e=F(j,' '..c..':',1,true) \
         return e and string.match(j,'^%S+',e+1) end;{UNLISTED}{}",
        *LISTED, *JUDGES_ALL
    )
});

/// Returns the table `N` of the literal commands of a script, and the check of calls: for these commands only, unless the
/// script may call `any`. With placement rules SPUBLISH is refused, because a shard channel has no rule and may be at
/// another node.
fn calls(facts: &Facts<'_>, table: &CommandTable, beside: &UndeclaredKeys, any: bool) -> String {
    let has_rules = matches!(beside, UndeclaredKeys::Slot(Some(_)));
    let mut unknown = false;
    let mut list: Vec<(String, String)> = Vec::new();
    for name in &facts.commands {
        match table.by_name(name).map(|command| (command, entry(command))) {
            Some((container, Some(found))) if found.1 == "C" => {
                let prefix = format!("{}|", container.name);
                list.extend(table.iter().filter(|c| c.name.starts_with(&prefix)).filter_map(entry));
                list.push(found);
            }
            Some((command, Some((name, _)))) if has_rules && command.handling == Handling::Local(Local::Spublish) => {
                list.push((name, "-".to_owned()));
            }
            Some((_, Some(found))) => list.push(found),
            // Commands on all keys, or on one node.
            Some((command, None)) if command.keys == Keys::None => {
                list.push((command.name.to_ascii_lowercase(), "-".to_owned()))
            }
            _ => unknown = true,
        }
    }
    // Unlisted commands have their keys at fixed positions, if they may be called.
    let unlisted = unknown.then_some("R");
    let judging = if any {
        CALLS_ANY.clone()
    } else {
        let of_unlisted = if unknown { UNLISTED } else { "local U=Z;" };
        let judging = call_check(list.iter().map(|(_, code)| code.as_str()).chain(unlisted));
        format!("local function I(c) return N[c] end;{of_unlisted}{judging}")
    };
    // `c` finds commands with one key as written, `V` finds all others in lower case.
    let is_called_by_v = |code: &str| code != "1" || facts.members.contains(&b"pcall"[..]) || facts.redis_escapes;
    let lower = list.iter().filter(|(_, code)| is_called_by_v(code)).map(|(name, code)| (name, code));
    let spelled = facts.spelled_commands.iter().filter_map(|spelled| {
        let (_, code) = list.iter().find(|(name, code)| code == "1" && spelled.eq_ignore_ascii_case(name))?;
        spelled.bytes().all(|byte| byte.is_ascii_alphanumeric()).then_some((spelled, code))
    });
    let names: BTreeMap<&String, &String> = lower.chain(spelled).collect();
    let list = names.iter().fold(String::new(), |all, (name, code)| all + &format!("['{name}']='{code}',"));
    format!("local N={{{list}}} {judging}")
}

/// Returns the prelude of a script.
pub(super) fn script_prelude(facts: &Facts<'_>, table: &CommandTable, beside: &UndeclaredKeys) -> String {
    let mut out = String::with_capacity(4096);
    out.push_str(rehearsal::EFFECTS);
    out.push_str(
        "local redis,Y,Z=(function() local R,E,T,F,L,O=redis,error,type,string.find,string.sub,string.lower local C,Q=R.call,R.pcall ",
    );
    out.push_str(&TAKE_ARGUMENT.replace("%COPY%", if facts.keys_escape { "true" } else { "n>0" }));
    out.push_str(&script_key_check(beside));
    out.push_str(REMEMBER);
    out.push_str(NOT_REHEARSED);
    let any = facts.redis_escapes || facts.calls_any;
    out.push_str(&calls(facts, table, beside, any));
    out.push_str(&rehearsal::simulation(facts, any));
    out.push_str(CALL_LISTED);
    out.push_str(PCALL_LISTED);
    let uses = |member: &str| facts.redis_escapes || facts.members.contains(member.as_bytes());
    out.push_str(&rehearsal::run(uses("setresp")));
    if facts.redis_escapes {
        let _ = write!(out, "local p={{call=c,pcall=p,{ACL_CHECK_CMD}");
        rehearsal::SILENT.iter().for_each(|member| out.push_str(&rehearsal::silent(member)));
        let _ = write!(out, "}} return setmetatable({{}},{}),Y,z end)() ", guard("p[n] or "));
    } else {
        out.push_str("return {call=c,pcall=p");
        if facts.members.contains(&b"acl_check_cmd"[..]) {
            let _ = write!(out, ",{ACL_CHECK_CMD}");
        }
        for member in facts.members.iter().filter_map(|m| HARMLESS.split(' ').find(|h| h.as_bytes() == *m)) {
            match rehearsal::SILENT.contains(&member) {
                true => out.push_str(&rehearsal::silent(member)),
                false => {
                    let _ = write!(out, ",{member}=R.{member}");
                }
            }
        }
        out.push_str("},Y,z end)() ");
    }
    if facts.globals.contains(&b"server"[..]) {
        out.push_str("local server=redis ");
    }
    if facts.globals.contains(&b"getmetatable"[..]) {
        out.push_str(GETMETATABLE);
    }
    if facts.globals.contains(&b"rawset"[..]) {
        out.push_str(RAWSET);
    }
    out.push_str(&rehearsal::uncaught(facts));
    out.push_str("return Y(function(KEYS,ARGV,...) ");
    out
}

/// End of a script with a prelude. On a line of its own, because the text may end with a comment.
pub(super) const SCRIPT_END: &str = "\nend)";

/// Prelude of function libraries before and after the check of keys, which depends on the rules. Otherwise constant, so
/// that checked libraries are recognized by it. `K` has the keys of the running call. While a library is loaded, it has nearly no globals, so the functions are resolved at the first call.
/// From then on `redis` is read-only, with its members in `H`.
///
/// A caller of the result of `G` chooses which keys count as declared, so it is passed only to the server. A table with
/// a callback is copied field by field, because tables cannot be iterated while a library is loaded. Servers ignore the
/// case of fields; mixed spellings are dropped.
pub(super) static OF_LIBRARY: LazyLock<[String; 2]> = LazyLock::new(|| {
    let text = format!(
        "local redis=(function() local K,N,R,E,T,F,L,O,C,Q={{}};{}local function I(c) return N[c] end;{UNLISTED}{}{CALL}{PCALL}\
         local P,H={{}},{{call=c,pcall=p,{ACL_CHECK_CMD}}} \
         local function B() R,E,T,F,L,O=redis,error,type,string.find,string.sub,string.lower C,Q=R.call,R.pcall \
         N={{}} for n,e in string.gmatch('{}','(%S+):(%S+)') do N[n]=e end for n,v in pairs(P) do H[n]=v P[n]=nil end setmetatable(P,{}) end;\
         local function G(f) return function(k,a) if not N then B() end K={{}} for i=1,#k do K[i]=k[i] end return f(k,a) end end;\
         P.register_function=function(n,f,x) if x~=nil then return redis.register_function(n,f,x) end \
         if f~=nil then return redis.register_function(n,G(f)) end local b=n.callback or n.CALLBACK return redis.register_function(\
         {{function_name=n.function_name or n.FUNCTION_NAME,description=n.description or n.DESCRIPTION,flags=n.flags or n.FLAGS,callback=b and G(b)}}) end;\
         P.log=redis.log P.LOG_DEBUG=redis.LOG_DEBUG P.LOG_VERBOSE=redis.LOG_VERBOSE P.LOG_NOTICE=redis.LOG_NOTICE \
         P.LOG_WARNING=redis.LOG_WARNING return P end)() local server=redis {}\
         local rawset=(function() local r=redis return function(t,...) if t==r then error('Attempt to modify a readonly table',0) end return rawset(t,...) end end)() ",
        KEY_CHECK,
        // Without rehearsals, a channel is checked like a key.
        JUDGES_ALL.replace(CHANNEL, "").replace("P(p)", "D(p)"),
        LISTED.replace(" spublish:Y ", " spublish:1 "),
        guard("H[n] or "),
        GETMETATABLE.replace(
            "(function() local g,t=getmetatable,type return function(...) ",
            "(function() return function(...) local g,t=getmetatable,type "
        )
    );
    let (before, after) = text.split_once(KEY_CHECK).unwrap_or((&text, ""));
    [before.to_owned(), after.to_owned()]
});

/// Place of the check of keys in the prelude of libraries.
const KEY_CHECK: &str = "\0";

/// Returns the prelude of function libraries.
pub(super) fn library_prelude(rules: Option<&Arc<Ruled>>) -> String {
    let [before, after] = &*OF_LIBRARY;
    [before.as_str(), &library_key_check(rules.map(|rules| &**rules)), after.as_str()].concat()
}

/// Removes the prelude of function libraries, for any rules.
pub(super) fn without_library_prelude(text: &[u8]) -> Option<&[u8]> {
    let [before, after] = &*OF_LIBRARY;
    let rest = text.strip_prefix(before.as_bytes())?;
    let end = memchr::memmem::find(rest, after.as_bytes())? + after.len();
    rest.get(end..)
}
