//! The reconcile loop: starts a change if the number of nodes differs from the target, and executes it step by step.
//!
//! Each step is recorded before it is taken, and first checks whether it is already done. A failed step is retried
//! after a growing pause; after [`ATTEMPTS`] the change is given up: a server that never opened its port is stopped,
//! any other server is left alone, and a node that could not be drained stays. Every stop goes through
//! [`super::removal`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use switchyard_policy::autoscale::{Clock, Decision, Millis, Now, SizeChange, decide_advised};
use switchyard_policy::topology::NodeId;
use switchyard_resp::units::counted;
use tracing::{info, warn};

use super::actions::{FleetActions, OpenMoves, name_of};
use super::history::LoadHistory;
use super::intent::{Change, DOCUMENT, Intent, LastSeen, Stage, StartedServer};
use super::local::credentials;
use super::notify::notify;
use super::removal::prove;
use super::{AutoscaleConfig, Event, Process, Provisioner, ProvisionerKind, ServerLocation, reason_text};
use crate::planner::Mode;
use crate::store::{RedbStore, StoreError, load_json, save_json};

/// Attempts at a step before the change is given up. Fewer for starting a server, because such an error is rarely
/// transient.
const ATTEMPTS: u32 = 8;
const STARTS: u32 = 4;
/// Attempts to add a standby server before the next one is used.
const STANDBY_JOINS: u32 = 2;

/// Pause after the first failure, and the maximum pause, in milliseconds.
const PAUSE: Millis = 500;
const PAUSE_MAX: Millis = 10_000;

/// Interval of checks whether started servers run, in milliseconds.
const REVIVED_EVERY: Millis = 5000;

/// Maximum wait for other or paused moves, in milliseconds.
const WAIT_MAX: Millis = 600_000;

#[derive(Debug, Default)]
struct Inner {
    config: AutoscaleConfig,
    intent: Intent,
    /// Latest decision of the policy.
    decision: Option<Decision>,
    /// Last decision in the history, in a mode that only observes.
    noted: Option<SizeChange>,
    revived: Option<Millis>,
    /// Servers that had ended at the last check, with the result of restarting them.
    failed_servers: BTreeMap<String, &'static str>,
    /// Last logged reason to rest.
    logged: Option<String>,
    /// Servers that an operator is adding now. They must not be stopped.
    joining: BTreeSet<String>,
    /// Server that is being stopped now. It cannot be added.
    stopping: Option<String>,
}

/// The autoscaler of a fleet.
#[derive(Debug)]
pub(crate) struct Autoscaler {
    store: Arc<RedbStore>,
    /// State directory.
    state: PathBuf,
    /// Clock of this run, and its start.
    clock: (Clock, Instant),
    history: LoadHistory,
    inner: Mutex<Inner>,
}

/// An operator's `nodes add` of a server in progress.
#[derive(Debug)]
pub(crate) struct JoinGuard<'a> {
    autoscaler: &'a Autoscaler,
    address: String,
}

impl JoinGuard<'_> {
    /// Releases the autoscaler's claim to the server, which has joined. Withdraws a pending stop.
    pub(crate) fn joined(&self, now: Now) {
        self.autoscaler.disown(&self.address, now);
    }
}

impl Drop for JoinGuard<'_> {
    fn drop(&mut self) {
        self.autoscaler.inner().joining.remove(&self.address);
    }
}

/// A stop of a server in progress, from its proof on.
struct StopGuard<'a>(&'a Autoscaler);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.inner().stopping = None;
    }
}

/// Result of a step.
enum Outcome {
    /// In progress, without an action by the loop.
    Wait,
    /// These moves were started, and this stage follows. The same stage again counts as an attempt, for the missing
    /// part.
    Ordered { next: Stage, moves: Vec<u64>, missing: Option<String> },
    /// The change waits for moves that an operator may have to end.
    Waits(String),
    /// The next stage follows.
    Next(Stage),
    /// The location of a new server was chosen.
    Chosen(ServerLocation),
    /// The change has ended.
    Done(String),
    /// The attempt failed.
    Failed(String),
    /// The change is given up.
    GivenUp(String),
}

/// State of the autoscaler, for reports and metrics.
#[derive(Clone, Debug)]
pub(crate) struct Autoscaling {
    pub(crate) config: AutoscaleConfig,
    pub(crate) wanted: Option<usize>,
    pub(crate) is_paused: bool,
    pub(crate) started: BTreeMap<String, StartedServer>,
    /// Number, stage, start of the stage, and error of the last attempt.
    pub(crate) change: Option<(u64, String, Millis, Option<String>)>,
    pub(crate) decision: Option<Decision>,
    pub(crate) events: Vec<Event>,
    pub(crate) done: u64,
    pub(crate) failed: u64,
    /// Remaining pause after a failure.
    pub(crate) pause: Option<Duration>,
}

impl Autoscaler {
    /// Resumes from the record. `state`: the state directory.
    pub(crate) fn open(store: Arc<RedbStore>, state: PathBuf) -> Result<Self, StoreError> {
        let mut intent: Intent = load_json(&*store, DOCUMENT)?;
        let wall = wall();
        let clock = (Clock::start(wall), Instant::now());
        intent.resume(clock.0.now(0, wall), PAUSE_MAX);
        let history = LoadHistory::open(&store, wall)?;
        Ok(Self { store, state, clock, history, inner: Mutex::new(Inner { intent, ..Inner::default() }) })
    }

    pub(crate) fn now(&self) -> Now {
        self.clock.0.now(self.clock.1.elapsed().as_millis() as Millis, wall())
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn tune(&self, config: &AutoscaleConfig) {
        self.inner().config = config.clone();
    }

    pub(crate) fn standing(&self) -> Autoscaling {
        let inner = self.inner();
        let Inner { config, intent, decision, .. } = &*inner;
        let change = intent
            .change
            .as_ref()
            .map(|change| (change.number, change.stage.text(), change.since, change.error.clone()));
        Autoscaling {
            config: config.clone(),
            wanted: intent.wanted,
            is_paused: intent.is_paused,
            started: intent.started.clone(),
            change,
            decision: decision.clone(),
            events: intent.events.iter().rev().cloned().collect(),
            done: intent.done,
            failed: intent.failed,
            pause: intent.state.failed_pause(self.now().run, &config.knobs).map(Duration::from_millis),
        }
    }

    /// Logs the reason why the autoscaler does not act when it changes.
    pub(crate) fn log_rest(&self, rest: Option<String>) {
        let mut inner = self.inner();
        if rest == inner.logged {
            return;
        }
        match &rest {
            Some(why) => warn!("the autoscaler is paused: {why}"),
            None => info!("the autoscaler acts again"),
        }
        inner.logged = rest;
    }

    /// Sets the target number of nodes, for an operator. If the fleet already has that many (`has`), a server that has
    /// not joined yet is stopped.
    pub(crate) fn set_target(&self, nodes: usize, has: usize, now: Now) -> Result<(), String> {
        let config = self.inner().config.clone();
        let (least, most) = (config.knobs.nodes_min, config.knobs.nodes_max);
        if !(least..=most).contains(&nodes) {
            return Err(format!(
                "{} is not between min-nodes ({least}) and max-nodes ({most}) of [autoscale]",
                counted(nodes, "node")
            ));
        }
        if nodes > has {
            config.configured_provisioner()?;
        }
        self.change(|intent| {
            intent.wanted = Some(nodes);
            if nodes <= has {
                intent.withdraw(now);
            }
            intent.abandon_stop(now, ATTEMPTS);
            Some(intent.note(now, None, "decided", format!("an operator requests {}", counted(nodes, "node"))))
        })
    }

    /// Pauses or resumes the policy.
    pub(crate) fn pause(&self, is_paused: bool) -> Result<(), String> {
        self.change(|intent| {
            intent.is_paused = is_paused;
            None
        })
    }

    /// Begins an operator's `nodes add` of this server. The server is not stopped while the result lives.
    ///
    /// # Errors
    /// If the server is being stopped now.
    pub(crate) fn begin_join(&self, address: &str) -> Result<JoinGuard<'_>, String> {
        let mut inner = self.inner();
        if inner.stopping.as_ref().is_some_and(|stopping| is_same(stopping, address)) {
            return Err(format!(
                "the autoscaler is stopping {address} now: add it when `switchyard autoscale` shows no change, or use another server"
            ));
        }
        inner.joining.insert(address.to_owned());
        Ok(JoinGuard { autoscaler: self, address: address.to_owned() })
    }

    /// Whether the server is being stopped now.
    pub(crate) fn is_stopping(&self, address: &str) -> bool {
        self.inner().stopping.as_ref().is_some_and(|stopping| is_same(stopping, address))
    }

    /// Releases the autoscaler's claim to a server that an operator has listed or added, so that it is never stopped.
    pub(crate) fn disown(&self, address: &str, now: Now) {
        let mut known: BTreeSet<String> = {
            let inner = self.inner();
            let stopping = inner.intent.change.as_ref().and_then(|change| match &change.stage {
                Stage::Stop(address, _) => Some(address.clone()),
                _ => None,
            });
            inner.intent.started.keys().cloned().chain(stopping).collect()
        };
        // Resolve without the lock, because a name server may be slow.
        known.retain(|known| is_same(known, address));
        if known.is_empty() {
            return;
        }
        let is_it = |address: &str| known.contains(address);
        let changed = self.change(|intent| {
            let owned = intent.started.len();
            intent.started.retain(|known, _| !is_it(known));
            let withdrawn = intent.withdraw_stop(now, is_it);
            let text = || format!("an operator has listed or added {address}: the autoscaler no longer removes it");
            withdrawn.or_else(|| (intent.started.len() < owned).then(|| intent.note(now, None, "decided", text())))
        });
        if let Err(why) = changed {
            warn!("{why}");
        }
    }

    /// Changes the record, and reports the event. If storing fails, nothing changes.
    fn change(&self, change: impl FnOnce(&mut Intent) -> Option<Event>) -> Result<(), String> {
        let mut inner = self.inner();
        let mut intent = inner.intent.clone();
        let event = change(&mut intent);
        intent.last = self.now();
        save_json(&*self.store, DOCUMENT, &intent)
            .map_err(|error| format!("the autoscaler cannot store its state: {error}"))?;
        inner.intent = intent;
        if let Some(event) = event {
            match &*event.kind {
                "failed" => warn!("autoscaler: {}", event.text),
                _ => info!("autoscaler: {}", event.text),
            }
            notify(&inner.config.notify, &event);
        }
        Ok(())
    }

    /// Performs one step. Returns whether another step can follow at once.
    pub(crate) fn step(&self, hands: &dyn FleetActions, now: Now, site: &str) -> bool {
        let (config, change) = {
            let inner = self.inner();
            (inner.config.clone(), inner.intent.change.clone())
        };
        if config.mode != Mode::Off && self.history.is_due(now) {
            let started = self.inner().intent.started.clone();
            self.history.observe(&hands.observed(&started), change.as_ref(), &self.store);
        }
        let provision = |way| config.provision(way, &self.state, site);
        self.revive(&provision, hands, now);
        let before = change.as_ref().map(|change| change.stage.clone());
        let stepped = match change {
            Some(change) if now.run < change.again => Ok(()),
            Some(change) => {
                let outcome = match provision(change.way) {
                    Ok(provisioner) => self.carry_out(&change, hands, &config, &*provisioner, now),
                    Err(why) => Outcome::Failed(why),
                };
                self.record_outcome(&change, outcome, hands, now)
            }
            None => self.start_change_if_needed(&config, hands, now),
        };
        if let Err(why) = stepped {
            warn!("{why}");
            return false;
        }
        let inner = self.inner();
        inner.intent.change.as_ref().is_some_and(|change| before.is_none_or(|before| before != change.stage))
    }

    /// Restarts servers that were started and should still run.
    fn revive(
        &self,
        provision: &dyn Fn(ProvisionerKind) -> Result<Box<dyn Provisioner>, String>,
        hands: &dyn FleetActions,
        now: Now,
    ) {
        let (started, joining) = {
            let mut inner = self.inner();
            if inner.revived.is_some_and(|revived| now.run < revived + REVIVED_EVERY) {
                return;
            }
            inner.revived = Some(now.run);
            let joining = match &inner.intent.change {
                Some(Change { stage: Stage::Join(address), .. }) => Some(address.clone()),
                _ => None,
            };
            (inner.intent.started.clone(), joining)
        };
        let nodes: BTreeSet<String> = hands.nodes().into_iter().map(|(_, name)| name).collect();
        let run_ids = hands.run_ids();
        for (address, server) in
            started.iter().filter(|(address, _)| nodes.contains(*address) || joining.as_ref() == Some(*address))
        {
            let Ok(provisioner) = provision(server.way) else { continue };
            let process = run_ids
                .get(address)
                .filter(|_| nodes.contains(address))
                .map(|run_id| LastSeen::Process(run_id.clone()));
            if let Some(seen) = process {
                self.note_seen(address, server, seen, &*provisioner);
            }
            let number = server.number;
            let Some(revived) = provisioner.revive(server, address, &|address| settings(hands, address)) else {
                self.inner().failed_servers.remove(address);
                continue;
            };
            let (kind, text) = match revived {
                Ok(()) => ("done", format!("the server {address} had ended, and was started again")),
                Err(why) => ("failed", format!("the server {address} has ended, and cannot be started again: {why}")),
            };
            // Report a server that ends repeatedly once, until it stays up.
            let is_new = self.inner().failed_servers.insert(address.clone(), kind) != Some(kind);
            if is_new && let Err(why) = self.change(|intent| Some(intent.note(now, Some(number), kind, text))) {
                warn!("{why}");
            }
        }
    }

    /// Records the latest process of a server. A local process counts only if the process group that was started holds
    /// the port.
    fn note_seen(&self, address: &str, started: &StartedServer, seen: LastSeen, provisioner: &dyn Provisioner) {
        if started.seen == seen && (started.way != ProvisionerKind::Local || started.host.is_some()) {
            return;
        }
        let host = match provisioner.process(started, address) {
            // Only this machine sees the process.
            Process::Listens => provisioner.host(),
            Process::Unknown => None,
            _ => return,
        };
        let noted = self.change(|intent| {
            if let Some(known) = intent.started.get_mut(address) {
                (known.seen, known.host) = (seen, host);
            }
            None
        });
        if let Err(why) = noted {
            warn!("{why}");
        }
    }

    /// Records the process of a server that this change has started and that is not a node yet, as soon as it replies.
    fn identify(&self, change: &Change, address: &str, hands: &dyn FleetActions, provisioner: &dyn Provisioner) {
        let Some(started) = self.inner().intent.started.get(address).cloned() else { return };
        let is_known = matches!(started.seen, LastSeen::Process(_)) && change.way != ProvisionerKind::Local;
        if started.number != change.number || is_known {
            return;
        }
        let seen = hands.inspect(address).ok().and_then(|seen| seen.run_id);
        match (seen, &started.seen) {
            (Some(run_id), _) => self.note_seen(address, &started, LastSeen::Process(run_id), provisioner),
            (None, LastSeen::Never) if change.way == ProvisionerKind::Local => {
                self.note_seen(address, &started, LastSeen::Listening, provisioner)
            }
            (None, _) => {}
        }
    }

    /// Starts a change if one is needed.
    fn start_change_if_needed(
        &self,
        config: &AutoscaleConfig,
        hands: &dyn FleetActions,
        now: Now,
    ) -> Result<(), String> {
        let (wanted, is_paused, started) = {
            let inner = self.inner();
            (inner.intent.wanted, inner.intent.is_paused, inner.intent.started.clone())
        };
        let nodes: BTreeSet<String> = hands.nodes().into_iter().map(|(_, name)| name).collect();
        if let Some((gone, of)) = started.iter().find(|(address, _)| !nodes.contains(*address)) {
            return self.begin(
                (Stage::Stop(gone.clone(), None), false),
                of.way,
                now,
                format!("{gone} is no longer a node, and its server is stopped"),
            );
        }
        let count = nodes.len();
        match wanted {
            Some(wanted) if wanted == count => {
                return self.change(|intent| {
                    intent.wanted = None;
                    None
                });
            }
            Some(wanted) if wanted > count => {
                let most = config.knobs.nodes_max;
                let way = config.configured_provisioner().and_then(|way| match wanted > most {
                    true => Err(format!("{} are wanted, and max-nodes is {most}", counted(wanted, "node"))),
                    false => Ok(way),
                });
                return match way {
                    Ok(way) => self.begin(
                        (Stage::Provision(None), false),
                        way,
                        now,
                        format!("{} are wanted", counted(wanted, "node")),
                    ),
                    Err(why) => self.change(|intent| {
                        intent.wanted = None;
                        Some(intent.note(now, None, "failed", format!("no node is added: {why}")))
                    }),
                };
            }
            Some(wanted) => {
                return match hands.observed(&started).cheapest() {
                    Ok(node) => self.begin_removal(
                        node,
                        &started,
                        hands,
                        now,
                        &format!("only {} are wanted", counted(wanted, "node")),
                    ),
                    Err(reason) => {
                        let why = reason_text(&reason, &|node| name_of(hands, node));
                        self.change(|intent| {
                            intent.wanted = None;
                            Some(intent.note(now, None, "failed", format!("no node is removed: {why}")))
                        })
                    }
                };
            }
            None => {}
        }
        if config.mode == Mode::Off || is_paused {
            self.inner().decision = None;
            return Ok(());
        }
        let observed = hands.observed(&started);
        // Without the lock of the state, because training takes a moment.
        let advice = self.history.advise(&observed, &config.knobs);
        let decision = {
            let mut inner = self.inner();
            let decision = decide_advised(&observed, &config.knobs, &mut inner.intent.state, advice.as_ref());
            inner.decision = Some(decision.clone());
            if decision.what == SizeChange::Stay {
                inner.noted = None;
            }
            decision
        };
        let reasons: Vec<String> =
            decision.reasons.iter().map(|reason| reason_text(reason, &|node| name_of(hands, node))).collect();
        let why = reasons.join("; ");
        let acts = config.mode == Mode::On
            && !hands.is_automation_off()
            && config.provisioner().is_ok_and(|way| way.is_some());
        if !acts {
            return self.note_only(&decision, hands, now, &why);
        }
        match decision.what {
            SizeChange::Stay => Ok(()),
            SizeChange::Add => {
                self.begin((Stage::Provision(None), decision.is_urgent()), config.configured_provisioner()?, now, why)
            }
            SizeChange::Remove(node) => self.begin_removal(node, &started, hands, now, &why),
        }
    }

    /// Records a new decision in the history although it may not act.
    fn note_only(&self, decision: &Decision, hands: &dyn FleetActions, now: Now, why: &str) -> Result<(), String> {
        if decision.what == SizeChange::Stay || self.inner().noted.replace(decision.what) == Some(decision.what) {
            return Ok(());
        }
        let what = match decision.what {
            SizeChange::Remove(node) => format!("would remove {}", name_of(hands, node)),
            _ => "would add a node".to_owned(),
        };
        self.change(|intent| Some(intent.note(now, None, "decided", format!("{what}: {why}"))))
    }

    fn begin_removal(
        &self,
        node: NodeId,
        started: &BTreeMap<String, StartedServer>,
        hands: &dyn FleetActions,
        now: Now,
        why: &str,
    ) -> Result<(), String> {
        let name = name_of(hands, node);
        let server = started.get(&name).ok_or_else(|| format!("no provisioner started {name}, so it stays"))?;
        self.begin((Stage::Drain(name.clone()), false), server.way, now, format!("{name} is removed: {why}"))
    }

    fn begin(
        &self,
        (stage, is_urgent): (Stage, bool),
        way: ProvisionerKind,
        now: Now,
        why: String,
    ) -> Result<(), String> {
        self.change(|intent| {
            let number = intent.state.next();
            if !intent.state.bind(number) {
                return None;
            }
            let text = match &stage {
                Stage::Provision(_) => format!("change {number}: a node is added: {why}"),
                _ => format!("change {number}: {why}"),
            };
            intent.change = Some(Change {
                number,
                way,
                stage,
                is_urgent,
                since: now.wall,
                failures: 0,
                error: None,
                moves: Vec::new(),
                waits_since: None,
                tried: BTreeSet::new(),
                again: 0,
            });
            Some(intent.note(now, Some(number), "decided", text))
        })
    }

    fn carry_out(
        &self,
        change: &Change,
        hands: &dyn FleetActions,
        config: &AutoscaleConfig,
        provisioner: &dyn Provisioner,
        now: Now,
    ) -> Outcome {
        let nodes: BTreeSet<String> = hands.nodes().into_iter().map(|(_, name)| name).collect();
        let started = self.inner().intent.started.clone();
        let others =
            started.iter().filter(|(_, server)| server.number != change.number).map(|(address, _)| address.clone());
        let taken = hands.addresses().into_iter().chain(others).chain(change.tried.iter().cloned()).collect();
        let or_failed = |moves: Result<Vec<u64>, String>, next: &Stage| match moves {
            Ok(moves) => Outcome::Ordered { next: next.clone(), moves, missing: None },
            Err(why) => Outcome::Failed(why),
        };
        let no_slots = || "it owns no slots".to_owned();
        match &change.stage {
            Stage::Provision(chosen) if config.configured_provisioner() != Ok(change.way) => {
                let why =
                    format!("[autoscale.{}] was removed from the configuration in the meantime", change.way.name());
                Outcome::Next(Stage::Stop(chosen.clone().unwrap_or_default(), Some(why)))
            }
            Stage::Provision(None) => match provisioner.choose(change.number, &taken) {
                Ok(Some(chosen)) => Outcome::Chosen(chosen),
                Ok(None) => start(provisioner, change.number, None, hands, &taken),
                Err(why) => Outcome::GivenUp(why),
            },
            Stage::Provision(Some(address)) => {
                let started =
                    started.get(address).cloned().unwrap_or_else(|| StartedServer::new(change.number, change.way));
                start(provisioner, change.number, Some((address, &started)), hands, &taken)
            }
            Stage::Join(address) if nodes.contains(address) => Outcome::Next(Stage::Fill(address.clone())),
            Stage::Join(address) => {
                self.identify(change, address, hands, provisioner);
                match hands.join(address) {
                    Ok(()) => Outcome::Next(Stage::Fill(address.clone())),
                    // The program named a server that it did not start. Waiting does not help, and the server must not
                    // be stopped.
                    Err(why)
                        if change.way == ProvisionerKind::Command
                            && let Some(used) = hands.in_use(address) =>
                    {
                        Outcome::GivenUp(format!("{why}. {address} is not stopped: {used}"))
                    }
                    Err(why) => {
                        let hint = match change.way == ProvisionerKind::Local && why.contains("our user or password") {
                            true => {
                                ". Add \"-\" to the end of command in [autoscale.local]: redis-server then reads the password from its standard input (docs/autoscaling.md). Then stop this \
                                 server, which is then started again"
                            }
                            false => "",
                        };
                        let why = format!("{why}{hint}");
                        match change.way != ProvisionerKind::Standby && change.failures + 1 >= ATTEMPTS {
                            true => self.give_up_join(address, why, provisioner),
                            false => Outcome::Failed(why),
                        }
                    }
                }
            }
            Stage::Fill(address) | Stage::Share(address) if !nodes.contains(address) => Outcome::Next(Stage::Stop(
                address.clone(),
                Some("an operator removed the node in the meantime".to_owned()),
            )),
            Stage::Fill(address) | Stage::Share(address) | Stage::Drain(address) => {
                match (hands.open_moves(&change.moves), &change.stage) {
                    (Some(OpenMoves::Own), _) => Outcome::Wait,
                    (Some(OpenMoves::Other(what)), _)
                        if now.wall.saturating_sub(change.waits_since.unwrap_or(now.wall)) < WAIT_MAX =>
                    {
                        Outcome::Waits(what)
                    }
                    (Some(OpenMoves::Other(what)), _) => Outcome::Failed(format!("it has waited too long: {what}")),
                    (None, Stage::Drain(_)) if !nodes.contains(address) => {
                        Outcome::Next(Stage::Stop(address.clone(), None))
                    }
                    (None, Stage::Drain(_)) if !started.contains_key(address) => self.give_up_removal(address, hands),
                    (None, Stage::Drain(_)) if hands.owns(address) => or_failed(hands.drain(address), &change.stage),
                    (None, Stage::Drain(_)) => Outcome::Next(Stage::Leave(address.clone())),
                    (None, Stage::Fill(_)) => or_failed(hands.fill(change.is_urgent), &Stage::Share(address.clone())),
                    (None, _) => {
                        match hands
                            .missing_share(address, &change.moves)
                            .or_else(|| (!hands.owns_slots(address)).then(no_slots))
                        {
                            None => Outcome::Done(format!(
                                "{address} has joined and has its share; there are {} now",
                                counted(nodes.len(), "node")
                            )),
                            Some(missing) if change.failures + 1 >= ATTEMPTS => Outcome::Failed(missing),
                            Some(missing) => match or_failed(hands.fill(change.is_urgent), &change.stage) {
                                Outcome::Ordered { next, moves, .. } => {
                                    Outcome::Ordered { next, moves, missing: Some(missing) }
                                }
                                failed => failed,
                            },
                        }
                    }
                }
            }
            Stage::Leave(node) if !nodes.contains(node) => Outcome::Next(Stage::Stop(node.clone(), None)),
            Stage::Leave(node) if !started.contains_key(node) => self.give_up_removal(node, hands),
            Stage::Leave(node) => {
                // The last observation of its process while it is a node.
                if let (Some(server), Some(run_id)) = (started.get(node), hands.run_ids().remove(node)) {
                    self.note_seen(node, server, LastSeen::Process(run_id), provisioner);
                }
                match hands.leave(node) {
                    Ok(()) => Outcome::Next(Stage::Stop(node.clone(), None)),
                    Err(why) => Outcome::Failed(why),
                }
            }
            // The change was withdrawn while the server joined.
            Stage::Stop(address, Some(_)) if nodes.contains(address) && started.contains_key(address) => {
                Outcome::Next(Stage::Leave(address.clone()))
            }
            Stage::Stop(address, why) => self.stop(change, address, why.as_ref(), hands, provisioner),
        }
    }

    /// Returns the result of a join that has failed often. Only a local server that has never opened its port may be
    /// stopped: any other server was refused, and may be in use. A local server is retried without limit: it keeps
    /// running, so the next change would start a further server, and leave that behind as well.
    fn give_up_join(&self, address: &str, why: String, provisioner: &dyn Provisioner) -> Outcome {
        let started = self.inner().intent.started.get(address).cloned();
        match started.map(|started| provisioner.process(&started, address)) {
            Some(Process::NotListening | Process::Ended) => Outcome::Next(Stage::Stop(address.to_owned(), Some(why))),
            Some(Process::Listens) => Outcome::Failed(why),
            _ => {
                Outcome::GivenUp(format!("{why}. {address} is not stopped: a server that could not join may be in use"))
            }
        }
    }

    /// Gives up the removal of a node that an operator has listed or added.
    fn give_up_removal(&self, node: &str, hands: &dyn FleetActions) -> Outcome {
        hands.undrain(node);
        Outcome::GivenUp(format!("an operator has listed or added {node}, so it stays"))
    }

    /// Stops a server, if a proof permits it.
    fn stop(
        &self,
        change: &Change,
        address: &str,
        why: Option<&String>,
        hands: &dyn FleetActions,
        provisioner: &dyn Provisioner,
    ) -> Outcome {
        let before = why.map(|why| format!("{why}. ")).unwrap_or_default();
        let ended = |note: Option<String>, end: &str| match why {
            Some(why) => Outcome::GivenUp(format!("{why}{}", note.map(|note| format!("; {note}")).unwrap_or_default())),
            None => {
                let note = note.map(|note| format!("; {note}")).unwrap_or_default();
                Outcome::Done(format!(
                    "{address} has left and {end}; there are {} now{note}",
                    counted(hands.nodes().len(), "node")
                ))
            }
        };
        if change.way == ProvisionerKind::Standby {
            return ended(None, "waits for use again");
        }
        if address.is_empty() && change.way == ProvisionerKind::Local {
            return ended(None, "was never started");
        }
        if address.is_empty() {
            let key = change.number;
            return Outcome::GivenUp(format!(
                "{before}The program may have started a server for the key that ends with -{key}; it is not stopped"
            ));
        }
        let Some(_stopping) = self.begin_stop(change, address) else { return Outcome::Wait };
        self.identify(change, address, hands, provisioner);
        let started = self.inner().intent.started.get(address).cloned();
        match (prove(started.as_ref(), address, hands, provisioner), started) {
            (Err(kept), _) if kept.is_transient() && change.failures + 1 < ATTEMPTS => {
                Outcome::Failed(format!("{address} is not stopped: {kept}"))
            }
            (Err(kept), _) => Outcome::GivenUp(format!("{before}{address} is not stopped: {kept}")),
            (Ok(_), None) => Outcome::Wait,
            (Ok(proof), Some(started)) => match provisioner.stop(&started, address, proof) {
                Ok(note) => ended(note, "is stopped"),
                Err(error) => Outcome::Failed(error),
            },
        }
    }

    /// Begins a stop, unless an operator is adding the server or has withdrawn the stop.
    fn begin_stop(&self, change: &Change, address: &str) -> Option<StopGuard<'_>> {
        let mut inner = self.inner();
        let is_pending = inner.intent.change.as_ref().is_some_and(|there| there.stage == change.stage);
        let is_joining = inner.joining.iter().any(|joining| is_same(joining, address));
        (is_pending && !is_joining).then(|| {
            inner.stopping = Some(address.to_owned());
            StopGuard(self)
        })
    }

    /// Records the result of a step. If an operator has withdrawn the change during the step, a started server is
    /// stopped.
    fn record_outcome(
        &self,
        change: &Change,
        outcome: Outcome,
        hands: &dyn FleetActions,
        now: Now,
    ) -> Result<(), String> {
        let number = change.number;
        let Some(there) = self.inner().intent.change.clone() else { return Ok(()) };
        if there.stage != change.stage {
            return match (outcome, there.stage.clone()) {
                (Outcome::Next(Stage::Join(address)), Stage::Stop(_, why)) => self.change(|intent| {
                    intent.started.entry(address.clone()).or_insert_with(|| StartedServer::new(number, change.way));
                    intent.change = Some(Change { stage: Stage::Stop(address, why), ..there });
                    None
                }),
                _ => Ok(()),
            };
        }
        match outcome {
            Outcome::Wait if change.waits_since.is_some() => self.change(|intent| {
                intent.change = Some(Change { waits_since: None, error: None, ..change.clone() });
                None
            }),
            Outcome::Wait => Ok(()),
            Outcome::Ordered { next, moves, .. } if next != change.stage => self.change(|intent| {
                intent.change = Some(Change { moves, ..change.at(next, now) });
                None
            }),
            Outcome::Ordered { moves, missing, .. } if change.failures + 1 < attempts(change) => {
                self.change(|intent| {
                    intent.change = Some(Change {
                        failures: change.failures + 1,
                        moves,
                        error: None,
                        waits_since: None,
                        ..change.clone()
                    });
                    let text = |missing| {
                        format!(
                            "change {number}: {}, and a part is missing: {missing}. It is requested again",
                            change.stage.text()
                        )
                    };
                    missing.map(|missing| intent.note(now, Some(number), "retried", text(missing)))
                })
            }
            Outcome::Ordered { .. } => self.record_outcome(
                change,
                Outcome::Failed("its moves stop early (`switchyard moves`)".to_owned()),
                hands,
                now,
            ),
            Outcome::Waits(what) if change.error.as_ref() == Some(&what) => Ok(()),
            Outcome::Waits(what) => self.change(|intent| {
                let waits_since = change.waits_since.or(Some(now.wall));
                intent.change = Some(Change { error: Some(what.clone()), waits_since, ..change.clone() });
                Some(intent.note(now, Some(number), "waits", format!("change {number} waits: {what}")))
            }),
            Outcome::Chosen(ServerLocation { address, home, host }) => self.change(|intent| {
                if home.is_some() {
                    let server = StartedServer { home, host, ..StartedServer::new(number, change.way) };
                    intent.started.insert(address.clone(), server);
                }
                intent.change = Some(change.at(Stage::Provision(Some(address)), now));
                None
            }),
            Outcome::Next(stage) => self.change(|intent| {
                // From here on the server must be stopped later.
                if let Stage::Join(address) = &stage {
                    intent.started.entry(address.clone()).or_insert_with(|| StartedServer::new(number, change.way));
                }
                intent.change = Some(change.at(stage, now));
                None
            }),
            Outcome::Done(text) => self.end(change, now, "done", format!("change {number}: {text}")),
            Outcome::GivenUp(why) => self.end(change, now, "failed", format!("change {number} was given up: {why}")),
            Outcome::Failed(why) if change.failures + 1 < attempts(change) => {
                let failures = change.failures + 1;
                let again = now.run + (PAUSE << failures.min(10)).min(PAUSE_MAX);
                if failures < ATTEMPTS {
                    warn!("autoscaler: {}, and this failed (attempt {failures}): {why}", change.stage.text());
                }
                self.change(|intent| {
                    intent.change = Some(Change { failures, again, error: Some(why.clone()), ..change.clone() });
                    // A stop, and the join of a local server, are retried without limit, so operators must be informed.
                    (failures == ATTEMPTS).then(|| {
                        let text = format!(
                            "{}: {why} (it is retried; `switchyard autoscale set-nodes` gives it up)",
                            change.stage.text()
                        );
                        intent.note(now, Some(number), "failed", text)
                    })
                })
            }
            Outcome::Failed(why) => match &change.stage {
                Stage::Provision(chosen) => self.discard(change, chosen.clone().unwrap_or_default(), why, now),
                // The autoscaler did not start this server, and a different standby server may be able to join.
                Stage::Join(address) if change.way == ProvisionerKind::Standby => self.change(|intent| {
                    intent.started.remove(address);
                    let mut next = change.at(Stage::Provision(None), now);
                    next.tried.insert(address.clone());
                    intent.change = Some(next);
                    Some(intent.note(
                        now,
                        Some(number),
                        "failed",
                        format!("change {number}: {address} cannot join: {why}"),
                    ))
                }),
                // Retried, or already given up by `give_up_join`.
                Stage::Join(_) => Ok(()),
                Stage::Fill(address) | Stage::Share(address) => self.end(
                    change,
                    now,
                    "failed",
                    format!("change {number}: {address} has joined, but lacks a part of its share: {why}"),
                ),
                Stage::Drain(node) => {
                    hands.undrain(node);
                    self.end(change, now, "failed", format!("change {number} was given up, {node} stays: {why}"))
                }
                Stage::Leave(node) => self.end(
                    change,
                    now,
                    "failed",
                    format!("change {number}: {node} is empty, but cannot be removed: {why}"),
                ),
                Stage::Stop(..) => Ok(()),
            },
        }
    }

    /// Stops a server that is not needed after all.
    fn discard(&self, change: &Change, address: String, why: String, now: Now) -> Result<(), String> {
        let stage = Stage::Stop(address, Some(why));
        self.change(|intent| {
            intent.change = Some(change.at(stage, now));
            None
        })
    }

    fn end(&self, change: &Change, now: Now, kind: &str, text: String) -> Result<(), String> {
        self.change(|intent| {
            if let Stage::Provision(Some(address)) | Stage::Join(address) | Stage::Stop(address, _) = &change.stage {
                intent.started.remove(address);
            }
            if kind == "failed" {
                // The policy decides again after its pause. An operator who set the target finds the reason in the
                // history.
                intent.wanted = None;
                intent.failed += 1;
            } else {
                intent.done += 1;
            }
            intent.change = None;
            intent.state.ended(now.run, kind == "failed");
            Some(intent.note(now, Some(change.number), kind, text))
        })
    }
}

fn wall() -> Millis {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as Millis)
}

/// Starts a server. `taken`: addresses of nodes and of servers that were started before. A provisioner that returns one
/// of them has started no server, and that server must not be stopped.
fn start(
    provisioner: &dyn Provisioner,
    number: u64,
    chosen: Option<(&str, &StartedServer)>,
    hands: &dyn FleetActions,
    taken: &BTreeSet<String>,
) -> Outcome {
    match provisioner.start(number, chosen, &|address| settings(hands, address)) {
        Ok(address) if is_taken(&address, taken) => {
            Outcome::GivenUp(format!("the provisioner returned {address}, which is already in use"))
        }
        Ok(address) => Outcome::Next(Stage::Join(address)),
        Err(why) => Outcome::Failed(why),
    }
}

/// Configuration lines with the credentials for a server, if any.
fn settings(hands: &dyn FleetActions, address: &str) -> Result<String, String> {
    let place = hands.place(address)?;
    Ok(place.password.map(|password| credentials(place.username.as_deref(), &password.0)).unwrap_or_default())
}

/// Whether an address is taken, comparing resolved addresses too: `localhost` is 127.0.0.1.
fn is_taken(address: &str, taken: &BTreeSet<String>) -> bool {
    let resolved = address.to_socket_addrs().into_iter().flatten();
    taken.contains(address) || resolved.into_iter().any(|address| taken.contains(&address.to_string()))
}

/// Whether two addresses lead to one server, by name or after resolution.
pub(crate) fn is_same(one: &str, other: &str) -> bool {
    let parsed = |address: &str| address.parse::<SocketAddr>().ok();
    match (parsed(one), parsed(other)) {
        (Some(one), Some(other)) => one == other,
        _ => is_taken(one, &BTreeSet::from([other.to_owned()])) || is_taken(other, &BTreeSet::from([one.to_owned()])),
    }
}

/// Maximum number of attempts. Unlimited for a stop, because a started server must be stopped eventually.
fn attempts(change: &Change) -> u32 {
    match &change.stage {
        Stage::Provision(_) => STARTS,
        Stage::Join(_) if change.way == ProvisionerKind::Standby => STANDBY_JOINS,
        Stage::Join(_) if change.way == ProvisionerKind::Local => u32::MAX,
        Stage::Stop(..) => u32::MAX,
        _ => ATTEMPTS,
    }
}
