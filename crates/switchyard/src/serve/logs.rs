//! Log lines on stderr: text for people, JSON for machines, with a level that a reload can change.

use std::io::IsTerminal;

use anyhow::anyhow;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Registry, fmt, reload};

use crate::config::{LogFormat, LogLevel};

/// What changes the level later.
#[derive(Debug)]
pub(super) struct Logs(reload::Handle<EnvFilter, Registry>);

impl Logs {
    /// Sends every log line of the process to stderr from here on; once per process.
    pub(super) fn start(format: LogFormat, level: &LogLevel) -> anyhow::Result<Self> {
        let (filter, handle) = reload::Layer::new(level.filter());
        let registry = tracing_subscriber::registry().with(filter);
        let lines = fmt::layer().with_writer(std::io::stderr);
        match format {
            LogFormat::Json => registry.with(lines.json().flatten_event(true)).try_init(),
            LogFormat::Text => {
                let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
                registry.with(lines.with_ansi(colours).with_target(false)).try_init()
            }
        }
        .map_err(|error| anyhow!("cannot start the log: {error}"))?;
        std::panic::set_hook(Box::new(|panic| {
            let trace = std::backtrace::Backtrace::capture();
            tracing::error!(
                thread = std::thread::current().name().unwrap_or("unnamed"),
                "a bug in Switchyard, please report it: {panic}\n{trace}"
            );
        }));
        Ok(Self(handle))
    }

    /// Makes `level` the level from here on.
    pub(super) fn set_level(&self, level: &LogLevel) {
        // It fails only if the subscriber is gone, which lives as long as the process.
        let _ = self.0.reload(level.filter());
    }
}
