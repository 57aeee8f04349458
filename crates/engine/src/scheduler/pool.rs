//! Blocks of the paged cache: who uses them, and what they hold.
//!
//! A block that nobody uses keeps its content until it is needed for something else, the least recently
//! used first; of one request's blocks the last first, so that prefixes are shortened from their tail.
//! Pure.

use std::collections::{BTreeMap, HashMap};

use layercake_connector::contract::{BlockHash, BlockId};

#[derive(Clone, Debug, Default)]
struct Block {
    users: u32,
    /// What it is known to hold.
    hash: Option<BlockHash>,
    /// Its place among the unused.
    idle: u64,
}

/// All blocks.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    holding: HashMap<BlockHash, BlockId>,
    idle: BTreeMap<u64, BlockId>,
    clock: u64,
    sharing: bool,
}

impl BlockPool {
    /// `sharing`: whether blocks are found again by what they hold.
    pub(crate) fn new(blocks: u64, sharing: bool) -> Self {
        let mut pool = Self {
            blocks: vec![Block::default(); usize::try_from(blocks).unwrap_or(usize::MAX)],
            holding: HashMap::new(),
            idle: BTreeMap::new(),
            clock: 0,
            sharing,
        };
        for id in 0..blocks {
            pool.retire(id);
        }
        pool
    }

    /// Blocks that nobody uses.
    pub(crate) fn idle(&self) -> usize {
        self.idle.len()
    }

    /// The blocks that hold the longest prefix of these hashes.
    pub(crate) fn prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        let held = hashes.iter().map_while(|hash| self.holding.get(hash));
        held.copied().collect()
    }

    /// How many of these are idle: using them makes the idle ones fewer by so many.
    pub(crate) fn idle_among(&self, blocks: &[BlockId]) -> usize {
        let idle = blocks.iter().filter(|id| self.at(**id).users == 0);
        idle.count()
    }

    /// One more user for each of them.
    pub(crate) fn share(&mut self, blocks: &[BlockId]) {
        for &id in blocks {
            let block = self.at_mut(id);
            block.users += 1;
            let idle = block.idle;
            if block.users == 1 {
                self.idle.remove(&idle);
            }
        }
    }

    /// So many blocks for new content, or none at all.
    pub(crate) fn take(&mut self, count: usize) -> Option<Vec<BlockId>> {
        if count > self.idle.len() {
            return None;
        }
        let taken: Vec<BlockId> = std::iter::from_fn(|| self.idle.pop_first())
            .map(|(_, id)| id)
            .take(count)
            .collect();
        for &id in &taken {
            self.forget(id);
            self.at_mut(id).users = 1;
        }
        Some(taken)
    }

    /// One user fewer for each of a request's blocks, which come in the order of its tokens.
    pub(crate) fn release(&mut self, table: &[BlockId]) {
        for &id in table.iter().rev() {
            let block = self.at_mut(id);
            block.users -= 1;
            if block.users == 0 {
                self.retire(id);
            }
        }
    }

    /// The block holds this now.
    pub(crate) fn holds(&mut self, id: BlockId, hash: &BlockHash) {
        if self.sharing && !self.holding.contains_key(hash) {
            self.forget(id);
            self.holding.insert(hash.clone(), id);
            self.at_mut(id).hash = Some(hash.clone());
        }
    }

    /// What the block holds is not known any more.
    pub(crate) fn forget(&mut self, id: BlockId) {
        if let Some(hash) = self.at_mut(id).hash.take() {
            self.holding.remove(&hash);
        }
    }

    fn retire(&mut self, id: BlockId) {
        self.clock += 1;
        let clock = self.clock;
        self.at_mut(id).idle = clock;
        self.idle.insert(clock, id);
    }

    fn at(&self, id: BlockId) -> &Block {
        &self.blocks[usize::try_from(id).unwrap_or(usize::MAX)]
    }

    fn at_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[usize::try_from(id).unwrap_or(usize::MAX)]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash::new(&[n])
    }

    #[test]
    fn what_a_block_held_is_found_until_the_block_is_needed() {
        let mut pool = BlockPool::new(3, true);
        let table = pool.take(2).expect("three are idle");
        pool.holds(table[0], &hash(0));
        pool.holds(table[1], &hash(1));
        pool.release(&table);
        assert_eq!(pool.prefix(&[hash(0), hash(1), hash(2)]), table);
        assert_eq!(pool.idle_among(&table), 2);
        let other = pool.take(2).expect("three are idle");
        assert_eq!(
            pool.prefix(&[hash(0), hash(1)]),
            table[..1],
            "from the tail"
        );
        pool.share(&table[..1]);
        assert_eq!((pool.idle(), pool.take(1)), (0, None));
        pool.release(&table[..1]);
        pool.release(&other);
        assert_eq!(pool.idle(), 3);
        pool.forget(table[0]);
        assert!(pool.prefix(&[hash(0)]).is_empty());
    }

    #[test]
    fn without_sharing_nothing_is_found() {
        let mut pool = BlockPool::new(1, false);
        let table = pool.take(1).expect("idle");
        pool.holds(table[0], &hash(0));
        assert!(pool.prefix(&[hash(0)]).is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Users are counted right, whatever the order.
        #[test]
        fn no_block_is_lost_or_given_twice(steps in prop::collection::vec((0..4_u8, 0..6_usize), 1..80)) {
            let mut pool = BlockPool::new(8, true);
            let mut tables: Vec<Vec<BlockId>> = Vec::new();
            for (what, which) in steps {
                match what {
                    0 => {
                        let idle = pool.idle();
                        match pool.take(which) {
                            Some(table) => {
                                let used: Vec<_> = tables.concat();
                                prop_assert!(table.iter().all(|id| !used.contains(id)));
                                tables.push(table);
                            }
                            None => prop_assert!(idle < which),
                        }
                    }
                    1 if !tables.is_empty() => {
                        let table = tables.swap_remove(which % tables.len());
                        pool.release(&table);
                    }
                    2 => {
                        let prefix = pool.prefix(&[hash(0), hash(1), hash(2)]);
                        pool.share(&prefix);
                        tables.push(prefix);
                    }
                    _ => {
                        if let Some(table) = tables.first().cloned() {
                            for (id, n) in table.iter().zip(0..) {
                                pool.holds(*id, &hash(n));
                            }
                        }
                    }
                }
                let mut used: Vec<_> = tables.concat();
                used.sort_unstable();
                used.dedup();
                prop_assert_eq!(pool.idle() + used.len(), 8);
            }
        }
    }
}
