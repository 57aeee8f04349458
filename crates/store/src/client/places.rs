//! Where replicas lie: what the master's answers name, resolved to what the transport needs.

use std::sync::{Arc, OnceLock};

use layercake_protocol::endpoint::Endpoint;
use layercake_protocol::ids::{Capability, Generation, RegionId, SegmentId};
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{Replica, Segment};
use layercake_transport::{Engine, RemoteSlice, TransportKind};
use smallvec::SmallVec;

/// A segment as this client writes to and reads from it.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) segment: SegmentId,
    pub(crate) peer: Arc<Endpoint>,
    region: RegionId,
    capability: Capability,
    /// Whether reads ask the peer, once somebody wanted to know.
    asks: OnceLock<bool>,
}

impl Target {
    /// Whether both are the same memory, reached in the same way.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.segment == other.segment
            && self.region == other.region
            && self.capability == other.capability
            && self.peer == other.peer
    }

    /// Whether a read of it takes a round trip, by the transport that was the choice when this was asked first.
    pub(super) fn reads_ask(&self, engine: &Engine) -> bool {
        *self.asks.get_or_init(|| {
            let kind = engine.transport_to(&self.peer);
            kind.is_some_and(TransportKind::reads_ask_the_peer)
        })
    }

    /// A place in the segment that belongs to this reservation.
    pub(crate) fn tagged(&self, offset: u64, len: u64, generation: Generation) -> RemoteSlice {
        RemoteSlice {
            generation: Some(generation),
            ..self.untagged(offset, len)
        }
    }

    /// A place in the segment without regard to what lies there.
    pub(crate) fn untagged(&self, offset: u64, len: u64) -> RemoteSlice {
        RemoteSlice {
            region: self.region,
            capability: self.capability,
            offset,
            len,
            generation: None,
        }
    }
}

/// One replica of a session's object.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) target: Arc<Target>,
    pub(crate) replica: Replica,
}

/// The replicas of one object, the nearest first: seldom more than one.
pub(crate) type Places = SmallVec<[Place; 1]>;

impl Place {
    /// Bytes of the payload, which must lie inside the object.
    pub(crate) fn payload(&self, range: ByteRange) -> RemoteSlice {
        self.slice(self.replica.payload_offset() + range.start(), range.len())
    }

    /// The header.
    pub(crate) fn header(&self) -> RemoteSlice {
        self.slice(self.replica.offset, u64::from(self.replica.header_len))
    }

    /// Bytes of the header's place, which they must lie inside.
    pub(crate) fn header_part(&self, offset: u64, len: u64) -> RemoteSlice {
        self.slice(self.replica.offset + offset, len)
    }

    fn slice(&self, offset: u64, len: u64) -> RemoteSlice {
        self.target.tagged(offset, len, self.replica.generation)
    }
}

/// The segments of one answer. An answer names few, so they are searched one by one.
#[derive(Debug)]
pub(crate) struct Targets(Vec<Arc<Target>>);

impl Targets {
    pub(crate) fn new<'a>(segments: impl IntoIterator<Item = &'a Arc<Segment>>) -> Self {
        let target = |segment: &Arc<Segment>| {
            Arc::new(Target {
                segment: segment.id,
                peer: Arc::new(segment.endpoint.clone()),
                region: segment.region,
                capability: segment.capability,
                asks: OnceLock::new(),
            })
        };
        Self(segments.into_iter().map(target).collect())
    }

    /// The segment of this id, if the answer describes it.
    pub(crate) fn find(&self, segment: SegmentId) -> Option<Arc<Target>> {
        let mut targets = self.0.iter();
        targets.find(|target| target.segment == segment).cloned()
    }

    #[cfg(test)]
    pub(super) fn first(&self) -> Option<Arc<Target>> {
        self.0.first().cloned()
    }

    /// The places of an object of `size` bytes. Replicas in segments that the answer does not describe,
    /// or whose offsets make no sense, are left out.
    pub(crate) fn places(&self, replicas: &[Replica], size: u64) -> Places {
        replicas
            .iter()
            .filter(|replica| {
                let header = u64::from(replica.header_len);
                let end = replica
                    .offset
                    .checked_add(header)
                    .and_then(|at| at.checked_add(size));
                end.is_some()
            })
            .filter_map(|replica| {
                Some(Place {
                    target: self.find(replica.segment)?,
                    replica: *replica,
                })
            })
            .collect()
    }
}
