//! Tests `scripts/test.py` with a fake cargo: which runs pass, list flaky tests, or fail.
//!
//! Needed because all other tests run through this script: a bug that hides a failure would stay unnoticed.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

/// A run of nextest: its exit code, and its tests with whether each passes. `None`: it writes no report.
type Fake<'a> = (i32, Option<&'a [(&'a str, bool)]>);

/// Report of nextest in JUnit's format.
fn report(tests: &[(&str, bool)]) -> String {
    let cases = tests.iter().fold(String::new(), |mut cases, (name, passes)| {
        let result = if *passes { "<system-err>not tried here: x</system-err>" } else { "<failure/>" };
        let _ = write!(cases, "<testcase name='{name}' classname='a::b'>{result}</testcase>");
        cases
    });
    format!("<testsuites><testsuite name='a::b'>{cases}</testsuite></testsuites>")
}

/// Returns the exit code of the script, and its lines after the last run of nextest.
fn run(runs: &[Fake<'_>]) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let (at, cargo) = (dir.path().display(), dir.path().join("cargo"));
    let mut text = format!(
        "#!/bin/sh\n[ \"$1\" = metadata ] && {{ echo '{{\"target_directory\":\"{at}\",\"workspace_root\":\"{at}\"}}'; exit; }}\n\
         run=$(ls {at}/target/nextest | wc -l)\nmkdir -p {at}/target/nextest/run$run {at}/target/nextest/default\ncase $run in\n"
    );
    for (number, (code, tests)) in runs.iter().enumerate() {
        // The folder `default` counts from the second run on.
        let number = if number == 0 { 0 } else { number + 1 };
        let report = tests.map_or_else(String::new, |tests| {
            format!("cat >{at}/target/nextest/default/junit.xml <<'END'\n{}\nEND\n", report(tests))
        });
        let _ = writeln!(text, "{number}) {report}\nexit {code};;");
    }
    text.push_str("esac\nexit 99\n");
    fs::create_dir_all(dir.path().join("target/nextest")).expect("a folder");
    fs::write(&cargo, text).expect("written");
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o700)).expect("its mode");
    let ended = Command::new("python3")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/test.py"))
        .env("CARGO", cargo)
        .output()
        .expect("python3");
    let text = String::from_utf8_lossy(&ended.stdout).into_owned();
    (ended.status.code(), text.rsplit_once("\n\n").map_or(text.clone(), |(_, end)| end.to_owned()))
}

#[test]
fn a_test_that_passes_alone_is_listed_and_the_run_passes() {
    let first: Fake<'_> = (100, Some(&[("good", true), ("shaky", false)]));
    let again: Fake<'_> = (0, Some(&[("shaky", true)]));
    let (code, end) = run(&[first, again]);
    assert_eq!(code, Some(0), "{end}");
    for line in [
        "flaky (failed, then passed alone): a::b: shaky",
        "not tried: not tried here: x",
        "not tried: not tried here: the end-to-end tests with another valkey-server (not installed)",
        "2 passed, 0 failed, 3 skipped",
    ] {
        assert!(end.lines().any(|printed| printed == line), "{end}");
    }
}

#[test]
fn a_test_that_fails_three_times_fails_the_run() {
    let first: Fake<'_> = (100, Some(&[("good", true), ("bad", false)]));
    let again: Fake<'_> = (100, Some(&[("bad", false)]));
    let (code, end) = run(&[first, again, again]);
    assert!(code == Some(1) && end.contains("FAILED: a::b: bad\n1 passed, 1 failed"), "{code:?} {end}");
}

#[test]
fn more_than_two_flaky_tests_fail_the_run() {
    let first: Fake<'_> = (100, Some(&[("a", false), ("b", false), ("c", false)]));
    let again: Fake<'_> = (0, Some(&[("a", true), ("b", true), ("c", true)]));
    let (code, end) = run(&[first, again]);
    assert!(code == Some(1) && end.contains("FAILED: 3 flaky tests"), "{code:?} {end}");
}

#[test]
fn a_runner_that_ends_early_fails_the_run() {
    for early in [(101, None), (0, None), (134, Some(&[("good", true)][..])), (100, Some(&[("good", true)][..]))] {
        let (code, end) = run(&[early]);
        assert!(code == Some(1) && end.ends_with("0 passed, 1 failed\n"), "{code:?} {end}");
    }
}
