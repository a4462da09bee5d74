//! `switchyard serve`: runs the router.

use clap::Args;
use switchyard_control::ownership::Standby;

use super::flags::ConfigFlags;
use super::{Failure, check_config};
use crate::serve;

/// Kind of a standby's state directory.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum With {
    /// The directory of the other router itself, on storage that both machines reach.
    Shared,
    /// A copy of the other router's directory.
    Copy,
}

/// Treatment of misplaced keys: keys on servers that twemproxy's rule does not select.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum MisplacedKeys {
    /// Keep the keys, without serving them.
    Ignore,
    /// Delete the keys once, after the start.
    Remove,
}

/// Run the router
#[derive(Debug, Args)]
#[command(
    long_about = "Run the router: clients connect to it as to one Redis server, and it passes each command to the node that has \
        the key.\n\n\
        Configured by a file (-c), by flags, or by both; flags win. Which node owns which slots is decided at the first start \
        and kept in the state directory: the same directory gives the same map after a restart, and a node that is added later \
        owns nothing until slots are moved to it.",
    after_long_help = "Examples:\n  \
        switchyard serve --node 127.0.0.1:7001 --node 127.0.0.1:7002\n  \
        switchyard serve -c /etc/switchyard.toml --workers 4\n  \
        switchyard serve -c /etc/switchyard.toml --standby shared\n  \
        switchyard serve --listen 0.0.0.0:6380 --password-file /run/secrets/clients --node redis-a --node redis-b\n\n\
        Signals:\n  \
        SIGTERM, SIGINT  stop: no new clients, commands in flight are finished within --shutdown-timeout; again: at once\n  \
        SIGHUP           read the configuration, secrets and host names again; the log lists changes, and settings that need a restart\n\n\
        Exit codes: 0 stopped by a signal; 1 failed, with the reason; 2 command line or configuration wrong; 3 the state directory is too old, or another router has taken over\n\n\
        Every key of the file: switchyard check-config --example, or docs/configuration.md"
)]
pub(crate) struct Arguments {
    #[command(flatten)]
    flags: ConfigFlags,

    /// Wait until no other router serves these nodes, then take over. The state directory is the other router's own
    /// (shared), or a copy of it (copy); see docs/high-availability.md
    #[arg(long, value_name = "WITH", value_enum)]
    standby: Option<With>,

    /// Create a slot map at a first start although another router serves the nodes. Keys are found only while neither
    /// router moves any: for measurements
    #[arg(long)]
    allow_other_router: bool,

    /// Address of twemproxy's stats, with nutcracker's names: one JSON document for each connection [default port:
    /// 22222]
    #[arg(long, value_name = "HOST:PORT", requires = "twemproxy_config", conflicts_with = "node")]
    twemproxy_stats: Option<String>,

    /// Keep keys that are not on the server that twemproxy's rule selects, without serving them (ignore), or delete
    /// them in the background after the start (remove)
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        default_value = "ignore",
        requires = "twemproxy_config",
        conflicts_with = "node"
    )]
    misplaced_keys: MisplacedKeys,

    /// Check the configuration, show the effective values, and exit (as check-config)
    #[arg(short, long)]
    test_conf: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.test_conf {
        return check_config::print(&arguments.flags);
    }
    let standby = arguments.standby.map(|with| match with {
        With::Shared => Standby::Shared,
        With::Copy => Standby::Copy,
    });
    let twemproxy = serve::TwemproxyFlags {
        stats: arguments.twemproxy_stats.clone(),
        removes_misplaced: matches!(arguments.misplaced_keys, MisplacedKeys::Remove),
    };
    serve::run(arguments.flags.sources(), standby, arguments.allow_other_router, &twemproxy)
}
