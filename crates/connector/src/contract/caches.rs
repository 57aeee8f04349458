//! How an engine's caches are laid out, and where they lie.

use layercake_protocol::layout::{LayerSpec, LayoutError, ObjectLayout};
use layercake_transport::LocalSlice;

/// One KV cache group's layers on one rank, by what a block holds of them: what both sides are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// The layers and the entries of each, in any order.
    pub layers: Vec<LayerSpec>,
}

impl CacheLayout {
    /// The layout of a block's object.
    pub fn object(&self) -> Result<ObjectLayout, LayoutError> {
        ObjectLayout::new(self.layers.iter().cloned())
    }
}

/// Where a worker's caches lie. Registered once, before the first step.
#[derive(Clone, Debug)]
pub struct CacheRegistration {
    /// The layers, in any order.
    pub layers: Vec<LayerCache>,
    /// Blocks in every cache.
    pub blocks: u64,
}

/// One layer's caches.
#[derive(Clone, Debug)]
pub struct LayerCache {
    /// Index of the layer in the model.
    pub physical: u32,
    /// Its entries, in any order.
    pub entries: Vec<EntryCache>,
}

/// One cache entry of all blocks.
#[derive(Clone, Debug)]
pub struct EntryCache {
    /// Its name; unique in its layer.
    pub name: String,
    /// The memory from block 0's entry on, at least up to the last block's end.
    pub memory: LocalSlice,
    /// Bytes from one block's entry to the next block's.
    pub stride: u64,
    /// Bytes of one block's entry.
    pub len: u64,
}
