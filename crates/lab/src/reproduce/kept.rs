//! The file of results: a line of JSON for each run, so that an interrupted reproduction resumes where it stopped.
//!
//! A line has its origin (router, servers, machine) and its settings, and is used again only if all of them match. The
//! settings are stored as they are, because a name made of them can be the same for two.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Result of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    /// Router, servers and machine.
    measured_by: String,
    /// All settings of the run.
    what: Value,
    /// Number of the repetition.
    round: u32,
    date: String,
    result: Value,
}

/// The file and its results.
#[derive(Debug)]
pub(super) struct StoredResults {
    path: PathBuf,
    measured_by: String,
    entries: Vec<Entry>,
}

impl StoredResults {
    /// Reads the file. A missing file has no results.
    pub(super) fn open(path: &Path, measured_by: String) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        // An invalid line was cut off by a kill, or is of another version: its run is repeated.
        let entries = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Self { path: path.to_owned(), measured_by, entries })
    }

    /// Returns the result of a run with these settings, and its date.
    pub(super) fn find<R: DeserializeOwned>(&self, what: &Value, round: u32) -> Option<(R, &str)> {
        // The last one, because a repeated measurement replaces an earlier one.
        let entry = self
            .entries
            .iter()
            .rev()
            .find(|e| e.measured_by == self.measured_by && e.round == round && e.what == *what)?;
        Some((serde_json::from_value(entry.result.clone()).ok()?, &entry.date))
    }

    /// Stores a result, on disk before this returns.
    pub(super) fn add<R: Serialize>(&mut self, what: &Value, round: u32, date: String, result: &R) -> Result<()> {
        let entry = Entry {
            measured_by: self.measured_by.clone(),
            what: what.clone(),
            round,
            date,
            result: serde_json::to_value(result)?,
        };
        let cannot = || format!("cannot write {}", self.path.display());
        let before = fs::read(&self.path).unwrap_or_default();
        let mut line = if before.last().is_some_and(|byte| *byte != b'\n') { "\n".to_owned() } else { String::new() };
        line += &serde_json::to_string(&entry)?;
        line.push('\n');
        let mut file = fs::OpenOptions::new().create(true).append(true).open(&self.path).with_context(cannot)?;
        file.write_all(line.as_bytes()).and_then(|()| file.sync_data()).with_context(cannot)?;
        self.entries.push(entry);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    #[test]
    fn stored_results_are_read_unchanged() {
        let folder = folder();
        let path = folder.path().join("kept.jsonl");
        let mut kept = StoredResults::open(&path, "a".to_owned()).expect("no file yet");
        let what = json!({"writes": 0.5, "way": "source"});
        kept.add(&what, 0, "2026-01-01".to_owned(), &(1.5, 0.1 + 0.2, 7_u64)).expect("written");
        let again = StoredResults::open(&path, "a".to_owned()).expect("a file");
        assert_eq!(again.find::<(f64, f64, u64)>(&what, 0), Some(((1.5, 0.1 + 0.2, 7), "2026-01-01")));
    }

    #[test]
    fn other_settings_versions_and_rounds_are_not_used() {
        let folder = folder();
        let path = folder.path().join("kept.jsonl");
        let mut kept = StoredResults::open(&path, "a".to_owned()).expect("no file yet");
        kept.add(&json!({"writes": 0.0}), 0, String::new(), &1_u64).expect("written");
        // The same if rounded to whole percents.
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.5}), 0), None);
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.0, "keys": 1}), 0), None);
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.0}), 1), None);
        assert_eq!(
            StoredResults::open(&path, "b".to_owned()).expect("a file").find::<u64>(&json!({"writes": 0.0}), 0),
            None
        );
        assert!(kept.find::<u64>(&json!({"writes": 0.0}), 0).is_some());
    }

    #[test]
    fn a_truncated_line_loses_only_its_own_result() {
        let folder = folder();
        let path = folder.path().join("kept.jsonl");
        let mut kept = StoredResults::open(&path, "a".to_owned()).expect("no file yet");
        kept.add(&json!(1), 0, String::new(), &1_u64).expect("written");
        let mut text = fs::read_to_string(&path).expect("a file");
        text.push_str(r#"{"measured_by":"a","wha"#);
        fs::write(&path, text).expect("written");
        let mut kept = StoredResults::open(&path, "a".to_owned()).expect("a file");
        kept.add(&json!(2), 0, String::new(), &2_u64).expect("written");
        let kept = StoredResults::open(&path, "a".to_owned()).expect("a file");
        assert_eq!(kept.find::<u64>(&json!(1), 0).map(|(n, _)| n), Some(1));
        assert_eq!(kept.find::<u64>(&json!(2), 0).map(|(n, _)| n), Some(2));
    }
}
