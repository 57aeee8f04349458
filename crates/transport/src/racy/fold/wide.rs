//! The loops of [`super`] on 512-bit registers, where the processor has them: half the instructions
//! for a byte, and a checksum in cache takes half the time.
//!
//! Kept apart since hardly an instruction has the same name: three terms are added by one, moves and
//! broadcasts tell their width. Only the first sixteen registers are used.

use std::arch::asm;

use super::fold_constants;

/// Bytes of one step.
pub(super) const STEP: usize = 256;

/// Alignment that stores past the cache need.
pub(super) const STREAM_ALIGN: usize = 64;

/// By a step, and by what lies between each of the first registers and the last.
static FOLD: [[u64; 2]; 4] = [
    fold_constants(STEP),
    fold_constants(STEP * 3 / 4),
    fold_constants(STEP / 2),
    fold_constants(STEP / 4),
];

/// Whether this processor has what the loops below use.
pub(super) fn is_supported() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("vpclmulqdq")
}

macro_rules! fold_loop {
    ($(#[$doc:meta])* $name:ident, $ahead:literal, $store:literal) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The processor is supported; `len` is a multiple of [`STEP`] and at least two of them; `len`
        /// bytes are mapped readable at `source` and, where the loop stores, writable at `target`.
        #[inline(never)]
        pub(super) unsafe fn $name(
            target: *mut u8,
            source: *const u8,
            len: usize,
            crc: u32,
            ahead: usize,
        ) -> u32 {
            let mut rest = [0_u8; STEP / 4];
            // SAFETY: as for the loops of 256 bits, with 256 bytes a step and 64 in `rest`.
            unsafe {
                asm!(
                    "vbroadcasti32x4 zmm8, [{fold}]",
                    "vmovd xmm9, {crc:e}",
                    concat!($ahead, " [{source} + {ahead}]"),
                    concat!($ahead, " [{source} + {ahead} + 64]"),
                    concat!($ahead, " [{source} + {ahead} + 128]"),
                    concat!($ahead, " [{source} + {ahead} + 192]"),
                    "vmovdqu64 zmm0, [{source}]",
                    "vmovdqu64 zmm1, [{source} + 64]",
                    "vmovdqu64 zmm2, [{source} + 128]",
                    "vmovdqu64 zmm3, [{source} + 192]",
                    concat!($store, " [{target}], zmm0"),
                    concat!($store, " [{target} + 64], zmm1"),
                    concat!($store, " [{target} + 128], zmm2"),
                    concat!($store, " [{target} + 192], zmm3"),
                    "vpxorq zmm0, zmm0, zmm9",
                    "add {source}, 256",
                    "add {target}, 256",
                    "sub {len}, 256",
                    "2:",
                    concat!($ahead, " [{source} + {ahead}]"),
                    concat!($ahead, " [{source} + {ahead} + 64]"),
                    concat!($ahead, " [{source} + {ahead} + 128]"),
                    concat!($ahead, " [{source} + {ahead} + 192]"),
                    "vmovdqu64 zmm10, [{source}]",
                    "vmovdqu64 zmm11, [{source} + 64]",
                    "vmovdqu64 zmm12, [{source} + 128]",
                    "vmovdqu64 zmm13, [{source} + 192]",
                    "vpclmulqdq zmm4, zmm0, zmm8, 0x00",
                    "vpclmulqdq zmm0, zmm0, zmm8, 0x11",
                    "vpclmulqdq zmm5, zmm1, zmm8, 0x00",
                    "vpclmulqdq zmm1, zmm1, zmm8, 0x11",
                    "vpclmulqdq zmm6, zmm2, zmm8, 0x00",
                    "vpclmulqdq zmm2, zmm2, zmm8, 0x11",
                    "vpclmulqdq zmm7, zmm3, zmm8, 0x00",
                    "vpclmulqdq zmm3, zmm3, zmm8, 0x11",
                    concat!($store, " [{target}], zmm10"),
                    concat!($store, " [{target} + 64], zmm11"),
                    concat!($store, " [{target} + 128], zmm12"),
                    concat!($store, " [{target} + 192], zmm13"),
                    "vpternlogq zmm0, zmm4, zmm10, 0x96",
                    "vpternlogq zmm1, zmm5, zmm11, 0x96",
                    "vpternlogq zmm2, zmm6, zmm12, 0x96",
                    "vpternlogq zmm3, zmm7, zmm13, 0x96",
                    "add {source}, 256",
                    "add {target}, 256",
                    "sub {len}, 256",
                    "jnz 2b",
                    "vbroadcasti32x4 zmm8, [{fold} + 16]",
                    "vpclmulqdq zmm4, zmm0, zmm8, 0x00",
                    "vpclmulqdq zmm5, zmm0, zmm8, 0x11",
                    "vbroadcasti32x4 zmm8, [{fold} + 32]",
                    "vpclmulqdq zmm6, zmm1, zmm8, 0x00",
                    "vpclmulqdq zmm7, zmm1, zmm8, 0x11",
                    "vbroadcasti32x4 zmm8, [{fold} + 48]",
                    "vpclmulqdq zmm0, zmm2, zmm8, 0x00",
                    "vpclmulqdq zmm1, zmm2, zmm8, 0x11",
                    "vpternlogq zmm3, zmm4, zmm5, 0x96",
                    "vpternlogq zmm0, zmm6, zmm7, 0x96",
                    "vpternlogq zmm3, zmm0, zmm1, 0x96",
                    "vmovdqu64 [{rest}], zmm3",
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
    copy_cached, "#", "vmovdqu64"
}
fold_loop! {
    /// Copies and sums; the stores go past the cache, to a target aligned to [`STREAM_ALIGN`].
    copy_streaming, "prefetcht0", "vmovntdq"
}
fold_loop! {
    /// Sums alone: the stores are commented out.
    sum_only, "#", "#"
}
