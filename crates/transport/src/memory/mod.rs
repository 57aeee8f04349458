//! Memory that an engine knows: allocated by it or given to it, and registered under an id.
//!
//! A [`Memory`] owns its registration and, unless it was registered by address, the bytes. The
//! registry knows what is registered and who may touch it; transports look operations up there and
//! pin the region for as long as they move bytes of it. Withdrawing a region refuses new operations
//! at once and then waits for the pins, so no byte moves after [`Memory::unregister`] returned `Ok`.
//! A handle that is merely dropped withdraws without waiting; its bytes are kept until the last pin
//! is gone.
//!
//! Lock order: the registry's map before an entry's waiters. No lock is held while bytes move.

mod grace;
mod raw;
mod region;
mod registry;
mod slice;
mod tags;

pub use region::RegionDescriptor;
pub use slice::LocalSlice;
pub use tags::TAG_GRANULE;

pub(crate) use grace::Mark;
pub(crate) use raw::Mapping;
pub(crate) use region::{Pins, RegionEntry, Served};
pub(crate) use registry::{RegionObserver, Registry};
pub(crate) use tags::{
    are_at, check_tags, claim_tags, confirm_tags, raise_to, settle, tag_granules, warm_tags,
};

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Generation, RegionId};

use crate::error::Error;

/// What peers may do with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Access {
    /// Nothing: it is for this engine's own transfers.
    #[default]
    LocalOnly,
    /// Read.
    RemoteRead,
    /// Write.
    RemoteWrite,
    /// Read and write.
    RemoteReadWrite,
}

impl Access {
    /// Whether peers may read.
    pub const fn allows_read(self) -> bool {
        matches!(self, Self::RemoteRead | Self::RemoteReadWrite)
    }

    /// Whether peers may write.
    pub const fn allows_write(self) -> bool {
        matches!(self, Self::RemoteWrite | Self::RemoteReadWrite)
    }
}

/// How memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AllocateOptions {
    /// What peers may do with it. Default: nothing.
    pub access: Access,
    /// Whether each granule of [`TAG_GRANULE`] bytes gets a generation tag.
    pub generation_tags: bool,
    /// Touches every page before returning: the first transfer then does not pay for it.
    pub pretouch: bool,
    /// Asks for huge pages, and takes ordinary ones where there are none.
    pub huge_pages: bool,
}

/// Bytes that the caller gives away to be registered. They are freed when the region is gone and no
/// transfer touches them.
#[derive(Debug)]
pub struct HostBuffer(Box<[u8]>);

impl From<Box<[u8]>> for HostBuffer {
    fn from(bytes: Box<[u8]>) -> Self {
        Self(bytes)
    }
}

impl From<Vec<u8>> for HostBuffer {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into_boxed_slice())
    }
}

impl HostBuffer {
    pub(crate) fn into_inner(self) -> Box<[u8]> {
        self.0
    }
}

/// Registered memory. Clones share it; the last one to go withdraws the region.
#[derive(Clone)]
pub struct Memory {
    inner: Arc<Registration>,
}

struct Registration {
    entry: Arc<RegionEntry>,
    registry: Arc<Registry>,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.abandon(&self.entry);
    }
}

impl Memory {
    pub(crate) fn new(entry: Arc<RegionEntry>, registry: Arc<Registry>) -> Self {
        Self {
            inner: Arc::new(Registration { entry, registry }),
        }
    }

    pub(crate) fn entry(&self) -> &Arc<RegionEntry> {
        &self.inner.entry
    }

    /// The region's id.
    pub fn id(&self) -> RegionId {
        self.entry().id()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.entry().len()
    }

    /// Never: a region has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a peer needs to name this region.
    pub fn region(&self) -> RegionDescriptor {
        self.entry().descriptor()
    }

    /// First address, in this process.
    pub fn addr(&self) -> usize {
        self.entry().addr()
    }

    /// A part of it, for a piece of a batch.
    pub fn slice(&self, offset: u64, len: u64) -> Result<LocalSlice, Error> {
        self.entry().check_range(offset, len)?;
        Ok(LocalSlice::new(self.clone(), offset, len))
    }

    /// Copies bytes in. Peers that read the place meanwhile see a mixture.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.entry().copy_in(offset, bytes)
    }

    /// Copies bytes out. Peers that write to the place meanwhile may leave a mixture.
    pub fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.entry().copy_out(offset, bytes)
    }

    /// Raises the tags of all granules that the range touches to at least `generation`: writers of
    /// earlier generations are refused from here on, and readers notice. Waits for nothing.
    pub fn fence(&self, offset: u64, len: u64, generation: Generation) -> Result<(), Error> {
        self.entry().check_range(offset, len)?;
        let tags = self
            .entry()
            .tags()
            .ok_or(Error::NoTags { region: self.id() })?;
        tags::raise_tags(&tags[tag_granules(offset, len)], generation);
        Ok(())
    }

    /// The tags of all granules that the range touches.
    pub fn tags(&self, offset: u64, len: u64) -> Result<Vec<Generation>, Error> {
        self.entry().check_range(offset, len)?;
        let tags = self
            .entry()
            .tags()
            .ok_or(Error::NoTags { region: self.id() })?;
        Ok(tags::read_tags(&tags[tag_granules(offset, len)]))
    }

    /// Withdraws the region: peers and own batches are refused from here on. Returns when no transfer
    /// moves bytes of it any more. After [`Error::StillInFlight`] the region stays withdrawn, and the
    /// call can be repeated to wait on. Repeating it after success is harmless.
    pub fn unregister(&self, deadline: Duration) -> Result<(), Error> {
        let start = Instant::now();
        let until = start.checked_add(deadline).unwrap_or(start);
        if self.inner.registry.withdraw(self.entry(), until) {
            Ok(())
        } else {
            Err(Error::StillInFlight {
                region: self.id(),
                waited: start.elapsed(),
            })
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory")
            .field("region", &self.id())
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
