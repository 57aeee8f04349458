//! The store as a map, and the source of chance.

use std::collections::BTreeMap;

use layercake_connector::contract::BlockHash;

/// Deterministic chance.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end.max(1)
    }

    pub(crate) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(crate) fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("small")
    }
}

/// What a block or an object holds: the bytes of this hash, or anything.
pub(crate) type Content = Option<BlockHash>;

/// An object's name.
pub(crate) type Key = (usize, BlockHash);

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Object {
    Reserved,
    Complete(Content),
}

/// What happened, to see that a run is about something.
#[derive(Default, Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) hits: u64,
    pub(crate) failed_loads: u64,
    pub(crate) cut_back: u64,
    /// Requests that were computed to their end.
    pub(crate) completed: u64,
    /// Cut back while later steps were under way.
    pub(crate) cut_ahead: u64,
    /// Steps that a rank left in their middle.
    pub(crate) left: u64,
    pub(crate) published: u64,
    pub(crate) late_answers: u64,
    pub(crate) commits: u64,
    pub(crate) lost_answers: u64,
    pub(crate) cancelled: u64,
    pub(crate) elsewhere: u64,
    pub(crate) delayed: u64,
    pub(crate) waited: u64,
    pub(crate) restored: u64,
    pub(crate) overdue: u64,
}

#[derive(Default)]
pub(crate) struct World {
    pub(crate) objects: BTreeMap<Key, Object>,
    pub(crate) seen: Seen,
}

impl World {
    pub(crate) fn readable(&self, key: &Key) -> bool {
        matches!(self.objects.get(key), Some(Object::Complete(_)))
    }

    /// An object vanishes, readers or not.
    pub(crate) fn evict(&mut self, draw: &mut Draw) {
        let complete: Vec<Key> = self
            .objects
            .iter()
            .filter(|(_, object)| **object != Object::Reserved)
            .map(|(key, _)| key.clone())
            .collect();
        if !complete.is_empty() {
            self.objects.remove(&complete[draw.index(complete.len())]);
        }
    }

    /// Whatever is readable has the bytes of its key.
    pub(crate) fn check(&self) {
        for ((rank, hash), object) in &self.objects {
            if let Object::Complete(content) = object {
                assert_eq!(
                    content.as_ref(),
                    Some(hash),
                    "rank {rank} serves other bytes"
                );
            }
        }
    }
}
