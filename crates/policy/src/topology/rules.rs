//! Placement rules: patterns of key names that give keys a hash tag without braces in the name.
//!
//! Applications use keys with a common part together (`bull:mail:wait`, `bull:mail:active`), and many of them cannot
//! write a hash tag into it. A rule states this part. The slot is that of the name with these braces in it, so nothing
//! moves when an application adds the braces later.
//!
//! Patterns instead of regular expressions: the time of a match has a bound, and an operator can predict it.

use std::fmt;

use super::slot;

/// Maximum number of patterns of a set.
pub const PATTERNS_MAX: usize = 256;

/// Maximum length of a pattern or tag, in bytes.
pub const PATTERN_BYTES_MAX: usize = 256;

/// A rule as configured and stored.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Patterns of key names: literal bytes, at most one capture, and `*` only at the end. The capture `{x}` ends at the
    /// first occurrence of the byte after it, `{x...}` at the last one. Without a byte after it, it is the rest.
    pub keys: Vec<String>,
    /// Tag of all matching keys, for patterns without a capture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// A pattern, or the tag of its rule, is invalid.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleError {
    /// The pattern or tag.
    text: String,
    /// The rule that it breaks.
    why: &'static str,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.text, self.why)
    }
}

impl std::error::Error for RuleError {}

/// End of a capture.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CaptureEnd {
    /// The first occurrence of the byte after it.
    First,
    /// The last occurrence of the byte after it.
    Last,
    /// The end of the name.
    Name,
}

/// A parsed pattern.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pattern {
    /// Literal bytes at the begin.
    pub prefix: Box<[u8]>,
    /// The capture, if the pattern has one.
    pub capture: Option<CaptureEnd>,
    /// Literal bytes after the capture.
    pub suffix: Box<[u8]>,
    /// Whether any bytes may follow.
    pub is_open: bool,
    /// Tag of the rule, for a pattern without a capture.
    pub tag: Box<[u8]>,
    /// Place of the rule in the set.
    rule: usize,
    /// Place of the pattern in the rule.
    place: usize,
}

impl Pattern {
    fn parse(text: &str, tag: Option<&str>, rule: usize, place: usize) -> Result<Self, RuleError> {
        let wrong = |why| Err(RuleError { text: text.to_owned(), why });
        if text.len() > PATTERN_BYTES_MAX {
            return wrong("a pattern has at most 256 bytes");
        }
        let (body, is_open) = text.strip_suffix('*').map_or((text, false), |body| (body, true));
        if body.contains('*') {
            return wrong("`*` can only be the last character of a pattern");
        }
        let (prefix, capture, suffix) = match body.split_once('{') {
            None => (body, None, ""),
            Some((prefix, rest)) => {
                let Some((name, suffix)) = rest.split_once('}') else {
                    return wrong("the capture has no closing brace");
                };
                let (name, last) = name.strip_suffix("...").map_or((name, false), |name| (name, true));
                if name.is_empty() || name.contains('{') {
                    return wrong("the capture needs a name, as in {queue}");
                }
                match (suffix.is_empty(), last, is_open) {
                    (true, true, _) => return wrong("`...` needs a literal character after the capture"),
                    (true, false, true) => {
                        return wrong("a capture ends at a literal character, so `*` cannot follow it directly");
                    }
                    (true, false, false) => (prefix, Some(CaptureEnd::Name), suffix),
                    (false, true, _) => (prefix, Some(CaptureEnd::Last), suffix),
                    (false, false, _) => (prefix, Some(CaptureEnd::First), suffix),
                }
            }
        };
        if [prefix, suffix].iter().any(|part| part.contains(['{', '}'])) {
            return wrong("a pattern has at most one capture, and no other braces");
        }
        if prefix.is_empty() && suffix.is_empty() {
            return wrong("a pattern needs a literal character besides the capture and `*`");
        }
        let tag = match (capture, tag) {
            (None, None) => return wrong("a pattern without a capture needs `tag` in its rule"),
            (Some(_), Some(_)) => return wrong("a rule with `tag` has patterns without a capture"),
            (_, tag) => tag.unwrap_or_default(),
        };
        let bytes = |text: &str| Box::from(text.as_bytes());
        Ok(Self { prefix: bytes(prefix), capture, suffix: bytes(suffix), is_open, tag: bytes(tag), rule, place })
    }

    /// Tag of a key without an own hash tag, if the pattern matches it.
    #[inline]
    fn tag<'k>(&'k self, key: &'k [u8]) -> Option<&'k [u8]> {
        let rest = key.strip_prefix(&*self.prefix)?;
        let Some(end) = self.capture else {
            return (self.is_open || rest.is_empty()).then_some(&self.tag);
        };
        let captured = match (end, self.suffix.first()) {
            (CaptureEnd::First, Some(byte)) => &rest[..slot::find(*byte, rest)?],
            (CaptureEnd::Last, Some(byte)) => &rest[..rest.iter().rposition(|found| found == byte)?],
            (CaptureEnd::Name, _) | (_, None) => rest,
        };
        let after = &rest[captured.len()..];
        if !(if self.is_open { after.starts_with(&self.suffix) } else { *after == *self.suffix }) {
            return None;
        }
        // With braces around the capture, the tag ends at its first closing brace.
        let tag = slot::find(b'}', captured).map_or(captured, |end| &captured[..end]);
        (!tag.is_empty()).then_some(tag)
    }
}

/// A set of rules. The first matching pattern decides.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RuleSet {
    rules: Vec<Rule>,
    patterns: Vec<Pattern>,
    /// Start in `candidates` of the patterns for each first byte of a key.
    starts: Box<[u32; 257]>,
    /// Patterns that may match keys with a first byte, in order.
    candidates: Vec<Candidate>,
}

/// A pattern, with the first bytes of its prefix in a word. Comparing words excludes most patterns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Candidate {
    pattern: u16,
    head: u64,
    mask: u64,
}

impl Candidate {
    fn new(at: u16, pattern: &Pattern) -> Self {
        let known = pattern.prefix.len().min(size_of::<u64>());
        let mask = head_of(&[0xff; size_of::<u64>()][..known]);
        Self { pattern: at, head: head_of(&pattern.prefix) & mask, mask }
    }
}

/// Returns the first bytes of a name, or zeros after its end.
#[inline]
fn head_of(name: &[u8]) -> u64 {
    match name.first_chunk() {
        Some(head) => u64::from_le_bytes(*head),
        None => name.iter().rev().fold(0, |head, byte| head << 8 | u64::from(*byte)),
    }
}

impl Default for RuleSet {
    fn default() -> Self {
        Self { rules: Vec::new(), patterns: Vec::new(), starts: Box::new([0; 257]), candidates: Vec::new() }
    }
}

/// The pattern that gives a key its tag.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RuleMatch<'k> {
    /// Place of the rule in the set, from 0.
    pub rule: usize,
    /// The pattern as written.
    pub pattern: &'k str,
    /// The tag of the key.
    pub tag: &'k [u8],
}

impl RuleSet {
    /// Parses rules.
    ///
    /// # Errors
    /// The first invalid pattern or tag.
    pub fn new(rules: Vec<Rule>) -> Result<Self, RuleError> {
        let mut patterns = Vec::new();
        for (number, rule) in rules.iter().enumerate() {
            if let Some(tag) = &rule.tag
                && (tag.is_empty() || tag.len() > PATTERN_BYTES_MAX || tag.contains(['{', '}']))
            {
                return Err(RuleError { text: tag.clone(), why: "a tag has 1 to 256 bytes, and no braces" });
            }
            for (place, text) in rule.keys.iter().enumerate() {
                patterns.push(Pattern::parse(text, rule.tag.as_deref(), number, place)?);
            }
        }
        if patterns.len() > PATTERNS_MAX {
            let text = rules.last().and_then(|rule| rule.keys.last()).cloned().unwrap_or_default();
            return Err(RuleError { text, why: "the rules have more than 256 patterns together" });
        }
        let mut starts = Box::new([0; 257]);
        let mut candidates = Vec::new();
        for byte in 0..=255_u8 {
            let may_match = |pattern: &Pattern| pattern.prefix.first().is_none_or(|first| *first == byte);
            let matching = (0_u16..).zip(&patterns).filter(|(_, pattern)| may_match(pattern));
            candidates.extend(matching.map(|(at, pattern)| Candidate::new(at, pattern)));
            starts[usize::from(byte) + 1] = candidates.len() as u32;
        }
        Ok(Self { rules, patterns, starts, candidates })
    }

    /// The rules as written.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The patterns, in order.
    #[must_use]
    pub fn patterns(&self) -> &[Pattern] {
        &self.patterns
    }

    /// Whether the set has no patterns.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.patterns.is_empty()
    }

    /// Tag of a key without an own hash tag. `None` if no pattern matches.
    #[inline]
    #[must_use]
    pub fn tag<'k>(&'k self, key: &'k [u8]) -> Option<&'k [u8]> {
        self.find(key).map(|(_, tag)| tag)
    }

    /// The pattern that matches a key without an own hash tag.
    #[must_use]
    pub fn matching<'k>(&'k self, key: &'k [u8]) -> Option<RuleMatch<'k>> {
        let (Pattern { rule, place, .. }, tag) = self.find(key)?;
        Some(RuleMatch { rule: *rule, pattern: &self.rules[*rule].keys[*place], tag })
    }

    #[inline]
    fn find<'k>(&'k self, key: &'k [u8]) -> Option<(&'k Pattern, &'k [u8])> {
        let first = usize::from(*key.first()?);
        let range = self.starts[first] as usize..self.starts[first + 1] as usize;
        let head = head_of(key);
        let candidates = self.candidates[range].iter().filter(|candidate| head & candidate.mask == candidate.head);
        candidates.map(|candidate| &self.patterns[usize::from(candidate.pattern)]).find_map(|pattern| {
            let tag = pattern.tag(key)?;
            Some((pattern, tag))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};
    use proptest::{prop_assert_eq, prop_assume};

    use super::*;
    use crate::topology::crc16_slot;

    fn rule(keys: &[&str], tag: Option<&str>) -> Rule {
        Rule { keys: keys.iter().map(|&key| key.to_owned()).collect(), tag: tag.map(str::to_owned) }
    }

    fn set(rules: &[Rule]) -> RuleSet {
        RuleSet::new(rules.to_vec()).expect("valid rules")
    }

    fn tag_of(pattern: &str, key: &str) -> Option<String> {
        let set = set(&[rule(&[pattern], None)]);
        set.tag(key.as_bytes()).map(|tag| String::from_utf8_lossy(tag).into_owned())
    }

    #[test]
    fn captures_end_at_the_first_or_the_last_byte_after_them() {
        for (pattern, key, tag) in [
            ("bull:{queue}:*", "bull:mail:wait", Some("mail")),
            ("bull:{queue}:*", "bull:a:b:wait", Some("a")),
            ("bull:{queue...}:*", "bull:a:b:wait", Some("a:b")),
            ("bull:{queue}:*", "bull:mail", None),
            ("bull:{queue}:*", "bull::wait", None),
            ("bull:{queue}:*", "Bull:mail:wait", None),
            ("bull:{queue}:id", "bull:mail:id", Some("mail")),
            ("bull:{queue}:id", "bull:mail:ids", None),
            ("bull:{queue}:id", "bull:a:b:id", None),
            ("bull:{queue...}:id", "bull:a:id", Some("a")),
            ("{queue}.pidbox", "celery.pidbox", Some("celery")),
            ("job:{id}", "job:1:2", Some("1:2")),
            ("job:{id}", "job:", None),
            ("job:{id}", "job:a}b", Some("a")),
            ("job:{id}", "job:}b", None),
        ] {
            assert_eq!(tag_of(pattern, key).as_deref(), tag, "{pattern} {key}");
        }
    }

    #[test]
    fn the_first_matching_pattern_decides() {
        let rules = set(&[
            rule(&["queue:{name}:reserved", "{tenant}/*"], None),
            rule(&["queue:*", "queues", "schedule"], Some("sidekiq")),
            rule(&["q*"], Some("rest")),
        ]);
        for (key, tag, rule) in [
            ("queue:a:reserved", Some("a"), 0),
            ("queue:a", Some("sidekiq"), 1),
            ("queue:a/b", Some("queue:a"), 0),
            ("queues", Some("sidekiq"), 1),
            ("queues1", Some("rest"), 2),
            ("schedules", None, 0),
            ("", None, 0),
        ] {
            let found = rules.matching(key.as_bytes());
            assert_eq!(found.map(|found| found.tag), tag.map(str::as_bytes), "{key}");
            assert!(found.is_none_or(|found| found.rule == rule), "{key}");
        }
        assert_eq!(rules.matching(b"queues").map(|found| found.pattern), Some("queues"));
        assert!(RuleSet::default().is_empty() && RuleSet::default().tag(b"a").is_none());
    }

    #[test]
    fn errors_name_the_pattern_and_the_rule_that_it_breaks() {
        let long = "x".repeat(PATTERN_BYTES_MAX + 1);
        for (keys, tag, why) in [
            ("a*b{c}", None, "last character"),
            ("a{b", None, "no closing brace"),
            ("a{}b", None, "needs a name"),
            ("a{...}b", None, "needs a name"),
            ("a{b}*", None, "cannot follow it directly"),
            ("a{b...}", None, "needs a literal character after"),
            ("a{b}c{d}", None, "at most one capture"),
            ("a}b", Some("t"), "at most one capture"),
            ("{a}", None, "besides the capture"),
            ("*", Some("t"), "besides the capture"),
            ("", Some("t"), "besides the capture"),
            ("a:*", None, "needs `tag`"),
            ("a:{b}:*", Some("t"), "without a capture"),
            ("a", Some(""), "1 to 256 bytes"),
            ("a", Some("{t}"), "no braces"),
            (long.as_str(), Some("t"), "at most 256 bytes"),
        ] {
            let error = RuleSet::new(vec![rule(&[keys], tag)]).expect_err(keys).to_string();
            assert!(error.contains(why), "{keys}: {error}");
        }
        let many: Vec<Rule> = (0..=PATTERNS_MAX).map(|n| rule(&[&format!("k{n}:*")], Some("t"))).collect();
        assert!(RuleSet::new(many[1..].to_vec()).is_ok());
        assert!(RuleSet::new(many).expect_err("too many").to_string().contains("more than 256"));
    }

    proptest! {
        /// The slot of the tag is the slot of the name with braces around the capture.
        #[test]
        fn tags_equal_those_of_the_name_with_braces(
            prefix in "[a-c:]{0,3}", suffix in "[a-c:]{0,2}", last in any::<bool>(), is_open in any::<bool>(),
            key in prop::collection::vec(prop::sample::select(b"abc:}".to_vec()), 0..10),
        ) {
            let dots = if last && !suffix.is_empty() { "..." } else { "" };
            let star = if is_open && !suffix.is_empty() { "*" } else { "" };
            prop_assume!(!prefix.is_empty() || !suffix.is_empty());
            let rules = set(&[rule(&[&format!("{prefix}{{x{dots}}}{suffix}{star}")], None)]);
            let Some(tag) = rules.tag(&key) else { return Ok(()) };
            let rest = &key[prefix.len()..];
            let captured = match suffix.bytes().next() {
                None => rest.len(),
                Some(byte) if last => rest.iter().rposition(|b| *b == byte).expect("it matched"),
                Some(byte) => rest.iter().position(|b| *b == byte).expect("it matched"),
            };
            let braced =
                [prefix.as_bytes(), b"{", &rest[..captured], b"}", &rest[captured..]].concat();
            prop_assert_eq!(crc16_slot(tag), crc16_slot(&braced));
        }
    }
}
