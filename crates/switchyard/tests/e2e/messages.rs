//! Log lines about operators' commands: readable, once each, and none about removed nodes.

use crate::movectl::{done, names, refused};
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, encode, ok, until};

/// Returns the log lines that contain all of these words.
#[track_caller]
fn lines(site: &Site, words: &[&str]) -> Vec<String> {
    let log = site.router().process().log();
    log.lines().filter(|line| words.iter().all(|word| line.contains(word))).map(str::to_owned).collect()
}

#[test]
fn requests_for_moves_and_their_ends_are_one_log_line_each() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let mut client = site.client();
    let fill: Vec<u8> = (0..4000).flat_map(|i| encode(&["SET", &format!("key:{i}"), &"x".repeat(100)])).collect();
    assert!(client.pipeline(&fill, 4000).iter().all(|reply| reply == b"+OK\r\n"));
    done(site.router(), &format!("move --from {} --to {} --all --goal gentle --max-rate 100kb", names[0], names[1]));
    eventually("keys move", || the_move(site.router(), 1)["keys_moved"].as_u64().filter(|keys| *keys > 0));
    done(site.router(), "moves max-rate 1 50kb");
    let text = refused(site.router(), &format!("nodes remove {}", names[1]));
    assert!(text.contains("`switchyard moves abort 1`"), "{text}");
    done(site.router(), "moves max-rate 1 none");
    done(site.router(), "moves goal 1 fast");
    wait_for(site.router(), 1, "done");
    // The last line of them: a separate thread writes the log in order.
    site.router().process().expect_log(&["move 1 is done"]);
    for (words, times) in [
        (&["move 1 is done"][..], 1),
        (&["audit", "asked: move 1 with at most 51200 bytes per second"], 1),
        (&["audit", "asked: move 1 with its goal's rate"], 1),
        (&["audit", "asked: move 1 with the goal fast"], 1),
        (&["audit", "remove node"], 1),
        (&["audit", "refused: remove node ", "takes part in move 1"], 1),
        (&["a move has ended"], 0),
        (&["a leg has ended"], 0),
        (&["admin request"], 0),
        (&["Some("], 0),
        (&["None"], 0),
        (&["outcome="], 0),
        (&["suppressed=0"], 0),
    ] {
        assert_eq!(lines(&site, words).len(), times, "{words:?}:\n{}", site.router().process().log());
    }
}

#[test]
fn a_removed_node_is_no_longer_logged() {
    let options = SiteOptions::config("[nodes]\nreconnect-backoff-max = \"100ms\"\n");
    let Some(site) = Site::router_only(2, &options) else { return };
    let names = names(&site);
    let mut third = Node::start(&NodeOptions::default());
    let name = third.address().to_string();
    // A deliberate close is no loss.
    done(site.router(), &format!("nodes add {name} --rebalance --wait"));
    done(site.router(), &format!("nodes drain {name} --wait"));
    done(site.router(), &format!("nodes remove {name}"));
    until("it is gone", || !lines(&site, &["removed", &name]).is_empty());
    assert_eq!(lines(&site, &["lost a connection"]), [""; 0]);
    done(site.router(), &format!("nodes add {name}"));
    until("it is up", || !lines(&site, &["node is up", &name]).is_empty());
    third.kill();
    until("it is down", || !lines(&site, &["node cannot be reached", &name]).is_empty());
    done(site.router(), &format!("nodes remove {name}"));
    // Each changes the workers' routing.
    for (from, to) in [(0, 1), (1, 0), (0, 1), (1, 0)] {
        done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[from], names[to]));
    }
    // Longer than the longest pause between connection attempts.
    let before = lines(&site, &["removed"]);
    std::thread::sleep(std::time::Duration::from_millis(500));
    assert_eq!(lines(&site, &["removed"]), before);
    assert_eq!(lines(&site, &["a removed node"]), [""; 0]);
    let mut client = Client::connect(site.router().address());
    assert_eq!(client.cmd("SET k v"), ok());
}
