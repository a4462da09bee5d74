//! What is installed: the .deb is made of the binary under test, installed, and run as a service by a real systemd.

use std::path::{Path, PathBuf};
use std::process::Command;

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name)
}

#[test]
fn the_package_installs_a_service_that_starts_reloads_and_stops() {
    let dir = tempfile::tempdir().expect("a folder");
    let made = Command::new(script("package.sh"))
        .arg(env!("CARGO_BIN_EXE_switchyard"))
        .arg(dir.path())
        .env("PACKAGE_LEVEL", "1")
        .output()
        .expect("the script runs");
    let (out, err) = (String::from_utf8_lossy(&made.stdout), String::from_utf8_lossy(&made.stderr));
    assert!(made.status.success(), "{out}{err}");
    assert!(out.lines().any(|line| line.ends_with(".tar.gz")), "{out}");
    let Some(deb) = out.lines().find(|line| line.ends_with(".deb")) else {
        eprintln!("no .deb is tried here: {err}");
        return;
    };
    let tried = Command::new(script("package-test.sh")).arg(deb).output().expect("the script runs");
    let (out, err) = (String::from_utf8_lossy(&tried.stdout), String::from_utf8_lossy(&tried.stderr));
    match tried.status.code() {
        Some(0) => assert!(out.ends_with("all right\n"), "{out}{err}"),
        // It needs root, and a kernel that lets it mount.
        Some(77) => eprintln!("the service is not tried here: {err}"),
        code => panic!("ended with {code:?}:\n{out}{err}"),
    }
}
