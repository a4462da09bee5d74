//! Rehearsals of the scripts of a transaction: EXEC first has them rehearsed, to declare the keys that they will touch. One
//! call rehearses all of them, so each finds the effects of those before, such as a counter for the names of keys.
//!
//! Other clients may change values between a rehearsal and the transaction, because they are not one call. A script then
//! may touch other keys than it declares, and gets an error. Other commands of the transaction have not been executed when
//! a script is rehearsed, with the same effect.
//!
//! Not within the transaction, whose commands are in flight together: EXEC cannot be withdrawn after a rehearsal.

use std::collections::BTreeSet;
use std::sync::Arc;

use switchyard_policy::topology::{NodeId, Slot};
use switchyard_resp::command::Command;
use switchyard_resp::encode;
use switchyard_resp::reply::elements;
use switchyard_resp::request::Args;

use super::session::{Multi, Rehearsal, Session};
use crate::lane::Lane;
use crate::lock::lock;
use crate::lua::{part_for_several, rehearse_several};
use crate::script_argument::ScriptArgument;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;
use crate::worker::Worker;
use crate::worker::command::with_parsed_command;
use crate::worker::downstreams::waits::Stall;
use crate::worker::flow::Flow;
use crate::worker::multi_step::{MultiStepCommand, Next, StepRequest};
use crate::worker::scripts::met::new_token;
use crate::worker::scripts::rehearsed::{REPEATS_MAX, foreign_keys, keys_and_arguments};
use crate::worker::turn::Turn;
use crate::worker::upstreams::Upstreams;

/// Maximum scripts of a transaction that are rehearsed. Further ones are executed without.
const SCRIPTS_MAX: usize = 256;

/// Keys that the scripts of a client's transaction will touch, until EXEC is dispatched again.
#[derive(Debug)]
pub(in crate::worker) struct FoundKeys {
    /// Command number of EXEC within the client.
    number: u32,
    /// Index of each rehearsed script among the queued commands, with the keys that it does not declare.
    found: Vec<(usize, Vec<Vec<u8>>)>,
}

/// A round of rehearsals.
#[derive(Debug)]
struct Round {
    number: u32,
    /// Indexes of the scripts among the queued commands.
    places: Vec<usize>,
    token: String,
}

impl MultiStepCommand for Round {
    fn next(&mut self, _: &Turn, _: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        // A node that cannot be reached finds nothing. EXEC returns its error.
        let parts = parts.first().map(Vec::as_slice).unwrap_or_default();
        let parts = self.places.iter().copied().zip(elements(parts));
        let found = parts.filter_map(|(place, part)| Some((place, foreign_keys(part, &self.token)?))).collect();
        Next::Again(Box::new(FoundKeys { number: self.number, found }))
    }
}

/// A queued call of a checked script in parts.
struct QueuedCall<'a> {
    args: Vec<&'a [u8]>,
    keys: Vec<&'a [u8]>,
    /// Number of keys that the router has declared.
    more: usize,
}

impl<'a> QueuedCall<'a> {
    fn new(command: &Command, args: &Args<'a>) -> Option<Self> {
        let (keys, _) = keys_and_arguments(command, args)?;
        let args: Vec<&[u8]> = args.iter().collect();
        let more = ScriptArgument::number_of_more(args.last()?)?;
        Some(Self { args, keys, more })
    }

    /// Returns the call with more declared keys and this argument of the router.
    fn with(&self, more: &[Vec<u8>], argument: &[u8]) -> Vec<u8> {
        let count = (self.keys.len() + more.len()).to_string();
        let mut request = Vec::new();
        encode::header(&mut request, b'*', self.args.len() + more.len());
        let own = &self.args[3..self.args.len() - 1];
        let (keys, arguments) = own.split_at(self.keys.len());
        let all = self.args[..2].iter().copied().chain([count.as_bytes()]).chain(keys.iter().copied());
        let all = all.chain(more.iter().map(Vec::as_slice)).chain(arguments.iter().copied()).chain([argument]);
        all.for_each(|arg| encode::bulk(&mut request, arg));
        request
    }

    /// Returns the arguments of this call for [`rehearse_several`] after the index, with this argument of the router.
    fn for_rehearsal(&self, argument: Vec<u8>) -> Vec<Vec<u8>> {
        let own = &self.args[3..self.args.len() - 1];
        let numbers = [self.keys.len(), own.len() - self.keys.len() + 1];
        let numbers = numbers.map(|number| number.to_string().into_bytes()).into_iter();
        numbers.chain(own.iter().map(|arg| arg.to_vec())).chain([argument]).collect()
    }
}

/// Changes the queued calls of checked scripts. `None`: no change.
fn change_calls(
    multi: &mut Multi,
    routing: &RoutingSnapshot,
    mut change: impl FnMut(usize, &QueuedCall<'_>) -> Option<Vec<u8>>,
) {
    let mut requests = multi.requests();
    for place in &multi.checked_calls {
        let Some(request) = requests.get_mut(*place) else { continue };
        let changed = with_parsed_command(routing, request, |command, args| {
            QueuedCall::new(command, args).and_then(|call| change(*place, &call))
        });
        if let Some(changed) = changed.flatten() {
            *request = changed;
        }
    }
    multi.replace(requests);
}

impl Worker {
    /// Rehearses the scripts of a transaction at the node of its keys, or declares the keys that the last round has found.
    /// `None`: EXEC may be sent to the node.
    pub(super) fn rehearse_before_exec(
        &mut self,
        routing: &Arc<RoutingSnapshot>,
        handle: Handle,
        node: NodeId,
        class: u8,
    ) -> Option<Flow> {
        let client = self.cx.down.get_mut(handle)?;
        let multi = &mut client.state_mut::<Session>()?.multi;
        if multi.rehearsal == Rehearsal::None {
            return None;
        }
        if multi.rehearsal == Rehearsal::Trusted {
            let mut is_plain = true;
            change_calls(multi, routing, |_, call| {
                is_plain &= ScriptArgument::new(&routing.topology, node, &call.keys, call.more).is_plain();
                None
            });
            if !is_plain {
                multi.rehearsal = Rehearsal::Due(0);
            }
        }
        if let Rehearsal::Due(rounds) = client.state::<Session>()?.multi.rehearsal {
            if client.in_flight() > 0 {
                return Some(Flow::Stall(Stall::Barrier));
            }
            let number = client.replies().next_seq();
            let found = client.take_state::<FoundKeys>().filter(|found| found.number == number);
            let Some(found) = found else { return self.begin_round(routing, handle, node, class, number) };
            // Keys that are declared must be at the node before the scripts are executed.
            let has_more = rounds < REPEATS_MAX && self.declare(routing, handle, &found);
            let multi = &mut self.cx.down.get_mut(handle)?.state_or_default::<Session>().multi;
            multi.rehearsal = if has_more { Rehearsal::Due(rounds + 1) } else { Rehearsal::Done };
            if has_more {
                // The keys may have to be brought together.
                return Some(Flow::Later);
            }
        }
        let multi = &mut self.cx.down.get_mut(handle)?.state_or_default::<Session>().multi;
        change_calls(multi, routing, |_, call| {
            Some(call.with(&[], &ScriptArgument::new(&routing.topology, node, &call.keys, call.more).encode(None)))
        });
        None
    }

    /// Begins a round of rehearsals. EXEC is dispatched again when it has ended.
    fn begin_round(
        &mut self,
        routing: &Arc<RoutingSnapshot>,
        handle: Handle,
        node: NodeId,
        class: u8,
        number: u32,
    ) -> Option<Flow> {
        // A secret of its own, which causes no repetition of a call.
        let token = new_token();
        let multi = &mut self.cx.down.get_mut(handle)?.state_or_default::<Session>().multi;
        let (mut places, mut calls, mut texts) = (Vec::new(), Vec::new(), BTreeSet::<Arc<[u8]>>::new());
        change_calls(multi, routing, |place, call| {
            // A script is called by its text, or by its hash.
            let text = call.args.get(1).copied()?;
            let text = lock(&self.cx.turn.shared().scripts).text(text).map_or_else(|| text.into(), Arc::from);
            if places.len() < SCRIPTS_MAX && part_for_several(&text).is_some() {
                let argument = ScriptArgument::new(&routing.topology, node, &call.keys, call.more);
                calls.push((Arc::clone(&text), call.for_rehearsal(argument.encode(Some(&format!("!{token}"))))));
                texts.insert(text);
                places.push(place);
            }
            None
        });
        if places.is_empty() {
            // The node refuses them.
            multi.rehearsal = Rehearsal::Done;
            return None;
        }
        // Sorted, because nodes keep each text that they have executed.
        let script = rehearse_several(texts.iter().filter_map(|text| part_for_several(text)));
        let mut arguments = vec![b"EVAL".to_vec(), script, b"0".to_vec()];
        for (text, call) in calls {
            arguments.push((texts.range(..text).count() + 1).to_string().into_bytes());
            arguments.extend(call);
        }
        let mut request = Vec::new();
        encode::command(&mut request, arguments.iter().map(Vec::as_slice));
        let steps = vec![StepRequest { node, lane: Lane::Slow, requests: vec![request] }];
        let round = Round { number, places, token };
        match self.gathers.begin_alone(&self.cx.turn, &mut self.cx.down, handle, class, Box::new(round), steps) {
            Flow::Next => Some(Flow::Stall(Stall::Barrier)),
            flow => Some(flow),
        }
    }

    /// Declares the keys that rehearsals have found. Returns whether there were any.
    fn declare(&mut self, routing: &Arc<RoutingSnapshot>, handle: Handle, found: &FoundKeys) -> bool {
        let Some(client) = self.cx.down.get_mut(handle) else { return false };
        let session = client.state_or_default::<Session>();
        let watched = session.watch.as_ref().map(|watch| watch.slot);
        let multi = &mut session.multi;
        let requests = multi.requests();
        for (place, names) in &found.found {
            let request = requests.get(*place).filter(|_| !names.is_empty());
            request.into_iter().for_each(|request| self.cx.hooks.note_foreign_keys(request));
        }
        let slot_of = |name: &Vec<u8>| routing.topology.slot_of(name);
        let slots: BTreeSet<Slot> = found.found.iter().flat_map(|(_, names)| names).map(slot_of).collect();
        change_calls(multi, routing, |place, call| {
            let (_, names) = found.found.iter().find(|(other, names)| *other == place && !names.is_empty())?;
            Some(call.with(names, &ScriptArgument::of_more(call.more + names.len()).encode(None)))
        });
        multi.slot = multi.slot.or(slots.first().copied());
        let known = watched.or(multi.slot);
        multi.are_apart |= slots.iter().any(|slot| Some(*slot) != known);
        !slots.is_empty()
    }
}
