//! Copy and CRC-32C in one pass, by carry-less multiplication on 256-bit registers, or ([`wide`]) on
//! 512-bit ones.
//!
//! A checksum costs little when it is taken from the registers through which the bytes move anyway,
//! while the loads of the next ones are under way. Four registers hold 128 bytes of remainder; each
//! step moves them 1024 bits on by multiplying with two constants and adds the next 128 bytes. In the end
//! the first three are moved to where the last is: what is left is a message of 32 bytes with the same
//! remainder, which the `crc32c` crate reduces.
//!
//! Large copies store past the cache and fetch a page ahead, which also walks the page tables early:
//! measured on memory larger than the cache, that makes up for most of what the multiplications cost
//! (64 KiB pieces: 84 to 88 per cent of a plain copy, 1 MiB: 92; with cached stores 75 and 82).
//!
//! Bits of a CRC are reflected: in a word, the lowest bit is the highest power. The product of two
//! such words comes out one power too low, hence the `- 1` in the exponents below.

use std::arch::asm;

use super::Source;

mod plain;
mod wide;

/// Bytes of one step.
const STEP: usize = 128;

/// The most bytes that the loops leave over, those of [`wide`] included.
const REST: usize = 2 * wide::STEP;

/// How far ahead large copies fetch. A multiple of every step.
const PAGE: usize = 4096;

/// Alignment that stores past the cache need.
const STREAM_ALIGN: usize = 32;

/// The polynomial of CRC-32C without its highest power.
const POLYNOMIAL: u32 = 0x1EDC_6F41;

/// x to the power of `n`, modulo the polynomial, as a reflected 64-bit word.
const fn power(n: u32) -> u64 {
    let mut value: u32 = 1;
    let mut i = 0;
    while i < n {
        let carry = value >> 31 != 0;
        value <<= 1;
        if carry {
            value ^= POLYNOMIAL;
        }
        i += 1;
    }
    (value as u64).reverse_bits()
}

/// What moves the two halves of a 128-bit lane on by `step` bytes. The first bytes of a lane are its
/// higher powers, 64 above the others.
const fn fold_constants(step: usize) -> [u64; 2] {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a step is some hundred bytes"
    )]
    let bits = 8 * step as u32;
    [power(bits + 64 - 1), power(bits - 1)]
}

/// By a step, and by what lies between each of the first registers and the last.
static FOLD: [[u64; 2]; 4] = [
    fold_constants(STEP),
    fold_constants(STEP * 3 / 4),
    fold_constants(STEP / 2),
    fold_constants(STEP / 4),
];

/// Whether this processor has what the loops below use.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("vpclmulqdq")
}

macro_rules! fold_loop {
    ($(#[$doc:meta])* $name:ident, $ahead:literal, $store:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The processor is supported; `len` is a multiple of [`STEP`] and at least two of them; `len`
        /// bytes are mapped readable at `source` and, where the loop stores, writable at `target`.
        #[inline(never)]
        unsafe fn $name(
            target: *mut u8,
            source: *const u8,
            len: usize,
            crc: u32,
            ahead: usize,
        ) -> u32 {
            let mut rest = [0_u8; STEP / 4];
            // Whole vector registers are named as clobbered by their low parts; `vzeroupper` leaves none of
            // the upper parts in use.
            // SAFETY: reads and writes step through exactly `len` bytes of both ranges, then write
            // the 32 bytes of `rest`; fetching ahead touches nothing, mapped or not.
            unsafe {
                asm!(
                    "vbroadcasti128 ymm8, [{fold}]",
                    "vmovd xmm9, {crc:e}",
                    concat!($ahead, " [{source} + {ahead}]"),
                    concat!($ahead, " [{source} + {ahead} + 64]"),
                    "vmovdqu ymm0, [{source}]",
                    "vmovdqu ymm1, [{source} + 32]",
                    "vmovdqu ymm2, [{source} + 64]",
                    "vmovdqu ymm3, [{source} + 96]",
                    concat!($store, " [{target}], ymm0"),
                    concat!($store, " [{target} + 32], ymm1"),
                    concat!($store, " [{target} + 64], ymm2"),
                    concat!($store, " [{target} + 96], ymm3"),
                    "vpxor ymm0, ymm0, ymm9",
                    "add {source}, 128",
                    "add {target}, 128",
                    "sub {len}, 128",
                    "2:",
                    concat!($ahead, " [{source} + {ahead}]"),
                    concat!($ahead, " [{source} + {ahead} + 64]"),
                    "vmovdqu ymm10, [{source}]",
                    "vmovdqu ymm11, [{source} + 32]",
                    "vmovdqu ymm12, [{source} + 64]",
                    "vmovdqu ymm13, [{source} + 96]",
                    "vpclmulqdq ymm4, ymm0, ymm8, 0x00",
                    "vpclmulqdq ymm0, ymm0, ymm8, 0x11",
                    "vpclmulqdq ymm5, ymm1, ymm8, 0x00",
                    "vpclmulqdq ymm1, ymm1, ymm8, 0x11",
                    "vpclmulqdq ymm6, ymm2, ymm8, 0x00",
                    "vpclmulqdq ymm2, ymm2, ymm8, 0x11",
                    "vpclmulqdq ymm7, ymm3, ymm8, 0x00",
                    "vpclmulqdq ymm3, ymm3, ymm8, 0x11",
                    concat!($store, " [{target}], ymm10"),
                    concat!($store, " [{target} + 32], ymm11"),
                    concat!($store, " [{target} + 64], ymm12"),
                    concat!($store, " [{target} + 96], ymm13"),
                    "vpxor ymm4, ymm4, ymm10",
                    "vpxor ymm5, ymm5, ymm11",
                    "vpxor ymm6, ymm6, ymm12",
                    "vpxor ymm7, ymm7, ymm13",
                    "vpxor ymm0, ymm0, ymm4",
                    "vpxor ymm1, ymm1, ymm5",
                    "vpxor ymm2, ymm2, ymm6",
                    "vpxor ymm3, ymm3, ymm7",
                    "add {source}, 128",
                    "add {target}, 128",
                    "sub {len}, 128",
                    "jnz 2b",
                    "vbroadcasti128 ymm8, [{fold} + 16]",
                    "vpclmulqdq ymm4, ymm0, ymm8, 0x00",
                    "vpclmulqdq ymm5, ymm0, ymm8, 0x11",
                    "vbroadcasti128 ymm8, [{fold} + 32]",
                    "vpclmulqdq ymm6, ymm1, ymm8, 0x00",
                    "vpclmulqdq ymm7, ymm1, ymm8, 0x11",
                    "vbroadcasti128 ymm8, [{fold} + 48]",
                    "vpclmulqdq ymm0, ymm2, ymm8, 0x00",
                    "vpclmulqdq ymm1, ymm2, ymm8, 0x11",
                    "vpxor ymm4, ymm4, ymm5",
                    "vpxor ymm6, ymm6, ymm7",
                    "vpxor ymm0, ymm0, ymm1",
                    "vpxor ymm3, ymm3, ymm4",
                    "vpxor ymm0, ymm0, ymm6",
                    "vpxor ymm3, ymm3, ymm0",
                    "vmovdqu [{rest}], ymm3",
                    "vzeroupper",
                    fold = in(reg) FOLD.as_ptr(),
                    rest = in(reg) rest.as_mut_ptr(),
                    crc = in(reg) !crc,
                    ahead = in(reg) ahead,
                    source = inout(reg) source => _,
                    target = inout(reg) target => _,
                    len = inout(reg) len => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _,
                    options(nostack),
                );
            }
            // The remainder so far went into `rest`, so its own sum starts from a plain zero.
            crc32c::crc32c_append(u32::MAX, &rest)
        }
    };
}

fold_loop! {
    /// Copies and sums.
    copy_cached, "#", "vmovdqu"
}
fold_loop! {
    /// Copies and sums; the stores go past the cache, to a target aligned to [`STREAM_ALIGN`].
    copy_streaming, "prefetcht0", "vmovntdq"
}
fold_loop! {
    /// Sums alone: the stores are commented out.
    sum_only, "#", "#"
}

/// What the loops of one width are.
pub(super) struct Loops {
    /// Bytes of one step; a loop takes a multiple of it, at least two.
    step: usize,
    stream_align: usize,
    copy_cached: Fold,
    copy_streaming: Fold,
    sum_only: Fold,
    move_streaming: Move,
}

type Fold = unsafe fn(*mut u8, *const u8, usize, u32, usize) -> u32;
type Move = unsafe fn(*mut u8, *const u8, usize, usize);

static NARROW: Loops = Loops {
    step: STEP,
    stream_align: STREAM_ALIGN,
    copy_cached,
    copy_streaming,
    sum_only,
    move_streaming: plain::narrow,
};

static WIDE: Loops = Loops {
    step: wide::STEP,
    stream_align: wide::STREAM_ALIGN,
    copy_cached: wide::copy_cached,
    copy_streaming: wide::copy_streaming,
    sum_only: wide::sum_only,
    move_streaming: plain::wide,
};

/// The widest loops that this processor has, if any.
fn loops() -> &'static Loops {
    if wide::is_supported() { &WIDE } else { &NARROW }
}

/// The loops of all widths that this processor has.
#[cfg(test)]
pub(super) fn all_supported() -> Vec<&'static Loops> {
    let narrow = is_supported().then_some(&NARROW);
    let wide = wide::is_supported().then_some(&WIDE);
    narrow.into_iter().chain(wide).collect()
}

/// Copies `len` bytes and gives their sum.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source` and writable at `target`.
pub(super) unsafe fn copy(target: *mut u8, source: *const u8, len: usize) -> u32 {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().copy(target, source, len) }
}

/// Copies `len` bytes past the cache and gives their sum. A fence of stores has to follow.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source` and writable at `target`.
pub(super) unsafe fn copy_past(
    target: *mut u8,
    source: *const u8,
    len: usize,
    next: Option<Source<'_>>,
) -> u32 {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().copy_past(target, source, len, next) }
}

/// Copies `len` bytes past the cache without a sum. A fence of stores has to follow.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source` and writable at `target`.
pub(super) unsafe fn stream(
    target: *mut u8,
    source: *const u8,
    len: usize,
    next: Option<Source<'_>>,
) {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().stream(target, source, len, next) }
}

/// Continues `crc` over `len` bytes.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source`.
pub(super) unsafe fn sum(source: *const u8, len: usize, crc: u32) -> u32 {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().sum(source, len, crc) }
}

impl Loops {
    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source` and writable at
    /// `target`.
    pub(super) unsafe fn copy(&self, target: *mut u8, source: *const u8, len: usize) -> u32 {
        let (mut done, mut crc) = (0, 0);
        if len >= 2 * self.step {
            done = len / self.step * self.step;
            // SAFETY: the first bytes of the same ranges, at least two steps.
            crc = unsafe { (self.copy_cached)(target, source, done, crc, 0) };
        }
        let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
        // SAFETY: the rest of the same ranges.
        unsafe { super::bounce::<REST>(Some(to), from, len - done, crc) }
    }

    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source` and writable at
    /// `target`.
    pub(super) unsafe fn copy_past(
        &self,
        target: *mut u8,
        source: *const u8,
        len: usize,
        next: Option<Source<'_>>,
    ) -> u32 {
        let Some((head, bulk)) = self.stretch(target, len) else {
            // SAFETY: the caller's.
            return unsafe { self.copy(target, source, len) };
        };
        // SAFETY: the first bytes of the same ranges.
        let mut crc = unsafe { super::bounce::<REST>(Some(target), source, head, 0) };
        let mut done = head;
        for (len, ahead) in self.strides(source.wrapping_add(head), bulk, next) {
            let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
            // SAFETY: inside the ranges, aligned after the head, and at least two steps.
            crc = unsafe { (self.copy_streaming)(to, from, len, crc, ahead) };
            done += len;
        }
        let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
        // SAFETY: the rest of the same ranges.
        unsafe { super::bounce::<REST>(Some(to), from, len - done, crc) }
    }

    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source` and writable at
    /// `target`.
    pub(super) unsafe fn stream(
        &self,
        target: *mut u8,
        source: *const u8,
        len: usize,
        next: Option<Source<'_>>,
    ) {
        let (head, bulk) = self.stretch(target, len).unwrap_or((0, 0));
        // Nothing is the common length: an empty `rep movsb` takes as long as some hundred bytes of the loop.
        let odd_bytes = |at: usize, len: usize| {
            if len > 0 {
                // SAFETY: bytes of the same ranges.
                unsafe { super::copy_raw(target.wrapping_add(at), source.wrapping_add(at), len) }
            }
        };
        odd_bytes(0, head);
        let mut done = head;
        for (len, ahead) in self.strides(source.wrapping_add(head), bulk, next) {
            let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
            // SAFETY: inside the ranges, aligned after the head, and at least two steps.
            unsafe { (self.move_streaming)(to, from, len, ahead) };
            done += len;
        }
        odd_bytes(done, len - done);
    }

    /// What of `len` bytes can go past the cache: where it begins, aligned as the stores need it, and how long
    /// it is, at least two steps. None of few bytes.
    fn stretch(&self, target: *mut u8, len: usize) -> Option<(usize, usize)> {
        let head = target.align_offset(self.stream_align);
        let bulk = len.checked_sub(head)? / self.step * self.step;
        (bulk >= 2 * self.step).then_some((head, bulk))
    }

    /// Cuts a stretch from `source` on by what is fetched meanwhile: the lengths, and how far ahead of the source it
    /// lies. That is a page, and while the last page moves, what comes `next`.
    fn strides(
        &self,
        source: *const u8,
        len: usize,
        next: Option<Source<'_>>,
    ) -> impl Iterator<Item = (usize, usize)> {
        let strides = match next {
            // Without anything to fetch: what is fetched is what is read.
            None => [(len, if len > PAGE { PAGE } else { 0 }), (0, 0)],
            Some(next) => {
                let rest = len.checked_sub(PAGE).filter(|rest| *rest >= 2 * self.step);
                let rest = rest.unwrap_or(0);
                let last = source.addr().wrapping_add(rest);
                [(rest, PAGE), (len - rest, next.addr().wrapping_sub(last))]
            }
        };
        strides.into_iter().filter(|(len, _)| *len > 0)
    }

    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source`.
    pub(super) unsafe fn sum(&self, source: *const u8, len: usize, mut crc: u32) -> u32 {
        let mut done = 0;
        if len >= 2 * self.step {
            done = len / self.step * self.step;
            // SAFETY: the first bytes of the same range, at least two steps; nothing is stored.
            crc = unsafe { (self.sum_only)(std::ptr::null_mut(), source, done, crc, 0) };
        }
        // SAFETY: the rest of the same range.
        unsafe { super::bounce::<REST>(None, source.wrapping_add(done), len - done, crc) }
    }
}
