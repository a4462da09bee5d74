//! Addresses in the notation of configurations: `127.0.0.1:7001`, `redis-a`, `[::1]:6380`.
//!
//! The text is stored along with the resolved address, because it is the name of the node: in errors, in metrics and in
//! the slot map. The node keeps its identity if the name resolves to another address later.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

/// A host and a port, not resolved.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Endpoint {
    host: String,
    port: u16,
}

/// Description of valid addresses, which ends every error about an address.
pub const ENDPOINT_FORM: &str = "an address HOST:PORT, such as \"127.0.0.1:7001\", \"redis-a:6379\" or \"[::1]:6379\"";

impl Endpoint {
    /// Creates an endpoint of a valid host and port.
    pub fn new(host: &str, port: u16) -> Self {
        Self { host: host.to_owned(), port }
    }

    /// Parses an address. `default_port` applies if the text contains no port.
    pub fn parse(text: &str, default_port: Option<u16>) -> Result<Self, String> {
        let expected = |why: &str| Err(format!("{why}; expected {ENDPOINT_FORM}"));
        let text = text.trim();
        if text.contains("://") {
            return expected("URLs are not understood (TLS to a node is tls = true)");
        }
        if text.starts_with('/') || text.starts_with("unix:") {
            return expected("nodes cannot be reached through Unix sockets");
        }
        if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
            return expected("a port alone is not an address");
        }
        let (host, port) = match text.parse::<IpAddr>() {
            Ok(IpAddr::V6(_)) => match text.rsplit_once(':') {
                // `::1:7003` is a valid address without a port, but certainly a mistake.
                Some((host, port)) if host.parse::<IpAddr>().is_ok() && port.parse::<u16>().is_ok() => {
                    let other = default_port.unwrap_or(6379);
                    return Err(format!(
                        "an IPv6 address with a port stands in brackets: write [{host}]:{port}, or [{text}]:{other} for a host of that address"
                    ));
                }
                _ => (text, None),
            },
            _ => match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let port = match port {
            None => match default_port {
                Some(port) => port,
                None => return expected("the port is missing"),
            },
            // `parse` alone would accept `+1`.
            Some(port) => match port.parse::<u16>() {
                Ok(number) if port.bytes().all(|b| b.is_ascii_digit()) => number,
                _ => return expected("the port is not a number from 0 to 65535"),
            },
        };
        let host = match host.strip_prefix('[').and_then(|h| h.strip_suffix(']')) {
            Some(inner) if inner.parse::<std::net::Ipv6Addr>().is_ok() => inner,
            Some(_) => return expected("what stands in brackets is not an IPv6 address"),
            None => host,
        };
        if host.is_empty() {
            return expected("the host is missing");
        }
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        if host != "*" && host.parse::<IpAddr>().is_err() && !host.chars().all(fits) {
            return expected("the host is neither an IP address nor a name");
        }
        Ok(Self { host: host.to_ascii_lowercase(), port })
    }

    /// Host as written.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Whether the host is a name, so that its address may change.
    pub fn is_name(&self) -> bool {
        self.host != "*" && self.host.parse::<IpAddr>().is_err()
    }

    /// Host and port.
    pub fn parts(&self) -> (String, u16) {
        (self.host.clone(), self.port)
    }

    /// Endpoint for connecting to this listener from the same machine: replaces a wildcard address by the loopback
    /// address.
    pub fn reachable(&self) -> Self {
        let host = match self.host.as_str() {
            "*" | "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            host => host,
        };
        Self::new(host, self.port)
    }

    /// Resolves the name. Prefers the first IPv4 address, because servers that listen on a single family mostly listen
    /// on IPv4.
    pub fn resolve(&self) -> Result<SocketAddr, String> {
        let host = if self.host == "*" { "0.0.0.0" } else { &self.host };
        let found: Vec<SocketAddr> = (host, self.port)
            .to_socket_addrs()
            .map_err(|error| format!("cannot resolve the host name \"{}\": {error}", self.host))?
            .collect();
        found
            .iter()
            .find(|address| address.is_ipv4())
            .or(found.first())
            .copied()
            .ok_or_else(|| format!("the host name \"{}\" has no address", self.host))
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_in_all_common_forms() {
        for (text, shown) in [
            ("127.0.0.1:7001", "127.0.0.1:7001"),
            ("127.0.0.1", "127.0.0.1:6379"),
            (" Redis-A ", "redis-a:6379"),
            ("redis_b.internal:7000", "redis_b.internal:7000"),
            ("[::1]:7001", "[::1]:7001"),
            ("::1", "[::1]:6379"),
            ("*:6380", "*:6380"),
        ] {
            assert_eq!(Endpoint::parse(text, Some(6379)).expect(text).to_string(), shown);
        }
    }

    #[test]
    fn errors_of_wrong_addresses_contain_the_expected_form() {
        for text in [
            "",
            ":7001",
            "6380",
            "a:b",
            "a:70000",
            "a:-1",
            "a:+1",
            "[a]:1",
            "a b:1",
            "redis://h:1",
            "/tmp/redis.sock",
            "h:1:2",
            "[::1",
        ] {
            let error = Endpoint::parse(text, Some(6379)).expect_err(text);
            assert!(error.contains("expected an address HOST:PORT"), "{text}: {error}");
        }
        assert!(Endpoint::parse("localhost", None).is_err());
        let error = Endpoint::parse("::1:7003", Some(6379)).expect_err("two things");
        assert!(error.contains("write [::1]:7003, or [::1:7003]:6379"), "{error}");
    }

    #[test]
    fn names_are_resolved() {
        let address = Endpoint::parse("localhost:7001", None).and_then(|e| e.resolve()).expect("localhost");
        assert!(address.ip().is_loopback());
        assert_eq!(Endpoint::parse("*:1", None).and_then(|e| e.resolve()).expect("any"), ([0, 0, 0, 0], 1).into());
        let error =
            Endpoint::parse("no-such-host.invalid:1", None).and_then(|e| e.resolve()).expect_err("reserved name");
        assert!(error.contains("no-such-host.invalid"), "{error}");
    }
}
