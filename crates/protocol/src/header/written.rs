//! What a writer has written of an object, and the checksum of each piece.
//!
//! Writers may write in any order and write again. Rows follow the writes: a rewrite of exactly one
//! row replaces its checksum; one that cuts into rows shortens them, and what remains of them is
//! *stale* until someone has read the stored bytes again ([`stale`](WrittenRanges::stale),
//! [`set_crc`](WrittenRanges::set_crc)). Neighbouring rows stay apart, since readers verify whole
//! rows, until there are more than the header holds; then neighbours are joined, those first whose
//! joining loses no checksum, and of these the shortest.
//!
//! Most objects are written once, upwards and in units of one length. As long as that is so, the checksums are all
//! that is kept; the rows are spelt out at the first write that is different.
//!
//! Pure state: the caller serialises, and records a write only when its bytes have landed.

use crate::checksum::combine;
use crate::range::{ByteRange, gaps};

use super::{Crcs, Row, Run};

/// Room for so many rows is made at once.
const FIRST_ROWS: usize = 64;

/// What is known of a row's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sum {
    Known(u32),
    /// There was a checksum; a rewrite beside these bytes has cut them out of what it covered.
    Stale,
    /// The bytes did not pass through a CPU that could compute one.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    range: ByteRange,
    sum: Sum,
}

impl Entry {
    fn crc32c(&self) -> Option<&u32> {
        match &self.sum {
            Sum::Known(crc) => Some(crc),
            Sum::Stale | Sum::Unknown => None,
        }
    }
}

/// The table of written ranges while it grows.
#[derive(Clone, Debug)]
pub struct WrittenRanges {
    /// Rows of one length with their checksums, from the first byte on. If there are any, there are no `entries`.
    even: Even,
    // Ascending, disjoint, non-empty.
    entries: Vec<Entry>,
    capacity: usize,
}

#[derive(Clone, Debug, Default)]
struct Even {
    row_len: u64,
    crcs: Vec<u32>,
}

impl Even {
    fn end(&self) -> u64 {
        self.row_len * self.crcs.len() as u64
    }

    fn range(&self) -> Option<ByteRange> {
        (!self.crcs.is_empty()).then(|| ByteRange::to(self.end()))
    }

    /// One of its rows.
    fn entry(&self, index: usize) -> Entry {
        let range = ByteRange::new(self.row_len * index as u64, self.row_len);
        Entry {
            range: range.expect("its end is that of a range that was written"),
            sum: Sum::Known(self.crcs[index]),
        }
    }
}

impl WrittenRanges {
    /// An empty table for a header that holds `capacity` rows
    /// ([`HeaderSpec::row_capacity`](super::HeaderSpec::row_capacity)).
    pub const fn new(capacity: usize) -> Self {
        Self {
            even: Even {
                row_len: 0,
                crcs: Vec::new(),
            },
            entries: Vec::new(),
            capacity,
        }
    }

    /// Notes that the bytes of `range` were written, with their CRC-32C if it is known. What earlier
    /// rows said of these bytes no longer counts.
    pub fn record(&mut self, range: ByteRange, crc32c: Option<u32>) {
        if range.is_empty() || crc32c.is_some_and(|crc| self.record_even(range, crc)) {
            return;
        }
        self.spell_out();
        let entry = Entry {
            range,
            sum: crc32c.map_or(Sum::Unknown, Sum::Known),
        };
        self.replace(range, Some(entry));
        self.fit();
    }

    /// `false`: the rows are not of one length any more, or too many.
    fn record_even(&mut self, range: ByteRange, crc: u32) -> bool {
        let even = &mut self.even;
        if even.crcs.is_empty() {
            if !self.entries.is_empty() {
                return false;
            }
            even.row_len = range.len();
            even.crcs.reserve_exact(self.capacity.min(FIRST_ROWS));
        }
        if range.len() != even.row_len {
            return false;
        }
        if range.start() == even.end() && even.crcs.len() < self.capacity {
            even.crcs.push(crc);
            return true;
        }
        let index = usize::try_from(range.start() / even.row_len);
        let row = index.ok().and_then(|index| even.crcs.get_mut(index));
        match row {
            Some(row) if range.start().is_multiple_of(even.row_len) => {
                *row = crc;
                true
            }
            _ => false,
        }
    }

    fn spell_out(&mut self) {
        let even = std::mem::take(&mut self.even);
        let rows = (0..even.crcs.len()).map(|index| even.entry(index));
        self.entries.extend(rows);
    }

    /// Notes that a write into `range` failed: its bytes count as not written, whatever was there.
    pub fn forget(&mut self, range: ByteRange) {
        if !range.is_empty() {
            self.spell_out();
            self.replace(range, None);
            self.fit();
        }
    }

    /// Notes that bytes of `range` may have been written by more than one transfer at a time: which of
    /// them came last is not known, so checksums of rows in it no longer count.
    pub fn mark_stale(&mut self, range: ByteRange) {
        self.spell_out();
        let first = self
            .entries
            .partition_point(|e| e.range.end() <= range.start());
        let touched = self.entries[first..]
            .iter_mut()
            .take_while(|e| e.range.overlaps(range));
        for entry in touched {
            if let Sum::Known(_) = entry.sum {
                entry.sum = Sum::Stale;
            }
        }
    }

    /// The rows whose bytes must be read again to know their checksum, in ascending order.
    pub fn stale(&self) -> impl Iterator<Item = ByteRange> {
        self.entries
            .iter()
            .filter(|e| e.sum == Sum::Stale)
            .map(|e| e.range)
    }

    /// Gives a stale row the checksum of its stored bytes. `false` if there is no such row (any
    /// more): it was written anew meanwhile.
    pub fn set_crc(&mut self, range: ByteRange, crc32c: u32) -> bool {
        let at = self.entries.partition_point(|e| e.range < range);
        match self.entries.get_mut(at) {
            Some(entry) if entry.range == range && entry.sum == Sum::Stale => {
                entry.sum = Sum::Known(crc32c);
                true
            }
            _ => false,
        }
    }

    /// Ranges that were written: rows, or many of them at once. In ascending order.
    fn ranges(&self) -> impl Iterator<Item = ByteRange> {
        let entries = self.entries.iter().map(|e| e.range);
        self.even.range().into_iter().chain(entries)
    }

    /// The parts of an object of `total` bytes that were not written, in ascending order.
    pub fn missing(&self, total: u64) -> impl Iterator<Item = ByteRange> {
        gaps(ByteRange::to(total), self.ranges())
    }

    /// Whether all `total` bytes were written.
    pub fn is_complete(&self, total: u64) -> bool {
        self.missing(total).next().is_none()
    }

    /// The number of bytes written.
    pub fn covered(&self) -> u64 {
        self.ranges().map(ByteRange::len).sum()
    }

    /// The number of rows.
    pub fn len(&self) -> usize {
        self.even.crcs.len() + self.entries.len()
    }

    /// Whether nothing was written.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the header holds all rows. It does unless the ranges leave more gaps than it has rows:
    /// then it can't be written before the gaps are filled.
    pub fn fits(&self) -> bool {
        self.len() <= self.capacity
    }

    /// The rows; a stale one is unverified for readers.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = Row> + Clone {
        let row = |index| {
            let entry = match self.entries.get(index) {
                Some(entry) => *entry,
                None => self.even.entry(index),
            };
            Row {
                range: entry.range,
                crc32c: entry.crc32c().copied(),
            }
        };
        (0..self.len()).map(row)
    }

    /// The rows for the header, as many at once as there are of one length.
    pub fn runs(&self) -> impl Iterator<Item = Run<'_>> + Clone {
        let Even { row_len, crcs } = &self.even;
        let even = (!crcs.is_empty()).then_some(Run {
            start: 0,
            row_len: *row_len,
            crcs: Crcs::Known(crcs),
        });
        let entries = self.entries.iter();
        let entries = entries.map(|e| Run::of_row(e.range, e.crc32c()));
        even.into_iter().chain(entries)
    }

    /// Puts `new` in the place of all that `range` covers, and keeps the rest of the rows it cuts.
    fn replace(&mut self, range: ByteRange, new: Option<Entry>) {
        let first = match self.entries.last() {
            // Writers mostly go upwards.
            Some(last) if last.range.end() <= range.start() => self.entries.len(),
            _ => self
                .entries
                .partition_point(|e| e.range.end() <= range.start()),
        };
        let after =
            first + self.entries[first..].partition_point(|e| e.range.start() < range.end());
        let left = self.entries[first..after]
            .first()
            .and_then(|e| Some((e.range.split_at(range.start())?.0, e.sum)));
        let right = self.entries[first..after]
            .last()
            .and_then(|e| Some((e.range.split_at(range.end())?.1, e.sum)));
        let cut = |(range, sum)| Entry {
            range,
            sum: match sum {
                Sum::Unknown => Sum::Unknown,
                Sum::Known(_) | Sum::Stale => Sum::Stale,
            },
        };
        let entries = left.map(cut).into_iter().chain(new).chain(right.map(cut));
        self.entries.splice(first..after, entries);
    }

    /// Joins neighbours until the header holds the rows, or none touch.
    fn fit(&mut self) {
        while self.entries.len() > self.capacity {
            let pairs = self.entries.windows(2).enumerate();
            let touching = pairs.filter(|(_, p)| p[0].range.end() == p[1].range.start());
            let cheapest = touching.min_by_key(|(_, p)| cost(&p[0], &p[1]));
            let Some((at, pair)) = cheapest else {
                return;
            };
            self.entries[at] = join(&pair[0], &pair[1]);
            self.entries.remove(at + 1);
        }
    }
}

/// What joining two rows costs: first the bytes whose checksum it loses, then the length in which
/// readers have to read to verify anything.
fn cost(a: &Entry, b: &Entry) -> (u64, u64) {
    let lost = match (a.sum, b.sum) {
        (Sum::Known(_), Sum::Known(_)) => 0,
        (Sum::Known(_), _) => a.range.len(),
        (_, Sum::Known(_)) => b.range.len(),
        _ => 0,
    };
    (lost, a.range.len() + b.range.len())
}

/// The row of two rows that touch.
fn join(a: &Entry, b: &Entry) -> Entry {
    let range = ByteRange::from_bounds(a.range.start(), b.range.end())
        .expect("the second row lies behind the first");
    let sum = match (a.sum, b.sum) {
        (Sum::Known(first), Sum::Known(second)) => {
            Sum::Known(combine(first, second, b.range.len()))
        }
        (Sum::Unknown, _) | (_, Sum::Unknown) => Sum::Unknown,
        _ => Sum::Stale,
    };
    Entry { range, sum }
}
