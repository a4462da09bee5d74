//! What an operator of one big server asks: the slow log with the clients' names, and settings of the router and of all nodes.

use std::time::Duration;

use crate::support::{Client, RouterOptions, Site, SiteOptions, Value, bulk, int, ok};

fn site(nodes: usize, args: &[&str]) -> Option<Site> {
    let router = RouterOptions { args: args.iter().map(|a| (*a).to_owned()).collect(), ..RouterOptions::default() };
    Site::router_only(nodes, &SiteOptions { router, ..SiteOptions::default() })
}

#[test]
fn the_slow_log_names_the_client_and_says_where_the_time_went() {
    let Some(site) = site(2, &["--set", "log.slowlog-log-slower-than=100ms", "--set", "log.slowlog-max-len=5"]) else { return };
    let mut client = site.client();
    let address = client.stream().local_addr().expect("an address").to_string();
    client.cmd("CLIENT SETNAME billing");
    assert_eq!(client.cmd("SET quick v"), ok());
    assert_eq!(client.cmd("SLOWLOG LEN"), int(0), "what is quick is not entered");
    let tags = site.tags();
    let key = format!("{{{}}}slow", tags[0][0]);
    client.cmd(&format!("SET {key} {}", "x".repeat(200)));
    site.nodes()[0].freeze();
    let long = "y".repeat(300);
    client.post(&format!("SET {key} {long}"));
    // Behind it, on another path: held back until the first is answered.
    client.post(&format!("SORT {key}list"));
    std::thread::sleep(Duration::from_millis(300));
    site.nodes()[0].thaw();
    assert_eq!(client.reply(), ok());
    client.reply();
    let mut other = site.client();
    let log = other.cmd("SLOWLOG GET");
    let entry = log
        .items()
        .iter()
        .find(|e| e.items()[3].items()[0] == bulk("SET"))
        .unwrap_or_else(|| panic!("the slow command is not in {log:?}"))
        .items()
        .to_vec();
    assert_eq!(entry.len(), 6, "exactly Redis's fields: some clients count them");
    assert!(entry[2].int() >= 200_000, "{entry:?}");
    assert_eq!(entry[3].items()[1], bulk(key.as_str()));
    assert_eq!(entry[3].items()[2], bulk(format!("{}... (172 more bytes)", "y".repeat(128))), "values are cut as Redis cuts them");
    assert_eq!((&entry[4], &entry[5]), (&bulk(address.as_str()), &bulk("billing")));
    other.cmd("HELLO 3");
    let details = other.cmd("SWITCHYARD SLOWLOG -1");
    let set = details.items().iter().find(|e| e.field("command").items()[0] == bulk("SET")).expect("the entry").clone();
    assert_eq!(set.field("node"), bulk(site.nodes()[0].address().to_string()));
    assert_eq!(set.field("user"), bulk("default"));
    assert!(set.field("node_us").int() >= 200_000, "{set:?}");
    assert_eq!(set.field("total_us").int(), set.field("held_us").int() + set.field("queue_us").int() + set.field("node_us").int());
    assert!(other.cmd("SLOWLOG LEN").int() <= 5);
    assert_eq!(other.cmd("SLOWLOG RESET"), ok());
    assert_eq!(other.cmd("SLOWLOG LEN"), int(0));
    assert_eq!(other.cmd("SLOWLOG GET 0"), Value::Array(vec![]));
    for line in ["SLOWLOG GET -2", "SLOWLOG GET x"] {
        assert_eq!(other.cmd(line), Value::Error("ERR count should be greater than or equal to -1".into()), "{line}");
    }
}

#[test]
fn the_slow_log_has_what_travels_on_connections_of_its_own() {
    let Some(site) = site(1, &["--set", "log.slowlog-log-slower-than=200ms", "--set", "nodes.large-value=16kb"]) else { return };
    let mut client = site.client();
    // Frozen before it is asked: a node that gets the processor first would have answered.
    let while_frozen = |milliseconds, ask: &mut (dyn FnMut() + Send)| {
        site.nodes()[0].freeze();
        std::thread::scope(|scope| {
            scope.spawn(ask); // what is large is not taken before the node goes on
            std::thread::sleep(Duration::from_millis(milliseconds));
            site.nodes()[0].thaw();
        });
    };
    let entries = |name: &str| -> Vec<Vec<Value>> {
        let log = site.client().cmd("SLOWLOG GET -1");
        let entries = log.items().iter().map(|entry| entry.items().to_vec());
        entries.filter(|entry| entry[3].items()[0] == bulk(name)).collect()
    };
    // A large value, of which nothing is kept once it is sent. Small enough for the buffers on its way: what an upload takes is not the node's time.
    let large = "y".repeat(64_000);
    while_frozen(500, &mut || client.send(&["SET", "big", &large]));
    assert_eq!(client.reply(), ok());
    let found = entries("SET");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0][2].int() >= 200_000 && found[0][3].items()[1] == bulk("big"), "{found:?}");
    assert_eq!(found[0][3].items().len(), 3, "{found:?}");
    assert_eq!(found[0][4], bulk(client.stream().local_addr().expect("an address").to_string()));
    // A transaction that watches.
    assert_eq!(client.cmd("WATCH k"), ok());
    client.cmd("MULTI");
    client.cmd("SET k v");
    while_frozen(500, &mut || client.post("EXEC"));
    assert_eq!(client.reply(), Value::Array(vec![ok()]));
    assert_eq!(entries("EXEC").len(), 1);
    // What a command waits because it was asked to is not slow; what it waits beyond that is.
    assert_eq!(client.cmd("BLPOP q 0.5"), Value::Nil);
    assert_eq!(entries("BLPOP"), Vec::<Vec<Value>>::new());
    while_frozen(700, &mut || client.post("BLPOP q 0.1"));
    assert_eq!(client.reply(), Value::Nil);
    let found = entries("BLPOP");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0][3], Value::Array(vec![bulk("BLPOP"), bulk("q"), bulk("0.1")]));
}

#[test]
fn the_slow_log_keeps_no_arguments_where_told_so() {
    let Some(site) =
        site(2, &["--set", "log.slowlog-log-slower-than=0s", "--set", "log.slowlog-arguments=false", "--set", "log.slowlog-max-len=3"])
    else {
        return;
    };
    let mut client = site.client();
    for i in 0..10 {
        client.cmd(&format!("SET secret{i} v"));
    }
    assert_eq!(client.cmd("SLOWLOG LEN"), int(3));
    let log = client.cmd("SLOWLOG GET -1");
    for entry in log.items() {
        assert_eq!(entry.items()[3].items().len(), 1, "{entry:?}");
    }
    let ids: Vec<i64> = log.items().iter().map(|e| e.items()[0].int()).collect();
    assert!(ids.windows(2).all(|w| w[0] > w[1]), "latest first: {ids:?}");
}

#[test]
fn a_length_of_zero_switches_the_slow_log_off() {
    let Some(site) = site(2, &["--set", "log.slowlog-max-len=0", "--set", "log.slowlog-log-slower-than=0s"]) else { return };
    let mut client = site.client();
    client.cmd("SET a 1");
    assert_eq!(client.cmd("SLOWLOG LEN"), int(0), "a length of 0 switches it off");
}

fn get(client: &mut Client, name: &str) -> Value {
    client.cmd(&format!("CONFIG GET {name}")).field(name)
}

#[test]
fn config_get_shows_the_routers_settings_and_the_nodes() {
    let Some(site) = site(2, &["--set", "clients.max-clients=77"]) else { return };
    let mut client = site.client();
    assert_eq!(get(&mut client, "maxclients"), bulk("77"));
    assert_eq!(get(&mut client, "port"), bulk(site.address().port().to_string()));
    for node in site.nodes() {
        node.cmd("CONFIG SET maxmemory 104857600");
        node.cmd("CONFIG SET requirepass \"\"");
    }
    assert_eq!(get(&mut client, "maxmemory"), bulk("104857600"), "the nodes' own value where they agree");
    site.nodes()[1].cmd("CONFIG SET maxmemory 209715200");
    let text = get(&mut client, "maxmemory").text();
    assert!(text.starts_with("nodes differ: ") && text.contains("104857600") && text.contains("209715200"), "{text}");
    for secret in ["requirepass", "masterauth", "dir", "logfile", "tls-key-file"] {
        assert_eq!(client.cmd(&format!("CONFIG GET {secret}")), Value::Array(vec![]), "{secret}");
    }
    assert!(client.cmd("CONFIG GET *").items().len() > 100);
}

#[test]
fn config_set_reaches_every_node_where_it_is_allowed() {
    let Some(site) = site(2, &["--set", "nodes.config-set=maxmemory*,slowlog*,dir"]) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("CONFIG SET maxmemory 104857600 maxmemory-policy allkeys-lru"), ok());
    for node in site.nodes() {
        assert_eq!(node.cmd("CONFIG GET maxmemory").items()[1], bulk("104857600"));
        assert_eq!(node.cmd("CONFIG GET maxmemory-policy").items()[1], bulk("allkeys-lru"));
    }
    for line in ["CONFIG SET appendonly yes", "CONFIG SET dir /tmp", "CONFIG SET maxmemory 1 save x", "CONFIG SET requirepass x"] {
        assert!(client.cmd(line).expect_error().contains("CONFIG SET"), "{line}");
    }
    client.cmd("CONFIG SET maxmemory").expect_error();
    assert!(client.cmd("CONFIG SET maxmemory nonsense").expect_error().contains("maxmemory"));
    assert_eq!(client.cmd("CONFIG SET slowlog-log-slower-than 0 slowlog-max-len 2"), ok());
    assert_eq!(get(&mut client, "slowlog-log-slower-than"), bulk("0"));
    for i in 0..5 {
        client.cmd(&format!("SET s{i} v"));
    }
    assert_eq!(client.cmd("SLOWLOG LEN"), int(2));
    assert_eq!(client.cmd("CONFIG SET slowlog-log-slower-than -1"), ok());
    assert_eq!(get(&mut client, "slowlog-log-slower-than"), bulk("-1"));
    client.cmd("CONFIG SET slowlog-log-slower-than fast").expect_error();
    // The nodes' own logs are not the router's.
    assert_eq!(site.nodes()[0].cmd("CONFIG GET slowlog-max-len").items()[1], bulk("128"));
}

#[test]
fn a_small_keyspace_is_scanned_in_one_call() {
    let Some(site) = site(3, &[]) else { return };
    let mut client = site.client();
    client.cmd("SET k v");
    assert_eq!(client.cmd("SCAN 0"), Value::Array(vec![bulk("0"), Value::Array(vec![bulk("k")])]));
    assert_eq!(client.cmd("SCAN 0 TYPE string"), Value::Array(vec![bulk("0"), Value::Array(vec![bulk("k")])]));
    client.cmd("DEL k");
    assert_eq!(client.cmd("SCAN 0 COUNT 100"), Value::Array(vec![bulk("0"), Value::Array(vec![])]));
    client.cmd("SCAN 0 COUNT").expect_error();
    client.cmd("SCAN 0 COUNT 0").expect_error();
    client.cmd("SCAN 0 BOGUS x").expect_error();
}

/// The first use of a database asks the nodes; a SELECT behind it must not be undone by their answer.
#[test]
fn a_select_behind_another_one_wins() {
    let site = Site::new(2);
    for round in 0..10 {
        let mut client = site.client();
        client.post(&format!("SELECT {}", 3 + round));
        client.post("SELECT 0");
        client.post(&format!("SET where{round} 0"));
        client.post("SELECT 1");
        client.post("SELECT 2");
        client.post(&format!("SET where{round} 2"));
        for _ in 0..6 {
            assert_eq!(client.reply(), ok());
        }
        assert_eq!(client.cmd(&format!("GET where{round}")), bulk("2"));
        client.cmd("SELECT 0");
        assert_eq!(client.cmd(&format!("GET where{round}")), bulk("0"), "round {round}");
    }
}

#[test]
fn info_adds_up_what_nodes_count_of_commands_and_errors() {
    let Some(site) = site(2, &[]) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("CONFIG RESETSTAT"), ok());
    let tags = site.tags();
    for (node, times) in [(0, 3), (1, 2)] {
        let key = format!("{{{}}}k", tags[node][0]);
        client.cmd(&format!("SET {key} text"));
        for _ in 0..times {
            client.cmd(&format!("STRLEN {key}"));
            assert!(client.cmd(&format!("LPUSH {key} x")).error().is_some());
        }
        client.cmd(&format!("EVAL \"return redis.error_reply('MINE no')\" 1 {key}"));
    }
    let commands = client.cmd("INFO commandstats").text();
    let of = |name: &str| commands.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned).unwrap_or_default();
    assert!(of("cmdstat_strlen:").starts_with("calls=5,"), "{commands}");
    assert!(of("cmdstat_lpush:").ends_with(",rejected_calls=0,failed_calls=5"), "{commands}");
    let errors = client.cmd("INFO errorstats").text();
    for line in ["# Errorstats", "errorstat_MINE:count=2", "errorstat_WRONGTYPE:count=5"] {
        assert!(errors.lines().any(|l| l == line), "{errors}");
    }
    assert!(client.cmd("INFO").text().contains("# Errorstats"), "shown when no section is named");
    assert!(!client.cmd("INFO").text().contains("# Commandstats"), "not shown, as in Redis");
}
