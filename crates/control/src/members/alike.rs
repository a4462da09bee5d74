//! Settings of a server that joins, compared with those of the nodes. Clients see one server, so a node that differs
//! loses events or keys without an error.
//!
//! Not part of the checks of a newcomer: a difference refuses no join. After a join by command the comparison runs once
//! the router knows the node, and before the node owns slots: from then on a client's CONFIG SET reaches the node, and
//! no key is there before the settings are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use switchyard_router::{NodeAccess, allows_config_set};

use crate::nodes::NodeConnection;
use crate::nodes::holdings::in_parallel;

/// A setting that is compared, with the effect of a difference.
struct Compared {
    name: &'static str,
    effect: &'static str,
    /// Whether the router may set it at a joining server: the value describes the fleet, and not the machine or its
    /// disk.
    may_be_set: bool,
}

const COMPARED: [Compared; 5] = [
    Compared { name: "notify-keyspace-events", effect: "subscribers get other events of its keys", may_be_set: true },
    Compared { name: "maxmemory-policy", effect: "it evicts by another rule when it is full", may_be_set: true },
    Compared { name: "databases", effect: "clients may use only the databases that all nodes have", may_be_set: false },
    Compared { name: "appendonly", effect: "a crash loses a different amount of data there", may_be_set: false },
    Compared { name: "save", effect: "a restart loses a different amount of data there", may_be_set: false },
];

/// Maximum number of comparisons. An extra comparison is needed each time that clients change a setting in the
/// meantime.
const ROUNDS: usize = 3;

/// A server's values of the settings in [`COMPARED`].
type Settings = BTreeMap<&'static str, String>;

/// A setting whose value at a server differs from a node's.
struct Difference<'a> {
    setting: &'static Compared,
    own: &'a str,
    /// Values of the nodes that reply, each with its nodes' names.
    others: BTreeMap<&'a str, Vec<&'a str>>,
}

impl Difference<'_> {
    /// Returns the nodes' value, if they agree.
    fn common(&self) -> Option<&str> {
        self.others.first_key_value().filter(|_| self.others.len() == 1).map(|(value, _)| *value)
    }

    /// Describes the difference for an operator. `failed`: the error of CONFIG SET.
    fn describe(&self, server: &str, failed: Option<&String>) -> String {
        let (name, own) = (self.setting.name, self.own);
        let others = match self.common() {
            Some(value) => format!("{value:?} at the other nodes"),
            None => {
                let of = |(value, nodes): (&&str, &Vec<&str>)| format!("{value:?} at {}", nodes.join(" and "));
                self.others.iter().map(of).collect::<Vec<_>>().join(", ")
            }
        };
        let remedy = match (self.setting.may_be_set, failed) {
            (_, Some(why)) => format!("CONFIG SET fails there ({why}): set it there, and in its configuration file"),
            (true, None) => format!(
                "set it to the same value (CONFIG SET {name}, and the configuration files). With {name} in nodes.config-set, Switchyard sets it at servers that join"
            ),
            (false, None) => "set it to the same value in the configuration files".to_owned(),
        };
        format!("{server} has {name} {own:?}, and it is {others}: {}; {remedy}", self.setting.effect)
    }
}

/// Returns the settings of a server that differ from any of these nodes. A setting that either side lacks is no
/// difference.
fn differences<'a>(own: &'a Settings, nodes: &'a [(String, Settings)]) -> Vec<Difference<'a>> {
    let of = |setting: &'static Compared| {
        let own = own.get(setting.name)?;
        let mut others: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (node, settings) in nodes {
            if let Some(value) = settings.get(setting.name) {
                others.entry(value).or_default().push(node);
            }
        }
        others.keys().any(|value| value != own).then_some(Difference { setting, own, others })
    };
    COMPARED.iter().filter_map(of).collect()
}

fn read(node: &mut NodeConnection) -> Result<Settings, String> {
    let mut settings = Settings::new();
    for Compared { name, .. } in &COMPARED {
        // Query single names, because Redis 6 accepts only one.
        let answer =
            node.call(&["CONFIG", "GET", name]).map_err(|error| format!("does not answer CONFIG GET: {error}"))?;
        if let Some(error) = answer.error() {
            return Err(format!("refuses CONFIG GET ({error})"));
        }
        if let Some(value) = answer.items().get(1) {
            settings.insert(name, value.text());
        }
    }
    Ok(settings)
}

/// Compares a joining server with the nodes, and sets the settings that `config_set` (`nodes.config-set`) permits.
/// Returns notes for operators: each change and each remaining difference. A server that refuses CONFIG GET is no
/// error.
pub(crate) fn align_settings(
    server: &NodeAccess,
    nodes: &[NodeAccess],
    config_set: &[String],
    timeout: Duration,
) -> Vec<String> {
    let name = &server.name;
    let settings_of =
        |access: &NodeAccess| Some((access.name.clone(), read(&mut NodeConnection::open(access, timeout).ok()?).ok()?));
    let mut connection = NodeConnection::open(server, timeout);
    let mut notes = Vec::new();
    let mut failed: BTreeMap<&str, String> = BTreeMap::new();
    let mut is_set: BTreeSet<&str> = BTreeSet::new();
    for round in 1..=ROUNDS {
        let nodes: Vec<(String, Settings)> = in_parallel(nodes, settings_of).into_iter().flatten().collect();
        if nodes.is_empty() {
            break;
        }
        let own = connection.as_mut().map_err(|why| why.clone()).and_then(read);
        let own = match own {
            Ok(own) => own,
            Err(why) => {
                notes.push(format!(
                    "{name} {why}, so its settings are not compared with those of the other nodes: allow +config|get to Switchyard's user there"
                ));
                break;
            }
        };
        let differences = differences(&own, &nodes);
        let is_allowed = |setting: &Compared| setting.may_be_set && allows_config_set(config_set, setting.name);
        let mut has_set = false;
        for difference in differences.iter().filter(|difference| round < ROUNDS && is_allowed(difference.setting)) {
            let setting = difference.setting.name;
            let (Some(value), Ok(node)) =
                (difference.common().filter(|_| !failed.contains_key(setting)), &mut connection)
            else {
                continue;
            };
            match node.call(&["CONFIG", "SET", setting, value]).map(|answer| answer.error()) {
                Ok(None) => {
                    has_set = true;
                    if is_set.insert(setting) {
                        notes.push(format!(
                            "{name} had {setting} {:?}, and now has {value:?}, as the other nodes. Write it into its configuration file for its next start",
                            difference.own
                        ));
                    }
                }
                Ok(Some(error)) => drop(failed.insert(setting, error)),
                Err(error) => drop(failed.insert(setting, error.to_string())),
            }
        }
        // The next round verifies a change, and detects changes that a client has made at the nodes in the meantime.
        if !has_set {
            notes.extend(
                differences.iter().map(|difference| difference.describe(name, failed.get(difference.setting.name))),
            );
            break;
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(pairs: &[(&'static str, &str)]) -> Settings {
        pairs.iter().map(|(name, value)| (*name, (*value).to_owned())).collect()
    }

    #[test]
    fn differences_have_both_values_and_a_remedy() {
        let own = settings(&[
            ("notify-keyspace-events", ""),
            ("maxmemory-policy", "noeviction"),
            ("save", "60 1"),
            ("databases", "16"),
        ]);
        let like = settings(&[
            ("notify-keyspace-events", "AKE"),
            ("maxmemory-policy", "noeviction"),
            ("save", ""),
            ("appendonly", "yes"),
        ]);
        let other = Settings::from([("notify-keyspace-events", "Ex".to_owned())]);
        let one = [("a:1".to_owned(), like.clone()), ("b:1".to_owned(), like.clone())];
        let found = differences(&own, &one);
        assert_eq!(
            found.iter().map(|found| (found.setting.name, found.common())).collect::<Vec<_>>(),
            [("notify-keyspace-events", Some("AKE")), ("save", Some(""))]
        );
        let text = found[0].describe("n:1", None);
        assert!(
            text.starts_with("n:1 has notify-keyspace-events \"\", and it is \"AKE\" at the other nodes: "),
            "{text}"
        );
        assert!(
            text.contains("nodes.config-set") && !found[1].describe("n:1", None).contains("nodes.config-set"),
            "{text}"
        );
        assert!(found[0].describe("n:1", Some(&"NOPERM".to_owned())).contains("CONFIG SET fails there (NOPERM)"));

        // The nodes differ among themselves: there is no value to set.
        let two = [one[0].clone(), ("b:1".to_owned(), other)];
        let found = differences(&own, &two);
        assert_eq!(found[0].common(), None);
        assert!(found[0].describe("n:1", None).contains("\"AKE\" at a:1, \"Ex\" at b:1"));
        assert!(differences(&like, &one).is_empty() && differences(&Settings::new(), &one).is_empty());
    }
}
