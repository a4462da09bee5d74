//! The lab against real servers and the real router, which must be built: `cargo test --workspace` does so.

mod judged;
mod recorded;
