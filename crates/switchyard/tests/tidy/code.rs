//! Separates the code of a Rust file from comments and string contents.
//!
//! Not a parser: it would be exact, but is a dependency and slow to build. The checks search for a few tokens, so it
//! suffices to blank out comments and strings, and keep line numbers.

/// Replaces comments and the contents of strings and character literals by spaces. Line breaks stay.
pub(crate) fn only_code(text: &str) -> String {
    let mut rest = text;
    let mut code = String::with_capacity(text.len());
    while let Some(first) = rest.chars().next() {
        let after_word = code.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let length = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            block_comment(rest)
        } else if let Some(length) = raw_string(rest).filter(|_| !after_word) {
            length
        } else if first == '"' {
            quoted(rest, '"').unwrap_or(rest.len())
        } else if let Some(length) = character(rest).filter(|_| first == '\'') {
            length
        } else {
            code.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        };
        // At least one space, so that the tokens around it stay separate.
        let blank = |c: char| if c == '\n' { '\n' } else { ' ' };
        code.extend(rest[..length].chars().map(blank));
        rest = &rest[length..];
    }
    code
}

/// Length of a comment, including nested comments.
fn block_comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut place = 0;
    while place < text.len() {
        if text[place..].starts_with("/*") {
            depth += 1;
            place += 2;
        } else if text[place..].starts_with("*/") {
            depth -= 1;
            place += 2;
            if depth == 0 {
                return place;
            }
        } else {
            place += text[place..].chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length of `r"..."`, `r#"..."#`, `br"..."`, `cr"..."` at the start of the text.
fn raw_string(text: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"]
        .into_iter()
        .find(|prefix| text.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(['"', '#'])))?;
    let rest = &text[prefix.len()..];
    let hashes = rest.len() - rest.trim_start_matches('#').len();
    let body = rest[hashes..].strip_prefix('"')?; // else `r#name`, a raw identifier
    let end = format!("\"{}", "#".repeat(hashes));
    let close = body.find(&end).map_or(body.len(), |at| at + end.len());
    Some(prefix.len() + hashes + 1 + close)
}

/// Length of a quoted literal, with escapes.
fn quoted(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (place, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(place + quote.len_utf8()),
            _ => {}
        }
    }
    None
}

/// Length of a character literal. `None` for a lifetime.
fn character(text: &str) -> Option<usize> {
    let mut characters = text.chars().skip(1);
    let (first, second) = (characters.next()?, characters.next()?);
    if first == '\\' || second == '\'' { quoted(text, '\'') } else { None }
}

#[test]
fn comments_and_strings_are_blanked() {
    for (text, code) in [
        ("a // b\nc", "a \nc"),
        ("a /* b /* c */ d\n */ e", "a \n e"),
        (r#"f("todo!", 'x', b'\'')"#, "f( , , b )"),
        (r#""a\"b" c"#, " c"),
        ("r#\"a\"b\"# c", " c"),
        ("br\"a\\\" c", " c"),
        ("r#type x", "r#type x"),
        ("for\"x\"", "for "),
        ("fn f<'a>(x: &'a str, y: &'static u8)", "fn f<'a>(x: &'a str, y: &'static u8)"),
        ("'é' é 'ö", " é 'ö"),
        ("\"open\n", " \n"),
    ] {
        let blanked = only_code(text);
        // The number of blanks does not matter.
        let mut squeezed = String::new();
        for c in blanked.chars() {
            if c != ' ' || !squeezed.ends_with(' ') {
                squeezed.push(c);
            }
        }
        assert_eq!(squeezed, code, "{text}");
        assert_eq!(blanked.lines().count(), text.lines().count(), "{text}");
    }
}
