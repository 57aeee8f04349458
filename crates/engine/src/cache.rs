//! The paged cache of one rank: memory that transfers reach, in blocks of tokens.
//!
//! Each entry of each layer has a memory of its own; blocks lie a little further apart than they are
//! long, so that nobody takes the one for the other. The engine reads and writes through copies: the
//! connector may be writing to other blocks of the same memory at any time.

use layercake_connector::contract::{BlockId, CacheRegistration, EntryCache, LayerCache};
use layercake_transport::{AllocateOptions, Engine as Transport, Memory};

use crate::error::EngineError;
use crate::model::LayerShape;

/// Bytes between two blocks' entries begin at multiples of this.
const STRIDE_STEP: u64 = 64;

#[derive(Debug)]
pub(crate) struct PagedCache {
    layers: Vec<Vec<Pages>>,
    block_size: usize,
    blocks: u64,
}

#[derive(Debug)]
struct Pages {
    name: &'static str,
    memory: Memory,
    stride: u64,
    token_bytes: u64,
}

impl PagedCache {
    pub(crate) fn new(
        shapes: &[LayerShape],
        block_size: u32,
        blocks: u64,
        transport: &Transport,
    ) -> Result<Self, EngineError> {
        let pages = |entry: crate::model::EntryShape| {
            let len = entry.token_bytes * u64::from(block_size);
            let stride = (len + 1).next_multiple_of(STRIDE_STEP);
            let memory = transport.allocate(stride * blocks, AllocateOptions::default())?;
            Ok(Pages {
                name: entry.name,
                memory,
                stride,
                token_bytes: entry.token_bytes,
            })
        };
        let layers = shapes
            .iter()
            .map(|shape| shape.entries().into_iter().map(pages).collect());
        Ok(Self {
            layers: layers.collect::<Result<_, EngineError>>()?,
            block_size: block_size as usize,
            blocks,
        })
    }

    /// What the connector is told.
    pub(crate) fn registration(&self) -> Result<CacheRegistration, EngineError> {
        let layers = self.layers.iter().zip(0..).map(|(entries, physical)| {
            let entries = entries.iter().map(|pages| {
                Ok(EntryCache {
                    name: pages.name.to_owned(),
                    memory: pages.memory.slice(0, pages.memory.len())?,
                    stride: pages.stride,
                    len: pages.token_bytes * self.block_size as u64,
                })
            });
            Ok(LayerCache {
                physical,
                entries: entries.collect::<Result<_, EngineError>>()?,
            })
        });
        Ok(CacheRegistration {
            layers: layers.collect::<Result<_, EngineError>>()?,
            blocks: self.blocks,
        })
    }

    /// Writes what a token has in an entry.
    pub(crate) fn write(
        &self,
        (layer, entry): (usize, usize),
        table: &[BlockId],
        position: usize,
        bytes: &[u8],
    ) -> Result<(), EngineError> {
        let pages = &self.layers[layer][entry];
        let block = table[position / self.block_size];
        let slot = (position % self.block_size) as u64;
        pages
            .memory
            .copy_in(block * pages.stride + slot * pages.token_bytes, bytes)?;
        Ok(())
    }

    /// Reads what the first `tokens` tokens of a table have in an entry.
    pub(crate) fn read(
        &self,
        (layer, entry): (usize, usize),
        table: &[BlockId],
        tokens: usize,
    ) -> Result<Vec<u8>, EngineError> {
        let pages = &self.layers[layer][entry];
        let token_bytes = usize::try_from(pages.token_bytes).unwrap_or(usize::MAX);
        let mut bytes = vec![0; tokens * token_bytes];
        let blocks = bytes.chunks_mut(self.block_size * token_bytes);
        for (bytes, block) in blocks.zip(table) {
            pages.memory.copy_out(block * pages.stride, bytes)?;
        }
        Ok(bytes)
    }
}
