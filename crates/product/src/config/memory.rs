//! `memory-max`: a number of bytes, or a percentage of the memory of the machine or control group.

use std::fmt;
use std::fs;
use std::path::Path;

use switchyard_resp::units::{SIZE_FORM, format_size, parse_size};

use super::raw::Raw;

/// `memory-max` as written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryMax {
    None,
    Bytes(u64),
    /// Percentage of the available memory: 1 to 100.
    Percent(u8),
}

/// Minimum in bytes: less leaves no room for clients.
const MIN: u64 = 64 << 20;

impl MemoryMax {
    pub(crate) fn read(raw: &Raw) -> Result<Self, String> {
        let text = match raw {
            Raw::Text(text) | Raw::Integer(text) => text.trim(),
            _ => return Err(format!("{} is neither a share such as \"50%\" nor {SIZE_FORM}", raw.shown())),
        };
        if let Some(share) = text.strip_suffix('%') {
            return match share.trim().parse() {
                Ok(percent @ 1..=100) => Ok(Self::Percent(percent)),
                _ => Err(format!("{} is out of range; allowed is \"1%\" to \"100%\"", raw.shown())),
            };
        }
        match parse_size(text) {
            Some(0) => Ok(Self::None),
            Some(bytes @ MIN..) => Ok(Self::Bytes(bytes)),
            Some(_) => Err(format!(
                "{} is out of range; allowed is {} and more, or 0: no limit",
                raw.shown(),
                format_size(MIN)
            )),
            None => Err(format!("{} is neither a share such as \"50%\" nor {SIZE_FORM}", raw.shown())),
        }
    }

    /// Bytes on this machine.
    pub(crate) fn bytes(self) -> usize {
        let bytes = match self {
            Self::None => return usize::MAX,
            Self::Bytes(bytes) => bytes,
            Self::Percent(percent) => match available(Path::new("/")) {
                Some(all) => (all / 100 * u64::from(percent)).max(MIN),
                None => return usize::MAX,
            },
        };
        usize::try_from(bytes).unwrap_or(usize::MAX)
    }
}

impl fmt::Display for MemoryMax {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("0"),
            Self::Bytes(bytes) => f.write_str(&format_size(*bytes)),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

/// Available memory in bytes: the minimum of the machine's memory and the limits of all enclosing control groups (both
/// versions). `root` is the root of the file system. `None` if nothing can be read.
fn available(root: &Path) -> Option<u64> {
    let read = |path: &str| fs::read_to_string(root.join(path)).ok();
    let machine = read("proc/meminfo").and_then(|text| {
        let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?.trim();
        total.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    let groups = read("proc/self/cgroup").unwrap_or_default();
    let limits = groups.lines().flat_map(|line| {
        // Version 2: `0::/path`. Version 1: `4:memory:/path`.
        let mut fields = line.splitn(3, ':');
        let (number, controllers, group) =
            (fields.next(), fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let place = match number {
            Some("0") if controllers.is_empty() => Some(("sys/fs/cgroup", "memory.max")),
            _ if controllers.split(',').any(|name| name == "memory") => {
                Some(("sys/fs/cgroup/memory", "memory.limit_in_bytes"))
            }
            _ => None,
        };
        // Limits of ancestor groups apply as well. In a container the upper part of the path does not exist.
        place.into_iter().flat_map(move |(mount, file)| {
            Path::new(group.trim_start_matches('/'))
                .ancestors()
                .map(move |group| Path::new(mount).join(group).join(file))
        })
    });
    // `max`, and the huge number for it in version 1, are not parsed or not the minimum.
    let limits = limits.filter_map(|path| fs::read_to_string(root.join(path)).ok()?.trim().parse::<u64>().ok());
    limits.chain(machine).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a root folder with these files.
    fn root(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            fs::write(path, text).expect("written");
        }
        root
    }

    #[test]
    fn available_memory_is_the_minimum_of_machine_and_groups() {
        let machine = ("proc/meminfo", "MemTotal:        1000 kB\nMemFree: 10 kB\n");
        let two = ("proc/self/cgroup", "0::/system.slice/router.service\n");
        let one = ("proc/self/cgroup", "12:cpuset:/a\n4:memory:/docker/x\n1:name=systemd:/\n");
        type Files = [(&'static str, &'static str)];
        let cases: [(&Files, Option<u64>); 7] = [
            (&[], None),
            (&[machine], Some(1_024_000)),
            (&[machine, two, ("sys/fs/cgroup/system.slice/router.service/memory.max", "max\n")], Some(1_024_000)),
            (&[machine, two, ("sys/fs/cgroup/system.slice/router.service/memory.max", "50000\n")], Some(50_000)),
            (&[machine, two, ("sys/fs/cgroup/system.slice/memory.max", "40000\n")], Some(40_000)),
            (&[machine, one, ("sys/fs/cgroup/memory/memory.limit_in_bytes", "30000\n")], Some(30_000)),
            (
                &[machine, one, ("sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes", "9223372036854771712\n")],
                Some(1_024_000),
            ),
        ];
        for (files, expected) in cases {
            assert_eq!(available(root(files).path()), expected, "{files:?}");
        }
    }

    #[test]
    fn shares_and_sizes_are_read_and_shown() {
        let read = |text: &str| MemoryMax::read(&Raw::Text(text.to_owned()));
        for text in ["50%", "1%", "100%", "64mb", "2gb", "0"] {
            assert_eq!(read(text).map(|max| max.to_string()).as_deref(), Ok(text));
        }
        for text in ["0%", "101%", "%", "-5%", "1.5%", "63mb", "many", ""] {
            assert!(read(text).is_err(), "{text}");
        }
        assert_eq!(MemoryMax::None.bytes(), usize::MAX);
        assert_eq!(MemoryMax::Bytes(1 << 30).bytes(), 1 << 30);
        let (half, all) = (MemoryMax::Percent(50).bytes(), MemoryMax::Percent(100).bytes());
        assert!(half < all && half > 0, "{half} of {all}");
    }
}
