//! Requests for moves: the command line, the admin API, RESP, and state that survives a restart. `moves` tests that no
//! key is lost or wrong in the meantime.

use std::net::SocketAddr;
use std::process::Command;

use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, ok, ports, until,
};

/// Result of a subcommand.
pub(crate) struct CliOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Runs `switchyard ARGS --admin ...` against a router.
pub(crate) fn run_cli(router: &Router, line: &str) -> CliOutput {
    run_cli_at(router.admin(), line)
}

/// Runs a subcommand with this admin address.
pub(crate) fn run_cli_at(admin: SocketAddr, line: &str) -> CliOutput {
    let admin = admin.to_string();
    run(line.split(' ').chain(["--admin", &admin]))
}

fn run<'a>(args: impl IntoIterator<Item = &'a str>) -> CliOutput {
    let output = Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(args)
        .env_remove("SWITCHYARD_ADMIN_TOKEN")
        .output()
        .expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    CliOutput { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
}

#[track_caller]
pub(crate) fn done(router: &Router, line: &str) -> String {
    let said = run_cli(router, line);
    assert_eq!(said.code, 0, "switchyard {line}:\n{}{}", said.out, said.err);
    said.out
}

#[track_caller]
pub(crate) fn refused(router: &Router, line: &str) -> String {
    let said = run_cli(router, line);
    assert_eq!(said.code, 1, "switchyard {line} was not refused:\n{}{}", said.out, said.err);
    said.err
}

#[track_caller]
pub(crate) fn json(router: &Router, line: &str) -> serde_json::Value {
    serde_json::from_str(&done(router, &format!("{line} --json"))).expect("JSON")
}

pub(crate) fn names(site: &Site) -> Vec<String> {
    site.nodes().iter().map(|node| node.address().to_string()).collect()
}

/// Number of slots of each node, queried by RESP.
pub(crate) fn slots(router: &Router) -> Vec<(String, i64)> {
    let nodes = Client::connect(router.address()).cmd("SWITCHYARD NODES");
    nodes.items().iter().map(|node| (node.field("node").text(), node.field("slots").int())).collect()
}

pub(crate) fn owns(router: &Router, node: SocketAddr) -> Option<i64> {
    slots(router).into_iter().find(|(name, _)| *name == node.to_string()).map(|(_, slots)| slots)
}

#[cfg(feature = "research")]
#[test]
fn a_protocol_that_may_lose_keys_needs_a_flag() {
    let Some(site) = Site::router_only(
        2,
        &SiteOptions::router(RouterOptions::args(&[
            "--set",
            "moves.durability=aof",
            "--set",
            "clients.default-user-rules=operator",
        ])),
    ) else {
        return;
    };
    let names = names(&site);
    let line = format!("move --from {} --to {} --all --protocol stop-and-copy", names[0], names[1]);
    let text = refused(site.router(), &line);
    assert!(text.contains("does not support durability aof"), "what the configuration promises is not ignored: {text}");
    let text = refused(site.router(), &format!("{line} --durability replica --allow-key-loss"));
    assert!(text.contains("does not support durability replica"), "{text}");
    let text = refused(site.router(), &format!("{line} --durability memory"));
    assert!(text.contains("loses keys if a node restarts") && text.contains("--allow-key-loss"), "{text}");
    let words =
        format!("SWITCHYARD MOVE FROM {} TO {} ALL PROTOCOL stop-and-copy DURABILITY memory", names[0], names[1]);
    let mut client = site.client();
    let reply = client.cmd(&words);
    assert!(reply.error().is_some_and(|text| text.contains("loses keys")), "{reply:?}");
    assert_eq!(client.cmd("SET key 1"), ok());
    let reply = client.cmd(&format!("{words} ALLOW-KEY-LOSS"));
    assert_eq!(reply.error(), None);
    // The next move may start when this one has ended, which is later than the change of the owner.
    crate::movectl_moves::wait_for(site.router(), 1, "done");
    assert_eq!(owns(site.router(), site.nodes()[0].address()), Some(0));
    assert_eq!(client.cmd("GET key"), bulk("1"));
    // A server keeps the connection of its MIGRATE for ten seconds, and it looks like a client's.
    let how = "--protocol stop-and-copy --durability memory --allow-key-loss --allow-direct-clients";
    done(site.router(), &format!("nodes drain {} {how} --wait", names[1]));
    assert_eq!(client.cmd("GET key"), bulk("1"));
}

#[cfg(feature = "research")]
#[test]
fn a_published_protocol_needs_a_flag_and_moves_existing_keys() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let (source, target) = (&names[0], &names[1]);
    let line = format!("move --from {source} --to {target} --all");
    for (protocol, expected) in [
        ("netmigrate", "loses writes and returns stale values"),
        ("bloom", "loses writes and returns stale values"),
        ("switchyard", "has no mode paper"),
    ] {
        let text = refused(site.router(), &format!("{line} --protocol {protocol} --mode paper"));
        assert!(text.contains(expected), "{text}");
    }
    let text = refused(site.router(), &format!("{line} --protocol bloom --allow-key-loss"));
    assert!(text.contains("only as published"), "{text}");
    let text = refused(site.router(), &format!("{line} --protocol bloom --mode paper --groups 0 --allow-key-loss"));
    assert!(text.contains("groups: 0 is not between"), "{text}");
    for (what, expected) in [
        ("--protocol netmigrate --groups 2000000", "groups: 2000000 is not between 1 and 1048576"),
        ("--protocol netmigrate --bits 65", "bits: 65 is not between 1 and 64"),
        ("--protocol netmigrate --durability aof", "durability has no effect on netmigrate"),
        ("--protocol netmigrate --no-forwarding", "no-forwarding has no effect on netmigrate"),
        ("--protocol netmigrate --tracker exact --bits 8", "bits has no effect on netmigrate"),
        ("--protocol netmigrate --counting-bytes 3", "counting-bytes: 3 is not between 4 and 1048576"),
        ("--protocol netmigrate --groups-at-once 0", "groups-at-once: 0 is not between 1 and 255"),
        ("--protocol netmigrate --tracker exact --counting-bytes 64", "use --tracker bloom+counting or adaptive"),
        ("--protocol bloom --counting-bytes 64", "counting-bytes has no effect on bloom"),
        ("--protocol bloom --groups-at-once 8", "groups-at-once has no effect on bloom"),
        ("--protocol rocksteady --groups-at-once 8", "a tracker has no effect on rocksteady"),
        ("--protocol rocksteady --tracker bloom", "a tracker has no effect on rocksteady"),
        ("--protocol rocksteady --source-ops-max 9", "source-ops-max has no effect on rocksteady"),
        ("--protocol netmigrate --source-ops-max few", "nor short, medium or long"),
        ("--protocol netmigrate --source-ops-max medium", "54 % of the capacity of the source, which is unknown"),
        ("--protocol fulva --tracker adaptive", "tracker adaptive has no effect on fulva"),
        ("--protocol bloom --tracker bloom+counting", "tracker bloom+counting has no effect on bloom"),
    ] {
        let text = refused(site.router(), &format!("{line} --mode paper --allow-key-loss {what}"));
        assert!(text.contains(expected), "{text}");
    }
    let text = refused(
        site.router(),
        &format!("move --keys k --to {target} --protocol netmigrate --mode paper --allow-key-loss"),
    );
    assert!(text.contains("move whole slots"), "{text}");
    let words = format!("SWITCHYARD MOVE FROM {source} TO {target} ALL PROTOCOL netmigrate GROUPS 7 DRY-RUN");
    let reply = site.client().cmd(&words);
    assert!(reply.error().is_some_and(|text| text.contains("GROUPS is a setting of MODE paper")), "{reply:?}");
    let mut client = site.client();
    for n in 0..500 {
        assert_eq!(client.cmd(&format!("SET key{n} {n}")), ok());
    }
    done(
        site.router(),
        &format!(
            "{line} --protocol netmigrate --mode paper --tracker adaptive --groups 16 --bits 8 --counting-bytes 16 \
             --groups-at-once 2 --allow-key-loss --wait"
        ),
    );
    assert_eq!(site.nodes()[0].client().cmd("DBSIZE").int(), 0);
    assert!((0..500).all(|n| client.cmd(&format!("GET key{n}")) == bulk(n.to_string())));
    // Such a move cannot be reversed once it has started, and the command reports that before it is recorded.
    done(
        site.router(),
        &format!(
            "move --from {target} --to {source} --all --protocol bloom --mode paper --allow-key-loss --max-rate 1kb"
        ),
    );
    let text = refused(site.router(), "moves source-ops-max 2 short");
    assert!(text.contains("23 % of the capacity of the source, which is unknown"), "{text}");
    done(site.router(), "moves source-ops-max 2 50");
    assert!(done(site.router(), "moves list --json").contains("\"source_ops_max\":50"));
    done(site.router(), "moves source-ops-max 2 none");
    assert!(!done(site.router(), "moves list --json").contains("source_ops_max"));
    let second = "moves abort 2";
    let text = until("its slots are on their way", || {
        let dry = run_cli(site.router(), &format!("{second} --dry-run"));
        (dry.code != 0).then_some(dry.err)
    });
    assert!(text.contains("has no rollback"), "{text}");
    assert!(refused(site.router(), second).contains("has no rollback"));
    done(site.router(), "moves max-rate 2 none");
    until("it has ended", || site.nodes()[1].client().cmd("DBSIZE").int() == 0);
}

#[test]
fn invalid_requests_are_refused_with_a_remedy() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let (a, b) = (&names[0], &names[1]);
    let router = site.router();
    let text = refused(router, &format!("move --from {a} --to 127.0.0.1:1 --all"));
    assert!(text.contains("there is no node \"127.0.0.1:1\"") && text.contains(a) && text.contains(b), "{text}");
    let text = refused(router, &format!("move --from {a} --to {a} --all"));
    assert!(text.contains("the same node"), "{text}");
    let (owner, other) = if owns_first(&site, site.nodes()[0].address()) { (a, b) } else { (b, a) };
    let text = refused(router, &format!("move --from {other} --to {owner} --slots 0-9,16383"));
    assert!(text.contains("of these 11 slots do not belong to") && text.contains("It owns"), "{text}");
    let text = refused(router, &format!("move --from {owner} --to {other} --slots 5-2"));
    assert!(text.contains("not a range of slots") && text.contains("0-100,200"), "{text}");
    let text = refused(router, "moves pause 7");
    assert!(text.contains("there is no move 7"), "{text}");
    let text = refused(router, &format!("nodes remove {a}"));
    assert!(text.contains("still owns 8192 slots") && text.contains(&format!("switchyard nodes drain {a}")), "{text}");
    let text = refused(router, &format!("nodes add {a}"));
    assert!(text.contains("is a node already"), "{text}");
    let text = refused(router, "nodes add redis://x");
    assert!(text.contains("URLs are not understood"), "{text}");
    assert_eq!(run(["move", "--from", a, "--to", b]).code, 2, "which slots?");
    assert_eq!(run(["move", "--from", a, "--to", b, "--all", "--goal", "quick"]).code, 2);
    let help = run(["move", "--help"]).out;
    assert!(help.contains("--slots") && help.contains("--keys"), "{help}");
    assert!(done(router, "moves").contains("no moves are in progress"));
}

#[test]
fn durability_that_a_node_lacks_is_refused() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let (a, b) = (&names[0], &names[1]);
    let text = refused(site.router(), &format!("move --from {a} --to {b} --all --durability aof"));
    assert!(text.contains("has no append-only file"), "{text}");
    let text = refused(site.router(), &format!("move --from {a} --to {b} --all --durability replica"));
    assert!(text.contains("has no replica"), "{text}");
}

#[test]
fn clients_that_bypass_the_router_are_reported() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let mut direct = site.nodes()[0].client();
    direct.cmd("CLIENT SETNAME billing");
    assert_eq!(direct.cmd("SET past-the-router 1"), ok());
    let line = format!("move --from {} --to {} --slots ", names[0], names[1]);
    let owned = site.nodes()[0].address();
    let first = if owns_first(&site, owned) { "0" } else { "16383" };
    let text = refused(site.router(), &format!("{line}{first}"));
    assert!(text.contains("is used past this router by 1 client ") && text.contains("named billing"), "{text}");
    assert!(text.contains("--allow-direct-clients"), "{text}");
    let doctor = run(["doctor", "--node", &names[0], "--node", &names[1]]);
    assert!(doctor.out.contains("direct clients") && doctor.out.contains("1 of them writes"), "{}", doctor.out);
}

#[test]
fn nodes_in_cluster_mode_are_refused() {
    if direct() {
        return;
    }
    let bus = ports::free().to_string();
    let dir = tempfile::tempdir().expect("a directory");
    let mode = dir.path().join("mode.conf");
    std::fs::write(&mode, "").expect("written");
    let args = vec!["--include".to_owned(), mode.display().to_string()];
    let mut nodes =
        [Node::start(&NodeOptions::default()), Node::start(&NodeOptions { args, ..NodeOptions::default() })];
    let router = Router::start(&nodes.each_ref().map(Node::address), &RouterOptions::default());
    // A first start refuses such a node, so it enters cluster mode later.
    std::fs::write(&mode, format!("cluster-enabled yes\ncluster-port {bus}\n")).expect("written");
    nodes[1].kill();
    nodes[1].restart();
    assert_eq!(nodes[1].client().cmd("CLUSTER ADDSLOTSRANGE 0 16383"), ok());
    let (from, to) = (nodes[0].address(), nodes[1].address());
    let text = refused(&router, &format!("move --from {from} --to {to} --all"));
    assert!(text.contains("runs in cluster mode") && text.contains("cluster-enabled no"), "{text}");
}

fn owns_first(site: &Site, node: SocketAddr) -> bool {
    // The first map depends on the order of names.
    let mut sorted = names(site);
    sorted.sort();
    sorted[0] == node.to_string()
}

#[test]
fn joined_and_removed_nodes_survive_a_restart() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let third = Node::start(&NodeOptions::default());
    let listed: Vec<SocketAddr> = site.nodes().iter().map(Node::address).collect();
    done(site.router(), &format!("nodes add {}", third.address()));
    assert_eq!(owns(site.router(), third.address()), Some(0));
    let plan = json(site.router(), "balance --dry-run");
    let moves = plan["moves"].as_array().expect("moves");
    assert!(moves.iter().all(|m| m["to"] == third.address().to_string() && m["id"].is_null()), "{plan}");
    assert_eq!(moves.iter().map(|m| m["slots"].as_u64().unwrap_or(0)).sum::<u64>(), 5461, "{plan}");
    assert_eq!(owns(site.router(), third.address()), Some(0), "only planned");
    let plan = json(site.router(), &format!("nodes drain {} --dry-run", listed[0]));
    let moves = plan["moves"].as_array().expect("moves");
    assert!(moves.iter().all(|m| m["from"] == listed[0].to_string() && m["id"].is_null()), "{plan}");
    assert_eq!(moves.iter().map(|m| m["slots"].as_u64().unwrap_or(0)).sum::<u64>(), 8192, "{plan}");
    assert!(!done(site.router(), "nodes").contains("drained"), "only planned");

    site.router_mut().restart(&listed);
    assert_eq!(owns(site.router(), third.address()), Some(0), "remembered, though no flag names it");
    done(site.router(), &format!("nodes remove {}", third.address()));
    assert_eq!(owns(site.router(), third.address()), None);

    // A node without slots that the command line lists: it stays removed after a restart, which logs that.
    let all: Vec<SocketAddr> = listed.iter().copied().chain([third.address()]).collect();
    site.router_mut().restart(&all);
    assert_eq!(owns(site.router(), third.address()), Some(0));
    done(site.router(), &format!("nodes remove {}", third.address()));
    site.router_mut().restart(&all);
    assert_eq!(owns(site.router(), third.address()), None);
    let log = site.router().process().log();
    assert!(log.contains("was removed by `switchyard nodes remove`"), "{log}");
    done(site.router(), &format!("nodes add {}", third.address()));
    assert_eq!(owns(site.router(), third.address()), Some(0), "and back");
    assert_eq!(site.client().cmd("SET k v"), ok());
}

#[test]
fn commands_over_resp_match_the_command_line() {
    let users = "user default on nopass ~* &* +@all operator\nuser app on nopass ~* &* +@all -@admin\nuser all on nopass ~* &* +@all\n";
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("users");
    std::fs::write(&file, users).expect("written");
    let args = vec!["--set".to_owned(), format!("clients.users-file={}", file.display())];
    let router = RouterOptions { args, ..RouterOptions::default() };
    let Some(site) = Site::router_only(2, &SiteOptions::router(router)) else { return };
    let names = names(&site);
    let mut client = site.client();
    let report = client.cmd("SWITCHYARD MOVES");
    assert_eq!((report.field("moves"), report.field("ended")), (Value::Array(vec![]), Value::Array(vec![])));
    client.cmd("HELLO 3");
    assert!(matches!(client.cmd("SWITCHYARD MOVES"), Value::Map(_)));
    let plan = client.cmd("SWITCHYARD BALANCE DRY-RUN");
    assert_eq!(plan.field("moves"), Value::Array(vec![]), "they are even");
    for (line, expected) in [
        (format!("SWITCHYARD MOVE FROM {} TO {} ALL SLOTS 1", names[0], names[1]), "not both"),
        (format!("SWITCHYARD MOVE FROM {} TO nowhere:1 ALL", names[0]), "there is no node"),
        ("SWITCHYARD MOVE".to_owned(), "needs TO node"),
        ("SWITCHYARD MOVES ABORT 3".to_owned(), "there is no move 3"),
        ("SWITCHYARD NODES ADD".to_owned(), "NODES ADD|DRAIN|UNDRAIN|REMOVE"),
    ] {
        let text = client.cmd(&line).expect_error().to_owned();
        assert!(text.starts_with("ERR ") && text.contains(expected), "{line}: {text}");
    }
    // In a pipeline the replies stay in order.
    client.post("SET a 1");
    client.post("SWITCHYARD MOVES");
    client.post("GET a");
    assert_eq!(client.reply(), ok());
    assert!(matches!(client.reply(), Value::Map(_)));
    assert_eq!(client.reply(), bulk("1"));
    client.cmd("AUTH app secret");
    let text = client.cmd("SWITCHYARD MOVES").expect_error().to_owned();
    assert!(text.starts_with("NOPERM"), "{text}");
    // A user who may run all commands may read the state, but change nothing.
    client.cmd("AUTH all secret");
    for line in [
        "SWITCHYARD MOVES",
        "SWITCHYARD NODES",
        "SWITCHYARD SLOTS",
        "SWITCHYARD WHERE a",
        "SWITCHYARD STATUS",
        "SWITCHYARD HELP",
        "SWITCHYARD BALANCE DRY-RUN",
    ] {
        assert_eq!(client.cmd(line).error(), None, "{line}");
    }
    let stranger = Node::start(&NodeOptions::default());
    for line in [
        format!("SWITCHYARD NODES ADD {} REBALANCE", stranger.address()),
        format!("switchyard nodes drain {}", names[0]),
        format!("SWITCHYARD NODES REMOVE {}", names[0]),
        format!("SWITCHYARD MOVE FROM {} TO {} ALL", names[0], names[1]),
        format!("SWITCHYARD ACCEPT {}", names[0]),
        "SWITCHYARD BALANCE".to_owned(),
        "SWITCHYARD MOVES ABORT 1".to_owned(),
    ] {
        let text = client.cmd(&line).expect_error().to_owned();
        assert!(text.starts_with("NOPERM ") && text.contains("the word operator"), "{line}: {text}");
        client.cmd("MULTI");
        client.cmd(&line).expect_error();
        client.cmd("EXEC").expect_error();
        let words: Vec<String> = line.split(' ').map(|word| format!("'{word}'")).collect();
        client.send(&["EVAL", &format!("return redis.call({})", words.join(",")), "0"]);
        client.reply().expect_error();
    }
    assert_eq!(stranger.cmd("DBSIZE").int(), 0);
    assert_eq!(slots(site.router()).len(), 2, "no node has joined");
    let log = site.router().process().log();
    assert!(
        log.lines()
            .any(|line| line.contains("audit") && line.contains("not an operator") && line.contains("the user all")),
        "{log}"
    );
    assert!(
        client
            .cmd("ACL LIST")
            .items()
            .iter()
            .any(|user| user.text().starts_with("user default ") && user.text().ends_with(" operator"))
    );
    let flags = client.cmd("ACL GETUSER default").field("flags").items().to_vec();
    assert!(flags.contains(&bulk("operator")), "{flags:?}");
}

#[test]
fn a_lost_state_directory_is_rebuilt_from_the_keys() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    for i in 0..500 {
        client.cmd(&format!("SET key:{i} {i}"));
    }
    client.cmd("SELECT 2");
    client.cmd("SET other 1");
    let names = names(&site);
    site.router_mut().process_mut().kill();
    let dir = tempfile::tempdir().expect("a directory");
    let state = dir.path().join("state").display().to_string();
    // In reverse order: ids differ, but places do not.
    let nodes = ["--node", &names[1], "--node", &names[0], "--state-dir", &state];
    let planned = run(["recover", "--dry-run"].into_iter().chain(nodes));
    assert_eq!(planned.code, 0, "{}{}", planned.out, planned.err);
    assert!(planned.out.contains("only planned"), "{}", planned.out);
    let recovered = run(["recover"].into_iter().chain(nodes));
    assert_eq!(recovered.code, 0, "{}{}", recovered.out, recovered.err);
    let again = run(["recover"].into_iter().chain(nodes));
    assert!(again.code == 1 && again.err.contains("has a slot map"), "{}", again.err);
    let [listen, admin] = [ports::free(), ports::free()].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
    let rival = site.router().start_rival(listen, admin, dir.path().join("state").as_path());
    let mut client = until("the recovered router serves", || Client::try_connect(listen).ok());
    for i in 0..500 {
        assert_eq!(client.cmd(&format!("GET key:{i}")), bulk(i.to_string()), "{}", rival.log());
    }
    drop(rival);

    // A key that was moved alone, like many keys during a move.
    let here = usize::from(site.nodes()[0].cmd("EXISTS key:2").int() == 0);
    let there = 1 - here;
    for i in 0..3 {
        site.nodes()[here].cmd(&format!("SET {{key:2}}{i} here"));
    }
    site.nodes()[there].cmd("SET {key:2}alone there");
    let elsewhere = dir.path().join("elsewhere").display().to_string();
    let nodes = ["--node", &names[0], "--node", &names[1], "--state-dir", &elsewhere];
    // The same key on both nodes: the valid copy is unknown.
    for node in site.nodes() {
        node.cmd("SET key:1 x");
    }
    let conflict = run(["recover"].into_iter().chain(nodes));
    assert_eq!(conflict.code, 1);
    assert!(
        conflict.err.contains("1 key is at several nodes") && conflict.err.contains("--prefer-largest-copy"),
        "{}",
        conflict.err
    );
    assert!(conflict.out.contains("key \"key:1\" is at "), "{}", conflict.out);
    let told = run(["recover", "--prefer-largest-copy"].into_iter().chain(nodes));
    assert_eq!(told.code, 0, "{}", told.err);
    assert!(told.out.contains("1 copy of keys at several nodes will not be found"), "{}", told.out);
    assert!(told.out.contains("1 key is elsewhere than most keys of the slot"), "{}", told.out);
    let rival = site.router().start_rival(listen, admin, dir.path().join("elsewhere").as_path());
    let mut client = until("the recovered router serves", || Client::try_connect(listen).ok());
    assert_eq!(client.cmd("GET {key:2}alone"), bulk("there"), "{}", rival.log());
    assert_eq!(client.cmd("GET {key:2}1"), bulk("here"));
}

#[test]
fn a_damaged_journal_prevents_the_start() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let journal = site.router().state_dir().join("moves.journal");
    until("the journal is there", || journal.exists());
    site.router_mut().process_mut().kill();
    let mut bytes = std::fs::read(&journal).expect("the journal");
    bytes[20] ^= 0x40;
    std::fs::write(&journal, &bytes).expect("written");
    let state = site.router().state_dir();
    let mut rival = site.router().start_rival(site.router().address(), site.router().admin(), &state);
    let status = rival.wait(std::time::Duration::from_secs(30));
    assert_eq!(status.code(), Some(1));
    let log = rival.log();
    assert!(log.contains("moves.journal") && log.contains("switchyard recover"), "{log}");
}
