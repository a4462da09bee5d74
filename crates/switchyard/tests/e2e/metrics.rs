//! `/metrics`, `/healthz`, `/readyz`: the interface for monitoring.

use std::collections::BTreeMap;

use crate::clients::{assert_checks_ok, python, run, wanted};
use crate::movectl::{done, names};
use crate::support::process::tied;
use crate::support::{Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, encode, http, ok, until};

/// Checks the text format line by line. Returns the samples by name with labels.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut types = BTreeMap::new();
    let mut help = None;
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            if let Some(rest) = comment.strip_prefix("TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert_eq!(help.take(), Some(name), "no help text: {line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "declared twice: {line}");
            } else {
                let rest = comment.strip_prefix("HELP ").unwrap_or_else(|| panic!("{line}"));
                help = rest.split_once(' ').filter(|(_, text)| !text.is_empty()).map(|(name, _)| name);
            }
            continue;
        }
        assert!(!line.trim().is_empty(), "an empty line");
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let name = series.split('{').next().expect("a name");
        assert!(name.starts_with("switchyard_") || name.starts_with("process_"), "{line}");
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':'), "{line}");
        let of_histogram = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| name.strip_suffix(suffix));
        let is_histogram = of_histogram.and_then(|family| types.get(family)).is_some_and(|kind| kind == "histogram");
        assert!(is_histogram || types.get(name).is_some_and(|kind| kind != "histogram"), "no TYPE for {line}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("not a number: {line}"));
        assert!(samples.insert(series.to_owned(), value).is_none(), "twice: {line}");
    }
    samples
}

fn sum(samples: &BTreeMap<String, f64>, name: &str, label: &str) -> f64 {
    samples
        .iter()
        .filter(|(series, _)| series.split('{').next() == Some(name) && series.contains(label))
        .map(|(_, v)| v)
        .sum()
}

#[test]
fn metrics_count_events_and_never_name_keys() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let before = parse(&site.router().metrics());
    let mut client = site.client();
    for i in 0..500 {
        assert_eq!(client.cmd(&format!("SET secret-key-{i} secret-value-{i}")), ok());
        client.cmd(&format!("GET secret-key-{i}"));
    }
    client.cmd("MGET secret-key-1 secret-key-2 secret-key-3 secret-key-4");
    client.cmd("EVAL \"return 'secret-script'\" 1 secret-key-5");
    client.cmd("LPUSH secret-key-1 x").expect_error();
    client.cmd("secret-command x").expect_error();
    let text = site.router().metrics();
    assert!(!text.contains("secret"), "a key, value or a client's word is in the metrics:\n{text}");
    let after = parse(&text);
    let moved = |name: &str, label: &str| sum(&after, name, label) - sum(&before, name, label);
    assert!(moved("switchyard_commands_total", "") >= 1003.0, "{text}");
    assert!(moved("switchyard_node_requests_total", "") >= 1000.0, "{text}");
    for node in site.nodes() {
        let label = node.address().to_string();
        assert!(moved("switchyard_node_requests_total", &label) >= 100.0, "node {label}:\n{text}");
        assert!(moved("switchyard_node_sent_bytes_total", &label) > 1000.0, "{text}");
        assert!(moved("switchyard_node_received_bytes_total", &label) > 500.0, "{text}");
        assert_eq!(sum(&after, "switchyard_node_up", &label), 1.0, "{text}");
        assert_eq!(sum(&after, "switchyard_node_in_flight", &label), 0.0, "{text}");
    }
    assert!(moved("switchyard_node_errors_total", "") >= 1.0, "{text}");
    assert!(moved("switchyard_node_latency_seconds_count", "") >= 1000.0, "{text}");
    assert!(moved("switchyard_command_latency_seconds_count", "") >= 1000.0, "{text}");
    assert!(moved("switchyard_clients_accepted_total", "") >= 1.0, "{text}");
    assert!(sum(&after, "switchyard_clients", "") >= 1.0, "{text}");
    assert!(moved("switchyard_worker_loop_duration_seconds_count", "") > 0.0, "{text}");
    assert!(moved("switchyard_worker_busy_time_seconds_total", "worker=\"") > 0.0, "{text}");
    assert_eq!(sum(&after, "switchyard_node_slots", ""), 16384.0, "{text}");
    // Histograms end in +Inf, and their counts are consistent.
    let counts = |suffix: &str| {
        after.keys().filter(|series| series.split('{').next().expect("a name").ends_with(suffix)).count()
    };
    let infinite = after.iter().filter(|(series, _)| series.contains("le=\"+Inf\""));
    for (series, value) in infinite.clone() {
        let (name, labels) = series.split_once("_bucket{").expect("a bucket");
        let labels = labels.replace(",le=\"+Inf\"", "").replace("le=\"+Inf\",", "").replace("le=\"+Inf\"", "");
        let count = if labels == "}" { format!("{name}_count") } else { format!("{name}_count{{{labels}") };
        assert_eq!(after.get(&count), Some(value), "{series} against {count}");
    }
    assert!(infinite.count() == counts("_seconds_count") && counts("_seconds_count") >= 5, "{text}");
}

/// Names of the metric families.
fn families(text: &str) -> Vec<String> {
    let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.map(|family| family.split(' ').next().expect("a name").to_owned()).collect()
}

#[test]
fn the_docs_list_exactly_the_existing_metrics() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else {
        return;
    };
    let docs = include_str!("../../../../docs/operations.md");
    let section = docs.split("\n## Metrics").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("the section");
    let rows =
        section.lines().take_while(|line| !line.starts_with("Worth an alert")).filter(|line| line.starts_with("| `"));
    let mut named: Vec<String> = rows
        .flat_map(|row| row.split('|').nth(1).expect("a cell").split('`').skip(1).step_by(2))
        .map(str::to_owned)
        .collect();
    let mut there: Vec<String> = families(&site.router().metrics())
        .into_iter()
        .map(|name| name.strip_prefix("switchyard_").map_or(name.clone(), str::to_owned))
        .collect();
    named.sort();
    there.sort();
    assert_eq!(named, there);
}

fn errors(samples: &BTreeMap<String, f64>) -> BTreeMap<String, f64> {
    let code =
        |series: &str| Some(series.strip_prefix("switchyard_errors_total{code=\"")?.strip_suffix("\"}")?.to_owned());
    samples.iter().filter_map(|(series, value)| Some((code(series)?, *value))).collect()
}

/// Returns INFO's error counts by code.
fn error_counts(client: &mut Client, section: &str) -> BTreeMap<String, f64> {
    let text = client.cmd(&format!("INFO {section}")).text();
    let figure = |line: &str| {
        line.strip_prefix("errorstat_")?.split_once(":count=").map(|(code, count)| (code.to_owned(), count.to_owned()))
    };
    let lines = text.lines().filter_map(figure);
    lines.map(|(code, count)| (code, count.trim().parse().expect("a number"))).collect()
}

#[test]
fn every_error_reply_is_counted_by_its_code() {
    let Some(mut site) = Site::router_only(
        2,
        &SiteOptions::config("[clients]\ncross-slot = \"refuse\"\n[nodes]\nlarge-value = \"256kb\"\n"),
    ) else {
        return;
    };
    let tags = site.tags();
    let before = parse(&site.router().metrics());
    let mut client = site.client();
    assert_eq!(client.cmd("SET {a}string x"), ok());
    let mut expected = BTreeMap::<&str, f64>::new();
    let mut fails = |client: &mut Client, code: &'static str, command: &str| {
        let error = client.cmd(command).expect_error().to_owned();
        assert!(error.starts_with(code), "{command}: {error}");
        *expected.entry(code).or_default() += 1.0;
    };
    // Errors of a node, of the router, of a script.
    fails(&mut client, "WRONGTYPE", "LPUSH {a}string x");
    fails(&mut client, "ERR", "NOSUCHCOMMAND x");
    fails(&mut client, "ERR", "GET");
    fails(&mut client, "CROSSSLOT", "RENAMENX {a}string {b}string");
    fails(&mut client, "NOSCRIPT", "EVALSHA 0123456789012345678901234567890123456789 1 {a}string");
    fails(&mut client, "MINE", "EVAL \"return redis.error_reply('MINE '..string.rep('x', 100))\" 1 {a}string");
    // Long enough to be written directly to the socket, and to be forwarded in pieces.
    fails(&mut client, "LONG", "EVAL \"return redis.error_reply('LONG '..string.rep('x', 50000))\" 1 {a}string");
    fails(&mut client, "LONGEST", "EVAL \"return redis.error_reply('LONGEST '..string.rep('x', 600000))\" 1 {a}string");
    assert_eq!(client.cmd("MULTI"), ok());
    fails(&mut client, "ERR", "NOSUCHCOMMAND");
    fails(&mut client, "EXECABORT", "EXEC");
    // A failed command is not counted as a fast one.
    let served = |site: &Site| sum(&parse(&site.router().metrics()), "switchyard_command_latency_seconds_count", "");
    let answered = served(&site);
    (0..20).for_each(|_| fails(&mut client, "WRONGTYPE", "LPUSH {a}string x"));
    assert_eq!(served(&site), answered);
    // Within the reply to a transaction.
    assert_eq!(client.cmd("MULTI"), ok());
    client.cmd("LPUSH {a}string x");
    client.cmd("GET {a}string");
    client.cmd("EXEC");
    *expected.entry("WRONGTYPE").or_default() += 1.0;
    // A value that looks like an error, in several lengths.
    for length in [5, 50_000, 3_000_000] {
        let value = format!("-MINE {}", "x".repeat(length));
        assert_eq!(client.call(&["SET", "{a}value", &value]), ok());
        assert_eq!(client.cmd("GET {a}value").text(), value);
    }
    // In a pipeline, where replies wait for earlier ones.
    let mut pipeline = Vec::new();
    for round in 0..50 {
        let key = format!("{{{}}}{round}", tags[round % 2][0]);
        pipeline.extend([encode(&["SET", &key, "x"]), encode(&["LPUSH", &key, "x"])].concat());
    }
    client.pipeline(&pipeline, 100);
    *expected.entry("WRONGTYPE").or_default() += 50.0;
    // An error of a client that bypasses the router does not count.
    site.nodes()[0].cmd("NOSUCHCOMMAND").expect_error();
    let expected: BTreeMap<String, f64> = expected.into_iter().map(|(code, count)| (code.to_owned(), count)).collect();
    assert_eq!(error_counts(&mut client, "errorstats"), expected);
    assert_eq!(error_counts(&mut client, "everything"), expected);
    let after = parse(&site.router().metrics());
    assert_eq!(errors(&after), expected);
    let moved = |name: &str| sum(&after, name, "") - sum(&before, name, "");
    let failed = expected.values().sum::<f64>() - 1.0; // without the error within EXEC's reply
    assert_eq!(moved("switchyard_failed_command_latency_seconds_count"), failed);
    // CONFIG RESETSTAT resets INFO, but counters never decrease.
    assert_eq!(client.cmd("CONFIG RESETSTAT"), ok());
    assert_eq!(error_counts(&mut client, "errorstats"), BTreeMap::new());
    assert_eq!(errors(&parse(&site.router().metrics())), expected);
    site.node_mut(0).kill();
    until("the node is down", || {
        client.cmd(&format!("GET {{{}}}", tags[0][0])).error().is_some_and(|e| e.starts_with("NODEDOWN"))
    });
    let downs = error_counts(&mut client, "errorstats").get("NODEDOWN").copied();
    assert!(downs >= Some(1.0), "{downs:?}");
    assert_eq!(errors(&parse(&site.router().metrics())).get("NODEDOWN").copied(), downs);
}

fn openmetrics(site: &Site) -> String {
    http::get_as(site.router().admin(), "/metrics", "application/openmetrics-text;version=1.0.0").1
}

#[test]
fn both_formats_have_the_same_series_and_promtool_accepts_classic() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    assert_eq!(client.cmd("SET key x"), ok());
    client.cmd("LPUSH key x").expect_error();
    client.cmd("MGET a b c d");
    let series = |page: &str| -> Vec<String> {
        let samples = page.lines().filter(|line| !line.starts_with('#'));
        // Buckets appear with their first observation.
        let steady =
            samples.filter_map(|line| line.rsplit_once(' ')).filter(|(series, _)| !series.contains("_bucket{"));
        steady.map(|(series, _)| series.to_owned()).collect()
    };
    until("both formats have the same series", || series(&site.router().metrics()) == series(&openmetrics(&site)));
    let (classic, open) = (site.router().metrics(), openmetrics(&site));
    assert!(parse(&classic).contains_key("switchyard_topology_epoch"));
    assert!(open.ends_with("# EOF\n") && open.contains("# TYPE switchyard_build info\n"), "{open}");
    assert!(classic.contains("# TYPE switchyard_build_info gauge\n"), "{classic}");
    assert!(classic.contains("metrics_version=\"1\"} 1\n"), "{classic}");
    if std::process::Command::new("promtool").arg("--version").output().is_err() {
        eprintln!("left out: promtool is not there; `parse` has made its most important checks");
        return;
    }
    let folder = tempfile::TempDir::new().expect("a folder");
    let page = folder.path().join("page");
    std::fs::write(&page, classic).expect("written");
    let mut check = tied("promtool");
    check.args(["check", "metrics"]).stdin(std::fs::File::open(page).expect("the page"));
    let checked = check.output().expect("it runs");
    assert!(
        checked.status.success(),
        "{}{}",
        String::from_utf8_lossy(&checked.stdout),
        String::from_utf8_lossy(&checked.stderr)
    );
}

#[test]
fn prometheus_client_library_parses_the_page_and_counters_only_grow() {
    if !wanted(&[("python3", "python3 python3-venv")]) {
        return;
    }
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let (source, packages) = python();
    let folder = tempfile::TempDir::new().expect("a folder");
    let mut client = site.client();
    let mut work = |site: &Site| {
        for i in 0..200 {
            assert_eq!(client.cmd(&format!("SET key:{i} x")), ok());
            client.cmd(&format!("MGET key:{i} key:{}", i + 1));
            client.cmd("EVAL \"return 1\" 1 k");
            client.cmd(&format!("LPUSH key:{i} x")).expect_error();
        }
        let names = names(site);
        done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[0], names[1]));
        done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[1], names[0]));
    };
    let keep = |site: &Site, name: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, openmetrics(site)).expect("written");
        path
    };
    work(&site);
    let earlier = keep(&site, "earlier");
    work(&site);
    let later = keep(&site, "later");
    let mut check = tied("python3");
    check.arg("-B").arg(source.join("metrics.py")).arg(earlier).arg(later).env("PYTHONPATH", packages);
    assert_checks_ok("Prometheus's client library", &run("metrics.py", &mut check));
}

#[test]
fn protocol_errors_and_refused_clients_are_counted() {
    let Some(site) = Site::router_only(1, &SiteOptions::config("[clients]\nmax-clients = 5\n")) else {
        return;
    };
    let count = |name: &str| sum(&parse(&site.router().metrics()), name, "");
    let (errors, rejected) =
        (count("switchyard_clients_protocol_errors_total"), count("switchyard_clients_rejected_total"));
    let mut bad = site.client();
    bad.write(b"*x\r\n");
    bad.reply().expect_error();
    let crowd: Vec<_> = (0..20).map(|_| site.client()).collect();
    until("both are counted", || {
        let now = (count("switchyard_clients_protocol_errors_total"), count("switchyard_clients_rejected_total"));
        now.0 >= errors + 1.0 && now.1 >= rejected + 10.0
    });
    drop(crowd);
}

#[test]
fn health_and_readiness_depend_on_nodes() {
    let options = SiteOptions {
        router: RouterOptions::config(
            "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"200ms\"\n",
        ),
        node: NodeOptions::default(),
    };
    let Some(mut site) = Site::router_only(2, &options) else {
        return;
    };
    let admin = site.router().admin();
    assert_eq!(http::get(admin, "/healthz").0, 200);
    until("ready", || http::get(admin, "/readyz").0 == 200);
    let checked = || {
        let mut check = tied(env!("CARGO_BIN_EXE_switchyard"));
        check.args(["status", "--check", "--admin", &admin.to_string()]).output().expect("it runs").status.code()
    };
    until("healthy", || checked() == Some(0));
    let dead = site.nodes()[1].address().to_string();
    site.node_mut(1).kill();
    until("partly ready, with the name of the node", || {
        let (status, body) = http::get(admin, "/readyz");
        status == 200 && body.contains(&dead)
    });
    assert_eq!(sum(&parse(&site.router().metrics()), "switchyard_slots_unserved", ""), 8192.0);
    assert_eq!(checked(), Some(2));
    let other = site.nodes()[0].address().to_string();
    site.node_mut(0).kill();
    until("not ready where no slot can be served", || {
        let (status, body) = http::get(admin, "/readyz");
        status == 503 && body.contains(&dead) && body.contains(&other)
    });
    site.node_mut(0).restart();
    until("ready for half of the keys", || http::get(admin, "/readyz").0 == 200);
    // Liveness is not readiness: a restart of the router would not help.
    assert_eq!(http::get(admin, "/healthz").0, 200);
    let metrics = parse(&site.router().metrics());
    assert_eq!(sum(&metrics, "switchyard_node_up", &dead), 0.0);
    site.node_mut(1).restart();
    until("ready again", || http::get(admin, "/readyz").0 == 200);
    assert_eq!(http::get(admin, "/nosuch").0, 404);
}

#[test]
fn counters_of_a_node_continue_when_it_rejoins() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let third = Node::start(&NodeOptions::default());
    let name = third.address().to_string();
    // Before it joins, and after each join.
    let counters = || {
        let samples = parse(&site.router().metrics());
        let total = |name: &str| {
            ["_total", "_count", "_sum"].iter().any(|end| name.ends_with(end)) || name.ends_with("_bucket")
        };
        let of_node = samples
            .into_iter()
            .filter(|(series, _)| series.contains(&name) && total(series.split('{').next().expect("a name")));
        of_node.collect::<BTreeMap<String, f64>>()
    };
    let mut before = BTreeMap::new();
    for round in 0..3 {
        done(site.router(), &format!("nodes add {name} --rebalance --wait"));
        let mut client = site.client();
        for i in 0..200 / (round + 1) {
            assert_eq!(client.cmd(&format!("SET key:{i} value")), ok());
        }
        done(site.router(), &format!("nodes drain {name} --wait"));
        let after = counters();
        assert!(after[&format!("switchyard_node_sent_bytes_total{{node=\"{name}\"}}")] > 0.0, "{after:?}");
        for (series, value) in &before {
            assert!(
                after.get(series).is_some_and(|now| now >= value),
                "{series} was {value}, and is {:?}",
                after.get(series)
            );
        }
        before = after;
        done(site.router(), &format!("nodes remove {name}"));
    }
}
