//! Certificate and key files, and the rustls configurations built from them.
//!
//! Files are read at every reload, so that renewed certificates take effect. All mistakes are found here and reported
//! with the file name, before anything is applied.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use switchyard_router::{KEY_KINDS, NodeTls, ServerTls};

use super::secret::{others_may_read, others_may_write};

/// Policy for client certificates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum ClientAuth {
    /// No certificate is requested.
    #[default]
    Off,
    /// A certificate is optional, but must be valid.
    Optional,
    /// Without a valid certificate, the handshake fails.
    Required,
}

impl ClientAuth {
    /// All variants with their names in the configuration.
    pub(super) const ALL: [(Self, &str); 3] =
        [(Self::Off, "off"), (Self::Optional, "optional"), (Self::Required, "required")];
}

/// Server side: the section `[tls]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ServerFiles {
    pub(super) certificate: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    pub(super) client_ca: Option<PathBuf>,
    pub(super) client_auth: ClientAuth,
}

/// Client side, towards nodes: the `tls-...` keys of `[nodes]`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NodeFiles {
    pub(super) on: bool,
    pub(super) ca: Option<PathBuf>,
    pub(super) certificate: Option<PathBuf>,
    pub(super) key: Option<PathBuf>,
    pub(super) server_name: Option<String>,
    pub(super) insecure: bool,
}

/// Usual places of trusted certificates, if `SSL_CERT_FILE` is not set.
const SYSTEM_ROOTS: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Cryptography provider of all TLS connections.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

/// Hash of all files read. Configurations built from different files have different hashes.
#[derive(Default)]
struct Seen(DefaultHasher);

impl Seen {
    fn read(&mut self, path: &Path) -> Result<Vec<u8>, String> {
        let bytes = std::fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        bytes.hash(&mut self.0);
        Ok(bytes)
    }

    fn identity(&self) -> String {
        format!("{:016x}", self.0.finish())
    }
}

fn certificates(path: &Path, seen: &mut Seen) -> Result<Vec<CertificateDer<'static>>, String> {
    let bytes = seen.read(path)?;
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| format!("{} is no PEM file of certificates: {error}", path.display()))?;
    if certificates.is_empty() {
        return Err(format!("{} has no certificate; expected PEM, with -----BEGIN CERTIFICATE-----", path.display()));
    }
    Ok(certificates)
}

fn key(path: &Path, seen: &mut Seen, warnings: &mut Vec<String>) -> Result<PrivateKeyDer<'static>, String> {
    if others_may_write(path) {
        return Err(format!("the key in {} is writable by all users of this machine; chmod 600 it", path.display()));
    }
    if others_may_read(path) {
        warnings.push(format!("the key in {} is readable by all users of this machine; chmod 600 it", path.display()));
    }
    let bytes = seen.read(path)?;
    PrivateKeyDer::from_pem_slice(&bytes).map_err(|error| {
        format!("{} has no private key that can be used (PEM, without a passphrase): {error}", path.display())
    })
}

/// Error for an unusable certificate and key.
fn unusable_error(certificate: &Path, key: &Path, error: &rustls::Error) -> String {
    match error {
        // rustls supports no algorithm for this key.
        rustls::Error::General(_) => {
            format!("{} has a key of a kind that cannot be used: it must be {KEY_KINDS}", key.display())
        }
        _ => format!("{} and {} do not fit together: {error}", certificate.display(), key.display()),
    }
}

fn roots(path: &Path, seen: &mut Seen) -> Result<RootCertStore, String> {
    let mut store = RootCertStore::empty();
    let (added, _) = store.add_parsable_certificates(certificates(path, seen)?);
    if added == 0 {
        return Err(format!("{} has no certificate that can be trusted", path.display()));
    }
    Ok(store)
}

impl ServerFiles {
    /// Builds the server configuration. `client_ca` and `auth` define the required client certificates.
    fn build(
        &self,
        client_ca: Option<&Path>,
        auth: ClientAuth,
        warnings: &mut Vec<String>,
    ) -> Result<ServerTls, String> {
        let (Some(certificate), Some(key_file)) = (&self.certificate, &self.key) else {
            return Err("a TLS listener needs cert-file and key-file in [tls]".to_owned());
        };
        let mut seen = Seen::default();
        let chain = certificates(certificate, &mut seen)?;
        let key = key(key_file, &mut seen, warnings)?;
        let builder = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS cannot be set up: {error}"))?;
        let builder = match (auth, client_ca) {
            (ClientAuth::Off, _) => builder.with_no_client_auth(),
            (_, None) => {
                return Err(
                    "client-auth needs client-ca-file: the authorities that sign the clients' certificates".to_owned()
                );
            }
            (_, Some(ca)) => {
                auth.hash(&mut seen.0);
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca, &mut seen)?), provider());
                let verifier = if auth == ClientAuth::Optional { verifier.allow_unauthenticated() } else { verifier };
                builder
                    .with_client_cert_verifier(verifier.build().map_err(|error| format!("{}: {error}", ca.display()))?)
            }
        };
        let config =
            builder.with_single_cert(chain, key).map_err(|error| unusable_error(certificate, key_file, &error))?;
        Ok(ServerTls { config: Arc::new(config), identity: seen.identity() })
    }

    /// Configuration of the data port.
    pub(super) fn for_clients(&self, warnings: &mut Vec<String>) -> Result<ServerTls, String> {
        self.build(self.client_ca.as_deref(), self.client_auth, warnings)
    }

    /// Configuration of the admin port. Client certificates are required only with `client_ca`.
    pub(super) fn for_admin(&self, client_ca: Option<&Path>) -> Result<ServerTls, String> {
        let auth = if client_ca.is_some() { ClientAuth::Required } else { ClientAuth::Off };
        // No warnings: they would repeat those of the data port.
        self.build(client_ca, auth, &mut Vec::new())
    }

    /// Whether certificates are configured.
    pub(super) fn is_given(&self) -> bool {
        self.certificate.is_some() || self.key.is_some()
    }
}

impl NodeFiles {
    /// Builds the part that all nodes share.
    pub(super) fn build(&self, warnings: &mut Vec<String>) -> Result<(Arc<ClientConfig>, String), String> {
        let mut seen = Seen::default();
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| format!("TLS cannot be set up: {error}"))?;
        let builder = if self.insecure {
            warnings.push(
                "nodes.tls-insecure: the certificates of nodes are NOT checked. An attacker between Switchyard and a node can read \
                 and change everything, passwords included. Give tls-ca-file instead"
                    .to_owned(),
            );
            "insecure".hash(&mut seen.0);
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider())))
        } else {
            let ca = match &self.ca {
                Some(path) => path.clone(),
                None => system_roots()
                    .ok_or("no certificates that this system trusts were found; give tls-ca-file in [nodes]")?,
            };
            builder.with_root_certificates(roots(&ca, &mut seen)?)
        };
        let config = match (&self.certificate, &self.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key_file)) => {
                let chain = certificates(certificate, &mut seen)?;
                let key = key(key_file, &mut seen, warnings)?;
                builder
                    .with_client_auth_cert(chain, key)
                    .map_err(|error| unusable_error(certificate, key_file, &error))?
            }
            _ => return Err("tls-cert-file and tls-key-file go together: both, or none".to_owned()),
        };
        Ok((Arc::new(config), seen.identity()))
    }

    /// For connections to a Sentinel, or to a node whose servers all have this name in their certificates.
    pub(super) fn node(shared: &(Arc<ClientConfig>, String), name: &str) -> Result<NodeTls, String> {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| {
            format!(
                "{name:?} is neither a host name nor an IP address; give tls-server-name, the name in its certificate"
            )
        })?;
        Ok(NodeTls::with_name(Arc::clone(&shared.0), shared.1.clone(), name))
    }

    /// For a node whose servers have certificates for their own names. `names` has the configured host names with their
    /// current addresses.
    pub(super) fn servers<'n>(
        shared: &(Arc<ClientConfig>, String),
        names: impl Iterator<Item = (&'n str, Option<SocketAddr>)>,
    ) -> Result<NodeTls, String> {
        let tls = NodeTls::with_own_names(Arc::clone(&shared.0), shared.1.clone());
        for (host, address) in names {
            // Only checks the name: the address may be resolved later.
            Self::node(shared, host)?;
            if let Some(address) = address {
                tls.note_host(address, host);
            }
        }
        Ok(tls)
    }
}

/// Reads the certificates in a PEM file.
pub(crate) fn certificates_in(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    certificates(path, &mut Seen::default())
}

/// Certificates of authorities: from `ca`, or those trusted by the system.
pub(crate) fn trusted_certificates(ca: Option<&Path>) -> Result<Vec<CertificateDer<'static>>, String> {
    let system = || system_roots().ok_or("no certificates that this system trusts were found");
    certificates_in(&ca.map_or_else(system, |path| Ok(path.to_owned()))?)
}

fn system_roots() -> Option<PathBuf> {
    let from_environment = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    from_environment.into_iter().chain(SYSTEM_ROOTS.iter().map(PathBuf::from)).find(|path| path.exists())
}

/// `nodes.tls-insecure`: accepts every certificate. The peer must still prove that it has the key.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(dir: &Path, name: &str) -> (PathBuf, PathBuf) {
        use std::os::unix::fs::PermissionsExt;
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
        let (certificate, key) = (dir.join(format!("{name}.pem")), dir.join(format!("{name}.key")));
        std::fs::write(&certificate, made.cert.pem()).expect("written");
        std::fs::write(&key, made.signing_key.serialize_pem()).expect("written");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).expect("mode");
        (certificate, key)
    }

    const ED448: &str = "-----BEGIN PRIVATE KEY-----\n\
        MEcCAQAwBQYDK2VxBDsEOe/zSVuVX1D099kU+WZ/cbGoxgXKH2fui4itrQebg8Tn\n\
        1lmnUKAqhG7EPyGj+E/hxjqwVaWasJDdOg==\n-----END PRIVATE KEY-----\n";

    #[test]
    fn unusable_files_are_named() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (certificate, key) = files(dir.path(), "a");
        let (_, other_key) = files(dir.path(), "b");
        let good =
            ServerFiles { certificate: Some(certificate.clone()), key: Some(key.clone()), ..ServerFiles::default() };
        let mut warnings = Vec::new();
        let first = good.for_clients(&mut warnings).expect("good");
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(first, good.for_clients(&mut warnings).expect("good"), "the same files are the same");

        let error =
            ServerFiles { key: Some(other_key), ..good.clone() }.for_clients(&mut warnings).expect_err("another key");
        assert!(error.contains("b.key") && error.contains("do not fit"), "{error}");
        let ed448 = dir.path().join("ed448.key");
        std::fs::write(&ed448, ED448).expect("written");
        let error =
            ServerFiles { key: Some(ed448), ..good.clone() }.for_clients(&mut warnings).expect_err("no kind of ours");
        assert!(error.contains("ed448.key") && error.contains("RSA from 2048 bits"), "{error}");
        warnings.clear();
        let error =
            ServerFiles { key: Some(certificate), ..good.clone() }.for_clients(&mut warnings).expect_err("no key");
        assert!(error.contains("no private key"), "{error}");
        let error = ServerFiles { certificate: Some(key.clone()), ..good.clone() }
            .for_clients(&mut warnings)
            .expect_err("no certificate");
        assert!(error.contains("a.key"), "{error}");
        let error = ServerFiles { client_auth: ClientAuth::Required, ..good.clone() }
            .for_clients(&mut warnings)
            .expect_err("no CA");
        assert!(error.contains("client-ca-file"), "{error}");
        let error = ServerFiles::default().for_clients(&mut warnings).expect_err("nothing");
        assert!(error.contains("cert-file"), "{error}");

        warnings.clear();
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o644)).expect("mode");
        good.for_clients(&mut warnings).expect("good");
        assert!(warnings.iter().any(|w| w.contains("chmod 600")), "{warnings:?}");
        std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o666)).expect("mode");
        assert!(good.for_clients(&mut warnings).is_err(), "a key that all users can write");
    }

    #[test]
    fn node_certificates_are_checked_unless_tls_insecure_is_set() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (certificate, _) = files(dir.path(), "a");
        let mut warnings = Vec::new();
        let checked =
            NodeFiles { ca: Some(certificate.clone()), ..NodeFiles::default() }.build(&mut warnings).expect("good");
        assert!(warnings.is_empty());
        let insecure = NodeFiles { insecure: true, ..NodeFiles::default() }.build(&mut warnings).expect("good");
        assert!(warnings.iter().any(|w| w.contains("NOT checked")), "{warnings:?}");
        assert_ne!(checked.1, insecure.1);
        assert!(NodeFiles { certificate: Some(certificate), ..NodeFiles::default() }.build(&mut warnings).is_err());
        assert!(NodeFiles::node(&checked, "redis a").is_err());
        assert!(NodeFiles::node(&checked, "10.0.0.1").is_ok() && NodeFiles::node(&checked, "redis-a.internal").is_ok());
        assert!(NodeFiles::servers(&checked, [("redis a", None)].into_iter()).is_err());
    }
}
