//! Persistent state, behind a trait: a file in the state directory.
//!
//! The store is the authority on placement: keys are where the stored map places them, regardless of the configuration.
//! So doubts lead to an error at the start, never to an empty state: silently replacing an unreadable store by an even
//! map would make keys disappear.

mod lock;
mod redb;

#[cfg(any(test, fuzzing))]
pub(crate) use self::redb::fuzz;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use switchyard_policy::failover::Record;
use switchyard_policy::topology::Topology;

pub use self::redb::{FORMAT, RedbStore};

/// Durable state. After a method has returned `Ok`, its change survives a power cut.
pub trait Store: Send + Sync {
    /// Returns the stored topology. `None` if there never was one.
    ///
    /// # Errors
    /// If the store cannot be read, or contains no valid topology.
    fn load_topology(&self) -> Result<Option<Topology>, StoreError>;

    /// Stores `topology`. Its epoch must exceed the stored one. Storing the same topology again does nothing.
    ///
    /// # Errors
    /// If the stored epoch is not lower and the content differs, or the store cannot be written.
    fn save_topology(&self, topology: &Topology) -> Result<(), StoreError>;

    /// Counts a start of the router, beginning with 1. The count distinguishes this run's connections and records from
    /// earlier ones.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn next_incarnation(&self) -> Result<u64, StoreError>;

    /// Last primary of a node with replicas. `None` if it was never recorded.
    ///
    /// # Errors
    /// If the store cannot be read, or contains no valid record.
    fn load_primary(&self, node: &str) -> Result<Option<Record<SocketAddr>>, StoreError>;

    /// Records the primary of a node, so that a restarted router does not use an earlier one.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn save_primary(&self, node: &str, record: &Record<SocketAddr>) -> Result<(), StoreError>;

    /// Returns the document of this name. `None` if it was never stored.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn load_document(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Stores a document, replacing the previous one of the same name.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn save_document(&self, name: &str, document: &[u8]) -> Result<(), StoreError>;

    /// Returns the error for a damaged document, which names its location.
    fn damaged_document(&self, name: &str, what: &str) -> StoreError;

    /// Returns the error for a document that JSON parsing has refused: damaged, or of a newer version.
    fn unfit_document(&self, name: &str, error: &serde_json::Error) -> StoreError;

    /// Newest version of Switchyard that has written to the store.
    fn newest_version(&self) -> Option<String>;
}

/// Errors of the store. The text contains the system's error, which therefore is no `source`: otherwise it would be
/// displayed twice.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The state directory, or its lock file, cannot be created or opened.
    #[error("cannot use {} as state directory: {why}", directory.display())]
    Directory {
        /// State directory.
        directory: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// The state directory is in use by another process.
    #[error(
        "the state directory {} is in use by {}",
        directory.display(),
        match holder {
            Some(pid) => format!("the process {pid}"),
            None => "another process".to_owned(),
        }
    )]
    Locked {
        /// State directory.
        directory: PathBuf,
        /// Id of that process, if known.
        holder: Option<u32>,
    },
    /// The file cannot be opened, read or written.
    #[error("cannot {action} {}: {why}", file.display())]
    Access {
        /// Attempted action: "open", "read", "write".
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// The file does not have the content that this program writes.
    #[error(
        "{} is damaged: {what}; replace the state directory by a copy from a backup. If there is none, `switchyard recover` \
         makes a new one from the location of the keys, in an empty --state-dir",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// The file was written by a later version of this program.
    #[error(
        "{} has format {found}, but this version of Switchyard knows formats up to {known}; use the version that wrote it, or a later one",
        file.display()
    )]
    Newer {
        /// The file.
        file: PathBuf,
        /// Format of the file.
        found: u64,
        /// Latest format that this program supports.
        known: u64,
    },
    /// The file contains something that this version does not support.
    #[error(
        "{} contains data that Switchyard {} does not support: {what}. Switchyard {} has written it; use that version, or a later one",
        file.display(),
        crate::VERSION,
        version.as_deref().unwrap_or("of a later version"),
    )]
    Unknown {
        /// The file.
        file: PathBuf,
        /// Description of the content.
        what: String,
        /// Newest version that has written to the file, if known.
        version: Option<String>,
    },
    /// The topology is older than the stored one. The caller used a stale copy.
    #[error(
        "the topology of epoch {given} was not saved, because epoch {stored} is already stored; load the stored topology and \
         apply the change to that"
    )]
    Stale {
        /// The stored epoch.
        stored: u64,
        /// Epoch of the refused topology.
        given: u64,
    },
}

/// Loads and parses a document. Returns the default value if it does not exist.
///
/// # Errors
/// If it cannot be read or parsed.
pub fn load_json<T: serde::de::DeserializeOwned + Default>(store: &dyn Store, name: &str) -> Result<T, StoreError> {
    match store.load_document(name)? {
        None => Ok(T::default()),
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| store.unfit_document(name, &error)),
    }
}

/// Serializes and stores a document.
///
/// # Errors
/// If the store cannot be written.
pub fn save_json<T: serde::Serialize>(store: &dyn Store, name: &str, value: &T) -> Result<(), StoreError> {
    let bytes = serde_json::to_vec(value).map_err(|error| store.damaged_document(name, &error.to_string()))?;
    store.save_document(name, &bytes)
}
