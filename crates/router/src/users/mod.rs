//! Users of the router's own: who may log in, run which commands, and touch which keys and channels.
//!
//! The rules are those of Redis's ACL, in a file that has the form of its ACL file ([`rules`]); passwords are Argon2id
//! hashes. They are checked here and not passed on: nodes see one user, the router's. So what a command touches is
//! found out from its arguments ([`check`]), and what cannot be found out (a script's keys) is refused to users who are
//! restricted.
//!
//! A user without any restriction costs nothing: the worker looks at one number of the client's
//! ([`Client::guard`](crate::worker)).

mod change;
mod check;
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

/// The user of clients that have not named one.
pub(crate) const DEFAULT: &str = "default";

/// What a rule about commands is about.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subject {
    All,
    Category(Categories, String),
    /// Upper case. A container stands for its subcommands too.
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

/// How somebody proves to be a user.
#[derive(Clone, PartialEq, Eq)]
pub(crate) enum Proof {
    /// An Argon2id hash in PHC form.
    Hash(String),
    /// The password of `[clients]`.
    Clear(Secret),
}

impl fmt::Debug for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Bounds on what all clients of a user (or of a listener) may do together. `None`: no bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Connections at once.
    pub connections: Option<u32>,
    /// Commands per second.
    pub requests_per_second: Option<u32>,
    /// Bytes of commands sent and not answered, and of replies not read.
    pub bytes_in_flight: Option<u64>,
}

impl Bounds {
    /// Whether every command must be looked at.
    pub fn per_command(&self) -> bool {
        self.requests_per_second.is_some() || self.bytes_in_flight.is_some()
    }
}

/// A user.
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
    /// May change the fleet, and users who may.
    operator: bool,
    bounds: Bounds,
    /// Who answers its reads, where it is not as its listener says.
    reads: Option<Reads>,
    /// By the ids of the builtin commands.
    allowed: Vec<u64>,
    builtin: usize,
    all_commands: bool,
}

impl User {
    /// A user of that name as `ACL SETUSER` makes one: off, without a password, without any permission.
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

    /// A user who may do everything.
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

    /// Works out the rules for every command there is today. A node's own commands are looked up when they are called.
    fn compile(&mut self, table: &CommandTable) {
        self.builtin = table.len();
        self.allowed = vec![0; table.len().div_ceil(64)];
        self.all_commands =
            self.rules.iter().all(|rule| rule.allow) && self.rules.iter().any(|rule| rule.subject == Subject::All);
        // Nothing is forbidden to such a user, so scripts are not either.
        self.all_scripts |= self.is_unrestricted();
        for command in table.iter() {
            let allowed = u64::from(self.rules_allow(command));
            self.allowed[usize::from(command.id) / 64] |= allowed << (command.id % 64);
        }
    }

    /// The rules one after another: the last that is about the command counts.
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

    /// Whether the user may run the command at all.
    pub(crate) fn may_run(&self, command: &Command) -> bool {
        let id = usize::from(command.id);
        if id < self.builtin {
            self.allowed[id / 64] >> (id % 64) & 1 == 1
        } else {
            self.all_commands || self.rules_allow(command)
        }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Who answers its reads, where it is not as its listener says.
    pub(crate) fn reads(&self) -> Option<Reads> {
        self.reads
    }

    /// Whether anybody can log in as this user.
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Whether clients are this user without a word.
    pub fn is_open(&self) -> bool {
        self.on && self.no_password
    }

    /// Whether nothing is forbidden to the user.
    pub(crate) fn is_unrestricted(&self) -> bool {
        self.all_commands && self.all_keys && self.all_channels
    }

    /// Whether the user may change the fleet. No other right includes it.
    pub fn is_operator(&self) -> bool {
        self.operator
    }

    /// What all its clients may do together.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Whether somebody who has logged in as `old` may stay. Another password does not matter, as in Redis; that
    /// channels may be listened to no more does, because only the end of the connection ends a subscription.
    pub(crate) fn keeps(&self, old: &User) -> bool {
        self.on && (self.all_channels || (!old.all_channels && self.channels == old.channels))
    }
}

/// All users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Users {
    by_name: BTreeMap<String, Arc<User>>,
    default: Arc<User>,
    default_user: DefaultUser,
}

/// Who says what the default user is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DefaultUser {
    /// A line of the users file, or `ACL SETUSER`.
    Listed,
    /// The configuration, although there is a users file.
    OfConfiguration,
    /// Nothing more than that there is always one.
    BuiltIn,
}

impl Users {
    /// Whether reads of any of them may be answered by replicas, whatever the listener says.
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
    /// Only the default user, who may do everything: with the password, or without where there is none.
    pub fn without_file(password: Option<&Secret>) -> Self {
        let proofs = password.into_iter().cloned().map(Proof::Clear).collect();
        Self::assemble(BTreeMap::new(), User::unrestricted(DEFAULT, proofs), DefaultUser::BuiltIn)
    }

    /// The users of a file. The default user is the file's; where the file has none, the one with the password; where
    /// there is none either, nobody is let in without a name.
    pub fn from_file(text: &str, password: Option<&Secret>) -> Result<Self, Vec<RuleError>> {
        let users = rules::parse(text)?;
        if let Some(default) = users.get(DEFAULT) {
            if password.is_some() {
                let text =
                    "the default user is given here, and a password for it in [clients] too; keep one".to_owned();
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
        let of = if password.is_some() { DefaultUser::OfConfiguration } else { DefaultUser::BuiltIn };
        Ok(Self::assemble(users, default, of))
    }

    fn assemble(mut by_name: BTreeMap<String, Arc<User>>, default: User, default_user: DefaultUser) -> Self {
        let default = Arc::new(default);
        by_name.insert(DEFAULT.to_owned(), default.clone());
        Self { by_name, default, default_user }
    }

    /// The same, where the default user may do less: by the words of a line of the file that are about commands, keys,
    /// channels, scripts, bounds and reads. They come after `allkeys allchannels allcommands`.
    pub fn with_default_rules<W: AsRef<str>>(self, words: &[W]) -> Result<Self, RuleError> {
        if words.is_empty() {
            return Ok(self);
        }
        let wrong = |text: String| RuleError { line: 0, text };
        if self.default_user == DefaultUser::Listed {
            return Err(wrong("the users file has a line for the default user: write these words there".to_owned()));
        }
        let mut default = User::clone(&self.default);
        default.restrict(words).map_err(wrong)?;
        Ok(Self::assemble(self.by_name, default, DefaultUser::OfConfiguration))
    }

    /// The default user.
    pub fn default_user(&self) -> &Arc<User> {
        &self.default
    }

    /// The user of that name.
    pub fn get(&self, name: &[u8]) -> Option<&Arc<User>> {
        self.by_name.get(std::str::from_utf8(name).ok()?)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Arc<User>> {
        self.by_name.values()
    }
}
