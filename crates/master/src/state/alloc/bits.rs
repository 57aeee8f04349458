//! A set of small numbers with fast neighbour search.
//!
//! One bit per possible member, and above each 64 bits a bit that tells whether any of them is set, up to
//! a single word. With four levels (16 million members) every search looks at no more than eight words.

const WORD: usize = 64;

/// A set of numbers below a fixed bound.
#[derive(Clone, Debug)]
pub(crate) struct BitTree {
    /// The members first, then summaries of summaries, up to one word.
    levels: Vec<Box<[u64]>>,
}

impl BitTree {
    /// An empty set for numbers below `bound`.
    pub(crate) fn new(bound: usize) -> Self {
        let mut levels = Vec::new();
        let mut words = bound.div_ceil(WORD).max(1);
        loop {
            levels.push(vec![0; words].into_boxed_slice());
            if words == 1 {
                break;
            }
            words = words.div_ceil(WORD);
        }
        Self { levels }
    }

    pub(crate) fn insert(&mut self, mut index: usize) {
        for level in &mut self.levels {
            let word = &mut level[index / WORD];
            let was_empty = *word == 0;
            *word |= 1 << (index % WORD);
            if !was_empty {
                break;
            }
            index /= WORD;
        }
    }

    pub(crate) fn remove(&mut self, mut index: usize) {
        for level in &mut self.levels {
            let word = &mut level[index / WORD];
            *word &= !(1 << (index % WORD));
            if *word != 0 {
                break;
            }
            index /= WORD;
        }
    }

    /// The smallest member that is at least `from`.
    pub(crate) fn at_or_after(&self, from: usize) -> Option<usize> {
        let mut index = from;
        for (height, level) in self.levels.iter().enumerate() {
            let rest = level.get(index / WORD)? & (u64::MAX << (index % WORD));
            if rest != 0 {
                let found = index / WORD * WORD + rest.trailing_zeros() as usize;
                return Some(self.descend(height, found, u64::trailing_zeros));
            }
            index = index / WORD + 1;
        }
        None
    }

    /// The greatest member that is below `bound`.
    pub(crate) fn before(&self, bound: usize) -> Option<usize> {
        let mut index = bound.min(self.levels[0].len() * WORD);
        for (height, level) in self.levels.iter().enumerate() {
            if index == 0 {
                return None;
            }
            let last = index - 1;
            let rest = level[last / WORD] & (u64::MAX >> (WORD - 1 - last % WORD));
            if rest != 0 {
                let found = last / WORD * WORD + WORD - 1 - rest.leading_zeros() as usize;
                return Some(self.descend(height, found, u64::ilog2));
            }
            index = last / WORD;
        }
        None
    }

    /// From a set bit of a summary down to a member, choosing in each word by `pick`.
    fn descend(&self, height: usize, mut index: usize, pick: fn(u64) -> u32) -> usize {
        for level in self.levels[..height].iter().rev() {
            index = index * WORD + pick(level[index]) as usize;
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn neighbours_are_those_of_a_sorted_set(
            bound in 1_usize..300_000,
            steps in prop::collection::vec((any::<bool>(), any::<prop::sample::Index>()), 1..200),
        ) {
            let mut tree = BitTree::new(bound);
            let mut model = BTreeSet::new();
            for (insert, index) in steps {
                let at = index.index(bound);
                if insert {
                    tree.insert(at);
                    model.insert(at);
                } else {
                    let member = model.range(at..).next().copied().unwrap_or(at);
                    tree.remove(member);
                    model.remove(&member);
                }
                for probe in [0, at, at + 1, bound - 1, bound, bound + 70] {
                    prop_assert_eq!(tree.at_or_after(probe), model.range(probe..).next().copied());
                    prop_assert_eq!(tree.before(probe), model.range(..probe).next_back().copied());
                }
            }
        }
    }
}
