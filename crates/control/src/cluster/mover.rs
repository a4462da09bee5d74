//! Moves slots from one member to another: `CLUSTER MIGRATESLOTS` at servers that have it, and otherwise `SETSLOT` and
//! `MIGRATE` for each slot. The servers copy the keys.
//!
//! Nothing is stored. After an interruption at any point, the next step follows from the members' own state
//! ([`switchyard_policy::cluster::reshard`]), at this router or at another router.

use std::collections::{BTreeMap, BTreeSet};
use std::thread::sleep;
use std::time::{Duration, Instant};

use switchyard_policy::cluster::reshard::{Job, NextError, OpenSlot, Step, Survey, batches, migrate_timeout_ms};
use switchyard_policy::topology::Slot;
use tracing::{debug, info};

use super::members::Members;
use crate::admin::MoveReport;
use crate::nodes::Answer;
use crate::operator::text_of;

/// Number of slots of one `CLUSTER MIGRATESLOTS`. Each forks the source once, and gives away its slots at its end.
const JOB_SLOTS: usize = 512;

/// Keys listed at once.
const LISTED: &str = "256";

/// Time for which a move waits for members: for equal maps, or for a failover.
const PATIENCE: Duration = Duration::from_secs(60);

/// Interval of queries while a move waits.
const PAUSE: Duration = Duration::from_millis(100);

/// Time without a change after which a slot counts as left by an interrupted move.
pub(super) const IDLE: Duration = Duration::from_secs(2);

/// Attempts of a step that a member refuses.
const ATTEMPTS: usize = 5;

/// Maximum number of steps for a slot. Usually five, and one for each wait of [`PAUSE`].
const STEPS_MAX: usize = 2000;

/// Time for which the router waits longer for the reply to a `MIGRATE` than the source may take. The source waits twice,
/// for its connection and for the reply.
const MARGIN: Duration = Duration::from_secs(10);

/// Slots to move between two members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shift {
    /// Id of the source.
    pub(super) source: String,
    /// Id of the target.
    pub(super) target: String,
    /// The slots, ascending.
    pub(super) slots: Vec<Slot>,
}

/// Wish of the operator about a move.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wish {
    #[default]
    Continue,
    /// Finish the slot being moved, then wait.
    Pause,
    /// Finish the slot being moved, then end.
    End,
    /// End as with `End`, but let a migration of the members continue: the router stops.
    Leave,
}

/// Result of a move, unless it is done.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// An operator has ended it.
    Ended,
    /// Reason why the move cannot continue.
    Failed(String),
}

/// The move's owner: its operator's wishes, and its report.
pub(super) trait Host {
    fn wish(&self) -> Wish;
    fn note(&self, change: &mut dyn FnMut(&mut MoveReport));
}

/// Problem of a step.
enum Obstacle {
    /// A member does not reply. A failover may follow.
    Gone(String),
    /// A member refuses the step. The state may have changed.
    Refused(String),
    /// The step cannot succeed.
    Final(String),
}

/// Value of a key at a member.
struct ValueAt {
    dump: Answer,
    /// Reply to `PTTL`.
    ttl_ms: Option<i64>,
}

impl ValueAt {
    /// Whether the key does not exist. It may have expired between both commands.
    fn is_absent(&self) -> bool {
        self.dump.is_null() || self.ttl_ms == Some(-2)
    }

    /// Whether a `MIGRATE` that took at most `late_ms` has written this value from the other one.
    fn is_copy_of(&self, other: &Self, late_ms: u64) -> bool {
        let is_same_ttl = match (self.ttl_ms, other.ttl_ms) {
            (Some(one), Some(other)) if one >= 0 && other >= 0 => one.abs_diff(other) <= late_ms,
            (one, other) => one.is_some() && one == other,
        };
        is_same_ttl && self.dump.error().is_none() && self.dump.0 == other.dump.0
    }
}

/// Attempt to migrate keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Attempt {
    First,
    /// After the target had other keys of the batch.
    Again,
    /// The target has the same value from an earlier attempt.
    Replacing,
}

/// End of a migration by `CLUSTER MIGRATESLOTS`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum JobEnd {
    Done,
    /// Cancelled, because other slots migrate.
    Yielded,
}

/// Progress of an open slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Opening,
    /// All members agree, and no other move is in progress.
    Agreed,
    /// The source has no keys any more, and all members agree again.
    Empty,
}

/// A move of another router or tool.
#[derive(Clone, Debug)]
struct Other {
    lowest: u16,
    /// Description.
    what: String,
    /// The slot, if it moves by `SETSLOT`.
    open: Option<OpenSlot>,
}

/// A move in progress.
pub(super) struct Mover<'m> {
    members: &'m mut Members,
    shift: &'m Shift,
    host: &'m dyn Host,
    /// Slots of this move. Other open slots belong to other moves.
    own: BTreeSet<Slot>,
    /// Ports of the target for `MIGRATE`, by source.
    ports: BTreeMap<String, u16>,
    /// Last state of all primaries.
    last: Option<Survey>,
    /// Open slots of moves that wait for this move, with their number of keys.
    waiting: Vec<(OpenSlot, Option<i64>)>,
}

impl<'m> Mover<'m> {
    pub(super) fn new(members: &'m mut Members, shift: &'m Shift, host: &'m dyn Host) -> Self {
        let own = shift.slots.iter().copied().collect();
        Self { members, shift, host, own, ports: BTreeMap::new(), last: None, waiting: Vec::new() }
    }

    /// Moves the slots.
    pub(super) fn run(mut self) -> Result<(), Stop> {
        let survey = self.settled(None)?;
        let open = survey.open();
        let is_open = open.iter().any(|open| self.own.contains(&open.slot));
        if !is_open && self.members.have_jobs(&self.shift.source, &self.shift.target) {
            self.host.note(&mut |report| "migrateslots".clone_into(&mut report.protocol));
            return self.by_jobs();
        }
        self.host.note(&mut |report| "setslot".clone_into(&mut report.protocol));
        for slot in self.shift.slots.clone() {
            self.obey()?;
            self.slot(slot)?;
            self.host.note(&mut |report| {
                report.slots_done += 1;
                report.leg_keys_left = None;
            });
        }
        Ok(())
    }

    /// Waits while the operator wants a pause.
    fn obey(&self) -> Result<(), Stop> {
        loop {
            match self.host.wish() {
                Wish::Continue => return Ok(()),
                Wish::End | Wish::Leave => return Err(Stop::Ended),
                Wish::Pause => sleep(PAUSE),
            }
        }
    }

    /// Waits until all members agree, and no other move is in progress. `slot`: the open slot of this move, which stays
    /// open in the meantime: its keys are served.
    ///
    /// Two routers may begin at the same time, because nothing locks a cluster. Each opens a slot, and then looks for
    /// open slots of others, so at least one of them sees the other and waits. If nothing changes, because both wait, the
    /// lower slot continues.
    fn settled(&mut self, slot: Option<Slot>) -> Result<Survey, Stop> {
        let mut since = Instant::now();
        let mut others_before = Vec::new();
        loop {
            let why = match self.members.survey() {
                Err(why) => why,
                Ok(survey) => match survey.dispute(&|id| self.members.name(id)) {
                    Some(why) => why,
                    None => {
                        let others = self.others(&survey);
                        let Some(first) = others.first().cloned() else { return Ok(survey) };
                        let left = self.keys_of(&survey, &others);
                        if left != others_before {
                            (others_before, since) = (left, Instant::now());
                        }
                        let is_left = others.iter().all(|other| other.open.is_some())
                            && (others_before == self.waiting || since.elapsed() > 2 * IDLE);
                        if is_left && slot.is_some_and(|slot| slot.number() < first.lowest) {
                            self.waiting = others_before;
                            return Ok(survey);
                        }
                        first.what
                    }
                },
            };
            if slot.is_none() && matches!(self.host.wish(), Wish::End | Wish::Leave) {
                return Err(Stop::Ended);
            }
            if since.elapsed() > PATIENCE {
                return Err(Stop::Failed(why));
            }
            self.host.note(&mut |report| report.activity = format!("waits: {why}"));
            sleep(PAUSE);
        }
    }

    /// Open slots of others with their number of keys, which changes while they are moved.
    fn keys_of(&mut self, survey: &Survey, others: &[Other]) -> Vec<(OpenSlot, Option<i64>)> {
        let mut left = Vec::new();
        for open in others.iter().filter_map(|other| other.open.clone()) {
            let source = survey.owner(open.slot).unwrap_or(&open.source).to_owned();
            let count = self.keys_left(&source, open.slot).ok();
            left.push((open, count));
        }
        left
    }

    /// Moves in progress other than this one, the lowest slot first.
    fn others(&self, survey: &Survey) -> Vec<Other> {
        let name = |id: &str| self.members.name(id);
        // Also a move of an own slot to another member.
        let is_own = |open: &OpenSlot| self.own.contains(&open.slot) && open.target == self.shift.target;
        let open = survey.open().into_iter().filter(|open| !is_own(open)).map(|open| Other {
            lowest: open.slot.number(),
            what: format!("slot {} migrates from {} to {}", open.slot.number(), name(&open.source), name(&open.target)),
            open: Some(open),
        });
        let is_own_job = |job: &Job| {
            job.target == self.shift.target && Slot::new(job.first()).is_some_and(|slot| self.own.contains(&slot))
        };
        let jobs = survey.running_jobs().filter(|job| !is_own_job(job)).map(|job| Other {
            lowest: job.first(),
            what: format!("slots from {} on migrate from {} to {}", job.first(), name(&job.source), name(&job.target)),
            open: None,
        });
        let mut others: Vec<Other> = open.chain(jobs).collect();
        others.sort_by_key(|other| other.lowest);
        others
    }

    /// Number of keys of a slot at a member.
    fn keys_left(&mut self, id: &str, slot: Slot) -> Result<i64, String> {
        let answer = self.members.call(id, &["CLUSTER", "COUNTKEYSINSLOT", &slot.number().to_string()])?;
        answer.number().ok_or_else(|| answer.error().unwrap_or_default())
    }

    /// Moves one slot, or continues its move.
    fn slot(&mut self, slot: Slot) -> Result<(), Stop> {
        let target = self.shift.target.clone();
        let (mut stage, mut is_announced, mut refused) = (Stage::Opening, false, 0);
        let mut progressed = Instant::now();
        let mut survey = self.last.take();
        if let Some(last) = &mut survey {
            let source = last.owner(slot).unwrap_or(&target).to_owned();
            if [&source, &target].iter().any(|id| self.members.look(id, last).is_err()) {
                survey = None;
            }
        }
        for _ in 0..STEPS_MAX {
            let current = match survey.take() {
                Some(survey) => Ok(survey),
                None => self.members.survey().map_err(Obstacle::Gone),
            };
            let done = current.and_then(|current| {
                let step = current.next(slot, &target, is_announced).map_err(|why| self.obstacle(slot, &why))?;
                Ok((current, step))
            });
            let done = match done {
                Ok((current, Step::Done)) => {
                    self.last = Some(current);
                    return Ok(());
                }
                // The slot is open now, and stays so until all members agree. Then this step follows again.
                Ok((_, Step::Keys { .. })) if stage == Stage::Opening => {
                    survey = Some(self.settled(Some(slot))?);
                    stage = Stage::Agreed;
                    Ok(())
                }
                // A replica may have replaced the source in the meantime, and have new keys.
                Ok((current, Step::Keys { source })) if stage == Stage::Agreed => {
                    let done = self.keys(slot, &source, &current);
                    if done.is_ok() {
                        survey = Some(self.settled(Some(slot))?);
                        stage = Stage::Empty;
                    }
                    done
                }
                Ok((mut current, step)) => {
                    if !matches!(step, Step::Keys { .. }) {
                        stage = Stage::Opening;
                    }
                    let done = self.step(slot, &step, &current);
                    is_announced |= done.is_ok() && matches!(step, Step::Announce(_));
                    // The next step depends on these two only, if no other tool changes anything.
                    let changed = match &step {
                        Step::Import { source } | Step::Migrate { source } | Step::Keys { source } => {
                            vec![source.as_str(), &target]
                        }
                        Step::Announce(members) => members.iter().take(2).map(String::as_str).collect(),
                        Step::Done => Vec::new(),
                    };
                    let is_fresh = changed.iter().all(|id| self.members.look(id, &mut current).is_ok());
                    survey = Some(current).filter(|_| is_fresh && done.is_ok());
                    done
                }
                Err(obstacle) => Err(obstacle),
            };
            let why = match done {
                Ok(()) => {
                    (progressed, refused) = (Instant::now(), 0);
                    continue;
                }
                Err(Obstacle::Final(why)) => return Err(Stop::Failed(why)),
                Err(Obstacle::Refused(why)) => {
                    refused += 1;
                    if refused > ATTEMPTS {
                        return Err(Stop::Failed(why));
                    }
                    why
                }
                Err(Obstacle::Gone(why)) => {
                    if progressed.elapsed() > PATIENCE {
                        return Err(Stop::Failed(why));
                    }
                    why
                }
            };
            debug!(slot = slot.number(), reason = why, "a step of a slot's move is repeated");
            self.host.note(&mut |report| report.activity = format!("tries again: {why}"));
            sleep(PAUSE);
        }
        Err(Stop::Failed(format!("slot {} changes all the time: another tool moves it, too", slot.number())))
    }

    fn obstacle(&self, slot: Slot, why: &NextError) -> Obstacle {
        let slot = slot.number();
        match why {
            NextError::Elsewhere(id) => Obstacle::Final(format!(
                "slot {slot} migrates to {} already: move it there, or end that move",
                self.members.name(id)
            )),
            NextError::NoTarget => {
                Obstacle::Gone(format!("{} does not reply as a primary", self.members.name(&self.shift.target)))
            }
            NextError::NoOwner => Obstacle::Gone(format!("no member claims slot {slot} now")),
        }
    }

    fn step(&mut self, slot: Slot, step: &Step, survey: &Survey) -> Result<(), Obstacle> {
        let target = self.shift.target.clone();
        match step {
            Step::Import { source } => {
                // Keys of an earlier owner would become visible. With the source's mark, they are keys of this migration.
                if !survey.is_open_at(&target, slot) && survey.leaves_for(source, slot).is_none() {
                    let left = self.keys_left(&target, slot).map_err(|why| self.gone(&target, &why))?;
                    if left > 0 {
                        return Err(Obstacle::Refused(format!(
                            "{} has {left} keys of slot {}, which it does not own. An interrupted move may have left them, without \
                             other copies: redis-cli --cluster fix collects the keys of the slot",
                            self.members.name(&target),
                            slot.number()
                        )));
                    }
                }
                self.set_slot(&target, slot, &["IMPORTING", source])
            }
            Step::Migrate { source } => self.set_slot(source, slot, &["MIGRATING", &target]),
            Step::Keys { source } => {
                if self.keys_left(source, slot).map_err(|why| self.gone(source, &why))? > 0 {
                    return self.keys(slot, source, survey);
                }
                // From here the target owns the slot: its epoch is higher than all others.
                self.set_slot(&target, slot, &["NODE", &target])
            }
            Step::Announce(members) => {
                for id in members {
                    let done = self.set_slot(id, slot, &["NODE", &target]);
                    // Other members get the owner from the target, too.
                    if *id == target || survey.is_open_at(id, slot) {
                        done?;
                    }
                }
                Ok(())
            }
            Step::Done => Ok(()),
        }
    }

    fn set_slot(&mut self, id: &str, slot: Slot, how: &[&str]) -> Result<(), Obstacle> {
        let number = slot.number().to_string();
        let args: Vec<&str> = ["CLUSTER", "SETSLOT", &number].into_iter().chain(how.iter().copied()).collect();
        let answer = self.members.call(id, &args).map_err(|why| self.gone(id, &why))?;
        match answer.error() {
            None => Ok(()),
            Some(error) => Err(Obstacle::Refused(format!(
                "{} refuses CLUSTER SETSLOT {number} {}: {error}",
                self.members.name(id),
                how[0]
            ))),
        }
    }

    fn gone(&self, id: &str, why: &str) -> Obstacle {
        Obstacle::Gone(format!("{} {why}", self.members.name(id)))
    }

    /// Migrates all keys of a slot.
    fn keys(&mut self, slot: Slot, source: &str, survey: &Survey) -> Result<(), Obstacle> {
        let number = slot.number().to_string();
        let mut unchanged = 0;
        let mut current = survey.clone();
        loop {
            self.members.look(source, &mut current).map_err(|why| self.gone(source, &why))?;
            if current.leaves_for(source, slot) != Some(self.shift.target.as_str()) {
                let name = self.members.name(source);
                return Err(Obstacle::Final(format!(
                    "another tool has changed the migration of slot {number} at {name}"
                )));
            }
            let listed = self.members.call(source, &["CLUSTER", "GETKEYSINSLOT", &number, LISTED]);
            let listed = listed.map_err(|why| self.gone(source, &why))?;
            if let Some(error) = listed.error() {
                let name = self.members.name(source);
                return Err(Obstacle::Final(format!("{name} refuses CLUSTER GETKEYSINSLOT: {error}")));
            }
            let keys: Vec<Vec<u8>> = listed.items().iter().map(|key| key.bytes().to_vec()).collect();
            if keys.is_empty() {
                return Ok(());
            }
            let left = self.keys_left(source, slot).map_err(|why| self.gone(source, &why))?;
            self.host.note(&mut |report| {
                report.leg_keys_left = u64::try_from(left).ok();
                report.activity = format!("moves the keys of slot {number}");
            });
            let sizes = self.sizes(source, &keys)?;
            for batch in batches(&sizes) {
                let bytes = sizes[batch.clone()].iter().map(|size| size.unwrap_or(0)).fold(0, u64::saturating_add);
                self.migrate(source, &keys[batch.clone()], bytes, Attempt::First, survey)?;
                let count = batch.len() as u64;
                self.host.note(&mut |report| {
                    report.keys_moved += count;
                    report.bytes_moved = report.bytes_moved.saturating_add(bytes);
                });
            }
            // Keys that expire are removed by the MIGRATE, so each round makes progress.
            let after = self.keys_left(source, slot).map_err(|why| self.gone(source, &why))?;
            unchanged = if after < left { 0 } else { unchanged + 1 };
            if unchanged > ATTEMPTS {
                let name = self.members.name(source);
                return Err(Obstacle::Final(format!(
                    "{name} keeps {after} keys of slot {number} although it sent them"
                )));
            }
        }
    }

    /// Sizes of keys, estimated by the source. `None` if it refuses `MEMORY USAGE`.
    fn sizes(&mut self, source: &str, keys: &[Vec<u8>]) -> Result<Vec<Option<u64>>, Obstacle> {
        let usage = |key: &Vec<u8>| vec![b"MEMORY".to_vec(), b"USAGE".to_vec(), key.clone()];
        let commands: Vec<Vec<Vec<u8>>> = keys.iter().map(usage).collect();
        let answers = self.members.call_all(source, &commands).map_err(|why| self.gone(source, &why))?;
        let size = |answer: &Answer| match answer.is_null() {
            // It has expired.
            true => Some(0),
            false => answer.number().and_then(|bytes| u64::try_from(bytes).ok()),
        };
        Ok(answers.iter().map(size).collect())
    }

    /// Migrates keys.
    fn migrate(
        &mut self,
        source: &str,
        keys: &[Vec<u8>],
        bytes: u64,
        attempt: Attempt,
        survey: &Survey,
    ) -> Result<(), Obstacle> {
        let target = self.shift.target.clone();
        let timeout_ms = migrate_timeout_ms(bytes);
        let place = survey.view(source).and_then(|view| view.address(&target)).filter(|(host, _)| !host.is_empty());
        let Some((host, port)) = place else {
            return Err(Obstacle::Refused(format!(
                "{} does not know the address of {}",
                self.members.name(source),
                self.members.name(&target)
            )));
        };
        let port = self.port_for(source, &target, port).to_string();
        let timeout = timeout_ms.to_string();
        let mut args: Vec<Vec<u8>> =
            ["MIGRATE", host, &port, "", "0", &timeout].iter().map(|word| word.as_bytes().to_vec()).collect();
        if attempt == Attempt::Replacing {
            args.push(b"REPLACE".to_vec());
        }
        if let Some(access) = self.members.access(&target)
            && let Some(password) = &access.password
        {
            let login = match &access.username {
                Some(user) => vec![b"AUTH2".to_vec(), user.as_bytes().to_vec(), password.0.as_bytes().to_vec()],
                None => vec![b"AUTH".to_vec(), password.0.as_bytes().to_vec()],
            };
            args.extend(login);
        }
        args.push(b"KEYS".to_vec());
        args.extend(keys.iter().cloned());
        let within = Duration::from_millis(timeout_ms).saturating_mul(2) + MARGIN;
        let answer = self.members.call_within(source, &args, within).map_err(|why| self.gone(source, &why))?;
        let Some(error) = answer.error() else { return Ok(()) };
        if error.contains("BUSYKEY") && attempt == Attempt::First {
            return self.busy(source, keys, survey);
        }
        // An error may repeat the arguments, with the password.
        let error = error.split(", with args").next().unwrap_or_default();
        let text = format!("{} cannot send keys to {}: {error}", self.members.name(source), self.members.name(&target));
        // The target may have executed it, which the next attempt finds.
        if error.starts_with("IOERR") { Err(Obstacle::Refused(text)) } else { Err(Obstacle::Final(text)) }
    }

    /// Migrates keys after `BUSYKEY`: the target has some, although their slot has not moved. If a value and its time to
    /// live are the same, an earlier attempt copied it, and the source was not able to remove its own: clients use the
    /// source's. Other values are never replaced.
    ///
    /// Times to live rather than the times at which keys expire (`PEXPIRETIME`): `MIGRATE` sends the former, and the
    /// clocks of members differ.
    fn busy(&mut self, source: &str, keys: &[Vec<u8>], survey: &Survey) -> Result<(), Obstacle> {
        let target = self.shift.target.clone();
        for key in keys {
            let own = self.value_at(source, key)?;
            if own.is_absent() {
                continue;
            }
            let bytes = own.dump.0.len() as u64;
            let there = self.value_at(&target, key)?;
            let is_there = !there.is_absent();
            if is_there && !there.is_copy_of(&own, migrate_timeout_ms(bytes)) {
                return Err(Obstacle::Final(format!(
                    "{} has keys of this slot with other values or times to live than {}, which clients use: compare \
                     them (CLUSTER GETKEYSINSLOT at both), and remove those of {0}, or let redis-cli --cluster fix \
                     replace them. Until then the slot stays open, and {1} serves its keys",
                    self.members.name(&target),
                    self.members.name(source)
                )));
            }
            let attempt = if is_there { Attempt::Replacing } else { Attempt::Again };
            self.migrate(source, std::slice::from_ref(key), bytes, attempt, survey)?;
        }
        Ok(())
    }

    /// Reads a key of an open slot at one of its members.
    fn value_at(&mut self, id: &str, key: &[u8]) -> Result<ValueAt, Obstacle> {
        // A member that imports the slot executes one command after each `ASKING`. The source ignores it.
        let commands = [&b"DUMP"[..], b"PTTL"]
            .into_iter()
            .flat_map(|name| [vec![b"ASKING".to_vec()], vec![name.to_vec(), key.to_vec()]]);
        let commands: Vec<Vec<Vec<u8>>> = commands.collect();
        let answers = self.members.call_all(id, &commands).map_err(|why| self.gone(id, &why))?;
        let [_, dump, _, ttl]: [Answer; 4] =
            answers.try_into().map_err(|_| self.gone(id, "sends another number of replies"))?;
        Ok(ValueAt { ttl_ms: ttl.number(), dump })
    }

    /// Port of the target for `MIGRATE`. `CLUSTER NODES` shows the port for this router's kind of connection, but the
    /// source uses TLS if its `tls-cluster` is set.
    fn port_for(&mut self, source: &str, target: &str, announced: u16) -> u16 {
        if let Some(port) = self.ports.get(source) {
            return *port;
        }
        let setting = self.members.call(source, &["CONFIG", "GET", "tls-cluster"]);
        let uses_tls = setting.ok().and_then(|answer| Some(answer.items().get(1)?.text() == "yes"));
        let port = uses_tls.and_then(|uses_tls| {
            let shards = self.members.call(source, &["CLUSTER", "SHARDS"]).ok()?;
            port_in(&shards, target, if uses_tls { "tls-port" } else { "port" })
        });
        let port = port.unwrap_or(announced);
        self.ports.insert(source.to_owned(), port);
        port
    }

    /// Moves the slots by `CLUSTER MIGRATESLOTS`.
    fn by_jobs(&mut self) -> Result<(), Stop> {
        let slots = self.shift.slots.clone();
        let mut chunks = slots.chunks(JOB_SLOTS).peekable();
        let mut yielded = 0;
        while let Some(chunk) = chunks.peek().copied() {
            self.obey()?;
            let survey = self.settled(None)?;
            let is_there = |survey: &Survey, slot: &Slot| survey.owner(*slot) == Some(self.shift.target.as_str());
            let left: Vec<Slot> = chunk.iter().copied().filter(|slot| !is_there(&survey, slot)).collect();
            let foreign = left.iter().find(|slot| survey.owner(**slot) != Some(self.shift.source.as_str()));
            if let Some(slot) = foreign {
                return Err(Stop::Failed(format!(
                    "slot {} does not belong to {} any more",
                    slot.number(),
                    self.members.name(&self.shift.source)
                )));
            }
            let keys = self.count_keys(&left);
            if !left.is_empty() && self.job(&left, &survey)? == JobEnd::Yielded {
                yielded += 1;
                if yielded > ATTEMPTS as u32 {
                    return Err(Stop::Failed("other slots migrate in the cluster, too".to_owned()));
                }
                // The other router yields as well, and waits for another time.
                sleep(PAUSE * (1 + u32::from(left[0].number()) % 16) * yielded);
                continue;
            }
            chunks.next();
            let count = chunk.len() as u64;
            self.host.note(&mut |report| {
                report.slots_done += count;
                report.keys_moved += keys;
            });
        }
        Ok(())
    }

    /// Number of keys of slots at the source. 0 if it does not reply, because the number is only reported.
    fn count_keys(&mut self, slots: &[Slot]) -> u64 {
        let count = |slot: &Slot| vec!["CLUSTER".to_owned(), "COUNTKEYSINSLOT".to_owned(), slot.number().to_string()];
        let counts: Vec<Vec<String>> = slots.iter().map(count).collect();
        let answers = self.members.call_all(&self.shift.source, &counts).unwrap_or_default();
        answers.iter().filter_map(Answer::number).filter_map(|count| u64::try_from(count).ok()).sum()
    }

    /// Whether another migration has begun at the same time as this one.
    fn has_rival(&mut self) -> bool {
        self.members.survey().is_ok_and(|survey| !self.others(&survey).is_empty())
    }

    /// Cancels the migration of these slots. An error is the reason why it continues: the command would cancel migrations
    /// of others, too.
    fn cancel(&mut self, slots: &[Slot]) -> Result<(), String> {
        let (source, target) = (&self.shift.source, &self.shift.target);
        let mut survey = Survey::default();
        self.members.look(source, &mut survey)?;
        let is_own = |job: &Job| job.target == *target && slots.iter().any(|slot| job.has(*slot));
        if let Some(other) = survey.other_job_from(source, is_own) {
            return Err(format!(
                "cannot be cancelled until the migration of slots from {} on ends, because {} only cancels all its migrations",
                other.first(),
                self.members.name(source)
            ));
        }
        // If it fails, the migration has just ended.
        let _ = self.members.call(source, &["CLUSTER", "CANCELSLOTMIGRATIONS"]);
        Ok(())
    }

    fn job(&mut self, slots: &[Slot], before: &Survey) -> Result<JobEnd, Stop> {
        let (source, target) = (self.shift.source.clone(), self.shift.target.clone());
        let known: BTreeSet<String> = before.jobs().map(|job| job.name.clone()).collect();
        let ranges = text_of(slots);
        let mut args = vec!["CLUSTER".to_owned(), "MIGRATESLOTS".to_owned(), "SLOTSRANGE".to_owned()];
        for range in slots.chunk_by(|one, next| one.number() + 1 == next.number()) {
            args.extend([range.first(), range.last()].into_iter().flatten().map(|slot| slot.number().to_string()));
        }
        args.extend(["NODE".to_owned(), target.clone()]);
        let answer = self.members.call(&source, &args);
        let refusal = match &answer {
            Ok(answer) => answer.error().map(|error| format!("refuses CLUSTER MIGRATESLOTS: {error}")),
            Err(why) => Some(why.clone()),
        };
        if let Some(why) = refusal {
            return Err(Stop::Failed(format!("{} {why}", self.members.name(&source))));
        }
        info!(slots = ranges, "the source began to migrate slots");
        // Each of two routers that begin at the same time looks for the other after it has begun.
        let is_rivalled = self.has_rival();
        if is_rivalled {
            // If both leave the same source, they continue: one command may start several, too.
            let _ = self.cancel(slots);
        }
        let (mut is_cancelled, mut replied) = (false, Instant::now());
        loop {
            sleep(PAUSE);
            let mut survey = Survey::default();
            let looks = [&source, &target].map(|id| self.members.look(id, &mut survey).map_err(|why| (id, why)));
            if let Some(Err((id, why))) = looks.iter().find(|look| look.is_err()) {
                let why = format!("{} {why}", self.members.name(id));
                if replied.elapsed() > PATIENCE {
                    return Err(Stop::Failed(why));
                }
                self.host.note(&mut |report| report.activity = format!("waits: {why}"));
                continue;
            }
            replied = Instant::now();
            let ours = |has_ended: bool| {
                survey.jobs().find(|job| {
                    job.has_ended() == has_ended
                        && !known.contains(&job.name)
                        && slots.iter().any(|slot| job.has(*slot))
                })
            };
            if let Some(job) = ours(false) {
                self.host.note(&mut |report| report.activity = format!("slots {ranges}: {}", job.state));
                match self.host.wish() {
                    Wish::Leave => return Err(Stop::Ended),
                    Wish::End if !is_cancelled => match self.cancel(slots) {
                        Ok(()) => is_cancelled = true,
                        Err(why) => self.host.note(&mut |report| report.activity = format!("slots {ranges}: {why}")),
                    },
                    _ => {}
                }
                continue;
            }
            let Some(taker) = survey.view(&target) else { continue };
            if slots.iter().all(|slot| taker.claims(*slot)) {
                return Ok(JobEnd::Done);
            }
            if is_rivalled {
                return Ok(JobEnd::Yielded);
            }
            if is_cancelled {
                return Err(Stop::Ended);
            }
            let why = ours(true).map_or_else(
                || "its migration is not shown any more".to_owned(),
                |job| format!("{}: {}", job.state, job.message),
            );
            return Err(Stop::Failed(format!("{} still has slots {ranges}: {why}", self.members.name(&source))));
        }
    }
}

/// Returns a port of a member in a reply to `CLUSTER SHARDS`.
fn port_in(shards: &Answer, id: &str, which: &str) -> Option<u16> {
    let field = |map: &Answer, name: &str| {
        map.items().chunks_exact(2).find(|pair| pair[0].text() == name).map(|pair| Answer(pair[1].0.clone()))
    };
    let members = shards.items().into_iter().filter_map(|shard| field(&shard, "nodes")).flat_map(|nodes| nodes.items());
    let member = members.into_iter().find(|member| field(member, "id").is_some_and(|of| of.text() == id))?;
    field(&member, which)?.number().and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_have_the_same_value_and_time_to_live() {
        let at = |dump: &str, ttl_ms| ValueAt { dump: Answer(dump.as_bytes().to_vec()), ttl_ms };
        let (value, other) = ("$1\r\nv\r\n", "$1\r\nw\r\n");
        let is_copy = |one: &ValueAt, other: &ValueAt| one.is_copy_of(other, 3000);
        assert!(is_copy(&at(value, Some(-1)), &at(value, Some(-1))));
        assert!(is_copy(&at(value, Some(62_000)), &at(value, Some(60_000))), "the copy was late");
        assert!(!is_copy(&at(value, Some(64_000)), &at(value, Some(60_000))), "a newer time to live");
        assert!(!is_copy(&at(value, Some(60_000)), &at(value, Some(-1))));
        assert!(!is_copy(&at(value, Some(-1)), &at(value, Some(60_000))));
        assert!(!is_copy(&at(value, Some(-1)), &at(other, Some(-1))));
        assert!(!is_copy(&at(value, None), &at(value, None)), "refused");
        let error = "-NOPERM no\r\n";
        assert!(!is_copy(&at(error, Some(-1)), &at(error, Some(-1))));
    }

    #[test]
    fn the_port_of_a_member_depends_on_tls() {
        let reply = "*1 *4 $5 slots *0 $5 nodes *1 *6 $2 id $2 aa $4 port :7001 $8 tls-port :7443 ";
        let shards = Answer(reply.replace(' ', "\r\n").into_bytes());
        assert_eq!(port_in(&shards, "aa", "port"), Some(7001));
        assert_eq!(port_in(&shards, "aa", "tls-port"), Some(7443));
        assert_eq!((port_in(&shards, "bb", "port"), port_in(&shards, "aa", "other")), (None, None));
        assert_eq!(port_in(&Answer(b"+OK\r\n".to_vec()), "aa", "port"), None);
    }
}
