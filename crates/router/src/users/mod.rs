//! Users of the router, with their permissions for logins, commands, keys and channels.
//!
//! The rules follow Redis's ACL, and the file follows its ACL file ([`rules`]); passwords are Argon2id hashes. Rules
//! are checked here rather than at nodes, which only know the router's user. So the keys of a command are derived from
//! its arguments ([`check`]), and if that is impossible (keys of scripts), restricted users are refused.
//!
//! An unrestricted user costs nothing: the worker checks one number of the client ([`Client::guard`](crate::worker)).

mod change;
mod check;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod log;
mod login;
mod queue;
mod rules;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use switchyard_resp::command::{Access, Categories, Command, CommandTable};

use crate::settings::{Reads, Secret};

pub use change::hash_password;
pub(crate) use check::Denied;
pub(crate) use log::{AclLog, Refused};
pub(crate) use login::{Attempt, Logins};
pub use rules::RuleError;

/// User of clients without a login.
pub(crate) const DEFAULT: &str = "default";

/// Scope of a command rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    All,
    Category(Categories, String),
    /// Upper case. A container includes its subcommands.
    Command(String),
}

/// `+@read`, `-config|set`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CommandRule {
    allow: bool,
    subject: Subject,
}

/// `~app:*`, `%R~shared:*`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KeyRule {
    access: Access,
    pattern: Vec<u8>,
}

/// Credential of a user.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Argon2id hash in PHC format.
    Hash(String),
    /// Password of `[clients]`.
    Clear(Secret),
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Limits for all clients of a user (or of a listener) together. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Concurrent connections.
    pub connections: Option<u32>,
    /// Commands per second.
    pub requests_per_second: Option<u32>,
    /// Bytes of commands in flight, and of unread replies.
    pub bytes_in_flight: Option<u64>,
}

impl Bounds {
    /// Whether every command must be counted.
    pub fn per_command(&self) -> bool {
        self.requests_per_second.is_some() || self.bytes_in_flight.is_some()
    }
}

/// A user with credentials and permissions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    name: Arc<str>,
    on: bool,
    no_password: bool,
    proofs: Vec<Proof>,
    rules: Vec<CommandRule>,
    keys: Vec<KeyRule>,
    all_keys: bool,
    channels: Vec<Vec<u8>>,
    all_channels: bool,
    all_scripts: bool,
    /// May change the fleet, and users with this right.
    operator: bool,
    bounds: Bounds,
    /// Read policy, if it differs from the listener's.
    reads: Option<Reads>,
    /// Bitmap by ids of builtin commands.
    allowed: Vec<u64>,
    builtin: usize,
    all_commands: bool,
}

impl User {
    /// Returns a user as created by `ACL SETUSER`: disabled, without password and permissions.
    fn new(name: &str) -> Self {
        let mut user = Self {
            name: Arc::from(name),
            on: false,
            no_password: false,
            proofs: Vec::new(),
            rules: Vec::new(),
            keys: Vec::new(),
            all_keys: false,
            channels: Vec::new(),
            all_channels: false,
            all_scripts: false,
            operator: false,
            bounds: Bounds::default(),
            reads: None,
            allowed: Vec::new(),
            builtin: 0,
            all_commands: false,
        };
        user.compile(&CommandTable::builtin());
        user
    }

    /// Returns a user with all permissions.
    fn unrestricted(name: &str, proofs: Vec<Proof>) -> Self {
        let mut user = Self {
            on: true,
            no_password: proofs.is_empty(),
            proofs,
            rules: vec![CommandRule { allow: true, subject: Subject::All }],
            all_keys: true,
            all_channels: true,
            all_scripts: true,
            ..Self::new(name)
        };
        user.compile(&CommandTable::builtin());
        user
    }

    /// Evaluates the rules for all builtin commands. Rules for a node's own commands are evaluated on use.
    fn compile(&mut self, table: &CommandTable) {
        self.builtin = table.len();
        self.allowed = vec![0; table.len().div_ceil(64)];
        self.all_commands =
            self.rules.iter().all(|rule| rule.allow) && self.rules.iter().any(|rule| rule.subject == Subject::All);
        // Unrestricted users may also run scripts.
        self.all_scripts |= self.is_unrestricted();
        for command in table.iter() {
            let allowed = u64::from(self.rules_allow(command));
            self.allowed[usize::from(command.id) / 64] |= allowed << (command.id % 64);
        }
    }

    /// Evaluates the rules. The last rule about the command decides.
    fn rules_allow(&self, command: &Command) -> bool {
        let about = |rule: &&CommandRule| match &rule.subject {
            Subject::All => true,
            Subject::Category(categories, _) => command.categories().intersects(*categories),
            Subject::Command(name) => {
                let name = name.as_str();
                *command.name == *name || command.name.strip_prefix(name).is_some_and(|rest| rest.starts_with('|'))
            }
        };
        self.rules.iter().rev().find(about).is_some_and(|rule| rule.allow)
    }

    /// Whether the user may run the command, with permitted arguments.
    pub(crate) fn may_run(&self, command: &Command) -> bool {
        let id = usize::from(command.id);
        if id < self.builtin {
            self.allowed[id / 64] >> (id % 64) & 1 == 1
        } else {
            self.all_commands || self.rules_allow(command)
        }
    }

    /// User name. Unique among users.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Read policy, if it differs from the listener's.
    pub(crate) fn reads(&self) -> Option<Reads> {
        self.reads
    }

    /// Whether the user is enabled.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether clients may use this user without a password.
    pub fn is_open(&self) -> bool {
        self.on && self.no_password
    }

    /// Whether the user has all permissions, except operator rights.
    pub(crate) fn is_unrestricted(&self) -> bool {
        self.all_commands && self.all_keys && self.all_channels
    }

    /// Whether the user may change the fleet. No other right includes it.
    pub fn is_operator(&self) -> bool {
        self.operator
    }

    /// Limits for all its clients together.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Whether a client that logged in as `old` may stay. A changed password does not matter, as in Redis. Revoked
    /// channels do, because only a disconnect ends a subscription.
    pub(crate) fn may_stay(&self, old: &User) -> bool {
        self.on && (self.all_channels || (!old.all_channels && self.channels == old.channels))
    }
}

/// All users of the router.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Users {
    by_name: BTreeMap<String, Arc<User>>,
    default: Arc<User>,
    default_user: DefaultUser,
}

/// Origin of the default user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DefaultUser {
    /// A line of the users file, or `ACL SETUSER`.
    Listed,
    /// The configuration, although there is a users file.
    Configured,
    BuiltIn,
}

impl Users {
    /// Whether any user may read from replicas, regardless of the listener.
    pub(crate) fn read_replicas(&self) -> bool {
        self.by_name.values().chain([&self.default]).any(|user| user.reads.is_some_and(|reads| reads != Reads::Primary))
    }
}

impl Default for Users {
    fn default() -> Self {
        Self::without_file(None)
    }
}

impl Users {
    /// Returns only the default user, with all permissions, and with this password if any.
    pub fn without_file(password: Option<&Secret>) -> Self {
        let proofs = password.into_iter().cloned().map(Proof::Clear).collect();
        Self::assemble(BTreeMap::new(), User::unrestricted(DEFAULT, proofs), DefaultUser::BuiltIn)
    }

    /// Returns the users of a file. If the file has no default user, it is created with the password; without a
    /// password it is disabled.
    pub fn from_file(text: &str, password: Option<&Secret>) -> Result<Self, Vec<RuleError>> {
        let users = rules::parse(text)?;
        if let Some(default) = users.get(DEFAULT) {
            if password.is_some() {
                let text = "the default user is defined here, and its password in [clients] too; keep one".to_owned();
                return Err(vec![RuleError { line: 0, text }]);
            }
            let default = default.clone();
            return Ok(Self { by_name: users, default, default_user: DefaultUser::Listed });
        }
        let mut default = match password {
            Some(password) => User::unrestricted(DEFAULT, vec![Proof::Clear(password.clone())]),
            None => User::new(DEFAULT),
        };
        default.on = password.is_some();
        let of = if password.is_some() { DefaultUser::Configured } else { DefaultUser::BuiltIn };
        Ok(Self::assemble(users, default, of))
    }

    fn assemble(mut by_name: BTreeMap<String, Arc<User>>, default: User, default_user: DefaultUser) -> Self {
        let default = Arc::new(default);
        by_name.insert(DEFAULT.to_owned(), default.clone());
        Self { by_name, default, default_user }
    }

    /// Restricts the default user by the words of a users file about commands, keys, channels, scripts, limits and
    /// reads. They follow `allkeys allchannels allcommands`.
    pub fn with_default_rules<W: AsRef<str>>(self, words: &[W]) -> Result<Self, RuleError> {
        if words.is_empty() {
            return Ok(self);
        }
        let wrong = |text: String| RuleError { line: 0, text };
        if self.default_user == DefaultUser::Listed {
            return Err(wrong("the users file has a line for the default user: add these rules there".to_owned()));
        }
        let mut default = User::clone(&self.default);
        default.restrict(words).map_err(wrong)?;
        Ok(Self::assemble(self.by_name, default, DefaultUser::Configured))
    }

    /// The default user, which always exists.
    pub fn default_user(&self) -> &Arc<User> {
        &self.default
    }

    /// Returns the user with this name.
    pub fn get(&self, name: &[u8]) -> Option<&Arc<User>> {
        self.by_name.get(std::str::from_utf8(name).ok()?)
    }

    /// All users, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<User>> {
        self.by_name.values()
    }
}
