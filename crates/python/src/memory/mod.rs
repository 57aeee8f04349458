//! Memory of the caller: by address, or lent by a Python object; and memory that Python is given. The
//! crate's only unsafe code.
//!
//! A Python program hands out addresses of memory that Rust knows nothing about. Two things have to
//! hold for it, and each has one keeper:
//!
//! - *It is memory now.* The kernel is asked before an address is used: unmapped addresses, memory of
//!   a device, and read-only memory that is to be written to are refused. Registering asks once and
//!   looks only ([`check_mapped`]); a call with memory that is not registered has the kernel map the
//!   pages, as a first access would ([`check_touched`]). An object with the buffer protocol needs no
//!   such question.
//! - *It stays memory while it is used.* For a view of an object, the object is kept exported by
//!   [`Bytes`], which outlives the call. For an address it is the caller's word, as in C: registered
//!   memory must stay until it is unregistered, memory named in a call until the call returns. That is
//!   why all of this crate's calls return only when no byte of theirs moves any more.
//!
//! No reference to such memory is made here or in the transport: it may change at any moment.
#![expect(
    unsafe_code,
    reason = "addresses that Python hands over are turned into memory here"
)]

mod handle;
mod plain;
mod room;

pub(crate) use self::handle::PyBufferHandle;
pub(crate) use self::plain::PlainBuffer;
pub(crate) use self::room::Room;

use layercake_protocol::ids::MemoryKind;
use layercake_transport::{Access, Engine, LocalSlice, Memory};
use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rustix::io::Errno;
use rustix::mm::Advice;
use thiserror::Error;

use crate::args::{Bytes, BytesMut};

/// What the memory is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

/// Why memory can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Unusable {
    #[error("the address is null")]
    Null,
    #[error("0 bytes at {addr:#x}: at least 1 byte is needed")]
    Empty { addr: u64 },
    #[error("{len} bytes at {addr:#x} reach beyond the end of the address space")]
    Overflow { addr: u64, len: u64 },
    #[error(
        "{len} bytes at {addr:#x} are not memory that this process can {}: unmapped, protected, or memory of a \
         CUDA, ROCm or NPU device, which this build does not move", verb(*.of))]
    NotMapped { addr: u64, len: u64, of: Use },
}

fn verb(of: Use) -> &'static str {
    match of {
        Use::Read => "read",
        Use::Write => "write to",
    }
}

/// The pages that hold these bytes: first address, and length.
fn pages(addr: u64, len: u64) -> Result<(usize, usize), Unusable> {
    if addr == 0 {
        return Err(Unusable::Null);
    }
    if len == 0 {
        return Err(Unusable::Empty { addr });
    }
    let page = rustix::param::page_size();
    let whole = || {
        let first = usize::try_from(addr).ok()?;
        let end = first.checked_add(usize::try_from(len).ok()?)?;
        let start = first - first % page;
        Some((start, end.div_ceil(page).checked_mul(page)? - start))
    };
    whole().ok_or(Unusable::Overflow { addr, len })
}

/// Refuses addresses that this process can't read, or write to, by its list of mappings.
pub(crate) fn check_mapped(addr: u64, len: u64, of: Use) -> Result<(), Unusable> {
    let (start, len_pages) = pages(addr, len)?;
    if maps::check(start, start + len_pages, of) {
        Ok(())
    } else {
        Err(Unusable::NotMapped { addr, len, of })
    }
}

/// As [`check_mapped`], by having the kernel map the pages: far quicker for a few of them.
fn check_touched(addr: u64, len: u64, of: Use) -> Result<(), Unusable> {
    let (start, len_pages) = pages(addr, len)?;
    let advice = match of {
        Use::Read => Advice::LinuxPopulateRead,
        Use::Write => Advice::LinuxPopulateWrite,
    };
    // SAFETY: this advice changes no byte: it maps the pages as a first access by this process would,
    // and reports an error where that access would be a fault.
    match unsafe { rustix::mm::madvise(start as *mut _, len_pages, advice) } {
        Ok(()) => Ok(()),
        // Kernels before 5.14, and some that only look like Linux, don't know this advice; mappings of
        // some kinds can't be populated.
        Err(Errno::INVAL | Errno::NOSYS) => check_mapped(addr, len, of),
        Err(_) => Err(Unusable::NotMapped { addr, len, of }),
    }
}

/// Registers memory by address with an engine, for the engine's own transfers or, as `access` says,
/// for peers too. The caller vouches for it until it is unregistered.
pub(crate) fn register(
    engine: &Engine,
    addr: u64,
    len: u64,
    access: Access,
) -> Result<Memory, RegisterError> {
    check_mapped(addr, len, Use::Write)?;
    let addr = usize::try_from(addr).map_err(|_| Unusable::Overflow { addr, len })?;
    // SAFETY: the bytes are mapped, readable and writable, as was just checked; that they stay so
    // until the memory is unregistered is the contract of every Python function that registers.
    let memory = unsafe { engine.register_raw(addr, len, MemoryKind::Host, access) };
    Ok(memory?)
}

/// Why memory was not registered.
#[derive(Debug, Error)]
pub(crate) enum RegisterError {
    #[error(transparent)]
    Unusable(#[from] Unusable),
    #[error(transparent)]
    Engine(#[from] layercake_transport::Error),
}

/// Memory by address that is not registered, for one call.
pub(crate) fn unregistered(addr: u64, len: u64, of: Use) -> Result<LocalSlice, Unusable> {
    check_touched(addr, len, of)?;
    let start = usize::try_from(addr).map_err(|_| Unusable::Overflow { addr, len })?;
    // SAFETY: mapped and accessible, as was just checked; that it stays so until the call returns is
    // the contract of every Python function that takes an address, and no transfer outlives its call.
    Ok(unsafe { LocalSlice::from_raw(start, len) })
}

/// A copy of the bytes at an address.
pub(crate) fn copy_out(addr: u64, len: u64) -> Result<Vec<u8>, Unusable> {
    if len == 0 {
        return Ok(Vec::new());
    }
    check_touched(addr, len, Use::Read)?;
    let (at, size) = in_words(addr, len)?;
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(size)
        .map_err(|_| Unusable::Overflow { addr, len })?;
    // SAFETY: the source is mapped and readable, as was just checked, and stays so by the caller's word; the
    // destination was reserved.
    unsafe { std::ptr::copy(at as *const u8, bytes.as_mut_ptr(), size) };
    // SAFETY: as many bytes were written.
    unsafe { bytes.set_len(size) };
    Ok(bytes)
}

/// Copies bytes to an address.
pub(crate) fn copy_in(addr: u64, bytes: &[u8]) -> Result<(), Unusable> {
    if bytes.is_empty() {
        return Ok(());
    }
    let len = bytes.len() as u64;
    check_touched(addr, len, Use::Write)?;
    let (at, size) = in_words(addr, len)?;
    // SAFETY: the destination is mapped and writable, as was just checked, and stays so by the caller's word.
    unsafe { std::ptr::copy(bytes.as_ptr(), at as *mut u8, size) };
    Ok(())
}

fn in_words(addr: u64, len: u64) -> Result<(usize, usize), Unusable> {
    let words = usize::try_from(addr).ok().zip(usize::try_from(len).ok());
    words.ok_or(Unusable::Overflow { addr, len })
}

/// A copy of the bytes of a view.
pub(crate) fn copy_of(bytes: &Bytes) -> Result<Vec<u8>, Unusable> {
    copy_out(bytes.addr() as u64, bytes.len() as u64)
}

/// The memory of a view, to read from.
pub(crate) fn lent(bytes: &Bytes) -> Result<LocalSlice, Unusable> {
    slice_of(bytes, Use::Read)
}

/// The memory of a view, to write to.
pub(crate) fn lent_mut(bytes: &BytesMut) -> Result<LocalSlice, Unusable> {
    slice_of(bytes, Use::Write)
}

/// A `bytes` object of `len` bytes, filled by a call that is given its memory. The call must not return
/// before all transfers to it have ended.
pub(crate) fn fill_bytes(
    py: Python<'_>,
    len: u64,
    fill: impl FnOnce(LocalSlice) -> PyResult<u64>,
) -> PyResult<Bound<'_, PyBytes>> {
    let (bytes, local) = blank_bytes(py, len)?;
    fill(local)?;
    Ok(bytes)
}

/// A `bytes` object of `len` bytes without a value yet, and its memory. The caller shows the object to nobody
/// before all of it is filled and no transfer to it is under way, and else drops it then.
pub(crate) fn blank_bytes(py: Python<'_>, len: u64) -> PyResult<(Bound<'_, PyBytes>, LocalSlice)> {
    let size = ffi::Py_ssize_t::try_from(len).map_err(|_| PyMemoryError::new_err(()))?;
    // SAFETY: without bytes to copy this makes an object of that size, or sets an exception.
    let made = unsafe { ffi::PyBytes_FromStringAndSize(std::ptr::null(), size) };
    // SAFETY: what was made is a new reference, or null with an exception set.
    let made = unsafe { Bound::from_owned_ptr_or_err(py, made) }?;
    // SAFETY: it is a `bytes` object; its memory stays where it is for as long as it lives.
    let start = unsafe { ffi::PyBytes_AsString(made.as_ptr()) };
    // SAFETY: the object is nobody else's before its maker shows it, which is after the transfers.
    let local = unsafe { LocalSlice::from_raw(start as usize, len) };
    Ok((made.cast_into()?, local))
}

fn slice_of(bytes: &Bytes, of: Use) -> Result<LocalSlice, Unusable> {
    let (addr, len) = (bytes.addr() as u64, bytes.len() as u64);
    if bytes.is_by_address() {
        return unregistered(addr, len, of);
    }
    // SAFETY: the object is exported for as long as the view is there, and the view outlives the call
    // whose transfers use this slice; a view to write to was checked to be writable.
    Ok(unsafe { LocalSlice::from_raw(bytes.addr(), len) })
}

/// What `/proc` says of this process's address space.
mod maps {
    use super::Use;

    /// Whether all of `start..end` is mapped with the rights needed.
    pub(super) fn check(start: usize, end: usize, of: Use) -> bool {
        let Ok(text) = std::fs::read_to_string("/proc/self/maps") else {
            return false;
        };
        covers(&text, start, end, of)
    }

    fn covers(maps: &str, start: usize, end: usize, of: Use) -> bool {
        let mut at = start;
        for line in maps.lines() {
            let Some((from, to, rights)) = parse(line) else {
                continue;
            };
            if to <= at {
                continue;
            }
            let allowed =
                rights.starts_with('r') && (of == Use::Read || rights[1..].starts_with('w'));
            if from > at || !allowed {
                return false;
            }
            at = to;
            if at >= end {
                return true;
            }
        }
        false
    }

    /// `start-end rights …`, in ascending order of addresses.
    fn parse(line: &str) -> Option<(usize, usize, &str)> {
        let mut words = line.split(' ');
        let (from, to) = words.next()?.split_once('-')?;
        let rights = words.next()?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        Some((address(from)?, address(to)?, rights))
    }
}
