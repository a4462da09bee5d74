//! Checks of the project's structure: dependencies between crates, headers of files, maximum file lengths.
//!
//! Each rule is a function from the files to a list of complaints, so that tests can apply it to files that break it.
//! Otherwise a rule that never finds anything may be broken. A complaint names the place, the problem and the remedy.

mod code;
mod lexicon;
mod pages;
mod runner;
mod sharing;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use code::only_code;
use lexicon::terms_are_names_in_the_code;
use pages::pages_name_what_is_there;
use sharing::workers_share_nothing_per_command;

/// Allowed normal dependencies of each crate. The crates exist so that Cargo enforces this (ARCHITECTURE.md).
const CRATES: &[CrateRule] = &[
    CrateRule {
        name: "resp",
        only: Some(&["memchr"]),
        tests_only: &[],
        never: &[],
        why: "resp turns bytes into commands and replies; fuzzers, simulator and router run the same code, so it has no I/O and next to no dependencies",
    },
    CrateRule {
        name: "policy",
        only: Some(&["md-5", "rapidhash", "saphyr-parser", "serde", "siphasher", "smartcore", "stlrs"]),
        tests_only: &[],
        never: &[],
        why: "policy is every decision as pure code; what it needs (time, randomness, addresses) it is given as arguments. With serde a decision can be kept, and made again; md-5, rapidhash, saphyr-parser and siphasher compute from bytes: twemproxy's hashes, hashes of names, twemproxy's file, and fingerprints of keys; smartcore and stlrs compute from numbers, with a given seed: decision trees and seasons",
    },
    CrateRule {
        name: "router",
        only: None,
        tests_only: &[],
        never: &["switchyard-control", "switchyard-bench", "switchyard-lab", "switchyard", "tokio", "axum", "redb"],
        why: "router is the data plane: it adopts what control decides, as types of policy, and its workers run no other event loop than theirs",
    },
    CrateRule {
        name: "control",
        only: None,
        tests_only: &[],
        never: &["switchyard-bench", "switchyard-lab", "switchyard"],
        why: "control places keys and notifies the router; code that reads a configuration or a command line passes plain values to it",
    },
    CrateRule {
        name: "bench",
        only: None,
        tests_only: &[],
        never: &["switchyard-router", "switchyard-control", "switchyard-policy", "switchyard-lab", "switchyard"],
        why: "bench measures the router as a black box, the same way as its peers",
    },
    CrateRule {
        name: "sim",
        only: None,
        tests_only: &[],
        never: &["switchyard-router", "switchyard-control", "switchyard-lab", "switchyard", "tokio", "rustix", "libc"],
        why: "sim runs policy under a clock and a network of its own; anything real would make its runs impossible to replay",
    },
    CrateRule {
        name: "product",
        only: None,
        tests_only: &[],
        never: &["switchyard-lab", "switchyard-sim", "switchyard"],
        why: "product is what operators run; what measures it, breaks it and installs its rivals is the lab's",
    },
    CrateRule {
        name: "switchyard",
        only: Some(&["switchyard-product", "switchyard-router", "tikv-jemallocator"]),
        tests_only: &[],
        never: &["switchyard-lab"],
        why: "switchyard is only main, because it is optimized for speed, and the product's own code for size",
    },
    CrateRule {
        name: "lab",
        only: None,
        tests_only: &[],
        never: &[],
        why: "it may use all crates, and no crate uses it",
    },
];

struct CrateRule {
    name: &'static str,
    /// Complete list of allowed dependencies, if given.
    only: Option<&'static [&'static str]>,
    /// Allowed as development dependencies only.
    tests_only: &'static [&'static str],
    /// Forbidden even for tests.
    never: &'static [&'static str],
    why: &'static str,
}

/// Allowed dependencies between modules of policy. A new module gets a row with as few as possible.
const POLICY_MODULES: &[(&str, &[&str])] = &[
    ("topology", &[]),
    ("routing", &["topology"]),
    ("scan", &["topology", "cluster"]),
    ("script_keys", &[]),
    ("failover", &[]),
    ("data_loss", &[]),
    ("limits", &[]),
    ("wait_queue", &["topology"]),
    ("injected", &[]),
    ("migration", &["topology", "injected"]),
    ("autoscale", &["topology", "injected"]),
    ("balance", &["topology"]),
    ("cluster", &["topology"]),
    ("colocate", &["topology"]),
    ("eject", &["migration", "topology"]),
    ("ownership", &["hot_copies"]),
    ("telemetry", &["topology", "injected"]),
    ("together", &["topology"]),
    ("load", &["telemetry", "topology"]),
    ("planner", &["topology", "injected", "load", "telemetry"]),
    ("twemproxy", &["eject", "topology"]),
    ("hot_copies", &["migration", "telemetry", "topology", "injected"]),
];

/// Paths of the standard library that pure code must not use. Clippy bans types by name (policy/clippy.toml). This list
/// bans the rest of those modules.
const IMPURE: &[(&str, &str)] = &[
    ("std::net", "take bytes or addresses as arguments"),
    ("std::fs", "take the content as an argument"),
    ("std::process", "return an action, and let the caller do it"),
    ("std::thread", "be a state machine that is stepped"),
    ("std::env", "take the value as an argument"),
    ("std::time::Instant", "take the time as an argument"),
    ("std::time::SystemTime", "take the time as an argument"),
    ("std::os", "leave the operating system to the router"),
];

/// Maximum length of a file, in lines with tests: one idea and its tests fit.
const LINES_MAX: usize = 1000;

/// Longer files, with their maximum lengths and reasons. A length may be lowered, but raised only with a better reason.
const LONGER: &[(&str, usize, &str)] = &[];

/// File names without information, with the remedy.
const NAMES_BANNED: &[(&str, &str)] = &[
    ("util", "name the file after its content"),
    ("utils", "name the file after its content"),
    ("common", "name the file after the common topic"),
    ("manager", "name the file for what it does: lock, place, drain, ..."),
    ("master", "say primary"),
    ("slave", "say replica"),
];

/// Places that may use `unsafe`. Each use there has a comment with the reason.
const UNSAFE_ALLOWED: &[&str] = &["crates/router/src/sys"];

/// Files of the project, by path from its root.
struct Files(BTreeMap<String, String>);

impl Files {
    /// Reads all files that git would list. Only some types are read as text.
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let root = root.canonicalize().expect("the root of the workspace");
        let mut files = BTreeMap::new();
        let mut directories = vec![root.clone()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(&directory).expect("a directory of the project") {
                let path: PathBuf = entry.expect("an entry").path();
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let skipped = ["target", "node_modules", "artifacts", "corpus", "__pycache__"];
                if name.starts_with('.') || skipped.contains(&name.as_str()) || path.is_symlink() {
                    continue;
                }
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let relative = path.strip_prefix(&root).expect("below the root");
                let text = match path.extension().and_then(|extension| extension.to_str()) {
                    // Other files are checked by name only. A file may have been deleted since the listing, by an
                    // editor.
                    Some("rs" | "toml" | "md") => fs::read_to_string(&path).unwrap_or_default(),
                    _ => String::new(),
                };
                files.insert(relative.to_string_lossy().into_owned(), text);
            }
        }
        Self(files)
    }

    fn rust(&self) -> impl Iterator<Item = (&String, &String)> {
        self.0.iter().filter(|(path, _)| path.ends_with(".rs"))
    }

    /// Lines of code below a directory, with path and line number.
    fn code_below(&self, directory: &str) -> impl Iterator<Item = (String, String)> {
        self.rust().filter(move |(path, _)| path.starts_with(directory)).flat_map(|(path, text)| {
            let code = only_code(text);
            let lines = code.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
            let located = |(i, line): (usize, &str)| (format!("{path}:{}", i + 1), line.to_owned());
            lines.map(located).collect::<Vec<_>>()
        })
    }

    /// Manifests of the crates, by directory name.
    fn manifests(&self) -> impl Iterator<Item = (&str, toml::Table)> {
        self.0.iter().filter_map(|(path, text)| {
            let name = path.strip_prefix("crates/")?.strip_suffix("/Cargo.toml")?;
            Some((name, text.parse().unwrap_or_else(|error| panic!("{path}: {error}"))))
        })
    }
}

/// Names and declarations of the dependencies of one kind, including tables for single platforms.
fn dependencies<'a>(manifest: &'a toml::Table, kind: &str) -> Vec<(&'a str, &'a toml::Value)> {
    let platforms = manifest.get("target").and_then(toml::Value::as_table);
    let platforms = platforms.into_iter().flat_map(toml::Table::values);
    let holders = platforms.filter_map(toml::Value::as_table).chain([manifest]);
    let tables = holders.filter_map(|holder| holder.get(kind)?.as_table());
    tables.flat_map(|table| table.iter().map(|(name, how)| (name.as_str(), how))).collect()
}

fn crates_import_only_what_they_may(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, manifest) in files.manifests() {
        let Some(rule) = CRATES.iter().find(|rule| rule.name == name) else {
            complaints.push(format!(
                "crates/{name} has no row in CRATES: a crate exists only where Cargo must enforce something; make it a module, or add a row with the enforced rule"
            ));
            continue;
        };
        let manifest_path = format!("crates/{name}/Cargo.toml");
        for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
            for (dependency, how) in dependencies(&manifest, kind) {
                let real = how.get("package").and_then(toml::Value::as_str).unwrap_or(dependency);
                let features = how.get("features").and_then(toml::Value::as_array);
                if features.is_some_and(|features| features.iter().any(|name| name.as_str() == Some("research"))) {
                    complaints.push(format!(
                        "{manifest_path}: {real} must not have the feature research here: cargo unifies features, so the product would have it"
                    ));
                }
                if rule.never.contains(&real) {
                    complaints.push(format!(
                        "{manifest_path}: {name} must not depend on {real}, not even in tests: {}",
                        rule.why
                    ));
                } else if kind != "dev-dependencies"
                    && (rule.tests_only.contains(&real) || rule.only.is_some_and(|only| !only.contains(&real)))
                {
                    complaints.push(format!("{manifest_path}: {name} must not depend on {real}: {}", rule.why));
                }
            }
        }
    }
    complaints
}

fn versions_and_lints_come_from_the_root(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, manifest) in files.manifests() {
        for kind in ["dependencies", "build-dependencies", "dev-dependencies"] {
            for (dependency, how) in dependencies(&manifest, kind) {
                if how.get("workspace").and_then(toml::Value::as_bool) != Some(true) {
                    complaints.push(format!(
                        "crates/{name}/Cargo.toml: write `{dependency}.workspace = true`, and its version in the root's [workspace.dependencies]: one version for all crates"
                    ));
                }
            }
        }
        let lints = manifest.get("lints").and_then(|lints| lints.get("workspace"));
        if lints.and_then(toml::Value::as_bool) != Some(true) {
            complaints.push(format!(
                "crates/{name}/Cargo.toml: add `[lints]` with `workspace = true`: lints are chosen once, at the root"
            ));
        }
    }
    complaints
}

/// Maximum files in all corpora, because each is replayed by `cargo test`, and reviewed when it is added.
const CORPORA_MAX: usize = 300;

/// Cargo cannot detect a path to a file of another crate, or its code included as text.
fn crates_reach_each_other_only_through_cargo(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for rule in CRATES {
        let names: Vec<String> = rule
            .never
            .iter()
            .filter(|name| name.starts_with("switchyard-"))
            .map(|name| name.replace('-', "_"))
            .collect();
        for (place, line) in files.code_below(&format!("crates/{}/", rule.name)) {
            for name in names.iter().filter(|name| words(&line).any(|word| word == name.as_str())) {
                complaints.push(format!("{place}: {} must not use {name}: {}", rule.name, rule.why));
            }
            if line.contains("#[path") && !is_shared_with_tests(files, &place) {
                complaints.push(format!(
                    "{place}: no #[path]: the path of a module must match its name, and a crate must not include the code of another"
                ));
            }
        }
    }
    complaints
}

/// Whether the `#[path]` in this line names a file of the same crate, for a test with other primitives, or a file that
/// belongs to no crate: the replay of corpora, and the ports of tests.
fn is_shared_with_tests(files: &Files, place: &str) -> bool {
    let (path, number) = place.rsplit_once(':').unwrap_or_default();
    let number: usize = number.parse().unwrap_or_default();
    let line = files.0[path].lines().nth(number.saturating_sub(1)).unwrap_or_default();
    let is_test = path.contains("/tests/");
    is_test && (line.contains("\"../../src/") || line.contains("/tests/ports.rs\""))
        || line.contains("/fuzz/replay.rs\"")
}

fn pure_crates_stay_pure(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for name in ["resp", "policy"] {
        for (place, line) in files.code_below(&format!("crates/{name}/src/")) {
            // `use std::{net::..., ...}` would not be detected, so such lists must not start at `std`.
            if line.contains("use std::{") || line.contains("use core::{") {
                complaints.push(format!("{place}: write one `use` per module of std, so that this check can read it"));
            }
            for (path, instead) in IMPURE.iter().filter(|(path, _)| has_path(&line, path)) {
                complaints.push(format!("{place}: {name} is pure and must not use {path}: {instead}"));
            }
        }
    }
    complaints
}

fn modules_of_policy_import_only_what_they_may(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (place, line) in files.code_below("crates/policy/src/") {
        let inside = &place["crates/policy/src/".len()..];
        let module = inside.split(['/', '.']).next().unwrap_or_default();
        if module == "lib" {
            continue;
        }
        let Some((_, may)) = POLICY_MODULES.iter().find(|(name, _)| *name == module) else {
            complaints.push(format!(
                "{place}: the module {module} of policy has no row in POLICY_MODULES: add one with what it may use of the others"
            ));
            continue;
        };
        if line.contains("crate::{") {
            complaints
                .push(format!("{place}: write one `use crate::MODULE` per module, so that this check can read it"));
        }
        for used in line.split("crate::").skip(1) {
            let used = words(used).next().unwrap_or_default();
            if !used.is_empty() && used != module && !may.contains(&used) {
                complaints.push(format!(
                    "{place}: policy::{module} must not use policy::{used}; it may use {may:?}. Pass what it needs as an argument, or move the decision to where both are known"
                ));
            }
        }
    }
    complaints.dedup();
    complaints
}

fn nothing_is_left_to_do(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (place, line) in files.code_below("") {
        for stub in ["todo!", "unimplemented!"] {
            if line.contains(stub) && words(&line).any(|word| stub.starts_with(word)) {
                complaints.push(format!(
                    "{place}: {stub} ends the process at a user's: implement it, or return an error that names the missing feature"
                ));
            }
        }
    }
    complaints
}

/// If a long string lacks a backslash at the end of a line, the indentation becomes part of it.
fn long_strings_have_no_gaps(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files.0.iter().filter(|(path, _)| path.contains("/src/") && path.ends_with(".rs")) {
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            let has_gap = line
                .split_once("            ")
                .is_some_and(|(before, _)| before.ends_with(|c: char| c.is_ascii_lowercase() || ",.;:)`".contains(c)));
            // Tables and examples contain intended blanks.
            let is_table = line.contains("\\n") || line.contains("assert") || line.contains("ends_with(");
            if line.len() > 120 && has_gap && !is_table && !line.starts_with("//") {
                complaints.push(format!(
                    "{path}:{}: a string with many blanks within a sentence: end the line with a backslash",
                    number + 1
                ));
            }
        }
    }
    complaints
}

fn unsafe_is_where_it_belongs(files: &Files) -> Vec<String> {
    let allowed = |place: &str| UNSAFE_ALLOWED.iter().any(|path| place.starts_with(path));
    files
        .code_below("crates/")
        .filter(|(place, line)| line.contains("unsafe_code") && !allowed(place))
        .map(|(place, _)| {
            format!(
                "{place}: unsafe code is allowed in {UNSAFE_ALLOWED:?} only; look for a safe wrapper (rustix, socket2), or put it there"
            )
        })
        .collect()
}

fn files_are_short(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files.rust() {
        let lines = text.lines().count();
        let listed = LONGER.iter().find(|(longer, ..)| longer == path);
        match listed {
            None if lines > LINES_MAX => complaints.push(format!(
                "{path} has {lines} lines, more than {LINES_MAX}: find the second idea in it and give it a file of its own. If it is one idea (a table), list it in LONGER with the reason"
            )),
            Some((_, most, _)) if lines > *most => complaints.push(format!(
                "{path} has {lines} lines; LONGER allows {most}: take something out instead of adding to it"
            )),
            Some(_) if lines <= LINES_MAX => complaints
                .push(format!("{path} has only {lines} lines now: remove it from LONGER, so that it stays so")),
            _ => {}
        }
    }
    for (path, ..) in LONGER.iter().filter(|(path, ..)| !files.0.contains_key(*path)) {
        complaints.push(format!("{path} is listed in LONGER but is not there: remove it from the list"));
    }
    complaints
}

fn files_have_headers(files: &Files) -> Vec<String> {
    files
        .rust()
        .filter(|(_, text)| {
            let header = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("#!"));
            !header.is_some_and(|line| line.starts_with("//!") && line.trim_start_matches("//!").trim().len() >= 10)
        })
        .map(|(path, _)| {
            format!("{path}: begin it with a `//!` header: purpose, place, and why not the obvious alternative")
        })
        .collect()
}

/// The map locates a worker's features, so it must list every module of a worker.
fn the_map_has_every_module_of_a_worker(files: &Files) -> Vec<String> {
    let map = files.0.get("ARCHITECTURE.md").map(String::as_str).unwrap_or_default();
    let module = |path: &str| {
        let rest = path.strip_prefix("crates/router/src/worker/")?;
        Some(rest.split('/').next().unwrap_or(rest).trim_end_matches(".rs").to_owned())
    };
    let modules: BTreeSet<String> =
        files.0.keys().filter_map(|path| module(path)).filter(|module| module != "mod").collect();
    let is_missing = |module: &&String| !map.contains(&format!("`{module}`")) && !map.contains(&format!("`{module}/`"));
    modules
        .iter()
        .filter(is_missing)
        .map(|module| {
            format!("crates/router/src/worker/{module}: give it a place in ARCHITECTURE.md, rooms of the router")
        })
        .collect()
}

fn files_have_meaningful_names(files: &Files) -> Vec<String> {
    let mut parts = BTreeSet::new();
    for path in files.0.keys() {
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            parts.insert(&path[..end]);
        }
    }
    let mut complaints = Vec::new();
    for path in parts {
        let name = path.rsplit('/').next().unwrap_or(path).to_lowercase();
        for (banned, instead) in NAMES_BANNED {
            if name.split(|c: char| !c.is_alphanumeric()).any(|word| word == *banned) {
                complaints.push(format!("{path}: no file or directory is called {banned}: {instead}"));
            }
        }
    }
    complaints
}

/// Identifiers and keywords of a line of code.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// Whether the line contains the path as a whole, not as the beginning of a longer name.
fn has_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(at, _)| {
        let name = |c: char| c.is_alphanumeric() || c == '_';
        !line[at + path.len()..].starts_with(name) && !line[..at].ends_with(name)
    })
}

type Rule = fn(&Files) -> Vec<String>;

fn check(rule: Rule) {
    let complaints = rule(&Files::read());
    assert!(complaints.is_empty(), "\n\n{}\n", complaints.join("\n"));
}

#[test]
fn crates_use_only_allowed_dependencies() {
    check(crates_import_only_what_they_may);
}

#[test]
fn crates_include_no_code_of_other_crates() {
    check(crates_reach_each_other_only_through_cargo);
}

#[test]
fn versions_and_lints_come_from_the_workspace() {
    check(versions_and_lints_come_from_the_root);
}

#[test]
fn purity() {
    check(pure_crates_stay_pure);
}

#[test]
fn policy_modules_use_only_allowed_modules() {
    check(modules_of_policy_import_only_what_they_may);
}

#[test]
fn code_has_no_stubs() {
    check(nothing_is_left_to_do);
}

#[test]
fn long_strings_have_no_missing_backslashes() {
    check(long_strings_have_no_gaps);
}

#[test]
fn the_map_lists_every_module_of_a_worker() {
    check(the_map_has_every_module_of_a_worker);
}

#[test]
fn unsafe_is_only_in_allowed_places() {
    check(unsafe_is_where_it_belongs);
}

#[test]
fn workers_share_only_listed_state() {
    check(workers_share_nothing_per_command);
}

#[test]
fn files_are_not_too_long() {
    check(files_are_short);
}

#[test]
fn corpora_of_fuzz_targets_are_complete_and_small() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz");
    let names = |folder: &str| -> BTreeSet<String> {
        let entries = fs::read_dir(fuzz.join(folder)).expect("a folder").map(|entry| entry.expect("an entry").path());
        entries.map(|path| path.file_stem().expect("a name").to_string_lossy().into_owned()).collect()
    };
    let (targets, corpora) = (names("fuzz_targets"), names("corpus"));
    assert_eq!(targets, corpora, "each fuzz target has a corpus");
    let files: usize = corpora.iter().map(|name| names(&format!("corpus/{name}")).len()).sum();
    assert!(files < CORPORA_MAX, "the corpora have {files} files: run make fuzz-corpus, and remove the least useful");
}

#[test]
fn headers() {
    check(files_have_headers);
}

#[test]
fn file_names_are_descriptive() {
    check(files_have_meaningful_names);
}

#[test]
fn pages() {
    check(pages_name_what_is_there);
}

#[test]
fn lexicon() {
    check(terms_are_names_in_the_code);
}

/// policy's purity depends on the clippy configuration, which has no effect if the file is moved or replaced.
#[test]
fn clippy_watches_policy() {
    let files = Files::read();
    let text =
        files.0.get("crates/policy/clippy.toml").expect("crates/policy/clippy.toml bans clocks, threads and sockets");
    let table: toml::Table = text.parse().expect("TOML");
    let banned: Vec<&str> = ["disallowed-methods", "disallowed-types"]
        .into_iter()
        .flat_map(|list| table[list].as_array().into_iter().flatten())
        .filter_map(|entry| entry.get("path")?.as_str())
        .collect();
    for path in [
        "std::time::Instant::now",
        "std::time::SystemTime::now",
        "std::thread::spawn",
        "std::collections::HashMap",
        "std::collections::HashSet",
        "std::net::TcpStream",
    ] {
        assert!(banned.contains(&path), "crates/policy/clippy.toml must ban {path}: policy is pure");
    }
}

/// Applies all rules to the project, and to files that break each of them.
#[test]
fn each_rule_detects_a_violation() {
    const FINE: &str = "//! A file with a header.\n";
    const LEXICON: &str = "| Term | Meaning |\n|---|---|\n";
    const LONG_STRING: &str = "//! A file with a header.\nconst A: &str = \"one sentence that is so long that its end was to stand in the next line of the file, or \
                               \u{20}           elsewhere, and does not\";\n";
    let good = || {
        let lints = "[lints]\nworkspace = true\n";
        Files(BTreeMap::from([
            ("crates/resp/Cargo.toml".into(), format!("{lints}[dependencies]\nmemchr.workspace = true\n")),
            ("crates/policy/Cargo.toml".into(), format!("{lints}[dev-dependencies]\nproptest.workspace = true\n")),
            ("crates/policy/src/lib.rs".into(), format!("{FINE}pub mod topology;\n")),
            (
                "crates/policy/src/routing.rs".into(),
                format!("{FINE}use crate::topology::Slot; // not crate::hot_copies\n"),
            ),
            ("crates/router/Cargo.toml".into(), format!("{lints}[dependencies]\nswitchyard-policy.workspace = true\n")),
            (
                "crates/switchyard/Cargo.toml".into(),
                format!("{lints}[dev-dependencies]\nswitchyard-sim.workspace = true\n"),
            ),
            ("docs/lexicon.md".into(), format!("{LEXICON}| slot | Number of a key. |\n")),
        ]))
    };
    let rules: [Rule; 13] = [
        crates_import_only_what_they_may,
        crates_reach_each_other_only_through_cargo,
        versions_and_lints_come_from_the_root,
        pure_crates_stay_pure,
        modules_of_policy_import_only_what_they_may,
        nothing_is_left_to_do,
        long_strings_have_no_gaps,
        unsafe_is_where_it_belongs,
        workers_share_nothing_per_command,
        files_have_headers,
        files_have_meaningful_names,
        pages_name_what_is_there,
        terms_are_names_in_the_code,
    ];
    for rule in rules {
        assert_eq!(rule(&good()), Vec::<String>::new());
    }
    assert_eq!(files_are_short(&Files(BTreeMap::new())).len(), LONGER.len());

    let long = FINE.repeat(LINES_MAX + 1);
    let made_up = format!("{LEXICON}| slot | Number of a key. |\n| flux capacitor | Made up. |\n");
    let too_many_terms = format!("{LEXICON}{}", "| slot | Number of a key. |\n".repeat(41));
    let cases: &[(Rule, &str, &str)] = &[
        (crates_import_only_what_they_may, "crates/resp/Cargo.toml", "[dependencies]\nbytes = \"1\"\n"),
        (crates_import_only_what_they_may, "crates/policy/Cargo.toml", "[build-dependencies]\ncc.workspace = true\n"),
        (
            crates_import_only_what_they_may,
            "crates/policy/Cargo.toml",
            "[target.'cfg(unix)'.dependencies]\nlibc = \"0.2\"\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/router/Cargo.toml",
            "[dev-dependencies]\nswitchyard-control.workspace = true\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/control/Cargo.toml",
            "[dependencies]\nx = { package = \"switchyard-bench\" }\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/switchyard/Cargo.toml",
            "[dependencies]\nswitchyard-sim.workspace = true\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/switchyard/Cargo.toml",
            "[dev-dependencies]\nswitchyard-lab.workspace = true\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/bench/Cargo.toml",
            "[dependencies]\nswitchyard-lab.workspace = true\n",
        ),
        (
            crates_import_only_what_they_may,
            "crates/lab/Cargo.toml",
            "[dependencies]\nswitchyard-sim = { workspace = true, features = [\"research\"] }\n",
        ),
        (long_strings_have_no_gaps, "crates/router/src/a.rs", LONG_STRING),
        (crates_import_only_what_they_may, "crates/extra/Cargo.toml", ""),
        (crates_reach_each_other_only_through_cargo, "crates/bench/src/x.rs", "use switchyard_router::Router;\n"),
        (
            crates_reach_each_other_only_through_cargo,
            "crates/control/src/x.rs",
            "#[path = \"../../router/src/lib.rs\"]\nmod x;\n",
        ),
        (
            versions_and_lints_come_from_the_root,
            "crates/resp/Cargo.toml",
            "[lints]\nworkspace = true\n[dependencies]\nmemchr = \"2\"\n",
        ),
        (versions_and_lints_come_from_the_root, "crates/resp/Cargo.toml", "[dependencies]\nmemchr.workspace = true\n"),
        (pure_crates_stay_pure, "crates/resp/src/x.rs", "use std::net::IpAddr;\n"),
        (pure_crates_stay_pure, "crates/policy/src/x.rs", "fn f() -> std::time::Instant {}\n"),
        (pure_crates_stay_pure, "crates/policy/src/x.rs", "use std::{fs, io};\n"),
        (
            modules_of_policy_import_only_what_they_may,
            "crates/policy/src/topology/x.rs",
            "use crate::routing::Route;\n",
        ),
        (modules_of_policy_import_only_what_they_may, "crates/policy/src/topology/x.rs", "use crate::{routing};\n"),
        (modules_of_policy_import_only_what_they_may, "crates/policy/src/newcomer.rs", "pub fn f() {}\n"),
        (nothing_is_left_to_do, "crates/x/src/x.rs", "fn f() { todo!() }\n"),
        (nothing_is_left_to_do, "fuzz/x.rs", "fn f() { unimplemented!(\"later\") }\n"),
        (unsafe_is_where_it_belongs, "crates/router/src/worker/x.rs", "#![allow(unsafe_code)]\n"),
        (
            workers_share_nothing_per_command,
            "crates/router/src/worker/x.rs",
            "fn f() { lock(&self.shared.scripts).named(sha) }\n",
        ),
        (workers_share_nothing_per_command, "crates/router/src/worker/x.rs", "let user = client.user.clone();\n"),
        (
            workers_share_nothing_per_command,
            "crates/router/src/limits.rs",
            "self.bytes.fetch_add(1, Relaxed); // and no more\n",
        ),
        (the_map_has_every_module_of_a_worker, "crates/router/src/worker/x.rs", "//! Something new.\n"),
        (files_are_short, "crates/x/src/x.rs", &long),
        (files_have_headers, "crates/x/src/x.rs", "use std::io;\n//! Too late.\n"),
        (files_have_headers, "crates/x/src/x.rs", "//! X\n"),
        (files_have_headers, "crates/x/src/x.rs", ""),
        (files_have_meaningful_names, "crates/x/src/string_util.rs", ""),
        (files_have_meaningful_names, "crates/x/tests/common/mod.rs", ""),
        (files_have_meaningful_names, "docs/node-manager.md", ""),
        (pages_name_what_is_there, "docs/x.md", "See [y](y.md).\n"),
        (pages_name_what_is_there, "docs/x.md", "# X\n\nSee [above](#y).\n"),
        (pages_name_what_is_there, "ARCHITECTURE.md", "It is in `policy/src/lost.rs`.\n"),
        (terms_are_names_in_the_code, "docs/lexicon.md", &made_up),
        (terms_are_names_in_the_code, "docs/lexicon.md", &too_many_terms),
    ];
    for (rule, path, text) in cases {
        let mut files = good();
        files.0.insert((*path).to_owned(), (*text).to_owned());
        let complaints = rule(&files);
        assert!(
            complaints
                .iter()
                .any(|complaint| complaint.contains(path.rsplit_once('/').map_or(*path, |(directory, _)| directory))),
            "{path} {text:?}: {complaints:?}"
        );
    }
}
