//! The table in which a writer publishes ranges of an object that is not complete yet (decision 0020).
//!
//! ```text
//! segment: … | header (header_len): head, names, rows … table of slots | payload | …
//! ```
//!
//! The table is the end of the header's place, where readers of the header don't look: [`EarlyTable::len`]
//! bytes in front of the payload, one slot of [`SLOT_LEN`] bytes for each range. The slots are filled in the
//! order of publishing, each once, and only when the bytes of its range have landed.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | the session's token |
//! | 8 | 8 | offset in the payload |
//! | 16 | 8 | length, at least 1 |
//! | 24 | 4 | CRC-32C of the range's bytes |
//! | 28 | 4 | CRC-32C of all that, behind the generation and the number of the slot |
//!
//! Memory is not cleared before it is used again, so a slot that was not filled holds anything, also what
//! another writer chose. What stood there before can't be a record of this session, since it would have to hold its
//! token, which is drawn at random and told to the master first. A record that is torn fails its checksum, and so
//! does one of another slot or generation. The range's own checksum stands behind both.
//!
//! Pure: bytes in, values out.

use std::fmt;
use std::num::NonZeroU64;

use rand::RngExt as _;

use crate::header::{HEADER_ALIGN, HeaderError, HeaderSpec, MAX_HEADER_LEN, Row};
use crate::ids::Generation;
use crate::range::ByteRange;

/// Bytes of one slot.
pub const SLOT_LEN: usize = 32;

const CHECK_AT: usize = SLOT_LEN - 4;

/// Names one put session to its early readers, and nobody else knew it before.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct EarlyToken(pub NonZeroU64);

impl EarlyToken {
    /// Draws one.
    pub fn random() -> Self {
        Self(rand::rng().random())
    }

    /// The token with this number; `None`: 0, which stands for none.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).map(Self)
    }
}

// What a reader may trust does not belong into logs.
impl fmt::Debug for EarlyToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EarlyToken")
    }
}

/// A session's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EarlyTable {
    /// What its records carry.
    pub token: EarlyToken,
    /// How many slots it has, at least 1.
    pub slots: u32,
}

impl EarlyTable {
    /// Bytes of the table, rounded up to [`HEADER_ALIGN`].
    pub fn len(&self) -> u64 {
        (u64::from(self.slots) * SLOT_LEN as u64).next_multiple_of(HEADER_ALIGN as u64)
    }

    /// Whether it has no slot; none has.
    pub fn is_empty(&self) -> bool {
        self.slots == 0
    }

    /// Bytes of a header with such a table behind it.
    pub fn header_len(&self, spec: &HeaderSpec) -> Result<u32, HeaderError> {
        let len = u64::from(spec.encoded_len()?) + self.len();
        match u32::try_from(len) {
            Ok(len) if len as usize <= MAX_HEADER_LEN => Ok(len),
            _ => Err(HeaderError::TooLong {
                field: "length with a table of early ranges",
                len: usize::try_from(len).unwrap_or(usize::MAX),
                max: MAX_HEADER_LEN,
            }),
        }
    }

    /// What the table leaves of a place of `header_len` bytes for the header itself; `None`: it does not fit.
    pub fn leaves(&self, header_len: u32) -> Option<u32> {
        header_len.checked_sub(u32::try_from(self.len()).ok()?)
    }

    /// Where a slot lies, in bytes from the start of a header's place of `header_len` bytes; `None`: outside of it.
    pub fn slot_at(&self, header_len: u32, slot: u32) -> Option<u64> {
        let at = u64::from(self.leaves(header_len)?);
        (slot < self.slots).then(|| at + u64::from(slot) * SLOT_LEN as u64)
    }

    /// The bytes of a record.
    pub fn encode(&self, record: &EarlyRecord, place: SlotPlace) -> [u8; SLOT_LEN] {
        let EarlyRecord { range, crc32c } = *record;
        let mut bytes = [0; SLOT_LEN];
        bytes[..8].copy_from_slice(&self.token.0.get().to_le_bytes());
        bytes[8..16].copy_from_slice(&range.start().to_le_bytes());
        bytes[16..24].copy_from_slice(&range.len().to_le_bytes());
        bytes[24..CHECK_AT].copy_from_slice(&crc32c.to_le_bytes());
        let check = place.check(&bytes[..CHECK_AT]);
        bytes[CHECK_AT..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// The record in a slot's bytes; `None`: there is none of this session (yet), whatever is there.
    pub fn decode(&self, bytes: &[u8], place: SlotPlace, payload_len: u64) -> Option<EarlyRecord> {
        let bytes: &[u8; SLOT_LEN] = bytes.try_into().ok()?;
        let (fields, check) = bytes.split_at(CHECK_AT);
        let (token, rest) = fields.split_first_chunk()?;
        let (start, rest) = rest.split_first_chunk()?;
        let (len, rest) = rest.split_first_chunk()?;
        let crc32c = u32::from_le_bytes(rest.try_into().ok()?);
        let known = u64::from_le_bytes(*token) == self.token.0.get();
        if !known || check != place.check(fields).to_le_bytes() {
            return None;
        }
        let range = ByteRange::new(u64::from_le_bytes(*start), u64::from_le_bytes(*len)).ok()?;
        let fits = !range.is_empty() && range.end() <= payload_len;
        fits.then_some(EarlyRecord { range, crc32c })
    }
}

/// A range whose bytes have landed in every replica, and will not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlyRecord {
    /// Which bytes of the payload.
    pub range: ByteRange,
    /// CRC-32C of these bytes.
    pub crc32c: u32,
}

impl From<EarlyRecord> for Row {
    fn from(record: EarlyRecord) -> Self {
        Self {
            range: record.range,
            crc32c: Some(record.crc32c),
        }
    }
}

/// Which slot of which reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPlace {
    /// The reservation.
    pub generation: Generation,
    /// The number of the slot in its table.
    pub slot: u32,
}

impl SlotPlace {
    fn check(self, fields: &[u8]) -> u32 {
        let crc = crc32c::crc32c(&self.generation.0.to_le_bytes());
        let crc = crc32c::crc32c_append(crc, &self.slot.to_le_bytes());
        crc32c::crc32c_append(crc, fields)
    }
}
