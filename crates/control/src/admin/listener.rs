//! Accepts admin connections, with a bound on their number and on their idle time.
//!
//! The admin port shares file descriptors with the data plane, so unbounded connections here would exclude clients
//! there. The HTTP layer has no timeout for a client that never finishes its request or never reads its response.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, Sleep, sleep, timeout_at};

use super::tls::{AdminTls, Stream};

/// Maximum number of connections; more wait in the backlog. Enough for a scraper or two, scripts, and a dashboard in
/// some browsers (six connections each).
const CONNECTIONS_MAX: usize = 64;

/// Time without a written byte after which a connection is closed. Prometheus keeps its connection, and at the slowest
/// usual setting it scrapes once a minute.
const IDLE_MAX: Duration = Duration::from_secs(90);

/// Bound on idle time while all connections are in use: any client can take all of them, and an operator must still get
/// in. The connection that has been idle longest is closed first.
const BUSY_IDLE_MAX: Duration = Duration::from_secs(5);

/// Address of the client, for the audit log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer(pub(super) SocketAddr);

impl Connected<IncomingStream<'_, BoundedListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, BoundedListener>) -> Self {
        Self(*stream.remote_addr())
    }
}

#[derive(Default)]
struct OpenConnections {
    last: u64,
    by_number: HashMap<u64, OpenConnection>,
}

/// An open connection: the time of its last write (or accept), and the channel that closes it.
struct OpenConnection {
    last_write: Instant,
    close: oneshot::Sender<()>,
}

impl OpenConnections {
    fn oldest(&self) -> Option<(u64, Instant)> {
        self.by_number.iter().map(|(number, place)| (*number, place.last_write)).min_by_key(|(_, used)| *used)
    }
}

fn lock(open: &Mutex<OpenConnections>) -> MutexGuard<'_, OpenConnections> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A listener that holds at most [`CONNECTIONS_MAX`] connections open.
pub(super) struct BoundedListener {
    listener: TcpListener,
    permits: Arc<Semaphore>,
    open: Arc<Mutex<OpenConnections>>,
    idle_max: Duration,
    busy_idle_max: Duration,
    tls: Option<AdminTls>,
}

impl BoundedListener {
    pub(super) fn new(listener: TcpListener, tls: Option<AdminTls>) -> Self {
        Self { tls, ..Self::with_bounds(listener, CONNECTIONS_MAX, IDLE_MAX, BUSY_IDLE_MAX) }
    }

    fn with_bounds(listener: TcpListener, connections_max: usize, idle_max: Duration, busy_idle_max: Duration) -> Self {
        let permits = Arc::new(Semaphore::new(connections_max));
        Self { listener, permits, open: Arc::default(), idle_max, busy_idle_max, tls: None }
    }

    /// Reserves a connection. If all are in use, closes the longest idle one as soon as its idle time permits.
    async fn acquire_permit(&self) -> OwnedSemaphorePermit {
        let mut not_before = Instant::now();
        loop {
            let free = Arc::clone(&self.permits).acquire_owned();
            let due = lock(&self.open).oldest().map_or_else(Instant::now, |(_, used)| used) + self.busy_idle_max;
            if let Ok(permit) = timeout_at(due.max(not_before), free).await {
                return permit.expect("this semaphore is never closed");
            }
            let mut open = lock(&self.open);
            // The connection may have been used in the meantime.
            if let Some((number, _)) = open.oldest().filter(|(_, used)| used.elapsed() >= self.busy_idle_max)
                && let Some(place) = open.by_number.remove(&number)
            {
                // The send fails if the connection has just ended. Close one at a time: its permit is free in a moment.
                let _ = place.close.send(());
                not_before = Instant::now() + Duration::from_millis(100);
            }
        }
    }
}

impl Listener for BoundedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        let permit = self.acquire_permit().await;
        // axum's own accept retries after errors such as exhausted file descriptors.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let idle_max = self.idle_max;
        let deadline = Box::pin(sleep(idle_max));
        let stream = Stream::new(stream, self.tls.as_ref());
        let (end, ended) = oneshot::channel();
        let mut open = lock(&self.open);
        open.last += 1;
        let number = open.last;
        open.by_number.insert(number, OpenConnection { last_write: Instant::now(), close: end });
        drop(open);
        (
            Connection {
                stream,
                deadline,
                idle_max,
                number,
                evicted: ended,
                open: Arc::clone(&self.open),
                _permit: permit,
            },
            address,
        )
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails if nothing could be written to it for too long. Reads do not reset the timer: a client that
/// sends a byte now and then may never complete its request.
pub(super) struct Connection {
    stream: Stream,
    deadline: Pin<Box<Sleep>>,
    idle_max: Duration,
    number: u64,
    /// Fires when the connection must make room for another.
    evicted: oneshot::Receiver<()>,
    open: Arc<Mutex<OpenConnections>>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.open).by_number.remove(&self.number);
    }
}

impl Connection {
    /// Result for a socket that is not ready: pending, or timed out if idle for too long or evicted.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if !self.evicted.is_terminated() && Pin::new(&mut self.evicted).poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        ready!(self.deadline.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    fn wrote(&mut self, result: io::Result<usize>) -> Poll<io::Result<usize>> {
        let now = Instant::now();
        self.deadline.as_mut().reset(now + self.idle_max);
        if let Some(place) = lock(&self.open).by_number.get_mut(&self.number) {
            place.last_write = now;
        }
        Poll::Ready(result)
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
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

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
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
        (BoundedListener::with_bounds(listener, connections_max, idle_max, idle_max), address)
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
    async fn longest_idle_connections_close_when_all_are_in_use() {
        let (mut listener, address) = bounded(2, Duration::from_secs(3600)).await;
        listener.busy_idle_max = Duration::from_millis(50);
        let clients = [(); 3].map(|()| TcpStream::connect(address));
        for client in clients {
            std::mem::forget(client.await.expect("connected"));
        }
        let (mut held, _) = listener.accept().await;
        let (mut used, _) = listener.accept().await;
        // Stands for the server task.
        let held = tokio::spawn(async move { held.read_u8().await.expect_err("no byte arrives").kind() });
        let (third, _) = tokio::select! {
            third = listener.accept() => third,
            () = async { loop { used.write_all(b"x").await.expect("written"); tokio::time::sleep(Duration::from_millis(5)).await; } } => unreachable!(),
        };
        assert_eq!(held.await.expect("ended"), io::ErrorKind::TimedOut);
        drop(third);
        used.write_all(b"x").await.expect("the active connection stays open");
    }

    #[tokio::test]
    async fn unfinished_requests_time_out() {
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
    async fn unread_responses_time_out() {
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
