//! The `switchyard` command. Its code is in the crate `switchyard-product`, which is optimized for size.

use std::process::ExitCode;

use switchyard_router::CountedHeap;

/// The system's allocator keeps the freed memory of large values in the arena of the thread that freed it. jemalloc
/// returns it, and workers do not contend for it. Allocated bytes are counted for `memory-max`.
#[global_allocator]
static ALLOCATOR: CountedHeap<tikv_jemallocator::Jemalloc> = CountedHeap(tikv_jemallocator::Jemalloc);

fn main() -> ExitCode {
    switchyard_product::run()
}
