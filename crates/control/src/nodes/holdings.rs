//! Keys of the nodes: examined before a first start makes a slot map, before a stored map is trusted, and by the
//! commands that recreate a map.
//!
//! `switchyard serve` and `switchyard doctor` share this code, so they always agree. `policy::topology` draws the
//! conclusions from counts and samples.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::{First, NodeId, PlaceError, RuleSet, Sample, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{NodeAccess, parse_record, query_of_site, site_of_record_user};

use super::clients::routers;
use super::connection::{Answer, NodeConnection};
use super::fit::{is_router, unfit_reason};
use super::{NodeAddress, Server, servers};

/// Maximum size of the first replies, in bytes. A server that sends more is no Redis server.
pub const ANSWER_MAX: usize = 1 << 20;

/// Maximum size of a client list, in bytes: some ten thousand clients.
const LIST_MAX: usize = 16 << 20;

/// Keys of each database in the sample before a stored map is trusted.
pub const SAMPLE: u64 = 1000;

/// Maximum number of SCAN pages for a sample, if most pages are empty.
const SAMPLE_PAGES: u32 = 50;

/// Minimum timeout for a page of names, because the node may be busy.
const PAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between progress reports of a long search.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Result of the checks of a first start.
#[derive(Debug)]
pub enum FirstStart {
    /// A map that finds every key.
    Place {
        /// The map.
        topology: Topology,
        /// The node that has all keys of several nodes, and their number.
        owner: Option<(String, u64)>,
    },
    /// No map can be chosen automatically. The text contains the reason and the remedies.
    Refused(String),
    /// A node could not be examined. The text names it and the reason.
    Unknown(String),
}

/// Returns the current primaries of these nodes.
pub fn primaries(nodes: &[NodeAddress]) -> Vec<NodeAccess> {
    let one = |node: &NodeAddress| {
        // A single server needs no query.
        let first = if node.has_replicas() { servers(node).into_iter().next() } else { None };
        first.map_or_else(|| node.access(), |server: Server| server.access)
    };
    in_parallel(nodes, one)
}

/// Applies a function to all items in parallel, on one thread each.
pub fn in_parallel<T: Sync, R: Send>(items: &[T], ask: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = items.iter().map(|item| scope.spawn(|| ask(item))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    })
}

/// Returns a node that is used by a router of another state directory than `own`. Ignores nodes that do not reply, or
/// refuse CLIENT LIST.
pub fn served_by_another<'a>(nodes: &'a [NodeAccess], own: Option<&str>, timeout: Duration) -> Option<&'a NodeAccess> {
    let is_served = |node: &NodeAccess| {
        let connection =
            NodeConnection::open(node, timeout).ok().map(|connection| connection.with_answers_up_to(LIST_MAX));
        let list = connection.and_then(|mut connection| connection.call(&["CLIENT", "LIST"]).ok());
        list.is_some_and(|list| routers(&list.text()).iter().any(|site| Some(site.as_str()) != own))
    };
    let served = in_parallel(nodes, is_served);
    nodes.iter().zip(served).find_map(|(node, served)| served.then_some(node))
}

/// Examines the nodes' keys, and returns the map for a first start. `rules`: configured placement rules, which the map
/// has if this moves no key. `tell` receives progress reports.
pub fn first_start(
    nodes: &[NodeAccess],
    rules: &RuleSet,
    timeout: Duration,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<FirstStart, PlaceError> {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let looks =
        in_parallel(nodes, |node| look(node, &names, timeout).map_err(|why| format!("node {} {why}", node.name)));
    let looks: Vec<NodeHoldings> = match looks.into_iter().collect() {
        Ok(looks) => looks,
        Err(why) => return Ok(FirstStart::Unknown(why)),
    };
    if let Some(why) = looks.iter().find_map(|look| look.unfit.as_ref()) {
        return Ok(FirstStart::Refused(format!("{why}. Remove it from the list, or fix that, and start again")));
    }
    if let Some((node, others)) = nodes.iter().zip(&looks).find_map(|(node, look)| Some((node, look.others.as_ref()?)))
    {
        return Ok(FirstStart::Refused(format!(
            "the state directory has no slot map, and {}. Choose one remedy: give the state directory of this fleet (--state-dir); or list all of its nodes \
             here; or, if no map fits their keys, make one from the location of the keys (`switchyard recover`, with all of the nodes); {}",
            others.describe(&node.name),
            others.remedy_text(),
        )));
    }
    if let Some(why) =
        duplicate_server(nodes.iter().zip(&looks).map(|(node, look)| (node.name.as_str(), look.run_id.as_str())))
    {
        return Ok(FirstStart::Refused(why));
    }
    let counts: Vec<(String, u64)> =
        nodes.iter().zip(&looks).map(|(node, look)| (node.name.clone(), look.keys)).collect();
    let has_keys = counts.iter().any(|(_, keys)| *keys > 0);
    let ruled = |topology: Topology| topology.with_first_rules(rules.clone(), has_keys);
    Ok(match Topology::first(&counts)? {
        First::Even(topology) => FirstStart::Place { topology: ruled(topology), owner: None },
        First::Owner(topology, owner) => {
            FirstStart::Place { topology: ruled(topology), owner: counts.into_iter().nth(owner.index()) }
        }
        First::IfKeysFit(topology) => match find_elsewhere(&topology, nodes, &counts, timeout, tell) {
            Ok(None) => FirstStart::Place { topology: ruled(topology), owner: None },
            Ok(Some(found)) => FirstStart::Refused(refusal(&counts, &found, looks.iter().any(|look| look.is_marked))),
            Err(why) => FirstStart::Unknown(why),
        },
    })
}

/// Reason, from the replies of the reachable nodes, why these nodes cannot be a fleet under any map.
pub fn unfit_for_a_map(nodes: &[NodeAccess], timeout: Duration) -> Option<String> {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let looks = in_parallel(nodes, |node| look(node, &names, timeout).ok());
    let answering = || nodes.iter().zip(&looks).filter_map(|(node, look)| Some((node, look.as_ref()?)));
    let unfit = answering().find_map(|(_, look)| look.unfit.as_ref());
    unfit
        .map(|why| format!("{why}. Remove it from the list, or fix that, and start again"))
        .or_else(|| duplicate_server(answering().map(|(node, look)| (node.name.as_str(), look.run_id.as_str()))))
}

/// Error if two of these nodes, each with its `run_id`, are the same server.
pub fn duplicate_server<'a>(nodes: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let mut met = BTreeMap::new();
    for (name, run_id) in nodes.filter(|(_, run_id)| !run_id.is_empty()) {
        if let Some(other) = met.insert(run_id, name) {
            return Some(format!(
                "{other} and {name} are one server under two names (both have run_id {run_id}), so slots of both would mix: remove one of them from the list of nodes"
            ));
        }
    }
    None
}

/// Unlisted nodes that had keys of the same fleet.
#[derive(Debug)]
pub struct UnlistedNodes {
    /// User that holds the ownership record.
    user: String,
    names: Vec<String>,
}

impl UnlistedNodes {
    /// Describes the problem at the node of this name.
    pub fn describe(&self, node: &str) -> String {
        format!(
            "node {node} belongs to a fleet that also has keys at other nodes: {}. Clients would read nil for these",
            self.names.join(", ")
        )
    }

    /// Remedy if the other nodes no longer belong to the fleet.
    pub fn remedy_text(&self) -> String {
        format!(
            "or, if those nodes no longer belong to it, remove the ownership record at each listed node: `redis-cli ACL DELUSER {}`",
            self.user
        )
    }
}

/// Finds unlisted nodes that had keys of the same fleet, by the ownership records that routers have left at this node
/// ([`switchyard_policy::seat`]). Returns `None` if the node does not show its records.
pub fn others(node: &mut NodeConnection, listed: &[&str]) -> Result<Option<UnlistedNodes>, String> {
    let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("does not answer ACL: {error}"));
    let users = ask(&["ACL", "USERS"])?;
    for user in users.items().iter().map(Answer::text).filter(|user| site_of_record_user(user).is_some()) {
        let Ok(Some(mark)) = parse_record(&ask(&["ACL", "GETUSER", &user])?.0) else { continue };
        let names = mark.missing(listed);
        if !names.is_empty() {
            return Ok(Some(UnlistedNodes { user, names }));
        }
    }
    Ok(None)
}

/// Whether any router has left an ownership record at a node, as far as the node shows it.
fn is_marked(node: &mut NodeConnection) -> Result<bool, String> {
    let users = node.call(&["ACL", "USERS"]).map_err(|error| format!("does not answer ACL: {error}"))?;
    Ok(users.items().iter().any(|user| site_of_record_user(&user.text()).is_some()))
}

/// State of a node before a first start.
#[derive(Debug)]
struct NodeHoldings {
    run_id: String,
    /// Keys of all databases, as counted by the node.
    keys: u64,
    others: Option<UnlistedNodes>,
    /// Whether a router has served the node.
    is_marked: bool,
    /// Reason why it cannot be a node, regardless of its keys.
    unfit: Option<String>,
}

fn look(access: &NodeAccess, listed: &[&str], timeout: Duration) -> Result<NodeHoldings, String> {
    let mut node = NodeConnection::open(access, timeout)?.with_answers_up_to(ANSWER_MAX);
    let marker = node.call(&["SWITCHYARD", "STATUS"]).map_err(|error| format!("does not answer: {error}"))?;
    let is_router = is_router(&marker);
    let (others, is_marked) =
        if is_router { (None, false) } else { (others(&mut node, listed)?, is_marked(&mut node)?) };
    let mut info = |section: &str| match node.call(&["INFO", section]) {
        Ok(answer) => answer.error().map_or(Ok(answer.text()), |error| Err(format!("refuses INFO: {error}"))),
        Err(error) => Err(format!("does not answer INFO: {error}")),
    };
    if info("persistence")?.lines().any(|line| line.trim() == "loading:1") {
        return Err("is loading its data".to_owned());
    }
    let keys = databases(&info("keyspace")?).map(|(_, keys)| keys).sum();
    let server = info("server")?;
    let run_id = server.lines().find_map(|line| line.strip_prefix("run_id:")).unwrap_or_default().trim().to_owned();
    let unfit = unfit_reason(&access.name, &(server + &info("cluster")? + &info("replication")?), is_router);
    Ok(NodeHoldings { run_id, keys, others, is_marked, unfit })
}

/// Parses the databases with keys, and their number of keys, from INFO.
pub fn databases(info: &str) -> impl Iterator<Item = (u32, u64)> {
    info.lines().filter_map(|line| {
        let (name, fields) = line.trim().strip_prefix("db")?.split_once(':')?;
        let keys = fields.split(',').find_map(|field| field.strip_prefix("keys="))?;
        Some((name.parse().ok()?, keys.parse().ok()?))
    })
}

/// Sends a command. Fails if the node does not reply, or replies with an error.
fn require(node: &mut NodeConnection, args: &[&[u8]]) -> anyhow::Result<Answer> {
    let answer = node.call(args).context("does not answer")?;
    match answer.error() {
        Some(error) => bail!("refuses {}: {error}", String::from_utf8_lossy(args[0])),
        None => Ok(answer),
    }
}

/// Visits the names of all keys of all databases, or of `at_most` keys per database. SCAN may return a key twice. Skips
/// the router's own temporary keys.
pub fn each_key(
    node: &mut NodeConnection,
    at_most: Option<u64>,
    mut visit: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> anyhow::Result<()> {
    each_key_with(node, at_most, |_, key| Ok(visit(key)))
}

/// Like [`each_key`]. The visitor also receives the connection, with the database of the key selected.
fn each_key_with(
    node: &mut NodeConnection,
    at_most: Option<u64>,
    mut visit: impl FnMut(&mut NodeConnection, &[u8]) -> anyhow::Result<ControlFlow<()>>,
) -> anyhow::Result<()> {
    let info = require(node, &[b"INFO", b"keyspace"])?.text();
    for (database, _) in databases(&info) {
        require(node, &[b"SELECT", database.to_string().as_bytes()])?;
        let (mut cursor, mut seen, mut pages) = (b"0".to_vec(), 0, 0);
        loop {
            let answer = require(node, &[b"SCAN", &cursor, b"COUNT", b"1000"])?;
            let [next, page] = &answer.items()[..] else { bail!("answers SCAN in an unknown form") };
            for key in page.items().iter().filter(|key| !is_temporary(key.bytes())) {
                if visit(node, key.bytes())?.is_break() {
                    return Ok(());
                }
                seen += 1;
            }
            cursor = next.bytes().to_vec();
            pages += 1;
            if cursor == b"0" || at_most.is_some_and(|most| seen >= most || pages >= SAMPLE_PAGES) {
                break;
            }
        }
    }
    Ok(())
}

/// Returns a sample of the keys of a node, each with the bytes of all keys that it stands for.
///
/// # Errors
/// If the node does not reply, or refuses a command.
pub fn sample_sizes(node: &mut NodeConnection) -> anyhow::Result<Vec<(Vec<u8>, f64)>> {
    let keys: u64 = databases(&require(node, &[b"INFO", b"keyspace"])?.text()).map(|(_, keys)| keys).sum();
    let mut sizes = Vec::new();
    each_key_with(node, Some(SAMPLE), |node, key| {
        // The reply is nil if the key no longer exists.
        if let Ok(bytes) = require(node, &[b"MEMORY", b"USAGE", key])?.text().parse::<f64>() {
            sizes.push((key.to_vec(), bytes));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    let each = keys as f64 / sizes.len().max(1) as f64;
    sizes.iter_mut().for_each(|(_, bytes)| *bytes *= each);
    Ok(sizes)
}

/// Returns which of these keys exist in any database of a node.
///
/// # Errors
/// If the node does not reply.
pub fn exists_each(node: &mut NodeConnection, names: &[&[u8]]) -> anyhow::Result<Vec<bool>> {
    let mut has = vec![false; names.len()];
    let info = node.call(&["INFO", "keyspace"])?.text();
    for (database, _) in databases(&info) {
        node.call(&["SELECT", &database.to_string()])?;
        for (name, has) in names.iter().zip(&mut has).filter(|(_, has)| !**has) {
            *has = node.call(&[b"EXISTS", *name])?.text() == "1";
        }
    }
    Ok(has)
}

/// A key at a node where the map does not place it. Its name must not be disclosed.
struct MisplacedKey {
    node: String,
    slot: u16,
    owner: String,
}

/// Searches all keys of all nodes for a key that is not where the map places it.
fn find_elsewhere(
    topology: &Topology,
    nodes: &[NodeAccess],
    counts: &[(String, u64)],
    timeout: Duration,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<Option<MisplacedKey>, String> {
    let is_over = AtomicBool::new(false);
    let numbered: Vec<(NodeId, &NodeAccess, u64)> = (0..)
        .map(NodeId)
        .zip(nodes)
        .zip(counts)
        .map(|((id, node), (_, keys))| (id, node, *keys))
        .filter(|(.., keys)| *keys > 0)
        .collect();
    let found = in_parallel(&numbered, |(id, node, keys)| {
        let mut found = None;
        let (mut seen, mut told) = (0_u64, Instant::now());
        let mut connection =
            NodeConnection::open(node, timeout.max(PAGE_TIMEOUT)).map_err(|why| format!("node {} {why}", node.name))?;
        let looked = each_key(&mut connection, None, |key| {
            seen += 1;
            if told.elapsed() >= PROGRESS_INTERVAL {
                told = Instant::now();
                tell(&format!(
                    "node {}: checked {seen} of {} to find out which node owns which slots",
                    node.name,
                    counted(*keys, "key")
                ));
            }
            let owner = topology.owner_of(key);
            if owner != *id {
                let name = topology.node(owner).map_or_else(String::new, |owner| owner.name.clone());
                found =
                    Some(MisplacedKey { node: node.name.clone(), slot: topology.slot_of(key).number(), owner: name });
                is_over.store(true, Ordering::Relaxed);
            }
            if is_over.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        looked.map(|()| found).map_err(|why| format!("node {} {why:#}", node.name))
    });
    let mut trouble = None;
    for looked in found {
        match looked {
            Ok(Some(found)) => return Ok(Some(found)),
            Ok(None) => {}
            Err(why) => trouble = Some(why),
        }
    }
    trouble.map_or(Ok(None), Err)
}

/// Explains why no map can be chosen, with the remedies. `was_served`: the nodes already were a fleet, and all their
/// keys are needed.
fn refusal(counts: &[(String, u64)], found: &MisplacedKey, was_served: bool) -> String {
    let having: Vec<String> = counts
        .iter()
        .filter(|(_, keys)| *keys > 0)
        .map(|(name, keys)| format!("{name} ({})", counted(*keys, "key")))
        .collect();
    let most = counts.iter().max_by_key(|(_, keys)| *keys).map_or("HOST:PORT", |(name, _)| name);
    let ways = if was_served {
        "A router has served these nodes, so its state directory is lost, or is elsewhere: give that (--state-dir), or make the map from the location of the keys \
         (`switchyard recover`, with all nodes of the fleet). Neither loses data"
            .to_owned()
    } else {
        format!(
            "Choose one remedy: give the state directory of this fleet (--state-dir); or make the map from the location of the keys (`switchyard recover`); or start \
             with only the node that has the right keys (such as --node {most}), and add the others once they are empty (`switchyard nodes add`); or empty the \
             others (FLUSHALL)"
        )
    };
    format!(
        "the state directory has no slot map, and several nodes hold keys: {}. With a new map, clients would read nil for some of them: node {} has a key of slot {}, \
         which would belong to {}. {ways}",
        having.join(", "),
        found.node,
        found.slot,
        found.owner,
    )
}

/// Result of sampling a node.
#[derive(Debug)]
pub struct Sampled {
    /// `run_id` of the process.
    pub run_id: String,
    /// Whether the node has an ownership record of the state directory. `None` if it does not show that.
    pub is_marked: Option<bool>,
    /// Counts of the sample. The caller decides whether the process is known.
    pub sample: Sample,
}

/// Samples up to `at_most` keys of a node, or all, and reads the ownership record of `site`. `is_elsewhere` returns
/// whether the map places a key elsewhere.
pub fn sample(
    access: &NodeAccess,
    timeout: Duration,
    site: Option<&str>,
    at_most: Option<u64>,
    is_elsewhere: impl Fn(&[u8]) -> bool,
) -> Result<Sampled, String> {
    let timeout = if at_most.is_some() { timeout } else { timeout.max(PAGE_TIMEOUT) };
    let mut node = NodeConnection::open(access, timeout)?;
    let mark = site
        .map(|site| node.call(&query_of_site(site)).map_err(|error| format!("does not answer ACL: {error}")))
        .transpose()?;
    let is_marked = mark.and_then(|answer| parse_record(&answer.0).ok()).map(|mark| mark.is_some());
    let info = node.call(&["INFO", "server"]).map_err(|error| format!("does not answer INFO: {error}"))?.text();
    let run_id = info.lines().find_map(|line| line.trim().strip_prefix("run_id:")).unwrap_or_default().to_owned();
    let mut sample = Sample::default();
    let looked = each_key(&mut node, at_most, |key| {
        sample.keys += 1;
        sample.elsewhere += u64::from(is_elsewhere(key));
        ControlFlow::Continue(())
    });
    looked.map(|()| Sampled { run_id, is_marked, sample }).map_err(|why| format!("{why:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_counted_in_all_databases() {
        let info = "# Keyspace\r\ndb0:keys=12,expires=1,avg_ttl=0\r\ndb3:keys=5,expires=0,avg_ttl=0,subexpiry=0\r\ndbx:keys=1\r\n";
        assert_eq!(databases(info).collect::<Vec<_>>(), [(0, 12), (3, 5)]);
        assert_eq!(databases("# Keyspace\r\n").count(), 0);
    }
}
