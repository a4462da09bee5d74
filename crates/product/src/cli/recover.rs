//! `switchyard recover`: rebuilds a lost slot map from the locations of the keys.
//!
//! Reads the names of all keys of all nodes, and writes only a state directory without a slot map. If several nodes
//! have keys of one slot (a move was in progress, or keys were moved alone), the node with the most keys gets the slot,
//! and the other keys become placement overrides. If a key is on several nodes, its name does not show which copy is
//! valid: then recovery stops with an error.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use switchyard_control::nodes::holdings::{each_key, others};
use switchyard_control::nodes::{NodeConnection, routers, servers};
use switchyard_control::store::{RedbStore, Store};
use switchyard_policy::topology::{NodeId, OVERRIDES_MAX, Placement, SLOT_COUNT, Slot, Topology};

use super::Failure;
use super::flags::ConfigFlags;
use super::known_fleet::KnownFleet;
use super::table::count;
use crate::config::plural;

/// Timeout of a reply.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Journal of moves for the lost map.
const JOURNAL: &str = "moves.journal";

/// Rebuild a lost slot map from the locations of the keys
#[derive(Debug, Args)]
#[command(
    long_about = "Rebuild a lost state directory: reads the names of all keys from every node, and writes a slot map that fits them.\n\n\
        For use if the state directory is lost and there is no backup. In the meantime no router may run, and no client may use the nodes. It \
        changes nothing at the nodes, and refuses a state directory that has a slot map.\n\n\
        If several nodes have keys of one slot, for example because a move was in progress, the node with the most gets the slot. The other keys stay and are \
        found there; `switchyard move --home` moves them later. It refuses if one key is at several nodes, because it cannot determine the valid copy. With \
        --prefer-largest-copy the copy at the node of its slot counts; other copies stay, but are no longer found.",
    after_long_help = "Examples:\n  \
        switchyard recover -c /etc/switchyard.toml --dry-run\n  \
        switchyard recover --node 127.0.0.1:7001 --node 127.0.0.1:7002 --state-dir /var/lib/switchyard\n\n\
        Exit codes: 0 the slot map is written (with --dry-run: could be); 1 it is not, with the reason; 2 the configuration is wrong"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Only show the resulting slot map
    #[arg(long)]
    dry_run: bool,

    /// If a key is at several nodes, use the copy at the node with the most keys of its slot
    #[arg(long)]
    prefer_largest_copy: bool,
}

/// Number of keys of a node, by slot.
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
                "a router runs on the state directory {directory}, so its slot map is not lost; recovery is for a lost slot map"
            )
            .into());
        }
        KnownFleet::Hidden(why) => return Err(anyhow!("it is not known whether the slot map is lost: {why}").into()),
    }
    let resolved = config.resolve(|_| None)?.require_resolved()?;
    // The configuration is the only source of the rules if the state is lost.
    let rules = config.rule_set()?;
    match rules.rules().len() {
        0 => println!("without placement rules: the configuration has no [[placement.rule]]"),
        count => println!("with {count} placement {} of the configuration", plural(count as u64, "rule")),
    }
    let placement = Placement::by_rules(rules);
    let (mut counted, mut connections) = (Vec::new(), Vec::new());
    let listed: Vec<&str> = resolved.nodes.iter().map(|node| node.name.as_str()).collect();
    for node in &resolved.nodes {
        let Some(primary) = servers(node).into_iter().next() else { continue };
        let mut connection = NodeConnection::open(&primary.access, TIMEOUT)
            .map_err(|why| anyhow!("node {} {why}: every node must reply", node.name))?;
        let routers = connection
            .call(&["CLIENT", "LIST"])
            .map(|list| routers(&list.text()))
            .with_context(|| format!("node {}", node.name))?;
        if !routers.is_empty() {
            return Err(anyhow!(
                "a router uses node {}, and keys may move while they are counted: stop it. Its state directory has the slot map (--state-dir), and knows all nodes",
                node.name
            )
            .into());
        }
        let others = others(&mut connection, &listed).map_err(|why| anyhow!("node {} {why}", node.name))?;
        if let Some(others) = others {
            return Err(anyhow!("{}. List them as well; {}", others.describe(&node.name), others.remedy_text()).into());
        }
        let keys = count_keys(&mut connection, &placement).with_context(|| format!("node {}", node.name))?;
        println!(
            "node {}: {} {} in {}",
            node.name,
            count(keys.iter().sum()),
            plural(keys.iter().sum(), "key"),
            crate::config::counted(keys.iter().filter(|n| **n > 0).count(), "slot")
        );
        counted.push(Counted { name: node.name.clone(), keys });
        connections.push(connection);
    }
    let (mut topology, shared) = assign(&counted, placement)?;
    if !shared.is_empty() {
        let misplaced = MisplacedKeys::find(&topology, &shared, |i, visit| {
            each_key(&mut connections[i], None, visit).with_context(|| format!("node {}", counted[i].name))
        })?;
        topology = settle(topology, misplaced, arguments.prefer_largest_copy, OVERRIDES_MAX)?;
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
        "{} has a slot map: recovery is for a state directory without a slot map. Move it away first if it is the wrong one",
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

/// Counts the keys of all databases by slot. A key that SCAN returns twice is counted twice, which is harmless.
fn count_keys(node: &mut NodeConnection, placement: &Placement) -> anyhow::Result<Vec<u64>> {
    let mut keys = vec![0; SLOT_COUNT];
    each_key(node, None, |key| {
        keys[placement.slot_of(key).index()] += 1;
        ControlFlow::Continue(())
    })?;
    Ok(keys)
}

/// Returns the slot map that fits the keys best, and the slots with keys at several nodes. Node ids follow the order of
/// the list.
fn assign(nodes: &[Counted], placement: Placement) -> anyhow::Result<(Topology, BTreeSet<Slot>)> {
    let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
    let mut topology = Topology::even(&names)?.with_stored_placement(placement);
    let mut shared = BTreeSet::new();
    let mut owned: BTreeMap<NodeId, Vec<Slot>> = BTreeMap::new();
    for slot in Slot::all() {
        let having: Vec<usize> = (0..nodes.len()).filter(|i| nodes[*i].keys[slot.index()] > 0).collect();
        // The first node with the maximum, so that the same keys give the same map.
        let most = having.iter().copied().max_by_key(|i| (nodes[*i].keys[slot.index()], std::cmp::Reverse(*i)));
        let Some(most) = most else { continue };
        if having.len() > 1 {
            shared.insert(slot);
        }
        owned.entry(NodeId(most as u16)).or_default().push(slot);
    }
    for (node, slots) in owned {
        topology = topology.handed_over(&slots, node);
    }
    Ok((topology, shared))
}

/// Keys that exist on other nodes than the owner of their slot.
#[derive(Debug, Default, PartialEq, Eq)]
struct MisplacedKeys {
    at: BTreeMap<Arc<[u8]>, BTreeSet<NodeId>>,
    /// There are more than [`STRAYS_MAX`] keys. The list is incomplete.
    too_many: bool,
}

/// Maximum number of names in memory, about 2 GB. An aborted copy may have left a node's keys at another node, and only
/// one of the two counts.
const MISPLACED_MAX: usize = 10_000_000;

/// Visits all key names of the node with this index.
type EachKey<'a> = &'a mut dyn FnMut(&[u8]) -> ControlFlow<()>;

impl MisplacedKeys {
    /// Finds these keys by name: first at the nodes that do not own the slot, then checks which are also at the owner.
    fn find(
        topology: &Topology,
        shared: &BTreeSet<Slot>,
        mut each_key: impl FnMut(usize, EachKey<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let mut misplaced = Self::default();
        let nodes: Vec<NodeId> = topology.nodes().map(|node| node.id).collect();
        for at_owner in [false, true] {
            for node in nodes.iter().copied() {
                each_key(node.index(), &mut |key| {
                    let slot = topology.slot_of(key);
                    if !shared.contains(&slot) || (topology.owner(slot) == node) != at_owner {
                        return ControlFlow::Continue(());
                    }
                    let is_full = misplaced.at.len() == MISPLACED_MAX;
                    match misplaced.at.get_mut(key) {
                        Some(at) => drop(at.insert(node)),
                        None if at_owner => {}
                        None if is_full => {
                            misplaced.too_many = true;
                            return ControlFlow::Break(());
                        }
                        None => drop(misplaced.at.insert(Arc::from(key), BTreeSet::from([node]))),
                    }
                    ControlFlow::Continue(())
                })?;
            }
        }
        Ok(misplaced)
    }
}

/// Maximum number of key names in the output.
const SHOWN: usize = 10;

/// Returns the map that finds every key on a single node, or an error if there is none. `overrides_max`: maximum number
/// of keys elsewhere than their slot.
fn settle(
    topology: Topology,
    misplaced: MisplacedKeys,
    prefer_largest_copy: bool,
    overrides_max: usize,
) -> anyhow::Result<Topology> {
    if misplaced.too_many {
        bail!(
            "more than {MISPLACED_MAX} keys are at other nodes than most keys of their slots: these nodes were not one fleet, or a copy of keys was in progress. Remove the \
             keys that do not belong there"
        );
    }
    let name = |id: &NodeId| topology.node(*id).map_or_else(String::new, |node| node.name.clone());
    let copies: Vec<_> = misplaced.at.iter().filter(|(_, at)| at.len() > 1).collect();
    for (key, at) in copies.iter().take(SHOWN) {
        let at: Vec<String> = at.iter().map(name).collect();
        println!("key \"{}\" is at {}", key.escape_ascii(), at.join(" and "));
    }
    if copies.len() > SHOWN {
        println!("and so are {} more", count((copies.len() - SHOWN) as u64));
    }
    if !copies.is_empty() && !prefer_largest_copy {
        bail!(
            "{} at several nodes, and the valid copy is unknown: a move was in progress, or the nodes have foreign keys. Remove the copies that do not \
             belong there, or let --prefer-largest-copy decide for the node with the most keys of the slot",
            are(copies.len())
        );
    }
    let hidden: usize = copies.iter().map(|(_, at)| at.len() - 1).sum();
    if hidden > 0 {
        let copies = crate::config::counted(hidden, "copy").replace("copys", "copies");
        println!("{copies} of keys at several nodes will not be found, but are not deleted");
    }
    // A key that its slot owner lacks is placed at the first node that has it.
    let alone: Vec<(Arc<[u8]>, NodeId)> = misplaced
        .at
        .into_iter()
        .filter(|(key, at)| !at.contains(&topology.owner_of(key)))
        .filter_map(|(key, at)| Some((key, at.into_iter().next()?)))
        .collect();
    if alone.len() > overrides_max {
        bail!(
            "{} only elsewhere than most keys of the slot, and at most {overrides_max} keys can be moved without their slots: these nodes were not one fleet. Remove the keys that do \
             not belong there",
            are(alone.len())
        );
    }
    if !alone.is_empty() {
        println!(
            "{} elsewhere than most keys of the slot, and found there; `switchyard move --home` returns such keys",
            are(alone.len())
        );
    }
    Ok(topology.with_stored_overrides(alone)?)
}

fn are(keys: usize) -> String {
    format!("{} {}", crate::config::counted(keys, "key"), if keys == 1 { "is" } else { "are" })
}

#[cfg(test)]
mod tests {
    use switchyard_policy::topology::crc16_slot;

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
    fn a_slot_goes_to_the_node_with_its_keys() {
        // The opposite of an even map.
        let nodes = [node("a:1", &[(16383, 5)]), node("b:1", &[(0, 1), (1, 2)])];
        let (topology, shared) = assign(&nodes, Placement::Crc16).expect("a map");
        assert_eq!([0, 1, 16383].map(|s| topology.owner(slot(s))), [NodeId(1), NodeId(1), NodeId(0)]);
        assert_eq!(
            (topology.owner(slot(2)), topology.owner(slot(16382))),
            (NodeId(0), NodeId(1)),
            "slots without keys are even"
        );
        assert!(shared.is_empty());
        let (topology, shared) =
            assign(&[node("a:1", &[(7, 5), (8, 1)]), node("b:1", &[(7, 2), (8, 9)])], Placement::Crc16).expect("a map");
        assert_eq!([7, 8].map(|s| topology.owner(slot(s))), [NodeId(0), NodeId(1)]);
        assert_eq!(shared, BTreeSet::from([slot(7), slot(8)]));
    }

    const LIMIT: usize = 1_000;

    /// Returns the map for nodes with these keys, all of one slot.
    fn settled(nodes: &[&[&str]], prefer_largest_copy: bool) -> anyhow::Result<Topology> {
        let key = |suffix: &str| format!("{{a}}{suffix}").into_bytes();
        let counted: Vec<Counted> = (nodes.iter().enumerate())
            .map(|(i, keys)| node(&format!("n{i}:1"), &[(crc16_slot(b"a").number(), keys.len() as u64)]))
            .collect();
        let (topology, shared) = assign(&counted, Placement::Crc16)?;
        let misplaced = MisplacedKeys::find(&topology, &shared, |i, visit| {
            // Visits the first key twice, as SCAN may.
            let _ = nodes[i].iter().chain(nodes[i].first()).try_for_each(|name| visit(&key(name)));
            Ok(())
        })?;
        settle(topology, misplaced, prefer_largest_copy, LIMIT)
    }

    #[test]
    fn misplaced_keys_are_placed_and_a_key_on_two_nodes_is_refused() {
        let topology = settled(&[&["1"], &["2", "3"], &["4"]], false).expect("no key is twice");
        assert_eq!(["{a}1", "{a}2", "{a}3", "{a}4"].map(|key| topology.lives_at(key.as_bytes()).0), [0, 1, 1, 2]);
        let error = settled(&[&["1", "2"], &["2", "3", "4"]], false).expect_err("a key is twice").to_string();
        assert!(error.contains("1 key is at several nodes") && error.contains("--prefer-largest-copy"), "{error}");
        let topology = settled(&[&["1", "2", "9"], &["2", "3", "4", "5"], &["9"]], true).expect("told to");
        assert_eq!(["{a}1", "{a}2", "{a}3", "{a}9"].map(|key| topology.lives_at(key.as_bytes()).0), [0, 1, 1, 0]);
    }

    #[test]
    fn more_copies_than_placement_overrides_are_accepted() {
        let names: Vec<String> = (0..=LIMIT).map(|i| i.to_string()).collect();
        let copied: Vec<&str> = names.iter().map(String::as_str).collect();
        let owned: Vec<&str> = copied.iter().copied().chain(["more"]).collect();
        let topology = settled(&[&copied, &owned], true).expect("each is at the node of its slot");
        assert_eq!(["{a}1", "{a}more"].map(|key| topology.lives_at(key.as_bytes()).0), [1, 1]);
        let error = settled(&[&copied, &["x"; LIMIT + 2]], true).expect_err("they are only elsewhere").to_string();
        assert!(error.contains("only elsewhere"), "{error}");
    }
}
