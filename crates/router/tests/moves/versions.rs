//! Servers of other versions and vendors, and preservation of usage data of keys.

use super::big::{hash, key_of, no_temporary_keys};
use super::fleet::{Client, Fleet, Server, default_program, other_programs, until, with};
use switchyard_policy::migration::Goal;
use switchyard_policy::topology::MoveId;
use switchyard_router::{MoveEnd, UserRequest};

const COUNT: usize = 60;

fn fill(client: &mut Client) {
    for n in 0..COUNT {
        for line in [
            format!("SET {{{n}}}string value{n}"),
            format!("SET {{{n}}}mortal value EX 1000"),
            format!("RPUSH {{{n}}}list a b c"),
            format!("HSET {{{n}}}hash f v g w"),
            format!("SADD {{{n}}}set 1 2 3"),
            format!("ZADD {{{n}}}zset 1 a 2 b"),
            format!("XADD {{{n}}}stream 1-1 f v"),
        ] {
            assert!(!client.cmd(&line).starts_with('-'), "{line}");
        }
    }
}

#[track_caller]
fn all_there(client: &mut Client) {
    for n in 0..COUNT {
        for (line, expected) in [
            (format!("GET {{{n}}}string"), format!("value{n}")),
            (format!("LRANGE {{{n}}}list 0 -1"), "[a, b, c]".to_owned()),
            (format!("HGET {{{n}}}hash g"), "w".to_owned()),
            (format!("SCARD {{{n}}}set"), "3".to_owned()),
            (format!("ZRANGE {{{n}}}zset 0 -1 WITHSCORES"), "[a, 1, b, 2]".to_owned()),
            (format!("XRANGE {{{n}}}stream - +"), "[[1-1, [f, v]]]".to_owned()),
        ] {
            assert_eq!(client.cmd(&line), expected, "{line}");
        }
        let left: i64 = client.cmd(&format!("PTTL {{{n}}}mortal")).parse().expect("a time");
        assert!((900_000..=1_000_000).contains(&left), "{left}");
    }
}

/// Moves between all pairs of servers complete, or are refused before any key has moved because the target cannot read
/// the dump format of the source.
#[test]
fn servers_of_other_versions_take_part() {
    let ours = default_program();
    for other in other_programs() {
        let mut done = 0;
        for (source, target) in [(&ours, &other), (&other, &ours), (&other, &other)] {
            let fleet = Fleet::with(vec![Server::of(source, &[]), Server::of(target, &[])]);
            let mut client = fleet.client();
            fill(&mut client);
            fleet.begin(fleet.task(1, 0, 1));
            let counted = std::thread::scope(|scope| {
                let (fleet, end) = (&fleet, scope.spawn(|| fleet.wait_for(1)));
                let mut client = fleet.client();
                let mut count = 0;
                while !end.is_finished() || count < 500 {
                    count += 1;
                    assert_eq!(client.cmd("INCR {counter}"), count.to_string());
                }
                count
            });
            assert_eq!(client.cmd("GET {counter}"), counted.to_string());
            all_there(&mut client);
            match fleet.wait_for(1) {
                MoveEnd::Done => {
                    done += 1;
                    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
                }
                MoveEnd::Stopped(why) => {
                    assert!(source != target && why.contains("is older than") && why.contains("Upgrade"), "{why}");
                    assert_eq!(fleet.progress(1).keys_moved, 0);
                }
            }
            eprintln!("{source} -> {target}: {:?}", fleet.wait_for(1));
        }
        assert!(done >= 2, "in one direction at least, and among themselves");
    }
}

#[test]
fn frequency_and_idle_time_move_with_a_key() {
    for (policy, hint) in [("allkeys-lfu", "FREQ"), ("allkeys-lru", "IDLETIME")] {
        let options = ["--maxmemory-policy", policy, "--lfu-decay-time", "0"];
        let fleet = Fleet::with(vec![Server::start(&options), Server::start(&options)]);
        let mut client = fleet.client();
        for n in 0..200 {
            assert_eq!(client.cmd(&format!("SET {{{n}}} value")), "OK");
        }
        // The usage data at the source is replaced by values that no access during the test could cause.
        let mut source = fleet.servers[0].client();
        let keys: Vec<String> =
            (0..200).map(|n| format!("{{{n}}}")).filter(|key| source.cmd(&format!("EXISTS {key}")) == "1").collect();
        let mut restore = |key: &str, used: u64| {
            source.send(&[
                b"EVAL",
                b"local d = redis.call('DUMP', KEYS[1]) return redis.call('RESTORE', KEYS[1], 0, d, 'REPLACE', ARGV[1], ARGV[2])",
                b"1",
                key.as_bytes(),
                hint.as_bytes(),
                used.to_string().as_bytes(),
            ]);
            assert_eq!(source.reply(), "OK");
        };
        for (place, key) in keys.iter().enumerate() {
            restore(key, 50 + place as u64);
        }
        fleet.run_to_end(fleet.task(1, 0, 1));
        let mut target = fleet.servers[1].client();
        for (place, key) in keys.iter().enumerate() {
            let used: u64 = target.cmd(&format!("OBJECT {hint} {key}")).parse().expect("a number");
            let given = 50 + place as u64;
            // Idle time continues to grow; the frequency does not decrease.
            assert!((given..given + 60).contains(&used), "{hint} of {key}: {given} became {used}");
        }
    }
}

/// Returns two servers of each program with TTLs of hash fields.
fn fleets_with_mortal_fields() -> impl Iterator<Item = (String, Fleet)> {
    [default_program()].into_iter().chain(other_programs()).filter_map(|program| {
        let fleet = Fleet::with(vec![Server::of(&program, &[]), Server::of(&program, &[])]);
        if fleet.servers[0].client().cmd("HPEXPIREAT none 1 FIELDS 1 f").contains("unknown command") {
            eprintln!("skipped: hash fields have no time to live in {program}");
            return None;
        }
        Some((program, fleet))
    })
}

#[test]
fn hash_field_ttls_move_with_their_fields() {
    for (program, fleet) in fleets_with_mortal_fields() {
        let mut client = fleet.client();
        let ends = |n: usize| 4_000_000_000_000 + n;
        for n in 0..200 {
            assert_eq!(client.cmd(&format!("HSET {{{n}}} a 1 b 2 c 3")), "3");
            assert_eq!(client.cmd(&format!("HPEXPIREAT {{{n}}} {} FIELDS 1 b", ends(n))), "[1]");
        }
        fleet.run_to_end(fleet.task(1, 0, 1));
        assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
        for n in 0..200 {
            assert_eq!(client.cmd(&format!("HPEXPIRETIME {{{n}}} FIELDS 3 a b c")), format!("[-1, {}, -1]", ends(n)));
            assert_eq!(client.cmd(&format!("HMGET {{{n}}} a b c")), "[1, 2, 3]");
        }
        eprintln!("{program}: they do");
    }
}

/// Pieces have no TTLs. A field may have one before the hash is copied in pieces, or get one during the copy.
#[test]
fn a_big_hash_with_field_ttls_moves_whole() {
    const COUNT: usize = 20_000;
    const END: u64 = 4_000_000_000_000;
    for meanwhile in [false, true] {
        for (program, fleet) in fleets_with_mortal_fields() {
            let mut client = fleet.client();
            let key = key_of(&fleet, 0, "hash");
            hash(&mut client, &key, COUNT);
            let dies = format!("HPEXPIREAT {key} {END} FIELDS 2 field7 field{}", COUNT - 1);
            if !meanwhile {
                assert_eq!(client.cmd(&dies), "[1, 1]");
            }
            fleet.begin(with(fleet.task(1, 0, 1), |order| {
                order.how.goal = if meanwhile { Goal::Gentle } else { Goal::Fast }
            }));
            if meanwhile {
                until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
                assert_eq!(client.cmd(&dies), "[1, 1]");
                fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
            }
            assert_eq!(fleet.wait_for(1), MoveEnd::Done);
            let big = fleet.progress(1).big;
            assert_eq!((big.in_pieces, big.whole), (0, 1), "{big:?}");
            assert!(big.whole_last.contains("its fields have a time to live"), "{big:?}");
            assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
            no_temporary_keys(&fleet.servers[1]);
            assert_eq!(client.cmd(&format!("HLEN {key}")), COUNT.to_string());
            let ends = format!("HPEXPIRETIME {key} FIELDS 3 field7 field8 field{}", COUNT - 1);
            assert_eq!(client.cmd(&ends), format!("[{END}, -1, {END}]"));
            eprintln!("{program}: it does");
        }
    }
}

/// Expired fields of a hash stay deleted during a move, in pieces or whole, and all other fields arrive.
#[test]
fn fields_that_expire_while_their_hash_moves_stay_away() {
    const COUNT: usize = 20_000;
    for (program, fleet) in fleets_with_mortal_fields() {
        let mut client = fleet.client();
        let key = key_of(&fleet, 0, "hash");
        hash(&mut client, &key, COUNT);
        assert_eq!(client.cmd(&format!("HPEXPIRE {key} 1 FIELDS 2 field1 field2")), "[1, 1]");
        assert_eq!(client.cmd(&format!("HPEXPIRE {key} 300 FIELDS 2 field3 field4")), "[1, 1]");
        fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
        until("fields have expired", || {
            client.cmd(&format!("HMGET {key} field1 field2 field3 field4")) == "[(nil), (nil), (nil), (nil)]"
        });
        assert_eq!(client.cmd(&format!("HSET {key} field1 again")), "1");
        fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(1), MoveEnd::Done);
        assert_eq!(client.cmd(&format!("HMGET {key} field1 field2 field3 field4 field5")).split("value5-").count(), 2);
        assert!(
            client.cmd(&format!("HMGET {key} field1 field2 field3 field4")).ends_with("[again, (nil), (nil), (nil)]")
        );
        // HLEN includes expired fields that the server has not removed yet.
        until("all others are there, and no more", || client.cmd(&format!("HLEN {key}")) == (COUNT - 3).to_string());
        eprintln!("{program}: they do");
    }
}
