//! Events for people: a program of theirs is given each one as a line of JSON, on a thread of its own.

use std::time::Duration;

use tracing::warn;

use super::command::run;
use super::intent::Event;

/// The longest that the program may take.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Gives the program an event. Nobody waits for it, and an event that it misses is in the history.
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
