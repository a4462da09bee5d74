//! Records written keys in slots of an ejected node ([`crate::away`]) when the command is passed to a connection, so a
//! key is listed before any node can have changed it, whatever the outcome.

use switchyard_resp::command::{Command, Flags, Handling, KeyError};
use switchyard_resp::request::Args;

use super::command::{Call, KeyedCommand, with_parsed_command, writes};
use super::keyed::CommandHooks;
use super::turn::Turn;
use super::upstreams::pending::{MARK, MEMBER_MARK};
use crate::shared::RoutingSnapshot;

fn note_command(routing: &RoutingSnapshot, command: &Command, args: &Args<'_>, places: &mut Vec<u32>) {
    if !writes(command) || command.flags.has(Flags::PUBSUB) {
        return;
    }
    places.clear();
    let found = command.find_keys(args, places);
    let has_keys = found.is_ok() && !places.is_empty();
    let is_script = command.flags.has(Flags::SCRIPT);
    // A checked script uses only its declared keys.
    let names_all = if is_script {
        routing.checks_scripts() && !command.name.starts_with("FCALL") && found.is_ok()
    } else {
        has_keys
    };
    if names_all {
        for key in places.iter().filter_map(|place| args.get(*place as usize)) {
            let slot = routing.topology.slot_of(key);
            routing.moves.away.iter().filter(|away| away.has(slot)).for_each(|away| away.note(key));
        }
        return;
    }
    let is_local = matches!(command.handling, Handling::Local(_));
    if is_script
        || found == Err(KeyError::Undescribed)
        || matches!(command.handling, Handling::OnlyNode(_))
        || command.flags.has(Flags::WRITE) && !is_local
    {
        routing.moves.away.iter().for_each(|away| away.note_any());
    }
}

impl CommandHooks {
    /// Records the keys that a command may write, while other nodes serve slots of ejected nodes. Must be called before the
    /// command is sent.
    pub(super) fn note_written(&mut self, turn: &Turn, keyed: KeyedCommand<'_>) {
        let routing = turn.routing().clone();
        let mut places = std::mem::take(&mut self.keys);
        let mut note = |command: &Command, args: &Args<'_>| note_command(&routing, command, args, &mut places);
        match keyed.call {
            Call::Found(command, args) => note(command, args),
            // Changes no keys.
            Call::Bytes(MARK | MEMBER_MARK) => {}
            Call::Bytes(request) => {
                if with_parsed_command(&routing, request, note).is_none() {
                    routing.moves.away.iter().for_each(|away| away.note_any());
                }
            }
        }
        self.keys = places;
    }
}
