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
//! | 77 | 11 | zero; ignored |
//! | 88 | 4 | CRC-32C of names, padding and rows |
//! | 92 | 4 | CRC-32C of the 92 bytes before |
//!
//! A row is offset (8), length (8), CRC-32C (4), flags (4; bit 0: the CRC is known). The zeros behind
//! the last row up to the header's length are covered by no checksum and ignored.

use crate::fingerprint::Fingerprint;
use crate::ids::{Epoch, Generation};
use crate::key::{ObjectKey, Tenant};
use crate::range::ByteRange;

use super::{
    Checksums, FORMAT_VERSION, HEAD_LEN, HEADER_ALIGN, HeaderError, HeaderSpec, HeaderState,
    MAX_HEADER_LEN, MAX_ROWS, ObjectHeader, ROW_LEN, Row,
};

const MAGIC: [u8; 8] = *b"LCOBJECT";
const STATE_AT: usize = 10;
const BODY_CRC_AT: usize = HEAD_LEN - 8;
const HEAD_CRC_AT: usize = HEAD_LEN - 4;
const CRC_KNOWN: u32 = 1;

impl ObjectHeader {
    /// Writes the header into the place reserved for it and fills the rest with zeros. Its length is
    /// that of `place`, which the master chose.
    pub fn encode_into(&self, place: &mut [u8]) -> Result<(), HeaderError> {
        let spec = self.spec();
        let need = spec.encoded_len()? as usize;
        let has = place.len();
        if need > has {
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
        check_rows(&self.rows, self.payload_len)?;

        place.fill(0);
        let body_end = spec.rows_at() + self.rows.len() * ROW_LEN;
        self.encode_body(&mut place[HEAD_LEN..], spec.rows_at() - HEAD_LEN);
        let body_crc = crc32c::crc32c(&place[HEAD_LEN..body_end]);
        let mut head = Out(&mut place[..HEAD_LEN]);
        head.put(&MAGIC);
        head.put(&FORMAT_VERSION.to_le_bytes());
        head.put(&[state_code(self.state)]);
        head.put(&[match self.checksums {
            Checksums::None => 0,
            Checksums::Crc32c => 1,
        }]);
        head.put(&u32::to_le_bytes(small(has)));
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
        place[BODY_CRC_AT..HEAD_CRC_AT].copy_from_slice(&body_crc.to_le_bytes());
        seal_head(place);
        Ok(())
    }

    fn encode_body(&self, body: &mut [u8], rows_at: usize) {
        let (names, rows) = body.split_at_mut(rows_at);
        let mut names = Out(names);
        names.put(self.tenant.as_str().as_bytes());
        names.put(self.key.as_str().as_bytes());
        names.put(self.group.as_deref().unwrap_or_default().as_bytes());
        let mut out = Out(rows);
        for row in &self.rows {
            out.put(&row.range.start().to_le_bytes());
            out.put(&row.range.len().to_le_bytes());
            out.put(&row.crc32c.unwrap_or_default().to_le_bytes());
            out.put(&row.crc32c.map_or(0, |_| CRC_KNOWN).to_le_bytes());
        }
    }

    /// The header as a new buffer of the length that it takes.
    pub fn encode(&self) -> Result<Vec<u8>, HeaderError> {
        let mut bytes = vec![0; self.spec().encoded_len()? as usize];
        self.encode_into(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads the header at the start of `bytes`, which must reach to its end at least.
    pub fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
        let head = Head::decode(bytes)?;
        let header_len = head.header_len as usize;
        if bytes.len() < header_len {
            return Err(HeaderError::Truncated {
                len: bytes.len(),
                need: header_len,
            });
        }
        let rows_at = head.spec.rows_at();
        let body_end = rows_at + head.spec.rows * ROW_LEN;
        check_crc("names and rows", head.body_crc, &bytes[HEAD_LEN..body_end])?;

        let (tenant, rest) = bytes[HEAD_LEN..rows_at].split_at(head.spec.tenant_len);
        let (key, rest) = rest.split_at(head.spec.key_len);
        let group = &rest[..head.spec.group_len];
        let tenant = str::from_utf8(tenant)
            .ok()
            .and_then(|t| Tenant::new(t).ok())
            .ok_or(malformed("tenant's length or text", tenant.len() as u64))?;
        let key = ObjectKey::from_utf8(key)
            .map_err(|_| malformed("key's length or text", key.len() as u64))?;
        let group =
            str::from_utf8(group).map_err(|e| malformed("group's text", e.valid_up_to() as u64))?;
        let rows = bytes[rows_at..body_end]
            .chunks_exact(ROW_LEN)
            .map(decode_row)
            .collect::<Result<Vec<_>, _>>()?;
        check_rows(&rows, head.payload_len)?;
        Ok(Self {
            state: head.state,
            generation: head.generation,
            tenant,
            key,
            group: (!group.is_empty()).then(|| group.to_owned()),
            payload_len: head.payload_len,
            fingerprint: head.fingerprint,
            layout_id: head.layout_id,
            epoch: head.epoch,
            prefix_index: head.prefix_index,
            checksums: head.checksums,
            rows,
        })
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
struct Head {
    state: HeaderState,
    checksums: Checksums,
    header_len: u32,
    generation: Generation,
    payload_len: u64,
    layout_id: u64,
    fingerprint: Option<Fingerprint>,
    epoch: Epoch,
    prefix_index: u32,
    spec: HeaderSpec,
    body_crc: u32,
}

impl Head {
    fn decode(bytes: &[u8]) -> Result<Self, HeaderError> {
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
            || len < spec.rows_at() + rows * ROW_LEN
        {
            return Err(malformed("length", header_len.into()));
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
            body_crc,
        })
    }
}

fn decode_row(bytes: &[u8]) -> Result<Row, HeaderError> {
    let mut input = In(bytes);
    let offset = u64::from_le_bytes(input.take());
    let len = u64::from_le_bytes(input.take());
    let crc = u32::from_le_bytes(input.take());
    let flags = u32::from_le_bytes(input.take());
    if flags & !CRC_KNOWN != 0 {
        return Err(malformed("row's flags", flags.into()));
    }
    Ok(Row {
        range: ByteRange::new(offset, len).map_err(|_| malformed("row's offset", offset))?,
        crc32c: (flags & CRC_KNOWN != 0).then_some(crc),
    })
}

/// Rows are non-empty, ascending, disjoint and inside the payload.
fn check_rows(rows: &[Row], payload_len: u64) -> Result<(), HeaderError> {
    let mut at = 0;
    for row in rows {
        let range = row.range;
        if range.is_empty() || range.start() < at || range.end() > payload_len {
            return Err(malformed("row's offset", range.start()));
        }
        at = range.end();
    }
    Ok(())
}

fn check_crc(part: &'static str, expected: u32, bytes: &[u8]) -> Result<(), HeaderError> {
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

fn malformed(field: &'static str, value: u64) -> HeaderError {
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
