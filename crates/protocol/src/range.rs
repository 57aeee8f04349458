//! Byte intervals of an object, and sets of them.
//!
//! Everything that says "these bytes" says it with a [`ByteRange`]: half-open, 64-bit, never
//! wrapping. A range is checked once, where its offset and length come from outside; arithmetic on
//! it afterwards can't overflow. A [`RangeSet`] is a sorted vector of disjoint ranges that don't
//! touch, so two sets that hold the same bytes are equal. It is pure: no locks, no I/O.

use std::fmt;

use thiserror::Error;

/// A half-open interval of bytes, `start..end` with `start <= end`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteRange {
    start: u64,
    end: u64,
}

/// Why an offset and a length, or two bounds, make no range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RangeError {
    /// Offset and length add up to more than 64 bits hold.
    #[error("a range of {len} bytes at offset {offset} ends beyond 64 bits")]
    Overflow {
        /// Where it would start.
        offset: u64,
        /// How long it would be.
        len: u64,
    },
    /// The end lies before the start.
    #[error("a range can't start at {start} and end at {end}")]
    Reversed {
        /// The start given.
        start: u64,
        /// The end given.
        end: u64,
    },
}

impl ByteRange {
    /// The range of `len` bytes at `offset`.
    pub const fn new(offset: u64, len: u64) -> Result<Self, RangeError> {
        match offset.checked_add(len) {
            Some(end) => Ok(Self { start: offset, end }),
            None => Err(RangeError::Overflow { offset, len }),
        }
    }

    /// The range from `start` up to and without `end`.
    pub const fn from_bounds(start: u64, end: u64) -> Result<Self, RangeError> {
        if start <= end {
            Ok(Self { start, end })
        } else {
            Err(RangeError::Reversed { start, end })
        }
    }

    /// The first `len` bytes.
    pub const fn to(len: u64) -> Self {
        Self { start: 0, end: len }
    }

    /// Bounds whose order the caller has just established.
    const fn spanning(start: u64, end: u64) -> Self {
        debug_assert!(start <= end, "the caller orders the bounds");
        Self { start, end }
    }

    /// The first byte.
    pub const fn start(self) -> u64 {
        self.start
    }

    /// The byte after the last.
    pub const fn end(self) -> u64 {
        self.end
    }

    /// The number of bytes.
    pub const fn len(self) -> u64 {
        self.end - self.start
    }

    /// Whether there are no bytes in it.
    pub const fn is_empty(self) -> bool {
        self.start == self.end
    }

    /// Whether every byte of `other` is in this range. An empty range is inside where its bounds are.
    pub const fn contains(self, other: Self) -> bool {
        self.start <= other.start && other.end <= self.end
    }

    /// Whether the byte at `offset` is in this range.
    pub const fn contains_offset(self, offset: u64) -> bool {
        self.start <= offset && offset < self.end
    }

    /// Whether the two share a byte.
    pub const fn overlaps(self, other: Self) -> bool {
        self.start < other.end && other.start < self.end && !self.is_empty() && !other.is_empty()
    }

    /// The bytes in both; `None` if there is none.
    pub fn intersection(self, other: Self) -> Option<Self> {
        self.overlaps(other)
            .then(|| Self::spanning(self.start.max(other.start), self.end.min(other.end)))
    }

    /// The two parts before and from `offset` on; `None` unless both have bytes.
    pub const fn split_at(self, offset: u64) -> Option<(Self, Self)> {
        if self.start < offset && offset < self.end {
            Some((
                Self::spanning(self.start, offset),
                Self::spanning(offset, self.end),
            ))
        } else {
            None
        }
    }

    /// This range moved up by `by` bytes.
    pub const fn shifted(self, by: u64) -> Result<Self, RangeError> {
        match (self.start.checked_add(by), self.end.checked_add(by)) {
            (Some(start), Some(end)) => Ok(Self { start, end }),
            _ => Err(RangeError::Overflow {
                offset: by,
                len: self.end,
            }),
        }
    }

    /// The range cut into pieces of at most `unit` bytes, all but the last of exactly that size. The
    /// cuts lie at multiples of `unit` from the range's start.
    pub fn split_every(self, unit: std::num::NonZeroU64) -> impl Iterator<Item = Self> {
        let mut start = self.start;
        std::iter::from_fn(move || {
            let len = (self.end - start).min(unit.get());
            let piece = Self::spanning(start, start + len);
            start += len;
            (len > 0).then_some(piece)
        })
    }
}

impl fmt::Display for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

impl fmt::Debug for ByteRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A set of bytes, kept as its maximal ranges in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RangeSet {
    // Invariant: non-empty ranges, ascending, and a gap of at least one byte between neighbours.
    ranges: Vec<ByteRange>,
}

impl RangeSet {
    /// The empty set.
    pub const fn new() -> Self {
        Self { ranges: Vec::new() }
    }

    /// Adds the bytes of `range`.
    pub fn insert(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        // Writers mostly go upwards: the end needs no search.
        if let Some(last) = self.ranges.last_mut()
            && last.start <= range.start
            && range.start <= last.end
        {
            last.end = last.end.max(range.end);
            return;
        }
        let first = self.ranges.partition_point(|r| r.end < range.start);
        let after = first + self.ranges[first..].partition_point(|r| r.start <= range.end);
        if first == after {
            self.ranges.insert(first, range);
            return;
        }
        let merged = ByteRange::spanning(
            range.start.min(self.ranges[first].start),
            range.end.max(self.ranges[after - 1].end),
        );
        self.ranges[first] = merged;
        self.ranges.drain(first + 1..after);
    }

    /// Takes the bytes of `range` out.
    pub fn remove(&mut self, range: ByteRange) {
        if range.is_empty() {
            return;
        }
        let first = self.ranges.partition_point(|r| r.end <= range.start);
        let after = first + self.ranges[first..].partition_point(|r| r.start < range.end);
        if first == after {
            return;
        }
        let left = ByteRange::spanning(
            self.ranges[first].start,
            range.start.max(self.ranges[first].start),
        );
        let right = ByteRange::spanning(
            range.end.min(self.ranges[after - 1].end),
            self.ranges[after - 1].end,
        );
        let remains = [left, right].into_iter().filter(|r| !r.is_empty());
        self.ranges.splice(first..after, remains);
    }

    /// Whether all bytes of `range` are in the set; of an empty range they always are.
    pub fn contains(&self, range: ByteRange) -> bool {
        range.is_empty()
            || self
                .ranges
                .get(self.ranges.partition_point(|r| r.end <= range.start))
                .is_some_and(|r| r.contains(range))
    }

    /// The parts of `within` that are not in the set, in ascending order.
    pub fn missing(&self, within: ByteRange) -> impl Iterator<Item = ByteRange> {
        let first = self.ranges.partition_point(|r| r.end <= within.start);
        gaps(within, self.ranges[first..].iter().copied())
    }

    /// The number of bytes in the set.
    pub fn covered(&self) -> u64 {
        // Disjoint ranges of u64 offsets add up to at most u64::MAX.
        self.ranges.iter().map(|r| r.len()).sum()
    }

    /// The maximal ranges, in ascending order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = ByteRange> {
        self.ranges.iter().copied()
    }

    /// Whether no byte is in the set.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Takes everything out and keeps the memory.
    pub fn clear(&mut self) {
        self.ranges.clear();
    }
}

impl Extend<ByteRange> for RangeSet {
    fn extend<T: IntoIterator<Item = ByteRange>>(&mut self, ranges: T) {
        for range in ranges {
            self.insert(range);
        }
    }
}

impl FromIterator<ByteRange> for RangeSet {
    fn from_iter<T: IntoIterator<Item = ByteRange>>(ranges: T) -> Self {
        let mut set = Self::new();
        set.extend(ranges);
        set
    }
}

/// The parts of `within` that none of `ranges` holds; these come in ascending order and don't
/// overlap.
pub(crate) fn gaps(
    within: ByteRange,
    ranges: impl Iterator<Item = ByteRange>,
) -> impl Iterator<Item = ByteRange> {
    let mut at = within.start;
    // An empty range at the end closes the last gap.
    let closing = ByteRange::spanning(within.end, within.end);
    ranges
        .take_while(move |r| r.start < within.end)
        .chain(std::iter::once(closing))
        .filter_map(move |r| {
            let gap = (at < r.start).then(|| ByteRange::spanning(at, r.start));
            at = r.end;
            gap
        })
}
