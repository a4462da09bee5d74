//! Redis's glob patterns: `*`, `?`, `[a-z]`, `[^x]`, and `\` before a literal byte. The only matcher of such patterns.
//!
//! Compatible with Redis 7, including its peculiarities. Only an empty pattern matches an empty text. An unclosed class
//! ends with the pattern. Ranges compare bytes by the server platform's sign of `char`. More than 1,000 stars match
//! nothing.
//!
//! Patterns come from clients, so the time is bounded by the product of the lengths: on a mismatch only the last star
//! takes one more byte. Redis recurses at every star, which was exponential (CVE-2022-36021) and deep (CVE-2024-31228)
//! for patterns with many stars.

use std::ffi::c_char;

/// Maximum stars in a matching pattern, except trailing ones. Consecutive stars count as one.
const STARS_MAX: usize = 1000;

/// Whether `pattern` matches the whole of `text`.
#[must_use]
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    search::<false>(pattern, text)
}

/// Like [`matches()`], ignoring case, as in `CONFIG GET`. Case still matters after a `\` in a class.
#[must_use]
pub fn matches_nocase(pattern: &[u8], text: &[u8]) -> bool {
    search::<true>(pattern, text)
}

/// Whether `KEYS` and `SCAN` return a key for a pattern: `*` matches all keys, even the empty one.
#[must_use]
pub fn matches_key(pattern: &[u8], key: &[u8]) -> bool {
    pattern == b"*" || matches(pattern, key)
}

/// Whether `CONFIG GET` returns a setting for a pattern. A pattern without any of `*?[` is a name.
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
    // Position after the last star, and the end of the text that it has taken.
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

/// Length of the pattern's first element, which is not a star, and whether the element matches `byte`.
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

/// Length of a class after its `[`, including the `]`, and whether it matches `byte`. An unclosed class ends with the
/// pattern.
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

/// Whether a range contains a byte. The ends are ordered before their case is changed, so `[Z-a]` is empty if case is
/// ignored.
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
    fn patterns_match_as_in_redis() {
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
    fn settings_ignore_case_exactly_as_redis_does() {
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
    fn many_stars_cost_at_most_the_product_of_the_lengths() {
        let pattern = "a*".repeat(1000) + "b";
        assert!(!matches(pattern.as_bytes(), &[b'a'; 20_000]));
        assert!(matches(pattern.as_bytes(), &[&[b'a'; 20_000][..], b"b"].concat()));
        let pattern = "a*".repeat(1001) + "b";
        assert!(!matches(pattern.as_bytes(), &[&[b'a'; 20_000][..], b"b"].concat()));
    }
}
