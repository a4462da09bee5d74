//! HTTPS: the handshake, and certificates that can be renewed while serving.
//!
//! The first read or write drives the handshake, not the accept loop: a peer that never finishes it delays no other
//! connection, and the idle bound closes it.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::server::TlsStream;
use tokio_rustls::{Accept, TlsAcceptor};

/// Current certificates. Clones share them.
#[derive(Clone)]
pub struct AdminTls(Arc<RwLock<Arc<ServerConfig>>>);

impl AdminTls {
    /// Uses this configuration.
    #[must_use]
    pub fn new(config: Arc<ServerConfig>) -> Self {
        Self(Arc::new(RwLock::new(config)))
    }

    /// Uses this configuration for new connections.
    pub fn renew(&self, config: Arc<ServerConfig>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
    }

    fn current(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for AdminTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AdminTls")
    }
}

/// A connection, encrypted or not.
pub(super) enum Stream {
    Plain(TcpStream),
    Handshake(Box<Accept<TcpStream>>),
    Secure(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub(super) fn new(stream: TcpStream, tls: Option<&AdminTls>) -> Self {
        match tls {
            None => Self::Plain(stream),
            Some(tls) => Self::Handshake(Box::new(TlsAcceptor::from(tls.current()).accept(stream))),
        }
    }

    fn poll_handshake(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Self::Handshake(accept) = self {
            let stream = ready!(Pin::new(&mut **accept).poll(context))?;
            *self = Self::Secure(Box::new(stream));
        }
        Poll::Ready(Ok(()))
    }
}

/// Calls a method of the inner stream, after the handshake.
macro_rules! inside {
    ($stream:expr, $context:ident, $method:ident $(, $argument:expr)*) => {{
        let stream = $stream.get_mut();
        ready!(stream.poll_handshake($context))?;
        match stream {
            Stream::Plain(stream) => Pin::new(stream).$method($context $(, $argument)*),
            Stream::Secure(stream) => Pin::new(&mut **stream).$method($context $(, $argument)*),
            Stream::Handshake(_) => Poll::Pending,
        }
    }};
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        inside!(self, context, poll_read, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        inside!(self, context, poll_write, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        inside!(self, context, poll_write_vectored, parts)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, context, poll_flush)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        inside!(self, context, poll_shutdown)
    }
}
