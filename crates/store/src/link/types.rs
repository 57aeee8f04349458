//! What goes into the calls of a link and what comes out, where `layercake_protocol` has no type for it.

use std::sync::Arc;
use std::time::Duration;

use layercake_protocol::command::{DropSessions, Fence, FenceId};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{Epoch, SegmentId, Term};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GetStarted, Hold, Presence, PutStarted, Recency, Segment};
use layercake_protocol::report::ObjectStat;

use crate::error::StoreError;

/// One membership at the master. It ends, and another begins, whenever the master does not know this
/// member any more: after its restart, or after it waited too long for a heartbeat. Sessions opened
/// in an earlier life are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Life(pub u64);

/// How the link stands.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LinkState {
    /// The connection was just lost, and the first attempt to renew it is under way: calls wait for it.
    Connecting,
    /// Calls go through.
    Up {
        /// The master's time in office.
        term: Term,
        /// This side's membership.
        life: Life,
    },
    /// The master can't be reached, and attempts go on in the background: calls fail at once with
    /// this error.
    Down(StoreError),
    /// This side closed the link.
    Closed,
}

/// What carries a link to its master.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LinkCarrier {
    /// A gRPC stream.
    Grpc,
    /// A framed lane over TCP, or over whatever stream the [`Connector`](super::Connector) opens.
    TcpLane,
    /// A framed lane over a unix socket of this host.
    UnixLane,
}

impl LinkCarrier {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Grpc => "grpc",
            Self::TcpLane => "tcp",
            Self::UnixLane => "unix",
        }
    }
}

/// A question whether objects are there.
#[derive(Clone, Copy, Debug)]
pub struct Exists<'a> {
    /// The keys.
    pub keys: &'a [ObjectKey],
    /// Count only objects with a replica on a live segment that is not `unreachable`. Reservations count while a
    /// segment of theirs is there.
    pub readable: bool,
    /// When the request touched the keys.
    pub recency: Recency,
    /// Stop at the first key that is not complete: the rest counts as absent, unprobed.
    pub stop_at_first_miss: bool,
    /// Segments that this client can't reach.
    pub unreachable: &'a [SegmentId],
    /// Grant no leases and don't refresh recency.
    pub peek: bool,
}

impl<'a> Exists<'a> {
    /// Asks whether `keys` can be read, all else by default.
    pub fn readable(keys: &'a [ObjectKey]) -> Self {
        Self {
            keys,
            readable: true,
            recency: Recency::default(),
            stop_at_first_miss: false,
            unreachable: &[],
            peek: false,
        }
    }
}

/// The answer to [`Exists`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Existence {
    /// One entry per key, in order.
    pub states: Vec<Presence>,
    /// The epoch of the call: the caller's own, or the one drawn for it.
    pub epoch: Epoch,
    /// Keys that were sent to the master; less than all when the query stopped at a miss.
    pub keys_queried: u64,
}

/// How a get or put start goes about it.
#[derive(Clone, Copy, Debug, Default)]
pub struct StartOptions<'a> {
    /// When the request touched the keys.
    pub recency: Recency,
    /// Segments that this client can't reach: not read from, not placed on.
    pub unreachable: &'a [SegmentId],
    /// Of puts: ask for a hold, too.
    pub hold: bool,
}

/// Objects found and leased.
#[derive(Clone, Debug)]
pub struct GetsStarted {
    /// One entry per key, in order.
    pub results: Vec<Result<GetStarted, Refusal>>,
    /// Every segment that a replica lies in, once each.
    pub segments: Vec<Arc<Segment>>,
    /// The leases last for this long from the moment the call was *sent*.
    pub lease: Duration,
    /// The epoch of the call: the caller's own, or the one drawn for it.
    pub epoch: Epoch,
    /// The membership that the sessions belong to.
    pub life: Life,
}

/// Reservations made.
#[derive(Clone, Debug)]
pub struct PutsStarted {
    /// One entry per entry, in order.
    pub results: Vec<Result<PutStarted, Refusal>>,
    /// Every segment that a replica lies in, once each.
    pub segments: Vec<Arc<Segment>>,
    /// After this long without an end, the reservations may be taken over.
    pub discard_after: Duration,
    /// The epoch of the call: the caller's own, or the one drawn for it.
    pub epoch: Epoch,
    /// The membership that the sessions belong to.
    pub life: Life,
    /// A hold, if one was asked for and granted; its segment is among the above.
    pub hold: Option<Hold>,
}

/// Leases renewed.
#[derive(Clone, Debug)]
pub struct Renewed {
    /// One entry per object; [`Refusal::LeaseExpired`]: stop reading.
    pub results: Vec<Result<(), Refusal>>,
    /// The renewed leases last for this long from the moment the call was *sent*.
    pub lease: Duration,
}

/// Names a command of the master until it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CommandId {
    /// The term of the master that gave it: for another one the answer means nothing.
    pub term: Term,
    /// That master's number for it.
    pub id: FenceId,
}

/// What a node is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum NodeEvent {
    /// Keep a writer out, and answer with [`super::MasterLink::fence_done`]. Repeated until answered.
    Fence {
        /// What to answer.
        command: CommandId,
        /// What to do.
        fence: Fence,
    },
    /// The master does not have these segments: mount them again.
    Missing(Vec<SegmentId>),
}

/// What a client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SessionEvent {
    /// These put sessions were taken away. Answer with [`super::MasterLink::fence_done`]
    /// when none of their transfers is in flight any more; with `writer_attached` if a write ended
    /// without an answer from the memory's owner, so that nobody here can know. Repeated until answered.
    Drop {
        /// What to answer.
        command: CommandId,
        /// Which sessions.
        sessions: DropSessions,
    },
}

/// A page of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectPage {
    /// The objects, in the order of their keys.
    pub objects: Vec<ObjectStat>,
    /// There are more behind the last one.
    pub more: bool,
}

/// One object, and the segments it lies in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectDetail {
    /// The object.
    pub object: ObjectStat,
    /// Where its replicas lie.
    pub segments: Vec<Segment>,
}
