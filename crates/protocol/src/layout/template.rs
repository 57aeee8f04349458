//! A layer's ranges, made once and applied to block ids (W8).
//!
//! What a transfer of layer *l* needs is the same for every block but for one number: the block's
//! place in the engine's caches. A [`RangeTemplate`] holds the layer's pieces, cut at a fixed unit;
//! [`bind`](RangeTemplate::bind) adds where each cache entry's buffer lies, and checks once that no
//! block of it can overflow; [`apply`](BoundTemplate::apply) then is one multiplication and addition
//! per piece over plain arrays, with nothing rebuilt or looked up.
//!
//! Addresses are numbers here: the offset in a registered region, or an address; the caller knows.

use std::num::NonZeroU64;

use thiserror::Error;

use crate::range::ByteRange;

use super::ObjectLayout;

/// One piece of a layer: a part of one cache entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its bytes in the object.
    pub object: ByteRange,
    /// Index of its cache entry in the layer.
    pub entry: usize,
    /// Where in the entry it starts, in bytes.
    pub within: u64,
}

/// Where a cache entry of all blocks lies in the engine's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryBuffer {
    /// Address of block 0's entry.
    pub base: u64,
    /// Bytes from one block's entry to the next block's.
    pub stride: u64,
}

/// Why a template can't be bound or applied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// There is no such layer in the layout.
    #[error("layer {layer} of an object of {count} layers")]
    NoLayer {
        /// The local index given.
        layer: usize,
        /// How many there are.
        count: usize,
    },
    /// The buffers given are not those of the layer's entries.
    #[error("{found} buffers for a layer of {expected} cache entries")]
    BufferCount {
        /// Cache entries of the layer.
        expected: usize,
        /// Buffers given.
        found: usize,
    },
    /// The entries of two blocks overlap.
    #[error("cache entry {entry} has {len} bytes, but its blocks lie only {stride} apart")]
    Stride {
        /// The entry's index in the layer.
        entry: usize,
        /// Bytes of the entry.
        len: u64,
        /// Bytes from block to block.
        stride: u64,
    },
    /// The last block's entry ends beyond 64 bits.
    #[error("cache entry {entry} of {blocks} blocks at {base:#x} ends beyond 64 bits")]
    Overflow {
        /// The entry's index in the layer.
        entry: usize,
        /// Blocks in the cache.
        blocks: u64,
        /// Address of block 0's entry.
        base: u64,
    },
    /// The cache has no such block.
    #[error("block {id} of a cache of {blocks} blocks")]
    BlockId {
        /// The id given.
        id: u64,
        /// Blocks in the cache.
        blocks: u64,
    },
}

/// The pieces of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeTemplate {
    pieces: Vec<Piece>,
    entry_lens: Vec<u64>,
}

impl RangeTemplate {
    /// The template of a layer, given by its local index. Every entry is cut at multiples of `unit`
    /// from its start: the ranges that writers write and readers find as whole rows.
    pub fn new(
        layout: &ObjectLayout,
        layer: usize,
        unit: NonZeroU64,
    ) -> Result<Self, TemplateError> {
        if layer >= layout.layer_count() {
            return Err(TemplateError::NoLayer {
                layer,
                count: layout.layer_count(),
            });
        }
        let pieces = layout.layer_entries(layer).flat_map(|place| {
            place.range.split_every(unit).map(move |object| Piece {
                object,
                entry: place.entry,
                within: object.start() - place.range.start(),
            })
        });
        Ok(Self {
            pieces: pieces.collect(),
            entry_lens: layout.layer_entries(layer).map(|p| p.range.len()).collect(),
        })
    }

    /// The pieces, in the order of their bytes.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Ties the pieces to a cache of `blocks` blocks with one buffer per entry, in the entries' order.
    pub fn bind(
        &self,
        buffers: &[EntryBuffer],
        blocks: u64,
    ) -> Result<BoundTemplate, TemplateError> {
        if buffers.len() != self.entry_lens.len() {
            return Err(TemplateError::BufferCount {
                expected: self.entry_lens.len(),
                found: buffers.len(),
            });
        }
        for (entry, (buffer, &len)) in buffers.iter().zip(&self.entry_lens).enumerate() {
            let EntryBuffer { base, stride } = *buffer;
            if blocks > 1 && stride < len {
                return Err(TemplateError::Stride { entry, len, stride });
            }
            let last = stride.checked_mul(blocks.saturating_sub(1));
            let end = last.and_then(|at| at.checked_add(len)?.checked_add(base));
            if end.is_none() {
                return Err(TemplateError::Overflow {
                    entry,
                    blocks,
                    base,
                });
            }
        }
        let per_piece = |of: fn(&Piece, &EntryBuffer) -> u64| -> Vec<u64> {
            let pieces = self.pieces.iter();
            pieces.map(|p| of(p, &buffers[p.entry])).collect()
        };
        Ok(BoundTemplate {
            object_offsets: per_piece(|piece, _| piece.object.start()),
            lens: per_piece(|piece, _| piece.object.len()),
            first_addresses: per_piece(|piece, buffer| buffer.base + piece.within),
            strides: per_piece(|_, buffer| buffer.stride),
            blocks,
        })
    }
}

/// The pieces of one layer, and where block 0 has them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BoundTemplate {
    // One element per piece in each: arrays of one kind, so that the loop over them vectorises.
    object_offsets: Vec<u64>,
    lens: Vec<u64>,
    first_addresses: Vec<u64>,
    strides: Vec<u64>,
    // Invariant: first address + stride × (blocks − 1) + length does not overflow for any piece.
    blocks: u64,
}

/// Addresses of the pieces of several blocks: those of the first block, then of the second, and so on.
/// Keep one and reuse its memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AppliedRanges {
    addresses: Vec<u64>,
    pieces: usize,
}

impl AppliedRanges {
    /// The addresses of one block's pieces; `index` counts the block ids that were applied.
    pub fn block(&self, index: usize) -> Option<&[u64]> {
        let start = index.checked_mul(self.pieces)?;
        self.addresses.get(start..start.checked_add(self.pieces)?)
    }

    /// All addresses, block after block.
    pub fn addresses(&self) -> &[u64] {
        &self.addresses
    }
}

impl BoundTemplate {
    /// Number of pieces of a block.
    pub fn len(&self) -> usize {
        self.lens.len()
    }

    /// Whether there is no piece; never so for a layer of an [`ObjectLayout`].
    pub fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// Offset in the object of each piece.
    pub fn object_offsets(&self) -> &[u64] {
        &self.object_offsets
    }

    /// Bytes of each piece.
    pub fn lens(&self) -> &[u64] {
        &self.lens
    }

    /// Computes the addresses of the pieces of these blocks into `out`, which it empties first. On an
    /// error `out` is empty.
    pub fn apply(&self, block_ids: &[u64], out: &mut AppliedRanges) -> Result<(), TemplateError> {
        out.pieces = self.len();
        out.addresses.clear();
        if let Some(&id) = block_ids.iter().find(|&&id| id >= self.blocks) {
            return Err(TemplateError::BlockId {
                id,
                blocks: self.blocks,
            });
        }
        out.addresses.reserve(block_ids.len() * self.len());
        for &id in block_ids {
            let bases = self.first_addresses.iter().zip(&self.strides);
            // Can't overflow: the id is below `blocks`.
            out.addresses
                .extend(bases.map(|(first, stride)| first.wrapping_add(stride.wrapping_mul(id))));
        }
        Ok(())
    }
}
