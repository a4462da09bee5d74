//! Tests of reading, merging, checking and showing configurations.

use super::*;

const NODE: &str = "[[node]]\naddress = \"127.0.0.1:7001\"\n";

fn flag(flag: &str, path: &str, value: Raw) -> Override {
    Override { flag: flag.to_owned(), path: path.to_owned(), value }
}

fn text(value: &str) -> Raw {
    Raw::Text(value.to_owned())
}

fn read_with(file: &str, overrides: Vec<Override>) -> Result<Config, Problems> {
    Sources { file: None, overrides, twemproxy: None }.read_text(Some((Path::new("switchyard.toml"), file)))
}

fn read(file: &str) -> Result<Config, Problems> {
    read_with(file, Vec::new())
}

/// Returns the problems of a file, one per line.
fn wrong(file: &str) -> String {
    read(file).map(|_| ()).expect_err(file).to_string()
}

fn resolve(config: &Config) -> Result<Resolved, Problems> {
    config.resolve(|_| None)
}

#[test]
fn every_key_can_be_set_in_the_file() {
    let config = read(
        r#"
listen = ["127.0.0.1:6400", "[::1]:6400"]
workers = 3
pin = true
state-dir = "/tmp/state"
shutdown-timeout = "3s"
memory-max = "1gb"
[clients]
password = "client-secret"
database = 2
max-clients = 500
idle-timeout = "5m"
output-limit = "64mb"
pipeline-max = 100
argument-max = "1gb"
[nodes]
username = "everyone"
password = "node-secret"
connect-timeout = "250ms"
command-timeout = "1s"
slow-command-timeout = "2m"
reconnect-backoff-max = "5s"
large-value = "1m"
large-connections-max = 4
watch-connections-max = 5
blocking-connections-max = 6
[admin]
listen = "127.0.0.1:6401"
token = "admin-secret"
[log]
level = "debug"
format = "json"
[[node]]
address = "127.0.0.1:7001"
[[node]]
address = "127.0.0.1:7002"
username = "other"
password = "other-secret"
"#,
    )
    .expect("a good file");
    assert_eq!((config.workers, config.pin), (3, true));
    assert_eq!(config.state_dir, Path::new("/tmp/state"));
    assert_eq!(config.shutdown_timeout, Duration::from_secs(3));
    assert_eq!(config.log_format, LogFormat::Json);
    assert_eq!(config.node_names(), ["127.0.0.1:7001", "127.0.0.1:7002"]);
    let resolved = resolve(&config).expect("resolvable");
    assert_eq!(resolved.listen.len(), 2);
    assert_eq!(resolved.admin.port(), 6401);
    assert_eq!(resolved.admin_token, Some(Secret("admin-secret".to_owned())));
    let live = &resolved.live;
    assert_eq!(*live.users, Users::without_file(Some(&Secret("client-secret".to_owned()))));
    assert_eq!((live.database, live.max_clients, live.client_pipeline_max), (2, 500, 100));
    assert_eq!(live.client_idle_timeout, Some(Duration::from_secs(300)));
    assert_eq!((live.client_output_limit, live.argument_max, live.large_value), (64 << 20, 1 << 30, 1_000_000));
    assert_eq!(live.memory_max, 1 << 30);
    assert_eq!(live.connect_timeout, Duration::from_millis(250));
    assert_eq!(live.command_timeout, Duration::from_secs(1));
    assert_eq!(live.slow_command_timeout, Some(Duration::from_secs(120)));
    assert_eq!(live.reconnect_backoff_max, Duration::from_secs(5));
    assert_eq!(live.large_connections_max, 4);
    assert_eq!((live.watch_connections_max, live.blocking_connections_max), (5, 6));
    let [first, second] = &resolved.nodes[..] else { panic!("two nodes: {:?}", resolved.nodes) };
    assert_eq!(first.username.as_deref(), Some("everyone"), "what all nodes have");
    assert_eq!(first.password, Some(Secret("node-secret".to_owned())));
    assert_eq!(second.username.as_deref(), Some("other"), "its own wins");
    assert_eq!(second.password, Some(Secret("other-secret".to_owned())));
}

#[test]
fn defaults_are_loopback_and_router_settings() {
    let config = read(NODE).expect("a node is all that is needed");
    let resolved = resolve(&config).expect("resolvable");
    assert_eq!(resolved.listen, [ListenerSettings::tcp("127.0.0.1:6380".parse::<SocketAddr>().expect("an address"))]);
    assert_eq!(resolved.admin, "127.0.0.1:6381".parse().expect("an address"));
    assert!(resolved.live.memory_max < usize::MAX, "a share of what the machine has");
    assert_eq!(resolved.live, RuntimeSettings { memory_max: resolved.live.memory_max, ..RuntimeSettings::default() });
    assert!(config.workers >= 1);
}

#[test]
fn flags_override_the_file() {
    let config = read_with(
        "workers = 1\n[clients]\nmax-clients = 10\npassword = \"a\"\n[[node]]\naddress = \"a:1\"\nusername = \"u\"\n[[node]]\naddress = \"b:2\"\n",
        vec![
            flag("--workers", "workers", text("4")),
            flag("--set clients.max-clients", "clients.max-clients", text("20")),
            flag("--password-env", "clients.password-env", text("SOME_VARIABLE")),
            flag("--node", "node", Raw::List(vec![text("a:1"), text("c:3")])),
        ],
    )
    .expect("good");
    assert_eq!((config.workers, config.runtime.max_clients), (4, 20));
    assert_eq!(config.client_password, Some(SecretSource::Env("SOME_VARIABLE".to_owned())));
    assert_eq!(config.node_names(), ["a:1", "c:3"], "the list of flags replaces that of the file");
    assert_eq!(config.nodes[0].username.as_deref(), Some("u"), "settings of the node in the file still apply");
    let shown = render(&config);
    assert!(shown.contains("# --workers") && shown.contains("# --password-env"), "{shown}");
    assert!(!shown.contains("password = \"***\""), "the file's password is replaced: {shown}");
}

#[test]
fn unknown_keys_are_reported_with_their_line() {
    assert_eq!(
        wrong(
            "workers = 2\n\n[nodes]\nconnect-timeout = \"1s\"\n\n\ncomand-timeout = \"5s\"\n[[node]]\naddress = \"a\"\n"
        ),
        "switchyard.toml:7: unknown key \"comand-timeout\" in [nodes]; did you mean \"command-timeout\"?"
    );
    let all = wrong("[client]\nx = 1\n[[node]]\nadress = \"a\"\nworkers = 2\n[node_s]\n");
    let lines: Vec<&str> = all.lines().collect();
    assert_eq!(lines[0], "switchyard.toml:1: unknown section [client]; did you mean [clients]?");
    assert_eq!(lines[1], "switchyard.toml:4: unknown key \"adress\" in [[node]]; did you mean \"address\"?");
    assert!(
        lines[2].starts_with("switchyard.toml:5: unknown key \"workers\" in [[node]]; it belongs at the top"),
        "{all}"
    );
    assert!(lines[3].starts_with("switchyard.toml:6: unknown section [node_s]"), "{all}");
    assert_eq!(lines.len(), 4, "{all}");
}

#[test]
fn errors_for_wrong_values_list_the_allowed_ones() {
    for (file, expected) in [
        ("workers = 0", "switchyard.toml:1: workers: 0 is not a whole number from 1 to 1024"),
        ("workers = 2.5", "a number with a fraction is not a whole number"),
        ("workers = \"many\"", "\"many\" is not a whole number from 1 to 1024"),
        ("pin = \"yes\"", "pin: \"yes\" is not true or false"),
        ("listen = \"6380\"", "expected an address HOST:PORT"),
        ("listen = []", "it needs at least one address"),
        ("listen = \"localhost\"", "the port is missing"),
        ("shutdown-timeout = 10", "10 is not a time with its unit"),
        ("shutdown-timeout = \"2d\"", "allowed is 0s to 1h"),
        ("[clients]\noutput-limit = \"256 megs\"", "switchyard.toml:2: output-limit: \"256 megs\" is not a size"),
        ("[clients]\noutput-limit = \"1b\"", "allowed is 64kb to 64gb"),
        (
            "memory-max = \"120%\"",
            "switchyard.toml:1: memory-max: \"120%\" is out of range; allowed is \"1%\" to \"100%\"",
        ),
        ("memory-max = \"1mb\"", "allowed is 64mb and more"),
        ("[nodes]\ncommand-timeout = \"0s\"", "allowed is 1ms to 1h"),
        ("[log]\nlevel = \"loud\"", "is not error, warn, info"),
        ("[log]\nlevel = \"info=\"", "is not error, warn, info"),
        ("[log]\nlevel = \"info debug\"", "is not error, warn, info"),
        ("[log]\nformat = \"xml\"", "\"xml\" is not text or json"),
        ("clients = 3", "\"clients\" is a section"),
        ("[node]\naddress = \"a\"", "two brackets: [[node]]"),
        ("[[node]]\nusername = \"u\"", "this [[node]] has no address"),
        ("node = [1]", "nodes are written as [[node]]"),
        (
            "[[node]]\naddress = \"a\"\n[[node]]\naddress = \"a:6379\"",
            "switchyard.toml:4: the node a:6379 is given twice, first at switchyard.toml:2",
        ),
        ("[clients]\npassword = \"a\"\npassword-file = \"b\"", "are both given in [clients]; keep one"),
        ("[clients]\npassword = 5", "put it in quotes"),
        ("workers = = 2", "switchyard.toml:1: not valid TOML"),
        ("workers = 1\nworkers = 2", "switchyard.toml:2: not valid TOML: duplicate key"),
        ("", "no node is given"),
    ] {
        let problems = wrong(file);
        assert!(problems.contains(expected), "{file}\n{problems}");
    }
}

#[test]
fn all_problems_are_reported_in_file_order() {
    let all = wrong("workers = 0\nnonsense = 1\n[nodes]\ncommand-timeout = 5\n[admin]\nlisten = \"x\"\n");
    let places: Vec<&str> = all.lines().map(|line| &line[..line.find(": ").expect("a place")]).collect();
    assert_eq!(places, ["switchyard.toml:1", "switchyard.toml:2", "switchyard.toml:4", "switchyard.toml:6"]);
}

#[test]
fn an_open_listener_needs_a_password_or_permission() {
    let open = format!("listen = \"0.0.0.0:6380\"\n{NODE}");
    let error = resolve(&read(&open).expect("reads")).expect_err("open").to_string();
    assert!(error.starts_with("switchyard.toml:1: refusing to listen on 0.0.0.0:6380 without a password"), "{error}");
    assert!(error.contains("--allow-open-listener") && error.contains("--password-file"), "{error}");
    assert!(resolve(&read(&format!("allow-open-listener = true\n{open}")).expect("reads")).is_ok());
    assert!(resolve(&read(&format!("{open}[clients]\npassword = \"p\"\n")).expect("reads")).is_ok());
    assert!(
        resolve(&read(&format!("listen = \"[::1]:6380\"\n{NODE}")).expect("reads")).is_ok(),
        "loopback is not open"
    );
}

#[test]
fn problems_with_users_are_reported_alone() {
    let folder = tempfile::TempDir::new().expect("a folder");
    let path = folder.path().join("users");
    std::fs::write(&path, "user app no-such-word\n").expect("written");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("mode");
    let open = format!("listen = \"0.0.0.0:6380\"\n{NODE}[clients]\nusers-file = {path:?}\n");
    let error = resolve(&read(&open).expect("reads")).expect_err("wrong").to_string();
    assert!(error.contains("users:1: ") && !error.contains("refusing to listen"), "{error}");
}

#[test]
fn an_open_admin_port_needs_a_token() {
    let open = format!("{NODE}[admin]\nlisten = \"0.0.0.0:6381\"\n");
    let error = resolve(&read(&open).expect("reads")).expect_err("open").to_string();
    assert!(
        error.starts_with("switchyard.toml:4: refusing to serve the admin API on 0.0.0.0:6381 without a token"),
        "{error}"
    );
    assert!(resolve(&read(&format!("{open}token = \"t\"\n")).expect("reads")).is_ok());
    let same = format!("{NODE}[admin]\nlisten = \"127.0.0.1:6380\"\n");
    assert!(
        resolve(&read(&same).expect("reads"))
            .expect_err("taken")
            .to_string()
            .contains("already the address for clients")
    );
}

#[test]
fn an_impossible_autoscaler_is_refused() {
    for (section, expected) in [
        ("[autoscale.local]\ncommand = [\"redis-server\"]", "{port} is missing"),
        (
            "[autoscale.local]\ncommand = [\"redis-server\", \"--port\", \"{port}\", \"--daemonize\", \"yes\"]",
            "in the background",
        ),
        ("[autoscale]\nmode = \"on\"\npolicy = \"model\"", "needs capacity"),
    ] {
        let error = read(&format!("{NODE}{section}\n")).expect_err("refused").to_string();
        assert!(error.contains(expected), "{section}: {error}");
    }
}

#[test]
fn two_names_of_one_server_are_reported() {
    let file = "[[node]]\naddress = \"127.0.0.1:7001\"\n[[node]]\naddress = \"localhost:7001\"\n";
    let error = resolve(&read(file).expect("reads")).expect_err("the same").to_string();
    assert!(error.contains("the nodes 127.0.0.1:7001 and localhost:7001 are the same server"), "{error}");
}

#[test]
fn a_name_that_no_longer_resolves_keeps_its_address() {
    let config = read("[[node]]\naddress = \"no-such-host.invalid:7001\"\n").expect("reads");
    let unknown = resolve(&config).expect("the node is down");
    assert!(unknown.nodes[0].address.is_none() && unknown.nodes[0].unresolved.is_some(), "{:?}", unknown.nodes);
    assert!(unknown.warnings().any(|warning| warning.contains("is down until its name resolves")));
    let error = unknown.require_resolved().expect_err("unknown name").to_string();
    assert!(error.contains("switchyard.toml:2") && error.contains("no-such-host.invalid"), "{error}");
    let before: SocketAddr = "10.0.0.9:7001".parse().expect("an address");
    let resolved = config.resolve(|name| (name == "no-such-host.invalid:7001").then_some(before)).expect("known");
    assert_eq!(resolved.nodes[0].address, Some(before));
    assert!(resolved.warnings().any(|w| w.contains("keeping 10.0.0.9:7001")), "{:?}", resolved.warnings);
}

#[test]
fn secrets_come_from_files_and_are_never_shown() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("client-pw"), "from-a-file\n").expect("writing");
    let path = dir.path().join("switchyard.toml");
    std::fs::write(
        &path,
        format!(
            "[clients]\npassword-file = \"client-pw\"\n[nodes]\npassword = \"hunter2\"\n{NODE}password = \"hunter3\"\n"
        ),
    )
    .expect("writing");
    let sources = Sources { file: Some(path), overrides: Vec::new(), twemproxy: None };
    let config = sources.read().expect("good");
    let resolved = resolve(&config).expect("resolvable");
    let expected = Users::without_file(Some(&Secret("from-a-file".to_owned())));
    assert_eq!(*resolved.live.users, expected, "relative to the configuration file");
    assert_eq!(resolved.nodes[0].password, Some(Secret("hunter3".to_owned())));
    for shown in [render(&config), format!("{config:?}"), format!("{resolved:?}")] {
        assert!(!shown.contains("hunter") && !shown.contains("from-a-file"), "{shown}");
    }
    assert!(render(&config).contains("password = \"***\""));

    std::fs::remove_file(dir.path().join("client-pw")).expect("removing");
    let error = resolve(&config).expect_err("gone").to_string();
    assert!(error.contains("switchyard.toml:2: cannot read") && error.contains("client-pw"), "{error}");
}

#[test]
fn check_config_output_parses_back() {
    let file = "listen = \"127.0.0.1:7777\"\n[clients]\nidle-timeout = \"90s\"\noutput-limit = \"1m\"\n[log]\nlevel = \"info,a=debug\"\n\
                [[node]]\naddress = \"a\"\nusername = \"with \\\"quotes\\\" and \\\\\"\n";
    let config = read(file).expect("good");
    let again = read(&render(&config)).unwrap_or_else(|problems| panic!("{}\n{problems}", render(&config)));
    assert_eq!(again.changes_since(&config), []);
    assert_eq!(config.changes_since(&again), []);
    assert!(render(&config).contains("# switchyard.toml:1"));
}

#[test]
fn the_example_changes_no_default() {
    let config = read(&example()).unwrap_or_else(|problems| panic!("{problems}"));
    assert_eq!(config.changes_since(&read(NODE).expect("good")), []);
    // Every key also parses without its comment sign, so the shown values are valid. Of the three forms of a secret
    // only the first is kept.
    // A cluster excludes nodes.
    let (before, rest) =
        example().split_once("\n[storage]\n").map(|(a, b)| (a.to_owned(), b.to_owned())).expect("a section");
    let (storage, after) = rest.split_once("\n[").expect("a next section");
    let keys = |text: &str| {
        text.lines()
            .filter_map(|line| line.strip_prefix('#'))
            .filter(|key| !key.starts_with(' '))
            .map(|key| format!("{key}\n"))
            .collect::<String>()
    };
    read(&format!("[storage]\n{}", keys(storage))).unwrap_or_else(|problems| panic!("{storage}\n{problems}"));
    let all: String = format!("{before}\n[{after}")
        .lines()
        .map(|line| match line.strip_prefix('#') {
            // A node has an address or Sentinels, and a rule has a preset or patterns with a capture or a tag, not both.
            Some(key)
                if ["sentinels =", "sentinel-master =", "preset =", "tag ="].iter().any(|k| key.starts_with(k)) =>
            {
                String::new()
            }
            Some(key) if !key.starts_with(' ') && !key.contains("-file =") && !key.contains("-env =") => {
                format!("{key}\n")
            }
            _ => format!("{line}\n"),
        })
        .collect();
    read(&all).unwrap_or_else(|problems| panic!("{all}\n{problems}"));
    for key in keys::CONFIG {
        assert!(example().contains(&format!("\n#{} = ", key.name)), "{}", key.path());
    }
}

#[test]
fn replication_is_checked_for_contradictions() {
    let sentinel = "[[node]]\nsentinel-master = \"mymaster\"\nsentinels = [\"127.0.0.1\", \"127.0.0.2:5000\"]\n";
    let config = read(sentinel).expect("good");
    assert_eq!(config.node_names(), ["mymaster"]);
    let nodes = resolve(&config).expect("resolvable").nodes;
    assert_eq!(nodes[0].address, None);
    let group = nodes[0].sentinel.as_ref().expect("Sentinels");
    assert_eq!(
        group.sentinels.iter().map(|place| place.endpoint.to_string()).collect::<Vec<_>>(),
        ["127.0.0.1:26379", "127.0.0.2:5000"]
    );

    let replicas =
        read("[[node]]\naddress = \"127.0.0.1:1\"\nreplicas = [\"127.0.0.1:2\", \"127.0.0.1\"]\n").expect("good");
    let nodes = resolve(&replicas).expect("resolvable").nodes;
    assert_eq!(
        nodes[0].replicas.iter().map(ToString::to_string).collect::<Vec<_>>(),
        ["127.0.0.1:2", "127.0.0.1:6379"]
    );

    for (text, expected) in [
        ("sentinel-master = \"m\"", "sentinel-master needs sentinels"),
        ("address = \"127.0.0.1:1\"\nsentinels = [\"a\"]", "sentinels need sentinel-master"),
        ("address = \"127.0.0.1:1\"\nsentinel-master = \"m\"\nsentinels = [\"a\"]", "remove one of them"),
        ("sentinel-master = \"m\"\nsentinels = [\"a\"]\nreplicas = [\"b\"]", "remove replicas"),
        ("sentinel-master = \"a b\"", "is not a name that Sentinel accepts"),
    ] {
        let problems = read(&format!("[[node]]\n{text}\n")).map(|_| ()).expect_err(text);
        assert!(problems.to_string().contains(expected), "{problems}");
    }
    for (text, expected) in [
        ("address = \"127.0.0.1:1\"\nreplicas = [\"127.0.0.1:1\"]", "are the same server"),
        ("address = \"127.0.0.1:1\"\nreplicas = [\"127.0.0.1:0\"]", "has port 0"),
    ] {
        let config = read(&format!("[[node]]\n{text}\n")).expect("readable");
        let problems = resolve(&config).map(|_| ()).expect_err(text);
        assert!(problems.to_string().contains(expected), "{problems}");
    }
    let problems = read(&format!("[clients]\nreads = \"secondary\"\n{NODE}")).map(|_| ()).expect_err("no such policy");
    assert!(problems.to_string().contains("is not primary, prefer-replica, replica or nearest"), "{problems}");
}

#[test]
fn an_unknown_autoscale_policy_is_refused_with_the_known_ones() {
    let read_policy = |policy: &str| read(&format!("[autoscale]\nmode = \"on\"\npolicy = \"{policy}\"\n{NODE}"));
    let problems = read_policy("lerned").map(|_| ()).expect_err("no such policy").to_string();
    for policy in ["threshold", "static", "learned", "predictive"] {
        assert!(problems.contains(policy), "{policy} is not in {problems}");
        // Only the policy model needs a capacity.
        read_policy(policy).expect("known");
    }
}

#[test]
fn a_reload_reports_changes_and_keeps_settings_that_need_a_restart() {
    let running = read(&format!("workers = 1\n[clients]\npassword = \"old\"\n{NODE}")).expect("good");
    let mut next = read(
        "listen = \"127.0.0.1:1\"\nworkers = 2\npin = true\nstate-dir = \"/else\"\nallow-open-listener = true\n\
         [clients]\nmax-clients = 7\npassword-env = \"X\"\n[admin]\nlisten = \"127.0.0.1:2\"\ntoken = \"t\"\nhost-names = [\"r.example\"]\n[log]\nformat = \"json\"\n\
         [[node]]\naddress = \"127.0.0.1:7002\"\n",
    )
    .expect("good");
    let changes = next.changes_since(&running);
    let of = |takes| {
        changes
            .iter()
            .filter(|change| change.takes == takes)
            .map(|change| change.description.as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of(AppliesOn::Reload),
        [
            "clients.password: \"***\" -> none",
            "clients.password-env: none -> \"X\"",
            "clients.max-clients: 10000 -> 7",
            "admin.token: none -> \"***\"",
            "node 127.0.0.1:7001 removed",
            "node 127.0.0.1:7002 added",
        ]
    );
    assert!(of(AppliesOn::Restart).contains(&"workers: 1 -> 2"), "{changes:?}");
    // Every key that needs a restart is kept, including keys added in the future.
    let restart_keys =
        keys::CONFIG.iter().filter(|key| key.takes == AppliesOn::Restart && !key.name.contains('-')).count();
    assert!(of(AppliesOn::Restart).len() >= restart_keys, "the test changes every such key: {changes:?}");
    next.keep_until_restart(&running);
    let left = next.changes_since(&running);
    assert!(left.iter().all(|change| change.takes == AppliesOn::Reload), "{left:?}");
    assert_eq!(left.len(), 6);
}

#[test]
fn spaces_in_a_log_level_are_ignored() {
    for (text, same) in [("info ", "info"), (" switchyard_router=debug, info", "switchyard_router=debug,info")] {
        assert_eq!(LogLevel::parse(text), LogLevel::parse(same));
    }
}

#[test]
fn the_environment_sets_the_log_level_unless_a_flag_does() {
    let mut config = read(&format!("{NODE}[log]\nlevel = \"warn\"\n")).expect("good");
    config.prefer_log_level(Some("debug"));
    assert_eq!(config.log_level, LogLevel::parse("debug").expect("a level"));
    let mut config = read_with(NODE, vec![flag("--log-level", "log.level", text("error"))]).expect("good");
    config.prefer_log_level(Some("debug"));
    assert_eq!(config.log_level, LogLevel::parse("error").expect("a level"));
    config.prefer_log_level(None);
    assert_eq!(config.log_level, LogLevel::parse("error").expect("a level"));
}

#[test]
fn only_a_missing_file_leaves_the_defaults() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("switchyard.toml");
    assert_eq!(if_exists(&path), None);
    // The link exists but cannot be read, even by root.
    std::os::unix::fs::symlink(&path, &path).expect("a link to itself");
    let sources = Sources { file: if_exists(&path), overrides: Vec::new(), twemproxy: None };
    let why = sources.read().expect_err("it cannot be read").to_string();
    assert!(why.contains("cannot read the configuration file") && why.contains("switchyard.toml"), "{why}");
}

#[test]
fn the_state_directory_follows_systemd_then_xdg_then_home() {
    let dir = |vars: &[(&str, &str)]| {
        default_state_dir(|name| vars.iter().find(|(var, _)| *var == name).map(|(_, value)| PathBuf::from(value)))
    };
    let all = [("STATE_DIRECTORY", "/var/lib/a:/var/lib/b"), ("XDG_STATE_HOME", "/xdg"), ("HOME", "/home/u")];
    assert_eq!(dir(&all), Path::new("/var/lib/a"));
    assert_eq!(dir(&all[1..]), Path::new("/xdg/switchyard"));
    assert_eq!(dir(&all[2..]), Path::new("/home/u/.local/state/switchyard"));
    assert_eq!(
        dir(&[("XDG_STATE_HOME", "relative"), ("HOME", "/home/u")]),
        Path::new("/home/u/.local/state/switchyard")
    );
    assert_eq!(dir(&[]), Path::new("/var/lib/switchyard"));
}

#[test]
fn every_key_is_in_the_documentation() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let page = std::fs::read_to_string(&path).expect("docs/configuration.md");
    let (start, end) = ("<!-- reference: made by a test -->\n", "<!-- end of reference -->");
    let (before, rest) = page.split_once(start).expect("the start of the reference");
    let (now, after) = rest.split_once(end).expect("the end of the reference");
    let reference = show::reference();
    if now != reference && std::env::var_os("SWITCHYARD_WRITE_DOCS").is_some() {
        std::fs::write(&path, format!("{before}{start}{reference}{end}{after}")).expect("writing the page");
        return;
    }
    assert_eq!(now, reference, "run the tests once with SWITCHYARD_WRITE_DOCS=1 to regenerate the reference");
}
