//! CLIENT and its subcommands. LIST and KILL concern the clients of all workers, so they are sent to each worker's
//! mailbox.

use std::sync::Arc;

use switchyard_resp::command::Local;
use switchyard_resp::encode;
use switchyard_resp::request::Args;

use super::command::parse;
use super::downstreams::replies::ReplyMode;
use super::downstreams::waits::Stall;
use super::downstreams::{Client, Downstreams};
use super::flow::Flow;
use super::gather::{Aggregation, Gathers};
use super::invocation::Invocation;
use super::keyed::CommandHooks;
use super::transactions::is_dirty;
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;
use crate::shared::{ClientFilter, ClientType, Message};
use crate::slab::Handle;
use crate::users::Users;

pub(super) const INVALID_NAME: &str = "ERR Client names cannot contain spaces, newlines or special characters.";

/// Whether a name may appear in CLIENT LIST: printable ASCII without spaces.
pub(super) fn is_valid_name(name: &[u8]) -> bool {
    name.iter().all(|b| (b'!'..=b'~').contains(b))
}

/// Whether servers with this Redis version, or compatible with it, have CLIENT NO-TOUCH.
fn knows_no_touch(redis_version: &str) -> bool {
    let mut numbers = redis_version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(7), Some(2))
}

const HELP: &[&str] = &[
    "CLIENT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "GETNAME",
    "    Return the name of the current connection.",
    "ID",
    "    Return the ID of the current connection.",
    "INFO",
    "    Return information about the current client connection.",
    "KILL <ip:port> | KILL <option> <value> [<option> <value> [...]]",
    "    Kill connections. Options: ADDR, LADDR, ID, TYPE, USER, SKIPME, MAXAGE.",
    "LIST [TYPE type] [ID id ...]",
    "    Return information about client connections of the router.",
    "NO-EVICT (ON|OFF)",
    "    Accepted for compatibility.",
    "NO-TOUCH (ON|OFF)",
    "    Will not touch LRU/LFU stats when this mode is on.",
    "REPLY (ON|OFF|SKIP)",
    "    Control the replies sent to the current connection.",
    "SETINFO <option> <value>",
    "    Set client meta attr. Options: LIB-NAME, LIB-VER.",
    "SETNAME <name>",
    "    Assign the name <name> to the current connection.",
    "UNBLOCK <clientid> [TIMEOUT|ERROR]",
    "    Unblock the specified blocked client.",
    "HELP",
    "    Print this help.",
];

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn client_type(name: &[u8]) -> Result<Option<ClientType>, String> {
    match text(name).to_ascii_lowercase().as_str() {
        "normal" => Ok(Some(ClientType::Normal)),
        "pubsub" => Ok(Some(ClientType::Pubsub)),
        "master" | "primary" | "replica" | "slave" => Ok(Some(ClientType::Server)),
        _ => Err(format!("ERR Unknown client type '{}'", text(name))),
    }
}

fn list_filter(args: &Args<'_>) -> Result<ClientFilter, String> {
    let mut filter = ClientFilter::default();
    match args.get(2) {
        None => {}
        Some(option) if option.eq_ignore_ascii_case(b"TYPE") && args.len() == 4 => {
            filter.client_type = client_type(args.get(3).unwrap_or_default())?;
        }
        Some(option) if option.eq_ignore_ascii_case(b"ID") && args.len() > 3 => {
            let ids: Option<Vec<u64>> = args.iter().skip(3).map(|id| parse(id).filter(|id| *id > 0)).collect();
            filter.ids = Some(ids.ok_or("ERR Invalid client ID")?);
        }
        Some(_) => return Err("ERR syntax error".into()),
    }
    Ok(filter)
}

fn kill_filter(args: &Args<'_>, own_id: u64, users: &Users) -> Result<(ClientFilter, Aggregation), String> {
    let mut filter = ClientFilter::default();
    if args.len() == 3 {
        filter.addr = Some(text(args.get(2).unwrap_or_default()));
        return Ok((filter, Aggregation::ClientKillOne));
    }
    filter.skip = Some(own_id);
    let mut index = 2;
    while index < args.len() {
        let option = text(args.get(index).unwrap_or_default()).to_ascii_lowercase();
        let Some(value) = args.get(index + 1) else { return Err("ERR syntax error".into()) };
        match option.as_str() {
            "id" => {
                let id = parse::<u64>(value).filter(|id| *id > 0).ok_or("ERR client-id should be greater than 0")?;
                filter.ids = Some(vec![id]);
            }
            "addr" => filter.addr = Some(text(value)),
            "laddr" => filter.laddr = Some(text(value)),
            "type" => filter.client_type = client_type(value)?,
            "user" if users.get(value).is_some() => filter.user = Some(text(value)),
            "user" => return Err(format!("ERR No such user '{}'", text(value))),
            "maxage" => filter.max_age_s = Some(parse(value).ok_or("ERR maxage is not an integer or out of range")?),
            "skipme" if value.eq_ignore_ascii_case(b"yes") => filter.skip = Some(own_id),
            "skipme" if value.eq_ignore_ascii_case(b"no") => filter.skip = None,
            _ => return Err("ERR syntax error".into()),
        }
        index += 2;
    }
    Ok((filter, Aggregation::Merged(switchyard_resp::command::Merge::Sum)))
}

fn matches(turn: &Turn, client: &Client, filter: &ClientFilter) -> bool {
    let who = client.identity();
    let addr = |a: Option<std::net::SocketAddr>| a.map(|a| a.to_string());
    let own_type = if client.subscribed() > 0 { ClientType::Pubsub } else { ClientType::Normal };
    filter.client_type.is_none_or(|t| t == own_type)
        && filter.ids.as_ref().is_none_or(|ids| ids.contains(&who.id()))
        && (filter.addr.is_none() || filter.addr == addr(who.peer()))
        && (filter.laddr.is_none() || filter.laddr == addr(who.local()))
        && filter.user.as_deref().is_none_or(|u| u == who.user().name())
        && filter.skip != Some(who.id())
        && filter.max_age_s.is_none_or(|age| who.age_us(turn.now_us()) / 1_000_000 >= age)
}

/// Closes the matching clients of this worker and returns their number as a reply. A client that kills itself still
/// gets its reply. Others get no pending replies, as in Redis: a reply may never come, for example if the rest of
/// its request is not read any more.
pub(super) fn kill_clients(
    turn: &Turn,
    down: &mut Downstreams,
    filter: &ClientFilter,
    killer: Option<Handle>,
) -> Vec<u8> {
    let victims: Vec<Handle> = down.iter().filter(|(_, c)| matches(turn, c, filter)).map(|(h, _)| h).collect();
    let mut reply = Vec::new();
    encode::integer(&mut reply, victims.len() as i64);
    for victim in victims {
        if killer == Some(victim) { down.close_after_replies(victim) } else { down.close_client(turn, victim) }
    }
    reply
}

impl Gathers {
    fn query_workers(
        &mut self,
        turn: &Turn,
        down: &mut Downstreams,
        handle: Handle,
        class: u8,
        filter: ClientFilter,
        whole: Aggregation,
        message: impl Fn(Arc<ClientFilter>, usize, Handle, u32) -> Message,
    ) -> Flow {
        let workers = turn.shared().mailboxes.len();
        let Some(gather) = self.begin_gather(turn, down, handle, class, workers, whole) else { return Flow::Close };
        let filter = Arc::new(filter);
        for worker in 0..workers {
            turn.shared().mailboxes[worker].send(message(filter.clone(), turn.index(), gather, worker as u32));
        }
        Flow::Next
    }
}

impl Gathers {
    pub(super) fn client_command(
        &mut self,
        turn: &Turn,
        up: &Upstreams,
        down: &mut Downstreams,
        hooks: &mut CommandHooks,
        call: &Invocation<'_>,
        local: Local,
    ) -> Flow {
        let Invocation { handle, args, .. } = *call;
        let class = call.class();
        let arg = |index: usize| args.get(index).unwrap_or_default();
        let is = |index: usize, word: &str| arg(index).eq_ignore_ascii_case(word.as_bytes());
        let now_us = turn.now_us();
        let routing = turn.routing().clone();
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        let mut out = Vec::new();
        match local {
            Local::ClientId => encode::integer(&mut out, client.identity().id() as i64),
            Local::ClientGetname if client.identity().name().is_empty() => encode::null(&mut out, client.resp3()),
            Local::ClientGetname => encode::bulk(&mut out, client.identity().name().as_bytes()),
            Local::ClientSetname => {
                if !is_valid_name(arg(2)) {
                    return down.refuse(turn, handle, class, INVALID_NAME);
                }
                client.identity_mut().rename(String::from_utf8_lossy(arg(2)).into_owned());
                out.extend_from_slice(b"+OK\r\n");
            }
            Local::ClientSetinfo => {
                let option = String::from_utf8_lossy(arg(2)).into_owned();
                if !is_valid_name(arg(3)) {
                    return down.refuse(
                        turn,
                        handle,
                        class,
                        &format!("ERR {option} cannot contain spaces, newlines or special characters."),
                    );
                }
                let value = String::from_utf8_lossy(arg(3)).into_owned();
                match option.to_ascii_lowercase().as_str() {
                    "lib-name" => *client.identity_mut().library().0 = value,
                    "lib-ver" => *client.identity_mut().library().1 = value,
                    _ => {
                        return down.refuse(turn, handle, class, &format!("ERR Unrecognized option '{option}'"));
                    }
                }
                out.extend_from_slice(b"+OK\r\n");
            }
            Local::ClientInfo => {
                let command = routing.commands.get(client.last_command()).map_or("NULL", |c| &c.name);
                let Some(client) = down.get(handle) else { return Flow::Close };
                let text = client.describe(now_us, command, is_dirty(turn, up, hooks, handle, client));
                encode::verbatim(&mut out, text.as_bytes(), client.resp3());
            }
            Local::ClientNoEvict | Local::ClientNoTouch => {
                let on = is(2, "ON");
                if !on && !is(2, "OFF") {
                    return down.refuse(turn, handle, class, "ERR syntax error");
                }
                if local == Local::ClientNoTouch {
                    let keepers = routing.topology.nodes().filter(|node| turn.data_nodes().has(node.id));
                    if on
                        && !keepers
                            .map(|node| node.id)
                            .all(|id| turn.shared().with_facts(id, |facts| knows_no_touch(&facts.redis_version)))
                    {
                        return down.refuse(turn, handle, class, "ERR unknown subcommand 'NO-TOUCH'. Try CLIENT HELP.");
                    }
                    client.set_no_touch(on);
                } else {
                    client.identity_mut().keep(on);
                }
                out.extend_from_slice(b"+OK\r\n");
            }
            Local::ClientReply => {
                if is(2, "ON") {
                    client.replies_mut().set_mode(ReplyMode::On);
                    out.extend_from_slice(b"+OK\r\n");
                } else if is(2, "OFF") || is(2, "SKIP") {
                    // Neither is answered. Otherwise a SKIP after OFF would turn replies on again.
                    if is(2, "OFF") {
                        client.replies_mut().set_mode(ReplyMode::Off);
                    } else {
                        client.replies_mut().skip_next();
                    }
                    return Flow::Next;
                } else {
                    return down.refuse(turn, handle, class, "ERR syntax error");
                }
            }
            Local::ClientHelp => {
                encode::header(&mut out, b'*', HELP.len());
                for line in HELP {
                    encode::simple(&mut out, line);
                }
            }
            Local::ClientList => {
                return match list_filter(args) {
                    Ok(filter) => self.query_workers(
                        turn,
                        down,
                        handle,
                        class,
                        filter,
                        Aggregation::ClientList,
                        |filter, from, gather, part| Message::List { filter, from, gather, part },
                    ),
                    Err(error) => down.refuse(turn, handle, class, &error),
                };
            }
            Local::ClientKill => {
                let id = client.identity().id();
                return match kill_filter(args, id, &routing.live.users) {
                    // The filter may match this client: its later commands are executed only if it does not.
                    Ok((filter, _)) if filter.skip != Some(id) && !client.may_take(Lane::Rounds) => {
                        Flow::Stall(Stall::Barrier)
                    }
                    Ok((filter, whole)) => {
                        self.query_workers(turn, down, handle, class, filter, whole, |filter, from, gather, part| {
                            Message::Kill { filter, from, gather, part }
                        })
                    }
                    Err(error) => down.refuse(turn, handle, class, &error),
                };
            }
            Local::ClientUnblock => {
                let Some(id) = parse::<i64>(arg(2)) else {
                    return down.refuse(turn, handle, class, "ERR value is not an integer or out of range");
                };
                if args.len() > 4 {
                    return down.refuse(
                        turn,
                        handle,
                        class,
                        "ERR unknown subcommand or wrong number of arguments for 'UNBLOCK'. Try CLIENT HELP.",
                    );
                }
                let error = is(3, "ERROR");
                if args.len() == 4 && !error && !is(3, "TIMEOUT") {
                    return down.refuse(turn, handle, class, "ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR");
                }
                let id = id as u64;
                let whole = Aggregation::Merged(switchyard_resp::command::Merge::Sum);
                return self.query_workers(
                    turn,
                    down,
                    handle,
                    class,
                    ClientFilter::default(),
                    whole,
                    |_, from, gather, part| Message::Unblock { id, error, from, gather, part },
                );
            }
            // CLIENT CAPA announces support of redirects, which the router never sends.
            _ => out.extend_from_slice(b"+OK\r\n"),
        }
        down.answer(turn, handle, class, &out);
        Flow::Next
    }
}

/// Returns the matching clients of this worker, as a text reply.
pub(super) fn list_clients(
    turn: &Turn,
    up: &Upstreams,
    down: &Downstreams,
    hooks: &CommandHooks,
    filter: &ClientFilter,
) -> Vec<u8> {
    let mut text = String::new();
    for (handle, client) in down.iter().filter(|(_, c)| matches(turn, c, filter)) {
        let command = turn.routing().commands.get(client.last_command()).map_or("NULL", |c| &c.name);
        text.push_str(&client.describe(turn.now_us(), command, is_dirty(turn, up, hooks, handle, client)));
    }
    let mut reply = Vec::new();
    encode::bulk(&mut reply, text.as_bytes());
    reply
}
