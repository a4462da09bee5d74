//! `/metrics`, `/healthz`, `/readyz`: what monitoring sees.

use std::collections::BTreeMap;

use crate::support::{NodeOptions, RouterOptions, Site, SiteOptions, http, ok, until};

/// Samples by name with labels, after checking the text format line by line.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut samples = BTreeMap::new();
    let mut types = BTreeMap::new();
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("# ") {
            if let Some(rest) = comment.strip_prefix("TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap_or_else(|| panic!("{line}"));
                assert!(["counter", "gauge", "histogram", "info", "unknown", "summary"].contains(&kind), "{line}");
                assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "declared twice: {line}");
            } else {
                assert!(comment.starts_with("HELP ") || comment.starts_with("UNIT ") || comment == "EOF", "{line}");
            }
            continue;
        }
        assert!(!line.trim().is_empty(), "an empty line");
        let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("{line}"));
        let name = series.split('{').next().expect("a name");
        assert!(name.starts_with("switchyard_") || name.starts_with("process_"), "{line}");
        assert!(name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':'), "{line}");
        assert!(types.keys().any(|declared| name.starts_with(declared.as_str())), "no TYPE for {line}");
        let value: f64 = value.parse().unwrap_or_else(|_| panic!("not a number: {line}"));
        assert!(samples.insert(series.to_owned(), value).is_none(), "twice: {line}");
    }
    samples
}

fn sum(samples: &BTreeMap<String, f64>, name: &str, label: &str) -> f64 {
    samples.iter().filter(|(series, _)| series.split('{').next() == Some(name) && series.contains(label)).map(|(_, v)| v).sum()
}

#[test]
fn metrics_count_what_happens_and_never_name_keys() {
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
    assert!(moved("switchyard_turn_seconds_count", "") > 0.0, "{text}");
    // Histograms add up.
    for (series, value) in &after {
        if let Some((name, labels)) = series.split_once("_bucket{")
            && labels.contains("le=\"+Inf\"")
        {
            let labels = labels.replace(",le=\"+Inf\"", "").replace("le=\"+Inf\",", "").replace("le=\"+Inf\"", "");
            let count = if labels == "}" { format!("{name}_count") } else { format!("{name}_count{{{labels}") };
            assert_eq!(after.get(&count), Some(value), "{series} against {count}");
        }
    }
}

#[test]
fn a_protocol_error_and_a_refused_client_are_counted() {
    let options = SiteOptions {
        router: RouterOptions { config: "[clients]\nmax-clients = 5\n".into(), ..RouterOptions::default() },
        ..SiteOptions::default()
    };
    let Some(site) = Site::router_only(1, &options) else {
        return;
    };
    let count = |name: &str| sum(&parse(&site.router().metrics()), name, "");
    let (errors, rejected) = (count("switchyard_clients_protocol_errors_total"), count("switchyard_clients_rejected_total"));
    let mut bad = site.client();
    bad.write(b"*x\r\n");
    bad.reply().expect_error();
    let crowd: Vec<_> = (0..20).map(|_| site.client()).collect();
    until("both are counted", || {
        let now = (count("switchyard_clients_protocol_errors_total"), count("switchyard_clients_rejected_total"));
        (now.0 >= errors + 1.0 && now.1 >= rejected + 10.0).then_some(())
    });
    drop(crowd);
}

#[test]
fn health_and_readiness_tell_whether_nodes_are_there() {
    let options = SiteOptions {
        router: RouterOptions {
            config: "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"200ms\"\n".into(),
            ..RouterOptions::default()
        },
        node: NodeOptions::default(),
    };
    let Some(mut site) = Site::router_only(2, &options) else {
        return;
    };
    let admin = site.router().admin();
    assert_eq!(http::get(admin, "/healthz").0, 200);
    until("ready", || (http::get(admin, "/readyz").0 == 200).then_some(()));
    let dead = site.nodes()[1].address().to_string();
    site.node_mut(1).kill();
    until("ready in part, and says which node", || {
        let (status, body) = http::get(admin, "/readyz");
        (status == 200 && body.contains(&dead)).then_some(())
    });
    assert_eq!(sum(&parse(&site.router().metrics()), "switchyard_slots_unserved", ""), 8192.0);
    let other = site.nodes()[0].address().to_string();
    site.node_mut(0).kill();
    until("not ready where no slot can be served", || {
        let (status, body) = http::get(admin, "/readyz");
        (status == 503 && body.contains(&dead) && body.contains(&other)).then_some(())
    });
    site.node_mut(0).restart();
    until("ready for half of the keys", || (http::get(admin, "/readyz").0 == 200).then_some(()));
    // Alive is not the same as ready: a restart of the router would not help.
    assert_eq!(http::get(admin, "/healthz").0, 200);
    let metrics = parse(&site.router().metrics());
    assert_eq!(sum(&metrics, "switchyard_node_up", &dead), 0.0);
    site.node_mut(1).restart();
    until("ready again", || (http::get(admin, "/readyz").0 == 200).then_some(()));
    assert_eq!(http::get(admin, "/nosuch").0, 404);
}
