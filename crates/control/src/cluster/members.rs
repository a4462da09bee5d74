//! Connections to the primaries of a cluster, and their state as one value.
//!
//! Primaries without slots are members, too, so they are read from `CLUSTER NODES`: the router's map has owners only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::cluster::reshard::{Job, Survey};
use switchyard_policy::cluster::{Member, Nodes};
use switchyard_policy::topology::{Node, NodeId};
use switchyard_policy::topology::{Slot, Topology};

use super::report::ClusterReader;
use crate::nodes::{Answer, NodeConnection};

/// Timeout of replies. A `MIGRATE` of a large key takes long.
const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// Connections to members, opened when they are needed.
pub(super) struct Members {
    reader: Arc<ClusterReader>,
    /// Members of the router's map, which has the addresses for clients.
    known: Vec<Member>,
    places: BTreeMap<String, Member>,
    open: BTreeMap<String, NodeConnection>,
    /// Members that have `CLUSTER MIGRATESLOTS`.
    with_jobs: BTreeSet<String>,
}

impl Members {
    pub(super) fn new(reader: Arc<ClusterReader>, known: Vec<Member>) -> Self {
        let places = known.iter().map(|member| (member.id.clone(), member.clone())).collect();
        Self { reader, known, places, open: BTreeMap::new(), with_jobs: BTreeSet::new() }
    }

    /// Name of a member in reports.
    pub(super) fn name(&self, id: &str) -> String {
        self.places.get(id).map_or_else(|| id.to_owned(), Member::name)
    }

    /// A member with its address for clients.
    pub(super) fn place(&self, id: &str) -> Option<&Member> {
        self.places.get(id)
    }

    /// Access to a member, with the credentials that other members need as well.
    pub(super) fn access(&self, id: &str) -> Option<switchyard_router::NodeAccess> {
        self.place(id).map(|member| self.reader.access_of(member))
    }

    /// Whether source and target have `CLUSTER MIGRATESLOTS`.
    pub(super) fn have_jobs(&self, source: &str, target: &str) -> bool {
        self.with_jobs.contains(source) && self.with_jobs.contains(target)
    }

    /// Connection to a member. The caller must call [`Self::forget`] after an error.
    pub(super) fn connection(&mut self, id: &str) -> Result<&mut NodeConnection, String> {
        if !self.open.contains_key(id) {
            let place = self.places.get(id).ok_or_else(|| format!("{id} has no known address"))?;
            let connection = self.reader.connect(place)?;
            self.open.insert(id.to_owned(), connection);
        }
        self.open.get_mut(id).ok_or_else(|| "it has no connection".to_owned())
    }

    /// Closes the connection to a member.
    pub(super) fn forget(&mut self, id: &str) {
        self.open.remove(id);
    }

    /// Sends a command to a member, and waits for the reply for `timeout`. An error is that of the connection.
    pub(super) fn call_within<A: AsRef<[u8]>>(
        &mut self,
        id: &str,
        args: &[A],
        timeout: Duration,
    ) -> Result<Answer, String> {
        let connection = self.connection(id)?;
        let answer = connection.set_timeout(timeout).and_then(|()| connection.call(args));
        answer.map_err(|error| {
            self.forget(id);
            format!("does not answer: {error}")
        })
    }

    /// Sends a command to a member.
    pub(super) fn call<A: AsRef<[u8]>>(&mut self, id: &str, args: &[A]) -> Result<Answer, String> {
        self.call_within(id, args, REPLY_TIMEOUT)
    }

    /// Sends commands to a member together.
    pub(super) fn call_all<A: AsRef<[u8]>>(&mut self, id: &str, commands: &[Vec<A>]) -> Result<Vec<Answer>, String> {
        let connection = self.connection(id)?;
        let answers = connection.set_timeout(REPLY_TIMEOUT).and_then(|()| connection.call_all(commands));
        answers.map_err(|error| {
            self.forget(id);
            format!("does not answer: {error}")
        })
    }

    /// Reads the state of all primaries.
    ///
    /// # Errors
    /// If no member shows the others.
    pub(super) fn survey(&mut self) -> Result<Survey, String> {
        let first = self.first_view()?;
        let mut survey = Survey::default();
        for member in first {
            let name = member.name();
            self.places.insert(member.id.clone(), member.clone());
            if let Err(why) = self.look(&member.id, &mut survey) {
                survey.add_silent(name, why);
            }
        }
        Ok(survey)
    }

    /// Reads the state of a member again.
    pub(super) fn look(&mut self, id: &str, survey: &mut Survey) -> Result<(), String> {
        let timeout = self.reader.timeout();
        let answer = self.call_within(id, &["CLUSTER", "NODES"], timeout)?;
        if let Some(error) = answer.error() {
            return Err(format!("refuses CLUSTER NODES: {error}"));
        }
        let nodes = Nodes::parse(&answer.text()).ok_or("sends a reply to CLUSTER NODES in an unknown form")?;
        if nodes.me() != id {
            self.forget(id);
            return Err(format!("is another member, {}", nodes.me()));
        }
        let answer = self.call_within(id, &["CLUSTER", "GETSLOTMIGRATIONS"], timeout)?;
        let jobs: Vec<Job> = match answer.error() {
            // Servers before Valkey 9.
            Some(_) => {
                self.with_jobs.remove(id);
                Vec::new()
            }
            None => {
                self.with_jobs.insert(id.to_owned());
                answer.items().iter().filter_map(job).collect()
            }
        };
        survey.add(nodes, jobs);
        Ok(())
    }

    /// Primaries as the first member shows them that replies.
    fn first_view(&mut self) -> Result<Vec<Member>, String> {
        let mut reasons = Vec::new();
        let mut ids: Vec<String> = self.places.keys().cloned().collect();
        ids.sort_by_key(|id| !self.open.contains_key(id));
        for id in ids {
            let timeout = self.reader.timeout();
            let why = match self.call_within(&id, &["CLUSTER", "NODES"], timeout) {
                Ok(answer) => match (answer.error(), Nodes::parse(&answer.text())) {
                    (None, Some(nodes)) => return Ok(self.primaries(&nodes)),
                    (Some(error), _) => format!("refuses CLUSTER NODES: {error}"),
                    (None, None) => "sends a reply to CLUSTER NODES in an unknown form".to_owned(),
                },
                Err(why) => why,
            };
            reasons.push(format!("{} {why}", self.name(&id)));
        }
        Err(reasons.join("; "))
    }

    /// Primaries with their addresses for clients: as the router's map has them, and otherwise in the same notation.
    fn primaries(&self, nodes: &Nodes) -> Vec<Member> {
        let of_map = |id: &str| self.known.iter().find(|known| known.id == id);
        let have_names = nodes.primaries().any(|(member, name)| {
            !name.is_empty() && of_map(&member.id).is_some_and(|known| known.host.eq_ignore_ascii_case(name))
        });
        let place = |(member, name): (&Member, &str)| {
            let same = of_map(&member.id).filter(|known| known.port == member.port);
            match same {
                Some(known) => known.clone(),
                None if have_names && !name.is_empty() => Member { host: name.to_owned(), ..member.clone() },
                None => match (member.host.is_empty(), self.places.get(&member.id)) {
                    (true, Some(place)) => place.clone(),
                    _ => member.clone(),
                },
            }
        };
        nodes.primaries().map(place).collect()
    }
}

/// Parses an entry of `CLUSTER GETSLOTMIGRATIONS`: names and values by turns.
fn job(entry: &Answer) -> Option<Job> {
    let parts: Vec<String> = entry.items().iter().map(Answer::text).collect();
    Job::of(parts.chunks_exact(2).map(|pair| (pair[0].as_str(), pair[1].as_str())))
}

/// Returns the primaries as a topology, and their ids by number.
///
/// # Errors
/// If a slot has no owner.
pub(super) fn topology_of(members: &Members, survey: &Survey) -> Result<(Topology, Vec<String>), String> {
    let ids: Vec<String> = survey.primaries().map(str::to_owned).collect();
    let number = |id: &str| ids.iter().position(|known| known == id).and_then(|at| u16::try_from(at).ok()).map(NodeId);
    let nodes = ids.iter().filter_map(|id| Some(Node { id: number(id)?, name: members.name(id) })).collect();
    let mut ranges = Vec::new();
    for slot in Slot::all() {
        let owner = survey.owner(slot).and_then(number);
        let owner = owner.ok_or_else(|| format!("slot {} has no owner: redis-cli --cluster fix", slot.number()))?;
        match ranges.last_mut() {
            Some((last, range)) if *last == owner => *range = *std::ops::RangeInclusive::start(range)..=slot.number(),
            _ => ranges.push((owner, slot.number()..=slot.number())),
        }
    }
    let topology = Topology::from_parts(1, nodes, ranges, ids.len() as u32).map_err(|error| error.to_string())?;
    Ok((topology, ids))
}
