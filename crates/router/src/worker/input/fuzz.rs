//! Fuzz target: the first bytes of a connection. They may be a PROXY header, an HTTP request, or a TLS handshake on a
//! plain listener, and any other protocol on a TLS listener.

use std::sync::{Arc, LazyLock};

use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use switchyard_resp::command::{CommandTable, Lookup, errors};
use switchyard_resp::encode;
use switchyard_resp::reply::{ReplyScan, ReplyScanner};
use switchyard_resp::request::{Args, Limits, ProtocolError, Scan, Scanner};

use super::rewritten;
use crate::worker::dispatch::is_http;
use crate::worker::transport::Tls;

static TABLE: LazyLock<CommandTable> = LazyLock::new(CommandTable::builtin);

/// Limits of a client that has not logged in.
const STRANGER: Limits = Limits { argument_max: 512 << 20, large: usize::MAX, authenticated: false };

/// Checks that a plain listener finds the same commands in pieces of any size, and that all its errors are single
/// replies. Checks that a TLS listener returns no data before the handshake.
///
/// # Panics
/// If one of these is wrong.
pub fn first_bytes(input: &[u8]) {
    let Some((&piece, bytes)) = input.split_first() else { return };
    let piece = usize::from(piece) + 1;
    let whole = connection(bytes, bytes.len().max(1));
    assert_eq!(connection(bytes, piece), whole, "in pieces of {piece} B");
    tls_connection(bytes, piece);
}

/// Requests as nodes would receive them, and the error that closes the connection. Ends with an HTTP header.
fn connection(bytes: &[u8], piece: usize) -> (Vec<Vec<u8>>, Option<ProtocolError>) {
    let (mut scanner, mut requests) = (Scanner::default(), Vec::new());
    let (mut start, mut received) = (0, 0);
    loop {
        let rest = &bytes[start..received];
        let len = match scanner.scan(rest, &STRANGER) {
            Ok(Scan::Incomplete) if received == bytes.len() => return (requests, None),
            Ok(Scan::Incomplete) => {
                received = (received + piece).min(bytes.len());
                continue;
            }
            Ok(Scan::Large { .. }) => panic!("an unlimited size is never large"),
            Ok(Scan::Empty { len }) => len,
            Ok(Scan::Complete { len, canonical: true }) => {
                let request = &rest[..len];
                if is_http_header(&scanner.args(request)) {
                    return (requests, None);
                }
                requests.push(request.to_vec());
                len
            }
            Ok(Scan::Complete { len, .. } | Scan::Inline { len }) => match rewritten(&rest[..len], &scanner) {
                Ok(None) => len,
                Ok(Some((request, rescanned))) => {
                    let mut second = Scanner::default();
                    let is_canonical = Ok(Scan::Complete { len: request.len(), canonical: true });
                    assert_eq!(second.scan(&request, &Limits::NONE), is_canonical, "{}", request.escape_ascii());
                    if is_http_header(&rescanned.args(&request)) {
                        return (requests, None);
                    }
                    requests.push(request);
                    len
                }
                Err(error) => return (requests, Some(checked(error))),
            },
            Err(error) => return (requests, Some(checked(error))),
        };
        assert!(len > 0 && len <= rest.len());
        start += len;
        scanner.reset();
    }
}

/// Whether the router closes the connection without a reply. Checks the error for an unknown command.
fn is_http_header(args: &Args<'_>) -> bool {
    assert!(!args.is_empty() && args.known() == args.len());
    let error = match TABLE.find(args) {
        Lookup::Command(_) => return false,
        _ if is_http(args.get(0).expect("a name")) => return true,
        Lookup::UnknownSubcommand(container) => errors::unknown_subcommand(container, args),
        Lookup::Unknown => errors::unknown(args),
    };
    check_reply(&error);
    false
}

fn checked(error: ProtocolError) -> ProtocolError {
    check_reply(&error.reply_text());
    error
}

fn check_reply(error: &[u8]) {
    let mut reply = Vec::new();
    encode::line(&mut reply, b'-', error);
    assert_eq!(ReplyScanner::default().scan(&reply), Ok(ReplyScan::Complete(reply.len())), "{}", reply.escape_ascii());
}

/// No certificate: the handshake ends after the first message.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesServerCert for NoCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        None
    }
}

static TLS: LazyLock<Arc<ServerConfig>> = LazyLock::new(|| {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let versions = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = versions.expect("the versions of the provider").with_no_client_auth();
    Arc::new(config.with_cert_resolver(Arc::new(NoCertificate)))
});

fn tls_connection(bytes: &[u8], piece: usize) {
    let mut tls = Tls::accept(TLS.clone()).expect("a session");
    let mut plain = [0; 1 << 10];
    for part in bytes.chunks(piece) {
        assert_eq!(tls.open(part, &mut plain), 0, "data before the handshake");
        if let Some(why) = tls.failure() {
            assert!(!why.is_empty() && !why.contains(char::is_control), "{why:?}");
            return;
        }
        assert!(tls.is_handshaking());
    }
}
