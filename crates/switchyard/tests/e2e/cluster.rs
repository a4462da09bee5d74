//! Replies to clients of a Redis Cluster with `--cluster`. Without it, the replies of a plain server.

use crate::support::{RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple};

fn emulating(args: &[&str]) -> Option<Site> {
    Site::router_only(3, &SiteOptions::router(RouterOptions::args(args)))
}

#[test]
fn without_emulation_the_router_reports_no_cluster_support() {
    let site = Site::new(2);
    let mut client = site.client();
    for line in
        ["CLUSTER SLOTS", "CLUSTER NODES", "CLUSTER SHARDS", "CLUSTER INFO", "CLUSTER MYID", "READONLY", "ASKING"]
    {
        assert_eq!(client.cmd(line), Value::Error("ERR This instance has cluster support disabled".into()), "{line}");
    }
    assert!(client.cmd("INFO cluster").text().contains("cluster_enabled:0"));
    assert_eq!(client.cmd("CONFIG GET cluster-enabled").field("cluster-enabled"), bulk("no"));
}

#[test]
fn with_emulation_one_member_has_all_slots() {
    let Some(site) = emulating(&["--cluster"]) else { return };
    let mut client = site.client();
    let port = i64::from(site.address().port());
    let slots = client.cmd("CLUSTER SLOTS");
    let range = &slots.items()[0];
    assert_eq!(slots.items().len(), 1);
    assert_eq!((&range.items()[0], &range.items()[1]), (&int(0), &int(16383)));
    let member = range.items()[2].items();
    assert_eq!((&member[0], &member[1], &member[3]), (&bulk("127.0.0.1"), &int(port), &Value::Array(vec![])));
    let id = client.cmd("CLUSTER MYID").text();
    assert_eq!(member[2], bulk(id.as_str()));
    assert_eq!(id.len(), 40);
    let nodes = client.cmd("CLUSTER NODES").text();
    assert_eq!(
        nodes,
        format!(
            "{id} 127.0.0.1:{port}@{} myself,master - 0 0 1 connected 0-16383\n",
            if port + 10000 > 65535 { 0 } else { port + 10000 }
        )
    );
    let info = client.cmd("CLUSTER INFO").text();
    assert!(info.contains("cluster_state:ok\r\n") && info.contains("cluster_slots_ok:16384\r\n"), "{info}");
    assert!(client.cmd("INFO cluster").text().contains("cluster_enabled:1"));
    assert!(client.cmd("INFO server").text().contains("redis_mode:cluster"));
    assert_eq!(client.cmd("CONFIG GET cluster-enabled").field("cluster-enabled"), bulk("yes"));
    for line in ["READONLY", "READWRITE", "ASKING"] {
        assert_eq!(client.cmd(line), ok(), "{line}");
    }
    assert_eq!(client.cmd("CLUSTER KEYSLOT foo"), int(12182));
    assert_eq!(client.cmd("CLUSTER LINKS"), Value::Array(vec![]));
    assert_eq!(client.cmd(&format!("CLUSTER REPLICAS {id}")), Value::Array(vec![]));
    assert_eq!(client.cmd("CLUSTER REPLICAS nobody"), Value::Error("ERR Unknown node nobody".into()));
    for line in [
        "CLUSTER MEET 127.0.0.1 1",
        "CLUSTER ADDSLOTS 1",
        "CLUSTER FAILOVER",
        "CLUSTER RESET",
        "CLUSTER SETSLOT 1 STABLE",
    ] {
        assert!(client.cmd(line).expect_error().contains("Switchyard places the slots"), "{line}");
    }
    // RESP3 has maps.
    client.cmd("HELLO 3");
    let shards = client.cmd("CLUSTER SHARDS");
    let node = &shards.items()[0].field("nodes").items()[0].clone();
    assert_eq!(node.field("endpoint"), bulk("127.0.0.1"));
    assert_eq!(node.field("port"), int(port));
    assert_eq!(shards.items()[0].field("slots"), Value::Array(vec![int(0), int(16383)]));
    assert!(matches!(client.cmd("CLUSTER NODES"), Value::Verbatim(_)));
    assert_eq!(client.cmd("HELLO 3").field("mode"), bulk("cluster"));
    assert_eq!(client.cmd("PING"), simple("PONG"));
}

#[test]
fn several_routers_share_the_slots() {
    let Some(site) = emulating(&["--cluster", "--set", "cluster.announce=router-a:6380,10.0.0.2:6390"]) else { return };
    let mut client = site.client();
    let slots = client.cmd("CLUSTER SLOTS");
    let shown: Vec<_> = slots
        .items()
        .iter()
        .map(|r| {
            (
                r.items()[0].clone(),
                r.items()[1].clone(),
                r.items()[2].items()[0].text(),
                r.items()[2].items()[1].clone(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            (int(0), int(8191), "router-a".to_owned(), int(6380)),
            (int(8192), int(16383), "10.0.0.2".to_owned(), int(6390))
        ]
    );
    let nodes = client.cmd("CLUSTER NODES").text();
    assert_eq!(nodes.lines().filter(|l| l.contains("myself")).count(), 1);
    assert!(client.cmd("CLUSTER INFO").text().contains("cluster_size:2\r\n"));
}

#[test]
fn the_keys_of_a_slot_are_found_at_their_owner() {
    let Some(site) = emulating(&["--cluster"]) else { return };
    let mut client = site.client();
    for i in 0..3000 {
        client.post(&format!("SET other{i} v"));
    }
    for _ in 0..3000 {
        assert_eq!(client.reply(), ok());
    }
    let mut wanted: Vec<String> = (0..25).map(|i| format!("{{foo}}{i}")).collect();
    for key in &wanted {
        client.cmd(&format!("SET {key} v"));
    }
    let others = (0..3000).filter(|i| crate::support::slots::slot(format!("other{i}").as_bytes()) == 12182).count();
    assert_eq!(client.cmd("CLUSTER COUNTKEYSINSLOT 12182"), int((25 + others) as i64));
    let found = client.cmd("CLUSTER GETKEYSINSLOT 12182 1000");
    let mut found: Vec<String> = found.items().iter().map(Value::text).filter(|k| !k.starts_with("other")).collect();
    found.sort();
    wanted.sort();
    assert_eq!(found, wanted);
    assert_eq!(client.cmd("CLUSTER GETKEYSINSLOT 12182 7").items().len(), 7);
    assert_eq!(client.cmd("CLUSTER GETKEYSINSLOT 12182 0"), Value::Array(vec![]));
    assert_eq!(client.cmd("CLUSTER COUNTKEYSINSLOT 16384"), Value::Error("ERR Invalid slot".into()));
    assert_eq!(client.cmd("CLUSTER GETKEYSINSLOT 1 -1"), Value::Error("ERR Invalid number of keys".into()));
}

#[test]
fn the_cluster_state_shows_a_node_that_is_down() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::router(RouterOptions::args(&["--cluster"]))) else {
        return;
    };
    site.node_mut(0).kill();
    let mut client = site.client();
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    loop {
        let info = client.cmd("CLUSTER INFO").text();
        if info.contains("cluster_slots_fail:8192\r\n") {
            assert!(info.contains("cluster_state:ok\r\n"), "half of the slots are served: {info}");
            break;
        }
        assert!(std::time::Instant::now() < end, "{info}");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
