//! A header looked at where it lies, without a copy of its parts.

use bytes::Bytes;

use crate::fingerprint::Fingerprint;
use crate::ids::Generation;
use crate::key::{ObjectKey, Tenant};

use super::codec::{Head, check_crc, malformed};
use super::rows::{self, FoundRuns, Rows};
use super::{Expected, HEAD_LEN, HeaderError, ObjectHeader};

/// A header whose checksums fit and whose rows make sense. Its names are bytes: a reader compares
/// them with those that it expects.
#[derive(Clone, Debug)]
pub struct HeaderView<'a> {
    head: Head,
    tenant: &'a [u8],
    key: &'a [u8],
    group: &'a str,
    runs: FoundRuns,
    crcs: &'a [u8],
}

impl<'a> HeaderView<'a> {
    /// Looks at the header at the start of `bytes`, which must reach to the end of its rows at least;
    /// [`HeaderError::Truncated`] tells where that is.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, HeaderError> {
        let head = Head::decode(bytes)?;
        let rows_at = head.spec.rows_at();
        let body_end = rows_at + head.table_len;
        if bytes.len() < body_end {
            return Err(HeaderError::Truncated {
                len: bytes.len(),
                need: body_end,
            });
        }
        check_crc("names and rows", head.body_crc, &bytes[HEAD_LEN..body_end])?;

        let (tenant, rest) = bytes[HEAD_LEN..rows_at].split_at(head.spec.tenant_len);
        let (key, rest) = rest.split_at(head.spec.key_len);
        let group = str::from_utf8(&rest[..head.spec.group_len]);
        let group = group.map_err(|e| malformed("group's text", e.valid_up_to() as u64))?;
        let table = &bytes[rows_at..body_end];
        let (runs, crcs) = rows::decode(table, head.spec.rows, head.payload_len)?;
        Ok(Self {
            head,
            tenant,
            key,
            group,
            runs,
            crcs,
        })
    }

    /// Whose bytes these are, if the writer said so.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.head.fingerprint
    }

    /// The layout that the writer used; 0: none.
    pub fn layout_id(&self) -> u64 {
        self.head.layout_id
    }

    /// The rows, whose checksums stay a part of `memory`, in which this header lies.
    ///
    /// # Panics
    ///
    /// If it lies elsewhere.
    pub fn into_rows(self, memory: &Bytes) -> Rows {
        Rows::new(self.runs, memory.slice_ref(self.crcs), self.head.spec.rows)
    }

    /// Checks that this is the header of what a reader was promised. Its state is not looked at.
    pub fn check(&self, expected: &Expected<'_>) -> Result<(), HeaderError> {
        self.identity().check(expected)
    }

    /// Checks that everything was written.
    pub fn check_sealed(&self) -> Result<(), HeaderError> {
        self.head.state.check_sealed()
    }

    fn identity(&self) -> Identity<'a> {
        Identity {
            generation: self.head.generation,
            tenant: self.tenant,
            key: self.key,
            payload_len: self.head.payload_len,
            fingerprint: self.head.fingerprint,
        }
    }

    /// The header as a value of its own.
    pub(super) fn to_header(&self) -> Result<ObjectHeader, HeaderError> {
        let Head { spec, .. } = self.head;
        let rows = (0..spec.rows).map(|index| rows::row(&self.runs, self.crcs, index));
        let rows = rows.collect();
        Ok(ObjectHeader {
            state: self.head.state,
            generation: self.head.generation,
            tenant: self.identity().tenant()?,
            key: self.identity().key()?,
            group: (!self.group.is_empty()).then(|| self.group.to_owned()),
            payload_len: self.head.payload_len,
            fingerprint: self.head.fingerprint,
            layout_id: self.head.layout_id,
            epoch: self.head.epoch,
            prefix_index: self.head.prefix_index,
            checksums: self.head.checksums,
            rows,
        })
    }
}

/// What tells a header's object from others, as it was found.
#[derive(Clone, Copy)]
pub(super) struct Identity<'a> {
    pub(super) generation: Generation,
    pub(super) tenant: &'a [u8],
    pub(super) key: &'a [u8],
    pub(super) payload_len: u64,
    pub(super) fingerprint: Option<Fingerprint>,
}

impl Identity<'_> {
    /// Compares it with what a reader was promised.
    pub(super) fn check(&self, expected: &Expected<'_>) -> Result<(), HeaderError> {
        if self.generation != expected.generation {
            return Err(HeaderError::WrongGeneration {
                expected: expected.generation,
                found: self.generation,
            });
        }
        if self.key != expected.key.as_str().as_bytes()
            || self.tenant != expected.tenant.as_str().as_bytes()
        {
            return Err(HeaderError::WrongObject {
                expected: expected.key.clone(),
                found: self.key()?,
                found_tenant: self.tenant()?,
            });
        }
        if self.payload_len != expected.payload_len {
            return Err(HeaderError::WrongSize {
                expected: expected.payload_len,
                found: self.payload_len,
            });
        }
        match expected.fingerprint {
            Some(fingerprint) if self.fingerprint != Some(fingerprint) => {
                Err(HeaderError::WrongFingerprint {
                    expected: fingerprint,
                    found: self.fingerprint,
                })
            }
            _ => Ok(()),
        }
    }

    fn tenant(&self) -> Result<Tenant, HeaderError> {
        let tenant = str::from_utf8(self.tenant).ok();
        tenant
            .and_then(|tenant| Tenant::new(tenant).ok())
            .ok_or_else(|| malformed("tenant's length or text", self.tenant.len() as u64))
    }

    fn key(&self) -> Result<ObjectKey, HeaderError> {
        ObjectKey::from_utf8(self.key)
            .map_err(|_| malformed("key's length or text", self.key.len() as u64))
    }
}
