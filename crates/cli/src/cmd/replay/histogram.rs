//! A histogram of durations with buckets of constant relative width.
//!
//! Each power of two of nanoseconds has [`STEPS`] buckets, so a quantile is at most 1/32 too large,
//! from nanoseconds to centuries, in a fixed 15 KiB. Histograms of several processes add up.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets for each power of two.
const STEPS: usize = 32;
const STEP_BITS: u32 = STEPS.ilog2();
const BUCKETS: usize = (64 - STEP_BITS as usize + 1) * STEPS;

/// How often which durations came up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Sparse", into = "Sparse")]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max_nanos: u64,
}

/// What travels between processes: only the buckets that are not empty.
#[derive(Serialize, Deserialize)]
struct Sparse {
    counts: Vec<(u32, u64)>,
    max_nanos: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: vec![0; BUCKETS],
            total: 0,
            max_nanos: 0,
        }
    }
}

impl From<Sparse> for Histogram {
    fn from(sparse: Sparse) -> Self {
        let mut histogram = Self {
            max_nanos: sparse.max_nanos,
            ..Self::default()
        };
        for (bucket, count) in sparse.counts {
            if let Some(place) = histogram.counts.get_mut(bucket as usize) {
                *place += count;
                histogram.total += count;
            }
        }
        histogram
    }
}

impl From<Histogram> for Sparse {
    fn from(histogram: Histogram) -> Self {
        let counts = (0..).zip(histogram.counts).filter(|(_, count)| *count > 0);
        Self {
            counts: counts.collect(),
            max_nanos: histogram.max_nanos,
        }
    }
}

/// The bucket of a duration: below `2 × STEPS` nanoseconds each has its own.
fn bucket(nanos: u64) -> usize {
    let shift = nanos.max(1).ilog2().saturating_sub(STEP_BITS);
    // The top STEP_BITS + 1 bits, of which the first is set for all but the smallest.
    let top = usize::try_from(nanos >> shift).expect("less than 2 × STEPS");
    shift as usize * STEPS + top
}

/// The largest duration of a bucket, in nanoseconds.
fn upper(bucket: usize) -> u64 {
    let shift = (bucket / STEPS).saturating_sub(1);
    let step = (bucket - shift * STEPS) as u64;
    // The last bucket ends where 64 bits do.
    (u128::from(step + 1) << shift)
        .saturating_sub(1)
        .try_into()
        .unwrap_or(u64::MAX)
}

impl Histogram {
    pub(crate) fn record(&mut self, duration: Duration) {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += 1;
        self.total += 1;
        self.max_nanos = self.max_nanos.max(nanos);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine += theirs;
        }
        self.total += other.total;
        self.max_nanos = self.max_nanos.max(other.max_nanos);
    }

    pub(crate) fn count(&self) -> u64 {
        self.total
    }

    /// The smallest bucket's end that this share of the durations does not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a count, at least 0 and at most the count"
        )]
        let rank = ((share * self.total as f64).ceil() as u64).clamp(1, self.total.max(1));
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_nanos(upper(bucket).min(self.max_nanos));
            }
        }
        Duration::ZERO
    }

    pub(crate) fn max(&self) -> Duration {
        Duration::from_nanos(self.max_nanos)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_follow_on_each_other_and_the_last_holds_the_largest() {
        for bucket_index in 0..BUCKETS - 1 {
            let end = upper(bucket_index);
            assert_eq!(bucket(end), bucket_index, "the end lies in its bucket");
            assert_eq!(
                bucket(end + 1),
                bucket_index + 1,
                "the next one begins behind it"
            );
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(upper(BUCKETS - 1), u64::MAX);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn quantiles_are_close_to_those_of_the_sorted_list(
            mut nanos in prop::collection::vec(prop_oneof![0u64..100, 0u64..10_000_000, any::<u64>()], 1..200),
            share in 0.0f64..=1.0,
        ) {
            let mut histogram = Histogram::default();
            for &value in &nanos {
                histogram.record(Duration::from_nanos(value));
            }
            nanos.sort_unstable();
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small and positive")]
            let rank = ((share * nanos.len() as f64).ceil() as usize).clamp(1, nanos.len());
            let exact = nanos[rank - 1];
            let found = u64::try_from(histogram.quantile(share).as_nanos()).unwrap();
            prop_assert!(found >= exact && found <= exact.saturating_add(exact / 32 + 1), "{found} for {exact}");
            prop_assert_eq!(histogram.max().as_nanos(), u128::from(nanos[nanos.len() - 1]));
        }

        #[test]
        fn parts_add_up_across_processes(
            a in prop::collection::vec(any::<u64>(), 0..50),
            b in prop::collection::vec(any::<u64>(), 0..50),
        ) {
            let of = |values: &[u64]| {
                let mut histogram = Histogram::default();
                for &value in values {
                    histogram.record(Duration::from_nanos(value));
                }
                histogram
            };
            let text = serde_json::to_string(&of(&b)).unwrap();
            let mut sum = of(&a);
            sum.merge(&serde_json::from_str(&text).unwrap());
            prop_assert_eq!(sum, of(&[a, b].concat()));
        }
    }
}
