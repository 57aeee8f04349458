//! Which blocks were seen readable lately, to tell "evicted" from "never stored". Pure and bounded:
//! two halves; when the younger is full it becomes the older one, whose content is forgotten.

use std::collections::HashSet;
use std::mem;

use crate::contract::BlockHash;

/// Hashes in one half.
const HALF: usize = 1 << 16;

#[derive(Debug, Default)]
pub(crate) struct Seen {
    young: HashSet<BlockHash>,
    old: HashSet<BlockHash>,
}

impl Seen {
    pub(crate) fn note<'a>(&mut self, hashes: impl IntoIterator<Item = &'a BlockHash>) {
        for hash in hashes {
            if self.young.len() >= HALF && !self.young.contains(hash) {
                self.old = mem::take(&mut self.young);
            }
            self.young.insert(hash.clone());
        }
    }

    pub(crate) fn contains(&self, hash: &BlockHash) -> bool {
        self.young.contains(hash) || self.old.contains(hash)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_lately_is_known_and_memory_is_bounded() {
        let mut seen = Seen::default();
        let hash = |n: usize| BlockHash::new(&n.to_be_bytes());
        let hashes: Vec<_> = (0..3 * HALF).map(hash).collect();
        seen.note(&hashes);
        assert!(seen.contains(&hash(3 * HALF - 1)) && seen.contains(&hash(2 * HALF)));
        assert!(!seen.contains(&hash(0)));
        assert!(seen.young.len() + seen.old.len() <= 2 * HALF);
    }
}
