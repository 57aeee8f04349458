//! What an owner's pings may cost: they can't grow what is kept here without end, and they are no progress
//! of a frame that is to be answered.

use super::super::conn::MAX_UNSENT_HEADS;
use super::super::frame::HEADER_LEN;

/// The pings of one connection.
#[derive(Debug, Default)]
pub(super) struct Pings {
    /// Bytes of pongs that were queued since all of them were sent.
    pongs: usize,
    /// Where the last of them ends.
    end: u64,
    /// Bytes of pings that came and were not told from others yet.
    new: usize,
    /// Bytes that counted as progress and then turned out to be the beginning of a ping.
    mistaken: usize,
}

impl Pings {
    /// A ping came; its pong is queued and ends there.
    pub(super) fn add(&mut self, end: u64) {
        self.pongs += HEADER_LEN;
        self.end = end;
        self.new += HEADER_LEN;
    }

    /// Whether so many pongs wait that nothing is received until they are sent; so many bytes were.
    pub(super) fn wait(&mut self, sent: u64) -> bool {
        if sent >= self.end {
            self.pongs = 0;
        }
        self.pongs > MAX_UNSENT_HEADS
    }

    /// Whether there was something else among so many bytes that came.
    pub(super) fn leave_some_of(&mut self, bytes: usize) -> bool {
        let pings = self.mistaken + std::mem::take(&mut self.new);
        self.mistaken = pings.saturating_sub(bytes);
        bytes > pings
    }
}
