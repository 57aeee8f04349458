//! Copy and CRC-32C in one pass, by carry-less multiplication on 256-bit registers, or ([`wide`]) on
//! 512-bit ones.
//!
//! A checksum costs little when it is taken from the registers through which the bytes move anyway,
//! while the loads of the next ones are under way. Four registers hold 128 bytes of remainder; each
//! step moves them 1024 bits on by multiplying with two constants and adds the next 128 bytes. What is
//! left in the end is a 128-byte message with the same remainder, which the `crc32c` crate reduces.
//!
//! Large copies store past the cache and fetch a page ahead, which also walks the page tables early:
//! measured on memory larger than the cache, that makes up for most of what the multiplications cost
//! (64 KiB pieces: 84 to 88 per cent of a plain copy, 1 MiB: 92; with cached stores 75 and 82).
//!
//! Bits of a CRC are reflected: in a word, the lowest bit is the highest power. The product of two
//! such words comes out one power too low, hence the `- 1` in the exponents below.

use std::arch::asm;

mod plain;
mod wide;

/// Bytes of one step.
const STEP: usize = 128;

/// The most bytes that the loops leave over, those of [`wide`] included.
const REST: usize = 2 * wide::STEP;

/// From this many bytes on, stores go past the cache.
pub(super) const STREAM_FROM: usize = 32 << 10;

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

static FOLD: [u64; 2] = fold_constants(STEP);

/// Whether this processor has what the loops below use.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("vpclmulqdq")
}

macro_rules! fold_loop {
    ($(#[$doc:meta])* $name:ident, $ahead:literal, $store:literal, $fence:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The processor is supported; `len` is a multiple of [`STEP`] and at least two of them; `len`
        /// bytes are mapped readable at `source` and, where the loop stores, writable at `target`.
        #[inline(never)]
        unsafe fn $name(target: *mut u8, source: *const u8, len: usize, crc: u32) -> u32 {
            let mut rest = [0_u8; STEP];
            // SAFETY: reads and writes step through exactly `len` bytes of both ranges, then write
            // the 128 bytes of `rest`; fetching ahead touches nothing, mapped or not. Whole vector registers are named as clobbered by their low
            // parts; `vzeroupper` leaves none of the upper parts in use.
            unsafe {
                asm!(
                    "vbroadcasti128 ymm8, [{fold}]",
                    "vmovd xmm9, {crc:e}",
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
                    concat!($ahead, " [{source} + 4096]"),
                    concat!($ahead, " [{source} + 4160]"),
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
                    "vmovdqu [{rest}], ymm0",
                    "vmovdqu [{rest} + 32], ymm1",
                    "vmovdqu [{rest} + 64], ymm2",
                    "vmovdqu [{rest} + 96], ymm3",
                    $fence,
                    "vzeroupper",
                    fold = in(reg) FOLD.as_ptr(),
                    rest = in(reg) rest.as_mut_ptr(),
                    crc = in(reg) !crc,
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
    copy_cached, "#", "vmovdqu", ""
}
fold_loop! {
    /// Copies and sums; the stores go past the cache, to a target aligned to [`STREAM_ALIGN`].
    copy_streaming, "prefetcht0", "vmovntdq", "sfence"
}
fold_loop! {
    /// Sums alone: the stores are commented out.
    sum_only, "#", "#", ""
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

type Fold = unsafe fn(*mut u8, *const u8, usize, u32) -> u32;
type Move = unsafe fn(*mut u8, *const u8, usize);

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

/// Copies `len` bytes and continues `crc` over them.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source` and writable at `target`.
pub(super) unsafe fn copy(target: *mut u8, source: *const u8, len: usize, crc: u32) -> u32 {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().copy(target, source, len, crc) }
}

/// Copies `len` bytes without a sum, past the cache if they are many.
///
/// # Safety
/// [`is_supported`]; `len` bytes are mapped readable at `source` and writable at `target`.
pub(super) unsafe fn stream(target: *mut u8, source: *const u8, len: usize) {
    // SAFETY: the caller's; `loops` asked for the rest.
    unsafe { loops().stream(target, source, len) }
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
    pub(super) unsafe fn copy(
        &self,
        target: *mut u8,
        source: *const u8,
        len: usize,
        mut crc: u32,
    ) -> u32 {
        let mut done = 0;
        if let Some((head, bulk)) = self.stretch(target, len) {
            // SAFETY: the first bytes of the same ranges.
            crc = unsafe { super::bounce::<REST>(Some(target), source, head, crc) };
            let (to, from) = (target.wrapping_add(head), source.wrapping_add(head));
            // SAFETY: inside the ranges, aligned after the head, and at least two steps.
            crc = unsafe { (self.copy_streaming)(to, from, bulk, crc) };
            done = head + bulk;
        } else if len >= 2 * self.step {
            done = len / self.step * self.step;
            // SAFETY: the first bytes of the same ranges, at least two steps.
            crc = unsafe { (self.copy_cached)(target, source, done, crc) };
        }
        let (to, from) = (target.wrapping_add(done), source.wrapping_add(done));
        // SAFETY: the rest of the same ranges.
        unsafe { super::bounce::<REST>(Some(to), from, len - done, crc) }
    }

    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source` and writable at
    /// `target`.
    pub(super) unsafe fn stream(&self, target: *mut u8, source: *const u8, len: usize) {
        let (head, bulk) = self.stretch(target, len).unwrap_or((0, 0));
        // Nothing is the common length: an empty `rep movsb` takes as long as some hundred bytes of the loop.
        let odd_bytes = |at: usize, len: usize| {
            if len > 0 {
                // SAFETY: bytes of the same ranges.
                unsafe { super::copy_raw(target.wrapping_add(at), source.wrapping_add(at), len) }
            }
        };
        odd_bytes(0, head);
        if bulk > 0 {
            let (to, from) = (target.wrapping_add(head), source.wrapping_add(head));
            // SAFETY: inside the ranges, aligned after the head, and at least two steps.
            unsafe { (self.move_streaming)(to, from, bulk) };
        }
        odd_bytes(head + bulk, len - head - bulk);
    }

    /// What of `len` bytes goes past the cache: where it begins, aligned as the stores need it, and how long
    /// it is, at least two steps. None of few bytes.
    fn stretch(&self, target: *mut u8, len: usize) -> Option<(usize, usize)> {
        if len < STREAM_FROM {
            return None;
        }
        let head = target.align_offset(self.stream_align);
        let bulk = len.checked_sub(head)? / self.step * self.step;
        (bulk >= 2 * self.step).then_some((head, bulk))
    }

    /// # Safety
    /// The processor has these loops; `len` bytes are mapped readable at `source`.
    pub(super) unsafe fn sum(&self, source: *const u8, len: usize, mut crc: u32) -> u32 {
        let mut done = 0;
        if len >= 2 * self.step {
            done = len / self.step * self.step;
            // SAFETY: the first bytes of the same range, at least two steps; nothing is stored.
            crc = unsafe { (self.sum_only)(std::ptr::null_mut(), source, done, crc) };
        }
        // SAFETY: the rest of the same range.
        unsafe { super::bounce::<REST>(None, source.wrapping_add(done), len - done, crc) }
    }
}
