//! The texts of a shard's keys.
//!
//! Keys live as long as their objects, and the messages around them for a moment. In one heap the long-lived
//! ones leave holes for the others, ever further apart, until each request costs the heap a miss of
//! the cache for every key that it carries. So keys have memory of their own.
//!
//! A text takes a run of cells, in chunks that never move, each twice as large as the one before up to a size
//! that all others have. Large chunks begin on a line of the cache, and runs on a cell's boundary, so
//! texts of one length touch as few lines as can be. A freed run is used again
//! for a text of as many cells, else cut up for a shorter one. Runs are not joined: the keys of
//! a deployment have a few lengths, and memory is never more than the most that each length needed.

use super::chunks::Chunks;
use super::slab::NIL;
use crate::state::memory::{TableMemory, TableVec};
use crate::state::prefetch::Span;

/// Bytes of a cell.
const CELL: usize = 32;

/// Cells in the first chunk and in the largest ones. The longest text fits into one.
const CHUNKS: Chunks = Chunks::new(32, 8192);

/// A text in [`Texts`], or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Text {
    /// The first cell.
    cell: u32,
    len: u16,
}

impl Text {
    pub(crate) const NONE: Self = Self { cell: NIL, len: 0 };

    fn cells(self) -> usize {
        usize::from(self.len).div_ceil(CELL)
    }
}

/// See the module's description.
#[derive(Debug, Default)]
pub(crate) struct Texts {
    memory: TableMemory,
    chunks: Vec<TableVec<[u8; CELL]>>,
    /// The first cell that was never used.
    next: u32,
    /// The first vacant run of each number of cells; its first bytes name the next one.
    vacant: Vec<u32>,
}

impl Texts {
    pub(crate) fn new(memory: TableMemory) -> Self {
        Self {
            memory,
            ..Self::default()
        }
    }

    /// Keeps a copy of a text of 1 to 65,535 bytes.
    pub(crate) fn store(&mut self, text: &str) -> Text {
        let len = u16::try_from(text.len()).expect("a key is no longer than this");
        let mut stored = Text { cell: NIL, len };
        stored.cell = self.take(stored.cells());
        self.bytes_mut(stored.cell, text.len())
            .copy_from_slice(text.as_bytes());
        stored
    }

    /// What leads to the memory of the next text of so many bytes.
    pub(crate) fn way(&self, len: usize) -> [Span; 2] {
        let vacant = self.vacant.get(len.div_ceil(CELL)).map(Span::of);
        let chunk = self.chunks.last().map(Span::of);
        [vacant, chunk].map(Option::unwrap_or_default)
    }

    /// The memory of the text that is stored after `before` others, all of so many bytes, as far as it is known: what
    /// follows on the first vacant run is not.
    pub(crate) fn vacancy(&self, len: usize, before: usize) -> Span {
        let cells = len.div_ceil(CELL);
        let vacant = self.vacant.get(cells).copied();
        let (run, before) = match vacant.filter(|run| *run != NIL) {
            Some(_) if before > 0 => return Span::default(),
            Some(run) => (run, 0),
            None => (self.next, before * cells),
        };
        let (chunk, at) = CHUNKS.locate(run);
        let span = self
            .chunks
            .get(chunk)
            .map(|chunk| Span::behind(&chunk[..at], before));
        span.unwrap_or_default().with_len(len)
    }

    /// Frees the memory of a text.
    pub(crate) fn release(&mut self, text: Text) {
        if text != Text::NONE {
            self.give(text.cell, text.cells());
        }
    }

    /// The bytes of a text.
    pub(crate) fn bytes(&self, text: Text) -> &[u8] {
        if text == Text::NONE {
            return &[];
        }
        let (chunk, at) = CHUNKS.locate(text.cell);
        &self.chunks[chunk][at..].as_flattened()[..usize::from(text.len)]
    }

    /// The text.
    pub(crate) fn get(&self, text: Text) -> &str {
        str::from_utf8(self.bytes(text)).expect("it was stored as text")
    }

    fn bytes_mut(&mut self, cell: u32, len: usize) -> &mut [u8] {
        let (chunk, at) = CHUNKS.locate(cell);
        &mut self.chunks[chunk][at..].as_flattened_mut()[..len]
    }

    /// Takes a run of this many cells.
    fn take(&mut self, cells: usize) -> u32 {
        if let Some(run) = self.pop(cells) {
            return run;
        }
        if self.room() < cells
            && let Some((longer, run)) = self.pop_longer(cells)
        {
            self.give(run + count(cells), longer - cells);
            return run;
        }
        while self.room() < cells {
            let rest = self.room();
            if rest > 0 {
                let run = self.extend(rest);
                self.give(run, rest);
            }
            let (chunk, _) = CHUNKS.locate(self.next);
            debug_assert_eq!(chunk, self.chunks.len(), "all of the others are used");
            let size = CHUNKS.size(chunk);
            let chunk = TableVec::with_capacity_in(size, self.memory.clone());
            self.chunks.push(chunk);
        }
        self.extend(cells)
    }

    /// Takes a run of cells of the last chunk that were never used; there is room for it.
    fn extend(&mut self, cells: usize) -> u32 {
        let run = self.next;
        let (chunk, at) = CHUNKS.locate(run);
        self.chunks[chunk].resize(at + cells, [0; CELL]);
        self.next += count(cells);
        run
    }

    /// Cells that were never used in the last chunk.
    fn room(&self) -> usize {
        let (chunk, at) = CHUNKS.locate(self.next);
        if chunk < self.chunks.len() {
            CHUNKS.size(chunk) - at
        } else {
            0
        }
    }

    fn pop(&mut self, cells: usize) -> Option<u32> {
        let run = self.vacant.get(cells).copied().filter(|run| *run != NIL)?;
        let mut next = [0; 4];
        next.copy_from_slice(self.bytes_mut(run, 4));
        self.vacant[cells] = u32::from_le_bytes(next);
        Some(run)
    }

    /// The shortest vacant run of more than this many cells, with its length.
    fn pop_longer(&mut self, cells: usize) -> Option<(usize, u32)> {
        (cells + 1..self.vacant.len()).find_map(|longer| Some((longer, self.pop(longer)?)))
    }

    /// Makes a run vacant.
    fn give(&mut self, run: u32, cells: usize) {
        if self.vacant.len() <= cells {
            self.vacant.resize(cells + 1, NIL);
        }
        let next = std::mem::replace(&mut self.vacant[cells], run);
        self.bytes_mut(run, 4).copy_from_slice(&next.to_le_bytes());
    }
}

/// A number of cells inside a chunk.
fn count(cells: usize) -> u32 {
    u32::try_from(cells).expect("chunks have fewer cells than there are numbers")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(seed: usize, len: usize) -> String {
        let letters = (seed..).map(|n| char::from(b'a' + u8::try_from(n * 7 % 26).unwrap()));
        letters.take(len).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn texts_stay_what_they_are_while_others_come_and_go(
            steps in prop::collection::vec(
                (any::<bool>(), prop_oneof![1_usize..200, 1_usize..3000], any::<prop::sample::Index>()),
                1..200,
            ),
        ) {
            let mut texts = Texts::default();
            let mut model: Vec<(Text, String)> = Vec::new();
            for (seed, (release, len, chosen)) in steps.into_iter().enumerate() {
                if release && !model.is_empty() {
                    let (gone, _) = model.swap_remove(chosen.index(model.len()));
                    texts.release(gone);
                } else {
                    let text = text(seed, len);
                    model.push((texts.store(&text), text));
                }
                for (stored, text) in &model {
                    prop_assert_eq!(texts.get(*stored), text);
                }
            }
            prop_assert_eq!(texts.bytes(Text::NONE), b"");
        }
    }

    #[test]
    fn the_longest_key_has_room_from_the_start() {
        let mut texts = Texts::default();
        let long = text(3, usize::from(u16::MAX));
        let [short, stored] = [texts.store("k"), texts.store(&long)];
        assert_eq!(texts.get(stored), long);
        assert_eq!(texts.get(short), "k");
    }

    #[test]
    fn freed_memory_is_used_again() {
        let mut texts = Texts::default();
        let fill = |texts: &mut Texts, len| -> Vec<Text> {
            (0..1000)
                .map(|seed| texts.store(&text(seed, len)))
                .collect()
        };
        let stored = fill(&mut texts, 100);
        let most = texts.next;
        for _ in 0..3 {
            for stored in &stored {
                texts.release(*stored);
            }
            assert_eq!(fill(&mut texts, 100).len(), stored.len());
            assert_eq!(texts.next, most);
        }
    }

    #[test]
    fn shorter_texts_use_what_longer_ones_left() {
        let mut texts = Texts::default();
        // The first two chunks, to the last cell.
        let stored: Vec<_> = (0..24).map(|_| texts.store(&text(0, 4 * CELL))).collect();
        assert_eq!((texts.room(), texts.chunks.len()), (0, 2));
        for stored in stored {
            texts.release(stored);
        }
        for _ in 0..96 {
            texts.store(&text(0, CELL));
        }
        assert_eq!(texts.chunks.len(), 2);
    }
}
