//! The state machine as its shell sees it: rules of sessions, leases, eviction, placement and membership,
//! and its behaviour as a whole against a simple model.

mod harness;
mod sessions;
