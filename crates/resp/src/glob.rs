//! Redis's glob patterns (`PSUBSCRIBE`, `PUBSUB CHANNELS`, `KEYS`): `*`, `?`, `[a-z]`, `[^x]`, `\` takes the next byte as it is.
//!
//! A pattern comes from a client, so the time is bounded by the product of the lengths: on a mismatch only the last star takes one byte
//! more. Redis recurses at every star instead, which a pattern of many stars makes exponential (CVE-2022-36021).

/// Whether `text` as a whole matches `pattern`.
pub fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    // Where to go on after the last star, and how much of the text it has taken.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        if pattern.get(p) == Some(&b'*') {
            p += 1;
            star = Some((p, t));
            continue;
        }
        if p < pattern.len() {
            let (len, fits) = element(&pattern[p..], text[t]);
            if fits {
                p += len;
                t += 1;
                continue;
            }
        }
        match star {
            Some((after, from)) => {
                p = after;
                t = from + 1;
                star = Some((after, t));
            }
            None => return false,
        }
    }
    pattern[p..].iter().all(|b| *b == b'*')
}

/// The length of the pattern's first element, which is not a star, and whether it takes `byte`.
fn element(pattern: &[u8], byte: u8) -> (usize, bool) {
    match pattern {
        [b'?', ..] => (1, true),
        [b'\\', escaped, ..] => (2, *escaped == byte),
        [b'[', rest @ ..] => {
            let (len, fits) = class(rest, byte);
            (1 + len, fits)
        }
        [first, ..] => (1, *first == byte),
        [] => (0, false),
    }
}

/// What stands behind `[`, with its `]`. A class that is not closed ends with the pattern, as in Redis.
fn class(pattern: &[u8], byte: u8) -> (usize, bool) {
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
                found |= (*from.min(to)..=*from.max(to)).contains(&byte);
                at += 3;
            }
            [one, ..] => {
                found |= *one == byte;
                at += 1;
            }
        }
    }
    (at, found != negated)
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn matches_as_redis_does() {
        for (pattern, text, expected) in [
            ("*", "", true),
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
    }

    #[test]
    fn many_stars_cost_no_more_than_the_product_of_the_lengths() {
        let pattern = "a*".repeat(2000) + "b";
        assert!(!matches(pattern.as_bytes(), &[b'a'; 20_000]));
    }
}
