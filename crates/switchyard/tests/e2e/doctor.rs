//! `switchyard doctor` with real faults of real servers. Also settings that the router keeps equal on all nodes.

use std::process::Command;
use std::time::Duration;

use crate::support::process::tied;
use crate::support::{Node, NodeOptions, Site, SiteOptions, Value, bulk, ok, until};

/// Runs doctor. Returns its exit code and output.
fn doctor(args: &[&str]) -> (i32, String) {
    let mut command: Command = tied(env!("CARGO_BIN_EXE_switchyard"));
    // The user who runs the tests may have a fleet.
    let output = command.args(["doctor", "--state-dir", "/nonexistent"]).args(args).output().expect("it runs");
    (output.status.code().expect("an exit code"), String::from_utf8_lossy(&output.stdout).into_owned())
}

fn node(args: &[&str], config: &str) -> Node {
    Node::start(&NodeOptions {
        args: args.iter().map(|a| (*a).to_owned()).collect(),
        config: config.to_owned(),
        ..NodeOptions::default()
    })
}

#[test]
fn healthy_nodes_have_no_findings() {
    let nodes = [node(&["--appendonly", "yes"], ""), node(&["--appendonly", "yes"], "")];
    let addresses: Vec<String> = nodes.iter().map(|n| n.address().to_string()).collect();
    let (code, text) = doctor(&["--node", &addresses[0], "--node", &addresses[1], "--workers", "2", "--strict"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("2 nodes checked: 0 errors, 0 warnings, 0 notes"), "{text}");
}

#[test]
fn each_fault_of_a_server_is_reported_with_a_remedy() {
    let good = node(&["--appendonly", "yes"], "");
    let primary = good.address().port().to_string();
    let cases: [(Node, &str, &str); 6] = [
        (node(&["--replicaof", "127.0.0.1", &primary], ""), "role", "name the primary instead"),
        (node(&["--maxclients", "5"], ""), "maxclients", "raise maxclients"),
        (node(&["--timeout", "100"], ""), "timeout", "set timeout 0"),
        (node(&[], "rename-command CLIENT \"\"\n"), "renamed command", "remove rename-command"),
        (node(&[], "user default on nopass ~* &* +@all -client|kill\n"), "rights", "ACL SETUSER"),
        (node(&["--cluster-enabled", "yes"], ""), "cluster mode", "cluster-enabled no"),
    ];
    for (broken, check, advice) in &cases {
        let (good, bad) = (good.address().to_string(), broken.address().to_string());
        let (code, text) = doctor(&["--node", &good, "--node", &bad, "--workers", "2", "--json", "--strict"]);
        assert_eq!(code, 1, "{check}: {text}");
        let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let found = report["findings"]
            .as_array()
            .expect("findings")
            .iter()
            .find(|f| f["check"] == *check && f["node"] == bad.as_str());
        let found = found.unwrap_or_else(|| panic!("{check} is not found: {text}"));
        assert!(found["advice"].as_str().expect("advice").contains(advice), "{found}");
    }
    // An unused port, and wrong credentials.
    let (code, text) = doctor(&["--node", "127.0.0.1:1"]);
    assert_eq!(code, 1);
    assert!(text.contains("ERROR    127.0.0.1:1  connection: cannot be reached"), "{text}");
    let closed = node(&["--requirepass", "secret"], "");
    let (code, text) = doctor(&["--node", &closed.address().to_string()]);
    assert_eq!(code, 1);
    assert!(text.contains("NOAUTH"), "{text}");
    let (code, _) = doctor(&["--node", &closed.address().to_string(), "--set", "nodes.password=secret"]);
    assert_eq!(code, 0);
}

#[test]
fn a_server_without_tls_is_reported() {
    let plain = node(&["--appendonly", "yes"], "");
    let (code, text) = doctor(&[
        "--node",
        &plain.address().to_string(),
        "--set",
        "nodes.tls=true",
        "--set",
        "nodes.connect-timeout=500ms",
    ]);
    assert_eq!(code, 1);
    assert!(text.contains("makes no TLS connection (") && text.contains("is tls right for this node?"), "{text}");
}

#[test]
fn a_client_port_is_not_an_admin_port() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    for address in [site.address(), site.nodes()[0].address()] {
        let mut command: Command = tied(env!("CARGO_BIN_EXE_switchyard"));
        let output = command.args(["status", "--admin", &address.to_string()]).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && text.contains("uses the protocol of Redis"), "{text}");
    }
}

#[test]
fn replicas_are_checked() {
    let primary = node(&["--appendonly", "yes"], "");
    let port = primary.address().port().to_string();
    let follower =
        |args: &[&str]| node(&[&["--appendonly", "yes", "--replicaof", "127.0.0.1", &port], args].concat(), "");
    let (good, writable, stranger) =
        (follower(&[]), follower(&["--replica-read-only", "no"]), node(&["--appendonly", "yes"], ""));
    until("they follow", || {
        let up = |node: &Node| node.cmd("INFO replication").text().contains("master_link_status:up");
        up(&good) && up(&writable)
    });
    let look = |replicas: &[std::net::SocketAddr]| {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let replicas: Vec<String> = replicas.iter().map(|replica| format!("\"{replica}\"")).collect();
        let text = format!(
            "workers = 2\n[[node]]\naddress = \"{}\"\nreplicas = [{}]\n",
            primary.address(),
            replicas.join(", ")
        );
        std::fs::write(file.path(), text).expect("written");
        doctor(&["-c", &file.path().display().to_string(), "--strict"])
    };
    let (code, text) = look(&[good.address()]);
    assert_eq!(code, 0, "{text}");
    for (replica, check) in [
        (writable.address(), "replica-read-only"),
        (stranger.address(), "role"),
        (([127, 0, 0, 1], 1).into(), "connection"),
    ] {
        let (code, text) = look(&[good.address(), replica]);
        assert_eq!(code, 1, "{text}");
        let line = format!("{} replica {replica}  {check}: ", primary.address());
        assert!(text.contains(&line) && !text.contains(&format!("replica {}", good.address())), "{text}");
    }
}

const LIBRARY: &str =
    "#!lua name=shared\nredis.register_function('shared', function(keys) return redis.call('GET', keys[1]) end)";

#[test]
fn differing_functions_are_reported() {
    let nodes = [node(&[], ""), node(&[], "")];
    nodes[0].client().call(&["FUNCTION", "LOAD", LIBRARY]);
    let addresses: Vec<String> = nodes.iter().map(|n| n.address().to_string()).collect();
    let (code, text) = doctor(&["--node", &addresses[0], "--node", &addresses[1]]);
    assert_eq!(code, 1);
    assert!(text.contains(&format!("the library shared is not on {}", addresses[1])), "{text}");
    assert!(text.contains("loaded past the router"), "{text}");
}

#[test]
fn a_node_that_returns_empty_gets_the_functions_of_the_others() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    assert_eq!(client.call(&["FUNCTION", "LOAD", LIBRARY]), bulk("shared"));
    site.node_mut(1).restart();
    assert_eq!(site.nodes()[1].cmd("FUNCTION LIST"), Value::Array(vec![]), "nothing is kept on disk in this test");
    until("the node has the functions again", || site.nodes()[1].cmd("FUNCTION LIST").items().len() == 1);
    let tags = site.tags();
    for tag in &tags[1] {
        assert_eq!(client.cmd(&format!("SET {{{tag}}}k v")), ok());
        assert_eq!(client.cmd(&format!("FCALL shared 1 {{{tag}}}k")), bulk("v"));
    }
    // Only an operator can resolve a difference: nothing is overwritten.
    let other = LIBRARY.replace("GET", "STRLEN");
    site.nodes()[2].client().call(&["FUNCTION", "LOAD", "REPLACE", &other]);
    site.node_mut(1).restart();
    site.router().process().expect_log(&["differ"]);
    // The router would load functions at once.
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(site.nodes()[1].cmd("FUNCTION LIST"), Value::Array(vec![]));
}

#[test]
fn commands_that_may_meet_limits_are_reported() {
    let server = node(&["--appendonly", "yes"], "");
    let address = server.address().to_string();
    let mut client = server.client();
    for line in ["SET a 1", "RENAME a b", "MGET a b", "EVAL return(1) 0", "SWAPDB 0 1", "MULTI", "GET b", "EXEC"] {
        assert_eq!(client.cmd(line).error(), None, "{line}");
    }
    client.cmd("MSETNX");
    let (code, text) = doctor(&["--node", &address, "--workers", "2"]);
    assert_eq!(code, 0, "{text}");
    for told in
        ["must share a slot: RENAME (1 call)", "EXEC (1 call)", "EVAL (1 call)", "does not serve: SWAPDB (1 call)"]
    {
        assert!(text.contains(told), "{told}: {text}");
    }
    assert!(!text.contains("MGET") && !text.contains("MSETNX"), "{text}");
    // Doctor's own commands are not counted: a second run gives the same result.
    let (_, again) = doctor(&["--node", &address, "--workers", "2"]);
    assert_eq!(text, again);
}

#[test]
fn a_sample_counts_commands_that_would_be_refused_without_key_names() {
    let servers = [node(&["--appendonly", "yes"], ""), node(&["--appendonly", "yes"], "")];
    let addresses: Vec<String> = servers.iter().map(|node| node.address().to_string()).collect();
    let mut command: Command = tied(env!("CARGO_BIN_EXE_switchyard"));
    command.args(["doctor", "--node", &addresses[0], "--node", &addresses[1], "--sample", "3s", "--json"]);
    let child =
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::null()).spawn().expect("it runs");
    let ended = std::sync::atomic::AtomicBool::new(false);
    let output = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = servers[1].client();
            while !ended.load(std::sync::atomic::Ordering::Relaxed) {
                for line in [
                    "SET {secret}a 1",
                    "RENAME {secret}a {secret}b",
                    "RENAMENX {secret}b other-secret",
                    "DEL other-secret",
                    "MULTI",
                    "SET secret-1 1",
                    "SET secret-2 1",
                    "EXEC",
                    "EVAL return(redis.call('get','secret-3')) 0",
                    "EVAL_RO return(redis.call('get',KEYS[1])) 1 secret-3",
                    "BLPOP secret-4 secret-5 0.001",
                ] {
                    client.cmd(line);
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let output = child.wait_with_output().expect("it ends");
        ended.store(true, std::sync::atomic::Ordering::Relaxed);
        output
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{text}");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let found: Vec<&str> = report["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .filter(|finding| finding["check"] == "sample")
        .filter_map(|finding| finding["found"].as_str())
        .collect();
    for told in [
        "calls of RENAMENX with keys of several slots",
        "calls of EXEC with",
        "calls of EVAL with",
        "calls of BLPOP waiting",
    ] {
        assert_eq!(found.iter().filter(|found| found.contains(told)).count(), 1, "{told}: {found:?}");
    }
    assert!(!found.iter().any(|found| found.contains("RENAME with") || found.contains("EVAL_RO")), "{found:?}");
    assert!(!text.contains("secret"), "{text}");
}
