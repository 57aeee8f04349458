//! Clients, nodes and a master together, over real transports.
//!
//! `dev_*` are the cases of the same number, `session_*` the rules of range sessions, `client_*` whole
//! objects. One binary, since linking takes longer than running.

mod blocking;
mod client_damage;
mod client_life;
mod client_nodes;
mod client_objects;
mod client_relocate;
mod client_tenants;
#[path = "../common/mod.rs"]
mod common;
mod dev_leases;
mod dev_puts;
mod dev_sessions;
mod early;
mod early_ends;
mod guesses;
mod holds;
mod lanes;
mod local;
mod session_commit;
mod session_ranges;
mod session_rules;
