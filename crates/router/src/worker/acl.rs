//! ACL, as far as it reads: who there is, and what they may do. Users are changed in the users file only: a change over the data port would
//! be lost with the next start, or differ between two routers.

use switchyard_resp::command::{CATEGORIES, Categories, Local, Lookup, errors};
use switchyard_resp::encode;
use switchyard_resp::request::{Args, Limits, Scan, Scanner};

use super::Worker;
use super::dispatch::Flow;
use crate::shared::Plan;
use crate::slab::Handle;

impl Worker {
    pub(super) fn acl(&mut self, plan: &Plan, handle: Handle, class: u8, local: Local, args: &Args<'_>) -> Flow {
        let users = &plan.live.users;
        let arg = |index: usize| args.get(index).unwrap_or_default();
        let Some(client) = self.clients.get(handle) else { return Flow::Close };
        let resp3 = client.resp3;
        let mut out = Vec::new();
        match local {
            Local::AclUsers => {
                encode::header(&mut out, b'*', users.iter().len());
                users.iter().for_each(|user| encode::bulk(&mut out, user.name().as_bytes()));
            }
            Local::AclList => {
                encode::header(&mut out, b'*', users.iter().len());
                users.iter().for_each(|user| encode::bulk(&mut out, user.describe().as_bytes()));
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
                    for (name, text) in
                        [("commands", user.describe_commands()), ("keys", user.describe_keys()), ("channels", user.describe_channels())]
                    {
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
                    return self.refuse(handle, class, &format!("ERR Unknown category '{name}'"));
                };
                let commands: Vec<_> = plan.commands.iter().filter(|c| c.categories().meets(category)).collect();
                encode::header(&mut out, b'*', commands.len());
                commands.iter().for_each(|command| encode::bulk(&mut out, command.name.to_ascii_lowercase().as_bytes()));
            }
            Local::AclDryrun => return self.acl_dry_run(plan, handle, class, args),
            _ => return self.refuse(handle, class, "ERR unknown subcommand or wrong number of arguments for 'CAT'. Try ACL HELP."),
        }
        self.answer(handle, class, &out);
        Flow::Next
    }

    fn acl_dry_run(&mut self, plan: &Plan, handle: Handle, class: u8, args: &Args<'_>) -> Flow {
        let shown = |index: usize| String::from_utf8_lossy(args.get(index).unwrap_or_default()).into_owned();
        let Some(user) = plan.live.users.get(args.get(2).unwrap_or_default()) else {
            return self.refuse(handle, class, &format!("ERR User '{}' not found", shown(2)));
        };
        // The rest of the arguments is a command of its own.
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().skip(3).collect::<Vec<_>>());
        let mut scanner = Scanner::default();
        let limits = Limits { argument_max: usize::MAX >> 1, large: usize::MAX, authenticated: true };
        if !matches!(scanner.scan(&request, &limits), Ok(Scan::Complete { .. })) {
            return self.refuse(handle, class, "ERR syntax error");
        }
        let call = scanner.args(&request);
        let Lookup::Command(command) = plan.commands.find(&call) else {
            return self.refuse(handle, class, &format!("ERR Command '{}' not found", shown(3)));
        };
        if !command.arity_ok(call.len()) {
            return self.refuse(handle, class, &errors::arity(command));
        }
        let mut out = Vec::new();
        match user.check(command, &call, &mut Vec::new()) {
            Ok(()) => out.extend_from_slice(b"+OK\r\n"),
            Err(denied) => encode::bulk(&mut out, denied.dry_run_text(command, &call).as_bytes()),
        }
        self.answer(handle, class, &out);
        Flow::Next
    }
}
