//! Proof before removal: [`prove`] is the only source of a [`Proof`], which every stop of a server and every removal of
//! its directory requires.
//!
//! A number, a directory's name or an address proves nothing: a lost store starts again with number 0, and another
//! server may listen at a known address. A server is stopped only if it is on record, is the recorded process, serves
//! no fleet and no client, and has no key. Any other server is left alone and reported.
//!
//! All checks are in one function rather than in the callers: every missing check so far was a caller with checks of
//! its own.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::intent::{LastSeen, StartedServer};
use super::{Process, Provisioner};

/// State of a server from its own replies. INFO is queried last, so the number of keys is the newest fact.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Inspected {
    /// `run_id` of its process.
    pub(crate) run_id: Option<String>,
    /// Client, other router or replica that uses the server. Excludes connections of this router.
    pub(crate) user: Option<String>,
    /// Connections of this router. They end shortly after a node has left.
    pub(crate) own_connections: usize,
    /// Keys in all databases.
    pub(crate) keys: u64,
}

/// Facts about a server that only the fleet has.
pub(crate) trait Evidence {
    /// Reason why the fleet needs the server: it is a node, a replica of one, or configured.
    fn claim(&self, address: &str) -> Option<String>;

    /// Queries the server.
    ///
    /// # Errors
    /// If the server does not reply, or refuses a command.
    fn inspect(&self, address: &str) -> Result<Inspected, String>;
}

/// The right to stop one server and to remove its directory. Not `Clone`, because it is valid for one attempt.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Proof(State);

/// The proven state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The recorded process, unused and without a key.
    Empty,
    /// Running without ever having opened its port, so no client can have stored a key.
    NeverListened,
    /// Ended. The directory may contain keys.
    Ended,
}

/// Reason why a server is left alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum StopRefusal {
    /// No provisioner of this router has started it.
    NotOnRecord,
    /// Started on a machine other than this one.
    Elsewhere,
    /// The fleet, a client or another router uses it.
    Used(String),
    /// This router still has connections to it.
    Connected(usize),
    /// Description of the process that has its address.
    OtherProcess(String),
    /// The server has this number of keys.
    Keys(u64),
    /// The state of the server is unknown, for this reason.
    Silent(String),
}

impl StopRefusal {
    /// Whether a later attempt may succeed. Each attempt proves everything again.
    pub(super) fn is_transient(&self) -> bool {
        matches!(self, Self::Connected(_) | Self::Silent(_))
    }
}

impl fmt::Display for StopRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotOnRecord => write!(f, "it is not on record as started by this router's provisioner"),
            Self::Elsewhere => {
                write!(f, "it was started on another machine, or by a version that did not record the machine")
            }
            Self::Used(why) => write!(f, "{why}"),
            Self::Connected(count) => write!(f, "this router still has {count} connections to it"),
            Self::OtherProcess(why) => write!(f, "it is not the process that was started: {why}"),
            Self::Keys(keys) => write!(f, "it has keys ({keys})"),
            Self::Silent(why) => write!(f, "nothing is known about its keys: it {why}"),
        }
    }
}

/// Proves that the server at `address` is the one on record, empty and unused. Otherwise returns the reason to leave it
/// alone.
pub(super) fn prove(
    started: Option<&StartedServer>,
    address: &str,
    fleet: &dyn Evidence,
    provisioner: &dyn Provisioner,
) -> Result<Proof, StopRefusal> {
    let started = started.ok_or(StopRefusal::NotOnRecord)?;
    if let Some(why) = fleet.claim(address) {
        return Err(StopRefusal::Used(why));
    }
    match provisioner.process(started, address) {
        Process::OtherHost => return Err(StopRefusal::Elsewhere),
        Process::Foreign(why) => return Err(StopRefusal::OtherProcess(why)),
        Process::Ended => return Ok(Proof(State::Ended)),
        Process::NotListening if started.seen == LastSeen::Never => return Ok(Proof(State::NeverListened)),
        Process::NotListening => return Err(StopRefusal::Silent("does not listen at its port".to_owned())),
        Process::Listens | Process::Unknown => {}
    }
    let seen = fleet.inspect(address).map_err(StopRefusal::Silent)?;
    match (&started.seen, &seen.run_id) {
        (LastSeen::Process(known), Some(run_id)) if known == run_id => {}
        (LastSeen::Process(known), _) => {
            return Err(StopRefusal::OtherProcess(format!("run_id {known} is on record, and another process replies")));
        }
        (LastSeen::Unknown | LastSeen::Never | LastSeen::Listening, _) => {
            return Err(StopRefusal::OtherProcess("no run_id of it is on record".to_owned()));
        }
    }
    if let Some(user) = seen.user {
        return Err(StopRefusal::Used(user));
    }
    if seen.keys > 0 {
        return Err(StopRefusal::Keys(seen.keys));
    }
    if seen.own_connections > 0 {
        return Err(StopRefusal::Connected(seen.own_connections));
    }
    Ok(Proof(State::Empty))
}

impl Proof {
    /// Whether the process was proven to run, and may be ended.
    pub(super) fn covers_process(&self) -> bool {
        self.0 != State::Ended
    }

    /// Whether the process to be ended must listen at its port: the server that was inspected.
    pub(super) fn needs_listener(&self) -> bool {
        self.0 == State::Empty
    }

    /// Removes the directory of a server that has ended. A directory that may contain data is renamed with the date
    /// instead, and the new name is returned.
    ///
    /// # Errors
    /// If the file system refuses the removal. The directory is then unchanged, or has lost files of a server that was
    /// proven empty.
    pub(super) fn remove_directory(self, directory: &Path) -> Result<Option<PathBuf>, String> {
        if !directory.exists() {
            return Ok(None);
        }
        let failed = |what: &str, error: std::io::Error| format!("cannot {what} {}: {error}", directory.display());
        if self.0 == State::Empty || has_only_logs(directory) {
            return fs::remove_dir_all(directory).map(|()| None).map_err(|error| failed("remove", error));
        }
        let kept = free_name(directory);
        fs::rename(directory, &kept).map_err(|error| failed("rename", error))?;
        Ok(Some(kept))
    }
}

/// Part of a directory's name, before the date, that marks it as kept for its data.
const KEPT_MARK: &str = ".kept-";

/// Directories below `folder` that were kept because they may contain data, for `switchyard doctor`.
#[must_use]
pub fn kept_directories(folder: &Path) -> Vec<PathBuf> {
    let all = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut kept: Vec<PathBuf> =
        all.filter(|entry| entry.file_name().to_string_lossy().contains(KEPT_MARK)).map(|entry| entry.path()).collect();
    kept.sort();
    kept
}

/// Whether the directory contains only the server's output, so it stored no data.
fn has_only_logs(directory: &Path) -> bool {
    let Ok(entries) = fs::read_dir(directory) else { return false };
    let is_log = |entry: fs::DirEntry| {
        entry.file_type().is_ok_and(|kind| kind.is_file())
            && entry.file_name().to_string_lossy().starts_with(super::local::LOG)
    };
    entries.into_iter().all(|entry| entry.is_ok_and(is_log))
}

fn free_name(directory: &Path) -> PathBuf {
    let today = Timestamp::now().to_zoned_datetime(TimeZone::UTC).date();
    let name = directory.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let dated = format!("{name}{KEPT_MARK}{today}");
    let names = std::iter::once(dated.clone()).chain((2..).map(|count| format!("{dated}-{count}")));
    names.map(|name| directory.with_file_name(name)).find(|path| !path.exists()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{ProvisionerKind, ServerLocation, ServerSettings};
    use super::*;

    struct World {
        claim: Option<&'static str>,
        seen: Result<Inspected, String>,
        process: Process,
    }

    impl Evidence for World {
        fn claim(&self, _: &str) -> Option<String> {
            self.claim.map(str::to_owned)
        }

        fn inspect(&self, _: &str) -> Result<Inspected, String> {
            self.seen.clone()
        }
    }

    impl Provisioner for World {
        fn choose(&self, _: u64, _: &BTreeSet<String>) -> Result<Option<ServerLocation>, String> {
            Ok(None)
        }

        fn start(&self, _: u64, _: Option<(&str, &StartedServer)>, _: ServerSettings<'_>) -> Result<String, String> {
            Err("starts nothing".to_owned())
        }

        fn process(&self, _: &StartedServer, _: &str) -> Process {
            self.process.clone()
        }
    }

    fn empty() -> World {
        let seen = Inspected { run_id: Some("abc".to_owned()), ..Inspected::default() };
        World { claim: None, seen: Ok(seen), process: Process::Listens }
    }

    fn with(change: impl FnOnce(&mut Inspected)) -> World {
        let mut world = empty();
        world.seen.as_mut().map(change).expect("replies");
        world
    }

    fn judged(world: &World, run_id: Option<&str>) -> Result<Proof, StopRefusal> {
        let seen = run_id.map_or(LastSeen::Never, |run_id| LastSeen::Process(run_id.to_owned()));
        let started = StartedServer { seen, ..StartedServer::new(3, ProvisionerKind::Local) };
        prove(Some(&started), "a:1", world, world)
    }

    #[test]
    fn an_empty_unused_server_of_ours_may_be_stopped() {
        assert_eq!(judged(&empty(), Some("abc")), Ok(Proof(State::Empty)));
        assert_eq!(judged(&World { process: Process::Unknown, ..empty() }, Some("abc")), Ok(Proof(State::Empty)));
        assert_eq!(judged(&World { process: Process::Ended, ..empty() }, Some("abc")), Ok(Proof(State::Ended)));
        let silent = World { process: Process::NotListening, seen: Err("is silent".to_owned()), ..empty() };
        assert_eq!(judged(&silent, None), Ok(Proof(State::NeverListened)));
    }

    #[test]
    fn every_doubt_about_a_server_keeps_it() {
        let world = empty();
        assert_eq!(prove(None, "a:1", &world, &world), Err(StopRefusal::NotOnRecord));
        for (world, run_id, kept) in [
            (
                World { claim: Some("it is node a"), ..empty() },
                Some("abc"),
                StopRefusal::Used("it is node a".to_owned()),
            ),
            (World { process: Process::OtherHost, ..empty() }, Some("abc"), StopRefusal::Elsewhere),
            (
                World { process: Process::NotListening, ..empty() },
                Some("abc"),
                StopRefusal::Silent("does not listen at its port".to_owned()),
            ),
            (
                World { process: Process::Foreign("b".to_owned()), ..empty() },
                Some("abc"),
                StopRefusal::OtherProcess("b".to_owned()),
            ),
            (
                World { seen: Err("is silent".to_owned()), ..empty() },
                Some("abc"),
                StopRefusal::Silent("is silent".to_owned()),
            ),
            (with(|seen| seen.keys = 1), Some("abc"), StopRefusal::Keys(1)),
            (
                with(|seen| seen.user = Some("a client".to_owned())),
                Some("abc"),
                StopRefusal::Used("a client".to_owned()),
            ),
            (with(|seen| seen.own_connections = 2), Some("abc"), StopRefusal::Connected(2)),
        ] {
            assert_eq!(judged(&world, run_id), Err(kept));
        }
        let silent = World { process: Process::NotListening, ..empty() };
        for seen in [LastSeen::Unknown, LastSeen::Listening] {
            let started = StartedServer { seen, ..StartedServer::new(3, ProvisionerKind::Local) };
            assert!(
                matches!(prove(Some(&started), "a:1", &silent, &silent), Err(StopRefusal::Silent(_))),
                "only a new server has surely no key"
            );
        }
        for (seen, known) in [(Some("other"), Some("abc")), (None, Some("abc")), (Some("abc"), None)] {
            let world = with(|inspected| inspected.run_id = seen.map(str::to_owned));
            assert!(matches!(judged(&world, known), Err(StopRefusal::OtherProcess(_))), "{seen:?} {known:?}");
        }
    }

    #[test]
    fn a_directory_with_data_is_renamed_unless_proven_empty() {
        let folder = tempfile::tempdir().expect("a directory");
        let make = |file: &str| {
            let directory = folder.path().join("3-abc");
            fs::create_dir(&directory).expect("made");
            fs::write(directory.join(file), "x").expect("written");
            directory
        };
        for (state, file, is_kept) in [
            (State::Empty, "dump.rdb", false),
            (State::Ended, "dump.rdb", true),
            (State::Ended, "dump.rdb", true),
            (State::NeverListened, "dump.rdb", true),
            (State::Ended, "server.log", false),
        ] {
            let directory = make(file);
            let kept = Proof(state).remove_directory(&directory).expect("removed");
            assert!(!directory.exists());
            assert_eq!(kept.as_ref().is_some_and(|kept| kept.join(file).exists()), is_kept, "{state:?} {file}");
        }
        assert_eq!(kept_directories(folder.path()).len(), 3);
        assert_eq!(Proof(State::Empty).remove_directory(&folder.path().join("gone")), Ok(None));
    }
}
