//! What the metrics page says besides the router's own figures: of the process, by the names that Prometheus's client libraries use, and of
//! the log.

use std::fmt::Write as _;

use rustix::process::{Resource, getrlimit};
use rustix::time::{ClockId, clock_gettime};

/// Text for the metrics page, in OpenMetrics.
#[derive(Debug, Default)]
pub(super) struct Page(String);

impl Page {
    /// A page that begins with what the router says of itself.
    pub(super) fn behind(router: String) -> Self {
        match router.strip_suffix("# EOF\n") {
            Some(text) => Self(text.to_owned()),
            None => Self(router),
        }
    }

    pub(super) fn finish(mut self) -> String {
        self.0.push_str("# EOF\n");
        self.0
    }

    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "gauge", help, value);
    }

    pub(super) fn counter(&mut self, name: &str, help: &str, value: f64) {
        self.add(&format!("switchyard_{name}"), "counter", help, value);
    }

    /// Counters of one name that differ by a label. Its values are our words, or names of commands: nothing in them needs an escape.
    pub(super) fn counters<'a>(&mut self, name: &str, help: &str, label: &str, values: impl IntoIterator<Item = (&'a str, f64)>) {
        self.declare(&format!("switchyard_{name}"), "counter", help);
        for (of, value) in values {
            let _ = writeln!(self.0, "switchyard_{name}_total{{{label}=\"{of}\"}} {value}");
        }
    }

    /// Which version this is.
    pub(super) fn add_build(&mut self) {
        self.declare("switchyard_build", "info", "The version of Switchyard that runs");
        let _ = writeln!(self.0, "switchyard_build_info{{version=\"{}\"}} 1", env!("CARGO_PKG_VERSION"));
    }

    /// What the process needs. What the system does not say is left out.
    pub(super) fn add_process(&mut self) {
        let cpu = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = cpu.tv_sec as f64 + cpu.tv_nsec as f64 / 1e9;
        self.add("process_cpu_seconds", "counter", "Processor time that the process has used, of user and system", seconds);
        if let Some((virtual_bytes, resident_bytes)) = memory() {
            self.add("process_virtual_memory_bytes", "gauge", "Virtual memory of the process", virtual_bytes);
            self.add("process_resident_memory_bytes", "gauge", "Memory of the process that is in RAM", resident_bytes);
        }
        if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
            // Without the one that reads this.
            self.add("process_open_fds", "gauge", "Open files of the process, sockets included", files.count().saturating_sub(1) as f64);
        }
        if let Some(max) = getrlimit(Resource::Nofile).current {
            self.add("process_max_fds", "gauge", "How many open files the process may have", max as f64);
        }
        if let Some(start) = start_time() {
            self.add("process_start_time_seconds", "gauge", "When the process started, in seconds since 1970", start);
        }
    }

    /// What of the log was not written.
    pub(super) fn add_log(&mut self) {
        let (queue, repeated) = super::log_queue::left_out();
        let values = [("queue", queue as f64), ("repeated", repeated as f64)];
        self.counters("log_lines_left_out", "Lines of the log that were not written, by why", "why", values);
    }

    fn declare(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn add(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.declare(name, kind, help);
        let suffix = if kind == "counter" { "_total" } else { "" };
        let _ = writeln!(self.0, "{name}{suffix} {value}");
    }
}

/// Virtual and resident memory, bytes.
fn memory() -> Option<(f64, f64)> {
    let pages = std::fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = pages.split(' ').map(|field| Some(field.parse::<f64>().ok()? * rustix::param::page_size() as f64));
    Some((pages.next()??, pages.next()??))
}

/// When the process started, seconds since 1970.
fn start_time() -> Option<f64> {
    let own = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name, which may contain anything.
    let ticks: f64 = own.rsplit_once(") ")?.1.split(' ').nth(19)?.parse().ok()?;
    let system = std::fs::read_to_string("/proc/stat").ok()?;
    let booted: f64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()?;
    Some(booted + ticks / rustix::param::clock_ticks_per_second() as f64)
}
