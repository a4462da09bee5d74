//! CPU and memory of processes, from /proc.
//!
//! CPU comes from `/proc/PID/task/*/schedstat` (nanoseconds), summed over the threads: `/proc/PID/schedstat` is the
//! main thread alone (0 for a proxy that works in another thread), and `/proc/PID/stat` includes ended threads, but in
//! ticks of 10 ms. If a thread has ended in between, `stat` is used, because the nanoseconds of that thread are gone.

use std::time::{Duration, Instant};

use ::procfs::process::{Process, Stat, all_processes};
use ::procfs::sys::kernel::Version;
use ::procfs::{CpuInfo, Current as _, CurrentSI as _, KernelStats, ticks_per_second};
use anyhow::{Context as _, Result};

/// CPU that a process had used at the time of the reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CpuReading {
    ticks: Duration,
    threads: Vec<(u32, Duration)>,
}

impl CpuReading {
    /// Reads the CPU of one process.
    pub(crate) fn of(pid: u32) -> Result<Self> {
        Self::of_process(&process(pid)?)
    }

    fn of_process(process: &Process) -> Result<Self> {
        let stat = process.stat().context("cannot read the CPU of a process: has it ended?")?;
        // A thread may end between listing and reading, and some kernels have no schedstat.
        let threads = process.tasks()?.flatten().filter_map(|task| {
            Some((task.tid.cast_unsigned(), Duration::from_nanos(task.schedstat().ok()?.sum_exec_runtime)))
        });
        Ok(Self { ticks: ticks(stat.utime + stat.stime), threads: threads.collect() })
    }

    /// Reads the CPU of a process and its children.
    pub(crate) fn with_children(pid: u32) -> Result<Self> {
        let mut all = Self::of(pid)?;
        for child in all_processes().context("cannot read /proc")?.flatten() {
            // The child may end before it is read.
            let is_child = child.stat().is_ok_and(|stat| stat.ppid.cast_unsigned() == pid);
            if let Some(one) = is_child.then(|| Self::of_process(&child).ok()).flatten() {
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

fn process(pid: u32) -> Result<Process> {
    Process::new(pid.cast_signed()).with_context(|| format!("cannot read process {pid}: has it ended?"))
}

fn ticks(count: u64) -> Duration {
    Duration::from_millis(count * 1000 / ticks_per_second())
}

/// Returns the ids of a process's threads.
pub(crate) fn threads_of(pid: u32) -> Result<Vec<u32>> {
    Ok(process(pid)?.tasks()?.flatten().map(|task| task.tid.cast_unsigned()).collect())
}

/// Processor time since the start of the machine, in ticks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessorTime {
    /// All processors, also idle.
    total: u64,
    /// All programs, and other virtual machines. Time of interrupts is missing, because it belongs to no program.
    used: u64,
    /// This process and its ended children.
    own: u64,
}

impl ProcessorTime {
    pub(crate) fn now() -> Result<Self> {
        let all = KernelStats::current().context("cannot read /proc/stat")?.total;
        let stat = Process::myself().and_then(|process| process.stat()).context("cannot read /proc/self/stat")?;
        let used = all.user + all.nice + all.system + all.steal.unwrap_or_default();
        let of_interrupts = all.irq.unwrap_or_default() + all.softirq.unwrap_or_default();
        let ended = u64::try_from(stat.cutime + stat.cstime).unwrap_or_default();
        Ok(Self {
            total: used + all.idle + all.iowait.unwrap_or_default() + of_interrupts,
            used,
            own: stat.utime + stat.stime + ended,
        })
    }

    /// Returns the share of all processors that programs other than this one and its ended children used.
    pub(crate) fn share_of_others_since(self, earlier: Self) -> f64 {
        let used = self.used.saturating_sub(earlier.used).saturating_sub(self.own.saturating_sub(earlier.own));
        used as f64 / self.total.saturating_sub(earlier.total).max(1) as f64
    }
}

/// Returns the resident set of a process, in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64> {
    let kib = process(pid)?.status()?.vmrss;
    Ok(kib.with_context(|| format!("process {pid} has no VmRSS"))? * 1024)
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
        let cpu = KernelStats::current()?.total;
        // idle and iowait are not work
        let interrupts = [cpu.irq, cpu.softirq, cpu.steal].into_iter().flatten().sum::<u64>();
        let busy = ticks(cpu.user + cpu.nice + cpu.system + interrupts);
        let Stat { cutime, cstime, .. } = Process::myself()?.stat()?;
        let ended_children = ticks((cutime + cstime).cast_unsigned());
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
    let cpu = CpuInfo::current().ok();
    let model = cpu.as_ref().and_then(|cpu| cpu.model_name(0)).unwrap_or(std::env::consts::ARCH);
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    // Only the version, because a cloud's kernel may be named after the cloud.
    let kernel = Version::current().map_or_else(|_| String::new(), |v| format!("{}.{}.{}", v.major, v.minor, v.patch));
    format!("{model}, {cpus} CPUs, Linux {kernel}")
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let mut n = 0_u64;
            let myself = Process::myself().expect("our own /proc");
            let task = myself.task_from_tid(tid).expect("this thread");
            // Until this thread has used 200 ms, however long that takes on a busy machine.
            while task.schedstat().expect("schedstat").sum_exec_runtime < 200_000_000 {
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
