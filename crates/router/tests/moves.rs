//! Moves of a router between real servers, with a host that keeps everything in memory: what clients see while keys change servers.
//!
//! Beside the end-to-end tests, because here a test can look into the journal and hold things up where it wants.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use switchyard_policy::migration::record::Replay;
use switchyard_policy::migration::{Durability, Fingerprinter, Goal, Protocol, Record};
use switchyard_policy::topology::{MoveId, NodeId, SLOT_COUNT, Slot, Stage, Topology, Transit};
use switchyard_router::{Done, Host, ListenerSettings, Live, MoveEnd, MoveOrder, MoveProgress, NodeAccess, Router, Settings};

const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    child: Child,
    address: SocketAddr,
    /// Removed with it.
    _dir: tempfile::TempDir,
}

impl Server {
    fn start(options: &[&str]) -> Server {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("its address");
        Server::start_at(free, tempfile::tempdir().expect("a directory"), options)
    }

    fn start_at(address: SocketAddr, dir: tempfile::TempDir, options: &[&str]) -> Server {
        let program = ["redis-server", "valkey-server"]
            .into_iter()
            .find(|p| Command::new(p).arg("--version").stdout(Stdio::null()).status().is_ok())
            .expect("redis-server or valkey-server is installed");
        let port = address.port().to_string();
        let child = Command::new(program)
            .args(["--port", &port, "--save", "", "--dir"])
            .arg(dir.path())
            .args(options)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        let server = Server { child, address, _dir: dir };
        until("a server answers", || TcpStream::connect(address).is_ok());
        server
    }

    fn client(&self) -> Client {
        Client::connect(self.address)
    }
}

impl Server {
    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// Ends it at once, and starts it again with what it had saved.
    fn crash(&mut self, options: &[&str]) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let dir = std::mem::replace(&mut self._dir, tempfile::tempdir().expect("a directory"));
        // The old value is dropped, and with it a process that is gone already.
        *self = Server::start_at(self.address, dir, options);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[track_caller]
fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is() {
        assert!(Instant::now() < end, "waited in vain until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends commands as lines of words and gives replies as text: `OK`, `-ERR ...`, `(nil)`, `[a, b]`.
struct Client {
    stream: TcpStream,
    input: Vec<u8>,
}

impl Client {
    fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Client { stream, input: Vec::new() }
    }

    fn send(&mut self, args: &[&[u8]]) {
        let mut out = format!("*{}\r\n", args.len()).into_bytes();
        for arg in args {
            out.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
            out.extend_from_slice(arg);
            out.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&out).expect("sent");
    }

    fn post(&mut self, line: &str) {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        self.send(&words);
    }

    fn cmd(&mut self, line: &str) -> String {
        self.post(line);
        self.reply()
    }

    fn line(&mut self) -> String {
        loop {
            if let Some(at) = self.input.windows(2).position(|w| w == b"\r\n") {
                let line = String::from_utf8_lossy(&self.input[..at]).into_owned();
                self.input.drain(..at + 2);
                return line;
            }
            self.fill();
        }
    }

    fn fill(&mut self) {
        let mut chunk = [0; 65536];
        let count = self.stream.read(&mut chunk).expect("a reply in time");
        assert!(count > 0, "the connection was closed");
        self.input.extend_from_slice(&chunk[..count]);
    }

    fn reply(&mut self) -> String {
        let line = self.line();
        let (kind, rest) = line.split_at(1);
        match kind {
            "+" | ":" => rest.to_owned(),
            "-" => line,
            "$" | "*" if rest == "-1" => "(nil)".to_owned(),
            "$" => {
                let len: usize = rest.parse().expect("a length");
                while self.input.len() < len + 2 {
                    self.fill();
                }
                let text = self.input[..len].escape_ascii().to_string();
                self.input.drain(..len + 2);
                text
            }
            "*" => {
                let count: usize = rest.parse().expect("a count");
                let parts: Vec<String> = (0..count).map(|_| self.reply()).collect();
                format!("[{}]", parts.join(", "))
            }
            _ => panic!("what is {line:?}?"),
        }
    }
}

type Transits = Vec<(Transit, Vec<Slot>)>;

/// Keeps what a control plane would keep.
#[derive(Debug)]
struct Keeper {
    router: Mutex<Option<Weak<Router>>>,
    topology: Mutex<Topology>,
    transits: Mutex<BTreeMap<MoveId, Transits>>,
    records: Mutex<Vec<Record>>,
    ended: Mutex<BTreeMap<MoveId, MoveEnd>>,
    spool: PathBuf,
    /// No record becomes durable while it is set.
    stuck: AtomicBool,
}

impl Keeper {
    fn publish(&self, topology: Topology) -> u64 {
        let epoch = topology.epoch();
        *self.topology.lock().expect("lock") = topology.clone();
        let router = self.router.lock().expect("lock").as_ref().and_then(Weak::upgrade);
        if let Some(router) = router {
            router.publish(Arc::new(topology));
        }
        epoch
    }
}

impl Host for Keeper {
    fn record(&self, records: Vec<Record>, done: Done) {
        while self.stuck.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.records.lock().expect("lock").extend(records);
        done(Ok(()));
    }

    fn hand_over(&self, move_id: MoveId, slots: &[Slot], owner: NodeId, done: Done) {
        if let Some(transits) = self.transits.lock().expect("lock").get_mut(&move_id) {
            for (_, of) in transits {
                of.retain(|slot| !slots.contains(slot));
            }
        }
        let next = self.topology.lock().expect("lock").handed_over(slots, owner);
        self.publish(next);
        done(Ok(()));
    }

    fn set_transits(&self, move_id: MoveId, transits: Transits) -> Result<u64, String> {
        let mut all = self.transits.lock().expect("lock");
        all.insert(move_id, transits);
        let topology = self.topology.lock().expect("lock").clone();
        let next = topology.with_transits(all.values().flatten().map(|(t, s)| (*t, &s[..]))).map_err(|e| e.to_string())?;
        drop(all);
        Ok(self.publish(next))
    }

    fn spool_directory(&self) -> PathBuf {
        self.spool.clone()
    }

    fn ended(&self, move_id: MoveId, end: &MoveEnd) {
        self.ended.lock().expect("lock").insert(move_id, end.clone());
    }
}

fn settings(topology: &Topology) -> Settings {
    let nodes = topology
        .nodes()
        .map(|node| {
            let address = node.name.parse().expect("an address");
            let access = NodeAccess { name: node.name.clone(), address: Some(address), username: None, password: None, tls: None };
            (node.id, access)
        })
        .collect();
    Settings {
        listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("address"))],
        workers: 2,
        pin: false,
        batched_sends: true,
        servers: BTreeMap::new(),
        live: Live { nodes, ..Live::default() },
    }
}

struct Fleet {
    router: Option<Arc<Router>>,
    keeper: Arc<Keeper>,
    servers: Vec<Server>,
    _dir: tempfile::TempDir,
}

impl Fleet {
    fn new(count: usize) -> Fleet {
        Fleet::with((0..count).map(|_| Server::start(&[])).collect())
    }

    /// Ends the router in the middle of what it does, and starts another one that goes on where the journal says.
    fn restart(&mut self) {
        let router = self.router.take().expect("running");
        self.keeper.router.lock().expect("lock").take();
        drop(Arc::into_inner(router).expect("nobody else has it"));
        let replay = Replay::of(self.keeper.records.lock().expect("lock").iter()).expect("a journal");
        self.keeper.transits.lock().expect("lock").clear();
        let mut topology = self.keeper.topology.lock().expect("lock").with_transits([]).expect("none");
        for (id, open) in &replay.open {
            let Some(leg) = open.leg.as_ref().filter(|leg| leg.moving) else { continue };
            let stage = Stage::Moving { leg: leg.leg };
            let transit = Transit { move_id: *id, source: open.source, target: open.target, stage };
            self.keeper.transits.lock().expect("lock").insert(*id, vec![(transit, leg.slots.clone())]);
            topology = topology.with_transits([(transit, &leg.slots[..])]).expect("few");
        }
        *self.keeper.topology.lock().expect("lock") = topology.clone();
        let router = Arc::new(Router::start(settings(&topology), Arc::new(topology)).expect("starts"));
        *self.keeper.router.lock().expect("lock") = Some(Arc::downgrade(&router));
        self.router = Some(router);
        for (id, open) in replay.open {
            let order = MoveOrder {
                id,
                source: open.source,
                target: open.target,
                slots: open.slots.clone(),
                resume: Some(open),
                ..self.order(id.0, 0, 1)
            };
            self.begin(order);
        }
    }

    /// Puts a move on record, as a control plane does before it begins it.
    fn begin_on_record(&self, order: MoveOrder) {
        self.keeper.records.lock().expect("lock").push(Record::Begun {
            move_id: order.id,
            source: order.source,
            target: order.target,
            slots: order.slots.clone(),
            protocol: order.protocol,
            durability: order.durability,
        });
        self.begin(order);
    }

    fn with(servers: Vec<Server>) -> Fleet {
        let names: Vec<String> = servers.iter().map(|s| s.address.to_string()).collect();
        let topology = Topology::even(&names).expect("nodes");
        let router = Arc::new(Router::start(settings(&topology), Arc::new(topology.clone())).expect("starts"));
        let dir = tempfile::tempdir().expect("a directory");
        let keeper = Arc::new(Keeper {
            router: Mutex::default(),
            topology: Mutex::new(topology),
            transits: Mutex::default(),
            records: Mutex::default(),
            ended: Mutex::default(),
            spool: dir.path().to_owned(),
            stuck: AtomicBool::new(false),
        });
        *keeper.router.lock().expect("lock") = Some(Arc::downgrade(&router));
        Fleet { router: Some(router), keeper, servers, _dir: dir }
    }

    fn router(&self) -> &Router {
        self.router.as_ref().expect("running")
    }

    fn client(&self) -> Client {
        Client::connect(self.router().addresses()[0])
    }

    fn node(&self, place: usize) -> NodeId {
        let name = self.servers[place].address.to_string();
        let topology = self.keeper.topology.lock().expect("lock");
        topology.nodes().find(|n| n.name == name).expect("a node").id
    }

    fn slots_of(&self, node: NodeId) -> Vec<Slot> {
        let topology = self.keeper.topology.lock().expect("lock");
        (0..SLOT_COUNT as u16).filter_map(Slot::new).filter(|slot| topology.owner(*slot) == node).collect()
    }

    fn order(&self, id: u64, from: usize, to: usize) -> MoveOrder {
        let (source, target) = (self.node(from), self.node(to));
        MoveOrder {
            id: MoveId(id),
            source,
            target,
            slots: self.slots_of(source),
            protocol: Protocol::Switchyard,
            durability: Durability::Memory,
            goal: Goal::Fast,
            bytes_per_second_max: None,
            purge_target: false,
            leftovers: Vec::new(),
            fingerprints: Fingerprinter::new(7),
            resume: None,
            host: self.keeper.clone(),
        }
    }

    fn begin(&self, order: MoveOrder) {
        self.router().begin_move(order).expect("begins");
    }

    fn progress(&self, id: u64) -> MoveProgress {
        self.router().moves().into_iter().find(|m| m.id == MoveId(id)).expect("a move")
    }

    #[track_caller]
    fn wait_for(&self, id: u64) -> MoveEnd {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(end) = self.keeper.ended.lock().expect("lock").get(&MoveId(id)) {
                return end.clone();
            }
            assert!(Instant::now() < end, "the move does not end: {:?}", self.progress(id));
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        drop(self.router.take());
    }
}

#[test]
fn every_type_time_to_live_and_database_arrives() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for n in 0..40 {
        for line in [
            format!("SET {{{n}}}string value{n}"),
            format!("SET {{{n}}}mortal value EX 1000"),
            format!("RPUSH {{{n}}}list a b c"),
            format!("HSET {{{n}}}hash f v g w"),
            format!("SADD {{{n}}}set 1 2 3"),
            format!("ZADD {{{n}}}zset 1 a 2 b"),
            format!("XADD {{{n}}}stream 1-1 f v"),
            format!("PFADD {{{n}}}hll a b c"),
            format!("SETBIT {{{n}}}bits 1000 1"),
        ] {
            assert!(!client.cmd(&line).starts_with('-'), "{line}");
        }
    }
    assert_eq!(client.cmd("SELECT 3"), "OK");
    for n in 0..40 {
        assert_eq!(client.cmd(&format!("SET {{{n}}}string other{n}")), "OK");
    }
    assert_eq!(client.cmd("SELECT 0"), "OK");
    let look = |client: &mut Client| -> Vec<String> {
        let mut seen = Vec::new();
        for n in 0..40 {
            for line in [
                format!("GET {{{n}}}string"),
                format!("LRANGE {{{n}}}list 0 -1"),
                format!("HGETALL {{{n}}}hash"),
                format!("SCARD {{{n}}}set"),
                format!("ZRANGE {{{n}}}zset 0 -1 WITHSCORES"),
                format!("XRANGE {{{n}}}stream - +"),
                format!("PFCOUNT {{{n}}}hll"),
                format!("GETBIT {{{n}}}bits 1000"),
                format!("PEXPIRETIME {{{n}}}mortal"),
            ] {
                seen.push(client.cmd(&line));
            }
        }
        seen
    };
    let before = look(&mut client);
    fleet.begin(fleet.order(1, 0, 1));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(look(&mut client), before);
    assert_eq!(client.cmd("SELECT 3"), "OK");
    for n in 0..40 {
        assert_eq!(client.cmd(&format!("GET {{{n}}}string")), format!("other{n}"));
    }
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    assert!(fleet.slots_of(fleet.node(0)).is_empty());
    assert!(fleet.progress(1).keys_moved > 0);
    // And back again.
    fleet.begin(fleet.order(2, 1, 0));
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    assert_eq!(client.cmd("SELECT 0"), "OK");
    assert_eq!(look(&mut client), before);
}

/// Counters, lists and transactions while everything moves to and fro: every acknowledged change is there once, and nobody sees an error.
#[test]
fn nobody_sees_a_move_but_by_its_speed() {
    let fleet = Fleet::new(2);
    let stop = AtomicBool::new(false);
    let moves = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for number in 0..6_u64 {
            let (fleet, stop) = (&fleet, &stop);
            workers.push(scope.spawn(move || {
                let mut client = fleet.client();
                let mut counts = vec![0_u64; 200];
                let mut state = number * 7919 + 1;
                let mut rounds = 0_u64;
                while !stop.load(Ordering::Relaxed) || rounds < 200 {
                    rounds += 1;
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let place = (state >> 33) as usize % counts.len();
                    let key = format!("{{w{number}:{place}}}");
                    match (state >> 20) % 6 {
                        0 | 1 => {
                            counts[place] += 1;
                            assert_eq!(client.cmd(&format!("INCR {key}")), counts[place].to_string());
                        }
                        2 => {
                            let expected = if counts[place] == 0 { "(nil)".to_owned() } else { counts[place].to_string() };
                            assert_eq!(client.cmd(&format!("GET {key}")), expected);
                        }
                        3 => {
                            assert_eq!(client.cmd("MULTI"), "OK");
                            assert_eq!(client.cmd(&format!("INCR {key}")), "QUEUED");
                            assert_eq!(client.cmd(&format!("SET {key}copy x")), "QUEUED");
                            counts[place] += 1;
                            assert_eq!(client.cmd("EXEC"), format!("[{}, OK]", counts[place]));
                        }
                        4 => {
                            counts[place] += 2;
                            client.send(&[
                                b"EVAL",
                                b"redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[1])",
                                b"1",
                                key.as_bytes(),
                            ]);
                            assert_eq!(client.reply(), counts[place].to_string());
                        }
                        _ => {
                            // A pipeline: its replies are in order, and its writes are seen.
                            client.post(&format!("INCR {key}"));
                            client.post(&format!("GET {key}"));
                            client.post(&format!("DEL {key}copy"));
                            counts[place] += 1;
                            assert_eq!(client.reply(), counts[place].to_string());
                            assert_eq!(client.reply(), counts[place].to_string());
                            assert!(["0", "1"].contains(&client.reply().as_str()));
                        }
                    }
                }
                for (place, count) in counts.iter().enumerate() {
                    let expected = if *count == 0 { "(nil)".to_owned() } else { count.to_string() };
                    assert_eq!(client.cmd(&format!("GET {{w{number}:{place}}}")), expected);
                }
            }));
        }
        for id in 1..=4 {
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            fleet.begin(fleet.order(id, from, to));
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
            moves.fetch_add(fleet.progress(id).keys_moved, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no client saw anything wrong");
        }
    });
    assert!(moves.load(Ordering::Relaxed) > 0);
}

#[test]
fn who_waits_for_an_element_gets_it_wherever_the_list_is() {
    let fleet = Fleet::new(2);
    // One key per node, so that both directions are there.
    let mut waiting: Vec<(String, Client)> = (0..20)
        .map(|n| {
            let mut client = fleet.client();
            client.post(&format!("BLPOP {{q{n}}}list 30"));
            (format!("{{q{n}}}list"), client)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    fleet.begin(fleet.order(1, 0, 1));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let mut pusher = fleet.client();
    for (key, client) in &mut waiting {
        assert_eq!(pusher.cmd(&format!("RPUSH {key} element")), "1");
        assert_eq!(client.reply(), format!("[{key}, element]"));
        assert_eq!(pusher.cmd(&format!("LLEN {key}")), "0");
    }
    // Its own time still ends a wait.
    let mut impatient = fleet.client();
    impatient.post("BLPOP {short}list 1");
    fleet.begin(fleet.order(2, 1, 0));
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    assert_eq!(impatient.reply(), "(nil)");
}

#[test]
fn a_watch_does_not_survive_the_hand_over_of_its_slot() {
    let fleet = Fleet::new(2);
    let mut clients: Vec<Client> = (0..8).map(|_| fleet.client()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 1")), "OK");
        assert_eq!(client.cmd(&format!("WATCH {{k{n}}}")), "OK");
    }
    fleet.begin(fleet.order(1, 0, 1));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let mut other = fleet.client();
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(other.cmd(&format!("SET {{k{n}}} 2")), "OK");
        assert_eq!(client.cmd("MULTI"), "OK");
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 3")), "QUEUED");
        assert_eq!(client.cmd("EXEC"), "(nil)");
        assert_eq!(client.cmd(&format!("GET {{k{n}}}")), "2");
    }
}

#[test]
fn leftovers_at_the_target_stop_a_move_unless_they_may_go() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for n in 0..100 {
        assert_eq!(client.cmd(&format!("SET {{{n}}} value")), "OK");
    }
    // Somebody's data at the wrong node.
    let mut direct = fleet.servers[1].client();
    let theirs: Vec<usize> = (0..100).filter(|n| direct.cmd(&format!("EXISTS {{{n}}}")) == "0").collect();
    for n in &theirs {
        assert_eq!(direct.cmd(&format!("SET {{{n}}} stale")), "OK");
    }
    fleet.begin(fleet.order(1, 0, 1));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it must not overwrite or keep them") };
    assert!(why.contains(&format!("{} keys", theirs.len())), "{why}");
    assert_eq!(client.cmd(&format!("GET {{{}}}", theirs[0])), "value");
    fleet.begin(MoveOrder { purge_target: true, ..fleet.order(2, 0, 1) });
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    for n in 0..100 {
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), "value");
    }
}

#[test]
fn a_target_without_room_is_not_filled() {
    let fleet = Fleet::with(vec![Server::start(&[]), Server::start(&["--maxmemory", "3mb"])]);
    let mut client = fleet.client();
    let value = "x".repeat(20_000);
    for n in 0..400 {
        let _ = client.cmd(&format!("SET {{{n}}} {value}"));
    }
    let before = client.cmd("GET {1}").len() + client.cmd("GET {2}").len() + client.cmd("GET {3}").len();
    fleet.begin(fleet.order(1, 0, 1));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it has no room") };
    assert!(why.contains("room") || why.contains("OOM"), "{why}");
    assert_eq!(client.cmd("GET {1}").len() + client.cmd("GET {2}").len() + client.cmd("GET {3}").len(), before);
}

/// Keys of several slots with their values, `count` of them.
fn fill(client: &mut Client, count: usize) {
    for n in 0..count {
        assert_eq!(client.cmd(&format!("SET {{{n}}} value{n}")), "OK");
    }
}

#[track_caller]
fn all_there(client: &mut Client, count: usize) {
    for n in 0..count {
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), format!("value{n}"));
    }
}

#[test]
fn a_scan_misses_no_key_that_was_there_all_the_time() {
    let fleet = Fleet::new(3);
    let mut client = fleet.client();
    fill(&mut client, 3000);
    for (id, (from, to)) in (1..).zip([(2, 0), (0, 1), (1, 2), (2, 1), (1, 0)]) {
        let mut seen = std::collections::BTreeSet::new();
        let mut cursor = "0".to_owned();
        let mut steps = 0;
        loop {
            let reply = client.cmd(&format!("SCAN {cursor} COUNT 50"));
            let (next, keys) = reply.trim_matches(['[', ']']).split_once(", [").map_or((reply.as_str(), ""), |(next, keys)| (next, keys));
            seen.extend(keys.trim_end_matches(']').split(", ").filter(|k| !k.is_empty()).map(str::to_owned));
            cursor = next.trim_matches(['[', ',', ' ']).to_owned();
            steps += 1;
            if steps == 20 {
                fleet.begin(MoveOrder { goal: Goal::Gentle, ..fleet.order(id, from, to) });
            }
            if cursor == "0" {
                break;
            }
            assert!(steps < 100_000, "it ends");
            std::thread::sleep(Duration::from_millis(1));
        }
        let missed: Vec<usize> = (0..3000).filter(|n| !seen.contains(&format!("{{{n}}}"))).collect();
        assert_eq!(missed, [] as [usize; 0], "move {id} from {from} to {to}");
        fleet.router().steer_move(MoveId(id), switchyard_router::Steer::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
    }
}

#[test]
fn a_target_that_is_killed_and_keeps_its_data_gets_the_rest() {
    let durable = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut fleet = Fleet::with(vec![Server::start(&[]), Server::start(&durable)]);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    fleet.begin(MoveOrder { durability: Durability::Aof, goal: Goal::Gentle, ..fleet.order(1, 0, 1) });
    until("some keys have moved", || fleet.progress(1).keys_moved > 200);
    fleet.servers[1].crash(&durable);
    fleet.router().steer_move(MoveId(1), switchyard_router::Steer::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_there(&mut fleet.client(), 4000);
}

#[test]
fn a_source_that_is_killed_and_shows_old_keys_again_brings_nothing_back() {
    let mut fleet = Fleet::with(vec![Server::start(&[]), Server::start(&[])]);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    // The state that it comes back with.
    assert_eq!(fleet.servers[0].client().cmd("SAVE"), "OK");
    fleet.begin(MoveOrder { goal: Goal::Gentle, ..fleet.order(1, 0, 1) });
    until("some keys have moved", || fleet.progress(1).keys_moved > 200);
    // Keys that have moved are changed and deleted where they are now.
    let mut direct = fleet.servers[1].client();
    let owned = fleet.slots_of(fleet.node(0));
    let moved: Vec<usize> =
        (0..4000).filter(|n| owned.contains(&switchyard_policy::topology::slot_of(format!("{{{n}}}").as_bytes()))).collect();
    let moved: Vec<usize> = moved.into_iter().filter(|n| direct.cmd(&format!("EXISTS {{{n}}}")) == "1").take(50).collect();
    assert!(moved.len() > 10);
    for (place, n) in moved.iter().enumerate() {
        let line = if place % 2 == 0 { format!("DEL {{{n}}}") } else { format!("SET {{{n}}} changed") };
        assert!(!client.cmd(&line).starts_with('-'));
    }
    fleet.servers[0].crash(&[]);
    fleet.router().steer_move(MoveId(1), switchyard_router::Steer::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let mut client = fleet.client();
    for n in 0..4000 {
        let expected = match moved.iter().position(|m| *m == n) {
            Some(place) if place % 2 == 0 => "(nil)".to_owned(),
            Some(_) => "changed".to_owned(),
            None => format!("value{n}"),
        };
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), expected, "key {n}");
    }
}

#[test]
fn a_node_that_stands_still_for_a_while_costs_time_and_nothing_else() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    for (id, place) in [(1, 1), (2, 1)] {
        let (from, to) = if id == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(MoveOrder { goal: Goal::Gentle, ..fleet.order(id, from, to) });
        until("some keys have moved", || fleet.progress(id).keys_moved > 100);
        fleet.servers[place].signal(rustix::process::Signal::STOP);
        // Longer than the router waits for an answer.
        std::thread::sleep(Duration::from_millis(6500));
        fleet.servers[place].signal(rustix::process::Signal::CONT);
        fleet.router().steer_move(MoveId(id), switchyard_router::Steer::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        all_there(&mut fleet.client(), 4000);
    }
}

#[test]
fn a_router_that_ends_in_the_middle_is_followed_by_one_that_goes_on() {
    let mut fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    fleet.begin_on_record(MoveOrder { goal: Goal::Gentle, ..fleet.order(1, 0, 1) });
    for _ in 0..3 {
        let before = fleet.progress(1).keys_moved;
        until("some keys have moved", || {
            let progress = fleet.progress(1);
            progress.keys_moved > before + 100 || progress.end.is_some()
        });
        fleet.restart();
        all_there(&mut fleet.client(), 4000);
    }
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_there(&mut fleet.client(), 4000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

#[test]
fn a_flush_in_the_middle_leaves_nothing() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    // Large enough that some are always read of one node and not yet stored at the other.
    let value = vec![b'x'; 200_000];
    for id in 1..=8 {
        for n in 0..150 {
            client.send(&[b"SET", format!("{{{n}}}").as_bytes(), &value]);
            assert_eq!(client.reply(), "OK");
        }
        let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(fleet.order(id, from, to));
        until("some keys have moved", || fleet.progress(id).bytes_moved > 0);
        assert_eq!(client.cmd("FLUSHALL"), "OK");
        assert_eq!(client.cmd("DBSIZE"), "0");
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        assert_eq!(client.cmd("DBSIZE"), "0");
    }
}

#[test]
fn the_servers_own_way_moves_the_same_keys() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 1000);
    fleet.begin(MoveOrder { protocol: Protocol::StopAndCopy, ..fleet.order(1, 0, 1) });
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_there(&mut client, 1000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

#[test]
fn nothing_published_on_a_shard_channel_is_missed() {
    let fleet = Fleet::new(2);
    let mut subscribers: Vec<Client> = (0..8).map(|_| fleet.client()).collect();
    for (n, subscriber) in subscribers.iter_mut().enumerate() {
        assert!(subscriber.cmd(&format!("SSUBSCRIBE {{c{n}}}")).starts_with("[ssubscribe"));
    }
    let stop = AtomicBool::new(false);
    let published = std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            let mut client = fleet.client();
            let mut count = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                count += 1;
                for n in 0..8 {
                    assert_eq!(client.cmd(&format!("SPUBLISH {{c{n}}} {count}")), "1");
                }
            }
            count
        });
        fill(&mut fleet.client(), 500);
        for id in 1..=4 {
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            fleet.begin(fleet.order(id, from, to));
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        }
        stop.store(true, Ordering::Relaxed);
        publisher.join().expect("published")
    });
    for (n, subscriber) in subscribers.iter_mut().enumerate() {
        for count in 1..=published {
            assert_eq!(subscriber.reply(), format!("[smessage, {{c{n}}}, {count}]"));
        }
    }
}

#[test]
fn who_waits_too_long_for_a_key_is_told_so_and_nothing_else_breaks() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    fleet.begin(MoveOrder { goal: Goal::Gentle, ..fleet.order(1, 0, 1) });
    until("some keys have moved", || fleet.progress(1).keys_moved > 20);
    fleet.keeper.stuck.store(true, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    let owned = fleet.slots_of(fleet.node(0));
    let there: Vec<usize> =
        (0..4000).filter(|n| owned.contains(&switchyard_policy::topology::slot_of(format!("{{{n}}}").as_bytes()))).take(90).collect();
    let value = vec![b'x'; 2 << 20];
    let told: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = there
            .iter()
            .enumerate()
            .map(|(place, n)| {
                let (fleet, value) = (&fleet, &value);
                scope.spawn(move || {
                    let mut client = fleet.client();
                    let key = format!("{{{n}}}");
                    let reply = match place % 3 {
                        0 => {
                            client.send(&[b"SET", format!("{{{n}}}large").as_bytes(), value]);
                            client.reply()
                        }
                        1 => {
                            client.post(&format!("WATCH {key}"));
                            client.post("MULTI");
                            client.post(&format!("SET {key}watched 1"));
                            client.post("EXEC");
                            let watched = client.reply();
                            assert_eq!((client.reply(), client.reply()), ("OK".to_owned(), "QUEUED".to_owned()));
                            let executed = client.reply();
                            if watched.starts_with('-') {
                                assert!(executed == "(nil)" || executed.starts_with('-'), "{executed} without the watch");
                            }
                            watched
                        }
                        _ => client.cmd(&format!("APPEND {key} x")),
                    };
                    assert_eq!(client.cmd("PING"), "PONG");
                    assert!(!reply.starts_with('-') || reply.starts_with("-NODETIMEOUT"), "{reply}");
                    usize::from(reply.starts_with('-'))
                })
            })
            .collect();
        clients.into_iter().map(|c| c.join().expect("answered")).sum()
    });
    assert!(told > 0, "some keys were not there");
    fleet.keeper.stuck.store(false, Ordering::SeqCst);
    fleet.router().steer_move(MoveId(1), switchyard_router::Steer::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert!(fleet.progress(1).holds.max_us > 1_000_000);
}
