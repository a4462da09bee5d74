//! Threads that the router can serve without: the planner, the autoscaler, ejection, hot copies and the other loops of
//! automation and observation.
//!
//! A panic in one of them ends this thread alone. It is logged once, and the thread is listed as stopped until the
//! router is started again. It is not restarted: the state that it panicked on is still there. Workers are different,
//! because clients wait for them: `run_worker` replaces one that panics.
//!
//! In this crate because the router's own loop uses it too; the control plane's loops get the same registry from its
//! owner.

use std::collections::BTreeSet;
use std::io;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use tracing::error;

/// The registry of these threads. Clones share one state.
#[derive(Clone, Debug, Default)]
pub struct Threads(Arc<Mutex<States>>);

#[derive(Debug, Default)]
struct States {
    /// Every name that was started.
    started: BTreeSet<&'static str>,
    /// Names of threads that have panicked.
    stopped: BTreeSet<&'static str>,
}

/// A thread that repeats a body. It ends when this is dropped, after the body in progress.
#[derive(Debug)]
pub struct Repeating {
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Repeating {
    /// Ends the thread without waiting for a body in progress.
    pub fn stop(self) {
        drop(self.stop);
        if self.thread.is_finished() {
            let _ = self.thread.join();
        }
    }
}

impl Threads {
    fn states(&self) -> MutexGuard<'_, States> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn spawn(&self, name: &'static str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        {
            // A reload may start an observer again.
            let mut states = self.states();
            states.started.insert(name);
            states.stopped.remove(name);
        }
        let threads = self.clone();
        Builder::new().name(name.to_owned()).spawn(move || {
            if catch_unwind(AssertUnwindSafe(body)).is_err() {
                threads.states().stopped.insert(name);
                error!("{}", stopped_text(name));
            }
        })
    }

    /// Starts a thread that runs `body` after each `interval` until the result is dropped, or `body` breaks.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub fn repeat(
        &self,
        name: &'static str,
        interval: impl Fn() -> Duration + Send + 'static,
        mut body: impl FnMut() -> ControlFlow<()> + Send + 'static,
    ) -> io::Result<Repeating> {
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = self.spawn(name, move || {
            while matches!(stopped.recv_timeout(interval()), Err(RecvTimeoutError::Timeout)) && body().is_continue() {}
        })?;
        Ok(Repeating { stop, thread })
    }

    /// Names of the threads that were started, each with whether it has stopped because it panicked.
    #[must_use]
    pub fn all(&self) -> Vec<(&'static str, bool)> {
        let states = self.states();
        states.started.iter().map(|name| (*name, states.stopped.contains(name))).collect()
    }

    /// Whether a thread of this name has stopped because it panicked.
    #[must_use]
    pub fn is_stopped(&self, name: &str) -> bool {
        self.states().stopped.contains(name)
    }

    /// A sentence for each thread that has stopped, for operators.
    #[must_use]
    pub fn troubles(&self) -> Vec<String> {
        self.states().stopped.iter().map(|name| stopped_text(name)).collect()
    }
}

fn stopped_text(name: &str) -> String {
    format!(
        "the thread {name} has stopped after an internal error (see the log); the router continues without it: restart the router, and report this"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_stops_one_thread_and_is_listed() {
        let threads = Threads::default();
        let (sent, turns) = mpsc::channel();
        let other = threads.repeat(
            "b",
            || Duration::ZERO,
            move || sent.send(()).map_or(ControlFlow::Break(()), ControlFlow::Continue),
        );
        let mut left = 3;
        let failing = threads.repeat(
            "a",
            || Duration::ZERO,
            move || {
                left -= 1;
                assert!(left > 0, "planted");
                ControlFlow::Continue(())
            },
        );
        let (other, failing) = (other.expect("started"), failing.expect("started"));
        failing.thread.join().expect("the panic was caught");
        assert_eq!(threads.all(), [("a", true), ("b", false)]);
        assert!(threads.is_stopped("a") && !threads.is_stopped("b"));
        assert!(matches!(threads.troubles().as_slice(), [text] if text.contains("the thread a has stopped")));
        turns.try_iter().for_each(drop);
        turns.recv_timeout(Duration::from_secs(30)).expect("the other one repeats");
        drop(other.stop);
        while turns.recv().is_ok() {}
        other.thread.join().expect("it has ended");
        assert_eq!(threads.all(), [("a", true), ("b", false)], "an end on request is no failure");
    }
}
