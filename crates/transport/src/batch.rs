//! What a caller asks to be moved.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::ids::{Capability, Generation, RegionId};

use crate::endpoint::Endpoint;
use crate::memory::LocalSlice;

/// Which way the bytes go, seen from the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer's memory into local memory.
    Read,
    /// From local memory into the peer's.
    Write,
}

impl Direction {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// The name used in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// A place in a peer's registered memory, and the right to touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSlice {
    /// The region.
    pub region: RegionId,
    /// What its owner handed out with it.
    pub capability: Capability,
    /// First byte, counted from the region's start.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// With a generation, a write raises the tags of the granules that it touches to it and fails
    /// where one is later already; a read needs all tags to equal it, before and after.
    pub generation: Option<Generation>,
}

/// One contiguous copy. Both slices have the same length; zero is done at once.
#[derive(Clone, Debug)]
pub struct Piece {
    /// This side's memory.
    pub local: LocalSlice,
    /// The peer's memory.
    pub remote: RemoteSlice,
}

/// Copies that are asked for together, all to or from one peer. Any number, any sizes.
///
/// Pieces run in parallel and in no order. Where destinations overlap, the bytes there are those of
/// some of the pieces.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The peer.
    pub peer: Arc<Endpoint>,
    /// Which way the bytes go.
    pub direction: Direction,
    /// The copies.
    pub pieces: Vec<Piece>,
    /// Whether the CRC-32C of every piece's bytes, as they are on this side, is wanted.
    pub checksum: bool,
    /// How long the batch as a whole may take; by default [`crate::Deadlines::transfer`]. Pieces that
    /// were not begun by then fail with [`crate::PieceError::Timeout`]. One that is under way is given
    /// [`crate::Deadlines::progress`] more to end, since stopping it costs the connection, which other
    /// batches share: so the batch resolves by the sum of both.
    pub deadline: Option<Duration>,
}
