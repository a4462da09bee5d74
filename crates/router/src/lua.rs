//! Analysis of scripts: whether the text proves that only declared keys are used, and the run-time check for all other
//! scripts.
//!
//! A script is sent to the owner of its declared keys. For any other key this is the wrong node: a read would miss
//! existing values, and a write would store values that are never found. Neither causes an error. So:
//! - Text in which every `redis.call` has a literal command name and as keys only `KEYS[...]`, or local variables that
//!   always have such a value, is sent unchanged ([`Verdict::Proved`]).
//! - Other text gets a prelude that replaces `redis`: each call is checked before it is made ([`Verdict::Wrapped`]).
//!   Keys in the slot of a declared key are allowed, as in Redis Cluster. A [`rehearsal`] finds all others beforehand.
//! - Text with a global name that is not listed is refused, because some (`_G`, `loadstring`) could bypass the prelude.
//!
//! All allowed items are listed: commands ([`rules`]), members of `redis` ([`prelude`]), global names (here). Text
//! outside the grammar ([`syntax`]) is not executed.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod prelude;
mod rehearsal;
mod rules;
mod sorting;
mod syntax;

use std::sync::Arc;

use sha1::{Digest, Sha1};
use switchyard_policy::topology::{Placement, Ruled};
use switchyard_resp::command::CommandTable;

use prelude::{HARMLESS, NOT_UNDERSTOOD, SCRIPT_END, library_prelude, without_library_prelude};
pub(crate) use rehearsal::{FOREIGN, part_for_several, rehearse_several, rehearses_several};
pub(crate) use sorting::sort_script;

/// Result of the analysis of a script.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Uses only declared keys. Executed unchanged.
    Proved,
    /// Executed after this prelude.
    Wrapped(Arc<str>),
    /// Not executed, for this reason.
    Refused(Arc<str>),
}

/// Global names that a script may use. None of them leads to another global, or to functions of another script.
const GLOBALS: &str = "ARGV KEYS _VERSION assert bit cjson cmsgpack collectgarbage coroutine error gcinfo getmetatable ipairs math next os pairs pcall \
     rawequal rawget rawset redis select server setmetatable string struct table tonumber tostring type unpack xpcall";

/// Length and SHA-1 of the preludes that older routers put before libraries.
const OLDER_PRELUDES: [(usize, [u8; 20]); 4] = [
    (
        3051,
        [
            0x35, 0x11, 0x90, 0xf1, 0xe8, 0x25, 0x57, 0xf9, 0xe7, 0xe6, 0xf2, 0x1f, 0xcb, 0x3f, 0x81, 0x66, 0xa1, 0x69,
            0x88, 0xb9,
        ],
    ),
    (
        7752,
        [
            0x57, 0x9e, 0x2f, 0x11, 0x1c, 0x37, 0x04, 0x8e, 0x90, 0x72, 0xc7, 0x89, 0xd7, 0x58, 0xa0, 0x4f, 0x5d, 0xf3,
            0x03, 0xfd,
        ],
    ),
    (
        8540,
        [
            0x85, 0x32, 0xae, 0x24, 0x5c, 0x28, 0xdc, 0xb7, 0x96, 0x7b, 0x8e, 0x09, 0x59, 0x37, 0x31, 0xb7, 0xf9, 0x95,
            0x9e, 0x0d,
        ],
    ),
    (
        7897,
        [
            0x55, 0x40, 0x36, 0x14, 0x7a, 0x45, 0x7b, 0x69, 0x6f, 0x10, 0xdc, 0xac, 0x38, 0xfd, 0x7a, 0x62, 0xd5, 0x43,
            0xf5, 0xa7,
        ],
    ),
];

/// Splits a text after its shebang line.
fn split_shebang(body: &[u8]) -> (&[u8], &[u8]) {
    if !body.starts_with(b"#!") {
        return (&[], body);
    }
    let end = body.iter().position(|b| *b == b'\n').map_or(body.len(), |at| at + 1);
    body.split_at(end)
}

/// Undeclared keys that a script may use.
#[derive(Clone, Debug)]
pub(crate) enum UndeclaredKeys {
    /// Keys in the slot of a declared key, as in Redis Cluster; with placement rules, keys with an equal tag.
    Slot(Option<Arc<Ruled>>),
    /// None: with ketama, script authors cannot know the slots of keys.
    Nothing,
}

impl UndeclaredKeys {
    /// Returns the undeclared keys that scripts may use under a placement.
    pub(crate) fn under(placement: &Placement) -> Self {
        match placement {
            Placement::Crc16 => Self::Slot(None),
            Placement::Ruled(ruled) => Self::Slot(Some(Arc::clone(ruled))),
            Placement::Continuum(_) => Self::Nothing,
        }
    }

    /// Whether these are the same keys, for certain.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Slot(Some(one)), Self::Slot(Some(another))) => Arc::ptr_eq(one, another),
            (Self::Slot(None), Self::Slot(None)) | (Self::Nothing, Self::Nothing) => true,
            _ => false,
        }
    }
}

/// Analyses a script or a library.
pub(crate) fn analyse(body: &[u8], table: &CommandTable, beside: &UndeclaredKeys) -> Verdict {
    let refused = |why: &str| Verdict::Refused(format!("ERR Switchyard does not run this script: {why}").into());
    let (shebang, text) = split_shebang(body);
    let engine = shebang.split(u8::is_ascii_whitespace).next().unwrap_or_default();
    if !shebang.is_empty() && !engine.eq_ignore_ascii_case(b"#!lua") {
        return refused("it is not written in Lua");
    }
    let Some(facts) = syntax::read(text, table) else { return Verdict::Wrapped(NOT_UNDERSTOOD.into()) };
    if let Some(name) = facts.globals.iter().find(|name| !GLOBALS.split(' ').any(|g| g.as_bytes() == **name)) {
        let shown = String::from_utf8_lossy(&name[..name.len().min(64)]);
        return refused(&format!(
            "it uses the global name {shown}, which docs/commands.md does not list (scripts.undeclared-keys)"
        ));
    }
    if facts.changes_redis {
        return refused("it assigns to redis, which no server allows");
    }
    if facts.changes_globals {
        return refused("it assigns to a global name, which servers from Redis 7 on refuse");
    }
    let is_known =
        |member: &[u8]| matches!(member, b"call" | b"pcall") || HARMLESS.split(' ').any(|h| h.as_bytes() == member);
    let calls = !facts.commands.is_empty();
    // A shard channel has no rule, so it may be at another node than the keys of its name's tag.
    let uses_shard_channels =
        matches!(beside, UndeclaredKeys::Slot(Some(_))) && facts.commands.iter().any(|name| name == "spublish");
    let open = uses_shard_channels
        || facts.redis_escapes
        || facts.calls_any
        || calls && (facts.other_keys || facts.keys_escape)
        || facts.globals.contains(&b"getmetatable"[..])
        // Most servers only have the older name.
        || facts.globals.contains(&b"server"[..])
        || !facts.members.iter().all(|member| is_known(member));
    if open { Verdict::Wrapped(prelude::script_prelude(&facts, table, beside).into()) } else { Verdict::Proved }
}

/// Inserts a prelude after the shebang, if any. Returned in parts to avoid a copy.
fn with_prelude<'a>(body: &'a [u8], prelude: &'a str) -> [&'a [u8]; 3] {
    let (shebang, text) = split_shebang(body);
    [shebang, prelude.as_bytes(), text]
}

/// Returns a script with its prelude, in parts.
pub(crate) fn wrapped_script<'a>(body: &'a [u8], prelude: &'a str) -> [&'a [u8]; 4] {
    let [shebang, prelude, text] = with_prelude(body, prelude);
    let end = if prelude == NOT_UNDERSTOOD.as_bytes() { "" } else { SCRIPT_END };
    [shebang, prelude, text, end.as_bytes()]
}

/// Returns a library with a check of all calls of its functions. `Err` has the reason for a refusal.
pub(crate) fn wrapped_library(
    code: &[u8],
    table: &CommandTable,
    rules: Option<&Arc<Ruled>>,
) -> Result<Vec<u8>, Arc<str>> {
    let code = unwrapped_library(code).unwrap_or_else(|| code.to_vec());
    match analyse(&code, table, &UndeclaredKeys::Slot(rules.cloned())) {
        Verdict::Refused(why) => Err(why),
        Verdict::Wrapped(prelude) if *prelude == *NOT_UNDERSTOOD => Ok(with_prelude(&code, "do return end ").concat()),
        _ => Ok(with_prelude(&code, &library_prelude(rules)).concat()),
    }
}

/// Whether a library, as stored by a node, has the router's check, for any rules.
pub fn is_wrapped_library(code: &[u8]) -> bool {
    without_library_prelude(split_shebang(code).1).is_some()
}

/// Required form of libraries at nodes.
#[derive(Clone, Debug)]
pub(crate) enum LibraryForm {
    /// Restricted by the router's check, for these rules.
    Checked(Option<Arc<Ruled>>),
    /// Unchanged: a single node has all keys.
    Plain,
    /// Either form.
    Any,
}

/// Returns a library in the required form. `None` if it already has this form, `Err` with a reason if that is
/// impossible.
pub(crate) fn renewed_library(
    code: &[u8],
    wanted: &LibraryForm,
    table: &CommandTable,
) -> Option<Result<Vec<u8>, String>> {
    let checked = |rules: Option<&Arc<Ruled>>| Some(wrapped_library(code, table, rules).map_err(|why| why.to_string()));
    match wanted {
        LibraryForm::Plain => unwrapped_library(code).map(Ok),
        LibraryForm::Checked(rules) => {
            let has_it = split_shebang(code).1.starts_with(library_prelude(rules.as_ref()).as_bytes());
            if has_it { None } else { checked(rules.as_ref()) }
        }
        // Renews preludes of older routers.
        LibraryForm::Any if is_wrapped_library(code) || unwrapped_library(code).is_none() => None,
        LibraryForm::Any => checked(None),
    }
}

/// Returns the original library without the prelude of this router or of an older one.
pub(crate) fn unwrapped_library(code: &[u8]) -> Option<Vec<u8>> {
    let (shebang, text) = split_shebang(code);
    let of_older =
        |(len, sha): &(usize, [u8; 20])| text.get(..*len).is_some_and(|front| Sha1::digest(front)[..] == sha[..]);
    let rest = without_library_prelude(text)
        .or_else(|| OLDER_PRELUDES.iter().find(|older| of_older(older)).and_then(|(len, _)| text.get(*len..)))?;
    Some([shebang, rest].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(text: &str) -> &'static str {
        match analyse(text.as_bytes(), &CommandTable::builtin(), &UndeclaredKeys::Slot(None)) {
            Verdict::Proved => "proved",
            Verdict::Wrapped(prelude) if *prelude == *NOT_UNDERSTOOD => "not understood",
            Verdict::Wrapped(_) => "wrapped",
            Verdict::Refused(_) => "refused",
        }
    }

    #[test]
    fn scripts_with_declared_keys_are_proved() {
        for body in [
            "",
            "return 1",
            "return redis.call('GET', KEYS[1])",
            "-- redis.call(x)\nreturn redis.call(\"incrby\",KEYS[1],ARGV[1])",
            "for i=1,#KEYS do redis.call('DEL' , KEYS[i]) end return redis.pcall('TIME')",
            "if redis.call('get',KEYS[1]) == ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end",
            "#!lua flags=no-writes\nreturn redis.call('RENAME',KEYS[1],KEYS[2])",
            "if KEYS[1] == 'x' then redis.log(redis.LOG_WARNING, 'x') end return {KEYS[1],ARGV[1]}",
            "return redis.status_reply([[ redis.call('GET','x') ]])",
            "local function f(k) return redis.call('LPUSH', KEYS[k], unpack(ARGV)) end return {f(1), f(2)}",
            "local t = {a=1, [2]=KEYS[1]; 3} t.load = 5 function t.f(...) return arg, ... end return t:f(-#KEYS, not t.a)",
            "local load, _G = 1, 2 return load + _G",
            "return redis.call('XGROUP','CREATE',KEYS[1],'g','$','MKSTREAM')",
            "return redis.call('OBJECT','ENCODING',KEYS[tonumber(ARGV[1])])",
            "return redis.call('MSET',KEYS[1],ARGV[1],KEYS[2],(f or unpack)(ARGV) .. '')".replace("f or ", "").as_str(),
            "redis.call('PUBLISH', ARGV[1], ARGV[2]) return ('x'):rep(3) .. KEYS[1]:upper()",
            "repeat local done = true until done return redis.call('GET')",
            "local KEYS = {} KEYS[1] = 'x' return KEYS",
            "while true do break end local a <const>".split(" local").next().unwrap_or_default(),
            "return 0x1F + 1e-5 + .5 .. [==[ ]] ]==] --[==[ ]] \n ]==]",
            "return 'a\\\n b\\'' , \"\\\"\"",
            "local rcall = redis.call return rcall('GET', KEYS[1])",
            "local c, p = 1 local p = redis.pcall if c then local r = redis.call r('DEL', KEYS[1]) end return p('TIME')",
            "local r = redis.call local function f(k) return r('LPUSH', KEYS[k], 1) end return f(1)",
            "local a, n, b = KEYS[1], ARGV[1], KEYS[2] redis.call('SET', a, n) return redis.call('RENAME', a, b)",
            "local k = KEYS[1] local function f() return redis.call('GET', k) end do local k = ARGV[1] end return f()",
            "local k = KEYS[1] if k == 'x' then k.y = k .. 'z' end return redis.call('GET', k)",
            "for i, k in ipairs(KEYS) do redis.call('DEL', k) end for k in pairs(KEYS) do k = 1 end",
            "local a = KEYS[1] for _, k in ipairs({a, KEYS[2]}) do redis.call('EXPIRE', k, 1) end return 1",
            "for _, k in pairs({KEYS[1]}) do for _, k in ipairs({k}) do redis.call('DEL', k) end end",
        ] {
            assert_eq!(judged(body), "proved", "{body}");
        }
    }

    #[test]
    fn scripts_with_possibly_undeclared_keys_are_wrapped() {
        for body in [
            "return redis.call('GET','x')",
            "return redis.call('GET',KEYS[1]..'x')",
            "return redis.call('GET',ARGV[1])",
            "return redis.call('GET',(KEYS[1]))",
            "return redis.call('GET',KEYS[1]:sub(2))",
            "return redis.call('GET',not KEYS[1])",
            "return redis.call('GET',unpack(ARGV))",
            "return redis.call('DEL',KEYS[1],...)",
            "return redis.call('MSET',KEYS[1],unpack(ARGV))",
            "return redis.call('RENAME',KEYS[1],unpack(ARGV))",
            "local r = redis; return r.call('GET','x')",
            "local f = redis.call return f('GET','x')",
            "return redis['call']('GET','x')",
            "local f = redis.call return f('GET',KEYS[1]..'x')",
            "local f = redis.call return f(ARGV[1],KEYS[1])",
            "local f = redis.call local g = f return g('GET','x')",
            "local f = redis.call return pcall(f,'GET','x')",
            "local f = redis.call return {f}",
            "local f = redis.call return f'PING'",
            "local f,g = redis.call,1 return f('GET','x')",
            "local f = redis.call or 1 return f('GET','x')",
            "local f = (redis.call) return f('GET','x')",
            "local f = 1 f = redis.call return f('GET','x')",
            "local f = redis.call do local f = tostring f(1) end return f('GET','x')",
            "return redis.call.x('GET','x')",
            "return pcall(redis.call,'GET','x')",
            "return redis.call(ARGV[1],KEYS[1])",
            "return redis.call'PING'",
            "return redis:call('PING')",
            "KEYS[1]='x' return redis.call('GET',KEYS[1])",
            "local x KEYS[1],x='w0',1 return redis.call('SET',KEYS[1],'astray')",
            "local x x,KEYS[1]=1,'w0' return redis.call('SET',KEYS[1],'astray')",
            "for i=1,1 do KEYS[1]='w0' end return redis.call('SET',KEYS[1],'astray')",
            "function KEYS.x() end return redis.call('GET',KEYS[1])",
            "local KEYS={'x'} return redis.call('GET',KEYS[1])",
            "local k=KEYS k[1]='x' return redis.call('GET',KEYS[1])",
            "for k,v in pairs(KEYS),1 do end return redis.call('GET',KEYS[1])",
            "for k in pairs(KEYS) do redis.call('GET',k) end",
            "local pairs = tostring for _,k in pairs(KEYS) do end return redis.call('GET',KEYS[1])",
            "for _,k in next,KEYS do redis.call('GET',k) end",
            "for _,k in ipairs(KEYS) do k = k..'x' redis.call('GET',k) end",
            "for _,k in ipairs({KEYS[1],'x'}) do redis.call('GET',k) end",
            "for _,k in ipairs({KEYS[1]..'x'}) do redis.call('GET',k) end",
            "for _,k in ipairs({KEYS[ARGV[1]]}) do redis.call('GET',k) end",
            "for _,k in ipairs({a=KEYS[1]}) do redis.call('GET',k) end",
            "for _,_,k in ipairs(KEYS) do redis.call('GET',k) end",
            "for _,k in ipairs(KEYS) do local function k() end redis.call('GET',k) end",
            "local k = KEYS[1] for i = 1,2 do redis.call('GET',k) k = 'x' end",
            "local k = KEYS[1] local function f() k = 'x' end f() return redis.call('GET',k)",
            "local k = KEYS[1] function k() end return redis.call('GET',k)",
            "local k = KEYS[1] local x x, k = 1, 'x' return redis.call('GET',k)",
            "local k = KEYS[1] or 'x' return redis.call('GET',k)",
            "local k = KEYS[1]..'x' return redis.call('GET',k)",
            "local k = (KEYS[1]) return redis.call('GET',k)",
            "local k = #KEYS[1] return redis.call('GET',k)",
            "local k, l = KEYS[1] return redis.call('GET',l)",
            "local k, l = KEYS[1], ARGV[1] return redis.call('GET',l)",
            "local k = KEYS[1] do local k = 'x' redis.call('GET',k) end return 1",
            "local k = KEYS[1] local function f(k) return redis.call('GET',k) end return f('x')",
            "local k = KEYS[1] for k = 1,2 do redis.call('GET',k) end",
            "do local k = KEYS[1] end local l return redis.call('GET',l)",
            "local k = KEYS[1] return redis.call('GET',k:upper())",
            "local k = KEYS[1] return redis.call('GET',k..'x')",
            "local k repeat local k = KEYS[1] until true return redis.call('GET',k)",
            "rawset(KEYS,1,'x') return redis.call('GET',KEYS[1])",
            "return redis.call('G\\69T',KEYS[1])",
            "return redis.call([[GET]],KEYS[1])",
            "return redis.call('FLUSHALL')",
            "return redis.call('SWAPDB',0,1)",
            "return redis.call('MIGRATE','127.0.0.1','1',KEYS[1],0,1)",
            "return redis.call('KEYS','*')",
            "return redis.call('SCAN',0)",
            "return redis.call('NOSUCH',KEYS[1])",
            "return redis.call('RENAME',KEYS[1],'x')",
            "return redis.call('XGROUP','CREATE',ARGV[1],'g','$','MKSTREAM')",
            "return redis.call('XGROUP',ARGV[1],KEYS[1],'g','$','MKSTREAM')",
            "return redis.call('MEMORY','STATS')",
            "return redis.call('SORT',KEYS[1],'BY','w_*')",
            "return redis.call('EVAL','return 1',0)",
            "return redis.acl_check_cmd('GET',KEYS[1])",
            "return server.call('GET','x')",
            "return server.call('GET',KEYS[1])",
            "return server.sha1hex('x')",
            "return getmetatable('')",
            "return redis.register_function('x')",
            "do local redis = 1 end return redis.call('GET','x')",
            "local redis = redis return redis.call('GET','x')",
            "-- a line that ends in a carriage return \r return redis.call('GET','x')",
            "--[ no long comment \n return redis.call('GET','x') --]]",
            "--[==[ ]]\n ]==] return redis.call('GET','x')",
            "local s = '\\\\' return redis.call('GET','x') --'",
            "local s = 'a\\\r\nb' return redis.call('GET','x') --'",
            "return #KEYS[1] + #KEYS.x, redis.call('GET',KEYS[1])",
        ] {
            assert_eq!(judged(body), "wrapped", "{body}");
        }
    }

    #[test]
    fn unlisted_globals_are_refused_and_invalid_lua_is_not_understood() {
        for body in [
            "return _G.redis.call('GET','x')",
            "return loadstring('return 1')()",
            "local x = 1 ..load",
            "return getfenv()",
            "local function f() local load end return load",
            "for load=1,2 do end return load",
            "repeat local setfenv until true return setfenv",
            "x = 1",
            "function x() end",
            "redis = nil",
            "ipairs = next for _,k in ipairs(KEYS) do redis.call('GET',k) end",
            "function ipairs() end",
            "local x x, pairs = 1, next",
            "redis.call = nil",
            "local x x, redis.call = 1, 2",
            "function redis.call() end",
            "#!js\nreturn 1",
        ] {
            assert_eq!(judged(body), "refused", "{body}");
        }
        for body in [
            "return 1 end redis.call('SET','x','y') do",
            "return 1 +",
            "return 1 return 2",
            "syntax error here",
            "'x'",
            "f() = 1",
            "local s = 'a\nb'",
            "local s = 'open",
            "local s = [[ [[ ]]",
            "--[[ open",
            "return \x1b",
            "return 1 \0",
            "goto x ::x::",
        ] {
            assert_eq!(judged(body), "not understood", "{body}");
        }
    }

    #[test]
    fn deeply_nested_scripts_are_not_understood() {
        let nested =
            |open: &str, close: &str, depth: usize| format!("return {}1{}", open.repeat(depth), close.repeat(depth));
        assert_eq!(judged(&nested("(", ")", 150)), "proved");
        assert_eq!(judged(&nested("(", ")", 100_000)), "not understood");
        assert_eq!(judged(&nested("{", "}", 100_000)), "not understood");
        assert_eq!(judged(&nested("function() return ", " end", 100_000)), "not understood");
        assert_eq!(judged(&format!("return {}1", "-".repeat(2).replace("--", "- ").repeat(100_000))), "proved");
        assert_eq!(judged(&format!("{} return 1", "local a ".repeat(201))), "not understood");
        assert_eq!(judged(&format!("return 1{}", " + 1".repeat(100_000))), "proved");
    }

    #[test]
    fn preludes_are_one_line_and_removable() {
        let table = CommandTable::builtin();
        for script in ["return redis.call('GET','x')", "local r = redis return r.call('GET', getmetatable(''))"] {
            let Verdict::Wrapped(prelude) = analyse(script.as_bytes(), &table, &UndeclaredKeys::Slot(None)) else {
                panic!("{script}")
            };
            assert!(!prelude.contains('\n'));
            assert!(with_prelude(script.as_bytes(), &prelude).concat().ends_with(script.as_bytes()));
            // Valid by this parser. Tests with real servers check the rest.
            let whole = [&*prelude, SCRIPT_END].concat();
            assert!(syntax::read(whole.as_bytes(), &table).is_some(), "{whole}");
        }
        assert!(!library_prelude(None).contains('\n'));
        assert!(syntax::read(library_prelude(None).as_bytes(), &table).is_some());
        let library = b"#!lua name=x\nredis.register_function('f', function() return 1 end)";
        let wrapped = wrapped_library(library, &table, None).expect("allowed");
        assert!(wrapped.starts_with(b"#!lua name=x\nlocal redis=") && is_wrapped_library(&wrapped));
        assert_eq!(wrapped_library(&wrapped, &table, None).as_deref(), Ok(&wrapped[..]));
        assert_eq!(unwrapped_library(&wrapped).as_deref(), Some(&library[..]));
        assert_eq!(unwrapped_library(library), None);
        assert!(wrapped_library(b"#!lua name=x\n_G.x()", &table, None).is_err());
    }

    #[test]
    fn a_prelude_in_another_place_is_no_check() {
        let table = CommandTable::builtin();
        let evil = format!("#!lua name=x\nlocal r = redis --[==[ \n{} ]==]", library_prelude(None));
        assert!(!is_wrapped_library(evil.as_bytes()));
        let wrapped = wrapped_library(evil.as_bytes(), &table, None).expect("it is Lua");
        assert_eq!(unwrapped_library(&wrapped).as_deref(), Some(evil.as_bytes()), "checked as a whole");
    }

    #[test]
    fn libraries_of_older_routers_get_the_current_check() {
        let table = CommandTable::builtin();
        let older = include_str!("lua/prelude-0.1.0.lua");
        let (front, back) = ("#!lua name=x\n", "redis.register_function('f', function() return 1 end)");
        let code = [front, older, back].concat();
        assert!(!is_wrapped_library(code.as_bytes()));
        assert_eq!(unwrapped_library(code.as_bytes()), Some([front, back].concat().into_bytes()));
        let wrapped = wrapped_library(code.as_bytes(), &table, None).expect("allowed");
        assert_eq!(wrapped, wrapped_library([front, back].concat().as_bytes(), &table, None).expect("allowed"));
    }
}
