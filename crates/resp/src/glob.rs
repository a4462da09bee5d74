//! Redis's glob patterns: `*`, `?`, `[a-z]`, `[^x]`, `\` takes the next byte as it is. The one place that matches them.
//!
//! With the answers of Redis 7, also where these are odd: an empty text is matched by an empty pattern only; a class
//! without an end ends with the pattern; bytes of a range are compared as the server's platform compares characters;
//! more than 1,000 stars match nothing.
//!
//! A pattern comes from a client, so the time is bounded by the product of the lengths: on a mismatch only the last
//! star takes one byte more. Redis recurses at every star instead, which a pattern of many stars made exponential
//! (CVE-2022-36021) and deep (CVE-2024-31228).

use std::ffi::c_char;

/// The most stars, apart from those at the end, with which a pattern can match. Several in a row count as one.
const STARS_MAX: usize = 1000;

/// Whether `text` as a whole matches `pattern`.
#[must_use]
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    search::<false>(pattern, text)
}

/// The same where case makes no difference, as in `CONFIG GET`. It still does behind a `\` inside of a class.
#[must_use]
pub fn matches_nocase(pattern: &[u8], text: &[u8]) -> bool {
    search::<true>(pattern, text)
}

/// Whether `KEYS` and `SCAN` give a key for a pattern: `*` means all keys, also the one without a name.
#[must_use]
pub fn matches_key(pattern: &[u8], key: &[u8]) -> bool {
    pattern == b"*" || matches(pattern, key)
}

/// Whether `CONFIG GET` gives a setting for a pattern. Without any of `*?[` it is a name.
#[must_use]
pub fn matches_setting(pattern: &[u8], name: &[u8]) -> bool {
    if pattern.iter().any(|byte| b"*?[".contains(byte)) {
        matches_nocase(pattern, name)
    } else {
        pattern.eq_ignore_ascii_case(name)
    }
}

fn search<const NOCASE: bool>(pattern: &[u8], text: &[u8]) -> bool {
    if text.is_empty() {
        return pattern.is_empty();
    }
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last star, and how much of the text it has taken.
    let mut star: Option<(usize, usize)> = None;
    let mut stars = 0;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            p += pattern[p..].iter().take_while(|byte| **byte == b'*').count();
            if p == pattern.len() {
                return true;
            }
            stars += 1;
            if stars > STARS_MAX {
                return false;
            }
            star = Some((p, t));
            continue;
        }
        if p < pattern.len()
            && let (len, true) = element::<NOCASE>(&pattern[p..], text[t])
        {
            p += len;
            t += 1;
            continue;
        }
        let Some((after, from)) = star else { return false };
        p = after;
        t = from + 1;
        star = Some((after, t));
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

fn is_same<const NOCASE: bool>(a: u8, b: u8) -> bool {
    if NOCASE { a.eq_ignore_ascii_case(&b) } else { a == b }
}

/// The length of the pattern's first element, which is not a star, and whether it takes `byte`.
fn element<const NOCASE: bool>(pattern: &[u8], byte: u8) -> (usize, bool) {
    match pattern {
        [b'?', ..] => (1, true),
        [b'\\', escaped, ..] => (2, is_same::<NOCASE>(*escaped, byte)),
        [b'[', rest @ ..] => {
            let (len, fits) = class::<NOCASE>(rest, byte);
            (1 + len, fits)
        }
        [first, ..] => (1, is_same::<NOCASE>(*first, byte)),
        [] => (0, false),
    }
}

/// What stands behind `[`, with its `]`. A class that is not closed ends with the pattern.
fn class<const NOCASE: bool>(pattern: &[u8], byte: u8) -> (usize, bool) {
    let negated = pattern.first() == Some(&b'^');
    let mut at = usize::from(negated);
    let mut found = false;
    loop {
        match &pattern[at.min(pattern.len())..] {
            [] => break,
            [b']', ..] => {
                at += 1;
                break;
            }
            [b'\\', escaped, ..] => {
                found |= *escaped == byte;
                at += 2;
            }
            [from, b'-', to, ..] => {
                found |= is_between::<NOCASE>(*from, *to, byte);
                at += 3;
            }
            [one, ..] => {
                found |= is_same::<NOCASE>(*one, byte);
                at += 1;
            }
        }
    }
    (at, found != negated)
}

/// The ends are put in order before their case is changed, so `[Z-a]` has nothing in it where case makes no difference.
fn is_between<const NOCASE: bool>(from: u8, to: u8, byte: u8) -> bool {
    let in_order = |byte: u8| byte as c_char;
    let (from, to) = if in_order(from) > in_order(to) { (to, from) } else { (from, to) };
    let cased = |byte: u8| in_order(if NOCASE { byte.to_ascii_lowercase() } else { byte });
    (cased(from)..=cased(to)).contains(&cased(byte))
}

#[cfg(test)]
mod tests {
    use super::{matches, matches_key, matches_nocase, matches_setting};

    #[test]
    fn matches_as_redis_does() {
        for (pattern, text, expected) in [
            ("*", "", false),
            ("**", "", false),
            ("*", "anything", true),
            ("", "", true),
            ("", "x", false),
            ("news.*", "news.", true),
            ("news.*", "new", false),
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-c]llo", "hbllo", true),
            ("h[c-a]llo", "hbllo", true),
            ("h[a-c]llo", "hdllo", false),
            ("h\\*llo", "h*llo", true),
            ("h\\*llo", "hello", false),
            ("[\\]]", "]", true),
            ("[abc", "c", true),
            ("[]", "x", false),
            ("[^]", "x", true),
            ("a\\", "a\\", true),
            ("*a*b*", "xaxxb", true),
            ("*a*b*c", "xaxxbx", false),
            ("**x**", "axb", true),
            ("__key*__:*", "__keyspace@0__:k", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), expected, "{pattern} {text}");
        }
        assert!(matches_key(b"*", b"") && !matches_key(b"**", b""));
    }

    #[test]
    fn case_makes_no_difference_for_settings_but_where_redis_sees_one() {
        for (pattern, expected) in [
            ("MAXCL*", true),
            ("[L-N]axclients", true),
            ("[Z-a]axclients", false),
            ("[\\M]axclients", false),
            ("\\Maxclient?", true),
        ] {
            assert_eq!(matches_nocase(pattern.as_bytes(), b"maxclients"), expected, "{pattern}");
        }
        assert!(matches_setting(b"MaxClients", b"maxclients") && !matches_setting(b"max\\clients", b"maxclients"));
    }

    #[test]
    fn many_stars_cost_no_more_than_the_product_of_the_lengths() {
        let pattern = "a*".repeat(1000) + "b";
        assert!(!matches(pattern.as_bytes(), &[b'a'; 20_000]));
        assert!(matches(pattern.as_bytes(), &[&[b'a'; 20_000][..], b"b"].concat()));
        let pattern = "a*".repeat(1001) + "b";
        assert!(!matches(pattern.as_bytes(), &[&[b'a'; 20_000][..], b"b"].concat()));
    }
}
