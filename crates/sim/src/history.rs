//! History of the operations that clients observed, for the checker.

use std::collections::BTreeMap;

use crate::linear::{Act, OPERATIONS_MAX, Operation, UNKNOWN, Verdict, check};
use crate::node::{Entry, KeyIx, Op, Reply, part};

/// Location of a key according to the journal when a node loses data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// At this node only.
    Here,
    /// Not at this node.
    Elsewhere,
    /// Just leaving or arriving.
    Doubtful,
    /// Not at this node, but its data counts if the router does not notice the new process.
    UntilNoticed,
}

#[derive(Clone, Debug, Default)]
struct KeyHistory {
    initial: Option<Vec<u32>>,
    operations: Vec<Operation>,
    /// Operations that rely on a watch, with the time from which it was in force.
    watched: Vec<(usize, u64)>,
}

/// Histories of all keys.
#[derive(Clone, Debug)]
pub(crate) struct History {
    keys: Vec<KeyHistory>,
    /// Difference between the nodes' clocks.
    skew_us: u64,
    /// Operations of RENAME commands, by their unique numbers.
    renames: BTreeMap<u32, Marks>,
}

/// Operations of one command, as key and index.
pub(crate) type Marks = Vec<(KeyIx, usize)>;

impl History {
    pub(crate) fn new(keys: usize, skew_us: u64) -> Self {
        Self { keys: vec![KeyHistory::default(); keys], skew_us, renames: BTreeMap::new() }
    }

    pub(crate) fn begins_with(&mut self, key: KeyIx, value: Vec<u32>) {
        self.keys[key].initial = Some(value);
    }

    fn add(&mut self, key: KeyIx, act: Act, now_us: u64, by: &str) -> (KeyIx, usize) {
        let operations = &mut self.keys[key].operations;
        operations.push(Operation { invoked_us: now_us, returned_us: UNKNOWN, act, by: by.to_owned() });
        (key, operations.len() - 1)
    }

    /// Records a command as sent. Its outcome is unknown until a reply is recorded.
    pub(crate) fn on_request(&mut self, op: &Op, now_us: u64, by: &str, marks: &mut Marks) {
        match op {
            Op::Get(key) => marks.push(self.add(*key, Act::Read(None), now_us, by)),
            Op::Set(key, value, ttl) => marks.push(self.add(*key, Act::Write(*value, *ttl), now_us, by)),
            Op::Incr(key) => marks.push(self.add(*key, Act::Count(None), now_us, by)),
            Op::Del(key) => marks.push(self.add(*key, Act::Remove(None), now_us, by)),
            Op::Push(key, value) => marks.push(self.add(*key, Act::Push(*value, None), now_us, by)),
            Op::Pop(key) => marks.push(self.add(*key, Act::Take(None), now_us, by)),
            Op::Put(key, field, value) => marks.push(self.add(*key, Act::Put(part(*field, *value), None), now_us, by)),
            Op::Cut(key, field) => marks.push(self.add(*key, Act::Cut(*field, None), now_us, by)),
            Op::Expire(key, ttl_us) => marks.push(self.add(*key, Act::Expire(*ttl_us, None), now_us, by)),
            Op::Several(ops) => ops.iter().for_each(|op| self.on_request(op, now_us, by, marks)),
            Op::Script(op) | Op::Function(_, op) => self.on_request(op, now_us, by, marks),
            Op::Watch(_) => {}
            // Only the node knows the new state of both keys, after execution.
            Op::Rename(from, to, token) => {
                let both = [*from, *to].map(|key| self.add(key, Act::Read(None), now_us, by));
                self.renames.insert(*token, both.to_vec());
                marks.extend(both);
            }
            Op::Exec(key, watched) => {
                let mark = self.add(*key, Act::Swap(watched.seen.clone(), watched.value), now_us, by);
                self.keys[*key].watched.push((mark.1, watched.since_us));
                marks.push(mark);
            }
            Op::Flush => {
                for key in 0..self.keys.len() {
                    marks.push(self.add(key, Act::Remove(None), now_us, by));
                }
            }
        }
    }

    /// Records the reply to a command.
    pub(crate) fn on_reply(&mut self, marks: &Marks, reply: &Reply, now_us: u64) {
        let replies = match reply {
            Reply::Several(replies) => replies.as_slice(),
            one => std::slice::from_ref(one),
        };
        for (at, (key, index)) in marks.iter().enumerate() {
            let reply = replies.get(at).or(replies.last());
            let operation = &mut self.keys[*key].operations[*index];
            operation.returned_us = now_us;
            match (&mut operation.act, reply) {
                (Act::Read(seen), Some(Reply::Value(value))) => seen.clone_from(value),
                (Act::Count(told), Some(Reply::Number(number))) => *told = Some(Some(*number)),
                (Act::Count(told), Some(Reply::Error)) => *told = Some(None),
                (
                    Act::Remove(told)
                    | Act::Push(_, told)
                    | Act::Put(_, told)
                    | Act::Cut(_, told)
                    | Act::Expire(_, told),
                    Some(Reply::Number(number)),
                ) => *told = Some(*number),
                (Act::Take(told), Some(Reply::Value(Some(value)))) => *told = value.first().copied(),
                _ => {}
            }
        }
    }

    /// Records the value that a node has renamed.
    pub(crate) fn renamed(&mut self, token: u32, entry: Entry) {
        let marks = self.renames.remove(&token).unwrap_or_default();
        let acts = [Act::Become(None, None), Act::Become(Some(entry.value), entry.expires_us)];
        for ((key, index), act) in marks.into_iter().zip(acts) {
            self.keys[key].operations[index].act = act;
        }
    }

    /// Records that an operation has taken effect at the latest now.
    pub(crate) fn record_end(&mut self, (key, index): (KeyIx, usize), now_us: u64) {
        self.keys[key].operations[index].returned_us = now_us;
    }

    /// Drops a command that was not executed, or a read without a reply.
    pub(crate) fn forget(&mut self, marks: &Marks) {
        for (key, index) in marks {
            // A read with unknown result constrains nothing.
            let operation = &mut self.keys[*key].operations[*index];
            operation.act = Act::Read(None);
            operation.returned_us = UNKNOWN;
        }
    }

    /// Whether an operation on the key has no known end.
    pub(crate) fn may_change(&self, key: KeyIx) -> bool {
        self.keys[key].operations.iter().any(|operation| operation.returned_us == UNKNOWN)
    }

    /// Records that the key changed to `entry` at some time in the interval.
    pub(crate) fn reverts_between(&mut self, key: KeyIx, entry: Option<Entry>, invoked_us: u64, returned_us: u64) {
        let by = "a node that is lost".into();
        let (value, ends) = entry.map(|entry| (entry.value, entry.expires_us)).unzip();
        self.keys[key].operations.push(Operation {
            invoked_us,
            returned_us,
            act: Act::Become(value, ends.flatten()),
            by,
        });
    }

    /// Records that a node returned with an earlier state of the key.
    pub(crate) fn reverts(
        &mut self,
        key: KeyIx,
        entry: Option<Entry>,
        now_us: u64,
        place: Place,
    ) -> Option<(KeyIx, usize)> {
        let returned_us = match place {
            Place::Here => now_us,
            Place::Doubtful | Place::UntilNoticed => UNKNOWN,
            Place::Elsewhere => return None,
        };
        let (value, ends) = entry.map(|entry| (entry.value, entry.expires_us)).unzip();
        let act = Act::Become(value, ends.flatten());
        let operations = &mut self.keys[key].operations;
        operations.push(Operation { invoked_us: now_us, returned_us, act, by: "a node that forgets".into() });
        Some((key, operations.len() - 1))
    }

    /// Returns the first violation: a history without a valid order, or a change of a key that an executed transaction
    /// watched. Also returns the number of keys whose history was too ambiguous to check.
    pub(crate) fn check(&self) -> (Option<String>, u64) {
        let mut unknown = 0;
        for (key, history) in self.keys.iter().enumerate() {
            if let Some((exec, other)) = history.changed_while_watched() {
                let text = format!("key {key}: {exec:?} was executed although, while the key was watched, {other:?}");
                return (Some(text), unknown);
            }
            let operations: Vec<Operation> = history
                .operations
                .iter()
                .filter(|o| !(o.returned_us == UNKNOWN && matches!(o.act, Act::Read(_))))
                .cloned()
                .collect();
            match check(&operations, history.initial.clone(), self.skew_us) {
                Verdict::Fine => {}
                Verdict::TooMany => unknown += 1,
                Verdict::Broken(fitting) => {
                    return (Some(describe(key, history, &operations, fitting)), unknown);
                }
            }
        }
        debug_assert!(self.keys.iter().all(|key| key.operations.len() <= 4 * OPERATIONS_MAX));
        (None, unknown)
    }
}

impl KeyHistory {
    /// Finds an executed transaction whose key was changed between its WATCH and the request of EXEC. Returns both
    /// operations. The search for an order would miss a change that restores the old value.
    fn changed_while_watched(&self) -> Option<(&Operation, &Operation)> {
        let executed = self.watched.iter().map(|(index, since_us)| (&self.operations[*index], *since_us));
        executed.filter(|(exec, _)| exec.returned_us != UNKNOWN && matches!(exec.act, Act::Swap(..))).find_map(
            |(exec, since_us)| {
                let between = |other: &&Operation| other.invoked_us > since_us && other.returned_us < exec.invoked_us;
                Some((exec, self.operations.iter().filter(between).find(|other| has_changed(&other.act))?))
            },
        )
    }
}

/// Whether the reply proves that the key was changed.
fn has_changed(act: &Act) -> bool {
    match act {
        Act::Write(..)
        | Act::Swap(..)
        | Act::Push(_, Some(_))
        | Act::Put(_, Some(_))
        | Act::Count(Some(Some(_)))
        | Act::Take(Some(_)) => true,
        Act::Remove(told) | Act::Cut(_, told) | Act::Expire(_, told) => *told == Some(1),
        _ => false,
    }
}

fn describe(key: KeyIx, history: &KeyHistory, operations: &[Operation], fitting: usize) -> String {
    let mut text = format!(
        "key {key} (at first {:?}): no order fits the replies; {fitting} of {} operations can be ordered\n",
        history.initial,
        operations.iter().filter(|operation| operation.returned_us != UNKNOWN).count()
    );
    for Operation { invoked_us, returned_us, act, by } in operations {
        let returned = if *returned_us == UNKNOWN { "?".to_owned() } else { returned_us.to_string() };
        text.push_str(&format!("    {invoked_us:>9} .. {returned:>9}  {by}: {act:?}\n"));
    }
    text
}
