//! The messages between two engines of one host, as bytes. Pure.
//!
//! They travel over a Unix socket that keeps message boundaries; descriptors ride along with the two
//! messages that say so. The initiator speaks first:
//!
//! | message | from | descriptors |
//! | --- | --- | --- |
//! | `Hello`: version, who, to whom, nonce | initiator | |
//! | `Welcome`: version, who, nonce, proof if a token is set | owner | |
//! | `Prove`: proof if a token is set | initiator | |
//! | `Attached`: where a word to try memory access lies | owner | table, slots |
//! | `Refused`: why the greeting ends | owner | |
//! | `Open`: a region and its capability | initiator | |
//! | `Opened`: its place in the table | owner | memory, tags, as its flags say |
//! | `NotOpened`: why not | owner | |
//! | `Withdrawn`: drop this region's mapping | owner | |
//! | `Violations`: pieces that the initiator itself refused | initiator | |
//!
//! Fields are little-endian and fixed; later versions only append, so bytes after the known fields are
//! ignored. An unknown kind is an error: a peer sends only what the agreed version has.

use layercake_protocol::auth::{Nonce, Proof};
use layercake_protocol::ids::{Capability, EngineId, RegionId};
use layercake_protocol::version::Version;
use thiserror::Error;

use crate::error::Refusal;

/// No message is longer; what is longer is not read.
pub(super) const MAX_LEN: usize = 256;

/// What `Hello` and `Welcome` start with, after the kind: this protocol and no other.
const MAGIC: [u8; 8] = *b"lc-shm\0\x01";

/// A message. See the module's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Hello {
        version: Version,
        from: EngineId,
        /// Whom the initiator means to reach; a socket name may have changed hands.
        to: EngineId,
        nonce: Nonce,
    },
    Welcome {
        version: Version,
        from: EngineId,
        nonce: Nonce,
        proof: Option<Proof>,
    },
    Prove {
        proof: Option<Proof>,
    },
    Attached {
        /// Address of a 16-byte word in the owner's memory, and what it holds.
        probe_addr: u64,
        probe: u128,
    },
    Refused {
        reason: RefusedReason,
        version: Version,
    },
    Open {
        region: RegionId,
        capability: Capability,
    },
    Opened {
        region: RegionId,
        capability: Capability,
        /// Index of its entry in the table.
        index: u32,
        /// Whether the memory's descriptor came along.
        mapped: bool,
        /// Whether the tags' descriptor came along.
        tags: bool,
    },
    NotOpened {
        region: RegionId,
        capability: Capability,
        reason: NotOpenedReason,
    },
    Withdrawn {
        region: RegionId,
    },
    Violations {
        pieces: u32,
    },
}

/// Why an owner ends a greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RefusedReason {
    /// Another engine was meant.
    OtherEngine,
    /// The versions don't work together.
    Version,
    /// The proof is missing or wrong.
    NotTrusted,
    /// The peer runs as another user.
    OtherUser,
    /// Too many peers are attached, or the owner lacks the means.
    Busy,
}

impl RefusedReason {
    const ALL: [Self; 5] = [
        Self::OtherEngine,
        Self::Version,
        Self::NotTrusted,
        Self::OtherUser,
        Self::Busy,
    ];
}

/// Why an owner does not open a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotOpenedReason {
    /// The peer may not use it.
    Refused(Refusal),
    /// It can't be reached by shared memory: its table is full, or its descriptors can't be passed.
    NotShared,
}

/// The code of [`NotOpenedReason::NotShared`]; refusals use their own.
const NOT_SHARED: u8 = 0;

/// Bytes that are no message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(super) enum WireError {
    #[error("a message of kind {kind} is shorter than its fields")]
    Short { kind: u8 },
    #[error("unknown message kind {kind}")]
    UnknownKind { kind: u8 },
    #[error("a greeting of another protocol")]
    Magic,
    #[error("code {code} is not known in a message of kind {kind}")]
    UnknownCode { kind: u8, code: u8 },
    #[error("an empty message")]
    Empty,
}

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const WELCOME: u8 = 2;
    pub(super) const PROVE: u8 = 3;
    pub(super) const ATTACHED: u8 = 4;
    pub(super) const REFUSED: u8 = 5;
    pub(super) const OPEN: u8 = 6;
    pub(super) const OPENED: u8 = 7;
    pub(super) const NOT_OPENED: u8 = 8;
    pub(super) const WITHDRAWN: u8 = 9;
    pub(super) const VIOLATIONS: u8 = 10;
}

const HAS_MEMORY: u8 = 1;
const HAS_TAGS: u8 = 2;

impl Message {
    /// How many descriptors ride along.
    pub(super) fn descriptors(&self) -> usize {
        match self {
            Self::Attached { .. } => 2,
            Self::Opened { mapped, tags, .. } => usize::from(*mapped) + usize::from(*tags),
            _ => 0,
        }
    }

    /// The message's bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(MAX_LEN);
        match self {
            Self::Hello {
                version,
                from,
                to,
                nonce,
            } => {
                out.push(kind::HELLO);
                out.extend(MAGIC);
                put_version(&mut out, *version);
                out.extend(from.0.to_le_bytes());
                out.extend(to.0.to_le_bytes());
                out.extend(nonce);
            }
            Self::Welcome {
                version,
                from,
                nonce,
                proof,
            } => {
                out.push(kind::WELCOME);
                out.extend(MAGIC);
                put_version(&mut out, *version);
                out.extend(from.0.to_le_bytes());
                out.extend(nonce);
                put_proof(&mut out, proof.as_ref());
            }
            Self::Prove { proof } => {
                out.push(kind::PROVE);
                put_proof(&mut out, proof.as_ref());
            }
            Self::Attached { probe_addr, probe } => {
                out.push(kind::ATTACHED);
                out.extend(probe_addr.to_le_bytes());
                out.extend(probe.to_le_bytes());
            }
            Self::Refused { reason, version } => {
                out.push(kind::REFUSED);
                out.push(*reason as u8);
                put_version(&mut out, *version);
            }
            Self::Open { region, capability } => {
                put_region(&mut out, kind::OPEN, *region, capability);
            }
            Self::Opened {
                region,
                capability,
                index,
                mapped,
                tags,
            } => {
                put_region(&mut out, kind::OPENED, *region, capability);
                out.extend(index.to_le_bytes());
                out.push((u8::from(*mapped) * HAS_MEMORY) | (u8::from(*tags) * HAS_TAGS));
            }
            Self::NotOpened {
                region,
                capability,
                reason,
            } => {
                put_region(&mut out, kind::NOT_OPENED, *region, capability);
                out.push(match reason {
                    NotOpenedReason::Refused(refusal) => refusal.code(),
                    NotOpenedReason::NotShared => NOT_SHARED,
                });
            }
            Self::Withdrawn { region } => {
                out.push(kind::WITHDRAWN);
                out.extend(region.0.to_le_bytes());
            }
            Self::Violations { pieces } => {
                out.push(kind::VIOLATIONS);
                out.extend(pieces.to_le_bytes());
            }
        }
        debug_assert!(out.len() <= MAX_LEN, "messages are short");
        out
    }

    /// Reads a message.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (&kind, rest) = bytes.split_first().ok_or(WireError::Empty)?;
        let mut fields = Fields { kind, rest };
        Ok(match kind {
            kind::HELLO => {
                fields.magic()?;
                Self::Hello {
                    version: fields.version()?,
                    from: EngineId(fields.u128()?),
                    to: EngineId(fields.u128()?),
                    nonce: fields.take()?,
                }
            }
            kind::WELCOME => {
                fields.magic()?;
                Self::Welcome {
                    version: fields.version()?,
                    from: EngineId(fields.u128()?),
                    nonce: fields.take()?,
                    proof: fields.proof()?,
                }
            }
            kind::PROVE => Self::Prove {
                proof: fields.proof()?,
            },
            kind::ATTACHED => Self::Attached {
                probe_addr: fields.u64()?,
                probe: fields.u128()?,
            },
            kind::REFUSED => Self::Refused {
                reason: fields.refused_reason()?,
                version: fields.version()?,
            },
            kind::OPEN => Self::Open {
                region: RegionId(fields.u64()?),
                capability: Capability(fields.take()?),
            },
            kind::OPENED => {
                let (region, capability) = (RegionId(fields.u64()?), Capability(fields.take()?));
                let index = fields.u32()?;
                let flags = fields.u8()?;
                Self::Opened {
                    region,
                    capability,
                    index,
                    mapped: flags & HAS_MEMORY != 0,
                    tags: flags & HAS_TAGS != 0,
                }
            }
            kind::NOT_OPENED => Self::NotOpened {
                region: RegionId(fields.u64()?),
                capability: Capability(fields.take()?),
                reason: fields.not_opened_reason()?,
            },
            kind::WITHDRAWN => Self::Withdrawn {
                region: RegionId(fields.u64()?),
            },
            kind::VIOLATIONS => Self::Violations {
                pieces: fields.u32()?,
            },
            kind => return Err(WireError::UnknownKind { kind }),
        })
    }
}

fn put_version(out: &mut Vec<u8>, version: Version) {
    out.extend(version.protocol.to_le_bytes());
    out.extend(version.semantics.to_le_bytes());
}

fn put_proof(out: &mut Vec<u8>, proof: Option<&Proof>) {
    out.push(u8::from(proof.is_some()));
    out.extend(proof.copied().unwrap_or_default());
}

fn put_region(out: &mut Vec<u8>, kind: u8, region: RegionId, capability: &Capability) {
    out.push(kind);
    out.extend(region.0.to_le_bytes());
    out.extend(capability.0);
}

/// What is left of a message.
struct Fields<'a> {
    kind: u8,
    rest: &'a [u8],
}

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let short = WireError::Short { kind: self.kind };
        let (field, rest) = self.rest.split_first_chunk().ok_or(short)?;
        self.rest = rest;
        Ok(*field)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn u128(&mut self) -> Result<u128, WireError> {
        Ok(u128::from_le_bytes(self.take()?))
    }

    fn magic(&mut self) -> Result<(), WireError> {
        if self.take()? == MAGIC {
            Ok(())
        } else {
            Err(WireError::Magic)
        }
    }

    fn version(&mut self) -> Result<Version, WireError> {
        Ok(Version {
            protocol: self.u32()?,
            semantics: self.u32()?,
        })
    }

    fn proof(&mut self) -> Result<Option<Proof>, WireError> {
        let given = self.u8()? != 0;
        let proof = self.take()?;
        Ok(given.then_some(proof))
    }

    fn refused_reason(&mut self) -> Result<RefusedReason, WireError> {
        let code = self.u8()?;
        let known = RefusedReason::ALL
            .into_iter()
            .find(|reason| *reason as u8 == code);
        known.ok_or(WireError::UnknownCode {
            kind: self.kind,
            code,
        })
    }

    fn not_opened_reason(&mut self) -> Result<NotOpenedReason, WireError> {
        match self.u8()? {
            NOT_SHARED => Ok(NotOpenedReason::NotShared),
            code => Refusal::from_code(code)
                .map(NotOpenedReason::Refused)
                .ok_or(WireError::UnknownCode {
                    kind: self.kind,
                    code,
                }),
        }
    }
}

#[cfg(test)]
mod tests;
