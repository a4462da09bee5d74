//! `switchyard recover`: makes a lost slot map anew from where the keys are.
//!
//! It reads the names of all keys of all nodes and writes nothing but a state directory that has no slot map. Where keys of one slot are at
//! several nodes nobody can tell from the keys which of them has left the slot (a move may have been under way): then it stops and says so.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use switchyard_control::nodes::holdings::{each_key, others};
use switchyard_control::nodes::{NodeConnection, routers, servers};
use switchyard_control::store::{RedbStore, Store};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot, Topology, slot_of};

use super::Failure;
use super::flags::ConfigFlags;
use super::known_fleet::KnownFleet;
use super::table::count;
use crate::config::plural;

/// How long a node may take for one answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The journal of moves that belonged to the lost map.
const JOURNAL: &str = "moves.journal";

/// Make a lost slot map anew from where the keys are
#[derive(Debug, Args)]
#[command(
    long_about = "Make a lost state directory anew: asks every node for the names of all its keys, and writes the slot map that fits them.\n\n\
        For the case that the state directory is gone and there is no backup. No router may run meanwhile, and no client may use the nodes. It \
        changes nothing at the nodes, and refuses a state directory that has a slot map.\n\n\
        Where keys of one slot are at several nodes, as when a move was under way, it refuses, and lists these slots. With --take-most the node with \
        the most keys of such a slot gets it; keys of it at other nodes stay there and are not found any more.",
    after_long_help = "Examples:\n  \
        switchyard recover -c /etc/switchyard.toml --dry-run\n  \
        switchyard recover --node 127.0.0.1:7001 --node 127.0.0.1:7002 --state-dir /var/lib/switchyard\n\n\
        Exit codes: 0 the slot map is written (with --dry-run: could be); 1 it is not, the message says why; 2 the configuration is wrong"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Only say what would be written
    #[arg(long)]
    dry_run: bool,

    /// Give a slot whose keys are at several nodes to the one with the most
    #[arg(long)]
    take_most: bool,
}

/// Keys of a node, counted by slot.
struct Counted {
    name: String,
    keys: Vec<u64>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let mut config = arguments.flags.sources().read()?;
    match KnownFleet::find(&mut config) {
        KnownFleet::Unplaced => {}
        KnownFleet::Placed { .. } => return Err(has_a_map(&config.state_dir).into()),
        KnownFleet::Running { .. } => {
            let directory = config.state_dir.display();
            return Err(anyhow!(
                "a router runs on the state directory {directory}, so its slot map is not lost; recovering is for one that is"
            )
            .into());
        }
        KnownFleet::Hidden(why) => return Err(anyhow!("it is not known whether the slot map is lost: {why}").into()),
    }
    let resolved = config.resolve(|_| None)?;
    let mut counted = Vec::new();
    let listed: Vec<&str> = resolved.nodes.iter().map(|node| node.name.as_str()).collect();
    for node in &resolved.nodes {
        let Some(primary) = servers(node).into_iter().next() else { continue };
        let mut connection =
            NodeConnection::open(&primary.access, PATIENCE).map_err(|why| anyhow!("node {} {why}: every node must answer", node.name))?;
        let routers =
            connection.ask(&["CLIENT", "LIST"]).map(|list| routers(&list.text())).with_context(|| format!("node {}", node.name))?;
        if !routers.is_empty() {
            return Err(anyhow!(
                "a router uses node {}, and keys may move while they are counted: stop it. Its state directory has the slot map (--state-dir), and knows all nodes",
                node.name
            )
            .into());
        }
        let others = others(&mut connection, &listed).map_err(|why| anyhow!("node {} {why}", node.name))?;
        if let Some(others) = others {
            return Err(anyhow!("{}. List them as well; {}", others.told(&node.name), others.way_out()).into());
        }
        let keys = count_keys(&mut connection).with_context(|| format!("node {}", node.name))?;
        println!(
            "node {}: {} {} in {}",
            node.name,
            count(keys.iter().sum()),
            plural(keys.iter().sum(), "key"),
            crate::config::counted(keys.iter().filter(|n| **n > 0).count(), "slot")
        );
        counted.push(Counted { name: node.name.clone(), keys });
    }
    let (topology, lost) = assign(&counted, arguments.take_most)?;
    if lost > 0 {
        let keys = if lost == 1 { "key is" } else { "keys are" };
        println!("{} {keys} at nodes that do not get their slots: what is there stays, and is not found", count(lost));
    }
    for node in topology.nodes() {
        println!("node {} gets {} slots", node.name, count(topology.slots_of(node.id) as u64));
    }
    if arguments.dry_run {
        println!("only planned: without --dry-run it is written to {}", config.state_dir.display());
        return Ok(());
    }
    write(&config.state_dir, &topology)?;
    println!("written to {}: start the router with these nodes", config.state_dir.display());
    Ok(())
}

fn has_a_map(directory: &Path) -> anyhow::Error {
    anyhow!(
        "{} has a slot map: recovering is for a state directory that has none. Move it away first if it is the wrong one",
        directory.display()
    )
}

fn write(directory: &Path, topology: &Topology) -> anyhow::Result<()> {
    let store = RedbStore::open(directory)?;
    if store.load_topology()?.is_some() {
        return Err(has_a_map(directory));
    }
    let journal = directory.join(JOURNAL);
    if journal.exists() {
        let aside = directory.join(format!("{JOURNAL}.before-recover"));
        std::fs::rename(&journal, &aside).with_context(|| format!("cannot rename {}", journal.display()))?;
        println!("{} belonged to the lost slot map: it is {} now", journal.display(), aside.display());
    }
    store.save_topology(topology)?;
    Ok(())
}

/// Counts the keys of all databases by slot. SCAN may show a key twice, which only counts.
fn count_keys(node: &mut NodeConnection) -> anyhow::Result<Vec<u64>> {
    let mut keys = vec![0; SLOT_COUNT];
    each_key(node, None, |key| {
        keys[slot_of(key).index()] += 1;
        ControlFlow::Continue(())
    })?;
    Ok(keys)
}

/// The slot map that fits the keys, and how many keys it does not fit.
fn assign(nodes: &[Counted], take_most: bool) -> anyhow::Result<(Topology, u64)> {
    let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
    let mut topology = Topology::even(&names)?;
    let mut conflicts = Vec::new();
    let mut lost = 0;
    let mut owned: BTreeMap<NodeId, Vec<Slot>> = BTreeMap::new();
    for slot in Slot::all() {
        let having: Vec<usize> = (0..nodes.len()).filter(|i| nodes[*i].keys[slot.index()] > 0).collect();
        // The first of those with the most, so that the same keys give the same map.
        let most = having.iter().copied().max_by_key(|i| (nodes[*i].keys[slot.index()], std::cmp::Reverse(*i)));
        let Some(most) = most else { continue };
        if having.len() > 1 {
            conflicts.push((slot, having.clone()));
            lost += having.iter().filter(|i| **i != most).map(|i| nodes[*i].keys[slot.index()]).sum::<u64>();
        }
        // Numbers follow the order of the list.
        owned.entry(NodeId(most as u16)).or_default().push(slot);
    }
    if !conflicts.is_empty() && !take_most {
        bail!("{}", explain(nodes, &conflicts));
    }
    for (node, slots) in owned {
        topology = topology.handed_over(&slots, node);
    }
    Ok((topology, lost))
}

fn explain(nodes: &[Counted], conflicts: &[(Slot, Vec<usize>)]) -> String {
    let between: BTreeSet<&Vec<usize>> = conflicts.iter().map(|(_, having)| having).collect();
    let mut text = format!("keys of {} are at several nodes:", crate::config::counted(conflicts.len(), "slot"));
    for having in between {
        let of: Vec<&(Slot, Vec<usize>)> = conflicts.iter().filter(|(_, other)| other == having).collect();
        let keys = |i: &usize| of.iter().map(|(slot, _)| nodes[*i].keys[slot.index()]).sum::<u64>();
        let parts: Vec<String> =
            having.iter().map(|i| format!("{} at {}", crate::config::counted(keys(i), "key"), nodes[*i].name)).collect();
        let _ =
            write!(text, " {} (the first is {}) with {};", crate::config::counted(of.len(), "slot"), of[0].0.number(), parts.join(" and "));
    }
    text + " a move was under way, or keys had been moved alone (`move --keys`), or somebody else's keys are there. Remove the keys that do not belong there, or let --take-most decide for the node with \
            the most"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, slots: &[(u16, u64)]) -> Counted {
        let mut keys = vec![0; SLOT_COUNT];
        for (slot, count) in slots {
            keys[usize::from(*slot)] = *count;
        }
        Counted { name: name.to_owned(), keys }
    }

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    #[test]
    fn a_slot_belongs_to_whoever_has_its_keys() {
        // The other way round than an even map would have it.
        let nodes = [node("a:1", &[(16383, 5)]), node("b:1", &[(0, 1), (1, 2)])];
        let (topology, lost) = assign(&nodes, false).expect("no conflict");
        assert_eq!([0, 1, 16383].map(|s| topology.owner(slot(s))), [NodeId(1), NodeId(1), NodeId(0)]);
        assert_eq!((topology.owner(slot(2)), topology.owner(slot(16382))), (NodeId(0), NodeId(1)), "slots without keys are even");
        assert_eq!(lost, 0);
    }

    #[test]
    fn what_cannot_be_told_is_told() {
        let nodes = [node("a:1", &[(7, 5), (8, 1)]), node("b:1", &[(7, 2), (8, 9)])];
        let error = assign(&nodes, false).expect_err("a conflict").to_string();
        assert!(error.contains("keys of 2 slots are at several nodes") && error.contains("6 keys at a:1 and 11 keys at b:1"), "{error}");
        let (topology, lost) = assign(&nodes, true).expect("told to");
        assert_eq!([7, 8].map(|s| topology.owner(slot(s))), [NodeId(0), NodeId(1)]);
        assert_eq!(lost, 3);
    }
}
