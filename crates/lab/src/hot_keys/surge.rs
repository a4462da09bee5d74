//! Two hundred keys become hot at once: time until the router reaches its full rate.
//!
//! Clients read keys that were never read before. The reference is the rate at the end of the same run.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use switchyard_bench::load::{self, Mix, Pace, Sharing, Skew, ValueSizes};
use switchyard_bench::process;
use switchyard_bench::table::Table;

use super::{Router, Settings};
use crate::reproduce::capped::Capped;
use crate::reproduce::spread::Spread;

const HOT: u64 = 200;
/// As in the fleet, so that a node is the bottleneck.
const SHARE: f64 = 0.1;
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Samples per window, because one sample is short and noisy.
const WINDOW_SAMPLES: usize = 4;
const RECOVERED_SHARE: f64 = 0.95;

pub(super) fn measure(settings: &Settings, folder: &Path) -> Result<String> {
    let server = process::find_redis_server()?;
    let nodes: Vec<_> =
        (0..3).map(|i| process::start_redis(&server, &format!("node{i}"), folder)).collect::<Result<_>>()?;
    let addresses: Vec<_> = nodes.iter().map(|(_, address)| *address).collect();
    let (rounds, seconds) = if settings.quick { (1, 4) } else { (7, 8) };
    let of = |router: &Router, prefix: String, mix: &str, keys: u64, duration: Duration| -> Result<load::Settings> {
        Ok(load::Settings {
            target: router.entry,
            threads: 1,
            connections: 64,
            pipeline: 1,
            pace: Pace::Closed,
            duration,
            mix: mix.parse::<Mix>()?,
            sizes: ValueSizes::fixed(64),
            keys,
            skew: Skew::Uniform,
            sharing: Sharing::Shared,
            prefix,
            doubt: load::Doubt::Lasting,
            seed: 7,
        })
    };
    let ways = [("instant and periodic", "both"), ("instant", "instant"), ("periodic", "periodic"), ("no copies", "")];
    let routers: Vec<Router> = ways
        .iter()
        .enumerate()
        .map(|(at, (_, reports))| {
            let reports = if reports.is_empty() {
                "hot-copies.mode=off".to_owned()
            } else {
                format!("telemetry.reports={reports}")
            };
            let beside: &[&str] = if at == 0 { &[] } else { &["--allow-other-router"] };
            let args = [
                &[
                    "--set",
                    &*reports,
                    "--set",
                    "hot-copies.keys-max=10000",
                    "--set",
                    "hot-copies.admissions-per-second=10000",
                ],
                beside,
            ]
            .concat();
            Router::start(settings, &format!("router{at}"), &addresses, &args, folder)
        })
        .collect::<Result<_>>()?;
    for round in 0..rounds {
        for at in 0..routers.len() {
            let fill = of(&routers[0], format!("{at}-{round}:"), "set=1", HOT, Duration::from_millis(600))?;
            load::start(&fill)?.finish()?;
        }
    }
    let _capped: Vec<_> = nodes.iter().map(|(node, _)| Capped::new(node.id(), SHARE)).collect::<Result<_>>()?;
    let mut seen: Vec<[Vec<f64>; 3]> = ways.iter().map(|_| <_>::default()).collect();
    // Interleaved, so that a machine that slows down affects all alike.
    for round in 0..rounds {
        for (at, router) in routers.iter().enumerate() {
            settings.check_interrupted()?;
            let run = load::start(&of(router, format!("{at}-{round}:"), "get=1", HOT, Duration::from_secs(seconds))?)?;
            for (all, value) in seen[at].iter_mut().zip(measure_surge(run, seconds)?) {
                all.push(value);
            }
        }
    }
    let mut table = Table::new(["reports", "back at 95 %, s", "k requests/s at the end", "in the first 0.2 s"]);
    for ((name, _), [back, end, first]) in ways.iter().zip(seen) {
        let shown = |values: Vec<f64>, digits: usize| {
            Spread::of(values).map_or_else(String::new, |all| all.text(|value| format!("{value:.digits$}")))
        };
        table.row([(*name).to_owned(), shown(back, 2), shown(end, 1), shown(first, 1)]);
    }
    Ok(table.to_markdown())
}

/// Returns the time until the rate first reaches its final value, in seconds, the final rate, and the first rate, in
/// thousands per second.
fn measure_surge(mut run: load::Run, seconds: u64) -> Result<[f64; 3]> {
    let (begun, mut looks) = (Instant::now(), Vec::new());
    let mut last = begun;
    while !run.is_finished() {
        std::thread::sleep(SAMPLE_INTERVAL);
        let (replies, now) = (run.take_interval().replies as f64, Instant::now());
        looks.push((now.duration_since(begun).as_secs_f64(), replies / now.duration_since(last).as_secs_f64() / 1e3));
        last = now;
    }
    run.finish()?;
    let mean = |looks: &[(f64, f64)]| looks.iter().map(|(_, rate)| rate).sum::<f64>() / looks.len().max(1) as f64;
    // The last sample is cut short by the end.
    let late: Vec<_> =
        looks.iter().copied().filter(|(at, _)| (seconds as f64 / 2.0..seconds as f64 - 0.2).contains(at)).collect();
    let end = mean(&late);
    let reached = looks
        .windows(WINDOW_SAMPLES)
        .find(|window| mean(window) >= RECOVERED_SHARE * end)
        .and_then(|window| window.first());
    let back = reached.context("the final rate is never reached")?.0 - SAMPLE_INTERVAL.as_secs_f64();
    Ok([back.max(0.0), end, mean(&looks[..WINDOW_SAMPLES.min(looks.len())])])
}
