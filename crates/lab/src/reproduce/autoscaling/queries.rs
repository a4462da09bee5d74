//! Time of 10 to 100,000 queries: one server, one with little memory, and six behind the router and behind nutcracker
//! (twemproxy), which the report used.
//!
//! One client sends the queries one at a time, alternately SET and GET, like a script.

use std::net::SocketAddr;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use serde_json::json;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_bench::random::Rng;
use switchyard_bench::table::Table;

use super::super::published::autoscaling as says;
use super::super::spread::Spread;
use super::super::watch::check_interrupted;
use super::super::{Bench, Section, measure, publish};
use super::nodes::power;
use super::{NODES, Settings, router};
use crate::figure::{self, Line, Panel};
use crate::moves::site::Routed;

const MARK: &str = "autoscaling-queries";
/// Memory of the limited server, as in the report.
const LITTLE: &str = "10mb";

/// The compared fleets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::reproduce) enum Fleet {
    /// One server, directly.
    One,
    /// One server with [`LITTLE`] memory, which evicts keys.
    OneLittle,
    /// Six servers behind the router.
    SixRouted,
    /// Six servers behind nutcracker.
    SixNutcracker,
}

impl Fleet {
    const ALL: [Self; 4] = [Self::One, Self::OneLittle, Self::SixRouted, Self::SixNutcracker];

    fn title(self) -> String {
        match self {
            Self::One => "one server".to_owned(),
            Self::OneLittle => format!("one server of {LITTLE}"),
            Self::SixRouted => format!("{NODES} servers, Switchyard"),
            Self::SixNutcracker => format!("{NODES} servers, nutcracker"),
        }
    }
}

/// Results of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(in crate::reproduce) struct Measured {
    /// Number of queries, and their time in seconds.
    pub(in crate::reproduce) batches: Vec<(u64, f64)>,
    errors: u64,
}

impl Measured {
    /// Returns the time of the largest batch, in seconds.
    pub(in crate::reproduce) fn longest(&self) -> f64 {
        self.batches.last().map_or(f64::NAN, |batch| batch.1)
    }

    /// Returns the exponent of the time by the number of queries.
    pub(in crate::reproduce) fn exponent(&self) -> f64 {
        power(&self.batches.iter().map(|(queries, seconds)| (*queries as f64, *seconds)).collect::<Vec<_>>())
    }
}

/// Returns 10, 100, and so on up to `most`.
fn sizes(most: u64) -> impl Iterator<Item = u64> {
    (1..).map(|power| 10_u64.pow(power)).take_while(move |size| *size <= most)
}

pub(super) fn run(settings: &Settings) -> Result<()> {
    let nutcracker = process::find_program(&["nutcracker"]);
    if nutcracker.is_none() {
        eprintln!(
            "not measured: {} (nutcracker is not on PATH; Debian: apt install nutcracker)",
            Fleet::SixNutcracker.title()
        );
    }
    let fleets: Vec<Fleet> =
        Fleet::ALL.into_iter().filter(|fleet| *fleet != Fleet::SixNutcracker || nutcracker.is_some()).collect();
    let outcome = measure(
        &settings.conduct,
        &fleets,
        |fleet| json!({"experiment": "autoscaling-queries", "fleet": fleet, "queries": settings.keys}),
        |fleet| format!("queries, {}", fleet.title()),
        |bench, fleet| one(bench, settings, *fleet),
    )?;
    let mut table = Table::new(
        ["fleet".to_owned()]
            .into_iter()
            .chain(sizes(settings.keys).map(|size| format!("{size} queries, ms")))
            .chain(["exponent".to_owned(), "errors".to_owned()]),
    );
    let mut lines = Vec::new();
    for (fleet, runs) in fleets.iter().zip(&outcome.results) {
        let mut row = vec![fleet.title()];
        let mut points = Vec::new();
        for (at, size) in sizes(settings.keys).enumerate() {
            let spread = Spread::of(runs.iter().filter_map(|run| Some(run.batches.get(at)?.1 * 1e3)));
            row.push(spread.map_or(String::new(), |spread| spread.text(|v| format!("{v:.1}"))));
            points.extend(spread.map(|spread| ((size as f64).log10(), spread.median)));
        }
        let exponent = Spread::of(runs.iter().map(Measured::exponent));
        row.push(exponent.map_or(String::new(), |spread| spread.text(|v| format!("{v:.2}"))));
        row.push(runs.iter().map(|run| run.errors).sum::<u64>().to_string());
        table.row(row);
        lines.push(Line { name: fleet.title(), points });
    }
    let section = Section {
        notes: vec![
            format!("The report, of one server without limits: \"{}\".", says::QUERIES),
            format!(
                "One client with one request in flight sends alternately SET and GET, with keys of 64 characters and values of 1 to 128. A server of {LITTLE} evicts keys \
                 (`allkeys-lru`); that of the report swapped."
            ),
        ],
        tables: vec![("Time of all queries".to_owned(), table)],
        figures: vec![(
            "autoscaling-queries".to_owned(),
            "Time by the number of queries".to_owned(),
            figure::svg(&[Panel {
                title: "Time of all queries".to_owned(),
                x: "queries, powers of 10".to_owned(),
                y: "ms".to_owned(),
                floor: Some(0.1),
                lines,
            }])?,
        )],
    };
    publish(&settings.conduct, MARK, &outcome, &section)
}

fn one(bench: &Bench<'_>, settings: &Settings, fleet: Fleet) -> Result<Measured> {
    let name = bench.name();
    let start = |number: usize, more: &[&str]| {
        let arguments: Vec<&str> = ["--appendonly", "no"].into_iter().chain(more.iter().copied()).collect();
        process::start_redis_with(&bench.programs.server, &format!("{name}-{number}"), bench.folder, &arguments)
    };
    // Processes end with their values.
    let (_servers, _router, entry): (Vec<Process>, Option<Routed>, SocketAddr) = match fleet {
        Fleet::One | Fleet::OneLittle => {
            let limit: &[&str] = if fleet == Fleet::OneLittle {
                &["--maxmemory", LITTLE, "--maxmemory-policy", "allkeys-lru"]
            } else {
                &[]
            };
            let (server, address) = start(0, limit)?;
            (vec![server], None, address)
        }
        Fleet::SixRouted => {
            let site = Routed::start_many(&bench.programs, &router(&[]), NODES, &name, bench.folder)?;
            let entry = site.entry;
            (Vec::new(), Some(site), entry)
        }
        Fleet::SixNutcracker => {
            let (mut processes, addresses): (Vec<Process>, Vec<SocketAddr>) =
                (0..NODES).map(|number| start(number, &[])).collect::<Result<Vec<_>>>()?.into_iter().unzip();
            let (proxy, entry) = nutcracker(bench, &name, &addresses)?;
            processes.insert(0, proxy);
            (processes, None, entry)
        }
    };
    let mut client = Client::connect(entry)?;
    let (mut rng, mut batches, mut errors) = (Rng::new(1), Vec::new(), 0);
    for size in sizes(settings.keys) {
        check_interrupted(&bench.conduct.stop)?;
        let begun = Instant::now();
        for number in 0..size {
            let key = format!("{:064}", number / 2);
            let is_ok = if number % 2 == 0 {
                client.ok(&[b"SET", key.as_bytes(), &vec![b'x'; 1 + rng.below(128) as usize]]).is_ok()
            } else {
                client
                    .call(&[b"GET", key.as_bytes()], |reply| !matches!(reply, switchyard_bench::wire::Reply::Error(_)))
                    .is_ok_and(|ok| ok)
            };
            errors += u64::from(!is_ok);
        }
        batches.push((size, begun.elapsed().as_secs_f64()));
    }
    Ok(Measured { batches, errors })
}

/// Starts nutcracker with the settings of the report's file.
fn nutcracker(bench: &Bench<'_>, name: &str, servers: &[SocketAddr]) -> Result<(Process, SocketAddr)> {
    let (entry, stats) = (process::free_address()?, process::free_port()?);
    let servers: String = servers.iter().map(|address| format!("   - {address}:1\n")).collect();
    let pool = format!(
        "pool:\n  listen: {entry}\n  hash: fnv1a_64\n  hash_tag: \"{{}}\"\n  distribution: ketama\n  auto_eject_hosts: false\n  timeout: 400\n  redis: true\n  servers:\n{servers}"
    );
    let file = bench.folder.join(format!("{name}-nutcracker.yml"));
    std::fs::write(&file, pool).with_context(|| format!("cannot write {}", file.display()))?;
    let mut command = Command::new("nutcracker");
    command.arg("-c").arg(&file).args(["-s", &stats.to_string(), "-a", "127.0.0.1"]);
    let mut proxy = Process::start(&format!("{name}-nutcracker"), &command, bench.folder)?;
    proxy.wait_ready(entry)?;
    Ok((proxy, entry))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_powers_of_ten() {
        assert_eq!(sizes(100_000).collect::<Vec<_>>(), [10, 100, 1000, 10_000, 100_000]);
        assert_eq!(sizes(999).collect::<Vec<_>>(), [10, 100]);
    }

    #[test]
    fn a_linear_time_has_the_exponent_one() {
        let run = Measured { batches: vec![(10, 0.1), (100, 1.0), (1000, 10.0)], errors: 0 };
        assert!((run.exponent() - 1.0).abs() < 1e-9);
        assert_eq!(run.longest(), 10.0);
    }
}
