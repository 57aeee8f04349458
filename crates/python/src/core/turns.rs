//! Upserts of one key take turns within a client.
//!
//! An upsert takes a key from whoever is writing it, another upsert included, which is then refused. Threads that
//! replace one key at the same time would do so to each other; so each waits for those before it.
//!
//! Keys share a few locks. A call takes those of all its keys in ascending order, on the calling thread and not in
//! a task. Whoever waits too long goes ahead: what happens then is as between two clients.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use layercake_protocol::key::ObjectKey;
use parking_lot::{Mutex, MutexGuard};

/// Locks that keys share.
const LOCKS: usize = 64;

/// How long a call waits for others in all. A transfer has 30 s.
const PATIENCE: Duration = Duration::from_secs(30);

/// The turns of a client.
#[derive(Debug)]
pub(super) struct Turns {
    locks: [Mutex<()>; LOCKS],
    hasher: RandomState,
}

impl Default for Turns {
    fn default() -> Self {
        Self {
            locks: [const { Mutex::new(()) }; LOCKS],
            hasher: RandomState::new(),
        }
    }
}

impl Turns {
    /// Waits until nobody else replaces these keys. Others wait as long as the answer lives.
    pub(super) fn take<'a>(
        &self,
        keys: impl Iterator<Item = &'a ObjectKey>,
    ) -> Vec<MutexGuard<'_, ()>> {
        let until = Instant::now() + PATIENCE;
        let hash = |key: &ObjectKey| self.hasher.hash_one(key.as_str());
        let numbers = keys.filter_map(|key| usize::try_from(hash(key) % LOCKS as u64).ok());
        let ascending: BTreeSet<usize> = numbers.collect();
        let locks = ascending.into_iter().map(|number| &self.locks[number]);
        locks
            .filter_map(|lock| lock.try_lock_until(until))
            .collect()
    }
}
