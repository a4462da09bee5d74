//! HTTP/1.0 GET for the admin port: without chunks, so the body ends with the connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Returns status and body of `GET path`.
#[track_caller]
pub(crate) fn get(address: SocketAddr, path: &str) -> (u16, String) {
    try_get(address, path).unwrap_or_else(|e| panic!("GET http://{address}{path}: {e}"))
}

/// Returns status and body of `GET path`, or an error.
pub(crate) fn try_get(address: SocketAddr, path: &str) -> std::io::Result<(u16, String)> {
    try_get_as(address, path, "*/*")
}

/// Returns status and body of `GET path` with this `Accept` header.
#[track_caller]
pub(crate) fn get_as(address: SocketAddr, path: &str, accept: &str) -> (u16, String) {
    try_get_as(address, path, accept).unwrap_or_else(|e| panic!("GET http://{address}{path}: {e}"))
}

fn try_get_as(address: SocketAddr, path: &str, accept: &str) -> std::io::Result<(u16, String)> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|s| s.parse().ok())
        .ok_or_else(|| std::io::Error::other(format!("no HTTP answer: {head:?}")))?;
    Ok((status, body.to_owned()))
}
