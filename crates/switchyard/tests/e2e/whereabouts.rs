//! The slot map and the locations of keys, by the command line, the admin API and RESP. Also moves that find their
//! sources themselves.

use serde_json::Value as Json;

use crate::movectl::{done, json, names, refused};
use crate::movectl_moves::{eventually, wait_for};
use crate::support::slots::slot;
use crate::support::{Client, Site, SiteOptions, Value, bulk, http, int, ok};

fn fill(client: &mut Client, keys: usize) {
    for i in 0..keys {
        assert_eq!(client.cmd(&format!("SET key:{i} {}", "v".repeat(100))), ok());
    }
}

/// Returns the location of a key, as reported by the command line.
fn place(site: &Site, key: &str) -> Json {
    json(site.router(), &format!("where {key}"))["keys"][0].clone()
}

/// Returns the nodes that have the key.
fn having(site: &Site, key: &str) -> Vec<String> {
    let has = |node: &&crate::support::Node| node.cmd(&format!("EXISTS {key}")) == int(1);
    site.nodes().iter().filter(has).map(|node| node.address().to_string()).collect()
}

#[test]
fn the_slot_map_and_key_locations_are_the_same_everywhere() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    fill(&mut client, 60);
    let map = json(site.router(), "slots");
    let ranges = map["ranges"].as_array().expect("ranges");
    let owner = |slot: u16| {
        let of = ranges.iter().find(|r| (r["first"].as_u64()..=r["last"].as_u64()).contains(&Some(u64::from(slot))));
        of.expect("every slot has an owner")["node"].as_str().expect("a name").to_owned()
    };
    for i in 0..60 {
        let key = format!("key:{i}");
        let told = place(&site, &key);
        assert_eq!(told["slot"], slot(key.as_bytes()));
        assert_eq!(having(&site, &key), [told["node"].as_str().expect("a name")], "{key}");
        assert_eq!(told["node"], owner(slot(key.as_bytes())));
        assert_eq!(client.cmd(&format!("CLUSTER KEYSLOT {key}")), int(i64::from(slot(key.as_bytes()))));
    }
    let counted = client.cmd(&format!("CLUSTER COUNTKEYSINSLOT {}", slot(b"key:7")));
    assert!(counted.int() >= 1, "{counted:?}");
    // The same report elsewhere.
    let text = done(site.router(), "slots");
    assert!(names(&site).iter().all(|name| text.contains(name.as_str())) && !text.contains("in transit"), "{text}");
    assert_eq!(serde_json::from_str::<Json>(&http::get(site.router().admin(), "/api/v1/slots").1).expect("JSON"), map);
    assert_eq!(http::get(site.router().admin(), "/api/v1/where").0, 400);
    let over_http = http::get(site.router().admin(), "/api/v1/where?key=%7Btag%7D%FF&key=key:7").1;
    let over_http: Json = serde_json::from_str(&over_http).expect("JSON");
    assert_eq!(over_http["keys"][0]["hash_tag"], "tag");
    assert_eq!(over_http["keys"][0]["slot"], slot(b"tag"));
    let over_resp = client.call(&[b"SWITCHYARD".as_slice(), b"where", b"{tag}\xff", b"key:7"]);
    let keys = over_resp.field("keys");
    assert_eq!(keys.items()[0].field("slot"), int(i64::from(slot(b"tag"))));
    assert_eq!(keys.items()[1].field("node"), bulk(having(&site, "key:7")[0].as_bytes()));
    let nodes = client.cmd("SWITCHYARD SLOTS").field("nodes");
    assert_eq!(nodes.items().iter().map(|node| node.field("slots").int()).sum::<i64>(), 16384);
    assert!(client.cmd("SWITCHYARD WHERE").expect_error().contains("WHERE key"), "which?");
    assert!(matches!(client.cmd("CLUSTER SLOTS"), Value::Error(_)), "it looks like no cluster");
}

#[test]
fn keys_in_transit_or_moved_alone_are_reported() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    fill(&mut client, 2000);
    let names = names(&site);
    let home = place(&site, "key:7")["node"].as_str().expect("a name").to_owned();
    let away = names.iter().find(|name| **name != home).expect("another").clone();
    // The move finds the key's node itself.
    done(site.router(), &format!("move --keys key:7 --to {away} --wait"));
    let told = place(&site, "key:7");
    assert_eq!((told["node"].as_str(), told["owner"].as_str()), (Some(away.as_str()), Some(home.as_str())));
    assert_eq!(told["relocated"], true);
    assert_eq!(having(&site, "key:7"), std::slice::from_ref(&away));
    let map = json(site.router(), "slots");
    assert_eq!(map["overrides"][0]["slot"], slot(b"key:7"));
    assert!(done(site.router(), "where key:7").contains(&format!("moved without its slot, which is at {home}")));
    let text = refused(site.router(), &format!("move --keys key:7 --to {away}"));
    assert!(text.contains("lives at") && text.contains("already"), "{text}");
    // A pattern is matched on every node.
    done(site.router(), &format!("move --keys key:1?? --to {} --wait", names[0]));
    assert!((100..200).all(|i| having(&site, &format!("key:{i}")) == [names[0].clone()]));
    done(site.router(), "move --home --wait");
    assert_eq!(json(site.router(), "slots")["overrides"], Json::Array(Vec::new()));
    assert_eq!(having(&site, "key:7"), [home]);

    let moves = json(site.router(), &format!("move --from {} --to {} --all --max-rate 20k", names[0], names[1]));
    let id = moves["moves"][0]["id"].as_u64().expect("a number");
    let transit = eventually("slots are on their way", || {
        let map = json(site.router(), "slots");
        map["in_transit"].as_array()?.iter().find(|transit| transit["stage"] == "moving").cloned()
    });
    assert_eq!((transit["move"].as_u64(), transit["to"].as_str()), (Some(id), Some(names[1].as_str())));
    assert!(done(site.router(), "slots").contains("in transit"));
    done(site.router(), &format!("moves max-rate {id} none"));
    wait_for(site.router(), id, "done");
    assert_eq!(json(site.router(), "slots")["in_transit"], Json::Array(Vec::new()));
    // Slots from any node.
    done(site.router(), &format!("move --slots 0-99,16000-16383 --to {} --wait", names[0]));
    let map = json(site.router(), "slots");
    let ranges: Vec<&str> =
        map["nodes"].as_array().expect("nodes").iter().filter_map(|node| node["ranges"].as_str()).collect();
    assert!(ranges.contains(&"0-99,16000-16383") && ranges.contains(&"100-15999"), "{map}");
}
