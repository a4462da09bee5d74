//! Users: authentication, permissions, and the effect of a changed users file on connected clients.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use argon2::password_hash::SaltString;
use argon2::{Algorithm, Argon2, Params, PasswordHasher, Version};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, NodeOptions, Random, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple, until,
};

/// Returns a hash with the given cost, which is usually low.
pub(crate) fn hash(password: &str, memory_kib: u32, passes: u32) -> String {
    let params = Params::new(memory_kib, passes, 1, None).expect("parameters");
    let salt = SaltString::encode_b64(b"not random here!").expect("a salt");
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params)
        .hash_password(password.as_bytes(), &salt)
        .expect("hashes")
        .to_string()
}

/// A users file that only this user can read. Deleted on drop.
pub(crate) struct UsersFile {
    _dir: TempDir,
    pub(crate) path: PathBuf,
}

impl UsersFile {
    pub(crate) fn new(text: &str) -> UsersFile {
        let dir = TempDir::new().expect("a directory");
        let file = UsersFile { path: dir.path().join("users"), _dir: dir };
        file.write(text);
        file
    }

    fn write(&self, text: &str) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(&self.path, text).expect("written");
        std::fs::set_permissions(&self.path, std::fs::Permissions::from_mode(0o600)).expect("mode");
    }
}

fn options(path: &Path, password: Option<&str>) -> SiteOptions {
    let password_line = password.map(|p| format!("password = \"{p}\"\n")).unwrap_or_default();
    let config = format!("[clients]\nusers-file = {path:?}\n{password_line}");
    let router = RouterOptions { config, password: password.map(str::to_owned), ..RouterOptions::default() };
    SiteOptions::router(router)
}

/// Whether the client has received nothing yet.
fn is_quiet(client: &Client) -> bool {
    client.timeout(Duration::from_millis(1));
    let quiet = client.stream().peek(&mut [0]).is_err();
    client.timeout(TIMEOUT);
    quiet
}

fn reload(site: &Site) {
    let count = || site.router().process().log().matches("reloaded").count();
    let before = count();
    site.router().process().signal(Signal::HUP);
    until("the reload is done", || count() > before);
}

const WRONGPASS: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NOAUTH: &str = "NOAUTH Authentication required.";

#[test]
fn authentication_matches_redis() {
    let users = UsersFile::new(&format!(
        "user alice on {} ~app:* &news* +@all -@dangerous\nuser bob off nopass ~* +@all\nuser guest on nopass ~* +get +acl|whoami\n",
        hash("s3cret", 64, 1)
    ));
    let Some(site) = Site::router_only(2, &options(&users.path, Some("master"))) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("GET k").error(), Some(NOAUTH));
    assert_eq!(client.cmd("PING").error(), Some(NOAUTH));
    assert_eq!(client.cmd("AUTH alice wrong").error(), Some(WRONGPASS));
    assert_eq!(client.cmd("AUTH nobody s3cret").error(), Some(WRONGPASS));
    assert_eq!(client.cmd("AUTH bob x").error(), Some(WRONGPASS));
    assert_eq!(client.cmd("AUTH a b c").error(), Some("ERR syntax error"));
    assert_eq!(client.cmd("GET k").error(), Some(NOAUTH));

    // Commands after AUTH wait for it, and are executed as that user.
    for line in ["AUTH alice s3cret", "SET app:1 v", "ACL WHOAMI", "GET other", "FLUSHALL", "PING"] {
        client.post(line);
    }
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), bulk("alice"));
    assert_eq!(
        client.reply().error(),
        Some("NOPERM this user has no permissions to access one of the keys used as arguments")
    );
    assert_eq!(client.reply().error(), Some("NOPERM this user has no permissions to run the 'flushall' command"));
    assert_eq!(client.reply(), simple("PONG"));
    // A failed login changes nothing.
    assert_eq!(client.cmd("AUTH alice wrong").error(), Some(WRONGPASS));
    assert_eq!(client.cmd("ACL WHOAMI"), bulk("alice"));
    assert_eq!(
        client.cmd("MGET app:1 app:2 other").error(),
        Some("NOPERM this user has no permissions to access one of the keys used as arguments")
    );
    assert_eq!(
        client.cmd("CONFIG SET a b").error(),
        Some("NOPERM this user has no permissions to run the 'config|set' command")
    );
    assert_eq!(
        client.cmd("PUBLISH sports x").error(),
        Some("NOPERM this user has no permissions to access one of the channels used as arguments")
    );
    // Scripts have the router's permissions at the nodes.
    let error = client.cmd("EVAL return(1) 1 app:1");
    assert!(error.error().is_some_and(|e| e.starts_with("NOPERM") && e.contains("allscripts")), "{error:?}");

    // HELLO with both protocols, and RESET.
    let mut three = site.client();
    assert!(three.cmd("HELLO 3").error().is_some_and(|e| e.starts_with("NOAUTH HELLO must be called")));
    assert_eq!(three.cmd("HELLO 3 AUTH alice nope").error(), Some(WRONGPASS));
    assert!(matches!(three.cmd("HELLO 3 AUTH alice s3cret SETNAME x"), Value::Map(_)));
    assert_eq!(three.cmd("ACL WHOAMI"), bulk("alice"));
    assert_eq!(three.cmd("RESET"), simple("RESET"));
    assert_eq!(three.cmd("GET app:1").error(), Some(NOAUTH));
    assert_eq!(three.cmd("AUTH guest anything"), ok());
    assert_eq!(three.cmd("GET other"), Value::Nil);
    assert_eq!(three.cmd("SET other x").error(), Some("NOPERM this user has no permissions to run the 'set' command"));

    // The default user has the password of [clients], and all permissions.
    let mut default = site.client();
    assert_eq!(default.cmd("AUTH master"), ok());
    assert_eq!(default.cmd("ACL WHOAMI"), bulk("default"));
    assert_eq!(
        default.cmd("ACL USERS"),
        Value::Array(["alice", "bob", "default", "guest"].iter().map(|u| bulk(*u)).collect())
    );
    let list = default.cmd("CLIENT LIST").text();
    assert!(
        list.contains(" user=alice ") && list.contains(" user=guest ") && list.contains(" user=default "),
        "{list}"
    );
    assert!(default.cmd("CLIENT KILL USER nobody").error().is_some_and(|e| e.contains("No such user 'nobody'")));
    assert_eq!(default.cmd("CLIENT KILL USER alice"), int(1));
    assert!(client.closed_within(TIMEOUT));
    let shown = default.cmd("ACL LIST");
    assert!(!format!("{shown:?}").contains("argon2"), "{shown:?}");
}

#[test]
fn a_users_file_disables_the_default_user_without_a_password() {
    let users = UsersFile::new("user app on nopass ~* &* +@all\n");
    let mut wanted = options(&users.path, None);
    wanted.router.nodes_may_be_down = true;
    wanted.router.config = "[clients]\n".to_owned();
    let Some(site) = Site::router_only(1, &wanted) else { return };
    assert_eq!(site.client().cmd("GET k"), Value::Nil, "without a file every client may");
    drop(site);
    // The harness needs a user to wait for a reply to PING.
    let config = format!("[clients]\nusers-file = {:?}\n", users.path);
    let node = Node::start(&NodeOptions::default());
    let router = crate::support::Router::start(
        &[node.address()],
        &RouterOptions {
            config,
            password: Some("x".to_owned()),
            user: Some("app".to_owned()),
            ..RouterOptions::default()
        },
    );
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("GET k").error(), Some(NOAUTH));
    assert_eq!(client.cmd("AUTH default").error(), Some(WRONGPASS));
    // Before a login: at most ten arguments of 16 KB.
    client.write(b"*11\r\n");
    assert!(client.reply().error().is_some_and(|e| e.contains("unauthenticated multibulk length")));
    let mut client = Client::connect(router.address());
    client.write(b"*2\r\n$4\r\nAUTH\r\n$16385\r\n");
    assert!(client.reply().error().is_some_and(|e| e.contains("unauthenticated bulk length")));
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("AUTH app whatever"), ok());
    assert_eq!(client.cmd("SET k v"), ok());
}

/// Unread replies to unauthenticated clients do not accumulate: the client is closed (unlike in CVE-2025-21605).
#[test]
fn unauthenticated_clients_that_do_not_read_use_little_memory() {
    use std::io::Write;
    let users = UsersFile::new("user app on nopass ~* +@all\n");
    let Some(site) = Site::router_only(1, &options(&users.path, Some("master"))) else { return };
    let memory = || site.router().process().memory_kib("VmRSS");
    let before = memory();
    let piece = "GET k\r\n".repeat(10_000);
    let strangers: Vec<Client> = (0..20).map(|_| site.client()).collect();
    std::thread::scope(|scope| {
        for stranger in &strangers {
            // 10 MB of commands, 40 MB of errors.
            let piece = &piece;
            scope.spawn(move || {
                let mut stream = stranger.stream();
                (0..140).take_while(|_| stream.write_all(piece.as_bytes()).is_ok()).count()
            });
        }
    });
    let grown = memory().saturating_sub(before);
    assert!(grown < 100 << 10, "20 strangers have made the router grow by {grown} KiB");
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH master"), ok());
    assert_eq!(client.cmd("SET k v"), ok());
}

/// Dangerous commands are refused before a login, and allowed to users with a line that permits them.
#[test]
fn the_default_user_may_be_denied_some_commands() {
    let users = UsersFile::new(&format!("user operator on {} ~* &* +@all\n", hash("s3cret", 64, 1)));
    let config = |rules: &str| {
        format!("[clients]\nusers-file = {:?}\npassword = \"master\"\ndefault-user-rules = {rules}\n", users.path)
    };
    let router = RouterOptions {
        config: config(r#"["-@dangerous", "+info", "-@scripting", "requests-per-second=100000"]"#),
        password: Some("master".into()),
        ..RouterOptions::default()
    };
    // The harness needs no dangerous command to check whether the router serves.
    let Some(site) = Site::router_only(2, &SiteOptions::router(router)) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH master"), ok());
    assert_eq!(client.cmd("SET k v"), ok());
    for line in [
        "FLUSHALL",
        "KEYS *",
        "CONFIG GET maxmemory",
        "RESTORE k 0 x",
        "CLIENT LIST",
        "SORT k",
        "EVAL return(1) 0",
        "FUNCTION FLUSH",
    ] {
        let name = line.to_ascii_lowercase();
        let reply = client.cmd(line);
        let error = reply.expect_error();
        assert!(
            error.starts_with("NOPERM") && error.contains(name.split(' ').next().expect("a word")),
            "{line}: {error}"
        );
    }
    assert!(client.cmd("INFO server").text().contains("redis_version"));
    assert_eq!(client.cmd("GET k"), bulk("v"));
    let mut operator = site.client();
    assert_eq!(operator.cmd("AUTH operator s3cret"), ok());
    assert_eq!(operator.cmd("EVAL return(1) 0"), int(1));
    assert_eq!(operator.cmd("FLUSHALL"), ok());
    // A reload restores the permission, also for connected clients.
    std::fs::write(site.router().config_file(), config("[]")).expect("configuration");
    reload(&site);
    until("it may again", || client.cmd("FLUSHALL") == ok());
    // Invalid rules are refused, and change nothing.
    std::fs::write(site.router().config_file(), config(r#"["-@nothing"]"#)).expect("configuration");
    site.router().process().signal(Signal::HUP);
    until("the mistake is logged", || site.router().process().log().contains("default-user-rules"));
    assert_eq!(client.cmd("FLUSHALL"), ok());
}

#[test]
fn a_changed_users_file_applies_to_connected_clients() {
    let file = |app: &str, more: &str| format!("user app {app}\n{more}user same on nopass ~* &* +@all\n");
    let users = UsersFile::new(&file("on nopass ~a* &* +@all", "user gone on nopass ~* +@all\n"));
    let Some(site) = Site::router_only(2, &options(&users.path, Some("master"))) else { return };
    let login = |name: &str| {
        let mut client = site.client();
        assert_eq!(client.cmd(&format!("AUTH {name} x")), ok());
        client
    };
    let (mut app, mut gone, mut same) = (login("app"), login("gone"), login("same"));
    assert_eq!(app.cmd("SET a1 v"), ok());
    assert!(app.cmd("SET b1 v").error().is_some_and(|e| e.starts_with("NOPERM")));

    users.write(&file("on nopass ~b* &* +@all", ""));
    reload(&site);
    until("the new rules hold", || app.cmd("SET b1 v") == ok());
    assert!(app.cmd("SET a1 v").error().is_some_and(|e| e.starts_with("NOPERM")));
    assert!(gone.closed_within(TIMEOUT));
    assert_eq!(same.cmd("PING"), simple("PONG"));

    // A mistake changes nothing.
    users.write("user app on nopass +gett\n");
    site.router().process().signal(Signal::HUP);
    until("the mistake is logged with its line", || {
        site.router()
            .process()
            .log()
            .contains("users:1: user app: Unknown command or category name in ACL: there is no command \"gett\"")
    });
    assert_eq!(app.cmd("SET b1 v"), ok());

    users.write(&file("off nopass ~b* &* +@all", ""));
    reload(&site);
    assert!(app.closed_within(TIMEOUT));
    // A new password: connected clients stay connected, as in Redis.
    users.write(&format!("user same on {} ~* &* +@all\n", hash("new", 64, 1)));
    reload(&site);
    assert_eq!(same.cmd("PING"), simple("PONG"));
    let mut same = site.client();
    assert_eq!(same.cmd("AUTH same x").error(), Some(WRONGPASS));
    assert_eq!(same.cmd("AUTH same new"), ok());
    let mut default = site.client();
    assert_eq!(default.cmd("AUTH master"), ok());
}

#[test]
fn checking_a_password_delays_no_other_client() {
    // Expensive hashes even on a fast machine: a quarter of a second, and several seconds. The latter belongs to no
    // password: it is a cheap hash with expensive parameters, so that the test need not compute it.
    let endless = hash("s3cret", 8, 1).replace("m=8,t=1", "m=65536,t=64");
    assert!(endless.contains("t=64"), "{endless}");
    let users = UsersFile::new(&format!(
        "user slow on {} ~* +@all\nuser endless on {endless} ~* +@all\n",
        hash("s3cret", 64 << 10, 6),
    ));
    let mut wanted = options(&users.path, Some("master"));
    wanted.router.workers = 1;
    let Some(site) = Site::router_only(1, &wanted) else { return };
    let mut other = site.client();
    assert_eq!(other.cmd("AUTH master"), ok());
    let mut slow = site.client();
    slow.post("AUTH slow s3cret");
    slow.post("SET k v");
    assert_eq!(slow.reply(), ok());
    assert_eq!(slow.reply(), ok());
    // A verified password is cached.
    for _ in 0..30 {
        assert_eq!(site.client().cmd("AUTH slow s3cret"), ok());
    }
    // A worker that checked the password itself would reply to it before the later PINGs.
    let mut endless = site.client();
    endless.post("AUTH endless s3cret");
    for _ in 0..10 {
        assert_eq!(other.cmd("PING"), simple("PONG"));
    }
    assert!(is_quiet(&endless), "the password was checked before the commands of another client were answered");
    // Clients that disconnect during the check leave nothing behind.
    for _ in 0..10 {
        site.client().post("AUTH slow wrong");
    }
    assert_eq!(other.cmd("PING"), simple("PONG"));
}

/// A user with the password can log in whatever other clients do, even from the same address, and even for the first
/// time.
#[test]
fn failed_logins_lock_out_no_other_client() {
    let users = UsersFile::new(&format!(
        "user app on {} ~* +@all\nuser other on {} ~* +@all\n",
        hash("s3cret", 64, 1),
        hash("s3cret", 64, 1)
    ));
    let Some(site) = Site::router_only(1, &options(&users.path, Some("master"))) else { return };
    assert_eq!(site.client().cmd("AUTH app s3cret"), ok());
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for stranger in 0..4 {
            let (site, done) = (&site, &done);
            scope.spawn(move || {
                let mut client = site.client();
                let mut guesses = 0;
                while !done.load(std::sync::atomic::Ordering::Relaxed) || guesses < 30 {
                    let user = if guesses % 2 == 0 { "app" } else { "other" };
                    assert!(client.cmd(&format!("AUTH {user} guess{stranger}-{guesses}")).error().is_some());
                    guesses += 1;
                }
            });
        }
        // Wait for more failures than the router processes at full speed.
        until("many have failed", || failed_logins(&site) > 100);
        for _ in 0..30 {
            assert_eq!(site.client().cmd("AUTH app s3cret"), ok(), "cached passwords are accepted at once");
            assert_eq!(site.client().cmd("AUTH master"), ok());
        }
        // A password that is not cached, in the same queue as the guesses.
        until("it gets in all the same", || site.client().cmd("AUTH other s3cret") == ok());
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let log = site.router().process().expect_log(&["a login failed"]);
    let told: Vec<&str> = log.lines().filter(|line| line.contains("a login failed")).collect();
    assert!(!told.is_empty() && told.iter().all(|line| line.contains("audit") && !line.contains("guess")), "{told:?}");
    assert!(told.len() < 200, "{} lines", told.len());
}

fn failed_logins(site: &Site) -> u64 {
    let metrics = site.router().metrics();
    let lines = metrics.lines().filter(|line| line.contains("logins_failed") && !line.starts_with("#"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

/// After a restart, all clients of an application connect at once: their password is checked once.
#[test]
fn a_thousand_first_logins_cost_one_check() {
    // Long enough that all clients have sent AUTH before the first check ends.
    let users = UsersFile::new(&format!("user app on {} ~* +@all\n", hash("s3cret", 64 << 10, 6)));
    let mut wanted = options(&users.path, Some("master"));
    wanted.router.open_files = None;
    let Some(site) = Site::router_only(1, &wanted) else { return };
    let cpu = || {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", site.router().process().pid())).expect("stat");
        let fields: Vec<u64> =
            text.rsplit(')').next().expect("fields").split(' ').filter_map(|field| field.parse().ok()).collect();
        fields[10] + fields[11] // utime and stime, in hundredths of a second
    };
    let check = {
        let before = cpu();
        let mut client = site.client();
        assert_eq!(client.cmd("AUTH app wrong").error(), Some(WRONGPASS));
        cpu() - before
    };
    let mut clients: Vec<Client> = (0..1000).map(|_| site.client()).collect();
    let before = cpu();
    clients.iter_mut().for_each(|client| client.post("AUTH app s3cret"));
    assert!(clients.iter_mut().all(|client| client.reply() == ok()));
    let spent = cpu() - before;
    assert!(spent < 10 * check.max(10), "{spent} ticks for a thousand logins; one check takes {check}");
}

/// An unauthenticated client cannot keep a connection.
#[test]
fn unauthenticated_clients_are_closed_after_a_timeout() {
    let users = UsersFile::new(&format!("user app on {} ~* +@all\n", hash("s3cret", 64, 1)));
    let mut wanted = options(&users.path, Some("master"));
    wanted.router.args = vec!["--set".into(), "clients.login-timeout=500ms".into()];
    let Some(site) = Site::router_only(1, &wanted) else { return };
    let mut app = site.client();
    assert_eq!(app.cmd("AUTH app s3cret"), ok());
    let mut stranger = site.client();
    let mut trying = site.client();
    assert_eq!(trying.cmd("AUTH app wrong").error(), Some(WRONGPASS));
    assert!(stranger.closed_within(TIMEOUT));
    assert!(trying.closed_within(TIMEOUT), "trying is not enough");
    assert_eq!(app.cmd("PING"), simple("PONG"));
    // After RESET, a client has the full time again.
    assert_eq!(app.cmd("RESET"), simple("RESET"));
    assert_eq!(app.cmd("AUTH app s3cret"), ok());
    assert_eq!(app.cmd("RESET"), simple("RESET"));
    assert!(app.closed_within(TIMEOUT));
}

#[test]
fn large_values_work_for_restricted_users() {
    let users = UsersFile::new("user app on nopass ~app:* %R~ro:* +@all\n");
    let Some(site) = Site::router_only(2, &options(&users.path, Some("master"))) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH app x"), ok());
    let value = "x".repeat(5 << 20);
    client.send(&["SET", "app:1", &value]);
    assert_eq!(client.reply(), ok());
    for key in ["other", "ro:1"] {
        client.send(&["SET", key, &value]);
        client.post("PING");
        assert!(client.reply().error().is_some_and(|e| e.starts_with("NOPERM")), "{key}");
        assert_eq!(client.reply(), simple("PONG"));
    }
    // With GET, SET also reads: allowed if the user may read and write.
    client.send(&["SET", "app:1", &value, "GET"]);
    assert_eq!(client.reply(), bulk(&value));
    client.send(&["GET", "app:1"]);
    assert_eq!(client.reply(), bulk(&value));
}

/// Servers read the name of an option up to a NUL byte. Bytes after it hide no key, including in transactions, where
/// malformed calls are left to the node.
#[test]
fn an_option_that_ends_early_hides_no_key() {
    let users = UsersFile::new("user app on nopass ~app:* +@all\nuser writer on nopass %W~app:* +@all\n");
    let mut options = options(&users.path, Some("master"));
    options.router.config.push_str("cross-slot = \"refuse\"\n");
    let site = Site::with(2, &options);
    let mut admin = site.client();
    assert_eq!(admin.cmd("AUTH master"), ok());
    for command in ["XADD secret 1-1 f v", "SET app:1 hidden", "SET {x}secret:1 hidden", "RPUSH app:{x} 1"] {
        assert_eq!(admin.cmd(command).error(), None, "{command}");
    }
    let mut app = site.client();
    assert_eq!(app.cmd("AUTH app x"), ok());
    let mut writer = site.client();
    assert_eq!(writer.cmd("AUTH writer x"), ok());
    let is_refused = |client: &mut Client, words: &[&str]| {
        client.send(words);
        let direct = client.reply();
        assert!(
            direct.error().is_some_and(|e| e.starts_with("NOPERM") || e.contains("ACL permissions")),
            "{words:?}: {direct:?}"
        );
        assert_eq!(client.cmd("MULTI"), ok());
        client.send(words);
        client.reply();
        let done = client.cmd("EXEC");
        assert!(done.error().is_some_and(|e| e.starts_with("EXECABORT")), "{words:?}: {done:?}");
    };
    is_refused(&mut app, &["XREAD", "STREAMS\0", "secret", "0"]);
    is_refused(&mut app, &["XREAD", "COUNT\0z", "1", "STREAMS", "secret", "0"]);
    is_refused(&mut app, &["XREADGROUP", "GROUP\0", "g", "c", "STREAMS\0", "secret", ">"]);
    is_refused(&mut app, &["SORT", "app:{x}", "BY", "nosort", "GET\0", "{x}secret:*"]);
    is_refused(&mut app, &["SORT", "app:{x}", "STORE\0", "{x}other"]);
    is_refused(&mut app, &["GEORADIUS", "app:{x}", "0", "0", "1", "km", "STORE\0z", "{x}other"]);
    is_refused(&mut writer, &["SET", "app:1", "new", "GET\0"]);
    // Keys in another slot are refused even to users with all permissions.
    assert_eq!(admin.cmd("MULTI"), ok());
    assert_eq!(admin.cmd("GET app:1"), simple("QUEUED"));
    admin.send(&["XREAD", "STREAMS\0", "secret", "0"]);
    assert!(admin.reply().error().is_some_and(|e| e.starts_with("CROSSSLOT")));
}

/// Compares a real server with the router, for every command.
#[test]
fn permissions_of_every_command_match_redis() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let mut server = node.client();
    if server.cmd("ACL DRYRUN default GET k").error().is_some() {
        eprintln!("this server has no ACL DRYRUN");
        return;
    }
    let rules = [
        "~app:* %R~ro:* %W~wo:* &news* +@all",
        "%R~* %W~wo:* +@all",
        "~* &* +@all -@dangerous -@slow",
        "~* +@read +@connection -get +set +config|get",
        "~zz* +@write -@string +append +client -client|kill",
        "%W~app:* -@all +@keyspace +@hash +@sortedset +@list +@geo +@stream +@string +@bitmap +@hyperloglog +@set",
    ];
    let mut text = String::new();
    for (number, rules) in rules.iter().enumerate() {
        text.push_str(&format!("user u{number} on nopass {rules}\n"));
        assert_eq!(server.cmd(&format!("ACL SETUSER u{number} reset on nopass {rules}")), ok());
    }
    let users = UsersFile::new(&text);
    let site = Site::with(1, &options(&users.path, Some("master")));
    let mut router = site.client();
    assert_eq!(router.cmd("AUTH master"), ok());

    let mut commands = Vec::new();
    for entry in server.cmd("COMMAND").items() {
        let mut add = |entry: &Value| commands.push((entry.items()[0].text(), entry.items()[1].int()));
        add(entry);
        entry.items()[9].items().iter().for_each(add);
    }
    assert!(commands.len() > 300, "{}", commands.len());
    // Servers list them in a different order each time.
    commands.sort();
    // Commands that run scripts are deliberately refused to restricted users. Their errors are checked elsewhere.
    let scripts = ["eval", "eval_ro", "evalsha", "evalsha_ro", "fcall", "fcall_ro"];
    let words = [
        "app:1",
        "app:2",
        "ro:1",
        "wo:1",
        "zz1",
        "other",
        "news1",
        "1",
        "2",
        "0",
        "STORE",
        "STOREDIST",
        "GET",
        "BY",
        "LIMIT",
        "STREAMS",
        "COUNT",
        "KEYS",
        "BLOCK",
        "u8",
        "SET",
        "INCRBY",
        "OVERFLOW",
        "WEIGHTS",
        "GROUP",
        "nosort",
        "#",
        "",
    ];
    let mut random = Random::new(20_261_121);
    let mut compared = 0;
    let mut kinds: BTreeSet<String> = BTreeSet::new();
    for (name, arity) in &commands {
        // MIGRATE is refused to all users, whatever its keys.
        if scripts.contains(&name.as_str()) || name == "migrate" {
            continue;
        }
        for round in 0..24 {
            let mut call: Vec<String> = name.split('|').map(str::to_owned).collect();
            let least = arity.unsigned_abs() as usize;
            let len = if *arity < 0 { least + random.below(if round < 12 { 3 } else { 8 }) } else { least };
            while call.len() < len {
                // Mostly keys at first, then anything.
                let range = if call.len() < 4 && round % 2 == 0 { 8 } else { words.len() };
                call.push(words[random.below(range)].to_owned());
            }
            let ask = |client: &mut Client, front: &[&str]| {
                client.send(&front.iter().map(|w| (*w).to_owned()).chain(call.iter().cloned()).collect::<Vec<_>>());
                client.reply()
            };
            // If Redis cannot find the keys, it checks the keys that it has found so far. The router refuses the whole
            // call.
            if ask(&mut server, &["COMMAND", "GETKEYS"]).error().is_some_and(|e| e.contains("Invalid arguments")) {
                continue;
            }
            let user = format!("u{}", random.below(rules.len()));
            let theirs = ask(&mut server, &["ACL", "DRYRUN", &user]);
            let ours = ask(&mut router, &["ACL", "DRYRUN", &user]);
            let said = |value: &Value| value.error().map_or_else(|| value.text(), str::to_owned);
            // A malformed call accesses nothing, but Redis checks the arguments that would be keys in a valid call.
            let malformed =
                said(&ours) == "OK" && said(&theirs).ends_with(" key") && ask(&mut server, &[]).error().is_some();
            let sort_pattern = name.starts_with("sort") && said(&ours).contains("option of SORT denied");
            assert!(
                said(&ours) == said(&theirs) || sort_pattern || malformed,
                "{user} {}: {call:?}\nRedis: {theirs:?}\nours:  {ours:?}",
                rules[user[1..].parse::<usize>().expect("a number")]
            );
            compared += 1;
            kinds.insert(said(&theirs).split('\'').step_by(2).collect());
        }
    }
    assert!(compared > 5000, "only {compared} calls were compared");
    assert!(kinds.len() >= 4, "{kinds:?}");
}

#[test]
fn channels_are_restricted_by_user() {
    let file = |channels: &str| format!("user app on nopass ~* +@all {channels}\n");
    let users = UsersFile::new(&file("&news* &p?"));
    let Some(site) = Site::router_only(2, &options(&users.path, Some("master"))) else { return };
    let login = || {
        let mut client = site.client();
        assert_eq!(client.cmd("AUTH app x"), ok());
        client
    };
    let mut client = login();
    let denied = Some("NOPERM this user has no permissions to access one of the channels used as arguments");
    for line in ["SUBSCRIBE news1 other", "PSUBSCRIBE n*", "SSUBSCRIBE other", "PUBLISH other x", "SPUBLISH other x"] {
        assert_eq!(client.cmd(line).error(), denied, "{line}");
    }
    let mut listening = login();
    assert!(matches!(listening.cmd("SUBSCRIBE news1"), Value::Array(_)));
    assert!(matches!(listening.cmd("PSUBSCRIBE news*"), Value::Array(_)));
    assert_eq!(client.cmd("PUBLISH news1 hello").error(), None);
    assert_eq!(listening.reply(), Value::Array(vec![bulk("message"), bulk("news1"), bulk("hello")]));
    assert_eq!(listening.reply(), Value::Array(vec![bulk("pmessage"), bulk("news*"), bulk("news1"), bulk("hello")]));
    // A subscriber with fewer permissions is closed: nothing else ends its subscriptions.
    users.write(&file("&p?"));
    reload(&site);
    assert!(listening.closed_within(TIMEOUT));
}

/// ACL over RESP: changes apply on every worker before the OK. SAVE writes the file, LOAD reads it.
#[test]
fn users_can_be_changed_over_resp() {
    let text = "# kept\nuser admin on nopass ~* &* +@all\nuser op on nopass ~* &* +@all operator\n";
    let users = UsersFile::new(text);
    let mut wanted = options(&users.path, Some("master"));
    wanted.router.workers = 3;
    let Some(site) = Site::router_only(1, &wanted) else { return };
    let mut admin = site.client();
    assert_eq!(admin.cmd("AUTH admin x"), ok());
    // Clients that connect after the OK, on any worker, find the change.
    for round in 0..4 {
        assert_eq!(admin.cmd(&format!("ACL SETUSER app reset on >pw{round} ~a{round}:* +@read +set")), ok());
        for _ in 0..6 {
            let mut app = site.client();
            assert_eq!(app.cmd(&format!("AUTH app pw{round}")), ok());
            assert_eq!(app.cmd(&format!("SET a{round}:k v")), ok());
            assert!(app.cmd("SET other v").error().is_some_and(|e| e.starts_with("NOPERM")));
        }
        assert!(
            site.client().cmd(&format!("AUTH app pw{}", round + 1)).error().is_some_and(|e| e.starts_with("WRONGPASS"))
        );
    }
    // Later commands of a pipeline see the change.
    for line in [
        "ACL SETUSER app +del",
        "ACL DRYRUN app DEL a3:k",
        "ACL SETUSER app -del",
        "ACL DRYRUN app DEL a3:k",
        "ACL DELUSER app nobody",
        "ACL USERS",
    ] {
        admin.post(line);
    }
    assert_eq!((admin.reply(), admin.reply(), admin.reply()), (ok(), ok(), ok()));
    assert_eq!(admin.reply(), bulk("This user has no permissions to run the 'del' command"));
    assert_eq!(admin.reply(), int(1));
    assert_eq!(admin.reply(), Value::Array(["admin", "default", "op"].map(bulk).to_vec()));

    // A user without operator permissions cannot become one, neither directly nor by changing an operator's password.
    for line in [
        "ACL SETUSER admin operator",
        "ACL SETUSER new on nopass +@all operator",
        "ACL SETUSER op >mine",
        "ACL DELUSER op",
    ] {
        let text = admin.cmd(line).expect_error().to_owned();
        assert!(text.starts_with("NOPERM") && text.contains("operator"), "{line}: {text}");
    }
    assert!(admin.cmd("ACL SETUSER default on nopass").expect_error().contains("configuration"));
    let mut op = site.client();
    assert_eq!(op.cmd("AUTH op x"), ok());
    assert_eq!(op.cmd("ACL SETUSER second on nopass +@all operator"), ok());
    assert_eq!(op.cmd("ACL DELUSER second"), int(1));

    // All rules or none.
    assert_eq!(admin.cmd("ACL SETUSER app on >s3cret ~a:* +@all"), ok());
    for (line, why) in [
        (
            "ACL SETUSER app off +nothing",
            "ERR Error in ACL SETUSER modifier '+nothing': Unknown command or category name in ACL",
        ),
        ("ACL SETUSER app off #2b", "ERR Error in ACL SETUSER modifier '#...': SHA-256"),
        ("ACL SETUSER app off (+get)", "ERR Error in ACL SETUSER modifier '(+get)': selectors"),
        ("ACL DELUSER default", "ERR The 'default' user cannot be removed"),
    ] {
        assert!(admin.cmd(line).expect_error().starts_with(why), "{line}");
    }
    assert_eq!(site.client().cmd("AUTH app s3cret"), ok());
    // A deleted user's clients are closed.
    assert_eq!(admin.cmd("ACL SETUSER gone on nopass +@all"), ok());
    let mut gone = site.client();
    assert_eq!(gone.cmd("AUTH gone x"), ok());
    assert_eq!(admin.cmd("ACL DELUSER gone"), int(1));
    assert!(gone.closed_within(TIMEOUT));
    assert_eq!(admin.cmd("ACL SETUSER own on nopass +@all"), ok());
    let mut own = site.client();
    assert_eq!((own.cmd("AUTH own x"), own.cmd("ACL DELUSER own")), (ok(), int(1)), "the client gets the reply");
    assert!(own.closed_within(TIMEOUT));

    // A reload with an unchanged file keeps the changes. SAVE writes them.
    reload(&site);
    assert_eq!(site.client().cmd("AUTH app s3cret"), ok());
    assert_eq!(admin.cmd("ACL SAVE"), ok());
    let saved = std::fs::read_to_string(&users.path).expect("the file");
    assert!(
        saved.starts_with(text) && saved.contains("\nuser app on $argon2id$") && !saved.contains("s3cret"),
        "{saved}"
    );
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&users.path).expect("there").permissions().mode() & 0o777, 0o600);
    assert_eq!(admin.cmd("ACL SETUSER app off"), ok());
    reload(&site);
    assert!(site.client().cmd("AUTH app s3cret").error().is_some(), "unsaved changes are not lost by a reload");
    assert_eq!(admin.cmd("ACL LOAD"), ok());
    assert_eq!(site.client().cmd("AUTH app s3cret"), ok());
    // Edits of the file in the meantime are neither lost nor partially applied.
    users.write(&format!("{saved}user by-hand on nopass +@all\n"));
    assert!(admin.cmd("ACL SAVE").expect_error().contains("was changed since"));
    assert_eq!(admin.cmd("ACL LOAD"), ok());
    assert_eq!(admin.cmd("ACL SAVE"), ok());
    users.write("user app on nopass +nothing\n");
    assert!(admin.cmd("ACL LOAD").expect_error().contains("no change to the previously active ACL rules"));
    assert!(admin.cmd("ACL SAVE").expect_error().contains("was changed since"), "also if the edit has a mistake");
    assert_eq!(site.client().cmd("AUTH app s3cret"), ok());
    assert!(!site.router().process().log().contains("s3cret"), "no password is logged");
}

/// Only an operator can undo the unsaved removal of an operator.
#[test]
fn only_operators_can_restore_operators() {
    let users = UsersFile::new(
        "user chief on nopass ~* +@all operator\nuser gone on nopass ~* +@all operator\nuser admin on nopass ~* +@all\n",
    );
    let Some(site) = Site::router_only(1, &options(&users.path, Some("master"))) else { return };
    let (mut chief, mut admin) = (site.client(), site.client());
    assert_eq!(chief.cmd("AUTH chief x"), ok());
    assert_eq!(admin.cmd("AUTH admin x"), ok());
    assert_eq!(admin.cmd("ACL LOAD"), ok());
    assert_eq!(chief.cmd("ACL DELUSER gone"), int(1));
    assert!(admin.cmd("ACL LOAD").expect_error().starts_with("NOPERM"));
    assert_eq!(site.client().cmd("AUTH gone x").error(), Some(WRONGPASS));
    assert_eq!(chief.cmd("ACL SAVE"), ok());
    assert_eq!(admin.cmd("ACL LOAD"), ok());
    assert_eq!(site.client().cmd("AUTH gone x").error(), Some(WRONGPASS));
    users.write("user chief on nopass ~* +@all operator\nuser admin on nopass ~* +@all operator\n");
    assert!(admin.cmd("ACL LOAD").expect_error().starts_with("NOPERM"));
    assert_eq!(chief.cmd("ACL LOAD"), ok());
}

/// Without a users file, users are kept in memory, as in Redis. Clients connect before all parts of the router run.
#[test]
fn users_can_be_changed_immediately_after_the_start() {
    let Some(mut site) = Site::router_only(1, &SiteOptions::default()) else { return };
    for _ in 0..3 {
        site.router_mut().process_mut().kill();
        let [listen, admin] =
            [(); 2].map(|()| std::net::SocketAddr::from(([127, 0, 0, 1], crate::support::ports::free())));
        let state = TempDir::new().expect("a directory");
        let _rival = site.router().start_beside(&RouterOptions::default(), listen, admin, state.path());
        let mut client = loop {
            if let Ok(client) = Client::try_connect(listen) {
                break client;
            }
            std::thread::yield_now();
        };
        assert_eq!(client.cmd("ACL SETUSER early on nopass ~* +@all"), ok());
    }
}

#[test]
fn without_a_file_users_are_kept_in_memory() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("ACL SETUSER app on >pw ~* +@all"), ok());
    assert_eq!(site.client().cmd("AUTH app pw"), ok());
    for line in ["ACL SAVE", "ACL LOAD"] {
        let text = client.cmd(line).expect_error().to_owned();
        assert!(text.starts_with("ERR This Redis instance is not configured to use an ACL file"), "{text}");
    }
    assert!(client.cmd("ACL SETUSER me on nopass +@all operator").expect_error().starts_with("NOPERM"));
    assert!(client.cmd("SWITCHYARD BALANCE").expect_error().starts_with("NOPERM"));
    assert_eq!(client.cmd("ACL DELUSER app"), int(1));
    let password = client.cmd("ACL GENPASS").text();
    assert!(
        password.len() == 64
            && password.bytes().all(|b| b.is_ascii_hexdigit())
            && password != client.cmd("ACL GENPASS").text()
    );
    assert_eq!(client.cmd("ACL GENPASS 5").text().len(), 2);
}

/// The structure of ACL's replies matches a real server.
#[test]
fn acl_replies_match_redis() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let site = Site::with(1, &SiteOptions::default());
    let (mut theirs, mut ours) = (node.client(), site.client());
    let words = "reset on >pw1 >pw2 ~cache:* %R~ro:* &news* +@set +@hash +get +mget -hset";
    for client in [&mut theirs, &mut ours] {
        assert_eq!(client.cmd(&format!("ACL SETUSER app {words}")), ok());
    }
    let newer = theirs.cmd("ACL GETUSER app").items().len() == 12;
    for protocol in ["HELLO 2", "HELLO 3"] {
        theirs.cmd(protocol);
        ours.cmd(protocol);
        let (a, b) = (theirs.cmd("ACL GETUSER app"), ours.cmd("ACL GETUSER app"));
        if newer {
            for field in ["keys", "channels"] {
                assert_eq!(a.field(field), b.field(field), "{field}");
            }
        }
        assert_eq!(a.field("passwords").items().len(), b.field("passwords").items().len());
        let rules =
            |value: &Value| value.field("commands").text().split(' ').map(str::to_owned).collect::<BTreeSet<_>>();
        assert_eq!(rules(&a), rules(&b));
        assert_eq!(ours.cmd("ACL GETUSER nobody"), theirs.cmd("ACL GETUSER nobody"));
    }
    for line in [
        "ACL DELUSER default",
        "ACL LOG x",
        "ACL GENPASS 0",
        "ACL GENPASS x",
        "ACL SETUSER app ~* ~a",
        "ACL SETUSER app allchannels &a",
    ] {
        assert_eq!(theirs.cmd(line), ours.cmd(line), "{line}");
    }
    for line in ["ACL SETUSER app +nothing", "ACL SETUSER app gibberish", "ACL SAVE"] {
        let (theirs, ours) = (theirs.cmd(line), ours.cmd(line));
        let front = |text: &str| text.chars().take(50).collect::<String>();
        assert_eq!(front(theirs.expect_error()), front(ours.expect_error()), "{line}");
    }
    // A rule that contains a password is not shown.
    assert!(theirs.cmd("ACL SETUSER app <no").expect_error().contains("modifier '<no'"));
    assert!(ours.cmd("ACL SETUSER app <no").expect_error().contains("modifier '<...'"));
    // Refused commands.
    let log = |client: &mut Client, address| {
        assert_eq!(client.cmd("ACL LOG RESET"), ok());
        let mut app = Client::connect(address);
        app.cmd("AUTH app wrong").expect_error();
        assert_eq!(app.cmd("AUTH app pw1"), ok());
        for line in ["GET other", "GET other", "HSET cache:1 f v", "MULTI", "HSET cache:1 f v", "DISCARD"] {
            app.cmd(line);
        }
        client.cmd("ACL LOG")
    };
    for protocol in ["HELLO 2", "HELLO 3"] {
        theirs.cmd(protocol);
        ours.cmd(protocol);
        let (theirs, ours) = (log(&mut theirs, node.address()), log(&mut ours, site.address()));
        assert_eq!(theirs.items().len(), ours.items().len(), "{theirs:?}\n{ours:?}");
        for (theirs, ours) in theirs.items().iter().zip(ours.items()) {
            for field in ["count", "reason", "context", "object", "username"] {
                assert_eq!(theirs.field(field), ours.field(field), "{field}: {theirs:?}\n{ours:?}");
            }
            if newer {
                assert_eq!(
                    std::mem::discriminant(&theirs.field("age-seconds")),
                    std::mem::discriminant(&ours.field("age-seconds"))
                );
            }
        }
    }
    assert_eq!(ours.cmd("ACL LOG 1").items().len(), 1);
    assert_eq!(ours.cmd("ACL LOG -1").items().len(), theirs.cmd("ACL LOG -1").items().len());
}

/// A client waits for a connection, and when it gets one, may no longer use it.
#[test]
fn a_connection_that_its_client_cannot_use_goes_to_the_next() {
    const LEN: usize = 1 << 20;
    let users = UsersFile::new("user op on nopass ~* &* +@all operator\nuser app on nopass ~* &* +@all\n");
    let mut wanted = options(&users.path, Some("master"));
    wanted.router.workers = 1;
    wanted.router.args.extend(["--set", "nodes.large-connections-max=1"].map(str::to_owned));
    let Some(site) = Site::router_only(1, &wanted) else { return };
    let user = |name: &str| {
        let mut client = site.client();
        assert_eq!(client.cmd(&format!("AUTH {name} x")), ok());
        client
    };
    let (mut op, mut first, mut second, mut third) = (user("op"), user("op"), user("app"), user("op"));
    let (head, half, end) = (format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${LEN}\r\n"), vec![b'x'; LEN / 2], b"\r\n");
    for client in [&mut first, &mut second] {
        client.write(head.as_bytes());
        client.write(&half);
        // One worker: it reads earlier bytes first.
        assert_eq!(op.cmd("PING"), simple("PONG"));
    }
    assert_eq!(op.cmd("ACL SETUSER app -set"), ok());
    first.write(&half);
    first.write(end);
    assert_eq!(first.reply(), ok());
    third.write(head.as_bytes());
    third.write(&half);
    third.write(&half);
    third.write(end);
    assert_eq!(third.reply(), ok());
    second.write(&half);
    second.write(end);
    assert!(second.reply().expect_error().starts_with("NOPERM"));
}
