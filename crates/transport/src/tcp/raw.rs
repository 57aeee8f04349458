//! Vectored socket calls on bytes by address: the unsafe part of the tcp transport.
//!
//! Invariant: every [`Span`] handed to these calls lies inside memory that stays mapped for the call:
//! the local slices of a job that is not done, a region that is pinned, or a buffer that the caller
//! borrows. The kernel moves the bytes; no reference to them is made, so that peers may touch the same
//! places meanwhile.

#![expect(
    unsafe_code,
    reason = "hands addresses to the kernel; see the module's text"
)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use crate::racy::{self, Source, Target};

/// Bytes by address. Laid out as the system's `iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) addr: usize,
    pub(super) len: usize,
}

const _: () = assert!(
    size_of::<Span>() == size_of::<libc::iovec>()
        && align_of::<Span>() == align_of::<libc::iovec>()
);

/// The most spans that one call takes.
pub(super) const MAX_SPANS: usize = 1024;

impl Span {
    /// The bytes of a private buffer. It must stay borrowed while the span is in use.
    pub(super) fn of(bytes: &[u8]) -> Self {
        Self {
            addr: bytes.as_ptr() as usize,
            len: bytes.len(),
        }
    }

    /// A private buffer to be filled.
    pub(super) fn of_mut(bytes: &mut [u8]) -> Self {
        Self {
            addr: bytes.as_mut_ptr() as usize,
            len: bytes.len(),
        }
    }

    /// The bytes from `offset`, at most `len` of them.
    pub(super) fn part(self, offset: usize, len: usize) -> Self {
        debug_assert!(offset <= self.len);
        Self {
            addr: self.addr + offset,
            len: len.min(self.len - offset),
        }
    }
}

fn message(spans: &[Span]) -> libc::msghdr {
    // SAFETY: all zeros is a valid message header: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = spans.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = spans.len().min(MAX_SPANS) as _;
    message
}

fn moved(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sends what the socket takes of these bytes, without blocking. `more` says that bytes which belong
/// to the same packet follow at once.
pub(super) fn send(socket: BorrowedFd<'_>, spans: &[Span], more: bool) -> io::Result<usize> {
    let message = message(spans);
    let mut flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    if more {
        flags |= libc::MSG_MORE;
    }
    loop {
        // SAFETY: the header names spans that are mapped for the call (the module's invariant).
        let sent = moved(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) });
        match sent {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            sent => return sent,
        }
    }
}

/// Receives what is there into these places, without blocking. Zero is the end of the stream.
pub(super) fn receive(socket: BorrowedFd<'_>, spans: &[Span]) -> io::Result<usize> {
    let mut message = message(spans);
    loop {
        // SAFETY: the header names spans that are mapped and writable for the call (the module's
        // invariant).
        let received = moved(unsafe {
            libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT)
        });
        match received {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => return received,
        }
    }
}

/// Bytes that the socket took and that the peer's system has not acknowledged yet.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut waiting: libc::c_int = 0;
    // SAFETY: the call writes one integer of this type, to a place that outlives it.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut waiting) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(u64::try_from(waiting).unwrap_or_default())
}

/// Copies bytes that came together with a header to where they belong; both have one length.
pub(super) fn place(bytes: &[u8], to: Span) {
    // SAFETY: mapped and writable for the call (the module's invariant).
    let target = unsafe { Target::new(to.addr as *mut u8, to.len) };
    racy::copy(target, Source::from_slice(bytes));
}

/// Appends bytes by address to a buffer.
pub(super) fn append(to: &mut Vec<u8>, from: Span) {
    let start = to.len();
    to.resize(start + from.len, 0);
    // SAFETY: mapped and readable for the call (the module's invariant).
    let source = unsafe { Source::new(from.addr as *const u8, from.len) };
    racy::copy(Target::from_slice(&mut to[start..]), source);
}

/// Continues a CRC-32C over bytes by address.
pub(super) fn checksum(crc: u32, of: Span) -> u32 {
    // SAFETY: mapped and readable for the call (the module's invariant).
    let source = unsafe { Source::new(of.addr as *const u8, of.len) };
    racy::crc(source, crc)
}
