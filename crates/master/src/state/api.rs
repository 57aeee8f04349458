//! What goes into the calls of [`State`](super::State) and what comes out of them.

use std::time::Duration;

use layercake_protocol::command::{DropSessions, Fence};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{ClientId, EngineId, Generation, SegmentId};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, VersionRef};
use layercake_protocol::report::ObjectStat;

/// Where a process runs, as far as nearness to a segment goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// Its transfer engine.
    pub engine: EngineId,
    /// Its host.
    pub host: HostId,
}

impl From<&Endpoint> for Location {
    fn from(endpoint: &Endpoint) -> Self {
        Self {
            engine: endpoint.engine,
            host: endpoint.host,
        }
    }
}

/// Who makes a call, and in which namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The member. Sessions need one that has joined; probes and plain reads don't.
    pub client: ClientId,
    /// The namespace of all keys in the call.
    pub tenant: Tenant,
    /// Where the caller runs, if it said so.
    pub location: Option<Location>,
}

/// What an existence query asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Probe {
    /// Whether there is a complete object, its holder perhaps gone.
    Exists,
    /// Whether there is a complete object with a replica on a live segment.
    Readable,
}

/// An existence query.
#[derive(Clone, Copy, Debug)]
pub struct Exists<'a, K = ObjectKey> {
    /// What is asked.
    pub probe: Probe,
    /// The keys, in prefix order.
    pub keys: &'a [K],
    /// When the request touches them.
    pub recency: Recency,
    /// Stop at the first key that is not there: the answer then ends with it, the rest is unprobed.
    pub stop_at_first_miss: bool,
    /// Segments that the caller can't reach: replicas there don't count.
    pub unreachable: &'a [SegmentId],
    /// Grant no leases and refresh no recency.
    pub peek: bool,
}

/// Reads of several objects, to be leased.
#[derive(Clone, Copy, Debug)]
pub struct GetStart<'a, K = ObjectKey> {
    /// The keys, in prefix order.
    pub keys: &'a [K],
    /// When the request touches them.
    pub recency: Recency,
    /// Open a session: the lease belongs to (client, object), can be renewed and given back. Opening
    /// again is a renewal. Without it the lease just runs out.
    pub session: bool,
    /// Segments that the caller can't reach: replicas there don't count.
    pub unreachable: &'a [SegmentId],
}

/// One version of an object, as a caller has it.
pub trait Version {
    /// The object's key.
    fn key(&self) -> &str;

    /// The reservation that made the version.
    fn generation(&self) -> Generation;
}

impl Version for ObjectRef {
    fn key(&self) -> &str {
        self.key.as_str()
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

impl Version for VersionRef<'_> {
    fn key(&self) -> &str {
        self.key
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

/// Reservations of several objects under one configuration.
#[derive(Clone, Debug)]
pub struct PutBatch<'a> {
    /// The objects, in prefix order.
    pub puts: Vec<PutStart>,
    /// How many replicas, where, how well kept.
    pub config: &'a ReplicateConfig,
    /// When the request touches them.
    pub recency: Recency,
    /// Nobody gave the call an epoch, so its end is a use of its own: a session that was open for long
    /// does not commit an object that is the next to be evicted. Where a request has an epoch, its
    /// chunks keep it, or later ones would outlive the head of their prefix.
    pub refresh_at_end: bool,
    /// Segments that the caller can't reach: nothing is placed there.
    pub unreachable: &'a [SegmentId],
    /// Replace a complete object when the new one commits, and take an open reservation over.
    pub upsert: bool,
}

/// Answer to a join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Joined {
    /// The member was not known: its segments must be mounted again.
    pub fresh: bool,
}

/// Answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeartbeatAnswer {
    /// False: join and mount again.
    pub known: bool,
    /// Of the segments named, those that are not mounted here.
    pub missing: Vec<SegmentId>,
}

/// How far an unmount has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmountProgress {
    /// The segment is gone.
    Done,
    /// Leases or open puts still hold pieces of it; [`Event::SegmentDrained`] will tell.
    Draining {
        /// How many pieces.
        pieces: u64,
    },
}

/// What to list.
#[derive(Clone, Copy, Debug)]
pub struct List<'a> {
    /// The namespace.
    pub tenant: &'a Tenant,
    /// Keys that begin with this.
    pub prefix: &'a str,
    /// Keys behind this one; empty: from the first.
    pub after: &'a str,
    /// At most this many.
    pub limit: usize,
}

/// A page of objects, by key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// The objects.
    pub objects: Vec<ObjectStat>,
    /// There are more behind the last.
    pub more: bool,
}

/// What the shell has to carry out or pass on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A command to a node. Repeated until answered: carrying it out twice is harmless.
    Fence {
        /// The node.
        to: ClientId,
        /// The command.
        fence: Fence,
    },
    /// A command to a client. Repeated until answered.
    DropSessions {
        /// The client.
        to: ClientId,
        /// The command.
        drop: DropSessions,
    },
    /// A watched reservation ended: committed, revoked or dropped.
    Settled {
        /// Its namespace.
        tenant: Tenant,
        /// Its key.
        key: ObjectKey,
    },
    /// A member was not heard of in time. What it lent is gone, what it was writing is dropped.
    MemberLost {
        /// The member.
        client: ClientId,
        /// Its name.
        name: String,
        /// How many segments it lent.
        segments: usize,
    },
    /// A segment is gone because its node's name came back with another process.
    SegmentReplaced {
        /// The node that lent it.
        owner: ClientId,
        /// The segment.
        segment: SegmentId,
    },
    /// Nothing holds the segment any more; it is unmounted.
    SegmentDrained {
        /// The node that lends it.
        owner: ClientId,
        /// The segment.
        segment: SegmentId,
    },
}

/// A number of objects and the payload bytes in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// How many.
    pub objects: u64,
    /// Their payload bytes, each object once.
    pub bytes: u64,
}

/// What happened since the start. Every field only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Evicted because the pool was fuller than its watermark.
    pub evicted_watermark: Amount,
    /// Evicted inside an allocation that would have failed otherwise.
    pub evicted_allocation: Amount,
    /// Evicted for another object of a tenant whose quota is used up.
    pub evicted_quota: Amount,
    /// Removed by request.
    pub removed: Amount,
    /// Replaced by an upsert.
    pub replaced: Amount,
    /// Gone because no segment holds them any more.
    pub lost: Amount,
    /// Gone because their segment was drained or unmounted.
    pub unmounted: Amount,
    /// Times that something to evict was looked for.
    pub evictions_tried: u64,
    /// Those of them in which nothing could go.
    pub evictions_in_vain: u64,
    /// Reservations made.
    pub puts_started: u64,
    /// Those of them with fewer replicas than were asked for.
    pub short_puts: u64,
    /// Reservations committed.
    pub puts_committed: u64,
    /// Reservations given up by their writer.
    pub puts_revoked: u64,
    /// Reservations taken over or dropped because their writer never finished.
    pub discarded_puts: u64,
    /// Reservations refused for want of room.
    pub refused_puts: u64,
    /// Reads leased.
    pub reads_started: u64,
    /// Reads refused because there is no such readable object.
    pub read_misses: u64,
    /// Leases that could not be renewed.
    pub leases_lost: u64,
    /// Nodes that went silent, or whose name came back with another process.
    pub lost_nodes: u64,
    /// Places held back from reuse until their late writer was known to be gone.
    pub fenced_places: u64,
}

impl Counters {
    /// Objects evicted, for whatever reason.
    pub fn evicted(&self) -> Amount {
        Amount {
            objects: self.evicted_watermark.objects
                + self.evicted_allocation.objects
                + self.evicted_quota.objects,
            bytes: self.evicted_watermark.bytes
                + self.evicted_allocation.bytes
                + self.evicted_quota.bytes,
        }
    }
}

/// What there is at the moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Complete objects.
    pub objects: u64,
    /// Put sessions that are open.
    pub put_sessions: u64,
    /// Get sessions that are open, one per (client, object).
    pub get_sessions: u64,
    /// Objects under a soft pin.
    pub soft_pinned: u64,
    /// Objects without a name whose memory readers still rely on.
    pub removed_leased: u64,
    /// Reservations whose places wait until their writer is known to be gone.
    pub fences: u64,
    /// Members that are alive.
    pub members: u64,
    /// Places that clients have in advance.
    pub holds: u64,
    /// Bytes in them that are no object's, and count as used.
    pub hold_bytes: u64,
    /// Mounted segments.
    pub segments: u64,
    /// Bytes of all segments.
    pub capacity_bytes: u64,
    /// Bytes in use, in whole granules; held-back ones count.
    pub used_bytes: u64,
    /// Bytes that objects and their headers asked for; held-back ones count.
    pub requested_bytes: u64,
    /// Freed bytes that are held back.
    pub quarantined_bytes: u64,
    /// The largest piece that could be had now.
    pub largest_free: u64,
}

/// A tenant with a quota.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantStat {
    /// Its name.
    pub tenant: Tenant,
    /// Bytes that it may store.
    pub quota_bytes: u64,
    /// Payload bytes of its reservations and objects, each replica counted.
    pub charged_bytes: u64,
    /// Reservations that the quota had no room for, since the start.
    pub refused: u64,
    /// Bytes of its objects that were evicted to stay within the quota, since the start.
    pub evicted_bytes: u64,
}

/// Times that members are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Length of a lease.
    pub lease: Duration,
    /// Silence after which a member is gone.
    pub client_ttl: Duration,
    /// Age at which an unfinished put may be taken over.
    pub discard_after: Duration,
}
