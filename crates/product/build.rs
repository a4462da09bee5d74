//! Sets `SWITCHYARD_COMMIT` to the commit of the build, for `--version` and the metrics.
//!
//! An environment variable with this name takes precedence, for packagers who build without git. Otherwise git is
//! queried, but only if this is its working tree: an archive may have been unpacked inside another project's tree.

use std::path::Path;
use std::process::Command;

/// Files compiled into the binary, relative to the workspace root. Cargo already recompiles this crate when they
/// change.
const SOURCES: [&str; 9] = [
    "Cargo.toml",
    "Cargo.lock",
    "crates/resp/src",
    "crates/policy/src",
    "crates/router/src",
    "crates/control/src",
    "crates/bench/src",
    "crates/product/src",
    "crates/switchyard/src",
];

fn main() {
    println!("cargo::rerun-if-env-changed=SWITCHYARD_COMMIT");
    println!("cargo::rerun-if-changed=build.rs");
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var("SWITCHYARD_COMMIT").ok().filter(|commit| is_plain(commit));
    let commit = named.or_else(|| commit_of(&root)).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=SWITCHYARD_COMMIT={commit}");
}

/// Whether the text can be a metric label without escaping.
fn is_plain(commit: &str) -> bool {
    !commit.is_empty() && commit.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._+".contains(&byte))
}

fn commit_of(root: &Path) -> Option<String> {
    let top = git(root, &["rev-parse", "--show-toplevel"])?;
    if Path::new(&top).canonicalize().ok()? != root.canonicalize().ok()? {
        return None;
    }
    // The reflog of HEAD changes with each commit and checkout.
    let log = git(root, &["rev-parse", "--git-path", "logs/HEAD"])?;
    for path in SOURCES.into_iter().chain([log.as_str()]).map(|path| root.join(path)).filter(|path| path.exists()) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let commit = git(root, &["rev-parse", "--short=12", "HEAD"]).filter(|commit| is_plain(commit))?;
    let changes = git(root, &[&["status", "--porcelain", "--"][..], &SOURCES].concat())?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

fn git(root: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
