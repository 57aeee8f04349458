//! The handle on a put session.

use std::fmt;
use std::sync::Arc;

use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::Replica;

use super::put::{Abandoned, PutShared};
use super::source::Source;
use crate::client::Core;

/// An object that is being written. Made by [`StoreClient::start_puts`](crate::StoreClient::start_puts);
/// dropping it revokes the reservation in the background.
pub struct PutSession {
    shared: Arc<PutShared>,
    core: Arc<Core>,
}

impl PutSession {
    pub(crate) fn new(shared: Arc<PutShared>, core: Arc<Core>) -> Self {
        Self { shared, core }
    }

    pub(crate) fn shared(&self) -> &Arc<PutShared> {
        &self.shared
    }

    /// The object's key.
    pub fn key(&self) -> &ObjectKey {
        &self.shared.object.key
    }

    /// The object's size in bytes.
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// The reservation, which is also the object's version once it is committed.
    pub fn generation(&self) -> Generation {
        self.shared.object.generation
    }

    /// The epoch of the reservation: the caller's, or the one that the master drew. Further calls for the
    /// same prefix pass it on.
    pub fn epoch(&self) -> Epoch {
        self.shared.header.epoch
    }

    /// Where the bytes go: one entry per replica.
    pub fn replicas(&self) -> impl ExactSizeIterator<Item = Replica> {
        self.shared.places.iter().map(|place| place.replica)
    }

    /// From here on the session is written from memory that its owner may [withdraw](Source::withdraw): what is not
    /// written by then counts as not written, and is not published. Another source, of the same bytes, goes on where
    /// that one stopped; calls that are under way stay with theirs.
    pub fn write_from(&self, source: Source) {
        self.shared.set_source(source);
    }

    /// What an end would refuse for: bytes that nobody wrote, or whose last write failed. In order.
    pub fn missing(&self) -> Vec<ByteRange> {
        self.shared
            .with(|state| state.written().missing(self.shared.size).collect())
    }

    /// Bytes written so far, each counted once.
    pub fn written_bytes(&self) -> u64 {
        self.shared.with(|state| state.written().covered())
    }
}

impl Drop for PutSession {
    fn drop(&mut self) {
        match self.shared.abandon() {
            Abandoned::Idle => self.core.finisher.settle_later(Arc::clone(&self.shared)),
            Abandoned::Busy => self.core.finisher.left_sealed(&self.shared),
            Abandoned::Over => {}
        }
    }
}

impl fmt::Debug for PutSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PutSession")
            .field("object", &self.shared.object)
            .field("size", &self.shared.size)
            .field("phase", &self.shared.phase())
            .finish_non_exhaustive()
    }
}
