//! The record that lies in front of every object in its segment (L5, architecture decision 7).
//!
//! ```text
//! segment: … | header (header_len, a multiple of 64) | payload | …
//! header:  head (96 bytes) | tenant | key | group | padding to 8 | table of rows | anything
//! ```
//!
//! A host lists what it holds from these records alone; a reader learns from them whose bytes it is
//! about to read and what they must add up to. The header travels through the data plane like any
//! other bytes, written by a process that may die half-way and read by one that may be late. So the
//! head carries one checksum over names and rows and one over itself: a torn header is an error, and
//! a stale one shows another generation. The state can be changed by rewriting the head alone
//! ([`set_state`]).
//!
//! Everything here is pure: bytes in, values out. Numbers are little-endian. Decoding never panics
//! and never allocates by a length that it has not compared with the bytes that are there, but for [`MAX_ROWS`]
//! rows.
//!
//! - [`ObjectHeader`] and [`HeaderSpec`]: the record and its size; [`HeaderFields`], [`HeaderView`] and
//!   [`Rows`]: the same without copies, for writers and readers.
//! - [`WrittenRanges`]: what a writer keeps while it writes, and the rows of the record.
//! - [`ReadPlan`]: how a reader cuts its ranges so that whole rows are checked.

mod codec;
mod rows;
mod verify;
mod view;
mod written;

pub use codec::{HeaderFields, Peek, peek, set_state};
pub use rows::{Crcs, MAX_ROW_LEN, RowTable, Rows, Run};
pub use verify::{ReadPiece, ReadPlan, Verified, VerifyError};
pub use view::HeaderView;
pub use written::WrittenRanges;

use std::fmt;

use thiserror::Error;

use crate::fingerprint::Fingerprint;
use crate::ids::{Epoch, Generation};
use crate::key::{ObjectKey, Tenant};
use crate::range::ByteRange;

/// The version of the record that this build writes.
pub const FORMAT_VERSION: u16 = 2;

/// Bytes of the part of fixed size.
pub const HEAD_LEN: usize = 96;

/// Headers are a multiple of this, in bytes, so that payloads start on a cache line.
pub const HEADER_ALIGN: usize = 64;

/// The longest header, in bytes.
pub const MAX_HEADER_LEN: usize = 1 << 20;

/// The most rows in a table of written ranges.
pub const MAX_ROWS: usize = 32_768;

/// The longest group id, in bytes.
pub const MAX_GROUP_LEN: usize = 65_535;

// A header with the longest of everything fits its limit.
const _: () = assert!(
    HEAD_LEN + Tenant::MAX_LEN + ObjectKey::MAX_LEN + MAX_GROUP_LEN + 8 + MAX_ROWS * MAX_ROW_LEN
        <= MAX_HEADER_LEN - HEADER_ALIGN
);

/// Bytes that a few runs of rows take, and a short group.
const FEW_RUNS: usize = 48;

/// How far the writer of a header's object has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HeaderState {
    /// The rows tell what may be read already; the rest is to come.
    Writing,
    /// Everything is written.
    Sealed,
    /// The object is no more; its bytes may still be under a lease.
    Removed,
}

impl HeaderState {
    fn check_sealed(self) -> Result<(), HeaderError> {
        match self {
            Self::Sealed => Ok(()),
            state => Err(HeaderError::NotSealed { state }),
        }
    }
}

impl fmt::Display for HeaderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Writing => "being written",
            Self::Sealed => "sealed",
            Self::Removed => "removed",
        })
    }
}

/// Which checksums the rows carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Checksums {
    /// None: the bytes do not pass through a CPU that could compute them.
    None,
    /// CRC-32C of every range as it was written.
    #[default]
    Crc32c,
}

/// One range as it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which bytes of the payload.
    pub range: ByteRange,
    /// CRC-32C of these bytes; `None`: not known, so they can't be verified.
    pub crc32c: Option<u32>,
}

/// The record in front of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
    /// How far the writer has come.
    pub state: HeaderState,
    /// The reservation of this place that the bytes belong to.
    pub generation: Generation,
    /// The namespace of the key.
    pub tenant: Tenant,
    /// The object's name.
    pub key: ObjectKey,
    /// Objects of one group are evicted together.
    pub group: Option<String>,
    /// Bytes of the payload, at least 1.
    pub payload_len: u64,
    /// Whose bytes these are; not all zero.
    pub fingerprint: Option<Fingerprint>,
    /// The layout that the writer used; 0: none.
    pub layout_id: u64,
    /// The request that stored it, for the order of eviction after a rebuild.
    pub epoch: Epoch,
    /// The block's index in its prefix.
    pub prefix_index: u32,
    /// Which checksums the rows carry.
    pub checksums: Checksums,
    /// What was written: ascending, disjoint, inside the payload.
    pub rows: Vec<Row>,
}

/// Why bytes are no header, or not the one that was wanted, or a header can't be written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// There are fewer bytes than the header has.
    #[error("{len} bytes hold no header of {need}")]
    Truncated {
        /// The bytes there are.
        len: usize,
        /// The bytes it takes.
        need: usize,
    },
    /// The bytes don't begin as a header does: nothing was written here, or something else.
    #[error("there is no object header")]
    NotAHeader,
    /// Another build wrote it.
    #[error("the header has format version {found}, this build reads {FORMAT_VERSION}")]
    UnknownVersion {
        /// The version found.
        found: u16,
    },
    /// A checksum does not fit: the header was read while it was written, or its writer died.
    #[error(
        "the header is torn: the checksum of its {part} is {found:#010x}, not {expected:#010x}"
    )]
    Torn {
        /// `head`, or `names and rows`.
        part: &'static str,
        /// The checksum in the header.
        expected: u32,
        /// The checksum of the bytes.
        found: u32,
    },
    /// A field holds what no writer should have written.
    #[error("the header's {field} can't be {value}")]
    Malformed {
        /// The field.
        field: &'static str,
        /// Its value, or the position of what is wrong in it.
        value: u64,
    },
    /// A part is longer than headers can say.
    #[error("{len} is too much for a header's {field}: at most {max}")]
    TooLong {
        /// The part.
        field: &'static str,
        /// Its length or count.
        len: usize,
        /// The greatest that is accepted.
        max: usize,
    },
    /// The place is too small for the header.
    #[error("a header of {need} bytes does not fit the {has} bytes reserved for it")]
    NoRoom {
        /// The bytes it takes.
        need: usize,
        /// The bytes there are.
        has: usize,
    },
    /// The place belongs to another reservation by now.
    #[error("the header is of generation {found}, not {expected}")]
    WrongGeneration {
        /// The generation wanted.
        expected: Generation,
        /// The generation found.
        found: Generation,
    },
    /// Another object lies here.
    #[error("the header is of object {found:?} of tenant {found_tenant:?}, not of {expected:?}")]
    WrongObject {
        /// The key wanted.
        expected: ObjectKey,
        /// The key found.
        found: ObjectKey,
        /// The tenant found.
        found_tenant: Tenant,
    },
    /// The object has another size than was promised.
    #[error("the header's payload has {found} bytes, not {expected}")]
    WrongSize {
        /// The size wanted.
        expected: u64,
        /// The size found.
        found: u64,
    },
    /// Another deployment wrote the object: its bytes mean something else.
    #[error("the object's fingerprint is {}, not {expected}", fingerprint_text(*.found))]
    WrongFingerprint {
        /// The fingerprint wanted.
        expected: Fingerprint,
        /// The fingerprint found.
        found: Option<Fingerprint>,
    },
    /// The object is not whole yet, or no more.
    #[error("the object is {state}, not sealed")]
    NotSealed {
        /// Its state.
        state: HeaderState,
    },
}

fn fingerprint_text(found: Option<Fingerprint>) -> String {
    found.map_or_else(|| "missing".to_owned(), |f| f.to_string())
}

/// The sizes that a header's length follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeaderSpec {
    /// Bytes of the tenant's name.
    pub tenant_len: usize,
    /// Bytes of the key.
    pub key_len: usize,
    /// Bytes of the group id; 0 without one.
    pub group_len: usize,
    /// Rows of the table of written ranges.
    pub rows: usize,
}

impl HeaderSpec {
    /// Bytes of the header at most, whatever its rows are, rounded up to [`HEADER_ALIGN`].
    pub fn encoded_len(&self) -> Result<u32, HeaderError> {
        for (field, len, max) in [
            ("tenant's length", self.tenant_len, Tenant::MAX_LEN),
            ("key's length", self.key_len, ObjectKey::MAX_LEN),
            ("group's length", self.group_len, MAX_GROUP_LEN),
            ("number of rows", self.rows, MAX_ROWS),
        ] {
            if len > max {
                return Err(HeaderError::TooLong { field, len, max });
            }
        }
        let len = (self.rows_at() + self.rows * MAX_ROW_LEN).next_multiple_of(HEADER_ALIGN);
        u32::try_from(len).map_err(|_| HeaderError::TooLong {
            field: "length",
            len,
            max: MAX_HEADER_LEN,
        })
    }

    /// How many rows a header of `header_len` bytes with these names holds; `rows` doesn't count.
    pub fn row_capacity(&self, header_len: u32) -> usize {
        (header_len as usize)
            .saturating_sub(self.rows_at())
            .div_euclid(MAX_ROW_LEN)
            .min(MAX_ROWS)
    }

    /// Bytes from its start that hold all of a header of `header_len` bytes with these names if its rows have one
    /// length, as they mostly do; `rows` doesn't count.
    pub fn likely_len(&self, header_len: u32) -> u32 {
        let rows = self.row_capacity(header_len) * rows::CRC_LEN;
        let len = (self.rows_at() + rows + FEW_RUNS).next_multiple_of(HEADER_ALIGN);
        u32::try_from(len).unwrap_or(u32::MAX).min(header_len)
    }

    /// The rows that a header gets whose writer did not ask for a number: one for every 64 KiB of
    /// payload, at least 8, at most 4,096.
    pub fn default_rows(payload_len: u64) -> usize {
        usize::try_from(payload_len.div_ceil(64 << 10)).map_or(4096, |rows| rows.clamp(8, 4096))
    }

    /// Offset of the first row.
    fn rows_at(&self) -> usize {
        HEAD_LEN
            .saturating_add(self.tenant_len)
            .saturating_add(self.key_len)
            .saturating_add(self.group_len)
            .next_multiple_of(8)
    }
}

/// What a reader expects of a header.
#[derive(Clone, Copy, Debug)]
pub struct Expected<'a> {
    /// The namespace.
    pub tenant: &'a Tenant,
    /// The object.
    pub key: &'a ObjectKey,
    /// The version of it.
    pub generation: Generation,
    /// Its size in bytes.
    pub payload_len: u64,
    /// Whose bytes they must be; `None`: any.
    pub fingerprint: Option<Fingerprint>,
}

impl ObjectHeader {
    /// The sizes of this header.
    pub fn spec(&self) -> HeaderSpec {
        self.fields().spec(self.rows.len())
    }

    /// Checks that this is the header of what a reader was promised. Its state is not looked at:
    /// readers of whole objects add [`check_sealed`](Self::check_sealed).
    pub fn check(&self, expected: &Expected<'_>) -> Result<(), HeaderError> {
        let found = view::Identity {
            generation: self.generation,
            tenant: self.tenant.as_str().as_bytes(),
            key: self.key.as_str().as_bytes(),
            payload_len: self.payload_len,
            fingerprint: self.fingerprint,
        };
        found.check(expected)
    }

    /// Checks that everything was written.
    pub fn check_sealed(&self) -> Result<(), HeaderError> {
        self.state.check_sealed()
    }
}
