//! The admin port's thread, with a runtime of its own; and who may do what there.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::Context;
use switchyard_router::Secret;
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::{Access, Admin, AdminOptions, Source, Token};

/// Threads for answering requests; a scrape is rare, and more than a few at once is somebody's mistake.
const ANSWERING_THREADS: usize = 4;

/// The running admin port.
pub struct AdminThread {
    /// Where it listens.
    pub address: SocketAddr,
    /// What it serves, once there is something.
    go: Option<oneshot::Sender<Arc<dyn Source>>>,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl AdminThread {
    /// Takes the port, and starts answering when [`AdminThread::serve`] is called. So a port that is taken is told
    /// before the router starts.
    pub fn bind(address: SocketAddr, options: AdminOptions) -> anyhow::Result<Self> {
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
                    let admin = match Admin::bind(address, options).await {
                        Ok(admin) => admin,
                        Err(error) => return drop(bound.send(Err(error))),
                    };
                    drop(bound.send(Ok(admin.address())));
                    let Ok(source) = ready.await else { return }; // the router did not start
                    let until = async { drop(stopped.await) };
                    if let Err(error) = admin.serve(source, until).await {
                        error!("the admin port has failed, the router goes on without it: {error}");
                    }
                });
                // A request may still be looking at the router; that must not hold up the end of the process.
                runtime.shutdown_background();
            })
            .context("cannot start a thread")?;
        let address = outcome.recv().context("the admin thread has ended")??;
        Ok(Self { address, go: Some(go), stop, thread })
    }

    /// Starts answering.
    pub fn serve(&mut self, source: Arc<dyn Source>) {
        if let Some(go) = self.go.take() {
            let _ = go.send(source);
        }
    }

    /// Stops answering; requests under way get a moment.
    pub fn stop(self) {
        let _ = self.stop.send(());
        if self.thread.join().is_err() {
            error!("the admin thread has panicked");
        }
    }
}

/// Who may do what at the admin port: by the token of the configuration (whether it fits was checked there), or by one
/// that is made now.
///
/// A disk that is full is no reason not to serve: then the token of the start before is kept. Where there is none,
/// nothing can be changed by this port.
pub fn access(token: Option<&Secret>, state_dir: &Path) -> Access {
    if let Some(token) = token.and_then(|token| Token::new(&token.0)) {
        return Access::Given(token);
    }
    let error = match Token::make(state_dir) {
        Ok((token, file)) => return Access::Made { token, file },
        Err(error) => error,
    };
    let (kept, state_dir) = (Token::kept(state_dir), state_dir.display());
    match kept {
        Ok((token, file)) => {
            warn!(
                "no new token for the admin port can be written to {state_dir}: {error}. The one of an earlier start is kept"
            );
            Access::Made { token, file }
        }
        Err(_) => {
            let why = format!(
                "the admin port shows everything and changes nothing: no token for it can be written to {state_dir} ({error}). Make that possible, then \
                 reload the router (SIGHUP)"
            );
            error!("{why}");
            Access::ReadOnly { why }
        }
    }
}
