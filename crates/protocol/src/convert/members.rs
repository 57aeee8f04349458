//! Ids, endpoints and segments.

use bytes::Bytes;

use super::{array, invalid, required};
use crate::endpoint::{Endpoint, HostId};
use crate::error::WireError;
use crate::ids::{Capability, ClientId, EngineId, MemoryKind, RegionId, SegmentId};
use crate::replica::Segment;
use crate::version::Version;
use crate::wire;

impl From<u128> for wire::Id128 {
    fn from(id: u128) -> Self {
        let bytes = id.to_be_bytes();
        let half = |range: std::ops::Range<usize>| {
            bytes[range]
                .iter()
                .fold(0, |acc, byte| acc << 8 | u64::from(*byte))
        };
        Self {
            high: half(0..8),
            low: half(8..16),
        }
    }
}

impl From<wire::Id128> for u128 {
    fn from(id: wire::Id128) -> Self {
        Self::from(id.high) << 64 | Self::from(id.low)
    }
}

impl From<EngineId> for wire::Id128 {
    fn from(id: EngineId) -> Self {
        id.0.into()
    }
}

impl From<wire::Id128> for EngineId {
    fn from(id: wire::Id128) -> Self {
        Self(id.into())
    }
}

impl From<ClientId> for wire::Id128 {
    fn from(id: ClientId) -> Self {
        id.0.into()
    }
}

impl From<wire::Id128> for ClientId {
    fn from(id: wire::Id128) -> Self {
        Self(id.into())
    }
}

impl From<Version> for wire::Version {
    fn from(version: Version) -> Self {
        Self {
            protocol: version.protocol,
            semantics: version.semantics,
        }
    }
}

impl From<wire::Version> for Version {
    fn from(version: wire::Version) -> Self {
        Self {
            protocol: version.protocol,
            semantics: version.semantics,
        }
    }
}

impl From<&Endpoint> for wire::Endpoint {
    fn from(endpoint: &Endpoint) -> Self {
        Self {
            engine: Some(endpoint.engine.into()),
            tcp: endpoint.tcp.clone(),
            host: Bytes::copy_from_slice(&endpoint.host.0),
            shm: endpoint.shm.clone().unwrap_or_default(),
            pid: endpoint.pid,
        }
    }
}

impl TryFrom<wire::Endpoint> for Endpoint {
    type Error = WireError;

    fn try_from(endpoint: wire::Endpoint) -> Result<Self, WireError> {
        Ok(Self {
            engine: required("endpoint.engine", endpoint.engine)?.into(),
            tcp: endpoint.tcp,
            host: HostId(array("endpoint.host", &endpoint.host)?),
            shm: Some(endpoint.shm).filter(|shm| !shm.is_empty()),
            pid: endpoint.pid,
        })
    }
}

/// The kind's number and its device, which is 0 for host memory.
fn encode_kind(kind: MemoryKind) -> (wire::MemoryKind, u32) {
    match kind {
        MemoryKind::Host => (wire::MemoryKind::Host, 0),
        MemoryKind::PinnedHost => (wire::MemoryKind::PinnedHost, 0),
        MemoryKind::Cuda { device } => (wire::MemoryKind::Cuda, device),
        MemoryKind::Rocm { device } => (wire::MemoryKind::Rocm, device),
        MemoryKind::Npu { device } => (wire::MemoryKind::Npu, device),
    }
}

fn decode_kind(kind: i32, device: u32) -> Result<MemoryKind, WireError> {
    match wire::MemoryKind::try_from(kind) {
        Ok(wire::MemoryKind::Host) => Ok(MemoryKind::Host),
        Ok(wire::MemoryKind::PinnedHost) => Ok(MemoryKind::PinnedHost),
        Ok(wire::MemoryKind::Cuda) => Ok(MemoryKind::Cuda { device }),
        Ok(wire::MemoryKind::Rocm) => Ok(MemoryKind::Rocm { device }),
        Ok(wire::MemoryKind::Npu) => Ok(MemoryKind::Npu { device }),
        Ok(wire::MemoryKind::Unspecified) => Err(WireError::Missing {
            field: "segment.memory_kind",
        }),
        Err(_) => Err(invalid(
            "segment.memory_kind",
            format!("{kind} is not a kind of memory that this version knows"),
        )),
    }
}

impl From<&Segment> for wire::Segment {
    fn from(segment: &Segment) -> Self {
        let (memory_kind, device_id) = encode_kind(segment.kind);
        Self {
            segment_id: segment.id.0,
            name: segment.name.clone(),
            endpoint: Some((&segment.endpoint).into()),
            region_id: segment.region.0,
            capability: Bytes::copy_from_slice(&segment.capability.0),
            len: segment.len,
            memory_kind: memory_kind.into(),
            device_id,
        }
    }
}

impl TryFrom<wire::Segment> for Segment {
    type Error = WireError;

    fn try_from(segment: wire::Segment) -> Result<Self, WireError> {
        if segment.segment_id == 0 {
            return Err(WireError::Missing {
                field: "segment.segment_id",
            });
        }
        if segment.name.is_empty() {
            return Err(WireError::Missing {
                field: "segment.name",
            });
        }
        if segment.len == 0 {
            return Err(WireError::Missing {
                field: "segment.len",
            });
        }
        Ok(Self {
            id: SegmentId(segment.segment_id),
            name: segment.name,
            endpoint: required("segment.endpoint", segment.endpoint)?.try_into()?,
            region: RegionId(segment.region_id),
            capability: Capability(array("segment.capability", &segment.capability)?),
            len: segment.len,
            kind: decode_kind(segment.memory_kind, segment.device_id)?,
        })
    }
}
