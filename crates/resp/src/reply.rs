//! Parses replies of nodes in RESP2 and RESP3: the end of a reply, its kind, and its elements.
//!
//! Nothing builds a tree or recurses: the end of a reply follows from one counter of outstanding elements, so a reply
//! nested a million deep costs eight bytes.

/// A reply that violates the protocol. Its connection can only be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyError {
    /// Offset of the invalid byte.
    pub at: usize,
}

impl std::fmt::Display for ReplyError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "reply is not RESP at byte {}", self.at)
    }
}

impl std::error::Error for ReplyError {}

/// Maximum line length (simple string, error, number) of a reply. A script can produce lines of any length
/// (`redis.status_reply`), and other clients share the connection that is closed on violation.
pub const LINE_MAX: usize = 64 << 20;

/// Finds the end of one reply at a time. Keeps its position between calls.
#[derive(Clone, Copy, Debug)]
pub struct ReplyScanner {
    pos: usize,
    left: u64,
    /// Bytes of the unfinished line already searched.
    line: usize,
}

impl Default for ReplyScanner {
    fn default() -> Self {
        Self { pos: 0, left: 1, line: 0 }
    }
}

/// Result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyScan {
    /// A complete reply of this many bytes.
    Complete(usize),
    /// More bytes are needed: the reply has at least this many.
    Incomplete(usize),
}

impl ReplyScanner {
    /// Scans the reply at the start of `buf`. `buf` must start with the same reply until it is complete.
    #[inline]
    pub fn scan(&mut self, buf: &[u8]) -> Result<ReplyScan, ReplyError> {
        while self.left > 0 {
            let Some(&kind) = buf.get(self.pos) else { return Ok(ReplyScan::Incomplete(self.pos + 1)) };
            match kind {
                b'$' | b'=' | b'!' => match length(buf, self.pos + 1)? {
                    Length::Incomplete => return Ok(ReplyScan::Incomplete(buf.len() + 1)),
                    Length::Null(next) => self.take(next, 0),
                    Length::Of(len, data) => {
                        let end = usize::try_from(len)
                            .ok()
                            .and_then(|len| data.checked_add(len)?.checked_add(2))
                            .ok_or(ReplyError { at: self.pos })?;
                        if buf.len() < end {
                            return Ok(ReplyScan::Incomplete(end));
                        }
                        if buf[end - 2..end] != *b"\r\n" {
                            return Err(ReplyError { at: end - 2 });
                        }
                        self.take(end, 0);
                    }
                },
                b'+' | b'-' | b':' | b'_' | b',' | b'#' | b'(' => {
                    let rest = &buf[self.pos..];
                    match memchr::memchr(b'\n', rest.get(self.line..).unwrap_or_default()).map(|end| self.line + end) {
                        Some(end) if end >= 2 && rest[end - 1] == b'\r' => self.take(self.pos + end + 1, 0),
                        Some(end) => return Err(ReplyError { at: self.pos + end }),
                        None if rest.len() > LINE_MAX => return Err(ReplyError { at: self.pos }),
                        None => {
                            self.line = rest.len();
                            return Ok(ReplyScan::Incomplete(buf.len() + 1));
                        }
                    }
                }
                b'*' | b'~' | b'>' | b'%' | b'|' => match length(buf, self.pos + 1)? {
                    Length::Incomplete => return Ok(ReplyScan::Incomplete(buf.len() + 1)),
                    Length::Null(next) => self.take(next, 0),
                    Length::Of(count, next) => {
                        let elements = if matches!(kind, b'%' | b'|') { count.checked_mul(2) } else { Some(count) };
                        let elements = elements.filter(|e| *e < 1 << 40).ok_or(ReplyError { at: self.pos })?;
                        if self.left > 1 << 50 {
                            return Err(ReplyError { at: self.pos });
                        }
                        self.take(next, elements);
                        // An attribute precedes its reply and does not count as one.
                        self.left += u64::from(kind == b'|');
                    }
                },
                _ => return Err(ReplyError { at: self.pos }),
            }
        }
        let len = self.pos;
        *self = Self::default();
        Ok(ReplyScan::Complete(len))
    }

    #[inline]
    fn take(&mut self, next: usize, elements: u64) {
        (self.pos, self.line) = (next, 0);
        self.left = self.left - 1 + elements;
    }
}

/// Follows a reply that is forwarded or discarded as it arrives, at any size. Never needs more than one header at a
/// time.
#[derive(Clone, Copy, Debug)]
pub struct ReplyFollower {
    /// Outstanding bytes of the current string, including its CRLF.
    string_left: u64,
    left: u64,
}

impl Default for ReplyFollower {
    fn default() -> Self {
        Self { string_left: 0, left: 1 }
    }
}

impl ReplyFollower {
    /// Processes the next bytes of the reply. Returns the number of bytes consumed, and whether the reply ends there.
    /// Bytes of an incomplete header are left for the next call.
    pub fn follow(&mut self, buf: &[u8]) -> Result<(usize, bool), ReplyError> {
        let mut pos = 0;
        loop {
            let here = ((buf.len() - pos) as u64).min(self.string_left);
            for (before_end, expected) in [(2, b'\r'), (1, b'\n')] {
                // The byte `before_end` before the end of the string, if it is in this buffer.
                if self.string_left >= before_end && here > self.string_left - before_end {
                    let at = pos + (self.string_left - before_end) as usize;
                    if buf[at] != expected {
                        return Err(ReplyError { at });
                    }
                }
            }
            pos += here as usize;
            self.string_left -= here;
            if self.string_left > 0 {
                return Ok((pos, false));
            }
            if self.left == 0 {
                return Ok((pos, true));
            }
            let mut step = ReplyScanner::default();
            let rest = &buf[pos..];
            match rest.first() {
                None => return Ok((pos, false)),
                Some(b'$' | b'=' | b'!') => match length(rest, 1)? {
                    Length::Incomplete => return Ok((pos, false)),
                    Length::Null(next) => pos += next,
                    Length::Of(len, data) => {
                        pos += data;
                        self.string_left = len + 2;
                    }
                },
                Some(kind @ (b'*' | b'~' | b'>' | b'%' | b'|')) => match length(rest, 1)? {
                    Length::Incomplete => return Ok((pos, false)),
                    Length::Null(next) => pos += next,
                    Length::Of(count, next) => {
                        let elements = if matches!(kind, b'%' | b'|') { count.saturating_mul(2) } else { count };
                        if elements > 1 << 40 || self.left > 1 << 50 {
                            return Err(ReplyError { at: pos });
                        }
                        self.left += elements + u64::from(*kind == b'|');
                        pos += next;
                    }
                },
                Some(_) => match step.scan(rest)? {
                    ReplyScan::Complete(len) => pos += len,
                    ReplyScan::Incomplete(_) => return Ok((pos, false)),
                },
            }
            self.left -= 1;
        }
    }
}

enum Length {
    Incomplete,
    Null(usize),
    Of(u64, usize),
}

#[inline]
fn length(buf: &[u8], start: usize) -> Result<Length, ReplyError> {
    let mut pos = start;
    let mut value: u64 = 0;
    while let Some(&byte) = buf.get(pos) {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            if byte == b'\r' && pos > start {
                return match buf.get(pos + 1) {
                    None => Ok(Length::Incomplete),
                    Some(b'\n') => Ok(Length::Of(value, pos + 2)),
                    Some(_) => Err(ReplyError { at: pos + 1 }),
                };
            }
            let rest = &buf[start..];
            let null = b"-1\r\n";
            if rest.len() < null.len() && null.starts_with(rest) {
                return Ok(Length::Incomplete);
            }
            return if rest.starts_with(null) {
                Ok(Length::Null(start + null.len()))
            } else {
                Err(ReplyError { at: pos })
            };
        }
        if pos - start >= 18 {
            return Err(ReplyError { at: pos });
        }
        value = value * 10 + u64::from(digit);
        pos += 1;
    }
    Ok(Length::Incomplete)
}

/// Elements of a complete aggregate reply (array, set, push; keys and values of a map alternate), as raw bytes. Empty
/// for other kinds and for null.
pub fn elements(reply: &[u8]) -> Elements<'_> {
    let is_aggregate = matches!(reply.first(), Some(b'*' | b'~' | b'>' | b'%'));
    match if is_aggregate { length(reply, 1) } else { Ok(Length::Incomplete) } {
        Ok(Length::Of(count, next)) => {
            let left = if reply[0] == b'%' { count.saturating_mul(2) } else { count };
            Elements { rest: &reply[next..], left }
        }
        _ => Elements { rest: &[], left: 0 },
    }
}

/// Iterator of [`elements`].
#[derive(Clone, Debug)]
pub struct Elements<'a> {
    rest: &'a [u8],
    left: u64,
}

impl Elements<'_> {
    /// Outstanding elements.
    pub fn remaining(&self) -> u64 {
        self.left
    }
}

impl<'a> Iterator for Elements<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        if self.left == 0 {
            return None;
        }
        let Ok(ReplyScan::Complete(len)) = ReplyScanner::default().scan(self.rest) else {
            self.left = 0;
            return None;
        };
        let (element, rest) = self.rest.split_at(len);
        self.rest = rest;
        self.left -= 1;
        Some(element)
    }
}

/// Text of a complete string-like reply: bulk, simple, verbatim (without its format), error, number. `None` for null
/// and aggregates.
pub fn text(reply: &[u8]) -> Option<&[u8]> {
    match reply.first()? {
        b'$' | b'!' => match length(reply, 1).ok()? {
            Length::Of(len, data) => reply.get(data..data + usize::try_from(len).ok()?),
            _ => None,
        },
        b'=' => match length(reply, 1).ok()? {
            Length::Of(len, data) => reply.get(data + 4..data + usize::try_from(len).ok()?),
            _ => None,
        },
        b'+' | b'-' | b':' | b',' | b'(' | b'#' => reply.get(1..reply.len().checked_sub(2)?),
        _ => None,
    }
}

/// Value of an integer reply, or of a string with an integer.
pub fn integer(reply: &[u8]) -> Option<i64> {
    std::str::from_utf8(text(reply)?).ok()?.parse().ok()
}

/// Text of an error without the command arguments that it quotes: logs and reports must not contain keys and values.
pub fn redacted_error(error: &[u8]) -> String {
    const ARGUMENTS: &str = ", with args beginning with";
    let whole = text(error).unwrap_or(error);
    let told = String::from_utf8_lossy(whole);
    told.find(ARGUMENTS).map_or(&*told, |at| &told[..at]).trim_end().to_owned()
}

/// Whether the reply is an error of either protocol.
#[inline]
pub fn is_error(reply: &[u8]) -> bool {
    matches!(reply.first(), Some(b'-' | b'!'))
}

/// Whether the reply is a null of either protocol.
pub fn is_null(reply: &[u8]) -> bool {
    matches!(reply, b"$-1\r\n" | b"*-1\r\n" | b"_\r\n")
}

/// Maximum nesting inspected by [`may_be_missing_key`]: replies to reads nest no deeper.
const DEPTH_MAX: u32 = 8;

/// Whether a reply to a read may be for a missing key: null, an error, empty, zero, -1, -2, `none`, or an aggregate of
/// only such elements. Any other reply proves that the key exists. Existing keys may cause such replies too (`HGET` of
/// a missing field).
#[must_use]
pub fn may_be_missing_key(reply: &[u8]) -> bool {
    fn look(reply: &[u8], depth: u32) -> bool {
        match reply.first() {
            None | Some(b'-' | b'!' | b'_' | b'|') => true,
            Some(b'*' | b'~' | b'>' | b'%') => depth == 0 || elements(reply).all(|element| look(element, depth - 1)),
            Some(b'#') => reply == b"#f\r\n",
            _ => is_null(reply) || matches!(text(reply), Some(b"" | b"0" | b"-1" | b"-2" | b"none")),
        }
    }
    look(reply, DEPTH_MAX)
}

/// Whether a reply to a read means that the node lacks the key, in a double read by a protocol as published. The papers
/// have only `GET`, whose reply is null without a key. So a string proves the key, also `""`, `0` and `-1`. Replies of
/// other types are judged as by [`may_be_missing_key`], because reads such as `EXISTS` and `HGETALL` have no null reply.
#[must_use]
pub fn is_missing_key_as_published(reply: &[u8]) -> bool {
    is_null(reply) || !matches!(reply.first(), Some(b'$' | b'=')) && may_be_missing_key(reply)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_errors_contain_no_arguments() {
        let refused = b"-ERR unknown command 'RESTORE', with args beginning with: 'user:1' '0' 'secret' \r\n";
        assert_eq!(redacted_error(refused), "ERR unknown command 'RESTORE'");
        let older =
            b"ERR Target instance replied with error: ERR unknown command `GETK`, with args beginning with: `user:1`, ";
        assert_eq!(redacted_error(older), "ERR Target instance replied with error: ERR unknown command `GETK`");
        assert_eq!(redacted_error(b"!10\r\nOOM is full\r\n"), "OOM is ful");
        assert_eq!(
            redacted_error(b"-BUSYKEY Target key name already exists.\r\n"),
            "BUSYKEY Target key name already exists."
        );
    }

    const REPLIES: &[&[u8]] = &[
        b"+OK\r\n",
        b"-ERR x\r\n",
        b":-1\r\n",
        b"$5\r\nhe\r\no\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n*0\r\n$-1\r\n",
        b"_\r\n",
        b",3.14\r\n",
        b"#t\r\n",
        b"(123\r\n",
        b"!5\r\nERR x\r\n",
        b"=7\r\ntxt:abc\r\n",
        b"%1\r\n+a\r\n~2\r\n:1\r\n:2\r\n",
        b"|1\r\n+ttl\r\n:3\r\n$1\r\nx\r\n",
        b">2\r\n+a\r\n+b\r\n",
    ];

    #[test]
    fn the_end_of_every_kind_of_reply_is_found_for_any_split() {
        for reply in REPLIES {
            let buf = [reply, &b"+NEXT\r\n"[..]].concat();
            for cut in 0..reply.len() {
                let mut scanner = ReplyScanner::default();
                let first = scanner.scan(&buf[..cut]).expect("well-formed");
                assert!(
                    matches!(first, ReplyScan::Incomplete(need) if need > cut && need <= reply.len()),
                    "{first:?} {cut}"
                );
                assert_eq!(scanner.scan(&buf), Ok(ReplyScan::Complete(reply.len())), "{}", reply.escape_ascii());
            }
        }
    }

    #[test]
    fn invalid_replies_are_refused() {
        assert!(ReplyFollower::default().follow(b"$3\r\nabcde").is_err());
        for bad in [
            &b"x\r\n"[..],
            b"$x\r\n",
            b"$-2\r\n",
            b"+a\n",
            b"$3\r\nabcde",
            b"*9999999999999999999\r\n",
            b"%999999999999999999\r\n",
            b"$1\rx",
        ] {
            assert!(ReplyScanner::default().scan(bad).is_err(), "{}", bad.escape_ascii());
        }
    }

    #[test]
    fn deep_nesting_costs_nothing() {
        let deep = b"*1\r\n".repeat(1_000_000);
        let mut scanner = ReplyScanner::default();
        assert!(matches!(scanner.scan(&deep), Ok(ReplyScan::Incomplete(_))));
    }

    #[test]
    fn a_reply_is_followed_to_its_end_for_any_split() {
        for reply in REPLIES {
            let buf = [reply, &b"+NEXT\r\n"[..]].concat();
            for cut in 0..reply.len() {
                let mut follower = ReplyFollower::default();
                let (taken, done) = follower.follow(&buf[..cut]).expect("well-formed");
                assert!(!done && taken <= cut);
                assert_eq!(
                    follower.follow(&buf[taken..]),
                    Ok((reply.len() - taken, true)),
                    "{} cut at {cut}",
                    reply.escape_ascii()
                );
            }
        }
    }

    #[test]
    fn a_long_line_is_searched_once() {
        let line = [b"*2\r\n+".as_slice(), &vec![b'x'; 3 << 20], b"\r\n:7\r\n"].concat();
        let mut scanner = ReplyScanner::default();
        let mut at = 0;
        let len = loop {
            at = (at + 100_003).min(line.len());
            match scanner.scan(&line[..at]).expect("RESP") {
                ReplyScan::Complete(len) => break len,
                ReplyScan::Incomplete(_) => assert!(at < line.len()),
            }
        };
        assert_eq!((len, scanner.line), (line.len(), 0));
        // The line end in two parts.
        let mut scanner = ReplyScanner::default();
        for (piece, whole) in [("+abc", false), ("+abc\r", false), ("+abc\r\n", true)] {
            assert_eq!(matches!(scanner.scan(piece.as_bytes()), Ok(ReplyScan::Complete(6))), whole, "{piece:?}");
        }
    }

    #[test]
    fn replies_for_missing_keys_are_distinguished() {
        let of_none = [
            "$-1\r\n",
            "_\r\n",
            "*-1\r\n",
            ":0\r\n",
            ":-2\r\n",
            "+none\r\n",
            "$0\r\n\r\n",
            "*0\r\n",
            "%0\r\n",
            "#f\r\n",
            "-ERR no such key\r\n",
            "*2\r\n$1\r\n0\r\n*0\r\n",
            "*2\r\n:0\r\n$-1\r\n",
        ];
        let of_one = [
            "$1\r\na\r\n",
            ":1\r\n",
            "+string\r\n",
            "*2\r\n$-1\r\n$1\r\nv\r\n",
            "#t\r\n",
            ",1.5\r\n",
            "*1\r\n*1\r\n:7\r\n",
        ];
        assert!(of_none.iter().all(|reply| may_be_missing_key(reply.as_bytes())));
        assert!(of_one.iter().all(|reply| !may_be_missing_key(reply.as_bytes())));
        let deep = [b"*1\r\n".repeat(100_000), b":7\r\n".to_vec()].concat();
        assert!(may_be_missing_key(&deep), "the depth is bounded");
    }

    #[test]
    fn strings_prove_keys_to_protocols_as_published() {
        for value in ["$0\r\n\r\n", "$1\r\n0\r\n", "$2\r\n-1\r\n", "=5\r\ntxt:0\r\n", "$1\r\na\r\n"] {
            assert!(!is_missing_key_as_published(value.as_bytes()), "{value:?}");
        }
        for missing in
            ["$-1\r\n", "_\r\n", "*-1\r\n", ":0\r\n", "*0\r\n", "%0\r\n", "+none\r\n", "-ERR no such key\r\n"]
        {
            assert!(is_missing_key_as_published(missing.as_bytes()), "{missing:?}");
        }
    }

    #[test]
    fn replies_are_split_into_elements() {
        let array = b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n*0\r\n$-1\r\n";
        let parts: Vec<_> = elements(array).collect();
        assert_eq!(parts, [&b":1\r\n"[..], b"*2\r\n$1\r\na\r\n*0\r\n", b"$-1\r\n"]);
        assert_eq!(text(b"=7\r\ntxt:abc\r\n"), Some(&b"abc"[..]));
        assert_eq!(integer(b"$2\r\n42\r\n"), Some(42));
        assert!(is_null(b"_\r\n") && !is_null(b"$0\r\n\r\n"));
    }
}
