//! Commands of clients that wait for something: a worker hands them over and goes on, and a thread answers them, one
//! after another.

use std::sync::{Arc, mpsc};

use anyhow::Context;
use switchyard_resp::encode;
use switchyard_router::{OperatorCommand, OperatorPort};

use crate::running::Running;

/// Commands that may wait; beyond it somebody is asking in a loop.
const WAITING_MAX: usize = 64;

/// Takes commands from the workers.
#[derive(Debug)]
pub struct CommandThread(mpsc::SyncSender<OperatorCommand>);

impl CommandThread {
    /// Starts the thread, which answers each with what `answer` gives, once the router serves: the first clients are
    /// there before that. It ends when nobody can give it a command.
    ///
    /// # Errors
    /// If the system has no thread.
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
