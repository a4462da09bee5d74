//! One process per state directory, by a lock that dies with the process.
//!
//! `flock` on a file of its own instead of the mere existence of a pid file: after a crash or a power cut nothing is
//! left to clean up, and a pid that was given to another process misleads nobody. The pid is in the file only for the
//! message. The file is never removed: a process that removed it could remove the one that another has just locked.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use super::StoreError;

/// The lock on a state directory, for as long as it lives.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Makes the directory if it is not there (readable by its owner only), and locks it.
    pub(super) fn acquire(directory: &Path) -> Result<Self, StoreError> {
        let refused = |why| StoreError::Directory { directory: directory.to_owned(), why };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(refused)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false) // not before it is locked: the pid in it may be somebody's
            .mode(0o600)
            .open(directory.join("LOCK"))
            .map_err(refused)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(StoreError::Locked { directory: directory.to_owned(), holder: read_pid(&mut file) });
            }
            Err(TryLockError::Error(source)) => return Err(refused(source)),
        }
        write_pid(&mut file, &format!("{}\n", std::process::id())).map_err(refused)?;
        Ok(Self { file })
    }

    /// Names the locked file on this boot of the machine's kernel: boot id, device and inode. A copy of the directory,
    /// and another machine, have another name. Two processes that lock a file of one name exclude each other. `None` if
    /// the system does not report these.
    pub(super) fn identity(&self) -> Option<String> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let file = rustix::fs::fstat(&self.file).ok()?;
        Some(format!("{}:{:x}:{:x}", boot.trim(), file.st_dev, file.st_ino))
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // Only so that a later refusal does not name a process that is gone.
        let _ = write_pid(&mut self.file, "");
        // Closing the file would not do while a process that is just being started has a copy of it.
        let _ = self.file.unlock();
    }
}

fn write_pid(file: &mut File, text: &str) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(text.as_bytes())
}

fn read_pid(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_file_left_by_a_crash_locks_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::write(directory.path().join("LOCK"), "1\n").expect("written");
        DirectoryLock::acquire(directory.path()).expect("free");
    }

    #[test]
    fn a_lock_keeps_its_name_and_a_copy_of_the_directory_has_another() {
        let (directory, copy) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("another one"));
        let name_of = |path: &Path| DirectoryLock::acquire(path).expect("free").identity().expect("a name");
        let name = name_of(directory.path());
        std::fs::copy(directory.path().join("LOCK"), copy.path().join("LOCK")).expect("copied");
        assert!(name == name_of(directory.path()) && name != name_of(copy.path()));
    }
}
