//! One to six nodes: throughput, response time and hits, without limits, with little processor time, and with little
//! memory; and a single server with varying limits.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::process;
use switchyard_bench::table::Table;

use super::super::published::autoscaling as says;
use super::super::spread::Spread;
use super::super::watch::for_a_while;
use super::super::{Bench, Section, measure, plain, publish};
use super::{MEMORY, NODES, Settings, keys, load, router};
use crate::figure::{self, Line, Panel};
use crate::moves::generator::Run;
use crate::moves::site::{Routed, Servers, info_number};

const MARK: &str = "autoscaling-nodes";
/// Shares of a processor for the single server.
pub(in crate::reproduce) const SHARES: [f64; 6] = [0.02, 0.05, 0.1, 0.2, 0.4, 0.8];
/// Memory of the single server, in megabytes.
pub(in crate::reproduce) const MEGABYTES: [u32; 6] = [4, 6, 8, 10, 14, 18];

/// The limit of each server.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::reproduce) enum Limit {
    Nothing,
    /// Share of a processor for each server.
    Cpu(f64),
    /// Memory of each server (`maxmemory`).
    Memory(String),
}

impl Limit {
    fn text(&self) -> String {
        match self {
            Self::Nothing => "none".to_owned(),
            Self::Cpu(share) => format!("{} of a processor", plain(*share)),
            Self::Memory(most) => most.clone(),
        }
    }
}

/// A run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(in crate::reproduce) struct Cell {
    pub(in crate::reproduce) servers: usize,
    /// Whether clients reach the server through the router.
    pub(in crate::reproduce) is_routed: bool,
    pub(in crate::reproduce) limit: Limit,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Measured {
    pub(in crate::reproduce) rps: f64,
    mean_ms: f64,
    p99_ms: f64,
    hits: u64,
    misses: u64,
    evicted: u64,
    /// Errors, and wrong replies. A miss of an evicted key does not count.
    errors: u64,
}

impl Measured {
    pub(in crate::reproduce) fn hit_percent(&self) -> f64 {
        self.hits as f64 * 100.0 / (self.hits + self.misses).max(1) as f64
    }
}

fn cells(cpu: f64) -> Vec<Cell> {
    let mut cells = Vec::new();
    for limit in [Limit::Nothing, Limit::Cpu(cpu), Limit::Memory(MEMORY.to_owned())] {
        cells.push(Cell { servers: 1, is_routed: false, limit: limit.clone() });
        cells.extend((1..=NODES).map(|servers| Cell { servers, is_routed: true, limit: limit.clone() }));
    }
    cells.extend(alone().filter(|cell| !cells.contains(cell)).collect::<Vec<_>>());
    cells
}

/// Returns the cells of a single server without the router, with increasing limits.
fn alone() -> impl Iterator<Item = Cell> {
    let shares = SHARES.into_iter().map(Limit::Cpu);
    let memory = MEGABYTES.into_iter().map(|most| Limit::Memory(format!("{most}mb")));
    shares.chain(memory).map(|limit| Cell { servers: 1, is_routed: false, limit })
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let Settings { conduct, cpu, connections, phase, .. } = settings;
    let cells = cells(*cpu);
    let outcome = measure(
        conduct,
        &cells,
        |cell| json!({"experiment": "autoscaling-nodes", "cell": cell, "connections": connections, "keys": settings.keys, "seconds": phase.as_secs_f64()}),
        |cell| {
            format!(
                "{} nodes, limit: {}{}",
                cell.servers,
                cell.limit.text(),
                if cell.is_routed { "" } else { ", no router" }
            )
        },
        |bench, cell| one(bench, settings, cell),
    )?;
    let of =
        |cell: &Cell| cells.iter().position(|one| one == cell).map_or(&[][..], |at| outcome.results[at].as_slice());
    let median =
        |cell: &Cell, value: fn(&Measured) -> f64| Spread::of(of(cell).iter().map(value)).map(|spread| spread.median);
    let mut table = Table::new([
        "nodes",
        "limit of each",
        "requests/s",
        "100,000 queries take, s",
        "mean ms",
        "p99 ms",
        "hits",
        "evicted keys",
        "errors",
    ]);
    for (cell, runs) in cells.iter().zip(&outcome.results) {
        let text = |value: fn(&Measured) -> f64, digits: usize| {
            Spread::of(runs.iter().map(value)).map_or(String::new(), |spread| spread.text(|v| format!("{v:.digits$}")))
        };
        table.row([
            format!("{}{}", cell.servers, if cell.is_routed { "" } else { ", no router" }),
            cell.limit.text(),
            text(|m| m.rps, 0),
            text(|m| 1e5 / m.rps.max(1.0), 2),
            text(|m| m.mean_ms, 2),
            text(|m| m.p99_ms, 2),
            text(Measured::hit_percent, 1) + " %",
            text(|m| m.evicted as f64, 0),
            runs.iter().map(|run| run.errors).sum::<u64>().to_string(),
        ]);
    }
    let routed = |servers: usize, limit: &Limit| Cell { servers, is_routed: true, limit: limit.clone() };
    let [nothing, little_cpu, little_memory] = [Limit::Nothing, Limit::Cpu(*cpu), Limit::Memory(MEMORY.to_owned())];
    let ratio = |limit: &Limit, from: usize, value: fn(&Measured) -> f64| {
        let (one, six) = (median(&routed(from, limit), value), median(&routed(NODES, limit), value));
        one.zip(six).map_or(String::new(), |(one, six)| format!("{:.2}", six / one))
    };
    let hits = |servers: usize| median(&routed(servers, &little_memory), Measured::hit_percent).unwrap_or_default();
    let alone_by = |is_cpu: bool, value: fn(&Measured) -> f64| -> Vec<(f64, f64)> {
        let at = |cell: &Cell| match &cell.limit {
            Limit::Cpu(share) if is_cpu => Some(*share),
            Limit::Memory(most) if !is_cpu => most.trim_end_matches("mb").parse().ok(),
            _ => None,
        };
        alone().filter_map(|cell| Some((at(&cell)?, median(&cell, value)?))).collect()
    };
    let by_share = alone_by(true, |m| 1e5 / m.rps.max(1.0));
    let mut beside = Table::new(["", "the report", "here"]);
    beside.row([
        "1 against 6 nodes, no limits".to_owned(),
        says::SIX_NODES.to_owned(),
        format!(
            "{} x the requests/s, {} x the mean response time",
            ratio(&nothing, 1, |m| m.rps),
            ratio(&nothing, 1, |m| m.mean_ms)
        ),
    ]);
    beside.row([
        "1 against 6 nodes, little processor time".to_owned(),
        String::new(),
        format!(
            "{} x the requests/s, {} x the mean response time",
            ratio(&little_cpu, 1, |m| m.rps),
            ratio(&little_cpu, 1, |m| m.mean_ms)
        ),
    ]);
    beside.row([
        format!("1 against 6 nodes of {MEMORY}"),
        String::new(),
        format!("{:.0} % hits against {:.0} %", hits(1), hits(NODES)),
    ]);
    beside.row([
        "2 to 6 nodes, no limits".to_owned(),
        says::NODE_SWEEP.to_owned(),
        format!(
            "{} x the requests/s with 6 as with 2; with little processor time {} x",
            ratio(&nothing, 2, |m| m.rps),
            ratio(&little_cpu, 2, |m| m.rps)
        ),
    ]);
    beside.row([
        "one server, more or less processor time".to_owned(),
        says::CPU_SWEEP.to_owned(),
        format!("the time is as the share to the power of {:.2}", power(&by_share)),
    ]);
    beside.row([
        "one server, more or less memory".to_owned(),
        says::MEMORY_SWEEP.to_owned(),
        format!("{}: hits, while not all keys fit", text_of(&alone_by(false, Measured::hit_percent))),
    ]);
    let line = |limit: &Limit, value: fn(&Measured) -> f64| Line {
        name: format!("limit: {}", limit.text()),
        points: (1..=NODES)
            .filter_map(|servers| Some((servers as f64, median(&routed(servers, limit), value)?)))
            .collect(),
    };
    let by_nodes = |title: &str, y: &str, lines: Vec<Line>| Panel {
        title: title.to_owned(),
        x: "nodes".to_owned(),
        y: y.to_owned(),
        floor: None,
        lines,
    };
    let panels = [
        by_nodes("Requests", "requests/s", vec![line(&nothing, |m| m.rps), line(&little_cpu, |m| m.rps)]),
        by_nodes("Mean response time", "ms", vec![line(&nothing, |m| m.mean_ms), line(&little_cpu, |m| m.mean_ms)]),
        by_nodes("Hits", "hits, %", vec![line(&little_memory, Measured::hit_percent)]),
    ];
    let shows = "Requests, mean response time and hits by the number of nodes";
    let section = Section {
        notes: vec![format!(
            "{} keys; a key and its value have some 128 bytes. {connections} connections with one request in flight each, 10 % SET, uniform keys. A limited server has {cpu} of a \
             processor, or {MEMORY} of memory, and evicts keys at that limit (`allkeys-lru`).",
            settings.keys
        )],
        tables: vec![("Compared with the report".to_owned(), beside), ("All runs".to_owned(), table)],
        figures: vec![("autoscaling-nodes".to_owned(), shows.to_owned(), figure::svg(&panels)?)],
    };
    publish(conduct, MARK, &outcome, &section)
}

fn text_of(points: &[(f64, f64)]) -> String {
    points.iter().map(|(megabytes, hits)| format!("{megabytes:.0} MB {hits:.0} %")).collect::<Vec<_>>().join(", ")
}

/// Returns the exponent of the power law that fits best: the slope of a line through the logarithms.
pub(in crate::reproduce) fn power(points: &[(f64, f64)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(x, y)| (x.ln(), y.ln())).collect();
    let count = logs.len().max(1) as f64;
    let (x, y) = logs.iter().fold((0.0, 0.0), |(x, y), log| (x + log.0 / count, y + log.1 / count));
    let both: f64 = logs.iter().map(|log| (log.0 - x) * (log.1 - y)).sum();
    both / logs.iter().map(|log| (log.0 - x).powi(2)).sum::<f64>().max(f64::MIN_POSITIVE)
}

fn one(bench: &Bench<'_>, settings: &Settings, cell: &Cell) -> Result<Measured> {
    let mut arguments = vec!["--appendonly", "no"];
    if let Limit::Memory(most) = &cell.limit {
        arguments.extend(["--maxmemory", most, "--maxmemory-policy", "allkeys-lru"]);
    }
    let name = bench.name();
    let (site, single);
    let (entry, servers, ids) = if cell.is_routed {
        let servers = Servers { count: cell.servers, arguments: &arguments, capacity: None };
        site = Routed::start_servers(&bench.programs, &router(&[]), &servers, &name, bench.folder)?;
        (site.entry, site.addresses.clone(), site.process_ids())
    } else {
        single = process::start_redis_with(&bench.programs.server, &name, bench.folder, &arguments)?;
        (single.1, vec![single.1], vec![single.0.id()])
    };
    let keys = keys(0, settings.keys);
    keys.fill(|_| entry, &|_| {})?;
    let _capped = if let Limit::Cpu(share) = cell.limit { bench.cap_all(&ids, share)? } else { Vec::new() };
    let sum = |field: &str| -> Result<u64> { servers.iter().map(|server| info_number(*server, "stats", field)).sum() };
    let run = Run::start(&load(entry, &keys, settings.connections, None))?;
    for_a_while(&run, settings.phase / 4, &bench.conduct.stop)?;
    let before = [sum("keyspace_hits:")?, sum("keyspace_misses:")?];
    let (counts, took) = for_a_while(&run, settings.phase, &bench.conduct.stop)?;
    let after = [sum("keyspace_hits:")?, sum("keyspace_misses:")?];
    let evicted = sum("evicted_keys:")?;
    let (last, _) = run.finish()?;
    let bad = |counts: &crate::moves::generator::Counts| {
        counts.tally.errors + counts.tally.unanswered + counts.tally.disconnects + counts.tally.wrong
            - if evicted > 0 { counts.missing } else { 0 }
    };
    Ok(Measured {
        rps: counts.tally.replies as f64 / took.as_secs_f64(),
        mean_ms: counts.tally.mean().as_secs_f64() * 1e3,
        p99_ms: counts.tally.quantile(0.99).as_secs_f64() * 1e3,
        hits: after[0] - before[0],
        misses: after[1] - before[1],
        evicted,
        errors: bad(&counts) + bad(&last),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_power_law_is_found() {
        let of = |exponent: f64| power(&[1.0, 2.0, 5.0].map(|x: f64| (x, 3.0 * x.powf(exponent))));
        for exponent in [-2.0, -1.0, 0.5] {
            assert!((of(exponent) - exponent).abs() < 1e-9, "{exponent}: {}", of(exponent));
        }
    }

    #[test]
    fn cells_are_unique() {
        let cells = cells(0.05);
        for (at, cell) in cells.iter().enumerate() {
            assert!(!cells[..at].contains(cell), "{cell:?}");
        }
        assert!(alone().all(|cell| cells.contains(&cell)));
    }
}
