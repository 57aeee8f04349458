//! Memory for copies of whole objects that callers keep, used again for the next ones.
//!
//! New memory costs a page fault for every 4 KiB, which is more than copying them. So what a caller lets go of is
//! kept, up to [`KEPT`] bytes, and given to the next copy of about that size. A copy is handed out only
//! when all of it was read, so nobody sees what was there before.

use std::sync::{Arc, Weak};

use layercake_transport::{Access, Engine, Error, LocalSlice, Memory};
use parking_lot::Mutex;

/// Bytes that are kept at most.
const KEPT: u64 = 64 << 20;

/// Less than this is not worth keeping: the allocator does that.
const SMALLEST: u64 = 64 << 10;

/// Memory of one engine that waits for a next use.
#[derive(Debug, Default)]
pub(super) struct Copies(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    memories: Vec<Memory>,
    bytes: u64,
}

/// Bytes that their holder reads and writes as it likes.
#[derive(Debug)]
pub(crate) struct ObjectCopy {
    memory: Memory,
    len: u64,
    home: Weak<Copies>,
}

impl Copies {
    /// Room for `len` bytes, with anything in it.
    pub(super) fn room(self: &Arc<Self>, engine: &Engine, len: u64) -> Result<ObjectCopy, Error> {
        let memory = match self.take(len) {
            Some(memory) => memory,
            None => allocate(engine, len)?,
        };
        Ok(ObjectCopy {
            memory,
            len,
            home: Arc::downgrade(self),
        })
    }

    /// The smallest that fits, unless most of it would be left over.
    fn take(&self, len: u64) -> Option<Memory> {
        let mut kept = self.0.lock();
        let fits = |memory: &Memory| memory.len() >= len && memory.len() / 2 <= len;
        let (at, _) = kept
            .memories
            .iter()
            .enumerate()
            .filter(|(_, memory)| fits(memory))
            .min_by_key(|(_, memory)| memory.len())?;
        let memory = kept.memories.swap_remove(at);
        kept.bytes -= memory.len();
        Some(memory)
    }
}

/// New memory, somewhat larger, so that it fits the next one too.
fn allocate(engine: &Engine, len: u64) -> Result<Memory, Error> {
    let rounded = if len < SMALLEST {
        len
    } else {
        let step = (len.next_power_of_two() / 8).max(1);
        len.checked_next_multiple_of(step).unwrap_or(len)
    };
    let zeros = vec![0_u8; usize::try_from(rounded).unwrap_or(usize::MAX)];
    engine.register(zeros.into(), Access::LocalOnly)
}

impl ObjectCopy {
    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.memory.addr()
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// All of it, for a transfer.
    pub(crate) fn slice(&self) -> Result<LocalSlice, Error> {
        self.memory.slice(0, self.len)
    }
}

impl Drop for ObjectCopy {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade() else {
            return;
        };
        // In a forked child the lock may be held for ever.
        let Some(mut kept) = home.0.try_lock() else {
            return;
        };
        let len = self.memory.len();
        if len >= SMALLEST && kept.bytes + len <= KEPT {
            kept.bytes += len;
            kept.memories.push(self.memory.clone());
        }
    }
}
