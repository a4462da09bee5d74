//! Commands, transactions and scripts with keys of several slots at several nodes: the keys are brought to one node, and
//! the command is executed there as a whole. `colocate` has keys of one slot.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::movectl::{json, run_cli};
use crate::movectl_moves::{eventually, report};
use crate::support::slots::slot;
use crate::support::{
    Client, Node, NodeOptions, Random, Router, Site, SiteOptions, Value, bulk, encode, int, ok, simple, until,
};

/// Moves are slow on a busy machine.
const LONG_TIMEOUT: &str = "[moves]\ncolocate-timeout = \"60s\"\n";

/// Three nodes.
struct Scene {
    site: Site,
    /// A tag of keys on each node.
    tags: [String; 3],
}

impl Scene {
    fn with(config: &str) -> Option<Scene> {
        let site = Site::router_only(3, &SiteOptions::config(config))?;
        let tags = site.tags();
        Some(Scene { tags: std::array::from_fn(|node| tags[node][0].clone()), site })
    }

    /// Replaces `%a`, `%b` and `%c` by the beginnings of keys on the three nodes.
    fn line(&self, line: &str) -> String {
        let of = |line: String, (name, tag): (&str, &String)| line.replace(name, &format!("{{{tag}}}"));
        ["%a", "%b", "%c"].into_iter().zip(&self.tags).fold(line.to_owned(), of)
    }

    fn router(&self) -> &Router {
        self.site.router()
    }

    /// Number of moves that were started for commands.
    fn colocations(&self) -> usize {
        let report = report(self.router());
        let all = ["moves", "ended"].map(|list| report[list].as_array().cloned().unwrap_or_default()).concat();
        all.iter().filter(|m| m["home_for"].is_array()).count()
    }

    fn wait_until_at_rest(&self) {
        eventually("no move is in progress", || report(self.router())["moves"].as_array().is_some_and(Vec::is_empty));
    }
}

/// Number of keys on each node that live elsewhere than their slots.
fn overrides(router: &Router) -> Vec<u64> {
    let nodes = json(router, "nodes list");
    let of = |node: &serde_json::Value| node["overrides"].as_u64().expect("a number");
    nodes["nodes"].as_array().expect("nodes").iter().map(of).collect()
}

fn blocked(node: &Node) -> usize {
    let info = node.cmd("INFO clients").text();
    let number = info.lines().find_map(|line| line.strip_prefix("blocked_clients:")).expect("the field");
    number.trim().parse().expect("a number")
}

/// Commands in blocks, each with keys of its own.
const BLOCKS: &[&[&str]] = &[
    &["SET %a1 one", "RENAME %a1 %b1", "EXISTS %a1 %b1", "GET %b1", "RENAMENX %b1 %c1", "GET %c1"],
    &["SADD %a2 x y", "SMOVE %a2 %b2 x", "SMEMBERS %b2", "SMOVE %b2 %c2 none", "SCARD %c2"],
    &["RPUSH %a3 1 2 3", "LMOVE %a3 %c3 LEFT RIGHT", "RPOPLPUSH %a3 %b3", "LRANGE %a3 0 -1", "LRANGE %b3 0 -1"],
    &["MSETNX %a4 1 %b4 2 %c4 3", "MGET %a4 %b4 %c4", "MSETNX %a4 9 %b4x 9", "EXISTS %b4x"],
    &["SET %a5 v", "COPY %a5 %b5 DB 1", "EXISTS %b5", "SELECT 1", "GET %b5", "SELECT 0"],
    &["XADD %a6 1-1 f v", "XADD %c6 2-2 g w", "XREAD STREAMS %a6 %b6 %c6 0 0 0"],
    &[
        "XGROUP CREATE %a7 g 0 MKSTREAM",
        "XGROUP CREATE %b7 g 0 MKSTREAM",
        "XADD %b7 5-5 f v",
        "XREADGROUP GROUP g c STREAMS %a7 %b7 > >",
    ],
    &[
        "SET %a8 4",
        "EVAL \"redis.call('INCRBY', KEYS[2], redis.call('GET', KEYS[1])) return redis.call('SET', KEYS[3], 'x')\" 3 %a8 %b8 %c8",
        "MGET %a8 %b8 %c8",
        "EVAL \"local n = 0 for i = 1, #KEYS do n = n + redis.call('EXISTS', KEYS[i]) end return n\" 3 %a8 %b8 %c8",
        "EVALSHA ffffffffffffffffffffffffffffffffffffffff 2 %a8 %b8",
        "SCRIPT LOAD \"return redis.call('RENAME', KEYS[1], KEYS[2])\"",
        "EVALSHA 1d6a4810d6714286403620c0c8eab8643337b21b 2 %a8 %b8",
    ],
    &["MULTI", "SET %a9 1", "INCRBY %b9 5", "RENAME %a9 %c9", "MGET %a9 %b9 %c9", "EXEC", "GET %c9"],
    &["WATCH %a10 %b10", "WATCH %c10", "MULTI", "SET %a10 x", "EXEC", "GET %a10"],
    &["WATCH %a11 %b11", "SET %b11 mine", "MULTI", "SET %a11 x", "EXEC", "EXISTS %a11"],
    &["WATCH %a12", "MULTI", "SET %b12 1", "SET %c12 2", "EXEC", "MGET %b12 %c12"],
    &["MULTI", "SET %a13 1", "SET %b13", "SET %c13 1", "EXEC", "EXISTS %a13 %c13"],
    &["MULTI", "SET %a14 1", "LPUSH %a14 1", "SET %b14 2", "EXEC", "MGET %a14 %b14"],
    &["RPUSH %c15 x", "BLPOP %a15 %b15 %c15 5", "BLPOP %a15 %b15 0.01", "RPUSH %a15 y", "BLMOVE %a15 %b15 LEFT LEFT 5"],
    &["ZADD %b16 1 m", "BZPOPMIN %a16 %b16 5", "XADD %c16 1-1 f v", "XREAD BLOCK 10 STREAMS %a16 %c16 0 0"],
];

/// Commands that a client repeats.
type Step = Box<dyn FnMut(&mut Client, &mut Random) + Send>;

#[test]
fn commands_with_keys_of_several_nodes_behave_as_on_one_server() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let plain = Node::start(&NodeOptions::default());
    let (mut router, mut server) = (scene.site.client(), plain.client());
    for round in 0..2 {
        for line in BLOCKS.iter().flat_map(|block| block.iter()) {
            let line = scene.line(line);
            assert_eq!(router.cmd(&line), server.cmd(&line), "{line}, round {round}");
        }
        for database in ["SELECT 1", "SELECT 0"] {
            assert_eq!((router.cmd(database), server.cmd(database)), (ok(), ok()));
            assert_eq!(router.cmd("DBSIZE"), server.cmd("DBSIZE"));
        }
        scene.wait_until_at_rest();
        // The second time all keys are together already.
        let moves = scene.colocations();
        for line in BLOCKS.iter().flat_map(|block| block.iter()) {
            let line = scene.line(line);
            assert_eq!(router.cmd(&line), server.cmd(&line), "{line}, again");
        }
        assert_eq!(scene.colocations(), moves);
        let count: i64 = scene.site.nodes().iter().map(|node| node.cmd("DBSIZE").int()).sum();
        assert_eq!(int(count), server.cmd("DBSIZE"), "no key is at two nodes");
        assert_eq!((router.cmd("FLUSHALL"), server.cmd("FLUSHALL")), (ok(), ok()));
    }
}

#[test]
fn keys_stay_together_over_a_restart() {
    let Some(mut scene) = Scene::with(LONG_TIMEOUT) else { return };
    assert_eq!(scene.site.client().cmd(&scene.line("MSETNX %a 1 %b 2 %c 3")), int(1));
    scene.wait_until_at_rest();
    assert_eq!(overrides(scene.router()).iter().sum::<u64>(), 2);
    let nodes: Vec<SocketAddr> = scene.site.nodes().iter().map(Node::address).collect();
    scene.site.router_mut().restart(&nodes);
    let moves = scene.colocations();
    let mut client = scene.site.client();
    assert_eq!(client.cmd(&scene.line("RENAME %a %b")), ok());
    assert_eq!(client.cmd(&scene.line("MGET %a %b %c")).items(), [Value::Nil, bulk("1"), bulk("3")]);
    assert_eq!(scene.colocations(), moves);
}

/// Ids of the connections of movers at a node.
fn mover_connections(node: &Node) -> Vec<String> {
    let list = node.cmd("CLIENT LIST").text();
    let movers = list.lines().filter(|line| line.contains("-mover-"));
    movers.filter_map(|line| line.strip_prefix("id=")?.split(' ').next().map(str::to_owned)).collect()
}

#[test]
fn moves_for_commands_share_connections_while_these_are_open() {
    const COMMANDS: usize = 20;
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    let mut rename = |n: usize| {
        assert_eq!(client.cmd(&scene.line(&format!("MSET %a{n} {n} %b{n} x"))), ok());
        assert_eq!(client.cmd(&scene.line(&format!("RENAME %a{n} %b{n}"))), ok());
        scene.wait_until_at_rest();
        assert_eq!(client.cmd(&scene.line(&format!("GET %b{n}"))), bulk(n.to_string()));
    };
    let source = &scene.site.nodes()[1];
    let mut ids = BTreeSet::new();
    for n in 0..COMMANDS {
        rename(n);
        ids.extend(mover_connections(source));
    }
    assert!((1..COMMANDS).contains(&ids.len()), "connections of {COMMANDS} moves: {ids:?}");
    for n in COMMANDS..2 * COMMANDS {
        for node in scene.site.nodes() {
            for id in mover_connections(node) {
                // It may have closed by itself.
                node.cmd(&format!("CLIENT KILL ID {id}"));
            }
        }
        rename(n);
    }
    assert_eq!(scene.colocations(), 2 * COMMANDS);
    eventually("unused connections are closed", || scene.site.nodes().iter().all(|n| mover_connections(n).is_empty()));
}

#[test]
fn commands_that_cannot_bring_their_keys_together_move_none() {
    let config = format!("{LONG_TIMEOUT}[clients]\nusers-file = \"USERS\"\n");
    let users =
        crate::users::UsersFile::new("user default on nopass ~* &* +@all allscripts\nuser app on nopass ~ok:* +@all\n");
    let Some(scene) = Scene::with(&config.replace("USERS", &users.path.display().to_string())) else { return };
    let mut client = scene.site.client();
    // Rights come first.
    let mut app = scene.site.client();
    assert_eq!(app.cmd("AUTH app x"), ok());
    let is_refused = |app: &mut Client, line: &str| {
        let reply = app.cmd(&scene.line(line));
        assert!(reply.error().is_some_and(|text| text.starts_with("NOPERM")), "{line}: {reply:?}");
    };
    is_refused(&mut app, "RENAME ok:1 %b");
    is_refused(&mut app, "WATCH ok:1 %b");
    app.cmd("MULTI");
    app.cmd("SET ok:1 1");
    is_refused(&mut app, "SET %b 1");
    assert!(app.cmd("EXEC").expect_error().starts_with("EXECABORT"));
    // Too many keys.
    let many: Vec<String> = (0..1025).flat_map(|n| [format!("k{n}"), "v".to_owned()]).collect();
    let mut command = vec!["MSETNX".to_owned()];
    command.extend(many);
    let reply = client.call(&command);
    let text = reply.expect_error();
    assert!(text.starts_with("CROSSSLOT") && text.contains("1025 keys") && text.contains("at most 1024"), "{text}");
    // Commands that may use any key of these slots.
    client.cmd("MULTI");
    for line in ["SORT %al GET %aw*", "SORT %bl GET %bw*"] {
        assert_eq!(client.cmd(&scene.line(line)), simple("QUEUED"));
    }
    let reply = client.cmd("EXEC");
    let text = reply.expect_error();
    assert!(text.starts_with("EXECABORT") && text.contains("several owners"), "{text}");
    assert_eq!((scene.colocations(), client.cmd("DBSIZE")), (0, int(0)));
    // A script may if one node has all of both slots.
    let tags = scene.site.tags();
    let [one, other] = [&tags[0][0], &tags[0][1]];
    client.cmd(&format!("SET {{{one}}}ax hidden"));
    let script = format!("EVAL \"return redis.call('GET', KEYS[1]..ARGV[1])\" 2 {{{one}}}a {{{other}}}b x");
    assert_eq!(client.cmd(&script), bulk("hidden"));
    assert_eq!(scene.colocations(), 0);
}

#[test]
fn clients_learn_why_keys_of_several_slots_stay_apart() {
    let Some(mut scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd(&scene.line("MSET %a 1 %b 2"));
    let address = scene.site.nodes()[1].address();
    scene.site.node_mut(1).kill();
    let rename = scene.line("RENAME %a %b");
    let text = eventually("the router knows that the node cannot be used", || {
        let answer = scene.site.client().cmd(&rename);
        answer.error().filter(|text| text.contains("cannot be used")).map(str::to_owned)
    });
    assert!(text.starts_with("CROSSSLOT") && text.contains(&format!("{address} cannot be used")), "{text}");
    // Keys at the other nodes come together all the same.
    let line = scene.line("RENAME %a %c");
    assert_eq!((scene.site.client().cmd(&line), scene.site.client().cmd(&scene.line("GET %c"))), (ok(), bulk("1")));
    scene.wait_until_at_rest();
    let report = json(scene.router(), "colocation");
    assert_eq!((report["brought"].as_u64(), report["groups"][0]["keys"].as_u64()), (Some(1), Some(2)), "{report}");
    assert_eq!(report["keys"][0]["key"].as_str(), Some(&*scene.line("%c")), "{report}");
    assert_eq!(report["moves"][0]["home_for"][0]["command"].as_str(), Some("RENAME"), "{report}");
    let refusal = &report["refusals"][0];
    assert_eq!((refusal["command"].as_str(), refusal["keys"].as_u64()), (Some("RENAME"), Some(2)), "{report}");
    assert!(refusal["reason"].as_str().is_some_and(|why| why.contains("cannot be used")), "{report}");
    let (status, text) = crate::support::http::get(scene.router().admin(), "/api/v1/colocation");
    assert!(status == 200 && !text.contains(&scene.line("%c")), "names without the token: {text}");
}

/// A client waits for keys of several nodes, and commands of other clients take these keys along.
#[test]
fn a_blocked_client_follows_its_keys() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    let (mut waits, mut later, mut alone) = (scene.site.client(), scene.site.client(), scene.site.client());
    let all_blocked = || scene.site.nodes().iter().map(blocked).sum::<usize>();
    waits.post(&scene.line("BLPOP %a1 %b1 0"));
    until("it waits", || all_blocked() == 1);
    later.post(&scene.line("BLPOP %b1 %c1 0"));
    until("both wait", || all_blocked() == 2);
    alone.post(&scene.line("BLPOP %b1 0"));
    until("all wait", || all_blocked() == 3);
    // A key of each is needed with others, at another node.
    for line in
        ["EVAL \"return redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3])\" 3 %c1 %c2 %a2", "MSETNX %a1x 1 %b2 1 %c2x 1"]
    {
        assert!(client.cmd(&scene.line(line)).error().is_none(), "{line}");
    }
    let [low, high] = [0, 2].map(|node| scene.site.nodes()[node].address());
    for key in ["%a1", "%b1"] {
        // It comes back, or the others follow, because the waiting clients need it with them.
        eventually("the key moves away", || {
            let at = json(scene.router(), &scene.line(&format!("where {key}")));
            let from = at["keys"][0]["node"].as_str().expect("a node").to_owned();
            let to = if from == low.to_string() { high } else { low };
            let line = scene.line(&format!("move --from {from} --to {to} --keys {key} --wait --goal fast"));
            run_cli(scene.router(), &line).code == 0
        });
    }
    scene.wait_until_at_rest();
    until("all wait again", || all_blocked() == 3);
    // In the order of their arrival.
    assert_eq!(client.cmd(&scene.line("RPUSH %b1 first second third")), int(3));
    for (client, element) in [(&mut waits, "first"), (&mut later, "second"), (&mut alone, "third")] {
        assert_eq!(client.reply(), Value::Array(vec![bulk(scene.line("%b1")), bulk(element)]));
    }
}

const ACCOUNTS: usize = 64;
const START: i64 = 1000;

fn account(n: usize) -> String {
    format!("account:{n}")
}

fn all_accounts() -> String {
    (0..ACCOUNTS).map(account).collect::<Vec<_>>().join(" ")
}

/// Two different accounts, and an amount.
fn transfer(random: &mut Random) -> (String, String, usize) {
    let from = random.below(ACCOUNTS);
    let to = (from + 1 + random.below(ACCOUNTS - 1)) % ACCOUNTS;
    (account(from), account(to), 1 + random.below(9))
}

/// Transfers between random accounts of three nodes, by transactions, scripts and watches, while slots and single keys
/// move: every moment has the same sum, and so does the end.
#[test]
fn the_sum_of_all_accounts_stays_constant_while_slots_move() {
    const ROUNDS: usize = 10;
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let address = scene.router().address();
    let mut client = scene.site.client();
    for n in 0..ACCOUNTS {
        assert_eq!(client.cmd(&format!("SET {} {START}", account(n))), ok());
    }
    let multi = |client: &mut Client, lines: &[String]| {
        let bytes: Vec<u8> = std::iter::once("MULTI".to_owned())
            .chain(lines.iter().cloned())
            .chain(["EXEC".to_owned()])
            .flat_map(|line| encode(&crate::support::words(&line)))
            .collect();
        client.write(&bytes);
        assert_eq!(client.reply(), ok());
        lines.iter().for_each(|line| assert_eq!(client.reply(), simple("QUEUED"), "{line}"));
        client.reply()
    };
    let (stop, turns, aborted) = (AtomicBool::new(false), AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
    std::thread::scope(|scope| {
        let repeat = |seed: u64, mut step: Step| {
            let (stop, turns) = (&stop, &turns);
            scope.spawn(move || {
                let (mut client, mut random) = (Client::connect(address), Random::new(seed));
                while !stop.load(Ordering::Relaxed) {
                    step(&mut client, &mut random);
                    turns.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let mut clients = Vec::new();
        for seed in 0..3 {
            clients.push(repeat(
                seed,
                Box::new(move |client, random| {
                    let (from, to, amount) = transfer(random);
                    let reply = multi(client, &[format!("DECRBY {from} {amount}"), format!("INCRBY {to} {amount}")]);
                    assert_eq!(reply.items().iter().filter(|value| value.error().is_none()).count(), 2, "{reply:?}");
                }),
            ));
        }
        clients.push(repeat(
            7,
            Box::new(|client, random| {
                let (from, to, amount) = transfer(random);
                let script = "redis.call('DECRBY', KEYS[1], ARGV[1]) return redis.call('INCRBY', KEYS[2], ARGV[1])";
                let reply = client.call(&["EVAL", script, "2", &from, &to, &amount.to_string()]);
                assert!(reply.error().is_none(), "{reply:?}");
            }),
        ));
        let aborted = Arc::clone(&aborted);
        clients.push(repeat(
            8,
            Box::new(move |client, random| {
                let (from, to, amount) = transfer(random);
                assert_eq!(client.cmd(&format!("WATCH {from} {to}")), ok());
                let both = client.cmd(&format!("MGET {from} {to}"));
                let has: Vec<i64> = both.items().iter().map(|value| value.text().parse().expect("a number")).collect();
                let amount = amount as i64;
                let sets = [format!("SET {from} {}", has[0] - amount), format!("SET {to} {}", has[1] + amount)];
                match multi(client, &sets) {
                    Value::Nil => {
                        aborted.fetch_add(1, Ordering::Relaxed);
                    }
                    reply => assert_eq!(reply.items(), [ok(), ok()]),
                }
            }),
        ));
        let sum = |values: &[Value]| -> i64 {
            values.iter().map(|value| value.text().parse::<i64>().expect("a number")).sum()
        };
        clients.push(repeat(
            9,
            Box::new(move |client, _| {
                let gets: Vec<String> = (0..ACCOUNTS).map(|n| format!("GET {}", account(n))).collect();
                let reply = multi(client, &gets);
                assert_eq!(sum(reply.items()), START * ACCOUNTS as i64, "{reply:?}");
            }),
        ));
        clients.push(repeat(
            10,
            Box::new(|client, _| {
                let script = "local s = 0 for i = 1, #KEYS do s = s + redis.call('GET', KEYS[i]) end return s";
                let keys = all_accounts();
                let args = ["EVAL", script, &ACCOUNTS.to_string()].map(str::to_owned);
                let args: Vec<String> = args.into_iter().chain(keys.split(' ').map(str::to_owned)).collect();
                assert_eq!(client.call(&args), int(START * ACCOUNTS as i64));
                std::thread::sleep(Duration::from_millis(5));
            }),
        ));
        let names: Vec<String> = scene.site.nodes().iter().map(|node| node.address().to_string()).collect();
        let mut random = Random::new(20);
        let mut tried = 0;
        let mut rounds = 0;
        while rounds < ROUNDS {
            let key = account(random.below(ACCOUNTS));
            let to = &names[random.below(3)];
            let line = match rounds % 2 {
                0 => format!("move --to {to} --slots {} --wait --goal fast", slot(key.as_bytes())),
                _ => format!("move --to {to} --keys {key} --wait --goal fast"),
            };
            // Refused while the slot takes part in another move, and if the node has it already.
            rounds += usize::from(run_cli(scene.router(), &line).code == 0);
            tried += 1;
            assert!(tried < 2000, "only {rounds} of {tried} moves were started");
            let from = turns.load(Ordering::Relaxed);
            until("clients have gone on", || {
                clients.iter().any(|c| c.is_finished()) || turns.load(Ordering::Relaxed) > from + 20
            });
            assert!(!clients.iter().any(|client| client.is_finished()), "a client has stopped");
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().for_each(|client| client.join().expect("a client saw nothing wrong"));
    });
    scene.wait_until_at_rest();
    let values = client.cmd(&format!("MGET {}", all_accounts()));
    assert_eq!(
        values.items().iter().map(|value| value.text().parse::<i64>().expect("a number")).sum::<i64>(),
        START * ACCOUNTS as i64
    );
    let mut found = BTreeSet::new();
    for node in scene.site.nodes() {
        node.cmd("KEYS *").items().iter().for_each(|key| assert!(found.insert(key.text()), "{key:?} is at two nodes"));
    }
    assert_eq!(found.len(), ACCOUNTS);
    eprintln!(
        "{} turns, {} aborted, {} moves",
        turns.load(Ordering::Relaxed),
        aborted.load(Ordering::Relaxed),
        scene.colocations()
    );
}

/// Clients use keys together while a node is drained: its keys leave, also those of other nodes' slots.
#[test]
fn a_drained_node_keeps_no_keys_of_other_slots() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let address = scene.router().address();
    let mut client = scene.site.client();
    for n in 0..30 {
        assert_eq!(client.cmd(&scene.line(&format!("MSETNX %a{n} {n} %b{n} {n} %c{n} {n}"))), int(1));
    }
    scene.wait_until_at_rest();
    let most = overrides(scene.router()).iter().copied().enumerate().max_by_key(|(_, count)| *count).expect("nodes");
    assert!(most.1 > 0);
    let nodes = json(scene.router(), "nodes list");
    let drained = nodes["nodes"][most.0]["address"].as_str().expect("an address").to_owned();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let uses = scope.spawn(|| {
            let (mut client, mut random) = (Client::connect(address), Random::new(5));
            while !stop.load(Ordering::Relaxed) {
                let n = random.below(30);
                let line = scene.line(&format!(
                    "EVAL \"return redis.call('MGET', KEYS[1], KEYS[2], KEYS[3])\" 3 %a{n} %b{n} %c{n}"
                ));
                assert_eq!(client.cmd(&line).items(), [bulk(n.to_string()), bulk(n.to_string()), bulk(n.to_string())]);
            }
        });
        // Keys that commands have brought there in the meantime leave with the next attempt.
        eventually("the node is empty", || {
            run_cli(scene.router(), &format!("nodes drain {drained} --wait"));
            run_cli(scene.router(), &format!("nodes remove {drained}")).code == 0
        });
        stop.store(true, Ordering::Relaxed);
        uses.join().expect("no command failed");
    });
    assert_eq!(json(scene.router(), "nodes list")["nodes"].as_array().map(Vec::len), Some(2));
    assert_eq!(client.cmd("DBSIZE"), int(90));
}

/// Keys are on their way to a node when an operator drains it.
#[test]
fn a_drain_includes_keys_that_a_command_brings_to_the_node() {
    const KEYS: usize = 200;
    let Some(scene) = Scene::with("[moves]\ncolocate-timeout = \"60s\"\nmax-rate = \"50kb\"\n") else { return };
    let mut client = scene.site.client();
    let names: Vec<String> = (0..KEYS).map(|n| scene.line(&format!("%b{n}"))).collect();
    for name in &names {
        assert_eq!(client.call(&["SET", name, &"x".repeat(1000)]), ok());
    }
    for line in ["WATCH %a", "MULTI"] {
        assert_eq!(client.cmd(&scene.line(line)), ok());
    }
    assert_eq!(client.cmd(&format!("EXISTS {}", names.join(" "))), simple("QUEUED"));
    client.post("EXEC");
    let to = eventually("keys come to the watched key", || {
        let report = report(scene.router());
        let brings = |m: &&serde_json::Value| m["home_for"].is_array() && m["keys_moved"].as_u64() > Some(0);
        let all = ["moves", "ended"].map(|list| report[list].as_array().cloned().unwrap_or_default()).concat();
        all.iter().find(brings).map(|m| m["to"].as_str().expect("a node").to_owned())
    });
    assert_eq!(to, scene.site.nodes()[0].address().to_string());
    // On a busy machine, the move may take longer than the drain waits for it.
    eventually("the node is drained", || {
        run_cli(scene.router(), &format!("nodes drain {to} --wait --goal fast --max-rate 1gb")).code == 0
    });
    assert_eq!(overrides(scene.router()), [0; 3]);
    assert_eq!(run_cli(scene.router(), &format!("nodes remove {to}")).code, 0);
    // The drain may have moved the watched key before EXEC was sent.
    let reply = client.reply();
    assert!(reply == Value::Nil || reply.items() == [int(KEYS as i64)], "{reply:?}");
    assert_eq!(scene.site.client().cmd("DBSIZE"), int(KEYS as i64));
}
