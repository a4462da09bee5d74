//! `switchyard moves`: progress and control of moves.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use clap::{Args, Subcommand};
use serde::Serialize;
use serde_json::json;
use switchyard_bench::interrupt;
use switchyard_bench::numbers::millis;
#[cfg(feature = "research")]
use switchyard_control::admin::SourceOpsMaxRequest;
use switchyard_control::admin::{
    Abandon, AbortRequest, GoalRequest, MaxRateRequest, MoveReport, MoveState, MovesReport,
};
use switchyard_resp::units::{describe_size, describe_time, format_rate, parse_rate, plural};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags};
use super::live_lines::{LiveLines, bar};
use super::table::{count, number, table, text};

/// Show and control moves: list, watch, pause, resume, abort, goal, rate
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard moves\n  \
    switchyard moves watch\n  \
    switchyard moves pause 7\n  \
    switchyard moves abort 7\n  \
    switchyard moves abort 7 --abandon-target --dry-run      the loss if the target never returns\n  \
    switchyard moves goal 7 fast\n  \
    switchyard moves max-rate 7 20mb      (none: by the goal)\n  \
    switchyard moves list --json | jq '.moves[] | {id, keys_moved, seconds_left}'\n\n\
    Exit codes: 0 success; 1 failure (watch: a move stopped early)")]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// List moves in progress, waiting, and ended
    List(ListArguments),
    /// Show the progress of moves until they are done
    Watch(ListArguments),
    /// Finish the slots in transit, then pause: all keys are served as usual
    Pause(IdArguments),
    /// Resume a move
    Resume(IdArguments),
    /// Finish or return the slots in transit, then stop: moved slots stay at the target
    Abort(AbortArguments),
    /// Change the goal of a move
    Goal(GoalArguments),
    /// Change the maximum rate of a move
    MaxRate(MaxRateArguments),
    /// Change the limit of client commands at the source of a move by a protocol as published
    #[cfg(feature = "research")]
    SourceOpsMax(SourceOpsMaxArguments),
}

#[derive(Debug, Args)]
struct ListArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
struct IdArguments {
    /// Id of the move, as `switchyard moves` shows it
    id: u64,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    long_about = "Finish the slots being moved now, or return them if that is shorter, then stop. Moved slots stay at the target, and nothing is lost.\n\n\
        If a node of the move is lost for good, the move waits for it. --abandon-target and --abandon-source end it without that node, and report the lost keys.",
    after_long_help = "Examples:\n  \
        switchyard moves abort 7\n  \
        switchyard moves abort 7 --abandon-target --dry-run      only show the loss\n  \
        switchyard moves abort 7 --abandon-target\n\n\
        Exit codes: 0 the move ends, or would; 1 refused"
)]
struct AbortArguments {
    /// Id of the move, as `switchyard moves` shows it
    id: u64,

    /// The target is lost for good: keys at the source stay there, keys that are only at the target are lost
    #[arg(long, conflicts_with = "abandon_source")]
    abandon_target: bool,

    /// The source is lost for good: keys of the slots in transit that the target has are served there, the other keys
    /// are lost
    #[arg(long)]
    abandon_source: bool,

    /// Only show the actions and the loss that they would cause
    #[arg(long)]
    dry_run: bool,

    #[command(flatten)]
    flags: AdminFlags,
}

impl AbortArguments {
    fn request(&self) -> AbortRequest {
        let abandon = match (self.abandon_target, self.abandon_source) {
            (true, _) => Some(Abandon::Target),
            (false, true) => Some(Abandon::Source),
            (false, false) => None,
        };
        AbortRequest { abandon, dry_run: self.dry_run }
    }
}

#[derive(Debug, Args)]
#[command(
    long_about = "Change the goal of a move.\n\n\
        fast: the maximum rate of the nodes. balanced: little effect on clients, but at least 1/7 of the rate of idle nodes. gentle: no noticeable effect \
        on clients, but at least 1/100.",
    after_long_help = "Examples:\n  \
        switchyard moves                  all moves with their ids\n  \
        switchyard moves goal 7 gentle    move 7 disturbs clients less, and takes longer\n\n\
        Exit codes: 0 done; 1 refused"
)]
struct GoalArguments {
    /// Id of the move, as `switchyard moves` shows it
    id: u64,

    /// Priority of the move: fast, balanced or gentle
    #[arg(value_parser = ["fast", "balanced", "gentle"])]
    goal: String,

    #[command(flatten)]
    flags: AdminFlags,
}

#[derive(Debug, Args)]
#[command(
    long_about = "Change the maximum rate of a move: it copies at most this many bytes per second, whatever its goal. The word none removes the \
        limit.",
    after_long_help = "Examples:\n  \
        switchyard moves max-rate 7 20mb    at most 20 MiB each second\n  \
        switchyard moves max-rate 7 none    by its goal\n\n\
        Exit codes: 0 done; 1 refused"
)]
struct MaxRateArguments {
    /// Id of the move, as `switchyard moves` shows it
    id: u64,

    /// Maximum bytes per second, such as 20mb; none: by the goal
    #[arg(value_parser = rate_or_none)]
    rate: MaxRateRequest,

    #[command(flatten)]
    flags: AdminFlags,
}

#[cfg(feature = "research")]
#[derive(Debug, Args)]
#[command(
    long_about = "Change the limit of the client commands per second that the source serves of keys in transit, for a move by a protocol as published \
        (--mode paper). The other commands wait, and the move gets the rest of the source's capacity. The goal and the maximum rate of a move limit the move \
        instead.",
    after_long_help = "Examples:\n  \
        switchyard moves source-ops-max 7 25000     at most 25,000 commands each second\n  \
        switchyard moves source-ops-max 7 short     23 % of the capacity of the source in [[node]]; medium: 54 %; long: 100 %\n  \
        switchyard moves source-ops-max 7 none      no limit\n\n\
        Exit codes: 0 done; 1 refused"
)]
struct SourceOpsMaxArguments {
    /// Id of the move, as `switchyard moves` shows it
    id: u64,

    /// Maximum commands per second, or short, medium or long; none: no limit
    max: String,

    #[command(flatten)]
    flags: AdminFlags,
}

fn rate_or_none(text: &str) -> Result<MaxRateRequest, String> {
    let max_rate = if text == "none" { None } else { Some(parse_rate(text)?) };
    Ok(MaxRateRequest { max_rate })
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        None => list(&arguments.flags),
        Some(Command::List(ListArguments { flags })) => list(flags),
        Some(Command::Watch(ListArguments { flags })) => watch(&AdminClient::new(flags)?, None, flags.json),
        Some(Command::Pause(IdArguments { id, flags })) => steer(*id, flags, "pause", &json!({}), "pauses"),
        Some(Command::Resume(IdArguments { id, flags })) => steer(*id, flags, "resume", &json!({}), "continues"),
        Some(Command::Abort(given)) => abort(given),
        Some(Command::Goal(GoalArguments { id, goal, flags })) => {
            steer(*id, flags, "goal", &GoalRequest { goal: goal.clone() }, &format!("continues with the goal {goal}"))
        }
        Some(Command::MaxRate(MaxRateArguments { id, rate, flags })) => {
            let done = rate.max_rate.map_or_else(
                || "continues at the rate of its goal".to_owned(),
                |max| format!("continues with at most {}", format_rate(max as f64)),
            );
            steer(*id, flags, "max-rate", rate, &done)
        }
        #[cfg(feature = "research")]
        Some(Command::SourceOpsMax(SourceOpsMaxArguments { id, max, flags })) => {
            let request = SourceOpsMaxRequest { source_ops_max: Some(max.clone()).filter(|max| max != "none") };
            steer(*id, flags, "source-ops-max", &request, &format!("continues with source-ops-max {max}"))
        }
    }
}

fn list(flags: &AdminFlags) -> Result<(), Failure> {
    let client = AdminClient::new(flags)?;
    let body = client.get("/api/v1/moves")?;
    client.print(&body, render)
}

fn steer(id: u64, flags: &AdminFlags, verb: &str, what: &impl Serialize, done: &str) -> Result<(), Failure> {
    let client = AdminClient::new(flags)?;
    let body = client.post_json(&format!("/api/v1/moves/{id}/{verb}"), what)?;
    client.print_text(&body, &format!("move {id} {done}"))
}

fn abort(given: &AbortArguments) -> Result<(), Failure> {
    let client = AdminClient::new(&given.flags)?;
    let body = client.post_json(&format!("/api/v1/moves/{}/abort", given.id), &given.request())?;
    let only = if given.dry_run { "nothing was changed: " } else { "" };
    client.print(&body, |report: &MovesReport| format!("{only}{}\n", report.message))
}

fn state(report: &MoveReport) -> &'static str {
    match report.state {
        MoveState::Queued => "queued",
        MoveState::Running => "running",
        MoveState::Paused => "PAUSED",
        MoveState::Aborting => "ABORTING",
        MoveState::Done => "done",
        MoveState::Stopped => "STOPPED",
    }
}

/// A server that migrates keys itself (stop-and-copy) does not report their size.
const fn bytes_are_known(report: &MoveReport) -> bool {
    report.bytes_moved > 0 || report.keys_moved == 0
}

fn bytes(report: &MoveReport) -> String {
    if bytes_are_known(report) { describe_size(report.bytes_moved) } else { "-".to_owned() }
}

fn seconds(seconds: f64) -> String {
    describe_time(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

fn render(report: &MovesReport) -> String {
    let columns = [
        number("MOVE"),
        text("FROM"),
        text("TO"),
        text("STATE"),
        number("SLOTS"),
        number("KEYS"),
        text("BYTES"),
        number("DONE"),
        text("RATE"),
        text("LEFT"),
        number("ON DEMAND"),
        text("WAITED p50/p99/max"),
        text("STATUS"),
    ];
    let row = |report: &MoveReport| {
        let held = |us| millis(Duration::from_micros(us));
        vec![
            report.id.to_string(),
            report.from.clone(),
            report.to.clone(),
            state(report).to_owned(),
            format!("{}/{}", count(report.slots_done), count(report.slots)),
            keys(report),
            bytes(report),
            format!("{:.0}%", report.percent.floor()),
            if report.state.has_ended() { String::new() } else { format_rate(report.bytes_per_second) },
            report.seconds_left.filter(|_| report.state == MoveState::Running).map(seconds).unwrap_or_default(),
            count(report.pulled),
            match report.holds {
                0 => "none".to_owned(),
                _ => format!("{}/{}/{}", held(report.hold_p50_us), held(report.hold_p99_us), held(report.hold_max_us)),
            },
            format!("{}{}", report.activity, home_for(report)),
        ]
    };
    let mut out = String::new();
    if report.moves.is_empty() {
        out.push_str("no moves are in progress\n");
    } else {
        out.push_str(&table(&columns, &report.moves.iter().map(row).collect::<Vec<_>>()));
    }
    for (id, text) in report.moves.iter().chain(&report.ended).filter_map(|report| Some((report.id, big_keys(report)?)))
    {
        out.push_str(&format!("move {id}: {text}\n"));
    }
    let latest: Vec<Vec<String>> = report.ended.iter().rev().take(10).map(row).collect();
    if !latest.is_empty() {
        out.push_str("\nended, the latest first:\n");
        out.push_str(&table(&columns, &latest));
    }
    if !report.brought_home.is_empty() {
        let by_command: Vec<String> =
            report.brought_home.iter().map(|home| format!("{} {}", home.command, count(home.keys))).collect();
        out.push_str(&format!(
            "\nkeys brought to others because commands needed them together: {}\n",
            by_command.join(", ")
        ));
    }
    if !report.message.is_empty() {
        out.push_str(&format!("\n{}\n", report.message));
    }
    if let Some(error) = &report.journal.write_error {
        out.push_str(&format!("\n{error}\n"));
    }
    out
}

/// Moved keys, with the total if the keys are listed.
fn keys(report: &MoveReport) -> String {
    match report.listed && !report.state.has_ended() {
        true => format!("{}/{}", count(report.keys_moved), count(report.keys_listed.max(report.keys_moved))),
        false => count(report.keys_moved),
    }
}

/// Interval of queries.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum time to wait for a router that does not reply: moves continue after its restart.
const ROUTER_RETURN_TIMEOUT: Duration = Duration::from_secs(60);

/// Shows the progress of moves until they end: of `ids`, or of all moves in progress.
pub(super) fn watch(client: &AdminClient, ids: Option<&[u64]>, json: bool) -> Result<(), Failure> {
    let mut live = LiveLines::on_terminal().filter(|_| !json);
    let mut watched: Option<Vec<u64>> = ids.map(<[u64]>::to_vec);
    let mut said = BTreeMap::new();
    let mut away_since = None;
    let interrupted = interrupt::flag()?;
    loop {
        if interrupted.load(Ordering::Relaxed) {
            let what = if watched.as_ref().is_some_and(|watched| watched.len() == 1) {
                "the move continues"
            } else {
                "moves continue"
            };
            return Err(Failure::Failed(anyhow!(
                "stopped watching, and {what}: `switchyard moves watch` shows the progress, `switchyard moves abort ID` ends a move"
            )));
        }
        let body = match client.get("/api/v1/moves") {
            Ok(body) => body,
            Err(error)
                if watched.is_some()
                    && away_since.is_none_or(|since: Instant| since.elapsed() < ROUTER_RETURN_TIMEOUT) =>
            {
                if away_since.is_none() {
                    eprintln!(
                        "{error:#}. Waiting {} s for the router: moves continue when it serves again",
                        ROUTER_RETURN_TIMEOUT.as_secs()
                    );
                }
                away_since.get_or_insert_with(Instant::now);
                std::thread::sleep(POLL_INTERVAL);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        away_since = None;
        let report: MovesReport = client.read(&body)?;
        let watched = watched.get_or_insert_with(|| report.moves.iter().map(|m| m.id).collect());
        let all = report.moves.iter().chain(&report.ended);
        let shown: Vec<&MoveReport> = all.filter(|m| watched.contains(&m.id)).collect();
        match &mut live {
            Some(live) => live.show(bars(&shown)),
            None if json => {}
            None => lines(&shown, &mut said),
        }
        if report.moves.iter().all(|m| !watched.contains(&m.id)) {
            if json {
                println!("{}", body.trim_end());
            }
            return outcome(watched, &shown, json);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn outcome(watched: &[u64], shown: &[&MoveReport], json: bool) -> Result<(), Failure> {
    let mut failed = Vec::new();
    for id in watched {
        match shown.iter().find(|report| report.id == *id) {
            Some(report) if report.state == MoveState::Done => {
                if !json {
                    println!(
                        "move {id} is done: {}, {} {}{} in {}",
                        report.keys.map_or_else(
                            || format!("{} {}", count(report.slots), plural(report.slots, "slot")),
                            |keys| format!("{} named {}", count(keys), plural(keys, "key"))
                        ),
                        count(report.keys_moved),
                        plural(report.keys_moved, "key"),
                        match report.bytes_moved {
                            _ if !bytes_are_known(report) => String::new(),
                            moved => format!(", {} {}", count(moved), plural(moved, "byte")),
                        },
                        seconds(report.seconds)
                    );
                }
            }
            Some(report) => failed.push(format!("move {id} stopped early: {}", report.activity)),
            None => failed.push(format!("move {id} is no longer known")),
        }
    }
    if watched.is_empty() && !json {
        println!("no moves are in progress");
    }
    if failed.is_empty() { Ok(()) } else { Err(Failure::Failed(anyhow!(failed.join("; ")))) }
}

fn numbers(report: &MoveReport) -> String {
    let held = |us| millis(Duration::from_micros(us));
    let left = report.seconds_left.map(|left| format!(", {} left", seconds(left))).unwrap_or_default();
    // Most moves pull no keys.
    let pulled = if report.pulled == 0 { String::new() } else { format!(", {} on demand", count(report.pulled)) };
    let holds = match report.holds {
        0 => String::new(),
        _ => {
            format!(
                ", commands waited p50 {} p99 {} max {}",
                held(report.hold_p50_us),
                held(report.hold_p99_us),
                held(report.hold_max_us)
            )
        }
    };
    // A move of named keys has no slots.
    let slots = if report.keys.is_some() {
        String::new()
    } else {
        format!("{}/{} slots, ", count(report.slots_done), count(report.slots))
    };
    let known = |text: String| if bytes_are_known(report) { text + ", " } else { String::new() };
    format!(
        "{slots}{} keys, {}{:.0}%, {}{} keys/s{left}{pulled}{holds}: {}{}",
        keys(report),
        known(describe_size(report.bytes_moved)),
        report.percent.floor(),
        known(format_rate(report.bytes_per_second)),
        count(report.keys_per_second.max(0.0) as u64),
        report.activity,
        home_for(report)
    )
}

/// Commands for which a move brings keys together, if any.
fn home_for(report: &MoveReport) -> String {
    let commands: Vec<&str> = report.home_for.iter().map(|home| home.command.as_str()).collect();
    if commands.is_empty() { String::new() } else { format!(" (brings keys together for {})", commands.join(", ")) }
}

/// Counts of big keys, if there were any.
fn big_keys(report: &MoveReport) -> Option<String> {
    let mut parts = Vec::new();
    if report.big_in_pieces > 0 {
        parts.push(format!("{} moved in pieces", count(report.big_in_pieces)));
    }
    if report.big_whole > 0 {
        let longest = millis(Duration::from_micros(report.big_whole_max_us));
        parts.push(format!(
            "{} moved whole, up to {longest} each (the last: {})",
            count(report.big_whole),
            report.big_whole_last
        ));
    }
    for big in &report.big {
        let again = if big.restarts > 0 { format!(", started {} times", big.restarts + 1) } else { String::new() };
        let state = if big.is_read {
            "copied, following writes".to_owned()
        } else {
            format!("{} copied", describe_size(big.copied))
        };
        parts.push(format!("a {} of {} {state}{again}", big.kind, describe_size(big.bytes)));
    }
    (!parts.is_empty()).then(|| format!("big keys: {}", parts.join("; ")))
}

/// Without a terminal: prints a line for each move that has changed.
fn lines(shown: &[&MoveReport], said: &mut BTreeMap<u64, String>) {
    for report in shown {
        let line =
            format!("move {} {} -> {} {}: {}", report.id, report.from, report.to, state(report), numbers(report));
        if said.get(&report.id) != Some(&line) {
            // A closed pipe must not end the wait.
            let _ = writeln!(std::io::stdout(), "{line}");
            said.insert(report.id, line);
        }
    }
}

/// Two lines per move: a bar, and numbers.
fn bars(shown: &[&MoveReport]) -> Vec<String> {
    let lines = |report: &&MoveReport| {
        let (name, bar) = (format!("move {} {} -> {}", report.id, report.from, report.to), bar(report.percent / 100.0));
        [format!("{name} {bar} {:.0}% {}", report.percent.floor(), state(report)), format!("  {}", numbers(report))]
    };
    shown.iter().flat_map(lines).collect()
}

#[cfg(test)]
mod tests {
    use switchyard_control::admin::ReturnedKeysReport;

    use super::*;

    fn running() -> MoveReport {
        MoveReport {
            id: 7,
            from: "a:1".into(),
            to: "b:1".into(),
            state: MoveState::Running,
            activity: "moving".into(),
            slots: 100,
            slots_done: 25,
            keys_moved: 1500,
            keys_listed: 6000,
            listed: true,
            bytes_moved: 12_000,
            percent: 25.9,
            bytes_per_second: 2_500_000.0,
            keys_per_second: 1234.5,
            seconds_left: Some(75.0),
            holds: 3,
            hold_p50_us: 400,
            hold_p99_us: 2_000,
            hold_max_us: 12_000,
            ..MoveReport::default()
        }
    }

    #[test]
    fn moves_are_rendered_with_state_and_progress() {
        let stopped =
            MoveReport { id: 6, state: MoveState::Stopped, activity: "the target is full".into(), ..running() };
        let journal =
            switchyard_control::admin::JournalReport { write_error: Some("no room".into()), ..Default::default() };
        let home = |command: &str, keys| ReturnedKeysReport { command: command.to_owned(), keys };
        let colocations = MoveReport { id: 8, home_for: vec![home("RENAME", 1)], ..running() };
        let brought_home = vec![home("EVAL", 1200), home("RENAME", 3)];
        let shown = render(&MovesReport {
            moves: vec![running(), colocations],
            ended: vec![stopped],
            journal,
            brought_home,
            ..Default::default()
        });
        let lines: Vec<&str> = shown.lines().collect();
        assert!(lines[1].contains("a:1   b:1  running  25/100  1 500/6 000  12.0 kB   25%"), "{shown}");
        assert!(
            lines[1].contains("2.5 MB/s")
                && lines[1].contains("1m 15s")
                && lines[1].contains("0.400 ms/2.00 ms/12.0 ms"),
            "{shown}"
        );
        assert!(lines[2].contains("moving (brings keys together for RENAME)"), "{shown}");
        assert!(shown.contains("needed them together: EVAL 1 200, RENAME 3\n"), "{shown}");
        assert!(
            shown.contains("STOPPED") && shown.contains("the target is full") && shown.ends_with("no room\n"),
            "{shown}"
        );
        assert_eq!(render(&MovesReport::default()), "no moves are in progress\n");
    }

    #[test]
    fn a_stopped_move_is_a_failure() {
        let stopped = MoveReport { state: MoveState::Stopped, activity: "no room".into(), ..running() };
        let error = outcome(&[7], &[&stopped], true).expect_err("it stopped").to_string();
        assert!(error.contains("move 7 stopped early: no room"), "{error}");
        let done = MoveReport { state: MoveState::Done, ..running() };
        assert!(outcome(&[7], &[&done], true).is_ok());
        assert!(outcome(&[7, 8], &[&done], true).is_err());
    }

    #[test]
    fn unknown_byte_counts_are_not_shown() {
        let counted = numbers(&running());
        assert!(counted.contains("keys, 12.0 kB, 25%, 2.5 MB/s, 1 234 keys/s"), "{counted}");
        let unknown = MoveReport { bytes_moved: 0, bytes_per_second: 0.0, ..running() };
        let shown = numbers(&unknown);
        assert!(shown.contains("keys, 25%, 1 234 keys/s"), "{shown}");
        assert_eq!(bytes(&unknown), "-");
    }
}
