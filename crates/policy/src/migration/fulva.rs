//! Fulva (SRDS 2019) as in NetMigrate's testbed, made correct: all ownership moves first, and keys in transit are read
//! at both nodes.
//!
//! As with `netmigrate`, a read of a key in transit does not wait ([`super::DoubleRead`]). There are two differences.
//! All slots of the move form one leg; the other protocols have few keys in transit at a time. A sample of the double
//! reads fetches its key, so that hot keys soon are at one node. The published client tracks sampled keys as a set, and
//! the progress of each source worker as a range. Here every worker knows exactly which keys have moved.
//!
//! One leg for all slots has a price, which this comparison measures: reads cost twice until nearly all keys have
//! moved, a script that may use undeclared keys waits for the end of the move, and a rollback returns all keys.
//! everything back.

/// Every 100th double read has its key fetched (NetMigrate's `client/`: 1 % of the reads that the target misses).
pub(super) const FETCH_ONE_IN: u32 = 100;
