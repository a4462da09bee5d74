//! Scripts seen by the router, with their analysis, shared by all workers.
//!
//! Servers do not reveal their scripts, so only this copy can restore a script at a node that has lost it. Each text is
//! stored once; the variant for nodes is assembled when it is sent.

use std::collections::HashMap;
use std::sync::Arc;

use sha1::{Digest, Sha1};
use switchyard_resp::command::CommandTable;

use crate::lua::{UndeclaredKeys, Verdict, analyse, wrapped_script};

/// A script and its analysis.
#[derive(Debug)]
pub(crate) struct Script {
    pub(crate) body: Box<[u8]>,
    /// Hash used by clients.
    pub(crate) sha: [u8; 40],
    pub(crate) verdict: Verdict,
    /// Hash of the text that nodes execute. Equal to `sha` if that is the script itself.
    pub(crate) wrapped_sha: [u8; 40],
    /// Undeclared keys that the verdict permits.
    pub(crate) beside: UndeclaredKeys,
}

/// Returns the SHA-1 of a text in parts, in hexadecimal digits.
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
    pub(crate) fn analyse(body: &[u8], sha: [u8; 40], table: &CommandTable, beside: UndeclaredKeys) -> Self {
        let verdict = analyse(body, table, &beside);
        let mut script = Self { body: body.into(), sha, verdict, wrapped_sha: sha, beside };
        if matches!(script.verdict, Verdict::Wrapped(_)) {
            script.wrapped_sha = sha_of(&script.wrapped());
        }
        script
    }

    /// Returns the text that nodes execute if scripts are checked, in parts.
    pub(crate) fn wrapped(&self) -> [&[u8]; 4] {
        match &self.verdict {
            Verdict::Wrapped(prelude) => wrapped_script(&self.body, prelude),
            Verdict::Proved | Verdict::Refused(_) => [&self.body, &[], &[], &[]],
        }
    }

    /// Returns the text with this hash: the script or its checked variant.
    fn text(&self, sha: &[u8; 40]) -> Vec<u8> {
        if *sha == self.sha { self.body.to_vec() } else { self.wrapped().concat() }
    }

    /// Returns its approximate memory, bytes.
    pub(crate) fn bytes(&self) -> usize {
        let prelude = match &self.verdict {
            Verdict::Wrapped(text) | Verdict::Refused(text) => text.len(),
            Verdict::Proved => 0,
        };
        self.body.len() + prelude + 512
    }
}

/// All known scripts.
#[derive(Debug, Default)]
pub(crate) struct Scripts {
    /// Scripts by the clients' hash and by the hash of the checked variant.
    by_sha: HashMap<[u8; 40], Arc<Script>>,
    bytes: usize,
    /// Number of changes.
    changes: u64,
}

/// Maximum memory for scripts, bytes. Above it new scripts are not stored (clients then receive NOSCRIPT, as from a
/// single server).
const SCRIPTS_BYTES_MAX: usize = 64 << 20;

impl Scripts {
    pub(crate) fn store(&mut self, script: &Arc<Script>) {
        let known = self.by_client_sha(&script.sha).cloned();
        if known.as_ref().is_some_and(|known| known.beside.is_same(&script.beside)) {
            return;
        }
        let is_known = known.is_some();
        self.changes += 1;
        // A variant for earlier placement rules is no longer sent.
        if let Some(old) = known {
            self.bytes -= old.bytes();
            self.by_sha.remove(&old.wrapped_sha);
            self.by_sha.remove(&old.sha);
        }
        // A new variant may exceed the limit by its longer prelude, because a known script must not be lost.
        if is_known || self.bytes + script.bytes() <= SCRIPTS_BYTES_MAX {
            self.bytes += script.bytes();
            self.by_sha.insert(script.wrapped_sha, script.clone());
            self.by_sha.insert(script.sha, script.clone());
        }
    }

    /// Returns the script with this client hash, in upper or lower case.
    pub(crate) fn by_client_sha(&self, sha: &[u8]) -> Option<&Arc<Script>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        self.by_sha.get(&sha).filter(|script| script.sha == sha)
    }

    /// Returns the text with this hash, for a node that lacks it.
    pub(crate) fn text(&self, sha: &[u8]) -> Option<Vec<u8>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        Some(self.by_sha.get(&sha)?.text(&sha))
    }

    /// Returns the hashes of all texts.
    pub(crate) fn hashes(&self) -> Vec<[u8; 40]> {
        self.by_sha.keys().copied().collect()
    }

    /// Number of changes so far.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    pub(crate) fn clear(&mut self) {
        *self = Self { changes: self.changes + 1, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_use_bounded_memory_and_are_stored_once() {
        let table = CommandTable::builtin();
        let mut scripts = Scripts::default();
        let text = |number: usize| {
            format!("local k=KEYS[1]..'{number}' --{}\nreturn redis.call('GET',k)", "x".repeat(1 << 20)).into_bytes()
        };
        for number in 0..100 {
            let body = text(number);
            scripts.store(&Arc::new(Script::analyse(&body, sha_of(&[&body]), &table, UndeclaredKeys::Slot(None))));
            assert!(scripts.bytes <= SCRIPTS_BYTES_MAX);
        }
        let mut kept: Vec<&Arc<Script>> = scripts.by_sha.values().collect();
        kept.sort_by_key(|script| Arc::as_ptr(script));
        kept.dedup_by_key(|script| Arc::as_ptr(script));
        let really: usize = kept.iter().map(|script| script.bytes()).sum();
        assert_eq!((kept.len(), really), (63, scripts.bytes), "counted as kept");
        let first = scripts.by_client_sha(&sha_of(&[&text(0)])).expect("known").clone();
        scripts.store(&first);
        assert_eq!(Arc::strong_count(&first), 3, "by two hashes, and here");
        let wrapped = scripts.text(&first.wrapped_sha).expect("known");
        assert_eq!((sha_of(&[&wrapped]), scripts.text(&first.sha)), (first.wrapped_sha, Some(text(0))));
        assert!(scripts.by_client_sha(&first.sha.to_ascii_uppercase()).is_some());
        assert!(scripts.by_client_sha(&first.wrapped_sha).is_none(), "clients do not know what nodes execute");
    }
}
