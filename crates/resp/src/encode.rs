//! Encodes commands and replies, appending to the caller's buffer.

/// Appends a decimal number.
#[inline]
pub fn decimal(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

/// Appends a header: a type byte, a count or length, CRLF (`*3\r\n`).
#[inline]
pub fn header(out: &mut Vec<u8>, kind: u8, count: usize) {
    out.push(kind);
    decimal(out, count as u64);
    out.extend_from_slice(b"\r\n");
}

/// Appends a bulk string.
#[inline]
pub fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    header(out, b'$', bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Appends a bulk string made of several parts.
pub fn bulk_of(out: &mut Vec<u8>, parts: &[&[u8]]) {
    header(out, b'$', parts.iter().map(|part| part.len()).sum());
    parts.iter().for_each(|part| out.extend_from_slice(part));
    out.extend_from_slice(b"\r\n");
}

/// Appends a command of the given arguments.
pub fn command<'a, I>(out: &mut Vec<u8>, args: I)
where
    I: IntoIterator<Item = &'a [u8]>,
    I::IntoIter: ExactSizeIterator,
{
    let args = args.into_iter();
    header(out, b'*', args.len());
    for arg in args {
        bulk(out, arg);
    }
}

/// Appends an integer reply.
pub fn integer(out: &mut Vec<u8>, value: i64) {
    out.push(b':');
    if value < 0 {
        out.push(b'-');
    }
    decimal(out, value.unsigned_abs());
    out.extend_from_slice(b"\r\n");
}

/// Appends a line reply of the given type (`+` or `-`). Replaces CR and LF by spaces, so that the line cannot end early
/// (as in CVE-2025-67733).
pub fn line(out: &mut Vec<u8>, kind: u8, text: &[u8]) {
    out.push(kind);
    out.extend(text.iter().map(|b| if matches!(b, b'\r' | b'\n') { b' ' } else { *b }));
    out.extend_from_slice(b"\r\n");
}

/// Appends a simple string.
pub fn simple(out: &mut Vec<u8>, text: &str) {
    line(out, b'+', text.as_bytes());
}

/// Appends an error; `text` starts with its code (`ERR ...`).
pub fn error(out: &mut Vec<u8>, text: &str) {
    line(out, b'-', text.as_bytes());
}

/// Appends a null: `$-1` in RESP2, `_` in RESP3.
pub fn null(out: &mut Vec<u8>, resp3: bool) {
    out.extend_from_slice(if resp3 { b"_\r\n" } else { b"$-1\r\n" });
}

/// Appends the header of a map of `pairs` pairs; in RESP2 an array of twice the length.
pub fn map(out: &mut Vec<u8>, pairs: usize, resp3: bool) {
    if resp3 { header(out, b'%', pairs) } else { header(out, b'*', pairs * 2) }
}

/// Appends a verbatim string in RESP3, or a bulk string in RESP2 (INFO, CLIENT LIST).
pub fn verbatim(out: &mut Vec<u8>, text: &[u8], resp3: bool) {
    if resp3 {
        header(out, b'=', text.len() + 4);
        out.extend_from_slice(b"txt:");
        out.extend_from_slice(text);
        out.extend_from_slice(b"\r\n");
    } else {
        bulk(out, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_encoded_as_in_the_protocol() {
        let mut out = Vec::new();
        command(&mut out, [&b"GET"[..], b"k"]);
        integer(&mut out, i64::MIN);
        error(&mut out, "ERR a\r\nb");
        null(&mut out, true);
        map(&mut out, 2, false);
        verbatim(&mut out, b"x", true);
        assert_eq!(
            out.escape_ascii().to_string(),
            r"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n:-9223372036854775808\r\n-ERR a  b\r\n_\r\n*4\r\n=5\r\ntxt:x\r\n"
        );
    }
}
