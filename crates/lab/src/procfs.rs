//! CPU and memory of processes, from /proc.
//!
//! CPU comes from `/proc/PID/task/*/schedstat` (nanoseconds), summed over the threads: `/proc/PID/schedstat` is the
//! main thread alone (0 for a proxy that works in another thread), and `/proc/PID/stat` includes ended threads, but in
//! ticks of 10 ms. If a thread has ended in between, `stat` is used, because the nanoseconds of that thread are gone.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

/// The kernel reports ticks in USER_HZ, which is 100 on every Linux architecture that Rust supports.
const TICK: Duration = Duration::from_millis(10);

/// CPU that a process had used at the time of the reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuReading {
    ticks: Duration,
    threads: Vec<(u32, Duration)>,
}

impl CpuReading {
    /// Reads the CPU of one process.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let stat = read(format!("/proc/{pid}/stat"))?;
        let ticks =
            parse_stat_cpu(&stat).with_context(|| format!("/proc/{pid}/stat is not of the known form: {stat}"))?;
        let mut threads = Vec::new();
        for tid in threads_of(pid)? {
            // A thread may end between listing and reading, and some kernels have no schedstat.
            if let Some(ran) =
                fs::read_to_string(format!("/proc/{pid}/task/{tid}/schedstat")).ok().and_then(|s| parse_schedstat(&s))
            {
                threads.push((tid, ran));
            }
        }
        Ok(Self { ticks, threads })
    }

    /// Reads the CPU of a process and its children.
    pub(crate) fn with_children(pid: u32) -> Result<Self> {
        let mut all = Self::of(pid)?;
        for entry in fs::read_dir("/proc").context("cannot read /proc")?.flatten() {
            let Some(child) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            let parent = || {
                let stat = fs::read_to_string(format!("/proc/{child}/stat")).ok()?;
                stat_fields(&stat)?.get(1)?.parse::<u32>().ok()
            };
            // The child may end before it is read.
            if let Some(one) = parent().filter(|parent| *parent == pid).and_then(|_| Self::of(child).ok()) {
                all.ticks += one.ticks;
                all.threads.extend(one.threads);
            }
        }
        Ok(all)
    }

    /// Returns the CPU used since `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Duration {
        let ticks = self.ticks.saturating_sub(earlier.ticks);
        let ran = |threads: &[(u32, Duration)]| threads.iter().map(|(_, d)| *d).sum::<Duration>();
        let lost_thread = earlier.threads.iter().any(|(tid, _)| !self.threads.iter().any(|(t, _)| t == tid));
        if lost_thread || self.threads.is_empty() {
            ticks
        } else {
            ran(&self.threads).saturating_sub(ran(&earlier.threads))
        }
    }
}

/// Returns the ids of a process's threads.
pub(crate) fn threads_of(pid: u32) -> Result<Vec<u32>> {
    let folder = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {folder}: has the process ended?"))?;
    Ok(entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect())
}

/// Returns the resident set of a process, in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    parse_rss(&read(&path)?).with_context(|| format!("{path} has no VmRSS"))
}

/// CPU used by all processes of the machine, and by our ended children.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MachineReading {
    at: Instant,
    busy: Duration,
    ended_children: Duration,
}

impl MachineReading {
    /// Reads both values.
    pub(crate) fn now() -> Result<Self> {
        let busy = parse_machine_busy(&read("/proc/stat")?).context("/proc/stat is not of the known form")?;
        let ended_children =
            parse_stat_children_cpu(&read("/proc/self/stat")?).context("/proc/self/stat is not of the known form")?;
        Ok(Self { at: Instant::now(), busy, ended_children })
    }

    /// Returns the CPU used since `earlier` by the machine and by ended children, and the elapsed time.
    pub(crate) fn since(&self, earlier: &Self) -> (Duration, Duration, Duration) {
        (
            self.busy.saturating_sub(earlier.busy),
            self.ended_children.saturating_sub(earlier.ended_children),
            self.at - earlier.at,
        )
    }
}

/// Returns one line about the machine for the head of a table: processor, CPUs, kernel.
pub(crate) fn describe_machine() -> String {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        cpuinfo
            .lines()
            .find(|l| l.starts_with(name))
            .and_then(|l| l.split_once(':'))
            .map_or("", |(_, v)| v.trim())
            .to_owned()
    };
    let model = field("model name");
    let model = if model.is_empty() { std::env::consts::ARCH.to_owned() } else { model };
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    // Only the version, because a cloud's kernel may be named after the cloud.
    let kernel = kernel.trim().split('-').next().unwrap_or_default();
    format!("{model}, {cpus} CPUs, Linux {kernel}")
}

fn read(path: impl AsRef<Path>) -> Result<String> {
    let path = path.as_ref();
    fs::read_to_string(path).with_context(|| format!("cannot read {}: has the process ended?", path.display()))
}

/// Fields of `/proc/PID/stat` from the third on: the second is the program's name in parentheses and may hold anything.
fn stat_fields(stat: &str) -> Option<Vec<&str>> {
    Some(stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace().collect())
}

fn ticks(fields: &[&str], first: usize) -> Option<Duration> {
    let at = |i: usize| fields.get(i)?.parse::<u32>().ok();
    TICK.checked_mul(at(first)?.checked_add(at(first + 1)?)?)
}

/// utime + stime (fields 14 and 15).
fn parse_stat_cpu(stat: &str) -> Option<Duration> {
    ticks(&stat_fields(stat)?, 11)
}

/// cutime + cstime (fields 16 and 17).
fn parse_stat_children_cpu(stat: &str) -> Option<Duration> {
    ticks(&stat_fields(stat)?, 13)
}

/// The first field: nanoseconds on a CPU.
fn parse_schedstat(schedstat: &str) -> Option<Duration> {
    Some(Duration::from_nanos(schedstat.split_ascii_whitespace().next()?.parse().ok()?))
}

fn parse_rss(status: &str) -> Option<u64> {
    let kib: u64 =
        status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// user, nice, system, irq, softirq and steal of the first line; idle and iowait are not work.
fn parse_machine_busy(stat: &str) -> Option<Duration> {
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_ascii_whitespace()
        .map(|f| f.parse().ok())
        .collect::<Option<_>>()?;
    let busy: u64 = [0, 1, 2, 5, 6, 7].iter().filter_map(|&i| fields.get(i)).sum();
    Some(Duration::from_millis(busy.checked_mul(10)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "4242 (a) b (c)) S 1 4242 4242 0 -1 4194560 1102 77 0 0 150 25 30 4 20 0 3 0 100 200000 900 18446744073709551615";

    #[test]
    fn stat_survives_any_program_name() {
        assert_eq!(parse_stat_cpu(STAT), Some(Duration::from_millis(1750)));
        assert_eq!(parse_stat_children_cpu(STAT), Some(Duration::from_millis(340)));
        assert_eq!(parse_stat_cpu("4242 (x) S 1"), None);
        assert_eq!(parse_stat_cpu(""), None);
    }

    #[test]
    fn schedstat_and_status() {
        assert_eq!(parse_schedstat("2077999 197384 4\n"), Some(Duration::from_nanos(2_077_999)));
        assert_eq!(parse_schedstat(""), None);
        assert_eq!(parse_rss("Name:\tx\nVmPeak:\t   9 kB\nVmRSS:\t   1234 kB\n"), Some(1234 * 1024));
        assert_eq!(parse_rss("Name:\tx\n"), None);
    }

    #[test]
    fn machine_busy_leaves_out_idle_and_iowait() {
        assert_eq!(parse_machine_busy("cpu  1 2 3 1000 500 4 5 6 0 0\ncpu0 0\n"), Some(Duration::from_millis(210)));
        assert_eq!(parse_machine_busy("intr 5\n"), None);
    }

    #[test]
    fn a_lost_thread_falls_back_to_ticks() {
        let ms = Duration::from_millis;
        let before = CpuReading { ticks: ms(100), threads: vec![(1, ms(50)), (2, ms(50))] };
        let after = CpuReading { ticks: ms(300), threads: vec![(1, ms(150)), (2, ms(51))] };
        assert_eq!(after.since(&before), ms(101));
        let lost = CpuReading { ticks: ms(300), threads: vec![(1, ms(150))] };
        assert_eq!(lost.since(&before), ms(200));
    }

    /// The work is in another thread, which `/proc/PID/schedstat` would not show.
    #[test]
    fn counts_every_thread_of_this_process() {
        let pid = std::process::id();
        let before = CpuReading::of(pid).expect("our own /proc");
        let thread_cpu = std::thread::spawn(|| {
            let tid = rustix::thread::gettid().as_raw_nonzero();
            let mut n = 0_u64;
            let path = format!("/proc/self/task/{tid}/schedstat");
            // Until this thread has used 200 ms, however long that takes on a busy machine.
            while parse_schedstat(&fs::read_to_string(&path).expect("schedstat")).expect("a number")
                < Duration::from_millis(200)
            {
                n = std::hint::black_box((0..100_000).fold(n, |a, b| a ^ b));
            }
            CpuReading::of(std::process::id()).expect("our own /proc")
        });
        let after = thread_cpu.join().expect("the thread ends");
        // If a thread of another test has ended in the meantime, ticks are counted, and a kernel may assign some to no
        // process.
        assert!(after.since(&before) >= Duration::from_millis(100));
        assert!(resident_bytes(pid).expect("our own /proc") > 100_000);
    }
}
