//! Real client programs against the router: libraries in Python, Go and JavaScript (with programs in `tests-clients/`),
//! redis-cli, redis-benchmark.
//!
//! Their package tools download pinned versions into the target directory, where the next run reuses them. A missing
//! toolchain fails the test, unless `SWITCHYARD_SKIP_CLIENTS=1`: a silent skip would look like success.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::cluster_storage::Members;
use crate::support::certificates::Authority;
use crate::support::process::{on_path, tied};
use crate::support::{RouterOptions, Site, SiteOptions, direct, encode, int, ok, ports};
use crate::users::{UsersFile, hash};

pub(crate) fn programs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-clients").canonicalize().expect("tests-clients")
}

/// Whether the test of a client must run.
pub(crate) fn wanted(tools: &[(&str, &str)]) -> bool {
    let skip = std::env::var("SWITCHYARD_SKIP_CLIENTS").is_ok_and(|v| v == "1");
    for (tool, package) in tools {
        if !on_path(tool) {
            assert!(
                skip,
                "{tool} is not on PATH: install it (Debian: apt-get install {package}), or set SWITCHYARD_SKIP_CLIENTS=1 to leave out the tests of client libraries"
            );
            eprintln!("left out: {tool} is not there and SWITCHYARD_SKIP_CLIENTS=1");
            return false;
        }
    }
    if skip {
        eprintln!("left out: SWITCHYARD_SKIP_CLIENTS=1");
    }
    !skip
}

/// Runs a command within ten minutes (a first run downloads), and returns its output.
#[track_caller]
pub(crate) fn run(what: &str, command: &mut Command) -> String {
    let output = finish(what, command);
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{what} ended with {}:\n{text}", output.status);
    text
}

#[track_caller]
fn finish(what: &str, command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap_or_else(|e| panic!("cannot run {what}: {e}"));
    let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a pid");
    let (done, ended) = std::sync::mpsc::channel::<()>();
    let watch = std::thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(600)).is_err() {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    });
    let output = child.wait_with_output().unwrap_or_else(|e| panic!("cannot wait for {what}: {e}"));
    let _ = done.send(());
    watch.join().expect("the watch");
    output
}

/// Creates a folder once per `content` (a list of versions), and again when the content changes.
pub(crate) fn prepared(name: &str, content: &[u8], make: impl FnOnce(&Path)) -> PathBuf {
    // FNV-1a, only as a name of the content.
    let hash = content.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("clients");
    std::fs::create_dir_all(&root).expect("a folder for clients");
    let ready = root.join(format!("{name}-{hash:016x}"));
    if !ready.exists() {
        // Created under another name and renamed, so that an interrupted run does not look complete.
        let fresh = tempfile::TempDir::new_in(&root).expect("a folder");
        make(fresh.path());
        let fresh = fresh.keep();
        if std::fs::rename(&fresh, &ready).is_err() {
            // Another run was faster.
            assert!(ready.exists(), "cannot rename {} to {}", fresh.display(), ready.display());
            let _ = std::fs::remove_dir_all(fresh);
        }
    }
    ready
}

/// Folders of our Python programs and of their packages.
pub(crate) fn python() -> (PathBuf, PathBuf) {
    let source = programs().join("python");
    let packages = python_packages("python", &source);
    (source, packages)
}

/// Folder of the Python packages that `requirements.txt` in `source` lists.
pub(crate) fn python_packages(name: &str, source: &Path) -> PathBuf {
    let requirements = std::fs::read(source.join("requirements.txt")).expect("requirements.txt");
    // Only the packages rather than a virtual environment, whose scripts contain the folder's name.
    prepared(name, &requirements, |dir| {
        let venv = tempfile::TempDir::new().expect("a folder");
        run(
            "python3 -m venv (Debian: apt-get install python3-venv)",
            Command::new("python3").args(["-m", "venv"]).arg(venv.path()),
        );
        let mut pip = Command::new(venv.path().join("bin/pip"));
        run(
            "pip install",
            pip.args(["install", "--quiet", "--disable-pip-version-check", "--target"])
                .arg(dir)
                .arg("-r")
                .arg(source.join("requirements.txt")),
        );
    })
}

#[track_caller]
pub(crate) fn assert_checks_ok(what: &str, text: &str) {
    let checks: u64 = text
        .lines()
        .find_map(|line| line.strip_prefix("ok: ")?.split(' ').next()?.parse().ok())
        .unwrap_or_else(|| panic!("{what} does not say how much it has checked:\n{text}"));
    assert!(checks > 50, "{what} has checked only {checks} things:\n{text}");
    eprintln!("{}", text.trim());
}

#[test]
fn redis_py() {
    if !wanted(&[("python3", "python3 python3-venv")]) {
        return;
    }
    let (source, packages) = python();
    let site = Site::new(3);
    let mut check = tied("python3");
    check.arg("-B").arg(source.join("check.py")).arg(site.address().to_string()).env("PYTHONPATH", &packages);
    assert_checks_ok("redis-py", &run("redis-py", &mut check));
    if let Some(secured) = SecuredRouter::new() {
        let mut check = tied("python3");
        check
            .arg("-B")
            .arg(source.join("check.py"))
            .arg(&secured.address)
            .args(&secured.credentials)
            .env("PYTHONPATH", &packages);
        assert_checks_ok("redis-py over TLS", &run("redis-py over TLS", &mut check));
    }
    if let Some(site) = copying() {
        let mut check = tied("python3");
        check.arg("-B").arg(source.join("fresh.py")).arg(site.address().to_string()).env("PYTHONPATH", &packages);
        assert_checks_ok("redis-py before hot copies", &run("redis-py before hot copies", &mut check));
    }
    if let Some(site) = cluster() {
        let mut check = tied("python3");
        check.arg("-B").arg(source.join("cluster.py")).arg(site.address().to_string()).env("PYTHONPATH", packages);
        assert_checks_ok("redis-py's RedisCluster", &run("redis-py's RedisCluster", &mut check));
    }
}

/// A router with several workers that creates copies of all keys that are read.
fn copying() -> Option<Site> {
    Site::router_only(
        3,
        &SiteOptions::router(RouterOptions {
            workers: 4,
            ..RouterOptions::args(&["--set", "hot-copies.admission=all"])
        }),
    )
}

/// A router with TLS listeners. Each client has a certificate, a name and a password.
struct SecuredRouter {
    _authority: Authority,
    _users: UsersFile,
    _site: Site,
    address: String,
    /// Authority's certificate, client certificate and key, user and password.
    credentials: [OsString; 5],
}

impl SecuredRouter {
    fn new() -> Option<SecuredRouter> {
        let authority = Authority::new();
        let (server, client) =
            (authority.sign("server", &["localhost", "127.0.0.1"]), authority.sign("client", &["client"]));
        let hash = hash("s3cret", 64, 1);
        let users = UsersFile::new(&format!(
            "user app on {hash} ~* &* +@all\nuser reader on {hash} ~public:* &public:* +@read +@connection +@pubsub +@transaction +acl|whoami -@dangerous\n"
        ));
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
        // With the password of the default user, the harness checks at the plain listener whether the router is up.
        let config = format!(
            "[clients]\nusers-file = {:?}\npassword = \"master\"\n[tls]\ncert-file = {:?}\nkey-file = {:?}\nclient-auth = \"required\"\nclient-ca-file = {:?}\n[[listener]]\naddress = \"tls://{address}\"\n",
            users.path,
            server.certificate,
            server.key,
            authority.file()
        );
        let router = RouterOptions { config, password: Some("master".into()), ..RouterOptions::default() };
        let site = Site::router_only(3, &SiteOptions::router(router))?;
        let credentials =
            [authority.file().into(), client.certificate.into(), client.key.into(), "app".into(), "s3cret".into()];
        Some(SecuredRouter {
            _authority: authority,
            _users: users,
            _site: site,
            address: address.to_string(),
            credentials,
        })
    }
}

/// A router in cluster mode.
fn cluster() -> Option<Site> {
    Site::router_only(3, &SiteOptions::router(RouterOptions::args(&["--cluster"])))
}

/// Folder of our Go program, `client-check`.
fn go_program() -> PathBuf {
    let source = programs().join("go");
    let all: Vec<u8> = ["go.mod", "go.sum", "main.go", "cluster.go", "fresh.go", "secured.go"]
        .iter()
        .flat_map(|f| std::fs::read(source.join(f)).expect("a source"))
        .collect();
    prepared("go", &all, |dir| {
        let mut build = Command::new("go");
        build.args(["build", "-buildvcs=false", "-mod=readonly", "-o"]).arg(dir.join("client-check")).arg(".");
        run("go build", build.current_dir(&source));
    })
}

/// Path of a JavaScript program, next to its packages.
fn js_program(name: &str) -> PathBuf {
    let source = programs().join("js");
    let lock = std::fs::read(source.join("package-lock.json")).expect("package-lock.json");
    let installed = prepared("js", &lock, |dir| {
        for file in ["package.json", "package-lock.json", ".npmrc"] {
            std::fs::copy(source.join(file), dir.join(file)).expect("a copy");
        }
        run("npm ci", Command::new("npm").args(["ci", "--ignore-scripts"]).current_dir(dir));
    });
    // The program loads packages from its own folder. Renamed, because another test may read it.
    let fresh = tempfile::NamedTempFile::new_in(&installed).expect("a file");
    std::fs::copy(source.join(name), fresh.path()).expect("a copy");
    let program = installed.join(name);
    fresh.persist(&program).expect("renamed");
    program
}

/// Command that runs our Java program.
fn java_program() -> Command {
    let source = programs().join("java");
    let pom = std::fs::read(source.join("pom.xml")).expect("pom.xml");
    let jars = prepared("java", &pom, |dir| {
        let mut maven = Command::new("mvn");
        maven.args(["-q", "-B", "-f"]).arg(source.join("pom.xml"));
        maven.arg("org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies");
        run("mvn dependency:copy-dependencies", maven.arg(format!("-DoutputDirectory={}", dir.display())));
    });
    let mut command = tied("java");
    command.arg("-cp").arg(jars.join("*")).arg(source.join("Check.java"));
    command
}

/// The programs for one address, in front of members of a cluster.
#[test]
fn plain_clients_work_in_front_of_a_cluster() {
    let tools = [
        ("python3", "python3 python3-venv"),
        ("go", "golang-go"),
        ("node", "nodejs"),
        ("npm", "npm"),
        ("java", "default-jdk-headless"),
        ("mvn", "maven"),
    ];
    if direct() || !wanted(&tools) {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let (source, packages) = python();
    let mut of_python = tied("python3");
    of_python.arg("-B").arg(source.join("check.py")).env("PYTHONPATH", packages);
    let mut of_js = tied("node");
    of_js.arg(js_program("check.mjs"));
    for (name, mut check) in [
        ("redis-py", of_python),
        ("go-redis", tied(go_program().join("client-check"))),
        ("node-redis and ioredis", of_js),
        ("Jedis", java_program()),
    ] {
        check.arg(router.address().to_string()).env("SINGLE_DATABASE", "1");
        assert_checks_ok(name, &run(name, &mut check));
    }
}

#[test]
fn go_redis() {
    if !wanted(&[("go", "golang-go")]) {
        return;
    }
    let built = go_program();
    let site = Site::new(3);
    assert_checks_ok("go-redis", &run("go-redis", tied(built.join("client-check")).arg(site.address().to_string())));
    if let Some(secured) = SecuredRouter::new() {
        let mut check = tied(built.join("client-check"));
        check.arg(&secured.address).arg("secured").args(&secured.credentials);
        assert_checks_ok("go-redis over TLS", &run("go-redis over TLS", &mut check));
    }
    if let Some(site) = copying() {
        let mut check = tied(built.join("client-check"));
        assert_checks_ok(
            "go-redis before hot copies",
            &run("go-redis before hot copies", check.arg(site.address().to_string()).arg("fresh")),
        );
    }
    if let Some(site) = cluster() {
        let mut check = tied(built.join("client-check"));
        assert_checks_ok(
            "go-redis' ClusterClient",
            &run("go-redis' ClusterClient", check.arg(site.address().to_string()).arg("cluster")),
        );
    }
}

#[test]
fn node_redis_and_ioredis() {
    if !wanted(&[("node", "nodejs"), ("npm", "npm")]) {
        return;
    }
    let site = Site::new(3);
    let mut check = tied("node");
    assert_checks_ok(
        "node-redis and ioredis",
        &run("node", check.arg(js_program("check.mjs")).arg(site.address().to_string())),
    );
    if let Some(site) = cluster() {
        let mut check = tied("node");
        assert_checks_ok(
            "cluster clients of Node.js",
            &run("node", check.arg(js_program("cluster.mjs")).arg(site.address().to_string())),
        );
    }
}

#[test]
fn jedis() {
    if !wanted(&[("java", "default-jdk-headless"), ("mvn", "maven")]) {
        return;
    }
    let site = Site::new(3);
    let cluster = RouterOptions::config("[cluster]\nemulate = true\n");
    let cluster = Site::router_only(3, &SiteOptions { router: cluster, ..SiteOptions::default() });
    let mut check = java_program();
    check.arg(site.address().to_string());
    check.args(cluster.iter().map(|site| site.address().to_string()));
    assert_checks_ok("Jedis", &run("java", &mut check));
}

fn redis_tool(name: &str, address: SocketAddr) -> Command {
    let valkey = name.replace("redis", "valkey");
    let program = if on_path(name) || !on_path(&valkey) { name.to_owned() } else { valkey };
    let mut command = tied(program);
    command.args(["-h", &address.ip().to_string(), "-p", &address.port().to_string()]);
    command
}

#[test]
fn redis_cli() {
    let site = Site::new(3);
    let cli = |args: &[&str]| {
        let text = run("redis-cli", redis_tool("redis-cli", site.address()).args(args));
        text.trim_end().to_owned()
    };
    for protocol in ["-2", "-3"] {
        assert_eq!(cli(&[protocol, "FLUSHALL"]), "OK");
        assert_eq!(cli(&[protocol, "SET", "k", "v"]), "OK");
        assert_eq!(cli(&[protocol, "GET", "k"]), "v");
        assert_eq!(cli(&[protocol, "MSET", "a", "1", "b", "2", "c", "3"]), "OK");
        assert_eq!(cli(&[protocol, "MGET", "a", "b", "c"]), "1\n2\n3");
        assert_eq!(cli(&[protocol, "-n", "3", "DBSIZE"]), "0");
        assert!(cli(&[protocol, "INFO", "server"]).contains("redis_version"));
    }
    assert_eq!(cli(&["--eval", "/dev/null"]), "");
    // --scan, --bigkeys and --stat use SCAN and INFO.
    let mut client = site.client();
    let bytes: Vec<u8> = (0..1000).flat_map(|i| encode(&["SET", &format!("cli:{i}"), "x"])).collect();
    client.pipeline(&bytes, 1000);
    assert_eq!(cli(&["--scan", "--pattern", "cli:*"]).lines().count(), 1000);
    let big = cli(&["--bigkeys"]);
    assert!(big.contains("Sampled 1004 keys in the keyspace"), "{big}");
    // A repeated command in one connection, and mass insertion.
    assert_eq!(cli(&["-r", "5", "INCR", "n"]), "1\n2\n3\n4\n5");
    let dir = tempfile::TempDir::new().expect("a folder");
    let file = dir.path().join("commands");
    let mass: Vec<u8> = (0..20_000).flat_map(|i| encode(&["SET", &format!("pipe:{i}"), "y"])).collect();
    std::fs::write(&file, mass).expect("a file");
    let mut pipe = redis_tool("redis-cli", site.address());
    pipe.arg("--pipe");
    let mut shell = tied("sh");
    let line = format!("exec {} < {}", quoted(&pipe), file.display());
    let text = run("redis-cli --pipe", shell.args(["-c", &line]));
    assert!(text.contains("errors: 0, replies: 20000"), "{text}");
    assert_eq!(client.cmd("EXISTS pipe:0 pipe:19999"), int(2));
    assert_eq!(client.cmd("FLUSHALL"), ok());
}

/// `-c` follows redirections, but there are none, regardless of the key's node.
#[test]
fn redis_cli_in_cluster_mode() {
    let Some(site) = cluster() else { return };
    for protocol in ["-2", "-3"] {
        for i in 0..12 {
            let cli = |args: &[&str]| {
                run("redis-cli -c", redis_tool("redis-cli", site.address()).args(["-c", protocol]).args(args))
            };
            let (key, value) = (format!("key:{i}"), format!("{i}"));
            assert_eq!(cli(&["SET", &key, &value]), "OK\n");
            assert_eq!(cli(&["GET", &key]), format!("{value}\n"));
        }
        let nodes =
            run("redis-cli -c", redis_tool("redis-cli", site.address()).args(["-c", protocol, "CLUSTER", "NODES"]));
        assert!(nodes.contains("myself,master") && nodes.contains("0-16383"), "{nodes}");
    }
}

/// A command line for the shell. Only for our own words, which need no escaping.
fn quoted(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|w| format!("'{}'", w.to_string_lossy()))
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn redis_benchmark() {
    let site = Site::new(2);
    // All default tests (they use only supported commands), then the simple ones in pipelines, with threads and larger
    // values.
    let all = "PING_INLINE PING_MBULK SET GET INCR LPUSH RPUSH LPOP RPOP SADD HSET SPOP \
        ZADD ZPOPMIN LRANGE_100 LRANGE_300 LRANGE_500 LRANGE_600 MSET";
    let simple = "SET GET INCR LPUSH MSET";
    for (options, tests) in [
        ("-n 1000 -c 20", all),
        ("-t set,get,incr,lpush,mset -n 20000 -c 20 -P 16", simple),
        ("-t set,get,incr,lpush,mset -n 2000 -c 10 -d 3000 -r 1000 --threads 2", simple),
    ] {
        let text =
            run("redis-benchmark", redis_tool("redis-benchmark", site.address()).args(options.split(' ')).arg("-q"));
        for test in tests.split(' ') {
            let line = text
                .split(['\r', '\n'])
                .rfind(|line| line.starts_with(test) && line.contains("requests per second"))
                .unwrap_or_else(|| panic!("redis-benchmark {options} has no result for {test}:\n{text}"));
            assert!(!line.contains(": 0.00 requests"), "{line}");
        }
        assert!(
            !text.contains("ERR") && !text.contains("Error") && !text.contains("WARNING"),
            "redis-benchmark {options} complains:\n{text}"
        );
    }
    assert_eq!(site.client().cmd("FLUSHALL"), ok());
}
