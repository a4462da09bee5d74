//! Error replies to clients, by error code: the first word of the text, as in Redis's `errorstats`.
//!
//! Each worker counts its own. There are few codes, and frequent ones come early in the list. Scripts may invent codes,
//! so their number is bounded. Words that do not look like a code are not counted as one, because an error text may
//! contain a key.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use super::{Counter, WorkerCounters};

/// Maximum number of codes per worker, as in Redis.
const CODES_MAX: usize = 128;

/// Code for all further codes, named as in Valkey.
const OVERFLOW: &str = "ERRORSTATS_OVERFLOW";

/// Code for errors without one.
const NO_CODE: &str = "ERR";

/// Maximum length of a code.
const CODE_LEN_MAX: usize = 31;

/// Errors by code, with a single writer.
#[derive(Debug)]
pub(crate) struct Errors {
    /// Used from the front.
    codes: Box<[(OnceLock<Box<str>>, Counter)]>,
    others: Counter,
}

impl Default for Errors {
    fn default() -> Self {
        Self { codes: (0..CODES_MAX).map(|_| Default::default()).collect(), others: Counter::default() }
    }
}

impl Errors {
    /// Counts an error reply of either protocol version. For a long error its beginning suffices.
    #[cold]
    pub(crate) fn count(&self, reply: &[u8]) {
        let code = code_of(reply);
        for (known, count) in &self.codes {
            if **known.get_or_init(|| code.into()) == *code {
                return count.add(1);
            }
        }
        self.others.add(1);
    }

    /// Returns the errors of all workers by code.
    pub(crate) fn of_all(workers: &[Arc<WorkerCounters>]) -> BTreeMap<String, u64> {
        let mut all = BTreeMap::new();
        let mut add = |code: &str, count: &Counter| {
            if count.get() > 0 {
                *all.entry(code.to_owned()).or_default() += count.get();
            }
        };
        for errors in workers.iter().map(|worker| &worker.errors) {
            errors
                .codes
                .iter()
                .map_while(|(code, count)| Some((code.get()?, count)))
                .for_each(|(code, count)| add(code, count));
            add(OVERFLOW, &errors.others);
        }
        all
    }
}

/// Returns the code of an error: its first word, if it is in capital letters and followed by text.
fn code_of(reply: &[u8]) -> &str {
    let text = match reply.first() {
        // RESP3 blob error, with the length first.
        Some(b'!') => reply.iter().position(|byte| *byte == b'\n').map_or(&[][..], |end| &reply[end + 1..]),
        _ => reply.get(1..).unwrap_or_default(),
    };
    let end = text.iter().take(CODE_LEN_MAX + 1).position(|byte| *byte == b' ').unwrap_or(0);
    let word = &text[..end];
    let is_code = !word.is_empty() && word.iter().all(|byte| byte.is_ascii_uppercase() || *byte == b'_');
    std::str::from_utf8(word).ok().filter(|_| is_code).unwrap_or(NO_CODE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_capitalized_first_words_are_error_codes() {
        for (reply, code) in [
            (&b"-WRONGTYPE Operation against a key\r\n"[..], "WRONGTYPE"),
            (b"!21\r\nNOSCRIPT No matching.\r\n", "NOSCRIPT"),
            (b"-MY_OWN error\r\n", "MY_OWN"),
            (b"-ERR unknown command\r\n", "ERR"),
            (b"-user:1 is not there\r\n", "ERR"),
            (b"-SECRET\r\n", "ERR"),
            (b"-KEY1 is not there\r\n", "ERR"),
            (b"-\r\n", "ERR"),
            (b"!9", "ERR"),
            (b"-ABCDEFGHIJKLMNOPQRSTUVWXYZABCDE is short enough\r\n", "ABCDEFGHIJKLMNOPQRSTUVWXYZABCDE"),
            (b"-ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF is not\r\n", "ERR"),
        ] {
            assert_eq!(code_of(reply), code, "{}", reply.escape_ascii());
        }
    }

    #[test]
    fn error_codes_are_bounded_and_summed_over_workers() {
        let workers = [Arc::<WorkerCounters>::default(), Arc::default()];
        let letters = |number: usize| [b'A' + (number / 26) as u8, b'A' + (number % 26) as u8];
        for _ in 0..2 {
            for number in 0..CODES_MAX + 5 {
                workers[0].errors.count(&[b"-", &letters(number)[..], b" text\r\n"].concat());
            }
        }
        workers[1].errors.count(b"-AA text\r\n");
        let all = Errors::of_all(&workers);
        assert_eq!(all.len(), CODES_MAX + 1);
        assert_eq!((all["AA"], all["AB"], all[OVERFLOW]), (3, 2, 10));
    }
}
