//! What a script may touch: whether its text proves that it uses only the keys that it declares, and what to put around it where
//! the text does not.
//!
//! A script is sent to the owner of its declared keys. Whatever else it reads or writes there is the wrong node's: it would see nothing
//! where there is a value, and store what nobody finds again. Neither shows as an error. So:
//! - Text in which every `redis.call` names its keys as `KEYS[...]` is sent as it is ([`Verdict::Proved`]).
//! - Any other gets a prelude in which `redis` is a table of ours: each call is checked before it is made ([`Verdict::Wrapped`]).
//!   Keys of the same slot as a declared one are allowed, as in Redis Cluster.
//! - Text that could reach around the prelude (`_G`, `loadstring`) is refused.
//!
//! Not a Lua parser: tokens are enough, because what is not understood is merely wrapped.

use std::fmt::Write as _;
use std::sync::LazyLock;

use switchyard_resp::command::{Command, CommandTable, Handling, Keys, Local};

/// What is done with a script.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// It touches nothing but `KEYS`.
    Proved,
    /// It is executed behind a prelude.
    Wrapped,
    /// It uses this name, by which the prelude could be passed by.
    Refused(&'static str),
}

/// Names that reach global variables other than by their names.
const AROUND: [&str; 6] = ["_G", "getfenv", "setfenv", "loadstring", "load", "dofile"];

/// Members of `redis` that touch no keys.
const HARMLESS: [&str; 10] = [
    "log",
    "sha1hex",
    "error_reply",
    "status_reply",
    "setresp",
    "replicate_commands",
    "set_repl",
    "acl_check_cmd",
    "register_function",
    "REDIS_VERSION_NUM",
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Token<'a> {
    Word(&'a [u8]),
    /// A string without escapes; with them it is a `Symbol`, which nothing is made of.
    Text(&'a [u8]),
    Number,
    Symbol(u8),
    /// `==`
    Equals,
}

/// A long bracket (`[[`, `[=[`) at the start: the length of what opens it, and its level.
fn long_bracket(bytes: &[u8]) -> Option<(usize, usize)> {
    let level = bytes.strip_prefix(b"[")?.iter().take_while(|b| **b == b'=').count();
    (bytes.get(level + 1) == Some(&b'[')).then_some((level + 2, level))
}

fn after_long(bytes: &[u8], level: usize) -> usize {
    let mut close = vec![b']'];
    close.extend(std::iter::repeat_n(b'=', level));
    close.push(b']');
    bytes.windows(close.len()).position(|w| w == close).map_or(bytes.len(), |at| at + close.len())
}

fn tokens(body: &[u8]) -> Vec<Token<'_>> {
    let mut out = Vec::new();
    let mut at = 0;
    if body.starts_with(b"#!") {
        at = memchr(body, b'\n');
    }
    while let Some(&byte) = body.get(at) {
        let rest = &body[at..];
        if byte.is_ascii_alphabetic() || byte == b'_' {
            let len = rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'_').count();
            out.push(Token::Word(&rest[..len]));
            at += len;
        } else if byte.is_ascii_digit() {
            at += rest.iter().take_while(|b| b.is_ascii_alphanumeric() || **b == b'.').count();
            out.push(Token::Number);
        } else if rest.starts_with(b"--") {
            at += match long_bracket(&rest[2..]) {
                Some((open, level)) => 2 + open + after_long(&rest[2 + open..], level),
                None => memchr(rest, b'\n'),
            };
        } else if let Some((open, level)) = long_bracket(rest) {
            at += open + after_long(&rest[open..], level);
            out.push(Token::Symbol(b'"'));
        } else if byte == b'"' || byte == b'\'' {
            let mut end = 1;
            let mut escaped = false;
            while let Some(&b) = rest.get(end) {
                match b {
                    b'\\' => {
                        escaped = true;
                        end += 1;
                    }
                    b if b == byte => break,
                    _ => {}
                }
                end += 1;
            }
            let end = end.min(rest.len());
            out.push(if escaped { Token::Symbol(b'"') } else { Token::Text(&rest[1..end.max(1)]) });
            at += end + 1;
        } else if rest.starts_with(b"==") {
            out.push(Token::Equals);
            at += 2;
        } else {
            if !byte.is_ascii_whitespace() {
                out.push(Token::Symbol(byte));
            }
            at += 1;
        }
    }
    out
}

/// The place of a byte, or the end.
fn memchr(bytes: &[u8], byte: u8) -> usize {
    bytes.iter().position(|b| *b == byte).unwrap_or(bytes.len())
}

/// `KEYS[x]` at the start of the tokens, `x` being one token: how many tokens it takes.
fn declared_key(tokens: &[Token<'_>]) -> Option<usize> {
    match tokens {
        [Token::Word(b"KEYS"), Token::Symbol(b'['), Token::Number | Token::Word(_), Token::Symbol(b']'), ..] => Some(4),
        _ => None,
    }
}

/// Whether a command without keys shows or changes the keys of the node that it is executed by, which a script would take for all.
fn concerns_all_keys(command: &Command) -> bool {
    matches!(command.handling, Handling::Every(_) | Handling::Local(Local::Scan | Local::RandomKey) | Handling::Refused(_))
}

/// Whether the arguments of a call, after its opening parenthesis, name every key as `KEYS[...]`.
fn call_is_declared(table: &CommandTable, tokens: &[Token<'_>]) -> bool {
    let [Token::Text(name), rest @ ..] = tokens else { return false };
    let Some(command) = std::str::from_utf8(name).ok().filter(|n| !n.contains('|')).and_then(|n| table.by_name(n)) else { return false };
    let keys = match command.keys {
        Keys::None => return !concerns_all_keys(command) && command.name != "COMMAND",
        Keys::Range { first: 1, last: 1, .. } => 1,
        Keys::Range { first: 1, last: 2, .. } => 2,
        Keys::Range { first: 1, last: -1, step: 1 } => {
            let mut rest = rest;
            while let [Token::Symbol(b','), after @ ..] = rest {
                let Some(taken) = declared_key(after) else { return false };
                rest = &after[taken..];
            }
            return matches!(rest, [Token::Symbol(b')'), ..]);
        }
        _ => return false,
    };
    let mut rest = rest;
    for _ in 0..keys {
        let [Token::Symbol(b','), after @ ..] = rest else { return false };
        let Some(taken) = declared_key(after) else { return false };
        rest = &after[taken..];
    }
    matches!(rest, [Token::Symbol(b',' | b')'), ..])
}

/// What is to be done with a script.
pub(crate) fn judge(body: &[u8], table: &CommandTable) -> Verdict {
    let tokens = tokens(body);
    if let Some(name) = AROUND.into_iter().find(|n| tokens.contains(&Token::Word(n.as_bytes()))) {
        return Verdict::Refused(name);
    }
    for (at, token) in tokens.iter().enumerate() {
        let rest = &tokens[at..];
        let proved = match token {
            Token::Word(b"redis" | b"server") => match rest {
                [_, Token::Symbol(b'.'), Token::Word(b"call" | b"pcall"), Token::Symbol(b'('), call @ ..] => call_is_declared(table, call),
                [_, Token::Symbol(b'.'), Token::Word(name), ..] => {
                    HARMLESS.iter().any(|h| h.as_bytes() == *name) || name.starts_with(b"LOG_") || name.starts_with(b"REPL_")
                }
                _ => false,
            },
            // Read, and only read.
            Token::Word(b"KEYS") => {
                let counted = at > 0 && tokens[at - 1] == Token::Symbol(b'#');
                counted || declared_key(rest).is_some_and(|taken| rest.get(taken) != Some(&Token::Symbol(b'=')))
            }
            _ => true,
        };
        if !proved {
            return Verdict::Wrapped;
        }
    }
    Verdict::Proved
}

/// Names of commands whose only key is their first argument, and of those without keys, as the prelude searches them.
fn names(fits: impl Fn(&Command) -> bool) -> String {
    let table = CommandTable::builtin();
    let mut names: Vec<String> = table.iter().filter(|c| !c.name.contains('|') && fits(c)).map(|c| c.name.to_ascii_lowercase()).collect();
    names.sort();
    format!(" {} ", names.join(" "))
}

/// The part of the prelude that checks a call. `K` is the table of declared keys. `redis` is the server's own here: a local of that name
/// is in scope only after the statement that makes it. A library is loaded with next to no global names, so everything is looked up when
/// a function runs.
static CHECK: LazyLock<String> = LazyLock::new(|| {
    let one = names(|c| matches!(c.keys, Keys::Range { first: 1, last: 1, .. }));
    let all = names(|c| c.keys == Keys::None && concerns_all_keys(c) && !matches!(c.handling, Handling::Refused(_)));
    // CRC16 bit by bit: only keys that are not declared literally come so far.
    format!(
        "local function S(k) local F=string.find local a=F(k,'{{',1,true) if a then local b=F(k,'}}',a+1,true) \
         if b and b>a+1 then k=string.sub(k,a+1,b-1) end end \
         local c=0 for i=1,#k do c=bit.bxor(c,bit.lshift(string.byte(k,i),8)) for _=1,8 do c=bit.lshift(c,1) \
         if c>=65536 then c=bit.bxor(c,69665) end end end return c%16384 end;\
         local function D(k) for i=1,#K do if K[i]==k then return end end \
         if #K>0 then local s=S(k) for i=1,#K do if S(K[i])==s then return end end end \
         error({{err='ERR Switchyard: the script touches the key \\''..k..'\\', which it neither declares in KEYS nor has in the slot of one that it \
         declares'}},0) end;\
         local function V(c,k,...) if type(c)=='string' then c=string.lower(c) local F,n=string.find,' '..c..' ' \
         if type(k)=='string' and F('{one}',n,1,true) then return D(k) end \
         if F('{all}',n,1,true) then error({{err='ERR Switchyard: a script may not call '..c..', which would concern one node only'}},0) end \
         if k==nil then return end \
         local g=redis.pcall('COMMAND','GETKEYS',c,k,...) if type(g)=='table' and not g.err then for i=1,#g do D(g[i]) end end end end;\
         local P={{call=function(...) V(...) return redis.call(...) end,\
         pcall=function(...) local o,e=pcall(V,...) if not o then if type(e)~='table' then e={{err=e}} end return e end return redis.pcall(...) end}};"
    )
});

/// Stands before the text of a script, on its first line, so that the lines of errors stay right.
static SCRIPT_PRELUDE: LazyLock<String> = LazyLock::new(|| {
    format!(
        "local redis=(function() local K={{}} for i=1,#KEYS do K[i]=KEYS[i] end;{}return setmetatable(P,{{__index=redis}}) end)(); local server=redis; ",
        *CHECK
    )
});

/// The same for a library of functions: the keys are those of each call.
static LIBRARY_PRELUDE: LazyLock<String> = LazyLock::new(|| {
    let mut prelude = String::from("local redis=(function() local K={};");
    let _ = write!(
        prelude,
        "{}local M;local function W(f) return function(k,a) if not M then M=setmetatable(P,{{__index=redis}}) end \
         local o=K K={{}} for i=1,#k do K[i]=k[i] end local r=f(k,a) K=o return r end end;\
         P.register_function=function(n,f) if f~=nil then return redis.register_function(n,W(f)) end \
         n.callback=n.callback and W(n.callback) return redis.register_function(n) end;\
         P.log=redis.log P.LOG_DEBUG=redis.LOG_DEBUG P.LOG_VERBOSE=redis.LOG_VERBOSE P.LOG_NOTICE=redis.LOG_NOTICE \
         P.LOG_WARNING=redis.LOG_WARNING return P end)(); local server=redis; ",
        *CHECK
    );
    prelude
});

/// Puts a prelude behind the shebang, if there is one.
fn with_prelude(body: &[u8], prelude: &str) -> Vec<u8> {
    let at = if body.starts_with(b"#!") { (memchr(body, b'\n') + 1).min(body.len()) } else { 0 };
    [&body[..at], prelude.as_bytes(), &body[at..]].concat()
}

/// A script in which every call is checked.
pub(crate) fn wrapped_script(body: &[u8]) -> Vec<u8> {
    with_prelude(body, &SCRIPT_PRELUDE)
}

/// A library in which every call of its functions is checked.
pub(crate) fn wrapped_library(code: &[u8]) -> Vec<u8> {
    if is_wrapped_library(code) { code.to_vec() } else { with_prelude(code, &LIBRARY_PRELUDE) }
}

/// Whether a library of functions, as a node has it, is kept to its keys by the router's check.
pub fn is_wrapped_library(code: &[u8]) -> bool {
    unwrapped_library(code).is_some()
}

/// The library as its author wrote it, where it has the prelude.
pub(crate) fn unwrapped_library(code: &[u8]) -> Option<Vec<u8>> {
    let prelude = LIBRARY_PRELUDE.as_bytes();
    let at = code.windows(prelude.len()).position(|w| w == prelude)?;
    Some([&code[..at], &code[at + prelude.len()..]].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_uses_only_its_keys_is_proved() {
        let table = CommandTable::builtin();
        for body in [
            "return 1",
            "return redis.call('GET', KEYS[1])",
            "-- redis.call(x)\nreturn redis.call(\"incrby\",KEYS[1],ARGV[1])",
            "for i=1,#KEYS do redis.call('DEL' , KEYS[i]) end return redis.pcall('TIME')",
            "if redis.call('get',KEYS[1]) == ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end",
            "#!lua flags=no-writes\nreturn redis.call('RENAME',KEYS[1],KEYS[2])",
            "if KEYS[1] == 'x' then redis.log(redis.LOG_WARNING, 'x') end return {KEYS[1],ARGV[1]}",
            "return redis.status_reply([[ redis.call('GET','x') ]])",
        ] {
            assert_eq!(judge(body.as_bytes(), &table), Verdict::Proved, "{body}");
        }
    }

    #[test]
    fn what_might_use_others_is_wrapped_and_what_reaches_around_is_refused() {
        let table = CommandTable::builtin();
        for body in [
            "return redis.call('GET','x')",
            "return redis.call('GET',KEYS[1]..'x')",
            "return redis.call('GET',ARGV[1])",
            "local r = redis; return r.call('GET','x')",
            "return redis['call']('GET','x')",
            "return redis.call(ARGV[1],KEYS[1])",
            "KEYS[1]='x' return redis.call('GET',KEYS[1])",
            "local KEYS={'x'} return redis.call('GET',KEYS[1])",
            "local k=KEYS k[1]='x' return redis.call('GET',KEYS[1])",
            "return redis.call('G\\69T',KEYS[1])",
            "return redis.call('FLUSHALL')",
            "return redis.call('KEYS','*')",
            "return redis.call('SCAN',0)",
            "return redis.call('NOSUCH',KEYS[1])",
            "return redis.call('RENAME',KEYS[1],'x')",
            "return server.call('GET','x')",
        ] {
            assert_eq!(judge(body.as_bytes(), &table), Verdict::Wrapped, "{body}");
        }
        assert_eq!(judge(b"return _G.redis.call('GET','x')", &table), Verdict::Refused("_G"));
        assert_eq!(judge(b"return loadstring('return 1')()", &table), Verdict::Refused("loadstring"));
    }

    #[test]
    fn preludes_stay_on_one_line_and_come_off_again() {
        assert!(!SCRIPT_PRELUDE.contains('\n') && !LIBRARY_PRELUDE.contains('\n'));
        let library = b"#!lua name=x\nredis.register_function('f', function() return 1 end)";
        let wrapped = wrapped_library(library);
        assert!(wrapped.starts_with(b"#!lua name=x\nlocal redis="));
        assert_eq!(wrapped_library(&wrapped), wrapped);
        assert_eq!(unwrapped_library(&wrapped).as_deref(), Some(&library[..]));
        assert_eq!(unwrapped_library(library), None);
        assert!(wrapped_script(b"return 1").ends_with(b"return 1"));
    }
}
