//! Ways out of every move: a node lost for good during the move, an abort, drained nodes. Also readiness, status and
//! metrics in the meantime.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal};
use serde_json::Value as Json;
use switchyard_policy::topology::crc16_slot;

use crate::movectl::{done, json, refused};
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::support::process::{Process, tied};
use crate::support::{Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, encode, http, ok};

/// Keys of one slot. With [`SLOWLY`], their leg takes minutes.
const KEYS: usize = 3_000;
const SLOWLY: &str = "--goal gentle --max-rate 20kb";

/// A slot full of keys on the first node, which moves to the second.
struct Scene {
    site: Site,
    tag: String,
    /// A key on the lost node that does not take part in the move.
    elsewhere: String,
}

fn value(number: usize) -> String {
    format!("{number} {}", "x".repeat(100))
}

impl Scene {
    fn start() -> Option<Scene> {
        let node = NodeOptions::args(&["--appendonly", "yes", "--appendfsync", "always"]);
        let args = ["moves.big-key=0", "nodes.command-timeout=2s", "nodes.connect-timeout=1s", "shutdown-timeout=40s"];
        let args = args.into_iter().flat_map(|set| ["--set".to_owned(), set.to_owned()]).collect();
        let router = RouterOptions { args, nodes_may_be_down: true, ..RouterOptions::default() };
        let site = Site::router_only(2, &SiteOptions { node, router })?;
        let tags = site.tags();
        let scene = Scene { tag: tags[0][0].clone(), elsewhere: format!("{{{}}}elsewhere", tags[1][0]), site };
        let mut client = scene.site.client();
        let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &scene.key(n), &value(n)])).collect();
        for reply in client.pipeline(&bytes, KEYS) {
            assert_eq!(reply, b"+OK\r\n");
        }
        assert_eq!(client.cmd(&format!("SET {} 1", scene.elsewhere)), ok());
        Some(scene)
    }

    fn key(&self, number: usize) -> String {
        format!("{{{}}}key:{number}", self.tag)
    }

    fn name(&self, node: usize) -> String {
        self.site.nodes()[node].address().to_string()
    }

    fn begin(&self, options: &str) {
        let slot = crc16_slot(self.key(0).as_bytes()).number();
        done(
            self.site.router(),
            &format!("move --from {} --to {} --slots {slot} {options}", self.name(0), self.name(1)),
        );
        eventually("keys move", || the_move(self.site.router(), 1)["keys_moved"].as_u64().filter(|keys| *keys > 30));
    }

    /// Numbers of the keys on a node.
    fn at(&self, node: usize) -> Vec<usize> {
        let keys = self.site.nodes()[node].cmd("KEYS *key:*");
        let mut numbers: Vec<usize> = keys
            .items()
            .iter()
            .filter_map(|key| key.text().rsplit(':').next().and_then(|number| number.parse().ok()))
            .collect();
        numbers.sort_unstable();
        numbers
    }

    fn nodes_by_address(&self) -> Vec<std::net::SocketAddr> {
        self.site.nodes().iter().map(crate::support::Node::address).collect()
    }

    fn restart_router(&mut self) {
        let nodes = self.nodes_by_address();
        self.site.router_mut().process_mut().kill();
        self.site.router_mut().start_again(&nodes);
    }

    fn status(&self) -> String {
        done(self.site.router(), "status")
    }

    #[track_caller]
    fn all_there(&self, numbers: impl IntoIterator<Item = usize>) {
        let mut client = self.site.client();
        for number in numbers {
            assert_eq!(client.cmd(&format!("GET {}", self.key(number))), bulk(value(number)), "key {number}");
        }
    }
}

fn is_down(client: &mut Client, key: &str) -> bool {
    client.cmd(&format!("GET {key}")).error().is_some_and(|error| error.starts_with("NODEDOWN"))
}

#[test]
fn a_move_ends_without_its_lost_target() {
    let Some(mut scene) = Scene::start() else { return };
    let admin = scene.site.router().admin();
    scene.begin(SLOWLY);
    let text = refused(scene.site.router(), "moves abort 1 --abandon-target");
    assert!(text.contains("answers, so nothing has to be lost"), "{text}");
    let text = refused(scene.site.router(), &format!("nodes remove {}", scene.name(1)));
    assert!(text.contains("switchyard moves abort 1`"), "the number of the move: {text}");

    scene.site.node_mut(1).kill();
    let target = scene.name(1);
    eventually("the status shows that the move waits", || scene.status().contains("--abandon-target"));
    let status = scene.status();
    assert!(
        status.contains("READY IN PART") && status.contains("keys of 1 slot in transit cannot be used"),
        "{status}"
    );
    let (code, body) = http::get(admin, "/readyz");
    assert!(code == 200 && body.contains(&target) && body.contains("move 1 has not reached"), "{body}");
    let metrics = scene.site.router().metrics();
    assert!(
        metrics.contains("switchyard_moves_lost_slots 1\n") && metrics.contains("switchyard_moves_in_trouble 1\n"),
        "{metrics}"
    );
    let left = scene.at(0);
    let moved: Vec<usize> = (0..KEYS).filter(|number| left.binary_search(number).is_err()).collect();
    assert!(moved.len() > 30 && !left.is_empty());
    let mut client = scene.site.client();
    eventually("keys that have not moved are served", || {
        client.cmd(&format!("GET {}", scene.key(left[0]))) == bulk(value(left[0]))
    });
    assert!(is_down(&mut client, &scene.key(moved[0])), "it may be there");

    // Reports the keys that would be lost, without any change.
    let said = done(scene.site.router(), "moves abort 1 --abandon-target --dry-run");
    assert!(said.contains("nothing was changed") && said.contains("At most") && said.contains("are lost"), "{said}");
    assert!(is_down(&mut client, &scene.key(moved[0])));
    let said = done(scene.site.router(), "moves abort 1");
    assert!(said.contains("stops when") && said.contains("--abandon-target"), "{said}");
    let aborting = wait_for(scene.site.router(), 1, "aborting");
    assert!(aborting["activity"].as_str().is_some_and(|activity| activity.starts_with("aborting: ")), "{aborting}");
    // It does not continue after a restart either, and accepts the abort then.
    scene.restart_router();
    wait_for(scene.site.router(), 1, "aborting");
    eventually("the target is known to be away", || scene.status().contains(&format!("{target} is down")));
    eventually("the leg is taken up", || scene.status().contains("--abandon-target"));
    let said = done(scene.site.router(), "moves abort 1 --abandon-target");
    assert!(said.contains("ends without"), "{said}");
    let ended = wait_for(scene.site.router(), 1, "stopped");
    let lost = ended["keys_lost"].as_u64().expect("a number");
    assert!(lost >= moved.len() as u64 && lost <= moved.len() as u64 + 200, "{} have moved: {ended}", moved.len());
    assert!(ended["activity"].as_str().is_some_and(|why| why.contains("was abandoned")), "{ended}");
    let log = scene.site.router().process().expect_log(&["Fingerprints are in"]);
    assert!(!log.contains("key:"), "no key is named: {log}");

    // Every key is served again: lost keys are gone, and can be written again.
    scene.all_there(left.iter().copied());
    let mut client = scene.site.client();
    for number in &moved {
        assert_eq!(client.cmd(&format!("GET {}", scene.key(*number))), Value::Nil, "key {number}");
    }
    assert_eq!(client.cmd(&format!("SET {} {}", scene.key(moved[0]), "anew")), ok());
    assert!(is_down(&mut client, &scene.elsewhere), "what the node owns waits for it");
    // Neither a restart of the router nor the return of the node restores them.
    scene.restart_router();
    scene.site.node_mut(1).restart();
    eventually("the node is back", || scene.site.client().cmd(&format!("GET {}", scene.elsewhere)) == bulk("1"));
    assert_eq!(scene.site.client().cmd(&format!("GET {}", scene.key(moved[0]))), bulk("anew"));
    assert_eq!(scene.site.client().cmd(&format!("GET {}", scene.key(moved[1]))), Value::Nil);
    // The node's keys belong to this fleet, and no other node has them: they are removed by the next move if the
    // operator allows it.
    let slot = crc16_slot(scene.key(0).as_bytes()).number();
    let line = format!("move --from {} --to {} --slots {slot} --goal fast --wait", scene.name(0), scene.name(1));
    let text = refused(scene.site.router(), &line);
    assert!(text.contains("an abandoned node has kept them"), "{text}");
    done(scene.site.router(), &format!("{line} --purge-target"));
    scene.all_there(left);
    assert_eq!(scene.site.client().cmd(&format!("GET {}", scene.key(moved[0]))), bulk("anew"));
    assert_eq!(scene.site.client().cmd(&format!("GET {}", scene.key(moved[1]))), Value::Nil);
}

/// No client uses or sees these copies.
#[test]
fn copies_on_a_returning_target_are_removed() {
    let Some(mut scene) = Scene::start() else { return };
    scene.begin(&format!("--protocol source {SLOWLY}"));
    scene.site.node_mut(1).kill();
    done(scene.site.router(), "moves abort 1");
    wait_for(scene.site.router(), 1, "stopped");
    scene.all_there(0..KEYS);
    // Also by a router that was restarted, and for keys deleted by clients.
    scene.restart_router();
    assert_eq!(scene.site.client().cmd(&format!("DEL {}", scene.key(0))), Value::Int(1));
    scene.site.node_mut(1).restart();
    assert!(scene.at(1).len() > 30, "it has kept its copies");
    eventually("they are gone", || scene.at(1).is_empty());
    let mut client = scene.site.client();
    eventually("all nodes are used", || client.cmd("DBSIZE") == Value::Int(KEYS as i64));
    assert_eq!(client.cmd("KEYS *").items().len(), KEYS);
    assert_eq!(client.cmd(&format!("GET {}", scene.elsewhere)), bulk("1"));
    scene.all_there(1..KEYS);
}

/// A node that serves clients, but refuses a command of the move.
#[test]
fn a_move_blocked_by_a_live_node_reports_why_and_ends() {
    for granted in [true, false] {
        let Some(scene) = Scene::start() else { return };
        let mut boss = scene.site.nodes()[1].client();
        assert_eq!(boss.cmd("ACL SETUSER boss on nopass ~* &* +@all"), ok());
        assert_eq!(boss.cmd("AUTH boss x"), ok());
        assert_eq!(boss.cmd("ACL SETUSER default -client|kill"), ok());
        let text = refused(scene.site.router(), &format!("move --from {} --to {} --all", scene.name(0), scene.name(1)));
        assert!(
            text.contains("refuses CLIENT KILL, which moves need") && text.contains("let Switchyard's user"),
            "{text}"
        );
        assert_eq!(boss.cmd("ACL SETUSER default +client|kill"), ok());

        scene.begin(SLOWLY);
        assert_eq!(boss.cmd("ACL SETUSER default -client|kill"), ok());
        let list = boss.cmd("CLIENT LIST").text();
        let mover = list.lines().find(|line| line.contains("-mover-1 ")).expect("its connection");
        let number = mover.strip_prefix("id=").and_then(|rest| rest.split(' ').next()).expect("a number");
        assert_eq!(boss.cmd(&format!("CLIENT KILL ID {number}")), Value::Int(1));
        eventually("the status names the refused command", || scene.status().contains("it refuses CLIENT KILL ID"));
        let said = done(scene.site.router(), "moves abort 1 --dry-run");
        assert!(
            said.contains("when it reaches")
                && said.contains("refuses CLIENT KILL")
                && said.contains("--abandon-target"),
            "{said}"
        );
        if granted {
            assert_eq!(boss.cmd("ACL SETUSER default +client|kill"), ok());
            // In the meantime the leg has begun its rollback.
            wait_for(scene.site.router(), 1, "stopped");
            scene.all_there(0..KEYS);
            continue;
        }
        let left = scene.at(0);
        let said = done(scene.site.router(), "moves abort 1 --abandon-target");
        assert!(said.contains("ends without"), "{said}");
        wait_for(scene.site.router(), 1, "stopped");
        scene.all_there(left.iter().copied());
        let lost = (0..KEYS).find(|number| left.binary_search(number).is_err()).expect("one has moved");
        assert_eq!(scene.site.client().cmd(&format!("GET {}", scene.key(lost))), Value::Nil);
    }
}

/// Both nodes serve clients, but refuse a command of the move: neither is abandoned, because the other could not
/// replace it.
#[test]
fn nothing_is_abandoned_if_neither_node_can_be_used() {
    let Some(scene) = Scene::start() else { return };
    let mut bosses: Vec<Client> = scene.site.nodes().iter().map(Node::client).collect();
    for boss in &mut bosses {
        assert_eq!(boss.cmd("ACL SETUSER boss on nopass ~* &* +@all"), ok());
        assert_eq!(boss.cmd("AUTH boss x"), ok());
        // After AUTH a client may use keys, so no move would begin.
        boss.cmd("INFO server").text();
    }
    scene.begin(SLOWLY);
    for boss in &mut bosses {
        let list = boss.cmd("CLIENT LIST").text();
        let mover = list.lines().find(|line| line.contains("-mover-1 ")).expect("its connection");
        let number = mover.strip_prefix("id=").and_then(|rest| rest.split(' ').next()).expect("a number").to_owned();
        for line in
            ["MULTI".to_owned(), format!("CLIENT KILL ID {number}"), "ACL SETUSER default -client|kill".to_owned()]
        {
            boss.cmd(&line);
        }
        assert_eq!(boss.cmd("EXEC").items(), [Value::Int(1), ok()]);
    }
    eventually("the status shows that the move waits", || scene.status().contains("abort 1 --abandon-"));
    for side in ["source", "target"] {
        let text = refused(scene.site.router(), &format!("moves abort 1 --abandon-{side}"));
        assert!(text.contains("does not reply either") || text.contains("so nothing has to be lost"), "{text}");
    }
    for boss in &mut bosses {
        assert_eq!(boss.cmd("ACL SETUSER default +client|kill"), ok());
    }
    done(scene.site.router(), "moves abort 1");
    wait_for(scene.site.router(), 1, "stopped");
    scene.all_there(0..KEYS);
}

#[test]
fn a_move_ends_without_its_lost_source() {
    for restarts in [false, true] {
        let Some(mut scene) = Scene::start() else { return };
        scene.begin(SLOWLY);
        scene.site.node_mut(0).kill();
        let moved = scene.at(1);
        assert!(moved.len() > 30 && moved.len() < KEYS);
        eventually("the status shows that the move waits", || scene.status().contains("--abandon-source"));
        if restarts {
            scene.restart_router();
            eventually("the source is known to be away", || {
                scene.status().contains(&format!("{} is down", scene.name(0)))
            });
        }
        let said = done(scene.site.router(), "moves abort 1 --abandon-source");
        // Listed keys that have not moved.
        let lost = said.split("lost, ").nth(1).and_then(|text| text.split(' ').next()?.parse::<usize>().ok());
        assert!(said.contains("ends without") && lost.is_some_and(|lost| lost <= KEYS - moved.len()), "{said}");
        let ended = wait_for(scene.site.router(), 1, "stopped");
        assert!(ended["activity"].as_str().is_some_and(|why| why.contains("was abandoned")), "{ended}");
        let there = scene.at(1);
        scene.all_there(there.iter().copied());
        assert!(moved.iter().all(|number| there.contains(number)), "nothing that had moved is lost");
        let lost = (0..KEYS).find(|number| !there.contains(number)).expect("most");
        let mut client = scene.site.client();
        assert_eq!(client.cmd(&format!("SET {} anew", scene.key(lost))), ok());
        // The old server returns with its data, but is not used for these keys.
        scene.site.node_mut(0).restart();
        eventually("the node is back", || scene.status().contains("ready: every slot"));
        assert_eq!(client.cmd(&format!("GET {}", scene.key(lost))), bulk("anew"));
        scene.all_there(there);
    }
}

#[test]
fn an_aborted_slow_move_ends_at_once() {
    let Some(scene) = Scene::start() else { return };
    scene.begin(SLOWLY);
    // At this rate the rollback would take hours.
    done(scene.site.router(), "moves max-rate 1 1b");
    let said = done(scene.site.router(), "moves abort 1");
    assert!(said.contains("Nothing is lost"), "{said}");
    wait_for(scene.site.router(), 1, "stopped");
    scene.all_there([0, 1, KEYS - 1]);
    assert_eq!(scene.at(0).len(), KEYS, "all came back");
    let refused = refused(scene.site.router(), "moves resume 1");
    assert!(refused.contains("move 1 has ended"), "{refused}");
}

#[test]
fn undraining_a_node_reports_that_its_move_continues() {
    let Some(scene) = Scene::start() else { return };
    done(scene.site.router(), &format!("nodes drain {} {SLOWLY}", scene.name(0)));
    let said = done(scene.site.router(), &format!("nodes undrain {}", scene.name(0)));
    assert!(
        said.contains("may get slots again")
            && said.contains("move 1 continues and empties it; `switchyard moves abort 1`"),
        "{said}"
    );
    done(scene.site.router(), "moves abort 1");
    wait_for(scene.site.router(), 1, "stopped");
}

#[test]
fn a_stopping_router_ends_a_slow_leg_and_counts_survive() {
    let Some(mut scene) = Scene::start() else { return };
    let [first, second] = [0, 1].map(|node| scene.name(node));
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &format!("spread:{n}"), &value(n)])).collect();
    assert!(scene.site.client().pipeline(&bytes, KEYS).iter().all(|reply| reply == b"+OK\r\n"));
    let keys = scene.site.nodes()[0].cmd("DBSIZE").int() as u64;
    done(scene.site.router(), &format!("move --from {first} --to {second} --all --goal gentle --max-rate 40kb"));
    // Keys of finished legs.
    eventually("keys move", || {
        let moved = the_move(scene.site.router(), 1);
        moved["slots_done"].as_u64() > Some(500) && moved["keys_moved"].as_u64() > Some(300)
    });
    // At this rate no leg would finish.
    done(scene.site.router(), "moves max-rate 1 1b");
    let nodes = scene.nodes_by_address();
    let mut watch = tied(env!("CARGO_BIN_EXE_switchyard"));
    watch.args(["moves", "watch", "--admin", &scene.site.router().admin().to_string()]);
    let log = tempfile::NamedTempFile::new().expect("a file");
    let mut watch = Process::start("moves watch", watch, log.path());
    watch.expect_log(&["move 1"]);
    scene.site.router().process().signal(Signal::TERM);
    assert!(scene.site.router_mut().process_mut().wait(Duration::from_secs(60)).success());
    let log = scene.site.router().process().log();
    assert!(!log.contains("moves are still in progress"), "no leg is left open: {log}");
    watch.expect_log(&["s for the router"]);
    scene.site.router_mut().start_again(&nodes);
    let resumed = the_move(scene.site.router(), 1);
    assert!(resumed["keys_moved"].as_u64() > Some(0) && resumed["bytes_moved"].as_u64() > Some(0), "{resumed}");
    done(scene.site.router(), "moves max-rate 1 none");
    done(scene.site.router(), "moves goal 1 fast");
    let ended = wait_for(scene.site.router(), 1, "done");
    assert!(ended["keys_moved"].as_u64() >= Some(keys), "including earlier keys, of {keys}: {ended}");
    assert_eq!(ended["percent"], Json::from(100.0));
    // A client that watches all the time sees the end.
    assert!(watch.wait(Duration::from_secs(60)).success(), "{}", watch.log());
    assert!(watch.log().contains("move 1 is done"), "{}", watch.log());
    scene.all_there([0, KEYS - 1]);
}

#[test]
fn drained_nodes_get_no_slots_until_undrained() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let slots = |site: &Site, node: usize| {
        let report = json(site.router(), "nodes list");
        let nodes = report["nodes"].as_array().expect("nodes");
        nodes.iter().find(|n| n["address"] == names[node]).map(|n| n["slots"].as_u64().expect("slots")).expect("a node")
    };
    done(site.router(), &format!("nodes drain {} --goal fast --wait", names[2]));
    let nodes: Vec<_> = site.nodes().iter().map(crate::support::Node::address).collect();
    site.router_mut().process_mut().kill();
    site.router_mut().start_again(&nodes);
    done(site.router(), &format!("nodes drain {} --goal fast --wait", names[1]));
    assert_eq!([0, 1, 2].map(|node| slots(&site, node)), [16_384, 0, 0], "not back to the one that was drained before");
    let text = done(site.router(), "nodes list");
    assert_eq!(text.matches("it gets no slots before").count(), 2, "{text}");
    for what in ["--slots 0-10", "--keys key", "--slots 0-10 --dry-run"] {
        let text = refused(site.router(), &format!("move --to {} {what}", names[1]));
        assert!(text.contains("is drained") && text.contains(&format!("nodes undrain {}", names[1])), "{text}");
    }
    let text = refused(site.router(), &format!("nodes drain {}", names[0]));
    assert!(text.contains("undrain"), "{text}");
    done(site.router(), "balance --goal fast --wait");
    assert_eq!(slots(&site, 0), 16_384);
    done(site.router(), &format!("nodes undrain {}", names[1]));
    let text = refused(site.router(), &format!("nodes undrain {}", names[1]));
    assert!(text.contains("is not drained"), "{text}");
    done(site.router(), "balance --goal fast --wait");
    assert_eq!([0, 1, 2].map(|node| slots(&site, node)), [8_192, 8_192, 0]);
}

/// An admin connection for several requests, opened before the limit of open files.
struct Admin {
    stream: TcpStream,
    token: String,
}

impl Admin {
    fn get(&mut self, what: &str) -> String {
        let token = &self.token;
        let request =
            format!("{what} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nContent-Length: 0\r\n\r\n");
        self.stream.write_all(request.as_bytes()).expect("sent");
        let (mut answer, mut buffer) = (String::new(), [0; 4096]);
        loop {
            let count = self.stream.read(&mut buffer).expect("an answer");
            assert!(count > 0, "it was closed: {answer}");
            answer += &String::from_utf8_lossy(&buffer[..count]);
            let Some((head, body)) = answer.split_once("\r\n\r\n") else { continue };
            let length = head
                .lines()
                .find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse::<usize>().ok());
            if body.len() >= length.expect("a length") {
                return body.to_owned();
            }
        }
    }
}

#[test]
fn a_move_that_cannot_begin_is_visible() {
    let Some(scene) = Scene::start() else { return };
    let router = scene.site.router();
    scene.begin(SLOWLY);
    let slot = crc16_slot(scene.elsewhere.as_bytes()).number();
    done(router, &format!("move --from {} --to {} --slots {slot}", scene.name(1), scene.name(0)));
    let token = std::fs::read_to_string(router.state_dir().join("admin-token")).expect("the token").trim().to_owned();
    let mut admin = Admin { stream: TcpStream::connect(router.admin()).expect("connected"), token };
    assert_eq!(admin.get("GET /readyz"), "ready\n");
    // The limit of open files is below the current number.
    let pid = Pid::from_raw(router.process().pid() as i32);
    let few = Rlimit { current: Some(8), ..rustix::process::getrlimit(Resource::Nofile) };
    let free = rustix::process::prlimit(pid, Resource::Nofile, few).expect("limited");
    // The first move can end without a new file. Then the second move must begin.
    admin.get("POST /api/v1/moves/1/abort");
    let ready = eventually("the second move cannot start", || {
        std::thread::sleep(Duration::from_millis(50));
        Some(admin.get("GET /readyz")).filter(|body| body.contains("move 2 cannot start: "))
    });
    assert!(ready.starts_with("ready\n"), "every slot has an owner that answers: {ready}");
    assert!(admin.get("GET /api/v1/status").contains("move 2 cannot start: "));
    assert!(admin.get("GET /api/v1/moves").contains("\"cannot start: "));
    assert!(admin.get("GET /metrics").contains("switchyard_moves_in_trouble 1\n"));
    rustix::process::prlimit(pid, Resource::Nofile, free).expect("free again");
    wait_for(router, 2, "done");
    assert_eq!(admin.get("GET /readyz"), "ready\n");
}
