//! SCAN while nodes join, leave, exchange keys and restart: every key that exists throughout is returned, and no call
//! fails.

use std::collections::BTreeSet;

use crate::movectl::{done, names};
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, encode, int, ok};

const KEYS: usize = 3000;

fn fill(client: &mut Client) {
    let bytes: Vec<u8> = (0..KEYS).flat_map(|i| encode(&["SET", &format!("k{i}"), "x"])).collect();
    assert!(client.pipeline(&bytes, KEYS).iter().all(|reply| reply == b"+OK\r\n"));
}

/// An unfinished scan.
struct Scan {
    client: Client,
    options: &'static str,
    cursor: String,
    seen: BTreeSet<String>,
}

impl Scan {
    fn begin(site: &Site, database: u32, options: &'static str) -> Scan {
        let mut client = site.client();
        assert_eq!(client.cmd(&format!("SELECT {database}")), ok());
        Scan { client, options, cursor: "0".to_owned(), seen: BTreeSet::new() }
    }

    /// Makes one call. Returns whether the scan continues.
    fn step(&mut self) -> bool {
        let reply = self.client.cmd(&format!("SCAN {} {}", self.cursor, self.options));
        let [next, keys] = reply.items() else { panic!("SCAN {} gave {reply:?}", self.cursor) };
        self.seen.extend(keys.items().iter().map(crate::support::Value::text));
        self.cursor = next.text();
        assert!(self.cursor.parse::<u64>().is_ok_and(|cursor| cursor < 1 << 53), "cursor {}", self.cursor);
        self.cursor != "0"
    }

    fn until_seen(&mut self, keys: usize) {
        while self.seen.len() < keys {
            assert!(self.step(), "{} keys and an end", self.seen.len());
        }
    }

    /// Completes the scan. Returns the number of missing keys.
    fn missed(mut self) -> usize {
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(steps < 20_000, "it ends: {}", self.cursor);
        }
        (0..KEYS).filter(|i| !self.seen.contains(&format!("k{i}"))).count()
    }
}

#[test]
fn a_removed_node_costs_a_scan_no_key() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    fill(&mut site.client());
    let names = names(&site);
    done(site.router(), &format!("nodes drain {} --wait", names[0]));
    // One scan before the remaining nodes, and one at each of them.
    let mut scans = [100, 1000, 2500].map(|keys| {
        let mut scan = Scan::begin(&site, 0, "COUNT 20");
        scan.until_seen(keys);
        scan
    });
    done(site.router(), &format!("nodes remove {}", names[0]));
    for scan in &mut scans {
        scan.step();
    }
    assert_eq!(scans.map(Scan::missed), [0, 0, 0]);
}

#[test]
fn joining_and_drained_nodes_cost_a_scan_no_key() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    fill(&mut site.client());
    let third = Node::start(&NodeOptions::default());
    let names = names(&site);
    let mut scans = [200, 1000, 2000, 2800].map(|keys| {
        let mut scan = Scan::begin(&site, 0, if keys == 1000 { "COUNT 20 MATCH k* TYPE string" } else { "COUNT 20" });
        scan.until_seen(keys);
        scan
    });
    let steps = |scans: &mut [Scan; 4]| scans.iter_mut().for_each(|scan| assert!(scan.step(), "there is more"));
    done(site.router(), &format!("nodes add {} --rebalance --wait", third.address()));
    steps(&mut scans);
    done(site.router(), &format!("move --from {} --to {} --all --wait", names[1], names[0]));
    steps(&mut scans);
    done(site.router(), &format!("nodes drain {} --wait", third.address()));
    steps(&mut scans);
    done(site.router(), &format!("nodes remove {}", third.address()));
    assert_eq!(scans.map(Scan::missed), [0, 0, 0, 0]);
}

/// A new process has its keys in another order: a cursor of the previous process is meaningless for it.
#[test]
fn a_node_that_restarts_costs_a_scan_no_key() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SELECT 3"), ok());
    fill(&mut client);
    let mut scans = [700, 2300].map(|keys| {
        let mut scan = Scan::begin(&site, 3, "COUNT 20");
        scan.until_seen(keys);
        scan
    });
    for node in 0..2 {
        assert_eq!(site.nodes()[node].cmd("SAVE"), ok());
        site.node_mut(node).restart();
        crate::support::until("it is back", || client.cmd("DBSIZE") == int(KEYS as i64));
    }
    for scan in &mut scans {
        // The first command on a connection that is being reopened may fail.
        crate::support::until("commands succeed again", || scan.client.cmd("DBSIZE").error().is_none());
    }
    assert_eq!(scans.map(Scan::missed), [0, 0]);
}
