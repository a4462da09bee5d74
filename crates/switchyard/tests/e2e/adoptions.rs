//! Adoptions of placement rules next to other features: a standby, replicas, a backup, and recovery.

use std::net::SocketAddr;
use std::path::Path;

use crate::movectl::{done, run_cli_at};
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::replicas::group;
use crate::rules::{KEYS, RULES, SLOWLY, all_there, fill, keys_are_at_their_tags, report, until_adopted};
use crate::standby::{Scene, WAITS_FOR_STATE, fresh};
use crate::support::process::tied;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, direct, until};

fn addresses(nodes: &[Node]) -> Vec<SocketAddr> {
    nodes.iter().map(Node::address).collect()
}

/// Starts an adoption, and waits until some keys have moved.
fn adopt_some(router: &Router, what: &str) {
    done(router, &format!("rules adopt {what} {SLOWLY}"));
    eventually("keys move", || the_move(router, 1)["keys_moved"].as_u64().filter(|moved| *moved > 100));
}

/// Fails unless each key is at exactly one node.
fn each_key_is_at_one_node(nodes: &[Node]) {
    let keys: i64 = nodes.iter().map(|node| node.cmd("DBSIZE").int()).sum();
    assert_eq!(keys, KEYS as i64);
}

#[test]
fn a_standby_continues_an_adoption() {
    let Some(mut scene) = Scene::start() else { return };
    fill(&mut Client::connect(scene.first.address()));
    adopt_some(&scene.first, "--preset bullmq");
    let admin = fresh();
    let mut standby = scene.second_at(&["--standby", "shared"], &scene.first.state_dir(), admin);
    eventually("it waits", || standby.log().contains(WAITS_FOR_STATE));
    scene.first.process_mut().kill();
    let mut client = scene.client_of(&mut standby);
    all_there(&mut client);
    eventually("the adoption ends", || {
        let rules = run_cli_at(admin, "rules list --json");
        rules.code == 0 && !rules.out.contains("\"adoption\"") && rules.out.contains("bull:{queue}:*")
    });
    all_there(&mut client);
    each_key_is_at_one_node(&scene.nodes);
}

#[test]
fn replicas_serve_all_keys_during_an_adoption() {
    if direct() {
        return;
    }
    let groups = [group(1), group(1)];
    let tables = groups.iter().map(|group| {
        format!("[[node]]\naddress = \"{}\"\nreplicas = [\"{}\"]\n", group[0].address(), group[1].address())
    });
    let config = format!("[clients]\nreads = \"prefer-replica\"\n{}", tables.collect::<String>());
    let router = Router::start(&groups.each_ref().map(|group| group[0].address()), &RouterOptions::config(config));
    let mut client = Client::connect(router.address());
    fill(&mut client);
    for group in &groups {
        until("the replica has all keys", || group[0].cmd("DBSIZE") == group[1].cmd("DBSIZE"));
    }
    adopt_some(&router, "--preset bullmq");
    while !report(&router)["adoption"].is_null() {
        all_there(&mut client);
    }
    all_there(&mut client);
    for group in &groups {
        assert!(crate::replicas::calls(&group[1], "get") > 0, "replicas serve reads");
    }
}

#[test]
fn a_backup_of_a_paused_adoption_can_be_restored() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let nodes = addresses(site.nodes());
    fill(&mut site.client());
    adopt_some(site.router(), "--preset bullmq");
    done(site.router(), "rules pause");
    wait_for(site.router(), 1, "paused");
    let (state, backup) = (site.router().state_dir(), tempfile::tempdir().expect("a directory"));
    for node in site.nodes() {
        assert_eq!(node.cmd("SAVE").error(), None);
    }
    copy(&state, backup.path());
    done(site.router(), "rules resume");
    until_adopted(site.router());
    site.client().cmd("DEL bull:q1:key:1");
    site.router_mut().process_mut().kill();
    std::fs::remove_dir_all(&state).expect("removed");
    std::fs::create_dir(&state).expect("created");
    copy(backup.path(), &state);
    for node in 0..2 {
        site.node_mut(node).restart();
    }
    site.router_mut().start_again(&nodes);
    assert_eq!(report(site.router())["adoption"]["state"], "paused");
    all_there(&mut site.client());
    done(site.router(), "rules resume");
    until_adopted(site.router());
    all_there(&mut site.client());
    keys_are_at_their_tags(&site);
}

/// Copies the files of a directory.
fn copy(from: &Path, to: &Path) {
    for file in std::fs::read_dir(from).expect("a directory") {
        let file = file.expect("a file");
        if file.file_type().expect("a type").is_file() {
            std::fs::copy(file.path(), to.join(file.file_name())).expect("copied");
        }
    }
}

#[test]
fn recover_finds_all_keys_after_an_adoption() {
    let node = NodeOptions::args(&["--appendonly", "yes"]);
    let options = SiteOptions { node, ..SiteOptions::config(RULES) };
    let Some(mut site) = Site::router_only(2, &options) else { return };
    let nodes = addresses(site.nodes());
    fill(&mut site.client());
    // The configured rules are removed and adopted again, so that keys have moved.
    done(site.router(), "rules adopt --none");
    until_adopted(site.router());
    done(site.router(), "rules adopt");
    until_adopted(site.router());
    site.router_mut().process_mut().kill();
    let state = site.router().state_dir();
    std::fs::remove_dir_all(&state).expect("removed");
    let mut recover = tied(env!("CARGO_BIN_EXE_switchyard"));
    recover.arg("recover").arg("--config").arg(site.router().config_file()).arg("--state-dir").arg(&state);
    for node in &nodes {
        recover.args(["--node", &node.to_string()]);
    }
    let output = recover.output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!String::from_utf8_lossy(&output.stdout).contains("elsewhere"), "each key is at the node of its slot");
    site.router_mut().start_again(&nodes);
    all_there(&mut site.client());
    keys_are_at_their_tags(&site);
    assert_eq!(report(site.router())["rules"].as_array().map(Vec::len), Some(2));
}
