//! Servers that get a share of a processor: a cgroup for each, version 1 or 2.
//!
//! The period is 10 ms. With the usual 100 ms a server that has used its share sleeps for up to 100 ms, and p99 would measure that.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

const PERIOD_US: u64 = 10_000;

/// A process whose processor time is limited, until this is dropped.
#[derive(Debug)]
pub(super) struct Capped {
    group: PathBuf,
    root: PathBuf,
}

impl Capped {
    /// Gives the process so many processors at most.
    pub(super) fn new(process: u32, processors: f64) -> Result<Self> {
        let (v1, v2) = (Path::new("/sys/fs/cgroup/cpu"), Path::new("/sys/fs/cgroup"));
        let is_v1 = v1.join("cpu.cfs_quota_us").exists();
        let root = if is_v1 { v1 } else { v2 };
        let group = root.join(format!("switchyard-lab-{}-{process}", std::process::id()));
        let quota = (processors * PERIOD_US as f64) as u64;
        let write = |file: &str, text: String| {
            fs::write(group.join(file), text).with_context(|| format!("cannot write {}", group.join(file).display()))
        };
        let rights = "servers are limited by a cgroup, which needs root (or leave --source-cpu and --target-cpu out)";
        if !is_v1 {
            fs::write(v2.join("cgroup.subtree_control"), "+cpu").context(rights)?;
        }
        fs::create_dir(&group).context(rights)?;
        let capped = Self { group: group.clone(), root: root.to_owned() };
        if is_v1 {
            write("cpu.cfs_period_us", PERIOD_US.to_string())?;
            write("cpu.cfs_quota_us", quota.to_string())?;
        } else {
            write("cpu.max", format!("{quota} {PERIOD_US}"))?;
        }
        write("cgroup.procs", process.to_string())?;
        Ok(capped)
    }
}

impl Drop for Capped {
    fn drop(&mut self) {
        // A group with processes stays: they go where they came from.
        for process in fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(self.root.join("cgroup.procs"), process);
        }
        let _ = fs::remove_dir(&self.group);
    }
}
