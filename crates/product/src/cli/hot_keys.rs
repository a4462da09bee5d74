//! `switchyard hotkeys`: the most-used keys and the load of each node.

use std::thread::sleep;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use switchyard_control::admin::{HotKeyReport, HotKeysReport, HotNodeReport};
use switchyard_resp::units::{describe_size, describe_time};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::screen::Window;
use super::table::{count, number, table, text};

/// Interval of `--watch`.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Show the most-used keys of each node, with reads, writes and bytes per second, and the load of each node
#[derive(Debug, Args)]
#[command(
    long_about = "The most-used keys of each node. One command in sixteen is sampled at random, and recent seconds count most. The nodes are not queried.\n\n\
        Below them is the load of each node in the last second: commands sent to it, uses of its keys there, reads answered by hot copies, its server's share \
        of one processor, the mean response time, and memory used. Unknown values are shown as -.\n\n\
        Key names are shown to users with the router's token. A key longer than 64 bytes is shown by its fingerprint, which is the same until the router restarts.",
    after_long_help = "Examples:\n  \
        switchyard hotkeys\n  \
        switchyard hotkeys --watch                         refreshed each second, until Ctrl-C\n  \
        switchyard hotkeys --node 10.0.0.1:6379 --count 50\n  \
        switchyard hotkeys --json | jq -r '.nodes[].keys[0].key'\n\n\
        Exit codes: 0 the router answered; 1 it did not"
)]
pub(crate) struct Arguments {
    /// Only this node
    #[arg(long, value_name = "NAME")]
    node: Option<String>,

    /// Number of keys per node
    #[arg(long, value_name = "KEYS", default_value_t = HotKeysReport::KEYS as u64, value_parser = clap::value_parser!(u64).range(1..=HotKeysReport::KEYS_MAX as u64))]
    count: u64,

    /// Refresh each second
    #[arg(long)]
    watch: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let path = format!("/api/v1/hotkeys?count={}", arguments.count);
    loop {
        let mut report: HotKeysReport = client.read(&client.get_all(&path)?)?;
        if let Some(node) = &arguments.node {
            if !report.nodes.iter().any(|of| of.node == *node) {
                return Err(anyhow!("this router serves no node \"{node}\"; `switchyard nodes list` shows them").into());
            }
            report.nodes.retain(|of| of.node == *node);
        }
        match Window::of_stdout().filter(|_| arguments.watch && !arguments.flags.json) {
            Some(window) => window.show(&render_window(&report, window.rows)),
            None => {
                let body = serde_json::to_string(&report).map_err(anyhow::Error::from)?;
                client.print(&body, render)?;
                if arguments.watch && !arguments.flags.json {
                    println!();
                }
            }
        }
        if !arguments.watch {
            return Ok(());
        }
        sleep(WATCH_EVERY);
    }
}

fn rate(rate: f64) -> String {
    count(rate.round() as u64)
}

/// Percentage of reads that hot copies answer.
fn here(hits: f64, reads: f64) -> String {
    format!("{:.0}%", 100.0 * hits / (hits + reads).max(f64::MIN_POSITIVE))
}

fn render(report: &HotKeysReport) -> String {
    let keys = match report.nodes.iter().all(|node| node.keys.is_empty()) {
        true => "no key is used now\n".to_owned(),
        false => render_keys(report),
    };
    format!("{keys}\n{}", render_nodes(report))
}

/// One list of the keys of all nodes, hottest first, for a window of `rows` rows. The nodes follow if they fit into
/// half of the rows.
fn render_window(report: &HotKeysReport, rows: usize) -> String {
    let columns = [
        number("READS/S"),
        number("WRITES/S"),
        number("HITS/S"),
        number("SHARE"),
        text("NODE"),
        number("DB"),
        text("KEY"),
    ];
    let mut keys: Vec<_> = report.nodes.iter().flat_map(|node| node.keys.iter().map(move |key| (node, key))).collect();
    let uses = |key: &HotKeyReport| key.reads_per_second + key.writes_per_second + key.hits_per_second;
    keys.sort_by(|(_, one), (_, other)| uses(other).total_cmp(&uses(one)));
    let nodes = render_nodes(report);
    // Plus the title of the list and an empty line.
    let beside = nodes.lines().count() + 2;
    let has_nodes = beside * 2 <= rows;
    keys.truncate(if has_nodes { rows - beside } else { rows.saturating_sub(1) });
    // The name is the last column, because the window may cut it.
    let row = |(node, key): &(&HotNodeReport, &HotKeyReport)| {
        vec![
            rate(key.reads_per_second),
            rate(key.writes_per_second),
            rate(key.hits_per_second),
            format!("{:.1}%", key.percent),
            node.node.clone(),
            key.database.to_string(),
            shown_name(key),
        ]
    };
    let list = table(&columns, &keys.iter().map(row).collect::<Vec<_>>());
    if has_nodes { format!("{list}\n{nodes}") } else { list }
}

fn shown_name(key: &HotKeyReport) -> String {
    key.key.clone().unwrap_or_else(|| format!("({})", key.fingerprint))
}

fn render_keys(report: &HotKeysReport) -> String {
    let columns = [
        text("NODE"),
        text("KEY"),
        number("DB"),
        number("SHARE"),
        number("READS/S"),
        number("WRITES/S"),
        number("HITS/S"),
        number("HERE"),
        text("SENT/S"),
        text("ANSWERED/S"),
        number("WAIT"),
        number("SINCE"),
    ];
    let row = |node: &HotNodeReport, key: &HotKeyReport| {
        vec![
            node.node.clone(),
            shown_name(key),
            key.database.to_string(),
            format!("{:.1}%", key.percent),
            rate(key.reads_per_second),
            rate(key.writes_per_second),
            rate(key.hits_per_second),
            here(key.hits_per_second, key.reads_per_second),
            describe_size(key.bytes_per_second.round() as u64),
            describe_size(key.reply_bytes_per_second.round() as u64),
            format!("{} us", rate(key.wait_us)),
            describe_time(Duration::from_secs(key.since_seconds as u64)),
        ]
    };
    let rows: Vec<Vec<String>> =
        report.nodes.iter().flat_map(|node| node.keys.iter().map(move |key| row(node, key))).collect();
    table(&columns, &rows)
}

fn render_nodes(report: &HotKeysReport) -> String {
    let columns = [
        text("NODE"),
        number("REQUESTS/S"),
        number("USES/S"),
        number("HITS/S"),
        number("CPU"),
        number("ANSWER"),
        number("MEMORY"),
        number("MAXMEMORY"),
    ];
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let row = |node: &HotNodeReport| {
        vec![
            node.node.clone(),
            known(node.requests_per_second.map(rate)),
            rate(node.uses_per_second),
            rate(node.hits_per_second),
            known(node.cpu_percent.map(|cpu| format!("{cpu:.0}%"))),
            known(node.answer_us.map(|us| format!("{} us", rate(us)))),
            known(node.memory_bytes.map(describe_size)),
            known(node.memory_max_bytes.map(|max| if max == 0 { "none".to_owned() } else { describe_size(max) })),
        ]
    };
    table(&columns, &report.nodes.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_has_one_list_with_the_hottest_key_first() {
        let key = |name: &str, reads: f64, writes: f64, hits: f64| HotKeyReport {
            key: Some(name.to_owned()),
            reads_per_second: reads,
            writes_per_second: writes,
            hits_per_second: hits,
            ..HotKeyReport::default()
        };
        let node = |name: &str, keys: Vec<HotKeyReport>| HotNodeReport {
            node: name.to_owned(),
            keys,
            ..HotNodeReport::default()
        };
        let first = (0..10).map(|n| key(&format!("a{n}"), f64::from(100 - n), 0.0, 0.0)).collect();
        let second =
            vec![key("written", 0.0, 5_000.0, 0.0), key("copied", 1.0, 0.0, 9_000.0), key("cold", 1.0, 0.0, 0.0)];
        let report = HotKeysReport { nodes: vec![node("a:1", first), node("b:1", second)] };
        let names = |shown: &str| -> Vec<String> {
            let keys = shown.lines().skip(1).take_while(|line| !line.is_empty());
            keys.map(|line| line.rsplit(' ').next().expect("a name").to_owned()).collect()
        };
        let small = render_window(&report, 5);
        assert_eq!(
            (small.lines().count(), names(&small)),
            (5, ["copied", "written", "a0", "a1"].map(str::to_owned).to_vec()),
            "{small}"
        );
        let large = render_window(&report, 12);
        assert_eq!((large.lines().count(), names(&large).len()), (12, 7), "{large}");
        assert!(large.contains("\n\nNODE  REQUESTS/S") && large.ends_with('\n'), "{large}");
        let all = render_window(&report, 50);
        assert_eq!(names(&all).last().map(String::as_str), Some("cold"), "{all}");
    }

    #[test]
    fn keys_are_shown_by_name_or_fingerprint() {
        let key = |name: Option<&str>| HotKeyReport {
            key: name.map(str::to_owned),
            fingerprint: "00ff".to_owned(),
            database: 3,
            reads_per_second: 1999.6,
            writes_per_second: 0.2,
            hits_per_second: 5000.0,
            bytes_per_second: 80_000.0,
            reply_bytes_per_second: 200.0,
            wait_us: 1234.4,
            since_seconds: 61.9,
            percent: 12.34,
        };
        let node = HotNodeReport {
            node: "a:1".to_owned(),
            uses_per_second: 16_000.0,
            hits_per_second: 9.0,
            requests_per_second: Some(17_000.4),
            answer_us: Some(1250.0),
            cpu_percent: Some(97.4),
            memory_bytes: Some(1_500_000),
            memory_max_bytes: Some(0),
            keys: vec![key(Some("user:1")), key(None)],
        };
        let idle = HotNodeReport { node: "b:1".to_owned(), memory_max_bytes: Some(2_000_000), ..<_>::default() };
        let shown = render(&HotKeysReport { nodes: vec![node, idle.clone()] });
        assert!(
            shown.contains("user:1   3  12.3%    2 000         0   5 000   71%") && shown.contains("1 234 us  1m 1s"),
            "{shown}"
        );
        let nodes = "\n\nNODE  REQUESTS/S  USES/S  HITS/S  CPU    ANSWER  MEMORY  MAXMEMORY\n\
                     a:1       17 000  16 000       9  97%  1 250 us  1.5 MB       none\n\
                     b:1            -       0       0    -         -       -     2.0 MB\n";
        assert!(shown.contains("(00ff)") && shown.ends_with(nodes), "{shown}");
        assert!(render(&HotKeysReport { nodes: vec![idle] }).starts_with("no key is used now\n\nNODE"));
    }
}
