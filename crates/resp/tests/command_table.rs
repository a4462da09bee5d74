//! Holds the command table against real servers: every command they have, its arity, flags and keys, and Redis's words for errors.
//!
//! The servers are asked, never trusted to be a certain version: `redis-server` must be installed; `valkey-server` is used where it is
//! on the PATH. Random cases come from a fixed seed, so that a failure is the same failure tomorrow.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command as Process, Stdio};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use switchyard_resp::command::{
    Begin, Command, CommandTable, Find, Flags, Handling, KeyError, Keys, LearntCommand, Local, Lookup, errors, parse_command_reply,
};
use switchyard_resp::request::{Args, Span};
use switchyard_resp::{encode, reply};

/// A server of our own, on a socket in a directory that goes with it.
struct Server {
    process: Child,
    directory: tempfile::TempDir,
    program: &'static str,
}

impl Server {
    /// `None` where the program is not installed.
    fn start(program: &'static str) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let process = Process::new(program)
            .args(["--port", "0", "--save", "", "--unixsocket", "server.sock"])
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        let server = Self { process, directory, program };
        let deadline = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(server.socket()).is_err() {
            assert!(Instant::now() < deadline, "{program} does not listen on {}", server.socket().display());
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }

    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("server.sock")
    }

    fn client(&self) -> Client {
        Client { stream: UnixStream::connect(self.socket()).expect("a connection"), buf: Vec::new() }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

struct Client {
    stream: UnixStream,
    buf: Vec<u8>,
}

impl Client {
    fn call<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Vec<u8> {
        self.buf.clear();
        encode::command(&mut self.buf, args.iter().map(AsRef::as_ref));
        self.stream.write_all(&self.buf).expect("a server that reads");
        self.buf.clear();
        let mut scanner = reply::ReplyScanner::default();
        loop {
            if !self.buf.is_empty()
                && let reply::ReplyScan::Complete(len) = scanner.scan(&self.buf).expect("a well-formed reply")
            {
                assert_eq!(len, self.buf.len(), "more than one reply");
                return std::mem::take(&mut self.buf);
            }
            let mut piece = [0; 16 * 1024];
            let len = self.stream.read(&mut piece).expect("a server that answers");
            assert!(len > 0, "the server closed the connection after {}", shown(args));
            self.buf.extend_from_slice(&piece[..len]);
        }
    }

    fn commands(&mut self) -> Vec<LearntCommand> {
        let commands = parse_command_reply(&self.call(&["COMMAND"]));
        assert!(commands.len() > 300, "only {} commands", commands.len());
        commands
    }

    /// The keys that the server finds, or its error.
    fn getkeys<A: AsRef<[u8]>>(&mut self, args: &[A]) -> Result<Vec<Vec<u8>>, String> {
        let mut call: Vec<&[u8]> = vec![b"COMMAND", b"GETKEYS"];
        call.extend(args.iter().map(AsRef::as_ref));
        let answer = self.call(&call);
        match error_text(&answer) {
            Some(text) => Err(text),
            None => Ok(reply::elements(&answer).map(|e| reply::text(e).expect("a key").to_vec()).collect()),
        }
    }
}

fn error_text(answer: &[u8]) -> Option<String> {
    reply::is_error(answer).then(|| String::from_utf8_lossy(&answer[1..answer.len() - 2]).into_owned())
}

fn shown<A: AsRef<[u8]>>(args: &[A]) -> String {
    args.iter().map(|a| format!("\"{}\"", a.as_ref().escape_ascii())).collect::<Vec<_>>().join(" ")
}

/// Owns the bytes behind an [`Args`].
struct Arguments {
    buf: Vec<u8>,
    spans: Vec<Span>,
}

impl Arguments {
    fn new<A: AsRef<[u8]>>(args: &[A]) -> Self {
        let mut buf = Vec::new();
        let spans = args
            .iter()
            .map(|arg| {
                let start = buf.len() as u32;
                buf.extend_from_slice(arg.as_ref());
                Span { start, len: arg.as_ref().len() as u32 }
            })
            .collect();
        Self { buf, spans }
    }

    fn all(&self) -> Args<'_> {
        Args::new(&self.buf, &self.spans)
    }

    fn first(&self, known: usize) -> Args<'_> {
        Args::partial(&self.buf, &self.spans[..known], self.spans.len())
    }
}

fn find_keys(command: &Command, args: &Args<'_>) -> Result<Vec<u32>, KeyError> {
    let mut keys = Vec::new();
    command.find_keys(args, &mut keys).map(|()| keys)
}

fn servers() -> Vec<Server> {
    let redis = Server::start("redis-server").expect("redis-server is not on the PATH: `make setup` or `apt install redis-server`");
    let valkey = Server::start("valkey-server");
    if valkey.is_none() {
        eprintln!("valkey-server is not on the PATH: checked against redis-server only");
    }
    std::iter::once(redis).chain(valkey).collect()
}

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

/// Where versions differ, the row takes more arguments than this server does.
const LOOSER_ARITY: [&str; 4] = ["ZRANK", "ZREVRANK", "COMMAND|GETKEYS", "COMMAND|GETKEYSANDFLAGS"];

/// Flags that versions disagree on. WAIT got its `blocking` with Valkey 8 and Redis 7.2: it always waited.
const NEWER_FLAGS: [(&str, Flags); 1] = [("WAIT", Flags::BLOCKING)];

/// Flags that `COMMAND` shows, by our names.
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

/// First, last and step as `COMMAND` shows them for commands whose keys have a shape of their own.
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
fn rows_say_what_the_servers_say() {
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
        assert_eq!(client.commands(), resp2, "RESP3 says the same");
    }
}

/// Argument lists for a command: plain ones of every length, and random ones of words that mean something to some command.
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
                0 => WORDS[random.below(WORDS.len())].as_bytes().to_vec(),
                1 => format!("{}", random.below(len + 1)).into_bytes(),
                _ => format!("a{index}").into_bytes(),
            });
        }
        calls.push(call);
    }
    calls
}

/// Calls in forms that random arguments seldom hit.
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
        "GEORADIUS k 1 2 3 km STORE d",
        "GEORADIUS k 1 2 3 km WITHDIST COUNT 3 ANY ASC STOREDIST d",
        "GEORADIUSBYMEMBER k m 3 km STORE d",
        "GEORADIUSBYMEMBER k m 3 km",
        "XREAD STREAMS k1 k2 0 0",
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

/// Compares what we and the server find; says whether there were keys.
fn compare(ours: &Command, call: &[Vec<u8>], client: &mut Client) -> Result<bool, String> {
    let arguments = Arguments::new(call);
    let found = find_keys(ours, &arguments.all()).map(|found| found.iter().map(|index| &call[*index as usize][..]).collect::<Vec<_>>());
    let theirs = client.getkeys(call);
    let served = matches!(ours.handling, Handling::Keyed | Handling::Split(_));
    match (&found, &theirs) {
        (Ok(found), Ok(theirs)) if found == theirs => return Ok(true),
        // The server names both STORE and STOREDIST, and an earlier STORE, though only the last one is written; and it misses
        // `STORE d` after `STORE get`, though it is written.
        (Ok(found), Ok(_)) if repeats_an_option(call) && found.first() == Some(&&call[1][..]) => return Ok(true),
        (Ok(found), Err(_)) if found.is_empty() => return Ok(false),
        // Channels are routed like keys, and are none to COMMAND GETKEYS.
        (Ok(_), Err(_)) if ours.flags.has(Flags::PUBSUB) => return Ok(false),
        // It runs, but the specification wants a source as well.
        (Ok(found), Err(_)) if ours.name == "PFMERGE" && found.len() == 1 => return Ok(true),
        // By design: it runs at one server, but would miss keys where there are several.
        (Err(KeyError::SortPattern(_)), Ok(_)) => return Ok(false),
        // These are not run here (they block, or are refused). COMMAND GETKEYS takes `01` for a number; the commands do not.
        (Err(KeyError::NumkeysNotInteger(_) | KeyError::Syntax), Ok(_)) | (Err(_), Err(_)) if !served => return Ok(false),
        _ => {}
    }
    // One of us says that the call is wrong: then the server must refuse to run it.
    let answer = if served && (found.is_err() || theirs.is_err()) { client.call(call) } else { Vec::new() };
    if reply::is_error(&answer) {
        return Ok(false);
    }
    let found = found.map(|found| shown(&found));
    let theirs = theirs.map(|theirs| shown(&theirs));
    Err(format!("{}: we find {found:?}, the server {theirs:?}, and answers {:?}", shown(call), answer.escape_ascii().to_string()))
}

/// STORE or STOREDIST more than once, or one of them as another's value.
fn repeats_an_option(call: &[Vec<u8>]) -> bool {
    let stores = call.iter().filter(|arg| arg.eq_ignore_ascii_case(b"store") || arg.eq_ignore_ascii_case(b"storedist")).count();
    stores > 1
        || call.windows(2).any(|pair| pair[0].eq_ignore_ascii_case(b"store") && [&b"by"[..], b"get", b"limit"].contains(&&pair[1][..]))
}

#[test]
fn finds_the_keys_that_the_servers_find() {
    let table = CommandTable::builtin();
    let mut wrong = Vec::new();
    let mut with_keys = 0;
    for server in servers() {
        let mut client = server.client();
        let mut random = Random(0x5377_6974_6368);
        for call in written_calls() {
            let Lookup::Command(ours) = table.find(&Arguments::new(&call).all()) else { panic!("{} is not in the table", shown(&call)) };
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

/// What modules would teach: the server's own commands under names that the table does not have.
#[test]
fn finds_keys_by_the_servers_own_specifications() {
    for server in servers() {
        let mut client = server.client();
        let theirs = client.commands();
        let renamed: Vec<LearntCommand> = theirs.iter().map(|c| LearntCommand { name: format!("x.{}", c.name), ..c.clone() }).collect();
        let mut table = CommandTable::builtin();
        assert_eq!(table.learn(&renamed), renamed.len());
        assert_eq!(table.learn(&renamed), 0, "a second node teaches nothing new");
        let mut random = Random(0x7961_7264);
        let mut with_keys = 0;
        for command in &theirs {
            let learnt = table.by_name(&format!("X.{}", command.name)).expect("just learnt");
            let is_stream = command.name.starts_with("xread"); // a consumer called `streams` misleads the specification
            for mut call in calls(&command.name, command.arity, &mut random) {
                if is_stream && call.iter().filter(|arg| arg.eq_ignore_ascii_case(b"streams")).count() > 1 {
                    continue;
                }
                let Ok(expected) = client.getkeys(&call) else { continue };
                call[0] = format!("X.{}", String::from_utf8_lossy(&call[0])).into_bytes();
                let arguments = Arguments::new(&call);
                let Lookup::Command(found) = table.find(&arguments.all()) else { panic!("{} is not found", shown(&call)) };
                assert_eq!(found.id, learnt.id);
                match find_keys(learnt, &arguments.all()) {
                    Ok(keys) => {
                        let keys: Vec<&[u8]> = keys.iter().map(|index| &call[*index as usize][..]).collect();
                        assert_eq!(keys, expected, "{}: {}", server.program, shown(&call));
                        with_keys += 1;
                    }
                    Err(KeyError::Undescribed) => {} // SORT, MIGRATE; or fewer arguments than the number of keys says
                    Err(KeyError::Arity) => assert!(call.len() % 2 == 0, "only MSET without its last value: {}", shown(&call)),
                    Err(error) => panic!("{}: {error:?}", shown(&call)),
                }
            }
        }
        assert!(with_keys > 5_000, "only {with_keys} calls had keys");
    }
}

#[test]
fn what_is_learnt_is_forwarded_only_where_its_keys_can_be_told() {
    let learnt = |name: &str, flags: &[&str], first| LearntCommand {
        name: name.into(),
        arity: -2,
        flags: flags.iter().map(|&f| f.into()).collect(),
        first,
        last: first,
        step: first,
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
    assert!(matches!(get("FT.SEARCH").handling, Handling::Refused(_)));
    assert_eq!(get("cms.merge").keys, Keys::Unknown);
    assert!(get("cms.merge").flags.has(Flags::WRITE.and(Flags::DENY_OOM)));
    assert_eq!(get("w.wait").handling, Handling::Later("blocking commands"));
    assert_eq!(get("get").keys, Keys::FIRST, "what the table has is not changed");
    assert_eq!(get("config|get").handling, Handling::Local(Local::ConfigGet));
    let call = Arguments::new(&["JSON.debug", "MEMORY", "doc"]);
    let Lookup::Command(found) = table.find(&call.all()) else { panic!("a learnt subcommand is not found") };
    assert_eq!(find_keys(found, &call.all()), Ok(vec![2]));
}

#[test]
fn specifications_that_make_no_sense_are_errors_not_guesses() {
    let spec = |begin, find| switchyard_resp::command::KeySpec { begin, find, not_key: false, incomplete: false };
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
        // An unknown specification leaves the command without places.
        let expected = if matches!(command.keys, Keys::Unknown) { Err(KeyError::Undescribed) } else { expected };
        assert_eq!(find_keys(command, &call.all()), expected, "{specs:?}");
    }
}

#[test]
fn errors_have_redis_words() {
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
            assert_eq!(text_of(call).escape_ascii().to_string(), theirs.escape_ascii().to_string(), "{}: {}", server.program, shown(call));
        }
        // Too few arguments, for every command that wants some.
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
        let mixed: Vec<String> =
            words.iter().map(|w| w.char_indices().map(|(i, c)| if i % 2 == 0 { c } else { c.to_ascii_lowercase() }).collect()).collect();
        for spelling in [lower, mixed] {
            assert_eq!(find(&spelling.iter().map(|s| &**s).collect::<Vec<_>>()), Some(command.id), "{spelling:?}");
        }
        let last = words[words.len() - 1];
        for cut in 0..last.len() {
            for other in [&last[..cut], &format!("{}\u{1}{}", &last[..cut], &last[cut + 1..]), &format!("{last}{}", &last[cut..])] {
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
            Handling::Every(_) | Handling::Any | Handling::Local(_) => assert!(!has_keys, "{} has keys", command.name),
            Handling::Later(text) | Handling::Refused(text) => {
                assert!(!text.is_empty());
                assert!(errors::not_served(command).is_some_and(|t| t.starts_with("ERR ") && t.contains(text)));
            }
        }
        let both = command.flags.has(Flags::WRITE.and(Flags::READONLY));
        assert!(!both, "{} both writes and does not", command.name);
        assert!(command.name.len() <= 64 && !command.name.bytes().any(|b| b.is_ascii_lowercase()));
        if command.flags.has(Flags::BLOCKING) {
            let streams = command.keys == Keys::Streams;
            assert!(streams || matches!(command.handling, Handling::Later(_)), "{} would stall a pipeline", command.name);
        }
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
fn a_key_that_is_not_there_yet_is_waited_for() {
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

    /// Whatever the arguments: no panic, no index of what is not there, no more work than there are arguments, and what is said of
    /// a part is what is said of the whole.
    #[test]
    fn find_keys_survives_anything(
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

    /// Replies to COMMAND that are garbage teach nothing harmful.
    #[test]
    fn learning_survives_anything(bytes in proptest::collection::vec(any::<u8>(), 0..300), edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6)) {
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
