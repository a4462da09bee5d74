//! Gain from copies of the hottest keys, by the share of writes. Three servers with a tenth of a processor each serve a
//! skewed load.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};
use switchyard_bench::load::{self, Mix, Pace, Sharing, Skew, Tally, ValueSizes};
use switchyard_bench::process;
use switchyard_bench::table::Table;

use super::{Router, Settings};
use crate::procfs::CpuReading;
use crate::reproduce::capped::Capped;

const CPU_SHARE: f64 = 0.1;
const KEYS: u64 = 1_000_000;
const WRITES: [u32; 5] = [0, 1, 5, 10, 30];
const SKEWS: [f64; 2] = [0.9, 0.99];

struct Cell {
    rps: f64,
    p99_ms: f64,
    hits: f64,
    /// Highest CPU of a node, divided by the mean.
    imbalance: f64,
}

pub(super) fn measure(settings: &Settings, folder: &Path) -> Result<String> {
    let server = process::find_redis_server()?;
    let nodes: Vec<_> =
        (0..3).map(|i| process::start_redis(&server, &format!("node{i}"), folder)).collect::<Result<_>>()?;
    let addresses: Vec<_> = nodes.iter().map(|(_, address)| *address).collect();
    let copies = [
        "--set",
        "hot-copies.keys-max=10000",
        "--set",
        "hot-copies.min-reads-per-second=1",
        "--set",
        "hot-copies.admissions-per-second=10000",
    ];
    let on = Router::start(settings, "on", &addresses, &copies, folder)?;
    let off =
        Router::start(settings, "off", &addresses, &["--set", "hot-copies.mode=off", "--allow-other-router"], folder)?;
    let load = |router: &Router, mix: Mix, skew: Skew, seconds: u64, pipeline: usize| load::Settings {
        target: router.entry,
        threads: 1,
        connections: 64,
        pipeline,
        pace: Pace::Closed,
        duration: Duration::from_secs(seconds),
        mix,
        sizes: ValueSizes::fixed(64),
        keys: KEYS,
        skew,
        sharing: Sharing::Shared,
        prefix: String::new(),
        doubt: load::Doubt::Lasting,
        seed: 7,
    };
    // Filled before the servers' CPU is capped.
    let fill = if settings.quick { 3 } else { 15 };
    load::start(&load(&off, "set=1".parse()?, Skew::Uniform, fill, 32))?.finish()?;
    let _capped: Vec<_> = nodes.iter().map(|(node, _)| Capped::new(node.id(), CPU_SHARE)).collect::<Result<_>>()?;
    let (warm, seconds) = if settings.quick { (2, 2) } else { (8, 10) };
    let cell = |router: &Router, writes: u32, skew: f64| -> Result<Cell> {
        settings.check_interrupted()?;
        let mix: Mix = format!("get={},set={}", 100 - writes, writes).parse()?;
        let mut run = load::start(&load(router, mix, Skew::Zipfian(skew), warm + seconds, 1))?;
        std::thread::sleep(Duration::from_secs(warm));
        run.take_interval();
        let hits = router.metric("switchyard_hot_copies_hits_total")?;
        let before: Vec<_> = nodes.iter().map(|(node, _)| CpuReading::of(node.id())).collect::<Result<_>>()?;
        std::thread::sleep(Duration::from_secs(seconds) - Duration::from_millis(200));
        let seen: Tally = run.take_interval();
        let hits = router.metric("switchyard_hot_copies_hits_total")? - hits;
        let used: Vec<f64> = nodes
            .iter()
            .zip(&before)
            .map(|((node, _), before)| Ok(CpuReading::of(node.id())?.since(before).as_secs_f64()))
            .collect::<Result<_>>()?;
        run.finish()?;
        let mean = used.iter().sum::<f64>() / used.len() as f64;
        Ok(Cell {
            rps: seen.replies as f64 / (seconds as f64 - 0.2),
            p99_ms: seen.quantile(0.99).as_secs_f64() * 1e3,
            hits: hits / seen.replies.max(1) as f64,
            imbalance: used.iter().copied().fold(0.0, f64::max) / mean.max(1e-9),
        })
    };
    let mut table = Table::new([
        "Zipf",
        "writes",
        "off, k/s",
        "copies, k/s",
        "gain",
        "of the ideal",
        "hits",
        "p99 off, ms",
        "p99, ms",
        "max/mean off",
        "max/mean",
    ]);
    for skew in SKEWS {
        for writes in WRITES {
            let without = cell(&off, writes, skew).context("without copies")?;
            let with = cell(&on, writes, skew).context("with copies")?;
            let (gain, ideal) = (with.rps / without.rps, 1.0 / (1.0 - with.hits).max(1e-3));
            table.row([
                format!("{skew}"),
                format!("{writes} %"),
                format!("{:.1}", without.rps / 1e3),
                format!("{:.1}", with.rps / 1e3),
                format!("{gain:.2}"),
                format!("{:.2}", gain / ideal),
                format!("{:.0} %", with.hits * 100.0),
                format!("{:.1}", without.p99_ms),
                format!("{:.1}", with.p99_ms),
                format!("{:.2}", without.imbalance),
                format!("{:.2}", with.imbalance),
            ]);
        }
    }
    Ok(table.to_markdown())
}
