//! Scenario of a run as text: one `name = value` per line; `#` begins a comment. Each seed draws from it.
//!
//! Text rather than code, so that a new scenario is one file and needs no build.

/// Probabilities are per mille of the runs. A run with a fault has it one to three times.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Scenario {
    /// Name of the scenario.
    pub name: String,
    /// Clients, half of them at each worker.
    pub clients: u64,
    /// Commands of each.
    pub commands: u64,
    /// Keys.
    pub keys: u64,
    /// Databases, each with all key names. A move takes a name in all of them.
    pub databases: u64,
    /// Slots of the keys.
    pub slots: u64,
    /// Movers, each with its own part of the slots.
    pub movers: u64,
    /// Moves of each mover, there and back.
    pub moves: u64,
    /// A node keeps everything answered when it is killed.
    pub durable: u64,
    /// The move is ordered with `durability = aof`.
    pub aof: u64,
    /// The target has keys of the slots from an earlier life.
    pub leftovers: u64,
    /// The legs stop and copy.
    pub stop_and_copy: u64,
    /// All keys are copied first, in rounds while the source serves.
    pub source: u64,
    /// All keys are copied first, while clients wait.
    pub freeze: u64,
    /// Keys that clients wait for are fetched several at a time.
    pub rocksteady: u64,
    /// Keys on their way are read at both sides.
    pub netmigrate: u64,
    /// Like `netmigrate`, with all slots at once; keys are fetched after a sample of these reads.
    pub fulva: u64,
    /// A filter records which keys are at the target.
    pub bloom: u64,
    /// The protocol as it was published, with its holes.
    pub paper: u64,
    /// And with 1: an exact tracker, 2: an adaptive one.
    pub exact: u64,
    /// Commands are of one key: 1 GET, 2 also SET, 3 also DEL, 4 also INCR; 0: all that there are.
    pub only: u64,
    /// kill -9 of a node.
    pub kill_node: u64,
    /// kill -9 of the router.
    pub kill_router: u64,
    /// SIGSTOP of a node.
    pub stop: u64,
    /// A connection breaks.
    pub cut: u64,
    /// All connections to a node break.
    pub cut_all: u64,
    /// Replies of a node are lost.
    pub drops_outbound: u64,
    /// Requests to a node arrive late.
    pub delays_inbound: u64,
    /// A node is out of memory.
    pub full: u64,
    /// The operator rolls back.
    pub roll_back: u64,
    /// The mover's connection to its target breaks during the removal of leftovers there, and the operator rolls back.
    pub give_up: u64,
    /// A node that is killed is away for longer than a leg waits for it.
    pub away: u64,
    /// The operator abandons a node that the leg has lost.
    pub lose: u64,
    /// FLUSHALL by a client.
    pub flush: u64,
    /// Blocking commands.
    pub blocking: u64,
    /// Commands that use an undeclared key.
    pub undeclared: u64,
    /// Times to live.
    pub ttl: u64,
    /// Maximum difference of the nodes' clocks if keys may move, in microseconds.
    pub skew: u64,
    /// The clock of the target is wrong by more, until an operator sets it.
    pub wrong_clock: u64,
    /// A move takes keys without their slot.
    pub overrides: u64,
    /// Clients watch a key, read it, and change it if it has not changed.
    pub watch: u64,
    /// Commands concern hash fields, and keys with several elements are copied in pieces.
    pub parts: u64,
    /// The router's disk has no room for another leg, or move.
    pub full_disk: u64,
    /// Nothing can be written to the router's disk.
    pub broken_disk: u64,
    /// An adoption of placement rules begins before a move.
    pub adoptions: u64,
    /// Workers.
    pub workers: u64,
    /// Workers keep hot copies.
    pub hot: u64,
    /// Fills are slow.
    pub slow_fills: u64,
    /// Commands whose clients time out soon.
    pub impatient: u64,
    /// Commands that rename a key.
    pub renames: u64,
    /// A worker panics.
    pub panics: u64,
    /// Maximum pause of a client between commands, in microseconds.
    pub think: u64,
}

/// A line of a scenario that is not understood.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ScenarioError {
    /// Line number, from 1; 0 concerns the whole text.
    pub line: usize,
    /// Description of the error.
    pub what: String,
}

impl std::fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "line {} of the scenario: {}", self.line, self.what)
    }
}

impl std::error::Error for ScenarioError {}

/// Built-in scenarios: name and text.
pub const BUILT_IN: &[(&str, &str)] = &[
    ("calm", include_str!("../scenarios/calm.txt")),
    ("rough", include_str!("../scenarios/rough.txt")),
    ("forgetful", include_str!("../scenarios/forgetful.txt")),
    ("stop-and-copy", include_str!("../scenarios/stop-and-copy.txt")),
    ("exceptions", include_str!("../scenarios/exceptions.txt")),
    ("adoptions", include_str!("../scenarios/adoptions.txt")),
    ("watch", include_str!("../scenarios/watch.txt")),
    ("given-up", include_str!("../scenarios/given-up.txt")),
    ("lost", include_str!("../scenarios/lost.txt")),
    ("staging", include_str!("../scenarios/staging.txt")),
    ("in-vain", include_str!("../scenarios/in-vain.txt")),
    ("full-disk", include_str!("../scenarios/full-disk.txt")),
    ("clocks", include_str!("../scenarios/clocks.txt")),
    ("slots", include_str!("../scenarios/slots.txt")),
    ("movers", include_str!("../scenarios/movers.txt")),
    ("movers-forget", include_str!("../scenarios/movers-forget.txt")),
    ("databases", include_str!("../scenarios/databases.txt")),
    ("rocksteady", include_str!("../scenarios/rocksteady.txt")),
    ("netmigrate", include_str!("../scenarios/netmigrate.txt")),
    ("fulva", include_str!("../scenarios/fulva.txt")),
    ("precopy", include_str!("../scenarios/precopy.txt")),
    ("precopy-forgetful", include_str!("../scenarios/precopy-forgetful.txt")),
    ("hot", include_str!("../scenarios/hot.txt")),
    ("hot-moves", include_str!("../scenarios/hot-moves.txt")),
    ("hot-returns", include_str!("../scenarios/hot-returns.txt")),
    ("hot-rough", include_str!("../scenarios/hot-rough.txt")),
];

impl Scenario {
    /// Returns a built-in scenario.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        let (name, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Self::parse(name, text).ok()
    }

    /// Parses a scenario.
    ///
    /// # Errors
    /// If a line is no `name = number`, or its name is not known.
    pub fn parse(name: &str, text: &str) -> Result<Self, ScenarioError> {
        let mut scenario = Self {
            name: name.to_owned(),
            clients: 4,
            commands: 20,
            keys: 5,
            databases: 1,
            slots: 1,
            movers: 1,
            moves: 2,
            durable: 1000,
            aof: 0,
            leftovers: 0,
            stop_and_copy: 0,
            source: 0,
            freeze: 0,
            rocksteady: 0,
            netmigrate: 0,
            fulva: 0,
            bloom: 0,
            paper: 0,
            exact: 0,
            only: 0,
            kill_node: 0,
            kill_router: 0,
            stop: 0,
            cut: 0,
            cut_all: 0,
            drops_outbound: 0,
            delays_inbound: 0,
            full: 0,
            roll_back: 0,
            give_up: 0,
            away: 0,
            lose: 0,
            flush: 0,
            blocking: 0,
            undeclared: 0,
            ttl: 0,
            skew: 0,
            wrong_clock: 0,
            overrides: 0,
            watch: 0,
            parts: 0,
            full_disk: 0,
            broken_disk: 0,
            adoptions: 0,
            workers: 2,
            hot: 0,
            slow_fills: 0,
            impatient: 0,
            renames: 0,
            panics: 0,
            think: 2_500,
        };
        for (at, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let error = |what: String| ScenarioError { line: at + 1, what };
            let (name, value) =
                line.split_once('=').ok_or_else(|| error(format!("`{line}` is not `name = number`")))?;
            let name = name.trim();
            let value: u64 = value.trim().parse().map_err(|_| error(format!("`{}` is not a number", value.trim())))?;
            let (field, most) = match name {
                "clients" => (&mut scenario.clients, 8),
                "commands" => (&mut scenario.commands, 60),
                "keys" => (&mut scenario.keys, 16),
                "databases" => (&mut scenario.databases, 3),
                "slots" => (&mut scenario.slots, 4),
                "movers" => (&mut scenario.movers, 3),
                "moves" => (&mut scenario.moves, 8),
                "durable" => (&mut scenario.durable, 1000),
                "aof" => (&mut scenario.aof, 1000),
                "leftovers" => (&mut scenario.leftovers, 1000),
                "stop-and-copy" => (&mut scenario.stop_and_copy, 1000),
                "source" => (&mut scenario.source, 1000),
                "freeze" => (&mut scenario.freeze, 1000),
                "rocksteady" => (&mut scenario.rocksteady, 1000),
                "netmigrate" => (&mut scenario.netmigrate, 1000),
                "fulva" => (&mut scenario.fulva, 1000),
                "bloom" => (&mut scenario.bloom, 1000),
                "paper" | "exact" if !cfg!(feature = "research") => {
                    return Err(error(format!("{name} is only in builds with the cargo feature `research`")));
                }
                "paper" => (&mut scenario.paper, 1000),
                "exact" => (&mut scenario.exact, 1000),
                "only" => (&mut scenario.only, 4),
                "kill-node" => (&mut scenario.kill_node, 1000),
                "kill-router" => (&mut scenario.kill_router, 1000),
                "stop" => (&mut scenario.stop, 1000),
                "cut" => (&mut scenario.cut, 1000),
                "cut-all" => (&mut scenario.cut_all, 1000),
                "mute" => (&mut scenario.drops_outbound, 1000),
                "deaf" => (&mut scenario.delays_inbound, 1000),
                "full" => (&mut scenario.full, 1000),
                "roll-back" => (&mut scenario.roll_back, 1000),
                "give-up" => (&mut scenario.give_up, 1000),
                "away" => (&mut scenario.away, 1000),
                "lose" => (&mut scenario.lose, 1000),
                "flush" => (&mut scenario.flush, 1000),
                "blocking" => (&mut scenario.blocking, 1000),
                "undeclared" => (&mut scenario.undeclared, 1000),
                "ttl" => (&mut scenario.ttl, 1000),
                "skew" => (&mut scenario.skew, 10_000),
                "wrong-clock" => (&mut scenario.wrong_clock, 1000),
                "exceptions" => (&mut scenario.overrides, 1000),
                "watch" => (&mut scenario.watch, 1000),
                "full-disk" => (&mut scenario.full_disk, 1000),
                "broken-disk" => (&mut scenario.broken_disk, 1000),
                "parts" => (&mut scenario.parts, 1000),
                "adoptions" => (&mut scenario.adoptions, 1000),
                "workers" => (&mut scenario.workers, 4),
                "hot" => (&mut scenario.hot, 1000),
                "slow-fills" => (&mut scenario.slow_fills, 1000),
                "impatient" => (&mut scenario.impatient, 1000),
                "renames" => (&mut scenario.renames, 1000),
                "panics" => (&mut scenario.panics, 1000),
                "think" => (&mut scenario.think, 10_000),
                _ => return Err(error(format!("unknown setting `{name}`"))),
            };
            if value > most {
                return Err(error(format!("{name} must be at most {most}")));
            }
            *field = value;
        }
        for (name, value) in [
            ("clients", scenario.clients),
            ("keys", scenario.keys),
            ("databases", scenario.databases),
            ("slots", scenario.slots),
            ("movers", scenario.movers),
            ("workers", scenario.workers),
        ] {
            if value == 0 {
                return Err(ScenarioError { line: 0, what: format!("{name} must be at least 1") });
            }
        }
        if scenario.keys < scenario.slots || scenario.slots < scenario.movers {
            return Err(ScenarioError {
                line: 0,
                what: "there are fewer keys than slots, or fewer slots than movers".to_owned(),
            });
        }
        if scenario.think < 10 {
            return Err(ScenarioError { line: 0, what: "think must be at least 10".to_owned() });
        }
        if scenario.adoptions > 0 && (scenario.movers > 1 || scenario.overrides > 0 || scenario.hot > 0) {
            return Err(ScenarioError {
                line: 0,
                what: "rules are adopted with one mover, without exceptions and hot keys".to_owned(),
            });
        }
        if scenario.databases > 1 && scenario.parts > 0 {
            return Err(ScenarioError { line: 0, what: "big keys are in one database".to_owned() });
        }
        Ok(scenario)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_scenarios_are_valid() {
        for (name, text) in BUILT_IN {
            Scenario::parse(name, text).expect(name);
        }
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line) in [
            ("keys = 3\ntides = 4", 2),
            ("# x\n\nkeys 3", 3),
            ("keys = many", 1),
            ("keys = 17", 1),
            ("keys = 0", 0),
            ("movers = 2", 0),
            ("keys = 2\nslots = 3", 0),
        ] {
            assert_eq!(Scenario::parse("x", text).map_err(|error| error.line), Err(line), "{text}");
        }
    }
}
