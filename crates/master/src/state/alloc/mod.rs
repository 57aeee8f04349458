//! Hands out pieces of one segment.
//!
//! The [`Allocator`] trait is the seam: placement and eviction know nothing of how holes are kept.
//! [`BinAllocator`] is the implementation in use. An allocator is plain data under its segment's lock;
//! it keeps no record of what it handed out, only of the holes between, so its memory grows with
//! fragmentation and not with the number of objects. The table of objects holds the other half.
//!
//! Pieces start on granules and fill whole ones. Accounting is in both units: the bytes that were asked
//! for, and the bytes of the granules they take.

mod bins;
mod bits;

use std::fmt;

use layercake_protocol::replica::GRANULE;
use thiserror::Error;

pub(crate) use bins::BinAllocator;

/// How much of a segment is in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Bytes that can be handed out at all: the segment's size in whole granules.
    pub(crate) capacity: u64,
    /// Bytes of the granules in use.
    pub(crate) used: u64,
    /// Bytes that were asked for.
    pub(crate) requested: u64,
    /// Pieces in use.
    pub(crate) pieces: u64,
}

/// A piece that can't be what the caller thinks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum AllocError {
    /// The piece does not lie inside the segment, on granules.
    #[error("{len} bytes at {offset} are no piece of this segment")]
    OutOfBounds {
        /// Where it begins.
        offset: u64,
        /// Its length.
        len: u64,
    },
    /// A part of the piece is free where it should not be, or in use where it should be free.
    #[error("{len} bytes at {offset} overlap what is {found}")]
    Overlap {
        /// Where it begins.
        offset: u64,
        /// Its length.
        len: u64,
        /// What lies there.
        found: &'static str,
    },
}

/// Keeps account of the free and used pieces of one segment. Offsets and lengths are in bytes.
pub(crate) trait Allocator: fmt::Debug + Send {
    /// Takes a piece of `len` bytes, at least 1, and returns its offset; `None`: no hole is large
    /// enough.
    fn allocate(&mut self, len: u64) -> Option<u64>;

    /// Gives a piece back. `len` is what it was taken with.
    fn free(&mut self, offset: u64, len: u64) -> Result<(), AllocError>;

    /// Takes the piece at a given place: what a rebuild from headers does.
    #[cfg_attr(
        not(test),
        expect(
            dead_code,
            reason = "inventories are taken back by a master of a new term only"
        )
    )]
    fn claim(&mut self, offset: u64, len: u64) -> Result<(), AllocError>;

    /// Makes several pieces, or none, of one in use: from now on it is given back as `pieces` pieces, which
    /// ask for `unasked` bytes less than it did.
    fn split(&mut self, pieces: u64, unasked: u64);

    /// Length of the largest hole: exactly what [`allocate`](Self::allocate) could take now.
    fn largest_free(&self) -> u64;

    /// The account.
    fn usage(&self) -> Usage;
}

/// The bytes that a piece of `len` bytes takes.
pub(crate) fn granule_bytes(len: u64) -> u64 {
    len.div_ceil(GRANULE).saturating_mul(GRANULE)
}

#[cfg(test)]
mod tests;
