//! A simulator of whole fleets over hours and weeks, to judge policies on the same load.
//!
//! Nodes are queues, and time advances in slices with constant rates. The production code of `policy` decides: the
//! telemetry's board and slot rates, the admission of hot copies, the planner's cycle, and the autoscaler. Models
//! around it supply what routers and servers do: sampling ([`telemetry`]), hits ([`copies`]), waiting ([`servers`]),
//! moves with measured durations ([`moves`]), and the stages of a change of the number of nodes ([`autoscaler`]). Two
//! policies that no router can have are bounds for the autoscaler's ([`bounds`]).
//!
//! Rates rather than single requests: 128 nodes serve some ten million requests in a second, and a policy sees only
//! sampled counts of them. The state machines of moves and copies, where single requests matter, are simulated by the rest of
//! this crate.
//!
//! A scenario and a seed determine a run: the load is drawn from streams of its own, so it is the same for all policies.
//! `pow` and `exp` may differ in the last bits between processors, so results are compared with three digits.

mod autoscaler;
mod bounds;
mod copies;
mod draw;
mod keys;
mod load;
mod map;
mod moves;
mod planner;
mod policies;
mod record;
mod report;
pub mod scenario;
mod servers;
pub mod switchkv;
mod telemetry;
mod variation;
mod world;

use switchyard_policy::hot_copies::{self, Admission};
use switchyard_policy::telemetry::{self as counts, Board, Weights};
use switchyard_policy::{autoscale, planner as policy_planner};

pub use policies::{Policies, PolicyError};
pub use record::{MEASURES, Measure, Point, Run, three_digits};
pub use report::{Spread, golden};
pub use scenario::Scenario;

/// A bug that tests plant in a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// In the smoothing of counts.
    Telemetry(counts::Bug),
    /// In the admission of hot copies.
    Admission(hot_copies::Bug),
    /// In the planner.
    Planner(policy_planner::Bug),
    /// In the autoscaler.
    Autoscaler(autoscale::Bug),
}

/// A key with a rate of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct KeyLoad {
    /// Name.
    pub name: Box<[u8]>,
    /// Part of all requests.
    pub share: f64,
    /// Part of writes in its requests.
    pub writes: f64,
}

/// Returns the keys with a rate of their own, and their rates at this time, in seconds since the start. Noise and churn
/// are left out. A generator can then send the load of a scenario to real servers. Keys and their order are the same at
/// all times.
#[must_use]
pub fn keys_at(scenario: &Scenario, seed: u64, at: f64) -> Vec<KeyLoad> {
    let mut space = keys::KeySpace::new(&scenario.keys, &scenario.events, &map::Map::even(scenario.nodes.count), seed);
    space.share_out(&load::Clients::new(&scenario.load, &scenario.events).shares(at));
    let load = |key: &keys::Key| KeyLoad { name: key.name.clone(), share: key.share, writes: key.writes };
    space.keys().iter().map(load).collect()
}

/// Simulates a scenario with one seed. `planted` has an effect only with the feature `planted-bugs`.
#[must_use]
pub fn run(scenario: &Scenario, seed: u64, planted: Option<Planted>) -> Run {
    match scenario.bound {
        Some(bound) => bounds::run(scenario, bound, seed),
        None => world::World::new(scenario, seed, planted).run(),
    }
}

fn planner_bug(planted: Option<Planted>) -> Option<policy_planner::Bug> {
    match planted {
        Some(Planted::Planner(bug)) => Some(bug),
        _ => None,
    }
}

#[cfg(feature = "planted-bugs")]
fn board(planted: Option<Planted>) -> Board {
    let bug = if let Some(Planted::Telemetry(bug)) = planted { Some(bug) } else { None };
    Board::with_bug(Weights::default(), bug)
}

#[cfg(not(feature = "planted-bugs"))]
fn board(_planted: Option<Planted>) -> Board {
    Board::new(Weights::default())
}

#[cfg(feature = "planted-bugs")]
fn admission(planted: Option<Planted>) -> Admission {
    Admission::with_bug(if let Some(Planted::Admission(bug)) = planted { Some(bug) } else { None })
}

#[cfg(not(feature = "planted-bugs"))]
fn admission(_planted: Option<Planted>) -> Admission {
    Admission::default()
}

#[cfg(feature = "planted-bugs")]
fn autoscaler_state(planted: Option<Planted>) -> autoscale::State {
    autoscale::State::with_bug(if let Some(Planted::Autoscaler(bug)) = planted { Some(bug) } else { None })
}

#[cfg(not(feature = "planted-bugs"))]
fn autoscaler_state(_planted: Option<Planted>) -> autoscale::State {
    autoscale::State::default()
}

#[cfg(feature = "planted-bugs")]
fn advisor(planted: Option<Planted>) -> autoscale::Advisor {
    match planted {
        Some(Planted::Autoscaler(bug)) => autoscale::Advisor::with_bug(bug),
        _ => autoscale::Advisor::default(),
    }
}

#[cfg(not(feature = "planted-bugs"))]
fn advisor(_planted: Option<Planted>) -> autoscale::Advisor {
    autoscale::Advisor::default()
}
