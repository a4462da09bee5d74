//! Encodes requests and parses replies.
//!
//! A separate parser from that of `switchyard-resp`, because the load generator checks the router: with a shared
//! parser, it could not detect that parser's bugs. RESP2 only, which is sufficient for a client that never sends HELLO
//! 3.

use std::fmt;

/// Maximum nesting of arrays. Replies to the commands used never exceed two levels; the limit protects the stack from
/// an invalid peer.
const MAX_DEPTH: usize = 8;

/// One reply, borrowed from its buffer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply<'a> {
    /// `+OK`
    Status(&'a [u8]),
    /// `-ERR ...`
    Error(&'a [u8]),
    /// `:1`
    Integer(i64),
    /// `$3\r\nabc`
    Bulk(&'a [u8]),
    /// `$-1` or `*-1`
    Nil,
    /// `*2...`
    Array(Vec<Reply<'a>>),
}

impl fmt::Display for Reply<'_> {
    /// Formats any reply on one line, for error messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |bytes: &[u8]| {
            let shown = &bytes[..bytes.len().min(60)];
            let dots = if bytes.len() > shown.len() { "..." } else { "" };
            format!("{}{dots}", shown.escape_ascii())
        };
        match self {
            Self::Status(s) => write!(f, "+{}", text(s)),
            Self::Error(e) => write!(f, "-{}", text(e)),
            Self::Integer(i) => write!(f, ":{i}"),
            Self::Bulk(b) => write!(f, "{} bytes \"{}\"", b.len(), text(b)),
            Self::Nil => f.write_str("nil"),
            Self::Array(items) => {
                write!(f, "[")?;
                for (i, item) in items.iter().take(4).enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                write!(f, "{}]", if items.len() > 4 { ", ..." } else { "" })
            }
        }
    }
}

/// Error for bytes that are not a valid reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed(String);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the peer sent bytes that are not a RESP2 reply: {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Appends one request.
pub fn encode(out: &mut Vec<u8>, args: &[&[u8]]) {
    switchyard_resp::encode::command(out, args.iter().copied());
}

/// Parses one reply at the start of `buf`. Returns the reply and its length, or `None` if more bytes are needed.
pub fn parse(buf: &[u8]) -> Result<Option<(Reply<'_>, usize)>, Malformed> {
    parse_at(buf, 0, 0)
}

fn parse_at(buf: &[u8], start: usize, depth: usize) -> Result<Option<(Reply<'_>, usize)>, Malformed> {
    let Some(&kind) = buf.get(start) else {
        return Ok(None);
    };
    let Some(line_len) = buf[start + 1..].iter().position(|&b| b == b'\r') else {
        return Ok(None);
    };
    let line = &buf[start + 1..start + 1 + line_len];
    let after = start + 1 + line_len + 2;
    if buf.len() < after {
        return Ok(None);
    }
    if buf[after - 1] != b'\n' {
        return Err(Malformed(format!("\\r without \\n after \"{}\"", line.escape_ascii())));
    }
    match kind {
        b'+' => Ok(Some((Reply::Status(line), after))),
        b'-' => Ok(Some((Reply::Error(line), after))),
        b':' => Ok(Some((Reply::Integer(number(line)?), after))),
        b'$' => {
            let Ok(len) = usize::try_from(number(line)?) else {
                return Ok(Some((Reply::Nil, after)));
            };
            let Some(end) = after.checked_add(len) else {
                return Err(Malformed(format!("a bulk string of {len} bytes")));
            };
            match buf.get(end..end.saturating_add(2)) {
                None => Ok(None),
                Some(b"\r\n") => Ok(Some((Reply::Bulk(&buf[after..end]), end + 2))),
                Some(other) => {
                    Err(Malformed(format!("a bulk string of {len} bytes ended with \"{}\"", other.escape_ascii())))
                }
            }
        }
        b'*' => {
            let Ok(count) = usize::try_from(number(line)?) else {
                return Ok(Some((Reply::Nil, after)));
            };
            if depth == MAX_DEPTH {
                return Err(Malformed(format!("arrays nested more than {MAX_DEPTH} deep")));
            }
            let mut items = Vec::new(); // not with_capacity(count): a declared count must not cost memory
            let mut at = after;
            for _ in 0..count {
                match parse_at(buf, at, depth + 1)? {
                    None => return Ok(None),
                    Some((item, next)) => {
                        items.push(item);
                        at = next;
                    }
                }
            }
            Ok(Some((Reply::Array(items), at)))
        }
        other => Err(Malformed(format!("a reply that starts with \"{}\"", other.escape_ascii()))),
    }
}

fn number(line: &[u8]) -> Result<i64, Malformed> {
    std::str::from_utf8(line)
        .ok()
        .and_then(|s| s.parse().ok())
        .ok_or_else(|| Malformed(format!("\"{}\" instead of a number", line.escape_ascii())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_encoded_as_redis_expects() {
        let mut out = Vec::new();
        encode(&mut out, &[b"SET", b"k", b""]);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n");
    }

    #[test]
    fn every_kind_of_reply_is_parsed_only_when_complete() {
        let bytes = b"*7\r\n+OK\r\n-ERR no\r\n:-7\r\n$3\r\na\r\n\r\n$-1\r\n*-1\r\n*1\r\n$0\r\n\r\n";
        let whole = Reply::Array(vec![
            Reply::Status(b"OK"),
            Reply::Error(b"ERR no"),
            Reply::Integer(-7),
            Reply::Bulk(b"a\r\n"),
            Reply::Nil,
            Reply::Nil,
            Reply::Array(vec![Reply::Bulk(b"")]),
        ]);
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut]), Ok(None), "cut at {cut}");
        }
        let mut longer = bytes.to_vec();
        longer.extend_from_slice(b":1\r\n");
        assert_eq!(parse(&longer), Ok(Some((whole, bytes.len()))));
    }

    #[test]
    fn invalid_replies_are_refused() {
        for bad in [&b"hello\r\n"[..], b"$3\r\nabcdef\r\n", b":x\r\n", b"+a\rb", b"$99999999999999999999\r\n"] {
            assert!(parse(bad).is_err(), "{}", bad.escape_ascii());
        }
        let deep = b"*1\r\n".repeat(100);
        assert!(parse(&deep).is_err());
    }

    #[test]
    fn a_declared_length_alone_costs_nothing() {
        assert_eq!(parse(b"*1000000000\r\n:1\r\n"), Ok(None));
        assert_eq!(parse(b"$1000000000000\r\nabc"), Ok(None));
    }
}
