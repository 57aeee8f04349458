//! The engine's caches, tied to the object's layout (W8).
//!
//! Per layer there is one bound template; a call applies block ids to it, which is one multiplication
//! and addition per piece. Registered memory is checked once, here: no block of it lies outside.

use std::num::NonZeroU64;

use layercake_protocol::layout::{
    AppliedRanges, BoundTemplate, EntryBuffer, LayerSpec, ObjectLayout, RangeTemplate,
};
use layercake_store::Range;
use layercake_transport::LocalSlice;

use crate::audit::Moved;
use crate::contract::{BlockId, CacheRegistration, EntryCache, LayerCache};
use crate::error::ConnectorError;

/// A part of an object that moves in one go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Part {
    Layer(usize),
    /// All layers: whole-object mode (W14).
    #[default]
    Whole,
}

impl Part {
    pub(crate) fn layer(self) -> Option<usize> {
        match self {
            Self::Layer(layer) => Some(layer),
            Self::Whole => None,
        }
    }

    /// Whether it is the first that moves of its object.
    pub(crate) fn is_first(self) -> bool {
        matches!(self, Self::Layer(0) | Self::Whole)
    }
}

pub(crate) struct Caches {
    layers: Vec<Layer>,
    object_len: u64,
}

/// Memory to place blocks in. Keep one and reuse it.
#[derive(Default)]
pub(crate) struct Scratch(Vec<AppliedRanges>);

/// Where a part of some blocks lies.
pub(crate) struct Placed<'a> {
    layers: &'a [Layer],
    applied: &'a [AppliedRanges],
}

struct Layer {
    template: BoundTemplate,
    /// The memory that each piece's address counts in.
    memories: Vec<LocalSlice>,
    start: u64,
    len: u64,
}

impl Caches {
    /// `unit`: the most bytes of one piece.
    pub(crate) fn new(
        caches: &CacheRegistration,
        layout: &ObjectLayout,
        unit: NonZeroU64,
    ) -> Result<Self, ConnectorError> {
        let specs = caches.layers.iter().map(|layer| {
            let entries = layer.entries.iter();
            LayerSpec::new(layer.physical, entries.map(|e| (e.name.as_str(), e.len)))
        });
        let found = ObjectLayout::new(specs)?;
        if found.digest() != layout.digest() {
            return Err(ConnectorError::Mismatch {
                what: "layout of the registered caches",
                ours: found.digest().to_string(),
                theirs: layout.digest().to_string(),
            });
        }
        let layers = (0..layout.layer_count()).map(|at| layer(caches, layout, at, unit));
        Ok(Self {
            layers: layers.collect::<Result<_, _>>()?,
            object_len: layout.object_len(),
        })
    }

    pub(crate) fn layers(&self) -> usize {
        self.layers.len()
    }

    pub(crate) fn object_len(&self) -> u64 {
        self.object_len
    }

    /// Pieces of an object: rows in its header.
    pub(crate) fn pieces(&self) -> usize {
        self.layers.iter().map(|layer| layer.template.len()).sum()
    }

    /// Bytes of a layer in an object.
    fn layer_len(&self, layer: usize) -> u64 {
        self.layers.get(layer).map_or(0, |layer| layer.len)
    }

    /// Bytes of the largest layer.
    pub(crate) fn largest_layer(&self) -> u64 {
        self.layers.iter().map(|layer| layer.len).max().unwrap_or(0)
    }

    /// Works out where a part lies in each of these blocks. `None`: one is not there.
    pub(crate) fn place<'a>(
        &'a self,
        part: Part,
        blocks: &[BlockId],
        scratch: &'a mut Scratch,
    ) -> Option<Placed<'a>> {
        let layers = match part {
            Part::Layer(layer) => self.layers.get(layer..=layer)?,
            Part::Whole => &self.layers,
        };
        let Scratch(applied) = scratch;
        if applied.len() < layers.len() {
            applied.resize_with(layers.len(), AppliedRanges::default);
        }
        for (layer, applied) in layers.iter().zip(&mut *applied) {
            layer.template.apply(blocks, applied).ok()?;
        }
        Some(Placed { layers, applied })
    }

    /// Bytes of a part in an object.
    pub(crate) fn part_len(&self, part: Part) -> u64 {
        match part {
            Part::Layer(layer) => self.layer_len(layer),
            Part::Whole => self.object_len,
        }
    }

    /// What a call moves that moves a part of so many objects.
    pub(crate) fn moved(&self, part: Part, rows: usize) -> Moved {
        let layer = part.layer().and_then(|layer| self.layers.get(layer));
        Moved {
            layer: part.layer(),
            offset: layer.map_or(0, |layer| layer.start),
            len: self.part_len(part),
            rows,
        }
    }

    /// Where each piece of a layer lies from the layer's start on.
    pub(crate) fn within(&self, layer: usize) -> impl Iterator<Item = (u64, u64)> {
        let layer = self.layers.get(layer);
        layer.into_iter().flat_map(|layer| {
            let offsets = layer.template.object_offsets().iter();
            let pieces = offsets.zip(layer.template.lens());
            pieces.map(|(offset, len)| (offset - layer.start, *len))
        })
    }
}

impl Placed<'_> {
    /// The ranges of the part in one of the blocks, counted as they were given.
    pub(crate) fn ranges(&self, block: usize) -> impl Iterator<Item = Range> {
        let layers = self.layers.iter().zip(self.applied);
        layers.flat_map(move |(layer, applied)| {
            let addresses = applied.block(block).unwrap_or_default();
            layer.at(addresses)
        })
    }
}

impl Layer {
    fn at(&self, addresses: &[u64]) -> impl Iterator<Item = Range> {
        let offsets = self.template.object_offsets().iter();
        let pieces = offsets
            .zip(self.template.lens())
            .zip(addresses.iter().zip(&self.memories));
        pieces.map(|((&offset, &len), (&address, memory))| Range {
            offset,
            local: memory
                .part(address, len)
                .expect("memory was checked for all blocks when it was registered"),
        })
    }
}

fn layer(
    caches: &CacheRegistration,
    layout: &ObjectLayout,
    at: usize,
    unit: NonZeroU64,
) -> Result<Layer, ConnectorError> {
    let differs = || ConnectorError::Metadata {
        detail: "a registered layer is not in the layout".to_owned(),
    };
    let physical = layout.physical_layer(at).ok_or_else(differs)?;
    let of_layer = |layer: &&LayerCache| layer.physical == physical;
    let registered = caches.layers.iter().find(of_layer).ok_or_else(differs)?;
    let mut entries = Vec::with_capacity(registered.entries.len());
    for place in layout.layer_entries(at) {
        let named = registered
            .entries
            .iter()
            .find(|entry| entry.name == place.name);
        let entry = named.ok_or_else(differs)?;
        check_memory(entry, physical, caches.blocks)?;
        entries.push(entry);
    }
    let template = RangeTemplate::new(layout, at, unit)?;
    let buffers: Vec<EntryBuffer> = entries
        .iter()
        .map(|entry| EntryBuffer {
            base: 0,
            stride: entry.stride,
        })
        .collect();
    let pieces = template.pieces().iter();
    let range = layout.layer_range(at).ok_or_else(differs)?;
    Ok(Layer {
        template: template.bind(&buffers, caches.blocks)?,
        memories: pieces
            .map(|piece| entries[piece.entry].memory.clone())
            .collect(),
        start: range.start(),
        len: range.len(),
    })
}

fn check_memory(entry: &EntryCache, layer: u32, blocks: u64) -> Result<(), ConnectorError> {
    let last = entry.stride.checked_mul(blocks.saturating_sub(1));
    let end = last.and_then(|last| last.checked_add(entry.len));
    if blocks > 0 && end.is_some_and(|end| end <= entry.memory.len()) {
        return Ok(());
    }
    Err(ConnectorError::Mismatch {
        what: "memory of a registered cache",
        ours: format!(
            "{} bytes for entry {:?} of layer {layer}",
            entry.memory.len(),
            entry.name
        ),
        theirs: format!(
            "{blocks} blocks of {} bytes, {} apart",
            entry.len, entry.stride
        ),
    })
}
