//! Commands missing in the router's table: commands of a module, and commands renamed by an operator.
//!
//! The module is built here with the C compiler, which Rust's linker needs anyway. It declares its part of Redis's
//! module interface itself, because Debian's packages lack the header.

use std::process::Command;

use tempfile::TempDir;

use crate::support::slots::slot;
use crate::support::{Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple};

const MODULE: &str = include_str!("scripts/probe_module.c");

/// Builds the module, and starts nodes that load it.
fn site_with_module(nodes: usize) -> Option<(Site, TempDir)> {
    let dir = TempDir::new().expect("a directory");
    let source = dir.path().join("probe.c");
    let library = dir.path().join("probe.so");
    std::fs::write(&source, MODULE).expect("source");
    let output = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .output()
        .expect("a C compiler named cc (rustc needs it as its linker)");
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    let options = SiteOptions {
        node: NodeOptions { config: format!("loadmodule {}\n", library.display()), ..NodeOptions::default() },
        ..SiteOptions::default()
    };
    Some((Site::router_only(nodes, &options)?, dir))
}

#[test]
fn module_commands_use_the_nodes_key_specifications() {
    let Some((site, _dir)) = site_with_module(3) else {
        return;
    };
    let mut client = site.client();
    // Nodes are queried for their commands when they come up, and no command waits for the reply.
    crate::support::until("the commands are known", || client.cmd("probe.put k v") == ok());
    for i in 0..60 {
        // One key as first argument.
        assert_eq!(client.cmd(&format!("probe.put k{i} v{i}")), ok());
        assert_eq!(client.cmd(&format!("GET k{i}")), bulk(format!("v{i}")), "PROBE.PUT went to another node than GET");
        assert_eq!(client.cmd(&format!("PROBE.PUT {{x{i}}}a {i}")), ok());
        // One key as second argument.
        assert_eq!(client.cmd(&format!("probe.second option {{x{i}}}a")), bulk(i.to_string()));
    }
    // Several keys in one slot, and in two.
    assert_eq!(client.cmd("probe.pair {p}one {p}two"), int(2));
    assert_ne!(slot(b"one"), slot(b"two"));
    assert_eq!(client.cmd("probe.pair one two"), int(2));
    // The number of keys is an argument.
    assert_eq!(client.cmd("probe.count 3 {c}1 {c}2 {c}3 and more arguments"), int(3));
    assert_eq!(client.cmd("probe.count 2 four five"), int(2));
    for i in 0..20 {
        assert_eq!(client.cmd(&format!("probe.count 1 k{i} whatever")), int(1));
    }
    // Arity and errors come from the node.
    assert!(client.cmd("probe.put k").expect_error().contains("wrong number of arguments"));
    // In a pipeline with other commands, in both protocols.
    client.cmd("HELLO 3");
    for i in 0..200 {
        client.post(&format!("probe.put pipe{i} {i}"));
        client.post(&format!("GET pipe{i}"));
    }
    for i in 0..200 {
        assert_eq!(client.reply(), ok());
        assert_eq!(client.reply(), bulk(i.to_string()));
    }
    // Without keys, no node can be chosen.
    let error = client.cmd("probe.keyless");
    assert!(error.expect_error().to_lowercase().contains("probe.keyless"), "{error:?}");
}

#[test]
fn a_module_loaded_later_is_detected() {
    let Some((site, dir)) = site_with_module(1) else {
        return;
    };
    // A second site without the module. Its node loads the module while the router runs.
    drop(site);
    let Some(site) = Site::router_only(
        2,
        &SiteOptions {
            node: NodeOptions { args: vec!["--enable-module-command".into(), "yes".into()], ..NodeOptions::default() },
            ..SiteOptions::default()
        },
    ) else {
        return;
    };
    let mut client = site.client();
    assert!(client.cmd("probe.put k v").expect_error().starts_with("ERR unknown command 'probe.put'"));
    for node in site.nodes() {
        let reply = node.client().call(&["MODULE", "LOAD", &dir.path().join("probe.so").display().to_string()]);
        assert_eq!(reply, ok());
        // The router queries the commands when it connects.
        node.cmd("CLIENT KILL TYPE normal SKIPME yes");
    }
    crate::support::until("the commands are known", || client.cmd("probe.put k v") == ok());
}

/// `rename-command` gives a command another name, which the nodes do not list. So the router cannot know its keys: it
/// must reply with a server's error for unknown commands, rather than guess a node.
#[test]
fn renamed_commands_are_unknown_and_removed_ones_get_the_nodes_error() {
    let config = "rename-command HSET secret.hset\nrename-command LPUSH \"\"\nrename-command FLUSHALL \"\"\n";
    let options =
        SiteOptions { node: NodeOptions { config: config.into(), ..NodeOptions::default() }, ..SiteOptions::default() };
    let site = Site::with(2, &options);
    let plain = Node::start(&options.node);
    let (mut client, mut reference) = (site.client(), plain.client());
    for line in ["HSET h f v", "LPUSH l x", "GET k", "SET k v", "RPUSH l x", "LRANGE l 0 -1"] {
        assert_eq!(client.cmd(line), reference.cmd(line), "{line}");
    }
    client.cmd("FLUSHALL").expect_error();
    assert_eq!(client.cmd("PING"), simple("PONG"));
    if !crate::support::direct() {
        let error = client.cmd("secret.hset h f v");
        assert!(error.expect_error().contains("secret.hset"), "{error:?}");
    }
}

/// Operators rename dangerous commands. The router must still serve data.
#[test]
fn a_router_works_with_nodes_that_hide_admin_commands() {
    let config = "rename-command CONFIG \"\"\nrename-command DEBUG \"\"\nrename-command KEYS \"\"\nrename-command SCRIPT \"\"\n\
                  rename-command MODULE \"\"\nrename-command SLOWLOG \"\"\nrename-command SHUTDOWN \"\"\n";
    let options = SiteOptions {
        node: NodeOptions { config: config.into(), ..NodeOptions::default() },
        router: RouterOptions::default(),
    };
    let Some(site) = Site::router_only(2, &options) else {
        return;
    };
    let mut client = site.client();
    for i in 0..40 {
        assert_eq!(client.cmd(&format!("SET k{i} {i}")), ok());
    }
    assert_eq!(client.cmd("MGET k1 k2 k3"), Value::Array(vec![bulk("1"), bulk("2"), bulk("3")]));
    assert_eq!(client.cmd("DBSIZE"), int(40));
    assert!(client.cmd("KEYS *").expect_error().contains("unknown command"));
    assert_eq!(client.cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 k7"), bulk("7"));
    assert!(client.cmd("INFO").text().contains("db0:keys=40"));
}
