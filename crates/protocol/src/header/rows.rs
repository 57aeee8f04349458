//! The table of written ranges as it lies in a header.
//!
//! A reader needs few of an object's rows at a time, and looks for them by their place in the object. So
//! [`Rows`] keeps the table's bytes, which may be a part of something larger, and decodes a row when it
//! is asked for it. All rows were checked when it was made.

use std::fmt;

use bytes::Bytes;

use crate::range::ByteRange;

use super::codec::malformed;
use super::{HeaderError, ROW_LEN, Row};

const CRC_KNOWN: u32 = 1;

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

/// A header's rows, as bytes. Cheap to clone.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rows(Bytes);

impl Rows {
    /// Takes the bytes of a table that [`check`] found nothing wrong with.
    pub(super) const fn checked(bytes: Bytes) -> Self {
        Self(bytes)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len() / ROW_LEN
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Row> {
        self.0.chunks_exact(ROW_LEN).map(known_good)
    }
}

impl RowTable for Rows {
    fn count(&self) -> usize {
        self.len()
    }

    fn row(&self, index: usize) -> Row {
        let at = index * ROW_LEN;
        known_good(&self.0[at..at + ROW_LEN])
    }
}

impl fmt::Debug for Rows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Whether bytes are rows of a payload of this length: ascending, disjoint, not empty, inside it.
pub(super) fn check(bytes: &[u8], payload_len: u64) -> Result<(), HeaderError> {
    let mut at = 0;
    for row in bytes.chunks_exact(ROW_LEN) {
        at = check_place(decode(row)?.range, at, payload_len)?;
    }
    Ok(())
}

/// Whether a row may follow one that ends at `at`. Gives its own end.
fn check_place(range: ByteRange, at: u64, payload_len: u64) -> Result<u64, HeaderError> {
    if range.is_empty() || range.start() < at || range.end() > payload_len {
        return Err(malformed("row's offset", range.start()));
    }
    Ok(range.end())
}

/// [`check`] of rows that are yet to be encoded.
pub(super) fn check_all(
    rows: impl Iterator<Item = Row>,
    payload_len: u64,
) -> Result<(), HeaderError> {
    rows.map(|row| row.range)
        .try_fold(0, |at, range| check_place(range, at, payload_len))
        .map(drop)
}

/// Writes rows to a place of their length.
pub(super) fn encode(rows: impl Iterator<Item = Row>, place: &mut [u8]) {
    for (row, place) in rows.zip(place.chunks_exact_mut(ROW_LEN)) {
        place[..8].copy_from_slice(&row.range.start().to_le_bytes());
        place[8..16].copy_from_slice(&row.range.len().to_le_bytes());
        place[16..20].copy_from_slice(&row.crc32c.unwrap_or_default().to_le_bytes());
        place[20..].copy_from_slice(&row.crc32c.map_or(0, |_| CRC_KNOWN).to_le_bytes());
    }
}

/// Reads one row of [`ROW_LEN`] bytes.
pub(super) fn decode(bytes: &[u8]) -> Result<Row, HeaderError> {
    let (offset, rest) = number::<8>(bytes);
    let (len, rest) = number::<8>(rest);
    let (crc, rest) = number::<4>(rest);
    let (flags, _) = number::<4>(rest);
    let (offset, flags) = (u64::from_le_bytes(offset), u32::from_le_bytes(flags));
    if flags & !CRC_KNOWN != 0 {
        return Err(malformed("row's flags", flags.into()));
    }
    let range = ByteRange::new(offset, u64::from_le_bytes(len));
    Ok(Row {
        range: range.map_err(|_| malformed("row's offset", offset))?,
        crc32c: (flags & CRC_KNOWN != 0).then(|| u32::from_le_bytes(crc)),
    })
}

fn number<const N: usize>(bytes: &[u8]) -> ([u8; N], &[u8]) {
    let (number, rest) = bytes
        .split_first_chunk()
        .expect("a row has the length of all its fields");
    (*number, rest)
}

fn known_good(bytes: &[u8]) -> Row {
    decode(bytes).expect("rows are checked when the table is made")
}
