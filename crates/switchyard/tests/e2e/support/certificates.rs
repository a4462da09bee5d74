//! Certificates for a test: an authority and the certificates that it signs. Also a minimal TLS client.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use tempfile::TempDir;

use super::client::{TIMEOUT, encode};

/// A certificate authority with a folder for signed certificates.
pub(crate) struct Authority {
    dir: TempDir,
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// Files of a certificate and its key.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) certificate: PathBuf,
    pub(crate) key: PathBuf,
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        // A unique name, which distinguishes authorities.
        let name = format!("authority {:02x?}", &key.public_key_raw()[1..9]);
        params.distinguished_name.push(DnType::CommonName, name);
        let pem = params.self_signed(&key).expect("an authority").pem();
        let dir = TempDir::new().expect("a directory");
        std::fs::write(dir.path().join("ca.pem"), &pem).expect("written");
        Authority { dir, issuer: Issuer::new(params, key), pem }
    }

    /// File of the authority's own certificate.
    pub(crate) fn file(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    /// Signs a certificate for `names`, in files called `file`. Replaces an earlier certificate of that name.
    pub(crate) fn sign(&self, file: &str, names: &[&str]) -> Pair {
        let mut params =
            CertificateParams::new(names.iter().map(|&n| n.to_owned()).collect::<Vec<_>>()).expect("names");
        params.distinguished_name.push(DnType::CommonName, file);
        let key = KeyPair::generate().expect("a key");
        let signed = params.signed_by(&key, &self.issuer).expect("a certificate");
        let at = |end: &str| self.dir.path().join(format!("{file}.{end}"));
        let pair = Pair { certificate: at("pem"), key: at("key") };
        put(&pair.certificate, signed.pem().as_bytes());
        put(&pair.key, key.serialize_pem().as_bytes());
        pair
    }

    /// Client settings that trust this authority, optionally with a client certificate.
    pub(crate) fn client_config(&self, own: Option<&Pair>) -> Arc<ClientConfig> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).expect("PEM")).expect("an authority");
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let builder =
            ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().expect("versions");
        let builder = builder.with_root_certificates(roots);
        Arc::new(match own {
            None => builder.with_no_client_auth(),
            Some(pair) => {
                let certificate = CertificateDer::from_pem_file(&pair.certificate).expect("a certificate");
                let key = PrivateKeyDer::from_pem_file(&pair.key).expect("a key");
                builder.with_client_auth_cert(vec![certificate], key).expect("a pair")
            }
        })
    }
}

/// Writes a file that only this user can read.
fn put(path: &Path, content: &[u8]) {
    std::fs::write(path, content).expect("written");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).expect("mode");
}

/// A TLS client.
pub(crate) struct TlsClient {
    stream: StreamOwned<ClientConnection, TcpStream>,
}

impl TlsClient {
    /// Connects and performs the handshake.
    pub(crate) fn connect(address: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<TlsClient> {
        let mut socket = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
        socket.set_nodelay(true)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.set_write_timeout(Some(TIMEOUT))?;
        let name = ServerName::try_from("localhost").expect("a name");
        let mut session = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        while session.is_handshaking() {
            session.complete_io(&mut socket)?;
        }
        Ok(TlsClient { stream: StreamOwned::new(session, socket) })
    }

    /// Returns the server's certificate.
    pub(crate) fn shown(&self) -> Vec<u8> {
        self.stream.conn.peer_certificates().expect("shown").first().expect("one").to_vec()
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Sends a command and returns its reply, which must be a line or a bulk string.
    pub(crate) fn cmd<A: AsRef<[u8]>>(&mut self, args: &[A]) -> io::Result<Vec<u8>> {
        self.write(&encode(args))?;
        self.reply()
    }

    /// Reads a reply: the content of a bulk string, otherwise the line.
    pub(crate) fn reply(&mut self) -> io::Result<Vec<u8>> {
        let mut line = Vec::new();
        let mut byte = [0];
        while !line.ends_with(b"\r\n") {
            self.stream.read_exact(&mut byte)?;
            line.push(byte[0]);
        }
        line.truncate(line.len() - 2);
        if line.first() != Some(&b'$') || line == b"$-1" {
            return Ok(line);
        }
        let len: usize = std::str::from_utf8(&line[1..]).expect("a length").parse().expect("a length");
        let mut content = vec![0; len + 2];
        self.stream.read_exact(&mut content)?;
        assert_eq!(content.split_off(len), b"\r\n");
        Ok(content)
    }

    /// Reads to the end. An end without TLS's `close_notify` is an error.
    pub(crate) fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut rest = Vec::new();
        self.stream.read_to_end(&mut rest)?;
        Ok(rest)
    }

    /// The socket below TLS.
    pub(crate) fn socket(&self) -> &TcpStream {
        &self.stream.sock
    }
}
