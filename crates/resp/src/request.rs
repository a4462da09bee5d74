//! Parses commands of clients: multibulk (`*2\r\n$3\r\nGET\r\n$1\r\nk\r\n`) and inline (`GET k\r\n`).

/// Position of one argument in the scanned buffer. `u32`, because a buffered request is bounded far below 4 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Span {
    /// Offset of the first byte.
    pub start: u32,
    /// Length in bytes.
    pub len: u32,
}

/// Arguments of one command: those received so far, and the declared number.
///
/// A large argument is not buffered: then `spans` contains only the arguments before it, and `declared` the total
/// number.
#[derive(Clone, Copy, Debug)]
pub struct Args<'a> {
    buf: &'a [u8],
    spans: &'a [Span],
    declared: usize,
}

impl<'a> Args<'a> {
    /// Arguments of a complete command.
    #[inline]
    pub fn new(buf: &'a [u8], spans: &'a [Span]) -> Self {
        Self { buf, spans, declared: spans.len() }
    }

    /// Arguments of an incomplete command; `declared` is the total number.
    #[inline]
    pub fn partial(buf: &'a [u8], spans: &'a [Span], declared: usize) -> Self {
        Self { buf, spans, declared }
    }

    /// Declared number of arguments, including the command name (Redis's `argc`).
    #[inline]
    pub fn len(&self) -> usize {
        self.declared
    }

    /// Whether no argument was declared.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.declared == 0
    }

    /// Number of arguments received.
    #[inline]
    pub fn known(&self) -> usize {
        self.spans.len()
    }

    /// Argument `index` (0 is the command name), or `None` if not received (yet).
    #[inline]
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        let span = self.spans.get(index)?;
        self.buf.get(span.start as usize..span.start as usize + span.len as usize)
    }

    /// All arguments received.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + Clone + use<'a> {
        let buf = self.buf;
        self.spans.iter().map(move |s| &buf[s.start as usize..s.start as usize + s.len as usize])
    }
}

/// A command that violates the protocol. `Display` is Redis's error text after `-ERR `; the connection is then closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolError {
    /// A multibulk count line longer than 64 KiB.
    BigMultibulkCount,
    /// The multibulk count is not a number, or too large.
    InvalidMultibulkLength,
    /// More arguments than permitted before authentication.
    UnauthenticatedMultibulkLength,
    /// A bulk length line longer than 64 KiB.
    BigBulkCount,
    /// A byte other than `$` at the start of an argument.
    ExpectedDollar(u8),
    /// The bulk length is not a number, negative, or larger than allowed.
    InvalidBulkLength,
    /// A longer argument than permitted before authentication.
    UnauthenticatedBulkLength,
    /// An inline command longer than 64 KiB.
    BigInline,
    /// An inline command with an unclosed quote.
    UnbalancedQuotes,
    /// The whole request is larger than allowed.
    TooLarge,
    /// A large argument was not followed by CRLF.
    MissingCrlf,
}

impl std::fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Protocol error: ")?;
        match self {
            Self::BigMultibulkCount => f.write_str("too big mbulk count string"),
            Self::InvalidMultibulkLength => f.write_str("invalid multibulk length"),
            Self::UnauthenticatedMultibulkLength => f.write_str("unauthenticated multibulk length"),
            Self::BigBulkCount => f.write_str("too big bulk count string"),
            Self::ExpectedDollar(got) => write!(f, "expected '$', got '{}'", *got as char),
            Self::InvalidBulkLength => f.write_str("invalid bulk length"),
            Self::UnauthenticatedBulkLength => f.write_str("unauthenticated bulk length"),
            Self::BigInline => f.write_str("too big inline request"),
            Self::UnbalancedQuotes => f.write_str("unbalanced quotes in request"),
            Self::TooLarge => f.write_str("request larger than client-query-buffer-limit"),
            Self::MissingCrlf => f.write_str("argument not followed by CRLF"),
        }
    }
}

impl std::error::Error for ProtocolError {}

impl ProtocolError {
    /// Error text for the client, including `ERR `. Bytes, because Redis quotes the invalid byte unchanged (`%c`).
    pub fn reply_text(&self) -> Vec<u8> {
        match self {
            Self::ExpectedDollar(got) => [b"ERR Protocol error: expected '$', got '", &[*got][..], b"'"].concat(),
            other => format!("ERR {other}").into_bytes(),
        }
    }
}

/// Maximum line of a header or an inline command, as in Redis (`PROTO_INLINE_MAX_SIZE`).
pub const LINE_MAX: usize = 64 * 1024;

/// Limits for a client's commands.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Maximum argument, in bytes (Redis `proto-max-bulk-len`).
    pub argument_max: usize,
    /// Arguments of at least this many bytes are not buffered: [`Scan::Large`].
    pub large: usize,
    /// False until the client has authenticated: then at most 10 arguments of 16 KiB, as in Redis.
    pub authenticated: bool,
}

impl Limits {
    /// No limits, for requests already accepted.
    pub const NONE: Limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
}

/// Result of a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scan {
    /// The command is incomplete; call again with more bytes.
    Incomplete,
    /// A complete command of `len` bytes. `canonical` is false if other bytes replace a CRLF, which Redis does not
    /// check. Such a command must not be forwarded unchanged, because another parser might see a different one.
    Complete {
        /// Size of the command in bytes.
        len: usize,
        /// Whether the bytes may be forwarded unchanged.
        canonical: bool,
    },
    /// An empty command (`*0\r\n`, an empty line): skip `len` bytes.
    Empty {
        /// Bytes to skip.
        len: usize,
    },
    /// An inline command of `len` bytes, including its line end; see [`inline_to_multibulk`].
    Inline {
        /// Length of the line in bytes.
        len: usize,
    },
    /// The next argument is large and incomplete. The arguments before it are known; its bytes start at `data`.
    Large {
        /// Offset of the first byte of the large argument.
        data: usize,
        /// Length of the large argument.
        len: usize,
        /// Number of arguments after it.
        after: usize,
    },
}

/// Finds one command at a time. Keeps its position between calls, so that a command of a million arguments in a
/// thousand pieces is scanned once. The buffer must start with the same command each time; after `Complete`, `Empty`,
/// or `Inline`, call [`Scanner::reset`].
#[derive(Debug, Default)]
pub struct Scanner {
    spans: Vec<Span>,
    declared: usize,
    pos: usize,
    uncanonical: bool,
}

enum Line {
    Number(i64, usize),
    Bad,
    Incomplete,
    TooLong,
}

/// Parses a number like Redis's `string2ll` (no plus, no leading zeros), followed by CR and any byte.
#[inline]
fn number_line(buf: &[u8], start: usize, uncanonical: &mut bool) -> Line {
    // The usual case: one to ten digits, complete.
    let mut pos = start;
    let mut value: i64 = 0;
    while let Some(&byte) = buf.get(pos) {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            break;
        }
        if pos - start >= 18 {
            return slow_number_line(buf, start);
        }
        value = value * 10 + i64::from(digit);
        pos += 1;
    }
    let leading_zero = pos - start > 1 && buf[start] == b'0';
    if pos > start && !leading_zero && buf.get(pos) == Some(&b'\r') {
        return match buf.get(pos + 1) {
            Some(byte) => {
                *uncanonical |= *byte != b'\n';
                Line::Number(value, pos + 2)
            }
            None => Line::Incomplete,
        };
    }
    slow_number_line(buf, start)
}

#[cold]
fn slow_number_line(buf: &[u8], start: usize) -> Line {
    let rest = buf.get(start..).unwrap_or_default();
    let Some(cr) = memchr::memchr(b'\r', &rest[..rest.len().min(LINE_MAX + 1)]) else {
        return if rest.len() > LINE_MAX { Line::TooLong } else { Line::Incomplete };
    };
    if rest.len() < cr + 2 {
        return Line::Incomplete;
    }
    // Only negative numbers and 19-digit ones are valid here.
    let text = &rest[..cr];
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let canonical = digits == b"0" && text.len() == 1 || digits.first().is_some_and(|d| (b'1'..=b'9').contains(d));
    match std::str::from_utf8(text).ok().filter(|_| canonical).and_then(|t| t.parse().ok()) {
        Some(value) => Line::Number(value, start + cr + 2),
        None => Line::Bad,
    }
}

impl Scanner {
    /// Arguments found so far.
    #[inline]
    pub fn args<'a>(&'a self, buf: &'a [u8]) -> Args<'a> {
        Args::partial(buf, &self.spans, self.declared)
    }

    /// Resets to the next command. Keeps the memory up to a limit.
    #[inline]
    pub fn reset(&mut self) {
        self.spans.clear();
        self.declared = 0;
        self.pos = 0;
        self.uncanonical = false;
        if self.spans.capacity() > 4096 {
            self.spans.shrink_to(64);
        }
    }

    /// Whether a command is incomplete.
    pub fn is_mid_command(&self) -> bool {
        self.declared > 0
    }

    /// Memory used, in bytes.
    pub fn memory(&self) -> usize {
        size_of::<Self>() + self.spans.capacity() * size_of::<Span>()
    }

    /// Number of outstanding bytes of the current argument after `buf`, if its length is known.
    pub fn missing(&self, buf: &[u8]) -> usize {
        if self.declared == 0 || buf.get(self.pos) != Some(&b'$') {
            return 0;
        }
        match number_line(buf, self.pos + 1, &mut false) {
            Line::Number(len, data) if len >= 0 => (data + 2).saturating_add(len as usize).saturating_sub(buf.len()),
            _ => 0,
        }
    }

    /// Creates the scanner of a complete request that was accepted before; `None` if it is incomplete.
    pub fn again(request: &[u8]) -> Option<Self> {
        let mut scanner = Self::default();
        matches!(scanner.scan(request, &Limits::NONE), Ok(Scan::Complete { .. })).then_some(scanner)
    }

    /// Scans the command at the start of `buf`.
    #[inline]
    pub fn scan(&mut self, buf: &[u8], limits: &Limits) -> Result<Scan, ProtocolError> {
        if self.declared == 0 {
            match buf.first() {
                None => return Ok(Scan::Incomplete),
                Some(b'*') => {}
                Some(_) => return Self::inline(buf),
            }
            match number_line(buf, 1, &mut self.uncanonical) {
                Line::Incomplete => return Ok(Scan::Incomplete),
                Line::TooLong => return Err(ProtocolError::BigMultibulkCount),
                Line::Bad => return Err(ProtocolError::InvalidMultibulkLength),
                Line::Number(count, _) if count > i64::from(i32::MAX) => {
                    return Err(ProtocolError::InvalidMultibulkLength);
                }
                Line::Number(count, _) if count > 10 && !limits.authenticated => {
                    return Err(ProtocolError::UnauthenticatedMultibulkLength);
                }
                Line::Number(count, next) if count <= 0 => return Ok(Scan::Empty { len: next }),
                Line::Number(count, next) => {
                    self.declared = count as usize;
                    self.pos = next;
                }
            }
        }
        while self.spans.len() < self.declared {
            match buf.get(self.pos) {
                None => return Ok(Scan::Incomplete),
                Some(b'$') => {}
                Some(&other) => {
                    // Redis searches for the line end before it checks the first byte.
                    return match slow_number_line(buf, self.pos) {
                        Line::Incomplete => Ok(Scan::Incomplete),
                        Line::TooLong => Err(ProtocolError::BigBulkCount),
                        _ => Err(ProtocolError::ExpectedDollar(other)),
                    };
                }
            }
            let (len, data) = match number_line(buf, self.pos + 1, &mut self.uncanonical) {
                Line::Incomplete => return Ok(Scan::Incomplete),
                Line::TooLong => return Err(ProtocolError::BigBulkCount),
                Line::Number(len, next) if len >= 0 && len as u64 <= limits.argument_max as u64 => (len as usize, next),
                _ => return Err(ProtocolError::InvalidBulkLength),
            };
            if !limits.authenticated && len > 16 * 1024 {
                return Err(ProtocolError::UnauthenticatedBulkLength);
            }
            let end = data + len;
            if buf.len() < end + 2 {
                if len >= limits.large {
                    return Ok(Scan::Large { data, len, after: self.declared - self.spans.len() - 1 });
                }
                return Ok(Scan::Incomplete);
            }
            self.uncanonical |= buf[end..end + 2] != *b"\r\n";
            self.spans.push(Span { start: data as u32, len: len as u32 });
            self.pos = end + 2;
        }
        Ok(Scan::Complete { len: self.pos, canonical: !self.uncanonical })
    }

    #[cold]
    fn inline(buf: &[u8]) -> Result<Scan, ProtocolError> {
        match memchr::memchr(b'\n', &buf[..buf.len().min(LINE_MAX + 1)]) {
            None if buf.len() > LINE_MAX => Err(ProtocolError::BigInline),
            None => Ok(Scan::Incomplete),
            Some(end) if buf[..end].iter().all(|b| is_space(*b)) => Ok(Scan::Empty { len: end + 1 }),
            Some(end) => Ok(Scan::Inline { len: end + 1 }),
        }
    }
}

/// Converts an inline command to multibulk, with the quoting rules of `redis-cli` (Redis's `sdssplitargs`). Double
/// quotes allow the escapes `\n \r \t \b \a \xHH`, single quotes `\'`. A closing quote must precede a space
/// or the end.
pub fn inline_to_multibulk(line: &[u8], out: &mut Vec<u8>) -> Result<(), ProtocolError> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let args = split_inline(line)?;
    if args.is_empty() {
        return Ok(());
    }
    crate::encode::command(out, args.iter().map(Vec::as_slice));
    Ok(())
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
}

fn split_inline(line: &[u8]) -> Result<Vec<Vec<u8>>, ProtocolError> {
    // C strings end at NUL, and so do Redis's inline commands.
    let line = &line[..memchr::memchr(0, line).unwrap_or(line.len())];
    let at = |i: usize| line.get(i).copied();
    let closes = |i: usize| at(i).is_none_or(is_space);
    let hex = |i: usize| at(i).and_then(|b| (b as char).to_digit(16)).map(|d| d as u8);
    let mut args = Vec::new();
    let mut i = 0;
    loop {
        while at(i).is_some_and(is_space) {
            i += 1;
        }
        if at(i).is_none() {
            return Ok(args);
        }
        let mut current = Vec::new();
        loop {
            match at(i) {
                None => break,
                // Fewer than the bytes skipped before an argument: a form feed within the argument belongs to it.
                Some(b' ' | b'\t' | b'\n' | b'\r') => break,
                Some(b'"') => {
                    i += 1;
                    loop {
                        match (at(i), at(i + 1)) {
                            (None, _) => return Err(ProtocolError::UnbalancedQuotes),
                            (Some(b'\\'), Some(b'x')) if hex(i + 2).is_some() && hex(i + 3).is_some() => {
                                current.push(hex(i + 2).unwrap_or(0) * 16 + hex(i + 3).unwrap_or(0));
                                i += 4;
                            }
                            (Some(b'\\'), Some(escaped)) => {
                                current.push(match escaped {
                                    b'n' => b'\n',
                                    b'r' => b'\r',
                                    b't' => b'\t',
                                    b'b' => 8,
                                    b'a' => 7,
                                    other => other,
                                });
                                i += 2;
                            }
                            (Some(b'"'), _) if closes(i + 1) => break,
                            (Some(b'"'), _) => return Err(ProtocolError::UnbalancedQuotes),
                            (Some(byte), _) => {
                                current.push(byte);
                                i += 1;
                            }
                        }
                    }
                    i += 1;
                    break;
                }
                Some(b'\'') => {
                    i += 1;
                    loop {
                        match (at(i), at(i + 1)) {
                            (None, _) => return Err(ProtocolError::UnbalancedQuotes),
                            (Some(b'\\'), Some(b'\'')) => {
                                current.push(b'\'');
                                i += 2;
                            }
                            (Some(b'\''), _) if closes(i + 1) => break,
                            (Some(b'\''), _) => return Err(ProtocolError::UnbalancedQuotes),
                            (Some(byte), _) => {
                                current.push(byte);
                                i += 1;
                            }
                        }
                    }
                    i += 1;
                    break;
                }
                Some(byte) => {
                    current.push(byte);
                    i += 1;
                }
            }
        }
        args.push(current);
    }
}

/// Follows a command whose large arguments are forwarded as they arrive. Finds its end and checks its syntax.
#[derive(Clone, Copy, Debug)]
pub struct Follower {
    /// Outstanding bytes of the current argument, including its CRLF.
    argument_left: usize,
    /// Arguments after the current one.
    after: usize,
}

impl Follower {
    /// Starts within an argument with `left` outstanding bytes (without CRLF) and `after` further arguments.
    pub fn new(left: usize, after: usize) -> Self {
        Self { argument_left: left + 2, after }
    }

    /// Processes the next bytes of the command. Returns the number of bytes to forward now, and whether the command
    /// ends with them. Bytes of an incomplete header are left for the next call.
    pub fn follow(&mut self, buf: &[u8], limits: &Limits) -> Result<(usize, bool), ProtocolError> {
        let mut pos = 0;
        loop {
            let here = (buf.len() - pos).min(self.argument_left);
            for (index, expected) in [(2, b'\r'), (1, b'\n')] {
                // The byte `index` before the end of the argument, if it is in this buffer.
                if self.argument_left >= index
                    && here > self.argument_left - index
                    && buf[pos + self.argument_left - index] != expected
                {
                    return Err(ProtocolError::MissingCrlf);
                }
            }
            pos += here;
            self.argument_left -= here;
            if self.argument_left > 0 {
                return Ok((pos, false));
            }
            if self.after == 0 {
                return Ok((pos, true));
            }
            match buf.get(pos) {
                None => return Ok((pos, false)),
                Some(b'$') => {}
                Some(&other) => return Err(ProtocolError::ExpectedDollar(other)),
            }
            let mut uncanonical = false;
            match number_line(buf, pos + 1, &mut uncanonical) {
                Line::Incomplete => return Ok((pos, false)),
                Line::TooLong => return Err(ProtocolError::BigBulkCount),
                Line::Number(len, next) if len >= 0 && len as u64 <= limits.argument_max as u64 && !uncanonical => {
                    pos = next;
                    self.argument_left = len as usize + 2;
                    self.after -= 1;
                }
                _ => return Err(ProtocolError::InvalidBulkLength),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { argument_max: 512 << 20, large: 1 << 20, authenticated: true };

    fn scan(bytes: &[u8]) -> Result<Scan, ProtocolError> {
        Scanner::default().scan(bytes, &LIMITS)
    }

    #[test]
    fn arguments_are_found_for_any_split() {
        let bytes = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$12\r\nhello\r\nworld\r\n*1\r\n";
        let whole = bytes.len() - 4;
        for cut in 0..whole {
            let mut scanner = Scanner::default();
            assert_eq!(scanner.scan(&bytes[..cut], &LIMITS), Ok(Scan::Incomplete), "cut at {cut}");
            assert_eq!(scanner.scan(bytes, &LIMITS), Ok(Scan::Complete { len: whole, canonical: true }));
            let args: Vec<_> = scanner.args(bytes).iter().collect();
            assert_eq!(args, [&b"SET"[..], b"k", b"hello\r\nworld"]);
        }
    }

    #[test]
    fn invalid_commands_have_redis_error_texts() {
        for (bytes, error) in [
            (&b"*x\r\n"[..], ProtocolError::InvalidMultibulkLength),
            (b"*2147483648\r\n", ProtocolError::InvalidMultibulkLength),
            (b"*99999999999999999999999\r\n", ProtocolError::InvalidMultibulkLength),
            (b"*03\r\n", ProtocolError::InvalidMultibulkLength),
            (b"*+3\r\n", ProtocolError::InvalidMultibulkLength),
            (b"*1\r\n:3\r\n", ProtocolError::ExpectedDollar(b':')),
            (b"*1\r\n$-1\r\n", ProtocolError::InvalidBulkLength),
            (b"*1\r\n$536870913\r\n", ProtocolError::InvalidBulkLength),
            (b"*1\r\n$3x\r\n", ProtocolError::InvalidBulkLength),
        ] {
            assert_eq!(scan(bytes), Err(error), "{}", bytes.escape_ascii());
        }
        assert_eq!(scan(&[b"*".as_slice(), &[b'1'; 70_000]].concat()), Err(ProtocolError::BigMultibulkCount));
        assert_eq!(scan(&[b'a'; 70_000]), Err(ProtocolError::BigInline));
        assert_eq!(scan(b"*-5\r\nPING"), Ok(Scan::Empty { len: 5 }));
        assert_eq!(scan(b"\r\nPING"), Ok(Scan::Empty { len: 2 }));
    }

    #[test]
    fn unauthenticated_clients_have_lower_limits() {
        let limits = Limits { authenticated: false, ..LIMITS };
        let mut scanner = Scanner::default();
        assert_eq!(scanner.scan(b"*11\r\n", &limits), Err(ProtocolError::UnauthenticatedMultibulkLength));
        scanner.reset();
        assert_eq!(scanner.scan(b"*2\r\n$16385\r\n", &limits), Err(ProtocolError::UnauthenticatedBulkLength));
    }

    #[test]
    fn commands_that_must_not_be_forwarded_unchanged_are_marked() {
        assert_eq!(scan(b"*1\r\n$4\r\nPINGxx"), Ok(Scan::Complete { len: 14, canonical: false }));
        assert_eq!(scan(b"*1\rx$4\r\nPING\r\n"), Ok(Scan::Complete { len: 14, canonical: false }));
    }

    #[test]
    fn a_large_argument_is_reported_before_it_is_complete() {
        let mut scanner = Scanner::default();
        let bytes = b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$5000000\r\nabc";
        let Ok(Scan::Large { data, len, after }) = scanner.scan(bytes, &LIMITS) else { panic!("not large") };
        assert_eq!((&bytes[data..], len, after), (&b"abc"[..], 5_000_000, 2));
        assert_eq!(scanner.args(bytes).known(), 2);
    }

    #[test]
    fn a_large_command_is_followed_to_its_end_for_any_split() {
        let tail = b"0123456789\r\n$2\r\nEX\r\n$2\r\n10\r\n*1\r\n";
        let end = tail.len() - 4;
        for first in 0..=end {
            for second in first..=end {
                let mut follower = Follower::new(10, 2);
                let mut pos = 0;
                let mut done = false;
                for until in [first, second, tail.len()] {
                    if !done {
                        let (taken, ends) = follower.follow(&tail[pos..until], &LIMITS).expect("well-formed");
                        pos += taken;
                        done = ends;
                    }
                }
                assert!(done && pos == end, "cut at {first}, {second}");
            }
        }
        assert_eq!(Follower::new(2, 0).follow(b"ab\rx", &LIMITS), Err(ProtocolError::MissingCrlf));
        assert_eq!(Follower::new(2, 0).follow(b"abc", &LIMITS), Err(ProtocolError::MissingCrlf));
    }

    #[test]
    fn inline_commands_are_split_as_in_redis_cli() {
        let split = |line: &str| {
            split_inline(line.as_bytes()).map(|a| a.iter().map(|x| x.escape_ascii().to_string()).collect::<Vec<_>>())
        };
        assert_eq!(split("set  a 'b c'").unwrap(), ["set", "a", "b c"]);
        assert_eq!(split(r#"set "a\x41\n" '\''"#).unwrap(), ["set", "aA\\n", "\\'"]);
        assert_eq!(split(r#"a"b""#).unwrap(), ["ab"]);
        assert_eq!(split("\x0c $3\x0c \"b\"\x0bc").unwrap(), ["$3\\x0c", "b", "c"]);
        assert_eq!(split(r#"GET "x\x4""#).unwrap(), ["GET", "xx4"]);
        for bad in [r#"set "a"#, r#"set "a"b"#, "set 'a", "set 'a'b"] {
            assert_eq!(split(bad), Err(ProtocolError::UnbalancedQuotes), "{bad}");
        }
    }

    #[test]
    fn outstanding_bytes_are_known_once_the_length_is() {
        let limits = Limits { argument_max: 1000, large: usize::MAX, authenticated: true };
        let request = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$10\r\n0123456789\r\n";
        let header = request.len() - 12;
        for cut in 0..request.len() {
            let mut scanner = Scanner::default();
            assert!(matches!(scanner.scan(&request[..cut], &limits), Ok(Scan::Incomplete)), "{cut}");
            let missing = scanner.missing(&request[..cut]);
            // With an earlier argument in the buffer, fewer bytes; without a complete length, zero.
            assert!(missing <= request.len() - cut, "{missing} at {cut}");
            if cut >= header {
                assert_eq!(missing, request.len() - cut, "{cut}");
            }
        }
    }
}
