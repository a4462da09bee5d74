//! What keys the nodes hold: asked before a first start makes a slot map, before a stored map is believed, and by
//! whoever makes a map anew.
//!
//! `switchyard serve` and `switchyard doctor` come here with the same question and get the same answer. What follows
//! from counts and samples is decided by `policy::topology`.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::{First, NodeId, PlaceError, Sample, Topology};
use switchyard_resp::units::counted;
use switchyard_router::{NodeAccess, mark_in, question_of, site_of_mark};

use super::clients::routers;
use super::connection::{Answer, NodeConnection};
use super::fit::{is_router, unfit};
use super::{NodeAddress, Server, servers};

/// Answers to the first questions are short: a server that sends more is none.
pub const ANSWER_MAX: usize = 1 << 20;

/// The same of a list of clients: some ten thousand of them.
const LIST_MAX: usize = 16 << 20;

/// Keys of each database that are looked at before a stored map is believed.
pub const SAMPLE: u64 = 1000;

/// Pages that are read for them, where most are empty.
const SAMPLE_PAGES: u32 = 50;

/// How long a node may take for a page of names, at least: it may have much else to do.
const PAGE_PATIENCE: Duration = Duration::from_secs(30);

/// How often it is told how far a long look has come.
const TELL: Duration = Duration::from_secs(5);

/// How a first start goes.
#[derive(Debug)]
pub enum FirstStart {
    /// By a map every key is found.
    Place {
        /// The map.
        topology: Topology,
        /// The node that has all keys of several nodes, and how many.
        owner: Option<(String, u64)>,
    },
    /// There is no map that may be chosen without being told; the text says why, and which ways there are.
    Refused(String),
    /// A node could not be looked at; the text says which and why.
    Unknown(String),
}

/// The primaries of these nodes, as they are now.
pub fn primaries(nodes: &[NodeAddress]) -> Vec<NodeAccess> {
    let one = |node: &NodeAddress| {
        // There is nothing to find out where there is one server.
        let first = if node.has_replicas() { servers(node).into_iter().next() } else { None };
        first.map_or_else(|| node.access(), |server: Server| server.access)
    };
    at_once(nodes, one)
}

/// Asks all of them at the same time.
pub fn at_once<T: Sync, R: Send>(items: &[T], ask: impl Fn(&T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = items.iter().map(|item| scope.spawn(|| ask(item))).collect();
        asked.into_iter().filter_map(|asked| asked.join().ok()).collect()
    })
}

/// A node that a router of another state directory than `own` uses. Nodes that do not answer, or do not tell who their
/// clients are, are left out.
pub fn served_by_another<'a>(nodes: &'a [NodeAccess], own: Option<&str>, patience: Duration) -> Option<&'a NodeAccess> {
    let is_served = |node: &NodeAccess| {
        let connection =
            NodeConnection::open(node, patience).ok().map(|connection| connection.with_answers_up_to(LIST_MAX));
        let list = connection.and_then(|mut connection| connection.call(&["CLIENT", "LIST"]).ok());
        list.is_some_and(|list| routers(&list.text()).iter().any(|site| Some(site.as_str()) != own))
    };
    let served = at_once(nodes, is_served);
    nodes.iter().zip(served).find_map(|(node, served)| served.then_some(node))
}

/// Looks at what the nodes hold, and says which map a first start may begin with. `tell` hears how far a long look has
/// come.
pub fn first_start(
    nodes: &[NodeAccess],
    patience: Duration,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<FirstStart, PlaceError> {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let looks = at_once(nodes, |node| look(node, &names, patience).map_err(|why| format!("node {} {why}", node.name)));
    let looks: Vec<Holding> = match looks.into_iter().collect() {
        Ok(looks) => looks,
        Err(why) => return Ok(FirstStart::Unknown(why)),
    };
    if let Some(why) = looks.iter().find_map(|look| look.unfit.as_ref()) {
        return Ok(FirstStart::Refused(format!("{why}. List it no more, or mend that, and start again")));
    }
    if let Some((node, others)) = nodes.iter().zip(&looks).find_map(|(node, look)| Some((node, look.others.as_ref()?)))
    {
        return Ok(FirstStart::Refused(format!(
            "the state directory has no slot map, and {}. Choose one of these ways: give the state directory of this fleet (--state-dir); or list all of its nodes \
             here; or, where no map fits their keys, make it from where the keys are (`switchyard recover`, with all of the nodes); {}",
            others.describe(&node.name),
            others.way_out(),
        )));
    }
    if let Some(why) =
        one_server_twice(nodes.iter().zip(&looks).map(|(node, look)| (node.name.as_str(), look.run_id.as_str())))
    {
        return Ok(FirstStart::Refused(why));
    }
    let counts: Vec<(String, u64)> =
        nodes.iter().zip(&looks).map(|(node, look)| (node.name.clone(), look.keys)).collect();
    Ok(match Topology::first(&counts)? {
        First::Even(topology) => FirstStart::Place { topology, owner: None },
        First::Owner(topology, owner) => FirstStart::Place { topology, owner: counts.into_iter().nth(owner.index()) },
        First::IfKeysFit(topology) => match find_elsewhere(&topology, nodes, &counts, patience, tell) {
            Ok(None) => FirstStart::Place { topology, owner: None },
            Ok(Some(found)) => FirstStart::Refused(refusal(&counts, &found, looks.iter().any(|look| look.is_marked))),
            Err(why) => FirstStart::Unknown(why),
        },
    })
}

/// Why nodes cannot be a fleet, by those that answer, whatever the map.
pub fn unfit_for_a_map(nodes: &[NodeAccess], patience: Duration) -> Option<String> {
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    let looks = at_once(nodes, |node| look(node, &names, patience).ok());
    let answering = || nodes.iter().zip(&looks).filter_map(|(node, look)| Some((node, look.as_ref()?)));
    let unfit = answering().find_map(|(_, look)| look.unfit.as_ref());
    unfit
        .map(|why| format!("{why}. List it no more, or mend that, and start again"))
        .or_else(|| one_server_twice(answering().map(|(node, look)| (node.name.as_str(), look.run_id.as_str()))))
}

/// Why nodes, each with the run id of its process, cannot be a fleet, where two are one.
pub fn one_server_twice<'a>(nodes: impl Iterator<Item = (&'a str, &'a str)>) -> Option<String> {
    let mut met = BTreeMap::new();
    for (name, run_id) in nodes.filter(|(_, run_id)| !run_id.is_empty()) {
        if let Some(other) = met.insert(run_id, name) {
            return Some(format!(
                "{other} and {name} are one server under two names (both have run_id {run_id}), so slots of both would mix: take one of them out of the list of nodes"
            ));
        }
    }
    None
}

/// Nodes that had keys of a fleet to which this one belongs, and that nobody has listed.
#[derive(Debug)]
pub struct Others {
    /// The mark that says so.
    user: String,
    names: Vec<String>,
}

impl Others {
    /// What is wrong at the node of this name.
    pub fn describe(&self, node: &str) -> String {
        format!(
            "node {node} belongs to a fleet that has keys at other nodes, too: {}. Clients would read nil for these",
            self.names.join(", ")
        )
    }

    /// What to do where the others belong to it no more.
    pub fn way_out(&self) -> String {
        format!(
            "or, if those nodes belong to it no more, remove what says so, at each node that is listed: `redis-cli ACL DELUSER {}`",
            self.user
        )
    }
}

/// Nodes that had keys of the same fleet, by the marks that routers have left at this one
/// ([`switchyard_policy::seat`]). Where it does not show them, nothing is known.
pub fn others(node: &mut NodeConnection, listed: &[&str]) -> Result<Option<Others>, String> {
    let mut ask = |args: &[&str]| node.call(args).map_err(|error| format!("does not answer ACL: {error}"));
    let users = ask(&["ACL", "USERS"])?;
    for user in users.items().iter().map(Answer::text).filter(|user| site_of_mark(user).is_some()) {
        let Ok(Some(mark)) = mark_in(&ask(&["ACL", "GETUSER", &user])?.0) else { continue };
        let names = mark.missing(listed);
        if !names.is_empty() {
            return Ok(Some(Others { user, names }));
        }
    }
    Ok(None)
}

/// Whether any router has left its mark at a node, as far as it shows that.
fn is_marked(node: &mut NodeConnection) -> Result<bool, String> {
    let users = node.call(&["ACL", "USERS"]).map_err(|error| format!("does not answer ACL: {error}"))?;
    Ok(users.items().iter().any(|user| site_of_mark(&user.text()).is_some()))
}

/// What a first start must know of a node.
#[derive(Debug)]
struct Holding {
    run_id: String,
    /// Of all databases, as the node counts them.
    keys: u64,
    others: Option<Others>,
    /// A router has served it.
    is_marked: bool,
    /// Why it cannot be a node, whatever it holds.
    unfit: Option<String>,
}

fn look(access: &NodeAccess, listed: &[&str], patience: Duration) -> Result<Holding, String> {
    let mut node = NodeConnection::open(access, patience)?.with_answers_up_to(ANSWER_MAX);
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
    let unfit = unfit(&access.name, &(server + &info("cluster")? + &info("replication")?), is_router);
    Ok(Holding { run_id, keys, others, is_marked, unfit })
}

/// The databases that have keys, and how many, from INFO.
pub fn databases(info: &str) -> impl Iterator<Item = (u32, u64)> {
    info.lines().filter_map(|line| {
        let (name, fields) = line.trim().strip_prefix("db")?.split_once(':')?;
        let keys = fields.split(',').find_map(|field| field.strip_prefix("keys="))?;
        Some((name.parse().ok()?, keys.parse().ok()?))
    })
}

/// Gives `visit` the names of all keys of all databases, or of so many of each. SCAN may show a key twice. What the
/// router makes for itself is left out.
pub fn each_key(
    node: &mut NodeConnection,
    at_most: Option<u64>,
    mut visit: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> anyhow::Result<()> {
    let mut ask = |args: &[&[u8]]| {
        let answer = node.call(args).context("does not answer")?;
        match answer.error() {
            Some(error) => bail!("refuses {}: {error}", String::from_utf8_lossy(args[0])),
            None => Ok(answer),
        }
    };
    let info = ask(&[b"INFO", b"keyspace"])?.text();
    for (database, _) in databases(&info) {
        ask(&[b"SELECT", database.to_string().as_bytes()])?;
        let (mut cursor, mut seen, mut pages) = (b"0".to_vec(), 0, 0);
        loop {
            let answer = ask(&[b"SCAN", &cursor, b"COUNT", b"1000"])?;
            let [next, page] = &answer.items()[..] else { bail!("answers SCAN in a form that is not known") };
            for key in page.items().iter().filter(|key| !is_temporary(key.bytes())) {
                if visit(key.bytes()).is_break() {
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

/// Which of these names any database of a node has.
///
/// # Errors
/// If it does not answer.
pub fn has_each(node: &mut NodeConnection, names: &[&[u8]]) -> anyhow::Result<Vec<bool>> {
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

/// A key that is elsewhere than a map looks for it. Its name is nobody's business.
struct Elsewhere {
    node: String,
    slot: u16,
    owner: String,
}

/// Looks at every key of every node until one is elsewhere than the map looks.
fn find_elsewhere(
    topology: &Topology,
    nodes: &[NodeAccess],
    counts: &[(String, u64)],
    patience: Duration,
    tell: &(dyn Fn(&str) + Sync),
) -> Result<Option<Elsewhere>, String> {
    let is_over = AtomicBool::new(false);
    let numbered: Vec<(NodeId, &NodeAccess, u64)> = (0..)
        .map(NodeId)
        .zip(nodes)
        .zip(counts)
        .map(|((id, node), (_, keys))| (id, node, *keys))
        .filter(|(.., keys)| *keys > 0)
        .collect();
    let found = at_once(&numbered, |(id, node, keys)| {
        let mut found = None;
        let (mut seen, mut told) = (0_u64, Instant::now());
        let mut connection = NodeConnection::open(node, patience.max(PAGE_PATIENCE))
            .map_err(|why| format!("node {} {why}", node.name))?;
        let looked = each_key(&mut connection, None, |key| {
            seen += 1;
            if told.elapsed() >= TELL {
                told = Instant::now();
                tell(&format!(
                    "node {}: looked at {seen} of {}, before it is known which node owns what",
                    node.name,
                    counted(*keys, "key")
                ));
            }
            let owner = topology.owner_of(key);
            if owner != *id {
                let name = topology.node(owner).map_or_else(String::new, |owner| owner.name.clone());
                found = Some(Elsewhere { node: node.name.clone(), slot: topology.slot_of(key).number(), owner: name });
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

/// Says why no map may be chosen, and the ways out. `was_served`: nodes were a fleet already, all of whose keys are
/// wanted.
fn refusal(counts: &[(String, u64)], found: &Elsewhere, was_served: bool) -> String {
    let having: Vec<String> = counts
        .iter()
        .filter(|(_, keys)| *keys > 0)
        .map(|(name, keys)| format!("{name} ({})", counted(*keys, "key")))
        .collect();
    let most = counts.iter().max_by_key(|(_, keys)| *keys).map_or("HOST:PORT", |(name, _)| name);
    let ways = if was_served {
        "A router has served these nodes, so its state directory is lost, or is elsewhere: give that (--state-dir), or make the map from where the keys are \
         (`switchyard recover`, with all nodes of the fleet). Nothing is lost by either"
            .to_owned()
    } else {
        format!(
            "Choose one of these ways: give the state directory of this fleet (--state-dir); or make the map from where the keys are (`switchyard recover`); or start \
             with the one node that has the right keys alone (such as --node {most}), and add the others once they are empty (`switchyard nodes add`); or empty the \
             others (FLUSHALL)"
        )
    };
    format!(
        "the state directory has no slot map, and several nodes hold keys: {}. By a new map clients would read nil for some of them: node {} has a key of slot {}, \
         which would belong to {}. {ways}",
        having.join(", "),
        found.node,
        found.slot,
        found.owner,
    )
}

/// What a look at some keys of a node says of a map.
#[derive(Debug)]
pub struct Sampled {
    /// The process.
    pub run_id: String,
    /// Whether it keeps a mark of the state directory; `None`: it does not say.
    pub is_marked: Option<bool>,
    /// Whether the process is known is for whoever asks to say.
    pub sample: Sample,
}

/// Looks at so many keys of a node, or at all, and at the mark of a site. `is_elsewhere`: whether the map looks
/// elsewhere for a key.
pub fn sample(
    access: &NodeAccess,
    patience: Duration,
    site: Option<&str>,
    at_most: Option<u64>,
    is_elsewhere: impl Fn(&[u8]) -> bool,
) -> Result<Sampled, String> {
    let patience = if at_most.is_some() { patience } else { patience.max(PAGE_PATIENCE) };
    let mut node = NodeConnection::open(access, patience)?;
    let mark = site
        .map(|site| node.call(&question_of(site)).map_err(|error| format!("does not answer ACL: {error}")))
        .transpose()?;
    let is_marked = mark.and_then(|answer| mark_in(&answer.0).ok()).map(|mark| mark.is_some());
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
