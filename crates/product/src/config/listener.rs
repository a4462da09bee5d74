//! Addresses to listen on, in their written form, and the `[[listener]]` tables.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use switchyard_router::{Bounds, KeyLimit, ListenAddress, ListenerSettings, Reads};

use super::{Config, Endpoint, Origin, Problem};

/// Default permissions of a Unix socket: only the user of the Switchyard process.
pub(crate) const SOCKET_MODE: u32 = 0o600;

/// `127.0.0.1:6380`, `tls://0.0.0.0:6390` or `unix:/run/switchyard/socket`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ListenPlace {
    Tcp { endpoint: Endpoint, tls: bool },
    Unix(PathBuf),
}

impl ListenPlace {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            if !path.starts_with('/') {
                return Err("the path of a Unix socket must be absolute: \"unix:/run/switchyard/socket\"".to_owned());
            }
            // The kernel's `sockaddr_un` has 108 bytes. The last one is a NUL.
            if path.len() > 107 {
                return Err("the path of a Unix socket can have at most 107 bytes".to_owned());
            }
            return Ok(Self::Unix(PathBuf::from(path)));
        }
        for scheme in ["tls://", "rediss://"] {
            if let Some(address) = text.strip_prefix(scheme) {
                return Ok(Self::Tcp { endpoint: Endpoint::parse(address.trim_end_matches('/'), None)?, tls: true });
            }
        }
        Ok(Self::Tcp { endpoint: Endpoint::parse(text, None)?, tls: false })
    }
}

impl fmt::Display for ListenPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { endpoint, tls: true } => write!(f, "tls://{endpoint}"),
            Self::Tcp { endpoint, tls: false } => endpoint.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A `[[listener]]` table. An address of `listen` is a listener with all other settings at their defaults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ListenerConfig {
    /// Always set in a configuration without problems.
    pub(super) place: Option<ListenPlace>,
    pub(super) tls: Option<bool>,
    pub(super) mode: Option<u32>,
    pub(super) reads: Option<Reads>,
    pub(super) bounds: Bounds,
    pub(super) connections_per_second: Option<u32>,
    pub(super) origin: Option<Origin>,
}

impl ListenerConfig {
    pub(super) fn at(place: ListenPlace) -> Self {
        Self { place: Some(place), ..Self::default() }
    }

    /// Resolves the host name.
    pub(super) fn resolve(&self) -> Result<ListenerSettings, String> {
        let (address, tls) = match &self.place {
            None => return Err("this [[listener]] has no address".to_owned()),
            Some(ListenPlace::Tcp { .. }) if self.mode.is_some() => {
                return Err(
                    "mode sets the permissions of a Unix socket, and this listener has another address; remove mode"
                        .to_owned(),
                );
            }
            Some(ListenPlace::Tcp { endpoint, tls }) => {
                (ListenAddress::Tcp(endpoint.resolve()?), self.tls.unwrap_or(*tls))
            }
            Some(ListenPlace::Unix(path)) => {
                let address = ListenAddress::Unix { path: path.clone(), mode: self.mode.unwrap_or(SOCKET_MODE) };
                (address, self.tls.unwrap_or(false))
            }
        };
        Ok(ListenerSettings {
            address,
            tls,
            reads: self.reads,
            bounds: self.bounds,
            connections_per_second: self.connections_per_second,
        })
    }
}

/// A `[[limit]]` table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LimitConfig {
    pub(super) prefix: String,
    pub(super) requests_per_second: Option<u32>,
    pub(super) key_requests_per_second: Option<u32>,
}

impl LimitConfig {
    pub(super) fn settings(&self) -> KeyLimit {
        KeyLimit {
            prefix: self.prefix.clone(),
            requests_per_second: self.requests_per_second,
            key_requests_per_second: self.key_requests_per_second,
        }
    }
}

/// Parses octal permissions, as `chmod` accepts.
pub(super) fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 && text.bytes().all(|b| b.is_ascii_digit()) => Ok(mode),
        _ => Err(format!("{text:?} is not the mode of a file in octal, such as \"660\"")),
    }
}

impl Config {
    /// Resolves the addresses for clients.
    pub(super) fn resolve_listen(&self, has_password: bool, problems: &mut Vec<Problem>) -> Vec<ListenerSettings> {
        let mut listen: Vec<ListenerSettings> = Vec::new();
        for listener in self.all_listeners() {
            let wrong = |text: String| match &listener.origin {
                Some(origin) => Problem::at(origin, text),
                None => self.problem("listen", text),
            };
            match listener.resolve() {
                Ok(settings) => {
                    let any = matches!(settings.address, ListenAddress::Tcp(address) if address.port() == 0);
                    if !any && listen.iter().any(|other| other.address == settings.address) {
                        problems.push(wrong(format!("{} is given twice", settings.address)));
                    } else {
                        listen.push(settings);
                    }
                }
                Err(text) => problems.push(wrong(text)),
            }
        }
        let addresses = listen.iter().filter_map(|listener| match listener.address {
            ListenAddress::Tcp(address) => Some(address),
            ListenAddress::Unix { .. } => None,
        });
        if let Some(open) = addresses.into_iter().find(|address| !address.ip().is_loopback())
            && !has_password
            && !self.allow_open_listener
        {
            problems.push(self.problem(
                "listen",
                format!(
                    "refusing to listen on {open} without a password: any client that can reach that address could read and delete \
                     every key. Do one of: (1) give clients a password with --password-file FILE, or password-file in [clients], \
                     or users with users-file; \
                     (2) listen on 127.0.0.1 only; (3) if only trusted machines can reach it, confirm that with --allow-open-listener, \
                     or allow-open-listener = true"
                ),
            ));
        }
        listen
    }

    /// Resolves the address of the admin port.
    pub(super) fn resolve_admin(
        &self,
        has_token: bool,
        listen: &[ListenerSettings],
        problems: &mut Vec<Problem>,
    ) -> Option<SocketAddr> {
        let address = match self.admin_listen.resolve() {
            Ok(address) => address,
            Err(text) => {
                problems.push(self.problem("admin.listen", text));
                return None;
            }
        };
        if !address.ip().is_loopback() && !has_token {
            problems.push(self.problem(
                "admin.listen",
                format!(
                    "refusing to serve the admin API on {address} without a token: any client that can reach that address could \
                     control the router. Give it one with --admin-token-file FILE, or token-file in [admin], or listen on \
                     127.0.0.1 only"
                ),
            ));
        }
        if address.port() != 0 && listen.iter().any(|listener| listener.address == ListenAddress::Tcp(address)) {
            problems.push(
                self.problem(
                    "admin.listen",
                    format!("{address} is already the address for clients; choose another port"),
                ),
            );
        }
        Some(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listen_places_parse_and_display() {
        for text in ["127.0.0.1:6380", "tls://0.0.0.0:6390", "unix:/run/s", "tls://[::1]:1"] {
            assert_eq!(ListenPlace::parse(text).expect(text).to_string(), text);
        }
        assert_eq!(ListenPlace::parse("rediss://a:1/").expect("good").to_string(), "tls://a:1");
        assert_eq!(ListenPlace::parse("unix:///run/s").expect("good").to_string(), "unix:/run/s");
        for text in ["unix:s", "unix:", "tls://", "a", &format!("unix:/{}", "x".repeat(107))] {
            assert!(ListenPlace::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn modes_are_octal() {
        assert_eq!(parse_mode("660"), Ok(0o660));
        assert_eq!(parse_mode("0600"), Ok(0o600));
        for text in ["", "888", "1777", "+60", "rw"] {
            assert!(parse_mode(text).is_err(), "{text}");
        }
    }
}
