//! Slow commands with their clients. The logs of nodes only show the router.
//!
//! One log for all workers, behind a lock: a normal command only pays a comparison with a time that its worker has
//! already read. Each worker limits its entries per second (`worker::slowlog`) and does not wait for the lock.

use std::collections::VecDeque;
use std::sync::Arc;

/// Maximum arguments per entry, as in Redis.
const ARGUMENTS_MAX: usize = 32;

/// Maximum bytes per argument, as in Redis.
const ARGUMENT_MAX: usize = 128;

/// A slow command.
#[derive(Clone, Debug)]
pub(crate) struct SlowEntry {
    pub(crate) id: u64,
    /// Unix time, seconds.
    pub(crate) at_s: u64,
    /// From the start of the command's turn to its reply, microseconds.
    pub(crate) total_us: u64,
    /// Part before that in which other commands of the client, or a full connection, delayed it, microseconds.
    pub(crate) held_us: u64,
    /// Wait for the connection to the node, microseconds.
    pub(crate) queue_us: u64,
    /// Time in transit and at the node, microseconds.
    pub(crate) node_us: u64,
    pub(crate) args: Vec<Vec<u8>>,
    pub(crate) address: String,
    pub(crate) name: String,
    pub(crate) user: String,
    pub(crate) node: String,
}

#[derive(Debug, Default)]
pub(crate) struct SlowLog {
    entries: VecDeque<Arc<SlowEntry>>,
    next_id: u64,
}

impl SlowLog {
    /// Adds an entry with a new id, and removes the oldest entries above `max`.
    pub(crate) fn add(&mut self, entry: SlowEntry, max: usize) {
        self.entries.push_front(Arc::new(SlowEntry { id: self.next_id, ..entry }));
        self.next_id += 1;
        self.entries.truncate(max);
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the latest entries, latest first. `None`: all.
    pub(crate) fn latest(&self, count: Option<usize>) -> Vec<Arc<SlowEntry>> {
        self.entries.iter().take(count.unwrap_or(usize::MAX)).cloned().collect()
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }
}

/// Shortens a command's arguments like Redis, with the same markers.
pub(crate) fn shortened<'a>(args: impl ExactSizeIterator<Item = &'a [u8]>) -> Vec<Vec<u8>> {
    let count = args.len();
    let mut kept = Vec::new();
    for (index, arg) in args.enumerate() {
        if count > ARGUMENTS_MAX && index == ARGUMENTS_MAX - 1 {
            kept.push(format!("... ({} more arguments)", count - ARGUMENTS_MAX + 1).into_bytes());
            break;
        }
        let mut text = arg[..arg.len().min(ARGUMENT_MAX)].to_vec();
        if arg.len() > ARGUMENT_MAX {
            text.extend_from_slice(format!("... ({} more bytes)", arg.len() - ARGUMENT_MAX).as_bytes());
        }
        kept.push(text);
    }
    kept
}

/// Shortens a truncated request in wire format (`*2\r
/// $3\r
/// ...`).
pub(crate) fn shorten_truncated(request: &[u8]) -> Vec<Vec<u8>> {
    let mut rest = request;
    let Some(count) = take_length(&mut rest, b'*') else { return Vec::new() };
    let mut kept: Vec<Vec<u8>> = Vec::new();
    while kept.len() < count {
        let left = count - kept.len();
        let full = count > ARGUMENTS_MAX && kept.len() == ARGUMENTS_MAX - 1;
        let Some(len) = (if full { None } else { take_length(&mut rest, b'$') }) else {
            kept.push(format!("... ({left} more arguments)").into_bytes());
            break;
        };
        let shown = len.min(ARGUMENT_MAX).min(rest.len());
        let mut text = rest[..shown].to_vec();
        if shown < len {
            text.extend_from_slice(format!("... ({} more bytes)", len - shown).as_bytes());
        }
        kept.push(text);
        rest = rest.get(len.saturating_add(2)..).unwrap_or_default();
    }
    kept
}

/// Parses a complete length line like `$12\r
/// `.
fn take_length(rest: &mut &[u8], kind: u8) -> Option<usize> {
    let line = rest.strip_prefix(&[kind])?;
    let end = line.iter().position(|byte| *byte == b'\r')?;
    let length = std::str::from_utf8(&line[..end]).ok()?.parse().ok()?;
    *rest = line.get(end + 2..)?;
    Some(length)
}

/// Bytes of a command on an exclusive connection that are kept for the log: 32 arguments of 128 bytes.
pub(crate) const KEPT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_cut_as_redis_cuts_them() {
        let long = [b'x'; 130];
        let args: Vec<&[u8]> = std::iter::repeat_n(&long[..], 40).collect();
        let kept = shortened(args.iter().copied());
        assert_eq!(kept.len(), 32);
        assert_eq!(kept[0], [&long[..128], b"... (2 more bytes)"].concat());
        assert_eq!(kept[31], b"... (9 more arguments)");
        assert_eq!(shortened([&b"GET"[..], b"k"].into_iter()), [b"GET".to_vec(), b"k".to_vec()]);
    }

    #[test]
    fn truncated_requests_are_shown_as_far_as_received() {
        let shown = |request: &str| -> Vec<String> {
            shorten_truncated(request.as_bytes()).into_iter().map(|arg| String::from_utf8(arg).unwrap()).collect()
        };
        assert_eq!(shown("*3\r\n$5\r\nBLPOP\r\n$1\r\nq\r\n$1\r\n0\r\n"), ["BLPOP", "q", "0"]);
        assert_eq!(shown("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$2000000\r\n"), ["SET", "k", "... (2000000 more bytes)"]);
        assert_eq!(shown("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n"), ["SET", "k", "... (1 more arguments)"]);
        assert_eq!(shown("*3\r\n$3\r\nSE"), ["SE... (1 more bytes)", "... (2 more arguments)"]);
        assert_eq!(shown("*18446744073709551615\r\n$18446744073709551615\r\n").len(), 2);
        for nonsense in ["", "*", "*x\r\n", "PING\r\n", "*0\r\n"] {
            assert_eq!(shown(nonsense), [""; 0], "{nonsense:?}");
        }
        let many = "*40\r\n".to_owned() + &"$1\r\nx\r\n".repeat(40);
        assert_eq!(shown(&many)[30..], ["x", "... (9 more arguments)"]);
    }

    #[test]
    fn the_oldest_entries_go_first() {
        let mut log = SlowLog::default();
        let entry = SlowEntry {
            id: 0,
            at_s: 0,
            total_us: 0,
            held_us: 0,
            queue_us: 0,
            node_us: 0,
            args: Vec::new(),
            address: String::new(),
            name: String::new(),
            user: String::new(),
            node: String::new(),
        };
        for _ in 0..5 {
            log.add(entry.clone(), 3);
        }
        assert_eq!(log.latest(None).iter().map(|e| e.id).collect::<Vec<_>>(), [4, 3, 2]);
        assert_eq!(log.latest(Some(1)).len(), 1);
        log.clear();
        log.add(entry, 3);
        assert_eq!(log.latest(None)[0].id, 5, "ids continue after a reset");
    }
}
