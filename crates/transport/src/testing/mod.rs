//! What tests of this and other crates need: the conformance suite that every transport passes, and
//! a few helpers.
//!
//! Feature `testing`. Nothing here is for production: it panics where an expectation is not met.

pub mod conformance;
pub mod pattern;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{Access, Batch, Direction, Endpoint, Engine, Piece, RemoteSlice, Transfer};

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

/// Overwrites bytes of a peer's memory behind everybody's back. `place` says where; its length is that of `bytes`.
///
/// # Panics
///
/// If there are no bytes, or the engine is shut down.
pub fn poke(engine: &Engine, peer: Endpoint, place: RemoteSlice, bytes: Vec<u8>) -> Transfer {
    let len = bytes.len() as u64;
    let memory = engine
        .register(bytes.into(), Access::LocalOnly)
        .expect("memory of its own");
    engine.submit(Batch {
        peer: Arc::new(peer),
        direction: Direction::Write,
        pieces: vec![Piece {
            local: memory.slice(0, len).expect("whole"),
            remote: RemoteSlice { len, ..place },
        }],
        checksum: false,
        deadline: None,
    })
}
