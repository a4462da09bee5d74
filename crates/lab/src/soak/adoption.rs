//! Adoptions of placement rules between moves: the rules are adopted, removed, and sometimes an adoption is abandoned.

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

use super::RECOVERY;
use crate::moves::admin;
use crate::site::Site;

/// Rules for the keys of clients and for the keys that no client changes: each key has its own tag, which is a part of
/// its name, so most keys change nodes. Keys of transactions have hash tags, and stay.
const RULES: &str = "[placement]\nadopt = \"ask\"\n[[placement.rule]]\nkeys = [\"h:{object}\", \"fixed:{n}\"]\n";

/// The orders of a cycle.
pub(super) struct Adoptions {
    has_rules: bool,
    move_args: Vec<String>,
}

impl Adoptions {
    /// Returns the orders for a router that has started without keys, so that its rules are in force.
    pub(super) fn new(move_args: Vec<String>) -> Self {
        Self { has_rules: true, move_args }
    }

    /// Arguments of `serve`.
    pub(super) fn serve_args(folder: &Path) -> Result<Vec<String>> {
        let file = folder.join("rules.toml");
        std::fs::write(&file, RULES).with_context(|| format!("cannot write {}", file.display()))?;
        Ok(vec!["--config".to_owned(), file.to_string_lossy().into_owned()])
    }

    /// Orders the adoption of the rules, or their removal.
    pub(super) fn begin(&mut self, switchyard: &Path, site: &Site) -> Result<()> {
        self.has_rules = !self.has_rules;
        let which: &[&str] = if self.has_rules { &["adopt"] } else { &["adopt", "--none"] };
        let args = which.iter().copied().chain(self.move_args.iter().map(String::as_str));
        // Our own closed connections to the nodes may still count as direct clients.
        let end = Instant::now() + Duration::from_secs(5);
        while let Err(refused) = order(switchyard, site, args.clone()) {
            ensure!(
                Instant::now() < end && format!("{refused:#}").contains("--allow-direct-clients"),
                refused.context("`switchyard rules adopt` failed")
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Abandons the adoption, unless it has ended.
    pub(super) fn abandon(&self, switchyard: &Path, site: &Site, has_fault: bool) -> Result<()> {
        match order(switchyard, site, ["abandon"].into_iter()) {
            Err(refused) if !has_fault && !format!("{refused:#}").contains("no adoption of rules is in progress") => {
                Err(refused)
            }
            // The router may be killed or stopped.
            _ => Ok(()),
        }
    }

    /// Waits for the end of the adoption.
    pub(super) fn wait(&mut self, site: &Site, stop: &AtomicBool) -> Result<()> {
        let end = Instant::now() + RECOVERY;
        loop {
            match admin::get(site.admin(), "/api/v1/rules") {
                Ok(report) if report["adoption"].is_null() => {
                    self.has_rules = report["rules"].as_array().is_some_and(|rules| !rules.is_empty());
                    return Ok(());
                }
                Ok(report) if Instant::now() > end => {
                    bail!("the adoption has not ended after {RECOVERY:?}: {report:#}")
                }
                Err(error) if Instant::now() > end => return Err(error),
                _ => {}
            }
            ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn order<'a>(switchyard: &Path, site: &Site, args: impl Iterator<Item = &'a str>) -> Result<()> {
    let output = Command::new(switchyard)
        .arg("rules")
        .args(args)
        .args(["--admin", &site.admin().to_string()])
        .output()
        .context("cannot run `switchyard rules`")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}
