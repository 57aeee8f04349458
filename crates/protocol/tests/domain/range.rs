use std::num::NonZeroU64;

use layercake_protocol::range::{ByteRange, RangeError, RangeSet};
use proptest::prelude::*;

const BITS: u64 = 64;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::from_bounds(start, end).expect("ordered")
}

/// Any range within the bitmap, empty ones included.
fn ranges() -> impl Strategy<Value = ByteRange> {
    (0..=BITS, 0..=BITS).prop_map(|(a, b)| range(a.min(b), a.max(b)))
}

/// The maximal runs of bits that are `value`, within a range.
fn runs(bits: &[bool], within: ByteRange, value: bool) -> Vec<ByteRange> {
    let mut found: Vec<ByteRange> = Vec::new();
    for at in within.start()..within.end() {
        if bits[usize::try_from(at).expect("small")] != value {
            continue;
        }
        match found.last_mut() {
            Some(last) if last.end() == at => *last = range(last.start(), at + 1),
            _ => found.push(range(at, at + 1)),
        }
    }
    found
}

#[test]
fn a_range_that_would_wrap_is_refused() {
    assert_eq!(
        ByteRange::new(u64::MAX, 1),
        Err(RangeError::Overflow {
            offset: u64::MAX,
            len: 1
        })
    );
    assert_eq!(
        ByteRange::from_bounds(2, 1),
        Err(RangeError::Reversed { start: 2, end: 1 })
    );
    let last = ByteRange::new(u64::MAX, 0).expect("empty at the very end");
    assert!(last.is_empty());
    assert!(last.shifted(1).is_err());
    assert_eq!(
        ByteRange::new(u64::MAX - 1, 1).map(ByteRange::end),
        Ok(u64::MAX)
    );
}

#[test]
fn an_empty_range_overlaps_nothing() {
    let (empty, around) = (range(5, 5), range(0, 10));
    assert!(around.contains(empty) && !around.overlaps(empty) && !empty.overlaps(around));
    assert_eq!(around.intersection(empty), None);
    assert_eq!(around.split_at(0), None);
    assert_eq!(around.split_at(10), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn a_set_of_ranges_acts_like_a_bitmap(
        steps in prop::collection::vec((ranges(), prop::bool::weighted(0.7)), 0..40),
        probe in ranges(),
    ) {
        let mut set = RangeSet::new();
        let mut bits = vec![false; 64];
        let whole = ByteRange::to(BITS);
        for (range, insert) in steps {
            if insert {
                set.insert(range);
            } else {
                set.remove(range);
            }
            for at in range.start()..range.end() {
                bits[usize::try_from(at).expect("small")] = insert;
            }
            prop_assert_eq!(set.iter().collect::<Vec<_>>(), runs(&bits, whole, true));
        }
        let gaps: Vec<_> = set.missing(probe).collect();
        prop_assert_eq!(&gaps, &runs(&bits, probe, false));
        prop_assert_eq!(set.contains(probe), gaps.is_empty());
        prop_assert_eq!(set.covered(), bits.iter().map(|&b| u64::from(b)).sum::<u64>());
        prop_assert_eq!(set.is_empty(), !bits.contains(&true));
    }

    #[test]
    fn sets_of_the_same_bytes_are_equal(
        ranges in prop::collection::vec(ranges(), 0..20).prop_shuffle(),
    ) {
        let forward: RangeSet = ranges.iter().copied().collect();
        let backward: RangeSet = ranges.iter().rev().copied().collect();
        prop_assert_eq!(forward, backward);
    }

    #[test]
    fn pieces_of_a_range_follow_on_each_other(whole in ranges(), unit in 1_u64..20) {
        let unit = NonZeroU64::new(unit).expect("not zero");
        let pieces: Vec<_> = whole.split_every(unit).collect();
        let mut at = whole.start();
        for (index, piece) in pieces.iter().enumerate() {
            prop_assert_eq!(piece.start(), at);
            prop_assert!(piece.len() == unit.get() || index == pieces.len() - 1);
            prop_assert!(!piece.is_empty() && piece.len() <= unit.get());
            at = piece.end();
        }
        prop_assert_eq!(at, whole.end());
    }

    #[test]
    fn ranges_share_the_bytes_that_both_hold(a in ranges(), b in ranges()) {
        let shared: Vec<u64> = (0..BITS)
            .filter(|&at| a.contains_offset(at) && b.contains_offset(at))
            .collect();
        let found: Vec<u64> = a
            .intersection(b)
            .map_or_else(Vec::new, |r| (r.start()..r.end()).collect());
        prop_assert_eq!(a.overlaps(b), !shared.is_empty());
        prop_assert_eq!(found, shared);
    }
}
