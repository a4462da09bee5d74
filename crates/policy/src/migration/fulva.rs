//! Fulva (SRDS 2019) as NetMigrate's testbed has it, with what makes it correct: ownership of everything goes first,
//! and keys on their way are read at both nodes.
//!
//! As with `netmigrate` a read of a key that is on its way does not wait ([`super::DoubleRead`]). What differs: all
//! slots of the move go at once, as one leg, where the other protocols have few keys on their way at any time; and of
//! what is read at both nodes a sample is fetched, so that hot keys soon are at one. The published client keeps that as
//! a set of sampled keys, and how far each worker of the source has come as a range. Here every worker knows exactly
//! which keys have moved.
//!
//! One leg for everything has a price, which is the point of the comparison: reads cost twice until nearly all has
//! moved, a script that may use undeclared keys waits for the end of the move, and a move that goes back brings
//! everything back.

/// Of so many reads at both nodes one has its key fetched (NetMigrate's `client/`: 1 % of what the target misses).
pub(super) const FETCH_ONE_IN: u32 = 100;
