//! Scripts with undeclared keys at several nodes: a rehearsal finds these keys, which are brought to one node. Replies and
//! keys are those of a single server. `script_keys` has the check without co-location.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::movectl::{done, json, run_cli};
use crate::support::{Client, Node, NodeOptions, Router, Site, SiteOptions, Value, bulk, encode, int, ok};

/// Moves are slow on a busy machine.
const LONG_TIMEOUT: &str = "[moves]\ncolocate-timeout = \"60s\"\n";

/// Two nodes, and a single server.
struct Scene {
    site: Site,
    single: Node,
}

impl Scene {
    fn new() -> Option<Scene> {
        let site = Site::router_only(2, &SiteOptions::config(LONG_TIMEOUT))?;
        Some(Scene { site, single: Node::start(&NodeOptions::default()) })
    }

    fn router(&self) -> &Router {
        self.site.router()
    }

    /// Replaces `%a` and `%b` by the beginnings of names. Their keys are on both nodes.
    fn line(&self, line: &str) -> String {
        line.replace("%a", "a:").replace("%b", "b:")
    }

    /// Replaces `%a` and `%b` by hash tags on the two nodes.
    fn tagged(&self, line: &str) -> String {
        let tags = self.site.tags();
        let tag = |node: usize| format!("{{{}}}", tags[node][0]);
        line.replace("%a", &tag(0)).replace("%b", &tag(1))
    }

    /// Executes a command at the site and at the single server, and compares the replies.
    fn same(&self, clients: &mut [Client; 2], args: &[&str]) -> Value {
        let args: Vec<String> = args.iter().map(|arg| self.line(arg)).collect();
        let [got, expected] = clients.each_mut().map(|client| client.call(&args));
        let bare = |value: &Value| match value.error() {
            Some(text) => format!("error {}", text.split(" script: ").next().unwrap_or_default()),
            None => format!("{value:?}"),
        };
        assert_eq!(bare(&got), bare(&expected), "{args:?}");
        got
    }

    fn clients(&self) -> [Client; 2] {
        [self.site.client(), self.single.client()]
    }
}

fn repeats(router: &Router) -> u64 {
    let metrics = router.metrics();
    let line = metrics.lines().find_map(|line| line.strip_prefix("switchyard_script_repeats_total "));
    line.and_then(|number| number.parse().ok()).expect("the metric")
}

#[test]
fn scripts_use_undeclared_keys_of_all_nodes_as_on_one_server() {
    let Some(scene) = Scene::new() else { return };
    let mut clients = scene.clients();
    let lines = [
        "MSET %a1 one %b1 two %bn 5 %b:m5 five",
        "RPUSH %aq 1 2 3",
        "HSET %bjob:3 f three",
        "HSET %bjob:2 f two",
        "ZADD %az 1 x 2 y",
        "SADD %bs x",
    ];
    for line in lines {
        scene.same(&mut clients, &line.split(' ').collect::<Vec<_>>());
    }
    for (script, keys, args) in [
        ("return redis.call('GET', ARGV[1])", &["%a1"][..], &["%b1"][..]),
        ("return redis.pcall('GET', ARGV[1])", &["%a1"], &["%b1"]),
        ("return redis.call('GET', ARGV[1])", &[], &["%b1"]),
        ("return {redis.call('GET', ARGV[1]), redis.call('GET', ARGV[2])}", &[], &["%a1", "%b1"]),
        // Writes before the undeclared key.
        ("redis.call('INCR', KEYS[1]) return redis.call('INCR', ARGV[1])", &["%ac"], &["%bc"]),
        (
            "redis.call('INCR', ARGV[1]) redis.call('INCR', ARGV[2]) return redis.call('GET', ARGV[1])",
            &[],
            &["%ac", "%bc"],
        ),
        // Values determine the names.
        ("local id = redis.call('RPOP', KEYS[1]) return redis.call('HGET', ARGV[1]..id, 'f')", &["%aq"], &["%bjob:"]),
        (
            "local n = redis.call('INCR', KEYS[1]) redis.call('SET', ARGV[1]..n, 'made') return n",
            &["%aid"],
            &["%bmade:"],
        ),
        ("return redis.call('GET', ARGV[1]..redis.call('GET', ARGV[2]))", &["%a1"], &["%b:m", "%bn"]),
        (
            "for _, m in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do redis.call('SADD', ARGV[1], m) end return redis.call('SCARD', ARGV[1])",
            &["%az"],
            &["%bs"],
        ),
        // Loops that end because of their own writes.
        (
            "local n = 0 while redis.call('RPOP', KEYS[1]) do n = n + 1 redis.call('LPUSH', ARGV[1], n) end return n",
            &["%aq"],
            &["%bq"],
        ),
        (
            "while redis.call('SCARD', ARGV[1]) > 0 do redis.call('SPOP', ARGV[1]) end return redis.call('EXISTS', ARGV[1])",
            &["%a1"],
            &["%bs"],
        ),
        // Tables of the script are as in the first run.
        ("local k = table.remove(ARGV, 1) KEYS[1] = 'x' return redis.call('GET', k)", &["%a1"], &["%b1"]),
        ("return {#KEYS, #ARGV, redis.call('GET', ARGV[1])}", &["%a1"], &["%b1"]),
        (
            "setmetatable(KEYS, {__newindex = function() error('mine', 0) end}) return redis.call('GET', ARGV[1])",
            &["%a1"],
            &["%b1"],
        ),
        (
            "local n repeat local ok, v = pcall(redis.call, 'LLEN', ARGV[1]) if ok then n = v end pcall(redis.call, 'LTRIM', ARGV[1], 1, -1) \
             until n == 0 return 'end'",
            &["%a1"],
            &["%bq"],
        ),
        ("redis.setresp(3) redis.call('HGETALL', ARGV[1]) return redis.call('TYPE', ARGV[1])", &["%a1"], &["%bjob:2"]),
        ("return #redis.call('MGET', unpack(ARGV)) -- a comment at the end", &["%a1"], &["%b1", "%a1", "%b2"]),
        ("redis.call('SET', KEYS[1], ARGV[1]) error('mine')", &["%a1"], &["%b1"]),
        ("redis.call('GET', ARGV[1]) return redis.call('INCR', ARGV[1])", &["%a1"], &["%b1"]),
    ] {
        let count = keys.len().to_string();
        let call: Vec<&str> = ["EVAL", script, &count].into_iter().chain(keys.iter().chain(args).copied()).collect();
        for _ in 0..2 {
            scene.same(&mut clients, &call);
        }
    }
    for key in ["%a1", "%b1", "%ac", "%bc", "%aq", "%bq", "%bs", "%aid", "%bmade:1", "%bmade:2"] {
        scene.same(&mut clients, &["TYPE", key]);
        scene.same(&mut clients, &["EXISTS", key]);
    }
    let all = |client: &mut Client| client.cmd("DBSIZE").int();
    assert_eq!(all(&mut clients[0]), all(&mut clients[1]));
}

#[test]
fn rehearsals_show_the_effects_of_earlier_writes() {
    let Some(scene) = Scene::new() else { return };
    let mut clients = scene.clients();
    // Each computes a part of a name.
    for (number, body) in [
        "c('LPUSH', k, 'x', 'y') return c('RPOP', k)..c('RPOP', k)",
        "c('RPUSH', k, 1, 2, 3) c('LPUSH', k, 0) return c('LPOP', k)..c('LLEN', k)..c('RPOP', k)..c('LLEN', k)",
        "c('RPUSH', k, 'a', 'b') c('RPOPLPUSH', k, k..'2') c('LPUSH', k..'2', 'c') return c('RPOP', k..'2')..c('LLEN', k..'2')",
        "c('RPUSH', k, 'a', 'b', 'c') c('LMOVE', k, k, 'LEFT', 'RIGHT') return table.concat(c('LPOP', k, 3))",
        "c('RPUSH', k, 'a') c('DEL', k) c('RPUSH', k, 'b') return c('LLEN', k)..c('EXISTS', k)..c('LPOP', k)",
        "return c('LPUSHX', k, 'a')..c('RPUSH', k, 'b')..c('RPUSHX', k, 'c')..c('LPOP', k)",
        "return c('SADD', k, 'a', 'b', 'a')..c('SREM', k, 'a', 'z')..c('SCARD', k)..c('SISMEMBER', k, 'b')..c('SMEMBERS', k)[1]",
        "c('SADD', k, 'a') c('SMOVE', k, k..'2', 'a') return c('SCARD', k)..c('SPOP', k..'2')..c('SCARD', k..'2')",
        "return c('ZADD', k, 2, 'b', 1, 'a', 3, 'c')..c('ZPOPMIN', k)[1]..c('ZPOPMAX', k, 2)[3]..c('ZCARD', k)",
        "c('ZADD', k, 'NX', 5, 'a') c('ZADD', k, 'NX', 7, 'a') c('ZINCRBY', k, 2, 'a') return c('ZSCORE', k, 'a')..c('ZREM', k, 'a')",
        "c('SET', k, 1) return c('INCR', k)..c('INCRBY', k, 5)..c('DECR', k)..c('APPEND', k, 'x')..c('GET', k)..c('GETSET', k, 'y')",
        "c('SET', k, 'a', 'NX') c('SET', k, 'b', 'NX') return c('GET', k)..c('SETNX', k, 'c')..c('DEL', k)..c('EXISTS', k)..c('SETNX', k, 'c')",
        "c('MSET', k, 1, k..'2', 2) return table.concat(c('MGET', k, k..'2'))..c('EXPIRE', k, 100)..c('GETDEL', k)..c('EXISTS', k, k..'2')",
        "return c('HSET', k, 'f', 1, 'g', 2)..c('HINCRBY', k, 'f', 2)..c('HGET', k, 'f')..c('HDEL', k, 'g')..c('HEXISTS', k, 'g')..c('EXISTS', k)",
        "c('HMSET', k, 'f', 1) return c('HSETNX', k, 'f', 2)..table.concat(c('HMGET', k, 'f'))..c('HINCRBYFLOAT', k, 'f', 0.5)",
    ]
    .iter()
    .enumerate()
    {
        // The second call finds the keys that the first one has made.
        let script = format!(
            "local c, k = redis.call, KEYS[1] local function name() {body} end return redis.call('INCR', ARGV[1]..name())"
        );
        for _ in 0..2 {
            let reply = scene.same(&mut clients, &["EVAL", &script, "1", &format!("%ak{number}"), &format!("%b{number}:")]);
            assert_eq!(reply.error(), None, "{body}");
        }
    }
    assert_eq!(clients[0].cmd("DBSIZE"), clients[1].cmd("DBSIZE"));
}

#[test]
fn rehearsals_do_not_repeat_random_numbers() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    if client.cmd("FUNCTION LIST").error().is_some() {
        return eprintln!("before Redis 7.0 each script starts with the same random numbers");
    }
    let script = "return {math.random(1000000000), redis.call('EXISTS', ARGV[1])}";
    let mut call = || client.call(&["EVAL", script, "0", &scene.line("%b1")]);
    assert_ne!(call(), call());
}

#[test]
fn sort_uses_keys_of_all_nodes_as_on_one_server() {
    let Some(scene) = Scene::new() else { return };
    let mut clients = scene.clients();
    for line in [
        "RPUSH ids 3 1 2",
        "SADD members 1 2 3",
        "ZADD scores 5 1 4 2 3 3",
        "MSET w_1 30 w_2 20 w_3 10 o_1 one o_2 two",
        "HSET h_1 f 2",
        "HSET h_2 f 1",
    ] {
        scene.same(&mut clients, &line.split(' ').collect::<Vec<_>>());
    }
    for line in [
        "SORT ids BY w_*",
        "SORT ids BY w_* DESC GET o_* GET # GET w_*",
        "SORT ids GET h_*->f",
        "SORT ids BY h_*->f LIMIT 1 1",
        "SORT members BY w_* GET o_*",
        "SORT scores BY nosort GET o_*",
        "SORT absent BY w_* GET o_*",
        "sort ids by w_* get o_* store sorted",
        "LRANGE sorted 0 -1",
        "SORT sorted ALPHA BY nosort GET *",
        "SORT w_1 BY o_*",
        "SORT ids BY o_*",
        "SORT ids BY w_* LIMIT x y",
        "SORT ids BY w_* GET",
    ] {
        scene.same(&mut clients, &line.split(' ').collect::<Vec<_>>());
    }
}

#[test]
fn scripts_of_a_transaction_use_undeclared_keys_of_all_nodes() {
    let Some(scene) = Scene::new() else { return };
    let mut clients = scene.clients();
    for line in ["RPUSH %aq 1 2 3", "HSET %bjob:3 f three", "HSET %bjob:2 f two", "SET %bx 7"] {
        scene.same(&mut clients, &line.split(' ').collect::<Vec<_>>());
    }
    let add = "local id = redis.call('INCR', KEYS[1]) redis.call('HSET', ARGV[1]..id, 'f', ARGV[2]) return id";
    let take = "return redis.call('HGET', ARGV[1]..redis.call('RPOP', KEYS[1]), 'f')";
    clients[0].cmd("CONFIG SET slowlog-log-slower-than 0");
    let sha = clients.each_mut().map(|client| client.call(&["SCRIPT", "LOAD", take]).text()).concat();
    let sha = &sha[..40];
    for watched in [None, Some("%bx")] {
        if let Some(key) = watched {
            scene.same(&mut clients, &["WATCH", key]);
        }
        for command in [
            &["MULTI"][..],
            &["EVAL", add, "1", "%aid", "%bnew:", "one"],
            &["EVAL", add, "1", "%aid", "%bnew:", "another"],
            &["INCR", "%bx"],
            &["EVALSHA", sha, "1", "%aq", "%bjob:"],
            &["EVAL", "return goto x", "0"],
            &["EVAL", "return redis.call('GET', ARGV[1])", "0", "%bx"],
            &["EXEC"],
        ] {
            scene.same(&mut clients, command);
        }
    }
    let slow = format!("{:?}", clients[0].cmd("SLOWLOG GET 1000"));
    assert!(slow.contains("EXEC") && !slow.contains("local W"), "{slow}");
    (1..=4).for_each(|id| drop(scene.same(&mut clients, &["HGET", &format!("%bnew:{id}"), "f"])));
}

#[test]
fn commands_behind_a_repeated_script_are_executed_after_it() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    let script = "redis.call('SET', ARGV[1], ARGV[2]) return ARGV[2]";
    for round in 0..30 {
        let (key, value) = (scene.line(&format!("%b{round}")), round.to_string());
        client.write(
            &[
                encode(&["SET", &scene.line("%a"), &value]),
                encode(&["EVAL", script, "1", &scene.line("%a"), &key, &value]),
                encode(&["GET", &key]),
                encode(&["CLIENT", "REPLY", "SKIP"]),
                encode(&["EVAL", script, "1", &scene.line("%a"), &key, "later"]),
                encode(&["GET", &key]),
            ]
            .concat(),
        );
        let replies: [Value; 4] = std::array::from_fn(|_| client.reply());
        assert_eq!(replies, [ok(), bulk(&value), bulk(&value), bulk("later")], "round {round}");
    }
    assert!(repeats(scene.router()) > 0);
}

#[test]
fn names_of_the_same_form_are_expected_by_later_calls() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    let script = "return redis.call('INCR', ARGV[1]..':'..ARGV[2])";
    let mut call = |n: usize| client.call(&["EVAL", script, "1", &scene.line("%a"), &scene.line("%b"), &n.to_string()]);
    (0..4).for_each(|n| assert_eq!(call(n), int(1)));
    let before = repeats(scene.router());
    (4..30).for_each(|n| assert_eq!(call(n), int(1)));
    assert_eq!(repeats(scene.router()), before, "no call is repeated any more");
}

#[test]
fn only_the_keys_that_a_script_touches_return_to_their_slot() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    for name in ["%a1", "%a2", "%aother"] {
        client.cmd(&scene.tagged(&format!("SET {name} v")));
    }
    let nodes = scene.site.nodes();
    let (from, to) = (nodes[0].address(), nodes[1].address());
    done(scene.router(), &scene.tagged(&format!("move --from {from} --to {to} --keys %a* --wait")));
    let away = || {
        let report = json(scene.router(), "nodes list");
        let nodes = report["nodes"].as_array().cloned().unwrap_or_default();
        nodes.iter().filter_map(|node| node["overrides"].as_u64()).sum::<u64>()
    };
    assert_eq!(away(), 3);
    let near = "return redis.call('GET', ARGV[1])";
    assert_eq!(client.call(&["EVAL", near, "1", &scene.tagged("%aabsent"), &scene.tagged("%a2")]), bulk("v"));
    assert_eq!(away(), 2, "the others stay where they are");
    assert_eq!(client.cmd(&scene.tagged("GET %aother")), bulk("v"));
}

/// A tag keeps the keys of a script together, so such a script is rehearsed only when it is known to touch others.
#[test]
fn a_script_with_tagged_keys_is_rehearsed_after_its_first_error() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    let script = "redis.call('INCR', KEYS[1]) return redis.call('INCR', ARGV[1])";
    let mut call = || client.call(&["EVAL", script, "1", &scene.tagged("%a"), &scene.tagged("%b")]);
    let first = call();
    assert!(first.expect_error().contains("touches the key"), "{first:?}");
    assert_eq!((call(), call()), (int(1), int(2)));
    assert_eq!(client.cmd(&scene.tagged("GET %a")), bulk("3"));
}

/// Scripts that take an element from a list and store it under a name that contains it, from several clients, while the
/// slots of the keys move to and fro.
#[test]
fn scripts_lose_and_repeat_nothing_while_slots_move() {
    const ELEMENTS: usize = 200;
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    let list = scene.line("%alist");
    let elements: Vec<u8> = (0..ELEMENTS).flat_map(|n| encode(&["RPUSH", &list, &n.to_string()])).collect();
    client.pipeline(&elements, ELEMENTS);
    let script = "local e = redis.call('LPOP', KEYS[1]) if not e then return false end \
        redis.call('INCR', ARGV[1]..e) return e";
    let stop = AtomicBool::new(false);
    let taken = std::thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let nodes = scene.site.nodes();
            let (one, other) = (nodes[0].address(), nodes[1].address());
            let slot = crate::support::slots::slot(list.as_bytes());
            for (from, to) in [(one, other), (other, one)].into_iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                // Refused while a key of the slot moves.
                run_cli(scene.router(), &format!("move --from {from} --to {to} --slots {slot} --wait"));
            }
        });
        let workers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let (mut client, mut taken) = (scene.site.client(), 0);
                    loop {
                        match client.call(&["EVAL", script, "1", &list, &scene.line("%belement:")]) {
                            Value::Nil => return taken,
                            reply => assert_eq!(reply.error(), None, "{reply:?}"),
                        }
                        taken += 1;
                    }
                })
            })
            .collect();
        let taken: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        stop.store(true, Ordering::Relaxed);
        mover.join().expect("the mover");
        taken.into_iter().map(|taken| taken.expect("a worker")).sum::<usize>()
    });
    assert_eq!(taken, ELEMENTS);
    for n in 0..ELEMENTS {
        assert_eq!(client.cmd(&scene.line(&format!("GET %belement:{n}"))), bulk("1"), "element {n}");
    }
}

#[test]
fn a_script_that_depends_on_its_own_writes_gets_an_error_and_then_runs() {
    let Some(scene) = Scene::new() else { return };
    let mut client = scene.site.client();
    client.cmd(&scene.line("SET %bx found"));
    client.cmd(&scene.line("RPUSH %a other"));
    // The rehearsal reads the name that was there before: it does not simulate LSET.
    let script = "redis.call('LSET', KEYS[1], 0, ARGV[1]) return redis.call('GET', redis.call('LINDEX', KEYS[1], 0))";
    let mut call = || client.call(&["EVAL", script, "1", &scene.line("%a"), &scene.line("%bx")]);
    let first = call();
    assert!(first.expect_error().contains("touches the key"), "{first:?}");
    assert_eq!(call(), bulk("found"));
}
