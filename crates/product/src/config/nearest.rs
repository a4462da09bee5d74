//! Suggests the intended key for an unknown one.
//!
//! Order of suggestions: the same key in another section (more common than a misspelling), the name in Redis or another
//! proxy, the nearest spelling in the section, the nearest spelling in any section.

use super::keys::{self, Section};

/// An existing key: section, name, and names in other programs.
type Known = (Section, &'static str, &'static [&'static str]);

fn known() -> impl Iterator<Item = Known> {
    keys::CONFIG
        .iter()
        .map(|key| (key.section, key.name, key.elsewhere))
        .chain(keys::NODE.iter().map(|key| (key.section, key.name, key.elsewhere)))
        .chain(keys::LISTENER.iter().map(|key| (key.section, key.name, key.elsewhere)))
        .chain(keys::LIMIT.iter().map(|key| (key.section, key.name, key.elsewhere)))
}

/// Name of a secret without the suffix of its form: `password` for `password-file`.
pub(super) fn stem(name: &str) -> &str {
    name.strip_suffix("-file").or_else(|| name.strip_suffix("-env")).unwrap_or(name)
}

/// Edit distance, if it is small enough for a typing mistake: about one letter in three.
fn slip(written: &str, meant: &str) -> Option<usize> {
    let distance = strsim::damerau_levenshtein(&written.to_ascii_lowercase().replace('_', "-"), meant);
    (distance <= (meant.len() / 3).clamp(1, 4)).then_some(distance)
}

/// Error for an unknown key.
pub(super) fn unknown_key(section: Section, written: &str) -> String {
    let start = format!("unknown key \"{written}\" {}", section.spoken());
    if let Some((other, ..)) = known().find(|(_, name, _)| *name == written) {
        return match other {
            Section::Top => {
                format!("{start}; it belongs at the top of the file, before the first [section]")
            }
            Section::Node => format!("{start}; it belongs {}, one for each node", other.spoken()),
            _ => format!("{start}; it belongs {}", other.spoken()),
        };
    }
    let here = |known: &Known| known.0 == section;
    let lower = written.to_ascii_lowercase();
    let called = |known: &Known| known.2.contains(&lower.as_str());
    if let Some((other, name, _)) = known().filter(here).find(called).or_else(|| known().find(called)) {
        let place = if other == section { String::new() } else { format!(" {}", other.spoken()) };
        return format!("{start}; here it is called \"{name}\"{place}");
    }
    if let Some((_, name, _)) = closest(written, known().filter(here)) {
        return format!("{start}; did you mean \"{name}\"?");
    }
    if let Some((other, name, _)) = closest(written, known()) {
        return format!("{start}; did you mean \"{name}\" {}?", other.spoken());
    }
    let names: Vec<&str> = known().filter(here).map(|(_, name, _)| name).collect();
    format!("{start}; known there: {}", names.join(", "))
}

/// Error for an unknown section.
pub(super) fn unknown_section(written: &str) -> String {
    let start = format!("unknown section [{written}]");
    let words: [(&str, &[&str]); 5] = [
        ("[clients]", &["clients", "client", "downstream", "frontend"]),
        ("[nodes]", &["nodes", "upstream", "timeouts"]),
        ("[admin]", &["admin", "stats", "dashboard", "api", "metrics"]),
        ("[log]", &["log", "logs", "logging"]),
        ("[[node]]", &["node", "server", "servers", "backend", "backends"]),
    ];
    let found = words
        .iter()
        .flat_map(|(name, words)| words.iter().filter_map(move |word| Some((slip(written, word)?, *name))))
        .min_by_key(|(distance, _)| *distance);
    match found {
        Some((_, name)) => format!("{start}; did you mean {name}?"),
        None => format!("{start}; known are [clients], [tls], [nodes], [admin], [log], [[listener]] and [[node]]"),
    }
}

/// Error for a `--set` with an unknown key.
pub(super) fn unknown_path(written: &str) -> String {
    let paths = || keys::CONFIG.iter().map(|key| key.path());
    let lower = written.to_ascii_lowercase();
    // Before the spelling: `autoscale.up-pause` is closer to `up-after` than to its new name.
    let renamed = keys::CONFIG.iter().find(|key| {
        let name = lower.strip_prefix(key.section.name()).and_then(|rest| rest.strip_prefix('.'));
        name.is_some_and(|name| key.elsewhere.contains(&name))
    });
    if let Some(key) = renamed {
        return format!("unknown key \"{written}\"; here it is called \"{}\"", key.path());
    }
    let by_name = || paths().find(|path| path.rsplit_once('.').is_some_and(|(_, name)| name == written));
    let near = paths().filter_map(|path| Some((slip(written, &path)?, path))).min().map(|(_, path)| path);
    match near.or_else(by_name) {
        Some(path) => format!("unknown key \"{written}\"; did you mean \"{path}\"?"),
        None => {
            format!("unknown key \"{written}\"; `switchyard check-config --example` shows them all")
        }
    }
}

fn closest(written: &str, candidates: impl Iterator<Item = Known>) -> Option<Known> {
    candidates
        .filter_map(|known| Some((slip(written, known.1)?, known)))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_keys_get_a_suggestion() {
        for (section, written, expected) in [
            (
                Section::Nodes,
                "comand-timeout",
                "unknown key \"comand-timeout\" in [nodes]; did you mean \"command-timeout\"?",
            ),
            (Section::Nodes, "command_timeout", "did you mean \"command-timeout\"?"),
            (Section::Clients, "Max-Clients", "did you mean \"max-clients\"?"),
            (Section::Clients, "requirepass", "here it is called \"password\""),
            (Section::HotCopies, "life-max", "here it is called \"ttl\""),
            (Section::HotCopies, "never", "here it is called \"exclude\""),
            (Section::Nodes, "empty-return", "here it is called \"on-data-loss\""),
            (Section::Top, "maxclients", "here it is called \"max-clients\" in [clients]"),
            (Section::Nodes, "max-clients", "it belongs in [clients]"),
            (Section::Node, "workers", "it belongs at the top of the file, before the first [section]"),
            (Section::Top, "address", "it belongs in [[node]], one for each node"),
            (Section::Top, "max-client", "did you mean \"max-clients\" in [clients]?"),
            (
                Section::Log,
                "colour",
                "known there: level, format, slowlog-log-slower-than, slowlog-max-len, slowlog-arguments",
            ),
        ] {
            let sentence = unknown_key(section, written);
            assert!(sentence.ends_with(expected) || sentence == expected, "{written}: {sentence}");
        }
    }

    #[test]
    fn misspelt_sections_and_paths_get_a_suggestion() {
        assert!(unknown_section("client").ends_with("did you mean [clients]?"));
        assert!(unknown_section("servers").ends_with("did you mean [[node]]?"));
        assert!(unknown_section("zebra").contains("known are [clients]"));
        assert!(unknown_path("clients.maxclients").ends_with("here it is called \"clients.max-clients\""));
        assert!(unknown_path("hot-copies.stays").ends_with("here it is called \"hot-copies.deletion-delay\""));
        assert!(unknown_path("autoscale.up-pause").ends_with("here it is called \"autoscale.up-cooldown\""));
        assert!(unknown_path("clients.max-client").ends_with("did you mean \"clients.max-clients\"?"));
        assert!(unknown_path("max-clients").ends_with("did you mean \"clients.max-clients\"?"));
        assert!(unknown_path("zebra").contains("--example"));
    }
}
