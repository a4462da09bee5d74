//! Sources of passwords and tokens.
//!
//! A secret may be part of the configuration. A file or an environment variable is better, because then the
//! configuration can be shown. The *source* is stored, so that a reload reads a changed file.

use std::fmt;
use std::path::{Path, PathBuf};

use switchyard_router::Secret;

/// Source of a secret. Never prints the secret: `Debug` of [`Secret`] prints asterisks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SecretSource {
    /// In the configuration file itself.
    Inline(Secret),
    /// In a separate file, which may end in a line feed.
    File(PathBuf),
    Env(String),
}

/// Form of a secret, selected by the suffix of the key.
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
    /// Suffix of the key.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            SecretForm::Inline => "",
            SecretForm::File => "-file",
            SecretForm::Env => "-env",
        }
    }

    /// Returns the source named by `text`.
    pub(crate) fn source(self, text: &str) -> SecretSource {
        match self {
            SecretForm::Inline => SecretSource::Inline(Secret(text.to_owned())),
            SecretForm::File => SecretSource::File(PathBuf::from(text)),
            SecretForm::Env => SecretSource::Env(text.to_owned()),
        }
    }
}

/// Limit against wrong files. Redis refuses arguments above 16 KB before AUTH, too.
const SECRET_BYTES_MAX: usize = 16 * 1024;

impl SecretSource {
    pub(crate) fn form(&self) -> SecretForm {
        match self {
            SecretSource::Inline(_) => SecretForm::Inline,
            SecretSource::File(_) => SecretForm::File,
            SecretSource::Env(_) => SecretForm::Env,
        }
    }

    /// Printable form, without the secret.
    pub(crate) fn shown(&self) -> String {
        match self {
            SecretSource::Inline(_) => "***".to_owned(),
            SecretSource::File(path) => path.display().to_string(),
            SecretSource::Env(name) => name.clone(),
        }
    }

    /// Reads the current secret.
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

    /// Returns the path of the file if all users can read it.
    pub(crate) fn readable_by_others(&self) -> Option<&Path> {
        match self {
            SecretSource::File(path) if others_may_read(path) => Some(path),
            _ => None,
        }
    }
}

/// Whether all users can read `path`. Group permissions are not checked: a secret mounted for a group is common and
/// intended.
pub(crate) fn others_may_read(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o004 != 0)
}

/// Whether all users can write `path`.
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
    fn a_missing_file_or_variable_is_named() {
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
