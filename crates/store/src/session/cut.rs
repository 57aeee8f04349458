//! Turns the ranges of one call on one session into pieces that do not overlap.
//!
//! Pure. A caller's offsets and lengths are checked here once; what comes out lies inside the object,
//! ascends and is disjoint, so that pieces may land in any order and each has one checksum. Where
//! two ranges of one call overlap, the one that comes first in the list is written there.

use layercake_protocol::error::Refusal;
use layercake_protocol::range::{ByteRange, RangeSet};

use crate::error::StoreError;

/// A part of one of the call's ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Which bytes of the object.
    pub(crate) range: ByteRange,
    /// Index of the caller's range that has these bytes.
    pub(crate) source: usize,
    /// Where in that range they start, in bytes.
    pub(crate) within: u64,
}

/// Checks one range of an object of `size` bytes.
pub(crate) fn check_range(size: u64, offset: u64, len: u64) -> Result<ByteRange, StoreError> {
    if len == 0 {
        return Err(StoreError::EmptyRange { offset });
    }
    match ByteRange::new(offset, len) {
        Ok(range) if range.end() <= size => Ok(range),
        // An end beyond 64 bits is beyond any object.
        _ => Err(StoreError::OutOfBounds { offset, len, size }),
    }
}

/// Checks `(offset, len)` pairs against an object of `size` bytes and adds them to `cuts`, with overlaps
/// cut out of the later ones. Refuses all of them if one can't be, and an empty list; then `cuts`
/// stays as it was.
pub(crate) fn cut_ranges(
    size: u64,
    ranges: impl ExactSizeIterator<Item = (u64, u64)>,
    cuts: &mut Vec<Cut>,
) -> Result<(), StoreError> {
    if ranges.len() == 0 {
        return Err(Refusal::invalid("no ranges: at least 1 is needed").into());
    }
    let first = cuts.len();
    let mut ascending = true;
    let mut end = 0;
    for (source, (offset, len)) in ranges.enumerate() {
        let range = match check_range(size, offset, len) {
            Ok(range) => range,
            Err(error) => {
                cuts.truncate(first);
                return Err(error);
            }
        };
        ascending &= range.start() >= end;
        end = range.end();
        cuts.push(Cut {
            range,
            source,
            within: 0,
        });
    }
    if !ascending {
        let disjoint = without_overlaps(&cuts[first..]);
        cuts.truncate(first);
        cuts.extend(disjoint);
    }
    Ok(())
}

fn without_overlaps(ranges: &[Cut]) -> Vec<Cut> {
    let mut taken = RangeSet::new();
    let mut cuts = Vec::with_capacity(ranges.len());
    for whole in ranges {
        cuts.extend(taken.missing(whole.range).map(|range| Cut {
            range,
            source: whole.source,
            within: range.start() - whole.range.start(),
        }));
        taken.insert(whole.range);
    }
    cuts.sort_unstable_by_key(|cut| cut.range);
    cuts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // contract: session-9
    #[test]
    fn ranges_that_can_not_be_are_refused_with_their_numbers() {
        let earlier = Cut {
            range: ByteRange::to(7),
            source: 0,
            within: 0,
        };
        for (ranges, names) in [
            (vec![(0, 4), (u64::MAX, 2)], "18446744073709551615"),
            (vec![(0, 4), (8, 0)], "0 bytes at 8"),
            (vec![(60, 5)], "64 bytes"),
            (vec![], "no ranges"),
        ] {
            let mut cuts = vec![earlier];
            let error =
                cut_ranges(64, ranges.clone().into_iter(), &mut cuts).expect_err("not acceptable");
            assert!(error.to_string().contains(names), "{ranges:?}: {error}");
            assert_eq!(cuts, [earlier], "nothing of it is left");
        }
        assert!(cut_ranges(64, [(60, 4)].into_iter(), &mut Vec::new()).is_ok());
    }

    proptest! {
        #[test]
        fn cuts_are_disjoint_and_the_first_range_has_each_byte(
            ranges in prop::collection::vec((0_u64..48, 1_u64..16), 1..12),
        ) {
            let size = 64;
            let mut cuts = Vec::new();
            cut_ranges(size, ranges.clone().into_iter(), &mut cuts).expect("all inside");
            let mut owner = vec![None; 64];
            for (source, (offset, len)) in ranges.iter().enumerate() {
                for byte in *offset..offset + len {
                    owner[usize::try_from(byte).expect("small")].get_or_insert((source, byte - offset));
                }
            }
            let mut found = vec![None; 64];
            let mut end = 0;
            for cut in &cuts {
                prop_assert!(!cut.range.is_empty() && cut.range.start() >= end);
                end = cut.range.end();
                for byte in cut.range.start()..cut.range.end() {
                    found[usize::try_from(byte).expect("small")] =
                        Some((cut.source, cut.within + byte - cut.range.start()));
                }
            }
            prop_assert_eq!(owner, found);
        }
    }
}
