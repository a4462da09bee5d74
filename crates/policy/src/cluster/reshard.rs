//! Moves of slots within a cluster: its state as the members show it, and the next step for a slot.
//!
//! The cluster itself has all state of a move: the owner of a slot, and the marks of a slot that migrates. Each step
//! depends on this state only, so any router continues a move that another router started.
//!
//! Two members that take slots with one configuration epoch dispute them, and the loser deletes its keys. A member
//! takes a slot with the highest epoch that it has seen, plus one. So all members must show the same epochs before a
//! slot is given away ([`Survey::dispute`]).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};

use super::nodes::{Mark, Nodes, parse_range};
use crate::topology::Slot;

/// A migration by `CLUSTER MIGRATESLOTS`, from `CLUSTER GETSLOTMIGRATIONS`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Job {
    /// Identifies the migration at source and target.
    pub name: String,
    /// Id of the source.
    pub source: String,
    /// Id of the target.
    pub target: String,
    /// The slots.
    pub slots: Vec<RangeInclusive<u16>>,
    /// State, in the words of the member.
    pub state: String,
    /// Reason of a failure.
    pub message: String,
}

impl Job {
    /// Builds a migration from the fields of a reply. `None` without the required ones.
    #[must_use]
    pub fn of<'f>(fields: impl IntoIterator<Item = (&'f str, &'f str)>) -> Option<Self> {
        let mut job = Self::default();
        for (field, value) in fields {
            match field {
                "name" => value.clone_into(&mut job.name),
                "source_node" => value.clone_into(&mut job.source),
                "target_node" => value.clone_into(&mut job.target),
                "slot_ranges" => job.slots = value.split(' ').map(parse_range).collect::<Option<_>>()?,
                "state" => value.clone_into(&mut job.state),
                "message" => value.clone_into(&mut job.message),
                _ => {}
            }
        }
        (!job.name.is_empty() && !job.state.is_empty() && !job.slots.is_empty()).then_some(job)
    }

    /// Whether the migration has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state.as_str(), "success" | "failed" | "cancelled")
    }

    /// Whether the migration includes a slot.
    #[must_use]
    pub fn has(&self, slot: Slot) -> bool {
        self.slots.iter().any(|range| range.contains(&slot.number()))
    }

    /// First slot.
    #[must_use]
    pub fn first(&self) -> u16 {
        self.slots.iter().map(|range| *range.start()).min().unwrap_or_default()
    }

    /// Number of slots.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.slots.iter().map(|range| range.len() as u64).sum()
    }
}

/// A slot that migrates by `SETSLOT`: at least one member has a mark of it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct OpenSlot {
    /// The slot.
    pub slot: Slot,
    /// Id of the member that its keys leave.
    pub source: String,
    /// Id of the member that its keys arrive at.
    pub target: String,
}

/// Next step for a slot.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// `SETSLOT IMPORTING source` at the target.
    Import {
        /// Id of the present owner.
        source: String,
    },
    /// `SETSLOT MIGRATING target` at the source.
    Migrate {
        /// Id of the present owner.
        source: String,
    },
    /// Migrate all keys of the source, then give the slot to the target.
    Keys {
        /// Id of the present owner.
        source: String,
    },
    /// `SETSLOT NODE target` at these members, in this order.
    Announce(Vec<String>),
    /// The target owns the slot, and all members know.
    Done,
}

/// State of a cluster, as its primaries show it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Survey {
    views: BTreeMap<String, Nodes>,
    jobs: Vec<Job>,
    /// Primaries without a reply: name, and the reason.
    silent: BTreeMap<String, String>,
}

impl Survey {
    /// Adds the reply of a primary.
    pub fn add(&mut self, nodes: Nodes, jobs: impl IntoIterator<Item = Job>) {
        for job in jobs {
            // Source and target show the same migration. The source decides.
            let is_source = job.source == nodes.me;
            match self.jobs.iter_mut().find(|known| known.name == job.name) {
                Some(known) if is_source => *known = job,
                Some(_) => {}
                None => self.jobs.push(job),
            }
        }
        self.views.insert(nodes.me.clone(), nodes);
    }

    /// Records a primary that sent no reply.
    pub fn add_silent(&mut self, name: String, why: String) {
        self.silent.insert(name, why);
    }

    /// Reply of a member.
    #[must_use]
    pub fn view(&self, id: &str) -> Option<&Nodes> {
        self.views.get(id)
    }

    /// Ids of the members that replied as primaries.
    pub fn primaries(&self) -> impl Iterator<Item = &str> {
        self.views.iter().filter(|(_, view)| view.is_primary()).map(|(id, _)| id.as_str())
    }

    /// Id of the member that claims a slot.
    #[must_use]
    pub fn owner(&self, slot: Slot) -> Option<&str> {
        self.primaries().find(|id| self.view(id).is_some_and(|view| view.claims(slot)))
    }

    /// Migrations by `CLUSTER MIGRATESLOTS` that have not ended.
    pub fn running_jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter().filter(|job| !job.has_ended())
    }

    /// A running migration from a member, other than these. `CLUSTER CANCELSLOTMIGRATIONS` at this member cancels it
    /// with all others.
    #[must_use]
    pub fn other_job_from(&self, source: &str, is_own: impl Fn(&Job) -> bool) -> Option<&Job> {
        self.running_jobs().find(|job| job.source == source && !is_own(job))
    }

    /// All migrations by `CLUSTER MIGRATESLOTS` that the members still show.
    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }

    /// Slots with marks.
    #[must_use]
    pub fn open(&self) -> BTreeSet<OpenSlot> {
        let mut open = BTreeSet::new();
        for (id, view) in &self.views {
            for (slot, mark) in &view.marks {
                let (source, target) = match mark {
                    Mark::Migrating(target) => (id.clone(), target.clone()),
                    Mark::Importing(source) => (source.clone(), id.clone()),
                };
                open.insert(OpenSlot { slot: *slot, source, target });
            }
        }
        open
    }

    /// Id of the member for which the keys of a slot leave this member.
    #[must_use]
    pub fn leaves_for(&self, id: &str, slot: Slot) -> Option<&str> {
        match self.view(id)?.marks.get(&slot)? {
            Mark::Migrating(to) => Some(to),
            Mark::Importing(_) => None,
        }
    }

    /// Whether a member has a mark of a slot.
    #[must_use]
    pub fn is_open_at(&self, id: &str, slot: Slot) -> bool {
        self.view(id).is_some_and(|view| view.marks.contains_key(&slot))
    }

    /// Reason why no slot may be given away now: a primary does not reply or fails, or the members disagree on the owners
    /// of slots or on epochs. `name`: name of a member by id.
    #[must_use]
    pub fn dispute(&self, name: &dyn Fn(&str) -> String) -> Option<String> {
        if let Some((silent, why)) = self.silent.iter().next() {
            return Some(format!("member {silent} {why}"));
        }
        for (by, view) in &self.views {
            if !view.is_primary() {
                return Some(format!("member {} is no primary any more: a failover is in progress", name(by)));
            }
            let failing = view.lines.values().find(|line| line.is_primary && line.is_failing && !line.slots.is_empty());
            if let Some(line) = failing {
                return Some(format!("member {} is failing, as {} reports", name(&line.member.id), name(by)));
            }
        }
        // Every view of the members that replied: equal views of all of them, and of all other primaries with slots.
        for (by, view) in &self.views {
            for (id, own) in &self.views {
                let Some(own) = own.lines.get(id) else { continue };
                match view.lines.get(id) {
                    Some(line) if line.epoch == own.epoch && line.slots == own.slots => {}
                    Some(line) if line.slots == own.slots => {
                        return Some(format!(
                            "members {} and {} report different epochs of {}",
                            name(by),
                            name(id),
                            name(id)
                        ));
                    }
                    Some(_) => {
                        return Some(format!(
                            "members {} and {} report different slots of {}",
                            name(by),
                            name(id),
                            name(id)
                        ));
                    }
                    None => return Some(format!("member {} does not know {} yet", name(by), name(id))),
                }
            }
            let unknown =
                view.lines.iter().find(|(id, line)| !line.slots.is_empty() && !self.views.contains_key(id.as_str()));
            if let Some((id, _)) = unknown {
                return Some(format!("member {} reports slots of {}, which has no reply", name(by), name(id)));
            }
        }
        let mut epochs = BTreeMap::new();
        for (id, view) in &self.views {
            let Some(own) = view.lines.get(id).filter(|own| !own.slots.is_empty()) else { continue };
            if let Some(other) = epochs.insert(own.epoch, id) {
                return Some(format!("members {} and {} have the same epoch", name(other), name(id)));
            }
        }
        None
    }

    /// Next step to give a slot to a member, from any state that an interrupted move leaves. `is_announced`: the other
    /// primaries have got `SETSLOT NODE` as well.
    ///
    /// # Errors
    /// If the state cannot be continued.
    pub fn next(&self, slot: Slot, target: &str, is_announced: bool) -> Result<Step, NextError> {
        let Some(taker) = self.view(target) else { return Err(NextError::NoTarget) };
        if taker.claims(slot) {
            let others = self.primaries().filter(|id| *id != target);
            // The source is the one with a mark: it must forget the mark before the others get the owner.
            let (sources, rest): (Vec<&str>, Vec<&str>) = others.partition(|id| self.is_open_at(id, slot));
            let is_open = self.is_open_at(target, slot) || !sources.is_empty();
            if is_announced && !is_open {
                return Ok(Step::Done);
            }
            let all = std::iter::once(target).chain(sources).chain(rest).map(str::to_owned);
            return Ok(Step::Announce(all.collect()));
        }
        let Some(source) = self.owner(slot) else { return Err(NextError::NoOwner) };
        // Also if that member is lost: its replica may have keys of the slot.
        if let Some(to) = self.leaves_for(source, slot).filter(|to| *to != target) {
            return Err(NextError::Elsewhere(to.to_owned()));
        }
        match taker.marks.get(&slot) {
            Some(Mark::Importing(from)) if from == source => {}
            // Left by a primary that a failover has replaced, or not marked yet.
            Some(Mark::Importing(_)) | None => return Ok(Step::Import { source: source.to_owned() }),
            Some(Mark::Migrating(_)) => return Err(NextError::Elsewhere(target.to_owned())),
        }
        match self.leaves_for(source, slot) {
            Some(_) => Ok(Step::Keys { source: source.to_owned() }),
            None => Ok(Step::Migrate { source: source.to_owned() }),
        }
    }
}

/// Reason why a slot cannot be moved on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NextError {
    /// The target does not reply as a primary.
    NoTarget,
    /// No member claims the slot.
    NoOwner,
    /// The slot migrates to this member.
    Elsewhere(String),
}

/// Keys of one `MIGRATE`. The source serves nothing in the meantime, so the count and the bytes are bounded; a larger
/// key is alone. At 512 KiB and 1 GB/s the source pauses for about 1 ms.
const BATCH: (usize, u64) = (64, 512 << 10);

/// Keys of one `MIGRATE` if their sizes are unknown, as `redis-cli` migrates them.
const BLIND_BATCH: usize = 10;

/// Divides keys into batches. `bytes`: sizes of the keys, `None` if unknown.
#[must_use]
pub fn batches(bytes: &[Option<u64>]) -> Vec<Range<usize>> {
    let (keys_max, bytes_max) = BATCH;
    let mut batches: Vec<Range<usize>> = Vec::new();
    let (mut sum, mut are_known) = (0_u64, true);
    for (at, size) in bytes.iter().enumerate() {
        let size_or = size.unwrap_or(bytes_max / BLIND_BATCH as u64);
        let fits = batches.last().is_some_and(|last| {
            let max = if are_known && size.is_some() { keys_max } else { BLIND_BATCH };
            last.len() < max && sum.saturating_add(size_or) <= bytes_max
        });
        match batches.last_mut().filter(|_| fits) {
            Some(last) => {
                last.end = at + 1;
                (sum, are_known) = (sum.saturating_add(size_or), are_known && size.is_some());
            }
            None => {
                batches.push(at..at + 1);
                (sum, are_known) = (size_or, size.is_some());
            }
        }
    }
    batches
}

/// Time-out of a `MIGRATE` with this many bytes, in milliseconds. The source serves nothing until then if the target is
/// silent, so it is short for small batches.
#[must_use]
pub fn migrate_timeout_ms(bytes: u64) -> u64 {
    const BASE_MS: u64 = 3000;
    // A slow target needs 1 s for 8 MiB.
    (BASE_MS + bytes / (8 << 20) * 1000).min(600_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaa";
    const B: &str = "bbbb";
    const C: &str = "cccc";

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    /// State of one member in a test: epoch, slots, and marks.
    type Of<'t> = (u64, &'t str, &'t str);

    fn view(me: &str, members: [(&str, Of<'_>); 3]) -> Nodes {
        let text: String = members
            .iter()
            .enumerate()
            .map(|(number, (id, (epoch, slots, marks)))| {
                let (myself, marks) = if *id == me { ("myself,", *marks) } else { ("", "") };
                let line = format!(
                    "{id} 10.0.0.{number}:7000@17000,,shard-id=x {myself}master - 0 0 {epoch} connected {slots} {marks}"
                );
                format!("{}\n", line.trim_end())
            })
            .collect();
        Nodes::parse(&text.replace("  ", " ")).expect("a reply")
    }

    fn survey(a: Of<'_>, b: Of<'_>, c: Of<'_>) -> Survey {
        let mut survey = Survey::default();
        for me in [A, B, C] {
            survey.add(view(me, [(A, a), (B, b), (C, c)]), []);
        }
        survey
    }

    fn name(id: &str) -> String {
        id.to_owned()
    }

    #[test]
    fn running_migrations_are_parsed_and_shown_once() {
        let fields = |state| {
            [
                ("name", "n1"),
                ("operation", "EXPORT"),
                ("slot_ranges", "0-5 7-7"),
                ("source_node", A),
                ("target_node", B),
                ("state", state),
                ("message", ""),
            ]
        };
        let job = Job::of(fields("replicating")).expect("a job");
        assert_eq!(
            (job.count(), job.first(), job.has_ended(), job.has(slot(7)), job.has(slot(6))),
            (7, 0, false, true, false)
        );
        assert!(
            ["success", "failed", "cancelled"]
                .iter()
                .all(|state| Job::of(fields(state)).is_some_and(|job| job.has_ended()))
        );
        assert_eq!(Job::of([("name", "n1"), ("state", "x")]), None);
        assert_eq!(Job::of([("name", "n1"), ("state", "x"), ("slot_ranges", "5-")]), None);
        let state = (1, "0-99", "");
        let members = [(A, state), (B, (2, "100-199", "")), (C, (3, "200-16383", ""))];
        let mut survey = Survey::default();
        let imported = Job { state: "receiving-snapshot".to_owned(), ..job.clone() };
        survey.add(view(B, members), [imported]);
        survey.add(view(A, members), [job.clone()]);
        survey.add(view(C, members), []);
        assert_eq!(survey.running_jobs().collect::<Vec<_>>(), [&job]);
        assert_eq!(survey.other_job_from(A, |job| job.has(slot(7))), None);
        assert_eq!(survey.other_job_from(A, |job| job.has(slot(8))), Some(&job));
        assert_eq!(survey.other_job_from(B, |_| false), None, "its target cannot cancel it");
    }

    #[test]
    fn slots_are_given_away_only_if_members_agree() {
        let (a, b, c) = ((1, "0-99", ""), (2, "100-199", ""), (3, "200-16383", ""));
        assert_eq!(survey(a, b, c).dispute(&name), None);
        // A member without slots, as it joins.
        assert_eq!(survey(a, (2, "100-16383", ""), (0, "", "")).dispute(&name), None);
        let disputed = |of: Survey| of.dispute(&name).expect("a dispute");
        let mut one = survey(a, b, c);
        one.add(view(C, [(A, a), (B, (9, "100-199", "")), (C, c)]), []);
        assert_eq!(disputed(one), "members cccc and bbbb report different epochs of bbbb");
        let mut one = survey(a, b, c);
        one.add(view(C, [(A, a), (B, (2, "100-198", "")), (C, c)]), []);
        assert_eq!(disputed(one), "members cccc and bbbb report different slots of bbbb");
        assert_eq!(disputed(survey(a, (1, "100-199", ""), c)), "members aaaa and bbbb have the same epoch");
        let mut one = survey(a, b, c);
        one.add_silent("b:1".to_owned(), "cannot be reached".to_owned());
        assert_eq!(disputed(one), "member b:1 cannot be reached");
        let mut one = survey(a, b, c);
        one.views.remove(C);
        assert_eq!(disputed(one), "member aaaa reports slots of cccc, which has no reply");
        let mut one = survey(a, b, c);
        let failing =
            "aaaa 1:1@1 master,fail? - 0 0 1 connected 0-99\nbbbb 1:2@1 myself,master - 0 0 2 connected 100-199\n";
        one.add(Nodes::parse(failing).expect("a reply"), []);
        assert_eq!(disputed(one), "member aaaa is failing, as bbbb reports");
        let mut one = survey(a, b, c);
        let demoted = "bbbb 1:2@1 myself,slave aaaa 0 0 2 connected\n";
        one.add(Nodes::parse(demoted).expect("a reply"), []);
        assert_eq!(disputed(one), "member bbbb is no primary any more: a failover is in progress");
    }

    #[test]
    fn a_move_continues_from_every_state_that_an_interruption_leaves() {
        let import = Ok(Step::Import { source: A.to_owned() });
        let migrate = Ok(Step::Migrate { source: A.to_owned() });
        let keys = Ok(Step::Keys { source: A.to_owned() });
        let announce = |ids: [&str; 3]| Ok(Step::Announce(ids.map(str::to_owned).to_vec()));
        let c = (3, "100-16383", "");
        let next = |a, b, is_announced| survey(a, b, c).next(slot(7), B, is_announced);
        let owner = (1, "0-99", "");
        assert_eq!(next(owner, (2, "", ""), false), import);
        assert_eq!(next(owner, (2, "", "[7-<-aaaa]"), false), migrate);
        assert_eq!(next((1, "0-99", "[7->-bbbb]"), (2, "", "[7-<-aaaa]"), false), keys);
        // The target has restarted without its marks.
        assert_eq!(next((1, "0-99", "[7->-bbbb]"), (2, "", ""), false), import);
        // The target has the slot, and the source does not know yet, or has kept its mark.
        assert_eq!(next((1, "0-99", "[7->-bbbb]"), (4, "7", ""), true), announce([B, A, C]));
        assert_eq!(next((1, "0-6 8-99", "[7->-bbbb]"), (4, "7", ""), true), announce([B, A, C]));
        assert_eq!(next((1, "0-6 8-99", ""), (4, "7", ""), false), announce([B, A, C]));
        assert_eq!(next((1, "0-6 8-99", ""), (4, "7", "[7-<-aaaa]"), true), announce([B, A, C]));
        assert_eq!(next((1, "0-6 8-99", ""), (4, "7", ""), true), Ok(Step::Done));
        // A replica has replaced the source: the new primary has no mark.
        assert_eq!(next((1, "0-99", ""), (2, "", "[7-<-dddd]"), false), import);
        // It migrates elsewhere.
        let elsewhere = |id: &str| Err(NextError::Elsewhere(id.to_owned()));
        assert_eq!(next((1, "0-99", "[7->-cccc]"), (2, "", "[7-<-aaaa]"), false), elsewhere(C));
        // To a member that is no primary any more, but whose replica may have keys.
        for taker in ["", "[7-<-aaaa]"] {
            assert_eq!(next((1, "0-99", "[7->-dddd]"), (2, "", taker), false), elsewhere("dddd"));
        }
        assert_eq!(next((1, "0-6", ""), (2, "", ""), false), Err(NextError::NoOwner));
        assert_eq!(survey(owner, (2, "", ""), c).next(slot(7), "dddd", false), Err(NextError::NoTarget));
    }

    #[test]
    fn marks_of_both_members_are_one_open_slot() {
        let open = |source: &str, target: &str| OpenSlot {
            slot: slot(7),
            source: source.to_owned(),
            target: target.to_owned(),
        };
        let c = (3, "100-16383", "");
        let both = survey((1, "0-99", "[7->-bbbb]"), (2, "", "[7-<-aaaa]"), c);
        assert_eq!(both.open(), BTreeSet::from([open(A, B)]));
        assert_eq!(survey((1, "0-99", ""), (2, "", "[7-<-aaaa]"), c).open(), BTreeSet::from([open(A, B)]));
        assert_eq!(survey((1, "0-99", ""), (2, "", ""), c).open(), BTreeSet::new());
    }

    #[test]
    fn batches_are_bounded_and_large_keys_are_alone() {
        let known = |sizes: &[u64]| batches(&sizes.iter().copied().map(Some).collect::<Vec<_>>());
        assert_eq!(known(&[]), []);
        assert_eq!(known(&[100; 130]), [0..64, 64..128, 128..130]);
        assert_eq!(known(&[100, 1 << 20, 100, 100]), [0..1, 1..2, 2..4]);
        assert_eq!(known(&[300 << 10, 300 << 10, 100 << 10]), [0..1, 1..3]);
        assert_eq!(known(&[u64::MAX, u64::MAX]), [0..1, 1..2]);
        assert_eq!(batches(&[None; 25]), [0..10, 10..20, 20..25]);
        assert_eq!((migrate_timeout_ms(100), migrate_timeout_ms(80 << 20)), (3000, 13_000));
        assert_eq!(migrate_timeout_ms(u64::MAX), 600_000);
    }
}
