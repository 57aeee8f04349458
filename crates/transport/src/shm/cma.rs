//! Cross-memory attach: one system call copies between this process and another's memory by address.
//!
//! For memory that was not allocated as a shared file, an engine's tensors say. The kernel checks the
//! addresses of both sides and the right to touch the other process; a wrong remote address is an
//! error, never a fault. Ranges go in vectors; a call may move a part only, at the first range that it
//! can't, so calls are repeated behind it.
//!
//! Invariant: the local spans are mapped while the call runs, which their makers proved; the remote
//! ranges are numbers that the kernel checks. What they are *worth* is for the caller to know: the
//! region's entry is validated before and after, the owner keeps the memory while a slot is raised,
//! and a process id stays that of the owner while it is there (the id was given by the kernel for the
//! owner's socket, and is not reused before the process is gone). So the caller asks whether it is
//! before each call.
//!
//! Not guarded: these calls name a process by id, and there is no form of them that takes a process
//! descriptor. An owner that ends after that was asked, is reaped, and has its id given to another
//! process of the same user before the call is made, all in a moment, would have that process read or
//! written instead, if it has memory at the same address. A kernel hands out ids in turn, so that takes
//! as many new processes as there are ids.

#![expect(
    unsafe_code,
    reason = "process_vm_readv and process_vm_writev; see the module's text"
)]

use std::io;

use rustix::process::Pid;

use crate::racy::{Source, Target};

/// Ranges per system call; the kernel's limit.
const MAX_RANGES: usize = 1024;

/// Which way bytes go between this process and the other, range by range.
#[derive(Clone, Copy, Debug)]
pub(super) enum Range<'a> {
    /// From the other process's memory.
    Read { remote: u64, local: Target<'a> },
    /// Into the other process's memory.
    Write { remote: u64, local: Source<'a> },
}

/// Why a range was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The kernel does not let this process touch the other; nothing moved.
    Forbidden,
    /// The other process is gone.
    Gone,
    /// The other process has no such memory, or not with that access.
    BadAddress,
}

/// Moves the ranges, all of one direction, in order; one result for each. `moving` is asked before
/// every call whether to go on; if not, what is left is [`Failure::Gone`].
pub(super) fn transfer(
    pid: Pid,
    ranges: &[Range<'_>],
    mut may_go_on: impl FnMut() -> bool,
) -> Vec<Result<(), Failure>> {
    let mut results = Vec::with_capacity(ranges.len());
    // Bytes of the first range that is not finished which have moved already.
    let mut moved_of_first = 0;
    while results.len() < ranges.len() {
        if !may_go_on() {
            results.resize(ranges.len(), Err(Failure::Gone));
            break;
        }
        let left = &ranges[results.len()..];
        match call(pid, left, moved_of_first) {
            Ok(moved) => advance(left, moved, &mut moved_of_first, &mut results),
            Err(Failure::BadAddress) => {
                results.push(Err(Failure::BadAddress));
                moved_of_first = 0;
            }
            Err(failure) => results.resize(ranges.len(), Err(failure)),
        }
    }
    results
}

/// Notes what a call that moved that many bytes finished.
fn advance(
    left: &[Range<'_>],
    mut moved: usize,
    moved_of_first: &mut usize,
    results: &mut Vec<Result<(), Failure>>,
) {
    if moved == 0 {
        // The kernel stopped at the very first byte: as if it had said so.
        results.push(Err(Failure::BadAddress));
        *moved_of_first = 0;
        return;
    }
    for range in left {
        let rest = range.len() - *moved_of_first;
        if moved < rest {
            *moved_of_first += moved;
            return;
        }
        moved -= rest;
        *moved_of_first = 0;
        results.push(Ok(()));
        if moved == 0 {
            return;
        }
    }
}

impl Range<'_> {
    fn len(&self) -> usize {
        match self {
            Self::Read { local, .. } => local.len(),
            Self::Write { local, .. } => local.len(),
        }
    }

    fn addrs(&self) -> (usize, u64) {
        match self {
            Self::Read { local, remote } => (local.addr(), *remote),
            Self::Write { local, remote } => (local.addr(), *remote),
        }
    }
}

/// One system call over the first ranges, skipping bytes of the very first one.
fn call(pid: Pid, ranges: &[Range<'_>], skip: usize) -> Result<usize, Failure> {
    let (mut local, mut remote) = (Vec::new(), Vec::new());
    for (i, range) in ranges.iter().take(MAX_RANGES).enumerate() {
        let skip = if i == 0 { skip } else { 0 };
        let (near, far) = range.addrs();
        let Ok(far) = usize::try_from(far) else {
            return Err(Failure::BadAddress);
        };
        local.push(vector(near.wrapping_add(skip), range.len() - skip));
        remote.push(vector(far.wrapping_add(skip), range.len() - skip));
    }
    let count = libc::c_ulong::try_from(local.len()).expect("no more than a thousand");
    let pid = pid.as_raw_nonzero().get();
    let moved = match ranges.first() {
        None => return Ok(0),
        Some(Range::Read { .. }) => {
            // SAFETY: the local vectors are writable spans that are mapped for the call; the remote
            // ones are checked by the kernel; both counts are right.
            unsafe { libc::process_vm_readv(pid, local.as_ptr(), count, remote.as_ptr(), count, 0) }
        }
        Some(Range::Write { .. }) => {
            // SAFETY: as above, with readable local spans.
            unsafe {
                libc::process_vm_writev(pid, local.as_ptr(), count, remote.as_ptr(), count, 0)
            }
        }
    };
    usize::try_from(moved).map_err(|_| failure(&io::Error::last_os_error()))
}

fn vector(addr: usize, len: usize) -> libc::iovec {
    libc::iovec {
        iov_base: addr as *mut libc::c_void,
        iov_len: len,
    }
}

fn failure(error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::EFAULT) => Failure::BadAddress,
        Some(libc::ESRCH) => Failure::Gone,
        other => {
            if !matches!(other, Some(libc::EPERM | libc::ENOSYS)) {
                tracing::debug!(%error, "cross-memory attach failed");
            }
            // Whatever the reason, nothing moved, and another way may work.
            Failure::Forbidden
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn me() -> Pid {
        rustix::process::getpid()
    }

    fn addr(bytes: &[u8]) -> u64 {
        bytes.as_ptr() as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn ranges_move_in_full_whatever_their_number(
            lengths in vec(0..40_usize, 0..2600), seed: u8, write: bool,
        ) {
            let total: usize = lengths.iter().sum();
            let from: Vec<u8> = (0..total).map(|i| (i * 31).to_le_bytes()[0] ^ seed).collect();
            let mut to = vec![0; total];
            let mut ranges = Vec::new();
            let to_addr = addr(&to);
            let mut offset = 0;
            let mut rest = to.as_mut_slice();
            for len in lengths {
                let source = Source::from_slice(&from[offset..offset + len]);
                let (part, more) = rest.split_at_mut(len);
                rest = more;
                ranges.push(if write {
                    Range::Write { remote: to_addr + offset as u64, local: source }
                } else {
                    Range::Read { remote: source.addr() as u64, local: Target::from_slice(part) }
                });
                offset += len;
            }
            ranges.retain(|range| range.len() > 0);
            let results = transfer(me(), &ranges, || true);
            prop_assert_eq!(results.len(), ranges.len());
            prop_assert!(results.iter().all(Result::is_ok));
            prop_assert_eq!(to, from);
        }
    }

    #[test]
    fn a_bad_range_fails_alone() {
        let from: Vec<u8> = (0..=255).collect();
        let (mut one, mut two, mut three) = ([0; 100], [0; 8], [0; 50]);
        let ranges = [
            Range::Read {
                remote: addr(&from),
                local: Target::from_slice(&mut one),
            },
            Range::Read {
                remote: 4096,
                local: Target::from_slice(&mut two),
            },
            Range::Read {
                remote: addr(&from) + 100,
                local: Target::from_slice(&mut three),
            },
        ];
        let results = transfer(me(), &ranges, || true);
        assert_eq!(results, [Ok(()), Err(Failure::BadAddress), Ok(())]);
        assert_eq!(one, from[..100]);
        assert_eq!(three, from[100..150]);
        assert_eq!(two, [0; 8]);
    }

    #[test]
    fn a_range_that_ends_in_nothing_is_bad_and_the_next_goes_on() {
        // Two pages of which the second is not accessible.
        let page = rustix::param::page_size();
        let (file, _view) = super::super::raw::View::create("test", page as u64, false).unwrap();
        let map = crate::memory::Mapping::shared(&file, 2 * page, true).expect("maps past the end");
        let mut long = vec![7; page + 10];
        let mut short = vec![7; 16];
        let ranges = [
            Range::Read {
                remote: map.addr() as u64,
                local: Target::from_slice(&mut long),
            },
            Range::Read {
                remote: map.addr() as u64,
                local: Target::from_slice(&mut short),
            },
        ];
        let results = transfer(me(), &ranges, || true);
        assert_eq!(results, [Err(Failure::BadAddress), Ok(())]);
        assert_eq!(short, [0; 16]);
    }

    #[test]
    fn nobody_is_asked_when_the_owner_is_gone() {
        let mut bytes = [7; 8];
        let from = [1; 8];
        let ranges = [Range::Read {
            remote: addr(&from),
            local: Target::from_slice(&mut bytes),
        }];
        assert_eq!(transfer(me(), &ranges, || false), [Err(Failure::Gone)]);
        let nobody = Pid::from_raw(0x3FFF_FFFF).expect("positive");
        assert_eq!(transfer(nobody, &ranges, || true), [Err(Failure::Gone)]);
        assert_eq!(bytes, [7; 8]);
    }
}
