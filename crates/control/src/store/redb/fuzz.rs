//! Fuzz target: any bytes as a row of the store.

use switchyard_policy::topology::{NodeId, SLOT_COUNT};

use super::{Failure, Loaded, PrimaryDocument, decode, encode, parse_failure};

/// Checks that a topology has an owner for each slot and is the same after it is stored again, also with placement
/// overrides in their own table. The input is the row of the topology and, after 0xff, these overrides. Also reads the
/// row as the record of a primary.
///
/// # Panics
/// If one of these is wrong.
pub fn store(input: &[u8]) {
    let mut rows = input.split(|byte| *byte == 0xff);
    let document = rows.next().unwrap_or_default();
    let overrides: Vec<_> = rows
        .filter_map(|row| row.split_first_chunk::<2>())
        .map(|(node, key)| (key.into(), NodeId(u16::from_le_bytes(*node))))
        .collect();
    match decode(document, || Ok(overrides.clone())) {
        Ok(Loaded { topology, .. }) => {
            assert_eq!(topology.ranges().map(|(_, range)| range.len()).sum::<usize>(), SLOT_COUNT);
            let stored = topology.placement_overrides().map(|(key, node)| (key.clone(), node)).collect();
            let again = decode(&encode(&topology), || Ok(stored));
            assert!(again.is_ok_and(|again| again.topology == topology), "stored and loaded again");
        }
        Err(Failure::Damaged(what) | Failure::Unknown(what)) => {
            assert!(what.starts_with("its topology cannot be read"))
        }
        Err(Failure::Database(_) | Failure::Stale { .. }) => panic!("no database was read"),
    }
    match serde_json::from_slice::<PrimaryDocument>(document) {
        Ok(record) => {
            let stored = serde_json::to_vec(&record).expect("numbers and strings are always JSON");
            let again: PrimaryDocument = serde_json::from_slice(&stored).expect("the own form");
            let fields = |record: PrimaryDocument| (record.primary, record.config_epoch, record.replication_id);
            assert_eq!(fields(again), fields(record));
        }
        Err(error) => assert!(matches!(parse_failure("record", &error), Failure::Damaged(_) | Failure::Unknown(_))),
    }
}
