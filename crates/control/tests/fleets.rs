//! Two fleets in one process: what one knows, keeps and tells, the other does not.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, mpsc};

use switchyard_control::admin::{Operation, Source};
use switchyard_control::journal::Sync;
use switchyard_control::members::{MemberChange, NodeList};
use switchyard_control::nodes::NodeAddress;
use switchyard_control::placement::{Placement, access};
use switchyard_control::{Fleet, Running};
use switchyard_policy::migration::{Cause, How, MoveOrder};
use switchyard_policy::topology::{MoveId, NodeId, Slot};
use switchyard_router::{Host, ListenerSettings, Live, Ports, Router, Settings};

/// Nobody joins and nobody goes.
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

/// A fleet whose nodes accept connections and say nothing.
fn fleet(directory: &Path, nodes: &[TcpListener]) -> Arc<Fleet> {
    let addresses: Vec<NodeAddress> = nodes
        .iter()
        .map(|node| node.local_addr().expect("an address"))
        .map(|address| NodeAddress { name: address.to_string(), address: Some(address), ..NodeAddress::default() })
        .collect();
    let names: Vec<String> = addresses.iter().map(|node| node.name.clone()).collect();
    let running = Arc::new(Running::default());
    let placement = Arc::new(Placement::open(directory, Arc::clone(&running)).expect("a state directory of its own"));
    let fleet = Fleet::open(directory, Arc::clone(&running), placement, Arc::new(Fixed), Sync::Always, |_| {}).expect("opens");
    let topology = fleet.placement.settle(&names, |_| {}).expect("places").topology;
    let live = Live { nodes: access(&topology, &addresses), ..Live::default() };
    let settings = Settings {
        listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("an address"))],
        workers: 1,
        pin: false,
        batched_sends: false,
        site: fleet.moves.site(),
        seat: None,
        servers: BTreeMap::new(),
        processes: BTreeMap::new(),
        held: None,
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
fn two_fleets_in_one_process_know_nothing_of_each_other() {
    let (here, there) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
    let (its_nodes, others) = (nodes(2), nodes(3));
    let (one, other) = (fleet(here.path(), &its_nodes), fleet(there.path(), &others));
    assert_ne!(one.moves.site(), other.moves.site());

    let slot = Slot::new(0).expect("a slot");
    let owner = |fleet: &Fleet| fleet.placement.topology().expect("a map").owner(slot);
    let (source, others_owner) = (owner(&one), owner(&other));
    let target = NodeId(1 - source.0);
    let order = MoveOrder { source, target, slots: vec![slot], keys: None, how: How::default(), cause: Cause::Asked(None) };
    let (told, durable) = mpsc::channel();
    one.moves.record(order.records(MoveId(1)), Box::new(move |outcome| told.send(outcome).expect("awaited")));
    durable.recv().expect("told").expect("written");
    let (told, handed_over) = mpsc::channel();
    one.moves.hand_over(MoveId(1), &[slot], None, target, Box::new(move |outcome| told.send(outcome).expect("awaited")));
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
