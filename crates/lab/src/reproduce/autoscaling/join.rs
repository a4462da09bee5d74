//! Time of a node's join until it has its share, by the number of existing nodes. The number of keys is constant, so
//! each further node moves fewer.

use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use switchyard_bench::process;
use switchyard_bench::table::Table;

use super::super::published::autoscaling as says;
use super::super::spread::Spread;
use super::super::watch::{for_a_while, until_done};
use super::super::{Bench, Section, measure, publish};
use super::{Settings, keys, load, router};
use crate::figure::{self, Line, Panel};
use crate::moves::generator::Run;
use crate::moves::site::{Routed, keys_at};

const MARK: &str = "autoscaling-join";
/// Requests per second during the join.
const RATE: f64 = 1000.0;
/// The goals of the moves; the first is the default.
const GOALS: [&str; 2] = ["balanced", "fast"];

/// Results of one join.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Joined {
    pub(in crate::reproduce) seconds: f64,
    /// Number of received keys.
    pub(in crate::reproduce) keys: i64,
    p99_ms: f64,
    /// Errors, and wrong replies.
    pub(in crate::reproduce) errors: u64,
}

/// A run: a node joins one, then two, and so on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Measured {
    pub(in crate::reproduce) joined: Vec<Joined>,
    pub(in crate::reproduce) wrong_after: u64,
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let outcome = measure(
        &settings.conduct,
        &GOALS,
        |goal| json!({"experiment": "autoscaling-join", "goal": goal, "connections": settings.connections, "keys": settings.keys, "nodes": settings.nodes, "cpu": settings.join_cpu, "rate": RATE}),
        |goal| format!("nodes join one at a time, goal {goal}"),
        |bench, goal| one(bench, settings, goal),
    )?;
    let mut table = Table::new([
        "goal",
        "nodes",
        "takes, s",
        "of the first",
        "1/N",
        "keys moved",
        "of all keys",
        "p99 meanwhile, ms",
        "errors",
    ]);
    let mut lines = Vec::new();
    for (goal, runs) in GOALS.iter().zip(&outcome.results) {
        let spread = |at: usize, value: &dyn Fn(&Joined) -> f64| {
            Spread::of(runs.iter().filter_map(|run| Some(value(run.joined.get(at)?))))
        };
        let first = spread(0, &|joined| joined.seconds).map_or(0.0, |spread| spread.median);
        let mut points = Vec::new();
        for at in 0..settings.nodes.saturating_sub(1) {
            let Some(seconds) = spread(at, &|joined| joined.seconds) else { continue };
            let text = |value: &dyn Fn(&Joined) -> f64, digits: usize| {
                spread(at, value).map_or(String::new(), |spread| spread.text(|v| format!("{v:.digits$}")))
            };
            let nodes = (at + 1) as f64;
            points.push((nodes, seconds.median));
            table.row([
                (*goal).to_owned(),
                format!("{} to {}", at + 1, at + 2),
                seconds.text(|v| format!("{v:.2}")),
                format!("{:.2}", seconds.median / first),
                format!("{:.2}", 1.0 / nodes),
                text(&|joined| joined.keys as f64, 0),
                text(&|joined| joined.keys as f64 * 100.0 / settings.keys as f64, 1) + " %",
                text(&|joined| joined.p99_ms, 2),
                runs.iter().filter_map(|run| run.joined.get(at)).map(|joined| joined.errors).sum::<u64>().to_string(),
            ]);
        }
        let ideal = points.iter().map(|(nodes, _)| (*nodes, first * 2.0 / (nodes + 1.0))).collect();
        lines.push(Line { name: (*goal).to_owned(), points });
        lines.push(Line { name: format!("{goal}, ideal by number of keys"), points: ideal });
    }
    let panel =
        Panel { title: "Time to join".to_owned(), x: "nodes before".to_owned(), y: "s".to_owned(), floor: None, lines };
    let wrong: u64 = outcome.results.iter().flatten().map(|run| run.wrong_after).sum();
    let section = Section {
        notes: vec![
            format!(
                "The report: \"{}\". A node that joins N others gets 1/(N+1) of the keys, so the time should fall in proportion.",
                says::NODE_ADD
            ),
            format!(
                "{} keys, and {RATE} requests per second during the change, 10 % SET.{} The time is from `nodes add --rebalance` to the end of the last move; `balanced` is the default goal. \
                 At the end each key was read: {wrong} were wrong.",
                settings.keys,
                settings.join_cpu.map_or(String::new(), |cpu| format!(" Each server has {cpu} of a processor."))
            ),
        ],
        tables: vec![("A node joins".to_owned(), table)],
        figures: vec![(
            "autoscaling-join".to_owned(),
            "Time to join by the number of nodes".to_owned(),
            figure::svg(&[panel])?,
        )],
    };
    publish(&settings.conduct, MARK, &outcome, &section)
}

fn one(bench: &Bench<'_>, settings: &Settings, goal: &str) -> Result<Measured> {
    let (conduct, name) = (bench.conduct, bench.name());
    let site = Routed::start_many(&bench.programs, &router(&[]), 1, &name, bench.folder)?;
    let keys = keys(0, settings.keys);
    keys.fill(|_| site.entry, &|_| {})?;
    let cap = |processes: &[u32]| settings.join_cpu.map(|cpu| bench.cap_all(processes, cpu)).transpose();
    let mut capped = vec![cap(&site.process_ids())?];
    let run = Run::start(&load(site.entry, &keys, settings.connections, Some(RATE)))?;
    let (mut servers, mut joined) = (Vec::new(), Vec::new());
    for at in 1..settings.nodes {
        for_a_while(&run, settings.phase / 4, &conduct.stop)?;
        let (server, address) =
            process::start_redis(&bench.programs.server, &format!("{name}-more-{at}"), bench.folder)?;
        capped.push(cap(&[server.id()])?);
        servers.push(server);
        let begun = Instant::now();
        let text = bench
            .order(site.admin, &["nodes", "add", &address.to_string(), "--rebalance", "--goal", goal, "--json"])?;
        let moves = moves_of(&text)?;
        let watched = until_done(&run, site.admin, &moves, begun, conduct.timeout, &conduct.stop)?;
        let tally = &watched.counts.tally;
        joined.push(Joined {
            seconds: watched.took.as_secs_f64(),
            keys: keys_at(address)?,
            p99_ms: watched.latency_ms(0.99),
            errors: tally.errors + tally.wrong + tally.unanswered + tally.disconnects,
        });
    }
    run.finish()?;
    Ok(Measured { joined, wrong_after: keys.count_wrong(|_| site.entry)? })
}

/// Returns the ids of the moves in the output of `nodes add --rebalance --json`: the last line with moves.
pub(in crate::reproduce) fn moves_of(text: &str) -> Result<Vec<u64>> {
    let plans = serde_json::Deserializer::from_str(text).into_iter::<Value>().filter_map(Result::ok);
    let numbers =
        |plan: Value| Some(plan["moves"].as_array()?.iter().filter_map(|one| one["id"].as_u64()).collect::<Vec<u64>>());
    plans
        .filter_map(numbers)
        .last()
        .filter(|moves| !moves.is_empty())
        .with_context(|| format!("`nodes add --rebalance --json` names no move: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_of_a_new_node_are_parsed() {
        assert_eq!(moves_of("{\"dry_run\":false,\"moves\":[{\"id\":2},{\"id\":3}]}\n").expect("two"), [2, 3]);
        assert!(moves_of("{\"moves\":[]}").is_err());
        assert!(moves_of("").is_err());
    }
}
