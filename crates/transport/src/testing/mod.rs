//! What tests of this and other crates need: the conformance suite that every transport passes, and
//! a few helpers.
//!
//! Feature `testing`. Nothing here is for production: it panics where an expectation is not met.

pub mod conformance;
pub mod pattern;

use std::time::{Duration, Instant};

/// Polls until `condition` holds, and says whether it did within `limit`. For conditions that no event
/// announces.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    while !condition() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
    true
}
