//! Who may ask: the check of the `Host` header and of the token, before any route.

use std::hint::black_box;
use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use super::listener::Peer;
use super::routes::{is_probe, refuse};
use super::{AdminOptions, Token};

/// What a request must fulfil.
pub(super) struct Guard {
    token: Option<Token>,
    /// In lower case.
    host_names: Vec<String>,
}

/// Whether the request may see more than "yes" or "no": there is no token, or it carried it. An extension of every request that
/// passed the guard.
#[derive(Clone, Copy)]
pub(super) struct Trusted(pub(super) bool);

impl Guard {
    pub(super) fn new(options: AdminOptions) -> Arc<Self> {
        let host_names = options.host_names.iter().map(|name| name.to_ascii_lowercase()).collect();
        Arc::new(Self { token: options.token, host_names })
    }

    /// Whether a browser that was led here by somebody else's name is turned away, and nobody else is. The attack needs a name that
    /// the attacker can point anywhere, so IP addresses are fine, as are names that mean this machine everywhere.
    fn knows_host(&self, authority: &Authority) -> bool {
        let host = authority.host().to_ascii_lowercase();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if bare.parse::<IpAddr>().is_ok() {
            return true;
        }
        let name = host.strip_suffix('.').unwrap_or(&host);
        name == "localhost" || name.ends_with(".localhost") || self.host_names.iter().any(|known| known == name)
    }

    /// Whether the request comes from no web page, or from one of this port.
    fn knows_origin(&self, request: &Request) -> bool {
        let Some(origin) = request.headers().get(ORIGIN) else { return true };
        let host = origin.to_str().ok().and_then(|text| text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")));
        let own = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        host.is_some() && host == own
    }

    fn carries_token(&self, request: &Request) -> bool {
        let Some(Token(token)) = &self.token else {
            return true;
        };
        let given = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let Some((scheme, given)) = given.and_then(|value| value.split_at_checked(7)) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(b"Bearer ") && same(given.trim_ascii(), token.as_bytes())
    }
}

/// Compares without telling by its duration where the first difference is. The length is no secret.
fn same(given: &[u8], expected: &[u8]) -> bool {
    given.len() == expected.len() && given.iter().zip(expected).fold(0, |difference, (a, b)| black_box(difference | (a ^ b))) == 0
}

/// Whether a method only reads.
fn only_reads(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Lets a request through to its route, or answers it here. Whatever may change something leaves a line in the log, also where it was
/// turned away: who, what, and what became of it.
pub(super) async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if only_reads(request.method()) {
        return admit(&guard, request, next).await;
    }
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let peer = request.extensions().get::<ConnectInfo<Peer>>().map_or_else(|| "unknown".to_owned(), |info| info.0.0.to_string());
    let response = admit(&guard, request, next).await;
    tracing::info!(target: "audit", peer, %method, path, status = response.status().as_u16(), "admin request");
    response
}

async fn admit(guard: &Guard, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    // A request that names the host in its first line means that one, whatever the header says (RFC 9112).
    let authority = match request.uri().authority() {
        Some(authority) => Some(authority.clone()),
        None => {
            let mut headers = request.headers().get_all(HOST).iter();
            let only = headers.next().filter(|_| headers.next().is_none());
            only.and_then(|value| Authority::try_from(value.as_bytes()).ok())
        }
    };
    let Some(authority) = authority else {
        return refuse(path, StatusCode::BAD_REQUEST, "the request needs one valid Host header");
    };
    if !guard.knows_host(&authority) {
        let message = format!(
            "this admin port is not known as \"{}\" (a protection against web pages that would reach it through a name of theirs); \
             use its IP address or localhost, or add the name to the host names allowed for the admin port",
            authority.host()
        );
        return refuse(path, StatusCode::MISDIRECTED_REQUEST, &message);
    }
    // A page of somebody else can make a browser send a change here. Browsers then say whose page it was.
    if !only_reads(request.method()) && !guard.knows_origin(&request) {
        return refuse(path, StatusCode::FORBIDDEN, "requests that change something are not taken from pages of other sites");
    }
    let trusted = guard.carries_token(&request);
    // Those who check health have no token, and learn no more than yes or no.
    if !trusted && !is_probe(path) {
        let message = "the admin port needs its token, in the header \"Authorization: Bearer TOKEN\"";
        let mut response = refuse(path, StatusCode::UNAUTHORIZED, message);
        let scheme = HeaderValue::from_static("Bearer realm=\"switchyard\"");
        response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
        return response;
    }
    request.extensions_mut().insert(Trusted(trusted));
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts() {
        let options = AdminOptions { token: None, host_names: vec!["Router-1.example".into()], tls: None };
        let guard = Guard::new(options);
        let knows = |host: &'static str| guard.knows_host(&Authority::from_static(host));
        for host in [
            "localhost",
            "LOCALHOST:6381",
            "localhost.:6381",
            "switchyard.localhost",
            "127.0.0.1:6381",
            "10.1.2.3",
            "[::1]:6381",
            "[fe80::1]",
            "router-1.example:6381",
        ] {
            assert!(knows(host), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:6381",
            "notlocalhost",
            "127.0.0.1.evil.example",
            "127.0.0.1.nip.io",
            "sub.router-1.example",
            "2130706433", // a number is not an address to the parser, but a browser would resolve it itself
        ] {
            assert!(!knows(host), "{host}");
        }
    }

    #[test]
    fn tokens_are_compared_whole() {
        assert!(same(b"secret", b"secret"));
        for other in ["", "secre", "secret1", "Secret", "secres"] {
            assert!(!same(other.as_bytes(), b"secret"), "{other}");
        }
    }

    #[test]
    fn tokens_that_fit_no_header() {
        for text in ["", "two words", "line\n", "tökén"] {
            assert_eq!(Token::new(text), None, "{text:?}");
        }
        assert_eq!(format!("{:?}", Token::new("secret")), "Some(***)");
    }
}
