//! `switchyard hash-password`: prints the hash of a password for the users file.

use std::io::{self, BufRead, IsTerminal, Read, Write};

use anyhow::{Context, bail};
use clap::Args;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use super::Failure;

/// Hash a password for the users file
#[derive(Debug, Args)]
#[command(
    long_about = "Hash a password for the users file.\n\n\
        Reads the password from the terminal without showing it, or one line from stdin, and prints its Argon2id hash. The password is \
        not an argument, because all users of the machine could see it in the list of processes.",
    after_long_help = "Examples:\n  \
        switchyard hash-password                                prompt for it\n  \
        openssl rand -hex 32 | tee secret | switchyard hash-password\n\n\
        A line of the users file:\n  \
        user app on $argon2id$v=19$m=19456,t=2,p=1$... ~app:* +@read +@write -@dangerous"
)]
pub(crate) struct Arguments {}

/// Maximum length of a password in bytes: Redis refuses arguments of more than 16 KB before a login.
const PASSWORD_MAX: usize = 16 * 1024;

pub(super) fn run(_: &Arguments) -> Result<(), Failure> {
    let password = if io::stdin().is_terminal() { prompt()? } else { one_line(io::stdin().lock())? };
    println!("{}", hash(&password)?);
    Ok(())
}

/// Returns the hash with a fresh salt, in the syntax of the users file.
fn hash(password: &str) -> anyhow::Result<String> {
    if password.is_empty() {
        bail!("the password is empty");
    }
    switchyard_router::hash_password(password.as_bytes()).context("no random bytes are available")
}

fn one_line(input: impl BufRead) -> anyhow::Result<String> {
    let mut text = String::new();
    input.take(PASSWORD_MAX as u64 + 2).read_to_string(&mut text).context("cannot read the password from stdin")?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let line = line.strip_suffix('\r').unwrap_or(line);
    if line.len() > PASSWORD_MAX || line.contains('\n') {
        bail!("expected one line of at most {PASSWORD_MAX} bytes on stdin");
    }
    Ok(line.to_owned())
}

/// Prompts twice without echo.
fn prompt() -> anyhow::Result<String> {
    let before = tcgetattr(io::stdin()).context("cannot read the terminal settings")?;
    let mut hidden = before.clone();
    hidden.local_modes.remove(LocalModes::ECHO);
    hidden.local_modes.insert(LocalModes::ECHONL);
    tcsetattr(io::stdin(), OptionalActions::Flush, &hidden).context("cannot disable the echo of the terminal")?;
    let asked = (|| {
        let mut answers = [String::new(), String::new()];
        for (answer, prompt) in answers.iter_mut().zip(["Password: ", "Again: "]) {
            eprint!("{prompt}");
            io::stderr().flush()?;
            io::stdin().lock().read_line(answer)?;
        }
        Ok::<_, io::Error>(answers)
    })();
    tcsetattr(io::stdin(), OptionalActions::Flush, &before).context("cannot enable the echo of the terminal")?;
    let [first, second] = asked.context("cannot read the password")?;
    if first != second {
        bail!("the passwords differ; type the same password twice");
    }
    Ok(first.trim_end_matches(['\r', '\n']).to_owned())
}

#[cfg(test)]
mod tests {
    use argon2::{Argon2, PasswordHash, PasswordVerifier};

    use super::*;

    #[test]
    fn hashes_verify_and_never_repeat() {
        let (first, second) = (hash("s3cret").expect("hashes"), hash("s3cret").expect("hashes"));
        assert_ne!(first, second);
        let parsed = PasswordHash::new(&first).expect("PHC");
        assert!(Argon2::default().verify_password(b"s3cret", &parsed).is_ok());
        assert!(Argon2::default().verify_password(b"s3crets", &parsed).is_err());
        assert!(switchyard_router::Users::from_file(&format!("user u on {first}"), None).is_ok());
        assert!(hash("").is_err());
    }

    #[test]
    fn one_line_is_read() {
        assert_eq!(one_line(&b"a b \n"[..]).expect("good"), "a b ");
        assert_eq!(one_line(&b"a\r\n"[..]).expect("good"), "a");
        assert!(one_line(&b"a\nb\n"[..]).is_err());
    }
}
