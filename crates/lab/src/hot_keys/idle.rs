//! CPU of a request without hot keys, with hot copies on and off, in alternating pairs of runs.

use std::path::Path;
use std::process::Command;

use anyhow::Result;
use switchyard_bench::process;

use super::{Router, Settings};
use crate::peers::redis_benchmark;
use crate::procfs::CpuReading;

const PAIRS: usize = 24;

/// Student's t for 95 % and 23 degrees of freedom.
const T: f64 = 2.069;

pub(super) fn measure(settings: &Settings, folder: &Path) -> Result<String> {
    let (_server, direct) = process::start_redis(&process::find_redis_server()?, "node", folder)?;
    let routers = [
        Router::start(settings, "on", &[direct], &[], folder)?,
        Router::start(settings, "off", &[direct], &["--set", "hot-copies.mode=off", "--allow-other-router"], folder)?,
    ];
    let benchmark = redis_benchmark::find()?;
    let requests = if settings.quick { 20_000 } else { 250_000_u64 };
    let cost = |router: &Router, fills: bool| -> Result<f64> {
        settings.check_interrupted()?;
        let test = if fills { "set" } else { "get" };
        let mut command = Command::new(&benchmark);
        command.args([
            "-h",
            "127.0.0.1",
            "-p",
            &router.entry.port().to_string(),
            "-c",
            "50",
            "-t",
            test,
            "-d",
            "64",
            "-r",
            "100000",
        ]);
        command.args(["-n", &requests.to_string(), "--csv"]);
        let before = CpuReading::of(router.process.id())?;
        redis_benchmark::measure(&command, test, folder, &settings.stop)?;
        Ok(CpuReading::of(router.process.id())?.since(&before).as_secs_f64() * 1e6 / requests as f64)
    };
    cost(&routers[0], true)?;
    let pairs = if settings.quick { 2 } else { PAIRS };
    let (mut differences, mut costs) = (Vec::new(), [0.0; 2]);
    for pair in 0..pairs {
        let mut of = [0.0; 2];
        for turn in 0..2 {
            let which = (pair + turn) % 2;
            of[which] = cost(&routers[which], false)?;
            costs[which] += of[which] / pairs as f64;
        }
        differences.push(of[0] - of[1]);
    }
    let mean = differences.iter().sum::<f64>() / pairs as f64;
    let variance = differences.iter().map(|d| (d - mean).powi(2)).sum::<f64>() / (pairs as f64 - 1.0);
    let half = T * (variance / pairs as f64).sqrt();
    Ok(format!(
        "GET of 64 B, 100,000 equally used keys, 50 clients, one worker: {:.3} us of CPU per request with copies on, {:.3} us with `mode = \"off\"`. The difference over {pairs} pairs \
         is {mean:+.3} us, with a 95 % confidence interval from {:+.3} to {:+.3} us.",
        costs[0],
        costs[1],
        mean - half,
        mean + half,
    ))
}
