//! Where a command goes, given its keys and the topology.
