//! Commands that the router answers itself, like one large server.
//!
//! Commands that only need the client are here; families of commands have their own files (`acl`, `cluster`, `info`,
//! `client_commands`, `config_commands`).

use std::sync::Arc;

use switchyard_resp::command::{Local, Merge};
use switchyard_resp::encode;
use switchyard_resp::units::counted;
use tracing::warn;

use super::Worker;
use super::acl::{acl, asker};
use super::cluster::cluster_mode;
use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::fan_out::FanOutScope;
use super::flow::Flow;
use super::gather::{Aggregation, FanOut, Gathers};
use super::info::fleet_version;
use super::invocation::Invocation;
use super::login::{Login, awaits_users, become_user, login};
use super::monitor::end_monitor;
use super::pubsub::Subscriber;
use super::slowlog::{slowlog, slowlog_details};
use super::tracking::Tracked;
use super::tracking::commands::tracking_command;
use super::transactions::session::Session;
use super::transactions::{discard, transaction};
use super::turn::Turn;
use super::upstreams::Upstreams;
use super::upstreams::link::Phase;
use crate::lane::Lane;
use crate::lock::lock;
use crate::metrics::Errors;
use crate::operator::OperatorCommand;
use crate::settings::other_database;
use crate::slab::Handle;

impl Worker {
    pub(super) fn local(&mut self, call: &Invocation<'_>, local: Local) -> Flow {
        let Invocation { routing, handle, command, raw, args, .. } = *call;
        let class = command.class() as u8;
        let arg = |index: usize| args.get(index).unwrap_or_default();
        let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
        let resp3 = client.resp3();
        let mut out = Vec::new();
        match local {
            Local::Ping if args.len() > 2 => {
                return self.cx.down.refuse(
                    &self.cx.turn,
                    handle,
                    class,
                    &switchyard_resp::command::errors::arity(command),
                );
            }
            Local::Ping if !resp3 && client.subscribed() > 0 => {
                out.extend_from_slice(b"*2\r\n$4\r\npong\r\n");
                encode::bulk(&mut out, arg(1));
            }
            Local::Ping => match args.get(1) {
                Some(text) => encode::bulk(&mut out, text),
                None => out.extend_from_slice(b"+PONG\r\n"),
            },
            Local::Echo => encode::bulk(&mut out, arg(1)),
            Local::Time => {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                out.extend_from_slice(b"*2\r\n");
                encode::bulk(&mut out, now.as_secs().to_string().as_bytes());
                encode::bulk(&mut out, now.subsec_micros().to_string().as_bytes());
            }
            Local::Select => return self.gathers.select(&self.cx.turn, &mut self.cx.down, handle, class, arg(1)),
            Local::Hello => return hello(&self.cx.turn, &mut self.cx.down, call),
            Local::Auth => return auth(&self.cx.turn, &mut self.cx.down, call),
            Local::Quit => {
                // Before the reply, so that a client that has read it finds no subscription of this one.
                if let Some(subscriber) = client.take_state::<Subscriber>() {
                    self.pubsub.forget_subscriber(&self.cx.turn, handle, &subscriber);
                }
                self.cx.down.answer(&self.cx.turn, handle, class, b"+OK\r\n");
                self.cx.down.close_after_replies(handle);
                return Flow::Close;
            }
            Local::Reset => {
                if client.in_flight() > 0 {
                    return Flow::Stall(Stall::Barrier);
                }
                let user = routing.live.users.default_user();
                let (user, open) = (user.clone(), user.is_open());
                if let Err(text) = become_user(&self.cx.turn, &mut self.cx.down, handle, user, open) {
                    return self.cx.down.refuse(&self.cx.turn, handle, class, &text);
                }
                discard(&mut self.cx.down, handle);
                let Some(client) = self.cx.down.get_mut(handle) else { return Flow::Close };
                client.reset(routing.live.database);
                let subscriber = client.take_state::<Subscriber>();
                let monitor = client.set_monitor(false);
                let tracked = client.state::<Tracked>().is_some();
                if monitor {
                    end_monitor(&self.cx.turn, handle);
                }
                if tracked {
                    self.tracking.end_tracking(&self.cx.turn, &mut self.cx.down, handle);
                }
                if let Some(subscriber) = subscriber {
                    self.pubsub.forget_subscriber(&self.cx.turn, handle, &subscriber);
                }
                out.extend_from_slice(b"+RESET\r\n");
            }
            Local::Role => {
                out.extend_from_slice(b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n");
            }
            Local::ConfigGet => {
                return self.gathers.config_get(&self.cx.turn, &mut self.cx.down, call);
            }
            Local::ConfigResetstat => {
                if !client.may_take(Lane::Main) {
                    return Flow::Stall(Stall::Barrier);
                }
                *lock(&self.cx.turn.shared().errors_before) = Errors::of_all(&self.cx.turn.shared().counters);
                return self.gathers.fan_out(
                    &self.cx.turn,
                    &mut self.cx.down,
                    FanOut {
                        client: handle,
                        lane: Lane::Main,
                        reach: FanOutScope::Everybody,
                        requests: vec![raw.to_vec()],
                        class,
                        whole: Aggregation::Merged(switchyard_resp::command::Merge::Same),
                    },
                );
            }
            Local::Scan => return self.gathers.scan(&self.cx.turn, &mut self.cx.down, call),
            Local::RandomKey => return self.gathers.random_key(&self.cx.turn, &mut self.cx.down, handle, class),
            Local::SlowlogGet | Local::SlowlogLen | Local::SlowlogReset => {
                return slowlog(&self.cx.turn, &mut self.cx.down, &mut self.cx.hooks, call, local);
            }
            Local::Cluster => {
                return self.gathers.cluster(&self.cx.turn, &mut self.cx.down, call);
            }
            Local::ClusterMode => return cluster_mode(&self.cx.turn, &mut self.cx.down, routing, handle, class),
            Local::ConfigSet => return self.config_set(call),
            Local::Info => {
                let sections = args.iter().skip(1).map(|s| String::from_utf8_lossy(s).to_ascii_lowercase()).collect();
                return self.gathers.info(
                    &self.cx.turn,
                    &self.cx.up,
                    &mut self.cx.down,
                    routing,
                    handle,
                    class,
                    sections,
                );
            }
            Local::Lolwut => {
                let text = format!(
                    "Switchyard {}: one address, {} nodes\n",
                    env!("CARGO_PKG_VERSION"),
                    routing.topology.nodes().len()
                );
                encode::verbatim(&mut out, text.as_bytes(), resp3);
            }
            Local::Switchyard => {
                return self.gathers.switchyard(&self.cx.turn, &self.cx.up, &mut self.cx.down, call);
            }
            Local::Multi | Local::Exec | Local::Discard | Local::Watch | Local::Unwatch => {
                return transaction(&mut self.cx, call, local);
            }
            Local::Wait => return self.reissued_commands.wait(&mut self.cx, call),
            Local::AclWhoami => encode::bulk(&mut out, client.identity().user().name().as_bytes()),
            Local::AclChange => {
                return self.gathers.change_users(&self.cx.turn, &mut self.cx.down, call);
            }
            Local::AclList
            | Local::AclUsers
            | Local::AclGetuser
            | Local::AclCat
            | Local::AclDryrun
            | Local::AclLog
            | Local::AclGenpass => {
                return acl(&self.cx.turn, &mut self.cx.down, call, local);
            }
            Local::Script => {
                return self.cx.down.refuse(&self.cx.turn, handle, class, "ERR unknown subcommand. Try SCRIPT HELP.");
            }
            Local::Subscribe
            | Local::Unsubscribe
            | Local::Psubscribe
            | Local::Punsubscribe
            | Local::Ssubscribe
            | Local::Sunsubscribe
            | Local::Publish
            | Local::Spublish
            | Local::PubsubChannels
            | Local::PubsubNumsub
            | Local::PubsubNumpat
            | Local::PubsubShardchannels
            | Local::PubsubShardnumsub => return self.dispatch_pubsub(call, local),
            Local::ClientTracking | Local::ClientCaching | Local::ClientTrackinginfo | Local::ClientGetredir => {
                return tracking_command(
                    &self.cx.turn,
                    &mut self.cx.down,
                    &mut self.gathers,
                    &mut self.tracking,
                    call,
                    local,
                );
            }
            Local::Monitor => return self.gathers.monitor(&self.cx.turn, &mut self.cx.down, handle, class),
            Local::ClientPause => {
                return super::pause::pause(
                    &self.cx.turn,
                    &mut self.cx.down,
                    &mut self.gathers,
                    &mut self.pauses,
                    call,
                );
            }
            Local::ClientUnpause => return self.gathers.unpause(&self.cx.turn, &mut self.cx.down, handle, class),
            Local::ClientId
            | Local::ClientGetname
            | Local::ClientSetname
            | Local::ClientSetinfo
            | Local::ClientList
            | Local::ClientInfo
            | Local::ClientKill
            | Local::ClientReply
            | Local::ClientNoEvict
            | Local::ClientNoTouch
            | Local::ClientHelp
            | Local::ClientUnblock
            | Local::ClientCapa => {
                return self.gathers.client_command(
                    &self.cx.turn,
                    &self.cx.up,
                    &mut self.cx.down,
                    &mut self.cx.hooks,
                    call,
                    local,
                );
            }
        }
        self.cx.down.answer(&self.cx.turn, handle, class, &out);
        Flow::Next
    }
}

/// Closes clients that have selected a database that is no longer served, or are about to select one in a transaction.
pub(super) fn close_clients_elsewhere(turn: &Turn, down: &mut Downstreams) {
    let live = Arc::clone(&turn.routing().live);
    let mut closed = 0_usize;
    for handle in down.handles() {
        let Some(client) = down.get(handle) else { continue };
        let selected = client.state::<Session>().into_iter().flat_map(|session| session.selects());
        if selected.chain([client.database()]).any(|database| other_database(&live, database).is_some()) {
            down.close_client(turn, handle);
            closed += 1;
        }
    }
    if closed > 0 {
        let (clients, database) = (counted(closed, "client"), live.database);
        warn!(
            "closed {clients} with another database than {database}: a pool that ejects servers (auto_eject_hosts) serves no other database"
        );
    }
}

fn auth(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
    let Invocation { routing, handle, args, .. } = *call;
    let class = call.class();
    if awaits_users(down, handle) {
        return Flow::Stall(Stall::Barrier);
    }
    let (user, password) = match args.len() {
        2 => (&b"default"[..], args.get(1).unwrap_or_default()),
        3 => (args.get(1).unwrap_or_default(), args.get(2).unwrap_or_default()),
        _ => return down.refuse(turn, handle, class, "ERR syntax error"),
    };
    if args.len() == 2 && routing.live.users.default_user().is_open() {
        return down.refuse(turn,
            handle,
            class,
            "ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?",
        );
    }
    match login(turn, down, routing, handle, user, password) {
        Login::Wait => return Flow::Stall(Stall::Login),
        Login::Refused(text) => return down.refuse(turn, handle, class, text),
        Login::As(user) => {
            if let Err(text) = become_user(turn, down, handle, user, true) {
                return down.refuse(turn, handle, class, &text);
            }
        }
    }
    down.answer(turn, handle, class, b"+OK\r\n");
    Flow::Next
}

/// <https://redis.io/docs/latest/commands/hello/>
fn hello(turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
    let Invocation { routing, handle, args, .. } = *call;
    let class = call.class();
    let mut protocol = None;
    if let Some(version) = args.get(1) {
        protocol = match parse::<i64>(version) {
            None => return down.refuse(turn, handle, class, "ERR Protocol version is not an integer or out of range"),
            Some(version @ 2..=3) => Some(version == 3),
            Some(_) => return down.refuse(turn, handle, class, "NOPROTO unsupported protocol version"),
        };
    }
    let Some(client) = down.get(handle) else { return Flow::Close };
    if (protocol.is_some_and(|p| p != client.resp3()) && client.in_flight() > 0) || awaits_users(down, handle) {
        // Replies to commands in flight still use the old protocol version.
        return Flow::Stall(Stall::Barrier);
    }
    let authenticated = client.identity().is_authenticated();
    let mut user = None;
    let mut name = None;
    let mut index = 2;
    while let Some(option) = args.get(index) {
        if option.eq_ignore_ascii_case(b"AUTH") && args.len() > index + 2 {
            if user.is_some() {
                return down.refuse(turn, handle, class, "ERR Syntax error in HELLO option 'AUTH'");
            }
            let (who, password) = (args.get(index + 1).unwrap_or_default(), args.get(index + 2).unwrap_or_default());
            user = match login(turn, down, routing, handle, who, password) {
                Login::Wait => return Flow::Stall(Stall::Login),
                Login::Refused(text) => return down.refuse(turn, handle, class, text),
                Login::As(user) => Some(user),
            };
            index += 3;
        } else if option.eq_ignore_ascii_case(b"SETNAME") && args.len() > index + 1 {
            let given = args.get(index + 1).unwrap_or_default();
            if !super::client_commands::is_valid_name(given) {
                return down.refuse(turn, handle, class, super::client_commands::INVALID_NAME);
            }
            name = Some(String::from_utf8_lossy(given).into_owned());
            index += 2;
        } else {
            let mut reply = Vec::new();
            encode::line(&mut reply, b'-', &[b"ERR Syntax error in HELLO option '", option, b"'"].concat());
            down.answer(turn, handle, class, &reply);
            return Flow::Next;
        }
    }
    if !authenticated && user.is_none() {
        return down.refuse(turn,
            handle,
            class,
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and select the RESP protocol version at the same time",
        );
    }
    let (server, version) = fleet_version(turn, routing);
    let mode = if routing.live.cluster.is_some() { "cluster" } else { "standalone" };
    if let Some(user) = user
        && let Err(text) = become_user(turn, down, handle, user, true)
    {
        return down.refuse(turn, handle, class, &text);
    }
    let Some(client) = down.get_mut(handle) else { return Flow::Close };
    if let Some(name) = name {
        client.identity_mut().rename(name);
    }
    client.speak(protocol.unwrap_or(client.resp3()));
    let resp3 = client.resp3();
    let mut out = Vec::new();
    encode::map(&mut out, 7, resp3);
    for (field, value) in [("server", server), ("version", &version)] {
        encode::bulk(&mut out, field.as_bytes());
        encode::bulk(&mut out, value.as_bytes());
    }
    encode::bulk(&mut out, b"proto");
    encode::integer(&mut out, if resp3 { 3 } else { 2 });
    encode::bulk(&mut out, b"id");
    encode::integer(&mut out, client.identity().id() as i64);
    for (field, value) in [("mode", mode), ("role", "master")] {
        encode::bulk(&mut out, field.as_bytes());
        encode::bulk(&mut out, value.as_bytes());
    }
    encode::bulk(&mut out, b"modules");
    out.extend_from_slice(b"*0\r\n");
    down.answer(turn, handle, class, &out);
    Flow::Next
}

impl Gathers {
    /// Forwards a command to the operator. The reply comes through the mailbox.
    fn query_operator(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { handle, args, .. } = *call;
        let class = call.class();
        let Some(operator) = turn.shared().ports.operator.clone() else {
            return down.refuse(turn, handle, class, "ERR this router has no moves");
        };
        let Some(asker) = asker(down, handle) else { return Flow::Close };
        let words = args.iter().skip(1).map(<[u8]>::to_vec).collect();
        let Some(gather) = self.begin_gather(turn, down, handle, class, 1, Aggregation::Merged(Merge::Same)) else {
            return Flow::Close;
        };
        operator.take(OperatorCommand::new(words, asker, turn.shared().mailboxes.clone(), turn.index(), gather));
        Flow::Next
    }
}

impl Gathers {
    fn select(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, class: u8, index: &[u8]) -> Flow {
        let Some(index) = parse::<i64>(index) else {
            return down.refuse(turn, handle, class, "ERR value is not an integer or out of range");
        };
        if i32::try_from(index).is_err() {
            let text = format!("ERR value is out of range, value must between {} and {}", i32::MIN, i32::MAX);
            return down.refuse(turn, handle, class, &text);
        }
        let Ok(database) = u32::try_from(index) else {
            return down.refuse(turn, handle, class, "ERR DB index is out of range");
        };
        if let Some(why) = other_database(&turn.routing().live, database) {
            return down.refuse(turn, handle, class, &why);
        }
        let known = turn.shared().has_database(&turn.data_nodes().all(), database);
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if client.replies().are_under_way_on(Lane::Rounds) {
            // An earlier SELECT is pending: its result must not come after this one.
            return Flow::Stall(Stall::Barrier);
        }
        if known {
            client.select(database);
            down.answer(turn, handle, class, b"+OK\r\n");
            return Flow::Next;
        }
        // Not queried before: the nodes must confirm that they have it. Later commands wait for that.
        if client.in_flight() > 0 {
            return Flow::Stall(Stall::Barrier);
        }
        client.replies_mut().take_lane(Lane::Rounds);
        let mut request = Vec::new();
        encode::command(&mut request, [&b"SELECT"[..], database.to_string().as_bytes()]);
        // A node without keys that lacks the database must refuse now, before it gets keys. A node that is down is
        // queried when it returns.
        self.fan_out(
            turn,
            down,
            FanOut {
                client: handle,
                lane: Lane::Main,
                reach: FanOutScope::Unanimous,
                requests: vec![request],
                class,
                whole: Aggregation::Select { database },
            },
        )
    }
}

impl Gathers {
    /// `SWITCHYARD NODES | STATUS | HELP`, for operators in redis-cli.
    fn switchyard(&mut self, turn: &Turn, up: &Upstreams, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, args, .. } = *call;
        let class = call.class();
        let resp3 = down.get(handle).is_some_and(|c| c.resp3());
        let mut out = Vec::new();
        let subcommand = args.get(1).map(|s| String::from_utf8_lossy(s).to_ascii_uppercase());
        match subcommand.as_deref() {
            Some(
                "MOVE" | "MOVES" | "BALANCE" | "ACCEPT" | "SLOTS" | "WHERE" | "HOTKEYS" | "LOAD" | "HOTCOPIES" | "PLAN"
                | "AUTOMATION" | "AUTOSCALE" | "RULES",
            ) => {
                return self.query_operator(turn, down, call);
            }
            Some("NODES") if args.len() > 2 => {
                return self.query_operator(turn, down, call);
            }
            Some("NODES") => {
                encode::header(&mut out, b'*', routing.topology.nodes().len());
                for node in routing.topology.nodes() {
                    let facts = turn.shared().with_facts(node.id, |f| f.clone());
                    let up = up.links().iter().any(|(_, l)| l.node() == node.id && l.phase() == Phase::Up);
                    encode::map(&mut out, 5, resp3);
                    let fields = [
                        ("node", node.name.clone()),
                        (
                            "link",
                            if up {
                                "up".into()
                            } else {
                                facts.failure.map_or_else(|| "connecting".into(), |f| format!("down: {f}"))
                            },
                        ),
                        ("version", format!("{} {}", facts.flavour, facts.version)),
                        ("run_id", facts.run_id.as_deref().unwrap_or("").to_string()),
                    ];
                    for (name, value) in fields {
                        encode::bulk(&mut out, name.as_bytes());
                        encode::bulk(&mut out, value.as_bytes());
                    }
                    encode::bulk(&mut out, b"slots");
                    encode::integer(&mut out, routing.topology.slots_of(node.id) as i64);
                }
            }
            Some("STATUS") | None => {
                encode::map(&mut out, 5, resp3);
                let clients = turn.shared().clients.load(std::sync::atomic::Ordering::Relaxed);
                let fields = [
                    ("epoch", routing.topology.epoch()),
                    ("nodes", routing.topology.nodes().len() as u64),
                    ("workers", turn.shared().mailboxes.len() as u64),
                    ("clients", clients as u64),
                    ("uptime_s", turn.shared().uptime().as_secs()),
                ];
                for (name, value) in fields {
                    encode::bulk(&mut out, name.as_bytes());
                    encode::integer(&mut out, value as i64);
                }
            }
            Some("SLOWLOG") => slowlog_details(turn, args, resp3, &mut out),
            Some("HELP") => {
                let lines = [
                    "SWITCHYARD <subcommand>. Subcommands are:",
                    "STATUS",
                    "    Epoch of the topology, nodes, workers, clients, uptime.",
                    "NODES",
                    "    Every node: link, version, run_id, slots.",
                    "NODES ADD <address> [REBALANCE] [ALLOW-LIMITS] | NODES DRAIN <address> [DRY-RUN] | NODES UNDRAIN <address> | NODES REMOVE <address>",
                    "    Add a node, move everything away from one, allow slots on it again, remove one that owns no slots.",
                    "SLOTS",
                    "    The slot map: ranges by node, slots in transit, placement overrides.",
                    "WHERE <key> [<key> ...]",
                    "    Location of keys: slot, hash tag, node, whether in transit, whether by a placement override.",
                    "LOAD",
                    "    The load of each node (requests, response times, CPU, memory), and the most used slots.",
                    "HOTKEYS [<count>]",
                    "    The most used keys of each node (default 10 of each), with their names for operators.",
                    "HOTCOPIES | HOTCOPIES EVICT (KEY <key> | PREFIX <prefix> | ALL) | HOTCOPIES OFF | HOTCOPIES ON",
                    "    Keys answered from hot copies; evict some; suspend and resume hot copies.",
                    "MOVE [FROM <node>] TO <node> (SLOTS <ranges> | ALL | KEYS <pattern>) [GOAL fast|balanced|gentle] [MAX-RATE <rate>] [DRY-RUN]",
                    "     [DURABILITY memory|aof|replica] [PROTOCOL <protocol>] [PURGE-TARGET] [ALLOW-DIRECT-CLIENTS]",
                    "     [ALLOW-KEY-LOSS] [MODE safe|paper [TRACKER <name>] [GROUPS <count>] [BITS <count>] [NO-FORWARDING]]",
                    "    Move slots, or single keys, while clients use them.",
                    "MOVE [FROM <node>] HOME [KEYS <pattern>] [...]",
                    "    Return keys that were moved to the node (to any node) without their slots to the owners of their slots.",
                    "MOVES | MOVES PAUSE|RESUME <id> | MOVES GOAL <id> <goal> | MOVES MAX-RATE <id> <rate>|none",
                    "    Moves in progress and ended; pause or resume one; change its goal or its rate (with a unit: 20mb).",
                    "MOVES ABORT <id> [ABANDON-TARGET|ABANDON-SOURCE] [DRY-RUN]",
                    "    End a move; or end it without a node that is lost for good, and without the keys that only this node has.",
                    "BALANCE [BY slots|load] [DRY-RUN]",
                    "    Balance the slots by weight, or by the present load.",
                    "PLAN | PLAN APPLY | PLAN HISTORY | PLAN REPLAY <id>",
                    "    Overloaded nodes, and the cheapest remedy; apply it; past decisions, and replay one.",
                    "AUTOMATION | AUTOMATION ON | AUTOMATION OFF",
                    "    Whether the router moves keys and scales by itself; switch that on or off.",
                    "AUTOSCALE | AUTOSCALE SET-NODES <number> | AUTOSCALE PAUSE | AUTOSCALE RESUME",
                    "    Target number of nodes and the reasons; set it; pause or resume the autoscaler.",
                    "RULES | RULES ADOPT [DRY-RUN] | RULES PAUSE | RULES RESUME | RULES ABANDON",
                    "    Placement rules and their adoption; adopt the configured ones; pause, resume or abandon that.",
                    "ACCEPT <node>",
                    "    Serve a node that returned without its keys and is held; follow a server that claims to be its primary without proof.",
                    "SLOWLOG [<count>]",
                    "    Slow commands with client, user, node, and where the time went (default 10, -1 all).",
                    "HELP",
                    "    Print this help.",
                ];
                encode::header(&mut out, b'*', lines.len());
                for line in lines {
                    encode::simple(&mut out, line);
                }
            }
            Some(_) => {
                return down.refuse(turn, handle, class, "ERR unknown subcommand. Try SWITCHYARD HELP.");
            }
        }
        down.answer(turn, handle, class, &out);
        Flow::Next
    }
}
