//! `switchyard upgrade`: replaces the process of a router in front of a cluster.

use std::time::Duration;

use clap::Args;
use switchyard_control::admin::UpgradeReport;
use switchyard_resp::units::plural;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};

/// Replace the running router by a new process, without interrupting a client
#[derive(Debug, Args)]
#[command(
    long_about = "Replace the process of a router in front of a cluster, after the installation of a new version, or for settings that need a restart. \
        The running process starts the program at its own path again, with its own arguments and environment. The new process reads the \
        configuration, connects to the members, and takes over the listening sockets. The old one serves its clients until they \
        leave, for at most storage.drain-max (10m), and ends.\n\n\
        If the new process fails, the old one serves as before. In front of standalone nodes this is refused, because one process owns \
        the nodes: restart the router.",
    after_long_help = "Examples:\n  \
        switchyard upgrade\n  \
        switchyard upgrade -c /etc/switchyard.toml       also as ExecReload= of a systemd unit, see docs/clusters.md\n  \
        switchyard upgrade --json | jq '.pid'\n\n\
        Exit codes: 0 the new process accepts the clients; 1 it failed, or was refused; 2 the configuration is wrong"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    client.print(&client.post("/api/v1/upgrade")?, render)
}

fn render(report: &UpgradeReport) -> String {
    let UpgradeReport { pid, version, old_pid, clients, drain_max_seconds } = report;
    format!(
        "process {pid} accepts the clients: version {version}\n\
         process {old_pid} serves {clients} {} until they leave, for at most {:?}\n",
        plural(*clients, "client"),
        Duration::from_secs(*drain_max_seconds)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_result_names_both_processes() {
        let report =
            UpgradeReport { pid: 20, version: "1 (a)".to_owned(), old_pid: 10, clients: 1, drain_max_seconds: 600 };
        assert_eq!(
            render(&report),
            "process 20 accepts the clients: version 1 (a)\nprocess 10 serves 1 client until they leave, for at most 600s\n"
        );
    }
}
