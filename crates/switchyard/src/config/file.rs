//! The TOML file: walked with the spans that the parser keeps, so that every mistake is told with its line.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{self, Key, Section};
use super::listener::{LimitConfig, ListenerConfig};
use super::{Config, NodeConfig, Origin, Problem, Raw, nearest};

/// Where a place in the file is.
struct Places<'a> {
    name: String,
    text: &'a str,
}

impl Places<'_> {
    fn at(&self, offset: usize) -> Origin {
        let before = &self.text.as_bytes()[..offset.min(self.text.len())];
        Origin::File { name: self.name.clone(), line: 1 + before.iter().filter(|b| **b == b'\n').count() }
    }
}

/// Reads `text`, the content of `path`, into `config`.
pub(super) fn apply(path: &Path, text: &str, config: &mut Config, problems: &mut Vec<Problem>) {
    let places = Places { name: path.display().to_string(), text };
    let base = path.parent().unwrap_or(Path::new(""));
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        for error in errors {
            let text = format!("not valid TOML: {}", error.message().replace('\n', "; "));
            problems.push(match error.span() {
                Some(span) => Problem::at(&places.at(span.start), text),
                None => Problem { place: Some(places.name.clone()), text },
            });
        }
        return;
    }
    let mut top = Vec::new();
    for (name, value) in document.get_ref() {
        let section = Section::TABLES.into_iter().find(|section| section.name() == name.get_ref());
        match (section, value.get_ref()) {
            (Some(section), DeValue::Table(table)) => {
                let entries: Vec<_> = table.iter().collect();
                apply_section(section, &entries, config, base, &places, problems);
            }
            (Some(section), _) => {
                let text = format!("\"{0}\" is a section: write [{0}] on a line of its own and its keys below", section.name());
                problems.push(Problem::at(&places.at(name.span().start), text));
            }
            (None, DeValue::Array(items)) if name.get_ref() == "node" => {
                for item in items.iter() {
                    apply_node(item, config, base, &places, problems);
                }
            }
            (None, _) if name.get_ref() == "node" => {
                problems.push(Problem::at(&places.at(name.span().start), "nodes are written with two brackets: [[node]], once for each"));
            }
            (None, DeValue::Array(items)) if name.get_ref() == "listener" => {
                for item in items.iter() {
                    apply_listener(item, config, base, &places, problems);
                }
            }
            (None, _) if name.get_ref() == "listener" => {
                let text = "listeners are written with two brackets: [[listener]], once for each";
                problems.push(Problem::at(&places.at(name.span().start), text));
            }
            (None, DeValue::Array(items)) if name.get_ref() == "limit" => {
                for item in items.iter() {
                    apply_limit(item, config, base, &places, problems);
                }
            }
            (None, _) if name.get_ref() == "limit" => {
                problems.push(Problem::at(&places.at(name.span().start), "limits are written with two brackets: [[limit]], once for each"));
            }
            (None, DeValue::Table(_)) if keys::CONFIG.iter().all(|key| key.path() != *name.get_ref()) => {
                problems.push(Problem::at(&places.at(name.span().start), nearest::unknown_section(name.get_ref())));
            }
            (None, _) => top.push((name, value)),
        }
    }
    apply_section(Section::Top, &top, config, base, &places, problems);
    // Tables come in alphabetical order; people read errors from the top of the file to its end.
    problems.sort_by_key(|problem| {
        problem.place.as_ref().and_then(|place| place.rsplit_once(':')).and_then(|(_, line)| line.parse::<usize>().ok())
    });
}

type Entry<'a, 'i> = (&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

fn apply_section(
    section: Section,
    entries: &[Entry<'_, '_>],
    config: &mut Config,
    base: &Path,
    places: &Places<'_>,
    problems: &mut Vec<Problem>,
) {
    let mut origins = Vec::new();
    apply_entries(section, entries, keys::CONFIG, config, base, places, problems, |key, origin| origins.push((key.path(), origin)));
    config.origins.extend(origins);
}

fn apply_node(item: &Spanned<DeValue<'_>>, config: &mut Config, base: &Path, places: &Places<'_>, problems: &mut Vec<Problem>) {
    let origin = places.at(item.span().start);
    let DeValue::Table(table) = item.get_ref() else {
        problems.push(Problem::at(&origin, "nodes are written as [[node]] with a line address = \"HOST:PORT\" below"));
        return;
    };
    let entries: Vec<_> = table.iter().collect();
    let mut node = NodeConfig::default();
    let before = problems.len();
    let mut at = None;
    apply_entries(Section::Node, &entries, keys::NODE, &mut node, base, places, problems, |key, origin| {
        if matches!(key.name, "address" | "sentinel-master") {
            at = Some(origin);
        }
    });
    if node.name().is_none() && problems.len() == before {
        problems.push(Problem::at(&origin, "this [[node]] has no address; add address = \"HOST:PORT\" (or sentinel-master and sentinels)"));
    }
    node.origin = Some(at.unwrap_or(origin));
    config.nodes.push(node);
}

fn apply_limit(item: &Spanned<DeValue<'_>>, config: &mut Config, base: &Path, places: &Places<'_>, problems: &mut Vec<Problem>) {
    let origin = places.at(item.span().start);
    let DeValue::Table(table) = item.get_ref() else {
        problems.push(Problem::at(&origin, "limits are written as [[limit]] with lines such as prefix = \"a:\" below"));
        return;
    };
    let entries: Vec<_> = table.iter().collect();
    let mut limit = LimitConfig::default();
    let before = problems.len();
    apply_entries(Section::Limit, &entries, keys::LIMIT, &mut limit, base, places, problems, |_, _| {});
    if limit.requests_per_second.is_none() && limit.key_requests_per_second.is_none() && problems.len() == before {
        problems.push(Problem::at(&origin, "this [[limit]] limits nothing; add requests-per-second or key-requests-per-second"));
    }
    if config.limits.iter().any(|other| other.prefix == limit.prefix) {
        problems.push(Problem::at(&origin, format!("the prefix {:?} has a [[limit]] already", limit.prefix)));
    }
    config.limits.push(limit);
}

fn apply_listener(item: &Spanned<DeValue<'_>>, config: &mut Config, base: &Path, places: &Places<'_>, problems: &mut Vec<Problem>) {
    let origin = places.at(item.span().start);
    let DeValue::Table(table) = item.get_ref() else {
        problems.push(Problem::at(&origin, "listeners are written as [[listener]] with a line address = \"...\" below"));
        return;
    };
    let entries: Vec<_> = table.iter().collect();
    let mut listener = ListenerConfig::default();
    let before = problems.len();
    apply_entries(Section::Listener, &entries, keys::LISTENER, &mut listener, base, places, problems, |_, _| {});
    if listener.place.is_none() && problems.len() == before {
        problems.push(Problem::at(&origin, "this [[listener]] has no address; add address = \"HOST:PORT\" or \"unix:/path\""));
    }
    listener.origin = Some(origin);
    config.listeners.push(listener);
}

#[allow(clippy::too_many_arguments)] // One walk for both kinds of tables; a struct would only rename the list.
fn apply_entries<T>(
    section: Section,
    entries: &[Entry<'_, '_>],
    keys: &'static [Key<T>],
    target: &mut T,
    base: &Path,
    places: &Places<'_>,
    problems: &mut Vec<Problem>,
    mut seen: impl FnMut(&'static Key<T>, Origin),
) {
    let mut secrets: Vec<&'static Key<T>> = Vec::new();
    for (name, value) in entries {
        let origin = places.at(name.span().start);
        let Some(key) = keys.iter().find(|key| key.section == section && key.name == name.get_ref()) else {
            problems.push(Problem::at(&origin, nearest::unknown_key(section, name.get_ref())));
            continue;
        };
        if key.secret {
            if let Some(other) = secrets.iter().find(|other| nearest::stem(other.name) == nearest::stem(key.name)) {
                let text = format!("\"{}\" and \"{}\" are both given {}; keep one", other.name, key.name, section.spoken());
                problems.push(Problem::at(&origin, text));
                continue;
            }
            secrets.push(key);
        }
        match (key.set)(target, &Raw::from_toml(value.get_ref()), base) {
            Ok(()) => seen(key, origin),
            Err(text) => problems.push(Problem::at(&origin, format!("{}: {text}", key.name))),
        }
    }
}
