//! Real servers, a router, an in-memory host, and clients.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use switchyard_policy::failover::Position;
use switchyard_policy::migration::record::Replay;
use switchyard_policy::migration::{Cause, Fingerprint, Fingerprinter, Goal, Key, MoveOptions, MoveOrder, Record};
use switchyard_policy::topology::{MoveId, NodeId, SLOT_COUNT, Slot, Stage, Topology, Transit};
use switchyard_router::{
    Done, Host, ListenerSettings, MoveEnd, MoveProgress, MoveTask, MoveTotals, NodeAccess, Ports, Router,
    RuntimeSettings, Secret, Settings, Threads,
};

use super::ports;

/// Timeout of every wait, far more than needed, since the machine may be busy.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(240);

pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) address: SocketAddr,
    /// Removed on drop.
    pub(crate) _dir: tempfile::TempDir,
}

impl Server {
    pub(crate) fn start(options: &[&str]) -> Server {
        Server::of(&default_program(), options)
    }

    pub(crate) fn start_at(address: SocketAddr, dir: tempfile::TempDir, options: &[&str]) -> Server {
        Server::start_program(&default_program(), address, dir, options)
    }

    /// Starts another program.
    pub(crate) fn of(program: &str, options: &[&str]) -> Server {
        let free = (Ipv4Addr::LOCALHOST, ports::free()).into();
        Server::start_program(program, free, tempfile::tempdir().expect("a directory"), options)
    }

    fn start_program(program: &str, address: SocketAddr, dir: tempfile::TempDir, options: &[&str]) -> Server {
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

    pub(crate) fn client(&self) -> Client {
        Client::connect(self.address)
    }
}

impl Server {
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).expect("it runs");
    }

    /// Kills the server and restarts it with its persisted data.
    pub(crate) fn crash(&mut self, options: &[&str]) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let dir = std::mem::replace(&mut self._dir, tempfile::tempdir().expect("a directory"));
        // Drops the old value, whose process has already ended.
        *self = Server::start_at(self.address, dir, options);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn default_program() -> String {
    let program = ["redis-server", "valkey-server"]
        .into_iter()
        .find(|p| Command::new(p).arg("--version").stdout(Stdio::null()).status().is_ok());
    program.expect("redis-server or valkey-server is installed").to_owned()
}

/// Other server programs: paths in SWITCHYARD_TEST_SERVERS, separated by colons.
pub(crate) fn other_programs() -> Vec<String> {
    let named = std::env::var("SWITCHYARD_TEST_SERVERS").unwrap_or_default();
    let programs: Vec<String> = named.split(':').filter(|path| !path.is_empty()).map(str::to_owned).collect();
    if programs.is_empty() {
        eprintln!(
            "skipped: SWITCHYARD_TEST_SERVERS names no other servers (paths of redis-server or valkey-server, with colons between)"
        );
    }
    programs
}

#[track_caller]
pub(crate) fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + TIMEOUT;
    while !is() {
        assert!(Instant::now() < end, "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends commands as lines of words and returns replies as text: `OK`, `-ERR ...`, `(nil)`, `[a, b]`.
pub(crate) struct Client {
    stream: TcpStream,
    input: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Client {
        let stream = TcpStream::connect(address).expect("connects");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        stream.set_nodelay(true).expect("no delay");
        Client { stream, input: Vec::new() }
    }

    /// Replication offset of a server, as a primary or a replica.
    pub(crate) fn replication_offset(&mut self) -> u64 {
        let info = self.cmd("INFO replication");
        let field = |name: &str| {
            info.split(name).nth(1).and_then(|rest| rest.split("\\r").next()).and_then(|number| number.parse().ok())
        };
        field("slave_repl_offset:").or_else(|| field("master_repl_offset:")).expect("an offset")
    }

    pub(crate) fn send(&mut self, args: &[&[u8]]) {
        let mut out = format!("*{}\r\n", args.len()).into_bytes();
        for arg in args {
            out.extend_from_slice(format!("${}\r\n", arg.len()).as_bytes());
            out.extend_from_slice(arg);
            out.extend_from_slice(b"\r\n");
        }
        self.stream.write_all(&out).expect("sent");
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("sent");
    }

    pub(crate) fn post(&mut self, line: &str) {
        let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
        self.send(&words);
    }

    pub(crate) fn cmd(&mut self, line: &str) -> String {
        self.post(line);
        self.reply()
    }

    pub(crate) fn line(&mut self) -> String {
        loop {
            if let Some(at) = self.input.windows(2).position(|w| w == b"\r\n") {
                let line = String::from_utf8_lossy(&self.input[..at]).into_owned();
                self.input.drain(..at + 2);
                return line;
            }
            self.fill();
        }
    }

    pub(crate) fn fill(&mut self) {
        let mut chunk = [0; 65536];
        let count = self.stream.read(&mut chunk).expect("a reply in time");
        assert!(count > 0, "the connection was closed");
        self.input.extend_from_slice(&chunk[..count]);
    }

    /// Whether the peer closes the connection without further data.
    pub(crate) fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0; 100]), Ok(0) | Err(_)) && self.input.is_empty()
    }

    pub(crate) fn reply(&mut self) -> String {
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
            "_" => "(nil)".to_owned(),
            "*" | ">" | "~" | "%" => {
                let count = rest.parse::<usize>().expect("a count") * if kind == "%" { 2 } else { 1 };
                let parts: Vec<String> = (0..count).map(|_| self.reply()).collect();
                format!("[{}]", parts.join(", "))
            }
            _ => panic!("what is {line:?}?"),
        }
    }
}

pub(crate) type Transits = Vec<(Transit, Vec<Slot>)>;

/// In-memory replacement of the control plane.
#[derive(Debug)]
pub(crate) struct Keeper {
    /// Held for a whole change of the map, from the read to the publication. Two moves at once would undo each other's
    /// changes.
    pub(crate) changing: Mutex<()>,
    pub(crate) router: Mutex<Option<Weak<Router>>>,
    pub(crate) topology: Mutex<Topology>,
    pub(crate) transits: Mutex<BTreeMap<MoveId, Transits>>,
    pub(crate) records: Mutex<Vec<Record>>,
    pub(crate) ended: Mutex<BTreeMap<MoveId, MoveEnd>>,
    pub(crate) spool: PathBuf,
    /// While set, no record becomes durable. `is_stuck`: there is such a record.
    pub(crate) stuck: AtomicBool,
    pub(crate) is_stuck: AtomicBool,
    /// While set, the record that a leg has drained does not become durable. `is_held`: there is such a record.
    pub(crate) holds_moving: AtomicBool,
    pub(crate) is_held: AtomicBool,
    /// While set, records of moved keys or of completed legs, and all later records, are lost. `is_losing`: there was
    /// such a record.
    pub(crate) loses_moved: AtomicBool,
    pub(crate) is_losing: AtomicBool,
    /// Positions required of replicas, with the number of hand-overs at that time.
    pub(crate) needs: Mutex<Vec<(NodeId, Position, usize)>>,
    pub(crate) handed_over: AtomicUsize,
    /// Last reported number of databases.
    databases: AtomicUsize,
    /// While set, no map can be stored.
    pub(crate) cannot_store: AtomicBool,
    /// While set, replicas have not caught up.
    pub(crate) replicas_are_behind: Arc<AtomicBool>,
    /// Readable replicas.
    pub(crate) replicas: Mutex<Vec<SocketAddr>>,
}

impl Keeper {
    pub(crate) fn publish(&self, topology: Topology) -> u64 {
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
            self.is_stuck.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        if records.iter().any(|record| matches!(record, Record::LegMoving { .. })) {
            while self.holds_moving.load(Ordering::SeqCst) {
                self.is_held.store(true, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let moved = |record: &Record| matches!(record, Record::Moved { .. } | Record::CutOver { .. });
        if self.loses_moved.load(Ordering::SeqCst)
            && (self.is_losing.load(Ordering::SeqCst) || records.iter().any(moved))
        {
            self.is_losing.store(true, Ordering::SeqCst);
            return;
        }
        self.records.lock().expect("lock").extend(records);
        done(Ok(()));
    }

    fn lost(&self, move_id: MoveId, node: NodeId, _: &[Fingerprint], _: u64) {
        panic!("{node:?} of {move_id:?} was not given up");
    }

    fn hand_over(&self, move_id: MoveId, slots: &[Slot], keys: Option<&[Key]>, owner: NodeId, done: Done) {
        if self.cannot_store.load(Ordering::SeqCst) {
            return done(Err("no space left".to_owned()));
        }
        self.handed_over.fetch_add(1, Ordering::SeqCst);
        let changing = self.changing.lock().expect("lock");
        if let Some(transits) = self.transits.lock().expect("lock").get_mut(&move_id) {
            for (_, of) in transits {
                of.retain(|slot| !slots.contains(slot));
            }
        }
        let next = match keys {
            None => self.topology.lock().expect("lock").handed_over(slots, owner),
            Some(keys) => self.topology.lock().expect("lock").keys_handed_over(slots, keys, owner),
        };
        self.publish(next);
        drop(changing);
        done(Ok(()));
    }

    fn replicas_need(&self, node: NodeId, position: Position, _: Duration, done: Done) {
        let offset = position.offset;
        self.needs.lock().expect("lock").push((node, position, self.handed_over.load(Ordering::SeqCst)));
        let behind = self.replicas_are_behind.clone();
        let replicas = self.replicas.lock().expect("lock").clone();
        std::thread::spawn(move || {
            until("replicas are not behind", || !behind.load(Ordering::SeqCst));
            for replica in replicas {
                let mut replica = Client::connect(replica);
                until("a replica has it", || replica.replication_offset() >= offset);
            }
            done(Ok(()));
        });
    }

    fn set_transits(&self, move_id: MoveId, transits: Transits) -> Result<u64, String> {
        let _changing = self.changing.lock().expect("lock");
        let mut all = self.transits.lock().expect("lock");
        all.insert(move_id, transits);
        let topology = self.topology.lock().expect("lock").clone();
        let next =
            topology.with_transits(all.values().flatten().map(|(t, s)| (*t, &s[..]))).map_err(|e| e.to_string())?;
        drop(all);
        Ok(self.publish(next))
    }

    fn databases(&self, _: MoveId, count: u32) {
        self.databases.store(count as usize, Ordering::SeqCst);
    }

    fn spool_directory(&self) -> PathBuf {
        self.spool.clone()
    }

    fn ended(&self, move_id: MoveId, end: &MoveEnd) {
        self.ended.lock().expect("lock").insert(move_id, end.clone());
    }
}

pub(crate) fn settings(topology: &Topology, password: Option<&str>) -> Settings {
    let nodes = topology
        .nodes()
        .map(|node| {
            let address = node.name.parse().expect("an address");
            let access = NodeAccess {
                name: node.name.clone(),
                address: Some(address),
                unresolved: None,
                username: None,
                password: password.map(|p| Secret(p.to_owned())),
                tls: None,
            };
            (node.id, access)
        })
        .collect();
    Settings {
        listen: vec![ListenerSettings::tcp("127.0.0.1:0".parse().expect("address"))],
        workers: 2,
        pin: false,
        batched_sends: true,
        threads: Threads::default(),
        site: "fleet".to_owned(),
        processes: BTreeMap::new(),
        held_reason: None,
        cluster_map: None,
        ports: Ports::default(),
        ownership: None,
        servers: BTreeMap::new(),
        live: RuntimeSettings {
            nodes,
            colocate_timeout: TIMEOUT,
            wait_max: Some(Duration::ZERO),
            ..RuntimeSettings::default()
        },
    }
}

pub(crate) struct Fleet {
    pub(crate) router: Option<Arc<Router>>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) servers: Vec<Server>,
    password: Option<&'static str>,
    _dir: tempfile::TempDir,
}

/// Returns a changed move.
pub(crate) fn with(mut task: MoveTask, change: impl FnOnce(&mut MoveOrder)) -> MoveTask {
    change(&mut task.order);
    task
}

impl Fleet {
    pub(crate) fn new(count: usize) -> Fleet {
        Fleet::with((0..count).map(|_| Server::start(&[])).collect())
    }

    /// Stops the router at an arbitrary point, and starts a new one that resumes from the journal.
    pub(crate) fn restart(&mut self) {
        let router = self.router.take().expect("running");
        self.keeper.router.lock().expect("lock").take();
        // A mover may hold it for a publication, but must not drop it last, because the drop waits for movers.
        let mut router = router;
        loop {
            match Arc::try_unwrap(router) {
                Ok(router) => break drop(router),
                Err(shared) => router = shared,
            }
            std::thread::yield_now();
        }
        self.keeper.loses_moved.store(false, Ordering::SeqCst);
        self.keeper.is_losing.store(false, Ordering::SeqCst);
        let replay = Replay::of(self.keeper.records.lock().expect("lock").iter()).expect("a journal");
        self.keeper.transits.lock().expect("lock").clear();
        let mut topology = self.keeper.topology.lock().expect("lock").with_transits([]).expect("none");
        for (id, open) in &replay.open {
            let Some(leg) = open.leg.as_ref().filter(|leg| leg.moving) else { continue };
            let stage = Stage::Moving { leg: leg.leg };
            let transit = Transit {
                move_id: *id,
                source: open.source,
                target: open.target,
                stage,
                keys_only: open.keys.is_some(),
            };
            self.keeper.transits.lock().expect("lock").insert(*id, vec![(transit, leg.slots.clone())]);
            topology = topology.with_transits([(transit, &leg.slots[..])]).expect("few");
        }
        *self.keeper.topology.lock().expect("lock") = topology.clone();
        let router = Arc::new(Router::start(settings(&topology, self.password), Arc::new(topology)).expect("starts"));
        *self.keeper.router.lock().expect("lock") = Some(Arc::downgrade(&router));
        self.router = Some(router);
        for (id, open) in replay.open {
            let task = with(self.task(id.0, 0, 1), |order| {
                (order.source, order.target) = (open.source, open.target);
                (order.slots, order.keys, order.how.protocol) = (open.slots.clone(), open.keys.clone(), open.protocol);
            });
            let databases = self.keeper.databases.load(Ordering::SeqCst) as u32;
            self.begin(MoveTask { resume: Some(open), databases, ..task });
        }
    }

    /// Records a move and then starts it, like a control plane.
    pub(crate) fn begin_on_record(&self, task: MoveTask) {
        self.keeper.records.lock().expect("lock").extend(task.order.records(task.id));
        self.begin(task);
    }

    pub(crate) fn with(servers: Vec<Server>) -> Fleet {
        Fleet::with_password(servers, None)
    }

    pub(crate) fn with_ports(servers: Vec<Server>, ports: Ports) -> Fleet {
        Fleet::made(servers, None, ports)
    }

    /// Like `with`, for servers that require a password.
    pub(crate) fn with_password(servers: Vec<Server>, password: Option<&'static str>) -> Fleet {
        Fleet::made(servers, password, Ports::default())
    }

    fn made(servers: Vec<Server>, password: Option<&'static str>, ports: Ports) -> Fleet {
        let names: Vec<String> = servers.iter().map(|s| s.address.to_string()).collect();
        let topology = Topology::even(&names).expect("nodes");
        let settings = Settings { ports, ..settings(&topology, password) };
        let router = Arc::new(Router::start(settings, Arc::new(topology.clone())).expect("starts"));
        let dir = tempfile::tempdir().expect("a directory");
        let keeper = Arc::new(Keeper {
            changing: Mutex::new(()),
            router: Mutex::default(),
            topology: Mutex::new(topology),
            transits: Mutex::default(),
            records: Mutex::default(),
            ended: Mutex::default(),
            spool: dir.path().to_owned(),
            stuck: AtomicBool::new(false),
            is_stuck: AtomicBool::new(false),
            holds_moving: AtomicBool::new(false),
            is_held: AtomicBool::new(false),
            loses_moved: AtomicBool::new(false),
            is_losing: AtomicBool::new(false),
            needs: Mutex::default(),
            handed_over: AtomicUsize::new(0),
            databases: AtomicUsize::new(0),
            cannot_store: AtomicBool::new(false),
            replicas_are_behind: Arc::default(),
            replicas: Mutex::default(),
        });
        *keeper.router.lock().expect("lock") = Some(Arc::downgrade(&router));
        Fleet { router: Some(router), keeper, servers, password, _dir: dir }
    }

    pub(crate) fn router(&self) -> &Router {
        self.router.as_ref().expect("running")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(self.router().addresses()[0])
    }

    pub(crate) fn node(&self, place: usize) -> NodeId {
        let name = self.servers[place].address.to_string();
        let topology = self.keeper.topology.lock().expect("lock");
        topology.nodes().find(|n| n.name == name).expect("a node").id
    }

    pub(crate) fn slots_of(&self, node: NodeId) -> Vec<Slot> {
        let topology = self.keeper.topology.lock().expect("lock");
        (0..SLOT_COUNT as u16).filter_map(Slot::new).filter(|slot| topology.owner(*slot) == node).collect()
    }

    /// Returns a move of all slots of a node, at full speed.
    pub(crate) fn task(&self, id: u64, from: usize, to: usize) -> MoveTask {
        let (source, target) = (self.node(from), self.node(to));
        let how = MoveOptions { goal: Goal::Fast, ..MoveOptions::default() };
        MoveTask {
            id: MoveId(id),
            order: MoveOrder {
                source,
                target,
                slots: self.slots_of(source),
                keys: None,
                how,
                cause: Cause::Requested(None),
            },
            leftovers: Vec::new(),
            leftovers_at_source: Vec::new(),
            databases: 0,
            aborted: false,
            give_up: None,
            so_far: MoveTotals::default(),
            fingerprints: Fingerprinter::new(7),
            resume: None,
            host: self.keeper.clone(),
        }
    }

    pub(crate) fn begin(&self, task: MoveTask) {
        self.router().begin_move(task).expect("begins");
    }

    /// Runs a move to its end.
    #[track_caller]
    pub(crate) fn run_to_end(&self, task: MoveTask) {
        let id = task.id.0;
        self.begin(task);
        assert_eq!(self.wait_for(id), MoveEnd::Done);
    }

    pub(crate) fn progress(&self, id: u64) -> MoveProgress {
        self.router().progress_of(&[MoveId(id)]).pop().expect("a move")
    }

    /// Starts a move, calls `with` when its first leg has drained and before any key of it is copied, and waits for the
    /// end of the move.
    #[track_caller]
    pub(crate) fn interrupt(&self, task: MoveTask, with: impl FnOnce()) -> MoveEnd {
        let id = task.id.0;
        self.keeper.holds_moving.store(true, Ordering::SeqCst);
        self.begin(task);
        until("a leg has drained", || self.keeper.is_held.load(Ordering::SeqCst));
        with();
        self.keeper.holds_moving.store(false, Ordering::SeqCst);
        self.wait_for(id)
    }

    #[track_caller]
    pub(crate) fn wait_for(&self, id: u64) -> MoveEnd {
        let end = Instant::now() + TIMEOUT;
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

/// Writes `count` keys of several slots.
pub(crate) fn fill(client: &mut Client, count: usize) {
    for n in 0..count {
        assert_eq!(client.cmd(&format!("SET {{{n}}} value{n}")), "OK");
    }
}

#[track_caller]
pub(crate) fn all_there(client: &mut Client, count: usize) {
    for n in 0..count {
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), format!("value{n}"));
    }
}
