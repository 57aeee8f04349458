//! The state machine as its shell sees it: rules of sessions, leases, eviction, placement and membership,
//! and its behaviour as a whole against a simple model.

#![expect(
    clippy::unwrap_used,
    reason = "a test fails where a value is not there"
)]

mod eviction;
mod fences;
mod harness;
mod holds;
mod holds_model;
mod leases;
mod members;
mod model;
mod placement;
mod quotas;
mod replacing;
mod reports;
mod sessions;
mod threads;
