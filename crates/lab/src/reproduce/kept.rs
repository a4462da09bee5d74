//! Files of results: a file for each experiment, and a line of JSON for each run, so that an interrupted reproduction
//! resumes where it stopped.
//!
//! A run's line has its origin (router, servers, machine) and its settings, and is used again only if all of them match.
//! The settings are stored as they are, because a name made of them can be the same for two. Another kind of line lists
//! the runs of a whole experiment, so that the book recognizes a complete set without knowledge of the experiment.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Share of all processors that other programs may use during a run. Above it, the run is repeated.
const DISTURBED_MAX: f64 = 0.05;

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
    /// Share of all processors that other programs used during the run.
    disturbed: f64,
    result: Value,
}

/// Settings of all runs of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Plan {
    measured_by: String,
    /// Number of repetitions.
    rounds: u32,
    plan: Vec<Value>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Run(Entry),
    Plan(Plan),
}

/// The file of an experiment, and its results.
#[derive(Debug)]
pub(super) struct StoredResults {
    path: PathBuf,
    measured_by: String,
    lines: Vec<Line>,
}

impl StoredResults {
    /// Reads the file of an experiment in `folder`. A missing file has no results.
    pub(super) fn open(folder: &Path, experiment: &str, measured_by: String) -> Result<Self> {
        let path = folder.join(format!("{experiment}.jsonl"));
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        // An invalid line was cut off by a kill, or is of another version: its run is repeated.
        let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        Ok(Self { path, measured_by, lines })
    }

    /// Returns the result of a run with these settings, and its date.
    pub(super) fn find<R: DeserializeOwned>(&self, what: &Value, round: u32) -> Option<(R, &str)> {
        let entry = *self.runs(&self.measured_by, what, round).last()?;
        Some((serde_json::from_value(entry.result.clone()).ok()?, &entry.date))
    }

    /// Whether a run is due: it has no result, or other programs disturbed each of its fewer than `attempts`
    /// repetitions.
    pub(super) fn is_due(&self, what: &Value, round: u32, attempts: usize) -> bool {
        let runs = self.runs(&self.measured_by, what, round);
        runs.len() < attempts && runs.iter().all(|run| run.disturbed > DISTURBED_MAX)
    }

    /// Returns the results of a run: disturbed ones first, and otherwise in the order of their measurement. The last one
    /// counts.
    fn runs(&self, measured_by: &str, what: &Value, round: u32) -> Vec<&Entry> {
        let mut runs: Vec<&Entry> = self
            .lines
            .iter()
            .filter_map(|line| if let Line::Run(entry) = line { Some(entry) } else { None })
            .filter(|e| e.measured_by == measured_by && e.round == round && e.what == *what)
            .collect();
        runs.sort_by_key(|run| run.disturbed <= DISTURBED_MAX);
        runs
    }

    /// Stores a result, on disk before this returns. `disturbed` is the share of all processors that other programs
    /// used during the run.
    pub(super) fn add<R: Serialize>(
        &mut self,
        what: &Value,
        round: u32,
        date: String,
        disturbed: f64,
        result: &R,
    ) -> Result<()> {
        let disturbed = (disturbed * 1e3).round() / 1e3;
        let (measured_by, what, result) = (self.measured_by.clone(), what.clone(), serde_json::to_value(result)?);
        self.write(Line::Run(Entry { measured_by, what, round, date, disturbed, result }))
    }

    /// Stores the settings of all runs of the experiment, unless the file has them.
    pub(super) fn plan(&mut self, runs: &[Value], rounds: u32) -> Result<()> {
        let plan = Line::Plan(Plan { measured_by: self.measured_by.clone(), rounds, plan: runs.to_vec() });
        if self.lines.contains(&plan) { Ok(()) } else { self.write(plan) }
    }

    fn write(&mut self, line: Line) -> Result<()> {
        let cannot = || format!("cannot write {}", self.path.display());
        if let Some(folder) = self.path.parent() {
            fs::create_dir_all(folder).with_context(cannot)?;
        }
        let before = fs::read(&self.path).unwrap_or_default();
        let mut text = if before.last().is_some_and(|byte| *byte != b'\n') { "\n".to_owned() } else { String::new() };
        text += &serde_json::to_string(&line)?;
        text.push('\n');
        let mut file = fs::OpenOptions::new().create(true).append(true).open(&self.path).with_context(cannot)?;
        file.write_all(text.as_bytes()).and_then(|()| file.sync_data()).with_context(cannot)?;
        self.lines.push(line);
        Ok(())
    }

    /// Returns the newest complete set of results of an experiment: all runs of one plan, by one build on one machine.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub(super) fn newest_complete(folder: &Path, experiment: &str) -> Result<Option<ResultSet>> {
        let all = Self::open(folder, experiment, String::new())?;
        let plans = all.lines.iter().filter_map(|line| if let Line::Plan(plan) = line { Some(plan) } else { None });
        // Of several elements with the last date, `max_by` returns the last one.
        Ok(plans.filter_map(|plan| all.complete(plan)).max_by(|one, other| one.last_date.cmp(&other.last_date)))
    }

    fn complete(&self, plan: &Plan) -> Option<ResultSet> {
        let mut set = ResultSet {
            measured_by: plan.measured_by.clone(),
            first_date: String::new(),
            last_date: String::new(),
            disturbed: 0,
            runs: Vec::new(),
        };
        for what in &plan.plan {
            let mut results = Vec::new();
            for round in 0..plan.rounds {
                let entry = *self.runs(&plan.measured_by, what, round).last()?;
                if set.first_date.is_empty() || entry.date < set.first_date {
                    set.first_date.clone_from(&entry.date);
                }
                if entry.date > set.last_date {
                    set.last_date.clone_from(&entry.date);
                }
                set.disturbed += usize::from(entry.disturbed > DISTURBED_MAX);
                results.push(entry.result.clone());
            }
            set.runs.push((what.clone(), results));
        }
        Some(set)
    }
}

/// All runs of an experiment, by one build on one machine.
#[derive(Debug, Clone)]
pub(super) struct ResultSet {
    measured_by: String,
    first_date: String,
    last_date: String,
    /// Number of runs that other programs disturbed in each attempt.
    disturbed: usize,
    /// Settings, and the result of each repetition.
    runs: Vec<(Value, Vec<Value>)>,
}

impl ResultSet {
    /// Returns build, servers, machine and dates, and the number of disturbed runs.
    pub(super) fn origin(&self) -> String {
        let Self { measured_by, first_date, last_date, disturbed, .. } = self;
        let when = if first_date == last_date { first_date.clone() } else { format!("{first_date} to {last_date}") };
        let marked = match disturbed {
            0 => String::new(),
            count => format!(", other programs disturbed {count} runs"),
        };
        format!("{}, {when}{marked}", measured_by.replace("; ", ", "))
    }

    /// Returns the settings of each run.
    pub(super) fn settings(&self) -> impl Iterator<Item = &Value> {
        self.runs.iter().map(|(what, _)| what)
    }

    /// Returns the results of the runs whose settings satisfy `is_wanted`: for each run, its repetitions in order.
    pub(super) fn of<R: DeserializeOwned>(&self, is_wanted: impl Fn(&Value) -> bool) -> Vec<Vec<R>> {
        let wanted = self.runs.iter().filter(|(what, _)| is_wanted(what));
        wanted
            .map(|(_, results)| results.iter().filter_map(|r| serde_json::from_value(r.clone()).ok()).collect())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    fn open(folder: &tempfile::TempDir, measured_by: &str) -> StoredResults {
        StoredResults::open(folder.path(), "x", measured_by.to_owned()).expect("readable")
    }

    fn newest(folder: &tempfile::TempDir) -> Option<ResultSet> {
        StoredResults::newest_complete(folder.path(), "x").expect("readable")
    }

    #[test]
    fn stored_results_are_read_unchanged() {
        let folder = folder();
        let what = json!({"writes": 0.5, "way": "source"});
        open(&folder, "a").add(&what, 0, "2026-01-01".to_owned(), 0.0, &(1.5, 0.1 + 0.2, 7_u64)).expect("written");
        let again = open(&folder, "a");
        assert_eq!(again.find::<(f64, f64, u64)>(&what, 0), Some(((1.5, 0.1 + 0.2, 7), "2026-01-01")));
    }

    #[test]
    fn other_settings_versions_and_rounds_are_not_used() {
        let folder = folder();
        let mut kept = open(&folder, "a");
        kept.add(&json!({"writes": 0.0}), 0, String::new(), 0.0, &1_u64).expect("written");
        // The same if rounded to whole percents.
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.5}), 0), None);
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.0, "keys": 1}), 0), None);
        assert_eq!(kept.find::<u64>(&json!({"writes": 0.0}), 1), None);
        assert_eq!(open(&folder, "b").find::<u64>(&json!({"writes": 0.0}), 0), None);
        assert!(kept.find::<u64>(&json!({"writes": 0.0}), 0).is_some());
    }

    #[test]
    fn a_truncated_line_loses_only_its_own_result() {
        let folder = folder();
        open(&folder, "a").add(&json!(1), 0, String::new(), 0.0, &1_u64).expect("written");
        let path = folder.path().join("x.jsonl");
        let mut text = fs::read_to_string(&path).expect("a file");
        text.push_str(r#"{"measured_by":"a","wha"#);
        fs::write(&path, text).expect("written");
        open(&folder, "a").add(&json!(2), 0, String::new(), 0.0, &2_u64).expect("written");
        let kept = open(&folder, "a");
        assert_eq!(kept.find::<u64>(&json!(1), 0).map(|(n, _)| n), Some(1));
        assert_eq!(kept.find::<u64>(&json!(2), 0).map(|(n, _)| n), Some(2));
    }

    #[test]
    fn a_disturbed_run_is_due_again_and_an_undisturbed_one_counts() {
        let folder = folder();
        let mut kept = open(&folder, "a");
        assert!(kept.is_due(&json!(1), 0, 2));
        kept.add(&json!(1), 0, String::new(), 0.3, &1_u64).expect("written");
        assert!(kept.is_due(&json!(1), 0, 2) && !kept.is_due(&json!(1), 0, 1));
        kept.add(&json!(1), 0, String::new(), 0.01, &2_u64).expect("written");
        kept.add(&json!(1), 0, String::new(), 0.2, &3_u64).expect("written");
        assert!(!kept.is_due(&json!(1), 0, 9));
        assert_eq!(kept.find::<u64>(&json!(1), 0).map(|(n, _)| n), Some(2));
        assert_eq!(kept.lines.len(), 3, "every run is kept");
    }

    #[test]
    fn the_newest_complete_set_is_of_one_machine() {
        let folder = folder();
        let (one, two) = (json!({"at": 1}), json!({"at": 2}));
        let add = |by: &str, what: &Value, round: u32, date: &str, value: u64| {
            open(&folder, by).add(what, round, date.to_owned(), 0.0, &value).expect("written");
        };
        for by in ["old", "new", "partial"] {
            open(&folder, by).plan(&[one.clone(), two.clone()], 2).expect("written");
        }
        assert!(newest(&folder).is_none(), "nothing was measured");
        for (by, date, first) in [("new", "2026-02-02", 10), ("old", "2026-02-01", 20)] {
            for (at, what) in [&one, &two].into_iter().enumerate() {
                (0..2).for_each(|round| add(by, what, round, date, first + 2 * at as u64 + u64::from(round)));
            }
        }
        for round in 0..2 {
            add("partial", &one, round, "2026-02-03", 30);
        }
        let set = newest(&folder).expect("two complete sets");
        assert_eq!(set.origin(), "new, 2026-02-02");
        assert_eq!(set.of::<u64>(|what| what["at"] == 2), [[12, 13]]);
        add("partial", &two, 0, "2026-02-03", 31);
        assert_eq!(newest(&folder).expect("a set").measured_by, "new");
        add("partial", &two, 1, "2026-02-03", 32);
        assert_eq!(newest(&folder).expect("a set").measured_by, "partial");
    }

    #[test]
    fn a_plan_is_stored_once() {
        let folder = folder();
        for _ in 0..2 {
            open(&folder, "a").plan(&[json!(1)], 1).expect("written");
        }
        assert_eq!(open(&folder, "a").lines.len(), 1);
        open(&folder, "a").plan(&[json!(1)], 3).expect("written");
        assert_eq!(open(&folder, "a").lines.len(), 2);
    }
}
