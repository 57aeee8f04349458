//! All regions of one engine.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use layercake_protocol::ids::{Capability, MemoryKind, RegionId};
use parking_lot::{Mutex, RwLock};

use super::grace::{Grace, Mark};
use super::raw::{self, OwnedBytes};
use super::region::{Backing, TagMemory};
use super::{Access, AllocateOptions, HostBuffer, RegionEntry, Served};
use crate::error::{Error, Refusal};

/// Is told of regions as they come and go; a transport that lets peers copy by themselves keeps
/// what it shows to them in step with this.
pub(crate) trait RegionObserver: Send + Sync {
    /// The region may be used by peers from now on, as far as its access says.
    fn published(&self, entry: &Arc<RegionEntry>);

    /// The region is withdrawn: peers must not start copies any more. Returns whether all copies
    /// that peers had begun are over; waits for that no longer than `until`. May be called again.
    fn withdrawn(&self, entry: &Arc<RegionEntry>, until: Instant) -> bool;

    /// A region was dropped while it was in use: [`Registry::reap`] has to be called from time to time,
    /// as long as [`Registry::lingering`] says so.
    fn lingers(&self);
}

pub(crate) struct Registry {
    next: AtomicU64,
    regions: RwLock<HashMap<RegionId, Arc<RegionEntry>>>,
    /// First address to (end, region), for everything whose memory is still in use.
    addresses: Mutex<BTreeMap<usize, (usize, RegionId)>>,
    /// Withdrawn without waiting while transfers were at work on them.
    lingering: Mutex<Vec<Arc<RegionEntry>>>,
    observer: OnceLock<Arc<dyn RegionObserver>>,
    /// Operations on behalf of peers.
    grace: Arc<Grace>,
}

impl Registry {
    pub(crate) fn new() -> Self {
        Self {
            next: AtomicU64::new(1),
            regions: RwLock::default(),
            addresses: Mutex::default(),
            lingering: Mutex::default(),
            observer: OnceLock::new(),
            grace: Arc::default(),
        }
    }

    /// Sets who is told; before the first region, and once.
    pub(crate) fn set_observer(&self, observer: Arc<dyn RegionObserver>) {
        let first = self.observer.set(observer).is_ok();
        debug_assert!(first, "an engine has one observer");
    }

    pub(crate) fn len(&self) -> u64 {
        self.regions.read().len() as u64
    }

    fn next_id(&self) -> RegionId {
        RegionId(self.next.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn allocate(
        &self,
        len: u64,
        options: AllocateOptions,
    ) -> Result<Arc<RegionEntry>, Error> {
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let (fd, map) = raw::allocate("layercake-region", len, options.huge_pages)?;
        if options.pretouch {
            map.pretouch()?;
        }
        let tags = if options.generation_tags {
            let bytes = super::tags::tag_count(len) as u64 * 8;
            let (fd, map) = raw::allocate("layercake-tags", bytes, false)?;
            Some(TagMemory { fd, map })
        } else {
            None
        };
        let backing = Backing::Shared { fd, map };
        self.publish(RegionEntry::new(
            self.next_id(),
            options.access,
            MemoryKind::Host,
            len,
            backing,
            tags,
        ))
    }

    pub(crate) fn register(
        &self,
        buffer: HostBuffer,
        access: Access,
    ) -> Result<Arc<RegionEntry>, Error> {
        let bytes = OwnedBytes::new(buffer.into_inner());
        let len = bytes.len() as u64;
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        let backing = Backing::Owned(bytes);
        self.publish(RegionEntry::new(
            self.next_id(),
            access,
            MemoryKind::Host,
            len,
            backing,
            None,
        ))
    }

    /// The caller vouches for the memory, see [`crate::Engine::register_raw`].
    pub(crate) fn register_foreign(
        &self,
        addr: usize,
        len: u64,
        kind: MemoryKind,
        access: Access,
    ) -> Result<Arc<RegionEntry>, Error> {
        if !matches!(kind, MemoryKind::Host | MemoryKind::PinnedHost) {
            return Err(Error::UnsupportedMemory { kind });
        }
        if len == 0 {
            return Err(Error::EmptyRegion);
        }
        if addr == 0 {
            return Err(Error::NullAddress);
        }
        let backing = Backing::Foreign { addr };
        self.publish(RegionEntry::new(
            self.next_id(),
            access,
            kind,
            len,
            backing,
            None,
        ))
    }

    fn publish(&self, entry: RegionEntry) -> Result<Arc<RegionEntry>, Error> {
        self.reap();
        let (addr, len) = (entry.addr(), entry.len());
        let end = usize::try_from(len)
            .ok()
            .and_then(|len| addr.checked_add(len))
            .ok_or(Error::AddressOverflow { addr, len })?;
        {
            let mut addresses = self.addresses.lock();
            let before = addresses.range(..end).next_back();
            match before.filter(|(_, (other_end, _))| *other_end > addr) {
                None => {
                    addresses.insert(addr, (end, entry.id()));
                }
                Some((_, (_, region))) if entry.is_foreign() => {
                    return Err(Error::Overlap {
                        addr,
                        len,
                        region: *region,
                    });
                }
                // Memory of ours can't be another's as well: its owner gave that back to the allocator
                // without unregistering it, and whoever asks for memory now is not to blame.
                Some(_) => {}
            }
        }
        let entry = Arc::new(entry);
        self.regions.write().insert(entry.id(), Arc::clone(&entry));
        if let Some(observer) = self.observer.get() {
            observer.published(&entry);
        }
        Ok(entry)
    }

    /// The region of that id, if it is registered.
    pub(crate) fn find(&self, region: RegionId) -> Option<Arc<RegionEntry>> {
        self.regions.read().get(&region).cloned()
    }

    /// Pins a region for a peer that has its capability. Each operation is then checked by
    /// [`RegionEntry::check_op`].
    pub(crate) fn open(
        &self,
        region: RegionId,
        capability: &Capability,
    ) -> Result<Served, Refusal> {
        // Counted before the capability and the tags are looked at.
        let begun = self.grace.begin();
        let pin = self
            .find(region)
            .and_then(|entry| entry.pin())
            .ok_or(Refusal::UnknownRegion)?;
        if pin.entry().capability().matches(capability) {
            Ok(Served::new(pin, begun))
        } else {
            Err(Refusal::BadCapability)
        }
    }

    /// Remembers the operations on behalf of peers that have begun by now, on any region, other than
    /// copies by peers themselves.
    pub(crate) fn quiet_mark(&self) -> Mark {
        self.grace.mark()
    }

    /// Whether the operations of a mark are over.
    pub(crate) fn is_over(&self, mark: Mark) -> bool {
        self.grace.is_over(mark)
    }

    /// Waits for the operations of a mark; says whether they are over.
    pub(crate) fn wait_over(&self, mark: Mark, until: Instant) -> bool {
        self.grace.wait_over(mark, until)
    }

    /// Withdraws a region and waits for the operations at work on it; says whether they are over.
    pub(crate) fn withdraw(&self, entry: &Arc<RegionEntry>, until: Instant) -> bool {
        entry.set_withdrawn();
        self.regions.write().remove(&entry.id());
        let peers_done = self
            .observer
            .get()
            .is_none_or(|observer| observer.withdrawn(entry, until));
        let drained = entry.wait_drained(until) && peers_done;
        if drained {
            self.release(entry);
        }
        drained
    }

    fn release(&self, entry: &RegionEntry) {
        let mut addresses = self.addresses.lock();
        if addresses
            .get(&entry.addr())
            .is_some_and(|(_, region)| *region == entry.id())
        {
            addresses.remove(&entry.addr());
        }
    }

    /// Withdraws without waiting; what is still at work keeps the memory.
    pub(crate) fn abandon(&self, entry: &Arc<RegionEntry>) {
        self.reap();
        if self.withdraw(entry, Instant::now()) {
            return;
        }
        self.lingering.lock().push(Arc::clone(entry));
        if let Some(observer) = self.observer.get() {
            observer.lingers();
        }
    }

    /// Abandoned regions that are still in use.
    pub(crate) fn lingering(&self) -> usize {
        self.lingering.lock().len()
    }

    /// Lets go of abandoned regions whose operations are over by now.
    pub(crate) fn reap(&self) {
        // Asked without the lock, and left in the list meanwhile: it says what is in use.
        let candidates: Vec<_> = self.lingering.lock().clone();
        let now = Instant::now();
        for entry in candidates {
            if self.withdraw(&entry, now) {
                let mut lingering = self.lingering.lock();
                lingering.retain(|other| !Arc::ptr_eq(other, &entry));
            }
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.reap();
        for entry in self.lingering.get_mut().drain(..) {
            // A peer may still be copying: leaking the bytes is the lesser evil.
            let _leaked = Arc::into_raw(entry);
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry")
            .field("regions", &self.len())
            .finish_non_exhaustive()
    }
}
