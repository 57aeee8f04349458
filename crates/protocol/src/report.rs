//! What the master tells about itself, for tools and people.

use std::time::Duration;

use crate::ids::{ClientId, Epoch, Generation, Term};
use crate::key::ObjectKey;
use crate::replica::{ObjectState, Replica, Segment};
use crate::version::Version;

/// One object of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStat {
    /// Its key.
    pub key: ObjectKey,
    /// Payload bytes.
    pub size: u64,
    /// Where it is in its life.
    pub state: ObjectState,
    /// Where it lies.
    pub replicas: Vec<Replica>,
    /// The reservation that made it.
    pub generation: Generation,
    /// For how long it is under a lease; zero: it is not.
    pub lease_remaining: Duration,
    /// Evicted only when nothing else is left.
    pub soft_pinned: bool,
    /// Never evicted.
    pub hard_pinned: bool,
    /// What it is evicted together with.
    pub group: Option<String>,
    /// When it was last touched.
    pub epoch: Epoch,
    /// Its index in the prefix that touched it.
    pub prefix_index: u32,
    /// Read sessions that are open on it.
    pub open_readers: u32,
}

/// Whether a segment takes objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum SegmentState {
    /// It does.
    Mounted,
    /// No new ones: it is about to leave.
    Draining,
}

/// One segment and how full it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentStat {
    /// The segment.
    pub segment: Segment,
    /// Whether it takes objects.
    pub state: SegmentState,
    /// Bytes that objects and their headers take, in whole granules.
    pub used_bytes: u64,
    /// The largest piece that could be had, in bytes.
    pub largest_free: u64,
    /// Objects with a replica in it.
    pub objects: u64,
    /// Freed bytes that a lease or a possible late writer holds back.
    pub quarantined_bytes: u64,
    /// Time since its node was last heard of.
    pub heartbeat_age: Duration,
    /// The node that lends it.
    pub client: ClientId,
}

/// The master as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// Its term.
    pub term: Term,
    /// Time since it started.
    pub uptime: Duration,
    /// Complete objects.
    pub objects: u64,
    /// Reservations that were not committed yet.
    pub reserved_objects: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Bytes that objects and their headers take.
    pub used_bytes: u64,
    /// Freed bytes that are held back.
    pub quarantined_bytes: u64,
    /// Mounted segments.
    pub segments: u64,
    /// Members that are alive and can move bytes: nodes and clients, not the tools that only ask.
    pub members: u64,
    /// Objects evicted since the start.
    pub evicted_objects: u64,
    /// Their bytes.
    pub evicted_bytes: u64,
    /// Reservations refused for want of room since the start.
    pub refused_puts: u64,
    /// Nodes that went silent since the start.
    pub lost_nodes: u64,
    /// Reservations given up because their writer never finished, since the start.
    pub discarded_puts: u64,
    /// How long a silent member stays one; zero: the master does not say.
    pub client_ttl: Duration,
    /// What it speaks.
    pub version: Version,
}
