//! Unix socket listeners.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::client::TIMEOUT;
use crate::support::{RouterOptions, Site, SiteOptions, bulk, encode};

fn options(path: &Path) -> SiteOptions {
    let config = format!("[[listener]]\naddress = \"unix:{}\"\nmode = \"660\"\n", path.display());
    SiteOptions::router(RouterOptions { config, workers: 3, ..RouterOptions::default() })
}

fn expect_reply(stream: &mut UnixStream, args: &[&str], expected: &[u8]) {
    stream.write_all(&encode(args)).expect("sent");
    let mut reply = vec![0; expected.len()];
    stream.read_exact(&mut reply).expect("a reply");
    assert_eq!(String::from_utf8_lossy(&reply), String::from_utf8_lossy(expected));
}

fn connect(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("connects");
    stream.set_read_timeout(Some(TIMEOUT)).expect("timeout");
    stream
}

#[test]
fn clients_connect_through_a_unix_socket() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("switchyard.sock");
    let Some(mut site) = Site::router_only(2, &options(&path)) else { return };
    assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o660);
    let mut clients: Vec<UnixStream> = (0..30).map(|_| connect(&path)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        expect_reply(client, &["SET", &format!("k{number}"), "v"], b"+OK\r\n");
    }
    assert_eq!(site.client().cmd("GET k7"), bulk("v"));
    let list = site.client().cmd("CLIENT LIST").text();
    let own: Vec<&str> = list
        .lines()
        .filter(|line| line.contains(&format!("addr={}:0 laddr={}:0", path.display(), path.display())))
        .collect();
    assert_eq!(own.len(), 30, "{list}");
    assert!(own[0].contains(" flags=U "), "{}", own[0]);
    drop(clients);

    // A second router is refused while the first uses the path, and does not remove the file.
    let state = TempDir::new().expect("a directory");
    let any = |port| std::net::SocketAddr::from((std::net::Ipv4Addr::LOCALHOST, port));
    // Without this flag it would be refused because another router serves the nodes.
    let args = vec!["--allow-other-router".to_owned()];
    let rival = RouterOptions { args, ..options(&path).router };
    let mut rival = site.router().start_beside(
        &rival,
        any(crate::support::ports::free()),
        any(crate::support::ports::free()),
        state.path(),
    );
    assert_eq!(rival.wait(Duration::from_secs(20)).code(), Some(1));
    assert!(rival.log().contains("another process listens there"), "{}", rival.log());
    expect_reply(&mut connect(&path), &["PING"], b"+PONG\r\n");

    site.router_mut().process().signal(Signal::TERM);
    assert!(site.router_mut().process_mut().wait(Duration::from_secs(20)).success());
    assert!(!path.exists(), "the file goes with the router");
}

#[test]
fn the_socket_of_a_killed_router_is_replaced() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("s");
    let Some(mut site) = Site::router_only(1, &options(&path)) else { return };
    site.router_mut().process_mut().kill();
    assert!(path.exists());
    let Some(_second) = Site::router_only(1, &options(&path)) else { return };
    expect_reply(&mut connect(&path), &["ECHO", "again"], b"$5\r\nagain\r\n");
}
