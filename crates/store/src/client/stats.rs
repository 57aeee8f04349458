//! What a client counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters since the client was made, and a few numbers of now.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct ClientStats {
            $($(#[$doc])* pub $name: u64,)*
            /// Get sessions that are open.
            pub open_gets: u64,
            /// Put sessions that are open.
            pub open_puts: u64,
            /// Segments that can't be reached at the moment.
            pub suspect_segments: u64,
        }

        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: Counter,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> ClientStats {
                ClientStats {
                    $($name: self.$name.get(),)*
                    ..ClientStats::default()
                }
            }
        }
    };
}

counters! {
    /// Keys that a lookup or a start found.
    hits,
    /// Keys that it did not find.
    misses,
    /// Put sessions started.
    puts_started,
    /// Objects committed.
    puts_committed,
    /// Reservations given back.
    puts_revoked,
    /// Put sessions that the master took away.
    puts_superseded,
    /// Get sessions started.
    gets_started,
    /// Leases given back to the master.
    leases_returned,
    /// Leases renewed.
    leases_renewed,
    /// Leases that ended under a session.
    leases_lost,
    /// Bytes written for range calls, each replica counted once.
    bytes_written,
    /// Ranges handed out to be published to early readers.
    ranges_published,
    /// Bytes read for range calls.
    bytes_read,
    /// Bytes read whose checksum was compared and fits.
    bytes_verified,
    /// Bytes read that could not be verified.
    bytes_unverified,
    /// Bytes read of objects that were not complete.
    bytes_early,
    /// Reads that were turned away because bytes did not fit their checksum or header.
    mismatches,
    /// Reads that went on with another replica.
    failovers,
    /// Objects that were read while the master was asked for them, and lay where they were read.
    guesses_right,
    /// Objects that were so read in vain: they were elsewhere, or gone, or did not come well.
    guesses_wrong,
}

#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub(crate) fn one(&self) {
        self.add(1);
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
