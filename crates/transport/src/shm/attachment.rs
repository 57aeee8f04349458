//! An owner on this host, as an initiator sees it once they have greeted each other.
//!
//! [`Attachment`] holds the socket, the owner's table, this engine's slots there, and the regions that
//! were opened, each with its mapping. It lives as long as anything copies through it: the socket is
//! closed by its last drop, so to the owner a hang-up means that no copy of this engine is under way.
//! Regions are dropped from the cache when they are withdrawn; their mappings go with the last copy.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use layercake_protocol::ids::{Capability, EngineId, RegionId};
use parking_lot::{Mutex, RwLock};
use rustix::fs::SealFlags;
use rustix::process::Pid;

use super::cma::{self, Range};
use super::initiator::Parking;
use super::raw::View;
use super::slots::PeerSlots;
use super::socket::Channel;
use super::table::{Entry, PeerTable};
use super::wire::Message;
use crate::batch::{Direction, RemoteSlice};
use crate::error::Refusal;
use crate::memory::{TAG_GRANULE, tag_granules};
use crate::racy::Target;

/// See the module's text.
pub(super) struct Attachment {
    pub(super) owner: EngineId,
    pub(super) channel: Arc<Channel>,
    pub(super) slots: PeerSlots,
    /// The owner's process, for memory that is reached by address.
    pub(super) pid: Pid,
    /// Jobs that wait for regions to be opened.
    pub(super) parking: Mutex<Parking>,
    table: PeerTable,
    regions: RwLock<BTreeMap<RegionId, Arc<RegionView>>>,
    /// Whether the kernel lets this process reach the owner's memory by address.
    by_address: AtomicBool,
}

/// A region that the owner opened. Valid as long as its entry has the same version.
pub(super) struct RegionView {
    pub(super) capability: Capability,
    pub(super) entry: Entry,
    pub(super) backing: Backing,
    index: u32,
    version: u64,
}

/// How the bytes of a region are reached.
pub(super) enum Backing {
    /// In this process's own address space.
    Mapped { memory: View, tags: Option<View> },
    /// By address in the owner's, through the kernel.
    ByAddress,
}

impl Attachment {
    /// What [`Message::Attached`] and its two descriptors make.
    pub(super) fn new(
        owner: EngineId,
        channel: Arc<Channel>,
        table: OwnedFd,
        slots: OwnedFd,
        probe: (u64, u128),
    ) -> io::Result<Self> {
        let pid = channel.pid();
        Ok(Self {
            owner,
            slots: PeerSlots::map(slots)?,
            pid,
            parking: Mutex::default(),
            table: PeerTable::map(table)?,
            regions: RwLock::default(),
            by_address: AtomicBool::new(probe_memory(pid, probe)),
            channel,
        })
    }

    /// Whether the owner is still there, later than whatever the caller has written and read. Asks the
    /// kernel only if the owner does not say so itself.
    pub(super) fn is_alive(&self) -> bool {
        fence(Ordering::SeqCst);
        self.table.is_owner_here() || self.channel.is_open()
    }

    pub(super) fn reaches_by_address(&self) -> bool {
        self.by_address.load(Ordering::Relaxed)
    }

    /// Notes that the kernel stopped allowing it.
    pub(super) fn give_up_by_address(&self) {
        if self.by_address.swap(false, Ordering::Relaxed) {
            tracing::debug!(owner = %self.owner, "its memory can't be reached by address any more");
        }
    }

    /// Makes a region of what the owner answered, and keeps it.
    pub(super) fn open(
        &self,
        region: RegionId,
        capability: Capability,
        index: u32,
        (memory, tags): (Option<OwnedFd>, Option<OwnedFd>),
    ) -> io::Result<Result<Arc<RegionView>, Refusal>> {
        let Some((version, entry)) = self.table.read(index) else {
            // Withdrawn meanwhile.
            return Ok(Err(Refusal::UnknownRegion));
        };
        if entry.region != region {
            return Ok(Err(Refusal::UnknownRegion));
        }
        if entry.digest != capability.digest() {
            return Ok(Err(Refusal::BadCapability));
        }
        let writable = entry.access.allows_write();
        let map = |file, len| View::of_peer(file, len, writable, SealFlags::empty());
        let backing = match memory {
            Some(memory) => Backing::Mapped {
                memory: map(memory, entry.len)?,
                tags: match tags {
                    Some(tags) => Some(map(tags, entry.len.div_ceil(TAG_GRANULE) * 8)?),
                    None => None,
                },
            },
            None => Backing::ByAddress,
        };
        let view = Arc::new(RegionView {
            capability,
            entry,
            backing,
            index,
            version,
        });
        self.regions.write().insert(region, Arc::clone(&view));
        Ok(Ok(view))
    }

    /// The region, if it was opened and is not withdrawn.
    pub(super) fn region(&self, region: RegionId) -> Option<Arc<RegionView>> {
        let view = self.regions.read().get(&region).cloned()?;
        if self.is_current(&view) {
            return Some(view);
        }
        self.forget(region);
        None
    }

    /// Drops a region's mapping; copies under way keep it until they are over.
    pub(super) fn forget(&self, region: RegionId) {
        let gone = self.regions.write().remove(&region);
        drop(gone);
    }

    /// Whether the owner still shows this region. With a slot raised before, the answer holds until
    /// the slot is lowered, as far as the owner waits.
    pub(super) fn is_current(&self, view: &RegionView) -> bool {
        self.table.is_current(view.index, view.version)
    }

    /// Lets the owner count pieces that were refused here on its behalf.
    pub(super) fn report_violations(&self, pieces: u32) {
        let message = Message::Violations { pieces };
        if let Err(error) = self.channel.send(&message.encode(), &[]) {
            tracing::debug!(owner = %self.owner, %error, "refused pieces are not reported");
        }
    }
}

/// Whether the memory of this process can be read, and is that of the owner.
fn probe_memory(pid: Pid, (addr, expected): (u64, u128)) -> bool {
    let mut word = [0; 16];
    let range = Range::Read {
        remote: addr,
        local: Target::from_slice(&mut word),
    };
    let read = cma::transfer(pid, &[range], || true);
    read == [Ok(())] && u128::from_le_bytes(word) == expected
}

impl RegionView {
    /// What an owner would check before it lets a peer move these bytes.
    pub(super) fn check(&self, direction: Direction, remote: &RemoteSlice) -> Result<(), Refusal> {
        if !self.capability.matches(&remote.capability) {
            return Err(Refusal::BadCapability);
        }
        let allowed = match direction {
            Direction::Read => self.entry.access.allows_read(),
            Direction::Write => self.entry.access.allows_write(),
        };
        if !allowed {
            return Err(Refusal::AccessDenied);
        }
        let end = remote.offset.checked_add(remote.len);
        if end.is_none_or(|end| end > self.entry.len) {
            return Err(Refusal::OutOfBounds);
        }
        Ok(())
    }

    /// Whether these bytes are reached without bringing pages into this process's page tables first.
    pub(super) fn is_present(&self, offset: u64, len: u64) -> bool {
        match &self.backing {
            Backing::Mapped { memory, .. } => memory.is_present(offset, len),
            Backing::ByAddress => true,
        }
    }

    /// The tags of the granules that a range touches; refused where there are none. The range was checked.
    pub(super) fn tags_of(&self, offset: u64, len: u64) -> Result<&[AtomicU64], Refusal> {
        let tags = self.tags()?.words();
        tags.get(tag_granules(offset, len)).ok_or(Refusal::NoTags)
    }

    fn tags(&self) -> Result<&View, Refusal> {
        match &self.backing {
            Backing::Mapped {
                tags: Some(tags), ..
            } => Ok(tags),
            _ => Err(Refusal::NoTags),
        }
    }
}

impl fmt::Debug for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attachment")
            .field("owner", &self.owner)
            .field("pid", &self.pid)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for RegionView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegionView")
            .field("entry", &self.entry)
            .finish_non_exhaustive()
    }
}
