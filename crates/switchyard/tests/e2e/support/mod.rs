//! What every test needs: real nodes, the real binary in front of them, and a client that hides nothing.
//!
//! `SWITCHYARD_E2E_TARGET=direct` points the clients at a plain server instead of the router: what a test asserts must
//! then hold as well, unless it is about the router or several nodes (those tests say so with
//! [`site::Site::router_only`]). That is how the tests themselves are tested.

pub(crate) mod certificates;
pub(crate) mod client;
pub(crate) mod http;
pub(crate) mod node;
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

/// What `until` waits for: a value, or that something is true.
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

/// Waits until `probe` gives a value or says yes, or panics naming `what` was waited for.
#[track_caller]
pub(crate) fn until<P: Probed>(what: &str, probe: impl FnMut() -> P) -> P::Found {
    until_within(client::PATIENCE, what, probe)
}

/// The same with another patience.
#[track_caller]
pub(crate) fn until_within<P: Probed>(patience: Duration, what: &str, mut probe: impl FnMut() -> P) -> P::Found {
    let end = Instant::now() + patience;
    loop {
        if let Some(value) = probe().found() {
            return value;
        }
        assert!(Instant::now() < end, "waited {patience:?} in vain until {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
