//! A heap of slots, smallest key first, from which any slot can be taken.
//!
//! Each entry knows its position in the one heap it is in. Keys may be *behind* what an entry stands for
//! by now: recency and leases only grow, so the heap keeps the old key and the reader of the top corrects
//! it. A touched entry so costs nothing until it comes up for eviction, and the order is still exact: no
//! key is above its entry's, so a top whose key is up to date is the smallest of all.

use super::slab::Slab;
use crate::state::prefetch::Span;

/// Children of a node: four keep the heap flat and siblings in one cache line.
const ARITY: usize = 4;

/// Where a node stands: the order of eviction, or the end of a lease.
pub(crate) type Key = (u64, u32);

#[derive(Clone, Copy, Debug)]
struct Node {
    major: u64,
    minor: u32,
    slot: u32,
}

impl Node {
    fn key(self) -> Key {
        (self.major, self.minor)
    }
}

#[derive(Debug, Default)]
pub(crate) struct SlotHeap {
    nodes: Vec<Node>,
}

impl SlotHeap {
    /// The smallest key and its slot.
    pub(crate) fn first(&self) -> Option<(Key, u32)> {
        self.nodes.first().map(|node| (node.key(), node.slot))
    }

    /// Where the slot is put first that is pushed after `before` others.
    pub(crate) fn vacancy(&self, before: usize) -> Span {
        Span::behind(&self.nodes, before)
    }

    pub(crate) fn push(&mut self, key: Key, slot: u32, slab: &mut Slab) {
        let node = Node {
            major: key.0,
            minor: key.1,
            slot,
        };
        self.nodes.push(node);
        self.rise(self.nodes.len() - 1, node, slab);
    }

    /// Takes out the slot at this position.
    pub(crate) fn remove(&mut self, position: u32, slab: &mut Slab) {
        let at = position as usize;
        let Some(last) = self.nodes.pop() else {
            return;
        };
        if at < self.nodes.len() {
            if at > 0 && last.key() < self.nodes[(at - 1) / ARITY].key() {
                self.rise(at, last, slab);
            } else {
                self.sink(at, last, slab);
            }
        }
    }

    /// Raises the first slot's key.
    pub(crate) fn raise_first(&mut self, key: Key, slab: &mut Slab) {
        if let Some(first) = self.nodes.first().copied() {
            let node = Node {
                major: key.0,
                minor: key.1,
                ..first
            };
            self.sink(0, node, slab);
        }
    }

    /// Puts `node` at `at` or above.
    fn rise(&mut self, mut at: usize, node: Node, slab: &mut Slab) {
        while at > 0 {
            let parent = (at - 1) / ARITY;
            if self.nodes[parent].key() <= node.key() {
                break;
            }
            self.place(at, self.nodes[parent], slab);
            at = parent;
        }
        self.place(at, node, slab);
    }

    /// Puts `node` at `at` or below.
    fn sink(&mut self, mut at: usize, node: Node, slab: &mut Slab) {
        loop {
            let first = at * ARITY + 1;
            let children = first..(first + ARITY).min(self.nodes.len());
            let Some(least) = children.min_by_key(|child| self.nodes[*child].key()) else {
                break;
            };
            if node.key() <= self.nodes[least].key() {
                break;
            }
            self.place(at, self.nodes[least], slab);
            at = least;
        }
        self.place(at, node, slab);
    }

    fn place(&mut self, at: usize, node: Node, slab: &mut Slab) {
        self.nodes[at] = node;
        slab[node.slot].position =
            u32::try_from(at).expect("a heap has no more nodes than there are slots");
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::state::memory::TableMemory;
    use crate::state::shard::entry::Phase;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn comes_out_in_the_order_of_a_sorted_map(
            steps in prop::collection::vec((0_u8..4, 0_u64..30, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut slab = Slab::new(TableMemory::default());
            let mut heap = SlotHeap::default();
            let mut model: BTreeMap<u32, Key> = BTreeMap::new();
            for (kind, key, index) in steps {
                let chosen = (!model.is_empty())
                    .then(|| *model.keys().nth(index.index(model.len())).unwrap());
                match (kind, chosen) {
                    (2, Some(slot)) => {
                        heap.remove(slab[slot].position, &mut slab);
                        slab.release(slot);
                        model.remove(&slot);
                    }
                    (3, Some(_)) => {
                        let (old, slot) = heap.first().unwrap();
                        let new = (old.0 + key, old.1);
                        heap.raise_first(new, &mut slab);
                        model.insert(slot, new);
                    }
                    _ => {
                        let slot = slab.take();
                        slab[slot].phase = Phase::Complete;
                        heap.push((key, slot), slot, &mut slab);
                        model.insert(slot, (key, slot));
                    }
                }
                prop_assert_eq!(heap.nodes.len(), model.len());
                prop_assert_eq!(heap.first().map(|(key, _)| key), model.values().min().copied());
            }
            let mut expected: Vec<_> = model.into_values().collect();
            expected.sort_unstable();
            let mut found = Vec::new();
            while let Some((key, slot)) = heap.first() {
                heap.remove(slab[slot].position, &mut slab);
                found.push(key);
            }
            prop_assert_eq!(found, expected);
        }
    }
}
