//! Servers with a limited share of a processor: a cgroup for each, version 1 or 2.
//!
//! The period is 10 ms. With the usual 100 ms a server that has used its share sleeps for up to 100 ms, and p99 would
//! measure that. The kernel accepts no quota below 1 ms, so a share below a tenth gets a longer period.
//!
//! A group ends with its [`Capped`]; a process that still runs then moves to the root group, without a limit. SIGKILL
//! leaves the group's directory behind. Each run first removes such directories, if the process whose id is in the name
//! is dead.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

const PERIOD_US: u64 = 10_000;
/// The kernel's limits of quota and period.
const QUOTA_LEAST_US: u64 = 1000;
const PERIOD_MOST_US: u64 = 1_000_000;
const PREFIX: &str = "switchyard-lab-";
/// Minimum share of a processor for a server.
pub const SHARE_LEAST: f64 = 0.01;

/// A process whose processor time is limited, until this is dropped.
#[derive(Debug)]
pub(crate) struct Capped {
    group: PathBuf,
    root: PathBuf,
}

impl Capped {
    /// Limits the process to this number of processors.
    pub(crate) fn new(process: u32, processors: f64) -> Result<Self> {
        let (quota, period) = quota_and_period(processors)?;
        let (root, is_v1) = root();
        let group = root.join(format!("{PREFIX}{}-{process}", std::process::id()));
        let write = |file: &str, text: String| {
            fs::write(group.join(file), text).with_context(|| format!("cannot write {}", group.join(file).display()))
        };
        let rights = "limits on servers use a cgroup, which needs root (or use --source-cpu none --target-cpu none)";
        if !is_v1 {
            fs::write(root.join("cgroup.subtree_control"), "+cpu").context(rights)?;
        }
        fs::create_dir(&group).context(rights)?;
        let capped = Self { group: group.clone(), root };
        if is_v1 {
            write("cpu.cfs_period_us", period.to_string())?;
            write("cpu.cfs_quota_us", quota.to_string())?;
        } else {
            write("cpu.max", format!("{quota} {period}"))?;
        }
        write("cgroup.procs", process.to_string())?;
        Ok(capped)
    }
}

/// Whether this machine and user can limit processes: the group of no process can be created.
pub(crate) fn is_possible() -> bool {
    let (root, is_v1) = root();
    let group = root.join(format!("{PREFIX}{}-0", std::process::id()));
    let can_limit = || is_v1 || fs::write(root.join("cgroup.subtree_control"), "+cpu").is_ok();
    let is_created = can_limit() && fs::create_dir(&group).is_ok();
    let file = if is_v1 { "cpu.cfs_quota_us" } else { "cpu.max" };
    let is_limited = is_created && group.join(file).exists();
    let _ = fs::remove_dir(&group);
    is_limited
}

impl Drop for Capped {
    fn drop(&mut self) {
        dissolve(&self.group, &self.root);
    }
}

/// Removes the groups of killed runs.
pub(crate) fn remove_leftovers() {
    let (root, _) = root();
    let groups = fs::read_dir(&root).into_iter().flatten().flatten();
    for group in groups {
        let maker = group.file_name().to_str().and_then(maker_of);
        if maker.is_some_and(|id| !Path::new("/proc").join(id.to_string()).exists()) {
            dissolve(&group.path(), &root);
        }
    }
}

/// Removes a group, after its processes have moved to the root group. Failures are ignored, because they only leave a
/// directory.
fn dissolve(group: &Path, root: &Path) {
    for process in fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default().lines() {
        let _ = fs::write(root.join("cgroup.procs"), process);
    }
    let _ = fs::remove_dir(group);
}

/// Returns the folder of groups, and whether it is of version 1.
fn root() -> (PathBuf, bool) {
    let v1 = Path::new("/sys/fs/cgroup/cpu");
    if v1.join("cpu.cfs_quota_us").exists() || v1.join("cgroup.procs").exists() {
        (v1.to_owned(), true)
    } else {
        (PathBuf::from("/sys/fs/cgroup"), false)
    }
}

/// Returns the process that made the group of this name.
fn maker_of(name: &str) -> Option<u32> {
    let (maker, limited) = name.strip_prefix(PREFIX)?.split_once('-')?;
    limited.parse::<u32>().ok()?;
    maker.parse().ok()
}

/// Returns quota and period, in microseconds.
fn quota_and_period(processors: f64) -> Result<(u64, u64)> {
    ensure!(
        processors.is_finite() && processors >= SHARE_LEAST,
        "a server cannot get {processors} of a processor: the least share is {SHARE_LEAST}"
    );
    let period = PERIOD_US.max((QUOTA_LEAST_US as f64 / processors).ceil() as u64).min(PERIOD_MOST_US);
    Ok(((processors * period as f64).round() as u64, period))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_never_below_the_kernel_minimum() {
        assert_eq!(quota_and_period(0.5).expect("enough"), (5000, 10_000));
        assert_eq!(quota_and_period(2.0).expect("enough"), (20_000, 10_000));
        assert_eq!(quota_and_period(0.05).expect("enough"), (1000, 20_000));
        for share in [0.01, 0.013, 0.07, 0.099, 0.1] {
            let (quota, period) = quota_and_period(share).expect("enough");
            assert!(quota >= QUOTA_LEAST_US && period <= PERIOD_MOST_US, "{share}: {quota} of {period}");
            assert!((quota as f64 / period as f64 - share).abs() < share / 100.0, "{share}: {quota} of {period}");
        }
        assert!(quota_and_period(0.001).is_err());
        assert!(quota_and_period(f64::NAN).is_err());
    }

    #[test]
    fn only_our_own_groups_are_leftovers() {
        assert_eq!(maker_of("switchyard-lab-12-34"), Some(12));
        for other in
            ["switchyard-lab-12", "switchyard-lab-12-x", "switchyard-12-34", "system.slice", "switchyard-lab--34"]
        {
            assert_eq!(maker_of(other), None, "{other}");
        }
    }
}
