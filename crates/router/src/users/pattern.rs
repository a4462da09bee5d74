//! Redis's glob patterns: `*`, `?`, `[a-z]`, `[^a]` and `\` (`stringmatchlen` in its `util.c`).
//!
//! Written anew and not translated: Redis's function calls itself for every star, so that a pattern of many stars costs exponential time,
//! and only a counter stops it. Here the last star is all that is ever gone back to, which is enough, and costs at most the product
//! of the two lengths.

/// Whether the whole of `text` matches `pattern`.
pub(crate) fn glob(pattern: &[u8], text: &[u8]) -> bool {
    if text.is_empty() {
        return pattern.is_empty(); // not even by a star, as Redis has it
    }
    let (mut p, mut t) = (0, 0);
    // Where the pattern goes on after the last star, and where in the text that star ends for now.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            star = Some((p + 1, t));
            p += 1;
            continue;
        }
        if let Some(next) = one(pattern, p, text[t]) {
            p = next;
            t += 1;
            continue;
        }
        let Some((after, end)) = star else { return false };
        p = after;
        t = end + 1;
        star = Some((after, t));
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

/// Matches one byte against the pattern's element at `p`; gives where the next element begins.
fn one(pattern: &[u8], p: usize, byte: u8) -> Option<usize> {
    match *pattern.get(p)? {
        b'?' => Some(p + 1),
        b'[' => class(pattern, p, byte),
        b'\\' if p + 1 < pattern.len() => (pattern[p + 1] == byte).then_some(p + 2),
        literal => (literal == byte).then_some(p + 1),
    }
}

/// `[...]`: with Redis's ways of reading one that does not end.
fn class(pattern: &[u8], p: usize, byte: u8) -> Option<usize> {
    let mut at = p + 1;
    let not = pattern.get(at) == Some(&b'^');
    at += usize::from(not);
    let mut found = false;
    loop {
        let rest = pattern.get(at..).unwrap_or_default();
        match *rest {
            [b'\\', escaped, ..] => {
                found |= escaped == byte;
                at += 2;
            }
            [b']', ..] => {
                at += 1;
                break;
            }
            [] => break,
            [from, b'-', to, ..] => {
                found |= (from.min(to)..=from.max(to)).contains(&byte);
                at += 3;
            }
            [literal, ..] => {
                found |= literal == byte;
                at += 1;
            }
        }
    }
    (found != not).then_some(at)
}

#[cfg(test)]
mod tests {
    use super::glob;

    #[test]
    fn patterns_match_as_in_redis() {
        for (pattern, text, matches) in [
            ("", "", true),
            ("", "a", false),
            ("*", "", false),
            ("app:*", "app:1", true),
            ("app:*", "ap:1", false),
            ("*:x", "a:b:x", true),
            ("*:x", "a:x:b", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[abc]x", "bx", true),
            ("[^abc]x", "bx", false),
            ("[a-c]x", "bx", true),
            ("[c-a]x", "bx", true),
            ("[a-c]x", "dx", false),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("[\\]]", "]", true),
            ("[a", "a", true),
            ("a**b", "ab", true),
            ("*a*b*", "xxaxxbxx", true),
            ("k\\", "k\\", true),
        ] {
            assert_eq!(glob(pattern.as_bytes(), text.as_bytes()), matches, "{pattern} {text}");
        }
    }

    #[test]
    fn many_stars_cost_little() {
        let pattern = "*a".repeat(500);
        assert!(!glob(pattern.as_bytes(), "b".repeat(20_000).as_bytes()));
        assert!(!glob(format!("{pattern}c").as_bytes(), "a".repeat(20_000).as_bytes()));
    }
}
