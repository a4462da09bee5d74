//! Ensures one process per state directory, by a lock that dies with the process.
//!
//! Uses `flock` on a separate file rather than the existence of a PID file: a crash or a power cut leaves nothing to
//! clean up, and a reused process id misleads no operator. The file contains the process id only for the error message.
//! The file is never removed: a process that removed it could remove a file that another process has just locked.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use super::StoreError;

/// Lock on a state directory, held until it is dropped.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    file: File,
}

impl DirectoryLock {
    /// Creates the directory if needed (readable by its owner only), and locks it.
    pub(super) fn acquire(directory: &Path) -> Result<Self, StoreError> {
        let refused = |why| StoreError::Directory { directory: directory.to_owned(), why };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(refused)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false) // not before locking, because the file may contain another process's id
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

    /// Identifies the locked file during this boot of the kernel: boot id, device and inode. A copy of the directory,
    /// and another machine, have other identities. Two processes that lock files of the same identity exclude each
    /// other. `None` if the system does not report them.
    pub(super) fn identity(&self) -> Option<String> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let file = rustix::fs::fstat(&self.file).ok()?;
        Some(format!("{}:{:x}:{:x}", boot.trim(), file.st_dev, file.st_ino))
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        // So that a later error does not name an ended process.
        let _ = write_pid(&mut self.file, "");
        // Closing the file would not unlock it while a process being started has a copy of the descriptor.
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
