//! Registered memory for headers and small copies, kept for the next call.
//!
//! A buffer goes back to the pool only by [`Scratch::recycle`], when no transfer touches it any more.
//! One that is dropped earlier (its call was cancelled) is freed by the transport when the last
//! transfer on it is done. With each goes a plain vector, in which bytes are put together that are then
//! copied in at one go.

use std::sync::Arc;

use bytes::Bytes;
use layercake_transport::{Access, Engine, LocalSlice, Memory};
use parking_lot::Mutex;

use crate::error::StoreError;

/// Buffers that are kept, and their greatest length in bytes.
const KEPT: usize = 8;
const MAX_KEPT_LEN: u64 = 4 << 20;
const MIN_LEN: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct ScratchPool {
    engine: Engine,
    free: Free,
}

/// What is kept.
type Free = Arc<Mutex<Vec<(Memory, Vec<u8>)>>>;

/// A buffer of a call.
#[derive(Debug)]
pub(crate) struct Scratch {
    memory: Memory,
    staged: Vec<u8>,
    free: Free,
}

impl ScratchPool {
    pub(crate) fn new(engine: Engine) -> Self {
        Self {
            engine,
            free: Arc::default(),
        }
    }

    /// A buffer of at least `len` bytes, with anything in it.
    pub(crate) fn take(&self, len: u64) -> Result<Scratch, StoreError> {
        let kept = {
            let mut free = self.free.lock();
            let fit = free.iter().position(|(memory, _)| memory.len() >= len);
            fit.map(|at| free.swap_remove(at))
        };
        let (memory, staged) = match kept {
            Some(kept) => kept,
            None => (self.allocate(len)?, Vec::new()),
        };
        Ok(Scratch {
            memory,
            staged,
            free: Arc::clone(&self.free),
        })
    }

    fn allocate(&self, len: u64) -> Result<Memory, StoreError> {
        let len = if len <= MAX_KEPT_LEN {
            len.next_power_of_two().max(MIN_LEN)
        } else {
            len
        };
        let bytes = usize::try_from(len).map_err(|_| StoreError::SegmentTooLarge {
            len,
            available: usize::MAX as u64,
            limited_by: "the address space",
        })?;
        Ok(self
            .engine
            .register(vec![0_u8; bytes].into(), Access::LocalOnly)?)
    }
}

impl Scratch {
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Result<LocalSlice, StoreError> {
        Ok(self.memory.slice(offset, len)?)
    }

    pub(crate) fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        Ok(self.memory.copy_in(offset, bytes)?)
    }

    pub(crate) fn copy_out(&self, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        Ok(self.memory.copy_out(offset, bytes)?)
    }

    /// A copy of a part.
    pub(crate) fn bytes(&self, offset: u64, len: u64) -> Result<Bytes, StoreError> {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        self.copy_out(offset, &mut bytes)?;
        Ok(bytes.into())
    }

    /// `len` bytes that stand for those of the buffer from `at` on until they are
    /// [copied in](Self::copy_staged). They hold anything.
    pub(crate) fn stage(&mut self, at: usize, len: usize) -> &mut [u8] {
        if self.staged.len() < at + len {
            self.staged.resize(at + len, 0);
        }
        &mut self.staged[at..at + len]
    }

    /// Copies the first `len` bytes in that were staged.
    pub(crate) fn copy_staged(&self, len: usize) -> Result<(), StoreError> {
        self.copy_in(0, &self.staged[..len])
    }

    /// Gives the buffer back. The caller knows that no transfer touches it.
    pub(crate) fn recycle(self) {
        let mut free = self.free.lock();
        if free.len() < KEPT && self.memory.len() <= MAX_KEPT_LEN {
            free.push((self.memory, self.staged));
        }
    }
}
