//! Memory of this module's own, for one call or for an object that keeps it. No engine knows it: registering
//! costs more than it saves, and could be refused because of a buffer that is registered and long freed.

use layercake_transport::{Error, LocalSlice};

/// Bytes on the heap. They never move.
#[derive(Debug)]
pub(crate) struct Room {
    /// Of no length, or all zeros; its capacity is what counts.
    bytes: Vec<u8>,
    len: u64,
}

impl Room {
    /// So many bytes, with anything in them. Refused if they can't be had.
    pub(crate) fn new(len: u64) -> Result<Self, Error> {
        let mut bytes = Vec::new();
        let reserved = usize::try_from(len).map(|len| bytes.try_reserve_exact(len));
        match reserved {
            Ok(Ok(())) => Ok(Self { bytes, len }),
            _ => Err(Error::Map {
                what: "the heap",
                len,
                source: std::io::ErrorKind::OutOfMemory.into(),
            }),
        }
    }

    /// So many zeros. Refused if they can't be had.
    pub(crate) fn zeros(len: u64) -> Result<Self, Error> {
        let mut room = Self::new(len)?;
        let capacity = room.bytes.capacity();
        room.bytes
            .resize(usize::try_from(len).unwrap_or(capacity), 0);
        Ok(room)
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.bytes.as_ptr() as usize
    }

    /// Bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The first `len` bytes, or all, for transfers that end before the room is dropped.
    pub(crate) fn slice(&mut self, len: u64) -> LocalSlice {
        let start = self.bytes.as_mut_ptr() as usize;
        // SAFETY: as many bytes were reserved, and stay where they are until the room is dropped, which is after
        // the transfers: those of a call end before it does.
        unsafe { LocalSlice::from_raw(start, len.min(self.len)) }
    }
}
