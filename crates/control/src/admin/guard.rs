//! Access control of the admin port: checks the `Host` header and the token before any route.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::{Body, to_bytes};
use axum::extract::{ConnectInfo, Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use super::listener::Peer;
use super::routes::{needs_no_token, refuse};
use super::token::{Proofs, SCHEME};
use super::{Access, AdminAccess, AdminOptions};

/// Maximum size of a request whose proof is checked, in bytes: axum's own bound for JSON.
const BODY_MAX: usize = 2 << 20;

/// Bytes of a path that the log shows.
const PATH_SHOWN: usize = 256;

/// Requirements for every request.
pub(super) struct Guard {
    /// Address that clients connect to.
    address: SocketAddr,
    access: AdminAccess,
    proofs: Proofs,
    /// In lower case.
    host_names: Vec<String>,
}

/// Whether the request may see details: it carried the token, or is a read that needs none. Set on every request that
/// passed the guard.
#[derive(Clone, Copy)]
pub(super) struct Trusted(pub(super) bool);

/// Whether the request carried the token. A request extension.
#[derive(Clone, Copy)]
pub(super) struct TokenPresented(pub(super) bool);

/// File of the generated token, if there is one. A request extension.
#[derive(Clone)]
pub(super) struct TokenFile(pub(super) Option<PathBuf>);

impl Guard {
    pub(super) fn new(address: SocketAddr, options: AdminOptions) -> Arc<Self> {
        let host_names = options.host_names.iter().map(|name| name.to_ascii_lowercase()).collect();
        Arc::new(Self { address, access: options.access, proofs: Proofs::default(), host_names })
    }

    /// Whether the port accepts this host name. Guards against DNS rebinding, which needs a name that the attacker can
    /// point anywhere. So IP addresses are accepted, and names that always mean this machine or are configured.
    fn accepts_host(&self, authority: &Authority) -> bool {
        let host = authority.host().to_ascii_lowercase();
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        if bare.parse::<IpAddr>().is_ok() {
            return true;
        }
        let name = host.strip_suffix('.').unwrap_or(&host);
        name == "localhost" || name.ends_with(".localhost") || self.host_names.iter().any(|known| known == name)
    }

    /// Whether the request comes from a page of this port, or not from a web page.
    fn accepts_origin(&self, request: &Request) -> bool {
        let Some(origin) = request.headers().get(ORIGIN) else { return true };
        let host = origin
            .to_str()
            .ok()
            .and_then(|text| text.strip_prefix("http://").or_else(|| text.strip_prefix("https://")));
        let own = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        host.is_some() && host == own
    }

    /// Whether the request carries the token itself, or proof of a generated token. Restores the body if it was read
    /// for the proof.
    async fn verify_token(&self, access: &Access, request: Request) -> (bool, Request) {
        let given = request
            .headers()
            .get(AUTHORIZATION)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
            .unwrap_or_default();
        let of_scheme = |scheme: &str| {
            let (own, rest) = given.split_at_checked(scheme.len())?;
            own.eq_ignore_ascii_case(scheme).then_some(rest.trim_ascii())
        };
        let (Access::Given(token) | Access::Made { token, .. }) = access else { return (false, request) };
        if let Some(given) = of_scheme("Bearer ") {
            return (token.is(given.as_bytes()), request);
        }
        let (Some(proof), Access::Made { .. }) = (of_scheme(SCHEME), access) else { return (false, request) };
        let (parts, body) = request.into_parts();
        let Ok(body) = to_bytes(body, BODY_MAX).await else {
            return (false, Request::from_parts(parts, Body::empty()));
        };
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let good = self.proofs.accept(token, self.address, proof, parts.method.as_str(), path, &body);
        (good, Request::from_parts(parts, Body::from(body)))
    }
}

fn only_reads(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// Marks the response of an operation that the audit log already contains.
#[derive(Clone, Copy)]
pub(super) struct AlreadyLogged;

/// Passes a request to its route, or refuses it here. Logs every request that may change state, including refused ones,
/// with peer, path and status.
pub(super) async fn check(State(guard): State<Arc<Guard>>, request: Request, next: Next) -> Response {
    if only_reads(request.method()) {
        return admit(&guard, request, next).await.unwrap_or_else(|response| response);
    }
    let (method, path) = (request.method().clone(), request.uri().path().chars().take(PATH_SHOWN).collect::<String>());
    let peer = request
        .extensions()
        .get::<ConnectInfo<Peer>>()
        .map_or_else(|| "unknown".to_owned(), |info| info.0.0.to_string());
    // Two log statements, so that a log filter can omit exactly the refused requests, which any client can send.
    match admit(&guard, request, next).await {
        Ok(response) => {
            if response.extensions().get::<AlreadyLogged>().is_none() {
                tracing::info!(target: "audit", peer, %method, path, status = response.status().as_u16(), "admin request");
            }
            response
        }
        Err(response) => {
            tracing::info!(target: "audit", peer, %method, path, status = response.status().as_u16(), refused = true, "admin request");
            response
        }
    }
}

/// Returns the response, as `Err` if the request was not [`Trusted`].
async fn admit(guard: &Guard, request: Request, next: Next) -> Result<Response, Response> {
    let path = request.uri().path();
    // RFC 9112: a host in the request line takes precedence over the header.
    let authority = match request.uri().authority() {
        Some(authority) => Some(authority.clone()),
        None => {
            let mut headers = request.headers().get_all(HOST).iter();
            let only = headers.next().filter(|_| headers.next().is_none());
            only.and_then(|value| Authority::try_from(value.as_bytes()).ok())
        }
    };
    let Some(authority) = authority else {
        return Err(refuse(path, StatusCode::BAD_REQUEST, "the request needs one valid Host header"));
    };
    if !guard.accepts_host(&authority) {
        let message = format!(
            "\"{}\" is not a host name of this admin port (protection against DNS rebinding by web pages); \
             use its IP address or localhost, or add the name to the host names allowed for the admin port",
            authority.host()
        );
        return Err(refuse(path, StatusCode::MISDIRECTED_REQUEST, &message));
    }
    // A page of another site can make a browser send a change here. Browsers then name the origin of the page.
    if !only_reads(request.method()) && !guard.accepts_origin(&request) {
        return Err(refuse(path, StatusCode::FORBIDDEN, "changes requested by pages of other sites are refused"));
    }
    let access = guard.access.now();
    let (shown, mut request) = guard.verify_token(&access, request).await;
    let path = request.uri().path();
    let file = match &*access {
        Access::Given(_) | Access::ReadOnly { .. } => None,
        Access::Made { file, .. } => Some(file.clone()),
    };
    let trusted = shown || (!matches!(*access, Access::Given(_)) && only_reads(request.method()));
    // Health checks carry no token. They only return whether the router is ready.
    if !trusted && !needs_no_token(path) {
        if let Access::ReadOnly { why } = &*access {
            return Err(refuse(path, StatusCode::SERVICE_UNAVAILABLE, why));
        }
        let message = match &file {
            None => "the admin port needs its token, in the header \"Authorization: Bearer TOKEN\"".to_owned(),
            Some(file) => format!(
                "changes need the token in {}, readable by the user that runs this router; the switchyard command reads it itself",
                file.display()
            ),
        };
        let mut response = refuse(path, StatusCode::UNAUTHORIZED, &message);
        let scheme = HeaderValue::from_static("Bearer realm=\"switchyard\"");
        response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
        return Err(response);
    }
    request.extensions_mut().insert(Trusted(trusted));
    request.extensions_mut().insert(TokenPresented(shown));
    request.extensions_mut().insert(TokenFile(file));
    let response = next.run(request).await;
    if trusted { Ok(response) } else { Err(response) }
}

#[cfg(test)]
mod tests {
    use super::super::Token;
    use super::*;

    #[test]
    fn accepted_host_names() {
        let access = AdminAccess::new(Access::Given(Token::new("t").expect("a token")));
        let options = AdminOptions { access, host_names: vec!["Router-1.example".into()], tls: None };
        let guard = Guard::new(SocketAddr::from(([127, 0, 0, 1], 6381)), options);
        let knows = |host: &'static str| guard.accepts_host(&Authority::from_static(host));
        let known = "localhost LOCALHOST:6381 localhost.:6381 switchyard.localhost 127.0.0.1:6381 10.1.2.3 [::1]:6381 [fe80::1] router-1.example:6381";
        for host in known.split(' ') {
            assert!(knows(host), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example:6381",
            "notlocalhost",
            "127.0.0.1.evil.example",
            "127.0.0.1.nip.io",
            "sub.router-1.example",
            "2130706433", // an integer is not an address to the parser, but browsers resolve it
        ] {
            assert!(!knows(host), "{host}");
        }
    }
}
