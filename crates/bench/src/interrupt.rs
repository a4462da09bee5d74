//! Handles Ctrl-C and SIGTERM for subcommands with child processes, which must be stopped first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use anyhow::Context as _;
use tokio::signal::unix::{SignalKind, signal};

/// Returns a flag that the first SIGINT, SIGTERM, or SIGHUP sets.
pub fn flag() -> anyhow::Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let set = flag.clone();
    let (ready, is_ready) = mpsc::channel();
    // A separate runtime on a separate thread, because the subcommands are blocking code.
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(move || {
            let listen = || -> anyhow::Result<_> {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                let _in_runtime = runtime.enter();
                let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
                drop(_in_runtime);
                Ok((runtime, signals))
            };
            let (runtime, [interrupt, terminate, hangup]) = match listen() {
                Ok(listening) => listening,
                Err(error) => return drop(ready.send(Err(error))),
            };
            let (mut interrupt, mut terminate, mut hangup) = match (interrupt, terminate, hangup) {
                (Ok(i), Ok(t), Ok(h)) => (i, t, h),
                (Err(e), ..) | (_, Err(e), _) | (.., Err(e)) => {
                    return drop(ready.send(Err(e.into())));
                }
            };
            if ready.send(Ok(())).is_err() {
                return;
            }
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    _ = hangup.recv() => {}
                }
            });
            set.store(true, Ordering::Relaxed);
        })
        .context("cannot start a thread that waits for signals")?;
    is_ready.recv().context("the thread that waits for signals ended at once")?.context("cannot wait for signals")?;
    Ok(flag)
}
