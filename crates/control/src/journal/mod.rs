//! The journal of the moves: `moves.journal` in the state directory, append-only.
//!
//! Beside the store and not in it: a move writes thousands of records per second, each of which must be durable before a key goes on, and
//! nothing of them is wanted once the move is over. One thread writes; whoever comes while it waits for the disk goes with the next group, so
//! that many records share one `fdatasync`.
//!
//! The journal knows entries as bytes. What they say is the matter of [`crate::ledger`].

mod frames;

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use frames::{FORMAT, Unfit};

const FILE_NAME: &str = "moves.journal";
const NEXT_NAME: &str = "moves.journal.new";

/// Space that is kept free behind the last entry while something is under way: what was begun can be ended on a full disk.
const RESERVE: u64 = 4 << 20;

/// A group takes no more once it has so many bytes.
const GROUP_BYTES: usize = 1 << 20;

/// How long it waits before it tries a full disk again.
const RETRY: Duration = Duration::from_millis(200);

/// Called when entries are durable, or with the reason why they are not; from the thread of the journal, so it must not take long.
pub type Done = Box<dyn FnOnce(Result<(), String>) + Send>;

/// What can go wrong with opening it.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// It cannot be opened, read or written.
    #[error("cannot {action} {}: {source}", file.display())]
    Access {
        /// What was tried.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is not what this program wrote.
    #[error(
        "{} is damaged: {what}. It says which keys have moved, so nothing is guessed: put a copy of the whole state directory from a backup in its \
         place, or see `switchyard recover --help`",
        file.display()
    )]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The store knows of a journal, and there is none.
    #[error(
        "{} is missing. It says which keys have moved: put the whole state directory from a backup in its place, or see `switchyard recover --help`",
        file.display()
    )]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// Written by a later version.
    #[error("{} has format {found}, but this version of Switchyard knows formats up to {FORMAT}; use the version that wrote it, or a later one", file.display())]
    Newer {
        /// The file.
        file: PathBuf,
        /// Its format.
        found: u32,
    },
}

/// How much was written since the start.
#[derive(Debug, Default)]
struct Written {
    bytes: AtomicU64,
    entries: AtomicU64,
    syncs: AtomicU64,
    length: AtomicU64,
    trouble: Mutex<Option<String>>,
    /// Nobody waits for a full disk any more.
    stopping: AtomicBool,
}

/// What the journal has done since the start, and how it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct JournalStatus {
    /// Bytes written.
    pub bytes: u64,
    /// Entries made durable.
    pub entries: u64,
    /// Times that the disk was waited for.
    pub syncs: u64,
    /// Length of the file now, bytes.
    pub length: u64,
    /// What keeps it from writing now, if something does.
    pub trouble: Option<String>,
}

/// How an entry is to be written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It begins something: it is refused where there would not be room to end it.
    Begins,
    /// It begins something that was accepted: it waits until there is room to end it, and holds up nothing else.
    Waits,
    /// It must be written, if it takes until the disk has room again.
    Goes,
}

/// Entries that say as much as those so far, given the length of the file; `None`: it is to stay as it is.
pub type Shorter = Box<dyn FnOnce(u64) -> Option<Vec<Vec<u8>>> + Send>;

enum Ask {
    Append { entries: Vec<Vec<u8>>, kind: Kind, done: Done },
    Replace(Shorter),
}

/// What is to be written together.
type Group = Vec<Member>;

/// What was given together, and who is told.
type Member = (Vec<Vec<u8>>, Kind, Done);

/// The journal, open. Dropping it ends its thread when what was given is written.
#[derive(Debug)]
pub struct Journal {
    asks: Option<mpsc::Sender<Ask>>,
    written: Arc<Written>,
    thread: Option<JoinHandle<()>>,
}

/// A journal that was opened, with what it says.
#[derive(Debug)]
pub struct Opened {
    /// The journal.
    pub journal: Journal,
    /// Its entries.
    pub entries: Vec<Vec<u8>>,
    /// Bytes of a torn last group, which were cut off: whoever wrote them was not told that they are safe.
    pub torn: u64,
}

/// Whether the disk is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Sync {
    /// Always.
    #[default]
    Always,
    /// Never: for measuring what it costs. A power cut then loses keys.
    Never,
}

impl Journal {
    /// Opens the journal in `directory`, which the caller has locked. `known`: there was one before, which has this identity.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or is missing although it was there.
    pub fn open(directory: &Path, identity: u128, known: bool, sync: Sync) -> Result<Opened, JournalError> {
        let path = directory.join(FILE_NAME);
        let access = |action, source| JournalError::Access { action, file: path.clone(), source };
        // An unfinished replacement: the old file still counts.
        match std::fs::remove_file(directory.join(NEXT_NAME)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(access("clear the way for", error)),
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
        // One that was made and never known to the store: a start that was cut short.
        if !known && bytes.len() <= frames::HEADER {
            file = create(&path, identity, &[]).map_err(|e| access("make", e))?;
            bytes = frames::header(identity);
        }
        let scanned = frames::scan(&bytes, identity).map_err(|unfit| match unfit {
            Unfit::Damaged(what) => damaged(what),
            Unfit::Foreign => damaged("it belongs to another state directory".into()),
            Unfit::Newer(found) => JournalError::Newer { file: path.clone(), found },
        })?;
        let torn = (bytes.len() - scanned.valid) as u64;
        if torn > 0 {
            file.set_len(scanned.valid as u64).and_then(|()| file.sync_data()).map_err(|e| access("cut the torn end of", e))?;
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
            broken: None,
            written: Arc::clone(&written),
        };
        let thread = std::thread::Builder::new()
            .name("journal".to_owned())
            .spawn(move || writer.run(&asked))
            .map_err(|e| access("start the thread of", e))?;
        Ok(Opened { journal: Self { asks: Some(asks), written, thread: Some(thread) }, entries: scanned.entries, torn })
    }

    /// Makes entries durable, after all that were given before, and together with others that wait; then calls `done`.
    pub fn append(&self, entries: Vec<Vec<u8>>, kind: Kind, done: Done) {
        if let Some(Err(mpsc::SendError(Ask::Append { done, .. }))) =
            self.asks.as_ref().map(|asks| asks.send(Ask::Append { entries, kind, done }))
        {
            done(Err("the journal's thread has ended".to_owned()));
        }
    }

    /// Replaces all entries so far by those that `shorter` gives, at once or not at all. It is called on the thread of the journal, when all that was
    /// appended before is written and its `done` was called. Where it fails, the journal goes on as it is, longer than it need be.
    pub fn replace(&self, shorter: Shorter) {
        if let Some(asks) = &self.asks {
            // If the thread has ended, every append says so.
            let _ = asks.send(Ask::Replace(shorter));
        }
    }

    /// What it has done, and how it is.
    #[must_use]
    pub fn status(&self) -> JournalStatus {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Written { bytes, entries, syncs, length, trouble, .. } = &*self.written;
        let trouble = trouble.lock().unwrap_or_else(PoisonError::into_inner).clone();
        JournalStatus { bytes: get(bytes), entries: get(entries), syncs: get(syncs), length: get(length), trouble }
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        drop(self.asks.take());
        self.written.stopping.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // If it panicked, it has said so.
            let _ = thread.join();
        }
    }
}

/// Makes a journal with these entries, and makes it durable but for its name.
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

/// The thread that writes.
struct Writer {
    directory: PathBuf,
    file: File,
    identity: u128,
    sync: Sync,
    next: u64,
    /// Where the last group ends.
    end: u64,
    /// Something waits for room.
    starved: bool,
    /// A failure after which nothing more can be promised.
    broken: Option<String>,
    written: Arc<Written>,
}

impl Writer {
    fn run(mut self, asked: &mpsc::Receiver<Ask>) {
        let mut waiting: Group = Vec::new();
        loop {
            let first = match waiting.is_empty() {
                true => asked.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
                false => asked.recv_timeout(RETRY),
            };
            let mut next = match first {
                Ok(ask) => Some(ask),
                Err(mpsc::RecvTimeoutError::Timeout) => None,
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            };
            let mut group = Vec::new();
            let mut bytes = 0;
            let mut shorter = None;
            while let Some(ask) = next.take() {
                match ask {
                    Ask::Append { entries, kind: Kind::Waits, done } => waiting.push((entries, Kind::Waits, done)),
                    Ask::Append { entries, kind, done } => {
                        bytes += entries.iter().map(Vec::len).sum::<usize>();
                        group.push((entries, kind, done));
                    }
                    Ask::Replace(wanted) => {
                        shorter = Some(wanted);
                        break;
                    }
                }
                if bytes < GROUP_BYTES {
                    next = asked.try_recv().ok();
                }
            }
            if !waiting.is_empty() {
                self.let_in(&mut waiting, &mut group);
            }
            if !group.is_empty() {
                self.write_group(group);
            }
            if let Some(shorter) = shorter.and_then(|shorter| shorter(self.end))
                && let Err(error) = self.replace(&shorter)
            {
                tracing::warn!("the journal of moves cannot be made shorter now: {error}");
            }
        }
        for (_, _, done) in waiting {
            done(Err("the router stopped before the journal of moves had room for it".to_owned()));
        }
    }

    /// Lets those who wait for room into the group, if there is some.
    fn let_in(&mut self, waiting: &mut Group, group: &mut Group) {
        match self.reserve(waiting) {
            Ok(()) => {
                self.starved = false;
                group.append(waiting);
            }
            Err(error) => {
                self.starved = true;
                if self
                    .set_trouble(Some(format!("the journal of moves has no room for another leg: {error}; moves wait until there is some")))
                {
                    tracing::error!(
                        "the journal of moves has no room for another leg: {error}. Moves wait, and go on when there is room in {}",
                        self.directory.display()
                    );
                }
            }
        }
    }

    fn write_group(&mut self, mut group: Group) {
        if group.iter().any(|(_, kind, _)| *kind == Kind::Begins)
            && let Err(error) = self.reserve(&group)
        {
            let refused = group.extract_if(.., |(_, kind, _)| *kind == Kind::Begins).collect::<Vec<_>>();
            for (_, _, done) in refused {
                done(Err(format!(
                    "the journal of moves cannot have the room that a move needs: {error}; make room for the state directory"
                )));
            }
        }
        if group.is_empty() {
            return;
        }
        let mut frame = Vec::new();
        let entries = group.iter().flat_map(|(entries, ..)| entries.iter().map(Vec::as_slice));
        frames::frame(self.identity, self.next, entries, &mut frame);
        let outcome = self.write_frame(&frame);
        if outcome.is_ok() {
            self.next += 1;
            self.end += frame.len() as u64;
            self.written.bytes.fetch_add(frame.len() as u64, Ordering::Relaxed);
            self.written.length.store(self.end, Ordering::Relaxed);
            let entries = group.iter().map(|(entries, ..)| entries.len() as u64).sum();
            self.written.entries.fetch_add(entries, Ordering::Relaxed);
        }
        for (_, _, done) in group {
            done(outcome.clone());
        }
    }

    /// Space for the group, and for ending what it begins. File systems that cannot promise space are taken at their word.
    fn reserve(&self, group: &[Member]) -> io::Result<()> {
        use rustix::fs::{FallocateFlags, fallocate};
        let bytes: usize = group.iter().flat_map(|(entries, ..)| entries).map(|entry| entry.len() + 4).sum();
        match fallocate(&self.file, FallocateFlags::KEEP_SIZE, self.end, bytes as u64 + RESERVE) {
            Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) | Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes a frame and waits for the disk. While the disk is full it waits for room; where a promise can no longer be kept it fails for good.
    fn write_frame(&mut self, frame: &[u8]) -> Result<(), String> {
        if let Some(broken) = &self.broken {
            return Err(broken.clone());
        }
        loop {
            let wrote = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(frame));
            let Err(error) = wrote else { break };
            // What was written of it must not be taken for a group that is torn once another stands behind it.
            if let Err(second) = self.file.set_len(self.end) {
                return Err(self.fail(format!("{error}, and then: {second}")));
            }
            let full = matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge);
            if !full {
                return Err(self.fail(error.to_string()));
            }
            if self.set_trouble(Some(format!("the journal of moves cannot be written: {error}; moves wait until there is room"))) {
                tracing::error!(
                    "the journal of moves cannot be written: {error}. Moves wait, and go on when there is room in {}",
                    self.directory.display()
                );
            }
            if self.written.stopping.load(Ordering::Relaxed) {
                return Err(format!("the journal of moves could not be written until the router stopped: {error}"));
            }
            std::thread::sleep(RETRY);
        }
        if self.sync == Sync::Always {
            self.written.syncs.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = self.file.sync_data() {
                // What the kernel had in memory may be gone, and a second attempt would succeed without it.
                return Err(self.fail(error.to_string()));
            }
        }
        if !self.starved && self.set_trouble(None) {
            tracing::info!("the journal of moves can be written again");
        }
        Ok(())
    }

    /// Returns whether that changes anything.
    fn set_trouble(&self, trouble: Option<String>) -> bool {
        let mut now = self.written.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = now.is_some() != trouble.is_some();
        *now = trouble;
        changed
    }

    fn fail(&mut self, why: String) -> String {
        let text = format!("the journal of moves has failed: {why}; moves go on after a restart of the router");
        tracing::error!("{text}");
        self.set_trouble(Some(text.clone()));
        self.broken = Some(text.clone());
        text
    }

    fn replace(&mut self, entries: &[Vec<u8>]) -> io::Result<()> {
        if self.broken.is_some() {
            return Ok(());
        }
        let next = self.directory.join(NEXT_NAME);
        let file = create(&next, self.identity, entries)?;
        let end = file.metadata()?.len();
        std::fs::rename(&next, self.directory.join(FILE_NAME))?;
        // From here on the old file has no name. What is promised next is in the new one, which must keep its own.
        self.file = file;
        self.end = end;
        self.next = u64::from(!entries.is_empty());
        self.written.length.store(end, Ordering::Relaxed);
        if let Err(error) = sync_directory(&self.directory) {
            self.fail(error.to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn open(directory: &Path, known: bool) -> Opened {
        Journal::open(directory, 7, known, Sync::Always).expect("opens")
    }

    fn append(journal: &Journal, entries: &[&[u8]], kind: Kind) -> Result<(), String> {
        let (told, outcome) = channel();
        let tell = move |result| told.send(result).expect("waited for");
        journal.append(entries.iter().map(|e| e.to_vec()).collect(), kind, Box::new(tell));
        outcome.recv().expect("an outcome")
    }

    #[test]
    fn what_was_acknowledged_is_there_after_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        assert!(opened.entries.is_empty());
        append(&opened.journal, &[b"one", b""], Kind::Begins).expect("written");
        append(&opened.journal, &[b"two"], Kind::Goes).expect("written");
        let status = opened.journal.status();
        assert_eq!((status.entries, status.syncs, status.trouble), (3, 2, None));
        drop(opened);
        let again = open(dir.path(), true);
        assert_eq!(again.entries, [&b"one"[..], b"", b"two"]);
        again.journal.replace(Box::new(|_| Some(vec![b"kept".to_vec()])));
        append(&again.journal, &[b"three"], Kind::Goes).expect("written");
        drop(again);
        assert_eq!(open(dir.path(), true).entries, [&b"kept"[..], b"three"]);
    }

    #[test]
    fn those_who_wait_together_are_made_durable_together() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        let (told, outcomes) = channel();
        for i in 0..1000_u32 {
            let told = told.clone();
            let tell = move |result: Result<(), String>| told.send((i, result)).expect("waited for");
            opened.journal.append(vec![i.to_le_bytes().to_vec()], Kind::Goes, Box::new(tell));
        }
        let order: Vec<u32> = outcomes.iter().take(1000).map(|(i, result)| result.map(|()| i).expect("written")).collect();
        assert!(order.is_sorted());
        let status = opened.journal.status();
        assert!(status.syncs < 1000, "{} times for 1000 entries", status.syncs);
    }

    #[test]
    fn a_torn_end_is_cut_off_and_a_damaged_middle_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let opened = open(dir.path(), false);
        for entry in [&b"first"[..], b"second", b"third"] {
            append(&opened.journal, &[entry], Kind::Goes).expect("written");
        }
        drop(opened);
        let path = dir.path().join(FILE_NAME);
        let bytes = std::fs::read(&path).expect("read");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
        let torn = open(dir.path(), true);
        assert_eq!(torn.entries, [&b"first"[..], b"second"]);
        assert!(torn.torn > 0);
        append(&torn.journal, &[b"again"], Kind::Goes).expect("written");
        drop(torn);
        let mut bytes = std::fs::read(&path).expect("read");
        bytes[frames::HEADER + 30] ^= 1;
        std::fs::write(&path, &bytes).expect("written");
        let error = Journal::open(dir.path(), 7, true, Sync::Always).expect_err("damaged").to_string();
        assert!(error.contains("moves.journal is damaged") && error.contains("backup"), "{error}");
    }

    #[test]
    fn a_missing_or_foreign_journal_is_refused() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let error = Journal::open(dir.path(), 7, true, Sync::Always).expect_err("missing").to_string();
        assert!(error.contains("is missing"), "{error}");
        drop(open(dir.path(), false));
        // Made, and then the start was cut short before the store knew of it: another identity may take it over while it is empty.
        let other = Journal::open(dir.path(), 8, false, Sync::Always).expect("takes it over");
        append(&other.journal, &[b"x"], Kind::Goes).expect("written");
        drop(other);
        let error = Journal::open(dir.path(), 7, true, Sync::Always).expect_err("another's").to_string();
        assert!(error.contains("another state directory"), "{error}");
    }

    #[test]
    fn a_full_disk_refuses_beginnings_and_delays_the_rest() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        // Every write to this device says that the disk is full.
        let full = OpenOptions::new().read(true).write(true).open("/dev/full").expect("the device");
        let written = Arc::<Written>::default();
        let mut writer = Writer {
            directory: dir.path().to_owned(),
            file: full,
            identity: 7,
            sync: Sync::Never,
            next: 0,
            end: 0,
            starved: false,
            broken: None,
            written: Arc::clone(&written),
        };
        let teller = || {
            let (told, outcome) = channel();
            let tell = move |result: Result<(), String>| told.send(result).expect("waited for");
            (Box::new(tell) as Done, outcome)
        };
        // A device has no space to reserve.
        let (done, outcome) = teller();
        writer.write_group(vec![(vec![b"x".to_vec()], Kind::Begins, done)]);
        let refused = outcome.recv().expect("an outcome").expect_err("refused");
        assert!(refused.contains("room"), "{refused}");
        let (done, outcome) = teller();
        let (mut waiting, mut group) = (vec![(vec![b"x".to_vec()], Kind::Waits, done)], Vec::new());
        writer.let_in(&mut waiting, &mut group);
        assert!((waiting.len(), group.len()) == (1, 0) && outcome.try_recv().is_err(), "it waits");
        assert!(written.trouble.lock().expect("not poisoned").as_ref().is_some_and(|t| t.contains("another leg")));
        // Nothing is promised of a file that cannot be put right.
        let failed = writer.write_frame(b"x").expect_err("fails");
        assert!(failed.contains("restart"), "{failed}");
        assert!(written.trouble.lock().expect("not poisoned").is_some());
    }
}
