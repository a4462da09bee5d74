//! A server that joins and leaves: the router's autoscaler starts it, lets it join, fills it, drains it and stops it,
//! while processes are killed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use switchyard_bench::process;

use super::{NODES, RECOVERY};
use crate::moves::admin;
use crate::site::Site;

/// The visiting server. It outlives its router, and is killed on drop.
pub(super) struct Visitor {
    /// The directory of local servers.
    folder: PathBuf,
}

impl Visitor {
    /// Returns the visitor of a router with this folder.
    pub(super) fn new(folder: &Path) -> Self {
        Self { folder: folder.join("state-servers") }
    }

    /// Arguments of `serve`.
    pub(super) fn serve_args(folder: &Path) -> Result<Vec<String>> {
        let (server, port) = (process::find_redis_server()?, process::free_address()?.port());
        let words = format!(
            "{}|--bind|127.0.0.1|--port|{{port}}|--dir|{{dir}}|--save||--appendonly|yes|--appendfsync|always",
            server.display()
        );
        let words: Vec<String> = words.split('|').map(|word| format!("{word:?}")).collect();
        let text = format!("[autoscale.local]\ncommand = [{}]\nports = \"{port}-{port}\"\n", words.join(", "));
        let file = folder.join("visitor.toml");
        std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(vec!["--config".to_owned(), file.to_string_lossy().into_owned()])
    }

    /// Finds the process that writes into the server's directory.
    pub(super) fn process(&self) -> Option<u32> {
        let folder = std::fs::canonicalize(&self.folder).ok()?;
        let mut pids = std::fs::read_dir("/proc")
            .ok()?
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.find(|pid| std::fs::read_link(format!("/proc/{pid}/fd/1")).is_ok_and(|out| out.starts_with(&folder)))
    }

    /// Kills the server. The router restarts it.
    pub(super) fn kill(&self) {
        if let Some(pid) = self.process().and_then(|pid| Pid::from_raw(pid as i32)) {
            // It may have ended by itself.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Makes the server join or leave. Calls `disturb` after the order.
    pub(super) fn change(
        &self,
        switchyard: &Path,
        site: &mut Site,
        comes: bool,
        disturb: impl FnOnce(&mut Site) -> Result<()>,
        stop: &AtomicBool,
    ) -> Result<()> {
        let wanted = NODES + usize::from(comes);
        let order = |site: &Site| {
            let output = Command::new(switchyard)
                .args(["autoscale", "set-nodes", &wanted.to_string(), "--admin", &site.admin().to_string()])
                .output();
            output.context("cannot run `switchyard autoscale`").map(|output| output.status.success())
        };
        ensure!(order(site)?, "the order for {wanted} nodes was refused");
        disturb(site)?;
        let end = Instant::now() + RECOVERY;
        loop {
            ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            ensure!(
                Instant::now() < end,
                "there are not {wanted} nodes after {RECOVERY:?}: {:#}",
                admin::get(site.admin(), "/api/v1/autoscale")?
            );
            // A killed router may be starting.
            if let Ok(standing) = admin::get(site.admin(), "/api/v1/autoscale") {
                let rests = standing["change"].is_null();
                match (standing["nodes"].as_u64() == Some(wanted as u64), rests && standing["wanted"].is_null()) {
                    (true, true) => return Ok(()),
                    // The change was abandoned after a fault: order it again.
                    (false, true) if !order(site)? => bail!("the order for {wanted} nodes was refused: {standing:#}"),
                    _ => {}
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Visitor {
    fn drop(&mut self) {
        self.kill();
    }
}
