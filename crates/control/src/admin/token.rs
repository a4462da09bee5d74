//! The admin port's token: configured, or generated at start and stored in a file that only its owner can read.
//!
//! A user who can read that file may make changes. The port itself names the file to the command line, so operators
//! need not type the token. But the listener may be a stranger, so the command line never sends the token: it *proves*
//! possession by a keyed hash of the request and the address. A stranger who listens at that address learns nothing
//! usable elsewhere, and sees no file's content, whichever file it names.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::hint::black_box;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use blake2::Blake2bMac;
use blake2::digest::consts::U32;
use blake2::digest::{FixedOutput, KeyInit, Update};

/// File name within the state directory.
const FILE: &str = "admin-token";

/// Prefix of generated tokens, so that no other file is mistaken for one.
const PREFIX: &str = "switchyard-";
const RANDOM_BYTES: usize = 24;

/// Validity of a proof, in milliseconds. Each proof is valid once.
const PROOF_MS: u64 = 30_000;

/// Scheme of a proof in the `Authorization` header.
pub(super) const SCHEME: &str = "Switchyard-Proof ";

/// Bearer token that requests must carry. `Debug` prints asterisks.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Creates a token. `None` unless the text fits in a header: visible ASCII, at least one character.
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        let fits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
        fits.then(|| Self(text.to_owned()))
    }

    /// Whether the bytes equal the token. The comparison takes constant time for a given length; the length is no
    /// secret.
    pub(super) fn is(&self, given: &[u8]) -> bool {
        constant_time_eq(given, self.0.as_bytes())
    }

    /// Returns the proof, for the `Authorization` header, that the sender of this request to this address has the
    /// token.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn prove(&self, to: SocketAddr, method: &str, path: &str, body: &[u8]) -> io::Result<String> {
        let (now, nonce) = (now_ms(), hex::encode(random::<8>()?));
        let mac =
            self.mac(to, &[now.to_string().as_bytes(), nonce.as_bytes(), method.as_bytes(), path.as_bytes(), body]);
        let mac = mac.ok_or_else(|| io::Error::other("the token is too long"))?;
        Ok(format!("{SCHEME}{now}.{nonce}.{}", hex::encode(mac)))
    }

    /// `None` if the token is too long for a key. Generated tokens never are.
    fn mac(&self, to: SocketAddr, parts: &[&[u8]]) -> Option<[u8; 32]> {
        let mut mac = <Blake2bMac<U32> as KeyInit>::new_from_slice(self.0.as_bytes()).ok()?;
        for part in [to.to_string().as_bytes()].iter().chain(parts) {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        Some(mac.finalize_fixed().into())
    }

    /// Generates a token and writes it to the state directory, readable by its owner only. Replaces an earlier token.
    ///
    /// # Errors
    /// I/O errors.
    pub fn make(state_dir: &Path) -> io::Result<(Self, PathBuf)> {
        let token = Self(format!("{PREFIX}{}", hex::encode(random::<RANDOM_BYTES>()?)));
        let dir = fs::canonicalize(state_dir)?;
        let (path, fresh) = (dir.join(FILE), dir.join(format!("{FILE}.new")));
        match fs::remove_file(&fresh) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh)?;
        writeln!(file, "{}", token.0)?;
        // Replaces whatever exists at this path, including a link, without following it.
        fs::rename(&fresh, &path)?;
        Ok((token, path))
    }

    /// Returns the token of an earlier start, for use if none can be written, for example because the disk is full.
    ///
    /// # Errors
    /// If there is no usable token.
    pub fn load_existing(state_dir: &Path) -> io::Result<(Self, PathBuf)> {
        let path = fs::canonicalize(state_dir)?.join(FILE);
        Ok((Self::find(&path)?, path))
    }

    /// Reads a token from the file that an admin port named. The port may be a stranger's, so this opens only files
    /// that belong to this user or root and that no other user can read, and accepts only tokens made by
    /// [`Token::make`].
    ///
    /// # Errors
    /// If the file is refused or contains no token.
    pub fn find(path: &Path) -> io::Result<Self> {
        let wrong = |why: &str| io::Error::other(why.to_owned());
        let me = rustix::process::geteuid().as_raw();
        let is_fit = |meta: &fs::Metadata| match () {
            () if !meta.is_file() => Err(wrong("it is not a regular file")),
            () if me != 0 && meta.uid() != me && meta.uid() != 0 => Err(wrong("it belongs to another user")),
            () if meta.mode() & 0o077 != 0 => Err(wrong("others than its owner can read it")),
            () => Ok(()),
        };
        if !path.is_absolute() {
            return Err(wrong("its path is not absolute"));
        }
        is_fit(&fs::symlink_metadata(path)?)?;
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
        is_fit(&file.metadata()?)?;
        let mut text = Vec::new();
        file.take(256).read_to_end(&mut text)?;
        let token = std::str::from_utf8(&text).ok().and_then(|text| text.strip_suffix('\n'));
        let is_made = |text: &&str| {
            let random = text.strip_prefix(PREFIX).unwrap_or_default();
            random.len() == 2 * RANDOM_BYTES && random.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        token
            .filter(is_made)
            .map(|text| Self(text.to_owned()))
            .ok_or_else(|| wrong("it holds no token made by Switchyard"))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Access rights at the admin port.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Access {
    /// A configured token, required for every request except health checks.
    Given(Token),
    /// A generated token, required for changes. Reading needs no token, because the port is on loopback.
    Made {
        /// Token stored in `file`.
        token: Token,
        /// File that contains the token.
        file: PathBuf,
    },
    /// No token, because none could be written. Reading needs no token, because the port is on loopback; changes are
    /// refused.
    ReadOnly {
        /// Reason and remedy.
        why: String,
    },
}

/// Current access rights. Clones share them, so the owner of a clone can change them.
#[derive(Clone, Debug)]
pub struct AdminAccess(Arc<RwLock<Arc<Access>>>);

impl AdminAccess {
    /// Creates the handle.
    #[must_use]
    pub fn new(access: Access) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(access))))
    }

    /// Replaces the access rights for later requests.
    pub fn renew(&self, access: Access) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(access);
    }

    /// Current access rights.
    #[must_use]
    pub fn now(&self) -> Arc<Access> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Accepted proofs that have not expired.
#[derive(Debug, Default)]
pub(super) struct Proofs(Mutex<HashMap<[u8; 32], u64>>);

impl Proofs {
    /// Whether `proof` (the part after the scheme) proves that the sender has the token, and has not been used before.
    pub(super) fn accept(
        &self,
        token: &Token,
        to: SocketAddr,
        proof: &str,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> bool {
        let mut parts = proof.trim().split('.');
        let (Some(at), Some(nonce), Some(given), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return false;
        };
        let now = now_ms();
        let Some(at_ms) = at.parse::<u64>().ok().filter(|at| at.abs_diff(now) <= PROOF_MS) else { return false };
        let Some(mac) = token.mac(to, &[at.as_bytes(), nonce.as_bytes(), method.as_bytes(), path.as_bytes(), body])
        else {
            return false;
        };
        if !constant_time_eq(given.as_bytes(), hex::encode(mac).as_bytes()) {
            return false;
        }
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        used.retain(|_, at| at.abs_diff(now) <= PROOF_MS);
        used.insert(mac, at_ms).is_none()
    }
}

fn constant_time_eq(given: &[u8], expected: &[u8]) -> bool {
    given.len() == expected.len()
        && given.iter().zip(expected).fold(0, |difference, (a, b)| black_box(difference | (a ^ b))) == 0
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn tokens_are_compared_whole() {
        let token = Token::new("secret").expect("a token");
        assert!(token.is(b"secret"));
        for other in ["", "secre", "secret1", "Secret", "secres"] {
            assert!(!token.is(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn tokens_that_do_not_fit_in_a_header_are_refused() {
        for text in ["", "two words", "line\n", "tökén"] {
            assert_eq!(Token::new(text), None, "{text:?}");
        }
        assert_eq!(format!("{:?}", Token::new("secret")), "Some(***)");
    }

    #[test]
    fn tokens_are_regenerated_readable_by_the_owner_only() {
        let dir = tempfile::tempdir().expect("a directory");
        let victim = dir.path().join("victim");
        fs::write(&victim, "as it was").expect("written");
        symlink(&victim, dir.path().join(FILE)).expect("a link");
        let (first, path) = Token::make(dir.path()).expect("made");
        assert_eq!(fs::read_to_string(&victim).expect("read"), "as it was", "a link is replaced, not followed");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
        assert_eq!(Token::find(&path).expect("found"), first);
        let (second, _) = Token::make(dir.path()).expect("made");
        assert_ne!(first, second);
        assert_eq!(Token::load_existing(dir.path()).expect("kept"), (second, path));
        assert!(Token::load_existing(&dir.path().join("elsewhere")).is_err());
    }

    #[test]
    fn no_other_file_is_taken_for_a_token() {
        let dir = tempfile::tempdir().expect("a directory");
        let (_, path) = Token::make(dir.path()).expect("made");
        let refused = |path: &Path| Token::find(path).expect_err("refused").to_string();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("mode");
        assert!(refused(&path).contains("others"));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
        let link = dir.path().join("link");
        symlink(&path, &link).expect("a link");
        assert!(refused(&link).contains("not a regular file"));
        assert!(refused(dir.path()).contains("not a regular file"));
        assert!(refused(Path::new("admin-token")).contains("absolute"));
        let other = dir.path().join("other");
        let made = fs::read_to_string(&path).expect("read");
        for text in [
            "",
            "a password\n",
            &made[..made.len() - 2],
            &made.replace("switchyard", "Switchyard"),
            &format!("{made}more\n"),
        ] {
            fs::write(&other, text).expect("written");
            fs::set_permissions(&other, fs::Permissions::from_mode(0o600)).expect("mode");
            let why = refused(&other);
            assert!(why.contains("holds no token") && !why.contains("password"), "{why}");
        }
    }

    #[test]
    fn a_proof_is_good_once_and_for_one_request_at_one_address() {
        let dir = tempfile::tempdir().expect("a directory");
        let (token, _) = Token::make(dir.path()).expect("made");
        let (other, _) = Token::make(dir.path()).expect("made");
        let proofs = Proofs::default();
        let here = SocketAddr::from(([127, 0, 0, 1], 6381));
        let there = SocketAddr::from(([127, 0, 0, 1], 7381));
        let proof = || token.prove(here, "POST", "/a", b"body").expect("random bytes")[SCHEME.len()..].to_owned();
        assert!(!proofs.accept(&token, there, &proof(), "POST", "/a", b"body"));
        assert!(!proofs.accept(&token, here, &proof(), "POST", "/b", b"body"));
        assert!(!proofs.accept(&token, here, &proof(), "PUT", "/a", b"body"));
        assert!(!proofs.accept(&token, here, &proof(), "POST", "/a", b"Body"));
        assert!(!proofs.accept(&other, here, &proof(), "POST", "/a", b"body"));
        let once = proof();
        assert!(proofs.accept(&token, here, &once, "POST", "/a", b"body"));
        assert!(!proofs.accept(&token, here, &once, "POST", "/a", b"body"), "not twice");
        assert!(proofs.accept(&token, here, &proof(), "POST", "/a", b"body"));
        let now = now_ms();
        for at in [now - PROOF_MS - 1000, now + PROOF_MS + 1000] {
            let at_text = at.to_string();
            let parts: [&[u8]; 5] = [at_text.as_bytes(), b"00", b"POST", b"/a", b"body"];
            let late = format!("{at}.00.{}", hex::encode(token.mac(here, &parts).expect("a key")));
            assert!(!proofs.accept(&token, here, &late, "POST", "/a", b"body"));
        }
        for noise in ["", ".", "..", "1.2.3", "1.2.3.4", "x.y.z"] {
            assert!(!proofs.accept(&token, here, noise, "POST", "/a", b"body"), "{noise}");
        }
    }
}
