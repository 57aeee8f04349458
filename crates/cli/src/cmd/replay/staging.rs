//! Local memory for one layer of a window of blocks: where it is made, landed and compared.
//!
//! The blocks of a window lie one after the other; within each, the layer's entries lie as in the object.

use anyhow::{Context as _, Result};
use layercake_protocol::layout::ObjectLayout;
use layercake_protocol::range::ByteRange;
use layercake_store::Range;
use layercake_transport::{Access, AllocateOptions, Engine, Memory};

use super::messages::Done;
use super::pattern::Pattern;

/// Bytes that are made or compared at a time: they stay in the first cache.
const CHUNK: usize = 16 << 10;

/// One layer of a window of blocks.
pub(crate) struct Staging {
    memory: Memory,
    layout: ObjectLayout,
    window: usize,
    chunk: Box<[u8; CHUNK]>,
}

impl Staging {
    /// Room for as many blocks as fit into `bytes`, at least one and at most `most_blocks`.
    pub(crate) fn new(
        engine: &Engine,
        layout: ObjectLayout,
        bytes: u64,
        most_blocks: u64,
    ) -> Result<Self> {
        let largest = (0..layout.layer_count())
            .filter_map(|layer| layout.layer_range(layer))
            .map(ByteRange::len)
            .max()
            .context("the geometry has no layer")?;
        let window = (bytes / largest).clamp(1, most_blocks);
        let options = AllocateOptions {
            access: Access::LocalOnly,
            ..AllocateOptions::default()
        };
        let memory = engine
            .allocate(window * largest, options)
            .context("can't get the staging memory of one layer")?;
        Ok(Self {
            memory,
            layout,
            window: usize::try_from(window)?,
            chunk: vec![0; CHUNK]
                .try_into()
                .ok()
                .context("a chunk has its own length")?,
        })
    }

    /// Blocks of a window, at most.
    pub(crate) fn window(&self) -> usize {
        self.window
    }

    /// Where a layer of the window's `block`-th block is staged, entry by entry.
    pub(crate) fn ranges(&self, layer: usize, block: usize) -> Result<Vec<Range>> {
        let bytes = self.layer_bytes(layer)?;
        let base = block as u64 * bytes.len();
        (0..self.layout.entry_count(layer))
            .map(|entry| {
                let range = self.entry_range(layer, entry)?;
                let local = self
                    .memory
                    .slice(base + range.start() - bytes.start(), range.len())?;
                Ok(Range {
                    offset: range.start(),
                    local,
                })
            })
            .collect()
    }

    /// Makes the bytes of a layer of a block.
    pub(crate) fn make(&mut self, layer: usize, block: usize, id: u64) -> Result<()> {
        self.for_chunks(layer, block, id, |staging, chunk, pattern, at, word| {
            pattern.fill(word, chunk);
            staging.copy_in(at, chunk)?;
            Ok(true)
        })
        .map(|_| ())
    }

    /// Compares every staged byte of this layer with what it must be, for a window of blocks; counts
    /// the wrong blocks, and answers how many, from the first on, are right.
    pub(crate) fn verify(&mut self, layer: usize, ids: &[u64], done: &mut Done) -> Result<usize> {
        let mut good = ids.len();
        for (block, &id) in ids.iter().enumerate() {
            let right =
                self.for_chunks(layer, block, id, |staging, chunk, pattern, at, word| {
                    staging.copy_out(at, chunk)?;
                    Ok(pattern.matches(word, chunk))
                })?;
            if !right {
                done.mismatched_blocks += 1;
                done.trouble.get_or_insert_with(|| {
                    format!("layer {layer} of block {id} holds wrong bytes")
                });
                good = good.min(block);
            }
        }
        Ok(good)
    }

    /// Visits the staged bytes of a layer of a block, with what they must be, until a visit says no.
    fn for_chunks(
        &mut self,
        layer: usize,
        block: usize,
        id: u64,
        mut visit: impl FnMut(&Memory, &mut [u8], Pattern, u64, u64) -> Result<bool>,
    ) -> Result<bool> {
        let bytes = self.layer_bytes(layer)?;
        let base = block as u64 * bytes.len();
        for entry in 0..self.layout.entry_count(layer) {
            let range = self.entry_range(layer, entry)?;
            let pattern = Pattern::new(id, u32::try_from(layer)?, u32::try_from(entry)?);
            let mut at = 0;
            while at < range.len() {
                let len = usize::try_from(range.len() - at).map_or(CHUNK, |left| left.min(CHUNK));
                let place = base + range.start() - bytes.start() + at;
                if !visit(&self.memory, &mut self.chunk[..len], pattern, place, at / 8)? {
                    return Ok(false);
                }
                at += len as u64;
            }
        }
        Ok(true)
    }

    fn layer_bytes(&self, layer: usize) -> Result<ByteRange> {
        self.layout
            .layer_range(layer)
            .context("there is no such layer")
    }

    fn entry_range(&self, layer: usize, entry: usize) -> Result<ByteRange> {
        self.layout
            .entry_range(layer, entry)
            .context("there is no such entry")
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::layout::ModelGeometry;
    use layercake_store::StoreError;
    use layercake_transport::EngineConfig;

    use super::*;

    const IDS: [u64; 3] = [4, 9, 2];

    #[test]
    fn one_flipped_byte_is_one_wrong_block_and_ends_the_prefix_before_it() {
        let geometry: ModelGeometry = "0:24,16;1:13".parse().expect("a geometry");
        let layout = geometry.layout().clone();
        let engine = Engine::start(EngineConfig::default()).expect("an engine starts on loopback");
        let mut staging =
            Staging::new(&engine, layout.clone(), 1 << 10, IDS.len() as u64).expect("memory");
        assert_eq!(staging.window(), IDS.len());
        for layer in 0..layout.layer_count() {
            for (block, &id) in IDS.iter().enumerate() {
                staging.make(layer, block, id).expect("made");
            }
            let mut done = Done::default();
            let good = staging.verify(layer, &IDS, &mut done).expect("compared");
            assert_eq!((good, &done), (IDS.len(), &Done::default()));

            let len = layout.layer_range(layer).expect("a layer").len();
            for at in 0..len * IDS.len() as u64 {
                let mut byte = [0];
                staging.memory.copy_out(at, &mut byte).expect("in range");
                staging.memory.copy_in(at, &[!byte[0]]).expect("in range");
                let mut done = Done::default();
                let good = staging.verify(layer, &IDS, &mut done).expect("compared");
                assert_eq!((good as u64, done.mismatched_blocks), (at / len, 1));
                assert!(
                    done.trouble
                        .is_some_and(|text| text.contains("wrong bytes"))
                );
                staging.memory.copy_in(at, &byte).expect("in range");
            }
        }
    }

    #[test]
    fn a_damaged_block_is_counted_and_one_that_is_gone_is_not() {
        let mut done = Done::default();
        done.not_loaded(&StoreError::UnknownSession);
        assert_eq!(done.corrupt_blocks, 0);
        done.not_loaded(&StoreError::ChecksumMismatch { offset: 8, len: 16 });
        assert_eq!(done.corrupt_blocks, 1);
        assert!(done.trouble.is_some());
    }
}
