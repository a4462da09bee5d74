//! Commands about the server, as sent by monitoring, libraries and operators. Also refused and unsupported commands.

use crate::support::{Node, NodeOptions, Site, SiteOptions, Value, bulk, direct, int, ok, simple, until};

#[test]
fn info_has_the_sections_and_fields_that_tools_read() {
    let site = Site::new(3);
    let mut client = site.client();
    for i in 0..30 {
        client.cmd(&format!("SET k{i} v"));
    }
    client.cmd("SELECT 2");
    client.cmd("SET two v EX 1000");
    let info = client.cmd("INFO").text();
    for section in ["Server", "Clients", "Memory", "Stats", "Replication", "CPU", "Keyspace"] {
        assert!(info.contains(&format!("# {section}\r\n")), "no section {section} in\n{info}");
    }
    let field = |name: &str| {
        info.lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(|v| v.trim().to_owned()))
            .unwrap_or_else(|| panic!("no field {name} in\n{info}"))
    };
    for name in [
        "redis_version",
        "redis_mode",
        "os",
        "process_id",
        "tcp_port",
        "uptime_in_seconds",
        "uptime_in_days",
        "connected_clients",
        "maxclients",
        "blocked_clients",
        "used_memory",
        "used_memory_human",
        "used_memory_rss",
        "maxmemory",
        "maxmemory_policy",
        "mem_allocator",
        "total_connections_received",
        "total_commands_processed",
        "instantaneous_ops_per_sec",
        "total_net_input_bytes",
        "total_net_output_bytes",
        "rejected_connections",
        "expired_keys",
        "evicted_keys",
        "keyspace_hits",
        "keyspace_misses",
        "role",
        "connected_slaves",
        "used_cpu_sys",
        "used_cpu_user",
    ] {
        field(name);
    }
    assert_eq!(field("role"), "master");
    assert_eq!(field("redis_mode"), "standalone");
    assert_eq!(field("tcp_port"), site.address().port().to_string());
    assert!(field("db0").starts_with("keys=30,expires=0,"), "db0:{}", field("db0"));
    assert!(field("db2").starts_with("keys=1,expires=1,"), "db2:{}", field("db2"));
    assert!(field("total_commands_processed").parse::<u64>().expect("a number") >= 30);
    assert!(field("connected_clients").parse::<u64>().expect("a number") >= 1);
    if !direct() {
        assert!(info.contains("# Switchyard\r\ncommands_version:1\r\n"), "{info}");
    }
    // One section, several, all spellings.
    let keyspace = client.cmd("INFO keyspace").text();
    assert!(keyspace.starts_with("# Keyspace\r\n") && !keyspace.contains("# Server"), "{keyspace}");
    let two = client.cmd("INFO SERVER clients").text();
    assert!(two.contains("# Server") && two.contains("# Clients") && !two.contains("# Memory"), "{two}");
    assert!(client.cmd("INFO everything").text().contains("# Keyspace"));
    assert!(client.cmd("INFO all").text().contains("# Keyspace"));
    assert_eq!(client.cmd("INFO nosuchsection").text().trim(), "");
    let mut three = site.client();
    three.cmd("HELLO 3");
    assert!(matches!(three.cmd("INFO server"), Value::Verbatim(_)));
}

#[test]
fn role_time_echo_and_lolwut_work() {
    let site = Site::new(2);
    let mut client = site.client();
    let role = client.cmd("ROLE");
    assert_eq!(role.items()[0], bulk("master"));
    assert!(matches!(role.items()[1], Value::Int(_)));
    assert_eq!(role.items()[2], Value::Array(vec![]));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock after 1970").as_secs();
    let time = client.cmd("TIME");
    let seconds: u64 = time.items()[0].text().parse().expect("seconds");
    let micros: u64 = time.items()[1].text().parse().expect("microseconds");
    assert!(seconds.abs_diff(now) <= 60 && micros < 1_000_000);
    assert_eq!(client.cmd("ECHO \"\\x00\\r\\n\""), bulk("\0\r\n"));
    assert_eq!(client.cmd("PING"), simple("PONG"));
    assert_eq!(client.cmd("PING payload"), bulk("payload"));
    assert!(client.cmd("LOLWUT").error().is_none());
}

#[test]
fn config_get_answers_common_client_requests() {
    let site = Site::new(2);
    let mut client = site.client();
    // redis-benchmark, redis-py, Spring and others send these when they start.
    for name in [
        "save",
        "appendonly",
        "maxmemory",
        "maxmemory-policy",
        "databases",
        "timeout",
        "maxclients",
        "proto-max-bulk-len",
    ] {
        let reply = client.cmd(&format!("CONFIG GET {name}"));
        assert_eq!(reply.items().len(), 2, "CONFIG GET {name}: {reply:?}");
        assert_eq!(reply.items()[0], bulk(name));
    }
    assert_eq!(client.cmd("CONFIG GET databases").field("databases"), bulk("16"));
    assert_eq!(client.cmd("CONFIG GET appendonly").field("appendonly"), bulk("no"));
    assert_eq!(client.cmd("CONFIG GET save").field("save"), bulk(""));
    assert_eq!(client.cmd("CONFIG GET nosuchparameter"), Value::Array(vec![]));
    assert!(client.cmd("CONFIG GET maxmemory*").items().len() >= 4);
    assert!(client.cmd("CONFIG GET save databases").items().len() == 4);
    assert!(client.cmd("CONFIG GET *").items().len() >= 8);
    client.cmd("HELLO 3");
    assert!(matches!(client.cmd("CONFIG GET save"), Value::Map(_)));
    client.cmd("HELLO 2");
    assert_eq!(client.cmd("CONFIG RESETSTAT"), ok());
    client.cmd("CONFIG").expect_error();
    client.cmd("CONFIG GET").expect_error();
}

#[test]
fn command_descriptions_match_the_nodes() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    let (mut client, mut reference) = (site.client(), plain.client());
    assert!(client.cmd("COMMAND COUNT").int() > 200);
    let names: Vec<String> = client.cmd("COMMAND").items().iter().map(|row| row.items()[0].text()).collect();
    for name in ["get", "set", "mget", "zunionstore", "eval", "xread"] {
        assert!(names.iter().any(|n| n == name), "COMMAND lacks {name}");
    }
    for line in [
        "COMMAND GETKEYS GET k",
        "COMMAND GETKEYS MSET a 1 b 2",
        "COMMAND GETKEYS EVAL \"return 1\" 2 k1 k2 arg",
        "COMMAND GETKEYS ZUNIONSTORE dst 2 a b WEIGHTS 1 2",
        "COMMAND GETKEYS XREAD COUNT 2 STREAMS s1 s2 0 0",
        "COMMAND GETKEYS SORT k BY w_* STORE dst",
        "COMMAND GETKEYS PING",
        "COMMAND GETKEYS NOSUCH a",
        "COMMAND GETKEYS GET",
        "COMMAND GETKEYS",
        "COMMAND INFO get",
        "COMMAND INFO get nosuch mset",
        "COMMAND INFO nosuch",
        "COMMAND BOGUS",
    ] {
        assert_eq!(client.cmd(line), reference.cmd(line), "{line}");
    }
    let docs = client.cmd("COMMAND DOCS get");
    assert_eq!(docs.items()[0], bulk("get"));
    assert!(client.cmd("COMMAND LIST").items().len() > 200);
    assert!(!client.cmd("COMMAND HELP").items().is_empty());
}

#[test]
fn latency_covers_all_nodes() {
    let site = Site::new(2);
    let mut client = site.client();
    assert_eq!(client.cmd("LATENCY LATEST"), Value::Array(vec![]));
    assert_eq!(client.cmd("LATENCY RESET"), int(0));
    assert_eq!(client.cmd("LATENCY HISTORY command"), Value::Array(vec![]));
}

#[test]
fn memory_usage_and_object_reach_the_owner() {
    let site = Site::new(3);
    let mut client = site.client();
    for i in 0..30 {
        client.call(&["SET", &format!("m{i}"), &"x".repeat(1000)]);
        assert!(client.cmd(&format!("MEMORY USAGE m{i}")).int() > 1000);
        assert_eq!(client.cmd(&format!("OBJECT ENCODING m{i}")), bulk("raw"));
        assert_eq!(client.cmd(&format!("OBJECT REFCOUNT m{i}")), int(1));
    }
    assert_eq!(client.cmd("MEMORY USAGE none"), Value::Nil);
    assert!(client.cmd("MEMORY HELP").error().is_none());
}

#[test]
fn commands_that_would_harm_nodes_are_refused() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    client.cmd("SET k v");
    let port = site.nodes()[0].address().port();
    for line in [
        "DEBUG SLEEP 0",
        "DEBUG OBJECT k",
        "DEBUG SEGFAULT",
        "DEBUG JMAP",
        "SHUTDOWN",
        "SHUTDOWN NOSAVE",
        &format!("REPLICAOF 127.0.0.1 {port}"),
        &format!("SLAVEOF 127.0.0.1 {port}"),
        "REPLICAOF NO ONE",
        "CONFIG SET maxmemory 1",
        "CONFIG REWRITE",
        "MODULE LOAD /nonexistent.so",
        "MODULE UNLOAD x",
        "SAVE",
        "FAILOVER",
        "PSYNC ? -1",
        "SYNC",
        "REPLCONF listening-port 1",
        &format!("MIGRATE 127.0.0.1 {port} k 0 1000"),
        "RESTORE-ASKING k 0 x",
        "PFDEBUG GETREG k",
    ] {
        let reply = client.cmd(line);
        let Some(error) = reply.error() else { panic!("{line} gave {reply:?}") };
        assert!(error.len() > 20, "the error of {line} must have the reason: {error}");
        let name = line.split(' ').next().expect("a name").to_lowercase();
        assert!(error.to_lowercase().contains(&name), "{line} must be named in its error: {error}");
    }
    assert_eq!(client.cmd("GET k"), bulk("v"));
    for node in site.nodes() {
        assert_eq!(node.cmd("CONFIG GET maxmemory").items()[1], bulk("0"));
        assert_eq!(node.cmd("ROLE").items()[0], bulk("master"));
        // The default user, and the router's ownership record.
        let users: Vec<String> = node.cmd("ACL LIST").items().iter().map(Value::text).collect();
        assert_eq!(users.iter().filter(|user| !user.starts_with("user switchyard-")).count(), 1, "{users:?}");
    }
}

fn calls_of_info(node: &crate::support::Node) -> u64 {
    let text = node.cmd("INFO commandstats").text();
    let line = text.lines().find_map(|line| line.strip_prefix("cmdstat_info:calls=")).expect("it was called before");
    line.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number")
}

#[test]
fn info_queries_nodes_only_if_needed() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    client.cmd("SET a 1");
    let calls = |node: usize| calls_of_info(&site.nodes()[node]);
    // The second count includes the first. The router itself queries once a second, possibly at this moment.
    until("these sections need no node", || {
        let before = [calls(0), calls(1)];
        for section in ["server", "replication", "cluster", "nosuchsection"] {
            let mut other = site.client();
            other.cmd(&format!("INFO {section}"));
        }
        [calls(0), calls(1)] == before.map(|calls| calls + 1)
    });
    let before = [calls(0), calls(1)];
    let mut others: Vec<_> = (0..10).map(|_| site.client()).collect();
    for i in 0..400 {
        let text = others[i % 10].cmd("INFO memory").text();
        assert!(text.contains("used_memory:") && !text.contains("# Stats"), "{text}");
    }
    assert!(calls(0) < before[0] + 400 && calls(1) < before[1] + 400, "some replies used cached data");
    // A client sees its own writes, even if another client sent INFO just before.
    for i in 0..30 {
        others[i % 10].cmd("INFO keyspace");
        client.cmd(&format!("SET k{i} 1"));
        let text = client.cmd("INFO keyspace").text();
        assert!(text.contains(&format!("db0:keys={},", i + 2)), "{i}: {text}");
    }
}
