//! `switchyard slots` and `switchyard where`: owners of slots, and locations of keys.

use clap::Args;
use switchyard_control::admin::{KeyReport, SlotsReport, TransitReport, WhereReport};

use super::Failure;
use super::admin_client::{AdminClient, AdminFlags, encoded};
use super::table::{count, number, shortened, table, text};

/// Show the slot map: owners of slots, slots in transit, keys at other nodes than their slots
#[derive(Debug, Args)]
#[command(after_long_help = "Examples:\n  \
    switchyard slots\n  \
    switchyard slots --json > slot-map.json\n  \
    switchyard slots --json | jq -r '.ranges[] | \"\\(.first)-\\(.last) \\(.node)\"'\n\n\
    Exit codes: 0 the router answered; 1 it did not")]
pub(crate) struct SlotsArguments {
    #[command(flatten)]
    flags: AdminFlags,
}

/// Show locations of keys: slot, node, whether they are in transit or were moved without their slots
#[derive(Debug, Args)]
#[command(
    long_about = "Locations of keys by the slot map: the slot, the hash tag that decides it, the node, whether the slot is in transit to another node, and \
        whether the key was moved without its slot. The nodes are not queried, so the keys need not exist.",
    after_long_help = "Examples:\n  \
        switchyard where user:1000\n  \
        switchyard where '{cart:7}:items' '{cart:7}:total'      two keys with one hash tag share a slot\n  \
        switchyard where user:1000 --json | jq -r '.keys[].node'\n\n\
        Exit codes: 0 the router answered; 1 it did not"
)]
pub(crate) struct WhereArguments {
    /// The keys
    #[arg(required = true, value_name = "KEY")]
    keys: Vec<String>,

    #[command(flatten)]
    flags: AdminFlags,
}

pub(crate) fn slots(arguments: &SlotsArguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let body = client.get("/api/v1/slots")?;
    client.print(&body, render_slots)
}

pub(crate) fn whereabouts(arguments: &WhereArguments) -> Result<(), Failure> {
    let client = AdminClient::new(&arguments.flags)?;
    let asked: Vec<String> = arguments.keys.iter().map(|key| format!("key={}", encoded(key))).collect();
    let body = client.get(&format!("/api/v1/where?{}", asked.join("&")))?;
    client.print(&body, render_keys)
}

/// Maximum number of characters for ranges.
const RANGES: usize = 80;

fn render_slots(report: &SlotsReport) -> String {
    let rows: Vec<Vec<String>> = report
        .nodes
        .iter()
        .map(|node| vec![node.node.clone(), count(node.slots), shortened(&node.ranges, RANGES)])
        .collect();
    let mut out = table(&[text("NODE"), number("SLOTS"), text("RANGES")], &rows);
    if !report.in_transit.is_empty() {
        let columns = [number("MOVE"), text("FROM"), text("TO"), number("SLOTS"), text("STAGE"), text("WHICH")];
        let row = |transit: &TransitReport| {
            let stage =
                if transit.keys_only { format!("{}, single keys", transit.stage) } else { transit.stage.clone() };
            vec![
                transit.move_id.to_string(),
                transit.from.clone(),
                transit.to.clone(),
                count(transit.count),
                stage,
                shortened(&transit.slots, RANGES),
            ]
        };
        out.push_str(
            "\nin transit (listed: all keys are still at the source; moving: each key is at one of the two nodes):\n",
        );
        out.push_str(&table(&columns, &report.in_transit.iter().map(row).collect::<Vec<_>>()));
    }
    if !report.overrides.is_empty() {
        let columns = [number("SLOT"), text("OWNER"), text("KEYS LIVE AT"), number("KEYS")];
        let rows: Vec<Vec<String>> = report
            .overrides
            .iter()
            .map(|slot| vec![slot.slot.to_string(), slot.owner.clone(), slot.node.clone(), count(slot.keys)])
            .collect();
        out.push_str("\nkeys at other nodes than their slots (switchyard move --home returns them):\n");
        out.push_str(&table(&columns, &rows));
    }
    out
}

fn render_keys(report: &WhereReport) -> String {
    let now = |key: &KeyReport| match (&key.in_transit, key.relocated) {
        (Some(transit), _) if transit.stage == "moving" && transit.keys_only => {
            format!("move {} moves some keys of its slot to {}", transit.move_id, transit.to)
        }
        (Some(transit), _) if transit.stage == "moving" => {
            format!("in transit to {} (move {})", transit.to, transit.move_id)
        }
        (_, true) => format!("moved without its slot, which is at {}", key.owner),
        _ => String::new(),
    };
    let row = |key: &KeyReport| {
        vec![
            key.key.clone(),
            key.slot.to_string(),
            key.node.clone(),
            key.hash_tag.clone().unwrap_or_default(),
            now(key),
        ]
    };
    let columns = [text("KEY"), number("SLOT"), text("NODE"), text("HASH TAG"), text("NOW")];
    table(&columns, &report.keys.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use switchyard_control::admin::{NodeSlotsReport, OverridesReport};

    use super::*;

    #[test]
    fn the_map_shows_owners_and_transit() {
        let node = |name: &str, slots, ranges: &str| NodeSlotsReport {
            node: name.into(),
            slots,
            ranges: ranges.into(),
            overrides: 0,
        };
        let mut map = SlotsReport {
            nodes: vec![node("a:1", 16384, "0-16383"), node("b:1", 0, "none")],
            ..SlotsReport::default()
        };
        assert_eq!(render_slots(&map), "NODE   SLOTS  RANGES\na:1   16 384  0-16383\nb:1        0  none\n");
        let many: Vec<String> = (0..1000).map(|number| (number * 2).to_string()).collect();
        let scattered = SlotsReport { nodes: vec![node("a:1", 1000, &many.join(","))], ..SlotsReport::default() };
        assert!(
            render_slots(&scattered).lines().all(|line| line.len() < 110)
                && render_slots(&scattered).ends_with("...\n")
        );
        let transit = TransitReport {
            move_id: 3,
            from: "a:1".into(),
            to: "b:1".into(),
            slots: "5".into(),
            count: 1,
            stage: "moving".into(),
            keys_only: false,
        };
        map.in_transit.push(transit.clone());
        map.overrides.push(OverridesReport { slot: 9, owner: "a:1".into(), node: "b:1".into(), keys: 2 });
        let shown = render_slots(&map);
        assert!(
            shown.contains("   3  a:1   b:1      1  moving  5\n")
                && shown.contains("   9  a:1    b:1              2\n"),
            "{shown}"
        );

        let key = KeyReport {
            key: "{t}k".into(),
            slot: 5,
            hash_tag: Some("t".into()),
            owner: "a:1".into(),
            node: "a:1".into(),
            ..KeyReport::default()
        };
        let moving = KeyReport { in_transit: Some(transit), ..key.clone() };
        let alone = KeyReport { relocated: true, node: "b:1".into(), ..key.clone() };
        let shown = render_keys(&WhereReport { epoch: 1, keys: vec![key, moving, alone] });
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(lines[1].trim_end(), "{t}k     5  a:1   t");
        assert!(
            lines[2].ends_with("in transit to b:1 (move 3)")
                && lines[3].ends_with("b:1   t         moved without its slot, which is at a:1"),
            "{shown}"
        );
    }
}
