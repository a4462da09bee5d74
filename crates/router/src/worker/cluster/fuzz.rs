//! Fuzz target: replies to CLUSTER commands for any announced addresses and arguments, and any reply of a node to the
//! search for the keys of a slot.

use switchyard_policy::topology::SLOT_COUNT;
use switchyard_resp::reply::{self, ReplyScan, ReplyScanner};

use super::{Member, emulated, members_of, scanned, slot_and_count};

const SUBCOMMANDS: [&str; 11] = [
    "MYID",
    "MYSHARDID",
    "LINKS",
    "SLOTS",
    "SHARDS",
    "NODES",
    "INFO",
    "REPLICAS",
    "SLAVES",
    "COUNT-FAILURE-REPORTS",
    "FORGET",
];

/// Checks that each reply is one whole reply, and that SLOTS, SHARDS and NODES have the same members, which share all
/// slots.
///
/// # Panics
/// If one of these is wrong.
pub fn cluster(input: &[u8]) {
    let Some((&[flags, own], rest)) = input.split_first_chunk::<2>() else { return };
    let mut lines = rest.split(|byte| *byte == b'\n');
    let (id, count) = (lines.next().unwrap_or_default(), lines.next());
    if let Ok((slot, count)) = slot_and_count(Some(id), count) {
        assert!(usize::from(slot.number()) < SLOT_COUNT);
        assert!(count.is_none_or(|count| i64::try_from(count).is_ok()));
    }
    let (cursor, keys) = scanned(rest);
    assert!(cursor.len() + keys.map(<[u8]>::len).sum::<usize>() <= rest.len() + 1, "keys overlap");

    let addresses: Vec<(String, u16)> = lines.filter_map(address).take(SLOT_COUNT).collect();
    if addresses.is_empty() {
        return;
    }
    let members = members_of(&addresses);
    let own = usize::from(own) % members.len();
    let failed = usize::from(flags >> 1) * SLOT_COUNT / 127;
    let resp3 = flags & 1 == 1;
    for subcommand in SUBCOMMANDS {
        for id in [id, members[own].id.as_bytes()] {
            if let Ok(reply) = emulated(subcommand, id, &members, own, || failed, resp3) {
                assert_eq!(ReplyScanner::default().scan(&reply), Ok(ReplyScan::Complete(reply.len())), "{subcommand}");
            }
        }
    }
    check_members(&members, own, resp3);
}

/// `HOST PORT`. The configuration accepts only hosts of these characters.
fn address(line: &[u8]) -> Option<(String, u16)> {
    let (host, port) = std::str::from_utf8(line).ok()?.split_once(' ')?;
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    Some((host.to_owned(), port.parse().ok()?)).filter(|_| host.chars().all(fits))
}

/// First slot, last slot, host, port, id.
type Row = (i64, i64, String, i64, String);

fn check_members(members: &[Member], own: usize, resp3: bool) {
    let reply = |subcommand| emulated(subcommand, b"", members, own, || 0, resp3).expect("a reply");
    let (slots, shards, nodes) = (reply("SLOTS"), reply("SHARDS"), reply("NODES"));
    let slots: Vec<Row> = reply::elements(&slots).map(slots_row).collect();
    let mut next = 0;
    for (first, last, ..) in &slots {
        assert_eq!(*first, next, "no gap and no overlap");
        assert!(last >= first);
        next = last + 1;
    }
    assert_eq!(next, SLOT_COUNT as i64);
    assert_eq!(reply::elements(&shards).map(shards_row).collect::<Vec<_>>(), slots);
    let text = reply::text(&nodes).expect("a text");
    let text = std::str::from_utf8(text).expect("UTF-8");
    assert_eq!(text.lines().map(nodes_row).collect::<Vec<_>>(), slots);
    assert_eq!(text.matches("myself,").count(), 1);
}

fn text(reply: &[u8]) -> String {
    String::from_utf8(reply::text(reply).expect("a text").to_vec()).expect("UTF-8")
}

fn integer(reply: &[u8]) -> i64 {
    reply::integer(reply).expect("an integer")
}

fn slots_row(member: &[u8]) -> Row {
    let fields: Vec<&[u8]> = reply::elements(member).collect();
    let server: Vec<&[u8]> = reply::elements(fields[2]).collect();
    (integer(fields[0]), integer(fields[1]), text(server[0]), integer(server[1]), text(server[2]))
}

fn shards_row(shard: &[u8]) -> Row {
    let fields: Vec<&[u8]> = reply::elements(shard).collect();
    let range: Vec<&[u8]> = reply::elements(fields[1]).collect();
    let node = reply::elements(fields[3]).next().expect("a node");
    let pairs: Vec<&[u8]> = reply::elements(node).collect();
    let field = |name: &str| pairs.chunks(2).find(|pair| text(pair[0]) == name).expect("a field")[1];
    (integer(range[0]), integer(range[1]), text(field("endpoint")), integer(field("port")), text(field("id")))
}

fn nodes_row(line: &str) -> Row {
    let fields: Vec<&str> = line.split(' ').collect();
    let (host, port) = fields[1].rsplit_once(':').expect("a host and a port");
    let (first, last) = fields[8].split_once('-').expect("a range");
    let number = |text: &str| text.parse::<i64>().expect("a number");
    let (port, _) = port.split_once('@').expect("a port of the bus");
    (number(first), number(last), host.to_owned(), number(port), fields[0].to_owned())
}
