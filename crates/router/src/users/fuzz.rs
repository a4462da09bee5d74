//! Fuzz target: any text as a users file, and its words as `ACL SETUSER`.

use std::sync::LazyLock;

use super::{DEFAULT, Users, rules};
use switchyard_resp::command::CommandTable;

static TABLE: LazyLock<CommandTable> = LazyLock::new(CommandTable::builtin);

/// Checks that errors have lines of the file, that displayed users are parsed again with the same rights, and that
/// `ACL SETUSER` makes the same user of the same words.
///
/// # Panics
/// If one of these is wrong.
pub fn acl(input: &[u8]) {
    // The reader of the file refuses other bytes.
    let Ok(text) = std::str::from_utf8(input) else { return };
    let users = match rules::parse(text) {
        Ok(users) => users,
        Err(errors) => {
            assert!(!errors.is_empty());
            for error in errors {
                assert!(error.line > 0 && error.line <= text.lines().count());
                assert!(!error.text.contains(char::is_control), "an error of more than one line: {:?}", error.text);
            }
            return;
        }
    };
    for (name, user) in &users {
        let line = user.line(true);
        let again = rules::parse(&line).unwrap_or_else(|errors| panic!("{line}: {errors:?}"));
        assert_eq!(again.keys().collect::<Vec<_>>(), [name]);
        let again = &again[name];
        assert_eq!(again.line(true), line);
        for command in TABLE.iter() {
            assert_eq!(again.may_run(command), user.may_run(command), "{} of {line}", command.name);
        }
        let rights = |user: &super::User| (user.all_keys, user.keys.clone(), user.all_channels, user.channels.clone());
        assert_eq!(rights(again), rights(user), "{line}");
        if !user.line(false).contains("#hidden") {
            assert!(rules::parse(&user.line(false)).is_ok(), "without passwords: {line}");
        }
    }
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), Some(name)) = (words.next(), words.next()) else { continue };
        // A file may have a NUL in a pattern, a command may not.
        if first.starts_with('#') || name == DEFAULT || line.contains('\0') {
            continue;
        }
        let words: Vec<&str> = words.collect();
        let changed = Users::default().with_changed(name, &words).unwrap_or_else(|error| panic!("{line}: {error}"));
        let changed = changed.get(name.as_bytes()).expect("the changed user");
        assert_eq!(changed.line(true), users[name].line(true));
    }
}
