//! Reads the TOML file, using the parser's spans, so that every mistake is reported with its line.

use std::path::Path;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::{self, Key, Section};
use super::listener::{LimitConfig, ListenerConfig};
use super::placement::RuleConfig;
use super::{Config, NodeConfig, Origin, Problem, Raw, nearest};

/// Converts byte offsets in the file to origins.
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

fn several(list: Section) -> String {
    format!("{0}s are written with two brackets: [[{0}]], once for each", list.name())
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
    let mut reader = Reader { base, places, problems };
    let mut top = Vec::new();
    for (name, value) in document.get_ref() {
        let is = |section: &Section| section.name() == name.get_ref();
        if let Some(list) = Section::LISTS.into_iter().find(is) {
            match value.get_ref() {
                DeValue::Array(items) => items.iter().for_each(|item| reader.item_of(list, item, config)),
                _ => reader.wrong(name, several(list)),
            }
        } else if let Some(section) = Section::TABLES.into_iter().find(is) {
            match value.get_ref() {
                DeValue::Table(table) => {
                    let (within, own): (Vec<Entry<'_, '_>>, Vec<_>) =
                        table.iter().partition(|(name, _)| Section::within(section, name.get_ref()).is_some());
                    reader.section(section, &own, config);
                    for (name, value) in within {
                        match (Section::within(section, name.get_ref()), value.get_ref()) {
                            (Some(list), DeValue::Array(items)) if Section::LISTS.contains(&list) => {
                                items.iter().for_each(|item| reader.item_of(list, item, config));
                            }
                            (Some(list), _) if Section::LISTS.contains(&list) => reader.wrong(name, several(list)),
                            (Some(section), DeValue::Table(table)) => {
                                reader.section(section, &table.iter().collect::<Vec<_>>(), config)
                            }
                            (Some(section), _) => reader.wrong(
                                name,
                                format!(
                                    "\"{0}\" is a section: write [{0}] on a line of its own and its keys below",
                                    section.name()
                                ),
                            ),
                            (None, _) => {}
                        }
                    }
                }
                _ => reader.wrong(
                    name,
                    format!(
                        "\"{0}\" is a section: write [{0}] on a line of its own and its keys below",
                        section.name()
                    ),
                ),
            }
        } else if matches!(value.get_ref(), DeValue::Table(_))
            && keys::CONFIG.iter().all(|key| key.path() != *name.get_ref())
        {
            reader.wrong(name, nearest::unknown_section(name.get_ref()));
        } else {
            top.push((name, value));
        }
    }
    reader.section(Section::Top, &top, config);
    // Tables come in alphabetical order. Errors are sorted by line.
    problems.sort_by_key(|problem| {
        problem.place.as_ref().and_then(|place| place.rsplit_once(':')).and_then(|(_, line)| line.parse::<usize>().ok())
    });
}

type Entry<'a, 'i> = (&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>);

/// A `[[...]]` table.
struct Item<T> {
    table: T,
    origin: Origin,
    /// Position of the name.
    named: Option<Origin>,
    /// No mistake within this table alone.
    is_sound: bool,
}

/// Applies the entries of a file, and collects the mistakes.
struct Reader<'a> {
    /// Base of relative paths.
    base: &'a Path,
    places: Places<'a>,
    problems: &'a mut Vec<Problem>,
}

impl Reader<'_> {
    fn wrong<T>(&mut self, at: &Spanned<T>, text: impl Into<String>) {
        self.problems.push(Problem::at(&self.places.at(at.span().start), text));
    }

    fn section(&mut self, section: Section, entries: &[Entry<'_, '_>], config: &mut Config) {
        let mut origins = Vec::new();
        self.entries(section, entries, keys::CONFIG, config, |key, origin| origins.push((key.path(), origin)));
        config.origins.extend(origins);
    }

    fn item_of(&mut self, list: Section, item: &Spanned<DeValue<'_>>, config: &mut Config) {
        match list {
            Section::Node => {
                let Some(read) = self.item::<NodeConfig>(list, keys::NODE, item, "a line address = \"HOST:PORT\"")
                else {
                    return;
                };
                let mut node = read.table;
                if node.name().is_none() && read.is_sound {
                    self.wrong(
                        item,
                        "this [[node]] has no address; add address = \"HOST:PORT\" (or sentinel-master and sentinels)",
                    );
                }
                node.origin = Some(read.named.unwrap_or(read.origin));
                config.nodes.push(node);
            }
            Section::Limit => {
                let Some(read) = self.item::<LimitConfig>(list, keys::LIMIT, item, "lines such as prefix = \"a:\"")
                else {
                    return;
                };
                let limit = read.table;
                if limit.requests_per_second.is_none() && limit.key_requests_per_second.is_none() && read.is_sound {
                    self.wrong(
                        item,
                        "this [[limit]] limits nothing; add requests-per-second or key-requests-per-second",
                    );
                }
                if config.limits.iter().any(|other| other.prefix == limit.prefix) {
                    self.wrong(item, format!("the prefix {:?} has a [[limit]] already", limit.prefix));
                }
                config.limits.push(limit);
            }
            Section::Rule => {
                let lines = "lines such as keys = [\"bull:{queue}:*\"]";
                let Some(read) = self.item::<RuleConfig>(list, keys::RULE, item, lines) else { return };
                match read.table.rules() {
                    Err(why) if read.is_sound => self.wrong(item, why),
                    _ => config.rules.push(read.table),
                }
            }
            _ => {
                let Some(read) = self.item::<ListenerConfig>(list, keys::LISTENER, item, "a line address = \"...\"")
                else {
                    return;
                };
                if read.table.place.is_none() && read.is_sound {
                    self.wrong(item, "this [[listener]] has no address; add address = \"HOST:PORT\" or \"unix:/path\"");
                }
                config.listeners.push(ListenerConfig { origin: Some(read.origin), ..read.table });
            }
        }
    }

    fn item<T: Default>(
        &mut self,
        list: Section,
        keys: &'static [Key<T>],
        item: &Spanned<DeValue<'_>>,
        lines: &str,
    ) -> Option<Item<T>> {
        let DeValue::Table(table) = item.get_ref() else {
            self.wrong(item, format!("{0}s are written as [[{0}]] with {lines} below", list.name()));
            return None;
        };
        let before = self.problems.len();
        let mut read =
            Item { table: T::default(), origin: self.places.at(item.span().start), named: None, is_sound: true };
        let named = &mut read.named;
        self.entries(list, &table.iter().collect::<Vec<_>>(), keys, &mut read.table, |key, origin| {
            if matches!(key.name, "address" | "sentinel-master") {
                *named = Some(origin);
            }
        });
        read.is_sound = self.problems.len() == before;
        Some(read)
    }

    fn entries<T>(
        &mut self,
        section: Section,
        entries: &[Entry<'_, '_>],
        keys: &'static [Key<T>],
        target: &mut T,
        mut seen: impl FnMut(&'static Key<T>, Origin),
    ) {
        let mut secrets: Vec<&'static Key<T>> = Vec::new();
        for (name, value) in entries {
            let Some(key) = keys.iter().find(|key| key.section == section && key.name == name.get_ref()) else {
                self.wrong(name, nearest::unknown_key(section, name.get_ref()));
                continue;
            };
            if key.secret {
                if let Some(other) = secrets.iter().find(|other| nearest::stem(other.name) == nearest::stem(key.name)) {
                    self.wrong(
                        name,
                        format!(
                            "\"{}\" and \"{}\" are both given {}; keep one",
                            other.name,
                            key.name,
                            section.spoken()
                        ),
                    );
                    continue;
                }
                secrets.push(key);
            }
            match (key.set)(target, &Raw::from_toml(value.get_ref()), self.base) {
                Ok(()) => seen(key, self.places.at(name.span().start)),
                Err(text) => self.wrong(name, format!("{}: {text}", key.name)),
            }
        }
    }
}
