//! Finds the measured product: the `switchyard` binary next to this one, or named by a flag.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use switchyard_bench::process::is_executable;

/// Returns the product's binary: `given`, or the one next to this program.
pub fn find(given: Option<&Path>) -> Result<PathBuf> {
    match given {
        Some(path) if is_executable(path) => std::path::absolute(path).with_context(|| path.display().to_string()),
        Some(path) => {
            bail!("--switchyard {}: not a program; name the router's binary, or omit the flag", path.display())
        }
        None => {
            let own = std::env::current_exe().context(
                "cannot find the folder of this program, and so the router; name the router with --switchyard",
            )?;
            beside(&own)
        }
    }
}

/// Fails unless the product's binary has the protocols and policies that are only for comparisons.
pub fn require_research(switchyard: &Path) -> Result<()> {
    let output = Command::new(switchyard).args(["move", "--help"]).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {}", switchyard.display()))?;
    if !String::from_utf8_lossy(&output.stdout).contains("--allow-key-loss") {
        bail!(
            "{} has no research modes: build it with `cargo build -p switchyard --features research`, with the same --profile or --release as this \
             program",
            switchyard.display()
        );
    }
    Ok(())
}

/// Returns the product's binary in the folder of `program`. One build puts both there.
pub fn beside(program: &Path) -> Result<PathBuf> {
    let path = program.with_file_name("switchyard");
    if !is_executable(&path) {
        bail!(
            "the router to measure is missing: {}. Build it with `cargo build -p switchyard`, with the same --profile or --release as this program, \
             or name another with --switchyard",
            path.display()
        );
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_product_error_names_the_remedy() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = beside(&folder.path().join("switchyard-lab")).expect_err("the folder is empty").to_string();
        assert!(error.contains("cargo build -p switchyard") && error.contains("--switchyard"), "{error}");
        let error = find(Some(&folder.path().join("mine"))).expect_err("the folder is empty").to_string();
        assert!(error.contains("mine"), "{error}");
        // A folder is not a program.
        std::fs::create_dir(folder.path().join("switchyard")).expect("a folder");
        assert!(beside(&folder.path().join("switchyard-lab")).is_err());
    }

    #[test]
    fn product_is_found_by_folder_or_by_flag() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("switchyard");
        std::os::unix::fs::symlink("/bin/sh", &path).expect("a program");
        assert_eq!(beside(&folder.path().join("switchyard-lab")).expect("it is there"), path);
        assert_eq!(find(Some(&path)).expect("it is there"), path);
    }

    #[test]
    fn a_product_without_research_modes_is_refused_with_the_remedy() {
        let error = require_research(Path::new("/bin/true")).expect_err("it has no help").to_string();
        assert!(error.contains("/bin/true") && error.contains("--features research"), "{error}");
    }
}
