//! `ACL SETUSER`, `DELUSER`, `SAVE` and `LOAD` on a thread that may hash passwords and write files. A single thread, so
//! that changes are sequential.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use switchyard_control::Running;
use switchyard_control::operator::CommandThread;
use switchyard_resp::encode;
use switchyard_router::{OperatorCommand, Users};
use tracing::warn;

use crate::config::Config;

/// The configuration in force.
pub(super) type Configured = Arc<Mutex<Config>>;

/// Starts the thread that changes users.
pub(super) fn listen(running: Arc<Running>, config: Configured) -> anyhow::Result<Arc<CommandThread>> {
    CommandThread::start("users", Arc::clone(&running), move |command| {
        let config = config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut out = Vec::new();
        match execute(&running, &config, command) {
            Ok(Done::Ok) => encode::simple(&mut out, "OK"),
            Ok(Done::Count(count)) => encode::integer(&mut out, count as i64),
            Err(why) => encode::error(&mut out, &why.replace(['\r', '\n'], " ")),
        }
        out
    })
}

enum Done {
    Ok,
    Count(usize),
}

const STOPPING: &str = "ERR this command was not executed: the router is stopping";

/// Redis's message, followed by the remedy here.
const NO_FILE: &str = "ERR This Redis instance is not configured to use an ACL file: users that are changed are kept in memory only. Set \
                       users-file in [clients] of Switchyard's configuration, and send SIGHUP";

fn execute(running: &Running, config: &Config, command: &OperatorCommand) -> Result<Done, String> {
    let texts: Vec<&str> = command
        .words()
        .iter()
        .map(|word| std::str::from_utf8(word))
        .collect::<Result<_, _>>()
        .map_err(|_| "ERR names and rules of users are UTF-8 text")?;
    let [verb, words @ ..] = texts.as_slice() else { return Err("ERR syntax error".to_owned()) };
    let verb = verb.to_ascii_uppercase();
    match (verb.as_str(), words) {
        ("SETUSER", [name, words @ ..]) => {
            change(running, config, command, &[*name], |users| Ok((users.with_changed(name, words)?, ())))?;
            audit(command, "ACL SETUSER", name);
            Ok(Done::Ok)
        }
        ("DELUSER", names) => {
            let count = change(running, config, command, names, |users| users.without(names))?;
            audit(command, "ACL DELUSER", &names.iter().take(10).copied().collect::<Vec<_>>().join(" "));
            Ok(Done::Count(count))
        }
        ("SAVE", []) => save(running, config).map(|()| {
            audit(command, "ACL SAVE", "");
            Done::Ok
        }),
        ("LOAD", []) => load(running, config, command).map(|()| {
            audit(command, "ACL LOAD", "");
            Done::Ok
        }),
        _ => Err("ERR unknown subcommand or wrong number of arguments. Try ACL HELP.".to_owned()),
    }
}

/// Writes an audit line. Names are logged although one may be a misplaced password: the caller may see all users
/// anyway.
fn audit(command: &OperatorCommand, what: &str, users: &str) {
    warn!(target: "audit", who = command.who(), users, "{what}");
}

/// Changes users in memory. Only an operator may create or change operators. Otherwise changing their passwords would
/// be a way to become one.
fn change<R>(
    running: &Running,
    config: &Config,
    command: &OperatorCommand,
    names: &[&str],
    how: impl Fn(&Users) -> Result<(Users, R), String>,
) -> Result<R, String> {
    loop {
        let (before, _) = running.with(|router| router.users()).ok_or(STOPPING)?;
        let (after, result) = how(&before)?;
        let after = Arc::new(after);
        let is_operator = |users: &Users, name: &str| users.get(name.as_bytes()).is_some_and(|user| user.is_operator());
        if let Some(name) = names.iter().find(|name| is_operator(&before, name) || is_operator(&after, name))
            && !command.may_operate()
        {
            return Err(format!(
                "NOPERM the user {name} is an operator or would be one, and only operators may change such users"
            ));
        }
        if after.default_user().is_open() && !before.default_user().is_open() {
            config.check_open_access().map_err(|why| format!("ERR {why}"))?;
        }
        if running.with(|router| router.replace_users(&before, &after, false)).ok_or(STOPPING)? {
            return Ok(result);
        }
    }
}

/// Replaces the users in force by those of the file. Requires an operator if operators differ, since unsaved changes of
/// operators would be undone.
fn load(running: &Running, config: &Config, command: &OperatorCommand) -> Result<(), String> {
    config.users_file().ok_or(NO_FILE)?;
    let users = config.users().map_err(|why| {
        format!("ERR {why} WARNING: ACL errors detected, no change to the previously active ACL rules was performed")
    })?;
    if users.default_user().is_open() {
        config.check_open_access().map_err(|why| format!("ERR {why}"))?;
    }
    let users = Arc::new(users);
    let operators = |users: &Users| users.iter().filter(|user| user.is_operator()).cloned().collect::<Vec<_>>();
    loop {
        let (before, _) = running.with(|router| router.users()).ok_or(STOPPING)?;
        if operators(&before) != operators(&users) && !command.may_operate() {
            return Err(
                "NOPERM users who are operators would be changed, and only operators may change such users".to_owned()
            );
        }
        if running.with(|router| router.replace_users(&before, &users, true)).ok_or(STOPPING)? {
            return Ok(());
        }
    }
}

/// Writes the users in force to the file.
fn save(running: &Running, config: &Config) -> Result<(), String> {
    let path = config.users_file().ok_or(NO_FILE)?;
    let failed = |why: io::Error| format!("ERR cannot write {}: {why}", path.display());
    loop {
        let (users, configured) = running.with(|router| router.users()).ok_or(STOPPING)?;
        let old = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(failed(error)),
        };
        // Keep edits that were made to the file since it was read, even with mistakes.
        if !old.is_empty() && !config.users().is_ok_and(|in_file| in_file == *configured) {
            return Err(format!(
                "ERR {} was changed since it was read: ACL LOAD, or send SIGHUP, and make the changes again",
                path.display()
            ));
        }
        let text = users.written_over(&old)?;
        write(path, &text).map_err(failed)?;
        let saved = config
            .users()
            .map_err(|why| format!("ERR the file was written, but reads back differently; this is a bug: {why}"))?;
        if running.with(|router| router.replace_users(&users, &Arc::new(saved), true)).ok_or(STOPPING)? {
            return Ok(());
        }
    }
}

/// Replaces the file atomically: a reader finds the old or the new content, also after a crash.
fn write(path: &Path, text: &str) -> io::Result<()> {
    // If the path is a link, its target is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let mode = fs::metadata(&path).map_or(0o600, |meta| meta.permissions().mode() & 0o777);
    let mut fresh = path.clone().into_os_string();
    fresh.push(".new");
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
    file.write_all(text.as_bytes())?;
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    fs::rename(&fresh, &path)?;
    match path.parent() {
        Some(dir) => File::open(dir)?.sync_all(),
        None => Ok(()),
    }
}
