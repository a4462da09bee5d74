//! TLS to clients, to nodes, and on the admin port, with certificates created by the test.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rustix::process::Signal;

use crate::cluster_moves::{all_there, fill, key_in};
use crate::cluster_storage::{Members, tls_port};
use crate::movectl::done;
use crate::support::certificates::{Authority, Pair, TlsClient};
use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, bulk, encode, int, ok, ports, simple, until,
};

/// Configures a TLS listener in addition to the plain one. Returns its address.
fn secured(pair: &Pair, tls: &str, rest: &str) -> (SiteOptions, SocketAddr) {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let config = format!(
        "{rest}\n[tls]\ncert-file = {:?}\nkey-file = {:?}\n{tls}\n[[listener]]\naddress = \"tls://{address}\"\n",
        pair.certificate, pair.key
    );
    (SiteOptions::config(config), address)
}

#[test]
fn plain_and_tls_listeners_work_side_by_side() {
    let authority = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let (options, address) = secured(&pair, "", "");
    let Some(site) = Site::router_only(2, &options) else { return };
    let config = authority.client_config(None);
    let mut secure = TlsClient::connect(address, &config).expect("shakes hands");
    let mut plain = site.client();
    assert_eq!(secure.cmd(&["SET", "k", "v"]).expect("a reply"), b"+OK");
    assert_eq!(plain.cmd("GET k"), bulk("v"));
    assert!(secure.cmd(&["HELLO", "3"]).expect("a reply").starts_with(b"%"));
    drop(secure);

    // A pipeline of commands for both nodes, in pieces that do not end with a TLS record.
    let mut secure = TlsClient::connect(address, &config).expect("shakes hands");
    let mut pipeline = Vec::new();
    for i in 0..3000 {
        pipeline.extend(encode(&["SET", &format!("k{i}"), &format!("v{i}")]));
        pipeline.extend(encode(&["GET", &format!("k{i}")]));
    }
    for piece in pipeline.chunks(777) {
        secure.write(piece).expect("sent");
    }
    for i in 0..3000 {
        assert_eq!(secure.reply().expect("a reply"), b"+OK");
        assert_eq!(secure.reply().expect("a reply"), format!("v{i}").as_bytes());
    }

    // QUIT is answered, and the connection ends with TLS's `close_notify`.
    assert_eq!(secure.cmd(&["QUIT"]).expect("a reply"), b"+OK");
    assert_eq!(secure.rest().expect("a proper end"), b"");
}

#[test]
fn large_values_and_slow_readers_work_over_tls() {
    let authority = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let (options, address) = secured(&pair, "", "");
    let Some(site) = Site::router_only(2, &options) else { return };
    let config = authority.client_config(None);
    let mut secure = TlsClient::connect(address, &config).expect("shakes hands");
    let value: Vec<u8> = (0..20 << 20).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    assert_eq!(secure.cmd(&[&b"SET"[..], b"large", &value]).expect("a reply"), b"+OK");
    assert!(secure.cmd(&["GET", "large"]).expect("a reply") == value, "the value comes back as it was sent");

    // Replies of 60 MB in total to a client that sends all requests before it reads: the router buffers only a part.
    let middle = &value[..600 << 10];
    assert_eq!(secure.cmd(&[&b"SET"[..], b"middle", middle]).expect("a reply"), b"+OK");
    for _ in 0..100 {
        secure.write(&encode(&["GET", "middle"])).expect("sent");
    }
    std::thread::sleep(Duration::from_millis(300));
    for i in 0..100 {
        assert!(secure.reply().expect("a reply") == middle, "reply {i}");
    }
    let memory = site.router().process().memory_kib("VmHWM");
    assert!(memory < 400 << 10, "the router took {memory} KiB");
    assert_eq!(secure.cmd(&["PING"]).expect("a reply"), b"+PONG");
}

#[test]
fn failing_handshakes_affect_no_other_client() {
    let authority = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let (options, address) = secured(&pair, "handshake-timeout = \"500ms\"", "");
    let Some(site) = Site::router_only(1, &options) else { return };

    let error = TlsClient::connect(address, &Authority::new().client_config(None))
        .err()
        .expect("another authority")
        .to_string();
    assert!(error.contains("UnknownIssuer"), "{error}");
    // Plain RESP, HTTP and random bytes on the TLS port are answered only by an alert.
    for bytes in [&b"PING\r\n"[..], b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", &[0x16, 3, 1, 0xff, 0xff, 0, 0], &[0; 300]] {
        let mut socket = TcpStream::connect(address).expect("connects");
        socket.set_read_timeout(Some(TIMEOUT)).expect("timeout");
        socket.write_all(bytes).expect("sent");
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        assert!(answer.is_empty() || answer[0] == 0x15, "{answer:?}");
    }
    // A client that sends nothing is closed.
    let mut silent = TcpStream::connect(address).expect("connects");
    silent.set_read_timeout(Some(TIMEOUT)).expect("timeout");
    let mut answer = Vec::new();
    silent.read_to_end(&mut answer).expect("closed, not timed out");
    assert!(answer.is_empty() || answer[0] == 0x15, "{answer:?}");

    let config = authority.client_config(None);
    let mut secure = TlsClient::connect(address, &config).expect("shakes hands");
    assert_eq!(secure.cmd(&["PING"]).expect("a reply"), b"+PONG");
    // The timeout does not apply to a connection that is slow after the handshake.
    std::thread::sleep(Duration::from_millis(900));
    assert_eq!(secure.cmd(&["PING"]).expect("a reply"), b"+PONG");
    let failed = until("failed handshakes are counted", || {
        let text = site.router().metrics();
        let line = text.lines().find(|l| l.starts_with("switchyard_clients_handshakes_failed_total"))?;
        line.rsplit(' ').next()?.parse::<f64>().ok().filter(|count| *count >= 5.0)
    });
    assert!(failed <= 7.0, "{failed}");
    let log = site.router().process().log();
    let told = log.lines().filter(|line| line.contains("TLS handshake failed")).count();
    assert!((1..=5).contains(&told), "at most one line per second and worker, not {told}:\n{log}");
    assert_eq!(site.client().cmd("PING"), simple("PONG"));
}

#[test]
fn clients_need_a_certificate_if_configured() {
    let authority = Authority::new();
    let people = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let ask = format!("client-auth = \"required\"\nclient-ca-file = {:?}", people.file());
    let (options, address) = secured(&pair, &ask, "");
    let Some(site) = Site::router_only(1, &options) else { return };

    let known = people.sign("alice", &["alice"]);
    let mut secure = TlsClient::connect(address, &authority.client_config(Some(&known))).expect("shakes hands");
    assert_eq!(secure.cmd(&["SET", "k", "v"]).expect("a reply"), b"+OK");
    for own in [None, Some(authority.sign("mallory", &["alice"]))] {
        // In TLS 1.3 the refusal arrives after the client's last handshake message.
        let outcome =
            TlsClient::connect(address, &authority.client_config(own.as_ref())).and_then(|mut c| c.cmd(&["GET", "k"]));
        assert!(outcome.is_err(), "{own:?}: {outcome:?}");
    }
    assert_eq!(site.client().cmd("GET k"), bulk("v"));
}

#[test]
fn new_certificates_take_effect_without_closing_connections() {
    let authority = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let (options, address) = secured(&pair, "", "");
    let Some(site) = Site::router_only(2, &options) else { return };
    let config = authority.client_config(None);
    let mut secure = TlsClient::connect(address, &config).expect("shakes hands");
    let before = secure.shown();

    let stop = Arc::new(AtomicBool::new(false));
    let (serving, served) = mpsc::channel();
    let traffic: Vec<_> = (0..3)
        .map(|number| {
            let (stop, serving, config) = (Arc::clone(&stop), serving.clone(), Arc::clone(&config));
            std::thread::spawn(move || {
                let mut client = TlsClient::connect(address, &config).expect("shakes hands");
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let (key, value) = (format!("{number}:{}", count % 50), format!("{count}"));
                    assert_eq!(client.cmd(&["SET", &key, &value]).expect("a reply"), b"+OK");
                    assert_eq!(client.cmd(&["GET", &key]).expect("a reply"), value.as_bytes());
                    count += 1;
                    if count == 1 {
                        serving.send(()).expect("the test waits");
                    }
                }
                count
            })
        })
        .collect();
    (0..3).for_each(|_| served.recv_timeout(TIMEOUT).expect("every client is served"));
    for round in 0..3 {
        let old = TlsClient::connect(address, &config).expect("shakes hands").shown();
        authority.sign("server", &["localhost"]);
        site.router().process().signal(Signal::HUP);
        until("the new certificate is shown", || {
            TlsClient::connect(address, &config).expect("shakes hands").shown() != old
        });
        assert_eq!(secure.cmd(&["PING"]).expect("a reply"), b"+PONG", "round {round}");
    }
    assert_ne!(TlsClient::connect(address, &config).expect("shakes hands").shown(), before);

    // Invalid files change nothing.
    std::fs::write(&pair.certificate, "not a certificate").expect("written");
    site.router().process().signal(Signal::HUP);
    until("the mistake is logged", || site.router().process().log().contains("server.pem"));
    assert_eq!(
        TlsClient::connect(address, &config).expect("the old one stays").cmd(&["PING"]).expect("a reply"),
        b"+PONG"
    );
    stop.store(true, Ordering::Relaxed);
    for thread in traffic {
        assert!(thread.join().expect("no client was dropped") > 0);
    }
}

/// Arguments of a node for a TLS port in addition to its plain port.
fn secure_args(port: u16, pair: &Pair, authority: &Authority, more: &[&str]) -> Vec<String> {
    let mut args: Vec<String> = ["--tls-port", &port.to_string()].map(str::to_owned).to_vec();
    let text = |path: &std::path::Path| path.display().to_string();
    args.extend(["--tls-cert-file".to_owned(), text(&pair.certificate), "--tls-key-file".to_owned(), text(&pair.key)]);
    args.extend(["--tls-ca-cert-file".to_owned(), text(&authority.file())]);
    args.extend(more.iter().map(|&arg| arg.to_owned()));
    args
}

/// Starts a node with a TLS port in addition to its plain port.
pub(crate) fn secure_node(pair: &Pair, authority: &Authority, more: &[&str]) -> (Node, SocketAddr) {
    let port = ports::free();
    let args = secure_args(port, pair, authority, more);
    let node = Node::start(&NodeOptions { args, ..NodeOptions::default() });
    (node, (Ipv4Addr::LOCALHOST, port).into())
}

/// Members of a cluster that use TLS for the router, for each other, and for the keys of a slot.
#[test]
fn slots_move_between_members_over_tls() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("member", &["127.0.0.1"]);
    let own = authority.sign("router", &["switchyard"]);
    let more = ["--tls-auth-clients", "yes", "--tls-cluster", "yes", "--tls-replication", "yes"];
    let members = Members::start_each(2, 0, 0, &|| secure_args(ports::free(), &pair, &authority, &more));
    let config = format!(
        "[nodes]\ntls = true\ntls-ca-file = {:?}\ntls-cert-file = {:?}\ntls-key-file = {:?}\n",
        authority.file(),
        own.certificate,
        own.key
    );
    let seed = (Ipv4Addr::LOCALHOST, tls_port(&members.nodes[0]).expect("a port")).into();
    let router = Router::start(&[seed], &RouterOptions { is_cluster: true, ..RouterOptions::config(config) });
    let mut client = Client::connect(router.address());
    fill(&mut client, 0, 200);
    for target in [1, 0] {
        done(&router, &format!("move --slots 0-1 --to {} --wait", members.ids[target]));
        assert_eq!(members.owner(key_in(0)), target);
        all_there(&mut client, 0, 200);
    }
}

#[test]
fn nodes_work_over_tls() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("node", &["127.0.0.1"]);
    let own = authority.sign("router", &["switchyard"]);
    // The first node requires a client certificate, the second does not, and the third is plain.
    let (first, first_at) = secure_node(&pair, &authority, &["--tls-auth-clients", "yes"]);
    let (second, second_at) = secure_node(&pair, &authority, &["--tls-auth-clients", "no"]);
    let third = Node::start(&NodeOptions::default());
    let config = format!(
        "[nodes]\ntls = true\ntls-ca-file = {:?}\ntls-cert-file = {:?}\ntls-key-file = {:?}\n\
         [[node]]\naddress = \"{first_at}\"\n[[node]]\naddress = \"{second_at}\"\n[[node]]\naddress = \"{}\"\ntls = false\n",
        authority.file(),
        own.certificate,
        own.key,
        third.address()
    );
    let options = RouterOptions::config(config);
    let router = Router::start(&[], &options);
    let mut client = Client::connect(router.address());
    for i in 0..300 {
        assert_eq!(client.cmd(&format!("SET key{i} value{i}")), ok());
    }
    for i in 0..300 {
        assert_eq!(client.cmd(&format!("GET key{i}")), bulk(format!("value{i}")));
    }
    for node in [&first, &second, &third] {
        assert!(node.cmd("DBSIZE").int() > 50);
    }
    // Large values in pieces through the router in both directions, between small ones.
    let value = "0123456789abcdef".repeat(300_000);
    for i in 0..6 {
        client.send(&["SET", &format!("large{i}"), &value]);
        assert_eq!(client.reply(), ok());
        client.send(&["GET", &format!("large{i}")]);
        assert_eq!(client.reply(), bulk(&value));
    }
    // A lost connection is reopened with TLS.
    assert!(first.cmd("CLIENT KILL TYPE normal").int() > 0);
    until("the node is back", || client.cmd("DBSIZE").error().is_none());
}

#[test]
fn untrusted_nodes_receive_nothing() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("node", &["redis.internal"]);
    let (node, address) = secure_node(&pair, &authority, &["--tls-auth-clients", "no", "--requirepass", "hunter2"]);
    let start = |tls: &str| {
        let config = format!("[nodes]\npassword = \"hunter2\"\n{tls}\n[[node]]\naddress = \"{address}\"\n");
        Router::start(&[], &RouterOptions { config, nodes_may_be_down: true, ..RouterOptions::default() })
    };
    let ca = |authority: &Authority| format!("tls = true\ntls-ca-file = {:?}", authority.file());

    // Another authority, and the right authority with another name.
    let other = Authority::new();
    for (tls, expected, advice) in [
        (ca(&other), "UnknownIssuer", "set nodes.tls-ca-file"),
        (ca(&authority), "not valid for name", "set tls-server-name"),
    ] {
        let router = start(&tls);
        let error = until("the error has the reason", || {
            let reply = Client::connect(router.address()).cmd("GET k");
            reply.error().map(str::to_owned).filter(|e| e.contains(expected))
        });
        assert!(error.starts_with("NODEDOWN") && error.contains("TLS"), "{error}");
        router.process().expect_log(&[advice]);
    }
    // With the configured name, or with every certificate accepted and a warning.
    for (tls, warned) in [
        (format!("{}\ntls-server-name = \"redis.internal\"", ca(&authority)), false),
        ("tls = true\ntls-insecure = true".to_owned(), true),
    ] {
        let router = start(&tls);
        let mut client = Client::connect(router.address());
        until("the node is up", || client.cmd("SET k v") == ok());
        assert_eq!(router.process().log().contains("NOT checked"), warned);
    }
    drop(node);
}

/// A primary and its replica, each with a certificate for one name only: the first for its IP address, the second for a
/// host name.
fn servers_with_own_names(authority: &Authority) -> [(Node, SocketAddr); 2] {
    let more = ["--tls-auth-clients", "no", "--tls-replication", "yes"];
    let named =
        |name: &str, more: &[&str]| secure_node(&authority.sign(&name.replace('.', "-"), &[name]), authority, more);
    let first = named("127.0.0.1", &more);
    let second = named("localhost", &[&more[..], &["--replica-announce-ip", "localhost"]].concat());
    assert_eq!(second.0.cmd(&format!("REPLICAOF 127.0.0.1 {}", first.1.port())), ok());
    until("the replica follows", || second.0.cmd("INFO replication").text().contains("master_link_status:up"));
    [first, second]
}

#[test]
fn servers_are_verified_by_their_own_names() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let [(first, first_at), (second, second_at)] = servers_with_own_names(&authority);
    let start = |name: &str| {
        let config = format!(
            "[nodes]\ntls = true\ntls-ca-file = {:?}\n[[node]]\naddress = \"{first_at}\"\nreplicas = [\"localhost:{}\"]\n{name}\n",
            authority.file(),
            second_at.port()
        );
        Router::start(&[], &RouterOptions { config, nodes_may_be_down: true, ..RouterOptions::default() })
    };
    // One name for both servers, which only one of them has: the override applies to every server.
    let router = start("tls-server-name = \"localhost\"");
    // At first the error may be that the handshake has not ended.
    until("the first is refused", || {
        let reply = Client::connect(router.address()).cmd("GET k");
        reply.error().is_some_and(|error| error.contains("not valid for name \"localhost\""))
    });
    drop(router);

    let router = start("");
    let mut client = Client::connect(router.address());
    until("the first is used", || client.cmd("SET k v") == ok());
    until("the replica has it", || second.cmd("GET k") == bulk("v"));
    // A replica is followed after its promotion only if the router has seen it follow this primary.
    until("the router has seen the replica", || {
        let listed = crate::movectl::json(&router, "nodes list");
        listed["nodes"][0]["replicas"].as_array().is_some_and(|replicas| !replicas.is_empty())
    });
    drop(first);
    assert_eq!(second.cmd("REPLICAOF NO ONE"), ok());
    until("the second is used", || Client::connect(router.address()).cmd("SET k w") == ok());
    assert_eq!(second.cmd("GET k"), bulk("w"));
}

#[test]
fn names_from_sentinels_are_verified_during_a_failover() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let [(first, first_at), (second, second_at)] = servers_with_own_names(&authority);
    let pair = authority.sign("sentinel", &["sentinel.internal"]);
    let (mut sentinel, _) =
        secure_node(&pair, &authority, &["--sentinel", "--tls-auth-clients", "no", "--tls-replication", "yes"]);
    for setting in ["resolve-hostnames", "announce-hostnames"] {
        assert_eq!(sentinel.cmd(&format!("SENTINEL CONFIG SET {setting} yes")), ok());
    }
    assert_eq!(sentinel.cmd(&format!("SENTINEL MONITOR mymaster 127.0.0.1 {} 1", first_at.port())), ok());
    until("the replica is known", || sentinel.cmd("SENTINEL MASTER mymaster").field("num-slaves") == bulk("1"));
    let config = format!(
        "[nodes]\ntls = true\ntls-ca-file = {:?}\n[[node]]\nsentinel-master = \"mymaster\"\nsentinels = [\"{}\"]\n",
        authority.file(),
        sentinel.address()
    );
    let mut router = Router::start(&[], &RouterOptions::config(config.clone()));
    let mut client = Client::connect(router.address());
    until("the first is used", || client.cmd("SET k v") == ok());
    assert_eq!(first.cmd("GET k"), bulk("v"));
    until("the Sentinel fails over", || sentinel.cmd("SENTINEL FAILOVER mymaster") == ok());
    until("the second is used", || {
        second.cmd("ROLE").items()[0] == bulk("master")
            && Client::connect(router.address()).cmd("SET k w") == ok()
            && second.cmd("GET k") == bulk("w")
    });
    // The announced name survives a reload, and a restart with and without the Sentinel.
    std::fs::write(router.config_file(), config.replace("[nodes]", "[nodes]\ncommand-timeout = \"4s\""))
        .expect("configuration");
    router.process().signal(Signal::HUP);
    router.process().expect_log(&["command-timeout", "reloaded: "]);
    assert!(second.cmd("CLIENT KILL TYPE normal").int() > 0);
    until("it is used again", || Client::connect(router.address()).cmd("SET k y") == ok());
    router.restart(&[]);
    until("it is used after a restart", || Client::connect(router.address()).cmd("GET k") == bulk("y"));
    sentinel.kill();
    router.restart(&[]);
    until("it is used without the Sentinel", || Client::connect(router.address()).cmd("GET k") == bulk("y"));
    assert!(
        !router
            .process()
            .log()
            .contains("cannot be reached; trying again with increasing pauses node=mymaster reason=\"TLS"),
        "{first_at} {second_at}"
    );
}

/// A certificate with a key type that rustls does not support.
const ED448: [&str; 2] = [
    "-----BEGIN CERTIFICATE-----\n\
     MIIBkzCCAROgAwIBAgIUH9ukxwI5zowfR6gibNWswQJO0eowBQYDK2VxMBAxDjAM\n\
     BgNVBAMMBWVkNDQ4MCAXDTI2MTEyNzIzMzIyNloYDzIxMjYxMTAzMjMzMjI2WjAQ\n\
     MQ4wDAYDVQQDDAVlZDQ0ODBDMAUGAytlcQM6AA4ncc5YrRROUbEHA8jAwi9oW5ly\n\
     GIlNFRDI+ZuYy+S26PAKaHWx5bbqmpCIkL8/7LVseXnppjLEAKNkMGIwHQYDVR0O\n\
     BBYEFH+Ns3+JraVG8nApoZnxF5sHNuiFMB8GA1UdIwQYMBaAFH+Ns3+JraVG8nAp\n\
     oZnxF5sHNuiFMA8GA1UdEwEB/wQFMAMBAf8wDwYDVR0RBAgwBocEfwAAATAFBgMr\n\
     ZXEDcwA35sa6IQxb6w0F10RGqf5RBOuPqw5IV5qVlezQ8er8M6W+J+vn1am0qTrM\n\
     O34vzBoMsO21QXVHBwC0T/2vtrMGih59zw3yrN6gTLChIYX4NG/VeO/GPo1maFVB\n\
     74FHr0DXL7GWh62mbP0/dGgMDm3bBAA=\n\
     -----END CERTIFICATE-----\n",
    "-----BEGIN PRIVATE KEY-----\n\
     MEcCAQAwBQYDK2VxBDsEOe/zSVuVX1D099kU+WZ/cbGoxgXKH2fui4itrQebg8Tn\n\
     1lmnUKAqhG7EPyGj+E/hxjqwVaWasJDdOg==\n\
     -----END PRIVATE KEY-----\n",
];

#[test]
fn nodes_without_a_common_cipher_or_key_type_are_explained() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("node", &["127.0.0.1"]);
    let other =
        Pair { certificate: pair.certificate.with_file_name("ed448.pem"), key: pair.key.with_file_name("ed448.key") };
    std::fs::write(&other.certificate, ED448[0]).and(std::fs::write(&other.key, ED448[1])).expect("written");
    let open = ["--tls-auth-clients", "no"];
    let old = [&open[..], &["--tls-protocols", "TLSv1.2", "--tls-ciphers", "ECDHE-ECDSA-AES128-SHA"]].concat();
    for (pair, more, named) in [
        (&pair, &old[..], "a cipher of AES-GCM or ChaCha20-Poly1305 (in TLS 1.2 with ECDHE)"),
        (&other, &open[..], "a key of RSA from 2048 bits, ECDSA with P-256, P-384 or P-521, or Ed25519"),
        (&pair, &["--tls-auth-clients", "yes"][..], "set nodes.tls-cert-file and nodes.tls-key-file"),
    ] {
        let (_node, address) = secure_node(pair, &authority, more);
        let config =
            format!("[nodes]\ntls = true\ntls-ca-file = {:?}\n[[node]]\naddress = \"{address}\"\n", authority.file());
        let router = Router::start(&[], &RouterOptions { config, nodes_may_be_down: true, ..RouterOptions::default() });
        router.process().expect_log(&["node cannot be reached", named]);
        let mut doctor = crate::support::process::tied(env!("CARGO_BIN_EXE_switchyard"));
        let output = doctor.args(["doctor", "-c"]).arg(router.config_file()).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(named), "{text}");
    }
}

#[test]
fn sentinels_work_over_tls() {
    if crate::support::direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("sentinel", &["localhost"]);
    let primary = Node::start(&NodeOptions::default());
    let (sentinel, at) = secure_node(&pair, &authority, &["--sentinel", "--tls-auth-clients", "no"]);
    assert_eq!(sentinel.cmd(&format!("SENTINEL MONITOR mymaster 127.0.0.1 {} 1", primary.address().port())), ok());
    let start = |authority: &Authority| {
        let config = format!(
            "[nodes]\nsentinel-tls = true\ntls-ca-file = {:?}\n[[node]]\nsentinel-master = \"mymaster\"\nsentinels = [\"localhost:{}\"]\n",
            authority.file(),
            at.port()
        );
        Router::start(&[], &RouterOptions { config, nodes_may_be_down: true, ..RouterOptions::default() })
    };
    let router = start(&authority);
    let mut client = Client::connect(router.address());
    until("the primary is found", || client.cmd("SET k v") == ok());
    assert_eq!(primary.cmd("GET k"), bulk("v"));
    let file = router.config_file();
    let mut doctor = crate::support::process::tied(env!("CARGO_BIN_EXE_switchyard"));
    let output = doctor.args(["doctor", "--workers", "2", "-c"]).arg(&file).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    // A certificate signed by an unknown authority is refused.
    let router = start(&Authority::new());
    until("it is refused", || router.process().log().contains("UnknownIssuer"));
    Client::connect(router.address()).cmd("SET k w").expect_error();
}

#[test]
fn the_admin_port_works_over_https() {
    let authority = Authority::new();
    let people = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let admin = format!("[admin]\ntls = true\ntls-client-ca-file = {:?}", people.file());
    let (options, _) = secured(&pair, "", &admin);
    let Some(site) = Site::router_only(1, &options) else { return };
    let ask = |own: Option<&Pair>| {
        let mut client = TlsClient::connect(site.router().admin(), &authority.client_config(own))?;
        client.write(b"GET /api/v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        client.rest().map(|answer| String::from_utf8_lossy(&answer).into_owned())
    };
    let known = people.sign("operator", &["operator"]);
    let answer = ask(Some(&known)).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"epoch\""), "{answer}");
    assert!(ask(None).is_err(), "without a certificate");
    assert!(ask(Some(&authority.sign("stranger", &["operator"]))).is_err());

    // The command line: trusted authorities, and client certificates.
    let port = site.router().admin().port();
    let (https, http) = (format!("https://localhost:{port}"), format!("localhost:{port}"));
    let status = |admin: &str, more: &[&std::ffi::OsStr]| {
        let mut command = crate::support::process::tied(env!("CARGO_BIN_EXE_switchyard"));
        let output = command.args(["status", "--admin", admin]).args(more).output().expect("it runs");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let ca = authority.file();
    let trust = ["--admin-ca-file".as_ref(), ca.as_os_str()];
    let show = [
        "--admin-cert-file".as_ref(),
        known.certificate.as_os_str(),
        "--admin-key-file".as_ref(),
        known.key.as_os_str(),
    ];
    let both = [&trust[..], &show[..]].concat();
    let (good, shown) = status(&https, &both);
    assert!(good && shown.contains("ready"), "{shown}");
    assert!(status(&http, &both).0, "an authority implies HTTPS");
    let (good, shown) = status(&https, &show);
    assert!(!good && shown.contains("--admin-ca-file"), "{shown}");
    let (good, shown) = status(&https, &trust);
    assert!(!good, "without a certificate of its own: {shown}");

    let old = TlsClient::connect(site.router().admin(), &authority.client_config(Some(&known)))
        .expect("shakes hands")
        .shown();
    authority.sign("server", &["localhost"]);
    site.router().process().signal(Signal::HUP);
    until("the new certificate is shown", || {
        let client =
            TlsClient::connect(site.router().admin(), &authority.client_config(Some(&known))).expect("shakes hands");
        client.shown() != old
    });
}

#[test]
fn a_client_that_disappears_mid_handshake_leaves_nothing() {
    let authority = Authority::new();
    let pair = authority.sign("server", &["localhost"]);
    let (options, address) = secured(&pair, "", "");
    let Some(site) = Site::router_only(2, &options) else { return };
    let config = authority.client_config(None);
    // Wait until the router's connections to nodes are open.
    assert_eq!(site.client().cmd("DBSIZE"), int(0));
    let files = site.router().process().open_files();
    for i in 0..40 {
        let mut client = TlsClient::connect(address, &config).expect("shakes hands");
        client.write(&encode(&["SET", &format!("k{i}"), "v"])).expect("sent");
        client.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000\r\nhalf").expect("sent");
        client.socket().shutdown(std::net::Shutdown::Both).expect("shut down");
    }
    // The clients reach both workers, and each opens connections to nodes when it needs them.
    until("their descriptors are closed", || site.router().process().open_files() <= files + 10);
    assert_eq!(site.client().cmd("PING"), simple("PONG"));
}
