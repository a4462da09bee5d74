//! A cluster as storage: the view of the cluster that all workers share, and requests to refresh it.
//!
//! Workers change the view by a member's redirect, for one slot at once; its keeper, outside of this crate, replaces it
//! by reports of members. Both publish a snapshot only if an owner has changed. A worker takes the lock only for
//! redirects and handshakes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::cluster::{Adopted, Claims, Member, Place, Shard, View, ViewError};
use switchyard_policy::topology::{NodeId, Slot, Topology};

use crate::lock::lock;
use crate::settings::NodeAccess;
use crate::shared::{RoutingSnapshot, Shared};

/// View of a cluster, shared by its keeper and the workers.
#[derive(Debug)]
pub struct ClusterMap {
    view: Mutex<View>,
    started: Instant,
    requests: Mutex<Requests>,
    requested: Condvar,
}

/// Maximum number of addresses that wait to be resolved to members.
const PLACES_MAX: usize = 64;

/// Requests of workers to the keeper of the map.
#[derive(Debug, Default)]
struct Requests {
    is_any: bool,
    /// Addresses of members that are in no report, because they own no slots yet.
    places: BTreeSet<(String, u16)>,
}

impl ClusterMap {
    /// Begins with a first report of a member.
    ///
    /// # Errors
    /// If the report is not usable.
    pub fn new(shards: &[Shard]) -> Result<Arc<Self>, ViewError> {
        Ok(Arc::new(Self {
            view: Mutex::new(View::new(shards, 0)?),
            started: Instant::now(),
            requests: Mutex::default(),
            requested: Condvar::new(),
        }))
    }

    /// Owners of the slots.
    pub fn topology(&self) -> Arc<Topology> {
        lock(&self.view).topology().clone()
    }

    /// Members by number.
    pub fn members(&self) -> Vec<(NodeId, Member)> {
        lock(&self.view).members().map(|(node, member)| (node, member.clone())).collect()
    }

    /// Members whose replicas have replaced them. Such a member may have been suspended, and then report an old map.
    pub fn replaced(&self) -> Vec<Member> {
        let view = lock(&self.view);
        view.replaced().filter_map(|node| view.member(node).cloned()).collect()
    }

    /// Members to which a report gives slots of others, and which must confirm it.
    pub fn gaining(&self, shards: &[Shard]) -> BTreeSet<Member> {
        lock(&self.view).gaining(shards)
    }

    /// Waits until a worker requests a refresh of the map. Returns false after `timeout`.
    pub fn wait_for_request(&self, timeout: Duration) -> bool {
        let requests = lock(&self.requests);
        let waited = self.requested.wait_timeout_while(requests, timeout, |requests| !requests.is_any);
        let (mut requests, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut requests.is_any)
    }

    /// Requests a refresh of the map.
    pub fn request(&self) {
        lock(&self.requests).is_any = true;
        self.requested.notify_one();
    }

    /// Takes the addresses of members that are in no report.
    pub fn take_places(&self) -> BTreeSet<(String, u16)> {
        std::mem::take(&mut lock(&self.requests).places)
    }

    /// Requests that the member at an address be added.
    fn request_place(&self, host: &str, port: u16) {
        let mut requests = lock(&self.requests);
        if requests.places.len() < PLACES_MAX {
            requests.places.insert((host.to_owned(), port));
        }
        drop(requests);
        self.request();
    }

    /// Milliseconds since the first report.
    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Id of a primary in the cluster.
    pub(crate) fn member_id(&self, node: NodeId) -> Option<String> {
        lock(&self.view).member(node).map(|member| member.id.clone())
    }
}

impl Shared {
    /// Adopts a report. `access`: access to every reported primary.
    pub(crate) fn adopt_shards(
        &self,
        shards: &[Shard],
        access: &BTreeMap<Member, NodeAccess>,
    ) -> Result<bool, ViewError> {
        let Some(map) = &self.cluster else { return Ok(false) };
        let mut view = lock(&map.view);
        let is_changed = view.adopt(shards, map.now_ms())?;
        Ok(self.publish_members(&view, access, is_changed))
    }

    /// Adds a member that owns no slots.
    pub(crate) fn adopt_member(&self, member: &Member, access: NodeAccess) -> bool {
        let Some(map) = &self.cluster else { return false };
        let mut view = lock(&map.view);
        let is_changed = view.add(member, map.now_ms());
        self.publish_members(&view, &BTreeMap::from([(member.clone(), access)]), is_changed)
    }

    /// `view` is locked, so that publications are in the order of epochs. Returns whether anything has changed.
    fn publish_members(&self, view: &View, access: &BTreeMap<Member, NodeAccess>, is_changed: bool) -> bool {
        let of = |node: NodeId, member: &Member, routing: &RoutingSnapshot| {
            access.get(member).or_else(|| routing.live.nodes.get(&node)).cloned()
        };
        // Addresses of names may have changed although no owner has.
        let nodes = |routing: &RoutingSnapshot| -> BTreeMap<NodeId, NodeAccess> {
            view.members().filter_map(|(node, member)| Some((node, of(node, member, routing)?))).collect()
        };
        if !is_changed && nodes(&self.routing()) == self.routing().live.nodes {
            return false;
        }
        self.change_routing(|routing| {
            let mut live = (*routing.live).clone();
            live.nodes = nodes(routing);
            let servers = routing.servers_under(view.topology());
            RoutingSnapshot { topology: view.topology().clone(), live: Arc::new(live), servers, ..routing.clone() }
        });
        true
    }

    /// Adopts the owner of a slot from a redirect of the member `from`. `None`: the owner is unknown until the map is
    /// refreshed.
    pub(crate) fn moved(&self, slot: Slot, to: Place<'_>, from: NodeId) -> Option<NodeId> {
        let map = self.cluster.as_ref()?;
        let mut view = lock(&map.view);
        let owner = view.find(to, from);
        let is_changed = owner.is_some_and(|owner| view.moved(slot, owner));
        if is_changed {
            self.change_routing(|routing| {
                let servers = routing.servers_under(view.topology());
                RoutingSnapshot { topology: view.topology().clone(), servers, ..routing.clone() }
            });
        }
        drop(view);
        if is_changed || owner.is_none() {
            map.request();
        }
        owner
    }

    /// Adopts the slots that members claim, and the open slots for scans. Returns false if this does not show all places
    /// of keys: an owner's claims are missing, a member is in no report yet, or the open slots exceed what a scan follows.
    pub(crate) fn adopt_claims(&self, claims: &[(NodeId, Claims)]) -> bool {
        let Some(map) = &self.cluster else { return false };
        let mut view = lock(&map.view);
        let Adopted { open, returned, unknown, missing, is_changed } = view.adopt_claims(claims);
        if is_changed {
            self.change_routing(|routing| {
                let servers = routing.servers_under(view.topology());
                RoutingSnapshot { topology: view.topology().clone(), servers, ..routing.clone() }
            });
        }
        // Still under the lock, so that older claims do not replace these.
        let is_complete = lock(&self.scans).note_members(open, &returned, self.scan_tick());
        drop(view);
        if !missing.is_empty() {
            map.request();
        }
        for (host, port) in unknown.iter().filter_map(|peer| peer.place.as_ref()) {
            map.request_place(host, *port);
        }
        is_complete && unknown.is_empty() && missing.is_empty()
    }

    /// Returns the members of the cluster whose replicas have replaced them.
    pub(crate) fn replaced_members(&self) -> Vec<NodeId> {
        self.cluster.as_ref().map(|map| lock(&map.view).replaced().collect()).unwrap_or_default()
    }

    /// Requests a refresh of the map.
    pub(crate) fn request_map(&self) {
        if let Some(map) = &self.cluster {
            map.request();
        }
    }

    /// Finds the member at an address, from text that a client may have written.
    pub(crate) fn known_member_at(&self, to: Place<'_>, from: NodeId) -> Option<NodeId> {
        lock(&self.cluster.as_ref()?.view).find(to, from)
    }

    /// Finds the member at the address in a redirect of the member `from`. `None`: it is unknown until the map is
    /// refreshed.
    pub(crate) fn member_at(&self, to: Place<'_>, from: NodeId) -> Option<NodeId> {
        let map = self.cluster.as_ref()?;
        let view = lock(&map.view);
        let node = view.find(to, from);
        let host = to.host.map(str::to_owned).or_else(|| Some(view.member(from)?.host.clone()));
        drop(view);
        if let (None, Some(host)) = (node, host) {
            map.request_place(&host, to.port);
        }
        node
    }
}
