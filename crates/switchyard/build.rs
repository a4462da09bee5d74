//! Sets options of the linker for the static binary.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // Relocations in 3% of the space. glibc reads this form from 2.36 on only, but musl is part of the binary. Linkers
    // that do not know the option ignore it.
    if std::env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|env| env == "musl") {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
}
