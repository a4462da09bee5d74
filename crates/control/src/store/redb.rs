//! The embedded store: `state.redb` in the state directory.
//!
//! Uses redb, because a change of placement must be durable before its effect, atomically and with checksums. Also,
//! records of moves will need ordered tables, which writing files in place or renaming over them does not provide. The
//! topology is a row of JSON rather than a table of slots: it is small, replaced as a whole, and legible for operators.
//! Placement overrides have a table of their own: there may be a million, and a change writes only the changed entries.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod row;

use std::fs::{File, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use redb::{Builder, Database, ReadableDatabase, ReadableTable, TableDefinition, TableHandle};
use serde::{Deserialize, Serialize};
use switchyard_policy::failover::Record;
use switchyard_policy::topology::Topology;

use self::row::{Loaded, decode, encode, load_overrides};
use super::lock::DirectoryLock;
use super::{Store, StoreError};

/// Format version that this program writes. Increase it if an older program would misread new content.
pub const FORMAT: u64 = 1;

const FILE_NAME: &str = "state.redb";

/// Numbers by name: [`FORMAT_KEY`], [`INCARNATION_KEY`]. Every format has this table, with the format in it.
const META: TableDefinition<'_, &str, u64> = TableDefinition::new("meta");
const FORMAT_KEY: &str = "format";
const INCARNATION_KEY: &str = "incarnation";

/// Documents by name: [`TOPOLOGY_KEY`], `primary:` with the name of a node, and `document:` with the name of another
/// module's document. JSON, except for the autoscaler's history.
const DOCUMENTS: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("documents");
const TOPOLOGY_KEY: &str = "topology";

/// Placement overrides: key, and number of the node.
const EXCEPTIONS: TableDefinition<'_, &[u8], u16> = TableDefinition::new("exceptions");
/// Newest version of Switchyard that has written here, named in errors about unsupported content.
const VERSION_KEY: &str = "version";

/// The state is read at the start, and is small without many placement overrides. The default of redb would be a
/// gigabyte.
const CACHE_BYTES: usize = 4 << 20;

/// Store in a local directory. While it lives, no other process can open it.
pub struct RedbStore {
    /// `None` after a failure, until the database was reopened.
    database: RwLock<Option<Database>>,
    file: PathBuf,
    /// Stored topology, after a read or write. `None` after a failure, because the stored content is unknown.
    saved: Mutex<Option<Topology>>,
    /// Error of the last write.
    trouble: Mutex<Option<String>>,
    /// Released last, because fields are dropped in order.
    _lock: DirectoryLock,
}

impl std::fmt::Debug for RedbStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedbStore").field("file", &self.file).finish_non_exhaustive()
    }
}

impl RedbStore {
    /// Opens the state in `directory`. Creates the directory and the state if needed.
    ///
    /// # Errors
    /// If another process uses it, the directory cannot be used, or the file is damaged or of a newer format.
    pub fn open(directory: &Path) -> Result<Self, StoreError> {
        let lock = DirectoryLock::acquire(directory)?;
        let path = directory.join(FILE_NAME);
        let access = |why| StoreError::Access { action: "open", file: path.clone(), why };
        let file = open_file(&path).map_err(access)?;
        // A power cut must not remove the file itself after a change in it was reported as durable.
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(access)?;
        let database = open_database(file).map_err(|error| error.at("open", &path))?;
        let store = Self {
            database: RwLock::new(Some(database)),
            file: path,
            saved: Mutex::default(),
            trouble: Mutex::default(),
            _lock: lock,
        };
        store.check_format()?;
        Ok(store)
    }

    /// Checks the format, and writes it to an empty file.
    fn check_format(&self) -> Result<(), StoreError> {
        let found = self.read(|transaction| {
            if transaction.list_tables()?.next().is_none() {
                return Ok(None);
            }
            let is_meta = |table: redb::UntypedTableHandle| table.name() == META.name();
            if !transaction.list_tables()?.any(is_meta) {
                return Err(Failure::Damaged("it has tables, but none with its format".into()));
            }
            match transaction.open_table(META)?.get(FORMAT_KEY)? {
                Some(format) => Ok(Some(format.value())),
                None => Err(Failure::Damaged("it contains no format version".into())),
            }
        })?;
        match found {
            Some(FORMAT) => Ok(()),
            Some(newer @ FORMAT..) => Err(StoreError::Newer { file: self.file.clone(), found: newer, known: FORMAT }),
            Some(unknown) => Err(self.damaged(format!("there is no format {unknown}"))),
            None => self.write(|transaction| {
                transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
                transaction.open_table(DOCUMENTS)?;
                Ok(())
            }),
        }
    }

    fn read<T>(&self, work: impl FnOnce(&redb::ReadTransaction) -> Result<T, Failure>) -> Result<T, StoreError> {
        self.with(|database| database.begin_read().map_err(Failure::from).and_then(|transaction| work(&transaction)))
            .map_err(|failure| self.error(failure, "read"))
    }

    fn error(&self, failure: Failure, action: &'static str) -> StoreError {
        match failure {
            Failure::Unknown(what) => {
                StoreError::Unknown { file: self.file.clone(), what, version: self.newest_version() }
            }
            other => other.at(action, &self.file),
        }
    }

    /// Runs `work` in a transaction, and makes its changes durable if it succeeds. Otherwise nothing changes.
    fn write<T>(&self, work: impl FnOnce(&redb::WriteTransaction) -> Result<T, Failure>) -> Result<T, StoreError> {
        let run = |database: &Database| {
            let transaction = database.begin_write()?;
            let result = work(&transaction)?;
            note_version(&transaction)?;
            transaction.commit()?;
            Ok(result)
        };
        let outcome = self.with(run).map_err(|failure: Failure| self.error(failure, "write"));
        let trouble = match &outcome {
            Err(error @ StoreError::Access { .. }) => Some(error.to_string()),
            _ => None,
        };
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        outcome
    }

    /// Error of the last write. Until a write succeeds, actions that require a record must wait.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Checks whether writes work again, with a write that changes nothing.
    ///
    /// # Errors
    /// If the write fails.
    pub fn retry_write(&self) -> Result<(), StoreError> {
        self.write(|transaction| {
            transaction.open_table(META)?.insert(FORMAT_KEY, FORMAT)?;
            Ok(())
        })
    }

    /// Free space on the disk for this process, in bytes. `None` if the system does not report it.
    #[must_use]
    pub fn free_bytes(&self) -> Option<u64> {
        let disk = rustix::fs::statvfs(self.directory()).ok().filter(|disk| disk.f_blocks > 0)?;
        let free = if rustix::process::geteuid().is_root() { disk.f_bfree } else { disk.f_bavail };
        Some(free.saturating_mul(disk.f_frsize))
    }

    /// Identity of the locked file, which no other process can lock now. `None` if the system does not report it.
    pub fn lock_identity(&self) -> Option<String> {
        self._lock.identity()
    }

    /// State directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        self.file.parent().unwrap_or(&self.file)
    }

    /// Runs `work` on the database. After a disk error, such as a full disk, redb refuses everything until it is
    /// reopened; the next use reopens it.
    fn with<T>(&self, work: impl FnOnce(&Database) -> Result<T, Failure>) -> Result<T, Failure> {
        {
            let open = self.database.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(database) = &*open {
                let result = work(database);
                let failed = matches!(&result, Err(Failure::Database(redb::Error::Io(_) | redb::Error::PreviousIo)));
                drop(open);
                if failed {
                    *self.database.write().unwrap_or_else(PoisonError::into_inner) = None;
                }
                return result;
            }
        }
        let mut open = self.database.write().unwrap_or_else(PoisonError::into_inner);
        if open.is_none() {
            *open =
                Some(open_database(open_file(&self.file).map_err(|error| Failure::Database(redb::Error::Io(error)))?)?);
        }
        match &*open {
            Some(database) => work(database),
            None => Err(Failure::Damaged("it cannot be opened again".into())),
        }
    }

    fn damaged(&self, what: String) -> StoreError {
        StoreError::Damaged { file: self.file.clone(), what }
    }
}

impl Store for RedbStore {
    fn load_topology(&self) -> Result<Option<Topology>, StoreError> {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = self.read(|transaction| match transaction.open_table(DOCUMENTS)?.get(TOPOLOGY_KEY)? {
            Some(row) => decode(row.value(), || load_overrides(&transaction.open_table(EXCEPTIONS)?)).map(Some),
            None => Ok(None),
        })?;
        // So that the first change after a start does not write a million entries again.
        *saved = loaded.as_ref().filter(|loaded| loaded.overrides_apart).map(|loaded| loaded.topology.clone());
        Ok(loaded.map(|loaded| loaded.topology))
    }

    fn save_topology(&self, topology: &Topology) -> Result<(), StoreError> {
        let document = encode(topology);
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        // Taken out, so that after a failure the stored content is read again.
        let known = saved.take();
        self.write(|transaction| {
            let mut documents = transaction.open_table(DOCUMENTS)?;
            let mut exceptions = transaction.open_table(EXCEPTIONS)?;
            let stored = match (known, documents.get(TOPOLOGY_KEY)?) {
                (Some(topology), Some(_)) => Some(Loaded { topology, overrides_apart: true }),
                (_, Some(row)) => Some(decode(row.value(), || load_overrides(&exceptions))?),
                (_, None) => None,
            };
            if let Some(Loaded { topology: stored, .. }) = &stored {
                if stored == topology {
                    return Ok(());
                }
                if stored.epoch() >= topology.epoch() {
                    return Err(Failure::Stale { stored: stored.epoch(), given: topology.epoch() });
                }
            }
            documents.insert(TOPOLOGY_KEY, document.as_slice())?;
            let mut changes: Vec<_> = match stored.filter(|stored| stored.overrides_apart) {
                Some(stored) => topology.overrides_since(&stored.topology),
                // The first version had no table, so write all entries whatever the table contains.
                None => {
                    exceptions.retain(|_, _| false)?;
                    topology.placement_overrides().map(|(key, node)| (Arc::clone(key), Some(node))).collect()
                }
            };
            // A key whose slot has changed is in both lists, so insert after removing.
            changes.sort_by_key(|(_, node)| node.is_some());
            for (key, node) in changes {
                match node {
                    Some(node) => exceptions.insert(&*key, node.0)?,
                    None => exceptions.remove(&*key)?,
                };
            }
            Ok(())
        })?;
        *saved = Some(topology.clone());
        Ok(())
    }

    fn next_incarnation(&self) -> Result<u64, StoreError> {
        self.write(|transaction| {
            let mut table = transaction.open_table(META)?;
            let last = table.get(INCARNATION_KEY)?.map_or(0, |row| row.value());
            let next = last + 1;
            table.insert(INCARNATION_KEY, next)?;
            Ok(next)
        })
    }

    fn load_primary(&self, node: &str) -> Result<Option<Record<SocketAddr>>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(DOCUMENTS)?;
            let Some(row) = table.get(primary_key(node).as_str())? else { return Ok(None) };
            let stored: PrimaryDocument = serde_json::from_slice(row.value())
                .map_err(|error| parse_failure(&format!("record of the primary of {node}"), &error))?;
            let PrimaryDocument { primary, config_epoch, replication_id } = stored;
            Ok(Some(Record { primary, config_epoch, replication_id }))
        })
    }

    fn save_primary(&self, node: &str, record: &Record<SocketAddr>) -> Result<(), StoreError> {
        let Record { primary, config_epoch, replication_id } = record.clone();
        let document = serde_json::to_vec(&PrimaryDocument { primary, config_epoch, replication_id })
            .expect("numbers and strings are always JSON");
        self.write(|transaction| {
            transaction.open_table(DOCUMENTS)?.insert(primary_key(node).as_str(), document.as_slice())?;
            Ok(())
        })
    }

    fn load_document(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        self.read(|transaction| {
            let table = transaction.open_table(DOCUMENTS)?;
            Ok(table.get(document_key(name).as_str())?.map(|row| row.value().to_vec()))
        })
    }

    fn save_document(&self, name: &str, document: &[u8]) -> Result<(), StoreError> {
        self.write(|transaction| {
            transaction.open_table(DOCUMENTS)?.insert(document_key(name).as_str(), document)?;
            Ok(())
        })
    }

    fn damaged_document(&self, name: &str, what: &str) -> StoreError {
        self.damaged(format!("its document \"{name}\" cannot be read: {what}"))
    }

    fn unfit_document(&self, name: &str, error: &serde_json::Error) -> StoreError {
        self.error(parse_failure(&format!("document \"{name}\""), error), "read")
    }

    fn newest_version(&self) -> Option<String> {
        let read = self.read(|transaction| {
            let table = transaction.open_table(DOCUMENTS)?;
            Ok(table.get(VERSION_KEY)?.map(|row| String::from_utf8_lossy(row.value()).into_owned()))
        });
        read.ok().flatten()
    }
}

/// Returns the error for a document that cannot be parsed. Checksums exclude damage, so valid JSON with more fields or
/// another form is from a newer version.
fn parse_failure(document: &str, error: &serde_json::Error) -> Failure {
    let said = error.to_string();
    let is_newer =
        error.is_data() && ["unknown ", "invalid type", "invalid length"].iter().any(|start| said.starts_with(start));
    let what = format!("its {document} cannot be read: {said}");
    if is_newer { Failure::Unknown(what) } else { Failure::Damaged(what) }
}

fn note_version(transaction: &redb::WriteTransaction) -> Result<(), Failure> {
    let numbers = |version: &[u8]| -> Vec<u64> {
        let text = String::from_utf8_lossy(version);
        text.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0)).collect()
    };
    let own = crate::VERSION.as_bytes();
    let mut table = transaction.open_table(DOCUMENTS)?;
    let is_newest = table.get(VERSION_KEY)?.is_none_or(|row| numbers(row.value()) < numbers(own));
    if is_newest {
        table.insert(VERSION_KEY, own)?;
    }
    Ok(())
}

fn document_key(name: &str) -> String {
    format!("document:{name}")
}

fn primary_key(node: &str) -> String {
    format!("primary:{node}")
}

fn open_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
}

/// Opens the file and verifies all of it.
///
/// By itself redb verifies its checksums only after a crash. This reads the whole file, once per start. Damage that redb
/// reads before its verification can cause a panic (an index outside of a range that the file declares). The panic is
/// caught, because the file is damaged then, too: nothing of the half-opened database is kept.
fn open_database(file: File) -> Result<Database, Failure> {
    let open = || {
        let same = file.try_clone().map_err(redb::Error::Io)?;
        let mut database = Builder::new().set_cache_size(CACHE_BYTES).create_file(file)?;
        match database.check_integrity()? {
            true => {
                // The file has holes that later writes fill. Allocating all of it ensures that the next start can be
                // recorded on a full disk. Without room for that, continue all the same.
                let length = same.metadata().map_err(redb::Error::Io)?.len();
                let _ = rustix::fs::fallocate(&same, rustix::fs::FallocateFlags::empty(), 0, length);
                Ok(database)
            }
            false => Err(Failure::Damaged("its checksums do not match its content".into())),
        }
    };
    catch_unwind(AssertUnwindSafe(open))
        .unwrap_or_else(|_| Err(Failure::Damaged("its structure makes no sense".into())))
}

/// Errors of a transaction, without the file.
enum Failure {
    Database(redb::Error),
    Damaged(String),
    /// Content that this version does not support.
    Unknown(String),
    Stale {
        stored: u64,
        given: u64,
    },
}

impl<E: Into<redb::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Database(error.into())
    }
}

impl Failure {
    fn at(self, action: &'static str, file: &Path) -> StoreError {
        let file = file.to_owned();
        match self {
            Self::Damaged(what) => StoreError::Damaged { file, what },
            Self::Unknown(what) => StoreError::Unknown { file, what, version: None },
            Self::Stale { stored, given } => StoreError::Stale { stored, given },
            // Errors of redb for a foreign file.
            Self::Database(redb::Error::Io(source))
                if matches!(source.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) =>
            {
                StoreError::Damaged { file, what: source.to_string() }
            }
            Self::Database(redb::Error::Io(why)) => StoreError::Access { action, file, why },
            Self::Database(
                error @ (redb::Error::Corrupted(_)
                | redb::Error::UpgradeRequired(_)
                | redb::Error::RepairAborted
                | redb::Error::TableTypeMismatch { .. }
                | redb::Error::TableIsMultimap(_)
                | redb::Error::TypeDefinitionChanged { .. }
                | redb::Error::TableDoesNotExist(_)),
            ) => StoreError::Damaged { file, what: error.to_string() },
            Self::Database(error) => StoreError::Access { action, file, why: io::Error::other(error.to_string()) },
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PrimaryDocument {
    primary: SocketAddr,
    config_epoch: u64,
    replication_id: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::Ipv4Addr;
    use std::os::unix::fs::PermissionsExt;

    use switchyard_policy::topology::{Continuum, Node, NodeId, OverlaidTopology, Rule, RuleSet, Scheme, Server};

    use super::*;

    #[test]
    fn the_primary_of_a_node_survives_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let record = |port, config_epoch| Record {
            primary: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            config_epoch,
            replication_id: Some("0123".to_owned()),
        };
        {
            let store = RedbStore::open(dir.path()).expect("opens");
            assert_eq!(store.load_primary("a").expect("reads"), None);
            store.save_primary("a", &record(1, 1)).expect("writes");
            store.save_primary("b", &record(2, 1)).expect("writes");
            store.save_primary("a", &record(3, 2)).expect("writes");
        }
        let store = RedbStore::open(dir.path()).expect("opens again");
        assert_eq!(store.load_primary("a").expect("reads"), Some(record(3, 2)));
        assert_eq!(store.load_primary("b").expect("reads"), Some(record(2, 1)));
        assert_eq!(store.load_topology().expect("reads"), None);
    }

    #[test]
    fn errors_contain_the_system_error_once() {
        let dir = temporary();
        std::fs::create_dir(dir.path().join(FILE_NAME)).expect("a directory in its place");
        let error = RedbStore::open(dir.path()).expect_err("no file can be there");
        let chain = std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
        let text: Vec<String> = chain.map(ToString::to_string).collect();
        assert_eq!(text.join(": ").matches("os error").count(), 1, "{text:?}");
    }

    fn topology(names: &[&str]) -> Topology {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        Topology::even(&names).expect("a topology")
    }

    #[test]
    fn a_continuum_survives_a_restart_and_a_damaged_one_is_refused() {
        let dir = temporary();
        let servers = |names: &[&str]| {
            names.iter().map(|name| Server { name: (*name).to_owned(), weight: 2 }).collect::<Vec<_>>()
        };
        let continuum = Continuum::new(Scheme { tag: Some(*b"{}"), ..Scheme::default() }, servers(&["a", "b"]))
            .expect("a continuum");
        let first = Topology::on_continuum(continuum.into());
        let three = ["a", "b", "c"].map(str::to_owned);
        let joined = Topology::place(Some(&first), &three).expect("one joins").topology;
        let OverlaidTopology { topology: over, goals, .. } =
            joined.with_overlay(servers(&["a", "b", "c"])).expect("an overlay");
        assert!(goals.iter().all(|(_, goal)| *goal == NodeId(2)) && !goals.is_empty());
        let key = std::sync::Arc::<[u8]>::from(&b"k{1}"[..]);
        let other = NodeId(1 - over.owner_of(&key).0);
        let over = over.keys_handed_over(&[], [&key], other);
        {
            // The overlay gives the key another slot, and its row stays.
            let store = RedbStore::open(dir.path()).expect("opens");
            store.save_topology(&joined.keys_handed_over(&[], [&key], other)).expect("saves");
            store.save_topology(&over).expect("saves");
        }
        let stored =
            RedbStore::open(dir.path()).expect("opens again").load_topology().expect("reads").expect("there is one");
        assert_eq!(stored, over);
        assert_eq!((stored.slot_of(b"{1}x"), stored.lives_at(&key)), (over.slot_of(b"k{1}"), other));
        tamper(dir.path(), |transaction| {
            let mut table = transaction.open_table(DOCUMENTS).expect("opens");
            let text = String::from_utf8(encode(&over)).expect("text").replace("\"homes\":[0,", "\"homes\":[9,");
            table.insert(TOPOLOGY_KEY, text.as_bytes()).expect("writes");
        });
        let error = RedbStore::open(dir.path()).expect("opens").load_topology().expect_err("damaged").to_string();
        assert!(error.contains("continuum") && error.contains("slots without a server"), "{error}");
    }

    #[test]
    fn rules_and_an_adoption_survive_a_restart_and_damaged_ones_are_refused() {
        let dir = temporary();
        let set =
            |keys: &str| RuleSet::new(vec![Rule { keys: vec![keys.to_owned()], tag: None }]).expect("valid rules");
        let first = topology(&["a", "b"]).with_adoption(set("bull:{queue}:*")).expect("it starts");
        let goals = first.adoption_moves();
        let there = goals.iter().fold(first, |topology, (slot, node)| topology.handed_over(&[*slot], *node));
        let ruled = there.with_adoption_ended().expect("it ends");
        let (slot, node) = goals[0];
        let adopting = ruled.with_adoption(set("rq:{queue}:*")).expect("it starts").handed_over(&[slot], node);
        for saved in [&ruled, &adopting] {
            let load = || RedbStore::open(dir.path()).expect("opens").load_topology().expect("reads");
            RedbStore::open(dir.path()).expect("opens").save_topology(saved).expect("saves");
            assert_eq!(load().as_ref(), Some(saved));
        }
        tamper(dir.path(), |transaction| {
            let mut table = transaction.open_table(DOCUMENTS).expect("opens");
            let text = String::from_utf8(encode(&ruled)).expect("text").replace("{queue}", "{queue");
            table.insert(TOPOLOGY_KEY, text.as_bytes()).expect("writes");
        });
        let load = || RedbStore::open(dir.path()).expect("opens").load_topology();
        let error = load().expect_err("damaged").to_string();
        assert!(error.contains("rule \"bull:{queue:*\"") && error.contains("closing brace"), "{error}");
        tamper(dir.path(), |transaction| {
            let mut table = transaction.open_table(DOCUMENTS).expect("opens");
            let text = String::from_utf8(encode(&adopting)).expect("text");
            let (head, rules) = text.split_once("\"rules\"").expect("rules");
            let cut = head.replace(&head[head.find("[16384").expect("a passage") - 1..head.len() - 2], "");
            table.insert(TOPOLOGY_KEY, format!("{cut}\"rules\"{rules}").as_bytes()).expect("writes");
        });
        let error = load().expect_err("passages without owners").to_string();
        assert!(error.contains("it has owners of 16384 slots"), "{error}");
    }

    fn next(stored: &Topology, names: &[&str]) -> Topology {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        Topology::place(Some(stored), &names).expect("a topology").topology
    }

    fn temporary() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    /// Writes content that this program would not write.
    fn tamper(directory: &Path, change: impl FnOnce(&redb::WriteTransaction)) {
        let database = Database::create(directory.join(FILE_NAME)).expect("opens");
        let transaction = database.begin_write().expect("begins");
        change(&transaction);
        transaction.commit().expect("commits");
    }

    #[test]
    fn stored_topologies_are_loaded_after_reopening() {
        let parent = temporary();
        let directory = parent.path().join("not/there/yet");
        let first = topology(&["a:1", "b:1", "c:1"]);
        {
            let store = RedbStore::open(&directory).expect("opens");
            assert_eq!(store.load_topology().expect("loads"), None);
            assert_eq!(store.next_incarnation().expect("counts"), 1);
            store.save_topology(&first).expect("saves");
            assert_eq!(store.load_topology().expect("loads").as_ref(), Some(&first));
        }
        let second = next(&first, &["a:1", "b:1", "c:1", "d:1"]);
        {
            let store = RedbStore::open(&directory).expect("opens again");
            assert_eq!(store.next_incarnation().expect("counts"), 2);
            assert_eq!(store.load_topology().expect("loads").as_ref(), Some(&first));
            store.save_topology(&second).expect("saves");
        }
        let store = RedbStore::open(&directory).expect("opens again");
        assert_eq!(store.next_incarnation().expect("counts"), 3);
        assert_eq!(store.load_topology().expect("loads"), Some(second));
    }

    #[test]
    fn placement_overrides_are_loaded_after_reopening() {
        let parent = temporary();
        let first = topology(&["a:1", "b:1", "c:1"]);
        let keys: Vec<std::sync::Arc<[u8]>> =
            [&b"plain"[..], b"", b"\x00\xff\"\r\n", "\u{fc}".as_bytes()].map(Into::into).to_vec();
        let away = |key: &[u8]| NodeId((first.owner_of(key).0 + 1) % 3);
        let with = keys.iter().fold(first.clone(), |topology, key| topology.keys_handed_over(&[], [key], away(key)));
        {
            let store = RedbStore::open(parent.path()).expect("opens");
            store.save_topology(&with).expect("saves");
        }
        let store = RedbStore::open(parent.path()).expect("opens again");
        let loaded = store.load_topology().expect("loads").expect("is there");
        assert_eq!(loaded, with);
        assert!(keys.iter().all(|key| loaded.lives_at(key) == away(key)));
        assert_eq!(loaded.placement_overrides().count(), keys.len());
        // A change of a topology that was read, and of one that was written.
        let one = loaded.keys_handed_over(&[], [&keys[0]], first.owner_of(&keys[0]));
        store.save_topology(&one).expect("saves");
        let two = one.keys_handed_over(&[], [&keys[1], &keys[0]], away(&keys[0]));
        store.save_topology(&two).expect("saves");
        assert_eq!(store.load_topology().expect("loads"), Some(two));
        drop(store);
        tamper(parent.path(), |transaction| drop(transaction.open_table(EXCEPTIONS).expect("opens").pop_first()));
        let error = RedbStore::open(parent.path()).expect("opens").load_topology().expect_err("damaged").to_string();
        assert!(error.contains("placement overrides"), "{error}");
    }

    #[test]
    fn early_versions_refuse_more_placement_overrides_than_they_support() {
        let first = topology(&["a:1", "b:1"]);
        let names: Vec<Arc<[u8]>> = [b'a', b'b'].map(|byte| vec![byte; 9 << 20].into()).to_vec();
        let away = |key: &[u8]| NodeId(1 - first.owner_of(key).0);
        let few = first.keys_handed_over(&[], [&names[0]], away(&names[0]));
        let many = few.keys_handed_over(&[], [&names[1]], away(&names[1]));
        let row = |topology: &Topology| String::from_utf8(encode(topology)).expect("JSON");
        assert!(!row(&few).contains("exceptions_many") && row(&many).contains("exceptions_many"));
        let directory = temporary();
        RedbStore::open(directory.path()).expect("opens").save_topology(&many).expect("saves");
        let loaded = RedbStore::open(directory.path()).expect("opens again").load_topology().expect("loads");
        assert_eq!(loaded, Some(many));
    }

    #[test]
    fn only_the_owner_can_read_it() {
        let parent = temporary();
        let directory = parent.path().join("state");
        let _store = RedbStore::open(&directory).expect("opens");
        let mode = |path: &Path| fs::metadata(path).expect("exists").permissions().mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&directory.join(FILE_NAME)), 0o600);
        assert_eq!(mode(&directory.join("LOCK")), 0o600);
    }

    #[test]
    fn an_older_topology_does_not_replace_a_newer_one() {
        let directory = temporary();
        let store = RedbStore::open(directory.path()).expect("opens");
        let first = topology(&["a:1"]);
        let second = next(&first, &["a:1", "b:1"]);
        let rival = next(&first, &["a:1", "c:1"]);
        store.save_topology(&first).expect("saves");
        store.save_topology(&second).expect("saves");
        store.save_topology(&second).expect("the same again is no conflict");
        for (stale, epoch) in [(&first, 1), (&rival, 2)] {
            let error = store.save_topology(stale).expect_err("stale");
            assert!(matches!(error, StoreError::Stale { stored: 2, given } if given == epoch), "{error}");
        }
        assert_eq!(store.load_topology().expect("loads"), Some(second));
    }

    #[test]
    fn a_fragmented_map_of_many_nodes_fits() {
        let directory = temporary();
        let store = RedbStore::open(directory.path()).expect("opens");
        let nodes = (0..1024)
            .map(|i| Node { id: NodeId(i), name: format!("node-{i}.a-rather-long-name-of-a-host.example.org:6379") });
        let ranges = (0..16384_u16).map(|slot| (NodeId(slot % 1024), slot..=slot));
        let topology = Topology::from_parts(9, nodes.collect(), ranges, 1024).expect("valid");
        store.save_topology(&topology).expect("saves");
        assert_eq!(store.load_topology().expect("loads"), Some(topology));
    }

    #[test]
    fn a_second_open_is_refused() {
        let directory = temporary();
        let store = RedbStore::open(directory.path()).expect("opens");
        let error = RedbStore::open(directory.path()).expect_err("in use");
        let text = error.to_string();
        assert!(matches!(error, StoreError::Locked { .. }), "{text}");
        assert!(text.contains(&directory.path().display().to_string()), "{text}");
        assert!(text.contains(&format!("the process {}", std::process::id())), "{text}");
        // Without a legible process id the lock is refused all the same.
        fs::write(directory.path().join("LOCK"), "?").expect("written");
        let text = RedbStore::open(directory.path()).expect_err("in use").to_string();
        assert!(text.contains("in use by another process"), "{text}");
        drop(store);
        RedbStore::open(directory.path()).expect("free again");
    }

    #[test]
    fn stored_topologies_survive_a_crash() {
        let (directory, copy) = (temporary(), temporary());
        let store = RedbStore::open(directory.path()).expect("opens");
        let saved = topology(&["a:1", "b:1"]);
        store.save_topology(&saved).expect("saves");
        // Copy of the file as after a crash: never closed.
        fs::copy(directory.path().join(FILE_NAME), copy.path().join(FILE_NAME)).expect("copied");
        let after = RedbStore::open(copy.path()).expect("opens");
        assert_eq!(after.load_topology().expect("loads"), Some(saved));
    }

    #[test]
    fn content_of_a_newer_version_is_refused_and_names_the_version() {
        let directory = temporary();
        let first = topology(&["a:1"]);
        RedbStore::open(directory.path()).expect("opens").save_topology(&first).expect("saves");
        tamper(directory.path(), |transaction| {
            let mut table = transaction.open_table(DOCUMENTS).expect("a table");
            let documents = [
                (TOPOLOGY_KEY, String::from_utf8_lossy(&encode(&first)).replacen('{', "{\"colours\":[],", 1)),
                (
                    "primary:a:1",
                    r#"{"primary":"127.0.0.1:1","config_epoch":1,"replication_id":null,"colours":[]}"#.to_owned(),
                ),
                ("document:x", r#"["no number"]"#.to_owned()),
                (VERSION_KEY, "99.10.1".to_owned()),
            ];
            for (name, document) in &documents {
                table.insert(*name, document.as_bytes()).expect("inserts");
            }
        });
        let store = RedbStore::open(directory.path()).expect("opens");
        // A write by this version must not make it the newest.
        store.next_incarnation().expect("counts");
        let errors = [
            store.load_topology().map(|_| ()),
            store.load_primary("a:1").map(|_| ()),
            crate::store::load_json::<Vec<u64>>(&store, "x").map(|_| ()),
            store.save_topology(&next(&first, &["a:1", "b:1"])),
        ];
        for error in errors {
            let error = error.expect_err("unknown");
            assert!(matches!(error, StoreError::Unknown { .. }), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("Switchyard 99.10.1 has written it; use that version") && text.contains(crate::VERSION),
                "{text}"
            );
            assert!(!text.contains("damaged"), "{text}");
        }
        assert_eq!(
            RedbStore::open(temporary().path()).expect("opens").newest_version().as_deref(),
            Some(crate::VERSION)
        );
    }

    #[test]
    fn a_newer_format_is_refused() {
        let directory = temporary();
        drop(RedbStore::open(directory.path()).expect("opens"));
        tamper(directory.path(), |transaction| {
            let mut meta = transaction.open_table(META).expect("a table");
            meta.insert(FORMAT_KEY, FORMAT + 1).expect("inserted");
        });
        let error = RedbStore::open(directory.path()).expect_err("newer");
        assert!(
            matches!(&error, StoreError::Newer { found: 2, known: 1, file } if file.ends_with(FILE_NAME)),
            "{error}"
        );
        assert!(error.to_string().contains("has format 2"), "{error}");
    }

    #[test]
    fn files_of_something_else_are_refused() {
        let damaged = |directory: &Path| {
            let error = RedbStore::open(directory).expect_err("refused");
            assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
            error.to_string()
        };

        let directory = temporary();
        fs::write(directory.path().join(FILE_NAME), "a note").expect("written");
        let text = damaged(directory.path());
        assert!(text.contains(FILE_NAME) && text.contains("is damaged"), "{text}");
        assert_eq!(fs::read(directory.path().join(FILE_NAME)).expect("read"), b"a note");

        let directory = temporary();
        fs::write(directory.path().join(FILE_NAME), vec![0_u8; 1 << 20]).expect("written");
        damaged(directory.path());

        let directory = temporary();
        tamper(directory.path(), |transaction| {
            transaction.open_table(TableDefinition::<u8, u8>::new("other")).expect("a table");
        });
        assert!(damaged(directory.path()).contains("none with its format"));

        let directory = temporary();
        tamper(directory.path(), |transaction| {
            transaction.open_table(TableDefinition::<u8, u8>::new("meta")).expect("a table");
        });
        assert!(damaged(directory.path()).contains("meta is of type"));
    }

    #[test]
    fn invalid_stored_maps_are_refused() {
        let good = r#"{"epoch":3,"next_id":1,"nodes":[{"id":0,"name":"a:1"}],"ranges":[[0,16383,0]]}"#;
        for (bad, says) in [
            ("", "EOF"),
            ("{}", "missing field"),
            (&good.replace("16383", "16382"), "slot 16383 has no owner"),
            (&good.replace("16383", "99999"), "invalid value"),
            (&good.replace("\"epoch\":3", "\"epoch\":0"), "epoch is 0"),
            (&good.replace("\"epoch\":3", "\"epoch\":3,\"x\":1"), "unknown field `x`"),
        ] {
            let directory = temporary();
            let write = |text: &str| {
                drop(RedbStore::open(directory.path()).expect("opens"));
                tamper(directory.path(), |transaction| {
                    let mut table = transaction.open_table(DOCUMENTS).expect("a table");
                    table.insert(TOPOLOGY_KEY, text.as_bytes()).expect("inserted");
                });
                RedbStore::open(directory.path()).expect("opens")
            };
            let store = write(bad);
            let error = store.load_topology().expect_err("refused");
            let is_newer = says.starts_with("unknown");
            assert!(
                matches!(&error, StoreError::Unknown { .. } if is_newer)
                    || matches!(&error, StoreError::Damaged { .. } if !is_newer),
                "{error:?}"
            );
            assert!(error.to_string().contains(says), "{error}");
            // The file must not be overwritten by accident either.
            store.save_topology(&topology(&["b:1"])).expect_err("refused");
            drop(store);
            let store = write(good);
            assert_eq!(store.load_topology().expect("loads").map(|t| t.epoch()), Some(3));
        }
    }

    #[test]
    fn damaged_files_give_an_error_or_the_original_content() {
        let directory = temporary();
        let saved = topology(&["a:1", "b:1"]);
        {
            let store = RedbStore::open(directory.path()).expect("opens");
            store.save_topology(&saved).expect("saves");
            store.next_incarnation().expect("counts");
        }
        let good = fs::read(directory.path().join(FILE_NAME)).expect("read");
        // Positions with content. The rest of the file is unreferenced zeros.
        let used: Vec<usize> = (0..good.len()).filter(|&i| good[i] != 0).collect();
        let mut refused = 0;
        let trials: Vec<usize> = used.iter().copied().step_by(used.len() / 60 + 1).collect();
        for &place in &trials {
            let mut bad = good.clone();
            bad[place] ^= 0x55;
            let directory = temporary();
            fs::write(directory.path().join(FILE_NAME), bad).expect("written");
            match RedbStore::open(directory.path()).and_then(|store| store.load_topology()) {
                Ok(loaded) => assert_eq!(loaded.as_ref(), Some(&saved), "byte {place}"),
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains(FILE_NAME), "byte {place}: {error}");
                }
            }
        }
        for length in [1, 100, 4096, good.len() / 2, good.len() - 1] {
            let directory = temporary();
            fs::write(directory.path().join(FILE_NAME), &good[..length]).expect("written");
            match RedbStore::open(directory.path()).and_then(|store| store.load_topology()) {
                Ok(loaded) => assert_eq!(loaded.as_ref(), Some(&saved), "{length} bytes"),
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains(FILE_NAME), "{length} bytes: {error}");
                }
            }
        }
        assert!(refused > 0, "none of {} damages was noticed", trials.len());
    }
}
