//! The bytes between two engines after the greeting: encoding and decoding, with no I/O.
//!
//! A frame is a header of [`HEADER_LEN`] bytes, a body that the header's counts give the length of,
//! and for some kinds a payload. All integers are little-endian.
//!
//! | kind | from | body | payload |
//! | --- | --- | --- | --- |
//! | write | initiator | regions, operations | the operations' bytes, one after the other |
//! | read | initiator | regions, operations | |
//! | written | owner | one status per operation, unless all are fine | |
//! | data | owner | one status per operation, unless all are fine | the bytes of those that are fine, then one status per operation again if the header says so |
//! | ping, pong | either | | |
//!
//! The initiator numbers its frames; the owner answers each one, in order, with the same number. It
//! answers a write only behind the last byte of its payload, refused bytes included: an answer before
//! all of that was sent ends the connection as malformed. A region is named once per frame with its
//! capability; operations name it by its place in that list. What comes from the network is suspected:
//! counts and lengths are capped here, before anything is allocated or waited for.

use layercake_protocol::ids::{Capability, Generation, RegionId};
use thiserror::Error;

use crate::error::Refusal;

pub(crate) const HEADER_LEN: usize = 24;
pub(crate) const REGION_LEN: usize = 24;
pub(crate) const OP_LEN: usize = 32;

/// The most operations in a frame.
pub(crate) const MAX_OPS: usize = 512;

/// The most payload bytes in a frame. Larger pieces are split. The larger a frame, the more comes in one call
/// and is acknowledged together, here and by the system.
pub(crate) const MAX_PAYLOAD: u32 = 1 << 20;

/// The most payload bytes that are accepted from a peer, which may choose its own limit up to this.
pub(crate) const MAX_PAYLOAD_ACCEPTED: u32 = 1 << 20;

/// The longest body.
pub(crate) const MAX_BODY: usize = MAX_OPS * (REGION_LEN + OP_LEN);

/// The status of an operation that went well. Others are [`Refusal`] codes.
pub(crate) const STATUS_OK: u8 = 0;

/// Why bytes are no frame. The connection can't go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("unknown frame kind {kind}")]
    UnknownKind { kind: u8 },
    #[error("unknown flags {flags:#x} in a frame of kind {kind:?}")]
    UnknownFlags { kind: Kind, flags: u8 },
    #[error("a frame with {count} operations, between 1 and {MAX_OPS} are accepted")]
    BadCount { count: u16 },
    #[error("a frame with {regions} regions for {count} operations")]
    BadRegionCount { regions: u16, count: u16 },
    #[error("a payload of {payload} bytes, at most {MAX_PAYLOAD_ACCEPTED} are accepted")]
    BadPayload { payload: u32 },
    #[error("operations of {sum} bytes in all in a frame that says {payload}")]
    PayloadMismatch { sum: u64, payload: u32 },
    #[error("an operation names region {region} of {regions} in its frame")]
    BadRegionIndex { region: u16, regions: u16 },
    #[error("status {status} is not known")]
    UnknownStatus { status: u8 },
    #[error("an answer to frame {seq} where {expected:?} was due")]
    UnexpectedAnswer { seq: u64, expected: Option<u64> },
    #[error("an answer to frame {seq} before all of that was sent")]
    EarlyAnswer { seq: u64 },
    #[error("a frame of kind {kind:?} that this side does not take")]
    Misdirected { kind: Kind },
    #[error("an answer that does not fit its question")]
    AnswerMismatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Write,
    Read,
    Written,
    Data,
    Ping,
    Pong,
}

impl Kind {
    const fn code(self) -> u8 {
        match self {
            Self::Write => 1,
            Self::Read => 2,
            Self::Written => 3,
            Self::Data => 4,
            Self::Ping => 5,
            Self::Pong => 6,
        }
    }

    fn from_code(kind: u8) -> Result<Self, FrameError> {
        Ok(match kind {
            1 => Self::Write,
            2 => Self::Read,
            3 => Self::Written,
            4 => Self::Data,
            5 => Self::Ping,
            6 => Self::Pong,
            _ => return Err(FrameError::UnknownKind { kind }),
        })
    }

    const fn flags(self) -> u8 {
        match self {
            Self::Written => FLAG_STATUSES,
            Self::Data => FLAG_STATUSES | FLAG_TRAILER,
            _ => 0,
        }
    }
}

/// The body holds one status per operation; without it all are fine.
pub(crate) const FLAG_STATUSES: u8 = 1;
/// One status per operation follows the payload.
pub(crate) const FLAG_TRAILER: u8 = 2;

/// What a frame begins with. Only [`Header::decode`] makes one from foreign bytes, so its counts and
/// lengths are within the caps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) flags: u8,
    /// Operations.
    pub(crate) count: u16,
    /// Entries of the list of regions.
    pub(crate) regions: u16,
    pub(crate) seq: u64,
    /// Payload bytes that follow, or for a read, that are asked for. Trailer not included.
    pub(crate) payload: u32,
}

impl Header {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&[self.kind.code(), self.flags]);
        out.extend_from_slice(&self.count.to_le_bytes());
        out.extend_from_slice(&self.regions.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.payload.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let kind = Kind::from_code(bytes[0])?;
        let header = Self {
            kind,
            flags: bytes[1],
            count: u16::from_le_bytes(part(bytes, 2)),
            regions: u16::from_le_bytes(part(bytes, 4)),
            seq: u64::from_le_bytes(part(bytes, 8)),
            payload: u32::from_le_bytes(part(bytes, 16)),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), FrameError> {
        let Self {
            kind,
            flags,
            count,
            regions,
            payload,
            ..
        } = *self;
        if flags & !kind.flags() != 0 {
            return Err(FrameError::UnknownFlags { kind, flags });
        }
        let control = matches!(kind, Kind::Ping | Kind::Pong);
        if usize::from(count) > MAX_OPS || control != (count == 0) {
            return Err(FrameError::BadCount { count });
        }
        let asks = matches!(kind, Kind::Write | Kind::Read);
        if regions > count || asks != (regions > 0) {
            return Err(FrameError::BadRegionCount { regions, count });
        }
        let carries = !matches!(kind, Kind::Written | Kind::Ping | Kind::Pong);
        if payload > MAX_PAYLOAD_ACCEPTED || (payload > 0 && !carries) {
            return Err(FrameError::BadPayload { payload });
        }
        Ok(())
    }

    /// Bytes between the header and the payload.
    pub(crate) fn body_len(&self) -> usize {
        let count = usize::from(self.count);
        match self.kind {
            Kind::Write | Kind::Read => usize::from(self.regions) * REGION_LEN + count * OP_LEN,
            Kind::Written | Kind::Data if self.flags & FLAG_STATUSES != 0 => count,
            _ => 0,
        }
    }

    /// Bytes after the payload.
    pub(crate) fn trailer_len(&self) -> usize {
        if self.flags & FLAG_TRAILER == 0 {
            0
        } else {
            usize::from(self.count)
        }
    }
}

/// `N` bytes of a fixed-size record, from `at`.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

/// A region that a frame names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireRegion {
    pub(crate) region: RegionId,
    pub(crate) capability: Capability,
}

impl WireRegion {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.region.0.to_le_bytes());
        out.extend_from_slice(&self.capability.0);
    }

    fn decode(bytes: &[u8]) -> Self {
        Self {
            region: RegionId(u64::from_le_bytes(part(bytes, 0))),
            capability: Capability(part(bytes, 8)),
        }
    }
}

/// One operation: bytes of one region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WireOp {
    /// Place in the frame's list of regions.
    pub(crate) region: u16,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) generation: Option<Generation>,
}

const OP_HAS_GENERATION: u16 = 1;

impl WireOp {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        let flags = if self.generation.is_some() {
            OP_HAS_GENERATION
        } else {
            0
        };
        out.extend_from_slice(&self.offset.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        out.extend_from_slice(&self.generation.unwrap_or(Generation::NONE).0.to_le_bytes());
        out.extend_from_slice(&self.region.to_le_bytes());
        out.extend_from_slice(&flags.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
    }

    fn decode(bytes: &[u8]) -> Self {
        let flags = u16::from_le_bytes(part(bytes, 26));
        let generation = Generation(u64::from_le_bytes(part(bytes, 16)));
        Self {
            offset: u64::from_le_bytes(part(bytes, 0)),
            len: u64::from_le_bytes(part(bytes, 8)),
            generation: (flags & OP_HAS_GENERATION != 0).then_some(generation),
            region: u16::from_le_bytes(part(bytes, 24)),
        }
    }
}

/// The body of a write or a read, checked as a whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    regions: &'a [u8],
    ops: &'a [u8],
}

impl<'a> Request<'a> {
    /// Splits a body of [`Header::body_len`] bytes. The lengths of a write's operations must sum up
    /// to its payload: otherwise nobody knows where the next frame begins. A read's may not exceed
    /// what it says it asks for, as far as they are acceptable at all.
    pub(crate) fn decode(header: &Header, body: &'a [u8]) -> Result<Self, FrameError> {
        let (regions, ops) = body.split_at(usize::from(header.regions) * REGION_LEN);
        let request = Self { regions, ops };
        let mut sum = 0_u64;
        for op in request.ops() {
            if op.region >= header.regions {
                return Err(FrameError::BadRegionIndex {
                    region: op.region,
                    regions: header.regions,
                });
            }
            if header.kind == Kind::Write || op.has_acceptable_len() {
                sum = sum.saturating_add(op.len);
            }
        }
        let payload = header.payload;
        let fits = match header.kind {
            Kind::Write => sum == u64::from(payload),
            _ => sum <= u64::from(payload),
        };
        if fits {
            Ok(request)
        } else {
            Err(FrameError::PayloadMismatch { sum, payload })
        }
    }

    pub(crate) fn regions(&self) -> impl Iterator<Item = WireRegion> + use<'a> {
        self.regions
            .chunks_exact(REGION_LEN)
            .map(WireRegion::decode)
    }

    pub(crate) fn ops(&self) -> impl Iterator<Item = WireOp> + use<'a> {
        self.ops.chunks_exact(OP_LEN).map(WireOp::decode)
    }
}

impl WireOp {
    /// Whether the length may occur in a frame; others are refused one by one.
    pub(crate) fn has_acceptable_len(&self) -> bool {
        (1..=u64::from(MAX_PAYLOAD_ACCEPTED)).contains(&self.len)
    }
}

/// Reads an operation's status.
pub(crate) fn decode_status(status: u8) -> Result<Result<(), Refusal>, FrameError> {
    if status == STATUS_OK {
        return Ok(Ok(()));
    }
    Refusal::from_code(status)
        .map(Err)
        .ok_or(FrameError::UnknownStatus { status })
}

/// An operation's status as it travels.
pub(crate) fn encode_status(status: Result<(), Refusal>) -> u8 {
    status.map_or_else(Refusal::code, |()| STATUS_OK)
}

#[cfg(test)]
#[path = "frame/tests.rs"]
mod tests;
