//! One key that 50 clients read: from redis-server, and through a router with one worker, with and without hot copies.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use switchyard_bench::client::Client;
use switchyard_bench::process;
use switchyard_bench::table::Table;

use super::{Router, Settings, warm_up};
use crate::peers::redis_benchmark;
use crate::procfs::CpuReading;
use crate::reproduce::spread::Spread;

/// Bytes of the value, pipeline depth of each client, and total number of requests.
const ROWS: [(usize, usize, u64); 5] =
    [(64, 1, 150_000), (64, 16, 1_500_000), (64, 64, 3_000_000), (16 << 10, 1, 100_000), (16 << 10, 16, 150_000)];

#[derive(Clone, Copy, Default)]
struct Sample {
    us: f64,
    rps: f64,
    p50_ms: f64,
}

pub(super) fn measure(settings: &Settings, folder: &Path) -> Result<String> {
    let (server, direct) = process::start_redis(&process::find_redis_server()?, "node", folder)?;
    let on = Router::start(settings, "on", &[direct], &[], folder)?;
    let off =
        Router::start(settings, "off", &[direct], &["--set", "hot-copies.mode=off", "--allow-other-router"], folder)?;
    let targets: [(&str, SocketAddr, u32); 3] = [
        ("redis-server", direct, server.id()),
        ("router, copies", on.entry, on.process.id()),
        ("router, off", off.entry, off.process.id()),
    ];
    let benchmark = redis_benchmark::find()?;
    let mut samples: BTreeMap<(usize, usize), Vec<Sample>> = BTreeMap::new();
    let rounds = if settings.quick { 1 } else { 5 };
    for round in 0..rounds {
        for (row, (bytes, pipeline, requests)) in ROWS.into_iter().enumerate() {
            Client::connect(direct)?.call(&[b"SET", b"hot", &vec![b'x'; bytes]], |_| ())?;
            for turn in 0..targets.len() {
                settings.check_interrupted()?;
                let target = (turn + round) % targets.len();
                let (_, address, id) = targets[target];
                // Copies must have the value of this row.
                warm_up(address, b"hot", Duration::from_millis(if round == 0 && row == 0 { 3_500 } else { 300 }))?;
                let requests = if settings.quick { requests / 10 } else { requests };
                let mut command = Command::new(&benchmark);
                command.args([
                    "-h",
                    "127.0.0.1",
                    "-p",
                    &address.port().to_string(),
                    "-c",
                    "50",
                    "-P",
                    &pipeline.to_string(),
                ]);
                command.args(["-n", &requests.to_string(), "--csv", "GET", "hot"]);
                let before = CpuReading::of(id)?;
                let outcome = redis_benchmark::measure(&command, "GET hot", folder, &settings.stop)?;
                let cpu = CpuReading::of(id)?.since(&before);
                let sample = Sample {
                    us: cpu.as_secs_f64() * 1e6 / requests as f64,
                    rps: outcome.requests_per_second,
                    p50_ms: outcome.p50_ms,
                };
                samples.entry((row, target)).or_default().push(sample);
            }
        }
    }
    let mut table = Table::new([
        "GET of one key, 50 clients",
        "",
        "CPU/request, us",
        "of redis-server's",
        "requests/s",
        "of redis-server's",
        "p50, ms",
    ]);
    for (row, (bytes, pipeline, _)) in ROWS.into_iter().enumerate() {
        let of = |target: usize, what: fn(&Sample) -> f64| Spread::of(samples[&(row, target)].iter().map(what));
        for (target, (name, ..)) in targets.iter().enumerate() {
            let (Some(us), Some(rps), Some(p50)) =
                (of(target, |s| s.us), of(target, |s| s.rps), of(target, |s| s.p50_ms))
            else {
                continue;
            };
            let base = |what: fn(&Sample) -> f64| of(0, what).map_or(f64::NAN, |base| base.median);
            let title = if target == 0 { format!("{bytes} B, P={pipeline}") } else { String::new() };
            table.row([
                title,
                (*name).to_owned(),
                us.text(|us| format!("{us:.2}")),
                format!("{:.2}", us.median / base(|s| s.us)),
                rps.text(|rps| format!("{:.0} k", rps / 1e3)),
                format!("{:.2}", rps.median / base(|s| s.rps)),
                p50.text(|ms| format!("{ms:.3}")),
            ]);
        }
    }
    Ok(table.to_markdown())
}
