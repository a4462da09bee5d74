//! Log lines on stderr: text for people, JSON for machines, with a level that a reload can change. How they get there
//! is in `log_queue`.

use std::io::IsTerminal;

use anyhow::anyhow;
use tracing::Metadata;
use tracing_subscriber::filter::{FilterExt, Targets, filter_fn};
use tracing_subscriber::layer::{Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, fmt, reload};

use super::log_queue::{LogQueue, flush};
use crate::config::{LogFormat, LogLevel};

/// What changes the level later.
#[derive(Debug)]
pub(super) struct Logs(reload::Handle<Targets, Registry>);

impl Logs {
    /// Sends every log line of the process to stderr from here on; once per process. `pool`: its name is in each line.
    pub(super) fn start(format: LogFormat, level: &LogLevel, pool: Option<&str>) -> anyhow::Result<Self> {
        let (filter, handle) = reload::Layer::new(level.filter());
        let registry = tracing_subscriber::registry().with(filter);
        let queue = LogQueue::of_process().map_err(|error| anyhow!("cannot start the log: {error}"))?;
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
                // Of the targets only "audit" means something to people: `grep audit` finds its lines.
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
            // It may be the last line.
            flush();
        }));
        Ok(Self(handle))
    }

    /// Makes `level` the level from here on.
    pub(super) fn set_level(&self, level: &LogLevel) {
        // It fails only if the subscriber is gone, which lives as long as the process.
        let _ = self.0.reload(level.filter());
    }
}
