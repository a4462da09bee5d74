//! Reads from replicas of a cluster: which member replies, also while slots migrate, owners fail over, and replicas die.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::cluster_storage::Members;
use crate::replicas::calls;
use crate::support::{Client, Value, bulk, direct, encode, int, ok, until};

const READS_REPLICAS: &str = "[clients]\nreads = \"prefer-replica\"\n";

/// Maximum age of a value that a replica returns in these tests. Replicas on the same machine are milliseconds behind; a
/// replica that follows no more is excluded within a second.
const AGE_MAX: Duration = Duration::from_secs(3);

/// Number of the replica of the member that owns a key.
fn replica_of(members: &Members, key: &str) -> usize {
    let primaries = members.nodes.len() / 2;
    primaries + members.owner(key)
}

/// Waits until the replica of a key's owner replies to reads of it.
fn until_read_at_replica(members: &Members, client: &mut Client, key: &str) {
    let replica = replica_of(members, key);
    let before = calls(&members.nodes[replica], "strlen");
    until("the replica is read", || {
        assert!(client.cmd(&format!("STRLEN {key}")).int() > 0);
        calls(&members.nodes[replica], "strlen") > before
    });
}

#[test]
fn reads_go_to_replicas_of_a_cluster() {
    if direct() {
        return;
    }
    let members = Members::start_with(3, 3);
    let router = members.router(READS_REPLICAS);
    let mut client = Client::connect(router.address());
    for key in ["a", "b", "c"] {
        assert_eq!(client.cmd(&format!("SET {key} v")), ok());
        until_read_at_replica(&members, &mut client, key);
    }
    // From now on each of these reads goes to the replica, and each write to the owner, in any pipeline.
    let (owner, replica) = (&members.nodes[members.owner("a")], &members.nodes[replica_of(&members, "a")]);
    let (at_owner, at_replica) = (calls(owner, "strlen"), calls(replica, "strlen"));
    let mut pipeline = Vec::new();
    for _ in 0..50 {
        pipeline.extend(encode(&["STRLEN", "a"]));
        pipeline.extend(encode(&["APPEND", "{a}log", "x"]));
    }
    let replies = client.pipeline(&pipeline, 100);
    for (number, pair) in replies.chunks(2).enumerate() {
        assert_eq!(pair[0], b":1\r\n");
        assert_eq!(pair[1], format!(":{}\r\n", number + 1).into_bytes());
    }
    assert_eq!((calls(owner, "strlen") - at_owner, calls(replica, "strlen") - at_replica), (0, 50));
    // Replies that a missing key would cause as well are those of the owner.
    let (at_owner, at_replica) = (calls(owner, "get"), calls(replica, "get"));
    assert_eq!(client.cmd("GET {a}nothing"), Value::Nil);
    assert_eq!((calls(owner, "get") - at_owner, calls(replica, "get") - at_replica), (1, 1));
    let error = client.cmd("LLEN a");
    assert!(error.error().is_some_and(|error| error.starts_with("WRONGTYPE")), "{error:?}");
    // So a read after the client's own first write of a key finds it, although its replica may not have it yet.
    for number in 0..200 {
        let mut pipeline = encode(&["SET", &format!("{{a}}{number}"), "new"]);
        pipeline.extend(encode(&["GET", &format!("{{a}}{number}")]));
        assert_eq!(client.pipeline(&pipeline, 2), [b"+OK\r\n".to_vec(), b"$3\r\nnew\r\n".to_vec()]);
    }
    // Reads of several keys, and of large values in pieces, by the owner.
    let at_replica = calls(replica, "mget");
    assert_eq!(client.cmd("MGET a {a}0"), Value::Array(vec![bulk("v"), bulk("new")]));
    assert_eq!(calls(replica, "mget"), at_replica);
    for number in 0..100 {
        client.cmd(&format!("SADD {{a}}set {number}"));
    }
    let mut found = 0;
    let mut cursor = "0".to_owned();
    loop {
        let page = client.cmd(&format!("SSCAN {{a}}set {cursor} COUNT 10"));
        found += page.items()[1].items().len();
        cursor = page.items()[0].text();
        if cursor == "0" {
            break;
        }
    }
    assert_eq!((found >= 100, calls(replica, "sscan")), (true, 0));
}

#[test]
fn keys_that_a_replica_lacks_are_read_from_their_owner() {
    if direct() {
        return;
    }
    let members = Members::start_with(2, 2);
    let router = members.router(READS_REPLICAS);
    let mut client = Client::connect(router.address());
    for number in 0..20 {
        assert_eq!(client.cmd(&format!("SET {{k}}{number} v{number}")), ok());
    }
    until_read_at_replica(&members, &mut client, "{k}0");
    members.settle();
    let from = members.owner("k");
    let (to, replica) = (1 - from, replica_of(&members, "k"));
    // Keys leave the owner, and so its replica, which does not know that the slot migrates.
    members.open("k", from, to);
    members.migrate(from, to, &(0..10).map(|number| format!("{{k}}{number}")).collect::<Vec<_>>());
    until("the replica lacks the keys", || {
        let mut direct = members.nodes[replica].client();
        assert_eq!(direct.cmd("READONLY"), ok());
        direct.cmd("GET {k}0") == Value::Nil
    });
    let at_replica = calls(&members.nodes[replica], "get");
    for number in 0..20 {
        assert_eq!(client.cmd(&format!("GET {{k}}{number}")), bulk(format!("v{number}")));
    }
    assert!(calls(&members.nodes[replica], "get") >= at_replica + 20, "the replica was not read");
    assert_eq!(client.cmd("SET {k}0 changed"), ok());
    assert_eq!(client.cmd("GET {k}0"), bulk("changed"));
    members.close("k", from, to);
    for number in 1..20 {
        assert_eq!(client.cmd(&format!("GET {{k}}{number}")), bulk(format!("v{number}")));
    }
    until_read_at_replica(&members, &mut client, "{k}0");
    // A replica of another member redirects. Its redirects cause no error, and change no owner.
    let replica = replica_of(&members, "k");
    let other = members.ids[members.owner("k") ^ 1].clone();
    assert_eq!(members.nodes[replica].cmd(&format!("CLUSTER REPLICATE {other}")), ok());
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) {
        assert_eq!(client.cmd("GET {k}1"), bulk("v1"));
    }
}

#[test]
fn a_dead_replica_costs_no_error() {
    if direct() {
        return;
    }
    let mut members = Members::start_with(2, 2);
    let router = members.router(READS_REPLICAS);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until_read_at_replica(&members, &mut client, "k");
    let (owner, replica) = (members.owner("k"), replica_of(&members, "k"));
    let reads = encode(&["GET", "k"]).repeat(100);
    // Commands in flight at a suspended replica, and then at a dead one.
    members.nodes[replica].freeze();
    assert_eq!(client.pipeline(&reads, 100), vec![b"$1\r\nv\r\n".to_vec(); 100]);
    let at_owner = calls(&members.nodes[owner], "get");
    assert_eq!(client.pipeline(&reads, 100), vec![b"$1\r\nv\r\n".to_vec(); 100]);
    assert!(calls(&members.nodes[owner], "get") >= at_owner + 100);
    members.nodes[replica].thaw();
    until_read_at_replica(&members, &mut client, "k");
    let address = router.address();
    let (is_over, reads) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Client::connect(address);
                    while !is_over.load(Ordering::Relaxed) {
                        assert_eq!(client.cmd("GET k"), bulk("v"));
                        reads.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let at_least = |more: u64| {
            let before = reads.load(Ordering::Relaxed);
            until("clients read", || {
                readers.iter().any(|r| r.is_finished()) || reads.load(Ordering::Relaxed) > before + more
            });
        };
        at_least(100);
        members.nodes[replica].kill();
        at_least(1000);
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_policy_without_primaries_needs_a_replica() {
    if direct() {
        return;
    }
    let mut members = Members::start_with(2, 2);
    let router = members.router("[clients]\nreads = \"replica\"\n");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until("a replica can be read", || client.cmd("GET k") == bulk("v"));
    assert_eq!(client.cmd("GET {k}nothing"), Value::Nil);
    let replica = replica_of(&members, "k");
    members.nodes[replica].kill();
    until("no replica can be read", || {
        let reply = client.cmd("GET k");
        let is_refused = reply.error().is_some_and(|error| error.starts_with("NODEDOWN no replica of"));
        assert!(is_refused || reply == bulk("v"), "{reply:?}");
        is_refused
    });
    assert_eq!(client.cmd("SET k w"), ok());
}

/// Writes increasing numbers to a key, and reads them by another client. Fails after an error, a missing key, a value that
/// was not written yet, or one that had been overwritten for longer than [`AGE_MAX`].
fn write_and_read(address: SocketAddr, key: &str, is_over: &AtomicBool, reads: &AtomicU64) {
    let (begun, written) = (AtomicU64::new(0), std::sync::Mutex::new(Vec::<Instant>::new()));
    let mut client = Client::connect(address);
    assert_eq!(client.cmd(&format!("SET {key} 0")), ok());
    written.lock().expect("lock").push(Instant::now());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for number in 1.. {
                if is_over.load(Ordering::Relaxed) {
                    return;
                }
                begun.store(number, Ordering::SeqCst);
                assert_eq!(client.cmd(&format!("SET {key} {number}")), ok());
                written.lock().expect("lock").push(Instant::now());
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let mut reader = Client::connect(address);
        while !is_over.load(Ordering::Relaxed) && !writer.is_finished() {
            let asked = Instant::now();
            let reply = reader.cmd(&format!("GET {key}"));
            let Value::Bulk(text) = &reply else { panic!("{key}: {reply:?}") };
            let value: usize = std::str::from_utf8(text).expect("text").parse().expect("a number");
            assert!(value as u64 <= begun.load(Ordering::SeqCst), "{key}: {value} was not written yet");
            if let Some(overwritten) = written.lock().expect("lock").get(value + 1) {
                let age = asked.saturating_duration_since(*overwritten);
                assert!(age < AGE_MAX, "{key}: {value} had been overwritten {age:?} before");
            }
            reads.fetch_add(1, Ordering::Relaxed);
        }
    });
}

#[test]
fn reads_are_right_during_reshards_and_failovers() {
    if direct() {
        return;
    }
    let members = Members::start_with(3, 3);
    let router = members.router(READS_REPLICAS);
    let (address, is_over, reads) = (router.address(), AtomicBool::new(false), AtomicU64::new(0));
    let keys = ["{h0}a", "{h1}b", "{h2}c"];
    std::thread::scope(|scope| {
        let (is_over, reads) = (&is_over, &reads);
        let clients: Vec<_> =
            keys.iter().map(|key| scope.spawn(move || write_and_read(address, key, is_over, reads))).collect();
        let more = |count: u64| {
            let before = reads.load(Ordering::Relaxed);
            until("clients read", || {
                clients.iter().any(|client| client.is_finished()) || reads.load(Ordering::Relaxed) > before + count
            });
        };
        more(500);
        for round in 0..6 {
            members.reshard(["h0", "h1", "h2"][round % 3]);
            more(300);
        }
        for number in 0..3 {
            let next = number + 3;
            let mut attempts = 0;
            until("the replica is the primary", || {
                // A failover that does not get its votes in time is given up.
                if attempts % 600 == 0 {
                    members.nodes[next].cmd("CLUSTER FAILOVER");
                }
                attempts += 1;
                members.is_primary(next)
            });
            more(300);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let at_replicas: u64 = members
        .nodes
        .iter()
        .filter(|node| node.cmd("ROLE").items()[0].text() == "slave")
        .map(|node| calls(node, "get"))
        .sum();
    assert!(at_replicas > 0, "no replica was read");
    assert_eq!(Client::connect(address).cmd("EXISTS {h0}a {h1}b {h2}c"), int(3));
}

#[test]
fn wait_counts_the_replicas_of_the_owner() {
    if direct() {
        return;
    }
    let members = Members::start_with(2, 1);
    let router = members.router("");
    let key = ["a", "b", "c", "d"].into_iter().find(|key| members.owner(key) == 0).expect("a key");
    let replica = &members.nodes[2];
    let mut client = Client::connect(router.address());
    assert_eq!((client.cmd(&format!("SET {key} 1")), client.cmd("WAIT 1 0")), (ok(), int(1)));
    replica.freeze();
    // Each connection for WAIT writes something itself: without that, it would confirm a write that it has not made.
    for _ in 0..2 {
        let mut client = Client::connect(router.address());
        assert_eq!((client.cmd(&format!("SET {key} 2")), client.cmd("WAIT 1 100")), (ok(), int(0)));
    }
    replica.thaw();
    assert_eq!((client.cmd(&format!("SET {key} 3")), client.cmd("WAIT 1 0")), (ok(), int(1)));
    assert_eq!(replica.cmd("FUNCTION LIST"), Value::Array(Vec::new()));
}
