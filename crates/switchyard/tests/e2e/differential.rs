//! Compares the router with a plain server: the same commands in the same order must give the same bytes.
//!
//! Redis itself is not deterministic everywhere. All allowed differences between two servers are listed by command in
//! [`Comparison`]. Everything else is compared byte by byte, in RESP2 and in RESP3.

use std::fmt::Write as _;

use crate::support::{Client, Node, NodeOptions, Random, Site, SiteOptions, Value, encode, until, value};

pub(crate) type Command = Vec<Vec<u8>>;

/// Method of comparing replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comparison {
    /// All bytes.
    Bytes,
    /// Members in any order: sets and hash tables are iterated in the order of a hash with a random seed per server.
    Members,
    /// Field-value pairs in any order.
    Pairs,
    /// `[cursor, members]` with members in any order. The cursor depends on the seed as well, so tests request all
    /// members in one call.
    CursorMembers,
    /// `[cursor, flat pairs]` with pairs in any order.
    CursorPairs,
    /// Sign, and the value if negative: the rest is elapsed time.
    Sign,
    /// Types and lengths of aggregates, and types of leaves: the leaves are random members or ages.
    Shape,
}

fn how(command: &Command) -> Comparison {
    let word = |i: usize| command.get(i).map(|w| String::from_utf8_lossy(w).to_ascii_uppercase()).unwrap_or_default();
    match (word(0).as_str(), word(1).as_str()) {
        ("SMEMBERS" | "SINTER" | "SUNION" | "SDIFF" | "HKEYS" | "HVALS" | "KEYS", _) => Comparison::Members,
        // Tests request at least all members, so that only the order is random.
        ("SPOP" | "SRANDMEMBER" | "HRANDFIELD" | "ZRANDMEMBER", _)
            if command.len() == 3 && !word(2).starts_with('-') =>
        {
            Comparison::Members
        }
        ("SRANDMEMBER" | "HRANDFIELD" | "ZRANDMEMBER", _) => Comparison::Shape,
        ("HGETALL", _) => Comparison::Pairs,
        ("SSCAN", _) => Comparison::CursorMembers,
        ("HSCAN" | "ZSCAN", _) => Comparison::CursorPairs,
        ("TTL" | "PTTL" | "EXPIRETIME" | "PEXPIRETIME", _) => Comparison::Sign,
        // A set is dumped in the order of its hash table.
        ("DUMP", _) => Comparison::Shape,
        ("OBJECT", "IDLETIME") | ("MEMORY", "USAGE") | ("XINFO", "CONSUMERS") => Comparison::Shape,
        ("XINFO", "STREAM") if command.len() > 3 => Comparison::Shape,
        // The extended form contains the time since each delivery.
        ("XPENDING", _) if command.len() > 3 => Comparison::Shape,
        ("XADD", _) if command.iter().any(|w| w == b"*") => Comparison::Shape,
        _ => Comparison::Bytes,
    }
}

fn sorted(items: &[Value]) -> Value {
    let mut texts: Vec<String> = items.iter().map(|item| format!("{item:?}")).collect();
    texts.sort();
    Value::Array(texts.iter().map(value::bulk).collect())
}

fn shape(value: &Value) -> Value {
    match value {
        Value::Array(v) => Value::Array(v.iter().map(shape).collect()),
        Value::Set(v) => Value::Set(v.iter().map(shape).collect()),
        Value::Push(v) => Value::Push(v.iter().map(shape).collect()),
        Value::Map(v) => Value::Map(v.iter().map(|(k, v)| (k.clone(), shape(v))).collect()),
        Value::Int(_) => value::int(0),
        Value::Bulk(_) => value::bulk("..."),
        Value::Double(_) => Value::Double("...".into()),
        other => other.clone(),
    }
}

fn canonical(how: Comparison, raw: &[u8]) -> Value {
    let reply = value::parse(raw);
    if let Some(error) = reply.error() {
        // The router itself finds the keys of XREAD, and so produces this error. The rest of its text differs between
        // Redis and Valkey.
        let unbalanced = "ERR Unbalanced ";
        return if error.starts_with(unbalanced) { Value::Error(unbalanced.into()) } else { reply };
    }
    match (how, &reply) {
        (Comparison::Members, Value::Array(v) | Value::Set(v)) => sorted(v),
        (Comparison::Pairs, Value::Array(v)) => {
            sorted(&v.chunks(2).map(|p| Value::Array(p.to_vec())).collect::<Vec<_>>())
        }
        (Comparison::Pairs, Value::Map(v)) => {
            sorted(&v.iter().map(|(k, v)| Value::Array(vec![k.clone(), v.clone()])).collect::<Vec<_>>())
        }
        (Comparison::CursorMembers, Value::Array(v)) => Value::Array(vec![v[0].clone(), sorted(v[1].items())]),
        (Comparison::CursorPairs, Value::Array(v)) => {
            let pairs: Vec<Value> = v[1].items().chunks(2).map(|p| Value::Array(p.to_vec())).collect();
            Value::Array(vec![v[0].clone(), sorted(&pairs)])
        }
        (Comparison::Sign, Value::Int(n)) => value::int(if *n > 0 { 1 } else { *n }),
        (Comparison::Shape, other) => shape(other),
        (_, other) => other.clone(),
    }
}

/// Formats a command as typed input.
pub(crate) fn show(command: &Command) -> String {
    let mut out = String::new();
    for word in command.iter().take(12) {
        if word.len() > 60 {
            let _ = write!(out, "\"{}...\"({}) ", word[..30].escape_ascii(), word.len());
        } else {
            let _ = write!(out, "\"{}\" ", word.escape_ascii());
        }
    }
    if command.len() > 12 {
        let _ = write!(out, "... ({} arguments)", command.len());
    }
    out
}

/// Sends `commands` to both in pipelines with lengths from `lengths`, and compares the replies.
#[track_caller]
pub(crate) fn compare(
    label: &str,
    routed: &mut Client,
    plain: &mut Client,
    commands: &[Command],
    mut lengths: impl FnMut() -> usize,
) {
    let mut done = 0;
    while done < commands.len() {
        let batch = &commands[done..commands.len().min(done + lengths().max(1))];
        let bytes: Vec<u8> = batch.iter().flat_map(|c| encode(c)).collect();
        let ours = routed.pipeline(&bytes, batch.len());
        let theirs = plain.pipeline(&bytes, batch.len());
        for (i, command) in batch.iter().enumerate() {
            if ours[i] == theirs[i] {
                continue;
            }
            let how = how(command);
            if canonical(how, &ours[i]) == canonical(how, &theirs[i]) {
                continue;
            }
            let index = done + i;
            let history: Vec<String> = commands[..index]
                .iter()
                .filter(|c| c[1..].iter().any(|w| w.starts_with(b"{") && command[1..].contains(w)))
                .map(show)
                .collect();
            let recent = &history[history.len().saturating_sub(12)..];
            let cut = |raw: &[u8]| raw[..raw.len().min(400)].escape_ascii().to_string();
            panic!(
                "{label}: command {index} of {} (position {i} of {} in its pipeline), compared by {how:?}:\n  {}\n  router: {}\n  plain:  {}\n  \
                 the last commands that shared a key with it:\n    {}",
                commands.len(),
                batch.len(),
                show(command),
                cut(&ours[i]),
                cut(&theirs[i]),
                recent.join("\n    "),
            );
        }
        done += batch.len();
    }
}

/// A router in front of three nodes, and a plain server.
struct Pair {
    site: Site,
    plain: Node,
}

impl Pair {
    fn new(program: Option<&str>) -> Pair {
        let node = NodeOptions { program: program.map(str::to_owned), ..NodeOptions::default() };
        let plain = Node::start(&node);
        Pair { site: Site::with(3, &SiteOptions { node, ..SiteOptions::default() }), plain }
    }

    fn clients(&self, resp: u8) -> (Client, Client) {
        let mut both = (self.site.client(), self.plain.client());
        if resp == 3 {
            for client in [&mut both.0, &mut both.1] {
                client.cmd("HELLO 3").field("proto");
            }
        }
        both
    }

    fn flush(&self) {
        assert_eq!(self.site.client().cmd("FLUSHALL"), value::ok());
        assert_eq!(self.plain.cmd("FLUSHALL"), value::ok());
    }
}

/// Hand-written sequences, one family per block. `#` begins a comment. Keys of one command share a hash tag, as a
/// cluster requires.
pub(crate) const SCRIPTS: &[(&str, &str)] = &[
    ("strings", include_str!("scripts/strings.txt")),
    ("keys", include_str!("scripts/keys.txt")),
    ("lists", include_str!("scripts/lists.txt")),
    ("hashes", include_str!("scripts/hashes.txt")),
    ("sets", include_str!("scripts/sets.txt")),
    ("zsets", include_str!("scripts/zsets.txt")),
    ("streams", include_str!("scripts/streams.txt")),
    ("bits, hyperloglogs, places", include_str!("scripts/bits_hll_geo.txt")),
    ("scripts", include_str!("scripts/scripts.txt")),
    ("transactions", include_str!("scripts/transactions.txt")),
    ("blocking", include_str!("scripts/blocking.txt")),
    ("errors", include_str!("scripts/errors.txt")),
];

pub(crate) fn script(text: &str) -> Vec<Command> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(crate::support::words)
        .collect()
}

/// Programs to compare with: the default server, and Valkey if it is installed in addition to Redis. Not a development
/// version of Valkey: one such build sometimes answers BITCOUNT after `SETBIT k 1972 1` with 5.
fn programs() -> Vec<Option<&'static str>> {
    let mut programs = vec![None];
    let chosen = std::env::var_os("SWITCHYARD_E2E_SERVER").is_some();
    if !chosen && ["redis-server", "valkey-server"].into_iter().all(crate::support::process::on_path) {
        let version =
            std::process::Command::new("valkey-server").arg("--version").output().expect("valkey-server --version");
        if !String::from_utf8_lossy(&version.stdout).contains("255.255.255") {
            programs.push(Some("valkey-server"));
        }
    }
    programs
}

#[test]
fn hand_written_sequences_match_a_plain_server() {
    for program in programs() {
        let pair = Pair::new(program);
        for resp in [2, 3] {
            for (family, text) in SCRIPTS {
                let commands = script(text);
                let (mut routed, mut plain) = pair.clients(resp);
                // One by one, as typed, and in one pipeline, as sent by a program.
                compare(&format!("{family}, RESP{resp}, one by one"), &mut routed, &mut plain, &commands, || 1);
                pair.flush();
                compare(&format!("{family}, RESP{resp}, pipelined"), &mut routed, &mut plain, &commands, || 1000);
                pair.flush();
            }
        }
    }
}

/// Commands with keys that have no hand-written sequence, with the reason.
const NOT_IN_SCRIPTS: &[(&str, &str)] = &[
    ("spublish", "publish/subscribe: see pubsub.rs"),
    ("ssubscribe", "publish/subscribe: see pubsub.rs"),
    ("sunsubscribe", "publish/subscribe: see pubsub.rs"),
    ("migrate", "an operator's command: would go around the router's placement"),
    ("restore-asking", "between cluster nodes only"),
    ("pfdebug", "for developers of the server only"),
];

#[test]
fn every_command_with_keys_has_a_hand_written_sequence() {
    let node = Node::start(&NodeOptions::default());
    let used: std::collections::BTreeSet<String> = SCRIPTS
        .iter()
        .flat_map(|(_, text)| script(text))
        .map(|command| String::from_utf8_lossy(&command[0]).to_ascii_lowercase())
        .collect();
    let missing: Vec<String> = node
        .cmd("COMMAND")
        .items()
        .iter()
        .filter(|row| {
            let row = row.items();
            let movable = row[2].items().iter().any(|flag| flag.text() == "movablekeys");
            row[3].int() != 0 || movable
        })
        .map(|row| row.items()[0].text())
        .filter(|name| !used.contains(name) && !NOT_IN_SCRIPTS.iter().any(|(known, _)| known == name))
        .collect();
    assert!(missing.is_empty(), "commands of this server that no sequence in scripts/ uses: {missing:?}");
}

/// Templates of random commands. `$x` is a key of the family `x`. All keys of a command share a tag. `$1..` are values,
/// see [`Generator`].
const TEMPLATES: &str = include_str!("scripts/random.txt");

struct Generator {
    random: Random,
    templates: Vec<Vec<String>>,
}

impl Generator {
    fn new(seed: u64) -> Generator {
        let templates = TEMPLATES
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(str::to_owned).collect())
            .collect();
        Generator { random: Random::new(seed), templates }
    }

    fn key(&mut self, tag: usize, family: &str) -> Vec<u8> {
        // Sometimes a key of another type: errors must match as well.
        let family =
            if self.random.one_in(12) { *self.random.pick(&[&"s", &"l", &"h", &"e", &"z", &"x"]) } else { family };
        format!("{{tag{tag}}}{family}{}", self.random.below(3)).into_bytes()
    }

    fn value(&mut self) -> Vec<u8> {
        let random = &mut self.random;
        match random.below(10) {
            0 => Vec::new(),
            1 => random.range(-1000, 1000).to_string().into_bytes(),
            2 => i64::MAX.to_string().into_bytes(),
            3 => b"3.25".to_vec(),
            4 => {
                let len = random.below(300);
                random.bytes(len)
            }
            5 => b"\r\n$3\r\n-ERR\r\n+OK\r\n\0".to_vec(),
            6 if random.one_in(20) => {
                let len = 20_000 + random.below(100_000);
                random.bytes(len)
            }
            _ => format!("value{}", random.below(50)).into_bytes(),
        }
    }

    /// Adds commands of one slot between MULTI and EXEC, sometimes with WATCH, and with errors.
    fn transaction(&mut self, out: &mut Vec<Command>) {
        let tag = self.random.below(24);
        let watched = format!("{{tag{tag}}}s{}", self.random.below(3)).into_bytes();
        if self.random.one_in(3) {
            out.push(vec![b"WATCH".to_vec(), watched.clone()]);
            if self.random.one_in(2) {
                out.push(vec![b"APPEND".to_vec(), watched, b"touched".to_vec()]);
            }
            if self.random.one_in(6) {
                out.push(vec![b"UNWATCH".to_vec()]);
            }
        }
        out.push(vec![b"MULTI".to_vec()]);
        for _ in 0..self.random.below(6) {
            let command = loop {
                let command = self.command_of(tag);
                // Within EXEC, only commands with byte-wise comparison can be compared, and other slots are refused.
                let elsewhere = command
                    .iter()
                    .any(|w| w.starts_with(b"{tag") && !w.starts_with(format!("{{tag{tag}}}").as_bytes()));
                // If later versions accept more arguments, the node refuses the command only at EXEC.
                let surplus = command.iter().any(|w| w.ends_with(b"}surplus"));
                if how(&command) == Comparison::Bytes
                    && !elsewhere
                    && !surplus
                    && !command[0].eq_ignore_ascii_case(b"SORT")
                {
                    break command;
                }
            };
            out.push(command);
        }
        if self.random.one_in(12) {
            out.push(vec![b"NOSUCHCOMMAND".to_vec()]);
        }
        out.push(vec![if self.random.one_in(10) { b"DISCARD".to_vec() } else { b"EXEC".to_vec() }]);
    }

    fn command(&mut self) -> Command {
        let tag = self.random.below(24);
        self.command_of(tag)
    }

    fn command_of(&mut self, tag: usize) -> Command {
        let template = self.templates[self.random.below(self.templates.len())].clone();
        let mut command = Command::new();
        for word in &template {
            let Some(hole) = word.strip_prefix('$') else {
                command.push(word.clone().into_bytes());
                continue;
            };
            let (hole, times) = match hole.strip_suffix('*') {
                Some(hole) => (hole, 1 + self.random.below(4)),
                None => (hole, 1),
            };
            for _ in 0..times {
                let random = &mut self.random;
                match hole {
                    "s" | "l" | "h" | "e" | "z" | "x" | "b" | "p" | "g" => {
                        let key = self.key(tag, hole);
                        command.push(key);
                    }
                    // Sorted sets with equal scores. Otherwise the range between two members is undefined.
                    "y" => command.push(format!("{{tag{tag}}}y{}", random.below(3)).into_bytes()),
                    // Keys of any slot, for commands that the router splits.
                    "any" => {
                        let tag = self.random.below(24);
                        let key = self.key(tag, "s");
                        command.push(key);
                    }
                    "anypair" => {
                        let tag = self.random.below(24);
                        let key = format!("{{tag{tag}}}s{}", self.random.below(3)).into_bytes();
                        command.push(key);
                        let value = self.value();
                        command.push(value);
                    }
                    "pair" => {
                        let key = format!("{{tag{tag}}}s{}", random.below(3)).into_bytes();
                        command.push(key);
                        let value = self.value();
                        command.push(value);
                    }
                    "v" => {
                        let value = self.value();
                        command.push(value);
                    }
                    "i" => command.push(random.range(-6, 12).to_string().into_bytes()),
                    "n" => command.push(random.range(0, 2000).to_string().into_bytes()),
                    "bit" => command.push(random.below(2).to_string().into_bytes()),
                    "f" => command.push(
                        random
                            .pick(&["1.5", "-2", "0", "1e3", "inf", "-inf", "nan", "x", "3.0000001", "10"])
                            .as_bytes()
                            .to_vec(),
                    ),
                    "m" => command.push(format!("m{}", random.below(12)).into_bytes()),
                    "fv" => {
                        command.push(format!("m{}", random.below(12)).into_bytes());
                        let value = self.value();
                        command.push(value);
                    }
                    "sm" => {
                        command.push(random.pick(&["1.5", "-2", "0", "7", "1e3", "inf", "3"]).as_bytes().to_vec());
                        command.push(format!("m{}", random.below(12)).into_bytes());
                    }
                    "place" => {
                        command.push(format!("{}.25", random.range(-170, 170)).into_bytes());
                        command.push(format!("{}.5", random.range(-80, 80)).into_bytes());
                        command.push(format!("m{}", random.below(12)).into_bytes());
                    }
                    "id" => command.push(format!("{}-{}", random.below(40), random.below(3)).into_bytes()),
                    "lex" => command.push(random.pick(&["-", "+", "[m3", "(m5", "[m9", "x"]).as_bytes().to_vec()),
                    "score" => {
                        command.push(random.pick(&["-inf", "+inf", "(1", "5", "0", "(x", "1e2"]).as_bytes().to_vec())
                    }
                    other => panic!("unknown hole ${other} in scripts/random.txt"),
                }
            }
        }
        // Clients differ in the case of commands.
        if self.random.one_in(10) {
            command[0].make_ascii_lowercase();
        }
        // A client error: one argument too few or too many.
        if self.random.one_in(150) {
            command.pop();
        } else if self.random.one_in(150) {
            // If it is parsed as a key, it must share the slot, because a plain server has no slots.
            command.push(format!("{{tag{tag}}}surplus").into_bytes());
        }
        if command.is_empty() {
            command.push(b"PING".to_vec());
        }
        command
    }
}

#[test]
fn random_commands_match_a_plain_server() {
    const COMMANDS: usize = 20_000;
    for program in programs() {
        let pair = Pair::new(program);
        for seed in Random::seeds(&[1, 2]) {
            for resp in [2, 3] {
                let mut generator = Generator::new(seed.wrapping_mul(2).wrapping_add(resp));
                let mut commands: Vec<Command> = Vec::new();
                while commands.len() < COMMANDS {
                    if generator.random.one_in(25) {
                        generator.transaction(&mut commands);
                    } else {
                        commands.push(generator.command());
                    }
                }
                let (mut routed, mut plain) = pair.clients(resp as u8);
                let mut random = Random::new(seed);
                let label = format!("SWITCHYARD_E2E_SEED={seed}, RESP{resp}");
                // Short and long pipelines alternate: most bugs involve two consecutive commands.
                let lengths = || match random.below(3) {
                    0 => 1,
                    1 => 1 + random.below(20),
                    _ => 1 + random.below(400),
                };
                compare(&label, &mut routed, &mut plain, &commands, lengths);
                pair.flush();
            }
        }
    }
}

/// DUMP and RESTORE preserve type, encoding, time to live and bytes of a value.
#[test]
fn dump_and_restore_preserve_every_type() {
    let pair = Pair::new(None);
    let (mut routed, mut plain) = pair.clients(2);
    let make: Vec<Command> = script(
        r#"
        SET {d}string "binary \x00\xff value"
        SET {d}int 42
        RPUSH {d}list a b c 1 2 3
        HSET {d}hash f v g w
        SADD {d}ints 1 2 3
        SADD {d}set only
        ZADD {d}zset 1 a 2.5 b
        SETBIT {d}bits 1000 1
        PFADD {d}hll a b c d
        "#,
    );
    for command in &make {
        plain.call(command);
    }
    let keys = ["string", "int", "list", "hash", "ints", "set", "zset", "bits", "hll"];
    let mut copies = Vec::new();
    for key in keys {
        let dump = plain.cmd(&format!("DUMP {{d}}{key}"));
        let restore = |ttl: &str, more: &[&str]| {
            let mut command: Command =
                vec![b"RESTORE".to_vec(), format!("{{r}}{key}").into_bytes(), ttl.into(), dump.bytes().to_vec()];
            command.extend(more.iter().map(|w| w.as_bytes().to_vec()));
            command
        };
        copies.push(restore("0", &[]));
        copies.push(restore("0", &[]));
        copies.push(restore("100000", &["REPLACE"]));
        copies.push(restore("33177117420000", &["REPLACE", "ABSTTL"]));
        copies.push(restore("0", &["REPLACE", "IDLETIME", "1000"]));
        copies.push(restore("-1", &["REPLACE"]));
        let mut broken = restore("0", &["REPLACE"]);
        broken[3][0] ^= 0x55;
        copies.push(broken);
        for look in ["TYPE", "OBJECT ENCODING", "DUMP", "PTTL", "EXISTS"] {
            copies.push(crate::support::words(&format!("{look} {{r}}{key}")));
        }
    }
    compare("restored from a plain server's dump", &mut routed, &mut plain, &copies, || 7);
    for key in keys {
        assert_eq!(routed.cmd(&format!("DUMP {{r}}{key}")), plain.cmd(&format!("DUMP {{d}}{key}")), "DUMP of {key}");
    }
}

/// Two commands of a client on one key are never reordered, whatever their paths inside the router: large value, slow
/// command, script, split command, pipeline.
#[test]
fn commands_on_a_key_keep_their_order_on_every_path() {
    let pair = Pair::new(None);
    let mut random = Random::new(7);
    let mut commands = Vec::new();
    for round in 0..60 {
        let tag = round % 5;
        let key = |name: &str| format!("{{lane{tag}}}{name}").into_bytes();
        let large = vec![b'a' + (round % 26) as u8; 1_200_000 + random.below(100)];
        let word = |w: &str| w.as_bytes().to_vec();
        let steps: Vec<Command> = vec![
            vec![word("SET"), key("v"), format!("small {round}").into_bytes()],
            vec![word("GET"), key("v")],
            vec![word("SET"), key("v"), large],
            vec![word("STRLEN"), key("v")],
            vec![word("APPEND"), key("v"), word("tail")],
            vec![word("GET"), key("v")],
            vec![word("MSET"), key("v"), word("m"), format!("{{other{round}}}w").into_bytes(), word("n")],
            vec![word("GETSET"), key("v"), word("after")],
            vec![word("RPUSH"), key("list"), round.to_string().into_bytes()],
            vec![word("SORT"), key("list"), word("DESC")],
            vec![word("RPUSH"), key("list"), (round + 1000).to_string().into_bytes()],
            vec![word("EVAL"), word("return redis.call('LPOP', KEYS[1])"), word("1"), key("list")],
            vec![word("LRANGE"), key("list"), word("0"), word("-1")],
            vec![word("SUNIONSTORE"), key("union"), key("absent"), key("members")],
            vec![word("SADD"), key("members"), round.to_string().into_bytes()],
            vec![word("SCARD"), key("members")],
            vec![word("MGET"), key("v"), format!("{{other{round}}}w").into_bytes(), key("absent")],
            vec![word("DEL"), key("v"), format!("{{other{round}}}w").into_bytes()],
            vec![word("EXISTS"), key("v")],
        ];
        // A random subset, so that each pair of commands is adjacent in some run.
        commands.extend(steps.into_iter().filter(|_| !random.one_in(4)));
    }
    for resp in [2, 3] {
        let (mut routed, mut plain) = pair.clients(resp);
        compare(&format!("mixed paths, RESP{resp}"), &mut routed, &mut plain, &commands, || 200);
        pair.flush();
    }
}

/// The node's clock decides about expiry, and an expired key is gone for every command.
#[test]
fn keys_expire() {
    let site = Site::new(2);
    let mut client = site.client();
    for i in 0..20 {
        assert_eq!(client.cmd(&format!("SET short:{i} v PX 30")), value::ok());
        assert_eq!(client.cmd(&format!("SET long:{i} v EX 1000")), value::ok());
    }
    until("the short keys have expired", || client.cmd("DBSIZE") == value::int(20));
    for i in 0..20 {
        assert_eq!(client.cmd(&format!("GET short:{i}")), Value::Nil);
        assert_eq!(client.cmd(&format!("GET long:{i}")), value::bulk("v"));
    }
}
