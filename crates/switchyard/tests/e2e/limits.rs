//! Limits of users, listeners, prefixes and keys.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::client::TIMEOUT;
use crate::support::{Client, Router, Site, SiteOptions, Value, bulk, ok, ports, simple, until};

fn options(config: String) -> SiteOptions {
    SiteOptions::config(config)
}

fn is_limited(value: &Value) -> bool {
    value.error().is_some_and(|e| e.starts_with("LIMITED"))
}

fn metric(router: &Router, name: &str) -> f64 {
    let text = router.metrics();
    let line = text
        .lines()
        .find(|l| l.starts_with(&format!("switchyard_{name}_total")))
        .unwrap_or_else(|| panic!("no {name}"));
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

/// Sends commands until `enough` were admitted and one was refused. Returns the number of admitted commands, and the
/// duration in seconds.
fn admitted(client: &mut Client, line: &str, enough: f64) -> (f64, f64) {
    let begin = Instant::now();
    let (mut count, mut limited) = (0.0, false);
    while count < enough || !limited {
        assert!(begin.elapsed() < TIMEOUT, "{count} got through, limited: {limited}");
        let reply = client.cmd(line);
        if is_limited(&reply) {
            limited = true;
        } else {
            assert!(reply.error().is_none(), "{reply:?}");
            count += 1.0;
        }
    }
    (count, begin.elapsed().as_secs_f64())
}

/// Whether a new connection may stay. Otherwise it receives an error and is closed.
fn is_let_in(stream: &mut TcpStream) -> bool {
    let mut first = [0; 1];
    stream.set_read_timeout(Some(Duration::from_millis(50))).expect("timeout");
    let mut read = stream.read(&mut first);
    if read.as_ref().is_err_and(|e| matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)) {
        // Admitted, or not yet processed: an admitted client receives a reply.
        stream.set_read_timeout(Some(TIMEOUT)).expect("timeout");
        read = stream.write_all(b"PING\r\n").and_then(|()| stream.read(&mut first));
    }
    match read {
        Ok(1..) => first[0] == b'+',
        Ok(_) => false,
        Err(e) => {
            assert!(!matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "neither served nor closed");
            false
        }
    }
}

#[test]
fn users_have_limits() {
    let dir = TempDir::new().expect("a directory");
    let users = dir.path().join("users");
    let write = |rate: u32| {
        let text = format!(
            "user app on nopass ~* &* +@all requests-per-second={rate} connections=3\n\
             user bytes on nopass ~* &* +@all bytes-in-flight=1000000\nuser default on nopass ~* &* +@all\n"
        );
        std::fs::write(&users, text).expect("written");
        std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600)).expect("mode");
    };
    write(200);
    let Some(site) = Site::router_only(2, &options(format!("[clients]\nusers-file = {users:?}\n"))) else { return };
    let login = |name: &str| {
        let mut client = site.client();
        assert_eq!(client.cmd(&format!("AUTH {name} x")), ok());
        client
    };
    // Three connections, over both workers, share a rate.
    let mut clients = [login("app"), login("app"), login("app")];
    let mut fourth = site.client();
    let error = fourth.cmd("AUTH app x");
    assert!(is_limited(&error) && error.error().is_some_and(|e| e.contains("3 connections")), "{error:?}");
    assert_eq!(fourth.cmd("PING"), simple("PONG"), "it remains the same user");
    let begin = Instant::now();
    let total: f64 = std::thread::scope(|scope| {
        let threads: Vec<_> =
            clients.iter_mut().map(|c| scope.spawn(move || admitted(c, "SET k v", 150.0).0)).collect();
        threads.into_iter().map(|t| t.join().expect("no panic")).sum()
    });
    let most = 200.0 * (1.0 + begin.elapsed().as_secs_f64()) + 5.0;
    assert!(total <= most, "{total} got through, at most {most} may");
    assert!(metric(site.router(), "clients_limited") > 0.0);
    // Other users are not affected.
    for _ in 0..500 {
        assert_eq!(fourth.cmd("SET other v"), ok());
    }
    // A closed connection makes room for another.
    let [first, ..] = clients;
    drop(first);
    until("there is room again", || fourth.cmd("AUTH app x") == ok());
    // A transaction with a refused command is not executed.
    while !is_limited(&fourth.cmd("PING")) {}
    fourth.post("MULTI");
    let multi = fourth.reply();
    if multi == ok() {
        let queued: Vec<Value> = (0..300).map(|_| fourth.cmd("INCR n")).collect();
        assert!(queued.iter().any(is_limited));
        assert!(fourth.cmd("EXEC").error().is_some_and(|e| e.starts_with("EXECABORT")));
    } else {
        assert!(is_limited(&multi));
    }
    // A reload changes the rate for connected clients.
    write(1_000_000);
    site.router().process().signal(Signal::HUP);
    until("the new rate holds", || (0..300).all(|_| fourth.cmd("PING") == simple("PONG")));

    // Bytes: bytes of completed commands no longer count.
    let mut bytes = login("bytes");
    let value = "x".repeat(300_000);
    for _ in 0..20 {
        bytes.send(&["SET", "large", &value]);
        assert_eq!(bytes.reply(), ok());
    }
    for _ in 0..40 {
        bytes.post("GET large");
    }
    std::thread::sleep(Duration::from_millis(300));
    for _ in 0..40 {
        let reply = bytes.reply();
        assert!(is_limited(&reply) || reply == bulk(&value));
    }
    bytes.send(&["SET", "large", &"x".repeat(2_000_000)]);
    assert!(is_limited(&bytes.reply()), "more than fits at all");
    until("there is room again", || bytes.cmd("GET large") == bulk(&value));
}

#[test]
fn listeners_have_limits() {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let slow = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let config = format!(
        "[[listener]]\naddress = \"{address}\"\nconnections = 2\nrequests-per-second = 50\n\
         [[listener]]\naddress = \"{slow}\"\nconnections-per-second = 5\n"
    );
    let Some(site) = Site::router_only(1, &options(config)) else { return };
    let (mut first, mut second) = (Client::connect(address), Client::connect(address));
    assert_eq!(first.cmd("PING"), simple("PONG"));
    // A connected client is not yet accepted, and another worker may accept the third client before.
    assert_eq!(second.cmd("PING"), simple("PONG"));
    let mut third = Client::connect(address);
    assert!(is_limited(&third.reply()));
    assert!(third.closed_within(TIMEOUT));
    drop(second);
    until("there is room again", || {
        let mut client = Client::connect(address);
        client.post_quietly("PING");
        client
            .try_reply()
            .is_ok_and(|reply| reply == simple("PONG") || reply.error().is_some_and(|e| e.contains("requests")))
    });
    let (count, took) = admitted(&mut first, "PING", 80.0);
    assert!(count <= 50.0 * (1.0 + took) + 2.0, "{count} in {took} s");
    let mut other = site.client();
    for _ in 0..300 {
        assert_eq!(other.cmd("PING"), simple("PONG"), "another listener");
    }
    // Many connections at once: some are admitted, the others receive an error and are closed.
    let begin = Instant::now();
    let mut storm: Vec<TcpStream> = (0..60).map(|_| TcpStream::connect(slow).expect("connects")).collect();
    let refused = storm.iter_mut().map(is_let_in).filter(|is_in| !is_in).count() as f64;
    assert!(60.0 - refused <= 5.0 * (1.0 + begin.elapsed().as_secs_f64()) + 1.0, "only {refused} were refused");
    assert!(metric(site.router(), "clients_limited_connections") >= refused);
}

#[test]
fn prefixes_and_keys_have_limits() {
    let config = "[[limit]]\nprefix = \"tenant-a:\"\nrequests-per-second = 100\n[[limit]]\nprefix = \"hot:\"\nkey-requests-per-second = 20\n";
    let Some(site) = Site::router_only(2, &options(config.to_owned())) else { return };
    let mut client = site.client();
    let mut more = site.client();
    let (count, took) = admitted(&mut client, "SET tenant-a:1 v", 150.0);
    assert!(count <= 100.0 * (1.0 + took) + 2.0, "{count} in {took} s");
    // The limit applies to all keys of the prefix together, and to commands on several of them.
    assert!((0..50).any(|i| is_limited(&more.cmd(&format!("GET tenant-a:{i}")))));
    assert!((0..200).any(|i| is_limited(&more.cmd(&format!("MGET other tenant-a:{i}")))));
    for _ in 0..300 {
        assert_eq!(more.cmd("SET tenant-b:1 v"), ok());
    }
    // A limit for each key.
    for key in 0..30 {
        for _ in 0..15 {
            assert_eq!(client.cmd(&format!("SET hot:{key} v")), ok());
        }
    }
    let error = until("a hot key is limited", || Some(client.cmd("GET hot:1")).filter(is_limited));
    assert!(
        error.error().is_some_and(|e| e.contains("this key is at its limit of 20 requests per second")),
        "{error:?}"
    );
    assert_eq!(client.cmd("GET hot:never"), Value::Nil);
    // Removed by a reload.
    std::fs::write(site.router().config_file(), "").expect("written");
    site.router().process().signal(Signal::HUP);
    until("no limit holds any more", || (0..300).all(|_| client.cmd("GET hot:1") == bulk("v")));
}
