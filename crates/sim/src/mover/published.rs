//! Draws the settings of a move by a protocol as published. Compiled only with the feature `research`.

use switchyard_policy::migration::Protocol;
use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::tracker::Kind;

use crate::random::Random;
use crate::scenario::Scenario;

/// Returns the settings, with few groups, so that filters err; `None`: the move uses the corrected protocol. Draws
/// nothing for a chance of 0, so that the seeds of other scenarios keep their runs.
pub(super) fn drawn(random: &mut Random, scenario: &Scenario, protocol: Protocol) -> Option<Paper> {
    let paper = Paper::of(protocol).filter(|_| scenario.paper > 0 && random.chance(scenario.paper))?;
    let tracker = match scenario.exact {
        0 => paper.tracker,
        1 => Kind::Exact,
        _ => Kind::Adaptive,
    };
    Some(Paper { tracker, groups: 8, at_once: 2, bits: 2, ..paper })
}
