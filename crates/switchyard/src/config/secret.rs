//! Where a password or token is written, and reading it there.
//!
//! A secret may stand in the configuration, but better in a file or in the environment: then the configuration can be
//! shown to anybody. What is kept is the *source*, so that a reload picks up a changed file.

use std::fmt;
use std::path::{Path, PathBuf};

use switchyard_router::Secret;

/// Where a secret comes from. Nothing here prints the secret itself: `Debug` of [`Secret`] shows asterisks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SecretSource {
    /// Written in the configuration file itself.
    Inline(Secret),
    /// In a file of its own, which may end in a line feed.
    File(PathBuf),
    /// In an environment variable.
    Env(String),
}

/// The three forms in which a secret can be given; the suffix of the key says which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecretForm {
    /// `password = "..."`
    Inline,
    /// `password-file = "/run/secrets/redis"`
    File,
    /// `password-env = "REDIS_PASSWORD"`
    Env,
}

impl SecretForm {
    /// What follows the name of the secret in the key.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            SecretForm::Inline => "",
            SecretForm::File => "-file",
            SecretForm::Env => "-env",
        }
    }

    /// The source of this form that `text` names.
    pub(crate) fn source(self, text: &str) -> SecretSource {
        match self {
            SecretForm::Inline => SecretSource::Inline(Secret(text.to_owned())),
            SecretForm::File => SecretSource::File(PathBuf::from(text)),
            SecretForm::Env => SecretSource::Env(text.to_owned()),
        }
    }
}

/// A secret larger than this is a wrong file, not a password (and Redis refuses arguments of more than 16 KB before
/// AUTH).
const SECRET_BYTES_MAX: usize = 16 * 1024;

impl SecretSource {
    /// Which of the three forms this is.
    pub(crate) fn form(&self) -> SecretForm {
        match self {
            SecretSource::Inline(_) => SecretForm::Inline,
            SecretSource::File(_) => SecretForm::File,
            SecretSource::Env(_) => SecretForm::Env,
        }
    }

    /// What may be shown of it.
    pub(crate) fn shown(&self) -> String {
        match self {
            SecretSource::Inline(_) => "***".to_owned(),
            SecretSource::File(path) => path.display().to_string(),
            SecretSource::Env(name) => name.clone(),
        }
    }

    /// Reads the secret now.
    pub(crate) fn read(&self) -> Result<Secret, SecretError> {
        let text = match self {
            SecretSource::Inline(secret) => {
                return check(secret.0.clone(), || "the configuration".to_owned());
            }
            SecretSource::File(path) => std::fs::read(path)
                .map_err(|source| SecretError::File { path: path.clone(), source })
                .and_then(|bytes| {
                    String::from_utf8(bytes).map_err(|_| SecretError::Content {
                        place: path.display().to_string(),
                        what: "is not UTF-8 text",
                    })
                })?,
            SecretSource::Env(name) => std::env::var(name).map_err(|_| SecretError::Env { name: name.clone() })?,
        };
        let line = text.strip_suffix('\n').unwrap_or(&text);
        let line = line.strip_suffix('\r').unwrap_or(line);
        check(line.to_owned(), || self.shown())
    }

    /// Whether others than the owner may read the file the secret is in.
    pub(crate) fn readable_by_others(&self) -> Option<&Path> {
        match self {
            SecretSource::File(path) if others_may_read(path) => Some(path),
            _ => None,
        }
    }
}

/// Whether the mode of `path` lets everybody read it. (A secret mounted for a group is common, and meant.)
pub(crate) fn others_may_read(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

/// Whether the mode of `path` lets everybody change it.
pub(crate) fn others_may_write(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o002 != 0)
}

fn check(text: String, place: impl Fn() -> String) -> Result<Secret, SecretError> {
    let wrong = |what| Err(SecretError::Content { place: place(), what });
    match text {
        text if text.is_empty() => wrong("is empty; leave the key out for no password"),
        text if text.len() > SECRET_BYTES_MAX => wrong("holds more than 16 KB; that is no password"),
        text if text.contains('\n') => wrong("holds more than one line; a secret is a single line"),
        text => Ok(Secret(text)),
    }
}

/// Why a secret could not be read.
#[derive(Debug)]
pub(crate) enum SecretError {
    File { path: PathBuf, source: std::io::Error },
    Env { name: String },
    Content { place: String, what: &'static str },
}

impl fmt::Display for SecretError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretError::File { path, source } => {
                write!(f, "cannot read {}: {source}", path.display())
            }
            SecretError::Env { name } => write!(f, "the environment variable {name} is not set (or not UTF-8)"),
            SecretError::Content { place, what } => write!(f, "the secret in {place} {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_may_end_in_one_line_feed_and_spaces_count() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("password");
        for (content, secret) in
            [("s3cret", "s3cret"), ("s3cret\n", "s3cret"), ("s3cret\r\n", "s3cret"), (" a b \n", " a b ")]
        {
            std::fs::write(&path, content).expect("writing");
            let read = SecretSource::File(path.clone()).read().expect(content);
            assert_eq!(read.0, secret);
        }
        for content in ["", "\n", "two\nlines\n"] {
            std::fs::write(&path, content).expect("writing");
            let error = SecretSource::File(path.clone()).read().expect_err(content).to_string();
            assert!(error.contains("password"), "{error}");
            assert!(!error.contains("two"), "an error must not show the content: {error}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = SecretSource::File("/nonexistent/pw".into()).read().expect_err("no such file").to_string();
        assert!(error.contains("/nonexistent/pw"), "{error}");
        let error = SecretSource::Env("SWITCHYARD_TEST_UNSET".into()).read().expect_err("not set").to_string();
        assert!(error.contains("SWITCHYARD_TEST_UNSET"), "{error}");
    }

    #[test]
    fn secrets_are_never_shown() {
        let source = SecretForm::Inline.source("hunter2");
        assert!(!format!("{source:?} {}", source.shown()).contains("hunter2"));
    }
}
