//! Replay of a corpus by an ordinary test, with the function that the fuzz target calls.
//!
//! Each crate with targets includes this file by its path rather than from a library of `fuzz/`: that package has its
//! own lock file and target folder, so its tests would build all dependencies twice.

use std::fs;
use std::path::Path;

/// Calls `target` with each file of its corpus. A failure names the file.
pub(crate) fn replay(name: &str, target: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let files: Vec<_> = fs::read_dir(&corpus).expect("the corpus").map(|file| file.expect("a file").path()).collect();
    assert!(!files.is_empty(), "{} has no files", corpus.display());
    for file in files {
        let input = fs::read(&file).expect("a readable file");
        if let Err(panic) = std::panic::catch_unwind(|| target(&input)) {
            eprintln!("failed with {}", file.display());
            std::panic::resume_unwind(panic);
        }
    }
}
