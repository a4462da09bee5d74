//! Who uses a node past the router: clients that would not notice when a key moves.

use std::collections::BTreeSet;
use std::fmt;

use switchyard_resp::command::{CommandTable, Flags, Handling};

/// How connections of routers are named, before what names their state directory.
const ROUTER: &str = "switchyard-";

/// How connections are named that look at a node, and try what it takes, for a moment.
pub const LOOKING: &str = "switchyard-doctor";

/// How others of ours are named, that only look.
const OTHERS: [&str; 2] = [LOOKING, "switchyard-standby"];

/// A client of a node that is not this router's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectClient {
    /// Where it comes from.
    pub address: String,
    /// What it calls itself.
    pub name: String,
    /// As whom it has logged in.
    pub user: String,
    /// Its last command.
    pub command: String,
    /// That may write.
    pub writes: bool,
}

impl fmt::Display for DirectClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address)?;
        if !self.name.is_empty() {
            write!(f, ", named {}", self.name)?;
        }
        if !self.user.is_empty() && self.user != "default" {
            write!(f, ", user {}", self.user)?;
        }
        write!(f, ", last command {}", self.command)
    }
}

/// Those in the reply to CLIENT LIST that use keys: not replicas, not those who only look (INFO, CLIENT, PING), and not
/// routers, which [`routers`] finds.
pub fn direct_clients(list: &str) -> Vec<DirectClient> {
    let table = CommandTable::builtin();
    let mut found = Vec::new();
    for line in list.lines() {
        let field = |name: &str| line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('=')).unwrap_or_default();
        // Replicas, the primary, and those in MONITOR.
        let other_role = field("flags").contains(['S', 'M', 'O']);
        let name = field("name");
        if line.trim().is_empty() || site_of(name).is_some() || OTHERS.contains(&name) || other_role {
            continue;
        }
        let command = field("cmd").to_ascii_lowercase();
        // An unknown command is one of a module: it may well write.
        let known = table.by_name(&command);
        let uses_keys = match known {
            Some(known) => matches!(known.handling, Handling::Keyed | Handling::Split(_)) || known.flags.has(Flags::WRITE),
            None => !command.is_empty() && command != "null",
        };
        if !uses_keys {
            continue;
        }
        found.push(DirectClient {
            address: field("addr").to_owned(),
            name: name.to_owned(),
            user: field("user").to_owned(),
            writes: known.is_none_or(|known| !known.flags.has(Flags::READONLY)),
            command,
        });
    }
    found
}

/// The routers in the reply to CLIENT LIST, each by what names its state directory there.
pub fn routers(list: &str) -> BTreeSet<String> {
    let names = list.lines().filter_map(|line| line.split(' ').find_map(|word| word.strip_prefix("name=")));
    names.filter_map(site_of).map(str::to_owned).collect()
}

/// What names the state directory of the router whose connection has this name.
fn site_of(name: &str) -> Option<&str> {
    let mut parts = name.strip_prefix(ROUTER)?.split('-');
    let site = parts.next()?;
    // The run follows, and whose connection it is.
    (site.len() == 8 && site.bytes().all(|byte| byte.is_ascii_hexdigit()) && parts.count() >= 3).then_some(site)
}

/// Major and minor version of Redis that a node is, or is compatible with, from INFO.
pub fn redis_version(info: &str) -> Option<(u32, u32)> {
    let text = info.lines().find_map(|line| line.trim().strip_prefix("redis_version:"))?;
    let mut parts = text.split('.').map(|part| part.parse().ok());
    Some((parts.next()??, parts.next()??))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_who_use_keys_count() {
        let list = "id=3 addr=10.0.0.1:5 laddr=10.0.0.9:6379 name= flags=N cmd=set user=default resp=2\n\
            id=4 addr=10.0.0.1:6 name=switchyard-0a1b2c3d-1f-62-0 flags=N cmd=set user=default\n\
            id=5 addr=10.0.0.2:6 name= flags=S cmd=replconf user=default\n\
            id=6 addr=10.0.0.3:6 name=prometheus flags=N cmd=info user=default\n\
            id=7 addr=10.0.0.3:7 name=worker flags=N cmd=get user=app\n\
            id=8 addr=10.0.0.3:8 name= flags=N cmd=NULL user=default\n\
            id=9 addr=10.0.0.3:9 name= flags=N cmd=client|list user=default\n\
            id=10 addr=10.0.0.4:1 name= flags=b cmd=blpop user=default\n\
            id=11 addr=10.0.0.4:2 name= flags=N cmd=xgroup|create user=default\n\
            id=12 addr=10.0.0.4:3 name= flags=N cmd=json.set user=default\n\
            id=13 addr=10.0.0.4:4 name=switchyard-doctor flags=N cmd=get user=default\n\
            id=14 addr=10.0.0.4:5 name=switchyard-shop flags=N cmd=hset user=default\n\n";
        let found: Vec<(String, bool)> = direct_clients(list).into_iter().map(|c| (c.command, c.writes)).collect();
        let expected = [("set", true), ("get", false), ("blpop", true), ("xgroup|create", true), ("json.set", true), ("hset", true)];
        assert_eq!(found, expected.map(|(command, writes)| (command.to_owned(), writes)));
        assert_eq!(direct_clients(list)[1].to_string(), "10.0.0.3:7, named worker, user app, last command get");
    }

    #[test]
    fn routers_are_told_by_the_names_of_their_connections() {
        let list = "id=4 addr=10.0.0.1:6 name=switchyard-0a1b2c3d-1f-62-0 flags=N cmd=set\n\
            id=5 addr=10.0.0.1:7 name=switchyard-0a1b2c3d-1f-62-mover flags=N cmd=get\n\
            id=6 addr=10.0.0.1:8 name=switchyard-doctor flags=N cmd=client\nid=7 addr=10.0.0.1:9 name=switchyard-deadbeef flags=N\n";
        assert_eq!(routers(list).into_iter().collect::<Vec<_>>(), ["0a1b2c3d"]);
    }

    #[test]
    fn versions_are_read() {
        assert_eq!(redis_version("# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\n"), Some((7, 2)));
        assert_eq!(redis_version("redis_mode:standalone\r\n"), None);
    }
}
