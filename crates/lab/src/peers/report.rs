//! Output of a run, for the terminal and for docs/results/benchmarks.md between its marks.

use std::{fmt::Write as _, path::Path};

use anyhow::{Context as _, Result};
use switchyard_bench::table::Table;

use super::{Results, Settings, goals, goals::Goal, memory::CLIENTS, rows::Row, target::Peer};
use crate::document::{replace_between_marks, today};
use crate::procfs::describe_machine;

/// Marks in the document around the rows without pinning, goals and memory.
const OPEN_MARK: &str = "bench-peers";
/// Marks around the gate's rows.
const GATE_MARK: &str = "bench-peers-gate";
/// Marks around the rows of the test for a flat cost.
const FLAT_MARK: &str = "bench-peers-flat";

/// Marks around the rows with twemproxy's own file: one pool, and several.
const POOL_MARK: &str = "bench-pool";
const POOLS_MARK: &str = "bench-pools";

/// Returns all results, for the terminal.
pub(super) fn text(results: &Results, goals: &[Goal]) -> String {
    let mut out = String::new();
    for gate in [false, true] {
        for (title, table) in tables(results, gate) {
            let _ = write!(out, "\n{title}{}\n\n{}", if gate { " (pinned)" } else { "" }, table.to_text());
        }
    }
    if let Some(table) = memory_table(results) {
        let _ = write!(out, "\nMemory\n\n{}", table.to_text());
    }
    let _ = write!(out, "\nGoals\n\n{}", goals::table(goals).to_text());
    for miss in goals::misses(goals) {
        let _ = writeln!(out, "  {miss}");
    }
    if let Some((usual, worst)) = results.foreign() {
        let _ = write!(out, "\n{}\n", foreign(usual, worst));
    }
    out
}

/// Rewrites the document's tables.
pub(super) fn write(path: &Path, settings: &Settings, results: &Results, goals: &[Goal]) -> Result<()> {
    let mut document = match std::fs::read_to_string(path) {
        Ok(document) => document,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            let marks = |name: &str| format!("<!-- {name}:begin -->\n<!-- {name}:end -->\n");
            format!("# Benchmarks\n\n{}\n{}\n{}", marks(OPEN_MARK), marks(GATE_MARK), marks(FLAT_MARK))
        }
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    let open_mark = match settings.pools {
        Some(1) => POOL_MARK,
        Some(_) => POOLS_MARK,
        None if settings.flat => FLAT_MARK,
        None => OPEN_MARK,
    };
    for (gate, mark) in [(false, open_mark), (true, GATE_MARK)] {
        if !results.rows.iter().any(|r| r.pinned == gate) {
            continue; // not measured this time: the old section stays
        }
        let section = section(settings, results, goals, gate);
        document = replace_between_marks(&document, mark, &section)
            .with_context(|| format!("cannot rewrite {}", path.display()))?;
    }
    std::fs::write(path, document).with_context(|| format!("cannot write {}", path.display()))
}

fn section(settings: &Settings, results: &Results, goals: &[Goal], gate: bool) -> String {
    let mut out = String::new();
    let _ = writeln!(
        out,
        "Measured on {} by `{}` on: {}. Median of {} interleaved round{}, one worker thread each.",
        today(),
        settings.command_line,
        describe_machine(),
        results.rounds,
        if results.rounds == 1 { "" } else { "s" },
    );
    let versions =
        results.versions.iter().filter(|(_, v)| !v.is_empty()).map(|(p, v)| format!("{p} {v}")).collect::<Vec<_>>();
    let _ = writeln!(out, "Versions: {}.", versions.join(", "));
    if let Some((usual, worst)) = results.foreign() {
        let _ = writeln!(out, "{}", foreign(usual, worst));
    }
    for missing in &results.missing {
        // The first line has the reason; the rest is the peer's own output.
        let _ = writeln!(out, "Not measured: {} ({}).", missing.peer, missing.why.lines().next().unwrap_or_default());
    }
    if settings.quick {
        out.push_str("\n**A quick run, as a functional check: its numbers mean nothing.**\n");
    }
    for (title, table) in tables(results, gate) {
        let _ = write!(out, "\n### {title}\n\n{}", table.to_markdown());
    }
    if let Some(table) = memory_table(results).filter(|_| !gate) {
        let _ = write!(out, "\n### Memory\n\n{}", table.to_markdown());
    }
    let goals: Vec<_> = goals.iter().filter(|g| g.gate == gate).cloned().collect();
    let _ = write!(out, "\n### Goals\n\n{}", goals::table(&goals).to_markdown());
    for (i, miss) in goals::misses(&goals).iter().enumerate() {
        let _ = writeln!(out, "{}- {miss}", if i == 0 { "\n" } else { "" });
    }
    let failures: Vec<_> = results.failures.iter().collect();
    if !failures.is_empty() {
        out.push_str("\n### Failed measurements\n\n");
        for failure in failures {
            let _ = writeln!(out, "- {}", failure.lines().next().unwrap_or_default());
        }
    }
    out
}

fn foreign(usual: f64, worst: f64) -> String {
    format!(
        "While this was measured, other processes took {:.0} % of the machine (median; at worst {:.0} %).",
        usual * 100.0,
        worst * 100.0
    )
}

fn tables(results: &Results, gate: bool) -> Vec<(String, Table)> {
    let rows: Vec<_> = results.rows.iter().copied().filter(|r| r.pinned == gate).collect();
    // The gate has no measurement without a proxy.
    let peers: Vec<_> = results.peers.iter().filter(|p| !gate || **p != Peer::Direct).collect();
    let proxies: Vec<_> = peers.iter().copied().filter(|p| **p != Peer::Direct).collect();
    let matrix = |first: &str, peers: &[&Peer], cell: &dyn Fn(&Peer, Row) -> Option<String>| {
        let mut table = Table::new(std::iter::once(first.to_owned()).chain(peers.iter().map(ToString::to_string)));
        for row in &rows {
            let cells = peers.iter().map(|p| cell(p, *row).unwrap_or_else(|| "-".to_owned()));
            table.row(std::iter::once(row.to_string()).chain(cells));
        }
        table
    };
    let us = |value: f64| {
        if value < 2.0 { format!("{value:.2}") } else { format!("{value:.1}") }
    };
    let mut tables = vec![
        (
            "CPU of the proxy, µs per request (least-most of the rounds)".to_owned(),
            matrix("", &proxies, &|p, r| {
                let (least, most) = results.proxy_us_range(p, r)?;
                Some(format!("{} ({}-{})", us(results.proxy_us(p, r)?), us(least), us(most)))
            }),
        ),
        (
            "CPU of proxy + redis-servers, µs per request".to_owned(),
            matrix("", &peers, &|p, r| Some(us(results.total_us(p, r)?))),
        ),
        (
            "Requests per second, thousands".to_owned(),
            matrix("", &peers, &|p, r| Some(format!("{:.1}", results.requests_per_second(p, r)? / 1000.0))),
        ),
        (
            "Latency, p50 / p99 in ms".to_owned(),
            matrix("", &peers, &|p, r| Some(format!("{:.3} / {:.3}", results.p50_ms(p, r)?, results.p99_ms(p, r)?))),
        ),
    ];
    let ours = Peer::SWITCHYARD;
    let others: Vec<_> = proxies.iter().copied().filter(|p| p.is_other_proxy()).collect();
    if results.peers.contains(&ours) && !others.is_empty() {
        let ratio = |p: &Peer, r: Row| Some(format!("{:.2}", results.proxy_us(&ours, r)? / results.proxy_us(p, r)?));
        tables
            .push(("CPU of the proxy: Switchyard's as a share of each peer's".to_owned(), matrix("", &others, &ratio)));
    }
    tables.retain(|(_, table)| !rows.is_empty() && !table.is_empty());
    tables
}

fn memory_table(results: &Results) -> Option<Table> {
    let memory = results.memory.as_ref().filter(|m| !m.is_empty())?;
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    let mut table = Table::new(["", "idle", &format!("{CLIENTS} idle clients")]);
    for one in memory {
        let with_clients = one.with_clients.as_ref().map_or_else(|why| format!("- ({why})"), |bytes| mib(*bytes));
        table.row([one.peer.to_string(), mib(one.idle), with_clients]);
    }
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peers::memory::Memory;
    use crate::peers::rows::{GATE_C50, GET_C50, Sample};

    fn sample(us: f64) -> Sample {
        Sample {
            requests_per_second: 1e6 / us,
            p50_ms: 0.1,
            p99_ms: 0.2,
            proxy_us: Some(us),
            total_us: us + 1.0,
            foreign: 0.1,
        }
    }

    #[test]
    fn medians_ranges_and_shares_are_in_the_tables() {
        let mut results = Results::default();
        for us in [3.0, 5.0, 4.0] {
            results.add(Peer::SWITCHYARD, GET_C50, sample(us));
            results.add(Peer::Predixy, GET_C50, sample(us * 2.0));
        }
        results.add(Peer::SWITCHYARD, GATE_C50, sample(7.0));
        results.memory =
            Some(vec![Memory { peer: Peer::SWITCHYARD, idle: 5 << 20, with_clients: Err("no files".to_owned()) }]);
        let text = text(&results, &goals::judge(&results, &Peer::SWITCHYARD));
        for part in
            ["4.0 (3.0-5.0)", "8.0 (6.0-10.0)", "0.50", "7.0 (7.0-7.0)", "5.0 MiB", "no files", "pinned", "10 %"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
