//! The texts of a shard's keys.
//!
//! Keys live as long as their objects, and the messages around them for a moment. In one heap the long-lived
//! ones leave holes for the others, ever further apart, until each request costs the heap a miss of
//! the cache for every key that it carries. So keys have memory of their own.
//!
//! A text takes a run of cells, in chunks that never move, each twice as large as the one before. Runs
//! begin on a cell's boundary, so they touch as few lines of the cache as can be. A freed run is used again
//! for a text of as many cells, else cut up for a shorter one. Runs are not joined: the keys of
//! a deployment have a few lengths, and memory is never more than the most that each length needed.

use super::slab::NIL;

/// Bytes of a cell.
const CELL: usize = 32;

/// Cells in the first chunk.
const FIRST: usize = 1 << FIRST_SHIFT;
const FIRST_SHIFT: u32 = 5;

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
    chunks: Vec<Chunk>,
    /// The first cell that was never used.
    next: u32,
    /// The first vacant run of each number of cells; its first bytes name the next one.
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Chunk {
    bytes: Vec<u8>,
    /// Bytes before the first cell.
    skew: usize,
}

impl Chunk {
    fn new(cells: usize) -> Self {
        let bytes = vec![0; (cells + 1) * CELL];
        let skew = bytes.as_ptr().addr().wrapping_neg() % CELL;
        Self { bytes, skew }
    }
}

/// Chunk of a cell, its number there, and how many cells the chunk has.
fn locate(cell: u32) -> (usize, usize, usize) {
    let number = cell as usize + FIRST;
    let top = number.ilog2();
    ((top - FIRST_SHIFT) as usize, number ^ (1 << top), 1 << top)
}

impl Texts {
    /// Keeps a copy of a text of 1 to 65,535 bytes.
    pub(crate) fn store(&mut self, text: &str) -> Text {
        let len = u16::try_from(text.len()).expect("a key is no longer than this");
        let mut stored = Text { cell: NIL, len };
        stored.cell = self.take(stored.cells());
        self.bytes_mut(stored.cell, text.len())
            .copy_from_slice(text.as_bytes());
        stored
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
        let (chunk, at, _) = locate(text.cell);
        let Chunk { bytes, skew } = &self.chunks[chunk];
        &bytes[skew + at * CELL..][..usize::from(text.len)]
    }

    /// The text.
    pub(crate) fn get(&self, text: Text) -> &str {
        str::from_utf8(self.bytes(text)).expect("it was stored as text")
    }

    fn bytes_mut(&mut self, cell: u32, len: usize) -> &mut [u8] {
        let (chunk, at, _) = locate(cell);
        let Chunk { bytes, skew } = &mut self.chunks[chunk];
        &mut bytes[*skew + at * CELL..][..len]
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
                self.give(self.next, rest);
                self.next += count(rest);
            }
            let (chunk, _, size) = locate(self.next);
            debug_assert_eq!(chunk, self.chunks.len(), "all of the others are used");
            self.chunks.push(Chunk::new(size));
        }
        let run = self.next;
        self.next += count(cells);
        run
    }

    /// Cells that were never used in the last chunk.
    fn room(&self) -> usize {
        let (chunk, at, size) = locate(self.next);
        if chunk < self.chunks.len() {
            size - at
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
