//! Objects, replicas and segments, as master, node and client speak of them.

use std::time::Duration;

use smallvec::SmallVec;

use crate::early::{EarlyTable, EarlyToken};
use crate::endpoint::Endpoint;
use crate::fingerprint::Fingerprint;
use crate::header::{HeaderError, HeaderSpec};
use crate::ids::{Capability, Epoch, Generation, MemoryKind, RegionId, SegmentId};
use crate::key::{ObjectKey, Tenant};

/// The unit in which segments are tagged and handed out, in bytes: objects start on granules.
pub const GRANULE: u64 = 4096;

/// Where an object, or its reservation, is in its life (requirement S2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ObjectState {
    /// Space is reserved, nothing was written as far as the master knows.
    Initialized,
    /// Its writer is at work.
    Processing,
    /// Whole and readable.
    Complete,
    /// Its writer failed or was given up.
    Failed,
    /// Its name is gone; its memory may still be under a lease.
    Removed,
}

/// Where one replica of an object lies: header first, payload right behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Replica {
    /// The segment.
    pub segment: SegmentId,
    /// Offset of the header in the segment, in bytes; a multiple of [`GRANULE`].
    pub offset: u64,
    /// Length of the header in bytes; the payload begins behind it.
    pub header_len: u32,
    /// The tag of its granules: the reservation that owns the place.
    pub generation: Generation,
}

impl Replica {
    /// Offset of the payload in the segment, in bytes.
    pub fn payload_offset(&self) -> u64 {
        self.offset + u64::from(self.header_len)
    }
}

/// The replicas of one object: seldom more than one.
pub type Replicas = SmallVec<[Replica; 1]>;

/// A node's memory, as clients address it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its id.
    pub id: SegmentId,
    /// The node's name, which `preferred_segments` refers to.
    pub name: String,
    /// The engine that owns it.
    pub endpoint: Endpoint,
    /// Its region in that engine.
    pub region: RegionId,
    /// The right to touch it.
    pub capability: Capability,
    /// Its size in bytes.
    pub len: u64,
    /// The kind of its memory.
    pub kind: MemoryKind,
}

/// How many replicas of an object, where, and how well they are kept (requirement S4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a choice of its own")]
pub struct ReplicateConfig {
    /// Number of replicas, each in another segment; at least 1. With fewer live segments than that,
    /// there are as many replicas as segments.
    pub replicas: u32,
    /// Names of nodes, best first; one that is unknown or full is passed over.
    pub preferred_segments: Vec<String>,
    /// Prefer segments of the caller's own process, then of its host.
    pub prefer_same_node: bool,
    /// Evict only when nothing else is left.
    pub soft_pin: bool,
    /// Life of the soft pin; `None`: the master's default.
    pub soft_pin_ttl: Option<Duration>,
    /// What replaces a soft-pinned object is soft-pinned for as long, even without `soft_pin`.
    pub keep_soft_pin: bool,
    /// Never evict.
    pub hard_pin: bool,
}

impl Default for ReplicateConfig {
    fn default() -> Self {
        Self {
            replicas: 1,
            preferred_segments: Vec::new(),
            prefer_same_node: false,
            soft_pin: false,
            soft_pin_ttl: None,
            keep_soft_pin: false,
            hard_pin: false,
        }
    }
}

/// When a request touched its prefix, and where in it a key stands (requirement S6): of one epoch,
/// the larger index is evicted first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Recency {
    /// The request's epoch; [`Epoch::UNSET`] asks the master to draw one.
    pub epoch: Epoch,
    /// Index in the prefix of the first key of the call; the others count on.
    pub first_index: u32,
}

impl Default for Epoch {
    fn default() -> Self {
        Self::UNSET
    }
}

/// What a put session reserves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutStart {
    /// The object's key.
    pub key: ObjectKey,
    /// Payload bytes, at least 1.
    pub size: u64,
    /// Rows that the header's table of written ranges must hold; 0: chosen by size.
    pub header_rows: u32,
    /// Objects of one group id are evicted together.
    pub group: Option<String>,
    /// Whose bytes these are, in the header for readers to check.
    pub fingerprint: Option<Fingerprint>,
    /// The layout that the writer used; 0: none.
    pub layout_id: u64,
    /// Index of the block in its prefix, where it is not the position in the call.
    pub prefix_index: Option<u32>,
    /// In an upsert: the version whose bytes these are. The new one replaces it only if that is still the
    /// complete one at the commit, inherits its leases, pins and recency, and takes nothing over.
    pub copy_of: Option<Generation>,
    /// Readers may read what is written before the object is complete: [`early_reads`](Self::early_reads).
    pub early: Option<EarlyToken>,
}

impl PutStart {
    /// A reservation of `size` bytes under `key`, all else by default.
    pub fn new(key: ObjectKey, size: u64) -> Self {
        Self {
            key,
            size,
            header_rows: 0,
            group: None,
            fingerprint: None,
            layout_id: 0,
            prefix_index: None,
            copy_of: None,
            early: None,
        }
    }

    /// Publishes ranges as soon as they are written: as many as `header_rows` says, in the order in which
    /// they land. A published range can't be written again.
    #[must_use]
    pub fn early_reads(mut self) -> Self {
        self.early = Some(EarlyToken::random());
        self
    }

    /// Rows that the header has room for.
    pub fn rows(&self) -> usize {
        match self.header_rows {
            0 => HeaderSpec::default_rows(self.size),
            rows => usize::try_from(rows).unwrap_or(usize::MAX),
        }
    }

    /// The table for early readers, if they are wanted: one slot for each row of the header.
    pub fn early_table(&self) -> Option<EarlyTable> {
        let slots = u32::try_from(self.rows()).unwrap_or(u32::MAX);
        self.early.map(|token| EarlyTable { token, slots })
    }

    /// Bytes of the header that this needs, for keys of this tenant.
    pub fn header_len(&self, tenant: &Tenant) -> Result<u32, HeaderError> {
        let spec = HeaderSpec {
            tenant_len: tenant.as_str().len(),
            key_len: self.key.as_str().len(),
            group_len: self.group.as_ref().map_or(0, String::len),
            rows: self.rows(),
        };
        match self.early_table() {
            Some(table) => table.header_len(&spec),
            None => spec.encoded_len(),
        }
    }
}

/// A reservation that was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutStarted {
    /// Names the reservation, and tags its granules.
    pub generation: Generation,
    /// Where the writer writes: every replica gets every byte.
    pub replicas: Replicas,
}

/// An object found and leased.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetStarted {
    /// Payload bytes.
    pub size: u64,
    /// Live replicas, the nearest first; never empty.
    pub replicas: Replicas,
    /// Further live replicas, in segments that the reader said it can't reach.
    pub left_out: u32,
    /// Whose bytes these are, if the writer said so.
    pub fingerprint: Option<Fingerprint>,
    /// The layout that the writer used; 0: none.
    pub layout_id: u64,
    /// The object is not complete, and nothing is leased: what its writer has published, and no more, may be
    /// read.
    pub early: Option<EarlyTable>,
}

impl GetStarted {
    /// The version of the object: a replacement has another.
    pub fn generation(&self) -> Generation {
        self.replicas
            .first()
            .map_or(Generation::NONE, |replica| replica.generation)
    }
}

/// One version of an object: what sessions are called at the master.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectRef {
    /// The key.
    pub key: ObjectKey,
    /// The reservation that made it.
    pub generation: Generation,
}

/// The same, where the key lies in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionRef<'a> {
    /// The key.
    pub key: &'a str,
    /// The reservation that made it.
    pub generation: Generation,
}

impl ObjectRef {
    /// What a hold is called where sessions are: its number counts, not the key.
    #[expect(clippy::missing_panics_doc, reason = "the key is one")]
    pub fn of_hold(generation: Generation) -> Self {
        Self {
            key: ObjectKey::new("hold").expect("short enough"),
            generation,
        }
    }
}

/// A piece of a segment that a client has in advance, to cut slots for objects from (see
/// `docs/decisions/0013-small-puts-take-one-round-trip.md`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hold {
    /// Names the hold. An object that begins in its granule *n*, counted from 0, has the number *n* + 1 after it.
    pub generation: Generation,
    /// The segment.
    pub segment: SegmentId,
    /// Offset of its first byte in the segment; a multiple of [`GRANULE`].
    pub offset: u64,
    /// Its length in bytes; a multiple of [`GRANULE`].
    pub len: u64,
    /// The latest epoch when it was granted: that of headers, since an object's own is drawn at the commit.
    pub epoch: Epoch,
}

impl Hold {
    /// The number of the object that begins in this granule.
    pub fn slot(&self, granule: u64) -> Generation {
        Generation(self.generation.0 + 1 + granule)
    }
}

/// An object that was written into a slot of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPut {
    /// What would be reserved for it.
    pub put: PutStart,
    /// The slot's number, which will be the object's.
    pub generation: Generation,
}

/// What an existence query found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Presence {
    /// No object, or none that counts.
    Absent,
    /// There.
    Complete,
    /// Reserved by a writer that has not finished.
    Reserved,
}
