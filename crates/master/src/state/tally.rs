//! Counters that any thread raises without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use super::api::{Amount, Counters};
use super::effects::Reason;

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self, n: u64) {
        if n > 0 {
            self.0.fetch_add(n, Ordering::Relaxed);
        }
    }

    pub(crate) fn add_len(&self, n: usize) {
        self.add(n as u64);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What [`Counters`] is a snapshot of.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    gone: [(Count, Count); Reason::COUNT],
    pub(crate) evictions_tried: Count,
    pub(crate) evictions_in_vain: Count,
    pub(crate) puts_started: Count,
    pub(crate) short_puts: Count,
    pub(crate) puts_committed: Count,
    pub(crate) puts_revoked: Count,
    pub(crate) discarded_puts: Count,
    pub(crate) refused_puts: Count,
    pub(crate) reads_started: Count,
    pub(crate) read_misses: Count,
    pub(crate) leases_lost: Count,
    pub(crate) lost_nodes: Count,
    pub(crate) fenced_places: Count,
}

impl Tally {
    pub(crate) fn count_gone(&self, gone: &[Amount; Reason::COUNT]) {
        for ((objects, bytes), amount) in self.gone.iter().zip(gone) {
            objects.add(amount.objects);
            bytes.add(amount.bytes);
        }
    }

    /// A search for something to evict that gave so many objects.
    pub(crate) fn count_eviction(&self, objects: u64) {
        self.evictions_tried.add(1);
        self.evictions_in_vain.add(u64::from(objects == 0));
    }

    pub(crate) fn snapshot(&self) -> Counters {
        let gone = |reason: Reason| {
            let (objects, bytes) = &self.gone[reason as usize];
            Amount {
                objects: objects.get(),
                bytes: bytes.get(),
            }
        };
        Counters {
            evicted_watermark: gone(Reason::Watermark),
            evicted_allocation: gone(Reason::Allocation),
            removed: gone(Reason::Removed),
            replaced: gone(Reason::Replaced),
            lost: gone(Reason::Lost),
            unmounted: gone(Reason::Unmounted),
            evicted_quota: gone(Reason::Quota),
            evictions_tried: self.evictions_tried.get(),
            evictions_in_vain: self.evictions_in_vain.get(),
            puts_started: self.puts_started.get(),
            short_puts: self.short_puts.get(),
            puts_committed: self.puts_committed.get(),
            puts_revoked: self.puts_revoked.get(),
            discarded_puts: self.discarded_puts.get(),
            refused_puts: self.refused_puts.get(),
            reads_started: self.reads_started.get(),
            read_misses: self.read_misses.get(),
            leases_lost: self.leases_lost.get(),
            lost_nodes: self.lost_nodes.get(),
            fenced_places: self.fenced_places.get(),
        }
    }
}
