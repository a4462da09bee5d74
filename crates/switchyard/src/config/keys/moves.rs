//! Keys of moves, and a node's weight.

use std::time::Duration;

use switchyard_control::moves::{DURABILITIES, name_of, named};
use switchyard_policy::migration::Goal;

use super::{GB, HOUR, Key, Section, Takes, quoted, size, time};
use crate::config::{Config, NodeConfig};

pub(super) const MOVES: &[Key<Config>] = &[
    key!(
        Section::Moves,
        "goal",
        Takes::Reload,
        &["speed", "priority"],
        "What matters most while data moves, where a move does not say: fast, balanced or gentle.",
        |config, raw, _| {
            config.moves.how.goal = named(&Goal::ALL, raw.text()?)?;
            Ok(())
        },
        |config| quoted(name_of(&Goal::ALL, config.moves.how.goal))
    ),
    key!(
        Section::Moves,
        "max-rate",
        Takes::Reload,
        &["bandwidth", "rate-limit"],
        "Bytes per second that a move copies at most, with a unit, such as 20mb. 0: as fast as the goal allows.",
        |config, raw, _| {
            config.moves.how.max_rate = Some(raw.rate(64 * GB)?).filter(|rate| *rate > 0);
            Ok(())
        },
        |config| size(config.moves.how.max_rate.unwrap_or(0) as usize)
    ),
    key!(
        Section::Moves,
        "durability",
        Takes::Reload,
        &[],
        "What must be safe at the target before a key leaves its source: memory (the target has answered), aof (its append-only file is on \
         disk), replica (a replica has it).",
        |config, raw, _| {
            config.moves.how.durability = named(&DURABILITIES, raw.text()?)?;
            Ok(())
        },
        |config| quoted(name_of(&DURABILITIES, config.moves.how.durability))
    ),
    key!(
        Section::Moves,
        "per-node-max",
        Takes::Reload,
        &[],
        "Moves in which a node takes part at the same time, as source or as target; more wait.",
        |config, raw, _| {
            config.moves.per_node_max = raw.count(1..=16)? as usize;
            Ok(())
        },
        |config| Some(config.moves.per_node_max.to_string())
    ),
    key!(
        Section::Moves,
        "big-key",
        Takes::Reload,
        &["large-key", "big-keys"],
        "Values that take at least so many bytes of a node's memory are copied in pieces, so that nobody waits for the whole. 0: none.",
        |config, raw, _| {
            config.live.big_key = raw.size(0..=GB)?;
            Ok(())
        },
        |config| size(config.live.big_key)
    ),
    key!(
        Section::Moves,
        "bring-home-timeout",
        Takes::Reload,
        &["home-timeout"],
        "How long a command that needs keys together waits for those that were moved alone (move --keys) to be brought home. 0s: they are not brought \
         home, and it is refused with CROSSSLOT.",
        |config, raw, _| {
            config.live.bring_home_timeout = raw.time(Duration::ZERO..=HOUR)?;
            Ok(())
        },
        |config| time(config.live.bring_home_timeout)
    ),
];

pub(super) const NODE_WEIGHT: &[Key<NodeConfig>] = &[key!(
    Section::Node,
    "weight",
    Takes::Reload,
    &["slots", "capacity"],
    "Share of the slots that `switchyard balance` gives this node, beside those of the others (1 where none is given; 0: none).",
    |node, raw, _| {
        node.weight = Some(raw.count(0..=10_000)? as u32);
        Ok(())
    },
    |node| node.weight.map(|weight| weight.to_string()),
    "2"
)];
