//! Requests of an operator used to a single server: the slow log with client names, and settings of the router and of
//! all nodes.

use std::time::Duration;

use crate::support::client::TIMEOUT;
use crate::support::{Client, Node, RouterOptions, Site, SiteOptions, Value, bulk, direct, int, ok, simple, until};

fn site(nodes: usize, args: &[&str]) -> Option<Site> {
    Site::router_only(nodes, &SiteOptions::router(RouterOptions::args(args)))
}

#[test]
fn the_slow_log_has_the_client_and_the_phases() {
    let Some(site) = site(2, &["--set", "log.slowlog-log-slower-than=100ms", "--set", "log.slowlog-max-len=5"]) else {
        return;
    };
    let mut client = site.client();
    let address = client.stream().local_addr().expect("an address").to_string();
    client.cmd("CLIENT SETNAME billing");
    assert_eq!(client.cmd("SET quick v"), ok());
    assert_eq!(client.cmd("SLOWLOG LEN"), int(0), "fast commands are not entered");
    let tags = site.tags();
    let key = format!("{{{}}}slow", tags[0][0]);
    client.cmd(&format!("SET {key} {}", "x".repeat(200)));
    site.nodes()[0].freeze();
    let long = "y".repeat(300);
    client.post(&format!("SET {key} {long}"));
    // The next command uses another path: held until the first is answered.
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
    assert_eq!(
        entry[3].items()[2],
        bulk(format!("{}... (172 more bytes)", "y".repeat(128))),
        "values are cut as Redis cuts them"
    );
    assert_eq!((&entry[4], &entry[5]), (&bulk(address.as_str()), &bulk("billing")));
    other.cmd("HELLO 3");
    let details = other.cmd("SWITCHYARD SLOWLOG -1");
    let set = details.items().iter().find(|e| e.field("command").items()[0] == bulk("SET")).expect("the entry").clone();
    assert_eq!(set.field("node"), bulk(site.nodes()[0].address().to_string()));
    assert_eq!(set.field("user"), bulk("default"));
    assert!(set.field("node_us").int() >= 200_000, "{set:?}");
    assert_eq!(
        set.field("total_us").int(),
        set.field("held_us").int() + set.field("queue_us").int() + set.field("node_us").int()
    );
    assert!(other.cmd("SLOWLOG LEN").int() <= 5);
    assert_eq!(other.cmd("SLOWLOG RESET"), ok());
    assert_eq!(other.cmd("SLOWLOG LEN"), int(0));
    assert_eq!(other.cmd("SLOWLOG GET 0"), Value::Array(vec![]));
    for line in ["SLOWLOG GET -2", "SLOWLOG GET x"] {
        assert_eq!(other.cmd(line), Value::Error("ERR count should be greater than or equal to -1".into()), "{line}");
    }
}

#[test]
fn the_slow_log_has_commands_on_separate_connections() {
    let Some(site) = site(1, &["--set", "log.slowlog-log-slower-than=200ms", "--set", "nodes.large-value=16kb"]) else {
        return;
    };
    let mut client = site.client();
    // Freeze before sending: otherwise a node that is scheduled first would reply.
    let while_frozen = |milliseconds, ask: &mut (dyn FnMut() + Send)| {
        site.nodes()[0].freeze();
        std::thread::scope(|scope| {
            scope.spawn(ask); // a large request is not accepted before the node is resumed
            std::thread::sleep(Duration::from_millis(milliseconds));
            site.nodes()[0].thaw();
        });
    };
    let entries = |name: &str| -> Vec<Vec<Value>> {
        let log = site.client().cmd("SLOWLOG GET -1");
        let entries = log.items().iter().map(|entry| entry.items().to_vec());
        entries.filter(|entry| entry[3].items()[0] == bulk(name)).collect()
    };
    // A large value, which is not stored after it is sent. Small enough for the socket buffers, because the duration of
    // an upload does not count as the node's time.
    let large = "y".repeat(64_000);
    while_frozen(500, &mut || client.send(&["SET", "big", &large]));
    assert_eq!(client.reply(), ok());
    let found = entries("SET");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0][2].int() >= 200_000 && found[0][3].items()[1] == bulk("big"), "{found:?}");
    assert_eq!(found[0][3].items().len(), 3, "{found:?}");
    assert_eq!(found[0][4], bulk(client.stream().local_addr().expect("an address").to_string()));
    // A transaction with WATCH.
    assert_eq!(client.cmd("WATCH k"), ok());
    client.cmd("MULTI");
    client.cmd("SET k v");
    while_frozen(500, &mut || client.post("EXEC"));
    assert_eq!(client.reply(), Value::Array(vec![ok()]));
    assert_eq!(entries("EXEC").len(), 1);
    // The requested timeout of a blocking command does not count as slow, but any longer wait does.
    assert_eq!(client.cmd("BLPOP q 0.5"), Value::Nil);
    assert_eq!(entries("BLPOP"), Vec::<Vec<Value>>::new());
    while_frozen(700, &mut || client.post("BLPOP q 0.1"));
    assert_eq!(client.reply(), Value::Nil);
    let found = entries("BLPOP");
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0][3], Value::Array(vec![bulk("BLPOP"), bulk("q"), bulk("0.1")]));
}

#[test]
fn the_slow_log_omits_arguments_if_configured() {
    let Some(site) = site(
        2,
        &[
            "--set",
            "log.slowlog-log-slower-than=0s",
            "--set",
            "log.slowlog-arguments=false",
            "--set",
            "log.slowlog-max-len=3",
        ],
    ) else {
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
fn a_length_of_zero_disables_the_slow_log() {
    let Some(site) = site(2, &["--set", "log.slowlog-max-len=0", "--set", "log.slowlog-log-slower-than=0s"]) else {
        return;
    };
    let mut client = site.client();
    client.cmd("SET a 1");
    assert_eq!(client.cmd("SLOWLOG LEN"), int(0), "a length of 0 switches it off");
}

fn get(client: &mut Client, name: &str) -> Value {
    client.cmd(&format!("CONFIG GET {name}")).field(name)
}

#[test]
fn config_get_shows_the_settings_of_router_and_nodes() {
    let Some(site) = site(2, &["--set", "clients.max-clients=77"]) else { return };
    let mut client = site.client();
    assert_eq!(get(&mut client, "maxclients"), bulk("77"));
    assert_eq!(get(&mut client, "port"), bulk(site.address().port().to_string()));
    for node in site.nodes() {
        node.cmd("CONFIG SET maxmemory 104857600");
        node.cmd("CONFIG SET requirepass \"\"");
    }
    assert_eq!(get(&mut client, "maxmemory"), bulk("104857600"), "the nodes' own value where they agree");
    // If values differ, the reply has a value that holds for every node, in a form that programs can parse.
    site.nodes()[0].cmd("CONFIG SET maxmemory 209715200 maxmemory-policy allkeys-lru notify-keyspace-events KEA");
    site.nodes()[1].cmd("CONFIG SET notify-keyspace-events Ex");
    for (name, value) in
        [("maxmemory", "104857600"), ("maxmemory-policy", "allkeys-lru"), ("notify-keyspace-events", "xE")]
    {
        assert_eq!(get(&mut client, name), bulk(value), "{name}");
    }
    let buffers = get(&mut client, "client-output-buffer-limit").text();
    assert!(buffers.starts_with("normal 0 0 0 slave ") && buffers.split(' ').count() == 12, "{buffers}");
    for secret in ["requirepass", "masterauth", "dir", "logfile", "tls-key-file"] {
        assert_eq!(client.cmd(&format!("CONFIG GET {secret}")), Value::Array(vec![]), "{secret}");
    }
    assert!(client.cmd("CONFIG GET *").items().len() > 100);
}

#[test]
fn config_set_reaches_every_node_if_allowed() {
    let Some(site) = site(2, &["--set", "nodes.config-set=maxmemory*,slowlog*,dir"]) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("CONFIG SET maxmemory 104857600 maxmemory-policy allkeys-lru"), ok());
    for node in site.nodes() {
        assert_eq!(node.cmd("CONFIG GET maxmemory").items()[1], bulk("104857600"));
        assert_eq!(node.cmd("CONFIG GET maxmemory-policy").items()[1], bulk("allkeys-lru"));
    }
    for line in [
        "CONFIG SET appendonly yes",
        "CONFIG SET dir /tmp",
        "CONFIG SET maxmemory 1 save x",
        "CONFIG SET requirepass x",
    ] {
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
    // The nodes' own slow logs are not changed.
    assert_eq!(site.nodes()[0].cmd("CONFIG GET slowlog-max-len").items()[1], bulk("128"));
}

/// The router's own settings are changed on every worker until the next reload, for users with the permission.
#[test]
fn config_set_changes_the_routers_own_settings() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let users = dir.path().join("users");
    std::fs::write(&users, "user default on nopass ~* &* +@all\nuser app on nopass ~* &* +@all -@admin\n")
        .expect("written");
    std::fs::set_permissions(&users, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("mode");
    let Some(site) =
        Site::router_only(2, &SiteOptions::config(format!("[clients]\nusers-file = {users:?}\nmax-clients = 500\n")))
    else {
        return;
    };
    let mut operator = site.client();
    let mut app = site.client();
    assert_eq!(app.cmd("AUTH app x"), ok());
    assert!(app.cmd("CONFIG SET timeout 1").expect_error().starts_with("NOPERM"));
    for (name, value) in [
        ("timeout", "3600"),
        ("maxclients", "600"),
        ("slowlog-log-slower-than", "5"),
        ("slowlog-max-len", "7"),
        ("proto-max-bulk-len", "1048576"),
    ] {
        assert_eq!(operator.cmd(&format!("CONFIG SET {name} {value}")), ok());
        // On any worker.
        for _ in 0..8 {
            let mut other = site.client();
            until(name, || get(&mut other, name) == bulk(value));
        }
    }
    assert_eq!(
        operator.cmd("INFO clients").text().lines().find(|l| l.starts_with("maxclients:")),
        Some("maxclients:600")
    );
    // All or nothing.
    let error = operator.cmd("CONFIG SET timeout 1 maxclients 0");
    assert!(error.expect_error().contains("'maxclients') - argument must be between 1 and"), "{error:?}");
    assert_eq!(get(&mut operator, "timeout"), bulk("3600"));
    let error = operator.cmd("CONFIG SET timeout soon");
    assert!(error.expect_error().contains("'timeout') - argument couldn't be parsed into an integer"), "{error:?}");
    assert!(operator.cmd("CONFIG SET timeout 1 TIMEOUT 2").expect_error().contains("duplicate parameter"));
    for (line, way) in [
        ("CONFIG SET requirepass x", "ACL SETUSER"),
        ("CONFIG SET port 1", "listen"),
        ("CONFIG SET client-output-buffer-limit x", "clients.output-limit"),
        ("CONFIG REWRITE", "configuration file"),
    ] {
        let error = operator.cmd(line);
        assert!(error.expect_error().contains(way), "{line}: {error:?}");
    }
    // The nodes' settings are unchanged: they would close the router's connections.
    assert_eq!(site.nodes()[0].cmd("CONFIG GET timeout").items()[1], bulk("0"));
    // An idle client is closed, on either worker.
    let mut idle: Vec<Client> = (0..8).map(|_| site.client()).collect();
    idle.iter_mut().for_each(|client| assert_eq!(client.cmd("PING"), simple("PONG")));
    assert_eq!(operator.cmd("CONFIG SET timeout 1"), ok());
    for client in &mut idle {
        assert!(client.closed_within(TIMEOUT));
    }
    let mut operator = site.client();
    assert_eq!(operator.cmd("CONFIG SET timeout 0 maxclients 1"), ok());
    until("one more is refused", || {
        let mut client = Client::try_connect(site.address()).ok()?;
        client.try_reply().is_ok_and(|r| r.error().is_some_and(|e| e.contains("max number of clients"))).then_some(())
    });
    // A reload restores the values of the file.
    site.router().process().signal(rustix::process::Signal::HUP);
    until("the file's values hold", || get(&mut operator, "maxclients") == bulk("500"));
    assert_eq!(get(&mut operator, "slowlog-max-len"), bulk("128"));
}

/// Every node saves, and the oldest save is reported.
#[test]
fn saves_start_at_every_node() {
    let site = Site::new(3);
    let mut client = site.client();
    client.cmd("SET k v");
    let saved = |node: &Node| node.cmd("LASTSAVE").int();
    let before = saved(&site.nodes()[0]);
    if !direct() {
        // Only two saves are newer: LASTSAVE must not cover a node that has not saved.
        until("two nodes have a newer save", || {
            site.nodes()[1..].iter().for_each(|n| drop(n.cmd("SAVE")));
            site.nodes()[1..].iter().all(|n| saved(n) > before)
        });
        assert_eq!(client.cmd("LASTSAVE").int(), before);
    }
    // The time has a resolution of seconds.
    until("every node has saved", || {
        let reply = client.cmd("BGSAVE");
        assert!(
            reply == simple("Background saving started") || reply.error().is_some_and(|e| e.contains("in progress")),
            "{reply:?}"
        );
        client.cmd("LASTSAVE").int() > before && site.nodes().iter().all(|n| saved(n) > before)
    });
    until("no save is in progress", || {
        let done = |node: &Node| node.cmd("INFO persistence").text().contains("rdb_bgsave_in_progress:0");
        site.nodes().iter().all(done)
    });
    let reply = client.cmd("BGREWRITEAOF").text();
    assert!(reply.starts_with("Background append only file rewriting"), "{reply}");
}

#[test]
fn memory_stats_match_a_single_server() {
    let site = Site::new(3);
    for protocol in ["HELLO 2", "HELLO 3"] {
        let mut client = site.client();
        client.cmd(protocol);
        for i in 0..30 {
            client.cmd(&format!("SET k{i} v"));
        }
        let whole = client.cmd("MEMORY STATS");
        assert_eq!(whole.field("keys.count"), int(30));
        let startup: i64 = site.nodes().iter().map(|n| n.cmd("MEMORY STATS").field("startup.allocated").int()).sum();
        assert_eq!(whole.field("startup.allocated"), int(startup));
        let per_key = whole.field("keys.bytes-per-key").int();
        assert_eq!(per_key, (whole.field("total.allocated").int() - startup) / 30);
        let mut one = site.nodes()[0].client();
        one.cmd(protocol);
        let names = |reply: &Value| reply.pairs().into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(&whole), names(&one.cmd("MEMORY STATS")), "{protocol}");
        for line in ["MEMORY DOCTOR", "LATENCY DOCTOR"] {
            let text = client.cmd(line).text();
            assert!(
                direct() || site.nodes().iter().all(|n| text.contains(&format!("{}:\n", n.address()))),
                "{line}: {text}"
            );
        }
    }
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

/// The first use of a database queries the nodes. Their reply must not override a later SELECT.
#[test]
fn the_last_of_two_selects_wins() {
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
fn info_sums_command_and_error_counts_of_nodes() {
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
