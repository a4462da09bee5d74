//! Accepts admin connections: not too many, and none for ever.
//!
//! The admin port shares file descriptors with the data plane, so whoever opens connections here without end would shut clients out
//! there. And the HTTP layer has no timer for a client that never finishes its request or never reads its answer.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use super::tls::{AdminTls, Stream};

/// Connections at once; more wait in the backlog. A scraper or two, a dashboard in some browsers (six connections each), scripts.
const CONNECTIONS_MAX: usize = 64;

/// A connection is closed when it got no byte of an answer for this long: Prometheus scrapes once a minute at the slowest usual
/// setting, and keeps its connection.
const IDLE_MAX: Duration = Duration::from_secs(90);

/// Who sent a request, for the audit log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) SocketAddr);

impl Connected<IncomingStream<'_, BoundedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, BoundedListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

/// A listener that holds at most [`CONNECTIONS_MAX`] connections open.
pub(super) struct BoundedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    idle_max: Duration,
    tls: Option<AdminTls>,
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener, tls: Option<AdminTls>) -> Self {
        Self { tls, ..Self::with_bounds(listener, CONNECTIONS_MAX, IDLE_MAX) }
    }

    fn with_bounds(listener: TcpListener, connections_max: usize, idle_max: Duration) -> Self {
        Self { listener, permits: Arc::new(Semaphore::new(connections_max)), idle_max, tls: None }
    }
}

impl Listener for BoundedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.expect("this semaphore is never closed");
        // axum's own accept, which waits out errors such as a lack of file descriptors.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let idle_max = self.idle_max;
        let deadline = Box::pin(sleep(idle_max));
        let stream = Stream::new(stream, self.tls.as_ref());
        (Connection { stream, deadline, idle_max, _permit: permit }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails when nothing could be written to it for too long. Reading does not count: who sends a byte now and then
/// and never a whole request is the very case.
pub(super) struct Connection {
    stream: Stream,
    deadline: Pin<Box<Sleep>>,
    idle_max: Duration,
    _permit: OwnedSemaphorePermit,
}

impl Connection {
    /// What to return when the socket is not ready: still pending, or too late.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        ready!(self.deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn wrote(&mut self, result: io::Result<usize>) -> Poll<io::Result<usize>> {
        self.deadline.as_mut().reset(Instant::now() + self.idle_max);
        Poll::Ready(result)
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => self.wait(context),
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(context, bytes) {
            Poll::Ready(result) => self.wrote(result),
            Poll::Pending => self.wait(context),
        }
    }

    fn poll_write_vectored(mut self: Pin<&mut Self>, context: &mut Context<'_>, parts: &[io::IoSlice<'_>]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write_vectored(context, parts) {
            Poll::Ready(result) => self.wrote(result),
            Poll::Pending => self.wait(context),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    async fn bounded(connections_max: usize, idle_max: Duration) -> (BoundedListener, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        (BoundedListener::with_bounds(listener, connections_max, idle_max), address)
    }

    #[tokio::test]
    async fn no_more_connections_than_allowed() {
        let (mut listener, address) = bounded(2, Duration::from_secs(3600)).await;
        let clients = [(); 3].map(|()| TcpStream::connect(address));
        for client in clients {
            std::mem::forget(client.await.expect("connected"));
        }
        let first = listener.accept().await;
        let _second = listener.accept().await;
        {
            let mut third = std::pin::pin!(listener.accept());
            let pending = std::future::poll_fn(|context| Poll::Ready(third.as_mut().poll(context)));
            assert!(pending.await.is_pending());
            drop(first);
            third.await;
        }
    }

    #[tokio::test]
    async fn a_request_that_never_ends_does() {
        let (mut listener, address) = bounded(1, Duration::from_millis(50)).await;
        let mut client = TcpStream::connect(address).await.expect("connected");
        let (mut connection, _) = listener.accept().await;
        let trickle = async {
            loop {
                if client.write_all(b"x").await.is_err() {
                    std::future::pending::<()>().await;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let reading = async {
            let mut byte = [0];
            loop {
                if let Err(error) = connection.read_exact(&mut byte).await {
                    return error;
                }
            }
        };
        let error = tokio::select! {
            error = reading => error,
            () = trickle => unreachable!("it never ends"),
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn an_answer_that_nobody_reads_ends() {
        let (mut listener, address) = bounded(1, Duration::from_millis(50)).await;
        let _client = TcpStream::connect(address).await.expect("connected");
        let (mut connection, _) = listener.accept().await;
        let chunk = vec![0; 1 << 20];
        let error = loop {
            if let Err(error) = connection.write_all(&chunk).await {
                break error;
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
