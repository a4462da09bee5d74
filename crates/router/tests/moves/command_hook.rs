//! The command hook sees exactly the commands with keys that nodes execute, for every command of the table, in every
//! form in which it can reach a node.
//!
//! The tests compare a tap at the hook with `MONITOR` at each node. The keys of executed commands come from the node
//! itself (`COMMAND GETKEYS`), so that an error of ours does not hide itself.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use switchyard_policy::topology::{NodeId, crc16_slot};
use switchyard_resp::command::{Command, CommandTable, Flags, Handling, Keys};
use switchyard_router::{MoveEnd, Outcome, SentCommand, Tap};

use super::fleet::{Client, Fleet, until};

/// A command with keys: database, name without a subcommand, and keys.
type Seen = (u32, String, Vec<Vec<u8>>);

/// A sent command: number, destination node, and content.
type Sent = ((usize, u64), NodeId, Seen);

#[derive(Debug, Default)]
struct Recorder {
    sent: Mutex<Vec<Sent>>,
    ended: Mutex<BTreeMap<(usize, u64), Outcome>>,
}

impl Tap for Recorder {
    fn sent(&self, command: &SentCommand<'_>) {
        let name = command.command.split('|').next().unwrap_or_default().to_owned();
        let keys = command.keys.iter().map(|key| key.to_vec()).collect();
        self.sent.lock().expect("lock").push((command.number, command.node, (command.database, name, keys)));
    }

    fn ended(&self, number: (usize, u64), outcome: Outcome) {
        assert_eq!(self.ended.lock().expect("lock").insert(number, outcome), None, "{number:?} ended twice");
    }
}

impl Recorder {
    /// Taps the router of a fleet. Clients created by this recorder are covered.
    fn of(fleet: &Fleet) -> Arc<Recorder> {
        let recorder = Arc::new(Recorder::default());
        fleet.router().tap(recorder.clone());
        recorder
    }

    /// Returns a client whose worker has adopted the tap.
    fn client(&self, fleet: &Fleet) -> Client {
        let mut client = fleet.client();
        until("the worker has noticed the tap", || {
            let before = self.sent.lock().expect("lock").len();
            client.cmd("EXISTS noticed");
            self.sent.lock().expect("lock").len() > before
        });
        client
    }

    fn forget(&self) {
        until("all have ended", || self.ended.lock().expect("lock").len() == self.sent.lock().expect("lock").len());
        self.sent.lock().expect("lock").clear();
        self.ended.lock().expect("lock").clear();
    }

    /// Returns the commands that a node has executed, according to the tap.
    fn at(&self, node: NodeId) -> Vec<Seen> {
        let (sent, ended) = (self.sent.lock().expect("lock"), self.ended.lock().expect("lock"));
        let is_executed = |number: &(usize, u64)| ended.get(number) == Some(&Outcome::Certain);
        let mut seen: Vec<Seen> = sent
            .iter()
            .filter(|(number, at, _)| *at == node && is_executed(number))
            .map(|(.., seen)| seen.clone())
            .collect();
        seen.sort();
        seen
    }

    /// Returns the nodes to which the commands of this name were sent, in order.
    fn nodes(&self, name: &str) -> Vec<NodeId> {
        self.sent.lock().expect("lock").iter().filter(|(.., seen)| seen.1 == name).map(|(_, node, _)| *node).collect()
    }

    /// Returns the outcomes of the commands of this name.
    fn outcomes(&self, name: &str) -> Vec<Option<Outcome>> {
        let ended = self.ended.lock().expect("lock");
        self.sent
            .lock()
            .expect("lock")
            .iter()
            .filter(|(_, _, seen)| seen.1 == name)
            .map(|(number, ..)| ended.get(number).copied())
            .collect()
    }
}

/// A line of MONITOR.
#[derive(Debug)]
struct Executed {
    database: u32,
    by_script: bool,
    args: Vec<Vec<u8>>,
}

impl Executed {
    /// `+1700000000.000000 [0 127.0.0.1:5000] "SET" "k" "v"`
    fn of(line: &str) -> Executed {
        let (_, rest) = line.split_once(" [").expect("a time");
        let (source, words) = rest.split_once("] ").expect("a source");
        let (database, from) = source.split_once(' ').expect("a database");
        let (mut args, mut bytes) = (Vec::new(), words.bytes());
        while bytes.next().is_some() {
            let mut arg = Vec::new();
            loop {
                match bytes.next().expect("a quote") {
                    b'"' => break,
                    b'\\' => arg.push(match bytes.next().expect("an escape") {
                        b'n' => b'\n',
                        b'r' => b'\r',
                        b't' => b'\t',
                        b'a' => 7,
                        b'b' => 8,
                        b'x' => {
                            let digits = [bytes.next().expect("a digit"), bytes.next().expect("a digit")];
                            u8::from_str_radix(std::str::from_utf8(&digits).expect("digits"), 16).expect("a number")
                        }
                        other => other,
                    }),
                    other => arg.push(other),
                }
            }
            args.push(arg);
            bytes.next();
        }
        Executed { database: database.parse().expect("a number"), by_script: from == "lua", args }
    }
}

/// MONITOR connections to all nodes of a fleet.
struct Monitors(Vec<Client>);

impl Monitors {
    fn of(fleet: &Fleet) -> Monitors {
        let mut clients: Vec<Client> = fleet.servers.iter().map(|server| server.client()).collect();
        clients.iter_mut().for_each(|client| assert_eq!(client.cmd("MONITOR"), "OK"));
        Monitors(clients)
    }

    /// Returns the commands that a node has executed since the last call.
    fn executed(&mut self, fleet: &Fleet, place: usize) -> Vec<Executed> {
        fleet.servers[place].client().cmd("ECHO until-here");
        let mut all = Vec::new();
        loop {
            let executed = Executed::of(&self.0[place].line());
            if executed.args.last().is_some_and(|last| last == b"until-here") {
                return all;
            }
            all.push(executed);
        }
    }
}

/// Returns the keys of a command according to a node.
fn keys_at_node(asker: &mut Client, args: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let words: Vec<&[u8]> = [&b"COMMAND"[..], b"GETKEYS"].into_iter().chain(args.iter().map(Vec::as_slice)).collect();
    asker.send(&words);
    let reply = asker.reply();
    match reply.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(keys) if !keys.is_empty() => keys.split(", ").map(|key| key.as_bytes().to_vec()).collect(),
        _ => Vec::new(),
    }
}

/// Checks for each node that the tap saw exactly the executed commands, for commands with `counts`. Returns the names
/// of commands that never occurred.
fn compare(fleet: &Fleet, recorder: &Recorder, monitors: &mut Monitors, counts: impl Fn(&str) -> bool) -> Vec<String> {
    until("all have ended", || recorder.ended.lock().expect("lock").len() == recorder.sent.lock().expect("lock").len());
    for place in 0..fleet.servers.len() {
        let mut asker = fleet.servers[place].client();
        let mut executed = Vec::new();
        // The commands of a script use its declared keys.
        let mut declared: BTreeSet<Vec<u8>> = BTreeSet::new();
        for line in monitors.executed(fleet, place) {
            let name = String::from_utf8_lossy(&line.args[0]).to_ascii_uppercase();
            let keys = keys_at_node(&mut asker, &line.args);
            if line.by_script {
                assert!(
                    keys.iter().all(|key| declared.contains(key)),
                    "{line:?} of a script that declares {declared:?}"
                );
                continue;
            }
            if matches!(&*name, "EVAL" | "EVAL_RO" | "EVALSHA" | "EVALSHA_RO" | "FCALL" | "FCALL_RO") {
                declared = keys.iter().cloned().collect();
            }
            if !keys.is_empty() && counts(&name) {
                executed.push((line.database, name, keys));
            }
        }
        executed.sort();
        let seen: Vec<Seen> = recorder.at(fleet.node(place)).into_iter().filter(|seen| counts(&seen.1)).collect();
        let missed: Vec<&Seen> = executed.iter().filter(|of| count(&executed, of) > count(&seen, of)).collect();
        let imagined: Vec<&Seen> = seen.iter().filter(|of| count(&seen, of) > count(&executed, of)).collect();
        assert!(
            missed.is_empty() && imagined.is_empty(),
            "node {place}: the seam missed {missed:?}, and saw without cause {imagined:?}"
        );
    }
    let (sent, ended) = (recorder.sent.lock().expect("lock"), recorder.ended.lock().expect("lock"));
    assert!(ended.values().all(|outcome| *outcome != Outcome::Doubtful), "nothing was lost");
    sent.iter().filter(|(number, ..)| ended[number] == Outcome::Never).map(|(_, _, seen)| seen.1.clone()).collect()
}

fn count(of: &[Seen], what: &Seen) -> usize {
    of.iter().filter(|seen| *seen == what).count()
}

/// Returns a call of a command with keys of one slot. Its effect does not matter: a node that replies with an error has
/// executed it as well.
fn call_of(command: &Command, tag: &str) -> Option<Vec<Vec<u8>>> {
    let key = |number: usize| format!("{{{tag}}}{number}").into_bytes();
    let other = if command.flags.has(Flags::BLOCKING) { "0.01" } else { "1" };
    let mut args: Vec<Vec<u8>> = command.name.split('|').map(|word| word.as_bytes().to_vec()).collect();
    let least = usize::from(command.arity.unsigned_abs());
    match &command.keys {
        Keys::Range { first, last, step } => {
            let (first, step) = (usize::from(*first), usize::from(*step));
            let behind = usize::try_from(-i32::from(*last) - 1).unwrap_or(0);
            let length = least.max(if *last >= 0 { *last as usize + 1 } else { first + 2 * step + behind });
            let end = if *last >= 0 { *last as usize + 1 } else { length - behind };
            for place in args.len()..length {
                let is_key = place >= first && place < end && (place - first) % step == 0;
                args.push(if is_key { key(place) } else { other.into() });
            }
        }
        Keys::Numbered { destination, count, .. } => {
            for place in 1..usize::from(*count) {
                args.push(if *destination { key(place) } else { other.into() });
            }
            args.extend([b"1".to_vec(), key(0)]);
            while args.len() < least {
                args.push(other.into());
            }
        }
        Keys::Sort { store } => {
            args.push(key(0));
            if *store {
                args.extend([b"STORE".to_vec(), key(1)]);
            }
        }
        Keys::GeoStore { options } => {
            args.push(key(0));
            args.resize(usize::from(*options), other.into());
            args.extend([b"STORE".to_vec(), key(1)]);
        }
        Keys::Streams => {
            if command.name == "XREADGROUP" {
                args.extend([b"GROUP".to_vec(), b"g".to_vec(), b"c".to_vec()]);
            }
            args.extend([b"STREAMS".to_vec(), key(0), b"0".to_vec()]);
        }
        Keys::None | Keys::Migrate | Keys::Specs(_) | Keys::Unknown => return None,
    }
    Some(args)
}

fn send(client: &mut Client, args: &[Vec<u8>]) {
    client.send(&args.iter().map(Vec::as_slice).collect::<Vec<_>>());
}

fn exchange(client: &mut Client, args: &[Vec<u8>]) -> String {
    send(client, args);
    client.reply()
}

/// Returns the commands with keys that this router sends to nodes and that nodes show in MONITOR.
fn commands_with_keys(fleet: &Fleet) -> Vec<Command> {
    let mut asker = fleet.servers[0].client();
    let table = CommandTable::builtin();
    let is_sent = |command: &&Command| {
        matches!(command.handling, Handling::Keyed | Handling::Split(_)) && !command.flags.has(Flags::PUBSUB)
    };
    let is_shown = |command: &&Command| {
        let info = asker.cmd(&format!("COMMAND INFO {}", command.name));
        info != "[(nil)]" && !info.contains("admin")
    };
    table.iter().filter(is_sent).filter(is_shown).cloned().collect()
}

/// Returns a key of the node at this place.
fn key_at(fleet: &Fleet, place: usize, name: &str) -> String {
    let owned = fleet.slots_of(fleet.node(place));
    (0..).map(|n| format!("{{{n}}}{name}")).find(|key| owned.contains(&crc16_slot(key.as_bytes()))).expect("one")
}

#[test]
fn every_command_of_the_table_passes_the_hook_in_every_form() {
    let fleet = Fleet::new(2);
    let recorder = Recorder::of(&fleet);
    let mut client = recorder.client(&fleet);
    let mut monitors = Monitors::of(&fleet);
    recorder.forget();
    let commands = commands_with_keys(&fleet);
    assert!(commands.len() > 150, "{} commands", commands.len());
    for command in &commands {
        let call = |form: &str| call_of(command, &format!("{form}{}", command.name)).expect("a call");
        // As a single command.
        exchange(&mut client, &call("alone"));
        // In a transaction. Commands that cannot be queued abort it.
        for args in [vec![b"MULTI".to_vec()], call("multi"), call("multi"), vec![b"EXEC".to_vec()]] {
            exchange(&mut client, &args);
        }
        // In a script.
        let args = call("script");
        let keys = keys_at_node(&mut fleet.servers[0].client(), &args);
        let mut script: Vec<Vec<u8>> =
            ["EVAL", "return redis.pcall(unpack(ARGV))", &keys.len().to_string()].map(Into::into).to_vec();
        script.extend(keys);
        script.extend(args);
        exchange(&mut client, &script);
        // In a pipeline, in another database.
        client.post("SELECT 3");
        (0..3).for_each(|_| send(&mut client, &call("pipeline")));
        client.post("SELECT 0");
        (0..5).for_each(|_| drop(client.reply()));
    }
    let never = compare(&fleet, &recorder, &mut monitors, |_| true);
    assert!(never.is_empty(), "{never:?}");
    let alone: BTreeSet<String> = recorder.sent.lock().expect("lock").iter().map(|(.., seen)| seen.1.clone()).collect();
    assert!(alone.len() > 140, "only {} names were seen", alone.len());
}

#[test]
fn split_and_repeated_commands_pass_the_hook() {
    let fleet = Fleet::new(2);
    let recorder = Recorder::of(&fleet);
    let (mut client, mut other) = (recorder.client(&fleet), recorder.client(&fleet));
    let mut monitors = Monitors::of(&fleet);
    recorder.forget();
    let [a, b] = [0, 1].map(|place| key_at(&fleet, place, "x"));
    // Split over nodes.
    for line in [
        "MSET %a 1 %b 2",
        "MGET %a %b %a",
        "EXISTS %a %b",
        "TOUCH %a %b",
        "DEL %a %b",
        "MSET %a 1 %b 2",
        "UNLINK %a %b",
    ] {
        client.cmd(&line.replace("%a", &a).replace("%b", &b));
    }
    // In several steps: values are collected at one node.
    for line in [
        "SADD %a 1 2",
        "SADD %b 2 3",
        "SINTER %a %b",
        "SUNIONSTORE %a %a %b",
        "SORT %a STORE %b",
        "COPY %a %b REPLACE",
        "ZADD %a-zset 1 m",
        "ZUNIONSTORE %b-zset 2 %a-zset %b-none",
        "RPUSH %b-list 1",
        "LMPOP 2 %a-list %b-list LEFT",
        "SET %a-bits 1",
        "BITOP NOT %b-bits %a-bits",
        "SCAN 0",
        "RANDOMKEY",
        "DBSIZE",
        "KEYS *",
    ] {
        let reply = client.cmd(&line.replace("%a", &a).replace("%b", &b));
        assert!(!reply.starts_with('-'), "{line}: {reply}");
    }
    // Blocking at its node: with data, with a timeout, and until data arrives.
    let list = format!("{a}-queue");
    client.cmd(&format!("RPUSH {list} 1"));
    assert_eq!(client.cmd(&format!("BLPOP {list} 1")), format!("[{list}, 1]"));
    assert_eq!(client.cmd(&format!("BLPOP {list} 0.01")), "(nil)");
    client.post(&format!("BLMOVE {list} {list}-taken LEFT RIGHT 30"));
    until("it waits", || fleet.servers[0].client().cmd("INFO clients").contains("blocked_clients:1"));
    other.cmd(&format!("RPUSH {list} 2"));
    assert_eq!(client.reply(), "2");
    // Large values: streamed, repeated, and split.
    let large = vec![b'v'; 2 << 20];
    for key in [&a, &b] {
        let key = key.as_bytes();
        for args in [
            vec![&b"SET"[..], key, &large],
            vec![&b"APPEND"[..], key, &large],
            vec![&b"MSET"[..], a.as_bytes(), &large, key, b"2"],
        ] {
            client.send(&args);
            client.reply();
        }
    }
    client.send(&[b"SET", a.as_bytes(), &large]);
    assert_eq!(client.reply(), "OK");
    (0..3).for_each(|_| assert_eq!(client.cmd(&format!("GET {a}")).len(), large.len()));
    for args in [&[&b"MULTI"[..]][..], &[b"SET", b.as_bytes(), &large], &[b"EXEC"]] {
        client.send(args);
        client.reply();
    }
    // A script that its node has lost.
    client.send(&[b"SCRIPT", b"LOAD", b"return redis.call('INCR', KEYS[1])"]);
    let sha = client.reply();
    fleet.servers.iter().for_each(|server| assert_eq!(server.client().cmd("SCRIPT FLUSH"), "OK"));
    assert_eq!(client.cmd(&format!("EVALSHA {sha} 1 {a}-count")), "1");
    // Watched keys, in a transaction that succeeds, and in one that fails.
    for (write, reply) in [(false, "[OK]"), (true, "(nil)")] {
        client.cmd(&format!("WATCH {a}-watched"));
        if write {
            other.cmd(&format!("SET {a}-watched by-another"));
        }
        client.cmd("MULTI");
        client.cmd(&format!("SET {a}-watched mine"));
        assert_eq!(client.cmd("EXEC"), reply);
    }
    // Clients of the other protocol version use other connections.
    other.cmd("HELLO 3");
    for line in ["SET %a 1", "GET %a", "MGET %a %b", "BLPOP %a-none 0.01", "INCR %b"] {
        other.cmd(&line.replace("%a", &a).replace("%b", &b));
    }
    assert_eq!(compare(&fleet, &recorder, &mut monitors, |_| true), ["SET"], "of the transaction whose watch failed");
}

#[test]
fn a_command_reissued_in_a_move_passes_the_hook_again() {
    let fleet = Fleet::new(2);
    let recorder = Recorder::of(&fleet);
    let mut clients: Vec<Client> = (0..4).map(|_| recorder.client(&fleet)).collect();
    let mut monitors = Monitors::of(&fleet);
    recorder.forget();
    let key = key_at(&fleet, 0, "x");
    clients[0].post(&format!("BLPOP {key}-list 60"));
    clients[1].post(&format!("XREAD BLOCK 60000 STREAMS {key}-stream $"));
    until("they wait", || fleet.servers[0].client().cmd("INFO clients").contains("blocked_clients:2"));
    let end = fleet.interrupt(fleet.task(1, 0, 1), || {
        // These wait for their keys, and then follow them.
        clients[2].post(&format!("INCR {key}-count"));
        for line in ["MULTI", &format!("INCRBY {key}-count 5"), "EXEC"] {
            clients[3].post(line);
        }
        let mut other = fleet.client();
        until("a command waits", || other.cmd("CLIENT LIST").matches("flags=b").count() == 2);
    });
    assert_eq!(end, MoveEnd::Done);
    assert!(matches!(&*clients[2].reply(), "1" | "6"));
    assert_eq!((clients[3].reply(), clients[3].reply()), ("OK".to_owned(), "QUEUED".to_owned()));
    assert!(matches!(&*clients[3].reply(), "[5]" | "[6]"));
    clients[2].cmd(&format!("RPUSH {key}-list element"));
    clients[2].cmd(&format!("XADD {key}-stream * f v"));
    assert_eq!(clients[0].reply(), format!("[{key}-list, element]"));
    assert!(clients[1].reply().contains("f, v"));
    let ours = ["BLPOP", "XREAD", "XINFO", "INCR", "INCRBY", "RPUSH", "XADD"];
    let never = compare(&fleet, &recorder, &mut monitors, |name| ours.contains(&name));
    assert!(never.is_empty(), "{never:?}");
    for again in ["BLPOP", "XREAD"] {
        let nodes = recorder.nodes(again);
        // After a drain that takes too long, the command is issued at the source again, until the next attempt.
        let (last, earlier) = nodes.split_last().expect("it was issued");
        assert!(
            *last == fleet.node(1) && !earlier.is_empty() && earlier.iter().all(|node| *node == fleet.node(0)),
            "{again} was issued at the source and then at the target, not at {nodes:?}"
        );
    }
    assert!(!recorder.outcomes("XINFO").is_empty(), "the end of the stream was queried");
}

#[test]
fn the_hook_receives_outcomes_of_unanswered_commands() {
    let mut fleet = Fleet::new(2);
    let recorder = Recorder::of(&fleet);
    let mut client = recorder.client(&fleet);
    recorder.forget();
    let key = key_at(&fleet, 0, "x");
    // An upload from a client that is closed: the node has half a command, and never executes it.
    let number = client.cmd("CLIENT ID");
    client.send_raw(format!("*3\r\n$6\r\nAPPEND\r\n${}\r\n{key}\r\n$3000000\r\nhalf of it", key.len()).as_bytes());
    until("its beginning is on its way", || recorder.outcomes("APPEND").len() == 1);
    assert_eq!(fleet.client().cmd(&format!("CLIENT KILL ID {number}")), "1");
    until("it has ended", || recorder.outcomes("APPEND") == [Some(Outcome::Never)]);
    // A node that dies with commands in flight: the outcome is unknown.
    let mut client = recorder.client(&fleet);
    fleet.servers[0].signal(Signal::STOP);
    client.post(&format!("INCR {key}"));
    until("it was sent", || recorder.outcomes("INCR").len() == 1);
    // The kernel still accepts the command for the stopped node.
    let in_flight = |fleet: &Fleet| fleet.router().status().nodes.iter().map(|node| node.in_flight).sum::<u64>();
    until("it is in flight", || in_flight(&fleet) >= 1);
    assert_eq!(recorder.outcomes("INCR"), [None]);
    fleet.servers[0].crash(&[]);
    assert!(client.reply().starts_with("-NODELOST"));
    assert_eq!(recorder.outcomes("INCR"), [Some(Outcome::Doubtful)]);
}
