//! Random scripts and functions, some harmless and some that try to bypass the check, with two nodes and with a single
//! server.
//!
//! Afterwards no node has a key of another node's slots. Executed scripts replied like a single server, with the same
//! resulting keys. Refused scripts were refused for a reason listed in docs/commands.md. A script reports its results
//! with `out`, including caught errors, so that no refusal is hidden. `SWITCHYARD_E2E_SCRIPTS` sets the number of
//! scripts (default 2,000). `make soak-scripts` runs many.

use std::collections::BTreeSet;

use crate::support::random::Random;
use crate::support::slots::slot;
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, Value, encode};

/// Reasons for refusing a script, as in docs/commands.md.
const REASONS: [&str; 6] = [
    "touches the key '",
    "a script may not call ",
    "sorts by a pattern whose keys may be in any slot",
    "names a key by a number that not every server writes alike",
    "in a form that Switchyard does not understand",
    "Switchyard does not run this script: it ",
];

/// Reporting function of scripts.
const OUT: &str = "local R={} local function out(x,...) local t=type(x) if t=='table' then if x.err then R[#R+1]='E:'..x.err \
    elseif x.ok then R[#R+1]='O:'..tostring(x.ok) else R[#R+1]='[' for i=1,#x do out(x[i]) end R[#R+1]=']' end \
    elseif t=='function' or t=='thread' then R[#R+1]=t else R[#R+1]=tostring(x) end end\n";

/// Generator of one script.
struct Writer<'a> {
    random: &'a mut Random,
    /// Whether every call should be accepted.
    tame: bool,
    /// Number of declared keys.
    keys: usize,
}

impl Writer<'_> {
    fn number(&mut self) -> String {
        self.random.below(9).to_string()
    }

    /// Returns an expression for a key of this type, which is the last letter of the seeded keys' names.
    fn key(&mut self, kind: &str) -> String {
        let tag = "string.sub(KEYS[1],1,string.find(KEYS[1],'}',1,true))";
        let first = ["s", "l", "h", "z", "m", "x"].iter().position(|k| *k == kind).unwrap_or(0) + 1;
        if self.tame || !self.random.one_in(4) {
            return match self.random.below(if self.keys == 0 { 1 } else { 5 }) {
                0 | 1 if first <= self.keys => format!("KEYS[{first}]"),
                _ if self.keys == 0 => "ARGV[1]".to_owned(),
                2 => format!("{tag}..'{kind}'"),
                3 => format!("ARGV[1]..'{kind}'"),
                _ => format!("({tag}..'{kind}')"),
            };
        }
        match self.random.below(12) {
            0 => format!("ARGV[2]..'{kind}'"),
            1 => "'astray'".into(),
            2 => "5".into(),
            3 => "0.1".into(),
            4 => "1e300".into(),
            5 => "-0".into(),
            6 => "true".into(),
            7 => "nil".into(),
            8 => "unpack({ARGV[2]..'s',ARGV[1]..'s'})".into(),
            9 => "KEYS[9]".into(),
            10 => "ARGV[2]..'\\0'..ARGV[1]".into(),
            _ => "({ARGV[2]..'s'})[1]".into(),
        }
    }

    /// Returns the arguments of an allowed call.
    fn allowed(&mut self) -> String {
        let n = self.number();
        let (s, l, h, z, m, x) =
            (self.key("s"), self.key("l"), self.key("h"), self.key("z"), self.key("m"), self.key("x"));
        let other = self.key("s");
        let all = [
            format!("'GET',{s}"),
            format!("'SET',{s},{n}"),
            format!("'SET',{s},ARGV[1]"),
            format!("'INCRBY',{s},{n}"),
            format!("'APPEND',{s},'x'"),
            format!("'GETRANGE',{s},0,{n}"),
            format!("'DEL',{s}"),
            format!("'DEL',{s},{other}"),
            format!("'EXISTS',{s},{l},{other}"),
            format!("'TYPE',{h}"),
            format!("'MGET',{s},{other}"),
            format!("'MSET',{s},{n},{other},'v'"),
            format!("'MSETNX',{s}..'new',{n}"),
            format!("'RENAME',{s},{other}"),
            format!("'COPY',{s},{other}"),
            format!("'OBJECT','ENCODING',{l}"),
            format!("'OBJECT','REFCOUNT',{l}"),
            format!("'LPUSH',{l},{n},'b'"),
            format!("'LRANGE',{l},0,-1"),
            format!("'LMOVE',{l},{l},'LEFT','RIGHT'"),
            format!("'LMPOP',1,{l},'LEFT'"),
            format!("'BLPOP',{l},{s},0"),
            format!("'HSET',{h},'f',{n}"),
            format!("'HGET',{h},'f'"),
            format!("'HINCRBY',{h},'f',{n}"),
            format!("'ZADD',{z},{n},'m{n}'"),
            format!("'ZRANGE',{z},0,-1,'WITHSCORES'"),
            format!("'ZUNIONSTORE',{z},2,{z},{z}"),
            format!("'ZUNION',1,{z}"),
            format!("'ZRANGESTORE',{z}..'2',{z},0,1"),
            format!("'SADD',{m},{n}"),
            format!("'SMEMBERS',{m}"),
            format!("'SINTERCARD',2,{m},{m}"),
            format!("'SORT',{l},'ALPHA'"),
            format!("'SORT',{l},'BY','nosort','STORE',{s}"),
            format!("'SORT',{l},'BY',ARGV[1]..'w_*','GET','#','GET',ARGV[1]..'o_*'"),
            format!("'XADD',{x},'{n}-2','f',{n}"),
            format!("'XLEN',{x}"),
            format!("'XRANGE',{x},'-','+'"),
            format!("'XREAD','COUNT',2,'STREAMS',{x},'0'"),
            format!("'XGROUP','CREATE',{x}..'n','g','$','MKSTREAM'"),
            format!("'XINFO','GROUPS',{x}"),
            format!("'PFADD',{s}..'p','a','b'"),
            format!("'BITOP','NOT',{s}..'b',{s}"),
            format!("'GEOADD',{z}..'g',13.3,38.1,'p'"),
            format!("'GEORADIUS',{z}..'g',15,37,200,'km','STORE',{z}..'q'"),
            format!("'EXPIRE',{s},100"),
            format!("'PERSIST',{s}"),
            "'PING'".into(),
            "'ECHO','x'".into(),
            "'PUBLISH','c','m'".into(),
            "'SELECT',0".into(),
            "'COMMAND','COUNT'".into(),
            format!("'NOSUCH',{s}"),
            "'GET'".into(),
            format!("'SET',{s}"),
        ];
        let pick = self.random.below(all.len());
        // With the usual case of letters.
        match self.random.below(4) {
            0 => all[pick].to_lowercase().replace("keys[", "KEYS[").replace("argv[", "ARGV["),
            _ => all[pick].clone(),
        }
    }

    /// Returns the arguments of a forbidden call.
    fn forbidden(&mut self) -> String {
        let key = self.key("s");
        let all = [
            "'FLUSHALL'".to_owned(),
            "'fLuShDb'".into(),
            "'SWAPDB',0,1".into(),
            format!("'MIGRATE',ARGV[3],ARGV[4],{key},0,1000,'COPY'"),
            "'KEYS','*'".into(),
            "'SCAN',0".into(),
            "'DBSIZE'".into(),
            "'RANDOMKEY'".into(),
            "'INFO'".into(),
            "'ROLE'".into(),
            "'CONFIG','GET','port'".into(),
            "'EVAL','return 1',0".into(),
            "'WAIT',0,0".into(),
            "'MEMORY','STATS'".into(),
            "'MEMORY','USAGE',ARGV[2]..'s'".into(),
            "'CLIENT','LIST'".into(),
            "'PUBSUB','CHANNELS'".into(),
            format!("'RESTORE-ASKING',{key},0,'x'"),
            format!("'PFDEBUG','ENCODING',{key}"),
            "'SORT',ARGV[1]..'l','BY','w_*'".into(),
            "'SORT',ARGV[1]..'l','GET','w_*'".into(),
            "'SORT',ARGV[1]..'l','GET\\0x','w_*'".into(),
            "'SORT',ARGV[1]..'l','STORE\\0x',ARGV[2]..'z'".into(),
            "'SORT',ARGV[1]..'l','BY','*'..ARGV[1]".into(),
            "'GEORADIUS',ARGV[1]..'z',1,1,1,'km','STORE',ARGV[2]..'q'".into(),
            "'GEORADIUS',ARGV[1]..'z',1,1,1,'km','STOREDIST\\0',ARGV[2]..'q'".into(),
            "'XGROUP','CREATE',ARGV[2]..'n','g','$','MKSTREAM'".into(),
            "'XGROUP','cReAtE\\0x',ARGV[2]..'n','g','$','MKSTREAM'".into(),
            "'XREADGROUP','GROUP','streams','c','STREAMS',ARGV[2]..'x','>'".into(),
            "'ZUNIONSTORE',ARGV[1]..'z',2,ARGV[1]..'z',ARGV[2]..'z'".into(),
            "'ZUNIONSTORE',ARGV[2]..'z','1',ARGV[1]..'z'".into(),
            "'BITOP','NOT',ARGV[2]..'b',ARGV[1]..'s'".into(),
            "'MSET',ARGV[1]..'s',1,unpack({ARGV[2]..'s',2})".into(),
            "'SET\\0x',ARGV[2]..'s',1".into(),
            "'\\83ET',ARGV[2]..'s',1".into(),
            "[[SET]],ARGV[2]..'s',1".into(),
            "('S'..'ET'),ARGV[2]..'s',1".into(),
            "unpack({'SET',ARGV[2]..'s',1})".into(),
            "('sEt'):upper(),ARGV[2]..'s',1".into(),
            "12".into(),
        ];
        let pick = self.random.below(all.len());
        all[pick].clone()
    }

    fn arguments(&mut self) -> String {
        if !self.tame && self.random.one_in(3) { self.forbidden() } else { self.allowed() }
    }

    /// Returns a call in one of its possible notations.
    fn call(&mut self) -> String {
        let args = self.arguments();
        let ways = [
            format!("out(redis.pcall({args}))"),
            format!("out(redis.call({args}))"),
            format!("out(select(2,pcall(redis.call,{args})))"),
            format!("local r=redis out(r.pcall({args}))"),
            format!("local c=redis.pcall out(c({args}))"),
            format!("out(redis['pcall']({args}))"),
            format!("out(redis['pca'..'ll']({args}))"),
            format!("out((function(r) return r.pcall({args}) end)(redis))"),
            format!("out(coroutine.wrap(function() return redis.pcall({args}) end)())"),
            format!(
                "local f=coroutine.wrap(function(...) coroutine.yield(1) return redis.pcall(...) end) f({args}) out(f())"
            ),
            format!("out(select(2,xpcall(function() return redis.call({args}) end,function(e) return e end)))"),
            format!("local t={{redis.pcall,n=redis}} out(t[1]({args})) out(t.n.pcall({args}))"),
            format!("for _,f in ipairs({{redis.pcall}}) do out(f({args})) end"),
            format!("out(rawget(setmetatable({{f=redis.pcall}},{{__index=redis}}),'f')({args}))"),
            format!("local t=setmetatable({{}},{{__index=function(_,k) return redis[k] end}}) out(t.pcall({args}))"),
            format!("local s=setmetatable({{}},{{__call=function(_,...) return redis.pcall(...) end}}) out(s({args}))"),
            format!("local function v(...) return redis.pcall(...) end out(v({args}))"),
            format!("local function v(...) return redis.pcall(unpack(arg)) end out(v({args}))"),
            format!("local a={{{args}}} out(redis.pcall(unpack(a)))"),
            format!("local r=redis.pcall({args}) if r then out(r) else out(0) end"),
            format!("local i=0 repeat i=i+1 out(redis.pcall({args})) until i==2"),
            format!("redis.setresp(3) out(redis.pcall({args})) redis.setresp(2)"),
        ];
        let pick = self.random.below(ways.len());
        ways[pick].clone()
    }

    /// Returns code that tries to weaken later checks.
    fn trick(&mut self) -> String {
        let all = [
            "KEYS[1]=ARGV[2]..'s'",
            "local x KEYS[1],x=ARGV[2]..'s',1",
            "local x x,KEYS[1]=1,ARGV[2]..'s'",
            "rawset(KEYS,1,ARGV[2]..'s')",
            "table.insert(KEYS,1,ARGV[2]..'s')",
            "table.remove(KEYS)",
            "table.sort(KEYS)",
            "setmetatable(KEYS,{__index=function() return ARGV[2]..'s' end})",
            "local k=KEYS k[1]=ARGV[2]..'s'",
            "local KEYS={ARGV[2]..'s',ARGV[2]..'l'}",
            "for i=1,1 do KEYS[i]=ARGV[2]..'s' end",
            "(function(k) k[1]=ARGV[2]..'s' end)(KEYS)",
            // `select` stays, because `out` needs it to report caught errors.
            "local type,error,pcall,next,tonumber=function() return 'x' end,function() end,function() return true end,1,1",
            "local string,table,bit={find=function() return 1 end},{},{}",
            "out(pcall(function() string.find=function() return 1 end end))",
            "out(pcall(rawset,string,'find',function() return 1 end))",
            "out(pcall(rawset,bit,'bxor',function() return 0 end))",
            "out(type(getmetatable(redis))=='table')",
            "out(pcall(setmetatable,redis,{__index=function() return function() end end}) and 'set')",
            "out(type(getmetatable('').__index))",
            "pcall(rawset,redis,'x',1)",
            "out(pcall(rawset,redis,'call',function() return 'mine' end))",
            "out(pcall(function() local r=redis r.x=1 end) and 'set')",
            "out(pcall(function() local r=redis r.call=function() return 'mine' end end) and 'set')",
            "out(pcall(function() local r=redis r.pcall=nil end) and 'set')",
            "out(#string.dump(function() return 1 end)>0)",
            "collectgarbage()",
            "out(redis.acl_check_cmd('GET',ARGV[1]))",
            "out(redis.sha1hex('x'))",
            "redis.log(redis.LOG_DEBUG,'x')",
            "out(redis.status_reply('x')) out(redis.error_reply('y'))",
            "-- a comment \r out(redis.pcall('SET',ARGV[2]..'s','astray'))",
            "--[==[ ]] ]=] \n ]==] out(redis.pcall('SET',ARGV[2]..'s','astray'))",
            "local s='\\\\' out(redis.pcall('SET',ARGV[2]..'s','astray')) --'",
            "local s='a\\\r\n' out(redis.pcall('SET',ARGV[2]..'s','astray')) --'",
            "local s=[[ ' ]] out(redis.pcall('SET',ARGV[2]..'s','astray')) --' ]]",
            "local e=redis.pcall('SET',ARGV[2]..'s','astray') out(e) e.err='x' out(type(redis.pcall))",
            "local r=_G out(r)",
            "out(loadstring('return redis')())",
            "out(load(function() return nil end))",
            "out(setfenv(1,{}))",
            "out(getfenv())",
            "out(__redis__err__handler)",
            "redis=nil",
            "redis.call=nil",
            "function redis.call() end",
            "x=1",
            "local redis=redis",
            "local redis={pcall=redis.call,call=redis.pcall}",
            "out(('x'):rep(3)) out(('%d'):format(5))",
            "for k,v in pairs({a=1}) do out(k) end",
            "local a,b,c=...  out(a)",
            "local function f(n) if n==0 then return 0 end return 1+f(n-1) end out(f(50))",
            "out(select(2,pcall(error,'mine')))",
            "out(select(2,pcall(error,{err='MY own'})))",
            "local t={} t.load=1 t._G=2 function t:f() return self.load end out(t:f())",
            "while true do break end",
            "do return R end",
        ];
        self.random.pick(&all).to_owned()
    }

    fn statement(&mut self, depth: usize) -> String {
        if !self.tame && self.random.one_in(4) {
            let trick = self.trick();
            // Mostly in a separate scope, because many of them declare locals.
            return if trick.contains("return R") || self.random.one_in(2) {
                format!("do {trick}\nend")
            } else {
                trick
            };
        }
        if depth < 2 && self.random.one_in(4) {
            let inner = self.block(depth + 1);
            return match self.random.below(5) {
                0 => format!("for i=1,2 do {inner} end"),
                1 => format!("if #KEYS>={} then {inner} else out(0) end", self.number()),
                2 => format!("local function g(...) {inner} end g(KEYS[1])"),
                3 => format!("local o,e=pcall(function() {inner} end) out(o) out(e)"),
                _ => format!("do {inner} end"),
            };
        }
        let call = self.call();
        format!("do {call} end")
    }

    fn block(&mut self, depth: usize) -> String {
        let count = 1 + self.random.below(3);
        (0..count).map(|_| self.statement(depth)).collect::<Vec<_>>().join("\n")
    }
}

/// Creates the keys that scripts use.
fn seed(tags: &[&str], to: &mut Client) {
    let mut bytes = encode(&["FLUSHALL"]);
    let mut count = 1;
    for tag in tags {
        for line in [
            "SET {T}s 5",
            "RPUSH {T}l 3 1 2",
            "HSET {T}h f 1",
            "ZADD {T}z 1 a 2 b",
            "SADD {T}m 1 2 3",
            "XADD {T}x 1-1 f v",
            "MSET {T}w_1 3 {T}w_2 2 {T}w_3 1 {T}o_1 one {T}o_2 two {T}o_3 three",
        ] {
            let line = line.replace("{T}", &format!("{{{tag}}}"));
            bytes.extend(encode(&line.split(' ').collect::<Vec<_>>()));
            count += 1;
        }
    }
    for reply in to.pipeline(&bytes, count) {
        assert_ne!(reply.first(), Some(&b'-'), "{}", String::from_utf8_lossy(&reply));
    }
}

fn keys_of(client: &mut Client) -> BTreeSet<Vec<u8>> {
    client.cmd("KEYS *").items().iter().map(|key| key.bytes().to_vec()).collect()
}

/// Way in which a script is called.
#[derive(Clone, Copy, Debug)]
enum Form {
    Eval,
    ReadOnly,
    Sha,
    Transaction,
    Function,
}

fn run(client: &mut Client, form: Form, script: &str, keys: &[String], args: &[String]) -> Value {
    let count = keys.len().to_string();
    let rest = || keys.iter().chain(args).map(String::as_str);
    match form {
        Form::Eval | Form::ReadOnly => {
            let name = if matches!(form, Form::Eval) { "EVAL" } else { "EVAL_RO" };
            client.call(&[name, script, &count].into_iter().chain(rest()).collect::<Vec<_>>())
        }
        Form::Sha => {
            let sha = client.call(&["SCRIPT", "LOAD", script]);
            if sha.error().is_some() {
                return sha;
            }
            client.call(&["EVALSHA", &sha.text(), &count].into_iter().chain(rest()).collect::<Vec<_>>())
        }
        Form::Transaction => {
            client.cmd("MULTI");
            let queued = client.call(&["EVAL", script, &count].into_iter().chain(rest()).collect::<Vec<_>>());
            let reply = client.cmd("EXEC");
            if queued.error().is_some() { queued } else { reply }
        }
        Form::Function => {
            let library = format!("#!lua name=lib\nredis.register_function('f',function(KEYS,ARGV) {script}\nend)");
            let loaded = client.call(&["FUNCTION", "LOAD", "REPLACE", &library]);
            if loaded.error().is_some() {
                return loaded;
            }
            client.call(&["FCALL", "f", &count].into_iter().chain(rest()).collect::<Vec<_>>())
        }
    }
}

/// Removes the source line that a server appends to an error: it differs because of the added check.
fn without_lines(value: &Value) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.iter().map(without_lines).collect()),
        Value::Error(text) => Value::Error(text.split(" script: ").next().unwrap_or_default().to_owned()),
        other => other.clone(),
    }
}

/// Collects all texts of a reply.
fn texts(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| texts(item, into)),
        Value::Bulk(text) => into.push(String::from_utf8_lossy(text).into_owned()),
        Value::Error(text) | Value::Simple(text) => into.push(text.clone()),
        _ => {}
    }
}

#[test]
fn random_scripts_match_one_server_and_touch_only_their_keys() {
    let Some(site) = Site::router_only(2, &SiteOptions::refusing_several_slots()) else { return };
    let wanted: usize =
        std::env::var("SWITCHYARD_E2E_SCRIPTS").map_or(2000, |n| n.parse().expect("a number of scripts"));
    let seeds = Random::seeds(&[1]);
    for seed in &seeds {
        eprintln!("seed {seed}");
        many_scripts(&site, *seed, wanted / seeds.len());
    }
}

fn many_scripts(site: &Site, first: u64, wanted: usize) {
    let reference = Node::start(&NodeOptions::default());
    let tags = site.tags();
    let tags = [tags[0][0].as_str(), tags[1][0].as_str()];
    let mut client = site.client();
    let mut single = reference.client();
    let mut nodes: Vec<Client> = site.nodes().iter().map(Node::client).collect();
    // Each node has one half of the slots, in the order of their names.
    let first_has_upper = slot(tags[0].as_bytes()) >= 8192;
    let owner = |key: &[u8]| usize::from((slot(key) >= 8192) != first_has_upper);
    let (mut executed, mut refused) = (0, 0);
    let mut dirty = true;
    let mut wrong: Vec<String> = Vec::new();
    for number in 0..wanted {
        let mut random = Random::new(first.wrapping_mul(1_000_003).wrapping_add(number as u64));
        let mine = random.below(2);
        let declared = random.below(7);
        let tame = !random.one_in(3);
        let form = [Form::Eval, Form::Eval, Form::Eval, Form::ReadOnly, Form::Sha, Form::Transaction, Form::Function]
            [random.below(7)];
        // Without a declared key, no key shares a slot with one.
        let declared = if tame { declared.max(1) } else { declared };
        let tag = |of: usize| format!("{{{}}}", tags[of]);
        let keys: Vec<String> = ["s", "l", "h", "z", "m", "x"][..declared.min(6)]
            .iter()
            .map(|kind| format!("{}{kind}", tag(mine)))
            .collect();
        let other = site.nodes()[1 - mine].address();
        let args = [tag(mine), tag(1 - mine), other.ip().to_string(), other.port().to_string()];
        let mut writer = Writer { random: &mut random, tame, keys: keys.len() };
        let body = writer.block(0);
        // An error must not hide an earlier refusal.
        let script = match tame {
            true => format!("{OUT}{body}\nreturn R"),
            false => format!("{OUT}local o,e=pcall(function(...)\n{body}\nend) out(o) out(e) return R"),
        };
        let about = || format!("seed {first}, script {number}, {form:?}, keys {keys:?}, tame {tame}:\n{script}");
        if std::mem::take(&mut dirty) || number % 50 == 0 {
            seed(&tags, &mut client);
            seed(&tags, &mut single);
        }
        let got = run(&mut client, form, &script, &keys, &args);
        let mut said = Vec::new();
        texts(&got, &mut said);
        let refusals: Vec<&String> = said.iter().filter(|text| text.contains("Switchyard")).collect();
        if refusals.is_empty() {
            executed += 1;
            let expected = run(&mut single, form, &script, &keys, &args);
            if without_lines(&got) != without_lines(&expected) {
                wrong.push(format!("{got:?} instead of {expected:?}: {}", about()));
                dirty = true;
            }
        } else {
            refused += 1;
            dirty = true;
            if tame || refusals.iter().any(|refusal| !REASONS.iter().any(|reason| refusal.contains(reason))) {
                wrong.push(format!("{refusals:?}: {}", about()));
            }
        }
        let held: Vec<BTreeSet<Vec<u8>>> = nodes.iter_mut().map(keys_of).collect();
        for (node, keys) in held.iter().enumerate() {
            for key in keys {
                if owner(key) != node {
                    wrong.push(format!("{} astray: {}", String::from_utf8_lossy(key), about()));
                    dirty = true;
                }
            }
        }
        if !dirty {
            let all: BTreeSet<Vec<u8>> = held.into_iter().flatten().collect();
            if all != keys_of(&mut single) {
                wrong.push(format!("other keys are there: {}", about()));
                dirty = true;
            }
        }
        assert!(wrong.len() < 8, "{}", wrong.join("\n\n"));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    eprintln!("{executed} executed, {refused} refused");
    assert!(executed * 2 >= wanted, "{executed} of {wanted} were executed");
    assert!(refused * 20 >= wanted, "{refused} of {wanted} were refused: nothing was tried");
}
