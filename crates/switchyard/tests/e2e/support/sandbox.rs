//! A container of this machine, booted by a real systemd, with the package installed: for tests that follow the
//! documentation literally.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use tempfile::TempDir;

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Path of a file in the repository.
pub(crate) fn file(name: &str) -> PathBuf {
    repository().join(name)
}

/// The .deb of the binary under test. `None` without `dpkg-deb`.
fn package() -> Option<&'static Path> {
    static MADE: OnceLock<(TempDir, Option<PathBuf>)> = OnceLock::new();
    let (_, deb) = MADE.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a folder");
        let made = Command::new(file("scripts/package.sh"))
            .arg(env!("CARGO_BIN_EXE_switchyard"))
            .arg(dir.path())
            .env("PACKAGE_LEVEL", "1")
            .output()
            .expect("the script runs");
        let (out, err) = (String::from_utf8_lossy(&made.stdout), String::from_utf8_lossy(&made.stderr));
        assert!(made.status.success(), "{out}{err}");
        assert!(out.lines().any(|line| line.ends_with(".tar.gz")), "{out}");
        (dir, out.lines().find(|line| line.ends_with(".deb")).map(PathBuf::from))
    });
    deb.as_deref()
}

/// Runs a script in the container as root, with the package next to it. If the machine does not support that, skips the
/// test with a message that bypasses the test runner, which hides the output of passing tests. In CI, a missing package
/// is a failure.
pub(crate) fn run(script: &Path) {
    let not_tried = |why: &str| {
        let mut out = std::io::stderr();
        let _ = writeln!(out, "not tried here: {}: {}", script.display(), why.trim());
    };
    let lacks = |why: &str| {
        assert!(std::env::var_os("CI").is_none(), "this machine could have a sandbox: {why}");
        not_tried(why);
    };
    let Some(deb) = package() else { return lacks("there is no dpkg-deb (package dpkg)") };
    let tried = Command::new(file("scripts/sandbox.sh")).arg(script).arg(deb).output().expect("the script runs");
    let (out, err) = (String::from_utf8_lossy(&tried.stdout), String::from_utf8_lossy(&tried.stderr));
    match tried.status.code() {
        Some(0) => assert!(out.ends_with("all right\n"), "{out}{err}"),
        Some(76) => lacks(&err),
        Some(77) => not_tried(&err),
        code => panic!("ended with {code:?}:\n{out}{err}"),
    }
}
