//! Arguments of commands: finding a command and its keys never panics and never returns a missing argument. For a part
//! of a command, the result is that of the whole command, or that it must wait. Also for commands that a node taught.

use std::sync::LazyLock;

use switchyard_resp::command::{Command, CommandTable, KeyError, Lookup, errors, parse_command_reply};
use switchyard_resp::request::{Args, Span};

static TABLE: LazyLock<CommandTable> = LazyLock::new(CommandTable::builtin);

fn find(command: &Command, args: &Args<'_>) -> Result<Vec<u32>, KeyError> {
    let mut keys = Vec::new();
    let found = command.find_keys(args, &mut keys);
    // Each key specification can name each argument once; no builtin command has more than two passes.
    assert!(keys.iter().all(|key| (*key as usize) < args.known()));
    found.map(|()| keys)
}

fn check(command: &Command, buf: &[u8], spans: &[Span], known: usize, declared_more: usize) {
    let whole = find(command, &Args::new(buf, spans));
    assert_ne!(whole, Err(KeyError::Incomplete));
    if let Err(error) = whole {
        assert!(error.text(command).starts_with("ERR "));
    }
    let part = find(command, &Args::partial(buf, &spans[..known], spans.len()));
    assert!(
        part == Err(KeyError::Incomplete) || part == whole,
        "{part:?} of {known}, {whole:?} of all: {}",
        command.name
    );
    let first = command.first_key_only(&Args::new(buf, spans));
    if let (Some(first), Ok(keys)) = (first, &whole) {
        assert_eq!(keys[..], [first as u32]);
    }
    let huge = Args::partial(buf, spans, spans.len() + declared_more);
    let _ = find(command, &huge);
    let _ = (command.blocks(&huge), command.class(), command.arity_ok(spans.len()));
    for text in [errors::unknown(&huge), errors::unknown_subcommand(command, &huge)] {
        assert!(text.len() < 700 && !text.iter().any(|b| matches!(b, b'\r' | b'\n')));
    }
}

pub(crate) fn command_keys(input: &[u8]) {
    // Two bytes choose a command, one its known part, one the declared rest; then arguments, separated by 0xff; then,
    // after 0xfe, a COMMAND reply.
    let Some((&[low, high, known, more], rest)) = input.split_first_chunk::<4>() else { return };
    let (call, lesson) = match rest.iter().position(|b| *b == 0xfe) {
        Some(at) => (&rest[..at], &rest[at + 1..]),
        None => (rest, &[][..]),
    };
    let chosen = TABLE.get(u16::from_le_bytes([low, high]) % TABLE.len() as u16).expect("an id below the length");
    let mut buf = Vec::new();
    let mut spans = Vec::new();
    let words = chosen.name.split('|').map(str::as_bytes);
    let words: Vec<&[u8]> =
        if call.is_empty() { words.collect() } else { words.chain(call.split(|b| *b == 0xff)).collect() };
    for word in words {
        spans.push(Span { start: buf.len() as u32, len: word.len() as u32 });
        buf.extend_from_slice(word);
    }
    let known = usize::from(known) % (spans.len() + 1);
    let more = 1_usize << (more % 32);
    check(chosen, &buf, &spans, known, more);

    // As a client sends it, from the raw bytes.
    if !call.is_empty() {
        let own = spans.get(chosen.name.split('|').count()..).unwrap_or_default();
        if let Lookup::Command(found) = TABLE.find(&Args::new(&buf, own)) {
            check(found, &buf, own, known.min(own.len()), more);
        }
    }
    if !lesson.is_empty() {
        let mut table = TABLE.clone();
        table.learn(&parse_command_reply(lesson));
        for learnt in table.iter().skip(TABLE.len()) {
            assert_eq!(table.by_name(&learnt.name).map(|c| c.id), Some(learnt.id));
            check(learnt, &buf, &spans, known, more);
        }
    }
}
