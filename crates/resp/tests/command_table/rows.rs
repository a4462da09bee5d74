//! Compares the rows of the command table with real servers: all commands with arity, flags, and keys, and Redis's
//! error texts. Also tests lookup and learning. For keys in calls, see `keys.rs`.

use switchyard_resp::command::{CommandTable, Flags, Handling, Keys, LearntCommand, Local, Lookup, errors};
use switchyard_resp::reply;

use crate::server::{Arguments, error_text, find_keys, servers, shown};

/// Versions differ: the row accepts more arguments than this server.
const LOOSER_ARITY: [&str; 4] = ["ZRANK", "ZREVRANK", "COMMAND|GETKEYS", "COMMAND|GETKEYSANDFLAGS"];

/// Flags that differ between versions. WAIT is marked `blocking` since Valkey 8 and Redis 7.2, but always blocked.
const NEWER_FLAGS: [(&str, Flags); 1] = [("WAIT", Flags::BLOCKING)];

/// Flags in `COMMAND`, with the table's names.
const SHOWN_FLAGS: [(&str, Flags); 9] = [
    ("write", Flags::WRITE),
    ("readonly", Flags::READONLY),
    ("fast", Flags::FAST),
    ("blocking", Flags::BLOCKING),
    ("admin", Flags::ADMIN),
    ("pubsub", Flags::PUBSUB),
    ("no_auth", Flags::NO_AUTH),
    ("denyoom", Flags::DENY_OOM),
    ("movablekeys", Flags::MOVABLE_KEYS),
];

/// First, last, and step in `COMMAND` for commands with special key shapes.
fn triple(keys: &Keys) -> (i32, i32, i32) {
    match keys {
        Keys::None | Keys::Streams | Keys::Numbered { destination: false, .. } => (0, 0, 0),
        Keys::Range { first, last, step } => ((*first).into(), (*last).into(), (*step).into()),
        Keys::Numbered { destination: true, .. } | Keys::Sort { .. } | Keys::GeoStore { .. } => (1, 1, 1),
        Keys::Migrate => (3, 3, 1),
        Keys::Specs(_) | Keys::Unknown => panic!("no builtin command has these"),
    }
}

#[test]
fn rows_match_the_servers() {
    let table = CommandTable::builtin();
    let mut wrong = Vec::new();
    for server in servers() {
        for theirs in server.client().commands() {
            let name = theirs.name.to_ascii_uppercase();
            let Some(ours) = table.by_name(&name) else {
                wrong.push(format!("{}: {name} is missing: {theirs:?}", server.program));
                continue;
            };
            let looser = LOOSER_ARITY.contains(&&*name) && ours.arity < 0 && ours.arity.abs() <= theirs.arity.abs();
            if ours.arity != theirs.arity && !looser {
                wrong.push(format!("{}: {name} has arity {}, not {}", server.program, theirs.arity, ours.arity));
            }
            for (flag, bit) in SHOWN_FLAGS {
                let has = theirs.flags.iter().any(|f| f == flag);
                if ours.flags.has(bit) != has && !NEWER_FLAGS.contains(&(&name, bit)) {
                    wrong.push(format!("{}: {name} is {}{flag}", server.program, if has { "" } else { "not " }));
                }
            }
            let expected = (theirs.first.into(), theirs.last.into(), theirs.step.into());
            if triple(&ours.keys) != expected {
                wrong.push(format!("{}: {name} has keys {expected:?}, not {:?}", server.program, triple(&ours.keys)));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn nothing_is_left_to_learn_from_servers_without_modules() {
    for server in servers() {
        let mut client = server.client();
        let mut table = CommandTable::builtin();
        let before = table.len();
        let resp2 = client.commands();
        assert_eq!(table.learn(&resp2), 0);
        assert_eq!(table.len(), before);
        client.call(&["HELLO", "3"]);
        assert_eq!(client.commands(), resp2, "RESP3 has the same rows");
    }
}

#[test]
fn a_learnt_command_is_forwarded_only_if_its_keys_are_known() {
    let learnt = |name: &str, flags: &[&str], first| LearntCommand {
        name: name.into(),
        arity: -2,
        flags: flags.iter().map(|&f| f.into()).collect(),
        first,
        last: first,
        step: first,
        categories: Vec::new(),
        specs: Vec::new(),
    };
    let mut table = CommandTable::builtin();
    let commands = [
        learnt("json.debug|memory", &["readonly"], 2),
        learnt("json.debug", &[], 0),
        learnt("json.get", &["readonly"], 1),
        learnt("ft.search", &["readonly"], 0),
        learnt("cms.merge", &["write", "denyoom", "movablekeys"], 0),
        learnt("w.wait", &["blocking"], 1),
        learnt("get", &["write"], 2),
        learnt("config|get", &["write"], 2),
        learnt("orphan|sub", &["write"], 2),
        learnt(&"x".repeat(100), &["write"], 1),
    ];
    assert_eq!(table.learn(&commands), 6);
    let get = |name| table.by_name(name).unwrap_or_else(|| panic!("{name} is not in the table"));
    assert_eq!(get("JSON.DEBUG|MEMORY").handling, Handling::Keyed);
    assert_eq!(get("json.get").handling, Handling::Keyed);
    assert_eq!(get("json.get").keys, Keys::FIRST);
    assert!(matches!(get("FT.SEARCH").handling, Handling::OnlyNode(_)));
    assert_eq!(get("cms.merge").keys, Keys::Unknown);
    assert!(get("cms.merge").flags.has(Flags::WRITE.and(Flags::DENY_OOM)));
    assert_eq!(get("w.wait").handling, Handling::Keyed);
    let call = Arguments::new(&["w.wait", "k"]);
    assert!(get("w.wait").blocks(&call.all()));
    assert_eq!(get("w.wait").waits_us(&call.all()), None, "its duration is unknown");
    assert_eq!(get("get").keys, Keys::FIRST, "what the table has is not changed");
    assert_eq!(get("config|get").handling, Handling::Local(Local::ConfigGet));
    let call = Arguments::new(&["JSON.debug", "MEMORY", "doc"]);
    let Lookup::Command(found) = table.find(&call.all()) else { panic!("a learnt subcommand is not found") };
    assert_eq!(find_keys(found, &call.all()), Ok(vec![2]));
}

#[test]
fn errors_have_redis_texts() {
    let table = CommandTable::builtin();
    let text_of = |call: &[Vec<u8>]| -> Vec<u8> {
        let arguments = Arguments::new(call);
        let args = arguments.all();
        match table.find(&args) {
            Lookup::Unknown => errors::unknown(&args),
            Lookup::UnknownSubcommand(container) => errors::unknown_subcommand(container, &args),
            Lookup::Command(command) if !command.arity_ok(args.len()) => errors::arity(command).into_bytes(),
            Lookup::Command(command) => match find_keys(command, &args) {
                Ok(keys) => panic!("{}: no error, keys {keys:?}", shown(call)),
                Err(error) => error.text(command).into_bytes(),
            },
        }
    };
    let lines: Vec<Vec<Vec<u8>>> = [
        "FOO",
        "foo a b",
        "config",
        "CONFIG|GET x",
        "CONFIG foo",
        "cOnFiG GeT",
        "object encodin k",
        "command foo",
        "xgroup create k",
        "get",
        "GET a b",
        "msetnx k v k2",
        "mset k v k2",
        "eval s x",
        "eval s -1",
        "eval s 2 k",
        "eval s 9223372036854775807 k",
        "eval s 9223372036854775808 k",
        "eval s 01 k",
        "zunion 0 k",
        "zunion x k",
        "zunion 2 k",
        "zinterstore d 0 k",
        "zdiffstore d 5 k",
        "zintercard -1 k",
        "sintercard 0 k",
        "sintercard x k",
        "sintercard 2 k",
        "lmpop 0 k left",
        "lmpop x k left",
        "lmpop 9 k left",
        "zmpop -5 k min",
        "xread count 1 streams a 0 b",
        "xread count 1 foo a 0 b",
        "xreadgroup group g c streams a b >",
        "xread count 1 block 0 count",
    ]
    .iter()
    .map(|line| line.split(' ').map(|word| word.as_bytes().to_vec()).collect())
    .collect();
    let odd: [&[&[u8]]; 8] = [
        &[b"foo\r\nbar", b"a\r\n", b"\xff\xfe"],
        &[b"foo\0bar", b"a\0b", b"c"],
        &[b"", b""],
        &[&[b'x'; 300], &[b'y'; 300], b"z"],
        &[b"foo", &[b'y'; 100], &[b'z'; 100], b"more"],
        &[b"foo", &[b'y'; 125], b"z", b"more"],
        &[b"config", b"x\r\ny\0z"],
        &[b"client", &[b'x'; 300]],
    ];
    let odd = odd.iter().map(|call| call.iter().map(|arg| arg.to_vec()).collect::<Vec<_>>());
    let calls: Vec<Vec<Vec<u8>>> = lines.into_iter().chain(odd).collect();
    for server in servers() {
        let mut client = server.client();
        for call in &calls {
            let answer = client.call(call);
            assert!(reply::is_error(&answer), "{} is fine for {}", shown(call), server.program);
            let theirs = &answer[1..answer.len() - 2];
            if theirs.starts_with(b"ERR Unbalanced ") {
                assert!(text_of(call).starts_with(b"ERR Unbalanced "));
                continue; // versions have different words for this one
            }
            assert_eq!(
                text_of(call).escape_ascii().to_string(),
                theirs.escape_ascii().to_string(),
                "{}: {}",
                server.program,
                shown(call)
            );
        }
        // Too few arguments, for every command with required ones.
        for theirs in client.commands() {
            let Some(ours) = table.by_name(&theirs.name) else { continue };
            let call: Vec<&str> = theirs.name.split('|').collect();
            if !ours.arity_ok(call.len()) && theirs.arity == ours.arity {
                let answer = client.call(&call);
                assert_eq!(error_text(&answer), Some(errors::arity(ours)), "{}: {}", server.program, theirs.name);
            }
        }
    }
}

#[test]
fn names_are_found_in_any_case_and_only_whole() {
    let table = CommandTable::builtin();
    let find = |words: &[&str]| match table.find(&Arguments::new(words).all()) {
        Lookup::Command(command) => Some(command.id),
        Lookup::Unknown | Lookup::UnknownSubcommand(_) => None,
    };
    for (index, command) in table.iter().enumerate() {
        assert_eq!(usize::from(command.id), index);
        assert_eq!(table.get(command.id).map(|c| &c.name), Some(&command.name));
        let words: Vec<&str> = command.name.split('|').collect();
        let lower: Vec<String> = words.iter().map(|w| w.to_ascii_lowercase()).collect();
        let mixed: Vec<String> = words
            .iter()
            .map(|w| w.char_indices().map(|(i, c)| if i % 2 == 0 { c } else { c.to_ascii_lowercase() }).collect())
            .collect();
        for spelling in [lower, mixed] {
            assert_eq!(find(&spelling.iter().map(|s| &**s).collect::<Vec<_>>()), Some(command.id), "{spelling:?}");
        }
        let last = words[words.len() - 1];
        for cut in 0..last.len() {
            for other in [
                &last[..cut],
                &format!("{}\u{1}{}", &last[..cut], &last[cut + 1..]),
                &format!("{last}{}", &last[cut..]),
            ] {
                let mut near = words.clone();
                *near.last_mut().expect("a word") = other;
                let found = find(&near);
                let named = table.by_name(&near.join("|")).map(|c| c.id);
                assert!(found != Some(command.id) && found == named, "{near:?} is taken for {}", command.name);
            }
        }
    }
    assert_eq!(find(&[]), None);
    assert_eq!(table.by_name("NOPE|GET").map(|c| c.id), None);
}

#[test]
fn handling_fits_the_keys() {
    for command in CommandTable::builtin().iter() {
        let has_keys = command.keys != Keys::None;
        match command.handling {
            Handling::Keyed | Handling::Split(_) => assert!(has_keys, "{} has no keys to be sent by", command.name),
            Handling::Local(Local::Watch) => assert!(has_keys),
            // Shard channels count as keys for cluster clients.
            Handling::Local(_) if command.flags.has(Flags::PUBSUB) => {}
            Handling::Every(_) | Handling::Any | Handling::Local(_) => assert!(!has_keys, "{} has keys", command.name),
            Handling::OnlyNode(text) | Handling::Refused(text) => {
                assert!(!text.is_empty());
                assert!(errors::not_served(command).is_some_and(|t| t.starts_with("ERR ") && t.contains(text)));
            }
        }
        let both = command.flags.has(Flags::WRITE.and(Flags::READONLY));
        assert!(!both, "{} both writes and does not", command.name);
        assert!(command.name.len() <= 64 && !command.name.bytes().any(|b| b.is_ascii_lowercase()));
        if command.flags.has(Flags::BLOCKING) {
            // Other handlings cannot use an exclusive connection, and would stall a pipeline.
            let waits = matches!(command.handling, Handling::Keyed | Handling::Local(Local::Wait));
            assert!(waits, "{} would stall a pipeline", command.name);
        }
    }
}

#[test]
fn blocking_calls_have_their_timeouts() {
    let table = CommandTable::builtin();
    for (words, wanted) in [
        (&["BLPOP", "a", "b", "1.5"][..], Some(1_500_000)),
        (&["brpop", "a", "0"], None),
        (&["BLMOVE", "a", "b", "LEFT", "LEFT", "2"], Some(2_000_000)),
        (&["BRPOPLPUSH", "a", "b", "0.001"], Some(1000)),
        (&["BLMPOP", "3", "1", "a", "LEFT"], Some(3_000_000)),
        (&["BZMPOP", "0", "1", "a", "MIN"], None),
        (&["BZPOPMIN", "a", "7"], Some(7_000_000)),
        (&["XREAD", "COUNT", "1", "BLOCK", "250", "STREAMS", "x", "$"], Some(250_000)),
        (&["XREADGROUP", "GROUP", "g", "BLOCK", "BLOCK", "0", "STREAMS", "x", ">"], None),
        // The node returns an error immediately.
        (&["BLPOP", "a", "soon"], Some(1_000_000)),
    ] {
        let call = Arguments::new(words);
        let Lookup::Command(command) = table.find(&call.all()) else { panic!("{words:?}") };
        assert!(command.blocks(&call.all()), "{words:?}");
        assert_eq!(command.waits_us(&call.all()), wanted, "{words:?}");
    }
}

#[test]
fn learnt_commands_need_a_login_and_printable_names() {
    let learnt = |name: &str| LearntCommand {
        name: name.to_owned(),
        arity: 2,
        flags: vec!["readonly".to_owned(), "no_auth".to_owned()],
        first: 1,
        last: 1,
        step: 1,
        ..LearntCommand::default()
    };
    let mut table = CommandTable::builtin();
    let names = ["json.get", "two words", "get\nid=1", "\u{1b}[2J", "\u{e9}t\u{e9}"].map(learnt);
    assert_eq!(table.learn(&names), 1);
    let command = table.by_name("JSON.GET").expect("learnt");
    assert!(command.flags.has(Flags::READONLY) && !command.flags.has(Flags::NO_AUTH));
}
