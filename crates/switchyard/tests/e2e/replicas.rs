//! Nodes with replicas: where reads go, and where writes go after a failover.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::process::tied;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, ok, until};

/// Starts a primary with replicas in sync.
pub(crate) fn group(replicas: usize) -> Vec<Node> {
    let mut nodes = vec![Node::start(&NodeOptions::default())];
    for _ in 0..replicas {
        let replica = Node::start(&NodeOptions::default());
        follow(&replica, nodes[0].address());
        nodes.push(replica);
    }
    for replica in &nodes[1..] {
        caught_up(replica);
    }
    nodes
}

pub(crate) fn follow(node: &Node, primary: SocketAddr) {
    assert_eq!(node.cmd(&format!("REPLICAOF {} {}", primary.ip(), primary.port())), ok());
}

pub(crate) fn caught_up(replica: &Node) {
    until("the replica follows", || {
        let info = replica.cmd("INFO replication").text();
        info.contains("master_link_status:up") && info.contains("master_sync_in_progress:0")
    });
}

/// Starts a router with one node: `nodes[0]` is the primary, the others are its replicas.
fn router(nodes: &[Node], config: &str) -> Router {
    let replicas: Vec<String> = nodes[1..].iter().map(|n| format!("\"{}\"", n.address())).collect();
    let config =
        format!("{config}\n[[node]]\naddress = \"{}\"\nreplicas = [{}]\n", nodes[0].address(), replicas.join(", "));
    Router::start(&[nodes[0].address()], &RouterOptions::config(config))
}

/// Number of calls of a command at a node, without replication links.
pub(crate) fn calls(node: &Node, command: &str) -> u64 {
    let stats = node.cmd("INFO commandstats").text();
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.map_or(0, |rest| rest.split(',').next().expect("a number").parse().expect("a number"))
}

/// Waits until a router has the replication id of the primary, without which it follows no promoted replica. It queries
/// all servers of a node at once and periodically: after three queries of the replica, the primary has replied.
pub(crate) fn until_observed(replica: &Node) {
    let (before, mut own) = (calls(replica, "info"), 0);
    until("the router queries the servers", || {
        own += 1;
        calls(replica, "info") >= before + own + 3
    });
}

/// Writes until it succeeds. Returns the duration.
fn until_writable(router: &Router, key: &str) -> Duration {
    let began = Instant::now();
    until("the router can write", || {
        let mut client = Client::try_connect(router.address()).ok()?;
        (client.cmd(&format!("SET {key} 1")) == ok()).then_some(())
    });
    began.elapsed()
}

#[test]
fn reads_go_to_the_servers_of_the_policy() {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let router = router(&nodes, "[clients]\nreads = \"prefer-replica\"");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until("the replica has it", || nodes[1].cmd("GET k") == bulk("v"));
    until("the replica is read", || {
        assert_eq!(client.cmd("STRLEN k").int(), 1);
        calls(&nodes[1], "strlen") > 0
    });
    // From now on every read goes to the replica, and every write to the primary, in any pipeline.
    let (reads, primary_reads) = (calls(&nodes[1], "strlen"), calls(&nodes[0], "strlen"));
    let mut pipeline = Vec::new();
    for _ in 0..50 {
        pipeline.extend(crate::support::encode(&["STRLEN", "k"]));
        pipeline.extend(crate::support::encode(&["APPEND", "log", "x"]));
    }
    let replies = client.pipeline(&pipeline, 100);
    assert!(replies.iter().step_by(2).all(|r| r == b":1\r\n"));
    assert_eq!(replies[99], b":50\r\n");
    assert_eq!((calls(&nodes[1], "strlen") - reads, calls(&nodes[0], "strlen")), (50, primary_reads));
    // In both protocols, and in the selected database.
    let mut other = Client::connect(router.address());
    other.cmd("HELLO 3");
    assert_eq!(other.cmd("SELECT 3"), ok());
    assert_eq!(other.cmd("GET k"), Value::Nil);

    // Without the replica, the primary serves reads. Only commands in flight may fail.
    nodes[1].kill();
    until("the primary is read", || client.cmd("GET k") == bulk("v"));
    for _ in 0..200 {
        assert_eq!(client.cmd("GET k").text(), "v");
    }
    nodes[1].restart();
    follow(&nodes[1], nodes[0].address());
    caught_up(&nodes[1]);
    until("the replica is read again", || {
        assert_eq!(client.cmd("STRLEN k").int(), 1);
        calls(&nodes[1], "strlen") > 0
    });
}

#[test]
fn a_listener_has_its_own_policy_and_replica_means_replica() {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let second = crate::support::ports::free();
    let router = router(&nodes, &format!("[[listener]]\naddress = \"127.0.0.1:{second}\"\nreads = \"replica\"\n"));
    let mut writer = Client::connect(router.address());
    assert_eq!(writer.cmd("SET k v"), ok());
    let mut reader = Client::connect(SocketAddr::from(([127, 0, 0, 1], second)));
    until("the replica answers", || reader.cmd("GET k") == bulk("v"));
    let before = calls(&nodes[0], "get");
    for _ in 0..20 {
        assert_eq!(reader.cmd("GET k").text(), "v");
    }
    assert_eq!(calls(&nodes[0], "get"), before);
    assert_eq!(writer.cmd("GET k").text(), "v");
    assert_eq!(calls(&nodes[0], "get"), before + 1);
    // Writes work as on any listener.
    assert_eq!(reader.cmd("SET k w"), ok());
    nodes[1].kill();
    let error = until("there is no replica", || reader.cmd("GET k").error().map(str::to_owned));
    assert!(error.starts_with("NODE"), "{error}");
    let error = until("the error names the missing replica", || {
        reader.cmd("GET k").error().filter(|e| e.contains("no replica of")).map(str::to_owned)
    });
    assert!(error.starts_with("NODEDOWN"), "{error}");
    assert_eq!(calls(&nodes[0], "get"), before + 1);
}

#[test]
fn a_user_has_its_own_policy() {
    use std::os::unix::fs::PermissionsExt;
    if direct() {
        return;
    }
    let nodes = group(1);
    let users = tempfile::NamedTempFile::new().expect("a file");
    let lines = "user default on nopass ~* &* +@all\nuser reports on nopass ~* &* +@all reads=replica\n";
    std::fs::write(users.path(), lines).expect("written");
    std::fs::set_permissions(users.path(), std::fs::Permissions::from_mode(0o600)).expect("mode");
    let router = router(&nodes, &format!("[clients]\nusers-file = {:?}\n", users.path()));
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until("the replica has it", || nodes[1].cmd("GET k") == bulk("v"));
    let counts = || (calls(&nodes[0], "strlen"), calls(&nodes[1], "strlen"));
    assert_eq!(client.cmd("STRLEN k").int(), 1);
    assert_eq!(counts(), (1, 0));
    assert_eq!(client.cmd("AUTH reports x"), ok());
    until("the replica is read", || client.cmd("STRLEN k").error().is_none());
    assert_eq!(counts(), (1, 1));
    assert!(client.cmd("ACL LIST").items().iter().any(|line| line.text().ends_with(" reads=replica")));
    assert_eq!(client.cmd("AUTH default x"), ok());
    assert_eq!(client.cmd("STRLEN k").int(), 1);
    assert_eq!(counts(), (2, 1), "the listener's policy again");
}

#[test]
fn a_manual_promotion_is_followed_and_the_old_primary_gets_no_writes() {
    if direct() {
        return;
    }
    let nodes = group(1);
    let mut router = router(&nodes, "");
    let mut client = Client::connect(router.address());
    for n in 0..100 {
        assert_eq!(client.cmd(&format!("SET k{n} {n}")), ok());
    }
    until("the replica has all", || nodes[1].cmd("DBSIZE").int() == 100);
    assert_eq!(nodes[1].cmd("REPLICAOF NO ONE"), ok());
    // Two primaries, without any information that the new one takes over.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(client.cmd("SET still here"), ok());
    assert_eq!(nodes[0].cmd("GET still").text(), "here");
    follow(&nodes[0], nodes[1].address());
    let took = until_writable(&router, "after");
    eprintln!("writable again {took:?} after the old primary became a replica");
    assert_eq!(nodes[1].cmd("GET after").text(), "1");
    for n in 0..100 {
        assert_eq!(Client::connect(router.address()).cmd(&format!("GET k{n}")).text(), n.to_string());
    }

    // The old primary is promoted again by hand: it is not followed, not even after a restart of the router.
    assert_eq!(nodes[0].cmd("REPLICAOF NO ONE"), ok());
    let writes = calls(&nodes[0], "set");
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(Client::connect(router.address()).cmd("SET x 1"), ok());
    router.restart(&[nodes[0].address()]);
    assert_eq!(Client::connect(router.address()).cmd("SET y 1"), ok());
    assert_eq!((nodes[1].cmd("GET x").text(), nodes[1].cmd("GET y").text()), ("1".into(), "1".into()));
    assert_eq!(calls(&nodes[0], "set"), writes, "the old primary got a write");
}

#[test]
fn a_dead_primary_is_replaced_by_the_promoted_replica() {
    if direct() {
        return;
    }
    let mut nodes = group(2);
    let router = router(&nodes, "");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until("both have it", || nodes[1..].iter().all(|n| n.cmd("GET k") == bulk("v")));
    until_observed(&nodes[1]);
    nodes[0].kill();
    let error = until("the primary is missed", || client.cmd("SET k w").error().map(str::to_owned));
    assert!(error.starts_with("NODE"), "{error}");
    assert_eq!(nodes[2].cmd("REPLICAOF NO ONE"), ok());
    follow(&nodes[1], nodes[2].address());
    let took = until_writable(&router, "k");
    eprintln!("writable again {took:?} after the promotion");
    assert_eq!(nodes[2].cmd("GET k").text(), "1");
    // The old primary returns empty, and still considers itself a primary.
    nodes[0].restart();
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(Client::connect(router.address()).cmd("GET k").text(), "1");
    assert_eq!((calls(&nodes[0], "set"), calls(&nodes[0], "get")), (0, 0), "the old primary got commands");
}

/// Clients count up and confirm with WAIT. Confirmed counts never decrease, even if acknowledged writes are lost.
#[test]
fn counts_confirmed_by_wait_survive_a_promotion() {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let router = router(&nodes, "");
    until_observed(&nodes[1]);
    let (is_over, is_cut, lost) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..8_u64)
            .map(|writer| {
                let (router, is_over, is_cut, lost) = (&router, &is_over, &is_cut, &lost);
                scope.spawn(move || {
                    let connect = || until("the router takes clients", || Client::try_connect(router.address()).ok());
                    let (mut client, mut seen, mut confirmed, mut pause_ms) = (connect(), 0, 0, writer * 13);
                    while !is_over.load(Ordering::SeqCst) {
                        let was_cut = is_cut.load(Ordering::SeqCst);
                        client.post_quietly(&format!("INCR count:{writer}"));
                        let counted = client.try_reply();
                        if let Ok(Value::Int(count)) = counted {
                            assert!(count > confirmed, "{count}, and WAIT has confirmed {confirmed}");
                            lost.fetch_add(u64::from(count <= seen), Ordering::SeqCst);
                            seen = count;
                        }
                        pause_ms = (pause_ms + 37) % 150;
                        std::thread::sleep(Duration::from_millis(pause_ms));
                        // The next WAIT reaches the new primary, which has a replica, but not the count.
                        while was_cut && counted.is_ok() && is_cut.load(Ordering::SeqCst) {
                            std::thread::sleep(Duration::from_millis(10));
                        }
                        client.post_quietly("WAIT 1 500");
                        match (client.try_reply(), counted) {
                            (Ok(Value::Int(1)), Ok(Value::Int(count))) => confirmed = count,
                            (Ok(_), _) => {}
                            // A node was lost during WAIT.
                            (Err(_), _) => client = connect(),
                        }
                    }
                    confirmed
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs(1));
        // From here on, writes are acknowledged but reach no replica: the replication connection is closed, and the
        // replica opens no other.
        nodes[1].freeze();
        nodes[0].cmd("CLIENT KILL TYPE replica");
        is_cut.store(true, Ordering::SeqCst);
        std::thread::sleep(Duration::from_secs(1));
        nodes[0].kill();
        nodes[1].thaw();
        assert_eq!(nodes[1].cmd("REPLICAOF NO ONE"), ok());
        until_writable(&router, "k");
        nodes[0].restart();
        follow(&nodes[0], nodes[1].address());
        caught_up(&nodes[0]);
        is_cut.store(false, Ordering::SeqCst);
        std::thread::sleep(Duration::from_secs(2));
        is_over.store(true, Ordering::SeqCst);
        assert!(writers.into_iter().all(|writer| writer.join().expect("no confirmed count was lost") > 0));
    });
    assert!(lost.load(Ordering::SeqCst) > 0, "the primary's end has to lose writes");
}

/// Starts a Sentinel for the primary at `address`.
fn sentinel(address: SocketAddr) -> Node {
    let config = format!(
        "sentinel monitor mymaster {} {} 2\nsentinel down-after-milliseconds mymaster 1500\n\
         sentinel failover-timeout mymaster 3000\nsentinel parallel-syncs mymaster 1\n",
        address.ip(),
        address.port()
    );
    Node::start(&NodeOptions { args: vec!["--sentinel".to_owned()], config, ..NodeOptions::default() })
}

/// Starts Sentinels, and waits until they know each other and the replicas.
pub(crate) fn sentinels(nodes: &[Node]) -> Vec<Node> {
    let sentinels: Vec<Node> = (0..3).map(|_| sentinel(nodes[0].address())).collect();
    for sentinel in &sentinels {
        until("the Sentinels know each other and the replicas", || {
            let fields = sentinel.cmd("SENTINEL MASTER mymaster");
            let field = |name: &str| fields.field(name).text();
            field("num-other-sentinels") == "2" && field("num-slaves") == (nodes.len() - 1).to_string()
        });
    }
    sentinels
}

fn router_with_sentinels(sentinels: &[Node], config: &str) -> Router {
    let addresses: Vec<String> = sentinels.iter().map(|s| format!("\"{}\"", s.address())).collect();
    let config =
        format!("{config}\n[[node]]\nsentinel-master = \"mymaster\"\nsentinels = [{}]\n", addresses.join(", "));
    Router::start(&[], &RouterOptions::config(config))
}

/// Returns the primary's port according to a Sentinel, and the configuration epoch.
fn announced(sentinel: &Node) -> (u16, u64) {
    let mut client = sentinel.client();
    loop {
        let epoch = |client: &mut Client| client.cmd("SENTINEL MASTER mymaster").field("config-epoch").text();
        let before = epoch(&mut client);
        let port = client.cmd("SENTINEL GET-MASTER-ADDR-BY-NAME mymaster").items()[1].text();
        if before == epoch(&mut client) {
            return (port.parse().expect("a port"), before.parse().expect("an epoch"));
        }
    }
}

/// Returns the port of the primary that the router uses.
fn followed(router: &Router) -> Option<u16> {
    let (status, body) = crate::support::http::get(router.admin(), "/api/v1/nodes");
    assert_eq!(status, 200, "{body}");
    let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    body["nodes"][0]["primary"].as_str().map(|address| address.parse::<SocketAddr>().expect("an address").port())
}

/// Replication is asynchronous: acknowledged writes that a primary has not replicated are lost with it, also without a
/// router. So only writes acknowledged by the *last* primary must exist, however often the Sentinels fail over on a
/// busy machine.
#[test]
fn sentinels_fail_over_under_load() {
    if direct() {
        return;
    }
    let mut nodes = group(2);
    let sentinels = sentinels(&nodes);
    let router = router_with_sentinels(&sentinels, "");
    assert_eq!(Client::connect(router.address()).cmd("SET k v"), ok());
    assert_eq!(nodes[0].cmd("GET k").text(), "v");

    // Clients that count, from before the failure until well after it.
    let stop = std::sync::atomic::AtomicBool::new(false);
    let (last, since, clients) = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|number| {
                let (router, stop) = (&router, &stop);
                scope.spawn(move || {
                    let mut client = Client::connect(router.address());
                    let (mut written, mut errors) = (Vec::new(), 0);
                    for n in 0.. {
                        if stop.load(std::sync::atomic::Ordering::Relaxed) {
                            break;
                        }
                        let key = format!("load:{number}:{n}");
                        match client.cmd(&format!("SET {key} {n}")).error() {
                            None => written.push((Instant::now(), key)),
                            Some(error) => {
                                assert!(error.starts_with("NODE") || error.starts_with("READONLY"), "{error}");
                                errors += 1;
                                std::thread::sleep(Duration::from_millis(5));
                            }
                        }
                    }
                    (written, errors)
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(500));
        nodes[0].kill();
        until("a Sentinel announces another primary", || announced(&sentinels[0]).0 != nodes[0].address().port());
        let took = until_writable(&router, "k");
        eprintln!("writable again {took:?} after the announcement");
        nodes[0].restart();
        // Until all servers have agreed on the primary for a while.
        let agreed = || {
            let all: Vec<(u16, u64)> = sentinels.iter().map(announced).collect();
            (all.iter().all(|one| *one == all[0]) && followed(&router) == Some(all[0].0)).then_some(all[0])
        };
        let mut found = until("all agree", agreed);
        let mut since = Instant::now();
        while since.elapsed() < Duration::from_secs(3) {
            std::thread::sleep(Duration::from_millis(100));
            if agreed() != Some(found) {
                found = until("all agree again", agreed);
                since = Instant::now();
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        (found, since, clients.into_iter().map(|c| c.join().expect("a client")).collect::<Vec<_>>())
    });
    let primary = nodes.iter().find(|n| n.address().port() == last.0).expect("one of ours");
    let mut check = primary.client();
    let mut missing = Vec::new();
    for (written, errors) in &clients {
        // The first reply after that moment may belong to a turn that began before it.
        let last: Vec<&String> = written.iter().filter(|(at, _)| *at > since).map(|(_, key)| key).skip(1).collect();
        assert!(!last.is_empty(), "no client writes after the failover ({errors} errors)");
        missing.extend(last.into_iter().filter(|key| check.cmd(&format!("EXISTS {key}")).int() == 0));
    }
    assert_eq!(announced(&sentinels[0]), last, "the Sentinels failed over during the check: no result");
    assert!(
        missing.is_empty(),
        "{last:?} acknowledged and has not {missing:?}; the router's log:\n{}",
        router.process().log()
    );
    // The router followed only changes by the Sentinels, and never returned to an earlier primary.
    let changes = router.process().log().matches("node has another primary").count() as u64;
    assert!(
        changes <= last.1,
        "{changes} changes of primary in {} epochs; the router's log:\n{}",
        last.1,
        router.process().log()
    );
    if last.0 != nodes[0].address().port() {
        let writes = calls(&nodes[0], "set");
        let is_replica = nodes[0].cmd("INFO replication").text().contains("role:slave");
        assert!(is_replica || writes == 0, "the old primary came back and got {writes} writes");
    }
}

#[test]
fn the_old_primary_and_its_sentinel_return_together() {
    an_old_primary_is_followed_by_word_only(|router| {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        let accepted = command
            .args(["nodes", "accept", "mymaster", "--admin", &router.admin().to_string()])
            .output()
            .expect("it runs");
        let said = String::from_utf8_lossy(&accepted.stderr);
        assert!(accepted.status.success() || said.contains("waits to be accepted"), "{said}");
    });
}

#[test]
fn an_unproven_primary_can_be_accepted_over_resp() {
    an_old_primary_is_followed_by_word_only(|router| {
        let mut client = Client::connect(router.address());
        client.cmd("SWITCHYARD ACCEPT nobody").expect_error();
        let said = client.cmd("SWITCHYARD ACCEPT mymaster");
        assert!(said == ok() || said.error().is_some_and(|why| why.contains("waits to be accepted")), "{said:?}");
    });
}

/// The machine of the old primary returns with its Sentinel: neither knows of the failover. The current primary does
/// not reply for a while. That must not cause a return to the old one.
fn an_old_primary_is_followed_by_word_only(accept: impl Fn(&Router)) {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let mut sentinels = sentinels(&nodes);
    let router = router_with_sentinels(
        &sentinels,
        "[clients]\ndefault-user-rules = [\"operator\"]\n[nodes]\ncommand-timeout = \"300ms\"\n",
    );
    let (old, new) = (nodes[0].address().port(), nodes[1].address().port());
    assert_eq!(Client::connect(router.address()).cmd("SET k v"), ok());
    until("the replica has it", || nodes[1].cmd("GET k") == bulk("v"));
    nodes[0].kill();
    sentinels[2].kill();
    until("the router follows", || followed(&router) == Some(new));
    until_writable(&router, "k");
    // Otherwise the other Sentinels would soon update it.
    sentinels[0].freeze();
    sentinels[1].freeze();
    sentinels[2].restart();
    nodes[0].restart();
    assert_eq!(announced(&sentinels[2]), (old, 0));
    nodes[1].freeze();
    let mut client = Client::connect(router.address());
    let end = Instant::now() + Duration::from_secs(4);
    while Instant::now() < end {
        let reply = client.cmd("SET k lost");
        assert!(reply.error().is_some_and(|e| e.starts_with("NODE")), "{reply:?} while the primary does not answer");
    }
    nodes[1].thaw();
    until_writable(&router, "k");
    assert_eq!(followed(&router), Some(new));
    assert_eq!(calls(&nodes[0], "set"), 0, "the old primary got writes");

    // It never returns, and neither do the Sentinels that know it: an operator must accept the old primary.
    router.process().expect_log(&["nodes accept"]);
    nodes[1].kill();
    until("an operator's word counts once the primary is gone", || {
        accept(&router);
        followed(&router) == Some(old)
    });
    until_writable(&router, "k");
    assert!(calls(&nodes[0], "set") > 0);
}

/// A watching client must read the value that it will replace: a replica may lag.
#[test]
fn a_watching_client_reads_from_the_primary() {
    if direct() {
        return;
    }
    let nodes = group(1);
    let router = router(&nodes, "[clients]\nreads = \"replica\"");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k 1"), ok());
    until("the replica is read", || client.cmd("STRLEN k").error().is_none() && calls(&nodes[1], "strlen") > 0);
    let before = calls(&nodes[1], "get");
    for _ in 0..20 {
        assert_eq!(client.cmd("WATCH k"), ok());
        let value: i64 = client.cmd("GET k").text().parse().expect("a number");
        client.cmd("MULTI");
        client.cmd(&format!("SET k {}", value + 1));
        assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok()]));
    }
    assert_eq!(nodes[0].cmd("GET k").text(), "21");
    assert_eq!(calls(&nodes[1], "get"), before);
    client.cmd("GET k");
    assert_eq!(calls(&nodes[1], "get"), before + 1, "afterwards the replica is read again");
}

/// After a failover, clients blocked at the old primary are disconnected, and watched keys count as changed.
#[test]
fn waits_and_watches_end_with_the_primary() {
    if direct() {
        return;
    }
    let nodes = group(1);
    let router = router(&nodes, "[nodes]\ncommand-timeout = \"1s\"\n");
    let mut waiting = Client::connect(router.address());
    let mut watching = Client::connect(router.address());
    assert_eq!(watching.cmd("SET k v"), ok());
    assert_eq!(watching.cmd("WATCH k"), ok());
    waiting.post("BLPOP q 0");
    until("it waits", || nodes[0].cmd("INFO clients").text().contains("blocked_clients:1"));
    until("the replica has it", || nodes[1].cmd("GET k") == bulk("v"));
    assert_eq!(nodes[1].cmd("REPLICAOF NO ONE"), ok());
    follow(&nodes[0], nodes[1].address());
    // The old primary itself ends the wait when it is demoted, unless the router has already disconnected.
    assert_eq!(waiting.listen(TIMEOUT), (Vec::new(), true));
    let mut waiting = Client::connect(router.address());
    until_writable(&router, "other");
    watching.cmd("MULTI");
    watching.cmd("SET k lost");
    assert_eq!(watching.cmd("EXEC"), Value::Nil);
    waiting.post("BLPOP q 0");
    until("it waits at the new primary", || nodes[1].cmd("INFO clients").text().contains("blocked_clients:1"));
    assert_eq!(watching.cmd("RPUSH q x").int(), 1);
    assert_eq!(waiting.reply().items()[1].text(), "x");
}
