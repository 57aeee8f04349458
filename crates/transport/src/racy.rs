//! Copies of memory that another thread, process or connection may write at the same moment.
//!
//! Registered memory is shared with peers by design, so a plain Rust copy of it would be a data race,
//! which the language leaves undefined. This module is the one place where such bytes are touched:
//!
//! - No reference to shared bytes is ever made. [`Source`] and [`Target`] are addresses with a length
//!   and a lifetime; whoever makes one proves that the bytes stay mapped for that lifetime.
//! - The bytes move in assembly (`rep movsb`, vector loops) or, where there is none, by volatile
//!   accesses. The compiler can neither split, repeat, cache nor drop them, and assumes nothing about
//!   the values. A race can thus yield a mixture of old and new bytes, and nothing worse.
//! - Whoever must not *accept* a mixture checks an atomic word (a generation tag, a table entry) before
//!   and after. [`fence_before`] and [`fence_after`] put these checks in order with the copy: assembly
//!   without `nomem` is a barrier to the compiler, the fence one to the processor. `rep movsb` and
//!   non-temporal stores are weakly ordered only among themselves: stores that follow the former are
//!   seen after it, and the latter are made by [`Copies`] alone, which end with `sfence`.
//! - Checksums cover the bytes that were moved, not what a second look at the memory would find: each
//!   byte is loaded once, then stored and summed from the register or from a private buffer.
//!
//! Overlapping ranges are no error here; what they then hold is unspecified bytes.
//!
//! `rep movsb` is as fast as the C library's copy on processors with fast strings (measured: 0.95 to
//! 1.2 times from 4 KiB up), so the one vector loop without a checksum is for sizes that go past the cache.

#![expect(
    unsafe_code,
    reason = "the copy routine of memory that peers may write; argued in the header"
)]

use std::marker::PhantomData;
use std::sync::atomic::{Ordering, fence};

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod fold;

/// Bytes to copy from. Mapped and readable for `'a`; anyone may write them meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    start: *const u8,
    len: usize,
    mapped: PhantomData<&'a ()>,
}

/// Bytes to copy to. Mapped and writable for `'a`; anyone may read and write them meanwhile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    start: *mut u8,
    len: usize,
    mapped: PhantomData<&'a ()>,
}

// SAFETY: only an address; what it points at is touched by racy copies alone, from any thread.
unsafe impl Send for Source<'_> {}
// SAFETY: as for Send: there is nothing to synchronise.
unsafe impl Sync for Source<'_> {}
// SAFETY: as for `Source`.
unsafe impl Send for Target<'_> {}
// SAFETY: as for `Source`.
unsafe impl Sync for Target<'_> {}

impl<'a> Source<'a> {
    /// Names bytes to copy from.
    ///
    /// # Safety
    /// `len` bytes at `start` are mapped and readable for all of `'a`, and no `&mut` to them is used
    /// during a copy.
    pub(crate) const unsafe fn new(start: *const u8, len: usize) -> Self {
        Self {
            start,
            len,
            mapped: PhantomData,
        }
    }

    /// The bytes of a slice, which nobody writes while it is borrowed.
    pub(crate) const fn from_slice(bytes: &'a [u8]) -> Self {
        Self {
            start: bytes.as_ptr(),
            len: bytes.len(),
            mapped: PhantomData,
        }
    }

    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.start.addr()
    }

    /// `len` bytes from `offset`; none if they reach past the end.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Self> {
        (offset.checked_add(len)? <= self.len).then(|| Self {
            start: self.start.wrapping_add(offset),
            len,
            mapped: PhantomData,
        })
    }
}

impl<'a> Target<'a> {
    /// Names bytes to copy to.
    ///
    /// # Safety
    /// `len` bytes at `start` are mapped and writable for all of `'a`, and no reference to them is used
    /// during a copy.
    pub(crate) const unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self {
            start,
            len,
            mapped: PhantomData,
        }
    }

    /// The bytes of a slice, which nobody else touches while it is borrowed.
    pub(crate) const fn from_slice(bytes: &'a mut [u8]) -> Self {
        Self {
            start: bytes.as_mut_ptr(),
            len: bytes.len(),
            mapped: PhantomData,
        }
    }

    /// Length in bytes.
    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.start.addr()
    }

    /// `len` bytes from `offset`; none if they reach past the end.
    pub(crate) fn part(&self, offset: usize, len: usize) -> Option<Self> {
        (offset.checked_add(len)? <= self.len).then(|| Self {
            start: self.start.wrapping_add(offset),
            len,
            mapped: PhantomData,
        })
    }

    /// The same bytes, to copy from.
    pub(crate) const fn as_source(&self) -> Source<'a> {
        Source {
            start: self.start,
            len: self.len,
            mapped: PhantomData,
        }
    }
}

/// Loads made before this call come before every byte of a copy that follows, and stores made before it, such as claims,
/// before every byte that the copy writes.
pub(crate) fn fence_before() {
    fence(Ordering::AcqRel);
}

/// Every byte that a copy before this call has read comes before loads that follow, and every byte it
/// has read or written before stores that follow. Loads that have to come after the bytes written need
/// a full fence of their own.
pub(crate) fn fence_after() {
    fence(Ordering::AcqRel);
}

/// Has the processor fetch the first bytes: once a copy has come so far, it follows by itself.
pub(crate) fn prefetch(source: Source<'_>) {
    const AHEAD: usize = 1024;
    const LINE: usize = 64;
    for offset in (0..source.len.min(AHEAD)).step_by(LINE) {
        prefetch_line(source.start.wrapping_add(offset));
    }
}

/// A hint: no access, so any address will do.
fn prefetch_line(line: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch neither faults nor counts as an access.
    unsafe {
        std::arch::asm!("prefetcht0 [{}]", in(reg) line, options(nostack, preserves_flags));
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: a prefetch neither faults nor counts as an access.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags));
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _nothing_to_do = line;
}

/// Copies all of `source`.
///
/// # Panics
/// If the lengths differ: both come from one piece, whose lengths were compared.
pub(crate) fn copy(target: Target<'_>, source: Source<'_>) {
    assert_one_length(target, source);
    // SAFETY: the spans' makers proved both ranges mapped; the lengths were just compared.
    unsafe { copy_raw(target.start, source.start, source.len) }
}

/// Copies that belong together. Only when this goes are the bytes that they wrote in order with what is stored later.
#[derive(Debug)]
pub(crate) struct Copies {
    past_cache: bool,
}

/// From this many bytes on that are copied together, stores go past the cache.
const PAST_CACHE_FROM: u64 = 32 << 10;

impl Copies {
    /// Copies of so many bytes together. Many go past the cache, since this side won't look at them next. Where bytes are
    /// in the cache, or are read again at once, a copy through it takes half as long.
    pub(crate) const fn of(bytes: u64) -> Self {
        Self {
            past_cache: bytes >= PAST_CACHE_FROM,
        }
    }

    /// Copies all of `source`. What is copied `next` is fetched meanwhile, so that small pieces that lie far apart are not
    /// waited for one by one.
    ///
    /// # Panics
    /// If the lengths differ, as [`copy`].
    pub(crate) fn copy(&self, target: Target<'_>, source: Source<'_>, next: Option<Source<'_>>) {
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if self.past_cache && fold::is_supported() {
            assert_one_length(target, source);
            // SAFETY: as in `copy`, and the processor was asked.
            return unsafe { fold::stream(target.start, source.start, source.len, next) };
        }
        if let Some(next) = next {
            prefetch(next);
        }
        copy(target, source);
    }

    /// As [`Copies::copy`], and gives the CRC-32C of the bytes that were moved.
    ///
    /// # Panics
    /// If the lengths differ, as [`copy`].
    pub(crate) fn copy_crc(
        &self,
        target: Target<'_>,
        source: Source<'_>,
        next: Option<Source<'_>>,
    ) -> u32 {
        assert_one_length(target, source);
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        if fold::is_supported() {
            let (to, from, len) = (target.start, source.start, source.len);
            if self.past_cache {
                // SAFETY: as in `copy`, and the processor was asked.
                return unsafe { fold::copy_past(to, from, len, next) };
            }
            if let Some(next) = next {
                prefetch(next);
            }
            // SAFETY: as above.
            return unsafe { fold::copy(to, from, len) };
        }
        if let Some(next) = next {
            prefetch(next);
        }
        // SAFETY: as in `copy`.
        unsafe { bounce::<CHUNK>(Some(target.start), source.start, source.len, 0) }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        if self.past_cache {
            order_stores_past_cache();
        }
    }
}

/// Elsewhere no stores go past the cache.
fn order_stores_past_cache() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every processor of this kind has it; it moves nothing.
    unsafe {
        std::arch::asm!("sfence", options(nostack, preserves_flags));
    }
}

fn assert_one_length(target: Target<'_>, source: Source<'_>) {
    assert_eq!(
        target.len, source.len,
        "both ends of a copy have one length"
    );
}

/// Continues `crc`, a CRC-32C, over `source`.
pub(crate) fn crc(source: Source<'_>, crc: u32) -> u32 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if fold::is_supported() {
        // SAFETY: the span's maker proved the range mapped, and the processor was asked.
        return unsafe { fold::sum(source.start, source.len, crc) };
    }
    // SAFETY: the span's maker proved the range mapped.
    unsafe { bounce::<CHUNK>(None, source.start, source.len, crc) }
}

/// Small enough for the first-level cache, large enough for a copy to get going.
const CHUNK: usize = 4096;

/// Sums, and copies if there is a target, by way of a private buffer in which the bytes stand still.
///
/// # Safety
/// `len` bytes are mapped at `source`, and writable at `target` if there is one.
unsafe fn bounce<const CHUNK: usize>(
    target: Option<*mut u8>,
    source: *const u8,
    len: usize,
    mut crc: u32,
) -> u32 {
    if len == 0 {
        return crc;
    }
    let mut buffer = [0; CHUNK];
    for offset in (0..len).step_by(CHUNK) {
        let chunk = &mut buffer[..CHUNK.min(len - offset)];
        // SAFETY: `offset + chunk.len() <= len`; the buffer is private.
        unsafe { copy_raw(chunk.as_mut_ptr(), source.wrapping_add(offset), chunk.len()) };
        if let Some(target) = target {
            // SAFETY: as above, for the target.
            unsafe { copy_raw(target.wrapping_add(offset), chunk.as_ptr(), chunk.len()) };
        }
        crc = crc32c::crc32c_append(crc, chunk);
    }
    crc
}

/// # Safety
/// `len` bytes are mapped readable at `source` and writable at `target`.
#[cfg(all(target_arch = "x86_64", not(miri)))]
unsafe fn copy_raw(target: *mut u8, source: *const u8, len: usize) {
    // SAFETY: exactly `len` bytes are moved; the ABI keeps the direction flag clear.
    unsafe {
        std::arch::asm!(
            "rep movsb",
            inout("rcx") len => _,
            inout("rdi") target => _,
            inout("rsi") source => _,
            options(nostack, preserves_flags),
        );
    }
}

/// # Safety
/// `len` bytes are mapped readable at `source` and writable at `target`.
#[cfg(all(target_arch = "aarch64", not(miri)))]
unsafe fn copy_raw(target: *mut u8, source: *const u8, len: usize) {
    let blocks = len & !63;
    if blocks > 0 {
        // SAFETY: `blocks` is a positive multiple of 64, no greater than `len`.
        unsafe {
            std::arch::asm!(
                "2:",
                "ldp {a:q}, {b:q}, [{source}], #32",
                "ldp {c:q}, {d:q}, [{source}], #32",
                "stp {a:q}, {b:q}, [{target}], #32",
                "stp {c:q}, {d:q}, [{target}], #32",
                "subs {left}, {left}, #64",
                "b.ne 2b",
                source = inout(reg) source => _,
                target = inout(reg) target => _,
                left = inout(reg) blocks => _,
                a = out(vreg) _,
                b = out(vreg) _,
                c = out(vreg) _,
                d = out(vreg) _,
                options(nostack),
            );
        }
    }
    // SAFETY: the rest of the same ranges.
    unsafe {
        copy_volatile(
            target.wrapping_add(blocks),
            source.wrapping_add(blocks),
            len - blocks,
        )
    }
}

/// # Safety
/// `len` bytes are mapped readable at `source` and writable at `target`.
#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
unsafe fn copy_raw(target: *mut u8, source: *const u8, len: usize) {
    // SAFETY: the caller's.
    unsafe { copy_volatile(target, source, len) }
}

/// # Safety
/// `len` bytes are mapped readable at `source` and writable at `target`.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
#[expect(
    clippy::cast_ptr_alignment,
    reason = "words begin where both addresses are aligned"
)]
unsafe fn copy_volatile(target: *mut u8, source: *const u8, len: usize) {
    const WORD: usize = size_of::<usize>();
    let mut done = 0;
    if target.addr() % WORD == source.addr() % WORD {
        let head = source.align_offset(WORD).min(len);
        // SAFETY: the first bytes of the same ranges.
        unsafe { copy_bytes(target, source, head) };
        done = head;
        while len - done >= WORD {
            // SAFETY: inside the range, and aligned after the head.
            let word = unsafe { source.wrapping_add(done).cast::<usize>().read_volatile() };
            // SAFETY: as above; the target has the same alignment.
            unsafe {
                target
                    .wrapping_add(done)
                    .cast::<usize>()
                    .write_volatile(word);
            };
            done += WORD;
        }
    }
    // SAFETY: the rest of the same ranges.
    unsafe {
        copy_bytes(
            target.wrapping_add(done),
            source.wrapping_add(done),
            len - done,
        );
    }
}

/// # Safety
/// `len` bytes are mapped readable at `source` and writable at `target`.
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
unsafe fn copy_bytes(target: *mut u8, source: *const u8, len: usize) {
    for i in 0..len {
        // SAFETY: inside the range.
        let byte = unsafe { source.wrapping_add(i).read_volatile() };
        // SAFETY: inside the range.
        unsafe { target.wrapping_add(i).write_volatile(byte) };
    }
}

#[cfg(test)]
mod tests;
