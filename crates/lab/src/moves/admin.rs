//! Moves as operators make them: started by `switchyard move`, and followed through the admin port.
//!
//! The port is polled directly, because `switchyard move --wait` polls too rarely for moves of small data. A dozen
//! lines of HTTP suffice, because the report is one short document on its own connection.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::Value;

/// Time-out of a request to the admin port.
const TIMEOUT: Duration = Duration::from_secs(10);

/// State of a move.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MoveState {
    /// Waiting or in progress.
    Open,
    /// The target owns all slots.
    Done,
    /// Stopped early, with the reason.
    Stopped(String),
}

/// Arguments of a move.
#[derive(Debug, Clone)]
pub struct Order<'a> {
    /// Address of the source.
    pub from: SocketAddr,
    /// Address of the target.
    pub to: SocketAddr,
    /// Slots; `None` for all.
    pub slots: Option<&'a str>,
    /// Pattern of keys to move without their slots.
    pub keys: Option<&'a str>,
    /// Further arguments of `switchyard move`.
    pub more: &'a [String],
}

/// Begins a move and returns its id.
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
        serde_json::from_str(text.trim()).with_context(|| format!("`switchyard move --json` printed: {text}"))?;
    plan["moves"][0]["id"].as_u64().with_context(|| format!("`switchyard move --json` names no move: {text}"))
}

/// Returns the report of all moves.
pub fn report(admin: SocketAddr) -> Result<Value> {
    get(admin, "/api/v1/moves")
}

/// Returns the document at a path of the admin port.
pub(crate) fn get(admin: SocketAddr, path: &str) -> Result<Value> {
    let mut stream = TcpStream::connect_timeout(&admin, TIMEOUT)
        .with_context(|| format!("cannot connect to the admin port {admin}"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: {admin}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut text = Vec::new();
    stream.read_to_end(&mut text).with_context(|| format!("no response from the admin port {admin}"))?;
    let text = String::from_utf8_lossy(&text);
    let (head, body) = text
        .split_once("\r\n\r\n")
        .with_context(|| format!("the response of the admin port {admin} is not HTTP: {text}"))?;
    ensure!(head.starts_with("HTTP/1.1 200"), "the admin port {admin} responded: {}", text.trim());
    serde_json::from_str(body).with_context(|| format!("the admin port {admin} responded: {body}"))
}

/// Returns the state of a move from the report.
pub fn state_of(report: &Value, id: u64) -> Result<MoveState> {
    let Some(one) = find(report, id) else { bail!("the report lacks move {id}: {report}") };
    Ok(match one["state"].as_str() {
        Some("done") => MoveState::Done,
        Some("stopped") => MoveState::Stopped(one["activity"].as_str().unwrap_or_default().to_owned()),
        _ => MoveState::Open,
    })
}

/// Returns the number of keys that a move has moved in pieces.
pub fn moved_in_pieces(report: &Value, id: u64) -> u64 {
    find(report, id).and_then(|one| one["big_in_pieces"].as_u64()).unwrap_or(0)
}

/// Finds a move in the report, open or ended.
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
    fn move_states_are_parsed() {
        let report: Value = serde_json::from_str(
            r#"{"moves":[{"id":3,"state":"running"}],"ended":[{"id":1,"state":"done"},{"id":2,"state":"stopped","activity":"aborted"}]}"#,
        )
        .expect("JSON");
        assert_eq!(state_of(&report, 1).expect("known"), MoveState::Done);
        assert_eq!(state_of(&report, 2).expect("known"), MoveState::Stopped("aborted".to_owned()));
        assert_eq!(state_of(&report, 3).expect("known"), MoveState::Open);
        assert!(state_of(&report, 4).is_err());
    }
}
