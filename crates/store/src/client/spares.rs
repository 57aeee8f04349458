//! Memory of range calls that have ended, kept for the next ones.
//!
//! Layer after layer a call has the same shape, so what one took is right for the next, and a steady state asks
//! for no memory. What is kept is bounded: few calls, none of them large.

use parking_lot::Mutex;

/// Calls that are kept: about as many as are under way at once.
const KEPT: usize = 16;

/// The most pieces of a call that is kept.
const MOST_PIECES: usize = 4096;

/// What is kept of one kind of call.
#[derive(Debug)]
pub(crate) struct Spares<T>(Mutex<Vec<Box<T>>>);

impl<T> Default for Spares<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Default> Spares<T> {
    /// An empty call.
    #[expect(
        clippy::unnecessary_box_returns,
        reason = "the box is what serves again"
    )]
    pub(crate) fn take(&self) -> Box<T> {
        self.0.lock().pop().unwrap_or_default()
    }

    /// Gives an empty call back, which had so many pieces.
    pub(crate) fn give(&self, spare: Box<T>, pieces: usize) {
        if pieces <= MOST_PIECES {
            let mut kept = self.0.lock();
            if kept.len() < KEPT {
                kept.push(spare);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_bounded_and_comes_back() {
        let spares = Spares::<Vec<u8>>::default();
        spares.give(Box::new(Vec::with_capacity(7)), MOST_PIECES);
        assert_eq!(spares.take().capacity(), 7);
        assert_eq!(spares.take().capacity(), 0);
        spares.give(Box::new(Vec::with_capacity(7)), MOST_PIECES + 1);
        for _ in 0..=KEPT {
            spares.give(Box::default(), 1);
        }
        assert_eq!(spares.0.lock().len(), KEPT);
    }
}
