//! Thread of the admin port, with its own runtime; and the choice of access rights.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::Context;
use switchyard_router::Secret;
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::{Access, Admin, AdminError, AdminOptions, Source, Token};

/// Threads that answer requests. Scrapes are rare, and more than a few at once are a mistake.
const ANSWERING_THREADS: usize = 4;

/// The running admin port.
pub struct AdminThread {
    /// Bound address.
    pub address: SocketAddr,
    socket: OwnedFd,
    /// Passes the source to the thread, which then answers requests.
    source_sender: Option<oneshot::Sender<Arc<dyn Source>>>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl AdminThread {
    /// Binds the port, so that an occupied port is reported before the router starts. Requests are answered after
    /// [`AdminThread::serve`].
    pub fn bind(address: SocketAddr, options: AdminOptions) -> anyhow::Result<Self> {
        Self::open(async move { Admin::bind(address, options).await })
    }

    /// Like [`AdminThread::bind`], with the listening socket of another process.
    pub fn adopt(socket: OwnedFd, options: AdminOptions) -> anyhow::Result<Self> {
        Self::open(async move { Admin::adopt(socket, options).await })
    }

    fn open(admin: impl Future<Output = Result<Admin, AdminError>> + Send + 'static) -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(ANSWERING_THREADS)
            .thread_name("admin-answer")
            .build()
            .context("cannot start the admin port")?;
        let (bound, outcome) = mpsc::sync_channel(1);
        let (go, ready) = oneshot::channel::<Arc<dyn Source>>();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::Builder::new()
            .name("admin".to_owned())
            .spawn(move || {
                runtime.block_on(async move {
                    let opened = admin.await.and_then(|admin| Ok((admin.socket()?, admin)));
                    let (socket, admin) = match opened {
                        Ok(opened) => opened,
                        Err(error) => return drop(bound.send(Err(error))),
                    };
                    drop(bound.send(Ok((admin.address(), socket))));
                    let Ok(source) = ready.await else { return }; // the router failed to start
                    let until = async { drop(stopped.await) };
                    if let Err(error) = admin.serve(source, until).await {
                        error!("the admin port has failed, the router continues without it: {error}");
                    }
                });
                // Do not wait for a request that is still reading the router's state.
                runtime.shutdown_background();
            })
            .context("cannot start a thread")?;
        let (address, socket) = outcome.recv().context("the admin thread has ended")??;
        Ok(Self { address, socket, source_sender: Some(go), stop, thread })
    }

    /// Copies the listening socket, for a process that replaces this one.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn socket(&self) -> io::Result<OwnedFd> {
        self.socket.try_clone()
    }

    /// Starts answering requests.
    pub fn serve(&mut self, source: Arc<dyn Source>) {
        if let Some(go) = self.source_sender.take() {
            let _ = go.send(source);
        }
    }

    /// Stops the port. Requests in progress have 1 s to finish.
    pub fn stop(self) {
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            error!("the admin thread has panicked");
        }
    }
}

/// Access rights from the configured token (already validated), or from a newly generated token.
///
/// A full disk must not prevent serving: the previous start's token is used instead. If there is none, this port
/// permits no changes.
pub fn access(token: Option<&Secret>, state_dir: &Path) -> Access {
    if let Some(token) = token.and_then(|token| Token::new(&token.0)) {
        return Access::Given(token);
    }
    let error = match Token::make(state_dir) {
        Ok((token, file)) => return Access::Made { token, file },
        Err(error) => error,
    };
    let (kept, state_dir) = (Token::load_existing(state_dir), state_dir.display());
    match kept {
        Ok((token, file)) => {
            warn!(
                "cannot write a new token for the admin port to {state_dir}: {error}. The token of the previous start is used"
            );
            Access::Made { token, file }
        }
        Err(_) => {
            let why = format!(
                "the admin port is read-only: cannot write a token to {state_dir} ({error}). Fix that, then \
                 reload the router (SIGHUP)"
            );
            error!("{why}");
            Access::ReadOnly { why }
        }
    }
}

/// Like [`access`], for a process that replaces another process. It keeps a generated token, which is valid at both.
pub fn kept_access(token: Option<&Secret>, dir: &Path) -> Access {
    match (token, Token::load_existing(dir)) {
        (None, Ok((token, file))) => Access::Made { token, file },
        _ => access(token, dir),
    }
}
