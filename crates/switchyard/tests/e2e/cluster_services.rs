//! Managed clusters, which refuse commands: each is imitated by a gate in front of real members.
//!
//! The lists are those of the vendors' documentation. Error texts differ between versions of a service, so none here is
//! that of a server, and the router must rely on none.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::cluster_storage::Members;
use crate::support::process::tied;
use crate::support::value::{Framer, parse};
use crate::support::{Client, Router, RouterOptions, Value, bulk, direct, encode, int, ok, until};

/// Password of the user `app` at the members.
const PASSWORD: &str = "a-password-of-a-test";

/// A managed service.
struct Service {
    name: &'static str,
    /// Refused commands: `CONFIG` with all subcommands, or `CONFIG|SET`.
    refused: &'static [&'static str],
    /// Subcommands that are accepted although the command is in `refused`.
    accepted: &'static [&'static str],
    error: &'static str,
    /// Texts of doctor about the consequences.
    costs: &'static [&'static str],
}

const SCAN_COST: &str = "it refuses CLUSTER NODES, so SCAN is refused";

const CONFIG_COST: &str = "it refuses CONFIG GET, so connections are not bounded by the limit of members";

const SERVICES: [Service; 6] = [
    Service {
        name: "Amazon ElastiCache",
        refused: &[
            "BGREWRITEAOF",
            "BGSAVE",
            "CONFIG",
            "DEBUG",
            "MIGRATE",
            "REPLICAOF",
            "SAVE",
            "SHUTDOWN",
            "SLAVEOF",
            "SYNC",
        ],
        accepted: &[],
        error: "ERR unknown command",
        costs: &[CONFIG_COST],
    },
    Service {
        name: "Amazon MemoryDB",
        refused: &[
            "ACL|DELUSER",
            "ACL|LOAD",
            "ACL|SAVE",
            "ACL|SETUSER",
            "BGREWRITEAOF",
            "BGSAVE",
            "CLUSTER|ADDSLOTS",
            "CLUSTER|DELSLOTS",
            "CLUSTER|SETSLOT",
            "CONFIG",
            "DEBUG",
            "MIGRATE",
            "MODULE",
            "PSYNC",
            "REPLICAOF",
            "SAVE",
            "SHUTDOWN",
            "SLAVEOF",
            "SYNC",
        ],
        accepted: &[],
        error: "ERR unknown command",
        costs: &[CONFIG_COST],
    },
    // Refuses everything that its documentation does not list.
    Service {
        name: "Google Memorystore for Redis Cluster",
        refused: &[
            "ACL",
            "BGREWRITEAOF",
            "BGSAVE",
            "CLIENT|NO-EVICT",
            "CLIENT|NO-TOUCH",
            "CLIENT|PAUSE",
            "CLIENT|SETINFO",
            "CLIENT|UNBLOCK",
            "CLIENT|UNPAUSE",
            "CLUSTER",
            "COMMAND",
            "CONFIG",
            "DEBUG",
            "FAILOVER",
            "MIGRATE",
            "MODULE",
            "MONITOR",
            "PSYNC",
            "REPLICAOF",
            "SAVE",
            "SHUTDOWN",
            "SLAVEOF",
            "SYNC",
        ],
        accepted: &[
            "CLUSTER|INFO",
            "CLUSTER|LINKS",
            "CLUSTER|MYID",
            "CLUSTER|NODES",
            "CLUSTER|REPLICAS",
            "CLUSTER|SHARDS",
            "CLUSTER|SLOTS",
            "COMMAND|COUNT",
            "COMMAND|DOCS",
            "COMMAND|INFO",
            "COMMAND|LIST",
        ],
        error: "NOPERM this user has no permissions to run the command",
        costs: &[CONFIG_COST],
    },
    // Redis Software with its OSS Cluster API.
    Service {
        name: "Azure Managed Redis",
        refused: &[
            "ACL|DELUSER",
            "ACL|LOAD",
            "ACL|LOG",
            "ACL|SAVE",
            "ACL|SETUSER",
            "ASKING",
            "BGREWRITEAOF",
            "BGSAVE",
            "CLIENT|GETREDIR",
            "CLIENT|NO-EVICT",
            "CLIENT|PAUSE",
            "CLUSTER",
            "CONFIG|SET",
            "DEBUG",
            "MIGRATE",
            "MODULE",
            "PSYNC",
            "READONLY",
            "READWRITE",
            "REPLICAOF",
            "SAVE",
            "SHUTDOWN",
            "SLAVEOF",
            "SYNC",
        ],
        accepted: &["CLUSTER|HELP", "CLUSTER|INFO", "CLUSTER|KEYSLOT", "CLUSTER|NODES", "CLUSTER|SLOTS"],
        error: "ERR not allowed",
        costs: &[
            "it refuses CLUSTER MYID, so a server of another cluster at a reused address is not detected",
            "it refuses ASKING, so commands for keys of migrating slots fail",
            "it refuses READONLY, so no replica can be read",
        ],
    },
    // With shards, it refuses scripts as well.
    Service {
        name: "OCI Cache",
        refused: &[
            "ACL",
            "BGREWRITEAOF",
            "BGSAVE",
            "CLUSTER",
            "CONFIG|SET",
            "DEBUG",
            "EVAL",
            "EVALSHA",
            "EVALSHA_RO",
            "EVAL_RO",
            "FCALL",
            "FCALL_RO",
            "FUNCTION",
            "MIGRATE",
            "MODULE",
            "PSYNC",
            "REPLICAOF",
            "SAVE",
            "SCRIPT",
            "SHUTDOWN",
            "SYNC",
        ],
        accepted: &["CLUSTER|SLOTS"],
        error: "ERR unsupported command",
        costs: &[
            SCAN_COST,
            "it refuses CLUSTER MYID, so a server of another cluster at a reused address is not detected",
            "it refuses SCRIPT EXISTS, so scripts are not executed",
        ],
    },
    // Only AUTH, CLUSTER SLOTS, and commands of clients.
    Service {
        name: "a service with the least",
        refused: &[
            "ACL",
            "ASKING",
            "CLIENT",
            "CLUSTER",
            "COMMAND",
            "CONFIG",
            "DEBUG",
            "HELLO",
            "INFO",
            "LATENCY",
            "MEMORY",
            "MIGRATE",
            "MODULE",
            "MONITOR",
            "READONLY",
            "READWRITE",
            "RESET",
            "ROLE",
            "SELECT",
            "SLOWLOG",
            "WAIT",
            "WAITAOF",
        ],
        accepted: &["CLUSTER|SLOTS"],
        error: "ERR this command is not available in this plan",
        costs: &[
            SCAN_COST,
            CONFIG_COST,
            "it refuses CLUSTER MYID, so a server of another cluster at a reused address is not detected",
            "it refuses INFO server, so versions and restarts of members are not known",
            "it refuses CLIENT ID, so commands of broken connections cannot be ended",
            "it refuses COMMAND COUNT, so commands of modules are not known",
            "it refuses ASKING, so commands for keys of migrating slots fail",
            "it refuses READONLY, so no replica can be read",
        ],
    },
];

impl Service {
    fn refuses(&self, args: &[Value]) -> bool {
        let word = |at: usize| args.get(at).map(|arg| arg.text().to_ascii_uppercase()).unwrap_or_default();
        let (command, both) = (word(0), format!("{}|{}", word(0), word(1)));
        let lists = |list: &[&str], name: &str| list.contains(&name);
        (lists(self.refused, &command) || lists(self.refused, &both)) && !lists(self.accepted, &both)
    }

    fn refuses_scripts(&self) -> bool {
        self.refused.contains(&"EVAL")
    }
}

/// Start of the argument of ECHO that the member gets in place of a refused command, so that its reply keeps the order.
const MARK: &str = "refused by the gate: ";

/// Accepts connections for a member of a service. Returns the address.
fn gate(service: &'static Service, member: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for near in listener.incoming().flatten() {
            let Ok(far) = TcpStream::connect(member) else { continue };
            let clone = |stream: &TcpStream| stream.try_clone().expect("a second handle");
            let (from, to) = (clone(&near), clone(&far));
            let errors = Arc::new(Mutex::new(VecDeque::new()));
            let expected = Arc::clone(&errors);
            std::thread::spawn(move || pass_requests(service, from, to, &errors));
            std::thread::spawn(move || pass_replies(far, near, &expected));
        }
    });
    address
}

/// Calls `pass` with each complete command or reply that arrives.
fn each_message(mut from: TcpStream, mut pass: impl FnMut(&[u8]) -> std::io::Result<()>) {
    let (mut input, mut framer, mut buffer) = (Vec::new(), Framer::default(), vec![0; 64 << 10]);
    loop {
        while let Some(end) = framer.end(&input) {
            if pass(&input[..end]).is_err() {
                return;
            }
            input.drain(..end);
        }
        match from.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(count) => input.extend_from_slice(&buffer[..count]),
        }
    }
}

fn pass_requests(service: &Service, from: TcpStream, mut to: TcpStream, errors: &Mutex<VecDeque<String>>) {
    let (mut is_known, mut count) = (false, 0);
    let member = to.try_clone();
    each_message(from, |bytes| {
        let request = parse(bytes);
        let args = request.items();
        is_known = is_known || args.iter().any(|arg| arg.text().eq_ignore_ascii_case("AUTH"));
        let error = match (is_known, service.refuses(args)) {
            (_, true) => service.error,
            (false, false) => "NOAUTH Authentication required.",
            (true, false) => return to.write_all(bytes),
        };
        errors.lock().expect("errors").push_back(format!("-{error}\r\n"));
        count += 1;
        to.write_all(&encode(&["ECHO", &format!("{MARK}{count}")]))
    });
    let _ = member.map(|member| member.shutdown(Shutdown::Both));
}

fn pass_replies(from: TcpStream, mut to: TcpStream, errors: &Mutex<VecDeque<String>>) {
    let router = to.try_clone();
    each_message(from, |bytes| {
        let is_mark = bytes.len() < 64 && bytes.windows(MARK.len()).any(|part| part == MARK.as_bytes());
        match is_mark {
            true => to.write_all(errors.lock().expect("errors").pop_front().expect("an error").as_bytes()),
            false => to.write_all(bytes),
        }
    });
    let _ = router.map(|router| router.shutdown(Shutdown::Both));
}

/// Configuration of a router in front of the gates of a service.
fn config(service: &'static Service, members: &Members) -> String {
    let mappings: Vec<String> =
        members.addresses().into_iter().map(|member| format!("\"{member}={}\"", gate(service, member))).collect();
    // The first member is named by the address of its gate, as the endpoint of a service.
    let seed = mappings[0].split_once('=').expect("a mapping").1;
    format!(
        "[storage]\ncluster = [\"{seed}]\naddresses = [{}]\n[nodes]\nusername = \"app\"\npassword = \"{PASSWORD}\"\n",
        mappings.join(", ")
    )
}

/// Executes commands of every kind.
fn use_every_kind(service: &Service, router: &Router, members: &Members) {
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("MSET a 1 b 2 c 3"), ok());
    assert_eq!(client.cmd("MGET a b c d"), Value::Array(vec![bulk("1"), bulk("2"), bulk("3"), Value::Nil]));
    assert_eq!((client.cmd("INCR a"), client.cmd("DEL b c"), client.cmd("DBSIZE")), (int(2), int(2), int(1)));
    client.cmd("HSET h f v");
    assert_eq!(client.cmd("HGETALL h"), Value::Array(vec![bulk("f"), bulk("v")]));
    assert_eq!(client.cmd("MULTI"), ok());
    client.cmd("INCR a");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(3)]));
    assert_eq!((client.cmd("WATCH a"), client.cmd("MULTI")), (ok(), ok()));
    client.cmd("INCR a");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(4)]));
    let scripts =
        [client.cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 a"), client.cmd("SCRIPT LOAD \"return 1\"")];
    if service.refuses_scripts() {
        for reply in scripts {
            assert!(reply.error().is_some_and(|error| error.contains(service.error)), "{}: {reply:?}", service.name);
        }
    } else {
        assert_eq!(scripts[0], bulk("4"));
        let sha = scripts[1].text();
        for key in ["a", "b", "c"] {
            assert_eq!(client.cmd(&format!("EVALSHA {sha} 1 {key}")), int(1));
        }
    }
    let scan = client.cmd("SCAN 0 COUNT 100");
    match service.costs.contains(&SCAN_COST) {
        true => assert!(scan.error().is_some_and(|error| error.contains("needs CLUSTER NODES")), "{scan:?}"),
        false => assert!(scan.items()[1].items().contains(&bulk("h")), "{}: {scan:?}", service.name),
    }
    let mut blocked = Client::connect(router.address());
    blocked.post("BLPOP l 0");
    until("the client waits", || {
        members.nodes.iter().any(|n| n.cmd("INFO clients").text().contains("blocked_clients:1"))
    });
    assert_eq!(client.cmd("RPUSH l one"), int(1));
    assert_eq!(blocked.reply(), Value::Array(vec![bulk("l"), bulk("one")]));
    assert_eq!(client.cmd("BLPOP l 0.05"), Value::Nil);
    for (subscribe, publish) in [("SUBSCRIBE", "PUBLISH"), ("PSUBSCRIBE", "PUBLISH"), ("SSUBSCRIBE", "SPUBLISH")] {
        let mut subscriber = Client::connect(router.address());
        assert_eq!(subscriber.cmd(&format!("{subscribe} news")).items()[2], int(1), "{}", service.name);
        until("the message has a receiver", || client.cmd(&format!("{publish} news hello")).int() > 0);
        assert_eq!(subscriber.reply().items().last(), Some(&bulk("hello")));
    }
    let mut modern = Client::connect(router.address());
    assert_eq!(modern.cmd("HELLO 3").field("proto"), int(3));
    assert_eq!(modern.cmd("HGETALL h"), Value::Map(vec![(bulk("f"), bulk("v"))]));
    let large = "x".repeat(3 << 20);
    assert_eq!((client.call(&["SET", "large", &large]), client.cmd("GET large")), (ok(), bulk(&large)));
    // A slot moves: redirects have addresses of members, which are not those of the gates.
    client.cmd("SET moved here");
    members.reshard("moved");
    assert_eq!(client.cmd("GET moved"), bulk("here"));
    if service.refused.contains(&"ASKING") {
        return assert_eq!(client.cmd("FLUSHALL"), ok());
    }
    let from = members.owner("moved");
    let to = (from + 1) % members.nodes.len();
    members.open("moved", from, to);
    assert_eq!((client.cmd("SET {moved}new there"), client.cmd("GET {moved}new")), (ok(), bulk("there")));
    members.close("moved", from, to);
    assert_eq!(client.cmd("MGET moved {moved}new"), Value::Array(vec![bulk("here"), bulk("there")]));
    assert_eq!(client.cmd("FLUSHALL"), ok());
}

#[test]
fn each_managed_service_serves_commands_of_every_kind() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    for node in &members.nodes {
        let user = format!("ACL SETUSER app on >{PASSWORD} ~* &* +@all");
        assert_eq!(node.cmd(&user), ok());
    }
    for service in &SERVICES {
        let config = config(service, &members);
        let router = Router::start(&[], &RouterOptions { is_cluster: true, ..RouterOptions::config(&*config) });
        use_every_kind(service, &router, &members);
        let (status, page) = crate::support::http::get(router.admin(), "/readyz");
        assert_eq!(status, 200, "{}: {page}", service.name);

        let doctor = tied(env!("CARGO_BIN_EXE_switchyard"))
            .args(["doctor", "-c"])
            .arg(router.config_file())
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&doctor.stdout);
        assert_eq!(doctor.status.code(), Some(0), "{}: {text}", service.name);
        for cost in service.costs {
            assert_eq!(text.matches(cost).count(), 3, "{}: no {cost:?} for each member in {text}", service.name);
        }
        assert_eq!(text.matches("it refuses ").count(), 3 * service.costs.len(), "{}: {text}", service.name);
    }
}

#[test]
fn a_service_without_the_map_is_refused_with_the_reason() {
    static WITHOUT: Service = Service {
        name: "a service without a map",
        refused: &["CLUSTER"],
        accepted: &[],
        error: "ERR unsupported command",
        costs: &[],
    };
    if direct() {
        return;
    }
    let members = Members::start(1);
    assert_eq!(members.nodes[0].cmd(&format!("ACL SETUSER app on >{PASSWORD} ~* &* +@all")), ok());
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("switchyard.toml");
    for (config, expected) in [
        (config(&WITHOUT, &members), "refuses CLUSTER SLOTS: ERR unsupported command"),
        (config(&SERVICES[0], &members).replace(PASSWORD, "another"), "WRONGPASS"),
    ] {
        std::fs::write(&file, config).expect("written");
        let output = tied(env!("CARGO_BIN_EXE_switchyard"))
            .args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "-c"])
            .arg(&file)
            .env("RUNTIME_DIRECTORY", dir.path())
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{text}");
    }
}
