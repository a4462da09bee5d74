//! Checks of libraries in FUNCTION LOAD and FUNCTION RESTORE, for large ones in a thread of their own.
//!
//! A check reads the whole command, which may have 512 MB; in a worker this would stall all clients. So one thread
//! checks large commands, one after another, while their clients wait. A worker checks small commands itself, because
//! passing them on costs more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak, mpsc};

use switchyard_resp::encode;
use switchyard_resp::request::{Args, Limits, Scanner};

use crate::functions_dump::{self, Refusal};
use crate::lua::wrapped_library;
use crate::shared::{Mailboxes, Message, RoutingSnapshot};
use crate::slab::Handle;

/// Minimum length of a large command, in bytes. LZF decompresses a payload to at most 88 times its length, so a worker
/// checks at most 1.4 MB.
pub(crate) const LARGE: usize = 16 << 10;

/// Libraries are known only at nodes, and their checks use slots of Redis Cluster.
pub(crate) const NO_FUNCTIONS: &str = "ERR Switchyard: functions are not served if twemproxy's rule places the keys; use a script (EVAL) that declares its keys";

/// The command with the check added to its libraries: `None` if it is sent unchanged, `Err` with the client's error.
pub(crate) type Checked = Result<Option<Vec<u8>>, String>;

/// Client that waits: worker, handle, and command number within the client.
type WaitingClient = (usize, Handle, u32);

/// Adds the check to the libraries of FUNCTION LOAD and RESTORE. `None` for other commands, or without checks.
pub(crate) fn checked_libraries(routing: &RoutingSnapshot, name: &str, args: &Args<'_>) -> Checked {
    let checked = |code: &[u8]| wrapped_library(code, &routing.commands, routing.topology.ruled());
    let (place, with) = match name {
        _ if !routing.checks_scripts() => return Ok(None),
        "FUNCTION|LOAD" | "FUNCTION|RESTORE" if !routing.topology.placement().is_crc16() => {
            return Err(NO_FUNCTIONS.into());
        }
        "FUNCTION|LOAD" => {
            let code = args.get(args.len() - 1).unwrap_or_default();
            (args.len() - 1, checked(code).map_err(|why| why.to_string())?)
        }
        "FUNCTION|RESTORE" => {
            let payload = functions_dump::with_code(args.get(2).unwrap_or_default(), checked);
            (
                2,
                payload.map_err(|refusal| match refusal {
                    Refusal::Damaged => functions_dump::DAMAGED.to_owned(),
                    Refusal::TooLarge => functions_dump::TOO_LARGE.to_owned(),
                    Refusal::Code(why) => why.to_string(),
                })?,
            )
        }
        _ => return Ok(None),
    };
    let mut request = Vec::with_capacity(with.len() + 256);
    encode::header(&mut request, b'*', args.len());
    for (index, arg) in args.iter().enumerate() {
        encode::bulk(&mut request, if index == place { &with } else { arg });
    }
    Ok(Some(request))
}

/// A command to check. Dropping it without a result refuses the command, so its client never waits for a dead thread.
struct Job {
    routing: Arc<RoutingSnapshot>,
    name: String,
    request: Vec<u8>,
    client: WaitingClient,
    mailboxes: Arc<Mailboxes>,
    /// Exists while the client waits.
    wait: Weak<()>,
    result: Option<Checked>,
}

impl Job {
    fn run(&mut self) {
        if self.wait.strong_count() == 0 {
            return; // disconnected: without this, many such clients would delay all others
        }
        let mut scanner = Scanner::default();
        self.result = match scanner.scan(&self.request, &Limits::NONE) {
            Ok(_) => Some(checked_libraries(&self.routing, &self.name, &scanner.args(&self.request))),
            Err(_) => None,
        };
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let refused = || Err("ERR Switchyard cannot check the libraries because of an internal error".to_owned());
        let (worker, client, number) = self.client;
        let result = self.result.take().unwrap_or_else(refused);
        self.mailboxes.send(worker, Message::LibrariesChecked { client, number, result });
    }
}

/// The thread for large commands. Starts with the first one, and ends when this is dropped.
#[derive(Default)]
pub(crate) struct LibraryChecks(OnceLock<mpsc::Sender<Job>>);

impl std::fmt::Debug for LibraryChecks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LibraryChecks")
    }
}

impl LibraryChecks {
    /// Queues the check of a command, which is skipped after `wait` was dropped. Its worker receives the result as
    /// [`Message::LibrariesChecked`]. Returns the length of the queued copy, in bytes.
    pub(crate) fn queue(
        &self,
        routing: &Arc<RoutingSnapshot>,
        name: &str,
        args: &Args<'_>,
        client: WaitingClient,
        mailboxes: &Arc<Mailboxes>,
        wait: &Arc<()>,
    ) -> usize {
        let mut request = Vec::with_capacity(args.iter().map(|arg| arg.len() + 32).sum());
        encode::command(&mut request, args.iter().collect::<Vec<_>>());
        let (routing, name, mailboxes) = (routing.clone(), name.to_owned(), mailboxes.clone());
        let len = request.len();
        let job = Job { routing, name, request, client, mailboxes, wait: Arc::downgrade(wait), result: None };
        // A job that is not accepted is dropped here, and so refused.
        let _ = self.0.get_or_init(start).send(job);
        len
    }
}

fn start() -> mpsc::Sender<Job> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let thread = std::thread::Builder::new().name("library-check".to_owned()).spawn(move || {
        for mut job in jobs {
            // After a panic the job has no result.
            let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
        }
    });
    if let Err(error) = thread {
        tracing::error!(%error, "cannot start the thread that checks libraries: large FUNCTION LOAD and RESTORE fail");
    }
    sender
}
