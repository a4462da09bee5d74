//! Counts commands that may add or remove keys of a node. With these counts the guard against empty returns
//! ([`switchyard_policy::data_loss`]) knows how many keys may be missing legitimately.
//!
//! Part of the command hook, because the class of a command does not show whether it removes keys: DEL and MSET are in
//! one class.

use std::sync::Arc;

use switchyard_policy::data_loss::ANY_NUMBER;
use switchyard_policy::topology::NodeId;
use switchyard_resp::command::{Command, CommandTable, Flags, Lookup};
use switchyard_resp::request::{Args, Scanner};

use super::command::{Call, KeyedCommand};
use crate::metrics::{NodeCounters, WorkerCounters};

/// Counters of one worker.
#[derive(Debug)]
pub(super) struct Changes {
    all: Arc<WorkerCounters>,
    /// Counters used so far, by node number. A lookup in `all` needs a lock.
    nodes: Vec<Option<Arc<NodeCounters>>>,
    places: Vec<u32>,
}

impl Changes {
    pub(super) fn new(all: Arc<WorkerCounters>) -> Self {
        Self { all, nodes: Vec::new(), places: Vec::new() }
    }

    /// Counts a command to a node.
    #[inline]
    pub(super) fn note(&mut self, commands: &CommandTable, keyed: KeyedCommand<'_>) {
        match keyed.call {
            Call::Found(command, _) if command.flags.has(Flags::READONLY) => {}
            Call::Found(command, args) => self.note_write(keyed.node, command, args),
            Call::Bytes(bytes) => self.note_bytes(commands, keyed.node, bytes),
        }
    }

    fn note_write(&mut self, node: NodeId, command: &Command, args: &Args<'_>) {
        let (writes, removes) = (command.flags.has(Flags::WRITE), removes(command, args, &mut self.places));
        if writes || removes > 0 {
            let counters = self.of(node);
            counters.writes.add(u64::from(writes));
            counters.removals.add(removes);
        }
    }

    /// Parts of MGET and MSET are most of the commands created by the router. They are recognized by their first bytes,
    /// and MSET only adds keys.
    fn note_bytes(&mut self, commands: &CommandTable, node: NodeId, bytes: &[u8]) {
        let name = bytes.iter().position(|byte| *byte == b'$').map_or(&[][..], |at| &bytes[at..]);
        if name.starts_with(b"$4\r\nMGET") {
            return;
        }
        if name.starts_with(b"$4\r\nMSET") {
            return self.of(node).writes.add(1);
        }
        let Some(scanner) = Scanner::again(bytes) else { return };
        let args = scanner.args(bytes);
        if let Lookup::Command(command) = commands.find(&args)
            && !command.flags.has(Flags::READONLY)
        {
            self.note_write(node, command, &args);
        }
    }

    #[inline]
    fn of(&mut self, node: NodeId) -> &NodeCounters {
        if self.nodes.len() <= node.index() {
            self.nodes.resize(node.index() + 1, None);
        }
        self.nodes[node.index()].get_or_insert_with(|| self.all.node(node))
    }
}

/// Returns how many keys a command may remove. Commands with Redis's flag for memory use do not remove keys. For
/// scripts, declared keys count: if each script could remove anything, no loss would be detected with applications that
/// use scripts.
fn removes(command: &Command, args: &Args<'_>, places: &mut Vec<u32>) -> u64 {
    if !command.flags.has(Flags::SCRIPT) && (!command.flags.has(Flags::WRITE) || command.flags.has(Flags::DENY_OOM)) {
        return 0;
    }
    places.clear();
    match command.find_keys(args, places) {
        Ok(()) if !places.is_empty() => places.len() as u64,
        _ if command.flags.has(Flags::SCRIPT) => 0,
        _ => ANY_NUMBER,
    }
}

#[cfg(test)]
mod tests {
    use switchyard_resp::encode;

    use super::*;

    #[test]
    fn commands_that_remove_keys_are_counted_by_key() {
        let (commands, node) = (CommandTable::builtin(), NodeId(0));
        for (line, writes, removals) in [
            ("GET k", 0, 0),
            ("SET k v", 1, 0),
            ("MSET a 1 b 2", 1, 0),
            ("MGET a b", 0, 0),
            ("DEL a b c", 1, 3),
            ("RPOP queue", 1, 1),
            ("FLUSHALL", 1, ANY_NUMBER),
            ("FLUSHDB ASYNC", 1, ANY_NUMBER),
            ("SREM set a b c", 1, 1),
            ("EVAL x 0", 0, 0),
            ("EVAL x 2 a b c", 0, 2),
            ("EVAL_RO x 0", 0, 0),
            ("PUBLISH c m", 0, 0),
        ] {
            let mut bytes = Vec::new();
            encode::command(&mut bytes, line.split(' ').map(str::as_bytes).collect::<Vec<_>>());
            let all = Arc::new(WorkerCounters::default());
            Changes::new(Arc::clone(&all))
                .note(&commands, KeyedCommand { call: Call::Bytes(&bytes), node, database: 0 });
            let found = (all.node(node).writes.get(), all.node(node).removals.get());
            assert_eq!(found, (writes, removals), "{line}");
        }
    }
}
