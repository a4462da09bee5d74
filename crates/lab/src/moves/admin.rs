//! Moves as an operator has them: begun by `switchyard move`, followed through the admin port.
//!
//! The port is asked by hand instead of by `switchyard move --wait`, which looks a few times per second: moves of small
//! data are over by then. A dozen lines of HTTP, because the report is one short document on a connection of its own.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// How long the admin port may take for an answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// How a move stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Waiting or under way.
    Open,
    /// The target owns all slots.
    Done,
    /// It ended before its end, and why.
    Stopped(String),
}

/// What is to be moved.
#[derive(Debug, Clone)]
pub struct Order<'a> {
    /// From where.
    pub from: SocketAddr,
    /// To where.
    pub to: SocketAddr,
    /// Which slots; `None`: all.
    pub slots: Option<&'a str>,
    /// Not slots, but the keys that match this pattern.
    pub keys: Option<&'a str>,
    /// Further arguments of `switchyard move`.
    pub more: &'a [String],
}

/// Begins a move and gives its number. It goes on by itself.
pub fn begin(switchyard: &Path, admin: SocketAddr, order: &Order<'_>) -> Result<u64> {
    let mut command = Command::new(switchyard);
    command.args([
        "move",
        "--from",
        &order.from.to_string(),
        "--to",
        &order.to.to_string(),
        "--admin",
        &admin.to_string(),
        "--json",
    ]);
    match (order.keys, order.slots) {
        (Some(keys), _) => command.args(["--keys", keys]),
        (None, Some(slots)) => command.args(["--slots", slots]),
        (None, None) => command.arg("--all"),
    };
    let output = command.args(order.more).stdin(Stdio::null()).output().context("cannot run `switchyard move`")?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "`switchyard move` failed ({}): {}",
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let plan: Value =
        serde_json::from_str(text.trim()).with_context(|| format!("`switchyard move --json` said: {text}"))?;
    plan["moves"][0]["id"].as_u64().with_context(|| format!("`switchyard move --json` names no move: {text}"))
}

/// The report about all moves.
pub fn report(admin: SocketAddr) -> Result<Value> {
    get(admin, "/api/v1/moves")
}

/// The admin port's answer at a path.
pub(crate) fn get(admin: SocketAddr, path: &str) -> Result<Value> {
    let mut stream = TcpStream::connect_timeout(&admin, PATIENCE)
        .with_context(|| format!("cannot connect to the admin port {admin}"))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).with_context(|| format!("no answer from the admin port {admin}"))?;
    let text = String::from_utf8_lossy(&text);
    let (head, body) =
        text.split_once("\r\n\r\n").with_context(|| format!("the admin port {admin} answered no HTTP: {text}"))?;
    ensure!(head.starts_with("HTTP/1.1 200"), "the admin port {admin} answered: {}", text.trim());
    serde_json::from_str(body).with_context(|| format!("the admin port {admin} answered: {body}"))
}

/// How a move stands, by the report.
pub fn standing(report: &Value, id: u64) -> Result<Standing> {
    let Some(one) = find(report, id) else { bail!("the report does not know move {id}: {report}") };
    Ok(match one["state"].as_str() {
        Some("done") => Standing::Done,
        Some("stopped") => Standing::Stopped(one["doing"].as_str().unwrap_or_default().to_owned()),
        _ => Standing::Open,
    })
}

/// How many keys a move has moved in pieces, by the report.
pub fn moved_in_pieces(report: &Value, id: u64) -> u64 {
    find(report, id).and_then(|one| one["big_in_pieces"].as_u64()).unwrap_or(0)
}

/// A move, open or ended, in the report.
pub(super) fn find(report: &Value, id: u64) -> Option<&Value> {
    ["moves", "ended"]
        .into_iter()
        .filter_map(|list| report[list].as_array())
        .flatten()
        .find(|m| m["id"].as_u64() == Some(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standings_are_read() {
        let report: Value = serde_json::from_str(
            r#"{"moves":[{"id":3,"state":"running"}],"ended":[{"id":1,"state":"done"},{"id":2,"state":"stopped","doing":"aborted"}]}"#,
        )
        .expect("JSON");
        assert_eq!(standing(&report, 1).expect("known"), Standing::Done);
        assert_eq!(standing(&report, 2).expect("known"), Standing::Stopped("aborted".to_owned()));
        assert_eq!(standing(&report, 3).expect("known"), Standing::Open);
        assert!(standing(&report, 4).is_err());
    }
}
