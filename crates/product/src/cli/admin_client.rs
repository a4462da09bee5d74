//! Client of a running router's admin API, for the subcommands that need one.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use hyper::{Method, StatusCode};
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use switchyard_control::admin::{Token, TokenReport};

use super::Failure;
use super::http::{Http, Response, is_of_tls};
use crate::config::{
    ADMIN_PORT, Config, Endpoint, SecretSource, Sources, certificates_in, default_file, provider, trusted_certificates,
};

/// Address and credentials of the router.
// Global, so that they may precede a nested subcommand (`switchyard nodes --admin HOST:PORT remove NODE`).
#[derive(Debug, Default, Args)]
pub(super) struct AdminFlags {
    /// Admin address of the router, with https:// in front if it uses HTTPS [default: from --config, else
    /// 127.0.0.1:6381]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    admin: Option<String>,

    /// Configuration file of the router, for the address and the token of its admin port [default:
    /// /etc/switchyard.toml, if it exists and --admin is not given]
    #[arg(short, long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    /// File with the token of the admin port [default: $SWITCHYARD_ADMIN_TOKEN, else from --config, else the token
    /// created by the router]
    #[arg(long, global = true, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,

    /// Authorities for the certificate of the admin port, PEM; implies HTTPS [default: those trusted by the system]
    #[arg(long, global = true, value_name = "FILE")]
    admin_ca_file: Option<PathBuf>,

    /// Client certificate for the admin port, PEM, if it requires one
    #[arg(long, global = true, value_name = "FILE", requires = "admin_key_file")]
    admin_cert_file: Option<PathBuf>,

    /// Key of the client certificate, PEM
    #[arg(long, global = true, value_name = "FILE", requires = "admin_cert_file")]
    admin_key_file: Option<PathBuf>,

    /// Print JSON, for scripts
    #[arg(long, global = true)]
    pub(super) json: bool,
}

/// Environment variable with the token.
const TOKEN_VARIABLE: &str = "SWITCHYARD_ADMIN_TOKEN";

/// Timeout of a request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Timeout of a change: the router queries nodes.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(60);

/// Timeout of the probe for another service at the address.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// Connection settings of a router's admin port.
pub(crate) struct AdminClient {
    http: Http,
    /// Scheme, host and port.
    base: String,
    timeout: Duration,
    token: Option<String>,
    /// Print responses unchanged.
    json: bool,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

impl AdminFlags {
    /// Builds the TLS settings: trusted authorities and the client certificate.
    fn tls(&self) -> anyhow::Result<Arc<ClientConfig>> {
        let trusted = trusted_certificates(self.admin_ca_file.as_deref())
            .map_err(|why| anyhow!("{why}; --admin-ca-file names the authority of the admin port's certificate"))?;
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(trusted);
        let tls = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots);
        Ok(Arc::new(match (&self.admin_cert_file, &self.admin_key_file) {
            (Some(chain), Some(file)) => {
                let chain = certificates_in(chain).map_err(|why| anyhow!("{why}"))?;
                let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
                let key = PrivateKeyDer::from_pem_slice(&bytes)
                    .with_context(|| format!("{} has no private key in PEM", file.display()))?;
                let unusable = || format!("cannot use the client certificate with the key in {}", file.display());
                tls.with_client_auth_cert(chain, key).with_context(unusable)?
            }
            _ => tls.with_no_client_auth(),
        }))
    }
}

impl AdminClient {
    pub(super) fn new(flags: &AdminFlags) -> Result<Self, Failure> {
        let file = flags.config.clone().or_else(|| if flags.admin.is_none() { default_file() } else { None });
        let config = match &file {
            Some(file) => Some(Sources { file: Some(file.clone()), overrides: Vec::new(), twemproxy: None }.read()?),
            None => None,
        };
        let (text, https) = match flags.admin.as_deref() {
            Some(text) => match text.strip_prefix("https://") {
                Some(rest) => (Some(rest.trim_end_matches('/')), true),
                None => (Some(text.strip_prefix("http://").map_or(text, |rest| rest.trim_end_matches('/'))), false),
            },
            None => (None, false),
        };
        let https = https || flags.admin_ca_file.is_some() || config.as_ref().is_some_and(|config| config.admin_tls);
        let endpoint = match (text, &config) {
            (Some(text), _) => Endpoint::parse(text, Some(ADMIN_PORT)).map_err(|why| anyhow!("--admin: {why}"))?,
            (None, Some(config)) => config.admin_listen.clone(),
            (None, None) => Endpoint::new("127.0.0.1", ADMIN_PORT),
        };
        let token = match (&flags.admin_token_file, std::env::var(TOKEN_VARIABLE)) {
            (Some(file), _) => Some(SecretSource::File(file.clone())),
            (None, Ok(_)) => Some(SecretSource::Env(TOKEN_VARIABLE.to_owned())),
            (None, Err(_)) => config.and_then(|config| config.admin_token),
        };
        let tls = https.then(|| flags.tls()).transpose()?;
        Ok(Self { json: flags.json, ..Self::to(&endpoint, token.as_ref(), tls, REQUEST_TIMEOUT)? })
    }

    /// Returns the client for the router with this configuration.
    pub(super) fn of(config: &Config) -> anyhow::Result<Self> {
        Self::of_at(config, &config.admin_listen, REQUEST_TIMEOUT)
    }

    /// Like [`AdminClient::of`], with a known admin address: the configuration may leave the port to the system.
    /// `timeout` is the timeout of a request.
    pub(crate) fn at(config: &Config, admin: SocketAddr, timeout: Duration) -> anyhow::Result<Self> {
        Self::of_at(config, &Endpoint::new(&admin.ip().to_string(), admin.port()), timeout)
    }

    fn of_at(config: &Config, admin: &Endpoint, timeout: Duration) -> anyhow::Result<Self> {
        let tls = config.admin_tls.then(|| AdminFlags::default().tls()).transpose()?;
        Self::to(admin, config.admin_token.as_ref(), tls, timeout)
    }

    /// Returns a client for a router on this machine that created its own token.
    pub(super) fn local(port: u16) -> anyhow::Result<Self> {
        Self::to(&Endpoint::new("127.0.0.1", port), None, None, REQUEST_TIMEOUT)
    }

    /// Returns the state directory, which has the token created by the router. `None` if the configuration has a token.
    pub(super) fn state_dir(&self) -> anyhow::Result<Option<PathBuf>> {
        let token: TokenReport = self.read(&self.get("/api/v1/token")?)?;
        Ok(token.file.as_deref().and_then(Path::parent).map(Path::to_owned))
    }

    /// Uses HTTPS with the settings in `tls`, if any.
    fn to(
        endpoint: &Endpoint,
        token: Option<&SecretSource>,
        tls: Option<Arc<ClientConfig>>,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let token = match token {
            Some(source) => Some(source.read().map_err(|error| anyhow!("the token of the admin port: {error}"))?.0),
            None => None,
        };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoint = endpoint.reachable();
        let base = format!("{scheme}://{endpoint}");
        Ok(Self { http: Http { endpoint, tls }, base, timeout, token, json: false })
    }

    /// Gets JSON from a path of the API, or the text of the metrics page.
    pub(crate) fn get(&self, path: &str) -> anyhow::Result<String> {
        self.send(Method::GET, path, self.token_header(), &[], self.timeout)
    }

    /// Like [`AdminClient::get`], including data that requires a token: proves that we may read the router's token.
    pub(super) fn get_all(&self, path: &str) -> anyhow::Result<String> {
        let header = self.proof("GET", path, &[])?.or_else(|| self.token_header());
        self.send(Method::GET, path, header, &[], self.timeout)
    }

    /// Posts a change. `path` must be URL-encoded (see [`encoded`]).
    pub(super) fn post(&self, path: &str) -> anyhow::Result<String> {
        self.change(path, &[])
    }

    /// Posts JSON to a path of the API, and returns the JSON response.
    pub(super) fn post_json(&self, path: &str, body: &impl Serialize) -> anyhow::Result<String> {
        self.change(path, &serde_json::to_vec(body)?)
    }

    /// Posts a body of JSON, or none.
    fn change(&self, path: &str, body: &[u8]) -> anyhow::Result<String> {
        let header = self.proof("POST", path, body)?.or_else(|| self.token_header());
        self.send(Method::POST, path, header, body, CHANGE_TIMEOUT)
    }

    fn token_header(&self) -> Option<String> {
        self.token.as_ref().map(|token| format!("Bearer {token}"))
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        authorization: Option<String>,
        body: &[u8],
        timeout: Duration,
    ) -> anyhow::Result<String> {
        let content_type = (!body.is_empty()).then(|| ("Content-Type", "application/json".to_owned()));
        let authorization = authorization.map(|value| ("Authorization", value));
        let headers: Vec<_> = content_type.into_iter().chain(authorization).collect();
        self.outcome(self.http.send(method, path, &headers, body, timeout))
    }

    /// Returns the proof that we may read the token created by the router. `None` if another token is configured, or
    /// the router created none.
    fn proof(&self, method: &str, path: &str, body: &[u8]) -> anyhow::Result<Option<String>> {
        if self.token.is_some() {
            return Ok(None);
        }
        // An unknown process may listen there: see `switchyard_control::admin::Token`.
        let report: TokenReport = self.read(&self.get("/api/v1/token")?)?;
        let Some(file) = report.file else { return Ok(None) };
        let token = Token::find(&file).map_err(|why| {
            anyhow!(
                "the token of {} is in {file:?}, which cannot be used: {why}; run this as the user (and in the container) that the router runs \
                 as, or give a token with --admin-token-file FILE, {TOKEN_VARIABLE} or -c FILE",
                self.base
            )
        })?;
        let to = self.http.endpoint.resolve().map_err(|why| anyhow!("--admin: {why}"))?;
        Ok(Some(token.prove(to, method, path, body).context("cannot use the token of the admin port")?))
    }

    fn outcome(&self, response: anyhow::Result<Response>) -> anyhow::Result<String> {
        let base = &self.base;
        let (status, body) = response.map_err(|error| {
            if is_of_tls(&error) {
                return anyhow!(
                    "no TLS connection to {base}: {error:#}; --admin-ca-file names the trusted authorities, --admin-cert-file and \
                     --admin-key-file name the client certificate, if it requires one"
                );
            }
            if self.speaks_resp() {
                return anyhow!(
                    "the service on {base} uses the protocol of Redis: is it the clients' port, or a node? The admin port ({ADMIN_PORT} unless \
                     configured otherwise) is set with --admin HOST:PORT or -c FILE"
                );
            }
            anyhow!(
                "no router answers on {base}: {error:#}; is `switchyard serve` running? Give another admin address with \
                 --admin HOST:PORT (https://HOST:PORT if it uses HTTPS) or -c FILE"
            )
        })?;
        let body = body.with_context(|| format!("the response of {base} is incomplete"))?;
        if status.is_success() {
            return Ok(body);
        }
        let Ok(Refusal { error }) = serde_json::from_str::<Refusal>(&body) else {
            bail!("{base} answered {status}: {}", body.trim_end());
        };
        if status == StatusCode::UNAUTHORIZED {
            bail!("{error}; give it with --admin-token-file FILE, with {TOKEN_VARIABLE}, or with -c FILE");
        }
        bail!("{}", error.trim_end());
    }

    /// Whether the service at the address replies like a Redis server.
    fn speaks_resp(&self) -> bool {
        let ask = || -> std::io::Result<u8> {
            let address = self.http.endpoint.resolve().map_err(std::io::Error::other)?;
            let mut stream = TcpStream::connect_timeout(&address, PROBE_TIMEOUT)?;
            stream.set_read_timeout(Some(PROBE_TIMEOUT))?;
            stream.write_all(b"PING\r\n")?;
            let mut first = [0];
            stream.read_exact(&mut first)?;
            Ok(first[0])
        };
        ask().is_ok_and(|first| first == b'+' || first == b'-')
    }

    /// Prints a response, formatted by `text` unless JSON is requested.
    pub(super) fn print<T: DeserializeOwned>(
        &self,
        body: &str,
        text: impl FnOnce(&T) -> String,
    ) -> Result<(), Failure> {
        if self.json {
            println!("{}", body.trim_end());
        } else {
            print!("{}", text(&self.read(body)?));
        }
        Ok(())
    }

    /// Prints the result, or the response if JSON is requested.
    pub(super) fn print_text(&self, body: &str, text: &str) -> Result<(), Failure> {
        println!("{}", if self.json { body.trim_end() } else { text });
        Ok(())
    }

    /// Parses JSON. If that fails, the response is not from a router of this version.
    pub(super) fn read<T: DeserializeOwned>(&self, body: &str) -> anyhow::Result<T> {
        serde_json::from_str(body)
            .with_context(|| format!("the service on {} is not a Switchyard of this version", self.base))
    }
}

/// Escapes a name for use in a URL path.
pub(super) fn encoded(name: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~:".contains(&byte);
    name.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_urls() {
        assert_eq!(encoded("127.0.0.1:7001"), "127.0.0.1:7001");
        assert_eq!(encoded("[::1]:1/a b%"), "%5B::1%5D:1%2Fa%20b%25");
    }
}
