//! End-to-end tests: the real binary before real servers.
//!
//! One test binary with a module per theme, because every integration test file is linked on its own and the link takes longer than the
//! tests. `support` has the harness; its module comment says how to run the tests against a plain server.

mod blocking;
mod clients;
mod cluster;
mod cross_slot;
mod demo;
mod differential;
mod doctor;
mod empty_return;
mod failure;
mod histories;
mod homecoming;
mod hostile;
mod in_flight;
mod keyspace;
mod large;
mod lifecycle;
mod limits;
mod load;
mod memory;
mod metrics;
mod modules;
mod monitor;
mod movectl;
mod movectl_faults;
mod movectl_fences;
mod movectl_history;
mod movectl_liveness;
mod movectl_moves;
mod movectl_nodes;
mod movekeys;
mod multikey;
mod operators;
mod pipelines;
mod protocols;
mod pubsub;
mod renew;
mod replicas;
mod scan;
mod script_generator;
mod script_keys;
mod scripting;
mod servers;
mod session;
mod standby;
mod support;
mod tls;
mod tracking;
mod transactions;
mod unix;
mod users;
mod waiting;
