//! Memory that another process owns or watches, mapped into this one: the unsafe part of shm.
//!
//! Invariants:
//! - A [`View`] is made only of a file whose seals forbid shrinking and whose length was checked, so an
//!   access inside it can't fault because its owner misbehaves.
//! - A view is unmapped by its drop alone, and the spans that it hands out borrow it: no copy outlives
//!   its mapping.
//! - No reference to its bytes is made; they are touched by [`crate::racy`] copies only, and words that
//!   are shared (tags, table, slots) as atomics only.
//! - A view without write access hands out no target: storing there would kill the process.

#![expect(
    unsafe_code,
    reason = "hands out spans of memory that other processes share; see the module's text"
)]

use std::ffi::c_void;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::Advice;

use crate::memory::Mapping;
use crate::racy::{Source, Target};

/// What every file that is shared must be sealed with.
const FIXED_LENGTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// How much of a view is made present at once, see [`View::make_present`].
const PRESENT_STEP: usize = 1 << 20;

/// Mapped memory of a sealed file. See the module's text.
#[derive(Debug)]
pub(super) struct View {
    map: Mapping,
    writable: bool,
    /// One bit per [`PRESENT_STEP`]: whether its pages were made present.
    present: Box<[AtomicU64]>,
}

impl View {
    /// Maps a file that a peer sent, after checking its seals and that it has at least `len` bytes.
    pub(super) fn of_peer(
        file: impl AsFd,
        len: u64,
        writable: bool,
        more_seals: SealFlags,
    ) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&file)?;
        let needed = FIXED_LENGTH | more_seals;
        if !seals.contains(needed) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a shared file is sealed with {seals:?}, {needed:?} are needed"),
            ));
        }
        let actual = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
        if actual < len || len == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a shared file has {actual} bytes, {len} are needed"),
            ));
        }
        // All of it: huge pages can't be mapped in part.
        Self::map(file, actual, writable)
    }

    /// Makes a file of `len` zero bytes and maps it writable. With `read_only_to_peers`, later
    /// mappings can only read, whoever makes them.
    pub(super) fn create(
        name: &str,
        len: u64,
        read_only_to_peers: bool,
    ) -> io::Result<(OwnedFd, Self)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::ftruncate(&file, len)?;
        // The seal against writing spares mappings that exist, so this one comes first.
        let view = Self::map(&file, len, true)?;
        let mut seals = FIXED_LENGTH | SealFlags::SEAL;
        if read_only_to_peers {
            seals |= SealFlags::FUTURE_WRITE;
        }
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok((file, view))
    }

    fn map(file: impl AsFd, len: u64, writable: bool) -> io::Result<Self> {
        let len = usize::try_from(len).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let map = Mapping::shared(file, len, writable)?;
        let words = len.div_ceil(PRESENT_STEP).div_ceil(64);
        Ok(Self {
            map,
            writable,
            present: (0..words).map(|_| AtomicU64::new(0)).collect(),
        })
    }

    /// Enters the pages around these bytes into this process's page tables, unless that was done
    /// before. Left to faults, one page at a time, the first copy through a mapping takes several
    /// times as long as a later one. (Measured, in time of the processor per page: 1.3 µs by faults of
    /// writes, 0.3 µs by this advice, after which writes don't fault either.) Pages that nobody ever
    /// touched come into being by it, as they would by a copy.
    pub(super) fn make_present(&self, offset: u64, len: u64) {
        for step in steps(offset, len) {
            let Some(word) = self.present.get(step / 64) else {
                return;
            };
            let bit = 1 << (step % 64);
            if word.load(Ordering::Relaxed) & bit != 0 {
                continue;
            }
            word.fetch_or(bit, Ordering::Relaxed);
            let start = step * PRESENT_STEP;
            let Some(left) = self.map.len().checked_sub(start) else {
                return;
            };
            self.advise_present(start, left.min(PRESENT_STEP));
        }
    }

    /// Whether [`make_present`](Self::make_present) would find nothing to do for these bytes.
    pub(super) fn is_present(&self, offset: u64, len: u64) -> bool {
        steps(offset, len).all(|step| {
            let word = self.present.get(step / 64);
            word.is_some_and(|word| word.load(Ordering::Relaxed) & (1 << (step % 64)) != 0)
        })
    }

    fn advise_present(&self, start: usize, len: usize) {
        let addr = self.map.addr() + start;
        // SAFETY: the range lies in this mapping; populating changes no byte.
        let advised =
            unsafe { rustix::mm::madvise(addr as *mut c_void, len, Advice::LinuxPopulateRead) };
        if let Err(error) = advised {
            // Older kernels don't know the advice: the pages come one by one.
            tracing::debug!(%error, "pages are not made present ahead");
        }
    }

    /// Keeps the first page in memory from here on, also when that is short.
    pub(super) fn lock_first_page(&self) -> io::Result<()> {
        // SAFETY: every mapping has a page; locking it changes no byte.
        unsafe { rustix::mm::mlock(self.map.addr() as *mut c_void, 1) }?;
        Ok(())
    }

    /// These bytes, to copy from; none if they reach past the end.
    pub(super) fn source(&self, offset: u64, len: u64) -> Option<Source<'_>> {
        // SAFETY: the mapping is readable and lives as long as the borrow of `self`.
        let all = unsafe { Source::new(self.map.addr() as *const u8, self.map.len()) };
        all.part(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)
    }

    /// These bytes, to copy to; none if they reach past the end or the view is read-only.
    pub(super) fn target(&self, offset: u64, len: u64) -> Option<Target<'_>> {
        if !self.writable {
            return None;
        }
        // SAFETY: the mapping is writable and lives as long as the borrow of `self`.
        let all = unsafe { Target::new(self.map.addr() as *mut u8, self.map.len()) };
        all.part(usize::try_from(offset).ok()?, usize::try_from(len).ok()?)
    }

    /// The view as words that other processes share. Stored to only if it is writable.
    pub(super) fn words(&self) -> &[AtomicU64] {
        self.map.atomics()
    }
}

/// The numbers of all [`PRESENT_STEP`]s that these bytes touch.
fn steps(offset: u64, len: u64) -> RangeInclusive<usize> {
    let step = |byte: u64| usize::try_from(byte).map_or(usize::MAX, |b| b / PRESENT_STEP);
    step(offset)..=step(offset.saturating_add(len.saturating_sub(1)))
}

/// Another descriptor of the same file that can only read, for peers that may only read.
pub(super) fn reopen_read_only(file: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::open(
        path,
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("test", flags).expect("memfd");
        rustix::fs::ftruncate(&file, len).expect("size");
        rustix::fs::fcntl_add_seals(&file, seals).expect("seal");
        file
    }

    #[test]
    fn a_file_that_could_shrink_or_is_too_short_is_refused() {
        for seals in [SealFlags::empty(), SealFlags::GROW, SealFlags::SHRINK] {
            let error = View::of_peer(memfd(8192, seals), 8192, true, SealFlags::empty());
            let text = error.expect_err("not sealed").to_string();
            assert!(text.contains("sealed"), "{text}");
        }
        let sealed = memfd(4096, FIXED_LENGTH);
        let error = View::of_peer(&sealed, 8192, true, SealFlags::empty());
        assert!(error.expect_err("too short").to_string().contains("4096"));
        assert!(View::of_peer(&sealed, 0, true, SealFlags::empty()).is_err());
        assert!(View::of_peer(&sealed, 4096, true, SealFlags::FUTURE_WRITE).is_err());
        assert!(View::of_peer(&sealed, 4096, true, SealFlags::empty()).is_ok());
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        assert!(View::of_peer(reader, 1, false, SealFlags::empty()).is_err());
    }

    #[test]
    fn what_is_read_only_to_peers_can_not_be_mapped_writable() {
        let (file, own) = View::create("test", 4096, true).expect("created");
        assert!(View::of_peer(&file, 4096, true, SealFlags::FUTURE_WRITE).is_err());
        let peer = View::of_peer(&file, 4096, false, SealFlags::FUTURE_WRITE).expect("readable");
        own.words()[3].store(77, Ordering::Release);
        assert_eq!(peer.words()[3].load(Ordering::Acquire), 77);
        assert!(peer.target(0, 8).is_none() && own.target(0, 8).is_some());
        assert!(rustix::fs::ftruncate(&file, 0).is_err());
    }

    #[test]
    fn a_read_only_descriptor_can_not_be_mapped_writable() {
        let (file, _own) = View::create("test", 4096, false).expect("created");
        let reader = reopen_read_only(file.as_fd()).expect("reopened");
        assert!(View::of_peer(&reader, 4096, true, SealFlags::empty()).is_err());
        assert!(View::of_peer(&reader, 4096, false, SealFlags::empty()).is_ok());
        assert!(View::of_peer(&file, 4096, true, SealFlags::empty()).is_ok());
    }

    #[test]
    fn making_pages_present_changes_no_byte_and_stays_inside() {
        let len = 3 * PRESENT_STEP as u64 / 2;
        let (file, own) = View::create("test", len, false).expect("created");
        own.words()[7].store(77, Ordering::Relaxed);
        let reader = View::of_peer(&file, len, false, SealFlags::empty()).expect("mapped");
        for view in [&own, &reader] {
            for (offset, len) in [(56, 8), (0, len), (len - 1, 1), (len, 0), (u64::MAX, 9)] {
                view.make_present(offset, len);
            }
            assert_eq!(view.words()[7].load(Ordering::Relaxed), 77);
        }
    }

    #[test]
    fn what_was_made_present_is_known() {
        let step = PRESENT_STEP as u64;
        let (_file, view) = View::create("test", 70 * step, false).expect("created");
        view.make_present(step - 1, 2);
        view.make_present(66 * step, 1);
        let present = |offset, len| view.is_present(offset, len);
        assert!(present(0, 2 * step) && present(66 * step, step) && present(5, 0));
        assert!(!present(0, 2 * step + 1) && !present(65 * step, step + 1));
        assert!(!present(70 * step, 1) && !present(u64::MAX, 9));
    }

    #[test]
    fn spans_stay_inside() {
        let (_file, view) = View::create("test", 4096, false).expect("created");
        assert!(view.source(4096, 0).is_some());
        assert!(view.source(4095, 2).is_none() && view.target(4095, 2).is_none());
        assert!(view.source(u64::MAX, 2).is_none());
    }
}
