//! What survives a restart, behind one trait: a file in the state directory.
//!
//! The store is the authority on placement: the keys are where the stored map says, whatever the configuration lists
//! now. So what is in doubt here is an error at start, never a fresh beginning: an unreadable store that was silently
//! replaced by an even map would make keys disappear.

mod lock;
mod redb;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use switchyard_policy::failover::Record;
use switchyard_policy::topology::Topology;

pub use self::redb::{FORMAT, RedbStore};

/// Durable state. A method that returned `Ok` has made its change durable: it survives a power cut.
pub trait Store: Send + Sync {
    /// The topology saved last; `None` if there never was one.
    ///
    /// # Errors
    /// If the store cannot be read, or what it holds is not a topology.
    fn load_topology(&self) -> Result<Option<Topology>, StoreError>;

    /// Makes `topology` the stored one. Its epoch must be above the stored one's; saving the stored one again is
    /// allowed and does nothing.
    ///
    /// # Errors
    /// If the stored epoch is as high or higher with another content, or the store cannot be written.
    fn save_topology(&self, topology: &Topology) -> Result<(), StoreError>;

    /// Counts a start of the router: 1 for the first, one more each time. Tells this run's connections and records
    /// apart from those of an earlier run.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn next_incarnation(&self) -> Result<u64, StoreError>;

    /// Which server was the primary of a node last, for a node that has replicas; `None` if that was never recorded.
    ///
    /// # Errors
    /// If the store cannot be read, or what it holds is no such record.
    fn load_primary(&self, node: &str) -> Result<Option<Record<SocketAddr>>, StoreError>;

    /// Records the primary of a node, so that after a restart of the router the old one is not taken for it.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn save_primary(&self, node: &str, record: &Record<SocketAddr>) -> Result<(), StoreError>;

    /// The document of that name, as it was saved last; `None` if it never was.
    ///
    /// # Errors
    /// If the store cannot be read.
    fn load_document(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError>;

    /// Saves a document of that name in the place of the one before.
    ///
    /// # Errors
    /// If the store cannot be written.
    fn save_document(&self, name: &str, document: &[u8]) -> Result<(), StoreError>;

    /// What is wrong with a document, as an error that names where it is.
    fn damaged_document(&self, name: &str, what: &str) -> StoreError;

    /// The same, by what JSON says of it: damaged, or of a version that knows more.
    fn unfit_document(&self, name: &str, error: &serde_json::Error) -> StoreError;

    /// The newest version of Switchyard that has written to the store.
    fn newest_version(&self) -> Option<String>;
}

/// What can go wrong with the store. What the system said is a part of the text, so it is no source beside that: who
/// shows those as well would say it twice.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The state directory, or its lock file, cannot be made or opened.
    #[error("cannot use {} as state directory: {why}", directory.display())]
    Directory {
        /// The state directory.
        directory: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// Another process uses the state directory.
    #[error(
        "the state directory {} is in use by {}",
        directory.display(),
        match holder {
            Some(pid) => format!("the process {pid}"),
            None => "another process".to_owned(),
        }
    )]
    Locked {
        /// The state directory.
        directory: PathBuf,
        /// The process that uses it, if it could be told.
        holder: Option<u32>,
    },
    /// The file cannot be opened, read or written.
    #[error("cannot {action} {}: {why}", file.display())]
    Access {
        /// What was tried: "open", "read", "write".
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// What the system said.
        why: io::Error,
    },
    /// The file's content is not what this program writes.
    #[error(
        "{} is damaged: {what}; put a copy of the state directory from a backup in its place. If there is none, `switchyard recover` \
         makes another one from where the keys are, in an empty --state-dir",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
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
        /// Its format.
        found: u64,
        /// The latest format that this program knows.
        known: u64,
    },
    /// The file says something that this version of the program does not know.
    #[error(
        "{} says something that Switchyard {} does not know: {what}. Switchyard {} has written it; use that version, or a later one",
        file.display(),
        crate::VERSION,
        version.as_deref().unwrap_or("of a later version"),
    )]
    Unknown {
        /// The file.
        file: PathBuf,
        /// What it says.
        what: String,
        /// The newest version that has written it, if that is known.
        version: Option<String>,
    },
    /// An older topology was about to replace a newer one. The caller worked from a stale copy.
    #[error(
        "the topology of epoch {given} was not saved, because that of epoch {stored} is stored already; load the stored one and \
         apply the change to that"
    )]
    Stale {
        /// The stored epoch.
        stored: u64,
        /// The epoch of what was to be saved.
        given: u64,
    },
}

/// Reads a document as what it says; what it says by default if there is none.
///
/// # Errors
/// If it cannot be read, or says something else.
pub fn load_json<T: serde::de::DeserializeOwned + Default>(store: &dyn Store, name: &str) -> Result<T, StoreError> {
    match store.load_document(name)? {
        None => Ok(T::default()),
        Some(bytes) => serde_json::from_slice(&bytes).map_err(|error| store.unfit_document(name, &error)),
    }
}

/// Saves a document.
///
/// # Errors
/// If the store cannot be written.
pub fn save_json<T: serde::Serialize>(store: &dyn Store, name: &str, value: &T) -> Result<(), StoreError> {
    let bytes = serde_json::to_vec(value).map_err(|error| store.damaged_document(name, &error.to_string()))?;
    store.save_document(name, &bytes)
}
