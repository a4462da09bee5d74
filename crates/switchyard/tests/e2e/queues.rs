//! Libraries for job queues on two nodes, with the placement rules of their presets: BullMQ, Bull, RQ and Celery. All but
//! RQ also without rules.

use std::process::Command;

use crate::clients::{assert_checks_ok, prepared, programs, python_packages, run, wanted};
use crate::support::process::tied;
use crate::support::{Site, SiteOptions};

const RULES: &str = "[[placement.rule]]\npreset = \"bullmq\"\n[[placement.rule]]\npreset = \"rq\"\n[[placement.rule]]\npreset = \"celery\"\n";

/// Runs BullMQ and Bull against a router over two nodes.
fn node_works_on_two_nodes(config: &str) {
    if !wanted(&[("node", "nodejs"), ("npm", "npm")]) {
        return;
    }
    let source = programs().join("queues");
    let lock = std::fs::read(source.join("package-lock.json")).expect("package-lock.json");
    let installed = prepared("queues-js", &lock, |dir| {
        for file in ["package.json", "package-lock.json", ".npmrc"] {
            std::fs::copy(source.join(file), dir.join(file)).expect("a copy");
        }
        run("npm ci", Command::new("npm").args(["ci", "--ignore-scripts"]).current_dir(dir));
    });
    std::fs::copy(source.join("bullmq.mjs"), installed.join("bullmq.mjs")).expect("a copy");
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    let mut check = tied("node");
    check.arg(installed.join("bullmq.mjs")).arg(site.address().to_string());
    assert_checks_ok("BullMQ and Bull", &run("node", &mut check));
}

#[test]
fn bullmq_and_bull_work_on_two_nodes() {
    node_works_on_two_nodes(RULES);
}

#[test]
fn bullmq_and_bull_work_on_two_nodes_without_rules() {
    node_works_on_two_nodes("");
}

/// Runs Python programs of `tests-clients/queues` against a router over two nodes.
fn python_works_on_two_nodes(names: &[&str], config: &str) {
    if !wanted(&[("python3", "python3 python3-venv")]) {
        return;
    }
    let source = programs().join("queues");
    let packages = python_packages("queues-python", &source);
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    for program in names {
        let mut check = tied("python3");
        check.arg("-B").arg(source.join(program)).arg(site.address().to_string());
        check.current_dir(&source).env("PYTHONPATH", &packages);
        assert_checks_ok(program, &run(program, &mut check));
    }
}

#[test]
fn rq_and_celery_work_on_two_nodes() {
    python_works_on_two_nodes(&["rq_check.py", "celery_check.py"], RULES);
}

#[test]
fn celery_works_on_two_nodes_without_rules() {
    python_works_on_two_nodes(&["celery_check.py"], "");
}
