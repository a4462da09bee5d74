//! Executes client commands that may block: workers hand them over without waiting, and a thread answers them in order.

use std::sync::{Arc, mpsc};

use anyhow::Context;
use switchyard_resp::encode;
use switchyard_router::{OperatorCommand, OperatorPort};

use crate::running::Running;

/// Maximum number of waiting commands. Beyond it a client is sending in a loop.
const WAITING_MAX: usize = 64;

/// Queue of commands for the thread.
#[derive(Debug)]
pub struct CommandThread(mpsc::SyncSender<OperatorCommand>);

impl CommandThread {
    /// Starts the thread, which answers each command with the result of `answer`. It waits until the router serves,
    /// because the first clients connect earlier. It ends when all senders are dropped.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(
        name: &str,
        running: Arc<Running>,
        answer: impl Fn(&OperatorCommand) -> Vec<u8> + Send + 'static,
    ) -> anyhow::Result<Arc<Self>> {
        let (commands, given) = mpsc::sync_channel::<OperatorCommand>(WAITING_MAX);
        let answering = move || {
            running.wait_until_served();
            for command in given {
                let answer = answer(&command);
                command.answer(&answer);
            }
        };
        std::thread::Builder::new().name(name.to_owned()).spawn(answering).context("cannot start a thread")?;
        Ok(Arc::new(Self(commands)))
    }
}

impl OperatorPort for CommandThread {
    fn take(&self, command: OperatorCommand) {
        if let Err(mpsc::TrySendError::Full(command) | mpsc::TrySendError::Disconnected(command)) =
            self.0.try_send(command)
        {
            let mut out = Vec::new();
            encode::error(&mut out, "ERR too many commands of this kind wait; try again");
            command.answer(&out);
        }
    }
}
