//! Layers of a worker: which file of `src/worker/` may access clients, which may access connections to nodes, and which
//! may access both.
//!
//! The types `Clients` and `Links` have private fields, so the compiler checks calls. This test checks which code holds
//! both. A row that allows more than its file uses is an error as well, so the table can only become stricter.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Access of a file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Sees {
    /// Neither clients nor connections.
    Neither,
    Clients,
    Links,
    /// Both sides: dispatch.
    Both,
}

use Sees::{Both, Clients, Links, Neither};

/// Files with methods of `Worker`, and their access to `self.clients` and `self.links`.
const WORKER: &[(&str, Sees)] = &[
    ("accept.rs", Clients),
    ("acl.rs", Clients),
    ("away.rs", Neither),
    ("blocking.rs", Both),
    ("breaking.rs", Both),
    ("client_commands.rs", Clients),
    ("cluster.rs", Clients),
    ("colocate.rs", Clients),
    ("config_commands.rs", Clients),
    ("quotas.rs", Clients),
    ("cross_slot.rs", Clients),
    ("dispatch.rs", Both),
    ("double_read.rs", Both),
    ("element_scan.rs", Clients),
    ("fan_out.rs", Links),
    ("overrides.rs", Neither),
    ("gather.rs", Both),
    ("handshake.rs", Links),
    ("hot_copies.rs", Both),
    ("info.rs", Clients),
    ("input.rs", Clients),
    ("keyed.rs", Neither),
    ("large.rs", Both),
    ("libraries.rs", Clients),
    ("local.rs", Both),
    ("login.rs", Clients),
    ("memory.rs", Both),
    ("mod.rs", Both),
    ("monitor.rs", Clients),
    ("nodes.rs", Links),
    ("outage.rs", Both),
    ("output.rs", Both),
    ("multi_local.rs", Clients),
    ("stale_replies.rs", Both),
    ("pause.rs", Both),
    ("pool.rs", Both),
    ("published.rs", Clients),
    ("pubsub/clients.rs", Clients),
    ("pubsub/commands.rs", Both),
    ("pubsub/nodes.rs", Both),
    ("queueing.rs", Clients),
    ("quiesce.rs", Clients),
    ("random_key.rs", Neither),
    ("reissued.rs", Both),
    ("renew.rs", Links),
    ("replicas.rs", Both),
    ("replies.rs", Both),
    ("multi_step.rs", Clients),
    ("scan.rs", Clients),
    ("scripts.rs", Both),
    ("send.rs", Both),
    ("slowlog.rs", Both),
    ("tracking/commands.rs", Clients),
    ("tracking/mod.rs", Clients),
    ("tracking/nodes.rs", Both),
    ("tracking/own.rs", Clients),
    ("transactions.rs", Both),
    ("transit.rs", Both),
    ("translate.rs", Links),
    ("wait.rs", Both),
];

/// Files with their own type and no method of `Worker`, and the modules of `worker` that they may name. `upstream`
/// knows no client, `downstream` no connection.
const OWNERS: &[(&str, &[&str])] = &[
    ("batching.rs", &["downstream"]),
    ("changes.rs", &["keyed"]),
    ("clients.rs", &["downstream", "reissued"]),
    ("config_values.rs", &[]),
    (
        "downstream.rs",
        &[
            "colocate",
            "login",
            "pubsub",
            "quiesce",
            "reissued",
            "tracking",
            "transactions",
            "transit",
            "transport",
            "upstream",
            "wait",
        ],
    ),
    ("kind.rs", &["blocking", "upstream"]),
    ("links.rs", &["keyed", "outage", "pool", "log_throttle", "upstream"]),
    ("memory_stats.rs", &[]),
    ("pubsub/mod.rs", &[]),
    ("log_throttle.rs", &[]),
    ("telemetry.rs", &["keyed", "transit"]),
    ("transport.rs", &[]),
    ("upstream.rs", &["handshake", "keyed", "kind", "transport"]),
    ("zombies.rs", &[]),
];

/// Files that create requests of the router without keys. All other requests pass the command hook with their keys.
const WITHOUT_KEYS: &[&str] = &["keyed.rs", "nodes.rs", "transactions.rs"];

/// Maximum number of methods of `Worker`. Lower it when possible.
const METHODS_MAX: usize = 465;

/// Maximum number of fields of `Worker`. Lower it when possible.
const FIELDS_MAX: usize = 43;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src/worker")
}

/// Returns the code of all files by path, without tests and comments.
fn files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let mut directories = vec![root()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).expect("a file");
            let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let code: String =
                text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect();
            let name = path.strip_prefix(root()).expect("below it").to_string_lossy().replace('\\', "/");
            files.insert(name, code);
        }
    }
    files
}

/// Whether code accesses a field of the worker.
fn names_field(code: &str, field: &str) -> bool {
    let squeezed: String = code.split_whitespace().collect();
    ["self", "worker"].iter().any(|of| {
        let path = format!("{of}.{field}");
        squeezed
            .match_indices(&path)
            .any(|(at, _)| !squeezed[at + path.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    })
}

fn sees(code: &str) -> Sees {
    match (names_field(code, "clients"), names_field(code, "links")) {
        (false, false) => Neither,
        (true, false) => Clients,
        (false, true) => Links,
        (true, true) => Both,
    }
}

/// Returns the modules of the worker named in imports and paths.
fn imports(code: &str, modules: &BTreeSet<&str>) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for prefix in ["super::", "crate::worker::"] {
        for (at, _) in code.match_indices(prefix) {
            let rest = &code[at + prefix.len()..];
            let rest = rest.strip_prefix("super::").unwrap_or(rest);
            let word: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if modules.contains(&*word) || word == "Worker" {
                found.insert(word);
            } else if rest.starts_with('{') && rest[..rest.find('}').unwrap_or(0)].contains("Worker") {
                found.insert("Worker".to_owned());
            }
        }
    }
    found
}

/// Returns the violations in these files.
fn violations(files: &BTreeMap<String, String>, worker: &[(&str, Sees)], owners: &[(&str, &[&str])]) -> Vec<String> {
    let mut wrong = Vec::new();
    let modules: BTreeSet<&str> = files
        .keys()
        .map(|name| name.trim_end_matches("/mod.rs").trim_end_matches(".rs").split('/').next().unwrap_or_default())
        .collect();
    for (name, code) in files {
        if let Some((_, may)) = worker.iter().find(|(file, _)| file == name) {
            let does = sees(code);
            if does != *may {
                wrong.push(format!(
                    "{name} accesses {does:?} of clients and links; its row in WORKER allows {may:?}. Move the method, or narrow the row"
                ));
            }
        } else if let Some((_, may)) = owners.iter().find(|(file, _)| file == name) {
            let uses = imports(code, &modules);
            for module in uses.iter().filter(|module| !may.contains(&module.as_str())) {
                wrong.push(format!(
                    "{name} names {module}; its row in OWNERS does not. An owner gets what it needs as an argument"
                ));
            }
            for module in may.iter().filter(|module| !uses.contains(**module)) {
                wrong.push(format!("{name} does not name {module} any more: take it out of its row in OWNERS"));
            }
        } else {
            wrong.push(format!("{name} has no row: add one to WORKER, where it has methods of Worker, or to OWNERS"));
        }
        let makes = code.contains("Request::of_ours(");
        if makes && !WITHOUT_KEYS.contains(&name.as_str()) {
            wrong.push(format!(
                "{name} makes a request without keys: let it pass the seam (Worker::pass), or add it to WITHOUT_KEYS"
            ));
        }
    }
    let known = worker.iter().map(|(file, _)| *file).chain(owners.iter().map(|(file, _)| *file));
    wrong.extend(
        known.filter(|file| !files.contains_key(*file)).map(|file| format!("{file} is gone: take its row out")),
    );
    wrong
}

#[test]
fn worker_files_access_only_their_layers() {
    let wrong = violations(&files(), WORKER, OWNERS);
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn files_that_see_too_much_are_found() {
    let files = |name: &str, code: &str| {
        BTreeMap::from([(name.to_owned(), code.to_owned()), ("links.rs".to_owned(), String::new())])
    };
    let owners: &[(&str, &[&str])] = &[("links.rs", &[])];
    for (code, is_wrong) in [
        ("impl Worker { fn f(&mut self) { self.clients.get(h); } }", false),
        ("impl Worker { fn f(&mut self) { self.clients\n  .get(h); self\n.links.get(h); } }", true),
        ("impl Worker { fn f(&mut self) { self.clients_max; } }", true),
        ("impl Worker { fn f(&mut self) { self.clients.get(h); Request::of_ours(b); } }", true),
    ] {
        assert_eq!(!violations(&files("a.rs", code), &[("a.rs", Clients)], owners).is_empty(), is_wrong, "{code}");
    }
    for (code, is_wrong) in [("use super::links::Links;", false), ("use super::{Stall, Worker};", true), ("", true)] {
        let owners: &[(&str, &[&str])] = &[("links.rs", &[]), ("a.rs", &["links"])];
        assert_eq!(!violations(&files("a.rs", code), &[], owners).is_empty(), is_wrong, "{code}");
    }
    assert_eq!(violations(&files("a.rs", ""), &[], owners).len(), 1, "a file without a row");
}

#[test]
fn the_worker_itself_does_not_grow() {
    let (mut methods, mut fields) = (0, 0);
    for code in files().values() {
        for (at, _) in code.match_indices("impl Worker {\n") {
            let body = &code[at..];
            let body = &body[..body.find("\n}").unwrap_or(body.len())];
            methods += body
                .lines()
                .filter(|line| line.starts_with("    ") && !line.starts_with("     ") && line.contains("fn "))
                .count();
        }
        if let Some(at) = code.find("struct Worker {\n") {
            let body = &code[at..];
            let body = &body[..body.find("\n}").unwrap_or(body.len())];
            fields += body.lines().filter(|line| line.starts_with("    ") && line.trim_end().ends_with(',')).count();
        }
    }
    assert!(methods > 100 && fields > 10, "they are found: {methods}, {fields}");
    assert!(
        methods <= METHODS_MAX,
        "Worker has {methods} methods: give the new ones to a type that owns what they need"
    );
    assert!(fields <= FIELDS_MAX, "Worker has {fields} fields: give the new ones to a type of their own");
}
