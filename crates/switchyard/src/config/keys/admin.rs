//! Keys of the admin port and of the log.

use super::{Key, Section, Takes, list, quoted};
use crate::config::secret::SecretForm;
use crate::config::{Config, LogFormat, LogLevel};

pub(super) const ADMIN: &[Key<Config>] = &[
    key!(
        Section::Admin,
        "listen",
        Takes::Restart,
        &["bind", "port", "address"],
        "Address of the admin API, metrics and health checks. Addresses that others can reach need a token here; elsewhere one is made in the \
         state directory for what changes something.",
        |config, raw, _| {
            config.admin_listen = raw.endpoint(None)?;
            Ok(())
        },
        |config| quoted(&config.admin_listen)
    ),
    key!(
        Section::Admin,
        "host-names",
        Takes::Restart,
        &["allowed-hosts", "server-name"],
        "Names by which browsers and tools address the admin port, beside localhost and IP addresses, which are always \
         allowed. Requests for other names are refused, so that no web page can reach it through a name of its own.",
        |config, raw, _| {
            config.admin_host_names = raw.texts()?;
            Ok(())
        },
        |config| list(config.admin_host_names.iter().cloned())
    ),
];

pub(super) const ADMIN_TOKEN: [Key<Config>; 3] = secret!(
    Config,
    Section::Admin,
    Takes::Reload,
    admin_token,
    "token",
    "bearer token that the admin port asks for",
    &["password", "secret"]
);

pub(super) const ADMIN_TLS: &[Key<Config>] = &[
    key!(
        Section::Admin,
        "tls",
        Takes::Restart,
        &["https"],
        "Serve the admin port over HTTPS, with the certificate of [tls].",
        |config, raw, _| {
            config.admin_tls = raw.switch()?;
            Ok(())
        },
        |config| Some(config.admin_tls.to_string())
    ),
    file_key!(
        Config,
        Section::Admin,
        "tls-client-ca-file",
        "Authorities of which whoever reaches the admin port must show a certificate: PEM. Without it nobody is asked.",
        "\"/etc/switchyard/admin-ca.pem\"",
        admin_client_ca
    ),
];

pub(super) const LOG: &[Key<Config>] = &[
    key!(
        Section::Log,
        "level",
        Takes::Reload,
        &["loglevel", "verbosity"],
        "error, warn, info, debug or trace; or levels by module, such as \"info,switchyard_router=debug\".",
        |config, raw, _| {
            let text = raw.text()?;
            match LogLevel::parse(text) {
                Some(level) => config.log_level = level,
                None => {
                    return Err(format!(
                        "{text:?} is not error, warn, info, debug, trace or a filter such as \"info,switchyard_router=debug\""
                    ));
                }
            }
            Ok(())
        },
        |config| quoted(&config.log_level.0)
    ),
    key!(
        Section::Log,
        "format",
        Takes::Restart,
        &["logformat"],
        "text for people, json for machines; both go to stderr.",
        |config, raw, _| {
            config.log_format = match raw.text()? {
                "text" => LogFormat::Text,
                "json" => LogFormat::Json,
                other => return Err(format!("{other:?} is not text or json")),
            };
            Ok(())
        },
        |config| quoted(match config.log_format {
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        })
    ),
];
