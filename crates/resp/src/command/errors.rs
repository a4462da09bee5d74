//! Errors for whole commands, with Redis's texts where Redis has them. Texts start with the error code and have no line
//! end.

use super::{Command, Handling};
use crate::request::Args;

/// The keys of a command are in different slots.
pub const CROSSSLOT: &str = "CROSSSLOT Keys in request don't hash to the same slot";

/// Maximum bytes of a quoted name, and of all quoted arguments together, as in Redis.
const QUOTED_MAX: usize = 128;

/// The part of an argument printed by C's `%.128s`: up to a NUL, at most `max` bytes.
fn quoted(arg: &[u8], max: usize) -> &[u8] {
    let arg = &arg[..arg.len().min(max)];
    &arg[..memchr::memchr(0, arg).unwrap_or(arg.len())]
}

fn without_line_ends(mut text: Vec<u8>) -> Vec<u8> {
    for byte in &mut text {
        if matches!(byte, b'\r' | b'\n') {
            *byte = b' ';
        }
    }
    text
}

/// Error for too few or too many arguments.
pub fn arity(command: &Command) -> String {
    format!("ERR wrong number of arguments for '{}' command", command.name.to_ascii_lowercase())
}

/// Error for an unknown command. Bytes, because it quotes the client.
pub fn unknown(args: &Args<'_>) -> Vec<u8> {
    let mut text = b"ERR unknown command '".to_vec();
    text.extend_from_slice(quoted(args.get(0).unwrap_or_default(), QUOTED_MAX));
    text.extend_from_slice(b"', with args beginning with: ");
    let start = text.len();
    for arg in args.iter().skip(1) {
        let used = text.len() - start;
        if used >= QUOTED_MAX {
            break;
        }
        text.push(b'\'');
        text.extend_from_slice(quoted(arg, QUOTED_MAX - used));
        text.extend_from_slice(b"' ");
    }
    without_line_ends(text)
}

/// Error for an unknown subcommand of `container`.
pub fn unknown_subcommand(container: &Command, args: &Args<'_>) -> Vec<u8> {
    let mut text = b"ERR unknown subcommand '".to_vec();
    text.extend_from_slice(quoted(args.get(1).unwrap_or_default(), QUOTED_MAX));
    text.extend_from_slice(format!("'. Try {} HELP.", container.name).as_bytes());
    without_line_ends(text)
}

/// Error for a command with [`Handling::Refused`], or with [`Handling::OnlyNode`] if there are several nodes; `None`
/// for others.
pub fn not_served(command: &Command) -> Option<String> {
    let name = command.name.replace('|', " ");
    match command.handling {
        Handling::OnlyNode(reason) | Handling::Refused(reason) => {
            Some(format!("ERR Switchyard does not serve {name}: {reason}"))
        }
        _ => None,
    }
}
