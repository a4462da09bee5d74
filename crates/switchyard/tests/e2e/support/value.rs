//! Parsed replies for assertions. `client` also keeps the raw bytes, which differential tests compare.

use std::fmt;

/// A RESP2 or RESP3 reply.
#[derive(Clone, PartialEq)]
pub(crate) enum Value {
    /// `$-1`, `*-1` or `_`.
    Nil,
    /// `+`.
    Simple(String),
    /// `-` or `!`.
    Error(String),
    /// `:`.
    Int(i64),
    /// `$`.
    Bulk(Vec<u8>),
    /// `*`.
    Array(Vec<Value>),
    /// `%`.
    Map(Vec<(Value, Value)>),
    /// `~`.
    Set(Vec<Value>),
    /// `,`.
    Double(String),
    /// `#`.
    Bool(bool),
    /// `(`.
    Big(String),
    /// `=` without its type prefix.
    Verbatim(String),
    /// `>`.
    Push(Vec<Value>),
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn list(f: &mut fmt::Formatter<'_>, open: &str, items: &[Value]) -> fmt::Result {
            write!(f, "{open}{} ", items.len())?;
            f.debug_list().entries(items.iter().take(40)).finish()
        }
        match self {
            Value::Nil => f.write_str("nil"),
            Value::Simple(s) => write!(f, "+{s}"),
            Value::Error(s) => write!(f, "-{s}"),
            Value::Int(n) => write!(f, ":{n}"),
            Value::Bulk(b) if b.len() > 200 => {
                write!(f, "\"{}...\" ({} bytes)", b[..60].escape_ascii(), b.len())
            }
            Value::Bulk(b) => write!(f, "\"{}\"", b.escape_ascii()),
            Value::Array(v) => list(f, "*", v),
            Value::Set(v) => list(f, "~", v),
            Value::Push(v) => list(f, ">", v),
            Value::Map(v) => f.debug_map().entries(v.iter().map(|(k, v)| (k, v))).finish(),
            Value::Double(s) => write!(f, ",{s}"),
            Value::Bool(b) => write!(f, "#{b}"),
            Value::Big(s) => write!(f, "({s}"),
            Value::Verbatim(s) => write!(f, "={s}"),
        }
    }
}

/// A bulk string, for comparisons.
pub(crate) fn bulk(text: impl AsRef<[u8]>) -> Value {
    Value::Bulk(text.as_ref().to_vec())
}

/// A simple string, for comparisons.
pub(crate) fn simple(text: &str) -> Value {
    Value::Simple(text.to_owned())
}

/// `+OK`.
pub(crate) fn ok() -> Value {
    simple("OK")
}

/// An integer, for comparisons.
pub(crate) fn int(n: i64) -> Value {
    Value::Int(n)
}

impl Value {
    /// Returns an integer, or panics with the reply.
    #[track_caller]
    pub(crate) fn int(&self) -> i64 {
        match self {
            Value::Int(n) => *n,
            other => panic!("not an integer: {other:?}"),
        }
    }

    /// Returns the bytes of a bulk string.
    #[track_caller]
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Value::Bulk(b) => b,
            other => panic!("not a bulk string: {other:?}"),
        }
    }

    /// Returns the text of any string type.
    #[track_caller]
    pub(crate) fn text(&self) -> String {
        match self {
            Value::Bulk(b) => String::from_utf8_lossy(b).into_owned(),
            Value::Simple(s) | Value::Verbatim(s) | Value::Double(s) | Value::Big(s) => s.clone(),
            other => panic!("not a string: {other:?}"),
        }
    }

    /// Returns the items of an array, set or push.
    #[track_caller]
    pub(crate) fn items(&self) -> &[Value] {
        match self {
            Value::Array(v) | Value::Set(v) | Value::Push(v) => v,
            other => panic!("not an array: {other:?}"),
        }
    }

    /// Returns the text of an error.
    pub(crate) fn error(&self) -> Option<&str> {
        match self {
            Value::Error(s) => Some(s),
            _ => None,
        }
    }

    /// Returns the text of an error, or panics with the reply.
    #[track_caller]
    pub(crate) fn expect_error(&self) -> &str {
        match self {
            Value::Error(s) => s,
            other => panic!("should be an error: {other:?}"),
        }
    }

    /// Returns the pairs of a map, or of the equivalent flat array in RESP2.
    #[track_caller]
    pub(crate) fn pairs(&self) -> Vec<(String, Value)> {
        match self {
            Value::Map(pairs) => pairs.iter().map(|(k, v)| (k.text(), v.clone())).collect(),
            other => other.items().chunks(2).map(|pair| (pair[0].text(), pair[1].clone())).collect(),
        }
    }

    /// Returns the value of `key` in a map or flat array.
    #[track_caller]
    pub(crate) fn field(&self, key: &str) -> Value {
        self.pairs()
            .into_iter()
            .find_map(|(k, v)| (k == key).then_some(v))
            .unwrap_or_else(|| panic!("no field {key} in {self:?}"))
    }
}

/// Finds the end of a reply without recursion. Resumes where it stopped, so that a reply of any size is scanned once.
#[derive(Debug, Default)]
pub(crate) struct Framer {
    at: usize,
    /// Number of missing values of each open aggregate.
    open: Vec<u64>,
}

impl Framer {
    /// Returns the length of the first complete reply in `buf`, or `None` if more bytes are needed. Panics on invalid
    /// RESP.
    pub(crate) fn end(&mut self, buf: &[u8]) -> Option<usize> {
        loop {
            let rest = buf.get(self.at..)?;
            let line_end = rest.windows(2).position(|w| w == b"\r\n")?;
            let (kind, body) = (rest[0], &rest[1..line_end]);
            let number = || -> i64 {
                std::str::from_utf8(body).ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
                    panic!("not a length in a reply: {:?}", rest[..line_end].escape_ascii().to_string())
                })
            };
            match kind {
                b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => self.at += line_end + 2,
                b'$' | b'=' | b'!' => {
                    let whole = match number() {
                        -1 => line_end + 2,
                        n => line_end + 2 + n as usize + 2,
                    };
                    if rest.len() < whole {
                        return None;
                    }
                    self.at += whole;
                }
                b'*' | b'~' | b'>' | b'%' | b'|' => {
                    let n = number().max(0) as u64;
                    self.at += line_end + 2;
                    // An attribute precedes its value, so one more value follows.
                    let members = match kind {
                        b'%' => 2 * n,
                        b'|' => 2 * n + 1,
                        _ => n,
                    };
                    if members > 0 {
                        self.open.push(members);
                        continue;
                    }
                }
                other => {
                    panic!(
                        "a reply cannot begin with {:?}: {:?}",
                        other as char,
                        rest[..rest.len().min(80)].escape_ascii().to_string()
                    )
                }
            }
            loop {
                let Some(missing) = self.open.last_mut() else {
                    let end = self.at;
                    *self = Framer::default();
                    return Some(end);
                };
                *missing -= 1;
                if *missing > 0 {
                    break;
                }
                self.open.pop();
            }
        }
    }
}

/// Parses one complete reply.
pub(crate) fn parse(raw: &[u8]) -> Value {
    let mut at = 0;
    let value = parse_at(raw, &mut at);
    assert_eq!(at, raw.len(), "bytes after a reply: {:?}", raw.escape_ascii().to_string());
    value
}

fn parse_at(raw: &[u8], at: &mut usize) -> Value {
    let line_end = raw[*at..].windows(2).position(|w| w == b"\r\n").expect("a whole reply") + *at;
    let kind = raw[*at];
    let body = String::from_utf8_lossy(&raw[*at + 1..line_end]).into_owned();
    *at = line_end + 2;
    let blob = |at: &mut usize| -> Option<Vec<u8>> {
        let n: i64 = body.parse().expect("a length");
        let n = usize::try_from(n).ok()?;
        let bytes = raw[*at..*at + n].to_vec();
        assert_eq!(&raw[*at + n..*at + n + 2], b"\r\n", "a bulk string must end with CRLF");
        *at += n + 2;
        Some(bytes)
    };
    match kind {
        b'+' => Value::Simple(body),
        b'-' => Value::Error(body),
        b':' => Value::Int(body.parse().expect("an integer")),
        b'_' => Value::Nil,
        b',' => Value::Double(body),
        b'#' => Value::Bool(body == "t"),
        b'(' => Value::Big(body),
        b'$' => blob(at).map_or(Value::Nil, Value::Bulk),
        b'!' => Value::Error(String::from_utf8_lossy(&blob(at).expect("an error has a text")).into_owned()),
        b'=' => {
            Value::Verbatim(String::from_utf8_lossy(&blob(at).expect("a verbatim string has a text")[4..]).into_owned())
        }
        b'*' | b'~' | b'>' => {
            let n: i64 = body.parse().expect("a length");
            if n < 0 {
                return Value::Nil;
            }
            let items = (0..n).map(|_| parse_at(raw, at)).collect();
            match kind {
                b'*' => Value::Array(items),
                b'~' => Value::Set(items),
                _ => Value::Push(items),
            }
        }
        b'%' => {
            let n: usize = body.parse().expect("a length");
            Value::Map((0..n).map(|_| (parse_at(raw, at), parse_at(raw, at))).collect())
        }
        b'|' => {
            let n: usize = body.parse().expect("a length");
            for _ in 0..2 * n {
                parse_at(raw, at);
            }
            parse_at(raw, at)
        }
        other => panic!("a reply cannot begin with {:?}", other as char),
    }
}
