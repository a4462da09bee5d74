//! Test harness: real nodes, the real binary in front of them, and a raw client.
//!
//! `SWITCHYARD_E2E_TARGET=direct` connects the clients to a plain server instead of the router. All assertions must
//! hold there, too, except in tests about the router or several nodes, which use [`site::Site::router_only`]. This
//! tests the tests themselves.

pub(crate) mod certificates;
pub(crate) mod client;
pub(crate) mod http;
pub(crate) mod node;
#[path = "../../../../../tests/ports.rs"]
pub(crate) mod ports;
pub(crate) mod process;
pub(crate) mod random;
pub(crate) mod relay;
pub(crate) mod router;
pub(crate) mod sandbox;
pub(crate) mod site;
pub(crate) mod slots;
pub(crate) mod value;

pub(crate) use client::{Client, encode, words};
pub(crate) use node::{Node, NodeOptions};
pub(crate) use random::Random;
pub(crate) use router::{Router, RouterOptions};
pub(crate) use site::{Site, SiteOptions, direct};
pub(crate) use value::{Value, bulk, int, ok, simple};

use std::time::{Duration, Instant};

/// Result of a probe in `until`: a value, or whether a condition holds.
pub(crate) trait Probed {
    type Found;
    fn found(self) -> Option<Self::Found>;
}

impl<T> Probed for Option<T> {
    type Found = T;
    fn found(self) -> Option<T> {
        self
    }
}

impl Probed for bool {
    type Found = ();
    fn found(self) -> Option<()> {
        self.then_some(())
    }
}

/// Waits until `probe` returns a value or true. Otherwise panics with `what`.
#[track_caller]
pub(crate) fn until<P: Probed>(what: &str, probe: impl FnMut() -> P) -> P::Found {
    until_within(client::TIMEOUT, what, probe)
}

/// Like `until`, with another timeout.
#[track_caller]
pub(crate) fn until_within<P: Probed>(timeout: Duration, what: &str, mut probe: impl FnMut() -> P) -> P::Found {
    let end = Instant::now() + timeout;
    loop {
        if let Some(value) = probe().found() {
            return value;
        }
        assert!(Instant::now() < end, "timed out after {timeout:?} waiting until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
