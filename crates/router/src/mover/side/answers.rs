//! Interpretation of a node's replies to reads, stores, durability checks and SCAN.
//!
//! Separate from the connection ([`super::SideConnection`]), so that tests can try any reply.

use std::sync::Arc;

use switchyard_policy::migration::{Copied, Durability, Stored};
use switchyard_resp::reply;

use super::{Content, DatabaseCommands, Form, Payload, Placed, Read, Reading};
use crate::mover::connection::error_text;
/// Returns the result of a [`super::Ask::Copy`].
pub(in crate::mover) fn copied(reading: Reading, answers: Vec<Vec<u8>>) -> Result<Read, String> {
    let Reading { keys, databases, usage, absolute, form, staged, first, .. } = reading;
    let mut unusable = Vec::new();
    let mut answers = answers.into_iter();
    let mut next = || answers.next().unwrap_or_default();
    let now_ms = if absolute {
        0
    } else {
        let time = next();
        let time: Vec<i64> =
            reply::elements(&time).filter_map(|n| std::str::from_utf8(reply::text(n)?).ok()?.parse().ok()).collect();
        let [seconds, micros] = time[..] else { return Err("it refuses TIME".to_owned()) };
        seconds * 1000 + micros / 1000
    };
    // Nearly all keys are in one database. A vector that grows on its own starts with a capacity of four.
    let mut contents: Vec<Vec<Content>> = keys.iter().map(|_| Vec::with_capacity(1)).collect();
    let mut refused: Vec<Option<String>> = vec![None; keys.len()];
    let mut others = Vec::new();
    let mut only_one_by_one = false;
    // 0 would mean no expiry.
    let until = |expiry: i64| if expiry < 0 { 0 } else { (now_ms + expiry).max(1) };
    for DatabaseCommands { database, selected, expiry, together } in databases {
        if selected {
            let answer = next();
            if reply::is_error(&answer) {
                return Err(format!("SELECT {database}: {}", error_text(&answer)));
            }
        }
        if together > 1 {
            for (first, some) in contents.chunks_mut(together).enumerate() {
                let expiries: Vec<Vec<u8>> = if expiry { some.iter().map(|_| next()).collect() } else { Vec::new() };
                let values = Arc::new(next());
                only_one_by_one |= reply::is_error(&values);
                let mut each = reply::elements(&values);
                for (number, of_key) in some.iter_mut().enumerate() {
                    let place = first * together + number;
                    let expiry = expiries.get(number).map_or(Some(-1), |answer| reply::integer(answer));
                    let value = each.next().filter(|value| !reply::is_null(value)).and_then(reply::text);
                    match (expiry, value) {
                        (Some(-2), _) => {}
                        (Some(expiry), Some(value)) => {
                            let payload = Payload::within(&values, value);
                            of_key.push(Content {
                                database,
                                form,
                                payload,
                                last: None,
                                expires_ms: until(expiry),
                                usage: None,
                            });
                        }
                        // Not a string, missing, or refused.
                        _ => others.push(place),
                    }
                }
            }
            continue;
        }
        for (place, of_key) in contents.iter_mut().enumerate() {
            if !staged.is_empty()
                && let staging = (keys[place].clone(), database)
                && let Some(read) = staged.get(&staging)
            {
                let expiry = reply::integer(&next());
                match (expiry.filter(|expiry| *expiry != -2), read.take(&mut next)) {
                    (None, _) => {}
                    (Some(_), None) => unusable.push(staging),
                    (Some(expiry), Some(last)) => {
                        let (last, expires_ms) = (Some(Box::new(last)), until(expiry));
                        of_key.push(Content {
                            database,
                            form: Form::Staged,
                            payload: Payload::default(),
                            last,
                            expires_ms,
                            usage: None,
                        });
                    }
                }
                continue;
            }
            let used = usage.and_then(|_| reply::integer(&next()));
            let expiry = expiry.then(&mut next);
            let value = next();
            if form == Form::Plain && value.starts_with(b"-WRONGTYPE") {
                others.push(place);
                continue;
            }
            if let Some(error) =
                [Some(&value), expiry.as_ref()].into_iter().flatten().find(|answer| reply::is_error(answer))
            {
                refused[place] = Some(error_text(error));
                continue;
            }
            let expiry = expiry.map_or(Some(-1), |answer| reply::integer(&answer));
            let value = Arc::new(value);
            let text = reply::text(&value).filter(|_| !reply::is_null(&value));
            // Deleted between the two replies, or expired.
            let (Some(expiry), Some(text)) = (expiry.filter(|expiry| *expiry != -2), text) else { continue };
            let payload = Payload::within(&value, text);
            of_key.push(Content { database, form, payload, last: None, expires_ms: until(expiry), usage: used });
        }
    }
    let outcome = |(of_key, refused): (&Vec<Content>, Option<String>)| match refused {
        Some(why) => Copied::Refused(why),
        None if of_key.is_empty() => Copied::Absent,
        None => Copied::Taken {
            bytes: of_key.iter().map(|c| c.last.as_ref().map_or(c.payload.len() as u64, |last| last.bytes)).sum(),
        },
    };
    let outcomes = contents.iter().zip(refused).map(outcome).collect();
    others.sort_unstable();
    others.dedup();
    let read = Read { keys, outcomes, contents, not_strings: others, unusable, only_one_by_one };
    Ok(match first {
        Some(first) => together(*first, read),
        None => read,
    })
}

/// Merges the second read of the keys that are not strings into the first read. Both cover all databases, in the same
/// order.
fn together(mut first: Read, then: Read) -> Read {
    let mut at = 0;
    first.unusable.extend(then.unusable);
    for ((key, outcome), content) in then.keys.into_iter().zip(then.outcomes).zip(then.contents) {
        let Some(place) = first.keys[at..].iter().position(|k| Arc::ptr_eq(k, &key)).map(|found| at + found) else {
            break;
        };
        first.outcomes[place] = outcome;
        first.contents[place] = content;
        at = place + 1;
    }
    first
}

/// A key to store with its own command: place in the batch, and database.
pub(in crate::mover) type OneByOne = (usize, u32);

/// Returns the result of a [`super::Ask::Store`]: an outcome per key, and the keys to store one by one.
pub(in crate::mover) fn stored(
    places: Vec<Placed>,
    mut outcomes: Vec<Stored>,
    answers: &[Vec<u8>],
) -> Result<(Vec<Stored>, Vec<OneByOne>), String> {
    let mut again = Vec::new();
    for (placed, answer) in places.into_iter().zip(answers) {
        let is_error = reply::is_error(answer);
        match placed {
            Placed::Selected if is_error => return Err(format!("it refuses a database: {}", error_text(answer))),
            Placed::Cleared if is_error => return Err(format!("it refuses to remove keys: {}", error_text(answer))),
            Placed::Over(places) if is_error => {
                places.into_iter().for_each(|place| outcomes[place] = Stored::Refused(error_text(answer)));
            }
            // RESTORE replies BUSYKEY, SET NX replies null.
            Placed::One(place) if answer.starts_with(b"-BUSYKEY") || reply::is_null(answer) => {
                let so_far = std::mem::replace(&mut outcomes[place], Stored::Exists);
                if matches!(so_far, Stored::Refused(_)) {
                    outcomes[place] = so_far;
                }
            }
            Placed::One(place) if is_error => outcomes[place] = Stored::Refused(error_text(answer)),
            // A key exists, or the command was refused. Single stores will show which key, and why.
            Placed::Together(database, places) if reply::integer(answer) != Some(1) => {
                again.extend(places.into_iter().map(|place| (place, database)));
            }
            _ => {}
        }
    }
    Ok((outcomes, again))
}

/// Result of a [`super::Ask::Secure`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::mover) enum DurabilityResult {
    /// Durable, or the reason why not.
    Is(Result<(), String>),
    /// Not all connected replicas have acknowledged, or not all were waited for.
    Fewer { acknowledged: u32, replicas: u32 },
}

/// Returns the result of a [`super::Ask::Secure`].
pub(in crate::mover) fn secured(durability: Durability, answers: &[Vec<u8>]) -> DurabilityResult {
    let answer = answers.last().map(Vec::as_slice).unwrap_or_default();
    if reply::is_error(answer) {
        return DurabilityResult::Is(Err(error_text(answer)));
    }
    let count = reply::integer(answer).or_else(|| reply::elements(answer).next().and_then(reply::integer)).unwrap_or(0);
    if durability != Durability::Replica {
        return DurabilityResult::Is(if count < 1 {
            Err("its append-only file was not synced within 2 s".to_owned())
        } else {
            Ok(())
        });
    }
    let acknowledged = u32::try_from(count).unwrap_or(0);
    let info = answers.first().and_then(|info| reply::text(info)).map(String::from_utf8_lossy).unwrap_or_default();
    // A replica in its first synchronization has no data yet, and cannot be promoted.
    let replicas =
        info.lines().filter(|line| line.starts_with("slave") && line.contains("state=online")).count() as u32;
    if acknowledged >= replicas.max(1) {
        DurabilityResult::Is(Ok(()))
    } else {
        DurabilityResult::Fewer { acknowledged, replicas }
    }
}

/// Returns the next cursor and the keys of a SCAN reply.
pub(in crate::mover) fn scanned(answer: &[u8]) -> Option<(Vec<u8>, Vec<&[u8]>)> {
    let mut pair = reply::elements(answer);
    let cursor = pair.next().and_then(reply::text)?.to_vec();
    Some((cursor, reply::elements(pair.next()?).filter_map(reply::text).collect()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use switchyard_policy::migration::Key;

    use super::*;

    #[test]
    fn all_connected_replicas_must_acknowledge() {
        let info = |lines: &str| format!("${}\r\n{lines}\r\n", lines.len());
        let two = info(
            "role:master\r\nslave0:ip=a,port=1,state=online\r\nslave1:ip=b,port=1,state=online\r\nslave2:ip=c,port=1,state=wait_bgsave",
        );
        let asked = |info: &str, count: u32| secured(Durability::Replica, &answers(&[info, &format!(":{count}\r\n")]));
        assert_eq!(asked(&two, 2), DurabilityResult::Is(Ok(())));
        assert_eq!(asked(&two, 1), DurabilityResult::Fewer { acknowledged: 1, replicas: 2 });
        assert_eq!(asked(&info("role:master"), 0), DurabilityResult::Fewer { acknowledged: 0, replicas: 0 });
        assert_eq!(asked(&info("role:master"), 1), DurabilityResult::Is(Ok(())), "one connected in the meantime");
        assert_eq!(secured(Durability::Aof, &answers(&["*2\r\n:1\r\n:0\r\n"])), DurabilityResult::Is(Ok(())));
        assert!(matches!(secured(Durability::Aof, &answers(&["*2\r\n:0\r\n:0\r\n"])), DurabilityResult::Is(Err(_))));
    }

    fn answers(texts: &[&str]) -> Vec<Vec<u8>> {
        texts.iter().map(|t| t.as_bytes().to_vec()).collect()
    }

    fn reading(keys: &[&str], databases: &[(u32, bool)], absolute: bool, form: Form) -> Reading {
        let databases = databases.iter().map(|(database, selected)| DatabaseCommands {
            database: *database,
            selected: *selected,
            expiry: true,
            together: 1,
        });
        let keys = keys.iter().map(|key| Key::from(key.as_bytes())).collect();
        Reading {
            keys,
            databases: databases.collect(),
            usage: None,
            absolute,
            form,
            again: None,
            staged: BTreeMap::new(),
            first: None,
        }
    }

    #[test]
    fn a_read_covers_all_databases_of_a_key() {
        let replies = answers(&[
            ":-1\r\n",
            "$2\r\nxx\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":5000\r\n",
            "-OOM no\r\n",
            "+OK\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":7\r\n",
            "$1\r\ny\r\n",
        ]);
        let of = reading(&["a", "b", "c"], &[(0, false), (3, true)], true, Form::Serialised);
        let Read { outcomes, contents, .. } = copied(of, replies).expect("understood");
        assert_eq!(outcomes, [Copied::Taken { bytes: 2 }, Copied::Absent, Copied::Refused("OOM no".into())]);
        assert_eq!((contents[0].len(), contents[2][0].database, contents[2][0].expires_ms), (1, 3, 7));
        assert_eq!((&contents[0][0].payload[..], &contents[2][0].payload[..]), (&b"xx"[..], &b"y"[..]));
    }

    #[test]
    fn keys_of_other_types_are_read_again() {
        let replies = answers(&[
            ":-1\r\n",
            "$2\r\nxx\r\n",
            ":90\r\n",
            "-WRONGTYPE Operation against a key holding the wrong kind of value\r\n",
            ":-2\r\n",
            "$-1\r\n",
            ":-1\r\n",
            "$0\r\n\r\n",
        ]);
        let of = reading(&["a", "b", "c", "d"], &[(0, false)], true, Form::Plain);
        let first = copied(of, replies).expect("understood");
        assert_eq!(first.not_strings, [1]);
        let then = Reading { first: Some(Box::new(first)), ..reading(&[], &[(0, false)], true, Form::Serialised) };
        let b = then.first.as_ref().map(|first| first.keys[1].clone()).expect("it is there");
        let read =
            copied(Reading { keys: vec![b], ..then }, answers(&[":90\r\n", "$3\r\n\u{4}zz\r\n"])).expect("understood");
        let taken = |bytes| Copied::Taken { bytes };
        assert_eq!(read.outcomes, [taken(2), taken(3), Copied::Absent, taken(0)]);
        assert_eq!((read.contents[1][0].form, read.contents[1][0].expires_ms), (Form::Serialised, 90));
        assert!(!read.are_strings(), "one of three is none");
    }

    #[test]
    fn older_nodes_reply_remaining_time_and_current_time() {
        let replies = answers(&["*2\r\n$2\r\n10\r\n$6\r\n500000\r\n", ":250\r\n", "$1\r\ny\r\n"]);
        let read = copied(reading(&["a"], &[(0, false)], false, Form::Serialised), replies).expect("understood");
        assert_eq!(read.contents[0][0].expires_ms, 10_750);
    }

    #[test]
    fn a_refused_store_outranks_an_existing_key() {
        let replies = answers(&["+OK\r\n", "-BUSYKEY Target key name already exists.\r\n", "+OK\r\n", "-OOM no\r\n"]);
        let fresh = |count| vec![Stored::Stored; count];
        let places = vec![Placed::One(0), Placed::One(1), Placed::Selected, Placed::One(1)];
        let (outcomes, again) = stored(places, fresh(2), &replies).expect("understood");
        assert_eq!((outcomes, again.is_empty()), (vec![Stored::Stored, Stored::Refused("OOM no".into())], true));
        assert_eq!(
            stored(vec![Placed::One(0)], fresh(1), &answers(&["$-1\r\n"])),
            Ok((vec![Stored::Exists], Vec::new()))
        );
        assert!(stored(vec![Placed::Selected], fresh(1), &answers(&["-ERR DB index is out of range\r\n"])).is_err());
    }

    #[test]
    fn failed_multi_stores_are_repeated_one_by_one() {
        for answer in [":0\r\n", "-OOM no\r\n", "-NOPERM no\r\n"] {
            let places = vec![Placed::Together(0, vec![0, 2]), Placed::One(1), Placed::Together(3, vec![1, 2])];
            let (outcomes, again) =
                stored(places, vec![Stored::Stored; 3], &answers(&[":1\r\n", "$-1\r\n", answer])).expect("understood");
            assert_eq!(outcomes, [Stored::Stored, Stored::Exists, Stored::Stored]);
            assert_eq!(again, [(1, 3), (2, 3)], "after {answer}");
        }
    }

    #[test]
    fn keys_without_a_string_in_a_multi_read_are_read_again() {
        let read = |expiry: bool, texts: &[&str]| {
            let mut of = reading(&["a", "b", "c"], &[(0, false)], true, Form::Plain);
            of.databases[0] = DatabaseCommands { together: 2, expiry, ..of.databases[0] };
            copied(of, answers(texts)).expect("understood")
        };
        let lasting = read(false, &["*2\r\n$2\r\nxx\r\n$-1\r\n", "*1\r\n$0\r\n\r\n"]);
        assert_eq!((&lasting.not_strings[..], lasting.only_one_by_one), (&[1][..], false));
        assert_eq!(lasting.outcomes, [Copied::Taken { bytes: 2 }, Copied::Absent, Copied::Taken { bytes: 0 }]);
        assert_eq!((&lasting.contents[0][0].payload[..], lasting.contents[0][0].expires_ms), (&b"xx"[..], 0));
        let mortal = read(true, &[":5\r\n", ":-2\r\n", "*2\r\n$2\r\nxx\r\n$-1\r\n", ":-1\r\n", "*1\r\n$-1\r\n"]);
        assert_eq!(
            (&mortal.not_strings[..], mortal.contents[0][0].expires_ms),
            (&[2][..], 5),
            "b is known not to be there"
        );
        let refused = read(false, &["-NOPERM no\r\n", "*1\r\n$1\r\ny\r\n"]);
        assert_eq!((&refused.not_strings[..], refused.only_one_by_one), (&[0, 1][..], true));
    }
}
