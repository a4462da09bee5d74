//! A blocking connection for requests around a measurement: filling nodes, DBSIZE, INFO.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::wire::{self, Reply};

/// Timeout per request. No request here is slow, so a later reply means a hang.
const TIMEOUT: Duration = Duration::from_secs(10);

/// A blocking connection to one server.
#[derive(Debug)]
pub struct Client {
    address: SocketAddr,
    stream: TcpStream,
    buf: Vec<u8>,
    at: usize,
}

impl Client {
    /// Connects to the server.
    pub fn connect(address: SocketAddr) -> Result<Self> {
        let stream =
            TcpStream::connect_timeout(&address, TIMEOUT).with_context(|| format!("cannot connect to {address}"))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        Ok(Self { address, stream, buf: Vec::new(), at: 0 })
    }

    /// Sends one command and passes its reply to `read`.
    pub fn call<T>(&mut self, args: &[&[u8]], read: impl FnOnce(Reply<'_>) -> T) -> Result<T> {
        let mut out = Vec::new();
        wire::encode(&mut out, args);
        self.send(&out)?;
        self.reply(read)
    }

    /// Sends encoded requests.
    pub fn send(&mut self, requests: &[u8]) -> Result<()> {
        self.stream.write_all(requests).with_context(|| format!("cannot write to {}", self.address))
    }

    /// Waits for the next reply and passes it to `read`.
    pub fn reply<T>(&mut self, read: impl FnOnce(Reply<'_>) -> T) -> Result<T> {
        let mut chunk = [0_u8; 16 * 1024];
        loop {
            // Parsed twice if complete: the borrow of the first parse would outlive the read below.
            if let Some((_, taken)) = wire::parse(&self.buf[self.at..])? {
                let start = self.at;
                self.at += taken;
                let (reply, _) = wire::parse(&self.buf[start..])?.context("a reply cannot become incomplete")?;
                let value = read(reply);
                if self.at == self.buf.len() {
                    self.buf.clear();
                    self.at = 0;
                }
                return Ok(value);
            }
            let n = self.stream.read(&mut chunk).with_context(|| format!("no reply from {}", self.address))?;
            if n == 0 {
                bail!("{} closed the connection instead of replying", self.address);
            }
            self.buf.extend_from_slice(&chunk[..n]);
        }
    }

    /// Sends a command whose reply must be an integer.
    pub fn integer(&mut self, args: &[&[u8]]) -> Result<i64> {
        let address = self.address;
        self.call(args, |reply| match reply {
            Reply::Integer(i) => Ok(i),
            other => bail!("{address} replied {other} to {}, instead of an integer", name(args)),
        })?
    }

    /// Sends a command whose reply must be a bulk string with text.
    pub fn text(&mut self, args: &[&[u8]]) -> Result<String> {
        let address = self.address;
        self.call(args, |reply| match reply {
            Reply::Bulk(b) => Ok(String::from_utf8_lossy(b).into_owned()),
            other => bail!("{address} replied {other} to {}, instead of a bulk string", name(args)),
        })?
    }

    /// Sends a command whose reply must be a status such as `+OK`.
    pub fn ok(&mut self, args: &[&[u8]]) -> Result<()> {
        let address = self.address;
        self.call(args, |reply| match reply {
            Reply::Status(_) => Ok(()),
            other => bail!("{address} replied {other} to {}, instead of +OK", name(args)),
        })?
    }
}

fn name(args: &[&[u8]]) -> String {
    args.first().map_or_else(String::new, |a| a.escape_ascii().to_string())
}

/// Sets `count` keys named by `key(i)` to `value`, pipelined, and waits for every `+OK`.
pub fn fill(address: SocketAddr, count: u64, value: &[u8], key: impl Fn(u64) -> String) -> Result<()> {
    let mut client = Client::connect(address)?;
    // A batch fits into the socket buffers; otherwise both sides would block on writing.
    let batch = (64 * 1024 / (value.len() as u64 + 64)).clamp(1, 256);
    let mut out = Vec::new();
    let mut next = 0;
    while next < count {
        let end = (next + batch).min(count);
        out.clear();
        for i in next..end {
            wire::encode(&mut out, &[b"SET", key(i).as_bytes(), value]);
        }
        client.send(&out)?;
        for _ in next..end {
            client.reply(|reply| match reply {
                Reply::Status(b"OK") => Ok(()),
                other => bail!("{address} replied {other} to SET while it was filled"),
            })??;
        }
        next = end;
    }
    Ok(())
}
