//! Clients with state at servers: scripts, functions, and tracking.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use switchyard_policy::migration::Goal;
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::{MoveEnd, UserRequest};

use super::fleet::{Client, Fleet, fill, with};

#[test]
fn scripts_and_functions_are_at_the_target_before_it_serves() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    client.send(&[b"SCRIPT", b"LOAD", b"return redis.call('INCRBY', KEYS[1], 7)"]);
    let digest = client.reply();
    client.send(&[
        b"FUNCTION",
        b"LOAD",
        b"#!lua name=lib\nredis.register_function('seven', function(keys) return redis.call('INCRBY', keys[1], 7) end)",
    ]);
    assert_eq!(client.reply(), "lib");
    // Like a server that joined later or was flushed.
    let mut direct = fleet.servers[1].client();
    assert_eq!((direct.cmd("SCRIPT FLUSH"), direct.cmd("FUNCTION FLUSH")), ("OK".to_owned(), "OK".to_owned()));
    fill(&mut client, 1000);
    // Only keys of the source: the target lacks the functions until the move.
    let owned = fleet.slots_of(fleet.node(0));
    let moving: Vec<usize> =
        (0..200).filter(|n| owned.contains(&crc16_slot(n.to_string().as_bytes()))).take(50).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let caller = scope.spawn(|| {
            let mut client = fleet.client();
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                for n in &moving {
                    assert_eq!(client.cmd(&format!("EVALSHA {digest} 1 {{{n}}}sum")), (14 * count + 7).to_string());
                    assert_eq!(client.cmd(&format!("FCALL seven 1 {{{n}}}sum")), (14 * count + 14).to_string());
                }
                count += 1;
            }
        });
        fleet.run_to_end(fleet.task(1, 0, 1));
        stop.store(true, Ordering::Relaxed);
        caller.join().expect("no client saw an error");
    });
}

/// A client with a cache that relies on invalidations.
struct Cache {
    client: Client,
    known: BTreeMap<String, String>,
}

impl Cache {
    /// Returns the next reply, after handling the invalidations before it.
    fn reply(&mut self) -> String {
        loop {
            let reply = self.client.reply();
            let Some(keys) = reply.strip_prefix("[invalidate, ") else { return reply };
            if keys == "(nil)]" {
                self.known.clear();
            }
            for key in keys.trim_matches(['[', ']']).split(", ") {
                self.known.remove(key);
            }
        }
    }

    fn read(&mut self, key: &str) {
        self.client.post(&format!("GET {key}"));
        let value = self.reply();
        self.known.insert(key.to_owned(), value);
    }
}

#[test]
fn tracking_clients_receive_every_invalidation_during_moves() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 1000);
    for (round, mode) in ["", " BCAST", " NOLOOP"].into_iter().enumerate() {
        let mut cache = Cache { client: fleet.client(), known: BTreeMap::new() };
        assert!(!cache.client.cmd("HELLO 3").starts_with('-'));
        assert_eq!(cache.client.cmd(&format!("CLIENT TRACKING ON{mode}")), "OK");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = fleet.client();
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    assert_eq!(client.cmd(&format!("SET {{{}}}tracked {count}", count % 40)), "OK");
                }
            });
            for leg in 0..4_u64 {
                let id = 4 * round as u64 + leg + 1;
                let (from, to) = if leg % 2 == 0 { (0, 1) } else { (1, 0) };
                fleet.begin(with(fleet.task(id, from, to), |order| order.how.goal = Goal::Gentle));
                let mut rounds = 0;
                while fleet.progress(id).end.is_none() {
                    (0..40).for_each(|n| cache.read(&format!("{{{n}}}tracked")));
                    rounds += 1;
                    if rounds == 3 {
                        fleet.router().steer_move(MoveId(id), UserRequest::Goal(Goal::Fast));
                    }
                }
                assert_eq!(fleet.wait_for(id), MoveEnd::Done);
            }
            stop.store(true, Ordering::Relaxed);
            writer.join().expect("the writer saw no error");
        });
        (0..40).for_each(|n| cache.read(&format!("{{{n}}}tracked")));
        // A last change of each key. Its invalidation follows all earlier ones.
        let mut other = fleet.client();
        for n in 0..40 {
            assert_eq!(other.cmd(&format!("SET {{{n}}}tracked last")), "OK");
        }
        while !cache.known.is_empty() {
            cache.client.post("PING");
            assert_eq!(cache.reply(), "PONG", "still cached: {:?}", cache.known);
        }
    }
}
