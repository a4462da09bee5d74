//! TLS settings of the router: its certificates for clients, and its requirements for nodes.
//!
//! Certificates are read and checked before. This module receives complete rustls configurations, each with an identity
//! text, so that a reload detects changes. A connection keeps its configuration, so new certificates close no
//! connection.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::pki_types::{IpAddr, ServerName};
use rustls::{AlertDescription, CertificateError, ClientConfig, Error, PeerIncompatible, ServerConfig};

/// Settings for client connections: certificate, key, and required client certificates.
#[derive(Clone)]
pub struct ServerTls {
    /// rustls configuration.
    pub config: Arc<ServerConfig>,
    /// Identifies the source material: equal for equal content.
    pub identity: String,
}

/// Settings for connections to one node.
#[derive(Clone)]
pub struct NodeTls {
    /// rustls configuration.
    pub config: Arc<ClientConfig>,
    /// Identifies the source material: equal for equal content.
    pub identity: String,
    names: Names,
}

/// Required certificate names of a node's servers.
#[derive(Clone)]
enum Names {
    /// One name for all servers of the node.
    Same(ServerName<'static>),
    /// Each server's own host name, by address. Clones share the map, so a name from a Sentinel applies to all later
    /// connections.
    PerServer(Arc<Mutex<BTreeMap<SocketAddr, ServerName<'static>>>>),
}

impl NodeTls {
    /// Verifies all servers of the node by one name: `tls-server-name`, or the host of a node with a single server.
    pub fn with_name(config: Arc<ClientConfig>, identity: String, name: ServerName<'static>) -> Self {
        Self { config, identity, names: Names::Same(name) }
    }

    /// Verifies each server by its own name ([`NodeTls::note_host`]).
    pub fn with_own_names(config: Arc<ClientConfig>, identity: String) -> Self {
        Self { config, identity, names: Names::PerServer(Arc::default()) }
    }

    /// Returns the required certificate name of the server at `address`. Without a known host name, this is its IP
    /// address.
    pub fn name_at(&self, address: SocketAddr) -> ServerName<'static> {
        match &self.names {
            Names::Same(name) => name.clone(),
            Names::PerServer(names) => locked(names)
                .get(&address)
                .cloned()
                .unwrap_or_else(|| ServerName::IpAddress(IpAddr::from(address.ip()))),
        }
    }

    /// Records the host of the server at `address`, from a Sentinel or the configuration. An IP address removes an
    /// earlier name.
    pub fn note_host(&self, address: SocketAddr, host: &str) {
        let Names::PerServer(names) = &self.names else { return };
        match ServerName::try_from(host.strip_suffix('.').unwrap_or(host)) {
            Ok(name @ ServerName::DnsName(_)) => drop(locked(names).insert(address, name.to_owned())),
            _ => drop(locked(names).remove(&address)),
        }
    }

    /// Returns the recorded host name of the server at `address`.
    pub fn host_at(&self, address: SocketAddr) -> Option<String> {
        match &self.names {
            Names::Same(_) => None,
            Names::PerServer(names) => locked(names).get(&address).map(|name| name.to_str().into_owned()),
        }
    }

    /// Forgets the host of a server that has left the node.
    pub fn forget_host(&self, address: SocketAddr) {
        if let Names::PerServer(names) = &self.names {
            locked(names).remove(&address);
        }
    }

    /// Adopts the host names of `before`, the same node until now; names that only this one has are added to both.
    pub fn adopt_hosts(&mut self, before: &Self) {
        if let (Names::PerServer(new), Names::PerServer(old)) = (&mut self.names, &before.names)
            && !Arc::ptr_eq(new, old)
        {
            locked(old).append(&mut locked(new));
            *new = Arc::clone(old);
        }
    }
}

fn locked<'n>(
    names: &'n Mutex<BTreeMap<SocketAddr, ServerName<'static>>>,
) -> MutexGuard<'n, BTreeMap<SocketAddr, ServerName<'static>>> {
    names.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ciphers of all connections. A test compares them with rustls.
const CIPHERS: &str = "AES-GCM or ChaCha20-Poly1305 (in TLS 1.2 with ECDHE)";

/// Key exchanges of all connections. A test compares them with rustls.
const GROUPS: &str = "X25519, P-256, P-384 or X25519MLKEM768";

/// Key types of verifiable certificates. A test compares them with rustls.
pub const KEY_KINDS: &str = "RSA from 2048 bits, ECDSA with P-256, P-384 or P-521, or Ed25519";

/// OIDs and names of signature algorithms that rustls does not verify.
const UNVERIFIED: &[(&[u8], &str)] = &[
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x04], "MD5 with RSA"),
    (&[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x05], "SHA-1 with RSA"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x01], "SHA-1 with ECDSA"),
    (&[0x2a, 0x86, 0x48, 0xce, 0x38, 0x04], "DSA"),
    (&[0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x03, 0x02], "DSA"),
    (&[0x2b, 0x81, 0x04, 0x00, 0x0a], "ECDSA with secp256k1"),
    (&[0x2b, 0x65, 0x71], "Ed448"),
];

/// Returns the reason why a session with a node failed, and the remedy.
pub fn node_failure(error: &Error) -> String {
    use AlertDescription as Alert;
    let remedy = match error {
        Error::AlertReceived(Alert::HandshakeFailure | Alert::InsufficientSecurity) => format!(
            "no cipher, key exchange or key type in common. The server must allow a cipher of {CIPHERS} (its tls-ciphers and tls-ciphersuites), a \
             key exchange of {GROUPS}, and have a certificate with a key of {KEY_KINDS} (its tls-cert-file)"
        ),
        Error::AlertReceived(Alert::ProtocolVersion)
        | Error::PeerIncompatible(
            PeerIncompatible::ServerDoesNotSupportTls12Or13 | PeerIncompatible::ServerTlsVersionIsDisabledByOurConfig,
        ) => "the server allows neither TLS 1.2 nor 1.3: allow one of them there (its tls-protocols)".to_owned(),
        Error::AlertReceived(Alert::CertificateRequired) => {
            "the server requires a client certificate: set nodes.tls-cert-file and nodes.tls-key-file".to_owned()
        }
        Error::AlertReceived(
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateRevoked
            | Alert::CertificateExpired
            | Alert::CertificateUnknown
            | Alert::UnknownCA,
        ) => "the server refuses Switchyard's certificate: set nodes.tls-cert-file to one signed by an authority in the server's tls-ca-cert-file"
            .to_owned(),
        Error::InvalidCertificate(CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }) => {
            "set tls-server-name to a name that the certificate has, in [nodes] or for this node".to_owned()
        }
        Error::InvalidCertificate(why) => certificate_remedy(why).unwrap_or_else(|| match why {
            CertificateError::UnknownIssuer => "set nodes.tls-ca-file to the authority that signed the certificate".to_owned(),
            _ => "renew the server's certificate (its tls-cert-file), or set nodes.tls-ca-file to the authority that signed it".to_owned(),
        }),
        Error::InvalidMessage(_) => "is this its TLS port, and is tls right for this node?".to_owned(),
        _ => return error.to_string(),
    };
    format!("{error}: {remedy}")
}

/// Returns the reason why a session with a client failed, and the remedy.
pub(crate) fn client_failure(error: &Error) -> String {
    let remedy = match error {
        Error::PeerIncompatible(PeerIncompatible::NoCipherSuitesInCommon) => format!(
            "the client must offer a cipher of {CIPHERS}; in TLS 1.2 one for the key type in tls.cert-file, ECDHE-RSA or ECDHE-ECDSA"
        ),
        Error::PeerIncompatible(PeerIncompatible::NoKxGroupsInCommon) => format!("the client must offer a key exchange of {GROUPS}"),
        Error::PeerIncompatible(PeerIncompatible::NoSignatureSchemesInCommon) => {
            "the client supports no signature of the key type in tls.cert-file: use a certificate with another key, such as RSA or ECDSA with P-256"
                .to_owned()
        }
        Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered | PeerIncompatible::Tls12NotOfferedOrEnabled)
        | Error::PeerIncompatible(PeerIncompatible::SupportedVersionsExtensionRequired) => "the client must offer TLS 1.2 or 1.3".to_owned(),
        Error::InvalidCertificate(why) => match certificate_remedy(why) {
            Some(remedy) => remedy,
            None => return error.to_string(),
        },
        _ => return error.to_string(),
    };
    format!("{error}: {remedy}")
}

/// Returns the remedy for a certificate that is refused because of the type of a key or signature.
fn certificate_remedy(why: &CertificateError) -> Option<String> {
    let of = |id: &[u8]| {
        let known = UNVERIFIED.iter().find(|(oid, _)| id.windows(oid.len()).any(|part| part == *oid));
        known.map_or_else(
            || format!("an algorithm that is not supported (identifier {id:02x?})"),
            |(_, name)| (*name).to_owned(),
        )
    };
    match why {
        CertificateError::UnsupportedSignatureAlgorithmContext { signature_algorithm_id: id, .. } => Some(format!(
            "it is signed with {}: the authority's key must be {KEY_KINDS}, and the signature SHA-256 or stronger",
            of(id)
        )),
        CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { public_key_algorithm_id: id, .. } => {
            Some(format!("a key in its chain is of {}: the key must be {KEY_KINDS}", of(id)))
        }
        CertificateError::BadSignature => Some(format!(
            "another authority of the same name signed it, or its key is not {KEY_KINDS}, but for example RSA with 1024 bits"
        )),
        _ => None,
    }
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for ServerTls {}

impl PartialEq for NodeTls {
    fn eq(&self, other: &Self) -> bool {
        let same_names = match (&self.names, &other.names) {
            (Names::Same(name), Names::Same(other)) => name == other,
            // Current names of servers are not part of the configuration.
            (Names::PerServer(_), Names::PerServer(_)) => true,
            _ => false,
        };
        self.identity == other.identity && same_names
    }
}

impl Eq for NodeTls {}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerTls({})", self.identity)
    }
}

impl fmt::Debug for NodeTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.names {
            Names::Same(name) => write!(f, "NodeTls({name:?}, {})", self.identity),
            Names::PerServer(_) => write!(f, "NodeTls(own names, {})", self.identity),
        }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use rustls::crypto::{CryptoProvider, aws_lc_rs};
    use rustls::pki_types::PrivateKeyDer;
    use rustls::{ClientConnection, Connection, RootCertStore, ServerConnection, SupportedProtocolVersion, version};

    use super::*;

    fn own_names() -> NodeTls {
        let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions();
        let config = client.expect("versions").with_root_certificates(RootCertStore::empty()).with_no_client_auth();
        NodeTls::with_own_names(Arc::new(config), "a".to_owned())
    }

    #[test]
    fn servers_are_verified_by_name_or_else_by_address() {
        let (one, two): (SocketAddr, SocketAddr) =
            ("10.0.0.1:6379".parse().expect("one"), "10.0.0.2:6379".parse().expect("one"));
        let tls = own_names();
        let shown = |tls: &NodeTls, address| tls.name_at(address).to_str().into_owned();
        let elsewhere = tls.clone();
        elsewhere.note_host(one, "redis-a.");
        assert_eq!(
            (shown(&tls, one), shown(&tls, two)),
            ("redis-a".to_owned(), "10.0.0.2".to_owned()),
            "clones share the names"
        );
        assert_eq!((tls.host_at(one), tls.host_at(two)), (Some("redis-a".to_owned()), None));
        tls.note_host(two, "not a name");
        assert_eq!(shown(&tls, two), "10.0.0.2");

        // A reload.
        let mut reloaded = own_names();
        reloaded.note_host(two, "redis-b");
        reloaded.adopt_hosts(&tls);
        assert_eq!((shown(&reloaded, one), shown(&tls, two)), ("redis-a".to_owned(), "redis-b".to_owned()));
        assert_eq!(reloaded, own_names(), "present names are no part of the configuration");
        tls.forget_host(two);
        tls.note_host(one, "10.0.0.1");
        assert_eq!((shown(&reloaded, one), shown(&reloaded, two)), ("10.0.0.1".to_owned(), "10.0.0.2".to_owned()));

        let name = ServerName::try_from("redis.internal").expect("a name");
        let fixed = NodeTls::with_name(Arc::clone(&tls.config), tls.identity.clone(), name);
        fixed.note_host(one, "redis-a");
        assert_eq!(shown(&fixed, one), "redis.internal", "tls-server-name overrides");
        assert_ne!(fixed, tls);
    }

    /// These texts must remain true when rustls changes.
    #[test]
    fn every_cipher_group_and_key_of_ours_is_named() {
        let provider = aws_lc_rs::default_provider();
        for suite in provider.cipher_suites {
            let name = format!("{:?}", suite.suite());
            assert!(name.starts_with("TLS13_") || name.starts_with("TLS_ECDHE_"), "{name}");
            assert!(
                name.contains("AES_128_GCM") || name.contains("AES_256_GCM") || name.contains("CHACHA20_POLY1305"),
                "{name}"
            );
        }
        let groups: Vec<String> = provider.kx_groups.iter().map(|group| format!("{:?}", group.name())).collect();
        assert_eq!(groups, ["X25519", "secp256r1", "secp384r1", "X25519MLKEM768"]);
        // rustls also verifies ML-DSA. No text mentions it, because servers cannot rely on it yet.
        for scheme in provider.signature_verification_algorithms.supported_schemes() {
            let name = format!("{scheme:?}");
            assert!(
                ["RSA_", "ECDSA_NISTP256", "ECDSA_NISTP384", "ECDSA_NISTP521", "ED25519", "ML_DSA"]
                    .iter()
                    .any(|kind| name.starts_with(kind)),
                "{name}"
            );
        }
    }

    /// Performs a handshake with a server that has an ECDSA key. Returns the errors of client and server.
    fn shake(
        client: CryptoProvider,
        server: CryptoProvider,
        versions: &[&'static SupportedProtocolVersion],
    ) -> [Option<Error>; 2] {
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
        let key = PrivateKeyDer::try_from(signing_key.serialize_der()).expect("a key");
        let server =
            ServerConfig::builder_with_provider(Arc::new(server)).with_protocol_versions(versions).expect("versions");
        let server = server.with_no_client_auth().with_single_cert(vec![cert.der().clone()], key).expect("a pair");
        let mut roots = RootCertStore::empty();
        roots.add(cert.der().clone()).expect("a root");
        let client =
            ClientConfig::builder_with_provider(Arc::new(client)).with_protocol_versions(versions).expect("versions");
        let client = client.with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost").expect("a name");
        let mut sides = [
            Connection::from(ClientConnection::new(Arc::new(client), name).expect("a session")),
            Connection::from(ServerConnection::new(Arc::new(server)).expect("a session")),
        ];
        let mut errors = [None, None];
        for _ in 0..8 {
            for (from, to) in [(0, 1), (1, 0)] {
                let mut bytes = Vec::new();
                while sides[from].wants_write() {
                    sides[from].write_tls(&mut bytes).expect("written");
                }
                let mut bytes = &bytes[..];
                while !bytes.is_empty() && errors[to].is_none() {
                    sides[to].read_tls(&mut bytes).expect("read");
                    errors[to] = sides[to].process_new_packets().err();
                }
            }
        }
        errors
    }

    #[test]
    fn handshake_failures_name_the_missing_kind_on_both_sides() {
        let all = aws_lc_rs::default_provider;
        let with = |name: &str| {
            let cipher_suites =
                all().cipher_suites.into_iter().filter(|suite| format!("{:?}", suite.suite()).contains(name)).collect();
            CryptoProvider { cipher_suites, ..all() }
        };
        let [client, server] = shake(all(), all(), &[&version::TLS12]);
        assert_eq!((client, server), (None, None));
        // The server has only an ECDSA key.
        let [client, server] = shake(with("ECDHE_RSA"), all(), &[&version::TLS12]);
        let (client, server) = (node_failure(&client.expect("fails")), client_failure(&server.expect("fails")));
        assert!(
            client.contains("a cipher of AES-GCM or ChaCha20-Poly1305")
                && client.contains("a key of RSA from 2048 bits"),
            "{client}"
        );
        assert!(server.contains("key type in tls.cert-file"), "{server}");
        let [_, server] = shake(with("TLS13_AES_256"), with("TLS13_AES_128"), &[&version::TLS13]);
        let server = client_failure(&server.expect("fails"));
        assert!(server.contains("the client must offer a cipher of AES-GCM"), "{server}");
        let groups = |last: bool| {
            let kx_groups = all()
                .kx_groups
                .into_iter()
                .filter(|group| format!("{:?}", group.name()).starts_with("secp") == last)
                .collect();
            CryptoProvider { kx_groups, ..all() }
        };
        let [_, server] = shake(groups(true), groups(false), &[&version::TLS13]);
        let server = client_failure(&server.expect("fails"));
        assert!(server.contains("a key exchange of X25519"), "{server}");

        let unknown = |id: &[u8]| {
            Error::InvalidCertificate(CertificateError::UnsupportedSignatureAlgorithmContext {
                signature_algorithm_id: id.to_vec(),
                supported_algorithms: Vec::new(),
            })
        };
        assert!(
            node_failure(&unknown(&[6, 9, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 1, 1, 5, 5, 0]))
                .contains("SHA-1 with RSA")
        );
        assert!(client_failure(&unknown(&[6, 3, 0x2b, 0x65, 0x71])).contains("Ed448"));
        assert!(
            node_failure(&Error::InvalidCertificate(CertificateError::BadSignature)).contains("RSA with 1024 bits")
        );
        assert!(node_failure(&Error::AlertReceived(AlertDescription::ProtocolVersion)).contains("tls-protocols"));
    }
}
