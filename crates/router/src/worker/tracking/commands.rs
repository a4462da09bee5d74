//! The client side: CLIENT TRACKING, CACHING, TRACKINGINFO and GETREDIR, and reads of tracking clients.

use switchyard_resp::command::{Flags, Local};
use switchyard_resp::encode;
use switchyard_resp::reply;
use switchyard_resp::request::Args;

use super::{KEYS_MAX, Options, Redirect, Request, Tracked, Tracking, shown_redirect};
use crate::lane::Lane;
use crate::settings::Reads;
use crate::shared::Message;
use crate::slab::Handle;
use crate::worker::command::parse;
use crate::worker::downstreams::Downstreams;
use crate::worker::downstreams::waits::Stall;
use crate::worker::flow::Flow;
use crate::worker::gather::{Aggregation, Gathers};
use crate::worker::invocation::Invocation;
use crate::worker::keyed::CommandHooks;
use crate::worker::turn::Turn;

const NO_SUCH_TARGET: &str = "ERR The client ID you want redirect to does not exist";

/// Returns the options of CLIENT TRACKING, or the error.
fn options(args: &Args<'_>) -> Result<Options, &'static str> {
    let mut options = Options::default();
    let mut index = 3;
    while let Some(word) = args.get(index) {
        let value = args.get(index + 1);
        let is = |name: &str| word.eq_ignore_ascii_case(name.as_bytes());
        match value {
            Some(value) if is("REDIRECT") => {
                if options.redirect_id.is_some() {
                    return Err("ERR A client can only redirect to a single other client");
                }
                let id = parse::<i64>(value).ok_or("ERR value is not an integer or out of range")?;
                options.redirect_id = Some(u64::try_from(id).map_err(|_| NO_SUCH_TARGET)?);
                index += 1;
            }
            Some(value) if is("PREFIX") => {
                options.prefixes.push(value.into());
                index += 1;
            }
            _ if is("BCAST") => options.bcast = true,
            _ if is("OPTIN") => options.optin = true,
            _ if is("OPTOUT") => options.optout = true,
            _ if is("NOLOOP") => options.noloop = true,
            _ => return Err("ERR syntax error"),
        }
        index += 1;
    }
    Ok(options)
}

/// Whether the options are compatible, with each other and with the client's current ones.
fn check(new: &Options, old: Option<&Options>) -> Result<(), String> {
    if !new.bcast && !new.prefixes.is_empty() {
        return Err("ERR PREFIX option requires BCAST mode to be enabled".into());
    }
    if old.is_some_and(|o| o.bcast != new.bcast) {
        return Err("ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then re-enabling it with a different mode.".into());
    }
    if new.bcast && (new.optin || new.optout) {
        return Err("ERR OPTIN and OPTOUT are not compatible with BCAST".into());
    }
    if new.optin && new.optout {
        return Err("ERR You can't specify both OPTIN mode and OPTOUT mode".into());
    }
    if old.is_some_and(|o| new.optin && o.optout || new.optout && o.optin) {
        return Err("ERR You can't switch OPTIN/OPTOUT mode before disabling tracking for this client, and then re-enabling it with a different mode.".into());
    }
    let overlap = |a: &[u8], b: &[u8]| a.starts_with(b) || b.starts_with(a);
    let text = |t: &[u8]| String::from_utf8_lossy(t).into_owned();
    for (index, prefix) in new.prefixes.iter().enumerate() {
        if let Some(other) = old.and_then(|o| o.prefixes.iter().find(|p| overlap(p, prefix))) {
            return Err(format!(
                "ERR Prefix '{}' overlaps with an existing prefix '{}'. Prefixes for a single client must not overlap.",
                text(prefix),
                text(other)
            ));
        }
        if let Some(other) = new.prefixes[index + 1..].iter().find(|p| overlap(p, prefix)) {
            return Err(format!(
                "ERR Prefix '{}' overlaps with another provided prefix '{}'. Prefixes for a single client must not overlap.",
                text(prefix),
                text(other)
            ));
        }
    }
    Ok(())
}

fn tracking_info(out: &mut Vec<u8>, tracked: Option<&Tracked>, resp3: bool) {
    let mut flags = vec!["off"];
    if let Some(t) = tracked {
        let o = &t.options;
        let all = [
            (true, "on"),
            (o.bcast, "bcast"),
            (o.optin, "optin"),
            (o.optin && t.caching, "caching-yes"),
            (o.optout, "optout"),
            (o.optout && t.caching, "caching-no"),
            (o.noloop, "noloop"),
            (o.redirect.is_some_and(|r| r.broken), "broken_redirect"),
        ];
        flags = all.into_iter().filter(|(is, _)| *is).map(|(_, name)| name).collect();
    }
    encode::map(out, 3, resp3);
    encode::bulk(out, b"flags");
    encode::header(out, if resp3 { b'~' } else { b'*' }, flags.len());
    for flag in flags {
        encode::bulk(out, flag.as_bytes());
    }
    encode::bulk(out, b"redirect");
    encode::integer(out, shown_redirect(tracked));
    encode::bulk(out, b"prefixes");
    let prefixes = tracked.map(|t| &t.options.prefixes[..]).unwrap_or_default();
    encode::header(out, b'*', prefixes.len());
    for prefix in prefixes {
        encode::bulk(out, prefix);
    }
}

/// Answers a query of another worker for a client by its number: its handle, or null.
pub(in crate::worker) fn find_client(turn: &Turn, down: &Downstreams, id: u64) -> Vec<u8> {
    let mut out = Vec::new();
    match down.iter().find(|(_, c)| c.identity().id() == id) {
        Some((handle, _)) => {
            encode::header(&mut out, b'*', 3);
            for number in [turn.index() as i64, i64::from(handle.index), i64::from(handle.generation)] {
                encode::integer(&mut out, number);
            }
        }
        None => encode::null(&mut out, true),
    }
    out
}

/// Stalls a client whose tracking is being set up. `None`: the command may proceed.
pub(in crate::worker) fn gate_tracking(down: &Downstreams, handle: Handle) -> Option<Flow> {
    let tracked = down.get(handle)?.state::<Tracked>()?;
    (tracked.looking || tracked.pending.is_some()).then_some(Flow::Stall(Stall::Barrier))
}

impl Tracking {
    /// Completes the search for the client to redirect to, with the answers of all workers.
    pub(in crate::worker) fn redirect_found(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        seq: u32,
        mut options: Options,
        parts: &[Vec<u8>],
    ) {
        let found = parts.iter().find_map(|p| {
            let numbers: Vec<i64> = reply::elements(p).filter_map(reply::integer).collect();
            let [worker, index, generation] = numbers[..] else { return None };
            Some((worker as usize, Handle { index: index as u32, generation: generation as u32 }))
        });
        match found.zip(options.redirect_id) {
            Some(((worker, client), id)) => {
                options.redirect = Some(Redirect { id, worker, client, broken: false });
                self.enable_tracking(turn, down, handle, seq, options);
            }
            None => self.refuse_tracking(turn, down, handle, seq, NO_SUCH_TARGET),
        }
    }

    pub(super) fn enable_tracking(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        seq: u32,
        options: Options,
    ) {
        let known = self.clients.contains(&handle);
        let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) else { return };
        tracked.looking = false;
        if let Err(error) = check(&options, known.then_some(&tracked.options)) {
            self.refuse_tracking(turn, down, handle, seq, &error);
            return;
        }
        let mut prefixes = std::mem::take(&mut tracked.options.prefixes);
        tracked.options = options;
        prefixes.append(&mut tracked.options.prefixes);
        if tracked.options.bcast && prefixes.is_empty() {
            prefixes.push(Box::default());
        }
        tracked.options.prefixes.clone_from(&prefixes);
        if !tracked.options.bcast {
            prefixes = vec![Box::default()];
        }
        tracked.pending = Some(seq);
        tracked.was_tracking = known;
        tracked.caching = false;
        if !known {
            self.clients.push(handle);
            turn.counters().tracking.add(1);
        }
        self.count_prefixes(turn, down);
        self.requests.push_back(Request::Widen(prefixes));
    }

    /// TRACKING OFF, RESET, or a disconnected client.
    pub(in crate::worker) fn end_tracking(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle) {
        if let Some(client) = down.get_mut(handle) {
            client.take_state::<Tracked>();
        }
        if let Some(place) = self.clients.iter().position(|c| *c == handle) {
            self.clients.swap_remove(place);
            turn.counters().tracking.sub(1);
            self.count_prefixes(turn, down);
            if self.clients.is_empty() {
                self.stop_tracking(turn);
            }
        }
    }

    /// Handles a failed TRACKING ON: the client keeps its previous state.
    pub(super) fn refuse_tracking(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        seq: u32,
        error: &str,
    ) {
        if let Some(client) = down.get_mut(handle) {
            if let Some(tracked) = client.state_mut::<Tracked>() {
                tracked.pending = None;
                tracked.looking = false;
            }
            if !self.clients.contains(&handle) {
                client.take_state::<Tracked>();
            }
        }
        let mut out = Vec::new();
        encode::error(&mut out, error);
        down.deliver(turn, handle, seq, &out);
    }

    /// Records the keys read by a dispatched command of a tracking client.
    pub(in crate::worker) fn note_tracked_read(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        hooks: &mut CommandHooks,
        call: &Invocation<'_>,
    ) {
        let Invocation { handle, command, args, .. } = *call;
        let Some(client) = down.get_mut(handle) else { return };
        let in_multi = client.in_multi();
        let Some(tracked) = client.state_mut::<Tracked>() else { return };
        if tracked.pending.is_some() || command.name.starts_with("CLIENT|") {
            return; // CLIENT does not consume CACHING
        }
        if tracked.options.noloop && !tracked.options.bcast && !in_multi {
            self.note_own_write(down, hooks, call);
        }
        let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) else { return };
        // CACHING before MULTI applies to the whole transaction.
        let caching = if in_multi { tracked.caching } else { std::mem::take(&mut tracked.caching) };
        if !in_multi && !tracked.queued.is_empty() {
            // EXEC reads the keys now; after DISCARD, an extra key is harmless.
            for key in std::mem::take(&mut tracked.queued) {
                self.note_tracked_key(turn, down, handle, &key);
            }
            return;
        }
        let o = &tracked.options;
        let wanted = if o.optin { caching } else { !(o.optout && caching) };
        let reads = command.flags.has(Flags::READONLY) || command.flags.has(Flags::SCRIPT);
        if o.bcast || !wanted || !reads || command.flags.has(Flags::PUBSUB) {
            return;
        }
        let mut places = std::mem::take(&mut hooks.keys);
        places.clear();
        if command.find_keys(args, &mut places).is_ok() {
            for place in &places {
                let key = args.get(*place as usize).unwrap_or_default();
                if !in_multi {
                    self.note_tracked_key(turn, down, handle, key);
                } else if let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) {
                    tracked.queued.push(key.into());
                }
            }
        }
        hooks.keys = places;
    }

    fn note_tracked_key(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, key: &[u8]) {
        if let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) {
            // A value read after its own write may be another client's.
            tracked.own.iter_mut().for_each(|write| write.forget(key));
        }
        if self.keys.len() >= KEYS_MAX && !self.keys.contains_key(key) {
            self.forget_tracked_reads(turn, down);
        }
        self.note_read(key, handle);
        self.count_tracked(turn);
    }
}

pub(in crate::worker) fn tracking_command(
    turn: &Turn,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    tracking: &mut Tracking,
    call: &Invocation<'_>,
    local: Local,
) -> Flow {
    let Invocation { handle, args, .. } = *call;
    let class = call.class();
    let Some(client) = down.get_mut(handle) else { return Flow::Close };
    let word = args.get(2).unwrap_or_default();
    let mut out = Vec::new();
    match local {
        Local::ClientTracking => {
            let options = match options(args) {
                Ok(options) => options,
                Err(error) => return down.refuse(turn, handle, class, error),
            };
            if word.eq_ignore_ascii_case(b"OFF") {
                tracking.end_tracking(turn, down, handle);
                encode::simple(&mut out, "OK");
            } else if word.eq_ignore_ascii_case(b"ON") {
                return begin_tracking(turn, down, gathers, tracking, handle, class, options);
            } else {
                return down.refuse(turn, handle, class, "ERR syntax error");
            }
        }
        Local::ClientCaching => {
            let Some(tracked) = client.state_mut::<Tracked>() else {
                return down.refuse(turn,
                    handle,
                    class,
                    "ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled",
                );
            };
            let (yes, no) = (word.eq_ignore_ascii_case(b"YES"), word.eq_ignore_ascii_case(b"NO"));
            if yes && !tracked.options.optin {
                return down.refuse(
                    turn,
                    handle,
                    class,
                    "ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.",
                );
            }
            if no && !tracked.options.optout {
                return down.refuse(
                    turn,
                    handle,
                    class,
                    "ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.",
                );
            }
            if !yes && !no {
                return down.refuse(turn, handle, class, "ERR syntax error");
            }
            tracked.caching = true;
            encode::simple(&mut out, "OK");
        }
        Local::ClientGetredir => encode::integer(&mut out, shown_redirect(client.state::<Tracked>())),
        _ => tracking_info(&mut out, client.state::<Tracked>(), client.resp3()),
    }
    down.answer(turn, handle, class, &out);
    Flow::Next
}

fn begin_tracking(
    turn: &Turn,
    down: &mut Downstreams,
    gathers: &mut Gathers,
    tracking: &mut Tracking,
    handle: Handle,
    class: u8,
    options: Options,
) -> Flow {
    let Some(client) = down.get_mut(handle) else { return Flow::Close };
    if client.in_flight() > 0 {
        return Flow::Stall(Stall::Barrier);
    }
    if client.identity().reads() == Reads::Replica {
        let text = "ERR Switchyard cannot track keys that are read from replicas: a replica may return the value before a change (reads = \"replica\")";
        return down.refuse(turn, handle, class, text);
    }
    // Later commands wait for the answer, because they are tracked.
    client.replies_mut().take_lane(Lane::Pubsub);
    let redirects = options.redirect_id.is_some();
    client.state_or_default::<Tracked>().looking = redirects;
    let Some(id) = options.redirect_id else {
        let seq = client.owe(turn.now_us(), class);
        tracking.enable_tracking(turn, down, handle, seq, options);
        return Flow::Next;
    };
    let workers = turn.shared().mailboxes.len();
    let Some(gather) =
        gathers.begin_gather(turn, down, handle, class, workers, Aggregation::Redirect(Box::new(options)))
    else {
        return Flow::Close;
    };
    for (part, mailbox) in turn.shared().mailboxes.iter().enumerate() {
        mailbox.send(Message::Find { id, from: turn.index(), gather, part: part as u32 });
    }
    Flow::Next
}
