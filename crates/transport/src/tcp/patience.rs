//! Whether to look for an answer again and again for a moment before sleeping.
//!
//! A processor that falls asleep takes longer to wake than a peer on the same host, or on a fast network,
//! takes to answer. Where answers come in that time, looking for them is cheaper than sleeping; where they
//! don't, for the peer is far away or the processors are busy, it is a waste. So each lane keeps count: an answer
//! that came while somebody looked earns another look, one that did not costs some, and without any left there is
//! a trial from time to time. Who looks yields the processor in between to whoever can use it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// How long to look.
pub(super) const LOOK_FOR: Duration = Duration::from_micros(50);

/// The most looks that can be saved up.
const MOST: u32 = 8;

/// What a look costs that was in vain.
const IN_VAIN: u32 = 2;

/// Without a look left, one in so many waits has one.
const TRIAL_EVERY: u32 = 32;

/// Counters only: nothing else is ordered by them, and a lost update costs a look.
#[derive(Debug)]
pub(super) struct Patience {
    looks: AtomicU32,
    waits: AtomicU32,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self {
            looks: AtomicU32::new(MOST),
            waits: AtomicU32::new(0),
        }
    }

    /// Whether who waits now is to look first.
    pub(super) fn is_there(&self) -> bool {
        let waits = self.waits.fetch_add(1, Ordering::Relaxed);
        self.looks.load(Ordering::Relaxed) > 0 || waits.is_multiple_of(TRIAL_EVERY)
    }

    /// Learns whether the answer came meanwhile.
    pub(super) fn learn(&self, came: bool) {
        let looks = self.looks.load(Ordering::Relaxed);
        let looks = if came {
            (looks + 1).min(MOST)
        } else {
            looks.saturating_sub(IN_VAIN)
        };
        self.looks.store(looks, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of so many waits look, if answers come in time or not.
    fn looks(patience: &Patience, waits: u32, in_time: bool) -> u32 {
        (0..waits)
            .map(|_| {
                let look = patience.is_there();
                if look {
                    patience.learn(in_time);
                }
                u32::from(look)
            })
            .sum()
    }

    #[test]
    fn waits_look_as_long_as_it_pays() {
        let patience = Patience::new();
        assert_eq!(looks(&patience, 100, true), 100);
        let in_vain = looks(&patience, 1000, false);
        assert!(
            in_vain <= MOST / IN_VAIN + 1000 / TRIAL_EVERY + 1,
            "{in_vain}"
        );
        let again = looks(&patience, 1000, true);
        assert!(again >= 1000 - TRIAL_EVERY, "{again}");
    }
}
