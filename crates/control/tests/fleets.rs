//! Two fleets in one process are independent: state, storage and reports.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use switchyard_control::admin::{Access, AdminAccess, AdminOptions, AdminThread, Operation, Source, Token};
use switchyard_control::journal::Sync;
use switchyard_control::members::{MemberChange, NodeList};
use switchyard_control::nodes::NodeAddress;
use switchyard_control::placement::{Placement, access};
use switchyard_control::{Fleet, Running};
use switchyard_policy::migration::{Cause, MoveOptions, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId, Slot};
use switchyard_router::{Host, ListenerSettings, Ports, Router, RuntimeSettings, Settings};

/// A list without changes.
#[derive(Debug)]
struct Fixed;

impl NodeList for Fixed {
    fn find(&self, _: &str) -> Result<NodeAddress, String> {
        Err("the list is fixed".to_owned())
    }

    fn change(&self, _: MemberChange) -> Result<(), String> {
        Err("the list is fixed".to_owned())
    }
}

/// Starts a fleet whose nodes accept connections and never reply.
fn fleet(directory: &Path, nodes: &[TcpListener]) -> Arc<Fleet> {
    let addresses: Vec<NodeAddress> = nodes
        .iter()
        .map(|node| node.local_addr().expect("an address"))
        .map(|address| NodeAddress { name: address.to_string(), address: Some(address), ..NodeAddress::default() })
        .collect();
    let names: Vec<String> = addresses.iter().map(|node| node.name.clone()).collect();
    let running = Arc::new(Running::default());
    let placement = Arc::new(Placement::open(directory, Arc::clone(&running)).expect("a state directory of its own"));
    let fleet =
        Fleet::open(directory, Arc::clone(&running), placement, Arc::new(Fixed), Sync::Always, |_| {}).expect("opens");
    let topology = fleet.placement.apply_nodes(&names, |_| {}).expect("places").topology;
    let live = RuntimeSettings { nodes: access(&topology, &addresses), ..RuntimeSettings::default() };
    let settings = Settings {
        listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("an address"))],
        workers: 1,
        pin: false,
        batched_sends: false,
        threads: running.threads().clone(),
        site: fleet.moves.site(),
        ownership: None,
        servers: BTreeMap::new(),
        processes: BTreeMap::new(),
        held_reason: None,
        cluster_map: None,
        ports: Ports::default(),
        live,
    };
    running.set(Router::start(settings, Arc::clone(&topology)).expect("starts"), topology);
    fleet
}

fn nodes(count: usize) -> Vec<TcpListener> {
    (0..count).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port")).collect()
}

#[test]
fn two_fleets_in_one_process_are_independent() {
    let (here, there) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let (its_nodes, others) = (nodes(2), nodes(3));
    let (one, other) = (fleet(here.path(), &its_nodes), fleet(there.path(), &others));
    assert_ne!(one.moves.site(), other.moves.site());

    let slot = Slot::new(0).expect("a slot");
    let owner = |fleet: &Fleet| fleet.placement.topology().expect("a map").owner(slot);
    let (source, others_owner) = (owner(&one), owner(&other));
    let target = NodeId(1 - source.0);
    let order = MoveOrder {
        source,
        target,
        slots: vec![slot],
        keys: None,
        how: MoveOptions::default(),
        cause: Cause::Requested(None),
    };
    let (told, durable) = mpsc::channel();
    one.moves.record(order.records(MoveId(1)), Box::new(move |outcome| told.send(outcome).expect("awaited")));
    durable.recv().expect("told").expect("written");
    let (told, handed_over) = mpsc::channel();
    one.moves.hand_over(
        MoveId(1),
        &[slot],
        None,
        target,
        Box::new(move |outcome| told.send(outcome).expect("awaited")),
    );
    handed_over.recv().expect("told").expect("stored");
    assert_eq!((owner(&one), owner(&other)), (target, others_owner), "one map has changed");

    let report = |fleet: &Fleet| fleet.operate(Operation::Moves, "a test").expect("a report");
    let records = |fleet: &Fleet| report(fleet)["journal"]["records"].as_u64();
    assert_eq!((records(&one), records(&other)), (Some(1), Some(0)), "one journal was written");

    for (fleet, nodes) in [(&one, 2), (&other, 3)] {
        let status = fleet.status();
        assert_eq!((status.nodes.len(), status.incarnation), (nodes, 1));
        let page = fleet.metrics();
        let strangers = if nodes == 2 { &others } else { &its_nodes };
        for stranger in strangers {
            let name = stranger.local_addr().expect("an address").to_string();
            assert!(!page.contains(&name), "{name}:\n{page}");
        }
        assert!(status.nodes.iter().all(|node| page.contains(&node.address)), "{page}");
    }
}

/// Sends a request to a local port, and returns everything until the connection ends.
fn exchange(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("replied");
    reply
}

#[test]
fn a_panic_in_an_automation_thread_leaves_the_router_serving() {
    let directory = tempfile::tempdir().expect("a directory");
    let nodes = nodes(1);
    let fleet = fleet(directory.path(), &nodes);
    let options = AdminOptions {
        access: AdminAccess::new(Access::Given(Token::new("secret").expect("a token"))),
        host_names: Vec::new(),
        tls: None,
    };
    let mut admin = AdminThread::bind("127.0.0.1:0".parse().expect("an address"), options).expect("bound");
    admin.serve(Arc::clone(&fleet) as Arc<dyn Source>);
    let get = |path: &str| {
        exchange(
            admin.address,
            &format!(
                "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nConnection: close\r\n\r\n"
            ),
        )
    };
    assert!(!get("/readyz").contains("has stopped"));
    // Started like the planner's thread, with another body.
    let threads = fleet.running.threads();
    let planner = threads.repeat("planner", || Duration::ZERO, || panic!("planted")).expect("started");
    let other = threads.repeat("autoscaler", || Duration::ZERO, || ControlFlow::Break(())).expect("started");
    while !threads.is_stopped("planner") {
        std::thread::sleep(Duration::from_millis(5));
    }
    for path in ["/readyz", "/api/v1/status"] {
        let body = get(path);
        assert!(body.contains("the thread planner has stopped") && !body.contains("the thread autoscaler"), "{body}");
    }
    let metrics = get("/metrics");
    for line in [
        "switchyard_automation_thread_up{thread=\"planner\"} 0",
        "switchyard_automation_thread_up{thread=\"autoscaler\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
    assert!(get("/api/v1/automation").contains("its thread has stopped"));
    let router = fleet.running.with(|router| router.addresses()[0]).expect("it serves");
    assert!(exchange(router, "PING\r\nQUIT\r\n").starts_with("+PONG"));
    planner.stop();
    other.stop();
    admin.stop();
}
