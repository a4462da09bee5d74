//! Checks that links of pages resolve, and that maps of the code name existing files.
//!
//! A wrong map loses its readers' trust, and a moved file leaves stale paths in pages unnoticed. Not a Markdown parser:
//! pages use few constructs.

use std::collections::{BTreeMap, BTreeSet};

use super::Files;

/// Checks every link to a file or heading of the project, and every path in backticks in `ARCHITECTURE.md` and
/// `docs/design/`.
pub(super) fn pages_name_what_is_there(files: &Files) -> Vec<String> {
    let pages = || files.0.iter().filter(|(path, _)| path.ends_with(".md"));
    let headings: BTreeMap<&str, BTreeSet<String>> =
        pages().map(|(path, text)| (path.as_str(), headings(text))).collect();
    let mut complaints = Vec::new();
    for (path, text) in pages() {
        let is_map = path == "ARCHITECTURE.md" || path.starts_with("docs/design/");
        for (number, line) in prose(text) {
            let mut complain = |what: &str, why: &str| complaints.push(format!("{path}:{number}: {what}: {why}"));
            for link in line.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link) {
                if link.contains("://") {
                    continue;
                }
                let (file, heading) =
                    link.split_once('#').map_or((link, None), |(file, heading)| (file, Some(heading)));
                let target = if file.is_empty() { path.clone() } else { joined(path, file) };
                let folder = format!("{}/", target.trim_end_matches('/'));
                if !files.0.keys().any(|known| *known == target || known.starts_with(&folder)) {
                    complain(link, "there is no such file; correct the link");
                } else if heading
                    .is_some_and(|heading| !headings.get(target.as_str()).is_some_and(|known| known.contains(heading)))
                {
                    complain(link, "the page has no such heading; correct the link");
                }
            }
            for name in line.split('`').skip(1).step_by(2).filter(|name| is_map && is_path(name)) {
                let below = format!("/{name}");
                let is_it = |known: &String| known == name || known.ends_with(&below);
                let is_in = |known: &String| name.ends_with('/') && (known.starts_with(name) || known.contains(&below));
                if !files.0.keys().any(|known| is_it(known) || is_in(known)) {
                    complain(name, "there is no such file; correct the path");
                }
            }
        }
    }
    complaints
}

/// Lines outside of code blocks, with line numbers.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut is_code = false;
    text.lines().enumerate().filter_map(move |(i, line)| {
        let fence = line.trim_start().starts_with("```");
        is_code ^= fence;
        (!fence && !is_code).then_some((i + 1, line))
    })
}

/// Anchors of a page's headings, as Git hosts generate them: a second heading with the same name ends in `-1`.
fn headings(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let titles =
        prose(text).filter(|(_, line)| line.starts_with('#')).map(|(_, line)| line.trim_start_matches('#').trim());
    titles
        .map(|title| {
            let kept = title.to_lowercase().replace(' ', "-");
            let name: String = kept.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_')).collect();
            let before = seen.entry(name.clone()).or_default();
            *before += 1;
            if *before == 1 { name } else { format!("{name}-{}", *before - 1) }
        })
        .collect()
}

/// Target of a link in a page, as a path from the project root.
fn joined(page: &str, link: &str) -> String {
    let mut parts: Vec<&str> = page.split('/').collect();
    parts.pop();
    for part in link.split('/') {
        match part {
            "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Whether a word in backticks is the path of a code file or folder.
fn is_path(name: &str) -> bool {
    let of_path = |c: char| c.is_alphanumeric() || matches!(c, '/' | '_' | '-' | '.');
    name.chars().all(of_path) && (name.ends_with(".rs") || name.ends_with('/') && name.len() > 1)
}
