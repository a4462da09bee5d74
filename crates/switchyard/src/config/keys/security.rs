//! The keys about who may connect and how: users, certificates, listeners. A file of their own because the table is long.

use std::time::Duration;

use super::super::Config;
use super::super::listener::{LimitConfig, ListenerConfig, parse_mode};
use super::super::tls::ClientAuth;
use super::{GB, HOUR, KB, Key, MS, Section, Takes, list, quoted, size, time};

pub(super) const USERS_FILE: &[Key<Config>] = &[
    file_key!(
        Config,
        Section::Clients,
        "users-file",
        "File with the users that may log in, what they may do, and hashes of their passwords: see docs/security.md. With it, nobody is let in \
         without a name unless it gives the default user.",
        "\"/etc/switchyard/users\"",
        users_file
    ),
    key!(
        Section::Clients,
        "default-user-rules",
        Takes::Reload,
        &[],
        "What clients that have not named a user may or may not do, in the words of the users file: [\"-@dangerous\", \"-keys\"]; \
         [\"operator\"] lets them change the fleet. Not together with a line for the default user there. Empty: they may do everything but that.",
        |config, raw, _| {
            config.default_user_rules = raw.texts()?.into_iter().filter(|word| !word.is_empty()).collect();
            Ok(())
        },
        |config| list(config.default_user_rules.iter().cloned())
    ),
    key!(
        Section::Clients,
        "login-timeout",
        Takes::Reload,
        &["auth-timeout"],
        "A client that has to log in, and has not after so long, is closed. 0s: never.",
        |config, raw, _| {
            config.live.login_timeout = Some(raw.time(Duration::ZERO..=HOUR)?).filter(|time| !time.is_zero());
            Ok(())
        },
        |config| time(config.live.login_timeout.unwrap_or_default())
    ),
];

pub(super) const TLS: &[Key<Config>] = &[
    file_key!(
        Config,
        Section::Tls,
        "cert-file",
        "Certificate that clients of TLS listeners are shown, with what leads from it to an authority: PEM.",
        "\"/etc/switchyard/cert.pem\"",
        tls.certificate
    ),
    file_key!(Config, Section::Tls, "key-file", "Private key of that certificate: PEM.", "\"/etc/switchyard/key.pem\"", tls.key),
    file_key!(
        Config,
        Section::Tls,
        "client-ca-file",
        "Authorities whose certificates clients may show: PEM.",
        "\"/etc/switchyard/client-ca.pem\"",
        tls.client_ca
    ),
    key!(
        Section::Tls,
        "client-auth",
        Takes::Reload,
        &["tls-auth-clients"],
        "off: clients are not asked for a certificate; optional: one that is shown must be good; required: without a good one the \
         handshake fails.",
        |config, raw, _| {
            config.tls.client_auth = ClientAuth::parse(raw.text()?)?;
            Ok(())
        },
        |config| quoted(config.tls.client_auth.name())
    ),
    key!(
        Section::Tls,
        "handshake-timeout",
        Takes::Reload,
        &[],
        "Time that a client has for the TLS handshake.",
        |config, raw, _| {
            config.live.handshake_timeout = raw.time(MS * 100..=HOUR)?;
            Ok(())
        },
        |config| time(config.live.handshake_timeout)
    ),
];

pub(super) const NODES_TLS: &[Key<Config>] = &[
    key!(
        Section::Nodes,
        "tls",
        Takes::Reload,
        &["tls-replication", "tls-cluster"],
        "Speak TLS to every node that does not say otherwise.",
        |config, raw, _| {
            config.nodes_tls.on = raw.switch()?;
            Ok(())
        },
        |config| Some(config.nodes_tls.on.to_string())
    ),
    file_key!(
        Config,
        Section::Nodes,
        "tls-ca-file",
        "Authorities that sign the nodes' certificates: PEM. Without it, those that the system trusts.",
        "\"/etc/switchyard/ca.pem\"",
        nodes_tls.ca
    ),
    file_key!(
        Config,
        Section::Nodes,
        "tls-cert-file",
        "Certificate that nodes are shown: PEM. None where it is left out.",
        "\"/etc/switchyard/client.pem\"",
        nodes_tls.certificate
    ),
    file_key!(
        Config,
        Section::Nodes,
        "tls-key-file",
        "Private key of that certificate: PEM.",
        "\"/etc/switchyard/client.key\"",
        nodes_tls.key
    ),
    key!(
        Section::Nodes,
        "tls-server-name",
        Takes::Reload,
        &[],
        "Name that the nodes' certificates must have, where it is not the host of their address.",
        |config, raw, _| {
            config.nodes_tls.server_name = Some(raw.text()?.to_owned());
            Ok(())
        },
        |config| config.nodes_tls.server_name.as_ref().and_then(quoted),
        "\"redis.internal\""
    ),
    key!(
        Section::Nodes,
        "tls-insecure",
        Takes::Reload,
        &["insecure", "skip-verify"],
        "Take any certificate from nodes. Whoever can get in between can then read and change everything: for trials only.",
        |config, raw, _| {
            config.nodes_tls.insecure = raw.switch()?;
            Ok(())
        },
        |config| Some(config.nodes_tls.insecure.to_string())
    ),
];

pub(super) const LISTENER: &[Key<ListenerConfig>] = &[
    key!(
        Section::Listener,
        "address",
        Takes::Restart,
        &["listen", "bind"],
        "What to listen on: HOST:PORT, tls://HOST:PORT or unix:/path.",
        |listener, raw, _| {
            listener.place = Some(raw.listen_place()?);
            Ok(())
        },
        |listener| listener.place.as_ref().and_then(quoted),
        "\"unix:/run/switchyard/socket\""
    ),
    key!(
        Section::Listener,
        "tls",
        Takes::Restart,
        &[],
        "Speak TLS, with the certificate of [tls].",
        |listener, raw, _| {
            listener.tls = Some(raw.switch()?);
            Ok(())
        },
        |listener| listener.tls.map(|on| on.to_string()),
        "true"
    ),
    key!(
        Section::Listener,
        "mode",
        Takes::Restart,
        &["unixsocketperm"],
        "Permissions of a Unix socket, in octal and in quotes. Default: only the user that Switchyard runs as.",
        |listener, raw, _| {
            listener.mode = Some(parse_mode(raw.text()?)?);
            Ok(())
        },
        |listener| listener.mode.and_then(|mode| quoted(format!("{mode:o}"))),
        "\"660\""
    ),
    key!(
        Section::Listener,
        "connections",
        Takes::Restart,
        &[],
        "Connections at once.",
        |listener, raw, _| {
            listener.bounds.connections = Some(raw.count(1..=10_000_000)? as u32);
            Ok(())
        },
        |listener| listener.bounds.connections.map(|n| n.to_string()),
        "1000"
    ),
    key!(
        Section::Listener,
        "connections-per-second",
        Takes::Restart,
        &[],
        "Connections taken per second; what is more is closed at once.",
        |listener, raw, _| {
            listener.connections_per_second = Some(raw.count(1..=10_000_000)? as u32);
            Ok(())
        },
        |listener| listener.connections_per_second.map(|n| n.to_string()),
        "1000"
    ),
    key!(
        Section::Listener,
        "requests-per-second",
        Takes::Restart,
        &[],
        "Commands per second of all its clients together; what is more gets an error.",
        |listener, raw, _| {
            listener.bounds.requests_per_second = Some(raw.count(1..=100_000_000)? as u32);
            Ok(())
        },
        |listener| listener.bounds.requests_per_second.map(|n| n.to_string()),
        "1000"
    ),
    key!(
        Section::Listener,
        "bytes-in-flight",
        Takes::Restart,
        &[],
        "Bytes of commands not yet answered and of replies not yet read, of all its clients together.",
        |listener, raw, _| {
            listener.bounds.bytes_in_flight = Some(raw.size(KB..=64 * GB)? as u64);
            Ok(())
        },
        |listener| listener.bounds.bytes_in_flight.and_then(|bytes| size(bytes as usize)),
        "\"256mb\""
    ),
];

pub(super) const LIMIT: &[Key<LimitConfig>] = &[
    key!(
        Section::Limit,
        "prefix",
        Takes::Reload,
        &["pattern"],
        "The keys that begin with this, byte by byte; without it, all keys.",
        |limit, raw, _| {
            limit.prefix = raw.text()?.to_owned();
            Ok(())
        },
        |limit| quoted(&limit.prefix),
        "\"tenant-a:\""
    ),
    key!(
        Section::Limit,
        "requests-per-second",
        Takes::Reload,
        &[],
        "Commands per second on all these keys together; what is more gets an error that begins with LIMITED.",
        |limit, raw, _| {
            limit.requests_per_second = Some(raw.count(1..=100_000_000)? as u32);
            Ok(())
        },
        |limit| limit.requests_per_second.map(|n| n.to_string()),
        "1000"
    ),
    key!(
        Section::Limit,
        "key-requests-per-second",
        Takes::Reload,
        &[],
        "Commands per second on each of these keys.",
        |limit, raw, _| {
            limit.key_requests_per_second = Some(raw.count(1..=u64::from(switchyard_router::KEY_RATE_MAX))? as u32);
            Ok(())
        },
        |limit| limit.key_requests_per_second.map(|n| n.to_string()),
        "1000"
    ),
];
