//! redis-benchmark: starts it, and parses its output.
//!
//! Used instead of our own generator because users know its numbers and can repeat them.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use switchyard_bench::process::Process;

use super::{rows::Row, target::Target};

/// Time-out of a measurement. Most take a second or two, and with 10,000 clients ten times as long.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Results of redis-benchmark.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Outcome {
    /// Requests per second.
    pub requests_per_second: f64,
    /// Median latency in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile in milliseconds.
    pub p99_ms: f64,
}

/// Sends `requests` requests of a row to `target`, for keys among the first `keys`.
pub(super) fn run(
    program: &Path,
    target: &Target,
    row: &Row,
    requests: u64,
    keys: u64,
    folder: &Path,
    stop: &AtomicBool,
) -> Result<Outcome> {
    let mut command = Command::new(program);
    command.args(arguments(target.tls.unwrap_or(target.address), row, requests, keys));
    if target.tls.is_some() {
        // The certificate was just made, and trust in it is not measured.
        command.args(["--tls", "--insecure"]);
    }
    measure(&command, row.command.name(), folder, stop)
}

/// Runs this command line, which has `--csv`. `test` is the name of its one test.
pub(crate) fn measure(command: &Command, test: &str, folder: &Path, stop: &AtomicBool) -> Result<Outcome> {
    let mut process = Process::start("redis-benchmark", command, folder)?;
    let end = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = process.ended() {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            bail!("interrupted");
        }
        if Instant::now() > end {
            bail!("redis-benchmark did not end within {TIMEOUT:?}: the proxy lost requests or hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let output = std::fs::read_to_string(process.log()).context("cannot read redis-benchmark's output")?;
    if !status.success() {
        bail!("redis-benchmark failed ({status}):\n{}", process.log_tail());
    }
    parse_csv(&output, test).with_context(|| format!("cannot read redis-benchmark's output:\n{}", process.log_tail()))
}

fn arguments(target: SocketAddr, row: &Row, requests: u64, keys: u64) -> Vec<String> {
    let pairs = [
        ("-h", target.ip().to_string()),
        ("-p", target.port().to_string()),
        ("-t", row.command.name().to_owned()),
        ("-n", requests.to_string()),
        ("-c", row.clients.to_string()),
        ("-P", row.pipeline.to_string()),
        ("-d", row.value.to_string()),
        ("-r", keys.to_string()),
    ];
    pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]).chain(["--csv".to_owned()]).collect()
}

/// Returns the name of key `i` with `-r`.
pub(crate) fn key(i: u64) -> String {
    format!("key:{i:012}")
}

/// Parses `--csv` output: the row of one test, by column names, because versions differ in their columns. Ignores
/// warnings around it.
fn parse_csv(output: &str, test: &str) -> Result<Outcome> {
    let fields = |line: &str| line.split(',').map(|f| f.trim().trim_matches('"').to_owned()).collect::<Vec<_>>();
    let head = output
        .lines()
        .map(fields)
        .find(|f| f.first().is_some_and(|f| f == "test"))
        .context("there is no header line")?;
    let row = output
        .lines()
        .filter(|l| l.starts_with('"'))
        .map(fields)
        .find(|f| f.first().is_some_and(|f| f.eq_ignore_ascii_case(test)))
        .with_context(|| format!("there is no line for {test}"))?;
    let field = |name: &str| {
        let at = head.iter().position(|h| h == name).with_context(|| format!("there is no column {name}"))?;
        let text = row.get(at).with_context(|| format!("the line for {test} ends before {name}"))?;
        text.parse::<f64>()
            .ok()
            .filter(|v| v.is_finite())
            .with_context(|| format!("{name} is \"{text}\", not a number"))
    };
    Ok(Outcome {
        requests_per_second: field("rps")?,
        p50_ms: field("p50_latency_ms")?,
        p99_ms: field("p99_latency_ms")?,
    })
}

/// Finds redis-benchmark or valkey-benchmark.
pub(crate) fn find() -> Result<PathBuf> {
    switchyard_bench::process::find_program(&["redis-benchmark", "valkey-benchmark"]).context(
        "found neither redis-benchmark nor valkey-benchmark on PATH; install one (Debian, Ubuntu: sudo apt-get install redis-tools)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "WARNING: Could not fetch server CONFIG\n\
        \"test\",\"rps\",\"avg_latency_ms\",\"min_latency_ms\",\"p50_latency_ms\",\"p95_latency_ms\",\"p99_latency_ms\",\"max_latency_ms\"\n\
        \"GET\",\"26315.79\",\"0.142\",\"0.008\",\"0.111\",\"0.351\",\"0.591\",\"0.991\"\n";

    #[test]
    fn redis_benchmark_output_is_parsed() {
        let outcome = parse_csv(OUTPUT, "get").expect("the output of 7.0");
        assert_eq!(outcome, Outcome { requests_per_second: 26315.79, p50_ms: 0.111, p99_ms: 0.591 });
    }

    #[test]
    fn parse_errors_name_the_missing_part() {
        for (output, missing) in [
            (OUTPUT.replace("rps", "other"), "rps"),
            (OUTPUT.replace("26315.79", "inf"), "inf"),
            (OUTPUT.replace("\"GET\"", "\"SET\""), "get"),
            (OUTPUT.replace("\"test\"", "\"x\""), "head"),
            (String::new(), "head"),
            (OUTPUT.replace(",\"0.591\",\"0.991\"", ""), "p99"),
        ] {
            let error = parse_csv(&output, "get").expect_err("incomplete").to_string();
            assert!(error.contains(missing), "{error} should name {missing}");
        }
    }

    #[test]
    fn key_names_match_redis_benchmark() {
        assert_eq!(key(42), "key:000000000042");
    }
}
