//! Whether the memory that a session writes from still holds what was meant.
//!
//! Bytes are copied while their owner does other things. An owner that can't wait any longer for the copies to end
//! says so *before* it changes the memory, and what is not over by then counts as not written: it is neither
//! published nor committed. A copy that saw changed bytes finds the mark when it is looked at, since that is after the copy.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Memory that ranges are written from, as far as its owner vouches for it. Clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Source(Arc<AtomicBool>);

impl Source {
    /// One that is vouched for.
    pub fn new() -> Self {
        Self::default()
    }

    /// Its owner no longer vouches for it, for good: its bytes may change when this has returned. Writes from it
    /// that are not over by now fail with [`StoreError::SourceWithdrawn`](crate::StoreError::SourceWithdrawn).
    pub fn withdraw(&self) {
        self.0.store(true, Ordering::Relaxed);
        // The owner's writes come behind the mark, for whoever reads them.
        fence(Ordering::SeqCst);
    }

    /// Whether it was. `false` vouches for what was read before the call.
    pub fn is_withdrawn(&self) -> bool {
        // Whoever has read changed bytes before reads the mark behind them.
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}
