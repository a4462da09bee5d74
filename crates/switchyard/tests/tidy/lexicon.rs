//! Checks that the lexicon is short, and that its terms are names in the code.
//!
//! A long list is not read, and terms that the code no longer uses mislead. A test rather than a review, because a
//! rename in the code does not touch the page.

use std::collections::BTreeSet;

use super::{Files, words};
use crate::code::only_code;

const PAGE: &str = "docs/lexicon.md";

/// Maximum number of terms: about one screen. Other terms are standard, or are defined in their module.
const TERMS_MAX: usize = 40;

/// Maximum words of a name. Names of tests are sentences, and contain words that are not names of anything.
const NAME_WORDS_MAX: usize = 5;

/// Checks the number of terms, and searches each term in the names of the crates.
pub(super) fn terms_are_names_in_the_code(files: &Files) -> Vec<String> {
    let Some(text) = files.0.get(PAGE) else {
        return vec![format!("{PAGE} is missing: the project's terms are listed there")];
    };
    let terms = terms(text);
    let names: BTreeSet<String> = files
        .rust()
        .filter(|(path, _)| path.starts_with("crates/"))
        .flat_map(|(_, text)| words(&only_code(text)).map(normal).collect::<BTreeSet<_>>())
        .filter(|name| name.split('_').count() <= NAME_WORDS_MAX)
        .collect();
    let mut complaints: Vec<String> = terms
        .iter()
        .filter(|(_, term)| !names.iter().any(|name| contains(name, term)))
        .map(|(line, term)| {
            format!("{PAGE}:{line}: no name in the code contains `{term}`: use the term of the code, or remove it")
        })
        .collect();
    if terms.len() > TERMS_MAX {
        complaints.push(format!(
            "{PAGE} has {} terms, more than {TERMS_MAX}: remove terms that are standard, or that only one module uses",
            terms.len()
        ));
    }
    complaints
}

/// Terms in the first column of tables, normalised, with line numbers. A cell may have several: `a, b (c)`.
fn terms(page: &str) -> Vec<(usize, String)> {
    let mut terms = Vec::new();
    let mut is_header = true;
    for (i, line) in page.lines().enumerate() {
        let Some(row) = line.strip_prefix('|') else {
            is_header = true;
            continue;
        };
        let cell = row.split('|').next().unwrap_or_default();
        if cell.starts_with("---") {
            is_header = false;
        } else if !is_header {
            let parts = cell.split([',', '(', ')']).map(str::trim).filter(|part| !part.is_empty());
            terms.extend(parts.map(|term| (i + 1, normal(term))));
        }
    }
    terms
}

/// Lower-case words, joined by `_`: `HotCopies`, `hot-copies` and `HOT_COPIES` become `hot_copies`.
fn normal(name: &str) -> String {
    let characters: Vec<char> = name.chars().collect();
    let mut normal = String::with_capacity(name.len() + 4);
    for (i, c) in characters.iter().enumerate() {
        let before = i.checked_sub(1).map(|i| characters[i]);
        let is_before_lower = characters.get(i + 1).is_some_and(|next| next.is_lowercase());
        let starts_word = c.is_uppercase()
            && before.is_some_and(|before| !before.is_uppercase() || is_before_lower)
            && !normal.ends_with('_');
        if starts_word {
            normal.push('_');
        }
        if c.is_alphanumeric() { normal.extend(c.to_lowercase()) } else { normal.push('_') }
    }
    normal
}

/// Whether consecutive words of the name are the term, with or without a plural `s`. The code may write the words of a
/// term as one: `colocation`.
fn contains(name: &str, term: &str) -> bool {
    let name = format!("_{name}_");
    [format!("_{term}"), format!("_{}", term.replace('_', ""))].iter().any(|form| {
        name.match_indices(form.as_str()).any(|(at, _)| {
            let rest = &name[at + form.len()..];
            rest.starts_with('_') || rest.starts_with("s_")
        })
    })
}

#[test]
fn names_are_normalised() {
    for (name, expected) in [
        ("HotCopies", "hot_copies"),
        ("HOT_COPIES", "hot_copies"),
        ("stand-in", "stand_in"),
        ("double read", "double_read"),
        ("RESPReader", "resp_reader"),
        ("crc16_slot", "crc16_slot"),
    ] {
        assert_eq!(normal(name), expected);
    }
}

#[test]
fn terms_match_whole_words() {
    for (name, term) in
        [("gates", "gate"), ("key_gate_id", "gate"), ("colocation", "co_location"), ("double_reads_max", "double_read")]
    {
        assert!(contains(name, term), "{name} {term}");
    }
    for (name, term) in [("legacy", "leg"), ("aggregate", "gate"), ("double_key_read", "double_read")] {
        assert!(!contains(name, term), "{name} {term}");
    }
}

#[test]
fn tables_are_parsed() {
    let page = "# Terms\n\n| Term | Meaning |\n|---|---|\n| source, target | A |\n| hot copy (cached) | B |\n\n| Term | Meaning |\n|---|---|\n| leg | C |\n";
    let expected = [(5, "source"), (5, "target"), (6, "hot_copy"), (6, "cached"), (10, "leg")];
    assert_eq!(terms(page), expected.map(|(line, term)| (line, term.to_owned())));
}
