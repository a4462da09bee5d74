//! `switchyard balance`: distributes the slots over the nodes by weight.

use clap::Args;
use switchyard_control::admin::BalanceRequest;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::move_slots::{HowFlags, finish};

/// Distribute the slots over the nodes
#[derive(Debug, Args)]
#[command(
    long_about = "Give every node slots in proportion to its weight (weight of [[node]], default 1), and move as few slots as possible.\n\n\
        Slots are counted, not keys, bytes or load. With --by load the busiest slots move from nodes above their share of requests to nodes below; \
        `switchyard plan` does the same with single keys, too.",
    after_long_help = "Examples:\n  \
        switchyard balance --dry-run\n  \
        switchyard balance --goal gentle --wait\n  \
        switchyard balance --by load --dry-run\n\n\
        Exit codes: 0 recorded (with --wait: done); 1 refused, or a move stopped early"
)]
pub(crate) struct Arguments {
    /// Only show the moves that would start
    #[arg(long)]
    dry_run: bool,

    /// What to even out: slots by weight, or the current load
    #[arg(long, value_name = "WHAT", value_parser = ["slots", "load"], default_value = "slots")]
    by: String,

    #[command(flatten)]
    how: HowFlags,

    /// Wait until the moves are done, and show their progress
    #[arg(long, conflicts_with = "dry_run")]
    wait: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let request =
        BalanceRequest { dry_run: arguments.dry_run, by: Some(arguments.by.clone()), how: arguments.how.request() };
    let body = client.post_json("/api/v1/balance", &request)?;
    finish(&client, &body, arguments.wait, arguments.flags.json)
}
