//! Flags that set keys of the configuration, shared by `serve` and other subcommands.
//!
//! Values stay text: the key parses, bounds and explains its value, so that a flag and a line of the file cannot
//! differ.

use std::path::PathBuf;

use clap::{Args, Command};

use crate::config::{DATA_PORT, Override, Raw, Sources, default_file};

/// Flags that matter only to `serve`. Other subcommands accept them too, without showing them, so that a command line
/// of `serve` can be tried there.
const OF_SERVE: &str = "listen port bind workers pin password_file password_env allow_open_listener database max_clients shutdown_timeout cluster \
     log_level log_format";

/// Hides these flags in the help of a command.
pub(crate) fn hide_flags_of_serve(command: Command) -> Command {
    OF_SERVE.split(' ').fold(command, |command, flag| command.mut_arg(flag, |arg| arg.hide(true)))
}

/// `-c FILE`, and flags for common keys. `--set` reaches all other keys.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ConfigFlags {
    /// Configuration file (TOML); flags take precedence [default: /etc/switchyard.toml, if it exists and --node is not
    /// given]
    #[arg(short, long, value_name = "FILE", visible_alias = "conf-file")]
    config: Option<PathBuf>,

    /// twemproxy's configuration file (YAML): serve its pools, with each key on the server that twemproxy selects
    #[arg(long, value_name = "FILE", conflicts_with = "node")]
    twemproxy_config: Option<PathBuf>,

    /// Pool of twemproxy's configuration to serve [default: all, each in a separate process]
    #[arg(long, value_name = "NAME", requires = "twemproxy_config", conflicts_with = "node")]
    twemproxy_pool: Option<String>,

    /// Redis or Valkey server to route to; can be repeated. Replaces the list of the file
    #[arg(long, value_name = "HOST:PORT")]
    node: Vec<String>,

    /// Member of a Redis or Valkey Cluster to route to; can be repeated. One is enough: it shows the others
    #[arg(long, value_name = "HOST:PORT", conflicts_with_all = ["node", "twemproxy_config"])]
    storage_cluster: Vec<String>,

    /// Address for clients; can be repeated [default: 127.0.0.1:6380]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Vec<String>,

    /// Port for clients, as in redis-server; together with --bind
    #[arg(short, long, value_name = "PORT", conflicts_with = "listen")]
    port: Option<u16>,

    /// Host for clients, as in redis-server; can be repeated
    #[arg(long, value_name = "HOST", conflicts_with = "listen")]
    bind: Vec<String>,

    /// Number of worker threads [default: one for each available processor]
    #[arg(long, value_name = "N", visible_alias = "threads")]
    workers: Option<String>,

    /// Pin each worker to a separate processor
    #[arg(long)]
    pin: bool,

    /// Address of the admin API, metrics and health checks [default: 127.0.0.1:6381]
    #[arg(long, value_name = "HOST:PORT")]
    admin: Option<String>,

    /// File with the token required by the admin port
    #[arg(long, value_name = "FILE", conflicts_with = "admin_token_env")]
    admin_token_file: Option<String>,

    /// Environment variable with the token required by the admin port
    #[arg(long, value_name = "NAME")]
    admin_token_env: Option<String>,

    /// Folder of the slot map and other state that must survive a restart
    /// [default: $STATE_DIRECTORY, else $XDG_STATE_HOME/switchyard, else ~/.local/state/switchyard]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<String>,

    /// File with the password for clients
    #[arg(long, value_name = "FILE", conflicts_with = "password_env")]
    password_file: Option<String>,

    /// Environment variable with the password for clients
    #[arg(long, value_name = "NAME")]
    password_env: Option<String>,

    /// Listen on addresses that other machines can reach, although clients need no password
    #[arg(long)]
    allow_open_listener: bool,

    /// ACL user at the nodes
    #[arg(long, value_name = "NAME")]
    node_username: Option<String>,

    /// File with the password of the nodes
    #[arg(long, value_name = "FILE", conflicts_with = "node_password_env")]
    node_password_file: Option<String>,

    /// Environment variable with the password of the nodes
    #[arg(long, value_name = "NAME")]
    node_password_env: Option<String>,

    /// Initial database of a client [default: 0]
    #[arg(long, value_name = "N")]
    database: Option<String>,

    /// Maximum number of clients [default: 10000]
    #[arg(long, value_name = "N", visible_alias = "maxclients")]
    max_clients: Option<String>,

    /// Timeout for connecting to a node [default: 2s]
    #[arg(long, value_name = "TIME")]
    connect_timeout: Option<String>,

    /// Timeout for a node's reply [default: 5s]
    #[arg(long, value_name = "TIME")]
    command_timeout: Option<String>,

    /// Time for commands in flight after SIGTERM [default: 10s]
    #[arg(long, value_name = "TIME")]
    shutdown_timeout: Option<String>,

    /// Act as a Redis Cluster, for clients that require one
    #[arg(long)]
    cluster: bool,

    /// error, warn, info, debug, trace, or levels by module as in RUST_LOG [default: $RUST_LOG, else info]
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<String>,

    /// text for display, json for machines [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<String>,

    /// Any other key, such as --set clients.idle-timeout=5m or --set 'nodes.config-set=["max*"]'; can be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

impl ConfigFlags {
    /// Returns the file and the overrides, by precedence: a named flag overrides `--set`.
    pub(crate) fn sources(&self) -> Sources {
        let mut overrides: Vec<Override> = self.set.iter().map(|assignment| set(assignment)).collect();
        let mut add = |flag: &str, path: &str, value: Raw| {
            overrides.push(Override { flag: format!("--{flag}"), path: path.to_owned(), value });
        };
        let list = |items: &[String]| Raw::List(items.iter().cloned().map(Raw::Text).collect());
        if !self.node.is_empty() {
            add("node", "node", list(&self.node));
        }
        if !self.storage_cluster.is_empty() {
            add("storage-cluster", "storage.cluster", list(&self.storage_cluster));
        }
        if !self.listen.is_empty() {
            add("listen", "listen", list(&self.listen));
        }
        if self.port.is_some() || !self.bind.is_empty() {
            let flag = if self.bind.is_empty() { "port" } else { "bind" };
            let accepted_host_names = if self.bind.is_empty() { &["127.0.0.1".to_owned()][..] } else { &self.bind };
            let port = self.port.unwrap_or(DATA_PORT);
            add(
                flag,
                "listen",
                Raw::List(accepted_host_names.iter().map(|host| Raw::Text(join(host, port))).collect()),
            );
        }
        let texts = [
            ("workers", "workers", &self.workers),
            ("admin", "admin.listen", &self.admin),
            ("admin-token-file", "admin.token-file", &self.admin_token_file),
            ("admin-token-env", "admin.token-env", &self.admin_token_env),
            ("state-dir", "state-dir", &self.state_dir),
            ("password-file", "clients.password-file", &self.password_file),
            ("password-env", "clients.password-env", &self.password_env),
            ("node-username", "nodes.username", &self.node_username),
            ("node-password-file", "nodes.password-file", &self.node_password_file),
            ("node-password-env", "nodes.password-env", &self.node_password_env),
            ("database", "clients.database", &self.database),
            ("max-clients", "clients.max-clients", &self.max_clients),
            ("connect-timeout", "nodes.connect-timeout", &self.connect_timeout),
            ("command-timeout", "nodes.command-timeout", &self.command_timeout),
            ("shutdown-timeout", "shutdown-timeout", &self.shutdown_timeout),
            ("log-level", "log.level", &self.log_level),
            ("log-format", "log.format", &self.log_format),
        ];
        for (flag, path, value) in texts {
            if let Some(value) = value {
                add(flag, path, Raw::Text(value.clone()));
            }
        }
        let switches = [
            ("pin", "pin", self.pin),
            ("allow-open-listener", "allow-open-listener", self.allow_open_listener),
            ("cluster", "cluster.emulate", self.cluster),
        ];
        for (flag, path, given) in switches {
            if given {
                add(flag, path, Raw::Bool(true));
            }
        }
        let names_nodes = !self.node.is_empty() || !self.storage_cluster.is_empty() || self.twemproxy_config.is_some();
        let file = self.config.clone().or_else(|| if names_nodes { None } else { default_file() });
        Sources {
            file,
            overrides,
            twemproxy: self.twemproxy_config.clone().map(|path| (path, self.twemproxy_pool.clone())),
        }
    }
}

fn join(host: &str, port: u16) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Parses `clients.idle-timeout=5m`. Text without `=` becomes an unknown key, and is reported as such.
fn set(assignment: &str) -> Override {
    let (path, value) = assignment.split_once('=').unwrap_or((assignment, ""));
    Override {
        flag: format!("--set {}", path.trim()),
        path: path.trim().to_owned(),
        value: Raw::from_flag(value.trim()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        flags: ConfigFlags,
    }

    fn read(arguments: &[&str]) -> Result<crate::config::Config, String> {
        let alone = Alone::try_parse_from(["x"].iter().chain(arguments)).map_err(|error| error.to_string())?;
        alone.flags.sources().read().map_err(|problems| problems.to_string())
    }

    fn resolved(arguments: &[&str]) -> crate::config::Resolved {
        read(arguments).and_then(|config| config.resolve(|_| None).map_err(|p| p.to_string())).expect("good flags")
    }

    #[test]
    fn flags_of_a_typical_script_are_accepted() {
        let arguments: Vec<&str> =
            "--listen 127.0.0.1:6390 --node 127.0.0.1:7001 --node 127.0.0.1:7002 --workers 2 --admin 127.0.0.1:6391 --state-dir /tmp/s"
                .split(' ')
                .collect();
        let config = read(&arguments).expect("good");
        assert_eq!(config.node_names(), ["127.0.0.1:7001", "127.0.0.1:7002"]);
        assert_eq!((config.workers, config.state_dir.to_str()), (2, Some("/tmp/s")));
        let resolved = resolved(&arguments);
        assert_eq!(
            resolved.listen,
            [switchyard_router::ListenerSettings::tcp("127.0.0.1:6390".parse().expect("address"))]
        );
        assert_eq!(resolved.admin, "127.0.0.1:6391".parse().expect("address"));
    }

    #[test]
    fn redis_server_flags_are_accepted() {
        let node = ["--node", "127.0.0.1"];
        let listen = |more: &[&str]| {
            resolved(&[&node[..], more].concat()).listen.iter().map(|l| l.address.to_string()).collect::<Vec<_>>()
        };
        assert_eq!(listen(&["-p", "7000"]), ["127.0.0.1:7000"]);
        assert_eq!(listen(&["--bind", "127.0.0.1", "--bind", "::1"]), ["127.0.0.1:6380", "[::1]:6380"]);
        assert_eq!(listen(&["--bind", "127.0.0.1", "--port", "1"]), ["127.0.0.1:1"]);
        assert!(read(&["--node", "a", "-p", "1", "--listen", "a:1"]).is_err());
    }

    #[test]
    fn every_flag_reaches_its_key() {
        let line = "--node a --pin --database 3 --max-clients 9 --connect-timeout 1s --command-timeout 2s --shutdown-timeout 3s \
            --log-level debug --log-format json --node-username u --allow-open-listener --password-file p --node-password-env NP \
            --admin-token-file t --set clients.idle-timeout=5m --set clients.max-clients=8";
        let config = read(&line.split(' ').collect::<Vec<_>>()).expect("good");
        let shown = crate::config::render(&config);
        for expected in [
            "pin = true",
            "database = 3",
            "max-clients = 9",
            "connect-timeout = \"1s\"",
            "command-timeout = \"2s\"",
            "shutdown-timeout = \"3s\"",
            "level = \"debug\"",
            "format = \"json\"",
            "username = \"u\"",
            "allow-open-listener = true",
            "password-file = \"p\"",
            "password-env = \"NP\"",
            "token-file = \"t\"",
            "idle-timeout = \"5m\"",
        ] {
            assert!(shown.contains(&format!("{expected} ")), "{expected}:\n{shown}");
        }
    }

    #[test]
    fn lists_parse_in_toml_syntax_or_separated_by_commas() {
        for (key, lists, shown) in [
            ("nodes.config-set", ["[\"max*\", \"timeout\"]", "max*,timeout"], "config-set = [\"max*\", \"timeout\"]"),
            ("admin.host-names", ["['a.example', 'b']", "a.example, b"], "host-names = [\"a.example\", \"b\"]"),
            (
                "clients.default-user-rules",
                ["[\"-@dangerous\",\"-keys\"]", "-@dangerous,-keys"],
                "default-user-rules = [\"-@dangerous\", \"-keys\"]",
            ),
            ("cluster.announce", ["[\"a:1\", \"[::1]:2\"]", "a:1,[::1]:2"], "announce = [\"a:1\", \"[::1]:2\"]"),
            ("listen", ["[\"127.0.0.1:7000\"]", "127.0.0.1:7000"], "listen = [\"127.0.0.1:7000\"]"),
            ("listen", ["[\"[::1]:7000\"]", "[::1]:7000"], "listen = [\"[::1]:7000\"]"),
        ] {
            for list in lists {
                let config = read(&["--node", "a", "--set", &format!("{key}={list}")]).expect(list);
                let all = crate::config::render(&config);
                assert!(all.contains(&format!("{shown} ")), "{key}={list}:\n{all}");
            }
        }
        let none = read(&["--node", "a", "--set", "nodes.config-set=[]"]).expect("an empty list");
        assert!(crate::config::render(&none).contains("config-set = [] "));
        for key in ["nodes.config-set", "admin.host-names", "clients.default-user-rules", "cluster.announce"] {
            for value in ["[*]", "[\"a\", \"b]", "[a, b]"] {
                let error = read(&["--node", "a", "--set", &format!("{key}={value}")]).map(|_| ()).expect_err(value);
                assert!(error.contains(&format!("--set {key}: ")) && error.contains("looks like a list"), "{error}");
            }
        }
    }

    #[test]
    fn mistakes_name_the_flag() {
        for (arguments, expected) in [
            (&["--node", "a", "--workers", "none"][..], "--workers: \"none\" is not a whole number from 1 to 1024"),
            (&["--node", "redis://a"], "--node: \"redis://a\": URLs are not understood"),
            (
                &["--node", "a", "--set", "max-clients=1"],
                "--set max-clients: unknown key \"max-clients\"; did you mean \"clients.max-clients\"?",
            ),
            (&["--node", "a", "--command-timeout", "5"], "--command-timeout: \"5\" is not a time with its unit"),
            (&["-c", "/nonexistent.toml"], "cannot read the configuration file /nonexistent.toml"),
        ] {
            let error = read(arguments).map(|_| ()).expect_err(expected);
            assert!(error.contains(expected), "{error}");
        }
    }
}
