//! `switchyard move`: moves slots or single keys from one node to another while they are in use.

use clap::Args;
use clap::builder::PossibleValuesParser;
use switchyard_control::admin::{MoveOptionsRequest, MoveRequest, PlanReport};
use switchyard_policy::migration::Protocol;
use switchyard_resp::units::parse_rate;

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::moves::watch;
#[cfg(feature = "research")]
use super::research::ResearchFlags;
use super::table::{count, number, shortened, table, text};
use crate::config::{Problem, Problems};

/// Options of moves. Defaults come from the router's configuration.
#[derive(Clone, Debug, Default, Args)]
pub(super) struct HowFlags {
    /// Priority of the move: fast, balanced or gentle
    #[arg(long, value_name = "GOAL", value_parser = ["fast", "balanced", "gentle"])]
    goal: Option<String>,

    /// Maximum bytes per second, with a unit: 20mb
    #[arg(long, value_name = "RATE", value_parser = parse_rate)]
    max_rate: Option<u64>,

    /// Required durability at the target before a key leaves its source
    #[arg(long, value_name = "WHAT", value_parser = ["memory", "aof", "replica"])]
    durability: Option<String>,

    /// Migration protocol. All but the default are for comparisons
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(Protocol::offered()))]
    protocol: Option<String>,

    /// Continue although clients bypass the router; they will not find moved keys
    #[arg(long)]
    allow_direct_clients: bool,

    /// Delete keys at a target in slots that it does not own, whatever their origin
    #[arg(long)]
    purge_target: bool,

    #[cfg(feature = "research")]
    #[command(flatten)]
    research: ResearchFlags,
}

impl HowFlags {
    pub(super) fn request(&self) -> MoveOptionsRequest {
        let request = MoveOptionsRequest {
            goal: self.goal.clone(),
            max_rate: self.max_rate,
            durability: self.durability.clone(),
            protocol: self.protocol.clone(),
            allow_direct_clients: self.allow_direct_clients,
            purge_target: self.purge_target,
            ..MoveOptionsRequest::default()
        };
        #[cfg(feature = "research")]
        let request = self.research.added_to(request);
        request
    }
}

/// Move slots, or single keys, from one node to another while they are in use
#[derive(Debug, Args)]
#[command(
    long_about = "Move slots, with all keys in them, from one node to another. Clients continue to read and write: a command waits only while its \
        own key is in transit.\n\n\
        With --keys the keys that match a pattern move without their slots and stay at the other node from then on, for single keys that are hot or \
        big: at most 65536 of them. The pattern is evaluated once, when the command is given. --home returns such keys to the owners of \
        their slots.\n\n\
        The move is recorded before this command returns, and survives restarts of the router. It is refused while clients bypass \
        the router.\n\n\
        In front of a cluster, its members copy the keys of whole slots. The same command at any router continues a move whose \
        router has ended.",
    after_long_help = "Examples:\n  \
        switchyard move --from 127.0.0.1:7001 --to 127.0.0.1:7002 --slots 0-999 --wait\n  \
        switchyard move --from 127.0.0.1:7001 --to 127.0.0.1:7002 --all --goal gentle --max-rate 10mb\n  \
        switchyard move --from 127.0.0.1:7001 --to 127.0.0.1:7002 --keys 'leaderboard:*' --dry-run\n  \
        switchyard move --keys leaderboard:global --to 127.0.0.1:7002\n  \
        switchyard move --from 127.0.0.1:7002 --home\n  \
        switchyard moves watch\n\n\
        Exit codes: 0 recorded (with --wait: done); 1 refused, or stopped early"
)]
pub(crate) struct Arguments {
    /// Node that has the slots or keys, as `switchyard nodes list` shows it [default: any node that has them]
    #[arg(long, value_name = "NODE", required_if_eq("all", "true"))]
    from: Option<String>,

    /// Target node
    #[arg(long, value_name = "NODE", required_unless_present = "home", conflicts_with = "home")]
    to: Option<String>,

    /// Slots to move, such as 0-100,200
    #[arg(long, value_name = "RANGES", conflicts_with_all = ["all", "keys", "home"])]
    slots: Option<String>,

    /// All slots of the source
    #[arg(long, conflicts_with_all = ["keys", "home"])]
    all: bool,

    /// Move keys instead of slots: the keys (at the source, if given) that match this pattern, as in KEYS, or a single
    /// key by its name
    #[arg(long, value_name = "PATTERN")]
    keys: Option<String>,

    /// Return keys that live elsewhere than their slots to the owners of the slots (with --from: only keys there; with
    /// --keys: only matching keys)
    #[arg(long)]
    home: bool,

    /// Only show the moves that would begin
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,

    #[command(flatten)]
    how: HowFlags,

    /// Wait until the moves are done, and show their progress
    #[arg(long)]
    wait: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    if arguments.slots.is_none() && arguments.keys.is_none() && !arguments.all && !arguments.home {
        let text =
            "name the slots or keys to move: --slots RANGES, --all, --keys PATTERN or --home. Examples: switchyard move --help"
                .to_owned();
        return Err(Problems(vec![Problem { place: None, text }]).into());
    }
    let client = AdminClient::new(&arguments.flags)?;
    let request = MoveRequest {
        from: arguments.from.clone().unwrap_or_default(),
        to: arguments.to.clone().unwrap_or_default(),
        slots: arguments.slots.clone(),
        all: arguments.all,
        keys: arguments.keys.clone(),
        home: arguments.home,
        dry_run: arguments.dry_run,
        how: arguments.how.request(),
    };
    let body = client.post_json("/api/v1/moves", &request)?;
    finish(&client, &body, arguments.wait, arguments.flags.json)
}

/// Shows the started moves, and with `wait` their progress to the end.
pub(super) fn finish(client: &AdminClient, body: &str, wait: bool, json: bool) -> Result<(), Failure> {
    let plan: PlanReport = client.read(body)?;
    if json && !wait {
        println!("{}", body.trim_end());
        return Ok(());
    }
    if !json {
        print!("{}", render(&plan, wait));
    }
    if wait {
        let ids: Vec<u64> = plan.moves.iter().filter_map(|planned| planned.id).collect();
        return watch(client, Some(&ids), json);
    }
    Ok(())
}

/// Renders the moves of a plan. With `shown`, their progress is displayed next.
fn render(plan: &PlanReport, shown: bool) -> String {
    let notes: String = plan.notes.iter().map(|note| format!("NOTE: {note}\n")).collect();
    if plan.moves.is_empty() {
        return format!("{notes}nothing to move\n");
    }
    let has_keys = plan.moves.iter().any(|planned| planned.keys.is_some());
    let mut columns = vec![number("MOVE"), text("FROM"), text("TO"), number("SLOTS"), text("WHICH")];
    if has_keys {
        columns.insert(3, number("KEYS"));
    }
    let rows: Vec<Vec<String>> = plan
        .moves
        .iter()
        .map(|planned| {
            let mut row = vec![
                planned.id.map_or_else(|| "-".to_owned(), |id| id.to_string()),
                planned.from.clone(),
                planned.to.clone(),
                count(planned.slots),
                shortened(&planned.ranges, 40),
            ];
            if has_keys {
                row.insert(3, planned.keys.map_or_else(|| "all".to_owned(), count));
            }
            row
        })
        .collect();
    let mut out = table(&columns, &rows);
    out.push_str(&notes);
    out.push_str(if plan.dry_run {
        "only planned: without --dry-run the move starts\n"
    } else if shown {
        ""
    } else {
        "recorded; `switchyard moves watch` shows the progress\n"
    });
    out
}

#[cfg(test)]
mod tests {
    use switchyard_control::admin::PlannedReport;

    use super::*;

    #[test]
    fn a_plan_is_rendered_as_a_table() {
        let planned = |id, ranges: &str| PlannedReport {
            id,
            from: "a:1".into(),
            to: "b:1".into(),
            slots: 1234,
            ranges: ranges.into(),
            keys: None,
        };
        let shown =
            render(&PlanReport { dry_run: false, moves: vec![planned(Some(7), "0-1233")], notes: Vec::new() }, false);
        assert!(shown.contains("   7  a:1   b:1  1 234  0-1233\n"), "{shown}");
        let many = (0..100).map(|i| (i * 2).to_string()).collect::<Vec<_>>().join(",");
        let shown = render(
            &PlanReport { dry_run: true, moves: vec![planned(None, &many)], notes: vec!["think twice".to_owned()] },
            false,
        );
        assert!(
            shown.contains("0,2,4,6,8,10,12,14,16,18,20,22,24,26,28...\n")
                && shown.contains("NOTE: think twice\nonly planned"),
            "{shown}"
        );
        let of_keys = PlannedReport { keys: Some(7), ..planned(None, "5") };
        let shown = render(
            &PlanReport { dry_run: true, moves: vec![of_keys, planned(None, "6")], ..PlanReport::default() },
            false,
        );
        assert!(
            shown.contains("   -  a:1   b:1     7  1 234  5\n") && shown.contains("b:1   all  1 234  6"),
            "{shown}"
        );
        assert_eq!(render(&PlanReport::default(), false), "nothing to move\n");
    }
}
