//! The errors about a command as a whole, in Redis's words where Redis has them. Texts begin with their code and have
//! no line end.

use super::{Command, Handling};
use crate::request::Args;

/// Keys of one command are in different slots.
pub const CROSSSLOT: &str = "CROSSSLOT Keys in request don't hash to the same slot";

/// Redis shows at most so many bytes of a name, and so many of all arguments together.
const SHOWN_MAX: usize = 128;

/// What C's `%.128s` shows of an argument: up to a NUL, at most `max` bytes.
fn shown(arg: &[u8], max: usize) -> &[u8] {
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

/// Too few or too many arguments.
pub fn arity(command: &Command) -> String {
    format!("ERR wrong number of arguments for '{}' command", command.name.to_ascii_lowercase())
}

/// No such command. Bytes, because it quotes what the client sent.
pub fn unknown(args: &Args<'_>) -> Vec<u8> {
    let mut text = b"ERR unknown command '".to_vec();
    text.extend_from_slice(shown(args.get(0).unwrap_or_default(), SHOWN_MAX));
    text.extend_from_slice(b"', with args beginning with: ");
    let start = text.len();
    for arg in args.iter().skip(1) {
        let used = text.len() - start;
        if used >= SHOWN_MAX {
            break;
        }
        text.push(b'\'');
        text.extend_from_slice(shown(arg, SHOWN_MAX - used));
        text.extend_from_slice(b"' ");
    }
    without_line_ends(text)
}

/// No such subcommand of `container`.
pub fn unknown_subcommand(container: &Command, args: &Args<'_>) -> Vec<u8> {
    let mut text = b"ERR unknown subcommand '".to_vec();
    text.extend_from_slice(shown(args.get(1).unwrap_or_default(), SHOWN_MAX));
    text.extend_from_slice(format!("'. Try {} HELP.", container.name).as_bytes());
    without_line_ends(text)
}

/// A command whose handling is [`Handling::Refused`], or [`Handling::OnlyNode`] where there are several; `None` for the
/// others.
pub fn not_served(command: &Command) -> Option<String> {
    let name = command.name.replace('|', " ");
    match command.handling {
        Handling::OnlyNode(reason) | Handling::Refused(reason) => {
            Some(format!("ERR Switchyard does not serve {name}: {reason}"))
        }
        _ => None,
    }
}
