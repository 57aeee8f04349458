//! How an engine's caches are laid out, as both sides are told.

use layercake_protocol::layout::{LayerSpec, LayoutError, ObjectLayout};

/// One KV cache group's layers on one rank, by what a block holds of them.
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
