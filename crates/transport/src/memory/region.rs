//! One registered region: where its bytes are, who may touch them, and how many are at it.

use std::fmt;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use layercake_protocol::ids::{Capability, Generation, MemoryKind, RegionId};
use parking_lot::{Condvar, Mutex};
use smallvec::SmallVec;

use super::grace::Begun;
use super::raw::{self, Mapping, OwnedBytes};
use super::{Access, check_tags, claim_tags, confirm_tags, tag_granules};
use crate::batch::Direction;
use crate::error::{Error, Refusal};
use crate::racy::{self, Source, Target};

/// What a peer needs to name a region. The capability is a secret: whoever has it may use the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// The region.
    pub region: RegionId,
    /// Its length in bytes.
    pub len: u64,
    /// What opens it.
    pub capability: Capability,
    /// What kind of memory it is.
    pub kind: MemoryKind,
}

/// Where a region's bytes come from.
pub(crate) enum Backing {
    /// A sealed memfd, mapped.
    Shared { fd: OwnedFd, map: Mapping },
    /// A buffer that was given away.
    Owned(OwnedBytes),
    /// The caller's memory, vouched for when it was registered.
    Foreign { addr: usize },
}

/// The tags of a region, in a sealed memfd of their own.
pub(crate) struct TagMemory {
    pub(crate) fd: OwnedFd,
    pub(crate) map: Mapping,
}

pub(crate) struct RegionEntry {
    id: RegionId,
    capability: Capability,
    access: Access,
    kind: MemoryKind,
    addr: usize,
    len: u64,
    backing: Backing,
    tags: Option<TagMemory>,
    /// Operations at work, and [`WITHDRAWN`].
    pins: AtomicU64,
    lock: Mutex<()>,
    drained: Condvar,
}

const WITHDRAWN: u64 = 1 << 63;

impl RegionEntry {
    pub(crate) fn new(
        id: RegionId,
        access: Access,
        kind: MemoryKind,
        len: u64,
        backing: Backing,
        tags: Option<TagMemory>,
    ) -> Self {
        let addr = match &backing {
            Backing::Shared { map, .. } => map.addr(),
            Backing::Owned(bytes) => bytes.addr(),
            Backing::Foreign { addr } => *addr,
        };
        Self {
            id,
            capability: Capability::draw(),
            access,
            kind,
            addr,
            len,
            backing,
            tags,
            pins: AtomicU64::new(0),
            lock: Mutex::new(()),
            drained: Condvar::new(),
        }
    }

    pub(crate) fn id(&self) -> RegionId {
        self.id
    }

    /// Whether it is the caller's memory, not the engine's own.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self.backing, Backing::Foreign { .. })
    }

    pub(crate) fn capability(&self) -> &Capability {
        &self.capability
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn kind(&self) -> MemoryKind {
        self.kind
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The memfd behind it, for regions that were allocated here.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.backing {
            Backing::Shared { fd, .. } => Some(fd.as_fd()),
            Backing::Owned(_) | Backing::Foreign { .. } => None,
        }
    }

    /// The memfd of the tags, one `u64` per granule.
    pub(crate) fn tag_fd(&self) -> Option<BorrowedFd<'_>> {
        self.tags.as_ref().map(|tags| tags.fd.as_fd())
    }

    pub(crate) fn tags(&self) -> Option<&[AtomicU64]> {
        self.tags.as_ref().map(|tags| tags.map.atomics())
    }

    pub(crate) fn descriptor(&self) -> RegionDescriptor {
        RegionDescriptor {
            region: self.id,
            len: self.len,
            capability: self.capability,
            kind: self.kind,
        }
    }

    fn contains(&self, offset: u64, len: u64) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.len)
    }

    pub(crate) fn check_range(&self, offset: u64, len: u64) -> Result<(), Error> {
        if self.contains(offset, len) {
            Ok(())
        } else {
            Err(Error::OutOfBounds {
                region: self.id,
                region_len: self.len,
                offset,
                len,
            })
        }
    }

    /// Whether a peer may move these bytes, its capability apart. `direction` is the peer's.
    pub(crate) fn check_op(
        &self,
        direction: Direction,
        offset: u64,
        len: u64,
    ) -> Result<(), Refusal> {
        let allowed = match direction {
            Direction::Read => self.access.allows_read(),
            Direction::Write => self.access.allows_write(),
        };
        if !allowed {
            return Err(Refusal::AccessDenied);
        }
        if len == 0 {
            return Err(Refusal::BadLength);
        }
        if !self.contains(offset, len) {
            return Err(Refusal::OutOfBounds);
        }
        Ok(())
    }

    /// The tags of the granules that a range touches; refused where there are none. The range was checked.
    pub(crate) fn tags_of(&self, offset: u64, len: u64) -> Result<&[AtomicU64], Refusal> {
        let tags = self.tags().ok_or(Refusal::NoTags)?;
        Ok(&tags[tag_granules(offset, len)])
    }

    /// The tag rule before the first byte (see [`super::tags`]). The range was checked.
    pub(crate) fn check_before(
        &self,
        direction: Direction,
        offset: u64,
        len: u64,
        generation: Generation,
    ) -> Result<(), Refusal> {
        let tags = self.tags_of(offset, len)?;
        match direction {
            Direction::Read => check_tags(tags, generation),
            Direction::Write => claim_tags(tags, generation),
        }
    }

    /// The tag rule after the last byte.
    pub(crate) fn check_after(
        &self,
        offset: u64,
        len: u64,
        generation: Generation,
    ) -> Result<(), Refusal> {
        let tags = self.tags_of(offset, len)?;
        confirm_tags(tags, generation)
    }

    /// Bytes inside the region, to copy from; none if the range lies outside.
    pub(crate) fn source(&self, offset: u64, len: usize) -> Option<Source<'_>> {
        self.contains(offset, len as u64)
            .then(|| raw::source(self, offset, len))
    }

    /// Bytes inside the region, to copy to; none if the range lies outside.
    pub(crate) fn target(&self, offset: u64, len: usize) -> Option<Target<'_>> {
        self.contains(offset, len as u64)
            .then(|| raw::target(self, offset, len))
    }

    fn outside(&self, offset: u64, len: usize) -> Error {
        Error::OutOfBounds {
            region: self.id,
            region_len: self.len,
            offset,
            len: len as u64,
        }
    }

    pub(super) fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let target = self
            .target(offset, bytes.len())
            .ok_or_else(|| self.outside(offset, bytes.len()))?;
        racy::copy(target, Source::from_slice(bytes));
        Ok(())
    }

    pub(super) fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let source = self
            .source(offset, bytes.len())
            .ok_or_else(|| self.outside(offset, bytes.len()))?;
        racy::copy(Target::from_slice(bytes), source);
        Ok(())
    }

    /// The address of a byte inside the region.
    pub(crate) fn place(&self, offset: u64) -> usize {
        self.addr + usize::try_from(offset).expect("an offset inside mapped memory fits")
    }

    /// Keeps the region in place while bytes of it move; none if it was withdrawn.
    pub(crate) fn pin(self: &Arc<Self>) -> Option<RegionPin> {
        let before = self.pins.fetch_add(1, Ordering::AcqRel);
        let pin = RegionPin(Arc::clone(self));
        (before & WITHDRAWN == 0).then_some(pin)
    }

    /// Stops new pins.
    pub(super) fn set_withdrawn(&self) {
        self.pins.fetch_or(WITHDRAWN, Ordering::AcqRel);
    }

    pub(super) fn is_drained(&self) -> bool {
        self.pins.load(Ordering::Acquire) & !WITHDRAWN == 0
    }

    /// Waits for the pins to go; says whether they did.
    pub(super) fn wait_drained(&self, until: Instant) -> bool {
        let mut guard = self.lock.lock();
        while !self.is_drained() {
            if self.drained.wait_until(&mut guard, until).timed_out() {
                return self.is_drained();
            }
        }
        true
    }
}

impl fmt::Debug for RegionEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionEntry")
            .field("id", &self.id)
            .field("len", &self.len)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

/// An operation at work on a region.
#[derive(Debug)]
pub(crate) struct RegionPin(Arc<RegionEntry>);

/// The pins of a batch: one or two, mostly.
pub(crate) type Pins = SmallVec<[RegionPin; 2]>;

impl RegionPin {
    pub(crate) fn entry(&self) -> &Arc<RegionEntry> {
        &self.0
    }

    pub(crate) fn id(&self) -> RegionId {
        self.0.id
    }
}

/// An operation at work on a region on behalf of a peer: pinned, and waited for by
/// [`Engine::quiet_mark`](crate::Engine::quiet_mark).
#[derive(Debug)]
pub(crate) struct Served {
    pin: RegionPin,
    _begun: Begun,
}

impl Served {
    pub(super) fn new(pin: RegionPin, begun: Begun) -> Self {
        Self { pin, _begun: begun }
    }

    pub(crate) fn entry(&self) -> &Arc<RegionEntry> {
        self.pin.entry()
    }
}

impl Drop for RegionPin {
    fn drop(&mut self) {
        let before = self.0.pins.fetch_sub(1, Ordering::AcqRel);
        if before & WITHDRAWN != 0 && before & !WITHDRAWN == 1 {
            // With the lock held, a waiter is either before its check or asleep.
            let _guard = self.0.lock.lock();
            self.0.drained.notify_all();
        }
    }
}
