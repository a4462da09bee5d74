//! Tests of the autoscaler: real servers start, join, get their share, are drained and stopped, while the replies of
//! clients are checked.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value as Json;

use crate::movectl::{done, json, refused};
use crate::support::node::{Node, NodeOptions, default_program};
use crate::support::relay::Relay;
use crate::support::{Client, Site, SiteOptions, Value, ok, ports, until_within};

/// Time for a server to start, join and get a third of the slots, or to be drained.
pub(crate) const CHANGE_TIMEOUT: Duration = Duration::from_secs(120);

/// Processes that write into a folder: the servers started by the router.
pub(crate) fn servers(folder: &Path) -> Vec<Pid> {
    let all = std::fs::read_dir("/proc").expect("processes").flatten();
    let writes_there =
        |pid: &str| std::fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|out| out.starts_with(folder));
    let pids = all.filter_map(|entry| entry.file_name().into_string().ok()).filter(|pid| writes_there(pid));
    pids.filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

fn end(folder: &Path) {
    for pid in servers(folder) {
        // The process may have ended already.
        let _ = kill_process_group(pid, Signal::KILL);
    }
}

/// Kills servers that a failed test leaves behind: they outlive their router.
pub(crate) struct Fleet {
    pub(crate) site: Site,
    pub(crate) folder: PathBuf,
}

impl Drop for Fleet {
    fn drop(&mut self) {
        self.site.router_mut().process_mut().kill();
        end(&self.folder);
    }
}

impl Fleet {
    /// Starts two nodes, and configures this command line for a third at a free port.
    fn start(command: &str, settings: &str) -> Option<Fleet> {
        let port = ports::free();
        Self::start_at(command, settings, (port, port))
    }

    /// Starts two nodes, and configures a third at a port of this range.
    pub(crate) fn start_at(command: &str, settings: &str, (first, last): (u16, u16)) -> Option<Fleet> {
        let config =
            format!("[autoscale]\n{settings}\n[autoscale.local]\ncommand = [{command}]\nports = \"{first}-{last}\"\n");
        let site = Site::router_only(2, &SiteOptions::config(config))?;
        Some(Self::of(site))
    }

    /// Local servers are next to the state directory.
    pub(crate) fn of(site: Site) -> Fleet {
        let state = std::fs::canonicalize(site.router().state_dir()).expect("a folder");
        Fleet { site, folder: state.with_file_name("state-servers") }
    }

    pub(crate) fn want(&self, nodes: i64) {
        assert_eq!(json(self.site.router(), &format!("autoscale set-nodes {nodes}"))["wanted"], nodes);
    }

    pub(crate) fn standing(&self) -> Json {
        json(self.site.router(), "autoscale")
    }

    /// Waits until there are `nodes` nodes and no change is in progress.
    #[track_caller]
    pub(crate) fn wait_for_nodes(&self, nodes: u64) {
        let mut last = Json::Null;
        let what = format!("there are {nodes} nodes");
        until_within(CHANGE_TIMEOUT, &what, || {
            last = self.standing();
            assert_ne!(last["events"][0]["kind"], "failed", "{last:#}");
            last["nodes"] == nodes && last["change"].is_null() && last["wanted"].is_null()
        });
    }

    pub(crate) fn addresses(&self) -> Vec<std::net::SocketAddr> {
        self.site.nodes().iter().map(crate::support::node::Node::address).collect()
    }

    /// Kills the router and starts it again.
    fn crash(&mut self) {
        let nodes = self.addresses();
        self.site.router_mut().process_mut().kill();
        self.site.router_mut().start_again(&nodes);
    }
}

/// Command line of a plain server, after the shell command `before`.
pub(crate) fn server(before: &str) -> String {
    let program = default_program();
    format!("'sh', '-c', '{before} exec {program} --bind 127.0.0.1 --port {{port}} --dir {{dir}} --save \"\"'")
}

/// Runs clients that write and read their own keys until `body` ends. Each reply must have the newest value.
fn checked(site: &Site, body: impl FnOnce()) {
    struct Ends<'s>(&'s AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let work = |number: usize, mut client: Client| {
        let mut value = 0_u64;
        while !stop.load(Ordering::Relaxed) {
            value += 1;
            // Pipelines, so that the load is high even if this thread seldom gets a processor.
            (0..50).for_each(|key| client.post(&format!("SET {number}:{key} {value}")));
            (0..50).for_each(|_| assert_eq!(client.reply(), ok()));
            (0..50).for_each(|key| client.post(&format!("GET {number}:{key}")));
            for _ in 0..50 {
                assert_eq!(client.reply(), Value::Bulk(value.to_string().into()), "of client {number}");
            }
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        (0..3).for_each(|number| {
            drop(scope.spawn({
                let work = &work;
                move || work(number, site.client())
            }))
        });
        body();
    });
    assert!(rounds.load(Ordering::Relaxed) > 3, "clients were served");
}

#[test]
fn nodes_join_and_leave_without_a_failed_request() {
    let Some(fleet) = Fleet::start(&server(""), "max-nodes = 3") else { return };
    checked(&fleet.site, || {
        assert!(refused(fleet.site.router(), "autoscale set-nodes 4").contains("max-nodes"));
        fleet.want(3);
        fleet.wait_for_nodes(3);
        let started = fleet.standing()["started"][0].as_str().expect("a server").to_owned();
        let mut third = Client::connect(started.parse().expect("an address"));
        assert!(third.cmd("DBSIZE").int() > 10, "it has its share of the keys");
        drop(third);
        assert_eq!(servers(&fleet.folder).len(), 1);
        fleet.want(2);
        fleet.wait_for_nodes(2);
        assert_eq!(servers(&fleet.folder).len(), 0, "its server was stopped");
    });
    let texts: Vec<String> =
        fleet.standing()["events"].as_array().expect("events").iter().map(|event| event["text"].to_string()).collect();
    assert!(texts.iter().any(|text| text.contains("has left and is stopped")), "{texts:?}");
    assert!(fleet.site.router().metrics().contains("autoscale_changes_done_total 2"));
}

#[test]
fn a_killed_router_resumes_the_change() {
    // The server joins a while after its start.
    let Some(mut fleet) = Fleet::start(&server("sleep 2;"), "max-nodes = 3") else { return };
    fleet.want(3);
    until_within(CHANGE_TIMEOUT, "a server is started", || !servers(&fleet.folder).is_empty());
    fleet.crash();
    fleet.wait_for_nodes(3);
    assert_eq!(servers(&fleet.folder).len(), 1, "it was found again, and not started twice");
    for key in 0..300 {
        assert_eq!(fleet.site.client().cmd(&format!("SET key:{key} {key}")), ok());
    }
    fleet.want(2);
    until_within(CHANGE_TIMEOUT, "it is drained", || {
        fleet.standing()["change"]["stage"].as_str().is_some_and(|stage| stage.contains("drained"))
    });
    fleet.crash();
    fleet.wait_for_nodes(2);
    assert_eq!(servers(&fleet.folder).len(), 0, "no server is left");
    let mut client = fleet.site.client();
    for key in 0..300 {
        assert_eq!(client.cmd(&format!("GET key:{key}")).text(), key.to_string());
    }
}

#[test]
fn a_killed_new_server_is_started_again() {
    let Some(fleet) = Fleet::start(&server("sleep 1;"), "max-nodes = 3") else { return };
    fleet.want(3);
    let stage = |words: &str| fleet.standing()["change"]["stage"].as_str().is_some_and(|stage| stage.contains(words));
    until_within(CHANGE_TIMEOUT, "it is joining", || stage("joining"));
    end(&fleet.folder);
    fleet.wait_for_nodes(3);
    assert_eq!(servers(&fleet.folder).len(), 1);
}

/// A move of the share that ends early is requested again, and a paused one is reported.
#[test]
fn an_interrupted_share_is_completed() {
    let Some(fleet) = Fleet::start(&server(""), "max-nodes = 3") else { return };
    let (router, value) = (fleet.site.router(), "x".repeat(10_000));
    let mut client = fleet.site.client();
    for number in 0..1500 {
        assert_eq!(client.cmd(&format!("SET key:{number} {value}")), ok());
    }
    // Slow enough to be paused.
    let config = std::fs::read_to_string(router.config_file()).expect("a file");
    let reload = |text: &str| {
        std::fs::write(router.config_file(), text).expect("written");
        router.process().signal(Signal::HUP);
    };
    reload(&format!("{config}\n[moves]\nmax-rate = \"100kb\"\n"));
    std::thread::sleep(Duration::from_millis(500));
    fleet.want(3);
    let open = || json(router, "moves")["moves"].as_array().cloned().unwrap_or_default();
    let id = until_within(CHANGE_TIMEOUT, "its share moves", || open().first().and_then(|first| first["id"].as_u64()));
    done(router, &format!("moves pause {id}"));
    until_within(CHANGE_TIMEOUT, "the paused move is named", || {
        fleet.standing()["change"]["error"]
            .as_str()
            .is_some_and(|error| error.contains(&format!("move {id} is paused")))
    });
    reload(&config);
    done(router, &format!("moves abort {id}"));
    fleet.wait_for_nodes(3);
    let events = fleet.standing()["events"].to_string();
    assert!(events.contains("a part is missing") && events.contains(&format!("move {id} has ended with")), "{events}");
    let nodes = json(router, "nodes")["nodes"].as_array().cloned().expect("nodes");
    let slots: Vec<u64> = nodes.iter().map(|node| node["slots"].as_u64().expect("a number")).collect();
    assert!(slots.iter().all(|slots| (5461..=5462).contains(slots)), "{slots:?}");
}

/// Covers a configuration that names another provisioner in the meantime.
#[test]
fn the_server_of_a_node_removed_by_operators_is_stopped() {
    // The shell remains the parent of the server, and forwards no signal.
    let program = default_program();
    let command = format!("'sh', '-c', '{program} --port {{port}} --dir {{dir}} --save \"\"; true'");
    let Some(fleet) = Fleet::start(&command, "max-nodes = 3") else { return };
    fleet.want(3);
    fleet.wait_for_nodes(3);
    let started = fleet.standing()["started"][0].as_str().expect("a server").to_owned();
    let router = fleet.site.router();
    std::fs::write(router.config_file(), "[autoscale.standby]\nservers = [\"127.0.0.1:1\"]\n").expect("written");
    router.process().signal(Signal::HUP);
    until_within(CHANGE_TIMEOUT, "it is reloaded", || fleet.standing()["provisioner"] == "standby");
    done(router, &format!("nodes drain {started} --wait --goal fast"));
    done(router, &format!("nodes remove {started}"));
    until_within(CHANGE_TIMEOUT, "its server is stopped", || servers(&fleet.folder).is_empty());
    fleet.wait_for_nodes(2);
    assert_eq!(fleet.standing()["started"], Json::Array(Vec::new()));
}

/// A server that never listens would otherwise be waited for repeatedly.
#[test]
fn a_server_that_never_listens_is_stopped_on_request() {
    let Some(fleet) = Fleet::start("'sh', '-c', 'exec sleep 600', '{port}'", "max-nodes = 3") else { return };
    fleet.want(3);
    let stage = |words: &str| fleet.standing()["change"]["stage"].as_str().is_some_and(|stage| stage.contains(words));
    until_within(CHANGE_TIMEOUT, "it is joining", || stage("joining") && servers(&fleet.folder).len() == 1);
    fleet.want(2);
    until_within(CHANGE_TIMEOUT, "no change is in progress", || fleet.standing()["change"].is_null());
    assert_eq!(servers(&fleet.folder).len(), 0, "it was stopped");
    let standing = fleet.standing();
    assert!(standing["nodes"] == 2 && standing["started"] == Json::Array(Vec::new()), "{standing:#}");
    assert!(
        standing["events"][0]["text"].as_str().is_some_and(|text| text.contains("has withdrawn the new node")),
        "{standing:#}"
    );
}

#[test]
fn a_server_that_cannot_start_is_abandoned_and_named() {
    let command = "'sh', '-c', 'echo no such licence; exit 1', '{port}'";
    let Some(fleet) = Fleet::start(command, "max-nodes = 3") else { return };
    fleet.want(3);
    let failed = until_within(CHANGE_TIMEOUT, "it is given up", || {
        let standing = fleet.standing();
        (standing["events"][0]["kind"] == "failed").then_some(standing)
    });
    assert!(failed["events"][0]["text"].as_str().is_some_and(|text| text.contains("no such licence")), "{failed:#}");
    assert!(failed["wanted"].is_null() && failed["change"].is_null() && failed["nodes"] == 2, "{failed:#}");
    assert!(std::fs::read_dir(&fleet.folder).is_ok_and(|mut left| left.next().is_none()), "nothing is left of it");
}

/// Waits until a request has failed, and returns the reason.
pub(crate) fn failure(fleet: &Fleet) -> String {
    until_within(CHANGE_TIMEOUT, "it is given up", || {
        let standing = fleet.standing();
        let is_over = standing["events"][0]["kind"] == "failed" && standing["change"].is_null();
        (is_over && standing["wanted"].is_null()).then(|| standing["events"][0]["text"].to_string())
    })
}

#[test]
fn a_node_under_another_name_is_never_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = std::fs::canonicalize(folder.path()).expect("a folder");
    let (answer, stopped) = (folder.join("answer"), folder.join("stopped"));
    let script = format!(
        "read line; case \"$line\" in *'\"action\":\"start\"'*) cat {};; *) touch {};; esac",
        answer.display(),
        stopped.display()
    );
    let config = format!("[autoscale]\nmax-nodes = 3\n[autoscale.command]\nrun = {:?}\n", ["sh", "-c", &script]);
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    let node = site.nodes()[1].address();
    let relay = Relay::start(node);
    let fleet = Fleet { site, folder };
    for (address, reason) in [
        (format!("localhost:{}", node.port()), "already in use".to_owned()),
        (relay.address().to_string(), format!("it is node {node}")),
    ] {
        std::fs::write(&answer, format!("{{\"address\": \"{address}\"}}")).expect("written");
        fleet.want(3);
        let why = failure(&fleet);
        assert!(why.contains(&reason), "{address}: {why}");
        assert!(!stopped.exists(), "{address}: {why}");
        assert_eq!(fleet.standing()["started"], Json::Array(Vec::new()));
    }
}

#[test]
fn a_dead_standby_server_is_skipped() {
    let spare = Node::start(&NodeOptions::default());
    let dead = format!("127.0.0.1:{}", ports::free());
    let config =
        format!("[autoscale]\nmax-nodes = 3\n[autoscale.standby]\nservers = [\"{dead}\", \"{}\"]\n", spare.address());
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    let fleet = Fleet::of(site);
    fleet.want(3);
    until_within(CHANGE_TIMEOUT, "the other one has joined", || {
        let standing = fleet.standing();
        standing["nodes"] == 3 && standing["change"].is_null()
    });
    let standing = fleet.standing();
    assert_eq!(standing["started"], serde_json::json!([spare.address().to_string()]), "{standing:#}");
    let texts: Vec<String> =
        standing["events"].as_array().expect("events").iter().map(|event| event["text"].to_string()).collect();
    assert!(texts.iter().any(|text| text.contains(&format!("{dead} cannot join"))), "{texts:?}");
}

#[test]
fn a_request_above_the_reloaded_max_nodes_ends() {
    let Some(fleet) = Fleet::start(&server("sleep 3;"), "max-nodes = 4") else { return };
    fleet.want(4);
    until_within(CHANGE_TIMEOUT, "the first is joining", || {
        !fleet.standing()["started"].as_array().expect("servers").is_empty()
    });
    let router = fleet.site.router();
    let config = std::fs::read_to_string(router.config_file()).expect("a configuration");
    std::fs::write(router.config_file(), config.replace("max-nodes = 4", "max-nodes = 3")).expect("written");
    router.process().signal(Signal::HUP);
    let why = failure(&fleet);
    assert!(why.contains("4 nodes are wanted, and max-nodes is 3"), "{why}");
    assert_eq!(fleet.standing()["nodes"], 3);
}

#[test]
fn high_load_adds_a_node_and_low_load_removes_it() {
    let settings = "mode = \"on\"\npolicy = \"model\"\ncapacity = 300\nmin-nodes = 2\nmax-nodes = 3\n\
        up-after = \"1s\"\ndown-after = \"2s\"\nup-cooldown = \"1s\"\ndown-cooldown = \"2s\"";
    let Some(fleet) = Fleet::start(&server(""), settings) else { return };
    // Far more than 480 requests per second.
    checked(&fleet.site, || fleet.wait_for_nodes(3));
    let goals = |moves: &Json| {
        moves["ended"].as_array().expect("moves").iter().map(|one| one["goal"].to_string()).collect::<Vec<_>>()
    };
    assert_eq!(goals(&json(fleet.site.router(), "moves")), ["\"fast\""; 2], "clients wait for the new node");
    fleet.wait_for_nodes(2);
    assert!(goals(&json(fleet.site.router(), "moves")).contains(&"\"balanced\"".to_owned()), "not urgent");
    let texts: Vec<String> =
        fleet.standing()["events"].as_array().expect("events").iter().map(|event| event["text"].to_string()).collect();
    assert!(texts.iter().any(|text| text.contains("a node is added") && text.contains("requests/s need")), "{texts:?}");
    assert!(texts.iter().any(|text| text.contains("requests/s need only")), "{texts:?}");
}

/// Replaces systemctl: executes the unit file with other folders and the test's programs.
const SYSTEMCTL: &str = r#"#!/bin/sh
unit=$UNITS/${2%%@*}@.service
value() { sed -n "s/^$1=//p" "$unit" | sed "s/%i/${2#*@}/g"; }
pid=$STATE/${2#*@}.pid
case $1 in
    start)
        if [ -e "$pid" ] && kill -0 "$(cat "$pid")"; then exit 0; fi
        mkdir -p "$STATE/$(value StateDirectory "$2")"
        command=$(value ExecStart "$2" | sed "s#/var/lib/#$STATE/#; s#^/usr/bin/redis-server#$PROGRAM#")
        setsid $command >"$STATE/output" 2>&1 </dev/null &
        echo $! >"$pid"
        ;;
    stop)
        kill "$(cat "$pid")"
        while kill -0 "$(cat "$pid")" 2>&-; do sleep 0.05; done
        rm "$pid"
        ;;
esac
"#;

#[test]
fn the_systemd_example_starts_and_stops_units() {
    use std::os::unix::fs::PermissionsExt as _;
    let examples =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples/systemd").canonicalize().expect("examples");
    let folder = tempfile::tempdir().expect("a folder");
    let state = std::fs::canonicalize(folder.path()).expect("a folder");
    let systemctl = state.join("systemctl");
    std::fs::write(&systemctl, SYSTEMCTL).expect("written");
    std::fs::set_permissions(&systemctl, std::fs::Permissions::from_mode(0o755)).expect("a program");
    let run = [
        "env".to_owned(),
        format!("PATH={}:{}", state.display(), std::env::var("PATH").expect("a path")),
        format!("REDIS_UNIT_FIRST_PORT={}", ports::free()),
        format!("UNITS={}", examples.display()),
        format!("STATE={}", state.display()),
        format!("PROGRAM={}", default_program()),
        examples.join("redis-unit").display().to_string(),
    ];
    let config = format!("[autoscale]\nmax-nodes = 3\n[autoscale.command]\nrun = {run:?}\ntimeout = \"20s\"\n");
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    let fleet = Fleet { site, folder: state };
    checked(&fleet.site, || {
        fleet.want(3);
        fleet.wait_for_nodes(3);
        assert_eq!(servers(&fleet.folder).len(), 1);
        fleet.want(2);
        fleet.wait_for_nodes(2);
        assert_eq!(servers(&fleet.folder).len(), 0, "its unit was stopped");
    });
}
