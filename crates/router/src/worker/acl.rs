//! ACL commands. Changes of users are forwarded to a thread that may block, because they hash passwords and write
//! files. The client is answered when every worker has adopted the change.

use switchyard_resp::command::{CATEGORIES, Categories, Local, Lookup, Merge, errors};
use switchyard_resp::encode;
use switchyard_resp::request::Scanner;

use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::{Aggregation, Gathers};
use super::invocation::Invocation;
use super::login::awaits_users;
use super::turn::Turn;
use crate::lane::Lane;
use crate::lock::lock;
use crate::operator::{CallingClient, OperatorCommand};
use crate::slab::Handle;

/// Default number of entries shown by ACL LOG, as in Redis.
const LOG_SHOWN: usize = 10;

pub(super) fn acl(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>, local: Local) -> Flow {
    let Invocation { routing, handle, args, .. } = *call;
    let class = call.class();
    if awaits_users(down, handle) {
        return Flow::Stall(Stall::Barrier);
    }
    let users = &routing.live.users;
    let arg = |index: usize| args.get(index).unwrap_or_default();
    let Some(client) = down.get(handle) else { return Flow::Close };
    let resp3 = client.resp3();
    let mut out = Vec::new();
    match local {
        Local::AclUsers => {
            encode::header(&mut out, b'*', users.iter().len());
            users.iter().for_each(|user| encode::bulk(&mut out, user.name().as_bytes()));
        }
        Local::AclList => {
            encode::header(&mut out, b'*', users.iter().len());
            users.iter().for_each(|user| encode::bulk(&mut out, user.line(false).as_bytes()));
        }
        Local::AclGetuser => match users.get(arg(2)) {
            None => encode::null(&mut out, resp3),
            Some(user) => {
                encode::map(&mut out, 6, resp3);
                let mut list = |name: &str, items: &[&str], kind: u8| {
                    encode::bulk(&mut out, name.as_bytes());
                    encode::header(&mut out, kind, items.len());
                    items.iter().for_each(|item| encode::bulk(&mut out, item.as_bytes()));
                };
                list("flags", &user.flags(), if resp3 { b'~' } else { b'*' });
                list("passwords", &vec!["hidden"; user.passwords()], b'*');
                for (name, text) in [
                    ("commands", user.describe_commands()),
                    ("keys", user.describe_keys()),
                    ("channels", user.describe_channels()),
                ] {
                    encode::bulk(&mut out, name.as_bytes());
                    encode::bulk(&mut out, text.as_bytes());
                }
                encode::bulk(&mut out, b"selectors");
                out.extend_from_slice(b"*0\r\n");
            }
        },
        Local::AclCat if args.len() == 2 => {
            encode::header(&mut out, b'*', CATEGORIES.len());
            CATEGORIES.iter().for_each(|name| encode::bulk(&mut out, name.as_bytes()));
        }
        Local::AclCat if args.len() == 3 => {
            let name = String::from_utf8_lossy(arg(2)).into_owned();
            let Some(category) = Categories::named(&name) else {
                return down.refuse(turn, handle, class, &format!("ERR Unknown category '{name}'"));
            };
            let commands: Vec<_> = routing.commands.iter().filter(|c| c.categories().intersects(category)).collect();
            encode::header(&mut out, b'*', commands.len());
            commands.iter().for_each(|command| encode::bulk(&mut out, command.name.to_ascii_lowercase().as_bytes()));
        }
        Local::AclLog if args.len() == 3 && arg(2).eq_ignore_ascii_case(b"RESET") => {
            lock(&turn.shared().acl_log).clear();
            encode::simple(&mut out, "OK");
        }
        Local::AclLog if args.len() <= 3 => {
            let Some(count) = args.get(2).map_or(Some(LOG_SHOWN as i64), parse::<i64>) else {
                return down.refuse(turn, handle, class, "ERR value is not an integer or out of range");
            };
            lock(&turn.shared().acl_log).show(usize::try_from(count).unwrap_or(0), resp3, &mut out);
        }
        Local::AclGenpass if args.len() <= 3 => {
            let Some(bits) = args.get(2).map_or(Some(256), parse::<i64>) else {
                return down.refuse(turn, handle, class, "ERR value is not an integer or out of range");
            };
            let Some(bits) = usize::try_from(bits).ok().filter(|bits| (1..=4096).contains(bits)) else {
                let text = "ERR ACL GENPASS argument must be the number of bits for the output password, a positive number up to 4096";
                return down.refuse(turn, handle, class, text);
            };
            let mut bytes = vec![0; bits.div_ceil(8)];
            if rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut bytes).is_err() {
                return down.refuse(turn, handle, class, "ERR the system has no random bytes");
            }
            encode::bulk(&mut out, &hex::encode(bytes).as_bytes()[..bits.div_ceil(4)]);
        }
        Local::AclDryrun => return acl_dry_run(turn, down, call),
        _ => {
            let name = String::from_utf8_lossy(arg(1)).to_ascii_uppercase();
            let text = format!("ERR unknown subcommand or wrong number of arguments for '{name}'. Try ACL HELP.");
            return down.refuse(turn, handle, class, &text);
        }
    }
    down.answer(turn, handle, class, &out);
    Flow::Next
}

fn acl_dry_run(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
    let Invocation { routing, handle, args, .. } = *call;
    let class = call.class();
    let shown = |index: usize| String::from_utf8_lossy(args.get(index).unwrap_or_default()).into_owned();
    let Some(user) = routing.live.users.get(args.get(2).unwrap_or_default()) else {
        return down.refuse(turn, handle, class, &format!("ERR User '{}' not found", shown(2)));
    };
    // The remaining arguments form a command.
    let mut request = Vec::new();
    encode::command(&mut request, args.iter().skip(3).collect::<Vec<_>>());
    let Some(scanner) = Scanner::again(&request) else {
        return down.refuse(turn, handle, class, "ERR syntax error");
    };
    let call = scanner.args(&request);
    let Lookup::Command(command) = routing.commands.find(&call) else {
        return down.refuse(turn, handle, class, &format!("ERR Command '{}' not found", shown(3)));
    };
    if !command.arity_ok(call.len()) {
        return down.refuse(turn, handle, class, &errors::arity(command));
    }
    let mut out = Vec::new();
    match user.check(command, &call, &mut Vec::new()) {
        Ok(()) => out.extend_from_slice(b"+OK\r\n"),
        Err(denied) => encode::bulk(&mut out, denied.dry_run_text(command, &call).as_bytes()),
    }
    down.answer(turn, handle, class, &out);
    Flow::Next
}

impl Gathers {
    /// Forwards `ACL SETUSER`, `DELUSER`, `SAVE` and `LOAD`. Later commands of the connection that read users wait for
    /// the reply.
    pub(super) fn change_users(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { handle, args, .. } = *call;
        let class = call.class();
        let Some(port) = turn.shared().ports.users.clone() else {
            return down.refuse(turn, handle, class, "ERR users of this router cannot be changed");
        };
        let Some(asker) = asker(down, handle) else { return Flow::Close };
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        client.replies_mut().take_lane(Lane::Rounds);
        let words = args.iter().skip(1).map(<[u8]>::to_vec).collect();
        let parts = 1 + turn.shared().mailboxes.len();
        let Some(gather) = self.begin_gather(turn, down, handle, class, parts, Aggregation::Merged(Merge::Same)) else {
            return Flow::Close;
        };
        port.take(
            OperatorCommand::new(words, asker, turn.shared().mailboxes.clone(), turn.index(), gather).when_adopted(),
        );
        Flow::Next
    }
}

/// Returns the description of a client for operator commands.
pub(super) fn asker(down: &Downstreams, handle: Handle) -> Option<CallingClient> {
    let client = down.get(handle)?;
    let address = client.identity().origin();
    let who = format!("the user {} from {address}", client.identity().user().name());
    Some(CallingClient { who, may_operate: client.identity().user().is_operator(), resp3: client.resp3() })
}
