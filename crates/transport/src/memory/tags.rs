//! Generation tags: who wrote a place last, as far as places are reserved again and again.
//!
//! A region may have one tag for each granule of [`TAG_GRANULE`] bytes, in memory that is shared like
//! the region's own. A writer of generation `g` claims the granules that it touches before its first
//! byte: a tag that is not later than `g` becomes `g`, a later one stops it. After its last byte it
//! checks that the tags are still `g`. A reader of generation `g` needs every tag to equal `g`
//! before its first byte and after its last. Tags only grow. So a writer that is late can't take a
//! place back, and a reader never accepts bytes of a place that was given away meanwhile.
//!
//! Ordering: a claim is a read-modify-write operation, unless the tag is right already, and a release
//! fence keeps the bytes written after it behind it. A reader's checks have acquire fences on the side
//! of its copy: having seen a byte of a later writer, it sees the later tag. A writer's last check is
//! behind a full fence: if the tag is still its own, all its bytes came before any later claim. (The
//! copies themselves are plain memory accesses of whatever size; on the processors this runs on, the
//! fences order them.) Several pieces may share these fences: all are claimed or checked, then all are
//! copied, then all are checked.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use layercake_protocol::ids::Generation;

use crate::error::Refusal;

/// Bytes that share one generation tag.
pub const TAG_GRANULE: u64 = 4096;

/// How many tags a region of this length has.
pub(crate) fn tag_count(len: u64) -> usize {
    usize::try_from(len.div_ceil(TAG_GRANULE)).expect("a mapped length fits the address space")
}

/// The granules that a range inside a region touches.
pub(crate) fn tag_granules(offset: u64, len: u64) -> Range<usize> {
    let first = offset / TAG_GRANULE;
    let end = if len == 0 {
        first
    } else {
        (offset + len).div_ceil(TAG_GRANULE)
    };
    let index =
        |granule: u64| usize::try_from(granule).expect("a mapped offset fits the address space");
    index(first)..index(end)
}

/// Reads tags that are checked soon, once for each line of the cache, and does nothing with them: they lie apart from
/// each other and from the bytes, and waiting for them one piece at a time would cost as much as copying several
/// kilobytes. These loads depend on nothing, so the processor has those of many pieces under way at once.
pub(crate) fn warm_tags(tags: &[AtomicU64]) {
    const LINE: usize = 8;
    for tag in tags.iter().step_by(LINE).chain(tags.last()) {
        // Kept, though nobody looks at it.
        std::hint::black_box(tag.load(Ordering::Relaxed));
    }
}

/// Claims the granules for a writer of this generation. The bytes that it writes stay behind the claims only if a fence
/// comes between.
pub(crate) fn raise_to(tags: &[AtomicU64], generation: Generation) -> Result<(), Refusal> {
    for tag in tags {
        let claimed = tag.load(Ordering::Relaxed) == generation.0;
        if !claimed && tag.fetch_max(generation.0, Ordering::AcqRel) > generation.0 {
            return Err(Refusal::StaleGeneration);
        }
    }
    Ok(())
}

/// Checks that all granules belong to this generation. What this says of bytes that were read or written before holds
/// only if a fence comes between.
pub(crate) fn are_at(tags: &[AtomicU64], generation: Generation) -> Result<(), Refusal> {
    if tags
        .iter()
        .all(|tag| tag.load(Ordering::Acquire) == generation.0)
    {
        Ok(())
    } else {
        Err(Refusal::StaleGeneration)
    }
}

/// Claims the granules for a writer of this generation.
pub(crate) fn claim_tags(tags: &[AtomicU64], generation: Generation) -> Result<(), Refusal> {
    raise_to(tags, generation)?;
    // The bytes that the caller writes next stay behind the claims.
    fence(Ordering::AcqRel);
    Ok(())
}

/// Checks that all granules still belong to this generation, after the caller wrote there.
pub(crate) fn confirm_tags(tags: &[AtomicU64], generation: Generation) -> Result<(), Refusal> {
    settle();
    are_at(tags, generation)
}

/// The bytes that this thread has written are there before whatever it looks at next.
pub(crate) fn settle() {
    fence(Ordering::SeqCst);
}

/// Checks that all granules belong to this generation, before or after the caller read there.
pub(crate) fn check_tags(tags: &[AtomicU64], generation: Generation) -> Result<(), Refusal> {
    // The bytes that the caller has read stay before the check, those that it reads next behind it.
    fence(Ordering::Acquire);
    are_at(tags, generation)
}

/// Raises every tag to at least this generation.
pub(super) fn raise_tags(tags: &[AtomicU64], generation: Generation) {
    for tag in tags {
        tag.fetch_max(generation.0, Ordering::AcqRel);
    }
    fence(Ordering::SeqCst);
}

pub(super) fn read_tags(tags: &[AtomicU64]) -> Vec<Generation> {
    tags.iter()
        .map(|tag| Generation(tag.load(Ordering::Acquire)))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tags(values: &[u64]) -> Vec<AtomicU64> {
        values.iter().copied().map(AtomicU64::new).collect()
    }

    #[test]
    fn a_late_writer_never_takes_a_place_back() {
        let tags = tags(&[3, 7, 3]);
        assert_eq!(
            claim_tags(&tags, Generation(5)),
            Err(Refusal::StaleGeneration)
        );
        assert_eq!(read_tags(&tags)[1], Generation(7));
        assert_eq!(claim_tags(&tags, Generation(8)), Ok(()));
        assert_eq!(check_tags(&tags, Generation(8)), Ok(()));
        assert_eq!(
            check_tags(&tags, Generation(5)),
            Err(Refusal::StaleGeneration)
        );
    }

    proptest! {
        #[test]
        fn granules_cover_exactly_the_bytes_touched(offset in 0_u64..50_000, len in 0_u64..50_000) {
            let touched: std::collections::BTreeSet<_> =
                (offset..offset + len).map(|byte| byte / TAG_GRANULE).collect();
            let granules: std::collections::BTreeSet<_> =
                tag_granules(offset, len).map(|granule| granule as u64).collect();
            prop_assert_eq!(touched, granules);
        }

        #[test]
        fn tags_only_grow(steps in proptest::collection::vec((0_usize..8, 1_usize..8, 0_u64..20), 1..40)) {
            let shared = tags(&[0; 8]);
            let mut model = [0; 8];
            for (first, len, generation) in steps {
                let range = first..(first + len).min(8);
                let stale = model[range.clone()].iter().any(|tag| *tag > generation);
                let claimed = claim_tags(&shared[range.clone()], Generation(generation));
                prop_assert_eq!(claimed.is_err(), stale);
                for (now, before) in shared.iter().zip(&mut model) {
                    let value = now.load(Ordering::Relaxed);
                    prop_assert!(value >= *before);
                    *before = value;
                }
                if !stale {
                    prop_assert!(model[range].iter().all(|tag| *tag == generation));
                }
            }
        }
    }
}
