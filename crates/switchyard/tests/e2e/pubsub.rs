//! Pub/sub: subscriptions of clients, multiplexed onto one connection per worker and node.

use std::io::Read as _;
use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, direct, int, ok, simple, until,
};

fn three(site: &Site) -> Client {
    let mut client = site.client();
    client.cmd("HELLO 3");
    client
}

fn message(channel: &str, text: &str) -> Vec<Value> {
    vec![bulk("message"), bulk(channel), bulk(text)]
}

/// Returns the value of a metric without labels.
#[track_caller]
fn metric(site: &Site, name: &str) -> f64 {
    let text = site.router().metrics();
    let line = text.lines().find_map(|l| l.strip_prefix(&format!("switchyard_{name} ")));
    line.unwrap_or_else(|| panic!("no metric {name} in\n{text}")).parse().expect("a number")
}

/// Returns the index of the node that receives PUBLISH of this channel, found by publishing.
fn owner_of(site: &Site, channel: &str) -> usize {
    let mut clients: Vec<Client> = site.nodes().iter().map(Node::client).collect();
    for client in &mut clients {
        assert_eq!(client.cmd(&format!("SUBSCRIBE {channel}")).items()[2], int(1));
    }
    site.client().cmd(&format!("PUBLISH {channel} where"));
    until("a node has the message", || {
        clients.iter_mut().position(|c| {
            c.timeout(Duration::from_millis(20));
            c.try_reply().is_ok()
        })
    })
}

/// Returns the bytes of replies up to the reply to a PING with this marker.
fn up_to_marker(client: &mut Client, marker: &str) -> Vec<u8> {
    client.send(&["PING", marker]);
    let mut all = Vec::new();
    loop {
        let raw = client.raw();
        let last = raw.windows(marker.len()).any(|w| w == marker.as_bytes());
        all.extend_from_slice(&raw);
        if last {
            return all;
        }
    }
}

#[test]
fn the_bytes_match_a_single_server() {
    let site = Site::new(3);
    let plain = Node::start(&NodeOptions::default());
    for script in [
        &[
            "SUBSCRIBE a b a",
            "CLIENT ID",
            "GET k",
            "PING",
            "PING x",
            "PING x y",
            "PUBLISH a 1",
            "SSUBSCRIBE s t",
            "PSUBSCRIBE p*",
            "NOSUCH",
            "SUBSCRIBE",
            "UNSUBSCRIBE b",
            "UNSUBSCRIBE",
            "UNSUBSCRIBE",
            "UNSUBSCRIBE zz",
            "SUNSUBSCRIBE t zz",
            "SUNSUBSCRIBE",
            "PUNSUBSCRIBE",
            "GET k",
            "SUNSUBSCRIBE",
            "CLIENT GETNAME",
        ][..],
        &[
            "HELLO 3",
            "SUBSCRIBE a b a",
            "SET k v",
            "GET k",
            "PSUBSCRIBE a* \"\" *",
            "PUNSUBSCRIBE",
            "PUNSUBSCRIBE",
            "PUBSUB NUMSUB a b c",
            "PUBSUB NUMPAT",
            "PUBSUB SHARDNUMSUB a",
            "SSUBSCRIBE a",
            "PUBSUB SHARDNUMSUB a",
            "PUBSUB SHARDCHANNELS",
            "PUBSUB CHANNELS b*",
            "HELLO 2",
        ],
        &[
            "SUBSCRIBE a",
            "RESET",
            "GET k",
            "PUBSUB NUMSUB a",
            "PUBSUB CHANNELS",
            "PUBSUB CHANNELS a b",
            "PUBSUB NUMSUB",
            "PUBSUB",
        ],
        &[
            "HELLO 3",
            "UNSUBSCRIBE",
            "PUNSUBSCRIBE x",
            "SUNSUBSCRIBE",
            "PUBLISH nobody x",
            "SPUBLISH nobody x",
            "PUBLISH x",
        ],
    ] {
        let (mut routed, mut reference) = (site.client(), plain.client());
        for (number, line) in script.iter().enumerate() {
            routed.post(line);
            reference.post(line);
            let marker = format!("marker-{number}");
            let (ours, theirs) = (up_to_marker(&mut routed, &marker), up_to_marker(&mut reference, &marker));
            if line.starts_with("HELLO") {
                continue; // contains the client's id
            }
            let (ours, theirs) = (ours.escape_ascii().to_string(), theirs.escape_ascii().to_string());
            // UNSUBSCRIBE without names iterates a hash table.
            let same = ours == theirs || line.ends_with("UNSUBSCRIBE") && ours.len() == theirs.len();
            assert!(same, "{line} in {script:?}:\n{ours}\ninstead of\n{theirs}");
        }
        // The next script must not see other scripts' channels.
        drop((routed, reference));
        let is_alone = |mut client: Client| client.cmd("PUBSUB CHANNELS").items().is_empty();
        until("both clients are gone", || is_alone(site.client()) && is_alone(plain.client()));
    }
    // QUIT and a half-close end a subscribed client.
    let mut client = site.client();
    client.cmd("SUBSCRIBE a");
    assert_eq!(client.cmd("QUIT"), ok());
    assert!(client.closed_within(TIMEOUT));
}

#[test]
fn confirmations_are_sent_even_if_replies_are_off() {
    let site = Site::new(2);
    let mut client = three(&site);
    client.post("CLIENT REPLY OFF");
    client.post("SET k v");
    assert_eq!(client.cmd("SUBSCRIBE a"), Value::Push(vec![bulk("subscribe"), bulk("a"), int(1)]));
    client.post("PING");
    site.client().cmd("PUBLISH a x");
    assert_eq!(client.reply(), Value::Push(message("a", "x")));
    assert_eq!(client.cmd("CLIENT REPLY ON"), ok());
    let mut client = site.client();
    client.post("CLIENT REPLY SKIP");
    assert_eq!(client.cmd("SUBSCRIBE a").items()[2], int(1));
    assert_eq!(client.cmd("PING").items()[0], bulk("pong"));
}

#[test]
fn every_subscriber_gets_every_message_once_and_in_order() {
    let site = Site::new(3);
    let mut subscribers: Vec<Client> = (0..40).map(|i| if i % 2 == 0 { site.client() } else { three(&site) }).collect();
    for client in &mut subscribers {
        client.post("SUBSCRIBE one two");
        client.post("PSUBSCRIBE o*");
        for count in 1..=3 {
            assert_eq!(client.reply().items()[2], int(count));
        }
    }
    let mut publisher = site.client();
    // Over all workers: each client by its channel and by its pattern.
    assert_eq!(publisher.cmd("PUBLISH one 0"), int(80));
    assert_eq!(publisher.cmd("PUBLISH two 0"), int(40));
    assert_eq!(publisher.cmd("PUBLISH other 0"), int(40));
    assert_eq!(publisher.cmd("PUBLISH nobody 0"), int(0));
    assert_eq!(
        publisher.cmd("PUBSUB NUMSUB one two three"),
        Value::Array(vec![bulk("one"), int(40), bulk("two"), int(40), bulk("three"), int(0)])
    );
    assert_eq!(publisher.cmd("PUBSUB NUMPAT"), int(1));
    for i in 1..=200 {
        publisher.post(&format!("PUBLISH one {i}"));
        publisher.post(&format!("SET k{i} {i}"));
    }
    for _ in 1..=200 {
        assert_eq!(publisher.reply(), int(80));
        assert_eq!(publisher.reply(), ok());
    }
    for client in &mut subscribers {
        let (mut exact, mut pattern, mut rest) = (0, 0, 0);
        while exact + pattern + rest < 201 * 2 + 2 {
            let reply = client.reply();
            let items = reply.items();
            match (items[0].text().as_str(), items.last().expect("items").text().parse::<i64>()) {
                ("message", Ok(i)) if items[1] == bulk("one") => {
                    assert_eq!(i, exact, "a message is missing, doubled or out of order");
                    exact += 1;
                }
                ("pmessage", Ok(i)) if items[2] == bulk("one") => {
                    assert_eq!((i, &items[1]), (pattern, &bulk("o*")));
                    pattern += 1;
                }
                _ => rest += 1,
            }
        }
        assert_eq!((exact, pattern, rest), (201, 201, 2));
        let (more, closed) = client.listen(Duration::from_millis(20));
        assert!(more.is_empty() && !closed, "{:?}", more.escape_ascii().to_string());
    }
    if !direct() {
        assert_eq!(metric(&site, "subscriptions"), 120.0);
        // Two workers, three nodes, three names.
        assert!(metric(&site, "node_subscriptions") <= 18.0);
        assert!(metric(&site, "messages_total") >= 80.0 * 201.0);
    }
}

#[test]
fn no_message_after_the_confirmation_is_missed() {
    let site = Site::new(3);
    let mut direct: Vec<Client> = site.nodes().iter().map(Node::client).collect();
    let mut publisher = site.client();
    for round in 0..150 {
        let mut client = if round % 2 == 0 { site.client() } else { three(&site) };
        let channel = format!("fresh-{round}");
        let verb = ["SUBSCRIBE", "PSUBSCRIBE"][round % 3 % 2];
        client.cmd(&format!("{verb} {channel}"));
        // At every node, bypassing the router, like scripts and other applications.
        for publisher in direct.iter_mut().chain([&mut publisher]) {
            publisher.cmd(&format!("PUBLISH {channel} x"));
            assert_eq!(client.reply().items().last(), Some(&bulk("x")), "{verb}, round {round}");
        }
    }
}

#[test]
fn commands_after_a_subscription_wait_for_it() {
    let site = Site::new(3);
    for round in 0..30 {
        let mut client = three(&site);
        client.post("SET k v");
        client.post(&format!("SUBSCRIBE a{round} b{round}"));
        client.post(&format!("PUBLISH a{round} x"));
        client.post(&format!("PUBSUB NUMSUB a{round}"));
        client.post(&format!("UNSUBSCRIBE a{round}"));
        client.post(&format!("SUBSCRIBE c{round}"));
        client.post("GET k");
        let mut replies = Vec::new();
        let mut messages = 0;
        while replies.len() < 8 {
            match client.reply() {
                Value::Push(items) if items[0] == bulk("message") => {
                    assert!(replies.len() >= 3, "a message came before the confirmation");
                    messages += 1;
                }
                other => replies.push(other),
            }
        }
        assert_eq!(messages, 1, "the client's own message");
        let name = |n: &str| bulk(format!("{n}{round}"));
        let expected = [
            ok(),
            Value::Push(vec![bulk("subscribe"), name("a"), int(1)]),
            Value::Push(vec![bulk("subscribe"), name("b"), int(2)]),
            int(1),
            Value::Array(vec![name("a"), int(1)]),
            Value::Push(vec![bulk("unsubscribe"), name("a"), int(1)]),
            Value::Push(vec![bulk("subscribe"), name("c"), int(2)]),
            bulk("v"),
        ];
        assert_eq!(replies, expected);
        // RESP2: later commands find the client subscribed.
        let mut client = site.client();
        client.post(&format!("SUBSCRIBE a{round}"));
        client.post("GET k");
        client.post("UNSUBSCRIBE");
        client.post("GET k");
        assert_eq!(client.reply().items()[2], int(1));
        assert!(client.reply().expect_error().starts_with("ERR Can't execute 'get'"));
        assert_eq!(client.reply().items()[2], int(0));
        assert_eq!(client.reply(), bulk("v"));
    }
}

#[test]
fn shard_channels_live_at_the_owner_of_their_slot() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    // Like a single server, and unlike a cluster's node, the router accepts shard channels of several slots in one
    // command.
    let names: Vec<String> = (0..20).map(|i| format!("shard-{i}")).collect();
    client.post(&format!("SSUBSCRIBE {}", names.join(" ")));
    for count in 1..=20 {
        assert_eq!(client.reply().items()[2], int(count));
    }
    let mut total = 0;
    for node in site.nodes() {
        let here = node.cmd("PUBSUB SHARDCHANNELS").items().len();
        assert!(here > 0, "20 channels leave a node out");
        total += here;
    }
    assert_eq!(total, 20);
    let mut publisher = site.client();
    for name in &names {
        assert_eq!(publisher.cmd(&format!("SPUBLISH {name} x")), int(1));
        assert_eq!(client.reply(), Value::Array(vec![bulk("smessage"), bulk(name), bulk("x")]));
        // Shard channels are separate from plain channels.
        assert_eq!(publisher.cmd(&format!("PUBLISH {name} x")), int(0));
    }
    drop(client);
    until("the nodes have lost their subscriptions", || {
        site.nodes().iter().all(|n| n.cmd("PUBSUB SHARDCHANNELS").items().is_empty())
    });
}

#[test]
fn messages_from_scripts_and_direct_publishers_reach_clients() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    client.cmd("SUBSCRIBE events");
    let mut publisher = site.client();
    let tags = site.tags();
    for (number, tags) in tags.iter().enumerate() {
        // Executed on the node of the key, wherever the channel belongs.
        publisher.send(&[
            "EVAL",
            "return redis.call('PUBLISH', ARGV[1], ARGV[2])",
            "1",
            &format!("{{{}}}k", tags[0]),
            "events",
            "s",
        ]);
        publisher.reply().int();
        assert_eq!(client.reply(), Value::Array(message("events", "s")), "a script at node {number}");
        site.nodes()[number].cmd("PUBLISH events d");
        assert_eq!(client.reply(), Value::Array(message("events", "d")), "a publisher at node {number}");
    }
    // Clients of the node itself are counted in addition to the router's.
    let owner = owner_of(&site, "events");
    assert_eq!(client.reply(), Value::Array(message("events", "where")));
    let mut beside = site.nodes()[owner].client();
    beside.cmd("SUBSCRIBE events");
    until("the node has forgotten the probes", || {
        let count = publisher.cmd("PUBLISH events x").int();
        count == 2
    });
}

#[test]
fn keyspace_notifications_come_from_all_nodes() {
    let node = NodeOptions { args: vec!["--notify-keyspace-events".into(), "KEA".into()], ..NodeOptions::default() };
    let site = Site::with(3, &SiteOptions { node, ..SiteOptions::default() });
    let mut client = site.client();
    client.cmd("PSUBSCRIBE __keyevent@0__:*");
    let mut exact = site.client();
    exact.cmd("SUBSCRIBE __keyevent@0__:set");
    let mut keyspace = three(&site);
    keyspace.cmd("SUBSCRIBE __keyspace@0__:k7");
    let mut writer = site.client();
    for i in 0..60 {
        writer.cmd(&format!("SET k{i} v"));
    }
    let mut keys: Vec<String> = (0..60).map(|_| client.reply().items()[3].text()).collect();
    let mut again: Vec<String> = (0..60).map(|_| exact.reply().items()[2].text()).collect();
    keys.sort_unstable();
    again.sort_unstable();
    let mut wanted: Vec<String> = (0..60).map(|i| format!("k{i}")).collect();
    wanted.sort_unstable();
    assert_eq!(keys, wanted, "each event once");
    assert_eq!(again, wanted);
    assert_eq!(keyspace.reply(), Value::Push(message("__keyspace@0__:k7", "set")));
    writer.cmd("SET short v PX 20");
    let events: Vec<String> = (0..3).map(|_| client.reply().items()[2].text()).collect();
    assert_eq!(events, ["__keyevent@0__:set", "__keyevent@0__:expire", "__keyevent@0__:expired"]);
}

#[test]
fn subscriptions_are_restored_when_their_node_returns() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    client.post("SUBSCRIBE a b c d");
    client.post("PSUBSCRIBE *");
    for _ in 0..5 {
        client.reply();
    }
    let victim = owner_of(&site, "a");
    for _ in 0..2 {
        client.reply(); // messages of the probe, by name and by pattern
    }
    let shard = format!("{{{}}}shard", site.tags()[victim][0]);
    site.node_mut(victim).kill();
    let mut other = site.client();
    until("the loss is counted", || metric(&site, "subscriptions_lost_total") >= 5.0);
    // In the meantime no client is refused, and another node delivers the messages of its channels.
    let mut pattern = site.client();
    assert_eq!(pattern.cmd("PSUBSCRIBE n*").items()[2], int(1));
    let (mut late_one, mut of_shard) = (site.client(), site.client());
    assert_eq!(late_one.cmd("SUBSCRIBE a").items()[2], int(1));
    assert_eq!(of_shard.cmd(&format!("SSUBSCRIBE {shard}")).items()[2], int(1));
    until("a message passes", || other.cmd("PUBLISH a meanwhile").error().is_none());
    assert_eq!(late_one.reply(), Value::Array(message("a", "meanwhile")));
    assert!(other.cmd(&format!("SPUBLISH {shard} x")).expect_error().starts_with("NODEDOWN "));
    site.node_mut(victim).restart();
    let (mut by_name, mut by_pattern, mut late) = (0, 0, 0);
    until("messages arrive again", || {
        other.cmd("PUBLISH a again");
        pattern.timeout(Duration::from_millis(20));
        other.cmd("PUBLISH new again");
        late += usize::from(pattern.try_reply().is_ok());
        client.timeout(Duration::from_millis(20));
        while let Ok(reply) = client.try_reply() {
            match reply.items()[0].text().as_str() {
                "message" => by_name += 1,
                _ => by_pattern += 1,
            }
        }
        by_name > 0 && by_pattern > 0 && late > 0
    });
    until("they are restored", || site.router().process().log().contains("restoring subscriptions at node"));
    until("messages from the node itself arrive", || site.nodes()[victim].cmd("PUBLISH a direct").int() >= 2);
    until("messages of the shard channel arrive", || other.cmd(&format!("SPUBLISH {shard} again")).error().is_none());
    assert_eq!(of_shard.reply(), Value::Array(vec![bulk("smessage"), bulk(&shard), bulk("again")]));
    drop(late_one);
    // Restored: exactly once per name.
    client.listen(Duration::from_millis(100));
    until("all workers are back", || other.cmd("PUBLISH a count").int() == 2);
    client.listen(Duration::from_millis(100));
    client.timeout(TIMEOUT);
    other.cmd("PUBLISH a last");
    let mut kinds: Vec<String> = (0..2).map(|_| client.reply().items()[0].text()).collect();
    kinds.sort();
    assert_eq!(kinds, ["message", "pmessage"]);
}

#[test]
fn a_node_that_disappears_without_a_close_is_detected() {
    let Some(site) = Site::router_only(
        1,
        &SiteOptions::config("[nodes]\ncommand-timeout = \"300ms\"\n[clients]\non-missed-messages = \"continue\"\n"),
    ) else {
        return;
    };
    let mut client = site.client();
    client.cmd("SUBSCRIBE a");
    let before = metric(&site, "subscriptions_lost_total");
    site.nodes()[0].freeze();
    until("the subscription is given up", || metric(&site, "subscriptions_lost_total") > before);
    site.nodes()[0].thaw();
    let mut publisher = site.client();
    until("it is back", || {
        publisher.cmd("PUBLISH a x");
        client.timeout(Duration::from_millis(20));
        client.try_reply().ok()
    });
}

#[test]
fn clients_that_may_have_missed_messages_are_disconnected() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::config("[clients]\non-missed-messages = \"disconnect\"\n"))
    else {
        return;
    };
    let (owner, other) = (owner_of(&site, "a"), (owner_of(&site, "a") + 1) % 3);
    let shard = |node: usize| format!("{{{}}}shard", site.tags()[node][0]);
    let (mut channel, mut pattern, mut three, mut own, mut elsewhere, mut plain) =
        (site.client(), site.client(), three(&site), site.client(), site.client(), site.client());
    channel.cmd("SUBSCRIBE a");
    pattern.cmd("PSUBSCRIBE x*");
    three.cmd("SUBSCRIBE b");
    own.cmd(&format!("SSUBSCRIBE {}", shard(owner)));
    elsewhere.cmd(&format!("SSUBSCRIBE {}", shard(other)));
    assert_eq!(plain.cmd("PING"), simple("PONG"));
    let name = shard(other);
    site.node_mut(owner).kill();
    for client in [&mut channel, &mut pattern, &mut three, &mut own] {
        assert!(client.closed_within(TIMEOUT), "it would not know that it missed something");
    }
    // Clients without subscriptions there stay connected.
    let mut publisher = site.client();
    assert_eq!(publisher.cmd(&format!("SPUBLISH {name} x")), int(1));
    assert_eq!(elsewhere.reply(), Value::Array(vec![bulk("smessage"), bulk(&name), bulk("x")]));
    assert_eq!(plain.cmd("PING"), simple("PONG"));
    assert_eq!(metric(&site, "clients_disconnected_total{reason=\"missed\"}"), 4.0);
    site.node_mut(owner).restart();
    let mut again = site.client();
    until("it can subscribe again", || again.cmd("SUBSCRIBE a").error().is_none());
    until("the message arrives", || publisher.cmd("PUBLISH a x") == int(1));
    assert_eq!(again.reply(), Value::Array(message("a", "x")));
}

/// Subscribers of a shard channel are disconnected with its node, subscribers of channels and patterns with the last
/// node. Then new subscriptions fail.
#[test]
fn subscribers_stay_while_any_node_serves() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let first = owner_of(&site, "a");
    let shard = |node: usize| format!("{{{}}}shard", site.tags()[node][0]);
    let (mut channel, mut pattern, mut own, mut elsewhere) =
        (site.client(), three(&site), site.client(), site.client());
    channel.cmd("SUBSCRIBE a");
    pattern.cmd("PSUBSCRIBE a*");
    own.cmd(&format!("SSUBSCRIBE {}", shard(first)));
    elsewhere.cmd(&format!("SSUBSCRIBE {}", shard(1 - first)));
    site.node_mut(first).kill();
    assert_eq!(own.listen(TIMEOUT), (Vec::new(), true));
    let mut publisher = site.client();
    until("a message passes", || publisher.cmd("PUBLISH a x") == int(2));
    assert_eq!(channel.reply(), Value::Array(message("a", "x")));
    assert_eq!(pattern.reply().items()[3], bulk("x"));
    site.node_mut(1 - first).kill();
    for client in [&mut channel, &mut pattern, &mut elsewhere] {
        assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    }
    for line in ["SUBSCRIBE a", "PSUBSCRIBE a*", "SSUBSCRIBE a"] {
        until("no client can subscribe", || {
            let mut late = site.client();
            late.post(line);
            late.closed_within(Duration::from_secs(1))
        });
    }
}

#[test]
fn a_slow_subscriber_is_closed_and_affects_no_other_client() {
    let options = SiteOptions {
        node: NodeOptions::default(),
        router: RouterOptions::config("[clients]\npush-limit = \"1mb\"\n"),
    };
    let Some(site) = Site::router_only(2, &options) else { return };
    let mut slow: Vec<Client> = (0..4).map(|i| if i % 2 == 0 { site.client() } else { three(&site) }).collect();
    let mut good: Vec<Client> = (0..4).map(|_| site.client()).collect();
    for client in slow.iter_mut().chain(&mut good) {
        client.cmd("SUBSCRIBE firehose");
    }
    let payload = "x".repeat(50_000);
    let mut publisher = site.client();
    let begin = Instant::now();
    let mut sent = 0;
    while metric(&site, "clients_disconnected_total{reason=\"push\"}") < 4.0 {
        assert!(begin.elapsed() < TIMEOUT, "a client that reads nothing is never cut");
        for _ in 0..20 {
            publisher.send(&["PUBLISH", "firehose", &payload]);
            sent += 1;
        }
        for _ in 0..20 {
            publisher.reply().int();
        }
        for client in &mut good {
            for _ in 0..20 {
                assert_eq!(client.reply().items()[2].bytes().len(), payload.len());
            }
        }
    }
    assert!(sent >= 20);
    assert_eq!(publisher.cmd("PUBLISH firehose last"), int(4), "the cut ones no longer count");
    for client in &mut slow {
        assert!(client.closed_within(TIMEOUT));
    }
    for client in &mut good {
        assert_eq!(client.reply().items()[2], bulk("last"));
    }
}

/// Redis's soft limit: far below the hard limit, but for too long.
#[test]
fn a_subscriber_that_stays_behind_is_finally_closed() {
    let config = "[clients]\npush-limit = \"256mb\"\npush-soft-limit = \"64kb\"\npush-soft-time = \"8s\"\n";
    let Some(site) = Site::router_only(1, &SiteOptions::config(config)) else { return };
    let (mut slow, mut good, mut late) = (site.client(), site.client(), site.client());
    for client in [&mut slow, &mut good] {
        client.cmd("SUBSCRIBE firehose");
    }
    let payload = "x".repeat(100_000);
    let mut publisher = site.client();
    // More than the kernel's buffers hold, if those of the receivers do not grow.
    const MESSAGES: usize = 60;
    let mut publish = |good: &mut Client| {
        (0..MESSAGES).for_each(|_| publisher.post(&format!("PUBLISH firehose {payload}")));
        for _ in 0..MESSAGES {
            assert_eq!(publisher.reply(), int(2));
            assert_eq!(good.reply().items()[2].bytes().len(), payload.len());
        }
        publisher.cmd("CLIENT LIST").text()
    };
    for client in [&slow, &late] {
        rustix::net::sockopt::set_socket_recv_buffer_size(client.stream(), 64 << 10).expect("a small buffer");
    }
    publish(&mut good);
    until("the one that does not read is cut", || metric(&site, "clients_disconnected_total{reason=\"push\"}") == 1.0);
    assert!(slow.closed_within(TIMEOUT));
    assert!(site.router().process().log().contains("clients.push-soft-limit"));
    // A client that lags only briefly is not closed, even if it lags for more than the limit in total.
    late.cmd("SUBSCRIBE firehose");
    let mut lag = Duration::ZERO;
    while lag < Duration::from_secs(9) {
        let begin = Instant::now();
        let list = publish(&mut good);
        let waiting =
            list.split_whitespace().filter_map(|field| field.strip_prefix("omem=")?.parse::<usize>().ok()).max();
        assert!(waiting > Some(64 << 10), "no client lags: {list}");
        std::thread::sleep(Duration::from_secs(1));
        for _ in 0..MESSAGES {
            assert_eq!(late.reply().items()[2].bytes().len(), payload.len());
        }
        lag += begin.elapsed();
    }
    assert_eq!(metric(&site, "clients_disconnected_total{reason=\"push\"}"), 1.0);
}

#[test]
fn info_counts_subscriptions() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let fields = || -> Vec<String> {
        let info = site.client().cmd("INFO everything").text();
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::to_owned);
        let names = ["pubsub_clients", "pubsub_channels", "pubsub_patterns", "pubsubshard_channels"];
        names.map(|name| field(name).unwrap_or_else(|| panic!("no {name} in {info}"))).to_vec()
    };
    assert_eq!(fields(), ["0", "0", "0", "0"]);
    // Over both workers, with each channel counted once.
    let mut clients: Vec<Client> = (0..6).map(|_| site.client()).collect();
    for client in &mut clients {
        client.cmd("SUBSCRIBE news");
    }
    clients[0].cmd("PSUBSCRIBE n*");
    clients[1].cmd("SSUBSCRIBE shard");
    clients[2].cmd("SUBSCRIBE other");
    assert_eq!(fields(), ["6", "2", "1", "1"]);
    clients[0].cmd("UNSUBSCRIBE news");
    clients[0].cmd("PUNSUBSCRIBE n*");
    assert_eq!(fields(), ["5", "2", "0", "1"]);
    clients[1].cmd("RESET");
    clients.truncate(2);
    until("they have gone", || fields() == ["0", "0", "0", "0"]);
}

#[test]
fn large_messages_pass_and_never_split_a_reply() {
    let site = Site::new(2);
    let mut client = three(&site);
    let value = "v".repeat(6 << 20);
    assert_eq!(client.call(&["SET", "big", &value]), ok());
    client.cmd("SUBSCRIBE a");
    let mut publisher = site.client();
    publisher.call(&["PUBLISH", "a", &value]);
    assert_eq!(client.reply(), Value::Push(message("a", &value)));
    // Messages during a large reply in pieces, and during one that cannot be requested again.
    for round in 0..6 {
        client.post(if round % 2 == 0 { "GET big" } else { "GETEX big PERSIST" });
        for i in 0..50 {
            publisher.cmd(&format!("PUBLISH a {i}"));
        }
        let (mut messages, mut replies) = (0, 0);
        while messages < 50 || replies < 1 {
            match client.reply() {
                Value::Push(items) => {
                    assert_eq!(items[2], bulk(messages.to_string()));
                    messages += 1;
                }
                other => {
                    assert_eq!(other.bytes().len(), value.len());
                    replies += 1;
                }
            }
        }
    }
}

#[test]
fn thousands_of_subscribers_share_one_connection_per_worker_and_node() {
    let Some(site) = Site::router_only(
        2,
        &SiteOptions::router(RouterOptions { open_files: Some(8192), ..RouterOptions::default() }),
    ) else {
        return;
    };
    let mut clients: Vec<Client> = (0..1500).map(|_| site.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        client.post(&format!("SUBSCRIBE all own-{i}"));
    }
    for client in &mut clients {
        client.reply();
        client.reply();
    }
    let mut publisher = site.client();
    assert_eq!(publisher.cmd("PUBLISH all x"), int(1500));
    for client in &mut clients {
        assert_eq!(client.reply().items()[2], bulk("x"));
    }
    for (i, client) in clients.iter_mut().enumerate().step_by(50) {
        assert_eq!(publisher.cmd(&format!("PUBLISH own-{i} y")), int(1));
        assert_eq!(client.reply().items()[2], bulk("y"));
    }
    for node in site.nodes() {
        let list = node.cmd("CLIENT LIST TYPE pubsub").text();
        assert!((1..=2).contains(&list.lines().count()), "two workers have one each:\n{list}");
    }
    // One client with thousands of subscriptions, in one command and one by one.
    let mut many = three(&site);
    let names: Vec<String> = (0..5000).map(|i| format!("many-{i}")).collect();
    let mut command = vec!["SUBSCRIBE"];
    command.extend(names.iter().map(String::as_str));
    many.send(&command);
    for count in 1..=5000 {
        assert_eq!(many.reply().items()[2], int(count));
    }
    for i in 0..2000 {
        many.post(&format!("PSUBSCRIBE many-pattern-{i}"));
    }
    for count in 5001..=7000 {
        assert_eq!(many.reply().items()[2], int(count));
    }
    assert_eq!(publisher.cmd("PUBLISH many-4999 z"), int(1));
    assert_eq!(many.reply(), Value::Push(message("many-4999", "z")));
    drop((many, clients));
    until("everything is given up at the nodes", || {
        let left = |n: &Node| n.cmd("PUBSUB CHANNELS").items().len() as i64 + n.cmd("PUBSUB NUMPAT").int();
        site.nodes().iter().all(|n| left(n) == 0)
    });
    assert_eq!(metric(&site, "subscriptions"), 0.0);
    assert_eq!(metric(&site, "node_subscriptions"), 0.0);
    assert_eq!(publisher.cmd("PUBSUB CHANNELS"), Value::Array(vec![]));
}

#[test]
fn subscriptions_of_a_client_are_limited() {
    let Some(site) = Site::router_only(1, &SiteOptions::config("[clients]\nsubscriptions-max = 10\n")) else { return };
    let mut client = site.client();
    client.post("SUBSCRIBE 1 2 3 4 5 6 7 8 9");
    for count in 1..=9 {
        assert_eq!(client.reply().items()[2], int(count));
    }
    let error = client.cmd("PSUBSCRIBE a b");
    assert!(error.expect_error().contains("clients.subscriptions-max"), "{error:?}");
    assert_eq!(client.cmd("SUBSCRIBE 9").items()[2], int(9), "an existing subscription does not count");
    assert_eq!(client.cmd("PSUBSCRIBE a").items()[2], int(10));
    client.cmd("SSUBSCRIBE a").expect_error();
    assert_eq!(client.cmd("UNSUBSCRIBE 1").items()[2], int(9));
    assert_eq!(client.cmd("SSUBSCRIBE a").items()[2], int(1));
}

/// After reading OK, a client may check whether its connection has ended (as pools do), and other clients may count
/// subscribers: both must see the end.
#[test]
fn a_client_that_has_quit_is_gone_with_the_reply() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut others: Vec<Client> = (0..4).map(|_| site.client()).collect();
    for round in 0..300 {
        let mut client = site.client();
        assert_eq!(client.cmd("PSUBSCRIBE hello*").items()[2], int(1));
        assert_eq!(client.cmd("QUIT"), ok());
        client.stream().set_nonblocking(true).expect("a socket");
        assert!(matches!(client.stream().read(&mut [0; 1]), Ok(0)), "round {round}: the connection seems to live on");
        for other in &mut others {
            assert_eq!(other.cmd("PUBLISH hello-all text"), int(0), "round {round}");
        }
    }
}

#[test]
fn errors_of_nodes_reach_the_subscribing_client() {
    let node = NodeOptions {
        config: "user default on nopass ~* +@all resetchannels &open*\n".into(),
        ..NodeOptions::default()
    };
    let site = Site::with(2, &SiteOptions { node, ..SiteOptions::default() });
    let mut client = three(&site);
    assert!(client.cmd("SUBSCRIBE secret").expect_error().starts_with("NOPERM"));
    assert_eq!(client.cmd("SUBSCRIBE open-1"), Value::Push(vec![bulk("subscribe"), bulk("open-1"), int(1)]));
    assert!(client.cmd("SUBSCRIBE open-2 secret").expect_error().starts_with("NOPERM"));
    assert_eq!(client.cmd("PUBSUB CHANNELS"), Value::Array(vec![bulk("open-1")]), "all or nothing");
    assert!(client.cmd("PUBLISH secret x").expect_error().starts_with("NOPERM"));
}

#[test]
fn client_list_shows_subscribers() {
    let site = Site::new(2);
    let mut client = three(&site);
    client.post("SUBSCRIBE a b");
    client.post("PSUBSCRIBE a*");
    client.post("SSUBSCRIBE s");
    for _ in 0..4 {
        client.reply();
    }
    let mut other = site.client();
    let id = client.cmd("CLIENT ID").int();
    let list = other.cmd(&format!("CLIENT LIST ID {id}")).text();
    assert!(list.contains(" flags=P ") && list.contains(" sub=2 psub=1 ssub=1 "), "{list}");
    assert_eq!(other.cmd("CLIENT LIST TYPE pubsub").text().lines().count(), 1);
    assert!(!other.cmd("CLIENT LIST TYPE normal").text().contains("sub=2"));
    assert_eq!(other.cmd("CLIENT KILL TYPE pubsub"), int(1));
    assert!(client.closed_within(TIMEOUT));
    assert_eq!(other.cmd("PING"), simple("PONG"));
}

#[test]
fn subscribers_are_not_idle() {
    let Some(site) = Site::router_only(1, &SiteOptions::config("[clients]\nidle-timeout = \"300ms\"\n")) else {
        return;
    };
    let mut subscriber = site.client();
    subscriber.cmd("SUBSCRIBE a");
    let mut idle = site.client();
    idle.cmd("PING");
    assert!(idle.closed_within(TIMEOUT));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(site.client().cmd("PUBLISH a x"), int(1));
    assert_eq!(subscriber.reply().items()[2], bulk("x"));
}

#[test]
fn publish_works_in_transactions() {
    let site = Site::new(3);
    let mut subscribers: Vec<Client> = (0..3).map(|_| site.client()).collect();
    for subscriber in &mut subscribers {
        subscriber.cmd("SUBSCRIBE events");
    }
    let mut client = site.client();
    for i in 0..12 {
        client.cmd("MULTI");
        assert_eq!(client.cmd(&format!("SET key{i} v")), simple("QUEUED"));
        assert_eq!(client.cmd(&format!("PUBLISH events {i}")), simple("QUEUED"));
        assert_eq!(client.cmd("PUBLISH nobody x"), simple("QUEUED"));
        assert_eq!(client.cmd(&format!("GET key{i}")), simple("QUEUED"));
        // The node's clients are counted, not the router's workers.
        assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok(), int(3), int(0), bulk("v")]));
        for subscriber in &mut subscribers {
            assert_eq!(subscriber.reply(), Value::Array(message("events", &i.to_string())));
        }
    }
    // A transaction that is not executed leaves nothing for the next.
    client.cmd("MULTI");
    client.cmd("PUBLISH events x");
    client.cmd("DISCARD");
    client.cmd("MULTI");
    client.cmd("APPEND number 7");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(1)]));
}

#[test]
fn own_messages_follow_the_reply_to_their_publish() {
    // Redis 7.0 sends them before the reply, and in EXEC in the middle of it.
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = three(&site);
    client.cmd("SUBSCRIBE foo");
    let publishes = "EVAL \"redis.call('PUBLISH', 'foo', 'a') redis.call('PUBLISH', 'foo', 'b') return 'done'\" 0";
    for round in 0..200 {
        match round % 3 {
            0 => {
                client.cmd("MULTI");
                for command in ["PUBLISH foo a", "INCR x", "PUBLISH foo b"] {
                    assert_eq!(client.cmd(command), simple("QUEUED"));
                }
                let reply = client.cmd("EXEC");
                assert!(matches!(&reply, Value::Array(items) if items.len() == 3), "{reply:?}");
            }
            1 => assert_eq!(client.cmd(publishes), bulk("done")),
            _ => {
                assert_eq!(client.cmd("PUBLISH foo a"), int(1));
                assert_eq!(client.reply(), Value::Push(message("foo", "a")));
                assert_eq!(client.cmd("PUBLISH foo b"), int(1));
                assert_eq!(client.reply(), Value::Push(message("foo", "b")));
                continue;
            }
        }
        assert_eq!(client.reply(), Value::Push(message("foo", "a")));
        assert_eq!(client.reply(), Value::Push(message("foo", "b")));
    }
    // Messages of other clients do not wait for commands that publish nothing.
    let mut blocked = three(&site);
    blocked.cmd("SUBSCRIBE foo");
    blocked.post("BLPOP nothing 0");
    assert_eq!(site.client().cmd("PUBLISH foo c"), int(2));
    assert_eq!(blocked.reply(), Value::Push(message("foo", "c")));
}
