//! Where each layer's bytes lie in an object (L1–L4).
//!
//! An object holds one block: all layers of a rank (or of one KV cache group) in the order of their
//! physical index, and in each layer its cache entries in the order of their names. So every process
//! arrives at the same order, whatever order it learnt them in. Layers may differ in the number and
//! the lengths of their entries; an offset is always the sum of the actual lengths before it, never a
//! layer index times a fixed size. All sums are 64-bit and checked once, when the layout is made.
//!
//! A layer has two indices: the *local* one counts the layers of this object from 0 and addresses
//! bytes; the *physical* one is the layer's place in the model and selects compute events. They
//! differ where a group holds only some layers.
//!
//! - [`ObjectLayout`]: the offsets.
//! - [`RangeTemplate`], [`BoundTemplate`]: one layer's ranges, made once and applied to block ids (W8).
//! - [`ModelGeometry`]: layouts as they are written on a command line.

mod geometry;
mod template;

pub use geometry::{GeometryError, ModelGeometry};
pub use template::{
    AppliedRanges, BoundTemplate, EntryBuffer, Piece, RangeTemplate, TemplateError,
};

use thiserror::Error;

use crate::fingerprint::{Canon, LayoutDigest};
use crate::range::ByteRange;

/// The most layers of one object.
pub const MAX_LAYERS: usize = 4096;

/// The most cache entries of one layer.
pub const MAX_ENTRIES: usize = 1024;

/// A cache entry as an engine knows it: one contiguous buffer of a layer in a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntrySpec {
    /// Name of the cache; unique in its layer.
    pub name: String,
    /// Bytes in one block, at least 1.
    pub len: u64,
}

/// A layer as an engine knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Index of the layer in the model.
    pub physical: u32,
    /// Its cache entries, in any order.
    pub entries: Vec<EntrySpec>,
}

impl LayerSpec {
    /// A layer of these entries, given as name and bytes.
    pub fn new<'a>(physical: u32, entries: impl IntoIterator<Item = (&'a str, u64)>) -> Self {
        let entries = entries.into_iter().map(|(name, len)| EntrySpec {
            name: name.to_owned(),
            len,
        });
        Self {
            physical,
            entries: entries.collect(),
        }
    }
}

/// Why layers make no layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There is no layer.
    #[error("an object needs at least one layer")]
    NoLayers,
    /// There are too many layers.
    #[error("{count} layers: at most {MAX_LAYERS} are accepted")]
    TooManyLayers {
        /// How many there are.
        count: usize,
    },
    /// Two layers have one physical index.
    #[error("layer {physical} is there twice")]
    DuplicateLayer {
        /// The index.
        physical: u32,
    },
    /// A layer has no cache entry.
    #[error("layer {physical} has no cache entry")]
    NoEntries {
        /// The layer's physical index.
        physical: u32,
    },
    /// A layer has too many cache entries.
    #[error("layer {physical} has {count} cache entries: at most {MAX_ENTRIES} are accepted")]
    TooManyEntries {
        /// The layer's physical index.
        physical: u32,
        /// How many there are.
        count: usize,
    },
    /// Two entries of a layer have one name.
    #[error("layer {physical} has two cache entries named {name:?}")]
    DuplicateEntry {
        /// The layer's physical index.
        physical: u32,
        /// The name.
        name: String,
    },
    /// A cache entry has no bytes.
    #[error("cache entry {name:?} of layer {physical} has 0 bytes: at least 1 is needed")]
    EmptyEntry {
        /// The layer's physical index.
        physical: u32,
        /// The entry.
        name: String,
    },
    /// The lengths add up to more than 64 bits hold.
    #[error("the object overflows 64 bits at cache entry {name:?} of layer {physical}")]
    Overflow {
        /// The layer's physical index.
        physical: u32,
        /// The entry whose end is beyond.
        name: String,
    },
}

/// One cache entry's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPlace<'a> {
    /// The layer's index in this object.
    pub layer: usize,
    /// The layer's index in the model.
    pub physical: u32,
    /// The entry's index in its layer.
    pub entry: usize,
    /// The entry's name.
    pub name: &'a str,
    /// Its bytes in the object.
    pub range: ByteRange,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Layer {
    physical: u32,
    /// Index in `entries` of the layer's first.
    first: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    range: ByteRange,
}

/// The bytes of an object, by layer and cache entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectLayout {
    // Ascending physical indices.
    layers: Vec<Layer>,
    // All layers' entries in order; their ranges follow on each other from 0 without a gap.
    entries: Vec<Entry>,
    digest: LayoutDigest,
}

impl ObjectLayout {
    /// Puts the layers and their entries in order and adds them up.
    pub fn new(layers: impl IntoIterator<Item = LayerSpec>) -> Result<Self, LayoutError> {
        let mut specs: Vec<LayerSpec> = layers.into_iter().collect();
        if specs.is_empty() {
            return Err(LayoutError::NoLayers);
        }
        if specs.len() > MAX_LAYERS {
            return Err(LayoutError::TooManyLayers { count: specs.len() });
        }
        specs.sort_by_key(|layer| layer.physical);
        let mut layers = Vec::with_capacity(specs.len());
        let mut entries = Vec::new();
        let mut at = 0;
        for spec in specs {
            let physical = spec.physical;
            if layers
                .last()
                .is_some_and(|l: &Layer| l.physical == physical)
            {
                return Err(LayoutError::DuplicateLayer { physical });
            }
            layers.push(Layer {
                physical,
                first: entries.len(),
            });
            at = place_entries(spec, at, &mut entries)?;
        }
        let digest = digest(&layers, &entries);
        Ok(Self {
            layers,
            entries,
            digest,
        })
    }

    /// Bytes of the object.
    pub fn object_len(&self) -> u64 {
        self.entries.last().map_or(0, |entry| entry.range.end())
    }

    /// Number of layers in the object.
    pub fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Number of cache entries of a layer; 0 if there is no such layer.
    pub fn entry_count(&self, layer: usize) -> usize {
        self.entries_of(layer).len()
    }

    /// The bytes of a layer. `layer` is local; `None` if there is no such layer.
    pub fn layer_range(&self, layer: usize) -> Option<ByteRange> {
        match self.entries_of(layer) {
            [] => None,
            [only] => Some(only.range),
            [first, .., last] => ByteRange::from_bounds(first.range.start(), last.range.end()).ok(),
        }
    }

    /// The bytes of a cache entry. `layer` is local; `None` if there is no such entry.
    pub fn entry_range(&self, layer: usize, entry: usize) -> Option<ByteRange> {
        self.entries_of(layer).get(entry).map(|e| e.range)
    }

    /// The name of a cache entry.
    pub fn entry_name(&self, layer: usize, entry: usize) -> Option<&str> {
        self.entries_of(layer).get(entry).map(|e| e.name.as_str())
    }

    /// The index in the model of a layer of this object.
    pub fn physical_layer(&self, layer: usize) -> Option<u32> {
        self.layers.get(layer).map(|l| l.physical)
    }

    /// The index in this object of a layer of the model; `None` if its bytes lie elsewhere.
    pub fn local_layer(&self, physical: u32) -> Option<usize> {
        self.layers
            .binary_search_by_key(&physical, |l| l.physical)
            .ok()
    }

    /// The cache entry that the byte at `offset` belongs to; `None` beyond the object.
    pub fn locate(&self, offset: u64) -> Option<EntryPlace<'_>> {
        let index = self.entries.partition_point(|e| e.range.end() <= offset);
        let layer = self.layers.partition_point(|l| l.first <= index);
        (index < self.entries.len()).then(|| self.place(layer - 1, index))
    }

    /// The cache entries of a layer, in order.
    pub fn layer_entries(&self, layer: usize) -> impl ExactSizeIterator<Item = EntryPlace<'_>> {
        let count = self.entry_count(layer);
        let first = self.layers.get(layer).map_or(0, |l| l.first);
        (first..first + count).map(move |index| self.place(layer, index))
    }

    /// All cache entries, in the order of their bytes.
    pub fn entries(&self) -> impl Iterator<Item = EntryPlace<'_>> {
        (0..self.layers.len()).flat_map(|layer| self.layer_entries(layer))
    }

    /// Digest of order, names and lengths: equal exactly for equal layouts.
    pub fn digest(&self) -> LayoutDigest {
        self.digest
    }

    /// The digest as the number that headers carry; never 0.
    pub fn layout_id(&self) -> u64 {
        let mut first = [0; 8];
        first.copy_from_slice(&self.digest.0[..8]);
        u64::from_be_bytes(first).max(1)
    }

    fn entries_of(&self, layer: usize) -> &[Entry] {
        let Some(first) = self.layers.get(layer).map(|l| l.first) else {
            return &[];
        };
        let after = self
            .layers
            .get(layer + 1)
            .map_or(self.entries.len(), |next| next.first);
        &self.entries[first..after]
    }

    fn place(&self, layer: usize, index: usize) -> EntryPlace<'_> {
        let Layer { physical, first } = self.layers[layer];
        EntryPlace {
            layer,
            physical,
            entry: index - first,
            name: &self.entries[index].name,
            range: self.entries[index].range,
        }
    }
}

/// Appends a layer's entries from offset `at` on, in the order of their names, and returns its end.
fn place_entries(
    spec: LayerSpec,
    mut at: u64,
    entries: &mut Vec<Entry>,
) -> Result<u64, LayoutError> {
    let LayerSpec {
        physical,
        entries: mut specs,
    } = spec;
    if specs.is_empty() {
        return Err(LayoutError::NoEntries { physical });
    }
    if specs.len() > MAX_ENTRIES {
        return Err(LayoutError::TooManyEntries {
            physical,
            count: specs.len(),
        });
    }
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = specs.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(LayoutError::DuplicateEntry {
            physical,
            name: pair[0].name.clone(),
        });
    }
    for EntrySpec { name, len } in specs {
        if len == 0 {
            return Err(LayoutError::EmptyEntry { physical, name });
        }
        let Ok(range) = ByteRange::new(at, len) else {
            return Err(LayoutError::Overflow { physical, name });
        };
        at = range.end();
        entries.push(Entry { name, range });
    }
    Ok(at)
}

fn digest(layers: &[Layer], entries: &[Entry]) -> LayoutDigest {
    let mut canon = Canon::new("layercake v1 object layout digest");
    canon.list(layers.len());
    for (index, layer) in layers.iter().enumerate() {
        let after = layers.get(index + 1).map_or(entries.len(), |l| l.first);
        let entries = &entries[layer.first..after];
        canon.number(layer.physical.into());
        canon.list(entries.len());
        for entry in entries {
            canon.text(&entry.name);
            canon.number(entry.range.len());
        }
    }
    LayoutDigest(canon.finish())
}
