//! The handle on a get session.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use layercake_protocol::fingerprint::Fingerprint;
use layercake_protocol::header::Rows;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;

use super::lease::Lease;
use crate::client::{Core, Places};

/// An object that is being read, under a lease that is renewed in the background. Made by
/// [`StoreClient::start_gets`](crate::StoreClient::start_gets). Clones are the same session; dropping the last one
/// ends it in the background.
#[derive(Clone)]
pub struct GetSession {
    shared: Arc<GetShared>,
}

/// The state of a get session, shared with its reads under way.
#[derive(Debug)]
pub(crate) struct GetShared {
    pub(crate) size: u64,
    pub(crate) fingerprint: Option<Fingerprint>,
    pub(crate) layout_id: u64,
    /// Replicas, the nearest first.
    pub(crate) places: Places,
    /// There are more, out of this client's reach when the session began.
    pub(crate) left_out: bool,
    /// What was written, from the header.
    pub(crate) rows: Rows,
    /// All of its bytes, if they came along with the header.
    pub(crate) payload: Option<Payload>,
    /// The replica that served last.
    pub(crate) preferred: AtomicUsize,
    pub(crate) lease: LeaseHold,
}

/// The bytes of an object, checked against its header.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    pub(crate) bytes: Bytes,
    /// How many of them have a checksum, which fits.
    pub(crate) verified: u64,
}

impl Payload {
    /// Bytes that must lie inside the object.
    pub(crate) fn part(&self, range: ByteRange) -> Option<&[u8]> {
        let start = usize::try_from(range.start()).ok()?;
        let end = usize::try_from(range.end()).ok()?;
        self.bytes.get(start..end)
    }

    /// How many bytes of a range have a checksum.
    pub(crate) fn verified_in(&self, rows: &Rows, range: ByteRange) -> u64 {
        if self.verified == self.bytes.len() as u64 {
            return range.len();
        }
        let checked = rows.iter().filter(|row| row.crc32c.is_some());
        let within = checked.filter_map(|row| row.range.intersection(range));
        let within = within.map(ByteRange::len).sum();
        // Of none at all if nothing was compared.
        self.verified.min(within)
    }
}

/// One session's share in a lease. Dropping it gives it up, and gives the lease back if it was the last.
pub(crate) struct LeaseHold {
    lease: Arc<Lease>,
    core: Arc<Core>,
    /// It was given up.
    ended: bool,
}

impl LeaseHold {
    pub(crate) fn new(lease: Arc<Lease>, core: Arc<Core>) -> Self {
        Self {
            lease,
            core,
            ended: false,
        }
    }

    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }

    fn end_all(holds: &mut [Self]) {
        if let Some(first) = holds.first() {
            first.core.leases.end(holds.iter().map(|hold| &hold.lease));
        }
        for hold in holds {
            hold.ended = true;
        }
    }
}

impl Drop for LeaseHold {
    fn drop(&mut self) {
        if !self.ended {
            self.core.leases.end([&self.lease]);
        }
    }
}

impl fmt::Debug for LeaseHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lease.fmt(f)
    }
}

impl GetShared {
    pub(crate) fn first_place(&self) -> usize {
        self.preferred.load(Ordering::Relaxed)
    }
}

impl GetSession {
    pub(crate) fn new(shared: GetShared) -> Self {
        Self {
            shared: Arc::new(shared),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<GetShared> {
        &self.shared
    }

    /// Ends sessions of one client, all at once. One that others have or read from ends with the last of them.
    pub(crate) fn end_all(sessions: Vec<Self>) {
        let shared = sessions.into_iter();
        let shared = shared.filter_map(|session| Arc::into_inner(session.shared));
        let mut holds: Vec<LeaseHold> = shared.map(|shared| shared.lease).collect();
        LeaseHold::end_all(&mut holds);
    }

    /// Whether both are handles on one session.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The object's key.
    pub fn key(&self) -> &ObjectKey {
        &self.shared.lease.lease().object().key
    }

    /// The object's size in bytes.
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// The object's version. It stays the same for the life of the session.
    pub fn generation(&self) -> Generation {
        self.shared.lease.lease().object().generation
    }

    /// Whose bytes these are, if the writer said so.
    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.shared.fingerprint
    }

    /// The layout that the writer used; 0: none.
    pub fn layout_id(&self) -> u64 {
        self.shared.layout_id
    }

    /// The ranges as they were written. A read is verified where it takes in whole ones.
    pub fn written_ranges(&self) -> &Rows {
        &self.shared.rows
    }
}

impl fmt::Debug for GetSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GetSession")
            .field("object", self.shared.lease.lease().object())
            .field("size", &self.shared.size)
            .finish_non_exhaustive()
    }
}
