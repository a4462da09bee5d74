//! Tests of the lab against real servers and the real router, which `cargo test --workspace` builds.

mod judged;
mod recorded;
mod reproduced;
mod validated;
