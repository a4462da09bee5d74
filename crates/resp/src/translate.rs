//! Converts replies between RESP2 and RESP3.
//!
//! The conversion to RESP3 is not mechanical: a flat array may become an array, a map, a set, or pairs, and a string
//! may become a number, depending on the command and its options. [`Shape::of`] knows the server commands with
//! different RESP3 replies, and [`to_resp3`] converts these. Other replies (modules, scripts, `COMMAND DOCS`,
//! `FUNCTION LIST`) keep their RESP2 form except for nulls, which every RESP3 client can parse too.
//!
//! The router uses the client's own protocol at nodes if it can; this is for nodes without RESP3. The other direction
//! ([`to_resp2`]) is for hot copies, which are filled once, in RESP3, for clients of both protocols.

use crate::command::is_option;
use crate::encode;
use crate::reply::{self, ReplyScan, ReplyScanner, elements, is_null, text};
use crate::request::Args;

/// Type of a RESP2 reply in RESP3.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Shape {
    /// Unchanged, except for nulls.
    #[default]
    Plain,
    /// A flat array of fields and values, as a map.
    Map,
    /// An array, as a set.
    Set,
    /// A numeric string, as a double.
    Double,
    /// An array of numeric strings, as doubles.
    Doubles,
    /// A flat array of members and scores, as an array of pairs with scores as doubles.
    Scored,
    /// Members and scores as in `Scored`, but flat in RESP3 too (`ZPOPMIN` without a count).
    ScoredFlat,
    /// A flat array of fields and values, as an array of pairs.
    Pairs,
    /// An array with a score as its last element (`BZPOPMIN`, `ZRANK ... WITHSCORE`).
    LastScore,
    /// A key, and an array of pairs of member and score (`ZMPOP`).
    KeyScored,
    /// An array of positions (`GEOPOS`).
    Positions,
    /// An array of places, each with a position as its last element (`GEOSEARCH ... WITHCOORD`).
    Places,
    /// An array of streams and their entries, as a map (`XREAD`).
    Streams,
    /// An array of flat arrays of fields and values, as an array of maps (`XINFO GROUPS`).
    Maps,
    /// `XINFO STREAM ... FULL`: a map that contains `groups`, each of which contains `consumers`.
    StreamFull,
    /// An array of entries, or a null array in RESP2 (`XRANGE ... COUNT 0`).
    Entries,
}

impl Shape {
    /// Shape of the reply to a command. `name` is the full command name in upper case (`XINFO|STREAM`).
    pub fn of(name: &str, args: &Args<'_>) -> Self {
        let from = |start: usize, option: &[u8]| args.iter().skip(start).any(|a| is_option(a, option));
        let if_option =
            |start: usize, option: &[u8], shape: Shape| if from(start, option) { shape } else { Shape::Plain };
        match name {
            "HGETALL" | "XINFO|STREAM" if !from(3, b"FULL") => Shape::Map,
            "XINFO|STREAM" => Shape::StreamFull,
            "XINFO|GROUPS" | "XINFO|CONSUMERS" | "MODULE|LIST" => Shape::Maps,
            "LCS" => if_option(3, b"IDX", Shape::Map),
            "SMEMBERS" | "SINTER" | "SUNION" | "SDIFF" => Shape::Set,
            "SPOP" if args.len() == 3 => Shape::Set,
            "ZSCORE" | "ZINCRBY" => Shape::Double,
            "ZADD" => {
                // Options precede the first score, which may be `inf`.
                let is = |a: &[u8], words: &[&str]| words.iter().any(|w| is_option(a, w.as_bytes()));
                let mut options = args.iter().skip(2).take_while(|a| is(a, &["NX", "XX", "GT", "LT", "CH", "INCR"]));
                if options.any(|a| is(a, &["INCR"])) { Shape::Double } else { Shape::Plain }
            }
            "ZMSCORE" => Shape::Doubles,
            "ZRANGE" | "ZREVRANGE" | "ZRANGEBYSCORE" | "ZREVRANGEBYSCORE" => if_option(4, b"WITHSCORES", Shape::Scored),
            "ZRANDMEMBER" => if_option(3, b"WITHSCORES", Shape::Scored),
            "ZUNION" | "ZINTER" | "ZDIFF" => {
                let keys = args.get(1).and_then(|n| std::str::from_utf8(n).ok()?.parse::<usize>().ok()).unwrap_or(0);
                if_option(keys.saturating_add(2), b"WITHSCORES", Shape::Scored)
            }
            "ZRANK" | "ZREVRANK" => if_option(3, b"WITHSCORE", Shape::LastScore),
            "ZPOPMIN" | "ZPOPMAX" if args.len() > 2 => Shape::Scored,
            "ZPOPMIN" | "ZPOPMAX" => Shape::ScoredFlat,
            "BZPOPMIN" | "BZPOPMAX" => Shape::LastScore,
            "ZMPOP" | "BZMPOP" => Shape::KeyScored,
            "HRANDFIELD" => if_option(3, b"WITHVALUES", Shape::Pairs),
            "GEOPOS" => Shape::Positions,
            "GEORADIUS" | "GEORADIUS_RO" => if_option(6, b"WITHCOORD", Shape::Places),
            "GEORADIUSBYMEMBER" | "GEORADIUSBYMEMBER_RO" => if_option(5, b"WITHCOORD", Shape::Places),
            "GEOSEARCH" => {
                // A member may have the name of an option.
                let mut after_from = false;
                let found = args.iter().skip(2).any(|a| {
                    let value = std::mem::replace(&mut after_from, is_option(a, b"FROMMEMBER"));
                    !value && is_option(a, b"WITHCOORD")
                });
                if found { Shape::Places } else { Shape::Plain }
            }
            "XREAD" | "XREADGROUP" => Shape::Streams,
            "XRANGE" | "XREVRANGE" => Shape::Entries,
            _ => Shape::Plain,
        }
    }
}

/// Appends a complete RESP2 reply in its RESP3 form.
pub fn to_resp3(answer: &[u8], shape: Shape, out: &mut Vec<u8>) {
    if is_null(answer) {
        out.extend_from_slice(b"_\r\n");
        return;
    }
    match answer.first() {
        Some(b'*') => {}
        Some(b'$') if shape == Shape::Double => return double(answer, out),
        _ => return out.extend_from_slice(answer),
    }
    let items = elements(answer);
    let count = items.remaining() as usize;
    match shape {
        Shape::Plain | Shape::Double | Shape::Entries => plain(answer, out),
        Shape::Map => map(items, out, |_, value, out| plain(value, out)),
        Shape::Set => aggregate(b'~', items, out, plain),
        Shape::Doubles => aggregate(b'*', items, out, double),
        Shape::Scored => pairs(items, out, double),
        Shape::ScoredFlat if count % 2 == 1 => plain(answer, out),
        Shape::ScoredFlat => {
            encode::header(out, b'*', count);
            in_pairs(items, |member, score| {
                plain(member, out);
                double(score, out);
            });
        }
        Shape::Pairs => pairs(items, out, plain),
        Shape::LastScore => last(items, out, double),
        Shape::KeyScored => last(items, out, |pairs, out| {
            aggregate(b'*', elements(pairs), out, |pair, out| last(elements(pair), out, double));
        }),
        Shape::Positions => aggregate(b'*', items, out, position),
        Shape::Places => aggregate(b'*', items, out, |place, out| last(elements(place), out, position)),
        Shape::Streams if !elements(answer).all(|stream| elements(stream).remaining() == 2) => plain(answer, out),
        Shape::Streams => {
            encode::header(out, b'%', count);
            for stream in items {
                for part in elements(stream) {
                    plain(part, out);
                }
            }
        }
        Shape::Maps => aggregate(b'*', items, out, |one, out| to_resp3(one, Shape::Map, out)),
        Shape::StreamFull => map(items, out, |field, value, out| match text(field) {
            Some(b"groups") => aggregate(b'*', elements(value), out, |group, out| {
                map(elements(group), out, |field, value, out| match text(field) {
                    Some(b"consumers") => to_resp3(value, Shape::Maps, out),
                    _ => plain(value, out),
                });
            }),
            _ => plain(value, out),
        }),
    }
}

/// Appends a complete RESP3 reply in its RESP2 form. Returns false, and appends nothing, if both forms are the same.
///
/// For replies of data commands: their nulls are null strings in RESP2, except where an array is expected.
pub fn to_resp2(answer: &[u8], shape: Shape, out: &mut Vec<u8>) -> bool {
    let differs = |token: &[u8]| {
        matches!(token.first(), Some(b'%' | b'~' | b',' | b'_' | b'#' | b'(' | b'=' | b'!' | b'|' | b'>'))
    };
    let is_nested = shape == Shape::Scored && elements(answer).any(|element| element.first() == Some(&b'*'));
    if !is_nested && !Tokens(answer).any(differs) {
        return false;
    }
    if answer == b"_\r\n" && matches!(shape, Shape::Entries | Shape::LastScore) {
        out.extend_from_slice(b"*-1\r\n");
        return true;
    }
    let mut tokens = Tokens(answer);
    if is_nested {
        // Pairs of member and score: flat in RESP2.
        tokens.next();
        encode::header(out, b'*', 2 * elements(answer).remaining() as usize);
        elements(answer).flat_map(elements).for_each(|part| Tokens(part).for_each(|token| lower(token, out)));
    } else {
        tokens.for_each(|token| lower(token, out));
    }
    true
}

/// Converts a token from RESP3 to RESP2.
fn lower(token: &[u8], out: &mut Vec<u8>) {
    let line = || token.get(1..token.len().saturating_sub(2)).unwrap_or_default();
    let count = || std::str::from_utf8(line()).ok().and_then(|count| count.parse::<usize>().ok()).unwrap_or_default();
    match token.first() {
        Some(b'%') => encode::header(out, b'*', 2 * count()),
        Some(b'~') => encode::header(out, b'*', count()),
        Some(b'_') => out.extend_from_slice(b"$-1\r\n"),
        Some(b',' | b'(') => encode::bulk(out, line()),
        Some(b'#') => out.extend_from_slice(if line() == b"t" { b":1\r\n" } else { b":0\r\n" }),
        // A format and a colon precede the text.
        Some(b'=') => encode::bulk(out, text(token).and_then(|text| text.get(4..)).unwrap_or_default()),
        _ => out.extend_from_slice(token),
    }
}

fn in_pairs<'a>(mut items: impl Iterator<Item = &'a [u8]>, mut each: impl FnMut(&'a [u8], &'a [u8])) {
    while let (Some(first), Some(second)) = (items.next(), items.next()) {
        each(first, second);
    }
}

/// Array of two-element arrays.
fn pairs(items: reply::Elements<'_>, out: &mut Vec<u8>, second: impl Fn(&[u8], &mut Vec<u8>)) {
    encode::header(out, b'*', items.remaining() as usize / 2);
    in_pairs(items, |one, other| {
        out.extend_from_slice(b"*2\r\n");
        plain(one, out);
        second(other, out);
    });
}

fn map(items: reply::Elements<'_>, out: &mut Vec<u8>, mut value: impl FnMut(&[u8], &[u8], &mut Vec<u8>)) {
    encode::header(out, b'%', items.remaining() as usize / 2);
    in_pairs(items, |field, of_field| {
        plain(field, out);
        value(field, of_field, out);
    });
}

fn aggregate(kind: u8, items: reply::Elements<'_>, out: &mut Vec<u8>, mut each: impl FnMut(&[u8], &mut Vec<u8>)) {
    encode::header(out, kind, items.remaining() as usize);
    for item in items {
        each(item, out);
    }
}

/// Copies an array whose last element is special.
fn last(items: reply::Elements<'_>, out: &mut Vec<u8>, mut special: impl FnMut(&[u8], &mut Vec<u8>)) {
    let count = items.remaining() as usize;
    encode::header(out, b'*', count);
    for (index, item) in items.enumerate() {
        if index + 1 == count { special(item, out) } else { plain(item, out) }
    }
}

fn position(item: &[u8], out: &mut Vec<u8>) {
    if is_null(item) {
        out.extend_from_slice(b"_\r\n");
    } else {
        aggregate(b'*', elements(item), out, double);
    }
}

/// Converts a RESP2 string to a double. Other values stay unchanged.
fn double(item: &[u8], out: &mut Vec<u8>) {
    match text(item).filter(|_| item.first() == Some(&b'$')) {
        Some(number) if std::str::from_utf8(number).is_ok_and(|n| n.parse::<f64>().is_ok()) => {
            encode::line(out, b',', number)
        }
        _ => plain(item, out),
    }
}

/// Copies a reply of any depth, with RESP3 nulls.
fn plain(item: &[u8], out: &mut Vec<u8>) {
    for token in Tokens(item) {
        out.extend_from_slice(if is_null(token) { b"_\r\n" } else { token });
    }
}

/// Tokens of a complete reply, in order: headers of aggregates, and all other elements complete. Avoids recursion.
struct Tokens<'a>(&'a [u8]);

impl<'a> Iterator for Tokens<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        let len = match self.0.first()? {
            b'*' | b'~' | b'>' | b'%' | b'|' => memchr::memchr(b'\n', self.0)? + 1,
            _ => match ReplyScanner::default().scan(self.0) {
                Ok(ReplyScan::Complete(len)) => len,
                _ => return None,
            },
        };
        let (token, rest) = self.0.split_at(len);
        self.0 = rest;
        Some(token)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Limits, Scanner};

    fn up(answer: &str, shape: Shape) -> String {
        let mut out = Vec::new();
        to_resp3(answer.as_bytes(), shape, &mut out);
        String::from_utf8(out).expect("text")
    }

    fn shape(line: &str) -> Shape {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        let mut bytes = Vec::new();
        encode::command(&mut bytes, words.iter().copied());
        let mut scanner = Scanner::default();
        let limits = Limits { argument_max: 1 << 20, large: usize::MAX, authenticated: true };
        scanner.scan(&bytes, &limits).expect("a command");
        let name = line.split(' ').next().expect("a name").to_ascii_uppercase();
        let name =
            if name == "XINFO" { format!("XINFO|{}", line.split(' ').nth(1).expect("a subcommand")) } else { name };
        Shape::of(&name, &scanner.args(&bytes))
    }

    #[test]
    fn replies_are_converted_to_resp3_by_the_shape_of_their_command() {
        for (two, of, three) in [
            ("$-1\r\n", Shape::Map, "_\r\n"),
            ("*-1\r\n", Shape::Streams, "_\r\n"),
            ("-ERR x\r\n", Shape::Map, "-ERR x\r\n"),
            (":1\r\n", Shape::Double, ":1\r\n"),
            ("*2\r\n$-1\r\n*1\r\n*-1\r\n", Shape::Plain, "*2\r\n_\r\n*1\r\n_\r\n"),
            ("*2\r\n$1\r\na\r\n$1\r\nb\r\n", Shape::Map, "%1\r\n$1\r\na\r\n$1\r\nb\r\n"),
            ("*1\r\n$1\r\na\r\n", Shape::Set, "~1\r\n$1\r\na\r\n"),
            ("$3\r\n1.5\r\n", Shape::Double, ",1.5\r\n"),
            ("$3\r\ninf\r\n", Shape::Double, ",inf\r\n"),
            ("*2\r\n$1\r\n1\r\n$-1\r\n", Shape::Doubles, "*2\r\n,1\r\n_\r\n"),
            ("*2\r\n$1\r\n7\r\n$1\r\n1\r\n", Shape::Scored, "*1\r\n*2\r\n$1\r\n7\r\n,1\r\n"),
            ("*2\r\n$1\r\n7\r\n$1\r\n1\r\n", Shape::ScoredFlat, "*2\r\n$1\r\n7\r\n,1\r\n"),
            ("*0\r\n", Shape::Scored, "*0\r\n"),
            ("*2\r\n$1\r\na\r\n$1\r\nb\r\n", Shape::Pairs, "*1\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n"),
            ("*2\r\n:3\r\n$1\r\n1\r\n", Shape::LastScore, "*2\r\n:3\r\n,1\r\n"),
            (
                "*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$1\r\n7\r\n$1\r\n1\r\n",
                Shape::KeyScored,
                "*2\r\n$1\r\nk\r\n*1\r\n*2\r\n$1\r\n7\r\n,1\r\n",
            ),
            ("*2\r\n*-1\r\n*2\r\n$1\r\n1\r\n$1\r\n2\r\n", Shape::Positions, "*2\r\n_\r\n*2\r\n,1\r\n,2\r\n"),
            (
                "*1\r\n*2\r\n$1\r\n5\r\n*2\r\n$1\r\n1\r\n$1\r\n2\r\n",
                Shape::Places,
                "*1\r\n*2\r\n$1\r\n5\r\n*2\r\n,1\r\n,2\r\n",
            ),
            ("*1\r\n*2\r\n$1\r\ns\r\n*0\r\n", Shape::Streams, "%1\r\n$1\r\ns\r\n*0\r\n"),
        ] {
            assert_eq!(up(two, of), three, "{two:?} as {of:?}");
        }
    }

    #[test]
    fn copied_replies_convert_back_to_their_resp2_form() {
        for (three, of, two) in [
            ("_\r\n", Shape::Plain, Some("$-1\r\n")),
            ("$1\r\na\r\n", Shape::Plain, None),
            ("*2\r\n_\r\n:1\r\n", Shape::Plain, Some("*2\r\n$-1\r\n:1\r\n")),
            ("%1\r\n$1\r\na\r\n$1\r\nb\r\n", Shape::Map, Some("*2\r\n$1\r\na\r\n$1\r\nb\r\n")),
            ("~1\r\n$1\r\na\r\n", Shape::Set, Some("*1\r\n$1\r\na\r\n")),
            (",1.5\r\n", Shape::Double, Some("$3\r\n1.5\r\n")),
            (",inf\r\n", Shape::Double, Some("$3\r\ninf\r\n")),
            ("*2\r\n,1\r\n_\r\n", Shape::Doubles, Some("*2\r\n$1\r\n1\r\n$-1\r\n")),
            (
                "*2\r\n*2\r\n$1\r\n7\r\n,1\r\n*2\r\n$1\r\n8\r\n,2\r\n",
                Shape::Scored,
                Some("*4\r\n$1\r\n7\r\n$1\r\n1\r\n$1\r\n8\r\n$1\r\n2\r\n"),
            ),
            ("*0\r\n", Shape::Scored, None),
            ("_\r\n", Shape::LastScore, Some("*-1\r\n")),
            ("_\r\n", Shape::Entries, Some("*-1\r\n")),
            ("*2\r\n:3\r\n,1\r\n", Shape::LastScore, Some("*2\r\n:3\r\n$1\r\n1\r\n")),
            ("*1\r\n*2\r\n$3\r\n1-1\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n", Shape::Plain, None),
        ] {
            let mut out = Vec::new();
            let differs = to_resp2(three.as_bytes(), of, &mut out);
            assert_eq!(
                differs.then(|| String::from_utf8_lossy(&out).into_owned()),
                two.map(str::to_owned),
                "{three:?} as {of:?}"
            );
        }
    }

    #[test]
    fn options_decide_and_keys_do_not() {
        for (line, expected) in [
            ("HGETALL k", Shape::Map),
            ("ZRANGE WITHSCORES 0 -1", Shape::Plain),
            ("ZRANGE k 0 -1 withscores", Shape::Scored),
            ("ZUNION 2 WITHSCORES b", Shape::Plain),
            ("ZUNION 2 a b WITHSCORES", Shape::Scored),
            ("ZADD k INCR 1 a", Shape::Double),
            ("ZADD k 1 INCR", Shape::Plain),
            ("ZADD INCR 1 a", Shape::Plain),
            ("SPOP k", Shape::Plain),
            ("SPOP k 2", Shape::Set),
            ("GEOSEARCH k FROMMEMBER WITHCOORD BYRADIUS 1 m", Shape::Plain),
            ("GEOSEARCH k FROMMEMBER m BYRADIUS 1 m WITHCOORD", Shape::Places),
            ("XINFO STREAM k", Shape::Map),
            ("XINFO STREAM k FULL", Shape::StreamFull),
            ("LCS IDX b", Shape::Plain),
            ("LCS a b IDX", Shape::Map),
            ("XRANGE k - + COUNT 0", Shape::Entries),
            ("GET k", Shape::Plain),
        ] {
            assert_eq!(shape(line), expected, "{line}");
        }
    }

    #[test]
    fn deep_replies_cost_no_stack() {
        let mut out = Vec::new();
        let deep = [&b"*1\r\n".repeat(200_000)[..], b"$-1\r\n"].concat();
        to_resp3(&deep, Shape::Plain, &mut out);
        assert!(out.ends_with(b"_\r\n"));
    }
}
