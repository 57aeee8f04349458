//! Entries by slot number.
//!
//! Slots live in chunks that never move, so that growing copies nothing. Each chunk is twice as large as
//! the one before, up to a size from which on all are alike: there are few, so what finds them stays in the
//! cache, and little of the last one lies idle. Freed slots are used again, the last one first.

use std::ops::{Index, IndexMut};

use super::chunks::Chunks;
use super::entry::{Entry, Phase};
use crate::state::memory::{TableMemory, TableVec};
use crate::state::prefetch::Span;

/// Entries in the first chunk and in the largest ones.
const CHUNKS: Chunks = Chunks::new(32, 2048);

/// "No slot".
pub(crate) const NIL: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct Slab {
    memory: TableMemory,
    chunks: Vec<TableVec<Entry>>,
    /// Slots that were ever taken.
    bound: u32,
    /// Those of them that are free; the last one is taken next.
    vacant: Vec<u32>,
}

impl Slab {
    pub(crate) fn new(memory: TableMemory) -> Self {
        Self {
            memory,
            chunks: Vec::new(),
            bound: 0,
            vacant: Vec::new(),
        }
    }

    /// One past the greatest slot number that may be in use.
    pub(crate) fn bound(&self) -> u32 {
        self.bound
    }

    /// What leads to the slot that is taken next.
    pub(crate) fn way(&self) -> Span {
        let chunk = self.chunks.last().map(Span::of);
        self.vacant
            .last()
            .map(Span::of)
            .or(chunk)
            .unwrap_or_default()
    }

    /// The slot that is taken after `before` others.
    pub(crate) fn vacancy(&self, before: usize) -> Span {
        if let Some(slot) = self.vacant.iter().rev().nth(before) {
            return Span::of(&self[*slot]);
        }
        let before = before - self.vacant.len();
        let chunk = self.chunks.last().map(|chunk| Span::behind(chunk, before));
        chunk.unwrap_or_default()
    }

    /// Takes a vacant slot; the caller fills it with an entry that is not vacant.
    pub(crate) fn take(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| self.extend())
    }

    fn extend(&mut self) -> u32 {
        let slot = self.bound;
        let (chunk, _) = CHUNKS.locate(slot);
        if chunk == self.chunks.len() {
            let size = CHUNKS.size(chunk);
            let chunk = TableVec::with_capacity_in(size, self.memory.clone());
            self.chunks.push(chunk);
        }
        self.chunks[chunk].push(Entry::vacant());
        self.bound += 1;
        slot
    }

    /// Makes a slot vacant and returns what was in it.
    pub(crate) fn release(&mut self, slot: u32) -> Entry {
        let entry = std::mem::replace(&mut self[slot], Entry::vacant());
        debug_assert_ne!(entry.phase, Phase::Vacant, "a slot is released once");
        self.vacant.push(slot);
        entry
    }
}

impl Index<u32> for Slab {
    type Output = Entry;

    fn index(&self, slot: u32) -> &Entry {
        let (chunk, place) = CHUNKS.locate(slot);
        &self.chunks[chunk][place]
    }
}

impl IndexMut<u32> for Slab {
    fn index_mut(&mut self, slot: u32) -> &mut Entry {
        let (chunk, place) = CHUNKS.locate(slot);
        &mut self.chunks[chunk][place]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_slots_come_before_new_ones() {
        let mut slab = Slab::new(TableMemory::default());
        let slots: Vec<_> = (0..100).map(|_| slab.take()).collect();
        assert_eq!(slots, (0..100).collect::<Vec<_>>());
        for slot in [3, 70] {
            slab[slot].phase = Phase::Complete;
            slab.release(slot);
        }
        assert_eq!([slab.take(), slab.take(), slab.take()], [70, 3, 100]);
        assert_eq!(slab.bound(), 101);
    }
}
