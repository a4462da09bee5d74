//! Rows of the tables, and the results of one measurement.

use std::fmt;

/// The command that redis-benchmark sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Command {
    /// Reads of keys that exist.
    Get,
    /// Overwrites of keys that exist.
    Set,
}

impl Command {
    /// Name in redis-benchmark's `-t` and in Redis's command statistics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::Set => "set",
        }
    }
}

/// One row: the same load for every proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// Whether the proxy has its own CPU, and everything else shares another.
    pub pinned: bool,
    /// Bytes per value.
    pub value: usize,
    /// Command of the load.
    pub command: Command,
    /// Pipeline depth of each client.
    pub pipeline: usize,
    /// Connections.
    pub clients: usize,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = if self.value < 1024 { format!("{} B", self.value) } else { format!("{} KiB", self.value / 1024) };
        let clients = if self.clients == 1 { "1 client".to_owned() } else { format!("{} clients", self.clients) };
        write!(f, "{} {value}, P={}, {clients}", self.command.name().to_uppercase(), self.pipeline)
    }
}

const fn row(pinned: bool, value: usize, command: Command, pipeline: usize, clients: usize) -> Row {
    Row { pinned, value, command, pipeline, clients }
}

/// Rows with goals, without pinning.
pub(super) const GET_C50: Row = row(false, 64, Command::Get, 1, 50);
/// Pipelines.
pub(super) const GET_P16: Row = row(false, 64, Command::Get, 16, 50);
/// Many clients.
pub(super) const GET_C512: Row = row(false, 64, Command::Get, 1, 512);
/// One client, which batching must not slow down.
pub(super) const GET_C1: Row = row(false, 64, Command::Get, 1, 1);
/// Few clients.
pub(super) const GET_C8: Row = row(false, 64, Command::Get, 1, 8);
/// Large values.
pub(super) const GET_16K: Row = row(false, 16 * 1024, Command::Get, 1, 50);
/// The gate: one command at a time.
pub(super) const GATE_C50: Row = row(true, 64, Command::Get, 1, 50);
/// The gate: many clients.
pub(super) const GATE_C512: Row = row(true, 64, Command::Get, 1, 512);
/// The gate: pipelines.
pub(super) const GATE_P16: Row = row(true, 64, Command::Get, 16, 50);

/// All rows without pinning, in the order of their value sizes (nodes are filled once per size).
pub(super) fn open_rows(quick: bool) -> Vec<Row> {
    if quick {
        return vec![GET_C50, GET_P16, GET_C512, GET_C1, GET_16K];
    }
    let mut rows = Vec::new();
    for command in [Command::Get, Command::Set] {
        for clients in [50, 512] {
            for pipeline in [1, 16] {
                rows.push(row(false, 64, command, pipeline, clients));
            }
        }
    }
    rows.extend([GET_C1, GET_C8]);
    for value in [1024, 16 * 1024] {
        rows.extend([Command::Get, Command::Set].map(|command| row(false, value, command, 1, 50)));
    }
    rows
}

/// Numbers of nodes in the test for a flat cost. The first one is the reference.
pub(super) const FLAT_NODES: [usize; 3] = [2, 32, 64];

/// Enough clients that most of them wait.
pub(super) const GET_C10K: Row = row(false, 64, Command::Get, 1, 10_000);

/// Rows of the test for a flat cost over nodes and clients.
pub(super) fn flat_rows() -> Vec<Row> {
    vec![GET_C50, GET_P16, GET_C512, GET_C10K]
}

/// Rows of the comparison with twemproxy on the same file.
pub(super) fn pool_rows() -> Vec<Row> {
    vec![GET_C50, GET_P16, GET_C512, row(false, 64, Command::Get, 16, 512)]
}

/// The gate: the proxy alone on one CPU, redis-servers and redis-benchmark on another.
pub(super) fn gate_rows() -> Vec<Row> {
    vec![GATE_C50, GATE_C512, GATE_P16]
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Requests per second, as redis-benchmark saw them.
    pub requests_per_second: f64,
    /// Median latency in milliseconds.
    pub p50_ms: f64,
    /// 99th percentile in milliseconds.
    pub p99_ms: f64,
    /// CPU of the proxy per request in microseconds (user + system, all threads); `None` without a proxy.
    pub proxy_us: Option<f64>,
    /// CPU of the proxy and the redis-servers per request.
    pub total_us: f64,
    /// Share of the machine's CPU time that processes outside of this measurement took.
    pub foreign: f64,
}

/// Returns the median, which is the mean of the middle two for an even number; `None` without values.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some((lower + upper) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 100.0]), Some(3.0));
    }

    #[test]
    fn every_row_with_a_goal_is_measured_and_none_twice() {
        let mut rows = open_rows(false);
        rows.extend(gate_rows());
        for goal in [GET_C50, GET_P16, GET_C512, GET_C1, GET_C8, GET_16K, GATE_C50, GATE_C512, GATE_P16] {
            assert!(rows.contains(&goal), "{goal}");
        }
        let count = rows.len();
        rows.sort();
        rows.dedup();
        assert_eq!(rows.len(), count);
        assert!(open_rows(true).iter().all(|r| open_rows(false).contains(r)));
    }
}
