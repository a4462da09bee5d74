//! Async queries to a server: connect, authenticate, send a command, read a reply. Each step has a timeout.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use switchyard_resp::encode;
use switchyard_resp::reply::{ReplyScan, ReplyScanner, is_error, redacted_error};
use switchyard_router::NodeAccess;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::connection::tls_failure;

/// Default timeout per step. A slower server counts as silent.
const TIMEOUT: Duration = Duration::from_millis(500);

/// Maximum size of a reply, in bytes. No query has a larger one.
const REPLY_MAX: usize = 1 << 20;

trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// A connection with one query at a time.
pub(crate) struct Connection {
    stream: Box<dyn Duplex>,
    input: Vec<u8>,
    timeout: Duration,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr, access: &NodeAccess) -> io::Result<Self> {
        Self::open_within(TIMEOUT, address, access).await
    }

    /// Connects with this timeout per step.
    pub(crate) async fn open_within(timeout: Duration, address: SocketAddr, access: &NodeAccess) -> io::Result<Self> {
        let connect = async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let stream: Box<dyn Duplex> = match &access.tls {
                None => Box::new(stream),
                Some(tls) => {
                    let secured = TlsConnector::from(tls.config.clone()).connect(tls.name_at(address), stream).await;
                    Box::new(secured.map_err(|error| match tls_failure(&error) {
                        Some(why) => io::Error::new(error.kind(), format!("TLS: {why}")),
                        None => error,
                    })?)
                }
            };
            Ok(Self { stream, input: Vec::new(), timeout })
        };
        let mut connection = within(timeout, connect).await?;
        if let Some(password) = &access.password {
            let user = access.username.as_deref();
            let args: Vec<&str> = ["AUTH"].into_iter().chain(user).chain([password.0.as_str()]).collect();
            let answer = connection.call(&args).await?;
            refuse_error(&answer)?;
        }
        Ok(connection)
    }

    /// Sets the timeout of replies.
    pub(crate) fn with_timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Sends a command and reads its reply.
    pub(crate) async fn call(&mut self, args: &[&str]) -> io::Result<Vec<u8>> {
        let mut answers = self.call_batch(&[args]).await?;
        answers.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Sends commands in a single write and reads their replies.
    pub(crate) async fn call_batch(&mut self, commands: &[&[&str]]) -> io::Result<Vec<Vec<u8>>> {
        let mut request = Vec::new();
        for args in commands {
            encode::command(&mut request, args.iter().map(|arg| arg.as_bytes()));
        }
        within(self.timeout, async {
            self.stream.write_all(&request).await?;
            let mut answers = Vec::with_capacity(commands.len());
            for _ in commands {
                answers.push(self.next().await?);
            }
            Ok(answers)
        })
        .await
    }

    /// Reads a reply, without a timeout.
    pub(crate) async fn next(&mut self) -> io::Result<Vec<u8>> {
        loop {
            // Rescans from the start, because these replies almost always arrive in one read.
            match ReplyScanner::default().scan(&self.input) {
                Ok(ReplyScan::Complete(len)) => return Ok(self.input.drain(..len).collect()),
                Ok(ReplyScan::Incomplete(_)) if self.input.len() <= REPLY_MAX => {}
                _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "its reply is not one of Redis")),
            }
            if self.stream.read_buf(&mut self.input).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }
}

async fn within<T>(timeout: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(timeout, work).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Converts an error reply to an error.
pub(crate) fn refuse_error(answer: &[u8]) -> io::Result<()> {
    if is_error(answer) { Err(io::Error::other(redacted_error(answer))) } else { Ok(()) }
}
