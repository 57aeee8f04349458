//! Entries by slot number.
//!
//! Slots live in chunks that never move, so that growing copies nothing and wastes little; freed slots are
//! used again, the last one first.

use std::ops::{Index, IndexMut};

use super::entry::{Entry, Phase};

/// Entries in a chunk, and its logarithm.
const CHUNK: u32 = 1 << CHUNK_SHIFT;
const CHUNK_SHIFT: u32 = 8;

/// "No slot".
pub(crate) const NIL: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Slab {
    chunks: Vec<Box<[Entry]>>,
    /// The first vacant slot; the others follow by `Entry::position`.
    vacant: u32,
}

impl Slab {
    pub(crate) fn new() -> Self {
        Self {
            chunks: Vec::new(),
            vacant: NIL,
        }
    }

    /// One past the greatest slot number that may be in use.
    pub(crate) fn bound(&self) -> u32 {
        let chunks = u32::try_from(self.chunks.len()).unwrap_or(NIL);
        chunks.saturating_mul(CHUNK)
    }

    /// Takes a vacant slot; the caller fills it with an entry that is not vacant.
    pub(crate) fn take(&mut self) -> u32 {
        if self.vacant == NIL {
            let first = self.bound();
            let last = first + (CHUNK - 1);
            let chunk =
                (first..=last).map(|slot| Entry::vacant(if slot == last { NIL } else { slot + 1 }));
            self.chunks.push(chunk.collect());
            self.vacant = first;
        }
        let slot = self.vacant;
        self.vacant = self[slot].position;
        slot
    }

    /// Makes a slot vacant and returns what was in it.
    pub(crate) fn release(&mut self, slot: u32) -> Entry {
        let vacant = Entry::vacant(self.vacant);
        let entry = std::mem::replace(&mut self[slot], vacant);
        debug_assert_ne!(entry.phase, Phase::Vacant, "a slot is released once");
        self.vacant = slot;
        entry
    }
}

impl Index<u32> for Slab {
    type Output = Entry;

    fn index(&self, slot: u32) -> &Entry {
        &self.chunks[(slot >> CHUNK_SHIFT) as usize][(slot % CHUNK) as usize]
    }
}

impl IndexMut<u32> for Slab {
    fn index_mut(&mut self, slot: u32) -> &mut Entry {
        &mut self.chunks[(slot >> CHUNK_SHIFT) as usize][(slot % CHUNK) as usize]
    }
}
