//! Asks the admin API of a running router, for `status` and `nodes`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::Failure;
use crate::config::{ADMIN_PORT, Endpoint, SecretSource, Sources};

/// Which router to ask.
#[derive(Debug, Args)]
pub(super) struct AdminFlags {
    /// Admin address of the router [default: that of --config, else 127.0.0.1:6381]
    #[arg(long, value_name = "HOST:PORT")]
    admin: Option<String>,

    /// Configuration file of the router, for the address and the token of its admin port
    #[arg(short, long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// File with the token of the admin port [default: $SWITCHYARD_ADMIN_TOKEN, else that of --config]
    #[arg(long, value_name = "FILE")]
    admin_token_file: Option<PathBuf>,

    /// Print the answer as JSON, for scripts
    #[arg(long)]
    pub(super) json: bool,
}

/// The environment variable that a token is taken from.
const TOKEN_VARIABLE: &str = "SWITCHYARD_ADMIN_TOKEN";

/// The router that a command asks.
pub(super) struct AdminClient {
    agent: ureq::Agent,
    address: String,
    token: Option<String>,
}

#[derive(Deserialize)]
struct Refusal {
    error: String,
}

impl AdminClient {
    pub(super) fn new(flags: &AdminFlags) -> Result<Self, Failure> {
        let config = match &flags.config {
            Some(file) => Some(Sources { file: Some(file.clone()), overrides: Vec::new() }.read()?),
            None => None,
        };
        if let Some(config) = config.as_ref().filter(|config| config.admin_tls) {
            return Err(Failure::Failed(anyhow!(
                "the admin port of this configuration speaks HTTPS (admin.tls), and this command does not; ask it with \
                 `curl --cacert CA.pem -H \"Authorization: Bearer TOKEN\" https://{}/api/v1/status`",
                config.admin_listen.reachable()
            )));
        }
        let endpoint = match (&flags.admin, &config) {
            (Some(text), _) => Endpoint::parse(text, Some(ADMIN_PORT)).map_err(|why| anyhow!("--admin: {why}"))?,
            (None, Some(config)) => config.admin_listen.clone(),
            (None, None) => Endpoint::new("127.0.0.1", ADMIN_PORT),
        };
        let token = match (&flags.admin_token_file, std::env::var(TOKEN_VARIABLE)) {
            (Some(file), _) => Some(SecretSource::File(file.clone())),
            (None, Ok(_)) => Some(SecretSource::Env(TOKEN_VARIABLE.to_owned())),
            (None, Err(_)) => config.and_then(|config| config.admin_token),
        };
        let token = match token {
            Some(source) => Some(source.read().map_err(|error| anyhow!("the token of the admin port: {error}"))?.0),
            None => None,
        };
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(Duration::from_secs(10)))
            .http_status_as_error(false)
            .proxy(None) // the router is near; a proxy for the web is not the way to it
            .build()
            .into();
        Ok(Self { agent, address: endpoint.reachable().to_string(), token })
    }

    /// The JSON at a path of the API.
    pub(super) fn get(&self, path: &str) -> anyhow::Result<String> {
        let address = &self.address;
        let mut request = self.agent.get(format!("http://{address}{path}"));
        if let Some(token) = &self.token {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().map_err(|error| {
            anyhow!(
                "no router answers on http://{address}: {error}; is `switchyard serve` running? Another admin address is given \
                 with --admin HOST:PORT or -c FILE"
            )
        })?;
        let status = response.status();
        let body = response.body_mut().read_to_string().with_context(|| format!("the answer of http://{address} broke off"))?;
        if status.is_success() {
            return Ok(body);
        }
        let said = serde_json::from_str::<Refusal>(&body).map_or(body, |refusal| refusal.error);
        if status == ureq::http::StatusCode::UNAUTHORIZED {
            bail!("{said}; give it with --admin-token-file FILE, with {TOKEN_VARIABLE}, or with -c FILE");
        }
        bail!("http://{address} answered {status}: {}", said.trim_end());
    }

    /// What the JSON says; an answer that is none comes from something else than a router.
    pub(super) fn read<T: DeserializeOwned>(&self, body: &str) -> anyhow::Result<T> {
        serde_json::from_str(body).with_context(|| format!("what answers on http://{} is no Switchyard of this version", self.address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_admin_port_that_speaks_https_is_told() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let file = dir.path().join("switchyard.toml");
        std::fs::write(&file, "[admin]\ntls = true\n[[node]]\naddress = \"127.0.0.1:7001\"\n").expect("written");
        let flags = AdminFlags { admin: None, config: Some(file), admin_token_file: None, json: false };
        let error = AdminClient::new(&flags).map(|_| ()).expect_err("no HTTPS here").to_string();
        assert!(error.contains("https://127.0.0.1:6381") && error.contains("curl"), "{error}");
    }
}
