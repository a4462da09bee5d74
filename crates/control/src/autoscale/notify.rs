//! Notifies operators of events: a configured program receives each event as a line of JSON, on a separate thread.

use std::time::Duration;

use tracing::warn;

use super::command::run;
use super::intent::Event;

/// Maximum run time of the program.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends the program an event without waiting for it. Missed events remain in the history.
pub(super) fn notify(program: &[String], event: &Event) {
    if program.is_empty() {
        return;
    }
    let (program, line) = (program.to_vec(), serde_json::to_string(event).unwrap_or_default());
    let told = std::thread::Builder::new().name("notify".to_owned()).spawn(move || {
        if let Err(why) = run(&program, &line, TIMEOUT) {
            warn!("an event of the autoscaler was not passed on: {why}");
        }
    });
    if let Err(error) = told {
        warn!("an event of the autoscaler was not passed on: {error}");
    }
}
