//! A primary that returns without its keys is not served without a check.

use crate::support::process::tied;
use crate::support::slots::slot;
use crate::support::{Client, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, until};

/// Two nodes, in memory or persistent, and a router that may start while one of them is held.
fn site(persistent: bool, policy: &str) -> Option<Site> {
    // Sync each write: with everysec a write may wait for a sync in progress, and a kill would lose it.
    let args: &[&str] = if persistent { &["--appendonly", "yes", "--appendfsync", "always"] } else { &[] };
    let args = args.iter().map(|arg| (*arg).to_owned()).collect();
    let node = NodeOptions { args, ..NodeOptions::default() };
    let set = [format!("nodes.on-data-loss={policy}"), "clients.default-user-rules=operator".into()];
    let args = set.into_iter().flat_map(|set| ["--set".to_owned(), set]).collect();
    let router = RouterOptions { args, nodes_may_be_down: true, ..RouterOptions::default() };
    let site = Site::router_only(2, &SiteOptions { node, router })?;
    until("the nodes serve", || site.client().cmd("DBSIZE") == int(0));
    Some(site)
}

/// Runs `switchyard nodes accept`. Returns its exit code and output.
fn accept(site: &Site, name: &str) -> (Option<i32>, String) {
    let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
    let output = command
        .args(["nodes", "accept", name, "--admin", &site.router().admin().to_string()])
        .output()
        .expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Writes a key of the first node through the router. Deletes no key of that node: until the next count, the node may be
/// empty because of such a deletion.
fn fill(site: &Site, client: &mut Client) -> String {
    let is_there = |key: &String| {
        assert_eq!(client.cmd(&format!("SET {key} v")), ok());
        let is_there = site.nodes()[0].cmd(&format!("EXISTS {key}")) == int(1);
        assert!(is_there || client.cmd(&format!("DEL {key}")) == int(1));
        is_there
    };
    (0..).map(|number| format!("key:{number}")).find(is_there).expect("a key of the node")
}

/// Returns the error about the held node.
fn held(client: &mut Client, key: &str) -> String {
    until("the node is held", || {
        let reply = client.cmd(&format!("GET {key}"));
        reply.error().filter(|e| e.contains("returned empty")).map(str::to_owned)
    })
}

/// Waits until the router has counted the keys of the first node, with a query after this call.
fn until_counted(site: &Site) {
    let asked = || {
        let stats = site.nodes()[0].cmd("INFO commandstats").text();
        let calls = stats
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_config|get:calls=")?.split(',').next()?.parse::<u64>().ok());
        calls.unwrap_or(0)
    };
    let before = asked();
    until("the router has counted", || asked() >= before + 3);
}

#[test]
fn an_empty_node_is_held_until_an_operator_accepts_it() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let name = site.nodes()[0].address().to_string();
    site.node_mut(0).restart();
    let error = held(&mut client, &key);
    assert!(error.starts_with(&format!("NODEDOWN {name}")), "{error}");
    // Writes, commands for all nodes, and other kinds of connections are refused as well.
    client.cmd(&format!("SET {key} new")).expect_error();
    client.cmd("DBSIZE").expect_error();
    client.cmd(&format!("SORT {key}")).expect_error();
    client.cmd("HELLO 3");
    client.cmd(&format!("GET {key}")).expect_error();
    client.cmd("HELLO 2");
    assert_eq!(site.nodes()[0].cmd("DBSIZE"), int(0));
    client.cmd("SWITCHYARD ACCEPT nobody:1").expect_error();
    assert_eq!(client.cmd(&format!("SWITCHYARD ACCEPT {name}")), ok());
    // After the reply, the node is served by every worker.
    for _ in 0..20 {
        assert_eq!(site.client().cmd(&format!("GET {key}")), Value::Nil);
    }
    // Accepting applies once: the next loss is held again.
    client.cmd(&format!("SET {key} again"));
    site.node_mut(0).restart();
    held(&mut client, &key);
    // Over the admin port, with the command line.
    let (code, error) = accept(&site, "nobody:1");
    assert!(code == Some(1) && error.contains("no node \"nobody:1\""), "{error}");
    assert_eq!(accept(&site, &name), (Some(0), String::new()));
    assert_eq!(client.cmd(&format!("GET {key}")), Value::Nil);
    site.router().process().expect_log(&["admin request", &format!("/api/v1/nodes/{name}/accept")]);
}

#[test]
fn a_held_node_is_served_when_its_keys_return() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    site.node_mut(0).restart();
    held(&mut client, &key);
    site.nodes()[0].cmd(&format!("SET {key} restored"));
    until("the node is served", || client.cmd(&format!("GET {key}")) == bulk("restored"));
}

/// One key of many is not enough, whether it is written before or after the router has found the node empty, or while
/// the router restarts.
#[test]
fn one_key_of_many_does_not_release_the_node() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let tag = site.tags()[0][0].clone();
    const KEYS: usize = 300;
    let keys: Vec<String> = (0..KEYS).map(|number| format!("{{{tag}}}{number}")).collect();
    keys.iter().for_each(|key| assert_eq!(client.cmd(&format!("SET {key} v")), ok()));
    until_counted(&site);
    site.node_mut(0).restart();
    held(&mut client, &keys[0]);
    let stays = |site: &Site, client: &mut Client| {
        let refused = until("it is found with a part", || {
            let reply = client.cmd(&format!("GET {}", keys[KEYS - 1]));
            Some(reply.error().expect("not nil").to_owned()).filter(|error| error.contains("returned with"))
        });
        let count = site.nodes()[0].cmd("DBSIZE").int();
        assert!(refused.contains(&format!("it returned with {count} of {KEYS} keys")), "{refused}");
    };
    site.nodes()[0].cmd(&format!("SET {} v", keys[0]));
    stays(&site, &mut client);
    // Half of the keys are back, and the router restarts.
    keys[..KEYS / 2].iter().for_each(|key| drop(site.nodes()[0].cmd(&format!("SET {key} v"))));
    let addresses: Vec<_> = site.nodes().iter().map(|node| node.address()).collect();
    site.router_mut().restart(&addresses);
    let mut client = site.client();
    stays(&site, &mut client);
    keys.iter().for_each(|key| drop(site.nodes()[0].cmd(&format!("SET {key} v"))));
    until("the node is served", || client.cmd(&format!("GET {}", keys[KEYS - 1])) == bulk("v"));
}

#[test]
fn by_default_a_persistent_node_that_returns_empty_is_held() {
    // With its data, the node is served as before.
    let Some(mut persistent) = site(true, "auto") else { return };
    let mut client = persistent.client();
    let key = fill(&persistent, &mut client);
    persistent.node_mut(0).restart();
    until("the node is served", || client.cmd(&format!("GET {key}")) == bulk("v"));
    // Without its data, it is held. FLUSHALL at the node and a rewrite simulate a lost disk. A count of keys between
    // them and the restart would look like a deletion.
    until_counted(&persistent);
    persistent.nodes()[0].cmd("FLUSHALL");
    persistent.node_mut(0).restart();
    held(&mut client, &key);
    // A cache is expected to return empty.
    let Some(mut cache) = site(false, "auto") else { return };
    let mut client = cache.client();
    let key = fill(&cache, &mut client);
    cache.node_mut(0).restart();
    until("the node is served", || client.cmd(&format!("GET {key}")) == Value::Nil);
}

#[test]
fn a_node_that_never_had_keys_is_not_held() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    site.node_mut(0).restart();
    until("both nodes are served", || client.cmd("DBSIZE") == int(0));
}

/// The router may end between the loss and the return: its knowledge of the node is in the state directory.
#[test]
fn a_node_is_held_after_a_restart_of_the_router() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let addresses: Vec<_> = site.nodes().iter().map(|node| node.address()).collect();
    site.router().process().signal(rustix::process::Signal::TERM);
    site.router_mut().process_mut().wait(std::time::Duration::from_secs(30));
    site.node_mut(0).restart();
    site.router_mut().start_again(&addresses);
    let mut client = site.client();
    held(&mut client, &key);
    // Held before and after the restart.
    site.router_mut().restart(&addresses);
    let mut client = site.client();
    held(&mut client, &key);
    assert_eq!(accept(&site, &addresses[0].to_string()), (Some(0), String::new()));
    until("the node is served", || client.cmd(&format!("GET {key}")) == Value::Nil);
    // With other keys, the node is protected as before.
    assert_eq!(client.cmd(&format!("SET {key} again")), ok());
    site.router_mut().restart(&addresses);
    let mut client = site.client();
    until("the node is served", || client.cmd(&format!("GET {key}")) == bulk("again"));
}

#[test]
fn accepting_a_node_in_advance_has_no_effect() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let name = site.nodes()[0].address().to_string();
    let (code, error) = accept(&site, &name);
    assert!(code == Some(1) && error.contains("waits to be accepted"), "{error}");
    assert!(client.cmd(&format!("SWITCHYARD ACCEPT {name}")).expect_error().contains("waits to be accepted"));
    site.node_mut(0).restart();
    held(&mut client, &key);
}

/// A node's persistence can change while its process runs.
#[test]
fn persistence_that_is_enabled_later_counts() {
    let Some(mut site) = site(false, "auto") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    assert_eq!(site.nodes()[0].cmd("CONFIG SET appendonly yes"), ok());
    until_counted(&site);
    site.node_mut(0).restart();
    held(&mut client, &key);
}

#[test]
fn a_node_without_slots_is_not_held() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    fill(&site, &mut client);
    let name = site.nodes()[0].address().to_string();
    crate::movectl::done(site.router(), &format!("nodes drain {name} --wait --goal fast --durability memory"));
    site.node_mut(0).restart();
    until("both nodes are served", || client.cmd("DBSIZE") == int(1));
}

#[test]
fn no_move_starts_from_or_to_a_held_node() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    site.node_mut(0).restart();
    held(&mut client, &key);
    let slot = slot(key.as_bytes());
    for orders in [
        vec!["move".to_owned(), "--slots".to_owned(), slot.to_string(), "--to".to_owned(), names[1].clone()],
        vec![
            "move".to_owned(),
            "--from".to_owned(),
            names[1].clone(),
            "--all".to_owned(),
            "--to".to_owned(),
            names[0].clone(),
        ],
        vec!["nodes".to_owned(), "drain".to_owned(), names[1].clone()],
    ] {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        let output =
            command.args(&orders).args(["--admin", &site.router().admin().to_string()]).output().expect("it runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("returned empty"), "{orders:?}: {said}");
    }
    assert!(held(&mut client, &key).contains("returned empty"), "still");
    let mut doctor = tied(env!("CARGO_BIN_EXE_switchyard"));
    doctor.args(["doctor", "--node", &names[0], "--node", &names[1], "--state-dir"]).arg(site.router().state_dir());
    let output = doctor.args(["--admin", &site.router().admin().to_string()]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains(&format!("ERROR    {}  not served: ", names[0])), "{said}");
    assert_eq!(client.cmd(&format!("SWITCHYARD ACCEPT {}", names[0])), ok());
    assert_eq!(client.cmd(&format!("GET {key}")), Value::Nil);
}

/// For example, its disk is not mounted: new data would be lost when that is corrected, and moved keys would count as
/// lost.
#[test]
fn a_move_waits_for_a_target_that_returned_without_moved_keys() {
    let Some(mut site) = site(true, "auto") else { return };
    let mut client = site.client();
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let tags = site.tags();
    let keys: Vec<String> = (0..800).map(|number| format!("{{{}}}{number}", tags[0][number % tags[0].len()])).collect();
    for key in &keys {
        assert_eq!(client.cmd(&format!("SET {key} {key}")), ok());
    }
    let order = [
        "move",
        "--from",
        &names[0],
        "--to",
        &names[1],
        "--all",
        "--max-rate",
        "20kb",
        "--admin",
        &site.router().admin().to_string(),
    ];
    assert!(tied(env!("CARGO_BIN_EXE_switchyard")).args(order).status().expect("it runs").success());
    until("keys have moved", || site.nodes()[1].cmd("DBSIZE").int() > 100);
    // The node's data returns later.
    let data = site.nodes()[1].append_only_file();
    site.node_mut(1).kill();
    let aside = data.with_extension("aside");
    std::fs::rename(&data, &aside).expect("renamed");
    site.node_mut(1).restart();
    until("it is held", || {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        let output = command.args(["status", "--admin", &site.router().admin().to_string()]).output().expect("it runs");
        String::from_utf8_lossy(&output.stdout).contains("returned")
    });
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(site.nodes()[1].cmd("DBSIZE"), int(0), "nothing is stored there");
    site.node_mut(1).kill();
    std::fs::remove_dir_all(&data).expect("removed");
    std::fs::rename(&aside, &data).expect("renamed");
    site.node_mut(1).restart();
    for key in &keys {
        until("each key is there", || client.cmd(&format!("GET {key}")) == bulk(key));
    }
}

/// The key count of a node is queried only periodically. Keys stored by a move since then count as well.
#[test]
fn keys_just_stored_by_a_move_are_missed() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let tags = site.tags();
    let keys: Vec<String> = (0..500).map(|number| format!("{{{}}}{number}", tags[0][number % tags[0].len()])).collect();
    keys.iter().for_each(|key| assert_eq!(client.cmd(&format!("SET {key} v")), ok()));
    let admin = site.router().admin().to_string();
    let order =
        ["move", "--from", &names[0], "--to", &names[1], "--all", "--goal", "fast", "--wait", "--admin", &admin];
    assert!(tied(env!("CARGO_BIN_EXE_switchyard")).args(order).output().expect("it runs").status.success());
    site.node_mut(1).restart();
    assert!(held(&mut client, &keys[0]).contains("returned empty"));
}

#[test]
fn keys_just_removed_by_a_move_are_not_missed() {
    let Some(mut site) = site(true, "auto") else { return };
    let mut client = site.client();
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let tags = site.tags()[0].clone();
    let stays = format!("{{{}}}stays", tags[1]);
    assert_eq!(client.cmd(&format!("SET {stays} v")), ok());
    (0..300).for_each(|number| assert_eq!(client.cmd(&format!("SET {{{}}}{number} v", tags[0])), ok()));
    // The router counts all of them.
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let admin = site.router().admin().to_string();
    let slots = slot(tags[0].as_bytes()).to_string();
    let order = [
        "move", "--from", &names[0], "--to", &names[1], "--slots", &slots, "--goal", "fast", "--wait", "--admin",
        &admin,
    ];
    assert!(tied(env!("CARGO_BIN_EXE_switchyard")).args(order).output().expect("it runs").status.success());
    site.node_mut(0).restart();
    until("the remaining key is served", || client.cmd(&format!("GET {stays}")) == bulk("v"));
}

/// Keys that were deleted, flushed or have expired are not missed.
#[test]
fn deleted_and_expired_keys_are_not_missed() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let served =
        |client: &mut Client| until("the node is served", || client.cmd(&format!("SET {key} v PX 8000")) == ok());
    // A write may be in flight at the first count.
    let twice = |site: &Site| (0..2).for_each(|_| until_counted(site));
    for line in [format!("DEL {key}"), "FLUSHALL".to_owned()] {
        client.cmd(&line);
        twice(&site);
        site.node_mut(0).restart();
        served(&mut client);
    }
    until_counted(&site);
    site.node_mut(0).kill();
    // The key must expire in the meantime.
    std::thread::sleep(std::time::Duration::from_millis(8100));
    site.node_mut(0).restart();
    served(&mut client);
    site.router().process().expect_log(&["node returned empty, and is served", "mean time to live"]);
}
