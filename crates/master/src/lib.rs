//! The metadata service of Layercake: objects, placement, leases, eviction, membership.
#![forbid(unsafe_code)]

pub mod state;
