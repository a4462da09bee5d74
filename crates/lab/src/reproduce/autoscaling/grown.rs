//! A router whose autoscaler starts further servers on this machine, from one node on; and its state on the admin port.
//!
//! Such servers outlive their router. Here they must not outlive the experiment, so the kernel kills them when the
//! router's thread that started them ends (`setpriv`).

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use switchyard_bench::process;

use super::super::Bench;
use super::super::capped::Capped;
use super::router;
use crate::moves::admin;
use crate::moves::site::{Routed, Servers, info_number};

/// Number of ports for further servers.
const PORTS: u16 = 40;

/// A fleet that grows.
pub(super) struct GrowingFleet {
    pub(super) site: Routed,
    /// Servers with a limited share of a processor.
    capped: BTreeMap<SocketAddr, Capped>,
}

/// An event of the autoscaler.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Event {
    /// Milliseconds since 1970.
    pub(super) at: u64,
    pub(super) kind: String,
    pub(super) text: String,
}

/// The state of the autoscaler.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AutoscalerState {
    pub(super) nodes: usize,
    /// Started servers.
    pub(super) started: Vec<SocketAddr>,
    /// Step of the current change.
    pub(super) stage: Option<String>,
    /// Events, latest first.
    pub(super) events: Vec<Event>,
}

impl AutoscalerState {
    fn of(report: &Value) -> Result<Self> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let events = report["events"].as_array().into_iter().flatten();
        let started = report["started"].as_array().into_iter().flatten();
        Ok(Self {
            nodes: report["nodes"].as_u64().context("the autoscaler's report lacks the number of nodes")? as usize,
            started: started.filter_map(|address| address.as_str()?.parse().ok()).collect(),
            stage: report["change"]["stage"].as_str().map(str::to_owned),
            events: events
                .map(|event| Event {
                    at: event["at"].as_u64().unwrap_or(0),
                    kind: text(&event["kind"]),
                    text: text(&event["text"]),
                })
                .collect(),
        })
    }

    /// Returns the reason if a change was abandoned.
    pub(super) fn failure(&self) -> Option<&str> {
        self.events.iter().find(|event| event.kind == "failed").map(|event| event.text.as_str())
    }
}

impl GrowingFleet {
    /// Starts one node, and an autoscaler with these keys of `[autoscale]`. All servers have the arguments `server`.
    pub(super) fn start(bench: &Bench<'_>, keys: &[(&str, &str)], server: &[&str]) -> Result<Self> {
        let setpriv =
            process::find_program(&["setpriv"]).context("setpriv is not on PATH; it is a part of util-linux")?;
        let (setpriv, program) = (setpriv.to_string_lossy(), bench.programs.server.to_string_lossy());
        let first = [
            "--pdeathsig",
            "KILL",
            "--",
            &*program,
            "--bind",
            "127.0.0.1",
            "--port",
            "{port}",
            "--dir",
            "{dir}",
            "--save",
            "",
        ];
        let command: Vec<&str> = [&*setpriv].into_iter().chain(first).chain(server.iter().copied()).collect();
        let port = process::free_port()?.min(u16::MAX - PORTS);
        let ports = format!("{port}-{}", port + PORTS);
        let command = serde_json::to_string(&command)?;
        let all = [("mode", "on"), ("local.command", &*command), ("local.ports", &*ports)];
        let set = |(key, value): &(&str, &str)| ["--set".to_owned(), format!("autoscale.{key}={value}")];
        let sets: Vec<String> = all.iter().chain(keys).flat_map(set).collect();
        let site = Routed::start_servers(
            &bench.programs,
            &router(&sets),
            &Servers { count: 1, arguments: server, capacity: None },
            &bench.name(),
            bench.folder,
        )?;
        Ok(Self { site, capped: BTreeMap::new() })
    }

    /// Returns the current state.
    ///
    /// # Errors
    /// Fails if a change was abandoned.
    pub(super) fn standing(&self) -> Result<AutoscalerState> {
        let standing = AutoscalerState::of(&admin::get(self.site.admin, "/api/v1/autoscale")?)?;
        if let Some(why) = standing.failure() {
            anyhow::bail!("the autoscaler has failed: {why}");
        }
        Ok(standing)
    }

    /// Returns all servers: the first one and the started ones.
    pub(super) fn servers(&self, standing: &AutoscalerState) -> Vec<SocketAddr> {
        self.site.addresses.iter().chain(&standing.started).copied().collect()
    }

    /// Limits the processor time of servers without a limit. A server that does not reply yet is limited the next time.
    pub(super) fn cap(&mut self, standing: &AutoscalerState, cpu: f64) -> Result<()> {
        self.capped.retain(|address, _| self.site.addresses.contains(address) || standing.started.contains(address));
        for address in self.servers(standing) {
            if self.capped.contains_key(&address) {
                continue;
            }
            let Ok(process) = info_number(address, "server", "process_id:") else { continue };
            let process = u32::try_from(process)?;
            self.capped.insert(address, Capped::new(process, cpu)?);
        }
        ensure!(self.capped.contains_key(&self.site.addresses[0]), "the first server does not answer");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn autoscaler_report_is_parsed() {
        let report = serde_json::json!({
            "nodes": 2, "started": ["127.0.0.1:7101"], "change": {"stage": "127.0.0.1:7101 is joining"},
            "events": [{"at": 7, "kind": "decided", "text": "change 0: a node is added"}],
        });
        let standing = AutoscalerState::of(&report).expect("a report");
        assert_eq!(standing.stage.as_deref(), Some("127.0.0.1:7101 is joining"));
        assert_eq!((standing.nodes, standing.started.len(), standing.events[0].at), (2, 1, 7));
        assert_eq!(standing.failure(), None);
        let failed = serde_json::json!({"nodes": 1, "events": [{"at": 7, "kind": "failed", "text": "no port"}]});
        assert_eq!(AutoscalerState::of(&failed).expect("a report").failure(), Some("no port"));
        assert!(AutoscalerState::of(&serde_json::json!({})).is_err());
    }
}
