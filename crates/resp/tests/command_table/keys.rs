//! Finds keys in many calls of every command, and compares them with `COMMAND GETKEYS` of real servers, or with the
//! server's error for invalid calls. Random calls use a fixed seed, so that failures are reproducible.

use proptest::prelude::*;
use switchyard_resp::command::{
    Access, Begin, Command, CommandTable, Find, Flags, Handling, KeyError, KeySpec, Keys, LearntCommand, Lookup,
    errors, is_option, parse_command_reply,
};
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use crate::server::{Arguments, Client, find_keys, servers, shown};

/// A small generator with a fixed seed (xorshift64*).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }
}

/// Argument lists for a command: plain ones of every length, and random ones of words used by commands.
fn calls(name: &str, arity: i16, random: &mut Random) -> Vec<Vec<Vec<u8>>> {
    const WORDS: [&str; 32] = [
        "store",
        "STORE",
        "STOREDIST",
        "by",
        "get",
        "limit",
        "keys",
        "KEYS",
        "streams",
        "STREAMS",
        "block",
        "count",
        "group",
        "noack",
        "auth",
        "auth2",
        "copy",
        "replace",
        "asc",
        "alpha",
        "#",
        "nosort",
        "0",
        "1",
        "2",
        "3",
        "01",
        "-1",
        "9223372036854775807",
        "99999999999999999999",
        "",
        "{t}x",
    ];
    let least = usize::from(arity.unsigned_abs());
    let front: Vec<Vec<u8>> = name.split('|').map(|part| part.as_bytes().to_vec()).collect();
    let fixed = arity > 0;
    let mut calls = Vec::new();
    for round in 0..150 {
        let len = if fixed { least } else { least + if round < 8 { round } else { random.below(8) } };
        let mut call = front.clone();
        for index in call.len()..len {
            call.push(match random.below(4) {
                _ if round < 8 => format!("a{index}").into_bytes(),
                // Servers compare option names up to a NUL.
                0 => {
                    [WORDS[random.below(WORDS.len())].as_bytes(), [&b""[..], b"", b"", b"\0", b"\0z"][random.below(5)]]
                        .concat()
                }
                1 => format!("{}", random.below(len + 1)).into_bytes(),
                _ => format!("a{index}").into_bytes(),
            });
        }
        calls.push(call);
    }
    calls
}

/// Calls that random arguments seldom produce.
fn written_calls() -> Vec<Vec<Vec<u8>>> {
    [
        "EVAL s 0",
        "EVAL s 0 a b",
        "EVAL s 2 k1 k2 a",
        "EVALSHA_RO s 1 k1",
        "FCALL f 3 k1 k2 k3",
        "FCALL_RO f 1 k1 1 2",
        "ZUNIONSTORE d 2 k1 k2 WEIGHTS 1 2 AGGREGATE MAX",
        "ZINTERSTORE d 1 k1",
        "ZDIFFSTORE d 3 k1 k2 k3",
        "ZUNION 2 k1 k2 WITHSCORES",
        "ZINTERCARD 2 k1 k2 LIMIT 3",
        "SINTERCARD 2 k1 k2 LIMIT 3",
        "LMPOP 2 k1 k2 LEFT COUNT 3",
        "ZMPOP 1 k1 MIN",
        "BLMPOP 0 2 k1 k2 RIGHT",
        "BZMPOP 1.5 1 k1 MAX COUNT 2",
        "SORT k",
        "SORT k BY nosort GET # STORE d",
        "SORT k LIMIT 0 10 DESC ALPHA STORE d",
        "SORT k STORE d1 STORE d2",
        "SORT_RO k LIMIT 0 10 GET #",
        "SORT k LIMIT\0 0 10 STORE\0z d",
        "GEORADIUS k 1 2 3 km STORE d",
        "GEORADIUS k 1 2 3 km WITHDIST COUNT 3 ANY ASC STOREDIST d",
        "GEORADIUSBYMEMBER k m 3 km STORE d",
        "GEORADIUSBYMEMBER k m 3 km STORE\0 d",
        "GEORADIUSBYMEMBER k m 3 km",
        "XREAD STREAMS k1 k2 0 0",
        "XREAD COUNT\0 1 STREAMS\0z k1 k2 0 0",
        "XREAD COUNT 1 BLOCK 10 STREAMS streams block $ 0-0",
        "XREADGROUP GROUP streams c COUNT 2 NOACK STREAMS k1 >",
        "XREADGROUP GROUP g streams STREAMS k1 k2 k3 > > >",
        "MIGRATE h 1 k 0 100",
        "MIGRATE h 1 '' 0 100 KEYS k1 k2 k3",
        "MIGRATE h 1 '' 0 100 COPY REPLACE AUTH keys KEYS k1",
        "MIGRATE h 1 '' 0 100 AUTH2 keys keys KEYS k1 k2",
        "MSET k1 v1 k2 v2 k3 v3",
        "MSETNX k1 v1",
        "BITOP AND d k1 k2 k3",
        "PFMERGE d k1 k2",
        "OBJECT ENCODING k",
        "MEMORY USAGE k SAMPLES 5",
        "XGROUP CREATE k g $ MKSTREAM",
        "XINFO STREAM k FULL",
        "BLPOP k1 k2 k3 0",
        "COPY k1 k2 DB 3 REPLACE",
        "GEOSEARCHSTORE d k FROMMEMBER m BYRADIUS 1 km",
        "ZRANGESTORE d k 0 -1",
        "LCS k1 k2 LEN",
    ]
    .iter()
    .map(|line| line.split(' ').map(|word| if word == "''" { Vec::new() } else { word.as_bytes().to_vec() }).collect())
    .collect()
}

/// Compares the result with the server's. Returns whether there were keys.
fn compare(ours: &Command, call: &[Vec<u8>], client: &mut Client) -> Result<bool, String> {
    let arguments = Arguments::new(call);
    let found = find_keys(ours, &arguments.all())
        .map(|found| found.iter().map(|index| &call[*index as usize][..]).collect::<Vec<_>>());
    let theirs = client.getkeys(call);
    let served = matches!(ours.handling, Handling::Keyed | Handling::Split(_));
    match (&found, &theirs) {
        (Ok(found), Ok(theirs)) if found == theirs => return Ok(true),
        // The server returns both STORE and STOREDIST, and an earlier STORE, though only the last one is written. It
        // misses `STORE d` after `STORE get`, though it is written.
        (Ok(found), Ok(_)) if repeats_an_option(call) && found.first() == Some(&&call[1][..]) => return Ok(true),
        (Ok(found), Err(_)) if found.is_empty() => return Ok(false),
        // Channels are routed like keys, but are no keys to COMMAND GETKEYS.
        (Ok(_), Err(_)) if ours.flags.has(Flags::PUBSUB) => return Ok(false),
        // Valid, but the specification requires a source as well.
        (Ok(found), Err(_)) if ours.name == "PFMERGE" && found.len() == 1 => return Ok(true),
        // Always rejected by the server: its specification takes a later word for STREAMS.
        (Ok(_), Ok(_)) if ours.name == "XREADGROUP" && is_without_group(call) => return Ok(false),
        // By design: valid at one server, but would miss keys with several.
        (Err(KeyError::SortPattern(_)), Ok(_)) => return Ok(false),
        // Not executed here (blocking, or refused). COMMAND GETKEYS accepts `01` as a number; the commands do not.
        (Err(KeyError::NumkeysNotInteger(_) | KeyError::Syntax), Ok(_)) | (Err(_), Err(_)) if !served => {
            return Ok(false);
        }
        _ => {}
    }
    // If either considers the call invalid, the server must reject it.
    let answer = if served && (found.is_err() || theirs.is_err()) { client.call(call) } else { Vec::new() };
    if reply::is_error(&answer) {
        return Ok(false);
    }
    let found = found.map(|found| shown(&found));
    let theirs = theirs.map(|theirs| shown(&theirs));
    Err(format!(
        "{}: we find {found:?}, the server {theirs:?}, and answers {:?}",
        shown(call),
        answer.escape_ascii().to_string()
    ))
}

/// Whether STREAMS precedes any GROUP.
fn is_without_group(call: &[Vec<u8>]) -> bool {
    let word = call.iter().find(|arg| is_option(arg, b"streams") || is_option(arg, b"group"));
    word.is_some_and(|word| is_option(word, b"streams"))
}

/// Whether STORE or STOREDIST occurs more than once, or as the other's value.
fn repeats_an_option(call: &[Vec<u8>]) -> bool {
    let stores = call.iter().filter(|arg| is_option(arg, b"store") || is_option(arg, b"storedist")).count();
    let takes_value = |arg: &[u8]| [&b"by"[..], b"get", b"limit"].iter().any(|name| is_option(arg, name));
    stores > 1 || call.windows(2).any(|pair| is_option(&pair[0], b"store") && takes_value(&pair[1]))
}

#[test]
fn keys_match_those_found_by_servers() {
    let table = CommandTable::builtin();
    let mut wrong = Vec::new();
    let mut with_keys = 0;
    for server in servers() {
        let mut client = server.client();
        let mut random = Random(0x5377_6974_6368);
        for call in written_calls() {
            let Lookup::Command(ours) = table.find(&Arguments::new(&call).all()) else {
                panic!("{} is not in the table", shown(&call))
            };
            match compare(ours, &call, &mut client) {
                Ok(true) => {}
                Ok(false) => assert!(call[2] == b"0", "{}: no keys found, but it has some", shown(&call)),
                Err(text) => wrong.push(text),
            }
        }
        for theirs in client.commands() {
            let name = theirs.name.to_ascii_uppercase();
            let Some(ours) = table.by_name(&name) else { continue };
            for call in calls(&name, theirs.arity, &mut random) {
                match compare(ours, &call, &mut client) {
                    Ok(found) => with_keys += usize::from(found),
                    Err(text) => wrong.push(format!("{}: {text}", server.program)),
                }
            }
        }
    }
    assert!(with_keys > 10_000, "only {with_keys} calls had keys");
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong[..wrong.len().min(40)].join("\n"));
}

/// Simulates modules: the server's own commands under names missing from the table.
#[test]
fn keys_are_found_by_the_servers_own_specifications() {
    for server in servers() {
        let mut client = server.client();
        let theirs = client.commands();
        let renamed: Vec<LearntCommand> =
            theirs.iter().map(|c| LearntCommand { name: format!("x.{}", c.name), ..c.clone() }).collect();
        let mut table = CommandTable::builtin();
        assert_eq!(table.learn(&renamed), renamed.len());
        assert_eq!(table.learn(&renamed), 0, "a second node teaches nothing new");
        let mut random = Random(0x7961_7264);
        let mut with_keys = 0;
        for command in &theirs {
            let learnt = table.by_name(&format!("X.{}", command.name)).expect("just learnt");
            let is_stream = command.name.starts_with("xread"); // a consumer called `streams` misleads the specification
            for mut call in calls(&command.name, command.arity, &mut random) {
                if is_stream
                    && call
                        .iter()
                        .filter(|arg| {
                            arg.split(|byte| *byte == 0)
                                .next()
                                .is_some_and(|word| word.eq_ignore_ascii_case(b"streams"))
                        })
                        .count()
                        > 1
                {
                    continue;
                }
                let Ok(expected) = client.getkeys(&call) else { continue };
                call[0] = format!("X.{}", String::from_utf8_lossy(&call[0])).into_bytes();
                let arguments = Arguments::new(&call);
                let Lookup::Command(found) = table.find(&arguments.all()) else {
                    panic!("{} is not found", shown(&call))
                };
                assert_eq!(found.id, learnt.id);
                match find_keys(learnt, &arguments.all()) {
                    Ok(keys) => {
                        let keys: Vec<&[u8]> = keys.iter().map(|index| &call[*index as usize][..]).collect();
                        assert_eq!(keys, expected, "{}: {}", server.program, shown(&call));
                        with_keys += 1;
                    }
                    // SORT, MIGRATE; or fewer arguments than the declared number of keys
                    Err(KeyError::Undescribed) => {}
                    Err(KeyError::Arity) => {
                        assert!(call.len() % 2 == 0, "only MSET without its last value: {}", shown(&call))
                    }
                    Err(error) => panic!("{}: {error:?}", shown(&call)),
                }
            }
        }
        assert!(with_keys > 5_000, "only {with_keys} calls had keys");
    }
}

#[test]
fn invalid_specifications_cause_errors() {
    let spec = |begin, find| KeySpec { begin, find, not_key: false, incomplete: false, access: Access::RW };
    let numbered = Find::Numbered { index: 0, first: 1, step: 1 };
    let all = Find::Range { last: -1, step: 1, limit: 0 };
    for (begin, find, expected) in [
        (Begin::Index(1), numbered.clone(), Ok(vec![2, 3])),
        (Begin::Index(2), numbered.clone(), Err(KeyError::Undescribed)),
        (Begin::Index(u32::MAX), numbered, Err(KeyError::Undescribed)),
        (Begin::Index(1), Find::Numbered { index: 0, first: u32::MAX, step: u32::MAX }, Err(KeyError::Undescribed)),
        (Begin::Index(0), all.clone(), Err(KeyError::Undescribed)),
        (Begin::Index(1), Find::Range { last: i32::MIN, step: 1, limit: 0 }, Err(KeyError::Undescribed)),
        (Begin::Index(1), Find::Range { last: i32::MAX, step: 0, limit: u32::MAX }, Err(KeyError::Undescribed)),
        (Begin::Index(1), Find::Range { last: -1, step: 0, limit: 0 }, Ok(vec![1, 2, 3, 4])),
        (Begin::Keyword { word: "a".into(), start: 1 }, all.clone(), Ok(vec![3, 4])),
        (Begin::Keyword { word: "B".into(), start: -1 }, all.clone(), Ok(vec![4])),
        (Begin::Keyword { word: "a".into(), start: i32::MIN }, all.clone(), Ok(vec![])),
        (Begin::Keyword { word: "a".into(), start: i32::MAX }, all.clone(), Ok(vec![])),
        (Begin::Keyword { word: "a".into(), start: 0 }, all.clone(), Ok(vec![])),
        (Begin::Unknown, all, Err(KeyError::Undescribed)),
    ] {
        let specs = vec![spec(begin, find)];
        let mut table = CommandTable::builtin();
        table.learn(&[LearntCommand { name: "m".into(), arity: -1, specs: specs.clone(), ..LearntCommand::default() }]);
        let call = Arguments::new(&["m", "2", "A", "b", "c"]);
        let command = table.by_name("m").expect("just learnt");
        // An unknown specification leaves the key positions unknown.
        let expected = if matches!(command.keys, Keys::Unknown) { Err(KeyError::Undescribed) } else { expected };
        assert_eq!(find_keys(command, &call.all()), expected, "{specs:?}");
    }
}

#[test]
fn only_xread_with_block_blocks() {
    let table = CommandTable::builtin();
    for (line, blocks) in [
        ("XREAD STREAMS k 0", false),
        ("XREAD COUNT 1 STREAMS block 0", false),
        ("XREAD count block STREAMS k 0", false),
        ("xread count 1 BLOCK 0 streams k $", true),
        ("XREADGROUP GROUP block block STREAMS k >", false),
        ("XREADGROUP GROUP g c block 0 STREAMS k >", true),
        ("BLPOP k 0", true),
        ("LPOP k", false),
        ("GET block", false),
    ] {
        let arguments = Arguments::new(&line.split(' ').collect::<Vec<_>>());
        let Lookup::Command(command) = table.find(&arguments.all()) else { panic!("{line} is not found") };
        assert_eq!(command.blocks(&arguments.all()), blocks, "{line}");
    }
}

#[test]
fn sort_patterns_must_stay_in_the_slot() {
    let table = CommandTable::builtin();
    let sort = table.by_name("SORT").expect("SORT");
    for (line, expected) in [
        ("SORT k BY w_*", Err(KeyError::SortPattern("BY"))),
        ("SORT k GET obj_*->name", Err(KeyError::SortPattern("GET"))),
        ("SORT k BY nosort GET # GET plain", Ok(vec![1])),
        ("SORT {t}k BY w_{t}* GET {t}*->f STORE {t}d", Ok(vec![1, 7])),
        ("SORT {t}k BY w_*{t}", Err(KeyError::SortPattern("BY"))),
        ("SORT {t}k BY w_{u}*", Err(KeyError::SortPattern("BY"))),
        ("SORT {t}k BY w_{}*{t}", Err(KeyError::SortPattern("BY"))),
        ("SORT k BY w_{k}*", Ok(vec![1])),
        ("SORT k STORE by STORE d", Ok(vec![1, 5])),
    ] {
        let arguments = Arguments::new(&line.split(' ').collect::<Vec<_>>());
        assert_eq!(find_keys(sort, &arguments.all()), expected, "{line}");
    }
}

#[test]
fn a_key_not_yet_received_is_incomplete() {
    let table = CommandTable::builtin();
    let found = |line: &str, known| {
        let arguments = Arguments::new(&line.split(' ').collect::<Vec<_>>());
        let args = arguments.first(known);
        let Lookup::Command(command) = table.find(&args) else { panic!("{line} is not found") };
        assert_eq!(
            command.first_key_only(&args).map(|i| i as u32),
            find_keys(command, &args).ok().filter(|_| command.keys == Keys::FIRST).map(|k| k[0])
        );
        find_keys(command, &args)
    };
    assert_eq!(found("SET k large", 2), Ok(vec![1]));
    assert_eq!(found("SET k large NX", 2), Ok(vec![1]));
    assert_eq!(found("SET large v", 1), Err(KeyError::Incomplete));
    assert_eq!(found("MSET k1 v1 k2 large", 4), Ok(vec![1, 3]));
    assert_eq!(found("MSET k1 large k2 v2", 2), Err(KeyError::Incomplete));
    assert_eq!(found("EVAL s 1 k large", 4), Ok(vec![3]));
    assert_eq!(found("EVAL large 1 k", 1), Err(KeyError::Incomplete));
    assert_eq!(found("SORT k GET large", 3), Err(KeyError::Incomplete));
    assert_eq!(found("XREAD STREAMS k large", 3), Ok(vec![2]));
    assert_eq!(found("RESTORE k 0 large", 3), Ok(vec![1]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    /// For any arguments: no panic, no index of a missing argument, no more work than the number of arguments, and a
    /// partial command gives part of the complete result.
    #[test]
    fn find_keys_accepts_any_arguments(
        id in any::<proptest::sample::Index>(),
        words in proptest::collection::vec(word(), 0..12),
        known in any::<proptest::sample::Index>(),
        declared_more in prop_oneof![Just(0usize), Just(1), Just(1_000_000), Just(i32::MAX as usize)],
    ) {
        let table = CommandTable::builtin();
        let command = table.get(id.index(table.len()) as u16).expect("an id below the length");
        let call: Vec<Vec<u8>> =
            command.name.split('|').map(|w| w.as_bytes().to_vec()).chain(words).collect();
        let arguments = Arguments::new(&call);
        let whole = find_keys(command, &arguments.all());
        prop_assert_ne!(&whole, &Err(KeyError::Incomplete));
        if let Ok(keys) = &whole {
            prop_assert!(keys.iter().all(|k| *k >= 1 && (*k as usize) < call.len()));
        }
        if let Err(error) = &whole {
            prop_assert!(error.text(command).starts_with("ERR "));
        }
        let part = find_keys(command, &arguments.first(known.index(call.len() + 1)));
        prop_assert!(part == Err(KeyError::Incomplete) || part == whole, "{part:?} of a part, {whole:?} of the whole");

        let huge = Args::partial(&arguments.buf, &arguments.spans, call.len() + declared_more);
        let mut out = Vec::new();
        let _ = command.find_keys(&huge, &mut out);
        prop_assert!(out.len() <= call.len() * 2 && out.iter().all(|k| (*k as usize) < call.len()));
        let _ = (command.blocks(&huge), table.find(&huge), errors::unknown(&huge), errors::unknown_subcommand(command, &huge));
    }

    /// Invalid replies to COMMAND add nothing harmful.
    #[test]
    fn learning_accepts_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300), edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6)) {
        let mut real = b"*1\r\n*10\r\n$3\r\nfoo\r\n:-2\r\n*1\r\n+write\r\n:1\r\n:1\r\n:1\r\n*0\r\n*0\r\n*1\r\n*6\r\n$5\r\nflags\r\n*1\r\n+RW\r\n\
            $12\r\nbegin_search\r\n*4\r\n$4\r\ntype\r\n$5\r\nindex\r\n$4\r\nspec\r\n*2\r\n$5\r\nindex\r\n:1\r\n$9\r\nfind_keys\r\n*4\r\n$4\r\ntype\r\n\
            $5\r\nrange\r\n$4\r\nspec\r\n*6\r\n$7\r\nlastkey\r\n:0\r\n$7\r\nkeystep\r\n:1\r\n$5\r\nlimit\r\n:0\r\n*0\r\n".to_vec();
        for (at, byte) in edits {
            let at = at.index(real.len());
            real[at] = byte;
        }
        for reply in [bytes, real] {
            let learnt = parse_command_reply(&reply);
            let mut table = CommandTable::builtin();
            table.learn(&learnt);
            for command in table.iter().skip(CommandTable::builtin().len()) {
                let call = Arguments::new(&["a", "1", "b", "c"]);
                if let Ok(keys) = find_keys(command, &call.all()) {
                    prop_assert!(keys.iter().all(|k| *k < 4));
                }
            }
        }
    }
}

fn word() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::sample::select(vec![
            "store",
            "storedist",
            "by",
            "get",
            "limit",
            "keys",
            "streams",
            "block",
            "count",
            "group",
            "auth2",
            "*",
            "{a}*",
            "0",
            "1",
            "2",
            "3",
            "-1",
            "-0",
            "+1",
            "9223372036854775807",
            "9223372036854775808",
            "-9223372036854775808",
            "",
        ])
        .prop_map(|w| w.as_bytes().to_vec()),
        proptest::collection::vec(any::<u8>(), 0..6),
    ]
}
