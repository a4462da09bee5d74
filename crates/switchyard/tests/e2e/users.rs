//! Users: logging in, what they may do, and what a changed users file means for those who are connected.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use argon2::password_hash::SaltString;
use argon2::{Algorithm, Argon2, Params, PasswordHasher, Version};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::client::PATIENCE;
use crate::support::{Client, Node, NodeOptions, Random, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple, until};

/// A hash that is cheap to check, unless told otherwise.
pub(crate) fn hash(password: &str, memory_kib: u32, passes: u32) -> String {
    let params = Params::new(memory_kib, passes, 1, None).expect("parameters");
    let salt = SaltString::encode_b64(b"not random here!").expect("a salt");
    Argon2::new(Algorithm::Argon2id, Version::V0x13, params).hash_password(password.as_bytes(), &salt).expect("hashes").to_string()
}

/// A users file that only we may read, for as long as this value lives.
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
    SiteOptions { router, ..SiteOptions::default() }
}

/// Whether nothing has been sent to the client yet.
fn is_quiet(client: &Client) -> bool {
    client.patience(Duration::from_millis(1));
    let quiet = client.stream().peek(&mut [0]).is_err();
    client.patience(PATIENCE);
    quiet
}

fn reload(site: &Site) {
    let count = || site.router().process().log().matches("reloaded").count();
    let before = count();
    site.router().process().signal(Signal::HUP);
    until("the reload is done", || (count() > before).then_some(()));
}

const WRONGPASS: &str = "WRONGPASS invalid username-password pair or user is disabled.";
const NOAUTH: &str = "NOAUTH Authentication required.";

#[test]
fn logging_in_as_redis_has_it() {
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

    // What is sent behind an AUTH waits for it, and is executed as that user.
    for line in ["AUTH alice s3cret", "SET app:1 v", "ACL WHOAMI", "GET other", "FLUSHALL", "PING"] {
        client.post(line);
    }
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), bulk("alice"));
    assert_eq!(client.reply().error(), Some("NOPERM this user has no permissions to access one of the keys used as arguments"));
    assert_eq!(client.reply().error(), Some("NOPERM this user has no permissions to run the 'flushall' command"));
    assert_eq!(client.reply(), simple("PONG"));
    // A login that fails changes nothing.
    assert_eq!(client.cmd("AUTH alice wrong").error(), Some(WRONGPASS));
    assert_eq!(client.cmd("ACL WHOAMI"), bulk("alice"));
    assert_eq!(
        client.cmd("MGET app:1 app:2 other").error(),
        Some("NOPERM this user has no permissions to access one of the keys used as arguments")
    );
    assert_eq!(client.cmd("CONFIG SET a b").error(), Some("NOPERM this user has no permissions to run the 'config|set' command"));
    assert_eq!(
        client.cmd("PUBLISH sports x").error(),
        Some("NOPERM this user has no permissions to access one of the channels used as arguments")
    );
    // Scripts have the router's rights at the nodes.
    let error = client.cmd("EVAL return(1) 1 app:1");
    assert!(error.error().is_some_and(|e| e.starts_with("NOPERM") && e.contains("allscripts")), "{error:?}");

    // HELLO, with both protocols, and RESET.
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

    // The default user has the password of [clients] and may do everything.
    let mut default = site.client();
    assert_eq!(default.cmd("AUTH master"), ok());
    assert_eq!(default.cmd("ACL WHOAMI"), bulk("default"));
    assert_eq!(default.cmd("ACL USERS"), Value::Array(["alice", "bob", "default", "guest"].iter().map(|u| bulk(*u)).collect()));
    let list = default.cmd("CLIENT LIST").text();
    assert!(list.contains(" user=alice ") && list.contains(" user=guest ") && list.contains(" user=default "), "{list}");
    assert!(default.cmd("CLIENT KILL USER nobody").error().is_some_and(|e| e.contains("No such user 'nobody'")));
    assert_eq!(default.cmd("CLIENT KILL USER alice"), int(1));
    assert!(client.closed_within(PATIENCE));
    let shown = default.cmd("ACL LIST");
    assert!(!format!("{shown:?}").contains("argon2"), "{shown:?}");
    assert!(default.cmd("ACL SETUSER eve on nopass ~* +@all").error().is_some_and(|e| e.contains("users file")));
}

#[test]
fn a_users_file_closes_the_door_to_those_without_a_name() {
    let users = UsersFile::new("user app on nopass ~* &* +@all\n");
    let mut wanted = options(&users.path, None);
    wanted.router.nodes_may_be_down = true;
    wanted.router.config = "[clients]\n".to_owned();
    let Some(site) = Site::router_only(1, &wanted) else { return };
    assert_eq!(site.client().cmd("GET k"), Value::Nil, "without a file everybody may");
    drop(site);
    // The harness waits for an answer to PING of whoever it is told to be.
    let config = format!("[clients]\nusers-file = {:?}\n", users.path);
    let node = Node::start(&NodeOptions::default());
    let router = crate::support::Router::start(
        &[node.address()],
        &RouterOptions { config, password: Some("x".to_owned()), user: Some("app".to_owned()), ..RouterOptions::default() },
    );
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("GET k").error(), Some(NOAUTH));
    assert_eq!(client.cmd("AUTH default").error(), Some(WRONGPASS));
    // Before a login: ten arguments, 16 KB each.
    client.write(b"*11\r\n");
    assert!(client.reply().error().is_some_and(|e| e.contains("unauthenticated multibulk length")));
    let mut client = Client::connect(router.address());
    client.write(b"*2\r\n$4\r\nAUTH\r\n$16385\r\n");
    assert!(client.reply().error().is_some_and(|e| e.contains("unauthenticated bulk length")));
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("AUTH app whatever"), ok());
    assert_eq!(client.cmd("SET k v"), ok());
}

/// Replies that a stranger does not read do not pile up: it is closed (CVE-2025-21605 was the opposite).
#[test]
fn strangers_who_do_not_read_cost_no_memory() {
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

/// Dangerous commands are refused to whoever has not logged in, and allowed to users whose line says so.
#[test]
fn the_default_user_may_be_kept_from_some_commands() {
    let users = UsersFile::new(&format!("user operator on {} ~* &* +@all\n", hash("s3cret", 64, 1)));
    let config = |rules: &str| format!("[clients]\nusers-file = {:?}\npassword = \"master\"\ndefault-user-rules = {rules}\n", users.path);
    let router = RouterOptions {
        config: config(r#"["-@dangerous", "+info", "-@scripting", "requests-per-second=100000"]"#),
        password: Some("master".into()),
        ..RouterOptions::default()
    };
    // The test's own look whether it serves needs no dangerous command.
    let Some(site) = Site::router_only(2, &SiteOptions { router, ..SiteOptions::default() }) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH master"), ok());
    assert_eq!(client.cmd("SET k v"), ok());
    for line in
        ["FLUSHALL", "KEYS *", "CONFIG GET maxmemory", "RESTORE k 0 x", "CLIENT LIST", "SORT k", "EVAL return(1) 0", "FUNCTION FLUSH"]
    {
        let name = line.to_ascii_lowercase();
        let reply = client.cmd(line);
        let error = reply.expect_error();
        assert!(error.starts_with("NOPERM") && error.contains(name.split(' ').next().expect("a word")), "{line}: {error}");
    }
    assert!(client.cmd("INFO server").text().contains("redis_version"));
    assert_eq!(client.cmd("GET k"), bulk("v"));
    let mut operator = site.client();
    assert_eq!(operator.cmd("AUTH operator s3cret"), ok());
    assert_eq!(operator.cmd("EVAL return(1) 0"), int(1));
    assert_eq!(operator.cmd("FLUSHALL"), ok());
    // A reload gives it back, also to those who are connected.
    std::fs::write(site.router().config_file(), config("[]")).expect("configuration");
    reload(&site);
    until("it may again", || (client.cmd("FLUSHALL") == ok()).then_some(()));
    // What makes no sense is refused, and changes nothing.
    std::fs::write(site.router().config_file(), config(r#"["-@nothing"]"#)).expect("configuration");
    site.router().process().signal(Signal::HUP);
    until("the mistake is told", || site.router().process().log().contains("default-user-rules").then_some(()));
    assert_eq!(client.cmd("FLUSHALL"), ok());
}

#[test]
fn a_changed_file_holds_for_those_who_are_connected() {
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
    until("the new rules hold", || (app.cmd("SET b1 v") == ok()).then_some(()));
    assert!(app.cmd("SET a1 v").error().is_some_and(|e| e.starts_with("NOPERM")));
    assert!(gone.closed_within(PATIENCE));
    assert_eq!(same.cmd("PING"), simple("PONG"));

    // A mistake changes nothing.
    users.write("user app on nopass +gett\n");
    site.router().process().signal(Signal::HUP);
    until("the mistake is told with its line", || {
        site.router().process().log().contains("users:1: user app: there is no command \"gett\"").then_some(())
    });
    assert_eq!(app.cmd("SET b1 v"), ok());

    users.write(&file("off nopass ~b* &* +@all", ""));
    reload(&site);
    assert!(app.closed_within(PATIENCE));
    // A new password: who is in stays in, as in Redis.
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
fn checking_a_password_holds_up_nobody_else() {
    // Hashes that take long even on a fast machine: a quarter of a second, and several. Nobody's password has the latter: it is a cheap one that claims
    // to be dear, so that not the test has to make it.
    let endless = hash("s3cret", 8, 1).replace("m=8,t=1", "m=65536,t=64");
    assert!(endless.contains("t=64"), "{endless}");
    let users = UsersFile::new(&format!(
        "user slow on {} ~* +@all\nuser endless on {endless} ~* +@all\nuser cheap on {} ~* +@all\n",
        hash("s3cret", 64 << 10, 6),
        hash("s3cret", 8, 1)
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
    // What was right once is known.
    for _ in 0..30 {
        assert_eq!(site.client().cmd("AUTH slow s3cret"), ok());
    }
    // Guessing ends.
    let refused = until("guesses are refused unseen", || {
        let reply = site.client().cmd("AUTH cheap guess");
        reply.error().filter(|e| e.starts_with("LIMITED")).map(str::to_owned)
    });
    assert!(refused.contains("too many failed logins"), "{refused}");
    assert!(site.client().cmd("AUTH cheap s3cret").error().is_some_and(|e| e.starts_with("LIMITED")), "also with the right one");
    // A worker that checked it itself would answer it before the PINGs that come after it.
    let mut endless = site.client();
    endless.post("AUTH endless s3cret");
    for _ in 0..10 {
        assert_eq!(other.cmd("PING"), simple("PONG"));
    }
    assert!(is_quiet(&endless), "the password was checked before the commands of another client were answered");
    // Clients that leave while their password is checked leave nothing.
    for _ in 0..10 {
        site.client().post("AUTH slow wrong");
    }
    assert_eq!(other.cmd("PING"), simple("PONG"));
}

#[test]
fn large_values_of_restricted_users() {
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
    // GET makes a reader of SET: allowed where the user may read and write.
    client.send(&["SET", "app:1", &value, "GET"]);
    assert_eq!(client.reply(), bulk(&value));
    client.send(&["GET", "app:1"]);
    assert_eq!(client.reply(), bulk(&value));
}

/// The same questions to a real server and to the router, about every command.
#[test]
fn every_command_is_judged_as_by_redis() {
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
    // Commands that run scripts are refused here to whoever is restricted, on purpose; what they say is checked elsewhere.
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
        // MIGRATE is refused to everybody, and its keys with it.
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
            // Where Redis cannot find the keys, it judges by those that it saw until then. We refuse the call as such.
            if ask(&mut server, &["COMMAND", "GETKEYS"]).error().is_some_and(|e| e.contains("Invalid arguments")) {
                continue;
            }
            let user = format!("u{}", random.below(rules.len()));
            let theirs = ask(&mut server, &["ACL", "DRYRUN", &user]);
            let ours = ask(&mut router, &["ACL", "DRYRUN", &user]);
            let said = |value: &Value| value.error().map_or_else(|| value.text(), str::to_owned);
            // A call that is malformed touches nothing; Redis judges it by what would be keys if it were not.
            let malformed = said(&ours) == "OK" && said(&theirs).ends_with(" key") && ask(&mut server, &[]).error().is_some();
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
fn channels_are_those_of_the_user() {
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
    // Whoever may listen to less is closed: nothing else ends what was subscribed.
    users.write(&file("&p?"));
    reload(&site);
    assert!(listening.closed_within(PATIENCE));
}
