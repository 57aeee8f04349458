//! How much goes into one call of the store (W4, W10). Pure.
//!
//! Two limits hold at once: rows (one block's bytes of a layer each) and bytes. They begin at what the
//! options allow and follow what calls come to, as additive increase and multiplicative decrease do: a
//! call that fails as a whole, or whose latency goes up without more bandwidth, halves the limit; calls
//! that fill the limit and go well raise it by a step. They never leave 1 row and the options' limit.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::Duration;

/// What a call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallReport {
    /// Rows of the call.
    pub rows: usize,
    /// Its bytes.
    pub bytes: u64,
    /// How long it took.
    pub took: Duration,
    /// Rows that failed for a passing reason.
    pub failed: usize,
}

/// Limits of the next call.
#[derive(Clone, Debug)]
pub struct Batcher {
    most_rows: usize,
    rows: usize,
    /// Smoothed seconds per byte of calls that went well; 0: unknown.
    pace: f64,
}

/// A call this much slower per byte than usual is congestion.
const SLOW: f64 = 4.0;
const WEIGHT: f64 = 0.2;

impl Batcher {
    /// At most `rows` rows in a call.
    pub fn new(rows: NonZeroUsize) -> Self {
        Self {
            most_rows: rows.get(),
            rows: rows.get(),
            pace: 0.0,
        }
    }

    /// Rows that the next call may have.
    pub fn limit(&self) -> usize {
        self.rows
    }

    /// Cuts a list of rows into calls. They follow on each other and cover all rows.
    pub fn calls(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let limit = self.rows;
        (0..rows.div_ceil(limit)).map(move |call| call * limit..rows.min((call + 1) * limit))
    }

    /// Learns from a call.
    pub fn report(&mut self, call: CallReport) {
        if call.rows == 0 {
            return;
        }
        let seconds = call.took.as_secs_f64();
        let pace = seconds / call.bytes.max(1) as f64;
        let congested = self.pace > 0.0 && pace > self.pace * SLOW && call.rows * 2 > self.rows;
        if call.failed * 2 > call.rows || congested {
            self.rows = (self.rows / 2).max(1);
        } else if call.failed == 0 && call.rows >= self.rows {
            let step = (self.most_rows / 16).max(1);
            self.rows = (self.rows + step).min(self.most_rows);
        }
        if call.failed == 0 {
            self.pace = if self.pace == 0.0 {
                pace
            } else {
                self.pace + WEIGHT * (pace - self.pace)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn batcher(rows: usize) -> Batcher {
        Batcher::new(NonZeroUsize::new(rows).expect("above 0"))
    }

    #[test]
    fn failures_and_congestion_shrink_calls_and_good_ones_let_them_grow() {
        let mut batcher = batcher(64);
        let good = |batcher: &Batcher| CallReport {
            rows: batcher.limit(),
            bytes: batcher.limit() as u64 * 1000,
            took: MS(batcher.limit() as u64),
            failed: 0,
        };
        batcher.report(good(&batcher));
        assert_eq!(batcher.limit(), 64);
        let mut failed = good(&batcher);
        failed.failed = 64;
        batcher.report(failed);
        assert_eq!(batcher.limit(), 32);
        let mut slow = good(&batcher);
        slow.took *= 10;
        batcher.report(slow);
        assert_eq!(batcher.limit(), 16);
        // One row of many that fails is that row's matter.
        let mut one = good(&batcher);
        one.failed = 1;
        batcher.report(one);
        assert_eq!(batcher.limit(), 16);
        for _ in 0..40 {
            batcher.report(good(&batcher));
        }
        assert_eq!(batcher.limit(), 64);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        #[test]
        fn calls_cover_all_rows_once_within_the_limit(
            most in 1_usize..200,
            rows in 0_usize..1000,
            reports in proptest::collection::vec((0_usize..200, 0_u64..1 << 40, 0_u64..10_000, 0_usize..200), 0..40),
        ) {
            let mut batcher = batcher(most);
            for (rows, bytes, took, failed) in reports {
                batcher.report(CallReport { rows, bytes, took: MS(took), failed });
                prop_assert!((1..=most).contains(&batcher.limit()));
            }
            let mut next = 0;
            for call in batcher.calls(rows) {
                prop_assert_eq!(call.start, next);
                prop_assert!(!call.is_empty() && call.len() <= batcher.limit());
                next = call.end;
            }
            prop_assert_eq!(next, rows);
        }
    }
}
