//! Compares glob matching with all uses in a real server: KEYS, PUBLISH with PSUBSCRIBE, ACL DRYRUN, CONFIG GET.
//!
//! Part of the command table tests because it uses the same servers.

use std::collections::BTreeSet;

use switchyard_resp::{glob, reply};

use crate::server::{Client, Server};

struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % count
    }

    fn bytes(&mut self, alphabet: &[u8], most: usize) -> Vec<u8> {
        (0..self.below(most + 1)).map(|_| alphabet[self.below(alphabet.len())]).collect()
    }
}

/// Few letters, so that matches are frequent, all special characters, and bytes that are negative as signed characters.
const PATTERNS: &[u8] = b"aabbc***??[[]]^^--\\\\\x80\xff";
const TEXTS: &[u8] = b"aaabbbc*?[]^-\\\x80\xff";

fn texts(random: &mut Random, count: usize) -> BTreeSet<Vec<u8>> {
    (0..count).map(|_| random.bytes(TEXTS, 5)).chain([Vec::new()]).collect()
}

fn list(answer: &[u8]) -> BTreeSet<Vec<u8>> {
    assert!(!reply::is_error(answer), "{}", answer.escape_ascii());
    reply::elements(answer).filter_map(reply::text).map(<[u8]>::to_vec).collect()
}

#[track_caller]
fn same(what: &str, pattern: &[u8], ours: &BTreeSet<Vec<u8>>, theirs: &BTreeSet<Vec<u8>>) {
    let differs: Vec<String> = ours.symmetric_difference(theirs).map(|text| text.escape_ascii().to_string()).collect();
    assert!(differs.is_empty(), "{what} `{}`: only one of us matches {differs:?}", pattern.escape_ascii());
}

fn on_real_servers(check: impl Fn(&Server, &mut Client, &mut Random)) {
    let servers: Vec<Server> = ["redis-server", "valkey-server"].into_iter().filter_map(Server::start).collect();
    assert!(!servers.is_empty(), "redis-server must be on the PATH");
    for server in servers {
        check(&server, &mut server.client(), &mut Random(0x5eed));
    }
}

#[test]
fn keys_are_matched_as_keys_does() {
    on_real_servers(|_, client, random| {
        let texts = texts(random, 400);
        for text in &texts {
            client.call(&[&b"SET"[..], &text[..], b"x"]);
        }
        for _ in 0..5000 {
            let pattern = random.bytes(PATTERNS, 8);
            let theirs = list(&client.call(&[&b"KEYS"[..], &pattern[..]]));
            let ours = texts.iter().filter(|text| glob::matches_key(&pattern, text)).cloned().collect();
            same("KEYS", &pattern, &ours, &theirs);
        }
        // The limit on stars.
        let long = [&[b'a'; 3000][..], b"b"].concat();
        client.call(&[&b"SET"[..], &long[..], b"x"]);
        for stars in [1000, 1001] {
            for pattern in ["a*".repeat(stars) + "b", "*a".repeat(stars) + "**"] {
                let theirs = list(&client.call(&[b"KEYS", pattern.as_bytes()]));
                let ours =
                    [long.clone()].into_iter().filter(|text| glob::matches_key(pattern.as_bytes(), text)).collect();
                same("KEYS", pattern.as_bytes(), &ours, &theirs);
            }
        }
    });
}

#[test]
fn channels_are_matched_as_publish_does() {
    on_real_servers(|server, client, random| {
        let texts = texts(random, 200);
        for _ in 0..20 {
            let patterns: BTreeSet<Vec<u8>> = (0..150).map(|_| random.bytes(PATTERNS, 8)).collect();
            let mut subscriber = server.client();
            for pattern in &patterns {
                subscriber.call(&[&b"PSUBSCRIBE"[..], &pattern[..]]);
            }
            for text in &texts {
                let theirs = reply::integer(&client.call(&[&b"PUBLISH"[..], &text[..], b"x"])).expect("a number");
                let ours = patterns.iter().filter(|pattern| glob::matches(pattern, text)).count() as i64;
                assert_eq!(ours, theirs, "PUBLISH to `{}`", text.escape_ascii());
            }
            drop(subscriber);
            let mut is_gone = || reply::integer(&client.call(&["PUBSUB", "NUMPAT"])) == Some(0);
            let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
            while !is_gone() {
                assert!(std::time::Instant::now() < end, "the subscriber is gone");
            }
        }
    });
}

#[test]
fn rules_are_matched_as_acls_are() {
    on_real_servers(|_, client, random| {
        let texts: Vec<Vec<u8>> = texts(random, 200).into_iter().collect();
        for _ in 0..2000 {
            let pattern = random.bytes(PATTERNS, 8);
            let rule = [b"~", &pattern[..]].concat();
            let set = client.call(&[&b"ACL"[..], b"SETUSER", b"u", b"reset", b"on", b"nopass", b"+get", &rule[..]]);
            assert_eq!(set, b"+OK\r\n", "{}", rule.escape_ascii());
            for _ in 0..4 {
                let text = &texts[random.below(texts.len())];
                let allowed = client.call(&[&b"ACL"[..], b"DRYRUN", b"u", b"GET", &text[..]]) == b"+OK\r\n";
                let ours = pattern == b"*" || glob::matches(&pattern, text);
                assert_eq!(ours, allowed, "`{}` and `{}`", pattern.escape_ascii(), text.escape_ascii());
            }
        }
    });
}

#[test]
fn settings_are_matched_as_config_get_does() {
    on_real_servers(|_, client, random| {
        let pairs = |answer: &[u8]| -> BTreeSet<Vec<u8>> {
            let names = reply::elements(answer).step_by(2).filter_map(reply::text);
            names.map(<[u8]>::to_ascii_lowercase).collect()
        };
        let names = pairs(&client.call(&["CONFIG", "GET", "*"]));
        assert!(names.len() > 100 && names.contains(&b"maxclients"[..]));
        for _ in 0..4000 {
            // Built from a setting's name, with some bytes in the other case or replaced.
            let name = names.iter().nth(random.below(names.len())).expect("a name");
            let mut pattern = Vec::new();
            for byte in name {
                match random.below(12) {
                    0 => pattern.extend(random.bytes(b"*?[]^-\\amzAMZ", 4)),
                    1 => pattern.push(byte.to_ascii_uppercase()),
                    2 => pattern.extend([b'[', *byte, b'-', b'Z', b']']),
                    3 => pattern.extend([b'\\', *byte]),
                    4 => pattern.extend([b'[', b'\\', byte.to_ascii_uppercase(), b']']),
                    5 => {
                        pattern.push(b'*');
                        break;
                    }
                    _ => pattern.push(*byte),
                }
            }
            let theirs = pairs(&client.call(&[&b"CONFIG"[..], b"GET", &pattern[..]]));
            let ours = names.iter().filter(|name| glob::matches_setting(&pattern, name)).cloned().collect();
            same("CONFIG GET", &pattern, &ours, &theirs);
        }
    });
}
