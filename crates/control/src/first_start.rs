//! First start: makes a slot map from the nodes' keys. No key is served before all nodes have been examined.
//!
//! If all nodes reply, the map is made before the listeners open. If no map fits the keys, the start is refused. If a
//! node does not reply, no map is certain: the router starts, holds all nodes, and repeats the examination until it
//! succeeds.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use switchyard_policy::topology::{Continuum, RuleSet, Topology};
use switchyard_router::NodeAccess;
use tracing::{error, info, warn};

use crate::nodes::NodeAddress;
use crate::nodes::holdings::{FirstStart, first_start, primaries, served_by_another, unfit_for_a_map};
use crate::placement::Placement;
use crate::running::Running;

/// Interval between examinations while nodes do not reply.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Interval if all nodes reply but no map fits their keys, so that an operator must act.
const RETRY_INTERVAL_REFUSED: Duration = Duration::from_secs(10);

/// Maximum timeout for a reply before the listeners open. A slower node is examined again while the router runs.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// Time for nodes to notice that a router has ended.
const ROUTER_EXIT_WAIT: Duration = Duration::from_secs(3);

/// Receives progress reports of a long examination.
pub type ProgressCallback = fn(&str);

/// Initial state of a router without a stored slot map.
pub struct InitialState {
    /// Slot map.
    pub topology: Topology,
    /// Reason why the nodes must not be used yet.
    pub held: Option<String>,
}

/// Examines the nodes once. `rules`: configured placement rules. `beside`: proceed even if another router serves them.
pub fn examine_nodes(
    nodes: &[NodeAddress],
    rules: &RuleSet,
    timeout: Duration,
    beside: bool,
    tell: ProgressCallback,
) -> anyhow::Result<InitialState> {
    let primaries = primaries(nodes);
    if !beside {
        refuse_second_router(&primaries, timeout, tell)?;
    }
    match first_start(&primaries, rules, timeout, &tell)? {
        FirstStart::Place { topology, owner } => {
            log_single_owner(owner);
            Ok(InitialState { topology, held: None })
        }
        FirstStart::Refused(why) => bail!(why),
        FirstStart::Unknown(why) => {
            let held = unexamined_text(&why);
            warn!("{held}");
            let names: Vec<String> = nodes.iter().map(|node| node.name.clone()).collect();
            Ok(InitialState { topology: Topology::even(&names)?, held: Some(held) })
        }
    }
}

/// Like [`examine_nodes`], for a pool: its list of servers determines the location of each key, whatever keys the nodes
/// have. Misplaced keys are normal in a fleet that twemproxy served. They only use memory, so this does not search for
/// them.
pub fn examine_pool(
    continuum: Continuum,
    nodes: &[NodeAddress],
    timeout: Duration,
    beside: bool,
    tell: ProgressCallback,
) -> anyhow::Result<InitialState> {
    let primaries = primaries(nodes);
    if !beside {
        refuse_second_router(&primaries, timeout, tell)?;
    }
    if let Some(why) = unfit_for_a_map(&primaries, timeout) {
        bail!(why);
    }
    Ok(InitialState { topology: Topology::on_continuum(Arc::new(continuum)), held: None })
}

/// Fails if another router still serves these nodes after [`ROUTER_EXIT_WAIT`]. That router has its own map: a new one
/// may fit the keys now, but not after the other router moves some.
fn refuse_second_router(primaries: &[NodeAccess], timeout: Duration, tell: ProgressCallback) -> anyhow::Result<()> {
    let until = Instant::now() + ROUTER_EXIT_WAIT;
    let mut told = false;
    while let Some(node) = served_by_another(primaries, None, timeout) {
        if !std::mem::replace(&mut told, true) {
            tell(&format!(
                "another router serves node {}: waiting up to {} s for it to end",
                node.name,
                ROUTER_EXIT_WAIT.as_secs()
            ));
        }
        if Instant::now() >= until {
            bail!(second_router_text(node));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

fn second_router_text(node: &NodeAccess) -> String {
    format!(
        "this is a first start, and another router serves node {}: keys that the other router moves would not be found here. Use its state directory \
         (--state-dir, and --standby to wait until it has ended), or stop it first. If neither router ever moves keys: --allow-other-router",
        node.name
    )
}

fn log_single_owner(owner: Option<(String, u64)>) {
    if let Some((name, keys)) = owner {
        info!(
            "node {name} has all keys ({keys}), so it owns all slots, and the other nodes own none. To spread the keys: `switchyard balance`. To add \
             a node later and give it its share: `switchyard nodes add HOST:PORT --rebalance`"
        );
    }
}

fn unexamined_text(why: &str) -> String {
    format!(
        "this is a first start, and no key is served until the keys of each node are known: {why}. Check that node, or start without it and add it later \
         (`switchyard nodes add`)"
    )
}

/// Repeats the examination until it succeeds.
pub struct Discovery {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Discovery {
    /// Starts the thread of a router that serves but holds all nodes. `held`: the reason logged so far. `own`:
    /// identifier of the state directory, if no other router may serve the nodes.
    pub fn start(
        placement: Arc<Placement>,
        running: Arc<Running>,
        rules: RuleSet,
        timeout: Duration,
        own: Option<String>,
        held: String,
        tell: ProgressCallback,
    ) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("first-look".to_owned())
            .spawn(move || {
                let (mut held, mut pause) = (held, RETRY_INTERVAL);
                while matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                    match examine(&placement, &running, &rules, own.as_deref(), timeout, tell) {
                        Ok(()) => return info!("all nodes have been examined, and are used from now on"),
                        Err((why, next)) => {
                            pause = next;
                            if why != held {
                                error!("{why}");
                                running.with(|router| router.hold(Some(&why)));
                                held = why;
                            }
                        }
                    }
                }
            })
            .context("cannot start a thread")?;
        Ok(Self { stop, thread })
    }

    /// Ends the thread, without waiting for an examination in progress.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

/// Examines the nodes, and lets the router use them if possible. Otherwise returns the reason, and the time until the
/// next examination.
fn examine(
    placement: &Placement,
    running: &Running,
    rules: &RuleSet,
    own: Option<&str>,
    timeout: Duration,
    tell: ProgressCallback,
) -> Result<(), (String, Duration)> {
    let again = |error: anyhow::Error| (unexamined_text(&format!("{error:#}")), RETRY_INTERVAL);
    let (Some(topology), Some(access)) = (placement.topology(), running.with(switchyard_router::Router::node_access))
    else {
        return Err(again(anyhow!("the router is stopping")));
    };
    let nodes: Vec<NodeAccess> = topology.nodes().filter_map(|node| access.get(&node.id).cloned()).collect();
    if let Some(node) = own.and_then(|own| served_by_another(&nodes, Some(own), timeout)) {
        return Err((second_router_text(node), RETRY_INTERVAL));
    }
    match first_start(&nodes, rules, timeout, &tell).map_err(|error| again(error.into()))? {
        FirstStart::Place { topology, owner } => {
            placement.confirm(topology).map_err(again)?;
            running.with(|router| router.hold(None));
            log_single_owner(owner);
            Ok(())
        }
        FirstStart::Refused(why) => Err((why, RETRY_INTERVAL_REFUSED)),
        FirstStart::Unknown(why) => Err((unexamined_text(&why), RETRY_INTERVAL)),
    }
}
