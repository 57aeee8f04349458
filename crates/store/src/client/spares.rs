//! Memory of range calls that have ended, kept for the next ones.
//!
//! Layer after layer a call has the same shape, so what one took is right for the next, and a steady state asks
//! for no memory, however many layers are under way. What is kept is bounded.

use parking_lot::Mutex;

/// Room for pieces in all calls that are kept: some megabytes.
const MOST_PIECES: usize = 32 << 10;

/// What is kept of one kind of call.
#[derive(Debug)]
pub(crate) struct Spares<T>(Mutex<Kept<T>>);

#[derive(Debug)]
struct Kept<T> {
    /// Calls with the pieces that they have room for.
    calls: Vec<(Box<T>, usize)>,
    pieces: usize,
}

impl<T> Default for Spares<T> {
    fn default() -> Self {
        Self(Mutex::new(Kept {
            calls: Vec::new(),
            pieces: 0,
        }))
    }
}

impl<T: Default> Spares<T> {
    /// An empty call.
    #[expect(
        clippy::unnecessary_box_returns,
        reason = "the box is what serves again"
    )]
    pub(crate) fn take(&self) -> Box<T> {
        let mut kept = self.0.lock();
        let Some((call, room)) = kept.calls.pop() else {
            return Box::default();
        };
        kept.pieces -= room;
        call
    }

    /// Gives an empty call back, which has room for so many pieces.
    pub(crate) fn give(&self, call: Box<T>, room: usize) {
        // An empty call takes memory, too.
        let room = room.max(16);
        let mut kept = self.0.lock();
        if kept.pieces + room <= MOST_PIECES {
            kept.pieces += room;
            kept.calls.push((call, room));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_bounded_and_comes_back() {
        let spares = Spares::<Vec<u8>>::default();
        for _ in 0..3 {
            spares.give(Box::new(Vec::with_capacity(7)), MOST_PIECES);
            spares.give(Box::new(Vec::with_capacity(8)), 1);
            assert_eq!(spares.take().capacity(), 7, "the second had no room");
            assert_eq!(spares.take().capacity(), 0);
        }
        for _ in 0..MOST_PIECES {
            spares.give(Box::default(), 0);
        }
        assert_eq!(spares.0.lock().calls.len(), MOST_PIECES / 16);
    }
}
