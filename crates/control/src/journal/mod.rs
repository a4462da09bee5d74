//! The journal of moves: `moves.journal` in the state directory, append-only.
//!
//! A file of its own rather than a part of the store: a move writes thousands of records per second, each of which must
//! be durable before its key can proceed, and all of them are useless once the move has ended. A single thread writes.
//! Entries that arrive while it waits for the disk form the next group, so that many records share one `fdatasync`.
//!
//! Failed writes are retried in order until they succeed, so waiting moves continue by themselves when the disk has
//! room or works again. After a disk error the file itself is in doubt, because a second `fdatasync` may succeed
//! without the data that the first one lost. Then a new file with all live entries replaces it.
//!
//! The journal treats entries as bytes. [`crate::ledger`] defines their content, and [`Queue`] their order.

mod frames;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use frames::{FORMAT, FormatError};
use switchyard_policy::migration::record::{Kind, Queue, RecordGroup};
use switchyard_policy::topology::MoveId;

const FILE_NAME: &str = "moves.journal";
const NEXT_NAME: &str = "moves.journal.new";

/// Space reserved after the last entry while moves are open, in bytes, so that they can be ended on a full disk.
pub const RESERVE: u64 = 4 << 20;

/// Size after which a group accepts no more entries, in bytes.
const GROUP_BYTES: usize = 1 << 20;

/// Retry interval of failed writes.
const RETRY: Duration = Duration::from_millis(200);

/// Called when entries are durable, or with the reason why they are not. Runs on the journal's thread, so it must be
/// quick.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Errors of opening the journal.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be opened, read or written.
    #[error("cannot {action} {}: {why}", file.display())]
    Access {
        /// Attempted action.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// Error of the operating system.
        why: io::Error,
    },
    /// The file is not as this program wrote it.
    #[error(
        "{} is damaged: {what}. It records which keys have moved, so nothing is guessed: replace the whole state directory by a copy from a \
         backup, or see `switchyard recover --help`",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Description of the damage.
        what: String,
    },
    /// The store knows a journal, but the file is missing.
    #[error(
        "{} is missing. It records which keys have moved: restore the whole state directory from a backup, or see `switchyard recover --help`",
        file.display()
    )]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// Written by a later version of this program.
    #[error("{} has format {found}, but this version of Switchyard knows formats up to {FORMAT}; use the version that wrote it, or a later one", file.display())]
    Newer {
        /// The file.
        file: PathBuf,
        /// Format of the file.
        found: u32,
    },
}

/// Statistics since the start.
#[derive(Debug, Default)]
struct Written {
    bytes: AtomicU64,
    entries: AtomicU64,
    syncs: AtomicU64,
    length: AtomicU64,
    write_error: Mutex<Option<String>>,
    /// The router is stopping: failed writes are no longer retried.
    stopping: AtomicBool,
}

/// Statistics since the start, and the present state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JournalStatus {
    /// Bytes written.
    pub bytes: u64,
    /// Durable entries.
    pub entries: u64,
    /// Number of waits for the disk.
    pub syncs: u64,
    /// Present file length in bytes.
    pub length: u64,
    /// Error that prevents writes now.
    pub write_error: Option<String>,
}

/// Returns compacted entries, given the length of the file in bytes, or `None` to keep the file.
pub type CompactedPrefix = Box<dyn FnOnce(u64) -> Option<Content> + Send>;

/// Returns the compacted journal: every durable entry that is still live. Called on the journal's thread, after the
/// `done` callbacks of all durable entries.
pub type SnapshotSource = Box<dyn FnMut() -> Content + Send>;

/// Content of a new file.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Content {
    /// Entries of the file.
    pub entries: Vec<Vec<u8>>,
    /// Whether moves are open, so that space for ending them is reserved.
    pub is_open: bool,
}

enum JournalRequest {
    Append(Member),
    Replace(CompactedPrefix, Done),
}

/// Entries that were given together, and their callback.
type Member = RecordGroup<(Vec<Vec<u8>>, Done)>;

/// An open journal. Dropping it writes the pending entries and ends its thread.
#[derive(Debug)]
pub struct Journal {
    requests: Option<mpsc::Sender<JournalRequest>>,
    written: Arc<Written>,
    thread: Option<JoinHandle<()>>,
}

/// An opened journal with its entries.
#[derive(Debug)]
pub struct Opened {
    /// The open journal.
    pub journal: Journal,
    /// Entries in the file.
    pub entries: Vec<Vec<u8>>,
    /// Size of a torn last group, in bytes, which was removed. Its durability was never confirmed.
    pub torn: u64,
}

/// Whether writes wait for the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sync {
    /// Always.
    #[default]
    Always,
    /// Never, for measurements. A power cut then loses keys.
    Never,
}

impl Journal {
    /// Opens the journal in `directory`, which the caller has locked. `known`: a journal with this identity existed
    /// before. `snapshot` returns the live entries if the file must be rewritten.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or is missing although it existed.
    pub fn open(
        directory: &Path,
        identity: u128,
        known: bool,
        sync: Sync,
        snapshot: SnapshotSource,
    ) -> Result<Opened, JournalError> {
        let path = directory.join(FILE_NAME);
        let access = |action, why| JournalError::Access { action, file: path.clone(), why };
        // An unfinished replacement: the old file is still valid.
        match std::fs::remove_file(directory.join(NEXT_NAME)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(access("remove the unfinished replacement of", error));
            }
            _ => {}
        }
        let mut bytes = Vec::new();
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let mut file = match file {
            Ok(mut file) => {
                file.read_to_end(&mut bytes).map_err(|e| access("read", e))?;
                file
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && !known => {
                create(&path, identity, &[]).map_err(|e| access("make", e))?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(JournalError::Missing { file: path }),
            Err(error) => return Err(access("open", error)),
        };
        let damaged = |what: String| JournalError::Damaged { file: path.clone(), what };
        // The store does not know this file: an earlier start was interrupted.
        if !known && bytes.len() <= frames::HEADER {
            file = create(&path, identity, &[]).map_err(|e| access("make", e))?;
            bytes = frames::header(identity);
        }
        let scanned = frames::scan(&bytes, identity).map_err(|unfit| match unfit {
            FormatError::Damaged(what) => damaged(what),
            FormatError::Foreign => damaged("it belongs to another state directory".into()),
            FormatError::Newer(found) => JournalError::Newer { file: path.clone(), found },
        })?;
        let torn = (bytes.len() - scanned.valid) as u64;
        if torn > 0 {
            file.set_len(scanned.valid as u64)
                .and_then(|()| file.sync_data())
                .map_err(|e| access("cut the torn end of", e))?;
        }
        sync_directory(directory).map_err(|e| access("make", e))?;
        let written = Arc::<Written>::default();
        written.length.store(scanned.valid as u64, Ordering::Relaxed);
        let (asks, asked) = mpsc::channel();
        let writer = Writer {
            directory: directory.to_owned(),
            file,
            identity,
            sync,
            next: scanned.next,
            end: scanned.valid as u64,
            starved: false,
            in_doubt: false,
            whole: snapshot,
            written: Arc::clone(&written),
        };
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run(&asked))
            .map_err(|e| access("start the thread of", e))?;
        Ok(Opened {
            journal: Self { requests: Some(asks), written, thread: Some(thread) },
            entries: scanned.entries,
            torn,
        })
    }

    /// Makes entries durable, after all earlier ones of the same move and together with other pending ones; then calls
    /// `done`.
    pub fn append(&self, of: MoveId, entries: Vec<Vec<u8>>, kind: Kind, done: Done) {
        let given = RecordGroup { of, kind, records: (entries, done) };
        if let Some(Err(mpsc::SendError(JournalRequest::Append(given)))) =
            self.requests.as_ref().map(|asks| asks.send(JournalRequest::Append(given)))
        {
            (given.records.1)(Err("the journal's thread has ended".to_owned()));
        }
    }

    /// Atomically replaces all entries so far with the entries that `shorter` returns. Calls `shorter` on the journal's
    /// thread, after all earlier entries are written and their `done` has been called. Calls `done` when the new file is
    /// durable, or not needed. On failure the journal continues with the longer file.
    pub fn replace(&self, shorter: CompactedPrefix, done: Done) {
        if let Some(Err(mpsc::SendError(JournalRequest::Replace(_, done)))) =
            self.requests.as_ref().map(|asks| asks.send(JournalRequest::Replace(shorter, done)))
        {
            done(Err("the journal's thread has ended".to_owned()));
        }
    }

    /// Statistics and present state.
    #[must_use]
    pub fn status(&self) -> JournalStatus {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Written { bytes, entries, syncs, length, write_error, .. } = &*self.written;
        let write_error = write_error.lock().unwrap_or_else(PoisonError::into_inner).clone();
        JournalStatus { bytes: get(bytes), entries: get(entries), syncs: get(syncs), length: get(length), write_error }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        drop(self.requests.take());
        self.written.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A panic has already been reported.
            let _ = thread.join();
        }
    }
}

/// Creates a durable journal with these entries. The caller syncs the directory.
fn create(path: &Path, identity: u128, entries: &[Vec<u8>]) -> io::Result<File> {
    let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
    let mut bytes = frames::header(identity);
    if !entries.is_empty() {
        frames::frame(identity, 0, entries.iter().map(Vec::as_slice), &mut bytes);
    }
    file.write_all(&bytes)?;
    file.sync_all()?;
    Ok(file)
}

fn sync_directory(directory: &Path) -> io::Result<()> {
    File::open(directory)?.sync_all()
}

/// State of the writing thread.
struct Writer {
    directory: PathBuf,
    file: File,
    identity: u128,
    sync: Sync,
    next: u64,
    /// End of the last group, in bytes.
    end: u64,
    /// Whether entries wait for disk space.
    starved: bool,
    /// The disk has failed, so nothing in the file is certain, and it must be rewritten before the next write.
    in_doubt: bool,
    whole: SnapshotSource,
    written: Arc<Written>,
}

impl Writer {
    fn run(mut self, asked: &mpsc::Receiver<JournalRequest>) {
        let mut queue = Queue::default();
        loop {
            let first = match queue.has_waiting() {
                false => asked.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                true => asked.recv_timeout(RETRY),
            };
            let mut next = match first {
                Ok(ask) => Some(ask),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            };
            let mut bytes = 0;
            let mut shorter = None;
            while let Some(ask) = next.take() {
                match ask {
                    JournalRequest::Append(given) => {
                        bytes += given.records.0.iter().map(Vec::len).sum::<usize>();
                        for given_up in queue.push(given) {
                            (given_up.records.1)(Err(
                                "its leg was given up before the journal of moves had room for it".to_owned(),
                            ));
                        }
                    }
                    JournalRequest::Replace(wanted, done) => {
                        shorter = Some((wanted, done));
                        break;
                    }
                }
                if bytes < GROUP_BYTES {
                    next = asked.try_recv().ok();
                }
            }
            self.write_permitted(&mut queue);
            if let Some((shorter, done)) = shorter {
                let outcome = shorter(self.end).map_or(Ok(()), |content| self.replace(&content));
                done(outcome.map_err(|error| error.to_string()));
            }
        }
        for given in queue.into_rest() {
            (given.records.1)(Err("the router stopped before the journal of moves had room for it".to_owned()));
        }
    }

    /// Writes the entries that the queue permits, and refuses entries without room.
    fn write_permitted(&mut self, queue: &mut Queue<(Vec<Vec<u8>>, Done)>) {
        let room = queue.select_next(|given| self.reserve(given));
        self.starved = room.starved.is_some();
        if let Some(error) = room.starved
            && self.set_write_error(Some(format!(
                "the journal of moves has no room for another leg: {error}; moves wait until there is room"
            )))
        {
            tracing::error!(
                "the journal of moves has no room for another leg: {error}. Moves wait until there is room in {}",
                self.directory.display()
            );
        }
        if let Some((refused, error)) = room.refused {
            for given in refused {
                (given.records.1)(Err(format!(
                    "the journal of moves cannot reserve the room that a move needs: {error}; make room for the state directory"
                )));
            }
        }
        if !queue.writing().is_empty() {
            let outcome = self.write_all(queue.writing());
            for given in queue.written() {
                (given.records.1)(outcome.clone());
            }
        }
    }

    /// Reserves space for the group, and for ending its moves.
    fn reserve(&mut self, group: &[Member]) -> io::Result<()> {
        if self.in_doubt {
            self.rewrite()?;
        }
        let bytes: usize = group.iter().flat_map(|given| &given.records.0).map(|entry| entry.len() + 4).sum();
        reserve(&self.file, self.end, bytes as u64 + RESERVE)
    }

    /// Writes a group and waits for the disk, with retries until it is durable. Fails only if the router stops in the
    /// meantime.
    fn write_all(&mut self, group: &[Member]) -> Result<(), String> {
        while let Err(error) = self.try_write(group) {
            let text = format!("the journal of moves cannot be written: {error}; moves wait until it can be");
            if self.set_write_error(Some(text)) {
                let directory = self.directory.display();
                tracing::error!(
                    "the journal of moves cannot be written: {error}. Moves wait until {directory} can be written again"
                );
            }
            if self.written.stopping.load(Ordering::Relaxed) {
                return Err(format!("the journal of moves could not be written until the router stopped: {error}"));
            }
            std::thread::sleep(RETRY);
        }
        if !self.starved && self.set_write_error(None) {
            tracing::info!("the journal of moves can be written again");
        }
        Ok(())
    }

    fn try_write(&mut self, group: &[Member]) -> io::Result<()> {
        if self.in_doubt {
            self.rewrite()?;
        }
        let mut frame = Vec::new();
        let entries = group.iter().flat_map(|given| given.records.0.iter().map(Vec::as_slice));
        frames::frame(self.identity, self.next, entries, &mut frame);
        if let Err(error) = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&frame)) {
            let is_full = matches!(
                error.kind(),
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge
            );
            // A part of the frame must not be mistaken for a torn group once another group follows.
            self.in_doubt = self.file.set_len(self.end).is_err() || !is_full;
            return Err(error);
        }
        if self.sync == Sync::Always {
            self.written.syncs.fetch_add(1, Ordering::Relaxed);
            // The kernel may have dropped the unwritten pages, so a second attempt would succeed without them.
            self.file.sync_data().inspect_err(|_| self.in_doubt = true)?;
        }
        self.next += 1;
        self.end += frame.len() as u64;
        self.written.bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
        self.written.length.store(self.end, Ordering::Relaxed);
        let entries = group.iter().map(|given| given.records.0.len() as u64).sum();
        self.written.entries.fetch_add(entries, Ordering::Relaxed);
        Ok(())
    }

    /// Replaces a file that the disk has failed with a new one of all live entries.
    fn rewrite(&mut self) -> io::Result<()> {
        let content = (self.whole)();
        self.replace(&content)?;
        tracing::warn!("a disk error hit the journal of moves, which was rewritten to another file");
        Ok(())
    }

    /// Returns whether this changes anything.
    fn set_write_error(&self, error: Option<String>) -> bool {
        let mut now = self.written.write_error.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = now.is_some() != error.is_some();
        *now = error;
        changed
    }

    /// Replaces the file with a new, durable one of these entries.
    fn replace(&mut self, content: &Content) -> io::Result<()> {
        let next = self.directory.join(NEXT_NAME);
        let made = create(&next, self.identity, &content.entries).and_then(|file| {
            let end = file.metadata()?.len();
            if content.is_open {
                reserve(&file, end, RESERVE)?;
            }
            std::fs::rename(&next, self.directory.join(FILE_NAME))?;
            Ok((file, end))
        });
        let (file, end) = made.inspect_err(|_| {
            // The file would occupy the missing space. If this fails, the next attempt or start removes it.
            let _ = std::fs::remove_file(&next);
        })?;
        // The old file has no name any more, so durability now depends on the new file and its directory entry.
        self.file = file;
        self.end = end;
        self.next = u64::from(!content.entries.is_empty());
        self.written.length.store(end, Ordering::Relaxed);
        let synced = sync_directory(&self.directory);
        self.in_doubt = synced.is_err();
        synced
    }
}

/// Reserves space after `end`. Ignores file systems that cannot reserve space.
fn reserve(file: &File, end: u64, bytes: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    match fallocate(file, FallocateFlags::KEEP_SIZE, end, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn try_open(directory: &Path, identity: u128, known: bool) -> Result<Opened, JournalError> {
        Journal::open(directory, identity, known, Sync::Always, Box::new(Content::default))
    }

    fn open(directory: &Path, known: bool) -> Opened {
        try_open(directory, 7, known).expect("opens")
    }

    fn append(journal: &Journal, entries: &[&[u8]], kind: Kind) -> Result<(), String> {
        let (told, outcome) = channel();
        let tell = move |result| told.send(result).expect("waited for");
        journal.append(MoveId(1), entries.iter().map(|e| e.to_vec()).collect(), kind, Box::new(tell));
        outcome.recv().expect("an outcome")
    }

    /// Returns the entries that a restart would find now, while the journal is open.
    fn open_copy(directory: &Path) -> Vec<Vec<u8>> {
        let copy = tempfile::tempdir().expect("a temporary directory");
        std::fs::copy(directory.join(FILE_NAME), copy.path().join(FILE_NAME)).expect("copied");
        open(copy.path(), true).entries
    }

    #[test]
    fn acknowledged_entries_survive_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        assert!(opened.entries.is_empty());
        append(&opened.journal, &[b"one", b""], Kind::StartsMove).expect("written");
        append(&opened.journal, &[b"two"], Kind::Required).expect("written");
        let status = opened.journal.status();
        assert_eq!((status.entries, status.syncs, status.write_error), (3, 2, None));
        drop(opened);
        let again = open(dir.path(), true);
        assert_eq!(again.entries, [&b"one"[..], b"", b"two"]);
        let (told, outcome) = channel();
        again.journal.replace(
            Box::new(|_| Some(Content { entries: vec![b"kept".to_vec()], is_open: true })),
            Box::new(move |result| told.send(result).expect("waited for")),
        );
        outcome.recv().expect("an outcome").expect("replaced");
        assert_eq!(open_copy(dir.path()), [b"kept"], "the new file is complete when `done` is called");
        append(&again.journal, &[b"three"], Kind::Required).expect("written");
        drop(again);
        assert_eq!(open(dir.path(), true).entries, [&b"kept"[..], b"three"]);
    }

    #[test]
    fn concurrent_appends_share_one_sync() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        let (told, outcomes) = channel();
        for i in 0..1000_u32 {
            let told = told.clone();
            let tell = move |result: Result<(), String>| told.send((i, result)).expect("waited for");
            opened.journal.append(MoveId(1), vec![i.to_le_bytes().to_vec()], Kind::Required, Box::new(tell));
        }
        let order: Vec<u32> =
            outcomes.iter().take(1000).map(|(i, result)| result.map(|()| i).expect("written")).collect();
        assert!(order.is_sorted());
        let status = opened.journal.status();
        assert!(status.syncs < 1000, "{} times for 1000 entries", status.syncs);
    }

    #[test]
    fn a_torn_end_is_cut_off_and_a_damaged_middle_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        for entry in [&b"first"[..], b"second", b"third"] {
            append(&opened.journal, &[entry], Kind::Required).expect("written");
        }
        drop(opened);
        let path = dir.path().join(FILE_NAME);
        let bytes = std::fs::read(&path).expect("read");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
        let torn = open(dir.path(), true);
        assert_eq!(torn.entries, [&b"first"[..], b"second"]);
        assert!(torn.torn > 0);
        append(&torn.journal, &[b"again"], Kind::Required).expect("written");
        drop(torn);
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[frames::HEADER + 30] ^= 1;
        std::fs::write(&path, &bytes).expect("written");
        let error = try_open(dir.path(), 7, true).expect_err("damaged").to_string();
        assert!(error.contains("moves.journal is damaged") && error.contains("backup"), "{error}");
    }

    #[test]
    fn a_missing_or_foreign_journal_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let error = try_open(dir.path(), 7, true).expect_err("missing").to_string();
        assert!(error.contains("is missing"), "{error}");
        drop(open(dir.path(), false));
        // The start was interrupted before the store knew the journal, so another identity may take over the empty
        // file.
        let other = try_open(dir.path(), 8, false).expect("takes it over");
        append(&other.journal, &[b"x"], Kind::Required).expect("written");
        drop(other);
        let error = try_open(dir.path(), 7, true).expect_err("another's").to_string();
        assert!(error.contains("another state directory"), "{error}");
    }

    /// Returns a writer on this device, with the entries that are already durable.
    fn writer(device: &str, directory: &Path, kept: &[&[u8]]) -> Writer {
        let content = Content { entries: kept.iter().map(|e| e.to_vec()).collect(), is_open: true };
        Writer {
            directory: directory.to_owned(),
            file: OpenOptions::new().read(true).write(true).open(device).expect("the device"),
            identity: 7,
            sync: Sync::Always,
            next: 40,
            end: 4000,
            starved: false,
            in_doubt: false,
            whole: Box::new(move || content.clone()),
            written: Arc::default(),
        }
    }

    fn member(entry: &[u8], kind: Kind) -> (Member, mpsc::Receiver<Result<(), String>>) {
        let (told, outcome) = channel();
        let tell = move |result: Result<(), String>| told.send(result).expect("waited for");
        (RecordGroup { of: MoveId(1), kind, records: (vec![entry.to_vec()], Box::new(tell)) }, outcome)
    }

    fn write_error(written: &Written) -> Option<String> {
        written.write_error.lock().expect("not poisoned").clone()
    }

    #[test]
    fn a_full_disk_refuses_new_moves_and_delays_other_records() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        // Every write to this device fails with a full disk, and it cannot reserve space.
        let mut writer = writer("/dev/full", dir.path(), &[]);
        let mut queue = Queue::default();
        let (first, outcome) = member(b"x", Kind::StartsMove);
        queue.push(first);
        writer.write_permitted(&mut queue);
        let refused = outcome.recv().expect("an outcome").expect_err("refused");
        assert!(refused.contains("room"), "{refused}");
        let (second, outcome) = member(b"x", Kind::StartsLeg);
        queue.push(second);
        writer.write_permitted(&mut queue);
        assert!(queue.has_waiting() && outcome.try_recv().is_err(), "it waits");
        assert!(write_error(&writer.written).is_some_and(|t| t.contains("another leg")));
    }

    #[test]
    fn failed_writes_are_retried_in_order() {
        // One device fails writes and cannot be truncated; the other accepts writes but cannot be synced.
        for device in ["/dev/full", "/dev/null"] {
            let dir = tempfile::tempdir().expect("a temporary directory");
            let state = dir.path().join("state");
            let writer = writer(device, &state, &[b"before", b"earlier"]);
            let written = Arc::clone(&writer.written);
            let (asks, asked) = channel();
            let thread = std::thread::spawn(move || writer.run(&asked));
            let mut outcomes = Vec::new();
            for entry in [b"one", b"two"] {
                let (given, outcome) = member(entry, Kind::Required);
                asks.send(JournalRequest::Append(given)).expect("it runs");
                outcomes.push(outcome);
                while write_error(&written).is_none() {
                    std::thread::yield_now();
                }
            }
            assert!(write_error(&written).is_some_and(|t| t.contains("moves wait until it can be")), "{device}");
            assert!(outcomes.iter().all(|outcome| outcome.try_recv().is_err()), "{device}: nothing is promised yet");
            // Lets the replacement file be created.
            std::fs::create_dir(&state).expect("made");
            for outcome in &outcomes {
                outcome.recv().expect("an outcome").expect("written");
            }
            assert_eq!(write_error(&written), None);
            drop(asks);
            thread.join().expect("it has ended");
            assert_eq!(open(&state, true).entries, [&b"before"[..], b"earlier", b"one", b"two"], "{device}");
        }
    }

    #[test]
    fn pending_writes_fail_when_the_router_stops() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut writer = writer("/dev/full", &dir.path().join("nowhere"), &[]);
        writer.written.stopping.store(true, Ordering::Relaxed);
        let (member, outcome) = member(b"x", Kind::Required);
        let mut queue = Queue::default();
        queue.push(member);
        writer.write_permitted(&mut queue);
        let why = outcome.recv().expect("an outcome").expect_err("not written");
        assert!(why.contains("until the router stopped"), "{why}");
    }
}
