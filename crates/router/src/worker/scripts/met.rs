//! Scripts that a worker has met, as kept by the command hook.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use switchyard_policy::script_keys::KeyTemplates;
use switchyard_resp::{encode, reply};

use super::rehearsed::without_token;
use crate::lua::{rehearses_several, sort_script};
use crate::scripts::{Script, sha_of};

/// Maximum number of analyzed scripts of a worker, and maximum memory of them without the shared ones.
const MET_MAX: usize = 10_000;

const MET_BYTES_MAX: usize = 16 << 20;

/// Maximum number of scripts whose calls are observed. Beyond it, all are forgotten.
const CALLS_MAX: usize = 1000;

/// The scripts that a worker has met. The texts are shared with [`Scripts`](crate::scripts::Scripts), while it has
/// room.
#[derive(Debug)]
pub(in crate::worker) struct ScriptsMet {
    /// Secret of the worker, for the errors of rehearsals.
    pub(in crate::worker) token: String,
    /// Whether calls of any script have shown foreign keys.
    pub(super) has_templates: bool,
    /// By a quick hash of the text: SHA-1 costs more than forwarding.
    pub(super) by_text: HashMap<u64, Arc<Script>>,
    /// By the hash known to clients, and by the hash of the executed text.
    by_sha: HashMap<[u8; 40], Arc<Script>>,
    /// Observed calls, by the hash known to clients.
    calls: HashMap<[u8; 40], CallsMet>,
    bytes: usize,
}

/// Observed calls of a script.
#[derive(Debug, Default)]
pub(super) struct CallsMet {
    /// A call has touched a key of another node.
    pub(super) has_foreign: bool,
    pub(super) templates: KeyTemplates,
}

/// Returns a random secret, which no client may know.
pub(in crate::worker) fn new_token() -> String {
    [RandomState::new(), RandomState::new()].map(|state| format!("{:016x}", state.hash_one(0))).concat()
}

impl Default for ScriptsMet {
    fn default() -> Self {
        let (by_text, by_sha, calls) = <_>::default();
        Self { token: new_token(), has_templates: false, by_text, by_sha, calls, bytes: 0 }
    }
}

impl ScriptsMet {
    /// Forgets all scripts. Calls may still be in flight.
    pub(super) fn clear(&mut self) {
        let token = std::mem::take(&mut self.token);
        *self = Self { token, ..Self::default() };
    }

    /// Observed calls of this script.
    pub(super) fn calls_of(&mut self, script: &Script) -> &mut CallsMet {
        if self.calls.len() >= CALLS_MAX && !self.calls.contains_key(&script.sha) {
            self.calls.clear();
        }
        self.calls.entry(script.sha).or_default()
    }

    /// Records that a script has touched a foreign key without a rehearsal that has found it. Its error names its hash.
    pub(in crate::worker) fn note_foreign(&mut self, error: &[u8]) {
        let named = error.windows(40).find_map(|window| self.by_any_sha(window)).cloned();
        if let Some(script) = named {
            self.calls_of(&script).has_foreign = true;
        }
    }

    /// The script with this hash, as known to clients or as executed.
    pub(super) fn by_any_sha(&self, sha: &[u8]) -> Option<&Arc<Script>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        self.by_sha.get(&sha)
    }

    pub(super) fn remember(&mut self, hash: u64, script: &Arc<Script>) {
        if self.by_text.len() >= MET_MAX || self.bytes + script.bytes() > MET_BYTES_MAX {
            self.clear();
        }
        self.bytes += script.bytes();
        self.by_text.insert(hash, script.clone());
        self.by_sha.insert(script.wrapped_sha, script.clone());
        self.by_sha.insert(script.sha, script.clone());
    }

    pub(super) fn named(&self, sha: &[u8]) -> Option<&Arc<Script>> {
        let sha: [u8; 40] = sha.to_ascii_lowercase().try_into().ok()?;
        self.by_sha.get(&sha).filter(|script| script.sha == sha)
    }

    /// Changes a call of a checked script in the form for nodes to that of the client, but for keys that the router has
    /// declared.
    pub(in crate::worker) fn restore<'a>(&'a self, args: &mut Vec<&'a [u8]>) {
        if args.get(1).is_some_and(|text| **text == *sort_script().as_bytes()) {
            // SORT: its name, and its arguments after the key, are behind the keys.
            let count = args.get(2).and_then(|count| std::str::from_utf8(count).ok()?.parse::<usize>().ok());
            let own = count.and_then(|count| args.get(count.checked_add(3)?..args.len() - 1)?.split_first());
            if let Some((name, rest)) = own {
                *args = [&[*name, args[3]][..], rest].concat();
            }
            return;
        }
        if args.get(1).is_some_and(|text| rehearses_several(text)) {
            *args = vec![b"EXEC"];
            return;
        }
        if args.last().is_some_and(|last| last.starts_with(self.token.as_bytes())) && self.is_unknown(args) {
            args.pop();
            return;
        }
        let Some(text) = args.get_mut(1) else { return };
        let by_sha = self.by_sha.get(*text).filter(|script| script.wrapped_sha[..] == **text);
        let found = by_sha.or_else(|| self.by_sha.get(&sha_of(&[*text])));
        if let Some(script) = found.filter(|script| script.wrapped_sha != script.sha) {
            *text = if by_sha.is_some() { &script.sha } else { &script.body };
            args.pop();
        }
    }

    /// Whether the script of a call is not known any more.
    fn is_unknown(&self, args: &[&[u8]]) -> bool {
        args.get(1).is_none_or(|text| !self.by_sha.contains_key(*text) && !self.by_sha.contains_key(&sha_of(&[*text])))
    }

    /// Replaces the hash in a script's error by the one known to the client.
    #[cold]
    pub(in crate::worker) fn with_own_sha<'r>(&self, error: &'r [u8]) -> Cow<'r, [u8]> {
        if let Some(text) = without_token(error, &self.token) {
            return Cow::Owned(text);
        }
        with_sha(error, |sha| self.by_sha.get(sha).map(|script| script.sha))
    }

    /// Returns a reply to EXEC with the hashes in script errors replaced; `None` if there are none to replace.
    pub(in crate::worker) fn with_own_shas(&self, answer: &[u8]) -> Option<Vec<u8>> {
        let named =
            |element| if reply::is_error(element) { self.with_own_sha(element) } else { Cow::Borrowed(element) };
        reply::elements(answer).any(|element| matches!(named(element), Cow::Owned(_))).then(|| {
            let mut out = Vec::with_capacity(answer.len() + 16);
            encode::header(&mut out, b'*', reply::elements(answer).remaining() as usize);
            reply::elements(answer).for_each(|element| out.extend_from_slice(&named(element)));
            out
        })
    }
}

/// Replaces the first hash with a substitute in an error, at any position: Redis 7 ends with it, earlier versions name
/// a function by it.
pub(super) fn with_sha(error: &[u8], other: impl Fn(&[u8; 40]) -> Option<[u8; 40]>) -> Cow<'_, [u8]> {
    for (at, window) in error.windows(40).enumerate() {
        if window.iter().all(u8::is_ascii_hexdigit)
            && let Some(sha) = <&[u8; 40]>::try_from(window).ok().and_then(&other)
        {
            return Cow::Owned([&error[..at], &sha, &error[at + 40..]].concat());
        }
    }
    Cow::Borrowed(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_errors_name_the_hash_of_the_client_in_every_version() {
        let (sent, known) = ([b'a'; 40], [b'b'; 40]);
        for text in [
            "-WRONGTYPE Operation against a key script: HASH, on @user_script:1.\r\n",
            "-ERR Error running script (call to f_HASH): @user_script:1: WRONGTYPE Operation against a key\r\n",
            "-ERR Error running script (call to f_HASH): @enable_strict_lua:15: user_script:1: no such variable\r\n",
            "-HASH\r\n",
        ] {
            let of = |sha: &[u8]| text.replace("HASH", std::str::from_utf8(sha).expect("letters"));
            let shown = with_sha(of(&sent).as_bytes(), |sha| (*sha == sent).then_some(known)).into_owned();
            assert_eq!(String::from_utf8_lossy(&shown), of(&known));
        }
        assert!(matches!(with_sha(b"-NOSCRIPT No matching script.\r\n", |_| Some(known)), Cow::Borrowed(_)));
    }
}
