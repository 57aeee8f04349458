//! How much goes into one call of the store (W4, W10). Pure.
//!
//! Two limits hold at once: rows (one block's bytes of a layer each) and bytes. They begin at what the
//! options allow, as many rows as are set and the bytes of as many pieces of the greatest size, and follow what calls
//! come to, as additive increase and multiplicative decrease do: a call that fails as a whole, or whose latency goes up
//! without more bandwidth, halves the limit that it had; calls that fill it and go well raise it by a step. The limits
//! never leave 1 row and the options'; a row that is larger than the limit of bytes is a call of its own.

use std::num::{NonZeroU64, NonZeroUsize};
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
    most_bytes: u64,
    rows: usize,
    bytes: u64,
    /// Smoothed seconds per byte of calls that went well; 0: unknown.
    pace: f64,
}

/// A call this much slower per byte than usual is congestion.
const SLOW: f64 = 4.0;
const WEIGHT: f64 = 0.2;

impl Batcher {
    /// At most `rows` rows in a call, and the bytes of so many pieces of at most `piece` bytes.
    pub fn new(rows: NonZeroUsize, piece: NonZeroU64) -> Self {
        let most_bytes = piece.get().saturating_mul(rows.get() as u64);
        Self {
            most_rows: rows.get(),
            most_bytes,
            rows: rows.get(),
            bytes: most_bytes,
            pace: 0.0,
        }
    }

    /// Rows of so many bytes that the next call may have.
    pub fn limit(&self, row_bytes: u64) -> usize {
        let fit = usize::try_from(self.bytes / row_bytes.max(1)).unwrap_or(usize::MAX);
        self.rows.min(fit).max(1)
    }

    /// Cuts a list of rows, each of so many bytes, into calls. They follow on each other and cover all rows.
    pub fn calls(&self, rows: usize, row_bytes: u64) -> impl Iterator<Item = Range<usize>> + use<> {
        let limit = self.limit(row_bytes);
        (0..rows.div_ceil(limit)).map(move |call| call * limit..rows.min((call + 1) * limit))
    }

    /// Learns from a call.
    pub fn report(&mut self, call: CallReport) {
        if call.rows == 0 {
            return;
        }
        let seconds = call.took.as_secs_f64();
        let pace = seconds / call.bytes.max(1) as f64;
        let limit = self.limit(call.bytes / call.rows as u64);
        let congested = self.pace > 0.0 && pace > self.pace * SLOW && call.rows * 2 > limit;
        let by_bytes = limit < self.rows;
        if call.failed * 2 > call.rows || congested {
            if by_bytes {
                self.bytes = (self.bytes / 2).max(1);
            } else {
                self.rows = (self.rows / 2).max(1);
            }
        } else if call.failed == 0 && call.rows >= limit {
            if by_bytes {
                let step = (self.most_bytes / 16).max(1);
                self.bytes = self.bytes.saturating_add(step).min(self.most_bytes);
            } else {
                let step = (self.most_rows / 16).max(1);
                self.rows = (self.rows + step).min(self.most_rows);
            }
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

    fn batcher(rows: usize, piece: u64) -> Batcher {
        let rows = NonZeroUsize::new(rows).expect("above 0");
        Batcher::new(rows, NonZeroU64::new(piece).expect("above 0"))
    }

    #[test]
    fn failures_and_congestion_shrink_calls_and_good_ones_let_them_grow() {
        let mut batcher = batcher(64, 1000);
        let good = |batcher: &Batcher| CallReport {
            rows: batcher.limit(1000),
            bytes: batcher.limit(1000) as u64 * 1000,
            took: MS(batcher.limit(1000) as u64),
            failed: 0,
        };
        batcher.report(good(&batcher));
        assert_eq!(batcher.limit(1000), 64);
        let mut failed = good(&batcher);
        failed.failed = 64;
        batcher.report(failed);
        assert_eq!(batcher.limit(1000), 32);
        let mut slow = good(&batcher);
        slow.took *= 10;
        batcher.report(slow);
        assert_eq!(batcher.limit(1000), 16);
        // One row of many that fails is that row's matter.
        let mut one = good(&batcher);
        one.failed = 1;
        batcher.report(one);
        assert_eq!(batcher.limit(1000), 16);
        for _ in 0..40 {
            batcher.report(good(&batcher));
        }
        assert_eq!(batcher.limit(1000), 64);
    }

    /// Whole objects have rows of any size.
    #[test]
    fn rows_of_more_bytes_than_pieces_have_make_shorter_calls() {
        let mut batcher = batcher(64, 1000);
        let limits =
            |batcher: &Batcher| [500, 1_000, 4_000, 64_000, 100_000].map(|row| batcher.limit(row));
        assert_eq!(limits(&batcher), [64, 64, 16, 1, 1]);
        let report = |rows: usize, failed| CallReport {
            rows,
            bytes: rows as u64 * 4_000,
            took: MS(1),
            failed,
        };
        batcher.report(report(16, 16));
        assert_eq!(
            limits(&batcher),
            [64, 32, 8, 1, 1],
            "bytes were what held it"
        );
        batcher.report(report(3, 0));
        assert_eq!(batcher.limit(4_000), 8, "it did not fill the limit");
        for _ in 0..8 {
            batcher.report(report(batcher.limit(4_000), 0));
        }
        assert_eq!(limits(&batcher), [64, 64, 16, 1, 1]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        #[test]
        fn calls_cover_all_rows_once_within_the_limit(
            most in 1_usize..200,
            piece in 1_u64..10_000,
            row in 0_u64..40_000,
            rows in 0_usize..1000,
            reports in proptest::collection::vec((0_usize..200, 0_u64..1 << 40, 0_u64..10_000, 0_usize..200), 0..40),
        ) {
            let mut batcher = batcher(most, piece);
            for (rows, bytes, took, failed) in reports {
                batcher.report(CallReport { rows, bytes, took: MS(took), failed });
                prop_assert!((1..=most).contains(&batcher.limit(row)));
            }
            let mut next = 0;
            for call in batcher.calls(rows, row) {
                prop_assert_eq!(call.start, next);
                prop_assert!(!call.is_empty() && call.len() <= batcher.limit(row));
                let bytes = row * call.len() as u64;
                prop_assert!(call.len() == 1 || bytes <= piece * most as u64, "{bytes}");
                next = call.end;
            }
            prop_assert_eq!(next, rows);
        }
    }
}
