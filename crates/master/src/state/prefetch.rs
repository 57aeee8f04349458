//! Tells the processor what will be read soon.
//!
//! # Invariant
//!
//! A hint and no access: it reads no value, can't fail whatever the address is, and orders nothing. The
//! program does the same with and without it, so what lay there may have moved or gone meanwhile.
//! Processors for which there is no stable intrinsic do without.
#![cfg_attr(
    target_arch = "x86_64",
    expect(unsafe_code, reason = "the intrinsic takes a raw pointer")
)]

/// Bytes that are fetched at once.
const LINE: usize = 64;

/// Where something lies that will be read soon. By default nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Span {
    addr: usize,
    len: usize,
}

impl Span {
    /// All of a value, which is not looked at.
    pub(crate) fn of<T: ?Sized>(value: &T) -> Self {
        Self {
            addr: std::ptr::from_ref(value).addr(),
            len: size_of_val(value),
        }
    }

    /// What comes behind these elements, after `before` more of them.
    pub(crate) fn behind<T>(elements: &[T], before: usize) -> Self {
        let len = size_of::<T>();
        Self {
            addr: elements
                .as_ptr_range()
                .end
                .addr()
                .wrapping_add(before * len),
            len,
        }
    }

    /// So many bytes from its start on.
    pub(crate) fn with_len(self, len: usize) -> Self {
        Self { len, ..self }
    }

    /// Fetches it into the cache.
    pub(crate) fn fetch(self) {
        let mut line = self.addr / LINE * LINE;
        while line < self.addr + self.len {
            hint(std::ptr::without_provenance(line));
            line += LINE;
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn hint(line: *const i8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction accepts every address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
}

#[cfg(not(target_arch = "x86_64"))]
fn hint(_line: *const i8) {}
