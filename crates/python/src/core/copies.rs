//! Memory for copies of whole objects that callers keep, used again for the next ones.
//!
//! New memory costs a page fault for every 4 KiB, which is more than copying them. So what a caller lets go of is
//! kept, up to [`KEPT`] bytes, and given to the next copy of about that size. A copy is handed out only
//! when all of it was read, so nobody sees what was there before.

use std::sync::{Arc, Weak};

use layercake_transport::{Error, LocalSlice};
use parking_lot::Mutex;

use crate::memory::Room;

/// Bytes that are kept at most.
const KEPT: u64 = 64 << 20;

/// Less than this is not worth keeping: the allocator does that.
const SMALLEST: u64 = 64 << 10;

/// Memory of one engine that waits for a next use.
#[derive(Debug, Default)]
pub(super) struct Copies(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    rooms: Vec<Room>,
    bytes: u64,
}

/// Bytes that their holder reads and writes as it likes.
#[derive(Debug)]
pub(crate) struct ObjectCopy {
    /// Always there until dropped.
    room: Option<Room>,
    addr: usize,
    len: u64,
    home: Weak<Copies>,
}

impl Copies {
    /// Room for `len` bytes, with anything in it.
    pub(super) fn room(self: &Arc<Self>, len: u64) -> Result<ObjectCopy, Error> {
        let room = match self.take(len) {
            Some(room) => room,
            None => Room::new(rounded(len))?,
        };
        Ok(ObjectCopy {
            addr: room.addr(),
            room: Some(room),
            len,
            home: Arc::downgrade(self),
        })
    }

    /// The smallest that fits, unless most of it would be left over.
    fn take(&self, len: u64) -> Option<Room> {
        let mut kept = self.0.lock();
        let fits = |room: &Room| room.len() >= len && room.len() / 2 <= len;
        let (at, _) = kept
            .rooms
            .iter()
            .enumerate()
            .filter(|(_, room)| fits(room))
            .min_by_key(|(_, room)| room.len())?;
        let room = kept.rooms.swap_remove(at);
        kept.bytes -= room.len();
        Some(room)
    }
}

/// Somewhat larger, so that it fits the next one too.
fn rounded(len: u64) -> u64 {
    if len < SMALLEST {
        return len;
    }
    let step = len.checked_next_power_of_two().map_or(1, |power| power / 8);
    len.checked_next_multiple_of(step).unwrap_or(len)
}

impl ObjectCopy {
    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// All of it, for a transfer that ends before the copy is dropped.
    pub(crate) fn slice(&mut self) -> Option<LocalSlice> {
        let room = self.room.as_mut()?;
        Some(room.slice(self.len))
    }
}

impl Drop for ObjectCopy {
    fn drop(&mut self) {
        let Some((home, room)) = self.home.upgrade().zip(self.room.take()) else {
            return;
        };
        let mut kept = home.0.lock();
        let len = room.len();
        if len >= SMALLEST && kept.bytes + len <= KEPT {
            kept.bytes += len;
            kept.rooms.push(room);
        }
    }
}
