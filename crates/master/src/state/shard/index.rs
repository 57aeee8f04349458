//! Which slot a name stands for: pairs of a key's tag and a slot, in lines of the cache.
//!
//! A pair lies in the line that its tag names, or, where that and all after it were full, in the first one
//! that was not (the last line is followed by the first). So a look-up reads one line, nearly always, and
//! whoever knows the tag can fetch that line ahead of time. A line is filled from its front. There are
//! no marks where a pair was removed: a later pair that belongs there moves up.
//!
//! Tags need not be unique: the entries tell which slot is meant. They spread the lines' numbers by a
//! multiplication, so any number of lines will do, and the table grows by halves.

use super::slab::NIL;
use crate::state::memory::{TableMemory, TableVec};
use crate::state::prefetch::Span;

/// Pairs in a line.
const WAYS: usize = 8;

/// Lines of the first table that is not empty.
const FIRST_LINES: usize = 4;

/// No pair: slots are never [`NIL`].
const EMPTY: u64 = u64::MAX;

/// One line of the cache.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line([u64; WAYS]);

impl Line {
    fn is_full(&self) -> bool {
        self.0[WAYS - 1] != EMPTY
    }

    /// Adds a pair to a line that is not full.
    fn push(&mut self, pair: u64) {
        let place = self.0.iter_mut().find(|place| **place == EMPTY);
        *place.expect("the caller chose a line that is not full") = pair;
    }

    /// Takes a pair out.
    fn remove(&mut self, at: usize) -> u64 {
        let used = self.0.iter().position(|pair| *pair == EMPTY);
        let last = used.unwrap_or(WAYS) - 1;
        let pair = self.0[at];
        self.0[at] = self.0[last];
        self.0[last] = EMPTY;
        pair
    }

    /// Positions of the pairs with this tag.
    fn tagged(&self, tag: u32) -> impl Iterator<Item = usize> {
        // Without a branch for each pair: which one it is can't be foretold.
        let mut matches = 0_u32;
        for (at, pair) in self.0.iter().enumerate() {
            matches |= u32::from(tag_of(*pair) == tag && *pair != EMPTY) << at;
        }
        std::iter::from_fn(move || {
            let at = matches.trailing_zeros();
            matches &= matches.wrapping_sub(1);
            (at < 32).then_some(at as usize)
        })
    }
}

fn pair(tag: u32, slot: u32) -> u64 {
    u64::from(tag) << 32 | u64::from(slot)
}

fn tag_of(pair: u64) -> u32 {
    (pair >> 32) as u32
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the halves of a pair are 32 bits each"
)]
fn slot_of(pair: u64) -> u32 {
    pair as u32
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Index {
    lines: TableVec<Line>,
    len: usize,
}

impl Index {
    pub(crate) fn new(memory: TableMemory) -> Self {
        Self {
            lines: TableVec::new_in(memory),
            len: 0,
        }
    }

    /// Where a tag is looked for first.
    pub(crate) fn line(&self, tag: u32) -> Span {
        let line = self.lines.get(self.home(tag));
        line.map(Span::of).unwrap_or_default()
    }

    /// The slot with this tag that `is` accepts.
    pub(crate) fn find(&self, tag: u32, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let (line, at) = self.locate(tag, &mut is)?;
        Some(slot_of(self.lines[line].0[at]))
    }

    /// Adds a slot under a tag.
    pub(crate) fn insert(&mut self, tag: u32, slot: u32) {
        debug_assert_ne!(slot, NIL, "a slot of an entry");
        // Up to four fifths full, few lines spill over.
        if (self.len + 1) * 5 > self.lines.len() * WAYS * 4 {
            self.grow();
        }
        self.len += 1;
        self.add(pair(tag, slot));
    }

    /// Takes a slot out that is there under this tag.
    pub(crate) fn remove(&mut self, tag: u32, slot: u32) {
        let (mut hole, at) = self
            .locate(tag, &mut |other| other == slot)
            .expect("a slot that has a name is in the index");
        self.len -= 1;
        let mut was_full = self.lines[hole].is_full();
        self.lines[hole].remove(at);
        // Pairs that had to pass by the line that was full have their way to it cut off now.
        let mut line = hole;
        while was_full {
            line = self.after(line);
            was_full = self.lines[line].is_full();
            let moves = |pair: &u64| {
                *pair != EMPTY
                    && self.steps(self.home(tag_of(*pair)), line) >= self.steps(hole, line)
            };
            if let Some(at) = self.lines[line].0.iter().position(moves) {
                let pair = self.lines[line].remove(at);
                self.lines[hole].push(pair);
                hole = line;
            }
        }
    }

    /// Puts another slot in the place of one that is there under this tag.
    pub(crate) fn replace(&mut self, tag: u32, slot: u32, by: u32) {
        let (line, at) = self
            .locate(tag, &mut |other| other == slot)
            .expect("a slot that has a name is in the index");
        self.lines[line].0[at] = pair(tag, by);
    }

    fn locate(&self, tag: u32, is: &mut impl FnMut(u32) -> bool) -> Option<(usize, usize)> {
        let mut number = self.home(tag);
        loop {
            let line = self.lines.get(number)?;
            if let Some(at) = line.tagged(tag).find(|at| is(slot_of(line.0[*at]))) {
                return Some((number, at));
            }
            if !line.is_full() {
                return None;
            }
            number = self.after(number);
        }
    }

    /// Adds a pair where there is room in some line.
    fn add(&mut self, pair: u64) {
        let mut line = self.home(tag_of(pair));
        while self.lines[line].is_full() {
            line = self.after(line);
        }
        self.lines[line].push(pair);
    }

    fn grow(&mut self) {
        let lines = (self.lines.len() + self.lines.len() / 2).max(FIRST_LINES);
        let mut larger = TableVec::with_capacity_in(lines, self.lines.allocator().clone());
        larger.resize(lines, Line([EMPTY; WAYS]));
        let old = std::mem::replace(&mut self.lines, larger);
        let pairs = old.into_iter().flat_map(|line| line.0);
        pairs
            .filter(|pair| *pair != EMPTY)
            .for_each(|pair| self.add(pair));
    }

    /// The line that a tag names.
    fn home(&self, tag: u32) -> usize {
        let scaled = u64::from(tag) * self.lines.len() as u64;
        (scaled >> 32) as usize
    }

    fn after(&self, line: usize) -> usize {
        if line + 1 == self.lines.len() {
            0
        } else {
            line + 1
        }
    }

    /// Lines that are passed from one to another.
    fn steps(&self, from: usize, to: usize) -> usize {
        if from <= to {
            to - from
        } else {
            to + self.lines.len() - from
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_is_found_in_an_empty_index() {
        let index = Index::new(TableMemory::default());
        assert_eq!(index.find(0, |_| true), None);
        assert_eq!(index.find(u32::MAX, |_| true), None);
    }

    /// Some tags are alike, some lie where lines spill over from the last to the first.
    fn tag() -> impl Strategy<Value = u32> {
        prop_oneof![
            any::<u32>(),
            0_u32..4,
            (u32::MAX - 3)..=u32::MAX,
            (0_u32..6).prop_map(|step| step << 29),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn holds_what_a_map_from_slots_to_tags_holds(
            steps in prop::collection::vec((0_u8..8, tag(), any::<prop::sample::Index>()), 1..600),
        ) {
            let mut index = Index::new(TableMemory::default());
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            for (next, (kind, tag, chosen)) in (0_u32..).zip(steps) {
                let known = (!model.is_empty())
                    .then(|| model.iter().nth(chosen.index(model.len())).unwrap())
                    .map(|(slot, tag)| (*slot, *tag));
                match (kind, known) {
                    (0..3, Some((slot, tag))) => {
                        index.remove(tag, slot);
                        model.remove(&slot);
                    }
                    (3, Some((slot, tag))) => {
                        index.replace(tag, slot, next);
                        model.remove(&slot);
                        model.insert(next, tag);
                    }
                    _ => {
                        index.insert(tag, next);
                        model.insert(next, tag);
                    }
                }
                prop_assert_eq!(index.len, model.len());
                for (slot, tag) in &model {
                    prop_assert_eq!(index.find(*tag, |other| other == *slot), Some(*slot));
                }
                prop_assert_eq!(index.find(tag, |slot| !model.contains_key(&slot)), None);
                let alike = model.iter().filter(|(_, other)| **other == tag).count();
                let mut seen = 0;
                index.find(tag, |_| { seen += 1; false });
                prop_assert_eq!(seen, alike);
            }
            let pairs = index.lines.iter().flat_map(|line| line.0);
            prop_assert_eq!(pairs.filter(|pair| *pair != EMPTY).count(), model.len());
        }
    }
}
