//! Cost of DUMP, RESTORE and UNLINK alone: a lower bound for every move between unmodified servers.
//!
//! Each command is run and timed separately over all keys, pipelined. The source executes DUMP and UNLINK, the target
//! RESTORE. If each has its own processor they can work in parallel, and the limit is the slower one.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use switchyard_bench::client::Client;
use switchyard_bench::wire::{self, Reply};

/// Maximum bytes of requests or replies in flight: below the socket buffers, otherwise both sides wait for the other to
/// read.
const IN_FLIGHT: usize = 128 * 1024;

/// Time of each command for all keys.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    /// Number of keys.
    pub(super) keys: u64,
    /// DUMP at the source.
    pub(super) dump: Duration,
    /// RESTORE at the target.
    pub(super) restore: Duration,
    /// UNLINK at the source.
    pub(super) unlink: Duration,
}

impl Limit {
    /// Keys per second if source and target work in parallel.
    pub(super) fn keys_per_second(&self) -> f64 {
        self.keys as f64 / (self.dump + self.unlink).max(self.restore).as_secs_f64()
    }

    /// Keys per second if they take turns.
    pub(super) fn keys_per_second_in_turn(&self) -> f64 {
        self.keys as f64 / (self.dump + self.unlink + self.restore).as_secs_f64()
    }
}

/// Moves `keys` from `source` to `target`, one command at a time, and times each. Holds only a part of the contents in
/// memory.
pub(super) fn measure(
    source: SocketAddr,
    target: SocketAddr,
    keys: &[String],
    size: usize,
    tick: &dyn Fn(u64),
) -> Result<Limit> {
    let (mut source, mut target) = (Client::connect(source)?, Client::connect(target)?);
    let mut limit =
        Limit { keys: keys.len() as u64, dump: Duration::ZERO, restore: Duration::ZERO, unlink: Duration::ZERO };
    let batch = (IN_FLIGHT / (size + 64)).clamp(1, 500);
    for part in keys.chunks(20_000.min((64 << 20) / (size + 64)).max(1)) {
        let mut contents = Vec::with_capacity(part.len());
        let begun = Instant::now();
        for keys in part.chunks(batch) {
            let mut out = Vec::new();
            keys.iter().for_each(|key| wire::encode(&mut out, &[b"DUMP", key.as_bytes()]));
            source.send(&out)?;
            for _ in keys {
                contents.push(source.reply(|reply| match reply {
                    Reply::Bulk(content) => Ok(content.to_vec()),
                    other => bail!("the reply to DUMP was {other}"),
                })??);
            }
        }
        limit.dump += begun.elapsed();
        let begun = Instant::now();
        for (keys, contents) in part.chunks(batch).zip(contents.chunks(batch)) {
            let mut out = Vec::new();
            keys.iter()
                .zip(contents)
                .for_each(|(key, content)| wire::encode(&mut out, &[b"RESTORE", key.as_bytes(), b"0", content]));
            target.send(&out)?;
            for _ in keys {
                target.reply(|reply| match reply {
                    Reply::Status(b"OK") => Ok(()),
                    other => bail!("the reply to RESTORE was {other}"),
                })??;
            }
        }
        limit.restore += begun.elapsed();
        drop(contents);
        let begun = Instant::now();
        for keys in part.chunks(500) {
            let args: Vec<_> = std::iter::once(&b"UNLINK"[..]).chain(keys.iter().map(|k| k.as_bytes())).collect();
            let removed = source.integer(&args)?;
            if removed != keys.len() as i64 {
                bail!("UNLINK of {} keys removed {removed}", keys.len());
            }
        }
        limit.unlink += begun.elapsed();
        tick(part.len() as u64);
    }
    Ok(limit)
}
