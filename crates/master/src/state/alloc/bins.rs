//! Best fit in constant time, with the sizes kept apart.
//!
//! Holes of up to 4,095 granules (just under 16 MiB) lie in one list per exact length, with a bitmap over
//! the lists: finding the smallest hole that fits looks at a few words. The few holes that can be larger
//! lie in a sorted set. A hole that is given back is merged with its neighbours at once; the left one is
//! found through a bit tree of all holes' first granules.
//!
//! Sizes are kept apart: a request that is large for this segment is cut from the low end of its hole, a
//! small one from the high end. So a segment with two kinds of objects has the large ones at the bottom
//! and the small ones at the top, and when one kind goes its holes join up instead of lying between
//! objects of the other. "Large" is measured against the mean size by bytes of what was asked for
//! during about the last turnover of the segment.
//!
//! Memory: 16 KiB, one bit per granule, and about 30 bytes per hole.

use std::collections::BTreeSet;

use layercake_protocol::replica::GRANULE;

use super::bits::BitTree;
use super::{AllocError, Allocator, Usage};
use crate::state::numbers::NumberMap;

/// Holes of fewer granules have a list for their exact length.
const EXACT: u32 = 4096;

/// "No hole" in a list.
const NIL: u32 = u32::MAX;

/// Fixed point of the mean size.
const MEAN_SHIFT: u32 = 8;

/// A hole, linked with others of its length by their first granules.
#[derive(Clone, Copy, Debug)]
struct Hole {
    len: u32,
    next: u32,
    prev: u32,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct BinAllocator {
    granules: u32,
    /// Every hole by its first granule.
    holes: NumberMap<u32, Hole>,
    starts: BitTree,
    /// First hole of each exact length, and which lists have any.
    heads: Box<[u32]>,
    lengths: BitTree,
    /// The longer holes as (length, first granule).
    long: BTreeSet<(u32, u32)>,
    free_granules: u32,
    requested: u64,
    pieces: u64,
    /// Mean length of requests by bytes, in 1/256 granules; 0: none yet.
    mean: u64,
}

impl BinAllocator {
    /// The longest segment, in bytes: 16 TiB less one granule.
    pub(crate) const MAX_LEN: u64 = (NIL as u64 - 1) * GRANULE;

    /// An allocator for a segment of `len` bytes; a last part of a granule stays unused. `None`: the
    /// segment is smaller than a granule, or longer than [`MAX_LEN`](Self::MAX_LEN).
    pub(crate) fn new(len: u64) -> Option<Self> {
        if !(GRANULE..=Self::MAX_LEN).contains(&len) {
            return None;
        }
        let granules = u32::try_from(len / GRANULE).ok()?;
        let mut this = Self {
            granules,
            holes: NumberMap::default(),
            starts: BitTree::new(granules as usize),
            heads: vec![NIL; EXACT as usize].into_boxed_slice(),
            lengths: BitTree::new(EXACT as usize),
            long: BTreeSet::new(),
            free_granules: 0,
            requested: 0,
            pieces: 0,
            mean: 0,
        };
        this.add_hole(0, granules);
        Some(this)
    }

    fn add_hole(&mut self, start: u32, len: u32) {
        let mut hole = Hole {
            len,
            next: NIL,
            prev: NIL,
        };
        if len < EXACT {
            let head = std::mem::replace(&mut self.heads[len as usize], start);
            if head == NIL {
                self.lengths.insert(len as usize);
            } else {
                self.hole_mut(head).prev = start;
            }
            hole.next = head;
        } else {
            self.long.insert((len, start));
        }
        self.holes.insert(start, hole);
        self.starts.insert(start as usize);
        self.free_granules += len;
    }

    fn take_hole(&mut self, start: u32) -> u32 {
        let hole = self
            .holes
            .remove(&start)
            .expect("holes are only taken by a first granule that was looked up");
        self.starts.remove(start as usize);
        self.free_granules -= hole.len;
        if hole.len >= EXACT {
            self.long.remove(&(hole.len, start));
            return hole.len;
        }
        if hole.next != NIL {
            self.hole_mut(hole.next).prev = hole.prev;
        }
        if hole.prev == NIL {
            self.heads[hole.len as usize] = hole.next;
            if hole.next == NIL {
                self.lengths.remove(hole.len as usize);
            }
        } else {
            self.hole_mut(hole.prev).next = hole.next;
        }
        hole.len
    }

    fn hole_mut(&mut self, start: u32) -> &mut Hole {
        self.holes
            .get_mut(&start)
            .expect("lists link holes that exist")
    }

    /// First granule of the smallest hole of at least `len` granules.
    fn best_fit(&self, len: u32) -> Option<u32> {
        if len < EXACT
            && let Some(exact) = self.lengths.at_or_after(len as usize)
        {
            return Some(self.heads[exact]);
        }
        let (_, start) = self.long.range((len, 0)..).next()?;
        Some(*start)
    }

    /// The hole that begins at or before `granule`, as (first granule, end).
    fn hole_before(&self, granule: u32) -> Option<(u32, u32)> {
        let start = u32::try_from(self.starts.before(granule as usize + 1)?).ok()?;
        Some((start, start + self.holes[&start].len))
    }

    /// The first granule and the number of granules of a piece.
    fn piece(&self, offset: u64, len: u64) -> Result<(u32, u32), AllocError> {
        let out = AllocError::OutOfBounds { offset, len };
        let end = offset.checked_add(len).ok_or(out)?.div_ceil(GRANULE);
        if len == 0 || !offset.is_multiple_of(GRANULE) || end > u64::from(self.granules) {
            return Err(out);
        }
        let start = u32::try_from(offset / GRANULE).map_err(|_| out)?;
        let end = u32::try_from(end).map_err(|_| out)?;
        Ok((start, end - start))
    }

    /// Whether `granules` is less than what is usual here; the request then counts for the mean.
    fn is_small(&mut self, granules: u32) -> bool {
        let size = u64::from(granules) << MEAN_SHIFT;
        if self.mean == 0 {
            self.mean = size;
        }
        let small = size < self.mean;
        let difference = size.abs_diff(self.mean);
        let share = u128::from(difference) * u128::from(granules) / u128::from(self.granules);
        let step = u64::try_from(share).unwrap_or(difference).min(difference);
        if small {
            self.mean -= step;
        } else {
            self.mean += step;
        }
        small
    }

    fn account(&mut self, len: u64) {
        self.requested += len;
        self.pieces += 1;
    }
}

impl Allocator for BinAllocator {
    fn allocate(&mut self, len: u64) -> Option<u64> {
        if len == 0 || len.div_ceil(GRANULE) > u64::from(self.granules) {
            return None;
        }
        let want = u32::try_from(len.div_ceil(GRANULE)).ok()?;
        let start = self.best_fit(want)?;
        let small = self.is_small(want);
        let hole = self.take_hole(start);
        let rest = hole - want;
        let at = if small { start + rest } else { start };
        if rest > 0 {
            self.add_hole(if small { start } else { start + want }, rest);
        }
        self.account(len);
        Some(u64::from(at) * GRANULE)
    }

    fn free(&mut self, offset: u64, len: u64) -> Result<(), AllocError> {
        let (mut start, granules) = self.piece(offset, len)?;
        let mut end = start + granules;
        let overlap = AllocError::Overlap {
            offset,
            len,
            found: "free already",
        };
        let before = self.hole_before(start);
        if before.is_some_and(|(_, hole_end)| hole_end > start) || self.requested < len {
            return Err(overlap);
        }
        if let Some(next) = self.starts.at_or_after(start as usize) {
            if next < end as usize {
                return Err(overlap);
            }
            if next == end as usize {
                end += self.take_hole(end);
            }
        }
        if let Some((hole, hole_end)) = before
            && hole_end == start
        {
            self.take_hole(hole);
            start = hole;
        }
        self.add_hole(start, end - start);
        self.requested -= len;
        self.pieces -= 1;
        Ok(())
    }

    fn claim(&mut self, offset: u64, len: u64) -> Result<(), AllocError> {
        let (start, granules) = self.piece(offset, len)?;
        let end = start + granules;
        let Some((hole, hole_end)) = self.hole_before(start).filter(|(_, e)| *e >= end) else {
            return Err(AllocError::Overlap {
                offset,
                len,
                found: "in use",
            });
        };
        self.take_hole(hole);
        if hole < start {
            self.add_hole(hole, start - hole);
        }
        if end < hole_end {
            self.add_hole(end, hole_end - end);
        }
        self.account(len);
        Ok(())
    }

    fn split(&mut self, pieces: u64, unasked: u64) {
        self.pieces = self.pieces + pieces - 1;
        self.requested -= unasked;
    }

    fn largest_free(&self) -> u64 {
        let granules = match self.long.last() {
            Some((len, _)) => *len as usize,
            None => self.lengths.before(EXACT as usize).unwrap_or(0),
        };
        granules as u64 * GRANULE
    }

    fn usage(&self) -> Usage {
        Usage {
            capacity: u64::from(self.granules) * GRANULE,
            used: u64::from(self.granules - self.free_granules) * GRANULE,
            requested: self.requested,
            pieces: self.pieces,
        }
    }
}
