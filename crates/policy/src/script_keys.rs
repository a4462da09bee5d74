//! Keys that a script computes, learned from the keys that its calls have touched.
//!
//! A rehearsal finds the undeclared keys of a call, but costs a round trip if they are at another node. Most names are
//! made of the same parts in each call: a declared key, an argument, literal text. A template of such parts predicts the
//! name for the next call, which declares it beforehand. A missing prediction costs a round trip, a wrong one moves a key
//! that is not needed.
//!
//! Not an analysis of the script: its text shows neither the values of variables nor which branch is taken.

use std::collections::VecDeque;

/// Maximum templates in use for a script. The oldest is replaced.
const TEMPLATES_MAX: usize = 16;

/// Maximum templates of a script that explain one name only, so far.
const SEEN_MAX: usize = 128;

/// Maximum length of a name, in bytes.
const NAME_BYTES_MAX: usize = 1024;

/// Number of declared keys, and of arguments, that templates use.
const KEYS_MAX: usize = 8;
const ARGUMENTS_MAX: usize = 16;

/// Maximum length of an argument in a name, in bytes.
const ARGUMENT_BYTES_MAX: usize = 256;

/// Bytes that end the parts of a name.
const SEPARATORS: &[u8] = b":/.-_|";

/// Part of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Part {
    Literal(Box<[u8]>),
    /// The declared key of this index.
    Key(usize),
    /// The declared key of this index, up to its last separator.
    Stem(usize),
    /// The argument of this index.
    Argument(usize),
}

/// Parts of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Template(Vec<Part>);

/// The part of a name up to its last separator.
fn stem(name: &[u8]) -> &[u8] {
    let end = name.iter().rposition(|byte| SEPARATORS.contains(byte)).map_or(0, |at| at + 1);
    &name[..end]
}

impl Template {
    fn new(parts: impl IntoIterator<Item = Part>) -> Self {
        let is_empty = |part: &Part| matches!(part, Part::Literal(text) if text.is_empty());
        Self(parts.into_iter().filter(|part| !is_empty(part)).collect())
    }

    /// Returns the name for a call. `None` if the call lacks a part, or the name would be too long.
    fn name(&self, keys: &[&[u8]], arguments: &[&[u8]]) -> Option<Box<[u8]>> {
        let mut name = Vec::new();
        for part in &self.0 {
            match part {
                Part::Literal(text) => name.extend_from_slice(text),
                Part::Key(index) => name.extend_from_slice(keys.get(*index)?),
                Part::Stem(index) => name.extend_from_slice(stem(keys.get(*index)?)),
                Part::Argument(index) => name.extend_from_slice(arguments.get(*index)?),
            }
            if name.len() > NAME_BYTES_MAX {
                return None;
            }
        }
        Some(name.into())
    }

    /// Returns the templates that explain a name of a call, the most probable first.
    fn explaining(name: &[u8], keys: &[&[u8]], arguments: &[&[u8]]) -> Vec<Self> {
        let literal = |text: &[u8]| Part::Literal(text.into());
        let mut all = Vec::new();
        let arguments = || {
            let numbered = arguments.iter().copied().enumerate().take(ARGUMENTS_MAX);
            numbered.filter(|(_, argument)| (1..=ARGUMENT_BYTES_MAX).contains(&argument.len()))
        };
        all.extend(arguments().filter(|(_, argument)| *argument == name).map(|(j, _)| Self::new([Part::Argument(j)])));
        for (i, key) in keys.iter().enumerate().take(KEYS_MAX) {
            for (front, length) in [(Part::Key(i), key.len()), (Part::Stem(i), stem(key).len())] {
                let Some(rest) = name.get(length..).filter(|_| length > 0 && name[..length] == key[..length]) else {
                    continue;
                };
                let ends = arguments().filter_map(|(j, argument)| Some((j, rest.strip_suffix(argument)?)));
                all.extend(ends.map(|(j, middle)| Self::new([front.clone(), literal(middle), Part::Argument(j)])));
                let starts = arguments().filter_map(|(j, argument)| Some((j, rest.strip_prefix(argument)?)));
                all.extend(starts.map(|(j, end)| Self::new([front.clone(), Part::Argument(j), literal(end)])));
                all.push(Self::new([front, literal(rest)]));
            }
        }
        for (j, argument) in arguments() {
            if let Some(at) = name.windows(argument.len()).rposition(|window| window == argument) {
                let (front, rest) = name.split_at(at);
                all.push(Self::new([literal(front), Part::Argument(j), literal(&rest[argument.len()..])]));
            }
        }
        all.push(Self::new([literal(name)]));
        all
    }
}

/// Templates for the undeclared keys of a script. A template is used when it has explained two names.
#[derive(Clone, Default, Debug)]
pub struct KeyTemplates {
    used: VecDeque<Template>,
    seen: VecDeque<Template>,
}

impl KeyTemplates {
    /// Records that a call with these declared keys and arguments has touched an undeclared key.
    pub fn learn(&mut self, name: &[u8], keys: &[&[u8]], arguments: &[&[u8]]) {
        let is_known = |template: &Template| template.name(keys, arguments).is_some_and(|made| *made == *name);
        if name.len() > NAME_BYTES_MAX || self.used.iter().any(is_known) {
            return;
        }
        let explaining = Template::explaining(name, keys, arguments);
        if let Some(again) = explaining.iter().find(|template| self.seen.contains(template)) {
            if self.used.len() == TEMPLATES_MAX {
                self.used.pop_front();
            }
            self.used.push_back(again.clone());
            return;
        }
        self.seen.extend(explaining);
        let excess = self.seen.len().saturating_sub(SEEN_MAX);
        self.seen.drain(..excess);
    }

    /// Returns the undeclared keys that a call with these declared keys and arguments will probably touch.
    #[must_use]
    pub fn predict(&self, keys: &[&[u8]], arguments: &[&[u8]]) -> Vec<Box<[u8]>> {
        let mut names: Vec<Box<[u8]>> =
            self.used.iter().filter_map(|template| template.name(keys, arguments)).collect();
        names.retain(|name| !keys.contains(&&**name));
        names.sort_unstable();
        names.dedup();
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<'n>(names: &[&'n str]) -> Vec<&'n [u8]> {
        names.iter().map(|name| name.as_bytes()).collect()
    }

    /// Learns the names of these calls, and returns the predictions for another call.
    fn after(calls: &[(&str, &[&str], &[&str])], keys: &[&str], arguments: &[&str]) -> Vec<String> {
        let mut templates = KeyTemplates::default();
        for (name, keys, arguments) in calls {
            templates.learn(name.as_bytes(), &names(keys), &names(arguments));
        }
        let made = templates.predict(&names(keys), &names(arguments));
        made.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect()
    }

    #[test]
    fn a_name_of_known_parts_is_predicted_after_two_calls() {
        let calls: [(&str, &[&str], &[&str]); 2] =
            [("queue:a.msgs", &["queue:a"], &["x", "7"]), ("queue:b.msgs", &["queue:b"], &["y", "9"])];
        assert_eq!(after(&calls, &["queue:c"], &["z", "1"]), ["queue:c.msgs"]);
        assert!(after(&calls[..1], &["queue:c"], &["z", "1"]).is_empty(), "one name may be a coincidence");
        let calls: [(&str, &[&str], &[&str]); 2] =
            [("bull:mail:17", &["bull:mail:wait"], &["17"]), ("bull:sms:8", &["bull:sms:wait"], &["8"])];
        assert_eq!(after(&calls, &["bull:fax:wait"], &["9"]), ["bull:fax:9"]);
        let calls: [(&str, &[&str], &[&str]); 2] =
            [("job:5:lock", &[], &["n", "5"]), ("job:61:lock", &[], &["n", "61"])];
        assert_eq!(after(&calls, &[], &["n", "3"]), ["job:3:lock"]);
        let calls: [(&str, &[&str], &[&str]); 2] = [("channel", &[], &["channel"]), ("group", &[], &["group"])];
        assert_eq!(after(&calls, &[], &["other"]), ["other"]);
    }

    #[test]
    fn a_predicted_name_is_neither_declared_nor_twice() {
        let calls: [(&str, &[&str], &[&str]); 4] = [
            ("queues", &["q:1"], &["a"]),
            ("queues", &["q:2"], &["b"]),
            ("q:1:x", &["q:1"], &["x"]),
            ("q:2:y", &["q:2"], &["y"]),
        ];
        assert_eq!(after(&calls, &["q:3", "queues"], &["z"]), ["q:3:z"]);
        assert_eq!(after(&calls, &["q:3"], &["z"]), ["q:3:z", "queues"]);
    }

    #[test]
    fn templates_of_a_script_are_bounded() {
        let mut templates = KeyTemplates::default();
        for number in 0..1000_u32 {
            let name = format!("constant:{number}");
            for argument in [number.to_string(), format!("{number}!")] {
                templates.learn(name.as_bytes(), &[b"k"], &[argument.as_bytes()]);
            }
        }
        assert!(templates.seen.len() <= SEEN_MAX && templates.used.len() <= TEMPLATES_MAX);
        templates.learn(&[b'x'; NAME_BYTES_MAX + 1], &[], &[]);
        assert!(templates.predict(&[b"k"], &[&[b'y'; NAME_BYTES_MAX]]).iter().all(|name| name.len() <= NAME_BYTES_MAX));
    }
}
