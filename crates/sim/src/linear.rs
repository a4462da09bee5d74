//! Checks the operations on one key for linearizability, by the search of Wing, Gong and Lowe.
//!
//! Independent of the router and node models: the input is only the requests, times and replies of clients. An
//! operation without a known reply may take effect at any time after its request, or never. A time to live ends between
//! the earliest and the latest possible execution of its command, plus its length.

use std::collections::HashSet;

use crate::node::{field_of, is_hash, put};

/// An operation and its reply; `None` if the reply is unknown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Act {
    /// Read of this value.
    Read(Option<Vec<u32>>),
    /// Write of a value, with a time to live in microseconds.
    Write(u32, Option<u64>),
    /// Increment; `Some(None)` if the value was not a counter.
    Count(Option<Option<i64>>),
    /// Removal, with the number of removed keys.
    Remove(Option<i64>),
    /// Appended element, with the new length.
    Push(u32, Option<i64>),
    /// Removal of the first element.
    Take(Option<u32>),
    /// Write of a hash part, with whether the field was new.
    Put(u32, Option<i64>),
    /// Removal of a field, with whether it existed.
    Cut(u32, Option<i64>),
    /// New time to live in microseconds, with whether the key existed.
    Expire(u64, Option<i64>),
    /// Write that took effect only because the key still had the first value.
    Swap(Option<Vec<u32>>, u32),
    /// Change to this value and exact expiry by another cause, such as a node that lost data.
    Become(Option<Vec<u32>>, Option<u64>),
}

/// One operation on a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Operation {
    /// Time of the request.
    pub invoked_us: u64,
    /// Time of the reply; [`UNKNOWN`] if there is none.
    pub returned_us: u64,
    /// Operation and reply.
    pub act: Act,
    /// Label of the client, for display.
    pub by: String,
}

/// Stands for the time of a missing reply.
pub const UNKNOWN: u64 = u64::MAX;

/// A key's value, and the earliest and latest end of its life.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Value {
    list: Vec<u32>,
    ends: Option<(u64, u64)>,
}

type State = Option<Value>;

/// Maximum number of operations per key, limited by the bits of the mask.
pub const OPERATIONS_MAX: usize = 128;

/// Maximum number of visited states; the search is inconclusive beyond.
const STATES_MAX: usize = 2_000_000;

/// Result of the search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// A valid order exists.
    Fine,
    /// No valid order exists. Contains the largest number of operations that fit one.
    Broken(usize),
    /// Inconclusive: too many possibilities.
    TooMany,
}

/// Searches an order in which the operations can have happened, starting from `initial`.
#[must_use]
pub fn check(operations: &[Operation], initial: Option<Vec<u32>>, skew_us: u64) -> Verdict {
    let mut ordered: Vec<&Operation> = operations.iter().collect();
    ordered.sort_by_key(|operation| operation.invoked_us);
    if ordered.len() > OPERATIONS_MAX {
        return Verdict::TooMany;
    }
    let answered: u128 =
        ordered.iter().enumerate().filter(|(_, o)| o.returned_us != UNKNOWN).fold(0, |mask, (i, _)| mask | 1 << i);
    let mut seen: HashSet<(u128, State)> = HashSet::new();
    let mut stack: Vec<(u128, State)> = vec![(0, initial.map(|list| Value { list, ends: None }))];
    let mut best = 0;
    let mut next = Vec::new();
    while let Some((done, state)) = stack.pop() {
        if done & answered == answered {
            return Verdict::Fine;
        }
        if !seen.insert((done, state.clone())) {
            continue;
        }
        if seen.len() > STATES_MAX {
            return Verdict::TooMany;
        }
        best = best.max((done & answered).count_ones() as usize);
        // A request sent after the earliest missing reply cannot precede that operation.
        let mut bound = UNKNOWN;
        for (i, operation) in ordered.iter().enumerate() {
            if done >> i & 1 == 0 {
                bound = bound.min(operation.returned_us);
            }
        }
        for (i, operation) in ordered.iter().enumerate() {
            if operation.invoked_us > bound {
                break;
            }
            if done >> i & 1 == 1 {
                continue;
            }
            apply(&state, operation, skew_us, &mut next);
            stack.extend(next.drain(..).map(|state| (done | 1 << i, state)));
        }
    }
    Verdict::Broken(best)
}

/// Collects the states in which the operation can leave the key, if they fit its reply.
fn apply(state: &State, operation: &Operation, skew_us: u64, out: &mut Vec<State>) {
    let Operation { invoked_us, returned_us, ref act, .. } = *operation;
    match state {
        Some(value) => {
            // The expiry is by the clock of another node.
            let ends =
                value.ends.map(|(earliest, latest)| (earliest.saturating_sub(skew_us), latest.saturating_add(skew_us)));
            if ends.is_none_or(|(_, latest)| invoked_us < latest) {
                apply_to(Some(value), act, invoked_us, returned_us, out);
            }
            if ends.is_some_and(|(earliest, _)| returned_us >= earliest) {
                apply_to(None, act, invoked_us, returned_us, out);
            }
        }
        None => apply_to(None, act, invoked_us, returned_us, out),
    }
}

fn apply_to(value: Option<&Value>, act: &Act, invoked_us: u64, returned_us: u64, out: &mut Vec<State>) {
    let fits = match act {
        Act::Read(seen) => (seen.as_ref() == value.map(|value| &value.list)).then(|| value.cloned()),
        Act::Write(new, ttl_us) => {
            let ends = ttl_us.map(|ttl| (invoked_us.saturating_add(ttl), returned_us.saturating_add(ttl)));
            Some(Some(Value { list: vec![*new], ends }))
        }
        Act::Count(told) => {
            let list = value.map_or(&[0][..], |value| &value.list);
            match list {
                [count] if !is_hash(list) => {
                    let count = count + 1;
                    let fits = told.is_none_or(|told| told == Some(count.into()));
                    fits.then(|| Some(Value { list: vec![count], ends: value.and_then(|value| value.ends) }))
                }
                _ => told.is_none_or(|told| told.is_none()).then(|| value.cloned()),
            }
        }
        Act::Remove(told) => told.is_none_or(|told| told == i64::from(value.is_some())).then_some(None),
        // WRONGTYPE: nothing was done.
        Act::Push(..) if value.is_some_and(|value| is_hash(&value.list)) => Some(value.cloned()),
        Act::Put(..) | Act::Cut(..) if value.is_some_and(|value| !is_hash(&value.list)) => Some(value.cloned()),
        Act::Put(new, told) => {
            let mut list = value.map(|value| value.list.clone()).unwrap_or_default();
            let is_new = put(&mut list, *new);
            let fits = told.is_none_or(|told| told == i64::from(is_new));
            fits.then(|| Some(Value { list, ends: value.and_then(|value| value.ends) }))
        }
        Act::Cut(field, told) => {
            let mut list = value.map(|value| value.list.clone()).unwrap_or_default();
            let before = list.len();
            list.retain(|part| field_of(*part) != *field);
            let fits = told.is_none_or(|told| told == (before - list.len()) as i64);
            fits.then(|| (!list.is_empty()).then_some(Value { list, ends: value.and_then(|value| value.ends) }))
        }
        Act::Expire(ttl_us, told) => told.is_none_or(|told| told == i64::from(value.is_some())).then(|| {
            let ends = Some((invoked_us.saturating_add(*ttl_us), returned_us.saturating_add(*ttl_us)));
            value.map(|value| Value { list: value.list.clone(), ends })
        }),
        Act::Push(new, told) => {
            let mut list = value.map(|value| value.list.clone()).unwrap_or_default();
            list.push(*new);
            let fits = told.is_none_or(|told| told == list.len() as i64);
            fits.then(|| Some(Value { list, ends: value.and_then(|value| value.ends) }))
        }
        Act::Take(told) => {
            value.filter(|value| told.is_none_or(|told| Some(&told) == value.list.first())).map(|value| {
                let list = value.list[1..].to_vec();
                (!list.is_empty()).then_some(Value { list, ends: value.ends })
            })
        }
        Act::Swap(seen, new) => {
            (seen.as_ref() == value.map(|value| &value.list)).then(|| Some(Value { list: vec![*new], ends: None }))
        }
        Act::Become(list, ends) => Some(list.clone().map(|list| Value { list, ends: ends.map(|end| (end, end)) })),
    };
    out.extend(fits);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn op(invoked_us: u64, returned_us: u64, act: Act) -> Operation {
        Operation { invoked_us, returned_us, act, by: String::new() }
    }

    #[test]
    fn a_read_sees_the_last_write() {
        let write = op(0, 10, Act::Write(1, None));
        assert_eq!(check(&[write.clone(), op(11, 12, Act::Read(Some(vec![1])))], None, 0), Verdict::Fine);
        assert_eq!(check(&[write.clone(), op(11, 12, Act::Read(None))], None, 0), Verdict::Broken(1));
        assert_eq!(check(&[write, op(5, 12, Act::Read(None))], None, 0), Verdict::Fine);
    }

    #[test]
    fn unknown_operations_happen_at_most_once() {
        let count = op(0, UNKNOWN, Act::Count(None));
        let read = |at, value| op(at, at + 1, Act::Read(value));
        assert_eq!(check(&[count.clone(), read(50, None)], None, 0), Verdict::Fine);
        assert_eq!(check(&[count.clone(), read(50, None), read(60, Some(vec![1]))], None, 0), Verdict::Fine);
        assert_ne!(check(&[count.clone(), read(50, Some(vec![1])), read(60, None)], None, 0), Verdict::Fine);
        assert_ne!(check(&[count, read(50, Some(vec![2]))], None, 0), Verdict::Fine);
    }

    #[test]
    fn a_time_to_live_ends_in_time() {
        let write = op(100, 110, Act::Write(1, Some(50)));
        let read = |at, value| op(at, at + 1, Act::Read(value));
        assert_eq!(check(&[write.clone(), read(140, Some(vec![1]))], None, 0), Verdict::Fine);
        assert_ne!(check(&[write.clone(), read(140, None)], None, 0), Verdict::Fine);
        assert_eq!(check(&[write.clone(), read(155, None)], None, 0), Verdict::Fine);
        assert_ne!(check(&[write.clone(), read(160, Some(vec![1]))], None, 0), Verdict::Fine);
        assert_ne!(check(&[write, read(155, None), read(157, Some(vec![1]))], None, 0), Verdict::Fine);
    }

    #[test]
    fn a_resurrection_is_detected() {
        let ops = [
            op(0, 1, Act::Push(7, Some(1))),
            op(2, 3, Act::Remove(Some(1))),
            op(4, 5, Act::Read(None)),
            op(6, 7, Act::Read(Some(vec![7]))),
        ];
        assert_eq!(check(&ops, None, 0), Verdict::Broken(3));
        assert_eq!(check(&ops[..3], None, 0), Verdict::Fine);
    }

    #[test]
    fn conditional_writes_need_their_condition() {
        let swap = op(20, 30, Act::Swap(Some(vec![1]), 2));
        let read = op(40, 41, Act::Read(Some(vec![2])));
        let write = |from, value| op(from, from + 5, Act::Write(value, None));
        assert_eq!(check(&[write(0, 1), swap.clone(), read.clone()], None, 0), Verdict::Fine);
        assert_ne!(check(&[write(0, 1), write(10, 3), swap.clone(), read], None, 0), Verdict::Fine);
        // Without a known reply, the write may not have happened.
        let unknown = Operation { returned_us: UNKNOWN, ..swap };
        let read = op(40, 41, Act::Read(Some(vec![3])));
        assert_eq!(check(&[write(0, 1), write(10, 3), unknown, read], None, 0), Verdict::Fine);
    }

    #[test]
    fn an_element_is_taken_once() {
        let ops = [op(0, 1, Act::Push(7, Some(1))), op(2, 9, Act::Take(Some(7))), op(3, 8, Act::Take(Some(7)))];
        assert_ne!(check(&ops, None, 0), Verdict::Fine);
        assert_eq!(check(&ops[..2], None, 0), Verdict::Fine);
    }
}
