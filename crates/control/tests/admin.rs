//! The admin port over real connections: responses, access rights and refusals.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use switchyard_control::admin::{
    Access, Admin, AdminAccess, AdminError, AdminOptions, AutomationState, LinkReport, NodeReport, NodesReport,
    Operation, OperationError, Source, StatusReport, Token, Warning,
};
use tokio::sync::oneshot;

/// A source with responses set by the test.
struct Fake(Mutex<(StatusReport, String)>);

impl Source for Fake {
    fn accept(&self, node: &str) -> Result<(), OperationError> {
        let mut fake = self.0.lock().expect("not poisoned");
        if !fake.0.nodes.iter().any(|known| known.address == node) {
            return Err(OperationError::Invalid(format!("there is no node {node}")));
        }
        if fake.1.starts_with("accepted") {
            return Err(OperationError::Conflict("nothing of it waits to be accepted".to_owned()));
        }
        fake.1 = format!("accepted {node}");
        Ok(())
    }

    fn status(&self) -> StatusReport {
        self.0.lock().expect("not poisoned").0.clone()
    }

    fn metrics(&self) -> String {
        let text = self.0.lock().expect("not poisoned").1.clone();
        assert_ne!(text, "panic", "requested by the test");
        text
    }

    /// Returns the operation as text.
    fn operate(&self, operation: Operation, who: &str) -> Result<Value, OperationError> {
        assert!(who.contains("127.0.0.1:"), "{who}");
        match operation {
            Operation::RemoveNode(request) => {
                Err(OperationError::Conflict(format!("{} still owns slots", request.address)))
            }
            operation => Ok(json!({ "asked": format!("{operation:?}") })),
        }
    }
}

fn node(id: u16, link: LinkReport, slots: u64) -> NodeReport {
    NodeReport {
        id,
        address: format!("10.0.0.{id}:6379"),
        link,
        run_id: Some("ab12".repeat(10)),
        version: Some("redis 7.0.15".into()),
        slots,
        drained: false,
        ejected: None,
        overrides: 0,
        requests: 5,
        errors: 1,
        in_flight: 2,
        primary: None,
        replicas: Vec::new(),
        resolved: None,
        silence: None,
        refuses_writes: None,
    }
}

/// An admin port in a separate thread, stopped when dropped.
struct Running {
    address: SocketAddr,
    fake: Arc<Fake>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Options with a configured token, or with a generated one.
fn options(token: Option<&str>, host_names: &[&str]) -> AdminOptions {
    let access = match token {
        Some(text) => Access::Given(Token::new(text).expect("a token")),
        None => Access::Made { token: Token::new("made").expect("a token"), file: "/state/admin-token".into() },
    };
    AdminOptions {
        access: AdminAccess::new(access),
        host_names: host_names.iter().map(|&name| name.to_owned()).collect(),
        tls: None,
    }
}

fn start(options: AdminOptions) -> Running {
    let status = StatusReport {
        version: "0.1.0".into(),
        incarnation: 3,
        epoch: 7,
        uptime_seconds: 1.5,
        draining: false,
        clients: 4,
        commands: 99,
        nodes: vec![node(0, LinkReport::Up, 16384), node(1, LinkReport::Connecting, 0)],
        warnings: Vec::new(),
        limited: Vec::new(),
        stopped_threads: Vec::new(),
        automation: Vec::new(),
        standby: None,
    };
    let fake = Arc::new(Fake(Mutex::new((status, "a_total 1\n# EOF\n".into()))));
    let source = Arc::clone(&fake);
    let (stop, stopped) = oneshot::channel();
    let (bound, address) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
            let admin = Admin::bind(any_port, options).await.expect("bound");
            bound.send(admin.address()).expect("the test waits");
            let shutdown = async {
                let _ = stopped.await;
            };
            admin.serve(source, shutdown).await.expect("served");
        });
    });
    let address = address.recv().expect("an address");
    Running { address, fake, stop: Some(stop), thread: Some(thread) }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Answer {
    status: u16,
    /// Headers in lower case.
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        assert!(self.head.contains("\r\ncontent-type: application/json\r\n"), "{}", self.head);
        serde_json::from_str(&self.body).expect("JSON")
    }
}

impl Running {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
        stream
    }

    /// Sends a request of these lines and reads the whole response.
    fn send(&self, lines: &[&str]) -> Answer {
        let mut stream = self.connect();
        let request = format!("{}\r\nConnection: close\r\n\r\n", lines.join("\r\n"));
        stream.write_all(request.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        Answer { status, head: format!("{}\r\n", head.to_lowercase()), body: body.to_owned() }
    }

    fn get(&self, path: &str) -> Answer {
        self.send(&[&format!("GET {path} HTTP/1.1"), &format!("Host: {}", self.address)])
    }

    fn post(&self, path: &str, more: &[&str], body: &str) -> Answer {
        let mut lines = vec![format!("POST {path} HTTP/1.1"), format!("Host: {}", self.address)];
        lines.push(format!("Content-Length: {}", body.len()));
        lines.extend(more.iter().map(|line| (*line).to_owned()));
        let mut stream = self.connect();
        let request = format!("{}\r\nConnection: close\r\n\r\n{body}", lines.join("\r\n"));
        stream.write_all(request.as_bytes()).expect("sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
        Answer { status, head: format!("{}\r\n", head.to_lowercase()), body: body.to_owned() }
    }

    fn change(&self, change: impl FnOnce(&mut (StatusReport, String))) {
        change(&mut self.fake.0.lock().expect("not poisoned"));
    }
}

#[test]
fn accepting_a_node_needs_post_and_rights() {
    let running = start(options(Some("t0ken"), &[]));
    let accepted = || running.fake.metrics() == "accepted 10.0.0.1:6379";
    let host = format!("Host: {}", running.address);
    let ask = |method: &str, node: &str, more: &[&str]| {
        let first = format!("{method} /api/v1/nodes/{node}/accept HTTP/1.1");
        running.send(&[&[first.as_str(), &host, "Content-Length: 0"], more].concat())
    };
    let token = "Authorization: Bearer t0ken";
    assert_eq!(ask("POST", "10.0.0.1:6379", &[]).status, 401);
    assert_eq!(ask("POST", "10.0.0.1:6379", &["Authorization: Bearer other"]).status, 401);
    assert_eq!(ask("POST", "10.0.0.1:6379", &[token, "Origin: http://evil.example"]).status, 403);
    let wrong_host =
        ["POST /api/v1/nodes/10.0.0.1:6379/accept HTTP/1.1", "Host: evil.example", "Content-Length: 0", token];
    assert_eq!(running.send(&wrong_host).status, 421);
    let read = ask("GET", "10.0.0.1:6379", &[token]);
    assert_eq!((read.status, read.json()["error"].as_str()), (405, Some("this path changes something: use POST")));
    let unknown = ask("POST", "10.9.9.9:1", &[token]);
    assert_eq!(unknown.status, 404);
    assert!(unknown.json()["error"].as_str().is_some_and(|e| e.contains("10.9.9.9:1")), "{}", unknown.body);
    assert!(!accepted());
    let done = ask("POST", "10.0.0.1%3A6379", &[token]);
    assert_eq!((done.status, done.json()), (200, json!({"accepted": "10.0.0.1:6379"})));
    assert!(accepted());
    let again = ask("POST", "10.0.0.1:6379", &[token]);
    assert_eq!((again.status, again.json()["error"].as_str()), (409, Some("nothing of it waits to be accepted")));
}

#[test]
fn status_and_nodes() {
    let running = start(options(None, &[]));
    let status = running.get("/api/v1/status");
    assert_eq!(status.status, 200);
    let body = status.json();
    assert_eq!(body["ready"], true);
    let report: StatusReport = serde_json::from_value(body).expect("a report");
    assert_eq!(report, running.fake.status());

    let nodes = running.get("/api/v1/nodes").json();
    assert_eq!(
        nodes["nodes"][0],
        json!({
            "id": 0, "address": "10.0.0.0:6379", "link": {"state": "up"}, "run_id": "ab12".repeat(10),
            "version": "redis 7.0.15", "slots": 16384, "drained": false, "overrides": 0, "requests": 5, "errors": 1, "in_flight": 2,
        })
    );
    assert_eq!(nodes["nodes"][1]["link"], json!({"state": "connecting"}));
    let report: NodesReport = serde_json::from_value(nodes).expect("a report");
    assert_eq!((report.epoch, report.nodes.len()), (7, 2));

    running.change(|(status, _)| {
        status.nodes[0].link = LinkReport::Down { reason: "refused".into() };
    });
    let nodes = running.get("/api/v1/nodes").json();
    assert_eq!(nodes["nodes"][0]["link"], json!({"state": "down", "reason": "refused"}));
    assert_eq!(running.get("/api/v1/status").json()["ready"], false);
}

#[test]
fn metrics_are_classic_unless_openmetrics_is_requested() {
    let running = start(options(None, &[]));
    running.change(|(_, metrics)| *metrics = "# TYPE a counter\na_total 1\n# EOF\n".into());
    let get = |more: &[&str]| running.send(&[&["GET /metrics HTTP/1.1", "Host: localhost"], more].concat());
    for accept in [&[][..], &["Accept: text/plain;version=0.0.4"]] {
        let classic = get(accept);
        assert_eq!((classic.status, classic.body.as_str()), (200, "# TYPE a_total counter\na_total 1\n"));
        let kind = "\r\ncontent-type: text/plain; version=0.0.4; charset=utf-8\r\n";
        assert!(classic.head.contains(kind) && classic.head.contains("\r\nvary: accept\r\n"), "{}", classic.head);
    }
    let open = get(&["Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"]);
    assert_eq!((open.status, open.body.as_str()), (200, "# TYPE a counter\na_total 1\n# EOF\n"));
    let kind = "\r\ncontent-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n";
    assert!(open.head.contains(kind), "{}", open.head);
}

#[test]
fn health_and_readiness() {
    let running = start(options(None, &[]));
    assert_eq!(running.get("/healthz").status, 200);
    let ready = running.get("/readyz");
    assert_eq!((ready.status, ready.body.as_str()), (200, "ready\n"), "node 1 has no slots");

    running.change(|(status, _)| status.stopped_threads = vec!["the thread planner has stopped".to_owned()]);
    let ready = running.get("/readyz");
    assert_eq!(
        (ready.status, ready.body.as_str()),
        (200, "ready\nthe thread planner has stopped\n"),
        "clients are served as before"
    );
    let status = running.get("/api/v1/status").body;
    assert!(
        status.contains(r#""ready":true,"whole":true"#) && status.contains("the thread planner has stopped"),
        "{status}"
    );
    running.change(|(status, _)| {
        status.stopped_threads.clear();
        let state = |name: &str, rests: Option<&str>| AutomationState {
            name: name.to_owned(),
            mode: "on".to_owned(),
            rests: rests.map(Into::into),
        };
        status.automation = vec![state("planner", Some("3 decisions have failed")), state("autoscaler", None)];
    });
    let ready = running.get("/readyz");
    assert_eq!((ready.status, ready.body.as_str()), (200, "ready\nthe planner is paused: 3 decisions have failed\n"));
    running.change(|(status, _)| status.automation.clear());

    running.change(|(status, _)| {
        status.nodes = vec![
            node(0, LinkReport::Up, 5000),
            node(1, LinkReport::Down { reason: "connection refused".into() }, 5000),
            NodeReport { run_id: None, ..node(2, LinkReport::Connecting, 6384) },
            node(3, LinkReport::Down { reason: "idle".into() }, 0),
        ];
    });
    let ready = running.get("/readyz");
    assert_eq!(ready.status, 503);
    assert_eq!(
        ready.body,
        "not ready\nnode 10.0.0.1:6379 (5000 slots): connection refused\nnode 10.0.0.2:6379 (6384 slots): connecting\n"
    );
    assert_eq!(running.get("/healthz").status, 200, "alive all the same");

    // Clients of other nodes' keys are still served.
    running.change(|(status, _)| {
        status.nodes[2].link = LinkReport::Down { reason: "timed out".into() };
        status.warnings = vec![Warning { id: Some(3), slots: 20, what: "move 3 waits for 10.0.0.9:6379".into() }];
    });
    let ready = running.get("/readyz");
    assert_eq!(ready.status, 200);
    assert_eq!(
        ready.body,
        "ready\nnode 10.0.0.1:6379 (5000 slots): connection refused\nnode 10.0.0.2:6379 (6384 slots): timed out\nmove 3 waits for 10.0.0.9:6379\n"
    );
    let status = running.get("/api/v1/status").body;
    assert!(status.contains(r#""ready":true,"whole":false,"slots_unserved":11384"#), "{status}");
    running.change(|(status, _)| status.nodes[0].link = LinkReport::Down { reason: "timed out".into() });
    assert_eq!(running.get("/readyz").status, 503, "no slot can be served");

    running.change(|(status, _)| {
        status.nodes.clear();
        status.draining = true;
    });
    let ready = running.get("/readyz");
    assert_eq!(ready.status, 503);
    assert!(ready.body.contains("draining"), "{}", ready.body);
}

#[test]
fn the_start_page_lists_all_paths() {
    let running = start(options(None, &[]));
    let page = running.get("/");
    assert_eq!(page.status, 200);
    assert!(page.head.contains("\r\ncontent-type: text/html; charset=utf-8\r\n"), "{}", page.head);
    for shown in [
        "<meta name=\"viewport\"",
        "<title>Switchyard: ready</title>",
        "<h2>Nodes</h2>",
        "<td>10.0.0.0:6379</td><td class=\"n\">16384</td><td>up</td>",
        "<td>10.0.0.1:6379</td><td class=\"n\">0</td><td>connecting</td>",
        "None is in progress.",
        "$(cat /state/admin-token)",
    ] {
        assert!(page.body.contains(shown), "{shown}: {}", page.body);
    }
    assert!(
        page.head.contains("\r\ncontent-security-policy: default-src 'none'; style-src 'unsafe-inline'"),
        "{}",
        page.head
    );
    let paths: Vec<&str> = page.body.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
    assert!(paths.contains(&"/metrics") && paths.contains(&"/api/v1/nodes"), "{paths:?}");
    for path in paths {
        let answer = running.get(path);
        assert_eq!(answer.status, 200, "{path}");
        for header in ["cache-control: no-store", "x-content-type-options: nosniff"] {
            assert!(answer.head.contains(&format!("\r\n{header}\r\n")), "{path}: {}", answer.head);
        }
    }
}

#[test]
fn other_paths_and_methods() {
    let running = start(options(None, &[]));
    let answer = running.get("/metric");
    assert_eq!(answer.status, 404);
    assert!(answer.body.contains("/metrics"), "{}", answer.body);
    let answer = running.get("/api/v1/node");
    assert_eq!(answer.status, 404);
    assert!(answer.json()["error"].as_str().is_some_and(|text| text.contains("/api/v1/nodes")));
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let answer = running.send(&[
            &format!("{method} /api/v1/status HTTP/1.1"),
            "Host: localhost",
            "Authorization: Bearer made",
        ]);
        assert_eq!(answer.status, 405, "{method}");
        assert!(answer.head.contains("\r\nallow: get,head\r\n"), "{}", answer.head);
    }
    let answer = running.send(&["HEAD /healthz HTTP/1.1", "Host: localhost"]);
    assert_eq!((answer.status, answer.body.as_str()), (200, ""));
}

#[test]
fn changes_need_post() {
    let running = start(options(None, &[]));
    let token = "Authorization: Bearer made";
    let json_type = &["Content-Type: application/json", token][..];
    let asked = |answer: &Answer| answer.json()["asked"].as_str().expect("a text").to_owned();
    let begun = running.post(
        "/api/v1/moves",
        json_type,
        r#"{"from":"a:1","to":"b:1","slots":"0-5","goal":"fast","max_rate":1000}"#,
    );
    assert_eq!(begun.status, 200, "{}", begun.body);
    let text = asked(&begun);
    assert!(
        text.contains(r#"slots: Some("0-5")"#)
            && text.contains(r#"goal: Some("fast")"#)
            && text.contains("max_rate: Some(1000)"),
        "{text}"
    );
    for wrong in [r#"{"to":1}"#, r#"{"from":"a:1","to":"b:1","slot":"0-5"}"#, "{", r#"{"from":1,"to":"b:1"}"#] {
        let answer = running.post("/api/v1/moves", json_type, wrong);
        assert!(matches!(answer.status, 400 | 422), "{wrong}: {}", answer.status);
        assert!(answer.json()["error"].is_string(), "{wrong}");
    }
    // Our own wording instead of the library's.
    for (path, wrong, said) in [
        ("/api/v1/moves", r#"{"frm":"a:1","to":"b:1"}"#, "unknown field `frm`"),
        ("/api/v1/moves/7/goal", r#"{"gaol":"fast"}"#, "unknown field `gaol`; it takes: `goal`"),
        ("/api/v1/moves/7/goal", "{}", "missing field `goal`"),
    ] {
        assert_eq!(running.post(path, json_type, wrong).json()["error"], said);
    }
    assert_eq!(
        running.post("/api/v1/moves", &[token], r#"{"from":"a:1","to":"b:1"}"#).status,
        415,
        "pages of others can send forms, not JSON"
    );
    for (verb, what) in
        [("pause", "Pause"), ("resume", "Resume"), ("abort", "Abort(AbortRequest { abandon: None, dry_run: false })")]
    {
        assert_eq!(
            asked(&running.post(&format!("/api/v1/moves/7/{verb}"), &[token], "")),
            format!("Steer {{ id: 7, what: {what} }}")
        );
    }
    let goal = running.post("/api/v1/moves/7/goal", json_type, r#"{"goal":"fast"}"#);
    assert_eq!(asked(&goal), r#"Steer { id: 7, what: Goal("fast") }"#);
    for (rate, what) in [("null", "None"), ("5000", "Some(5000)")] {
        let given = running.post("/api/v1/moves/7/max-rate", json_type, &format!("{{\"max_rate\":{rate}}}"));
        assert_eq!(asked(&given), format!("Steer {{ id: 7, what: MaxRate({what}) }}"));
    }
    assert!(matches!(running.post("/api/v1/moves/7/goal", json_type, "{}").status, 400 | 422));
    assert_eq!(running.post("/api/v1/moves/x/pause", &[token], "").status, 400);
    let drained = running.post("/api/v1/nodes/10.0.0.1:6379/drain", json_type, r#"{"goal":"gentle"}"#);
    assert!(
        asked(&drained).contains(r#"address: "10.0.0.1:6379""#) && asked(&drained).contains("gentle"),
        "{}",
        drained.body
    );
    let refused = running.post("/api/v1/nodes/10.0.0.1:6379/remove", &[token], "");
    assert_eq!((refused.status, refused.json()["error"].as_str()), (409, Some("10.0.0.1:6379 still owns slots")));
    assert!(asked(&running.post("/api/v1/balance", &[token], "")).contains("dry_run: false"));
    assert!(asked(&running.post("/api/v1/balance", json_type, r#"{"dry_run":true}"#)).contains("dry_run: true"));
    assert!(
        asked(&running.post("/api/v1/nodes", json_type, r#"{"address":"c:1","rebalance":true}"#))
            .contains("rebalance: true")
    );

    let foreign = running.post("/api/v1/moves/7/abort", &["Origin: http://evil.example"], "");
    assert_eq!(foreign.status, 403);
    assert_eq!(running.get("/api/v1/moves/7/abort").status, 405, "nothing changes by GET");
    // Changes also need a token. The response names the file of a generated token.
    for path in [
        "/api/v1/moves",
        "/api/v1/moves/7/abort",
        "/api/v1/nodes",
        "/api/v1/nodes/a:1/drain",
        "/api/v1/nodes/a:1/accept",
        "/api/v1/balance",
    ] {
        let refused = running.post(path, &["Content-Type: application/json"], "{}");
        assert_eq!(refused.status, 401, "{path}");
        assert!(refused.json()["error"].as_str().is_some_and(|e| e.contains("/state/admin-token")), "{}", refused.body);
    }
    assert_eq!(running.get("/api/v1/token").json(), json!({"file": "/state/admin-token"}));
    let guarded = start(options(Some("s3cret"), &[]));
    assert_eq!(guarded.post("/api/v1/moves/7/abort", &[], "").status, 401);
    assert_eq!(guarded.post("/api/v1/moves/7/abort", &["Authorization: Bearer s3cret"], "").status, 200);
    assert_eq!(guarded.get("/api/v1/token").json(), json!({"file": null}));
}

/// The command line never sends the token to a listener, but proves possession.
#[test]
fn a_proof_replaces_the_generated_token() {
    let running = start(options(None, &[]));
    let token = Token::new("made").expect("a token");
    let (path, body) = ("/api/v1/moves/7/goal", r#"{"goal":"fast"}"#);
    let post = |path: &str, proof: &str, body: &str| {
        running.post(path, &["Content-Type: application/json", &format!("Authorization: {proof}")], body)
    };
    let proof = token.prove(running.address, "POST", path, body.as_bytes()).expect("a proof");
    assert_eq!(post(path, &proof, r#"{"goal":"gentle"}"#).status, 401, "of another body");
    assert_eq!(post("/api/v1/moves/8/goal", &proof, body).status, 401, "of another path");
    let done = post(path, &proof, body);
    assert_eq!((done.status, done.json()["asked"].as_str()), (200, Some(r#"Steer { id: 7, what: Goal("fast") }"#)));
    assert_eq!(post(path, &proof, body).status, 401, "a second time");
    let elsewhere = SocketAddr::from(([127, 0, 0, 1], running.address.port() ^ 1));
    assert_eq!(
        post(path, &token.prove(elsewhere, "POST", path, body.as_bytes()).expect("a proof"), body).status,
        401,
        "for another router"
    );
}

#[test]
fn a_new_token_applies_from_the_next_request() {
    let options = options(Some("first"), &[]);
    let access = options.access.clone();
    let running = start(options);
    let abort =
        |token: &str| running.post("/api/v1/moves/7/abort", &[&format!("Authorization: Bearer {token}")], "").status;
    assert_eq!((abort("first"), abort("second")), (200, 401));
    access.renew(Access::Given(Token::new("second").expect("a token")));
    assert_eq!((abort("first"), abort("second")), (401, 200));
    access.renew(Access::Made { token: Token::new("third").expect("a token"), file: "/f".into() });
    assert_eq!((abort("second"), abort("third")), (401, 200));
    assert_eq!(running.get("/api/v1/status").status, 200, "reading needs no token that was made");
    access.renew(Access::ReadOnly { why: "the disk is full".to_owned() });
    assert_eq!((abort("second"), abort("third")), (503, 503));
    let refused = running.post("/api/v1/moves/7/abort", &[], "");
    assert!(refused.status == 503 && refused.body.contains("the disk is full"), "{}", refused.body);
    assert_eq!(running.get("/api/v1/status").status, 200, "no token could be required");
}

#[test]
fn foreign_host_names_are_refused() {
    let running = start(options(None, &["router-1.example"]));
    for host in ["localhost:6381", "127.0.0.1", "[::1]:6381", "Router-1.example:6381"] {
        let answer = running.send(&["GET /api/v1/status HTTP/1.1", &format!("Host: {host}")]);
        assert_eq!(answer.status, 200, "{host}");
    }
    for path in ["/", "/metrics", "/readyz", "/healthz", "/nothing"] {
        let answer = running.send(&[&format!("GET {path} HTTP/1.1"), "Host: evil.example:6381"]);
        assert_eq!(answer.status, 421, "{path}");
        assert!(answer.body.contains("\"evil.example\" is not a host name"), "{}", answer.body);
    }
    // The host in the request line counts, and a second header cannot hide it.
    let lines = ["GET http://evil.example/metrics HTTP/1.1", "Host: localhost"];
    assert_eq!(running.send(&lines).status, 421);
    let lines = ["GET /metrics HTTP/1.1", "Host: localhost", "Host: evil.example"];
    assert_eq!(running.send(&lines).status, 400);
    assert_eq!(running.send(&["GET /metrics HTTP/1.1"]).status, 400);
    assert_eq!(running.send(&["GET /metrics HTTP/1.1", "Host: a b"]).status, 400);
}

#[test]
fn all_requests_except_probes_need_the_token() {
    let running = start(options(Some("s3cret"), &[]));
    let with = |path: &str, value: &str| {
        let request = format!("GET {path} HTTP/1.1");
        running.send(&[&request, "Host: localhost", &format!("Authorization: {value}")])
    };
    for path in ["/", "/metrics", "/api/v1/status", "/api/v1/nodes", "/nothing"] {
        let without = running.get(path);
        assert_eq!(without.status, 401, "{path}");
        assert!(without.head.contains("\r\nwww-authenticate: bearer"), "{}", without.head);
        for wrong in ["Bearer s3cre", "Bearer s3crets", "Bearer", "Basic s3cret", "s3cret", ""] {
            assert_eq!(with(path, wrong).status, 401, "{path} {wrong}");
        }
        assert_ne!(with(path, "Bearer s3cret").status, 401, "{path}");
    }
    assert_eq!(with("/metrics", "bearer  s3cret").status, 200, "schemes have no case");

    assert_eq!(running.get("/healthz").status, 200);
    running.change(|(status, _)| {
        status.nodes[0].link = LinkReport::Down { reason: "refused".into() };
    });
    let probe = running.get("/readyz");
    assert_eq!((probe.status, probe.body.as_str()), (503, "not ready\n"), "strangers learn no names");
    assert!(with("/readyz", "Bearer s3cret").body.contains("10.0.0.0:6379"));
}

#[test]
fn a_source_that_fails_ends_one_request() {
    let running = start(options(None, &[]));
    running.change(|(_, metrics)| *metrics = "panic".into());
    assert_eq!(running.get("/metrics").status, 500);
    assert_eq!(running.get("/api/v1/status").status, 200);
}

#[test]
fn stopping_does_not_wait_for_idle_clients() {
    let mut running = start(options(None, &[]));
    let mut half = running.connect();
    half.write_all(b"GET /healthz HT").expect("sent");
    let _idle = running.connect();
    assert_eq!(running.get("/healthz").status, 200);
    drop(running.stop.take());
    running.thread.take().expect("it runs").join().expect("it ended");
    assert!(TcpStream::connect(running.address).is_err(), "the port is free again");
}

#[tokio::test]
async fn unsafe_and_occupied_ports_are_refused() {
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        let address: SocketAddr = address.parse().expect("an address");
        let error = Admin::bind(address, options(None, &[])).await.expect_err("exposed");
        assert!(matches!(error, AdminError::Exposed { .. }), "{error}");
        assert!(error.to_string().contains("set a token"), "{error}");
    }
    let open = SocketAddr::from(([0, 0, 0, 0], 0));
    let admin = Admin::bind(open, options(Some("t"), &[])).await.expect("with a token");
    assert_ne!(admin.address().port(), 0);

    let taken = Admin::bind(admin.address(), options(Some("t"), &[])).await;
    let error = taken.expect_err("taken");
    assert!(matches!(error, AdminError::Listen { .. }), "{error}");
    assert!(error.to_string().contains(&admin.address().to_string()), "{error}");
}

#[test]
fn the_start_page_shows_problems() {
    let running = start(options(None, &[]));
    {
        let mut fake = running.fake.0.lock().expect("not poisoned");
        fake.0.nodes[0].link = LinkReport::Down { reason: "<refused>".into() };
        fake.0.nodes[1] = node(1, LinkReport::Up, 5);
        fake.0.warnings =
            vec![serde_json::from_value(json!({ "id": 1, "slots": 1, "what": "move 1 waits" })).expect("a warning")];
    }
    let page = running.get("/").body;
    for shown in
        ["ready, but not for every key", "node 10.0.0.0:6379 (16384 slots): &lt;refused&gt;", "<li>move 1 waits</li>"]
    {
        assert!(page.contains(shown), "{shown}: {page}");
    }
}
