//! A primary that comes back without its keys is not served blindly.

use crate::support::process::tied;
use crate::support::{Client, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, until};

fn site(persistent: bool, policy: &str) -> Option<Site> {
    let args = if persistent { vec!["--appendonly".to_owned(), "yes".to_owned()] } else { Vec::new() };
    let node = NodeOptions { args, ..NodeOptions::default() };
    let set = [format!("nodes.empty-return={policy}"), "clients.default-user-rules=operator".into()];
    let args = set.into_iter().flat_map(|set| ["--set".to_owned(), set]).collect();
    let router = RouterOptions { args, ..RouterOptions::default() };
    Site::router_only(2, &SiteOptions { node, router })
}

/// A key at the first node, written through the router.
fn fill(site: &Site, client: &mut Client) -> String {
    let key = format!("{{{}}}k", site.tags()[0][0]);
    assert_eq!(client.cmd(&format!("SET {key} v")), ok());
    key
}

/// The error about the node that came back empty.
fn held(client: &mut Client, key: &str) -> String {
    until("the node is held", || {
        let reply = client.cmd(&format!("GET {key}"));
        reply.error().filter(|e| e.contains("came back empty")).map(str::to_owned)
    })
}

#[test]
fn it_is_held_until_somebody_accepts_it() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    let name = site.nodes()[0].address().to_string();
    site.node_mut(0).restart();
    let error = held(&mut client, &key);
    assert!(error.starts_with(&format!("NODEDOWN {name}")), "{error}");
    // Neither writes, nor commands for all nodes, nor other kinds of connection get through.
    client.cmd(&format!("SET {key} new")).expect_error();
    client.cmd("DBSIZE").expect_error();
    client.cmd(&format!("SORT {key}")).expect_error();
    client.cmd("HELLO 3");
    client.cmd(&format!("GET {key}")).expect_error();
    client.cmd("HELLO 2");
    assert_eq!(site.nodes()[0].cmd("DBSIZE"), int(0));
    client.cmd("SWITCHYARD ACCEPT nobody:1").expect_error();
    assert_eq!(client.cmd(&format!("SWITCHYARD ACCEPT {name}")), ok());
    until("the node is served", || (client.cmd(&format!("GET {key}")) == Value::Nil).then_some(()));
    // Accepted once: the next loss is another one.
    client.cmd(&format!("SET {key} again"));
    site.node_mut(0).restart();
    held(&mut client, &key);
    // Over the admin port, by the command line.
    let accept = |name: &str| {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        let output = command.args(["nodes", "accept", name, "--admin", &site.router().admin().to_string()]).output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, error) = accept("nobody:1");
    assert!(code == Some(1) && error.contains("no node \"nobody:1\""), "{error}");
    assert_eq!(accept(&name), (Some(0), String::new()));
    until("the node is served", || (client.cmd(&format!("GET {key}")) == Value::Nil).then_some(()));
    let log = site.router().process().log();
    assert!(log.contains("admin request") && log.contains(&format!("/api/v1/nodes/{name}/accept")), "{log}");
}

#[test]
fn it_is_served_once_it_has_keys_again() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    let key = fill(&site, &mut client);
    site.node_mut(0).restart();
    held(&mut client, &key);
    site.nodes()[0].cmd(&format!("SET {key} restored"));
    until("the node is served", || (client.cmd(&format!("GET {key}")) == bulk("restored")).then_some(()));
}

#[test]
fn by_default_it_is_held_where_it_should_have_kept_its_data() {
    // With its data: served as ever.
    let Some(mut persistent) = site(true, "auto") else { return };
    let mut client = persistent.client();
    let key = fill(&persistent, &mut client);
    persistent.node_mut(0).restart();
    until("the node is served", || (client.cmd(&format!("GET {key}")) == bulk("v")).then_some(()));
    // Without: held. FLUSHALL past the router, and a rewrite, stand for a lost disk.
    persistent.nodes()[0].cmd("FLUSHALL");
    persistent.node_mut(0).restart();
    held(&mut client, &key);
    // A cache is expected to come back empty.
    let Some(mut cache) = site(false, "auto") else { return };
    let mut client = cache.client();
    let key = fill(&cache, &mut client);
    cache.node_mut(0).restart();
    until("the node is served", || (client.cmd(&format!("GET {key}")) == Value::Nil).then_some(()));
}

#[test]
fn a_node_that_never_had_keys_is_not_held() {
    let Some(mut site) = site(false, "hold") else { return };
    let mut client = site.client();
    site.node_mut(0).restart();
    until("both nodes are served", || (client.cmd("DBSIZE") == int(0)).then_some(()));
}
