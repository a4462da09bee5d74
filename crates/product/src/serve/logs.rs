//! Log lines on stderr, as text or JSON. A reload can change the level. See `log_queue` for the writing.

use std::io::IsTerminal;

use anyhow::anyhow;
use tracing::Metadata;
use tracing_subscriber::filter::{FilterExt, Targets, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

use super::log_queue::{LogQueue, flush};
use crate::config::{LogFormat, LogLevel};

/// Handle to change the level.
#[derive(Debug)]
pub(super) struct Logs(reload::Handle<Targets, Registry>);

impl Logs {
    /// Sends all log lines of the process to stderr from now on. Call once per process. `pool` is added to each line.
    pub(super) fn start(format: LogFormat, level: &LogLevel, pool: Option<&str>) -> anyhow::Result<Self> {
        let (filter, handle) = reload::Layer::new(level.filter());
        let registry = tracing_subscriber::registry().with(filter);
        let queue = LogQueue::for_process().map_err(|error| anyhow!("cannot start the log: {error}"))?;
        let queue = match (pool, &format) {
            (None, _) => queue,
            (Some(pool), LogFormat::Json) => queue.with_json_field("pool", pool),
            (Some(pool), LogFormat::Text) => queue.with_field("pool", pool),
        };
        let repeats = queue.without_repeats();
        match format {
            LogFormat::Json => registry
                .with(fmt::layer().with_writer(queue).json().flatten_event(true).with_filter(repeats))
                .try_init(),
            LogFormat::Text => {
                let colours = std::io::stderr().is_terminal()
                    && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
                // Text lines show only the target "audit", so that `grep audit` finds them.
                let is_audit = |line: &Metadata<'_>| line.target() == "audit";
                let audit = filter_fn(is_audit).and(queue.without_repeats());
                let audit = fmt::layer().with_writer(queue.clone()).with_ansi(colours).with_filter(audit);
                let others = filter_fn(move |line| !is_audit(line)).and(repeats);
                let others = fmt::layer().with_writer(queue).with_ansi(colours).with_target(false).with_filter(others);
                registry.with(audit.and_then(others)).try_init()
            }
        }
        .map_err(|error| anyhow!("cannot start the log: {error}"))?;
        std::panic::set_hook(Box::new(|panic| {
            let trace = std::backtrace::Backtrace::capture();
            tracing::error!(
                thread = std::thread::current().name().unwrap_or("unnamed"),
                "a bug in Switchyard, please report it: {panic}\n{trace}"
            );
            // This may be the last line of the process.
            flush();
        }));
        Ok(Self(handle))
    }

    pub(super) fn set_level(&self, level: &LogLevel) {
        // Fails only if the subscriber is gone, which lives as long as the process.
        let _ = self.0.reload(level.filter());
    }
}
