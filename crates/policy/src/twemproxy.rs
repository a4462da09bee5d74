//! Parses twemproxy's configuration file as `nutcracker` does: pools with their servers and settings.
//!
//! Uses the events of a YAML parser rather than derived structures, because nutcracker treats all values as text. Files
//! that nutcracker rejects are rejected here, with the line. A key that Switchyard cannot honour is an error with a
//! reason and an alternative; none is ignored silently.
//!
//! Separate from the other configuration code: a file from another program is parsed without I/O, so a fuzz target
//! needs no router.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use saphyr_parser::{Event, Parser};

use crate::eject::Rule;
use crate::topology::{Distribution, Hash, Scheme, Server};

/// With this port, nutcracker omits the port from a server's name, as libmemcached does.
const PORT_WITHOUT_NAME: u16 = 11211;

/// nutcracker's defaults of `server_failure_limit` and `server_retry_timeout`, the latter in milliseconds.
const FAILURE_LIMIT: u32 = 2;
const RETRY_MS: u32 = 30_000;

/// Maximum path of a Unix socket, in bytes: `sockaddr_un` has 108, including a final NUL.
const SOCKET_PATH_MAX: usize = 107;

/// Text with its line.
#[derive(Clone, Debug)]
struct Word {
    text: String,
    line: usize,
}

/// An error in a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FileError {
    /// Line number from 1; `None` for the whole file.
    pub line: Option<usize>,
    /// Description of the error, with an alternative if there is one.
    pub text: String,
}

/// Listen address of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Listen {
    /// Host and port.
    Tcp {
        /// Host name or address.
        host: String,
        /// Port, at least 1.
        port: u16,
    },
    /// A Unix socket.
    Unix {
        /// Absolute path of the socket.
        path: String,
        /// File mode, as for `chmod`.
        mode: Option<u32>,
    },
}

/// A server of a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolServer {
    /// Name and weight, which determine its points on the continuum.
    pub server: Server,
    /// Host name or address.
    pub host: String,
    /// Port, at least 1.
    pub port: u16,
    /// Line in the file.
    pub line: usize,
}

/// A twemproxy pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pool {
    /// Name of the pool.
    pub name: String,
    /// Line of the name.
    pub line: usize,
    /// `listen`.
    pub listen: Listen,
    /// `hash`, `hash_tag` and `distribution`.
    pub scheme: Scheme,
    /// `timeout`.
    pub timeout: Option<Duration>,
    /// `redis_auth`.
    pub password: Option<String>,
    /// `redis_db`.
    pub database: u32,
    /// `client_connections`, if limited.
    pub client_connections: Option<u32>,
    /// `server_failure_limit` and `server_retry_timeout`, if `auto_eject_hosts` is true.
    pub ejection: Option<Rule>,
    /// `servers`, at least one, with distinct names.
    pub servers: Vec<PoolServer>,
}

/// Parses a file and returns its pools in order.
///
/// # Errors
/// All errors in the file, and settings that Switchyard does not support.
pub fn parse(text: &str) -> Result<Vec<Pool>, Vec<FileError>> {
    let mut mistakes = Vec::new();
    // The YAML parser may report an error at the end one line beyond it.
    let lines = lines(text);
    let mistake = |line: usize, text| FileError { line: Some(line.clamp(1, lines)), text };
    let tree = tree(text).map_err(|(line, text)| vec![mistake(line, text)])?;
    let mut wrong = |line, text| mistakes.push(mistake(line, text));
    let pools: Vec<Pool> = tree.into_iter().filter_map(|(word, keys)| Pool::of(word, keys, &mut wrong)).collect();
    let mut listens: Vec<&Pool> = Vec::new();
    for pool in &pools {
        if let Some(other) = listens.iter().find(|other| other.listen.is_at(&pool.listen)) {
            wrong(
                pool.line,
                format!("pools '{}' and '{}' have the same listen address '{}'", other.name, pool.name, pool.listen),
            );
        }
        listens.push(pool);
    }
    if pools.is_empty() && mistakes.is_empty() {
        mistakes.push(FileError { line: None, text: "it has no pools".to_owned() });
    }
    if mistakes.is_empty() { Ok(pools) } else { Err(mistakes) }
}

impl Listen {
    /// Whether both have the same address, ignoring the mode.
    fn is_at(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Unix { path, .. }, Self::Unix { path: others, .. }) => path == others,
            _ => self == other,
        }
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix { path, .. } => f.write_str(path),
        }
    }
}

/// Reports an error with its line.
type OnError<'a> = &'a mut dyn FnMut(usize, String);

enum Value {
    Text(Word),
    List(Vec<Word>),
}

type Keys = Vec<(Word, Value)>;

impl Pool {
    fn of(name: Word, keys: Keys, wrong: OnError<'_>) -> Option<Self> {
        let line = name.line;
        let (mut texts, mut servers): (BTreeMap<String, Word>, Vec<Word>) = (BTreeMap::new(), Vec::new());
        for (key, value) in keys {
            match value {
                Value::List(list) if key.text == "servers" => servers.extend(list),
                Value::List(_) => wrong(key.line, format!("directive \"{}\" must not be a list", key.text)),
                Value::Text(_) if key.text == "servers" => wrong(
                    key.line,
                    "directive \"servers\" must be a list: one server per line, after \"- \"".to_owned(),
                ),
                Value::Text(_) if !KNOWN.contains(&key.text.as_str()) => {
                    wrong(key.line, format!("directive \"{}\" is unknown", key.text))
                }
                Value::Text(value) => {
                    if texts.insert(key.text.clone(), Word { line: key.line, ..value }).is_some() {
                        wrong(key.line, format!("directive \"{}\" is a duplicate", key.text));
                    }
                }
            }
        }
        let mut read = Read { texts, wrong };
        let listen = read.with("listen", listen_of);
        let hash = read.with("hash", |text| {
            Hash::by_name(text)
                .ok_or_else(|| format!("is not a valid hash; there are: {}", Hash::ALL.map(Hash::name).join(", ")))
        });
        let distribution = read.with("distribution", |text| match text {
            "ketama" => Ok(Distribution::Ketama),
            "modula" => Ok(Distribution::Modula),
            // With one server, every distribution is the same.
            "random" if servers.len() == 1 => Ok(Distribution::default()),
            "random" => Err("random is not served for several servers: a key would be read at another server than the one it was written to. If each server has all keys, \
                 configure one of them and its replicas as a node of Switchyard".to_owned()),
            _ => Err("is not a valid distribution; there are: ketama, modula".to_owned()),
        });
        let tag = read.with("hash_tag", |text| match text.as_bytes() {
            [open, close] => Ok([*open, *close]),
            _ => Err("is not a valid hash tag string with two characters".to_owned()),
        });
        let timeout = read.number("timeout").map(|ms| Duration::from_millis(u64::from(ms).max(1)));
        let (database, client_connections) =
            (read.number("redis_db").unwrap_or(0), read.number("client_connections").filter(|most| *most > 0));
        // Accepted without effect: Switchyard keeps its connections open and alive, and its workers share the
        // listener's port.
        for name in ["backlog", "server_connections"] {
            if read.number(name) == Some(0) && name == "server_connections" {
                (read.wrong)(line, "directive \"server_connections:\" cannot be 0".to_owned());
            }
        }
        for name in ["tcpkeepalive", "reuseport", "preconnect"] {
            read.flag(name);
        }
        let (limit, retry_ms) = (read.number("server_failure_limit"), read.number("server_retry_timeout"));
        let rule = Rule {
            failure_limit: limit.unwrap_or(FAILURE_LIMIT).max(1),
            retry_ms: retry_ms.unwrap_or(RETRY_MS).into(),
        };
        let ejection = read.flag("auto_eject_hosts").unwrap_or(false).then_some(rule);
        let password = read.with("redis_auth", |text| Ok(text.to_owned()));
        if read.flag("redis") != Some(true) {
            let text = "is a pool of memcached (redis: true is missing): Switchyard serves Redis and Valkey. Leave such pools to twemproxy, in a separate file";
            (read.wrong)(line, format!("pool '{}' {text}", name.text));
        }
        if servers.is_empty() {
            (read.wrong)(line, format!("pool '{}' has no servers", name.text));
        }
        let of_server = |word: Word| match server_of(&word) {
            Ok(server) => Some(server),
            Err(text) => {
                (read.wrong)(word.line, text);
                None
            }
        };
        let servers: Vec<PoolServer> = servers.into_iter().filter_map(of_server).collect();
        let mut names: BTreeMap<&str, usize> = BTreeMap::new();
        for server in &servers {
            if names.insert(&server.server.name, server.line).is_some() {
                (read.wrong)(
                    server.line,
                    format!("pool '{}' has servers with same name '{}'", name.text, server.server.name),
                );
            }
        }
        let Some(listen) = listen else {
            if !read.texts.contains_key("listen") {
                (read.wrong)(line, "directive \"listen:\" is missing".to_owned());
            }
            return None;
        };
        let scheme = Scheme { hash: hash.unwrap_or_default(), tag, distribution: distribution.unwrap_or_default() };
        let name = name.text;
        Some(Self { name, line, listen, scheme, timeout, password, database, client_connections, ejection, servers })
    }
}

/// Keys of a pool with a single value.
const KNOWN: [&str; 17] = [
    "listen",
    "hash",
    "hash_tag",
    "distribution",
    "timeout",
    "backlog",
    "client_connections",
    "redis",
    "tcpkeepalive",
    "reuseport",
    "redis_auth",
    "redis_db",
    "preconnect",
    "auto_eject_hosts",
    "server_connections",
    "server_retry_timeout",
    "server_failure_limit",
];

/// Settings of a pool during parsing.
struct Read<'a> {
    texts: BTreeMap<String, Word>,
    wrong: OnError<'a>,
}

impl Read<'_> {
    fn with<T>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let word = self.texts.get(name)?;
        read(&word.text).map_err(|text| (self.wrong)(word.line, format!("directive \"{name}\" {text}"))).ok()
    }

    /// nutcracker accepts digits only.
    fn number(&mut self, name: &str) -> Option<u32> {
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        self.with(name, |text| {
            text.parse().ok().filter(|_| is_number(text)).ok_or_else(|| "is not a number".to_owned())
        })
    }

    fn flag(&mut self, name: &str) -> Option<bool> {
        self.with(name, |text| text.parse().map_err(|_| "is not \"true\" or \"false\"".to_owned()))
    }
}

/// `127.0.0.1:22121`, or `/run/socket 0666`.
fn listen_of(text: &str) -> Result<Listen, String> {
    if !text.starts_with('/') {
        let (host, port) = text.rsplit_once(':').ok_or("has an invalid \"hostname:port\" format string")?;
        let port = port
            .parse()
            .ok()
            .filter(|port| *port > 0)
            .ok_or("has an invalid port in \"hostname:port\" format string")?;
        return Ok(Listen::Tcp { host: host.to_owned(), port });
    }
    let (path, mode) = match text.split_once(' ') {
        Some((path, mode)) => (path, Some(mode_of(mode.trim())?)),
        None => (text, None),
    };
    if path.len() > SOCKET_PATH_MAX {
        return Err(format!("has a path of more than {SOCKET_PATH_MAX} bytes, and no Unix socket can have one"));
    }
    Ok(Listen::Unix { path: path.to_owned(), mode })
}

fn mode_of(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777 && text.bytes().all(|byte| byte.is_ascii_digit()));
    mode.ok_or_else(|| "has an invalid file mode: use octal, such as \"660\"".to_owned())
}

/// `hostname:port:weight [name]`.
fn server_of(word: &Word) -> Result<PoolServer, String> {
    let form = || "directive \"servers\" has an invalid \"hostname:port:weight [name]\" format string".to_owned();
    if word.text.starts_with('/') {
        return Err("a server at a Unix socket is not supported: make it listen on a port too (port and bind 127.0.0.1 in redis.conf), and use its address. \
             Keep its present name, \"hostname:port:weight NAME\", so that it keeps its keys"
            .to_owned());
    }
    let (address, name) = match word.text.rsplit_once(' ') {
        Some((address, name)) => (address, Some(name)),
        None => (word.text.as_str(), None),
    };
    let (address, weight) = address.rsplit_once(':').ok_or_else(form)?;
    let (host, port) = address.rsplit_once(':').ok_or_else(form)?;
    let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let port: Option<u16> = port.parse().ok().filter(|_| is_number(port));
    let port = port.filter(|port| *port > 0).ok_or("directive \"servers\" has an invalid port")?;
    let weight: u32 =
        weight.parse().ok().filter(|_| is_number(weight)).ok_or("directive \"servers\" has an invalid weight")?;
    if weight == 0 {
        return Err("directive \"servers\" has a zero weight".to_owned());
    }
    let name = match name {
        Some(name) => name.to_owned(),
        None if port == PORT_WITHOUT_NAME => host.to_owned(),
        None => address.to_owned(),
    };
    Ok(PoolServer { server: Server { name, weight }, host: host.to_owned(), port, line: word.line })
}

/// Number of lines as in YAML, including an empty last line.
fn lines(text: &str) -> usize {
    text.replace("\r\n", "\n").matches(['\n', '\r']).count() + 1
}

/// Parses pools and their keys. Errors carry a line.
fn tree(text: &str) -> Result<Vec<(Word, Keys)>, (usize, String)> {
    let mut pools: Vec<(Word, Keys)> = Vec::new();
    let (mut depth, mut list): (usize, Option<Vec<Word>>) = (0, None);
    let mut key: Option<Word> = None;
    let mut documents = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) =
            event.map_err(|error| (error.marker().line(), format!("not valid YAML: {}", error.info())))?;
        let line = span.start.line();
        let refused = |text: &str| Err((line, text.to_owned()));
        match event {
            Event::Scalar(_, _, anchor, tag) if anchor > 0 || tag.is_some() => {
                return refused("anchors and tags are disallowed");
            }
            Event::Alias(_) => return refused("aliases are disallowed"),
            Event::DocumentStart(_) => {
                documents += 1;
                if documents > 1 {
                    return refused("it must contain only 1 document");
                }
            }
            Event::MappingStart(..) => {
                depth += 1;
                if depth > 2 || list.is_some() || (depth == 2 && key.is_none()) {
                    return refused("it has more levels than pools and their keys");
                }
                if let Some(name) = key.take() {
                    pools.push((name, Vec::new()));
                }
            }
            Event::MappingEnd => depth -= 1,
            Event::SequenceStart(..) if depth == 2 && list.is_none() && key.is_some() => list = Some(Vec::new()),
            Event::SequenceStart(..) => return refused("a list may only be the value of a pool's key"),
            Event::SequenceEnd => {
                if let (Some(key), Some(list), Some((_, keys))) = (key.take(), list.take(), pools.last_mut()) {
                    keys.push((key, Value::List(list)));
                }
            }
            Event::Scalar(text, ..) => {
                let word = Word { text: text.into_owned(), line };
                if word.text.is_empty() {
                    return refused("an empty value is disallowed");
                }
                match (&mut list, depth, key.take()) {
                    (_, 0, _) => return refused("it must be a map of pools"),
                    (Some(list), _, of) => {
                        list.push(word);
                        key = of;
                    }
                    (None, _, None) => key = Some(word),
                    (None, 1, Some(_)) => return refused("a pool must be a map of keys"),
                    (None, _, Some(of)) => {
                        if let Some((_, keys)) = pools.last_mut() {
                            keys.push((of, Value::Text(word)));
                        }
                    }
                }
            }
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentEnd => {}
        }
    }
    Ok(pools)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::Continuum;
    use proptest::prelude::*;

    const GOOD: &str = "alpha:\n  listen: 127.0.0.1:22121\n  hash: fnv1a_64\n  hash_tag: \"{}\"\n  distribution: ketama\n  auto_eject_hosts: true\n  timeout: 400\n  \
        redis: true\n  redis_auth: secret\n  redis_db: 3\n  servers:\n   - 127.0.0.1:6379:1 one\n   - 127.0.0.1:6380:2\n   - cache:11211:1\n\n\
        beta:\n  listen: /run/beta.sock 0666\n  hash: crc16\n  distribution: modula\n  redis: true\n  server_failure_limit: 2\n  servers:\n   - 10.0.0.1:6379:1\n";

    fn problems(text: &str) -> String {
        parse(text).expect_err("wrong").into_iter().map(|mistake| mistake.text).collect()
    }

    /// Checks invariants of every accepted file.
    fn check(text: &str) {
        match parse(text) {
            Ok(pools) => {
                assert!(!pools.is_empty());
                for pool in pools {
                    let servers: Vec<Server> = pool.servers.iter().map(|server| server.server.clone()).collect();
                    assert!(!servers.is_empty() && servers.iter().all(|server| server.weight > 0));
                    if let Ok(continuum) = Continuum::new(pool.scheme, servers) {
                        assert!(continuum.home(continuum.slot_of(b"key")).is_some(), "each key has a server");
                    }
                }
            }
            Err(mistakes) => {
                let lines = lines(text);
                assert!(
                    !mistakes.is_empty()
                        && mistakes.iter().all(|mistake| mistake.line.is_none_or(|line| (1..=lines).contains(&line))),
                    "{mistakes:?}"
                );
            }
        }
    }

    #[test]
    fn a_file_is_read_as_it_is() {
        let pools = parse(GOOD).expect("good");
        assert_eq!(
            pools.iter().map(|pool| (pool.name.as_str(), pool.line)).collect::<Vec<_>>(),
            [("alpha", 1), ("beta", 16)]
        );
        assert_eq!(pools[1].listen, Listen::Unix { path: "/run/beta.sock".to_owned(), mode: Some(0o666) });
        assert_eq!(
            (pools[0].database, pools[0].ejection, pools[1].ejection),
            (3, Some(Rule { failure_limit: 2, retry_ms: 30_000 }), None)
        );
        let servers = pools[0]
            .servers
            .iter()
            .map(|server| (server.server.name.as_str(), server.server.weight, server.port, server.line));
        assert_eq!(
            servers.collect::<Vec<_>>(),
            [("one", 1, 6379, 12), ("127.0.0.1:6380", 2, 6380, 13), ("cache", 1, 11211, 14)]
        );
    }

    #[test]
    fn mistakes_have_their_lines() {
        for (from, to, line, text) in [
            ("hash: fnv1a_64", "hash: sha1", 3, "not a valid hash"),
            ("hash: fnv1a_64", "hsah: fnv1a_64", 3, "directive \"hsah\" is unknown"),
            ("distribution: ketama", "distribution: random", 5, "another server than the one it was written to"),
            ("timeout: 400", "timeout: 4e2", 7, "is not a number"),
            ("auto_eject_hosts: true", "auto_eject_hosts: yes", 6, "is not \"true\" or \"false\""),
            ("hash_tag: \"{}\"", "hash_tag: \"{\"", 4, "two characters"),
            ("127.0.0.1:6379:1 one", "127.0.0.1:6379", 12, "invalid"),
            ("127.0.0.1:6379:1 one", "127.0.0.1:6379:0", 12, "zero weight"),
            ("127.0.0.1:6379:1 one", "/run/redis.sock:1", 12, "Unix socket"),
            ("127.0.0.1:6379:1 one", "127.0.0.1:6379:1 cache", 14, "same name 'cache'"),
            ("listen: 127.0.0.1:22121", "listen: 127.0.0.1", 2, "hostname:port"),
            ("/run/beta.sock 0666", "/run/beta.sock 888", 17, "mode"),
            ("  hash: fnv1a_64\n", "  hash: fnv1a_64\n  hash: md5\n", 4, "is a duplicate"),
            ("  hash: fnv1a_64\n", "  hash: &a fnv1a_64\n", 3, "anchors"),
            ("  listen: 127.0.0.1:22121\n", "", 1, "\"listen:\" is missing"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let mistakes = parse(&GOOD.replacen(from, to, 1)).expect_err(to);
            assert!(
                mistakes.iter().any(|mistake| mistake.line == Some(line) && mistake.text.contains(text)),
                "{to}: {mistakes:?}"
            );
        }
        assert!(problems(&GOOD.replacen("  redis: true\n", "", 1)).contains("pool of memcached"));
        let one = parse(&GOOD.replacen("modula", "random", 1)).expect("one server has every key");
        assert_eq!(one[1].scheme.distribution, Distribution::default());
        assert!(problems("").contains("no pools"));
        assert!(problems("a: b").contains("must be a map of keys"));
        assert!(problems("a:\n  b: [").contains("not valid YAML"));
        let same = GOOD.replacen("/run/beta.sock 0666", "127.0.0.1:22121", 1);
        assert!(problems(&same).contains("same listen address"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            check(&String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn a_file_with_any_changes_is_read_or_refused(
            changes in prop::collection::vec(
                (any::<prop::sample::Index>(), 0_usize..40, prop_oneof!["[\\[\\]{}:,&*!|>'\"%@`?#\\- \n\t]{0,6}", "[0-9]{1,12}", ".{0,3}"]),
                1..6,
            ),
        ) {
            let mut text = GOOD.as_bytes().to_vec();
            for (at, removed, inserted) in changes {
                let from = at.index(text.len() + 1);
                let to = (from + removed).min(text.len());
                text.splice(from..to, inserted.bytes());
            }
            check(&String::from_utf8_lossy(&text));
        }
    }
}
