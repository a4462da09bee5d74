//! Tests `scripts/test.py` with a fake cargo and fake tests: which runs pass, are flaky, or fail.
//!
//! Needed because all other tests run through this script: a bug that hides a failure would stay unnoticed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

fn script(path: &Path, text: &str) {
    fs::write(path, format!("#!/bin/sh\n{text}")).expect("written");
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).expect("its mode");
}

/// Exit code of the script, and the lines after the last test.
fn run(binary: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |name: &str| dir.path().join(name);
    script(&at("tests"), binary);
    let made = serde_json::json!({
        "manifest_path": at("Cargo.toml"), "executable": at("tests"), "target": { "name": "planted" }, "profile": { "test": true },
    });
    fs::write(at("made"), made.to_string()).expect("written");
    script(&at("cargo"), &format!("cat {}", at("made").display()));
    let ended = Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/test.py"))
        .env("CARGO", at("cargo"))
        .output()
        .expect("python3");
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    (
        ended.status.code(),
        text.rsplit_once("\n\n").map_or_else(String::new, |(_, end)| end.replace(dir_name(dir.path()), "x")),
    )
}

fn dir_name(path: &Path) -> &str {
    path.file_name().and_then(|name| name.to_str()).expect("a name")
}

/// A test binary with three tests. `shaky` passes on its second run, alone.
fn fake_tests(others: &str, failed: usize, code: usize) -> String {
    format!(
        "case $1 in\n\
         '') echo 'test good ... ok'; echo 'test shaky ... FAILED'; {others}\n\
         echo 'test result: FAILED. 1 passed; {failed} failed; 0 ignored; 0 measured'; exit {code};;\n\
         shaky) if [ -e once ]; then echo 'test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured'; exit 0; fi; touch once;;\n\
         esac\n\
         echo 'test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured'; exit 101\n"
    )
}

#[test]
fn a_test_that_passes_alone_is_flaky_and_the_run_passes() {
    let flaky = "flaky (failed, then passed alone): x/planted: shaky\n";
    assert_eq!(run(&fake_tests("", 1, 101)), (Some(0), format!("{flaky}2 passed, 0 failed\n")));
    let (code, end) = run(&fake_tests("echo 'test bad ... FAILED'", 2, 101));
    assert_eq!((code, end), (Some(1), format!("{flaky}FAILED: x/planted: bad\n2 passed, 1 failed\n")));
}

#[test]
fn a_binary_that_ends_early_fails_the_run() {
    for (failed, code) in [(1, 134), (2, 101)] {
        let (ended, end) = run(&fake_tests("", failed, code));
        assert!(
            ended == Some(1) && end.contains("did not come to its end") && end.ends_with("2 passed, 1 failed\n"),
            "{end}"
        );
    }
    let (ended, end) = run("echo 'test good ... ok'; kill -9 $$\n");
    assert!(ended == Some(1) && end.contains("FAILED: ") && end.ends_with("0 passed, 1 failed\n"), "{end}");
}
