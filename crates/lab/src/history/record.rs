//! The file of a history, with one operation per line for `tests-clients/history-check`.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::PathBuf;
use std::sync::Mutex;

use anyhow::{Context as _, Result};
use serde_json::{Map, Value, json};

use super::lock;

/// One operation.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    /// Object of the operation. Operations on different objects are independent.
    pub(super) object: &'a str,
    /// Number of the client.
    pub(super) client: usize,
    /// Time of the call, in nanoseconds since the start of the run.
    pub(super) call: u64,
    /// Time of the return; `None` if the outcome is unknown.
    pub(super) back: Option<u64>,
    /// Executed only if this key has this value (WATCH).
    pub(super) condition: Option<(String, Value)>,
    /// Commands that take effect at one instant.
    pub(super) commands: Vec<Vec<String>>,
    /// Replies; `None` with a return if EXEC returned nil.
    pub(super) got: Option<Vec<Value>>,
}

impl Entry<'_> {
    fn to_json(&self) -> Value {
        let mut line = Map::new();
        line.insert("object".to_owned(), json!(self.object));
        line.insert("client".to_owned(), json!(self.client));
        line.insert("call".to_owned(), json!(self.call));
        if let Some(back) = self.back {
            line.insert("return".to_owned(), json!(back));
        }
        if let Some((key, value)) = &self.condition {
            let mut condition = Map::new();
            condition.insert(key.clone(), value.clone());
            line.insert("if".to_owned(), Value::Object(condition));
        }
        line.insert("do".to_owned(), json!(self.commands));
        match &self.got {
            Some(got) => line.insert("got".to_owned(), json!(got)),
            None if self.back.is_some() => line.insert("aborted".to_owned(), json!(true)),
            None => None,
        };
        Value::Object(line)
    }
}

/// A file that many clients write to.
pub(super) struct Record {
    path: PathBuf,
    /// First write error, kept until the file is closed, because clients cannot handle it.
    file: Mutex<(BufWriter<File>, Option<std::io::Error>)>,
}

impl Record {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self { path, file: Mutex::new((BufWriter::new(file), None)) })
    }

    pub(super) fn write(&self, entry: &Entry<'_>) {
        let mut line = entry.to_json().to_string();
        line.push('\n');
        let mut file = lock(&self.file);
        if let Err(e) = file.0.write_all(line.as_bytes()) {
            file.1.get_or_insert(e);
        }
    }

    /// Flushes the file and returns its path.
    pub(super) fn close(&self) -> Result<PathBuf> {
        let mut file = lock(&self.file);
        let failed = match file.1.take() {
            Some(e) => Err(e),
            None => file.0.flush(),
        };
        failed.with_context(|| format!("cannot write {}", self.path.display()))?;
        Ok(self.path.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_the_format_of_the_checker() {
        let entry = |back, got| Entry {
            object: "o",
            client: 3,
            call: 7,
            back,
            condition: Some(("k".to_owned(), Value::Null)),
            commands: vec![vec!["GET".to_owned(), "k".to_owned()]],
            got,
        };
        let shown = |entry: Entry<'_>| entry.to_json().to_string();
        let known = shown(entry(Some(9), Some(vec![json!("v")])));
        assert_eq!(
            known,
            r#"{"call":7,"client":3,"do":[["GET","k"]],"got":["v"],"if":{"k":null},"object":"o","return":9}"#
        );
        let aborted = shown(entry(Some(9), None));
        assert!(aborted.contains(r#""aborted":true"#) && !aborted.contains("got"), "{aborted}");
        let unknown = shown(entry(None, None));
        assert!(!unknown.contains("return") && !unknown.contains("aborted"), "{unknown}");
    }
}
