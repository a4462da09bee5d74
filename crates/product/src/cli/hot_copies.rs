//! `switchyard hot-copies`: shows, evicts, suspends and resumes hot copies.

use clap::{ArgGroup, Args, Subcommand};
use switchyard_control::admin::{HotCopiesReport, HotCopiesRequest, HotCopiesResult};
use switchyard_resp::units::{describe_size, plural};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::table::count;

const PATH: &str = "/api/v1/hot-copies";

/// Show hot copies; evict some, suspend, resume
#[derive(Debug, Args)]
#[command(
    long_about = "Copies of the most-read keys, served by the router itself. They are never older than the data of the nodes. The keys are \
        selected by their load ([hot-copies] in the configuration); `switchyard hotkeys` shows how often copies answer for each.",
    after_long_help = "Examples:\n  \
        switchyard hot-copies\n  \
        switchyard hot-copies --json | jq '.hits'\n  \
        switchyard hot-copies evict --key user:1\n  \
        switchyard hot-copies evict --all\n  \
        switchyard hot-copies off                  all reads go to nodes, at once\n  \
        switchyard hot-copies on\n\n\
        Exit codes: 0 success; 1 failure"
)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Evict copies: the next read of each key goes to its node
    Evict(EvictArguments),
    /// Suspend hot copies on all workers
    Off(SwitchArguments),
    /// Resume hot copies
    On(SwitchArguments),
}

#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("what").required(true).args(["key", "prefix", "all"])),
    long_about = "Evict copies. When this returns, no worker serves a copy that was made before; later copies are unaffected. Nothing is lost: the nodes have \
        the keys.\n\n\
        Needed only after a write that bypassed the router, at a node that does not report changes. Writes through the router never need it.",
    after_long_help = "Examples:\n  \
        switchyard hot-copies evict --key user:1\n  \
        switchyard hot-copies evict --prefix user:      also evicts the copies of all other keys\n  \
        switchyard hot-copies evict --all\n\n\
        Exit codes: 0 evicted; 1 refused"
)]
struct EvictArguments {
    /// Copies of this key, in all databases
    #[arg(long, value_name = "KEY")]
    key: Option<String>,

    /// Copies of keys with this prefix
    #[arg(long, value_name = "PREFIX")]
    prefix: Option<String>,

    /// All copies
    #[arg(long)]
    all: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    long_about = "Suspend or resume hot copies on every worker at once. This lasts until the opposite command, or a restart of the router. To disable them permanently, set [hot-copies] mode = \"off\" in \
        the configuration.",
    after_long_help = "Examples:\n  \
        switchyard hot-copies off\n  \
        switchyard hot-copies on\n\n\
        Exit codes: 0 done; 1 refused"
)]
struct SwitchArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let (flags, request) = match &arguments.command {
        None => {
            let client = AdminClient::new(&arguments.flags)?;
            return client.print(&client.get(PATH)?, render);
        }
        Some(Command::Evict(EvictArguments { key, prefix, all, flags })) => {
            (flags, HotCopiesRequest { verb: "evict".to_owned(), key: key.clone(), prefix: prefix.clone(), all: *all })
        }
        Some(Command::Off(SwitchArguments { flags })) => {
            (flags, HotCopiesRequest { verb: "off".to_owned(), ..HotCopiesRequest::default() })
        }
        Some(Command::On(SwitchArguments { flags })) => {
            (flags, HotCopiesRequest { verb: "on".to_owned(), ..HotCopiesRequest::default() })
        }
    };
    let client = AdminClient::new(flags)?;
    client.print(&client.post_json(PATH, &request)?, |done: &HotCopiesResult| format!("{}\n", done.message))
}

fn render(report: &HotCopiesReport) -> String {
    let state = match report.state.as_str() {
        "off" => "off: [hot-copies] mode is \"off\" in the configuration",
        "suspended" => "SUSPENDED: no reads from copies until `switchyard hot-copies on`",
        state => state,
    };
    let line = |what: &str, much: &str| format!("{what:<18}{much}\n");
    let counted = |number: u64, thing: &str| format!("{} {}", count(number), plural(number, thing));
    let mut out = format!("hot copies: {state}\n");
    out.push_str(&line("may have copies", &counted(report.keys, "key")));
    out.push_str(&line("copies", &format!("{}, {}", count(report.copies), describe_size(report.bytes))));
    out.push_str(&line("answered", &counted(report.hits, "command")));
    out.push_str(&line("reads from nodes", &report.fills.to_string()));
    out.push_str(&line("invalidations", &report.invalidations.to_string()));
    let discarded: Vec<String> = report
        .discarded
        .iter()
        .filter(|(_, times)| **times > 0)
        .map(|(why, times)| format!("{why} {}", count(*times)))
        .collect();
    if !discarded.is_empty() {
        out.push_str(&line("not kept", &discarded.join(", ")));
    }
    for (node, why) in &report.refused {
        out.push_str(&format!("no copies from {node}: {why}\n"));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_shows_state_counts_and_refusing_nodes() {
        let report = HotCopiesReport {
            state: "on".to_owned(),
            keys: 3,
            copies: 6,
            bytes: 2048,
            hits: 1_234_567,
            fills: 1,
            discarded: [("written".to_owned(), 4), ("lost".to_owned(), 0)].into(),
            invalidations: 0,
            refused: [("a:1".to_owned(), "NOPERM".to_owned())].into(),
        };
        let shown = render(&report);
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            lines,
            [
                "hot copies: on",
                "may have copies   3 keys",
                "copies            6, 2.0 kB",
                "answered          1 234 567 commands",
                "reads from nodes  1",
                "invalidations     0",
                "not kept          written 4",
                "no copies from a:1: NOPERM",
            ]
        );
        assert!(
            render(&HotCopiesReport { state: "suspended".to_owned(), ..report }).starts_with("hot copies: SUSPENDED")
        );
    }
}
