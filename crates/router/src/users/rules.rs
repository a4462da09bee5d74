//! The users file: one line for each user, as in Redis's ACL file.
//!
//! ```text
//! # Made by `switchyard hash-password`.
//! user app on $argon2id$v=19$m=19456,t=2,p=1$...$... ~app:* &app:* +@read +@write -@dangerous
//! user reports on $argon2id$... %R~app:* +@read requests-per-second=1000
//! user default off
//! ```
//!
//! The words are Redis's, with exceptions: passwords must be Argon2id hashes (leaked fast hashes are soon passwords),
//! there are no selectors, and no `+select|0`. Additional words are `allscripts`, `operator`, limits and `reads`. All
//! errors are reported with their lines; a file with an error is rejected.

use std::collections::BTreeMap;
use std::fmt;
use std::fmt::Write as _;
use std::sync::Arc;

use argon2::{Algorithm, Params, PasswordHash};
use switchyard_resp::command::{Access, Categories, CommandTable};

use super::{CommandRule, KeyRule, Proof, Subject, User};
use crate::settings::Reads;

/// Maximum users per file, and maximum words per user.
pub(super) const USERS_MAX: usize = 10_000;
pub(super) const WORDS_MAX: usize = 10_000;

/// Maximum cost of a hash, so that a typo in the file does not exhaust memory at the first login.
const HASH_MEMORY_MAX_KIB: u32 = 1 << 20;
const HASH_PASSES_MAX: u32 = 64;

/// An error in a users file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleError {
    /// Line from 1. 0: the whole file.
    pub line: usize,
    /// Problem and remedy.
    pub text: String,
}

impl fmt::Display for RuleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

pub(super) fn parse(text: &str) -> Result<BTreeMap<String, Arc<User>>, Vec<RuleError>> {
    let table = CommandTable::builtin();
    let mut users = BTreeMap::new();
    let mut errors = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let mut words = line.split_whitespace();
        let mut wrong = |text: String| errors.push(RuleError { line: index + 1, text });
        match words.next() {
            None => continue,
            Some(word) if word.starts_with('#') => continue,
            Some(word) if word.eq_ignore_ascii_case("user") => {}
            Some(_) => {
                wrong("a line must start with \"user NAME\" or \"#\"".to_owned());
                continue;
            }
        }
        let Some(name) = words.next() else {
            wrong("\"user\" must be followed by a name".to_owned());
            continue;
        };
        if users.len() >= USERS_MAX || words.clone().count() > WORDS_MAX {
            wrong(format!("more than {USERS_MAX} users, or {WORDS_MAX} words for one"));
            return Err(errors);
        }
        if name.len() > 256 || name.chars().any(char::is_control) {
            wrong("a name has at most 256 characters, none of them a control character".to_owned());
            continue;
        }
        let mut user = User::new(name);
        let before = errors.len();
        for word in words {
            if let Err(text) = user.apply(word, &table) {
                errors.push(RuleError { line: index + 1, text: format!("user {name}: {text}") });
            }
        }
        let wrong = |text: &str| RuleError { line: index + 1, text: format!("user {name}: {text}") };
        if errors.len() == before && user.on && !user.no_password && user.proofs.is_empty() {
            errors.push(wrong(
                "it is on, but no login is possible: add a hash (`switchyard hash-password`), or nopass, or off",
            ));
        }
        user.compile(&table);
        if users.insert(name.to_owned(), Arc::new(user)).is_some() {
            errors.push(wrong("it is defined twice"));
        }
    }
    if errors.is_empty() { Ok(users) } else { Err(errors) }
}

/// Returns the printable part of an unknown word, which may be a misplaced password.
fn printable(word: &str) -> String {
    let start: String = word.chars().take(1).collect();
    if word.chars().all(|c| c.is_ascii_alphanumeric() || "@|+-~%&*:.=_".contains(c)) && word.len() <= 64 {
        format!("\"{word}\"")
    } else {
        format!("a word of {} characters that starts with {start:?}", word.chars().count())
    }
}

// Redis's texts.
const KEYS_AFTER_ALL: &str = "Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not have any effect. Try \
                              'resetkeys' to start with an empty list of patterns";
const CHANNELS_AFTER_ALL: &str = "Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does not have any effect. \
                                  Try 'resetchannels' to start with an empty list of channels";
const UNKNOWN: &str = "Unknown command or category name in ACL";

impl User {
    /// Removes permissions from an unrestricted user. Words about logins are refused.
    pub(super) fn restrict<W: AsRef<str>>(&mut self, words: &[W]) -> Result<(), String> {
        let table = CommandTable::builtin();
        // As for all restricted users.
        self.all_scripts = false;
        for word in words.iter().map(AsRef::as_ref) {
            if matches!(&*word.to_ascii_lowercase(), "on" | "off" | "nopass" | "resetpass" | "reset")
                || word.starts_with('$')
            {
                return Err(format!("{} concerns logins, not permissions", printable(word)));
            }
            self.apply(word, &table)?;
        }
        self.compile(&table);
        Ok(())
    }

    /// Applies one word. Case is ignored as in Redis, except in patterns and hashes.
    pub(super) fn apply(&mut self, word: &str, table: &CommandTable) -> Result<(), String> {
        match &*word.to_ascii_lowercase() {
            "on" => self.on = true,
            "off" => self.on = false,
            "nopass" => {
                self.no_password = true;
                self.proofs.clear();
            }
            "resetpass" => {
                self.no_password = false;
                self.proofs.clear();
            }
            "allkeys" | "~*" => {
                self.all_keys = true;
                self.keys.clear();
            }
            "resetkeys" => {
                self.all_keys = false;
                self.keys.clear();
            }
            "allchannels" | "&*" => {
                self.all_channels = true;
                self.channels.clear();
            }
            "resetchannels" => {
                self.all_channels = false;
                self.channels.clear();
            }
            "allcommands" | "+@all" => self.rules = vec![CommandRule { allow: true, subject: Subject::All }],
            "nocommands" | "-@all" => self.rules = vec![CommandRule { allow: false, subject: Subject::All }],
            "allscripts" => self.all_scripts = true,
            "resetscripts" => self.all_scripts = false,
            "operator" => self.operator = true,
            "nooperator" => self.operator = false,
            "reset" => *self = User::new(&self.name),
            // Concerns RESTORE payloads, which nodes check by their own settings.
            "sanitize-payload" | "skip-sanitize-payload" => {}
            // Selectors are not supported.
            "clearselectors" => {}
            _ => return self.apply_argument(word, table),
        }
        Ok(())
    }

    fn apply_argument(&mut self, word: &str, table: &CommandTable) -> Result<(), String> {
        if let Some(pattern) = word.strip_prefix('~') {
            return self.add_key(Access::RW, pattern);
        }
        if let Some(rest) = word.strip_prefix('%') {
            let (letters, pattern) =
                rest.split_once('~').ok_or_else(|| format!("{} has no ~; as in %R~app:*", printable(word)))?;
            let access = match letters.to_ascii_uppercase().as_str() {
                "R" => Access::R,
                "W" => Access::W,
                "RW" | "WR" => Access::RW,
                _ => return Err(format!("{}: between % and ~ must be R, W or RW", printable(word))),
            };
            return self.add_key(access, pattern);
        }
        if let Some(pattern) = word.strip_prefix('&') {
            if self.all_channels {
                return Err(CHANNELS_AFTER_ALL.to_owned());
            }
            let pattern = pattern.as_bytes().to_vec();
            if !self.channels.contains(&pattern) {
                self.channels.push(pattern);
            }
            return Ok(());
        }
        if let Some((sign @ ('+' | '-'), name)) = word.chars().next().zip(word.get(1..)) {
            let subject = subject(name, table)?;
            // The last rule with the same scope decides, so earlier ones are removed.
            self.rules.retain(|rule| rule.subject != subject);
            self.rules.push(CommandRule { allow: sign == '+', subject });
            return Ok(());
        }
        if word.starts_with('$') {
            check_hash(word)?;
            self.proofs.push(Proof::Hash(word.to_owned()));
            self.no_password = false;
            return Ok(());
        }
        if word.starts_with(['>', '<', '#', '!']) {
            return Err(
                "passwords are stored here only as Argon2id hashes; create one with `switchyard hash-password`"
                    .to_owned(),
            );
        }
        if word.starts_with('(') {
            return Err("selectors are not supported; define a user for each set of rules".to_owned());
        }
        if let Some((name, value)) = word.split_once('=') {
            return self.add_bound(name, value);
        }
        Err(format!("Syntax error: {} is unknown; see docs/security.md for the supported words", printable(word)))
    }

    fn add_key(&mut self, access: Access, pattern: &str) -> Result<(), String> {
        if self.all_keys {
            return Err(KEYS_AFTER_ALL.to_owned());
        }
        if access == Access::RW && pattern == "*" {
            self.all_keys = true;
            self.keys.clear();
            return Ok(());
        }
        let rule = KeyRule { access, pattern: pattern.as_bytes().to_vec() };
        if !self.keys.contains(&rule) {
            self.keys.push(rule);
        }
        Ok(())
    }

    fn add_bound(&mut self, name: &str, value: &str) -> Result<(), String> {
        let number = |max: u64| match value.parse::<u64>() {
            Ok(number) if (1..=max).contains(&number) => Ok(number),
            _ => Err(format!("{name} must be a whole number from 1 to {max}")),
        };
        match &*name.to_ascii_lowercase() {
            "connections" => self.bounds.connections = Some(number(10_000_000)? as u32),
            "requests-per-second" => self.bounds.requests_per_second = Some(number(100_000_000)? as u32),
            "bytes-in-flight" => self.bounds.bytes_in_flight = Some(number(1 << 50)?),
            "reads" => {
                let reads = Reads::parse(&value.to_ascii_lowercase())
                    .ok_or_else(|| "reads must be primary, prefer-replica, replica or nearest".to_owned())?;
                self.reads = Some(reads);
            }
            _ => {
                let there_are = "connections=, requests-per-second=, bytes-in-flight= and reads=";
                return Err(format!("{} is unknown; supported: {there_are}", printable(name)));
            }
        }
        Ok(())
    }

    /// Returns the user as a line of the file. `hashes`: include password hashes instead of placeholders.
    pub(crate) fn line(&self, hashes: bool) -> String {
        let mut line = format!("user {} {}", self.name, if self.on { "on" } else { "off" });
        if self.no_password {
            line.push_str(" nopass");
        }
        for proof in &self.proofs {
            match proof {
                Proof::Hash(hash) if hashes => {
                    line.push(' ');
                    line.push_str(hash);
                }
                _ => line.push_str(" #hidden"),
            }
        }
        for part in [self.describe_keys(), self.describe_channels(), self.describe_commands()] {
            if !part.is_empty() {
                line.push(' ');
                line.push_str(&part);
            }
        }
        line.push_str(&self.describe_rest());
        line
    }

    pub(crate) fn flags(&self) -> Vec<&'static str> {
        let mut flags = vec![if self.on { "on" } else { "off" }];
        if self.no_password {
            flags.push("nopass");
        }
        if self.all_scripts && !self.is_unrestricted() {
            flags.push("allscripts");
        }
        if self.operator {
            flags.push("operator");
        }
        flags
    }

    pub(crate) fn passwords(&self) -> usize {
        self.proofs.len()
    }

    pub(crate) fn describe_keys(&self) -> String {
        if self.all_keys {
            return "~*".to_owned();
        }
        let one = |rule: &KeyRule| {
            let pattern = String::from_utf8_lossy(&rule.pattern).into_owned();
            match rule.access {
                Access::R => format!("%R~{pattern}"),
                Access::W => format!("%W~{pattern}"),
                _ => format!("~{pattern}"),
            }
        };
        self.keys.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    pub(crate) fn describe_channels(&self) -> String {
        if self.all_channels {
            return "&*".to_owned();
        }
        self.channels
            .iter()
            .map(|pattern| format!("&{}", String::from_utf8_lossy(pattern)))
            .collect::<Vec<_>>()
            .join(" ")
    }

    pub(crate) fn describe_commands(&self) -> String {
        let mut text = String::new();
        if self.rules.first().is_none_or(|rule| rule.subject != Subject::All) {
            text.push_str("-@all");
        }
        for rule in &self.rules {
            let sign = if rule.allow { '+' } else { '-' };
            let gap = if text.is_empty() { "" } else { " " };
            let _ = match &rule.subject {
                Subject::All => write!(text, "{gap}{sign}@all"),
                Subject::Category(_, name) => write!(text, "{gap}{sign}@{name}"),
                Subject::Command(name) => write!(text, "{gap}{sign}{}", name.to_ascii_lowercase()),
            };
        }
        text
    }

    fn describe_rest(&self) -> String {
        let mut text = String::new();
        if self.all_scripts && !self.is_unrestricted() {
            text.push_str(" allscripts");
        }
        if self.operator {
            text.push_str(" operator");
        }
        let bounds = &self.bounds;
        let numbers = [
            ("connections", bounds.connections.map(u64::from)),
            ("requests-per-second", bounds.requests_per_second.map(u64::from)),
            ("bytes-in-flight", bounds.bytes_in_flight),
        ];
        for (name, value) in numbers {
            if let Some(value) = value {
                let _ = write!(text, " {name}={value}");
            }
        }
        if let Some(reads) = self.reads {
            let _ = write!(text, " reads={}", reads.name());
        }
        text
    }
}

fn subject(name: &str, table: &CommandTable) -> Result<Subject, String> {
    if let Some(category) = name.strip_prefix('@') {
        let category = category.to_ascii_lowercase();
        if category == "all" {
            return Ok(Subject::All);
        }
        let Some(categories) = Categories::named(&category) else {
            return Err(format!("{UNKNOWN}: there is no category {}; `ACL CAT` lists them", printable(&category)));
        };
        return Ok(Subject::Category(categories, category));
    }
    let upper = name.to_ascii_uppercase();
    let known = table.by_name(&upper).is_some();
    if known && upper.matches('|').count() <= 1 {
        return Ok(Subject::Command(upper));
    }
    if let Some((container, _)) = upper.split_once('|')
        && let Some(container) = table.by_name(container)
    {
        let why = if container.is_container() {
            "there is no such subcommand"
        } else {
            "rules for first arguments are not supported"
        };
        return Err(format!("{UNKNOWN}: {}: {why}", printable(name)));
    }
    // Commands of modules are unknown until a node with the module connects.
    if upper.contains('.') && upper.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(Subject::Command(upper));
    }
    Err(format!("{UNKNOWN}: there is no command {}", printable(name)))
}

/// Checks that a hash is valid and not too expensive.
fn check_hash(text: &str) -> Result<(), String> {
    let wrong =
        |why: &str| Err(format!("unusable Argon2id hash after $ ({why}); create one with `switchyard hash-password`"));
    let Ok(hash) = PasswordHash::new(text) else { return wrong("it is not in PHC form") };
    if Algorithm::try_from(hash.algorithm) != Ok(Algorithm::Argon2id) {
        return wrong("another algorithm");
    }
    if hash.hash.is_none_or(|output| output.len() < 16) || hash.salt.is_none() {
        return wrong("it has no salt or its output is too short");
    }
    match Params::try_from(&hash) {
        Ok(params) if params.m_cost() > HASH_MEMORY_MAX_KIB || params.t_cost() > HASH_PASSES_MAX => {
            wrong("its cost is too high")
        }
        Ok(_) => Ok(()),
        Err(_) => wrong("its parameters are wrong"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::users::Users;

    const HASH: &str = "$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$hT8BYdwmuT0jKRGUPmXFMA";

    fn one(rules: &str) -> Result<Arc<User>, String> {
        let users = parse(&format!("user u {rules}")).map_err(|errors| errors[0].to_string())?;
        Ok(users["u"].clone())
    }

    #[test]
    fn displayed_users_parse_to_the_same_rules() {
        for rules in [
            "off -@all",
            "on nopass ~* &* +@all allscripts",
            "on nopass ~app:* %R~shared:* %W~log &chan* -@all +@read +set +config|get -mget",
            "on nopass -@all +@write connections=3 requests-per-second=100 bytes-in-flight=1000000",
        ] {
            let user = one(rules).expect(rules);
            let shown = user.line(false);
            assert_eq!(*parse(&shown).expect("again")["u"], *user, "{shown}");
        }
        let user = one(&format!("on {HASH} +@all ~*")).expect("good");
        assert!(user.line(false).contains("#hidden") && !user.line(false).contains("argon2id"));
        assert_eq!(one("on nopass ~* &* +@all").expect("good").line(false), "user u on nopass ~* &* +@all");
    }

    #[test]
    fn words_are_case_insensitive() {
        let mixed = "USER App ON NoPass RESETKEYS %r~Data:* ~CACHE:* ALLCHANNELS +@ALL -@Dangerous +Config|GET ALLSCRIPTS Connections=3 READS=Nearest";
        let users = parse(mixed).expect("read");
        let line = "user App on nopass %R~Data:* ~CACHE:* &* +@all -@dangerous +config|get allscripts connections=3 reads=nearest";
        assert_eq!(users["App"].line(false), line, "names of users and patterns keep their case");
        assert!(one("OFF NOCOMMANDS ALLKEYS RESETPASS SANITIZE-PAYLOAD CLEARSELECTORS RESET OPERATOR NOOPERATOR RESETSCRIPTS").is_ok());
        assert!(
            Users::default().with_default_rules(&["NOPASS"]).expect_err("refused").text.contains("concerns logins")
        );
    }

    #[test]
    fn errors_are_reported_with_their_line() {
        for (rules, expected) in [
            ("on", "no login is possible"),
            ("on >secret", "Argon2id"),
            ("on #9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "Argon2id"),
            ("on $argon2i$v=19$m=8,t=1,p=1$c2FsdHNhbHQ$hT8BYdwmuT0jKRGUPmXFMA", "another algorithm"),
            ("on $argon2id$v=19$m=9999999,t=1,p=1$c2FsdHNhbHQ$hT8BYdwmuT0jKRGUPmXFMA", "cost is too high"),
            ("on $nonsense", "another algorithm"),
            ("off +gett", "there is no command \"gett\""),
            ("off +@reads", "there is no category"),
            ("off reads=slave", "prefer-replica"),
            ("off +config|gett", "no such subcommand"),
            ("off +select|0", "first arguments"),
            ("off (+get ~a)", "selectors"),
            ("off ~* ~a", "does not have any effect"),
            ("off %X~a", "R, W or RW"),
            ("off %R", "has no ~"),
            ("off connections=0", "from 1 to"),
            ("off speed=3", "supported: connections="),
            ("off hunter2!secret", "a word of 14 characters"),
        ] {
            let error = one(rules).expect_err(rules);
            assert!(error.contains(expected), "{rules}: {error}");
        }
        let errors = parse("user a off\n\n# note\nuser a off\nuseless\nuser\n").expect_err("three mistakes");
        assert_eq!(errors.iter().map(|e| e.line).collect::<Vec<_>>(), [4, 5, 6]);
    }

    #[test]
    fn the_last_rule_about_a_command_counts() {
        let table = CommandTable::builtin();
        let may = |user: &User, name: &str| user.may_run(table.by_name(name).expect(name));
        let user = one("off +@all -@dangerous +keys -config +config|get").expect("good");
        for (name, allowed) in
            [("GET", true), ("FLUSHALL", false), ("KEYS", true), ("CONFIG|GET", true), ("CONFIG|RESETSTAT", false)]
        {
            assert_eq!(may(&user, name), allowed, "{name}");
        }
        assert!(!user.is_unrestricted());
        let user = one("off +client -client|kill").expect("good");
        assert!(may(&user, "CLIENT|LIST") && !may(&user, "CLIENT|KILL") && !may(&user, "GET"));
        assert!(one("off -get +@all allkeys allchannels").expect("good").is_unrestricted());
        assert!(one("off +json.get").is_ok(), "a module's command");
    }

    #[test]
    fn default_user_is_enabled_only_if_configured() {
        let secret = crate::settings::Secret("pw".into());
        assert!(Users::default().default_user().is_open());
        assert!(!Users::without_file(Some(&secret)).default_user().is_open());
        let users = Users::from_file("user a off", None).expect("good");
        assert!(!users.default_user().is_on());
        assert!(Users::from_file("user a off", Some(&secret)).expect("good").default_user().is_on());
        assert!(Users::from_file("user default on nopass ~* +@read", None).expect("good").default_user().is_open());
        assert!(Users::from_file("user default on nopass", Some(&secret)).is_err());
    }

    #[test]
    fn default_user_can_be_restricted() {
        let users = Users::default()
            .with_default_rules(&["-@dangerous", "+info", "resetkeys", "%R~a*", "connections=3"])
            .expect("good");
        assert_eq!(
            users.default_user().line(false),
            "user default on nopass %R~a* &* +@all -@dangerous +info connections=3"
        );
        assert!(!users.default_user().is_unrestricted() && users.default_user().is_open());
        assert_eq!(Users::default().with_default_rules::<&str>(&[]).expect("good"), Users::default());
        let bounded = Users::default().with_default_rules(&["connections=3"]).expect("good");
        assert!(bounded.default_user().is_unrestricted());
        for (word, says) in [
            ("off", "concerns logins"),
            ("nopass", "concerns logins"),
            ("-@nothing", "no category"),
            (">pw", "hash-password"),
        ] {
            let error = Users::default().with_default_rules(&[word]).expect_err(word);
            assert!(error.text.contains(says), "{word}: {error}");
        }
        let listed = Users::from_file("user default on nopass ~* +@read", None).expect("good");
        assert!(listed.with_default_rules(&["-get"]).is_err());
        let others = Users::from_file("user a off", None).expect("good").with_default_rules(&["-get"]).expect("good");
        assert!(!others.default_user().is_on(), "rules do not enable the user");
    }

    proptest! {
        #[test]
        fn any_text_parses_without_panic_and_roundtrips(text in "(user [a-c]{1,2}( (on|off|nopass|~[a-z*]{0,3}|%[RW]{0,2}~a|&c|[+-]@?[a-z|]{0,8}|[+-]@(read|all|write)|reset|\\$argon2id\\$|[\\PC]{0,6}|allkeys|resetkeys)){0,6}\n?){0,4}") {
            if let Ok(users) = parse(&text) {
                for user in users.values() {
                    let again = parse(&user.line(false)).expect("displayed users parse");
                    prop_assert_eq!(again.values().next().expect("one").line(false), user.line(false));
                }
            }
        }

        #[test]
        fn random_text_does_not_panic(text in any::<String>()) {
            let _ = parse(&text);
        }
    }
}
