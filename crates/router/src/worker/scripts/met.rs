//! Scripts that a worker has met, as kept by the command hook.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use switchyard_resp::{encode, reply};

use crate::scripts::Script;

/// Maximum number of analyzed scripts of a worker, and maximum memory of them without the shared ones.
const MET_MAX: usize = 10_000;

const MET_BYTES_MAX: usize = 16 << 20;

/// The scripts that a worker has met. The texts are shared with [`Scripts`](crate::scripts::Scripts), while it has
/// room.
#[derive(Debug, Default)]
pub(in crate::worker) struct ScriptsMet {
    /// By a quick hash of the text: SHA-1 costs more than forwarding.
    pub(super) by_text: HashMap<u64, Arc<Script>>,
    /// By the hash known to clients, and by the hash of the executed text.
    by_sha: HashMap<[u8; 40], Arc<Script>>,
    bytes: usize,
}

impl ScriptsMet {
    pub(super) fn remember(&mut self, hash: u64, script: &Arc<Script>) {
        if self.by_text.len() >= MET_MAX || self.bytes + script.bytes() > MET_BYTES_MAX {
            *self = Self::default();
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

    /// Replaces the hash in a script's error by the one known to the client.
    #[cold]
    pub(in crate::worker) fn with_own_sha<'r>(&self, error: &'r [u8]) -> Cow<'r, [u8]> {
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
