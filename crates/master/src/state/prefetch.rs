//! Tells the processor what will be read soon.
//!
//! # Invariant
//!
//! A hint and no access: it reads no value, can't fail whatever the address is, and orders nothing. The
//! program does the same with and without it; processors for which there is no stable intrinsic do
//! without.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "the intrinsic takes a raw pointer")
)]

/// Bytes that are fetched at once.
const LINE: usize = 64;

/// Fetches all of a value into the cache.
pub(crate) fn prefetch<T: ?Sized>(value: &T) {
    let first = std::ptr::from_ref(value).cast::<u8>();
    let len = size_of_val(value);
    let skew = first.addr() % LINE;
    for at in (0..skew + len).step_by(LINE) {
        hint(first.wrapping_add(at).wrapping_sub(skew));
    }
}

#[cfg(target_arch = "x86_64")]
fn hint(line: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction accepts every address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) }
}

#[cfg(not(target_arch = "x86_64"))]
fn hint(_line: *const u8) {}
