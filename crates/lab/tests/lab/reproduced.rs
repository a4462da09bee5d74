//! The experiments of papers at toy size, with real servers: each yields a row of the book. Their values mean nothing.

use std::path::Path;
use std::process::Command;

/// Experiments with rows in the book.
const EXPERIMENTS: [&str; 9] = [
    "autoscaling-nodes",
    "autoscaling-join",
    "autoscaling-fill",
    "autoscaling-queries",
    "autoscaling-ramp",
    "makris",
    "bloom",
    "tuning",
    "netmigrate",
];

#[test]
fn each_experiment_at_toy_size_yields_a_row() {
    let lab = Path::new(env!("CARGO_BIN_EXE_switchyard-lab"));
    let output = Command::new(lab).args(["reproduce", "all", "--smoke"]).output().expect("it runs");
    let (book, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{log}");
    for experiment in EXPERIMENTS {
        assert!(book.contains(&format!("[{experiment}](")), "no row of {experiment} in:\n{book}\n{log}");
    }
}
