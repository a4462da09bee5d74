//! Limit of open files. Each client and each connection to a node needs one.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to at least `wanted`, as far as the system allows, and returns the resulting limit.
pub fn raise(wanted: u64) -> u64 {
    let read = || getrlimit(Resource::Nofile);
    let now = read();
    let (soft, hard) = (now.current.unwrap_or(u64::MAX), now.maximum.unwrap_or(u64::MAX));
    if soft >= wanted {
        return soft;
    }
    let set = |current: u64, maximum: u64| {
        setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum: Some(maximum) }).is_ok()
    };
    // Beyond the hard limit only root can go, and fs.nr_open bounds even that.
    if !(hard < wanted && set(wanted, wanted)) {
        set(wanted.min(hard), hard);
    }
    read().current.unwrap_or(u64::MAX)
}
