//! Entries of `ACL LOG`: recently refused commands and logins.

use std::collections::VecDeque;

use switchyard_resp::encode;

use crate::shared::unix_ms;

/// Maximum entries (Redis `acllog-max-len`).
const ENTRIES_MAX: usize = 128;

/// Time in which an equal refusal is counted in the existing entry, as in Redis, milliseconds.
const SAME_MS: u64 = 60_000;

/// Maximum stored bytes of a name from a client.
const NAME_MAX: usize = 256;

/// A refused command or login.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    /// `command`, `key`, `channel` or `auth`.
    pub(crate) reason: &'static str,
    /// `toplevel` or `multi`.
    pub(crate) context: &'static str,
    /// Name of the command, key or channel.
    pub(crate) object: Vec<u8>,
    pub(crate) user: Vec<u8>,
    /// The client's line in CLIENT LIST.
    pub(crate) client: String,
}

#[derive(Debug)]
struct Entry {
    id: u64,
    count: u64,
    refused: Refused,
    created_ms: u64,
    updated_ms: u64,
}

/// Entries, newest first.
#[derive(Debug, Default)]
pub(crate) struct AclLog {
    entries: VecDeque<Entry>,
    next_id: u64,
}

impl AclLog {
    pub(crate) fn note(&mut self, mut refused: Refused) {
        refused.object.truncate(NAME_MAX);
        refused.user.truncate(NAME_MAX);
        let now = unix_ms();
        let is_same = |entry: &Entry| {
            let known = &entry.refused;
            now.saturating_sub(entry.updated_ms) <= SAME_MS
                && (known.reason, known.context) == (refused.reason, refused.context)
                && known.object == refused.object
                && known.user == refused.user
        };
        let entry = match self.entries.iter().position(is_same).and_then(|at| self.entries.remove(at)) {
            Some(mut entry) => {
                entry.count += 1;
                entry.updated_ms = now;
                entry.refused.client = refused.client;
                entry
            }
            None => {
                self.next_id += 1;
                Entry { id: self.next_id - 1, count: 1, refused, created_ms: now, updated_ms: now }
            }
        };
        self.entries.push_front(entry);
        self.entries.truncate(ENTRIES_MAX);
    }

    pub(crate) fn clear(&mut self) {
        self.entries.clear();
    }

    /// Writes the latest entries in the format of `ACL LOG`.
    pub(crate) fn show(&self, count: usize, resp3: bool, out: &mut Vec<u8>) {
        let count = count.min(self.entries.len());
        let now = unix_ms();
        encode::header(out, b'*', count);
        for entry in self.entries.iter().take(count) {
            let refused = &entry.refused;
            encode::map(out, 10, resp3);
            encode::bulk(out, b"count");
            encode::integer(out, entry.count as i64);
            let texts: [(&str, &[u8]); 4] = [
                ("reason", refused.reason.as_bytes()),
                ("context", refused.context.as_bytes()),
                ("object", &refused.object),
                ("username", &refused.user),
            ];
            for (name, text) in texts {
                encode::bulk(out, name.as_bytes());
                encode::bulk(out, text);
            }
            encode::bulk(out, b"age-seconds");
            let age = format!("{:.3}", now.saturating_sub(entry.created_ms) as f64 / 1000.0);
            if resp3 {
                encode::line(out, b',', age.as_bytes())
            } else {
                encode::bulk(out, age.as_bytes())
            }
            encode::bulk(out, b"client-info");
            encode::bulk(out, refused.client.trim_end().as_bytes());
            for (name, number) in [
                ("entry-id", entry.id),
                ("timestamp-created", entry.created_ms),
                ("timestamp-last-updated", entry.updated_ms),
            ] {
                encode::bulk(out, name.as_bytes());
                encode::integer(out, number as i64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_refusals_are_counted_and_entries_are_bounded() {
        let refused = |object: &str| Refused {
            reason: "key",
            context: "toplevel",
            object: object.as_bytes().to_vec(),
            user: b"app".to_vec(),
            client: "id=1\n".to_owned(),
        };
        let mut log = AclLog::default();
        for _ in 0..3 {
            log.note(refused("a"));
        }
        log.note(refused(&"b".repeat(10_000)));
        log.note(refused("a"));
        assert_eq!(log.entries.len(), 2);
        assert_eq!((log.entries[0].count, log.entries[0].id), (4, 0), "the latest is the first");
        assert_eq!(log.entries[1].refused.object.len(), NAME_MAX);
        for object in 0..1000 {
            log.note(refused(&object.to_string()));
        }
        assert_eq!((log.entries.len(), log.entries[0].id), (ENTRIES_MAX, 1001));
        let mut out = Vec::new();
        log.show(1, false, &mut out);
        assert!(out.starts_with(b"*1\r\n*20\r\n$5\r\ncount\r\n:1\r\n$6\r\nreason\r\n$3\r\nkey\r\n"));
        log.clear();
        out.clear();
        log.show(10, true, &mut out);
        assert_eq!(out, b"*0\r\n");
    }
}
