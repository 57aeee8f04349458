//! Mappings, owned buffers and byte access by address: the unsafe part of registered memory.
//!
//! Invariant: an address that these functions are given lies, with its length, inside memory that
//! someone keeps alive for the whole call: a [`Mapping`] or [`OwnedBytes`] held by a region's entry, or
//! memory that a caller of an unsafe public function vouched for. Callers inside the crate reach them
//! through `RegionEntry` and `LocalSlice`, which check ranges first.
//!
//! Peers may write to this memory at any time, from other processes or through this one's sockets, so
//! no reference to its bytes is ever made: bytes go through raw pointers into private buffers. Tags
//! are the exception: they are only touched as atomics, and a shared reference to an atomic allows
//! that.

#![expect(
    unsafe_code,
    reason = "maps memory and copies by address; see the module's text"
)]

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::RegionEntry;
use crate::error::Error;
use crate::racy::{Source, Target};

/// A mapping of shared memory. Unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Mapping {}
// SAFETY: its methods hand out addresses and atomics only.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of a file, shared. The file must be at least that long and never
    /// shrink (its seals say so), or access would fault.
    pub(crate) fn shared(fd: impl AsFd, len: usize, writable: bool) -> std::io::Result<Self> {
        let mut protection = ProtFlags::READ;
        if writable {
            protection |= ProtFlags::WRITE;
        }
        // SAFETY: a fresh mapping at an address that the kernel chooses touches nothing that exists.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0) }?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { start, len })
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.start.as_ptr() as usize
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The mapping as 64-bit words, which whoever maps it too may change at any time.
    #[expect(clippy::cast_ptr_alignment, reason = "a mapping begins on a page")]
    pub(crate) fn atomics(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, readable, lives as long as `self`, and every bit
        // pattern is valid; words that are shared are touched as atomics only, on both sides.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast::<AtomicU64>(), self.len / 8) }
    }

    /// Makes every page present, writable.
    pub(crate) fn pretouch(&self) -> Result<(), Error> {
        // SAFETY: populating changes no byte, and the range is this mapping.
        let populated = unsafe {
            rustix::mm::madvise(
                self.start.as_ptr().cast(),
                self.len,
                Advice::LinuxPopulateWrite,
            )
        };
        match populated {
            Ok(()) => Ok(()),
            Err(rustix::io::Errno::INVAL) => {
                self.touch_pages();
                Ok(())
            }
            Err(error) => Err(Error::Map {
                what: "touch",
                len: self.len as u64,
                source: error.into(),
            }),
        }
    }

    /// The slow way, for kernels that can't populate on request.
    fn touch_pages(&self) {
        for offset in (0..self.len).step_by(4096) {
            // SAFETY: inside the mapping.
            let place = unsafe { self.start.as_ptr().add(offset) };
            // SAFETY: an atomic that adds nothing changes no byte, whoever else writes there.
            let byte = unsafe { std::sync::atomic::AtomicU8::from_ptr(place) };
            byte.fetch_add(0, std::sync::atomic::Ordering::Relaxed);
        }
    }

    fn advise_huge(&self) {
        // SAFETY: the advice changes no byte, and the range is this mapping.
        let advised = unsafe {
            rustix::mm::madvise(self.start.as_ptr().cast(), self.len, Advice::LinuxHugepage)
        };
        if let Err(error) = advised {
            tracing::debug!(%error, "no transparent huge pages for shared memory");
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, and nobody holds an address of it any more: entries
        // outlive the pins of whoever uses them.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping is unmapped once");
    }
}

/// Makes a sealed memfd of at least `len` bytes (whole pages) and maps it.
pub(crate) fn allocate(
    name: &str,
    len: u64,
    huge_pages: bool,
) -> Result<(OwnedFd, Mapping), Error> {
    const HUGE: u64 = 2 << 20;
    if huge_pages {
        let rounded = len.checked_next_multiple_of(HUGE);
        if let Some(Ok(allocated)) =
            rounded.map(|rounded| allocate_with(name, rounded, MemfdFlags::HUGETLB))
        {
            return Ok(allocated);
        }
    }
    let page = rustix::param::page_size() as u64;
    let rounded = len.checked_next_multiple_of(page).unwrap_or(u64::MAX);
    let (fd, map) = allocate_with(name, rounded, MemfdFlags::empty())?;
    if huge_pages {
        map.advise_huge();
    }
    Ok((fd, map))
}

fn allocate_with(name: &str, len: u64, extra: MemfdFlags) -> Result<(OwnedFd, Mapping), Error> {
    let failed = |what| {
        move |source: rustix::io::Errno| Error::Map {
            what,
            len,
            source: source.into(),
        }
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
    let fd = rustix::fs::memfd_create(name, flags).map_err(failed("memfd"))?;
    rustix::fs::ftruncate(&fd, len).map_err(failed("size"))?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(failed("seal"))?;
    let bytes = usize::try_from(len).map_err(|_| failed("size")(rustix::io::Errno::NOMEM))?;
    let map = Mapping::shared(&fd, bytes, true).map_err(|source| Error::Map {
        what: "map",
        len,
        source,
    })?;
    Ok((fd, map))
}

/// A buffer that was given away, held by address so that peers may write to it.
#[derive(Debug)]
pub(crate) struct OwnedBytes {
    bytes: NonNull<[u8]>,
}

// SAFETY: the heap allocation belongs to no thread.
unsafe impl Send for OwnedBytes {}
// SAFETY: only the address and the length are handed out.
unsafe impl Sync for OwnedBytes {}

impl OwnedBytes {
    pub(crate) fn new(bytes: Box<[u8]>) -> Self {
        Self {
            bytes: NonNull::from(Box::leak(bytes)),
        }
    }

    pub(crate) fn addr(&self) -> usize {
        self.bytes.as_ptr().cast::<u8>() as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }
}

impl Drop for OwnedBytes {
    fn drop(&mut self) {
        // SAFETY: it came from a box, is freed once, and nobody uses its address any more: entries
        // outlive the pins of whoever does.
        drop(unsafe { Box::from_raw(self.bytes.as_ptr()) });
    }
}

/// The bytes of a region, to copy from.
pub(super) fn source(entry: &RegionEntry, offset: u64, len: usize) -> Source<'_> {
    // SAFETY: the entry keeps its memory mapped, and the caller checked the range.
    unsafe { Source::new(entry.place(offset) as *const u8, len) }
}

/// The bytes of a region, to copy to.
pub(super) fn target(entry: &RegionEntry, offset: u64, len: usize) -> Target<'_> {
    // SAFETY: the entry keeps its memory mapped, and the caller checked the range.
    unsafe { Target::new(entry.place(offset) as *mut u8, len) }
}
