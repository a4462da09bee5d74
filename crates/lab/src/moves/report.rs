//! Output of a run, for the terminal and the document.

use std::{fmt::Write as _, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use switchyard_bench::table::Table;

use super::{Journal, LoadedMove, Results, SIZES, Settings, Speed, journal::Throughput};
use crate::document::{replace_between_marks, today};
use crate::procfs::describe_machine;
use crate::reproduce::spread::Spread;

const MARK: &str = "bench-moves";

pub(super) fn text(settings: &Settings, results: &Results) -> String {
    let mut out = String::new();
    for (title, table) in tables(results) {
        let _ = write!(out, "\n{title}\n\n{}", table.to_text());
    }
    for line in notes(settings, results) {
        let _ = writeln!(out, "{line}");
    }
    out
}

pub(super) fn write(path: &Path, settings: &Settings, results: &Results) -> Result<()> {
    let document = match std::fs::read_to_string(path) {
        Ok(document) => document,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            format!("# Cost of a move\n\n<!-- {MARK}:begin -->\n<!-- {MARK}:end -->\n")
        }
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    let mut section = format!(
        "Measured on {} by `{}` on: {}. Servers: {}.\n",
        today(),
        settings.command_line,
        describe_machine(),
        results.version
    );
    if let Some(foreign) = results.foreign {
        let _ = writeln!(
            section,
            "While the load ran without a move, other processes took up to {:.0} % of the machine.",
            foreign * 100.0
        );
    }
    for (title, table) in tables(results) {
        let _ = write!(section, "\n### {title}\n\n{}", table.to_markdown());
    }
    let notes = notes(settings, results);
    if !notes.is_empty() {
        section.push('\n');
        notes.iter().for_each(|line| section.push_str(&format!("- {}\n", line.lines().next().unwrap_or_default())));
    }
    let document = replace_between_marks(&document, MARK, &section)
        .with_context(|| format!("cannot rewrite {}", path.display()))?;
    std::fs::write(path, document).with_context(|| format!("cannot write {}", path.display()))
}

fn tables(results: &Results) -> Vec<(String, Table)> {
    let all = [
        ("Without load", speeds(results)),
        ("Share of what DUMP, RESTORE and UNLINK alone allow", shares(results)),
        ("What a move costs the router", costs(results)),
        ("Under load: GET 95 %, SET 5 %, Zipf 0.99", noticed(results)),
        ("Under writes to the moving slots", converged(results)),
        ("A big hash, read and written while it moves", big(results)),
        ("What waiting for the disk costs", kept(results)),
        ("Adoption of placement rules, without load", adoptions(results)),
    ];
    all.into_iter().filter(|(_, table)| !table.is_empty()).map(|(title, table)| (title.to_owned(), table)).collect()
}

fn speeds(results: &Results) -> Table {
    let mut table =
        Table::new(["", "value", "slots", "keys", "seconds", "keys/s", "MB/s", "ratio to the best reshard"]);
    for (size, _) in SIZES {
        let of_size: Vec<_> = results.speeds.iter().filter(|s| s.size == size).collect();
        let best = results.best_reshard(size).map(Speed::keys_per_second);
        for speed in of_size {
            let rate = speed.keys_per_second();
            table.row([
                speed.way.clone(),
                bytes(size),
                speed.slots.to_string(),
                speed.keys.to_string(),
                format!("{:.2}", speed.took.as_secs_f64()),
                format!("{rate:.0}"),
                format!("{:.1}", rate * size as f64 / 1e6),
                best.map_or("-".to_owned(), |best| format!("{:.2}", rate / best)),
            ]);
        }
    }
    table
}

fn shares(results: &Results) -> Table {
    let mut table = Table::new(
        "value|DUMP keys/s|RESTORE keys/s|UNLINK keys/s|limit, in parallel|limit, in turn|best reshard|switchyard"
            .split('|'),
    );
    for (size, limit) in &results.limits {
        let rate = |time: Duration| format!("{:.0}", limit.keys as f64 / time.as_secs_f64());
        let ours = results.speeds.iter().filter(|s| s.size == *size && s.cost.is_some());
        let ours = ours.map(Speed::keys_per_second).max_by(f64::total_cmp);
        let share = |rate: Option<f64>| {
            rate.map_or("-".to_owned(), |r| format!("{:.0} %", 100.0 * r / limit.keys_per_second()))
        };
        table.row([
            bytes(*size),
            rate(limit.dump),
            rate(limit.restore),
            rate(limit.unlink),
            format!("{:.0}", limit.keys_per_second()),
            format!("{:.0}", limit.keys_per_second_in_turn()),
            share(results.best_reshard(*size).map(Speed::keys_per_second)),
            share(ours),
        ]);
    }
    table
}

fn costs(results: &Results) -> Table {
    let mut table = Table::new(
        "value|keys|memory before|at most|more, per million keys|state directory grew|written per million keys"
            .split('|'),
    );
    for speed in &results.speeds {
        let Some(cost) = speed.cost else { continue };
        let mib = |bytes: f64| format!("{:.1} MiB", bytes / f64::from(1 << 20));
        let million = 1e6 / speed.keys as f64;
        table.row([
            bytes(speed.size),
            speed.keys.to_string(),
            mib(cost.memory_before as f64),
            mib(cost.memory_peak as f64),
            mib(cost.memory_peak.saturating_sub(cost.memory_before) as f64 * million),
            mib(cost.journal as f64 * million),
            format!("{:.0}", cost.syncs as f64 * million),
        ]);
    }
    table
}

fn noticed(results: &Results) -> Table {
    let ways = results.noticed.iter().map(|n| n.way.clone());
    let mut table = Table::new(std::iter::once(String::new()).chain(ways));
    let ms = |share: f64, of: &super::Counts| of.tally.quantile(share).as_secs_f64() * 1e3;
    let per_second = |of: &super::Counts, time: Duration| of.tally.replies as f64 / time.as_secs_f64();
    type Cell<'a> = &'a dyn Fn(&LoadedMove) -> String;
    let mut row = |name: &str, cell: Cell<'_>| {
        table.row(std::iter::once(name.to_owned()).chain(results.noticed.iter().map(cell)))
    };
    row("capacity, requests/s", &|n| format!("{:.0}", n.capacity));
    row("load, requests/s", &|n| format!("{:.0}", n.rate));
    row("move took, s", &|n| format!("{:.2}", n.moving_time.as_secs_f64()));
    row("ratio to the move without load", &|n| {
        n.unloaded.map_or("-".to_owned(), |u| format!("{:.2}", n.moving_time.as_secs_f64() / u.as_secs_f64()))
    });
    row("requests/s without a move -> during it", &|n| {
        format!("{:.0} -> {:.0}", per_second(&n.control, n.control_time), per_second(&n.moving, n.moving_time))
    });
    row("ratio", &|n| format!("{:.3}", per_second(&n.moving, n.moving_time) / per_second(&n.control, n.control_time)));
    for (name, share) in [("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("slowest", 1.0)] {
        row(&format!("{name} without a move -> during it, ms"), &|n| {
            format!("{:.2} -> {:.2}", ms(share, &n.control), ms(share, &n.moving))
        });
    }
    row("ratio of p99", &|n| format!("{:.2}", ms(0.99, &n.moving) / ms(0.99, &n.control)));
    row("p99.9 above the control, ms", &|n| format!("{:.2}", ms(0.999, &n.moving) - ms(0.999, &n.control)));
    row("slowest above the control, ms", &|n| format!("{:.2}", ms(1.0, &n.moving) - ms(1.0, &n.control)));
    row("errors, unanswered", &|n| {
        let of = |c: &super::Counts| c.tally.errors + c.tally.unanswered + c.tally.disconnects;
        format!("{} -> {}", of(&n.control), of(&n.moving))
    });
    row("wrong replies, wrong keys after the move", &|n| {
        format!("{}, {}", n.control.tally.wrong + n.moving.tally.wrong, n.wrong_after)
    });
    row("redirections followed", &|n| n.moving.redirections.to_string());
    if results.noticed.is_empty() { Table::default() } else { table }
}

fn converged(results: &Results) -> Table {
    let mut table =
        Table::new(["keys", "writes/s", "moves", "done", "seconds, median", "longest", "errors", "wrong keys"]);
    if let Some(c) = &results.converged {
        let mut times = c.times.clone();
        times.sort_unstable();
        let seconds = |time: Option<&Duration>| time.map_or("-".to_owned(), |t| format!("{:.2}", t.as_secs_f64()));
        table.row([
            c.keys.to_string(),
            format!("{:.0}", c.rate),
            c.tried.to_string(),
            c.done.to_string(),
            seconds(times.get(times.len() / 2)),
            seconds(times.last()),
            c.errors.to_string(),
            c.wrong.to_string(),
        ]);
    }
    table
}

fn big(results: &Results) -> Table {
    let mut table = Table::new(["commands", "on", "number", "p99", "p99.9", "longest"]);
    let Some(big) = &results.big else { return table };
    let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
    for (when, on, times) in [
        ("without a move", "the hash", &big.control),
        ("during the move", "the hash", &big.moving),
        ("without a move", "other keys of its node", &big.control_others),
        ("during the move", "other keys of its node", &big.moving_others),
    ] {
        table.row([
            when.to_owned(),
            on.to_owned(),
            times.commands.to_string(),
            ms(times.p99),
            ms(times.p999),
            ms(times.longest),
        ]);
    }
    table
}

fn notes(settings: &Settings, results: &Results) -> Vec<String> {
    let mut notes = Vec::new();
    if settings.baseline_only {
        notes.push("Only the peer and the floor were measured; not the router's own moves.".to_owned());
    }
    notes.extend(results.noticed.iter().flat_map(|n| n.complaints.iter().map(move |c| format!("{}: {c}", n.way))));
    notes.extend(results.converged.iter().flat_map(|c| c.failures.iter().cloned()));
    notes.extend(results.big.iter().map(|big| {
        format!(
            "A hash of {} fields, {:.0} MB at its node, moved in {:.1} s ({} in pieces, {} whole); the longest hold was {:.1} ms; {} errors, {} fields wrong.",
            big.fields,
            big.bytes as f64 / 1e6,
            big.took.as_secs_f64(),
            big.in_pieces,
            big.whole,
            big.hold_max.as_secs_f64() * 1e3,
            big.errors,
            big.wrong
        )
    }));
    notes.extend(results.failures.iter().map(|f| format!("Failed: {f}")));
    notes
}

fn kept(results: &Results) -> Table {
    let mut table = Table::new([
        "journal",
        "keys",
        "moves",
        "seconds, median",
        "keys/s",
        "waited for the disk, times a move",
        "ratio",
    ]);
    let rate = |way: &Throughput| way.keys as f64 / way.median().as_secs_f64();
    let first = results.kept.first().map(rate);
    for way in &results.kept {
        table.row([
            match way.journal {
                Journal::Durable => "on".to_owned(),
                Journal::Unsynced => "written, not waited for (unsafe, for this table only)".to_owned(),
            },
            way.keys.to_string(),
            way.times.len().to_string(),
            format!("{:.2}", way.median().as_secs_f64()),
            format!("{:.0}", rate(way)),
            way.syncs.to_string(),
            first.map_or("-".to_owned(), |first| format!("{:.2}", rate(way) / first)),
        ]);
    }
    table
}

fn adoptions(results: &Results) -> Table {
    let mut table = Table::new(["goal", "keys", "adoptions", "keys moved", "seconds", "keys/s"]);
    for of_goal in &results.adoptions {
        let Some((moved, _)) = of_goal.all.first() else { continue };
        let text = |spread: Option<Spread>, decimals| {
            spread.map_or("-".to_owned(), |spread| spread.text(|value| format!("{value:.decimals$}")))
        };
        table.row([
            of_goal.goal.clone(),
            of_goal.keys.to_string(),
            of_goal.all.len().to_string(),
            moved.to_string(),
            text(of_goal.seconds(), 2),
            text(of_goal.rate(), 0),
        ]);
    }
    table
}

fn bytes(size: usize) -> String {
    if size < 1024 { format!("{size} B") } else { format!("{} KiB", size / 1024) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moves::{Cost, limit::Limit};

    #[test]
    fn ratios_are_to_the_best_reshard_and_to_the_limit() {
        let speed = |way: &str, seconds: u64, cost| Speed {
            size: 64,
            way: way.to_owned(),
            slots: 8,
            keys: 1000,
            took: Duration::from_secs(seconds),
            cost,
        };
        let cost = Some(Cost { memory_before: 1 << 20, memory_peak: 3 << 20, journal: 0, syncs: 0 });
        let second = Duration::from_secs(1);
        let results = Results {
            speeds: vec![
                speed("redis-cli reshard, pipeline 10", 10, None),
                speed("redis-cli reshard, pipeline 100", 5, None),
                speed("ours", 2, cost),
            ],
            limits: vec![(64, Limit { keys: 1000, dump: second / 2, restore: second, unlink: second / 2 })],
            ..Results::default()
        };
        let all = tables(&results).into_iter().map(|(_, t)| t.to_text()).collect::<String>();
        for part in ["2.50", "0.50", "50 %", "20 %", "2000.0 MiB"] {
            assert!(all.contains(part), "{part} in\n{all}");
        }
    }
}
