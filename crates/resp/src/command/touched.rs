//! Finds the elements of a hash, set, or sorted set that a command may change.
//!
//! Used while a large key is copied in pieces: changed elements are copied again. So the effect of a command does not
//! matter, only the affected elements. Known for the few commands that name their elements; any other command may
//! change everything.

use super::{Access, Command};
use crate::request::Args;

/// Possible changes by a command to one of its keys.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Touched<'a> {
    /// Nothing except its expiry.
    Nothing,
    /// These fields or members. The key may be removed with them.
    Elements(Vec<&'a [u8]>),
    /// Anything.
    Everything,
}

/// Positions of elements: `first`, and every `step` from there.
struct Places {
    first: usize,
    step: usize,
}

impl Command {
    /// Possible changes to the key at index `place` of [`Command::find_keys`]. `Everything` if arguments are missing.
    pub fn touched<'a>(&self, args: &Args<'a>, place: usize) -> Touched<'a> {
        if self.key_access(args, place) == Access::R {
            return Touched::Nothing;
        }
        let Places { first, step } = match &*self.name {
            "EXPIRE" | "EXPIREAT" | "PEXPIRE" | "PEXPIREAT" | "PERSIST" => return Touched::Nothing,
            "HSET" | "HMSET" => Places { first: 2, step: 2 },
            "HDEL" | "SADD" | "SREM" | "ZREM" => Places { first: 2, step: 1 },
            "HSETNX" | "HINCRBY" | "HINCRBYFLOAT" => Places { first: 2, step: usize::MAX },
            "SMOVE" | "ZINCRBY" => Places { first: 3, step: usize::MAX },
            "ZADD" => Places { first: after_options(args, &["NX", "XX", "GT", "LT", "CH", "INCR"]) + 1, step: 2 },
            "GEOADD" => Places { first: after_options(args, &["NX", "XX", "CH"]) + 2, step: 3 },
            _ => return Touched::Everything,
        };
        let elements: Option<Vec<&[u8]>> = (first..args.len()).step_by(step).map(|at| args.get(at)).collect();
        elements.map_or(Touched::Everything, Touched::Elements)
    }
}

/// Index of the first argument after the key that is none of these options.
fn after_options(args: &Args<'_>, options: &[&str]) -> usize {
    let is_option =
        |at: &usize| args.get(*at).is_some_and(|arg| options.iter().any(|o| arg.eq_ignore_ascii_case(o.as_bytes())));
    (2..args.len()).find(|at| !is_option(at)).unwrap_or(args.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::CommandTable;
    use crate::request::Span;

    fn touched(line: &str, known: usize, place: usize) -> Option<Vec<String>> {
        let words: Vec<&str> = line.split(' ').collect();
        let buf = words.concat().into_bytes();
        let mut start = 0;
        let mut spans = Vec::new();
        for word in &words {
            spans.push(Span { start, len: word.len() as u32 });
            start += word.len() as u32;
        }
        let args = Args::partial(&buf, &spans[..known.min(spans.len())], words.len());
        let table = CommandTable::builtin();
        match table.by_name(words[0]).expect("a command").touched(&args, place) {
            Touched::Nothing => Some(Vec::new()),
            Touched::Elements(elements) => {
                Some(elements.iter().map(|e| String::from_utf8_lossy(e).into_owned()).collect())
            }
            Touched::Everything => None,
        }
    }

    #[test]
    fn elements_named_by_commands_are_found() {
        for (line, expected) in [
            ("HSET k f 1 g 2", "f g"),
            ("HMSET k f 1", "f"),
            ("HSETNX k f 1", "f"),
            ("HDEL k f g", "f g"),
            ("HINCRBY k f 1", "f"),
            ("HINCRBYFLOAT k f 1.5", "f"),
            ("SADD k a b", "a b"),
            ("SREM k a", "a"),
            ("ZADD k 1 a 2 b", "a b"),
            ("ZADD k nx GT ch 1 a", "a"),
            ("ZADD k XX INCR 1 xx", "xx"),
            ("ZREM k a", "a"),
            ("ZINCRBY k 1 a", "a"),
            ("GEOADD k CH 1 2 a 3 4 b", "a b"),
        ] {
            let expected: Vec<String> = expected.split(' ').map(str::to_owned).collect();
            assert_eq!(touched(line, usize::MAX, 0), Some(expected), "{line}");
        }
        assert_eq!(touched("SMOVE s t m", usize::MAX, 0), Some(vec!["m".to_owned()]));
        assert_eq!(touched("SMOVE s t m", usize::MAX, 1), Some(vec!["m".to_owned()]));
    }

    #[test]
    fn commands_without_element_names_touch_everything() {
        for line in [
            "DEL k",
            "SPOP k",
            "ZPOPMIN k",
            "ZREMRANGEBYSCORE k 0 1",
            "RENAME k l",
            "SET k v",
            "RESTORE k 0 x",
            "SUNIONSTORE k a b",
            "EVAL x 1 k",
            "LPUSH k v",
            "HEXPIRE k 1 FIELDS 1 f",
        ] {
            assert_eq!(touched(line, usize::MAX, 0), None, "{line}");
        }
    }

    #[test]
    fn reads_and_expiry_changes_touch_nothing() {
        assert_eq!(touched("EXPIRE k 10", usize::MAX, 0), Some(Vec::new()));
        assert_eq!(touched("SUNIONSTORE k a b", usize::MAX, 1), Some(Vec::new()));
    }

    #[test]
    fn a_missing_argument_touches_everything() {
        assert_eq!(touched("HSET k f 1 g 2", 3, 0), None);
        assert_eq!(touched("HSET k f 1", 3, 0), Some(vec!["f".to_owned()]));
        assert_eq!(touched("SADD k a", 2, 0), None);
        assert_eq!(touched("ZADD k 1 a", 3, 0), None);
    }
}
