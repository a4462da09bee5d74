//! twemproxy's configuration file, read as its `nutcracker` reads it: pools of servers, and for each a configuration of Switchyard.
//!
//! The events of a YAML parser and not a derived structure: nutcracker knows no types but text, and so does this. What it refuses is refused here as well,
//! with the line. What Switchyard cannot do is refused with the reason and a way out, and never left out silently.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use saphyr_parser::{Event, Parser};
use switchyard_policy::topology::{Continuum, Distribution, Hash, Scheme, Server};
use switchyard_router::Secret;

use super::listener::{ListenerConfig, parse_mode};
use super::{Config, Endpoint, ListenPlace, NodeConfig, Origin, Problem, Problems, SecretSource};

/// At this port nutcracker leaves the port out of a server's name, as libmemcached does.
const PORT_WITHOUT_NAME: u16 = 11211;

/// A text of the file, and its line.
#[derive(Clone, Debug)]
struct Word {
    text: String,
    line: usize,
}

/// A file, as far as it was read without problems.
#[derive(Clone, Debug)]
pub(crate) struct Pools {
    name: String,
    pools: Vec<Pool>,
}

/// One pool.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    name: Word,
    listen: ListenPlace,
    mode: Option<u32>,
    scheme: Scheme,
    timeout: Option<Duration>,
    password: Option<String>,
    database: u32,
    client_connections: Option<usize>,
    ejects: bool,
    servers: Vec<PoolServer>,
}

#[derive(Clone, Debug)]
struct PoolServer {
    server: Server,
    endpoint: Endpoint,
    line: usize,
}

impl Pools {
    /// Reads a file.
    pub(crate) fn read(path: &Path) -> Result<Self, Problems> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Problems(vec![Problem::new(format!("cannot read twemproxy's configuration {name}: {error}"))]))?;
        Self::parse(&name, &text)
    }

    /// Reads the content of a file of that name.
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self, Problems> {
        let mut problems = Vec::new();
        let pools = match tree(text) {
            Ok(tree) => tree
                .into_iter()
                .filter_map(|(word, keys)| {
                    Pool::of(word, keys, &mut |line, text| {
                        problems.push(Problem::at(&Origin::File { name: name.to_owned(), line }, text));
                    })
                })
                .collect::<Vec<_>>(),
            Err((line, text)) => return Err(Problems(vec![Problem::at(&Origin::File { name: name.to_owned(), line }, text)])),
        };
        let mut listens: BTreeMap<String, &str> = BTreeMap::new();
        for pool in &pools {
            if let Some(other) = listens.insert(pool.listen.to_string(), &pool.name.text) {
                let text = format!("pools '{other}' and '{}' have the same listen address '{}'", pool.name.text, pool.listen);
                problems.push(Problem::at(&Origin::File { name: name.to_owned(), line: pool.name.line }, text));
            }
        }
        if pools.is_empty() && problems.is_empty() {
            problems.push(Problem { place: Some(name.to_owned()), text: "it has no pools".to_owned() });
        }
        if problems.is_empty() { Ok(Self { name: name.to_owned(), pools }) } else { Err(Problems(problems)) }
    }

    /// The names of the pools, in the order of the file.
    pub(crate) fn names(&self) -> Vec<&str> {
        self.pools.iter().map(|pool| pool.name.text.as_str()).collect()
    }

    /// The pool of that name and its place in the file; where no name is given, the only one.
    pub(crate) fn choose(&self, name: Option<&str>) -> Result<(usize, &Pool), Problems> {
        let found = match name {
            Some(name) => self.pools.iter().position(|pool| pool.name.text == name),
            None => (self.pools.len() == 1).then_some(0),
        };
        found.map(|at| (at, &self.pools[at])).ok_or_else(|| {
            let text = match name {
                Some(name) => format!("there is no pool '{name}'"),
                None => "there are several pools; choose one with --twemproxy-pool".to_owned(),
            };
            Problems(vec![Problem { place: Some(self.name.clone()), text: format!("{text} (there are: {})", self.names().join(", ")) }])
        })
    }

    /// Takes what a pool says into a configuration.
    pub(super) fn apply(&self, pool: Option<&str>, config: &mut Config, problems: &mut Vec<Problem>) {
        let (at, pool) = match self.choose(pool) {
            Ok(found) => found,
            Err(wrong) => return problems.extend(wrong.0),
        };
        let origin = |line| Origin::File { name: self.name.clone(), line };
        let line = pool.name.line;
        config.listen = Vec::new();
        config.listeners = vec![ListenerConfig { mode: pool.mode, origin: Some(origin(line)), ..ListenerConfig::at(pool.listen.clone()) }];
        config.pool = Some(PoolConfig {
            number: at as u16,
            name: pool.name.text.clone(),
            scheme: pool.scheme,
            ejects: pool.ejects,
            servers: Vec::new(),
        });
        config.live.database = pool.database;
        if let Some(timeout) = pool.timeout {
            config.live.command_timeout = timeout;
            config.live.connect_timeout = timeout;
        }
        if let Some(most) = pool.client_connections {
            config.live.max_clients = most;
        }
        if let Some(password) = &pool.password {
            let secret = || Some(SecretSource::Inline(Secret(password.clone())));
            (config.client_password, config.nodes_password) = (secret(), secret());
        }
        let servers: Vec<Server> = pool.servers.iter().map(|server| server.server.clone()).collect();
        if let Err(error) = Continuum::new(pool.scheme, servers.iter().cloned()) {
            problems.push(Problem::at(&origin(line), error.to_string()));
        }
        config.nodes = pool
            .servers
            .iter()
            .map(|PoolServer { server, endpoint, line }| NodeConfig {
                name: Some(server.name.clone()),
                address: Some(endpoint.clone()),
                weight: Some(server.weight),
                origin: Some(origin(*line)),
                ..NodeConfig::default()
            })
            .collect();
        if let Some(config) = &mut config.pool {
            config.servers = servers;
        }
    }
}

/// Of a configuration that came from twemproxy's: how keys are placed, and whose pool it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PoolConfig {
    /// Its place in the file, from 0.
    number: u16,
    name: String,
    pub(crate) scheme: Scheme,
    ejects: bool,
    pub(crate) servers: Vec<Server>,
}

impl PoolConfig {
    /// The folder of a pool's state, in that of all.
    pub(crate) fn state_dir(&self, all: &Path) -> PathBuf {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let plain: String =
            self.name.bytes().map(|byte| if is_plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") }).collect();
        // No pool's name leads out of the folder.
        all.join(plain.strip_prefix('.').map_or(plain.clone(), |rest| format!("%2e{rest}")))
    }

    /// The admin port of a pool: the ports of all follow each other, in the order of the file.
    pub(crate) fn admin(&self, first: &Endpoint) -> Endpoint {
        let (host, port) = first.parts();
        if port == 0 { first.clone() } else { Endpoint::new(&host, port.saturating_add(self.number)) }
    }

    /// What the file asks for and does not get.
    pub(crate) fn warnings(&self) -> Vec<String> {
        let ejects = "auto_eject_hosts has no effect: while a server is away, commands for its keys are answered with errors, and never with a false nil";
        self.ejects.then(|| format!("pool {}: {ejects}", self.name)).into_iter().collect()
    }

    /// The continuum of the servers.
    pub(crate) fn continuum(&self) -> Result<Continuum, Problems> {
        Continuum::new(self.scheme, self.servers.iter().cloned()).map_err(|error| Problems(vec![Problem::new(error.to_string())]))
    }
}

/// Reports something that is wrong in a line.
type Wrong<'a> = &'a mut dyn FnMut(usize, String);

enum Value {
    Text(Word),
    List(Vec<Word>),
}

type Keys = Vec<(Word, Value)>;

impl Pool {
    fn of(name: Word, keys: Keys, wrong: Wrong<'_>) -> Option<Self> {
        let line = name.line;
        let (mut texts, mut servers): (BTreeMap<String, Word>, Vec<Word>) = (BTreeMap::new(), Vec::new());
        for (key, value) in keys {
            match value {
                Value::List(list) if key.text == "servers" => servers.extend(list),
                Value::List(_) => wrong(key.line, format!("directive \"{}\" is no list", key.text)),
                Value::Text(_) if key.text == "servers" => {
                    wrong(key.line, "directive \"servers\" is a list: each server on a line of its own, after \"- \"".to_owned())
                }
                Value::Text(_) if !KNOWN.contains(&key.text.as_str()) => wrong(key.line, format!("directive \"{}\" is unknown", key.text)),
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
            Hash::by_name(text).ok_or_else(|| format!("is not a valid hash; there are: {}", Hash::ALL.map(Hash::name).join(", ")))
        });
        let distribution = read.with("distribution", |text| match text {
            "ketama" => Ok(Distribution::Ketama),
            "modula" => Ok(Distribution::Modula),
            "random" => Err("random is not served: a key would be read at another server than the one it was written to. With servers that all have all keys, \
                 as it is meant for, let Switchyard know one of them and its replicas".to_owned()),
            _ => Err("is not a valid distribution; there are: ketama, modula".to_owned()),
        });
        let tag = read.with("hash_tag", |text| match text.as_bytes() {
            [open, close] => Ok([*open, *close]),
            _ => Err("is not a valid hash tag string with two characters".to_owned()),
        });
        let timeout = read.number("timeout").map(|ms| Duration::from_millis(ms.max(1)));
        let (database, client_connections) = (read.number("redis_db").unwrap_or(0), read.number("client_connections"));
        // What Switchyard does in its own way: it keeps connections up and alive, and shares the listener's port among its workers.
        for name in ["backlog", "server_connections", "server_retry_timeout", "server_failure_limit"] {
            if read.number(name) == Some(0) && name == "server_connections" {
                (read.wrong)(line, "directive \"server_connections:\" cannot be 0".to_owned());
            }
        }
        for name in ["tcpkeepalive", "reuseport", "preconnect"] {
            read.flag(name);
        }
        let ejects = read.flag("auto_eject_hosts").unwrap_or(false);
        let password = read.with("redis_auth", |text| Ok(text.to_owned()));
        if read.flag("redis") != Some(true) {
            let text = "is a pool of memcached (redis: true is missing): Switchyard serves Redis and Valkey. Leave such pools to twemproxy, in a file of their own";
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
                (read.wrong)(server.line, format!("pool '{}' has servers with same name '{}'", name.text, server.server.name));
            }
        }
        let Some((listen, mode)) = listen else {
            if !read.texts.contains_key("listen") {
                (read.wrong)(line, "directive \"listen:\" is missing".to_owned());
            }
            return None;
        };
        let scheme = Scheme { hash: hash.unwrap_or_default(), tag, distribution: distribution.unwrap_or_default() };
        let database = u32::try_from(database).unwrap_or(u32::MAX);
        let client_connections = client_connections.filter(|most| *most > 0).map(|most| most as usize);
        Some(Self { name, listen, mode, scheme, timeout, password, database, client_connections, ejects, servers })
    }
}

/// The keys of a pool that have one value.
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

/// The values of a pool while they are read.
struct Read<'a> {
    texts: BTreeMap<String, Word>,
    wrong: Wrong<'a>,
}

impl Read<'_> {
    fn with<T>(&mut self, name: &str, read: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let word = self.texts.get(name)?;
        read(&word.text).map_err(|text| (self.wrong)(word.line, format!("directive \"{name}\" {text}"))).ok()
    }

    /// nutcracker's numbers are digits only.
    fn number(&mut self, name: &str) -> Option<u64> {
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        self.with(name, |text| {
            text.parse::<u32>().ok().filter(|_| is_number(text)).map(u64::from).ok_or_else(|| "is not a number".to_owned())
        })
    }

    fn flag(&mut self, name: &str) -> Option<bool> {
        self.with(name, |text| text.parse().map_err(|_| "is not \"true\" or \"false\"".to_owned()))
    }
}

/// `127.0.0.1:22121`, or `/run/socket 0666`.
fn listen_of(text: &str) -> Result<(ListenPlace, Option<u32>), String> {
    if !text.starts_with('/') {
        let (host, port) = text.rsplit_once(':').ok_or("has an invalid \"hostname:port\" format string")?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or("has an invalid port in \"hostname:port\" format string")?;
        return Ok((ListenPlace::Tcp { endpoint: Endpoint::new(host, port), tls: false }, None));
    }
    let (path, mode) = match text.split_once(' ') {
        Some((path, mode)) => (path, Some(parse_mode(mode.trim())?)),
        None => (text, None),
    };
    Ok((ListenPlace::parse(&format!("unix:{path}"))?, mode))
}

/// `hostname:port:weight [name]`.
fn server_of(word: &Word) -> Result<PoolServer, String> {
    let form = || "directive \"servers\" has an invalid \"hostname:port:weight [name]\" format string".to_owned();
    if word.text.starts_with('/') {
        return Err("a server at a Unix socket is not served: let the server listen on a port as well (port and bind 127.0.0.1 in redis.conf), and name that. \
             Give it the name that it has now, \"hostname:port:weight NAME\", so that it keeps its keys"
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
    let weight: u32 = weight.parse().ok().filter(|_| is_number(weight)).ok_or("directive \"servers\" has an invalid weight")?;
    if weight == 0 {
        return Err("directive \"servers\" has a zero weight".to_owned());
    }
    let name = match name {
        Some(name) => name.to_owned(),
        None if port == PORT_WITHOUT_NAME => host.to_owned(),
        None => address.to_owned(),
    };
    Ok(PoolServer { server: Server { name, weight }, endpoint: Endpoint::new(host, port), line: word.line })
}

/// The pools and their keys. An error has a line.
fn tree(text: &str) -> Result<Vec<(Word, Keys)>, (usize, String)> {
    let mut pools: Vec<(Word, Keys)> = Vec::new();
    let (mut depth, mut list): (usize, Option<Vec<Word>>) = (0, None);
    let mut key: Option<Word> = None;
    let mut documents = 0;
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| (error.marker().line(), format!("not valid YAML: {}", error.info())))?;
        let line = span.start.line();
        let refused = |text: &str| Err((line, text.to_owned()));
        match event {
            Event::Scalar(_, _, anchor, tag) if anchor > 0 || tag.is_some() => return refused("anchors and tags are disallowed"),
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

    const GOOD: &str = "alpha:\n  listen: 127.0.0.1:22121\n  hash: fnv1a_64\n  hash_tag: \"{}\"\n  distribution: ketama\n  auto_eject_hosts: true\n  timeout: 400\n  \
        redis: true\n  redis_auth: secret\n  redis_db: 3\n  servers:\n   - 127.0.0.1:6379:1 one\n   - 127.0.0.1:6380:2\n   - cache:11211:1\n\n\
        beta:\n  listen: /run/beta.sock 0666\n  hash: crc16\n  distribution: modula\n  redis: true\n  server_failure_limit: 2\n  servers:\n   - 10.0.0.1:6379:1\n";

    fn problems(text: &str) -> String {
        Pools::parse("n.yml", text).expect_err("wrong").to_string()
    }

    #[test]
    fn a_file_of_twemproxy_becomes_a_configuration() {
        let pools = Pools::parse("n.yml", GOOD).expect("good");
        assert_eq!(pools.names(), ["alpha", "beta"]);
        let mut config = Config::default();
        pools.apply(Some("alpha"), &mut config, &mut Vec::new());
        assert_eq!(config.node_names(), ["one", "127.0.0.1:6380", "cache"]);
        assert_eq!(config.command_timeout(), Duration::from_millis(400));
        pools.apply(Some("beta"), &mut config, &mut Vec::new());
        assert_eq!(config.node_names(), ["10.0.0.1:6379"]);
        let pool = config.pool.expect("a pool");
        assert_eq!(pool.scheme, Scheme { hash: Hash::Crc16, tag: None, distribution: Distribution::Modula });
        assert_eq!(pool.state_dir(Path::new("s")), Path::new("s/beta"));
        assert_eq!(pool.admin(&Endpoint::new("127.0.0.1", 6381)).to_string(), "127.0.0.1:6382");
        assert!(pools.choose(None).expect_err("several").to_string().contains("alpha, beta"));
    }

    #[test]
    fn mistakes_are_told_with_their_lines() {
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
            ("  hash: fnv1a_64\n", "  hash: fnv1a_64\n  hash: md5\n", 4, "is a duplicate"),
            ("  hash: fnv1a_64\n", "  hash: &a fnv1a_64\n", 3, "anchors"),
            ("  listen: 127.0.0.1:22121\n", "", 1, "\"listen:\" is missing"),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let told = problems(&GOOD.replacen(from, to, 1));
            assert!(told.contains(&format!("n.yml:{line}: ")) && told.contains(text), "{to}: {told}");
        }
        assert!(problems(&GOOD.replacen("  redis: true\n", "", 1)).contains("pool of memcached"));
        assert!(problems("").contains("no pools"));
        assert!(problems("a: b").contains("must be a map of keys"));
        assert!(problems("a:\n  b: [").contains("not valid YAML"));
        let same = GOOD.replacen("/run/beta.sock 0666", "127.0.0.1:22121", 1);
        assert!(problems(&same).contains("same listen address"));
    }
}
