//! Replies of servers to reads of a missing key. Double reads treat every other reply as proof that the key exists
//! (`reply::may_be_missing_key`).

use switchyard_resp::command::{CommandTable, Flags, Handling};
use switchyard_resp::reply;

use crate::server::{Arguments, error_text, servers, shown};

/// Arguments after the key, for reads that need more than a name and a key. The test lists reads without a known call.
const CALLS: &[&str] = &[
    "BITFIELD_RO nokey GET u8 0",
    "BITPOS nokey 1",
    "BITPOS nokey 0",
    "GEODIST nokey a b",
    "GEOHASH nokey a b",
    "GEOPOS nokey a b",
    "GEORADIUSBYMEMBER_RO nokey a 1 km",
    "GEORADIUS_RO nokey 1 1 1 km",
    "GEOSEARCH nokey FROMLONLAT 1 1 BYRADIUS 1 km",
    "HEXPIRETIME nokey FIELDS 1 a",
    "HMGET nokey a b",
    "HPEXPIRETIME nokey FIELDS 1 a",
    "HPTTL nokey FIELDS 1 a",
    "HTTL nokey FIELDS 1 a",
    "HRANDFIELD nokey 3 WITHVALUES",
    "LPOS nokey a COUNT 2",
    "LRANGE nokey 0 -1",
    "SMISMEMBER nokey a b",
    "SORT_RO nokey",
    "XINFO STREAM nokey",
    "XPENDING nokey g",
    "XRANGE nokey - +",
    "XREVRANGE nokey + -",
    "ZCOUNT nokey -inf +inf",
    "ZLEXCOUNT nokey - +",
    "ZMSCORE nokey a b",
    "ZRANDMEMBER nokey 3 WITHSCORES",
    "ZRANGEBYLEX nokey - +",
    "ZRANGEBYSCORE nokey -inf +inf WITHSCORES",
    "ZREVRANGEBYLEX nokey + -",
    "ZREVRANGEBYSCORE nokey +inf -inf",
];

/// A read of one key for double reads; `None` for other commands.
fn plain_call(name: &str, arity: i16) -> Vec<String> {
    let words = name.split('|').map(str::to_owned);
    let missing = usize::from(arity.unsigned_abs()).saturating_sub(name.split('|').count() + 1);
    words.chain(["nokey".to_owned()]).chain((0..missing).map(|_| "0".to_owned())).collect()
}

#[test]
fn a_read_of_a_missing_key_does_not_prove_a_key() {
    let table = CommandTable::builtin();
    for server in servers() {
        let mut asked = 0;
        for protocol in ["2", "3"] {
            let mut client = server.client();
            client.call(&["HELLO", protocol]);
            let of_servers = client.commands().into_iter().filter_map(|command| {
                let ours = table.by_name(&command.name.to_ascii_uppercase())?;
                let read = ours.flags.has(Flags::READONLY)
                    && !ours.flags.has(Flags::SCRIPT)
                    && !ours.flags.has(Flags::BLOCKING);
                let call = plain_call(&ours.name, ours.arity);
                let one_key = ours.first_key_only(&Arguments::new(&call).all()).is_some();
                (read && one_key && ours.handling == Handling::Keyed && !ours.flags.has(Flags::CURSOR))
                    .then_some((ours, call))
            });
            for (ours, call) in of_servers {
                let written = CALLS.iter().map(|line| line.split(' ').map(str::to_owned).collect::<Vec<_>>());
                let written: Vec<_> = written
                    .filter(|line| {
                        plain_call(&ours.name, ours.arity).starts_with(&line[..ours.name.split('|').count()])
                    })
                    .collect();
                for call in if written.is_empty() { vec![call] } else { written } {
                    let answer = client.call(&call);
                    let error = error_text(&answer).unwrap_or_default();
                    let is_wrong_call = ["syntax", "not an integer", "not a float", "wrong number", "unsupported unit"]
                        .iter()
                        .any(|words| error.contains(words));
                    assert!(!is_wrong_call, "{}: {}: {error}: a call for CALLS", server.program, shown(&call));
                    assert!(
                        reply::may_be_missing_key(&answer),
                        "{}: {}: {}",
                        server.program,
                        shown(&call),
                        answer.escape_ascii()
                    );
                    asked += 1;
                }
            }
        }
        assert!(asked > 90, "{}: only {asked} calls", server.program);
    }
}
