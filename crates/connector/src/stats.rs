//! What a connector counts (O3): hits, misses and why, and what went wrong without stopping anybody.
//!
//! Counting never fails and never waits: relaxed atomics, read as one snapshot.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why blocks that a request could have used are not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MissReason {
    /// No object, and this scheduler has not seen one.
    NeverStored,
    /// No object any more: this scheduler has seen one.
    Evicted,
    /// A writer has reserved it and not finished.
    InProgress,
    /// The object belongs to another deployment.
    OtherFingerprint,
    /// The lease ended before the bytes had arrived.
    Lease,
    /// The node that holds it could not be reached.
    Peer,
    /// The bytes did not fit their checksum.
    Damaged,
    /// The master could not be asked.
    Master,
    /// No answer, or not arrived, in time.
    TimeOut,
    /// The step was left, or the tasks ended, before the bytes had arrived.
    Aborted,
    /// The load would have taken longer than computing.
    DoesNotPay,
    /// An earlier load of this request failed: it computes.
    AfterFailure,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since the start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct ConnectorStats {
            $($(#[$doc])* pub $name: u64,)*
            misses: [u64; MissReason::ALL.len()],
        }

        /// The counters that are still counting.
        #[derive(Debug, Default)]
        pub struct Counters {
            $($(#[$doc])* pub $name: Counter,)*
            misses: [Counter; MissReason::ALL.len()],
        }

        impl Counters {
            /// All of them now.
            pub fn snapshot(&self) -> ConnectorStats {
                ConnectorStats {
                    $($name: self.$name.get(),)*
                    misses: std::array::from_fn(|at| self.misses[at].get()),
                }
            }
        }
    };
}

counters! {
    /// Look-ups asked.
    lookups,
    /// Keys that the master was asked for: no more than those of the hits and one window for each look-up, or with early
    /// reads three times as many.
    keys_queried,
    /// Blocks that look-ups found readable on every storing rank.
    hit_blocks,
    /// Answers that came to a question nobody asks any more.
    late_answers,
    /// Blocks loaded. On the worker side every block that a step is to load is counted once here or in `failed_loads`.
    loaded_blocks,
    /// Blocks whose load failed; each has a reason among the misses of its worker.
    failed_loads,
    /// Objects that were damaged and are removed.
    removed_damaged,
    /// Microseconds for which calls that load moved nothing, since writers had not got so far: only with early reads,
    /// and no part of the time that loads are said to take.
    early_wait_micros,
    /// Blocks that were read once and copied to further places.
    fanned_out_blocks,
    /// Blocks of which several requests needed one object, read once each.
    repeated_reads,
    /// Objects committed.
    saved_blocks,
    /// Blocks that another writer had saved, or was saving.
    saved_elsewhere,
    /// Objects whose save failed.
    failed_saves,
    /// Objects whose save was given up: preemption, a load that failed, shutdown.
    dropped_saves,
    /// Calls that saved and had waited for loads.
    yielded_saves,
    /// Microseconds for which the computation waited until layers to be saved were taken.
    save_stall_micros,
    /// Requests that were cut back after a failed load.
    recomputed_requests,
    /// Requests that failed by policy.
    failed_requests,
    /// Requests whose workers did not report their end in time.
    overdue_requests,
}

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts `count` more.
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl MissReason {
    /// All reasons.
    pub const ALL: [Self; 12] = [
        Self::NeverStored,
        Self::Evicted,
        Self::InProgress,
        Self::OtherFingerprint,
        Self::Lease,
        Self::Peer,
        Self::Damaged,
        Self::Master,
        Self::TimeOut,
        Self::Aborted,
        Self::DoesNotPay,
        Self::AfterFailure,
    ];

    /// As a label.
    pub fn name(self) -> &'static str {
        match self {
            Self::NeverStored => "never_stored",
            Self::Evicted => "evicted",
            Self::InProgress => "in_progress",
            Self::OtherFingerprint => "other_fingerprint",
            Self::Lease => "lease",
            Self::Peer => "peer",
            Self::Damaged => "damaged",
            Self::Master => "master",
            Self::TimeOut => "time_out",
            Self::Aborted => "aborted",
            Self::DoesNotPay => "does_not_pay",
            Self::AfterFailure => "after_failure",
        }
    }
}

impl Counters {
    /// Counts blocks that are not loaded.
    pub fn miss(&self, reason: MissReason, blocks: u64) {
        self.misses[reason as usize].add(blocks);
    }
}

impl ConnectorStats {
    /// Blocks that were not loaded for this reason.
    pub fn missed(&self, reason: MissReason) -> u64 {
        self.misses[reason as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_counted_apart() {
        let counters = Counters::default();
        for (count, reason) in (1..).zip(MissReason::ALL) {
            counters.miss(reason, count);
            counters.lookups.add(1);
        }
        let stats = counters.snapshot();
        for (count, reason) in (1..).zip(MissReason::ALL) {
            assert_eq!(stats.missed(reason), count, "{}", reason.name());
        }
        assert_eq!(stats.lookups, 12);
    }
}
