//! The owner's side: what peers on this host may reach, who they are, and when they are done.
//!
//! [`Exports`] keeps the table in step with the registry, knows every attached peer (socket, slots,
//! regions that it opened), and answers three questions that have to wait for peers: is a withdrawn
//! region untouched by now, are all copies over that a peer had begun, has a peer gone.
//!
//! A peer is there from before it is sent its descriptors until its socket hangs up, also if it broke
//! the protocol and is not listened to any more. The kernel closes the socket when the process is gone,
//! however it ended, after its last instruction; so when a peer counts as gone, nothing of it can write
//! any more. Waiting looks at sockets itself and does not depend on the service thread.
//!
//! What was under way when a region was withdrawn is remembered until it is over: asking again does
//! not wait for what the same peers have begun elsewhere since.
//!
//! Lock order: `published`, `withdrawing`, `peers`. Nothing is sent to a peer that could block.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, EngineId, RegionId};
use mio::Waker;
use parking_lot::{Condvar, Mutex};

use super::raw::reopen_read_only;
use super::slots::{OwnerSlots, Raised};
use super::socket::Channel;
use super::table::{Entry, Table};
use super::wire::{Message, NotOpenedReason};
use crate::error::Refusal;
use crate::memory::{Access, RegionEntry, RegionObserver, Registry};

/// The most peers that may be attached at once.
const MAX_PEERS: usize = 4096;

/// How often a wait looks at the slots: at first, and at most.
const FIRST_LOOK: Duration = Duration::from_micros(20);
const LAST_LOOK: Duration = Duration::from_millis(2);

/// An attached peer, as long as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PeerKey(u64);

struct Peer {
    engine: EngineId,
    channel: Arc<Channel>,
    slots: OwnerSlots,
    /// Regions that it may be copying from or to.
    opened: HashSet<RegionId>,
}

#[derive(Default)]
struct Peers {
    next: u64,
    attached: BTreeMap<PeerKey, Peer>,
}

/// Copies that peers had under way at one moment.
#[derive(Debug)]
pub(crate) struct UnderWay(Vec<(PeerKey, Raised)>);

/// What goes with [`Message::Opened`].
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) message: Message,
    pub(super) descriptors: Vec<OwnedFd>,
}

/// See the module's text.
pub(super) struct Exports {
    table: Table,
    published: Mutex<HashMap<RegionId, u32>>,
    /// Regions whose last copies are waited for.
    withdrawing: Mutex<HashMap<RegionId, Arc<UnderWay>>>,
    peers: Mutex<Peers>,
    /// A peer went away.
    departed: Condvar,
    service: Option<Arc<Waker>>,
}

impl Exports {
    /// `service` is woken for regions that were dropped while in use.
    pub(super) fn create(service: Option<Arc<Waker>>) -> io::Result<Self> {
        Ok(Self {
            table: Table::create()?,
            published: Mutex::default(),
            withdrawing: Mutex::default(),
            peers: Mutex::default(),
            departed: Condvar::new(),
            service,
        })
    }

    /// The table's file, to be sent to peers.
    pub(super) fn table_file(&self) -> BorrowedFd<'_> {
        self.table.file()
    }

    /// Runs all that the service thread does. Peers see by it that this engine is there.
    pub(super) fn while_here<T>(&self, work: impl FnOnce() -> T) -> T {
        self.table.while_here(work)
    }

    /// Notes a peer that is about to get its descriptors; returns its slots' file. None if there are
    /// too many.
    pub(super) fn attach(
        &self,
        engine: EngineId,
        channel: Arc<Channel>,
    ) -> io::Result<Option<(PeerKey, OwnedFd)>> {
        let (file, slots) = OwnerSlots::create()?;
        let mut peers = self.peers.lock();
        if peers.attached.len() >= MAX_PEERS {
            return Ok(None);
        }
        peers.next += 1;
        let key = PeerKey(peers.next);
        let peer = Peer {
            engine,
            channel,
            slots,
            opened: HashSet::new(),
        };
        peers.attached.insert(key, peer);
        Ok(Some((key, file)))
    }

    /// Notes that a peer's socket hung up. Its slots don't count any more.
    pub(super) fn detach(&self, key: PeerKey) {
        let gone = self.peers.lock().attached.remove(&key);
        self.departed.notify_all();
        if let Some(peer) = gone {
            tracing::debug!(peer = %peer.engine, "a peer on this host is gone");
        }
    }

    /// Opens a region for a peer that names its capability.
    pub(super) fn open(
        &self,
        registry: &Registry,
        key: PeerKey,
        region: RegionId,
        capability: &Capability,
    ) -> Result<Opened, NotOpenedReason> {
        let refused = NotOpenedReason::Refused;
        let entry = registry
            .find(region)
            .ok_or(refused(Refusal::UnknownRegion))?;
        if !entry.capability().matches(capability) {
            return Err(refused(Refusal::BadCapability));
        }
        if entry.access() == Access::LocalOnly {
            return Err(refused(Refusal::AccessDenied));
        }
        let index = {
            let published = self.published.lock();
            let index = published.get(&region).copied();
            let index = index.ok_or(NotOpenedReason::NotShared)?;
            // Under both locks: whoever withdraws the region either finds it opened or is early
            // enough for the peer to see it withdrawn.
            if let Some(peer) = self.peers.lock().attached.get_mut(&key) {
                peer.opened.insert(region);
            }
            index
        };
        let writable = entry.access().allows_write();
        let files = [entry.fd(), entry.tag_fd()];
        let descriptors = files
            .into_iter()
            .flatten()
            .map(|file| share(file, writable));
        let descriptors = descriptors.collect::<io::Result<Vec<_>>>();
        let descriptors = descriptors.map_err(|error| {
            tracing::debug!(%region, %error, "a region can't be passed to a peer");
            NotOpenedReason::NotShared
        })?;
        let message = Message::Opened {
            region,
            capability: *capability,
            index,
            mapped: entry.fd().is_some(),
            tags: entry.tag_fd().is_some(),
        };
        Ok(Opened {
            message,
            descriptors,
        })
    }

    /// Whether an engine is attached now. Asks the kernel, so that a peer that just died is not.
    pub(super) fn is_attached(&self, engine: EngineId) -> bool {
        let mut peers = self.peers.lock();
        let mut found = false;
        peers.attached.retain(|_, peer| {
            let open = peer.engine != engine || peer.channel.is_open();
            found |= open && peer.engine == engine;
            open
        });
        found
    }

    /// Waits until an engine is not attached; says whether that came about by `until`.
    pub(super) fn wait_detached(&self, engine: EngineId, until: Instant) -> bool {
        let mut look = FIRST_LOOK;
        while self.is_attached(engine) {
            let now = Instant::now();
            if now >= until {
                return false;
            }
            let mut peers = self.peers.lock();
            if peers.attached.values().any(|peer| peer.engine == engine) {
                // Woken by the service when it sees the hang-up; the rest is for when it has ended.
                self.departed.wait_until(&mut peers, until.min(now + look));
                look = (look * 2).min(Duration::from_millis(50));
            }
        }
        true
    }

    /// The copies that this engine (or any) has under way now: copies that begin later see what the
    /// caller has stored before.
    pub(super) fn under_way(&self, engine: Option<EngineId>) -> UnderWay {
        self.under_way_where(|peer| engine.is_none_or(|engine| peer.engine == engine))
    }

    fn under_way_where(&self, concerns: impl Fn(&Peer) -> bool) -> UnderWay {
        let peers = self.peers.lock();
        let concerned = peers.attached.iter().filter(|(_, peer)| concerns(peer));
        let raised = concerned.map(|(key, peer)| (*key, peer.slots.raised()));
        UnderWay(raised.filter(|(_, raised)| !raised.is_empty()).collect())
    }

    /// Whether those copies are over.
    pub(super) fn are_over(&self, under_way: &UnderWay) -> bool {
        self.peers.lock().are_over(under_way)
    }

    /// Waits until those copies are over; says whether that came about by `until`.
    pub(super) fn wait_over(&self, under_way: &UnderWay, until: Instant) -> bool {
        let mut peers = self.peers.lock();
        let mut look = FIRST_LOOK;
        loop {
            if peers.are_over(under_way) {
                return true;
            }
            let now = Instant::now();
            if now >= until {
                return false;
            }
            self.departed.wait_until(&mut peers, until.min(now + look));
            look = (look * 2).min(LAST_LOOK);
        }
    }

    fn tell_withdrawn(&self, region: RegionId) {
        let message = Message::Withdrawn { region }.encode();
        let peers = self.peers.lock();
        for peer in peers.attached.values() {
            if peer.opened.contains(&region)
                && let Err(error) = peer.channel.send(&message, &[])
            {
                // It will notice when it uses the region next.
                tracing::debug!(peer = %peer.engine, %region, %error, "not told of a withdrawal");
            }
        }
    }

    /// Withdraws everything, waits for copies under way, and tells peers that this engine is closing.
    /// Peers that are still copying at `until` stay known, for later waits to ask about.
    pub(super) fn close(&self, until: Instant) -> bool {
        self.table.leave();
        let published = std::mem::take(&mut *self.published.lock());
        for index in published.into_values() {
            self.table.withdraw(index);
        }
        let quiet = self.wait_over(&self.under_way(None), until);
        let mut peers = self.peers.lock();
        for peer in peers.attached.values() {
            peer.channel.close_sending();
        }
        if quiet {
            peers.attached.clear();
            self.departed.notify_all();
        }
        quiet
    }
}

impl Peers {
    fn are_over(&mut self, under_way: &UnderWay) -> bool {
        let mut copies = under_way.0.iter();
        copies.all(|(key, raised)| !self.is_busy(*key, raised))
    }

    /// Whether a peer still has a slot of these raised. Forgets it if it has gone.
    fn is_busy(&mut self, key: PeerKey, raised: &Raised) -> bool {
        let Some(peer) = self.attached.get(&key) else {
            return false;
        };
        if peer.slots.are_over(raised) {
            return false;
        }
        if peer.channel.is_open() {
            return true;
        }
        self.attached.remove(&key);
        false
    }
}

/// A descriptor for a peer: as capable as the region's access, no more.
fn share(file: BorrowedFd<'_>, writable: bool) -> io::Result<OwnedFd> {
    if writable {
        file.as_fd().try_clone_to_owned()
    } else {
        reopen_read_only(file)
    }
}

impl RegionObserver for Exports {
    fn published(&self, entry: &Arc<RegionEntry>) {
        if entry.access() == Access::LocalOnly {
            return;
        }
        let mapped = entry.fd().is_some();
        let shown = self.table.publish(Entry {
            region: entry.id(),
            base: if mapped { 0 } else { entry.addr() as u64 },
            len: entry.len(),
            digest: entry.capability().digest(),
            access: entry.access(),
            kind: entry.kind(),
            mapped,
            tags: entry.tag_fd().is_some(),
        });
        let Some(index) = shown else {
            tracing::warn!(
                region = %entry.id(),
                "the table of shared regions is full: this one is reached by tcp only"
            );
            return;
        };
        self.published.lock().insert(entry.id(), index);
    }

    fn withdrawn(&self, entry: &Arc<RegionEntry>, until: Instant) -> bool {
        let region = entry.id();
        let shown = {
            let mut published = self.published.lock();
            let shown = published.remove(&region);
            if let Some(index) = shown {
                self.table.withdraw(index);
            }
            shown
        };
        if shown.is_some() {
            self.tell_withdrawn(region);
        }
        let under_way = {
            let mut withdrawing = self.withdrawing.lock();
            let under_way = withdrawing.entry(region).or_insert_with(|| {
                Arc::new(self.under_way_where(|peer| peer.opened.contains(&region)))
            });
            Arc::clone(under_way)
        };
        let quiet = self.wait_over(&under_way, until);
        if quiet {
            let mut peers = self.peers.lock();
            for peer in peers.attached.values_mut() {
                peer.opened.remove(&region);
            }
            drop(peers);
            // Whoever asks at the same time finds either this or nobody who opened the region.
            self.withdrawing.lock().remove(&region);
        }
        quiet
    }

    fn lingers(&self) {
        if let Some(service) = &self.service
            && let Err(error) = service.wake()
        {
            tracing::error!(%error, "the shared-memory thread can't be woken");
        }
    }
}

impl fmt::Debug for Exports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exports")
            .field("peers", &self.peers.lock().attached.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
