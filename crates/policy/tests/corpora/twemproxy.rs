//! Any text as a configuration file of twemproxy: it is refused with lines that the file has, or each pool has servers
//! and a place for each key.

use switchyard_policy::topology::{Continuum, Server};
use switchyard_policy::twemproxy::parse;

pub(crate) fn twemproxy(bytes: &[u8]) {
    // The reader of the file refuses other bytes.
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let pools = match parse(text) {
        Ok(pools) => pools,
        Err(mistakes) => {
            assert!(!mistakes.is_empty());
            assert!(mistakes.iter().all(|mistake| mistake.line.is_none_or(|line| line > 0 && line <= bytes.len() + 1)));
            return;
        }
    };
    assert!(!pools.is_empty());
    for pool in pools {
        let servers: Vec<Server> = pool.servers.iter().map(|server| server.server.clone()).collect();
        assert!(!servers.is_empty() && servers.iter().all(|server| server.weight > 0));
        if let Ok(continuum) = Continuum::new(pool.scheme, servers) {
            for key in [&b""[..], b"key", b"{tag}key", text.as_bytes()] {
                assert!(continuum.home(continuum.slot_of(key)).is_some(), "each key has a server");
            }
        }
    }
}
