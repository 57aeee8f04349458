//! What an engine shows of its regions to peers that copy by themselves.
//!
//! A file of fixed entries that the owner maps writable and peers can map read-only, and nothing else:
//! it is sealed against further writable mappings. An entry is published under an even version and
//! withdrawn by making the version odd; versions only grow, so one number tells a peer whether the
//! entry is still the one that it looked up. That load is the whole validation of a copy, before and
//! after; see [`super::slots`] for how it works together with the slots.
//!
//! The table's header also says whether the owner is there, see [`super::alive`].
//!
//! Looking an entry up is a sequence lock: version, fields, version again. Fields are atomics, so a
//! look-up that races with the owner reads numbers that don't belong together, notices, and says that
//! there is no entry.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use layercake_protocol::ids::{MemoryKind, RegionId};
use parking_lot::Mutex;
use rustix::fs::SealFlags;

use super::alive;
use super::raw::View;
use crate::memory::Access;

/// Entries of a table. Its pages come into being when they are used.
const CAPACITY: u32 = 1 << 16;

/// Words of the header, and of an entry.
const WORDS: usize = 8;

/// Bytes of the table.
const LEN: u64 = (CAPACITY as u64 + 1) * (WORDS * size_of::<u64>()) as u64;

/// What the header's words hold: which table this is, its layout, and from [`ALIVE`] on whether its owner
/// is there. Owners of earlier versions leave the last at zero, which says nothing.
const MAGIC: u64 = u64::from_le_bytes(*b"lc-table");
const LAYOUT: u64 = 1;
const ALIVE: usize = 2;

const _: () = assert!(ALIVE + alive::WORDS <= WORDS, "part of the header");

const MAPPED: u64 = 1;
const TAGS: u64 = 1 << 1;
const READ: u64 = 1 << 2;
const WRITE: u64 = 1 << 3;
const PINNED: u64 = 1 << 8;

/// A region as the table shows it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) region: RegionId,
    /// First address in the owner; zero where peers map the memory.
    pub(super) base: u64,
    /// Length in bytes.
    pub(super) len: u64,
    /// Digest of the capability, which itself is shown to nobody.
    pub(super) digest: [u8; 16],
    pub(super) access: Access,
    pub(super) kind: MemoryKind,
    /// Whether peers can map the memory; else they reach it by address.
    pub(super) mapped: bool,
    /// Whether it has generation tags.
    pub(super) tags: bool,
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entry")
            .field("region", &self.region)
            .field("len", &self.len)
            .field("access", &self.access)
            .field("mapped", &self.mapped)
            .finish_non_exhaustive()
    }
}

impl Entry {
    /// The fields in the order of the table, without the version.
    fn to_words(self) -> [u64; WORDS - 1] {
        let (low, high) = self.digest.split_at(8);
        let word = |half: &[u8]| u64::from_le_bytes(half.try_into().expect("half of 16 bytes"));
        let mut flags = 0;
        for (flag, set) in [
            (MAPPED, self.mapped),
            (TAGS, self.tags),
            (READ, self.access.allows_read()),
            (WRITE, self.access.allows_write()),
            (PINNED, self.kind == MemoryKind::PinnedHost),
        ] {
            flags |= if set { flag } else { 0 };
        }
        let region = self.region.0;
        [region, self.base, self.len, word(low), word(high), flags, 0]
    }

    fn from_words(words: [u64; WORDS - 1]) -> Self {
        let [region, base, len, low, high, flags, _] = words;
        let mut digest = [0; 16];
        digest[..8].copy_from_slice(&low.to_le_bytes());
        digest[8..].copy_from_slice(&high.to_le_bytes());
        let access = match (flags & READ != 0, flags & WRITE != 0) {
            (false, false) => Access::LocalOnly,
            (true, false) => Access::RemoteRead,
            (false, true) => Access::RemoteWrite,
            (true, true) => Access::RemoteReadWrite,
        };
        let kind = if flags & PINNED != 0 {
            MemoryKind::PinnedHost
        } else {
            MemoryKind::Host
        };
        Self {
            region: RegionId(region),
            base,
            len,
            digest,
            access,
            kind,
            mapped: flags & MAPPED != 0,
            tags: flags & TAGS != 0,
        }
    }
}

/// The words of one entry: version, then fields.
fn place(words: &[AtomicU64], index: u32) -> Option<&[AtomicU64; WORDS]> {
    let start = (index as usize).checked_add(1)?.checked_mul(WORDS)?;
    words.get(start..start.checked_add(WORDS)?)?.as_array()
}

/// The header's words that say whether the owner is there.
fn alive(words: &[AtomicU64]) -> Option<&[AtomicU64; alive::WORDS]> {
    words.get(ALIVE..)?.first_chunk()
}

/// The owner's table.
pub(super) struct Table {
    file: OwnedFd,
    view: View,
    free: Mutex<Free>,
}

/// Entries that may be used: those given back, then those never used.
struct Free {
    returned: Vec<u32>,
    next: u32,
}

impl Table {
    pub(super) fn create() -> io::Result<Self> {
        let (file, view) = View::create("layercake-table", LEN, true)?;
        view.words()[0].store(MAGIC, Ordering::Relaxed);
        view.words()[1].store(LAYOUT, Ordering::Release);
        Ok(Self {
            file,
            view,
            free: Mutex::new(Free {
                returned: Vec::new(),
                next: 0,
            }),
        })
    }

    /// The file to send to peers.
    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Runs all that the owner's thread does, and says meanwhile that the owner is there.
    pub(super) fn while_here<T>(&self, work: impl FnOnce() -> T) -> T {
        let locked = self.view.lock_first_page().inspect_err(|error| {
            tracing::debug!(%error, "peers have to ask the kernel whether this engine is there");
        });
        match alive(self.view.words()) {
            Some(words) if locked.is_ok() => alive::while_here(words, work),
            _ => work(),
        }
    }

    /// Says no longer that the owner is there.
    pub(super) fn leave(&self) {
        if let Some(words) = alive(self.view.words()) {
            alive::leave(words);
        }
    }

    /// Shows a region; none if the table is full.
    pub(super) fn publish(&self, entry: Entry) -> Option<u32> {
        let index = {
            let mut free = self.free.lock();
            match free.returned.pop() {
                Some(index) => index,
                None if free.next < CAPACITY => {
                    free.next += 1;
                    free.next - 1
                }
                None => return None,
            }
        };
        publish(place(self.view.words(), index)?, entry);
        Some(index)
    }

    /// Withdraws an entry: a copy that starts later is refused by its initiator. The caller looks at
    /// the slots next.
    pub(super) fn withdraw(&self, index: u32) {
        if let Some(place) = place(self.view.words(), index) {
            withdraw(place);
            self.free.lock().returned.push(index);
        }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").finish_non_exhaustive()
    }
}

fn publish(place: &[AtomicU64; WORDS], entry: Entry) {
    let [version, fields @ ..] = place;
    let before = version.load(Ordering::Relaxed);
    debug_assert!(before == 0 || before & 1 == 1, "the entry is free");
    // Whoever sees a new field also sees that the version is not the one before.
    version.store(before | 1, Ordering::Relaxed);
    fence(Ordering::Release);
    for (field, value) in fields.iter().zip(entry.to_words()) {
        field.store(value, Ordering::Relaxed);
    }
    version.store((before | 1).wrapping_add(1), Ordering::Release);
}

fn withdraw(place: &[AtomicU64; WORDS]) {
    let version = place[0].load(Ordering::Relaxed);
    debug_assert!(version != 0 && version & 1 == 0, "the entry is in use");
    place[0].store(version | 1, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

fn read(place: &[AtomicU64; WORDS]) -> Option<(u64, Entry)> {
    let [version, fields @ ..] = place;
    let before = version.load(Ordering::Acquire);
    if before == 0 || before & 1 == 1 {
        return None;
    }
    let words = std::array::from_fn(|i| fields[i].load(Ordering::Relaxed));
    fence(Ordering::Acquire);
    let unchanged = version.load(Ordering::Relaxed) == before;
    unchanged.then(|| (before, Entry::from_words(words)))
}

/// Another engine's table, as a peer sees it.
#[derive(Debug)]
pub(super) struct PeerTable {
    view: View,
}

impl PeerTable {
    /// Maps the table that an owner sent.
    pub(super) fn map(file: impl AsFd) -> io::Result<Self> {
        let view = View::of_peer(file, LEN, false, SealFlags::FUTURE_WRITE)?;
        let header = [0, 1].map(|word| view.words()[word].load(Ordering::Acquire));
        if header != [MAGIC, LAYOUT] {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a region table of layout {}, {LAYOUT} is needed", header[1]),
            ));
        }
        Ok(Self { view })
    }

    /// Whether the owner is there. `false` says nothing.
    pub(super) fn is_owner_here(&self) -> bool {
        alive(self.view.words()).is_some_and(alive::is_here)
    }

    /// The entry at an index and its version, if one is published there.
    pub(super) fn read(&self, index: u32) -> Option<(u64, Entry)> {
        read(place(self.view.words(), index)?)
    }

    /// Whether the entry is still the one of that version.
    pub(super) fn is_current(&self, index: u32, version: u64) -> bool {
        place(self.view.words(), index)
            .is_some_and(|place| place[0].load(Ordering::Acquire) == version)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;
    use proptest::sample::select;

    use super::*;

    fn entry() -> impl Strategy<Value = Entry> {
        let access = select(vec![
            Access::LocalOnly,
            Access::RemoteRead,
            Access::RemoteWrite,
            Access::RemoteReadWrite,
        ]);
        let kind = select(vec![MemoryKind::Host, MemoryKind::PinnedHost]);
        let numbers = (any::<u64>(), any::<u64>(), any::<u64>(), any::<[u8; 16]>());
        (numbers, access, kind, any::<bool>(), any::<bool>()).prop_map(
            |((region, base, len, digest), access, kind, mapped, tags)| Entry {
                region: RegionId(region),
                base,
                len,
                digest,
                access,
                kind,
                mapped,
                tags,
            },
        )
    }

    fn some_entry(region: u64) -> Entry {
        Entry {
            region: RegionId(region),
            base: region,
            len: region,
            digest: [region.to_le_bytes(), region.to_le_bytes()]
                .concat()
                .try_into()
                .expect("16 bytes"),
            access: Access::RemoteRead,
            kind: MemoryKind::Host,
            mapped: true,
            tags: false,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn a_peer_sees_what_is_published_and_notices_when_it_is_not(
            entries in proptest::collection::vec(entry(), 1..20),
        ) {
            let table = Table::create().expect("created");
            let peer = PeerTable::map(table.file()).expect("mapped");
            let mut shown = Vec::new();
            for entry in entries {
                let index = table.publish(entry).expect("room");
                let (version, seen) = peer.read(index).expect("published");
                prop_assert_eq!(seen, entry);
                prop_assert!(peer.is_current(index, version));
                shown.push((index, version));
                if entry.base % 2 == 0 {
                    let (index, version) = shown.swap_remove(0);
                    table.withdraw(index);
                    prop_assert!(peer.read(index).is_none());
                    prop_assert!(!peer.is_current(index, version));
                }
            }
            for (index, version) in shown {
                prop_assert!(peer.is_current(index, version));
            }
        }
    }

    #[test]
    fn a_reused_entry_is_not_taken_for_the_old_one() {
        let table = Table::create().expect("created");
        let peer = PeerTable::map(table.file()).expect("mapped");
        let first = table.publish(some_entry(1)).expect("room");
        let (version, _) = peer.read(first).expect("published");
        table.withdraw(first);
        assert_eq!(table.publish(some_entry(1)), Some(first));
        assert!(!peer.is_current(first, version));
        assert!(peer.read(u32::MAX).is_none() && !peer.is_current(u32::MAX, 0));
    }

    #[test]
    fn peers_see_whether_the_owner_is_there_and_nothing_else_of_it() {
        let table = Table::create().expect("created");
        let peer = PeerTable::map(table.file()).expect("mapped");
        let index = table.publish(some_entry(1)).expect("room");
        assert!(!peer.is_owner_here());
        table.while_here(|| {
            assert!(peer.is_owner_here());
            assert!(PeerTable::map(table.file()).is_ok());
            let (_, seen) = peer.read(index).expect("published");
            assert_eq!(seen, some_entry(1));
            table.leave();
            assert!(!peer.is_owner_here());
        });
    }

    #[test]
    fn a_full_table_says_so() {
        let table = Table::create().expect("created");
        for region in 0..u64::from(CAPACITY) {
            assert!(table.publish(some_entry(region)).is_some());
        }
        assert_eq!(table.publish(some_entry(0)), None);
        table.withdraw(77);
        assert_eq!(table.publish(some_entry(0)), Some(77));
    }

    #[test]
    fn a_peer_can_not_map_the_table_writable() {
        let table = Table::create().expect("created");
        let writable = View::of_peer(table.file(), LEN, true, SealFlags::empty());
        assert!(writable.is_err());
        let (other, _view) = View::create("other", LEN, false).expect("created");
        assert!(PeerTable::map(other).is_err(), "not sealed as a table is");
    }

    #[test]
    fn a_racing_reader_never_sees_fields_that_do_not_belong_together() {
        let table = Table::create().expect("created");
        let peer = PeerTable::map(table.file()).expect("mapped");
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Some((_, seen)) = peer.read(0) {
                        assert_eq!(seen, some_entry(seen.region.0));
                    }
                }
            });
            for region in 1..20_000 {
                let index = table.publish(some_entry(region)).expect("room");
                assert_eq!(index, 0);
                table.withdraw(index);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
