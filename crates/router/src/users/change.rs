//! Changes of users at run time: `ACL SETUSER`, `DELUSER`, and saving them in the users file.
//!
//! Hashes and compares passwords, which takes long. Call it from a thread that may block, not from a worker.

use std::collections::BTreeSet;
use std::sync::Arc;

use argon2::password_hash::SaltString;
use argon2::{Argon2, PasswordHash, PasswordHasher, PasswordVerifier};
use switchyard_resp::command::CommandTable;

use super::login::PASSWORD_MAX;
use super::{DEFAULT, DefaultUser, Proof, User, Users, rules};
use crate::settings::Secret;

/// Maximum passwords per user. A wrong password is compared with all of them, which is expensive.
const PASSWORDS_MAX: usize = 10;

/// Returns the Argon2id hash of a password with a new salt, in the format of the users file. Uses 19 MiB and two
/// passes, as OWASP recommends for servers with many logins. `None` if the system has no random bytes.
pub fn hash_password(password: &[u8]) -> Option<String> {
    let mut salt = [0; 16];
    rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut salt).ok()?;
    let salt = SaltString::encode_b64(&salt).ok()?;
    Argon2::default().hash_password(password, &salt).ok().map(|hash| hash.to_string())
}

impl Proof {
    fn fits(&self, password: &str) -> bool {
        match self {
            Proof::Clear(Secret(clear)) => clear == password,
            Proof::Hash(hash) => PasswordHash::new(hash)
                .is_ok_and(|hash| Argon2::default().verify_password(password.as_bytes(), &hash).is_ok()),
        }
    }
}

impl User {
    /// Applies one word of `ACL SETUSER`: the words of the users file, and plain-text passwords.
    fn change(&mut self, word: &str, table: &CommandTable) -> Result<(), String> {
        if word.contains(|c: char| c.is_whitespace() || c == '\0') {
            return Err("Syntax error: a word cannot contain spaces".to_owned());
        }
        if let Some(password) = word.strip_prefix('>') {
            if password.len() > PASSWORD_MAX {
                return Err(format!("a password has at most {PASSWORD_MAX} bytes"));
            }
            if !self.proofs.iter().any(|proof| proof.fits(password)) {
                if self.proofs.len() >= PASSWORDS_MAX {
                    return Err(format!("a user has at most {PASSWORDS_MAX} passwords; resetpass removes them"));
                }
                self.proofs
                    .push(Proof::Hash(hash_password(password.as_bytes()).ok_or("the system has no random bytes")?));
            }
            self.no_password = false;
            return Ok(());
        }
        if let Some(password) = word.strip_prefix('<') {
            let before = self.proofs.len();
            self.proofs.retain(|proof| !proof.fits(password));
            if self.proofs.len() == before {
                return Err("The password you are trying to remove from the user does not exist".to_owned());
            }
            return Ok(());
        }
        if word.starts_with(['#', '!']) {
            return Err(
                "SHA-256 hashes are refused, as a leaked one is easy to crack: give the password (>password), which is stored as an \
                        Argon2id hash, or an Argon2id hash ($argon2id$...)"
                    .to_owned(),
            );
        }
        self.apply(word, table)
    }
}

impl Users {
    /// Returns the users after `ACL SETUSER name words...`. Applies all words or none.
    ///
    /// # Errors
    /// An error reply for the client.
    pub fn with_changed<W: AsRef<str>>(&self, name: &str, words: &[W]) -> Result<Self, String> {
        if name.is_empty() || name.len() > 256 || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
            return Err("ERR Usernames can't contain spaces or null characters, and have 1 to 256 bytes".to_owned());
        }
        if name == DEFAULT && self.default_user == DefaultUser::Configured {
            return Err(
                "ERR the default user is defined in the configuration (password and default-user-rules in [clients]), not in the users \
                        file: change it there, and send SIGHUP"
                    .to_owned(),
            );
        }
        if !self.by_name.contains_key(name) && self.by_name.len() >= rules::USERS_MAX {
            return Err(format!("ERR there are {} users already, the maximum", rules::USERS_MAX));
        }
        if words.len() > rules::WORDS_MAX {
            return Err(format!("ERR more than {} words about one user", rules::WORDS_MAX));
        }
        let table = CommandTable::builtin();
        let mut user = self.by_name.get(name).map_or_else(|| User::new(name), |user| User::clone(user));
        if user.is_unrestricted() {
            // Unrestricted users may run scripts. `compile` sets this again if the user stays unrestricted.
            user.all_scripts = false;
        }
        for word in words.iter().map(AsRef::as_ref) {
            user.change(word, &table)
                .map_err(|why| format!("ERR Error in ACL SETUSER modifier '{}': {why}", redacted(word)))?;
        }
        if user.rules.len() + user.keys.len() + user.channels.len() > rules::WORDS_MAX {
            return Err(format!("ERR more than {} rules about one user", rules::WORDS_MAX));
        }
        user.compile(&table);
        let mut users = self.clone();
        users.put(user);
        Ok(users)
    }

    /// Returns the users without these names, and how many of them existed.
    ///
    /// # Errors
    /// If one of them is the default user.
    pub fn without<N: AsRef<str>>(&self, names: &[N]) -> Result<(Self, usize), String> {
        if names.iter().any(|name| name.as_ref() == DEFAULT) {
            return Err("ERR The 'default' user cannot be removed".to_owned());
        }
        let mut users = self.clone();
        let gone = names.iter().filter(|name| users.by_name.remove(name.as_ref()).is_some()).count();
        Ok((users, gone))
    }

    fn put(&mut self, user: User) {
        let user = Arc::new(user);
        if user.name() == DEFAULT {
            self.default = user.clone();
            self.default_user = DefaultUser::Listed;
        }
        self.by_name.insert(user.name().to_owned(), user);
    }

    /// Returns the text of a users file with these users. Retains comments, order, and lines of unchanged users from
    /// `old`.
    ///
    /// # Errors
    /// If the file would be rejected because of a user.
    pub fn written_over(&self, old: &str) -> Result<String, String> {
        let is_locked = |user: &&Arc<User>| user.on && !user.no_password && user.proofs.is_empty();
        if let Some(user) = self.by_name.values().find(is_locked) {
            return Err(format!("ERR the user {} is on and has no password: add one, nopass or off", user.name()));
        }
        let mut text = String::new();
        let mut written = BTreeSet::new();
        for line in old.lines() {
            let mut words = line.split_whitespace();
            let name = words.next().filter(|word| word.eq_ignore_ascii_case("user")).and_then(|_| words.next());
            let kept = match name.map(|name| (name, self.by_name.get(name))) {
                None => line.to_owned(),
                Some((name, Some(user))) if written.insert(name) => {
                    let same = rules::parse(line)
                        .is_ok_and(|users| users.get(name).is_some_and(|old| old.line(true) == user.line(true)));
                    if same { line.to_owned() } else { user.line(true) }
                }
                Some(_) => continue,
            };
            text.push_str(&kept);
            text.push('\n');
        }
        for user in self.by_name.values().filter(|user| !written.contains(user.name())) {
            if user.name() != DEFAULT || self.default_user == DefaultUser::Listed {
                text.push_str(&user.line(true));
                text.push('\n');
            }
        }
        Ok(text)
    }
}

/// Returns a word without secrets, for error replies and logs.
fn redacted(word: &str) -> String {
    match word.chars().next() {
        Some(sign @ ('>' | '<' | '#' | '!' | '$')) => format!("{sign}..."),
        _ => word.chars().take(64).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setuser_follows_redis_and_applies_all_words_or_none() {
        let users = Users::default();
        let users = users
            .with_changed("app", &["on", ">one", ">one", ">two", "~a:*", "+@read", "-@dangerous", "+get", "-get"])
            .expect("taken");
        let app = users.get(b"app").expect("there");
        assert_eq!(app.line(false), "user app on #hidden #hidden ~a:* -@all +@read -@dangerous -get");
        assert!(app.line(true).matches("$argon2id$").count() == 2 && !app.line(true).contains("one"));
        let users = users.with_changed("app", &["<one"]).expect("taken");
        assert_eq!(users.get(b"app").expect("there").passwords(), 1);
        for (words, why) in [
            (
                &["off", "+nothing"][..],
                "ERR Error in ACL SETUSER modifier '+nothing': Unknown command or category name in ACL",
            ),
            (
                &["off", "+@nothing"],
                "ERR Error in ACL SETUSER modifier '+@nothing': Unknown command or category name in ACL",
            ),
            (&["off", "gibberish"], "ERR Error in ACL SETUSER modifier 'gibberish': Syntax error"),
            (&["off", "~*", "~b"], "ERR Error in ACL SETUSER modifier '~b': Adding a pattern after the * pattern"),
            (&["off", "<three"], "ERR Error in ACL SETUSER modifier '<...': The password you are trying to remove"),
            (&["off", "#abc"], "ERR Error in ACL SETUSER modifier '#...': SHA-256"),
            (&["off", "(~a +get)"], "ERR Error in ACL SETUSER modifier '(~a +get)': Syntax error"),
            (&["off", "(+get)"], "ERR Error in ACL SETUSER modifier '(+get)': selectors"),
            (&["off", "~a b"], "ERR Error in ACL SETUSER modifier '~a b': Syntax error"),
            (&["off", "~a\nuser evil on nopass"], "ERR Error"),
        ] {
            let error = users.with_changed("app", words).expect_err("refused");
            assert!(error.starts_with(why), "{words:?}: {error}");
        }
        for name in ["", "a b", "a\nuser b on nopass", "\0"] {
            users.with_changed::<&str>(name, &[]).expect_err("no name");
        }
        assert!(users.get(b"app").expect("there").is_on());
        let many: Vec<String> =
            (0..=PASSWORDS_MAX).map(|n| format!("$argon2id$v=19$m=8,t=1,p=1$c2FsdHNhbHQ${n:043}")).collect();
        let _ = users.with_changed("app", &many);
        assert!(users.without(&["default"]).is_err());
        let (users, gone) = users.without(&["app", "nobody"]).expect("taken");
        assert!(gone == 1 && users.get(b"app").is_none());
    }

    /// Rights implied by unrestricted access end with it.
    #[test]
    fn users_restricted_later_may_not_run_scripts() {
        let users = Users::default().with_changed("app", &["on", "nopass", "~*", "&*", "+@all"]).expect("taken");
        assert!(users.get(b"app").expect("there").is_unrestricted());
        let users = users.with_changed("app", &["-flushall"]).expect("taken");
        let app = users.get(b"app").expect("there");
        assert!(!app.all_scripts && !app.line(false).contains("allscripts") && !app.is_operator());
        let users = users
            .with_changed("app", &["allscripts", "-get"])
            .expect("taken")
            .with_changed("app", &["-set"])
            .expect("taken");
        assert!(users.get(b"app").expect("there").all_scripts);
    }

    #[test]
    fn written_users_files_roundtrip_and_keep_comments() {
        let old =
            "# who made it\nuser  app   on nopass ~a:*   +@all\n\n# gone soon\nuser gone off\nuser changed on nopass\n";
        let users = Users::from_file(old, None).expect("good");
        let (users, _) = users.without(&["gone"]).expect("taken");
        let users = users.with_changed("changed", &["+get", "operator"]).expect("taken");
        let users = users.with_changed("new", &["on", ">pw", "reads=nearest", "connections=3"]).expect("taken");
        let text = users.written_over(old).expect("can be written");
        assert!(text.starts_with("# who made it\nuser  app   on nopass ~a:*   +@all\n\n# gone soon\nuser changed on nopass -@all +get operator\nuser new on $argon2id$"), "{text}");
        assert!(!text.contains("user gone") && !text.contains("user default"), "{text}");
        let again = Users::from_file(&text, None).expect("it is taken");
        let lines = |users: &Users| users.iter().map(|user| user.line(true)).collect::<Vec<_>>();
        assert_eq!(lines(&again), lines(&users));
        // The file has a line for the default user after a change.
        let users = again.with_changed("default", &["on", "nopass", "+ping"]).expect("taken");
        assert!(users.written_over(&text).expect("written").contains("user default on nopass -@all +ping\n"));
        let fixed = Users::from_file(old, Some(&Secret("pw".to_owned()))).expect("good");
        assert!(fixed.with_changed("default", &["off"]).expect_err("refused").contains("configuration"));
        let locked = users.with_changed("locked", &["on"]).expect("taken");
        assert!(locked.written_over("").expect_err("refused").contains("locked"));
    }
}
