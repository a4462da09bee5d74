//! The validation of the simulator at toy size, with real servers. Its values mean nothing.

use std::path::Path;
use std::process::Command;

#[test]
fn validation_at_toy_size_compares_each_scenario() {
    let lab = Path::new(env!("CARGO_BIN_EXE_switchyard-lab"));
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("page.md");
    std::fs::write(&page, "<!-- fleet-validate:begin -->\n<!-- fleet-validate:end -->\n").expect("written");
    let output = Command::new(lab).args(["sim", "validate", "--smoke", "--out"]).arg(&page).output().expect("it runs");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{log}");
    let text = std::fs::read_to_string(&page).expect("a page");
    for part in ["requests served per second", "hits, %", "time to balance, s", "0 requests failed"] {
        assert!(text.contains(part), "{part} is not in:\n{text}\n{log}");
    }
    assert!(folder.path().join("figures/fleet-validate.svg").exists(), "{log}");
}
