//! Memory of units that were moved, kept by each thread for its next ones.
//!
//! What is kept is bounded by what a unit has.

use std::cell::Cell;

use super::cut::Part;
use super::run::Results;

thread_local! {
    static KEPT: Cell<Option<Unit>> = const { Cell::new(None) };
}

/// Parts that one thread moves, and what comes of them. Empty when it is taken.
#[derive(Debug, Default)]
pub(super) struct Unit {
    pub(super) parts: Vec<Part>,
    pub(super) moved: Results,
}

impl Unit {
    /// The thread's, or a new one.
    pub(super) fn take() -> Self {
        let kept = KEPT.try_with(Cell::take).ok().flatten();
        kept.unwrap_or_default()
    }

    /// Gives it back for the next one.
    pub(super) fn give(mut self) {
        self.parts.clear();
        self.moved.clear();
        // A thread that ends keeps nothing.
        let _ending = KEPT.try_with(|kept| kept.set(Some(self)));
    }
}
