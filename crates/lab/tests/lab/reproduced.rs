//! The experiments of papers at toy size, with real servers: each yields a result. Their values mean nothing.

use std::path::Path;
use std::process::Command;

/// Experiments with rows in the book at each run.
const EXPERIMENTS: [&str; 10] = [
    "switchkv-steady",
    "switchkv-changes",
    "autoscaling-nodes",
    "autoscaling-join",
    "autoscaling-fill",
    "autoscaling-queries",
    "makris",
    "bloom",
    "tuning",
    "netmigrate",
];

#[test]
fn each_experiment_at_toy_size_yields_a_result() {
    let lab = Path::new(env!("CARGO_BIN_EXE_switchyard-lab"));
    let output = Command::new(lab).args(["reproduce", "all", "--smoke"]).output().expect("it runs");
    let (book, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    for experiment in EXPERIMENTS {
        assert!(book.contains(&format!("[{experiment}](")), "no row of {experiment} in:\n{book}\n{log}");
    }
    // A row exists only if the ramp adds a node, which the load of this machine can prevent.
    assert!(book.contains("load of the step that added it"), "no table of the ramp in:\n{book}\n{log}");
}
