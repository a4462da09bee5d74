//! The scripts that went through the router: what was found out about each, once for all workers.
//!
//! No server tells its scripts, so this is the only place from which a node that lost one can be given it again. A text
//! is kept once; what nodes execute in its place is put together when it is sent.

use std::collections::HashMap;
use std::sync::Arc;

use sha1::{Digest, Sha1};
use switchyard_resp::command::CommandTable;

use crate::lua::{UndeclaredKeys, Verdict, judge, with_prelude};

/// What is known of a script.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) body: Box<[u8]>,
    /// The hash by which clients know it.
    pub(crate) sha: [u8; 40],
    pub(crate) verdict: Verdict,
    /// The hash of what nodes execute; the same, where that is the script itself.
    pub(crate) wrapped_sha: [u8; 40],
}

/// SHA-1 in hexadecimal digits, of a text in parts.
pub(crate) fn sha_of(parts: &[&[u8]]) -> [u8; 40] {
    let mut hash = Sha1::new();
    parts.iter().for_each(|part| hash.update(part));
    let mut sha = [0u8; 40];
    for (pair, byte) in sha.chunks_exact_mut(2).zip(hash.finalize()) {
        pair[0] = b"0123456789abcdef"[usize::from(byte >> 4)];
        pair[1] = b"0123456789abcdef"[usize::from(byte & 15)];
    }
    sha
}

impl Script {
    pub(crate) fn judged(body: &[u8], sha: [u8; 40], table: &CommandTable, beside: UndeclaredKeys) -> Self {
        let verdict = judge(body, table, beside);
        let mut script = Self { body: body.into(), sha, verdict, wrapped_sha: sha };
        if matches!(script.verdict, Verdict::Wrapped(_)) {
            script.wrapped_sha = sha_of(&script.wrapped());
        }
        script
    }

    /// What nodes execute in its place where scripts are checked, in parts.
    pub(crate) fn wrapped(&self) -> [&[u8]; 3] {
        match &self.verdict {
            Verdict::Wrapped(prelude) => with_prelude(&self.body, prelude),
            Verdict::Proved | Verdict::Refused(_) => [&self.body, &[], &[]],
        }
    }

    /// The text with this hash, which is one of its two.
    fn text(&self, sha: &[u8; 40]) -> Vec<u8> {
        if *sha == self.sha { self.body.to_vec() } else { self.wrapped().concat() }
    }

    /// The memory that it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let prelude = match &self.verdict {
            Verdict::Wrapped(text) | Verdict::Refused(text) => text.len(),
            Verdict::Proved => 0,
        };
        self.body.len() + prelude + 512
    }
}

/// All of them, by their hashes.
#[derive(Debug, Default)]
pub(crate) struct Scripts {
    /// By the hash that clients know, and by that of what nodes execute.
    by_sha: HashMap<[u8; 40], Arc<Script>>,
    bytes: usize,
}

/// Memory for scripts; beyond it the router keeps what it has and forgets newcomers (clients then see NOSCRIPT as from
/// one server).
const SCRIPTS_BYTES_MAX: usize = 64 << 20;

impl Scripts {
    pub(crate) fn remember(&mut self, script: &Arc<Script>) {
        if self.bytes + script.bytes() <= SCRIPTS_BYTES_MAX && self.named(&script.sha).is_none() {
            self.bytes += script.bytes();
            self.by_sha.insert(script.wrapped_sha, script.clone());
            self.by_sha.insert(script.sha, script.clone());
        }
    }

    /// The script that clients know by this hash, in any case.
    pub(crate) fn named(&self, sha: &[u8]) -> Option<&Arc<Script>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        self.by_sha.get(&sha).filter(|script| script.sha == sha)
    }

    /// What a node is to be given that lacks the text with this hash.
    pub(crate) fn text(&self, sha: &[u8]) -> Option<Vec<u8>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        Some(self.by_sha.get(&sha)?.text(&sha))
    }

    /// The hashes of all texts that nodes execute.
    pub(crate) fn hashes(&self) -> Vec<[u8; 40]> {
        self.by_sha.keys().copied().collect()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_take_no_more_memory_than_they_may_and_each_is_kept_once() {
        let table = CommandTable::builtin();
        let mut scripts = Scripts::default();
        let text = |number: usize| {
            format!("local k=KEYS[1]..'{number}' --{}\nreturn redis.call('GET',k)", "x".repeat(1 << 20)).into_bytes()
        };
        for number in 0..100 {
            let body = text(number);
            scripts.remember(&Arc::new(Script::judged(&body, sha_of(&[&body]), &table, UndeclaredKeys::Slot)));
            assert!(scripts.bytes <= SCRIPTS_BYTES_MAX);
        }
        let mut kept: Vec<&Arc<Script>> = scripts.by_sha.values().collect();
        kept.sort_by_key(|script| Arc::as_ptr(script));
        kept.dedup_by_key(|script| Arc::as_ptr(script));
        let really: usize = kept.iter().map(|script| script.bytes()).sum();
        assert_eq!((kept.len(), really), (63, scripts.bytes), "counted as kept");
        let first = scripts.named(&sha_of(&[&text(0)])).expect("known").clone();
        scripts.remember(&first);
        assert_eq!(Arc::strong_count(&first), 3, "by two hashes, and here");
        let wrapped = scripts.text(&first.wrapped_sha).expect("known");
        assert_eq!((sha_of(&[&wrapped]), scripts.text(&first.sha)), (first.wrapped_sha, Some(text(0))));
        assert!(scripts.named(&first.sha.to_ascii_uppercase()).is_some());
        assert!(scripts.named(&first.wrapped_sha).is_none(), "clients do not know what nodes execute");
    }
}
