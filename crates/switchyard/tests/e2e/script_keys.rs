//! A script must not silently access another node's keys: undeclared keys are detected at run time.

use crate::support::{Random, RouterOptions, Site, SiteOptions, Value, bulk, encode, int, ok};

/// A router that brings no keys together.
fn site(nodes: usize) -> Option<Site> {
    Site::router_only(nodes, &SiteOptions::refusing_several_slots())
}

/// Returns a key on each of two nodes, and another key in the first one's slot.
fn keys(site: &Site) -> (String, String, String) {
    let tags = site.tags();
    (format!("{{{}}}a", tags[0][0]), format!("{{{}}}b", tags[1][0]), format!("{{{}}}near", tags[0][0]))
}

#[test]
fn undeclared_keys_are_refused_unless_in_a_declared_slot() {
    let Some(site) = site(2) else { return };
    let (a, b, near) = keys(&site);
    let mut client = site.client();
    client.cmd(&format!("SET {b} there"));
    client.cmd(&format!("SET {near} here"));
    for (script, error) in [
        ("return redis.call('GET', ARGV[1])", "touches the key"),
        ("return redis.pcall('GET', ARGV[1])", "touches the key"),
        ("local r = redis return r.call('SET', ARGV[1], 'x')", "touches the key"),
        ("return redis['call']('GET', ARGV[1])", "touches the key"),
        ("local k = KEYS k[1] = ARGV[1] return redis.call('MGET', KEYS[1], ARGV[1], 'other')", "touches the key"),
        ("return redis.call('ZUNIONSTORE', KEYS[1], 1, ARGV[1])", "touches the key"),
        ("return redis.call('SORT', KEYS[1], 'STORE', ARGV[1])", "touches the key"),
        ("return redis.call('KEYS', '*')", "keys"),
        ("return redis.call('FLUSHALL')", "flushall"),
        ("return redis.call('DBSIZE')", "dbsize"),
        ("return redis.call('SCAN', 0)", "scan"),
        ("return _G.redis.call('GET', ARGV[1])", "_G"),
        ("return loadstring('return 1')()", "loadstring"),
    ] {
        for key in [&a, &near] {
            let reply = client.call(&["EVAL", script, "1", key, &b]);
            assert!(reply.expect_error().contains(error), "{script}: {reply:?}");
        }
    }
    assert_eq!(client.cmd(&format!("GET {b}")), bulk("there"));
    assert!(client.call(&["EVAL", "return redis.call('GET', 'x')", "0"]).expect_error().contains("'x'"));
    for script in [
        "return redis.call('GET', ARGV[1])",
        "local r = redis.call; return r('GET', ARGV[1])",
        "return redis.pcall('GET', ARGV[1])",
    ] {
        assert_eq!(
            client.call(&["EVAL", script, "1", &a, &near]),
            bulk("here"),
            "{script}: a key of the slot of a declared one"
        );
    }
    // With an argument that other commands forward in pieces: a script is not forwarded in pieces, but checked.
    let large = "x".repeat(3 << 20);
    for args in [[large.as_str(), b.as_str()], [b.as_str(), large.as_str()]] {
        let which = if args[0].len() > args[1].len() { "ARGV[2]" } else { "ARGV[1]" };
        let script = format!("return redis.call('SET', {which}, 'lost')");
        let reply = client.call(&["EVAL", &script, "1", &a, args[0], args[1]]);
        assert!(reply.expect_error().contains("touches the key"), "{reply:?}");
    }
    assert_eq!(client.cmd(&format!("GET {b}")), bulk("there"));
    // By hash, at every node, in any case. The reply of SCRIPT LOAD is the hash of the original script.
    let script = "return redis.call('GET', ARGV[1])";
    let sha = client.call(&["SCRIPT", "LOAD", script]).text();
    assert_eq!(sha, site.nodes()[0].client().call(&["SCRIPT", "LOAD", script]).text());
    assert_eq!(client.call(&["SCRIPT", "EXISTS", &sha]), Value::Array(vec![int(1)]));
    assert_eq!(client.call(&["EVALSHA", &sha, "1", &a, &near]), bulk("here"));
    assert_eq!(client.call(&["EVALSHA", &sha.to_uppercase(), "1", &a, &near]), bulk("here"));
    assert!(client.call(&["EVALSHA", &sha, "1", &a, &b]).expect_error().contains("touches the key"));
    assert_eq!(client.call(&["EVAL_RO", script, "1", &a, &near]), bulk("here"));
    // Called in the pipeline that loads it.
    client.cmd("SCRIPT FLUSH");
    let mut bytes = encode(&["SCRIPT", "LOAD", script]);
    for _ in 0..20 {
        bytes.extend(encode(&["EVALSHA", &sha, "1", &a, &near]));
    }
    for reply in &client.pipeline(&bytes, 21)[1..] {
        assert_eq!(reply, b"$4\r\nhere\r\n");
    }
    // Loaded directly at a node: the router does not know the script.
    client.cmd("SCRIPT FLUSH");
    for node in site.nodes() {
        node.client().call(&["SCRIPT", "LOAD", script]);
    }
    assert!(client.call(&["EVALSHA", &sha, "1", &a, &near]).expect_error().starts_with("NOSCRIPT"));
}

#[test]
fn scripts_behave_as_on_a_single_server() {
    let Some(site) = site(2) else { return };
    let (a, _, _) = keys(&site);
    let mut client = site.client();
    let mut plain = site.nodes()[0].client();
    client.cmd(&format!("RPUSH {a}list 1 2 3"));
    for script in [
        "return redis.call('LRANGE', KEYS[1]..'', 0, -1)",
        "local t = {} for i, v in ipairs(redis.call('LRANGE', KEYS[1] or '', 0, -1)) do t[i] = v * 2 end return t",
        "return redis.pcall('INCR', KEYS[1]..'')",
        "return {redis.sha1hex('x'), redis.status_reply('FINE'), tostring(redis.LOG_WARNING), type(redis.call)}",
        "return redis.error_reply('MY error ' .. type(redis))",
        "redis.call('NOSUCH', KEYS[1] .. '')",
        "redis.call('GET')",
        "return redis.call()",
        "return redis.call('INCRBY', KEYS[1] .. '', 'x')",
        "local function f(n) if n == 0 then return redis.call('LLEN', KEYS[1] .. '') end return f(n - 1) end return f(10)",
        "return redis.call('LLEN', 5 .. '')",
        "error('mine')",
        "syntax error here",
        "#!lua flags=no-writes\nlocal r = redis return r.call('SET', KEYS[1], 'x')",
        "redis.setresp(3) local r = redis return r.call('LLEN', KEYS[1])",
    ] {
        let got = client.call(&["EVAL", script, "1", &format!("{a}list"), "5"]);
        let wanted = plain.call(&["EVAL", script, "1", &format!("{a}list"), "5"]);
        // Errors contain the hash of the script, which differs.
        let bare = |v: &Value| match v.error() {
            Some(text) => {
                text.split(" script: ").next().unwrap_or_default().split("f_").next().unwrap_or_default().to_owned()
            }
            None => format!("{v:?}"),
        };
        if script.contains("LLEN', 5") {
            assert!(got.expect_error().contains("touches the key '5'"), "{got:?}");
        } else {
            assert_eq!(bare(&got), bare(&wanted), "{script}");
        }
    }
}

#[test]
fn functions_are_restricted_to_their_keys() {
    let Some(site) = site(2) else { return };
    let (a, b, near) = keys(&site);
    let mut client = site.client();
    client.cmd(&format!("SET {near} here"));
    let library = "#!lua name=lib\nlocal function get(keys, args) return redis.call('GET', args[1]) end\n\
        redis.register_function('get', get)\n\
        redis.register_function{function_name='get_ro', callback=get, flags={'no-writes'}, description='d'}\n\
        redis.register_function('own', function(keys, args) return redis.call('GET', keys[1]) end)";
    assert_eq!(client.call(&["FUNCTION", "LOAD", library]), bulk("lib"));
    assert_eq!(client.cmd(&format!("FCALL get 1 {a} {near}")), bulk("here"));
    assert_eq!(client.cmd(&format!("FCALL_RO get_ro 1 {a} {near}")), bulk("here"));
    assert_eq!(client.cmd(&format!("FCALL own 1 {near}")), bulk("here"));
    for call in [
        format!("FCALL get 1 {a} {b}"),
        format!("FCALL get 1 {b} {near}"),
        format!("FCALL get_ro 1 {a} {b}"),
        format!("FCALL get 0 {b}"),
    ] {
        assert!(client.cmd(&call).expect_error().contains("touches the key"), "{call}");
    }
    // The code is shown in its original form.
    for protocol in ["HELLO 2", "HELLO 3"] {
        client.cmd(protocol);
        let list = client.cmd("FUNCTION LIST WITHCODE");
        assert_eq!(list.items()[0].field("library_code"), bulk(library));
    }
    client.cmd("HELLO 2");
    // Libraries loaded elsewhere are restricted as well.
    let node = &site.nodes()[0];
    node.cmd("FUNCTION FLUSH");
    node.client().call(&["FUNCTION", "LOAD", library]);
    let dump = node.cmd("FUNCTION DUMP");
    client.cmd("FUNCTION FLUSH");
    assert_eq!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes()]), ok());
    assert!(client.cmd(&format!("FCALL get 1 {a} {b}")).expect_error().contains("touches the key"));
    assert!(client.cmd(&format!("FCALL get 1 {b} {a}")).expect_error().contains("touches the key"));
    assert!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes()]).expect_error().contains("already exists"));
    assert!(
        client
            .call(&[
                "FUNCTION",
                "LOAD",
                "#!lua name=evil\nlocal g = _G redis.register_function('e', function() return 1 end)"
            ])
            .expect_error()
            .contains("_G")
    );
}

/// Large libraries are checked by another thread. Random text, because nodes compress payloads.
#[test]
fn large_libraries_are_checked_while_their_client_waits() {
    let Some(site) = site(2) else { return };
    let (a, b, near) = keys(&site);
    let text: String = Random::new(1).bytes(100_000).iter().map(|byte| char::from(b'a' + byte % 26)).collect();
    let library = |name: &str, code: &str| format!("#!lua name={name}\n{code} --{text}");
    let get = "redis.register_function('get', function(keys, args) return redis.call('GET', args[1]) end)";
    let load = library("lib", get);
    let mut client = site.client();
    // The replies keep the order of the commands.
    client.send(&["SET", &near, "here"]);
    client.send(&["FUNCTION", "LOAD", &load]);
    client.send(&["GET", &near]);
    client.send(&["FUNCTION", "LOAD", &library("evil", "local g = _G")]);
    client.send(&["FUNCTION", "LOAD", &load]);
    client.send(&["FCALL", "get", "1", &a, &near]);
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), bulk("lib"));
    assert_eq!(client.reply(), bulk("here"));
    assert!(client.reply().expect_error().contains("_G"));
    assert!(client.reply().expect_error().contains("already exists"));
    assert_eq!(client.reply(), bulk("here"));
    assert!(client.call(&["FCALL", "get", "1", &a, &b]).expect_error().contains("touches the key"));
    // A payload without the check.
    let node = &site.nodes()[0];
    node.cmd("FUNCTION FLUSH");
    node.client().call(&["FUNCTION", "LOAD", &load]);
    let dump = node.cmd("FUNCTION DUMP");
    let mut damaged = dump.bytes().to_vec();
    damaged[50_000] ^= 1;
    client.send(&[&b"FUNCTION"[..], b"RESTORE", &damaged, b"FLUSH"]);
    client.send(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes(), b"FLUSH"]);
    assert!(client.reply().expect_error().contains("checksum"));
    assert_eq!(client.reply(), ok());
    assert!(client.call(&["FCALL", "get", "1", &a, &b]).expect_error().contains("touches the key"));
    // A client that leaves during its check stops nothing.
    let mut gone = site.client();
    gone.send(&["FUNCTION", "LOAD", "REPLACE", &load]);
    drop(gone);
    assert_eq!(client.call(&["FUNCTION", "LOAD", "REPLACE", &load]), bulk("lib"));
}

#[test]
fn without_the_check_every_script_runs() {
    let Some(site) =
        Site::router_only(2, &SiteOptions::router(RouterOptions::args(&["--set", "scripts.undeclared-keys=allow"])))
    else {
        return;
    };
    let (a, b, _) = keys(&site);
    let mut client = site.client();
    client.cmd(&format!("SET {b} there"));
    assert_eq!(
        client.call(&["EVAL", "return redis.call('GET', ARGV[1])", "1", &a, &b]),
        Value::Nil,
        "the node of the first key has no such key"
    );
    assert_eq!(client.call(&["EVAL", "return _G.redis.call('GET', ARGV[1])", "1", &b, &b]), bulk("there"));
    // One node has run the script, so every node can. A script that only one node has, and that the router has not
    // seen, cannot run elsewhere.
    let run = "return 'run'";
    assert_eq!(client.call(&["EVAL", run, "1", &a]), bulk("run"));
    let sha = |script: &str| site.nodes()[0].client().call(&["SCRIPT", "LOAD", script]).text();
    let (run, unseen) = (sha(run), sha("return 'unseen'"));
    for node in site.nodes() {
        node.client().call(&["SCRIPT", "LOAD", "return 'everywhere'"]);
    }
    let everywhere = sha("return 'everywhere'");
    let none = "0".repeat(40);
    let exists = client.call(&["SCRIPT", "EXISTS", &none, &run, &unseen, &everywhere]);
    assert_eq!(exists, Value::Array([0, 1, 0, 1].map(int).to_vec()));
    assert_eq!(client.call(&["EVALSHA", &run, "1", &b]), bulk("run"));
}

#[test]
fn scripts_in_transactions_are_restricted_to_their_keys() {
    let Some(site) = site(2) else { return };
    let (a, b, near) = keys(&site);
    let mut client = site.client();
    client.cmd(&format!("SET {near} here"));
    let script = "return redis.call('GET', ARGV[1])";
    let sha = client.call(&["SCRIPT", "LOAD", script]).text();
    client.cmd("MULTI");
    client.call(&["EVAL", script, "1", &a, &near]);
    client.call(&["EVALSHA", &sha, "1", &a, &near]);
    client.call(&["EVALSHA", &sha, "1", &a, &b]);
    let replies = client.cmd("EXEC");
    assert_eq!(replies.items()[..2], [bulk("here"), bulk("here")]);
    assert!(replies.items()[2].expect_error().contains("touches the key"));
    // A node that lost the script receives it again.
    for node in site.nodes() {
        node.cmd("SCRIPT FLUSH");
    }
    client.cmd("MULTI");
    client.call(&["EVALSHA", &sha, "1", &a, &near]);
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![bulk("here")]));
    // Refused scripts abort the transaction.
    client.cmd("MULTI");
    client.call(&["EVAL", "return _G", "0"]).expect_error();
    assert!(client.cmd("EXEC").expect_error().starts_with("EXECABORT"));
}

#[test]
fn a_script_has_no_more_permissions_than_its_client() {
    let Some(site) = site(2) else { return };
    let (a, b, near) = keys(&site);
    let mut client = site.client();
    client.cmd(&format!("SET {a} 1"));
    client.cmd(&format!("RPUSH {a}list 1 2"));
    let (host, port) = (site.nodes()[1].address().ip().to_string(), site.nodes()[1].address().port().to_string());
    let calls = [
        "'SWAPDB',0,1",
        "'MIGRATE',ARGV[3],ARGV[4],KEYS[1],0,1000",
        "'RESTORE-ASKING',KEYS[1],0,'x'",
        "'PFDEBUG','ENCODING',KEYS[1]",
        "'DEBUG','SLEEP',0",
        "'INFO'",
        "'ROLE'",
        "'LASTSAVE'",
        "'MEMORY','STATS'",
        "'MEMORY','USAGE',ARGV[2]",
        "'OBJECT','ENCODING',ARGV[2]",
        "'XGROUP','CREATE',ARGV[2],'g','$','MKSTREAM'",
        "'XINFO','STREAM',ARGV[2]",
        "'SORT',KEYS[1]..'list','BY','w_*','GET','o_*'",
        "'SORT',KEYS[1]..'list','GET\\0','w_*'",
        "'SORT',KEYS[1]..'list','STORE\\0',ARGV[2]",
        "'GEORADIUS',KEYS[1],1,1,1,'km','STORE',ARGV[2]",
        "'GEORADIUS',KEYS[1],1,1,1,'km','STORE\\0',ARGV[2]",
        "'XREAD','STREAMS',KEYS[1],ARGV[2],'0','0'",
        "'ZUNIONSTORE',KEYS[1],1,ARGV[2]",
        "'SET\\0',ARGV[2],'x'",
        "'PUBSUB','CHANNELS'",
        "'SPUBLISH',ARGV[2],'x'",
    ];
    // Named in the text, not named in the text, and in a function.
    for form in ["return redis.call(CALL)", "local r = redis return r['call'](CALL)", "return redis.pcall(CALL)"] {
        for call in calls {
            let reply = client.call(&["EVAL", &form.replace("CALL", call), "1", &a, &near, &b, &host, &port]);
            assert!(reply.expect_error().contains("Switchyard: "), "{call}: {reply:?}");
            let code = format!(
                "#!lua name=l\nredis.register_function('f', function(KEYS, ARGV) {} end)",
                form.replace("CALL", call)
            );
            assert_eq!(client.call(&["FUNCTION", "LOAD", "REPLACE", &code]), bulk("l"));
            let reply = client.call(&["FCALL", "f", "1", &a, &near, &b, &host, &port]);
            assert!(reply.expect_error().contains("Switchyard: "), "{call}: {reply:?}");
        }
    }
    for body in [
        "local x KEYS[1],x=ARGV[2],1 return redis.call('SET',KEYS[1],'astray')",
        "setmetatable(KEYS,{__index=function() return ARGV[2] end}) return redis.call('SET',KEYS[2],'astray')",
        "-- \r return redis.call('SET',ARGV[2],'astray')",
        "return (getmetatable(redis) or {__index=redis}).__index.call('SET',ARGV[2],'astray')",
        "local m = getmetatable(redis) return m.__index.call('SET',ARGV[2],'astray')",
    ] {
        client.call(&["EVAL", body, "1", &a, &near, &b]).expect_error();
    }
    assert_eq!(client.cmd(&format!("EXISTS {b} {a}")), int(1), "only existing keys");
    for node in site.nodes() {
        assert!(node.cmd("DBSIZE").int() <= 2, "{:?}", node.cmd("KEYS *"));
    }
    // Not by a command either: servers read an option up to a NUL byte.
    let reply = client.call(&["SORT", &format!("{a}list"), "STORE\0", &b]);
    assert!(reply.error().is_some() || client.cmd(&format!("EXISTS {b}")) == int(1), "{reply:?}");
    client.call(&["SORT", &format!("{a}list"), "GET\0x", "w_*"]).expect_error();
}

#[test]
fn a_script_leaves_no_state_for_other_scripts() {
    let Some(site) = site(2) else { return };
    let (a, _, near) = keys(&site);
    let mut client = site.client();
    let change = "local k = ARGV[1] getmetatable('').__index = function() return function() redis.call('SET', k, 'left') return 'x' end end \
        return redis.call('GET', KEYS[1]..'')";
    client.call(&["EVAL", change, "1", &a, &near]);
    let library = "#!lua name=l\nredis.register_function('f', function(k, a) \
        getmetatable('').__index = function() return function() redis.call('SET', a[1], 'left') end end return 1 end)";
    client.call(&["FUNCTION", "LOAD", library]);
    assert_eq!(client.call(&["FCALL", "f", "1", &a, &near]), int(1));
    assert_eq!(client.call(&["EVAL", "return ('x'):rep(3)", "1", &a]), bulk("xxx"));
    assert_eq!(client.cmd(&format!("EXISTS {near}")), int(0));
}

#[test]
fn redis_is_read_only_in_functions_as_on_a_server() {
    let Some(site) = site(2) else { return };
    let single = crate::support::Node::start(&crate::support::NodeOptions::default());
    let (a, b, _) = keys(&site);
    let (mut client, mut reference) = (site.client(), single.client());
    let library = "#!lua name=l\nredis.register_function('f', function(k, a) \
        local mine = function() return 'mine' end \
        local tried = { pcall(rawset, redis, 'x', 1), pcall(rawset, redis, 'call', mine), pcall(function() local r = redis r.call = mine end), \
            pcall(function() local r = redis r.x = 1 end), pcall(function() local r = redis r.pcall = nil end) } \
        for i = 1, #tried do tried[i] = tostring(tried[i]) end \
        tried[#tried + 1] = redis.call('GET', k[1]) or 'none' return tried end)";
    for client in [&mut client, &mut reference] {
        assert_eq!(client.call(&["FUNCTION", "LOAD", library]), bulk("l"));
        assert_eq!(client.call(&["SET", &a, "v"]), ok());
    }
    let answer = client.call(&["FCALL", "f", "1", &a, &b]);
    assert_eq!(answer, reference.call(&["FCALL", "f", "1", &a, &b]));
    assert_eq!(answer.items().last().map(Value::text).as_deref(), Some("v"));
    // Effects of one call are gone with the next.
    assert_eq!(client.call(&["FCALL", "f", "1", &a, &b]), answer);
}

/// Regression: the checked form of a callback was stored in the library's own table, where it could be called with any
/// keys, and `CALLBACK` was not checked at all.
#[test]
fn a_library_cannot_choose_the_declared_keys() {
    let Some(site) = site(2) else { return };
    let (a, b, _) = keys(&site);
    let mut client = site.client();
    let evil = "#!lua name=evil\nlocal n = {function_name='g', callback=function(k, a) return redis.call(unpack(a)) end} \
        redis.register_function(n) redis.register_function('f', function(k, a) return n.callback({a[2]}, a) end)";
    assert_eq!(client.call(&["FUNCTION", "LOAD", evil]), bulk("evil"));
    assert!(client.call(&["FCALL", "f", "1", &a, "SET", &b, "astray"]).expect_error().contains("touches the key"));
    assert_eq!(client.call(&["FCALL", "g", "1", &a, "SET", &a, "v"]), ok());
    let other = "#!lua name=other\nredis.register_function{FUNCTION_NAME='h', CALLBACK=function(k, a) return redis.call('GET', a[1]) end, flags={'no-writes'}}";
    assert_eq!(client.call(&["FUNCTION", "LOAD", other]), bulk("other"));
    assert_eq!(client.call(&["FCALL_RO", "h", "1", &a, &a]), bulk("v"));
    // Also after a call that has declared it.
    client.call(&["FCALL", "h", "1", &b, &b]);
    assert!(client.call(&["FCALL", "h", "1", &a, &b]).expect_error().contains("touches the key"));
    let odd = "#!lua name=odd\nredis.register_function{function_name='o', CallBack=function(k, a) return redis.call('GET', a[1]) end}";
    client.call(&["FUNCTION", "LOAD", odd]).expect_error();
    let long = "x".repeat(3_000_000);
    let refused = client.call(&["EVAL", "local k = ARGV[1] return redis.call('GET', k)", "1", &a, &long]);
    assert!(refused.expect_error().len() < 1000);
}

#[test]
fn no_unchecked_library_passes_as_checked() {
    let Some(site) = site(2) else { return };
    let (a, b, _) = keys(&site);
    let mut client = site.client();
    client.call(&["FUNCTION", "LOAD", "#!lua name=l\nredis.register_function('f', function() return 1 end)"]);
    let stored = |site: &Site| site.nodes()[0].cmd("FUNCTION LIST WITHCODE").items()[0].field("library_code").text();
    let prelude = stored(&site)
        .lines()
        .nth(1)
        .expect("a second line")
        .split("redis.register_function('f'")
        .next()
        .expect("text")
        .to_owned();
    // The check's text in a comment, in an existing library, and in the form of an older router.
    let evil = "redis.register_function('f', function(k, a) return redis.call('SET', a[1], 'astray') end)";
    let older = include_str!("../../../router/src/lua/prelude-0.1.0.lua");
    for code in [
        format!("#!lua name=l\n--[==[\n{prelude}]==]\n{evil}"),
        format!("#!lua name=l\n{prelude}{evil}"),
        format!("#!lua name=l\n{older}{evil}"),
    ] {
        client.call(&["FUNCTION", "LOAD", "REPLACE", &code]);
        assert!(stored(&site).starts_with(&format!("#!lua name=l\n{prelude}")));
        assert!(client.call(&["FCALL", "f", "1", &a, &b]).expect_error().contains("touches the key"));
    }
    // Loaded elsewhere, as a payload, which is compressed because it is long. No node ever has it without the check.
    let elsewhere = crate::support::Node::start(&crate::support::NodeOptions::default());
    let long = format!("#!lua name=l\n{evil} --{}", "repeated ".repeat(1000));
    elsewhere.client().call(&["FUNCTION", "LOAD", &long]);
    let dump = elsewhere.cmd("FUNCTION DUMP");
    assert_eq!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes(), b"FLUSH"]), ok());
    assert!(client.call(&["FCALL", "f", "1", &a, &b]).expect_error().contains("touches the key"));
    assert_eq!(client.cmd("FUNCTION LIST WITHCODE").items()[0].field("library_code"), bulk(&long));
    client.cmd("MULTI");
    assert!(
        client.cmd("FUNCTION LIST WITHCODE").expect_error().contains("Call it outside"),
        "it would show the router's line"
    );
    client.cmd("DISCARD");
    elsewhere.client().call(&[
        "FUNCTION",
        "LOAD",
        "REPLACE",
        "#!lua name=l\nlocal g = function() return _G end redis.register_function('f', g)",
    ]);
    let dump = elsewhere.cmd("FUNCTION DUMP");
    assert!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes(), b"REPLACE"]).expect_error().contains("_G"));
    let damaged = client.call(&["FUNCTION", "RESTORE", "damaged"]);
    assert_eq!(damaged, elsewhere.client().call(&["FUNCTION", "RESTORE", "damaged"]));
    // A node with a library of an older router: the current one adds its own check.
    let code = format!("#!lua name=l\n{older}{evil}");
    for node in site.nodes() {
        node.client().call(&["FUNCTION", "LOAD", "REPLACE", &code]);
    }
    let mut site = site;
    let nodes: Vec<_> = site.nodes().iter().map(|n| n.address()).collect();
    site.router_mut().restart(&nodes);
    crate::support::until("the library has the present check", || stored(&site).contains(&prelude));
}

/// `redis-cli --ldb` sends its script after SCRIPT DEBUG, even after an error, and expects that nothing is changed.
#[test]
fn script_debug_closes_the_connection_after_its_error() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    for line in ["SET k before", "SCRIPT DEBUG YES", "EVAL \"return redis.call('SET',KEYS[1],'changed')\" 1 k"] {
        client.post(line);
    }
    assert_eq!(client.reply(), ok());
    assert!(client.reply().expect_error().starts_with("ERR Switchyard does not serve SCRIPT DEBUG"));
    assert!(client.try_reply().is_err(), "closed");
    assert_eq!(site.client().cmd("GET k"), bulk("before"));
}
