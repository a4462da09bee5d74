//! Metrics of the process and its log, named as in Prometheus's client libraries.

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};
use switchyard_control::metrics::Page;

use super::log_queue;

/// Version of the names, labels and units of metrics. `docs/compatibility-policy.md` defines when it increases.
const METRICS_VERSION: &str = "1";

/// Adds the metrics to the page. Values that the system does not provide are omitted.
pub(super) fn add_process(page: &mut Page) {
    let (queue, repeated) = log_queue::omitted_counts();
    let values = [("queue", queue as f64), ("repeated", repeated as f64)];
    page.counters("log_lines_left_out", "Lines of the log that were not written, by reason", "reason", values);
    let facts =
        [("version", env!("CARGO_PKG_VERSION")), ("commit", crate::COMMIT), ("metrics_version", METRICS_VERSION)];
    page.info("build", "Version and commit of Switchyard, and version of the metrics' names, labels and units", &facts);
    let cpu = clock_gettime(ClockId::ProcessCPUTime);
    let seconds = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
    page.add("process_cpu_seconds", "counter", "Processor time that the process has used, of user and system", seconds);
    if let Some((virtual_bytes, resident_bytes)) = memory() {
        page.add("process_virtual_memory_bytes", "gauge", "Virtual memory of the process", virtual_bytes);
        page.add("process_resident_memory_bytes", "gauge", "Memory of the process that is in RAM", resident_bytes);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        // Minus the descriptor of this directory listing.
        page.add(
            "process_open_fds",
            "gauge",
            "Open files of the process, sockets included",
            files.count().saturating_sub(1) as f64,
        );
    }
    if let Some(max) = getrlimit(Resource::Nofile).current {
        page.add("process_max_fds", "gauge", "Maximum number of open files of the process", max as f64);
    }
    if let Some(start) = start_time() {
        page.add("process_start_time_seconds", "gauge", "Start time of the process, in seconds since 1970", start);
    }
}

/// Virtual and resident memory, in bytes.
fn memory() -> Option<(f64, f64)> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = pages.split(' ').map(|field| Some(field.parse::<f64>().ok()? * rustix::param::page_size() as f64));
    Some((pages.next()??, pages.next()??))
}

/// Start of the process, in seconds since 1970.
fn start_time() -> Option<f64> {
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program name, which may contain any character.
    let ticks: f64 = own.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
    let system = std::fs::read_to_string("/proc/stat").ok()?;
    let booted: f64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(booted + ticks / rustix::param::clock_ticks_per_second() as f64)
}
