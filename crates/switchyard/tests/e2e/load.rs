//! Mixed load through the router with all replies checked: the load generator owns its keys, so it knows every expected
//! reply.

use std::time::{Duration, Instant};

use switchyard_bench::load::{self, Mix, Pace, Settings, Sharing, Skew, Summary};

use crate::support::{NodeOptions, RouterOptions, Site, SiteOptions};

fn settings(site: &Site) -> Settings {
    Settings {
        target: site.address(),
        threads: 1,
        connections: 20,
        pipeline: 8,
        pace: Pace::Closed,
        duration: Duration::from_millis(700),
        mix: Mix::default(),
        sizes: "64:8,4000:1".parse().expect("sizes"),
        keys: 2000,
        skew: Skew::Zipfian(0.99),
        sharing: Sharing::Owned,
        prefix: "load:".to_owned(),
        doubt: load::Doubt::Lasting,
        seed: 1,
    }
}

fn drive(settings: &Settings) -> Summary {
    load::start(settings).expect("the load starts").finish().expect("the load ends")
}

#[track_caller]
fn assert_clean(summary: &Summary) {
    assert!(summary.total.is_clean(), "{:?}\n{:#?}", summary.total, summary.complaints);
    assert!(summary.total.replies > 50, "{:?}", summary.total.replies);
}

#[test]
fn a_mixed_load_gets_no_wrong_reply() {
    let site = Site::new(3);
    assert_clean(&drive(&settings(&site)));
    // Deep pipelines on few keys, shared by all connections.
    assert_clean(&drive(&Settings {
        pipeline: 100,
        keys: 20,
        sharing: Sharing::Shared,
        prefix: "shared:".to_owned(),
        ..settings(&site)
    }));
}

/// Large values switch lanes all the time, in both directions, between small commands.
#[test]
fn large_values_among_small_ones_neither_hang_nor_mix() {
    drive_large_among_small(&Site::new(2));
}

/// Without io_uring, which a kernel may lack or a container may forbid, sends are separate system calls.
#[test]
fn the_same_load_passes_without_io_uring() {
    let Some(site) = Site::router_only(2, &SiteOptions::config("batched-sends = false")) else { return };
    assert_eq!(
        site.client().cmd("INFO switchyard").text().lines().find(|l| l.starts_with("batched_sends")),
        Some("batched_sends:no")
    );
    assert_clean(&drive(&settings(&site)));
    drive_large_among_small(&site);
}

fn drive_large_among_small(site: &Site) {
    for (seed, mix) in [(1, "get=50,set=50"), (2, "get=40,set=30,mget=10,del=5,incr=10")] {
        let settings = Settings {
            sizes: "64:5,300000:1,2000000:1".parse().expect("sizes"),
            mix: mix.parse().expect("a mix"),
            connections: 6,
            keys: 60,
            prefix: format!("large{seed}:"),
            seed,
            ..settings(site)
        };
        assert_clean(&drive(&settings));
    }
}

/// A GET with an unexpectedly large reply is sent again on a separate connection. Later commands must not wait forever.
#[test]
fn a_large_reply_is_followed_by_a_large_request() {
    let site = Site::new(1);
    let large = vec![b'x'; 2_000_000];
    // All at once: each waits for a separate connection, which must be opened.
    std::thread::scope(|scope| {
        for client in 0..20 {
            let (site, large) = (&site, &large);
            scope.spawn(move || {
                // Written at the node, so that the router does not know the size.
                let (fresh, other) = (format!("fresh{client}"), format!("other{client}"));
                site.nodes()[0].client().call(&[b"SET", fresh.as_bytes(), large]);
                let mut client = site.client();
                let mut both = crate::support::encode(&[b"GET", fresh.as_bytes()]);
                both.extend(crate::support::encode(&[b"SET".as_slice(), other.as_bytes(), large]));
                let mut writer = client.stream().try_clone().expect("a second handle");
                // Small pieces first: one arrives in the same turn as the connection for the read, and must not be sent
                // before the read.
                let writing = std::thread::spawn(move || {
                    let (first, rest) = both.split_at(100_000);
                    for piece in first.chunks(100) {
                        std::thread::sleep(Duration::from_micros(20));
                        std::io::Write::write_all(&mut writer, piece)?;
                    }
                    std::io::Write::write_all(&mut writer, rest)
                });
                assert_eq!(client.reply().bytes().len(), large.len());
                assert_eq!(client.reply(), crate::support::ok());
                writing.join().expect("the writer").expect("written");
                assert!(
                    client.call(&[b"GET".as_slice(), other.as_bytes()]).bytes() == *large,
                    "nothing but its bytes is stored"
                );
            });
        }
    });
}

/// Large replies of several nodes in one pipeline, to a client that begins to read late: each is paused, and must be
/// resumed.
#[test]
fn large_replies_of_several_nodes_reach_a_slow_reader() {
    let site = Site::new(3);
    let keys: Vec<String> = (0..8).map(|i| format!("big{i}")).collect();
    let value = |i: usize| vec![b'a' + i as u8; 4_000_000];
    let mut client = site.client();
    for (i, key) in keys.iter().enumerate() {
        assert_eq!(client.call(&[b"SET", key.as_bytes(), &value(i)]), crate::support::ok());
        // Read once, so that the router knows that the value is large, and immediately uses a separate connection.
        assert_eq!(client.call(&[b"GET".as_slice(), key.as_bytes()]).bytes().len(), 4_000_000);
    }
    let mut slow = site.client();
    for key in &keys {
        slow.post(&format!("GET {key}"));
    }
    // Long enough to fill all buffers. Otherwise the test would pass without testing anything.
    std::thread::sleep(Duration::from_millis(300));
    for (i, key) in keys.iter().enumerate() {
        assert!(slow.reply().bytes() == value(i), "the value of {key}");
    }
}

/// A hanging node causes errors, but never a wrong value: it may execute received commands when it resumes.
#[test]
fn a_hanging_node_causes_errors_but_no_wrong_reply() {
    let Some(site) = Site::router_only(
        2,
        &SiteOptions::config("[nodes]\ncommand-timeout = \"300ms\"\nconnect-timeout = \"300ms\"\n"),
    ) else {
        return;
    };
    let mut run =
        load::start(&Settings { duration: Duration::from_secs(4), ..settings(&site) }).expect("the load starts");
    while run.take_interval().replies == 0 {
        std::thread::sleep(Duration::from_millis(5));
    }
    site.nodes()[0].freeze();
    while run.take_interval().errors == 0 && !run.is_finished() {
        std::thread::sleep(Duration::from_millis(5));
    }
    site.nodes()[0].thaw();
    let summary = run.finish().expect("the load ends");
    assert!(summary.total.errors > 0, "{:?}", summary.total);
    assert_eq!(
        (summary.total.wrong, summary.total.unanswered, summary.total.disconnects),
        (0, 0, 0),
        "{:#?}",
        summary.complaints
    );
    assert!(
        summary.complaints.iter().any(|c| c.contains(&site.nodes()[0].address().to_string())),
        "{:#?}",
        summary.complaints
    );
}

/// Kills and restarts each node in turn, while clients read and write.
fn rolling_restart(node: &[&str], config: &str) -> Option<(Summary, Vec<String>)> {
    let node = NodeOptions { args: node.iter().map(|arg| (*arg).to_owned()).collect(), ..NodeOptions::default() };
    let router = RouterOptions::config(config);
    let mut site = Site::router_only(3, &SiteOptions { node, router })?;
    let settings = Settings { duration: Duration::from_secs(120), keys: 300, ..settings(&site) };
    let mut run = load::start(&settings).expect("the load starts");
    // Between the restarts, the keys of every node are read and written.
    let some_load = |run: &mut load::Run| {
        let (began, mut replies) = (Instant::now(), 0);
        while (replies < 1000 || began.elapsed() < Duration::from_millis(500)) && !run.is_finished() {
            replies += run.take_interval().replies;
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(replies >= 1000, "the load stands still");
    };
    for _ in 0..3 {
        for index in 0..3 {
            some_load(&mut run);
            site.node_mut(index).restart();
        }
    }
    some_load(&mut run);
    run.stop();
    let names = site.nodes().iter().map(|node| node.address().to_string()).collect();
    Some((run.finish().expect("the load ends"), names))
}

/// Nodes sync acknowledged writes to disk (appendfsync always), so no reply may ever be wrong: errors during the
/// restart, and correct values afterwards.
#[test]
fn a_rolling_restart_causes_errors_but_no_wrong_reply() {
    let Some((summary, nodes)) = rolling_restart(&["--appendonly", "yes", "--appendfsync", "always"], "") else {
        return;
    };
    assert!(summary.total.errors > 0, "{:?}", summary.total);
    assert_eq!(
        (summary.total.wrong, summary.total.unanswered, summary.total.disconnects),
        (0, 0, 0),
        "{:#?}",
        summary.complaints
    );
    let named = |complaint: &String| nodes.iter().any(|node| complaint.contains(node));
    assert!(summary.complaints.iter().any(named), "{:#?}", summary.complaints);
}

/// Uses nodes that lose their keys: shows that the test above would detect it.
#[test]
fn a_rolling_restart_that_loses_keys_is_detected() {
    let Some((summary, _)) = rolling_restart(&[], "[nodes]\non-data-loss = \"serve\"\n") else { return };
    assert!(summary.total.wrong > 0, "{:?}", summary.total);
}
