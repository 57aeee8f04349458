//! Bytes of an object header.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 2 | format version |
//! | 10 | 1 | state: 1 writing, 2 sealed, 3 removed |
//! | 11 | 1 | checksums: 0 none, 1 CRC-32C |
//! | 12 | 4 | header length |
//! | 16 | 8 | generation |
//! | 24 | 8 | payload length |
//! | 32 | 8 | layout id |
//! | 40 | 16 | fingerprint, zeros: none |
//! | 56 | 8 | epoch |
//! | 64 | 4 | prefix index |
//! | 68 | 4 | number of rows |
//! | 72 | 2 | length of the key |
//! | 74 | 2 | length of the group |
//! | 76 | 1 | length of the tenant |
//! | 77 | 3 | zero; ignored |
//! | 80 | 4 | length of the table of rows |
//! | 84 | 4 | zero; ignored |
//! | 88 | 4 | CRC-32C of names, padding and table |
//! | 92 | 4 | CRC-32C of the 92 bytes before |
//!
//! What lies behind the table up to the header's length is covered by no checksum and ignored.

use crate::fingerprint::Fingerprint;
use crate::ids::{Epoch, Generation};
use crate::key::{ObjectKey, Tenant};

use super::{
    Checksums, FORMAT_VERSION, HEAD_LEN, HEADER_ALIGN, HeaderError, HeaderSpec, HeaderState,
    HeaderView, MAX_HEADER_LEN, MAX_ROW_LEN, MAX_ROWS, ObjectHeader, Run, rows,
};

const MAGIC: [u8; 8] = *b"LCOBJECT";
const STATE_AT: usize = 10;
const BODY_CRC_AT: usize = HEAD_LEN - 8;
const HEAD_CRC_AT: usize = HEAD_LEN - 4;

/// The fields of a header that is about to be written, borrowed from wherever they are.
#[derive(Clone, Copy, Debug)]
pub struct HeaderFields<'a> {
    /// How far the writer has come.
    pub state: HeaderState,
    /// The reservation of this place that the bytes belong to.
    pub generation: Generation,
    /// The namespace of the key.
    pub tenant: &'a Tenant,
    /// The object's name.
    pub key: &'a ObjectKey,
    /// Objects of one group are evicted together.
    pub group: Option<&'a str>,
    /// Bytes of the payload, at least 1.
    pub payload_len: u64,
    /// Whose bytes these are; not all zero.
    pub fingerprint: Option<Fingerprint>,
    /// The layout that the writer used; 0: none.
    pub layout_id: u64,
    /// The request that stored it.
    pub epoch: Epoch,
    /// The block's index in its prefix.
    pub prefix_index: u32,
    /// Which checksums the rows carry.
    pub checksums: Checksums,
}

impl HeaderFields<'_> {
    /// The sizes of a header with so many rows.
    pub fn spec(&self, rows: usize) -> HeaderSpec {
        HeaderSpec {
            tenant_len: self.tenant.as_str().len(),
            key_len: self.key.as_str().len(),
            group_len: self.group.map_or(0, str::len),
            rows,
        }
    }

    /// Writes the header, with these rows, to the start of `place`, and gives the bytes that it takes: a
    /// multiple of [`HEADER_ALIGN`], and no more than its [`spec`](Self::spec) says, for which there must be room. The
    /// rest of the `header_len` bytes that the master reserved is not looked at by readers.
    pub fn encode_into<'a>(
        &self,
        runs: impl Iterator<Item = Run<'a>> + Clone,
        header_len: u32,
        place: &mut [u8],
    ) -> Result<u32, HeaderError> {
        let spec = self.spec(rows::count(runs.clone(), self.payload_len)?);
        let (need, has) = (spec.encoded_len()? as usize, header_len as usize);
        if need > has.min(place.len()) {
            let has = has.min(place.len());
            return Err(HeaderError::NoRoom { need, has });
        }
        if has > MAX_HEADER_LEN || !has.is_multiple_of(HEADER_ALIGN) {
            return Err(malformed("length", has as u64));
        }
        if self.payload_len == 0 {
            return Err(malformed("payload length", 0));
        }
        if self.fingerprint == Some(Fingerprint([0; 16])) {
            return Err(malformed("fingerprint", 0));
        }

        let rows_at = spec.rows_at();
        let table_len = rows::encode(runs, &mut place[rows_at..need]);
        let body_end = rows_at + table_len;
        let used = body_end.next_multiple_of(HEADER_ALIGN);
        let place = &mut place[..used];
        let mut names = Out(&mut place[HEAD_LEN..rows_at]);
        names.put(self.tenant.as_str().as_bytes());
        names.put(self.key.as_str().as_bytes());
        names.put(self.group.unwrap_or_default().as_bytes());
        names.0.fill(0);
        place[body_end..].fill(0);
        let body_crc = crc32c::crc32c(&place[HEAD_LEN..body_end]);
        let mut head = Out(&mut place[..HEAD_LEN]);
        head.put(&MAGIC);
        head.put(&FORMAT_VERSION.to_le_bytes());
        head.put(&[state_code(self.state)]);
        head.put(&[match self.checksums {
            Checksums::None => 0,
            Checksums::Crc32c => 1,
        }]);
        head.put(&header_len.to_le_bytes());
        head.put(&self.generation.0.to_le_bytes());
        head.put(&self.payload_len.to_le_bytes());
        head.put(&self.layout_id.to_le_bytes());
        head.put(&self.fingerprint.map_or([0; 16], |f| f.0));
        head.put(&self.epoch.0.to_le_bytes());
        head.put(&self.prefix_index.to_le_bytes());
        head.put(&u32::to_le_bytes(small(spec.rows)));
        head.put(&u16::to_le_bytes(small(spec.key_len)));
        head.put(&u16::to_le_bytes(small(spec.group_len)));
        head.put(&u8::to_le_bytes(small(spec.tenant_len)));
        head.put(&[0; 3]);
        head.put(&u32::to_le_bytes(small(table_len)));
        head.0.fill(0);
        place[BODY_CRC_AT..HEAD_CRC_AT].copy_from_slice(&body_crc.to_le_bytes());
        seal_head(place);
        Ok(small(used))
    }
}

impl ObjectHeader {
    /// Writes the header into the place reserved for it and fills the rest with zeros. Its length is
    /// that of `place`, which the master chose.
    pub fn encode_into(&self, place: &mut [u8]) -> Result<(), HeaderError> {
        let has = place.len();
        let len = u32::try_from(has).map_err(|_| malformed("length", has as u64))?;
        let rows = self.rows.iter();
        let runs = rows.map(|row| Run::of_row(row.range, row.crc32c.as_ref()));
        let used = self.fields().encode_into(runs, len, place)?;
        place[used as usize..].fill(0);
        Ok(())
    }

    pub(super) fn fields(&self) -> HeaderFields<'_> {
        HeaderFields {
            state: self.state,
            generation: self.generation,
            tenant: &self.tenant,
            key: &self.key,
            group: self.group.as_deref(),
            payload_len: self.payload_len,
            fingerprint: self.fingerprint,
            layout_id: self.layout_id,
            epoch: self.epoch,
            prefix_index: self.prefix_index,
            checksums: self.checksums,
        }
    }

    /// The header as a new buffer of the length that it takes.
    pub fn encode(&self) -> Result<Vec<u8>, HeaderError> {
        let mut bytes = vec![0; self.spec().encoded_len()? as usize];
        self.encode_into(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the header at the start of `bytes`, which must reach to the end of its rows at least.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        HeaderView::parse(bytes)?.to_header()
    }
}

/// What the head alone tells of the header at the start of `bytes`: whether there is one, its length,
/// so that all of it can be fetched, and what a host needs to walk from object to object.
pub fn peek(bytes: &[u8]) -> Result<Peek, HeaderError> {
    let head = Head::decode(bytes)?;
    Ok(Peek {
        header_len: head.header_len,
        state: head.state,
        generation: head.generation,
        payload_len: head.payload_len,
    })
}

/// The answer of [`peek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peek {
    /// Bytes of the header.
    pub header_len: u32,
    /// How far the writer has come.
    pub state: HeaderState,
    /// The reservation.
    pub generation: Generation,
    /// Bytes of the payload behind the header.
    pub payload_len: u64,
}

/// Changes the state of the header at the start of `bytes`; touches nothing but its head.
pub fn set_state(bytes: &mut [u8], state: HeaderState) -> Result<(), HeaderError> {
    Head::decode(bytes)?;
    bytes[STATE_AT] = state_code(state);
    seal_head(bytes);
    Ok(())
}

/// The part of fixed size, with its lengths checked against each other.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) state: HeaderState,
    pub(super) checksums: Checksums,
    pub(super) header_len: u32,
    pub(super) generation: Generation,
    pub(super) payload_len: u64,
    pub(super) layout_id: u64,
    pub(super) fingerprint: Option<Fingerprint>,
    pub(super) epoch: Epoch,
    pub(super) prefix_index: u32,
    pub(super) spec: HeaderSpec,
    /// Bytes of the table of rows.
    pub(super) table_len: usize,
    pub(super) body_crc: u32,
}

impl Head {
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let Some(bytes) = bytes.first_chunk::<HEAD_LEN>() else {
            return Err(HeaderError::Truncated {
                len: bytes.len(),
                need: HEAD_LEN,
            });
        };
        let mut input = In(bytes);
        if input.take() != MAGIC {
            return Err(HeaderError::NotAHeader);
        }
        let version = u16::from_le_bytes(input.take());
        if version != FORMAT_VERSION {
            return Err(HeaderError::UnknownVersion { found: version });
        }
        let head_crc = u32::from_le_bytes(In(&bytes[HEAD_CRC_AT..]).take());
        check_crc("head", head_crc, &bytes[..HEAD_CRC_AT])?;
        let state = match u8::from_le_bytes(input.take()) {
            1 => HeaderState::Writing,
            2 => HeaderState::Sealed,
            3 => HeaderState::Removed,
            code => return Err(malformed("state", code.into())),
        };
        let checksums = match u8::from_le_bytes(input.take()) {
            0 => Checksums::None,
            1 => Checksums::Crc32c,
            code => return Err(malformed("kind of checksums", code.into())),
        };
        let header_len = u32::from_le_bytes(input.take());
        let generation = Generation(u64::from_le_bytes(input.take()));
        let payload_len = u64::from_le_bytes(input.take());
        let layout_id = u64::from_le_bytes(input.take());
        let fingerprint = Fingerprint(input.take());
        let epoch = Epoch(u64::from_le_bytes(input.take()));
        let prefix_index = u32::from_le_bytes(input.take());
        let rows = u32::from_le_bytes(input.take()) as usize;
        let key_len = u16::from_le_bytes(input.take()).into();
        let group_len = u16::from_le_bytes(input.take()).into();
        let tenant_len = u8::from_le_bytes(input.take()).into();
        let _zeros: [u8; 3] = input.take();
        let table_len = u32::from_le_bytes(input.take()) as usize;
        let body_crc = u32::from_le_bytes(In(&bytes[BODY_CRC_AT..]).take());

        let spec = HeaderSpec {
            tenant_len,
            key_len,
            group_len,
            rows,
        };
        if rows > MAX_ROWS {
            return Err(malformed("number of rows", rows as u64));
        }
        let len = header_len as usize;
        if len > MAX_HEADER_LEN
            || !len.is_multiple_of(HEADER_ALIGN)
            || len < spec.rows_at() + rows * MAX_ROW_LEN
        {
            return Err(malformed("length", header_len.into()));
        }
        if table_len > rows * MAX_ROW_LEN {
            return Err(malformed("table's length", table_len as u64));
        }
        if payload_len == 0 {
            return Err(malformed("payload length", 0));
        }
        Ok(Self {
            state,
            checksums,
            header_len,
            generation,
            payload_len,
            layout_id,
            fingerprint: (fingerprint.0 != [0; 16]).then_some(fingerprint),
            epoch,
            prefix_index,
            spec,
            table_len,
            body_crc,
        })
    }
}

pub(super) fn check_crc(
    part: &'static str,
    expected: u32,
    bytes: &[u8],
) -> Result<(), HeaderError> {
    let found = crc32c::crc32c(bytes);
    if found == expected {
        Ok(())
    } else {
        Err(HeaderError::Torn {
            part,
            expected,
            found,
        })
    }
}

fn seal_head(bytes: &mut [u8]) {
    let crc = crc32c::crc32c(&bytes[..HEAD_CRC_AT]);
    bytes[HEAD_CRC_AT..HEAD_LEN].copy_from_slice(&crc.to_le_bytes());
}

fn state_code(state: HeaderState) -> u8 {
    match state {
        HeaderState::Writing => 1,
        HeaderState::Sealed => 2,
        HeaderState::Removed => 3,
    }
}

pub(super) fn malformed(field: &'static str, value: u64) -> HeaderError {
    HeaderError::Malformed { field, value }
}

/// A length that the header's limits keep within its field.
fn small<T: TryFrom<usize>>(len: usize) -> T {
    T::try_from(len)
        .ok()
        .expect("the header's limits were checked before")
}

/// Writes one field after the other.
struct Out<'a>(&'a mut [u8]);

impl Out<'_> {
    fn put(&mut self, field: &[u8]) {
        let (place, rest) = std::mem::take(&mut self.0).split_at_mut(field.len());
        place.copy_from_slice(field);
        self.0 = rest;
    }
}

/// Reads one field after the other, of a slice that is known to hold them.
struct In<'a>(&'a [u8]);

impl In<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self
            .0
            .split_first_chunk()
            .expect("the slice has the length of all its fields");
        self.0 = rest;
        *field
    }
}
