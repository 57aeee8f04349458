//! Upserts of one key take turns within a client.
//!
//! An upsert takes a key from whoever is writing it, another upsert included, which is then refused. Threads that
//! replace one key at the same time would do so to each other; so each waits for those before it.
//!
//! A call takes the turns of all its keys at once or none, so that no two calls wait for each other, on the calling
//! thread and not in a task. Whoever waits too long goes ahead: what happens then is as between two clients.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use layercake_protocol::key::ObjectKey;
use parking_lot::{Condvar, Mutex};

/// How long a call waits for others. A transfer has 30 s.
const PATIENCE: Duration = Duration::from_secs(30);

/// The turns of a client.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Keys that are being replaced.
    taken: Mutex<HashSet<ObjectKey>>,
    given: Condvar,
}

impl Turns {
    /// Waits until nobody else replaces these keys. Others wait as long as the answer lives.
    pub(crate) fn take<'a>(&self, keys: impl Iterator<Item = &'a ObjectKey>) -> Turn<'_> {
        let until = Instant::now() + PATIENCE;
        let mut keys: HashSet<ObjectKey> = keys.cloned().collect();
        let mut taken = self.taken.lock();
        while !taken.is_disjoint(&keys) {
            if self.given.wait_until(&mut taken, until).timed_out() {
                keys.clear();
            }
        }
        taken.extend(keys.iter().cloned());
        Turn { turns: self, keys }
    }
}

/// The turn of a call.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    keys: HashSet<ObjectKey>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if self.keys.is_empty() {
            return;
        }
        self.turns
            .taken
            .lock()
            .retain(|key| !self.keys.contains(key));
        self.turns.given.notify_all();
    }
}
