//! Policies to compare, as text: changes of a scenario's settings.

use std::fmt;

use serde::Deserialize;
use serde::de::IntoDeserializer as _;
use serde::de::value::{Error, StrDeserializer};
use switchyard_policy::autoscale;
use switchyard_policy::planner;

use super::Scenario;
use super::scenario::{Autoscale, Bound, Copies, Planner, Reports};

/// A setting of one policy.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    /// `planner=off`, `planner=switchyard`, `planner=makris-ffd`, ...
    Planner(Option<planner::Policy>),
    /// `copies=off`, `copies=both`, `copies=periodic`, `copies=instant`.
    Copies(Option<Reports>),
    /// `copies=all`: every reported key is admitted.
    AllCopies,
    /// `autoscale=off`, `autoscale=threshold`, ...
    Autoscale(Option<autoscale::Policy>),
    /// `autoscale=foresight`, `autoscale=static-peak`.
    Bound(Bound),
}

/// Policies of a run. Without changes: those of the scenario.
#[derive(Clone, Debug, PartialEq)]
pub struct Policies {
    name: String,
    changes: Vec<Change>,
}

/// Policies that are not understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError(String);

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is no policy: use planner=, copies= or autoscale= with off or the name of one (copies: both, periodic, instant, all; autoscale also: foresight, static-peak), and + between several",
            self.0
        )
    }
}

impl std::error::Error for PolicyError {}

/// Returns the variant with this name in the configuration; `None` for `off`.
fn named<'n, T: Deserialize<'n>>(name: &'n str) -> Result<Option<T>, Error> {
    if name == "off" {
        return Ok(None);
    }
    let name: StrDeserializer<'n, Error> = name.into_deserializer();
    T::deserialize(name).map(Some)
}

impl Policies {
    /// The policies of the scenario.
    #[must_use]
    pub fn of_scenario() -> Self {
        Self { name: "as in the scenario".to_owned(), changes: Vec::new() }
    }

    /// Parses one text such as `planner=makris-ffd+copies=off`.
    ///
    /// # Errors
    /// If a part is not understood.
    pub fn parse(text: &str) -> Result<Self, PolicyError> {
        let change = |part: &str| {
            let wrong = || PolicyError(part.to_owned());
            let (what, name) = part.split_once('=').ok_or_else(wrong)?;
            let change = match what {
                "planner" => named(name).map(Change::Planner),
                "copies" if name == "all" => Ok(Change::AllCopies),
                "copies" => named(name).map(Change::Copies),
                "autoscale" => match named(name) {
                    Ok(Some(bound)) => Ok(Change::Bound(bound)),
                    _ => named(name).map(Change::Autoscale),
                },
                _ => return Err(wrong()),
            };
            change.map_err(|_| wrong())
        };
        let changes = text.split('+').map(change).collect::<Result<_, _>>()?;
        Ok(Self { name: text.to_owned(), changes })
    }

    /// The text.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether these are the policies of the scenario, so that its goals apply.
    #[must_use]
    pub fn is_of_scenario(&self) -> bool {
        self.changes.is_empty()
    }

    /// Returns the scenario with these policies. A policy that the scenario lacks gets the default settings.
    #[must_use]
    pub fn apply(&self, scenario: &Scenario) -> Scenario {
        let mut scenario = scenario.clone();
        for change in &self.changes {
            match *change {
                Change::Planner(policy) => {
                    scenario.planner = policy.map(|policy| Planner { policy, ..scenario.planner.unwrap_or_default() });
                }
                Change::Copies(reports) => {
                    scenario.copies = reports.map(|reports| Copies { reports, ..scenario.copies.unwrap_or_default() });
                }
                Change::AllCopies => {
                    scenario.copies = Some(Copies { all: true, ..scenario.copies.unwrap_or_default() });
                }
                Change::Autoscale(policy) => {
                    let settings = scenario.autoscale.take();
                    scenario.autoscale = policy.map(|policy| Autoscale { policy, ..settings.unwrap_or_default() });
                    scenario.bound = None;
                }
                Change::Bound(bound) => scenario.bound = Some(bound),
            }
        }
        scenario
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_named_as_in_the_configuration() {
        let scenario = Scenario::built_in("step").expect("a scenario");
        let apply = |text: &str| Policies::parse(text).expect("policies").apply(&scenario);
        let other = apply("planner=makris-safe+copies=instant+autoscale=model");
        assert_eq!(other.planner.map(|planner| planner.policy), Some(planner::Policy::MakrisSafe));
        assert_eq!(other.copies.map(|copies| copies.reports), Some(Reports::Instant));
        assert_eq!(other.autoscale.map(|scaling| scaling.policy), Some(autoscale::Policy::Model));
        assert_eq!(apply("planner=off").planner, None);
        assert_eq!(apply("autoscale=static-peak").bound, Some(Bound::StaticPeak));
        assert_eq!(apply("autoscale=foresight+autoscale=learned").bound, None);
        for wrong in ["planner", "planner=best", "sails=on", ""] {
            assert!(Policies::parse(wrong).is_err(), "{wrong}");
        }
    }
}
