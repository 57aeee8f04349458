//! The table of written ranges as it lies in a header.
//!
//! Writers cut objects into ranges of equal length. So the table is made of *runs*, rows of one length one behind
//! the other, and a run says its length once:
//!
//! ```text
//! table: runs | CRC-32C of every row that has one, 4 bytes each
//! run:   gap in front of it | length of a row | 2 × number of rows + (1 if they have checksums)
//! ```
//!
//! The numbers of a run are written seven bits to a byte, lowest first, with the eighth bit where more follow. So
//! no table takes more than [`MAX_ROW_LEN`] bytes a row: the gap and the length of a row can't both take ten,
//! since payloads end below 2^64.
//!
//! A reader needs few rows at a time, and looks for them by their place in the object. [`Rows`] keeps the runs
//! and, as a part of something larger, the checksums' bytes.

use std::fmt;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::range::ByteRange;

use super::codec::malformed;
use super::{HeaderError, Row};

/// The most bytes that a row takes in a header.
pub const MAX_ROW_LEN: usize = 24;

/// Bytes of a checksum.
pub(super) const CRC_LEN: usize = 4;

/// Rows in ascending order, disjoint and not empty.
pub trait RowTable {
    /// How many there are.
    fn count(&self) -> usize;

    /// One of them.
    ///
    /// # Panics
    ///
    /// If there are no more than `index`.
    fn row(&self, index: usize) -> Row;
}

impl RowTable for [Row] {
    fn count(&self) -> usize {
        self.len()
    }

    fn row(&self, index: usize) -> Row {
        self[index]
    }
}

/// Rows of one length, one behind the other, that are about to be written.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    /// First byte of the first row.
    pub start: u64,
    /// Bytes of each.
    pub row_len: u64,
    /// What is known of them.
    pub crcs: Crcs<'a>,
}

/// The checksums of a run.
#[derive(Clone, Copy, Debug)]
pub enum Crcs<'a> {
    /// CRC-32C of each row.
    Known(&'a [u32]),
    /// None, of so many rows.
    Unknown(usize),
}

impl<'a> Run<'a> {
    /// One row.
    pub(super) fn of_row(range: ByteRange, crc32c: Option<&'a u32>) -> Self {
        Self {
            start: range.start(),
            row_len: range.len(),
            crcs: crc32c.map_or(Crcs::Unknown(1), |crc| {
                Crcs::Known(std::slice::from_ref(crc))
            }),
        }
    }

    fn rows(&self) -> usize {
        match self.crcs {
            Crcs::Known(crcs) => crcs.len(),
            Crcs::Unknown(rows) => rows,
        }
    }
}

/// The number of rows, if they are in order, disjoint, not empty and inside a payload of this length.
pub(super) fn count<'a>(
    runs: impl Iterator<Item = Run<'a>>,
    payload_len: u64,
) -> Result<usize, HeaderError> {
    let (mut rows, mut at) = (0, 0);
    for run in runs {
        if run.start < at {
            return Err(malformed("row's offset", run.start));
        }
        at = end_of(run.start, run.row_len, run.rows(), payload_len)?;
        rows += run.rows();
    }
    Ok(rows)
}

/// Where a run ends, inside the payload.
fn end_of(start: u64, row_len: u64, rows: usize, payload_len: u64) -> Result<u64, HeaderError> {
    let len = row_len.checked_mul(rows as u64).filter(|len| *len > 0);
    let end = len.and_then(|len| start.checked_add(len));
    end.filter(|end| *end <= payload_len)
        .ok_or_else(|| malformed("row's offset", start))
}

/// Writes runs that [`count`] found in order to the start of `place`, which has [`MAX_ROW_LEN`] bytes for each row.
/// Gives the bytes used. Runs that continue each other become one.
pub(super) fn encode<'a>(runs: impl Iterator<Item = Run<'a>> + Clone, place: &mut [u8]) -> usize {
    let mut out = Out { place, at: 0 };
    let mut before = Pending::default();
    for run in runs.clone() {
        let next = Pending {
            start: run.start,
            row_len: run.row_len,
            rows: run.rows() as u64,
            known: matches!(run.crcs, Crcs::Known(_)),
            after: before.end(),
        };
        if before.is_continued_by(&next) {
            before.rows += next.rows;
        } else {
            before.put(&mut out);
            before = next;
        }
    }
    before.put(&mut out);
    for run in runs {
        if let Crcs::Known(crcs) = run.crcs {
            for crc in crcs {
                out.bytes(&crc.to_le_bytes());
            }
        }
    }
    out.at
}

/// A run that may still grow.
#[derive(Default)]
struct Pending {
    start: u64,
    row_len: u64,
    rows: u64,
    known: bool,
    /// Where the run before it ends.
    after: u64,
}

impl Pending {
    fn end(&self) -> u64 {
        self.start + self.row_len * self.rows
    }

    fn is_continued_by(&self, next: &Self) -> bool {
        self.rows > 0
            && (next.start, next.row_len, next.known) == (self.end(), self.row_len, self.known)
    }

    fn put(&self, out: &mut Out<'_>) {
        if self.rows > 0 {
            out.number(self.start - self.after);
            out.number(self.row_len);
            out.number(self.rows << 1 | u64::from(self.known));
        }
    }
}

/// Writes one number after the other.
struct Out<'a> {
    place: &'a mut [u8],
    at: usize,
}

impl Out<'_> {
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes(&[number.to_le_bytes()[0] | 0x80]);
            number >>= 7;
        }
        self.bytes(&[number.to_le_bytes()[0]]);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.place[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }
}

/// A run as it was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundRun {
    start: u64,
    row_len: u64,
    /// Index of its first row.
    first: usize,
    /// Index of that row's checksum.
    crc: Option<usize>,
}

/// The runs of a table: most have one.
pub(super) type FoundRuns = SmallVec<[FoundRun; 1]>;

/// Reads the runs at the start of a table of so many rows of a payload of this length; gives them and the
/// checksums' bytes, which are all that follows.
pub(super) fn decode(
    table: &[u8],
    rows: usize,
    payload_len: u64,
) -> Result<(FoundRuns, &[u8]), HeaderError> {
    let mut runs = FoundRuns::new();
    let (mut rest, mut at, mut first, mut crcs) = (table, 0_u64, 0, 0);
    while first < rows {
        let mut number = || take_number(&mut rest);
        let (gap, row_len, counted) = (number()?, number()?, number()?);
        let count = usize::try_from(counted >> 1).unwrap_or(usize::MAX);
        if count == 0 || count > rows - first {
            return Err(malformed("number of rows", counted >> 1));
        }
        let start = at
            .checked_add(gap)
            .ok_or_else(|| malformed("row's offset", gap))?;
        at = end_of(start, row_len, count, payload_len)?;
        let known = counted & 1 != 0;
        runs.push(FoundRun {
            start,
            row_len,
            first,
            crc: known.then_some(crcs),
        });
        first += count;
        crcs += if known { count } else { 0 };
    }
    if rest.len() != crcs * CRC_LEN {
        return Err(malformed("number of checksums", rest.len() as u64));
    }
    Ok((runs, rest))
}

fn take_number(bytes: &mut &[u8]) -> Result<u64, HeaderError> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes
            .split_first()
            .ok_or_else(|| malformed("table's length", 0))?;
        *bytes = rest;
        let part = u64::from(byte & 0x7F);
        number |= part << shift;
        if part << shift >> shift != part {
            break;
        }
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(malformed("number in its table", number))
}

/// A header's rows. Cheap to clone.
#[derive(Clone, Default)]
pub struct Rows {
    runs: FoundRuns,
    crcs: Bytes,
    len: usize,
}

impl Rows {
    /// Takes what [`decode`] gave.
    pub(super) const fn new(runs: FoundRuns, crcs: Bytes, len: usize) -> Self {
        Self { runs, crcs, len }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Row> {
        (0..self.len).map(|index| self.row(index))
    }
}

impl RowTable for Rows {
    fn count(&self) -> usize {
        self.len
    }

    fn row(&self, index: usize) -> Row {
        assert!(index < self.len, "row {index} of {}", self.len);
        row(&self.runs, &self.crcs, index)
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// One row of what [`decode`] gave, which has more than `index`.
pub(super) fn row(runs: &[FoundRun], crcs: &[u8], index: usize) -> Row {
    let run = match runs {
        [run] => run,
        runs => &runs[runs.partition_point(|run| run.first <= index) - 1],
    };
    let within = index - run.first;
    let range = ByteRange::new(run.start + within as u64 * run.row_len, run.row_len);
    let crc32c = run.crc.map(|first| {
        let at = (first + within) * CRC_LEN;
        let bytes = crcs[at..].first_chunk();
        u32::from_le_bytes(*bytes.expect("there is a checksum for every row that has one"))
    });
    Row {
        range: range.expect("runs lie inside the payload"),
        crc32c,
    }
}
