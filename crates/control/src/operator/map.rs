//! Report of the slot map: owners, slots in transit, and locations of keys.

use std::collections::BTreeMap;

use switchyard_policy::topology::{NodeId, Slot, Stage, Topology, Transit};

use crate::admin::{KeyReport, NodeSlotsReport, OverridesReport, RangeReport, SlotsReport, TransitReport, WhereReport};

fn name(topology: &Topology, node: NodeId) -> String {
    topology.node(node).map(|node| node.name.clone()).unwrap_or_default()
}

/// Formats slots as ranges: `0-100,200`.
pub(crate) fn text_of(slots: &[Slot]) -> String {
    let numbers: Vec<u16> = slots.iter().map(|slot| slot.number()).collect();
    let runs = numbers.chunk_by(|a, b| a + 1 == *b).map(|run| match run {
        [one] => one.to_string(),
        run => format!("{}-{}", run[0], run[run.len() - 1]),
    });
    runs.collect::<Vec<_>>().join(",")
}

/// Formats the slots of a node.
pub(super) fn ranges_text(topology: &Topology, node: NodeId) -> String {
    let owned: Vec<Slot> = topology.slots().filter(|slot| topology.owner(*slot) == node).collect();
    if owned.is_empty() { "none".to_owned() } else { text_of(&owned) }
}

fn transit_report(topology: &Topology, transit: &Transit, slots: &[Slot]) -> TransitReport {
    TransitReport {
        move_id: transit.move_id.0,
        from: name(topology, transit.source),
        to: name(topology, transit.target),
        slots: text_of(slots),
        count: slots.len() as u64,
        stage: match transit.stage {
            Stage::Observed => "listed",
            Stage::Moving { .. } => "moving",
        }
        .to_owned(),
        keys_only: transit.keys_only,
    }
}

pub(crate) fn slots_report(topology: &Topology) -> SlotsReport {
    let mut overrides: BTreeMap<(Slot, NodeId), u64> = BTreeMap::new();
    for slot in topology.slots() {
        topology.overrides_in(slot).for_each(|(_, node)| *overrides.entry((slot, node)).or_default() += 1);
    }
    let of_transit = |transit: &Transit| {
        let slots: Vec<Slot> = topology.slots().filter(|slot| topology.transit(*slot) == Some(transit)).collect();
        // The leg's slots have already been handed over.
        (!slots.is_empty()).then(|| transit_report(topology, transit, &slots))
    };
    SlotsReport {
        epoch: topology.epoch(),
        nodes: topology
            .nodes()
            .map(|node| NodeSlotsReport {
                node: node.name.clone(),
                slots: topology.slots_of(node.id) as u64,
                ranges: ranges_text(topology, node.id),
                overrides: topology.overrides_at(node.id) as u64,
            })
            .collect(),
        ranges: topology
            .ranges_in_use()
            .map(|(node, range)| RangeReport { first: *range.start(), last: *range.end(), node: name(topology, node) })
            .collect(),
        in_transit: topology.transits().filter_map(of_transit).collect(),
        overrides: overrides
            .into_iter()
            .map(|((slot, node), keys)| OverridesReport {
                slot: slot.number(),
                owner: name(topology, topology.owner(slot)),
                node: name(topology, node),
                keys,
            })
            .collect(),
    }
}

pub(crate) fn location_report(topology: &Topology, keys: &[Vec<u8>]) -> WhereReport {
    let shown = |bytes: &[u8]| match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.escape_ascii().to_string(),
    };
    let report = |key: &Vec<u8>| {
        let slot = topology.slot_of(key);
        KeyReport {
            key: shown(key),
            slot: slot.number(),
            hash_tag: topology.placement().hash_tag(key).map(shown),
            owner: name(topology, topology.owner(slot)),
            node: name(topology, topology.node_of(key)),
            relocated: topology.placement_override(key).is_some(),
            in_transit: topology.transit(slot).map(|transit| transit_report(topology, transit, &[slot])),
        }
    };
    WhereReport { epoch: topology.epoch(), keys: keys.iter().map(report).collect() }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use switchyard_policy::topology::MoveId;

    use super::*;

    #[test]
    fn key_locations_agree_with_the_map() {
        let names: Vec<String> = (0..2).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let even = Topology::even(&names).expect("two nodes");
        let alone: Arc<[u8]> = b"{tag}alone".as_slice().into();
        let (here, slot) = (even.owner_of(&alone), even.slot_of(&alone));
        let there = NodeId(1 - here.0);
        let parted = even.keys_handed_over(&[], [&alone], there);
        let transit = Transit {
            move_id: MoveId(7),
            source: here,
            target: there,
            stage: Stage::Moving { leg: 2 },
            keys_only: false,
        };
        let moving = parted.with_transits([(transit, &[slot][..])]).expect("few");

        let map = slots_report(&moving);
        let slots: u64 = map.ranges.iter().map(|range| u64::from(range.last - range.first) + 1).sum();
        assert_eq!((slots, map.nodes.iter().map(|node| node.slots).sum::<u64>()), (16384, 16384));
        assert_eq!(map.nodes[0].ranges, "0-8191");
        let [under_way] = &map.in_transit[..] else { panic!("{map:?}") };
        assert_eq!(
            (under_way.move_id, under_way.slots.as_str(), under_way.stage.as_str()),
            (7, slot.number().to_string().as_str(), "moving")
        );
        let [exception] = &map.overrides[..] else { panic!("{map:?}") };
        assert_eq!((exception.slot, exception.keys, &exception.node), (slot.number(), 1, &names[there.index()]));

        let found = location_report(&moving, &[alone.to_vec(), b"{tag}other".to_vec(), vec![b'a', 0xff]]).keys;
        assert_eq!(
            (found[0].hash_tag.as_deref(), found[0].relocated, &found[0].node),
            (Some("tag"), true, &names[there.index()])
        );
        assert_eq!((found[1].relocated, &found[1].node, found[1].slot), (false, &names[here.index()], slot.number()));
        assert_eq!(found[1].in_transit.as_ref().map(|transit| transit.to.clone()), Some(names[there.index()].clone()));
        assert_eq!((found[2].key.as_str(), found[2].hash_tag.as_deref()), ("a\\xff", None));
    }
}
