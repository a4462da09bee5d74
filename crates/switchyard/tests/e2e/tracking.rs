//! CLIENT TRACKING: caching clients receive every invalidation, and never too early.

use std::time::Duration;

use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, NodeOptions, Random, Site, SiteOptions, Value, bulk, direct, int, ok, simple, until,
};

fn three(site: &Site) -> Client {
    let mut client = site.client();
    client.cmd("HELLO 3");
    client
}

fn invalidate(keys: &[&str]) -> Value {
    Value::Push(vec![bulk("invalidate"), Value::Array(keys.iter().map(bulk).collect())])
}

fn forget_all() -> Value {
    Value::Push(vec![bulk("invalidate"), Value::Nil])
}

#[test]
fn the_bytes_match_a_single_server() {
    let site = Site::new(3);
    let plain = Node::start(&NodeOptions::default());
    for protocol in ["HELLO 2", "HELLO 3"] {
        let (mut routed, mut reference) = (site.client(), plain.client());
        routed.cmd(protocol);
        reference.cmd(protocol);
        for line in [
            "CLIENT TRACKING",
            "CLIENT TRACKING foo",
            "CLIENT TRACKING ON FOO",
            "CLIENT TRACKINGINFO",
            "CLIENT GETREDIR",
            "CLIENT TRACKING ON REDIRECT 999999",
            "CLIENT TRACKING ON REDIRECT x",
            "CLIENT TRACKING ON PREFIX a",
            "CLIENT TRACKING ON OPTIN OPTOUT",
            "CLIENT TRACKING ON BCAST OPTIN",
            "CLIENT TRACKING ON BCAST PREFIX a PREFIX ab",
            "CLIENT TRACKINGINFO",
            "CLIENT TRACKING ON",
            "CLIENT TRACKING ON BCAST",
            "CLIENT TRACKINGINFO",
            "CLIENT GETREDIR",
            "CLIENT CACHING YES",
            "CLIENT CACHING NO",
            "CLIENT CACHING x",
            "CLIENT TRACKING OFF",
            "CLIENT CACHING YES",
            "CLIENT TRACKING ON OPTIN",
            "CLIENT CACHING NO",
            "CLIENT CACHING YES",
            "CLIENT TRACKINGINFO",
            "PING",
            "CLIENT TRACKINGINFO",
            "CLIENT TRACKING ON OPTOUT",
            "CLIENT TRACKING OFF",
            "CLIENT TRACKING ON OPTOUT NOLOOP",
            "CLIENT CACHING YES",
            "CLIENT CACHING NO",
            "CLIENT TRACKINGINFO",
            "CLIENT TRACKING OFF",
            "CLIENT TRACKING ON BCAST PREFIX a",
            "CLIENT TRACKING ON BCAST PREFIX ab",
            "CLIENT TRACKING ON BCAST PREFIX b",
            "CLIENT TRACKINGINFO",
            "CLIENT TRACKING OFF",
            "CLIENT TRACKINGINFO",
        ] {
            routed.post(line);
            reference.post(line);
            let mut ours = routed.raw();
            while ours == b">2\r\n$10\r\ninvalidate\r\n_\r\n" {
                ours = routed.raw(); // additional invalidations are allowed
            }
            let (ours, theirs) = (ours.escape_ascii().to_string(), reference.raw().escape_ascii().to_string());
            assert_eq!(ours, theirs, "{line} ({protocol})");
        }
        assert_eq!(routed.cmd("RESET"), reference.cmd("RESET"));
        assert_eq!(routed.cmd("CLIENT TRACKINGINFO"), reference.cmd("CLIENT TRACKINGINFO"));
    }
}

#[test]
fn read_keys_are_invalidated_once_when_they_change() {
    let site = Site::new(3);
    let mut writer = site.client();
    for i in 0..30 {
        writer.cmd(&format!("SET k{i} 0"));
    }
    let mut client = three(&site);
    assert_eq!(client.cmd("CLIENT TRACKING ON"), ok());
    for i in 0..30 {
        assert_eq!(client.cmd(&format!("GET k{i}")), bulk("0"));
    }
    // All ways to change a key, at all nodes. Keys that were not read cause no invalidation.
    for i in 0..30 {
        writer.cmd("SET other x");
        let change = [format!("SET k{i} 1"), format!("DEL k{i}"), format!("INCR k{i}"), format!("PEXPIRE k{i} 1")];
        writer.cmd(&change[i % 4]);
        assert_eq!(client.reply(), invalidate(&[&format!("k{i}")]), "{}", change[i % 4]);
        // The second change causes no invalidation unless the key was read again.
        writer.cmd(&format!("SET k{i} 2"));
    }
    assert_eq!(client.cmd("PING"), simple("PONG"));
    // Reads of all forms.
    for (read, keys) in [
        ("MGET k1 k2 k3 k4", vec!["k1", "k2", "k3", "k4"]),
        ("EXISTS k5 k6", vec!["k5", "k6"]),
        ("STRLEN k7", vec!["k7"]),
        ("SORT_RO list", vec!["list"]),
        ("LCS {a}1 {a}2", vec!["{a}1", "{a}2"]),
        ("EVAL \"return redis.call('GET', KEYS[1])\" 1 script", vec!["script"]),
    ] {
        client.post(read);
        client.reply();
        let mut told = Vec::new();
        for key in &keys {
            writer.cmd(&format!("DEL {key}"));
            writer.cmd(&format!("{} {key} 3", if *key == "list" { "RPUSH" } else { "SET" }));
        }
        while told.len() < keys.len() {
            let push = client.reply();
            told.extend(push.items()[1].items().iter().map(Value::text));
        }
        told.sort_unstable();
        let mut wanted: Vec<String> = keys.iter().map(|k| (*k).to_owned()).collect();
        wanted.sort_unstable();
        assert_eq!(told, wanted, "{read}");
    }
    // FLUSHALL invalidates everything.
    client.cmd("GET k1");
    writer.cmd("FLUSHALL");
    assert_eq!(client.reply(), forget_all());
    assert_eq!(client.cmd("CLIENT TRACKING OFF").error(), None);
}

#[test]
fn optin_and_optout_control_tracking() {
    let site = Site::new(3);
    let mut writer = site.client();
    let mut client = three(&site);
    assert_eq!(client.cmd("CLIENT TRACKING ON OPTIN"), ok());
    client.cmd("GET a");
    client.cmd("CLIENT CACHING YES");
    client.cmd("CLIENT ID");
    client.cmd("GET b");
    client.cmd("GET c");
    for key in ["a", "c", "b"] {
        writer.cmd(&format!("SET {key} 1"));
    }
    assert_eq!(client.reply(), invalidate(&["b"]));
    client.cmd("CLIENT TRACKING OFF");
    assert_eq!(client.cmd("CLIENT TRACKING ON OPTOUT"), ok());
    client.cmd("GET a");
    client.cmd("CLIENT CACHING NO");
    client.cmd("GET b");
    client.cmd("GET c");
    for key in ["b", "a", "c"] {
        writer.cmd(&format!("SET {key} 2"));
    }
    let mut told = [client.reply(), client.reply()].map(|push| push.items()[1].items()[0].text());
    told.sort();
    assert_eq!(told, ["a", "c"], "different nodes have no order");
    assert_eq!(client.cmd("PING"), simple("PONG"));
}

#[test]
fn broadcasts_select_keys_by_prefix() {
    let site = Site::new(3);
    let mut all = three(&site);
    let mut users = three(&site);
    let mut both = three(&site);
    assert_eq!(users.cmd("CLIENT TRACKING ON BCAST PREFIX user:"), ok());
    assert_eq!(both.cmd("CLIENT TRACKING ON BCAST PREFIX user:1 PREFIX order:"), ok());
    assert_eq!(all.cmd("CLIENT TRACKING ON BCAST"), ok());
    // A wider prefix restarts tracking at the nodes: existing clients may receive a full invalidation.
    let told = |client: &mut Client| loop {
        match client.reply() {
            push if push == forget_all() => {}
            push => return push.items()[1].items().iter().map(Value::text).collect::<Vec<_>>(),
        }
    };
    let mut writer = site.client();
    for i in 0..20 {
        writer.cmd(&format!("SET user:1{i} x"));
        assert_eq!(told(&mut users), [format!("user:1{i}")]);
        assert_eq!(told(&mut both), [format!("user:1{i}")]);
        assert_eq!(told(&mut all), [format!("user:1{i}")]);
        writer.cmd(&format!("SET order:{i} x"));
        assert_eq!(told(&mut both), [format!("order:{i}")]);
        assert_eq!(told(&mut all), [format!("order:{i}")]);
        writer.cmd(&format!("SET else:{i} x"));
        assert_eq!(told(&mut all), [format!("else:{i}")]);
    }
    // A direct write at a node counts as well.
    if !direct() {
        let node = site.nodes()[0].client().cmd("SET user:direct x");
        assert_eq!(node, ok());
        assert_eq!(told(&mut users), ["user:direct"]);
    }
    drop((all, both));
    writer.cmd("SET user:last x");
    assert_eq!(told(&mut users), ["user:last"]);
}

#[test]
fn invalidations_can_be_redirected() {
    let site = Site::new(2);
    // Enough connections that some are on another worker.
    for round in 0..8 {
        let mut target = site.client();
        let id = target.cmd("CLIENT ID").int();
        if round % 2 == 0 {
            assert_eq!(target.cmd("SUBSCRIBE __redis__:invalidate").items()[2], int(1));
        } else {
            target.cmd("HELLO 3");
        }
        // In RESP2 too, reads are tracked.
        let mut reader = if round < 4 { site.client() } else { three(&site) };
        assert_eq!(reader.cmd(&format!("CLIENT TRACKING ON REDIRECT {id}")), ok());
        assert_eq!(reader.cmd("CLIENT GETREDIR"), int(id));
        let list = site.client().cmd("CLIENT LIST").text();
        assert!(list.contains(&format!(" redir={id} ")) && list.contains(" flags=t "), "{list}");
        let mut writer = site.client();
        reader.cmd("GET k");
        writer.cmd(&format!("SET k {round}"));
        let keys = Value::Array(vec![bulk("k")]);
        let expected = match round % 2 {
            0 => Value::Array(vec![bulk("message"), bulk("__redis__:invalidate"), keys]),
            _ => Value::Push(vec![bulk("invalidate"), keys]),
        };
        assert_eq!(target.reply(), expected);
        // The target disconnects: the reader is notified with the next invalidation.
        drop(target);
        until("the router has noticed", || !site.client().cmd("CLIENT LIST").text().contains(&format!("id={id} ")));
        reader.cmd("GET k");
        writer.cmd("SET k gone");
        if round >= 4 {
            assert_eq!(reader.reply(), Value::Push(vec![bulk("tracking-redir-broken"), int(id)]));
        } else {
            until("the redirect is seen to be broken", || {
                reader.cmd("CLIENT TRACKINGINFO").field("flags").items().contains(&bulk("broken_redirect"))
            });
        }
    }
}

/// A client library's cache: replies fill it, and invalidations clear it, in the order of arrival.
struct Cache {
    client: Client,
    values: std::collections::HashMap<String, String>,
    /// Keys of commands without a reply, and whether the command writes.
    pending: std::collections::VecDeque<(String, bool)>,
}

impl Cache {
    fn take(&mut self, reply: Value) {
        match reply {
            Value::Push(items) => match &items[1] {
                Value::Nil => self.values.clear(),
                keys => keys.items().iter().for_each(|k| {
                    self.values.remove(&k.text());
                }),
            },
            reply => {
                let (key, writes) = self.pending.pop_front().expect("a command");
                match reply {
                    Value::Bulk(value) => {
                        self.values.insert(key, String::from_utf8(value).expect("text"));
                    }
                    // With NOLOOP, there is no invalidation for own writes.
                    Value::Simple(_) if writes => {
                        self.values.remove(&key);
                    }
                    Value::Nil => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    fn settle(&mut self) {
        while !self.pending.is_empty() {
            let reply = self.client.reply();
            self.take(reply);
        }
    }
}

#[test]
fn no_cache_keeps_a_stale_value() {
    let site = Site::new(3);
    let mut random = Random::new(7);
    for mode in ["", " NOLOOP", " BCAST", " OPTIN", " BCAST PREFIX k1 PREFIX k2"] {
        let mut writer = site.client();
        for i in 0..30 {
            writer.cmd(&format!("SET k{i} first"));
        }
        let mut written = 0;
        let mut cache = Cache { client: three(&site), values: Default::default(), pending: Default::default() };
        assert_eq!(cache.client.cmd(&format!("CLIENT TRACKING ON{mode}")), ok());
        for step in 0..1500 {
            let key = format!("k{}", random.below(30));
            if random.below(3) == 0 {
                // Not awaited, so that it races with reads in flight.
                writer.post(&format!("SET {key} {step}"));
                written += 1;
            }
            if mode == " NOLOOP" && random.below(4) == 0 {
                // A failed write changes nothing: changes of other clients are still reported.
                let only_new = if random.below(2) == 0 { " NX" } else { "" };
                cache.client.post(&format!("SET {key} own{step}{only_new}"));
                cache.pending.push_back((key.clone(), true));
            }
            if !cache.values.contains_key(&key)
                && (mode != " BCAST PREFIX k1 PREFIX k2" || key.starts_with("k1") || key.starts_with("k2"))
            {
                if mode == " OPTIN" {
                    cache.client.post("CLIENT CACHING YES");
                }
                cache.client.post(&format!("GET {key}"));
                if mode == " OPTIN" {
                    loop {
                        match cache.client.reply() {
                            Value::Simple(_) => break,
                            other => cache.take(other),
                        }
                    }
                }
                cache.pending.push_back((key, false));
            }
            if random.below(4) == 0 {
                cache.settle();
            }
            if random.below(20) == 0 {
                for _ in 0..std::mem::take(&mut written) {
                    assert_eq!(writer.reply(), ok());
                }
            }
        }
        cache.settle();
        // All invalidations have arrived when no more come.
        until("the cache agrees with the nodes", || {
            cache.client.timeout(Duration::from_millis(50));
            while let Ok(reply) = cache.client.try_reply() {
                cache.take(reply);
            }
            cache.client.timeout(TIMEOUT);
            let mut reader = site.client();
            cache.values.iter().all(|(key, value)| reader.cmd(&format!("GET {key}")) == bulk(value))
        });
        // Checks that the cache is used. Otherwise the test would show nothing.
        for i in 10..20 {
            if mode != " OPTIN" && !cache.values.contains_key(&format!("k{i}")) {
                cache.client.post(&format!("GET k{i}"));
                cache.pending.push_back((format!("k{i}"), false));
            }
        }
        cache.settle();
        assert!(mode == " OPTIN" || cache.values.len() >= 10, "{:?}", cache.values);
    }
}

/// A tracking client, and the connection that receives its invalidations.
struct Reader<'a> {
    client: Client,
    /// Target of redirected invalidations.
    target: Option<&'a mut Client>,
}

impl Reader<'_> {
    /// Returns all invalidations from nodes up to now, without the marker key that the node invalidates last. Changes
    /// that were acknowledged before this call are included.
    fn drain_invalidations(&mut self, writer: &mut Client) -> Vec<Value> {
        let mut told = Vec::new();
        self.client.post("GET {t}end");
        while let push @ Value::Push(_) = self.client.reply() {
            told.push(push);
        }
        assert_eq!(writer.cmd("SET {t}end x"), ok());
        let hears = self.target.as_deref_mut().unwrap_or(&mut self.client);
        loop {
            match hears.reply() {
                push if push == invalidate(&["{t}end"]) => return told,
                push => told.push(push),
            }
        }
    }
}

#[test]
fn noloop_omits_keys_that_the_client_has_replaced() {
    let site = Site::new(2);
    let mut writer = site.client();
    let mut target = site.client();
    let id = target.cmd("CLIENT ID").int();
    target.cmd("HELLO 3");
    for redirect in [String::new(), format!(" REDIRECT {id}")] {
        let mut reader = Reader { client: three(&site), target: (!redirect.is_empty()).then_some(&mut target) };
        assert_eq!(reader.client.cmd(&format!("CLIENT TRACKING ON NOLOOP{redirect}")), ok());
        for (own, untold) in [
            ("SET {t}k 1", true),
            ("SET {t}k 1 EX 100", true),
            ("SETEX {t}k 100 1", true),
            ("MSET {t}k 1 {t}other 2", true),
            ("INCR {t}k", true),
            ("GETDEL {t}k", true),
            ("GETSET {t}k 1", true),
            ("DEL {t}k", true),
            // These keep a part of the old value, or do not report their change.
            ("APPEND {t}k 1", false),
            ("EXPIRE {t}k 100", false),
            ("DEL {t}k {t}other", false),
            ("EVAL \"return redis.call('SET', KEYS[1], '1')\" 1 {t}k", false),
        ] {
            for _ in 0..5 {
                assert_eq!(writer.cmd("SET {t}k 7"), ok());
                // The invalidation of this write must not be mistaken for one of the client's own write.
                assert_eq!(reader.drain_invalidations(&mut writer), [], "{own}{redirect}");
                reader.client.cmd("GET {t}k");
                let reply = reader.client.cmd(own);
                assert!(reply.error().is_none(), "{own}: {reply:?}");
                let told = reader.drain_invalidations(&mut writer);
                let expected = if untold || direct() { vec![] } else { vec![invalidate(&["{t}k"])] };
                assert_eq!(told, expected, "{own}{redirect}");
            }
        }
        // A write that changes nothing removes no key from tracking, and reads after a write are tracked.
        for own in [&["SET {t}k 1 NX"][..], &["SET {t}k 1", "GET {t}k"], &["DEL {t}missing"], &["SET {t}k"]] {
            for in_one_piece in [true, false] {
                reader.client.cmd("GET {t}k");
                let mut told = Vec::new();
                if in_one_piece {
                    own.iter().for_each(|command| reader.client.post(command));
                }
                for command in own {
                    if !in_one_piece {
                        reader.client.post(command);
                    }
                    while let push @ Value::Push(_) = reader.client.reply() {
                        told.push(push);
                    }
                }
                told.extend(reader.drain_invalidations(&mut writer));
                // The client may receive an invalidation for its own write if it reads after it. Then it reads again.
                if !told.is_empty() {
                    assert!(own.len() > 1 && told == [invalidate(&["{t}k"])], "{own:?}{redirect}: {told:?}");
                    reader.client.cmd("GET {t}k");
                }
                assert_eq!(writer.cmd("SET {t}k 8"), ok());
                assert_eq!(reader.drain_invalidations(&mut writer), [invalidate(&["{t}k"])], "{own:?}{redirect}");
            }
        }
    }
}

#[test]
fn a_client_blocked_at_a_node_receives_invalidations() {
    let site = Site::new(2);
    let mut client = three(&site);
    assert_eq!(client.cmd("CLIENT TRACKING ON"), ok());
    for round in 0..3 {
        client.cmd("GET k");
        client.post("BLPOP nothing 0");
        until("it waits", || site.client().cmd("CLIENT LIST").text().contains(" flags=bt "));
        site.client().cmd(&format!("SET k {round}"));
        assert_eq!(client.reply(), invalidate(&["k"]));
        site.client().cmd("RPUSH nothing x");
        assert_eq!(client.reply(), Value::Array(vec![bulk("nothing"), bulk("x")]));
    }
}

#[test]
fn info_counts_tracked_keys_and_clients() {
    let site = Site::new(2);
    let mut reader = three(&site);
    reader.cmd("CLIENT TRACKING ON");
    let mut broadcast = three(&site);
    broadcast.cmd("CLIENT TRACKING ON BCAST PREFIX a PREFIX b");
    let shows = |line: &str| until(line, || site.client().cmd("INFO stats").text().lines().any(|l| l == line));
    for key in ["x", "y", "z"] {
        reader.cmd(&format!("GET {key}"));
    }
    shows("tracking_total_keys:3");
    shows("tracking_total_items:3");
    shows("tracking_total_prefixes:2");
    site.client().cmd("SET y 1");
    shows("tracking_total_keys:2");
    site.client().cmd("FLUSHALL");
    shows("tracking_total_keys:0");
    broadcast.cmd("CLIENT TRACKING OFF");
    shows("tracking_total_prefixes:0");
}

#[test]
fn adding_a_prefix_invalidates_no_existing_cache() {
    let site = Site::new(2);
    let mut client = three(&site);
    let mut other = three(&site);
    assert_eq!(client.cmd("CLIENT TRACKING ON BCAST PREFIX a"), ok());
    for prefix in ["b", "c", "d"] {
        assert_eq!(client.cmd(&format!("CLIENT TRACKING ON BCAST PREFIX {prefix}")), ok());
        assert_eq!(other.cmd(&format!("CLIENT TRACKING ON BCAST PREFIX {prefix}{prefix}")), ok());
        assert_eq!(other.cmd("CLIENT TRACKING OFF"), ok());
    }
    let mut writer = site.client();
    for key in ["a1", "b1", "c1", "d1", "e1", "dd1"] {
        writer.cmd(&format!("SET {key} x"));
        if key != "e1" {
            assert_eq!(client.reply(), invalidate(&[key]));
        }
    }
    assert_eq!(client.cmd("PING"), simple("PONG"));
}

#[test]
fn a_lost_node_connection_invalidates_everything() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = three(&site);
    assert_eq!(client.cmd("CLIENT TRACKING ON"), ok());
    let tags = site.tags();
    client.cmd(&format!("GET {{{}}}k", tags[0][0]));
    client.cmd(&format!("GET {{{}}}k", tags[1][0]));
    client.listen(Duration::from_millis(50));
    // Closes only the connection, like a node whose output limit is exceeded.
    let list = site.nodes()[0].cmd("CLIENT LIST").text();
    let line = list
        .lines()
        .filter(|l| l.contains(" flags=tB ") || l.contains("flags=tB"))
        .map(|l| l[3..].split(' ').next().expect("an id").to_owned());
    for id in line.collect::<Vec<_>>() {
        site.nodes()[0].cmd(&format!("CLIENT KILL ID {id}"));
    }
    assert_eq!(client.reply(), forget_all());
    // Tracking is restored: reads in the meantime were not tracked.
    assert_eq!(client.reply(), forget_all());
    let key = format!("{{{}}}k", tags[0][0]);
    client.cmd(&format!("GET {key}"));
    site.client().cmd(&format!("SET {key} x"));
    assert_eq!(client.reply(), invalidate(&[&key]));
    // The node itself.
    site.node_mut(0).kill();
    assert_eq!(client.reply(), forget_all());
    assert_eq!(client.cmd("PING"), simple("PONG"));
    site.node_mut(0).restart();
    assert_eq!(client.reply(), forget_all());
    // Each worker and each of its connections reconnects separately: a failed command is neither a read nor a write.
    let until_done = |client: &mut Client, line: &str| until(line, || client.cmd(line).error().is_none());
    until_done(&mut client, &format!("GET {key}"));
    until_done(&mut site.client(), &format!("SET {key} y"));
    assert_eq!(client.reply(), invalidate(&[&key]));
}

#[test]
fn transactions_are_tracked() {
    let site = Site::new(2);
    let mut client = three(&site);
    let mut writer = site.client();
    assert_eq!(client.cmd("CLIENT TRACKING ON"), ok());
    for round in 0..10 {
        client.cmd("MULTI");
        client.cmd("GET k");
        // A write between queueing and execution: EXEC reads the newer value, and tracking must start there.
        writer.cmd(&format!("SET k a{round}"));
        client.post("EXEC");
        loop {
            match client.reply() {
                Value::Push(_) => {}
                reply => {
                    assert_eq!(reply, Value::Array(vec![bulk(format!("a{round}"))]));
                    break;
                }
            }
        }
        writer.cmd(&format!("SET k b{round}"));
        until("the invalidation arrives", || client.reply() == invalidate(&["k"]));
    }
}

#[test]
fn nodes_without_resp3_cannot_be_tracked() {
    let node = NodeOptions { config: "rename-command HELLO \"\"\n".into(), ..NodeOptions::default() };
    let Some(site) = Site::router_only(2, &SiteOptions { node, ..SiteOptions::default() }) else { return };
    let mut client = three(&site);
    let error = client.cmd("CLIENT TRACKING ON");
    assert!(error.expect_error().contains("does not speak RESP3"), "{error:?}");
    assert_eq!(client.cmd("CLIENT GETREDIR"), int(-1));
    assert_eq!(client.cmd("SET k v"), ok());
}
