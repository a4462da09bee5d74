//! Keys that no client changes: after all moves each must exist with its type, content and time to live.

use std::{collections::BTreeMap, net::SocketAddr};

use anyhow::{Result, ensure};
use switchyard_bench::client::Client;
use switchyard_bench::random::mix;
use switchyard_bench::wire::{self, Reply};

/// Pipelined requests.
const BATCH: u64 = 64;
/// Time to live of the keys that have one: longer than any cycle.
const HOUR_MS: i64 = 3_600_000;

/// Type of a key. One in six keys has each type.
#[derive(Clone, Copy)]
enum KeyPattern {
    String,
    Large,
    Expiring,
    List,
    Hash,
    Sorted,
}

fn sort(n: u64) -> KeyPattern {
    [
        KeyPattern::String,
        KeyPattern::Large,
        KeyPattern::Expiring,
        KeyPattern::List,
        KeyPattern::Hash,
        KeyPattern::Sorted,
    ][(n % 6) as usize]
}

fn key(n: u64) -> String {
    format!("fixed:{n}")
}

/// Returns text that depends only on the number.
fn content(n: u64, length: usize) -> String {
    format!("{:016x}", mix(n)).repeat(length.div_ceil(16))
}

fn items(n: u64) -> Vec<String> {
    (0..3 + n % 20).map(|i| format!("{i}-{:x}", mix(n ^ i << 32))).collect()
}

fn write(n: u64) -> Vec<String> {
    let key = key(n);
    let head = |command: &str| vec![command.to_owned(), key.clone()];
    let with = |command: &str, rest: Vec<String>| head(command).into_iter().chain(rest).collect();
    match sort(n) {
        KeyPattern::String => with("SET", vec![content(n, 16)]),
        KeyPattern::Large => with("SET", vec![content(n, 3000)]),
        KeyPattern::Expiring => with("SET", vec![content(n, 16), "PX".to_owned(), HOUR_MS.to_string()]),
        KeyPattern::List => with("RPUSH", items(n)),
        KeyPattern::Hash => with("HSET", items(n).into_iter().flat_map(|item| [item.clone(), item]).collect()),
        KeyPattern::Sorted => {
            with("ZADD", items(n).into_iter().enumerate().flat_map(|(i, item)| [i.to_string(), item]).collect())
        }
    }
}

fn read(n: u64) -> Vec<String> {
    let words = |words: &[&str]| words.iter().map(|w| (*w).to_owned()).collect();
    let key = key(n);
    match sort(n) {
        KeyPattern::String | KeyPattern::Large | KeyPattern::Expiring => words(&["GET", &key]),
        KeyPattern::List => words(&["LRANGE", &key, "0", "-1"]),
        KeyPattern::Hash => words(&["HGETALL", &key]),
        KeyPattern::Sorted => words(&["ZRANGE", &key, "0", "-1"]),
    }
}

fn is_right(n: u64, reply: &Reply<'_>) -> bool {
    let texts = |reply: &Reply<'_>| match reply {
        Reply::Array(items) => items
            .iter()
            .map(|i| if let Reply::Bulk(b) = i { String::from_utf8_lossy(b).into_owned() } else { String::new() })
            .collect(),
        _ => Vec::new(),
    };
    match (sort(n), reply) {
        (KeyPattern::String | KeyPattern::Expiring, Reply::Bulk(b)) => *b == content(n, 16).as_bytes(),
        (KeyPattern::Large, Reply::Bulk(b)) => *b == content(n, 3000).as_bytes(),
        (KeyPattern::List | KeyPattern::Sorted, Reply::Array(_)) => texts(reply) == items(n),
        (KeyPattern::Hash, Reply::Array(_)) => {
            let got: Vec<String> = texts(reply);
            let pairs: BTreeMap<_, _> = got.chunks_exact(2).map(|p| (p[0].clone(), p[1].clone())).collect();
            got.len() == 2 * items(n).len() && pairs == items(n).into_iter().map(|i| (i.clone(), i)).collect()
        }
        _ => false,
    }
}

fn pipelined(
    entry: SocketAddr,
    keys: u64,
    request: impl Fn(u64) -> Vec<String>,
    mut judge: impl FnMut(u64, &Reply<'_>),
) -> Result<()> {
    let mut client = Client::connect(entry)?;
    let mut next = 0;
    while next < keys {
        let end = (next + BATCH).min(keys);
        let mut out = Vec::new();
        for n in next..end {
            let words = request(n);
            wire::encode(&mut out, &words.iter().map(String::as_bytes).collect::<Vec<_>>());
        }
        client.send(&out)?;
        for n in next..end {
            client.reply(|reply| judge(n, &reply))?;
        }
        next = end;
    }
    Ok(())
}

/// Writes all keys.
pub(super) fn fill(entry: SocketAddr, keys: u64) -> Result<()> {
    let mut failed = None;
    pipelined(entry, keys, write, |n, reply| {
        if let Reply::Error(text) = reply {
            failed.get_or_insert_with(|| format!("{}: {}", key(n), String::from_utf8_lossy(text)));
        }
    })?;
    ensure!(failed.is_none(), "cannot fill: {}", failed.unwrap_or_default());
    Ok(())
}

/// Checks the content of all keys, and their times to live.
pub(super) fn check(entry: SocketAddr, keys: u64) -> Result<()> {
    let mut wrong = Vec::new();
    pipelined(entry, keys, read, |n, reply| {
        if !is_right(n, reply) {
            wrong.push(format!("{}: {reply}", key(n)));
        }
    })?;
    pipelined(
        entry,
        keys,
        |n| vec!["PTTL".to_owned(), key(n)],
        |n, reply| {
            let right = match (sort(n), reply) {
                (KeyPattern::Expiring, Reply::Integer(left)) => (HOUR_MS - 1_200_000..=HOUR_MS).contains(left),
                (_, Reply::Integer(left)) => *left == -1,
                _ => false,
            };
            if !right {
                wrong.push(format!("time to live of {}: {reply}", key(n)));
            }
        },
    )?;
    ensure!(
        wrong.is_empty(),
        "{} fixed keys are missing or changed: {}",
        wrong.len(),
        wrong[..wrong.len().min(5)].join("; ")
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_changed_keys_are_detected() {
        for n in 0..12 {
            assert!(
                !is_right(n, &Reply::Nil)
                    && !is_right(n, &Reply::Array(Vec::new()))
                    && !is_right(n, &Reply::Bulk(b"other")),
                "{n}"
            );
        }
        assert!(is_right(0, &Reply::Bulk(content(0, 16).as_bytes())));
        assert!(!is_right(6, &Reply::Bulk(content(0, 16).as_bytes())));
    }
}
